/* Peers: connect, accept, messages, teardown.
 *
 * An endpoint dies in three steps, all in the loop and never inside a UCX callback: it is put on
 * the dying list (error callback, close), its endpoint is closed by force, which makes UCX complete
 * every operation on it, and when the last operation is back `closed` is called and it is freed. A
 * soft close flushes first.
 *
 * UCX reports the death of a peer over TCP and, through keepalive, over shared memory; a peer that
 * is merely stopped is never reported: silence is the business of the layer above. */
#include "common/net/net_int.h"

#include "common/obs/log.h"

#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>

/* ---- operations ---- */

struct bt_net_op *
bt_net_op_new(struct bt_net_peer *peer, size_t head, bt_net_done_fn done, void *arg)
{
    struct bt_net *net = peer->net;
    struct bt_list *it = bt_list_pop_front(&net->free_ops);
    struct bt_net_op *op;

    if (it) {
        op = BT_LIST_ENTRY(it, struct bt_net_op, link);
        net->n_free_ops--;
    } else {
        op = malloc(sizeof(*op));
        if (!op) {
            return NULL;
        }
        bt_list_init(&op->link);
    }
    op->peer = peer;
    op->done = done;
    op->arg = arg;
    op->head = op->small;
    if (head > sizeof(op->small)) {
        op->head = malloc(head);
        if (!op->head) {
            op->head = op->small;
            bt_net_op_free(op);
            return NULL;
        }
    }
    return op;
}

void bt_net_op_free(struct bt_net_op *op)
{
    struct bt_net *net = op->peer->net;

    if (op->head != op->small) {
        free(op->head);
    }
    if (net->n_free_ops < BT_NET_OPS_KEPT) {
        bt_list_push_front(&net->free_ops, &op->link);
        net->n_free_ops++;
    } else {
        free(op);
    }
}

static void op_end(struct bt_net_op *op, ucs_status_t status)
{
    bt_net_done_fn done = op->done;
    struct bt_net *net = op->peer->net;
    void *arg = op->arg;

    op->peer->n_ops--;
    bt_net_op_free(op);
    if (done) {
        net->in_done++;
        done(arg, bt_net_rc_of(status));
        net->in_done--;
    }
}

static void on_op_done(void *request, ucs_status_t status, void *user_data)
{
    ucp_request_free(request);
    op_end(user_data, status);
}

ucp_request_param_t bt_net_op_param(struct bt_net_op *op)
{
    return (ucp_request_param_t){
        .op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA,
        .cb.send = on_op_done,
        .user_data = op,
    };
}

int bt_net_op_started(struct bt_net_op *op, ucs_status_ptr_t status)
{
    if (UCS_PTR_IS_ERR(status)) {
        int rc = bt_net_rc_of(UCS_PTR_STATUS(status));

        bt_net_op_free(op);
        return rc;
    }
    op->peer->n_ops++;
    if (status == NULL) {
        op_end(op, UCS_OK);
    }
    return BT_OK;
}

/* ---- frames ---- */

static void put_u16(char *p, uint16_t v)
{
    p[0] = (char)(v & 0xff);
    p[1] = (char)(v >> 8);
}

static void put_u32(char *p, uint32_t v)
{
    put_u16(p, (uint16_t)(v & 0xffff));
    put_u16(p + 2, (uint16_t)(v >> 16));
}

static uint32_t get_u16(const char *p)
{
    return (uint32_t)(uint8_t)p[0] | (uint32_t)(uint8_t)p[1] << 8;
}

static uint32_t get_u32(const char *p)
{
    return get_u16(p) | get_u16(p + 2) << 16;
}

static void write_frame(char *p, enum bt_net_frame kind, uint32_t seq)
{
    put_u16(p, BT_NET_FRAME_VERSION);
    put_u16(p + 2, (uint16_t)kind);
    put_u32(p + 4, seq);
}

