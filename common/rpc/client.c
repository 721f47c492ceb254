/* Client channels and calls. Loop thread.
 *
 * A call has up to four batches in flight: headers (out and in), one send, one receive, and the
 * status, which core completes only after every buffered message was read. `closed` is told when
 * the status is there and no receive is out; the struct is freed when all tags are back. A channel
 * lives until its last call and its state watch are gone.
 *
 * The next receive of a stream is put off until the loop has nothing else to do, or a message is
 * sent: core 1.51 tells the peer of room as the receive is posted, by a write of its own that wakes
 * the peer, unless a message has just taken that along. */
#include "common/rpc/client.h"

#include "common/base/buf.h"
#include "common/rpc/rpc_int.h"

#include <grpc/support/alloc.h>
#include <openssl/crypto.h>
#include <stdio.h>
#include <stdlib.h>

#define MAX_METADATA 8

struct bt_rpc_channel {
    struct bt_loop *loop;
    struct bt_rpc_channel_config config;
    grpc_channel *channel; /* NULL after destroy */
    uint64_t sec_version;  /* of the certificates that it was made with */
    char *target;
    struct bt_list calls;
    struct bt_cq_tag watch_tag;
    bool watching; /* watch_tag in flight */
    grpc_connectivity_state last;
    struct bt_timer first_state; /* tells the first state from the loop */
};

enum client_state {
    CLIENT_OPEN,
    CLIENT_HALF_CLOSED, /* half_close was asked for; queued messages still go out */
    CLIENT_CANCELLED,
    CLIENT_CLOSED, /* `closed` was told */
};

struct bt_rpc_client_call {
    struct bt_list link;
    struct bt_rpc_channel *channel;
    grpc_call *call;
    const struct bt_rpc_client_events *events;
    const ProtobufCMessageDescriptor *response;
    void *user;
    enum client_state state;
    int n_tags;
    struct bt_cq_tag head_tag, send_tag, recv_tag, status_tag;

    grpc_metadata
        metadata[MAX_METADATA + 1]; /* and the token; alive until the first send batch is back */
    size_t n_metadata;
    grpc_metadata_array initial_md, trailing_md;
    grpc_status_code status;
    grpc_slice status_text;
    bool status_seen;

    grpc_byte_buffer *recv_buf;
    bool receiving, held, read_done, paused;
    struct bt_timer resume_timer;
    struct bt_late recv_late; /* the next receive; waiting = the input is not at its end */

    struct bt_rpc_sendq sendq;
    bool wait_for_ready;
    bool headers_sent, close_sent, sending, sending_message, want_drained, send_failed;
};

/* --- channel --- */

static enum bt_rpc_conn_state conn_state(grpc_connectivity_state s)
{
    switch (s) {
    case GRPC_CHANNEL_CONNECTING:
        return BT_RPC_CONN_CONNECTING;
    case GRPC_CHANNEL_READY:
        return BT_RPC_CONN_READY;
    case GRPC_CHANNEL_TRANSIENT_FAILURE:
        return BT_RPC_CONN_FAILED;
    case GRPC_CHANNEL_IDLE:
    case GRPC_CHANNEL_SHUTDOWN:
    default:
        return BT_RPC_CONN_IDLE;
    }
}

const char *bt_rpc_conn_state_name(enum bt_rpc_conn_state state)
{
    static const char *const names[] = {"idle", "connecting", "ready", "failed"};

    return names[state];
}

static void channel_put(struct bt_rpc_channel *ch)
{
    if (ch->channel || ch->watching || !bt_list_empty(&ch->calls)) {
        return;
    }
    free(ch->target);
    free(ch);
}

static void watch(struct bt_rpc_channel *ch)
{
    grpc_channel_watch_connectivity_state(ch->channel, ch->last,
                                          gpr_inf_future(GPR_CLOCK_MONOTONIC), bt_loop_cq(ch->loop),
                                          &ch->watch_tag);
    bt_loop_expect(ch->loop);
    ch->watching = true;
}

