/* Host memory: room for blobs, by eviction.
 *
 * The front of the lists is given up first. When all memory belongs to pieces of other sizes, the
 * least recently used blob of all says which chunk is taken: everything in it goes, so that the
 * chunk is free as a whole. Called with the lock held. */
#include "kvstore/tier/tiers_int.h"

static bool evictable(const struct kv_blob *b)
{
    return b->host == KV_PLACE_READY && b->n_pins == 0 && b->n_io == 0;
}

static void give_pieces(struct kv_tiers *t, struct kv_blob *b)
{
    if (b->has_pieces) {
        kv_arena_give(&t->arena, b->pieces, b->meta.shape.n_layers);
        b->has_pieces = false;
    }
}

void kv_host_drop(struct kv_tiers *t, struct kv_blob *b)
{
    bt_list_remove(&b->in_host);
    give_pieces(t, b);
    if (b->host == KV_PLACE_READY) {
        t->stats.host.n_blocks--;
        t->stats.host.bytes -= kv_blob_size(b);
        b->host = KV_PLACE_NONE;
        if (!b->dead) {
            kv_tiers_tell(t, KV_TIERS_REMOVED, KV_TIER_HOST, b);
        }
    }
    b->host = KV_PLACE_NONE;
    pthread_cond_broadcast(&t->changed);
}

static void evict(struct kv_tiers *t, struct kv_blob *b)
{
    t->stats.host.evictions++;
    t->stats.host.skipped += kv_host_dirty(b);
    kv_host_drop(t, b);
    kv_index_settle(t, b);
}

/* The first of a list that may go. */
static struct kv_blob *front_of(struct kv_tiers *t, int cls)
{
    bt_list_for_each (l, &t->host_lru[cls]) {
        struct kv_blob *b = BT_LIST_ENTRY(l, struct kv_blob, in_host);

        if (evictable(b)) {
            return b;
        }
    }
    return NULL;
}

/* The least recently used of all lists that may go. */
static struct kv_blob *front_of_all(struct kv_tiers *t)
{
    struct kv_blob *oldest = NULL;

    for (int c = 0; c < KV_ARENA_CLASSES; c++) {
        struct kv_blob *b = front_of(t, c);

        if (b && (!oldest || b->stamp < oldest->stamp)) {
            oldest = b;
        }
    }
    return oldest;
}

/* Gives up all blobs with a piece in a chunk; false if one of them may not go. */
static bool clear_chunk(struct kv_tiers *t, struct kv_arena_chunk *k)
{
    for (uint32_t i = 0; i < k->n_pieces; i++) {
        if (k->owners[i] && !evictable(k->owners[i])) {
            return false;
        }
    }
    for (uint32_t i = 0; k->owners && i < k->n_pieces; i++) {
        if (k->owners[i]) {
            evict(t, k->owners[i]);
        }
    }
    return true;
}

/* Any chunk of another class that can be cleared: the one of the oldest blob cannot. */
static bool clear_any(struct kv_tiers *t, int cls)
{
    for (uint32_t i = 0; i < t->arena.n_chunks; i++) {
        struct kv_arena_chunk *k = &t->arena.chunks[i];

        if (k->cls >= 0 && k->cls != cls && clear_chunk(t, k)) {
            return true;
        }
    }
    return false;
}

/* One step towards room for a blob of class cls; false if nothing may go. */
static bool make_room(struct kv_tiers *t, int cls)
{
    struct kv_blob *victim = front_of_all(t);

    if (victim && victim->cls != cls) {
        if (clear_chunk(t, kv_arena_chunk_of(&t->arena, victim->pieces[0]))) {
            return true;
        }
        victim = front_of(t, cls);
    }
    if (victim) {
        evict(t, victim);
        return true;
    }
    return clear_any(t, cls);
}

int kv_host_room(struct kv_tiers *t, struct kv_blob *b)
{
    int cls = kv_arena_class_of(&t->arena, b->meta.shape.layer_bytes);

    if (cls < 0 || kv_blob_size(b) > t->stats.host.max_bytes) {
        return BT_E_TOO_LARGE;
    }
    while (!kv_arena_take(&t->arena, cls, b->meta.shape.n_layers, b, b->pieces)) {
        if (!make_room(t, cls)) {
            return BT_E_EXHAUSTED;
        }
    }
    b->cls = (int8_t)cls;
    b->has_pieces = true;
    b->host = KV_PLACE_FILLING;
    return BT_OK;
}

void kv_host_ready(struct kv_tiers *t, struct kv_blob *b)
{
    b->host = KV_PLACE_READY;
    b->meta.generation = ++t->generation;
    t->stats.host.n_blocks++;
    t->stats.host.bytes += kv_blob_size(b);
    t->stats.host.stored++;
    t->stats.host.written_bytes += kv_blob_size(b);
    if (!b->dead) {
        kv_tiers_tell(t, KV_TIERS_STORED, KV_TIER_HOST, b);
        kv_index_touch(t, b);
    }
    pthread_cond_broadcast(&t->changed);
    kv_sink_wake(t);
}
