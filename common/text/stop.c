/* One Knuth-Morris-Pratt machine for each string, in step; see stop.h. */
#include "common/text/stop.h"

#include "common/text/utf8.h"

#include <stdlib.h>

struct pattern {
    struct bt_str text; /* in the object's own memory */
    uint16_t *fail;     /* n + 1: longest true border of each prefix */
    size_t state;       /* bytes matched */
    size_t next;        /* the same while a push is under way */
};

struct bt_stop {
    size_t n;
    int matched; /* -1 = none yet */
    size_t n_held;
    char held[BT_STOP_MAX_BYTES]; /* the withheld tail */
    struct pattern pat[BT_STOP_MAX_STRINGS];
};

int bt_stop_check(const struct bt_str *strings, size_t n, struct bt_err *err)
{
    if (n > BT_STOP_MAX_STRINGS) {
        return BT_FAIL(err, BT_E_TOO_LARGE, "%zu stop strings; at most %d are possible", n,
                       BT_STOP_MAX_STRINGS);
    }
    for (size_t i = 0; i < n; i++) {
        if (strings[i].n == 0) {
            return BT_FAIL(err, BT_E_INVALID, "stop string %zu is empty", i);
        }
        if (strings[i].n > BT_STOP_MAX_BYTES) {
            return BT_FAIL(err, BT_E_TOO_LARGE,
                           "stop string %zu has %zu bytes; at most %d are possible", i,
                           strings[i].n, BT_STOP_MAX_BYTES);
        }
        if (bt_utf8_valid_prefix(strings[i].p, strings[i].n) != strings[i].n) {
            return BT_FAIL(err, BT_E_INVALID, "stop string %zu is not UTF-8", i);
        }
    }
    return BT_OK;
}

/* State after byte `b`. */
static size_t step(const struct pattern *p, size_t state, char b)
{
    if (state == p->text.n) {
        state = p->fail[state];
    }
    while (state && p->text.p[state] != b) {
        state = p->fail[state];
    }
    return p->text.p[state] == b ? state + 1 : 0;
}

int bt_stop_create(const struct bt_str *strings,
                   size_t n,
                   struct bt_stop **ret_stop,
                   struct bt_err *err)
{
    struct bt_stop *s;
    size_t bytes = 0;
    uint16_t *fail;
    char *text;
    int rc = bt_stop_check(strings, n, err);

    if (rc < 0) {
        return rc;
    }
    for (size_t i = 0; i < n; i++) {
        bytes += (strings[i].n + 1) * (sizeof(*fail) + 1);
    }
    s = calloc(1, sizeof(*s) + bytes);
    if (!s) {
        return BT_FAIL(err, BT_E_NOMEM, "no room for stop strings");
    }
    s->n = n;
    s->matched = -1;
    fail = (uint16_t *)(s + 1);
    text = (char *)fail + bytes / (sizeof(*fail) + 1) * sizeof(*fail);
    for (size_t i = 0; i < n; i++) {
        struct pattern *p = &s->pat[i];

        memcpy(text, strings[i].p, strings[i].n);
        p->text = (struct bt_str){text, strings[i].n};
        p->fail = fail;
        text += strings[i].n + 1;
        fail += strings[i].n + 1;
        for (size_t k = 1; k < p->text.n; k++) {
            p->fail[k + 1] = (uint16_t)step(p, p->fail[k], p->text.p[k]);
        }
    }
    *ret_stop = s;
    return BT_OK;
}

void bt_stop_destroy(struct bt_stop *s)
{
    free(s);
}

/* Runs all machines over the text. Returns the string that matched, or -1, and in *ret_n the bytes
 * taken. */
static int scan(struct bt_stop *s, struct bt_str text, size_t *ret_n)
{
    for (size_t i = 0; i < text.n; i++) {
        int found = -1;

        for (size_t k = 0; k < s->n; k++) {
            struct pattern *p = &s->pat[k];

            p->next = step(p, p->next, text.p[i]);
            if (p->next == p->text.n && (found < 0 || p->text.n > s->pat[found].text.n)) {
                found = (int)k;
            }
        }
        if (found >= 0) {
            *ret_n = i + 1;
            return found;
        }
    }
    *ret_n = text.n;
    return -1;
}

int bt_stop_push(struct bt_stop *s, struct bt_str text, struct bt_buf *out, int *ret_matched)
{
    size_t n, tail = 0, total, shown, from_held;
    int found, rc;

    if (s->matched >= 0) {
        *ret_matched = s->matched;
        return BT_OK;
    }
    for (size_t k = 0; k < s->n; k++) {
        s->pat[k].next = s->pat[k].state;
    }
    found = scan(s, text, &n);
    for (size_t k = 0; k < s->n; k++) {
        tail = BT_MAX(tail, s->pat[k].next);
    }
    /* Of the held bytes and the n new ones, all but the tail may be shown; a match and whatever
     * partial match began before it end the text where the match begins. */
    tail = found >= 0 ? s->pat[found].text.n : tail;
    total = s->n_held + n;
    shown = total - tail;
    from_held = BT_MIN(shown, s->n_held);
    rc = bt_buf_reserve(out, shown);
    if (rc < 0) {
        return rc;
    }
    rc = bt_buf_add(out, s->held, from_held);
    if (rc == BT_OK) {
        rc = bt_buf_add(out, text.p, shown - from_held);
    }
    for (size_t k = 0; k < s->n; k++) {
        s->pat[k].state = s->pat[k].next;
    }
    s->n_held = 0;
    s->matched = found;
    if (found < 0) {
        memmove(s->held, s->held + from_held, total - n - from_held);
        s->n_held = total - n - from_held;
        n -= shown - from_held;
        if (n) {
            memcpy(s->held + s->n_held, text.p + (shown - from_held), n);
        }
        s->n_held += n;
    }
    *ret_matched = found;
    return rc;
}

int bt_stop_flush(struct bt_stop *s, struct bt_buf *out)
{
    int rc = s->matched < 0 ? bt_buf_add(out, s->held, s->n_held) : BT_OK;

    if (rc == BT_OK) {
        s->n_held = 0;
        for (size_t k = 0; k < s->n; k++) {
            s->pat[k].state = 0;
        }
    }
    return rc;
}

size_t bt_stop_n_held(const struct bt_stop *s)
{
    return s->n_held;
}
