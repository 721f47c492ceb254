/* Nodes of the scheduler's tests: a scheduler, a small pool, and a "model" that can be checked.
 *
 * Instead of keys and values a page holds the ids of the tokens computed into it, so that every
 * draw can check that the pages say exactly what the request is. The next token is a function of
 * all ids before it: any schedule must give the same answer. Transfers between two nodes are done
 * by the test. */
#ifndef BT_TESTS_KERNELS_ENGINE_SIM_H
#define BT_TESTS_KERNELS_ENGINE_SIM_H

#include "common/base/buf.h"
#include "common/thr/time.h"
#include "kernels/engine/scheduler.h"

#include "tests/unit/cmocka.h"

#include <stdio.h>
#include <stdlib.h>

#define VOCAB   1000
#define EOS     7
#define MS      1000000ull
#define MAX_REQ 512

/* How the nodes of this run reuse prefixes. */
static struct {
    int block, key_bits;
    uint32_t common; /* tokens with which every prompt begins */
} reuse;

/* What computing a token seems to cost. */
static uint64_t sim_token_ns = 1000000;

struct world;

/* A request as one node sees it. */
struct result {
    int32_t ids[256];  /* emitted, by offset from the start of the answer */
    uint32_t first, n; /* emitted range [first, n) */
    bool last;
    enum kn_finish finish;
    bool handed_over;
    int rc;
    uint32_t cached;
};

struct node {
    struct world *world;
    struct bt_list msgs; /* posted to the scheduler */
    struct kv_pool *pool;
    struct kv_index *index;
    struct kn_sched *sched;
    int32_t *shadow; /* [n_pages][page_tokens] */
    int page_tokens;
    uint32_t max_tokens;
    uint64_t now;
    struct result results[MAX_REQ];
    uint32_t max_rows, steps, n_sources, progress, n_ahead;
    void (*wait)(struct node *n);
};

/* A transfer between two nodes. */
struct xfer {
    struct kn_seq *send, *recv;
    bool ticketed, finished, send_aborted, recv_aborted;
    int send_rc, recv_rc;
    uint32_t sent; /* tokens told by set_pages and steps: all of them when finished */
};

struct world {
    struct node *p, *d;
    struct xfer xfers[MAX_REQ]; /* by handoff id */
    uint32_t rewinds, max_recv;
    uint64_t tokens_sent;
};

static uint32_t rng_state = 1;

static inline uint32_t rng(uint32_t n)
{
    rng_state = rng_state * 1664525u + 1013904223u;
    return (uint32_t)(((uint64_t)(rng_state >> 4) * n) >> 28);
}

/* The "model": next id from all ids before. Never EOS by chance. */
static inline int32_t next_id(const int32_t *ids, uint32_t n)
{
    uint32_t h = 2166136261u;

    for (uint32_t i = 0; i < n; i++) {
        h = (h ^ (uint32_t)ids[i]) * 16777619u;
    }
    return (int32_t)(10 + (h >> 8) % (VOCAB - 10));
}

/* ---- transfers, done by hand ---- */

static inline struct xfer *xfer_of(void *arg, const struct kn_seq *s)
{
    return &((struct node *)arg)->world->xfers[s->handoff.lo];
}

static inline int x_send_create(void *arg, struct kn_seq *s, struct bt_err *err)
{
    struct xfer *x = xfer_of(arg, s);

    *x = (struct xfer){.send = s, .recv = x->recv};
    return BT_OK;
}

static inline void x_send_pages(void *arg, struct kn_seq *s)
{
    assert_true(xfer_of(arg, s)->send == s);
}

static inline void x_send_cached(void *arg, struct kn_seq *s, uint32_t n)
{
    assert_true(reuse.block > 0);
    assert_true(n > 0 && n < s->n_prompt + s->n_answered);
    assert_int_equal(n, s->n_computed);
}

static inline void x_send_finish(void *arg, struct kn_seq *s)
{
    xfer_of(arg, s)->finished = true;
}

static inline bool x_send_rewind(void *arg, struct kn_seq *s)
{
    struct xfer *x = xfer_of(arg, s);

    if (x->ticketed) {
        return false;
    }
    x->finished = false;
    ((struct node *)arg)->world->rewinds++;
    return true;
}

static inline void x_send_abort(void *arg, struct kn_seq *s, int rc)
{
    xfer_of(arg, s)->send_aborted = true;
    xfer_of(arg, s)->send_rc = rc;
}

