/* Exchanges: a generation of one or more choices, streamed or whole, or a question that the loop
 * answers. Nothing is sent before the first token, the first heartbeat or an error: so that an
 * error that comes before them has a status of its own. HTTP thread. */
#include "router/http/http_int.h"

#include "common/obs/log.h"
#include "common/thr/time.h"

#include <stdlib.h>

/* --- life ------------------------------------------------------------------------------------ */

struct rt_http_ex *rt_http_ex_create(struct rt_http_conn *c)
{
    struct rt_http_ex *ex = bt_calloc(1, sizeof(*ex));
    uint64_t id;

    if (!ex) {
        rt_http_respond_rc(c, BT_E_NOMEM, NULL, "no memory for the request");
        return NULL;
    }
    ex->h = c->h;
    ex->conn = c;
    ex->created = (int64_t)time(NULL);
    ex->came_ns = bt_now_ns();
    id = c->h->id_seed + 0x9e3779b97f4a7c15ull * ++c->h->id_next; /* distinct, and says no count */
    snprintf(ex->id, sizeof(ex->id), "%016llx", (unsigned long long)id);
    for (size_t i = 0; i < c->n_request_id; i++) {
        bool plain = c->request_id[i] > ' ' && c->request_id[i] < 0x7f;

        ex->request_id[i] = plain ? c->request_id[i] : '_';
    }
    if (!ex->request_id[0]) {
        snprintf(ex->request_id, sizeof(ex->request_id), "%s", ex->id);
    }
    c->ex = ex;
    return ex;
}

static void fini_choice(struct rt_http_choice *ch)
{
    bt_buf_fini(&ch->text);
    bt_buf_fini(&ch->lp);
    bt_buf_fini(&ch->lp2);
    bt_buf_fini(&ch->lp3);
    bt_buf_fini(&ch->lp4);
}

static void ex_free(struct rt_http_ex *ex)
{
    for (size_t i = 0; i < ex->n_choices; i++) {
        fini_choice(&ex->choices[i]);
    }
    free(ex->choices);
    if (ex->ask) {
        bt_buf_fini(&ex->ask->body);
        free(ex->ask);
    }
    rt_http_spec_fini(&ex->spec);
    bt_buf_fini(&ex->head);
    free(ex->model);
    free(ex);
}

void rt_http_ex_let_go(struct rt_http_ex *ex)
{
    if (!ex->conn && ex->n_held == 0) {
        ex_free(ex);
    }
}

static void cancel_choices(struct rt_http_ex *ex)
{
    for (size_t i = 0; i < ex->n_choices; i++) {
        struct rt_http_choice *ch = &ex->choices[i];

        if (!ch->ended && !ch->cancelled) {
            ch->cancelled = true;
            ch->cancel_rc = ex->refused_rc;
            rt_http_to_loop(ex->h, &ch->cancel);
        }
    }
}

void rt_http_ex_abandon(struct rt_http_ex *ex)
{
    ex->conn = NULL;
    ex->over = true;
    cancel_choices(ex);
    rt_http_ex_let_go(ex);
}

/* --- whole responses ------------------------------------------------------------------------- */

static void respond_whole(struct rt_http_ex *ex, int status, const char *type, struct bt_str body)
{
    rt_http_respond(ex->conn, status, type, body); /* which lets go of us */
}

void rt_http_ex_error(struct rt_http_ex *ex, int rc, const char *param, const char *msg)
{
    struct bt_buf b = {0};
    int status = rt_http_status_of(rc);

    if (rt_http_put_error(&b, status, param, rt_http_code_of(rc), msg) < 0) {
        rt_http_conn_close(ex->conn);
    } else {
        respond_whole(ex, status, "application/json", bt_buf_str(&b));
    }
    bt_buf_fini(&b);
}

/* --- streams --------------------------------------------------------------------------------- */

static bool is_chunked(const struct rt_http_conn *c)
{
    return c->parser.http_minor >= 1;
}

