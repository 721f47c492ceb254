/* Placement: balance, and how little moves when a member comes or goes. */
#include "tests/unit/cmocka.h"

#include "kvstore/block/ring.h"

#include <stdio.h>

#define N_KEYS 20000

static struct kv_key key_of(uint32_t i)
{
    struct kv_key k;
    uint64_t a = (uint64_t)i * 0x9e3779b97f4a7c15ull, b = (a ^ a >> 29) * 0xbf58476d1ce4e5b9ull;

    memcpy(k.b, &a, 8);
    memcpy(k.b + 8, &b, 8);
    return k;
}

static const char *const names[] = {"store-0", "store-1", "store-2", "store-3",
                                    "store-4", "store-5", "store-6", "store-7"};

static void test_every_member_gets_its_share(void **state)
{
    struct kv_ring *r = kv_ring_create(names, 8);
    uint32_t n[8] = {0}, own[1];

    for (uint32_t i = 0; i < N_KEYS; i++) {
        struct kv_key k = key_of(i);

        assert_int_equal(kv_ring_owners(r, &k, 1, own), 1);
        n[own[0]]++;
    }
    for (int i = 0; i < 8; i++) {
        /* With 128 points the share of a member has a deviation of about 9 %. */
        assert_in_range(n[i], N_KEYS / 8 * 7 / 10, N_KEYS / 8 * 13 / 10);
    }
    kv_ring_destroy(r);
}

/* The order of the names plays no part. */
static void test_owners_are_the_same_for_everybody(void **state)
{
    const char *turned[8];
    struct kv_ring *a = kv_ring_create(names, 8), *b;
    uint32_t x[3], y[3];

    for (int i = 0; i < 8; i++) {
        turned[i] = names[(i + 3) % 8];
    }
    b = kv_ring_create(turned, 8);
    for (uint32_t i = 0; i < 1000; i++) {
        struct kv_key k = key_of(i);

        assert_int_equal(kv_ring_owners(a, &k, 3, x), 3);
        assert_int_equal(kv_ring_owners(b, &k, 3, y), 3);
        for (int j = 0; j < 3; j++) {
            assert_string_equal(names[x[j]], turned[y[j]]);
        }
    }
    kv_ring_destroy(a);
    kv_ring_destroy(b);
}

static void test_a_member_moves_its_own_share_alone(void **state)
{
    struct kv_ring *with = kv_ring_create(names, 8), *without = kv_ring_create(names, 7);
    uint32_t a[2], b[2], moved = 0;

    for (uint32_t i = 0; i < N_KEYS; i++) {
        struct kv_key k = key_of(i);

        kv_ring_owners(with, &k, 2, a);
        kv_ring_owners(without, &k, 2, b);
        if (a[0] == 7) {
            assert_int_equal(b[0], a[1]); /* the replica is the owner now */
            moved++;
        } else {
            assert_int_equal(b[0], a[0]);
        }
    }
    assert_in_range(moved, N_KEYS / 8 * 7 / 10, N_KEYS / 8 * 13 / 10);
    kv_ring_destroy(with);
    kv_ring_destroy(without);
}

static void test_replicas_differ(void **state)
{
    uint32_t own[8];

    for (size_t n = 0; n <= 3; n++) {
        struct kv_ring *r = kv_ring_create(names, n);
        struct kv_key k = key_of(5);

        assert_int_equal(kv_ring_owners(r, &k, 8, own), n);
        for (size_t i = 0; i < n; i++) {
            assert_true(own[i] < n);
            for (size_t j = 0; j < i; j++) {
                assert_int_not_equal(own[i], own[j]);
            }
        }
        assert_int_equal(kv_ring_owners(r, &k, 0, own), 0);
        kv_ring_destroy(r);
    }
    kv_ring_destroy(NULL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_member_gets_its_share),
        cmocka_unit_test(test_owners_are_the_same_for_everybody),
        cmocka_unit_test(test_a_member_moves_its_own_share_alone),
        cmocka_unit_test(test_replicas_differ),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
