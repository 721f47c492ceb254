/* The index of blobs: found by key, proven by root, parent, prefix and ids; pins; the order in
 * which they go.
 *
 * A blob that nobody pins stands in the list of each tier that has it. Letting go of a run pushes
 * its blobs from the last to the first, and then what stands before the run: so a child is always
 * nearer to the front than its parent, and taking the front is least recently used, leaf first.
 *
 * Everything here is called with the lock held. */
#include "kvstore/tier/tiers_int.h"

#include "common/base/buf.h"

#include <stdlib.h>

static void cut(const struct kv_tiers *t, struct kv_key *key)
{
    int bits = t->key_bits ? t->key_bits : 128;

    for (int i = 0; i < (int)sizeof(key->b); i++) {
        int left = bits - 8 * i, keep = left < 0 ? 0 : left > 8 ? 8 : left;

        key->b[i] &= (uint8_t)(0xff00u >> keep);
    }
}

static struct kv_blob **bucket_of(const struct kv_tiers *t, const struct kv_key *key)
{
    return &t->buckets[kv_key_fingerprint(key) & t->bucket_mask];
}

static struct kv_blob *by_key(const struct kv_tiers *t, const struct kv_key *key)
{
    for (struct kv_blob *b = *bucket_of(t, key); b; b = b->next) {
        if (kv_key_eq(&b->meta.key, key)) {
            return b;
        }
    }
    return NULL;
}

static bool proven(const struct kv_blob_meta *a, const struct kv_blob_meta *b)
{
    return kv_key_eq(&a->root, &b->root) && kv_key_eq(&a->parent, &b->parent) &&
           a->prefix == b->prefix && a->n_tokens == b->n_tokens &&
           a->shape.block_tokens == b->shape.block_tokens &&
           memcmp(a->ids, b->ids, a->n_tokens * sizeof(*a->ids)) == 0;
}

struct kv_blob *kv_index_of(struct kv_tiers *t, struct kv_blob_meta *m, bool *ret_other)
{
    struct kv_blob *b;

    cut(t, &m->key);
    cut(t, &m->parent);
    b = by_key(t, &m->key);
    *ret_other = b && !proven(&b->meta, m);
    if (*ret_other) {
        t->stats.collisions++;
        return NULL;
    }
    return b;
}

/* Twice the buckets; as before without memory. */
static void grow(struct kv_tiers *t)
{
    uint64_t n = 2 * (t->bucket_mask + 1);
    struct kv_blob **old = t->buckets, **buckets = bt_calloc(n, sizeof(struct kv_blob *));
    uint64_t n_old = t->bucket_mask + 1;

    if (!buckets) {
        return;
    }
    t->buckets = buckets;
    t->bucket_mask = n - 1;
    for (uint64_t i = 0; i < n_old; i++) {
        for (struct kv_blob *b = old[i], *next; b; b = next) {
            struct kv_blob **at = bucket_of(t, &b->meta.key);

            next = b->next;
            b->next = *at;
            *at = b;
        }
    }
    free(old);
}

struct kv_blob *kv_index_add(struct kv_tiers *t, const struct kv_blob_meta *m)
{
    uint32_t n_layers = m->shape.n_layers;
    struct kv_blob *b =
        bt_calloc(1, sizeof(*b) + (sizeof(*b->sums) + sizeof(*b->pieces)) * n_layers +
                         sizeof(*b->ids) * m->n_tokens);
    struct kv_blob **bucket;

    if (!b) {
        return NULL;
    }
    b->sums = (uint64_t *)(b + 1);
    b->pieces = b->sums + n_layers;
    b->ids = (int32_t *)(b->pieces + n_layers);
    memcpy(b->ids, m->ids, sizeof(*b->ids) * m->n_tokens);
    if (m->sums) {
        memcpy(b->sums, m->sums, sizeof(*b->sums) * n_layers);
    }
    b->meta = *m;
    b->meta.ids = b->ids;
    b->meta.sums = b->sums;
    cut(t, &b->meta.key);
    cut(t, &b->meta.parent);
    bt_list_init(&b->in_host);
    bt_list_init(&b->in_disk);
    if (t->n_blobs > t->bucket_mask) {
        grow(t);
    }
    bucket = bucket_of(t, &b->meta.key);
    b->next = *bucket;
    *bucket = b;
    t->n_blobs++;
    return b;
}

