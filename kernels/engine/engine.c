/* The engine's thread: mailbox, plan, forward, sample, emit.
 *
 * Submit and cancel make messages on the caller's thread; handoff events come as messages from the
 * net's thread. All else happens here. While there is work the loop does not sleep; without work it
 * waits for a message or the next deadline. Memory of a step's outputs is one allocation, made when
 * the first output comes and freed by the receiver; a note is another one. Nothing else is
 * allocated in the loop.
 */
#include "kernels/engine/engine_int.h"

#include "common/base/buf.h"
#include "common/obs/log.h"
#include "common/thr/cond.h"
#include "common/thr/thread.h"
#include "kernels/core/device.h"
#include "kernels/core/profile.h"

#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

/* How long a queued request waits before holders give way to it, and before reservations are
 * withdrawn for it. Long against a step, short against a person's patience. */
#define PATIENCE_NS (2 * BT_NS_PER_S)
#define WITHDRAW_NS (10 * BT_NS_PER_S)

#define STEP_OUTPUTS 64 /* least capacity of a step */

/* Of a guess how fast prompts are computed: what is usual for a processor's thread and for a card,
 * to a factor of a few, and what a token costs at least. */
#define THREAD_FLOPS   1e11
#define DEVICE_FLOPS   1e14
#define LEAST_TOKEN_NS (50 * BT_NS_PER_US)

struct cancel {
    struct bt_msg msg;
    uint64_t tag;
};

/* ---- outputs ---- */

static size_t step_cap(const struct kn_engine *e)
{
    return BT_MAX((size_t)e->cfg.max_running, (size_t)STEP_OUTPUTS);
}

static void flush(struct kn_engine *e)
{
    struct kn_step *step = e->step;

    e->step = NULL;
    if (step) {
        e->cfg.emit(e->cfg.emit_arg, step);
    }
}

/* Step, outputs and tokens in one piece. Running out of memory here cannot be told to anybody. */
static void begin_step(struct kn_engine *e)
{
    size_t n = step_cap(e);
    char *p =
        malloc(sizeof(struct kn_step) + n * sizeof(struct kn_output) + n * sizeof(struct kn_token));

    BT_BUG_ON(!p);
    e->step = (struct kn_step *)p;
    *e->step = (struct kn_step){.outputs = (struct kn_output *)(p + sizeof(struct kn_step))};
    bt_list_init(&e->step->msg.link);
    e->step_tokens = 0;
}

void kn_step_free(struct kn_step *step)
{
    free(step);
}

static void on_output(void *arg, const struct kn_output *out)
{
    struct kn_engine *e = arg;
    struct kn_token *tokens;
    struct kn_output *o;

    BT_BUG_ON(out->n_tokens > step_cap(e));
    if (e->step &&
        (e->step->n_outputs == step_cap(e) || e->step_tokens + out->n_tokens > step_cap(e))) {
        flush(e);
    }
    if (!e->step) {
        begin_step(e);
    }
    tokens = (struct kn_token *)(e->step->outputs + step_cap(e)) + e->step_tokens;
    if (out->n_tokens > 0) {
        memcpy(tokens, out->tokens, out->n_tokens * sizeof(*tokens));
    }
    o = &e->step->outputs[e->step->n_outputs++];
    *o = *out;
    o->tokens = tokens;
    e->step_tokens += out->n_tokens;
}

/* ---- messages ---- */

/* Requests with different salts never share a block: their keys have different roots. */
static void set_root(struct kn_engine *e, struct kn_seq *s)
{
    struct kv_key_root_args key = e->key;

    s->root = e->root;
    if (e->index && s->cache_salt[0]) {
        key.tenant_salt = bt_str_of(s->cache_salt);
        /* Its length was checked. */
        BT_BUG_ON(kv_index_root(e->index, &key, &s->root, NULL) != BT_OK);
    }
}

