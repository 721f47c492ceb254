/* The host tier: what is found and loaded, who goes first, pins, collisions, taking in from
 * outside.
 */
#include "tests/unit/kvstore/tier/fixture.h"

#include "tests/unit/cmocka.h"

#include <pthread.h>

static struct kv_tier_stats host(struct world *w)
{
    return kv_tiers_stats(w->tiers).host;
}

static void test_keeps_and_loads(void **state)
{
    struct world w;
    struct chain c, other;
    struct taken t;

    world_make(&w, 64, 16);
    world_start(&w);
    chain_make(&w, &c, 1, 5, 1, 5);
    chain_make(&w, &other, 1, 3, 2, 5);
    assert_int_equal(take_chain(&w, &c), 0);
    assert_int_equal(offer_chain(&w, &c), 5);
    assert_int_equal(offer_chain(&w, &c), 0); /* known */
    assert_int_equal(take_chain(&w, &c), 5);
    assert_int_equal(take_chain(&w, &other), 3);
    take_find(&w, &c, 2, &t); /* behind what the engine has */
    assert_int_equal(t.find.n, 3);
    assert_int_equal(t.find.n_tier[KV_TIER_HOST], 3);
    assert_int_equal(t.find.n_fast, 3);
    assert_int_equal(t.find.bytes, 3 * BLOB_BYTES);
    assert_true(t.find.load_ns > 0 && t.find.fast_ns == t.find.load_ns);
    assert_int_equal(kv_tiers_stats(w.tiers).n_pins, 3);
    take_load(&w, &t);
    assert_int_equal(t.n_progress, N_LAYERS);
    assert_true(take_right(&w, &c, &t, 3));
    take_end(&w, &t);
    take_find(&w, &c, 5, &t); /* nothing to look for */
    assert_int_equal(t.find.n, 0);
    take_end(&w, &t);
    assert_int_equal(host(&w).n_blocks, 5);
    assert_int_equal(host(&w).hits, 5 + 3 + 3);
    world_free(&w);
}

/* A tail has its own key; it is found by as many ids as it has. */
static void test_tail(void **state)
{
    struct world w;
    struct chain c, shorter;

    world_make(&w, 64, 16);
    world_start(&w);
    chain_make(&w, &c, 1, 3, 1, 3);
    chain_cut(&w, &c, 5);
    shorter = c;
    shorter.c.keys = shorter.keys;
    shorter.c.ids = shorter.ids;
    chain_cut(&w, &shorter, 4);
    assert_int_equal(offer_chain(&w, &c), 3);
    assert_int_equal(take_chain(&w, &c), 3);
    assert_int_equal(take_chain(&w, &shorter), 2);
    world_free(&w);
}

/* Leaves go first, what was used last stays, shared heads stay longest. */
static void test_order_of_eviction(void **state)
{
    struct world w;
    struct chain a, b, c;

    world_make(&w, 64, 8);
    world_start(&w);
    chain_make(&w, &a, 1, 2, 1, 4); /* head of 2, then its own 2 */
    chain_make(&w, &b, 1, 2, 2, 4);
    chain_make(&w, &c, 3, 2, 3, 2);
    assert_int_equal(offer_chain(&w, &a), 4);
    assert_int_equal(offer_chain(&w, &b), 2);
    assert_int_equal(take_chain(&w, &a), 4); /* a is fresher than b's own two */
    assert_int_equal(offer_chain(&w, &c), 2);
    assert_int_equal(host(&w).evictions, 0);
    chain_make(&w, &c, 4, 2, 4, 2);
    assert_int_equal(offer_chain(&w, &c), 2);
    assert_int_equal(host(&w).evictions, 2);
    assert_int_equal(take_chain(&w, &b), 2); /* its leaves went, the shared head is there */
    assert_int_equal(take_chain(&w, &a), 4);
    world_free(&w);
}

