/* See announce.h. */
#include "kvstore/store/announce.h"

#define BATCH 64

static struct bt_block_have have_of(const struct kv_key *key, enum kv_tier tier, uint64_t bytes)
{
    struct bt_block_have h = {.bytes = (uint32_t)BT_MIN(bytes, (uint64_t)UINT32_MAX),
                              .tier = tier == KV_TIER_HOST ? BT_TIER_HOST : BT_TIER_DISK};

    memcpy(h.key.b, key->b, sizeof(h.key.b));
    return h;
}

size_t kv_announce_held(void *arg, uint64_t *cursor, struct bt_block_have *out, size_t max)
{
    struct kv_tiers_held held[BATCH];
    size_t n = kv_tiers_held(arg, cursor, held, BT_MIN(max, (size_t)BATCH));

    for (size_t i = 0; i < n; i++) {
        out[i] = have_of(&held[i].key, held[i].tier, held[i].bytes);
    }
    return n;
}

static void tell_all(struct bt_blockmap *bm, struct kv_tiers *tiers)
{
    struct bt_block_have have[BATCH];
    uint64_t cursor = 0;

    do {
        size_t n = kv_announce_held(tiers, &cursor, have, BATCH);

        if (n) {
            bt_blockmap_announce(bm, have, n);
        }
    } while (cursor);
}

void kv_announce_events(struct bt_blockmap *bm,
                        struct kv_tiers *tiers,
                        const struct kv_tiers_event *ev,
                        size_t n)
{
    for (size_t i = 0; i < n; i++) {
        struct bt_block_key key;
        struct bt_block_have have;

        if (ev[i].kind == KV_TIERS_LOST) {
            tell_all(bm, tiers);
        } else if (ev[i].best == KV_N_TIERS) {
            memcpy(key.b, ev[i].key.b, sizeof(key.b));
            bt_blockmap_withdraw(bm, &key, 1);
        } else {
            have = have_of(&ev[i].key, ev[i].best, ev[i].bytes);
            bt_blockmap_announce(bm, &have, 1);
        }
    }
}
