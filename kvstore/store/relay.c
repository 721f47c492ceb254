/* See relay.h. One struct passing for each prompt: WAITING (to be known, then in the queue of its
 * pool), then MOVING,
 * with a kv_recv from P and a kv_send to D; over when both are done. */
#include "kvstore/store/relay.h"
#include "kvstore/store/keep.h"

#include "common/base/buf.h"
#include "common/ds/list.h"
#include "common/obs/log.h"
#include "common/thr/time.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

#define NAME_MAX_BYTES 128
#define ADDR_MAX_BYTES 271

#define PROMPT_MAX_TOKENS (1u << 24)

/* A pool and who waits for its pages. */
struct ground {
    struct bt_list link; /* kv_relay.grounds */
    struct kv_pool *pool;
    struct bt_list waiting; /* struct passing.link, oldest first */
};

struct passing {
    struct bt_list link; /* kv_relay.unknown, ground.waiting or kv_relay.moving */
    struct kv_relay *relay;
    struct ground *ground;
    struct kv_format *fmt;
    struct kv_handoff_id id;
    uint32_t n_tokens, n_have;
    uint64_t until_ns; /* WAITING: refused then */
    char origin_name[NAME_MAX_BYTES + 1], origin_address[ADDR_MAX_BYTES + 1];
    uint64_t origin_incarnation;
    char asker[NAME_MAX_BYTES + 1]; /* who asked first */
    uint64_t came_ns, moves_ns;     /* moves: 0 = WAITING */
    /* MOVING */
    uint32_t *pages, n_pages; /* of the tokens behind n_have */
    struct kv_recv *recv;     /* NULL = over */
    struct kv_send *send;     /* NULL = over */
    bool whole;               /* all of it has come */
    int rc;                   /* first reason for failing */
    /* For keeping, once both are over; ids NULL = nothing is kept. */
    struct kv_keep_job job;
    struct bt_msg kept_msg;
    int32_t *ids;
};

struct kv_relay {
    struct kv_relay_cfg cfg;
    struct kv_handoff *handoff;
    struct kv_keep *keep; /* NULL = nothing is kept */
    struct bt_net *net;
    struct bt_list grounds, moving;
    struct bt_list unknown;    /* their origin is no member, yet; oldest first */
    struct bt_net_timer timer; /* the earliest until_ns */
    struct bt_msg stop_msg, members_msg;
    bool stopping;

    pthread_mutex_t lock; /* what follows */
    pthread_cond_t idle;
    bool draining;
    bool members_queued; /* members_msg is under way */
    uint32_t n_open, n_waiting;
    uint64_t relayed, failed, refused, keeps, keeps_over;
};

static void serve(struct ground *g);

/* ---- counters ---- */

static void count(struct kv_relay *r, uint64_t *counter)
{
    pthread_mutex_lock(&r->lock);
    (*counter)++;
    pthread_mutex_unlock(&r->lock);
}

static void count_open(struct kv_relay *r, int waiting, int open)
{
    pthread_mutex_lock(&r->lock);
    r->n_waiting += (uint32_t)waiting;
    r->n_open += (uint32_t)open;
    if (r->n_waiting + r->n_open == 0) {
        pthread_cond_broadcast(&r->idle);
    }
    pthread_mutex_unlock(&r->lock);
}

/* ---- the end of a passing ---- */

static void tell(const struct passing *p, int rc)
{
    const struct kv_relay *r = p->relay;
    const struct kv_layout *l = kv_pool_layout(p->ground->pool);
    uint64_t now = bt_now_ns();
    const struct kv_relay_passed m = {
        .id = p->id,
        .origin = p->origin_name,
        .asker = p->asker,
        .n_tokens = p->n_tokens,
        .n_have = p->n_have,
        .bytes = p->moves_ns ? p->n_pages * (uint64_t)l->page_stride * (uint64_t)l->n_layers : 0,
        .wait_ns = (p->moves_ns ? p->moves_ns : now) - p->came_ns,
        .move_ns = p->moves_ns ? now - p->moves_ns : 0,
        .rc = rc};

    if (r->cfg.passed) {
        r->cfg.passed(r->cfg.arg, &m);
    }
}

