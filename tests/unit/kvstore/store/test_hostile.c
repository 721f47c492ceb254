/* A client that does not keep to the protocol, over real UCX: whatever it says, in whatever order,
 * costs its own connection; nothing stays pinned or reserved, and others are served. */
#include "tests/unit/kvstore/tier/fixture.h"

#include "common/base/buf.h"
#include "common/cluster/blockmap.h"
#include "kvstore/store/client.h"
#include "kvstore/store/link.h"
#include "kvstore/store/server.h"

#include "tests/unit/cmocka.h"

#define SILENCE_NS (2 * BT_NS_PER_S) /* a loaded machine greets late */

struct rig {
    struct world w;
    struct kv_server *server;
    struct chain chain; /* what the server has */
    struct kv_links links;
    char memory[1 << 16];
    struct kv_link *link; /* [net] NULL = closed */
    uint32_t closed, ready, haves, misses, dones, said;
    int32_t last_done;
    uint64_t seed;
    bool tcp;
    void (*say)(struct rig *r);
};

static struct rig rig;

static void on_ready(void *arg, struct kv_link *l)
{
    __atomic_store_n(&rig.ready, 1, __ATOMIC_RELEASE);
}

static void on_message(void *arg, struct kv_link *l, const struct wire_store *m, struct bt_str data)
{
    rig.haves += m->type == WIRE_STORE_HAVE;
    rig.misses += m->type == WIRE_STORE_MISS;
    if (m->type == WIRE_STORE_DONE) {
        rig.last_done = m->rc;
        __atomic_add_fetch(&rig.dones, 1, __ATOMIC_RELEASE);
    }
}

static void on_closed(void *arg, struct kv_link *l, int rc)
{
    rig.link = NULL;
    __atomic_add_fetch(&rig.closed, 1, __ATOMIC_RELEASE);
}

static bool is_busy(void *arg, const struct kv_link *l)
{
    return false;
}

static void on_pump(void *arg)
{
}

static void dial(void *arg)
{
    rig.link = kv_link_dial(&rig.links, kv_server_address(rig.server), NULL);
}

static void say(void *arg)
{
    if (rig.link) {
        rig.say(&rig);
    }
}

static bool is_ready(void *arg)
{
    return __atomic_load_n(&rig.ready, __ATOMIC_ACQUIRE);
}

static bool is_closed(void *arg)
{
    return __atomic_load_n(&rig.closed, __ATOMIC_ACQUIRE) > 0;
}

static bool is_done(void *arg)
{
    return __atomic_load_n(&rig.dones, __ATOMIC_ACQUIRE) > 0;
}

static bool is_free(void *arg)
{
    return kv_server_stats(rig.server).clients == 0 && kv_tiers_stats(rig.w.tiers).n_pins == 0;
}

/* A connection of a client; `key`: it tells of memory of its own. */
static void connect_anew(const char *transports, bool key)
{
    struct kv_links_cfg lc = {
        .net = {.listen = "127.0.0.1:0", .transports = transports},
        .node_name = "x0",
        .incarnation = 9,
        .silence_ns = SILENCE_NS,
        .base = rig.memory,
        .bytes = sizeof(rig.memory),
        .ops = {&rig, on_ready, on_message, on_closed, is_busy, on_pump},
    };
    struct bt_err err = {0};

    rig.ready = rig.closed = rig.haves = rig.misses = rig.dones = 0;
    if (kv_links_init(&rig.links, &lc, &err) != BT_OK) {
        fail_msg("%s", err.msg);
    }
    if (!key) {
        rig.links.key.n = 0;
    }
    kv_links_call(&rig.links, dial, NULL);
    assert_true(eventually(is_ready, NULL));
}