static void on_watch(struct bt_cq_tag *tag, bool ok)
{
    struct bt_rpc_channel *ch = BT_CONTAINER_OF(tag, struct bt_rpc_channel, watch_tag);

    ch->watching = false;
    if (!ch->channel) {
        channel_put(ch);
        return;
    }
    ch->last = grpc_channel_check_connectivity_state(ch->channel, 1);
    watch(ch);
    ch->config.on_state(ch->config.user, conn_state(ch->last)); /* may destroy ch */
}

static void on_first_state(struct bt_loop *loop, struct bt_timer *timer)
{
    struct bt_rpc_channel *ch = BT_CONTAINER_OF(timer, struct bt_rpc_channel, first_state);

    ch->last = grpc_channel_check_connectivity_state(ch->channel, 1);
    watch(ch);
    ch->config.on_state(ch->config.user, conn_state(ch->last));
}

/* The channel of core, with the credentials of now. */
static void open_channel(struct bt_rpc_channel *ch, struct bt_rpc_args *args)
{
    struct bt_sec *sec = ch->config.sec;
    struct bt_pem *pem = sec ? bt_sec_peer(sec) : NULL;
    grpc_channel_credentials *creds =
        pem ? bt_rpc_channel_creds(pem) : grpc_insecure_credentials_create();

    if (pem && bt_sec_peer_name(sec)[0]) {
        bt_rpc_args_add_str(args, GRPC_SSL_TARGET_NAME_OVERRIDE_ARG, bt_sec_peer_name(sec));
    }
    ch->sec_version = pem ? pem->version : 0;
    ch->channel = grpc_channel_create(ch->target, creds, &args->args);
    grpc_channel_credentials_release(creds);
    bt_pem_unref(pem);
}

int bt_rpc_channel_create(struct bt_loop *loop,
                          const char *target,
                          const struct bt_rpc_channel_config *config,
                          struct bt_rpc_channel **ret_channel,
                          struct bt_err *err)
{
    struct bt_rpc_channel_config c = config ? *config : (struct bt_rpc_channel_config){0};
    struct bt_rpc_channel *ch;
    struct bt_rpc_args args;
    int backoff_ms[2];

    c.max_message_bytes = c.max_message_bytes ? c.max_message_bytes : BT_RPC_MAX_MESSAGE_BYTES;
    c.max_queued_bytes = c.max_queued_bytes ? c.max_queued_bytes : BT_RPC_MAX_QUEUED_BYTES;
    backoff_ms[0] = c.backoff_min_ms > 0 ? c.backoff_min_ms : 50;
    backoff_ms[1] = c.backoff_max_ms > 0 ? c.backoff_max_ms : 1000;
    if (c.max_message_bytes > (1u << 30) || c.max_queued_bytes > (1u << 30)) {
        return BT_FAIL(err, BT_E_CONFIG, "rpc: message and queue limits are at most 1 GiB");
    }
    if (!target[0]) { /* core makes a channel of it that neither connects nor ends */
        return BT_FAIL(err, BT_E_CONFIG, "rpc: an empty address");
    }
    ch = bt_calloc(1, sizeof(*ch));
    if (!ch || !(ch->target = strdup(target))) {
        free(ch);
        return BT_FAIL(err, BT_E_NOMEM, "rpc channel: out of memory");
    }
    ch->loop = loop;
    ch->config = c;
    ch->watch_tag.fn = on_watch;
    ch->first_state.fn = on_first_state;
    bt_list_init(&ch->calls);
    bt_rpc_args_client(&args, &c.keepalive, (int)c.max_message_bytes, backoff_ms);
    open_channel(ch, &args);
    bt_loop_attach(loop);
    if (c.on_state) {
        bt_timer_start(loop, &ch->first_state, bt_now_ns());
    }
    *ret_channel = ch;
    return BT_OK;
}

