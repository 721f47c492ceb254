/* The prefill node's end: tickets, states, lease, abort. What is moved and how: send_move.c.
 *
 * A ticket binds a send to the peer it came from. When that peer withdraws or is lost the send
 * returns, as soon as its own operations are back, to WAITING, where the next ticket may bind it,
 * until the lease ends. Pages are never given up (done) while an operation of ours reads them or
 * the decode node may still have one under way: ABORTING waits for its ABORTED or for the death of
 * the connection. */
#include "kvstore/handoff/handoff_int.h"

#include "common/obs/log.h"

#include <stdio.h>
#include <stdlib.h>

/* ---- states ---- */

void kv_send_set_state(struct kv_send *s, enum kv_send_state state)
{
    struct kv_handoff *h = s->end.h;

    BT_BUG_ON(!kv_send_edge_ok(s->state, state));
    if (state == KV_SEND_ABORTING) {
        __atomic_add_fetch(&h->n_aborting, 1, __ATOMIC_RELAXED);
    }
    if (s->state == KV_SEND_ABORTING) {
        __atomic_sub_fetch(&h->n_aborting, 1, __ATOMIC_RELAXED);
    }
    s->state = state;
}

static void send_msg(struct kv_send *s, enum wire_handoff_type type, int rc, const char *text)
{
    struct wire_handoff m = {
        .type = type,
        .id_hi = s->end.id.hi,
        .id_lo = s->end.id.lo,
        .ticket = s->ticket,
        .rc = rc,
        .text = bt_str_of(text),
    };

    if (s->peer) {
        kv_peer_send(s->peer, &m, (struct bt_str){0});
    }
}

static void unbind(struct kv_send *s)
{
    if (s->peer) {
        bt_list_remove(&s->peer_link);
        s->peer = NULL;
    }
    kv_work_drop(&s->work);
    bt_net_rkey_destroy(s->d_rkey);
    s->d_rkey = NULL;
    free(s->d_pages);
    s->d_pages = NULL;
}

/* ---- tickets that wait, and ends that are remembered ---- */

void kv_ticket_free(struct kv_ticket *t)
{
    free(t->d_pages);
    free(t);
}

static void say_no(struct kv_peer *p, const struct kv_ticket *t, int rc, const char *text)
{
    struct wire_handoff m = {
        .type = WIRE_HANDOFF_NO,
        .id_hi = t->id.hi,
        .id_lo = t->id.lo,
        .ticket = t->ticket,
        .rc = rc,
        .text = bt_str_of(text),
    };

    kv_peer_send(p, &m, (struct bt_str){0});
}

static void drop_ticket(struct kv_handoff *h, struct kv_ticket *t)
{
    bt_list_remove(&t->link);
    __atomic_sub_fetch(&h->n_tickets, 1, __ATOMIC_RELAXED);
}

static void refuse_ended(struct kv_ticket *t, int rc)
{
    char text[96];

    snprintf(text, sizeof(text), "the prefill node has ended this handoff: %s", bt_rc_text(rc));
    say_no(t->peer, t, rc == BT_OK ? BT_E_NOT_FOUND : rc, text);
    kv_ticket_free(t);
}

static const struct kv_tomb *find_tomb(const struct kv_handoff *h, struct kv_handoff_id id)
{
    uint64_t now = bt_now_ns();

    for (uint32_t i = 0; i < KV_TOMBS; i++) {
        if (h->tombs[i].until_ns > now && kv_id_eq(h->tombs[i].id, id)) {
            return &h->tombs[i];
        }
    }
    return NULL;
}

