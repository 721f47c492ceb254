/* A pool with index and ledger over memory that outlives them, as with a keeper. What a block's
 * pages hold is a function of its key, so that every adopted block can be proven right without its
 * checksum. */
#ifndef BT_TESTS_KVSTORE_LEDGER_RIG_H
#define BT_TESTS_KVSTORE_LEDGER_RIG_H

#include "tests/unit/cmocka.h"

#include "kvstore/block/index.h"

#include <stdlib.h>
#include <sys/mman.h>

#define BLOCK     16 /* tokens; two pages */
#define MAX_CHAIN 8
#define LAYERS    3

struct rig {
    struct kv_layout layout;
    void *pool_mem, *ledger_mem; /* shared with children */
    size_t ledger_bytes;
    uint64_t pool_id;
    struct kv_key root;
    struct kv_ledger *ledger;
    struct kv_pool *pool;
    struct kv_index *index;
    struct kv_adopted adopted;
};

static inline void *shared(size_t bytes)
{
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);

    assert_ptr_not_equal(p, MAP_FAILED);
    return p;
}

static inline void leave(struct bt_mem_region *r)
{
    r->base = NULL; /* the rig's */
}

static const struct bt_mem_ops rig_mem = {.kind = BT_MEM_HOST, .name = "rig", .free = leave};

static inline void rig_init(struct rig *r, uint32_t n_pages)
{
    *r = (struct rig){.layout = {.n_layers = LAYERS,
                                 .n_kv_heads = 1,
                                 .head_dim = 2,
                                 .page_tokens = 8,
                                 .dtype = KV_DTYPE_F16,
                                 .n_pages = n_pages},
                      .pool_id = 77,
                      .root.b = {42}};
    assert_int_equal(kv_layout_init(&r->layout, NULL), BT_OK);
    r->ledger_bytes = kv_ledger_bytes(&r->layout, BLOCK);
    r->pool_mem = shared(r->layout.bytes);
    r->ledger_mem = shared(r->ledger_bytes);
}

static inline void rig_fini(struct rig *r)
{
    munmap(r->pool_mem, r->layout.bytes);
    munmap(r->ledger_mem, r->ledger_bytes);
}

/* A process starts. */
static inline void rig_open(struct rig *r)
{
    struct kv_ledger_cfg lc = {.layout = &r->layout,
                               .block_tokens = BLOCK,
                               .root = r->root,
                               .pool_id = r->pool_id,
                               .incarnation = 1,
                               .pool = r->pool_mem,
                               .mem = r->ledger_mem,
                               .bytes = r->ledger_bytes};
    struct bt_mem_region region = {&rig_mem, r->pool_mem, r->layout.bytes, -1};
    struct kv_index_cfg xc = {.block_tokens = BLOCK};

    assert_int_equal(kv_ledger_create(&lc, &r->ledger, NULL), BT_OK);
    assert_int_equal(kv_pool_create_in(&r->layout, &region, &r->pool, NULL), BT_OK);
    kv_pool_set_ledger(r->pool, r->ledger);
    xc.pool = r->pool;
    assert_int_equal(kv_index_create(&xc, &r->index, NULL), BT_OK);
    assert_int_equal(kv_index_adopt(r->index, r->ledger, &r->adopted, NULL), BT_OK);
}

/* It ends in good order: what is sealed stays. */
static inline void rig_close(struct rig *r)
{
    kv_index_leave_ledger(r->index);
    kv_pool_set_ledger(r->pool, NULL);
    kv_index_destroy(r->index);
    kv_pool_destroy(r->pool);
    kv_ledger_destroy(r->ledger);
}

/* A sequence: ids, and the blocks that it holds. */
struct user {
    int32_t ids[MAX_CHAIN * BLOCK];
    struct kv_key keys[MAX_CHAIN];
    struct kv_chain chain;
    struct kv_block *blocks[MAX_CHAIN];
    uint32_t n;
};

/* One letter per block: equal letters are equal ids. */
static inline void user_make(struct rig *r, struct user *u, const char *letters)
{
    *u = (struct user){.chain = {.root = r->root, .n_blocks = (uint32_t)strlen(letters)}};
    u->chain.keys = u->keys;
    u->chain.ids = u->ids;
    for (uint32_t i = 0; i < u->chain.n_blocks; i++) {
        for (int t = 0; t < BLOCK; t++) {
            u->ids[i * BLOCK + (uint32_t)t] = letters[i] * 100 + t;
        }
        kv_index_key(r->index, i ? &u->keys[i - 1] : &u->chain.root, u->ids + (size_t)i * BLOCK,
                     &u->keys[i]);
    }
}

static inline void fill(const struct rig *r, const struct kv_key *key, uint32_t page, uint32_t nth)
{
    for (int layer = 0; layer < LAYERS; layer++) {
        char *p = (char *)r->pool_mem + kv_layout_offset(&r->layout, layer, page);

        for (size_t i = 0; i < r->layout.page_stride; i++) {
            ((volatile char *)p)[i] =
                (char)(key->b[i % 16] + nth * 3 + (uint32_t)layer * 7 + i / 16);
        }
    }
}

static inline bool holds(const struct rig *r, const struct kv_block *b)
{
    for (uint32_t nth = 0; nth < 2; nth++) {
        for (int layer = 0; layer < LAYERS; layer++) {
            const char *p =
                (char *)r->pool_mem + kv_layout_offset(&r->layout, layer, b->pages[nth]);

            for (size_t i = 0; i < r->layout.page_stride; i++) {
                if (p[i] != (char)(b->key.b[i % 16] + nth * 3 + (uint32_t)layer * 7 + i / 16)) {
                    return false;
                }
            }
        }
    }
    return true;
}

static inline enum kv_publish user_publish_next(struct rig *r, struct user *u)
{
    struct kv_chain c = u->chain;
    enum kv_publish said;
    uint32_t pages[2];

    c.n_blocks = u->n + 1;
    if (kv_pool_stats(r->pool).n_free < 2) {
        assert_true(kv_index_evict(r->index, 2) >= 2);
    }
    assert_int_equal(kv_pool_take(r->pool, 2, KV_OWNER_SEQ, KV_PAGE_NONE, pages), BT_OK);
    fill(r, &u->keys[u->n], pages[0], 0);
    fill(r, &u->keys[u->n], pages[1], 1);
    said =
        kv_index_publish(r->index, &c, u->n ? u->blocks[u->n - 1] : NULL, pages, &u->blocks[u->n]);
    if (said != KV_PUBLISH_NEW) {
        kv_pool_give(r->pool, pages, 2, KV_OWNER_SEQ);
    }
    u->n += said != KV_PUBLISH_COLLISION;
    return said;
}

/* Matches, holds, computes and publishes the rest. Returns the length of the hit. */
static inline uint32_t run(struct rig *r, const char *letters)
{
    struct user u;
    uint32_t hit;

    user_make(r, &u, letters);
    hit = u.n = kv_index_match(r->index, &u.chain, u.blocks);
    kv_index_hold(r->index, u.blocks, u.n);
    for (uint32_t i = 0; i < hit; i++) {
        assert_true(holds(r, u.blocks[i]));
    }
    while (u.n < u.chain.n_blocks && user_publish_next(r, &u) != KV_PUBLISH_COLLISION) {
    }
    kv_index_drop(r->index, u.blocks, u.n);
    return hit;
}

static inline uint32_t hits(struct rig *r, const char *letters)
{
    struct user u;

    user_make(r, &u, letters);
    return kv_index_match(r->index, &u.chain, u.blocks);
}

#endif
