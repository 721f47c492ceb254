/* Server: request slots, calls and their one send batch, limits, drain and shutdown. Loop thread.
 *
 * A call struct is made before its call: it is the slot that grpc_server_request_call fills. Each
 * batch in flight is counted in n_tags; the struct is freed when RECV_CLOSE and all others are back
 * (an unref before that would cancel). The send side is one batch at a time of what is ready:
 * headers, one message, status. `closed` is told when RECV_CLOSE says cancelled, else when the
 * status batch and RECV_CLOSE are both back. */
#include "common/rpc/server.h"

#include "common/base/buf.h"
#include "common/obs/log.h"
#include "common/rpc/rpc_int.h"

#include <grpc/support/alloc.h>
#include <openssl/crypto.h>
#include <stdio.h>
#include <stdlib.h>

#define N_SLOTS      64 /* calls that core may hand over in one go; reposted at once */
#define MAX_SERVICES 16
#define MAX_TEXT     1000
#define MAX_TRAILERS 4
/* What a connection's flow-control windows may hold of messages that nobody waits for yet. */
#define WINDOWS_BYTES (16u << 20)

enum call_state {
    CALL_SLOT,      /* waits for a call */
    CALL_OPEN,      /* messages may go both ways */
    CALL_FINISHING, /* finish was called; what is queued still goes out */
    CALL_CLOSED,    /* `closed` was told; waits for its last tags */
};

enum server_phase {
    SERVER_SETUP,
    SERVER_RUNNING,
    SERVER_DRAINING,
    SERVER_STOPPING, /* core's shutdown was asked for */
    SERVER_DONE,
};

struct bt_rpc_server {
    struct bt_loop *loop;
    struct bt_rpc_server_config config;
    grpc_server *server;
    enum server_phase phase;
    const struct bt_rpc_service *services[MAX_SERVICES];
    size_t n_services;
    struct bt_rpc_guard guard;
    struct bt_rpc_fetcher fetcher;
    struct bt_list calls; /* struct bt_rpc_call.link, slots not included */
    size_t n_slots;
    size_t n_user_calls;   /* opened, not infrastructure, not freed yet */
    size_t n_evicted;      /* of them: ended for having said nothing */
    struct bt_list silent; /* of them: no message came yet; oldest first */
    struct bt_cq_tag shutdown_tag;
    bool shutdown_seen;
    bool cancelled_all;
    struct bt_timer grace, look; /* look: for tokens that are gone */
    uint64_t tokens_version;     /* that all calls were let in by */
    void (*done)(void *arg);
    void *done_arg;
};

struct bt_rpc_call {
    struct bt_list link, silent_link;
    struct bt_rpc_server *srv;
    grpc_call *call;
    grpc_call_details details;
    grpc_metadata_array metadata;
    const struct bt_rpc_service *service; /* NULL: refused before it was opened */
    const struct bt_rpc_method *method;
    void *user;
    struct bt_who who;
    char *shown; /* a later token of the caller; NULL = that of the metadata. Owned, wiped */
    enum call_state state;
    int n_tags;
    struct bt_rpc_conn *conn;

    struct bt_cq_tag new_tag, close_tag, recv_tag, send_tag;
    grpc_byte_buffer *recv_buf;
    int close_cancelled;
    bool close_seen;
    bool receiving; /* RECV_MESSAGE in flight */
    bool held;      /* it came back while paused; resume_timer delivers it */
    bool held_ok;
    bool read_done; /* nothing more is read */
    bool paused;
    bool evicted;
    struct bt_timer resume_timer;

    struct bt_rpc_sendq sendq;
    bool sending; /* a send batch is in flight */
    bool sending_message;
    bool headers_sent, want_headers;
    bool status_sent; /* in a batch, perhaps still in flight */
    bool want_drained;
    int status;
    char *status_text; /* owned, may be NULL */
    int refused_rc;    /* its token is gone */
    grpc_metadata trailers[MAX_TRAILERS];
    size_t n_trailers;
    char *peer; /* owned, gpr_free */
};

static void post_slots(struct bt_rpc_server *srv);
static void pump_send(struct bt_rpc_call *call);

/* --- life of a call --- */

static void maybe_done(struct bt_rpc_server *srv)
{
    void (*done)(void *arg) = srv->done;

    if (srv->phase != SERVER_STOPPING) {
        return;
    }
    if (srv->n_user_calls == 0 && !srv->cancelled_all) {
        srv->cancelled_all = true;
        grpc_server_cancel_all_calls(srv->server); /* infrastructure has no say in when we end */
    }
    if (!srv->shutdown_seen || srv->n_slots > 0 || !bt_list_empty(&srv->calls)) {
        return;
    }
    srv->phase = SERVER_DONE;
    bt_timer_stop(srv->loop, &srv->grace);
    if (done) {
        srv->done = NULL;
        done(srv->done_arg); /* may destroy srv */
    }
}

