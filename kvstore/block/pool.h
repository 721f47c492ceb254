/* The paged KV pool of one engine: memory, page descriptors, owners.
 *
 * Every page has exactly one owner: the free list, a sequence, a transfer that a remote side takes
 * part in, or the prefix index (index.h), whose pages several sequences share.
 * kv_pool_set_owner is the only way to change it and checks the old one. A generation is counted up
 * whenever a page leaves the free list, so that a stale ticket can be told.
 *
 * Thread: the engine's, except kv_pool_stats (any) and reading page bytes and generations of pages
 * that the caller's transfer owns or leases (xfer thread).
 */
#ifndef KV_BLOCK_POOL_H
#define KV_BLOCK_POOL_H

#include "common/mem/mem.h"
#include "kvstore/block/layout.h"
#include "kvstore/block/ledger.h"

#define KV_PAGE_NONE UINT32_MAX

enum kv_owner { KV_OWNER_FREE, KV_OWNER_SEQ, KV_OWNER_TRANSFER, KV_OWNER_INDEX, KV_N_OWNERS };

struct kv_pool;

struct kv_pool_stats {
    uint32_t n_pages;
    uint32_t n_free;
    uint32_t n_seq;
    uint32_t n_transfer;
    uint32_t n_index;
    uint32_t n_cached; /* of the index's: nobody uses them now, they are given up on demand */
};

/* Allocates layout->bytes through `ops` under `name`. The pool keeps a copy of the layout. */
int kv_pool_create(const struct kv_layout *layout,
                   const struct bt_mem_ops *ops,
                   const char *name,
                   struct kv_pool **ret_pool,
                   struct bt_err *err) BT_MUST_USE;
/* The same over memory that is there already, with whatever it holds. The pool frees the region; a
 * failure (BT_E_INVALID: it is too small) leaves it with the caller. */
int kv_pool_create_in(const struct kv_layout *layout,
                      const struct bt_mem_region *take_region,
                      struct kv_pool **ret_pool,
                      struct bt_err *err) BT_MUST_USE;
/* Pages are written down in the ledger (borrowed) from now on, generations go on behind those that
 * it has; NULL ends it and leaves the ledger as it is. All pages must be free. */
void kv_pool_set_ledger(struct kv_pool *pool, struct kv_ledger *ledger);
/* Free pages of a predecessor become the index's as they are, generation included. False and
 * nothing done if one of them is out of range, not free or named twice. */
bool kv_pool_adopt(struct kv_pool *pool, const uint32_t *pages, size_t n) BT_MUST_USE;
/* NULL is fine. Every page must be free: kv_pool_audit says which are not. */
void kv_pool_destroy(struct kv_pool *pool);

const struct kv_layout *kv_pool_layout(const struct kv_pool *pool);
const struct bt_mem_region *kv_pool_region(const struct kv_pool *pool);
/* First byte of a page in a layer. */
void *kv_pool_page(const struct kv_pool *pool, int layer, uint32_t page);
uint32_t kv_pool_generation(const struct kv_pool *pool, uint32_t page);
bool kv_pool_is_free(const struct kv_pool *pool, uint32_t page);

/* Takes n pages for `owner`, all or none; neighbours where the pool allows (next to `after` first
 * if it is not KV_PAGE_NONE), so that pieces are long. BT_E_EXHAUSTED if fewer than n are free.
 * `owner` is a sequence or a transfer: the index gets its pages by kv_pool_set_owner. */
int kv_pool_take(struct kv_pool *pool,
                 uint32_t n,
                 enum kv_owner owner,
                 uint32_t after,
                 uint32_t *ret_pages) BT_MUST_USE;
/* Returns pages to the free list; they must belong to `owner`. */
void kv_pool_give(struct kv_pool *pool, const uint32_t *pages, size_t n, enum kv_owner owner);
void kv_pool_set_owner(
    struct kv_pool *pool, const uint32_t *pages, size_t n, enum kv_owner from, enum kv_owner to);
/* The index says how many of its pages nobody uses. */
void kv_pool_set_cached(struct kv_pool *pool, uint32_t n_pages);
/* Any thread; a consistent set of counters. */
struct kv_pool_stats kv_pool_stats(const struct kv_pool *pool);
/* Pages that can be had: free, or cached and unused. */
static inline uint32_t kv_pool_stats_room(const struct kv_pool_stats *s)
{
    return s->n_free + s->n_cached;
}
/* True if all pages are free and the free list is whole; otherwise logs what is wrong. */
bool kv_pool_audit(const struct kv_pool *pool);

#endif
