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

/* Bytes from p that go out as they are. */
static size_t plain_len(const unsigned char *p, size_t n)
{
    size_t i = 0;

    while (i < n && p[i] >= 0x20 && p[i] < 0x7f && p[i] != '"' && p[i] != '\\') {
        i++;
    }
    return i;
}

/* One character that is not plain; its bytes. */
static size_t put_char(struct bt_jsonw *w, const unsigned char *p, size_t n)
{
    size_t len = utf8_len(p, n);
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
    return len ? len : 1;
}

static void put_string(struct bt_jsonw *w, struct bt_str s)
{
    const unsigned char *p = (const unsigned char *)s.p;

    put(w, "\"", 1);
    for (size_t i = 0; i < s.n;) {
        size_t n = plain_len(p + i, s.n - i);

        put(w, s.p + i, n);
        i += n;
        if (i < s.n) {
            i += put_char(w, p + i, s.n - i);
        }
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

#define DIGITS 20

/* The digits of v, at least so many, into the end of text; where they begin. */
static char *digits(char text[DIGITS], uint64_t v, int least)
{
    char *p = text + DIGITS;

    for (; v > 0 || least > 0; v /= 10, least--) {
        *--p = (char)('0' + v % 10);
    }
    return p;
}

static void put_u64(struct bt_jsonw *w, uint64_t v, int least)
{
    char text[DIGITS], *p = digits(text, v, least);

    put(w, p, (size_t)(text + DIGITS - p));
}

void bt_jw_u64(struct bt_jsonw *w, const char *key, uint64_t value)
{
    begin(w, key);
    put_u64(w, value, 1);
}

void bt_jw_i64(struct bt_jsonw *w, const char *key, int64_t value)
{
    begin(w, key);
    if (value < 0) {
        put(w, "-", 1);
    }
    put_u64(w, value < 0 ? -(uint64_t)value : (uint64_t)value, 1);
}

/* Of everyday size: whole numbers do, printf takes a microsecond. */
static bool put_small(struct bt_jsonw *w, double value, int decimals)
{
    static const double scales[] = {1, 1e1, 1e2, 1e3, 1e4, 1e5, 1e6};
    uint64_t n, unit;

    if (decimals < 0 || decimals >= (int)BT_ARRAY_LEN(scales) || fabs(value) >= 1e9) {
        return false;
    }
    /* At this size a double has no places left: rounded, ties of the scaled value to even (printf
     * looks at the value itself, so its last place may differ there by one). */
    n = (uint64_t)(fabs(value) * scales[decimals] + 0x1p52 - 0x1p52);
    unit = (uint64_t)scales[decimals];
    if (signbit(value)) {
        put(w, "-", 1);
    }
    put_u64(w, n / unit, 1);
    n %= unit;
    if (n > 0) {
        for (; n % 10 == 0; n /= 10) {
            decimals--;
        }
        put(w, ".", 1);
        put_u64(w, n, decimals);
    }
    return true;
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
    if (put_small(w, value, decimals)) {
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