static void forget_shown(struct bt_rpc_call *call)
{
    if (call->shown) {
        OPENSSL_cleanse(call->shown, strlen(call->shown));
        free(call->shown);
        call->shown = NULL;
    }
}

static void call_free(struct bt_rpc_call *call)
{
    bt_timer_stop(call->srv->loop, &call->resume_timer);
    if (call->recv_buf) {
        grpc_byte_buffer_destroy(call->recv_buf);
    }
    for (size_t i = 0; i < call->n_trailers; i++) {
        grpc_slice_unref(call->trailers[i].key);
        grpc_slice_unref(call->trailers[i].value);
    }
    bt_rpc_sendq_drop(&call->sendq, false);
    bt_rpc_conn_put(call->conn);
    forget_shown(call);
    free(call->status_text);
    gpr_free(call->peer);
    grpc_call_details_destroy(&call->details);
    grpc_metadata_array_destroy(&call->metadata);
    if (call->call) {
        grpc_call_unref(call->call);
    }
    free(call);
}

/* Last step of every event of a call: frees it when nothing is in flight. */
static void call_put(struct bt_rpc_call *call)
{
    struct bt_rpc_server *srv = call->srv;

    if (call->n_tags > 0 || !call->close_seen || call->state != CALL_CLOSED) {
        return;
    }
    bt_list_remove(&call->link);
    if (call->service && !call->service->infrastructure) {
        srv->n_user_calls--;
        srv->n_evicted -= call->evicted;
    }
    call_free(call);
    post_slots(srv);
    maybe_done(srv);
}

static void call_close(struct bt_rpc_call *call, bool cancelled)
{
    if (call->state == CALL_CLOSED) {
        return;
    }
    call->state = CALL_CLOSED;
    call->read_done = true;
    bt_list_remove(&call->silent_link);
    bt_timer_stop(call->srv->loop, &call->resume_timer);
    bt_rpc_sendq_drop(&call->sendq, call->sending_message);
    if (call->method && call->method->closed) {
        call->method->closed(call, cancelled);
    }
}

static void on_close(struct bt_cq_tag *tag, bool ok)
{
    struct bt_rpc_call *call = BT_CONTAINER_OF(tag, struct bt_rpc_call, close_tag);

    call->n_tags--;
    call->close_seen = true;
    if (call->close_cancelled || !call->status_sent) {
        call_close(call, true);
    } else if (!call->sending) {
        call_close(call, false);
    }
    call_put(call);
}

/* --- receive side --- */

static void post_recv(struct bt_rpc_call *call)
{
    grpc_op op = {.op = GRPC_OP_RECV_MESSAGE, .data.recv_message.recv_message = &call->recv_buf};

    if (call->state != CALL_OPEN || call->read_done || call->receiving || call->held ||
        call->paused) {
        return;
    }
    call->receiving = true;
    bt_rpc_conn_wait(call->conn);
    call->n_tags++;
    bt_loop_batch(call->srv->loop, call->call, &op, 1, &call->recv_tag);
}

static void end_of_input(struct bt_rpc_call *call)
{
    call->read_done = true;
    if (call->state == CALL_OPEN && call->method->half_close) {
        call->method->half_close(call);
    }
}

static void handle_message(struct bt_rpc_call *call)
{
    const struct bt_rpc_method *m = call->method;
    struct bt_rpc_arena *arena = bt_loop_arena(call->srv->loop);
    const struct bt_rpc_unpack_args args = {
        .desc = m->request, .limit_bytes = 8 * call->srv->config.max_message_bytes, .strict = true};
    grpc_byte_buffer *buf = call->recv_buf;
    ProtobufCMessage *msg;
    char text[256];
    int rc;

    call->recv_buf = NULL;
    rc = bt_rpc_unpack(arena, &args, buf, &msg);
    if (rc == BT_OK) {
        m->message(call, msg);
    } else {
        snprintf(text, sizeof(text), "%.90s: %s", m->path, arena->why);
        bt_rpc_call_finish(
            call, rc == BT_E_EXHAUSTED ? BT_RPC_RESOURCE_EXHAUSTED : BT_RPC_INVALID_ARGUMENT, text);
    }
    grpc_byte_buffer_destroy(buf);
    arena->list = NULL;
    bt_rpc_arena_trim(arena);
}