static int send_headers(struct rt_http_ex *ex)
{
    struct rt_http_conn *c = ex->conn;

    if (ex->headers_sent) {
        return BT_OK;
    }
    ex->headers_sent = true;
    c->close_after = c->close_after || !is_chunked(c);
    return bt_buf_printf(&c->out,
                         "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n"
                         "Cache-Control: no-cache\r\nX-Accel-Buffering: no\r\n%sConnection: %s\r\n"
                         "X-Request-Id: %s\r\n\r\n",
                         is_chunked(c) ? "Transfer-Encoding: chunked\r\n" : "",
                         c->close_after ? "close" : "keep-alive", ex->request_id);
}

#define CHUNK_HEAD 10 /* eight digits and the end of the line */

/* A chunk's head is written when its length is known; leading zeros are fine. */
static int begin_chunk(struct rt_http_ex *ex, size_t *ret_at)
{
    struct bt_buf *out = &ex->conn->out;
    int rc = send_headers(ex);

    *ret_at = out->n;
    return rc < 0 || !is_chunked(ex->conn) ? rc : rt_http_put(out, "00000000\r\n");
}

static int end_chunk(struct rt_http_ex *ex, size_t at)
{
    static const char hex[] = "0123456789abcdef";
    struct bt_buf *out = &ex->conn->out;
    size_t n = out->n - at - CHUNK_HEAD;

    if (!is_chunked(ex->conn)) {
        return BT_OK;
    }
    for (int i = 7; i >= 0; i--, n >>= 4) {
        out->p[at + (size_t)i] = hex[n & 15];
    }
    return rt_http_put(out, "\r\n");
}

static int put_usage(struct bt_buf *b, const struct rt_http_ex *ex)
{
    uint64_t prompt = 0, completion = 0, cached = 0;

    for (size_t i = 0; i < ex->n_choices; i++) {
        const struct rt_http_choice *ch = &ex->choices[i];

        if (i % ex->spec.n == 0) { /* a prompt counts once, whatever n is */
            prompt += ch->n_prompt;
            cached += ch->n_cached;
        }
        completion += ch->n_completion;
    }
    return bt_buf_printf(b,
                         "{\"prompt_tokens\":%llu,\"completion_tokens\":%llu,\"total_tokens\":%llu,"
                         "\"prompt_tokens_details\":{\"cached_tokens\":%llu}}",
                         (unsigned long long)prompt, (unsigned long long)completion,
                         (unsigned long long)(prompt + completion), (unsigned long long)cached);
}

static const char *finish_text(uint32_t finish)
{
    return finish == BATON__V1__FINISH_REASON__FINISH_STOP     ? "\"stop\""
           : finish == BATON__V1__FINISH_REASON__FINISH_LENGTH ? "\"length\""
                                                               : "null";
}

static int put_legacy_lists(struct bt_buf *b, const struct rt_http_choice *ch)
{
    const struct bt_buf *lists[] = {&ch->lp, &ch->lp2, &ch->lp3, &ch->lp4};
    static const char *const names[] = {"{\"tokens\":[", "],\"token_logprobs\":[",
                                        "],\"top_logprobs\":[", "],\"text_offset\":["};
    int rc = BT_OK;

    for (size_t i = 0; rc == BT_OK && i < 4; i++) {
        rc = rt_http_put(b, names[i]);
        if (rc == BT_OK) {
            rc = bt_buf_add(b, lists[i]->p, lists[i]->n);
        }
    }
    return rc < 0 ? rc : rt_http_put(b, "]}");
}

/* "logprobs": of the tokens in the event, for a chunk. */
static int put_logprobs(struct bt_buf *b, struct rt_http_choice *ch, const struct rt_http_event *ev)
{
    const struct bt_tokenizer *tok = rt_model_tokenizer(ch->h->router->model);
    int rc;

    if (!ev->lp) {
        return rt_http_put(b, "null");
    }
    if (ch->ex->spec.chat) {
        if ((rc = rt_http_put(b, "{\"content\":[")) < 0 ||
            (rc = rt_http_put_chat_logprobs(b, tok, ev->lp, ev->n_tokens)) < 0) {
            return rc;
        }
        return rt_http_put(b, "]}");
    }
    ch->lp.n = ch->lp2.n = ch->lp3.n = ch->lp4.n = 0;
    rc = rt_http_put_legacy_logprobs(ch, tok, ev->lp, ev->n_tokens);
    return rc < 0 ? rc : put_legacy_lists(b, ch);
}

