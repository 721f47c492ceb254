/* Growable byte buffer with a cap; the owner is whoever embeds it. Not thread safe.
 *
 * `struct bt_buf b = {0};` is an empty buffer. Every append returns BT_OK or BT_E_NOMEM /
 * BT_E_TOO_LARGE (cap passed) and leaves the content whole. */
#ifndef BT_BASE_BUF_H
#define BT_BASE_BUF_H

#include "common/base/rc.h"

struct bt_buf {
    char *p;
    size_t n;   /* bytes used */
    size_t cap; /* bytes allocated */
    size_t max; /* limit on n, 0 = none */
};

int bt_buf_reserve(struct bt_buf *b, size_t extra) BT_MUST_USE;
int bt_buf_add(struct bt_buf *b, const void *p, size_t n) BT_MUST_USE;
int bt_buf_printf(struct bt_buf *b, const char *fmt, ...) BT_PRINTF_ATTR(2, 3) BT_MUST_USE;
void bt_buf_fini(struct bt_buf *b);

static inline struct bt_str bt_buf_str(const struct bt_buf *b)
{
    return (struct bt_str){b->p, b->n};
}

/* A stretch of a text, and whether we wrote it or somebody whom nobody trusts. A text is described
 * by its runs in order, from the first byte to the last. */
struct bt_run {
    size_t end; /* offset behind its last byte */
    bool ours;
};

/* Growable array of token ids; same rules. */
struct bt_ids {
    int32_t *p;
    size_t n;
    size_t cap;
    size_t max; /* limit on n, 0 = none */
};

int bt_ids_reserve(struct bt_ids *a, size_t extra) BT_MUST_USE;
int bt_ids_add(struct bt_ids *a, const int32_t *p, size_t n) BT_MUST_USE;
int bt_ids_push(struct bt_ids *a, int32_t id) BT_MUST_USE;
void bt_ids_fini(struct bt_ids *a);

/* calloc that refuses products that overflow; NULL on failure. */
void *bt_calloc(size_t n, size_t size);

#endif
