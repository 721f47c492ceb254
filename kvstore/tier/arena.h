/* Slab arena: a region cut into chunks, a chunk into equal pieces. Pieces of one size (a class)
 * come from chunks of that class; a chunk without used pieces belongs to nobody and may become
 * another class's. So blobs of several models share a region without breaking it up.
 *
 * Knows offsets, never touches the memory. Thread: whoever holds the owner's lock. */
#ifndef KV_TIER_ARENA_H
#define KV_TIER_ARENA_H

#include "common/base/rc.h"
#include "common/ds/list.h"

#define KV_ARENA_CLASSES 32

struct kv_arena_chunk {
    struct bt_list link; /* class's chunks with room, or free chunks */
    int cls;             /* -1 = nobody's */
    uint32_t n_used, n_pieces;
    uint32_t hint; /* where to look for a free piece first */
    void **owners; /* [n_pieces], NULL = free; allocated with the class */
};

struct kv_arena_class {
    size_t piece_bytes; /* 0 = not in use */
    uint32_t n_chunks;
    uint64_t n_free;
    struct bt_list room; /* chunks with free pieces */
};

struct kv_arena {
    size_t chunk_bytes;
    uint32_t n_chunks, n_free_chunks;
    struct kv_arena_chunk *chunks;
    struct bt_list free_chunks;
    struct kv_arena_class classes[KV_ARENA_CLASSES];
    uint64_t used_bytes; /* of pieces in use */
};

/* piece_hint: size of most pieces, 0 = not known. BT_E_NOMEM. */
int kv_arena_init(struct kv_arena *a, size_t bytes, size_t piece_hint) BT_MUST_USE;
void kv_arena_fini(struct kv_arena *a);
/* Class of pieces that hold `bytes`, made if need be; -1: larger than a chunk, or too many. */
int kv_arena_class_of(struct kv_arena *a, size_t bytes);
/* Takes n pieces for `owner`, all or none; offsets into ret. */
bool kv_arena_take(struct kv_arena *a, int cls, uint32_t n, void *owner, uint64_t *ret);
void kv_arena_give(struct kv_arena *a, const uint64_t *pieces, uint32_t n);
/* The chunk of a piece, to look at its owners. */
static inline struct kv_arena_chunk *kv_arena_chunk_of(struct kv_arena *a, uint64_t piece)
{
    return &a->chunks[piece / a->chunk_bytes];
}

#endif
