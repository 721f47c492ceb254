/* Inside of the HTTP port.
 *
 * Two threads: "http" owns connections and exchanges, the loop owns the requests behind them. A
 * choice is one request; its struct is used by both, each field by the thread named beside it.
 *
 * Life of a choice: http posts `submit`; the loop answers with events, the last of which is END.
 * When http loses interest it posts `cancel` once, and the loop answers with GONE, the very last
 * event. So http frees a choice after END, or after GONE if it has cancelled. */
#ifndef RT_HTTP_INT_H
#define RT_HTTP_INT_H

#include "common/base/buf.h"
#include "common/thr/thread.h"
#include "common/thr/worker.h"
#include "router/http/body.h"
#include "router/http/http.h"
#include "router/router_int.h"

#include <http_parser.h>

#define RT_HTTP_MAX_HEADERS  100
#define RT_HTTP_HEADER_BYTES 32768
#define RT_HTTP_MAX_ANSWER   (64u << 20) /* of an answer that is not streamed */
#define RT_HTTP_ID_BYTES     128         /* of a client's request id */

/* --- from the loop to http --- */

enum rt_http_event_kind {
    RT_HTTP_DELTA, /* of a choice */
    RT_HTTP_END,   /* of a choice: rc and message, or BT_OK */
    RT_HTTP_GONE,  /* of a choice: the answer to cancel */
    RT_HTTP_REPLY, /* of a question */
};

struct rt_http_lp {
    float logprob;
    int32_t id;
    int n_top;
    struct rt_top top[20];
};

struct rt_http_event {
    struct bt_list link;
    enum rt_http_event_kind kind;
    void *target; /* struct rt_http_choice or rt_http_ask */
    int rc;
    uint32_t n_tokens, finish, n_prompt, n_completion, n_cached;
    size_t size; /* of this event, as counted in in_flight */
    size_t n_text;
    struct rt_http_lp *lp; /* n_tokens, or NULL */
    char *text;
};

/* --- one request --- */

struct rt_http_ex;

struct rt_http_choice {
    /* loop */
    struct rt_client client;
    struct bt_list live; /* in rt_http.live, or closing once it has ended */
    struct rt_http_event end, gone;
    struct bt_err err;
    /* both */
    struct bt_msg submit, cancel;
    struct rt_http *h;
    const Baton__V1__GenerateRequest *msg; /* until the first event */
    size_t in_flight; /* bytes of events on their way; atomic, relaxed: a bound */
    /* http */
    struct rt_http_ex *ex;
    uint32_t idx;
    bool begun, ended, cancelled, role_sent;
    int cancel_rc; /* why, before it is posted; 0 = the client has gone */
    uint32_t n_prompt, n_completion, n_cached, finish;
    struct bt_buf text, lp, lp2, lp3, lp4; /* not streamed: what came so far, as JSON */
    size_t n_chars, n_lp;                  /* for text_offset */
};

/* --- a question that the loop answers with a whole body --- */

enum rt_http_question {
    RT_HTTP_HEALTH,
    RT_HTTP_READY,
    RT_HTTP_MODELS,
    RT_HTTP_MODEL,
    RT_HTTP_METRICS,
    RT_HTTP_TOKENIZE,
};

struct rt_http_ask {
    struct bt_msg msg;
    struct rt_http *h;
    struct rt_http_ex *ex;
    enum rt_http_question question;
    char *text; /* TOKENIZE: one of the two, and the model */
    const Baton__V1__Chat *chat;
    const char *model;
    struct rt_http_event reply;
    int status;
    const char *type;
    struct bt_buf body;
    struct bt_err err;
};

/* --- exchanges and connections; http thread --- */

/* One request and its response. Owned by its connection until that is closed, then by itself until
 * the loop has let go of its choices. */
struct rt_http_ex {
    struct rt_http *h;
    struct rt_http_conn *conn; /* NULL = closed */
    struct rt_http_spec spec;
    char id[20];
    char answer_id[RT_TRACE_ANSWER_ID]; /* what an answer calls itself: kind and id */
    char request_id[RT_HTTP_ID_BYTES + 1];
    int64_t created;
    uint64_t came_ns;
    char *model;        /* as JSON */
    struct bt_buf head; /* of every chunk */
    bool headers_sent, over;
    int refused_rc; /* its token is gone */
    struct rt_http_choice *choices;
    size_t n_choices, n_begun, n_ended, n_held; /* held: by the loop */
    double retry_after_s;                       /* of the failure; 0 = not known */
    size_t n_bytes;                             /* kept for an answer that is not streamed */
    struct rt_http_ask *ask;
    struct rt_http_read *reading; /* its body is with the reader, and so is the spec; NULL = no */
};

