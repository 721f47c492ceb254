/* What the router knows of its nodes' caches and speed, and what its requests expect of them. Loop
 * thread.
 *
 * A node's blocks are named by keys whose root depends on its KV format, numerics, weight epoch and
 * block size: an identity. Nodes of one kind share one; a request's prompt is hashed once for each
 * identity that is there, and again only for another salt. What a leg will leave in its node's
 * cache is guessed into the index when it is sent and withdrawn when it is over: by then the node's
 * own events have come, since they travel before the outputs on the same stream. */
#include "router/router_int.h"

#include "common/base/buf.h"
#include "common/obs/log.h"
#include "router/request_int.h"

#include <stdlib.h>

#define ANSWER_TOKENS 128.0 /* expected until answers were seen */
#define LEARN         0.05  /* weight of a new answer, a new handoff */
#define STEPS_MIN     64    /* before a node's own speed counts */
#define HANDOFFS_MIN  32    /* seen, before AUTO weighs one against computing on the decode node */

int rt_cache_init(struct rt_router *r, struct bt_err *err)
{
    int rc = rt_index_create(&r->cache.index, err);

    r->cache.answer_tokens = ANSWER_TOKENS;
    if (rc == BT_OK) {
        rc = kv_hasher_create(&r->cache.hasher, err);
    }
    if (rc == BT_OK) {
        r->cache.run_of_view = bt_calloc(RT_VIEWS_MAX, sizeof(*r->cache.run_of_view));
        rc = r->cache.run_of_view ? BT_OK : BT_FAIL(err, BT_E_NOMEM, "router index: no memory");
    }
    return rc;
}

void rt_cache_fini(struct rt_router *r)
{
    kv_hasher_destroy(r->cache.hasher);
    rt_index_destroy(r->cache.index);
    free(r->cache.run_of_view);
}

/* --- identities and keys --------------------------------------------------------------------- */

/* -1: there are too many kinds of nodes; this one's cache is unknown. */
static int identity_of(struct rt_router *r, const struct rt_node *n, uint32_t block_tokens)
{
    char why[160];

    for (int i = 0; i < r->cache.n_idents; i++) {
        if (r->cache.idents[i].block_tokens == block_tokens &&
            rt_compat_equal(&r->cache.idents[i].compat, &n->compat, why)) {
            return i;
        }
    }
    if (r->cache.n_idents == RT_MAX_IDENTS) {
        BT_WARN("cache", "node=%s msg=\"more than %d kinds of nodes: its prefixes are unknown\"",
                n->name, RT_MAX_IDENTS);
        return -1;
    }
    r->cache.idents[r->cache.n_idents] =
        (struct rt_ident){.compat = n->compat, .block_tokens = block_tokens};
    rt_speed_init(&r->cache.idents[r->cache.n_idents].speed);
    return r->cache.n_idents++;
}

/* Fingerprints of the prompt's full blocks. Without memory: none, which costs hits only. */
static void make_keys(struct rt_router *r,
                      const struct rt_ident *id,
                      const struct rt_find_args *of,
                      struct rt_keys *k)
{
    struct kv_key_root_args root = {.secret = bt_str_of(r->conf->cluster.secret),
                                    .model_digest = rt_model_digest(r->model),
                                    .weight_epoch = id->compat.weight_epoch,
                                    .tenant_salt = bt_str_of(of->cache_salt),
                                    .kv_format_digest = id->compat.kv_format,
                                    .numerics = bt_str_of(id->compat.numerics)};
    struct kv_key key;

    k->n_tokens = of->n_ids;
    k->fps = bt_calloc(of->n_ids / id->block_tokens + 1, sizeof(*k->fps));
    if (!k->fps || kv_key_root(r->cache.hasher, &root, &key, NULL) < 0) {
        return;
    }
    for (size_t at = 0; at + id->block_tokens <= of->n_ids; at += id->block_tokens) {
        kv_key_block(r->cache.hasher, &key, of->ids + at, id->block_tokens, &key);
        k->fps[k->n++] = kv_key_fingerprint(&key);
    }
}

static const struct rt_keys *keys_of(struct rt_request *req, int ident)
{
    struct rt_router *r = req->router;
    struct rt_find_args of = {req->prompt.p, req->prompt.n, req->cache_salt, NULL, NULL};
    struct rt_keys *k = &req->keys[ident];

    if (!k->fps && k->n_tokens != req->prompt.n) {
        make_keys(r, &r->cache.idents[ident], &of, k);
    }
    return k;
}

