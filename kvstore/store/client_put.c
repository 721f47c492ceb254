/* The store's client: puts.
 *
 * A stash is one offered block. Where its owners can read our pages it is lent to them
 * (client_lend.c), and where they are called over TCP it is sent from them (client_flow.c). Else it
 * is copied on the thread "store-put" into a slot of the staging memory;
 * on the net's thread it goes to each of its owners as a copy. The slot is free when every owner
 * has said that it is done, or its connection is closed. */
#include "kvstore/store/client_put_int.h"

#include "common/base/buf.h"
#include "common/obs/log.h"
#include "common/thr/thread.h"

#include <stdlib.h>

#define QUEUE_MAX 64

static void stash_free(struct stash *s)
{
    free(s->ids);
    free(s->sums);
    free(s->pages);
    free(s);
}

const char *kv_client_slot_layer(const struct stash *s, uint32_t layer)
{
    return (const char *)s->client->staging.base + (size_t)s->slot * kv_blob_bytes(&s->meta.shape) +
           layer * s->meta.shape.layer_bytes;
}

static char *slot_at(const struct kv_client *c, uint32_t slot)
{
    return (char *)c->staging.base + (size_t)slot * kv_blob_bytes(&c->cfg.shape);
}

/* ---- [engine] offers ---- */

static struct stash *stash_new(struct kv_client *c, const struct kv_offer *o)
{
    const struct kv_blob_shape *shape = &c->cfg.shape;
    uint32_t last = o->chain.n_blocks - 1;
    uint32_t n_pages = shape->block_tokens / (uint32_t)kv_pool_layout(o->pool)->page_tokens;
    struct stash *s = bt_calloc(1, sizeof(*s));
    struct kv_run run = kv_run_of(&o->chain, last, shape->block_tokens, 0);
    uint64_t prefix = run.prefix;

    if (!s) {
        return NULL;
    }
    s->client = c;
    s->ids = bt_calloc(shape->block_tokens, sizeof(*s->ids));
    s->sums = bt_calloc(shape->n_layers, sizeof(*s->sums));
    s->pages = bt_calloc(n_pages, sizeof(*s->pages));
    if (!s->ids || !s->sums || !s->pages) {
        stash_free(s);
        return NULL;
    }
    kv_run_at(&run, 0, &prefix, &s->meta);
    memcpy(s->ids, s->meta.ids, shape->block_tokens * sizeof(*s->ids));
    memcpy(s->pages, o->pages, n_pages * sizeof(*s->pages));
    s->meta.ids = s->ids;
    s->meta.sums = s->sums;
    s->meta.shape = *shape;
    s->pool = o->pool;
    s->offer_done = o->done;
    s->offer_arg = o->arg;
    s->slot = NO_SLOT;
    bt_list_init(&s->link);
    bt_list_init(&s->stage_link);
    bt_list_init(&s->msg.link);
    s->msg.handle = kv_client_on_offer;
    return s;
}

bool kv_client_offer(struct kv_source *src, const struct kv_offer *o)
{
    struct kv_client *c = BT_CONTAINER_OF(src, struct kv_client, src);
    uint64_t fp = kv_key_fingerprint(&o->chain.keys[o->chain.n_blocks - 1]);
    uint64_t *known = &c->recent[fp % BT_ARRAY_LEN(c->recent)];
    struct stash *s;
    bool wanted;

    if (c->cfg.replicas == 0 || o->n_tokens != c->cfg.shape.block_tokens) {
        return false;
    }
    pthread_mutex_lock(&c->lock);
    wanted = !c->stopping && c->ring && c->ring->n > 0 && c->n_offers < QUEUE_MAX && *known != fp;
    pthread_mutex_unlock(&c->lock);
    s = wanted ? stash_new(c, o) : NULL;
    if (!s) {
        return false;
    }
    pthread_mutex_lock(&c->lock);
    *known = fp;
    c->n_offers++;
    c->n_alive++;
    pthread_mutex_unlock(&c->lock);
    count(&c->stats.offers, 1);
    bt_net_post(c->links.net, &s->msg);
    return true;
}

bool kv_client_wants(struct kv_source *src)
{
    struct kv_client *c = BT_CONTAINER_OF(src, struct kv_client, src);
    bool wants;

    pthread_mutex_lock(&c->lock);
    wants = !c->stopping && c->ring && c->ring->n > 0 && c->n_offers < QUEUE_MAX;
    pthread_mutex_unlock(&c->lock);
    return wants || c->cfg.replicas == 0; /* then nothing waits for daemons */
}

