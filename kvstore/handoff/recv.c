/* The decode node's end: connect, ticket, states, abort, acknowledgement. How bytes get into the
 * pages: recv_move.c.
 *
 * Proof before pages are given up: with pull and message nobody but this thread and the operations
 * it posted writes them, so our own completions are the proof; with put the prefill node writes
 * them, so it is its ABORTED, or the death of the connection.
 *
 * After a commit the object is gone at once; a small record stays until the prefill node has
 * confirmed the ACK, and calls it again if the connection was lost in between, so that its lease
 * ends early. */
#include "kvstore/handoff/handoff_int.h"

#include "common/obs/log.h"

#include <stdio.h>
#include <stdlib.h>

#define CONFIRM_RETRY_NS (1 * BT_NS_PER_S)

void kv_recv_set_state(struct kv_recv *r, enum kv_recv_state state)
{
    struct kv_handoff *h = r->end.h;

    BT_BUG_ON(!kv_recv_edge_ok(r->state, state));
    if (state == KV_RECV_ABORTING) {
        __atomic_add_fetch(&h->n_aborting, 1, __ATOMIC_RELAXED);
    }
    if (r->state == KV_RECV_ABORTING) {
        __atomic_sub_fetch(&h->n_aborting, 1, __ATOMIC_RELAXED);
    }
    r->state = state;
}

static void head_of(const struct kv_recv *r, enum wire_handoff_type type, struct wire_handoff *m)
{
    *m = (struct wire_handoff){
        .type = type, .id_hi = r->end.id.hi, .id_lo = r->end.id.lo, .ticket = r->ticket};
}

static void unbind(struct kv_recv *r)
{
    if (r->peer) {
        bt_list_remove(&r->peer_link);
        r->peer = NULL;
    }
}

static void drop_pieces(struct bt_list *list)
{
    struct bt_list *it;

    while ((it = bt_list_pop_front(list)) != NULL) {
        kv_recv_piece_free(BT_LIST_ENTRY(it, struct kv_piece, link));
    }
}

static void drop_part(struct kv_recv *r)
{
    if (r->part) {
        kv_recv_piece_free(r->part);
        r->part = NULL;
    }
}

static void finish(struct kv_recv *r, int rc, const char *msg)
{
    BT_BUG_ON(r->n_ops != 0);
    bt_net_timer_stop(&r->timer);
    kv_work_drop(&r->work);
    drop_pieces(&r->pieces);
    drop_pieces(&r->again);
    drop_pieces(&r->late);
    drop_part(r);
    unbind(r);
    bt_net_mem_unregister(r->mem);
    r->mem = NULL;
    kv_recv_set_state(r, KV_RECV_DONE);
    kv_end_finish(&r->end, rc, msg);
}

static void deliver(struct kv_end *e)
{
    struct kv_recv *r = BT_CONTAINER_OF(e, struct kv_recv, end);
    struct kv_recv_events ev = r->events;
    struct kv_first first = r->first;
    char text[sizeof(e->end_msg)];
    int rc = e->end_rc;

    memcpy(text, e->end_msg, sizeof(text));
    ev.done(ev.arg, rc, text, rc == BT_OK ? &first : NULL);
}

/* ---- confirmation of the ACK ---- */

void kv_confirm_free(struct kv_confirm *c)
{
    kv_format_drop(c->fmt);
    free(c->peer_address);
    free(c);
}

static void send_ack(struct kv_peer *p, struct kv_handoff_id id, uint32_t ticket)
{
    struct wire_handoff m = {
        .type = WIRE_HANDOFF_ACK, .id_hi = id.hi, .id_lo = id.lo, .ticket = ticket};

    kv_peer_send(p, &m, (struct bt_str){0});
}

/* Without memory for the record the ACK is sent once and the lease does the rest. */
static void remember_ack(struct kv_recv *r)
{
    struct kv_handoff *h = r->end.h;
    struct kv_confirm *c = bt_calloc(1, sizeof(*c));

    if (!c) {
        return;
    }
    c->peer_address = strdup(r->peer_address);
    if (!c->peer_address) {
        free(c);
        return;
    }
    c->fmt = kv_format_use(r->end.fmt);
    c->id = r->end.id;
    c->ticket = r->ticket;
    c->peer_incarnation = r->peer_incarnation;
    c->deadline_ns = bt_deadline_ns(h->cfg.lease_ns);
    if (bt_list_empty(&h->confirms)) {
        bt_net_timer_start(h->net, &h->confirm_timer, bt_deadline_ns(CONFIRM_RETRY_NS));
    }
    bt_list_push_back(&h->confirms, &c->link);
}