static void write_hello(char *p)
{
    const struct bt_net_home *home = bt_net_home();

    write_frame(p, BT_NET_FRAME_HELLO, 0);
    p += BT_NET_FRAME_BYTES;
    put_u32(p, (uint32_t)home->host);
    put_u32(p + 4, (uint32_t)(home->host >> 32));
    put_u32(p + 8, (uint32_t)home->cookie_at);
    put_u32(p + 12, (uint32_t)(home->cookie_at >> 32));
    put_u32(p + 16, home->pid);
    memcpy(p + 20, home->cookie, sizeof(home->cookie));
}

static struct bt_net_home read_hello(const char *p)
{
    struct bt_net_home home;

    p += BT_NET_FRAME_BYTES;
    home.host = (uint64_t)get_u32(p + 4) << 32 | get_u32(p);
    home.cookie_at = (uint64_t)get_u32(p + 12) << 32 | get_u32(p + 8);
    home.pid = get_u32(p + 16);
    memcpy(home.cookie, p + 20, sizeof(home.cookie));
    return home;
}

/* Posts a message; the operation is consumed either way. */
static int send_op(struct bt_net_op *op)
{
    ucp_request_param_t param = bt_net_op_param(op);

    param.op_attr_mask |= UCP_OP_ATTR_FIELD_FLAGS;
    param.flags = UCP_AM_SEND_FLAG_REPLY | UCP_AM_SEND_FLAG_EAGER;
    return bt_net_op_started(op, ucp_am_send_nbx(op->peer->ep, BT_NET_AM_ID, op->head,
                                                 op->head_bytes, op->data.p, op->data.n, &param));
}

/* ---- teardown ---- */

static void start_dying(struct bt_net_peer *peer)
{
    if (!peer->dying) {
        peer->dying = true;
        bt_list_push_back(&peer->net->dying, &peer->dying_link);
    }
}

void bt_net_peer_fail(struct bt_net_peer *peer, int rc)
{
    if (peer->rc == BT_OK) {
        peer->rc = rc;
    }
    start_dying(peer);
}

static void on_error(void *arg, ucp_ep_h ep, ucs_status_t status)
{
    struct bt_net_peer *peer = arg;

    BT_DEBUG("peer_error", "peer=%s reason=\"%s\"", peer->address, ucs_status_string(status));
    peer->failed = true;
    bt_net_peer_fail(peer, BT_E_PEER_LOST);
}

static void on_closed(void *request, ucs_status_t status, void *user_data)
{
    struct bt_net_peer *peer = user_data;

    ucp_request_free(request);
    peer->close_done = true;
}

static void cancel_queue(struct bt_net_peer *peer)
{
    struct bt_list *it;

    while ((it = bt_list_pop_front(&peer->queue)) != NULL) {
        op_end(BT_LIST_ENTRY(it, struct bt_net_op, link), UCS_ERR_CANCELED);
    }
}

static void begin_close(struct bt_net_peer *peer)
{
    ucp_request_param_t param = {
        .op_attr_mask =
            UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_FLAGS,
        .flags = UCP_EP_CLOSE_FLAG_FORCE,
        .cb.send = on_closed,
        .user_data = peer,
    };
    ucs_status_ptr_t status;

    peer->up = peer->state == BT_NET_PEER_UP;
    peer->state = BT_NET_PEER_CLOSING;
    bt_net_timer_stop(&peer->up_timer);
    bt_list_remove(&peer->held_link);
    cancel_queue(peer);
    if (!peer->ep) {
        peer->close_done = true;
        return;
    }
    bt_map_del(&peer->net->by_ep, (uint64_t)(uintptr_t)peer->ep);
    status = ucp_ep_close_nbx(peer->ep, &param);
    if (status == NULL) {
        peer->close_done = true;
    } else if (UCS_PTR_IS_ERR(status)) {
        /* With force and PEER error handling UCX refuses nothing; stay without proof if it does. */
        BT_ERROR("peer_close", "peer=%s reason=\"%s\"", peer->address,
                 ucs_status_string(UCS_PTR_STATUS(status)));
    }
}

