/* The block server's puts: a reserved blob is filled, checked, committed, or given back.
 *
 * It is given back only when no operation of ours writes it any more; the client's own writes
 * (method put) end with the connection. */
#include "kvstore/store/server_int.h"

#include "common/base/buf.h"
#include "common/obs/log.h"

#include <stdlib.h>

struct put {
    struct bt_list link;      /* client.puts */
    struct bt_list pull_link; /* kv_server.pulling */
    struct client *client;
    uint64_t req;
    enum bt_net_method method;
    uint64_t at; /* pull: address of the bytes in the client's memory */
    struct kv_blob *blob;
    struct kv_blob_shape shape;
    uint32_t layer; /* being filled */
    size_t offset;
    uint64_t since_ns; /* since when its client owes the next layer (put: all); 0 = it owes none */
    bool reading;      /* pull: one read is under way */
    bool sums_later;   /* message: the sum of a layer comes with its last part */
    int rc;
    struct kv_copy copy; /* message: of that layer */
    /* lent: read from the client's pages; the sums are ours */
    bool lent, taken;         /* taken: all is read, the client has been told */
    struct kv_blob_grid grid; /* in a view, which stays until the connection's end */
    uint32_t *pages;
    bool told;                /* taken: that it is */
    uint64_t sample, sampled; /* as the client has it; of what was read so far */
    uint64_t taken_ns;
    uint64_t sums[];
};

static void put_free(struct put *p)
{
    struct client *c = p->client;
    struct kv_server *s = c->server;

    if (c->puts.next == &p->link) {
        c->next_put_ns = bt_now_ns();
    }
    bt_list_remove(&p->link);
    bt_list_remove(&p->pull_link);
    c->n_puts--;
    c->put_bytes -= kv_blob_bytes(&p->shape);
    c->n_unread -= p->lent && !p->taken;
    c->n_untold -= p->taken && !p->told;
    free(p->pages);
    free(p);
    kv_server_unref_client(c);
    pthread_mutex_lock(&s->lock);
    if (--s->n_alive == 0) {
        pthread_cond_signal(&s->idle);
    }
    pthread_mutex_unlock(&s->lock);
}

static void tell_done(struct client *c, uint64_t req, int rc)
{
    struct wire_store m = {.type = WIRE_STORE_DONE, .req = req, .rc = rc};

    if (rc != BT_OK && rc != BT_E_EXISTS) {
        kv_server_add(&c->server->refused, 1);
    }
    if (c->link) {
        kv_link_send(c->link, &m, (struct bt_str){0});
    }
}

static void tell_all(struct client *c)
{
    struct wire_store m = {.type = WIRE_STORE_TAKEN};

    for (uint32_t i = 0; i < c->n_done; i++) {
        tell_done(c, c->done[i], BT_OK);
    }
    c->n_done = 0;
    bt_list_for_each (it, &c->puts) {
        struct put *p = BT_LIST_ENTRY(it, struct put, link);

        if (p->taken && !p->told) {
            p->told = true;
            p->taken_ns = bt_now_ns();
            c->n_untold--;
            m.req = p->req;
            kv_link_send(c->link, &m, (struct bt_str){0});
        }
    }
}

/* A word to a client that sleeps wakes it up, which costs as much as a part of a layer. So words
 * are kept while half of what it has lent is still to be read: it has time to lend more. */
static void tell_some(struct client *c)
{
    if (c->link && c->n_untold >= c->n_unread) {
        tell_all(c);
    }
}

/* A lent block is stored. */
static void owe_done(struct client *c, uint64_t req)
{
    if (c->n_done == BT_ARRAY_LEN(c->done) && c->link) {
        tell_all(c);
    }
    if (c->link) {
        c->done[c->n_done++] = req;
        tell_some(c);
    }
}

/* All of it is there, or it failed; nothing writes the blob any more. */
static void finish(struct put *p, int rc)
{
    struct kv_server *s = p->client->server;
    struct client *c = p->client;
    uint64_t req = p->req;
    bool lent = p->lent && rc == BT_OK;

    if (rc == BT_OK) {
        kv_tiers_commit(s->cfg.tiers, p->blob, p->sums);
        kv_tiers_unpin(s->cfg.tiers, &p->blob, 1);
        kv_server_add(&s->puts, 1);
        kv_server_add(&s->put_bytes, kv_blob_bytes(&p->shape));
    } else {
        kv_tiers_abort(s->cfg.tiers, p->blob);
    }
    c->refs++;
    put_free(p);
    if (lent) {
        owe_done(c, req);
    } else {
        tell_done(c, req, rc);
        tell_some(c); /* one less to be read */
    }
    kv_server_unref_client(c);
}