static int put_chunk(struct rt_http_choice *ch, const struct rt_http_event *ev)
{
    struct rt_http_ex *ex = ch->ex;
    struct bt_buf *out = &ex->conn->out;
    bool role = ex->spec.chat && !ch->role_sent;
    size_t at;
    int rc;

    ch->role_sent = true;
    if ((rc = begin_chunk(ex, &at)) < 0 || (rc = bt_buf_add(out, ex->head.p, ex->head.n)) < 0 ||
        (rc = bt_buf_printf(out, ",\"choices\":[{\"index\":%u,", ch->idx)) < 0 ||
        (rc = rt_http_put(out, !ex->spec.chat ? "\"text\":"
                               : role         ? "\"delta\":{\"role\":\"assistant\",\"content\":"
                                              : "\"delta\":{\"content\":")) < 0 ||
        (rc = rt_http_put_string(out, (struct bt_str){ev->text, ev->n_text})) < 0 ||
        (rc = rt_http_put(out, ex->spec.chat ? "},\"logprobs\":" : ",\"logprobs\":")) < 0 ||
        (rc = put_logprobs(out, ch, ev)) < 0 ||
        (rc = bt_buf_printf(out, ",\"finish_reason\":%s}]%s}\n\n", finish_text(ev->finish),
                            ex->spec.include_usage ? ",\"usage\":null" : "")) < 0) {
        return rc;
    }
    return end_chunk(ex, at);
}

/* Usage if it was asked for, the end mark, the last chunk. */
static int put_stream_end(struct rt_http_ex *ex)
{
    struct bt_buf *out = &ex->conn->out;
    size_t at;
    int rc;

    if (ex->spec.include_usage) {
        if ((rc = begin_chunk(ex, &at)) < 0 || (rc = bt_buf_add(out, ex->head.p, ex->head.n)) < 0 ||
            (rc = rt_http_put(out, ",\"choices\":[],\"usage\":")) < 0 ||
            (rc = put_usage(out, ex)) < 0 || (rc = rt_http_put(out, "}\n\n")) < 0 ||
            (rc = end_chunk(ex, at)) < 0) {
            return rc;
        }
    }
    if ((rc = begin_chunk(ex, &at)) < 0 || (rc = rt_http_put(out, "data: [DONE]\n\n")) < 0 ||
        (rc = end_chunk(ex, at)) < 0) {
        return rc;
    }
    return is_chunked(ex->conn) ? rt_http_put(out, "0\r\n\r\n") : BT_OK;
}

static void stream_finished(struct rt_http_ex *ex)
{
    struct rt_http_conn *c = ex->conn;

    if (put_stream_end(ex) < 0) {
        rt_http_conn_close(c);
        return;
    }
    rt_http_ex_abandon(ex);
    rt_http_conn_done(c);
}

/* An error behind the headers: an event of its own, and the connection ends. */
static void stream_failed(struct rt_http_ex *ex, int rc, const char *msg)
{
    struct rt_http_conn *c = ex->conn;
    int status = rt_http_status_of(rc);
    const char *code = rt_http_code_of(rc);
    size_t at;

    if (begin_chunk(ex, &at) < 0 || rt_http_put(&c->out, "data: ") < 0 ||
        rt_http_put_error(&c->out, status, NULL, code, msg) < 0 ||
        rt_http_put(&c->out, "\n\n") < 0 || end_chunk(ex, at) < 0 ||
        (is_chunked(c) && rt_http_put(&c->out, "0\r\n\r\n") < 0)) {
        rt_http_conn_close(c);
        return;
    }
    c->close_after = true;
    rt_http_ex_abandon(ex);
    rt_http_conn_done(c);
}

