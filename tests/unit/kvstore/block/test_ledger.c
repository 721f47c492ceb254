/* The ledger and adoption: what a successor takes over, in which order it gives it up, and every
 * kind of damage that it must refuse. */
#include "tests/unit/kvstore/block/ledger_rig.h"

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

static void wait_killed(pid_t pid)
{
    int status;

    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
}

static void test_sizes(void **state)
{
    struct rig r;
    struct kv_ledger *g;
    struct kv_ledger_cfg cfg;

    rig_init(&r, 9);
    assert_int_equal(kv_ledger_bytes(&r.layout, 12), 0);
    assert_int_equal(kv_ledger_bytes(&r.layout, 4), 0);
    assert_int_equal(kv_ledger_bytes(&r.layout, 0), 0);
    /* header, 9 pages rounded up, 4 blocks of 88 + 16 + 64 rounded up */
    assert_int_equal(r.ledger_bytes, 4096 + 128 + 4 * 192);
    cfg = (struct kv_ledger_cfg){.layout = &r.layout,
                                 .block_tokens = BLOCK,
                                 .pool = r.pool_mem,
                                 .mem = r.ledger_mem,
                                 .bytes = r.ledger_bytes - 1};
    assert_int_equal(kv_ledger_create(&cfg, &g, NULL), BT_E_INVALID);
    kv_ledger_destroy(NULL);
    rig_fini(&r);
}

static void test_digest(void **state)
{
    uint8_t a[32], b[32], model[32] = {1}, other[32] = {2};
    struct rig r;

    rig_init(&r, 16);
    kv_ledger_digest(&r.layout, BLOCK, model, a);
    kv_ledger_digest(&r.layout, BLOCK, model, b);
    assert_memory_equal(a, b, 32);
    kv_ledger_digest(&r.layout, 2 * BLOCK, model, b);
    assert_memory_not_equal(a, b, 32);
    kv_ledger_digest(&r.layout, BLOCK, other, b);
    assert_memory_not_equal(a, b, 32);
    r.layout.n_pages++;
    kv_ledger_digest(&r.layout, BLOCK, model, b);
    assert_memory_not_equal(a, b, 32);
    rig_fini(&r);
}

static void test_adopt(void **state)
{
    struct rig r;
    struct kv_pool_stats s;
    uint32_t generation;

    rig_init(&r, 64);
    rig_open(&r);
    assert_int_equal(r.adopted.n_blocks, 0);
    assert_false(kv_ledger_kept(r.ledger));
    assert_int_equal(run(&r, "abcd"), 0);
    assert_int_equal(run(&r, "abx"), 2);
    generation = kv_pool_generation(r.pool, 0);
    rig_close(&r);
    for (int time = 0; time < 3; time++) { /* again and again, also what nobody used in between */
        rig_open(&r);
        assert_true(kv_ledger_kept(r.ledger));
        assert_int_equal(r.adopted.n_blocks, 5);
        assert_int_equal(r.adopted.n_pages, 10);
        assert_int_equal(r.adopted.n_bad, 0);
        s = kv_pool_stats(r.pool);
        assert_int_equal(s.n_index, 10);
        assert_int_equal(s.n_cached, 10);
        assert_int_equal(s.n_free, 54);
        assert_int_equal(kv_pool_generation(r.pool, 0), generation);
        if (time == 1) {
            assert_int_equal(run(&r, "abcd"), 4);
            assert_int_equal(run(&r, "abx"), 3);
        }
        rig_close(&r);
    }
    /* A new block behind an adopted one, a second one with the same content, then all again. */
    rig_open(&r);
    assert_int_equal(run(&r, "abcde"), 4);
    assert_int_equal(run(&r, "abcde"), 5);
    assert_int_equal(kv_index_stats(r.index).adopted, 5);
    rig_close(&r);
    rig_open(&r);
    assert_int_equal(r.adopted.n_blocks, 6);
    assert_int_equal(hits(&r, "abcde"), 5);
    rig_close(&r);
    rig_fini(&r);
}

/* Pages that were being filled are free, and a page never has one generation twice. */
static void test_unsealed_pages(void **state)
{
    uint32_t again[6];
    struct rig r;
    pid_t pid;

    rig_init(&r, 16);
    pid = fork();
    if (pid == 0) {
        rig_open(&r);
        run(&r, "a");
        if (kv_pool_take(r.pool, 6, KV_OWNER_SEQ, KV_PAGE_NONE, again) < 0 || again[0] != 2) {
            _exit(1);
        }
        raise(SIGKILL);
    }
    wait_killed(pid);
    rig_open(&r);
    assert_int_equal(r.adopted.n_blocks, 1);
    assert_int_equal(kv_pool_stats(r.pool).n_free, 14);
    assert_int_equal(kv_pool_take(r.pool, 6, KV_OWNER_SEQ, KV_PAGE_NONE, again), BT_OK);
    assert_int_equal(again[0], 2);
    assert_int_equal(kv_pool_generation(r.pool, again[0]), 2);
    kv_pool_give(r.pool, again, 6, KV_OWNER_SEQ);
    rig_close(&r);
    rig_fini(&r);
}

