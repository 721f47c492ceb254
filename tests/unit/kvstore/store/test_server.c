/* The block server against clients that do wrong, over real UCX on loopback: strangers are closed
 * alone, leases end, nothing is stored that is not what it says. */
#include "tests/unit/kvstore/tier/fixture.h"

#include "tests/unit/cmocka.h"

#include "common/base/buf.h"
#include "kvstore/store/server.h"
#include "proto/wire/store.h"
#include "tests/unit/common/net/side.h"

#include <stdio.h>
#include <stdlib.h>

#define N_BLOBS 12

struct rig {
    struct world w;
    struct kv_server *server;
    struct chain c;
};

static void rig_open(struct rig *r, uint64_t lease_ns, uint32_t max_gets)
{
    struct kv_server_cfg cfg = {.net = {.listen = "127.0.0.1:0", .transports = "tcp"},
                                .node_name = "s0",
                                .incarnation = 7,
                                .takes_puts = true,
                                .silence_ns = lease_ns ? 2 * BT_NS_PER_S : 400 * BT_NS_PER_MS,
                                .lease_ns = lease_ns,
                                .max_gets = max_gets};
    struct bt_err err = {0};

    world_make(&r->w, 256, N_BLOBS);
    world_start(&r->w);
    cfg.tiers = r->w.tiers;
    if (kv_server_create(&cfg, &r->server, &err) != BT_OK) {
        fail_msg("%s", err.msg);
    }
    chain_make(&r->w, &r->c, 1, 0, 2, 4);
    assert_int_equal(offer_chain(&r->w, &r->c), 4);
}

static void rig_close(struct rig *r)
{
    kv_server_destroy(r->server);
    world_free(&r->w); /* checks that nothing is pinned */
}

/* ---- a client that says what it is told ---- */

struct stranger {
    struct bt_net *net;
    struct bt_net_peer *peer;
    const char *address;
    struct wire_store m;
    struct bt_str data, raw;
    int rc;
    /* atomic */
    int n_in[WIRE_STORE_DONE + 1], closed, last_rc;
};

static void on_message(void *arg, struct bt_net_peer *peer, struct bt_str head, struct bt_str data)
{
    struct stranger *s = arg;
    struct wire_store m;

    if (wire_store_unpack(head, &m, NULL) == BT_OK) {
        __atomic_store_n(&s->last_rc, m.rc, __ATOMIC_RELEASE);
        INC(s->n_in[m.type]);
    }
}

static void on_closed(void *arg, struct bt_net_peer *peer, int rc)
{
    struct stranger *s = arg;

    INC(s->closed);
}

static void do_connect(void *arg)
{
    struct stranger *s = arg;

    s->rc = bt_net_connect(s->net, s->address, &s->peer, NULL);
}

static void do_send(void *arg)
{
    struct stranger *s = arg;
    char head[WIRE_STORE_MAX_HEAD];
    struct bt_str h = s->raw.n ? s->raw : (struct bt_str){head, wire_store_pack(&s->m, head)};

    s->rc = LOAD(s->closed) ? BT_OK : bt_net_send(s->peer, h, s->data, NULL, NULL);
}

static void say(struct stranger *s, struct wire_store m, struct bt_str data)
{
    s->m = m;
    s->data = data;
    side_on_net(s->net, do_send, s);
    assert_int_equal(s->rc, BT_OK);
}

static const struct wire_store hello = {
    .type = WIRE_STORE_HELLO,
    .version = 1,
    .version_min = 1,
    .version_max = 1,
    .method = WIRE_STORE_NO_METHOD,
    .incarnation = 1,
    .bytes = 4096,
    .name = {"evil", 4},
};

static void stranger_open(struct stranger *s, struct rig *r, bool greet)
{
    const struct bt_net_cfg cfg = {.listen = "127.0.0.1:0", .transports = "tcp"};
    const struct bt_net_handlers on = {s, NULL, on_message, on_closed};

    *s = (struct stranger){.address = kv_server_address(r->server)};
    assert_int_equal(bt_net_create(&cfg, &on, &s->net, NULL), BT_OK);
    side_on_net(s->net, do_connect, s);
    assert_int_equal(s->rc, BT_OK);
    assert_true(EVENTUALLY(LOAD(s->n_in[WIRE_STORE_HELLO])));
    if (greet) {
        say(s, hello, (struct bt_str){0});
    }
}

