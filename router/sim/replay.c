/* See replay.h. Running out of memory here ends the program. */
#include "router/sim/replay.h"

#include "common/base/buf.h"
#include "kvstore/block/index.h"
#include "router/index/feed.h"
#include "router/sim/evnode.h"
#include "router/work.h"

#include <math.h>
#include <stdlib.h>

#define SIM_TOKENS 8 /* a block's ids here; the trace says how many tokens it stands for */
#define LOAD_SOON  (10 * BT_NS_PER_MS)
#define N_SAMPLES  64

struct node;
struct router;

struct job {
    const struct rt_replay_request *req;
    struct router *router;
    struct node *node;
    struct kv_chain chain; /* keys and ids are its own */
    uint64_t *fps;
    struct kv_block **blocks;
    uint32_t hits;
    uint64_t at_ns, start_ns;
    uint16_t view; /* guesses */
    struct rt_work_item work;
    struct bt_list link; /* its node's queue */
    struct bt_list mine; /* its router's legs on the node */
};

/* A router's picture of a node. */
struct side {
    struct rt_feed feed;
    struct rt_speed speed;
    struct rt_work work;
    struct bt_list legs; /* struct job.mine */
    uint64_t own_tokens; /* of them */
    uint32_t pages_unused;
    double oldest_s;
    uint64_t tokens_waiting, busy_us;
};

struct router {
    struct sim *sim;
    struct rt_index *index;
    struct side *sides; /* [nodes] */
    uint64_t turn;
};

struct node {
    unsigned idx;
    struct kv_pool *pool;
    struct kv_index *index;
    struct evnode *lines; /* [routers]; all share the log of the first */
    struct bt_list queue; /* waiting; the first one runs if `running` */
    struct job *running;
    uint64_t tokens_waiting, computed, busy_ns;
    bool load_armed;
    Baton__V1__StepSample samples[N_SAMPLES];
    unsigned n_samples;
};

enum kind { ARRIVE, FINISH, MESSAGE, FIRST_TOKEN, ASK, BEAT, LOAD };

struct event {
    uint64_t at_ns, order;
    enum kind kind;
    struct job *job;
    struct node *node;
    struct router *router;
    struct evnode_msg msg;
    struct rt_feed_ask ask;
};

struct sim {
    const struct rt_replay_cfg *cfg;
    uint64_t now, order, seed, end_ns;
    struct event *heap;
    size_t n, cap;
    struct node *nodes;
    struct router *routers;
    struct kv_hasher *hasher;
    struct kv_key root;
    struct rt_node_view *views;
    struct rt_compat compat;
    uint64_t n_blocks, n_hits, n_expected, n_left;
    double *ttft;
    size_t n_ttft;
};

static void *must(void *p)
{
    BT_BUG_ON(!p);
    return p;
}

static uint64_t rnd(struct sim *s)
{
    s->seed = s->seed * 6364136223846793005ull + 1442695040888963407ull;
    return s->seed >> 33;
}

/* ---- events in the order of their times ---- */

static bool before(const struct event *a, const struct event *b)
{
    return a->at_ns < b->at_ns || (a->at_ns == b->at_ns && a->order < b->order);
}

static void schedule(struct sim *s, uint64_t at_ns, struct event ev)
{
    size_t i = s->n++;

    if (s->n > s->cap) {
        s->cap = BT_MAX(2 * s->cap, (size_t)1024);
        s->heap = must(realloc(s->heap, s->cap * sizeof(*s->heap)));
    }
    ev.at_ns = at_ns;
    ev.order = s->order++;
    while (i > 0 && before(&ev, &s->heap[(i - 1) / 2])) {
        s->heap[i] = s->heap[(i - 1) / 2];
        i = (i - 1) / 2;
    }
    s->heap[i] = ev;
}

static struct event next(struct sim *s)
{
    struct event first = s->heap[0], last = s->heap[--s->n];
    size_t i = 0;

    for (size_t c = 1; c < s->n; c = 2 * i + 1) {
        c += c + 1 < s->n && before(&s->heap[c + 1], &s->heap[c]);
        if (before(&last, &s->heap[c])) {
            break;
        }
        s->heap[i] = s->heap[c];
        i = c;
    }
    s->heap[i] = last;
    return first;
}

/* ---- nodes ---- */

static void on_cache_event(void *arg, const struct kv_event *ev)
{
    struct node *n = arg;

    BT_BUG_ON(kv_event_log_add(n->lines[0].log, ev) < 0);
}

