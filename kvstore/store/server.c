/* The block server: life, clients, dispatch, the pump that gives everybody a turn. */
#include "kvstore/store/server_int.h"

#include "common/base/buf.h"
#include "common/obs/log.h"

#include <stdlib.h>

void kv_server_add(uint64_t *counter, uint64_t n)
{
    __atomic_add_fetch(counter, n, __ATOMIC_RELAXED);
}

/* ---- clients ---- */

void kv_server_unref_client(struct client *c)
{
    if (--c->refs == 0) {
        free(c);
    }
}

static void on_ready(void *arg, struct kv_link *l)
{
    struct kv_server *s = arg;
    struct client *c;

    if (l->dialed) {
        return;
    }
    c = bt_calloc(1, sizeof(*c));
    if (!c) {
        kv_link_close(l, BT_E_NOMEM, "out of memory");
        return;
    }
    c->server = s;
    c->link = l;
    c->refs = 1;
    bt_list_init(&c->gets);
    bt_list_init(&c->puts);
    l->user = c;
}

/* By the net's proof no operation is under way on it; so what is held for it may go. */
static void on_closed(void *arg, struct kv_link *l, int rc)
{
    struct client *c = l->user;

    if (c) {
        c->link = NULL;
        kv_server_drop_gets(c);
        kv_server_drop_puts(c);
        kv_server_unref_client(c);
    }
}

static bool is_busy(void *arg, const struct kv_link *l)
{
    struct client *c = l->user;

    if (!c) {
        return false;
    }
    kv_server_check_leases(c, bt_now_ns());
    kv_server_check_puts(c, bt_now_ns());
    return c->n_gets + c->n_puts > 0;
}

static void on_message(void *arg, struct kv_link *l, const struct wire_store *m, struct bt_str data)
{
    struct client *c = l->user;

    if (!c) {
        return;
    }
    kv_link_watch(l);
    switch ((int)m->type) {
    case WIRE_STORE_GET:
        kv_server_on_get(c, m, data);
        break;
    case WIRE_STORE_RELEASE:
        kv_server_on_release(c, m);
        break;
    case WIRE_STORE_PUT:
        kv_server_on_put(c, m, data);
        break;
    case WIRE_STORE_DATA:
        kv_server_on_put_data(c, m, data);
        break;
    case WIRE_STORE_PLACED:
        kv_server_on_placed(c, m);
        break;
    case WIRE_STORE_LEND:
        kv_server_on_lend(c, m, data);
        break;
    case WIRE_STORE_KEEP:
    case WIRE_STORE_DROP:
        kv_server_on_verdict(c, m);
        break;
    default:
        kv_link_violation(l, "message in the wrong direction", m);
        break;
    }
}

static void on_pump(void *arg)
{
    struct kv_server *s = arg;
    size_t budget = KV_LINK_SLICE_BYTES;
    bool more = kv_server_pump_puts(s, &budget);

    budget = KV_LINK_SLICE_BYTES;
    if (kv_server_pump_gets(s, &budget) || more) {
        kv_links_pump(&s->links);
    }
}

/* ---- life ---- */

int kv_server_create(const struct kv_server_cfg *cfg, struct kv_server **ret, struct bt_err *err)
{
    struct kv_server *s = bt_calloc(1, sizeof(*s));
    struct kv_links_cfg lc = {
        .net = cfg->net,
        .node_name = cfg->node_name,
        .incarnation = cfg->incarnation,
        .silence_ns = cfg->silence_ns,
        .serves = true,
        .ops = {s, on_ready, on_message, on_closed, is_busy, on_pump},
    };
    int rc;

    if (!s) {
        return BT_FAIL(err, BT_E_NOMEM, "store: out of memory");
    }
    s->cfg = *cfg;
    s->cfg.lease_ns = cfg->lease_ns ? cfg->lease_ns : 30 * BT_NS_PER_S;
    s->cfg.max_gets = cfg->max_gets ? cfg->max_gets : 64;
    s->cfg.max_puts = cfg->max_puts ? cfg->max_puts : 64;
    s->region = kv_tiers_region(cfg->tiers);
    if (!cfg->max_pinned_bytes) {
        s->cfg.max_pinned_bytes = s->region->bytes / 2;
    }
    bt_list_init(&s->sending);
    bt_list_init(&s->pulling);
    pthread_mutex_init(&s->lock, NULL);
    pthread_cond_init(&s->idle, NULL);
    lc.base = s->region->base;
    lc.bytes = s->region->bytes;
    rc = kv_hasher_create(&s->hasher, err);
    if (rc == BT_OK) {
        rc = kv_links_init(&s->links, &lc, err);
    }
    if (rc != BT_OK) {
        kv_hasher_destroy(s->hasher);
        pthread_mutex_destroy(&s->lock);
        pthread_cond_destroy(&s->idle);
        free(s);
        return rc;
    }
    *ret = s;
    return BT_OK;
}

static void close_all(void *arg)
{
    struct kv_server *s = arg;

    s->stopping = true;
    bt_list_for_each_safe (it, &s->links.all) {
        kv_link_close(BT_LIST_ENTRY(it, struct kv_link, link), BT_E_CANCELLED, "stopping");
    }
}

void kv_server_destroy(struct kv_server *s)
{
    if (!s) {
        return;
    }
    /* The net's thread must run until the tiers have answered everything. */
    kv_links_call(&s->links, close_all, s);
    pthread_mutex_lock(&s->lock);
    while (s->n_alive > 0) {
        pthread_cond_wait(&s->idle, &s->lock);
    }
    pthread_mutex_unlock(&s->lock);
    kv_links_fini(&s->links);
    kv_hasher_destroy(s->hasher);
    pthread_mutex_destroy(&s->lock);
    pthread_cond_destroy(&s->idle);
    free(s);
}

const char *kv_server_address(const struct kv_server *s)
{
    return bt_net_address(s->links.net);
}

struct kv_server_stats kv_server_stats(const struct kv_server *s)
{
    return (struct kv_server_stats){
        .clients = __atomic_load_n(&s->links.n_links, __ATOMIC_RELAXED),
        .gets = __atomic_load_n(&s->gets, __ATOMIC_RELAXED),
        .puts = __atomic_load_n(&s->puts, __ATOMIC_RELAXED),
        .misses = __atomic_load_n(&s->misses, __ATOMIC_RELAXED),
        .refused = __atomic_load_n(&s->refused, __ATOMIC_RELAXED),
        .get_bytes = __atomic_load_n(&s->get_bytes, __ATOMIC_RELAXED),
        .put_bytes = __atomic_load_n(&s->put_bytes, __ATOMIC_RELAXED),
        .bad = __atomic_load_n(&s->bad, __ATOMIC_RELAXED),
    };
}
