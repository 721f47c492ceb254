/* A real server and real channels of ours on one loop, over loopback TCP and unix sockets. */
#include "common/base/buf.h"
#include "common/obs/log.h"
#include "common/rpc/client.h"
#include "common/rpc/server.h"

#include "rpc_echo.pb-c.h"
#include "tests/tools/rpc_echo_service.h"
#include "tests/unit/cmocka.h"

#include <arpa/inet.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>

#define WAIT_NS (20 * BT_NS_PER_S) /* for things that must happen; never waited for in full */

struct fixture {
    struct bt_loop *loop;
    struct bt_rpc_server *srv;
    struct bt_rpc_channel *ch;
    struct bt_rpc_service service;
    struct echo_stats stats;
    char target[64];
    int port;
};

struct result {
    struct bt_rpc_client_call *call;
    int n_messages, n_drained, n_closed;
    uint32_t last_index;
    bool order_broken;
    uint64_t n_bytes;
    int status;
    char text[256];
    char reply_text[64], note[64], peer[64], trailer[32];
    uint64_t reply_bytes;
    int64_t deadline_ms;
    bool cancel_on_message;
};

#define EVENTUALLY(f, cond)                                                                        \
    do {                                                                                           \
        uint64_t until_ = bt_now_ns() + WAIT_NS;                                                   \
        while (!(cond) && bt_now_ns() < until_) {                                                  \
            bt_loop_poll((f)->loop, bt_now_ns() + 50 * BT_NS_PER_MS);                              \
        }                                                                                          \
        assert_true(cond);                                                                         \
    } while (0)

static void on_message(struct bt_rpc_client_call *call, const ProtobufCMessage *msg)
{
    const Baton__Test__EchoReply *r = (const Baton__Test__EchoReply *)msg;
    struct result *res = bt_rpc_client_user(call);

    res->order_broken |= r->index != (uint32_t)res->n_messages;
    res->n_messages++;
    res->n_bytes += r->blob.len;
    res->reply_bytes = r->n_bytes;
    res->deadline_ms = r->deadline_ms;
    snprintf(res->reply_text, sizeof(res->reply_text), "%s", r->text);
    snprintf(res->note, sizeof(res->note), "%s", r->note);
    snprintf(res->peer, sizeof(res->peer), "%s", r->peer);
    if (res->cancel_on_message) {
        bt_rpc_client_cancel(call);
    }
}

static void on_drained(struct bt_rpc_client_call *call)
{
    struct result *res = bt_rpc_client_user(call);

    res->n_drained++;
}

static void on_closed(struct bt_rpc_client_call *call, int status, const char *text)
{
    struct result *res = bt_rpc_client_user(call);
    struct bt_str t = bt_rpc_client_trailer(call, "x-trailer");

    res->n_closed++;
    res->status = status;
    snprintf(res->text, sizeof(res->text), "%s", text);
    snprintf(res->trailer, sizeof(res->trailer), "%.*s", (int)t.n, t.p ? t.p : "");
}

static const struct bt_rpc_client_events events = {on_message, on_drained, on_closed};

static void start_full(struct bt_rpc_channel *ch,
                       struct result *res,
                       const char *path,
                       const Baton__Test__EchoRequest *req,
                       struct bt_rpc_client_args args)
{
    *res = (struct result){.cancel_on_message = res->cancel_on_message};
    args.path = path;
    args.response = &baton__test__echo_reply__descriptor;
    args.events = &events;
    args.user = res;
    args.request = req ? &req->base : NULL;
    assert_int_equal(bt_rpc_client_start(ch, &args, &res->call, NULL), BT_OK);
}

static void start(struct fixture *f,
                  struct result *res,
                  const char *method,
                  const Baton__Test__EchoRequest *req,
                  bool half_close)
{
    char path[64];

    snprintf(path, sizeof(path), "/baton.test.Echo/%s", method);
    start_full(f->ch, res, path, req,
               (struct bt_rpc_client_args){.half_close = half_close, .wait_for_ready = true});
}

static void setup_at(struct fixture *f,
                     const char *address,
                     const struct bt_rpc_server_config *config,
                     const struct bt_rpc_channel_config *channel_config)
{
    struct bt_err err;

    *f = (struct fixture){0};
    assert_int_equal(bt_loop_create(&f->loop, &err), BT_OK);
    assert_int_equal(bt_rpc_server_create(f->loop, config, &f->srv, &err), BT_OK);
    assert_int_equal(bt_rpc_server_listen(f->srv, address, &f->port, &err), BT_OK);
    echo_service_init(&f->service, &f->stats);
    assert_int_equal(bt_rpc_server_register(f->srv, &f->service, &err), BT_OK);
    assert_int_equal(bt_rpc_server_register(f->srv, &f->service, &err), BT_E_EXISTS);
    assert_int_equal(bt_rpc_server_start(f->srv, &err), BT_OK);
    if (strncmp(address, "unix:", 5) == 0) {
        snprintf(f->target, sizeof(f->target), "%s", address);
    } else {
        snprintf(f->target, sizeof(f->target), "127.0.0.1:%d", f->port);
    }
    assert_int_equal(bt_rpc_channel_create(f->loop, f->target, channel_config, &f->ch, &err),
                     BT_OK);
}