static void open_node(struct sim *s, struct node *n, unsigned idx)
{
    struct kv_layout l = {.n_layers = 1,
                          .n_kv_heads = 1,
                          .head_dim = 2,
                          .page_tokens = SIM_TOKENS,
                          .dtype = KV_DTYPE_F16,
                          .n_pages = s->cfg->blocks,
                          .page_stride = 64};
    struct kv_index_cfg ic = {.block_tokens = SIM_TOKENS, .sink = {on_cache_event, n}};

    n->idx = idx;
    bt_list_init(&n->queue);
    l.layer_stride = l.bytes = l.page_stride * l.n_pages;
    n->lines = must(bt_calloc(s->cfg->routers, sizeof(*n->lines)));
    BT_BUG_ON(kv_event_log_create(1u << 17, &n->lines[0].log, NULL) < 0);
    for (unsigned r = 0; r < s->cfg->routers; r++) {
        n->lines[r].log = n->lines[0].log;
        n->lines[r].rank = idx % s->cfg->ranks;
    }
    BT_BUG_ON(kv_pool_create(&l, &bt_mem_host, "replay", &n->pool, NULL) < 0);
    ic.pool = n->pool;
    BT_BUG_ON(kv_index_create(&ic, &n->index, NULL) < 0);
}

static void close_node(struct sim *s, struct node *n)
{
    kv_index_destroy(n->index);
    kv_pool_destroy(n->pool);
    kv_event_log_destroy(n->lines[0].log);
    for (unsigned r = 0; r < s->cfg->routers; r++) {
        free(n->lines[r].snap.fingerprints);
    }
    free(n->lines);
}

/* Sends a message to a router, with the delay; `may_lose`: it has cache events. */
static void
send(struct sim *s, struct node *n, struct router *r, struct evnode_msg msg, bool may_lose)
{
    if (may_lose && rnd(s) % 100 < s->cfg->loss) {
        free(msg.bytes);
        return;
    }
    schedule(s, s->now + s->cfg->delay_ns,
             (struct event){.kind = MESSAGE, .node = n, .router = r, .msg = msg});
}

static void pump(struct sim *s, struct node *n)
{
    for (unsigned r = 0; r < s->cfg->routers; r++) {
        struct evnode_msg msg;

        while ((msg = evnode_next(&n->lines[r])).n > 0) {
            send(s, n, &s->routers[r], msg, true);
        }
    }
}

static void send_loads(struct sim *s, struct node *n)
{
    Baton__V1__CacheTierState tiers[KV_EVENT_TIERS], *tier_ptrs[KV_EVENT_TIERS];
    Baton__V1__StepSample *samples[N_SAMPLES];
    Baton__V1__NodeMessage m = BATON__V1__NODE_MESSAGE__INIT;
    Baton__V1__NodeLoad l = BATON__V1__NODE_LOAD__INIT;
    struct kv_index_stats st = kv_index_stats(n->index);

    evnode_digests(&n->lines[0], &l, tiers, tier_ptrs);
    l.tokens_waiting = n->tokens_waiting;
    l.busy_us = n->busy_ns / 1000;
    l.pages_unused = kv_pool_stats(n->pool).n_free;
    l.oldest_ms = st.oldest_ns ? (uint32_t)((s->now - st.oldest_ns) / BT_NS_PER_MS) : 0;
    for (unsigned i = 0; i < n->n_samples; i++) {
        samples[i] = &n->samples[i];
    }
    l.n_steps = n->n_samples;
    l.steps = samples;
    m.kind_case = BATON__V1__NODE_MESSAGE__KIND_LOAD;
    m.load = &l;
    for (unsigned r = 0; r < s->cfg->routers; r++) {
        send(s, n, &s->routers[r], evnode_pack(&m), false);
    }
    n->n_samples = 0;
}

static void changed(struct sim *s, struct node *n)
{
    if (!n->load_armed) {
        n->load_armed = true;
        schedule(s, s->now + LOAD_SOON, (struct event){.kind = LOAD, .node = n});
    }
}

