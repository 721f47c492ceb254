/* Choice of nodes: paths, load, ties, failed nodes, misfits, and what the error names. */
#include "router/policy.h"

#include "router/cost.h"
#include "tests/unit/cmocka.h"

#include <stdlib.h>

static const struct rt_compat same = {.numerics = "cpu/1", .weight_epoch = 1};
static const struct rt_compat other = {.numerics = "cpu/2", .weight_epoch = 1};

static struct rt_node_view node(const char *name, enum rt_role role)
{
    return (struct rt_node_view){.name = name,
                                 .role = role,
                                 .ready = true,
                                 .compat = &same,
                                 .pages_free = 100,
                                 .pages_total = 100};
}

#define P(n) node("p" #n, RT_ROLE_PREFILL)
#define D(n) node("d" #n, RT_ROLE_DECODE)
#define B(n) node("b" #n, RT_ROLE_BOTH)

static int pick(
    const struct rt_node_view *v, size_t n, enum rt_path path, uint64_t ticket, struct rt_pick *ret)
{
    struct rt_pick_args a = {.nodes = v,
                             .n = n,
                             .path = path,
                             .n_prompt = 100,
                             .local_below_tokens = 10,
                             .ticket = ticket};

    return rt_policy_pick(&a, ret, NULL);
}

static void test_auto_prefers_a_pair(void **state)
{
    const struct rt_node_view v[] = {D(0), B(0), P(0)};
    struct rt_pick got;

    assert_int_equal(pick(v, 3, RT_PATH_AUTO, 1, &got), BT_OK);
    assert_int_equal(got.path, RT_PATH_DIRECT);
    assert_int_equal(got.prefill, 2);
    assert_int_equal(got.decode, 0);
}

/* What was weighed is told: of each leg the cheapest ones, the chosen one among them. */
static void test_the_cheapest_are_seen(void **state)
{
    struct rt_node_view v[12];
    struct rt_seen seen;
    struct rt_pick_args a = {
        .nodes = v, .n = 12, .path = RT_PATH_DIRECT, .n_prompt = 100, .seen = &seen};
    struct rt_pick got;

    for (int i = 0; i < 10; i++) {
        v[i] = P(0);
        v[i].queue_s = (i * 7 % 10) + 1;
    }
    v[10] = D(0);
    v[11] = D(1);
    for (int twice = 0; twice < 2; twice++) {
        assert_int_equal(rt_policy_pick(&a, &got, NULL), BT_OK);
        assert_int_equal(seen.n_all[RT_SEEN_PREFILL], 10);
        assert_int_equal(seen.n[RT_SEEN_PREFILL], RT_SEEN_MAX);
        assert_int_equal(seen.n[RT_SEEN_DECODE], 2);
        assert_int_equal(seen.n[RT_SEEN_LOCAL], 0);
        for (unsigned i = 0; i < RT_SEEN_MAX; i++) {
            assert_true(v[seen.v[RT_SEEN_PREFILL][i].idx].queue_s <= RT_SEEN_MAX);
        }
        assert_int_equal(got.prefill, 0);
        assert_true(seen.v[RT_SEEN_PREFILL][0].idx == 0);
    }
}

static void test_auto_falls_back_to_local(void **state)
{
    struct rt_node_view v[] = {D(0), P(0)};
    struct rt_pick got;

    v[1].ready = false;
    assert_int_equal(pick(v, 2, RT_PATH_AUTO, 1, &got), BT_OK);
    assert_int_equal(got.path, RT_PATH_LOCAL);
    assert_int_equal(got.prefill, -1);
    assert_int_equal(got.decode, 0);
    assert_int_equal(pick(v, 2, RT_PATH_DIRECT, 1, &got), BT_E_UNAVAILABLE);
}