static inline int x_recv_create(void *arg, struct kn_seq *s, struct bt_err *err)
{
    struct world *w = ((struct node *)arg)->world;
    uint32_t open = 0;

    for (int i = 0; i < MAX_REQ; i++) {
        open += w->xfers[i].recv != NULL;
    }
    if (w->max_recv && open >= w->max_recv) {
        return BT_FAIL(err, BT_E_EXHAUSTED, "too many transfers");
    }
    xfer_of(arg, s)->recv = s;
    xfer_of(arg, s)->recv_aborted = false;
    return BT_OK;
}

static inline void x_recv_abort(void *arg, struct kn_seq *s, int rc)
{
    xfer_of(arg, s)->recv_aborted = true;
    xfer_of(arg, s)->recv_rc = rc;
}

static const struct kn_xfer_ops xfer_ops = {
    .send_create = x_send_create,
    .send_pages = x_send_pages,
    .send_cached = x_send_cached,
    .send_finish = x_send_finish,
    .send_rewind = x_send_rewind,
    .send_abort = x_send_abort,
    .recv_create = x_recv_create,
    .recv_abort = x_recv_abort,
};

static inline int32_t *shadow_at(const struct node *n, const struct kn_seq *s, uint32_t pos)
{
    uint32_t page = s->pages[pos / (uint32_t)n->page_tokens];

    return &n->shadow[page * (uint32_t)n->page_tokens + pos % (uint32_t)n->page_tokens];
}

static inline void send_over(struct world *w, struct xfer *x, int rc)
{
    struct kn_seq *s = x->send;

    x->send = NULL;
    x->finished = x->ticketed = x->send_aborted = false;
    kn_sched_xfer_done(w->p->sched, s, rc, "", NULL);
}

static inline void recv_over(struct world *w, struct xfer *x, int rc, const struct kv_first *first)
{
    struct kn_seq *s = x->recv;

    x->recv = NULL;
    x->recv_aborted = false;
    kn_sched_xfer_done(w->d->sched, s, rc, "", first);
}

/* One move of the transfer, if it can make one. */
static inline bool xfer_move(struct world *w, struct xfer *x)
{
    if (x->recv && x->recv_aborted) {
        x->ticketed = false; /* P keeps the prompt for another ticket */
        recv_over(w, x, x->recv_rc, NULL);
        return true;
    }
    if (x->send && x->send_aborted) {
        int rc = x->send_rc;

        if (x->ticketed && x->recv) {
            recv_over(w, x, rc, NULL);
        }
        send_over(w, x, rc);
        return true;
    }
    if (!x->send || !x->recv) {
        return false;
    }
    if (!x->ticketed) {
        x->ticketed = true;
        atomic_store(&x->send->ticketed, true);
        return true;
    }
    if (!x->finished) {
        return false;
    }
    struct kv_first first = {.n_tokens = 1,
                             .ids = {x->send->ids[x->send->n_prompt + x->send->n_answered]}};

    w->tokens_sent += x->send->n_prompt + x->send->n_answered - x->recv->n_computed;
    for (uint32_t i = x->recv->n_computed; i < x->send->n_prompt + x->send->n_answered; i++) {
        *shadow_at(w->d, x->recv, i) = *shadow_at(w->p, x->send, i);
    }
    recv_over(w, x, BT_OK, &first);
    send_over(w, x, BT_OK);
    return true;
}

/* ---- nodes ---- */

static inline void on_output(void *arg, const struct kn_output *o)
{
    struct node *n = arg;
    struct result *r = &n->results[o->tag];

    assert_true(o->tag < MAX_REQ);
    r->cached = o->cached_tokens;
    assert_false(r->last); /* exactly one last output, and it is the last */
    if (o->n_tokens > 0 && r->n == 0) {
        r->first = r->n = o->offset;
    }
    for (uint32_t i = 0; i < o->n_tokens; i++) {
        assert_int_equal(o->offset + i, r->n);
        r->ids[r->n++] = o->tokens[i].id;
    }
    if (o->finish != KN_FINISH_NONE || o->handed_over || o->rc < 0) {
        r->last = true;
        r->finish = o->finish;
        r->handed_over = o->handed_over;
        r->rc = o->rc;
    }
}