/* ---- net: to the owners ---- */

void kv_client_unref_stash(struct stash *s)
{
    struct kv_client *c = s->client;

    if (--s->n_left > 0) {
        return;
    }
    BT_BUG_ON(!s->pages_given || s->lent || s->staging);
    if (s->slot != NO_SLOT) {
        pthread_mutex_lock(&c->lock);
        c->free_slots[c->n_free_slots++] = s->slot;
        pthread_mutex_unlock(&c->lock);
    }
    stash_free(s);
    kv_client_gone(c); /* wakes who waits for a slot, too */
}

void kv_client_give_pages(struct stash *s, int rc)
{
    struct kv_client *c = s->client;

    if (s->pages_given || s->n_readers > 0 || s->staging) {
        return;
    }
    s->pages_given = true;
    if (s->lent) {
        s->lent = false;
        bt_list_remove(&s->link);
        c->lent_bytes -= kv_blob_bytes(&c->cfg.shape);
    }
    s->offer_done(s->offer_arg, s->staged ? BT_OK : rc);
}

void kv_client_stage(struct stash *s)
{
    struct kv_client *c = s->client;
    bool stopping;

    pthread_mutex_lock(&c->lock);
    stopping = c->stopping;
    if (!stopping) {
        s->staging = true;
        s->n_left++;           /* store-put's, until on_stash */
        if (s->n_copies > 0) { /* its pages have been held for long */
            c->n_offers++;
            bt_list_push_front(&c->offers, &s->stage_link);
        } else {
            bt_list_push_back(&c->offers, &s->stage_link);
        }
        pthread_cond_broadcast(&c->cond);
    } else if (s->n_copies == 0) {
        c->n_offers--;
    }
    pthread_mutex_unlock(&c->lock);
    if (stopping) {
        s->dropped = true;
        s->n_left++;
        kv_client_give_pages(s, BT_E_CANCELLED);
        kv_client_unref_stash(s);
    }
}

/* The owner has it, or will not; nothing reads the slot for it any more. */
void kv_client_check_copy(struct copy *k)
{
    struct stash *s = k->stash;
    struct kv_client *c = s->client;

    if (!k->done || k->n_ops > 0) {
        return;
    }
    kv_client_flow_free(k);
    bt_list_remove(&k->link);
    if (k->sent) {
        kv_client_unsend(k);
        kv_client_send_puts(k->l);
    }
    if (k->rc == BT_OK) {
        count(&c->stats.puts, 1);
        count(&c->stats.put_bytes, kv_blob_bytes(&c->cfg.shape));
    } else if (k->rc != BT_E_EXISTS) {
        count(&c->stats.refused, 1);
    }
    kv_client_unref_stash(s);
}

void kv_client_unsend(struct copy *k)
{
    struct server *to = k->l->user;

    if (k->sent) {
        k->sent = false;
        to->n_sent--;
    }
}

void kv_client_copy_done(struct copy *k, int rc)
{
    if (!k->done) {
        k->done = true;
        k->going = false;
        k->rc = rc;
    }
    kv_client_check_copy(k);
}

static void send_put(struct copy *k)
{
    static const uint64_t no_sums[KV_BLOB_MAX_LAYERS];
    struct stash *s = k->stash;
    struct kv_blob_meta meta = s->meta;
    struct kv_client *c = s->client;
    struct server *to = k->l->user;
    struct wire_store m = {.type = WIRE_STORE_PUT, .req = k->req};
    size_t n = kv_blob_head_bytes(&s->meta);
    char *head;

    if (k->l->incarnation != k->incarnation) {
        kv_link_close(k->l, BT_E_PEER_STALE, "another life of the node answers");
        return;
    }
    head = k->lent ? NULL : malloc(n);
    if (!head && !k->lent) {
        kv_link_close(k->l, BT_E_NOMEM, "out of memory");
        return;
    }
    k->method = kv_link_method(k->l);
    k->sent = true;
    to->put_ns = to->n_sent++ ? to->put_ns : bt_now_ns();
    if (k->lent) {
        kv_client_send_lend(k);
        return;
    }
    m.method = (uint8_t)k->method;
    if (k->flows) {
        m.flags = WIRE_STORE_SUMS_LATER;
        meta.sums = no_sums;
    } else {
        m.offset = (uint64_t)(slot_at(c, s->slot) - (char *)c->staging.base);
    }
    kv_blob_encode(&meta, head);
    kv_link_send(k->l, &m, (struct bt_str){head, n});
    free(head);
}