/* A receive came back; recv_buf is the message or NULL at the end of the input. */
static void received(struct bt_rpc_call *call, bool ok)
{
    const struct bt_rpc_method *m = call->method;
    char text[256];

    if (call->state != CALL_OPEN) {
        call->read_done = true; /* recv_buf goes with the call */
    } else if (ok && call->recv_buf) {
        handle_message(call);
        if (!m->client_stream && call->state == CALL_OPEN) {
            end_of_input(call);
        }
    } else if (ok && !m->client_stream) {
        call->read_done = true;
        snprintf(text, sizeof(text), "%s: the request message is missing", m->path);
        bt_rpc_call_finish(call, BT_RPC_INVALID_ARGUMENT, text);
    } else if (ok) {
        end_of_input(call);
    } else {
        call->read_done = true; /* broken call: RECV_CLOSE says so */
    }
    post_recv(call);
}

static void on_recv(struct bt_cq_tag *tag, bool ok)
{
    struct bt_rpc_call *call = BT_CONTAINER_OF(tag, struct bt_rpc_call, recv_tag);

    call->n_tags--;
    call->receiving = false;
    bt_list_remove(&call->silent_link);
    bt_rpc_conn_delivered(call->conn,
                          ok && call->recv_buf ? grpc_byte_buffer_length(call->recv_buf) : 0);
    if (call->paused && call->state == CALL_OPEN) {
        call->held = true;
        call->held_ok = ok;
    } else {
        received(call, ok);
    }
    call_put(call);
}

static void on_resume(struct bt_loop *loop, struct bt_timer *timer)
{
    struct bt_rpc_call *call = BT_CONTAINER_OF(timer, struct bt_rpc_call, resume_timer);

    if (call->paused || !call->held) {
        return;
    }
    call->held = false;
    received(call, call->held_ok);
}

/* --- send side --- */

static void pump_send(struct bt_rpc_call *call)
{
    grpc_byte_buffer *head = bt_rpc_sendq_head(&call->sendq);
    bool last = call->state == CALL_FINISHING && !bt_rpc_sendq_has_more(&call->sendq);
    grpc_slice text = grpc_empty_slice();
    grpc_op ops[3] = {0};
    size_t n = 0;

    if (call->sending || call->state == CALL_CLOSED || call->close_seen || call->status_sent) {
        return;
    }
    if (!call->headers_sent && (head || last || call->want_headers)) {
        ops[n++].op = GRPC_OP_SEND_INITIAL_METADATA;
        call->headers_sent = true;
    }
    if (head) {
        ops[n].op = GRPC_OP_SEND_MESSAGE;
        /* What follows at once takes it along: one write, one wake-up of the peer. Not beside the
         * headers: such a batch would wait for a write that it keeps from beginning. */
        ops[n].flags = n == 0 && bt_rpc_sendq_has_more(&call->sendq) ? GRPC_WRITE_BUFFER_HINT : 0;
        ops[n++].data.send_message.send_message = head;
    }
    if (last) {
        text = grpc_slice_from_copied_string(call->status_text ? call->status_text : "");
        ops[n].op = GRPC_OP_SEND_STATUS_FROM_SERVER;
        ops[n].data.send_status_from_server.status = (grpc_status_code)call->status;
        ops[n].data.send_status_from_server.status_details = &text;
        ops[n].data.send_status_from_server.trailing_metadata = call->trailers;
        ops[n++].data.send_status_from_server.trailing_metadata_count = call->n_trailers;
        call->status_sent = true;
    }
    if (n > 0) {
        call->sending = true;
        call->sending_message = head != NULL;
        call->n_tags++;
        bt_loop_batch(call->srv->loop, call->call, ops, n, &call->send_tag);
    }
    grpc_slice_unref(text);
}

static void on_sent(struct bt_cq_tag *tag, bool ok)
{
    struct bt_rpc_call *call = BT_CONTAINER_OF(tag, struct bt_rpc_call, send_tag);

    call->n_tags--;
    call->sending = false;
    if (call->sending_message) {
        call->sending_message = false;
        bt_rpc_sendq_pop(&call->sendq);
    }
    if (!ok) {
        bt_rpc_sendq_drop(&call->sendq, false); /* RECV_CLOSE tells the rest */
    }
    if (call->status_sent && call->close_seen) {
        call_close(call, call->close_cancelled || !ok);
    } else if (ok) {
        pump_send(call);
        if (call->want_drained && !call->sending && call->state == CALL_OPEN) {
            call->want_drained = false;
            call->method->drained(call);
        }
    }
    call_put(call);
}

