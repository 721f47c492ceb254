/* Where blocks come from and go to besides the engine's own pool: the contract between the engine
 * and everything that keeps blocks for it (host memory and disk: tiers.h; other nodes and the KV
 * store: ../store/client.h).
 *
 * A block outside a pool is a blob: its identity (key, parent, root, token ids), a generation, and
 * for every layer the bytes
 *     K [n_kv_heads][block_tokens][head_dim], then V [n_kv_heads][block_tokens][head_dim]
 * with an XXH3-64 sum each, whatever the page size of the pool that it came from. A layer is the
 * unit in which blobs are read, moved, checked and placed. A blob may hold fewer tokens than a
 * block (the tail of a preempted request): it has the key of its ids and always the bytes of a
 * whole one.
 *
 * A key alone proves nothing here either: who finds a blob compares ids, parent and root before the
 * first byte is used. Whatever is odd about a blob (short, damaged, gone, too slow) ends the run
 * before it: a miss, never an error of the request.
 *
 * Threads: the engine's calls every function of the vtable; sources work on threads of their own
 * and call back from them. Nothing here blocks the caller. */
#ifndef KV_TIER_SOURCE_H
#define KV_TIER_SOURCE_H

#include "kvstore/block/index.h"

#include <stdatomic.h>

#define KV_SOURCE_OFFERS 32 /* of one engine to one source that are open at a time, at most */

enum kv_tier { KV_TIER_POOL, KV_TIER_HOST, KV_TIER_DISK, KV_TIER_STORE, KV_N_TIERS };

/* Bytes of a blob's layer and of all its layers, for a pool and identity blocks of n tokens. */
struct kv_blob_shape {
    uint32_t n_layers, block_tokens;
    size_t layer_bytes;
};
struct kv_blob_shape kv_blob_shape_of(const struct kv_layout *layout, uint32_t block_tokens);
/* Copies one layer of one block between pages and blob form; `pages` are the block's. Those behind
 * a tail may be KV_PAGE_NONE: gather writes zeros for them, scatter leaves them out. */
void kv_blob_gather(
    const struct kv_pool *pool, const uint32_t *pages, uint32_t block_tokens, int layer, void *dst);
void kv_blob_scatter(const struct kv_pool *pool,
                     const uint32_t *pages,
                     uint32_t block_tokens,
                     int layer,
                     const void *src);

/* A look-up: which blocks of `chain` behind the first `first` can be had. Made by the engine, in
 * its memory, untouched by it between find and done. What is found stays there (pinned) until end.
 */
struct kv_find {
    struct kv_chain chain; /* borrowed until done: keys and ids of all blocks that are wanted */
    uint32_t first;        /* blocks that need no looking for */
    uint32_t n_tokens;    /* of the chain's last block: block_tokens, or fewer for a tail, whose ids
                             are compared as far as they go */
    uint64_t deadline_ns; /* then done with what is known */
    /* Any thread, exactly once, maybe inside find. Must not block. */
    void (*done)(struct kv_find *f);
    void *arg;
    /* Filled by the source. */
    uint32_t n;                  /* blocks [first, first + n) can be had */
    uint32_t n_tier[KV_N_TIERS]; /* of them, by where they are */
    uint64_t bytes;
    uint64_t load_ns; /* estimate for bringing all of them, by measured rates and what is queued */
    /* The leading n_fast of them lie in memory here (host tier), and fast_ns is the estimate for
     * these alone: who finds the rest too slow takes these. */
    uint32_t n_fast;
    uint64_t fast_ns;
    void *priv;
};

/* Brings blocks [find->first, +n_blocks) into pages, layer by layer: all blocks' layer 0 first, so
 * that computing behind them can begin while later layers are on their way. The pages belong to
 * KV_OWNER_TRANSFER until done. */
struct kv_load {
    struct kv_find *find;
    struct kv_pool *pool;
    uint32_t n_blocks;     /* <= find->n */
    const uint32_t *pages; /* [n_blocks * block_pages], borrowed until done */
    /* Written by the source with release, read by the engine with acquire. layers_ready: layers
     * below it are placed and checked for the first n_good blocks. n_good only falls; it is final
     * once done was called. */
    atomic_uint layers_ready, n_good;
    /* Any thread, exactly once, last: nothing writes the pages any more. */
    void (*done)(struct kv_load *l);
    /* Any thread, maybe several at once, never after done: layers_ready or n_good has changed. NULL
     * = not wanted. */
    void (*progress)(struct kv_load *l);
    void *arg;
    void *priv;
};

/* A block that the engine has computed or received, offered for keeping. */
struct kv_offer {
    struct kv_chain chain; /* copied by the source during the call; the block is its last */
    uint32_t n_tokens;     /* of the last block: block_tokens, or fewer for a tail */
    const uint32_t *pages; /* copied; they stay as they are until done */
    struct kv_pool *pool;
    /* Any thread, exactly once: the bytes were copied (BT_OK) or are not wanted. */
    void (*done)(void *arg, int rc);
    void *arg;
};

struct kv_source;
struct kv_source_ops {
    const char *name;
    void (*find)(struct kv_source *src, struct kv_find *f);
    /* Stops looking: done follows soon, as it stands then. Does nothing if done was called already
     * or is being called on another thread. */
    void (*find_cancel)(struct kv_source *src, struct kv_find *f);
    void (*load)(struct kv_source *src, struct kv_load *l);
    /* Gives up: done follows soon. Does nothing if done was called already, as above. */
    void (*load_cancel)(struct kv_source *src, struct kv_load *l);
    /* After done of find and of its loads, on every way out: unpins. Safe when n is 0. */
    void (*end)(struct kv_source *src, struct kv_find *f);
    /* False: not wanted now (known already, queue full); done is not called then. */
    bool (*offer)(struct kv_source *src, const struct kv_offer *o);
    /* False: nothing can be taken at present (nobody to give it to is known, queue full); what was
     * to be offered waits. Whoever makes it true wakes the engine. NULL = always true. */
    bool (*wants)(struct kv_source *src);
    /* The engine waits for pages that open offers hold: no rest until they are done. NULL = a
     * source that never rests. */
    void (*hurry)(struct kv_source *src);
};
struct kv_source {
    const struct kv_source_ops *ops;
};

#endif
