/* The op table: what the model graph calls and what a back end provides.
 *
 * An op is a pointer `void (*name)(struct kn_stream *, const struct kn_name_args *)`. Its arguments
 * are borrowed views; it allocates nothing and keeps no state. The plain C rows in kernels/cpu/ref
 * define what each op does; other rows must agree within the tolerance of tests/ops/cases.def.
 *
 * Topology invariance, a duty of every row: one output element has one order of accumulation. It
 * may depend on the shape of the weights and on absolute positions, never on the number of rows in
 * the call, on their place in it, on page size, on page placement or on the number of threads.
 *
 * Threads: an op is called by the thread that owns the stream and may spread over the stream's
 * team; it returns when all is done.
 *
 * Letters: T rows (tokens) in the call, E width of the model, H query heads, Hkv key heads,
 * D width of a head, F width of the feed-forward part, V vocabulary, K inputs and N outputs of a
 * projection. Activations are f32, row-major; `stride` is the distance of rows in floats.
 */
#ifndef KN_CORE_OPS_H
#define KN_CORE_OPS_H

#include "common/file/model.h"
#include "kvstore/block/layout.h"

struct kn_team;

#define KN_MAX_HEAD_DIM 256

/* Where an op runs. Owned by the model; one op at a time. */
struct kn_stream {
    struct kn_team *team; /* NULL = on the caller alone */
    void *scratch;        /* shared by the threads of an op; 64-byte aligned */
    size_t scratch_bytes; /* at least kn_scratch_bytes() of the largest call */
    char *thread_scratch; /* n_threads pieces of KN_THREAD_SCRATCH_BYTES; 64-byte aligned */
};
#define KN_THREAD_SCRATCH_BYTES ((size_t)768 * 1024)
#define KN_ACTS_BYTES           576  /* quantized activations of 12 rows and 32 inputs */
#define KN_BF16_BYTES           1024 /* at most: 8 rows and 32 inputs for BF16 weights */
/* Shared scratch for a matmul of `rows` activations of width `k`, the one op that needs it. */
size_t kn_scratch_bytes(size_t rows, size_t k);
/* Its beginning, for parts with quantized weights. */
size_t kn_quant_acts_bytes(size_t rows, size_t k);

/* How a back end wants its weights. */
enum kn_format {
    KN_FORMAT_FILE,   /* as in the model file, borrowed from it */
    KN_FORMAT_TILE16, /* 16 outputs interleaved, kernels/cpu/pack.h */
    KN_FORMAT_GRID16, /* these, quantized ones on a grid of powers of two, kernels/cpu/grid.h */
    KN_FORMAT_COUNT,
};

/* A projection of K inputs to N outputs, as up to KN_MAX_PARTS tensors stacked by output (q, k and
 * v share their input and go as one). Immutable after load. */
#define KN_MAX_PARTS 3
struct kn_weight_part {
    enum bt_dtype dtype;
    int n;             /* outputs of this part */
    const void *data;  /* in the back end's format */
    const float *bias; /* [n] or NULL */
};
struct kn_weight {
    int k; /* inputs */
    int n; /* outputs, all parts */
    int n_parts;
    struct kn_weight_part part[KN_MAX_PARTS];
    void *handle; /* of a device (kernels/core/device.h), which owns it; NULL on the CPU */
};

/* A block of activations whose largest magnitude is not above this is quantized to zeros (127 / max
 * would overflow). */
#define KN_QUANT_TINY 1e-30f
/* With a power of two as scale (cpu/amx/wide.h) it is at least that of this largest magnitude: sums
 * of products with weights stay above what tile products flush to zero. */
#define KN_WIDE_TINY 1e-20f

struct kn_embed_args {
    const struct bt_tensor *table; /* [V, E], any dtype, as in the file */
    const int32_t *ids;            /* [T], each in [0, V) */
    int n_rows;                    /* T */
    float *out;                    /* [T, E] */
    size_t out_stride;
};

struct kn_rmsnorm_args {
    const float *x; /* [T, n_heads * width] */
    size_t x_stride;
    const float *weight; /* [width] */
    int n_rows;
    int n_heads; /* normed one by one; 1 = the whole row */
    int width;
    float eps;
    float *out; /* as x; may be x */
    size_t out_stride;
};

struct kn_matmul_args {
    const float *x; /* [T, K] */
    size_t x_stride;
    const struct kn_weight *w; /* [N, K] */
    int n_rows;
    bool add;   /* out += result (the residual), else out = result */
    float *out; /* [T, N] */
    size_t out_stride;
};

struct kn_rope_args {
    float *x; /* [T, n_heads, D], in place */
    size_t x_stride;
    int n_rows;
    int n_heads;
    int head_dim;
    bool interleaved;     /* pairs (2i, 2i+1), else (i, i + D/2) */
    const float *cos_sin; /* [T, 2, D]: cos for each element, then sin with the sign it takes:
                             x[j] * cos[j] + x[partner of j] * sin[j] */
};

/* New rows of one sequence in a packed call. */
struct kn_seq_rows {
    int row0;              /* first row in the call */
    int n_rows;            /* rows */
    int pos;               /* absolute position of row0 */
    const uint32_t *pages; /* page i holds positions [i, i+1) * page_tokens */
};

struct kn_kv_write_args {
    const float *k; /* [T, Hkv, D] */
    const float *v; /* [T, Hkv, D] */
    size_t stride;  /* of both */
    int n_seqs;
    const struct kn_seq_rows *seqs;
    void *kv; /* pool base */
    const struct kv_layout *layout;
    int layer;
};

struct kn_attention_args {
    const float *q; /* [T, H, D] */
    size_t q_stride;
    int n_heads; /* H, a multiple of layout->n_kv_heads */
    float scale; /* of the scores */
    int n_seqs;
    const struct kn_seq_rows *seqs; /* a row sees positions 0..its own, from the pages alone */
    const void *kv;
    const struct kv_layout *layout;
    int layer;
    float *out; /* [T, H, D] */
    size_t out_stride;
};

struct kn_swiglu_args {
    const float *x; /* [T, 2F]: gate, then up */
    size_t x_stride;
    int n_rows;
    int width;  /* F */
    float *out; /* [T, F] */
    size_t out_stride;
};

struct kn_gather_args {
    const float *x; /* rows to choose from */
    size_t x_stride;
    const int *rows; /* [n_rows], ascending */
    int n_rows;
    int width;
    float *out; /* may be x: rows move down only */
    size_t out_stride;
};

enum kn_op {
#define KN_OP(name, dtypes, what) KN_OP_##name,
#include "kernels/ops.def"
#undef KN_OP
    KN_OP_COUNT
};

enum kn_device_kind {
    KN_DEVICE_CPU,
    KN_DEVICE_CUDA, /* kernels/core/device.h; has no table of ops */
};

struct kn_ops {
    const char *isa;      /* "ref", "avx2", "avx512", "avx512bf16", "amx" */
    const char *numerics; /* numerics id: bits are equal within one */
    enum kn_device_kind device;
    enum kn_format format; /* of kn_weight_part.data */
#define KN_OP(name, dtypes, what)                                                                  \
    void (*name)(struct kn_stream * stream, const struct kn_##name##_args *args);
#include "kernels/ops.def"
#undef KN_OP
};

const char *kn_op_name(enum kn_op op);

#endif
