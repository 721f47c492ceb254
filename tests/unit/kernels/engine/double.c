/* See double.h. The engine's thread queues and waits; the thread "double" runs the passes in order.
 */
#include "tests/unit/kernels/engine/double.h"

#include "common/base/buf.h"
#include "common/thr/time.h"
#include "kernels/model/model.h"
#include "kernels/model/sampler.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define MAX_SEQS 64
#define SLOTS    2

struct pass {
    int n_tokens, n_seqs, n_outputs;
    int32_t *ids;
    struct kn_batch_seq seqs[MAX_SEQS];
    struct kn_device_draw draws[MAX_SEQS];
    uint32_t *pages; /* of all sequences */
    uint32_t *fetch; /* pages to be copied in before it */
    size_t n_fetch;
    float *logits;
    int32_t drawn[MAX_SEQS];
    void *kv;
    bool done; /* guarded by lock */
    int rc;
};

struct kn_device {
    struct kn_device_cfg cfg;
    struct kn_model *model;
    struct kn_sampler *sampler;
    struct kv_layout layout;
    char *kv, *host;
    uint32_t *fetch; /* for the pass that is queued next */
    size_t n_fetch;
    struct pass *slots[SLOTS]; /* oldest first, NULL = free */
    uint64_t n_passes;
    int32_t last_drawn[MAX_SEQS]; /* thread's: of the pass before */
    int32_t *zeros;               /* answers that no penalty looks at */
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t cond;
    bool stop; /* guarded by lock */
};

struct double_seen double_seen;
static struct double_cfg use;

static void free_pass(struct pass *p)
{
    if (p) {
        free(p->ids);
        free(p->pages);
        free(p->fetch);
        free(p->logits);
        free(p);
    }
}

static void copy_page(const struct kn_device *d, char *to, const char *from, uint32_t page)
{
    for (int l = 0; l < d->layout.n_layers; l++) {
        size_t at = kv_layout_offset(&d->layout, l, page);

        memcpy(to + at, from + at, d->layout.page_stride);
    }
}

/* One row of K and V of every head to the mirror, and nothing beside it. */
static void mirror_row(const struct kn_device *d, uint32_t page, int token)
{
    size_t row = (size_t)d->layout.head_dim * 2;

    for (int l = 0; l < d->layout.n_layers; l++) {
        for (int h = 0; h < 2 * d->layout.n_kv_heads; h++) {
            size_t at = kv_layout_offset(&d->layout, l, page) +
                        ((size_t)h * (size_t)d->layout.page_tokens + (size_t)token) * row;

            memcpy(d->host + at, d->kv + at, row);
        }
    }
}

static void mirror_rows(const struct kn_device *d, const struct pass *p)
{
    for (int i = 0; i < p->n_seqs; i++) {
        const struct kn_batch_seq *s = &p->seqs[i];

        for (int t = s->pos; t < s->pos + s->n_tokens; t++) {
            mirror_row(d, s->pages[t / d->layout.page_tokens], t % d->layout.page_tokens);
        }
    }
}

static int32_t draw_one(struct kn_device *d, const struct kn_device_draw *w, const float *logits)
{
    struct wire_sampling params;
    struct kn_token token;
    struct kn_sample_args a = {
        .params = &params, .logits = logits, .answer = d->zeros, .n_answer = w->position};

    if (use.no_draw_at >= 0 && w->position == (uint64_t)use.no_draw_at) {
        return -1;
    }
    wire_sampling_defaults(&params);
    params.temperature = w->temperature;
    params.top_k = w->top_k;
    params.top_p = w->top_p;
    params.min_p = w->min_p;
    params.seed = w->seed;
    params.choice = w->choice;
    kn_sample(d->sampler, &a, &token);
    return token.id;
}

static void run(struct kn_device *d, struct pass *p)
{
    struct kn_batch b = {.n_tokens = p->n_tokens,
                         .ids = p->ids,
                         .n_seqs = p->n_seqs,
                         .seqs = p->seqs,
                         .kv = p->kv,
                         .layout = &d->layout,
                         .logits = p->logits};
    struct timespec pause = {.tv_nsec = (long)use.pass_us * 1000};
    struct bt_err err;
    size_t n_vocab = (size_t)d->cfg.model->n_vocab;
    int n = 0;

    nanosleep(&pause, NULL);
    p->rc = ++d->n_passes == use.fail_at ? BT_E_DEVICE_LOST : BT_OK;
    for (size_t i = 0; i < p->n_fetch; i++) {
        copy_page(d, d->kv, d->host, p->fetch[i]);
    }
    for (int i = 0; i < p->n_tokens; i++) {
        p->ids[i] = p->ids[i] >= 0 ? p->ids[i] : BT_MAX(d->last_drawn[-1 - p->ids[i]], 0);
    }
    p->rc = p->rc < 0 ? p->rc : kn_model_forward(d->model, &b, &err);
    if (p->rc < 0) {
        return;
    }
    mirror_rows(d, p);
    for (int i = 0; i < p->n_seqs; i++) {
        if (p->seqs[i].want_logits) {
            p->drawn[n] = p->seqs[i].draw
                              ? draw_one(d, p->seqs[i].draw, p->logits + (size_t)n * n_vocab)
                              : -1;
            n++;
        }
    }
    memcpy(d->last_drawn, p->drawn, sizeof(p->drawn));
}

