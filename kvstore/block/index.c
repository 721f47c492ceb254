/* Prefix index: a hash table over a fixed array of entries, and the list of those nobody holds. As
 * many entries as the pool has room for blocks, so that none is ever missing. */
#include "kvstore/block/index_int.h"

#include "common/base/buf.h"
#include "common/obs/log.h"

#include <stdlib.h>

static int alloc_entries(struct kv_index *x, struct bt_err *err)
{
    uint64_t n_buckets = 16;

    while (n_buckets < x->n_max) {
        n_buckets *= 2;
    }
    x->bucket_mask = n_buckets - 1;
    x->entries = bt_calloc((size_t)x->n_max + 1, sizeof(*x->entries));
    x->ids = bt_calloc(((size_t)x->n_max + 1) * x->block_tokens, sizeof(*x->ids));
    x->pages = bt_calloc(((size_t)x->n_max + 1) * x->block_pages, sizeof(*x->pages));
    x->buckets = bt_calloc(n_buckets, sizeof(struct kv_block *));
    if (!x->entries || !x->ids || !x->pages || !x->buckets) {
        return BT_FAIL(err, BT_E_NOMEM, "prefix index: no memory for %u blocks", x->n_max);
    }
    for (uint32_t i = x->n_max; i-- > 0;) {
        struct kv_block *b = &x->entries[i];

        bt_list_init(&b->link);
        b->ids = x->ids + (size_t)i * x->block_tokens;
        b->pages = x->pages + (size_t)i * x->block_pages;
        b->next = x->unused;
        x->unused = b;
    }
    return BT_OK;
}

int kv_index_create(const struct kv_index_cfg *cfg, struct kv_index **ret_index, struct bt_err *err)
{
    const struct kv_layout *layout = kv_pool_layout(cfg->pool);
    struct kv_index *x;
    int rc;

    if (cfg->block_tokens < layout->page_tokens || cfg->block_tokens > 1 << 20 ||
        cfg->block_tokens % layout->page_tokens != 0) {
        return BT_FAIL(err, BT_E_CONFIG,
                       "a block of %d tokens is no multiple of a page of %d tokens",
                       cfg->block_tokens, layout->page_tokens);
    }
    if (cfg->key_bits < 0 || cfg->key_bits > 128) {
        return BT_FAIL(err, BT_E_CONFIG, "a key has 1 to 128 bits, not %d", cfg->key_bits);
    }
    x = bt_calloc(1, sizeof(*x));
    if (!x) {
        return BT_FAIL(err, BT_E_NOMEM, "prefix index: no memory");
    }
    x->cfg = *cfg;
    x->block_tokens = (uint32_t)cfg->block_tokens;
    x->block_pages = x->block_tokens / (uint32_t)layout->page_tokens;
    x->n_max = layout->n_pages / x->block_pages;
    bt_list_init(&x->unheld);
    rc = kv_hasher_create(&x->hasher, err);
    rc = rc < 0 ? rc : alloc_entries(x, err);
    if (rc < 0) {
        kv_index_destroy(x);
        return rc;
    }
    *ret_index = x;
    return BT_OK;
}

void kv_index_destroy(struct kv_index *x)
{
    if (!x) {
        return;
    }
    BT_BUG_ON(!kv_index_clear(x));
    kv_hasher_destroy(x->hasher);
    free(x->entries);
    free(x->ids);
    free(x->pages);
    free(x->buckets);
    free(x);
}

uint32_t kv_index_block_tokens(const struct kv_index *x)
{
    return x->block_tokens;
}

uint32_t kv_index_block_pages(const struct kv_index *x)
{
    return x->block_pages;
}

uint64_t kv_index_changes(const struct kv_index *x)
{
    return x->changes;
}

/* ---- keys ---- */

static void cut(const struct kv_index *x, struct kv_key *key)
{
    int bits = x->cfg.key_bits ? x->cfg.key_bits : 128;

    for (int i = 0; i < (int)sizeof(key->b); i++) {
        int keep = BT_MAX(bits - 8 * i, 0);

        keep = BT_MIN(keep, 8);
        key->b[i] &= (uint8_t)(0xff00u >> keep);
    }
}

void kv_index_key(struct kv_index *x,
                  const struct kv_key *parent,
                  const int32_t *ids,
                  struct kv_key *ret_key)
{
    kv_key_block(x->hasher, parent, ids, x->block_tokens, ret_key);
    cut(x, ret_key);
}