void kv_server_drop_puts(struct client *c)
{
    while (!bt_list_empty(&c->puts)) {
        struct put *p = BT_LIST_ENTRY(c->puts.next, struct put, link);

        BT_BUG_ON(p->reading); /* the net's proof */
        kv_tiers_abort(c->server->cfg.tiers, p->blob);
        put_free(p);
    }
}

static char *layer_at(const struct put *p, uint32_t layer)
{
    return (char *)kv_blob_layer(p->client->server->cfg.tiers, p->blob, layer);
}

static void warn_bad(struct put *p, uint32_t layer)
{
    kv_server_add(&p->client->server->bad, 1);
    BT_WARN("store_checksum", "peer=%s layer=%u", p->client->link ? p->client->link->name : "?",
            layer);
}

/* A layer is complete: is it what the head says? */
static bool is_right(struct put *p, uint32_t layer, uint64_t sum)
{
    if (sum != p->sums[layer]) {
        warn_bad(p, layer);
    }
    return sum == p->sums[layer];
}

/* Layer p->layer is in. False: over. */
static bool next_layer(struct put *p, uint64_t sum)
{
    if (!is_right(p, p->layer, sum)) {
        finish(p, BT_E_CORRUPT);
        return false;
    }
    p->offset = 0;
    if (++p->layer == p->shape.n_layers) {
        finish(p, BT_OK);
        return false;
    }
    return true;
}

/* ---- the beginning ---- */

static int check_head(struct client *c, const struct wire_store *m, const struct kv_blob_meta *meta)
{
    struct kv_server *s = c->server;
    size_t bytes = kv_blob_bytes(&meta->shape);
    struct kv_key key;

    if (!s->cfg.takes_puts || s->stopping) {
        return BT_E_UNSUPPORTED;
    }
    if (c->n_puts >= s->cfg.max_puts ||
        (c->n_puts > 0 && c->put_bytes + bytes > s->cfg.max_pinned_bytes)) {
        return BT_E_EXHAUSTED;
    }
    kv_key_block(s->hasher, &meta->parent, meta->ids, meta->n_tokens, &key);
    if (!kv_key_eq(&key, &meta->key)) {
        return BT_E_INVALID;
    }
    if (m->type == WIRE_STORE_PUT && m->method == BT_NET_METHOD_PULL &&
        (m->offset > c->link->bytes || bytes > c->link->bytes - m->offset)) {
        return BT_E_INVALID;
    }
    return BT_OK;
}

static void tell_go(struct put *p)
{
    struct kv_server *s = p->client->server;
    struct wire_store m = {.type = WIRE_STORE_GO, .req = p->req};
    struct bt_buf data = {0};
    int rc = BT_OK;

    if (p->method == BT_NET_METHOD_PUT) {
        m.n_layers = p->shape.n_layers;
        for (uint32_t l = 0; rc == BT_OK && l < p->shape.n_layers; l++) {
            const char *at = kv_blob_layer(s->cfg.tiers, p->blob, l);

            rc = wire_store_add_u64(&data, (uint64_t)(at - (const char *)s->region->base));
        }
    }
    if (rc == BT_OK) {
        kv_link_send(p->client->link, &m, bt_buf_str(&data));
    } else {
        kv_link_close(p->client->link, rc, "out of memory");
    }
    bt_buf_fini(&data);
}

static int begin(struct client *c,
                 const struct wire_store *m,
                 const struct kv_blob_meta *meta,
                 struct put **ret_put)
{
    struct kv_server *s = c->server;
    struct put *p = bt_calloc(1, sizeof(*p) + meta->shape.n_layers * sizeof(p->sums[0]));
    int rc;

