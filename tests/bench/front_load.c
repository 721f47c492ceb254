/* Clients of the front door, all on one thread: so many streams at a time, each followed by the
 * next, for so many seconds.
 *
 *   front_load http|grpc|node HOST:PORT [--streams N] [--seconds S] [--tokens M] [--prompt K]
 * [--fresh] [--text] [--leave N] [--warm S]
 *
 * node asks a node itself, one stream at a time: what there would be without a router. --fresh
 * makes a new connection for every request (http). --text sends words and a model's name instead of
 * ids, for those that take no ids (http). --leave: every Nth request is left in the middle of its
 * answer, by closing its connection (http) or cancelling its call (grpc). Sockets are as the system
 * makes them: no TCP_NODELAY, no quick acknowledgements, the request's head and body in one write.
 * Prints one JSON object: requests and tokens that ended in the time, errors, time to the first
 * token of requests begun in it (ms), from the first byte sent, or connecting, to the first token
 * seen; with gRPC also from the sending of a token by the simulated node, which its id tells, until
 * it was seen (us). */
#include "common/base/buf.h"
#include "common/rpc/client.h"
#include "proto/baton.pb-c.h"
#include "proto/node.pb-c.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#define MAX_TIMES (1 << 20)

static struct {
    const char *kind, *target;
    int streams, tokens, prompt;
    double seconds, warm;
    int leave;
    bool fresh, text;
} o = {.streams = 1, .tokens = 64, .prompt = 16, .seconds = 5, .warm = 1};

static struct {
    uint64_t begin, end; /* what counts: before it the streams get going */
    uint64_t tokens, requests, errors, begun, left;
    double *first, *relay;
    size_t n_first, n_relay;
} seen;

static bool counts(uint64_t now)
{
    return now >= seen.begin && now < seen.end;
}

static void count_first(uint64_t begin, uint64_t now)
{
    if (counts(begin) && seen.n_first < MAX_TIMES) {
        seen.first[seen.n_first++] = (double)(now - begin) / 1e6;
    }
}

/* How many tokens the next request takes before it leaves; 0: it stays. */
static int leaves_after(void)
{
    return o.leave > 0 && ++seen.begun % (uint64_t)o.leave == 0 ? BT_MAX(o.tokens / 2, 1) : 0;
}

/* --- HTTP --- */

struct conn {
    int fd;
    bool connecting, any; /* any: a token has come */
    int leave, n;         /* leaves after so many tokens, unless 0; tokens so far */
    size_t matched;       /* of the pattern that is looked for */
    size_t done;
    uint64_t begin;
};

static struct bt_buf request;
static struct sockaddr_in address;
static int poller;

static void make_request(void)
{
    char body[65536], head[256];
    size_t n = (size_t)snprintf(
        body, sizeof(body), o.text ? "{\"model\":\"simulated\",\"prompt\":\"" : "{\"prompt\":[");

    for (int i = 0; i < o.prompt; i++) {
        n += (size_t)snprintf(body + n, sizeof(body) - n, o.text ? "%sw%d" : "%s%d",
                              !i       ? ""
                              : o.text ? " "
                                       : ",",
                              100 + i % 9000);
    }
    n += (size_t)snprintf(body + n, sizeof(body) - n,
                          "%s,\"max_tokens\":%d,\"stream\":true,\"temperature\":0}",
                          o.text ? "\"" : "]", o.tokens);
    snprintf(head, sizeof(head),
             "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
             "Content-Length: %zu\r\n\r\n",
             n);
    BT_BUG_ON(bt_buf_add(&request, head, strlen(head)) < 0 || bt_buf_add(&request, body, n) < 0);
}

static void ask(struct conn *c)
{
    c->any = false;
    c->matched = c->done = 0;
    c->n = 0;
    c->leave = leaves_after();
    if (send(c->fd, request.p, request.n, MSG_NOSIGNAL) != (ssize_t)request.n) {
        seen.errors++;
    }
}