enum rt_http_phase {
    RT_HTTP_IDLE,   /* between requests, or before the first byte */
    RT_HTTP_HEADER, /* inside of a header */
    RT_HTTP_BODY,
    RT_HTTP_ANSWER, /* an exchange runs */
    RT_HTTP_LINGER, /* closed for writing; what the client still sends is thrown away */
};

/* Where the header's bytes have got to, for what the parser lets pass. */
enum rt_http_line {
    RT_HTTP_LINE_FIRST, /* nothing of the request has come */
    RT_HTTP_LINE_INSIDE,
    RT_HTTP_LINE_BEGIN,
    RT_HTTP_LINE_CR,      /* behind the carriage return of a line */
    RT_HTTP_LINE_LAST_CR, /* of the empty one that ends the header */
    RT_HTTP_LINE_OVER,    /* the header is whole, or is none */
};

struct rt_http_conn {
    struct bt_list link;  /* rt_http.conns */
    struct bt_list dirty; /* rt_http.dirty */
    struct bt_list idle;  /* rt_http.idle */
    struct rt_http *h;
    int fd;
    struct ssl_st *ssl; /* NULL = plain text */
    bool shaking;       /* hands: nothing else happens before that is done */
    bool shake_writes;  /* the handshake waits for room */
    bool tls_over;      /* broken, or goodbye was said */
    uint32_t events;    /* asked of epoll */
    enum rt_http_phase phase;
    uint64_t deadline_ns;
    bool fresh; /* no request yet: the header's time runs */
    bool eof, close_after, in_parse, closed;
    uint64_t last_out_ns; /* for heartbeats */
    uint64_t stall_ns;    /* output waits since then; 0 = none does */
    struct rt_http_ex *ex;
    struct bt_buf in; /* read and not yet parsed */
    struct bt_buf out;
    size_t out_off;

    http_parser parser;
    char url[256];
    size_t n_url, n_header_bytes, n_headers, n_linger;
    char field[32];
    size_t n_field;
    bool in_value, expect, has_host;
    enum rt_http_line line;
    char auth[600];
    struct bt_who who; /* of the request that is being answered */
    size_t n_auth, n_request_id;
    char request_id[RT_HTTP_ID_BYTES + 1];
    char expect_value[16];
    size_t n_expect;
    char coding[16]; /* Transfer-Encoding */
    size_t n_coding;
    int refuse; /* status that the parse ended with */
    const char *refuse_why;
    struct bt_buf body;
};

struct rt_http {
    struct rt_router *router;
    const struct rt_http_conf *conf;
    char address[300];
    pthread_t thread;
    int epoll_fd, wake_fd, listen_fd;
    struct bt_mailbox mailbox;
    struct bt_sec *sec; /* the node's */

    /* http */
    struct bt_list conns, dirty, idle, dead;
    size_t n_conns, body_bytes;
    uint64_t now_ns, next_tick_ns, id_seed, id_next;
    uint64_t next_look_ns, tokens_version; /* for tokens that are gone */
    bool draining, quit, accept_paused;
    uint64_t quit_ns;
    struct bt_msg quit_msg, drain_msg;

    /* loop */
    struct bt_list live, closing, events;
    struct bt_timer flush, drain_timer;
    size_t n_live, n_asks; /* asks: at the tokenizer */
    bool loop_draining;
    void (*drained)(void *arg);
    void *drained_arg;

    struct bt_worker *reader; /* read.c */

    size_t n_to_loop; /* messages on their way; atomic, pairs in rt_http_stop */
};

/* server.c */
void rt_http_to_loop(struct rt_http *h, struct bt_msg *msg);

/* conn.c */
void rt_http_conn_open(struct rt_http *h, int fd);
void rt_http_conn_event(struct rt_http_conn *c, uint32_t events);
void rt_http_conn_tick(struct rt_http_conn *c);
/* Sends what is queued; closes when that was the last. */
void rt_http_conn_flush(struct rt_http_conn *c);
/* The connection is of no more use; what runs on it is cancelled. Freed at the end of the turn. */
void rt_http_conn_close(struct rt_http_conn *c);
void rt_http_conn_free(struct rt_http_conn *c);
/* The response is whole: the next request may come. */
void rt_http_conn_done(struct rt_http_conn *c);
/* Output of the connection is to be sent at the end of the turn. */
void rt_http_conn_dirty(struct rt_http_conn *c);

/* tls.c: the bytes of a connection. As recv and send, with errno EAGAIN or another one. */
ssize_t rt_http_recv(struct rt_http_conn *c, void *to, size_t n);
ssize_t rt_http_send(struct rt_http_conn *c, const void *from, size_t n);
/* Begins TLS where the port has it; BT_E_NOMEM. */
int rt_http_tls_open(struct rt_http_conn *c) BT_MUST_USE;
/* Goes on with the handshake: BT_OK = done, BT_PENDING, or BT_E_PEER_PROTOCOL; BT_E_INVALID = the
 * other side speaks plain HTTP, and nothing has been sent. */