static void setup(struct fixture *f)
{
    setup_at(f, "127.0.0.1:0", NULL, NULL);
}

/* Every opened call was closed once, whatever happened to it. */
static void teardown(struct fixture *f)
{
    bt_rpc_channel_destroy(f->ch);
    bt_rpc_server_destroy(f->srv);
    bt_loop_destroy(f->loop);
    assert_int_equal(f->stats.n_opened, f->stats.n_closed);
}

static void unary_over(const char *address)
{
    Baton__Test__EchoRequest req = BATON__TEST__ECHO_REQUEST__INIT;
    struct bt_rpc_metadata md[] = {{"x-note", "hello there"}};
    struct result res = {0};
    struct fixture f;

    setup_at(&f, address, NULL, NULL);
    req.text = (char *)(uintptr_t) "grüße";
    start_full(f.ch, &res, "/baton.test.Echo/Unary", &req,
               (struct bt_rpc_client_args){.half_close = true,
                                           .wait_for_ready = true,
                                           .metadata = md,
                                           .n_metadata = 1,
                                           .deadline_ns = bt_now_ns() + 60 * BT_NS_PER_S});
    EVENTUALLY(&f, res.n_closed);
    assert_int_equal(res.status, BT_RPC_OK);
    assert_int_equal(res.n_messages, 1);
    assert_string_equal(res.reply_text, "grüße");
    assert_string_equal(res.note, "hello there");
    assert_true(res.deadline_ms > 30000 && res.deadline_ms <= 61000);
    assert_true(strncmp(res.peer, address[0] == 'u' ? "unix:" : "ipv4:127.0.0.1:",
                        address[0] == 'u' ? 5 : 15) == 0);
    start(&f, &res, "Unary", &req, true);
    EVENTUALLY(&f, res.n_closed);
    assert_int_equal(res.deadline_ms, -1);
    req.status = BT_RPC_FAILED_PRECONDITION;
    start(&f, &res, "Unary", &req, true);
    EVENTUALLY(&f, res.n_closed);
    assert_int_equal(res.status, BT_RPC_FAILED_PRECONDITION);
    assert_string_equal(res.text, "as asked");
    assert_string_equal(res.trailer, "told");
    assert_int_equal(res.n_messages, 0);
    EVENTUALLY(&f, f.stats.n_closed == 3);
    assert_int_equal(f.stats.n_cancelled, 0);
    teardown(&f);
}

static void test_unary(void **state)
{
    char address[64];

    unary_over("127.0.0.1:0");
    snprintf(address, sizeof(address), "unix:/tmp/bt-rpc-%d.sock", (int)getpid());
    unary_over(address);
}

static void test_unknown_method_malformed_and_missing_message(void **state)
{
    Baton__Test__EchoRequest req = BATON__TEST__ECHO_REQUEST__INIT;
    Baton__Test__EchoReply reply = BATON__TEST__ECHO_REPLY__INIT;
    struct result res = {0};
    struct fixture f;

    setup(&f);
    start(&f, &res, "Nothing", &req, true);
    EVENTUALLY(&f, res.n_closed);
    assert_int_equal(res.status, BT_RPC_UNIMPLEMENTED);
    assert_non_null(strstr(res.text, "/baton.test.Echo/Nothing"));
    assert_int_equal(f.stats.n_opened, 0);

    reply.note = (char *)(uintptr_t) "x"; /* field 8: unknown to the request, skipped */
    reply.deadline_ms = 7;                /* field 7: a message in the request */
    start_full(f.ch, &res, "/baton.test.Echo/Unary", (const void *)&reply,
               (struct bt_rpc_client_args){.half_close = true, .wait_for_ready = true});
    EVENTUALLY(&f, res.n_closed);
    assert_int_equal(res.status, BT_RPC_INVALID_ARGUMENT);
    assert_non_null(strstr(res.text, "/baton.test.Echo/Unary"));

    start(&f, &res, "Unary", NULL, true);
    EVENTUALLY(&f, res.n_closed);
    assert_int_equal(res.status, BT_RPC_INVALID_ARGUMENT);
    assert_non_null(strstr(res.text, "missing"));
    teardown(&f);
}

/* protobuf-c cuts a string at a NUL: a check on our side would see another text than was sent. The
 * bytes travel as an unknown field of the request, which is packed as it is. */
static void test_strings_with_nul_or_broken_utf8_are_refused(void **state)
{
    static const struct {
        uint32_t field;
        const char *bytes; /* behind their length */
        size_t n;
        const char *why; /* NULL: fine */
    } cases[] = {
        {1, "\x03xyz", 4, NULL},
        {1, "\0", 1, NULL},
        {1, "\x03x\0z", 4, "text has a NUL at byte 1"},
        {1, "\x02\xff\xfe", 3, "text is not UTF-8 at byte 0"},
        {1, "\x04xy\xed\xa0", 5, "text is not UTF-8 at byte 2"},
        {2, "\x02\xff\0", 3, NULL},    /* bytes may be anything */
        {2000, "\x02\xff\0", 3, NULL}, /* a later version's */
    };

    for (size_t i = 0; i < BT_ARRAY_LEN(cases); i++) {
        Baton__Test__EchoRequest req = BATON__TEST__ECHO_REQUEST__INIT;
        ProtobufCMessageUnknownField raw = {
            .tag = cases[i].field,
            .wire_type = PROTOBUF_C_WIRE_TYPE_LENGTH_PREFIXED,
            .len = cases[i].n,
            .data = (uint8_t *)(uintptr_t)cases[i].bytes,
        };
        struct result res = {0};
        struct fixture f;

        setup(&f);
        req.base.n_unknown_fields = 1;
        req.base.unknown_fields = &raw;
        start(&f, &res, "Unary", &req, true);
        EVENTUALLY(&f, res.n_closed);
        assert_int_equal(res.status, cases[i].why ? BT_RPC_INVALID_ARGUMENT : BT_RPC_OK);
        assert_true(!cases[i].why || strstr(res.text, cases[i].why));
        teardown(&f);
    }
}

