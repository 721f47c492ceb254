/* Handoffs between two nodes in one process, over real UCX on loopback. */
#include "tests/unit/cmocka.h"

#include "kvstore/handoff/states.h"
#include "tests/unit/kvstore/handoff/node.h"

static uint64_t next_id = 1;

static void open_pair(struct node *p, struct node *d, struct node_opts op, struct node_opts od)
{
    struct bt_err err = {0};

    op.name = op.name ? op.name : "p0";
    od.name = od.name ? od.name : "d0";
    if (node_open(p, &op, &err) != BT_OK || node_open(d, &od, &err) != BT_OK) {
        fail_msg("%s", err.msg);
    }
}

/* One prompt across; `chunk` tokens at a time; the ticket comes before or after the computing. */
static void hand_over(struct node *p, struct node *d, uint32_t tokens, uint32_t chunk, bool early)
{
    struct prompt a, b;
    uint64_t id = next_id++;

    assert_true(prompt_pages(&a, p, id, tokens, KV_OWNER_SEQ));
    assert_true(prompt_pages(&b, d, id, tokens, KV_OWNER_TRANSFER));
    if (early) {
        assert_int_equal(prompt_recv(&b, p->name, p->incarnation, kv_handoff_address(p->h)), BT_OK);
    }
    assert_int_equal(prompt_send(&a), BT_OK);
    for (uint32_t t = 0; t < tokens; t += chunk) {
        prompt_compute(&a, t, t + BT_MIN(chunk, tokens - t));
    }
    prompt_finish(&a);
    if (!early) {
        assert_int_equal(prompt_recv(&b, p->name, p->incarnation, kv_handoff_address(p->h)), BT_OK);
    }
    assert_true(EVENTUALLY(LOAD(a.done) && LOAD(b.done)));
    assert_string_equal(b.msg, "");
    assert_int_equal(b.rc, BT_OK);
    assert_int_equal(a.rc, BT_OK);
    assert_int_equal(a.ticketed, 1);
    assert_int_equal(wrong_bytes(d, b.pages, b.seed, tokens), 0);
    assert_int_equal(b.first.n_tokens, 2);
    assert_int_equal(b.first.ids[0], (int32_t)a.seed);
    assert_int_equal(b.first.ids[1], 42);
    prompt_free(&a, KV_OWNER_SEQ);
    prompt_free(&b, KV_OWNER_TRANSFER);
}

static const uint32_t lengths[] = {1, 15, 16, 17, 31, 64, 333, 1000};

static void all_lengths(struct node_opts op, struct node_opts od)
{
    struct node p, d;

    open_pair(&p, &d, op, od);
    for (size_t i = 0; i < BT_ARRAY_LEN(lengths); i++) {
        hand_over(&p, &d, lengths[i], 100, i % 2 == 0);
        hand_over(&p, &d, lengths[i], 16, i % 2 == 1);
        hand_over(&p, &d, lengths[i], 7, true);
    }
    assert_true(EVENTUALLY(kv_handoff_stats(p.h).sends == 0));
    assert_true(kv_handoff_stats(d.h).bytes > 0);
    assert_int_equal(kv_handoff_stats(d.h).checksum_errors, 0);
    assert_int_equal(kv_handoff_stats(p.h).peers, 1);
    node_close(&d);
    node_close(&p);
}

static void test_pull_shm(void **state)
{
    all_lengths((struct node_opts){0}, (struct node_opts){0});
}

static void test_message_tcp(void **state)
{
    all_lengths((struct node_opts){.transports = "tcp"}, (struct node_opts){.transports = "tcp"});
}

static void test_message_shm(void **state)
{
    all_lengths((struct node_opts){.method = "message"}, (struct node_opts){0});
}

static void test_pull_tcp(void **state)
{
    all_lengths((struct node_opts){.transports = "tcp", .method = "pull"},
                (struct node_opts){.transports = "tcp", .method = "pull"});
}

static void test_put_shm(void **state)
{
    all_lengths((struct node_opts){.method = "put"}, (struct node_opts){0});
}

static void test_put_tcp(void **state)
{
    all_lengths((struct node_opts){.transports = "tcp"},
                (struct node_opts){.transports = "tcp", .method = "put"});
}

static void test_page_sizes_differ(void **state)
{
    for (int i = 0; i < 4; i++) {
        const char *m = i % 2 ? "message" : "pull";

        all_lengths((struct node_opts){.page_tokens = i / 2 ? 64 : 16, .method = m},
                    (struct node_opts){.page_tokens = i / 2 ? 16 : 64, .method = m});
    }
    all_lengths((struct node_opts){.page_tokens = 64, .dtype = KV_DTYPE_F32, .n_kv_heads = 3},
                (struct node_opts){.page_tokens = 8, .dtype = KV_DTYPE_F32, .n_kv_heads = 3});
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_pull_shm),          cmocka_unit_test(test_message_tcp),
        cmocka_unit_test(test_message_shm),       cmocka_unit_test(test_pull_tcp),
        cmocka_unit_test(test_put_shm),           cmocka_unit_test(test_put_tcp),
        cmocka_unit_test(test_page_sizes_differ),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