void bt_rpc_channel_destroy(struct bt_rpc_channel *ch)
{
    if (!ch) {
        return;
    }
    bt_list_for_each (it, &ch->calls) {
        bt_rpc_client_cancel(BT_LIST_ENTRY(it, struct bt_rpc_client_call, link));
    }
    bt_timer_stop(ch->loop, &ch->first_state);
    grpc_channel_destroy(ch->channel); /* ends the watch as well */
    ch->channel = NULL;
    bt_loop_detach(ch->loop);
    channel_put(ch);
}

void bt_rpc_channel_reset_backoff(struct bt_rpc_channel *ch)
{
    grpc_channel_reset_connect_backoff(ch->channel);
}

bool bt_rpc_channel_stale(const struct bt_rpc_channel *ch)
{
    return ch->config.sec && ch->sec_version != bt_sec_peer_version(ch->config.sec);
}

const char *bt_rpc_channel_target(const struct bt_rpc_channel *ch)
{
    return ch->target;
}

/* --- life of a call --- */

static void call_free(struct bt_rpc_client_call *call)
{
    bt_rpc_sendq_drop(&call->sendq, false);
    for (size_t i = 0; i < call->n_metadata; i++) {
        grpc_slice_unref(call->metadata[i].key);
        grpc_slice_unref(call->metadata[i].value);
    }
    grpc_metadata_array_destroy(&call->initial_md);
    grpc_metadata_array_destroy(&call->trailing_md);
    grpc_slice_unref(call->status_text);
    if (call->recv_buf) {
        grpc_byte_buffer_destroy(call->recv_buf);
    }
    if (call->call) {
        grpc_call_unref(call->call);
    }
    free(call);
}

/* Last step of every event: tells the end once nothing can come before it, then frees. */
static void call_put(struct bt_rpc_client_call *call)
{
    struct bt_rpc_channel *ch = call->channel;
    char *text;

    if (call->status_seen && !call->receiving && !call->held && !bt_late_waits(&call->recv_late) &&
        call->state != CLIENT_CLOSED) {
        call->state = CLIENT_CLOSED;
        call->read_done = true;
        text = grpc_slice_to_c_string(call->status_text);
        call->events->closed(call, (int)call->status, text);
        gpr_free(text);
    }
    if (call->n_tags > 0 || call->state != CLIENT_CLOSED) {
        return;
    }
    bt_timer_stop(ch->loop, &call->resume_timer);
    bt_late_stop(&call->recv_late);
    bt_list_remove(&call->link);
    call_free(call);
    channel_put(ch);
}

static bool call_live(const struct bt_rpc_client_call *call)
{
    return call->state == CLIENT_OPEN || call->state == CLIENT_HALF_CLOSED;
}

static void on_status(struct bt_cq_tag *tag, bool ok)
{
    struct bt_rpc_client_call *call = BT_CONTAINER_OF(tag, struct bt_rpc_client_call, status_tag);

    call->n_tags--;
    call->status_seen = true;
    bt_rpc_sendq_drop(&call->sendq, call->sending_message);
    call_put(call);
}

static void on_head(struct bt_cq_tag *tag, bool ok)
{
    struct bt_rpc_client_call *call = BT_CONTAINER_OF(tag, struct bt_rpc_client_call, head_tag);

    call->n_tags--;
    call_put(call);
}

/* --- receive side --- */

static void post_recv(struct bt_rpc_client_call *call)
{
    grpc_op op = {.op = GRPC_OP_RECV_MESSAGE, .data.recv_message.recv_message = &call->recv_buf};

    bt_late_stop(&call->recv_late);
    /* After a cancel as well: the status comes only when the input is read to its end. */
    if (call->read_done || call->receiving || call->held || call->state == CLIENT_CLOSED ||
        (call->paused && call->state != CLIENT_CANCELLED)) {
        return;
    }
    call->receiving = true;
    call->n_tags++;
    bt_loop_batch(call->channel->loop, call->call, &op, 1, &call->recv_tag);
}

