/* Refusals, aborts, corruption, leases and restarts, within one process. */
#include "tests/unit/cmocka.h"

#include "kvstore/handoff/states.h"
#include "proto/wire/handoff.h"
#include "tests/unit/kvstore/handoff/node.h"

#include <dirent.h>

static uint64_t next_id = 1;

static void open_node(struct node *n, struct node_opts o)
{
    struct bt_err err = {0};

    if (node_open(n, &o, &err) != BT_OK) {
        fail_msg("%s", err.msg);
    }
}

static void start_recv(struct prompt *b, struct node *p)
{
    assert_int_equal(prompt_recv(b, p->name, p->incarnation, kv_handoff_address(p->h)), BT_OK);
}

static void
open_prompts(struct prompt *a, struct node *p, struct prompt *b, struct node *d, uint32_t n)
{
    uint64_t id = next_id++;

    assert_true(prompt_pages(a, p, id, n, KV_OWNER_SEQ));
    assert_true(prompt_pages(b, d, id, n, KV_OWNER_TRANSFER));
}

static void free_prompts(struct prompt *a, struct prompt *b)
{
    prompt_free(a, KV_OWNER_SEQ);
    prompt_free(b, KV_OWNER_TRANSFER);
}

/* A whole prompt from p to d that must arrive. */
static void must_work(struct node *p, struct node *d)
{
    struct prompt a, b;

    open_prompts(&a, p, &b, d, 100);
    assert_int_equal(prompt_send(&a), BT_OK);
    start_recv(&b, p);
    prompt_compute(&a, 0, 100);
    prompt_finish(&a);
    assert_true(EVENTUALLY(LOAD(a.done) && LOAD(b.done)));
    assert_string_equal(b.msg, "");
    assert_int_equal(a.rc, BT_OK);
    assert_int_equal(wrong_bytes(d, b.pages, b.seed, 100), 0);
    free_prompts(&a, &b);
}

/* ---- states ---- */

static void test_states_allow_their_edges_only(void **state)
{
    static const uint8_t send_edges[KV_SEND_N_STATES][KV_SEND_N_STATES] = {
        [KV_SEND_WAITING] = {[KV_SEND_TICKETED] = 1, [KV_SEND_DONE] = 1},
        [KV_SEND_TICKETED] =
            {[KV_SEND_COMMITTED] = 1, [KV_SEND_RETURNING] = 1, [KV_SEND_ABORTING] = 1},
        [KV_SEND_COMMITTED] = {[KV_SEND_DONE] = 1, [KV_SEND_RETURNING] = 1, [KV_SEND_ABORTING] = 1},
        [KV_SEND_RETURNING] = {[KV_SEND_WAITING] = 1, [KV_SEND_ABORTING] = 1, [KV_SEND_DONE] = 1},
        [KV_SEND_ABORTING] = {[KV_SEND_DONE] = 1},
    };
    static const uint8_t recv_edges[KV_RECV_N_STATES][KV_RECV_N_STATES] = {
        [KV_RECV_CONNECTING] = {[KV_RECV_ADVERTISED] = 1, [KV_RECV_ABORTING] = 1},
        [KV_RECV_ADVERTISED] =
            {[KV_RECV_FILLING] = 1, [KV_RECV_CONNECTING] = 1, [KV_RECV_ABORTING] = 1},
        [KV_RECV_FILLING] = {[KV_RECV_DONE] = 1, [KV_RECV_ABORTING] = 1},
        [KV_RECV_ABORTING] = {[KV_RECV_DONE] = 1},
    };

    for (int i = 0; i < KV_SEND_N_STATES; i++) {
        for (int k = 0; k < KV_SEND_N_STATES; k++) {
            assert_int_equal(kv_send_edge_ok((enum kv_send_state)i, (enum kv_send_state)k),
                             send_edges[i][k]);
        }
    }
    for (int i = 0; i < KV_RECV_N_STATES; i++) {
        for (int k = 0; k < KV_RECV_N_STATES; k++) {
            assert_int_equal(kv_recv_edge_ok((enum kv_recv_state)i, (enum kv_recv_state)k),
                             recv_edges[i][k]);
        }
    }
    assert_string_equal(kv_send_state_name(KV_SEND_RETURNING), "RETURNING");
    assert_string_equal(kv_recv_state_name(KV_RECV_FILLING), "FILLING");
}

/* ---- refusals ---- */

static void refused(struct node *p, struct node_opts od, const char *one, const char *two)
{
    struct node d;
    struct prompt b;

    od.name = "dx";
    open_node(&d, od);
    assert_true(prompt_pages(&b, &d, next_id++, 50, KV_OWNER_TRANSFER));
    start_recv(&b, p);
    assert_true(EVENTUALLY(LOAD(b.done)));
    assert_int_equal(b.rc, BT_E_INCOMPATIBLE);
    if (!strstr(b.msg, one) || !strstr(b.msg, two)) {
        fail_msg("\"%s\" names not both \"%s\" and \"%s\"", b.msg, one, two);
    }
    prompt_free(&b, KV_OWNER_TRANSFER);
    node_close(&d);
}

