/* The prefill node's movers: what to announce next, checksums, and for each method how bytes go.
 *
 * A page is announced when no token of it will be written any more: whole pages as the layers pass,
 * the last, partly filled one with the prompt's last token. A piece is a run of pages that are
 * neighbours in the pool, so its bytes in one layer are contiguous.
 *   pull     ANNOUNCE tells where the pieces are and their checksums; what was summed is still in a
 *            cache when D reads it: so sums stay 2 MiB ahead of what D says it has reached
 *   message  DATA carries one piece, the last part its sum; bounded bytes in flight
 *   put      the piece is written into D's pages, and PLACED follows when it is visible there */
#include "kvstore/handoff/handoff_int.h"

#include "common/obs/log.h"

#include <stdlib.h>

/* Into s->sealed: the pages of each layer that nothing writes any more. True: the prompt is
 * finished. */
static bool take_sealed(struct kv_send *s)
{
    const struct kv_layout *l = s->end.fmt->layout;
    bool finished;

    pthread_mutex_lock(&s->end.lock);
    finished = s->finished;
    for (int i = 0; i < l->n_layers; i++) {
        uint32_t pages = finished || s->done[i] >= s->n_tokens
                             ? s->n_pages
                             : s->done[i] / (uint32_t)l->page_tokens;

        s->sealed[i] = BT_MIN(pages, s->n_known);
    }
    pthread_mutex_unlock(&s->end.lock);
    return finished;
}

static const void *piece_bytes(const struct kv_send *s, uint32_t layer, const struct wire_piece *at)
{
    return kv_pool_page(s->end.fmt->pool, (int)layer, at->page);
}

static size_t piece_size(const struct kv_send *s, const struct wire_piece *at)
{
    return (size_t)at->n_pages * s->end.fmt->layout->page_stride;
}

/* The last part of a piece brings its sum: it is taken when the kernel has read the other parts,
 * from a cache. */
static bool sums_follow(const struct kv_send *s)
{
    return s->method == BT_NET_METHOD_MESSAGE && s->peer->version >= 4;
}

/* The run of neighbours that starts at prompt page `first`, checksummed unless it travels in
 * messages to who takes the sum behind them. False if the caller gave the pages away under us. */
static bool make_piece(struct kv_send *s,
                       uint32_t layer,
                       uint32_t first,
                       uint32_t end,
                       size_t max_bytes,
                       struct wire_piece *ret)
{
    size_t stride = s->end.fmt->layout->page_stride;
    uint32_t n = 1;

    while (first + n < end && s->pages[first + n] == s->pages[first] + n &&
           (n + 1) * stride <= max_bytes) {
        n++;
    }
    for (uint32_t i = first; i < first + n; i++) {
        if (kv_pool_generation(s->end.fmt->pool, s->pages[i]) != s->generations[i]) {
            BT_ERROR("handoff_page_lost", "page=%u msg=\"given away while it was being sent\"",
                     s->pages[i]);
            kv_send_fail(s, BT_E_INTERNAL, "a page was given away while it was being sent");
            return false;
        }
    }
    *ret = (struct wire_piece){
        .page = s->pages[first], .generation = s->generations[first], .n_pages = n};
    if (!sums_follow(s)) {
        ret->sum = kv_sum_cold(piece_bytes(s, layer, ret), n * stride);
    }
    return true;
}

static void head_of(const struct kv_send *s, enum wire_handoff_type type, struct wire_handoff *m)
{
    *m = (struct wire_handoff){
        .type = type, .id_hi = s->end.id.hi, .id_lo = s->end.id.lo, .ticket = s->ticket};
}

/* ---- pull ---- */