static void test_metadata_is_checked(void **state)
{
    static const struct bt_rpc_metadata bad[] = {
        {"Upper", "x"}, {"x-bin", "x"}, {"grpc-x", "x"}, {"x", "line\nbreak"}, {"a b", "x"}};
    struct bt_rpc_client_call *call = NULL;
    struct bt_err err;
    struct fixture f;

    setup(&f);
    for (size_t i = 0; i < BT_ARRAY_LEN(bad); i++) {
        struct bt_rpc_client_args args = {.path = "/x/Y",
                                          .response = &baton__test__echo_reply__descriptor,
                                          .events = &events,
                                          .metadata = &bad[i],
                                          .n_metadata = 1};

        assert_int_equal(bt_rpc_client_start(f.ch, &args, &call, &err), BT_E_INVALID);
        assert_null(call);
    }
    teardown(&f);
}

static void test_server_stream(void **state)
{
    Baton__Test__EchoRequest req = BATON__TEST__ECHO_REQUEST__INIT;
    struct result res = {0};
    struct fixture f;

    setup(&f);
    req.count = 5000;
    req.reply_bytes = 100;
    start(&f, &res, "ServerStream", &req, true);
    EVENTUALLY(&f, res.n_closed);
    assert_int_equal(res.status, BT_RPC_OK);
    assert_int_equal(res.n_messages, 5000);
    assert_false(res.order_broken);
    assert_int_equal(res.n_bytes, 500000);
    req.count = 0; /* an empty stream with a status */
    req.status = BT_RPC_NOT_FOUND;
    start(&f, &res, "ServerStream", &req, true);
    EVENTUALLY(&f, res.n_closed);
    assert_int_equal(res.status, BT_RPC_NOT_FOUND);
    assert_int_equal(res.n_messages, 0);
    req.count = 3;
    start(&f, &res, "ServerStream", &req, true);
    EVENTUALLY(&f, res.n_closed);
    assert_int_equal(res.status, BT_RPC_NOT_FOUND);
    assert_int_equal(res.n_messages, 3);
    teardown(&f);
}

static void test_client_stream_and_bidi(void **state)
{
    Baton__Test__EchoRequest req = BATON__TEST__ECHO_REQUEST__INIT;
    struct result res = {0};
    struct fixture f;

    setup(&f);
    start(&f, &res, "ClientStream", NULL, false);
    req.blob.data = (uint8_t *)(uintptr_t) "0123456789";
    req.blob.len = 10;
    for (int i = 0; i < 1000; i++) {
        assert_int_equal(bt_rpc_client_send(res.call, &req.base), BT_OK);
    }
    assert_true(bt_rpc_client_want_drained(res.call));
    EVENTUALLY(&f, res.n_drained == 1);
    assert_int_equal(bt_rpc_client_queued_bytes(res.call), 0);
    assert_false(bt_rpc_client_want_drained(res.call));
    bt_rpc_client_half_close(res.call);
    assert_int_equal(bt_rpc_client_send(res.call, &req.base), BT_E_CANCELLED);
    EVENTUALLY(&f, res.n_closed);
    assert_int_equal(res.status, BT_RPC_OK);
    assert_int_equal(res.reply_bytes, 10000);
    assert_int_equal(f.stats.n_half_closed, 1);

    start(&f, &res, "ClientStream", NULL, true); /* empty */
    EVENTUALLY(&f, res.n_closed);
    assert_int_equal(res.status, BT_RPC_OK);
    assert_int_equal(res.reply_bytes, 0);

    start(&f, &res, "Bidi", NULL, false);
    for (int i = 1; i <= 200; i++) { /* ping-pong */
        assert_int_equal(bt_rpc_client_send(res.call, &req.base), BT_OK);
        EVENTUALLY(&f, res.n_messages == i);
    }
    bt_rpc_client_half_close(res.call);
    EVENTUALLY(&f, res.n_closed);
    assert_int_equal(res.status, BT_RPC_OK);
    assert_false(res.order_broken);

    /* The server ends a bidi call while the client still sends. */
    start(&f, &res, "Bidi", &req, false);
    EVENTUALLY(&f, res.n_messages == 1);
    req.status = BT_RPC_ABORTED;
    assert_int_equal(bt_rpc_client_send(res.call, &req.base), BT_OK);
    req.status = 0;
    for (int i = 0; i < 100; i++) {
        assert_int_equal(bt_rpc_client_send(res.call, &req.base), BT_OK);
    }
    EVENTUALLY(&f, res.n_closed);
    assert_int_equal(res.status, BT_RPC_ABORTED);
    EVENTUALLY(&f, f.stats.n_closed == 4);
    teardown(&f);
}

