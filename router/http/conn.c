/* One connection: bytes in through http_parser, bytes out, limits and times. Requests of one
 * connection are served one after the other: while one is answered nothing is read, so that what a
 * client sends ahead waits in the kernel and in one read's worth of memory here. HTTP thread.
 *
 * A client that closes or half-closes while tokens are made for it is gone: its request is
 * cancelled. While a short answer is on its way it is taken as the end of its requests. */
#include "router/http/http_int.h"

#include "common/thr/time.h"

#include <errno.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#define READ_BYTES   65536
#define LINGER_BYTES (8u << 20)
#define LINGER_NS    (2 * BT_NS_PER_S)
#define KEEP_BYTES   16384 /* buffers that are larger are freed when they are empty */

static void set_phase(struct rt_http_conn *c, enum rt_http_phase phase, uint64_t time_ns)
{
    c->phase = phase;
    c->deadline_ns = time_ns ? c->h->now_ns + time_ns : BT_NEVER_NS;
    bt_list_remove(&c->idle);
    if (phase == RT_HTTP_IDLE || phase == RT_HTTP_HEADER) {
        bt_list_push_back(&c->h->idle, &c->idle);
    }
}

static void want(struct rt_http_conn *c)
{
    bool reads = c->phase != RT_HTTP_ANSWER && !c->eof && c->in.n == 0;
    bool writes = c->out_off < c->out.n || c->shake_writes;
    uint32_t events = (reads ? EPOLLIN : 0) | (c->eof ? 0 : EPOLLRDHUP) | (writes ? EPOLLOUT : 0);
    struct epoll_event ev = {.events = events, .data.ptr = c};

    if (!c->closed && events != c->events) {
        c->events = events;
        epoll_ctl(c->h->epoll_fd, EPOLL_CTL_MOD, c->fd, &ev);
    }
}

/* --- open and close -------------------------------------------------------------------------- */

/* Makes room: of those that are between requests or inside of a header, and so may belong to
 * anybody, the one that has been there for longest goes. */
static bool evict_idle(struct rt_http *h)
{
    struct bt_list *it = bt_list_pop_front(&h->idle);

    if (it) {
        rt_http_conn_close(BT_LIST_ENTRY(it, struct rt_http_conn, idle));
    }
    return it != NULL;
}

void rt_http_conn_open(struct rt_http *h, int fd)
{
    static const char full[] = "HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\n"
                               "Content-Length: 0\r\nConnection: close\r\n\r\n";
    struct rt_http_conn *c = NULL;
    struct epoll_event ev = {.events = EPOLLIN | EPOLLRDHUP};

    if (h->n_conns < (size_t)h->conf->max_connections || evict_idle(h)) {
        c = bt_calloc(1, sizeof(*c));
    }
    if (!c) {
        if (!bt_sec_has_tls(h->sec, BT_SEC_HTTP) &&
            send(fd, full, sizeof(full) - 1, MSG_NOSIGNAL) < 0) {
            /* it is told nothing then */
        }
        close(fd);
        return;
    }
    c->h = h;
    c->fd = fd;
    c->fresh = true;
    c->events = ev.events;
    c->in.max = READ_BYTES;
    http_parser_init(&c->parser, HTTP_REQUEST);
    c->parser.data = c;
    bt_list_init(&c->dirty);
    bt_list_init(&c->idle);
    bt_list_push_back(&h->conns, &c->link);
    h->n_conns++;
    set_phase(c, RT_HTTP_IDLE, h->conf->header_ns);
    ev.data.ptr = c;
    if (rt_http_tls_open(c) < 0 || epoll_ctl(h->epoll_fd, EPOLL_CTL_ADD, fd, &ev) != 0) {
        rt_http_conn_close(c);
    }
}

static void drop_body(struct rt_http_conn *c)
{
    c->h->body_bytes -= c->body.cap;
    bt_buf_fini(&c->body);
    c->body = (struct bt_buf){0};
}

void rt_http_conn_close(struct rt_http_conn *c)
{
    if (c->closed) {
        return;
    }
    c->closed = true;
    c->h->n_conns--;
    rt_http_tls_bye(c);
    rt_http_tls_close(c);
    close(c->fd); /* leaves epoll too */
    c->fd = -1;
    if (c->ex) {
        struct rt_http_ex *ex = c->ex;

        c->ex = NULL;
        rt_http_ex_abandon(ex);
    }
    bt_list_remove(&c->idle);
    bt_list_remove(&c->dirty);
    /* Events of this turn may still point here, and somebody may be walking the list. */
    bt_list_push_back(&c->h->dirty, &c->dirty);
}

