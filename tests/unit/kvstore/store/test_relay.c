/* The store path in one process: a prefill node, a relay, a decode node, over real UCX on loopback.
 */
#include "tests/unit/cmocka.h"

#include "kvstore/handoff/states.h"
#include "kvstore/store/relay.h"
#include "tests/unit/kvstore/handoff/node.h"

#define S_INCARNATION 77

static uint64_t next_id = 1;

struct trio {
    struct node p, d;
    struct kv_relay *s;
    int hidden;           /* atomic: p is no member */
    uint64_t incarnation; /* atomic: of p as a member */
    bool met;             /* this test makes d call p */
};

static bool is_member(void *arg, const struct kv_origin *o)
{
    const struct trio *t = arg;

    return !LOAD(t->hidden) && strcmp(o->name, t->p.name) == 0 &&
           o->incarnation == LOAD(t->incarnation) &&
           strcmp(o->address, kv_handoff_address(t->p.h)) == 0;
}

struct trio_opts {
    struct node_opts p, d;
    const char *s_transports, *s_method;
    uint64_t pool_bytes, wait_ns, lease_ns;
    uint32_t max_formats;
};

static void open_trio(struct trio *t, struct trio_opts o)
{
    struct kv_relay_cfg rc = {
        .net = {.listen = "127.0.0.1:0", .transports = o.s_transports, .method = o.s_method},
        .node_name = "s0",
        .incarnation = S_INCARNATION,
        .silence_ns = o.p.silence_ns,
        .lease_ns = o.lease_ns ? o.lease_ns : 2 * BT_NS_PER_S,
        .wait_ns = o.wait_ns ? o.wait_ns : 10 * BT_NS_PER_S,
        .pool_bytes = o.pool_bytes ? o.pool_bytes : 16u << 20,
        .max_formats = o.max_formats,
        .max_open = 64,
        .is_member = is_member,
        .arg = t,
    };
    struct bt_err err = {0};

    o.p.name = "p0";
    o.d.name = "d0";
    *t = (struct trio){0};
    t->incarnation = 1; /* what node_open gives */
    if (node_open(&t->p, &o.p, &err) != BT_OK || node_open(&t->d, &o.d, &err) != BT_OK ||
        kv_relay_create(&rc, &t->s, &err) != BT_OK) {
        fail_msg("%s", err.msg);
    }
}

/* Nothing is left anywhere, and P and D have never met. */
static void close_trio(struct trio *t)
{
    assert_true(EVENTUALLY(kv_relay_stats(t->s).n_open + kv_relay_stats(t->s).n_waiting == 0));
    assert_int_equal(kv_relay_stats(t->s).pages_free, kv_relay_stats(t->s).pages_total);
    assert_true(t->met || kv_handoff_stats(t->p.h).connections <= 1);
    assert_true(t->met || kv_handoff_stats(t->d.h).connections <= 1);
    node_close(&t->d);
    kv_relay_destroy(t->s);
    node_close(&t->p);
}

static int recv_via(struct prompt *b, struct trio *t)
{
    b->origin = (struct kv_origin){t->p.name, t->p.incarnation, kv_handoff_address(t->p.h)};
    return prompt_recv(b, "s0", S_INCARNATION, kv_relay_address(t->s));
}

static void
open_prompts(struct trio *t, struct prompt *a, struct prompt *b, uint32_t tokens, uint32_t have)
{
    uint64_t id = next_id++;

    assert_true(prompt_pages(a, &t->p, id, tokens, KV_OWNER_SEQ));
    assert_true(prompt_pages(b, &t->d, id, tokens, KV_OWNER_TRANSFER));
    b->have = have;
    for (int l = 0; l < t->d.l->n_layers; l++) {
        fill_tokens(&t->d, b->pages, b->seed, l, 0, have);
    }
}

static void free_prompts(struct prompt *a, struct prompt *b)
{
    prompt_free(a, KV_OWNER_SEQ);
    prompt_free(b, KV_OWNER_TRANSFER);
}