static void test_cancel_by_client(void **state)
{
    Baton__Test__EchoRequest req = BATON__TEST__ECHO_REQUEST__INIT;
    struct result res = {0};
    struct fixture f;

    setup(&f);
    req.hang = true;
    start(&f, &res, "Unary", &req, true);
    EVENTUALLY(&f, f.stats.n_messages == 1);
    bt_rpc_client_cancel(res.call);
    bt_rpc_client_cancel(res.call);
    EVENTUALLY(&f, res.n_closed && f.stats.n_closed == 1);
    assert_int_equal(res.status, BT_RPC_CANCELLED);
    assert_int_equal(f.stats.n_cancelled, 1);

    req.hang = false; /* in the middle of a stream, from its own callback */
    req.count = 1000000;
    req.reply_bytes = 1000;
    res.cancel_on_message = true;
    start(&f, &res, "ServerStream", &req, true);
    EVENTUALLY(&f, res.n_closed && f.stats.n_closed == 2);
    assert_int_equal(res.status, BT_RPC_CANCELLED);
    assert_int_equal(res.n_messages, 1);
    assert_int_equal(f.stats.n_cancelled, 2);

    res.cancel_on_message = false; /* before anything was sent; right after the start */
    start(&f, &res, "Bidi", NULL, false);
    bt_rpc_client_cancel(res.call);
    EVENTUALLY(&f, res.n_closed);
    assert_int_equal(res.status, BT_RPC_CANCELLED);

    req.count = 1000; /* paused by the client, then cancelled */
    start(&f, &res, "ServerStream", &req, true);
    bt_rpc_client_pause(res.call);
    EVENTUALLY(&f, f.stats.n_messages >= 3);
    bt_rpc_client_cancel(res.call);
    EVENTUALLY(&f, res.n_closed);
    assert_int_equal(res.status, BT_RPC_CANCELLED);
    assert_int_equal(res.n_messages, 0);
    teardown(&f);
}

static void test_deadline(void **state)
{
    Baton__Test__EchoRequest req = BATON__TEST__ECHO_REQUEST__INIT;
    struct result res = {0};
    struct fixture f;

    setup(&f);
    req.hang = true;
    start_full(f.ch, &res, "/baton.test.Echo/Unary", &req,
               (struct bt_rpc_client_args){.half_close = true,
                                           .wait_for_ready = true,
                                           .deadline_ns = bt_now_ns() + 300 * BT_NS_PER_MS});
    EVENTUALLY(&f, res.n_closed);
    assert_int_equal(res.status, BT_RPC_DEADLINE_EXCEEDED);
    EVENTUALLY(&f, f.stats.n_closed == f.stats.n_opened);
    assert_int_equal(f.stats.n_cancelled, f.stats.n_opened);
    teardown(&f);
}

static void test_large_messages_and_limits(void **state)
{
    Baton__Test__EchoRequest req = BATON__TEST__ECHO_REQUEST__INIT;
    struct bt_rpc_client_call *call;
    struct bt_rpc_client_args args = {.path = "/baton.test.Echo/Unary",
                                      .response = &baton__test__echo_reply__descriptor,
                                      .events = &events,
                                      .request = &req.base};
    struct bt_rpc_server_config config = {.max_message_bytes = 12u << 20,
                                          .max_queued_bytes = 12u << 20};
    struct result res = {0};
    struct fixture f;
    struct bt_err err;
    uint8_t *big = bt_calloc(1, 17u << 20);

    setup_at(&f, "127.0.0.1:0", &config, NULL);
    req.blob.data = big;
    req.blob.len = 10u << 20;
    start(&f, &res, "Unary", &req, true);
    EVENTUALLY(&f, res.n_closed);
    assert_int_equal(res.status, BT_RPC_OK);
    assert_int_equal(res.n_bytes, 10u << 20);

    req.blob.len = 13u << 20; /* more than the server takes */
    start(&f, &res, "Unary", &req, true);
    EVENTUALLY(&f, res.n_closed);
    assert_int_equal(res.status, BT_RPC_RESOURCE_EXHAUSTED);

    req.blob.len = 17u << 20; /* more than the channel queues */
    assert_int_equal(bt_rpc_client_start(f.ch, &args, &call, &err), BT_E_EXHAUSTED);
    free(big);
    teardown(&f);
}

/* Few bytes on the wire, a struct each in memory: the decoder's cap decides, not the sender. */
static void test_decoding_memory_is_capped(void **state)
{
    enum { N = 400000 };
    Baton__Test__EchoRequest req = BATON__TEST__ECHO_REQUEST__INIT;
    Baton__Test__EchoPart part = BATON__TEST__ECHO_PART__INIT;
    Baton__Test__EchoPart **parts = bt_calloc(N, sizeof(*parts));
    struct bt_rpc_server_config config = {.max_message_bytes = 1u << 20};
    struct result res = {0};
    struct fixture f;

    setup_at(&f, "127.0.0.1:0", &config, NULL);
    for (size_t i = 0; i < N; i++) {
        parts[i] = &part;
    }
    req.parts = parts;
    req.n_parts = 20000;
    start(&f, &res, "Unary", &req, true);
    EVENTUALLY(&f, res.n_closed);
    assert_int_equal(res.status, BT_RPC_OK);
    req.n_parts = N; /* 800 KB of wire, 19 MB of structs and pointers */
    start(&f, &res, "Unary", &req, true);
    EVENTUALLY(&f, res.n_closed);
    assert_int_equal(res.status, BT_RPC_RESOURCE_EXHAUSTED);
    assert_non_null(strstr(res.text, "/baton.test.Echo/Unary"));
    free(parts);
    teardown(&f);
}