static void test_KVX_07_incompatible_pairs_are_refused_with_both_values(void **state)
{
    struct node p, d;

    open_node(&p, (struct node_opts){.name = "p0", .compat = 0xaa, .method = "pull"});
    open_node(&d, (struct node_opts){.name = "d0", .compat = 0xaa});
    refused(&p, (struct node_opts){.compat = 0xbb}, "aa00000000000000", "bb00000000000000");
    refused(&p, (struct node_opts){.compat = 0xaa, .dtype = KV_DTYPE_F32}, "p0 has 0", "dx has 1");
    refused(&p, (struct node_opts){.compat = 0xaa, .head_dim = 64}, "p0 has 32", "dx has 64");
    refused(&p, (struct node_opts){.compat = 0xaa, .n_layers = 3}, "p0 has 4", "dx has 3");
    refused(&p, (struct node_opts){.compat = 0xaa, .n_kv_heads = 1}, "p0 has 2", "dx has 1");
    refused(&p, (struct node_opts){.compat = 0xaa, .method = "message"}, "pull", "message");
    must_work(&p, &d);
    node_close(&d);
    node_close(&p);
}

/* Heads are not mapped from one layout to another: pairs with as many heads move every byte, all
 * others are refused when they meet, whatever the transport. */
static void test_KVX_06_heads_pair_only_with_as_many(void **state)
{
    static const int heads[] = {1, 2, 4, 8};
    static const char *const transports[] = {NULL, "tcp"};
    char one[20], two[20];

    for (int t = 0; t < 2; t++) {
        for (size_t i = 0; i < BT_ARRAY_LEN(heads); i++) {
            struct node p;

            open_node(&p, (struct node_opts){
                              .name = "p0", .n_kv_heads = heads[i], .transports = transports[t]});
            for (size_t k = 0; k < BT_ARRAY_LEN(heads); k++) {
                struct node_opts od = {
                    .name = "d0", .n_kv_heads = heads[k], .transports = transports[t]};
                struct node d;

                if (i != k) {
                    snprintf(one, sizeof(one), "p0 has %d", heads[i]);
                    snprintf(two, sizeof(two), "dx has %d", heads[k]);
                    refused(&p, od, one, two);
                    continue;
                }
                open_node(&d, od);
                must_work(&p, &d);
                /* 4 layers, K and V, heads, 32 numbers of 2 bytes, 100 tokens */
                assert_true(kv_handoff_stats(d.h).bytes >=
                            UINT64_C(4) * 2 * (uint64_t)heads[i] * 32 * 2 * 100);
                node_close(&d);
            }
            node_close(&p);
        }
    }
}

static void test_wrong_partner(void **state)
{
    struct node p, d;
    struct prompt a, b;

    open_node(&p,
              (struct node_opts){.name = "p0", .incarnation = 7, .lease_ns = 300 * BT_NS_PER_MS});
    open_node(&d, (struct node_opts){.name = "d0"});

    /* Another life of the node, another node. */
    assert_true(prompt_pages(&b, &d, next_id++, 20, KV_OWNER_TRANSFER));
    assert_int_equal(prompt_recv(&b, "p0", 6, kv_handoff_address(p.h)), BT_OK);
    assert_true(EVENTUALLY(LOAD(b.done)));
    assert_int_equal(b.rc, BT_E_PEER_STALE);
    assert_non_null(strstr(b.msg, "incarnation 7"));
    assert_non_null(strstr(b.msg, "for 6"));
    prompt_free(&b, KV_OWNER_TRANSFER);
    assert_true(prompt_pages(&b, &d, next_id++, 20, KV_OWNER_TRANSFER));
    assert_int_equal(prompt_recv(&b, "p9", 7, kv_handoff_address(p.h)), BT_OK);
    assert_true(EVENTUALLY(LOAD(b.done)));
    assert_int_equal(b.rc, BT_E_PEER_STALE);
    prompt_free(&b, KV_OWNER_TRANSFER);

    /* An id that P never hears of. */
    assert_true(prompt_pages(&b, &d, next_id++, 20, KV_OWNER_TRANSFER));
    start_recv(&b, &p);
    assert_true(EVENTUALLY(LOAD(b.done)));
    assert_int_equal(b.rc, BT_E_NOT_FOUND);
    prompt_free(&b, KV_OWNER_TRANSFER);

    /* Another length: both numbers. */
    assert_true(prompt_pages(&a, &p, next_id, 21, KV_OWNER_SEQ));
    assert_true(prompt_pages(&b, &d, next_id++, 20, KV_OWNER_TRANSFER));
    assert_int_equal(prompt_send(&a), BT_OK);
    start_recv(&b, &p);
    assert_true(EVENTUALLY(LOAD(b.done)));
    assert_int_equal(b.rc, BT_E_INVALID);
    assert_non_null(strstr(b.msg, "20"));
    assert_non_null(strstr(b.msg, "21"));
    prompt_free(&b, KV_OWNER_TRANSFER);

    /* Nobody comes: the lease ends. */
    prompt_compute(&a, 0, 21);
    prompt_finish(&a);
    assert_true(EVENTUALLY(LOAD(a.done)));
    assert_int_equal(a.rc, BT_E_DEADLINE);
    prompt_free(&a, KV_OWNER_SEQ);
    must_work(&p, &d);
    node_close(&d);
    node_close(&p);
}