    if (!p) {
        return BT_E_EXHAUSTED;
    }
    rc = kv_tiers_reserve(s->cfg.tiers, meta, &p->blob);
    if (rc != BT_OK) {
        free(p);
        return rc;
    }
    p->client = c;
    c->refs++;
    c->n_puts++;
    c->put_bytes += kv_blob_bytes(&meta->shape);
    p->req = m->req;
    p->method = (enum bt_net_method)m->method;
    p->since_ns = m->type == WIRE_STORE_PUT && p->method != BT_NET_METHOD_PULL ? bt_now_ns() : 0;
    p->at = c->link->base + m->offset;
    p->shape = meta->shape;
    p->sums_later = m->type == WIRE_STORE_PUT && (m->flags & WIRE_STORE_SUMS_LATER);
    memcpy(p->sums, meta->sums, meta->shape.n_layers * sizeof(p->sums[0]));
    bt_list_init(&p->link);
    bt_list_init(&p->pull_link);
    bt_list_push_back(&c->puts, &p->link);
    pthread_mutex_lock(&s->lock);
    s->n_alive++;
    pthread_mutex_unlock(&s->lock);
    *ret_put = p;
    return BT_OK;
}

static void begin_pull(struct put *p)
{
    struct kv_server *s = p->client->server;

    bt_list_push_back(&s->pulling, &p->pull_link);
    kv_links_pump(&s->links);
}

/* The put that a head begins; NULL: it is none, and the client was told. */
static struct put *accept_put(struct client *c, const struct wire_store *m, struct bt_str head)
{
    int32_t *ids = bt_calloc(KV_BLOB_MAX_TOKENS, sizeof(*ids));
    uint64_t sums[KV_BLOB_MAX_LAYERS];
    struct kv_blob_room room = {ids, KV_BLOB_MAX_TOKENS, sums, KV_BLOB_MAX_LAYERS};
    struct kv_blob_meta meta;
    struct put *p = NULL;
    size_t n;
    int rc = BT_E_EXHAUSTED;

    if (ids && (kv_blob_decode(head.p, head.n, &room, &meta, &n) != BT_OK || n != head.n)) {
        free(ids);
        kv_link_violation(c->link, "malformed head of a block", m);
        return NULL;
    }
    if (ids) {
        rc = check_head(c, m, &meta);
        rc = rc == BT_OK ? begin(c, m, &meta, &p) : rc;
    }
    free(ids);
    if (rc != BT_OK) {
        tell_done(c, m->req, rc);
    }
    return p;
}

void kv_server_on_put(struct client *c, const struct wire_store *m, struct bt_str data)
{
    struct put *p = accept_put(c, m, data);

    if (p && p->method == BT_NET_METHOD_PULL) {
        begin_pull(p);
    } else if (p) {
        tell_go(p);
    }
}

static struct put *find(struct client *c, uint64_t req)
{
    bt_list_for_each (it, &c->puts) {
        struct put *p = BT_LIST_ENTRY(it, struct put, link);

        if (p->req == req) {
            return p;
        }
    }
    return NULL;
}

/* ---- lent ---- */

/* Where the block lies, as the client says: believed as far as it is inside what can be seen. */
static void find_lent(struct put *p, const struct wire_store *m)
{
    struct client *c = p->client;
    struct bt_net_file file = {m->file_dev, m->file_ino};
    struct kv_blob_grid *g = &p->grid;

    if (g->row_bytes > 0) {
        g->n_rows = (uint32_t)(p->shape.layer_bytes / g->n_pages / g->row_bytes);
    }
    if (!kv_blob_grid_fits(g, &p->shape, INT64_MAX)) {
        kv_link_violation(c->link, "a lent block that is not in its memory", m);
        return; /* `closed` drops it */
    }
    if (kv_link_method(c->link) == BT_NET_METHOD_PULL) {
        g->base = bt_net_view_file(c->link->net, &file, p->shape.n_layers * g->layer_stride);
    }
    if (g->base) {
        begin_pull(p);
    } else {
        finish(p, BT_E_UNSUPPORTED);
    }
}