/* Remembers how it ended, and tells the tickets that wait for it. */
static void bury(struct kv_send *s, int rc)
{
    struct kv_handoff *h = s->end.h;

    h->tombs[h->next_tomb++ % KV_TOMBS] =
        (struct kv_tomb){s->end.id, rc, bt_deadline_ns(h->cfg.lease_ns)};
    bt_list_for_each_safe (it, &h->tickets) {
        struct kv_ticket *t = BT_LIST_ENTRY(it, struct kv_ticket, link);

        if (kv_id_eq(t->id, s->end.id)) {
            drop_ticket(h, t);
            refuse_ended(t, rc);
        }
    }
}

static void finish(struct kv_send *s, int rc, const char *msg)
{
    BT_BUG_ON(s->n_ops != 0);
    bt_net_timer_stop(&s->timer);
    unbind(s);
    kv_send_set_state(s, KV_SEND_DONE);
    bury(s, rc);
    kv_end_finish(&s->end, rc, msg);
}

static void deliver(struct kv_end *e)
{
    struct kv_send *s = BT_CONTAINER_OF(e, struct kv_send, end);
    struct kv_send_events ev = s->events;
    char text[sizeof(e->end_msg)];

    memcpy(text, e->end_msg, sizeof(text));
    ev.done(ev.arg, e->end_rc, text);
}

static void match_tickets(struct kv_send *s);

/* Looks whether what the state waits for is there. */
static void check_end(struct kv_send *s)
{
    if (s->n_ops > 0) {
        return;
    }
    if (s->state == KV_SEND_COMMITTED && s->acked) {
        finish(s, BT_OK, "");
    } else if (s->state == KV_SEND_RETURNING) {
        bool finished;

        if (s->owe_aborted) {
            send_msg(s, WIRE_HANDOFF_ABORTED, 0, "");
        }
        unbind(s);
        if (s->acked) {
            finish(s, BT_OK, "");
            return;
        }
        kv_send_set_state(s, KV_SEND_WAITING);
        pthread_mutex_lock(&s->end.lock);
        s->ticketed = false;
        finished = s->finished;
        pthread_mutex_unlock(&s->end.lock);
        if (finished) {
            bt_net_timer_start(s->end.h->net, &s->timer, bt_deadline_ns(s->end.h->cfg.lease_ns));
        }
        match_tickets(s);
    } else if (s->state == KV_SEND_ABORTING && (s->aborted_seen || !s->peer)) {
        finish(s, s->why_rc, s->why);
    }
}

void kv_send_op_done(struct kv_send *s)
{
    s->n_ops--;
    check_end(s);
}

static void go_back(struct kv_send *s, bool owe_aborted)
{
    if (s->state == KV_SEND_ABORTING) {
        if (owe_aborted) {
            send_msg(s, WIRE_HANDOFF_ABORTED, 0, "");
        }
        s->aborted_seen = true;
    } else if (s->state == KV_SEND_TICKETED || s->state == KV_SEND_COMMITTED) {
        bt_net_timer_stop(&s->timer);
        kv_work_drop(&s->work);
        s->owe_aborted = owe_aborted;
        kv_send_set_state(s, KV_SEND_RETURNING);
        kv_send_drop_placed(s);
    }
    check_end(s);
}

/* Gives the prompt up; done follows with proof. */
void kv_send_fail(struct kv_send *s, int rc, const char *msg)
{
    switch (s->state) {
    case KV_SEND_WAITING:
        finish(s, rc, msg);
        return;
    case KV_SEND_TICKETED:
    case KV_SEND_COMMITTED:
        send_msg(s, WIRE_HANDOFF_ABORT, rc, msg);
        bt_net_timer_start(s->end.h->net, &s->timer, bt_deadline_ns(s->end.h->cfg.silence_ns));
        break;
    case KV_SEND_RETURNING:
        if (s->owe_aborted) {
            send_msg(s, WIRE_HANDOFF_ABORTED, 0, "");
        }
        s->aborted_seen = true;
        break;
    case KV_SEND_ABORTING:
    case KV_SEND_DONE:
        return;
    }
    s->why_rc = rc;
    snprintf(s->why, sizeof(s->why), "%s", msg);
    kv_work_drop(&s->work);
    kv_send_set_state(s, KV_SEND_ABORTING);
    kv_send_drop_placed(s);
    check_end(s);
}