/* What is given up is not adopted, and children go before their parents as they would have. */
static void test_order_of_eviction(void **state)
{
    struct rig r;

    rig_init(&r, 20); /* ten blocks */
    rig_open(&r);
    run(&r, "abc");
    run(&r, "pq");
    run(&r, "abd");
    run(&r, "xyz");
    run(&r, "pq"); /* used again */
    rig_close(&r);
    rig_open(&r);
    assert_int_equal(r.adopted.n_blocks, 9);
    /* Without this process's help in the order c, d b a, z y x, q p. */
    kv_index_evict(r.index, 2);
    assert_int_equal(kv_index_stats(r.index).n_blocks, 8);
    rig_close(&r);
    rig_open(&r);
    assert_int_equal(r.adopted.n_blocks, 8);
    assert_int_equal(hits(&r, "abc"), 2);
    kv_index_evict(r.index, 6);
    assert_int_equal(hits(&r, "abd"), 0);
    assert_int_equal(hits(&r, "xyz"), 3);
    kv_index_evict(r.index, 6);
    assert_int_equal(hits(&r, "xyz"), 0);
    assert_int_equal(hits(&r, "pq"), 2);
    rig_close(&r);
    rig_fini(&r);
}

/* What was in use at the end goes last. */
static void test_held_at_the_end(void **state)
{
    struct user u;
    struct rig r;

    pid_t pid;

    rig_init(&r, 20);
    pid = fork();
    if (pid == 0) {
        rig_open(&r);
        user_make(&r, &u, "abc");
        while (u.n < 3) {
            user_publish_next(&r, &u);
        }
        run(&r, "pq");
        raise(SIGKILL);
    }
    wait_killed(pid);
    rig_open(&r);
    assert_int_equal(r.adopted.n_blocks, 5);
    kv_index_evict(r.index, 4);
    assert_int_equal(hits(&r, "pq"), 0);
    assert_int_equal(hits(&r, "abc"), 3);
    rig_close(&r);
    rig_fini(&r);
}

static void test_other_root_pool_or_version(void **state)
{
    for (int what = 0; what < 4; what++) {
        struct rig r;

        rig_init(&r, 16);
        rig_open(&r);
        run(&r, "abc");
        rig_close(&r);
        switch (what) {
        case 0:
            r.root.b[5] = 1;
            break;
        case 1:
            r.pool_id++;
            break;
        case 2:
            ((char *)r.ledger_mem)[0]++;
            break;
        default:
            *((uint32_t *)r.ledger_mem + 3) = 0;
            break; /* killed while it was emptied */
        }
        rig_open(&r);
        assert_false(kv_ledger_kept(r.ledger));
        assert_int_equal(r.adopted.n_blocks + r.adopted.n_bad, 0);
        assert_int_equal(run(&r, "abc"), 0);
        rig_close(&r);
        rig_open(&r);
        assert_int_equal(r.adopted.n_blocks, 3);
        rig_close(&r);
        rig_fini(&r);
    }
}

/* First byte of the record of the only block whose key is `key`. */
static char *record_of(const struct rig *r, const struct kv_key *key)
{
    char *p = r->ledger_mem, *end = p + r->ledger_bytes;

    for (p += 4096 + 128; p < end; p += 192) {
        if (*(uint32_t *)p == 1 && memcmp(p + 40, key, 16) == 0) {
            return p;
        }
    }
    fail_msg("no record");
    return NULL;
}

/* "abc" and "abx" and "p" were there; the record of b is damaged, or those of two blocks are made
 * to share pages with right sums. */
static void test_damaged_records(void **state)
{
    for (uint32_t at = 4; at < 88 + 16 + 64; at++) {
        struct user u;
        struct rig r;

        if (at >= 16 && at < 24) {
            continue; /* the order of eviction needs no proof */
        }
        rig_init(&r, 16);
        rig_open(&r);
        run(&r, "abc");
        run(&r, "abx");
        run(&r, "p");
        user_make(&r, &u, "ab");
        rig_close(&r);
        record_of(&r, &u.keys[1])[at] ^= 0x40;
        rig_open(&r);
        assert_int_equal(r.adopted.n_blocks, 2);
        assert_int_equal(r.adopted.n_bad, 3);
        assert_int_equal(run(&r, "abc"), 1);
        assert_int_equal(run(&r, "p"), 1);
        rig_close(&r);
        rig_open(&r); /* and nothing bad is left */
        assert_int_equal(r.adopted.n_blocks, 4);
        assert_int_equal(r.adopted.n_bad, 0);
        rig_close(&r);
        rig_fini(&r);
    }
}