static void test_64_streams_at_once(void **state)
{
    Baton__Test__EchoRequest req = BATON__TEST__ECHO_REQUEST__INIT;
    static struct result res[64];
    struct fixture f;
    int n_done = 0;

    setup(&f);
    req.count = 500;
    req.reply_bytes = 64;
    for (size_t i = 0; i < 64; i++) {
        start(&f, &res[i], "ServerStream", &req, true);
    }
    for (size_t i = 0; i < 64; i++) {
        EVENTUALLY(&f, res[i].n_closed);
        n_done += res[i].status == BT_RPC_OK && res[i].n_messages == 500 && !res[i].order_broken;
    }
    assert_int_equal(n_done, 64);
    teardown(&f);
}

/* A client that does not read: the server's queue stays at what the service allows itself, and
 * nothing is lost when the client reads on. */
static void test_back_pressure_on_a_client_that_does_not_read(void **state)
{
    Baton__Test__EchoRequest req = BATON__TEST__ECHO_REQUEST__INIT;
    struct result res = {0};
    struct fixture f;
    uint64_t until;

    setup(&f);
    req.count = 2000;
    req.reply_bytes = 32u << 10; /* 64 MB in all */
    start(&f, &res, "ServerStream", &req, true);
    bt_rpc_client_pause(res.call);
    EVENTUALLY(&f, f.stats.max_queued_bytes >= 256u << 10);
    until = bt_now_ns() + 300 * BT_NS_PER_MS;
    while (bt_now_ns() < until) {
        bt_loop_poll(f.loop, until);
    }
    assert_true(f.stats.max_queued_bytes < 320u << 10);
    assert_int_equal(res.n_messages, 0);
    bt_rpc_client_resume(res.call);
    EVENTUALLY(&f, res.n_closed);
    assert_int_equal(res.status, BT_RPC_OK);
    assert_int_equal(res.n_messages, 2000);
    assert_false(res.order_broken);
    assert_true(f.stats.n_drained > 0);
    teardown(&f);
}

/* A service that does not look at its queue is stopped by the library's limit. */
static void test_send_queue_limit(void **state)
{
    Baton__Test__EchoRequest req = BATON__TEST__ECHO_REQUEST__INIT;
    struct bt_rpc_server_config config = {.max_queued_bytes = 1u << 20};
    struct result res = {0};
    struct fixture f;
    uint8_t *blob = bt_calloc(1, 100000);

    setup_at(&f, "127.0.0.1:0", &config, NULL);
    req.blob.data = blob;
    req.blob.len = 100000;
    start(&f, &res, "Bidi", NULL, false);
    bt_rpc_client_pause(res.call);
    for (int i = 0; i < 2000 && f.stats.n_exhausted == 0; i++) {
        if (bt_rpc_client_send(res.call, &req.base) == BT_E_CANCELLED) {
            break;
        }
        bt_loop_poll(f.loop, bt_now_ns() + BT_NS_PER_MS);
    }
    EVENTUALLY(&f, f.stats.n_exhausted == 1);
    assert_true(f.stats.max_queued_bytes <= 1u << 20);
    bt_rpc_client_resume(res.call);
    EVENTUALLY(&f, res.n_closed);
    assert_int_equal(res.status, BT_RPC_RESOURCE_EXHAUSTED);
    assert_true(res.n_messages > 0); /* what was queued came first */
    assert_false(res.order_broken);
    free(blob);
    teardown(&f);
}

static void test_call_limit(void **state)
{
    Baton__Test__EchoRequest req = BATON__TEST__ECHO_REQUEST__INIT;
    struct bt_rpc_server_config config = {.max_calls = 2};
    struct result a = {0}, b = {0}, c = {0};
    struct fixture f;

    setup_at(&f, "127.0.0.1:0", &config, NULL);
    req.hang = true;
    start(&f, &a, "Unary", &req, true);
    start(&f, &b, "Unary", &req, true);
    EVENTUALLY(&f, f.stats.n_messages == 2);
    assert_int_equal(bt_rpc_server_n_calls(f.srv), 2);
    start(&f, &c, "Unary", &req, true);
    EVENTUALLY(&f, c.n_closed);
    assert_int_equal(c.status, BT_RPC_RESOURCE_EXHAUSTED);
    assert_int_equal(f.stats.n_opened, 2);
    bt_rpc_client_cancel(a.call);
    EVENTUALLY(&f, bt_rpc_server_n_calls(f.srv) == 1);
    req.hang = false;
    start(&f, &c, "Unary", &req, true);
    EVENTUALLY(&f, c.n_closed);
    assert_int_equal(c.status, BT_RPC_OK);
    bt_rpc_client_cancel(b.call);
    EVENTUALLY(&f, b.n_closed);
    teardown(&f);
}

