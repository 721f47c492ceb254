/* Sampling parameters: ranges, and the way through both messages. */
#include "proto/descriptor.h"
#include "proto/wire/sampling_pb.h"
#include "tests/unit/cmocka.h"

#include <math.h>
#include <stdlib.h>

static int check(struct wire_sampling s)
{
    return wire_sampling_check(&s, 100, NULL);
}

static struct wire_sampling neutral(void)
{
    struct wire_sampling s;

    wire_sampling_defaults(&s);
    return s;
}

#define CHECK_WITH(field, value)                                                                   \
    ({                                                                                             \
        struct wire_sampling s_ = neutral();                                                       \
        s_.field = (value);                                                                        \
        check(s_);                                                                                 \
    })

static void test_SAMP_01_ranges(void **state)
{
    assert_int_equal(check(neutral()), BT_OK);
    assert_int_equal(CHECK_WITH(temperature, -0.0f), BT_OK);
    assert_int_equal(CHECK_WITH(temperature, 1e-9f), BT_OK);
    assert_int_equal(CHECK_WITH(temperature, -1.0f), BT_E_INVALID);
    assert_int_equal(CHECK_WITH(temperature, NAN), BT_E_INVALID);
    assert_int_equal(CHECK_WITH(temperature, INFINITY), BT_E_INVALID);
    assert_int_equal(CHECK_WITH(top_p, 0.0f), BT_OK);
    assert_int_equal(CHECK_WITH(top_p, 1.0001f), BT_E_INVALID);
    assert_int_equal(CHECK_WITH(top_p, -0.1f), BT_E_INVALID);
    assert_int_equal(CHECK_WITH(top_k, -1), BT_OK);
    assert_int_equal(CHECK_WITH(top_k, -2), BT_E_INVALID);
    assert_int_equal(CHECK_WITH(top_k, 101), BT_E_INVALID);
    assert_int_equal(CHECK_WITH(min_p, 1.1f), BT_E_INVALID);
    assert_int_equal(CHECK_WITH(max_tokens, 0), BT_E_INVALID);
    assert_int_equal(CHECK_WITH(n_logprobs, 20), BT_OK);
    assert_int_equal(CHECK_WITH(n_logprobs, 21), BT_E_INVALID);
}

static void test_SAMP_03_ids_outside_the_vocabulary(void **state)
{
    const int32_t bad[] = {999999999, -1, 100};

    for (size_t i = 0; i < BT_ARRAY_LEN(bad); i++) {
        struct wire_bias b = {bad[i], 1};
        struct wire_sampling s = neutral();

        s.bias = &b;
        s.n_bias = 1;
        assert_int_equal(check(s), BT_E_INVALID);
        s = neutral();
        s.stop_ids = &bad[i];
        s.n_stop_ids = 1;
        assert_int_equal(check(s), BT_E_INVALID);
    }
}

static void test_client_absent_fields_take_defaults(void **state)
{
    struct wire_sampling_owned o;
    bool has_seed;

    assert_int_equal(wire_sampling_from_client(NULL, NULL, &o, &has_seed, NULL), BT_OK);
    assert_false(has_seed);
    assert_true(o.s.temperature == 0 && o.s.top_p == 1 && o.s.repetition_penalty == 1);
    assert_int_equal(o.s.max_tokens, UINT32_MAX);
    assert_int_equal(o.s.n_logprobs, -1);
    wire_sampling_owned_fini(&o);
}

static void test_client_present_zero_is_not_absent(void **state)
{
    Baton__V1__Sampling m = BATON__V1__SAMPLING__INIT;
    Baton__V1__Stopping st = BATON__V1__STOPPING__INIT;
    struct wire_sampling_owned o;
    bool has_seed;

    m.top_p__case = BATON__V1__SAMPLING__TOP_P__TOP_P;
    m.logprobs__case = BATON__V1__SAMPLING__LOGPROBS__LOGPROBS;
    m.seed__case = BATON__V1__SAMPLING__SEED__SEED;
    st.max_tokens__case = BATON__V1__STOPPING__MAX_TOKENS__MAX_TOKENS;
    assert_int_equal(wire_sampling_from_client(&m, &st, &o, &has_seed, NULL), BT_OK);
    assert_true(has_seed);
    assert_true(o.s.top_p == 0);
    assert_int_equal(o.s.n_logprobs, 0);
    assert_int_equal(o.s.max_tokens, 0);
    wire_sampling_owned_fini(&o);
    m.logprobs = -1;
    assert_int_equal(wire_sampling_from_client(&m, &st, &o, &has_seed, NULL), BT_E_INVALID);
}