static void passing_free(struct passing *p)
{
    free(p->ids);
    free(p->pages);
    free(p);
}

static void over(struct passing *p)
{
    struct kv_relay *r = p->relay;
    struct ground *g = p->ground;

    kv_pool_give(g->pool, p->pages, p->n_pages, KV_OWNER_TRANSFER);
    bt_list_remove(&p->link);
    passing_free(p);
    count_open(r, 0, -1);
    serve(g);
}

static void on_kept(struct bt_msg *msg, void *consumer)
{
    struct passing *p = BT_CONTAINER_OF(msg, struct passing, kept_msg);

    count(p->relay, &p->relay->keeps_over);
    over(p);
}

/* [relay-keep] */
static void kept(struct kv_keep_job *job)
{
    struct passing *p = BT_CONTAINER_OF(job, struct passing, job);

    bt_net_post(p->relay->net, &p->kept_msg);
}

static void check_over(struct passing *p)
{
    struct kv_relay *r = p->relay;

    if (p->recv || p->send) {
        return;
    }
    count(r, p->rc == BT_OK ? &r->relayed : &r->failed);
    tell(p, p->rc);
    if (!p->whole || !p->ids || !r->keep) {
        over(p);
        return;
    }
    /* Also when D has left: the bytes are P's and right. */
    p->job.pool = p->ground->pool;
    p->job.pages = p->pages;
    p->job.first = p->n_have;
    p->job.n_tokens = p->n_tokens;
    p->job.ids = p->ids;
    p->job.done = kept;
    bt_list_init(&p->kept_msg.link);
    p->kept_msg.handle = on_kept;
    count(r, &r->keeps);
    kv_keep_push(r->keep, &p->job);
}

static void on_recv_done(void *arg, int rc, const char *msg, const struct kv_first *tokens)
{
    struct passing *p = arg;

    kv_recv_release(p->recv);
    p->recv = NULL;
    if (rc == BT_OK) {
        p->whole = true;
        if (p->send) {
            kv_send_finish(p->send, tokens);
        }
    } else {
        p->rc = p->rc ? p->rc : rc;
        if (p->send) {
            BT_DEBUG("relay", "origin=%s rc=%s msg=\"%s\"", p->origin_name, bt_rc_name(rc), msg);
            kv_send_abort(p->send, rc);
        }
    }
    check_over(p);
}

static void on_send_done(void *arg, int rc, const char *msg)
{
    struct passing *p = arg;

    kv_send_release(p->send);
    p->send = NULL;
    if (rc != BT_OK) {
        p->rc = p->rc ? p->rc : rc;
        if (p->recv) {
            kv_recv_abort(p->recv, rc);
        }
    }
    check_over(p);
}

static void on_progress(void *arg, int layer, uint32_t n_tokens)
{
    struct passing *p = arg;

    if (p->send) {
        kv_send_progress(p->send, 0, n_tokens, layer);
    }
}

/* ---- from waiting to moving ---- */

static int start_hops(struct passing *p, struct bt_err *err)
{
    struct kv_relay *r = p->relay;
    const struct kv_layout *l = kv_pool_layout(p->ground->pool);
    struct kv_send_cfg sc = {
        .id = p->id,
        .fmt = p->fmt,
        .n_tokens = p->n_tokens,
        .n_have = p->n_have,
        .events = {.arg = p, .done = on_send_done},
    };
    struct kv_recv_cfg rc_cfg = {
        .id = p->id,
        .fmt = p->fmt,
        .peer_name = p->origin_name,
        .peer_incarnation = p->origin_incarnation,
        .peer_address = p->origin_address,
        .n_tokens = p->n_tokens,
        .n_have = p->n_have,
        .pages = p->pages,
        .n_pages = p->n_pages,
        .events = {.arg = p, .done = on_recv_done, .progress = on_progress},
    };
    int rc = kv_send_create(r->handoff, &sc, &p->send, err);

    if (rc != BT_OK) {
        return rc;
    }
    kv_send_set_pages(p->send, p->n_have / (uint32_t)l->page_tokens, p->pages, p->n_pages);
    rc = kv_recv_create(r->handoff, &rc_cfg, &p->recv, err);
    if (rc != BT_OK) {
        /* D is told by the send's end; the passing is over with it. */
        p->rc = rc;
        kv_send_abort(p->send, rc);
    }
    return BT_OK;
}