/* As many as the daemon may have at once. */
void kv_client_send_puts(struct kv_link *l)
{
    struct server *s = l->user;

    if (!l->greeted) {
        return;
    }
    bt_list_for_each (it, &s->puts) {
        struct copy *k = BT_LIST_ENTRY(it, struct copy, link);

        if (l->closing || s->n_sent >= s->window) {
            return;
        }
        if (!k->sent && !k->done && (k->lent || k->flows || k->stash->staged)) {
            send_put(k);
        }
    }
}

struct copy *kv_client_add_copy(struct stash *s, struct kv_link *l, uint64_t incarnation)
{
    struct copy *k = &s->copies[s->n_copies++];

    *k =
        (struct copy){.stash = s, .l = l, .incarnation = incarnation, .req = s->client->next_req++};
    bt_list_init(&k->link);
    bt_list_push_back(&kv_client_server(l)->puts, &k->link);
    s->n_left++;
    return k;
}

static void start_copies(struct stash *s)
{
    struct kv_client *c = s->client;
    struct ring *r = kv_client_ring(c);
    uint32_t owners[8];
    size_t n = r ? kv_ring_owners(r->ring, &s->meta.key, c->cfg.replicas, owners) : 0;

    for (size_t i = 0; i < n; i++) {
        const struct bt_member *m = r->at[owners[i]];
        struct kv_link *l = kv_client_dial(c, m);

        if (l) {
            kv_client_add_copy(s, l, m->incarnation);
            kv_client_send_puts(l);
        } else {
            count(&c->stats.refused, 1);
        }
    }
    if (r) {
        kv_client_ring_unref(c, r);
    }
}

bool kv_client_unstage(struct stash *s)
{
    struct kv_client *c = s->client;
    bool waits;

    pthread_mutex_lock(&c->lock);
    waits = s->staging && !s->copying;
    if (waits) {
        bt_list_remove(&s->stage_link);
        c->n_offers--;
        s->staging = false;
    }
    pthread_mutex_unlock(&c->lock);
    return waits;
}

/* Back from store-put: the bytes lie in a slot, or they will not. */
static void on_stash(struct bt_msg *msg, void *consumer)
{
    struct stash *s = BT_CONTAINER_OF(msg, struct stash, msg);
    struct kv_client *c = s->client;

    s->staging = false;
    s->staged = s->slot != NO_SLOT;
    s->dropped = !s->staged;
    kv_client_give_pages(s, BT_E_CANCELLED);
    if (s->staged && s->n_copies == 0) {
        start_copies(s);
    }
    for (uint32_t i = 0; i < s->n_copies; i++) {
        struct copy *k = &s->copies[i];

        if (!k->done && s->staged) {
            kv_client_send_puts(k->l);
        } else if (!k->done && k->flows) {
            kv_client_flow_drop(k);
        } else if (!k->done && !k->lent) {
            kv_client_copy_done(k, BT_E_CANCELLED);
        }
    }
    kv_client_unref_stash(s);
    kv_client_lend_next(c);
}

void kv_client_puts_ready(struct kv_client *c, struct kv_link *l)
{
    if (l->user) {
        kv_client_send_puts(l);
    }
    kv_client_lend_next(c);
}

/* No operation on it is under way any more. */
void kv_client_puts_closed(struct kv_client *c, struct server *s)
{
    while (!bt_list_empty(&s->puts)) {
        struct copy *k = BT_LIST_ENTRY(s->puts.next, struct copy, link);

        BT_BUG_ON(k->n_ops != 0);
        kv_client_reader_gone(k); /* what it reads now, nobody takes for a block */
        k->lent = k->flows = false;
        kv_client_give_pages(k->stash, BT_E_PEER_LOST);
        kv_client_copy_done(k, BT_E_PEER_LOST);
    }
}

void kv_client_check_puts(struct kv_client *c, struct kv_link *l)
{
    const struct server *s = l->user;

    if (s->n_sent > 0 && bt_now_ns() - s->put_ns > c->cfg.load_limit_ns) {
        BT_WARN("store_put", "peer=%s puts=%u msg=\"takes too long, given up\"", l->name,
                s->n_sent);
        kv_link_close(l, BT_E_DEADLINE, "no put came to its end");
    }
}

