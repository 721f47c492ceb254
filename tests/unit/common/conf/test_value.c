/* Strict readers: what they take, what they refuse, and where the limits lie. */
#include "common/conf/value.h"

#include "tests/unit/cmocka.h"

static int read_int(const char *s, int64_t *v)
{
    return bt_read_int(bt_str_of(s), INT64_MIN, INT64_MAX, v);
}

static void test_int(void **state)
{
    int64_t v = 7;

    assert_int_equal(read_int("0", &v), BT_OK);
    assert_int_equal(v, 0);
    assert_int_equal(read_int("-9223372036854775808", &v), BT_OK);
    assert_true(v == INT64_MIN);
    assert_int_equal(read_int("9223372036854775807", &v), BT_OK);
    assert_true(v == INT64_MAX);
    v = 7;
    assert_int_equal(read_int("9223372036854775808", &v), BT_E_INVALID);
    assert_int_equal(read_int("-9223372036854775809", &v), BT_E_INVALID);
    assert_int_equal(read_int("99999999999999999999999", &v), BT_E_INVALID);
    assert_int_equal(read_int("", &v), BT_E_FORMAT);
    assert_int_equal(read_int("-", &v), BT_E_FORMAT);
    assert_int_equal(read_int("+1", &v), BT_E_FORMAT);
    assert_int_equal(read_int(" 1", &v), BT_E_FORMAT);
    assert_int_equal(read_int("1 ", &v), BT_E_FORMAT);
    assert_int_equal(read_int("0x10", &v), BT_E_FORMAT);
    assert_int_equal(read_int("1e3", &v), BT_E_FORMAT);
    assert_int_equal(read_int("--1", &v), BT_E_FORMAT);
    assert_int_equal(bt_read_int(BT_STR("11"), 1, 10, &v), BT_E_INVALID);
    assert_int_equal(bt_read_int(BT_STR("0"), 1, 10, &v), BT_E_INVALID);
    assert_int_equal(v, 7);
}

static void test_bytes(void **state)
{
    uint64_t v = 7;

    assert_int_equal(bt_read_bytes(BT_STR("512"), &v), BT_OK);
    assert_int_equal(v, 512);
    assert_int_equal(bt_read_bytes(BT_STR("3K"), &v), BT_OK);
    assert_int_equal(v, 3072);
    assert_int_equal(bt_read_bytes(BT_STR("16383T"), &v), BT_OK);
    assert_true(v == 16383ull << 40);
    v = 7;
    assert_int_equal(bt_read_bytes(BT_STR("16777216T"), &v), BT_E_INVALID);
    assert_int_equal(bt_read_bytes(BT_STR("K"), &v), BT_E_FORMAT);
    assert_int_equal(bt_read_bytes(BT_STR("1k"), &v), BT_E_FORMAT);
    assert_int_equal(bt_read_bytes(BT_STR("1KB"), &v), BT_E_FORMAT);
    assert_int_equal(bt_read_bytes(BT_STR("-1K"), &v), BT_E_FORMAT);
    assert_int_equal(bt_read_bytes(BT_STR("1.5G"), &v), BT_E_FORMAT);
    assert_int_equal(v, 7);
}

static void test_duration(void **state)
{
    uint64_t v = 7;

    assert_int_equal(bt_read_duration(BT_STR("250ms"), &v), BT_OK);
    assert_int_equal(v, 250000000);
    assert_int_equal(bt_read_duration(BT_STR("3s"), &v), BT_OK);
    assert_int_equal(v, 3000000000);
    assert_int_equal(bt_read_duration(BT_STR("0"), &v), BT_OK);
    assert_int_equal(v, 0);
    v = 7;
    assert_int_equal(bt_read_duration(BT_STR("5"), &v), BT_E_FORMAT);
    assert_int_equal(bt_read_duration(BT_STR("s"), &v), BT_E_FORMAT);
    assert_int_equal(bt_read_duration(BT_STR("ms"), &v), BT_E_FORMAT);
    assert_int_equal(bt_read_duration(BT_STR("5 s"), &v), BT_E_FORMAT);
    assert_int_equal(bt_read_duration(BT_STR("5m"), &v), BT_E_FORMAT);
    assert_int_equal(bt_read_duration(BT_STR("18446744073709551615s"), &v), BT_E_INVALID);
    assert_int_equal(v, 7);
}

static void test_bool_hex(void **state)
{
    uint8_t b[3] = {0};
    bool v = false;

    assert_int_equal(bt_read_bool(BT_STR("on"), &v), BT_OK);
    assert_true(v);
    assert_int_equal(bt_read_bool(BT_STR("no"), &v), BT_OK);
    assert_false(v);
    assert_int_equal(bt_read_bool(BT_STR("True"), &v), BT_E_FORMAT);
    assert_int_equal(bt_read_bool(BT_STR(""), &v), BT_E_FORMAT);
    assert_int_equal(bt_read_hex(BT_STR("00fFa5"), b, 3), BT_OK);
    assert_int_equal(b[0] << 16 | b[1] << 8 | b[2], 0x00ffa5);
    assert_int_equal(bt_read_hex(BT_STR("00ff"), b, 3), BT_E_FORMAT);
    assert_int_equal(bt_read_hex(BT_STR("00ffg5"), b, 3), BT_E_FORMAT);
}

static int addr(const char *s, struct bt_addr *a)
{
    return bt_addr_read(bt_str_of(s), a);
}

static void test_addr(void **state)
{
    static const char *const bad[] = {
        "",       "host",        "host:",   ":80",        "host:65536",    "host:-1",
        "h st:1", "[::1]",       "[]:80",   "::1:80",     "unix:relative", "unix:",
        "a/b:80", "host:000080", "[::1:80", "host:80:90", "http://h:80",   "h@x:1",
    };
    struct bt_addr a;

    assert_int_equal(addr("127.0.0.1:50051", &a), BT_OK);
    assert_true(bt_str_eq(a.host, BT_STR("127.0.0.1")) && a.port == 50051 && !a.is_unix);
    assert_true(bt_addr_is_loopback(&a));
    assert_int_equal(addr("[::1]:0", &a), BT_OK);
    assert_true(bt_str_eq(a.host, BT_STR("::1")) && a.port == 0 && bt_addr_is_loopback(&a));
    assert_int_equal(addr("unix:/tmp/x.sock", &a), BT_OK);
    assert_true(a.is_unix && bt_str_eq(a.host, BT_STR("/tmp/x.sock")) && bt_addr_is_loopback(&a));
    assert_int_equal(addr("decode-0.decode.svc:7000", &a), BT_OK);
    assert_false(bt_addr_is_loopback(&a));
    assert_int_equal(addr("0.0.0.0:1", &a), BT_OK);
    assert_false(bt_addr_is_loopback(&a));
    /* a name that only begins like a loopback address */
    assert_int_equal(addr("127.0.0.1.example.com:1", &a), BT_OK);
    assert_false(bt_addr_is_loopback(&a));
    assert_int_equal(addr("localhost:1", &a), BT_OK);
    assert_true(bt_addr_is_loopback(&a));
    for (size_t i = 0; i < BT_ARRAY_LEN(bad); i++) {
        if (addr(bad[i], &a) != BT_E_FORMAT) {
            fail_msg("accepted: %s", bad[i]);
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_int),      cmocka_unit_test(test_bytes),
        cmocka_unit_test(test_duration), cmocka_unit_test(test_bool_hex),
        cmocka_unit_test(test_addr),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