static void rig_open(const char *transports, const char *method)
{
    struct kv_server_cfg sc = {
        .net = {.listen = "127.0.0.1:0", .transports = transports, .method = method},
        .node_name = "s0",
        .incarnation = 3,
        .takes_puts = true,
        .silence_ns = SILENCE_NS,
    };
    struct bt_err err = {0};

    rig = (struct rig){.seed = 1, .tcp = transports != NULL};
    world_make(&rig.w, 64, 64);
    world_start(&rig.w);
    chain_make(&rig.w, &rig.chain, 1, 0, 2, 8);
    assert_int_equal(offer_chain(&rig.w, &rig.chain), 8);
    sc.tiers = rig.w.tiers;
    if (kv_server_create(&sc, &rig.server, &err) != BT_OK) {
        fail_msg("%s", err.msg);
    }
}

static void rig_close(void)
{
    kv_server_destroy(rig.server);
    assert_int_equal(kv_tiers_stats(rig.w.tiers).n_pins, 0);
    assert_int_equal(take_chain(&rig.w, &rig.chain), 8);
    world_free(&rig.w);
}

/* A PUT of a block of its own, of right form. */
static void put_of(struct rig *r, uint8_t method, uint64_t req, int32_t salt, uint64_t offset)
{
    int32_t ids[BLOCK];
    uint64_t sums[KV_BLOB_MAX_LAYERS] = {0};
    struct kv_blob_shape shape = kv_blob_shape_of(kv_pool_layout(r->w.pool), BLOCK);
    struct kv_blob_meta m = {.shape = shape, .n_tokens = BLOCK, .ids = ids, .sums = sums};
    struct wire_store msg = {
        .type = WIRE_STORE_PUT, .req = req, .method = method, .offset = offset};
    struct kv_hasher *hasher;
    char head[16384];

    for (int i = 0; i < BLOCK; i++) {
        ids[i] = salt + i;
    }
    m.root = m.parent = r->chain.keys[0];
    m.prefix = kv_blob_prefix(0, ids, BLOCK);
    assert_int_equal(kv_hasher_create(&hasher, NULL), BT_OK);
    kv_key_block(hasher, &m.parent, ids, BLOCK, &m.key);
    kv_hasher_destroy(hasher);
    assert_true(kv_blob_head_bytes(&m) <= sizeof(head));
    kv_blob_encode(&m, head);
    kv_link_send(r->link, &msg, (struct bt_str){head, kv_blob_head_bytes(&m)});
}

static void say_put_to_pull(struct rig *r)
{
    put_of(r, BT_NET_METHOD_PULL, 1, 7000, 0);
}

/* To be pulled from memory that the client has given no key of. */
static void test_memory_without_a_key(void **state)
{
    static const char *const transports[] = {"tcp", NULL};

    for (int i = 0; i < 2; i++) {
        for (int key = 0; key < 2; key++) {
            rig_open(transports[i], NULL);
            connect_anew(transports[i], key);
            rig.say = say_put_to_pull;
            kv_links_call(&rig.links, say, NULL);
            assert_true(eventually(key || !transports[i] ? is_done : is_closed, NULL));
            assert_true(!is_done(NULL) || rig.last_done == BT_E_CORRUPT);
            kv_links_fini(&rig.links);
            assert_true(eventually(is_free, NULL));
            connect_anew(transports[i], true); /* it is there for others */
            kv_links_fini(&rig.links);
            rig_close();
        }
    }
}

static uint64_t rnd(uint64_t n)
{
    rig.seed = rig.seed * 6364136223846793005ull + 1442695040888963407ull;
    return (rig.seed >> 33) % n;
}

static const uint64_t odd[] = {
    0, 1, 2, 3, 31, 32, 255, 4096, 65536, UINT32_MAX, UINT64_MAX / 2, UINT64_MAX};

static uint64_t odd_one(void)
{
    return rnd(3) ? rnd(4) : odd[rnd(BT_ARRAY_LEN(odd))];
}