static struct kv_confirm *
find_confirm(struct kv_handoff *h, struct kv_handoff_id id, uint32_t ticket)
{
    bt_list_for_each (it, &h->confirms) {
        struct kv_confirm *c = BT_LIST_ENTRY(it, struct kv_confirm, link);

        if (c->ticket == ticket && kv_id_eq(c->id, id)) {
            return c;
        }
    }
    return NULL;
}

static void drop_confirm(struct kv_confirm *c)
{
    bt_list_remove(&c->link);
    kv_confirm_free(c);
}

/* Every second: what is too old is forgotten, for the rest the ACK is sent once more. */
void kv_recv_on_confirm_timer(struct bt_net_timer *t)
{
    struct kv_handoff *h = BT_CONTAINER_OF(t, struct kv_handoff, confirm_timer);
    uint64_t now = bt_now_ns();

    bt_list_for_each_safe (it, &h->confirms) {
        struct kv_confirm *c = BT_LIST_ENTRY(it, struct kv_confirm, link);
        struct kv_peer *p =
            c->deadline_ns > now ? kv_peer_dial(h, c->fmt, c->peer_address, NULL) : NULL;

        if (!p || (p->greeted && p->incarnation != c->peer_incarnation)) {
            drop_confirm(c);
        } else if (p->greeted) {
            send_ack(p, c->id, c->ticket);
        }
    }
    if (!bt_list_empty(&h->confirms)) {
        bt_net_timer_start(h->net, t, now + CONFIRM_RETRY_NS);
    }
}

void kv_recv_confirm_peer_ready(struct kv_peer *p)
{
    if (!p->dialed) {
        return;
    }
    bt_list_for_each (it, &p->h->confirms) {
        struct kv_confirm *c = BT_LIST_ENTRY(it, struct kv_confirm, link);

        if (c->peer_incarnation == p->incarnation && strcmp(c->peer_address, p->dialed) == 0) {
            send_ack(p, c->id, c->ticket);
        }
    }
}

/* ---- ends ---- */

void kv_recv_check_end(struct kv_recv *r)
{
    uint64_t want = (uint64_t)(r->p_pages - r->p_first) * (uint64_t)r->end.fmt->layout->n_layers;

    if (r->n_ops > 0) {
        return;
    }
    if (r->state == KV_RECV_FILLING && r->committed && r->n_placed == want) {
        remember_ack(r);
        send_ack(r->peer, r->end.id, r->ticket);
        finish(r, BT_OK, "");
    } else if (r->state == KV_RECV_ABORTING &&
               (r->method != BT_NET_METHOD_PUT || r->aborted_seen || !r->peer)) {
        if (r->owe_aborted && r->peer) {
            struct wire_handoff m;

            head_of(r, WIRE_HANDOFF_ABORTED, &m);
            kv_peer_send(r->peer, &m, (struct bt_str){0});
        }
        finish(r, r->why_rc, r->why);
    }
}

/* Gives it up. P is told unless it told us or is gone. */
static void give_up(struct kv_recv *r, int rc, const char *msg, bool tell)
{
    bool ticket_out = r->state == KV_RECV_ADVERTISED || r->state == KV_RECV_FILLING;

    if (r->state == KV_RECV_ABORTING || r->state == KV_RECV_DONE) {
        return;
    }
    r->why_rc = rc;
    snprintf(r->why, sizeof(r->why), "%s", msg);
    kv_work_drop(&r->work);
    drop_pieces(&r->pieces);
    kv_recv_set_state(r, KV_RECV_ABORTING);
    if (tell && ticket_out && r->peer) {
        struct wire_handoff m;

        head_of(r, WIRE_HANDOFF_ABORT, &m);
        m.rc = rc;
        m.text = bt_str_of(msg);
        kv_peer_send(r->peer, &m, (struct bt_str){0});
    }
    if (!ticket_out) {
        r->aborted_seen = true;
    }
    /* Own operations that do not come back, or an ABORTED that does not: then the connection goes.
     */
    bt_net_timer_start(r->end.h->net, &r->timer, bt_deadline_ns(r->end.h->cfg.silence_ns));
    kv_recv_check_end(r);
}