void kv_send_peer_lost(struct kv_send *s)
{
    /* By the net's proof every operation on the peer is back. */
    kv_send_drop_placed(s);
    BT_BUG_ON(s->n_ops != 0);
    bt_list_remove(&s->peer_link);
    s->peer = NULL;
    bt_net_timer_stop(&s->timer);
    go_back(s, false);
}

static void on_timer(struct bt_net_timer *t)
{
    struct kv_send *s = BT_CONTAINER_OF(t, struct kv_send, timer);
    struct kv_handoff *h = s->end.h;

    if (s->state == KV_SEND_WAITING) {
        bool finished;

        pthread_mutex_lock(&s->end.lock);
        finished = s->finished;
        pthread_mutex_unlock(&s->end.lock);
        if (finished) {
            finish(s, BT_E_DEADLINE, "no decode node fetched the prompt before its lease ended");
        }
    } else if (s->state == KV_SEND_COMMITTED) {
        struct wire_handoff m = {
            .type = WIRE_HANDOFF_COMMIT,
            .id_hi = s->end.id.hi,
            .id_lo = s->end.id.lo,
            .ticket = s->ticket,
            .n_tokens = s->n_tokens,
            .n_first = s->first.n_tokens,
        };

        /* A lost ACK is asked for again. */
        memcpy(m.first, s->first.ids, sizeof(m.first));
        bt_net_timer_start(h->net, t, bt_deadline_ns(KV_REASK_NS));
        kv_peer_send(s->peer, &m, (struct bt_str){0});
    } else if (s->state == KV_SEND_ABORTING && s->peer) {
        kv_peer_close(s->peer, BT_E_PEER_LOST, "an abort was not answered");
    }
}

/* ---- tickets ---- */

/* PUT: D's pages must lie in D's pool, and pages must be equal in size. */
static int take_put_ticket(struct kv_send *s, struct kv_ticket *t, struct bt_err *err)
{
    if (t->peer->layout.page_tokens != s->end.fmt->layout->page_tokens ||
        t->n_pages != s->n_pages - t->n_have / (uint32_t)s->end.fmt->layout->page_tokens) {
        return BT_FAIL(err, BT_E_UNSUPPORTED, "put needs equal page sizes");
    }
    for (uint32_t i = 0; i < t->n_pages; i++) {
        if (t->d_pages[i] >= t->peer->layout.n_pages) {
            return BT_FAIL(err, BT_E_PEER_PROTOCOL, "page %u is outside the pool", t->d_pages[i]);
        }
    }
    return bt_net_rkey_unpack(t->peer->net, (struct bt_str){t->key, t->key_bytes}, &s->d_rkey, err);
}

static int check_ticket(const struct kv_send *s, const struct kv_ticket *t, struct bt_err *err)
{
    uint32_t page_tokens = (uint32_t)s->end.fmt->layout->page_tokens;

    if (t->n_tokens != s->n_tokens) {
        return BT_FAIL(err, BT_E_INVALID, "the ticket speaks of %u tokens, the prompt has %u",
                       t->n_tokens, s->n_tokens);
    }
    if (t->peer->fmt != s->end.fmt) {
        return BT_FAIL(err, BT_E_INCOMPATIBLE, "the prompt is held for nodes of another layout");
    }
    if (t->n_have / page_tokens < s->have_page) {
        return BT_FAIL(err, BT_E_NOT_FOUND, "the first %u tokens are not here",
                       s->have_page * page_tokens);
    }
    return BT_OK;
}

