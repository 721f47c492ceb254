/* A worker with an OpenAI-compatible port that computes nothing, for routers that speak HTTP to
 * their nodes: the peers of the benchmark `front`. The first token comes at once, then every step
 * gives one token to every stream; a stream whose socket is full waits for the next step.
 *
 *   front_worker [--step-us N]
 *
 * Prints "ready HOST:PORT". Completions are streamed, whatever the body says; all GETs are answered
 * with what such routers ask at their start. One thread; a connection lives from accept to close.
 */
#include "common/base/buf.h"
#include "common/ds/list.h"
#include "common/thr/time.h"

#include <arpa/inet.h>
#include <errno.h>
#include <getopt.h>
#include <http_parser.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <unistd.h>

struct conn {
    struct bt_list link; /* streams, or empty */
    int fd;
    http_parser parser;
    struct bt_buf body, out; /* out: what the socket had no room for */
    uint32_t left, turn;     /* tokens of its stream to come, and gone */
};

static struct bt_list streams;
static int poller, listener, ticker;
static uint64_t step_ns = 10 * BT_NS_PER_MS;
static const char head[] = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
                           "Transfer-Encoding: chunked\r\n\r\n";

static void fail(const char *what)
{
    fprintf(stderr, "front_worker: %s: %s\n", what, strerror(errno));
    exit(1);
}

static void drop(struct conn *c)
{
    bt_list_remove(&c->link);
    close(c->fd);
    bt_buf_fini(&c->body);
    bt_buf_fini(&c->out);
    free(c);
}

/* False: the connection is broken. */
static bool flush(struct conn *c)
{
    ssize_t n = send(c->fd, c->out.p, c->out.n, MSG_NOSIGNAL);

    if (n < 0 && errno != EAGAIN) {
        return false;
    }
    if (n > 0) {
        memmove(c->out.p, c->out.p + n, c->out.n - (size_t)n);
        c->out.n -= (size_t)n;
    }
    return true;
}

static void put(struct conn *c, const char *p, size_t n)
{
    BT_BUG_ON(bt_buf_add(&c->out, p, n) < 0);
}

/* One token, and the end behind the last one. */
static bool put_token(struct conn *c)
{
    char event[300], chunk[320];
    int n =
        snprintf(event, sizeof(event),
                 "data: {\"id\":\"cmpl-%d\",\"object\":\"text_completion\",\"created\":"
                 "1700000000,\"model\":\"simulated\",\"choices\":[{\"index\":0,\"text\":\" t%u\","
                 "\"logprobs\":null,\"finish_reason\":%s}]}\n\n",
                 c->fd, c->turn % 1000, c->left == 1 ? "\"length\"" : "null");

    n = snprintf(chunk, sizeof(chunk), "%x\r\n%s\r\n", (unsigned)n, event);
    put(c, chunk, (size_t)n);
    c->turn++;
    if (--c->left == 0) {
        static const char end[] = "e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n";

        put(c, end, sizeof(end) - 1);
        bt_list_remove(&c->link);
    }
    return flush(c);
}

static uint32_t wanted(struct conn *c)
{
    static const char key[] = "\"max_tokens\":";
    const char *at;

    BT_BUG_ON(bt_buf_add(&c->body, "", 1) < 0);
    at = strstr(c->body.p, key);
    return at ? (uint32_t)strtoul(at + sizeof(key) - 1, NULL, 10) : 16;
}

static int on_body(http_parser *p, const char *at, size_t n)
{
    struct conn *c = p->data;

    BT_BUG_ON(bt_buf_add(&c->body, at, n) < 0);
    return 0;
}

static int on_message(http_parser *p)
{
    static const char facts[] =
        "{\"object\":\"list\",\"data\":[{\"id\":\"simulated\",\"object\":\"model\",\"owned_by\":"
        "\"bench\"}],\"model_path\":\"simulated\",\"status\":\"ready\"}";
    struct conn *c = p->data;
    char text[400];
    int n;

    if (p->method == HTTP_POST) {
        c->left = BT_MAX(wanted(c), 1u);
        c->turn = 0;
        bt_list_push_back(&streams, &c->link);
        put(c, head, sizeof(head) - 1);
        c->body.n = 0;
        return put_token(c) ? 0 : -1;
    }
    n = snprintf(
        text, sizeof(text),
        "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %zu\r\n\r\n%s",
        sizeof(facts) - 1, facts);
    put(c, text, (size_t)n);
    c->body.n = 0;
    return flush(c) ? 0 : -1;
}

