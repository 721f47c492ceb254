/* A node of role "both" that computes nothing: its first token comes at once, then every step gives
 * one token to every stream in one message, as a real node's steps do. A token's id tells when it
 * was sent: 500 and the microseconds modulo 40,000 (front_load.c reads that). For the benchmarks of
 * what stands in front of nodes.
 *
 *   front_node --digest HEX [--step-us N] [--burst N] [--block-tokens N]
 *
 * burst: tokens of a stream in one step. block-tokens: it has a prefix cache, which stays empty, so
 * that the router hashes prompts. Prints "ready HOST:PORT". The model's digest is the router's, so
 * the router is asked first. One loop thread; a session's state lives from open to closed. */
#include "common/rpc/server.h"
#include "proto/node.pb-c.h"

#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>

#define BEAT_NS      (100 * BT_NS_PER_MS)
#define MAX_UNSENT   ((size_t)256 * 1024) /* of a session; steps wait behind it */
#define STREAMS_STEP 4096                 /* outputs of one message at most */
#define MAX_BURST    16

struct stream {
    uint64_t id;
    uint32_t offset, end;
};

struct session {
    struct bt_rpc_call *call;
    struct bt_timer beat, step;
    struct stream *streams;
    size_t n, max;
    bool welcomed;
};

static uint8_t digest[32];
static uint64_t step_ns = 10 * BT_NS_PER_MS;
static uint32_t burst = 1, block_tokens;

static void send_message(struct session *s, Baton__V1__NodeMessage *m)
{
    if (bt_rpc_call_send(s->call, &m->base) < 0) {
        bt_rpc_call_finish(s->call, BT_RPC_INTERNAL, "cannot send");
    }
}

static void on_beat(struct bt_loop *loop, struct bt_timer *timer)
{
    struct session *s = BT_CONTAINER_OF(timer, struct session, beat);
    Baton__V1__NodeMessage m = BATON__V1__NODE_MESSAGE__INIT;
    Baton__V1__NodeLoad load = BATON__V1__NODE_LOAD__INIT;

    load.pages_free = load.pages_unused = 1000000;
    load.requests_running = (uint32_t)s->n;
    m.kind_case = BATON__V1__NODE_MESSAGE__KIND_LOAD;
    m.load = &load;
    send_message(s, &m);
    bt_timer_start(loop, timer, bt_loop_now(loop) + BEAT_NS);
}

/* The next tokens of streams [from, n); those that end leave the list. */
static void send_tokens(struct session *s, size_t from)
{
    static Baton__V1__StreamOutput outputs[STREAMS_STEP], *list[STREAMS_STEP];
    static int32_t tokens[STREAMS_STEP][MAX_BURST];
    Baton__V1__NodeMessage m = BATON__V1__NODE_MESSAGE__INIT;
    Baton__V1__StepOutput step = BATON__V1__STEP_OUTPUT__INIT;
    size_t kept = from, n = 0;

    for (size_t i = from; i < s->n && n < STREAMS_STEP; i++, n++) {
        struct stream *t = &s->streams[i];
        Baton__V1__StreamOutput *o = &outputs[n];

        baton__v1__stream_output__init(o);
        o->stream_id = t->id;
        o->offset = t->offset;
        o->tokens = tokens[n];
        o->n_tokens = BT_MIN(t->offset ? burst : 1, t->end - t->offset);
        for (size_t k = 0; k < o->n_tokens; k++, t->offset++) {
            tokens[n][k] = 500 + (int32_t)(bt_now_ns() / 1000 % 40000);
        }
        o->finish = t->offset == t->end ? BATON__V1__FINISH_REASON__FINISH_LENGTH
                                        : BATON__V1__FINISH_REASON__FINISH_NONE;
        list[n] = o;
        if (t->offset < t->end) {
            s->streams[kept++] = *t;
        }
    }
    memmove(s->streams + kept, s->streams + from + n, (s->n - from - n) * sizeof(*s->streams));
    s->n = kept + (s->n - from - n);
    if (n > 0) {
        step.n_outputs = n;
        step.outputs = list;
        m.kind_case = BATON__V1__NODE_MESSAGE__KIND_STEP;
        m.step = &step;
        send_message(s, &m);
    }
}

static void on_step(struct bt_loop *loop, struct bt_timer *timer)
{
    struct session *s = BT_CONTAINER_OF(timer, struct session, step);

    if (bt_rpc_call_queued_bytes(s->call) < MAX_UNSENT) {
        send_tokens(s, 0);
    }
    bt_timer_start(loop, timer, bt_loop_now(loop) + step_ns);
}

static void on_hello(struct session *s, const Baton__V1__RouterHello *hello)
{
    Baton__V1__NodeMessage m = BATON__V1__NODE_MESSAGE__INIT;
    Baton__V1__NodeWelcome w = BATON__V1__NODE_WELCOME__INIT;
    uint8_t format[32] = {1};

    w.wire_version = hello->wire_version;
    w.name = (char *)(uintptr_t) "simulated";
    w.incarnation = 1;
    w.role = (char *)(uintptr_t) "both";
    w.model_name = (char *)(uintptr_t) "simulated";
    w.model_digest = (ProtobufCBinaryData){sizeof(digest), digest};
    w.kv_format = (ProtobufCBinaryData){sizeof(format), format};
    w.numerics = (char *)(uintptr_t) "none/1";
    w.weight_epoch = 1;
    w.net_address = (char *)(uintptr_t) "127.0.0.1:9";
    w.context_tokens = 8192;
    w.page_tokens = 16;
    w.block_tokens = block_tokens;
    w.pages_total = 1000000;
    w.heartbeat_ms = 100;
    m.kind_case = BATON__V1__NODE_MESSAGE__KIND_WELCOME;
    m.welcome = &w;
    send_message(s, &m);
    s->welcomed = true;
    s->beat.fn = on_beat;
    s->step.fn = on_step;
    bt_timer_start(bt_rpc_call_loop(s->call), &s->beat, bt_now_ns());
    bt_timer_start(bt_rpc_call_loop(s->call), &s->step, bt_now_ns() + step_ns);
}