/* All at once, as clients come: who is not accepted yet waits for it without the others. */
static void open_conn(struct conn *c)
{
    struct epoll_event ev = {.events = EPOLLIN, .data.ptr = c};

    c->begin = bt_now_ns();
    c->fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
    c->connecting = false;
    if (c->fd >= 0 && connect(c->fd, (struct sockaddr *)&address, sizeof(address)) < 0) {
        c->connecting = errno == EINPROGRESS;
        ev.events = EPOLLOUT;
        if (!c->connecting) {
            fprintf(stderr, "front_load: %s: %s\n", o.target, strerror(errno));
            exit(1);
        }
    }
    BT_BUG_ON(c->fd < 0 || epoll_ctl(poller, EPOLL_CTL_ADD, c->fd, &ev) < 0);
    if (!c->connecting) {
        ask(c);
    }
}

static void on_connected(struct conn *c)
{
    struct epoll_event ev = {.events = EPOLLIN, .data.ptr = c};
    int error = 0;
    socklen_t n = sizeof(error);

    c->connecting = false;
    epoll_ctl(poller, EPOLL_CTL_MOD, c->fd, &ev);
    if (getsockopt(c->fd, SOL_SOCKET, SO_ERROR, &error, &n) < 0 || error) {
        fprintf(stderr, "front_load: %s: %s\n", o.target, strerror(error));
        exit(1);
    }
    ask(c);
}

/* Counts what came: a token is an event with a choice, the end is [DONE]. True at the end. */
static bool scan(struct conn *c, const char *p, size_t n)
{
    static const char token[] = "\"choices\":[{", done[] = "data: [DONE]\n\n";
    uint64_t now = bt_now_ns();

    for (size_t i = 0; i < n; i++) {
        c->matched = p[i] == token[c->matched] ? c->matched + 1 : p[i] == token[0];
        c->done = p[i] == done[c->done] ? c->done + 1 : p[i] == done[0];
        if (c->matched == sizeof(token) - 1) {
            c->matched = 0;
            seen.tokens += counts(now);
            c->n++;
            if (!c->any) {
                c->any = true;
                count_first(c->begin, now);
            }
        }
        if (c->done == sizeof(done) - 1) {
            return true;
        }
    }
    return false;
}

static void on_readable(struct conn *c)
{
    static char buf[65536];
    ssize_t n;

    if (c->connecting) {
        on_connected(c);
        return;
    }
    n = recv(c->fd, buf, sizeof(buf), 0);
    if (n < 0 && errno == EAGAIN) {
        return;
    }
    if (n <= 0 || (!c->any && n > 12 && memcmp(buf, "HTTP/1.1 200", 12) != 0 && buf[0] == 'H')) {
        seen.errors++;
        close(c->fd);
        open_conn(c);
        return;
    }
    if (scan(c, buf, (size_t)n)) {
        seen.requests += counts(bt_now_ns());
        if (o.fresh) {
            close(c->fd);
            open_conn(c);
        } else {
            c->begin = bt_now_ns();
            ask(c);
        }
    } else if (c->leave > 0 && c->n >= c->leave) {
        seen.left++;
        close(c->fd);
        open_conn(c);
    }
}

static void run_http(void)
{
    struct conn *conns = calloc((size_t)o.streams, sizeof(*conns));
    struct epoll_event ev[256];

    BT_BUG_ON(!conns);
    poller = epoll_create1(0);
    make_request();
    for (int i = 0; i < o.streams; i++) {
        open_conn(&conns[i]);
    }
    while (bt_now_ns() < seen.end) {
        int n = epoll_wait(poller, ev, BT_ARRAY_LEN(ev), 100);

        for (int i = 0; i < n; i++) {
            on_readable(ev[i].data.ptr);
        }
    }
}

/* --- gRPC --- */

static int32_t *prompt_ids(void)
{
    int32_t *ids = calloc((size_t)o.prompt, sizeof(*ids));

    BT_BUG_ON(!ids);
    for (int i = 0; i < o.prompt; i++) {
        ids[i] = 100 + i % 9000;
    }
    return ids;
}

struct call {
    struct bt_rpc_channel *channel;
    uint64_t begin;
    bool any, left;
    int leave, n;
};