static void pass(struct trio *t, uint32_t tokens, uint32_t have, uint32_t chunk, bool early)
{
    struct prompt a, b;

    open_prompts(t, &a, &b, tokens, have);
    if (early) {
        assert_int_equal(recv_via(&b, t), BT_OK);
    }
    assert_int_equal(prompt_send(&a), BT_OK);
    for (uint32_t i = 0; i < tokens; i += chunk) {
        prompt_compute(&a, i, i + BT_MIN(chunk, tokens - i));
    }
    prompt_finish(&a);
    if (!early) {
        assert_int_equal(recv_via(&b, t), BT_OK);
    }
    /* What went wrong at D is why P would wait: told first. */
    assert_true(EVENTUALLY(LOAD(b.done)));
    assert_string_equal(b.msg, "");
    assert_int_equal(b.rc, BT_OK);
    assert_true(EVENTUALLY(LOAD(a.done)));
    assert_int_equal(a.rc, BT_OK);
    assert_int_equal(wrong_bytes(&t->d, b.pages, b.seed, tokens), 0);
    assert_int_equal(b.first.n_tokens, 2);
    assert_int_equal(b.first.ids[0], (int32_t)a.seed);
    free_prompts(&a, &b);
}

static const struct {
    uint32_t tokens, have;
} cases[] = {{1, 0},     {15, 0},    {16, 0},    {17, 0},    {333, 0},  {1000, 0},
             {320, 128}, {333, 256}, {333, 320}, {320, 320}, {1000, 64}};

static void all_cases(struct trio_opts o)
{
    struct trio t;

    open_trio(&t, o);
    for (size_t i = 0; i < BT_ARRAY_LEN(cases); i++) {
        pass(&t, cases[i].tokens, cases[i].have, 100, i % 2 == 0);
        pass(&t, cases[i].tokens, cases[i].have, 16, i % 2 == 1);
    }
    assert_true(EVENTUALLY(kv_relay_stats(t.s).relayed == 2 * BT_ARRAY_LEN(cases)));
    assert_int_equal(kv_relay_stats(t.s).failed, 0);
    assert_int_equal(kv_relay_stats(t.s).handoff.connections, 2);
    close_trio(&t);
}

static void test_shm(void **state)
{
    all_cases((struct trio_opts){0});
}

static void test_tcp(void **state)
{
    all_cases(
        (struct trio_opts){.p.transports = "tcp", .d.transports = "tcp", .s_transports = "tcp"});
}

static void test_every_method(void **state)
{
    static const char *const methods[] = {"pull", "message", "put"};

    for (int i = 0; i < 9; i++) {
        all_cases((struct trio_opts){.p.method = methods[i / 3], .d.method = methods[i % 3]});
    }
}

static void test_page_sizes_differ(void **state)
{
    all_cases((struct trio_opts){.p.page_tokens = 64, .d.page_tokens = 16});
    all_cases((struct trio_opts){.p.page_tokens = 8, .d.page_tokens = 64, .p.method = "message"});
}

/* D has its first layers while P computes the last ones. */
static void test_layers_pass_while_the_prompt_is_computed(void **state)
{
    struct prompt a, b;
    struct trio t;
    uint64_t layer_bytes;

    open_trio(&t, (struct trio_opts){0});
    open_prompts(&t, &a, &b, 320, 0);
    layer_bytes = 20 * t.p.l->page_stride;
    assert_int_equal(recv_via(&b, &t), BT_OK);
    assert_int_equal(prompt_send(&a), BT_OK);
    for (int l = 0; l < t.p.l->n_layers; l++) {
        fill_tokens(&t.p, a.pages, a.seed, l, 0, 320);
        kv_send_progress(a.send, 0, 320, l);
        assert_true(EVENTUALLY(kv_handoff_stats(t.d.h).bytes == layer_bytes * (uint64_t)(l + 1)));
    }
    assert_int_equal(LOAD(b.done), 0);
    prompt_finish(&a);
    assert_true(EVENTUALLY(LOAD(a.done) && LOAD(b.done)));
    assert_int_equal(b.rc, BT_OK);
    assert_int_equal(wrong_bytes(&t.d, b.pages, b.seed, 320), 0);
    free_prompts(&a, &b);
    close_trio(&t);
}

static void test_corrupted_pieces_are_sent_again(void **state)
{
    struct trio t;

    open_trio(&t, (struct trio_opts){0});
    for (int i = 1; i <= 3; i++) {
        __atomic_store_n(&kv_handoff_corrupt_next, 1, __ATOMIC_RELAXED);
        pass(&t, 333, 0, 100, true);
    }
    assert_int_equal(
        kv_handoff_stats(t.d.h).checksum_errors + kv_relay_stats(t.s).handoff.checksum_errors, 3);
    close_trio(&t);
}