void kv_recv_fail(struct kv_recv *r, int rc, const char *msg)
{
    give_up(r, rc, msg, true);
}

static void on_timer(struct bt_net_timer *t)
{
    struct kv_recv *r = BT_CONTAINER_OF(t, struct kv_recv, timer);

    if (r->state == KV_RECV_ABORTING && r->peer) {
        kv_peer_close(r->peer, BT_E_PEER_LOST, "an abort was not answered");
    }
}

/* ---- connection and ticket ---- */

static void bind_peer(struct kv_recv *r)
{
    struct bt_err err = {0};
    struct kv_peer *p = kv_peer_dial(r->end.h, r->end.fmt, r->peer_address, &err);

    /* An open connection to an earlier life of the node is of no use any more. */
    if (p && p->greeted && p->incarnation < r->peer_incarnation) {
        kv_peer_close(p, BT_E_PEER_LOST, "a newer incarnation of the node has appeared");
        p = kv_peer_dial(r->end.h, r->end.fmt, r->peer_address, &err);
    }
    if (!p) {
        give_up(r, err.rc < 0 ? (int)err.rc : BT_E_UNAVAILABLE, err.msg, false);
        return;
    }
    r->peer = p;
    bt_list_push_back(&p->recvs, &r->peer_link);
    kv_peer_watch(p);
    if (p->greeted) {
        kv_recv_peer_ready(r);
    }
}

static enum bt_net_method choose_method(const struct kv_recv *r)
{
    const struct kv_peer *p = r->peer;
    enum bt_net_method m = bt_net_peer_method(p->net);

    if (r->end.h->forced_method < 0 && p->their_method != WIRE_HANDOFF_NO_METHOD) {
        m = (enum bt_net_method)p->their_method;
    }
    /* A put writes pages as they are, and an old peer all of them. */
    if (m == BT_NET_METHOD_PUT && (p->layout.page_tokens != r->end.fmt->layout->page_tokens ||
                                   (r->n_have > 0 && p->version < 2))) {
        m = BT_NET_METHOD_MESSAGE;
    }
    return m;
}

/* PUT: our pages and their generations, and a key that dies with the ticket. */
static int put_ticket(struct kv_recv *r, struct wire_handoff *m, struct bt_buf *data)
{
    const struct bt_mem_region *region = kv_pool_region(r->end.fmt->pool);
    int rc =
        bt_net_mem_register(r->end.h->net, region->base, region->bytes, &r->mem, &m->key, NULL);

    m->n_pages = r->n_pages - r->first_page;
    for (uint32_t i = r->first_page; rc == BT_OK && i < r->n_pages; i++) {
        uint32_t v[2] = {r->pages[i], r->generations[i]};
        uint8_t b[8];

        for (int k = 0; k < 8; k++) {
            b[k] = (uint8_t)(v[k / 4] >> (8 * (k % 4)));
        }
        rc = bt_buf_add(data, b, sizeof(b));
    }
    return rc;
}

/* Where the relay finds the prompt, and the ids if it may keep it. */
static int origin_ticket(struct kv_recv *r, struct wire_handoff *m, struct bt_buf *data)
{
    int rc = BT_OK;

    m->origin_name = bt_str_of(r->origin_name);
    m->origin_address = bt_str_of(r->origin_address);
    m->origin_incarnation = r->origin_incarnation;
    if (!r->ids) {
        return BT_OK;
    }
    m->block_tokens = r->block_tokens;
    memcpy(m->root, r->root.b, sizeof(m->root));
    for (uint32_t i = 0; rc == BT_OK && i < r->n_tokens; i++) {
        uint32_t v = (uint32_t)r->ids[i];
        uint8_t b[4] = {(uint8_t)v, (uint8_t)(v >> 8), (uint8_t)(v >> 16), (uint8_t)(v >> 24)};

        rc = bt_buf_add(data, b, sizeof(b));
    }
    return rc;
}

