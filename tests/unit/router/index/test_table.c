/* The index's table: what is in it after any changes, order and homes at any moment of growing and
 * shrinking, keys that crowd at one place, memory that comes back. */
#include "router/index/table.h"

#include "common/base/buf.h"
#include "tests/unit/cmocka.h"

#include <stdlib.h>

#define N 60000

static uint64_t rnd(uint64_t *x)
{
    *x = *x * 6364136223846793005ull + 1442695040888963407ull;
    return *x >> 33;
}

struct model {
    uint64_t keys[N];
    bool in[N];
    uint64_t n;
};

/* Keys anywhere, and a part of them side by side at the start, at the end and in the middle. */
static struct model *make(unsigned crowded)
{
    struct model *m = bt_calloc(1, sizeof(*m));
    uint64_t seed = 11;

    assert_non_null(m);
    for (uint64_t i = 0; i < N; i++) {
        m->keys[i] = (rnd(&seed) << 33 ^ rnd(&seed) << 2) | 1;
        if (i < crowded) {
            m->keys[i] = i % 3 == 0   ? 2 + 2 * i
                         : i % 3 == 1 ? UINT64_MAX - 1 - 2 * i
                                      : ((uint64_t)1 << 63) + 2 * i;
        }
    }
    return m;
}

static void set(struct rt_table *t, struct model *m, uint64_t i, bool in)
{
    struct rt_slot *slot = in ? rt_table_obtain(t, m->keys[i]) : rt_table_find(t, m->keys[i]);

    assert_true((slot != NULL) == (in || m->in[i]));
    if (slot) {
        assert_true(slot->key == m->keys[i]);
        assert_int_equal(slot->idx, m->in[i] ? (uint32_t)i : 0);
        slot->idx = (uint32_t)i;
    }
    if (slot && !in) {
        rt_table_take_out(t, slot);
    }
    m->n = m->n + in - m->in[i];
    m->in[i] = in;
    assert_true(t->n == m->n);
}

static void check(struct rt_table *t, const struct model *m)
{
    uint64_t last = 0, n = 0, run = 0; /* where the run of used slots began */

    for (uint64_t i = 0; i < t->end; i++) {
        uint64_t key = t->slots[i].key;

        if (key == 0) {
            run = i + 1;
            continue;
        }
        assert_true(key > last);
        assert_true(rt_table_home(t, key) <= i && rt_table_home(t, key) >= run);
        last = key;
        n++;
    }
    assert_true(n == m->n);
    for (uint64_t i = 0; i < N; i++) {
        struct rt_slot *slot = rt_table_find(t, m->keys[i]);

        assert_true((slot != NULL) == m->in[i]);
        assert_true(!slot || slot->idx == i);
    }
}

/* Up and down, with turns in the middle of growing and of shrinking. */
static void up_and_down(unsigned crowded)
{
    static const unsigned stored[] = {95, 80, 20, 60, 40, 90, 5, 70, 2, 1};
    struct model *m = make(crowded);
    struct rt_table t;
    uint64_t seed = 4, most = 0;

    assert_int_equal(rt_table_init(&t), BT_OK);
    for (size_t phase = 0; phase < BT_ARRAY_LEN(stored); phase++) {
        for (int k = 0; k < 3 * N; k++) {
            set(&t, m, rnd(&seed) % N, rnd(&seed) % 100 < stored[phase]);
            if (phase > 1 && k % 64 == 0) {
                rt_table_shrink(&t);
            }
            if (k % 20011 == 0) {
                check(&t, m);
            }
        }
        most = BT_MAX(most, t.end);
    }
    assert_true(most > N);
    for (uint64_t i = 0; i < N; i++) {
        set(&t, m, i, false);
    }
    for (int k = 0; k < 1000; k++) {
        rt_table_shrink(&t);
    }
    check(&t, m);
    assert_true(t.n == 0 && t.low_cap == t.high_cap && t.end < 4096);
    set(&t, m, 5, true);
    check(&t, m);
    rt_table_fini(&t);
    free(m);
}

static void test_up_and_down(void **state)
{
    up_and_down(0);
}

static void test_keys_that_crowd(void **state)
{
    up_and_down(6000);
}

/* Almost everything goes at once; what is left stands far apart, and keys come while it moves. */
static void test_wide_gaps(void **state)
{
    struct model *m = make(300);
    struct rt_table t;

    assert_int_equal(rt_table_init(&t), BT_OK);
    for (uint64_t i = 0; i < N; i++) {
        set(&t, m, i, true);
    }
    for (uint64_t i = 0; i < N; i++) {
        set(&t, m, i, i % 12000 == 250);
    }
    for (uint64_t k = 0; k < 40; k++) {
        rt_table_shrink(&t);
        check(&t, m);
        set(&t, m, 100 * k, true);
    }
    assert_true(t.low_cap == t.high_cap && t.end < 4096);
    rt_table_fini(&t);
    free(m);
}

/* Between any two keys only a bounded part of the table moves, and all room is there in time. */
static void test_growing_has_no_pause(void **state)
{
    struct model *m = make(0);
    struct rt_table t;

    assert_int_equal(rt_table_init(&t), BT_OK);
    for (uint64_t i = 0; i < N; i++) {
        uint64_t before = t.border;
        bool even = t.low_cap == t.high_cap;

        set(&t, m, i, true);
        assert_true((double)t.n <= 0.86 * (double)t.low_cap);
        if (!even && i > 10000 && t.border > 0) { /* two steps of 256 slots at most */
            assert_true((double)(before - t.border) / 0x1p64 * (double)t.low_cap <= 2 * 256 + 64);
        }
    }
    check(&t, m);
    rt_table_fini(&t);
    free(m);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_up_and_down),
        cmocka_unit_test(test_keys_that_crowd),
        cmocka_unit_test(test_wide_gaps),
        cmocka_unit_test(test_growing_has_no_pause),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
