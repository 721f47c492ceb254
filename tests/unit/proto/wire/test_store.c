/* The block server's messages: round trips, and refusal of everything that is slightly wrong. */
#include "tests/unit/cmocka.h"

#include "proto/wire/store.h"

#include <stdio.h>
#include <stdlib.h>

static struct wire_store sample(enum wire_store_type type)
{
    struct wire_store m = {.type = type, .version = type >= WIRE_STORE_LEND ? 2 : 1};

    if (type >= WIRE_STORE_GET) {
        m.req = 0x0102030405060708;
    }
    switch (type) {
    case WIRE_STORE_HELLO:
        m.version_min = m.version_max = 1;
        m.method = WIRE_STORE_NO_METHOD;
        m.incarnation = 0x1122334455667788;
        m.base = 0x7f0000001000;
        m.bytes = 1 << 30;
        m.name = BT_STR("store-0");
        m.key = BT_STR("\1\2\3");
        break;
    case WIRE_STORE_REFUSE:
        m.rc = BT_E_INCOMPATIBLE;
        m.text = BT_STR("no more");
        break;
    case WIRE_STORE_GET:
        m.n_items = 3;
        m.method = 1;
        m.n_layers = 30;
        m.block_tokens = 128;
        m.layer_bytes = 98304;
        memset(m.root, 0xab, sizeof(m.root));
        break;
    case WIRE_STORE_HAVE:
        m.item = 2;
        m.n_layers = 30;
        m.generation = 99;
        break;
    case WIRE_STORE_MISS:
        m.item = 2;
        m.rc = BT_E_NOT_FOUND;
        break;
    case WIRE_STORE_DATA:
        m.item = 1;
        m.layer = 29;
        m.offset = 61440;
        break;
    case WIRE_STORE_PUT:
        m.method = 2;
        m.offset = 1 << 20;
        break;
    case WIRE_STORE_GO:
        m.n_layers = 30;
        break;
    case WIRE_STORE_DONE:
        m.rc = BT_E_EXHAUSTED;
        break;
    case WIRE_STORE_LEND:
        m.file_dev = 25;
        m.file_ino = 0x1020304050;
        m.layer_stride = 1 << 24;
        m.page_stride = 1 << 16;
        m.row_bytes = 4096;
        m.n_pages = 8;
        m.sample = 0xfedcba9876543210;
        break;
    case WIRE_STORE_TAKEN:
    case WIRE_STORE_KEEP:
    case WIRE_STORE_DROP:
    case WIRE_STORE_PING:
    case WIRE_STORE_PONG:
    case WIRE_STORE_RELEASE:
    case WIRE_STORE_PLACED:
        break;
    }
    return m;
}

#define N_SAMPLES (WIRE_STORE_DROP + 2)

/* i from 1 to N_SAMPLES: each type as it began, then PUT and DATA of version 3. */
static struct wire_store nth_sample(int i)
{
    struct wire_store m;

    if (i <= WIRE_STORE_DROP) {
        return sample((enum wire_store_type)i);
    }
    m = sample(i == N_SAMPLES ? WIRE_STORE_DATA : WIRE_STORE_PUT);
    m.version = 3;
    if (m.type == WIRE_STORE_PUT) {
        m.method = 1;
        m.flags = WIRE_STORE_SUMS_LATER;
    } else {
        m.sum = 0x1122334455667788;
    }
    return m;
}

static void test_round_trips(void **state)
{
    for (int t = WIRE_STORE_HELLO; t <= N_SAMPLES; t++) {
        struct wire_store m = nth_sample(t), got;
        char a[WIRE_STORE_MAX_HEAD], b[WIRE_STORE_MAX_HEAD];
        size_t n = wire_store_pack(&m, a);

        assert_int_equal(wire_store_unpack((struct bt_str){a, n}, &got, NULL), BT_OK);
        assert_true(bt_str_eq(got.name, m.name) && bt_str_eq(got.key, m.key) &&
                    bt_str_eq(got.text, m.text));
        got.name = m.name;
        got.key = m.key;
        got.text = m.text;
        assert_memory_equal(&got, &m, sizeof(m));
        assert_int_equal(wire_store_pack(&got, b), n);
        assert_memory_equal(a, b, n);
        assert_true(strcmp(wire_store_type_name((int)m.type), "?") != 0);
    }
}

