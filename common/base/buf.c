/* Growable buffers: doubling, capped, content intact on failure. */
#include "common/base/buf.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

/* Room for `extra` more elements of `size` bytes behind the `n` used ones. */
static int grow(void **p, size_t *cap, size_t n, size_t max, size_t extra, size_t size)
{
    size_t want, bytes, next;
    void *q;

    if (!bt_add_size(n, extra, &want) || (max && want > max)) {
        return BT_E_TOO_LARGE;
    }
    if (want <= *cap) {
        return BT_OK;
    }
    next = *cap ? *cap : 64;
    while (next < want) {
        if (!bt_mul_size(next, 2, &next)) {
            return BT_E_TOO_LARGE;
        }
    }
    if (!bt_mul_size(next, size, &bytes)) {
        return BT_E_TOO_LARGE;
    }
    q = realloc(*p, bytes);
    if (!q) {
        return BT_E_NOMEM;
    }
    *p = q;
    *cap = next;
    return BT_OK;
}

int bt_buf_reserve(struct bt_buf *b, size_t extra)
{
    void *p = b->p;
    int rc = grow(&p, &b->cap, b->n, b->max, extra, 1);

    b->p = p;
    return rc;
}

int bt_buf_add(struct bt_buf *b, const void *p, size_t n)
{
    int rc = bt_buf_reserve(b, n);

    if (rc == BT_OK && n) {
        memcpy(b->p + b->n, p, n);
        b->n += n;
    }
    return rc;
}

int bt_buf_printf(struct bt_buf *b, const char *fmt, ...)
{
    va_list ap;
    int n, rc;

    va_start(ap, fmt);
    n = vsnprintf(NULL, 0, fmt, ap);
    va_end(ap);
    if (n < 0) {
        return BT_E_INVALID;
    }
    rc = bt_buf_reserve(b, (size_t)n + 1);
    if (rc == BT_OK) {
        va_start(ap, fmt);
        vsnprintf(b->p + b->n, (size_t)n + 1, fmt, ap);
        va_end(ap);
        b->n += (size_t)n;
    }
    return rc;
}

void bt_buf_fini(struct bt_buf *b)
{
    free(b->p);
    *b = (struct bt_buf){0};
}

int bt_ids_reserve(struct bt_ids *a, size_t extra)
{
    void *p = a->p;
    int rc = grow(&p, &a->cap, a->n, a->max, extra, sizeof(*a->p));

    a->p = p;
    return rc;
}

int bt_ids_add(struct bt_ids *a, const int32_t *p, size_t n)
{
    int rc = bt_ids_reserve(a, n);

    if (rc == BT_OK && n) {
        memcpy(a->p + a->n, p, n * sizeof(*p));
        a->n += n;
    }
    return rc;
}

int bt_ids_push(struct bt_ids *a, int32_t id)
{
    return bt_ids_add(a, &id, 1);
}

void bt_ids_fini(struct bt_ids *a)
{
    free(a->p);
    *a = (struct bt_ids){0};
}

void *bt_calloc(size_t n, size_t size)
{
    size_t bytes;

    return bt_mul_size(n, size, &bytes) ? calloc(1, bytes ? bytes : 1) : NULL;
}
