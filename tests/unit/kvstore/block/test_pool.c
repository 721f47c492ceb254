/* The paged pool: neighbours, owners, generations, counters; random work against a model. */
#include "common/obs/log.h"
#include "kvstore/block/pool.h"

#include "tests/unit/cmocka.h"

#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#define MODEL_PAGES 150

static struct kv_layout make_layout(uint32_t n_pages)
{
    struct kv_layout l = {.n_layers = 2,
                          .n_kv_heads = 1,
                          .head_dim = 2,
                          .page_tokens = 8,
                          .dtype = KV_DTYPE_F16,
                          .n_pages = n_pages,
                          .page_stride = 2 * 8 * 2 * 2};

    l.layer_stride = l.page_stride * n_pages;
    l.bytes = l.layer_stride * 2;
    return l;
}

static struct kv_pool *make_pool(uint32_t n_pages)
{
    struct kv_layout l = make_layout(n_pages);
    struct kv_pool *pool = NULL;

    assert_int_equal(kv_pool_create(&l, &bt_mem_host, "test", &pool, NULL), BT_OK);
    return pool;
}

static void test_create(void **state)
{
    struct kv_layout none = make_layout(0);
    struct kv_pool *pool = make_pool(3);
    struct bt_err err;

    assert_int_equal(kv_pool_create(&none, &bt_mem_host, "none", &pool, &err), BT_E_INVALID);
    assert_int_equal(kv_pool_layout(pool)->n_pages, 3);
    assert_ptr_equal(kv_pool_page(pool, 0, 0), kv_pool_region(pool)->base);
    assert_int_equal((char *)kv_pool_page(pool, 1, 2) - (char *)kv_pool_page(pool, 0, 0),
                     3 * 64 + 2 * 64);
    kv_pool_destroy(pool);
    kv_pool_destroy(NULL);
}

/* Over memory that is there already, with pages that somebody left in it. */
static void test_adopt(void **state)
{
    static const uint32_t out[] = {1, 3}, twice[] = {2, 2}, taken[] = {0, 2}, good[] = {2, 0};
    struct kv_layout l = make_layout(3);
    struct bt_mem_region mem;
    struct kv_pool *pool;
    struct bt_err err;
    uint32_t page;

    assert_int_equal(bt_mem_host.alloc(l.bytes, "made", &mem, &err), BT_OK);
    ((char *)mem.base)[5] = 9;
    mem.bytes = l.bytes - 1;
    assert_int_equal(kv_pool_create_in(&l, &mem, &pool, &err), BT_E_INVALID);
    mem.bytes = BT_DIV_UP(l.bytes, 4096ul) * 4096;
    assert_int_equal(kv_pool_create_in(&l, &mem, &pool, &err), BT_OK);
    assert_int_equal(((char *)kv_pool_page(pool, 0, 0))[5], 9);
    assert_false(kv_pool_adopt(pool, out, 2));
    assert_false(kv_pool_adopt(pool, twice, 2));
    assert_true(kv_pool_stats(pool).n_free == 3 && kv_pool_is_free(pool, 2));
    assert_true(kv_pool_adopt(pool, good, 2));
    assert_false(kv_pool_adopt(pool, taken, 2));
    assert_true(kv_pool_stats(pool).n_free == 1 && kv_pool_stats(pool).n_index == 2);
    assert_int_equal(kv_pool_generation(pool, 2), 0); /* it has not left its owner */
    assert_int_equal(kv_pool_take(pool, 1, KV_OWNER_SEQ, KV_PAGE_NONE, &page), BT_OK);
    assert_int_equal(page, 1);
    kv_pool_give(pool, &page, 1, KV_OWNER_SEQ);
    kv_pool_give(pool, good, 2, KV_OWNER_INDEX);
    kv_pool_destroy(pool);
}

static void test_neighbours(void **state)
{
    struct kv_pool *pool = make_pool(200);
    uint32_t a[64], b[64], c[64];

    assert_int_equal(kv_pool_take(pool, 40, KV_OWNER_SEQ, KV_PAGE_NONE, a), BT_OK);
    assert_int_equal(kv_pool_take(pool, 40, KV_OWNER_SEQ, KV_PAGE_NONE, b), BT_OK);
    for (uint32_t i = 1; i < 40; i++) {
        assert_int_equal(a[i], a[0] + i);
        assert_int_equal(b[i], b[0] + i);
    }
    /* 10 free inside a; 20 more do not fit there and must not be torn up. */
    kv_pool_give(pool, a + 5, 10, KV_OWNER_SEQ);
    assert_int_equal(kv_pool_take(pool, 20, KV_OWNER_SEQ, KV_PAGE_NONE, c), BT_OK);
    for (uint32_t i = 1; i < 20; i++) {
        assert_int_equal(c[i], c[0] + i);
    }
    kv_pool_give(pool, c, 20, KV_OWNER_SEQ);
    /* Right behind the last page where that is free. */
    assert_int_equal(kv_pool_take(pool, 3, KV_OWNER_SEQ, a[4], c), BT_OK);
    assert_int_equal(c[0], a[5]);
    assert_int_equal(c[2], a[7]);
    /* The last page has no page behind it. */
    assert_int_equal(kv_pool_take(pool, 1, KV_OWNER_SEQ, 199, c + 3), BT_OK);
    kv_pool_give(pool, c, 4, KV_OWNER_SEQ);
    kv_pool_give(pool, a, 5, KV_OWNER_SEQ);
    kv_pool_give(pool, a + 15, 25, KV_OWNER_SEQ);
    kv_pool_give(pool, b, 40, KV_OWNER_SEQ);
    kv_pool_destroy(pool);
}