/* The first job of the queue begins: what is cached is held, the rest takes its time. */
static void begin(struct sim *s, struct node *n)
{
    const struct rt_replay_cfg *c = s->cfg;
    struct bt_list *it = n->running ? NULL : bt_list_pop_front(&n->queue);
    double fresh, old, steps, seconds;
    Baton__V1__StepSample *sample;
    struct job *j;
    uint32_t most;

    if (!it) {
        return;
    }
    j = n->running = BT_CONTAINER_OF(it, struct job, link);
    j->start_ns = s->now;
    kv_index_set_time(n->index, s->now);
    j->hits = kv_index_match(n->index, &j->chain, j->blocks);
    most = (j->req->n_tokens - 1) / c->block_tokens;
    j->hits = BT_MIN(j->hits, most);
    kv_index_hold(n->index, j->blocks, j->hits);
    old = (double)j->hits * c->block_tokens;
    fresh = j->req->n_tokens - old;
    steps = ceil(fresh / c->step_tokens);
    seconds = steps * c->step_s + fresh * c->token_s + fresh * (old + fresh / 2) * c->pair_s;
    seconds *= 1 + c->noise * ((double)rnd(s) / 0x3fffffff - 1);
    if (n->idx == 0 && s->now > s->end_ns / 3 && s->now < s->end_ns / 3 * 2) {
        seconds *= c->slow_node;
    }
    for (double i = 0; i < steps && n->n_samples < N_SAMPLES; i++) { /* each as the mean one */
        sample = &n->samples[n->n_samples++];
        baton__v1__step_sample__init(sample);
        sample->prompt_tokens = (uint32_t)(fresh / steps);
        sample->prompt_work = (uint64_t)(fresh * (old + fresh / 2) / steps);
        sample->us = (uint32_t)(seconds / steps * 1e6) + 1;
    }
    n->busy_ns += (uint64_t)(seconds * 1e9);
    schedule(s, s->now + (uint64_t)(seconds * 1e9), (struct event){.kind = FINISH, .node = n});
}

static void publish(struct node *n, struct job *j)
{
    for (uint32_t i = j->hits; i < j->chain.n_blocks; i++) {
        struct kv_chain chain = j->chain;
        uint32_t page;

        chain.n_blocks = i + 1;
        if (kv_pool_stats(n->pool).n_free == 0) {
            kv_index_evict(n->index, 1);
        }
        if (kv_pool_take(n->pool, 1, KV_OWNER_SEQ, KV_PAGE_NONE, &page) < 0) {
            j->chain.n_blocks = i; /* larger than the cache */
            return;
        }
        if (kv_index_publish(n->index, &chain, i ? j->blocks[i - 1] : NULL, &page, &j->blocks[i]) !=
            KV_PUBLISH_NEW) {
            kv_pool_give(n->pool, &page, 1, KV_OWNER_SEQ);
        }
    }
}

static void finish(struct sim *s, struct node *n)
{
    struct job *j = n->running;

    kv_index_set_time(n->index, s->now);
    s->n_hits += j->hits;
    n->computed += j->req->n_blocks - j->hits;
    publish(n, j);
    kv_index_drop(n->index, j->blocks, j->chain.n_blocks);
    n->tokens_waiting -= j->req->n_tokens;
    s->ttft[s->n_ttft++] = (double)(s->now - j->at_ns) / 1e9;
    s->n_left--;
    n->running = NULL;
    pump(s, n); /* before the token, on the same stream */
    schedule(s, s->now + s->cfg->delay_ns, (struct event){.kind = FIRST_TOKEN, .job = j});
    changed(s, n);
    begin(s, n);
}

/* ---- routers ---- */

static void ask(struct sim *s, struct router *r, struct node *n, struct rt_feed_ask a)
{
    if (a.ask) {
        schedule(s, s->now + BT_NS_PER_MS,
                 (struct event){.kind = ASK, .node = n, .router = r, .ask = a});
    }
}

static void move_guesses(struct router *r, struct side *side, uint16_t old)
{
    bt_list_for_each (it, &side->legs) {
        struct job *j = BT_CONTAINER_OF(it, struct job, mine);

        rt_index_withdraw(r->index, old, j->fps, j->req->n_blocks);
        BT_BUG_ON(rt_index_guess(r->index, side->feed.view, j->fps, j->req->n_blocks) < 0);
        j->view = side->feed.view;
    }
    rt_index_close(r->index, old);
}

static void on_load(struct sim *s, struct side *side, const Baton__V1__NodeLoad *l)
{
    side->pages_unused = l->pages_unused;
    side->oldest_s = l->oldest_ms / 1e3;
    side->tokens_waiting = l->tokens_waiting;
    for (size_t i = 0; i < l->n_steps; i++) {
        const Baton__V1__StepSample *p = l->steps[i];
        struct rt_step step = {p->prompt_tokens, (double)p->prompt_work, p->rows,
                               (double)p->row_work, p->us / 1e6};

        rt_speed_learn(&side->speed, &step, s->now);
    }
    rt_speed_add_busy(&side->speed, (double)(l->busy_us - side->busy_us) / 1e6, s->now);
    side->busy_us = l->busy_us;
}

