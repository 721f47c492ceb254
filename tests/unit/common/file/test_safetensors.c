/* safetensors headers: what is right is read, one wrong file per fault (field report LOAD-03). */
#include "common/file/safetensors.h"

#include "tests/unit/cmocka.h"
#include "tests/unit/common/file/mk.h"

#define T(begin, end) "{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[" #begin "," #end "]}"

/* Header text and `data` zero bytes; the header length word is `len`, or right if 0. */
static void make(struct bt_buf *b, const char *head, size_t data, uint64_t len)
{
    uint64_t n = len ? len : strlen(head);

    *b = (struct bt_buf){0};
    mk_raw(b, &n, 8);
    mk_raw(b, head, strlen(head));
    while (data--) {
        mk_raw(b, "", 1);
    }
}

static int parse(const struct bt_buf *b, struct bt_st *ret, struct bt_err *err)
{
    return bt_st_parse((const uint8_t *)b->p, b->n, "f.safetensors", ret, err);
}

static void refused(const char *head, size_t data, uint64_t len, const char *word)
{
    struct bt_st st = {0};
    struct bt_err err = {0};
    struct bt_buf b;
    int rc;

    make(&b, head, data, len);
    rc = parse(&b, &st, &err);
    bt_buf_fini(&b);
    if (rc >= 0 || !strstr(err.msg, word)) {
        print_error("rc %d, message \"%s\" should have \"%s\"\n", rc, err.msg, word);
    }
    assert_true(rc == BT_E_FORMAT || rc == BT_E_TOO_LARGE);
    assert_non_null(strstr(err.msg, word));
    assert_null(st.tensors);
}

static void test_good(void **state)
{
    struct bt_err err = {0};
    struct bt_st st = {0};
    struct bt_buf b;

    make(&b,
         "{\"__metadata__\":{\"a\":\"b\"},\"y\":{\"dtype\":\"BF16\",\"shape\":[2,3],"
         "\"data_offsets\":[8,20]},\"x\":" T(0, 8) ",\"s\":{\"dtype\":\"I64\",\"shape\":[],"
                                                   "\"data_offsets\":[20,28]}}  ",
         28, 0);
    assert_int_equal(parse(&b, &st, &err), BT_OK);
    assert_int_equal(st.n, 3);
    assert_string_equal(st.tensors[0].name, "x");
    assert_int_equal(st.tensors[0].dtype, BT_DTYPE_F32);
    assert_string_equal(st.tensors[1].name, "y");
    assert_int_equal(st.tensors[1].shape[1], 3);
    assert_ptr_equal(st.tensors[1].data, st.tensors[0].data + 8);
    assert_int_equal(st.tensors[2].dtype, -1);
    assert_string_equal(st.tensors[2].dtype_name, "I64");
    bt_st_fini(&st);
    bt_buf_fini(&b);
}

static void test_LOAD_03_header(void **state)
{
    struct bt_err err = {0};
    struct bt_st st = {0};
    struct bt_buf b;

    refused("{\"x\":" T(0, 8) "}", 8, UINT64_MAX, "header of 18446744073709551615");
    refused("{\"x\":" T(0, 8) "}", 8, 1ull << 63, "header of 9223372036854775808");
    make(&b, "{}", 8, 0);
    refused("{}", 8, b.n + 1, "longer than the file");
    bt_buf_fini(&b);
    refused("{\"x\":" T(0, 8) "", 8, 0, "f.safetensors");
    refused("[]", 0, 0, "not a JSON object");
    assert_int_equal(bt_st_parse((const uint8_t *)"1234567", 7, "short", &st, &err), BT_E_FORMAT);

    /* Longer than any header of use. */
    b = (struct bt_buf){0};
    mk_raw(&b, (const uint64_t[]){BT_ST_MAX_HEADER + 1}, 8);
    assert_int_equal(bt_buf_reserve(&b, BT_ST_MAX_HEADER + 8), BT_OK);
    memset(b.p + 8, ' ', BT_ST_MAX_HEADER + 8);
    b.n += BT_ST_MAX_HEADER + 8;
    assert_int_equal(parse(&b, &st, &err), BT_E_TOO_LARGE);
    bt_buf_fini(&b);
}