struct copy *kv_client_find_copy(struct kv_link *l, uint64_t req)
{
    struct server *s = l->user;

    if (s) {
        bt_list_for_each (it, &s->puts) {
            struct copy *k = BT_LIST_ENTRY(it, struct copy, link);

            if (k->req == req && k->sent) {
                return k;
            }
        }
    }
    return NULL;
}

void kv_client_on_done(struct kv_client *c, struct kv_link *l, const struct wire_store *m)
{
    struct copy *k = kv_client_find_copy(l, m->req);
    struct server *s = l->user;

    if (!k || k->done || ((k->lent || k->flows) && !k->taken && m->rc == BT_OK)) {
        kv_link_violation(l, "DONE of no put", m);
        return;
    }
    s->put_ns = bt_now_ns();
    s->slow = false;
    if (m->rc == BT_E_EXHAUSTED && !k->going && !k->taken && s->n_sent > 1) {
        /* More than it takes of us at once: again when another one is through. */
        kv_client_unsend(k);
        s->window = s->n_sent;
        if (k->called_back) {
            kv_client_go_on_staged(k);
        }
        return;
    }
    if (k->lent && !k->taken && kv_client_lend_refused(k, m->rc)) {
        return;
    }
    if (k->flows && !k->taken) { /* refused, or it has it */
        kv_client_reader_gone(k);
        k->flows = false;
        kv_client_give_pages(k->stash, BT_OK);
    }
    kv_client_copy_done(k, m->rc);
    kv_client_lend_next(c);
}

/* ---- put: into the owner's memory ---- */

static void on_flushed(void *arg, int rc)
{
    struct copy *k = arg;
    struct wire_store m = {.type = WIRE_STORE_PLACED, .req = k->req};

    k->n_ops--;
    if (rc == BT_OK && !k->done && !k->l->closing) {
        kv_link_send(k->l, &m, (struct bt_str){0});
    }
    kv_client_check_copy(k);
}

static void on_put(void *arg, int rc)
{
    struct copy *k = arg;

    if (rc != BT_OK) {
        kv_link_close(k->l, BT_E_PEER_LOST, "cannot put");
    }
    if (--k->n_ops == 0 && rc == BT_OK && !k->done && !k->l->closing) {
        k->n_ops++;
        if (bt_net_flush(k->l->net, on_flushed, k) != BT_OK) {
            kv_link_close(k->l, BT_E_PEER_LOST, "cannot flush");
            k->n_ops--;
        }
    }
    kv_client_check_copy(k);
}

static void write_all(struct copy *k, struct bt_str data)
{
    struct stash *s = k->stash;
    const struct kv_blob_shape *shape = &s->meta.shape;
    struct kv_link *l = k->l;

    if (kv_link_rkey(l, NULL) != BT_OK) {
        kv_link_close(l, BT_E_PEER_PROTOCOL, "memory key");
        return;
    }
    k->n_ops++; /* ours, until all are posted */
    for (uint32_t i = 0; i < shape->n_layers && !l->closing; i++) {
        uint64_t to = wire_store_u64(data.p + 8 * (size_t)i);

        if (to > l->bytes || shape->layer_bytes > l->bytes - to) {
            kv_link_violation(l, "a place outside the memory", NULL);
            break;
        }
        k->n_ops++;
        if (bt_net_put(l->net, slot_at(s->client, s->slot) + i * shape->layer_bytes, l->base + to,
                       shape->layer_bytes, l->rkey, on_put, k) != BT_OK) {
            k->n_ops--;
            kv_link_close(l, BT_E_PEER_LOST, "cannot put");
        }
    }
    on_put(k, BT_OK);
}

void kv_client_on_go(struct kv_client *c,
                     struct kv_link *l,
                     const struct wire_store *m,
                     struct bt_str data)
{
    struct copy *k = kv_client_find_copy(l, m->req);
    uint32_t want;

    if (!k) {
        kv_link_violation(l, "GO of no put", m);
        return;
    }
    want = k->method == BT_NET_METHOD_PUT ? c->cfg.shape.n_layers : 0;
    if (k->lent || k->going || k->done || k->method == BT_NET_METHOD_PULL || m->n_layers != want ||
        data.n != 8 * (size_t)want) {
        kv_link_violation(l, "GO that does not fit", m);
        return;
    }
    k->going = true;
    if (k->method == BT_NET_METHOD_PUT) {
        write_all(k, data);
    } else {
        kv_links_pump(&c->links);
    }
}