void rt_http_ex_heartbeat(struct rt_http_ex *ex)
{
    size_t at;

    if (ex->n_choices == 0 || !ex->spec.stream || ex->over) {
        return;
    }
    if (begin_chunk(ex, &at) < 0 || rt_http_put(&ex->conn->out, ": \n\n") < 0 ||
        end_chunk(ex, at) < 0) {
        rt_http_conn_close(ex->conn);
    } else {
        rt_http_conn_dirty(ex->conn);
    }
}

/* --- answers that are not streamed ----------------------------------------------------------- */

static int keep_delta(struct rt_http_choice *ch, const struct rt_http_event *ev)
{
    const struct bt_tokenizer *tok = rt_model_tokenizer(ch->h->router->model);
    size_t was = ch->text.n + ch->lp.n + ch->lp3.n;
    int rc = bt_buf_add(&ch->text, ev->text, ev->n_text);

    if (rc == BT_OK && ev->lp && ch->ex->spec.chat) {
        if (ch->lp.n > 0 && ev->n_tokens > 0) {
            rc = rt_http_put(&ch->lp, ",");
        }
        if (rc == BT_OK) {
            rc = rt_http_put_chat_logprobs(&ch->lp, tok, ev->lp, ev->n_tokens);
        }
    } else if (rc == BT_OK && ev->lp) {
        rc = rt_http_put_legacy_logprobs(ch, tok, ev->lp, ev->n_tokens);
    }
    ch->ex->n_bytes += ch->text.n + ch->lp.n + ch->lp3.n - was;
    return rc == BT_OK && ch->ex->n_bytes > RT_HTTP_MAX_ANSWER ? BT_E_TOO_LARGE : rc;
}

static int put_choice(struct bt_buf *b, const struct rt_http_choice *ch)
{
    bool chat = ch->ex->spec.chat;
    int rc;

    if ((rc = bt_buf_printf(b, "{\"index\":%u,%s", ch->idx,
                            chat ? "\"message\":{\"role\":\"assistant\",\"content\":"
                                 : "\"text\":")) < 0 ||
        (rc = rt_http_put_string(b, bt_buf_str(&ch->text))) < 0 ||
        (rc = rt_http_put(b, chat ? ",\"refusal\":null},\"logprobs\":" : ",\"logprobs\":")) < 0) {
        return rc;
    }
    if (!ch->ex->spec.logprobs) {
        rc = rt_http_put(b, "null");
    } else if (chat) {
        if ((rc = rt_http_put(b, "{\"content\":[")) == BT_OK &&
            (rc = bt_buf_add(b, ch->lp.p, ch->lp.n)) == BT_OK) {
            rc = rt_http_put(b, "]}");
        }
    } else {
        rc = put_legacy_lists(b, ch);
    }
    return rc < 0 ? rc : bt_buf_printf(b, ",\"finish_reason\":%s}", finish_text(ch->finish));
}

static void whole_finished(struct rt_http_ex *ex)
{
    static const size_t skip = 6; /* "data: " */
    struct bt_buf b = {0};
    int rc = bt_buf_add(&b, ex->head.p + skip, ex->head.n - skip);

    if (rc == BT_OK) {
        rc = rt_http_put(&b, ",\"choices\":[");
    }
    for (size_t i = 0; rc == BT_OK && i < ex->n_choices; i++) {
        if (i > 0) {
            rc = rt_http_put(&b, ",");
        }
        if (rc == BT_OK) {
            rc = put_choice(&b, &ex->choices[i]);
        }
    }
    if (rc == BT_OK && (rc = rt_http_put(&b, "],\"usage\":")) == BT_OK &&
        (rc = put_usage(&b, ex)) == BT_OK) {
        rc = rt_http_put(&b, "}");
    }
    if (rc < 0) {
        rt_http_ex_error(ex, rc, NULL, bt_rc_text(rc));
    } else {
        respond_whole(ex, 200, "application/json", bt_buf_str(&b));
    }
    bt_buf_fini(&b);
}

/* --- events ---------------------------------------------------------------------------------- */

