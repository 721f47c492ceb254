/* Step plan to batch to tokens. All buffers are sized at start by the largest step. */
#include "kernels/engine/exec.h"

#include "common/base/buf.h"
#include "kernels/core/device.h"

#include <stdlib.h>

/* What of a page is on the device: its first `tokens`, if its generation is still this one. */
struct on_device {
    uint32_t generation, tokens;
};

/* A step that the device has. */
struct exec_step {
    bool *by_device; /* [max_batch_seqs] its token is drawn there */
    bool logits;     /* some are not */
};

struct kn_exec {
    struct kn_exec_cfg cfg;
    struct exec_step steps[2]; /* device: begun and not ended, in turn */
    uint32_t n_begun, n_ended; /* steps, as they wrap */
    struct kn_model *model;
    struct kn_sampler *sampler;
    struct kn_batch_seq *seqs;    /* [max_batch_seqs] */
    float *logits;                /* [max_outputs][V] */
    struct kn_device_draw *draws; /* device: [max_batch_seqs] of rows that it draws */
    int32_t *ids;                 /* device: [max_outputs] what it drew, -1 = not */
    struct bt_mem_region pages;   /* device: the pool there; base NULL = none */
    struct on_device *on_device;  /* device: [n_pages] */
    uint32_t *fetch;              /* device: [n_pages] to be copied there before the step */
};

