/* JSON text: strings, errors, log probabilities. Any thread. */
#include "router/http/http_int.h"

#include "common/text/utf8.h"

int rt_http_put(struct bt_buf *b, const char *text)
{
    return bt_buf_add(b, text, strlen(text));
}

/* `p` is UTF-8. Room for the worst case is made first, so that the loop only copies. */
static int put_escaped(struct bt_buf *b, const char *p, size_t n)
{
    static const char hex[] = "0123456789abcdef";
    int rc = bt_buf_reserve(b, 6 * n + 2);
    char *to;

    if (rc < 0) {
        return rc;
    }
    to = b->p + b->n;
    for (size_t i = 0; i < n; i++) {
        unsigned char c = (unsigned char)p[i];

        if (BT_LIKELY(c >= 0x20 && c != '"' && c != '\\')) {
            *to++ = (char)c;
            continue;
        }
        *to++ = '\\';
        switch (c) {
        case '"':
        case '\\':
            *to++ = (char)c;
            break;
        case '\n':
            *to++ = 'n';
            break;
        case '\r':
            *to++ = 'r';
            break;
        case '\t':
            *to++ = 't';
            break;
        default:
            memcpy(to, "u00", 3);
            to[3] = hex[c >> 4];
            to[4] = hex[c & 15];
            to += 5;
        }
    }
    b->n = (size_t)(to - b->p);
    return BT_OK;
}

int rt_http_put_string(struct bt_buf *b, struct bt_str s)
{
    int rc;

    if ((rc = bt_buf_add(b, "\"", 1)) < 0 || (rc = put_escaped(b, s.p, s.n)) < 0) {
        return rc;
    }
    return bt_buf_add(b, "\"", 1);
}

static int put_lossy(struct bt_buf *b, struct bt_str s)
{
    int rc = BT_OK;

    while (rc == BT_OK && s.n > 0) {
        size_t n = bt_utf8_valid_prefix(s.p, s.n);

        rc = put_escaped(b, s.p, n);
        if (rc == BT_OK && n < s.n) {
            rc = rt_http_put(b, "\xef\xbf\xbd");
            n++;
        }
        s.p += n;
        s.n -= n;
    }
    return rc;
}

int rt_http_put_lossy(struct bt_buf *b, struct bt_str s)
{
    int rc;

    if ((rc = bt_buf_add(b, "\"", 1)) < 0 || (rc = put_lossy(b, s)) < 0) {
        return rc;
    }
    return bt_buf_add(b, "\"", 1);
}

int rt_http_put_error(
    struct bt_buf *b, int status, const char *param, const char *code, const char *msg)
{
    const char *type = status == 401   ? "authentication_error"
                       : status == 429 ? "rate_limit_error"
                       : status >= 500 ? "server_error"
                                       : "invalid_request_error";
    int rc;

    if ((rc = rt_http_put(b, "{\"error\":{\"message\":")) < 0 ||
        (rc = rt_http_put_lossy(b, bt_str_of(msg))) < 0 ||
        (rc = bt_buf_printf(b, ",\"type\":\"%s\",\"param\":", type)) < 0 ||
        (rc = param && param[0] ? rt_http_put_lossy(b, bt_str_of(param)) : rt_http_put(b, "null")) <
            0) {
        return rc;
    }
    return code ? bt_buf_printf(b, ",\"code\":\"%s\"}}", code) : rt_http_put(b, ",\"code\":null}}");
}

/* --- log probabilities ----------------------------------------------------------------------- */

/* "token":..,"logprob":..,"bytes":[..] */
static int put_token(struct bt_buf *b, const struct bt_tokenizer *tok, int32_t id, float logprob)
{
    struct bt_str bytes = bt_tokenizer_token_bytes(tok, id);
    int rc;

    if ((rc = rt_http_put(b, "{\"token\":")) < 0 || (rc = rt_http_put_lossy(b, bytes)) < 0 ||
        (rc = bt_buf_printf(b, ",\"logprob\":%.7g,\"bytes\":[", (double)logprob)) < 0) {
        return rc;
    }
    for (size_t i = 0; rc == BT_OK && i < bytes.n; i++) {
        rc = bt_buf_printf(b, i ? ",%u" : "%u", (unsigned char)bytes.p[i]);
    }
    return rc < 0 ? rc : rt_http_put(b, "]");
}