void rt_http_conn_free(struct rt_http_conn *c)
{
    drop_body(c);
    bt_buf_fini(&c->in);
    bt_buf_fini(&c->out);
    free(c);
}

static void parse_rest(struct rt_http_conn *c);

/* --- out ------------------------------------------------------------------------------------- */

void rt_http_conn_dirty(struct rt_http_conn *c)
{
    if (bt_list_empty(&c->dirty)) {
        bt_list_push_back(&c->h->dirty, &c->dirty);
    }
}

static void linger(struct rt_http_conn *c)
{
    /* Closing now would reset the connection when the client still sends, and our last words with
     * it. What it has sent ahead is not answered: it must not keep us from reading the rest. */
    c->in.n = 0;
    rt_http_tls_bye(c);
    shutdown(c->fd, SHUT_WR);
    set_phase(c, RT_HTTP_LINGER, LINGER_NS);
    want(c);
}

static void sent_all(struct rt_http_conn *c)
{
    c->out.n = c->out_off = 0;
    c->stall_ns = 0;
    if (c->out.cap > KEEP_BYTES) {
        bt_buf_fini(&c->out);
        c->out = (struct bt_buf){0};
    }
    parse_rest(c);
    if (c->phase == RT_HTTP_IDLE && c->close_after && !c->closed && c->out.n == 0) {
        if (c->eof || c->h->quit) {
            rt_http_conn_close(c);
        } else {
            linger(c);
        }
    }
}

void rt_http_conn_flush(struct rt_http_conn *c)
{
    if (c->closed) {
        bt_list_remove(&c->link);
        bt_list_push_back(&c->h->dead, &c->link);
        return;
    }
    while (c->out_off < c->out.n) {
        ssize_t n = rt_http_send(c, c->out.p + c->out_off, c->out.n - c->out_off);

        if (n < 0) {
            if (errno == EINTR) {
                continue;
            }
            if (errno != EAGAIN) {
                rt_http_conn_close(c);
                return;
            }
            c->stall_ns = c->stall_ns ? c->stall_ns : c->h->now_ns;
            break;
        }
        c->out_off += (size_t)n;
        c->stall_ns = 0;
        c->last_out_ns = c->h->now_ns;
    }
    if (c->out_off == c->out.n) {
        sent_all(c);
    } else if (c->out.n - c->out_off > c->h->conf->max_queued_bytes && c->ex &&
               c->ex->n_choices > 0) {
        rt_http_conn_close(c); /* it does not read its answer */
        return;
    } else if (c->out_off > c->out.n / 2) { /* so that the buffer does not grow for ever */
        memmove(c->out.p, c->out.p + c->out_off, c->out.n - c->out_off);
        c->out.n -= c->out_off;
        c->out_off = 0;
    }
    want(c);
}

/* --- in: the parser's callbacks -------------------------------------------------------------- */

static int refuse(struct rt_http_conn *c, int status, const char *why)
{
    c->refuse = status;
    c->refuse_why = why;
    return -1;
}

static int on_begin(http_parser *p)
{
    struct rt_http_conn *c = p->data;

    c->n_url = c->n_header_bytes = c->n_headers = c->n_field = c->n_auth = 0;
    c->n_request_id = c->n_expect = c->n_coding = 0;
    c->in_value = c->expect = c->has_host = false;
    c->fresh = false;
    set_phase(c, RT_HTTP_HEADER, c->h->conf->header_ns);
    return 0;
}

static int count(struct rt_http_conn *c, size_t n)
{
    c->n_header_bytes += n;
    return c->n_header_bytes > RT_HTTP_HEADER_BYTES ? refuse(c, 431, "the header is too large") : 0;
}

static int on_url(http_parser *p, const char *at, size_t n)
{
    struct rt_http_conn *c = p->data;

    if (n >= sizeof(c->url) - c->n_url) {
        return refuse(c, 414, "the path is too long");
    }
    memcpy(c->url + c->n_url, at, n);
    c->n_url += n;
    c->url[c->n_url] = '\0';
    return 0;
}

static bool field_is(const struct rt_http_conn *c, const char *name)
{
    return c->n_field == strlen(name) && strncasecmp(c->field, name, c->n_field) == 0;
}

static int on_field(http_parser *p, const char *at, size_t n)
{
    struct rt_http_conn *c = p->data;

    if (c->in_value || c->n_field == 0) {
        c->in_value = false;
        c->n_field = 0;
        if (++c->n_headers > RT_HTTP_MAX_HEADERS) {
            return refuse(c, 431, "too many headers");
        }
    }
    if (memchr(at, ' ', n)) { /* which the parser lets pass unless it was built to be strict */
        return refuse(c, 400, "a blank in a header's name");
    }
    for (size_t i = 0; i < n; i++) { /* longer names are none that we look for */
        if (c->n_field < sizeof(c->field)) {
            c->field[c->n_field++] = at[i];
        }
    }
    return count(c, n);
}

