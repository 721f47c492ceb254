/* Handoff messages: round trips, fixed bytes, and refusal of everything that is slightly wrong. */
#include "tests/unit/cmocka.h"

#include "proto/wire/handoff.h"

#include <stdio.h>
#include <stdlib.h>

#define N_SAMPLES (WIRE_HANDOFF_REACHED + 1) /* one of each type, and another TICKET */

static struct wire_handoff sample_of(enum wire_handoff_type type, uint8_t version)
{
    struct wire_handoff m = {.type = type, .version = version};

    if (type == WIRE_HANDOFF_HELLO) {
        m.version_min = 1;
        m.version_max = 2;
        m.page_tokens = 16;
        m.n_layers = 30;
        m.n_kv_heads = 3;
        m.head_dim = 64;
        m.dtype = 1;
        m.pool_pages = 1000;
        m.method = WIRE_HANDOFF_NO_METHOD;
        m.incarnation = 0x1122334455667788;
        m.base = 0x7f0000001000;
        memset(m.compat, 0xab, sizeof(m.compat));
        m.name = BT_STR("p0");
        m.key = BT_STR("\1\2\3");
    }
    if (type >= WIRE_HANDOFF_TICKET) {
        m.id_hi = 0x0102030405060708;
        m.id_lo = 0x090a0b0c0d0e0f10;
        m.ticket = 77;
    }
    if (type == WIRE_HANDOFF_REFUSE || type == WIRE_HANDOFF_ABORT || type == WIRE_HANDOFF_NO) {
        m.rc = BT_E_CANCELLED;
        m.text = BT_STR("no more");
    }
    if (type == WIRE_HANDOFF_TICKET) {
        m.n_tokens = 1234;
        m.method = 2;
        m.n_pages = 78;
        m.key = BT_STR("key");
    }
    if (type == WIRE_HANDOFF_ANNOUNCE || type == WIRE_HANDOFF_DATA || type == WIRE_HANDOFF_PLACED) {
        m.layer = 3;
        m.first_page = 4;
        m.n_pieces = type == WIRE_HANDOFF_ANNOUNCE ? WIRE_HANDOFF_MAX_PIECES : 1;
        for (uint32_t i = 0; i < m.n_pieces; i++) {
            m.offset = type == WIRE_HANDOFF_DATA ? 61440 : 0;
            m.pieces[i] = (struct wire_piece){i, i * 7, 1 + i, 0x9e3779b97f4a7c15ull * i};
        }
    }
    if (type == WIRE_HANDOFF_COMMIT) {
        m.n_tokens = 1234;
        m.n_first = 2;
        m.first[0] = -5;
        m.first[1] = 99999;
    }
    if (type == WIRE_HANDOFF_RESEND) {
        m.layer = 1;
        m.first_page = 2;
        m.n_pages = 3;
        m.generation = 4;
    }
    if (type == WIRE_HANDOFF_REACHED) {
        m.reached = 0x1234567890;
    }
    return m;
}

/* i from 1 to N_SAMPLES: the types in their order in version 1, REACHED in its own, then TICKET in
 * version 2. */
static struct wire_handoff sample(int i)
{
    struct wire_handoff m;

    if (i <= WIRE_HANDOFF_REACHED) {
        return sample_of((enum wire_handoff_type)i, i == WIRE_HANDOFF_REACHED ? 3 : 1);
    }
    m = sample_of(WIRE_HANDOFF_TICKET, 2);
    m.n_have = 128;
    m.block_tokens = 64;
    m.origin_incarnation = 0x8877665544332211;
    memset(m.root, 0xcd, sizeof(m.root));
    m.origin_name = BT_STR("prefill-0");
    m.origin_address = BT_STR("10.0.0.1:5000");
    return m;
}

static void test_round_trips(void **state)
{
    for (int t = WIRE_HANDOFF_HELLO; t <= N_SAMPLES; t++) {
        struct wire_handoff m = sample(t), got;
        char a[WIRE_HANDOFF_MAX_HEAD], b[WIRE_HANDOFF_MAX_HEAD];
        size_t n = wire_handoff_pack(&m, a);

        assert_int_equal(wire_handoff_unpack((struct bt_str){a, n}, &got, NULL), BT_OK);
        assert_int_equal(got.type, m.type);
        assert_int_equal(got.id_lo, m.id_lo);
        assert_int_equal(got.ticket, m.ticket);
        assert_int_equal(got.n_tokens, m.n_tokens);
        assert_int_equal(got.n_have, m.n_have);
        assert_int_equal(got.reached, m.reached);
        assert_int_equal(got.block_tokens, m.block_tokens);
        assert_int_equal(got.origin_incarnation, m.origin_incarnation);
        assert_memory_equal(got.root, m.root, sizeof(m.root));
        assert_true(bt_str_eq(got.origin_name, m.origin_name));
        assert_true(bt_str_eq(got.origin_address, m.origin_address));
        assert_int_equal(got.rc, m.rc);
        assert_true(bt_str_eq(got.text, m.text));
        assert_true(bt_str_eq(got.name, m.name));
        assert_true(bt_str_eq(got.key, m.key));
        assert_memory_equal(got.pieces, m.pieces, sizeof(m.pieces));
        assert_memory_equal(got.first, m.first, sizeof(m.first));
        assert_int_equal(wire_handoff_pack(&got, b), n);
        assert_memory_equal(a, b, n);
        assert_true(strcmp(wire_handoff_type_name((int)m.type), "?") != 0);
    }
}