static void take_out(struct kv_tiers *t, struct kv_blob *b)
{
    struct kv_blob **at = bucket_of(t, &b->meta.key);

    while (*at != b) {
        at = &(*at)->next;
    }
    *at = b->next;
    t->n_blobs--;
    b->dead = true;
}

void kv_index_settle(struct kv_tiers *t, struct kv_blob *b)
{
    if (b->host != KV_PLACE_NONE || b->disk != KV_PLACE_NONE || b->n_io > 0) {
        return;
    }
    if (!b->dead) {
        take_out(t, b);
    }
    if (b->n_pins == 0) {
        free(b);
    }
}

void kv_index_kill(struct kv_tiers *t, struct kv_blob *b)
{
    if (b->dead) {
        return;
    }
    take_out(t, b);
    bt_list_remove(&b->in_host);
    bt_list_remove(&b->in_disk);
    if (b->host == KV_PLACE_READY) {
        kv_tiers_tell(t, KV_TIERS_REMOVED, KV_TIER_HOST, b);
    }
    if (b->disk == KV_PLACE_READY) {
        kv_tiers_tell(t, KV_TIERS_REMOVED, KV_TIER_DISK, b);
    }
}

/* ---- order ---- */

static bool push_back(struct kv_tiers *t, struct kv_blob *b)
{
    if (b->n_pins > 0 || b->dead || b->stamp == t->clock) {
        return false;
    }
    b->stamp = t->clock;
    bt_list_remove(&b->in_host);
    bt_list_remove(&b->in_disk);
    if (b->host == KV_PLACE_READY) {
        bt_list_push_back(&t->host_lru[b->cls], &b->in_host);
    }
    if (b->disk == KV_PLACE_READY) {
        bt_list_push_back(&t->disk_lru, &b->in_disk);
    }
    return true;
}

/* The parents of b, as far as they are here and nobody pins them. */
static void push_parents(struct kv_tiers *t, const struct kv_blob *b)
{
    while (!kv_key_eq(&b->meta.parent, &b->meta.root)) {
        const struct kv_blob *p = by_key(t, &b->meta.parent);

        if (!p || !kv_key_eq(&p->meta.root, &b->meta.root) || !push_back(t, (struct kv_blob *)p)) {
            return;
        }
        b = p;
    }
}

void kv_index_touch(struct kv_tiers *t, struct kv_blob *b)
{
    t->clock++;
    if (push_back(t, b)) {
        push_parents(t, b);
    }
}

/* ---- pins ---- */

void kv_index_pin(struct kv_tiers *t, struct kv_blob *b)
{
    if (b->n_pins++ == 0) {
        bt_list_remove(&b->in_host);
        bt_list_remove(&b->in_disk);
    }
    t->stats.n_pins++;
}

void kv_index_unpin(struct kv_tiers *t, struct kv_blob *const *blobs, uint32_t n)
{
    t->clock++;
    while (n-- > 0) {
        struct kv_blob *b = blobs[n];

        BT_BUG_ON(b->n_pins == 0);
        t->stats.n_pins--;
        if (--b->n_pins > 0) {
            continue;
        }
        if (b->dead) {
            kv_host_drop(t, b);
            kv_index_settle(t, b);
        } else if (push_back(t, b) && n == 0) {
            push_parents(t, b);
        }
    }
    kv_sink_wake(t);
}

uint32_t kv_index_run(struct kv_tiers *t, const struct kv_run *run, struct kv_blob **ret_blobs)
{
    uint64_t prefix = run->prefix;
    struct kv_blob_meta m;
    struct kv_blob *b;
    bool other;
    uint32_t n;

    for (n = 0; n < run->n_blocks; n++) {
        kv_run_at(run, n, &prefix, &m);
        b = kv_index_of(t, &m, &other);
        if (!b || (b->host != KV_PLACE_READY && b->disk != KV_PLACE_READY)) {
            break;
        }
        kv_index_pin(t, b);
        b->unwritten_ok = false;
        *(b->host == KV_PLACE_READY ? &t->stats.host.hits : &t->stats.disk.hits) += 1;
        ret_blobs[n] = b;
    }
    t->stats.host.misses += run->n_blocks - n;
    t->stats.disk.misses += t->disk ? run->n_blocks - n : 0;
    return n;
}