/* The rank that a message speaks of; UINT32_MAX: of none. */
static uint32_t rank_of(const Baton__V1__NodeMessage *m)
{
    switch ((int)m->kind_case) {
    case BATON__V1__NODE_MESSAGE__KIND_EVENTS:
        return m->events->rank;
    case BATON__V1__NODE_MESSAGE__KIND_SNAPSHOT:
        return m->snapshot->rank;
    case BATON__V1__NODE_MESSAGE__KIND_LOAD:
        return m->load->rank;
    default:
        return UINT32_MAX;
    }
}

/* It comes from a node; the message alone says which of its ranks it speaks of. */
static void on_message(struct sim *s, struct event *ev)
{
    Baton__V1__NodeMessage *m =
        must(baton__v1__node_message__unpack(NULL, ev->msg.n, ev->msg.bytes));
    unsigned ranks = s->cfg->ranks, idx = ev->node->idx / ranks * ranks + rank_of(m);
    struct side *side = &ev->router->sides[idx];
    struct rt_feed_ask a = {0};
    uint16_t old = RT_VIEW_NONE;

    BT_BUG_ON(rank_of(m) >= ranks);
    if (m->kind_case == BATON__V1__NODE_MESSAGE__KIND_EVENTS) {
        a = rt_feed_events(&side->feed, m->events, s->now);
    } else if (m->kind_case == BATON__V1__NODE_MESSAGE__KIND_SNAPSHOT) {
        a = rt_feed_snapshot(&side->feed, m->snapshot, s->now, &old);
        if (old != RT_VIEW_NONE) {
            move_guesses(ev->router, side, old);
        }
    } else {
        on_load(s, side, m->load);
        a = rt_feed_load(&side->feed, m->load, s->now);
    }
    ask(s, ev->router, &s->nodes[idx], a);
    baton__v1__node_message__free_unpacked(m, NULL);
    free(ev->msg.bytes);
    while (rt_index_sweep(ev->router->index)) {
    }
}

static void make_chain(struct sim *s, struct job *j)
{
    uint32_t n = j->req->n_blocks;
    int32_t *ids = must(bt_calloc((size_t)n * SIM_TOKENS + 1, sizeof(*ids)));
    struct kv_key *keys = must(bt_calloc(n + 1, sizeof(*keys)));

    for (uint32_t i = 0; i < n * SIM_TOKENS; i++) {
        ids[i] = (int32_t)(j->req->ids[i / SIM_TOKENS] * SIM_TOKENS + i % SIM_TOKENS);
    }
    kv_key_chain(s->hasher, &s->root,
                 &(struct kv_key_tokens){ids, (size_t)n * SIM_TOKENS, SIM_TOKENS}, keys);
    j->fps = must(bt_calloc(n + 1, sizeof(*j->fps)));
    for (uint32_t i = 0; i < n; i++) {
        j->fps[i] = kv_key_fingerprint(&keys[i]);
    }
    j->blocks = must(bt_calloc(n + 1, sizeof(struct kv_block *)));
    j->chain = (struct kv_chain){s->root, keys, ids, n};
}

static void free_job(struct job *j)
{
    free((void *)(uintptr_t)j->chain.ids);
    free((void *)(uintptr_t)j->chain.keys);
    free(j->fps);
    free(j->blocks);
    free(j);
}

/* Views of all nodes, and behind them a decode node that takes everything. */
static void fill_views(struct sim *s, struct router *r, const struct rt_run *runs, size_t n_runs)
{
    unsigned n = s->cfg->nodes;

    for (unsigned i = 0; i < n; i++) {
        struct side *side = &r->sides[i];
        uint64_t others = side->tokens_waiting;

        s->views[i] = (struct rt_node_view){
            .name = "p",
            .role = RT_ROLE_PREFILL,
            .ready = true,
            .compat = &s->compat,
            .speed = &side->speed,
            .queue_s = rt_work_seconds(&side->work, s->now),
            .tokens_outstanding = others > side->own_tokens ? others - side->own_tokens : 0,
            .pages_free = s->cfg->blocks,
            .pages_total = s->cfg->blocks,
            .pages_unused = side->pages_unused,
            .page_tokens = s->cfg->block_tokens,
            .block_tokens = s->cfg->block_tokens,
            .step_tokens = s->cfg->step_tokens,
            .oldest_s = side->oldest_s,
            .busy = rt_speed_busy(&side->speed, s->now),
        };
        for (size_t k = 0; k < n_runs; k++) {
            if (runs[k].view == side->feed.view) {
                s->views[i].run = runs[k];
            }
        }
    }
    s->views[n] = (struct rt_node_view){
        .name = "d", .role = RT_ROLE_DECODE, .ready = true, .compat = &s->compat};
}

