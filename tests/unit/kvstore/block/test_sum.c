/* Copies with a sum: the same bytes and the same sum as the library's, however they are cut. */
#include "kvstore/block/sum.h"

#include "tests/unit/cmocka.h"

#include <stdio.h>
#include <stdlib.h>
#include <xxhash.h>

#define MAX (200u << 10)

static uint8_t *from, *to;

static uint32_t rnd(void)
{
    static uint64_t x = 88172645463325252ull;

    x ^= x << 13;
    x ^= x >> 7;
    x ^= x << 17;
    return (uint32_t)(x >> 20);
}

static int setup(void **state)
{
    from = aligned_alloc(4096, MAX + 4096);
    to = aligned_alloc(4096, MAX + 4096);
    if (!from || !to) {
        return -1;
    }
    for (size_t i = 0; i < MAX + 4096; i++) {
        from[i] = (uint8_t)rnd();
    }
    return 0;
}

static int teardown(void **state)
{
    free(from);
    free(to);
    return 0;
}

static void check(size_t n, size_t from_off, size_t to_off)
{
    memset(to, 0xa5, MAX + 4096);
    assert_int_equal(kv_copy_sum(to + to_off, from + from_off, n), XXH3_64bits(from + from_off, n));
    assert_memory_equal(to + to_off, from + from_off, n);
    assert_int_equal(to[to_off + n], 0xa5);
}

static void test_every_length_has_the_librarys_sum(void **state)
{
    static const size_t near[] = {1024,  2048,  3072,  4096,   5120,   8192,
                                  16384, 20480, 61440, 131072, 180224, 196608};

    for (size_t n = 0; n <= 2100; n++) {
        check(n, 0, 0);
    }
    for (size_t i = 0; i < BT_ARRAY_LEN(near); i++) {
        for (size_t d = 0; d < 130; d++) {
            check(near[i] + d, 0, 0);
            check(near[i] - d, 64, 128);
        }
        check(near[i], 3, 0);
        check(near[i], 0, 5);
    }
}

static void test_cut_anywhere_it_is_the_same(void **state)
{
    static const size_t steps[] = {1, 64, 1000, 1024, 2048, 4096, 4096, 8192, 61440};

    for (int round = 0; round < 300; round++) {
        size_t n = rnd() % MAX, at = 0;
        bool flushes = rnd() % 2;
        struct kv_copy c;

        memset(to, 0, MAX);
        if (round % 2) {
            kv_copy_begin_kept(&c);
        } else {
            kv_copy_begin(&c);
        }
        while (at < n) {
            size_t k = round % 3 ? steps[rnd() % BT_ARRAY_LEN(steps)] : rnd() % 9000;

            k = BT_MIN(k, n - at);
            kv_copy_add(&c, to + at, from + at, k);
            if (flushes && rnd() % 4 == 0) {
                kv_copy_flush(&c);
                assert_memory_equal(to, from, at + k);
            }
            at += k;
        }
        assert_int_equal(kv_copy_end(&c), XXH3_64bits(from, n));
        assert_memory_equal(to, from, n);
    }
}

/* Rows that lie anywhere, and some that are only summed: as pages and their blocks are. */
static void test_rows_in_any_order_and_without_a_place(void **state)
{
    static const size_t rows[] = {512, 1024, 2048, 4096, 5120, 16384};

    for (size_t r = 0; r < BT_ARRAY_LEN(rows); r++) {
        size_t row = rows[r], n = MAX / row;
        struct kv_copy c;

        memset(to, 0, MAX);
        kv_copy_begin(&c);
        for (size_t i = 0; i < n; i++) {
            kv_copy_add(&c, i % 5 == 3 ? NULL : to + (n - 1 - i) * row, from + i * row, row);
        }
        assert_int_equal(kv_copy_end(&c), XXH3_64bits(from, n * row));
        for (size_t i = 0; i < n; i++) {
            if (i % 5 != 3) {
                assert_memory_equal(to + (n - 1 - i) * row, from + i * row, row);
            }
        }
    }
}

static void test_sums_without_a_copy(void **state)
{
    for (size_t n = 0; n < 5000; n += 7) {
        assert_int_equal(kv_sum(from, n), XXH3_64bits(from, n));
        assert_int_equal(kv_sum_cold(from + n % 3, n), XXH3_64bits(from + n % 3, n));
        assert_int_equal(kv_sum_cold(from, MAX - n), XXH3_64bits(from, MAX - n));
        assert_int_equal(kv_sum_seeded(from, n, n * 77), XXH3_64bits_withSeed(from, n, n * 77));
    }
}

int main(void)
{
    int failed = 0;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_length_has_the_librarys_sum),
        cmocka_unit_test(test_cut_anywhere_it_is_the_same),
        cmocka_unit_test(test_rows_in_any_order_and_without_a_place),
        cmocka_unit_test(test_sums_without_a_copy),
    };

    for (kv_copy_isa_max = 0; kv_copy_isa_max <= 2; kv_copy_isa_max++) {
        printf("# widest: %d\n", kv_copy_isa_max);
        failed += cmocka_run_group_tests(tests, setup, teardown);
    }
    return failed;
}
