/* Messages to bytes and back, and the queue of what waits to be sent. Loop thread.
 *
 * Decoding allocates from a capped arena: a few bytes of wire may ask for a struct each, and the
 * cap, not the sender, decides how much that may cost. protobuf-c recurses only as deep as our own
 * message types nest, and refuses groups. */
#include "common/base/buf.h"
#include "common/base/varint.h"
#include "common/rpc/rpc_int.h"

#include <grpc/byte_buffer.h>
#include <grpc/byte_buffer_reader.h>
#include <grpc/slice.h>
#include <stdio.h>
#include <stdlib.h>

#define CHUNK_BYTES  (64u << 10)
#define RESERVE_KEPT (1u << 20) /* arena memory kept between messages */

struct bt_rpc_chunk {
    struct bt_rpc_chunk *next;
    size_t used, cap;
    BT_ALIGNED(16) char mem[];
};

struct item {
    struct bt_list link;
    grpc_byte_buffer *buf;
    size_t bytes;
};

static void *arena_alloc(void *arg, size_t size)
{
    struct bt_rpc_arena *a = arg;
    struct bt_rpc_chunk *c = a->chunks;
    size_t cap, room = a->limit_bytes - a->total_bytes;
    void *p;

    if (size > a->limit_bytes) {
        a->exceeded = true;
        return NULL;
    }
    size = BT_DIV_UP(size, 16) * 16;
    if (!c || c->cap - c->used < size) {
        cap = BT_MAX(a->total_bytes, (size_t)CHUNK_BYTES); /* doubles the total */
        cap = BT_MIN(cap, room);
        cap = BT_MAX(cap, size);
        c = cap <= room ? malloc(sizeof(*c) + cap) : NULL;
        if (!c) {
            a->exceeded = true;
            return NULL;
        }
        c->used = 0;
        c->cap = cap;
        c->next = a->chunks;
        a->chunks = c;
        a->total_bytes += cap;
    }
    p = c->mem + c->used;
    c->used += size;
    return p;
}

static void arena_free(void *arg, void *p)
{
    /* All at once, with the next message. */
}

void bt_rpc_arena_fini(struct bt_rpc_arena *a)
{
    struct bt_rpc_chunk *c;

    while ((c = a->chunks) != NULL) {
        a->chunks = c->next;
        free(c);
    }
    a->total_bytes = 0;
}

void bt_rpc_arena_trim(struct bt_rpc_arena *a)
{
    if (a->total_bytes > RESERVE_KEPT) {
        bt_rpc_arena_fini(a);
    }
}

static void arena_reset(struct bt_rpc_arena *a, size_t limit_bytes)
{
    limit_bytes = BT_MAX(limit_bytes, (size_t)CHUNK_BYTES);
    if (a->chunks && (a->chunks->next || a->total_bytes > limit_bytes)) {
        bt_rpc_arena_fini(a); /* pieces: start with one next time */
    }
    if (a->chunks) {
        a->chunks->used = 0;
    }
    a->limit_bytes = limit_bytes;
    a->exceeded = false;
}

/* n: its packed size. A new buffer of the caller's. */
static grpc_byte_buffer *pack(const ProtobufCMessage *msg, size_t n)
{
    grpc_slice s = grpc_slice_malloc(n);
    grpc_byte_buffer *buf;

    protobuf_c_message_pack(msg, GRPC_SLICE_START_PTR(s));
    buf = grpc_raw_byte_buffer_create(&s, 1);
    grpc_slice_unref(s);
    return buf;
}

static int refuse(struct bt_rpc_arena *a, const ProtobufCMessageDescriptor *desc)
{
    snprintf(a->why, sizeof(a->why),
             a->exceeded ? "%s takes too much memory when decoded" : "malformed %s", desc->name);
    return a->exceeded ? BT_E_EXHAUSTED : BT_E_FORMAT;
}

/* Into msg, which was decoded from the rest of the bytes. */
static int decode_list(struct bt_rpc_arena *a, const struct bt_rpc_cut *cut, ProtobufCMessage *msg)
{
    const uint8_t *p = (const uint8_t *)cut->bytes.p;
    size_t n = bt_varints_count(p, cut->bytes.n);
    int32_t *v = arena_alloc(a, n * sizeof(*v));
    bool shortest;

    if (!v) {
        return BT_E_EXHAUSTED;
    }
    if (bt_varints_read(p, cut->bytes.n, v, &shortest) < 0) {
        return BT_E_FORMAT;
    }
    if (bt_rpc_cut_put(cut, msg, v, n)) {
        a->list = v;
        a->list_bytes = shortest ? cut->bytes : (struct bt_str){NULL, 0};
    }
    return BT_OK;
}

/* The message without its list; NULL as protobuf-c says so. */
static ProtobufCMessage *decode_rest(struct bt_rpc_arena *a,
                                     const ProtobufCMessageDescriptor *desc,
                                     const struct bt_rpc_cut *cut,
                                     struct bt_str *ret_rest)
{
    ProtobufCAllocator alloc = {arena_alloc, arena_free, a};
    uint8_t *p = arena_alloc(a, bt_rpc_cut_room(cut));

