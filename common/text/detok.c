/* A byte-wise UTF-8 machine over token bytes; see detok.h. */
#include "common/text/detok.h"

#include "common/text/unicode_int.h"

static const char replacement[3] = {'\xef', '\xbf', '\xbd'};

void bt_detok_init(struct bt_detok *d, const struct bt_tokenizer *tok, unsigned flags)
{
    *d = (struct bt_detok){.tok = tok, .flags = flags};
}

/* Where the text goes; p = NULL only counts. */
struct sink {
    char *p;
    size_t n;
};

static void put(struct sink *out, const void *p, size_t n)
{
    if (out->p) {
        memcpy(out->p + out->n, p, n);
    }
    out->n += n;
}

static void push_byte(struct bt_detok *d, uint8_t b, struct sink *out)
{
    unsigned need;

    if (d->n_held) {
        if (utf8_follows(d->held[0], d->n_held, b)) {
            if (d->n_held + 1u < utf8_need(d->held[0])) {
                d->held[d->n_held++] = b;
                return;
            }
            put(out, d->held, d->n_held);
            put(out, &b, 1);
            d->n_held = 0;
            return;
        }
        put(out, replacement, sizeof(replacement));
        d->n_held = 0;
    }
    need = utf8_need(b);
    if (need == 1) {
        put(out, &b, 1);
    } else if (need == 0) {
        put(out, replacement, sizeof(replacement));
    } else {
        d->held[d->n_held++] = b;
    }
}

static size_t run(struct bt_detok *d, struct bt_str bytes, char *out)
{
    struct sink sink = {.p = out};

    for (size_t i = 0; i < bytes.n; i++) {
        push_byte(d, (uint8_t)bytes.p[i], &sink);
    }
    return sink.n;
}

int bt_detok_push(struct bt_detok *d, int32_t id, struct bt_buf *text)
{
    struct bt_str s = bt_tokenizer_token_bytes(d->tok, id);
    struct bt_detok trial = *d;
    int rc;

    if ((d->flags & BT_DETOK_SKIP_CONTROL) && bt_tokenizer_is_control(d->tok, id)) {
        return BT_OK;
    }
    if (d->n_held == 0 && bt_utf8_valid_prefix(s.p, s.n) == s.n) {
        return bt_buf_add(text, s.p, s.n);
    }
    /* First count, so that a full buffer leaves everything as it was. */
    rc = bt_buf_reserve(text, run(&trial, s, NULL));
    if (rc == BT_OK && text->p) {
        text->n += run(d, s, text->p + text->n);
    } else if (rc == BT_OK) {
        *d = trial; /* nothing came out */
    }
    return rc;
}

int bt_detok_flush(struct bt_detok *d, struct bt_buf *text)
{
    int rc = d->n_held ? bt_buf_add(text, replacement, sizeof(replacement)) : BT_OK;

    if (rc == BT_OK) {
        d->n_held = 0;
    }
    return rc;
}

int bt_detok_all(const struct bt_tokenizer *tok,
                 const int32_t *ids,
                 size_t n,
                 unsigned flags,
                 struct bt_buf *text)
{
    struct bt_detok d;
    int rc = BT_OK;

    bt_detok_init(&d, tok, flags);
    for (size_t i = 0; i < n && rc == BT_OK; i++) {
        rc = bt_detok_push(&d, ids[i], text);
    }
    return rc == BT_OK ? bt_detok_flush(&d, text) : rc;
}
