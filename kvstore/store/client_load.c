/* The store's client: loads.
 *
 * A pull is one load: its blocks, each with the holder that is asked for it. A fetch is one GET to
 * one holder, of up to WIRE_STORE_MAX_ITEMS blocks. A layer of a block is copied into the pages and
 * summed in one pass, by us alone: nothing remote ever writes pages, and the layer counts only if
 * the sum of what was copied is right. With methods pull and put the bytes are read from the
 * holder's memory, always the block that is furthest behind: seen in place where that can be (one
 * host), else by way of a buffer; with message they come in that order. A fetch is released when
 * none of its blocks is read any more.
 *
 * Net's thread, except kv_client_load and kv_client_load_cancel. */
#include "kvstore/store/client_load_int.h"

#include "common/base/buf.h"
#include "common/obs/log.h"

#include <stdlib.h>

#define READ_BYTES (16u << 20) /* of a client, that are not back */

/* ---- buffers of a layer ---- */

static char *buf_get(struct kv_client *c)
{
    return c->n_bufs > 0 ? c->bufs[--c->n_bufs] : malloc(c->cfg.shape.layer_bytes);
}

static void buf_put(struct kv_client *c, struct block *b)
{
    if (b->buf && c->n_bufs < BT_ARRAY_LEN(c->bufs)) {
        c->bufs[c->n_bufs++] = b->buf;
    } else {
        free(b->buf);
    }
    b->buf = NULL;
}

/* ---- the end of a fetch ---- */

void kv_fetch_release(struct fetch *f)
{
    struct wire_store m = {.type = WIRE_STORE_RELEASE, .req = f->req};

    if (f->sent && !f->l->closing) {
        kv_link_send(f->l, &m, (struct bt_str){0});
    }
    f->pull->n_fetches--;
    bt_list_for_each (it, &f->pull->client->loads) {
        BT_LIST_ENTRY(it, struct pull, link)->again = true; /* there is room again */
    }
    kv_links_pump(&f->pull->client->links);
    bt_list_remove(&f->link);
    free(f);
}

/* The block is not read any more, and will not be by this fetch. */
static void leave_fetch(struct pull *p, struct block *b)
{
    struct fetch *f = b->fetch;

    BT_BUG_ON(b->reading);
    b->fetch = NULL;
    b->have = false;
    b->offset = 0;
    free(b->places);
    b->places = NULL;
    buf_put(p->client, b);
    if (f && --f->n_left == 0) {
        kv_fetch_release(f);
    }
}

/* ---- how far it has got ---- */

static void recount(struct pull *p)
{
    p->n_past = 0;
    for (uint32_t i = 0; i < p->n_good; i++) {
        p->n_past += p->blocks[i].layer > p->cur;
    }
}

static void tell(struct pull *p)
{
    uint32_t n_layers = p->client->cfg.shape.n_layers;

    while (p->n_good > 0 && p->cur < n_layers && p->n_past == p->n_good) {
        p->cur++;
        p->first_ns = p->first_ns ? p->first_ns : bt_now_ns();
        recount(p);
    }
    atomic_store_explicit(&p->load->n_good, p->n_good, memory_order_release);
    atomic_store_explicit(&p->load->layers_ready, p->cur, memory_order_release);
    if (p->load->progress && !p->ending) {
        p->load->progress(p->load);
    }
}

/* The run ends before block i. */
static void cut(struct pull *p, uint32_t i)
{
    uint32_t old = p->n_good;

    if (i >= old) {
        return;
    }
    p->n_good = i;
    for (uint32_t k = i; k < old; k++) {
        if (!p->blocks[k].reading) {
            leave_fetch(p, &p->blocks[k]);
        }
    }
    recount(p);
    tell(p);
}

static unsigned long long us_from(const struct pull *p, uint64_t at)
{
    return at ? (at - p->start_ns) / BT_NS_PER_US : 0;
}

static void measure(struct pull *p)
{
    uint64_t ns = bt_now_ns() - p->start_ns, old, now;

    BT_DEBUG("store_loaded",
             "blocks=%u of=%u bytes=%llu asked_us=%llu first_layer_us=%llu whole_us=%llu",
             p->n_good, p->n, (unsigned long long)p->bytes, us_from(p, p->asked_ns),
             us_from(p, p->first_ns), (unsigned long long)(ns / BT_NS_PER_US));
    if (p->bytes < (1u << 20) || ns == 0) {
        return;
    }
    now = (uint64_t)((double)p->bytes / (double)ns * 1e9);
    old = __atomic_load_n(&p->client->stats.bytes_per_s, __ATOMIC_RELAXED);
    __atomic_store_n(&p->client->stats.bytes_per_s, old ? (3 * old + now) / 4 : now,
                     __ATOMIC_RELAXED);
}

