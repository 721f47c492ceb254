/* A model bound to a back end: weights, op table, forward pass over a packed batch.
 *
 * Batches are packed without padding: any mix of prefill chunks and decode steps. The same request
 * gives the same bits in any batch, chunking, page size, page placement and thread count: the order
 * of every reduction depends on the output element alone (absolute positions for attention).
 *
 * Thread: the engine's. The forward pass allocates nothing.
 */
#ifndef KN_MODEL_MODEL_H
#define KN_MODEL_MODEL_H

#include "common/file/model.h"
#include "common/mem/mem.h"
#include "kvstore/block/layout.h"

struct kn_model;
struct kn_device_ops;
struct kn_device_draw;

/* Memory that outlives the process, for a model on a device. */
struct kn_model_home {
    /* Memory of the device's kind for all weights; *ret_whole: a process before this one has filled
     * it with these weights. The region becomes the model's. */
    int (*weights)(void *arg,
                   const struct bt_mem_ops *ops,
                   size_t bytes,
                   struct bt_mem_region *ret,
                   bool *ret_whole,
                   struct bt_err *err);
    void *arg;
    void *notes; /* see struct kn_device_cfg; NULL = none; of the model's life */
    size_t notes_bytes;
};

struct kn_model_cfg {
    const struct bt_model_file *file; /* borrowed, must outlive the model */
    int n_threads;                    /* of the CPU team, including the caller */
    const char *isa;                  /* "auto", "ref", "avx2", "avx512", "avx512bf16", "amx" */
    int max_batch_tokens;             /* most tokens in one forward pass */
    int max_batch_seqs;
    int max_outputs; /* most rows of logits in one pass */
    int max_ctx;     /* longest sequence in tokens */
    /* A device back end (kernels/core/device.h), or NULL: the CPU, and the rest is not used. */
    const struct kn_device_ops *device;
    int page_tokens;                  /* of the pool that passes will use */
    const struct kn_model_home *home; /* borrowed for the call of create; NULL = none */
    bool invariant;       /* bits do not depend on batch and chunks; always so on the CPU */
    uint64_t random_seed; /* not 0: random weights are made on the device (benchmarks) */
};

int kn_model_create(const struct kn_model_cfg *cfg,
                    struct kn_model **ret_model,
                    struct bt_err *err) BT_MUST_USE;
void kn_model_destroy(struct kn_model *m);
const struct bt_model_config *kn_model_config(const struct kn_model *m);
/* Dtype of K and V where this model runs on a device: that of its weights. */
enum kv_dtype kn_model_device_kv(const struct bt_model_file *file);
/* Numerics id: "cpu/<isa>/<precision>/<op version>", "cuda/..."; static string. Bits are equal
 * within one id.
 */
const char *kn_model_numerics(const struct kn_model *m);

struct kn_batch_seq {
    int32_t n_tokens;      /* new tokens of this sequence in the batch, >= 1 */
    int32_t pos;           /* absolute position of the first of them */
    const uint32_t *pages; /* page table: page i holds positions [i, i+1) * page_tokens; covers
                              pos + n_tokens */
    bool want_logits;      /* of the last token */
    const struct kn_device_draw
        *draw; /* kn_model_submit: how the device draws; NULL = it does not */
};

struct kn_batch {
    int n_tokens;       /* sum over seqs */
    const int32_t *ids; /* [n_tokens], checked by the caller against n_vocab; kn_model_submit: -1 -
                           i is the token that output i of the pass before drew */
    int n_seqs;         /* 0 is legal: the pass does nothing */
    const struct kn_batch_seq *seqs;
    void *kv;                       /* pool base */
    const struct kv_layout *layout; /* of the pool */
    float *logits; /* [n_outputs][V] in order of the seqs that want them; host memory */
    /* Called on the engine's thread after K and V of all tokens of the batch are in layer `layer`;
     * NULL = not wanted. */
    void (*layer_done)(void *arg, int layer);
    void *layer_done_arg;
    /* Called on the engine's thread before K and V of earlier positions in layer `layer` are read:
     * may block until they are there. On a device once, before the pass, for the last layer. NULL =
     * they are there. */
    void (*layer_wait)(void *arg, int layer);
    void *layer_wait_arg;
};

int kn_model_forward(struct kn_model *m, const struct kn_batch *b, struct bt_err *err) BT_MUST_USE;

/* The same in two halves, on a device alone: submit queues the pass, wait returns the results of
 * the oldest one queued. Two may be queued; then `logits` of the first are lost and must be NULL.
 * drawn: [n_outputs] ids, -1 where the device did not draw, or NULL. layer_done is called by
 * kn_model_forward alone. */
int kn_model_submit(struct kn_model *m, const struct kn_batch *b, struct bt_err *err) BT_MUST_USE;
int kn_model_wait(struct kn_model *m, int32_t *drawn, float *logits, struct bt_err *err)
    BT_MUST_USE;
/* `mirror` and `fetch` of the device (kernels/core/device.h). */
int kn_model_mirror(struct kn_model *m,
                    const struct kv_layout *layout,
                    void *kv,
                    void *host,
                    struct bt_err *err) BT_MUST_USE;
int kn_model_fetch(struct kn_model *m, const uint32_t *pages, size_t n, struct bt_err *err)
    BT_MUST_USE;

#endif