static void cancel_with(struct bt_rpc_client_call *call, grpc_status_code status, const char *text)
{
    call->state = CLIENT_CANCELLED;
    bt_rpc_sendq_drop(&call->sendq, call->sending_message);
    grpc_call_cancel_with_status(call->call, status, text, NULL);
}

static void handle_message(struct bt_rpc_client_call *call)
{
    struct bt_rpc_arena *arena = bt_loop_arena(call->channel->loop);
    grpc_byte_buffer *buf = call->recv_buf;
    const struct bt_rpc_unpack_args args = {
        .desc = call->response, .limit_bytes = 8 * call->channel->config.max_message_bytes};
    ProtobufCMessage *msg;
    char text[256];
    int rc;

    call->recv_buf = NULL;
    rc = bt_rpc_unpack(arena, &args, buf, &msg);
    if (rc < 0) {
        snprintf(text, sizeof(text), "response cannot be decoded as %s", call->response->name);
        cancel_with(call, GRPC_STATUS_INTERNAL, text);
    } else if (call->events->message) {
        call->events->message(call, msg);
    }
    grpc_byte_buffer_destroy(buf);
    bt_rpc_arena_trim(arena);
}

static void received(struct bt_rpc_client_call *call)
{
    if (!call->recv_buf) {
        call->read_done = true;
    } else if (call_live(call)) {
        handle_message(call);
        bt_loop_put_off(call->channel->loop, &call->recv_late);
    } else {
        grpc_byte_buffer_destroy(call->recv_buf);
        call->recv_buf = NULL;
        post_recv(call);
    }
}

static void on_late(struct bt_late *late)
{
    struct bt_rpc_client_call *call = BT_CONTAINER_OF(late, struct bt_rpc_client_call, recv_late);

    post_recv(call);
    call_put(call);
}

static void on_recv(struct bt_cq_tag *tag, bool ok)
{
    struct bt_rpc_client_call *call = BT_CONTAINER_OF(tag, struct bt_rpc_client_call, recv_tag);

    call->n_tags--;
    call->receiving = false;
    if (call->paused && call_live(call)) {
        call->held = true;
    } else {
        received(call);
    }
    call_put(call);
}

static void on_resume(struct bt_loop *loop, struct bt_timer *timer)
{
    struct bt_rpc_client_call *call =
        BT_CONTAINER_OF(timer, struct bt_rpc_client_call, resume_timer);

    if (call->held && (!call->paused || !call_live(call))) {
        call->held = false;
        received(call);
    }
    call_put(call);
}

/* --- send side --- */

static void pump_send(struct bt_rpc_client_call *call)
{
    grpc_byte_buffer *head = bt_rpc_sendq_head(&call->sendq);
    bool last = call->state == CLIENT_HALF_CLOSED && !call->close_sent &&
                !bt_rpc_sendq_has_more(&call->sendq);
    grpc_op ops[3] = {0};
    size_t n = 0;

    if (call->sending || !call_live(call) || call->status_seen || call->send_failed) {
        return;
    }
    if (!call->headers_sent) {
        ops[n].op = GRPC_OP_SEND_INITIAL_METADATA;
        ops[n].flags = call->wait_for_ready
                           ? GRPC_INITIAL_METADATA_WAIT_FOR_READY |
                                 GRPC_INITIAL_METADATA_WAIT_FOR_READY_EXPLICITLY_SET
                           : 0;
        ops[n].data.send_initial_metadata.metadata = call->metadata;
        ops[n++].data.send_initial_metadata.count = call->n_metadata;
        call->headers_sent = true;
    }
    if (head) {
        ops[n].op = GRPC_OP_SEND_MESSAGE;
        /* What follows at once takes it along: one write, one wake-up of the peer. */
        ops[n].flags = bt_rpc_sendq_has_more(&call->sendq) ? GRPC_WRITE_BUFFER_HINT : 0;
        ops[n++].data.send_message.send_message = head;
    }
    if (last) {
        ops[n++].op = GRPC_OP_SEND_CLOSE_FROM_CLIENT;
        call->close_sent = true;
    }
    if (n > 0) {
        call->sending = true;
        call->sending_message = head != NULL;
        call->n_tags++;
        bt_loop_batch(call->channel->loop, call->call, ops, n, &call->send_tag);
    }
}

