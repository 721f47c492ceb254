/* The prefix index: what hits and what must not, who is evicted, random work against a model. */
#include "kvstore/block/index.h"

#include "tests/unit/cmocka.h"

#include <stdlib.h>

#define BLOCK     16 /* tokens; two pages */
#define MAX_CHAIN 8

static struct kv_pool *make_pool(uint32_t n_pages)
{
    struct kv_layout l = {.n_layers = 1,
                          .n_kv_heads = 1,
                          .head_dim = 2,
                          .page_tokens = 8,
                          .dtype = KV_DTYPE_F16,
                          .n_pages = n_pages,
                          .page_stride = 64};
    struct kv_pool *pool = NULL;

    l.layer_stride = l.bytes = l.page_stride * n_pages;
    assert_int_equal(kv_pool_create(&l, &bt_mem_host, "test", &pool, NULL), BT_OK);
    return pool;
}

static struct kv_index *make_index(struct kv_pool *pool, int key_bits)
{
    struct kv_index_cfg cfg = {.pool = pool, .block_tokens = BLOCK, .key_bits = key_bits};
    struct kv_index *x = NULL;

    assert_int_equal(kv_index_create(&cfg, &x, NULL), BT_OK);
    return x;
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
static void user_make(struct kv_index *x, struct user *u, const char *letters)
{
    *u = (struct user){.chain = {.n_blocks = (uint32_t)strlen(letters)}};
    u->chain.root.b[0] = 42;
    u->chain.keys = u->keys;
    u->chain.ids = u->ids;
    for (uint32_t i = 0; i < u->chain.n_blocks; i++) {
        for (int t = 0; t < BLOCK; t++) {
            u->ids[i * BLOCK + (uint32_t)t] = letters[i] * 100 + t;
        }
        kv_index_key(x, i ? &u->keys[i - 1] : &u->chain.root, u->ids + (size_t)i * BLOCK,
                     &u->keys[i]);
    }
}

static enum kv_publish user_publish_next(struct kv_index *x, struct kv_pool *pool, struct user *u)
{
    struct kv_chain c = u->chain;
    enum kv_publish said;
    uint32_t pages[2];