void rt_http_ex_fail(struct rt_http_ex *ex, int rc, const char *msg)
{
    ex->over = true;
    if (ex->headers_sent) {
        stream_failed(ex, rc, msg);
    } else {
        int status = rt_http_status_of(rc);
        bool theirs = status == 400 || status == 403 || status == 404;

        rt_http_ex_error(ex, rc, theirs ? rt_http_field_of(msg, ex->spec.chat) : NULL, msg);
    }
}

/* When every choice has been taken by the loop the body is not needed any more. */
static void begun(struct rt_http_choice *ch)
{
    struct rt_http_ex *ex = ch->ex;

    if (!ch->begun) {
        ch->begun = true;
        if (++ex->n_begun == ex->n_choices) {
            rt_http_spec_fini(&ex->spec);
        }
    }
}

static void on_delta(struct rt_http_choice *ch, const struct rt_http_event *ev)
{
    struct rt_http_ex *ex = ch->ex;
    int rc = BT_OK;

    begun(ch);
    if (ex->over) {
        return;
    }
    if (ev->finish) {
        ch->finish = ev->finish;
        ch->n_prompt = ev->n_prompt;
        ch->n_completion = ev->n_completion;
        ch->n_cached = ev->n_cached;
    }
    if (!ex->spec.stream) {
        rc = keep_delta(ch, ev);
    } else if (ev->n_text > 0 || ev->finish || ev->lp || !ex->headers_sent) {
        rc = put_chunk(ch, ev);
        rt_http_conn_dirty(ex->conn);
    }
    if (rc == BT_E_TOO_LARGE) {
        rt_http_ex_fail(ex, rc, "the answer is too large to be sent as a whole; ask for a stream");
    } else if (rc < 0) {
        rt_http_conn_close(ex->conn);
    }
}

static void on_end(struct rt_http_choice *ch, int rc)
{
    struct rt_http_ex *ex = ch->ex;

    begun(ch);
    ch->ended = true;
    ex->n_ended++;
    if (!ch->cancelled) {
        ex->n_held--;
    }
    if (ex->over) {
        rt_http_ex_let_go(ex);
    } else if (rc < 0) {
        ex->retry_after_s = ch->client.retry_after_s; /* the loop is done with it */
        rt_http_ex_fail(ex, rc, ch->err.msg);
    } else if (ex->n_ended < ex->n_choices) {
        return;
    } else if (ex->spec.stream) {
        stream_finished(ex);
    } else {
        whole_finished(ex);
    }
}

static void on_reply(struct rt_http_ask *ask)
{
    struct rt_http_ex *ex = ask->ex;
    int rc = ask->reply.rc;

    ex->n_held--;
    if (ex->over) {
        rt_http_ex_let_go(ex);
    } else if (rc < 0) {
        rt_http_ex_error(ex, rc, NULL, bt_err_msg(&ask->err, rc));
    } else {
        respond_whole(ex, ask->status, ask->type, bt_buf_str(&ask->body));
    }
}

void rt_http_event(struct rt_http_event *ev)
{
    struct rt_http_choice *ch = ev->target;

    switch (ev->kind) {
    case RT_HTTP_DELTA:
        __atomic_fetch_sub(&ch->in_flight, ev->size, __ATOMIC_RELAXED);
        on_delta(ch, ev);
        free(ev);
        return;
    case RT_HTTP_END:
        on_end(ch, ev->rc);
        return;
    case RT_HTTP_GONE:
        ch->ex->n_held--;
        rt_http_ex_let_go(ch->ex);
        return;
    case RT_HTTP_REPLY:
    default:
        on_reply(ev->target);
    }
}

/* --- beginnings ------------------------------------------------------------------------------ */

/* What every chunk begins with, up to the model. */
static int make_head(struct rt_http_ex *ex)
{
    const struct rt_http_spec *s = &ex->spec;
    int rc;

    snprintf(ex->answer_id, sizeof(ex->answer_id), "%s-%s", s->chat ? "chatcmpl" : "cmpl", ex->id);
    rc = bt_buf_printf(
        &ex->head,
        "data: {\"id\":\"%s\",\"object\":\"%s\",\"created\":%lld,\"model\":", ex->answer_id,
        !s->chat    ? "text_completion"
        : s->stream ? "chat.completion.chunk"
                    : "chat.completion",
        (long long)ex->created);

    return rc < 0 ? rc
                  : rt_http_put_lossy(&ex->head,
                                      bt_str_of(rt_model_config(ex->h->router->model)->name));
}