static void arrive(struct sim *s, struct job *j)
{
    struct router *r = j->router = &s->routers[rnd(s) % s->cfg->routers];
    struct rt_pick_args a = {.nodes = s->views,
                             .n = s->cfg->nodes + 1,
                             .path = RT_PATH_DIRECT,
                             .route = s->cfg->route,
                             .n_prompt = j->req->n_tokens,
                             .n_answer = 100,
                             .reuse_s = s->cfg->reuse_s,
                             .ticket = rnd(s) << 31 ^ rnd(s),
                             .turn = r->turn++,
                             .now_ns = s->now};
    const struct rt_run *runs;
    struct rt_pick pick;
    struct side *side;
    size_t n_runs;

    make_chain(s, j);
    runs = rt_index_look(r->index, j->fps, j->req->n_blocks, &n_runs);
    fill_views(s, r, runs, n_runs);
    BT_BUG_ON(rt_policy_pick(&a, &pick, NULL) < 0);
    side = &r->sides[pick.prefill];
    j->node = &s->nodes[pick.prefill];
    j->at_ns = s->now;
    j->view = side->feed.view;
    s->n_blocks += j->req->n_blocks;
    s->n_expected += pick.est.cached_blocks;
    rt_work_add(&side->work, &j->work, pick.est.bring_s + pick.est.compute_s, s->now);
    BT_BUG_ON(rt_index_guess(r->index, j->view, j->fps, j->req->n_blocks) < 0);
    bt_list_push_back(&side->legs, &j->mine);
    side->own_tokens += j->req->n_tokens;
    j->node->tokens_waiting += j->req->n_tokens;
    bt_list_push_back(&j->node->queue, &j->link);
    changed(s, j->node);
    begin(s, j->node);
}

static void first_token(struct sim *s, struct job *j)
{
    struct side *side = &j->router->sides[j->node->idx];

    rt_work_done(&side->work, &j->work, s->now);
    bt_list_remove(&j->mine);
    side->own_tokens -= j->req->n_tokens;
    rt_index_withdraw(j->router->index, j->view, j->fps, j->req->n_blocks);
    free_job(j);
}

static void open_router(struct sim *s, struct router *r)
{
    r->sim = s;
    BT_BUG_ON(rt_index_create(&r->index, NULL) < 0);
    r->sides = must(bt_calloc(s->cfg->nodes, sizeof(*r->sides)));
    for (unsigned i = 0; i < s->cfg->nodes; i++) {
        struct side *side = &r->sides[i];

        BT_BUG_ON(rt_feed_open(&side->feed, r->index) < 0);
        rt_speed_init(&side->speed);
        rt_work_init(&side->work);
        bt_list_init(&side->legs);
        side->pages_unused = s->cfg->blocks;
        ask(s, r, &s->nodes[i], rt_feed_begin(&side->feed, BT_NS_PER_S));
    }
}

/* ---- the run ---- */

static void handle(struct sim *s, struct event *ev)
{
    switch (ev->kind) {
    case ARRIVE:
        arrive(s, ev->job);
        break;
    case FINISH:
        finish(s, ev->node);
        break;
    case MESSAGE:
        on_message(s, ev);
        break;
    case FIRST_TOKEN:
        first_token(s, ev->job);
        break;
    case ASK:
        evnode_follow(&ev->node->lines[ev->router - s->routers], ev->ask.after, ev->ask.snapshot);
        pump(s, ev->node);
        break;
    case BEAT:
        send_loads(s, ev->node);
        if (s->n_left > 0) {
            schedule(s, s->now + s->cfg->heartbeat_ns, *ev);
        }
        break;
    case LOAD:
        ev->node->load_armed = false;
        send_loads(s, ev->node);
        break;
    }
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;

    return (x > y) - (x < y);
}

static struct rt_replay_result sum_up(struct sim *s, double limit_s)
{
    struct rt_replay_result res = {0};
    uint64_t computed = 0, most = 0, busy = 0;
    size_t n = s->n_ttft, good = 0;