static void test_nobody_there(void **state)
{
    struct node d;
    struct prompt b;

    open_node(&d, (struct node_opts){.name = "d0"});
    assert_true(prompt_pages(&b, &d, next_id++, 20, KV_OWNER_TRANSFER));
    assert_int_equal(prompt_recv(&b, "p0", 1, "127.0.0.1:1"), BT_OK);
    assert_true(EVENTUALLY(LOAD(b.done)));
    assert_int_equal(b.rc, BT_E_PEER_LOST);
    prompt_free(&b, KV_OWNER_TRANSFER);
    assert_true(prompt_pages(&b, &d, next_id++, 20, KV_OWNER_TRANSFER));
    assert_int_equal(prompt_recv(&b, "p0", 1, "not an address"), BT_OK);
    assert_true(EVENTUALLY(LOAD(b.done)));
    assert_int_equal(b.rc, BT_E_INVALID);
    prompt_free(&b, KV_OWNER_TRANSFER);
    node_close(&d);
}

static void test_limits_of_create(void **state)
{
    struct node p;
    struct prompt a, again, more;

    open_node(&p, (struct node_opts){.name = "p0", .max_open = 1});
    assert_true(prompt_pages(&a, &p, 1, 20, KV_OWNER_SEQ));
    assert_true(prompt_pages(&again, &p, 1, 20, KV_OWNER_SEQ));
    assert_true(prompt_pages(&more, &p, 2, 20, KV_OWNER_SEQ));
    assert_int_equal(prompt_send(&a), BT_OK);
    assert_int_equal(prompt_send(&again), BT_E_EXISTS);
    assert_int_equal(prompt_send(&more), BT_E_EXHAUSTED);
    kv_send_abort(a.send, BT_E_CANCELLED);
    kv_send_abort(a.send, BT_E_INVALID);
    assert_true(EVENTUALLY(LOAD(a.done)));
    assert_int_equal(a.rc, BT_E_CANCELLED);
    assert_int_equal(again.done + more.done, 0);
    /* Late calls on an object that is done but not released do nothing. */
    kv_send_progress(a.send, 0, 20, 3);
    prompt_finish(&a);
    kv_send_abort(a.send, BT_E_INVALID);
    assert_false(kv_send_rewind(a.send));
    assert_int_equal(prompt_send(&more), BT_OK);
    kv_send_abort(more.send, BT_E_CANCELLED);
    assert_true(EVENTUALLY(LOAD(more.done)));
    assert_int_equal(a.done, 1);
    prompt_free(&a, KV_OWNER_SEQ);
    prompt_free(&again, KV_OWNER_SEQ);
    prompt_free(&more, KV_OWNER_SEQ);
    node_close(&p);
}

/* ---- the course of a handoff ---- */

/* Pages dropped and computed anew before anybody asked; then another page table. */
static void test_rewind(void **state)
{
    struct node p, d;
    struct prompt a, b;
    uint32_t other[16];

    open_node(&p, (struct node_opts){.name = "p0"});
    open_node(&d, (struct node_opts){.name = "d0"});
    open_prompts(&a, &p, &b, &d, 90);
    assert_int_equal(prompt_send(&a), BT_OK);
    prompt_compute(&a, 0, 90);
    assert_true(kv_send_rewind(a.send));
    assert_int_equal(kv_pool_take(p.pool, a.n_pages, KV_OWNER_SEQ, KV_PAGE_NONE, other), BT_OK);
    kv_pool_give(p.pool, a.pages, a.n_pages, KV_OWNER_SEQ);
    memcpy(a.pages, other, a.n_pages * sizeof(*other));
    kv_send_set_pages(a.send, 0, a.pages, a.n_pages);
    start_recv(&b, &p);
    assert_true(EVENTUALLY(LOAD(a.ticketed)));
    assert_false(kv_send_rewind(a.send));
    prompt_compute(&a, 0, 40);
    prompt_compute(&a, 40, 90);
    prompt_finish(&a);
    assert_true(EVENTUALLY(LOAD(a.done) && LOAD(b.done)));
    assert_int_equal(b.rc, BT_OK);
    assert_int_equal(wrong_bytes(&d, b.pages, b.seed, 90), 0);
    free_prompts(&a, &b);
    node_close(&d);
    node_close(&p);
}

