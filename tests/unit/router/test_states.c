/* Every allowed edge of the router's state machines, and that every other one is refused. */
#include "router/states.h"
#include "tests/unit/cmocka.h"

#include <stdlib.h>

static void test_node_edges(void **state)
{
    static const bool allowed[RT_NODE_STATE_COUNT][RT_NODE_STATE_COUNT] = {
        [RT_NODE_CONNECTING] = {[RT_NODE_READY] = true,
                                [RT_NODE_DRAINING] = true,
                                [RT_NODE_INCOMPATIBLE] = true,
                                [RT_NODE_LOST] = true},
        [RT_NODE_READY] = {[RT_NODE_DRAINING] = true, [RT_NODE_LOST] = true},
        [RT_NODE_DRAINING] = {[RT_NODE_LOST] = true},
        [RT_NODE_INCOMPATIBLE] = {[RT_NODE_LOST] = true},
        [RT_NODE_LOST] = {[RT_NODE_CONNECTING] = true},
    };

    for (int from = 0; from < RT_NODE_STATE_COUNT; from++) {
        for (int to = 0; to < RT_NODE_STATE_COUNT; to++) {
            assert_int_equal(
                rt_node_state_allowed((enum rt_node_state)from, (enum rt_node_state)to),
                allowed[from][to]);
        }
    }
    assert_false(rt_node_state_allowed(RT_NODE_READY, RT_NODE_STATE_COUNT));
    assert_string_equal(rt_node_state_name(RT_NODE_INCOMPATIBLE), "incompatible");
    assert_string_equal(rt_node_state_name(RT_NODE_STATE_COUNT), "?");
}

static void test_request_edges(void **state)
{
    static const bool allowed[RT_REQUEST_STATE_COUNT][RT_REQUEST_STATE_COUNT] = {
        [RT_REQUEST_TOKENIZE] = {[RT_REQUEST_QUEUED] = true, [RT_REQUEST_DONE] = true},
        [RT_REQUEST_QUEUED] =
            {[RT_REQUEST_PREFILL] = true, [RT_REQUEST_LOCAL] = true, [RT_REQUEST_DONE] = true},
        [RT_REQUEST_PREFILL] =
            {[RT_REQUEST_HANDOFF] = true, [RT_REQUEST_QUEUED] = true, [RT_REQUEST_DONE] = true},
        [RT_REQUEST_HANDOFF] =
            {[RT_REQUEST_DECODE] = true, [RT_REQUEST_QUEUED] = true, [RT_REQUEST_DONE] = true},
        [RT_REQUEST_LOCAL] =
            {[RT_REQUEST_DECODE] = true, [RT_REQUEST_QUEUED] = true, [RT_REQUEST_DONE] = true},
        [RT_REQUEST_DECODE] = {[RT_REQUEST_QUEUED] = true, [RT_REQUEST_DONE] = true},
    };

    for (int from = 0; from < RT_REQUEST_STATE_COUNT; from++) {
        for (int to = 0; to < RT_REQUEST_STATE_COUNT; to++) {
            assert_int_equal(
                rt_request_state_allowed((enum rt_request_state)from, (enum rt_request_state)to),
                allowed[from][to]);
        }
    }
    assert_string_equal(rt_request_state_name(RT_REQUEST_HANDOFF), "handoff");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_node_edges),
        cmocka_unit_test(test_request_edges),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