    for (unsigned i = 0; i < s->cfg->nodes; i++) {
        computed += s->nodes[i].computed;
        most = BT_MAX(most, s->nodes[i].computed);
        busy += s->nodes[i].busy_ns;
    }
    for (size_t i = 0; i < n; i++) {
        res.ttft_mean_s += s->ttft[i] / (double)n;
        good += s->ttft[i] <= limit_s;
    }
    qsort(s->ttft, n, sizeof(*s->ttft), by_value);
    res.hit_percent = 100.0 * (double)s->n_hits / (double)s->n_blocks;
    res.expected_percent = 100.0 * (double)s->n_expected / (double)s->n_blocks;
    res.imbalance = (double)most * s->cfg->nodes / (double)BT_MAX(computed, 1ull);
    res.ttft_p50_s = s->ttft[n / 2];
    res.ttft_p99_s = s->ttft[(n - 1) * 99 / 100];
    res.good_percent = 100.0 * (double)good / (double)n;
    res.busy = (double)busy / (double)s->now / s->cfg->nodes;
    for (unsigned r = 0; r < s->cfg->routers; r++) {
        for (unsigned i = 0; i < s->cfg->nodes; i++) {
            const struct side *side = &s->routers[r].sides[i];

            res.gaps += side->feed.gaps;
            res.drifts += side->feed.drifts;
            res.snapshots += side->feed.snapshots;
            res.changes += side->feed.changes;
            res.speed_error += side->speed.error / s->cfg->nodes / s->cfg->routers;
        }
    }
    return res;
}

static void open_sim(struct sim *s)
{
    const struct rt_replay_cfg *c = s->cfg;
    static const uint8_t zeros[32];
    const struct kv_key_root_args root = {.model_digest = zeros, .kv_format_digest = zeros};

    BT_BUG_ON(kv_hasher_create(&s->hasher, NULL) < 0);
    BT_BUG_ON(kv_key_root(s->hasher, &root, &s->root, NULL) < 0);
    s->nodes = must(bt_calloc(c->nodes, sizeof(*s->nodes)));
    s->routers = must(bt_calloc(c->routers, sizeof(*s->routers)));
    s->views = must(bt_calloc(c->nodes + 1, sizeof(*s->views)));
    s->ttft = must(bt_calloc(c->n_requests + 1, sizeof(*s->ttft)));
    for (unsigned i = 0; i < c->nodes; i++) {
        open_node(s, &s->nodes[i], i);
    }
    for (unsigned r = 0; r < c->routers; r++) {
        open_router(s, &s->routers[r]);
    }
    for (unsigned i = 0; i < c->nodes; i++) {
        schedule(s, s->now + c->heartbeat_ns * i / c->nodes,
                 (struct event){.kind = BEAT, .node = &s->nodes[i]});
    }
    for (size_t i = 0; i < c->n_requests; i++) {
        struct job *j = must(bt_calloc(1, sizeof(*j)));

        j->req = &c->requests[i];
        bt_list_init(&j->link);
        bt_list_init(&j->mine);
        bt_list_init(&j->work.link);
        schedule(s, s->now + j->req->at_ns, (struct event){.kind = ARRIVE, .job = j});
    }
}

static void close_sim(struct sim *s)
{
    for (unsigned r = 0; r < s->cfg->routers; r++) {
        rt_index_destroy(s->routers[r].index);
        free(s->routers[r].sides);
    }
    for (unsigned i = 0; i < s->cfg->nodes; i++) {
        close_node(s, &s->nodes[i]);
    }
    kv_hasher_destroy(s->hasher);
    free(s->nodes);
    free(s->routers);
    free(s->views);
    free(s->ttft);
    free(s->heap);
}

struct rt_replay_result rt_replay_run(const struct rt_replay_cfg *cfg, double limit_s)
{
    struct sim s = {.cfg = cfg,
                    .now = BT_NS_PER_S,
                    .seed = cfg->seed * 0x9e3779b97f4a7c15ull + 1,
                    .n_left = cfg->n_requests};
    struct rt_replay_result res;

    s.end_ns = s.now + cfg->requests[cfg->n_requests - 1].at_ns;
    s.compat = (struct rt_compat){.numerics = "replay"};
    open_sim(&s);
    while (s.n > 0) {
        struct event ev = next(&s);

        s.now = ev.at_ns;
        handle(&s, &ev);
    }
    res = sum_up(&s, limit_s);
    close_sim(&s);
    return res;
}
