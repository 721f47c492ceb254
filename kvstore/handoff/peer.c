/* Connections of a handoff instance: greeting, dispatch, silence.
 *
 * Both sides say HELLO first. It carries wire versions, node, incarnation, compatibility digest and
 * the geometry of the pool; whoever finds a difference says REFUSE with both values and closes. A
 * peer is watched while handoffs are bound to it: PING every quarter of the silence limit, and
 * after the limit without a sign of life it is closed by force, which is the only proof against a
 * process that is stopped. Nothing that a peer sends is believed: a message that does not fit our
 * own state closes that peer and no other. */
#include "kvstore/handoff/handoff_int.h"

#include "common/obs/log.h"

#include <stdio.h>
#include <stdlib.h>

void kv_peer_close(struct kv_peer *p, int rc, const char *msg)
{
    if (!p->closing) {
        p->closing = true;
        p->fail_rc = rc;
        snprintf(p->fail_msg, sizeof(p->fail_msg), "%s", msg);
    }
    bt_net_peer_close(p->net, true);
}

void kv_peer_violation(struct kv_peer *p, const char *what, const struct wire_handoff *m)
{
    BT_WARN("handoff_violation", "peer=%s address=%s message=%s reason=\"%s\"", p->name,
            bt_net_peer_address(p->net), m ? wire_handoff_type_name((int)m->type) : "?", what);
    kv_peer_close(p, BT_E_PEER_PROTOCOL, what);
}

size_t kv_peer_pack(const struct kv_peer *p, struct wire_handoff *m, char *buf)
{
    bool frozen = m->type == WIRE_HANDOFF_HELLO || m->type == WIRE_HANDOFF_REFUSE;

    m->version = frozen ? 1 : p->version;
    return wire_handoff_pack(m, buf);
}

bool kv_peer_send(struct kv_peer *p, struct wire_handoff *m, struct bt_str data)
{
    char head[WIRE_HANDOFF_MAX_HEAD];
    size_t n;
    int rc;

    if (p->closing) {
        return false;
    }
    n = kv_peer_pack(p, m, head);
    /* Only fixed heads come this way; data is sent where its completion is awaited. */
    rc = bt_net_send(p->net, (struct bt_str){head, n}, data, NULL, NULL);
    if (rc != BT_OK) {
        kv_peer_close(p, BT_E_PEER_LOST, "cannot send");
    }
    return rc == BT_OK;
}

/* ---- greeting ---- */

static void say_hello(struct kv_peer *p)
{
    const struct kv_handoff *h = p->h;
    const struct kv_layout *l = p->fmt->layout;
    struct wire_handoff m = {
        .type = WIRE_HANDOFF_HELLO,
        .version_min = WIRE_HANDOFF_VERSION_MIN,
        .version_max = (uint16_t)h->cfg.wire_version,
        .page_tokens = (uint32_t)l->page_tokens,
        .n_layers = (uint32_t)l->n_layers,
        .n_kv_heads = (uint32_t)l->n_kv_heads,
        .head_dim = (uint32_t)l->head_dim,
        .dtype = (uint32_t)l->dtype,
        .pool_pages = l->n_pages,
        .method = h->forced_method < 0 ? WIRE_HANDOFF_NO_METHOD : (uint8_t)h->forced_method,
        .incarnation = h->cfg.incarnation,
        .base = (uint64_t)(uintptr_t)kv_pool_region(p->fmt->pool)->base,
        .name = bt_str_of(h->node_name),
        .key = p->fmt->key,
    };

    memcpy(m.compat, p->fmt->compat, sizeof(m.compat));
    kv_peer_send(p, &m, (struct bt_str){0});
}

/* Tells them why and closes once that is out. */
static void refuse(struct kv_peer *p, int rc, const char *msg)
{
    struct wire_handoff m = {.type = WIRE_HANDOFF_REFUSE, .rc = rc, .text = bt_str_of(msg)};

    BT_WARN("handoff_refused", "peer=%s address=%s reason=\"%s\"", p->name,
            bt_net_peer_address(p->net), msg);
    if (kv_peer_send(p, &m, (struct bt_str){0})) {
        p->closing = true;
        p->fail_rc = rc;
        snprintf(p->fail_msg, sizeof(p->fail_msg), "%s", msg);
        bt_net_peer_close(p->net, false);
    }
}