/* Appends to a buffer of `cap` bytes; what does not fit makes the value useless, not shorter. */
static void keep(char *to, size_t *n_to, size_t cap, const char *at, size_t n)
{
    if (*n_to + n > cap) {
        *n_to = cap + 1;
    } else {
        memcpy(to + *n_to, at, n);
        *n_to += n;
    }
}

static int on_value(http_parser *p, const char *at, size_t n)
{
    struct rt_http_conn *c = p->data;
    bool again = !c->in_value;

    c->in_value = true;
    if (memchr(at, '\0', n)) {
        return refuse(c, 400, "a zero byte in a header");
    }
    if (field_is(c, "authorization")) {
        if (again && c->n_auth > 0) {
            return refuse(c, 400, "two Authorization headers");
        }
        keep(c->auth, &c->n_auth, sizeof(c->auth), at, n);
    } else if (field_is(c, "x-request-id")) {
        keep(c->request_id, &c->n_request_id, RT_HTTP_ID_BYTES, at, n);
    } else if (field_is(c, "expect")) {
        keep(c->expect_value, &c->n_expect, sizeof(c->expect_value), at, n);
    } else if (field_is(c, "transfer-encoding")) {
        if (again && c->n_coding > 0) {
            return refuse(c, 400, "two Transfer-Encoding headers");
        }
        keep(c->coding, &c->n_coding, sizeof(c->coding), at, n);
    } else if (field_is(c, "host")) {
        if (again && c->has_host) {
            return refuse(c, 400, "two Host headers");
        }
        c->has_host = true;
    }
    return count(c, n);
}

static bool has_body(const http_parser *p)
{
    return (p->flags & F_CHUNKED) || ((p->flags & F_CONTENTLENGTH) && p->content_length > 0);
}

/* The parser looks for a last word "chunked" and would pass over what else was done to the body. */
static bool is_just_chunked(const struct rt_http_conn *c)
{
    size_t n = BT_MIN(c->n_coding, sizeof(c->coding));

    while (n > 0 && (c->coding[n - 1] == ' ' || c->coding[n - 1] == '\t')) {
        n--;
    }
    return n == 7 && strncasecmp(c->coding, "chunked", 7) == 0;
}

static int on_headers(http_parser *p)
{
    struct rt_http_conn *c = p->data;
    const uint64_t max = c->h->conf->max_body_bytes;
    bool has_length = (p->flags & F_CONTENTLENGTH) != 0;

    p->upgrade = 0; /* offers of other protocols are not taken */
    if (p->http_major != 1) {
        return refuse(c, 505, "HTTP/1.0 and 1.1 are spoken here");
    }
    if (p->http_minor >= 1 && !c->has_host) {
        return refuse(c, 400, "no Host header");
    }
    if (c->n_coding > 0 && !is_just_chunked(c)) {
        return refuse(c, 400, "no transfer coding but chunked is known here");
    }
    if (c->n_request_id > RT_HTTP_ID_BYTES) {
        c->n_request_id = 0;
    }
    if (has_length && p->content_length != UINT64_MAX && p->content_length > max) {
        return refuse(c, 413, "the body is larger than http.max_body_bytes allows");
    }
    if (has_body(p) && !rt_http_takes_body(c)) { /* answered at once, and closed: see http_int.h */
        c->close_after = true;
        return 1;
    }
    set_phase(c, RT_HTTP_BODY, c->h->conf->body_ns);
    if (c->n_expect == 12 && strncasecmp(c->expect_value, "100-continue", 12) == 0) {
        static const char go_on[] = "HTTP/1.1 100 Continue\r\n\r\n";

        if (bt_buf_add(&c->out, go_on, sizeof(go_on) - 1) < 0) {
            return refuse(c, 503, "out of memory");
        }
        rt_http_conn_dirty(c);
    }
    return p->method == HTTP_CONNECT ? refuse(c, 405, "CONNECT is not allowed") : 0;
}