static struct bt_loop *loop;
static Baton__V1__GenerateRequest generate = BATON__V1__GENERATE_REQUEST__INIT;

static void begin_call(struct call *c);

static void on_message(struct bt_rpc_client_call *call, const ProtobufCMessage *msg)
{
    const Baton__V1__GenerateResponse *m = (const Baton__V1__GenerateResponse *)msg;
    struct call *c = bt_rpc_client_user(call);
    uint64_t now = bt_now_ns();

    if (counts(now)) {
        seen.tokens += m->n_tokens;
        if (m->n_tokens > 0 && seen.n_relay < MAX_TIMES) {
            int64_t sent = m->tokens[0] - 500; /* us, as front_node.c writes it */

            seen.relay[seen.n_relay++] = (double)(((int64_t)(now / 1000) - sent) % 40000);
        }
    }
    if (!c->any && m->n_tokens > 0) {
        c->any = true;
        count_first(c->begin, now);
    }
    c->n += (int)m->n_tokens;
    if (c->leave > 0 && c->n >= c->leave && !c->left) {
        c->left = true;
        seen.left++;
        bt_rpc_client_cancel(call);
    }
}

static void on_closed(struct bt_rpc_client_call *call, int status, const char *text)
{
    struct call *c = bt_rpc_client_user(call);
    uint64_t now = bt_now_ns();

    if (status != BT_RPC_OK) {
        if (!c->left && ++seen.errors == 1) {
            fprintf(stderr, "front_load: %s: %s\n", bt_rpc_status_name(status), text);
        }
    } else {
        seen.requests += counts(now);
    }
    if (now < seen.end) {
        begin_call(c);
    }
}

static const struct bt_rpc_client_events events = {.message = on_message, .closed = on_closed};

static void begin_call(struct call *c)
{
    struct bt_rpc_client_call *call;
    struct bt_err err;
    struct bt_rpc_client_args args = {.path = "/baton.v1.Baton/Generate",
                                      .response = &baton__v1__generate_response__descriptor,
                                      .events = &events,
                                      .user = c,
                                      .wait_for_ready = true,
                                      .request = &generate.base,
                                      .half_close = true};

    c->any = c->left = false;
    c->n = 0;
    c->leave = leaves_after();
    c->begin = bt_now_ns();
    if (bt_rpc_client_start(c->channel, &args, &call, &err) < 0) {
        fprintf(stderr, "front_load: %s\n", err.msg);
        exit(1);
    }
}

static void run_loop(void)
{
    while (bt_now_ns() < seen.end) {
        bt_loop_poll(loop, bt_now_ns() + 50 * BT_NS_PER_MS);
    }
}

static void run_grpc(void)
{
    static Baton__V1__TokenIds ids = BATON__V1__TOKEN_IDS__INIT;
    static Baton__V1__Stopping stopping = BATON__V1__STOPPING__INIT;
    static Baton__V1__Sampling sampling = BATON__V1__SAMPLING__INIT;
    struct call *calls = calloc((size_t)o.streams, sizeof(*calls));
    struct bt_rpc_channel *channel = NULL;
    struct bt_err err;

    BT_BUG_ON(!calls);
    ids.n_ids = (size_t)o.prompt;
    ids.ids = prompt_ids();
    stopping.max_tokens__case = BATON__V1__STOPPING__MAX_TOKENS__MAX_TOKENS;
    stopping.max_tokens = (uint32_t)o.tokens;
    generate.input_case = BATON__V1__GENERATE_REQUEST__INPUT_TOKENS;
    generate.tokens = &ids;
    generate.stopping = &stopping;
    generate.sampling = &sampling;
    BT_BUG_ON(bt_loop_create(&loop, &err) < 0);
    for (int i = 0; i < o.streams; i++) {
        if (i % 500 == 0 && bt_rpc_channel_create(loop, o.target, NULL, &channel, &err) < 0) {
            fprintf(stderr, "front_load: %s\n", err.msg);
            exit(1);
        }
        calls[i].channel = channel;
        begin_call(&calls[i]);
    }
    run_loop();
}

