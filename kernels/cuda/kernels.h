/* Launchers of the CUDA kernels, in C.
 *
 * Every pointer is device memory unless it says otherwise. A launcher only launches: no allocation,
 * no synchronization, fit for graph capture. It returns 0 or the cudaError_t of the launch. Kernels
 * overlap their neighbours (programmatic stream serialization): they wait for the one before them
 * before they touch what it writes.
 *
 * Letters as in kernels/README.md. "16-bit" is the dtype of the model, BF16 or F16.
 */
#ifndef KN_CUDA_KERNELS_H
#define KN_CUDA_KERNELS_H

#include "kernels/cuda/attn/attn.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct CUstream_st *kn_cuda_stream;

/* How K and V of new rows reach their pages, and what happens to heads on the way. */
struct kn_cuda_heads {
    int n_heads, n_kv_heads,
        head_dim;                 /* D: 64 or 128 in the fused kernel, even up to 256 elsewhere */
    int page_tokens;              /* power of two */
    size_t page_stride;           /* bytes */
    const float *q_norm, *k_norm; /* [D] or NULL */
    float eps;
    bool interleaved;
    const float *cos_sin; /* [max_ctx][D/2][2] cos, sin of each pair */
    const int32_t *pos;   /* [T] */
    const int32_t *page;  /* [T] page of the row's position */
    void *kv;             /* current layer of the pool */
};

/* x[t] = table[ids[t]]; an id below 0 stands for prev[-1 - id]. */
struct kn_cuda_embed_args {
    const void *table; /* [V, E] */
    const int32_t *ids, *prev;
    int rows, width;
    void *out;
};
int kn_cuda_embed(enum kn_cuda_dtype t, const struct kn_cuda_embed_args *a, kn_cuda_stream s);

/* out = x / rms(x) * weight. width a multiple of 8, up to 16384. */
struct kn_cuda_norm_args {
    const void *x; /* [T, E] */
    const float *weight;
    int rows, width;
    float eps;
    void *out;
};
int kn_cuda_norm(enum kn_cuda_dtype t, const struct kn_cuda_norm_args *a, kn_cuda_stream s);

/* Rows of qkv [T, HD + 2 KD]: norms and rotary embedding of q in place, of k on its way into the
 * pages with v. */
int kn_cuda_qkv_finish(enum kn_cuda_dtype t,
                       void *qkv,
                       int rows,
                       const struct kn_cuda_heads *h,
                       const float *bias,
                       kn_cuda_stream s);

/* out [T, F] = silu(x[.., 0..F)) * x[.., F..2F). F a multiple of 8. */
int kn_cuda_swiglu(
    enum kn_cuda_dtype t, const void *x, int rows, int width, void *out, kn_cuda_stream s);

/* out[i] = x[rows[i]], in another buffer; width in elements, a multiple of 8. */
struct kn_cuda_gather_args {
    const void *x;
    size_t x_stride; /* elements */
    const int32_t *rows;
    int n, width;
    void *out;
    size_t out_stride;
};
int kn_cuda_gather(const struct kn_cuda_gather_args *a, kn_cuda_stream s);

/* Uniform in [-scale, scale), a function of seed and index. */
int kn_cuda_fill(
    enum kn_cuda_dtype t, void *out, size_t elems, float scale, uint64_t seed, kn_cuda_stream s);

/* out [n_pos][half][2] = cos and sin of (float)pos * freqs[i]: the bits of kernels/model/rope.c. */
int kn_cuda_rope_table(const float *freqs, int n_pos, int half, float *out, kn_cuda_stream s);

/* The batch descriptor as the host packs it, spread into arrays at fixed places. Offsets are in
 * 32-bit words of `from`. Nothing that follows in the stream starts before it has ended. */
