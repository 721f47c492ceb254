/* Which version of a session two peers use. */
#include "proto/wire/session.h"
#include "tests/unit/cmocka.h"

#include <stdio.h>

#define N WIRE_SESSION_VERSION

static uint32_t pick(uint32_t lowest, uint32_t highest)
{
    uint32_t version = 0;

    assert_int_equal(wire_session_pick(lowest, highest, &version, NULL), BT_OK);
    assert_true(wire_session_speaks(version));
    return version;
}

static void test_highest_that_both_speak(void **state)
{
    assert_int_equal(pick(N - 1, 0), N - 1); /* the hello of version 1 */
    assert_int_equal(pick(N - 1, N - 1), N - 1);
    assert_int_equal(pick(N - 1, N), N);
    assert_int_equal(pick(N, 0), N);
    assert_int_equal(pick(N, N + 5), N);
    assert_int_equal(pick(0, N - 1), N - 1);
    assert_int_equal(pick(0, UINT32_MAX), N);
}

static void test_no_common_version_names_both_ranges(void **state)
{
    static const uint32_t ranges[][2] = {
        {N - 2, 0}, {N - 2, N - 2},  {N + 1, 0},      {N + 1, N + 4},
        {N, N - 1}, {UINT32_MAX, 0}, {UINT32_MAX, 1},
    };
    uint32_t version = 77;
    char text[80];

    for (size_t i = 0; i < BT_ARRAY_LEN(ranges); i++) {
        uint32_t lowest = ranges[i][0], highest = ranges[i][1] ? ranges[i][1] : lowest;
        struct bt_err err = {0};

        assert_int_equal(wire_session_pick(lowest, ranges[i][1], &version, &err),
                         BT_E_INCOMPATIBLE);
        snprintf(text, sizeof(text), "%u to %u are asked for, %d to %d are spoken", lowest, highest,
                 N - 1, N);
        assert_non_null(strstr(err.msg, text));
    }
    assert_int_equal(version, 77);
}

static void test_only_these_are_spoken(void **state)
{
    assert_true(wire_session_speaks(N) && wire_session_speaks(N - 1));
    assert_false(wire_session_speaks(N + 1) || wire_session_speaks(N - 2));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_highest_that_both_speak),
        cmocka_unit_test(test_no_common_version_names_both_ranges),
        cmocka_unit_test(test_only_these_are_spoken),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