void kv_server_on_lend(struct client *c, const struct wire_store *m, struct bt_str data)
{
    size_t n = 4 * (size_t)m->n_pages;
    uint32_t *pages;
    struct put *p;

    if (data.n < n) {
        kv_link_violation(c->link, "pages are missing", m);
        return;
    }
    pages = bt_calloc(m->n_pages, sizeof(*pages));
    if (!pages) {
        tell_done(c, m->req, BT_E_EXHAUSTED);
        return;
    }
    for (uint32_t i = 0; i < m->n_pages; i++) {
        pages[i] = wire_store_u32(data.p + 4 * (size_t)i);
    }
    p = accept_put(c, m, (struct bt_str){data.p + n, data.n - n});
    if (!p) {
        free(pages);
        return;
    }
    p->lent = true;
    c->n_unread++;
    p->pages = pages;
    p->sample = m->sample;
    p->grid = (struct kv_blob_grid){.layer_stride = m->layer_stride,
                                    .page_stride = m->page_stride,
                                    .row_bytes = m->row_bytes,
                                    .n_pages = m->n_pages,
                                    .pages = pages};
    find_lent(p, m);
}

/* All of it is here; whether the pages were its pages all the time is for the client to say. */
static void tell_taken(struct put *p)
{
    struct client *c = p->client;

    if (p->sampled != p->sample) { /* other memory; or we are late: the client knows which */
        kv_server_add(&p->client->server->bad, 1);
        finish(p, BT_E_CORRUPT);
        return;
    }
    p->taken = true;
    c->n_unread--;
    c->n_untold++;
    tell_some(c);
}

/* One layer. False: that was the last one. */
static bool take_lent(struct put *p, size_t *budget)
{
    *budget -= BT_MIN(*budget, p->shape.layer_bytes);
    p->sums[p->layer] = kv_blob_grid_gather(&p->grid, p->layer, layer_at(p, p->layer));
    p->sampled = kv_blob_sample_row(&p->grid, &kv_blob_meta(p->blob)->key, p->layer, p->sampled);
    if (++p->layer < p->shape.n_layers) {
        return true;
    }
    tell_taken(p);
    return false;
}

void kv_server_on_verdict(struct client *c, const struct wire_store *m)
{
    struct put *p = find(c, m->req);

    if (m->type == WIRE_STORE_DROP && c->link->version >= 3 && (!p || p->sums_later)) {
        if (p) { /* else it was answered while they said so */
            finish(p, BT_E_CANCELLED);
        }
    } else if (!p || !p->told) {
        kv_link_violation(c->link, "nothing was taken", m);
    } else if (m->type == WIRE_STORE_KEEP) {
        finish(p, BT_OK);
    } else {
        kv_tiers_abort(c->server->cfg.tiers, p->blob);
        put_free(p);
        tell_some(c);
    }
}

/* Puts are filled in the order in which they were begun: the first one's client has the time that
 * is left since the one before it ended. */
void kv_server_check_puts(struct client *c, uint64_t now)
{
    uint64_t lease = c->server->cfg.lease_ns;
    bool first = true;

    bt_list_for_each (it, &c->puts) {
        struct put *p = BT_LIST_ENTRY(it, struct put, link);
        bool late = p->told && now - p->taken_ns > lease;

        if (p->since_ns && first) {
            uint64_t since = BT_MAX(p->since_ns, c->next_put_ns);

            late = now > since && now - since > lease;
            first = false;
        }
        if (c->link && late) {
            kv_link_close(c->link, BT_E_DEADLINE, "a put was left unfinished for too long");
            return;
        }
    }
}

/* ---- pull ---- */

static void on_read(void *arg, int rc)
{
    struct put *p = arg;

    p->reading = false;
    p->rc = rc;
    kv_links_pump(&p->client->server->links);
}

/* Reads the next piece, or a layer where it can be seen. False: nothing more to do for it now; it
 * may be gone. */
static bool pull_piece(struct put *p, size_t *budget)
{
    struct kv_link *l = p->client->link;
    size_t n = BT_MIN(p->shape.layer_bytes - p->offset, (size_t)KV_LINK_PIECE_BYTES);
    char *to = layer_at(p, p->layer) + p->offset;
    uint64_t from = p->at + (uint64_t)p->layer * p->shape.layer_bytes + p->offset;
    const void *view;

    if (p->lent && !l->closing) {
        return take_lent(p, budget);
    }
    if (l->closing || kv_link_rkey(l, NULL) != BT_OK) {
        kv_link_close(l, BT_E_PEER_PROTOCOL, "memory key");
        return false;
    }
    view = p->offset == 0 ? bt_net_view(l->net, from, p->shape.layer_bytes) : NULL;
    if (view) {
        *budget -= BT_MIN(*budget, p->shape.layer_bytes);
        return next_layer(p, kv_copy_sum(to, view, p->shape.layer_bytes));
    }
    p->reading = true;
    if (bt_net_get(l->net, to, from, n, l->rkey, on_read, p) != BT_OK) {
        p->reading = false;
        kv_link_close(l, BT_E_PEER_LOST, "the client's memory cannot be read");
        return false;
    }
    *budget -= BT_MIN(*budget, n);
    p->offset += n;
    return true;
}

