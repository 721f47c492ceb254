/* Every edge of the table is allowed, every other one refused. */
#include "deploy/supervisor/supervisor.h"

#include <stdio.h>
#include <stdlib.h>

#include "tests/unit/cmocka.h"

static void test_edges(void **state)
{
    static const struct {
        enum sv_state from, to;
    } allowed[] = {{SV_BACKOFF, SV_STARTING}, {SV_BACKOFF, SV_GONE},      {SV_STARTING, SV_READY},
                   {SV_STARTING, SV_BACKOFF}, {SV_STARTING, SV_STOPPING}, {SV_STARTING, SV_GONE},
                   {SV_READY, SV_BACKOFF},    {SV_READY, SV_STOPPING},    {SV_READY, SV_GONE},
                   {SV_STOPPING, SV_GONE},    {SV_STOPPING, SV_BACKOFF}};

    for (int from = 0; from < SV_STATE_COUNT; from++) {
        for (int to = 0; to < SV_STATE_COUNT; to++) {
            bool want = false;

            for (size_t i = 0; i < BT_ARRAY_LEN(allowed); i++) {
                want = want || ((int)allowed[i].from == from && (int)allowed[i].to == to);
            }
            assert_int_equal(sv_state_allowed((enum sv_state)from, (enum sv_state)to), want);
        }
        assert_non_null(sv_state_name((enum sv_state)from));
    }
}

static void test_placeholders(void **state)
{
    struct sv sv = {.run = "/r"};
    struct sv_child c = {.name = "decode-3", .index = 3};
    char *s = sv_expand(&sv, &c, "{run}/{name}.{index}{nobody}{");

    assert_string_equal(s, "/r/decode-3.3{nobody}{");
    free(s);
    s = sv_expand(&sv, &c, "");
    assert_string_equal(s, "");
    free(s);
}

static void test_childs_are_in_the_order_of_their_index(void **state)
{
    struct sv_role role = {.name = "decode"};
    unsigned order[] = {2, 0, 3, 1}, i = 0;

    bt_list_init(&role.childs);
    for (size_t k = 0; k < BT_ARRAY_LEN(order); k++) {
        assert_non_null(sv_child_add(&role, order[k]));
    }
    bt_list_for_each_safe (it, &role.childs) {
        struct sv_child *c = BT_LIST_ENTRY(it, struct sv_child, link);
        char name[16];

        snprintf(name, sizeof(name), "decode-%u", i);
        assert_int_equal(c->index, i++);
        assert_string_equal(c->name, name);
        sv_child_free(c);
    }
    assert_int_equal(i, 4);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_edges),
        cmocka_unit_test(test_placeholders),
        cmocka_unit_test(test_childs_are_in_the_order_of_their_index),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
