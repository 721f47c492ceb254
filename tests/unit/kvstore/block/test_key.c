/* Block keys: golden values made by tests/tools/block_keys.py, and that everything that must matter
 * does. */
#include "kvstore/block/key.h"

#include "tests/unit/cmocka.h"

#include <stdio.h>

static struct kv_hasher *hasher;
static uint8_t model[32], format[32], zero[32];
static int32_t ids[1000];

static struct kv_key_root_args all_set(void)
{
    return (struct kv_key_root_args){.secret = BT_STR("cluster secret"),
                                     .model_digest = model,
                                     .weight_epoch = 0x0123456789abcdefull,
                                     .adapter = BT_STR("lora-a"),
                                     .tenant_salt = BT_STR("tenant 7"),
                                     .kv_format_digest = format,
                                     .numerics = BT_STR("cpu/avx2/f32/1")};
}

static struct kv_key root_of(const struct kv_key_root_args *args)
{
    struct kv_key k = {0};
    struct bt_err err;

    assert_int_equal(kv_key_root(hasher, args, &k, &err), BT_OK);
    return k;
}

static void is(const struct kv_key *k, const char *hex)
{
    char text[33];

    for (int i = 0; i < 16; i++) {
        snprintf(text + 2 * i, 3, "%02x", k->b[i]);
    }
    assert_string_equal(text, hex);
}

static struct kv_key block(const struct kv_key *parent, const int32_t *p, size_t n)
{
    struct kv_key k;

    kv_key_block(hasher, parent, p, n, &k);
    return k;
}

static int setup(void **state)
{
    struct bt_err err;

    for (int i = 0; i < 32; i++) {
        model[i] = (uint8_t)i;
        format[i] = (uint8_t)(100 + i);
    }
    for (int i = 0; i < 1000; i++) {
        ids[i] = (i * 7919 + 13) % 50000;
    }
    return kv_hasher_create(&hasher, &err);
}

static int teardown(void **state)
{
    kv_hasher_destroy(hasher);
    kv_hasher_destroy(NULL);
    return 0;
}

static void test_golden(void **state)
{
    static const int32_t edge[] = {0, -1, INT32_MAX};
    struct kv_key_root_args none = {.model_digest = zero, .kv_format_digest = zero};
    struct kv_key_root_args all = all_set();
    struct kv_key root = root_of(&none), k, chain[7];

    is(&root, "7f840eaf4edeb683ffafdab47f0fb138");
    root = root_of(&all);
    is(&root, "b7502e7ba5a4778b4c428ecee6a74553");
    k = block(&root, &edge[0], 1);
    is(&k, "cfea0a441f50695567e3faea3dcce09f");
    k = block(&root, &edge[1], 1);
    is(&k, "dee866f0d70ee088429345954421188c");
    k = block(&root, &edge[2], 1);
    is(&k, "c0b9f510fe8125a4ad451fa205d79938");
    k = block(&root, ids, 256);
    is(&k, "b5976fe3c2bf21beb3db4754a4451dec");
    k = block(&root, ids, 257);
    is(&k, "af18a8c42639f2c2fbaa8d1a8551adf9");
    k = block(&root, ids, 1000);
    is(&k, "707ae05c1bfb490ddf36239ee5d9085a");
    assert_int_equal(kv_key_chain(hasher, &root, &(struct kv_key_tokens){ids, 1000, 128}, chain),
                     7);
    is(&chain[0], "a359717f589300236f2cd87a842d5a11");
    is(&chain[6], "2571915c1f79ecbb3f57ed66aec199ba");
    assert_true(kv_key_fingerprint(&chain[0]) == 0x230093587f7159a3ull);
}

/* A chain ends where the last full block ends; in place works. */
static void test_chain(void **state)
{
    struct kv_key_root_args all = all_set();
    struct kv_key root = root_of(&all), chain[8], k = root;

    assert_int_equal(kv_key_chain(hasher, &root, &(struct kv_key_tokens){ids, 127, 128}, chain), 0);
    assert_int_equal(kv_key_chain(hasher, &root, &(struct kv_key_tokens){ids, 128, 128}, chain), 1);
    assert_int_equal(kv_key_chain(hasher, &root, &(struct kv_key_tokens){ids, 500, 64}, chain), 7);
    for (int i = 0; i < 7; i++) {
        kv_key_block(hasher, &k, ids + 64 * i, 64, &k);
        assert_true(kv_key_eq(&k, &chain[i]));
    }
}

/* Same last block, same length, another first block: other keys all the way. */
static void test_PFX_01_equal_tail(void **state)
{
    struct kv_key_root_args all = all_set();
    struct kv_key root = root_of(&all), a[4], b[4];
    int32_t other[512];

    memcpy(other, ids, sizeof(other));
    other[5] ^= 1;
    kv_key_chain(hasher, &root, &(struct kv_key_tokens){ids, 512, 128}, a);
    kv_key_chain(hasher, &root, &(struct kv_key_tokens){other, 512, 128}, b);
    for (int i = 0; i < 4; i++) {
        assert_false(kv_key_eq(&a[i], &b[i]));
    }
}

/* New weights, rope settings, KV dtype, tenant, adapter, numerics, secret: no key is shared. */
static void test_PFX_04_every_root_field(void **state)
{
    struct kv_key_root_args v[9];
    struct kv_key k[9];
    uint8_t model2[32], format2[32];

    memcpy(model2, model, 32);
    memcpy(format2, format, 32);
    model2[31] ^= 0x80;
    format2[0] ^= 1;
    for (int i = 0; i < 9; i++) {
        v[i] = all_set();
    }
    v[1].secret = BT_STR("cluster secret2");
    v[2].model_digest = model2;
    v[3].weight_epoch++;
    v[4].adapter = (struct bt_str){NULL, 0};
    v[5].tenant_salt = BT_STR("tenant 8");
    v[6].kv_format_digest = format2;
    v[7].numerics = BT_STR("cpu/avx512/f32/1");
    /* the same bytes cut elsewhere */
    v[8].adapter = BT_STR("lora-atenant ");
    v[8].tenant_salt = BT_STR("7");
    for (int i = 0; i < 9; i++) {
        k[i] = root_of(&v[i]);
        for (int j = 0; j < i; j++) {
            assert_false(kv_key_eq(&k[i], &k[j]));
        }
    }
}

static void test_limits(void **state)
{
    static char big[KV_KEY_FIELD_MAX + 1];
    struct kv_key_root_args all = all_set();
    struct kv_key k = {{1}};
    struct bt_err err;

    all.tenant_salt = (struct bt_str){big, KV_KEY_FIELD_MAX};
    assert_int_equal(kv_key_root(hasher, &all, &k, &err), BT_OK);
    memset(&k, 1, sizeof(k));
    all.tenant_salt.n++;
    assert_int_equal(kv_key_root(hasher, &all, &k, &err), BT_E_TOO_LARGE);
    assert_int_equal(k.b[0], 1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_golden),
        cmocka_unit_test(test_chain),
        cmocka_unit_test(test_PFX_01_equal_tail),
        cmocka_unit_test(test_PFX_04_every_root_field),
        cmocka_unit_test(test_limits),
    };

    return cmocka_run_group_tests(tests, setup, teardown);
}