/* --- new calls --- */

static bool find_method(struct bt_rpc_call *call)
{
    struct bt_rpc_server *srv = call->srv;
    grpc_slice path = call->details.method;

    /* A few dozen rows: comparing them all costs less than a hash of the path. */
    for (size_t s = 0; s < srv->n_services; s++) {
        for (size_t i = 0; i < srv->services[s]->n_methods; i++) {
            if (grpc_slice_str_cmp(path, srv->services[s]->methods[i].path) == 0) {
                call->service = srv->services[s];
                call->method = &srv->services[s]->methods[i];
                return true;
            }
        }
    }
    return false;
}

static void refuse(struct bt_rpc_call *call, int status, const char *text)
{
    call->service = NULL;
    call->method = NULL;
    bt_rpc_call_finish(call, status, text);
}

/* At the limit the oldest call that has said nothing ends, so that silence keeps nobody out. */
static bool make_room(struct bt_rpc_server *srv)
{
    struct bt_list *it = bt_list_pop_front(&srv->silent);
    struct bt_rpc_call *call;
    char text[128];

    if (!it) {
        return false;
    }
    call = BT_LIST_ENTRY(it, struct bt_rpc_call, silent_link);
    call->evicted = true;
    srv->n_evicted++;
    snprintf(text, sizeof(text), "server has its limit of %d calls and no message has come on this",
             srv->config.max_calls);
    bt_rpc_call_finish(call, BT_RPC_RESOURCE_EXHAUSTED, text);
    return true;
}

/* The bits of which the caller needs one; methods without a row of their own are for operators. */
static unsigned access_of(const struct bt_rpc_call *call)
{
    if (!call->method) {
        return BT_ACCESS_ANY; /* who may do anything is told that there is no such method */
    }
    return call->method->access ? call->method->access : BT_ACCESS_OPERATOR;
}

/* Whether whoever shows this may make the call, and who it is. */
static int authorize(struct bt_rpc_call *call,
                     struct bt_str authorization,
                     struct bt_who *ret_who,
                     struct bt_err *err)
{
    struct bt_sec *sec = call->srv->config.sec;
    struct bt_sec_ask ask = {
        .port = BT_SEC_GRPC, .authorization = authorization, .access = access_of(call)};

    if (sec && !(ask.access & BT_ACCESS_OPEN) && !bt_rpc_cert_ok(sec, call->call)) {
        return BT_FAIL(err, BT_E_DENIED, "the certificate has none of the names that may call");
    }
    return bt_sec_authorize(sec, &ask, ret_who, err);
}

static void dispatch(struct bt_rpc_call *call)
{
    struct bt_rpc_server *srv = call->srv;
    bool found = find_method(call);
    struct bt_err err = {0};
    char text[300];
    int path_len = (int)BT_MIN(GRPC_SLICE_LENGTH(call->details.method), (size_t)200);
    int rc = authorize(call, bt_rpc_call_metadata(call, "authorization"), &call->who, &err);

    if (rc < 0) {
        BT_INFO("denied", "peer=%s method=%s rc=%s msg=\"%s\"", bt_rpc_call_peer(call),
                found ? call->method->path : "?", bt_rc_name(rc), bt_err_msg(&err, rc));
        refuse(call, bt_rc_grpc(rc), bt_err_msg(&err, rc));
        return;
    }
    if (!found) {
        snprintf(text, sizeof(text), "unknown method %.*s", path_len,
                 (const char *)GRPC_SLICE_START_PTR(call->details.method));
        refuse(call, BT_RPC_UNIMPLEMENTED, text);
        return;
    }
    if (!call->service->infrastructure) {
        if (srv->phase != SERVER_RUNNING) {
            refuse(call, BT_RPC_UNAVAILABLE, "server is draining");
            return;
        }
        if (srv->n_user_calls - srv->n_evicted >= (size_t)srv->config.max_calls &&
            !make_room(srv)) {
            snprintf(text, sizeof(text), "server has its limit of %d calls", srv->config.max_calls);
            refuse(call, BT_RPC_RESOURCE_EXHAUSTED, text);
            return;
        }
        srv->n_user_calls++;
        bt_list_push_back(&srv->silent, &call->silent_link);
    }
    call->conn = bt_rpc_conn_get(&srv->guard, bt_rpc_call_peer(call));
    if (call->method->open) {
        call->method->open(call);
    }
    post_recv(call);
}

