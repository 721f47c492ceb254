/* The block server's gets: pins, what is told of them, sending where the transport wants it.
 *
 * A get lives until its client has let go (RELEASE, or with method message: all of it is sent) or
 * is lost, and the tiers have answered, and no send reads its blocks. */
#include "kvstore/store/server_int.h"

#include "common/base/buf.h"

#include <stdlib.h>

struct item {
    struct get *get;
    uint32_t idx;
    struct kv_blob *blob; /* pinned; NULL = a miss */
    bool bringing, told;
    struct kv_bring bring;
    int bring_rc;
    struct bt_msg brought;
    uint32_t layer; /* message: next to send */
    size_t offset;
};

struct get {
    struct bt_list link;      /* client.gets, until it is dropped */
    struct bt_list send_link; /* kv_server.sending */
    struct client *client;
    uint64_t req, since_ns, pinned_bytes;
    enum bt_net_method method;
    uint32_t n_items, n_bringing, n_ops;
    bool dropped; /* the client does not want it any more */
    struct kv_blob_shape shape;
    struct item items[];
};

/* ---- the end ---- */

static void check_end(struct get *g)
{
    struct client *c = g->client;
    struct kv_server *s = c->server;

    if (!g->dropped || g->n_bringing || g->n_ops) {
        return;
    }
    for (uint32_t i = g->n_items; i-- > 0;) {
        if (g->items[i].blob) {
            kv_tiers_unpin(s->cfg.tiers, &g->items[i].blob, 1);
        }
    }
    c->pinned_bytes -= g->pinned_bytes;
    free(g);
    kv_server_unref_client(c);
    pthread_mutex_lock(&s->lock);
    if (--s->n_alive == 0) {
        pthread_cond_signal(&s->idle);
    }
    pthread_mutex_unlock(&s->lock);
}

static void drop(struct get *g)
{
    g->dropped = true;
    bt_list_remove(&g->link);
    bt_list_remove(&g->send_link);
    g->client->n_gets--;
    check_end(g);
}

void kv_server_drop_gets(struct client *c)
{
    while (!bt_list_empty(&c->gets)) {
        drop(BT_LIST_ENTRY(c->gets.next, struct get, link));
    }
}

void kv_server_on_release(struct client *c, const struct wire_store *m)
{
    bt_list_for_each_safe (it, &c->gets) {
        struct get *g = BT_LIST_ENTRY(it, struct get, link);

        if (g->req == m->req) {
            drop(g);
            return;
        }
    }
}

void kv_server_check_leases(struct client *c, uint64_t now)
{
    bt_list_for_each (it, &c->gets) {
        struct get *g = BT_LIST_ENTRY(it, struct get, link);

        if (c->link && now - g->since_ns > c->server->cfg.lease_ns) {
            kv_link_close(c->link, BT_E_DEADLINE, "a lease was kept for too long");
            return;
        }
    }
}

/* ---- telling ---- */

static void tell_miss(struct client *c, uint64_t req, uint32_t item, int rc)
{
    struct wire_store m = {.type = WIRE_STORE_MISS, .req = req, .item = item, .rc = rc};

    kv_server_add(&c->server->misses, 1);
    if (c->link) {
        kv_link_send(c->link, &m, (struct bt_str){0});
    }
}

static bool all_sent(const struct get *g)
{
    for (uint32_t i = 0; i < g->n_items; i++) {
        if (g->items[i].bringing || (g->items[i].blob && g->items[i].layer < g->shape.n_layers)) {
            return false;
        }
    }
    return true;
}

/* Places and sums of the blob's layers; from then on the client may read them. */
static void tell_have(struct item *it)
{
    struct get *g = it->get;
    struct kv_server *s = g->client->server;
    const struct kv_blob_meta *meta = kv_blob_meta(it->blob);
    struct wire_store m = {.type = WIRE_STORE_HAVE,
                           .req = g->req,
                           .item = it->idx,
                           .n_layers = g->shape.n_layers,
                           .generation = meta->generation};
    struct bt_buf data = {0};
    int rc = BT_OK;

    for (uint32_t l = 0; rc == BT_OK && l < g->shape.n_layers; l++) {
        const char *at = kv_blob_layer(s->cfg.tiers, it->blob, l);

        rc = wire_store_add_u64(&data, (uint64_t)(at - (const char *)s->region->base));
        rc = rc == BT_OK ? wire_store_add_u64(&data, meta->sums[l]) : rc;
    }
    it->told = true;
    kv_server_add(&s->gets, 1);
    kv_server_add(&s->get_bytes, kv_blob_bytes(&g->shape));
    if (!g->client->link) {
    } else if (rc != BT_OK) {
        kv_link_close(g->client->link, rc, "out of memory");
    } else {
        kv_link_send(g->client->link, &m, bt_buf_str(&data));
    }
    bt_buf_fini(&data);
    if (g->method == BT_NET_METHOD_MESSAGE && !g->dropped && bt_list_empty(&g->send_link)) {
        bt_list_push_back(&s->sending, &g->send_link);
        kv_links_pump(&s->links);
    }
}

