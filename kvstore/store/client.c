/* The store's client: life, members, look-ups, what comes in on its connections. */
#include "kvstore/store/client_int.h"

#include "common/base/buf.h"
#include "common/mem/mem.h"
#include "common/obs/log.h"
#include "common/thr/thread.h"

#include <stdlib.h>

#define FIND_MAX_BLOCKS 1024
#define GUESS_BYTES_S   (1u << 30) /* until a load was measured */
#define LOAD_ANSWER_NS  (1 * BT_NS_PER_MS)

static struct kv_client *client_of(struct kv_source *src)
{
    return BT_CONTAINER_OF(src, struct kv_client, src);
}

/* ---- members ---- */

static void ring_free(struct ring *r)
{
    if (r) {
        kv_ring_destroy(r->ring);
        bt_members_unref(r->members);
        free(r);
    }
}

struct ring *kv_client_ring(struct kv_client *c)
{
    struct ring *r;

    pthread_mutex_lock(&c->lock);
    r = c->ring && c->ring->n ? c->ring : NULL;
    if (r) {
        r->refs++;
    }
    pthread_mutex_unlock(&c->lock);
    return r;
}

void kv_client_ring_unref(struct kv_client *c, struct ring *r)
{
    bool last;

    pthread_mutex_lock(&c->lock);
    last = --r->refs == 0;
    pthread_mutex_unlock(&c->lock);
    if (last) {
        ring_free(r);
    }
}

static struct ring *ring_new(struct bt_members *ms)
{
    struct ring *r = bt_calloc(1, sizeof(*r) + ms->n * sizeof(r->at[0]));
    const char **names = bt_calloc(ms->n + 1, sizeof(*names));

    if (r && names) {
        for (size_t i = 0; i < ms->n; i++) {
            const struct bt_member *m = &ms->m[i];

            if (m->role == BT_ROLE_KVSTORE && !m->draining && m->store_addr[0]) {
                names[r->n] = m->name;
                r->at[r->n++] = m;
            }
        }
        r->refs = 1;
        r->members = bt_members_ref(ms);
        r->ring = kv_ring_create(names, r->n);
    }
    free(names);
    if (r && !r->ring) {
        ring_free(r);
        r = NULL;
    }
    return r;
}

/* [net] Daemons are called before somebody waits for one: a connection takes longer to make than a
 * layer to bring. */
static void on_meet(struct bt_msg *msg, void *consumer)
{
    struct kv_client *c = BT_CONTAINER_OF(msg, struct kv_client, meet_msg);
    struct ring *r;

    pthread_mutex_lock(&c->lock);
    c->meeting = false;
    pthread_mutex_unlock(&c->lock);
    r = kv_client_ring(c);
    for (size_t i = 0; r && i < r->n; i++) {
        kv_client_dial(c, r->at[i]);
    }
    if (r) {
        kv_client_ring_unref(c, r);
    }
}

void kv_client_set_members(struct kv_client *c, struct bt_members *members)
{
    struct ring *r = ring_new(members), *old;
    bool meet;

    if (!r) {
        BT_WARN("store_members", "msg=\"no memory: known as before\"");
        return;
    }
    pthread_mutex_lock(&c->lock);
    old = c->ring;
    c->ring = r;
    memset(c->recent, 0, sizeof(c->recent)); /* others may own them now */
    __atomic_store_n(&c->stats.daemons, (uint32_t)r->n, __ATOMIC_RELAXED);
    if (old && --old->refs > 0) {
        old = NULL;
    }
    meet = r->n > 0 && !c->meeting;
    c->meeting = c->meeting || meet;
    pthread_mutex_unlock(&c->lock);
    ring_free(old);
    if (meet) {
        bt_net_post(c->links.net, &c->meet_msg);
    }
}

/* ---- find ---- */

static void estimate(struct kv_client *c, struct kv_find *f)
{
    uint64_t rate = __atomic_load_n(&c->stats.bytes_per_s, __ATOMIC_RELAXED);

    rate = rate ? rate : GUESS_BYTES_S;
    f->bytes = (uint64_t)f->n * kv_blob_bytes(&c->cfg.shape);
    f->load_ns = f->n ? LOAD_ANSWER_NS + (uint64_t)((double)f->bytes / (double)rate * 1e9) : 0;
    f->n_tier[KV_TIER_STORE] = f->n;
    f->n_fast = 0;
    f->fast_ns = 0;
}

static void finish_find(struct kv_client *c, struct kv_find *f, uint32_t n)
{
    f->n = n;
    memset(f->n_tier, 0, sizeof(f->n_tier));
    estimate(c, f);
    count(&c->stats.finds, 1);
    count(&c->stats.found_blocks, n);
    f->done(f);
}