void kv_pull_check_over(struct pull *p)
{
    struct kv_client *c = p->client;
    struct kv_load *l = p->load;
    bool late;

    if (p->n_good > 0 && p->cur < c->cfg.shape.n_layers) {
        return;
    }
    p->ending = true;
    if (p->n_ops > 0 || p->n_fetches > 0) {
        return;
    }
    pthread_mutex_lock(&c->lock);
    late = p->cancelled && !p->cancel_seen;
    if (!late) {
        l->priv = NULL; /* a cancel from now on finds nothing */
    }
    pthread_mutex_unlock(&c->lock);
    if (late) {
        return; /* its message calls again */
    }
    bt_net_timer_stop(&p->limit);
    bt_list_remove(&p->link);
    measure(p);
    count(&c->stats.loads, 1);
    count(&c->stats.loaded_blocks, p->n_good);
    count(&c->stats.loaded_bytes, p->bytes);
    free(p);
    l->done(l);
    kv_client_gone(c);
}

static struct kv_blob_place place_of(const struct pull *p, uint32_t i)
{
    uint32_t block_tokens = p->client->cfg.shape.block_tokens;
    uint32_t block_pages = block_tokens / (uint32_t)kv_pool_layout(p->load->pool)->page_tokens;

    return (struct kv_blob_place){p->load->pool, p->load->pages + (size_t)i * block_pages,
                                  block_tokens};
}

/* The next layer of a block lies in its pages, with this sum: it counts if it is the right one. */
static void take_layer(struct pull *p, uint32_t i, uint64_t sum)
{
    struct block *b = &p->blocks[i];
    const struct kv_blob_shape *shape = &p->client->cfg.shape;

    if (sum != b->places[2 * b->layer + 1]) {
        count(&p->client->stats.bad, 1);
        BT_WARN("store_checksum", "peer=%s layer=%u", b->fetch->l->name, b->layer);
        kv_pull_fail_block(p, i);
        return;
    }
    buf_put(p->client, b);
    p->bytes += shape->layer_bytes;
    b->offset = 0;
    p->n_past += b->layer == p->cur;
    b->layer++;
    if (b->layer == shape->n_layers) {
        leave_fetch(p, b);
    }
    tell(p);
    kv_pull_check_over(p);
}

/* All of it lies at `from`. */
static void place_layer(struct pull *p, uint32_t i, const void *from)
{
    struct kv_blob_place to = place_of(p, i);

    take_layer(
        p, i,
        kv_blob_scatter_sum(to.pool, to.pages, to.block_tokens, (int)p->blocks[i].layer, from));
}

/* ---- who is asked ---- */

static uint32_t *partner(struct pull *p, const struct bt_member *m)
{
    for (uint32_t i = 0; i < p->n_partners; i++) {
        if (p->partners[i].member == m) {
            return &p->partners[i].n;
        }
    }
    if (p->n_partners == MAX_PARTNERS) {
        return NULL;
    }
    p->partners[p->n_partners].member = m;
    p->partners[p->n_partners].n = 0;
    return &p->partners[p->n_partners++].n;
}

/* The holder, of those not tried, with the fewest blocks in this load. */
static bool choose(struct pull *p, uint32_t i)
{
    struct block *b = &p->blocks[i];
    const struct seek_block *sb = &p->seek->blocks[i];
    uint32_t best = UINT32_MAX, at = 0, *n;

    for (uint32_t k = 0; k < sb->n; k++) {
        n = b->tried & 1u << k ? NULL : partner(p, sb->holders[k]);
        if (n && *n < best) {
            best = *n;
            at = k;
        }
    }
    if (best == UINT32_MAX) {
        return false;
    }
    b->tried |= (uint8_t)(1u << at);
    b->member = sb->holders[at];
    (*partner(p, b->member))++;
    return true;
}