static void handle_submit(struct bt_msg *msg, void *consumer)
{
    struct kn_seq *s = BT_CONTAINER_OF(msg, struct kn_seq, submit);
    struct kn_engine *e = consumer;

    if (e->ended_all) {
        struct kn_output out = {.tag = s->tag, .offset = s->n_answer, .rc = BT_E_CANCELLED};

        snprintf(out.err_msg, sizeof(out.err_msg), "the engine stops");
        on_output(e, &out);
        kn_seq_destroy(s);
    } else {
        set_root(e, s);
        kn_sched_add(e->sched, s);
    }
    atomic_store_explicit(&e->stats.waiting, kn_sched_stats(e->sched).n_state[KN_SEQ_WAITING],
                          memory_order_relaxed);
    atomic_fetch_sub_explicit(&e->n_pending, 1, memory_order_relaxed);
}

static void handle_cancel(struct bt_msg *msg, void *consumer)
{
    struct cancel *c = BT_CONTAINER_OF(msg, struct cancel, msg);
    struct kn_engine *e = consumer;
    struct kn_seq *s = kn_sched_find(e->sched, c->tag);

    if (s) {
        kn_sched_end(e->sched, s, BT_E_CANCELLED, "cancelled");
    }
    free(c);
}

/* ---- the loop ---- */

static void publish_stats(struct kn_engine *e)
{
    struct kn_sched_stats s = kn_sched_stats(e->sched);
    struct kv_index_stats x = {0};

    if (e->index) {
        x = kv_index_stats(e->index);
    }
#define PUT(field, value) atomic_store_explicit(&e->stats.field, (value), memory_order_relaxed)
    PUT(waiting,
        s.n_state[KN_SEQ_WAITING] + s.n_state[KN_SEQ_PREEMPTED] + s.n_state[KN_SEQ_LOADING]);
    PUT(running, s.n_state[KN_SEQ_RUNNING] + s.n_state[KN_SEQ_PREFILLING]);
    PUT(holding, s.n_state[KN_SEQ_HOLDING]);
    PUT(tokens_waiting, s.tokens_waiting);
    PUT(steps, s.steps);
    PUT(steps_ahead, s.steps_ahead);
    PUT(tokens_computed, s.tokens_computed);
    PUT(tokens_generated, s.tokens_generated);
    PUT(preemptions, s.preemptions);
    PUT(tokens_cached, s.tokens_cached);
    PUT(blocks_evicted, x.evictions);
    PUT(key_collisions, x.collisions);
    PUT(blocks_bad, x.bad);
    PUT(loads, s.loads);
    PUT(loads_given_up, s.loads_given_up);
    PUT(loads_short, s.loads_short);
    PUT(load_wait_ns, s.load_wait_ns);
    PUT(overtakes, s.overtakes);
    PUT(swapped, s.swapped);
    PUT(resumed, s.resumed);
    for (int i = 0; i < KV_N_TIERS; i++) {
        PUT(tier_tokens[i], s.tier_tokens[i]);
    }
    PUT(oldest_ns, x.oldest_ns);
#undef PUT
}

struct layer_arg {
    struct kn_engine *e;
    const struct kn_step_plan *plan;
    uint64_t waited_ns; /* for loads, in this step */
};

/* Any thread. */
static void on_progress(void *arg)
{
    struct kn_engine *e = arg;

    pthread_mutex_lock(&e->progress_lock);
    e->progress++;
    pthread_cond_signal(&e->progress_cond);
    pthread_mutex_unlock(&e->progress_lock);
}

/* Stands still until the loads of the plan's rows have come to `layer`, or the step has waited for
 * as long as it may: then these rows were for nothing. */
static void on_layer_wait(void *arg, int layer)
{
    struct layer_arg *a = arg;
    struct kn_engine *e = a->e;
    uint64_t begin = bt_now_ns(), left = a->plan->stall_ns, end, waited;

    if (kn_sched_layer_ready(e->sched, a->plan, layer)) {
        return;
    }
    left = left > a->waited_ns ? left - a->waited_ns : 0;
    end = begin + left;
    pthread_mutex_lock(&e->progress_lock);
    while (!kn_sched_layer_ready(e->sched, a->plan, layer) &&
           bt_cond_until(&e->progress_cond, &e->progress_lock, end)) {
    }
    pthread_mutex_unlock(&e->progress_lock);
    waited = bt_now_ns() - begin;
    a->waited_ns += waited;
    kn_sched_layer_waited(e->sched, a->plan, layer, waited);
}