static void tell_holder(const struct rt_find_args *a,
                        const struct rt_target *t,
                        const struct rt_run *runs,
                        size_t n_runs)
{
    for (size_t j = 0; j < n_runs; j++) {
        if (runs[j].view == t->feed.view && t->feed.view != RT_VIEW_NONE) {
            a->fn(a->arg, t, &runs[j]);
        }
    }
}

int rt_cache_find(struct rt_router *r, const struct rt_find_args *a)
{
    for (int i = 0; i < r->cache.n_idents; i++) {
        struct rt_keys k = {0};
        const struct rt_run *runs;
        size_t n_runs;

        make_keys(r, &r->cache.idents[i], a, &k);
        if (!k.fps) {
            return BT_E_NOMEM;
        }
        runs = rt_index_look(r->cache.index, k.fps, k.n, &n_runs);
        bt_list_for_each (it, &r->nodes) {
            const struct rt_node *n = BT_LIST_ENTRY(it, struct rt_node, link);

            for (uint32_t rank = 0; rank < n->n_targets && n->ident == i; rank++) {
                tell_holder(a, &n->targets[rank], runs, n_runs);
            }
        }
        free(k.fps);
    }
    return BT_OK;
}

void rt_cache_free_keys(struct rt_request *req)
{
    for (int i = 0; i < RT_MAX_IDENTS; i++) {
        free(req->keys[i].fps);
    }
}

/* --- from the nodes -------------------------------------------------------------------------- */

static void send_ask(const struct rt_target *t, struct rt_feed_ask ask)
{
    Baton__V1__RouterMessage m = BATON__V1__ROUTER_MESSAGE__INIT;
    Baton__V1__CacheFollow follow = BATON__V1__CACHE_FOLLOW__INIT;

    if (!ask.ask) {
        return;
    }
    follow.after = ask.after;
    follow.snapshot = ask.snapshot;
    follow.rank = t->rank;
    m.kind_case = BATON__V1__ROUTER_MESSAGE__KIND_FOLLOW;
    m.follow = &follow;
    rt_node_send(t->node, &m); /* lost: asked again */
}

/* The one that a message speaks of; NULL: the node has no such rank. */
static struct rt_target *target_of(const struct rt_node *n, uint32_t rank)
{
    return rank < n->n_targets ? &n->targets[rank] : NULL;
}

void rt_cache_init_target(struct rt_target *t, struct rt_node *n, uint32_t rank)
{
    *t = (struct rt_target){.node = n, .rank = rank};
    rt_feed_init(&t->feed);
    rt_speed_init(&t->speed);
    rt_work_init(&t->work);
}

static void welcome(struct rt_target *t, const Baton__V1__NodeWelcome *w, bool anew)
{
    struct rt_node *n = t->node;

    t->n_starts = t->sent_requests = 0;
    t->tells_starts = false;
    t->pages_free = t->pages_unused = w->pages_total;
    if (anew) {
        rt_cache_forget(t);
        rt_speed_init(&t->speed);
        t->busy_us = 0;
        if ((n->ident >= 0 || n->role == RT_ROLE_STORE) &&
            rt_feed_open(&t->feed, n->router->cache.index) < 0) {
            BT_WARN("cache",
                    "node=%s rank=%u msg=\"the index has no view left: its prefixes are unknown\"",
                    n->name, t->rank);
        }
        t->full_told = false;
        rt_feed_limit(&t->feed, (uint64_t)n->router->conf->max_node_blocks / n->n_targets);
    }
    send_ask(t, rt_feed_begin(&t->feed, bt_loop_now(n->router->loop)));
}

void rt_cache_welcome(struct rt_node *n, const Baton__V1__NodeWelcome *w)
{
    int ident = w->block_tokens ? identity_of(n->router, n, w->block_tokens) : -1;
    bool anew = n->feed_incarnation != n->incarnation || n->ident != ident;

    n->feed_incarnation = n->incarnation;
    n->ident = ident;
    for (uint32_t i = 0; i < n->n_targets; i++) {
        welcome(&n->targets[i], w, anew);
    }
}

void rt_cache_forget(struct rt_target *t)
{
    if (t->feed.index) {
        rt_feed_close(&t->feed);
    }
    rt_feed_init(&t->feed);
}

/* Once per message while there is something to sweep; a piece takes microseconds. */
static void sweep(struct rt_router *r)
{
    rt_index_sweep(r->cache.index);
}

static void tell_full(struct rt_target *t)
{
    if (t->feed.full && !t->full_told) {
        t->full_told = true;
        BT_WARN("cache",
                "node=%s rank=%u most=%llu msg=\"says to have more blocks than "
                "index.max_blocks_per_node lets in: the rest is unknown here\"",
                t->node->name, t->rank, (unsigned long long)t->feed.most);
    }
}