static struct wire_store get_of(uint64_t req, enum bt_net_method method)
{
    return (struct wire_store){.type = WIRE_STORE_GET,
                               .req = req,
                               .n_items = 1,
                               .method = (uint8_t)method,
                               .n_layers = N_LAYERS,
                               .block_tokens = BLOCK,
                               .layer_bytes = 2 * PAGE_BYTES};
}

/* Asks for the chain's first block. */
static void ask(struct stranger *s, struct rig *r, uint64_t req, enum bt_net_method method)
{
    struct wire_store m = get_of(req, method);
    struct wire_store_item item = {.n_tokens = BLOCK};
    struct bt_buf data = {0};

    memcpy(m.root, r->c.c.root.b, 16);
    memcpy(item.key, r->c.keys[0].b, 16);
    memcpy(item.parent, r->c.c.root.b, 16);
    assert_int_equal(wire_store_add_item(&data, &item, r->c.ids), BT_OK);
    say(s, m, bt_buf_str(&data));
    bt_buf_fini(&data);
}

/* ---- */

static void
attack(struct rig *r, bool greet, struct wire_store m, struct bt_str data, struct bt_str raw)
{
    struct stranger s;

    stranger_open(&s, r, greet);
    s.raw = raw;
    say(&s, m, data);
    if (!EVENTUALLY(LOAD(s.closed))) {
        fail_msg("%s was not punished", wire_store_type_name((int)m.type));
    }
    bt_net_destroy(s.net);
}

static void test_hostile_messages_close_their_peer_alone(void **state)
{
    const struct bt_str none = {0},
                        junk = BT_STR("some bytes that are no items or heads at all....");
    struct wire_store get = get_of(1, BT_NET_METHOD_MESSAGE), m;
    struct stranger honest;
    struct rig r;

    rig_open(&r, 0, 0);
    stranger_open(&honest, &r, true);
    attack(&r, false, get, none, BT_STR("GET / HTTP/1.1\r\n"));
    attack(&r, false, get, junk, none);  /* before HELLO */
    attack(&r, true, hello, none, none); /* twice */
    attack(&r, true, get, none, none);   /* without items */
    attack(&r, true, get, junk, none);
    m = get;
    m.layer_bytes = UINT64_MAX / 2;
    attack(&r, true, m, junk, none);
    m = get;
    m.n_layers = 0;
    attack(&r, true, m, junk, none);
    m = (struct wire_store){.type = WIRE_STORE_PUT, .req = 1, .method = 1};
    attack(&r, true, m, junk, none);
    attack(&r, true, m, none, none);
    m = (struct wire_store){.type = WIRE_STORE_PLACED, .req = 9};
    attack(&r, true, m, none, none);
    m = (struct wire_store){.type = WIRE_STORE_RELEASE, .req = 9};
    attack(&r, true, m, junk, none); /* bytes behind it */
    m = (struct wire_store){.type = WIRE_STORE_HAVE, .req = 1};
    attack(&r, true, m, none, none); /* wrong direction */
    m = hello;
    m.version_min = m.version_max = 9;
    attack(&r, false, m, none, none);
    /* The others are as they were. */
    ask(&honest, &r, 1, BT_NET_METHOD_MESSAGE);
    assert_true(EVENTUALLY(LOAD(honest.n_in[WIRE_STORE_DATA]) == N_LAYERS));
    assert_int_equal(LOAD(honest.closed), 0);
    bt_net_destroy(honest.net);
    rig_close(&r);
}

static bool no_pins(void *arg)
{
    return kv_tiers_stats(arg).n_pins == 0;
}

/* Says something once more, so that it is not closed for its silence. */
static bool is_closed_though_it_speaks(struct stranger *s)
{
    s->m = (struct wire_store){.type = WIRE_STORE_PING};
    s->data = (struct bt_str){0};
    side_on_net(s->net, do_send, s);
    return LOAD(s->closed);
}

