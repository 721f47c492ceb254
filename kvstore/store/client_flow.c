/* The store's client: blocks that are sent from the pages, over TCP.
 *
 * A piece of a layer is gathered into a small buffer and summed in the same pass, and sent while it
 * is in the cache; the sum of a layer goes with its last part. The block is lent meanwhile
 * (client_lend.c): to us. Called back, it goes on from the slot that it is copied into, which holds
 * the same bytes. Net's thread. */
#include "kvstore/store/client_put_int.h"

#include <stdlib.h>

/* Of one connection that is not out. A daemon that does not read holds no more than these buffers,
 * and others are not held up; together they are less than half of a second-level cache. */
#define FLOW_INFLIGHT_BYTES (768u << 10)

/* A buffer; free when all that was sent from it is out. */
struct kv_cached {
    struct kv_cached *next; /* in kv_client.cached */
    uint32_t refs;
    size_t n;
    char p[KV_LINK_CACHED_BYTES] BT_ALIGNED(64);
};

struct kv_flow {
    struct kv_cached *buf; /* NULL: none at hand */
    size_t at;             /* sent of it */
    struct kv_copy sum;    /* of the layer */
};

struct flow_part {
    struct copy *copy;
    struct kv_link *l;
    struct kv_cached *buf;
    size_t bytes;
};

/* ---- buffers ---- */

static struct kv_cached *take_buf(struct kv_client *c)
{
    struct kv_cached *b = c->cached;

    if (b) {
        c->cached = b->next;
    } else {
        b = aligned_alloc(64, sizeof(*b));
    }
    if (b) {
        b->refs = 1;
    }
    return b;
}

static void drop_buf(struct kv_client *c, struct kv_cached *b)
{
    if (--b->refs == 0) {
        b->next = c->cached;
        c->cached = b;
    }
}

void kv_client_cached_free(struct kv_client *c)
{
    struct kv_cached *b;

    while ((b = c->cached) != NULL) {
        c->cached = b->next;
        free(b);
    }
}

/* ---- the flow ---- */

static void drop_flow_buf(struct copy *k)
{
    if (k->flow->buf) {
        drop_buf(k->stash->client, k->flow->buf);
        k->flow->buf = NULL;
    }
}

void kv_client_flow_free(struct copy *k)
{
    if (k->flow) {
        drop_flow_buf(k);
        free(k->flow);
        k->flow = NULL;
    }
}

void kv_client_flow_drop(struct copy *k)
{
    struct wire_store m = {.type = WIRE_STORE_DROP, .req = k->req};

    if (k->taken || !k->called_back) {
        return; /* it has all it needs */
    }
    if (k->sent) {
        k->going = false; /* until its DONE */
        kv_link_send(k->l, &m, (struct bt_str){0});
    } else {
        k->flows = false;
        kv_client_copy_done(k, BT_E_CANCELLED);
    }
}

/* The next bytes of the layer. */
static void gather(struct copy *k, struct kv_cached *b)
{
    struct stash *s = k->stash;
    const struct kv_blob_shape *shape = &s->meta.shape;
    struct kv_blob_place from = {s->pool, s->pages, shape->block_tokens};
    struct kv_copy *sum = &k->flow->sum;

    b->n = BT_MIN(shape->layer_bytes - k->offset, (size_t)KV_LINK_CACHED_BYTES);
    if (k->offset == 0) {
        kv_copy_begin_kept(sum);
    }
    if (s->staged) {
        kv_copy_add(sum, b->p, kv_client_slot_layer(s, k->layer) + k->offset, b->n);
        kv_copy_flush(sum);
    } else {
        kv_blob_gather_part(sum, &from, (int)k->layer, k->offset, (struct bt_str){b->p, b->n});
    }
}

/* Bytes to send are at hand. */
static bool fill(struct copy *k)
{
    struct stash *s = k->stash;
    struct kv_flow *f = k->flow;

    if (f->buf && f->at < f->buf->n) {
        return true;
    }
    drop_flow_buf(k);
    if (s->pages_given && !s->staged) {
        return false; /* stopping */
    }
    f->buf = take_buf(s->client);
    f->at = 0;
    if (!f->buf) {
        kv_link_close(k->l, BT_E_NOMEM, "out of memory");
        return false;
    }
    gather(k, f->buf);
    return true;
}

static void on_part_sent(void *arg, int rc)
{
    struct flow_part *p = arg;
    struct copy *k = p->copy;
    struct kv_client *c = k->stash->client;

    p->l->out_bytes -= p->bytes;
    drop_buf(c, p->buf);
    free(p);
    k->n_ops--;
    kv_links_pump(&c->links);
    kv_client_check_copy(k);
}

/* All of it is read: the pages go back. */
static void all_gathered(struct copy *k)
{
    kv_client_reader_gone(k);
    k->taken = true;
    drop_flow_buf(k);
    kv_client_give_pages(k->stash, BT_OK);
    k->stash->client->lend_more = true;
}

bool kv_client_flow_on(struct copy *k, size_t *budget)
{
    const struct kv_blob_shape *shape = &k->stash->meta.shape;
    struct wire_store m = {.type = WIRE_STORE_DATA, .req = k->req, .layer = k->layer};
    struct kv_link *l = k->l;
    struct flow_part *p;
    struct bt_str data;

    if (!k->going || k->taken || k->done || l->closing || l->out_bytes >= FLOW_INFLIGHT_BYTES) {
        return false;
    }
    k->flow = k->flow ? k->flow : bt_calloc(1, sizeof(*k->flow));
    p = k->flow ? bt_calloc(1, sizeof(*p)) : NULL;
    if (!p) {
        kv_link_close(l, BT_E_NOMEM, "out of memory");
        return false;
    }
    if (!fill(k)) {
        free(p);
        return false;
    }
    m.offset = k->offset;
    data.p = k->flow->buf->p + k->flow->at;
    data.n = BT_MIN(k->flow->buf->n - k->flow->at, (size_t)KV_LINK_PART_BYTES);
    k->flow->at += data.n;
    k->offset += data.n;
    if (k->offset == shape->layer_bytes) {
        m.sum = kv_copy_end(&k->flow->sum);
        k->offset = 0;
        k->layer++;
    }
    *p = (struct flow_part){k, l, k->flow->buf, data.n};
    p->buf->refs++;
    l->out_bytes += data.n;
    k->n_ops++;
    *budget -= BT_MIN(*budget, data.n);
    if (k->layer == shape->n_layers) {
        all_gathered(k);
    }
    kv_link_send_data(l, &m, data, on_part_sent, p);
    return true;
}
