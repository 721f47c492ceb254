/* Private to the index: index.c (look-up, holders, coming and going), adopt.c (blocks of a
 * predecessor). */
#ifndef KV_BLOCK_INDEX_INT_H
#define KV_BLOCK_INDEX_INT_H

#include "kvstore/block/index.h"

struct kv_index {
    struct kv_index_cfg cfg;
    struct kv_ledger *ledger; /* NULL = none */
    struct kv_hasher *hasher;
    uint32_t block_tokens, block_pages;
    uint32_t n_max; /* entries */
    struct kv_block *entries;
    int32_t *ids;
    uint32_t *pages;
    struct kv_block **buckets;
    uint64_t bucket_mask;
    struct kv_block *unused; /* by next */
    struct bt_list unheld;
    uint32_t n_unheld;
    uint64_t changes, generation, now_ns;
    struct kv_index_stats stats;
};

/* The entry is also the number of its record in the ledger. */
static inline uint32_t kv_index_slot(const struct kv_index *x, const struct kv_block *b)
{
    return (uint32_t)(b - x->entries);
}

static inline struct kv_block **kv_index_bucket(const struct kv_index *x, const struct kv_key *key)
{
    return &x->buckets[kv_key_fingerprint(key) & x->bucket_mask];
}

/* Tells the pool how many pages nobody uses. */
static inline void kv_index_tell_cached(struct kv_index *x)
{
    kv_pool_set_cached(x->cfg.pool, x->n_unheld * x->block_pages);
}

/* Puts a filled-in entry into its bucket and counts it. */
void kv_index_enter(struct kv_index *x, struct kv_block *b);
/* Takes an unheld block without children out of everything and gives up its pages. */
void kv_index_remove(struct kv_index *x, struct kv_block *b);

#endif