/* ---- ends ---- */

/* P's abort reaches D, with its reason. */
static void test_RTR_04_abort_of_p_ends_d(void **state)
{
    struct prompt a, b;
    struct trio t;

    open_trio(&t, (struct trio_opts){0});
    open_prompts(&t, &a, &b, 320, 0);
    assert_int_equal(recv_via(&b, &t), BT_OK);
    assert_int_equal(prompt_send(&a), BT_OK);
    prompt_compute(&a, 0, 160);
    assert_true(EVENTUALLY(kv_handoff_stats(t.d.h).bytes > 0));
    kv_send_abort(a.send, BT_E_CANCELLED);
    assert_true(EVENTUALLY(LOAD(a.done) && LOAD(b.done)));
    assert_int_equal(b.rc, BT_E_CANCELLED);
    free_prompts(&a, &b);
    pass(&t, 333, 0, 100, true);
    close_trio(&t);
}

/* D withdraws: the relay holds what it has for another one until its lease ends, and P is done. */
static void test_d_withdraws(void **state)
{
    struct prompt a, b;
    struct trio t;

    open_trio(&t, (struct trio_opts){.lease_ns = 300 * BT_NS_PER_MS});
    open_prompts(&t, &a, &b, 320, 0);
    assert_int_equal(recv_via(&b, &t), BT_OK);
    assert_int_equal(prompt_send(&a), BT_OK);
    prompt_compute(&a, 0, 160);
    assert_true(EVENTUALLY(kv_handoff_stats(t.d.h).bytes > 0));
    kv_recv_abort(b.recv, BT_E_CANCELLED);
    assert_true(EVENTUALLY(LOAD(b.done)));
    prompt_compute(&a, 160, 320);
    prompt_finish(&a);
    assert_true(EVENTUALLY(LOAD(a.done)));
    assert_int_equal(a.rc, BT_OK);
    assert_true(EVENTUALLY(kv_relay_stats(t.s).failed == 1));
    free_prompts(&a, &b);
    pass(&t, 333, 0, 100, true);
    close_trio(&t);
}

/* Another D asks for the same prompt after the first was lost, also when P is long done. */
static void test_another_d_takes_over(void **state)
{
    struct prompt a, b, c;
    struct trio t;

    open_trio(&t, (struct trio_opts){.lease_ns = 20 * BT_NS_PER_S});
    open_prompts(&t, &a, &b, 320, 0);
    assert_int_equal(recv_via(&b, &t), BT_OK);
    assert_int_equal(prompt_send(&a), BT_OK);
    prompt_compute(&a, 0, 160);
    assert_true(EVENTUALLY(kv_handoff_stats(t.d.h).bytes > 0));
    kv_recv_abort(b.recv, BT_E_CANCELLED);
    assert_true(EVENTUALLY(LOAD(b.done)));
    prompt_compute(&a, 160, 320);
    prompt_finish(&a);
    assert_true(EVENTUALLY(LOAD(a.done)));
    assert_true(prompt_pages(&c, &t.d, a.id.lo, 320, KV_OWNER_TRANSFER));
    assert_int_equal(recv_via(&c, &t), BT_OK);
    assert_true(EVENTUALLY(LOAD(c.done)));
    assert_string_equal(c.msg, "");
    assert_int_equal(wrong_bytes(&t.d, c.pages, c.seed, 320), 0);
    free_prompts(&a, &b);
    prompt_free(&c, KV_OWNER_TRANSFER);
    close_trio(&t);
}

/* The relay ends in the middle: D fails and P takes another ticket. */
static void test_relay_stops(void **state)
{
    struct prompt a, b, c;
    struct trio t;

    open_trio(&t, (struct trio_opts){0});
    open_prompts(&t, &a, &b, 320, 0);
    assert_int_equal(recv_via(&b, &t), BT_OK);
    assert_int_equal(prompt_send(&a), BT_OK);
    prompt_compute(&a, 0, 160);
    assert_true(EVENTUALLY(kv_handoff_stats(t.d.h).bytes > 0));
    kv_relay_destroy(t.s);
    assert_true(EVENTUALLY(LOAD(b.done)));
    assert_int_equal(b.rc, BT_E_UNAVAILABLE);
    assert_int_equal(LOAD(a.done), 0);
    prompt_compute(&a, 160, 320);
    prompt_finish(&a);
    assert_true(prompt_pages(&c, &t.d, a.id.lo, 320, KV_OWNER_TRANSFER));
    assert_int_equal(prompt_recv(&c, "p0", t.p.incarnation, kv_handoff_address(t.p.h)), BT_OK);
    assert_true(EVENTUALLY(LOAD(c.done) && LOAD(a.done)));
    assert_string_equal(c.msg, "");
    assert_int_equal(wrong_bytes(&t.d, c.pages, c.seed, 320), 0);
    free_prompts(&a, &b);
    prompt_free(&c, KV_OWNER_TRANSFER);
    node_close(&t.d);
    node_close(&t.p);
}