/* Binds a waiting send to the ticket; the ticket is consumed. */
static void accept_ticket(struct kv_send *s, struct kv_ticket *t)
{
    struct kv_peer *p = t->peer;
    struct kv_handoff *h = s->end.h;
    struct bt_err err = {0};
    int rc = check_ticket(s, t, &err);

    if (rc != BT_OK) {
        say_no(p, t, rc, err.msg);
        kv_ticket_free(t);
        return;
    }
    if (h->forced_method >= 0 && (int)t->method != h->forced_method) {
        rc = BT_FAIL(&err, BT_E_UNSUPPORTED, "transfer method %s is set here",
                     kv_method_name(h->forced_method));
    } else if (t->method == BT_NET_METHOD_PUT) {
        rc = take_put_ticket(s, t, &err);
    }
    if (rc != BT_OK) {
        say_no(p, t, rc, err.msg);
        kv_ticket_free(t);
        return;
    }
    s->d_pages = t->d_pages;
    t->d_pages = NULL;
    s->peer = p;
    bt_list_push_back(&p->sends, &s->peer_link);
    kv_peer_watch(p);
    s->ticket = t->ticket;
    s->method = t->method;
    s->acked = s->aborted_seen = s->owe_aborted = false;
    s->announced = s->reached = 0;
    s->first_page = t->n_have / (uint32_t)s->end.fmt->layout->page_tokens;
    for (int l = 0; l < s->end.fmt->layout->n_layers; l++) {
        s->sent[l] = s->first_page;
    }
    snprintf(s->reader, sizeof(s->reader), "%s", p->name);
    s->reader_incarnation = p->incarnation;
    kv_ticket_free(t);
    bt_net_timer_stop(&s->timer);
    kv_send_set_state(s, KV_SEND_TICKETED);
    pthread_mutex_lock(&s->end.lock);
    s->ticketed = true;
    pthread_mutex_unlock(&s->end.lock);
    if (s->events.ticketed) {
        s->events.ticketed(s->events.arg);
    }
    kv_work_ready(h, &s->work);
}

/* The oldest waiting ticket for it, if any. */
static void match_tickets(struct kv_send *s)
{
    struct kv_handoff *h = s->end.h;

    bt_list_for_each_safe (it, &h->tickets) {
        struct kv_ticket *t = BT_LIST_ENTRY(it, struct kv_ticket, link);

        if (s->state == KV_SEND_WAITING && kv_id_eq(t->id, s->end.id)) {
            drop_ticket(h, t);
            accept_ticket(s, t);
        }
    }
}

void kv_send_on_ticket_timer(struct bt_net_timer *timer)
{
    struct kv_handoff *h = BT_CONTAINER_OF(timer, struct kv_handoff, ticket_timer);
    uint64_t now = bt_now_ns();

    while (!bt_list_empty(&h->tickets)) {
        struct kv_ticket *t = BT_LIST_ENTRY(h->tickets.next, struct kv_ticket, link);

        if (t->deadline_ns > now) {
            bt_net_timer_start(h->net, timer, t->deadline_ns);
            return;
        }
        drop_ticket(h, t);
        say_no(t->peer, t, BT_E_NOT_FOUND, "the prefill node does not know this handoff");
        kv_ticket_free(t);
    }
}

/* Nobody waits for the answer any more: forgotten, and a relay need not go on if it was the last.
 */
static void forget_ticket(struct kv_handoff *h, struct kv_ticket *t)
{
    struct kv_handoff_id id = t->id;
    bool last = t->relayed && h->relays && !h->stopping && !kv_find_send(h, id);

    drop_ticket(h, t);
    kv_ticket_free(t);
    bt_list_for_each (it, &h->tickets) {
        last = last && !kv_id_eq(BT_LIST_ENTRY(it, struct kv_ticket, link)->id, id);
    }
    if (last) {
        h->relay.gone(h->relay.arg, id);
    }
}

void kv_send_tickets_lost(struct kv_peer *p)
{
    bt_list_for_each_safe (it, &p->h->tickets) {
        struct kv_ticket *t = BT_LIST_ENTRY(it, struct kv_ticket, link);

        if (t->peer == p) {
            forget_ticket(p->h, t);
        }
    }
}