static void on_ticket_sent(void *arg, int rc)
{
    free(arg);
}

static bool send_ticket(struct kv_recv *r)
{
    struct wire_handoff m;
    struct bt_buf data = {0};
    char head[WIRE_HANDOFF_MAX_HEAD];
    size_t n;
    int rc = BT_OK;

    head_of(r, WIRE_HANDOFF_TICKET, &m);
    m.n_tokens = r->n_tokens;
    m.n_have = r->n_have;
    m.method = (uint8_t)r->method;
    if (r->method == BT_NET_METHOD_PUT) {
        rc = put_ticket(r, &m, &data);
    }
    if (rc == BT_OK && r->origin_name) {
        rc = origin_ticket(r, &m, &data);
    }
    if (rc == BT_OK && !r->peer->closing) {
        n = kv_peer_pack(r->peer, &m, head);
        rc = bt_net_send(r->peer->net, (struct bt_str){head, n}, bt_buf_str(&data), on_ticket_sent,
                         data.p);
    }
    if (rc != BT_OK) {
        bt_buf_fini(&data);
    }
    return rc == BT_OK;
}

/* The other side has greeted. */
void kv_recv_peer_ready(struct kv_recv *r)
{
    struct kv_peer *p = r->peer;
    struct kv_handoff *h = r->end.h;
    struct bt_err err;

    r->transport = bt_net_peer_transport(p->net);
    if (p->incarnation != r->peer_incarnation) {
        BT_FAIL(&err, BT_E_PEER_STALE, "%s at %s has incarnation %llu, the ticket is for %llu",
                p->name, r->peer_address, (unsigned long long)p->incarnation,
                (unsigned long long)r->peer_incarnation);
        give_up(r, BT_E_PEER_STALE, err.msg, false);
        return;
    }
    if (strcmp(p->name, r->peer_name) != 0) {
        BT_FAIL(&err, BT_E_PEER_STALE, "the node at %s is %s, the ticket is for %.100s",
                r->peer_address, p->name, r->peer_name);
        give_up(r, BT_E_PEER_STALE, err.msg, false);
        return;
    }
    if (r->origin_name && p->version < 2) {
        give_up(r, BT_E_INCOMPATIBLE, "the relay speaks wire version 1, which knows no origin",
                false);
        return;
    }
    if (!p->rkey && p->key_bytes) {
        int rc = bt_net_rkey_unpack(p->net, (struct bt_str){p->key, p->key_bytes}, &p->rkey, &err);

        if (rc != BT_OK) {
            give_up(r, rc, err.msg, false);
            return;
        }
    }
    r->method = choose_method(r);
    r->p_pages = kv_layout_pages_for(&p->layout, r->n_tokens);
    r->p_first = p->version < 2 ? 0 : r->n_have / (uint32_t)p->layout.page_tokens;
    for (int l = 0; l < r->end.fmt->layout->n_layers; l++) {
        r->got[l] = r->placed[l] = r->p_first;
    }
    r->ticket = h->next_ticket++;
    if (h->next_ticket == 0) {
        h->next_ticket = 1;
    }
    kv_recv_set_state(r, KV_RECV_ADVERTISED);
    if (!send_ticket(r)) {
        give_up(r, BT_E_PEER_LOST, "the ticket cannot be sent", false);
    }
}

void kv_recv_peer_lost(struct kv_recv *r, int rc, const char *msg)
{
    bool untouched = r->state == KV_RECV_CONNECTING || r->state == KV_RECV_ADVERTISED;

    BT_BUG_ON(r->n_ops != 0);
    unbind(r);
    if (untouched && !r->retried && rc == BT_E_PEER_LOST && !r->end.h->stopping) {
        /* It may just have been restarted: one more connection. */
        r->retried = true;
        bt_net_mem_unregister(r->mem);
        r->mem = NULL;
        if (r->state == KV_RECV_ADVERTISED) {
            kv_recv_set_state(r, KV_RECV_CONNECTING);
        }
        bind_peer(r);
        return;
    }
    give_up(r, rc, msg, false);
    kv_recv_check_end(r);
}

