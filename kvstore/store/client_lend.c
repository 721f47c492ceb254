/* The store's client: blocks that are lent.
 *
 * An owner on this host reads a block from our pages itself (LEND): one pass over memory instead of
 * two, and hardly any work here. The pages are held meanwhile. When the owner has read all of it,
 * it asks (TAKEN), and only our word (KEEP) makes a block of what it has: the pages were lent
 * without a break until after its last read. A read that is late gets DROP, or no answer at all.
 *
 *     waiting -> lent -> TAKEN -> KEEP, pages given back -> DONE
 *        |         '-> called back (lend_ns is over): staged, pages given back; TAKEN is answered
 *        |             by DROP, then PUT from the staging follows. No slot for as long again: given
 * up
 *        '-> staged: an owner that cannot read our memory, or is slow, or the wait is too long
 *
 * What flows (client_flow.c) is lent to ourselves: taken when its last byte is gathered, called
 * back likewise; it then goes on from the staging, or is dropped.
 *
 * So what was lent holds its pages for twice lend_ns and a copy at most, and it is never more than
 * lend_bytes and an eighth of the pool. Net's thread. */
#include "kvstore/store/client_put_int.h"

#include "common/base/buf.h"
#include "common/obs/log.h"

#include <stdlib.h>

#define POOL_SHARE 8 /* of a pool, that may be lent */

static struct stash *first_of(const struct bt_list *list)
{
    return bt_list_empty(list) ? NULL : BT_LIST_ENTRY(list->next, struct stash, link);
}

static void watch(struct kv_client *c)
{
    if (c->lend_timer.deadline_ns == BT_NEVER_NS && !c->closing &&
        (first_of(&c->waiting) || first_of(&c->lent))) {
        bt_net_timer_start(c->links.net, &c->lend_timer, bt_deadline_ns(c->cfg.lend_ns / 4));
    }
}

/* ---- may it be lent ---- */

enum verdict { LEND_NOW, LEND_LATER, LEND_NEVER };

/* Read by the owner, or by us as it is sent. */
static enum verdict may_read(const struct stash *st, const struct kv_link *l)
{
    const struct server *s = l->user;

    if (s->slow || l->closing) {
        return LEND_NEVER;
    }
    if (!l->greeted) {
        return LEND_LATER;
    }
    if (kv_link_method(l) == BT_NET_METHOD_PULL
            ? !st->lendable || s->cannot_read || l->version < 2
            : kv_link_method(l) != BT_NET_METHOD_MESSAGE || l->version < 3) {
        return LEND_NEVER;
    }
    return s->n_sent < s->window ? LEND_NOW : LEND_LATER;
}

static enum verdict is_room(const struct kv_client *c, const struct stash *s)
{
    uint64_t bytes = kv_blob_bytes(&c->cfg.shape);
    uint64_t limit = BT_MIN(c->cfg.lend_bytes, kv_pool_region(s->pool)->bytes / POOL_SHARE);

    if (bytes > limit) {
        return LEND_NEVER;
    }
    return c->lent_bytes + bytes <= limit ? LEND_NOW : LEND_LATER;
}

struct owners {
    struct ring *ring;
    size_t n;
    uint32_t at[8];
    struct kv_link *links[8];
};

/* All its owners must be able to read it: else it has to be staged anyhow. */
static enum verdict may_lend(struct stash *s, struct owners *o)
{
    struct kv_client *c = s->client;
    enum verdict all = s->readable && o->ring ? is_room(c, s) : LEND_NEVER;

    o->n = o->ring ? kv_ring_owners(o->ring->ring, &s->meta.key, c->cfg.replicas, o->at) : 0;
    for (size_t i = 0; i < o->n && all != LEND_NEVER; i++) {
        o->links[i] = kv_client_dial(c, o->ring->at[o->at[i]]);
        all = BT_MAX(all, o->links[i] ? may_read(s, o->links[i]) : LEND_NEVER);
    }
    return o->n > 0 ? all : LEND_NEVER;
}

/* ---- lending ---- */