static void on_start(struct session *s, const Baton__V1__StartRequest *req)
{
    uint32_t answered = (uint32_t)req->n_answered;

    if (s->n == s->max) {
        s->max = s->max ? 2 * s->max : 256;
        s->streams = realloc(s->streams, s->max * sizeof(*s->streams));
        BT_BUG_ON(!s->streams);
    }
    s->streams[s->n++] =
        (struct stream){req->stream_id, answered, answered + req->sampling->max_tokens};
    send_tokens(s, s->n - 1);
}

static void cancel(struct session *s, uint64_t id)
{
    for (size_t i = 0; i < s->n; i++) {
        if (s->streams[i].id == id) {
            s->streams[i] = s->streams[--s->n];
            return;
        }
    }
}

static void on_message(struct bt_rpc_call *call, const ProtobufCMessage *msg)
{
    const Baton__V1__RouterMessage *m = (const Baton__V1__RouterMessage *)msg;
    struct session *s = bt_rpc_call_user(call);

    if (m->kind_case == BATON__V1__ROUTER_MESSAGE__KIND_HELLO) {
        on_hello(s, m->hello);
    } else if (m->kind_case == BATON__V1__ROUTER_MESSAGE__KIND_START) {
        on_start(s, m->start);
    } else if (m->kind_case == BATON__V1__ROUTER_MESSAGE__KIND_CANCEL) {
        cancel(s, m->cancel->stream_id);
    }
}

static void on_open(struct bt_rpc_call *call)
{
    struct session *s = calloc(1, sizeof(*s));

    BT_BUG_ON(!s);
    s->call = call;
    bt_rpc_call_set_user(call, s);
}

static void on_closed(struct bt_rpc_call *call, bool cancelled)
{
    struct session *s = bt_rpc_call_user(call);
    struct bt_loop *loop = bt_rpc_call_loop(call);

    (void)cancelled;
    bt_timer_stop(loop, &s->beat);
    bt_timer_stop(loop, &s->step);
    free(s->streams);
    free(s);
}

static void on_half_close(struct bt_rpc_call *call)
{
    bt_rpc_call_finish(call, BT_RPC_OK, NULL);
}

static const struct bt_rpc_method methods[] = {
    {.path = "/baton.v1.Node/Session",
     .request = &baton__v1__router_message__descriptor,
     .response = &baton__v1__node_message__descriptor,
     .client_stream = true,
     .open = on_open,
     .message = on_message,
     .half_close = on_half_close,
     .closed = on_closed},
};
static const struct bt_rpc_service service = {
    .name = "baton.v1.Node", .methods = methods, .n_methods = BT_ARRAY_LEN(methods)};

static bool parse_digest(const char *hex)
{
    for (size_t i = 0; i < sizeof(digest); i++) {
        unsigned byte;

        if (sscanf(hex + 2 * i, "%2x", &byte) != 1) {
            return false;
        }
        digest[i] = (uint8_t)byte;
    }
    return true;
}

int main(int argc, char **argv)
{
    static const struct option options[] = {{"digest", required_argument, NULL, 'd'},
                                            {"step-us", required_argument, NULL, 's'},
                                            {"burst", required_argument, NULL, 'b'},
                                            {"block-tokens", required_argument, NULL, 'k'},
                                            {0}};
    struct bt_rpc_server_config config = {.max_queued_bytes = (size_t)64 << 20};
    struct bt_rpc_server *srv = NULL;
    struct bt_loop *loop;
    struct bt_err err = {0};
    bool known = false;
    int opt, port, rc;

    while ((opt = getopt_long(argc, argv, "", options, NULL)) != -1) {
        if (opt == 'd') {
            known = strlen(optarg) == 64 && parse_digest(optarg);
        } else if (opt == 's') {
            step_ns = strtoull(optarg, NULL, 10) * BT_NS_PER_US;
        } else if (opt == 'b') {
            burst = (uint32_t)strtoul(optarg, NULL, 10);
        } else if (opt == 'k') {
            block_tokens = (uint32_t)strtoul(optarg, NULL, 10);
        }
    }
    if (!known || burst < 1 || burst > MAX_BURST) {
        fprintf(stderr, "front_node: --digest takes 64 hex digits, --burst 1 to %d\n", MAX_BURST);
        return 2;
    }
    rc = bt_loop_create(&loop, &err);
    if (rc < 0 || (rc = bt_rpc_server_create(loop, &config, &srv, &err)) < 0 ||
        (rc = bt_rpc_server_listen(srv, "127.0.0.1:0", &port, &err)) < 0 ||
        (rc = bt_rpc_server_register(srv, &service, &err)) < 0 ||
        (rc = bt_rpc_server_start(srv, &err)) < 0) {
        fprintf(stderr, "front_node: %s\n", err.msg);
        return 1;
    }
    printf("ready 127.0.0.1:%d\n", port);
    fflush(stdout);
    bt_loop_run(loop);
    return 0;
}