/* P dies at once or later; D hears of it. */
static void test_p_is_not_there(void **state)
{
    struct prompt b;
    struct trio t;

    open_trio(&t, (struct trio_opts){0});
    assert_true(prompt_pages(&b, &t.d, next_id++, 100, KV_OWNER_TRANSFER));
    INC(t.incarnation); /* a member by the list, but another life answers */
    t.p.incarnation++;
    assert_int_equal(recv_via(&b, &t), BT_OK);
    assert_true(EVENTUALLY(LOAD(b.done)));
    assert_int_equal(b.rc, BT_E_PEER_STALE);
    t.p.incarnation--;
    __atomic_store_n(&t.incarnation, t.p.incarnation, __ATOMIC_RELEASE);
    prompt_free(&b, KV_OWNER_TRANSFER);
    pass(&t, 100, 0, 100, true);
    close_trio(&t);
}

/* ---- limits ---- */

static void test_SEC_03_strangers_are_not_called(void **state)
{
    struct prompt b;
    struct trio t;
    struct kv_origin bad[3];

    open_trio(&t, (struct trio_opts){.wait_ns = 100 * BT_NS_PER_MS});
    for (int i = 0; i < 3; i++) {
        bad[i] = (struct kv_origin){t.p.name, t.p.incarnation, kv_handoff_address(t.p.h)};
    }
    bad[0].name = "p9";
    bad[1].incarnation = 99;
    bad[2].address = "127.0.0.1:1";
    for (int i = 0; i < 3; i++) {
        assert_true(prompt_pages(&b, &t.d, next_id++, 100, KV_OWNER_TRANSFER));
        b.origin = bad[i];
        assert_int_equal(prompt_recv(&b, "s0", S_INCARNATION, kv_relay_address(t.s)), BT_OK);
        assert_true(EVENTUALLY(LOAD(b.done)));
        assert_int_equal(b.rc, BT_E_PEER_STALE);
        prompt_free(&b, KV_OWNER_TRANSFER);
    }
    assert_int_equal(kv_handoff_stats(t.p.h).connections, 0);
    assert_true(EVENTUALLY(kv_relay_stats(t.s).refused == 3));
    pass(&t, 100, 0, 100, true);
    close_trio(&t);
}

/* The relay hears a little later than D of a new prefill node. */
static void test_origin_becomes_a_member(void **state)
{
    struct prompt a, b;
    struct trio t;

    open_trio(&t, (struct trio_opts){0});
    __atomic_store_n(&t.hidden, 1, __ATOMIC_RELEASE);
    open_prompts(&t, &a, &b, 320, 0);
    assert_int_equal(recv_via(&b, &t), BT_OK);
    assert_true(EVENTUALLY(kv_relay_stats(t.s).n_waiting == 1));
    kv_relay_members_changed(t.s);
    assert_int_equal(prompt_send(&a), BT_OK);
    prompt_compute(&a, 0, 320);
    prompt_finish(&a);
    assert_int_equal(LOAD(b.done), 0);
    __atomic_store_n(&t.hidden, 0, __ATOMIC_RELEASE);
    kv_relay_members_changed(t.s);
    assert_true(EVENTUALLY(LOAD(a.done) && LOAD(b.done)));
    assert_string_equal(b.msg, "");
    assert_int_equal(wrong_bytes(&t.d, b.pages, b.seed, 320), 0);
    free_prompts(&a, &b);
    close_trio(&t);
}

/* Two decode nodes ask for a prompt that waits. The second one has less of it, and when the first
 * one withdraws gets all that it lacks. */