/* --- a node without a router --- */

static void start_at_node(struct bt_rpc_client_call *call)
{
    static uint64_t id;
    struct call *c = bt_rpc_client_user(call);
    Baton__V1__RouterMessage m = BATON__V1__ROUTER_MESSAGE__INIT;
    Baton__V1__StartRequest start = BATON__V1__START_REQUEST__INIT;
    Baton__V1__NodeSampling sampling = BATON__V1__NODE_SAMPLING__INIT;

    sampling.max_tokens = (uint32_t)o.tokens;
    start.stream_id = ++id;
    start.prompt = prompt_ids();
    start.n_prompt = (size_t)o.prompt;
    start.sampling = &sampling;
    m.kind_case = BATON__V1__ROUTER_MESSAGE__KIND_START;
    m.start = &start;
    c->any = false;
    c->begin = bt_now_ns();
    BT_BUG_ON(bt_rpc_client_send(call, &m.base) < 0);
    free(start.prompt);
}

static void on_node_message(struct bt_rpc_client_call *call, const ProtobufCMessage *msg)
{
    const Baton__V1__NodeMessage *m = (const Baton__V1__NodeMessage *)msg;
    struct call *c = bt_rpc_client_user(call);
    uint64_t now = bt_now_ns();

    if (m->kind_case == BATON__V1__NODE_MESSAGE__KIND_WELCOME) {
        start_at_node(call);
    } else if (m->kind_case == BATON__V1__NODE_MESSAGE__KIND_STEP && m->step->n_outputs > 0) {
        const Baton__V1__StreamOutput *out = m->step->outputs[0];

        if (!c->any) {
            c->any = true;
            count_first(c->begin, now);
        }
        seen.tokens += counts(now) ? out->n_tokens : 0;
        if (out->finish != BATON__V1__FINISH_REASON__FINISH_NONE) {
            seen.requests += counts(now);
            start_at_node(call);
        }
    }
}

static void on_node_closed(struct bt_rpc_client_call *call, int status, const char *text)
{
    (void)call;
    fprintf(stderr, "front_load: the session has ended: %d %s\n", status, text);
    exit(1);
}

static void run_node(void)
{
    static const struct bt_rpc_client_events session = {.message = on_node_message,
                                                        .closed = on_node_closed};
    static struct call c;
    Baton__V1__RouterMessage m = BATON__V1__ROUTER_MESSAGE__INIT;
    Baton__V1__RouterHello hello = BATON__V1__ROUTER_HELLO__INIT;
    struct bt_rpc_client_args args = {.path = "/baton.v1.Node/Session",
                                      .response = &baton__v1__node_message__descriptor,
                                      .events = &session,
                                      .user = &c,
                                      .wait_for_ready = true,
                                      .request = &m.base};
    struct bt_rpc_client_call *call;
    struct bt_err err;

    hello.wire_version = 1;
    hello.incarnation = 1;
    hello.router = (char *)(uintptr_t) "load";
    m.kind_case = BATON__V1__ROUTER_MESSAGE__KIND_HELLO;
    m.hello = &hello;
    BT_BUG_ON(bt_loop_create(&loop, &err) < 0);
    if (bt_rpc_channel_create(loop, o.target, NULL, &c.channel, &err) < 0 ||
        bt_rpc_client_start(c.channel, &args, &call, &err) < 0) {
        fprintf(stderr, "front_load: %s\n", err.msg);
        exit(1);
    }
    run_loop();
}

/* --- report --- */

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;

    return (x > y) - (x < y);
}

static double percentile(const double *v, size_t n, double p)
{
    return n ? v[(size_t)(p * (double)(n - 1))] : 0;
}