static void test_mutations(void **state)
{
    struct bt_err err;

    for (int t = WIRE_STORE_HELLO; t <= N_SAMPLES; t++) {
        struct wire_store m = nth_sample(t), got;
        char head[WIRE_STORE_MAX_HEAD + 1] = {0}, again[WIRE_STORE_MAX_HEAD];
        size_t n = wire_store_pack(&m, head);

        for (size_t cut = 0; cut < n; cut++) {
            char *copy = malloc(cut + 1);

            memcpy(copy, head, cut);
            assert_true(wire_store_unpack((struct bt_str){copy, cut}, &got, &err) < 0);
            free(copy);
        }
        assert_int_equal(wire_store_unpack((struct bt_str){head, n + 1}, &got, &err),
                         BT_E_PEER_PROTOCOL);
        for (size_t i = 0; i < n; i++) {
            char old = head[i];

            for (int bit = 0; bit < 8; bit++) {
                head[i] = (char)(old ^ 1 << bit);
                if (wire_store_unpack((struct bt_str){head, n}, &got, &err) == BT_OK) {
                    assert_int_equal(wire_store_pack(&got, again), n);
                    assert_memory_equal(again, head, n);
                }
            }
            head[i] = old;
        }
    }
}

static void test_items(void **state)
{
    const int32_t ids[] = {1, -2, 3, 70000};
    struct wire_store_item a = {.prefix = 77, .n_tokens = 4}, got;
    struct bt_buf buf = {0};
    struct bt_str rest;

    memset(a.key, 1, 16);
    memset(a.parent, 2, 16);
    for (int i = 0; i < 2; i++) {
        assert_int_equal(wire_store_add_item(&buf, &a, ids), BT_OK);
    }
    assert_int_equal(buf.n, 2 * (WIRE_STORE_ITEM_BYTES + 16));
    rest = bt_buf_str(&buf);
    for (int i = 0; i < 2; i++) {
        assert_true(wire_store_take_item(&rest, 4, &got));
        assert_memory_equal(got.key, a.key, 16);
        assert_memory_equal(got.parent, a.parent, 16);
        assert_int_equal(got.prefix, 77);
        for (int k = 0; k < 4; k++) {
            assert_int_equal(wire_store_i32(got.ids + 4 * k), ids[k]);
        }
    }
    assert_int_equal(rest.n, 0);
    for (size_t cut = 0; cut < WIRE_STORE_ITEM_BYTES + 16; cut++) {
        rest = (struct bt_str){buf.p, cut};
        assert_false(wire_store_take_item(&rest, 4, &got));
    }
    rest = bt_buf_str(&buf);
    assert_false(wire_store_take_item(&rest, 3, &got));
    bt_buf_fini(&buf);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_round_trips),
        cmocka_unit_test(test_mutations),
        cmocka_unit_test(test_items),
    };

    if (argc == 3 && strcmp(argv[1], "corpus") == 0) {
        /* Writes one sample of each type into a folder, for the fuzzer. */
        for (int t = WIRE_STORE_HELLO; t <= N_SAMPLES; t++) {
            struct wire_store m = nth_sample(t);
            char head[WIRE_STORE_MAX_HEAD], path[512];
            size_t n = wire_store_pack(&m, head);
            FILE *f;

            snprintf(path, sizeof(path), "%s/%s%s", argv[2], wire_store_type_name((int)m.type),
                     m.version > 2 ? "_3" : "");
            f = fopen(path, "wb");
            if (!f || fwrite(head, 1, n, f) != n) {
                return 1;
            }
            fclose(f);
        }
        return 0;
    }
    return cmocka_run_group_tests(tests, NULL, NULL);
}