static uint32_t read_u32(const char *p)
{
    const uint8_t *b = (const uint8_t *)p;

    return (uint32_t)b[0] | (uint32_t)b[1] << 8 | (uint32_t)b[2] << 16 | (uint32_t)b[3] << 24;
}

static struct kv_ticket *
read_ticket(struct kv_peer *p, const struct wire_handoff *m, struct bt_str data)
{
    size_t want = m->method == BT_NET_METHOD_PUT ? (size_t)m->n_pages * 8 : 0;
    size_t ids = m->block_tokens ? (size_t)m->n_tokens * 4 : 0;
    struct kv_ticket *t;

    if (data.n != want + ids || (want == 0 && m->n_pages != 0)) {
        kv_peer_violation(p, "page list of the wrong length", m);
        return NULL;
    }
    t = bt_calloc(1, sizeof(*t));
    if (!t) {
        return NULL;
    }
    t->peer = p;
    t->id = (struct kv_handoff_id){m->id_hi, m->id_lo};
    t->ticket = m->ticket;
    t->n_tokens = m->n_tokens;
    t->n_pages = m->n_pages;
    t->n_have = m->n_have;
    t->relayed = m->origin_name.n > 0;
    t->method = (enum bt_net_method)m->method;
    t->key_bytes = m->key.n;
    if (m->key.n) {
        memcpy(t->key, m->key.p, m->key.n);
    }
    if (want) {
        t->d_pages = bt_calloc(m->n_pages, sizeof(*t->d_pages));
        if (!t->d_pages) {
            kv_ticket_free(t);
            return NULL;
        }
        for (uint32_t i = 0; i < m->n_pages; i++) {
            t->d_pages[i] = read_u32(data.p + (size_t)i * 8);
        }
    }
    return t;
}

void kv_handoff_refuse(struct kv_handoff *h, struct kv_handoff_id id, int rc, const char *msg)
{
    bt_list_for_each_safe (it, &h->tickets) {
        struct kv_ticket *t = BT_LIST_ENTRY(it, struct kv_ticket, link);

        if (kv_id_eq(t->id, id)) {
            drop_ticket(h, t);
            say_no(t->peer, t, rc, msg);
            kv_ticket_free(t);
        }
    }
}

/* The ids stand behind the page list. NULL without memory. */
static int32_t *read_ids(const struct wire_handoff *m, struct bt_str data)
{
    int32_t *ids = bt_calloc(m->n_tokens, sizeof(*ids));

    for (uint32_t i = 0; ids && i < m->n_tokens; i++) {
        ids[i] = (int32_t)read_u32(data.p + data.n - ((size_t)m->n_tokens - i) * 4);
    }
    return ids;
}

/* The ticket waits; somebody must see to it that a kv_send comes. */
static void ask_relay(struct kv_ticket *t, const struct wire_handoff *m, struct bt_str data)
{
    struct kv_handoff *h = t->peer->h;
    char name[WIRE_HANDOFF_MAX_NAME + 1], address[WIRE_HANDOFF_MAX_ADDRESS + 1];
    int32_t *ids = m->block_tokens ? read_ids(m, data) : NULL;
    struct kv_relay_ask ask = {
        .fmt = t->peer->fmt,
        .id = t->id,
        .n_tokens = t->n_tokens,
        .n_have = t->n_have,
        .origin = {name, m->origin_incarnation, address},
        .asker = t->peer->name,
        .ids = ids,
        .block_tokens = ids ? m->block_tokens : 0,
    };
    struct bt_err err = {0};
    int rc;

    snprintf(name, sizeof(name), "%.*s", (int)m->origin_name.n, m->origin_name.p);
    snprintf(address, sizeof(address), "%.*s", (int)m->origin_address.n, m->origin_address.p);
    memcpy(ask.root.b, m->root, sizeof(ask.root.b));
    rc = h->relays ? h->relay.asked(h->relay.arg, &ask, &err)
                   : BT_FAIL(&err, BT_E_UNSUPPORTED, "this node takes no prompts from others");
    free(ids);
    if (rc != BT_OK) {
        drop_ticket(h, t);
        say_no(t->peer, t, rc, err.msg);
        kv_ticket_free(t);
    }
}