void rt_cache_events(struct rt_node *n, const Baton__V1__CacheEvents *m)
{
    struct rt_target *t = target_of(n, m->rank);

    if (t) {
        send_ask(t, rt_feed_events(&t->feed, m, bt_loop_now(n->router->loop)));
        tell_full(t);
    }
    sweep(n->router);
}

/* The guesses of the target's legs go over to the view that takes the old one's place. */
static void move_guesses(struct rt_target *t, uint16_t old)
{
    struct rt_index *index = t->node->router->cache.index;
    struct rt_leg *leg;
    size_t pos = 0;

    while ((leg = bt_map_next(&t->node->legs, &pos, NULL))) {
        if (leg->guess_view == old) {
            rt_index_withdraw(index, old, leg->fps, leg->n_fps);
            leg->guess_view = t->feed.view;
            if (rt_index_guess(index, leg->guess_view, leg->fps, leg->n_fps) < 0) {
                leg->guess_view = RT_VIEW_NONE;
            }
        }
    }
    rt_index_close(index, old);
}

void rt_cache_snapshot(struct rt_node *n, const Baton__V1__CacheSnapshot *m)
{
    struct rt_target *t = target_of(n, m->rank);
    uint16_t old = RT_VIEW_NONE;

    if (t) {
        send_ask(t, rt_feed_snapshot(&t->feed, m, bt_loop_now(n->router->loop), &old));
        tell_full(t);
    }
    if (old != RT_VIEW_NONE) {
        move_guesses(t, old);
        rt_cache_share(n);
    }
    sweep(n->router);
}

static void learn(struct rt_target *t, const Baton__V1__NodeLoad *l, uint64_t now)
{
    const struct rt_node *n = t->node;

    for (size_t i = 0; i < l->n_steps; i++) {
        const Baton__V1__StepSample *s = l->steps[i];
        struct rt_step step = {s->prompt_tokens, (double)s->prompt_work, s->rows,
                               (double)s->row_work, (double)s->us / 1e6};

        rt_speed_learn(&t->speed, &step, now);
        if (n->ident >= 0) {
            rt_speed_learn(&n->router->cache.idents[n->ident].speed, &step, now);
        }
    }
    if (l->busy_us > t->busy_us) {
        rt_speed_add_busy(&t->speed, (double)(l->busy_us - t->busy_us) / 1e6, now);
    }
    t->busy_us = l->busy_us;
}

/* What lies outside the pool of a node of the KV store, or in a daemon, can be had by all its
 * nodes. What is lost cannot. */
void rt_cache_share(struct rt_node *n)
{
    bool there = n->state != RT_NODE_LOST && n->state != RT_NODE_CONNECTING;

    for (uint32_t i = 0; i < n->n_targets; i++) {
        const struct rt_target *t = &n->targets[i];
        bool shared = n->role == RT_ROLE_STORE || t->block_s[RT_TIERS - 1] > 0;

        if (t->feed.index && t->feed.view != RT_VIEW_NONE) {
            rt_index_share(n->router->cache.index, t->feed.view, shared && there);
        }
    }
}

void rt_cache_load(struct rt_node *n, const Baton__V1__NodeLoad *l)
{
    uint64_t now = bt_loop_now(n->router->loop);
    struct rt_target *t = target_of(n, l->rank);

    if (!t) {
        return;
    }
    t->pages_free = l->pages_free;
    t->requests_waiting = l->requests_waiting;
    t->requests_running = l->requests_running;
    t->tokens_waiting = l->tokens_waiting;
    /* Starts that were on their way when the node wrote this are not in its figures. */
    t->tells_starts = t->tells_starts || l->starts > 0;
    t->sent_requests =
        t->tells_starts && t->n_starts > l->starts ? (uint32_t)(t->n_starts - l->starts) : 0;
    t->pages_unused = l->pages_unused;
    t->oldest_s = l->oldest_ms / 1e3;
    for (size_t i = 0; i < l->n_tiers; i++) {
        if ((unsigned)l->tiers[i]->tier < RT_TIERS) {
            t->block_s[l->tiers[i]->tier] = l->tiers[i]->block_us / 1e6;
        }
    }
    rt_ops_load(t, l);
    rt_cache_share(n);
    learn(t, l, now);
    send_ask(t, rt_feed_load(&t->feed, l, now));
    rt_admit_soon(n->router);
    sweep(n->router);
}

/* --- for requests ---------------------------------------------------------------------------- */