static void test_second_asker_has_less(void **state)
{
    struct node_opts opts = {.name = "d1"};
    struct bt_err err = {0};
    struct prompt a, b, c;
    struct trio t;
    struct node e;

    open_trio(&t, (struct trio_opts){0});
    assert_int_equal(node_open(&e, &opts, &err), BT_OK);
    __atomic_store_n(&t.hidden, 1, __ATOMIC_RELEASE);
    open_prompts(&t, &a, &b, 320, 256);
    assert_true(prompt_pages(&c, &e, a.id.lo, 320, KV_OWNER_TRANSFER));
    c.have = 64;
    for (int l = 0; l < e.l->n_layers; l++) {
        fill_tokens(&e, c.pages, c.seed, l, 0, c.have);
    }
    assert_int_equal(recv_via(&b, &t), BT_OK);
    assert_true(EVENTUALLY(kv_relay_stats(t.s).handoff.tickets == 1));
    assert_int_equal(recv_via(&c, &t), BT_OK);
    assert_true(EVENTUALLY(kv_relay_stats(t.s).handoff.tickets == 2));
    assert_int_equal(kv_relay_stats(t.s).n_waiting, 1);
    kv_recv_abort(b.recv, BT_E_CANCELLED);
    assert_true(EVENTUALLY(LOAD(b.done) && kv_relay_stats(t.s).handoff.tickets == 1));
    assert_int_equal(prompt_send(&a), BT_OK);
    prompt_compute(&a, 0, 320);
    prompt_finish(&a);
    __atomic_store_n(&t.hidden, 0, __ATOMIC_RELEASE);
    kv_relay_members_changed(t.s);
    assert_true(EVENTUALLY(LOAD(a.done) && LOAD(c.done)));
    assert_string_equal(c.msg, "");
    assert_int_equal(a.rc, BT_OK);
    assert_int_equal(wrong_bytes(&e, c.pages, c.seed, 320), 0);
    free_prompts(&a, &b);
    prompt_free(&c, KV_OWNER_TRANSFER);
    node_close(&e);
    close_trio(&t);
}

/* A node that is no relay refuses, and a relay has nothing of its own. */
static void test_wrong_kinds_of_partners(void **state)
{
    struct prompt b;
    struct trio t;

    open_trio(&t,
              (struct trio_opts){.lease_ns = 300 * BT_NS_PER_MS, .p.lease_ns = 300 * BT_NS_PER_MS});
    assert_true(prompt_pages(&b, &t.d, next_id++, 100, KV_OWNER_TRANSFER));
    t.met = true;
    b.origin = (struct kv_origin){"px", 1, "127.0.0.1:1"};
    assert_int_equal(prompt_recv(&b, "p0", t.p.incarnation, kv_handoff_address(t.p.h)), BT_OK);
    assert_true(EVENTUALLY(LOAD(b.done)));
    assert_int_equal(b.rc, BT_E_UNSUPPORTED);
    prompt_free(&b, KV_OWNER_TRANSFER);
    assert_true(prompt_pages(&b, &t.d, next_id++, 100, KV_OWNER_TRANSFER));
    assert_int_equal(prompt_recv(&b, "s0", S_INCARNATION, kv_relay_address(t.s)), BT_OK);
    assert_true(EVENTUALLY(LOAD(b.done)));
    assert_int_equal(b.rc, BT_E_NOT_FOUND);
    prompt_free(&b, KV_OWNER_TRANSFER);
    close_trio(&t);
}