    c.n_blocks = u->n + 1;
    if (kv_pool_stats(pool).n_free < 2) {
        assert_true(kv_index_evict(x, 2) >= 2);
    }
    assert_int_equal(kv_pool_take(pool, 2, KV_OWNER_SEQ, KV_PAGE_NONE, pages), BT_OK);
    said = kv_index_publish(x, &c, u->n ? u->blocks[u->n - 1] : NULL, pages, &u->blocks[u->n]);
    if (said != KV_PUBLISH_NEW) {
        kv_pool_give(pool, pages, 2, KV_OWNER_SEQ);
    }
    u->n += said != KV_PUBLISH_COLLISION;
    return said;
}

/* Matches, holds, computes and publishes the rest. Returns the length of the hit. */
static uint32_t user_run(struct kv_index *x, struct kv_pool *pool, struct user *u)
{
    uint32_t hit = u->n = kv_index_match(x, &u->chain, u->blocks);

    kv_index_hold(x, u->blocks, u->n);
    while (u->n < u->chain.n_blocks && user_publish_next(x, pool, u) != KV_PUBLISH_COLLISION) {
    }
    return hit;
}

static uint32_t run(struct kv_index *x, struct kv_pool *pool, const char *letters)
{
    struct user u;
    uint32_t hit;

    user_make(x, &u, letters);
    hit = user_run(x, pool, &u);
    kv_index_drop(x, u.blocks, u.n);
    return hit;
}

static uint32_t hits(struct kv_index *x, const char *letters)
{
    struct user u;

    user_make(x, &u, letters);
    return kv_index_match(x, &u.chain, u.blocks);
}

static void test_create(void **state)
{
    struct kv_pool *pool = make_pool(16);
    struct kv_index_cfg bad[] = {{pool, 0, 0}, {pool, 4, 0}, {pool, 12, 0}, {pool, 16, 129}};
    struct kv_index *x;

    for (size_t i = 0; i < BT_ARRAY_LEN(bad); i++) {
        assert_int_equal(kv_index_create(&bad[i], &x, NULL), BT_E_CONFIG);
    }
    x = make_index(pool, 0);
    assert_int_equal(kv_index_block_tokens(x), BLOCK);
    assert_int_equal(kv_index_block_pages(x), 2);
    kv_index_destroy(x);
    kv_index_destroy(NULL);
    kv_pool_destroy(pool);
}

static void test_hits(void **state)
{
    struct kv_pool *pool = make_pool(64);
    struct kv_index *x = make_index(pool, 0);
    struct user a, b;
    struct kv_pool_stats s;

    assert_int_equal(run(x, pool, "abcd"), 0);
    assert_int_equal(hits(x, "abcd"), 4);
    assert_int_equal(hits(x, "abxd"), 2);
    assert_int_equal(hits(x, "xbcd"), 0); /* equal blocks behind another first one */
    assert_int_equal(hits(x, "bcd"), 0);
    assert_int_equal(hits(x, ""), 0);
    s = kv_pool_stats(pool);
    assert_int_equal(s.n_index, 8);
    assert_int_equal(s.n_cached, 8);
    assert_int_equal(s.n_free + s.n_index, 64);
    /* Two with the same: the second keeps its own pages but holds the first one's block. */
    user_make(x, &a, "pq");
    user_make(x, &b, "pq");
    assert_int_equal(user_publish_next(x, pool, &a), KV_PUBLISH_NEW);
    assert_int_equal(user_publish_next(x, pool, &b), KV_PUBLISH_SAME);
    assert_ptr_equal(a.blocks[0], b.blocks[0]);
    assert_int_equal(a.blocks[0]->n_refs, 2);
    assert_int_equal(user_publish_next(x, pool, &b), KV_PUBLISH_NEW);
    assert_int_equal(user_publish_next(x, pool, &a), KV_PUBLISH_SAME);
    s = kv_pool_stats(pool);
    assert_int_equal(s.n_index, 12);
    assert_int_equal(s.n_cached, 8);
    assert_int_equal(kv_index_evict(x, 64), 8); /* what is held stays */
    assert_int_equal(hits(x, "pq"), 2);
    kv_index_drop(x, a.blocks, 2);
    kv_index_drop(x, b.blocks, 2);
    assert_int_equal(kv_index_stats(x).duplicates, 2);
    assert_int_equal(kv_index_stats(x).n_held, 0);
    kv_index_destroy(x);
    kv_pool_destroy(pool);
}

/* Whatever decides the bytes, or who may see them, decides the key. */
static void test_PFX_04_roots(void **state)
{
    static const uint8_t zero[32] = {0}, one[32] = {1};
    const struct kv_key_root_args base = {.secret = bt_str_of("s"),
                                          .model_digest = zero,
                                          .weight_epoch = 1,
                                          .kv_format_digest = zero,
                                          .numerics = bt_str_of("cpu")};
    struct kv_key_root_args other[7];
    struct kv_pool *pool = make_pool(64);
    struct kv_index *x = make_index(pool, 0);
    struct user u;

    for (size_t i = 0; i < BT_ARRAY_LEN(other); i++) {
        other[i] = base;
    }
    other[0].secret = bt_str_of("t");
    other[1].model_digest = one;
    other[2].weight_epoch = 2;
    other[3].kv_format_digest = one;
    other[4].numerics = bt_str_of("gpu");
    other[5].adapter = bt_str_of("lora");
    other[6].tenant_salt = bt_str_of("salt");
    user_make(x, &u, "ab");
    assert_int_equal(kv_index_root(x, &base, &u.chain.root, NULL), BT_OK);
    kv_index_key(x, &u.chain.root, u.ids, &u.keys[0]);
    kv_index_key(x, &u.keys[0], u.ids + BLOCK, &u.keys[1]);
    assert_int_equal(user_run(x, pool, &u), 0);
    kv_index_drop(x, u.blocks, u.n);
    assert_int_equal(kv_index_match(x, &u.chain, u.blocks), 2);
    for (size_t i = 0; i < BT_ARRAY_LEN(other); i++) {
        struct user v = u;

        v.chain.keys = v.keys;
        v.chain.ids = v.ids;
        assert_int_equal(kv_index_root(x, &other[i], &v.chain.root, NULL), BT_OK);
        /* Even if the keys were equal the root would not be. */
        assert_int_equal(kv_index_match(x, &v.chain, v.blocks), 0);
        kv_index_key(x, &v.chain.root, v.ids, &v.keys[0]);
        kv_index_key(x, &v.keys[0], v.ids + BLOCK, &v.keys[1]);
        assert_int_equal(kv_index_match(x, &v.chain, v.blocks), 0);
    }
    kv_index_destroy(x);
    kv_pool_destroy(pool);
}

static void test_evicts_leaf_first(void **state)
{
    struct kv_pool *pool = make_pool(64);
    struct kv_index *x = make_index(pool, 0);

    run(x, pool, "abc");
    run(x, pool, "abd");
    run(x, pool, "xy");
    run(x, pool, "abc"); /* used again */
    assert_int_equal(kv_index_stats(x).n_blocks, 6);
    assert_int_equal(kv_index_evict(x, 1), 2); /* d */
    assert_int_equal(hits(x, "abd"), 2);
    kv_index_evict(x, 1); /* y before x */
    assert_int_equal(hits(x, "xy"), 1);
    kv_index_evict(x, 1);
    assert_int_equal(hits(x, "xy"), 0);
    assert_int_equal(hits(x, "abc"), 3);
    kv_index_evict(x, 1);
    assert_int_equal(hits(x, "abc"), 2);
    kv_index_evict(x, 1);
    assert_int_equal(hits(x, "abc"), 1);
    kv_index_evict(x, 1);
    assert_int_equal(hits(x, "abc"), 0);
    assert_int_equal(kv_index_evict(x, 1), 0);
    assert_int_equal(kv_pool_stats(pool).n_free, 64);
    kv_index_destroy(x);
    kv_pool_destroy(pool);
}

/* PFX-01: the same block and length behind other blocks, and keys of 8 bits: never a wrong hit. */
static void test_PFX_01_collisions(void **state)
{
    struct kv_pool *pool = make_pool(400);
    struct kv_index *x = make_index(pool, 8);
    uint32_t seed = 3, n_hits = 0;

    for (int round = 0; round < 1000; round++) {
        char letters[MAX_CHAIN + 1] = {0};
        struct user u;

        for (uint32_t i = 0; i < MAX_CHAIN; i++) {
            seed = seed * 1664525u + 1013904223u;
            letters[i] = (char)('a' + (seed >> 20) % 6);
        }
        user_make(x, &u, letters);
        n_hits += user_run(x, pool, &u);
        for (uint32_t i = 0; i < u.n; i++) {
            assert_memory_equal(u.blocks[i]->ids, u.ids + (size_t)i * BLOCK,
                                BLOCK * sizeof(int32_t));
            assert_ptr_equal(u.blocks[i]->parent, i ? u.blocks[i - 1] : NULL);
        }
        kv_index_drop(x, u.blocks, u.n);
    }
    assert_true(n_hits > 100);
    assert_true(kv_index_stats(x).collisions > 100);
    kv_index_destroy(x);
    kv_pool_destroy(pool);
}

/* Random users of a pool that is too small for all; counters and contents hold at every turn. */
static void test_random(void **state)
{
    struct kv_pool *pool = make_pool(60);
    struct kv_index *x = make_index(pool, 0);
    struct user users[5];
    uint32_t seed = 5;

    memset(users, 0, sizeof(users));
    for (int round = 0; round < 20000; round++) {
        struct user *u = &users[round % 5];
        char letters[6] = {0};
        struct kv_pool_stats s;
        uint32_t held = 0;

        kv_index_drop(x, u->blocks, u->n);
        for (uint32_t i = 0; i < 5; i++) {
            seed = seed * 1664525u + 1013904223u;
            letters[i] = (char)('a' + (seed >> 20) % (i < 2 ? 2 : 5));
        }
        user_make(x, u, letters);
        user_run(x, pool, u);
        assert_int_equal(u->n, 5);
        for (int i = 0; i < 5; i++) {
            for (uint32_t k = 0; k < users[i].n; k++) {
                struct kv_block *b = users[i].blocks[k];

                assert_memory_equal(b->ids, users[i].ids + (size_t)k * BLOCK,
                                    BLOCK * sizeof(int32_t));
                held += b->mark++ == 0;
            }
        }
        for (int i = 0; i < 5; i++) {
            for (uint32_t k = 0; k < users[i].n; k++) {
                struct kv_block *b = users[i].blocks[k];

                assert_true(b->mark == 0 || b->mark == b->n_refs);
                b->mark = 0;
            }
        }
        s = kv_pool_stats(pool);
        assert_int_equal(s.n_index, 2 * kv_index_stats(x).n_blocks);
        assert_int_equal(s.n_index - s.n_cached, 2 * held);
        assert_int_equal(s.n_free + s.n_index, 60);
    }
    assert_true(kv_index_stats(x).evictions > 1000);
    for (int i = 0; i < 5; i++) {
        kv_index_drop(x, users[i].blocks, users[i].n);
    }
    kv_index_destroy(x);
    assert_true(kv_pool_audit(pool));
    kv_pool_destroy(pool);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_create),
        cmocka_unit_test(test_hits),
        cmocka_unit_test(test_PFX_04_roots),
        cmocka_unit_test(test_evicts_leaf_first),
        cmocka_unit_test(test_PFX_01_collisions),
        cmocka_unit_test(test_random),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
