/* Strict text-to-value readers, for configuration and for anything else that reads numbers from
 * text. The whole text must match: no blanks, no sign where none can be, no overflow. Any thread.
 */
#ifndef BT_CONF_VALUE_H
#define BT_CONF_VALUE_H

#include "common/base/rc.h"

/* Decimal integer with optional '-'. BT_OK, BT_E_FORMAT (not a number) or BT_E_INVALID (outside
 * min..max or not representable). */
int bt_read_int(struct bt_str s, int64_t min, int64_t max, int64_t *ret_v) BT_MUST_USE;
/* Decimal integer of 64 bits without sign; leading zeros allowed. Same errors. */
int bt_read_u64(struct bt_str s, uint64_t *ret_v) BT_MUST_USE;
/* Bytes: digits and an optional K, M, G or T (powers of 1024). BT_E_INVALID on overflow. */
int bt_read_bytes(struct bt_str s, uint64_t *ret_bytes) BT_MUST_USE;
/* Duration: digits and a unit, "ms" or "s"; plain "0" is zero. BT_E_INVALID on overflow. */
int bt_read_duration(struct bt_str s, uint64_t *ret_ns) BT_MUST_USE;
/* true/false, yes/no, on/off, 1/0. */
int bt_read_bool(struct bt_str s, bool *ret_v) BT_MUST_USE;
/* 2 * n hex digits (either case) to n bytes. */
int bt_read_hex(struct bt_str s, uint8_t *ret_bytes, size_t n) BT_MUST_USE;

/* A network address in text: "host:port", "[v6]:port" or "unix:/path". The parts are borrowed from
 * the text. */
struct bt_addr {
    struct bt_str host; /* without brackets; path for unix */
    uint16_t port;      /* 0 = any (listening), 0 for unix */
    bool is_unix;
};

/* Checks form only (characters, port range), resolves nothing. BT_OK or BT_E_FORMAT. */
int bt_addr_read(struct bt_str s, struct bt_addr *ret_addr) BT_MUST_USE;
/* True for unix sockets, 127.0.0.0/8, ::1 and the name "localhost". */
bool bt_addr_is_loopback(const struct bt_addr *a);

#endif
