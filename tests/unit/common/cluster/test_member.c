/* Text form of members: round trip, everything that must be refused; seeds; snapshots. */
#include "common/cluster/member.h"

#include "tests/unit/cmocka.h"

#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#define HEX32 "000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f"
#define RECORD                                                                                     \
    "v=1\nname=decode-0\nincarnation=019a6c51f3c2a7b4\nrole=decode\nstate=ready\n"                 \
    "grpc=10.0.0.7:50051\nnet=[fd00::7]:50061\nmodel=" HEX32 "\ncompat=" HEX32                     \
    "\nweight_epoch=18446744073709551615\n"

static int decode(const char *name, const char *text, struct bt_member *m, struct bt_err *err)
{
    return bt_member_decode(bt_str_of(name), bt_str_of(text), m, err);
}

static void set_store(struct bt_member *m, const char *addr)
{
    memcpy(m->store_addr, addr, strlen(addr) + 1);
}

static void test_round_trip(void **state)
{
    struct bt_member m = {0}, back = {0};
    struct bt_buf text = {0};
    struct bt_err err = {0};

    assert_int_equal(decode("decode-0", RECORD, &m, &err), BT_OK);
    assert_string_equal(m.name, "decode-0");
    assert_true(m.incarnation == 0x019a6c51f3c2a7b4ull);
    assert_int_equal(m.role, BT_ROLE_DECODE);
    assert_false(m.draining || m.seed);
    assert_string_equal(m.grpc_addr, "10.0.0.7:50051");
    assert_string_equal(m.net_addr, "[fd00::7]:50061");
    assert_int_equal(m.model[31], 0x1f);
    assert_int_equal(m.compat[1], 1);
    assert_true(m.weight_epoch == UINT64_MAX);
    assert_int_equal(bt_member_encode(&m, &text), BT_OK);
    assert_true(bt_str_eq(bt_buf_str(&text), BT_STR(RECORD)));
    m.draining = true;
    m.role = BT_ROLE_KVSTORE;
    m.net_addr[0] = '\0';
    set_store(&m, "10.0.0.7:50071");
    text.n = 0;
    assert_int_equal(bt_member_encode(&m, &text), BT_OK);
    assert_int_equal(bt_member_decode(BT_STR("decode-0"), bt_buf_str(&text), &back, &err), BT_OK);
    assert_true(bt_member_equal(&m, &back));
    set_store(&back, "10.0.0.7:50072");
    assert_false(bt_member_equal(&m, &back));
    bt_buf_fini(&text);
}

/* RECORD with the first `from` replaced. */
static char *edited(const char *from, const char *to)
{
    const char *at = strstr(RECORD, from);
    char *out = NULL;

    assert_non_null(at);
    assert_true(asprintf(&out, "%.*s%s%s", (int)(at - RECORD), RECORD, to, at + strlen(from)) > 0);
    return out;
}

static void test_refused(void **state)
{
    static const struct {
        const char *from, *to, *why;
    } cases[] = {
        {"v=1", "v=2", "bad v"},
        {"v=1\n", "", "v is missing"},
        {"name=decode-0", "name=decode-1", "bad name"},
        {"incarnation=019a6c51f3c2a7b4", "incarnation=0000000000000000", "bad incarnation"},
        {"019a6c51f3c2a7b4", "19a6c51f3c2a7b4", "bad incarnation"},
        {"019a6c51f3c2a7b4", "019a6c51f3c2a7bg", "bad incarnation"},
        {"role=decode", "role=unknown", "bad role"},
        {"role=decode", "role=", "bad role"},
        {"state=ready", "state=dead", "bad state"},
        {"grpc=10.0.0.7:50051", "grpc=", "bad grpc"},
        {"10.0.0.7:50051", "10.0.0.7:0", "bad grpc"},
        {"10.0.0.7:50051", "10.0.0.7:50051 x", "bad grpc"},
        {"10.0.0.7:50051", "unix:/run/docker.sock", "bad grpc"},
        {"[fd00::7]:50061", "fd00::7:50061", "bad net"},
        {"model=00", "model=0", "bad model"},
        {"compat=00", "compat=zz", "bad compat"},
        {"weight_epoch=18446744073709551615", "weight_epoch=18446744073709551616",
         "bad weight_epoch"},
        {"weight_epoch=18446744073709551615", "weight_epoch=-1", "bad weight_epoch"},
        {"state=ready", "state=ready\nstate=ready", "state twice"},
        {"state=ready", "garbage", "without '='"},
        {"state=ready", "\n", "without '='"},
    };
    struct bt_member m = {0};
    struct bt_err err;
    char long_record[BT_MEMBER_RECORD_MAX + 2];

    for (size_t i = 0; i < BT_ARRAY_LEN(cases); i++) {
        char *text = edited(cases[i].from, cases[i].to);

        err.msg[0] = '\0';
        assert_int_equal(decode("decode-0", text, &m, &err), BT_E_FORMAT);
        if (!strstr(err.msg, cases[i].why)) {
            fail_msg("case %zu: \"%s\" lacks \"%s\"", i, err.msg, cases[i].why);
        }
        free(text);
    }
    assert_int_equal(m.name[0], 0);
    assert_int_equal(decode("decode 0", RECORD, &m, &err), BT_E_FORMAT);
    assert_int_equal(decode("", RECORD, &m, &err), BT_E_FORMAT);
    memset(long_record, 'a', sizeof(long_record) - 1);
    long_record[sizeof(long_record) - 1] = '\0';
    assert_int_equal(decode("decode-0", long_record, &m, &err), BT_E_FORMAT);
    assert_non_null(strstr(err.msg, "more than 2048"));
    assert_int_equal(decode("decode-0", RECORD "later=x\n", &m, &err), BT_OK);
}

