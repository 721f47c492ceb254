/* Requests to the API server, with libcurl. What the server says is bounded and parsed with care.
 */
#include "deploy/ctl/kube.h"

#include "common/base/buf.h"
#include "common/file/json.h"
#include "common/thr/time.h"
#include "deploy/ctl/cluster.h"

#include <curl/curl.h>
#include <stdlib.h>
#include <string.h>

#define ANSWER_MAX (8u << 20)

static size_t on_body(char *p, size_t size, size_t n, void *user)
{
    return bt_buf_add(user, p, size * n) == BT_OK ? size * n : 0;
}

static struct curl_blob blob_of(const char *s)
{
    return (struct curl_blob){(void *)(uintptr_t)s, strlen(s), CURL_BLOB_NOCOPY};
}

static bool set_tls(CURL *c, const struct kube *k)
{
    bool ok = curl_easy_setopt(c, CURLOPT_SSL_VERIFYPEER, 1L) == CURLE_OK &&
              curl_easy_setopt(c, CURLOPT_SSL_VERIFYHOST, 2L) == CURLE_OK &&
              curl_easy_setopt(c, CURLOPT_SSLVERSION, (long)CURL_SSLVERSION_TLSv1_2) == CURLE_OK;
    struct curl_blob b;

    if (ok && k->ca) {
        b = blob_of(k->ca);
        ok = curl_easy_setopt(c, CURLOPT_CAINFO_BLOB, &b) == CURLE_OK &&
             curl_easy_setopt(c, CURLOPT_CAPATH, NULL) == CURLE_OK;
    }
    if (ok && k->cert) {
        b = blob_of(k->cert);
        ok = curl_easy_setopt(c, CURLOPT_SSLCERT_BLOB, &b) == CURLE_OK &&
             curl_easy_setopt(c, CURLOPT_SSLCERTTYPE, "PEM") == CURLE_OK;
        b = blob_of(k->key);
        ok = ok && curl_easy_setopt(c, CURLOPT_SSLKEY_BLOB, &b) == CURLE_OK &&
             curl_easy_setopt(c, CURLOPT_SSLKEYTYPE, "PEM") == CURLE_OK;
    }
    return ok;
}

static struct curl_slist *add(struct curl_slist *list, const char *key, const char *value)
{
    struct bt_buf b = {0};
    struct curl_slist *next = NULL;

    if (bt_buf_printf(&b, "%s: %s", key, value) == BT_OK && bt_buf_add(&b, "", 1) == BT_OK) {
        next = curl_slist_append(list, b.p);
    }
    if (b.p) {
        explicit_bzero(b.p, b.n);
    }
    bt_buf_fini(&b);
    return next ? next : list;
}

static struct curl_slist *headers_of(const struct kube *k, const struct kube_request *r)
{
    struct curl_slist *list = add(NULL, "Accept", "application/json");

    if (r->body) {
        list = add(list, "Content-Type", r->content_type ? r->content_type : "application/json");
    }
    if (k->token) {
        struct bt_buf b = {0};

        if (bt_buf_printf(&b, "Bearer %s", k->token) == BT_OK && bt_buf_add(&b, "", 1) == BT_OK) {
            list = add(list, "Authorization", b.p);
            explicit_bzero(b.p, b.n);
        }
        bt_buf_fini(&b);
    }
    return list;
}

static int tell_curl(const struct kube *k, CURLcode rc, const char *detail)
{
    const char *text = detail[0] ? detail : curl_easy_strerror(rc);

    if (rc == CURLE_PEER_FAILED_VERIFICATION) {
        fprintf(stderr, "batonctl: %s: its certificate is not to be trusted: %s\n", k->server,
                text);
        return CTL_DENIED;
    }
    fprintf(stderr, "batonctl: %s: %s\n", k->server, text);
    return rc == CURLE_OPERATION_TIMEDOUT ? CTL_TIMEOUT : CTL_UNREACHABLE;
}

/* What went wrong, in the server's words. */
static int
tell_status(const struct kube *k, const struct kube_request *r, long status, const json_t *answer)
{
    const char *m = json_string_value(json_object_get(answer, "message"));
    char text[400];

    snprintf(text, sizeof(text), "%s", m ? m : "no reason given");
    for (char *p = text; *p; p++) {
        *p = (unsigned char)*p < ' ' || *p == 127 ? '?' : *p;
    }
    if (!(status == 409 && r->quiet_conflict) && !(status == 404 && r->quiet_missing)) {
        fprintf(stderr, "batonctl: %s %s: %ld: %s\n", r->method, r->path, status, text);
    }
    switch (status) {
    case 401:
    case 403:
        return CTL_DENIED;
    case 404:
        return CTL_NOT_FOUND;
    case 429:
    case 503: /* asked again until the time was over */
        return CTL_TIMEOUT;
    default:
        return CTL_FAILED;
    }
}