static void on_sent(struct bt_cq_tag *tag, bool ok)
{
    struct bt_rpc_client_call *call = BT_CONTAINER_OF(tag, struct bt_rpc_client_call, send_tag);

    call->n_tags--;
    call->sending = false;
    if (call->sending_message) {
        call->sending_message = false;
        bt_rpc_sendq_pop(&call->sendq);
    }
    if (!ok) {
        call->send_failed = true; /* the status tells the rest */
        bt_rpc_sendq_drop(&call->sendq, false);
    } else {
        pump_send(call);
        if (call->want_drained && !call->sending && call_live(call)) {
            call->want_drained = false;
            call->events->drained(call);
        }
    }
    call_put(call);
}

/* --- the caller's side --- */

static int copy_metadata(struct bt_rpc_client_call *call,
                         const struct bt_rpc_client_args *args,
                         struct bt_err *err)
{
    if (args->n_metadata > MAX_METADATA) {
        return BT_FAIL(err, BT_E_INVALID, "%s: more than %d metadata entries", args->path,
                       MAX_METADATA);
    }
    for (size_t i = 0; i < args->n_metadata; i++) {
        const struct bt_rpc_metadata *m = &args->metadata[i];
        grpc_slice k = grpc_slice_from_copied_string(m->key);
        grpc_slice v = grpc_slice_from_copied_string(m->value);

        call->metadata[i].key = k;
        call->metadata[i].value = v;
        call->n_metadata = i + 1;
        if (!grpc_header_key_is_legal(k) || grpc_is_binary_header(k) ||
            !grpc_header_nonbin_value_is_legal(v) || strncmp(m->key, "grpc-", 5) == 0) {
            return BT_FAIL(err, BT_E_INVALID, "%s: metadata %.60s cannot be sent", args->path,
                           m->key);
        }
    }
    return BT_OK;
}

static void add_token(struct bt_rpc_client_call *call)
{
    struct bt_sec *sec = call->channel->config.sec;
    char value[BT_BEARER_MAX];

    if (sec && bt_sec_bearer(sec, value, sizeof(value))) {
        grpc_metadata *m = &call->metadata[call->n_metadata++];

        m->key = grpc_slice_from_static_string("authorization");
        m->value = grpc_slice_from_copied_string(value);
    }
    OPENSSL_cleanse(value, sizeof(value));
}

static void start_call(struct bt_rpc_client_call *call, const struct bt_rpc_client_args *args)
{
    struct bt_rpc_channel *ch = call->channel;
    uint64_t deadline_ns = args->deadline_ns ? args->deadline_ns : BT_NEVER_NS;
    grpc_slice path = grpc_slice_from_copied_string(args->path);
    grpc_op head = {.op = GRPC_OP_RECV_INITIAL_METADATA,
                    .data.recv_initial_metadata.recv_initial_metadata = &call->initial_md};
    grpc_op status = {.op = GRPC_OP_RECV_STATUS_ON_CLIENT,
                      .data.recv_status_on_client = {.trailing_metadata = &call->trailing_md,
                                                     .status = &call->status,
                                                     .status_details = &call->status_text}};

    call->call =
        grpc_channel_create_call(ch->channel, NULL, GRPC_PROPAGATE_DEFAULTS, bt_loop_cq(ch->loop),
                                 path, NULL, bt_rpc_to_gpr(deadline_ns), NULL);
    grpc_slice_unref(path);
    call->n_tags = 2;
    pump_send(call);
    bt_loop_batch(ch->loop, call->call, &head, 1, &call->head_tag);
    bt_loop_batch(ch->loop, call->call, &status, 1, &call->status_tag);
    post_recv(call);
}