static void lend(struct stash *s, const struct owners *o)
{
    struct kv_client *c = s->client;
    struct kv_blob_grid g = kv_blob_grid_of(s->pool, s->pages, c->cfg.shape.block_tokens);
    bool any = false;

    pthread_mutex_lock(&c->lock);
    c->n_offers--;
    pthread_mutex_unlock(&c->lock);
    s->lent = true;
    s->since_ns = bt_now_ns();
    c->lent_bytes += kv_blob_bytes(&c->cfg.shape);
    bt_list_push_back(&c->lent, &s->link);
    s->n_left++; /* ours */
    for (size_t i = 0; i < o->n; i++) {
        struct copy *k = kv_client_add_copy(s, o->links[i], o->ring->at[o->at[i]]->incarnation);

        k->lent = kv_link_method(o->links[i]) == BT_NET_METHOD_PULL;
        k->flows = !k->lent;
        any = any || k->lent;
        s->n_readers++;
    }
    if (any) {
        s->sample = kv_blob_grid_sample(&g, &s->meta.key, c->cfg.shape.n_layers);
        count(&c->stats.lent, 1);
    }
    for (size_t i = 0; i < o->n; i++) {
        kv_client_send_puts(o->links[i]);
    }
    kv_client_unref_stash(s);
}

void kv_client_lend_next(struct kv_client *c)
{
    struct owners o = {.ring = kv_client_ring(c)};
    struct stash *s;

    while ((s = first_of(&c->waiting)) != NULL) {
        enum verdict v = may_lend(s, &o);

        if (v == LEND_LATER) {
            break;
        }
        bt_list_remove(&s->link);
        if (v == LEND_NOW) {
            lend(s, &o);
        } else {
            kv_client_stage(s);
        }
    }
    if (o.ring) {
        kv_client_ring_unref(c, o.ring);
    }
    watch(c);
}

void kv_client_on_offer(struct bt_msg *msg, void *consumer)
{
    struct stash *s = BT_CONTAINER_OF(msg, struct stash, msg);
    struct kv_client *c = s->client;
    const struct bt_mem_region *r = kv_pool_region(s->pool);

    s->since_ns = bt_now_ns();
    s->readable = r->base != NULL;
    s->lendable = s->readable && bt_net_file_of(r->fd, &s->file);
    bt_list_push_back(&c->waiting, &s->link);
    kv_client_lend_next(c);
}

static int add_pages(struct bt_buf *data, const struct stash *s, uint32_t n_pages)
{
    int rc = BT_OK;

    for (uint32_t i = 0; rc == BT_OK && i < n_pages; i++) {
        rc = wire_store_add_u32(data, s->pages[i]);
    }
    return rc;
}

void kv_client_send_lend(struct copy *k)
{
    struct stash *s = k->stash;
    struct kv_blob_grid g = kv_blob_grid_of(s->pool, s->pages, s->meta.shape.block_tokens);
    struct wire_store m = {.type = WIRE_STORE_LEND,
                           .req = k->req,
                           .file_dev = s->file.dev,
                           .file_ino = s->file.ino,
                           .layer_stride = g.layer_stride,
                           .page_stride = g.page_stride,
                           .row_bytes = (uint32_t)g.row_bytes,
                           .n_pages = g.n_pages,
                           .sample = s->sample};
    static const uint64_t no_sums[KV_BLOB_MAX_LAYERS];
    struct kv_blob_meta meta = s->meta;
    size_t n = kv_blob_head_bytes(&meta);
    struct bt_buf data = {0};
    char *head = malloc(n);
    int rc = head ? add_pages(&data, s, g.n_pages) : BT_E_NOMEM;

    if (rc == BT_OK) {
        meta.sums = no_sums;
        kv_blob_encode(&meta, head);
        rc = bt_buf_add(&data, head, n);
    }
    if (rc == BT_OK) {
        kv_link_send(k->l, &m, bt_buf_str(&data));
    } else {
        kv_link_close(k->l, rc, "out of memory");
    }
    free(head);
    bt_buf_fini(&data);
}

/* ---- the end of it ---- */

void kv_client_reader_gone(struct copy *k)
{
    struct stash *s = k->stash;

    if ((k->lent || k->flows) && !k->taken && !k->called_back) {
        BT_BUG_ON(s->n_readers == 0);
        s->n_readers--;
    }
}

void kv_client_go_on_staged(struct copy *k)
{
    struct stash *s = k->stash;

    kv_client_unsend(k);
    k->lent = k->flows = k->called_back = false;
    if (s->dropped) {
        kv_client_copy_done(k, BT_E_CANCELLED);
    } else {
        kv_client_send_puts(k->l);
    }
}

