/* Slab arena; see arena.h. A class keeps its chunks with room in a list and fills the first one;
 * a chunk that runs empty goes back to the common list at once. */
#include "kvstore/tier/arena.h"

#include "common/base/buf.h"

#include <stdlib.h>

#define PIECE_ALIGN 256u
#define CHUNK_MIN   ((size_t)256 << 10)
#define CHUNK_MAX   ((size_t)32 << 20)

static size_t piece_size(size_t bytes)
{
    return BT_DIV_UP(bytes, PIECE_ALIGN) * PIECE_ALIGN;
}

static size_t clamp(size_t v, size_t min, size_t max)
{
    return v < min ? min : v > max ? max : v;
}

int kv_arena_init(struct kv_arena *a, size_t bytes, size_t piece_hint)
{
    /* Unknown sizes: large enough for most, still some chunks to share out. */
    size_t chunk = clamp(bytes / (piece_hint ? 64 : 16), CHUNK_MIN, CHUNK_MAX);

    *a = (struct kv_arena){0};
    if (piece_hint > 0) {
        size_t piece = piece_size(piece_hint);

        chunk = clamp(chunk, piece, clamp(bytes / 16, piece, bytes)) / piece * piece;
    }
    a->chunk_bytes = BT_MIN(chunk, bytes) / PIECE_ALIGN * PIECE_ALIGN;
    bt_list_init(&a->free_chunks);
    for (int c = 0; c < KV_ARENA_CLASSES; c++) {
        bt_list_init(&a->classes[c].room);
    }
    if (a->chunk_bytes == 0) {
        return BT_E_INVALID;
    }
    a->n_chunks = a->n_free_chunks = (uint32_t)BT_MIN(bytes / a->chunk_bytes, (size_t)UINT32_MAX);
    a->chunks = bt_calloc(a->n_chunks, sizeof(*a->chunks));
    if (!a->chunks) {
        return BT_E_NOMEM;
    }
    for (uint32_t i = 0; i < a->n_chunks; i++) {
        a->chunks[i].cls = -1;
        bt_list_push_back(&a->free_chunks, &a->chunks[i].link);
    }
    return BT_OK;
}

void kv_arena_fini(struct kv_arena *a)
{
    for (uint32_t i = 0; i < a->n_chunks && a->chunks; i++) {
        free(a->chunks[i].owners);
    }
    free(a->chunks);
    *a = (struct kv_arena){0};
}

int kv_arena_class_of(struct kv_arena *a, size_t bytes)
{
    size_t piece = piece_size(bytes);
    int unused = -1;

    if (bytes == 0 || piece > a->chunk_bytes) {
        return -1;
    }
    for (int c = 0; c < KV_ARENA_CLASSES; c++) {
        if (a->classes[c].piece_bytes == piece) {
            return c;
        }
        if (unused < 0 && a->classes[c].n_chunks == 0) {
            unused = c;
        }
    }
    if (unused >= 0) {
        a->classes[unused].piece_bytes = piece;
    }
    return unused;
}

static bool add_chunk(struct kv_arena *a, int cls)
{
    struct kv_arena_class *c = &a->classes[cls];
    struct kv_arena_chunk *k = BT_LIST_ENTRY(a->free_chunks.next, struct kv_arena_chunk, link);
    uint32_t n = (uint32_t)(a->chunk_bytes / c->piece_bytes);

    k->owners = bt_calloc(n, sizeof(*k->owners));
    if (!k->owners) {
        return false;
    }
    bt_list_remove(&k->link);
    a->n_free_chunks--;
    k->cls = cls;
    k->n_pieces = n;
    k->n_used = k->hint = 0;
    bt_list_push_back(&c->room, &k->link);
    c->n_chunks++;
    c->n_free += n;
    return true;
}

static uint64_t take_one(struct kv_arena *a, struct kv_arena_class *c, void *owner)
{
    struct kv_arena_chunk *k = BT_LIST_ENTRY(c->room.next, struct kv_arena_chunk, link);
    uint32_t i = k->hint;

    while (k->owners[i]) {
        i = i + 1 < k->n_pieces ? i + 1 : 0;
    }
    k->owners[i] = owner;
    k->hint = i + 1 < k->n_pieces ? i + 1 : 0;
    c->n_free--;
    if (++k->n_used == k->n_pieces) {
        bt_list_remove(&k->link);
    }
    a->used_bytes += c->piece_bytes;
    return (uint64_t)(k - a->chunks) * a->chunk_bytes + i * c->piece_bytes;
}

bool kv_arena_take(struct kv_arena *a, int cls, uint32_t n, void *owner, uint64_t *ret)
{
    struct kv_arena_class *c = &a->classes[cls];
    uint64_t per_chunk = a->chunk_bytes / c->piece_bytes;

    if (c->n_free + per_chunk * a->n_free_chunks < n) {
        return false;
    }
    while (c->n_free < n) {
        if (!add_chunk(a, cls)) {
            return false;
        }
    }
    for (uint32_t i = 0; i < n; i++) {
        ret[i] = take_one(a, c, owner);
    }
    return true;
}

static void give_one(struct kv_arena *a, uint64_t piece)
{
    struct kv_arena_chunk *k = kv_arena_chunk_of(a, piece);
    struct kv_arena_class *c = &a->classes[k->cls];
    uint32_t i = (uint32_t)(piece % a->chunk_bytes / c->piece_bytes);

    BT_BUG_ON(!k->owners[i]);
    k->owners[i] = NULL;
    k->hint = i;
    c->n_free++;
    a->used_bytes -= c->piece_bytes;
    if (k->n_used-- == k->n_pieces) {
        bt_list_push_front(&c->room, &k->link);
    }
    if (k->n_used == 0) {
        c->n_free -= k->n_pieces;
        c->n_chunks--;
        free(k->owners);
        k->owners = NULL;
        k->cls = -1;
        bt_list_remove(&k->link);
        bt_list_push_front(&a->free_chunks, &k->link);
        a->n_free_chunks++;
    }
}

void kv_arena_give(struct kv_arena *a, const uint64_t *pieces, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) {
        give_one(a, pieces[i]);
    }
}