static void bury(struct bt_net_peer *peer)
{
    struct bt_net *net = peer->net;

    bt_list_remove(&peer->dying_link);
    bt_net_gate_drop(peer);
    bt_net_timer_stop(&peer->up_timer);
    if (net->on.closed && (peer->up || !peer->accepted)) {
        net->on.closed(net->on.arg, peer, peer->rc);
    }
    bt_net_views_drop(peer);
    bt_list_remove(&peer->link);
    net->n_peers--;
    free(peer);
}

/* UCX 1.13 may abort when an endpoint is closed in the middle of its connection setup, which takes
 * a millisecond where it succeeds: wait for its end, but not for ever. */
static bool may_close(struct bt_net_peer *peer)
{
    if (!peer->ep || peer->state == BT_NET_PEER_UP || peer->failed || peer->hello_sent ||
        peer->overdue) {
        return true;
    }
    if (!peer->waiting) {
        peer->waiting = true;
        bt_net_timer_start(peer->net, &peer->up_timer, bt_deadline_ns(BT_NET_SAFE_NS));
    }
    return false;
}

bool bt_net_reap(struct bt_net *net)
{
    bool any = false;

    bt_list_for_each_safe (it, &net->dying) {
        struct bt_net_peer *peer = BT_LIST_ENTRY(it, struct bt_net_peer, dying_link);

        if (peer->state != BT_NET_PEER_CLOSING && may_close(peer)) {
            begin_close(peer);
            any = true;
        }
    }
    /* From the front again after each one: `closed` may close others. */
    for (bool again = true; again;) {
        again = false;
        bt_list_for_each (it, &net->dying) {
            struct bt_net_peer *peer = BT_LIST_ENTRY(it, struct bt_net_peer, dying_link);

            if (peer->close_done && peer->n_ops == 0) {
                bury(peer);
                any = again = true;
                break;
            }
        }
    }
    return any;
}

static void on_soft_flush(void *arg, int rc)
{
    start_dying(arg);
}

static void soft_flush(struct bt_net_peer *peer)
{
    if (bt_net_flush(peer, on_soft_flush, peer) != BT_OK) {
        start_dying(peer);
    }
}

/* What waits goes out, then a close that waits for it. What is sent meanwhile waits for the next
 * time. */
static void post_queue(struct bt_net_peer *peer)
{
    struct bt_list todo, *it;
    int rc = BT_OK;

    bt_list_init(&todo);
    bt_list_splice_back(&todo, &peer->queue);
    while (rc == BT_OK && (it = bt_list_pop_front(&todo)) != NULL) {
        peer->n_ops--; /* was counted as queued */
        rc = send_op(BT_LIST_ENTRY(it, struct bt_net_op, link));
    }
    if (rc != BT_OK) {
        bt_list_splice_back(&peer->queue, &todo); /* to be cancelled */
        bt_net_peer_fail(peer, rc);
    } else if (peer->flushing && bt_list_empty(&peer->queue)) {
        soft_flush(peer);
    }
}

bool bt_net_post_held(struct bt_net *net)
{
    struct bt_list todo, *it;
    bool any = false;

    bt_list_init(&todo);
    bt_list_splice_back(&todo, &net->held);
    while ((it = bt_list_pop_front(&todo)) != NULL) {
        struct bt_net_peer *peer = BT_LIST_ENTRY(it, struct bt_net_peer, held_link);

        any = true;
        if (!peer->dying) {
            post_queue(peer);
        }
    }
    return any;
}

void bt_net_peer_close(struct bt_net_peer *peer, bool force)
{
    if (peer->dying) {
        return;
    }
    if (force) {
        bt_net_peer_fail(peer, BT_E_CANCELLED);
    } else if (!peer->flushing) {
        peer->flushing = true;
        if (peer->state == BT_NET_PEER_UP && bt_list_empty(&peer->queue)) {
            soft_flush(peer);
        }
    }
}

/* ---- connect and accept ---- */

