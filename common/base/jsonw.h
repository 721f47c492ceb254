/* Writes JSON into a buffer: one call a value, commas and escapes by themselves. Errors (memory,
 * the buffer's bound) stick: the rest does nothing, bt_jw_end_all tells. One thread.
 *
 *   struct bt_jsonw w = {.b = &buf};
 *   bt_jw_open(&w, NULL, '{');
 *   bt_jw_str(&w, "name", "p0");
 *   bt_jw_close(&w, '}');
 *   rc = w.rc;
 */
#ifndef BT_BASE_JSONW_H
#define BT_BASE_JSONW_H

#include "common/base/buf.h"

struct bt_jsonw {
    struct bt_buf *b; /* borrowed */
    int rc;           /* the first error */
    bool comma;       /* a value is before the next one */
};

/* key: NULL in lists and at the top. */
void bt_jw_open(struct bt_jsonw *w, const char *key, char bracket);
void bt_jw_close(struct bt_jsonw *w, char bracket);
/* What is no valid UTF-8 becomes U+FFFD; NULL becomes null. */
void bt_jw_str(struct bt_jsonw *w, const char *key, const char *value);
void bt_jw_strn(struct bt_jsonw *w, const char *key, struct bt_str value);
void bt_jw_u64(struct bt_jsonw *w, const char *key, uint64_t value);
void bt_jw_i64(struct bt_jsonw *w, const char *key, int64_t value);
/* With so many decimals, trailing zeros dropped; null where it is not finite. */
void bt_jw_f64(struct bt_jsonw *w, const char *key, double value, int decimals);
void bt_jw_bool(struct bt_jsonw *w, const char *key, bool value);

#endif