static void test_short_prompts_are_local(void **state)
{
    const struct rt_node_view v[] = {D(0), P(0)};
    struct rt_pick_args a = {.nodes = v, .n = 2, .n_prompt = 9, .local_below_tokens = 10};
    struct rt_pick got;

    assert_int_equal(rt_policy_pick(&a, &got, NULL), BT_OK);
    assert_int_equal(got.path, RT_PATH_LOCAL);
    a.path = RT_PATH_DIRECT;
    assert_int_equal(rt_policy_pick(&a, &got, NULL), BT_OK);
    assert_int_equal(got.path, RT_PATH_DIRECT);
    a.path = RT_PATH_AUTO;
    a.n_prompt = 10;
    assert_int_equal(rt_policy_pick(&a, &got, NULL), BT_OK);
    assert_int_equal(got.path, RT_PATH_DIRECT);
}

static void test_least_load_wins(void **state)
{
    struct rt_node_view v[] = {P(0), P(1), D(0), D(1)};
    struct rt_pick got;

    v[0].tokens_outstanding = 4000;
    v[1].tokens_outstanding = 100;
    v[2].requests_outstanding = 1;
    v[3].requests_outstanding = 5;
    for (uint64_t t = 0; t < 50; t++) {
        assert_int_equal(pick(v, 4, RT_PATH_AUTO, t * 77777, &got), BT_OK);
        assert_int_equal(got.prefill, 1);
        assert_int_equal(got.decode, 2);
    }
    /* equally busy: the emptier pool */
    v[3].requests_outstanding = 1;
    v[2].pages_free = 10;
    assert_int_equal(pick(v, 4, RT_PATH_AUTO, 1, &got), BT_OK);
    assert_int_equal(got.decode, 3);
}

static void test_RTR_02_idle_nodes_share(void **state)
{
    const struct rt_node_view v[] = {P(0), P(1), P(2), D(0), D(1)};
    int n_prefill[5] = {0}, n_decode[5] = {0};
    uint64_t ticket = 12345;
    struct rt_pick got;

    for (int i = 0; i < 3000; i++) {
        ticket = ticket * 6364136223846793005ull + 1442695040888963407ull;
        assert_int_equal(pick(v, 5, RT_PATH_AUTO, ticket, &got), BT_OK);
        n_prefill[got.prefill]++;
        n_decode[got.decode]++;
    }
    for (int i = 0; i < 3; i++) {
        assert_in_range(n_prefill[i], 800, 1200);
    }
    assert_in_range(n_decode[3], 1300, 1700);
}

static void test_failed_nodes_come_last(void **state)
{
    struct rt_node_view v[] = {P(0), P(1), D(0)};
    struct rt_pick got;

    v[0].excluded = true;
    v[1].tokens_outstanding = 1u << 30;
    assert_int_equal(pick(v, 3, RT_PATH_AUTO, 1, &got), BT_OK);
    assert_int_equal(got.prefill, 1);
    v[1].ready = false; /* the failed one is all there is, but the decode node can do without */
    assert_int_equal(pick(v, 3, RT_PATH_DIRECT, 1, &got), BT_OK);
    assert_int_equal(got.prefill, 0);
    assert_int_equal(pick(v, 3, RT_PATH_AUTO, 1, &got), BT_OK);
    assert_int_equal(got.path, RT_PATH_LOCAL);
    v[2].excluded = true; /* both have failed: a pair as ever */
    assert_int_equal(pick(v, 3, RT_PATH_AUTO, 1, &got), BT_OK);
    assert_int_equal(got.path, RT_PATH_DIRECT);
}

static void test_KVX_07_misfits_are_not_paired(void **state)
{
    struct rt_node_view v[] = {P(0), P(1), D(0)};
    struct rt_pick_args a = {.nodes = v, .n = 3, .path = RT_PATH_DIRECT};
    struct rt_pick got;
    struct bt_err err = {0};

    v[0].compat = &other;
    v[1].tokens_outstanding = 1u << 20; /* busy, but it fits */
    assert_int_equal(rt_policy_pick(&a, &got, NULL), BT_OK);
    assert_int_equal(got.prefill, 1);
    v[1].ready = false;
    assert_int_equal(rt_policy_pick(&a, &got, &err), BT_E_UNAVAILABLE);
    assert_non_null(strstr(err.msg, "p0"));
    assert_non_null(strstr(err.msg, "d0"));
    assert_non_null(strstr(err.msg, "cpu/1"));
    assert_non_null(strstr(err.msg, "cpu/2"));
}