static void hex8(const uint8_t *p, char ret[17])
{
    for (int i = 0; i < 8; i++) {
        snprintf(ret + 2 * i, 3, "%02x", p[i]);
    }
}

static int check_version(const struct kv_peer *p, const struct wire_handoff *m, struct bt_err *err)
{
    const struct kv_handoff *h = p->h;

    if (m->version_min > h->cfg.wire_version || m->version_max < WIRE_HANDOFF_VERSION_MIN) {
        return BT_FAIL(err, BT_E_INCOMPATIBLE, "wire version: %s speaks %d to %u, %s %u to %u",
                       h->node_name, WIRE_HANDOFF_VERSION_MIN, h->cfg.wire_version, p->name,
                       m->version_min, m->version_max);
    }
    return BT_OK;
}

/* Everything that must be equal for bytes to be exchanged; names the first difference. */
static int check_compat(struct kv_peer *p, const struct wire_handoff *m, struct bt_err *err)
{
    const struct kv_handoff *h = p->h;
    const struct kv_layout *l = p->fmt->layout;
    const struct {
        const char *what;
        uint32_t ours, theirs;
    } same[] = {
        {"layers", (uint32_t)l->n_layers, m->n_layers},
        {"KV heads", (uint32_t)l->n_kv_heads, m->n_kv_heads},
        {"head dimension", (uint32_t)l->head_dim, m->head_dim},
        {"KV dtype", (uint32_t)l->dtype, m->dtype},
    };
    char ours[17], theirs[17];

    for (size_t i = 0; i < BT_ARRAY_LEN(same); i++) {
        if (same[i].ours != same[i].theirs) {
            return BT_FAIL(err, BT_E_INCOMPATIBLE, "%s: %s has %u, %s has %u", same[i].what,
                           h->node_name, same[i].ours, p->name, same[i].theirs);
        }
    }
    if (memcmp(p->fmt->compat, m->compat, sizeof(m->compat)) != 0) {
        hex8(p->fmt->compat, ours);
        hex8(m->compat, theirs);
        return BT_FAIL(err, BT_E_INCOMPATIBLE,
                       "compatibility digest (model, KV format, numerics): %s has %s, %s has %s",
                       h->node_name, ours, p->name, theirs);
    }
    if (h->forced_method >= 0 && m->method != WIRE_HANDOFF_NO_METHOD &&
        m->method != h->forced_method) {
        return BT_FAIL(err, BT_E_INCOMPATIBLE, "transfer method: %s is set to %s, %s to %s",
                       h->node_name, kv_method_name(h->forced_method), p->name,
                       kv_method_name(m->method));
    }
    return BT_OK;
}

/* Connections of an older life of the same node are dead the moment a newer one appears. */
static int check_incarnation(struct kv_peer *p, struct bt_err *err)
{
    bt_list_for_each (it, &p->h->peers) {
        struct kv_peer *q = BT_LIST_ENTRY(it, struct kv_peer, link);

        if (q == p || !q->greeted || q->closing || strcmp(q->name, p->name) != 0) {
            continue;
        }
        if (q->incarnation > p->incarnation) {
            return BT_FAIL(err, BT_E_PEER_STALE, "incarnation %llu of %s is over, %llu is known",
                           (unsigned long long)p->incarnation, p->name,
                           (unsigned long long)q->incarnation);
        }
        if (q->incarnation < p->incarnation) {
            kv_peer_close(q, BT_E_PEER_LOST, "a newer incarnation of the node has appeared");
        }
    }
    return BT_OK;
}

/* A relay that was called becomes what its caller is. */
static int answer_hello(struct kv_peer *p, const struct wire_handoff *m, struct bt_err *err)
{
    struct kv_format *f;
    int rc = kv_format_find(p->h, &p->layout, m->compat, &f, err);

    if (rc == BT_OK) {
        p->fmt = kv_format_use(f);
        say_hello(p);
    }
    return rc;
}