static void on_new(struct bt_cq_tag *tag, bool ok)
{
    struct bt_rpc_call *call = BT_CONTAINER_OF(tag, struct bt_rpc_call, new_tag);
    struct bt_rpc_server *srv = call->srv;
    grpc_op op = {.op = GRPC_OP_RECV_CLOSE_ON_SERVER,
                  .data.recv_close_on_server.cancelled = &call->close_cancelled};

    srv->n_slots--;
    if (!ok) { /* shutdown: nothing was bound */
        call_free(call);
        maybe_done(srv);
        return;
    }
    post_slots(srv);
    bt_list_push_back(&srv->calls, &call->link);
    call->state = CALL_OPEN;
    call->n_tags = 1;
    bt_loop_batch(srv->loop, call->call, &op, 1, &call->close_tag);
    dispatch(call);
}

static void post_slots(struct bt_rpc_server *srv)
{
    grpc_completion_queue *cq = bt_loop_cq(srv->loop);
    struct bt_rpc_call *call;

    while (srv->n_slots < N_SLOTS &&
           (srv->phase == SERVER_RUNNING || srv->phase == SERVER_DRAINING)) {
        call = bt_calloc(1, sizeof(*call));
        if (!call) {
            return; /* the next call that ends tries again */
        }
        call->srv = srv;
        call->new_tag.fn = on_new;
        call->close_tag.fn = on_close;
        call->recv_tag.fn = on_recv;
        call->send_tag.fn = on_sent;
        call->resume_timer.fn = on_resume;
        bt_list_init(&call->link);
        bt_list_init(&call->silent_link);
        bt_rpc_sendq_init(&call->sendq, srv->config.max_queued_bytes);
        grpc_call_details_init(&call->details);
        grpc_metadata_array_init(&call->metadata);
        BT_BUG_ON(grpc_server_request_call(srv->server, &call->call, &call->details,
                                           &call->metadata, cq, cq,
                                           &call->new_tag) != GRPC_CALL_OK);
        bt_loop_expect(srv->loop);
        srv->n_slots++;
    }
}

/* --- tokens that are gone --- */

static void check_again(struct bt_rpc_call *call)
{
    struct bt_err err = {0};
    struct bt_who who;
    int rc;

    if (call->state != CALL_OPEN || !call->method) {
        return;
    }
    rc = authorize(
        call, call->shown ? bt_str_of(call->shown) : bt_rpc_call_metadata(call, "authorization"),
        &who, &err);
    if (rc < 0) {
        BT_INFO("revoked", "peer=%s method=%s rc=%s msg=\"the token of a running call is gone\"",
                bt_rpc_call_peer(call), call->method->path, bt_rc_name(rc));
        bt_rpc_sendq_drop(&call->sendq, call->sending_message);
        call->refused_rc = rc;
        bt_rpc_call_finish(call, bt_rc_grpc(rc), "the token that this call began with is gone");
    }
}

static void on_look(struct bt_loop *loop, struct bt_timer *timer)
{
    struct bt_rpc_server *srv = BT_CONTAINER_OF(timer, struct bt_rpc_server, look);
    uint64_t version = bt_sec_tokens_version(srv->config.sec);

    bt_timer_start(loop, timer, bt_loop_now(loop) + BT_SEC_LOOK_NS);
    if (version != srv->tokens_version) {
        srv->tokens_version = version;
        bt_list_for_each (it, &srv->calls) {
            check_again(BT_LIST_ENTRY(it, struct bt_rpc_call, link));
        }
    }
}

int bt_rpc_call_renew(struct bt_rpc_call *call, const char *authorization, struct bt_err *err)
{
    struct bt_who who;
    char *copy;
    int rc = authorize(call, bt_str_of(authorization), &who, err);

    if (rc < 0) {
        return rc;
    }
    copy = strdup(authorization);
    if (!copy) {
        return BT_FAIL(err, BT_E_NOMEM, "no memory for a token");
    }
    forget_shown(call);
    call->shown = copy;
    return BT_OK;
}

/* --- server --- */

static void on_guard(struct bt_rpc_guard *g, struct bt_rpc_conn *c)
{
    struct bt_rpc_server *srv = BT_CONTAINER_OF(g, struct bt_rpc_server, guard);
    char text[128];

    snprintf(text, sizeof(text), "more than %llu bytes of unfinished messages on one connection",
             (unsigned long long)g->limit_bytes);
    bt_list_for_each (it, &srv->calls) {
        struct bt_rpc_call *call = BT_LIST_ENTRY(it, struct bt_rpc_call, link);

        if (call->conn == c && call->receiving) {
            bt_rpc_call_finish(call, BT_RPC_RESOURCE_EXHAUSTED, text);
        }
    }
}