/* One exchange. CTL_OK: there was an answer with *ret_status, whose body is in `to`. */
static int exchange(const struct kube *k,
                    const struct kube_request *r,
                    CURL *c,
                    struct bt_buf *to,
                    long *ret_status)
{
    uint64_t now = bt_now_ns();
    char detail[CURL_ERROR_SIZE] = "", url[1024];
    char *body = r->body ? json_dumps(r->body, JSON_COMPACT) : NULL;
    struct curl_slist *headers = headers_of(k, r);
    CURLcode rc = CURLE_OUT_OF_MEMORY;

    snprintf(url, sizeof(url), "%s%s", k->server, r->path);
    if (headers && (body || !r->body) && set_tls(c, k)) {
        curl_easy_setopt(c, CURLOPT_URL, url);
        curl_easy_setopt(c, CURLOPT_PROTOCOLS_STR, "https");
        curl_easy_setopt(c, CURLOPT_FOLLOWLOCATION, 0L);
        curl_easy_setopt(c, CURLOPT_NOSIGNAL, 1L);
        curl_easy_setopt(c, CURLOPT_ERRORBUFFER, detail);
        curl_easy_setopt(c, CURLOPT_HTTPHEADER, headers);
        curl_easy_setopt(c, CURLOPT_CUSTOMREQUEST, r->method);
        curl_easy_setopt(c, CURLOPT_USERAGENT, "batonctl/" BT_VERSION);
        curl_easy_setopt(c, CURLOPT_WRITEFUNCTION, on_body);
        curl_easy_setopt(c, CURLOPT_WRITEDATA, to);
        curl_easy_setopt(c, CURLOPT_TIMEOUT_MS,
                         r->deadline_ns > now ? (long)((r->deadline_ns - now) / BT_NS_PER_MS) + 1
                                              : 1L);
        if (body) {
            curl_easy_setopt(c, CURLOPT_POSTFIELDS, body);
        }
        rc = curl_easy_perform(c);
    }
    curl_slist_free_all(headers);
    free(body);
    if (rc != CURLE_OK) {
        return tell_curl(k, rc, detail);
    }
    curl_easy_getinfo(c, CURLINFO_RESPONSE_CODE, ret_status);
    return CTL_OK;
}

/* Seconds that the server asks to wait. */
static uint64_t pause_of(CURL *c)
{
    curl_off_t s = 0;

    curl_easy_getinfo(c, CURLINFO_RETRY_AFTER, &s);
    return s > 0 && s < 60 ? (uint64_t)s * BT_NS_PER_S : 200 * BT_NS_PER_MS;
}

static int attempt(const struct kube *k,
                   const struct kube_request *r,
                   json_t **ret_answer,
                   long *ret_status,
                   uint64_t *ret_pause_ns)
{
    const struct bt_json_caps caps = {.bytes = ANSWER_MAX, .values = 400000, .depth = 64};
    struct bt_buf body = {.max = ANSWER_MAX};
    CURL *c = curl_easy_init();
    struct bt_err err = {0};
    json_t *answer = NULL;
    int code = c ? exchange(k, r, c, &body, ret_status) : CTL_FAILED;

    *ret_pause_ns = c ? pause_of(c) : 0;
    curl_easy_cleanup(c);
    if (code == CTL_OK &&
        bt_json_parse(bt_buf_str(&body), "answer of the API server", &caps, &answer, &err) < 0 &&
        *ret_status / 100 == 2) {
        fprintf(stderr, "batonctl: %s\n", bt_err_msg(&err, BT_E_FORMAT));
        code = CTL_FAILED;
    }
    bt_buf_fini(&body);
    if (code == CTL_OK && *ret_status / 100 == 2) {
        *ret_answer = answer;
        return CTL_OK;
    }
    if (code == CTL_OK && ((*ret_status != 429 && *ret_status != 503) ||
                           bt_now_ns() + *ret_pause_ns >= r->deadline_ns)) {
        code = tell_status(k, r, *ret_status, answer);
    } else if (code == CTL_OK) {
        code = -1; /* once more */
    }
    json_decref(answer);
    return code;
}

int kube_call(const struct kube *k,
              const struct kube_request *r,
              json_t **ret_answer,
              long *ret_status)
{
    uint64_t pause;
    long status;
    int code;

    do {
        status = 0;
        code = attempt(k, r, ret_answer, &status, &pause);
        if (code < 0) {
            ctl_sleep(pause);
        }
    } while (code < 0);
    if (ret_status) {
        *ret_status = status;
    }
    return code;
}