/* Calls that never say anything fill the server; whoever speaks gets in all the same. */
static void test_silent_calls_make_room(void **state)
{
    Baton__Test__EchoRequest req = BATON__TEST__ECHO_REQUEST__INIT;
    struct bt_rpc_server_config config = {.max_calls = 3};
    struct result silent[3] = {{0}}, busy = {0}, c = {0};
    struct fixture f;

    setup_at(&f, "127.0.0.1:0", &config, NULL);
    req.hang = true;
    start(&f, &busy, "Unary", &req, true);
    EVENTUALLY(&f, f.stats.n_messages == 1);
    for (size_t i = 0; i < BT_ARRAY_LEN(silent); i++) {
        start(&f, &silent[i], "Bidi", NULL, false);
        EVENTUALLY(&f, f.stats.n_opened == 2 + (int)i);
    }
    EVENTUALLY(&f, silent[0].n_closed); /* made room for the third one */
    assert_int_equal(silent[0].status, BT_RPC_RESOURCE_EXHAUSTED);
    req.hang = false;
    start(&f, &c, "Unary", &req, true);
    EVENTUALLY(&f, c.n_closed);
    assert_int_equal(c.status, BT_RPC_OK);
    EVENTUALLY(&f, silent[1].n_closed);
    assert_int_equal(busy.n_closed + silent[2].n_closed, 0);
    bt_rpc_client_cancel(busy.call);
    bt_rpc_client_cancel(silent[2].call);
    EVENTUALLY(&f, busy.n_closed && silent[2].n_closed);
    EVENTUALLY(&f, bt_rpc_server_n_calls(f.srv) == 0);
    teardown(&f);
}

/* More calls on one connection than the server allows wait at the client for their turn. */
static void test_stream_limit_of_a_connection(void **state)
{
    Baton__Test__EchoRequest req = BATON__TEST__ECHO_REQUEST__INIT;
    struct bt_rpc_server_config config = {.max_streams = 2};
    struct result warm = {0}, r[3] = {0};
    struct fixture f;

    setup_at(&f, "127.0.0.1:0", &config, NULL);
    start(&f, &warm, "Unary", &req, true); /* the client knows the server's settings after this */
    EVENTUALLY(&f, warm.n_closed);
    req.hang = true;
    for (int i = 0; i < 3; i++) {
        start(&f, &r[i], "Unary", &req, true);
    }
    EVENTUALLY(&f, f.stats.n_messages == 3);
    for (int i = 0; i < 10; i++) {
        bt_loop_poll(f.loop, bt_now_ns() + 10 * BT_NS_PER_MS);
    }
    assert_int_equal(f.stats.n_messages, 3); /* the warm one and two */
    bt_rpc_client_cancel(r[0].call);
    EVENTUALLY(&f, f.stats.n_messages == 4);
    teardown(&f);
}

static void set_true(void *arg)
{
    *(bool *)arg = true;
}

static void test_drain_grace_and_shutdown(void **state)
{
    Baton__Test__EchoRequest req = BATON__TEST__ECHO_REQUEST__INIT;
    struct result bidi = {0}, hung = {0}, late = {0};
    struct fixture f;
    bool done = false;

    setup(&f);
    start(&f, &bidi, "Bidi", &req, false);
    EVENTUALLY(&f, bidi.n_messages == 1);
    bt_rpc_server_drain(f.srv);
    start(&f, &late, "Unary", &req, true);
    EVENTUALLY(&f, late.n_closed);
    assert_int_equal(late.status, BT_RPC_UNAVAILABLE);
    assert_int_equal(bt_rpc_client_send(bidi.call, &req.base), BT_OK); /* goes on */
    EVENTUALLY(&f, bidi.n_messages == 2);

    bt_rpc_server_shutdown(f.srv, bt_now_ns() + WAIT_NS, set_true, &done);
    assert_int_equal(bt_rpc_client_send(bidi.call, &req.base), BT_OK); /* still in grace */
    EVENTUALLY(&f, bidi.n_messages == 3);
    bt_rpc_client_half_close(bidi.call);
    EVENTUALLY(&f, bidi.n_closed && done); /* long before the end of the grace */
    assert_int_equal(bidi.status, BT_RPC_OK);
    assert_int_equal(f.stats.n_cancelled, 0);
    teardown(&f);

    setup(&f); /* grace over with a call in flight */
    done = false;
    req.hang = true;
    start(&f, &hung, "Unary", &req, true);
    EVENTUALLY(&f, f.stats.n_messages == 1);
    bt_rpc_server_shutdown(f.srv, bt_now_ns() + 100 * BT_NS_PER_MS, set_true, &done);
    EVENTUALLY(&f, done && hung.n_closed);
    assert_int_equal(hung.status, BT_RPC_UNAVAILABLE);
    assert_int_equal(f.stats.n_cancelled, 1);
    teardown(&f);

    setup(&f); /* destroy with everything in flight: the channel first, then the server */
    req.hang = false;
    req.count = 100000;
    req.reply_bytes = 1000;
    start(&f, &hung, "ServerStream", &req, true);
    start(&f, &bidi, "Bidi", &req, false);
    start(&f, &late, "ServerStream", &req, true);
    bt_rpc_client_pause(late.call);
    EVENTUALLY(&f, hung.n_messages > 10);
    teardown(&f);
    assert_int_equal(hung.n_closed + bidi.n_closed + late.n_closed, 3);
}

