/* Bytes of an HTTP connection: requests come out whole and within their limits, or are refused; and
 * whether the bytes come at once or in pieces, the same requests come out. First byte: how the
 * input is cut. */
#include "router/http/conn.c"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

static void must(bool ok)
{
    if (!ok) {
        abort();
    }
}

/* --- what stands behind a connection, reduced to a record of what it was told -------------------
 */

struct record {
    uint64_t sum; /* over all requests */
    size_t n_requests, n_refused;
};
static struct record *record;

static void add(const char *p, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        record->sum = (record->sum ^ (uint8_t)p[i]) * 0x100000001b3ull;
    }
}

void rt_http_route(struct rt_http_conn *c)
{
    static const char ok[] = "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n";

    must(c->n_url < sizeof(c->url) && c->url[c->n_url] == '\0');
    must(c->parser.http_major == 1 && (c->has_host || c->parser.http_minor == 0));
    must(c->n_auth <= sizeof(c->auth) + 1 && c->n_request_id <= RT_HTTP_ID_BYTES);
    must(c->body.n <= c->h->conf->max_body_bytes);
    record->n_requests++;
    add(c->url, c->n_url);
    add(c->body.p, c->body.n);
    add(c->auth, BT_MIN(c->n_auth, sizeof(c->auth)));
    add((const char *)&c->n_request_id, sizeof(c->n_request_id));
    must(bt_buf_add(&c->out, ok, sizeof(ok) - 1) == BT_OK);
    rt_http_conn_done(c);
}

void rt_http_respond_error(
    struct rt_http_conn *c, int status, const char *param, const char *code, const char *msg)
{
    must(status >= 400 && status < 600 && msg);
    record->n_refused++;
    rt_http_conn_done(c);
}

bool rt_http_takes_body(struct rt_http_conn *c)
{
    return c->url[1] != 'n'; /* some paths have none */
}

void rt_http_ex_abandon(struct rt_http_ex *ex)
{
    abort(); /* nobody makes one */
}

void rt_http_ex_heartbeat(struct rt_http_ex *ex)
{
    abort();
}

int rt_http_tls_open(struct rt_http_conn *c)
{
    return BT_OK;
}

int rt_http_tls_shake(struct rt_http_conn *c)
{
    return BT_OK;
}

void rt_http_tls_bye(struct rt_http_conn *c)
{
}

void rt_http_tls_close(struct rt_http_conn *c)
{
}

bool bt_sec_has_tls(const struct bt_sec *sec, enum bt_sec_port port)
{
    return false;
}

ssize_t rt_http_recv(struct rt_http_conn *c, void *to, size_t n)
{
    return recv(c->fd, to, n, MSG_DONTWAIT);
}

ssize_t rt_http_send(struct rt_http_conn *c, const void *from, size_t n)
{
    return (ssize_t)n; /* the answers are ours */
}

/* --- one connection ----------------------------------------------------------------------------
 */

static void turn(struct rt_http *h)
{
    struct bt_list *it;

    while ((it = bt_list_pop_front(&h->dirty)) != NULL) {
        rt_http_conn_flush(BT_LIST_ENTRY(it, struct rt_http_conn, dirty));
    }
}

/* All bytes in pieces of `piece`; what came of it. */
static struct record serve(const struct rt_http_conf *conf, struct bt_str in, size_t piece)
{
    struct rt_http h = {.conf = conf, .now_ns = 1};
    struct record r = {.sum = 0xcbf29ce484222325ull};
    struct rt_http_conn *c;
    int ends[2];

    record = &r;
    bt_list_init(&h.conns);
    bt_list_init(&h.dirty);
    bt_list_init(&h.idle);
    bt_list_init(&h.dead);
    h.epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    must(h.epoll_fd >= 0 &&
         socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends) == 0);
    rt_http_conn_open(&h, ends[0]);
    must(!bt_list_empty(&h.conns));
    c = BT_LIST_ENTRY(h.conns.next, struct rt_http_conn, link);
    for (size_t at = 0; at < in.n && !c->closed; at += piece) {
        size_t n = BT_MIN(piece, in.n - at);

        must(send(ends[1], in.p + at, n, MSG_NOSIGNAL) == (ssize_t)n);
        rt_http_conn_event(c, EPOLLIN);
        turn(&h);
        must(h.body_bytes == c->body.cap && c->n_header_bytes <= 2 * RT_HTTP_HEADER_BYTES);
    }
    rt_http_conn_close(c);
    turn(&h);
    must(h.n_conns == 0 && !bt_list_empty(&h.dead));
    rt_http_conn_free(c);
    must(h.body_bytes == 0);
    close(ends[1]);
    close(h.epoll_fd);
    return r;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    const struct rt_http_conf conf = {.max_body_bytes = 2000,
                                      .max_queued_bytes = 100000,
                                      .max_connections = 2,
                                      .idle_ns = 1,
                                      .header_ns = 1,
                                      .body_ns = 1};
    struct record whole, cut;

    if (n < 2 || n > 20000) {
        return 0;
    }
    whole = serve(&conf, (struct bt_str){(const char *)data + 1, n - 1}, n);
    cut = serve(&conf, (struct bt_str){(const char *)data + 1, n - 1}, 1 + data[0] % 64);
    must(whole.n_requests == cut.n_requests && whole.sum == cut.sum);
    return 0;
}
