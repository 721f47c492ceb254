/* Thread team: every item once, results visible, many short jobs, sleep between them. */
#include "tests/unit/cmocka.h"

#include "kernels/core/registry.h"
#include "kernels/cpu/team.h"

#include <time.h>

#define MAX_ITEMS 300

struct tally {
    int hits[MAX_ITEMS]; /* plain: only the item's own member writes */
    int salt;
    int members; /* atomic: bit for each member seen */
};

static void count_item(void *arg, int item, int member)
{
    struct tally *t = arg;

    t->hits[item] += t->salt;
    __atomic_fetch_or(&t->members, 1 << member, __ATOMIC_RELAXED);
}

static void check(struct kn_team *team, int n_items, int salt)
{
    struct tally t = {.salt = salt};

    kn_team_run(team, n_items, count_item, &t);
    for (int i = 0; i < MAX_ITEMS; i++) {
        if (t.hits[i] != (i < n_items ? salt : 0)) {
            fail_msg("item %d of %d ran %d times", i, n_items, t.hits[i] / salt);
        }
    }
    assert_true(n_items == 0 || t.members != 0);
    assert_true(t.members < 1 << kn_team_size(team));
}

static void test_every_item_once(void **state)
{
    struct bt_err err = {0};
    struct kn_team *team;

    check(NULL, 5, 1);
    assert_int_equal(kn_team_size(NULL), 1);
    for (int threads = 1; threads <= 4; threads++) {
        assert_int_equal(kn_team_create(threads, &team, &err), BT_OK);
        assert_int_equal(kn_team_size(team), threads);
        for (int i = 0; i < 3000; i++) {
            check(team, i % MAX_ITEMS, i + 1);
        }
        kn_team_destroy(team);
    }
}

/* Workers asleep on the futex are woken; the pause is longer than they spin. */
static void test_wakes_sleepers(void **state)
{
    struct bt_err err = {0};
    struct kn_team *team;
    struct timespec pause = {0, 2000000};

    assert_int_equal(kn_team_create(3, &team, &err), BT_OK);
    for (int i = 0; i < 20; i++) {
        nanosleep(&pause, NULL);
        check(team, MAX_ITEMS, i + 1);
    }
    nanosleep(&pause, NULL);
    kn_team_destroy(team); /* asleep as well */
}

static void test_limits(void **state)
{
    struct bt_err err = {0};
    struct kn_team *team;

    assert_int_equal(kn_team_create(0, &team, &err), BT_E_CONFIG);
    assert_int_equal(kn_team_create(257, &team, &err), BT_E_CONFIG);
    assert_non_null(strstr(err.msg, "257"));
    kn_team_destroy(NULL);
}

static void test_isa_names(void **state)
{
    const struct kn_ops *ops;
    struct bt_err err = {0};

    assert_int_equal(kn_ops_select("auto", &ops, &err), BT_OK);
    assert_string_equal(ops->isa, kn_ops_available()[0]);
    assert_int_equal(kn_ops_select("ref", &ops, &err), BT_OK);
    assert_string_equal(ops->isa, "ref");
    assert_int_equal(kn_ops_select("sse9", &ops, &err), BT_E_CONFIG);
    assert_non_null(strstr(err.msg, "sse9"));
    assert_string_equal(kn_op_name(KN_OP_matmul), "matmul");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_item_once),
        cmocka_unit_test(test_wakes_sleepers),
        cmocka_unit_test(test_limits),
        cmocka_unit_test(test_isa_names),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