/* ---- from disk ---- */

static void miss_item(struct item *it, int rc)
{
    struct get *g = it->get;

    kv_tiers_unpin(g->client->server->cfg.tiers, &it->blob, 1);
    it->blob = NULL;
    if (!g->dropped) {
        tell_miss(g->client, g->req, it->idx, rc);
    }
}

static void on_brought(struct bt_msg *msg, void *consumer)
{
    struct item *it = BT_CONTAINER_OF(msg, struct item, brought);
    struct get *g = it->get;

    it->bringing = false;
    g->n_bringing--;
    if (it->bring_rc != BT_OK) {
        miss_item(it, it->bring_rc);
    } else if (!g->dropped) {
        tell_have(it);
    }
    if (!g->dropped && g->method == BT_NET_METHOD_MESSAGE && all_sent(g) && g->n_ops == 0) {
        drop(g);
    } else {
        check_end(g);
    }
}

/* [any] */
static void bring_done(struct kv_bring *b, int rc)
{
    struct item *it = b->arg;

    it->bring_rc = rc;
    bt_net_post(it->get->client->server->links.net, &it->brought);
}

/* ---- asking ---- */

static void take_item(struct get *g, const struct wire_store *m, const struct wire_store_item *wi)
{
    struct kv_server *s = g->client->server;
    struct item *it = &g->items[g->n_items];
    int32_t *ids = bt_calloc(wi->n_tokens, sizeof(*ids));
    struct kv_key key;
    struct kv_run run = {.prefix = wi->prefix,
                         .keys = &key,
                         .ids = ids,
                         .n_blocks = 1,
                         .block_tokens = g->shape.block_tokens,
                         .last_tokens = wi->n_tokens};

    *it = (struct item){.get = g, .idx = g->n_items++};
    bt_list_init(&it->brought.link);
    it->brought.handle = on_brought;
    memcpy(key.b, wi->key, 16);
    memcpy(run.parent.b, wi->parent, 16);
    memcpy(run.root.b, m->root, 16);
    for (uint32_t i = 0; ids && i < wi->n_tokens; i++) {
        ids[i] = wire_store_i32(wi->ids + 4 * (size_t)i);
    }
    if (g->client->pinned_bytes > 0 &&
        g->client->pinned_bytes + kv_blob_bytes(&g->shape) > s->cfg.max_pinned_bytes) {
        tell_miss(g->client, g->req, it->idx, BT_E_EXHAUSTED);
    } else if (!ids || kv_tiers_pin(s->cfg.tiers, &run, &it->blob) != 1) {
        it->blob = NULL;
        tell_miss(g->client, g->req, it->idx, BT_E_NOT_FOUND);
    } else if (!kv_blob_shape_eq(&kv_blob_meta(it->blob)->shape, &g->shape)) {
        miss_item(it, BT_E_INCOMPATIBLE);
    } else {
        g->pinned_bytes += kv_blob_bytes(&g->shape);
        g->client->pinned_bytes += kv_blob_bytes(&g->shape);
    }
    free(ids);
}

static void begin_item(struct item *it)
{
    struct get *g = it->get;
    struct kv_tiers *t = g->client->server->cfg.tiers;

    if (kv_blob_tier(t, it->blob) == KV_TIER_HOST) {
        tell_have(it);
        return;
    }
    it->bringing = true;
    g->n_bringing++;
    it->bring = (struct kv_bring){.blob = it->blob, .done = bring_done, .arg = it};
    bt_list_init(&it->bring.link);
    kv_tiers_bring(t, &it->bring);
}