static void on_layer_done(void *arg, int layer)
{
    struct layer_arg *a = arg;

    kn_xfer_layer_done(a->e, a->plan, layer);
}

/* A step between begin and end. */
struct flight {
    const struct kn_step_plan *plan;
    struct layer_arg layer;
    struct kn_exec_args args;
    uint64_t begin_ns;
};

static void
step_failed(struct kn_engine *e, const struct kn_step_plan *plan, int rc, const char *msg)
{
    BT_ERROR("step_failed", "rc=%s rows=%u msg=\"%s\"", bt_rc_name(rc), plan->n_rows, msg);
    kn_sched_step_failed(e->sched, plan, rc, msg);
}

static int begin_step_of(struct kn_engine *e,
                         struct flight *f,
                         const struct kn_step_plan *plan,
                         struct bt_err *err)
{
    *f = (struct flight){.plan = plan, .layer = {e, plan, 0}, .begin_ns = bt_now_ns()};
    f->args = (struct kn_exec_args){
        .plan = plan,
        .sched = e->sched,
        .layer_done = e->handoff ? on_layer_done : NULL,
        .layer_done_arg = &f->layer,
        .layer_wait = plan->n_loading > 0 ? on_layer_wait : NULL,
        .layer_wait_arg = &f->layer,
        .drawn = e->drawn,
    };
    return kn_exec_begin(e->exec, &f->args, err);
}

static int end_step_of(struct kn_engine *e, struct flight *f)
{
    struct bt_err err = {.rc = BT_OK};
    int rc = kn_exec_end(e->exec, &f->args, &err);
    uint64_t now, ns;

    if (rc < 0) {
        step_failed(e, f->plan, rc, bt_err_msg(&err, rc));
        return rc;
    }
    now = bt_now_ns();
    ns = now - BT_MAX(f->begin_ns, e->step_end_ns) - f->layer.waited_ns;
    e->step_end_ns = now;
    kn_note_step(e, f->plan, ns);
    kn_sched_measured(e->sched, f->plan, ns);
    kn_xfer_step_done(e, f->plan);
    kn_sched_step_done(e->sched, f->plan, e->drawn);
    return BT_OK;
}

/* What a step has to say goes out. */
static void tell(struct kn_engine *e)
{
    publish_stats(e);
    kn_note_flush(e);
    flush(e);
}

/* Nobody has anything for the engine: no message, no poke, no stop. */
static bool undisturbed(const struct kn_engine *e)
{
    struct pollfd fd = {.fd = e->wake_fd, .events = POLLIN};

    return poll(&fd, 1, 0) == 0;
}

/* The step to follow `f`, begun while that one runs; false = none. A failure to begin is told when
 * f has ended: till then its requests have to stay. */
static bool begin_ahead(struct kn_engine *e,
                        const struct flight *f,
                        struct flight *next,
                        int *ret_rc,
                        struct bt_err *err)
{
    const struct kn_step_plan *plan = NULL;

    *ret_rc = BT_OK;
    if (!e->cfg.never_ahead && kn_exec_may_follow(e->exec) && undisturbed(e)) {
        uint64_t now = bt_now_ns();

        if (e->index) {
            kv_index_set_time(e->index, now);
        }
        plan = kn_sched_plan_ahead(e->sched, f->plan, now);
    }
    if (plan) {
        *ret_rc = begin_step_of(e, next, plan, err);
    }
    return plan != NULL;
}

/* Runs the step, and on a device those that follow from it: each is planned and queued before the
 * one before it has ended. Comes back with none under way. */
static void run_steps(struct kn_engine *e, const struct kn_step_plan *plan)
{
    struct flight flights[2], *f = &flights[0], *next;
    struct bt_err err = {.rc = BT_OK};
    int rc = begin_step_of(e, f, plan, &err);
    bool follows = true;

    if (rc < 0) {
        step_failed(e, plan, rc, bt_err_msg(&err, rc));
        return;
    }
    for (; follows; f = next) {
        next = f == &flights[0] ? &flights[1] : &flights[0];
        follows = begin_ahead(e, f, next, &rc, &err);
        if (end_step_of(e, f) < 0 && follows && rc == BT_OK) {
            kn_exec_drop(e->exec); /* its requests are gone */
            return;
        }
        if (rc < 0) {
            step_failed(e, next->plan, rc, bt_err_msg(&err, rc));
            return;
        }
        if (follows) {
            tell(e);
        }
    }
}

