/* The vector rows of the op table, compiled once for each instruction set. */
#ifndef KN_CPU_VEC_VEC_H
#define KN_CPU_VEC_VEC_H

#include "kernels/core/ops.h"
#include "kernels/cpu/team.h"
#include "kernels/cpu/vec/v16.h"

/* Whether it has tiles: BF16 weights and quantized ones with wide activations go through them. As
 * gcc and clang name what they compile for. */
#if defined(__AMX_BF16__) || defined(__AMXBF16__)
#define KN_VEC_AMX 1
#else
#define KN_VEC_AMX 0
#endif
/* Whether BF16 weights are multiplied as they are, by activations of as many bits. */
#if defined(__AVX512BF16__)
#define KN_VEC_BF16 1
#else
#define KN_VEC_BF16 0
#endif

void KN_V(rmsnorm)(struct kn_stream *stream, const struct kn_rmsnorm_args *a);
void KN_V(matmul)(struct kn_stream *stream, const struct kn_matmul_args *a);
void KN_V(rope)(struct kn_stream *stream, const struct kn_rope_args *a);
void KN_V(kv_write)(struct kn_stream *stream, const struct kn_kv_write_args *a);
void KN_V(attention)(struct kn_stream *stream, const struct kn_attention_args *a);
void KN_V(swiglu)(struct kn_stream *stream, const struct kn_swiglu_args *a);

/* Attention with AMX (cpu/amx/attention.c). */
void KN_V(tile_attention)(struct kn_stream *stream, const struct kn_attention_args *a);

/* Quantized activations: one block of 32 inputs of KN_GROUP neighbouring rows. All that a kernel
 * needs beside the tile comes from one pointer at fixed offsets. */
#define KN_GROUP 12
struct kn_acts {
    int8_t q[KN_GROUP][32];
    float scale[KN_GROUP]; /* value = scale * q */
    float ssum[KN_GROUP];  /* scale * sum of q */
    int32_t sum[KN_GROUP]; /* sum of q */
    char pad[48];
};
/* Activations for BF16 weights: rows and bytes of a cell of 32 inputs. Two bf16 each for the tiles
 * (cpu/amx/bf16_tile.c), else one (cpu/avx512/bf16_tile.c). */
#if KN_VEC_AMX
#define KN_BF16_ROWS 8
#define KN_BF16_CELL 1024
#else
#define KN_BF16_ROWS 12
#define KN_BF16_CELL 768
#endif
#define KN_BF16_FEW                                                                                \
    4 /* rows that meet four tiles of weights at once without tile registers, more two */

_Static_assert(sizeof(struct kn_acts) == KN_ACTS_BYTES && KN_BF16_CELL <= KN_BF16_BYTES,
               "see kn_scratch_bytes");

/* Rows of activations by one tile of 16 outputs (kernels/cpu/pack.h). */
struct kn_tile_job {
    enum bt_dtype dtype;
    const char *tile;
    int k;
    int n_rows;
    /* Float weights. */
    const float *x; /* [n_rows, k] */
    size_t x_stride;
    /* Quantized weights. */
    const struct kn_acts *acts; /* of row 0, which is the first of its group: [groups][k/32] */
    const struct kn_wide *wide; /* with AMX instead: row 0 is the first of all */
    /* BF16 weights where they are multiplied as such. */
    const void *acts16; /* of row 0, the first of its cell: [T/KN_BF16_ROWS][k/32] cells */
    void *scratch;      /* KN_THREAD_SCRATCH_BYTES of this member */
    /* Output. */
    const float *bias; /* NULL or [n_cols] */
    int n_cols;        /* 1..16 that exist; bf16_tiles, wide_tiles: those of all their tiles */
    bool add;
    float *out; /* [n_rows, n_cols] */
    size_t out_stride;
};

/* The instruction set's own product for quantized tiles. Contract, for every output and row:
 *     acc = 0; for each block in order: acc = fma(scale * dot, d, acc), dot an exact integer,
 *     Q4_1 then acc = fma(ssum, m, acc)
 * and kn_tile_finish at the end. */
void KN_V(quant_tile)(const struct kn_tile_job *j);

/* Quantized weights with AMX (cpu/amx/wide.h). wide_in_tiles tells in which form activations go,
 * wide_rows writes rows [t0, t1) of x, t0 a multiple of KN_WIDE_ROWS; wide_tiles multiplies by
 * n_tiles neighbours. */
#define KN_WIDE_ROWS      16
#define KN_WIDE_TILE_ROWS 13 /* fewer rows go without spreading weights, by measured cost */
struct kn_wide {
    void *data;
    int k;
    bool tiles;
};
bool KN_V(wide_in_tiles)(int n_rows, int k);
void KN_V(wide_rows)(const struct kn_wide *w, int t0, int t1, const float *x, size_t stride);
void KN_V(wide_tiles)(const struct kn_tile_job *j, int n_tiles);

/* BF16 weights with AMX or AVX-512 BF16. bf16_rows brings rows [t0, t1) of x, t0 a multiple of
 * KN_BF16_ROWS, into the cells that begin at `acts`; bf16_tiles multiplies by n_tiles neighbours.
 */
void KN_V(bf16_rows)(void *acts, int t0, int t1, const float *x, size_t stride, int k);
void KN_V(bf16_tiles)(const struct kn_tile_job *j, int n_tiles);

/* Bias, residual, store: result + bias, then old + that. */
KN_INLINE void kn_tile_finish(const struct kn_tile_job *j, int row, v16 acc)
{
    float *out = j->out + (size_t)row * j->out_stride;

    if (j->bias) {
        acc = v16_add(acc, v16_load_n(j->bias, j->n_cols));
    }
    if (j->add) {
        acc = v16_add(v16_load_n(out, j->n_cols), acc);
    }
    v16_store_n(out, acc, j->n_cols);
}

/* Splits rows over the team when there is enough to do: about KN_MIN_WORK elements an item. */
#define KN_MIN_WORK 8192
KN_INLINE int kn_rows_per_item(int n_rows, int width)
{
    int rows = KN_MIN_WORK / width;

    rows = BT_MIN(rows, n_rows);
    return BT_MAX(rows, 1);
}

#endif
