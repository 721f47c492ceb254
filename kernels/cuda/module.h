/* Between the files of kernels/cuda and their tests: driver entry points, matrix products, the
 * device object. */
#ifndef KN_CUDA_CUDA_INT_H
#define KN_CUDA_CUDA_INT_H

#include "kernels/core/device.h"
#include "kernels/cuda/kernels.h"

#include <cuda.h>
#include <cuda_runtime_api.h>

#define KN_CUDA_BOXES  5 /* of 8, 16, 32, 64 and 128 rows */
#define KN_CUDA_GRAPHS 24
#define KN_CUDA_SLOTS  2 /* passes queued at once */

/* Driver functions, found at run time: the module loads where there is no driver. */
struct kn_cuda_driver {
    CUresult (*mem_create)(CUmemGenericAllocationHandle *,
                           size_t,
                           const CUmemAllocationProp *,
                           unsigned long long);
    CUresult (*mem_release)(CUmemGenericAllocationHandle);
    CUresult (*mem_reserve)(CUdeviceptr *, size_t, size_t, CUdeviceptr, unsigned long long);
    CUresult (*mem_address_free)(CUdeviceptr, size_t);
    CUresult (*mem_map)(
        CUdeviceptr, size_t, size_t, CUmemGenericAllocationHandle, unsigned long long);
    CUresult (*mem_unmap)(CUdeviceptr, size_t);
    CUresult (*mem_set_access)(CUdeviceptr, size_t, const CUmemAccessDesc *, size_t);
    CUresult (*mem_export)(void *,
                           CUmemGenericAllocationHandle,
                           CUmemAllocationHandleType,
                           unsigned long long);
    CUresult (*mem_import)(CUmemGenericAllocationHandle *, void *, CUmemAllocationHandleType);
    CUresult (*mem_granularity)(size_t *,
                                const CUmemAllocationProp *,
                                CUmemAllocationGranularity_flags);
};
/* Checks that a device is there which the kernels run on, makes it current and fills the table.
 * BT_E_UNAVAILABLE with the reason. */
int kn_cuda_start(const struct kn_cuda_driver **ret, struct bt_err *err) BT_MUST_USE;

extern const struct bt_mem_ops kn_cuda_mem;

/* Fails with the text of a cudaError_t. */
int kn_cuda_fail(struct bt_err *err, const char *what, int cuda_error);

/* Matrix products through cuBLASLt: out [rows, N] (+)= x [rows, K] w [N, K]^T. Plans are kept by
 * shape; the first product of a shape asks the library, `tune` measures its candidates.
 * `invariant`: an element's bits do not depend on the rows beside it. Only algorithms are used that
 * gave the right bits in `tune`; a product of other numbers of rows than those tuned
 * takes the next larger of them that there is room for, and overwrites those rows of out. */
struct kn_gemm;
struct kn_gemm_args {
    const void *x; /* [rows, K] */
    const void *w; /* [N, K] */
    int rows, n, k;
    int room;      /* invariant: rows that x and out have place for; 0 = rows */
    bool add, f32; /* out += ; out is f32 */
    void *out;     /* [rows, N] */
};
int kn_gemm_create(enum kn_cuda_dtype t, bool invariant, struct kn_gemm **ret, struct bt_err *err)
    BT_MUST_USE;
void kn_gemm_destroy(struct kn_gemm *g);
/* Is a kernel of our own with what follows folded in faster than this product and the kernel after
 * it? Of tuned shapes, as noted by set_beaten; kept with what tune found. */
bool kn_gemm_beaten(const struct kn_gemm *g, const struct kn_gemm_args *a);
/* Was it found by another process (kn_gemm_restore)? */
bool kn_gemm_restored(const struct kn_gemm *g, const struct kn_gemm_args *a);
void kn_gemm_set_beaten(struct kn_gemm *g, const struct kn_gemm_args *a, bool beaten);
/* 0, or a cudaError_t or 1000 + a cublasStatus_t. */
int kn_gemm_run(struct kn_gemm *g, const struct kn_gemm_args *a, kn_cuda_stream s);
/* Tries up to `most` of the library's candidates on these very buffers (out is overwritten) and
 * keeps the fastest; *ret_us: its time, 0 if none may be used. The weights go round over `w` [n_w],
 * so that they come from memory as in a pass; NULL = a->w alone. Invariant: the largest number of
 * rows first, x the same in all calls of a shape. Synchronizes. */