/* Who can be asked for it: reachable, and not ourselves. */
static void take_holders(const struct kv_client *c,
                         const struct bt_found *found,
                         size_t i,
                         struct seek_block *b)
{
    for (uint32_t k = found->first[i]; k < found->first[i + 1] && b->n < MAX_HOLDERS; k++) {
        const struct bt_member *m = found->holders[k].member;

        if (m->store_addr[0] && strcmp(m->name, c->node_name) != 0) {
            b->holders[b->n++] = m;
        }
    }
}

/* [redis-get] */
static void on_found(void *arg, const struct bt_found *found)
{
    struct seek *k = arg;
    struct kv_client *c = k->client;
    uint32_t n = 0;

    if (found->rc == BT_OK && found->members) {
        k->members = bt_members_ref(found->members);
        while (n < found->n_keys) {
            take_holders(c, found, n, &k->blocks[n]);
            if (k->blocks[n].n == 0) {
                break;
            }
            n++;
        }
    }
    k->n = n;
    pthread_mutex_lock(&c->lock);
    k->lookup = 0;
    pthread_mutex_unlock(&c->lock);
    finish_find(c, k->find, n);
}

/* With a copy of what a load will ask for. */
static struct seek *seek_new(struct kv_client *c, struct kv_find *f, uint32_t n)
{
    uint32_t block_tokens = c->cfg.shape.block_tokens;
    size_t head = sizeof(struct seek) + n * sizeof(struct seek_block);
    struct seek *k = bt_calloc(1, head + (size_t)n * block_tokens * sizeof(int32_t));
    struct kv_run run;
    uint64_t prefix;

    if (!k) {
        return NULL;
    }
    k->client = c;
    k->find = f;
    k->n_asked = n;
    k->root = f->chain.root;
    k->ids = (int32_t *)(void *)((char *)k + head);
    memcpy(k->ids, f->chain.ids + (size_t)f->first * block_tokens,
           (size_t)n * block_tokens * sizeof(int32_t));
    run = kv_run_of(&f->chain, f->first, block_tokens, 0);
    prefix = run.prefix;
    for (uint32_t i = 0; i < n; i++) {
        struct kv_blob_meta m;

        k->blocks[i].prefix = prefix;
        kv_run_at(&run, i, &prefix, &m);
        k->blocks[i].key = m.key;
        k->blocks[i].parent = m.parent;
    }
    return k;
}

static void find(struct kv_source *src, struct kv_find *f)
{
    struct kv_client *c = client_of(src);
    uint32_t n = f->chain.n_blocks > f->first ? f->chain.n_blocks - f->first : 0;
    uint64_t now = bt_now_ns(), limit = 0;
    struct bt_lookup_cb cb = {on_found, NULL};
    struct seek *k = NULL;
    bool out = false;

    f->priv = NULL;
    if (n > 0 && f->n_tokens != c->cfg.shape.block_tokens) {
        n--; /* tails stay at home */
    }
    n = BT_MIN(n, (uint32_t)FIND_MAX_BLOCKS);
    if (f->deadline_ns != BT_NEVER_NS) {
        limit = f->deadline_ns > now ? f->deadline_ns - now : 0;
    }
    if (n > 0 && bt_blockmap_up(c->cfg.blockmap) && (limit || f->deadline_ns == BT_NEVER_NS)) {
        k = seek_new(c, f, n);
    }
    if (k) {
        const struct bt_block_key *keys = (const void *)(f->chain.keys + f->first);

        f->priv = k;
        cb.arg = k;
        /* The callback may come before the id is stored: it takes the lock to clear it. */
        pthread_mutex_lock(&c->lock);
        k->lookup = bt_blockmap_lookup(c->cfg.blockmap, keys, n, limit, &cb);
        out = k->lookup != 0;
        pthread_mutex_unlock(&c->lock);
    }
    if (!out) {
        finish_find(c, f, 0);
    }
}

static void find_cancel(struct kv_source *src, struct kv_find *f)
{
    struct kv_client *c = client_of(src);
    struct seek *k = f->priv;
    uint64_t id;

    if (k) {
        pthread_mutex_lock(&c->lock);
        id = k->lookup;
        pthread_mutex_unlock(&c->lock);
        if (id) {
            bt_blockmap_cancel(c->cfg.blockmap, id);
        }
    }
}

static void end(struct kv_source *src, struct kv_find *f)
{
    struct seek *k = f->priv;

    if (k) {
        bt_members_unref(k->members);
        free(k);
        f->priv = NULL;
    }
}

/* ---- connections ---- */

struct kv_link *kv_client_dial(struct kv_client *c, const struct bt_member *m)
{
    struct bt_err err = {0};
    struct kv_link *l = kv_link_dial(&c->links, m->store_addr, &err);