/* Who asks and never lets go, or dies with a lease: the blocks are free again. */
static void test_TIER_06_leases_end(void **state)
{
    struct stranger s;
    struct rig r;

    rig_open(&r, 1500 * BT_NS_PER_MS, 3);
    stranger_open(&s, &r, true);
    for (uint64_t i = 1; i <= 5; i++) {
        ask(&s, &r, i, BT_NET_METHOD_PULL);
    }
    assert_true(EVENTUALLY(LOAD(s.n_in[WIRE_STORE_HAVE]) == 3)); /* the limit */
    assert_true(EVENTUALLY(LOAD(s.n_in[WIRE_STORE_MISS]) == 2));
    assert_int_equal(kv_tiers_stats(r.w.tiers).n_pins, 3);
    say(&s, (struct wire_store){.type = WIRE_STORE_RELEASE, .req = 2}, (struct bt_str){0});
    ask(&s, &r, 6, BT_NET_METHOD_PULL);
    assert_true(EVENTUALLY(LOAD(s.n_in[WIRE_STORE_HAVE]) == 4));
    assert_true(EVENTUALLY(is_closed_though_it_speaks(&s))); /* kept for too long */
    assert_true(eventually(no_pins, r.w.tiers));
    bt_net_destroy(s.net);
    stranger_open(&s, &r, true);
    ask(&s, &r, 1, BT_NET_METHOD_PULL);
    assert_true(EVENTUALLY(LOAD(s.n_in[WIRE_STORE_HAVE])));
    bt_net_destroy(s.net); /* dies */
    assert_true(eventually(no_pins, r.w.tiers));
    rig_close(&r);
}

/* A block that a reader holds is neither evicted nor written over, however much comes in. */
static void test_TIER_05_nothing_is_written_over_that_a_reader_holds(void **state)
{
    struct kv_run run;
    struct kv_blob *blob;
    struct chain other;
    struct stranger s;
    struct rig r;
    char before[2 * PAGE_BYTES];
    const char *at;

    rig_open(&r, 0, 0);
    stranger_open(&s, &r, true);
    ask(&s, &r, 1, BT_NET_METHOD_PULL);
    assert_true(EVENTUALLY(LOAD(s.n_in[WIRE_STORE_HAVE])));
    run = kv_run_of(&r.c.c, 0, BLOCK, 0);
    run.n_blocks = 1;
    assert_int_equal(kv_tiers_pin(r.w.tiers, &run, &blob), 1);
    at = kv_blob_layer(r.w.tiers, blob, 1);
    memcpy(before, at, sizeof(before));
    kv_tiers_unpin(r.w.tiers, &blob, 1);
    for (uint32_t i = 0; i < 10; i++) {
        chain_make(&r.w, &other, i + 10, 0, i + 50, N_BLOBS);
        offer_chain(&r.w, &other);
    }
    assert_int_equal(kv_tiers_pin(r.w.tiers, &run, &blob), 1); /* still here, at its place */
    assert_ptr_equal(kv_blob_layer(r.w.tiers, blob, 1), at);
    assert_memory_equal(at, before, sizeof(before));
    kv_tiers_unpin(r.w.tiers, &blob, 1);
    bt_net_destroy(s.net);
    rig_close(&r);
}

/* ---- puts ---- */

static const char put_byte = 0x33; /* what all blocks that are put here are full of */

/* Begins to put a chain's first block, by messages. `wrong` 1: under the key of another block. */
static void begin_put(struct stranger *s, struct rig *r, uint64_t req, uint32_t chain, int wrong)
{
    struct wire_store m = {.type = WIRE_STORE_PUT, .req = req, .method = BT_NET_METHOD_MESSAGE};
    struct chain c;
    struct kv_run run;
    struct kv_blob_meta meta;
    uint64_t prefix = 0, sums[N_LAYERS];
    char bytes[2 * PAGE_BYTES], head[1024];

    chain_make(&r->w, &c, chain, 0, chain + 1, 1);
    run = kv_run_of(&c.c, 0, BLOCK, 0);
    kv_run_at(&run, 0, &prefix, &meta);
    memset(bytes, put_byte, sizeof(bytes));
    for (int l = 0; l < N_LAYERS; l++) {
        sums[l] = kv_blob_sum(bytes, sizeof(bytes));
    }
    meta.shape = (struct kv_blob_shape){N_LAYERS, BLOCK, sizeof(bytes)};
    meta.sums = sums;
    if (wrong == 1) {
        meta.key.b[3] ^= 1;
    }
    kv_blob_encode(&meta, head);
    say(s, m, (struct bt_str){head, kv_blob_head_bytes(&meta)});
}

