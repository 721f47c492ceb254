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
#include "kvstore/block/layout.h"

struct kn_model;

struct kn_model_cfg {
    const struct bt_model_file *file; /* borrowed, must outlive the model */
    int n_threads;                    /* of the CPU team, including the caller */
    const char *isa;                  /* "auto", "ref", "avx2", "avx512", "amx" */
    int max_batch_tokens;             /* most tokens in one forward pass */
    int max_batch_seqs;
    int max_outputs; /* most rows of logits in one pass */
    int max_ctx;     /* longest sequence in tokens */
};

int kn_model_create(const struct kn_model_cfg *cfg,
                    struct kn_model **ret_model,
                    struct bt_err *err) BT_MUST_USE;
void kn_model_destroy(struct kn_model *m);
const struct bt_model_config *kn_model_config(const struct kn_model *m);
/* Numerics id: "cpu/<isa>/<precision>/<op version>"; static string. Bits are equal within one id.
 */
const char *kn_model_numerics(const struct kn_model *m);

struct kn_batch_seq {
    int32_t n_tokens;      /* new tokens of this sequence in the batch, >= 1 */
    int32_t pos;           /* absolute position of the first of them */
    const uint32_t *pages; /* page table: page i holds positions [i, i+1) * page_tokens; covers
                              pos + n_tokens */
    bool want_logits;      /* of the last token */
};

struct kn_batch {
    int n_tokens;       /* sum over seqs */
    const int32_t *ids; /* [n_tokens], checked by the caller against n_vocab */
    int n_seqs;         /* 0 is legal: the pass does nothing */
    const struct kn_batch_seq *seqs;
    void *kv;                       /* pool base */
    const struct kv_layout *layout; /* of the pool */
    float *logits;                  /* [n_outputs][V] in order of the seqs that want them */
    /* Called on the engine's thread after K and V of all tokens of the batch are in layer `layer`;
     * NULL = not wanted. */
    void (*layer_done)(void *arg, int layer);
    void *layer_done_arg;
};

int kn_model_forward(struct kn_model *m, const struct kn_batch *b, struct bt_err *err) BT_MUST_USE;

#endif