static void test_seed(void **state)
{
    struct bt_member m;
    struct bt_err err;

    assert_int_equal(bt_member_read_seed(BT_STR("decode-0.svc:7000"), &m, &err), BT_OK);
    assert_string_equal(m.name, "");
    assert_string_equal(m.grpc_addr, "decode-0.svc:7000");
    assert_true(m.seed && m.incarnation == 0 && m.role == BT_ROLE_UNKNOWN);
    assert_int_equal(bt_member_read_seed(BT_STR("p0@[::1]:7000"), &m, &err), BT_OK);
    assert_string_equal(m.name, "p0");
    assert_string_equal(m.grpc_addr, "[::1]:7000");
    assert_int_equal(bt_member_read_seed(BT_STR("p0@"), &m, &err), BT_E_CONFIG);
    assert_int_equal(bt_member_read_seed(BT_STR("@h:1"), &m, &err), BT_E_CONFIG);
    assert_int_equal(bt_member_read_seed(BT_STR("h:0"), &m, &err), BT_E_CONFIG);
    assert_int_equal(bt_member_read_seed(BT_STR("a b@h:1"), &m, &err), BT_E_CONFIG);
    assert_non_null(strstr(err.msg, "seed \"a b@h:1\""));
}

static void test_snapshot(void **state)
{
    struct bt_member reg[2] = {0}, seeds[3] = {0};
    struct bt_members *a, *b;
    struct bt_err err;

    assert_int_equal(decode("decode-0", RECORD, &reg[0], &err), BT_OK);
    reg[1] = reg[0];
    snprintf(reg[1].name, sizeof(reg[1].name), "a-first");
    snprintf(reg[1].grpc_addr, sizeof(reg[1].grpc_addr), "10.0.0.8:1");
    /* one seed by the name of a registered node, one by its address, one of its own */
    assert_int_equal(bt_member_read_seed(BT_STR("decode-0@10.9.9.9:1"), &seeds[0], &err), BT_OK);
    assert_int_equal(bt_member_read_seed(BT_STR("10.0.0.8:1"), &seeds[1], &err), BT_OK);
    assert_int_equal(bt_member_read_seed(BT_STR("zz@10.0.0.9:1"), &seeds[2], &err), BT_OK);
    a = bt_members_make(reg, 2, seeds, 3);
    assert_non_null(a);
    assert_int_equal(a->n, 3);
    assert_string_equal(a->m[0].name, "a-first");
    assert_string_equal(a->m[1].name, "decode-0");
    assert_string_equal(a->m[1].grpc_addr, "10.0.0.7:50051");
    assert_string_equal(a->m[2].name, "zz");
    assert_ptr_equal(bt_members_find(a, BT_STR("zz")), &a->m[2]);
    assert_null(bt_members_find(a, BT_STR("z")));
    assert_null(bt_members_find(a, BT_STR("")));
    b = bt_members_make(reg, 2, seeds, 3);
    assert_true(bt_members_equal(a, b));
    b->m[1].weight_epoch = 7;
    assert_false(bt_members_equal(a, b));
    bt_members_unref(b);
    assert_ptr_equal(bt_members_ref(a), a);
    bt_members_unref(a);
    assert_int_equal(a->n, 3); /* still there */
    bt_members_unref(a);
    bt_members_unref(NULL);
}

static void test_find(void **state)
{
    enum { N = 700 };
    static struct bt_member reg[N], seeds[2];
    struct bt_members *ms;

    for (int i = 0; i < N; i++) { /* every other number, some names the beginning of others */
        reg[i].incarnation = (uint64_t)i + 1;
        snprintf(reg[i].name, sizeof(reg[i].name), "n%d", (i * 37 % N) * 2);
        snprintf(reg[i].grpc_addr, sizeof(reg[i].grpc_addr), "h:%d", i + 1);
    }
    snprintf(seeds[0].grpc_addr, sizeof(seeds[0].grpc_addr), "s:1"); /* no names: never found */
    snprintf(seeds[1].grpc_addr, sizeof(seeds[1].grpc_addr), "s:2");
    ms = bt_members_make(reg, N, seeds, 2);
    assert_non_null(ms);
    assert_int_equal(ms->n, N + 2);
    for (int i = 0; i < N; i++) {
        const struct bt_member *m = bt_members_find(ms, bt_str_of(reg[i].name));
        char absent[16];

        assert_non_null(m);
        assert_string_equal(m->name, reg[i].name);
        assert_int_equal(m->incarnation, i + 1);
        snprintf(absent, sizeof(absent), "n%d", i * 2 + 1);
        assert_null(bt_members_find(ms, bt_str_of(absent)));
    }
    assert_null(bt_members_find(ms, BT_STR("n")));
    assert_null(bt_members_find(ms, BT_STR("n0\0")));
    assert_null(bt_members_find(ms, BT_STR("zzz")));
    bt_members_unref(ms);
}

static void test_incarnation(void **state)
{
    struct timespec two_ms = {0, 2000000};
    uint64_t a = bt_incarnation_make(), b;

    nanosleep(&two_ms, NULL);
    b = bt_incarnation_make();
    assert_true(a != 0 && b > a);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_round_trip), cmocka_unit_test(test_refused),
        cmocka_unit_test(test_seed),       cmocka_unit_test(test_snapshot),
        cmocka_unit_test(test_find),       cmocka_unit_test(test_incarnation),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