struct node_cfg {
    uint32_t n_pages;
    int page_tokens, budget, running;
    struct kv_source *const *sources;
    uint32_t n_sources, n_local;
    int n_layers; /* 0 = 1 */
    uint64_t guess_ns;
    /* Computes behind loads; called while a row waits for them. NULL = never. */
    void (*wait)(struct node *n);
};

static inline void node_progress(void *arg)
{
    ((struct node *)arg)->progress++;
}

static inline void node_post(void *arg, struct bt_msg *msg)
{
    struct node *n = arg;

    bt_list_push_back(&n->msgs, &msg->link);
}

static inline uint64_t node_clock(void *arg)
{
    return ((struct node *)arg)->now;
}

static inline void node_drain(struct node *n)
{
    while (!bt_list_empty(&n->msgs)) {
        struct bt_msg *m = BT_LIST_ENTRY(bt_list_pop_front(&n->msgs), struct bt_msg, link);

        m->handle(m, n);
    }
}

static inline struct node *node_create(struct world *w, struct node_cfg c)
{
    struct node *n = bt_calloc(1, sizeof(*n));
    struct kv_layout l = {.n_layers = c.n_layers ? c.n_layers : 1,
                          .n_kv_heads = 1,
                          .head_dim = 2,
                          .page_tokens = c.page_tokens,
                          .dtype = KV_DTYPE_F16,
                          .n_pages = c.n_pages,
                          .page_stride = 64};
    struct kn_sched_cfg cfg = {.max_batch_tokens = c.budget,
                               .max_running = c.running,
                               .n_vocab = VOCAB,
                               .patience_ns = 100 * MS,
                               .withdraw_ns = 500 * MS,
                               .xfer = w ? &xfer_ops : NULL,
                               .xfer_arg = n,
                               .output = on_output,
                               .output_arg = n};

    assert_non_null(n);
    l.layer_stride = l.page_stride * c.n_pages;
    l.bytes = l.layer_stride * (size_t)l.n_layers;
    bt_list_init(&n->msgs);
    cfg.sources = c.sources;
    cfg.n_sources = c.n_sources;
    cfg.n_local = c.n_local;
    cfg.post = node_post;
    cfg.clock = node_clock;
    cfg.post_arg = n;
    cfg.guess_token_ns = c.guess_ns;
    cfg.progress = c.wait ? node_progress : NULL;
    n->wait = c.wait;
    assert_int_equal(kv_pool_create(&l, &bt_mem_host, "test", &n->pool, NULL), BT_OK);
    cfg.pool = n->pool;
    if (reuse.block > 0) {
        struct kv_index_cfg ic = {
            .pool = n->pool, .block_tokens = reuse.block, .key_bits = reuse.key_bits};

        assert_int_equal(kv_index_create(&ic, &n->index, NULL), BT_OK);
        cfg.index = n->index;
    }
    assert_int_equal(kn_sched_create(&cfg, &n->sched, NULL), BT_OK);
    n->world = w;
    n->n_sources = c.n_sources;
    n->page_tokens = c.page_tokens;
    n->max_tokens = (uint32_t)BT_MIN((uint32_t)200, c.n_pages * (uint32_t)c.page_tokens);
    n->shadow = bt_calloc((size_t)c.n_pages * (size_t)c.page_tokens, sizeof(*n->shadow));
    n->now = 1000 * MS;
    return n;
}

static inline void node_destroy(struct node *n)
{
    struct kv_pool_stats s;

    node_drain(n);
    assert_true(kn_sched_idle(n->sched));
    s = kv_pool_stats(n->pool);
    assert_int_equal(kv_pool_stats_room(&s), s.n_pages);
    assert_true(!n->index || kv_index_clear(n->index));
    assert_true(kv_pool_audit(n->pool));
    assert_int_equal(kn_sched_stats(n->sched).n_live, 0);
    assert_int_equal(kn_sched_stats(n->sched).tokens_waiting, 0);
    kn_sched_destroy(n->sched);
    kv_index_destroy(n->index);
    kv_pool_destroy(n->pool);
    free(n->shadow);
    free(n);
}

struct req {
    uint64_t tag, claim, deadline_ns;
    enum kn_leg leg;
    uint32_t n_prompt, max_tokens, n_answered;
    int32_t stop; /* stop id, 0 = none */
};

static inline void make_prompt(uint64_t tag, uint32_t n, int32_t *ids)
{
    for (uint32_t i = 0; i < n; i++) {
        uint64_t from = i < reuse.common ? 0 : tag;

        ids[i] = (int32_t)(10 + (from * 131 + i * 17) % (VOCAB - 10));
    }
}