/* BT_PENDING: no pages now. BT_OK: it moves. Else it cannot; the caller has to free it. */
static int start(struct passing *p, struct bt_err *err)
{
    struct kv_relay *r = p->relay;
    int rc;

    if (kv_pool_take(p->ground->pool, p->n_pages, KV_OWNER_TRANSFER, KV_PAGE_NONE, p->pages) !=
        BT_OK) {
        if (r->keep) {
            kv_keep_hurry(r->keep);
        }
        return BT_PENDING;
    }
    rc = start_hops(p, err);
    if (rc != BT_OK) {
        kv_pool_give(p->ground->pool, p->pages, p->n_pages, KV_OWNER_TRANSFER);
        return rc;
    }
    bt_list_remove(&p->link);
    bt_list_push_back(&r->moving, &p->link);
    p->moves_ns = bt_now_ns();
    count_open(r, 0, 1);
    return BT_OK;
}

/* Its ticket waits in the handoff: it is told there. */
static void give_up_waiting(struct passing *p, int rc, const char *msg)
{
    struct kv_relay *r = p->relay;

    kv_handoff_refuse(r->handoff, p->id, rc, msg);
    tell(p, rc);
    bt_list_remove(&p->link);
    passing_free(p);
    count(r, &r->refused);
    count_open(r, -1, 0);
}

/* Pages have come back: the oldest first, and nobody overtakes it. */
static void serve(struct ground *g)
{
    while (!bt_list_empty(&g->waiting)) {
        struct passing *p = BT_LIST_ENTRY(g->waiting.next, struct passing, link);
        struct kv_relay *r = p->relay;
        struct bt_err err = {0};
        int rc = start(p, &err);

        if (rc == BT_PENDING) {
            return;
        }
        if (rc != BT_OK) {
            give_up_waiting(p, rc, err.msg);
        } else {
            count_open(r, -1, 0);
        }
    }
}

static uint64_t first_until(const struct bt_list *waiting)
{
    return bt_list_empty(waiting) ? BT_NEVER_NS
                                  : BT_LIST_ENTRY(waiting->next, struct passing, link)->until_ns;
}

static void arm(struct kv_relay *r)
{
    uint64_t next = first_until(&r->unknown);

    bt_list_for_each (it, &r->grounds) {
        struct ground *g = BT_LIST_ENTRY(it, struct ground, link);

        next = BT_MIN(next, first_until(&g->waiting));
    }
    if (next != BT_NEVER_NS) {
        bt_net_timer_start(r->net, &r->timer, next);
    }
}

static void expire(struct bt_list *waiting, uint64_t now, int rc, const char *msg)
{
    while (first_until(waiting) <= now) {
        give_up_waiting(BT_LIST_ENTRY(waiting->next, struct passing, link), rc, msg);
    }
}

static void on_timer(struct bt_net_timer *t)
{
    struct kv_relay *r = BT_CONTAINER_OF(t, struct kv_relay, timer);
    uint64_t now = bt_now_ns();

    expire(&r->unknown, now, BT_E_PEER_STALE, "the prefill node is no member of the cluster");
    bt_list_for_each (it, &r->grounds) {
        struct ground *g = BT_LIST_ENTRY(it, struct ground, link);

        expire(&g->waiting, now, BT_E_EXHAUSTED, "the store's memory for prompts is full");
        serve(g);
    }
    arm(r);
}

/* ---- what the handoff asks ---- */