static void *double_main(void *arg)
{
    struct kn_device *d = arg;

    pthread_mutex_lock(&d->lock);
    while (!d->stop) {
        struct pass *p = d->slots[0] && !d->slots[0]->done ? d->slots[0] : d->slots[1];

        if (!p || p->done) {
            pthread_cond_wait(&d->cond, &d->lock);
            continue;
        }
        pthread_mutex_unlock(&d->lock);
        run(d, p);
        pthread_mutex_lock(&d->lock);
        p->done = true;
        pthread_cond_broadcast(&d->cond);
    }
    pthread_mutex_unlock(&d->lock);
    return NULL;
}

static void close_double(struct kn_device *d)
{
    pthread_mutex_lock(&d->lock);
    d->stop = true;
    pthread_cond_broadcast(&d->cond);
    pthread_mutex_unlock(&d->lock);
    pthread_join(d->thread, NULL);
    free_pass(d->slots[0]);
    free_pass(d->slots[1]);
    kn_sampler_destroy(d->sampler);
    kn_model_destroy(d->model);
    pthread_cond_destroy(&d->cond);
    pthread_mutex_destroy(&d->lock);
    free(d->fetch);
    free(d->zeros);
    free(d);
}

static int open_double(const struct kn_device_cfg *cfg, struct kn_device **ret, struct bt_err *err)
{
    struct kn_model_cfg mc = {.file = use.file,
                              .n_threads = 1,
                              .isa = "auto",
                              .max_batch_tokens = cfg->max_batch_tokens,
                              .max_batch_seqs = cfg->max_batch_seqs,
                              .max_outputs = cfg->max_outputs,
                              .max_ctx = cfg->max_ctx};
    struct kn_device *d = bt_calloc(1, sizeof(*d));
    int rc;

    BT_BUG_ON(!d || cfg->max_batch_seqs > MAX_SEQS);
    d->cfg = *cfg;
    d->zeros = bt_calloc((size_t)cfg->max_ctx + 1, sizeof(*d->zeros));
    rc = kn_model_create(&mc, &d->model, err);
    BT_BUG_ON(!d->zeros || rc < 0);
    rc = kn_sampler_create(cfg->model->n_vocab, &d->sampler, err);
    BT_BUG_ON(rc < 0);
    pthread_mutex_init(&d->lock, NULL);
    pthread_cond_init(&d->cond, NULL);
    BT_BUG_ON(pthread_create(&d->thread, NULL, double_main, d) != 0);
    *ret = d;
    return BT_OK;
}

static const char *numerics(const struct kn_device *d)
{
    return kn_model_numerics(d->model);
}

/* Weights: the model that runs the passes has its own. */
static int upload(struct kn_device *d, void *dst, const void *src, size_t bytes, struct bt_err *err)
{
    (void)d;
    (void)err;
    memcpy(dst, src, bytes);
    return BT_OK;
}

static int weight(struct kn_device *d, struct kn_weight *w, struct bt_err *err)
{
    (void)d;
    (void)w;
    (void)err;
    return BT_OK;
}

static int finish(struct kn_device *d, struct bt_err *err)
{
    (void)d;
    (void)err;
    return BT_OK;
}

static int
mirror(struct kn_device *d, const struct kv_layout *l, void *kv, void *host, struct bt_err *err)
{
    (void)err;
    d->layout = *l;
    d->kv = kv;
    d->host = host;
    memset(kv, 0xff, l->bytes); /* NaN: what is read before it is written shows */
    d->fetch = bt_calloc(l->n_pages, sizeof(*d->fetch));
    BT_BUG_ON(!d->fetch);
    return BT_OK;
}

static int fetch(struct kn_device *d, const uint32_t *pages, size_t n, struct bt_err *err)
{
    (void)err;
    BT_BUG_ON(d->n_fetch + n > d->layout.n_pages);
    memcpy(d->fetch + d->n_fetch, pages, n * sizeof(*pages));
    d->n_fetch += n;
    return BT_OK;
}