static int add_items(const struct fetch *f, struct bt_buf *data)
{
    const struct seek *k = f->pull->seek;
    uint32_t block_tokens = f->pull->client->cfg.shape.block_tokens;
    int rc = BT_OK;

    for (uint32_t i = 0; rc == BT_OK && i < f->n_items; i++) {
        const struct seek_block *sb = &k->blocks[f->idx[i]];
        struct wire_store_item item = {.prefix = sb->prefix, .n_tokens = block_tokens};

        memcpy(item.key, sb->key.b, 16);
        memcpy(item.parent, sb->parent.b, 16);
        rc = wire_store_add_item(data, &item, k->ids + (size_t)f->idx[i] * block_tokens);
    }
    return rc;
}

static void send_get(struct fetch *f)
{
    const struct kv_blob_shape *shape = &f->pull->client->cfg.shape;
    struct wire_store m = {.type = WIRE_STORE_GET,
                           .req = f->req,
                           .n_items = f->n_items,
                           .n_layers = shape->n_layers,
                           .block_tokens = shape->block_tokens,
                           .layer_bytes = shape->layer_bytes};
    struct bt_buf data = {0};
    int rc = add_items(f, &data);

    if (f->l->incarnation != f->member->incarnation) {
        kv_link_close(f->l, BT_E_PEER_STALE, "another life of the node answers");
        bt_buf_fini(&data);
        return;
    }
    f->method = kv_link_method(f->l);
    if (f->method == BT_NET_METHOD_PUT) {
        f->method = BT_NET_METHOD_PULL; /* one-sided as well, with our completion as proof */
    }
    m.method = (uint8_t)f->method;
    memcpy(m.root, f->pull->seek->root.b, sizeof(m.root));
    if (rc != BT_OK || (f->method == BT_NET_METHOD_PULL && kv_link_rkey(f->l, NULL) != BT_OK)) {
        kv_link_close(f->l, BT_E_PEER_LOST, "cannot ask");
    } else {
        f->sent = true;
        f->pull->asked_ns = f->pull->asked_ns ? f->pull->asked_ns : bt_now_ns();
        kv_link_send(f->l, &m, bt_buf_str(&data));
    }
    bt_buf_fini(&data);
}

/* Blocks of n_good that are to be asked of `m`, from `from` on, in one fetch. False: none left. */
static bool start_fetch(struct pull *p, const struct bt_member *m, uint32_t *from)
{
    struct kv_link *l = NULL;
    struct fetch *f = NULL;
    uint32_t i = *from;

    for (; i < p->n_good; i++) {
        struct block *b = &p->blocks[i];

        if (b->member != m || b->fetch || b->layer == p->client->cfg.shape.n_layers) {
            continue;
        }
        if (!f) {
            l = kv_client_dial_holder(p->client, m);
            f = l ? bt_calloc(1, sizeof(*f)) : NULL;
            if (!f) {
                *from = i + 1;
                kv_pull_fail_block(p, i);
                return true;
            }
        }
        f->idx[f->n_items] = i;
        b->fetch = f;
        b->item = f->n_items++;
        b->in_layer = 0;
        b->offset = 0;
        if (f->n_items == WIRE_STORE_MAX_ITEMS) {
            i++;
            break;
        }
    }
    *from = i;
    if (!f) {
        return false;
    }
    f->pull = p;
    f->l = l;
    f->member = m;
    f->req = p->client->next_req++;
    f->n_left = f->n_items;
    bt_list_init(&f->link);
    bt_list_push_back(&kv_client_server(l)->fetches, &f->link);
    p->n_fetches++;
    if (l->greeted) {
        send_get(f);
    }
    return true;
}

static void start_fetches(struct pull *p)
{
    for (uint32_t k = 0; k < p->n_partners; k++) {
        uint32_t from = 0;

        while (start_fetch(p, p->partners[k].member, &from)) {
        }
    }
}

/* The holder has failed it: the next one, or the run ends here. */
void kv_pull_fail_block(struct pull *p, uint32_t i)
{
    struct block *b = &p->blocks[i];

    leave_fetch(p, b);
    if (i >= p->n_good || p->ending) {
        kv_pull_check_over(p);
        return;
    }
    b->member = NULL;
    p->n_ops++; /* what follows may fail blocks as well */
    if (choose(p, i)) {
        uint32_t from = i;

        count(&p->client->stats.failovers, 1);
        start_fetch(p, b->member, &from);
    } else {
        count(&p->client->stats.lost, 1);
        cut(p, i);
    }
    p->n_ops--;
    kv_pull_check_over(p);
}