/* D withdraws in the middle; the prompt waits and another D gets it. */
static void another_takes_over(const char *method)
{
    struct node p, d, e;
    struct prompt a, b, c;

    open_node(&p, (struct node_opts){.name = "p0", .method = method});
    open_node(&d, (struct node_opts){.name = "d0"});
    open_node(&e, (struct node_opts){.name = "d1"});
    open_prompts(&a, &p, &b, &d, 200);
    assert_true(prompt_pages(&c, &e, next_id - 1, 200, KV_OWNER_TRANSFER));
    assert_int_equal(prompt_send(&a), BT_OK);
    start_recv(&b, &p);
    prompt_compute(&a, 0, 100);
    assert_true(EVENTUALLY(kv_handoff_stats(d.h).bytes > 0));
    kv_recv_abort(b.recv, BT_E_CANCELLED);
    assert_true(EVENTUALLY(LOAD(b.done)));
    assert_int_equal(b.rc, BT_E_CANCELLED);
    start_recv(&c, &p);
    prompt_compute(&a, 100, 200);
    prompt_finish(&a);
    assert_true(EVENTUALLY(LOAD(a.done) && LOAD(c.done)));
    assert_int_equal(a.rc, BT_OK);
    assert_int_equal(c.rc, BT_OK);
    assert_int_equal(a.ticketed, 2);
    assert_int_equal(wrong_bytes(&e, c.pages, c.seed, 200), 0);
    free_prompts(&a, &b);
    prompt_free(&c, KV_OWNER_TRANSFER);
    node_close(&e);
    node_close(&d);
    node_close(&p);
}

static void test_another_takes_over(void **state)
{
    another_takes_over("pull");
    another_takes_over("message");
    another_takes_over("put");
}

/* P gives up in the middle: D hears why, and at once. */
static void test_RTR_04_abort_reaches_the_other_side(void **state)
{
    struct node p, d;
    struct prompt a, b;

    open_node(&p, (struct node_opts){.name = "p0", .lease_ns = 60 * BT_NS_PER_S});
    open_node(&d, (struct node_opts){.name = "d0", .silence_ns = 60 * BT_NS_PER_S});
    open_prompts(&a, &p, &b, &d, 200);
    assert_int_equal(prompt_send(&a), BT_OK);
    start_recv(&b, &p);
    prompt_compute(&a, 0, 100);
    assert_true(EVENTUALLY(LOAD(a.ticketed)));
    kv_send_abort(a.send, BT_E_DEADLINE);
    assert_true(EVENTUALLY(LOAD(a.done) && LOAD(b.done)));
    assert_int_equal(a.rc, BT_E_DEADLINE);
    assert_int_equal(b.rc, BT_E_DEADLINE);
    free_prompts(&a, &b);

    /* The ticket comes after the end: refused at once, not after the lease. */
    open_prompts(&a, &p, &b, &d, 50);
    assert_int_equal(prompt_send(&a), BT_OK);
    kv_send_abort(a.send, BT_E_CANCELLED);
    assert_true(EVENTUALLY(LOAD(a.done)));
    start_recv(&b, &p);
    assert_true(EVENTUALLY(LOAD(b.done)));
    assert_int_equal(b.rc, BT_E_CANCELLED);
    free_prompts(&a, &b);
    must_work(&p, &d);
    node_close(&d);
    node_close(&p);
}

static void corrupt(const char *method, int page_tokens, int pieces)
{
    struct node p, d;
    struct prompt a, b;
    bool lost = pieces > 1;

    /* Where it is lost, P waits for its lease to end; else nothing may end it. */
    open_node(&p, (struct node_opts){.name = "p0",
                                     .method = method,
                                     .lease_ns = lost ? BT_NS_PER_S : 60 * BT_NS_PER_S});
    open_node(&d, (struct node_opts){.name = "d0", .page_tokens = page_tokens, .n_layers = 4});
    open_prompts(&a, &p, &b, &d, 30);
    assert_int_equal(prompt_send(&a), BT_OK);
    prompt_compute(&a, 0, 30);
    prompt_finish(&a);
    __atomic_store_n(&kv_handoff_corrupt_next, pieces, __ATOMIC_RELAXED);
    start_recv(&b, &p);
    assert_true(EVENTUALLY(LOAD(a.done) && LOAD(b.done)));
    __atomic_store_n(&kv_handoff_corrupt_next, 0, __ATOMIC_RELAXED);
    assert_int_equal(b.rc, lost ? BT_E_CORRUPT : BT_OK);
    assert_int_equal(a.rc, lost ? BT_E_DEADLINE : BT_OK);
    assert_true(kv_handoff_stats(d.h).checksum_errors >= 1);
    if (!lost) {
        assert_int_equal(wrong_bytes(&d, b.pages, b.seed, 30), 0);
    }
    free_prompts(&a, &b);
    must_work(&p, &d);
    node_close(&d);
    node_close(&p);
}