static bool parse(int argc, char **argv)
{
    static const struct option options[] = {{"streams", required_argument, NULL, 's'},
                                            {"seconds", required_argument, NULL, 't'},
                                            {"tokens", required_argument, NULL, 'n'},
                                            {"prompt", required_argument, NULL, 'p'},
                                            {"fresh", no_argument, NULL, 'f'},
                                            {"text", no_argument, NULL, 'x'},
                                            {"leave", required_argument, NULL, 'l'},
                                            {"warm", required_argument, NULL, 'w'},
                                            {0}};
    int opt;

    while ((opt = getopt_long(argc, argv, "", options, NULL)) != -1) {
        switch (opt) {
        case 's':
            o.streams = (int)strtol(optarg, NULL, 10);
            break;
        case 't':
            o.seconds = strtod(optarg, NULL);
            break;
        case 'n':
            o.tokens = (int)strtol(optarg, NULL, 10);
            break;
        case 'p':
            o.prompt = (int)strtol(optarg, NULL, 10);
            break;
        case 'f':
            o.fresh = true;
            break;
        case 'w':
            o.warm = strtod(optarg, NULL);
            break;
        case 'x':
            o.text = true;
            break;
        case 'l':
            o.leave = (int)strtol(optarg, NULL, 10);
            break;
        default:
            return false;
        }
    }
    if (optind + 2 != argc || o.streams < 1 || o.prompt < 1 || o.prompt > 8000) {
        return false;
    }
    o.kind = argv[optind];
    o.target = argv[optind + 1];
    return strcmp(o.kind, "http") == 0 || strcmp(o.kind, "grpc") == 0 ||
           strcmp(o.kind, "node") == 0;
}

static bool parse_target(void)
{
    const char *colon = strrchr(o.target, ':');
    char host[64];

    if (!colon || (size_t)(colon - o.target) >= sizeof(host)) {
        return false;
    }
    memcpy(host, o.target, (size_t)(colon - o.target));
    host[colon - o.target] = 0;
    address = (struct sockaddr_in){.sin_family = AF_INET,
                                   .sin_port = htons((uint16_t)strtoul(colon + 1, NULL, 10))};
    return inet_pton(AF_INET, host, &address.sin_addr) == 1;
}

int main(int argc, char **argv)
{
    struct rusage use;
    double cpu;

    if (!parse(argc, argv) || !parse_target()) {
        fprintf(stderr, "usage: see the head of front_load.c\n");
        return 2;
    }
    seen.first = calloc(MAX_TIMES, sizeof(*seen.first));
    seen.relay = calloc(MAX_TIMES, sizeof(*seen.relay));
    BT_BUG_ON(!seen.first || !seen.relay);
    seen.begin = bt_now_ns() + (uint64_t)(o.warm * 1e9);
    seen.end = seen.begin + (uint64_t)(o.seconds * 1e9);
    if (o.kind[0] == 'h') {
        run_http();
    } else if (o.kind[0] == 'g') {
        run_grpc();
    } else {
        run_node();
    }
    getrusage(RUSAGE_SELF, &use);
    cpu = (double)(use.ru_utime.tv_sec + use.ru_stime.tv_sec) +
          (double)(use.ru_utime.tv_usec + use.ru_stime.tv_usec) / 1e6;
    qsort(seen.first, seen.n_first, sizeof(*seen.first), by_value);
    qsort(seen.relay, seen.n_relay, sizeof(*seen.relay), by_value);
    printf("{\"tokens\":%llu,\"requests\":%llu,\"errors\":%llu,\"left\":%llu,\"seconds\":%.3f,"
           "\"cpu_s\":%.3f,"
           "\"first\":%zu,\"first_p50_ms\":%.4f,\"first_p99_ms\":%.4f,\"first_max_ms\":%.3f,"
           "\"relay_p50_us\":%.0f,\"relay_p99_us\":%.0f}\n",
           (unsigned long long)seen.tokens, (unsigned long long)seen.requests,
           (unsigned long long)seen.errors, (unsigned long long)seen.left, o.seconds, cpu,
           seen.n_first, percentile(seen.first, seen.n_first, 0.5),
           percentile(seen.first, seen.n_first, 0.99), percentile(seen.first, seen.n_first, 1),
           percentile(seen.relay, seen.n_relay, 0.5), percentile(seen.relay, seen.n_relay, 0.99));
    fflush(stdout);
    _exit(0); /* streams that still run are nobody's business */
}