static int make_choices(struct rt_http_ex *ex)
{
    size_t n = ex->spec.n_prompts * ex->spec.n;

    ex->choices = bt_calloc(n, sizeof(*ex->choices));
    if (!ex->choices) {
        return BT_E_NOMEM;
    }
    for (size_t i = 0; i < n; i++) {
        struct rt_http_choice *ch = &ex->choices[i];

        ch->client.choice = (uint32_t)(i % ex->spec.n);
        ch->client.who = ex->conn->who;
        ch->client.came_ns = ex->came_ns;
        ch->client.answer_id = ex->answer_id;
        ch->h = ex->h;
        ch->ex = ex;
        ch->idx = (uint32_t)i;
        ch->msg = &ex->spec.msgs[i / ex->spec.n];
        ch->submit.handle = rt_http_on_submit;
        ch->cancel.handle = rt_http_on_cancel;
        bt_list_init(&ch->live);
    }
    ex->n_choices = ex->n_held = n;
    return BT_OK;
}

static int read_chat(struct rt_http_ex *ex, struct bt_str body, struct bt_err *err)
{
    return rt_http_spec_read(body, true, ex->request_id, &ex->spec, err);
}

static int read_completion(struct rt_http_ex *ex, struct bt_str body, struct bt_err *err)
{
    return rt_http_spec_read(body, false, ex->request_id, &ex->spec, err);
}

static void start_choices(struct rt_http_ex *ex, int rc, const struct bt_err *err)
{
    char param[sizeof(ex->spec.param)];

    if (ex->conn->eof) { /* it has left meanwhile: nothing is begun for it */
        rt_http_conn_close(ex->conn);
        return;
    }
    if (rc == BT_OK) {
        rc = make_head(ex);
    }
    if (rc == BT_OK) {
        rc = make_choices(ex);
    }
    if (rc < 0) {
        const struct rt_refusal f = {.id = ex->id,
                                     .client_id = ex->request_id,
                                     .answer_id = "",
                                     .via = "http",
                                     .tenant = ex->conn->who.tenant,
                                     .came_ns = ex->came_ns,
                                     .rc = rc};

        rt_access_refused(ex->h->router, &f);
        snprintf(param, sizeof(param), "%s", ex->spec.param);
        rt_http_ex_error(ex, rc, param, bt_err_msg(err, rc));
        return;
    }
    for (size_t i = 0; i < ex->n_choices; i++) {
        rt_http_to_loop(ex->h, &ex->choices[i].submit);
    }
}

void rt_http_generate(struct rt_http_conn *c, bool chat)
{
    struct rt_http_ex *ex = rt_http_ex_create(c);

    if (ex) {
        rt_http_read(ex, chat ? read_chat : read_completion, start_choices);
    }
}

void rt_http_ask(struct rt_http_ex *ex, enum rt_http_question question)
{
    struct rt_http_ask *ask = bt_calloc(1, sizeof(*ask));

    if (!ask) {
        rt_http_ex_error(ex, BT_E_NOMEM, NULL, "no memory for the request");
        return;
    }
    ex->ask = ask;
    ex->n_held = 1;
    ask->h = ex->h;
    ask->ex = ex;
    ask->question = question;
    ask->msg.handle = rt_http_on_ask;
    if (question == RT_HTTP_TOKENIZE) {
        const Baton__V1__GenerateRequest *m = &ex->spec.msgs[0];
        bool is_chat = m->input_case == BATON__V1__GENERATE_REQUEST__INPUT_CHAT;

        ask->model = m->model;
        ask->text = is_chat ? NULL : m->text;
        ask->chat = is_chat ? m->chat : NULL;
    }
    rt_http_to_loop(ex->h, &ask->msg);
}