/* Waits for a message, at most until the scheduler has something to do by itself. */
static void sleep_until(struct kn_engine *e, uint64_t wake_ns)
{
    struct pollfd fd = {.fd = e->wake_fd, .events = POLLIN};
    uint64_t now = bt_now_ns(), delay = wake_ns > now ? wake_ns - now : 0;
    struct timespec ts = {.tv_sec = (time_t)(delay / BT_NS_PER_S),
                          .tv_nsec = (long)(delay % BT_NS_PER_S)};

    ppoll(&fd, 1, wake_ns == BT_NEVER_NS ? NULL : &ts, NULL);
    bt_eventfd_clear(e->wake_fd);
}

static void *engine_main(void *arg)
{
    struct kn_engine *e = arg;

    for (;;) {
        const struct kn_step_plan *plan;
        bool loading = false, any;

        bt_eventfd_clear(e->wake_fd); /* before the mailbox is looked into */
        bt_mailbox_drain(&e->mailbox, e);
        /* Pairs with the release in stop. */
        if (!e->ended_all && atomic_load_explicit(&e->stopping, memory_order_acquire)) {
            e->ended_all = true;
            kn_sched_end_all(e->sched, BT_E_CANCELLED, "the engine stops");
        }
        if (e->index) {
            kv_index_set_time(e->index, bt_now_ns());
        }
        kn_sched_tick(e->sched, bt_now_ns());
        plan = kn_sched_plan(e->sched, bt_now_ns());
        any = plan->n_rows > 0;
        if (any) {
            loading = plan->n_loading > 0; /* the plan's memory is used again */
            run_steps(e, plan);
        }
        if (loading) {
            bt_mailbox_drain(&e->mailbox, e); /* the ends of their loads: their tokens go out now */
        }
        tell(e);
        if (e->ended_all && kn_sched_idle(e->sched)) {
            break;
        }
        if (!any) {
            sleep_until(e, kn_sched_next_wake_ns(e->sched));
        }
    }
    bt_mailbox_close(&e->mailbox);
    bt_mailbox_drain(&e->mailbox, e); /* late submits end with CANCELLED */
    flush(e);
    return NULL;
}

/* ---- life ---- */

static int check_cfg(const struct kn_engine_cfg *cfg, struct bt_err *err)
{
    const struct bt_model_config *mc = bt_model_config(cfg->file);

    if (cfg->max_ctx < 0 || cfg->max_ctx > mc->n_ctx) {
        return BT_FAIL(err, BT_E_CONFIG, "max_ctx is %d, the model has %d positions", cfg->max_ctx,
                       mc->n_ctx);
    }
    if (cfg->block_tokens > 0 && !cfg->key.model_digest) {
        return BT_FAIL(err, BT_E_CONFIG, "prefix reuse needs the model's digest");
    }
    if (cfg->max_batch_tokens < 1 || cfg->max_running < 1 || cfg->max_waiting < 1) {
        return BT_FAIL(err, BT_E_CONFIG,
                       "max_batch_tokens %d, max_running %d and max_waiting %d must be at least 1",
                       cfg->max_batch_tokens, cfg->max_running, cfg->max_waiting);
    }
    return BT_OK;
}