static void test_damaged_pages(void **state)
{
    struct rig r;
    uint32_t *page;

    rig_init(&r, 16);
    rig_open(&r);
    run(&r, "a");
    run(&r, "p");
    rig_close(&r);
    page = (uint32_t *)((char *)r.ledger_mem + 4096);
    page[2 * 0]++;       /* a generation */
    page[2 * 2 + 1] = 1; /* a state: filling */
    rig_open(&r);
    assert_int_equal(r.adopted.n_blocks, 0);
    assert_int_equal(r.adopted.n_bad, 2);
    rig_close(&r);
    rig_fini(&r);
}

/* A record twice: its pages are those of the first. */
static void test_pages_used_twice(void **state)
{
    struct user u;
    struct rig r;
    char *from, *to;

    rig_init(&r, 16);
    rig_open(&r);
    run(&r, "a");
    user_make(&r, &u, "a");
    rig_close(&r);
    from = record_of(&r, u.keys);
    to = (char *)r.ledger_mem + r.ledger_bytes - 192;
    assert_ptr_not_equal(from, to);
    memcpy(to, from, 192);
    rig_open(&r);
    assert_int_equal(r.adopted.n_blocks, 1);
    assert_int_equal(r.adopted.n_bad, 1);
    assert_int_equal(run(&r, "a"), 1);
    rig_close(&r);
    rig_fini(&r);
}

/* Each byte of a block's pages in turn: the block and its children are a miss, its parents are not.
 */
static void test_torn_bytes(void **state)
{
    struct user u;
    struct rig r;

    rig_init(&r, 16);
    rig_open(&r);
    for (size_t at = 0; at < 2 * LAYERS * r.layout.page_stride; at++) {
        size_t piece = at / r.layout.page_stride;
        uint32_t page;

        run(&r, "abc");
        run(&r, "abx");
        user_make(&r, &u, "abc");
        assert_int_equal(kv_index_match(r.index, &u.chain, u.blocks), 3);
        page = u.blocks[1]->pages[piece % 2];
        rig_close(&r);
        ((char *)r.pool_mem)[kv_layout_offset(&r.layout, (int)(piece / 2), page) +
                             at % r.layout.page_stride] ^= 1;
        rig_open(&r);
        assert_int_equal(r.adopted.n_blocks, 4);
        assert_int_equal(kv_pool_stats(r.pool).n_cached, 8);
        assert_int_equal(hits(&r, "abx"), 1);
        assert_int_equal(kv_index_stats(r.index).bad, 3);
        assert_int_equal(kv_index_stats(r.index).n_blocks, 1);
        assert_int_equal(kv_pool_stats(r.pool).n_cached, 2);
        assert_int_equal(hits(&r, "abc"), 1);
    }
    rig_close(&r);
    rig_fini(&r);
}

/* A damaged block that somebody publishes anew is replaced, not taken for the same. */
static void test_torn_block_published_anew(void **state)
{
    struct user u;
    struct rig r;

    rig_init(&r, 16);
    rig_open(&r);
    run(&r, "ab");
    user_make(&r, &u, "ab");
    rig_close(&r);
    memset(r.pool_mem, 0, r.layout.page_stride); /* page 0: block a */
    rig_open(&r);
    user_make(&r, &u, "ab");
    assert_int_equal(user_publish_next(&r, &u), KV_PUBLISH_NEW);
    assert_true(holds(&r, u.blocks[0]));
    assert_int_equal(user_publish_next(&r, &u), KV_PUBLISH_NEW);
    kv_index_drop(r.index, u.blocks, 2);
    assert_int_equal(kv_index_stats(r.index).bad, 2);
    assert_int_equal(run(&r, "ab"), 2);
    rig_close(&r);
    rig_fini(&r);
}

static void test_check_before_moving(void **state)
{
    struct user u;
    struct rig r;

    rig_init(&r, 16);
    rig_open(&r);
    run(&r, "ab");
    user_make(&r, &u, "ab");
    kv_index_match(r.index, &u.chain, u.blocks);
    assert_true(kv_index_check(r.index, u.blocks[1]));
    rig_close(&r);
    rig_open(&r);
    user_make(&r, &u, "ab");
    memset((char *)r.pool_mem + kv_layout_offset(&r.layout, 1, 2), 0, 4); /* block b */
    assert_int_equal(kv_index_match(r.index, &u.chain, u.blocks), 1);
    assert_int_equal(kv_index_stats(r.index).n_blocks, 1);
    rig_close(&r);
    rig_fini(&r);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_sizes),
        cmocka_unit_test(test_digest),
        cmocka_unit_test(test_adopt),
        cmocka_unit_test(test_unsealed_pages),
        cmocka_unit_test(test_order_of_eviction),
        cmocka_unit_test(test_held_at_the_end),
        cmocka_unit_test(test_other_root_pool_or_version),
        cmocka_unit_test(test_damaged_records),
        cmocka_unit_test(test_damaged_pages),
        cmocka_unit_test(test_pages_used_twice),
        cmocka_unit_test(test_torn_bytes),
        cmocka_unit_test(test_torn_block_published_anew),
        cmocka_unit_test(test_check_before_moving),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