static int
open_pool(void *arg, const struct kv_layout *layout, struct kv_pool **ret_pool, struct bt_err *err)
{
    struct kv_relay *r = arg;
    struct kv_layout l = *layout;
    struct ground *g;
    uint64_t n;
    int rc;

    n = r->cfg.pool_bytes / layout->page_stride / (uint64_t)layout->n_layers;
    if (n == 0) {
        return BT_FAIL(err, BT_E_TOO_LARGE,
                       "a page of this layout does not fit the relay's memory");
    }
    l.n_pages = (uint32_t)BT_MIN(n, (uint64_t)UINT32_MAX - 1);
    rc = kv_layout_init(&l, err);
    if (rc != BT_OK) {
        return rc;
    }
    g = bt_calloc(1, sizeof(*g));
    if (!g) {
        return BT_FAIL(err, BT_E_NOMEM, "relay: out of memory");
    }
    rc = kv_pool_create(&l, &bt_mem_host, "relay", &g->pool, err);
    if (rc != BT_OK) {
        free(g);
        return rc;
    }
    bt_list_init(&g->waiting);
    pthread_mutex_lock(&r->lock);
    bt_list_push_back(&r->grounds, &g->link);
    pthread_mutex_unlock(&r->lock);
    *ret_pool = g->pool;
    return BT_OK;
}

static struct ground *ground_of(struct kv_relay *r, const struct kv_pool *pool)
{
    bt_list_for_each (it, &r->grounds) {
        struct ground *g = BT_LIST_ENTRY(it, struct ground, link);

        if (g->pool == pool) {
            return g;
        }
    }
    return NULL;
}

static void close_pool(void *arg, struct kv_pool *pool)
{
    struct kv_relay *r = arg;
    struct ground *g = ground_of(r, pool);

    BT_BUG_ON(!g || !bt_list_empty(&g->waiting));
    pthread_mutex_lock(&r->lock);
    bt_list_remove(&g->link);
    pthread_mutex_unlock(&r->lock);
    kv_pool_destroy(pool);
    free(g);
}

/* What nobody can be given, whoever waits. */
static int check_size(const struct kv_relay_ask *a, struct bt_err *err)
{
    const struct kv_layout *l = kv_pool_layout(kv_format_pool(a->fmt));
    uint32_t n_pages;

    if (strlen(a->origin.name) > NAME_MAX_BYTES || strlen(a->origin.address) > ADDR_MAX_BYTES) {
        return BT_FAIL(err, BT_E_INVALID, "name or address of the origin is too long");
    }
    if (a->n_have % (uint32_t)l->page_tokens != 0 || a->n_have > a->n_tokens ||
        a->n_tokens > PROMPT_MAX_TOKENS) {
        return BT_FAIL(err, BT_E_INVALID, "%u of %u tokens: too many, or no whole pages", a->n_have,
                       a->n_tokens);
    }
    n_pages = kv_layout_pages_for(l, a->n_tokens) - a->n_have / (uint32_t)l->page_tokens;
    if (n_pages > l->n_pages) {
        return BT_FAIL(err, BT_E_EXHAUSTED, "the prompt takes %u pages, the relay has %u", n_pages,
                       l->n_pages);
    }
    return BT_OK;
}

static int check_ask(struct kv_relay *r, const struct kv_relay_ask *a, struct bt_err *err)
{
    uint32_t n;

    if (!__atomic_load_n(&r->net, __ATOMIC_ACQUIRE)) {
        return BT_FAIL(err, BT_E_UNAVAILABLE, "store %s is starting", r->cfg.node_name);
    }
    pthread_mutex_lock(&r->lock);
    n = r->draining || r->stopping ? UINT32_MAX : r->n_open + r->n_waiting;
    pthread_mutex_unlock(&r->lock);
    if (n == UINT32_MAX) {
        return BT_FAIL(err, BT_E_UNAVAILABLE, "store %s is draining", r->cfg.node_name);
    }
    if (n >= r->cfg.max_open) {
        return BT_FAIL(err, BT_E_EXHAUSTED, "%u prompts are on their way, the limit", n);
    }
    return check_size(a, err);
}