static void on_hello(struct kv_peer *p, const struct wire_handoff *m)
{
    struct bt_err err = {0};
    int rc;

    if (p->greeted) {
        kv_peer_violation(p, "second HELLO", m);
        return;
    }
    for (size_t i = 0; i < m->name.n; i++) {
        char c = m->name.p[i];

        p->name[i] = c > ' ' && c < 0x7f && c != '"' ? c : '?';
    }
    p->name[m->name.n] = '\0';
    p->incarnation = m->incarnation;
    p->version = (uint8_t)BT_MIN(p->h->cfg.wire_version, m->version_max);
    p->layout = (struct kv_layout){.n_layers = (int)m->n_layers,
                                   .n_kv_heads = (int)m->n_kv_heads,
                                   .head_dim = (int)m->head_dim,
                                   .page_tokens = (int)m->page_tokens,
                                   .dtype = (enum kv_dtype)m->dtype,
                                   .n_pages = m->pool_pages};
    p->base = m->base;
    p->their_method = m->method;
    p->key_bytes = m->key.n;
    memcpy(p->key, m->key.p, m->key.n);
    rc = check_version(p, m, &err);
    if (rc == BT_OK && p->fmt) {
        rc = check_compat(p, m, &err);
    }
    if (rc == BT_OK) {
        rc = kv_layout_init(&p->layout, &err);
    }
    if (rc == BT_OK && !p->fmt) {
        rc = answer_hello(p, m, &err);
    }
    if (rc == BT_OK && p->base > UINT64_MAX - p->layout.bytes) {
        rc = BT_FAIL(&err, BT_E_PEER_PROTOCOL, "address of the pool is out of range");
    }
    if (rc == BT_OK) {
        rc = check_incarnation(p, &err);
    }
    if (rc != BT_OK) {
        refuse(p, rc, err.msg);
        return;
    }
    p->greeted = true;
    kv_add(&p->h->connections, 1);
    BT_DEBUG("handoff_peer", "peer=%s incarnation=%llu address=%s transport=%s", p->name,
             (unsigned long long)p->incarnation, bt_net_peer_address(p->net),
             bt_net_peer_transport(p->net));
    kv_recv_confirm_peer_ready(p);
    for (bool again = true; again && !p->closing;) {
        again = false;
        bt_list_for_each (it, &p->recvs) {
            struct kv_recv *r = BT_LIST_ENTRY(it, struct kv_recv, peer_link);

            if (r->state == KV_RECV_CONNECTING) {
                kv_recv_peer_ready(r); /* may leave the list */
                again = true;
                break;
            }
        }
    }
}

static void on_refuse(struct kv_peer *p, const struct wire_handoff *m)
{
    char text[WIRE_HANDOFF_MAX_TEXT + 1];
    struct bt_err err;

    snprintf(text, sizeof(text), "%.*s", (int)m->text.n, m->text.p ? m->text.p : "");
    BT_FAIL(&err, kv_peer_rc(m->rc), "refused by %s: %s", bt_net_peer_address(p->net), text);
    BT_WARN("handoff_refused", "peer=%s address=%s reason=\"%s\"", p->name,
            bt_net_peer_address(p->net), err.msg);
    kv_peer_close(p, err.rc, err.msg);
}

/* ---- silence ---- */

static bool is_watched(const struct kv_peer *p)
{
    return !bt_list_empty(&p->sends) || !bt_list_empty(&p->recvs) || !p->greeted;
}

static void on_tick(struct bt_net_timer *t)
{
    struct kv_peer *p = BT_CONTAINER_OF(t, struct kv_peer, tick);
    struct wire_handoff ping = {.type = WIRE_HANDOFF_PING};
    uint64_t now = bt_net_clock_ns(p->h->net);

    t->deadline_ns = BT_NEVER_NS;
    if (p->closing) {
        /* A refusal that does not get out must not keep the connection. */
        bt_net_peer_close(p->net, true);
        return;
    }
    if (!is_watched(p)) {
        return;
    }
    if (now - p->last_in_ns > p->h->cfg.silence_ns) {
        BT_WARN("handoff_silent", "peer=%s address=%s silent_ms=%llu", p->name,
                bt_net_peer_address(p->net),
                (unsigned long long)((now - p->last_in_ns) / BT_NS_PER_MS));
        kv_peer_close(p, BT_E_PEER_LOST, "the peer is silent");
        return;
    }
    bt_net_timer_start(p->h->net, t, bt_deadline_ns(p->h->cfg.silence_ns / 4));
    if (p->greeted) {
        kv_peer_send(p, &ping, (struct bt_str){0});
    }
}