static inline void submit(struct node *n, struct req r)
{
    static const int32_t eos[] = {EOS};
    int32_t prompt[512], answered[256];
    struct wire_sampling sampling;
    struct kn_submit_args a = {.tag = r.tag,
                               .leg = r.leg,
                               .prompt = prompt,
                               .n_prompt = r.n_prompt,
                               .answered = answered,
                               .n_answered = r.n_answered,
                               .sampling = &sampling,
                               .claim = r.claim,
                               .deadline_ns = r.deadline_ns ? r.deadline_ns : BT_NEVER_NS,
                               .handoff = {1, r.tag}};
    struct kn_seq_cfg cfg = {.max_tokens = n->max_tokens,
                             .page_tokens = (uint32_t)n->page_tokens,
                             .block_tokens = n->index ? (uint32_t)reuse.block : 0,
                             .n_sources = n->n_sources,
                             .eos = eos,
                             .n_eos = 1};
    struct kn_seq *s = NULL;

    wire_sampling_defaults(&sampling);
    sampling.max_tokens = r.max_tokens;
    sampling.stop_ids = &r.stop;
    sampling.n_stop_ids = r.stop ? 1 : 0;
    make_prompt(r.tag, r.n_prompt, prompt);
    for (uint32_t i = 0; i < r.n_answered; i++) {
        prompt[r.n_prompt + i] = answered[i] = next_id(prompt, r.n_prompt + i);
    }
    assert_int_equal(kn_seq_create(&a, &cfg, &s, NULL), BT_OK);
    kn_sched_add(n->sched, s);
}

/* The layers of a step whose rows stand above loads. */
static inline void wait_layers(struct node *n, const struct kn_step_plan *plan)
{
    int n_layers = kv_pool_layout(n->pool)->n_layers;

    for (int layer = 0; layer <= n_layers && plan->n_loading > 0; layer++) {
        for (int tries = 0; tries < 3 && !kn_sched_layer_ready(n->sched, plan, layer); tries++) {
            n->wait(n);
        }
        if (!kn_sched_layer_ready(n->sched, plan, layer)) {
            kn_sched_layer_waited(n->sched, plan, layer, MS);
        }
    }
}

static inline int32_t *row_at(const struct node *n,
                              const struct kn_step_plan *plan,
                              const struct kn_plan_row *row,
                              uint32_t pos)
{
    uint32_t pt = (uint32_t)n->page_tokens, page = plan->pages[row->first_page + pos / pt];

    return &n->shadow[page * pt + pos % pt];
}

/* Runs a plan as the executor would: writes ids into pages, waits for loads, checks all pages of a
 * row, draws. */
static inline void run_plan(struct node *n, const struct kn_step_plan *plan)
{
    struct kn_token drawn[64];
    uint32_t n_drawn = 0, n_tokens = 0;

    n->max_rows = BT_MAX(n->max_rows, plan->n_rows);
    n->n_ahead += plan->n_loading;
    for (uint32_t i = 0; i < plan->n_rows; i++) {
        const struct kn_plan_row *row = &plan->rows[i];

        assert_true(row->n_tokens > 0); /* SCHED-03: never an empty chunk */
        assert_int_equal(row->first_id, n_tokens);
        n_tokens += row->n_tokens;
        for (uint32_t t = 0; t < row->n_tokens; t++) {
            *row_at(n, plan, row, row->pos + t) = plan->ids[row->first_id + t];
        }
    }
    wait_layers(n, plan);
    for (uint32_t i = 0; i < plan->n_rows; i++) {
        const struct kn_plan_row *row = &plan->rows[i];
        const struct kn_seq *s = kn_sched_at(n->sched, row->slot);
        int32_t seen[256];

        assert_int_equal(s->tag, row->tag);
        assert_int_equal(row->loading, i >= plan->n_rows - plan->n_loading);
        if (row->loading && !kn_sched_loads_whole(n->sched, s)) {
            if (row->draw) {
                drawn[n_drawn++] = (struct kn_token){.id = EOS}; /* nonsense that must not go out */
            }
            continue;
        }
        for (uint32_t t = 0; t < row->pos + row->n_tokens; t++) {
            seen[t] = *row_at(n, plan, row, t);
        }
        assert_memory_equal(seen, s->ids, (row->pos + row->n_tokens) * sizeof(*seen));
        if (row->draw) {
            assert_int_equal(row->pos + row->n_tokens, s->n_prompt + row->n_answer);
            drawn[n_drawn++] = (struct kn_token){.id = next_id(seen, row->pos + row->n_tokens)};
        }
    }
    assert_int_equal(n_drawn, plan->n_draws);
    assert_int_equal(n_tokens, plan->n_tokens);
    kn_sched_measured(n->sched, plan, plan->n_tokens * sim_token_ns);
    kn_sched_step_done(n->sched, plan, drawn);
    n->steps++;
}