static const http_parser_settings settings = {.on_body = on_body,
                                              .on_message_complete = on_message};

static void on_readable(struct conn *c)
{
    static char buf[65536];
    ssize_t n = recv(c->fd, buf, sizeof(buf), 0);

    if (n < 0 && errno == EAGAIN) {
        return;
    }
    if (n <= 0 || http_parser_execute(&c->parser, &settings, buf, (size_t)n) != (size_t)n) {
        drop(c);
    }
}

static void accept_all(void)
{
    struct epoll_event ev = {.events = EPOLLIN};
    int fd, one = 1;

    while ((fd = accept4(listener, NULL, NULL, SOCK_NONBLOCK)) >= 0) {
        struct conn *c = bt_calloc(1, sizeof(*c));

        BT_BUG_ON(!c);
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
        bt_list_init(&c->link);
        c->fd = fd;
        http_parser_init(&c->parser, HTTP_REQUEST);
        c->parser.data = c;
        ev.data.ptr = c;
        if (epoll_ctl(poller, EPOLL_CTL_ADD, fd, &ev) < 0) {
            fail("epoll");
        }
    }
}

static void step(void)
{
    uint64_t times;

    if (read(ticker, &times, sizeof(times)) < 0 && errno != EAGAIN) {
        fail("timer");
    }
    bt_list_for_each_safe (it, &streams) {
        struct conn *c = BT_LIST_ENTRY(it, struct conn, link);

        if (c->out.n > 0 ? !flush(c) : !put_token(c)) {
            drop(c);
        }
    }
}

static void watch(int fd, void *ptr)
{
    struct epoll_event ev = {.events = EPOLLIN, .data.ptr = ptr};

    if (epoll_ctl(poller, EPOLL_CTL_ADD, fd, &ev) < 0) {
        fail("epoll");
    }
}

static void open_all(void)
{
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    struct itimerspec every = {.it_interval.tv_sec = (time_t)(step_ns / BT_NS_PER_S),
                               .it_interval.tv_nsec = (long)(step_ns % BT_NS_PER_S)};
    socklen_t n = sizeof(a);

    every.it_value = every.it_interval;
    poller = epoll_create1(0);
    listener = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
    ticker = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK);
    if (poller < 0 || listener < 0 || ticker < 0 || bind(listener, (struct sockaddr *)&a, n) < 0 ||
        listen(listener, 4096) < 0 || getsockname(listener, (struct sockaddr *)&a, &n) < 0 ||
        timerfd_settime(ticker, 0, &every, NULL) < 0) {
        fail("start");
    }
    watch(listener, &listener);
    watch(ticker, &ticker);
    printf("ready 127.0.0.1:%d\n", ntohs(a.sin_port));
    fflush(stdout);
}

int main(int argc, char **argv)
{
    static const struct option options[] = {{"step-us", required_argument, NULL, 's'}, {0}};
    struct epoll_event ev[256];
    int opt;

    while ((opt = getopt_long(argc, argv, "", options, NULL)) != -1) {
        if (opt != 's' || (step_ns = strtoull(optarg, NULL, 10) * BT_NS_PER_US) == 0) {
            fprintf(stderr, "usage: see the head of front_worker.c\n");
            return 2;
        }
    }
    bt_list_init(&streams);
    open_all();
    for (;;) {
        int n = epoll_wait(poller, ev, BT_ARRAY_LEN(ev), -1);

        /* One event of a connection at most is in the list, so dropping one harms no other. */
        for (int i = 0; i < n; i++) {
            if (ev[i].data.ptr == &listener) {
                accept_all();
            } else if (ev[i].data.ptr != &ticker) {
                on_readable(ev[i].data.ptr);
            }
        }
        for (int i = 0; i < n; i++) {
            if (ev[i].data.ptr == &ticker) {
                step();
            }
        }
    }
}
