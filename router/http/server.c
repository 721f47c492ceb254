/* The thread "http": epoll over the listener, the connections and the mailbox. Nothing here blocks
 * but epoll_wait. */
#include "router/http/http_int.h"

#include "common/conf/value.h"
#include "common/obs/log.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <unistd.h>

#define BACKLOG      4096
#define TICK_NS      (100 * BT_NS_PER_MS)
#define LAST_WORDS_S 2

void rt_http_to_loop(struct rt_http *h, struct bt_msg *msg)
{
    __atomic_fetch_add(&h->n_to_loop, 1, __ATOMIC_RELAXED);
    bt_loop_post(h->router->loop, msg); /* the loop outlives this thread */
}

static int watch(struct rt_http *h, int fd, void *ptr, struct bt_err *err)
{
    struct epoll_event ev = {.events = EPOLLIN, .data.ptr = ptr};

    return epoll_ctl(h->epoll_fd, EPOLL_CTL_ADD, fd, &ev) == 0
               ? BT_OK
               : BT_FAIL_SYS(err, BT_E_SYS, "epoll");
}

/* --- the thread ------------------------------------------------------------------------------ */

static void accept_all(struct rt_http *h)
{
    int one = 1, fd;

    for (;;) {
        fd = accept4(h->listen_fd, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
        if (fd < 0) {
            if (errno == ECONNABORTED || errno == EINTR) {
                continue;
            }
            if (errno != EAGAIN) { /* no descriptors, say: the next tick tries again */
                BT_WARN("http_accept", "errno=%d", errno);
                epoll_ctl(h->epoll_fd, EPOLL_CTL_DEL, h->listen_fd, NULL);
                h->accept_paused = true;
            }
            return;
        }
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
        rt_http_conn_open(h, fd);
    }
}

static void close_listener(struct rt_http *h)
{
    if (h->listen_fd >= 0) {
        bt_close_fd(&h->listen_fd);
        h->listen_fd = -1;
    }
}

/* [http] */
static void on_drain(struct bt_msg *msg, void *http)
{
    struct rt_http *h = http;

    h->draining = true;
    close_listener(h);
    bt_list_for_each (it, &h->conns) {
        struct rt_http_conn *c = BT_LIST_ENTRY(it, struct rt_http_conn, link);

        if (c->phase == RT_HTTP_IDLE && !c->fresh && c->out_off == c->out.n) {
            rt_http_conn_close(c);
        }
    }
}

/* [http] */
static void on_quit(struct bt_msg *msg, void *http)
{
    struct rt_http *h = http;

    on_drain(msg, http);
    h->quit = true;
    h->quit_ns = bt_deadline_ns(LAST_WORDS_S * BT_NS_PER_S);
    bt_list_for_each (it, &h->conns) {
        struct rt_http_conn *c = BT_LIST_ENTRY(it, struct rt_http_conn, link);

        if (c->phase != RT_HTTP_ANSWER && c->out_off == c->out.n) {
            rt_http_conn_close(c);
        }
    }
}

/* Generations whose token has been taken away end; what is answered at once is not worth a look. */
static void look_for_revoked(struct rt_http *h)
{
    uint64_t version = bt_sec_tokens_version(h->sec);

    h->next_look_ns = h->now_ns + BT_SEC_LOOK_NS;
    if (version == h->tokens_version) {
        return;
    }
    h->tokens_version = version;
    bt_list_for_each (it, &h->conns) {
        struct rt_http_conn *c = BT_LIST_ENTRY(it, struct rt_http_conn, link);
        int rc = !c->closed && c->ex && c->ex->n_choices > 0 ? rt_http_still_may(c) : BT_OK;

        if (rc < 0) {
            BT_INFO("revoked",
                    "port=http fd=%d rc=%s msg=\"the token of a running request is gone\"", c->fd,
                    bt_rc_name(rc));
            c->ex->refused_rc = rc;
            rt_http_ex_fail(c->ex, rc, "the token that this request began with is gone");
        }
    }
}

static void tick(struct rt_http *h)
{
    h->next_tick_ns = h->now_ns + TICK_NS;
    if (h->accept_paused && h->listen_fd >= 0) {
        h->accept_paused = watch(h, h->listen_fd, &h->listen_fd, NULL) < 0;
    }
    bt_list_for_each (it, &h->conns) {
        rt_http_conn_tick(BT_LIST_ENTRY(it, struct rt_http_conn, link));
    }
    if (h->now_ns >= h->next_look_ns && bt_sec_ends_revoked(h->sec)) {
        look_for_revoked(h);
    }
}

/* The end of a turn: output goes out, connections that were closed are freed. */
static void settle(struct rt_http *h)
{
    struct bt_list *it;

    while ((it = bt_list_pop_front(&h->dirty)) != NULL) {
        rt_http_conn_flush(BT_LIST_ENTRY(it, struct rt_http_conn, dirty));
    }
    while ((it = bt_list_pop_front(&h->dead)) != NULL) {
        rt_http_conn_free(BT_LIST_ENTRY(it, struct rt_http_conn, link));
    }
}

static int wait_ms(const struct rt_http *h)
{
    if (bt_list_empty(&h->conns) && !h->accept_paused) {
        return -1;
    }
    return h->next_tick_ns > h->now_ns ? (int)((h->next_tick_ns - h->now_ns) / BT_NS_PER_MS) + 1
                                       : 0;
}

static void turn(struct rt_http *h)
{
    struct epoll_event evs[128];
    int n = epoll_wait(h->epoll_fd, evs, BT_ARRAY_LEN(evs), wait_ms(h));

    h->now_ns = bt_now_ns();
    for (int i = 0; i < n; i++) {
        void *p = evs[i].data.ptr;

        if (p == &h->wake_fd) {
            bt_eventfd_clear(h->wake_fd);
            bt_mailbox_drain(&h->mailbox, h);
        } else if (p == &h->listen_fd) {
            if (h->listen_fd >= 0) {
                accept_all(h);
            }
        } else {
            rt_http_conn_event(p, evs[i].events);
        }
    }
    if (h->now_ns >= h->next_tick_ns) {
        tick(h);
    }
    settle(h);
}

static void *http_main(void *p)
{
    struct rt_http *h = p;

    while (!h->quit || (!bt_list_empty(&h->conns) && h->now_ns < h->quit_ns)) {
        turn(h);
    }
    bt_list_for_each_safe (it, &h->conns) {
        rt_http_conn_close(BT_LIST_ENTRY(it, struct rt_http_conn, link));
    }
    settle(h);
    return NULL;
}

/* --- start and stop; loop thread ------------------------------------------------------------- */

static int bind_to(struct rt_http *h, const struct bt_addr *a, struct bt_err *err)
{
    struct addrinfo hints = {.ai_family = AF_UNSPEC,
                             .ai_socktype = SOCK_STREAM,
                             .ai_flags = AI_PASSIVE | AI_NUMERICSERV};
    struct addrinfo *list;
    char host[256], port[8];
    int one = 1, rc;

    snprintf(host, sizeof(host), "%.*s", (int)a->host.n, a->host.p);
    snprintf(port, sizeof(port), "%u", a->port);
    rc = getaddrinfo(host, port, &hints, &list);
    if (rc != 0) {
        return BT_FAIL(err, BT_E_IO, "http.listen = %s: %s", h->conf->listen, gai_strerror(rc));
    }
    h->listen_fd = socket(list->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (h->listen_fd >= 0) {
        setsockopt(h->listen_fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one));
    }
    if (h->listen_fd < 0 || bind(h->listen_fd, list->ai_addr, list->ai_addrlen) != 0 ||
        listen(h->listen_fd, BACKLOG) != 0) {
        rc = BT_FAIL_SYS(err, BT_E_IO, "http.listen = %s", h->conf->listen);
    }
    freeaddrinfo(list);
    return rc;
}

static void name_address(struct rt_http *h, const struct bt_addr *a)
{
    struct sockaddr_storage ss = {0};
    socklen_t n = sizeof(ss);
    unsigned port = a->port;

    if (getsockname(h->listen_fd, (struct sockaddr *)&ss, &n) == 0) {
        port = ntohs(ss.ss_family == AF_INET6 ? ((struct sockaddr_in6 *)&ss)->sin6_port
                                              : ((struct sockaddr_in *)&ss)->sin_port);
    }
    snprintf(h->address, sizeof(h->address),
             memchr(a->host.p, ':', a->host.n) ? "[%.*s]:%u" : "%.*s:%u", (int)a->host.n, a->host.p,
             port);
}

static int check(const struct rt_http_conf *conf, struct bt_addr *a, struct bt_err *err)
{
    return bt_addr_read(bt_str_of(conf->listen), a) == BT_OK && !a->is_unix
               ? BT_OK
               : BT_FAIL(err, BT_E_CONFIG, "http.listen = %s: must be host:port", conf->listen);
}

static int open_all(struct rt_http *h, struct bt_err *err)
{
    struct bt_addr a;
    int rc;

    if ((rc = check(h->conf, &a, err)) < 0 || (rc = bind_to(h, &a, err)) < 0 ||
        (rc = bt_eventfd_create(&h->wake_fd, err)) < 0) {
        return rc;
    }
    name_address(h, &a);
    h->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    if (h->epoll_fd < 0 || getrandom(&h->id_seed, sizeof(h->id_seed), 0) < 0) {
        return BT_FAIL_SYS(err, BT_E_SYS, "http");
    }
    bt_mailbox_init(&h->mailbox, bt_eventfd_wake, &h->wake_fd);
    if ((rc = bt_worker_start("reader", h, &h->reader, err)) < 0 ||
        (rc = watch(h, h->wake_fd, &h->wake_fd, err)) < 0 ||
        (rc = watch(h, h->listen_fd, &h->listen_fd, err)) < 0 ||
        (rc = bt_thread_start(&h->thread, "http", http_main, h, err)) < 0) {
        bt_worker_stop(h->reader);
        bt_mailbox_fini(&h->mailbox);
    }
    return rc;
}

static void free_all(struct rt_http *h)
{
    close_listener(h);
    bt_close_fd(&h->wake_fd);
    bt_close_fd(&h->epoll_fd);
    free(h);
}

static void on_drain_deadline(struct bt_loop *loop, struct bt_timer *t)
{
    rt_http_bridge_cancel_all(BT_CONTAINER_OF(t, struct rt_http, drain_timer),
                              "this router is stopping");
}

int rt_http_start(struct rt_router *r,
                  const struct rt_http_conf *conf,
                  struct rt_http **ret_http,
                  struct bt_err *err)
{
    struct rt_http *h = bt_calloc(1, sizeof(*h));
    int rc;

    if (!h) {
        return BT_FAIL(err, BT_E_NOMEM, "no memory for the HTTP port");
    }
    *h = (struct rt_http){.router = r,
                          .conf = conf,
                          .sec = bt_node_sec(r->node),
                          .epoll_fd = -1,
                          .wake_fd = -1,
                          .listen_fd = -1,
                          .quit_msg.handle = on_quit,
                          .drain_msg.handle = on_drain,
                          .drain_timer.fn = on_drain_deadline,
                          .now_ns = bt_now_ns()};
    bt_list_init(&h->conns);
    bt_list_init(&h->dirty);
    bt_list_init(&h->idle);
    bt_list_init(&h->dead);
    rt_http_bridge_init(h);
    http_parser_set_max_header_size(RT_HTTP_HEADER_BYTES);
    rc = open_all(h, err);
    if (rc < 0) {
        free_all(h);
        return rc;
    }
    *ret_http = h;
    return BT_OK;
}

const char *rt_http_address(const struct rt_http *h)
{
    return h->address;
}

void rt_http_drain(struct rt_http *h, uint64_t deadline_ns, void (*done)(void *arg), void *arg)
{
    h->loop_draining = true;
    h->drained = done;
    h->drained_arg = arg;
    bt_mailbox_push(&h->mailbox, &h->drain_msg);
    bt_timer_start(h->router->loop, &h->drain_timer, deadline_ns);
    bt_timer_start(h->router->loop, &h->flush, bt_loop_now(h->router->loop));
}

void rt_http_stop(struct rt_http *h)
{
    struct bt_loop *loop;

    if (!h) {
        return;
    }
    loop = h->router->loop;
    h->loop_draining = true;
    h->drained = NULL;
    rt_http_bridge_cancel_all(h, "this router is stopping");
    while (h->flush.armed) {
        bt_loop_poll(loop, bt_now_ns());
    }
    bt_mailbox_push(&h->mailbox, &h->quit_msg);
    pthread_join(h->thread, NULL);
    bt_worker_stop(h->reader); /* what it has read last is in the mailbox */
    /* The thread's state is ours now. What it has posted is answered, and the answers are taken in
     * its place: they free the exchanges that nobody waits for any more. */
    for (;;) {
        bool busy = __atomic_load_n(&h->n_to_loop, __ATOMIC_ACQUIRE) > 0 || /* pairs with handled */
                    h->n_asks > 0;

        if (busy || h->flush.armed) {
            bt_loop_poll(loop, bt_deadline_ns(BT_NS_PER_MS));
        }
        if (bt_mailbox_drain(&h->mailbox, h) == 0 && !busy && !h->flush.armed) {
            break;
        }
    }
    settle(h);
    bt_timer_stop(loop, &h->drain_timer);
    bt_mailbox_fini(&h->mailbox);
    free_all(h);
}