struct kn_cuda_unpack_args {
    const int32_t *from;
    int n_copies;
    struct {
        int32_t *to;
        int at, n;
    } copy[8];
    int pages_at, page_rows_at; /* compact page tables, and [n_seqs + 1] where each begins */
    int n_seqs, pages_stride;
    uint32_t *pages; /* [n_seqs, pages_stride] */
    int wanted_at;   /* [n_wanted] sequence of each output, or -1: no second table */
    int n_wanted;
    uint32_t *wanted_pages; /* [n_wanted, pages_stride] */
};
int kn_cuda_unpack(const struct kn_cuda_unpack_args *a, kn_cuda_stream s);

/* Products of few rows with weights at the speed of memory: kernels/cuda/stream_gemm.cu.
 * A tensor map describes a matrix to the copy engine; 128 bytes, made once for a matrix. */
struct kn_cuda_map {
    _Alignas(64) char bytes[128];
};
#define KN_STREAM_MAX_ROWS 128
/* Box of 64 columns by `box_rows`; [rows, cols] of 16-bit elements, `stride` elements from row to
 * row, a multiple of 8. 0 or a CUresult. */
int kn_cuda_map_init(struct kn_cuda_map *m,
                     enum kn_cuda_dtype t,
                     const void *base,
                     size_t rows,
                     size_t cols,
                     size_t stride,
                     int box_rows);

enum kn_cuda_stream_out {
    KN_STREAM_STORE,  /* out = sum + bias, 16-bit */
    KN_STREAM_ADD,    /* out += sum */
    KN_STREAM_SWIGLU, /* rows n/2 apart of the weights are gate and up; out [T, F] */
    KN_STREAM_F32,    /* out = sum in f32 */
    KN_STREAM_QKV,    /* kn_cuda_qkv_finish folded in */
};
struct kn_cuda_stream_gemm_args {
    const struct kn_cuda_map *w; /* [N, K], boxes of `box` rows */
    const struct kn_cuda_map *x; /* [>= rows, K], boxes of kn_cuda_stream_box(rows) rows */
    int n, k, rows;
    enum kn_cuda_stream_out kind;
    const float *bias; /* [N] or NULL: STORE and QKV */
    void *out;
    size_t out_stride;                 /* elements */
    const struct kn_cuda_heads *heads; /* QKV */
    int box;                           /* 0 = 64; 48 or 56 unless QKV: tiles that fit the card */
    int split;                         /* 0 = the kernel's choice; else 1, 2, 4 or 8 */
    int stages;                        /* 0 = the kernel's choice */
    int group;                         /* stages filled at a time, 0 = the kernel's choice */
    int warpgroups;                    /* 0 = the kernel's choice; 2, or 4 for more than 16 rows */
};
int kn_cuda_stream_init(void);
int kn_cuda_stream_box(int rows);
/* Of gate and up, n rows together: the box with which every block of the card has as much to do. */
int kn_cuda_stream_pair_box(int n);
int kn_cuda_stream_gemm(enum kn_cuda_dtype t,
                        const struct kn_cuda_stream_gemm_args *a,
                        kn_cuda_stream s);

/* A decode step of few rows in one launch: products and attention one after the other
 * (kernels/cuda/step.cu). What a phase leaves for others lies in `flow`: no element of it is ever
 * read before it is written, and nobody waits for more than the elements that it reads. */
