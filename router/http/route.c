/* From a whole request to the exchange that answers it: who may ask, what for, and the shape of
 * errors. Everything asks for a token but health and readiness. HTTP thread. */
#include "router/http/http_int.h"

#include "common/obs/log.h"
#include "common/text/detok.h"

#include <math.h>
#include <stdlib.h>

#define MAX_DETOK_IDS (1u << 18)
#define MODELS_PATH   "/v1/models"

/* --- responses ------------------------------------------------------------------------------- */

const char *rt_http_reason(int status)
{
    switch (status) {
#define X(code, name, text)                                                                        \
    case code:                                                                                     \
        return #text;
        HTTP_STATUS_MAP(X)
#undef X
    case 499:
        return "Client Closed Request";
    default:
        return "Error";
    }
}

int rt_http_status_of(int rc)
{
    switch (rc) {
    case BT_OK:
        return 200;
    case BT_E_INVALID:
    case BT_E_FORMAT:
    case BT_E_UNSUPPORTED:
    case BT_E_TOO_LARGE:
        return 400;
    case BT_E_UNAUTHENTICATED:
        return 401;
    case BT_E_DENIED:
        return 403;
    case BT_E_NOT_FOUND:
        return 404;
    case BT_E_EXHAUSTED:
        return 429;
    case BT_E_CANCELLED:
        return 499;
    case BT_E_UNAVAILABLE:
    case BT_E_PEER_LOST:
    case BT_E_INCOMPATIBLE:
    case BT_E_NOMEM:
        return 503;
    case BT_E_DEADLINE:
        return 504;
    default:
        return 500;
    }
}

const char *rt_http_code_of(int rc)
{
    switch (rc) {
    case BT_E_NOT_FOUND:
        return "model_not_found";
    case BT_E_EXHAUSTED:
        return "overloaded";
    case BT_E_UNAUTHENTICATED:
        return "invalid_api_key";
    case BT_E_DENIED:
        return "permission_denied";
    default:
        return NULL;
    }
}

void rt_http_respond(struct rt_http_conn *c, int status, const char *type, struct bt_str body)
{
    bool head = c->parser.method == HTTP_HEAD;
    double after_s = c->ex ? c->ex->retry_after_s : 0;
    char retry[80] = "";
    int rc;

    if (status == 429 || status == 503) {
        snprintf(retry, sizeof(retry), "Retry-After: %.0f\r\nRetry-After-Ms: %.0f\r\n",
                 after_s > 0 ? ceil(after_s) : 1.0, after_s > 0 ? after_s * 1e3 : 1000.0);
    }
    rc = bt_buf_printf(&c->out,
                       "HTTP/1.1 %d %s\r\nContent-Type: %s\r\nContent-Length: %zu\r\n%s%s%s",
                       status, rt_http_reason(status), type, body.n, retry,
                       status == 401 ? "WWW-Authenticate: Bearer realm=\"baton\"\r\n" : "",
                       c->close_after ? "Connection: close\r\n" : "Connection: keep-alive\r\n");
    if (rc == BT_OK && c->ex && c->ex->request_id[0]) {
        rc = bt_buf_printf(&c->out, "X-Request-Id: %s\r\n", c->ex->request_id);
    }
    if (rc == BT_OK) {
        rc = rt_http_put(&c->out, "\r\n");
    }
    if (rc == BT_OK && !head) {
        rc = bt_buf_add(&c->out, body.p, body.n);
    }
    if (rc < 0) {
        rt_http_conn_close(c);
        return;
    }
    if (c->ex) {
        rt_http_ex_abandon(c->ex);
    }
    rt_http_conn_done(c);
}

void rt_http_respond_error(
    struct rt_http_conn *c, int status, const char *param, const char *code, const char *msg)
{
    struct bt_buf b = {0};

    if (rt_http_put_error(&b, status, param, code, msg) < 0) {
        rt_http_conn_close(c);
    } else {
        rt_http_respond(c, status, "application/json", bt_buf_str(&b));
    }
    bt_buf_fini(&b);
}

void rt_http_respond_rc(struct rt_http_conn *c, int rc, const char *param, const char *msg)
{
    rt_http_respond_error(c, rt_http_status_of(rc), param, rt_http_code_of(rc), msg);
}

/* --- who may ask ----------------------------------------------------------------------------- */

static int
authorize(const struct rt_http_conn *c, unsigned access, struct bt_who *ret_who, struct bt_err *err)
{
    struct bt_sec_ask ask = {.port = BT_SEC_HTTP, .access = access};

    if (c->n_auth > 0 && c->n_auth <= sizeof(c->auth)) {
        ask.authorization = (struct bt_str){c->auth, c->n_auth};
    }
    return bt_sec_authorize(c->h->sec, &ask, ret_who, err);
}

static void denied(struct rt_http_conn *c, int rc, const struct bt_err *err)
{
    BT_INFO("denied", "port=http fd=%d rc=%s msg=\"%s\"", c->fd, bt_rc_name(rc),
            bt_err_msg(err, rc));
    rt_http_respond_rc(c, rc, NULL, bt_err_msg(err, rc));
}