static void test_all_or_none(void **state)
{
    struct kv_pool *pool = make_pool(64);
    struct kv_pool_stats s;
    uint32_t a[65];

    assert_int_equal(kv_pool_take(pool, 65, KV_OWNER_SEQ, KV_PAGE_NONE, a), BT_E_EXHAUSTED);
    assert_int_equal(kv_pool_take(pool, 0, KV_OWNER_SEQ, KV_PAGE_NONE, a), BT_OK);
    assert_int_equal(kv_pool_take(pool, 63, KV_OWNER_SEQ, KV_PAGE_NONE, a), BT_OK);
    assert_int_equal(kv_pool_take(pool, 2, KV_OWNER_TRANSFER, KV_PAGE_NONE, a + 63),
                     BT_E_EXHAUSTED);
    assert_int_equal(kv_pool_take(pool, 1, KV_OWNER_TRANSFER, KV_PAGE_NONE, a + 63), BT_OK);
    s = kv_pool_stats(pool);
    assert_int_equal(s.n_free, 0);
    assert_int_equal(s.n_seq, 63);
    assert_int_equal(s.n_transfer, 1);
    kv_pool_set_owner(pool, a + 63, 1, KV_OWNER_TRANSFER, KV_OWNER_SEQ);
    assert_int_equal(kv_pool_stats(pool).n_transfer, 0);
    bt_log_threshold = -1;
    assert_false(kv_pool_audit(pool));
    bt_log_threshold = BT_LOG_INFO;
    kv_pool_give(pool, a, 64, KV_OWNER_SEQ);
    assert_true(kv_pool_audit(pool));
    kv_pool_destroy(pool);
}

static void test_generation(void **state)
{
    struct kv_pool *pool = make_pool(1);
    uint32_t p;

    for (uint32_t i = 1; i < 10; i++) {
        assert_int_equal(kv_pool_take(pool, 1, KV_OWNER_SEQ, KV_PAGE_NONE, &p), BT_OK);
        assert_int_equal(kv_pool_generation(pool, p), i);
        kv_pool_set_owner(pool, &p, 1, KV_OWNER_SEQ, KV_OWNER_TRANSFER);
        assert_int_equal(kv_pool_generation(pool, p), i);
        kv_pool_give(pool, &p, 1, KV_OWNER_TRANSFER);
        assert_int_equal(kv_pool_generation(pool, p), i);
    }
    kv_pool_destroy(pool);
}

/* True if fn(pool) ends its process with SIGABRT. */
static bool aborts(void (*fn)(struct kv_pool *pool))
{
    int status;
    pid_t pid = fork();

    if (pid == 0) {
        struct kv_pool *pool = make_pool(4);

        signal(SIGABRT, SIG_DFL);
        close(STDERR_FILENO);
        fn(pool);
        _exit(0);
    }
    assert_true(pid > 0);
    assert_int_equal(waitpid(pid, &status, 0), pid);
    return WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT;
}

static void bad_twice(struct kv_pool *pool)
{
    uint32_t p[2] = {0, 0};

    if (kv_pool_take(pool, 1, KV_OWNER_SEQ, KV_PAGE_NONE, p) == BT_OK) {
        p[1] = p[0];
        kv_pool_give(pool, p, 2, KV_OWNER_SEQ);
    }
}

static void bad_owner(struct kv_pool *pool)
{
    uint32_t p;

    if (kv_pool_take(pool, 1, KV_OWNER_TRANSFER, KV_PAGE_NONE, &p) == BT_OK) {
        kv_pool_give(pool, &p, 1, KV_OWNER_SEQ);
    }
}

static void bad_leak(struct kv_pool *pool)
{
    uint32_t p;

    if (kv_pool_take(pool, 1, KV_OWNER_SEQ, KV_PAGE_NONE, &p) == BT_OK) {
        kv_pool_destroy(pool);
    }
}