static void test_pinned_stays(void **state)
{
    struct world w;
    struct chain a, b;
    struct taken t;

    world_make(&w, 64, 8);
    world_start(&w);
    chain_make(&w, &a, 1, 8, 1, 8);
    chain_make(&w, &b, 2, 8, 2, 8);
    offer_chain(&w, &a);
    take_find(&w, &a, 0, &t);
    assert_int_equal(t.find.n, 8);
    assert_int_equal(offer_block(&w, &b, 0), BT_E_EXHAUSTED);
    take_load(&w, &t);
    assert_int_equal(t.load.n_good, 8);
    assert_true(take_right(&w, &a, &t, 8));
    take_end(&w, &t);
    assert_int_equal(offer_chain(&w, &b), 8);
    assert_int_equal(take_chain(&w, &a), 0);
    world_free(&w);
}

/* Keys of 8 bits: a collision is a miss, counted, and never a wrong answer. */
static void test_PFX_01_collision_is_a_miss(void **state)
{
    struct world w;
    struct chain c;
    uint32_t n = 0;

    world_make(&w, 64, 64);
    w.key_bits = 8;
    world_start(&w);
    for (uint32_t i = 0; i < 1000; i++) {
        chain_make(&w, &c, i % 7, i % 3, i + 100, 3);
        n += take_chain(&w, &c); /* checks every byte */
        offer_chain(&w, &c);
        n += take_chain(&w, &c);
    }
    assert_true(n > 0);
    assert_true(kv_tiers_stats(w.tiers).collisions > 100);
    world_free(&w);
}

/* Equal last block, equal length, another block before it: made by hand, with equal keys. */
static void test_PFX_01_other_history(void **state)
{
    struct world w;
    struct chain a, b;
    struct kv_tiers_stats s;

    world_make(&w, 64, 16);
    world_start(&w);
    chain_make(&w, &a, 1, 1, 9, 2);
    chain_make(&w, &b, 2, 1, 9, 2);
    memcpy(b.ids + BLOCK, a.ids + BLOCK, BLOCK * sizeof(a.ids[0]));
    memcpy(b.keys, a.keys, sizeof(a.keys));
    offer_chain(&w, &a);
    assert_int_equal(take_chain(&w, &b), 0);
    /* Block 0 of b in place of a's: what follows a's must not follow b's. */
    world_stop(&w);
    world_start(&w);
    assert_int_equal(offer_block(&w, &a, 1), BT_OK);
    assert_int_equal(offer_block(&w, &b, 0), BT_OK);
    assert_int_equal(take_chain(&w, &b), 1);
    s = kv_tiers_stats(w.tiers);
    assert_true(s.collisions >= 1);
    world_free(&w);
}

/* Blocks 11 to 20 of 32 go bad between look-up and load: the leading part is used. */
static void test_TIER_02_promise_is_kept_or_cut(void **state)
{
    struct world w;
    struct chain a, b;
    struct taken t;
    struct kv_blob *blobs[32];
    struct kv_run run;

    world_make(&w, 256, 40);
    world_start(&w);
    chain_make(&w, &a, 1, 32, 1, 32);
    chain_make(&w, &b, 2, 32, 2, 32);
    offer_chain(&w, &a);
    take_find(&w, &a, 0, &t);
    assert_int_equal(t.find.n, 32);
    offer_chain(&w, &b); /* wants all memory: what was promised stays */
    run = kv_run_of(&a.c, 0, BLOCK, 0);
    assert_int_equal(kv_tiers_pin(w.tiers, &run, blobs), 32);
    for (int i = 11; i <= 20; i++) {
        ((char *)kv_blob_layer(w.tiers, blobs[i], (uint32_t)i % N_LAYERS))[i] ^= 1;
    }
    kv_tiers_bad(w.tiers, blobs[25]);
    kv_tiers_unpin(w.tiers, blobs, 32);
    take_load(&w, &t);
    assert_int_equal(t.load.n_good, 11);
    assert_int_equal(t.load.layers_ready, N_LAYERS);
    assert_true(take_right(&w, &a, &t, 11));
    take_end(&w, &t);
    assert_int_equal(take_chain(&w, &a), 11);
    assert_int_equal(host(&w).bad, 3); /* 25; 12 in layer 0, 11 in layer 2 */
    world_free(&w);
}