static void test_bias_is_sorted_and_bounded(void **state)
{
    Baton__V1__LogitBias rows[WIRE_MAX_LOGIT_BIAS + 1], *ptrs[WIRE_MAX_LOGIT_BIAS + 1];
    Baton__V1__Sampling m = BATON__V1__SAMPLING__INIT;
    struct wire_sampling_owned o;
    bool has_seed;

    for (int i = 0; i <= WIRE_MAX_LOGIT_BIAS; i++) {
        baton__v1__logit_bias__init(&rows[i]);
        rows[i].token = WIRE_MAX_LOGIT_BIAS - i;
        ptrs[i] = &rows[i];
    }
    m.logit_bias = ptrs;
    m.n_logit_bias = WIRE_MAX_LOGIT_BIAS + 1;
    assert_int_equal(wire_sampling_from_client(&m, NULL, &o, &has_seed, NULL), BT_E_INVALID);
    m.n_logit_bias = 3;
    assert_int_equal(wire_sampling_from_client(&m, NULL, &o, &has_seed, NULL), BT_OK);
    assert_int_equal(o.s.bias[0].id, WIRE_MAX_LOGIT_BIAS - 2);
    assert_int_equal(o.s.bias[2].id, WIRE_MAX_LOGIT_BIAS);
    wire_sampling_owned_fini(&o);
}

static void test_node_message_round_trip(void **state)
{
    const struct wire_bias bias[] = {{3, -100}, {7, 2.5f}};
    const int32_t stops[] = {5, 9};
    struct wire_sampling s = neutral();
    struct wire_sampling_msg m;
    struct wire_sampling_owned o;
    uint8_t bytes[256];
    Baton__V1__NodeSampling *back;
    size_t n;

    s.temperature = 0.7f;
    s.top_k = -1;
    s.top_p = 0.25f;
    s.seed = UINT64_MAX;
    s.min_tokens = 2;
    s.max_tokens = 77;
    s.ignore_eos = true;
    s.n_logprobs = -1;
    s.bias = bias;
    s.n_bias = 2;
    s.stop_ids = stops;
    s.n_stop_ids = 2;
    assert_int_equal(wire_sampling_to_node(&s, &m), BT_OK);
    assert_true(baton__v1__node_sampling__get_packed_size(&m.msg) <= sizeof(bytes));
    n = baton__v1__node_sampling__pack(&m.msg, bytes);
    wire_sampling_msg_fini(&m);
    back = baton__v1__node_sampling__unpack(NULL, n, bytes);
    assert_non_null(back);
    assert_int_equal(wire_sampling_from_node(back, &o, NULL), BT_OK);
    baton__v1__node_sampling__free_unpacked(back, NULL);
    assert_true(o.s.temperature == s.temperature && o.s.top_p == s.top_p);
    assert_int_equal(o.s.top_k, -1);
    assert_true(o.s.seed == UINT64_MAX);
    assert_int_equal(o.s.min_tokens, 2);
    assert_int_equal(o.s.max_tokens, 77);
    assert_true(o.s.ignore_eos);
    assert_int_equal(o.s.n_logprobs, -1);
    assert_int_equal(o.s.n_bias, 2);
    assert_memory_equal(o.s.bias, bias, sizeof(bias));
    assert_int_equal(o.s.n_stop_ids, 2);
    assert_memory_equal(o.s.stop_ids, stops, sizeof(stops));
    wire_sampling_owned_fini(&o);
    assert_int_equal(wire_sampling_from_node(NULL, &o, NULL), BT_E_INVALID);
}

static void test_descriptor_set_names_the_services(void **state)
{
    struct bt_str set = wire_descriptor_set();

    assert_true(set.n > 1000 && set.n < 100000);
    assert_non_null(memmem(set.p, set.n, "node.proto", 10));
    assert_non_null(memmem(set.p, set.n, "DetokenizeRequest", 17));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_SAMP_01_ranges),
        cmocka_unit_test(test_SAMP_03_ids_outside_the_vocabulary),
        cmocka_unit_test(test_client_absent_fields_take_defaults),
        cmocka_unit_test(test_client_present_zero_is_not_absent),
        cmocka_unit_test(test_bias_is_sorted_and_bounded),
        cmocka_unit_test(test_node_message_round_trip),
        cmocka_unit_test(test_descriptor_set_names_the_services),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