static int create_pool(struct kn_engine *e, struct bt_err *err)
{
    const struct bt_model_config *mc = bt_model_config(e->cfg.file);
    struct kv_layout l = {.n_layers = mc->n_layers,
                          .n_kv_heads = mc->n_kv_heads,
                          .head_dim = mc->head_dim,
                          .page_tokens = e->cfg.page_tokens,
                          .dtype =
                              e->cfg.device ? kn_model_device_kv(e->cfg.file) : e->cfg.kv_dtype,
                          .n_pages = 1};
    size_t n, tokens;
    int rc = kv_layout_init(&l, err);

    if (rc < 0) {
        return rc;
    }
    n = BT_MIN(e->cfg.pool_bytes / l.bytes, (size_t)INT32_MAX);
    if (n == 0) {
        return BT_FAIL(err, BT_E_CONFIG, "pool of %zu bytes holds no page of %zu bytes",
                       e->cfg.pool_bytes, l.bytes);
    }
    l.n_pages = (uint32_t)n;
    rc = kv_layout_init(&l, err);
    if (rc < 0) {
        return rc;
    }
    tokens = n * (size_t)l.page_tokens;
    e->max_tokens = (uint32_t)BT_MIN((size_t)e->max_ctx, tokens);
    if (e->cfg.keeper && e->cfg.block_tokens > 0) {
        return kn_keep_pool(e, &l, err);
    }
    return kv_pool_create(&l, e->cfg.mem ? e->cfg.mem : &bt_mem_host, "baton-kv", &e->pool, err);
}

static int create_exec(struct kn_engine *e, struct bt_err *err)
{
    struct kn_exec_cfg cfg = {
        .model = {.file = e->cfg.file,
                  .n_threads = e->cfg.n_threads,
                  .isa = e->cfg.isa ? e->cfg.isa : "auto",
                  .max_batch_tokens = e->cfg.max_batch_tokens,
                  .max_batch_seqs = e->cfg.max_running,
                  .max_outputs = BT_MIN(e->cfg.max_running, e->cfg.max_batch_tokens),
                  .max_ctx = e->max_ctx,
                  .device = e->cfg.device,
                  .invariant = e->cfg.invariant,
                  .random_seed = e->cfg.random_seed,
                  .home = kn_keep_home(e),
                  .page_tokens = e->cfg.page_tokens},
        .pool = e->pool,
    };

    e->drawn = bt_calloc((size_t)e->cfg.max_running, sizeof(*e->drawn));
    if (!e->drawn) {
        return BT_FAIL(err, BT_E_NOMEM, "engine: no memory");
    }
    return kn_exec_create(&cfg, &e->exec, err);
}

/* A copy of what keys are made of: requests with a salt have a root of their own. */
static int keep_key_args(struct kn_engine *e, struct bt_err *err)
{
    const struct kv_key_root_args *from = &e->cfg.key;

    e->key = *from;
    e->secret = bt_calloc(from->secret.n + 1, 1);
    if (!e->secret) {
        return BT_FAIL(err, BT_E_NOMEM, "engine: no memory");
    }
    if (from->secret.n > 0) {
        memcpy(e->secret, from->secret.p, from->secret.n);
    }
    memcpy(e->model_digest, from->model_digest, sizeof(e->model_digest));
    kv_layout_digest(kv_pool_layout(e->pool), e->kv_format);
    e->key.secret.p = e->secret;
    e->key.model_digest = e->model_digest;
    e->key.kv_format_digest = e->kv_format;
    e->key.numerics = bt_str_of(kn_engine_numerics(e));
    return BT_OK;
}

/* After the executor: its numerics are part of the keys. */
static int create_index(struct kn_engine *e, struct bt_err *err)
{
    struct kv_index_cfg cfg = {
        .pool = e->pool,
        .block_tokens = e->cfg.block_tokens,
        .key_bits = e->cfg.key_bits,
        .sink = kn_note_sink(e),
    };
    int rc;

    if (e->cfg.block_tokens == 0) {
        return BT_OK;
    }
    rc = keep_key_args(e, err);
    rc = rc < 0 ? rc : kv_index_create(&cfg, &e->index, err);
    rc = rc < 0 ? rc : kv_index_root(e->index, &e->key, &e->root, err);
    return rc < 0 || !e->cfg.keeper ? rc : kn_keep_adopt(e, err);
}

/* Any thread. The engine takes messages until nothing is under way any more. */
static void post(void *arg, struct bt_msg *msg)
{
    struct kn_engine *e = arg;

    BT_BUG_ON(!bt_mailbox_push(&e->mailbox, msg));
}