void kv_peer_watch(struct kv_peer *p)
{
    if (p->tick.deadline_ns == BT_NEVER_NS) {
        p->last_in_ns = bt_net_clock_ns(p->h->net);
        bt_net_timer_start(p->h->net, &p->tick, bt_deadline_ns(p->h->cfg.silence_ns / 4));
    }
}

/* ---- events of the net ---- */

static struct kv_peer *new_peer(struct kv_handoff *h, struct kv_format *fmt)
{
    struct kv_peer *p = bt_calloc(1, sizeof(*p));

    if (!p) {
        return NULL;
    }
    p->h = h;
    p->fmt = fmt ? kv_format_use(fmt) : NULL;
    snprintf(p->name, sizeof(p->name), "?");
    p->tick = (struct bt_net_timer){.deadline_ns = BT_NEVER_NS, .fn = on_tick};
    bt_list_init(&p->sends);
    bt_list_init(&p->recvs);
    return p;
}

static void start_peer(struct kv_peer *p, struct bt_net_peer *net)
{
    p->net = net;
    bt_net_peer_set_user(net, p);
    bt_list_push_back(&p->h->peers, &p->link);
    __atomic_add_fetch(&p->h->n_peers, 1, __ATOMIC_RELAXED);
    kv_peer_watch(p);
    if (p->fmt) {
        say_hello(p);
    }
}

static void on_accepted(void *arg, struct bt_net_peer *net)
{
    struct kv_handoff *h = arg;
    struct kv_peer *p = h->ready ? new_peer(h, h->own) : NULL;

    if (!p) {
        bt_net_peer_close(net, true);
        return;
    }
    start_peer(p, net);
}

static void free_peer(struct kv_peer *p)
{
    kv_format_drop(p->fmt);
    free(p->dialed);
    free(p);
}

struct kv_peer *
kv_peer_dial(struct kv_handoff *h, struct kv_format *fmt, const char *address, struct bt_err *err)
{
    struct bt_net_peer *net;
    struct kv_peer *p;

    bt_list_for_each (it, &h->peers) {
        p = BT_LIST_ENTRY(it, struct kv_peer, link);
        if (p->dialed && !p->closing && p->fmt == fmt && strcmp(p->dialed, address) == 0) {
            return p;
        }
    }
    if (h->stopping) {
        BT_FAIL(err, BT_E_CANCELLED, "stopping");
        return NULL;
    }
    p = new_peer(h, fmt);
    if (!p || !(p->dialed = strdup(address))) {
        if (p) {
            free_peer(p);
        }
        BT_FAIL(err, BT_E_NOMEM, "peer: out of memory");
        return NULL;
    }
    if (bt_net_connect(h->net, address, &net, err) != BT_OK) {
        free_peer(p);
        return NULL;
    }
    start_peer(p, net);
    return p;
}

static void on_closed(void *arg, struct bt_net_peer *net, int rc)
{
    struct kv_peer *p = bt_net_peer_user(net);
    const char *msg;

    if (!p) {
        return;
    }
    p->closing = true;
    if (p->fail_rc != BT_OK) {
        rc = p->fail_rc;
        msg = p->fail_msg;
    } else {
        rc = rc == BT_OK || rc == BT_E_CANCELLED ? BT_E_PEER_LOST : rc;
        msg = p->greeted ? "the connection to the peer is lost" : "the peer cannot be reached";
    }
    BT_DEBUG("handoff_peer_closed", "peer=%s address=%s rc=%s reason=\"%s\"", p->name,
             bt_net_peer_address(net), bt_rc_name(rc), msg);
    bt_list_remove(&p->link);
    bt_net_timer_stop(&p->tick);
    kv_send_tickets_lost(p);
    while (!bt_list_empty(&p->sends)) {
        kv_send_peer_lost(BT_LIST_ENTRY(p->sends.next, struct kv_send, peer_link));
    }
    while (!bt_list_empty(&p->recvs)) {
        kv_recv_peer_lost(BT_LIST_ENTRY(p->recvs.next, struct kv_recv, peer_link), rc, msg);
    }
    bt_net_rkey_destroy(p->rkey);
    __atomic_sub_fetch(&p->h->n_peers, 1, __ATOMIC_RELAXED);
    free_peer(p);
}

