/* Packed lists of integers against the plain way of reading and writing them. */
#include "common/base/rc.h"
#include "common/base/varint.h"
#include "tests/unit/cmocka.h"

#include <stdlib.h>

#define MAX 200

static uint64_t seed = 88172645463325252u;

static uint64_t draw(void)
{
    seed ^= seed << 13;
    seed ^= seed >> 7;
    seed ^= seed << 17;
    return seed;
}

/* One varint of v with `extra` bytes more than it needs. */
static size_t put(uint64_t v, size_t extra, uint8_t *p)
{
    size_t n = 0;

    for (; v >= 0x80; v >>= 7) {
        p[n++] = (uint8_t)(v | 0x80);
    }
    p[n++] = (uint8_t)v;
    for (; extra > 0 && n < 10; extra--) {
        p[n - 1] |= 0x80;
        p[n++] = 0;
    }
    return n;
}

/* Exactly as long as what is read, so that a sanitizer sees each byte too many. */
static uint8_t *exact(const uint8_t *p, size_t n)
{
    uint8_t *q = malloc(n ? n : 1);

    assert_non_null(q);
    memcpy(q, p, n);
    return q;
}

static void check(const uint64_t *v, size_t n, size_t extra_at)
{
    uint8_t bytes[MAX * 10], *q;
    int32_t *got = calloc(n + 1, sizeof(*got)), want[MAX];
    uint8_t *again;
    size_t size = 0;
    bool shortest, plain = extra_at >= n;

    for (size_t i = 0; i < n; i++) {
        want[i] = (int32_t)(uint32_t)v[i];
        size += put(v[i], i == extra_at, bytes + size);
        plain = plain && v[i] <= INT32_MAX;
    }
    q = exact(bytes, size);
    assert_int_equal(bt_varints_count(q, size), n);
    assert_int_equal(bt_varints_read(q, size, got, &shortest), BT_OK);
    assert_memory_equal(got, want, n * sizeof(*got));
    assert_int_equal(shortest, plain);
    again = malloc(bt_varints_size(want, n) + 1);
    bt_varints_write(want, n, again);
    if (plain) {
        assert_int_equal(bt_varints_size(want, n), size);
        assert_memory_equal(again, bytes, size);
    } else {
        assert_int_equal(bt_varints_read(again, bt_varints_size(want, n), got, &shortest), BT_OK);
        assert_memory_equal(got, want, n * sizeof(*got));
    }
    free(again);
    free(got);
    free(q);
}

static void test_round_trip(void **state)
{
    static const unsigned bits[] = {7, 14, 14, 14, 17, 21, 31, 32, 64};
    uint64_t v[MAX];

    for (int round = 0; round < 20000; round++) {
        size_t n = draw() % MAX;
        uint64_t kind = draw() % 12;

        for (size_t i = 0; i < n; i++) {
            uint64_t of = kind < BT_ARRAY_LEN(bits) ? kind : draw() % 7;

            v[i] = draw() >> (64 - bits[of]);
            if (kind == 3) { /* nothing but two bytes */
                v[i] = 128 + v[i] % (16384 - 128);
            }
        }
        check(v, n, round % 3 ? SIZE_MAX : draw() % (n + 1));
    }
}

static void test_count(void **state)
{
    static uint8_t bytes[10000];

    for (size_t n = 0; n < sizeof(bytes); n = n * 5 / 4 + 1) {
        memset(bytes, 0x7f, n);
        assert_int_equal(bt_varints_count(bytes, n), n);
        memset(bytes, 0x80, n / 2);
        assert_int_equal(bt_varints_count(bytes, n), n - n / 2);
    }
}

static void test_negative(void **state)
{
    const uint64_t v[] = {(uint64_t)-1, (uint64_t)INT32_MIN, 5};
    const int32_t ints[] = {-1, INT32_MIN, 5};

    check(v, 3, SIZE_MAX);
    assert_int_equal(bt_varints_size(ints, 3), 21);
}

static void test_cut_off(void **state)
{
    uint8_t bytes[64];
    int32_t v[64];
    bool shortest;

    for (size_t n = 1; n <= sizeof(bytes); n++) {
        uint8_t *q;

        memset(bytes, 1, sizeof(bytes));
        bytes[n - 1] = 0x80; /* goes on, but there is nothing */
        q = exact(bytes, n);
        assert_int_equal(bt_varints_read(q, n, v, &shortest), BT_E_FORMAT);
        free(q);
    }
}

static void test_too_long(void **state)
{
    for (size_t len = 9; len < 40; len++) {
        for (size_t before = 0; before < 20; before++) {
            size_t n = before + len + 20;
            uint8_t bytes[128], *q;
            int32_t v[128];
            bool shortest;

            memset(bytes, 1, sizeof(bytes));
            memset(bytes + before, 0x81, len - 1);
            q = exact(bytes, n);
            assert_int_equal(bt_varints_read(q, n, v, &shortest), len > 10 ? BT_E_FORMAT : BT_OK);
            free(q);
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_round_trip), cmocka_unit_test(test_count),
        cmocka_unit_test(test_negative),   cmocka_unit_test(test_cut_off),
        cmocka_unit_test(test_too_long),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