static void test_LOAD_03_ranges(void **state)
{
    refused("{\"x\":" T(8, 0) "}", 8, 0, "tensor x");
    refused("{\"x\":" T(0, 8) ",\"y\":" T(4, 12) "}", 12, 0, "tensor y: its range overlaps");
    refused("{\"x\":" T(0, 8) ",\"y\":" T(0, 8) "}", 8, 0, "overlaps");
    refused("{\"x\":" T(0, 8) ",\"y\":" T(12, 20) "}", 20, 0, "tensor y: a gap");
    refused("{\"x\":" T(4, 12) "}", 12, 0, "tensor x: a gap");
    refused("{\"x\":" T(0, 12) "}", 12, 0, "tensor x: data_offsets do not match");
    refused("{\"x\":" T(0, 8) "}", 7, 0, "tensor x: its range ends behind");
    refused("{\"x\":" T(0, 8) "}", 9, 0, "1 bytes behind the last tensor");
    refused("{\"x\":" T(-8, 0) "}", 8, 0, "tensor x");
    refused("{\"x\":" T(0.5, 8.5) "}", 8, 0, "tensor x");
    refused("{\"x\":" T(0, 99999999999999999999) "}", 8, 0, "f.safetensors");
    refused("{\"x\":" T(9223372036854775800, 9223372036854775807) "}", 8, 0, "tensor x");
}

static void test_LOAD_03_entries(void **state)
{
    static const struct {
        const char *value, *word;
    } rows[] = {
        {"{\"dtype\":\"Q9\",\"shape\":[2],\"data_offsets\":[0,8]}", "\"Q9\""},
        {"{\"dtype\":3,\"shape\":[2],\"data_offsets\":[0,8]}", "unknown dtype"},
        {"{\"dtype\":\"F32\",\"shape\":[2,0],\"data_offsets\":[0,0]}", "shape"},
        {"{\"dtype\":\"F32\",\"shape\":[-2],\"data_offsets\":[0,8]}", "shape"},
        {"{\"dtype\":\"F32\",\"shape\":[4294967296,4294967296],\"data_offsets\":[0,0]}", "shape"},
        {"{\"dtype\":\"F32\",\"shape\":[4611686018427387904],\"data_offsets\":[0,0]}", "shape"},
        {"{\"dtype\":\"F32\",\"shape\":[1,1,1,1,1,1,1,1,2],\"data_offsets\":[0,8]}", "shape"},
        {"{\"dtype\":\"F32\",\"shape\":2,\"data_offsets\":[0,8]}", "shape"},
        {"{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0]}", "data_offsets"},
        {"{\"dtype\":\"F32\",\"shape\":[2]}", "exactly"},
        {"{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8],\"more\":1}", "exactly"},
        {"[1]", "exactly"},
    };
    char head[256];

    for (size_t i = 0; i < BT_ARRAY_LEN(rows); i++) {
        snprintf(head, sizeof(head), "{\"some.weight\":%s}", rows[i].value);
        refused(head, 8, 0, rows[i].word);
        refused(head, 8, 0, "some.weight");
    }
    refused("{\"x\":" T(0, 8) ",\"x\":" T(0, 8) "}", 8, 0, "duplicate");
}

static void test_LOAD_03_deep(void **state)
{
    struct bt_buf head = {0};

    assert_int_equal(bt_buf_add(&head, "{\"x\":", 5), BT_OK);
    for (int i = 0; i < 100000; i++) {
        assert_int_equal(bt_buf_add(&head, "[", 1), BT_OK);
    }
    assert_int_equal(bt_buf_add(&head, "", 1), BT_OK);
    refused(head.p, 8, 0, "nested");
    bt_buf_fini(&head);
}

/* As many values as fit: an answer, and not much memory (the process has 2 GiB). */
static void test_LOAD_03_wide(void **state)
{
    struct bt_buf b = {0};
    struct bt_err err = {0};
    struct bt_st st = {0};
    uint64_t n = BT_ST_MAX_HEADER - 16;

    mk_raw(&b, &n, 8);
    mk_raw(&b, "{\"x\":[1", 7);
    while (b.n < n + 8 - 2) {
        mk_raw(&b, ",1", 2);
    }
    mk_raw(&b, "]}", b.n == n + 8 - 2 ? 2 : 1);
    assert_int_equal(parse(&b, &st, &err), BT_E_TOO_LARGE);
    bt_buf_fini(&b);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_good),           cmocka_unit_test(test_LOAD_03_header),
        cmocka_unit_test(test_LOAD_03_ranges), cmocka_unit_test(test_LOAD_03_entries),
        cmocka_unit_test(test_LOAD_03_deep),   cmocka_unit_test(test_LOAD_03_wide),
    };

    mk_limit_memory();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