/* The bytes on the wire do not change under us. */
static void test_fixed_bytes(void **state)
{
    static const uint8_t want[] = {0x48, 0x4f, 1, 9, 48,   0,    0,    0,    8,    7,    6,   5,
                                   4,    3,    2, 1, 0x10, 0xf,  0xe,  0xd,  0xc,  0xb,  0xa, 9,
                                   77,   0,    0, 0, 0xd2, 4,    0,    0,    2,    0,    0,   0,
                                   0,    0,    0, 0, 0xfb, 0xff, 0xff, 0xff, 0x9f, 0x86, 1,   0};
    struct wire_handoff m = sample(WIRE_HANDOFF_COMMIT);
    char head[WIRE_HANDOFF_MAX_HEAD];

    assert_int_equal(wire_handoff_pack(&m, head), sizeof(want));
    assert_memory_equal(head, want, sizeof(want));
}

/* Every cut, one byte more, and every single byte changed: refused or a sound message. */
static void test_mutations(void **state)
{
    struct bt_err err;

    for (int t = WIRE_HANDOFF_HELLO; t <= N_SAMPLES; t++) {
        struct wire_handoff m = sample(t), got;
        char head[WIRE_HANDOFF_MAX_HEAD + 1] = {0}, again[WIRE_HANDOFF_MAX_HEAD];
        size_t n = wire_handoff_pack(&m, head);

        for (size_t cut = 0; cut < n; cut++) {
            char *copy = malloc(cut + 1); /* so that a sanitizer sees a read past the end */

            memcpy(copy, head, cut);
            assert_true(wire_handoff_unpack((struct bt_str){copy, cut}, &got, &err) < 0);
            free(copy);
        }
        assert_int_equal(wire_handoff_unpack((struct bt_str){head, n + 1}, &got, &err),
                         BT_E_PEER_PROTOCOL);
        for (size_t i = 0; i < n; i++) {
            char old = head[i];

            for (int bit = 0; bit < 8; bit++) {
                head[i] = (char)(old ^ 1 << bit);
                if (wire_handoff_unpack((struct bt_str){head, n}, &got, &err) == BT_OK) {
                    assert_int_equal(wire_handoff_pack(&got, again), n);
                    assert_memory_equal(again, head, n);
                }
            }
            head[i] = old;
        }
    }
}

static void test_versions_are_named(void **state)
{
    struct wire_handoff m = sample(WIRE_HANDOFF_ACK), got;
    char head[WIRE_HANDOFF_MAX_HEAD];
    struct bt_err err;
    size_t n;

    m.version = 9;
    n = wire_handoff_pack(&m, head);
    assert_int_equal(wire_handoff_unpack((struct bt_str){head, n}, &got, &err), BT_E_INCOMPATIBLE);
    assert_non_null(strstr(err.msg, "version 9"));
    assert_non_null(strstr(err.msg, "1 to 4"));
    assert_int_equal(wire_handoff_unpack(BT_STR("GET / HTTP/1.1\r\n"), &got, &err),
                     BT_E_PEER_PROTOCOL);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_round_trips),
        cmocka_unit_test(test_fixed_bytes),
        cmocka_unit_test(test_mutations),
        cmocka_unit_test(test_versions_are_named),
    };

    if (argc == 3 && strcmp(argv[1], "corpus") == 0) {
        /* Writes one sample of each type into a folder, for the fuzzer. */
        for (int t = WIRE_HANDOFF_HELLO; t <= N_SAMPLES; t++) {
            struct wire_handoff m = sample(t);
            char head[WIRE_HANDOFF_MAX_HEAD], path[512];
            size_t n = wire_handoff_pack(&m, head);
            FILE *f;

            snprintf(path, sizeof(path), "%s/%s%s", argv[2], wire_handoff_type_name((int)m.type),
                     m.version > 1 ? "_2" : "");
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