int bt_rpc_client_start(struct bt_rpc_channel *ch,
                        const struct bt_rpc_client_args *args,
                        struct bt_rpc_client_call **ret_call,
                        struct bt_err *err)
{
    struct bt_rpc_client_call *call = bt_calloc(1, sizeof(*call));
    int rc;

    if (!call) {
        return BT_FAIL(err, BT_E_NOMEM, "%s: out of memory", args->path);
    }
    call->channel = ch;
    call->events = args->events;
    call->response = args->response;
    call->user = args->user;
    call->wait_for_ready = args->wait_for_ready;
    call->head_tag.fn = on_head;
    call->send_tag.fn = on_sent;
    call->recv_tag.fn = on_recv;
    call->status_tag.fn = on_status;
    call->resume_timer.fn = on_resume;
    bt_late_init(&call->recv_late, on_late);
    call->status_text = grpc_empty_slice();
    grpc_metadata_array_init(&call->initial_md);
    grpc_metadata_array_init(&call->trailing_md);
    bt_rpc_sendq_init(&call->sendq, ch->config.max_queued_bytes);
    bt_list_init(&call->link);
    rc = copy_metadata(call, args, err);
    if (rc < 0) {
        goto fail;
    }
    add_token(call);
    if (args->request) {
        rc = bt_rpc_sendq_push(&call->sendq, args->request);
        if (rc < 0) {
            rc = BT_FAIL(err, rc, "%s: request cannot be queued: %s", args->path, bt_rc_text(rc));
            goto fail;
        }
    }
    call->state = args->half_close ? CLIENT_HALF_CLOSED : CLIENT_OPEN;
    bt_list_push_back(&ch->calls, &call->link);
    start_call(call, args);
    *ret_call = call;
    return BT_OK;
fail:
    call_free(call);
    return rc;
}

int bt_rpc_client_send(struct bt_rpc_client_call *call, const ProtobufCMessage *msg)
{
    int rc;

    if (call->state != CLIENT_OPEN || call->status_seen || call->send_failed) {
        return BT_E_CANCELLED;
    }
    rc = bt_rpc_sendq_push(&call->sendq, msg);
    if (rc == BT_OK) {
        pump_send(call);
        if (bt_late_waits(&call->recv_late)) {
            post_recv(call);
        }
    }
    return rc;
}

void bt_rpc_client_half_close(struct bt_rpc_client_call *call)
{
    if (call->state == CLIENT_OPEN) {
        call->state = CLIENT_HALF_CLOSED;
        pump_send(call);
    }
}

void bt_rpc_client_cancel(struct bt_rpc_client_call *call)
{
    if (call_live(call)) {
        cancel_with(call, GRPC_STATUS_CANCELLED, "cancelled by the caller");
        if (call->held) {
            bt_timer_start(call->channel->loop, &call->resume_timer,
                           bt_loop_now(call->channel->loop));
        }
        post_recv(call);
    }
}

size_t bt_rpc_client_queued_bytes(const struct bt_rpc_client_call *call)
{
    return call->sendq.bytes;
}

bool bt_rpc_client_want_drained(struct bt_rpc_client_call *call)
{
    call->want_drained =
        call->events->drained && call_live(call) && bt_rpc_sendq_head(&call->sendq);
    return call->want_drained;
}

void bt_rpc_client_pause(struct bt_rpc_client_call *call)
{
    call->paused = true;
}

void bt_rpc_client_resume(struct bt_rpc_client_call *call)
{
    call->paused = false;
    if (call->held) {
        bt_timer_start(call->channel->loop, &call->resume_timer, bt_loop_now(call->channel->loop));
    }
    post_recv(call);
}

void *bt_rpc_client_user(const struct bt_rpc_client_call *call)
{
    return call->user;
}

struct bt_loop *bt_rpc_client_loop(const struct bt_rpc_client_call *call)
{
    return call->channel->loop;
}

struct bt_str bt_rpc_client_trailer(const struct bt_rpc_client_call *call, const char *key)
{
    return bt_rpc_md_get(&call->trailing_md, key);
}