static struct passing *
passing_new(struct kv_relay *r, struct ground *g, const struct kv_relay_ask *a)
{
    const struct kv_layout *l = kv_pool_layout(g->pool);
    struct passing *p = bt_calloc(1, sizeof(*p));

    if (!p) {
        return NULL;
    }
    *p = (struct passing){.relay = r,
                          .ground = g,
                          .fmt = a->fmt,
                          .id = a->id,
                          .n_tokens = a->n_tokens,
                          .n_have = a->n_have,
                          .until_ns = bt_deadline_ns(r->cfg.wait_ns),
                          .came_ns = bt_now_ns(),
                          .origin_incarnation = a->origin.incarnation};
    bt_list_init(&p->link);
    snprintf(p->asker, sizeof(p->asker), "%s", a->asker);
    snprintf(p->origin_name, sizeof(p->origin_name), "%s", a->origin.name);
    snprintf(p->origin_address, sizeof(p->origin_address), "%s", a->origin.address);
    p->n_pages = kv_layout_pages_for(l, a->n_tokens) - a->n_have / (uint32_t)l->page_tokens;
    p->pages = bt_calloc(p->n_pages + 1, sizeof(*p->pages));
    if (r->keep && a->ids) {
        p->job.block_tokens = a->block_tokens;
        p->job.root = a->root;
        p->ids = bt_calloc(a->n_tokens, sizeof(*p->ids));
        if (p->ids) {
            memcpy(p->ids, a->ids, a->n_tokens * sizeof(*p->ids));
        }
    }
    if (!p->pages || (r->keep && a->ids && !p->ids)) {
        passing_free(p);
        return NULL;
    }
    return p;
}

/* Another node asks for a prompt that waits, and may have less of it than who asked before. */
static int widen(struct passing *p, const struct kv_relay_ask *a, struct bt_err *err)
{
    const struct kv_layout *l = kv_pool_layout(p->ground->pool);
    uint32_t *pages, n_pages;
    int rc;

    /* Another layout or length: its ticket is refused once the prompt moves. */
    if (a->n_have >= p->n_have || a->fmt != p->fmt || a->n_tokens != p->n_tokens) {
        return BT_OK;
    }
    rc = check_size(a, err);
    if (rc != BT_OK) {
        return rc;
    }
    n_pages = kv_layout_pages_for(l, a->n_tokens) - a->n_have / (uint32_t)l->page_tokens;
    pages = bt_calloc(n_pages + 1, sizeof(*pages));
    if (!pages) {
        return BT_FAIL(err, BT_E_NOMEM, "relay: out of memory");
    }
    free(p->pages);
    p->pages = pages;
    p->n_pages = n_pages;
    p->n_have = a->n_have;
    return BT_OK;
}

static struct passing *find_in(const struct bt_list *waiting, struct kv_handoff_id id)
{
    bt_list_for_each (it, waiting) {
        struct passing *p = BT_LIST_ENTRY(it, struct passing, link);

        if (p->id.hi == id.hi && p->id.lo == id.lo) {
            return p;
        }
    }
    return NULL;
}

static bool is_known(const struct passing *p)
{
    const struct kv_origin o = {p->origin_name, p->origin_incarnation, p->origin_address};

    return p->relay->cfg.is_member(p->relay->cfg.arg, &o);
}

static void wait_in(struct bt_list *waiting, struct passing *p)
{
    bt_list_push_back(waiting, &p->link);
    count_open(p->relay, 1, 0);
    arm(p->relay);
}

/* It moves or waits. Else it cannot; the caller has to free it. */
static int enqueue(struct passing *p, struct bt_err *err)
{
    int rc;

    if (!is_known(p)) {
        wait_in(&p->relay->unknown, p);
        return BT_OK;
    }
    rc = bt_list_empty(&p->ground->waiting) ? start(p, err) : BT_PENDING;
    if (rc == BT_PENDING) {
        wait_in(&p->ground->waiting, p);
        return BT_OK;
    }
    return rc;
}