/* ---- messages ---- */

/* Layer, order and range against what was announced before. False: the peer is closed. */
static bool check_pieces(struct kv_recv *r, const struct wire_handoff *m)
{
    uint64_t n = 0;

    for (uint32_t i = 0; i < m->n_pieces; i++) {
        const struct wire_piece *at = &m->pieces[i];

        n += at->n_pages;
        if (at->page >= r->peer->layout.n_pages ||
            at->n_pages > r->peer->layout.n_pages - at->page) {
            kv_peer_violation(r->peer, "page outside the peer's pool", m);
            return false;
        }
    }
    if (m->layer >= (uint32_t)r->end.fmt->layout->n_layers) {
        kv_peer_violation(r->peer, "layer outside the model", m);
        return false;
    }
    if (m->flags & WIRE_HANDOFF_AGAIN) {
        return true; /* checked against what was asked for */
    }
    if (m->first_page != r->got[m->layer] || n > r->p_pages - r->got[m->layer]) {
        kv_peer_violation(r->peer, "pages out of order or beyond the prompt", m);
        return false;
    }
    return true;
}

static struct kv_piece *take_again(struct kv_recv *r, const struct wire_handoff *m)
{
    bt_list_for_each (it, &r->again) {
        struct kv_piece *piece = BT_LIST_ENTRY(it, struct kv_piece, link);

        if (piece->layer == m->layer && piece->first_page == m->first_page &&
            piece->at.n_pages == m->pieces[0].n_pages) {
            bt_list_remove(&piece->link);
            piece->at = m->pieces[0];
            return piece;
        }
    }
    kv_peer_violation(r->peer, "sent again what was not asked for", m);
    return NULL;
}

/* The piece of pieces[i]: a new one, or the one that was asked for again. NULL: closed or failed.
 */
static struct kv_piece *
open_piece(struct kv_recv *r, const struct wire_handoff *m, uint32_t i, uint32_t first)
{
    bool again = (m->flags & WIRE_HANDOFF_AGAIN) != 0;
    struct kv_piece *piece = again ? take_again(r, m) : bt_calloc(1, sizeof(*piece));

    if (!piece) {
        if (!again) {
            kv_recv_fail(r, BT_E_NOMEM, "handoff: out of memory");
        }
        return NULL;
    }
    if (!again) {
        bt_list_init(&piece->link);
        piece->r = r;
        piece->layer = m->layer;
        piece->first_page = first;
        piece->at = m->pieces[i];
        r->got[m->layer] = first + piece->at.n_pages;
    }
    piece->rc = BT_OK;
    piece->landed = 0;
    piece->bytes = (size_t)piece->at.n_pages * r->peer->layout.page_stride;
    return piece;
}

static void on_announce(struct kv_recv *r, const struct wire_handoff *m)
{
    uint32_t first = m->first_page;

    for (uint32_t i = 0; i < m->n_pieces; i++) {
        struct kv_piece *piece = open_piece(r, m, i, first);

        if (!piece) {
            return;
        }
        first += piece->at.n_pages;
        if (first * (uint32_t)r->peer->layout.page_tokens <= r->n_have) {
            /* Of a peer that cannot leave out what is here. */
            kv_recv_piece_placed(piece);
        } else {
            bt_list_push_back(&r->pieces, &piece->link);
        }
    }
    kv_work_ready(r->end.h, &r->work);
}

/* One part of a piece: the first opens it, the others must follow on. */
static void on_data(struct kv_recv *r, const struct wire_handoff *m, struct bt_str data)
{
    const struct wire_piece *at = &m->pieces[0];
    struct kv_piece *piece = r->part;
    bool sum_follows = r->peer->version >= 4;

    if (m->offset == 0 && !piece) {
        if (!check_pieces(r, m)) {
            return;
        }
        piece = open_piece(r, m, 0, m->first_page);
        if (!piece) {
            return;
        }
        r->part = piece;
    } else if (!piece || m->layer != piece->layer || m->first_page != piece->first_page ||
               at->page != piece->at.page || at->n_pages != piece->at.n_pages ||
               (at->sum != piece->at.sum && !sum_follows) || m->offset != piece->landed) {
        kv_peer_violation(r->peer, "a part that does not follow on", m);
        return;
    }
    if (data.n == 0 || data.n > piece->bytes - piece->landed) {
        kv_peer_violation(r->peer, "a part that is empty or too long", m);
        return;
    }
    if (sum_follows) {
        piece->at.sum = at->sum; /* the last part's counts */
    }
    kv_recv_place_part(piece, data);
}