    if (l && l->greeted && l->incarnation != m->incarnation) {
        if (l->incarnation < m->incarnation) {
            kv_link_close(l, BT_E_PEER_LOST, "a newer incarnation of the node has appeared");
            l = kv_link_dial(&c->links, m->store_addr, &err);
        } else {
            return NULL;
        }
    }
    if (!l) {
        BT_DEBUG("store_dial", "peer=%s msg=\"%s\"", m->name, err.msg);
        return NULL;
    }
    if (!kv_client_server(l)) {
        return NULL;
    }
    kv_link_watch(l);
    return l;
}

struct server *kv_client_server(struct kv_link *l)
{
    struct server *s = l->user;

    if (!s) {
        s = bt_calloc(1, sizeof(*s));
        if (s) {
            bt_list_init(&s->fetches);
            bt_list_init(&s->puts);
            s->window = KV_CLIENT_PUTS;
            l->user = s;
        }
    }
    return s;
}

static void on_ready(void *arg, struct kv_link *l)
{
    /* What the first read would have to do. */
    if (kv_link_method(l) == BT_NET_METHOD_PULL && kv_link_rkey(l, NULL) == BT_OK && l->bytes > 0) {
        (void)bt_net_view(l->net, l->base, 1);
    }
    kv_client_loads_ready(arg, l);
    kv_client_puts_ready(arg, l);
}

static void on_closed(void *arg, struct kv_link *l, int rc)
{
    struct server *s = l->user;

    if (s) {
        kv_client_loads_closed(arg, s);
        kv_client_puts_closed(arg, s);
        free(s);
        l->user = NULL;
    }
}

static bool is_busy(void *arg, const struct kv_link *l)
{
    const struct server *s = l->user;

    if (s) {
        kv_client_check_puts(arg, (struct kv_link *)(uintptr_t)l);
    }
    return s && (!bt_list_empty(&s->fetches) || !bt_list_empty(&s->puts));
}

static void on_message(void *arg, struct kv_link *l, const struct wire_store *m, struct bt_str data)
{
    struct kv_client *c = arg;

    switch ((int)m->type) {
    case WIRE_STORE_HAVE:
        kv_client_on_have(c, l, m, data);
        break;
    case WIRE_STORE_MISS:
        kv_client_on_miss(c, l, m);
        break;
    case WIRE_STORE_DATA:
        kv_client_on_data(c, l, m, data);
        break;
    case WIRE_STORE_GO:
        kv_client_on_go(c, l, m, data);
        break;
    case WIRE_STORE_DONE:
        kv_client_on_done(c, l, m);
        break;
    case WIRE_STORE_TAKEN:
        kv_client_on_taken(c, l, m);
        break;
    default:
        kv_link_violation(l, "message in the wrong direction", m);
        break;
    }
}

static void on_pump(void *arg)
{
    struct kv_client *c = arg;
    size_t budget = KV_LINK_SLICE_BYTES;
    bool more = kv_client_pump_puts(c, &budget);

    budget = KV_LINK_SLICE_BYTES;
    if (kv_client_pump_loads(c, &budget) || more) {
        kv_links_pump(&c->links);
    }
}

/* ---- life ---- */

static const struct kv_source_ops ops = {
    .name = "store",
    .find = find,
    .find_cancel = find_cancel,
    .load = kv_client_load,
    .load_cancel = kv_client_load_cancel,
    .end = end,
    .offer = kv_client_offer,
    .wants = kv_client_wants,
};

void kv_client_gone(struct kv_client *c)
{
    pthread_mutex_lock(&c->lock);
    c->n_alive--;
    pthread_cond_broadcast(&c->cond);
    pthread_mutex_unlock(&c->lock);
}

static void client_free(struct kv_client *c)
{
    if (c->staging.base) {
        bt_mem_host.free(&c->staging);
    }
    ring_free(c->ring);
    kv_client_cached_free(c);
    while (c->n_bufs > 0) {
        free(c->bufs[--c->n_bufs]);
    }
    pthread_mutex_destroy(&c->lock);
    pthread_cond_destroy(&c->cond);
    free(c->free_slots);
    free(c->node_name);
    free(c);
}