void kv_index_tail_key(struct kv_index *x,
                       const struct kv_key *parent,
                       const int32_t *ids,
                       uint32_t n,
                       struct kv_key *ret_key)
{
    kv_key_block(x->hasher, parent, ids, n, ret_key);
    cut(x, ret_key);
}

int kv_index_root(struct kv_index *x,
                  const struct kv_key_root_args *args,
                  struct kv_key *ret_root,
                  struct bt_err *err)
{
    return kv_key_root(x->hasher, args, ret_root, err);
}

/* Block `i` of the chain behind `parent`. NULL = not here; *ret_other: another one has its key. */
static struct kv_block *find(struct kv_index *x,
                             const struct kv_chain *chain,
                             uint32_t i,
                             const struct kv_block *parent,
                             bool *ret_other)
{
    const struct kv_key *key = &chain->keys[i];
    const int32_t *ids = chain->ids + (size_t)i * x->block_tokens;

    *ret_other = false;
    for (struct kv_block *b = *kv_index_bucket(x, key); b; b = b->next) {
        if (!kv_key_eq(&b->key, key)) {
            continue;
        }
        if (b->parent == parent && kv_key_eq(&b->root, &chain->root) &&
            memcmp(b->ids, ids, x->block_tokens * sizeof(*ids)) == 0) {
            return kv_index_check(x, b) ? b : NULL;
        }
        *ret_other = true;
        return NULL; /* one entry a key */
    }
    return NULL;
}

uint32_t
kv_index_match(struct kv_index *x, const struct kv_chain *chain, struct kv_block **ret_blocks)
{
    struct kv_block *parent = NULL;
    bool other = false;
    uint32_t n;

    for (n = 0; n < chain->n_blocks; n++) {
        struct kv_block *b = find(x, chain, n, parent, &other);

        if (!b) {
            break;
        }
        parent = ret_blocks[n] = b;
    }
    x->stats.collisions += other;
    return n;
}

/* ---- holders ---- */

static void hold(struct kv_index *x, struct kv_block *b)
{
    if (b->n_refs++ == 0) {
        BT_BUG_ON(b->unchecked);
        bt_list_remove(&b->link);
        x->n_unheld--;
        if (x->ledger) {
            kv_ledger_mark_held(x->ledger, kv_index_slot(x, b));
        }
    }
}

void kv_index_hold(struct kv_index *x, struct kv_block *const *blocks, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) {
        BT_BUG_ON(blocks[i]->parent != (i ? blocks[i - 1] : NULL));
        hold(x, blocks[i]);
    }
    kv_index_tell_cached(x);
}

static void drop(struct kv_index *x, struct kv_block *b)
{
    BT_BUG_ON(b->n_refs == 0);
    if (--b->n_refs == 0) {
        b->used_ns = x->now_ns;
        bt_list_push_back(&x->unheld, &b->link);
        x->n_unheld++;
        if (x->ledger) {
            kv_ledger_mark_let_go(x->ledger, kv_index_slot(x, b));
        }
    }
}

void kv_index_drop(struct kv_index *x, struct kv_block *const *blocks, uint32_t n)
{
    while (n-- > 0) {
        drop(x, blocks[n]);
    }
    kv_index_tell_cached(x);
}

void kv_index_hold_to(struct kv_index *x, struct kv_block *last)
{
    for (; last; last = last->parent) {
        hold(x, last);
    }
    kv_index_tell_cached(x);
}

void kv_index_drop_to(struct kv_index *x, struct kv_block *last)
{
    for (; last; last = last->parent) {
        drop(x, last);
    }
    kv_index_tell_cached(x);
}

/* ---- blocks come and go ---- */

void kv_index_enter(struct kv_index *x, struct kv_block *b)
{
    struct kv_block **bucket = kv_index_bucket(x, &b->key);

    b->n_children = 0;
    b->used_ns = x->now_ns;
    b->mark = 0;
    b->unchecked = b->adopted = b->doomed = false;
    b->generation = ++x->generation;
    if (b->parent) {
        b->parent->n_children++;
    }
    b->next = *bucket;
    *bucket = b;
    x->stats.n_blocks++;
    x->changes++;
    kv_event_tell(&x->cfg.sink, KV_EVENT_STORED, 0, kv_key_fingerprint(&b->key));
}