static bool
announce(struct kv_send *s, uint32_t layer, uint32_t end, uint32_t *used_pages, size_t *budget)
{
    size_t stride = s->end.fmt->layout->page_stride, bytes = 0;
    uint32_t at = s->sent[layer];
    struct wire_handoff m;

    head_of(s, WIRE_HANDOFF_ANNOUNCE, &m);
    m.layer = layer;
    m.first_page = at;
    while (at < end && m.n_pieces < WIRE_HANDOFF_MAX_PIECES && bytes<KV_LOT_BYTES && * budget> 0) {
        struct wire_piece *piece = &m.pieces[m.n_pieces];

        if (!make_piece(s, layer, at, end, KV_PIECE_BYTES, piece)) {
            return false;
        }
        m.n_pieces++;
        at += piece->n_pages;
        bytes += piece->n_pages * stride;
        *budget -= BT_MIN(*budget, piece->n_pages * stride);
    }
    s->announced += bytes;
    *used_pages = at - s->sent[layer];
    return kv_peer_send(s->peer, &m, (struct bt_str){0});
}

/* D can tell how far it is, and is far behind. */
static bool is_far_ahead(const struct kv_send *s)
{
    return s->peer->version >= 3 && s->announced - s->reached >= KV_AHEAD_BYTES;
}

void kv_send_reached(struct kv_send *s, const struct wire_handoff *m)
{
    if (s->method != BT_NET_METHOD_PULL || m->reached < s->reached || m->reached > s->announced) {
        kv_peer_violation(s->peer, "REACHED what was not announced", m);
        return;
    }
    s->reached = m->reached;
    if (s->state == KV_SEND_TICKETED) {
        kv_work_ready(s->end.h, &s->work);
    }
}

/* ---- message ---- */

/* One operation, or with put the few that make a piece. */
struct kv_out {
    struct kv_send *s;
    struct kv_peer *peer;
    size_t bytes;
    /* put */
    struct bt_list link; /* kv_send.outs */
    bool placed;
    uint32_t layer, first_page;
    struct wire_piece at;
    uint32_t n_puts;
    int rc;
};

static struct kv_out *out_new(struct kv_send *s, size_t bytes)
{
    struct kv_out *o = bt_calloc(1, sizeof(*o));

    if (!o) {
        kv_send_fail(s, BT_E_NOMEM, "handoff: out of memory");
        return NULL;
    }
    bt_list_init(&o->link);
    o->s = s;
    o->peer = s->peer;
    o->bytes = bytes;
    s->n_ops++;
    s->peer->out_bytes += bytes;
    return o;
}

static void out_end(struct kv_out *o)
{
    struct kv_send *s = o->s;
    struct kv_peer *p = o->peer;

    p->out_bytes -= o->bytes;
    bt_list_remove(&o->link);
    free(o);
    /* Room for everyone on this connection. */
    bt_list_for_each (it, &p->sends) {
        struct kv_send *other = BT_LIST_ENTRY(it, struct kv_send, peer_link);

        if (other->state == KV_SEND_TICKETED && other->method != BT_NET_METHOD_PULL) {
            kv_work_ready(p->h, &other->work);
        }
    }
    kv_send_op_done(s);
}

static void on_data_sent(void *arg, int rc)
{
    out_end(arg);
}

static bool send_part(struct kv_send *s, struct wire_handoff *m, size_t bytes)
{
    const char *from = piece_bytes(s, m->layer, &m->pieces[0]);
    char head[WIRE_HANDOFF_MAX_HEAD];
    size_t n = kv_peer_pack(s->peer, m, head);
    struct kv_out *o = out_new(s, bytes);

    if (!o) {
        return false;
    }
    if (s->peer->closing ||
        bt_net_send(s->peer->net, (struct bt_str){head, n},
                    (struct bt_str){from + m->offset, bytes}, on_data_sent, o) != BT_OK) {
        kv_peer_close(s->peer, BT_E_PEER_LOST, "cannot send");
        out_end(o);
        return false;
    }
    return true;
}