#define KN_STEP_MAX_ROWS 4
#define KN_STEP_PHASES   200
struct kn_cuda_step_phase {
    const void *w; /* [N, K], K a multiple of 64; N of 8 * 2 where outputs come in pairs. NULL: the
                      phase is attention of the rows of x, as a QKV phase left them */
    const void *x; /* [rows, K], 16-byte aligned; attention: [rows, (H + 2 Hkv) D] */
    void *out;
    const void *old;   /* ADD: [rows, N], what the sum is added to */
    const float *norm; /* [K]: x is normed first; NULL = not */
    const float *bias; /* QKV: [N] or NULL */
    void *kv;          /* QKV and attention: layer of the pool */
    int n, k;
    int x_stride, out_stride;     /* elements; a multiple of 8 */
    enum kn_cuda_stream_out kind; /* ADD, SWIGLU, F32, or QKV without norms of heads, whose new K
                                     and V go to the pages and to out */
};
struct kn_cuda_step_args {
    int rows, n_phases, n_sms;
    int stages, flight; /* of the ring; of those, asked for at once; 0 = the kernel's choice */
    bool first, last;   /* of the launches of a step */
    float eps;
    /* Attention: rows are sequences, at the ends of their contexts; a context of 0 is an empty row,
     * whose result is 0. */
    float scale;
    int n_attn, attn_first; /* attention phases of the step; of those in launches before this one */
    const int32_t *ctx_len; /* [rows] */
    const uint32_t *pages;  /* [rows, pages_stride] */
    int pages_stride;
    struct kn_cuda_heads heads; /* page table aside what all layers share */
    /* Two sets of flow_bytes each, all bits set at first; pointers above may point into the first
     * set. Steps take turns. Outputs in it are written whole. */
    void *flow;
    size_t flow_bytes;           /* a multiple of 16 */
    void *records;               /* kn_cuda_step_record_bytes(), zero at first */
    unsigned long long *counter; /* zero at first; of one stream */
    struct kn_cuda_step_phase phases[KN_STEP_PHASES];
};
int kn_cuda_step_init(void);
/* Are there kernels for attention of these heads? */
bool kn_cuda_step_supports(const struct kn_cuda_heads *h);
size_t kn_cuda_step_record_bytes(const struct kn_cuda_heads *h, int rows, int n_sms);
int kn_cuda_step(enum kn_cuda_dtype t, const struct kn_cuda_step_args *a, kn_cuda_stream s);

/* Draws tokens from rows of f32 logits as kernels/model/sampler.h defines it. One block a row. */
struct kn_cuda_draw {
    float temperature;
    float top_p, min_p;
    int32_t top_k;
    uint64_t seed, position;
    uint32_t choice;
    int32_t skip; /* not 0: the host draws; the id becomes -1 */
};
struct kn_cuda_sample_args {
    const float *logits; /* [n, stride] */
    size_t stride;
    int n, n_vocab;
    const struct kn_cuda_draw *draws; /* [n] */
    int32_t *out;                     /* [n] */
    int32_t *out_host;                /* [n] pinned, the same */
};
int kn_cuda_sample(const struct kn_cuda_sample_args *a, kn_cuda_stream s);

/* Copies n pieces of `bytes` (a multiple of 16) between memories that the device can address,
 * with `blocks` multiprocessors. */
struct kn_cuda_copy_args {
    const void *const *src; /* [n] */
    void *const *dst;       /* [n] */
    int n;
    size_t bytes;
    int blocks;
};
int kn_cuda_copy_blocks(const struct kn_cuda_copy_args *a, kn_cuda_stream s);

/* Pages between two pools of one layout, the device's and its copy in pinned host memory. Heads of
 * 64 or 128; of the two, the device's has the pieces of its rows permuted (attn/attn.h). */
struct kn_cuda_pages_args {
    const char *from;
    char *to;
    size_t layer_stride, page_stride; /* bytes */
    int first_layer, n_layers;
    int blocks; /* multiprocessors */
    /* Whole pages ... */
    const uint32_t *pages; /* [n] */
    int n;
    /* ... or rows: what each has in its page. */
    const int32_t *pos, *page; /* [rows]; page below 0: an empty row */
    int rows;
    int page_tokens, n_kv_heads, head_bytes; /* page_tokens a power of two */
};
int kn_cuda_copy_pages(const struct kn_cuda_pages_args *a, kn_cuda_stream s);
int kn_cuda_copy_rows(const struct kn_cuda_pages_args *a, kn_cuda_stream s);

#ifdef __cplusplus
}
#endif

#endif
