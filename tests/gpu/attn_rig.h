/* A call of the attention kernels set up on the card, for test and benchmark: sequences with random
 * q, K and V in pages that lie in random order. */
#ifndef BT_TESTS_GPU_ATTN_RIG_H
#define BT_TESTS_GPU_ATTN_RIG_H

#include "kernels/cuda/attn/attn.h"

#ifdef __cplusplus
extern "C" {
#endif

#define RIG_MAX_SEQS 1024

struct rig {
    struct kn_cuda_attn_shape shape;
    int n_seqs;
    int32_t row_start[RIG_MAX_SEQS + 1];
    int32_t ctx[RIG_MAX_SEQS];
    int n_rows;
    int max_ctx;
    int n_layers; /* copies of the pages, one after the other */
    size_t layer_bytes;
    int n_pages, pages_stride;
    uint32_t *pages;        /* host */
    size_t row_elems;       /* H * D: rows of q and out lie side by side */
    uint16_t *q, *kv, *out; /* host; kv = layer 0, NULL where it is too large to keep */
    /* Device */
    void *d_q, *d_kv, *d_out, *d_plan, *d_work;
    int32_t *d_row_start, *d_ctx;
    uint32_t *d_pages;
    struct kn_cuda_attn_args args; /* of layer 0 */
    size_t plan_bytes;
};

/* Prints what went wrong and ends the program: a test or benchmark has nothing to go on with. */
void rig_must(int rc, const char *what);

uint64_t rig_random(uint64_t *state);

/* Fills lengths and allocates. rows NULL = one a sequence. With keep_kv, pages hold NaN wherever no
 * position of a sequence lies, and values on the host too. */
void rig_init(struct rig *r,
              const struct kn_cuda_attn_shape *shape,
              int n_seqs,
              const int *rows,
              const int *ctx,
              int n_layers,
              bool keep_kv,
              uint64_t seed);
/* Offset in elements of a position's K (part 0) or V (part 1) of a KV head in layer 0. */
size_t rig_at(const struct rig *r, int seq, int pos, int kv_head, int part);
/* Copies a sequence's values (or q) from another rig of equal widths. */
void rig_copy_kv(struct rig *to, int to_seq, const struct rig *from, int from_seq, int n);
void rig_upload(struct rig *r);
/* Plans, poisons out, runs on layer 0, fetches out. */
void rig_run(struct rig *r, bool decode);
void rig_plan(struct rig *r, bool decode);
int rig_launch(struct rig *r, bool decode, int layer, struct CUstream_st *stream);
void rig_free(struct rig *r);

float rig_float(const struct rig *r, uint16_t x);
uint16_t rig_bits(enum kn_cuda_dtype t, float x);

/* Ceilings: bytes a second read from memory, and tensor core operations a second, bf16. */
double rig_read_rate(void);
double rig_mma_rate(void);

#ifdef __cplusplus
}
#endif

#endif