void kv_client_on_taken(struct kv_client *c, struct kv_link *l, const struct wire_store *m)
{
    struct copy *k = kv_client_find_copy(l, m->req);
    struct server *s = l->user;
    struct wire_store answer = {.type = WIRE_STORE_KEEP, .req = m->req};

    if (!k || !k->lent || k->taken || k->done) {
        kv_link_violation(l, "TAKEN of nothing lent", m);
        return;
    }
    s->put_ns = bt_now_ns();
    s->slow = false;
    if (k->called_back) {
        answer.type = WIRE_STORE_DROP;
        kv_link_send(l, &answer, (struct bt_str){0});
        kv_client_go_on_staged(k);
    } else {
        kv_link_send(l, &answer, (struct bt_str){0});
        kv_client_reader_gone(k);
        k->taken = true;
        kv_client_give_pages(k->stash, BT_OK);
    }
    kv_client_lend_next(c);
}

bool kv_client_lend_refused(struct copy *k, int rc)
{
    struct stash *s = k->stash;
    struct server *to = k->l->user;

    kv_client_reader_gone(k);
    if (rc == BT_E_CORRUPT && k->called_back) { /* it has read late, and has seen that */
        kv_client_go_on_staged(k);
        return true;
    }
    if (rc != BT_E_UNSUPPORTED) {
        if (rc == BT_E_CORRUPT) {
            BT_WARN("store_lend", "peer=%s msg=\"has not read the pages that were lent\"",
                    k->l->name);
        }
        kv_client_give_pages(s, BT_OK);
        return false;
    }
    to->cannot_read = true; /* our memory */
    BT_DEBUG("store_lend", "peer=%s msg=\"cannot read our pages, they are copied\"", k->l->name);
    s->n_left++; /* until it is seen to */
    if (!s->staged && !s->staging && !s->dropped) {
        kv_client_stage(s);
    }
    kv_client_go_on_staged(k);
    kv_client_give_pages(s, BT_E_CANCELLED);
    kv_client_unref_stash(s);
    return true;
}

/* Lent for too long: what is read from now on does not count. */
static void call_back(struct stash *s)
{
    struct kv_client *c = s->client;

    s->n_left++; /* ours */
    for (uint32_t i = 0; i < s->n_copies; i++) {
        struct copy *k = &s->copies[i];

        if ((k->lent || k->flows) && !k->taken && !k->called_back && !k->done) {
            kv_client_reader_gone(k);
            ((struct server *)k->l->user)->slow = true;
            k->called_back = k->sent;
            k->lent = k->lent && k->sent;
            k->flows = k->flows && k->sent;
            count(&c->stats.called_back, 1);
        }
    }
    if (!s->staged && !s->staging && !s->dropped) {
        kv_client_stage(s);
    }
    kv_client_give_pages(s, BT_E_CANCELLED);
    kv_client_unref_stash(s);
}

/* No slot has become free for it. */
static void give_up(struct stash *s)
{
    if (!kv_client_unstage(s)) {
        return; /* it is being copied */
    }
    s->dropped = true;
    for (uint32_t i = 0; i < s->n_copies; i++) {
        struct copy *k = &s->copies[i];

        if (!k->done && k->flows) {
            kv_client_flow_drop(k);
        } else if (!k->done && !k->sent) {
            kv_client_copy_done(k, BT_E_CANCELLED);
        }
    }
    kv_client_give_pages(s, BT_E_CANCELLED);
    kv_client_unref_stash(s); /* store-put's */
}

void kv_client_on_lend_timer(struct bt_net_timer *t)
{
    struct kv_client *c = BT_CONTAINER_OF(t, struct kv_client, lend_timer);
    uint64_t now = bt_now_ns();

    t->deadline_ns = BT_NEVER_NS;
    bt_list_for_each_safe (it, &c->lent) {
        struct stash *s = BT_LIST_ENTRY(it, struct stash, link);

        if (now - s->since_ns > c->cfg.lend_ns && s->n_readers > 0) {
            call_back(s);
        } else if (now - s->since_ns > 2 * c->cfg.lend_ns && s->staging) {
            give_up(s);
        }
    }
    bt_list_for_each_safe (it, &c->waiting) {
        struct stash *s = BT_LIST_ENTRY(it, struct stash, link);

        if (now - s->since_ns > c->cfg.lend_ns) {
            bt_list_remove(&s->link);
            kv_client_stage(s);
        }
    }
    kv_client_lend_next(c);
}

/* No more of it: what waits is not wanted; what is lent ends with its connections. */
void kv_client_lends_stop(struct kv_client *c)
{
    struct stash *s;

    c->closing = true;
    bt_net_timer_stop(&c->lend_timer);
    while ((s = first_of(&c->waiting)) != NULL) {
        bt_list_remove(&s->link);
        kv_client_stage(s); /* refused by now */
    }
}
