/* Giving the tiers up on request: what nobody uses goes, in pieces, so that the lock is never held
 * for long. */
#include "kvstore/tier/tiers_int.h"

#define CLEAR_PIECE 256 /* blocks */

/* Up to CLEAR_PIECE blocks of host memory; 0 = none is left that may go. */
static uint32_t clear_host(struct kv_tiers *t)
{
    uint32_t n = 0;

    for (int cls = 0; cls < KV_ARENA_CLASSES; cls++) {
        bt_list_for_each_safe (l, &t->host_lru[cls]) {
            struct kv_blob *b = BT_LIST_ENTRY(l, struct kv_blob, in_host);

            if (n < CLEAR_PIECE && b->host == KV_PLACE_READY && b->n_pins == 0 && b->n_io == 0) {
                kv_host_drop(t, b);
                kv_index_settle(t, b);
                n++;
            }
        }
    }
    return n;
}

static uint32_t clear_disk(struct kv_tiers *t, struct kv_disk_name *names)
{
    uint32_t n = 0;

    while (n < CLEAR_PIECE && !bt_list_empty(&t->disk_lru)) {
        struct kv_blob *b = BT_LIST_ENTRY(t->disk_lru.next, struct kv_blob, in_disk);

        kv_sink_forget(t, b, &names[n++]);
        b->unwritten_ok = true; /* what stays in host memory is not written at once again */
        kv_index_settle(t, b);
    }
    return n;
}

struct kv_tiers_cleared kv_tiers_clear(struct kv_tiers *t, bool host, bool disk)
{
    struct kv_disk_name names[CLEAR_PIECE];
    struct kv_tiers_cleared sum = {0};
    uint32_t n = 1;

    while (host && n > 0) {
        pthread_mutex_lock(&t->lock);
        n = clear_host(t);
        pthread_mutex_unlock(&t->lock);
        sum.host_blocks += n;
    }
    n = 1;
    while (disk && t->disk && n > 0) {
        pthread_mutex_lock(&t->lock);
        n = clear_disk(t, names);
        pthread_mutex_unlock(&t->lock);
        for (uint32_t i = 0; i < n; i++) {
            kv_disk_remove(t->disk, &names[i]);
        }
        sum.disk_blocks += n;
    }
    return sum;
}