static void test_server_gone_and_back(void **state)
{
    Baton__Test__EchoRequest req = BATON__TEST__ECHO_REQUEST__INIT;
    struct result res = {0};
    struct fixture f;
    struct bt_err err;
    char address[64];

    setup(&f);
    req.hang = true;
    start(&f, &res, "Unary", &req, true);
    EVENTUALLY(&f, f.stats.n_messages == 1);
    snprintf(address, sizeof(address), "127.0.0.1:%d", f.port);
    bt_rpc_server_destroy(f.srv);
    EVENTUALLY(&f, res.n_closed);
    assert_int_equal(res.status, BT_RPC_UNAVAILABLE);

    req.hang = false; /* nobody there: fails at once, without wait_for_ready */
    start_full(f.ch, &res, "/baton.test.Echo/Unary", &req,
               (struct bt_rpc_client_args){.half_close = true});
    EVENTUALLY(&f, res.n_closed);
    assert_int_equal(res.status, BT_RPC_UNAVAILABLE);

    start(&f, &res, "Unary", &req, true); /* waits for it */
    for (int i = 0; i < 5; i++) {
        bt_loop_poll(f.loop, bt_now_ns() + 20 * BT_NS_PER_MS);
    }
    assert_int_equal(res.n_closed, 0);
    assert_int_equal(bt_rpc_server_create(f.loop, NULL, &f.srv, &err), BT_OK);
    assert_int_equal(bt_rpc_server_register(f.srv, &f.service, &err), BT_OK);
    assert_int_equal(bt_rpc_server_listen(f.srv, address, NULL, &err), BT_OK);
    assert_int_equal(bt_rpc_server_start(f.srv, &err), BT_OK);
    EVENTUALLY(&f, res.n_closed);
    assert_int_equal(res.status, BT_RPC_OK);
    teardown(&f);
}

struct states {
    int n[4];
    enum bt_rpc_conn_state last;
};

static void on_state(void *user, enum bt_rpc_conn_state s)
{
    struct states *st = user;

    st->n[s]++;
    st->last = s;
}

static void test_connection_state(void **state)
{
    struct states st = {0};
    struct bt_rpc_channel_config config = {.on_state = on_state, .user = &st};
    struct fixture f;
    struct bt_err err;
    char address[64];

    setup_at(&f, "127.0.0.1:0", NULL, &config);
    EVENTUALLY(&f, st.last == BT_RPC_CONN_READY);
    snprintf(address, sizeof(address), "127.0.0.1:%d", f.port);
    bt_rpc_server_destroy(f.srv);
    EVENTUALLY(&f, st.n[BT_RPC_CONN_FAILED] > 0);
    assert_int_equal(bt_rpc_server_create(f.loop, NULL, &f.srv, &err), BT_OK);
    assert_int_equal(bt_rpc_server_listen(f.srv, address, NULL, &err), BT_OK);
    assert_int_equal(bt_rpc_server_start(f.srv, &err), BT_OK);
    EVENTUALLY(&f, st.last == BT_RPC_CONN_READY);
    assert_string_equal(bt_rpc_conn_state_name(st.last), "ready");
    teardown(&f);
}

static void test_listen_addresses(void **state)
{
    static const char *const local[] = {"127.0.0.1:1", "127.9.9.9:0", "[::1]:7",
                                        "localhost:0", "unix:/tmp/x", "[::ffff:127.0.0.1]:5"};
    static const char *const other[] = {
        "0.0.0.0:1",  "[::]:1",  "*:1", "10.0.0.1:1", "example.org:1",
        "[fe80::1]:", "127.1:1", ":1",  "",           "localhost.evil.org:1"};
    struct bt_rpc_channel *channel;
    struct bt_rpc_server *srv;
    struct bt_err err;
    struct fixture f;
    char address[64];

    for (size_t i = 0; i < BT_ARRAY_LEN(local); i++) {
        assert_true(bt_rpc_address_is_local(local[i]));
    }
    for (size_t i = 0; i < BT_ARRAY_LEN(other); i++) {
        assert_false(bt_rpc_address_is_local(other[i]));
    }
    setup(&f);
    assert_int_equal(bt_rpc_server_create(f.loop, NULL, &srv, &err), BT_OK);
    assert_int_equal(bt_rpc_server_listen(srv, "0.0.0.0:0", NULL, &err), BT_E_CONFIG);
    assert_non_null(strstr(err.msg, "0.0.0.0:0"));
    assert_non_null(strstr(err.msg, "allow_insecure"));
    snprintf(address, sizeof(address), "127.0.0.1:%d", f.port); /* taken by f.srv */
    assert_int_equal(bt_rpc_server_listen(srv, address, NULL, &err), BT_E_IO);
    assert_non_null(strstr(err.msg, "in use"));
    bt_rpc_server_destroy(srv); /* never started */
    assert_int_equal(bt_rpc_channel_create(f.loop, "", NULL, &channel, &err), BT_E_CONFIG);
    assert_int_equal(bt_rpc_server_create(f.loop,
                                          &(struct bt_rpc_server_config){.allow_insecure = true},
                                          &srv, &err),
                     BT_OK);
    assert_int_equal(bt_rpc_server_listen(srv, "0.0.0.0:0", NULL, &err), BT_OK);
    bt_rpc_server_destroy(srv);
    teardown(&f);
}