/* Looked up and given up, loaded and cancelled, 10,000 times, in memory for 50 prompts. */
static void test_TIER_06_pins_come_back(void **state)
{
    struct world w;
    struct chain c;
    uint32_t hits[2] = {0, 0};

    world_make(&w, 128, 50 * 4);
    world_start(&w);
    for (uint32_t i = 0; i < 10000; i++) {
        uint32_t who = i * 7919 % 60;
        struct taken t;

        chain_make(&w, &c, who, 4, who, 4);
        take_find(&w, &c, i % 3, &t);
        hits[i >= 5000] += t.find.n;
        if (i % 4 == 1) {
            take_load(&w, &t);
            assert_true(take_right(&w, &c, &t, t.load.n_good));
        } else if (i % 4 == 2) {
            take_begin(&w, &t);
            w.src->ops->load_cancel(w.src, &t.load);
            assert_true(take_wait(&t));
            assert_true(take_right(&w, &c, &t, t.load.n_good));
        }
        take_end(&w, &t);
        assert_int_equal(kv_tiers_stats(w.tiers).n_pins, 0);
        if (t.find.n < 4 - i % 3) {
            offer_chain(&w, &c);
        }
    }
    assert_true(hits[1] >= hits[0] * 9 / 10); /* steady, does not sink */
    assert_true(host(&w).n_blocks > 150);
    assert_int_equal(kv_tiers_stats(w.tiers).n_loads, 0);
    world_free(&w);
}

static struct kv_blob_meta meta_of(const struct chain *c, uint32_t i, const struct kv_blob_shape *s)
{
    struct kv_run run = kv_run_of(&c->c, i, BLOCK, 0);
    uint64_t prefix = run.prefix;
    struct kv_blob_meta m;

    kv_run_at(&run, 0, &prefix, &m);
    m.shape = *s;
    return m;
}

/* Bytes that come from the net: nobody finds them before they are committed. */
static void test_reserve_commit_abort(void **state)
{
    struct world w;
    struct chain c;
    struct kv_blob_shape shape;
    struct kv_blob *b, *again;
    uint64_t sums[N_LAYERS];
    struct kv_blob_meta m;
    struct kv_run run;

    world_make(&w, 64, 16);
    world_start(&w);
    shape = kv_blob_shape_of(kv_pool_layout(w.pool), BLOCK);
    chain_make(&w, &c, 1, 2, 1, 2);
    m = meta_of(&c, 0, &shape);
    assert_int_equal(kv_tiers_reserve(w.tiers, &m, &b), BT_OK);
    assert_int_equal(kv_tiers_reserve(w.tiers, &m, &again), BT_E_EXISTS);
    for (uint32_t l = 0; l < N_LAYERS; l++) {
        memset(kv_blob_layer(w.tiers, b, l), 7 + (int)l, shape.layer_bytes);
        sums[l] = kv_blob_sum(kv_blob_layer(w.tiers, b, l), shape.layer_bytes);
    }
    run = kv_run_of(&c.c, 0, BLOCK, 0);
    assert_int_equal(kv_tiers_peek(w.tiers, &run, NULL), 0);
    kv_tiers_abort(w.tiers, b);
    assert_int_equal(kv_tiers_stats(w.tiers).n_pins, 0);
    assert_int_equal(host(&w).n_blocks, 0);
    assert_int_equal(kv_tiers_reserve(w.tiers, &m, &b), BT_OK);
    for (uint32_t l = 0; l < N_LAYERS; l++) {
        memset(kv_blob_layer(w.tiers, b, l), 7 + (int)l, shape.layer_bytes);
    }
    kv_tiers_commit(w.tiers, b, sums);
    kv_tiers_unpin(w.tiers, &b, 1);
    assert_int_equal(kv_tiers_pin(w.tiers, &run, &again), 1);
    assert_int_equal(kv_blob_tier(w.tiers, again), KV_TIER_HOST);
    assert_int_equal(kv_blob_meta(again)->sums[1], sums[1]);
    assert_int_equal(*(char *)kv_blob_layer(w.tiers, again, 2), 9);
    kv_tiers_unpin(w.tiers, &again, 1);
    m.shape.layer_bytes *= 2; /* not this node's layout */
    m.key.b[3] ^= 1;
    assert_int_equal(kv_tiers_reserve(w.tiers, &m, &b), BT_E_INVALID);
    world_free(&w);
}

