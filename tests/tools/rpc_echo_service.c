/* Echo: answers with what came, counts, and does as the request's fields tell. */
#include "tests/tools/rpc_echo_service.h"

#include "common/base/buf.h"

#include "rpc_echo.pb-c.h"

#include <stdio.h>
#include <stdlib.h>

#define HIGH_WATER (256u << 10) /* ServerStream stops producing above this */

struct echo_call {
    struct echo_stats *stats;
    uint32_t n_messages;
    uint64_t n_bytes;
    uint32_t left, index, reply_bytes; /* ServerStream */
    int status;
    bool hang;
};

static void on_open(struct bt_rpc_call *call)
{
    struct echo_stats *stats = bt_rpc_call_service_user(call);
    struct echo_call *e = bt_calloc(1, sizeof(*e));

    e->stats = stats;
    stats->n_opened++;
    bt_rpc_call_set_user(call, e);
}

static void on_closed(struct bt_rpc_call *call, bool cancelled)
{
    struct echo_call *e = bt_rpc_call_user(call);

    e->stats->n_closed++;
    e->stats->n_cancelled += cancelled;
    free(e);
}

static struct echo_call *count(struct bt_rpc_call *call, const Baton__Test__EchoRequest *r)
{
    struct echo_call *e = bt_rpc_call_user(call);

    e->stats->n_messages++;
    e->n_messages++;
    e->n_bytes += r->blob.len;
    e->status = (int)r->status;
    e->hang |= r->hang;
    return e;
}

static void send_reply(struct bt_rpc_call *call, struct echo_call *e, Baton__Test__EchoReply *reply)
{
    int rc = bt_rpc_call_send(call, &reply->base);

    e->stats->n_exhausted += rc == BT_E_EXHAUSTED;
    if (rc == BT_E_EXHAUSTED) {
        bt_rpc_call_fail(call, rc, NULL);
    }
    e->stats->max_queued_bytes = BT_MAX(e->stats->max_queued_bytes, bt_rpc_call_queued_bytes(call));
}

static void unary(struct bt_rpc_call *call, const ProtobufCMessage *msg)
{
    const Baton__Test__EchoRequest *r = (const Baton__Test__EchoRequest *)msg;
    Baton__Test__EchoReply reply = BATON__TEST__ECHO_REPLY__INIT;
    struct echo_call *e = count(call, r);
    struct bt_str note = bt_rpc_call_metadata(call, "x-note");
    uint64_t deadline_ns = bt_rpc_call_deadline_ns(call);
    char note_z[64];

    if (r->hang) {
        return;
    }
    if (r->status) {
        BT_BUG_ON(bt_rpc_call_add_trailer(call, "x-trailer", "told") != BT_OK);
        bt_rpc_call_finish(call, (int)r->status, "as asked");
        return;
    }
    snprintf(note_z, sizeof(note_z), "%.*s", (int)note.n, note.p ? note.p : "");
    reply.text = r->text;
    reply.blob = r->blob;
    reply.n_messages = e->n_messages;
    reply.n_bytes = e->n_bytes;
    reply.note = note_z;
    reply.peer = (char *)(uintptr_t)bt_rpc_call_peer(call);
    reply.deadline_ms =
        deadline_ns == BT_NEVER_NS ? -1 : (int64_t)((deadline_ns - bt_now_ns()) / BT_NS_PER_MS);
    bt_rpc_call_reply(call, &reply.base);
}

/* Produces while little waits; goes on when the queue has drained. */
static void produce(struct bt_rpc_call *call)
{
    struct echo_call *e = bt_rpc_call_user(call);
    Baton__Test__EchoReply reply = BATON__TEST__ECHO_REPLY__INIT;
    uint8_t *blob = bt_calloc(1, e->reply_bytes + 1);

    reply.blob.data = blob;
    reply.blob.len = e->reply_bytes;
    while (e->left > 0) {
        reply.index = e->index++;
        e->left--;
        send_reply(call, e, &reply);
        if (bt_rpc_call_queued_bytes(call) >= HIGH_WATER && bt_rpc_call_want_drained(call)) {
            break;
        }
    }
    free(blob);
    if (e->left == 0 && !e->hang) {
        bt_rpc_call_finish(call, e->status, e->status ? "as asked" : NULL);
    }
}

static void on_drained(struct bt_rpc_call *call)
{
    struct echo_call *e = bt_rpc_call_user(call);

    e->stats->n_drained++;
    produce(call);
}

static void server_stream(struct bt_rpc_call *call, const ProtobufCMessage *msg)
{
    const Baton__Test__EchoRequest *r = (const Baton__Test__EchoRequest *)msg;
    struct echo_call *e = count(call, r);

    e->left = r->count;
    e->reply_bytes = r->reply_bytes;
    produce(call);
}

static void client_stream(struct bt_rpc_call *call, const ProtobufCMessage *msg)
{
    count(call, (const Baton__Test__EchoRequest *)msg);
}

static void client_stream_end(struct bt_rpc_call *call)
{
    struct echo_call *e = bt_rpc_call_user(call);
    Baton__Test__EchoReply reply = BATON__TEST__ECHO_REPLY__INIT;

    e->stats->n_half_closed++;
    reply.n_messages = e->n_messages;
    reply.n_bytes = e->n_bytes;
    bt_rpc_call_reply(call, &reply.base);
}

/* Without a drained callback and without looking at the queue: the library's limit must hold. */
static void bidi(struct bt_rpc_call *call, const ProtobufCMessage *msg)
{
    const Baton__Test__EchoRequest *r = (const Baton__Test__EchoRequest *)msg;
    Baton__Test__EchoReply reply = BATON__TEST__ECHO_REPLY__INIT;
    struct echo_call *e = count(call, r);

    if (r->status) {
        bt_rpc_call_finish(call, (int)r->status, "as asked");
        return;
    }
    reply.text = r->text;
    reply.blob = r->blob;
    reply.index = e->index++;
    send_reply(call, e, &reply);
}

static void bidi_end(struct bt_rpc_call *call)
{
    struct echo_call *e = bt_rpc_call_user(call);

    e->stats->n_half_closed++;
    bt_rpc_call_finish(call, BT_RPC_OK, NULL);
}

#define REQ  &baton__test__echo_request__descriptor
#define RESP &baton__test__echo_reply__descriptor

static const struct bt_rpc_method methods[] = {
    {.path = "/baton.test.Echo/Unary",
     .request = REQ,
     .response = RESP,
     .open = on_open,
     .message = unary,
     .closed = on_closed},
    {.path = "/baton.test.Echo/ServerStream",
     .request = REQ,
     .response = RESP,
     .open = on_open,
     .message = server_stream,
     .drained = on_drained,
     .closed = on_closed},
    {.path = "/baton.test.Echo/ClientStream",
     .request = REQ,
     .response = RESP,
     .client_stream = true,
     .open = on_open,
     .message = client_stream,
     .half_close = client_stream_end,
     .closed = on_closed},
    {.path = "/baton.test.Echo/Bidi",
     .request = REQ,
     .response = RESP,
     .client_stream = true,
     .open = on_open,
     .message = bidi,
     .half_close = bidi_end,
     .closed = on_closed},
};

void echo_service_init(struct bt_rpc_service *service, struct echo_stats *stats)
{
    *service = (struct bt_rpc_service){.name = "baton.test.Echo",
                                       .methods = methods,
                                       .n_methods = BT_ARRAY_LEN(methods),
                                       .user = stats};
}