static void test_error_names_what_is_missing(void **state)
{
    struct rt_node_view v[] = {P(0), D(0)};
    struct rt_pick_args a = {.nodes = v, .n = 0};
    struct rt_pick got;
    struct bt_err err = {0};

    assert_int_equal(rt_policy_pick(&a, &got, &err), BT_E_UNAVAILABLE);
    assert_non_null(strstr(err.msg, "no decode node"));
    a.n = 1;
    assert_int_equal(rt_policy_pick(&a, &got, &err), BT_E_UNAVAILABLE);
    assert_non_null(strstr(err.msg, "no decode node"));
    assert_null(strstr(err.msg, "cordoned"));
    v[0].ready = false;
    v[0].cordoned = true;
    assert_int_equal(rt_policy_pick(&a, &got, &err), BT_E_UNAVAILABLE);
    assert_non_null(strstr(err.msg, "(1 nodes known, 0 prefill nodes ready, 1 cordoned)"));
    v[0] = P(0);
    a.n = 2;
    a.path = RT_PATH_DIRECT;
    v[0].ready = false;
    assert_int_equal(rt_policy_pick(&a, &got, &err), BT_E_UNAVAILABLE);
    assert_non_null(strstr(err.msg, "no prefill node"));
}

static void test_compat_names_both_values(void **state)
{
    struct rt_compat a = same, b = same;
    char why[160];

    assert_true(rt_compat_equal(&a, &b, why));
    b.weight_epoch = 9;
    assert_false(rt_compat_equal(&a, &b, why));
    assert_string_equal(why, "weight epoch 1 and 9");
    b = a;
    b.kv_format[31] = 1;
    assert_false(rt_compat_equal(&a, &b, why));
}

/* ---- tiers: what a prefix costs where it lies ---- */

#define BLOCK 64u

/* A node that computes a thousand tokens a second, with blocks of 64 ms to compute. */
static struct rt_node_view tiered(struct rt_speed *s)
{
    struct rt_node_view v = P(0);

    rt_speed_init(s);
    for (int i = 0; i < 400; i++) {
        double n = 100 + i % 5 * 100;
        struct rt_step step = {.prompt_tokens = n, .prompt_work = n * n / 2, .seconds = n / 1000};

        rt_speed_learn(s, &step, 0);
    }
    v.speed = s;
    v.block_tokens = BLOCK;
    v.page_tokens = 16;
    return v;
}

static struct rt_estimate cost(const struct rt_node_view *v)
{
    struct rt_pick_args a = {.nodes = v, .n = 1, .n_prompt = 20 * BLOCK};

    return rt_cost_prompt(&a, v);
}

static void assert_tiers(const struct rt_estimate *e, const uint32_t want[RT_TIERS])
{
    assert_memory_equal(e->tier_blocks, want, RT_TIERS * sizeof(*want));
    assert_int_equal(e->cached_blocks, want[0] + want[1] + want[2] + want[3]);
}