static void on_pieces(struct kv_recv *r, const struct wire_handoff *m, struct bt_str data)
{
    if (m->type != (r->method == BT_NET_METHOD_PULL      ? WIRE_HANDOFF_ANNOUNCE
                    : r->method == BT_NET_METHOD_MESSAGE ? WIRE_HANDOFF_DATA
                                                         : WIRE_HANDOFF_PLACED)) {
        kv_peer_violation(r->peer, "bytes by another method than the ticket's", m);
        return;
    }
    if (m->type != WIRE_HANDOFF_DATA && !check_pieces(r, m)) {
        return;
    }
    if (r->state == KV_RECV_ADVERTISED) {
        kv_recv_set_state(r, KV_RECV_FILLING);
    }
    if (m->type == WIRE_HANDOFF_ANNOUNCE) {
        on_announce(r, m);
    } else if (m->type == WIRE_HANDOFF_DATA) {
        on_data(r, m, data);
    } else {
        struct kv_piece *piece = open_piece(r, m, 0, m->first_page);

        if (piece) {
            kv_recv_placed(piece);
        }
    }
}

static void on_commit(struct kv_recv *r, const struct wire_handoff *m)
{
    if (m->n_tokens != r->n_tokens || m->n_first == 0) {
        kv_peer_violation(r->peer, "COMMIT of another prompt", m);
        return;
    }
    for (int l = 0; l < r->end.fmt->layout->n_layers; l++) {
        /* Short is a failure, never a shorter prompt. Put tells of its pieces as they land. */
        if (r->method != BT_NET_METHOD_PUT && r->got[l] != r->p_pages) {
            kv_peer_violation(r->peer, "COMMIT before everything was announced", m);
            return;
        }
    }
    r->committed = true;
    r->first.n_tokens = m->n_first;
    memcpy(r->first.ids, m->first, sizeof(r->first.ids));
    kv_recv_check_end(r);
}

static void on_refused(struct kv_recv *r, const struct wire_handoff *m)
{
    struct bt_err err;

    BT_FAIL(&err, kv_peer_rc(m->rc), "%s: %.*s", r->peer->name, (int)m->text.n,
            m->text.p ? m->text.p : "");
    r->aborted_seen = true;
    r->owe_aborted = m->type == WIRE_HANDOFF_ABORT; /* once our reads of P's pages are back */
    give_up(r, err.rc, err.msg, false);
}

/* Not bound to anything that is open. */
static void on_stray(struct kv_peer *p, const struct wire_handoff *m)
{
    const struct kv_handoff_id id = {m->id_hi, m->id_lo};
    struct kv_confirm *c = find_confirm(p->h, id, m->ticket);
    struct wire_handoff aborted = {
        .type = WIRE_HANDOFF_ABORTED, .id_hi = m->id_hi, .id_lo = m->id_lo, .ticket = m->ticket};

    if (m->type == WIRE_HANDOFF_ACKED) {
        if (c) {
            drop_confirm(c);
        }
    } else if (m->type == WIRE_HANDOFF_COMMIT && c) {
        send_ack(p, id, m->ticket);
    } else if (m->type == WIRE_HANDOFF_ABORT || m->type == WIRE_HANDOFF_COMMIT) {
        kv_peer_send(p, &aborted, (struct bt_str){0});
    } else if (m->type != WIRE_HANDOFF_ABORTED) {
        kv_add(&p->h->stale, 1); /* of an attempt that is over */
    }
}