/* ---- what comes in ---- */

static struct fetch *find_fetch(struct kv_link *l, uint64_t req)
{
    struct server *s = l->user;

    if (s) {
        bt_list_for_each (it, &s->fetches) {
            struct fetch *f = BT_LIST_ENTRY(it, struct fetch, link);

            if (f->req == req && f->sent) {
                return f;
            }
        }
    }
    return NULL;
}

/* The block that an answer speaks of; NULL: it was given up, or the peer broke the rules. */
static struct block *find_block(struct kv_link *l, const struct wire_store *m, struct fetch **ret)
{
    struct fetch *f = find_fetch(l, m->req);
    struct block *b;

    if (!f) {
        return NULL;
    }
    if (m->item >= f->n_items) {
        kv_link_violation(l, "item that was not asked for", m);
        return NULL;
    }
    *ret = f;
    b = &f->pull->blocks[f->idx[m->item]];
    return b->fetch == f && b->item == m->item ? b : NULL;
}

static bool take_places(struct block *b, struct kv_link *l, uint32_t n, struct bt_str data)
{
    size_t layer_bytes = b->fetch->pull->client->cfg.shape.layer_bytes;

    b->places = bt_calloc(2 * (size_t)n, sizeof(*b->places));
    for (uint32_t i = 0; b->places && i < 2 * n; i++) {
        b->places[i] = wire_store_u64(data.p + 8 * (size_t)i);
        if (i % 2 == 0 && (b->places[i] > l->bytes || layer_bytes > l->bytes - b->places[i])) {
            return false;
        }
    }
    return b->places != NULL;
}

void kv_client_on_have(struct kv_client *c,
                       struct kv_link *l,
                       const struct wire_store *m,
                       struct bt_str data)
{
    struct fetch *f;
    struct block *b = find_block(l, m, &f);

    if (!b) {
        return;
    }
    if (b->have || m->n_layers != c->cfg.shape.n_layers || data.n != 16 * (size_t)m->n_layers ||
        !take_places(b, l, m->n_layers, data)) {
        kv_link_violation(l, "a block that is not as asked for", m);
        return;
    }
    b->have = true;
    if (f->method == BT_NET_METHOD_PULL) {
        kv_links_pump(&c->links);
    }
}

static bool has_others(struct kv_link *l, const struct fetch *f)
{
    const struct server *s = l->user;

    return s->fetches.next != &f->link || s->fetches.prev != &f->link;
}

void kv_client_on_miss(struct kv_client *c, struct kv_link *l, const struct wire_store *m)
{
    struct fetch *f;
    struct block *b = find_block(l, m, &f);
    struct bt_block_key key;
    uint32_t i;

    if (!b) {
        return;
    }
    if (b->have) {
        kv_link_violation(l, "a miss of what is there", m);
        return;
    }
    i = f->idx[m->item];
    if (m->rc == BT_E_EXHAUSTED && (f->n_left > 1 || has_others(l, f))) {
        leave_fetch(f->pull,
                    b); /* the holder's limit for us: asked again when something else is through */
        return;
    }
    if (m->rc != BT_E_EXHAUSTED) {
        memcpy(key.b, f->pull->seek->blocks[i].key.b, sizeof(key.b));
        bt_blockmap_disown(c->cfg.blockmap, &key, f->member->name, f->member->incarnation);
    }
    kv_pull_fail_block(f->pull, i);
}

void kv_client_on_data(struct kv_client *c,
                       struct kv_link *l,
                       const struct wire_store *m,
                       struct bt_str data)
{
    size_t layer_bytes = c->cfg.shape.layer_bytes;
    struct fetch *f;
    struct block *b = find_block(l, m, &f);

    if (!b) {
        return;
    }
    if (f->method != BT_NET_METHOD_MESSAGE || !b->have || m->layer != b->in_layer ||
        m->offset != b->offset || data.n == 0 || data.n > layer_bytes - b->offset) {
        kv_link_violation(l, "a part that does not follow on", m);
        return;
    }
    if (b->in_layer >= b->layer) { /* else placed before, from another holder */
        struct kv_blob_place to = place_of(f->pull, f->idx[m->item]);

        if (b->offset == 0) {
            kv_copy_begin(&b->copy);
        }
        kv_blob_scatter_part(&b->copy, &to, (int)b->layer, b->offset, data);
    }
    b->offset += data.n;
    if (b->offset < layer_bytes) {
        return;
    }
    b->offset = 0;
    if (b->in_layer++ >= b->layer) {
        take_layer(f->pull, f->idx[m->item], kv_copy_end(&b->copy));
    }
}

