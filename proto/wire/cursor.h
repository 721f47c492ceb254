/* Little-endian fields of a message head: a cursor that knows the end. For the .c files of this
 * folder. */
#ifndef WIRE_CURSOR_H
#define WIRE_CURSOR_H

#include "common/base/rc.h"

struct cursor {
    uint8_t *p; /* only written when packing */
    size_t at, n;
    bool bad; /* a read past the end, or a zero field that is not zero */
};

static inline void put(struct cursor *c, uint64_t v, int bytes)
{
    for (int i = 0; i < bytes; i++) {
        c->p[c->at++] = (uint8_t)(v >> (8 * i));
    }
}

static inline void put_bytes(struct cursor *c, const void *p, size_t n)
{
    if (n) {
        memcpy(c->p + c->at, p, n);
    }
    c->at += n;
}

static inline uint64_t get(struct cursor *c, int bytes)
{
    uint64_t v = 0;

    if (c->n - c->at < (size_t)bytes) {
        c->bad = true;
        c->at = c->n;
        return 0;
    }
    for (int i = 0; i < bytes; i++) {
        v |= (uint64_t)c->p[c->at++] << (8 * i);
    }
    return v;
}

static inline uint32_t get32(struct cursor *c)
{
    return (uint32_t)get(c, 4);
}

static inline void get_zero(struct cursor *c, int bytes)
{
    if (get(c, bytes) != 0) {
        c->bad = true;
    }
}

static inline struct bt_str get_str(struct cursor *c, size_t n, size_t max)
{
    struct bt_str s = {(const char *)c->p + c->at, n};

    if (n > max || c->n - c->at < n) {
        c->bad = true;
        c->at = c->n;
        return (struct bt_str){0};
    }
    c->at += n;
    return s;
}

/* What a protocol's heads have in common: magic, version, type, and how many bytes they have. */
struct head_form {
    const char *name; /* of the protocol, for texts */
    uint32_t magic;
    uint32_t version_min, version_max;
    uint32_t hello, refuse; /* types that carry version 1 for ever */
};

struct head {
    uint32_t version, type, bytes;
};

static inline int
get_head(struct cursor *c, const struct head_form *form, struct head *ret, struct bt_err *err)
{
    uint32_t magic = (uint32_t)get(c, 2);
    bool frozen;

    ret->version = (uint32_t)get(c, 1);
    ret->type = (uint32_t)get(c, 1);
    ret->bytes = get32(c);
    if (c->bad || magic != form->magic) {
        return BT_FAIL(err, BT_E_PEER_PROTOCOL, "not a %s message", form->name);
    }
    frozen = ret->type == form->hello || ret->type == form->refuse;
    if (frozen ? ret->version != 1
               : ret->version < form->version_min || ret->version > form->version_max) {
        return BT_FAIL(err, BT_E_INCOMPATIBLE,
                       "%s wire version %u from the peer, this node speaks %u to %u", form->name,
                       ret->version, form->version_min, form->version_max);
    }
    return BT_OK;
}

#endif