static void on_shutdown(struct bt_cq_tag *tag, bool ok)
{
    struct bt_rpc_server *srv = BT_CONTAINER_OF(tag, struct bt_rpc_server, shutdown_tag);

    srv->shutdown_seen = true;
    maybe_done(srv);
}

static void on_grace(struct bt_loop *loop, struct bt_timer *timer)
{
    struct bt_rpc_server *srv = BT_CONTAINER_OF(timer, struct bt_rpc_server, grace);

    if (!srv->cancelled_all) {
        srv->cancelled_all = true;
        BT_DEBUG("rpc-grace-over", "calls=%zu msg=\"cancelling calls that still run\"",
                 srv->n_user_calls);
        grpc_server_cancel_all_calls(srv->server);
    }
}

int bt_rpc_server_create(struct bt_loop *loop,
                         const struct bt_rpc_server_config *config,
                         struct bt_rpc_server **ret_srv,
                         struct bt_err *err)
{
    struct bt_rpc_server *srv;
    struct bt_rpc_server_config c = config ? *config : (struct bt_rpc_server_config){0};
    struct bt_rpc_args args;

    c.max_message_bytes = c.max_message_bytes ? c.max_message_bytes : BT_RPC_MAX_MESSAGE_BYTES;
    c.max_queued_bytes = c.max_queued_bytes ? c.max_queued_bytes : BT_RPC_MAX_QUEUED_BYTES;
    c.max_calls = c.max_calls > 0 ? c.max_calls : 4096;
    c.max_streams = c.max_streams > 0 ? c.max_streams : 1024;
    if (c.max_message_bytes > (1u << 30) || c.max_queued_bytes > (1u << 30)) {
        return BT_FAIL(err, BT_E_CONFIG, "rpc: message and queue limits are at most 1 GiB");
    }
    srv = bt_calloc(1, sizeof(*srv));
    if (!srv) {
        return BT_FAIL(err, BT_E_NOMEM, "rpc server: out of memory");
    }
    srv->loop = loop;
    srv->config = c;
    srv->shutdown_tag.fn = on_shutdown;
    srv->grace.fn = on_grace;
    srv->look.fn = on_look;
    bt_list_init(&srv->calls);
    bt_list_init(&srv->silent);
    bt_rpc_guard_init(&srv->guard, loop, 4 * (uint64_t)c.max_message_bytes + WINDOWS_BYTES,
                      on_guard);
    bt_rpc_args_server(&args, &c.keepalive, (int)c.max_message_bytes, c.max_streams);
    srv->server = grpc_server_create(&args.args, NULL);
    grpc_server_register_completion_queue(srv->server, bt_loop_cq(loop), NULL);
    bt_loop_attach(loop);
    *ret_srv = srv;
    return BT_OK;
}

void bt_rpc_server_destroy(struct bt_rpc_server *srv)
{
    if (!srv) {
        return;
    }
    srv->done = NULL;
    if (srv->phase != SERVER_DONE) {
        bt_rpc_server_shutdown(srv, 0, NULL, NULL);
        while (srv->phase != SERVER_DONE) {
            bt_loop_poll(srv->loop, BT_NEVER_NS);
        }
    }
    bt_timer_stop(srv->loop, &srv->look);
    grpc_server_destroy(srv->server);
    bt_rpc_guard_fini(&srv->guard);
    bt_loop_detach(srv->loop);
    free(srv);
}

int bt_rpc_server_listen(struct bt_rpc_server *srv,
                         const char *address,
                         int *ret_port,
                         struct bt_err *err)
{
    bool tls = srv->config.sec && bt_sec_has_tls(srv->config.sec, BT_SEC_GRPC);
    grpc_server_credentials *creds;
    const char *why;
    int port;