static void get_of(struct rig *r, uint64_t req)
{
    struct kv_blob_shape shape = kv_blob_shape_of(kv_pool_layout(r->w.pool), BLOCK);
    uint32_t first = (uint32_t)rnd(8), n = 1 + (uint32_t)rnd(4), b;
    struct wire_store m = {.type = WIRE_STORE_GET,
                           .req = req,
                           .method = (uint8_t)rnd(3),
                           .n_items = n,
                           .n_layers = shape.n_layers,
                           .block_tokens = shape.block_tokens,
                           .layer_bytes = shape.layer_bytes};
    struct bt_buf data = {0};
    uint64_t prefix = 0;

    memcpy(m.root, r->chain.c.root.b, 16);
    for (b = 0; b < 8 && b < first + n; b++) {
        struct wire_store_item item = {.n_tokens = BLOCK};

        prefix = kv_blob_prefix(prefix, r->chain.ids + (size_t)b * BLOCK, BLOCK);
        item.prefix = prefix;
        memcpy(item.key, r->chain.keys[b].b, 16);
        memcpy(item.parent, b ? r->chain.keys[b - 1].b : r->chain.c.root.b, 16);
        if (b >= first) {
            assert_int_equal(wire_store_add_item(&data, &item, r->chain.ids + (size_t)b * BLOCK),
                             BT_OK);
        }
    }
    m.n_items = b - first;
    if (rnd(4) == 0) {
        m.n_items = 1 + (uint32_t)rnd(40); /* more or fewer than there are */
        m.n_items = BT_MIN(m.n_items, (uint32_t)WIRE_STORE_MAX_ITEMS);
    }
    if (rnd(4) == 0) {
        m.layer_bytes = odd_one();
    }
    if (rnd(4) == 0) {
        m.n_layers = (uint32_t)odd_one();
    }
    if (rnd(8) == 0) {
        data.n -= BT_MIN(data.n, (size_t)rnd(60));
    }
    kv_link_send(r->link, &m, bt_buf_str(&data));
    bt_buf_fini(&data);
}

/* Anything of right form, in any order, with any numbers; often what follows on from before. */
static void say_anything(struct rig *r)
{
    char junk[300];
    struct wire_store m = {.type = (enum wire_store_type)(WIRE_STORE_PING + rnd(11)),
                           .req = rnd(5),
                           .item = (uint32_t)odd_one(),
                           .layer = (uint32_t)odd_one(),
                           .offset = odd_one(),
                           .n_layers = (uint32_t)odd_one(),
                           .rc = m.type == WIRE_STORE_DONE ? 0 : -1};
    uint64_t what = rnd(10);

    for (size_t i = 0; i < sizeof(junk); i++) {
        junk[i] = (char)rnd(256);
    }
    if (what < 3) {
        get_of(r, rnd(5));
    } else if (what < 6) {
        /* Not to be pulled over TCP: UCX ends the process whose memory is read there when the
         * reader has closed, and that is ours. */
        put_of(r, (uint8_t)(r->tcp ? 1 + rnd(2) : rnd(3)), rnd(5), (int32_t)rnd(50) * 100,
               rnd(2) ? 0 : odd_one());
    } else if (what == 6) {
        m.type = rnd(2) ? WIRE_STORE_RELEASE : WIRE_STORE_PLACED;
        kv_link_send(r->link, &m, (struct bt_str){0});
    } else if (what == 7) { /* a part of a put */
        m.type = WIRE_STORE_DATA;
        m.item = m.layer = 0;
        m.offset = rnd(2) ? 0 : sizeof(junk);
        kv_link_send(r->link, &m, (struct bt_str){junk, sizeof(junk)});
    } else if (what == 8) {
        int rc = bt_net_send(r->link->net, (struct bt_str){junk, rnd(200)}, (struct bt_str){0},
                             NULL, NULL);

        assert_true(rc == BT_OK || rc == BT_E_PEER_LOST);
    } else {
        if (m.type == WIRE_STORE_GET || m.type == WIRE_STORE_HELLO) {
            m.type = WIRE_STORE_GO;
        }
        kv_link_send(r->link, &m, (struct bt_str){junk, rnd(2) ? rnd(sizeof(junk)) : 0});
    }
}

static void say_some(struct rig *r)
{
    for (uint64_t n = 1 + rnd(12); n > 0 && r->link && !r->link->closing; n--) {
        say_anything(r);
    }
}