/* Bytes that are no HTTP/2 close their connection and harm nobody else. */
static void test_garbage_at_the_port(void **state)
{
    Baton__Test__EchoRequest req = BATON__TEST__ECHO_REQUEST__INIT;
    struct sockaddr_in sa = {.sin_family = AF_INET};
    static const char http1[] = "GET / HTTP/1.1\r\nHost: x\r\n\r\n";
    struct result res = {0};
    struct fixture f;
    char junk[4096], buf[256];
    int fd;
    ssize_t n;

    setup(&f);
    sa.sin_port = htons((uint16_t)f.port);
    sa.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    for (size_t i = 0; i < sizeof(junk); i++) {
        junk[i] = (char)(i * 131 + 7);
    }
    for (int round = 0; round < 6; round++) {
        fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
        if (connect(fd, (struct sockaddr *)&sa, sizeof(sa)) < 0) {
            bt_loop_poll(f.loop, bt_now_ns() + 10 * BT_NS_PER_MS);
        }
        if (round % 3 == 0) {
            n = send(fd, http1, sizeof(http1) - 1, MSG_NOSIGNAL);
        } else if (round % 3 == 1) {
            n = send(fd, junk, sizeof(junk), MSG_NOSIGNAL);
        } else { /* a good preface, then nonsense */
            n = send(fd, "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\xff\xff\xff\xff\xff\xff\xff\xff\xff", 33,
                     MSG_NOSIGNAL);
        }
        assert_true(n > 0);
        do { /* until the server closes */
            bt_loop_poll(f.loop, bt_now_ns() + 10 * BT_NS_PER_MS);
            n = recv(fd, buf, sizeof(buf), 0);
        } while (n > 0 || (n < 0 && (errno == EAGAIN || errno == EINTR)));
        close(fd);
    }
    start(&f, &res, "Unary", &req, true);
    EVENTUALLY(&f, res.n_closed);
    assert_int_equal(res.status, BT_RPC_OK);
    teardown(&f);
}

/* A quiet call and a quiet channel with keep-alive scaled down 50 times: many pings, no GOAWAY. */
static void test_STRM_03_no_goaway_inside_the_cluster(void **state)
{
    Baton__Test__EchoRequest req = BATON__TEST__ECHO_REQUEST__INIT;
    struct bt_rpc_server_config config = {.keepalive = {.time_ms = 100, .timeout_ms = 10000}};
    struct states st = {0};
    struct bt_rpc_channel_config channel_config = {
        .keepalive = config.keepalive, .on_state = on_state, .user = &st};
    struct result res = {0};
    struct fixture f;
    uint64_t until;

    setup_at(&f, "127.0.0.1:0", &config, &channel_config);
    req.hang = true;
    start(&f, &res, "Unary", &req, true);
    for (int phase = 0; phase < 2; phase++) { /* with a call that says nothing, then without */
        until = bt_now_ns() + 1500 * BT_NS_PER_MS;
        while (bt_now_ns() < until) {
            bt_loop_poll(f.loop, until);
        }
        assert_int_equal(res.n_closed, phase);
        if (phase == 0) {
            bt_rpc_client_cancel(res.call);
            EVENTUALLY(&f, res.n_closed);
        }
    }
    assert_int_equal(st.n[BT_RPC_CONN_READY], 1);
    assert_int_equal(st.n[BT_RPC_CONN_FAILED], 0);
    assert_int_equal(st.last, BT_RPC_CONN_READY);
    teardown(&f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_unary),
        cmocka_unit_test(test_unknown_method_malformed_and_missing_message),
        cmocka_unit_test(test_strings_with_nul_or_broken_utf8_are_refused),
        cmocka_unit_test(test_metadata_is_checked),
        cmocka_unit_test(test_server_stream),
        cmocka_unit_test(test_client_stream_and_bidi),
        cmocka_unit_test(test_cancel_by_client),
        cmocka_unit_test(test_deadline),
        cmocka_unit_test(test_large_messages_and_limits),
        cmocka_unit_test(test_decoding_memory_is_capped),
        cmocka_unit_test(test_64_streams_at_once),
        cmocka_unit_test(test_back_pressure_on_a_client_that_does_not_read),
        cmocka_unit_test(test_send_queue_limit),
        cmocka_unit_test(test_call_limit),
        cmocka_unit_test(test_silent_calls_make_room),
        cmocka_unit_test(test_stream_limit_of_a_connection),
        cmocka_unit_test(test_drain_grace_and_shutdown),
        cmocka_unit_test(test_server_gone_and_back),
        cmocka_unit_test(test_connection_state),
        cmocka_unit_test(test_STRM_03_no_goaway_inside_the_cluster),
        cmocka_unit_test(test_listen_addresses),
        cmocka_unit_test(test_garbage_at_the_port),
    };

    if (getenv("BATON_TEST_LOG")) {
        bt_log_threshold = BT_LOG_DEBUG;
    }
    return cmocka_run_group_tests(tests, NULL, NULL);
}