static uint64_t clock_ns(void *arg)
{
    (void)arg;
    return bt_now_ns();
}

/* What a token of a prompt costs, as far as its products tell: before the first prompt was computed
 * this decides between computing one and bringing it. */
static uint64_t guess_token_ns(const struct kn_engine *e)
{
    const struct bt_model_config *c = bt_model_config(e->cfg.file);
    double d = c->d_model, heads = (double)(c->n_heads + c->n_kv_heads) * c->head_dim;
    double flops = 2.0 * c->n_layers * (2 * d * heads + 3 * d * c->d_ff);
    double ns = flops / (e->cfg.device ? DEVICE_FLOPS : THREAD_FLOPS * e->cfg.n_threads) * 1e9;

    return BT_MAX((uint64_t)ns, LEAST_TOKEN_NS);
}

static int create_sched(struct kn_engine *e, struct bt_err *err)
{
    struct kn_sched_cfg cfg = {
        .pool = e->pool,
        .index = e->index,
        .sources = e->sources,
        .n_sources = e->n_sources,
        .n_local = e->n_local_sources,
        .always_bring = e->cfg.always_bring,
        .guess_token_ns = guess_token_ns(e),
        .post = post,
        .clock = clock_ns,
        .progress = on_progress,
        .post_arg = e,
        .max_batch_tokens = e->cfg.max_batch_tokens,
        .max_running = e->cfg.max_running,
        .n_vocab = bt_model_config(e->cfg.file)->n_vocab,
        .patience_ns = PATIENCE_NS,
        .withdraw_ns = WITHDRAW_NS,
        .xfer = &kn_xfer_handoff,
        .xfer_arg = e,
        .output = on_output,
        .output_arg = e,
    };

    return kn_sched_create(&cfg, &e->sched, err);
}

int kn_engine_create(const struct kn_engine_cfg *cfg,
                     struct kn_engine **ret_engine,
                     struct bt_err *err)
{
    struct kn_engine *e;
    int rc = check_cfg(cfg, err);

    if (rc < 0) {
        return rc;
    }
    if (cfg->profile) {
        kn_profile_enable();
    }
    e = bt_calloc(1, sizeof(*e));
    if (!e) {
        return BT_FAIL(err, BT_E_NOMEM, "engine: no memory");
    }
    e->cfg = *cfg;
    e->wake_fd = -1;
    e->max_ctx = cfg->max_ctx > 0 ? cfg->max_ctx : bt_model_config(cfg->file)->n_ctx;
    bt_mailbox_init(&e->mailbox, bt_eventfd_wake, &e->wake_fd);
    pthread_mutex_init(&e->progress_lock, NULL);
    bt_cond_init(&e->progress_cond);
    rc = create_pool(e, err);
    rc = rc < 0 ? rc : create_exec(e, err);
    rc = rc < 0 ? rc : create_index(e, err);
    memset(&e->cfg.key, 0, sizeof(e->cfg.key)); /* was borrowed, e->key is ours */
    rc = rc < 0 ? rc : bt_eventfd_create(&e->wake_fd, err);
    if (rc < 0) {
        kn_engine_destroy(e);
        return rc;
    }
    *ret_engine = e;
    return BT_OK;
}

void kn_engine_add_source(struct kn_engine *e, struct kv_source *source, bool local)
{
    BT_BUG_ON(e->started || !e->index || e->n_sources == KN_MAX_SOURCES);
    BT_BUG_ON(local && e->n_local_sources < e->n_sources);
    e->sources[e->n_sources++] = source;
    e->n_local_sources += local;
}

void kn_engine_poke(struct kn_engine *e)
{
    bt_eventfd_wake(&e->wake_fd);
}

int kn_engine_start(struct kn_engine *e, struct kv_handoff *handoff, struct bt_err *err)
{
    int rc;

    BT_BUG_ON(e->started);
    e->handoff = handoff;
    rc = create_sched(e, err);
    if (rc < 0) {
        return rc;
    }
    rc = bt_thread_start(&e->thread, "engine", engine_main, e, err);
    e->started = rc == BT_OK;
    return rc;
}