void kv_server_on_get(struct client *c, const struct wire_store *m, struct bt_str data)
{
    struct kv_blob_shape shape = {m->n_layers, m->block_tokens, m->layer_bytes};
    struct wire_store_item wi;
    struct get *g;

    if (!kv_blob_shape_ok(&shape)) {
        kv_link_violation(c->link, "shape of blocks out of limits", m);
        return;
    }
    g = c->n_gets < c->server->cfg.max_gets && !c->server->stopping
            ? bt_calloc(1, sizeof(*g) + m->n_items * sizeof(g->items[0]))
            : NULL;
    if (!g) { /* too many: all of it is a miss */
        for (uint32_t i = 0; i < m->n_items; i++) {
            tell_miss(c, m->req, i, BT_E_EXHAUSTED);
        }
        return;
    }
    g->client = c;
    c->refs++;
    g->req = m->req;
    g->since_ns = bt_now_ns();
    g->method = (enum bt_net_method)m->method;
    g->shape = shape;
    bt_list_init(&g->send_link);
    bt_list_init(&g->link);
    bt_list_push_back(&c->gets, &g->link);
    c->n_gets++;
    pthread_mutex_lock(&c->server->lock);
    c->server->n_alive++;
    pthread_mutex_unlock(&c->server->lock);
    for (uint32_t i = 0; i < m->n_items; i++) {
        if (!wire_store_take_item(&data, shape.block_tokens, &wi)) {
            kv_link_violation(c->link, "malformed items", m);
            return; /* `closed` drops it */
        }
        take_item(g, m, &wi);
    }
    if (data.n) {
        kv_link_violation(c->link, "bytes behind the items", m);
        return;
    }
    for (uint32_t i = 0; i < g->n_items; i++) {
        if (g->items[i].blob) {
            begin_item(&g->items[i]);
        }
    }
    if (g->method == BT_NET_METHOD_MESSAGE && all_sent(g)) {
        drop(g); /* all are misses */
    }
}

/* ---- sending ---- */

struct part {
    struct get *get;
    struct kv_link *link;
    size_t bytes;
};

static void on_part_sent(void *arg, int rc)
{
    struct part *p = arg;
    struct get *g = p->get;

    p->link->out_bytes -= p->bytes;
    free(p);
    g->n_ops--;
    if (!g->dropped && g->n_ops == 0 && all_sent(g)) {
        drop(g);
    } else {
        if (!g->dropped) {
            kv_links_pump(&g->client->server->links);
        }
        check_end(g);
    }
}

/* The item that is furthest behind: all blocks' layer 0 goes first. */
static struct item *next_item(struct get *g)
{
    struct item *best = NULL;

    for (uint32_t i = 0; i < g->n_items; i++) {
        struct item *it = &g->items[i];

        if (it->blob && it->told && it->layer < g->shape.n_layers &&
            (!best || it->layer < best->layer)) {
            best = it;
        }
    }
    return best;
}

/* One part. False: nothing to send now. */
static bool send_part(struct get *g, size_t *budget)
{
    struct kv_link *l = g->client->link;
    struct item *it = next_item(g);
    struct wire_store m = {.type = WIRE_STORE_DATA, .req = g->req};
    struct part *p;
    size_t n;

    if (!it || l->closing || l->out_bytes >= KV_LINK_INFLIGHT_BYTES) {
        return false;
    }
    p = bt_calloc(1, sizeof(*p));
    if (!p) {
        kv_link_close(l, BT_E_NOMEM, "out of memory");
        return false;
    }
    n = BT_MIN(g->shape.layer_bytes - it->offset, (size_t)KV_LINK_PART_BYTES);
    m.item = it->idx;
    m.layer = it->layer;
    m.offset = it->offset;
    *p = (struct part){g, l, n};
    l->out_bytes += n;
    g->n_ops++;
    *budget -= BT_MIN(*budget, n);
    {
        const char *at = kv_blob_layer(g->client->server->cfg.tiers, it->blob, it->layer);
        size_t offset = it->offset;

        it->offset += n;
        if (it->offset == g->shape.layer_bytes) {
            it->offset = 0;
            it->layer++;
        }
        kv_link_send_data(l, &m, (struct bt_str){at + offset, n}, on_part_sent, p);
    }
    return true;
}

bool kv_server_pump_gets(struct kv_server *s, size_t *budget)
{
    struct bt_list turn;
    struct bt_list *it;
    bool more = false;

    bt_list_init(&turn);
    while (*budget > 0 && (it = bt_list_pop_front(&s->sending)) != NULL) {
        struct get *g = BT_LIST_ENTRY(it, struct get, send_link);

        /* Held, so that a send that completes inside does not free it. */
        g->n_ops++;
        while (*budget > 0 && !g->dropped && send_part(g, budget)) {
        }
        g->n_ops--;
        if (g->dropped) {
            check_end(g);
        } else if (g->n_ops == 0 && all_sent(g)) {
            drop(g);
        } else {
            more = more || *budget == 0;
            bt_list_push_back(&turn, &g->send_link);
        }
    }
    while ((it = bt_list_pop_front(&turn)) != NULL) {
        bt_list_push_back(&s->sending, it);
    }
    return more;
}
