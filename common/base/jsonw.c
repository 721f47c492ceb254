/* See jsonw.h. */
#include "common/base/jsonw.h"

#include <math.h>
#include <stdio.h>

static void put(struct bt_jsonw *w, const char *p, size_t n)
{
    if (w->rc == BT_OK) {
        w->rc = bt_buf_add(w->b, p, n);
    }
}

/* Bytes of the character at p, 0 = it is none. */
static size_t utf8_len(const unsigned char *p, size_t n)
{
    size_t len = p[0] < 0x80 ? 1 : p[0] < 0xc2 ? 0 : p[0] < 0xe0 ? 2 : p[0] < 0xf0 ? 3 : 4;

    if (len == 0 || len > n || p[0] > 0xf4) {
        return 0;
    }
    for (size_t i = 1; i < len; i++) {
        if ((p[i] & 0xc0) != 0x80) {
            return 0;
        }
    }
    if ((p[0] == 0xe0 && p[1] < 0xa0) || (p[0] == 0xed && p[1] > 0x9f) ||
        (p[0] == 0xf0 && p[1] < 0x90) || (p[0] == 0xf4 && p[1] > 0x8f)) {
        return 0;
    }
    return len;
}

static void put_string(struct bt_jsonw *w, struct bt_str s)
{
    put(w, "\"", 1);
    for (size_t i = 0; i < s.n;) {
        const unsigned char *p = (const unsigned char *)s.p + i;
        size_t len = utf8_len(p, s.n - i);
        char text[8];

        if (len == 0) {
            put(w, "\xef\xbf\xbd", 3);
        } else if (*p == '"' || *p == '\\') {
            text[0] = '\\';
            text[1] = (char)*p;
            put(w, text, 2);
        } else if (*p < 0x20 || *p == 0x7f) {
            put(w, text, (size_t)snprintf(text, sizeof(text), "\\u%04x", *p));
        } else {
            put(w, (const char *)p, len);
        }
        i += len ? len : 1;
    }
    put(w, "\"", 1);
}

static void begin(struct bt_jsonw *w, const char *key)
{
    if (w->comma) {
        put(w, ",", 1);
    }
    w->comma = true;
    if (key) {
        put_string(w, bt_str_of(key));
        put(w, ":", 1);
    }
}

void bt_jw_open(struct bt_jsonw *w, const char *key, char bracket)
{
    begin(w, key);
    put(w, &bracket, 1);
    w->comma = false;
}

void bt_jw_close(struct bt_jsonw *w, char bracket)
{
    put(w, &bracket, 1);
    w->comma = true;
}

void bt_jw_strn(struct bt_jsonw *w, const char *key, struct bt_str value)
{
    begin(w, key);
    put_string(w, value);
}

void bt_jw_str(struct bt_jsonw *w, const char *key, const char *value)
{
    begin(w, key);
    if (value) {
        put_string(w, bt_str_of(value));
    } else {
        put(w, "null", 4);
    }
}

void bt_jw_u64(struct bt_jsonw *w, const char *key, uint64_t value)
{
    char text[24];

    begin(w, key);
    put(w, text, (size_t)snprintf(text, sizeof(text), "%llu", (unsigned long long)value));
}

void bt_jw_i64(struct bt_jsonw *w, const char *key, int64_t value)
{
    char text[24];

    begin(w, key);
    put(w, text, (size_t)snprintf(text, sizeof(text), "%lld", (long long)value));
}

void bt_jw_f64(struct bt_jsonw *w, const char *key, double value, int decimals)
{
    char text[64];
    int n;

    begin(w, key);
    if (!isfinite(value) || fabs(value) > 1e30) {
        put(w, "null", 4);
        return;
    }
    n = snprintf(text, sizeof(text), "%.*f", decimals, value);
    while (decimals > 0 && n > 1 && text[n - 1] == '0') {
        n--;
    }
    n -= text[n - 1] == '.';
    put(w, text, (size_t)n);
}

void bt_jw_bool(struct bt_jsonw *w, const char *key, bool value)
{
    begin(w, key);
    put(w, value ? "true" : "false", value ? 4 : 5);
}