static bool send_data(struct kv_send *s,
                      uint32_t layer,
                      uint32_t first,
                      const struct wire_piece *piece,
                      uint16_t flags)
{
    const void *from = piece_bytes(s, layer, piece);
    size_t bytes = piece_size(s, piece), at = 0;
    struct wire_handoff m;

    head_of(s, WIRE_HANDOFF_DATA, &m);
    m.layer = layer;
    m.first_page = first;
    m.flags = flags;
    m.n_pieces = 1;
    m.pieces[0] = *piece;
    while (at < bytes) {
        size_t n = BT_MIN(bytes - at, (size_t)KV_DATA_PART_BYTES);

        m.offset = (uint32_t)at;
        if (at + n == bytes && sums_follow(s)) {
            m.pieces[0].sum = at == 0 ? kv_sum_cold(from, bytes) : kv_sum(from, bytes);
        }
        if (!send_part(s, &m, n)) {
            return false;
        }
        at += n;
    }
    return true;
}

/* ---- put ---- */

/* Flushes may come back in any order; D is told in the order of the pages. */
static void tell_placed(struct kv_send *s)
{
    while (!bt_list_empty(&s->outs) && s->peer &&
           (s->state == KV_SEND_TICKETED || s->state == KV_SEND_COMMITTED)) {
        struct kv_out *o = BT_LIST_ENTRY(s->outs.next, struct kv_out, link);
        struct wire_handoff m;

        if (!o->placed) {
            return;
        }
        head_of(s, WIRE_HANDOFF_PLACED, &m);
        m.layer = o->layer;
        m.first_page = o->first_page;
        m.n_pieces = 1;
        m.pieces[0] = o->at;
        kv_peer_send(s->peer, &m, (struct bt_str){0});
        out_end(o);
    }
}

void kv_send_drop_placed(struct kv_send *s)
{
    bt_list_for_each_safe (it, &s->outs) {
        struct kv_out *o = BT_LIST_ENTRY(it, struct kv_out, link);

        if (o->placed) {
            out_end(o);
        }
    }
}

static void on_placed(void *arg, int rc)
{
    struct kv_out *o = arg;
    struct kv_send *s = o->s;

    if (rc == BT_OK && o->rc == BT_OK &&
        (s->state == KV_SEND_TICKETED || s->state == KV_SEND_COMMITTED)) {
        o->placed = true;
        tell_placed(s);
    } else {
        out_end(o);
    }
}

static void on_put(void *arg, int rc)
{
    struct kv_out *o = arg;

    if (rc != BT_OK) {
        o->rc = rc;
    }
    if (--o->n_puts == 0) {
        if (o->rc != BT_OK || o->peer->closing ||
            bt_net_flush(o->peer->net, on_placed, o) != BT_OK) {
            kv_peer_close(o->peer, BT_E_PEER_LOST, "cannot put");
            out_end(o);
        }
    }
}

/* One put per run of neighbours in D's pool. */
static bool
put_piece(struct kv_send *s, uint32_t layer, uint32_t first, const struct wire_piece *piece)
{
    const struct kv_layout *d = &s->peer->layout;
    const char *from = piece_bytes(s, layer, piece);
    struct kv_out *o = out_new(s, piece_size(s, piece));

    if (!o) {
        return false;
    }
    o->layer = layer;
    o->first_page = first;
    o->at = *piece;
    bt_list_push_back(&s->outs, &o->link);
    o->n_puts = 1; /* ours, until all are posted */
    for (uint32_t i = 0; i < piece->n_pages;) {
        const uint32_t *to = &s->d_pages[first + i - s->first_page];
        uint32_t n = 1;

        while (i + n < piece->n_pages && to[n] == to[0] + n) {
            n++;
        }
        o->n_puts++;
        if (s->peer->closing || bt_net_put(s->peer->net, from + (size_t)i * d->page_stride,
                                           s->peer->base + kv_layout_offset(d, (int)layer, to[0]),
                                           n * d->page_stride, s->d_rkey, on_put, o) != BT_OK) {
            o->rc = BT_E_PEER_LOST;
            o->n_puts--;
            break;
        }
        i += n;
    }
    on_put(o, o->rc);
    return s->peer && !s->peer->closing;
}