static void test_corrupted_piece(void **state)
{
    static const char *const methods[] = {"pull", "message"};

    for (int i = 0; i < 4; i++) {
        corrupt(methods[i % 2], i / 2 ? 64 : 16, 1);
        corrupt(methods[i % 2], i / 2 ? 64 : 16, 1000);
    }
    corrupt("put", 16, 1000);
}

/* KVX-04: a pool for two prompts, aborted anywhere by anybody, reused at once. */
static void random_aborts(const char *method, int rounds, int d_page_tokens)
{
    enum { TOKENS = 128 };
    struct node p, d;
    unsigned seed = (unsigned)(method[1] + d_page_tokens);
    int good = 0;

    open_node(
        &p,
        (struct node_opts){
            .name = "p0", .method = method, .n_pages = 16, .n_layers = 3, .lease_ns = BT_NS_PER_S});
    open_node(&d, (struct node_opts){.name = "d0",
                                     .n_layers = 3,
                                     .page_tokens = d_page_tokens,
                                     .n_pages = 256u / (unsigned)d_page_tokens});
    for (int i = 0; i < rounds; i++) {
        struct prompt a, b;
        int who = rand_r(&seed) % 4, when = rand_r(&seed) % 6;

        open_prompts(&a, &p, &b, &d, TOKENS);
        assert_int_equal(prompt_send(&a), BT_OK);
        start_recv(&b, &p);
        for (int k = 0; k < 6; k++) {
            if (k == when && who == 0) {
                kv_send_abort(a.send, BT_E_CANCELLED);
            } else if (k == when && who == 1) {
                kv_recv_abort(b.recv, BT_E_CANCELLED);
            }
            for (int spin = rand_r(&seed) % 3; spin > 0; spin--) {
                sched_yield();
            }
            if (k < 4) {
                prompt_compute(&a, (uint32_t)k * 32, (uint32_t)k * 32 + 32);
            } else if (k == 4) {
                prompt_finish(&a);
            }
        }
        assert_true(EVENTUALLY(LOAD(b.done)));
        if (b.rc == BT_OK) {
            good++;
            assert_int_equal(wrong_bytes(&d, b.pages, b.seed, TOKENS), 0);
        } else if (who == 1) {
            kv_send_abort(a.send, BT_E_CANCELLED); /* it would wait for another ticket */
        }
        assert_true(EVENTUALLY(LOAD(a.done)));
        assert_int_equal(a.done, 1);
        assert_int_equal(b.done, 1);
        if (b.rc != BT_OK && who > 1) {
            fail_msg("round %d: %s", i, b.msg);
        }
        free_prompts(&a, &b);
    }
    assert_true(good >= rounds / 3);
    assert_true(EVENTUALLY(kv_handoff_stats(p.h).sends == 0 && kv_handoff_stats(d.h).recvs == 0));
    assert_int_equal(kv_handoff_stats(p.h).aborting + kv_handoff_stats(d.h).aborting, 0);
    node_close(&d);
    node_close(&p);
}

static void test_KVX_04_random_aborts_never_mix_prompts(void **state)
{
    random_aborts("pull", 300, 16);
    random_aborts("message", 300, 16);
    random_aborts("put", 200, 16);
    random_aborts("pull", 100, 64);
    random_aborts("message", 100, 8);
}

/* ---- many at once ---- */

enum { MANY = 24 };

static void
start_many(struct prompt *a, struct prompt *b, struct node *p, struct node *d, unsigned *seed)
{
    for (int i = 0; i < MANY; i++) {
        open_prompts(&a[i], p, &b[i], d, 1 + (uint32_t)rand_r(seed) % 128);
        if (i % 2) {
            start_recv(&b[i], p);
        }
        assert_int_equal(prompt_send(&a[i]), BT_OK);
        if (i % 2 == 0) {
            start_recv(&b[i], p);
        }
    }
    for (int i = 0; i < MANY; i++) {
        prompt_compute(&a[i], 0, a[i].tokens / 2);
    }
}