/* Runs of one identity's targets into their views. */
static void
look(struct rt_request *req, int ident, struct rt_node_view *views, struct rt_target **targets)
{
    struct rt_router *r = req->router;
    const struct rt_keys *k = keys_of(req, ident);
    const struct rt_run *runs;
    size_t n_runs;

    runs = rt_index_look(r->cache.index, k->fps, k->n, &n_runs);
    for (size_t i = 0; i < n_runs; i++) {
        r->cache.run_of_view[runs[i].view] = (uint16_t)(i + 1);
    }
    for (size_t i = 0; i < r->n_targets; i++) {
        const struct rt_target *t = targets[i];

        if (t->node->ident != ident) {
            continue;
        }
        if (t->feed.view != RT_VIEW_NONE && r->cache.run_of_view[t->feed.view]) {
            views[i].run = runs[r->cache.run_of_view[t->feed.view] - 1];
        } else {
            views[i].run.store = rt_index_looked_store(r->cache.index);
        }
        if (t->block_s[RT_TIERS - 1] <= 0) {
            views[i].run.store = 0; /* not part of the KV store */
        }
    }
    for (size_t i = 0; i < n_runs; i++) {
        r->cache.run_of_view[runs[i].view] = 0;
    }
}

/* A fit of few steps is worth little: until then a node is as fast as its kind. */
static const struct rt_speed *speed_of(const struct rt_router *r, const struct rt_target *t)
{
    int ident = t->node->ident;

    return t->speed.n < STEPS_MIN && ident >= 0 ? &r->cache.idents[ident].speed : &t->speed;
}

void rt_cache_fill_views(struct rt_request *req,
                         struct rt_node_view *views,
                         struct rt_target **targets)
{
    struct rt_router *r = req->router;
    uint64_t now = bt_loop_now(r->loop);

    for (size_t i = 0; i < r->n_targets; i++) {
        const struct rt_target *t = targets[i];
        const struct rt_node *n = t->node;

        views[i].speed = speed_of(r, t);
        views[i].queue_s = rt_work_seconds(&t->work, now);
        views[i].tokens_outstanding =
            t->tokens_waiting > t->own_tokens ? t->tokens_waiting - t->own_tokens : 0;
        views[i].requests_outstanding =
            t->requests_waiting + t->requests_running + t->sent_requests;
        views[i].pages_unused = t->pages_unused;
        views[i].page_tokens = n->page_tokens;
        views[i].block_tokens = n->ident >= 0 ? r->cache.idents[n->ident].block_tokens : 0;
        views[i].busy = rt_speed_busy(&t->speed, now);
        views[i].oldest_s = t->oldest_s;
        memcpy(views[i].block_s, t->block_s, sizeof(views[i].block_s));
    }
    for (int i = 0; i < r->cache.n_idents; i++) {
        look(req, i, views, targets);
    }
}

void rt_cache_fill_args(const struct rt_request *req, struct rt_pick_args *a)
{
    const struct rt_router *r = req->router;
    uint32_t most = req->sampling.s.max_tokens;

    a->route = (enum rt_route)r->conf->route;
    a->n_answer = (size_t)r->cache.answer_tokens;
    a->n_answer = BT_MIN(a->n_answer, (size_t)most);
    a->reuse_s = (double)r->conf->reuse_ns / 1e9;
    a->now_ns = bt_loop_now(r->loop);
    if (r->cache.n_handoffs >= HANDOFFS_MIN) {
        a->handoff_s = r->cache.handoff_s;
    }
}

void rt_leg_begin(struct rt_leg *leg, const struct rt_estimate *est)
{
    struct rt_target *t = leg->target;
    struct rt_node *n = leg->node;
    struct rt_request *req = leg->req;
    uint64_t now = bt_loop_now(n->router->loop);

    t->n_starts++;
    t->sent_requests++;
    bt_list_init(&leg->work.link);
    if (leg->kind != RT_LEG_DECODE) {
        rt_work_add(&t->work, &leg->work, est->bring_s + est->compute_s, now);
        t->own_tokens += leg->n_tokens;
        leg->working = true;
    }
    leg->guess_view = RT_VIEW_NONE;
    if (n->ident >= 0 && t->feed.view != RT_VIEW_NONE) {
        const struct rt_keys *k = keys_of(req, n->ident);

        leg->fps = k->fps;
        leg->n_fps = k->n;
        if (rt_index_guess(n->router->cache.index, t->feed.view, k->fps, k->n) == BT_OK) {
            leg->guess_view = t->feed.view;
        }
    }
}