/* ---- the pump ---- */

static void commit(struct kv_send *s)
{
    struct wire_handoff m;

    head_of(s, WIRE_HANDOFF_COMMIT, &m);
    m.n_tokens = s->n_tokens;
    m.n_first = s->first.n_tokens;
    memcpy(m.first, s->first.ids, sizeof(m.first));
    kv_send_set_state(s, KV_SEND_COMMITTED);
    bt_net_timer_start(s->end.h->net, &s->timer, bt_deadline_ns(KV_REASK_NS));
    kv_peer_send(s->peer, &m, (struct bt_str){0});
}

/* Sends something of this layer. False: nothing more now (no room, failed). */
static bool move_layer(struct kv_send *s, uint32_t layer, uint32_t end, size_t *budget)
{
    struct wire_piece piece;
    uint32_t n = 0;

    if (s->method == BT_NET_METHOD_PULL) {
        if (is_far_ahead(s) || !announce(s, layer, end, &n, budget)) {
            return false;
        }
        s->sent[layer] += n;
        return true;
    }
    if (s->peer->out_bytes >= s->end.h->cfg.max_inflight_bytes) {
        return false;
    }
    if (!make_piece(s, layer, s->sent[layer], end,
                    s->method == BT_NET_METHOD_PUT ? KV_PIECE_BYTES : KV_DATA_PIECE_BYTES,
                    &piece)) {
        return false;
    }
    *budget -= BT_MIN(*budget, piece_size(s, &piece));
    n = s->sent[layer];
    s->sent[layer] += piece.n_pages;
    return s->method == BT_NET_METHOD_PUT ? put_piece(s, layer, n, &piece)
                                          : send_data(s, layer, n, &piece, 0);
}

bool kv_send_move(struct kv_work *w, size_t *budget)
{
    struct kv_send *s = BT_CONTAINER_OF(w, struct kv_send, work);
    uint32_t n_layers = (uint32_t)s->end.fmt->layout->n_layers;
    bool all = true, finished;

    if (s->state != KV_SEND_TICKETED || s->peer->closing) {
        return false;
    }
    finished = take_sealed(s);
    for (uint32_t l = 0; l < n_layers; l++) {
        uint32_t end = s->sealed[l];

        while (s->sent[l] < end) {
            if (*budget == 0) {
                return true;
            }
            if (!move_layer(s, l, end, budget)) {
                return false;
            }
        }
        all = all && end == s->n_pages;
    }
    if (all && finished) {
        commit(s);
    }
    return false;
}

void kv_send_resend(struct kv_send *s, const struct wire_handoff *m)
{
    struct wire_piece piece;
    struct wire_handoff again;

    if (m->layer >= (uint32_t)s->end.fmt->layout->n_layers || m->n_pages == 0 ||
        m->n_pages > s->n_pages || m->first_page > s->n_pages - m->n_pages ||
        m->first_page < s->first_page || m->first_page + m->n_pages > s->sent[m->layer] ||
        s->method == BT_NET_METHOD_PUT) {
        kv_peer_violation(s->peer, "RESEND of what was not announced", m);
        return;
    }
    if (!make_piece(s, m->layer, m->first_page, m->first_page + m->n_pages, SIZE_MAX, &piece)) {
        return;
    }
    if (piece.n_pages != m->n_pages) {
        kv_peer_violation(s->peer, "RESEND across pieces", m);
        return;
    }
    if (s->method == BT_NET_METHOD_MESSAGE) {
        send_data(s, m->layer, m->first_page, &piece, WIRE_HANDOFF_AGAIN);
        return;
    }
    head_of(s, WIRE_HANDOFF_ANNOUNCE, &again);
    again.layer = m->layer;
    again.first_page = m->first_page;
    again.flags = WIRE_HANDOFF_AGAIN;
    again.n_pieces = 1;
    again.pieces[0] = piece;
    kv_peer_send(s->peer, &again, (struct bt_str){0});
}