static int on_body(http_parser *p, const char *at, size_t n)
{
    struct rt_http_conn *c = p->data;
    struct rt_http *h = c->h;
    size_t was = c->body.cap;
    int rc;

    if (c->body.n + n > h->conf->max_body_bytes) {
        return refuse(c, 413, "the body is larger than http.max_body_bytes allows");
    }
    if (h->body_bytes + n > BT_MAX(4 * h->conf->max_body_bytes, (uint64_t)64 << 20)) {
        return refuse(c, 503, "too many large requests at one time");
    }
    rc = bt_buf_add(&c->body, at, n);
    h->body_bytes += c->body.cap - was;
    return rc < 0 ? refuse(c, 503, "out of memory") : 0;
}

static int on_message(http_parser *p)
{
    http_parser_pause(p, 1);
    return 0;
}

static const http_parser_settings settings = {
    .on_message_begin = on_begin,
    .on_url = on_url,
    .on_header_field = on_field,
    .on_header_value = on_value,
    .on_headers_complete = on_headers,
    .on_body = on_body,
    .on_message_complete = on_message,
};

/* --- in -------------------------------------------------------------------------------------- */

/* Answers what is no request and closes. */
static void bad_request(struct rt_http_conn *c)
{
    int status = c->refuse;
    const char *why = c->refuse_why;

    if (status == 0) {
        enum http_errno e = HTTP_PARSER_ERRNO(&c->parser);

        status = e == HPE_HEADER_OVERFLOW ? 431 : e == HPE_INVALID_VERSION ? 505 : 400;
        why = http_errno_description(e);
    }
    c->close_after = true;
    c->in.n = 0;
    set_phase(c, RT_HTTP_ANSWER, 0);
    rt_http_respond_error(c, status, NULL, NULL, why);
}

static const char *end_in_line(const char *p, size_t n)
{
    const char *nl = memchr(p, '\n', n), *cr = memchr(p, '\r', nl ? (size_t)(nl - p) : n);

    return cr ? cr : nl;
}

/* Looks for what readers understand differently and the parser lets pass: a line that begins with a
 * blank (RFC 9112 5.2), which goes on with the header before it, and a carriage return without a
 * newline (2.2), which ends a line or does not. The bytes come in any pieces, up to the end of the
 * header. NULL, or what is wrong. */
static const char *odd_line(struct rt_http_conn *c, const char *p, size_t n)
{
    for (size_t i = 0; i < n && c->line != RT_HTTP_LINE_OVER; i++) {
        const char *end;

        switch (c->line) {
        case RT_HTTP_LINE_FIRST: /* empty lines before a request are passed over */
            c->line = p[i] == '\r' || p[i] == '\n' ? RT_HTTP_LINE_FIRST : RT_HTTP_LINE_INSIDE;
            break;
        case RT_HTTP_LINE_BEGIN:
            if (p[i] == ' ' || p[i] == '\t') {
                return "a header over several lines";
            }
            c->line = p[i] == '\n'   ? RT_HTTP_LINE_OVER
                      : p[i] == '\r' ? RT_HTTP_LINE_LAST_CR
                                     : RT_HTTP_LINE_INSIDE;
            break;
        case RT_HTTP_LINE_CR:
        case RT_HTTP_LINE_LAST_CR:
            if (p[i] != '\n') {
                return "a carriage return inside of a line";
            }
            c->line = c->line == RT_HTTP_LINE_CR ? RT_HTTP_LINE_BEGIN : RT_HTTP_LINE_OVER;
            break;
        case RT_HTTP_LINE_INSIDE:
        case RT_HTTP_LINE_OVER:
            end = end_in_line(p + i, n - i);
            i = end ? (size_t)(end - p) : n;
            c->line = !end           ? RT_HTTP_LINE_INSIDE
                      : *end == '\r' ? RT_HTTP_LINE_CR
                                     : RT_HTTP_LINE_BEGIN;
            break;
        }
    }
    return NULL;
}

/* Feeds the parser; what is behind the end of a request stays in `in`. */
static void parse(struct rt_http_conn *c, const char *p, size_t n)
{
    const char *odd = NULL;
    size_t used;
    enum http_errno e;

    if (c->phase == RT_HTTP_IDLE || c->phase == RT_HTTP_HEADER) {
        odd = odd_line(c, p, n);
    }
    if (odd) {
        c->in.n = 0;
        refuse(c, 400, odd);
        bad_request(c);
        return;
    }
    used = http_parser_execute(&c->parser, &settings, p, n);
    e = HTTP_PARSER_ERRNO(&c->parser);
    if (e == HPE_PAUSED) {
        http_parser_pause(&c->parser, 0);
        if (p == c->in.p) {
            memmove(c->in.p, p + used, n - used);
            c->in.n = n - used;
        } else if (bt_buf_add(&c->in, p + used, n - used) < 0) {
            rt_http_conn_close(c);
            return;
        }
        if (!http_should_keep_alive(&c->parser) || c->h->draining) {
            c->close_after = true;
        }
        set_phase(c, RT_HTTP_ANSWER, 0);
        c->last_out_ns = c->h->now_ns;
        rt_http_route(c);
        drop_body(c);
    } else {
        c->in.n = 0;
        if (e != HPE_OK) {
            bad_request(c);
            drop_body(c);
        }
    }
}

