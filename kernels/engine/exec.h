/* The executor: runs a step plan on one device. Knows batches, no policy.
 *
 * Where the model runs on a device of its own, pages live there too and the pool is their copy in
 * host memory: every step writes its rows through to the pool, and what somebody else wrote into
 * the pool (a transfer, a tier, a predecessor) goes to the device before the step that reads it. A
 * page's generation tells: it changes whenever a page is taken.
 *
 * Thread: the engine's. Steps allocate nothing.
 */
#ifndef KN_ENGINE_EXEC_H
#define KN_ENGINE_EXEC_H

#include "kernels/engine/scheduler.h"
#include "kernels/model/model.h"

struct kn_exec;

struct kn_exec_cfg {
    struct kn_model_cfg model;
    struct kv_pool *pool; /* borrowed */
};

int kn_exec_create(const struct kn_exec_cfg *cfg,
                   struct kn_exec **ret,
                   struct bt_err *err) BT_MUST_USE;
void kn_exec_destroy(struct kn_exec *x);
const struct kn_model *kn_exec_model(const struct kn_exec *x);

struct kn_exec_args {
    const struct kn_step_plan *plan;
    const struct kn_sched *sched; /* whose slots hold the sampling state of the rows */
    /* As in kn_batch: K and V of all rows are in layer `layer`. NULL = not wanted. */
    void (*layer_done)(void *arg, int layer);
    void *layer_done_arg;
    /* As in kn_batch; once more before sampling, with the number of layers. */
    void (*layer_wait)(void *arg, int layer);
    void *layer_wait_arg;
    struct kn_token *drawn; /* [max_batch_seqs]: plan->n_draws are written, in the order of rows */
};
/* Forward pass and sampling in two halves; a plan without rows is legal. On a device `begin` queues
 * the step and returns, and another one may be begun before the first has ended if
 * kn_exec_may_follow; its ids may name tokens that the first draws. `end` waits for the oldest one
 * begun, with the same arguments. On the CPU `begin` runs the pass. A step that failed to begin or
 * to end is over. */
int kn_exec_begin(struct kn_exec *x, const struct kn_exec_args *a, struct bt_err *err) BT_MUST_USE;
int kn_exec_end(struct kn_exec *x, const struct kn_exec_args *a, struct bt_err *err) BT_MUST_USE;
/* Ends the step that followed one that failed; what it did counts for nothing. */
void kn_exec_drop(struct kn_exec *x);
/* One step is begun, and all its tokens are drawn on the device. */
bool kn_exec_may_follow(const struct kn_exec *x);

#endif