static void many_at_once(const char *method, size_t max_inflight)
{
    struct prompt a[MANY], b[MANY];
    struct node p, d;
    unsigned seed = 5;

    open_node(&p, (struct node_opts){.name = "p0", .method = method, .max_inflight = max_inflight});
    open_node(&d, (struct node_opts){.name = "d0", .max_inflight = max_inflight});
    for (int round = 0; round < 10; round++) {
        start_many(a, b, &p, &d, &seed);
        for (int i = MANY - 1; i >= 0; i--) {
            prompt_compute(&a[i], a[i].tokens / 2, a[i].tokens);
            prompt_finish(&a[i]);
        }
        for (int i = 0; i < MANY; i++) {
            assert_true(EVENTUALLY(LOAD(a[i].done) && LOAD(b[i].done)));
            assert_string_equal(b[i].msg, "");
            assert_int_equal(wrong_bytes(&d, b[i].pages, b[i].seed, b[i].tokens), 0);
            free_prompts(&a[i], &b[i]);
        }
    }
    node_close(&d);
    node_close(&p);
}

static void test_many_at_once(void **state)
{
    many_at_once("pull", 0);
    many_at_once("message", 10000);
    many_at_once("put", 10000);
}

/* Everything that is under way is dropped, five times; then all pages are back and it works. */
static void cancelled_load(const char *method)
{
    struct prompt a[MANY], b[MANY];
    struct node p, d;
    unsigned seed = 6;

    open_node(&p, (struct node_opts){.name = "p0", .method = method});
    open_node(&d, (struct node_opts){.name = "d0"});
    for (int round = 0; round < 5; round++) {
        start_many(a, b, &p, &d, &seed);
        for (int i = 0; i < MANY; i++) {
            if (rand_r(&seed) % 2) {
                kv_recv_abort(b[i].recv, BT_E_CANCELLED);
                kv_send_abort(a[i].send, BT_E_CANCELLED);
            } else {
                kv_send_abort(a[i].send, BT_E_CANCELLED);
                kv_recv_abort(b[i].recv, BT_E_CANCELLED);
            }
        }
        for (int i = 0; i < MANY; i++) {
            assert_true(EVENTUALLY(LOAD(a[i].done) && LOAD(b[i].done)));
            assert_int_equal(a[i].rc, BT_E_CANCELLED);
            assert_int_equal(b[i].rc, BT_E_CANCELLED);
            free_prompts(&a[i], &b[i]);
        }
        assert_int_equal(kv_pool_stats(p.pool).n_free, p.l->n_pages);
        assert_int_equal(kv_pool_stats(d.pool).n_free, d.l->n_pages);
    }
    must_work(&p, &d);
    node_close(&d);
    node_close(&p);
}

static void test_KVX_02_cancelled_load_leaves_nothing(void **state)
{
    cancelled_load("pull");
    cancelled_load("message");
    cancelled_load("put");
}

/* ---- restarts ---- */

static int count_fds(void)
{
    DIR *dir = opendir("/proc/self/fd");
    int n = 0;

    while (dir && readdir(dir)) {
        n++;
    }
    closedir(dir);
    return n;
}

static void restarts(const char *transports)
{
    struct node p, d;
    char address[64];
    int fds = 0;

    open_node(&d, (struct node_opts){.name = "d0", .transports = transports});
    open_node(&p, (struct node_opts){.name = "p0", .transports = transports});
    snprintf(address, sizeof(address), "%s", kv_handoff_address(p.h));
    node_close(&p);
    for (uint64_t i = 2; i < 102; i++) {
        open_node(&p,
                  (struct node_opts){
                      .name = "p0", .incarnation = i, .listen = address, .transports = transports});
        must_work(&p, &d); /* the first request of the new life */
        assert_int_equal(kv_handoff_stats(d.h).peers, 1);
        node_close(&p);
        if (i == 20) {
            fds = count_fds();
        }
    }
    assert_true(EVENTUALLY(kv_handoff_stats(d.h).peers == 0));
    assert_true(count_fds() <= fds + 4);
    node_close(&d);
}

static void test_KVX_09_200_restarts_at_one_address(void **state)
{
    restarts("tcp");
    restarts("auto");
}

/* ---- strangers that speak the protocol ---- */

struct stranger {
    struct bt_net *net;
    struct bt_net_peer *peer;
    const char *address;
    struct wire_handoff m;
    struct bt_str data, raw;
    int greeted, closed, rc;
    int commits;
};

static void
stranger_message(void *arg, struct bt_net_peer *peer, struct bt_str h, struct bt_str data)
{
    struct stranger *s = arg;
    struct wire_handoff m;

    if (wire_handoff_unpack(h, &m, NULL) == BT_OK && m.type == WIRE_HANDOFF_COMMIT) {
        INC(s->commits);
    }
    INC(s->greeted);
}

static void stranger_closed(void *arg, struct bt_net_peer *peer, int rc)
{
    struct stranger *s = arg;

    INC(s->closed);
}

static void stranger_connect(void *arg)
{
    struct stranger *s = arg;

    s->rc = bt_net_connect(s->net, s->address, &s->peer, NULL);
}