static void test_misuse_aborts(void **state)
{
    assert_true(aborts(bad_twice));
    assert_true(aborts(bad_owner));
    assert_true(aborts(bad_leak));
}

/* Random takes, gives and owner changes; a plain array knows who owns what. */
static void test_random(void **state)
{
    struct kv_pool *pool = make_pool(MODEL_PAGES);
    uint8_t owner[MODEL_PAGES] = {0};
    uint32_t generation[MODEL_PAGES] = {0}, got[MODEL_PAGES], count[KV_N_OWNERS];
    uint32_t seed = 7;

    for (int round = 0; round < 20000; round++) {
        uint32_t r = seed = seed * 1664525u + 1013904223u;
        uint32_t n = (r >> 8) % 12, after = (r >> 16) % MODEL_PAGES, n_free = 0;
        enum kv_owner who = (r >> 4) & 1 ? KV_OWNER_SEQ : KV_OWNER_TRANSFER;

        for (uint32_t p = 0; p < MODEL_PAGES; p++) {
            n_free += owner[p] == KV_OWNER_FREE;
        }
        if ((r >> 28) < 8) {
            int rc = kv_pool_take(pool, n, who, (r >> 5) & 1 ? after : KV_PAGE_NONE, got);

            assert_int_equal(rc, n <= n_free ? BT_OK : BT_E_EXHAUSTED);
            for (uint32_t i = 0; rc == BT_OK && i < n; i++) {
                assert_int_equal(owner[got[i]], KV_OWNER_FREE);
                owner[got[i]] = (uint8_t)who;
                assert_int_equal(kv_pool_generation(pool, got[i]), ++generation[got[i]]);
            }
        } else if (owner[after] != KV_OWNER_FREE) {
            if ((r >> 28) < 14) {
                kv_pool_give(pool, &after, 1, owner[after]);
                owner[after] = KV_OWNER_FREE;
            } else {
                who = (r >> 2) & 1 ? KV_OWNER_INDEX : who;
                kv_pool_set_owner(pool, &after, 1, owner[after], who);
                owner[after] = (uint8_t)who;
            }
        }
        memset(count, 0, sizeof(count));
        for (uint32_t p = 0; p < MODEL_PAGES; p++) {
            count[owner[p]]++;
        }
        struct kv_pool_stats s = kv_pool_stats(pool);
        assert_int_equal(s.n_free, count[KV_OWNER_FREE]);
        assert_int_equal(s.n_seq, count[KV_OWNER_SEQ]);
        assert_int_equal(s.n_transfer, count[KV_OWNER_TRANSFER]);
        assert_int_equal(s.n_index, count[KV_OWNER_INDEX]);
    }
    for (uint32_t p = 0; p < MODEL_PAGES; p++) {
        if (owner[p] != KV_OWNER_FREE) {
            kv_pool_give(pool, &p, 1, owner[p]);
        }
    }
    assert_true(kv_pool_audit(pool));
    kv_pool_destroy(pool);
}

/* Another thread never sees counters that do not add up. */
static void *reader_main(void *arg)
{
    const struct kv_pool *pool = arg;
    uintptr_t wrong = 0;

    for (int i = 0; i < 200000; i++) {
        struct kv_pool_stats s = kv_pool_stats(pool);

        wrong += s.n_free + s.n_seq + s.n_transfer + s.n_index != s.n_pages;
    }
    return (void *)wrong;
}

static void test_counters_add_up(void **state)
{
    struct kv_pool *pool = make_pool(64);
    uint32_t pages[64];
    pthread_t reader;
    void *wrong;

    assert_int_equal(pthread_create(&reader, NULL, reader_main, pool), 0);
    for (uint32_t i = 0; i < 50000; i++) {
        uint32_t n = 1 + i % 60;

        assert_int_equal(kv_pool_take(pool, n, KV_OWNER_SEQ, KV_PAGE_NONE, pages), BT_OK);
        kv_pool_set_owner(pool, pages, n / 2, KV_OWNER_SEQ, KV_OWNER_INDEX);
        kv_pool_give(pool, pages, n / 2, KV_OWNER_INDEX);
        kv_pool_give(pool, pages + n / 2, n - n / 2, KV_OWNER_SEQ);
    }
    pthread_join(reader, &wrong);
    assert_null(wrong);
    kv_pool_destroy(pool);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_create),     cmocka_unit_test(test_adopt),
        cmocka_unit_test(test_neighbours), cmocka_unit_test(test_all_or_none),
        cmocka_unit_test(test_generation), cmocka_unit_test(test_misuse_aborts),
        cmocka_unit_test(test_random),     cmocka_unit_test(test_counters_add_up),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