void kv_client_loads_ready(struct kv_client *c, struct kv_link *l)
{
    struct server *s = l->user;

    if (!s) {
        return;
    }
    bt_list_for_each_safe (it, &s->fetches) {
        struct fetch *f = BT_LIST_ENTRY(it, struct fetch, link);

        if (!f->sent && !l->closing) {
            send_get(f);
        }
    }
}

/* No read is under way on it any more. */
void kv_client_loads_closed(struct kv_client *c, struct server *s)
{
    while (!bt_list_empty(&s->fetches)) {
        struct fetch *f = BT_LIST_ENTRY(s->fetches.next, struct fetch, link);
        struct pull *p = f->pull;

        p->n_ops++; /* both stay until the end */
        f->n_left++;
        for (uint32_t i = 0; i < f->n_items; i++) {
            struct block *b = &p->blocks[f->idx[i]];

            if (b->fetch == f && b->item == i) {
                kv_pull_fail_block(p, f->idx[i]);
            }
        }
        BT_BUG_ON(f->n_left != 1);
        kv_fetch_release(f);
        p->n_ops--;
        kv_pull_check_over(p);
    }
}

/* ---- reading ---- */

struct reading {
    struct pull *pull;
    uint32_t idx;
    struct kv_link *l;
    size_t bytes;
};

static void on_read(void *arg, int rc)
{
    struct reading *r = arg;
    struct pull *p = r->pull;
    struct block *b = &p->blocks[r->idx];
    uint32_t i = r->idx;

    r->l->out_bytes -= r->bytes;
    b->reading = false;
    p->n_ops--;
    kv_links_pump(&p->client->links);
    if (rc == BT_OK) {
        b->offset += r->bytes;
    } else {
        kv_link_close(r->l, BT_E_PEER_LOST, "the holder's memory cannot be read");
    }
    free(r);
    if (i >= p->n_good) { /* given up meanwhile */
        leave_fetch(p, b);
        kv_pull_check_over(p);
    } else if (rc == BT_OK && b->offset == p->client->cfg.shape.layer_bytes) {
        place_layer(p, i, b->buf);
    }
}

/* The block that is furthest behind of those that can be read. */
static struct block *next_block(struct pull *p)
{
    struct block *best = NULL;

    for (uint32_t i = 0; i < p->n_good; i++) {
        struct block *b = &p->blocks[i];

        if (b->have && !b->reading && b->fetch->method == BT_NET_METHOD_PULL &&
            !b->fetch->l->closing && b->fetch->l->out_bytes < KV_LINK_INFLIGHT_BYTES &&
            (!best || b->layer < best->layer)) {
            best = b;
        }
    }
    return best;
}

/* One piece, or a layer where it can be seen. False: nothing to read now; the pull may be gone. */
static bool read_piece(struct pull *p, struct block *b, size_t *budget)
{
    size_t layer_bytes = p->client->cfg.shape.layer_bytes;
    struct kv_link *l = b->fetch->l;
    uint64_t from = l->base + b->places[2 * b->layer] + b->offset;
    const void *view = b->offset == 0 ? bt_net_view(l->net, from, layer_bytes) : NULL;
    struct reading *r;

    if (view) {
        *budget -= BT_MIN(*budget, layer_bytes);
        place_layer(p, (uint32_t)(b - p->blocks), view);
        return true;
    }
    r = bt_calloc(1, sizeof(*r));
    if (!b->buf) {
        b->buf = buf_get(p->client);
    }
    if (!r || !b->buf) {
        free(r);
        kv_pull_fail_block(p, (uint32_t)(b - p->blocks));
        return false;
    }
    *r = (struct reading){p, (uint32_t)(b - p->blocks), l,
                          BT_MIN(layer_bytes - b->offset, (size_t)KV_LINK_PIECE_BYTES)};
    *budget -= BT_MIN(*budget, r->bytes);
    b->reading = true;
    p->n_ops++;
    l->out_bytes += r->bytes;
    if (bt_net_get(l->net, b->buf + b->offset, from, r->bytes, l->rkey, on_read, r) != BT_OK) {
        on_read(r, BT_E_PEER_LOST);
        return false;
    }
    return true;
}