static int asked(void *arg, const struct kv_relay_ask *a, struct bt_err *err)
{
    struct kv_relay *r = arg;
    struct ground *g = ground_of(r, kv_format_pool(a->fmt));
    struct passing *p, *twin;
    int rc;

    BT_DEBUG("relay", "req=%016llx asker=%s origin=%s tokens=%u have=%u",
             (unsigned long long)a->id.hi, a->asker, a->origin.name, a->n_tokens, a->n_have);
    twin = find_in(&g->waiting, a->id);
    twin = twin ? twin : find_in(&r->unknown, a->id);
    rc = twin ? widen(twin, a, err) : check_ask(r, a, err);
    if (rc == BT_OK && !twin) {
        p = passing_new(r, g, a);
        rc = p ? enqueue(p, err) : BT_FAIL(err, BT_E_NOMEM, "relay: out of memory");
        if (rc != BT_OK && p) {
            passing_free(p);
        }
    }
    if (rc != BT_OK) {
        count(r, &r->refused);
    }
    if (rc != BT_OK && !twin && r->cfg.passed) {
        const struct kv_relay_passed m = {.id = a->id,
                                          .origin = a->origin.name,
                                          .asker = a->asker,
                                          .n_tokens = a->n_tokens,
                                          .n_have = a->n_have,
                                          .rc = rc};

        r->cfg.passed(r->cfg.arg, &m);
    }
    return rc;
}

/* [net] Those whose origin has become known go where they belong, the others stay. */
static void on_members(struct bt_msg *msg, void *consumer)
{
    struct kv_relay *r = BT_CONTAINER_OF(msg, struct kv_relay, members_msg);

    pthread_mutex_lock(&r->lock);
    r->members_queued = false;
    pthread_mutex_unlock(&r->lock);
    bt_list_for_each_safe (it, &r->unknown) {
        struct passing *p = BT_LIST_ENTRY(it, struct passing, link);
        struct bt_err err = {0};
        int rc;

        if (!is_known(p)) {
            continue;
        }
        bt_list_remove(&p->link);
        rc = enqueue(p, &err);
        if (rc != BT_OK) {
            give_up_waiting(p, rc, err.msg);
        } else {
            count_open(r, -1, 0);
        }
    }
}

void kv_relay_members_changed(struct kv_relay *r)
{
    pthread_mutex_lock(&r->lock);
    if (!r->members_queued && !r->stopping) {
        r->members_queued = true;
        bt_net_post(r->net, &r->members_msg);
    }
    pthread_mutex_unlock(&r->lock);
}

static void gone(void *arg, struct kv_handoff_id id)
{
    struct kv_relay *r = arg;
    struct passing *p = find_in(&r->unknown, id);
    struct ground *g;

    for (struct bt_list *it = r->grounds.next; !p && it != &r->grounds; it = it->next) {
        p = find_in(&BT_LIST_ENTRY(it, struct ground, link)->waiting, id);
    }
    if (p) {
        g = p->ground;
        bt_list_remove(&p->link);
        passing_free(p);
        count_open(r, -1, 0);
        serve(g);
    }
}

/* ---- life ---- */

int kv_relay_create(const struct kv_relay_cfg *cfg, struct kv_relay **ret, struct bt_err *err)
{
    struct kv_relay *r = bt_calloc(1, sizeof(*r));
    struct kv_relay_ops ops = {
        .arg = r, .open = open_pool, .close = close_pool, .asked = asked, .gone = gone};
    struct kv_handoff_cfg hc = {
        .net = cfg->net,
        .relay = &ops,
        .max_formats = cfg->max_formats,
        .node_name = cfg->node_name,
        .incarnation = cfg->incarnation,
        .silence_ns = cfg->silence_ns,
        .lease_ns = cfg->lease_ns,
        .max_open = 2 * cfg->max_open, /* two hops each */
        .max_inflight_bytes = cfg->max_inflight_bytes,
    };
    int rc;

    if (!r) {
        return BT_FAIL(err, BT_E_NOMEM, "relay: out of memory");
    }
    r->cfg = *cfg;
    bt_list_init(&r->grounds);
    bt_list_init(&r->moving);
    bt_list_init(&r->unknown);
    bt_list_init(&r->members_msg.link);
    r->members_msg.handle = on_members;
    r->timer = (struct bt_net_timer){.deadline_ns = BT_NEVER_NS, .fn = on_timer};
    pthread_mutex_init(&r->lock, NULL);
    pthread_cond_init(&r->idle, NULL);
    r->cfg.node_name = strdup(cfg->node_name);
    rc = r->cfg.node_name ? BT_OK : BT_FAIL(err, BT_E_NOMEM, "relay: out of memory");
    if (rc == BT_OK && cfg->tiers) {
        rc = kv_keep_create(cfg->tiers, &r->keep, err);
    }
    if (rc == BT_OK) {
        rc = kv_handoff_create(&hc, &r->handoff, err);
    }
    if (rc != BT_OK) {
        kv_keep_destroy(r->keep);
        free((char *)(uintptr_t)r->cfg.node_name);
        pthread_mutex_destroy(&r->lock);
        pthread_cond_destroy(&r->idle);
        free(r);
        return rc;
    }
    __atomic_store_n(&r->net, kv_handoff_net(r->handoff), __ATOMIC_RELEASE); /* for check_ask */
    *ret = r;
    return BT_OK;
}

