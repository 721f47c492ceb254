/* Keeps the full blocks of a prompt that passes through a daemon: copies them from pages into the
 * tiers, on a thread of its own ("relay-keep"), with rests while nobody waits for the pages. Keys
 * are computed from root and ids, so that the asker's word is needed for nothing but the ids. What
 * does not fit is left out. */
#ifndef KV_STORE_KEEP_H
#define KV_STORE_KEEP_H

#include "common/ds/list.h"
#include "kvstore/tier/tiers.h"

struct kv_keep; /* whoever created it owns it */

/* One prompt; the caller's, untouched by it until done. */
struct kv_keep_job {
    struct bt_list link; /* private */
    const struct kv_pool *pool;
    const uint32_t *pages; /* of the tokens from `first` on */
    uint32_t first, n_tokens;
    const int32_t *ids; /* [n_tokens] */
    uint32_t block_tokens;
    struct kv_key root;
    void (*done)(struct kv_keep_job *job); /* on the thread "relay-keep" */
};

int kv_keep_create(struct kv_tiers *tiers,
                   struct kv_keep **ret_keep,
                   struct bt_err *err) BT_MUST_USE;
/* Finishes what was pushed. NULL is fine. */
void kv_keep_destroy(struct kv_keep *k);
/* Any thread. */
void kv_keep_push(struct kv_keep *k, struct kv_keep_job *job);
/* Somebody waits for the pages of what was pushed. Any thread. */
void kv_keep_hurry(struct kv_keep *k);
/* Blocks kept since the start. Any thread. */
uint64_t kv_keep_blocks(const struct kv_keep *k);

#endif