static void stranger_send(void *arg)
{
    struct stranger *s = arg;
    char head[WIRE_HANDOFF_MAX_HEAD];
    struct bt_str h = s->raw.n ? s->raw : (struct bt_str){head, wire_handoff_pack(&s->m, head)};

    s->rc = bt_net_send(s->peer, h, s->data, NULL, NULL);
}

static void stranger_send_twice(void *arg)
{
    stranger_send(arg);
    stranger_send(arg);
}

static const struct wire_handoff hello = {
    .type = WIRE_HANDOFF_HELLO,
    .version = 1,
    .version_min = 1,
    .version_max = 1,
    .page_tokens = 16,
    .n_layers = 4,
    .n_kv_heads = 2,
    .head_dim = 32,
    .pool_pages = 256,
    .method = WIRE_HANDOFF_NO_METHOD,
    .incarnation = 1,
    .name = {"evil", 4},
};

/* Says hello if it is given, a ticket likewise, then the message; the connection must be closed by
 * the other side. */
static void attack_with(struct node *victim,
                        const struct wire_handoff *greeting,
                        const struct wire_handoff *ticket,
                        struct wire_handoff m,
                        struct bt_str raw)
{
    const struct bt_net_cfg cfg = {.listen = "127.0.0.1:0", .transports = "tcp"};
    struct stranger s = {.address = kv_handoff_address(victim->h)};
    const struct bt_net_handlers on = {&s, NULL, stranger_message, stranger_closed};

    assert_int_equal(bt_net_create(&cfg, &on, &s.net, NULL), BT_OK);
    side_on_net(s.net, stranger_connect, &s);
    assert_int_equal(s.rc, BT_OK);
    assert_true(EVENTUALLY(LOAD(s.greeted)));
    if (greeting) {
        s.m = *greeting;
        side_on_net(s.net, stranger_send, &s);
        assert_int_equal(s.rc, BT_OK);
    }
    if (ticket) {
        s.m = *ticket;
        side_on_net(s.net, stranger_send, &s);
        assert_int_equal(s.rc, BT_OK);
    }
    s.m = m;
    s.raw = raw;
    side_on_net(s.net, stranger_send, &s);
    if (!EVENTUALLY(LOAD(s.closed))) {
        fail_msg("%s was not punished", wire_handoff_type_name((int)m.type));
    }
    bt_net_destroy(s.net);
}

static void attack(struct node *victim, bool greet, struct wire_handoff m, struct bt_str raw)
{
    attack_with(victim, greet ? &hello : NULL, NULL, m, raw);
}

/* Who reads P's pages says more than there was to read, or says it where nothing is read. */
static void test_hostile_words_on_what_is_reached(void **state)
{
    static const enum bt_net_method methods[] = {BT_NET_METHOD_PULL, BT_NET_METHOD_MESSAGE};
    struct wire_handoff new_hello = hello;
    struct node p;

    new_hello.version_max = 3;
    open_node(&p, (struct node_opts){.name = "p0", .transports = "tcp"});
    for (size_t i = 0; i < BT_ARRAY_LEN(methods); i++) {
        struct wire_handoff ticket = {.type = WIRE_HANDOFF_TICKET, .version = 3, .ticket = 1};
        struct wire_handoff m = {.type = WIRE_HANDOFF_REACHED, .version = 3, .ticket = 1};
        struct prompt a;

        assert_true(prompt_pages(&a, &p, 70 + i, 64, KV_OWNER_SEQ));
        assert_int_equal(prompt_send(&a), BT_OK);
        m.id_hi = ticket.id_hi = a.id.hi;
        m.id_lo = ticket.id_lo = a.id.lo;
        ticket.n_tokens = 64;
        ticket.method = (uint8_t)methods[i];
        m.reached = methods[i] == BT_NET_METHOD_PULL;
        attack_with(&p, &new_hello, &ticket, m, (struct bt_str){0});
        assert_int_equal(LOAD(a.ticketed), 1);
        kv_send_abort(a.send, BT_E_CANCELLED);
        assert_true(EVENTUALLY(LOAD(a.done)));
        prompt_free(&a, KV_OWNER_SEQ);
    }
    node_close(&p);
}

/* P asks again for an ACK that is late, and gets two: both may come in before it has let go of the
 * prompt. */