/* ---- message ---- */

struct part {
    struct copy *copy;
    struct kv_link *l;
    size_t bytes;
};

static void on_part_sent(void *arg, int rc)
{
    struct part *p = arg;
    struct copy *k = p->copy;

    p->l->out_bytes -= p->bytes;
    free(p);
    k->n_ops--;
    kv_links_pump(&k->stash->client->links);
    kv_client_check_copy(k);
}

/* False: nothing to send now. */
static bool send_part(struct copy *k, size_t *budget)
{
    struct stash *s = k->stash;
    size_t layer_bytes = s->meta.shape.layer_bytes;
    struct wire_store m = {.type = WIRE_STORE_DATA, .req = k->req, .layer = k->layer};
    const char *from;
    struct part *p;
    size_t n;

    if (!k->going || k->method != BT_NET_METHOD_MESSAGE || k->layer == s->meta.shape.n_layers ||
        k->l->closing || k->l->out_bytes >= KV_LINK_INFLIGHT_BYTES) {
        return false;
    }
    p = bt_calloc(1, sizeof(*p));
    if (!p) {
        kv_link_close(k->l, BT_E_NOMEM, "out of memory");
        return false;
    }
    n = BT_MIN(layer_bytes - k->offset, (size_t)KV_LINK_PART_BYTES);
    m.offset = k->offset;
    from = slot_at(s->client, s->slot) + k->layer * layer_bytes + k->offset;
    k->offset += n;
    if (k->offset == layer_bytes) {
        k->offset = 0;
        k->layer++;
    }
    *p = (struct part){k, k->l, n};
    k->l->out_bytes += n;
    k->n_ops++;
    *budget -= BT_MIN(*budget, n);
    kv_link_send_data(k->l, &m, (struct bt_str){from, n}, on_part_sent, p);
    return true;
}

bool kv_client_pump_puts(struct kv_client *c, size_t *budget)
{
    bt_list_for_each (it, &c->links.all) {
        struct server *s = BT_LIST_ENTRY(it, struct kv_link, link)->user;

        if (!s) {
            continue;
        }
        bt_list_for_each (kt, &s->puts) {
            struct copy *k = BT_LIST_ENTRY(kt, struct copy, link);

            while (*budget > 0 &&
                   (k->flows ? kv_client_flow_on(k, budget) : send_part(k, budget))) {
            }
        }
    }
    if (c->lend_more) {
        c->lend_more = false;
        kv_client_lend_next(c);
    }
    return *budget == 0;
}

/* ---- [store-put] copying ---- */

static void copy_out(struct kv_client *c, struct stash *s)
{
    const struct kv_blob_shape *shape = &c->cfg.shape;
    char *to = slot_at(c, s->slot);

    for (uint32_t l = 0; l < shape->n_layers; l++, to += shape->layer_bytes) {
        s->sums[l] = kv_blob_gather_sum(s->pool, s->pages, shape->block_tokens, (int)l, to);
    }
    if (s->n_copies == 0) { /* else they are lent to somebody as well, maybe */
        s->pages_given = true;
        s->offer_done(s->offer_arg, BT_OK);
    }
}

/* The next one that there is a slot for; NULL: stop. Those that are left are not wanted then. */
static struct stash *next_stash(struct kv_client *c)
{
    struct stash *s;

    pthread_mutex_lock(&c->lock);
    while (!c->stopping && (bt_list_empty(&c->offers) || c->n_free_slots == 0)) {
        pthread_cond_wait(&c->cond, &c->lock);
    }
    if (bt_list_empty(&c->offers)) {
        pthread_mutex_unlock(&c->lock);
        return NULL;
    }
    s = BT_LIST_ENTRY(bt_list_pop_front(&c->offers), struct stash, stage_link);
    s->copying = true;
    c->n_offers--;
    s->slot = c->stopping ? NO_SLOT : c->free_slots[--c->n_free_slots];
    pthread_mutex_unlock(&c->lock);
    return s;
}

void *kv_client_putter(void *arg)
{
    struct kv_client *c = arg;
    struct stash *s;

    bt_thread_background();
    while ((s = next_stash(c)) != NULL) {
        if (s->slot != NO_SLOT) {
            copy_out(c, s);
        }
        s->msg.handle = on_stash;
        bt_net_post(c->links.net, &s->msg);
    }
    return NULL;
}