static int create_pages(struct kn_exec *x, struct bt_err *err)
{
    const struct kv_layout *l = kv_pool_layout(x->cfg.pool);
    int rc;

    if (!x->cfg.model.device) {
        return BT_OK;
    }
    x->on_device = bt_calloc(l->n_pages, sizeof(*x->on_device));
    x->fetch = bt_calloc(l->n_pages, sizeof(*x->fetch));
    if (!x->on_device || !x->fetch) {
        return BT_FAIL(err, BT_E_NOMEM, "executor: no memory");
    }
    rc = x->cfg.model.device->mem->alloc(l->bytes, "baton-kv", &x->pages, err);
    return rc < 0 ? rc
                  : kn_model_mirror(x->model, l, x->pages.base, kv_pool_region(x->cfg.pool)->base,
                                    err);
}

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
    for (int i = 0; i < 2; i++) {
        x->steps[i].by_device = bt_calloc((size_t)cfg->model.max_batch_seqs, sizeof(bool));
    }
    if (!x->seqs || !x->logits || !x->draws || !x->ids || !x->steps[0].by_device ||
        !x->steps[1].by_device) {
        rc = BT_FAIL(err, BT_E_NOMEM, "executor: no memory for logits of %d rows",
                     cfg->model.max_outputs);
        goto fail;
    }
    rc = create_pages(x, err);
    if (rc < 0) {
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
    free(x->steps[0].by_device);
    free(x->steps[1].by_device);
    free(x->on_device);
    free(x->fetch);
    kn_sampler_destroy(x->sampler);
    kn_model_destroy(x->model); /* waits for what the device still does */
    if (x->pages.base) {
        x->pages.ops->free(&x->pages);
    }
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

/* Tells the device which rows to draw; the others' logits come back. */
static void set_draws(struct kn_exec *x, const struct kn_exec_args *a, struct exec_step *step)
{
    step->logits = false;
    for (uint32_t i = 0; i < a->plan->n_rows; i++) {
        const struct kn_plan_row *row = &a->plan->rows[i];
        const struct kn_seq *s = kn_sched_at(a->sched, row->slot);

        step->by_device[i] = row->draw && device_draws(s, row);
        if (!step->by_device[i]) {
            step->logits = step->logits || row->draw;
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
}

/* Pages of earlier positions that are not on the device as the pool has them. */
static int fetch_pages(struct kn_exec *x, const struct kn_step_plan *plan, struct bt_err *err)
{
    uint32_t pt = (uint32_t)kv_pool_layout(x->cfg.pool)->page_tokens;
    size_t n = 0;

    for (uint32_t i = 0; i < plan->n_rows; i++) {
        const struct kn_plan_row *row = &plan->rows[i];

        for (uint32_t k = 0; k * pt < row->pos; k++) {
            uint32_t page = plan->pages[row->first_page + k], need = BT_MIN(pt, row->pos - k * pt);
            uint32_t generation = kv_pool_generation(x->cfg.pool, page);
            struct on_device *there = &x->on_device[page];

            if (there->generation != generation || there->tokens < need) {
                *there = (struct on_device){generation, need};
                x->fetch[n++] = page;
            }
        }
    }
    return n > 0 ? kn_model_fetch(x->model, x->fetch, n, err) : BT_OK;
}

/* Rows above blocks that are still on their way may have read anything: what was fetched for them
 * does not count. */
static void note_pages(struct kn_exec *x, const struct kn_step_plan *plan)
{
    uint32_t pt = (uint32_t)kv_pool_layout(x->cfg.pool)->page_tokens;

    for (uint32_t i = 0; i < plan->n_rows; i++) {
        const struct kn_plan_row *row = &plan->rows[i];
        uint32_t end = row->pos + row->n_tokens;

        for (uint32_t k = row->loading ? 0 : row->pos / pt; k * pt < end; k++) {
            uint32_t page = plan->pages[row->first_page + k];
            uint32_t tokens = row->loading ? 0 : BT_MIN(pt, end - k * pt);

            x->on_device[page] = (struct on_device){kv_pool_generation(x->cfg.pool, page), tokens};
        }
    }
}

static void set_rows(struct kn_exec *x, const struct kn_step_plan *plan)
{
    for (uint32_t i = 0; i < plan->n_rows; i++) {
        const struct kn_plan_row *row = &plan->rows[i];

        x->seqs[i] = (struct kn_batch_seq){
            .n_tokens = (int32_t)row->n_tokens,
            .pos = (int32_t)row->pos,
            .pages = plan->pages + row->first_page,
            .want_logits = row->draw,
        };
    }
}

static struct kn_batch batch_of(const struct kn_exec *x, const struct kn_exec_args *a)
{
    return (struct kn_batch){
        .n_tokens = (int)a->plan->n_tokens,
        .ids = a->plan->ids,
        .n_seqs = (int)a->plan->n_rows,
        .seqs = x->seqs,
        .kv = x->pages.base ? x->pages.base : kv_pool_region(x->cfg.pool)->base,
        .layout = kv_pool_layout(x->cfg.pool),
        .logits = x->logits,
        .layer_done = a->layer_done,
        .layer_done_arg = a->layer_done_arg,
        .layer_wait = a->layer_wait,
        .layer_wait_arg = a->layer_wait_arg,
    };
}

static int begin_on_device(struct kn_exec *x, const struct kn_exec_args *a, struct bt_err *err)
{
    int n_layers = kv_pool_layout(x->cfg.pool)->n_layers, rc;
    struct exec_step *step = &x->steps[x->n_begun % 2];
    struct kn_batch batch = batch_of(x, a);

    set_draws(x, a, step);
    for (int il = 0; a->layer_wait && il < n_layers; il++) {
        a->layer_wait(a->layer_wait_arg, il);
    }
    rc = fetch_pages(x, a->plan, err);
    rc = rc < 0 ? rc : kn_model_submit(x->model, &batch, err);
    if (rc == BT_OK) {
        note_pages(x, a->plan); /* as the device will have them when the next step begins */
        x->n_begun++;
    }
    return rc;
}

int kn_exec_begin(struct kn_exec *x, const struct kn_exec_args *a, struct bt_err *err)
{
    struct kn_batch batch = batch_of(x, a);

    set_rows(x, a->plan);
    if (a->plan->n_rows == 0) {
        return BT_OK;
    }
    return x->cfg.model.device ? begin_on_device(x, a, err)
                               : kn_model_forward(x->model, &batch, err);
}

bool kn_exec_may_follow(const struct kn_exec *x)
{
    return x->n_begun - x->n_ended == 1 && !x->steps[x->n_ended % 2].logits;
}

static void draw(struct kn_exec *x, const struct kn_exec_args *a, const struct exec_step *step)
{
    size_t n_vocab = (size_t)kn_model_config(x->model)->n_vocab, n = 0;

    for (uint32_t i = 0; i < a->plan->n_rows; i++) {
        const struct kn_plan_row *row = &a->plan->rows[i];
        const struct kn_seq *s = kn_sched_at(a->sched, row->slot);
        struct kn_sample_args sample;

        if (!row->draw) {
            continue;
        }
        if (step && step->by_device[i]) {
            /* -1: no logit above -infinity. There are none of it here: its first end token. */
            bool none = x->ids[n] < 0;

            a->drawn[n] = (struct kn_token){.id = x->ids[n], .undrawn = none};
            if (none) {
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

void kn_exec_drop(struct kn_exec *x)
{
    struct bt_err err;

    x->n_ended++;
    if (kn_model_wait(x->model, NULL, NULL, &err) < 0) {
        return; /* as expected */
    }
}

int kn_exec_end(struct kn_exec *x, const struct kn_exec_args *a, struct bt_err *err)
{
    int n_layers = kv_pool_layout(x->cfg.pool)->n_layers, rc = BT_OK;
    struct exec_step *step = NULL;

    if (x->cfg.model.device && a->plan->n_rows > 0) {
        step = &x->steps[x->n_ended++ % 2];
        rc = kn_model_wait(x->model, x->ids, step->logits ? x->logits : NULL, err);
        for (int il = 0; rc == BT_OK && a->layer_done && il < n_layers; il++) {
            a->layer_done(a->layer_done_arg, il);
        }
    }
    if (rc < 0) {
        return rc;
    }
    if (a->layer_wait) {
        a->layer_wait(a->layer_wait_arg, n_layers);
    }
    draw(x, a, step);
    return BT_OK;
}
