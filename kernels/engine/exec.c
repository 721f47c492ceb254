/* Step plan to batch to tokens. All buffers are sized at start by the largest step. */
#include "kernels/engine/exec.h"

#include "common/base/buf.h"

#include <stdlib.h>

struct kn_exec {
    struct kn_exec_cfg cfg;
    struct kn_model *model;
    struct kn_sampler *sampler;
    struct kn_batch_seq *seqs; /* [max_batch_seqs] */
    float *logits;             /* [max_outputs][V] */
};

int kn_exec_create(const struct kn_exec_cfg *cfg, struct kn_exec **ret, struct bt_err *err)
{
    size_t n_vocab, n_logits;
    struct kn_exec *x = bt_calloc(1, sizeof(*x));
    int rc;

    if (!x) {
        return BT_FAIL(err, BT_E_NOMEM, "executor: no memory");
    }
    x->cfg = *cfg;
    rc = kn_model_create(&cfg->model, &x->model, err);
    if (rc < 0) {
        goto fail;
    }
    n_vocab = (size_t)kn_model_config(x->model)->n_vocab;
    rc = kn_sampler_create((int)n_vocab, &x->sampler, err);
    if (rc < 0) {
        goto fail;
    }
    x->seqs = bt_calloc((size_t)cfg->model.max_batch_seqs, sizeof(*x->seqs));
    if (bt_mul_size((size_t)cfg->model.max_outputs, n_vocab, &n_logits)) {
        x->logits = bt_calloc(n_logits, sizeof(*x->logits));
    }
    if (!x->seqs || !x->logits) {
        rc = BT_FAIL(err, BT_E_NOMEM, "executor: no memory for logits of %d rows",
                     cfg->model.max_outputs);
        goto fail;
    }
    *ret = x;
    return BT_OK;

fail:
    kn_exec_destroy(x);
    return rc;
}

void kn_exec_destroy(struct kn_exec *x)
{
    if (!x) {
        return;
    }
    free(x->logits);
    free(x->seqs);
    kn_sampler_destroy(x->sampler);
    kn_model_destroy(x->model);
    free(x);
}

const struct kn_model *kn_exec_model(const struct kn_exec *x)
{
    return x->model;
}

static void draw(struct kn_exec *x, const struct kn_exec_args *a)
{
    size_t n_vocab = (size_t)kn_model_config(x->model)->n_vocab, n = 0;

    for (uint32_t i = 0; i < a->plan->n_rows; i++) {
        const struct kn_plan_row *row = &a->plan->rows[i];
        const struct kn_seq *s = kn_sched_at(a->sched, row->slot);
        struct kn_sample_args sample;

        if (!row->draw) {
            continue;
        }
        sample = (struct kn_sample_args){
            .params = &s->sampling,
            .logits = x->logits + n * n_vocab,
            .prompt = s->ids,
            .n_prompt = s->n_prompt,
            .answer = s->ids + s->n_prompt,
            .n_answer = row->n_answer,
            .eos = s->ends,
            .n_eos = s->n_ends,
        };
        kn_sample(x->sampler, &sample, &a->drawn[n++]);
    }
}

int kn_exec_run(struct kn_exec *x, const struct kn_exec_args *a, struct bt_err *err)
{
    const struct kn_step_plan *plan = a->plan;
    struct kn_batch batch = {
        .n_tokens = (int)plan->n_tokens,
        .ids = plan->ids,
        .n_seqs = (int)plan->n_rows,
        .seqs = x->seqs,
        .kv = kv_pool_region(x->cfg.pool)->base,
        .layout = kv_pool_layout(x->cfg.pool),
        .logits = x->logits,
        .layer_done = a->layer_done,
        .layer_done_arg = a->layer_done_arg,
        .layer_wait = a->layer_wait,
        .layer_wait_arg = a->layer_wait_arg,
    };
    int rc;

    for (uint32_t i = 0; i < plan->n_rows; i++) {
        const struct kn_plan_row *row = &plan->rows[i];

        x->seqs[i] = (struct kn_batch_seq){
            .n_tokens = (int32_t)row->n_tokens,
            .pos = (int32_t)row->pos,
            .pages = plan->pages + row->first_page,
            .want_logits = row->draw,
        };
    }
    rc = kn_model_forward(x->model, &batch, err);
    if (rc < 0) {
        return rc;
    }
    if (a->layer_wait) {
        a->layer_wait(a->layer_wait_arg, kv_pool_layout(x->cfg.pool)->n_layers);
    }
    draw(x, a);
    return BT_OK;
}
