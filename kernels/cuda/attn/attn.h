/* Attention over paged K and V in device memory: what this folder offers to the CUDA back end.
 *
 * Pages lie as kvstore/block/layout.h says: page p of the current layer starts `page_stride` bytes
 * times p after `kv` and holds K [Hkv][page_tokens][D], then V [Hkv][page_tokens][D]; but in each
 * 128 bytes of the row of position r, piece c of 16 bytes lies at c ^ (r & 7) (kn_cuda_attn_piece),
 * so that what copies whole runs to shared memory has them there as ldmatrix and wgmma want. Rows
 * of q are packed over the sequences of a call; row r of a sequence stands at absolute position
 * ctx_len - rows + r and sees positions 0 .. its own, all from the pages (the rows' own K and V are
 * written before). Query head h reads KV head h / (n_heads / n_kv_heads).
 *
 * A step has two parts. `plan` runs on the host, once a step, and writes how the work is cut into
 * pieces: plain bytes that the caller copies to the device together with the rest of its batch
 * descriptor. `run` launches, once a layer, and reads lengths, page tables and plan on the device
 * only: its launch shape depends on `struct kn_cuda_attn_shape` and on `max_seqs` and `max_ctx` of
 * the call, never on lengths, so a captured graph stays right when the device-side contents change.
 * Neither allocates or synchronizes; run does nothing but launches on `stream`.
 *
 * Launches overlap (programmatic stream serialization, also inside graphs): every launch carries
 * that attribute, every block executes griddepcontrol.wait before it touches memory that another
 * kernel writes, and griddepcontrol.launch_dependents as soon as all its blocks are resident, so
 * that the next kernel may fetch its weights meanwhile. Plan, lengths, row starts and page tables
 * are read before that wait: they are written by copies before the first launch of such a chain,
 * never by a kernel inside it. So are K and V of positions before those of the call, in units of
 * 128 positions: earlier chains wrote them. The next kernel wants up to half of a multiprocessor's
 * shared memory for that; leave it where it costs nothing (small batches).
 *
 * Splits over the context of a row lie at absolute positions. With `invariant` set their size, and
 * with it the order of every sum, depends on the position alone, never on the other rows of a call.
 *
 * Threads: no state; any thread with the device's context current.
 */
#ifndef KN_CUDA_ATTN_ATTN_H
#define KN_CUDA_ATTN_ATTN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#ifdef __CUDACC__
#define KN_ATTN_BOTH __host__ __device__ constexpr
#else
#define KN_ATTN_BOTH static inline
#endif

struct CUstream_st; /* a CUstream or cudaStream_t points to it */

enum kn_cuda_dtype { KN_CUDA_BF16, KN_CUDA_F16 };

/* Fixed for a model on a card. */
struct kn_cuda_attn_shape {
    enum kn_cuda_dtype dtype; /* of q, K, V and out; sums are f32 */
    int n_heads;              /* H, a multiple of n_kv_heads */
    int n_kv_heads;           /* Hkv */
    int head_dim;             /* D: 64 or 128 */
    int page_tokens;          /* power of two, 8..256 */
    size_t page_stride;       /* bytes from page to page of one layer */
    float scale;              /* of the scores */
    int n_sms;                /* multiprocessors to use */
    bool invariant;
};

/* One call of run. All pointers are device memory. */
struct kn_cuda_attn_args {
    const void *q;            /* [rows, H, D] */
    size_t q_stride;          /* elements from row to row; a multiple of 8 */
    const void *kv;           /* the current layer of the pool; 16-byte aligned */
    const int32_t *row_start; /* [n_seqs + 1] first row of each sequence in q and out */
    const int32_t *ctx_len;   /* [n_seqs] positions in the pages, the rows of this call included */
    const uint32_t *pages;    /* [n_seqs, pages_stride] page i of a sequence holds positions
                                 i * page_tokens on */
    int pages_stride;
    const void *plan;  /* the bytes that the matching plan function wrote */
    int n_seqs;        /* sequences launched for; some may be empty (ctx_len 0) */
    int max_rows;      /* rows in the call, at most (prefill; decode: n_seqs) */
    int max_ctx;       /* longest ctx_len, at most */
    void *out;         /* [rows, H, D] */
    size_t out_stride; /* elements; a multiple of 8 */
    void *workspace;   /* kn_cuda_attn_workspace() bytes, 256-byte aligned, one call at a time; the
                          caller zeroes it once, before its first use */
};

/* Where piece i of 16 bytes of a pool lies, counted from the start of a page. Its own inverse. */
KN_ATTN_BOTH size_t kn_cuda_attn_piece(size_t i, int head_dim)
{
    return i ^ (i / (size_t)(head_dim / 8) & 7);
}

/* Bytes of a plan and of the workspace for calls of at most so many sequences, rows and positions.
 * Both serve prefill and decode. */
size_t kn_cuda_attn_plan_bytes(const struct kn_cuda_attn_shape *s,
                               int max_seqs,
                               int max_rows,
                               int max_ctx);
size_t
kn_cuda_attn_workspace(const struct kn_cuda_attn_shape *s, int max_seqs, int max_rows, int max_ctx);

/* Is there a kernel for this shape on a card of this compute capability (90 = Hopper)? */
bool kn_cuda_attn_supports(const struct kn_cuda_attn_shape *s, int compute_capability);

/* Once after the device's context exists (raises shared memory limits, fills constants). 0 or a
 * cudaError_t. */
int kn_cuda_attn_init(const struct kn_cuda_attn_shape *s);

/* Decode: one row a sequence, row_start[i] = i. Host arrays; sequences beyond n_seqs up to
 * max_seqs are empty. `plan` is host memory of kn_cuda_attn_plan_bytes(), 32-byte aligned as its
 * copy on the device. Returns the bytes of it that the device needs (the rest was scratch). */
size_t kn_cuda_attn_plan_decode(const struct kn_cuda_attn_shape *s,
                                int n_seqs,
                                const int32_t *ctx_len,
                                void *plan);
/* 0 or the cudaError_t of the launch. */
int kn_cuda_attn_decode(const struct kn_cuda_attn_shape *s,
                        const struct kn_cuda_attn_args *a,
                        struct CUstream_st *stream);

/* Prefill: any number of rows a sequence, also 1; causal. */
size_t kn_cuda_attn_plan_prefill(const struct kn_cuda_attn_shape *s,
                                 int n_seqs,
                                 const int32_t *row_start,
                                 const int32_t *ctx_len,
                                 void *plan);
int kn_cuda_attn_prefill(const struct kn_cuda_attn_shape *s,
                         const struct kn_cuda_attn_args *a,
                         struct CUstream_st *stream);

#ifdef __cplusplus
}
#endif

#endif