/* pool 4, host 3, disk 2, store 5: each tier is used while bringing is cheaper than computing. */
static void test_tiers_weigh_in_seconds(void **state)
{
    struct rt_speed s;
    struct rt_node_view v = tiered(&s);
    struct rt_estimate e;

    v.run = (struct rt_run){.upto = {4, 7, 9}, .slow = {0, 3, 2}, .host_in_disk = 3, .store = 5};
    e = cost(&v); /* times are not known: not used */
    assert_tiers(&e, (uint32_t[]){4, 0, 0, 0});
    v.block_s[1] = 0.001;
    v.block_s[2] = 0.01;
    v.block_s[3] = 0.02;
    e = cost(&v);
    assert_tiers(&e, (uint32_t[]){4, 3, 2, 5});
    assert_true(e.bring_s > 0.1229 && e.bring_s < 0.1231);
    v.block_s[3] = 0.2; /* slower than computing */
    e = cost(&v);
    assert_tiers(&e, (uint32_t[]){4, 3, 2, 0});
    v.block_s[2] = 0.2;
    v.block_s[3] = 0.02; /* the disk lies before it: together cheaper than computing both? no */
    v.run.store = 1;
    e = cost(&v);
    assert_tiers(&e, (uint32_t[]){4, 3, 0, 0});
    v.run.store = 11; /* now they are */
    e = cost(&v);
    assert_tiers(&e, (uint32_t[]){4, 3, 2, 10}); /* one token at least is computed */
    v.block_s[3] = 0;                            /* Redis is gone */
    e = cost(&v);
    assert_tiers(&e, (uint32_t[]){4, 3, 0, 0});
}

/* A prompt that only the store has costs the same everywhere: load decides. With a copy of its own
 * an equally busy node is better, a much busier one is not. */
static void test_what_the_store_has_is_routed_by_load(void **state)
{
    struct rt_speed s;
    struct rt_node_view v[] = {tiered(&s), tiered(&s), tiered(&s), D(0)};
    struct rt_pick_args a = {
        .nodes = v, .n = 4, .path = RT_PATH_DIRECT, .n_prompt = 20 * BLOCK, .n_answer = 1};
    struct rt_pick got;

    for (int i = 0; i < 3; i++) {
        v[i].run.store = 16;
        v[i].block_s[1] = 0.001;
        v[i].block_s[3] = 0.01;
        v[i].queue_s = i == 1 ? 0 : 0.3;
    }
    for (uint64_t t = 0; t < 20; t++) {
        a.ticket = t * 77777;
        assert_int_equal(rt_policy_pick(&a, &got, NULL), BT_OK);
        assert_int_equal(got.prefill, 1);
        assert_int_equal(got.est.tier_blocks[3], 16);
    }
    v[2].run = (struct rt_run){.upto = {0, 16, 16}, .slow = {0, 16, 0}, .host_in_disk = 16};
    assert_int_equal(rt_policy_pick(&a, &got, NULL), BT_OK);
    assert_int_equal(got.prefill, 1);
    v[2].queue_s = 0.1;
    assert_int_equal(rt_policy_pick(&a, &got, NULL), BT_OK);
    assert_int_equal(got.prefill, 2);
    assert_int_equal(got.est.tier_blocks[1], 16);
}

/* Daemons are no targets. */
static void test_daemons_get_no_legs(void **state)
{
    const struct rt_node_view v[] = {node("s0", RT_ROLE_STORE), D(0)};
    struct rt_pick got;

    assert_int_equal(pick(v, 2, RT_PATH_AUTO, 1, &got), BT_OK);
    assert_int_equal(got.path, RT_PATH_LOCAL);
    assert_int_equal(got.decode, 1);
    assert_int_equal(pick(v, 1, RT_PATH_AUTO, 1, &got), BT_E_UNAVAILABLE);
    assert_int_equal(pick(v, 2, RT_PATH_DIRECT, 1, &got), BT_E_UNAVAILABLE);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_auto_prefers_a_pair),
        cmocka_unit_test(test_auto_falls_back_to_local),
        cmocka_unit_test(test_short_prompts_are_local),
        cmocka_unit_test(test_least_load_wins),
        cmocka_unit_test(test_RTR_02_idle_nodes_share),
        cmocka_unit_test(test_failed_nodes_come_last),
        cmocka_unit_test(test_KVX_07_misfits_are_not_paired),
        cmocka_unit_test(test_error_names_what_is_missing),
        cmocka_unit_test(test_the_cheapest_are_seen),
        cmocka_unit_test(test_compat_names_both_values),
        cmocka_unit_test(test_tiers_weigh_in_seconds),
        cmocka_unit_test(test_what_the_store_has_is_routed_by_load),
        cmocka_unit_test(test_daemons_get_no_legs),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