/* Those that wait are asked for again. */
static void ask_again(struct kv_client *c)
{
    bt_list_for_each_safe (it, &c->loads) {
        struct pull *p = BT_LIST_ENTRY(it, struct pull, link);

        if (p->again && !p->ending) {
            p->again = false;
            p->n_ops++;
            start_fetches(p);
            p->n_ops--;
            kv_pull_check_over(p);
        }
    }
}

bool kv_client_pump_loads(struct kv_client *c, size_t *budget)
{
    bool again = true;

    ask_again(c);
    /* A piece of each in turn: who is first may be gone afterwards. */
    while (*budget > 0 && again) {
        again = false;
        bt_list_for_each_safe (it, &c->loads) {
            struct pull *p = BT_LIST_ENTRY(it, struct pull, link);
            struct block *b = next_block(p);

            if (b && *budget > 0) {
                read_piece(p, b, budget);
                again = true;
            }
        }
    }
    return *budget == 0;
}

/* ---- begin and give up ---- */

static void on_limit(struct bt_net_timer *t)
{
    struct pull *p = BT_CONTAINER_OF(t, struct pull, limit);

    BT_WARN("store_load", "blocks=%u layers=%u msg=\"takes too long, given up\"", p->n_good,
            p->cur);
    cut(p, 0);
    kv_pull_check_over(p);
}

static void on_start(struct bt_msg *msg, void *consumer)
{
    struct pull *p = BT_CONTAINER_OF(msg, struct pull, start_msg);
    struct kv_client *c = p->client;

    bt_list_push_back(&c->loads, &p->link);
    p->start_ns = bt_now_ns();
    bt_net_timer_start(c->links.net, &p->limit, p->start_ns + c->cfg.load_limit_ns);
    for (uint32_t i = 0; i < p->n_good; i++) {
        if (!choose(p, i)) {
            cut(p, i);
        }
    }
    p->n_ops++; /* ours: the pull stays until all are asked */
    start_fetches(p);
    p->n_ops--;
    kv_pull_check_over(p);
}

static void on_cancel(struct bt_msg *msg, void *consumer)
{
    struct pull *p = BT_CONTAINER_OF(msg, struct pull, cancel_msg);

    p->cancel_seen = true;
    cut(p, 0);
    kv_pull_check_over(p);
}

void kv_client_load(struct kv_source *src, struct kv_load *l)
{
    struct kv_client *c = BT_CONTAINER_OF(src, struct kv_client, src);
    struct seek *k = l->find->priv;
    uint32_t n = k ? BT_MIN(l->n_blocks, k->n) : 0;
    struct pull *p = n ? bt_calloc(1, sizeof(*p) + n * sizeof(p->blocks[0])) : NULL;

    atomic_store_explicit(&l->layers_ready, 0, memory_order_relaxed);
    atomic_store_explicit(&l->n_good, p ? n : 0, memory_order_release);
    l->priv = p;
    if (!p) {
        l->done(l);
        return;
    }
    p->client = c;
    p->load = l;
    p->seek = k;
    p->n = p->n_good = n;
    p->limit = (struct bt_net_timer){.deadline_ns = BT_NEVER_NS, .fn = on_limit};
    bt_list_init(&p->link);
    bt_list_init(&p->start_msg.link);
    bt_list_init(&p->cancel_msg.link);
    p->start_msg.handle = on_start;
    p->cancel_msg.handle = on_cancel;
    pthread_mutex_lock(&c->lock);
    c->n_alive++;
    pthread_mutex_unlock(&c->lock);
    bt_net_post(c->links.net, &p->start_msg);
}

void kv_client_load_cancel(struct kv_source *src, struct kv_load *l)
{
    struct kv_client *c = BT_CONTAINER_OF(src, struct kv_client, src);
    struct pull *p;

    pthread_mutex_lock(&c->lock);
    p = l->priv;
    if (p && !p->cancelled) {
        p->cancelled = true;
        bt_net_post(c->links.net, &p->cancel_msg);
    }
    pthread_mutex_unlock(&c->lock);
}