/* Blobs of several shapes in one region: each gets room, the others give it up. */
static void test_several_shapes(void **state)
{
    struct kv_blob_shape shapes[] = {{2, BLOCK, 20000}, {5, BLOCK, 3000}, {1, BLOCK, 200000}};
    struct world w;
    struct chain c;
    struct kv_blob *b;
    uint64_t sums[5];

    world_make(&w, 8, 1);
    w.conf.host_bytes = 4 << 20;
    w.no_source = true;
    world_start(&w);
    assert_null(w.src);
    for (uint32_t i = 0; i < 3000; i++) {
        const struct kv_blob_shape *s = &shapes[i / 200 % 3];
        struct kv_blob_meta m;

        chain_make(&w, &c, i, 1, i, 1);
        m = meta_of(&c, 0, s);
        assert_int_equal(kv_tiers_reserve(w.tiers, &m, &b), BT_OK);
        for (uint32_t l = 0; l < s->n_layers; l++) {
            memset(kv_blob_layer(w.tiers, b, l), (int)(i + l), s->layer_bytes);
            sums[l] = kv_blob_sum(kv_blob_layer(w.tiers, b, l), s->layer_bytes);
        }
        kv_tiers_commit(w.tiers, b, sums);
        kv_tiers_unpin(w.tiers, &b, 1);
        if (i % 200 == 199) { /* the last ones are whole */
            struct kv_run run = kv_run_of(&c.c, 0, BLOCK, 0);

            assert_int_equal(kv_tiers_pin(w.tiers, &run, &b), 1);
            for (uint32_t l = 0; l < s->n_layers; l++) {
                assert_int_equal(kv_blob_sum(kv_blob_layer(w.tiers, b, l), s->layer_bytes),
                                 kv_blob_meta(b)->sums[l]);
            }
            kv_tiers_unpin(w.tiers, &b, 1);
        }
    }
    assert_true(host(&w).evictions > 1000);
    assert_true(host(&w).bytes <= host(&w).max_bytes);
    world_free(&w);
}

static struct kv_blob *keep(struct world *w, uint32_t i, const struct kv_blob_shape *s)
{
    uint64_t sums[8] = {0};
    struct kv_blob *b = NULL;
    struct kv_blob_meta m;
    struct chain c;

    chain_make(w, &c, i, 1, i, 1);
    m = meta_of(&c, 0, s);
    assert_int_equal(kv_tiers_reserve(w->tiers, &m, &b), BT_OK);
    kv_tiers_commit(w->tiers, b, sums);
    return b;
}

/* The oldest blobs of one shape share their chunk with a pinned one: others make room. */
static void test_pinned_among_other_shapes(void **state)
{
    struct kv_blob_shape small = {1, BLOCK, 1000}, large = {1, BLOCK, 100000};
    struct kv_blob *b, *pinned = NULL;
    struct world w;
    uint32_t i = 0;

    world_make(&w, 8, 1);
    w.conf.host_bytes = 2 << 20;
    w.no_source = true;
    world_start(&w);
    while (host(&w).evictions == 0) {
        b = keep(&w, i++, &small);
        if (i == 2) {
            pinned = b;
        } else {
            kv_tiers_unpin(w.tiers, &b, 1);
        }
    }
    b = keep(&w, i, &large);
    kv_tiers_unpin(w.tiers, &b, 1);
    assert_non_null(kv_blob_layer(w.tiers, pinned, 0));
    kv_tiers_unpin(w.tiers, &pinned, 1);
    world_free(&w);
}

