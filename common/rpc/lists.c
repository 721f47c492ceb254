/* Long lists of integers inside of messages, which is what prompts are. protobuf-c takes three
 * looks at each byte of them and packs them one by one; so such a list is cut out of the bytes,
 * protobuf-c decodes the rest, and the list, read by bt_varints_read, is put into the message. Only
 * in the simple case: a packed list that is there once, in the message or in a field of it that is
 * there once. All else is left to protobuf-c, with the same outcome (fuzz target `messages`). Pure.
 */
#include "common/rpc/rpc_int.h"

#define LIST_MIN 256 /* bytes from which it is worth while */

static size_t varint_len(size_t v)
{
    size_t n = 1;

    for (; v >= 0x80; v >>= 7) {
        n++;
    }
    return n;
}

static bool is_list(const ProtobufCFieldDescriptor *f)
{
    return f->type == PROTOBUF_C_TYPE_INT32 && f->label == PROTOBUF_C_LABEL_REPEATED;
}

static bool is_outer(const ProtobufCFieldDescriptor *f)
{
    return f->type == PROTOBUF_C_TYPE_MESSAGE && f->label != PROTOBUF_C_LABEL_REPEATED;
}

/* A long field of a message, and what is around it. */
struct found {
    const ProtobufCFieldDescriptor *field;
    uint32_t id;
    struct bt_str head, value, tail; /* head: with the tag, which is one byte */
};

static struct bt_str from_to(const uint8_t *p, const uint8_t *end)
{
    return (struct bt_str){(const char *)p, (size_t)(end - p)};
}

/* The first long field that is a list or, if `deeper`, may hold one. False also where its head is
 * longer than need be: protobuf-c decides whether that will do. */
static bool find_long(const ProtobufCMessageDescriptor *desc,
                      struct bt_str bytes,
                      bool deeper,
                      struct found *ret)
{
    const uint8_t *begin = (const uint8_t *)bytes.p;
    struct bt_rpc_walk w = {begin, begin + bytes.n};

    while (w.p < w.end) {
        const uint8_t *at = w.p;
        const ProtobufCFieldDescriptor *f;
        struct bt_str v;
        uint32_t id;

        if (!bt_rpc_take_field(&w, &id, &v)) {
            return false;
        }
        f = v.n >= LIST_MIN ? protobuf_c_message_descriptor_get_field(desc, id) : NULL;
        if (f && (is_list(f) || (deeper && is_outer(f)))) {
            *ret = (struct found){f, id, from_to(begin, at + 1), v, from_to(w.p, w.end)};
            return id <= 15 && (const uint8_t *)v.p == at + 1 + varint_len(v.n);
        }
    }
    return false;
}

static bool is_once(struct bt_str bytes, uint32_t of)
{
    const uint8_t *begin = (const uint8_t *)bytes.p;
    struct bt_rpc_walk w = {begin, begin + bytes.n};
    struct bt_str v;
    uint32_t id;
    int n = 0;

    while (w.p < w.end) {
        if (!bt_rpc_take_field(&w, &id, &v)) {
            return false;
        }
        n += id == of;
    }
    return n == 1;
}

static bool
find(const ProtobufCMessageDescriptor *desc, struct bt_str bytes, bool deeper, struct found *ret)
{
    return find_long(desc, bytes, deeper, ret) && is_once(bytes, ret->id);
}

bool bt_rpc_cut_find(const ProtobufCMessageDescriptor *desc,
                     struct bt_str bytes,
                     struct bt_rpc_cut *ret_cut)
{
    struct found outer, list;

    if (bytes.n < LIST_MIN || !find(desc, bytes, true, &outer)) {
        return false;
    }
    if (is_list(outer.field)) {
        outer.head.n--; /* the tag goes as well */
        *ret_cut = (struct bt_rpc_cut){
            .list = outer.field, .before = outer.head, .after = outer.tail, .bytes = outer.value};
        return true;
    }
    if (!find(outer.field->descriptor, outer.value, false, &list)) {
        return false;
    }
    list.head.n--;
    *ret_cut = (struct bt_rpc_cut){.outer = outer.field,
                                   .list = list.field,
                                   .before = outer.head,
                                   .between = {list.head, list.tail},
                                   .after = outer.tail,
                                   .bytes = list.value};
    return true;
}

static size_t between_n(const struct bt_rpc_cut *cut)
{
    return cut->between[0].n + cut->between[1].n;
}

size_t bt_rpc_cut_room(const struct bt_rpc_cut *cut)
{
    return cut->before.n + varint_len(between_n(cut)) + between_n(cut) + cut->after.n;
}

static uint8_t *put(uint8_t *p, struct bt_str s)
{
    memcpy(p, s.p, s.n);
    return p + s.n;
}

size_t bt_rpc_cut_rest(const struct bt_rpc_cut *cut, uint8_t *p)
{
    const uint8_t *begin = p;

    p = put(p, cut->before);
    if (cut->outer) {
        size_t n = between_n(cut);

        for (; n >= 0x80; n >>= 7) {
            *p++ = (uint8_t)(n | 0x80);
        }
        *p++ = (uint8_t)n;
        p = put(put(p, cut->between[0]), cut->between[1]);
    }
    return (size_t)(put(p, cut->after) - begin);
}

bool bt_rpc_cut_put(const struct bt_rpc_cut *cut, ProtobufCMessage *msg, int32_t *v, size_t n)
{
    char *m = (char *)msg;

    if (cut->outer) {
        const ProtobufCFieldDescriptor *f = cut->outer;

        if ((f->flags & PROTOBUF_C_FIELD_FLAG_ONEOF) &&
            *(const uint32_t *)(const void *)(m + f->quantifier_offset) != f->id) {
            return false; /* another field of the same oneof came behind it */
        }
        m = *(char **)(void *)(m + f->offset);
    }
    *(size_t *)(void *)(m + cut->list->quantifier_offset) = n;
    *(int32_t **)(void *)(m + cut->list->offset) = v;
    return true;
}