void kv_relay_drain(struct kv_relay *r)
{
    pthread_mutex_lock(&r->lock);
    r->draining = true;
    pthread_mutex_unlock(&r->lock);
}

/* [net] */
static void on_stop(struct bt_msg *msg, void *consumer)
{
    struct kv_relay *r = BT_CONTAINER_OF(msg, struct kv_relay, stop_msg);

    bt_net_timer_stop(&r->timer);
    if (r->keep) {
        kv_keep_hurry(r->keep);
    }
    expire(&r->unknown, BT_NEVER_NS - 1, BT_E_UNAVAILABLE, "the store is stopping");
    bt_list_for_each (it, &r->grounds) {
        struct ground *g = BT_LIST_ENTRY(it, struct ground, link);

        expire(&g->waiting, BT_NEVER_NS - 1, BT_E_UNAVAILABLE, "the store is stopping");
    }
    bt_list_for_each (it, &r->moving) {
        struct passing *p = BT_LIST_ENTRY(it, struct passing, link);

        if (p->send) {
            kv_send_abort(p->send, BT_E_UNAVAILABLE);
        }
        if (p->recv) {
            kv_recv_abort(p->recv, BT_E_UNAVAILABLE);
        }
    }
    count_open(r, 0, -1); /* the one that kv_relay_destroy holds */
}

void kv_relay_destroy(struct kv_relay *r)
{
    if (!r) {
        return;
    }
    pthread_mutex_lock(&r->lock);
    r->draining = r->stopping = true;
    r->n_open++; /* not idle before the stop message was handled */
    pthread_mutex_unlock(&r->lock);
    r->stop_msg.handle = on_stop;
    bt_list_init(&r->stop_msg.link);
    bt_net_post(r->net, &r->stop_msg);
    pthread_mutex_lock(&r->lock);
    while (r->n_open + r->n_waiting > 0) {
        pthread_cond_wait(&r->idle, &r->lock);
    }
    pthread_mutex_unlock(&r->lock);
    kv_keep_destroy(r->keep);
    kv_handoff_destroy(r->handoff);
    pthread_mutex_destroy(&r->lock);
    pthread_cond_destroy(&r->idle);
    free((char *)(uintptr_t)r->cfg.node_name);
    free(r);
}

const char *kv_relay_address(const struct kv_relay *r)
{
    return kv_handoff_address(r->handoff);
}

struct kv_relay_stats kv_relay_stats(struct kv_relay *r)
{
    struct kv_relay_stats s = {.handoff = kv_handoff_stats(r->handoff)};

    pthread_mutex_lock(&r->lock);
    s.n_open = r->n_open;
    s.n_waiting = r->n_waiting;
    s.n_keeping = (uint32_t)(r->keeps - r->keeps_over);
    s.relayed = r->relayed;
    s.failed = r->failed;
    s.refused = r->refused;
    bt_list_for_each (it, &r->grounds) {
        struct kv_pool_stats ps = kv_pool_stats(BT_LIST_ENTRY(it, struct ground, link)->pool);

        s.pages_total += ps.n_pages;
        s.pages_free += ps.n_free;
    }
    pthread_mutex_unlock(&r->lock);
    s.bytes_in = s.handoff.bytes;
    s.kept = r->keep ? kv_keep_blocks(r->keep) : 0;
    return s;
}