static void test_anything_in_any_order(void **state)
{
    static const char *const transports[] = {"tcp", NULL};

    for (int i = 0; i < 2; i++) {
        rig_open(transports[i], NULL);
        for (uint64_t round = 0; round < 60; round++) {
            rig.seed = 1000 * (uint64_t)i + round;
            connect_anew(transports[i], rnd(4) > 0);
            rig.say = say_some;
            kv_links_call(&rig.links, say, NULL);
            if (rnd(2)) {
                kv_links_call(&rig.links, say, NULL);
            }
            kv_links_fini(&rig.links);
            assert_true(eventually(is_free, NULL));
        }
        rig_close();
    }
}

/* ---- a daemon that lives, and answers nothing ---- */

static void mute(void *arg, struct kv_link *l, const struct wire_store *m, struct bt_str data)
{
}

static void no_ready(void *arg, struct kv_link *l)
{
}

static void no_closed(void *arg, struct kv_link *l, int rc)
{
}

/* Puts to it end all the same, so that their memory and the pages of who offers are not held. */
static void test_KVX_01_puts_that_nobody_ends(void **state)
{
    static const char *const methods[] = {"message", "pull"};
    static char memory[1 << 16];
    struct bt_cluster_conf conf = {.name = (char *)(uintptr_t) "test",
                                   .redis_address = (char *)(uintptr_t) "",
                                   .redis_user = (char *)(uintptr_t) "",
                                   .redis_password = (char *)(uintptr_t) "",
                                   .redis_timeout_ns = BT_NS_PER_S,
                                   .lookup_timeout_ns = BT_NS_PER_S,
                                   .block_ttl_ns = 600 * BT_NS_PER_S};

    for (int i = 0; i < 2; i++) {
        struct kv_links_cfg lc = {.net = {.listen = "127.0.0.1:0", .method = methods[i]},
                                  .node_name = "s0",
                                  .incarnation = 4,
                                  .silence_ns = SILENCE_NS,
                                  .base = memory,
                                  .bytes = sizeof(memory),
                                  .serves = true,
                                  .ops = {NULL, no_ready, mute, no_closed, is_busy, on_pump}};
        struct kv_client_cfg cc = {.net = {.listen = "127.0.0.1:0", .method = methods[i]},
                                   .node_name = "p0",
                                   .incarnation = 5,
                                   .replicas = 1,
                                   .silence_ns = SILENCE_NS,
                                   .load_limit_ns = 300 * BT_NS_PER_MS,
                                   .lend_ns = 100 * BT_NS_PER_MS,
                                   .staging_bytes = 2 * BLOB_BYTES};
        struct bt_blockmap_cfg bc = {.conf = &conf};
        struct bt_member m = {.name = "s0", .incarnation = 4, .role = BT_ROLE_KVSTORE};
        struct bt_members *members;
        struct bt_blockmap *map;
        struct kv_client *client;
        struct kv_links daemon;
        struct bt_err err = {0};
        struct world w;
        struct chain c;

        if (kv_links_init(&daemon, &lc, &err) != BT_OK) {
            fail_msg("%s", err.msg);
        }
        snprintf(m.store_addr, sizeof(m.store_addr), "%s", bt_net_address(daemon.net));
        members = bt_members_make(&m, 1, NULL, 0);
        assert_non_null(members);
        world_make(&w, 64, 1);
        chain_make(&w, &c, 1, 0, 2, 6);
        cc.shape = kv_blob_shape_of(kv_pool_layout(w.pool), BLOCK);
        assert_int_equal(bt_blockmap_create(&bc, &map, NULL), BT_OK);
        cc.blockmap = map;
        if (kv_client_create(&cc, &client, &err) != BT_OK) {
            fail_msg("%s", err.msg);
        }
        kv_client_set_members(client, members);
        w.src = kv_client_source(client);
        /* All end. There is room for two; others may be given up where this machine is slow. */
        assert_in_range(offer_chain(&w, &c), 2, 6);
        kv_client_destroy(client);
        bt_blockmap_destroy(map);
        bt_members_unref(members);
        w.src = NULL;
        world_free(&w);
        kv_links_fini(&daemon);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_memory_without_a_key),
        cmocka_unit_test(test_anything_in_any_order),
        cmocka_unit_test(test_KVX_01_puts_that_nobody_ends),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
