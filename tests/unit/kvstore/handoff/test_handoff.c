/* Handoffs between two nodes in one process, over real UCX on loopback. */
#include "tests/unit/cmocka.h"

#include "common/obs/log.h"
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

/* One prompt, of which d holds the first `have` tokens, across; `chunk` tokens at a time; the
 * ticket comes before or after the computing. */
static void hand_over_behind(
    struct node *p, struct node *d, uint32_t tokens, uint32_t have, uint32_t chunk, bool early)
{
    struct prompt a, b;
    uint64_t id = next_id++;

    assert_true(prompt_pages(&a, p, id, tokens, KV_OWNER_SEQ));
    assert_true(prompt_pages(&b, d, id, tokens, KV_OWNER_TRANSFER));
    b.have = have;
    for (int l = 0; l < d->l->n_layers; l++) {
        fill_tokens(d, b.pages, b.seed + 1, l, 0, have); /* not what p has: it shows if touched */
    }
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
    /* What went wrong at D is why P would wait: told first. */
    assert_true(EVENTUALLY(LOAD(b.done)));
    assert_string_equal(b.msg, "");
    assert_int_equal(b.rc, BT_OK);
    assert_true(EVENTUALLY(LOAD(a.done)));
    assert_int_equal(a.rc, BT_OK);
    assert_int_equal(a.ticketed, 1);
    assert_int_equal(wrong_bytes(d, b.pages, b.seed + 1, have), 0);
    for (int l = 0; l < d->l->n_layers; l++) {
        fill_tokens(d, b.pages, b.seed, l, 0, have);
    }
    assert_int_equal(wrong_bytes(d, b.pages, b.seed, tokens), 0);
    assert_int_equal(b.first.n_tokens, 2);
    assert_int_equal(b.first.ids[0], (int32_t)a.seed);
    assert_int_equal(b.first.ids[1], 42);
    prompt_free(&a, KV_OWNER_SEQ);
    prompt_free(&b, KV_OWNER_TRANSFER);
}