static void on_ticket(struct kv_peer *p, const struct wire_handoff *m, struct bt_str data)
{
    struct kv_handoff *h = p->h;
    struct kv_ticket *t = read_ticket(p, m, data);
    const struct kv_tomb *tomb;
    struct kv_send *s;

    if (!t) {
        return;
    }
    s = kv_find_send(h, t->id);
    if (s && s->state == KV_SEND_WAITING) {
        accept_ticket(s, t);
        return;
    }
    tomb = s ? NULL : find_tomb(h, t->id);
    if (tomb) {
        refuse_ended(t, tomb->rc);
        return;
    }
    /* Too early, or another decode node still has it: wait, but neither for ever nor in crowds. */
    if (h->n_tickets >= KV_MAX_WAITING_TICKETS || h->n_tickets >= h->cfg.max_open) {
        say_no(p, t, BT_E_EXHAUSTED, "too many tickets wait for unknown handoffs");
        kv_ticket_free(t);
        return;
    }
    t->deadline_ns = bt_deadline_ns(h->cfg.lease_ns);
    if (bt_list_empty(&h->tickets)) {
        bt_net_timer_start(h->net, &h->ticket_timer, t->deadline_ns);
    }
    bt_list_push_back(&h->tickets, &t->link);
    __atomic_add_fetch(&h->n_tickets, 1, __ATOMIC_RELAXED);
    if (!s && t->relayed) {
        ask_relay(t, m, data);
    }
}

/* ---- messages ---- */

/* ACK: from the peer it is bound to, or, after that connection was lost, from the same node. */
static void on_ack(struct kv_peer *p, struct kv_send *s, const struct wire_handoff *m)
{
    struct wire_handoff acked = {
        .type = WIRE_HANDOFF_ACKED, .id_hi = m->id_hi, .id_lo = m->id_lo, .ticket = m->ticket};
    bool is_reader = s && s->ticket == m->ticket && s->ticket != 0 &&
                     strcmp(s->reader, p->name) == 0 && s->reader_incarnation == p->incarnation;

    kv_peer_send(p, &acked, (struct bt_str){0});
    if (!is_reader) {
        return;
    }
    if (s->state == KV_SEND_WAITING) {
        bool finished;

        pthread_mutex_lock(&s->end.lock);
        finished = s->finished;
        pthread_mutex_unlock(&s->end.lock);
        if (finished) {
            finish(s, BT_OK, "");
        }
    } else if (s->state == KV_SEND_COMMITTED || s->state == KV_SEND_RETURNING) {
        s->acked = true;
        check_end(s);
    } else if (s->state == KV_SEND_ABORTING) {
        s->aborted_seen = true;
        check_end(s);
    } else if (s->state == KV_SEND_TICKETED) {
        kv_peer_violation(p, "ACK before COMMIT", m);
    } /* else DONE: COMMIT was repeated, and so was the ACK */
}

static void withdraw_ticket(struct kv_peer *p, const struct wire_handoff *m)
{
    struct wire_handoff aborted = {
        .type = WIRE_HANDOFF_ABORTED, .id_hi = m->id_hi, .id_lo = m->id_lo, .ticket = m->ticket};

    bt_list_for_each_safe (it, &p->h->tickets) {
        struct kv_ticket *t = BT_LIST_ENTRY(it, struct kv_ticket, link);

        if (t->peer == p && t->ticket == m->ticket) {
            forget_ticket(p->h, t);
        }
    }
    kv_peer_send(p, &aborted, (struct bt_str){0});
}

