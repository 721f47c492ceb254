/* What a process's tiers hold, told to the block index: for `events` of the tiers and `held` of the
 * blockmap. Any thread. */
#ifndef KV_STORE_ANNOUNCE_H
#define KV_STORE_ANNOUNCE_H

#include "common/cluster/blockmap.h"
#include "kvstore/tier/tiers.h"

/* Events of the tiers, in their order. A lost event means that all is told again. */
void kv_announce_events(struct bt_blockmap *bm,
                        struct kv_tiers *tiers,
                        const struct kv_tiers_event *ev,
                        size_t n);
/* bt_blockmap_cfg.held; arg is the struct kv_tiers. */
size_t kv_announce_held(void *arg, uint64_t *cursor, struct bt_block_have *out, size_t max);

#endif
