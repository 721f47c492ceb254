/* The executor: runs a step plan on one device. Knows batches, no policy.
 *
 * Where the model runs on a device of its own, pages live there too and the pool is their copy in
 * host memory: every step writes its rows through to the pool, and what somebody else wrote into
 * the pool (a transfer, a tier, a predecessor) goes to the device before the step that reads it. A
 * page's generation tells: it changes whenever a page is taken.
 *
 * Thread: the engine's. kn_exec_run allocates nothing.
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
/* Forward pass and sampling. A plan without rows is legal. */
int kn_exec_run(struct kn_exec *x, const struct kn_exec_args *a, struct bt_err *err) BT_MUST_USE;

#endif