/* One turn of the engine's loop; false if there was nothing to compute. */
static inline bool step(struct node *n)
{
    const struct kn_step_plan *plan;

    n->now += 10 * MS;
    node_drain(n);
    kn_sched_tick(n->sched, n->now);
    plan = kn_sched_plan(n->sched, n->now);
    if (plan->n_rows > 0) {
        run_plan(n, plan);
    }
    return plan->n_rows > 0;
}

static inline void run_until_idle(struct node *n)
{
    for (int i = 0; i < 20000 && kn_sched_stats(n->sched).n_live > 0; i++) {
        step(n);
    }
    assert_int_equal(kn_sched_stats(n->sched).n_live, 0);
}

/* What any schedule must answer. */
static inline uint32_t expected(struct req r, uint32_t max_tokens, int32_t *answer)
{
    int32_t ids[512];
    uint32_t n = 0;

    make_prompt(r.tag, r.n_prompt, ids);
    while (n < r.max_tokens && r.n_prompt + n < max_tokens) {
        answer[n] = ids[r.n_prompt + n] = next_id(ids, r.n_prompt + n);
        n++;
        if (r.stop && answer[n - 1] == r.stop) {
            break;
        }
    }
    return n;
}

static inline void check_answer(const struct node *n, struct req r)
{
    const struct result *got = &n->results[r.tag];
    int32_t want[256];
    uint32_t n_want = expected(r, n->max_tokens, want);

    assert_true(got->last);
    assert_int_equal(got->rc, BT_OK);
    assert_int_equal(got->n, n_want);
    assert_memory_equal(got->ids + got->first, want + got->first,
                        (n_want - got->first) * sizeof(*want));
    assert_int_equal(got->finish,
                     r.stop && want[n_want - 1] == r.stop ? KN_FINISH_STOP : KN_FINISH_LENGTH);
}

/* ---- two nodes ---- */

struct pair {
    struct world w;
    struct node *p, *d;
};

static inline void pair_init(struct pair *two, struct node_cfg p, struct node_cfg d)
{
    memset(&two->w, 0, sizeof(two->w));
    two->w.p = two->p = node_create(&two->w, p);
    two->w.d = two->d = node_create(&two->w, d);
}

static inline void pair_submit(struct pair *two, struct req r)
{
    r.leg = KN_LEG_PREFILL;
    submit(two->p, r);
    r.leg = KN_LEG_DECODE;
    submit(two->d, r);
}

static inline void pair_move(struct pair *two)
{
    for (int i = 0; i < MAX_REQ; i++) {
        xfer_move(&two->w, &two->w.xfers[i]);
    }
}

static inline void pair_run(struct pair *two)
{
    for (int i = 0; i < 30000 && (kn_sched_stats(two->p->sched).n_live > 0 ||
                                  kn_sched_stats(two->d->sched).n_live > 0);
         i++) {
        step(two->p);
        step(two->d);
        pair_move(two);
    }
    assert_int_equal(kn_sched_stats(two->p->sched).n_live, 0);
    assert_int_equal(kn_sched_stats(two->d->sched).n_live, 0);
}

static inline void pair_fini(struct pair *two)
{
    node_destroy(two->p);
    node_destroy(two->d);
}

/* P says the first token, D the others, and together they are the answer. */
static inline void pair_check(const struct pair *two, struct req r)
{
    const struct result *p = &two->p->results[r.tag];
    int32_t want[256];

    assert_true(expected(r, two->p->max_tokens, want) > 1);
    assert_int_equal(p->rc, BT_OK);
    assert_true(p->handed_over);
    assert_int_equal(p->n, r.n_answered + 1);
    assert_int_equal(p->ids[r.n_answered], want[r.n_answered]);
    assert_int_equal(two->d->results[r.tag].first, r.n_answered + 1);
    check_answer(two->d, r);
}

#endif