    BT_BUG_ON(srv->phase != SERVER_SETUP);
    if (!tls && !srv->config.allow_insecure && !bt_rpc_address_is_local(address)) {
        return BT_FAIL(err, BT_E_CONFIG,
                       "listen address %.100s can be reached from other machines and calls are not "
                       "encrypted; use a loopback address or set allow_insecure",
                       address);
    }
    /* Core fetches as the port is made, so each port begins with no version. */
    srv->fetcher = (struct bt_rpc_fetcher){.sec = srv->config.sec};
    creds = tls ? bt_rpc_server_creds(&srv->fetcher) : grpc_insecure_server_credentials_create();
    if (!creds) {
        return BT_FAIL(err, BT_E_NOMEM, "rpc server: no TLS credentials");
    }
    bt_rpc_log_clear();
    port = grpc_server_add_http2_port(srv->server, address, creds);
    grpc_server_credentials_release(creds);
    if (port == 0) {
        why = strstr(bt_rpc_log_last(), "os_error:\"");
        why = why ? why + 10 : "not an address, or it cannot be bound\"";
        return BT_FAIL(err, BT_E_IO, "cannot listen on %.100s: %.*s", address,
                       (int)strcspn(why, "\""), why);
    }
    if (srv->config.keepalive.calls_only) {
        bt_rpc_listener_keep_alive(port);
    }
    if (ret_port) {
        *ret_port = port;
    }
    return BT_OK;
}

int bt_rpc_server_register(struct bt_rpc_server *srv,
                           const struct bt_rpc_service *service,
                           struct bt_err *err)
{
    BT_BUG_ON(srv->phase != SERVER_SETUP);
    if (srv->n_services == MAX_SERVICES) {
        return BT_FAIL(err, BT_E_NOMEM, "rpc server: more than %d services", MAX_SERVICES);
    }
    for (size_t s = 0; s < srv->n_services; s++) {
        if (strcmp(srv->services[s]->name, service->name) == 0) {
            return BT_FAIL(err, BT_E_EXISTS, "rpc server: service %s is there twice",
                           service->name);
        }
    }
    srv->services[srv->n_services++] = service;
    return BT_OK;
}

int bt_rpc_server_start(struct bt_rpc_server *srv, struct bt_err *err)
{
    BT_BUG_ON(srv->phase != SERVER_SETUP);
    grpc_server_start(srv->server);
    srv->phase = SERVER_RUNNING;
    srv->tokens_version = srv->config.sec ? bt_sec_tokens_version(srv->config.sec) : 0;
    if (srv->tokens_version > 0 && bt_sec_ends_revoked(srv->config.sec)) {
        bt_timer_start(srv->loop, &srv->look, bt_loop_now(srv->loop) + BT_SEC_LOOK_NS);
    }
    post_slots(srv);
    return srv->n_slots > 0 ? BT_OK : BT_FAIL(err, BT_E_NOMEM, "rpc server: out of memory");
}

void bt_rpc_server_drain(struct bt_rpc_server *srv)
{
    if (srv->phase == SERVER_RUNNING) {
        srv->phase = SERVER_DRAINING;
    }
}

void bt_rpc_server_shutdown(struct bt_rpc_server *srv,
                            uint64_t deadline_ns,
                            void (*done)(void *arg),
                            void *arg)
{
    BT_BUG_ON(srv->phase == SERVER_DONE);
    bt_timer_start(srv->loop, &srv->grace, deadline_ns);
    if (srv->phase == SERVER_STOPPING) {
        return;
    }
    srv->phase = SERVER_STOPPING;
    srv->done = done;
    srv->done_arg = arg;
    grpc_server_shutdown_and_notify(srv->server, bt_loop_cq(srv->loop), &srv->shutdown_tag);
    bt_loop_expect(srv->loop);
    if (srv->n_user_calls == 0) {
        srv->cancelled_all = true;
        grpc_server_cancel_all_calls(srv->server);
    }
}

struct bt_loop *bt_rpc_server_loop(const struct bt_rpc_server *srv)
{
    return srv->loop;
}

size_t bt_rpc_server_n_calls(const struct bt_rpc_server *srv)
{
    return srv->n_user_calls;
}

const struct bt_rpc_service *bt_rpc_server_service(const struct bt_rpc_server *srv, size_t idx)
{
    return idx < srv->n_services ? srv->services[idx] : NULL;
}

/* --- the handler's side of a call --- */

int bt_rpc_call_queue(struct bt_rpc_call *call, const ProtobufCMessage *msg)
{
    if (call->state != CALL_OPEN || call->close_seen) {
        return BT_E_CANCELLED;
    }
    BT_BUG_ON(msg->descriptor != call->method->response);
    return bt_rpc_sendq_push(&call->sendq, msg);
}

int bt_rpc_call_send(struct bt_rpc_call *call, const ProtobufCMessage *msg)
{
    int rc = bt_rpc_call_queue(call, msg);

    if (rc == BT_OK) {
        pump_send(call);
    }
    return rc;
}

void bt_rpc_call_send_headers(struct bt_rpc_call *call)
{
    call->want_headers = true;
    pump_send(call);
}