static void on_up_timer(struct bt_net_timer *t)
{
    struct bt_net_peer *peer = BT_CONTAINER_OF(t, struct bt_net_peer, up_timer);

    BT_DEBUG("peer_connect", "peer=%s msg=\"not up in time\"", peer->address);
    peer->overdue = peer->dying;
    bt_net_peer_fail(peer, BT_E_PEER_LOST);
}

static struct bt_net_peer *new_peer(struct bt_net *net, bool accepted)
{
    struct bt_net_peer *peer = bt_calloc(1, sizeof(*peer));

    if (!peer) {
        return NULL;
    }
    peer->net = net;
    peer->accepted = accepted;
    peer->up_timer.fn = on_up_timer;
    bt_list_init(&peer->dying_link);
    bt_list_init(&peer->held_link);
    bt_list_init(&peer->queue);
    bt_list_init(&peer->views);
    bt_list_push_back(&net->peers, &peer->link);
    net->n_peers++;
    return peer;
}

static void drop_new_peer(struct bt_net_peer *peer)
{
    bt_net_timer_stop(&peer->up_timer);
    bt_list_remove(&peer->link);
    peer->net->n_peers--;
    free(peer);
}

static void go_up(struct bt_net_peer *peer)
{
    struct bt_net *net = peer->net;

    if (peer->state != BT_NET_PEER_CONNECTING || peer->dying || !peer->hello_sent ||
        !peer->hello_seen) {
        return;
    }
    peer->state = BT_NET_PEER_UP;
    bt_net_timer_stop(&peer->up_timer);
    if (!bt_list_empty(&peer->queue)) {
        bt_list_push_back(&net->held, &peer->held_link);
    } else if (peer->flushing) {
        soft_flush(peer);
    }
    if (peer->accepted && net->on.accepted) {
        net->on.accepted(net->on.arg, peer);
    }
}

static void on_hello_sent(void *arg, int rc)
{
    struct bt_net_peer *peer = arg;

    if (rc == BT_OK) {
        peer->hello_sent = true;
        go_up(peer);
    }
}

/* Fills the rest of `params`, creates the endpoint and makes it known. */
static ucs_status_t open_endpoint(struct bt_net_peer *peer, ucp_ep_params_t *params)
{
    struct bt_net_op *op;
    ucs_status_t status;

    params->field_mask |= UCP_EP_PARAM_FIELD_ERR_HANDLER | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE;
    params->err_mode = UCP_ERR_HANDLING_MODE_PEER;
    params->err_handler.cb = on_error;
    params->err_handler.arg = peer;
    status = ucp_ep_create(peer->net->worker, params, &peer->ep);
    if (status != UCS_OK) {
        return status;
    }
    bt_net_timer_start(peer->net, &peer->up_timer, bt_deadline_ns(BT_NET_UP_NS));
    if (bt_map_put(&peer->net->by_ep, (uint64_t)(uintptr_t)peer->ep, peer) != BT_OK) {
        bt_net_peer_fail(peer, BT_E_NOMEM);
        return UCS_OK;
    }
    op = bt_net_op_new(peer, BT_NET_HELLO_BYTES, on_hello_sent, peer);
    if (op) {
        write_hello(op->head);
        op->data = (struct bt_str){0};
        op->head_bytes = BT_NET_HELLO_BYTES;
    }
    if (!op || send_op(op) != BT_OK) {
        bt_net_peer_fail(peer, BT_E_PEER_LOST);
    }
    return UCS_OK;
}