void rt_leg_first(struct rt_leg *leg)
{
    struct rt_target *t = leg->target;
    struct rt_router *r = leg->node->router;

    if (leg->working) {
        leg->working = false;
        rt_work_done(&t->work, &leg->work, bt_loop_now(r->loop));
        t->own_tokens -= leg->n_tokens;
        rt_admit_soon(r);
        t->tokens_waiting -= BT_MIN(t->tokens_waiting, leg->n_tokens); /* until the next load */
    }
}

void rt_leg_end(struct rt_leg *leg)
{
    rt_leg_first(leg);
    if (leg->guess_view != RT_VIEW_NONE) {
        rt_index_withdraw(leg->node->router->cache.index, leg->guess_view, leg->fps, leg->n_fps);
        leg->guess_view = RT_VIEW_NONE;
    }
}

static void mean(double *m, double v, double weight)
{
    *m += (v - *m) * weight;
}

void rt_cache_finished(struct rt_request *req)
{
    struct rt_router *r = req->router;
    double gap = (double)(req->trace->t.second - req->trace->t.first) / 1e9;

    mean(&r->cache.answer_tokens, (double)req->answer.ids.n, LEARN);
    if (req->retries > 0) {
        return; /* computed in pieces */
    }
    r->cache.prompt_tokens += req->prompt.n;
    r->cache.cached_tokens += req->cached_tokens;
    r->cache.expected_tokens += req->expected_tokens;
    for (int t = 0; t < RT_TIERS; t++) {
        r->cache.tier_cached[t] += req->cached_tier_tokens[t];
        r->cache.tier_tokens[t] += req->expected_tier_tokens[t];
    }
    if (req->path_taken == RT_PATH_DIRECT && req->trace->t.second) {
        r->cache.n_handoffs++;
        mean(&r->cache.handoff_s, gap,
             r->cache.n_handoffs < 20 ? 1.0 / (double)r->cache.n_handoffs : LEARN);
    }
}

void rt_cache_fill_info(const struct rt_router *r, Baton__V1__CacheInfo *m)
{
    struct rt_index_stats s = rt_index_stats(r->cache.index);

    baton__v1__cache_info__init(m);
    m->prompt_tokens = r->cache.prompt_tokens;
    m->cached_tokens = r->cache.cached_tokens;
    m->expected_tokens = r->cache.expected_tokens;
    m->expected_pool_tokens = r->cache.tier_tokens[0];
    m->expected_host_tokens = r->cache.tier_tokens[1];
    m->expected_disk_tokens = r->cache.tier_tokens[2];
    m->expected_store_tokens = r->cache.tier_tokens[3];
    m->cached_pool_tokens = r->cache.tier_cached[0];
    m->cached_host_tokens = r->cache.tier_cached[1];
    m->cached_disk_tokens = r->cache.tier_cached[2];
    m->cached_store_tokens = r->cache.tier_cached[3];
    m->index_entries = s.entries;
    m->index_guesses = s.guesses;
    m->index_bytes = s.bytes;
}

static void add_target(const struct rt_target *t, uint64_t now, Baton__V1__NodeInfo *m)
{
    const struct rt_speed *sp = &t->speed;
    double share = 1.0 / t->node->n_targets;

    m->pages_free += t->pages_free;
    m->requests_waiting += t->requests_waiting;
    m->requests_running += t->requests_running;
    m->queue_s += rt_work_seconds(&t->work, now);
    if (sp->n_prompt) {
        m->prefill_tokens_per_s += 1000 / rt_speed_prefill(sp, 1000, 0, 512, now);
    }
    if (sp->n > sp->n_prompt) {
        m->decode_step_s += rt_speed_decode(sp, t->requests_running + 1.0, 0, now) * share;
    }
    m->speed_error += (sp->n ? sp->error : 0) * share;
    m->speed_ratio += rt_speed_ratio(sp, now) * share;
    m->busy += rt_speed_busy(sp, now) * share;
    m->cache_gaps += t->feed.gaps;
    m->cache_drifts += t->feed.drifts;
    m->cache_snapshots += t->feed.snapshots;
    if (t->feed.index && t->feed.view != RT_VIEW_NONE) {
        m->blocks_pool += rt_index_digest(t->feed.index, t->feed.view, 0).n;
        m->blocks_host += rt_index_digest(t->feed.index, t->feed.view, 1).n;
        m->blocks_disk += rt_index_digest(t->feed.index, t->feed.view, 2).n;
    }
}

void rt_cache_fill_node(const struct rt_node *n, Baton__V1__NodeInfo *m)
{
    uint64_t now = bt_loop_now(n->router->loop);

    m->ranks = n->n_targets;
    m->pages_total = n->pages_total * n->n_targets;
    for (uint32_t i = 0; i < n->n_targets; i++) {
        add_target(&n->targets[i], now, m);
    }
}