bool kn_engine_stop(struct kn_engine *e)
{
    if (e->started) {
        atomic_store_explicit(&e->stopping, true, memory_order_release);
        bt_eventfd_wake(&e->wake_fd);
        pthread_join(e->thread, NULL);
        e->started = false;
    }
    kn_keep_leave(e);
    return (!e->index || kv_index_clear(e->index)) && kv_pool_audit(e->pool);
}

void kn_engine_destroy(struct kn_engine *e)
{
    if (!e) {
        return;
    }
    BT_BUG_ON(e->started);
    kn_keep_leave(e);
    kn_sched_destroy(e->sched);
    kv_index_destroy(e->index);
    kn_exec_destroy(e->exec);
    kv_pool_destroy(e->pool);
    kn_keep_fini(e);
    bt_mailbox_fini(&e->mailbox);
    pthread_cond_destroy(&e->progress_cond);
    pthread_mutex_destroy(&e->progress_lock);
    bt_close_fd(&e->wake_fd);
    free(e->drawn);
    if (e->secret) {
        explicit_bzero(e->secret, e->key.secret.n);
        free(e->secret);
    }
    free(e->notes.events);
    free(e);
}

struct kv_pool *kn_engine_pool(const struct kn_engine *e)
{
    return e->pool;
}

const struct bt_model_config *kn_engine_config(const struct kn_engine *e)
{
    return bt_model_config(e->cfg.file);
}

const char *kn_engine_numerics(const struct kn_engine *e)
{
    return kn_model_numerics(kn_exec_model(e->exec));
}

int kn_engine_max_ctx(const struct kn_engine *e)
{
    return e->max_ctx;
}

/* ---- requests ---- */

static int check_ids(const struct kn_engine *e, const int32_t *ids, size_t n, struct bt_err *err)
{
    int n_vocab = kn_engine_config(e)->n_vocab;

    for (size_t i = 0; i < n; i++) {
        if (ids[i] < 0 || ids[i] >= n_vocab) {
            return BT_FAIL(err, BT_E_INVALID, "token %d is not in the vocabulary of %d", ids[i],
                           n_vocab);
        }
    }
    return BT_OK;
}

static int
check_submit(const struct kn_engine *e, const struct kn_submit_args *a, struct bt_err *err)
{
    size_t max_ctx = (size_t)e->max_ctx, total;

    if (a->leg != KN_LEG_LOCAL && !e->handoff) {
        return BT_FAIL(err, BT_E_UNSUPPORTED, "this node makes no handoffs");
    }
    if (a->n_prompt == 0) {
        return BT_FAIL(err, BT_E_INVALID, "the prompt is empty");
    }
    if (!bt_add_size(a->n_prompt, a->n_answered, &total) || total >= max_ctx) {
        return BT_FAIL(err, BT_E_INVALID,
                       "prompt of %zu tokens leaves no room in the context of %zu",
                       a->n_prompt + a->n_answered, max_ctx);
    }
    if (total >= e->max_tokens) {
        return BT_FAIL(err, BT_E_EXHAUSTED, "prompt of %zu tokens, the KV pool holds %u", total,
                       e->max_tokens);
    }
    if (a->n_answered >= a->sampling->max_tokens) {
        return BT_FAIL(err, BT_E_INVALID, "%zu tokens are answered, max_tokens is %u",
                       a->n_answered, a->sampling->max_tokens);
    }
    if (a->cache_salt && strlen(a->cache_salt) > KV_KEY_FIELD_MAX) {
        return BT_FAIL(err, BT_E_INVALID, "the cache salt has %zu bytes, at most %d",
                       strlen(a->cache_salt), KV_KEY_FIELD_MAX);
    }
    if (check_ids(e, a->prompt, a->n_prompt, err) < 0) {
        return BT_E_INVALID;
    }
    return check_ids(e, a->answered, a->n_answered, err);
}