int rt_http_put_chat_logprobs(struct bt_buf *b,
                              const struct bt_tokenizer *tok,
                              const struct rt_http_lp *lp,
                              size_t n)
{
    int rc = BT_OK;

    for (size_t i = 0; rc == BT_OK && i < n; i++) {
        if (i > 0) {
            rc = rt_http_put(b, ",");
        }
        if (rc == BT_OK) {
            rc = put_token(b, tok, lp[i].id, lp[i].logprob);
        }
        if (rc == BT_OK) {
            rc = rt_http_put(b, ",\"top_logprobs\":[");
        }
        for (int k = 0; rc == BT_OK && k < lp[i].n_top; k++) {
            if (k > 0) {
                rc = rt_http_put(b, ",");
            }
            if (rc == BT_OK) {
                rc = put_token(b, tok, lp[i].top[k].id, lp[i].top[k].logprob);
            }
            if (rc == BT_OK) {
                rc = rt_http_put(b, "}");
            }
        }
        if (rc == BT_OK) {
            rc = rt_http_put(b, "]}");
        }
    }
    return rc;
}

/* A token as a key: text, or "bytes:\xf0\x9f" where it is no whole character. */
static int put_name(struct bt_buf *b, struct bt_str s)
{
    int rc;

    if (bt_utf8_valid_prefix(s.p, s.n) == s.n) {
        return rt_http_put_string(b, s);
    }
    rc = rt_http_put(b, "\"bytes:");
    for (size_t i = 0; rc == BT_OK && i < s.n; i++) {
        rc = bt_buf_printf(b, "\\\\x%02x", (unsigned char)s.p[i]);
    }
    return rc < 0 ? rc : rt_http_put(b, "\"");
}

static int put_pair(struct bt_buf *b, struct bt_str name, float logprob)
{
    int rc = put_name(b, name);

    return rc < 0 ? rc : bt_buf_printf(b, ":%.7g", (double)logprob);
}

/* {"token": logprob, ...} with the chosen token in it. Of tokens with the same bytes the first
 * counts, since a key may stand but once. */
static int put_top(struct bt_buf *b, const struct bt_tokenizer *tok, const struct rt_http_lp *lp)
{
    struct bt_str chosen = bt_tokenizer_token_bytes(tok, lp->id);
    int rc = rt_http_put(b, "{");

    if (rc == BT_OK) {
        rc = put_pair(b, chosen, lp->logprob);
    }
    for (int k = 0; rc == BT_OK && k < lp->n_top; k++) {
        struct bt_str s = bt_tokenizer_token_bytes(tok, lp->top[k].id);
        bool twice = bt_str_eq(s, chosen);

        for (int j = 0; j < k; j++) {
            twice = twice || bt_str_eq(s, bt_tokenizer_token_bytes(tok, lp->top[j].id));
        }
        if (!twice && (rc = rt_http_put(b, ",")) == BT_OK) {
            rc = put_pair(b, s, lp->top[k].logprob);
        }
    }
    return rc < 0 ? rc : rt_http_put(b, "}");
}

int rt_http_put_legacy_logprobs(struct rt_http_choice *ch,
                                const struct bt_tokenizer *tok,
                                const struct rt_http_lp *lp,
                                size_t n)
{
    struct bt_buf *lists[] = {&ch->lp, &ch->lp2, &ch->lp3, &ch->lp4};
    int rc = BT_OK;

    for (size_t i = 0; rc == BT_OK && i < n; i++) {
        struct bt_str bytes = bt_tokenizer_token_bytes(tok, lp[i].id);

        for (size_t k = 0; rc == BT_OK && k < 4 && lists[k]->n > 0; k++) {
            rc = rt_http_put(lists[k], ",");
        }
        if (rc < 0 || (rc = put_name(&ch->lp, bytes)) < 0 ||
            (rc = bt_buf_printf(&ch->lp2, "%.7g", (double)lp[i].logprob)) < 0 ||
            (rc = put_top(&ch->lp3, tok, &lp[i])) < 0 ||
            (rc = bt_buf_printf(&ch->lp4, "%zu", ch->n_chars)) < 0) {
            return rc;
        }
        for (size_t k = 0; k < bytes.n; k++) { /* characters, not bytes */
            ch->n_chars += ((unsigned char)bytes.p[k] & 0xc0) != 0x80;
        }
    }
    return rc;
}