/* The decode node calls, the prefill node is called: always. */
static bool is_from_d(enum wire_handoff_type t)
{
    return t == WIRE_HANDOFF_TICKET || t == WIRE_HANDOFF_RESEND || t == WIRE_HANDOFF_ACK ||
           t == WIRE_HANDOFF_REACHED;
}

static bool is_from_p(enum wire_handoff_type t)
{
    return t == WIRE_HANDOFF_ANNOUNCE || t == WIRE_HANDOFF_DATA || t == WIRE_HANDOFF_PLACED ||
           t == WIRE_HANDOFF_COMMIT || t == WIRE_HANDOFF_NO || t == WIRE_HANDOFF_ACKED;
}

static void dispatch(struct kv_peer *p, const struct wire_handoff *m, struct bt_str data)
{
    struct wire_handoff pong = {.type = WIRE_HANDOFF_PONG};

    if (data.n && m->type != WIRE_HANDOFF_DATA && m->type != WIRE_HANDOFF_TICKET) {
        kv_peer_violation(p, "bytes behind a message that has none", m);
        return;
    }
    if (!p->greeted && m->type != WIRE_HANDOFF_HELLO && m->type != WIRE_HANDOFF_REFUSE) {
        kv_peer_violation(p, "message before HELLO", m);
        return;
    }
    if (is_from_d(m->type) ? p->dialed != NULL : is_from_p(m->type) && !p->dialed) {
        kv_peer_violation(p, "message in the wrong direction", m);
        return;
    }
    switch (m->type) {
    case WIRE_HANDOFF_HELLO:
        on_hello(p, m);
        break;
    case WIRE_HANDOFF_REFUSE:
        on_refuse(p, m);
        break;
    case WIRE_HANDOFF_PING:
        kv_peer_send(p, &pong, (struct bt_str){0});
        break;
    case WIRE_HANDOFF_PONG:
        break;
    case WIRE_HANDOFF_TICKET:
    case WIRE_HANDOFF_RESEND:
    case WIRE_HANDOFF_ACK:
    case WIRE_HANDOFF_REACHED:
        kv_send_on_message(p, m, data);
        break;
    case WIRE_HANDOFF_ANNOUNCE:
    case WIRE_HANDOFF_DATA:
    case WIRE_HANDOFF_PLACED:
    case WIRE_HANDOFF_COMMIT:
    case WIRE_HANDOFF_NO:
    case WIRE_HANDOFF_ACKED:
        kv_recv_on_message(p, m, data);
        break;
    case WIRE_HANDOFF_ABORT:
    case WIRE_HANDOFF_ABORTED:
        if (p->dialed) {
            kv_recv_on_message(p, m, data);
        } else {
            kv_send_on_message(p, m, data);
        }
        break;
    }
}

static void on_message(void *arg, struct bt_net_peer *net, struct bt_str head, struct bt_str data)
{
    struct kv_peer *p = bt_net_peer_user(net);
    struct wire_handoff m;
    struct bt_err err;
    int rc;

    if (!p || p->closing) {
        return;
    }
    p->last_in_ns = bt_net_clock_ns(p->h->net);
    rc = wire_handoff_unpack(head, &m, &err);
    if (rc == BT_E_INCOMPATIBLE) {
        refuse(p, rc, err.msg);
    } else if (rc != BT_OK) {
        kv_peer_violation(p, err.msg, NULL);
    } else {
        dispatch(p, &m, data);
    }
}

const struct bt_net_handlers kv_peer_handlers = {
    .accepted = on_accepted,
    .message = on_message,
    .closed = on_closed,
};