/* Requests that are in memory already, as long as each is answered at once. */
static void parse_rest(struct rt_http_conn *c)
{
    if (c->in_parse) {
        return; /* the loop below goes on */
    }
    c->in_parse = true;
    while (!c->closed && c->phase != RT_HTTP_ANSWER && c->phase != RT_HTTP_LINGER && c->in.n > 0 &&
           !c->close_after && c->out.n - c->out_off <= c->h->conf->max_queued_bytes / 2) {
        parse(c, c->in.p, c->in.n);
    }
    c->in_parse = false;
    if (c->in.n == 0 && c->in.cap > 0) {
        bt_buf_fini(&c->in);
        c->in = (struct bt_buf){.max = READ_BYTES};
    }
}

static void gone(struct rt_http_conn *c)
{
    c->eof = true;
    if (c->phase != RT_HTTP_ANSWER || (c->ex && c->ex->n_choices > 0)) {
        if (c->phase == RT_HTTP_IDLE && c->out_off < c->out.n) {
            c->close_after = true; /* our last words first */
            return;
        }
        rt_http_conn_close(c);
    } else {
        c->close_after = true;
    }
}

static void readable(struct rt_http_conn *c)
{
    static char scratch[READ_BYTES]; /* the thread's */
    ssize_t n = c->phase == RT_HTTP_LINGER ? recv(c->fd, scratch, sizeof(scratch), 0)
                                           : rt_http_recv(c, scratch, sizeof(scratch));

    if (n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR)) {
        gone(c);
    } else if (n > 0 && (c->phase == RT_HTTP_LINGER || c->close_after)) {
        c->n_linger += (size_t)n;
        if (c->n_linger > LINGER_BYTES) {
            rt_http_conn_close(c);
        }
    } else if (n > 0) {
        c->in_parse = true;
        parse(c, scratch, (size_t)n);
        c->in_parse = false;
        parse_rest(c);
    }
}

static void shake(struct rt_http_conn *c)
{
    int rc = rt_http_tls_shake(c);

    if (rc == BT_E_INVALID) {
        rt_http_tls_close(c); /* the one answer that it can read */
        c->shaking = false;
        refuse(c, 400, "this port speaks TLS: use https");
        bad_request(c);
    } else if (rc < 0) {
        rt_http_conn_close(c);
    } else {
        want(c);
    }
}

void rt_http_conn_event(struct rt_http_conn *c, uint32_t events)
{
    if (c->closed) {
        return;
    }
    if (events & (EPOLLERR | EPOLLHUP)) {
        rt_http_conn_close(c);
        return;
    }
    if (c->shaking) {
        shake(c);
        return;
    }
    if (events & EPOLLOUT) {
        rt_http_conn_dirty(c);
    }
    if ((events & EPOLLIN) && c->phase != RT_HTTP_ANSWER) {
        readable(c); /* an end of input shows after what came before it */
    } else if ((events & EPOLLRDHUP) && !c->eof) {
        gone(c);
    }
    if (!c->closed) {
        rt_http_conn_dirty(c);
    }
}

void rt_http_conn_done(struct rt_http_conn *c)
{
    c->ex = NULL;
    c->line = RT_HTTP_LINE_FIRST;
    set_phase(c, RT_HTTP_IDLE, c->h->conf->idle_ns);
    rt_http_conn_dirty(c);
    parse_rest(c);
}

void rt_http_conn_tick(struct rt_http_conn *c)
{
    uint64_t now = c->h->now_ns;

    if (c->closed) {
        return;
    }
    if (c->stall_ns && now - c->stall_ns > c->h->conf->stall_ns) {
        rt_http_conn_close(c);
    } else if (now >= c->deadline_ns) {
        if (c->phase == RT_HTTP_HEADER || c->phase == RT_HTTP_BODY) {
            c->refuse = 408;
            c->refuse_why = "the request did not come in time";
            bad_request(c);
            drop_body(c);
        } else {
            rt_http_conn_close(c);
        }
    } else if (c->ex && c->out_off == c->out.n &&
               now - c->last_out_ns >= c->h->conf->heartbeat_ns) {
        c->last_out_ns = now;
        rt_http_ex_heartbeat(c->ex);
    }
}
