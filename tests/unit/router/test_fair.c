/* The queue of many tenants: shares by weight, priorities that do not starve anybody, bounds. */
#include "router/fair.h"

#include "tests/unit/cmocka.h"

#define S 1000000000ull
#define N 400

static struct rt_fair *make(struct rt_fair_cfg cfg)
{
    struct rt_fair *f = NULL;

    cfg.max_queued = cfg.max_queued ? cfg.max_queued : N;
    assert_int_equal(rt_fair_create(&cfg, &f, NULL), BT_OK);
    return f;
}

static void push(struct rt_fair *f, struct rt_fair_item *it, const char *tenant, uint64_t now)
{
    assert_int_equal(rt_fair_push(f, it, tenant, now, NULL), BT_OK);
}

/* Each has 50 requests of one second queued at once; who is served in the first 30. */
static void shares(const char *weights, int want_a, int want_b)
{
    struct rt_fair *f = make((struct rt_fair_cfg){.weights = weights});
    static struct rt_fair_item items[100];
    int got[2] = {0};

    for (int i = 0; i < 100; i++) { /* a floods first */
        items[i] = (struct rt_fair_item){.cost_s = 1};
        push(f, &items[i], i < 50 ? "a" : "b", S);
    }
    for (int i = 0; i < 30; i++) {
        struct rt_fair_item *it = rt_fair_next(f, S);

        got[it >= &items[50]]++;
        rt_fair_start(f, it);
        rt_fair_end(f, it);
    }
    assert_int_equal(got[0], want_a);
    assert_int_equal(got[1], want_b);
    assert_int_equal(rt_fair_queued(f), 70);
    for (int i = 0; i < 100; i++) {
        rt_fair_end(f, &items[i]);
    }
    assert_int_equal(rt_fair_queued(f), 0);
    assert_true(rt_fair_queued_s(f) == 0);
    rt_fair_destroy(f);
}

static void test_shares_by_weight(void **state)
{
    shares(NULL, 15, 15);
    shares("a=2", 20, 10);
    shares("b=5,a=1", 5, 25);
}

/* Who has used nothing for a while saves nothing up. */
static void test_no_credit_for_idling(void **state)
{
    struct rt_fair *f = make((struct rt_fair_cfg){0});
    static struct rt_fair_item items[60];
    int of_b = 0;

    for (int i = 0; i < 60; i++) {
        items[i] = (struct rt_fair_item){.cost_s = 1};
    }
    for (int i = 0; i < 40; i++) {
        push(f, &items[i], "a", S);
    }
    for (int i = 0; i < 20; i++) { /* a alone */
        struct rt_fair_item *it = rt_fair_next(f, S);

        rt_fair_start(f, it);
        rt_fair_end(f, it);
    }
    for (int i = 40; i < 60; i++) {
        push(f, &items[i], "b", S);
    }
    for (int i = 0; i < 10; i++) {
        struct rt_fair_item *it = rt_fair_next(f, S);

        of_b += it >= &items[40];
        rt_fair_start(f, it);
        rt_fair_end(f, it);
    }
    assert_in_range(of_b, 5, 6);
    for (int i = 0; i < 60; i++) {
        rt_fair_end(f, &items[i]);
    }
    rt_fair_destroy(f);
}

/* A flood of urgent requests at full capacity, one a second, and one that is not urgent: it starts
 * within a bound that the two levels of priority set. */
static void test_SCHED_04_nobody_starves(void **state)
{
    struct rt_fair *f = make((struct rt_fair_cfg){0});
    static struct rt_fair_item flood[N / 2], odd;
    uint64_t now = S;
    int n = 0, started = -1;

    odd = (struct rt_fair_item){.cost_s = 1, .priority = -2};
    for (int i = 0; i < 20; i++) {
        flood[n] = (struct rt_fair_item){.cost_s = 1, .priority = 2};
        push(f, &flood[n++], "hot", now);
    }
    push(f, &odd, "hot", now);
    for (int second = 0; second < 120 && started < 0; second++) {
        struct rt_fair_item *it = rt_fair_next(f, now);

        started = it == &odd ? second : -1;
        rt_fair_start(f, it);
        rt_fair_end(f, it);
        now += S;
        flood[n] = (struct rt_fair_item){.cost_s = 1, .priority = 2};
        push(f, &flood[n++], "hot", now);
    }
    assert_in_range(started, 1, 60);
    assert_true(rt_fair_oldest_s(f, now) > 0);
    for (int i = 0; i < n; i++) {
        rt_fair_end(f, &flood[i]);
    }
    rt_fair_destroy(f);
}

static void test_bounds(void **state)
{
    struct rt_fair *f = make(
        (struct rt_fair_cfg){.max_queued = 4, .tenant_max_queued = 2, .tenant_max_running = 1});
    struct rt_fair_item it[6] = {0};
    struct bt_err err;

    push(f, &it[0], "a", S);
    push(f, &it[1], "a", S);
    assert_int_equal(rt_fair_push(f, &it[2], "a", S, &err), BT_E_EXHAUSTED);
    push(f, &it[2], "b", S);
    push(f, &it[3], "", S);
    assert_int_equal(rt_fair_push(f, &it[4], "c", S, &err), BT_E_EXHAUSTED);
    assert_null(it[4].tenant);
    assert_ptr_equal(rt_fair_next(f, S), &it[0]);
    rt_fair_start(f, &it[0]);
    assert_ptr_not_equal(rt_fair_next(f, S), &it[1]); /* a runs one */
    rt_fair_end(f, &it[2]);
    rt_fair_end(f, &it[3]);
    assert_null(rt_fair_next(f, S));
    rt_fair_end(f, &it[0]);
    assert_ptr_equal(rt_fair_next(f, S), &it[1]);
    rt_fair_end(f, &it[1]);
    rt_fair_end(f, &it[1]); /* never here: nothing */
    rt_fair_destroy(f);
}

static void test_weights_are_checked(void **state)
{
    static const char *const bad[] = {"a", "a=", "=1", "a=0", "a=1,b=x", "a=1;b=2", "a=1000"};
    struct rt_fair *f;

    for (size_t i = 0; i < BT_ARRAY_LEN(bad); i++) {
        struct rt_fair_cfg cfg = {.max_queued = 1, .weights = bad[i]};

        assert_int_equal(rt_fair_create(&cfg, &f, NULL), BT_E_CONFIG);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_shares_by_weight),        cmocka_unit_test(test_no_credit_for_idling),
        cmocka_unit_test(test_SCHED_04_nobody_starves), cmocka_unit_test(test_bounds),
        cmocka_unit_test(test_weights_are_checked),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
