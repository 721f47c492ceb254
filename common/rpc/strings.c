/* Strings of received messages. protobuf-c hands them out as C strings: a NUL byte inside would cut
 * them in silence, so that one side checks another text than the sender wrote; and what is not
 * UTF-8 could not be sent on. Walks the wire bytes of a message that protobuf-c has accepted, as
 * deep as its type nests. Pure. */
#include "common/rpc/rpc_int.h"
#include "common/text/utf8.h"

#include <stdio.h>

#define MAX_DEPTH 16

static bool take_varint(struct bt_rpc_walk *w, uint64_t *ret_v)
{
    uint64_t v = 0;

    for (unsigned shift = 0; shift < 70 && w->p < w->end; shift += 7) {
        uint8_t b = *w->p++;

        v |= shift < 64 ? (uint64_t)(b & 0x7f) << shift : 0;
        if (!(b & 0x80)) {
            *ret_v = v;
            return true;
        }
    }
    return false;
}

bool bt_rpc_take_field(struct bt_rpc_walk *w, uint32_t *ret_id, struct bt_str *ret_value)
{
    uint64_t tag, n;

    if (!take_varint(w, &tag)) {
        return false;
    }
    *ret_id = (uint32_t)(tag >> 3);
    *ret_value = (struct bt_str){NULL, 0};
    switch (tag & 7) {
    case 0:
        return take_varint(w, &n);
    case 1:
        n = 8;
        break;
    case 2:
        if (!take_varint(w, &n)) {
            return false;
        }
        ret_value->p = (const char *)w->p;
        ret_value->n = (size_t)n;
        break;
    case 5:
        n = 4;
        break;
    default:
        return false;
    }
    if (n > (uint64_t)(w->end - w->p)) {
        return false;
    }
    w->p += n;
    return true;
}

static int check_string(const char *name, struct bt_str s, char *ret_why, size_t cap)
{
    const char *nul = s.n ? memchr(s.p, 0, s.n) : NULL;
    size_t valid = bt_utf8_valid_prefix(s.p, s.n);

    if (valid != s.n) {
        snprintf(ret_why, cap, "%s is not UTF-8 at byte %zu", name, valid);
        return BT_E_FORMAT;
    }
    if (nul) {
        snprintf(ret_why, cap, "%s has a NUL at byte %zu", name, (size_t)(nul - s.p));
        return BT_E_FORMAT;
    }
    return BT_OK;
}

static int check(const ProtobufCMessageDescriptor *desc,
                 struct bt_rpc_walk w,
                 int depth,
                 char *ret_why,
                 size_t cap)
{
    struct bt_str v;
    uint32_t id;
    int rc = BT_OK;

    if (depth > MAX_DEPTH) {
        snprintf(ret_why, cap, "%s nests too deep", desc->name);
        return BT_E_FORMAT;
    }
    while (rc == BT_OK && w.p < w.end) {
        const ProtobufCFieldDescriptor *f;

        if (!bt_rpc_take_field(&w, &id, &v)) {
            snprintf(ret_why, cap, "malformed %s", desc->name);
            return BT_E_FORMAT;
        }
        f = v.p ? protobuf_c_message_descriptor_get_field(desc, id) : NULL;
        if (f && f->type == PROTOBUF_C_TYPE_STRING) {
            rc = check_string(f->name, v, ret_why, cap);
        } else if (f && f->type == PROTOBUF_C_TYPE_MESSAGE) {
            const uint8_t *p = (const uint8_t *)v.p;

            rc = check(f->descriptor, (struct bt_rpc_walk){p, p + v.n}, depth + 1, ret_why, cap);
        }
    }
    return rc;
}

int bt_rpc_check_strings(
    const ProtobufCMessageDescriptor *desc, const uint8_t *p, size_t n, char *ret_why, size_t cap)
{
    return check(desc, (struct bt_rpc_walk){p, p + n}, 0, ret_why, cap);
}