/* `wrong` 2: a byte of it; 3: not all of it. */
static void put_layer(struct stranger *s, uint64_t req, uint32_t layer, int wrong)
{
    char bytes[2 * PAGE_BYTES];

    memset(bytes, put_byte, sizeof(bytes));
    bytes[7] = (char)(wrong == 2 ? put_byte + 1 : put_byte);
    say(s, (struct wire_store){.type = WIRE_STORE_DATA, .req = req, .layer = layer},
        (struct bt_str){bytes, wrong == 3 ? 100 : sizeof(bytes)});
}

/* Puts a block of another chain; returns what DONE said. */
static int put(struct rig *r, int wrong)
{
    struct stranger s;
    int rc;

    stranger_open(&s, r, true);
    begin_put(&s, r, 5, 77, wrong);
    if (wrong != 1) {
        assert_true(EVENTUALLY(LOAD(s.n_in[WIRE_STORE_GO])));
        put_layer(&s, 5, 0, 0);
        put_layer(&s, 5, 1, wrong == 3 ? 3 : 0);
        if (wrong != 3) { /* else it dies in the middle */
            put_layer(&s, 5, 2, wrong);
        }
    }
    if (wrong == 3) {
        bt_net_destroy(s.net);
        assert_true(eventually(no_pins, r->w.tiers));
        return BT_E_PEER_LOST;
    }
    assert_true(EVENTUALLY(LOAD(s.n_in[WIRE_STORE_DONE])));
    rc = LOAD(s.last_rc);
    bt_net_destroy(s.net);
    return rc;
}

static bool is_there(struct rig *r)
{
    struct chain c;
    struct kv_run run;

    chain_make(&r->w, &c, 77, 0, 78, 1);
    run = kv_run_of(&c.c, 0, BLOCK, 0);
    return kv_tiers_peek(r->w.tiers, &run, NULL) == 1;
}

static void test_only_what_is_right_is_stored(void **state)
{
    struct rig r;

    rig_open(&r, 0, 0);
    assert_int_equal(put(&r, 1), BT_E_INVALID);
    assert_false(is_there(&r));
    assert_int_equal(put(&r, 2), BT_E_CORRUPT);
    assert_false(is_there(&r));
    put(&r, 3);
    assert_false(is_there(&r));
    assert_int_equal(put(&r, 0), BT_OK);
    assert_true(is_there(&r));
    assert_int_equal(kv_server_stats(r.server).bad, 1);
    assert_int_equal(kv_server_stats(r.server).puts, 1);
    rig_close(&r);
}

/* Who begins puts and does not go on with them: what was reserved for them is there for others
 * again, however much is said meanwhile, parts of later puts among it. */
static void test_TIER_06_unfinished_puts_end(void **state)
{
    struct stranger s;
    struct rig r;

    rig_open(&r, 1500 * BT_NS_PER_MS, 0);
    stranger_open(&s, &r, true);
    for (uint64_t i = 0; i < 4; i++) {
        begin_put(&s, &r, i, 100 + 10 * (uint32_t)i, 0);
    }
    assert_true(EVENTUALLY(LOAD(s.n_in[WIRE_STORE_GO]) == 4));
    assert_int_equal(kv_tiers_stats(r.w.tiers).n_pins, 4);
    put_layer(&s, 0, 0, 0);
    for (uint32_t l = 0; l < N_LAYERS; l++) {
        put_layer(&s, 3, l, 0);
    }
    assert_true(EVENTUALLY(LOAD(s.n_in[WIRE_STORE_DONE]) == 1));
    assert_true(EVENTUALLY(is_closed_though_it_speaks(&s)));
    assert_true(eventually(no_pins, r.w.tiers));
    bt_net_destroy(s.net);
    assert_int_equal(kv_server_stats(r.server).puts, 1);
    assert_int_equal(put(&r, 0), BT_OK);
    rig_close(&r);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_hostile_messages_close_their_peer_alone),
        cmocka_unit_test(test_TIER_06_leases_end),
        cmocka_unit_test(test_TIER_05_nothing_is_written_over_that_a_reader_holds),
        cmocka_unit_test(test_only_what_is_right_is_stored),
        cmocka_unit_test(test_TIER_06_unfinished_puts_end),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