static void on_connection(ucp_conn_request_h request, void *arg)
{
    struct bt_net *net = arg;
    ucp_conn_request_attr_t attr = {.field_mask = UCP_CONN_REQUEST_ATTR_FIELD_CLIENT_ADDR};
    ucp_ep_params_t params = {
        .field_mask = UCP_EP_PARAM_FIELD_CONN_REQUEST,
        .conn_request = request,
    };
    struct bt_net_peer *peer = NULL;
    ucs_status_t status;

    if (ucp_conn_request_query(request, &attr) != UCS_OK) {
        attr.client_address.ss_family = AF_UNSPEC;
    }
    if (!net->stopping && net->n_peers < BT_NET_MAX_PEERS) {
        peer = new_peer(net, true);
    }
    if (peer && net->gated && !bt_net_gate_adopt(peer)) {
        drop_new_peer(peer);
        peer = NULL;
    }
    if (!peer) {
        BT_WARN("peer_refused", "peers=%u", net->n_peers);
        ucp_listener_reject(net->listener, request);
        return;
    }
    if (!net->gated) {
        bt_net_format(&attr.client_address, peer->address, sizeof(peer->address));
    }
    status = open_endpoint(peer, &params);
    if (status != UCS_OK) {
        BT_WARN("peer_refused", "peer=%s reason=\"%s\"", peer->address, ucs_status_string(status));
        bt_net_gate_drop(peer);
        drop_new_peer(peer);
    }
}

int bt_net_listen(struct bt_net *net, struct bt_err *err)
{
    struct sockaddr_storage sa;
    ucp_listener_params_t params = {
        .field_mask = UCP_LISTENER_PARAM_FIELD_SOCK_ADDR | UCP_LISTENER_PARAM_FIELD_CONN_HANDLER,
        .conn_handler = {.cb = on_connection, .arg = net},
    };
    ucp_listener_attr_t attr = {.field_mask = UCP_LISTENER_ATTR_FIELD_SOCKADDR};
    ucs_status_t status;

    sa = net->listen_address;
    if (net->gated) { /* the public port is the gate's */
        bt_net_set_port(&sa, 0);
    }
    params.sockaddr.addr = (const struct sockaddr *)&sa;
    params.sockaddr.addrlen =
        sa.ss_family == AF_INET6 ? sizeof(struct sockaddr_in6) : sizeof(struct sockaddr_in);
    status = ucp_listener_create(net->worker, &params, &net->listener);
    if (status == UCS_OK) {
        status = ucp_listener_query(net->listener, &attr);
    }
    if (status != UCS_OK) {
        return BT_FAIL(err, BT_E_CONFIG, "cannot listen on %.80s: %s", net->listen,
                       ucs_status_string(status));
    }
    if (net->gated) {
        net->ucx_address = attr.sockaddr;
        return bt_net_gate_listen(net, err);
    }
    bt_net_format(&attr.sockaddr, net->address, sizeof(net->address));
    return BT_OK;
}

void bt_net_peer_call(struct bt_net_peer *peer, const struct sockaddr_storage *to)
{
    ucp_ep_params_t params = {
        .field_mask = UCP_EP_PARAM_FIELD_FLAGS | UCP_EP_PARAM_FIELD_SOCK_ADDR,
        .flags = UCP_EP_PARAMS_FLAGS_CLIENT_SERVER,
        .sockaddr.addr = (const struct sockaddr *)to,
        .sockaddr.addrlen =
            to->ss_family == AF_INET6 ? sizeof(struct sockaddr_in6) : sizeof(struct sockaddr_in),
    };
    ucs_status_t status;

    if (peer->dying) {
        return;
    }
    status = open_endpoint(peer, &params);
    if (status != UCS_OK) {
        BT_DEBUG("peer_connect", "peer=%s reason=\"%s\"", peer->address, ucs_status_string(status));
        peer->ep = NULL;
        bt_net_peer_fail(peer, BT_E_PEER_LOST);
    }
}

int bt_net_connect(struct bt_net *net,
                   const char *address,
                   struct bt_net_peer **ret_peer,
                   struct bt_err *err)
{
    struct sockaddr_storage sa;
    struct bt_net_peer *peer;
    socklen_t len;
    int rc;