struct log {
    pthread_mutex_t lock;
    int stored, removed;
};

static void record(void *arg, const struct kv_tiers_event *ev, size_t n)
{
    struct log *l = arg;

    pthread_mutex_lock(&l->lock);
    for (size_t i = 0; i < n; i++) {
        l->stored += ev[i].kind == KV_TIERS_STORED;
        l->removed += ev[i].kind == KV_TIERS_REMOVED && ev[i].best == KV_N_TIERS;
    }
    pthread_mutex_unlock(&l->lock);
}

static void test_events_and_list(void **state)
{
    struct log log = {.lock = PTHREAD_MUTEX_INITIALIZER};
    struct kv_tiers_held held[3];
    uint64_t cursor = 0;
    struct world w;
    struct chain c;
    size_t n = 0;

    world_make(&w, 64, 40);
    w.events = record;
    w.arg = &log;
    world_start(&w);
    for (uint32_t i = 0; i < 30; i++) {
        chain_make(&w, &c, i, 2, i, 2);
        offer_chain(&w, &c);
    }
    do {
        size_t k = kv_tiers_held(w.tiers, &cursor, held, BT_ARRAY_LEN(held));

        assert_true(k <= BT_ARRAY_LEN(held));
        n += k;
    } while (cursor != 0);
    assert_int_equal(n, host(&w).n_blocks);
    world_stop(&w); /* tells what is left to tell */
    assert_int_equal(log.stored, 60);
    assert_int_equal(log.stored - log.removed, (int)n);
    world_free(&w);
}

/* A throttled tier takes as long as it says, and the estimate follows what was measured. */
static void test_throttle_and_estimate(void **state)
{
    struct world w;
    struct chain c;
    struct taken t;
    uint64_t start, ns;

    world_make(&w, 256, 64);
    w.conf.host_max_rate = 1 << 20;
    world_start(&w);
    chain_make(&w, &c, 1, 48, 1, 48);
    offer_chain(&w, &c);
    for (int i = 0; i < 12; i++) {
        start = bt_now_ns();
        assert_int_equal(take_chain(&w, &c), 48);
        ns = bt_now_ns() - start;
        assert_true(ns >= (uint64_t)48 * BLOB_BYTES * 900); /* 1 MiB/s, less a little */
    }
    take_find(&w, &c, 0, &t);
    assert_true(t.find.load_ns >= (uint64_t)48 * BLOB_BYTES * 300);
    take_begin(&w, &t);
    w.src->ops->load_cancel(w.src, &t.load); /* does not wait for the rest */
    assert_true(take_wait(&t));
    assert_int_equal(t.load.n_good, 0);
    take_end(&w, &t);
    world_free(&w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_keeps_and_loads),
        cmocka_unit_test(test_tail),
        cmocka_unit_test(test_order_of_eviction),
        cmocka_unit_test(test_pinned_stays),
        cmocka_unit_test(test_PFX_01_collision_is_a_miss),
        cmocka_unit_test(test_PFX_01_other_history),
        cmocka_unit_test(test_TIER_02_promise_is_kept_or_cut),
        cmocka_unit_test(test_TIER_06_pins_come_back),
        cmocka_unit_test(test_reserve_commit_abort),
        cmocka_unit_test(test_several_shapes),
        cmocka_unit_test(test_pinned_among_other_shapes),
        cmocka_unit_test(test_events_and_list),
        cmocka_unit_test(test_throttle_and_estimate),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