void kv_send_on_message(struct kv_peer *p, const struct wire_handoff *m, struct bt_str data)
{
    const struct kv_handoff_id id = {m->id_hi, m->id_lo};
    struct kv_send *s;
    bool bound;

    if (m->type == WIRE_HANDOFF_TICKET) {
        on_ticket(p, m, data);
        return;
    }
    s = kv_find_send(p->h, id);
    bound = s && s->peer == p && s->ticket == m->ticket;
    if (m->type == WIRE_HANDOFF_ACK) {
        on_ack(p, s, m);
    } else if (m->type == WIRE_HANDOFF_ABORT) {
        if (bound) {
            go_back(s, true);
        } else {
            withdraw_ticket(p, m);
        }
    } else if (!bound) {
        kv_add(&p->h->stale, 1); /* of an attempt that is over */
    } else if (m->type == WIRE_HANDOFF_ABORTED) {
        if (s->state == KV_SEND_ABORTING) {
            s->aborted_seen = true;
            check_end(s);
        }
    } else if (m->type == WIRE_HANDOFF_REACHED) {
        kv_send_reached(s, m);
    } else if (s->state == KV_SEND_TICKETED || s->state == KV_SEND_COMMITTED) {
        kv_send_resend(s, m);
    }
}

/* ---- the caller's side ---- */

static void on_look(struct bt_msg *msg, void *consumer)
{
    struct kv_end *e = BT_CONTAINER_OF(msg, struct kv_end, look);
    struct kv_send *s = BT_CONTAINER_OF(e, struct kv_send, end);
    bool finished;
    int abort_rc;

    if (!kv_end_looked(e)) {
        return;
    }
    pthread_mutex_lock(&e->lock);
    abort_rc = e->abort_rc;
    finished = s->finished;
    pthread_mutex_unlock(&e->lock);
    if (abort_rc) {
        kv_send_fail(s, abort_rc, "cancelled by the prefill node");
    } else if (s->state == KV_SEND_WAITING) {
        if (finished) {
            bt_net_timer_start(e->h->net, &s->timer, bt_deadline_ns(e->h->cfg.lease_ns));
        }
        match_tickets(s);
    } else if (s->state == KV_SEND_TICKETED) {
        kv_work_ready(e->h, &s->work);
    }
}

static void send_destroy(struct kv_end *e)
{
    struct kv_send *s = BT_CONTAINER_OF(e, struct kv_send, end);

    pthread_mutex_destroy(&e->lock);
    free(s->pages);
    free(s->generations);
    free(s->sent);
    free(s->sealed);
    free(s->done);
    free(s);
}

int kv_send_create(struct kv_handoff *h,
                   const struct kv_send_cfg *cfg,
                   struct kv_send **ret,
                   struct bt_err *err)
{
    struct kv_format *fmt = cfg->fmt ? cfg->fmt : h->own;
    struct kv_send *s;
    int rc;

