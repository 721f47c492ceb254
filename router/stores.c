/* The KV store's daemons as the membership tells of them, and which one a prompt passes through:
 * the first on the ring of live daemons that the request has not failed on. Loop thread. */
#include "router/request_int.h"

#include "common/base/buf.h"
#include "common/obs/log.h"
#include "kvstore/block/ring.h"

#include <stdlib.h>
#include <xxhash.h>

struct rt_stores {
    size_t n;
    struct kv_ring *ring;
    struct rt_store at[];
};

static void stores_free(struct rt_stores *s)
{
    if (s) {
        kv_ring_destroy(s->ring);
        free(s);
    }
}

void rt_stores_fini(struct rt_router *r)
{
    stores_free(r->stores);
    r->stores = NULL;
}

static bool is_usable(const struct bt_member *m)
{
    return m->role == BT_ROLE_KVSTORE && !m->draining && m->net_addr[0];
}

static int make_ring(struct rt_stores *s)
{
    const char **names = bt_calloc(s->n + 1, sizeof(*names));

    if (!names) {
        return BT_E_NOMEM;
    }
    for (size_t i = 0; i < s->n; i++) {
        names[i] = s->at[i].name;
    }
    s->ring = kv_ring_create(names, s->n);
    free(names);
    return s->ring ? BT_OK : BT_E_NOMEM;
}

void rt_stores_update(struct rt_router *r, const struct bt_members *ms)
{
    size_t before = r->stores ? r->stores->n : 0, n = 0;
    struct rt_stores *s;

    for (size_t i = 0; i < ms->n; i++) {
        n += is_usable(&ms->m[i]);
    }
    s = bt_calloc(1, sizeof(*s) + n * sizeof(s->at[0]));
    for (size_t i = 0; s && i < ms->n; i++) {
        if (is_usable(&ms->m[i])) {
            struct rt_store *st = &s->at[s->n++];

            st->incarnation = ms->m[i].incarnation;
            snprintf(st->name, sizeof(st->name), "%s", ms->m[i].name);
            snprintf(st->address, sizeof(st->address), "%s", ms->m[i].grpc_addr);
            snprintf(st->net_address, sizeof(st->net_address), "%s", ms->m[i].net_addr);
        }
    }
    if (!s || make_ring(s) < 0) {
        BT_WARN("stores", "msg=\"no memory: known as before\"");
        stores_free(s);
        return;
    }
    stores_free(r->stores);
    r->stores = s;
    if (n != before) {
        BT_INFO("stores", "n=%zu", n);
        rt_requests_kick(r);
    }
}

size_t rt_stores_n(const struct rt_router *r)
{
    return r->stores ? r->stores->n : 0;
}

/* The session with it, NULL if there is none. */
static const struct rt_node *node_of(const struct rt_router *r, const struct rt_store *st)
{
    bt_list_for_each (it, &r->nodes) {
        const struct rt_node *n = BT_LIST_ENTRY(it, const struct rt_node, link);

        if (n->role == RT_ROLE_STORE && strcmp(st->name, n->name) == 0) {
            return n;
        }
    }
    return NULL;
}

void rt_store_info(const struct rt_router *r, size_t i, Baton__V1__NodeInfo *m)
{
    const struct rt_store *st = &r->stores->at[i];
    const struct rt_node *n = node_of(r, st);

    baton__v1__node_info__init(m);
    m->name = (char *)(uintptr_t)st->name;
    m->incarnation = st->incarnation;
    m->role = (char *)(uintptr_t) "kvstore";
    m->address = (char *)(uintptr_t)st->address;
    m->state = (char *)(uintptr_t) "ready";
    m->cordoned = rt_orders_cordons(r, st->name);
    if (n) {
        rt_cache_fill_node(n, m);
    }
}

bool rt_store_has(const struct rt_router *r, const struct rt_node *n)
{
    for (size_t i = 0; i < rt_stores_n(r); i++) {
        if (n->role == RT_ROLE_STORE && strcmp(r->stores->at[i].name, n->name) == 0) {
            return true;
        }
    }
    return false;
}

const struct rt_store *rt_store_pick(const struct rt_request *req)
{
    const struct rt_stores *s = req->router->stores;
    struct kv_key key;
    uint32_t owners[RT_MAX_EXCLUDED + 1];
    XXH128_hash_t h;
    size_t n;

    if (!s || s->n == 0) {
        return NULL;
    }
    h = XXH3_128bits(req->prompt.p, req->prompt.n * sizeof(*req->prompt.p));
    memcpy(key.b, &h, sizeof(key.b));
    n = kv_ring_owners(s->ring, &key, BT_ARRAY_LEN(owners), owners);
    for (size_t i = 0; i < n; i++) {
        const struct rt_store *st = &s->at[owners[i]];

        if (!rt_request_excludes(req, st->name, st->incarnation) &&
            !rt_orders_cordons(req->router, st->name)) {
            return st;
        }
    }
    return NULL;
}