struct kn_gemm_tune_args {
    const struct kn_gemm_args *a;
    const void *const *w;
    int n_w, most;
    const void *bits; /* invariant: what row 0 must be with w[0]; NULL = what the first gives */
};
int kn_gemm_tune(struct kn_gemm *g,
                 const struct kn_gemm_tune_args *a,
                 kn_cuda_stream s,
                 float *ret_us);

/* What `tune` found, into and out of memory that the next process on this card sees. restore before
 * the first product; returns how many shapes it knows then, none if they were measured with another
 * card, library, driver or kind of numerics, or are damaged. */
int kn_gemm_restore(struct kn_gemm *g, const void *from, size_t bytes);
void kn_gemm_save(const struct kn_gemm *g, void *to, size_t bytes);

/* Activations that a product reads: one map for each number of rows a block may take. */
struct kn_cuda_act {
    void *p; /* [max_batch_tokens, width] */
    int width;
    struct kn_cuda_map maps[KN_CUDA_BOXES];
};

/* kn_weight.handle */
struct kn_cuda_weight {
    struct kn_cuda_map map;
    struct kn_cuda_map pairs; /* for KN_STREAM_SWIGLU: boxes of pair_box rows */
    int pair_box;
    const void *data;  /* [N, K] */
    const float *bias; /* [N] or NULL */
    int n, k;
    struct kn_cuda_weight *next; /* of all that the device made */
};

/* Sequences of a pass as the kernels see them. Arrays on the device, at fixed places. */
struct kn_cuda_view {
    int rows, n_seqs;
    int n_decode; /* leading sequences of one row; the others go through prefill attention */
    int32_t *row_start;
    int32_t *ctx_len;
    uint32_t *pages;
    void *plan_decode, *plan_prefill;
};

/* A pass on its way: host memory that the copy engine reads and writes. */
struct kn_cuda_slot {
    int32_t *words;  /* pinned, blob_words */
    char *plans;     /* pinned, 2 * plan_bytes */
    int32_t *drawn;  /* pinned, [max_outputs] */
    uint32_t *fetch; /* pinned, [n_pages] of the mirror */
    int n_outputs;
    cudaEvent_t done;
};

struct kn_cuda_graph {
    int rows;
    const void *kv;
    cudaGraphExec_t exec;
};

struct kn_device {
    struct kn_device_cfg cfg;
    const struct bt_model_config *c;
    enum kn_cuda_dtype dtype;
    cudaStream_t stream;
    struct kn_gemm *gemm;
    struct kn_cuda_weight *weights;
    const struct kn_cuda_weight *tuned; /* the first of the shape being tuned */
    struct kn_cuda_attn_shape attn;
    void *attn_work;
    size_t plan_bytes;
    int pages_stride;
    size_t blob_words;
    int step_rows;   /* decode steps of up to so many rows go through kn_cuda_step */
    int stream_rows; /* products of up to so many rows go through kn_cuda_stream_gemm */

    char *work;             /* one allocation for all arrays below */
    void *x, *x_wanted;     /* [T, E] */
    void *qkv, *qkv_wanted; /* [T, HD + 2 KD] */
    void *gu;               /* [T, 2F] */
    struct kn_cuda_act h, att, act;
    float *logits; /* [max_outputs, V] */
    float *freqs, *cos_sin;
    int32_t *blob, *ids, *pos, *page, *wanted_rows, *drawn;
    struct kn_cuda_draw *draws;
    struct kn_cuda_view all, wanted; /* of the pass being recorded */

    bool stepping;                 /* the pass being recorded goes through kn_cuda_step ... */
    struct kn_cuda_step_args step; /* ... whose phases wait here for their launch */
    size_t flow_used;              /* of step.flow */
    void *step_att;                /* what attention left for the output projection */