/* --- endpoints ------------------------------------------------------------------------------- */

static void chat(struct rt_http_conn *c)
{
    rt_http_generate(c, true);
}

static void completions(struct rt_http_conn *c)
{
    rt_http_generate(c, false);
}

static void ask(struct rt_http_conn *c, enum rt_http_question question)
{
    struct rt_http_ex *ex = rt_http_ex_create(c);

    if (ex) {
        rt_http_ask(ex, question);
    }
}

static void models(struct rt_http_conn *c)
{
    ask(c, RT_HTTP_MODELS);
}

static int hex_digit(char c)
{
    return c >= '0' && c <= '9'   ? c - '0'
           : c >= 'a' && c <= 'f' ? c - 'a' + 10
           : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                  : -1;
}

/* The text that a part of a path stands for; false: a broken escape, or a zero byte. */
static bool unescape(const char *from, char *to)
{
    for (; *from; from++) {
        int high, low;

        if (*from != '%') {
            *to++ = *from;
            continue;
        }
        high = hex_digit(from[1]);
        low = high < 0 ? -1 : hex_digit(from[2]);
        if (low < 0 || (high | low) == 0) {
            return false;
        }
        *to++ = (char)(high * 16 + low);
        from += 2;
    }
    *to = '\0';
    return true;
}

/* One model by its name, behind the path that lists them. */
static void one_model(struct rt_http_conn *c)
{
    const char *rest = c->url + sizeof(MODELS_PATH);
    char name[sizeof(c->url)], msg[sizeof(c->url) + 64];

    if (!unescape(rest, name)) {
        rt_http_respond_error(c, 400, NULL, NULL, "the path has a broken escape");
    } else if (!rt_model_is(c->h->router->model, name)) {
        snprintf(msg, sizeof(msg), "model %s is not served here", name);
        rt_http_respond_error(c, 404, NULL, "model_not_found", msg);
    } else {
        ask(c, RT_HTTP_MODEL);
    }
}

static void health(struct rt_http_conn *c)
{
    ask(c, RT_HTTP_HEALTH);
}

static void ready(struct rt_http_conn *c)
{
    ask(c, RT_HTTP_READY);
}

static void metrics(struct rt_http_conn *c)
{
    ask(c, RT_HTTP_METRICS);
}

static int read_tokenize(struct rt_http_ex *ex, struct bt_str body, struct bt_err *err)
{
    return rt_http_spec_read_tokenize(body, &ex->spec, err);
}

static void tokenize_it(struct rt_http_ex *ex, int rc, const struct bt_err *err)
{
    char param[sizeof(ex->spec.param)];

    if (rc < 0) {
        snprintf(param, sizeof(param), "%s", ex->spec.param);
        rt_http_ex_error(ex, rc, param, bt_err_msg(err, rc));
    } else {
        rt_http_ask(ex, RT_HTTP_TOKENIZE);
    }
}

static void tokenize(struct rt_http_conn *c)
{
    struct rt_http_ex *ex = rt_http_ex_create(c);

    if (ex) {
        rt_http_read(ex, read_tokenize, tokenize_it);
    }
}

static int read_detokenize(struct rt_http_ex *ex, struct bt_str body, struct bt_err *err)
{
    return rt_http_spec_read_detokenize(body, &ex->spec, err);
}

static void detokenize_it(struct rt_http_ex *ex, int rc, const struct bt_err *read_err)
{
    const struct rt_model *model = ex->h->router->model;
    const struct rt_http_spec *spec = &ex->spec;
    struct bt_buf text = {.max = 64u << 20}, out = {0};
    struct bt_ids ids = {.max = MAX_DETOK_IDS};
    struct bt_err err = *read_err;
    char param[sizeof(ex->spec.param)];

    if (rc == BT_OK && !rt_model_is(model, spec->msgs[0].model)) {
        rc = BT_FAIL(&err, BT_E_NOT_FOUND, "model %.100s is not served here", spec->msgs[0].model);
    }
    if (rc == BT_OK && spec->msgs[0].tokens->n_ids > 0) {
        rc =
            rt_model_ids(model, spec->msgs[0].tokens->ids, spec->msgs[0].tokens->n_ids, &ids, &err);
    }
    if (rc == BT_OK) {
        rc = bt_detok_all(rt_model_tokenizer(model), ids.p, ids.n, 0, &text);
    }
    if (rc == BT_OK && (rc = rt_http_put(&out, "{\"prompt\":")) == BT_OK &&
        (rc = rt_http_put_string(&out, bt_buf_str(&text))) == BT_OK) {
        rc = rt_http_put(&out, "}");
    }
    if (rc < 0) {
        snprintf(param, sizeof(param), "%s", spec->param);
        rt_http_ex_error(ex, rc, param, bt_err_msg(&err, rc));
    } else {
        rt_http_respond(ex->conn, 200, "application/json", bt_buf_str(&out));
    }
    bt_ids_fini(&ids);
    bt_buf_fini(&text);
    bt_buf_fini(&out);
}

