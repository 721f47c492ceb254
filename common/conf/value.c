/* Strict readers of numbers, sizes, durations, truth values, hex and addresses. */
#include "common/conf/value.h"

#include "common/thr/time.h"

#include <arpa/inet.h>

int bt_read_u64(struct bt_str s, uint64_t *ret_v)
{
    uint64_t v = 0;
    bool over = false;

    if (s.n == 0) {
        return BT_E_FORMAT;
    }
    for (size_t i = 0; i < s.n; i++) {
        if (s.p[i] < '0' || s.p[i] > '9') {
            return BT_E_FORMAT;
        }
        over |= __builtin_mul_overflow(v, 10, &v);
        over |= __builtin_add_overflow(v, (uint64_t)(s.p[i] - '0'), &v);
    }
    if (over) {
        return BT_E_INVALID;
    }
    *ret_v = v;
    return BT_OK;
}

int bt_read_int(struct bt_str s, int64_t min, int64_t max, int64_t *ret_v)
{
    bool neg = s.n > 0 && s.p[0] == '-';
    uint64_t u = 0;
    int64_t v;
    int rc = bt_read_u64(neg ? (struct bt_str){s.p + 1, s.n - 1} : s, &u);

    if (rc < 0) {
        return rc;
    }
    if (u > (uint64_t)INT64_MAX + (neg ? 1 : 0)) {
        return BT_E_INVALID;
    }
    v = neg ? (int64_t)(0 - u) : (int64_t)u;
    if (v < min || v > max) {
        return BT_E_INVALID;
    }
    *ret_v = v;
    return BT_OK;
}

int bt_read_bytes(struct bt_str s, uint64_t *ret_bytes)
{
    static const char units[] = "KMGT";
    const char *u = s.n > 0 ? memchr(units, s.p[s.n - 1], sizeof(units) - 1) : NULL;
    uint64_t v = 0;
    int rc;

    if (u) {
        s.n--;
    }
    rc = bt_read_u64(s, &v);
    if (rc < 0) {
        return rc;
    }
    if (u && __builtin_mul_overflow(v, 1ull << (10 * (u - units + 1)), &v)) {
        return BT_E_INVALID;
    }
    *ret_bytes = v;
    return BT_OK;
}

int bt_read_duration(struct bt_str s, uint64_t *ret_ns)
{
    uint64_t v = 0, unit;
    int rc;

    if (bt_str_eq(s, BT_STR("0"))) {
        *ret_ns = 0;
        return BT_OK;
    }
    if (s.n > 2 && memcmp(s.p + s.n - 2, "ms", 2) == 0) {
        unit = BT_NS_PER_MS;
        s.n -= 2;
    } else if (s.n > 1 && s.p[s.n - 1] == 's') {
        unit = BT_NS_PER_S;
        s.n -= 1;
    } else {
        return BT_E_FORMAT;
    }
    rc = bt_read_u64(s, &v);
    if (rc < 0) {
        return rc;
    }
    if (__builtin_mul_overflow(v, unit, &v)) {
        return BT_E_INVALID;
    }
    *ret_ns = v;
    return BT_OK;
}

int bt_read_bool(struct bt_str s, bool *ret_v)
{
    static const char *const words[] = {"false", "true", "no", "yes", "off", "on", "0", "1"};

    for (size_t i = 0; i < BT_ARRAY_LEN(words); i++) {
        if (bt_str_eq(s, bt_str_of(words[i]))) {
            *ret_v = i % 2 == 1;
            return BT_OK;
        }
    }
    return BT_E_FORMAT;
}

static int hex_digit(char c)
{
    if (c >= '0' && c <= '9') {
        return c - '0';
    }
    c = (char)(c | 0x20);
    return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

int bt_read_hex(struct bt_str s, uint8_t *ret_bytes, size_t n)
{
    if (s.n != 2 * n) {
        return BT_E_FORMAT;
    }
    for (size_t i = 0; i < s.n; i++) {
        if (hex_digit(s.p[i]) < 0) {
            return BT_E_FORMAT;
        }
    }
    for (size_t i = 0; i < n; i++) {
        ret_bytes[i] = (uint8_t)(hex_digit(s.p[2 * i]) << 4 | hex_digit(s.p[2 * i + 1]));
    }
    return BT_OK;
}

/* Letters, digits, '-', '_', '.' for names and IPv4; hex digits, ':', '.' and a %zone for IPv6. */
static bool host_ok(struct bt_str h, bool v6)
{
    if (h.n == 0 || h.n > 253) {
        return false;
    }
    for (size_t i = 0; i < h.n; i++) {
        char c = h.p[i];
        bool alnum = (c >= '0' && c <= '9') || ((c | 0x20) >= 'a' && (c | 0x20) <= 'z');

        if (!alnum && c != '.' && c != '-' && c != '_' && !(v6 && (c == ':' || c == '%'))) {
            return false;
        }
    }
    return true;
}

int bt_addr_read(struct bt_str s, struct bt_addr *ret_addr)
{
    struct bt_addr a = {0};
    struct bt_str port;
    int64_t v;
    bool v6 = s.n > 0 && s.p[0] == '[';
    const char *colon;

    if (s.n > 5 && memcmp(s.p, "unix:", 5) == 0) {
        a.host = (struct bt_str){s.p + 5, s.n - 5};
        a.is_unix = true;
        /* sockaddr_un holds 107 characters and the end mark */
        if (a.host.p[0] != '/' || a.host.n > 107 || memchr(a.host.p, 0, a.host.n)) {
            return BT_E_FORMAT;
        }
        *ret_addr = a;
        return BT_OK;
    }
    colon = s.n > 0 ? memrchr(s.p, ':', s.n) : NULL;
    if (!colon) {
        return BT_E_FORMAT;
    }
    a.host = (struct bt_str){s.p, (size_t)(colon - s.p)};
    port = (struct bt_str){colon + 1, (size_t)(s.p + s.n - colon - 1)};
    if (v6) {
        if (a.host.n < 3 || a.host.p[a.host.n - 1] != ']') {
            return BT_E_FORMAT;
        }
        a.host = (struct bt_str){a.host.p + 1, a.host.n - 2};
    }
    if (!host_ok(a.host, v6) || port.n > 5 || bt_read_int(port, 0, UINT16_MAX, &v) < 0) {
        return BT_E_FORMAT;
    }
    a.port = (uint16_t)v;
    *ret_addr = a;
    return BT_OK;
}

bool bt_addr_is_loopback(const struct bt_addr *a)
{
    char host[64];
    struct in_addr v4;
    struct in6_addr v6;

    if (a->is_unix || bt_str_eq(a->host, BT_STR("localhost"))) {
        return true;
    }
    if (a->host.n >= sizeof(host)) {
        return false;
    }
    memcpy(host, a->host.p, a->host.n);
    host[a->host.n] = '\0';
    if (inet_pton(AF_INET, host, &v4) == 1) {
        return ntohl(v4.s_addr) >> 24 == 127;
    }
    return inet_pton(AF_INET6, host, &v6) == 1 && IN6_IS_ADDR_LOOPBACK(&v6);
}
