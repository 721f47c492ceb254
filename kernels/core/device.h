/* Back ends that keep weights, activations and KV pages on a device of their own.
 *
 * The CPU back ends are tables of small ops (kernels/core/ops.h). A device back end implements the
 * vocabulary of the architecture files (kernels/model/graph.h) instead, whole steps of a block, so
 * that it may fuse what the CPU runs as several ops. It comes as a module that is loaded only when
 * asked for; nothing else of the program knows its libraries. kernels/adr/0001 has the reasons.
 *
 * Arithmetic: activations, K and V in the weights' 16-bit dtype, sums in f32.
 *
 * Threads: open, load and close at start and end; everything else on the engine's thread. Nothing
 * but open, weight and finish allocates. Calls of the vocabulary happen inside `pass` alone.
 */
#ifndef KN_CORE_DEVICE_H
#define KN_CORE_DEVICE_H

#include "common/mem/mem.h"
#include "kernels/core/device_load.h"
#include "kernels/core/ops.h"

#define KN_DEVICE_ABI 3

struct kn_device;

struct kn_device_cfg {
    const struct bt_model_config *model; /* borrowed for the device's life */
    enum bt_dtype dtype;                 /* BF16 or F16: of weights, activations, K and V */
    int max_batch_tokens, max_batch_seqs, max_outputs, max_ctx;
    int page_tokens;
    const float *freqs; /* [D/2] of the rotary embedding, borrowed for the call of open */
    bool invariant;     /* numerics=invariant */
    /* Where the device keeps what it measured at start, for the next process on the same card:
     * zeros when new, of the device's life. NULL = nowhere. */
    void *notes;
    size_t notes_bytes;
};

/* A sequence's share of a pass and, where it wants logits, how its token is drawn. */
struct kn_device_seq {
    int32_t n_tokens;
    int32_t pos;
    const uint32_t *pages;
    bool want_logits;
    const struct kn_device_draw *draw; /* NULL = the host draws from the logits */
};

/* Greedy, or temperature, top-k, top-p and min-p in the order and with the random numbers of
 * kernels/model/sampler.h. */
struct kn_device_draw {
    float temperature; /* 0 = greedy */
    int32_t top_k;     /* <= 0 = all */
    float top_p, min_p;
    uint64_t seed;
    uint32_t choice;
    uint64_t position;
};

struct kn_device_batch {
    int n_tokens;
    const int32_t *ids; /* -1 - i: the token that output i of the pass before drew */
    int n_seqs;
    const struct kn_device_seq *seqs;
    void *kv; /* device memory */
    const struct kv_layout *layout;
};

/* What one projection of q, k and v needs beside the residual stream. Device pointers. */
struct kn_device_qkv {
    int layer;
    const float *norm; /* [E] */
    const struct kn_weight *w;
    const float *q_norm, *k_norm; /* [D] or NULL */
};

struct kn_device_ffn {
    const float *norm;
    const struct kn_weight *gu, *down;
};

struct kn_device_ops {
    uint32_t abi; /* KN_DEVICE_ABI */
    const char *name;
    const struct bt_mem_ops *mem; /* pools and weights on the device */

    /* BT_E_UNAVAILABLE: no device here, or none that the kernels run on; says which and why. */
    int (*open)(const struct kn_device_cfg *cfg, struct kn_device **ret, struct bt_err *err);
    void (*close)(struct kn_device *d);
    const char *(*numerics)(const struct kn_device *d);

    /* Loading. upload copies to device memory through pinned buffers, asynchronously: `src` is free
     * to change on return; finish waits for all. weight takes a projection whose parts lie one
     * after the other. fill makes random weights instead (benchmarks). */
    int (*upload)(
        struct kn_device *d, void *dst, const void *src, size_t bytes, struct bt_err *err);
    int (*fill)(struct kn_device *d, void *dst, size_t elems, float scale, uint64_t seed);
    int (*weight)(struct kn_device *d, struct kn_weight *w, struct bt_err *err);
    int (*finish)(struct kn_device *d, struct bt_err *err);

    /* Pages on the device at `kv` and a copy of them at `host`, host memory of that layout, through
     * which everything but the device sees them: transfers, tiers, the keeper. The device may order
     * the bytes of a page otherwise. Once, before the first pass; pins the copy. From then on the
     * rows of every pass over `kv` are in the copy when `wait` returns. */
    int (*mirror)(struct kn_device *d,
                  const struct kv_layout *layout,
                  void *kv,
                  void *host,
                  struct bt_err *err);
    /* Queues whole pages [n] from the copy to the device, before the next pass. At most all pages
     * of the pool; `pages` is free to change on return. */
    int (*fetch)(struct kn_device *d, const uint32_t *pages, size_t n, struct bt_err *err);

    /* Starts a pass. `record` issues the vocabulary of the architecture; it is not called where a
     * recorded graph of the same shape is replayed. Returns when the work is queued. */
    int (*pass)(struct kn_device *d,
                const struct kn_device_batch *b,
                void (*record)(void *arg),
                void *arg,
                struct bt_err *err);
    /* Waits for the last pass. drawn: [n_outputs] ids, -1 where the host draws; logits: host memory
     * for the outputs that want them, or NULL. A fault of the device is BT_E_UNAVAILABLE; only
     * close may follow. */
    int (*wait)(struct kn_device *d, int32_t *drawn, float *logits, struct bt_err *err);

    /* The vocabulary, see kernels/model/graph.h. */
    void (*embed)(struct kn_device *d, const void *table);
    void (*qkv)(struct kn_device *d, const struct kn_device_qkv *a);
    void (*keep_wanted)(struct kn_device *d);
    void (*attention)(struct kn_device *d, int layer);
    void (*attn_out)(struct kn_device *d, const struct kn_weight *o);
    void (*ffn)(struct kn_device *d, const struct kn_device_ffn *a);
    void (*logits)(struct kn_device *d, const float *norm, const struct kn_weight *output);
};

/* The module's one entry: NULL for another abi. */
#define KN_CUDA_MODULE "baton-cuda.so"
#define KN_CUDA_ENTRY  "kn_cuda_get"
typedef const struct kn_device_ops *(*kn_device_get)(uint32_t abi);

#endif