/* NULL when out of memory: the status goes out without a text then. */
static char *cut_copy(const char *text)
{
    size_t n = BT_MIN(strlen(text), (size_t)MAX_TEXT);
    char *copy = malloc(n + 1);

    if (copy) {
        memcpy(copy, text, n);
        copy[n] = 0;
    }
    return copy;
}

void bt_rpc_call_finish(struct bt_rpc_call *call, int status, const char *text)
{
    if (call->state != CALL_OPEN) {
        return;
    }
    call->state = CALL_FINISHING;
    call->status = status;
    call->status_text = text ? cut_copy(text) : NULL;
    pump_send(call);
}

int bt_rpc_call_refused(const struct bt_rpc_call *call)
{
    return call->refused_rc;
}

void bt_rpc_call_fail(struct bt_rpc_call *call, int rc, const struct bt_err *err)
{
    bt_rpc_call_finish(call, bt_rc_grpc(rc), bt_err_msg(err, rc));
}

void bt_rpc_call_reply(struct bt_rpc_call *call, const ProtobufCMessage *msg)
{
    int rc;

    if (call->state != CALL_OPEN) {
        return;
    }
    BT_BUG_ON(msg->descriptor != call->method->response);
    rc = bt_rpc_sendq_push(&call->sendq, msg); /* not sent yet: goes with the status */
    bt_rpc_call_finish(call, bt_rc_grpc(rc), rc < 0 ? "reply: too large to be queued" : NULL);
}

int bt_rpc_call_add_trailer(struct bt_rpc_call *call, const char *key, const char *value)
{
    grpc_metadata *m = &call->trailers[call->n_trailers];
    grpc_slice k, v;

    if (call->n_trailers == MAX_TRAILERS || call->status_sent) {
        return BT_E_EXHAUSTED;
    }
    k = grpc_slice_from_copied_string(key);
    v = grpc_slice_from_copied_string(value);
    if (!grpc_header_key_is_legal(k) || grpc_is_binary_header(k) ||
        !grpc_header_nonbin_value_is_legal(v) || strncmp(key, "grpc-", 5) == 0) {
        grpc_slice_unref(k);
        grpc_slice_unref(v);
        return BT_E_INVALID;
    }
    m->key = k;
    m->value = v;
    call->n_trailers++;
    return BT_OK;
}

size_t bt_rpc_call_queued_bytes(const struct bt_rpc_call *call)
{
    return call->sendq.bytes;
}

bool bt_rpc_call_want_drained(struct bt_rpc_call *call)
{
    call->want_drained =
        call->method->drained && call->state == CALL_OPEN && bt_rpc_sendq_head(&call->sendq);
    return call->want_drained;
}

void bt_rpc_call_pause(struct bt_rpc_call *call)
{
    call->paused = true;
}

void bt_rpc_call_resume(struct bt_rpc_call *call)
{
    call->paused = false;
    if (call->state != CALL_OPEN) {
        return;
    }
    if (call->held) {
        bt_timer_start(call->srv->loop, &call->resume_timer, bt_loop_now(call->srv->loop));
    }
    post_recv(call);
}

struct bt_str bt_rpc_call_packed(const struct bt_rpc_call *call, const int32_t *list)
{
    const struct bt_rpc_arena *arena = bt_loop_arena(call->srv->loop);

    return list && arena->list == list ? arena->list_bytes : (struct bt_str){NULL, 0};
}

void bt_rpc_call_set_user(struct bt_rpc_call *call, void *user)
{
    call->user = user;
}

void *bt_rpc_call_user(const struct bt_rpc_call *call)
{
    return call->user;
}

void *bt_rpc_call_service_user(const struct bt_rpc_call *call)
{
    return call->service->user;
}

struct bt_loop *bt_rpc_call_loop(const struct bt_rpc_call *call)
{
    return call->srv->loop;
}

uint64_t bt_rpc_call_deadline_ns(const struct bt_rpc_call *call)
{
    return bt_rpc_from_gpr(call->details.deadline);
}

const struct bt_who *bt_rpc_call_who(const struct bt_rpc_call *call)
{
    return &call->who;
}

const char *bt_rpc_call_peer(struct bt_rpc_call *call)
{
    if (!call->peer) {
        call->peer = grpc_call_get_peer(call->call);
    }
    return call->peer ? call->peer : "";
}

struct bt_str bt_rpc_call_metadata(const struct bt_rpc_call *call, const char *key)
{
    return bt_rpc_md_get(&call->metadata, key);
}
