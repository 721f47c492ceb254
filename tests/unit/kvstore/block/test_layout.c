/* KV geometry: derived sizes, refused ranges, what the digest covers. */
#include "tests/unit/cmocka.h"

#include "kvstore/block/layout.h"

#include <stdio.h>

static struct kv_layout good(void)
{
    return (struct kv_layout){.n_layers = 30,
                              .n_kv_heads = 3,
                              .head_dim = 64,
                              .page_tokens = 16,
                              .dtype = KV_DTYPE_F16,
                              .n_pages = 100};
}

static void test_sizes(void **state)
{
    struct kv_layout l = good();
    struct bt_err err = {0};

    assert_int_equal(kv_layout_init(&l, &err), BT_OK);
    assert_int_equal(l.page_stride, 2 * 3 * 16 * 64 * 2);
    assert_int_equal(l.layer_stride, 100 * l.page_stride);
    assert_int_equal(l.bytes, 30 * l.layer_stride);
    assert_int_equal(kv_layout_offset(&l, 2, 7), 2 * l.layer_stride + 7 * l.page_stride);
    assert_int_equal(kv_layout_pages_for(&l, 0), 0);
    assert_int_equal(kv_layout_pages_for(&l, 16), 1);
    assert_int_equal(kv_layout_pages_for(&l, 17), 2);
    l.dtype = KV_DTYPE_F32;
    assert_int_equal(kv_layout_init(&l, &err), BT_OK);
    assert_int_equal(l.page_stride, 2 * 3 * 16 * 64 * 4);
}

#define REFUSED(field, value, name)                                                                \
    do {                                                                                           \
        struct kv_layout l_ = good();                                                              \
        struct bt_err err_ = {0};                                                                  \
                                                                                                   \
        l_.field = (value);                                                                        \
        assert_int_equal(kv_layout_init(&l_, &err_), BT_E_INVALID);                                \
        assert_non_null(strstr(err_.msg, name));                                                   \
        assert_int_equal(l_.bytes, 0);                                                             \
    } while (0)

static void test_refused(void **state)
{
    REFUSED(n_layers, 0, "n_layers");
    REFUSED(n_layers, -1, "n_layers");
    REFUSED(n_kv_heads, 0, "n_kv_heads");
    REFUSED(head_dim, 1 << 20, "head_dim");
    REFUSED(page_tokens, 4, "page_tokens");
    REFUSED(page_tokens, 512, "page_tokens");
    REFUSED(page_tokens, 24, "page_tokens");
    REFUSED(dtype, (enum kv_dtype)7, "dtype");
    REFUSED(n_pages, 0, "n_pages");
    REFUSED(n_pages, UINT32_MAX, "n_pages");
}

static void test_overflow(void **state)
{
    struct kv_layout l = {.n_layers = 4096,
                          .n_kv_heads = 4096,
                          .head_dim = 4096,
                          .page_tokens = 256,
                          .dtype = KV_DTYPE_F32,
                          .n_pages = UINT32_MAX - 1};
    struct bt_err err = {0};

    assert_int_equal(kv_layout_init(&l, &err), BT_E_INVALID);
    assert_non_null(strstr(err.msg, "overflow"));
}

static bool same(const struct kv_layout *a, const struct kv_layout *b)
{
    uint8_t x[32], y[32];

    kv_layout_digest(a, x);
    kv_layout_digest(b, y);
    return memcmp(x, y, sizeof(x)) == 0;
}

static void test_digest(void **state)
{
    /* SHA-256 of the bytes that layout.c spells out, for good(); fixed for ever. */
    static const char want[] = "3cf07290103a9aac708f8de591d64ca91daea257562cb1c162db7d347e9a4878";
    struct kv_layout a = good(), b = good();
    uint8_t d[32];
    char hex[65];

    kv_layout_digest(&a, d);
    for (int i = 0; i < 32; i++) {
        snprintf(hex + 2 * i, 3, "%02x", d[i]);
    }
    assert_string_equal(hex, want);
    b.page_tokens = 64; /* may differ between nodes */
    b.n_pages = 5;
    assert_true(same(&a, &b));
    b = good();
    b.n_layers = 31;
    assert_false(same(&a, &b));
    b = good();
    b.n_kv_heads = 64; /* swapped with head_dim below */
    b.head_dim = 3;
    assert_false(same(&a, &b));
    b = good();
    b.dtype = KV_DTYPE_F32;
    assert_false(same(&a, &b));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_sizes),
        cmocka_unit_test(test_refused),
        cmocka_unit_test(test_overflow),
        cmocka_unit_test(test_digest),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
