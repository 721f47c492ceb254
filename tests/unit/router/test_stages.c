/* Stages of a request: whatever nodes say, they add up. */
#include "router/stages.h"
#include "router/stats.h"
#include "router/trace.h"
#include "tests/unit/cmocka.h"

#include <stdio.h>
#include <stdlib.h>

#define MS 1000000ull

static uint64_t sum(const uint64_t *ns, int from, int to)
{
    uint64_t s = 0;

    for (int i = from; i < to; i++) {
        s += ns[i];
    }
    return s;
}

static void test_MET_03_stages_of_a_handoff(void **state)
{
    struct rt_stamps t = {.came = 1000 * MS,
                          .tokenized = 1002 * MS,
                          .asked = 1012 * MS,
                          .launched = 1012 * MS,
                          .first = 1232 * MS,
                          .second = 1660 * MS};
    struct rt_leg_times p = {true, 5 * MS, 10 * MS, 3 * MS, 200 * MS, {0}, "", 0};
    struct rt_leg_times d = {true, 20 * MS, 500 * MS, 100 * MS, 6 * MS, {0}, "shm", 1};
    uint64_t ns[RT_STAGE_COUNT];

    rt_stages_fill(&t, &p, &d, 0, ns);
    assert_int_equal(ns[RT_STAGE_TOKENIZE], 2 * MS);
    assert_int_equal(ns[RT_STAGE_QUEUE], 10 * MS);
    assert_int_equal(ns[RT_STAGE_RETRY], 0);
    assert_int_equal(ns[RT_STAGE_PREFILL_QUEUE], 8 * MS);
    assert_int_equal(ns[RT_STAGE_LOAD], 10 * MS);
    assert_int_equal(ns[RT_STAGE_PREFILL], 200 * MS);
    assert_int_equal(ns[RT_STAGE_RELAY], 2 * MS);
    assert_int_equal(sum(ns, 0, RT_STAGE_FIRST_COUNT), t.first - t.came);
    /* The KV moved from 1032 to 1532; until 1232 the prompt was being computed: 300 are exposed. */
    assert_int_equal(ns[RT_STAGE_RESERVE], 0);
    assert_int_equal(ns[RT_STAGE_HANDOFF], 300 * MS);
    assert_int_equal(ns[RT_STAGE_DECODE_QUEUE], 100 * MS);
    assert_int_equal(ns[RT_STAGE_DECODE], 6 * MS);
    assert_int_equal(ns[RT_STAGE_SECOND_RELAY], 22 * MS);
    assert_int_equal(sum(ns, RT_STAGE_FIRST_COUNT, RT_STAGE_COUNT), t.second - t.first);
}

/* The decode node had no pages until after the first token. */
static void test_late_reservation_is_its_own_stage(void **state)
{
    struct rt_stamps t = {
        .came = 1, .tokenized = 1, .asked = 1, .launched = 1, .first = 101, .second = 401};
    struct rt_leg_times p = {true, 0, 0, 0, 100, {0}, "", 0};
    struct rt_leg_times d = {true, 200, 50, 10, 40, {0}, "tcp", 1};
    uint64_t ns[RT_STAGE_COUNT];

    rt_stages_fill(&t, &p, &d, 0, ns);
    assert_int_equal(ns[RT_STAGE_RESERVE], 100);
    assert_int_equal(ns[RT_STAGE_HANDOFF], 50);
    assert_int_equal(ns[RT_STAGE_SECOND_RELAY], 100);
}

/* Random stamps and words of nodes that lie: sums stay exact, nothing is negative. */
static void test_sums_hold_whatever_nodes_say(void **state)
{
    uint64_t x = 88172645463325252ull;

    for (int i = 0; i < 100000; i++) {
        struct rt_stamps t = {.came = 1000};
        struct rt_leg_times legs[2];
        uint64_t ns[RT_STAGE_COUNT], v[14], now = 1000000;

        for (size_t k = 0; k < BT_ARRAY_LEN(v); k++) {
            x ^= x << 13;
            x ^= x >> 7;
            x ^= x << 17;
            v[k] = x % 5 == 0 ? x >> 2 : x % 2000;
        }
        t.tokenized = i % 7 ? t.came + v[0] % 1000 : 0;
        t.asked = t.tokenized && i % 5 ? t.tokenized + v[1] % 1000 : 0;
        t.launched = t.asked ? t.asked + v[2] % 100 : 0;
        t.first = t.launched && i % 3 ? t.launched + v[3] % 1000 + 1 : 0;
        t.second = t.first && i % 2 ? t.first + v[4] % 1000 + 1 : 0;
        legs[0] = (struct rt_leg_times){i % 11 != 0, v[5] >> 3, v[6] >> 3, v[7] >> 3,
                                        v[8] >> 3,   {0},       "",        0};
        legs[1] = (struct rt_leg_times){i % 13 != 0, v[9] >> 3, v[10] >> 3, v[11] >> 3,
                                        v[12] >> 3,  {0},       "",         0};
        rt_stages_fill(&t, &legs[0], i % 4 ? &legs[1] : NULL, now, ns);
        assert_int_equal(sum(ns, 0, RT_STAGE_FIRST_COUNT), (t.first ? t.first : now) - t.came);
        assert_int_equal(sum(ns, RT_STAGE_FIRST_COUNT, RT_STAGE_COUNT),
                         t.second ? t.second - t.first : 0);
    }
}

static void test_MET_01_tenants_are_bounded(void **state)
{
    struct rt_stats *s = calloc(1, sizeof(*s));
    char name[64];

    assert_non_null(s);
    for (int i = 0; i < 50000; i++) {
        snprintf(name, sizeof(name), "tenant-%d", i);
        rt_stats_tenant(s, name)->requests++;
    }
    assert_int_equal(s->n_tenants, RT_TENANTS_MAX);
    assert_int_equal(s->tenants[5].requests, 1);
    assert_int_equal(s->other_tenants.requests, 50000 - RT_TENANTS_MAX);
    rt_stats_tenant(s, "tenant-5")->requests++;
    assert_int_equal(s->tenants[5].requests, 2);
    free(s);
}

static void test_ring_keeps_the_newest(void **state)
{
    struct rt_traces *ts;

    assert_int_equal(rt_traces_create(3, &ts, NULL), BT_OK);
    for (uint32_t i = 0; i < 10; i++) {
        struct rt_trace *t = rt_trace_create();

        assert_non_null(t);
        t->n_prompt = i;
        rt_traces_add(ts, t);
        assert_int_equal(rt_traces_n(ts), BT_MIN(i + 1, 3u));
        assert_int_equal(rt_traces_at(ts, 0)->n_prompt, i);
    }
    assert_int_equal(rt_traces_at(ts, 2)->n_prompt, 7);
    rt_traces_destroy(ts);
    assert_int_equal(rt_traces_create(0, &ts, NULL), BT_OK);
    rt_traces_add(ts, rt_trace_create());
    assert_int_equal(rt_traces_n(ts), 0);
    rt_traces_destroy(ts);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_MET_03_stages_of_a_handoff),
        cmocka_unit_test(test_late_reservation_is_its_own_stage),
        cmocka_unit_test(test_sums_hold_whatever_nodes_say),
        cmocka_unit_test(test_MET_01_tenants_are_bounded),
        cmocka_unit_test(test_ring_keeps_the_newest),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