    /* The pass being recorded. */
    const struct kn_cuda_view *view;
    void *cur_x, *cur_qkv;
    char *kv;
    size_t layer_stride;
    int n_wanted;
    int error; /* first that failed: cudaError_t, or 1000 + a cublasStatus_t */
    const char *error_what;

    struct kn_cuda_slot slots[KN_CUDA_SLOTS];
    int first, n_queued; /* of slots */
    struct kn_cuda_graph graphs[KN_CUDA_GRAPHS];

    struct { /* the pool's copy in host memory (mirror.c) */
        struct kv_layout layout;
        char *kv, *host, *device; /* pages; the copy as the host and as the device sees it */
        cudaStream_t stream;      /* copies of rows beside the pass */
        cudaEvent_t ready, copied;
        int rows; /* of the pass being recorded whose layers are copied as they come, 0 = none */
    } mirror;

    struct kn_cuda_upload *upload; /* while weights are loaded */
    size_t uploaded;               /* bytes */
    uint64_t upload_ns;            /* when it began */
};

/* The module's entry. */
const struct kn_device_ops *kn_cuda_get(uint32_t abi);

/* vocab.c: the vocabulary of the architecture files. */
void kn_cuda_v_embed(struct kn_device *d, const void *table);
void kn_cuda_v_qkv(struct kn_device *d, const struct kn_device_qkv *a);
void kn_cuda_v_keep_wanted(struct kn_device *d);
void kn_cuda_v_attention(struct kn_device *d, int layer);
void kn_cuda_v_attn_out(struct kn_device *d, const struct kn_weight *o);
void kn_cuda_v_ffn(struct kn_device *d, const struct kn_device_ffn *a);
void kn_cuda_v_logits(struct kn_device *d, const float *norm, const struct kn_weight *output);
/* May steps of few rows of this model go through kn_cuda_step? */
bool kn_cuda_v_steps(const struct kn_device *d);
/* Bytes that such a step leaves in step.flow. */
size_t kn_cuda_v_flow_bytes(const struct kn_device *d, int rows);
/* Before the vocabulary of such a step. */
void kn_cuda_v_step_begin(struct kn_device *d);
/* Draws the tokens of the pass on the device. */
void kn_cuda_v_sample(struct kn_device *d);

/* upload.c: bytes to the device by several threads. end waits for all and frees it (NULL is fine).
 * 0 or a cudaError_t. */
struct kn_cuda_upload;
int kn_cuda_upload_begin(struct kn_cuda_upload **ret, struct bt_err *err) BT_MUST_USE;
int kn_cuda_upload(struct kn_cuda_upload *u, void *dst, const void *src, size_t bytes);
int kn_cuda_upload_end(struct kn_cuda_upload *u);

/* mirror.c */
int kn_cuda_mirror(
    struct kn_device *d, const struct kv_layout *layout, void *kv, void *host, struct bt_err *err);
int kn_cuda_fetch(struct kn_device *d, const uint32_t *pages, size_t n, struct bt_err *err);
/* Rows of the pass that is queued, all layers, behind it. */
int kn_cuda_mirror_rows(struct kn_device *d, int rows);
/* Of a pass that is launched kernel by kernel: begin, after a layer's K and V, end. */
void kn_cuda_mirror_begin(struct kn_device *d, int rows);
void kn_cuda_mirror_layer(struct kn_device *d, int layer);
int kn_cuda_mirror_end(struct kn_device *d);
void kn_cuda_mirror_close(struct kn_device *d);

/* pass.c */
int kn_cuda_pass(struct kn_device *d,
                 const struct kn_device_batch *b,
                 void (*record)(void *arg),
                 void *arg,
                 struct bt_err *err);
int kn_cuda_wait(struct kn_device *d, int32_t *drawn, float *logits, struct bt_err *err);
/* Tunes products of the rows that steps have. */
int kn_cuda_tune(struct kn_device *d, struct bt_err *err);
/* Words of the batch descriptor of the largest pass. */
size_t kn_cuda_blob_words(const struct kn_device *d);

#endif
