/* Step plan to batch to tokens. All buffers are sized at start by the largest step. */
#include "kernels/engine/exec.h"

#include "common/base/buf.h"
#include "kernels/core/device.h"

#include <stdlib.h>

struct kn_exec {
    struct kn_exec_cfg cfg;
    struct kn_model *model;
    struct kn_sampler *sampler;
    struct kn_batch_seq *seqs;    /* [max_batch_seqs] */
    float *logits;                /* [max_outputs][V] */
    struct kn_device_draw *draws; /* device: [max_batch_seqs] of rows that it draws */
    int32_t *ids;                 /* device: [max_outputs] what it drew, -1 = not */
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
    x->draws = bt_calloc((size_t)cfg->model.max_batch_seqs, sizeof(*x->draws));
    x->ids = bt_calloc((size_t)cfg->model.max_outputs, sizeof(*x->ids));
    if (!x->seqs || !x->logits || !x->draws || !x->ids) {
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
    free(x->draws);
    free(x->ids);
    free(x->seqs);
    kn_sampler_destroy(x->sampler);
    kn_model_destroy(x->model);
    free(x);
}

const struct kn_model *kn_exec_model(const struct kn_exec *x)
{
    return x->model;
}

/* Can the device draw this row's token? It knows temperature, top-k, top-p and min-p. */
static bool device_draws(const struct kn_seq *s, const struct kn_plan_row *row)
{
    const struct wire_sampling *p = &s->sampling;

    return p->n_bias == 0 && p->n_logprobs < 0 && p->repetition_penalty == 1 &&
           p->presence_penalty == 0 && p->frequency_penalty == 0 && row->n_answer >= p->min_tokens;
}

/* Tells the device which rows to draw. True if some are left to the host, which needs logits. */
static bool set_draws(struct kn_exec *x, const struct kn_exec_args *a)
{
    bool left = false;

    for (uint32_t i = 0; i < a->plan->n_rows; i++) {
        const struct kn_plan_row *row = &a->plan->rows[i];
        const struct kn_seq *s = kn_sched_at(a->sched, row->slot);

        if (!row->draw || !device_draws(s, row)) {
            left = left || row->draw;
            continue;
        }
        x->draws[i] = (struct kn_device_draw){.temperature = s->sampling.temperature,
                                              .top_k = s->sampling.top_k,
                                              .top_p = s->sampling.top_p,
                                              .min_p = s->sampling.min_p,
                                              .seed = s->sampling.seed,
                                              .choice = s->sampling.choice,
                                              .position = row->n_answer};
        x->seqs[i].draw = &x->draws[i];
    }
    return left;
}

/* Some rows' tokens from the device, the others from their logits. A row that the device could not
 * draw although it was asked (no logit above -infinity) has no logits here: its first end token. */
static int run_on_device(struct kn_exec *x,
                         const struct kn_exec_args *a,
                         const struct kn_batch *b,
                         struct bt_err *err)
{
    int n_layers = kv_pool_layout(x->cfg.pool)->n_layers, rc;
    bool logits = set_draws(x, a);

    if (b->n_seqs == 0) {
        return BT_OK;
    }
    for (int il = 0; a->layer_wait && il < n_layers; il++) {
        a->layer_wait(a->layer_wait_arg, il);
    }
    rc = kn_model_submit(x->model, b, err);
    if (rc == BT_OK) {
        rc = kn_model_wait(x->model, x->ids, logits ? x->logits : NULL, err);
    }
    for (int il = 0; rc == BT_OK && a->layer_done && il < n_layers; il++) {
        a->layer_done(a->layer_done_arg, il);
    }
    return rc;
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
        if (x->cfg.model.device && x->seqs[i].draw) {
            a->drawn[n] = (struct kn_token){.id = x->ids[n]};
            if (x->ids[n] < 0) {
                a->drawn[n].id = s->n_ends > 0 ? s->ends[0] : 0;
            }
            n++;
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
    rc = x->cfg.model.device ? run_on_device(x, a, &batch, err)
                             : kn_model_forward(x->model, &batch, err);
    if (rc < 0) {
        return rc;
    }
    if (a->layer_wait) {
        a->layer_wait(a->layer_wait_arg, kv_pool_layout(x->cfg.pool)->n_layers);
    }
    draw(x, a);
    return BT_OK;
}