void kv_recv_on_message(struct kv_peer *p, const struct wire_handoff *m, struct bt_str data)
{
    const struct kv_handoff_id id = {m->id_hi, m->id_lo};
    struct kv_recv *r = kv_find_recv(p->h, id);

    if (!r || r->peer != p || r->ticket != m->ticket || r->state == KV_RECV_CONNECTING) {
        on_stray(p, m);
        return;
    }
    if (m->type == WIRE_HANDOFF_ABORTED || m->type == WIRE_HANDOFF_NO ||
        m->type == WIRE_HANDOFF_ABORT) {
        if (r->state == KV_RECV_ABORTING) {
            r->aborted_seen = true;
            r->owe_aborted |= m->type == WIRE_HANDOFF_ABORT;
            kv_recv_check_end(r);
        } else if (m->type == WIRE_HANDOFF_ABORTED) {
            kv_peer_violation(p, "ABORTED that nobody asked for", m);
        } else {
            on_refused(r, m);
        }
        return;
    }
    if (r->state == KV_RECV_ABORTING) {
        return; /* on its way before they knew */
    }
    if (m->type == WIRE_HANDOFF_COMMIT) {
        if (r->state == KV_RECV_ADVERTISED) {
            kv_recv_set_state(r, KV_RECV_FILLING);
        }
        if (!r->committed) {
            on_commit(r, m);
        }
    } else if (m->type != WIRE_HANDOFF_ACKED) {
        on_pieces(r, m, data);
    }
}

/* ---- the caller's side ---- */

static void on_look(struct bt_msg *msg, void *consumer)
{
    struct kv_end *e = BT_CONTAINER_OF(msg, struct kv_end, look);
    struct kv_recv *r = BT_CONTAINER_OF(e, struct kv_recv, end);
    int abort_rc;

    if (!kv_end_looked(e)) {
        return;
    }
    pthread_mutex_lock(&e->lock);
    abort_rc = e->abort_rc;
    pthread_mutex_unlock(&e->lock);
    if (abort_rc) {
        give_up(r, abort_rc, "cancelled by the decode node", true);
    } else if (r->state == KV_RECV_CONNECTING && !r->peer) {
        bind_peer(r);
    }
}

static void recv_destroy(struct kv_end *e)
{
    struct kv_recv *r = BT_CONTAINER_OF(e, struct kv_recv, end);

    pthread_mutex_destroy(&e->lock);
    free(r->pages);
    free(r->generations);
    free(r->got);
    free(r->placed);
    free(r->ids);
    free(r->origin_name);
    free(r->origin_address);
    free(r->peer_name);
    free(r->peer_address);
    free(r);
}

static int fill_origin(struct kv_recv *r, const struct kv_recv_cfg *cfg)
{
    r->origin_incarnation = cfg->origin.incarnation;
    r->origin_name = strdup(cfg->origin.name);
    r->origin_address = strdup(cfg->origin.address);
    if (!r->origin_name || !r->origin_address) {
        return BT_E_NOMEM;
    }
    if (cfg->ids && cfg->block_tokens) {
        r->block_tokens = cfg->block_tokens;
        r->root = cfg->root;
        r->ids = bt_calloc(cfg->n_tokens, sizeof(*r->ids));
        if (!r->ids) {
            return BT_E_NOMEM;
        }
        memcpy(r->ids, cfg->ids, cfg->n_tokens * sizeof(*r->ids));
    }
    return BT_OK;
}

static int fill(struct kv_recv *r, const struct kv_recv_cfg *cfg)
{
    const struct kv_layout *layout = r->end.fmt->layout;

    r->n_tokens = cfg->n_tokens;
    r->n_have = cfg->n_have;
    r->first_page = cfg->n_have / (uint32_t)layout->page_tokens;
    r->n_pages = r->first_page + cfg->n_pages;
    r->events = cfg->events;
    r->peer_incarnation = cfg->peer_incarnation;
    r->pages = bt_calloc(r->n_pages, sizeof(*r->pages));
    r->generations = bt_calloc(r->n_pages, sizeof(*r->generations));
    r->got = bt_calloc((size_t)layout->n_layers, sizeof(*r->got));
    r->placed = bt_calloc((size_t)layout->n_layers, sizeof(*r->placed));
    r->peer_name = strdup(cfg->peer_name);
    r->peer_address = strdup(cfg->peer_address);
    if (!r->pages || !r->generations || !r->got || !r->placed || !r->peer_name ||
        !r->peer_address || (cfg->origin.name && fill_origin(r, cfg) != BT_OK)) {
        return BT_E_NOMEM;
    }
    for (uint32_t i = 0; i < cfg->n_pages; i++) {
        r->pages[r->first_page + i] = cfg->pages[i];
        r->generations[r->first_page + i] = kv_pool_generation(r->end.fmt->pool, cfg->pages[i]);
    }
    return BT_OK;
}