/* 40 pages: prompts of 20 pages pass two at a time, in their order; what never fits is refused. */
static void test_memory_is_bounded(void **state)
{
    enum { N = 8 };
    struct prompt a[N], b[N], c;
    struct trio t;
    uint64_t page = 4 * 2 * 2 * 16 * 32 * 2; /* layers, K and V, heads, tokens, dim, bytes */

    open_trio(&t, (struct trio_opts){.pool_bytes = 40 * page});
    for (int i = 0; i < N; i++) {
        open_prompts(&t, &a[i], &b[i], 320, 0);
        assert_int_equal(recv_via(&b[i], &t), BT_OK);
        assert_true(EVENTUALLY(kv_relay_stats(t.s).n_open + kv_relay_stats(t.s).n_waiting ==
                               (uint32_t)i + 1));
    }
    assert_int_equal(kv_relay_stats(t.s).n_open, 2);
    assert_int_equal(kv_relay_stats(t.s).n_waiting, N - 2);
    assert_int_equal(kv_relay_stats(t.s).pages_total, 40);
    assert_true(prompt_pages(&c, &t.d, next_id++, 41 * 16, KV_OWNER_TRANSFER));
    assert_int_equal(recv_via(&c, &t), BT_OK);
    assert_true(EVENTUALLY(LOAD(c.done)));
    assert_int_equal(c.rc, BT_E_EXHAUSTED);
    prompt_free(&c, KV_OWNER_TRANSFER);
    /* One that waits withdraws. */
    kv_recv_abort(b[4].recv, BT_E_CANCELLED);
    assert_true(EVENTUALLY(LOAD(b[4].done)));
    assert_true(EVENTUALLY(kv_relay_stats(t.s).n_waiting == N - 3));
    /* The last ones finish first: their turn has not come. */
    for (int i = N - 1; i >= 0; i--) {
        assert_int_equal(prompt_send(&a[i]), BT_OK);
        prompt_compute(&a[i], 0, 320);
        prompt_finish(&a[i]);
    }
    kv_send_abort(a[4].send, BT_E_CANCELLED);
    for (int i = 0; i < N; i++) {
        assert_true(EVENTUALLY(LOAD(a[i].done) && LOAD(b[i].done)));
        if (i != 4) {
            assert_string_equal(b[i].msg, "");
            assert_int_equal(wrong_bytes(&t.d, b[i].pages, b[i].seed, 320), 0);
        }
        free_prompts(&a[i], &b[i]);
    }
    close_trio(&t);
}

static void test_waiting_ends(void **state)
{
    struct prompt a[2], b[2];
    struct trio t;
    uint64_t page = 4 * 2 * 2 * 16 * 32 * 2;

    open_trio(&t, (struct trio_opts){.pool_bytes = 20 * page, .wait_ns = 200 * BT_NS_PER_MS});
    for (int i = 0; i < 2; i++) {
        open_prompts(&t, &a[i], &b[i], 320, 0);
        assert_int_equal(recv_via(&b[i], &t), BT_OK);
        assert_true(EVENTUALLY(kv_relay_stats(t.s).n_open == 1));
    }
    assert_true(EVENTUALLY(LOAD(b[1].done)));
    assert_int_equal(b[1].rc, BT_E_EXHAUSTED);
    assert_int_equal(prompt_send(&a[0]), BT_OK);
    prompt_compute(&a[0], 0, 320);
    prompt_finish(&a[0]);
    assert_true(EVENTUALLY(LOAD(a[0].done) && LOAD(b[0].done)));
    assert_int_equal(b[0].rc, BT_OK);
    free_prompts(&a[0], &b[0]);
    free_prompts(&a[1], &b[1]);
    close_trio(&t);
}

static int asks_in_vain(struct trio *t, struct node *d)
{
    uint64_t end = bt_deadline_ns(20 * BT_NS_PER_S);
    struct prompt b;

    assert_true(prompt_pages(&b, d, next_id++, 100, KV_OWNER_TRANSFER));
    assert_int_equal(recv_via(&b, t), BT_OK);
    while (!LOAD(b.done) && bt_now_ns() < end) {
        side_nap();
    }
    assert_true(LOAD(b.done));
    prompt_free(&b, KV_OWNER_TRANSFER);
    return b.rc;
}

static void test_models_are_kept_apart(void **state)
{
    struct trio t;
    struct node d2, d3;
    struct prompt a, b;
    struct bt_err err = {0};

    open_trio(&t, (struct trio_opts){.max_formats = 2});
    pass(&t, 100, 0, 100, true);
    /* Another digest: the relay takes it, P does not. */
    assert_int_equal(node_open(&d2, &(struct node_opts){.name = "d2", .compat = 5}, &err), BT_OK);
    assert_true(prompt_pages(&a, &t.p, next_id, 100, KV_OWNER_SEQ));
    assert_true(prompt_pages(&b, &d2, next_id++, 100, KV_OWNER_TRANSFER));
    assert_int_equal(recv_via(&b, &t), BT_OK);
    assert_true(EVENTUALLY(LOAD(b.done)));
    assert_int_equal(b.rc, BT_E_INCOMPATIBLE);
    prompt_free(&b, KV_OWNER_TRANSFER);
    /* A third kind: no room for it, until the second has gone. */
    assert_int_equal(node_open(&d3, &(struct node_opts){.name = "d3", .compat = 6}, &err), BT_OK);
    assert_true(prompt_pages(&b, &d3, next_id++, 100, KV_OWNER_TRANSFER));
    assert_int_equal(recv_via(&b, &t), BT_OK);
    assert_true(EVENTUALLY(LOAD(b.done)));
    assert_int_equal(b.rc, BT_E_EXHAUSTED);
    prompt_free(&b, KV_OWNER_TRANSFER);
    node_close(&d2);
    assert_true(EVENTUALLY(asks_in_vain(&t, &d3) == BT_E_INCOMPATIBLE)); /* P's word */
    prompt_free(&a, KV_OWNER_SEQ);
    node_close(&d3);
    pass(&t, 100, 0, 100, true);
    assert_true(EVENTUALLY(kv_relay_stats(t.s).n_open + kv_relay_stats(t.s).n_waiting == 0));
    node_close(&t.d);
    kv_relay_destroy(t.s);
    node_close(&t.p);
}