static struct pass *make_pass(struct kn_device *d, const struct kn_device_batch *b)
{
    struct pass *p = bt_calloc(1, sizeof(*p));
    size_t n_pages = 0;

    BT_BUG_ON(!p || b->n_seqs > MAX_SEQS);
    p->n_tokens = b->n_tokens;
    p->n_seqs = b->n_seqs;
    p->kv = b->kv;
    p->ids = bt_calloc((size_t)b->n_tokens, sizeof(*p->ids));
    p->logits = bt_calloc((size_t)b->n_seqs * (size_t)d->cfg.model->n_vocab, sizeof(*p->logits));
    p->fetch = bt_calloc(d->n_fetch + 1, sizeof(*p->fetch));
    p->pages = bt_calloc((size_t)b->n_seqs * d->layout.n_pages, sizeof(*p->pages));
    BT_BUG_ON(!p->ids || !p->logits || !p->fetch || !p->pages);
    memcpy(p->ids, b->ids, (size_t)b->n_tokens * sizeof(*p->ids));
    memcpy(p->fetch, d->fetch, d->n_fetch * sizeof(*p->fetch));
    p->n_fetch = d->n_fetch;
    d->n_fetch = 0;
    for (int i = 0; i < b->n_seqs; i++) {
        const struct kn_device_seq *s = &b->seqs[i];
        uint32_t n = kv_layout_pages_for(&d->layout, (size_t)s->pos + (size_t)s->n_tokens);

        memcpy(p->pages + n_pages, s->pages, n * sizeof(*p->pages));
        p->seqs[i] = (struct kn_batch_seq){.n_tokens = s->n_tokens,
                                           .pos = s->pos,
                                           .pages = p->pages + n_pages,
                                           .want_logits = s->want_logits};
        n_pages += n;
        if (s->draw) {
            p->draws[i] = *s->draw;
            p->seqs[i].draw = &p->draws[i];
        }
        p->n_outputs += s->want_logits;
    }
    return p;
}

static int pass(struct kn_device *d,
                const struct kn_device_batch *b,
                void (*record)(void *arg),
                void *arg,
                struct bt_err *err)
{
    struct pass *p = make_pass(d, b);

    (void)record;
    (void)arg;
    pthread_mutex_lock(&d->lock);
    if (d->slots[1]) {
        pthread_mutex_unlock(&d->lock);
        free_pass(p);
        return BT_FAIL(err, BT_E_INTERNAL, "two passes are queued already");
    }
    atomic_fetch_add(&double_seen.passes, 1);
    if (d->slots[0]) {
        atomic_fetch_add(&double_seen.queued_behind, !d->slots[0]->done);
        atomic_store(&double_seen.most_queued, 2);
    }
    d->slots[d->slots[0] ? 1 : 0] = p;
    pthread_cond_broadcast(&d->cond);
    pthread_mutex_unlock(&d->lock);
    return BT_OK;
}

static int wait(struct kn_device *d, int32_t *drawn, float *logits, struct bt_err *err)
{
    struct pass *p;
    int rc;

    pthread_mutex_lock(&d->lock);
    p = d->slots[0];
    while (p && !p->done) {
        pthread_cond_wait(&d->cond, &d->lock);
    }
    if (!p || (logits && d->slots[1])) {
        pthread_mutex_unlock(&d->lock);
        return BT_FAIL(err, BT_E_INTERNAL, p ? "its logits are lost" : "no pass is queued");
    }
    d->slots[0] = d->slots[1];
    d->slots[1] = NULL;
    pthread_mutex_unlock(&d->lock);
    rc = p->rc < 0 ? BT_FAIL(err, p->rc, "the device is lost") : BT_OK;
    if (rc == BT_OK && logits) {
        memcpy(logits, p->logits,
               (size_t)p->n_outputs * (size_t)d->cfg.model->n_vocab * sizeof(*logits));
    }
    if (rc == BT_OK && drawn) {
        memcpy(drawn, p->drawn, (size_t)p->n_outputs * sizeof(*drawn));
    }
    free_pass(p);
    return rc;
}

static const struct kn_device_ops ops = {
    .abi = KN_DEVICE_ABI,
    .name = "double",
    .mem = &bt_mem_host,
    .open = open_double,
    .close = close_double,
    .numerics = numerics,
    .upload = upload,
    .weight = weight,
    .finish = finish,
    .mirror = mirror,
    .fetch = fetch,
    .pass = pass,
    .wait = wait,
};

const struct kn_device_ops *double_use(const struct double_cfg *cfg)
{
    use = *cfg;
    atomic_store(&double_seen.passes, 0);
    atomic_store(&double_seen.queued_behind, 0);
    atomic_store(&double_seen.most_queued, 0);
    return &ops;
}