static int check_pages(const struct kv_layout *l, const struct kv_recv_cfg *cfg, struct bt_err *err)
{
    uint32_t page_tokens = (uint32_t)l->page_tokens, want;

    if (cfg->n_tokens == 0 || cfg->n_have > cfg->n_tokens || cfg->n_have % page_tokens != 0) {
        return BT_FAIL(err, BT_E_INVALID, "%u of %u tokens are there, in pages of %u", cfg->n_have,
                       cfg->n_tokens, page_tokens);
    }
    want = kv_layout_pages_for(l, cfg->n_tokens) - cfg->n_have / page_tokens;
    if (cfg->n_pages != want) {
        return BT_FAIL(err, BT_E_INVALID,
                       "%u pages for %u tokens, %u of which are there: %u "
                       "are needed",
                       cfg->n_pages, cfg->n_tokens, cfg->n_have, want);
    }
    return BT_OK;
}

int kv_recv_create(struct kv_handoff *h,
                   const struct kv_recv_cfg *cfg,
                   struct kv_recv **ret,
                   struct bt_err *err)
{
    struct kv_format *fmt = cfg->fmt ? cfg->fmt : h->own;
    struct kv_recv *r;
    int rc;

    rc = check_pages(fmt->layout, cfg, err);
    if (rc != BT_OK) {
        return rc;
    }
    if (cfg->origin.name && (strlen(cfg->origin.name) > WIRE_HANDOFF_MAX_NAME ||
                             strlen(cfg->origin.address) > WIRE_HANDOFF_MAX_ADDRESS)) {
        return BT_FAIL(err, BT_E_INVALID, "name or address of the origin is too long");
    }
    if (!cfg->peer_address || !cfg->peer_name) {
        return BT_FAIL(err, BT_E_INVALID, "handoff without the name or address of its peer");
    }
    r = bt_calloc(1, sizeof(*r));
    if (!r) {
        return BT_FAIL(err, BT_E_NOMEM, "handoff: out of memory");
    }
    r->end.h = h;
    r->end.fmt = fmt;
    r->end.id = cfg->id;
    r->end.look.handle = on_look;
    r->end.destroy = recv_destroy;
    pthread_mutex_init(&r->end.lock, NULL);
    bt_list_init(&r->end.all_link);
    bt_list_init(&r->end.ended_link);
    r->end.deliver = deliver;
    bt_list_init(&r->end.look.link);
    bt_list_init(&r->peer_link);
    bt_list_init(&r->pieces);
    bt_list_init(&r->again);
    bt_list_init(&r->late);
    bt_list_init(&r->work.link);
    r->work.run = kv_recv_move;
    r->timer.fn = on_timer;
    rc = fill(r, cfg);
    if (rc != BT_OK) {
        BT_FAIL(err, rc, "handoff: out of memory");
    } else {
        rc = kv_end_enter(&r->end, err);
    }
    if (rc != BT_OK) {
        recv_destroy(&r->end);
        return rc;
    }
    *ret = r;
    pthread_mutex_lock(&r->end.lock);
    kv_end_look_locked(&r->end);
    pthread_mutex_unlock(&r->end.lock);
    return BT_OK;
}

void kv_recv_abort(struct kv_recv *r, int rc)
{
    BT_BUG_ON(rc >= 0);
    pthread_mutex_lock(&r->end.lock);
    if (!r->end.abort_rc) {
        r->end.abort_rc = rc;
        kv_end_look_locked(&r->end);
    }
    pthread_mutex_unlock(&r->end.lock);
}

const char *kv_recv_transport(const struct kv_recv *r)
{
    return r->transport ? r->transport : "";
}

uint64_t kv_recv_bytes(const struct kv_recv *r)
{
    return r->bytes;
}

void kv_recv_release(struct kv_recv *r)
{
    kv_end_release(&r->end);
}