int kn_engine_submit(struct kn_engine *e, const struct kn_submit_args *a, struct bt_err *err)
{
    const struct bt_model_config *mc = kn_engine_config(e);
    struct kn_seq_cfg cfg = {.max_tokens = e->max_tokens,
                             .page_tokens = (uint32_t)e->cfg.page_tokens,
                             .block_tokens = (uint32_t)e->cfg.block_tokens,
                             .n_sources = e->n_sources,
                             .eos = mc->eos,
                             .n_eos = (uint32_t)mc->n_eos};
    uint32_t waiting;
    struct kn_seq *s;
    int rc = check_submit(e, a, err);

    if (rc < 0) {
        return rc;
    }
    rc = kn_seq_create(a, &cfg, &s, err);
    if (rc < 0) {
        return rc;
    }
    waiting = atomic_fetch_add_explicit(&e->n_pending, 1, memory_order_relaxed) +
              atomic_load_explicit(&e->stats.waiting, memory_order_relaxed);
    if (waiting >= (uint32_t)e->cfg.max_waiting) {
        rc = BT_FAIL(err, BT_E_EXHAUSTED, "%u requests wait, at most %d may", waiting,
                     e->cfg.max_waiting);
        goto fail;
    }
    s->engine = e;
    s->submit.handle = handle_submit;
    bt_list_init(&s->submit.link);
    bt_list_init(&s->xfer_done.link);
    if (atomic_load_explicit(&e->stopping, memory_order_relaxed) ||
        !bt_mailbox_push(&e->mailbox, &s->submit)) {
        rc = BT_FAIL(err, BT_E_UNAVAILABLE, "the engine stops");
        goto fail;
    }
    return BT_OK;

fail:
    atomic_fetch_sub_explicit(&e->n_pending, 1, memory_order_relaxed);
    kn_seq_destroy(s);
    return rc;
}

void kn_engine_cancel(struct kn_engine *e, uint64_t tag)
{
    struct cancel *c = bt_calloc(1, sizeof(*c));

    if (!c) {
        BT_WARN("cancel_lost", "tag=%llu msg=\"no memory\"", (unsigned long long)tag);
        return;
    }
    bt_list_init(&c->msg.link);
    c->msg.handle = handle_cancel;
    c->tag = tag;
    if (!bt_mailbox_push(&e->mailbox, &c->msg)) {
        free(c);
    }
}

struct flush {
    struct bt_msg msg;
    int done_fd;
    uint32_t n_pages;
};

static void handle_flush(struct bt_msg *msg, void *consumer)
{
    struct flush *f = BT_CONTAINER_OF(msg, struct flush, msg);
    struct kn_engine *e = consumer;

    f->n_pages = e->index ? kv_index_evict(e->index, UINT32_MAX) : 0;
    bt_eventfd_wake(&f->done_fd);
}

uint32_t kn_engine_flush(struct kn_engine *e)
{
    struct flush f = {.msg.handle = handle_flush, .done_fd = -1};
    struct pollfd fd;

    bt_list_init(&f.msg.link);
    if (bt_eventfd_create(&f.done_fd, NULL) < 0) {
        return 0;
    }
    fd = (struct pollfd){.fd = f.done_fd, .events = POLLIN};
    if (bt_mailbox_push(&e->mailbox, &f.msg)) {
        while (poll(&fd, 1, -1) < 0) { /* interrupted */
        }
    }
    bt_close_fd(&f.done_fd);
    return f.n_pages;
}

struct kn_engine_stats kn_engine_stats(const struct kn_engine *e)
{
#define GET(field) .field = atomic_load_explicit(&e->stats.field, memory_order_relaxed)
    struct kn_engine_stats s = {
        GET(waiting),        GET(running),       GET(holding),         GET(tokens_waiting),
        GET(steps),          GET(steps_ahead),   GET(tokens_computed), GET(tokens_generated),
        GET(preemptions),    GET(tokens_cached), GET(blocks_evicted),  GET(key_collisions),
        GET(oldest_ns),      GET(loads),         GET(loads_given_up),  GET(loads_short),
        GET(load_wait_ns),   GET(swapped),       GET(overtakes),       GET(resumed),
        GET(blocks_adopted), GET(blocks_bad),
    };
#undef GET

    for (int i = 0; i < KV_N_TIERS; i++) {
        s.tier_tokens[i] = atomic_load_explicit(&e->stats.tier_tokens[i], memory_order_relaxed);
    }
    return s;
}