static void detokenize(struct rt_http_conn *c)
{
    struct rt_http_ex *ex = rt_http_ex_create(c);

    if (ex) {
        rt_http_read(ex, read_detokenize, detokenize_it);
    }
}

static const struct route {
    const char *path;
    bool post;
    unsigned access; /* BT_ACCESS_ bits of which a caller needs one; 0 = operators alone */
    bool metrics;    /* open to everybody if configured so */
    void (*run)(struct rt_http_conn *c);
} routes[] = {
    {"/v1/chat/completions", .post = true, .access = BT_ACCESS_CLIENT, .run = chat},
    {"/v1/completions", .post = true, .access = BT_ACCESS_CLIENT, .run = completions},
    {MODELS_PATH, .access = BT_ACCESS_CLIENT, .run = models},
    {"/health", .access = BT_ACCESS_OPEN, .run = health},
    {"/ready", .access = BT_ACCESS_OPEN, .run = ready},
    {"/metrics", .access = BT_ACCESS_OPERATOR | BT_ACCESS_SCRAPER, .metrics = true, .run = metrics},
    {"/tokenize", .post = true, .access = BT_ACCESS_CLIENT, .run = tokenize},
    {"/detokenize", .post = true, .access = BT_ACCESS_CLIENT, .run = detokenize},
};

static const struct route *find(const char *path)
{
    static const struct route by_name = {MODELS_PATH, .access = BT_ACCESS_CLIENT, .run = one_model};

    if (strncmp(path, MODELS_PATH "/", sizeof(MODELS_PATH)) == 0 && path[sizeof(MODELS_PATH)]) {
        return &by_name;
    }
    for (size_t i = 0; i < BT_ARRAY_LEN(routes); i++) {
        if (strcmp(routes[i].path, path) == 0) {
            return &routes[i];
        }
    }
    return NULL;
}

/* OPTIONS and methods that the path does not know. */
static void other_method(struct rt_http_conn *c, const struct route *r)
{
    const char *allow = r->post ? "POST, OPTIONS" : "GET, HEAD, OPTIONS";
    bool options = c->parser.method == HTTP_OPTIONS;
    struct bt_buf b = {0};
    int rc = options ? BT_OK
                     : rt_http_put_error(&b, 405, NULL, "method_not_allowed",
                                         "this path does not know the method");

    if (rc == BT_OK) {
        rc = bt_buf_printf(&c->out,
                           "HTTP/1.1 %s\r\nAllow: %s\r\nContent-Type: application/json\r\n"
                           "Content-Length: %zu\r\nConnection: %s\r\n\r\n",
                           options ? "200 OK" : "405 Method Not Allowed", allow, b.n,
                           c->close_after ? "close" : "keep-alive");
    }
    if (rc == BT_OK && c->parser.method != HTTP_HEAD) {
        rc = bt_buf_add(&c->out, b.p, b.n);
    }
    bt_buf_fini(&b);
    if (rc < 0) {
        rt_http_conn_close(c);
    } else {
        rt_http_conn_done(c);
    }
}

/* The bits of which a caller needs one; r may be NULL: who may do anything is told that a path does
 * not exist. */
static unsigned access_of(const struct rt_http_conn *c, const struct route *r)
{
    unsigned access = r && r->access ? r->access : BT_ACCESS_OPERATOR;

    return !r                                       ? BT_ACCESS_ANY
           : r->metrics && c->h->conf->open_metrics ? access | BT_ACCESS_OPEN
                                                    : access;
}

/* What the request asks for, NULL = nothing there is, and whether it may. */
static const struct route *look_up(struct rt_http_conn *c, int *ret_rc, struct bt_err *err)
{
    const struct route *r;

    c->url[strcspn(c->url, "?#")] = '\0';
    r = find(c->url);
    *ret_rc = authorize(c, access_of(c, r), &c->who, err);
    return r;
}

int rt_http_still_may(struct rt_http_conn *c)
{
    struct bt_who who;

    return authorize(c, access_of(c, find(c->url)), &who, NULL);
}

bool rt_http_takes_body(struct rt_http_conn *c)
{
    int rc;
    const struct route *r = look_up(c, &rc, NULL);

    return rc == BT_OK && r && r->post && c->parser.method == HTTP_POST;
}

void rt_http_route(struct rt_http_conn *c)
{
    unsigned method = c->parser.method;
    struct bt_err err = {0};
    int rc;
    const struct route *r = look_up(c, &rc, &err);

    if (rc < 0) {
        denied(c, rc, &err);
    } else if (!r) {
        rt_http_respond_error(c, 404, NULL, "not_found", "there is nothing at this path");
    } else if (r->post ? method == HTTP_POST : method == HTTP_GET || method == HTTP_HEAD) {
        r->run(c);
    } else {
        other_method(c, r);
    }
}