static void test_an_ack_said_twice_breaks_nothing(void **state)
{
    const struct bt_net_cfg cfg = {.listen = "127.0.0.1:0", .transports = "tcp"};
    struct stranger s = {0};
    const struct bt_net_handlers on = {&s, NULL, stranger_message, stranger_closed};
    struct node p;

    open_node(&p, (struct node_opts){.name = "p0", .transports = "tcp"});
    s.address = kv_handoff_address(p.h);
    assert_int_equal(bt_net_create(&cfg, &on, &s.net, NULL), BT_OK);
    side_on_net(s.net, stranger_connect, &s);
    assert_int_equal(s.rc, BT_OK);
    s.m = hello;
    side_on_net(s.net, stranger_send, &s);
    for (int i = 0; i < 20; i++) {
        struct prompt a;

        assert_true(prompt_pages(&a, &p, 90 + (uint64_t)i, 64, KV_OWNER_SEQ));
        assert_int_equal(prompt_send(&a), BT_OK);
        prompt_compute(&a, 0, 64);
        prompt_finish(&a);
        s.m = (struct wire_handoff){.type = WIRE_HANDOFF_TICKET,
                                    .version = 1,
                                    .id_hi = a.id.hi,
                                    .id_lo = a.id.lo,
                                    .ticket = 1 + (uint32_t)i,
                                    .n_tokens = 64,
                                    .method = BT_NET_METHOD_PULL};
        side_on_net(s.net, stranger_send, &s);
        assert_true(EVENTUALLY(LOAD(s.commits) > i));
        s.m.type = WIRE_HANDOFF_ACK;
        side_on_net(s.net, stranger_send_twice, &s);
        assert_true(EVENTUALLY(LOAD(a.done)));
        assert_int_equal(a.rc, BT_OK);
        prompt_free(&a, KV_OWNER_SEQ);
    }
    assert_int_equal(LOAD(s.closed), 0);
    bt_net_destroy(s.net);
    node_close(&p);
}

static void test_hostile_messages_close_their_peer_alone(void **state)
{
    const struct bt_str none = {0};
    struct wire_handoff m = {.version = 1, .id_hi = 0x1234567, .id_lo = 1, .ticket = 1};
    struct wire_handoff bad_hello = hello;
    struct node p, d;
    struct prompt a, b;

    open_node(&p, (struct node_opts){.name = "p0", .transports = "tcp"});
    open_node(&d, (struct node_opts){.name = "d0", .transports = "tcp"});
    open_prompts(&a, &p, &b, &d, 200);
    assert_int_equal(prompt_send(&a), BT_OK);
    start_recv(&b, &p);
    prompt_compute(&a, 0, 64);

    attack(&p, false, m, BT_STR("garbage"));
    m.type = WIRE_HANDOFF_TICKET;
    m.n_tokens = 5;
    attack(&p, false, m, none); /* before HELLO */
    attack(&p, true, hello, none);
    m.method = BT_NET_METHOD_PUT;
    m.n_pages = 3;
    attack(&p, true, m, none); /* without the pages */
    m.type = WIRE_HANDOFF_COMMIT;
    attack(&p, true, m, none); /* wrong direction */
    m.type = WIRE_HANDOFF_ANNOUNCE;
    m.n_pieces = 1;
    m.pieces[0].n_pages = 1;
    attack(&p, true, m, none);
    bad_hello.version_min = bad_hello.version_max = 9;
    attack(&p, false, bad_hello, none);
    bad_hello = hello;
    bad_hello.base = UINT64_MAX - 5;
    attack(&p, false, bad_hello, none);

    prompt_compute(&a, 64, 200);
    prompt_finish(&a);
    assert_true(EVENTUALLY(LOAD(a.done) && LOAD(b.done)));
    assert_int_equal(b.rc, BT_OK);
    assert_int_equal(wrong_bytes(&d, b.pages, b.seed, 200), 0);
    free_prompts(&a, &b);
    node_close(&d);
    node_close(&p);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_states_allow_their_edges_only),
        cmocka_unit_test(test_KVX_07_incompatible_pairs_are_refused_with_both_values),
        cmocka_unit_test(test_KVX_06_heads_pair_only_with_as_many),
        cmocka_unit_test(test_wrong_partner),
        cmocka_unit_test(test_nobody_there),
        cmocka_unit_test(test_limits_of_create),
        cmocka_unit_test(test_rewind),
        cmocka_unit_test(test_another_takes_over),
        cmocka_unit_test(test_RTR_04_abort_reaches_the_other_side),
        cmocka_unit_test(test_corrupted_piece),
        cmocka_unit_test(test_KVX_04_random_aborts_never_mix_prompts),
        cmocka_unit_test(test_many_at_once),
        cmocka_unit_test(test_KVX_02_cancelled_load_leaves_nothing),
        cmocka_unit_test(test_KVX_09_200_restarts_at_one_address),
        cmocka_unit_test(test_hostile_messages_close_their_peer_alone),
        cmocka_unit_test(test_hostile_words_on_what_is_reached),
        cmocka_unit_test(test_an_ack_said_twice_breaks_nothing),
    };

    if (argc > 1) {
        cmocka_set_test_filter(argv[1]);
    }
    return cmocka_run_group_tests(tests, NULL, NULL);
}