static int make_staging(struct kv_client *c, struct bt_err *err)
{
    size_t bytes = kv_blob_bytes(&c->cfg.shape);
    uint64_t want = c->cfg.staging_bytes ? c->cfg.staging_bytes : 64u << 20;
    uint64_t n = BT_MAX(want / bytes, 2u);

    n = BT_MIN(n, 256u);
    c->n_slots = c->n_free_slots = (uint32_t)n;
    c->free_slots = bt_calloc(n, sizeof(*c->free_slots));
    c->node_name = strdup(c->cfg.node_name);
    if (!c->free_slots || !c->node_name) {
        return BT_FAIL(err, BT_E_NOMEM, "store: out of memory");
    }
    for (uint32_t i = 0; i < n; i++) {
        c->free_slots[i] = i;
    }
    return bt_mem_host.alloc(n * bytes, "store-put", &c->staging, err);
}

int kv_client_create(const struct kv_client_cfg *cfg, struct kv_client **ret, struct bt_err *err)
{
    struct kv_client *c;
    struct kv_links_cfg lc = {
        .net = cfg->net,
        .node_name = cfg->node_name,
        .incarnation = cfg->incarnation,
        .silence_ns = cfg->silence_ns,
    };
    int rc;

    if (!kv_blob_shape_ok(&cfg->shape) || cfg->replicas > 8) {
        return BT_FAIL(err, BT_E_INVALID, "store: shape of blocks or replicas out of limits");
    }
    c = bt_calloc(1, sizeof(*c));
    if (!c) {
        return BT_FAIL(err, BT_E_NOMEM, "store: out of memory");
    }
    c->src.ops = &ops;
    c->cfg = *cfg;
    c->cfg.load_limit_ns = cfg->load_limit_ns ? cfg->load_limit_ns : 10 * BT_NS_PER_S;
    c->cfg.stall_ns = cfg->stall_ns ? cfg->stall_ns : 500 * BT_NS_PER_MS;
    c->next_req = 1;
    c->cfg.lend_bytes = cfg->lend_bytes ? cfg->lend_bytes : 64u << 20;
    c->cfg.lend_ns = cfg->lend_ns ? cfg->lend_ns : 1 * BT_NS_PER_S;
    c->meet_msg.handle = on_meet;
    bt_list_init(&c->meet_msg.link);
    c->watch = (struct bt_net_timer){.deadline_ns = BT_NEVER_NS, .fn = kv_client_on_watch};
    c->lend_timer =
        (struct bt_net_timer){.deadline_ns = BT_NEVER_NS, .fn = kv_client_on_lend_timer};
    bt_list_init(&c->waiting);
    bt_list_init(&c->lent);
    bt_list_init(&c->loads);
    bt_list_init(&c->offers);
    pthread_mutex_init(&c->lock, NULL);
    pthread_cond_init(&c->cond, NULL);
    rc = make_staging(c, err);
    if (rc == BT_OK) {
        lc.base = c->staging.base;
        lc.bytes = c->staging.bytes;
        lc.ops = (struct kv_link_ops){c, on_ready, on_message, on_closed, is_busy, on_pump};
        rc = kv_links_init(&c->links, &lc, err);
    }
    if (rc == BT_OK) {
        rc = bt_thread_start(&c->putter, "store-put", kv_client_putter, c, err);
        if (rc != BT_OK) {
            kv_links_fini(&c->links);
        }
    }
    if (rc != BT_OK) {
        client_free(c);
        return rc;
    }
    *ret = c;
    return BT_OK;
}

static void close_all(void *arg)
{
    struct kv_client *c = arg;

    bt_net_timer_stop(&c->watch);
    kv_client_lends_stop(c);
    bt_list_for_each_safe (it, &c->links.all) {
        kv_link_close(BT_LIST_ENTRY(it, struct kv_link, link), BT_E_CANCELLED, "stopping");
    }
}

void kv_client_destroy(struct kv_client *c)
{
    if (!c) {
        return;
    }
    pthread_mutex_lock(&c->lock);
    c->stopping = true;
    pthread_cond_broadcast(&c->cond);
    pthread_mutex_unlock(&c->lock);
    pthread_join(c->putter, NULL);
    kv_links_call(&c->links, close_all, c);
    pthread_mutex_lock(&c->lock);
    while (c->n_alive > 0) {
        pthread_cond_wait(&c->cond, &c->lock);
    }
    pthread_mutex_unlock(&c->lock);
    kv_links_fini(&c->links);
    client_free(c);
}

struct kv_source *kv_client_source(struct kv_client *c)
{
    return &c->src;
}

struct kv_client_stats kv_client_stats(struct kv_client *c)
{
    struct kv_client_stats s;
    const uint64_t *from = (const uint64_t *)&c->stats;
    uint64_t *to = (uint64_t *)&s;

    _Static_assert(sizeof(s) % sizeof(uint64_t) == 0, "copied word by word");
    for (size_t i = 0; i < sizeof(s) / sizeof(uint64_t); i++) {
        to[i] = __atomic_load_n(&from[i], __ATOMIC_RELAXED);
    }
    return s;
}