    if (cfg->n_tokens == 0 || cfg->n_have > cfg->n_tokens ||
        cfg->n_have % (uint32_t)fmt->layout->page_tokens != 0) {
        return BT_FAIL(err, BT_E_INVALID, "handoff of %u tokens, %u of them elsewhere",
                       cfg->n_tokens, cfg->n_have);
    }
    s = bt_calloc(1, sizeof(*s));
    if (!s) {
        return BT_FAIL(err, BT_E_NOMEM, "handoff: out of memory");
    }
    s->end.h = h;
    s->end.fmt = fmt;
    s->end.id = cfg->id;
    s->end.look.handle = on_look;
    s->end.destroy = send_destroy;
    pthread_mutex_init(&s->end.lock, NULL);
    bt_list_init(&s->end.all_link);
    bt_list_init(&s->end.ended_link);
    s->end.is_send = true;
    s->end.deliver = deliver;
    bt_list_init(&s->end.look.link);
    bt_list_init(&s->peer_link);
    bt_list_init(&s->work.link);
    bt_list_init(&s->outs);
    s->work.run = kv_send_move;
    s->timer.fn = on_timer;
    s->events = cfg->events;
    s->n_tokens = cfg->n_tokens;
    s->n_pages = kv_layout_pages_for(fmt->layout, cfg->n_tokens);
    s->have_page = s->n_known = cfg->n_have / (uint32_t)fmt->layout->page_tokens;
    s->pages = bt_calloc(s->n_pages, sizeof(*s->pages));
    s->generations = bt_calloc(s->n_pages, sizeof(*s->generations));
    s->sent = bt_calloc((size_t)fmt->layout->n_layers, sizeof(*s->sent));
    s->sealed = bt_calloc((size_t)fmt->layout->n_layers, sizeof(*s->sealed));
    s->done = bt_calloc((size_t)fmt->layout->n_layers, sizeof(*s->done));
    if (!s->pages || !s->generations || !s->sent || !s->sealed || !s->done) {
        rc = BT_FAIL(err, BT_E_NOMEM, "handoff: out of memory");
    } else {
        rc = kv_end_enter(&s->end, err);
    }
    if (rc != BT_OK) {
        send_destroy(&s->end);
        return rc;
    }
    *ret = s;
    pthread_mutex_lock(&s->end.lock);
    kv_end_look_locked(&s->end);
    pthread_mutex_unlock(&s->end.lock);
    return BT_OK;
}

void kv_send_set_pages(struct kv_send *s, uint32_t first, const uint32_t *pages, uint32_t n)
{
    const struct kv_pool *pool = s->end.fmt->pool;

    pthread_mutex_lock(&s->end.lock);
    BT_BUG_ON(first > s->n_known);
    for (uint32_t i = 0; i < n && first + i < s->n_pages; i++) {
        if (first + i >= s->n_known) { /* those that are known stay put */
            s->pages[first + i] = pages[i];
            s->generations[first + i] = kv_pool_generation(pool, pages[i]);
            s->n_known = first + i + 1;
        }
    }
    pthread_mutex_unlock(&s->end.lock);
}

void kv_send_progress(struct kv_send *s, uint32_t first, uint32_t n, int layer)
{
    pthread_mutex_lock(&s->end.lock);
    s->done[layer] = first + n;
    if (s->ticketed) { /* nobody listens before */
        kv_end_look_locked(&s->end);
    }
    pthread_mutex_unlock(&s->end.lock);
}

void kv_send_finish(struct kv_send *s, const struct kv_first *tokens)
{
    BT_BUG_ON(tokens->n_tokens > KV_HANDOFF_MAX_FIRST);
    pthread_mutex_lock(&s->end.lock);
    s->first = *tokens;
    s->finished = true;
    kv_end_look_locked(&s->end);
    pthread_mutex_unlock(&s->end.lock);
}

bool kv_send_rewind(struct kv_send *s)
{
    bool ok;

    pthread_mutex_lock(&s->end.lock);
    ok = !s->ticketed && !s->end.done;
    if (ok) {
        s->n_known = s->have_page;
        memset(s->done, 0, (size_t)s->end.fmt->layout->n_layers * sizeof(*s->done));
        s->finished = false;
    }
    pthread_mutex_unlock(&s->end.lock);
    return ok;
}

void kv_send_abort(struct kv_send *s, int rc)
{
    BT_BUG_ON(rc >= 0);
    pthread_mutex_lock(&s->end.lock);
    if (!s->end.abort_rc) {
        s->end.abort_rc = rc;
        kv_end_look_locked(&s->end);
    }
    pthread_mutex_unlock(&s->end.lock);
}

void kv_send_release(struct kv_send *s)
{
    kv_end_release(&s->end);
}