/* Random ends on either side, many at once: nothing leaks, no prompt gets another's bytes. */
static void random_ends(const char *transports)
{
    enum { N = 6 };
    struct trio t;
    unsigned seed = 7;
    uint64_t page = 4 * 2 * 2 * 16 * 32 * 2;

    open_trio(&t, (struct trio_opts){.pool_bytes = 50 * page,
                                     .lease_ns = 100 * BT_NS_PER_MS,
                                     .p.lease_ns = 100 * BT_NS_PER_MS,
                                     .p.transports = transports,
                                     .d.transports = transports,
                                     .s_transports = transports});
    for (int round = 0; round < 25; round++) {
        struct prompt a[N], b[N];
        uint32_t tokens[N];

        for (int i = 0; i < N; i++) {
            tokens[i] = 1 + (uint32_t)rand_r(&seed) % 500;
            open_prompts(&t, &a[i], &b[i], tokens[i], tokens[i] / 3 / 16 * 16);
            assert_int_equal(prompt_send(&a[i]), BT_OK);
            assert_int_equal(recv_via(&b[i], &t), BT_OK);
        }
        for (int i = 0; i < N; i++) {
            int what = rand_r(&seed) % 4;

            prompt_compute(&a[i], 0, tokens[i] / 2);
            if (what == 0) {
                kv_send_abort(a[i].send, BT_E_CANCELLED);
            } else if (what == 1) {
                kv_recv_abort(b[i].recv, BT_E_CANCELLED);
            }
            prompt_compute(&a[i], tokens[i] / 2, tokens[i]);
            prompt_finish(&a[i]);
            if (what == 2) {
                kv_recv_abort(b[i].recv, BT_E_CANCELLED);
            }
        }
        for (int i = 0; i < N; i++) {
            assert_true(EVENTUALLY(LOAD(a[i].done) && LOAD(b[i].done)));
            if (b[i].rc == BT_OK) {
                assert_int_equal(wrong_bytes(&t.d, b[i].pages, b[i].seed, tokens[i]), 0);
            }
            free_prompts(&a[i], &b[i]);
        }
    }
    assert_true(kv_relay_stats(t.s).relayed > 0);
    close_trio(&t);
}

static void test_KVX_04_random_ends(void **state)
{
    random_ends(NULL);
    random_ends("tcp");
}

/* An argument chooses tests by name. */
int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_shm),
        cmocka_unit_test(test_tcp),
        cmocka_unit_test(test_every_method),
        cmocka_unit_test(test_page_sizes_differ),
        cmocka_unit_test(test_layers_pass_while_the_prompt_is_computed),
        cmocka_unit_test(test_corrupted_pieces_are_sent_again),
        cmocka_unit_test(test_RTR_04_abort_of_p_ends_d),
        cmocka_unit_test(test_d_withdraws),
        cmocka_unit_test(test_another_d_takes_over),
        cmocka_unit_test(test_relay_stops),
        cmocka_unit_test(test_p_is_not_there),
        cmocka_unit_test(test_SEC_03_strangers_are_not_called),
        cmocka_unit_test(test_origin_becomes_a_member),
        cmocka_unit_test(test_second_asker_has_less),
        cmocka_unit_test(test_wrong_kinds_of_partners),
        cmocka_unit_test(test_memory_is_bounded),
        cmocka_unit_test(test_waiting_ends),
        cmocka_unit_test(test_models_are_kept_apart),
        cmocka_unit_test(test_KVX_04_random_ends),
    };

    if (argc > 1) {
        cmocka_set_test_filter(argv[1]);
    }
    return cmocka_run_group_tests(tests, NULL, NULL);
}