    if (net->stopping) {
        return BT_FAIL(err, BT_E_CANCELLED, "stopping");
    }
    if (net->n_peers >= BT_NET_MAX_PEERS) {
        return BT_FAIL(err, BT_E_EXHAUSTED, "%u connections are open, the limit", net->n_peers);
    }
    rc = bt_net_resolve(address, true, &sa, &len, err);
    if (rc != BT_OK) {
        return rc;
    }
    peer = new_peer(net, false);
    if (!peer) {
        return BT_FAIL(err, BT_E_NOMEM, "peer: out of memory");
    }
    bt_net_format(&sa, peer->address, sizeof(peer->address));
    bt_net_timer_start(net, &peer->up_timer, bt_deadline_ns(BT_NET_UP_NS));
    if (net->gated) {
        rc = bt_net_gate_dial(peer, &sa, err);
        if (rc != BT_OK) {
            drop_new_peer(peer);
            return rc;
        }
    } else {
        bt_net_peer_call(peer, &sa);
    }
    *ret_peer = peer;
    return BT_OK;
}

/* ---- what the connection is made of ---- */

/* UCX 1.13 tells the lanes of an endpoint only in text. */
static void learn_lanes(struct bt_net_peer *peer)
{
    struct bt_net *net = peer->net;
    char *text = NULL;
    size_t n = 0;
    FILE *f;

    peer->method = BT_NET_METHOD_MESSAGE;
    peer->transport = "tcp";
    if (peer->state == BT_NET_PEER_UP && !peer->dying) {
        f = open_memstream(&text, &n);
        if (f) {
            ucp_ep_print_info(peer->ep, f);
            fclose(f);
        }
    }
    if (text) {
        if (strstr(text, ":posix/") || strstr(text, ":sysv/")) {
            peer->transport = "shm";
        } else if (strstr(text, ":rc_") || strstr(text, ":dc_")) {
            peer->method = BT_NET_METHOD_PUT;
            peer->transport = "rdma";
        }
        free(text);
    }
    if (peer->mapped_pid) {
        peer->method = BT_NET_METHOD_PULL;
        peer->transport = "shm";
    }
    if (net->forced_method >= 0) {
        peer->method = (enum bt_net_method)net->forced_method;
    }
    peer->lanes_known = peer->state != BT_NET_PEER_CONNECTING;
}

enum bt_net_method bt_net_peer_method(const struct bt_net_peer *peer)
{
    if (!peer->lanes_known) {
        learn_lanes((struct bt_net_peer *)peer); /* a cache, filled on first use */
    }
    return peer->method;
}

const char *bt_net_peer_transport(const struct bt_net_peer *peer)
{
    (void)bt_net_peer_method(peer);
    return peer->transport;
}

void bt_net_peer_set_user(struct bt_net_peer *peer, void *user)
{
    peer->user = user;
}

void *bt_net_peer_user(const struct bt_net_peer *peer)
{
    return peer->user;
}

const char *bt_net_peer_address(const struct bt_net_peer *peer)
{
    return peer->address;
}

/* ---- messages ---- */

static void break_off(struct bt_net_peer *peer, const char *why, uint64_t value)
{
    BT_WARN("peer_protocol", "peer=%s reason=\"%s\" value=%llu", peer->address, why,
            (unsigned long long)value);
    bt_net_peer_fail(peer, BT_E_PEER_PROTOCOL);
}

static void on_hello(struct bt_net_peer *peer, const char *frame)
{
    struct bt_net_home home = read_hello(frame);

    peer->hello_seen = true;
    if (peer->net->may_map && bt_net_mapped_probe(&home)) {
        peer->mapped_pid = home.pid;
        peer->home = home;
    }
    go_up(peer);
}