/* After a read. False: over. */
static bool pull_next(struct put *p)
{
    if (p->rc != BT_OK) {
        kv_link_close(p->client->link, BT_E_PEER_LOST, "the client's memory cannot be read");
        return false;
    }
    return p->offset < p->shape.layer_bytes ||
           next_layer(p, kv_sum(layer_at(p, p->layer), p->shape.layer_bytes));
}

/* It has had its turn: the other clients are next, and then it goes on before what else its client
 * has lent, so that pages are given back one block after the other. */
static void behind_others(struct kv_server *s, struct put *p)
{
    struct bt_list same;
    struct bt_list *it;

    bt_list_init(&same);
    bt_list_push_back(&same, &p->pull_link);
    bt_list_for_each_safe (at, &s->pulling) {
        if (BT_LIST_ENTRY(at, struct put, pull_link)->client == p->client) {
            bt_list_remove(at);
            bt_list_push_back(&same, at);
        }
    }
    while ((it = bt_list_pop_front(&same)) != NULL) {
        bt_list_push_back(&s->pulling, it);
    }
}

bool kv_server_pump_puts(struct kv_server *s, size_t *budget)
{
    struct bt_list turn;
    struct bt_list *it;

    bt_list_init(&turn);
    while (*budget > 0 && (it = bt_list_pop_front(&s->pulling)) != NULL) {
        struct put *p = BT_LIST_ENTRY(it, struct put, pull_link);
        bool on = p->offset == 0 || p->reading || pull_next(p);

        while (on && !p->reading && *budget > 0) {
            on = pull_piece(p, budget) && (p->offset == 0 || p->reading || pull_next(p));
        }
        if (on && p->lent) {
            behind_others(s, p); /* the budget is used up */
        } else if (on) {
            bt_list_push_back(&turn, &p->pull_link);
        }
    }
    while ((it = bt_list_pop_front(&turn)) != NULL) {
        bt_list_push_back(&s->pulling, it);
    }
    return *budget == 0; /* else all wait for a read, which pumps when it is back */
}

/* ---- message ---- */

void kv_server_on_put_data(struct client *c, const struct wire_store *m, struct bt_str data)
{
    struct put *p = find(c, m->req);

    if (!p) {
        return; /* of one that was refused or given up */
    }
    if (p->method != BT_NET_METHOD_MESSAGE || m->item != 0 || m->layer != p->layer ||
        m->offset != p->offset || data.n == 0 || data.n > p->shape.layer_bytes - p->offset) {
        kv_link_violation(c->link, "a part that does not follow on", m);
        return;
    }
    if (p->offset == 0) {
        kv_copy_begin(&p->copy);
    }
    kv_copy_add(&p->copy, layer_at(p, p->layer) + p->offset, data.p, data.n);
    kv_copy_flush(&p->copy);
    p->offset += data.n;
    if (p->offset == p->shape.layer_bytes) {
        p->since_ns = bt_now_ns();
        if (p->sums_later) {
            p->sums[p->layer] = m->sum;
        }
        next_layer(p, kv_copy_end(&p->copy));
    }
}

/* ---- put ---- */

void kv_server_on_placed(struct client *c, const struct wire_store *m)
{
    struct put *p = find(c, m->req);

    if (!p || p->method != BT_NET_METHOD_PUT) {
        kv_link_violation(c->link, "PLACED of no put", m);
        return;
    }
    for (uint32_t l = 0; l < p->shape.n_layers; l++) {
        if (!is_right(p, l, kv_sum(layer_at(p, l), p->shape.layer_bytes))) {
            finish(p, BT_E_CORRUPT);
            return;
        }
    }
    finish(p, BT_OK);
}