/* Last of all: from here on a successor takes it over. */
static void seal(struct kv_index *x, const struct kv_block *b)
{
    struct kv_ledger_block r = {.key = b->key, .root = b->root, .ids = b->ids, .pages = b->pages};

    if (!x->ledger) {
        return;
    }
    if (b->parent) {
        r.has_parent = true;
        r.parent = b->parent->key;
    }
    kv_ledger_seal(x->ledger, kv_index_slot(x, b), &r);
}

enum kv_publish kv_index_publish(struct kv_index *x,
                                 const struct kv_chain *chain,
                                 struct kv_block *parent,
                                 const uint32_t *pages,
                                 struct kv_block **ret_block)
{
    uint32_t last = chain->n_blocks - 1;
    struct kv_block *b;
    bool other;

    BT_BUG_ON(chain->n_blocks == 0 || (last == 0) != (parent == NULL));
    BT_BUG_ON(parent && parent->n_refs == 0);
    b = find(x, chain, last, parent, &other);
    if (b) {
        hold(x, b);
        kv_index_tell_cached(x);
        x->stats.duplicates++;
        *ret_block = b;
        return KV_PUBLISH_SAME;
    }
    if (other) {
        x->stats.collisions++;
        return KV_PUBLISH_COLLISION;
    }
    b = x->unused;
    BT_BUG_ON(!b); /* there are as many as the pool has room for */
    x->unused = b->next;
    kv_pool_set_owner(x->cfg.pool, pages, x->block_pages, KV_OWNER_SEQ, KV_OWNER_INDEX);
    memcpy(b->pages, pages, x->block_pages * sizeof(*pages));
    memcpy(b->ids, chain->ids + (size_t)last * x->block_tokens, x->block_tokens * sizeof(*b->ids));
    b->key = chain->keys[last];
    b->root = chain->root;
    b->parent = parent;
    b->n_refs = 1;
    kv_index_enter(x, b);
    seal(x, b);
    x->stats.published++;
    *ret_block = b;
    return KV_PUBLISH_NEW;
}

void kv_index_remove(struct kv_index *x, struct kv_block *b)
{
    struct kv_block **at = kv_index_bucket(x, &b->key);

    BT_BUG_ON(b->n_refs != 0 || b->n_children != 0);
    bt_list_remove(&b->link);
    while (*at != b) {
        at = &(*at)->next;
    }
    *at = b->next;
    if (b->parent) {
        b->parent->n_children--;
    }
    x->n_unheld--;
    kv_index_tell_cached(x);
    if (x->ledger) {
        kv_ledger_unseal(x->ledger, kv_index_slot(x, b));
    }
    kv_pool_give(x->cfg.pool, b->pages, x->block_pages, KV_OWNER_INDEX);
    b->generation = 0;
    b->next = x->unused;
    x->unused = b;
    x->stats.n_blocks--;
    x->changes++;
    kv_event_tell(&x->cfg.sink, KV_EVENT_REMOVED, 0, kv_key_fingerprint(&b->key));
}

uint32_t kv_index_evict(struct kv_index *x, uint32_t n)
{
    uint32_t done = 0;

    while (done < n && x->n_unheld > 0) {
        kv_index_remove(x, BT_LIST_ENTRY(x->unheld.next, struct kv_block, link));
        x->stats.evictions++;
        done += x->block_pages;
    }
    return done;
}

void kv_index_set_time(struct kv_index *x, uint64_t now_ns)
{
    x->now_ns = now_ns;
}

void kv_index_tell(const struct kv_index *x)
{
    kv_event_tell(&x->cfg.sink, KV_EVENT_CLEARED, 0, 0);
    for (uint64_t i = 0; i <= x->bucket_mask; i++) {
        for (const struct kv_block *b = x->buckets[i]; b; b = b->next) {
            kv_event_tell(&x->cfg.sink, KV_EVENT_STORED, 0, kv_key_fingerprint(&b->key));
        }
    }
}

bool kv_index_clear(struct kv_index *x)
{
    kv_index_evict(x, UINT32_MAX);
    if (x->stats.n_blocks > 0) {
        BT_ERROR("index_clear", "msg=\"blocks are held\" blocks=%u", x->stats.n_blocks);
    }
    return x->stats.n_blocks == 0;
}

struct kv_index_stats kv_index_stats(const struct kv_index *x)
{
    struct kv_index_stats s = x->stats;

    s.n_held = s.n_blocks - x->n_unheld;
    if (x->n_unheld > 0) {
        s.oldest_ns = BT_LIST_ENTRY(x->unheld.next, struct kv_block, link)->used_ns;
    }
    return s;
}