static void hand_over(struct node *p, struct node *d, uint32_t tokens, uint32_t chunk, bool early)
{
    hand_over_behind(p, d, tokens, 0, chunk, early);
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

/* ---- what D holds already ---- */

static const struct {
    uint32_t tokens, have;
} behind[] = {{320, 64}, {320, 256}, {333, 128}, {333, 320}, {320, 320}, {64, 64}, {65, 64}};

/* P sends what lies behind, in pieces of its own pages. */
static uint64_t bytes_behind(const struct node *p, uint32_t tokens, uint32_t have)
{
    uint32_t n = kv_layout_pages_for(p->l, tokens) - have / (uint32_t)p->l->page_tokens;

    return (uint64_t)n * p->l->page_stride * (uint64_t)p->l->n_layers;
}

static void all_behind(struct node_opts op, struct node_opts od)
{
    bool old = op.wire_version == 1 || od.wire_version == 1;
    struct node p, d;

    open_pair(&p, &d, op, od);
    for (size_t i = 0; i < BT_ARRAY_LEN(behind); i++) {
        uint64_t before = kv_handoff_stats(d.h).bytes;
        uint32_t have = old ? 0 : behind[i].have;

        hand_over_behind(&p, &d, behind[i].tokens, behind[i].have, 100, i % 2 == 0);
        if (!old) {
            assert_int_equal(kv_handoff_stats(d.h).bytes - before,
                             bytes_behind(&p, behind[i].tokens, have));
        }
        hand_over_behind(&p, &d, behind[i].tokens, behind[i].have, 16, i % 2 == 1);
        hand_over(&p, &d, behind[i].tokens, 32, true);
    }
    assert_int_equal(kv_handoff_stats(d.h).checksum_errors, 0);
    node_close(&d);
    node_close(&p);
}

static void test_only_what_lies_behind_is_sent(void **state)
{
    static const char *const methods[] = {"pull", "message", "put"};

    for (int i = 0; i < 3; i++) {
        all_behind((struct node_opts){.method = methods[i]},
                   (struct node_opts){.method = methods[i]});
        all_behind((struct node_opts){.method = methods[i], .transports = "tcp"},
                   (struct node_opts){.transports = "tcp"});
    }
}

static void test_behind_with_other_page_sizes(void **state)
{
    for (int i = 0; i < 4; i++) {
        const char *m = i % 2 ? "message" : "pull";

        all_behind((struct node_opts){.page_tokens = i / 2 ? 64 : 16, .method = m},
                   (struct node_opts){.page_tokens = i / 2 ? 16 : 64, .method = m});
    }
    /* What D has ends within a page of P. */
    all_behind((struct node_opts){.page_tokens = 128}, (struct node_opts){.page_tokens = 32});
}

/* A node of the version before sends all of it; what D has stays as it is. */
static void test_behind_with_a_peer_of_version_1(void **state)
{
    static const char *const methods[] = {"pull", "message", "put"};

    for (int i = 0; i < 2; i++) {
        all_behind((struct node_opts){.wire_version = 1, .method = methods[i]},
                   (struct node_opts){0});
        all_behind((struct node_opts){.method = methods[i]}, (struct node_opts){.wire_version = 1});
        all_behind((struct node_opts){.wire_version = 1, .method = methods[i], .page_tokens = 64},
                   (struct node_opts){0});
    }
    all_lengths((struct node_opts){.wire_version = 1, .method = "put"},
                (struct node_opts){.wire_version = 1});
    all_lengths((struct node_opts){.wire_version = 1, .method = "put"}, (struct node_opts){0});
}

/* Longer than P's sums may be ahead of D: it goes on as D tells how far it is, and without that
 * where one of the two is older. In messages sums come behind their bytes, or before for an older
 * D. */
static void test_long_prompts_between_versions(void **state)
{
    static const uint32_t versions[][2] = {{4, 4}, {3, 4}, {4, 3}, {2, 4}, {4, 2}, {1, 4}};

    for (size_t i = 0; i < 2 * BT_ARRAY_LEN(versions); i++) {
        struct node_opts op = {.n_layers = 6, .n_kv_heads = 8, .head_dim = 128}, od = op;
        struct node p, d;

        op.method = od.method = i % 2 ? "message" : "pull";
        op.wire_version = versions[i / 2][0];
        od.wire_version = versions[i / 2][1];
        open_pair(&p, &d, op, od);
        hand_over(&p, &d, 1000, 1000, false); /* 24 MiB */
        hand_over(&p, &d, 1000, 128, true);
        assert_int_equal(kv_handoff_stats(d.h).checksum_errors, 0);
        node_close(&d);
        node_close(&p);
    }
}

static void test_pages_that_do_not_fit(void **state)
{
    static const struct {
        uint32_t tokens, have, pages;
    } bad[] = {{100, 8, 7}, {100, 112, 0}, {100, 16, 7}, {100, 16, 5}, {96, 96, 1}, {0, 0, 0}};
    uint32_t pages[8] = {0};
    struct kv_recv *r;
    struct node p, d;

    open_pair(&p, &d, (struct node_opts){0}, (struct node_opts){0});
    for (size_t i = 0; i < BT_ARRAY_LEN(bad); i++) {
        const struct kv_recv_cfg cfg = {.id = {1, i},
                                        .peer_name = "p0",
                                        .peer_incarnation = 1,
                                        .peer_address = kv_handoff_address(p.h),
                                        .n_tokens = bad[i].tokens,
                                        .n_have = bad[i].have,
                                        .pages = pages,
                                        .n_pages = bad[i].pages};

        assert_int_equal(kv_recv_create(d.h, &cfg, &r, NULL), BT_E_INVALID);
    }
    node_close(&d);
    node_close(&p);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_pull_shm),
        cmocka_unit_test(test_message_tcp),
        cmocka_unit_test(test_message_shm),
        cmocka_unit_test(test_pull_tcp),
        cmocka_unit_test(test_put_shm),
        cmocka_unit_test(test_put_tcp),
        cmocka_unit_test(test_page_sizes_differ),
        cmocka_unit_test(test_only_what_lies_behind_is_sent),
        cmocka_unit_test(test_behind_with_other_page_sizes),
        cmocka_unit_test(test_behind_with_a_peer_of_version_1),
        cmocka_unit_test(test_long_prompts_between_versions),
        cmocka_unit_test(test_pages_that_do_not_fit),
    };

    if (argc > 1) {
        cmocka_set_test_filter(argv[1]);
        bt_log_threshold = node_env("BATON_TEST_NET_DEBUG", "")[0] ? BT_LOG_DEBUG : BT_LOG_WARN;
    }
    return cmocka_run_group_tests(tests, NULL, NULL);
}