int rt_http_tls_shake(struct rt_http_conn *c) BT_MUST_USE;
/* Says that nothing more will be written, as far as there is room for it. */
void rt_http_tls_bye(struct rt_http_conn *c);
void rt_http_tls_close(struct rt_http_conn *c);

/* route.c: the header has come. False: whoever asks may not, or nobody wants a body there, so that
 * none is kept for it: memory for bodies belongs to those who may ask. */
bool rt_http_takes_body(struct rt_http_conn *c);
/* Whether the token of the request that is being answered still counts. */
int rt_http_still_may(struct rt_http_conn *c) BT_MUST_USE;
/* A whole request has come. */
void rt_http_route(struct rt_http_conn *c);
/* Whole responses. `type` and `body` of a reply; errors in OpenAI's shape. */
void rt_http_respond(struct rt_http_conn *c, int status, const char *type, struct bt_str body);
void rt_http_respond_error(
    struct rt_http_conn *c, int status, const char *param, const char *code, const char *msg);
void rt_http_respond_rc(struct rt_http_conn *c, int rc, const char *param, const char *msg);
int rt_http_status_of(int rc);
const char *rt_http_code_of(int rc);
const char *rt_http_reason(int status);

/* read.c: bodies become specs, long ones on a thread of their own. */
/* Reads the body of the connection's request into ex->spec and calls `done`, now or later; not if
 * the exchange is over by then. *err is `done`'s to read. */
typedef int (*rt_http_read_fn)(struct rt_http_ex *ex, struct bt_str body, struct bt_err *err);
typedef void (*rt_http_read_done)(struct rt_http_ex *ex, int rc, const struct bt_err *err);
void rt_http_read(struct rt_http_ex *ex, rt_http_read_fn read, rt_http_read_done done);

/* exchange.c */
/* NULL without memory: the caller has been answered. */
struct rt_http_ex *rt_http_ex_create(struct rt_http_conn *c);
/* Frees the exchange once neither its connection nor anybody else has it. */
void rt_http_ex_let_go(struct rt_http_ex *ex);
/* A response of its own; the exchange is over. */
void rt_http_ex_error(struct rt_http_ex *ex, int rc, const char *param, const char *msg);
void rt_http_generate(struct rt_http_conn *c, bool chat);
void rt_http_ask(struct rt_http_ex *ex, enum rt_http_question question);
void rt_http_event(struct rt_http_event *ev);
/* The connection is gone, or the response is whole: what still runs is cancelled, and the exchange
 * freed as soon as the loop has let go of it. */
void rt_http_ex_abandon(struct rt_http_ex *ex);
/* It fails: an error response, or an event behind what was sent, and the connection ends. */
void rt_http_ex_fail(struct rt_http_ex *ex, int rc, const char *msg);
/* Nothing has been sent for a while. */
void rt_http_ex_heartbeat(struct rt_http_ex *ex);

/* render.c: JSON text */
int rt_http_put(struct bt_buf *b, const char *text) BT_MUST_USE;
int rt_http_put_string(struct bt_buf *b, struct bt_str s) BT_MUST_USE; /* with its quotes */
/* What is not UTF-8 becomes U+FFFD. */
int rt_http_put_lossy(struct bt_buf *b, struct bt_str s) BT_MUST_USE;
int rt_http_put_error(
    struct bt_buf *b, int status, const char *param, const char *code, const char *msg) BT_MUST_USE;
/* Items of a chat's "content" list, joined by commas. */
int rt_http_put_chat_logprobs(struct bt_buf *b,
                              const struct bt_tokenizer *tok,
                              const struct rt_http_lp *lp,
                              size_t n) BT_MUST_USE;
/* Appends to the four lists of a legacy completion: tokens, token_logprobs, top_logprobs, offsets.
 */
int rt_http_put_legacy_logprobs(struct rt_http_choice *ch,
                                const struct bt_tokenizer *tok,
                                const struct rt_http_lp *lp,
                                size_t n) BT_MUST_USE;

/* bridge.c: the loop's side */
void rt_http_bridge_init(struct rt_http *h);
void rt_http_on_submit(struct bt_msg *msg, void *loop);
void rt_http_on_cancel(struct bt_msg *msg, void *loop);
void rt_http_on_ask(struct bt_msg *msg, void *loop);
void rt_http_emit(struct rt_http *h, struct rt_http_event *ev);
/* Every live request fails. */
void rt_http_bridge_cancel_all(struct rt_http *h, const char *why);

/* series.c */
int rt_http_put_help(struct bt_buf *b, const char *name, const char *type, const char *help)
    BT_MUST_USE;
int rt_http_put_series(const struct rt_router *r, struct bt_buf *b) BT_MUST_USE;

/* metrics.c: answers of the loop */
void rt_http_answer(struct rt_http *h, struct rt_http_ask *ask);

#endif