static ucs_status_t on_message(void *arg,
                               const void *header,
                               size_t header_length,
                               void *data,
                               size_t length,
                               const ucp_am_recv_param_t *param)
{
    struct bt_net *net = arg;
    struct bt_net_peer *peer = NULL;
    const char *frame = header;

    if (param->recv_attr & UCP_AM_RECV_ATTR_FIELD_REPLY_EP) {
        peer = bt_map_get(&net->by_ep, (uint64_t)(uintptr_t)param->reply_ep);
    }
    if (!peer || peer->dying) {
        return UCS_OK; /* nobody we know, or not any more */
    }
    if (param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV) {
        break_off(peer, "rendezvous message", length);
        return UCS_ERR_REJECTED;
    }
    if (header_length < BT_NET_FRAME_BYTES) {
        break_off(peer, "malformed frame of bytes", header_length);
    } else if (get_u16(frame) != BT_NET_FRAME_VERSION) {
        break_off(peer, "unknown frame version", get_u16(frame));
    } else if (get_u16(frame + 2) == BT_NET_FRAME_HELLO && !peer->hello_seen &&
               header_length == BT_NET_HELLO_BYTES) {
        on_hello(peer, frame);
    } else if (get_u16(frame + 2) != BT_NET_FRAME_MESSAGE) {
        break_off(peer, "unknown frame kind", get_u16(frame + 2));
    } else if (get_u32(frame + 4) != peer->rx_seq) {
        break_off(peer, "message out of order", get_u32(frame + 4));
    } else if (header_length > (size_t)BT_NET_MAX_HEAD + BT_NET_FRAME_BYTES ||
               length > net->cfg.max_message_bytes) {
        break_off(peer, "message too long, bytes", length);
    } else {
        peer->rx_seq++;
        net->on.message(
            net->on.arg, peer,
            (struct bt_str){frame + BT_NET_FRAME_BYTES, header_length - BT_NET_FRAME_BYTES},
            (struct bt_str){data, length});
    }
    return UCS_OK;
}

int bt_net_peer_init_worker(struct bt_net *net, struct bt_err *err)
{
    ucp_am_handler_param_t param = {
        .field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_FLAGS |
                      UCP_AM_HANDLER_PARAM_FIELD_CB | UCP_AM_HANDLER_PARAM_FIELD_ARG,
        .id = BT_NET_AM_ID,
        .flags = UCP_AM_FLAG_WHOLE_MSG,
        .cb = on_message,
        .arg = net,
    };
    ucs_status_t status = ucp_worker_set_am_recv_handler(net->worker, &param);

    if (status != UCS_OK) {
        return BT_FAIL(err, BT_E_CONFIG, "UCX active messages: %s", ucs_status_string(status));
    }
    return BT_OK;
}

/* UCX 1.13 calls back while it still hands out room to those that wait for it: what is posted there
 * takes the room of others and overtakes them, over shared memory and over TCP. So what a done
 * callback sends waits until UCX is left, and what comes later waits behind it. */
static bool must_wait(struct bt_net_peer *peer)
{
    struct bt_net *net = peer->net;

    if (peer->state == BT_NET_PEER_CONNECTING || !bt_list_empty(&peer->queue)) {
        return true;
    }
    if (net->in_done > 0) {
        bt_list_push_back(&net->held, &peer->held_link);
    }
    return net->in_done > 0;
}

int bt_net_send(struct bt_net_peer *peer,
                struct bt_str head,
                struct bt_str data,
                bt_net_done_fn done,
                void *arg)
{
    size_t head_bytes = head.n + BT_NET_FRAME_BYTES;
    struct bt_net_op *op;
    int rc;

    if (peer->dying || peer->flushing) {
        return BT_E_PEER_LOST;
    }
    if (head.n > BT_NET_MAX_HEAD || head_bytes > peer->net->max_head ||
        data.n > peer->net->cfg.max_message_bytes) {
        return BT_E_TOO_LARGE;
    }
    op = bt_net_op_new(peer, head_bytes, done, arg);
    if (!op) {
        return BT_E_NOMEM;
    }
    write_frame(op->head, BT_NET_FRAME_MESSAGE, peer->tx_seq);
    if (head.n) {
        memcpy(op->head + BT_NET_FRAME_BYTES, head.p, head.n);
    }
    op->head_bytes = head_bytes;
    op->data = data;
    peer->tx_seq++;
    if (must_wait(peer)) {
        peer->n_ops++;
        bt_list_push_back(&peer->queue, &op->link);
        return BT_OK;
    }
    rc = send_op(op);
    if (rc != BT_OK) {
        peer->tx_seq--;
    }
    return rc;
}