    if (!p) {
        return NULL;
    }
    *ret_rest = (struct bt_str){(const char *)p, bt_rpc_cut_rest(cut, p)};
    return protobuf_c_message_unpack(desc, &alloc, ret_rest->n, p);
}

/* Contiguous bytes in, message out. */
static int decode(struct bt_rpc_arena *a,
                  const struct bt_rpc_unpack_args *args,
                  struct bt_str bytes,
                  ProtobufCMessage **ret_msg)
{
    ProtobufCAllocator alloc = {arena_alloc, arena_free, a};
    struct bt_str rest = bytes;
    struct bt_rpc_cut cut;
    ProtobufCMessage *msg;
    bool cuts = bt_rpc_cut_find(args->desc, bytes, &cut);

    a->list = NULL;
    msg = cuts ? decode_rest(a, args->desc, &cut, &rest)
               : protobuf_c_message_unpack(args->desc, &alloc, bytes.n, (const uint8_t *)bytes.p);
    if (!msg || (cuts && decode_list(a, &cut, msg) < 0)) {
        return refuse(a, args->desc);
    }
    if (args->strict && bt_rpc_check_strings(args->desc, (const uint8_t *)rest.p, rest.n, a->why,
                                             sizeof(a->why)) < 0) {
        return BT_E_FORMAT;
    }
    *ret_msg = msg;
    return BT_OK;
}

/* All n bytes in one piece: where they are, if they are in one, else in the arena. */
static int gather(struct bt_rpc_arena *a, grpc_byte_buffer *buf, struct bt_str *bytes)
{
    grpc_byte_buffer_reader reader;
    grpc_slice *s;
    size_t at = 0;
    char *p = NULL;

    if (!grpc_byte_buffer_reader_init(&reader, buf)) {
        return BT_E_FORMAT;
    }
    while (at < bytes->n && grpc_byte_buffer_reader_peek(&reader, &s)) {
        size_t n = BT_MIN(GRPC_SLICE_LENGTH(*s), bytes->n - at);

        if (n == bytes->n) {
            bytes->p = (const char *)GRPC_SLICE_START_PTR(*s);
        } else if (!p && !(p = arena_alloc(a, bytes->n))) {
            break;
        } else {
            memcpy(p + at, GRPC_SLICE_START_PTR(*s), n);
            bytes->p = p;
        }
        at += n;
    }
    grpc_byte_buffer_reader_destroy(&reader);
    return at == bytes->n ? BT_OK : BT_E_FORMAT;
}

int bt_rpc_unpack(struct bt_rpc_arena *a,
                  const struct bt_rpc_unpack_args *args,
                  grpc_byte_buffer *buf,
                  ProtobufCMessage **ret_msg)
{
    struct bt_str bytes = {"", grpc_byte_buffer_length(buf)};

    arena_reset(a, args->limit_bytes + bytes.n);
    return gather(a, buf, &bytes) < 0 ? refuse(a, args->desc) : decode(a, args, bytes, ret_msg);
}

void bt_rpc_sendq_init(struct bt_rpc_sendq *q, size_t max_bytes)
{
    bt_list_init(&q->items);
    q->bytes = 0;
    q->max_bytes = max_bytes;
}

int bt_rpc_sendq_push(struct bt_rpc_sendq *q, const ProtobufCMessage *msg)
{
    size_t need = protobuf_c_message_get_packed_size(msg);
    struct item *it;

    if (need > q->max_bytes || q->bytes > q->max_bytes - need) {
        return BT_E_EXHAUSTED;
    }
    it = bt_calloc(1, sizeof(*it));
    if (!it) {
        return BT_E_NOMEM;
    }
    it->buf = pack(msg, need);
    it->bytes = need;
    q->bytes += it->bytes;
    bt_list_push_back(&q->items, &it->link);
    return BT_OK;
}

static struct item *sendq_first(const struct bt_rpc_sendq *q)
{
    return bt_list_empty(&q->items) ? NULL : BT_LIST_ENTRY(q->items.next, struct item, link);
}

grpc_byte_buffer *bt_rpc_sendq_head(const struct bt_rpc_sendq *q)
{
    struct item *it = sendq_first(q);

    return it ? it->buf : NULL;
}

static void item_free(struct bt_rpc_sendq *q, struct item *it)
{
    q->bytes -= it->bytes;
    bt_list_remove(&it->link);
    grpc_byte_buffer_destroy(it->buf);
    free(it);
}

void bt_rpc_sendq_pop(struct bt_rpc_sendq *q)
{
    item_free(q, sendq_first(q));
}

void bt_rpc_sendq_drop(struct bt_rpc_sendq *q, bool keep_head)
{
    struct bt_list *it = q->items.next;

    if (keep_head && it != &q->items) {
        it = it->next;
    }
    while (it != &q->items) {
        struct bt_list *next = it->next;

        item_free(q, BT_LIST_ENTRY(it, struct item, link));
        it = next;
    }
}
