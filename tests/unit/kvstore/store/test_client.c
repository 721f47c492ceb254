/* Block servers and a client in one process, over real UCX on loopback, with a real Redis: what one
 * puts another gets, whoever dies in between. The engine's side is the tiers' fixture. */
#include "tests/unit/kvstore/tier/fixture.h"
#define eventually redis_eventually /* the fixture of the tiers has one, too */
#include "tests/unit/common/cluster/redis_fixture.h"
#undef eventually

#include "kvstore/store/announce.h"
#include "kvstore/store/client.h"
#include "kvstore/store/link.h"
#include "kvstore/store/server.h"

#define N_STORES 3

/* A store's daemon: tiers, server, its entry in the registry and its blocks in the index. */
struct store {
    struct world w; /* its tiers; made without a source */
    struct kv_server *server;
    struct bt_registry *registry;
    struct bt_blockmap *blockmap;
    char name[16];
    uint64_t incarnation;
};

struct rig {
    struct bt_cluster_conf conf;
    struct store stores[N_STORES];
    struct world w; /* the engine's pool; its source is the client */
    struct kv_client *client;
    struct bt_registry *registry;
    struct bt_blockmap *blockmap;
    const char *transports, *method;
    uint32_t replicas;
    uint64_t pinned;
};

static struct rig rig;

static void on_store_events(void *arg, const struct kv_tiers_event *ev, size_t n)
{
    struct store *s = arg;
    struct bt_blockmap *bm = __atomic_load_n(&s->blockmap, __ATOMIC_ACQUIRE);

    if (bm) { /* else it lists everything when it starts */
        kv_announce_events(bm, s->w.tiers, ev, n);
    }
}

static void on_store_members(void *arg, struct bt_members *take_members)
{
    struct store *s = arg;

    bt_blockmap_set_members(s->blockmap, take_members);
    bt_members_unref(take_members);
}

static void on_client_members(void *arg, struct bt_members *take_members)
{
    bt_blockmap_set_members(rig.blockmap, take_members);
    kv_client_set_members(rig.client, take_members);
    bt_members_unref(take_members);
}

static void store_open(struct store *s)
{
    struct bt_err err = {0};
    struct bt_blockmap_cfg bc = {.conf = &rig.conf, .held = kv_announce_held};
    struct kv_server_cfg sc = {
        .net = {.listen = "127.0.0.1:0", .transports = rig.transports, .method = rig.method},
        .takes_puts = true,
        .max_pinned_bytes = rig.pinned,
        .silence_ns = 1 * BT_NS_PER_S,
    };
    struct bt_member self = {.role = BT_ROLE_KVSTORE};
    struct bt_blockmap *bm;
    struct bt_registry_cfg rc = {
        .conf = &rig.conf, .self = &self, .changed = on_store_members, .arg = s};

    s->incarnation = bt_incarnation_make();
    s->w.no_source = true;
    s->w.events = on_store_events;
    s->w.arg = s;
    world_start(&s->w);
    bc.name = sc.node_name = s->name;
    bc.incarnation = sc.incarnation = self.incarnation = s->incarnation;
    bc.arg = sc.tiers = s->w.tiers;
    assert_int_equal(bt_blockmap_create(&bc, &bm, &err), BT_OK);
    __atomic_store_n(&s->blockmap, bm, __ATOMIC_RELEASE); /* the tiers tell of blocks already */
    if (kv_server_create(&sc, &s->server, &err) != BT_OK) {
        fail_msg("%s", err.msg);
    }
    snprintf(self.name, sizeof(self.name), "%s", s->name);
    snprintf(self.grpc_addr, sizeof(self.grpc_addr), "127.0.0.1:1");
    snprintf(self.store_addr, sizeof(self.store_addr), "%s", kv_server_address(s->server));
    assert_int_equal(bt_registry_create(&rc, &s->registry, &err), BT_OK);
}

/* As a process that is killed leaves things: members and index still name it. */
static void store_close(struct store *s)
{
    kv_server_destroy(s->server);
    s->server = NULL;
    bt_registry_destroy(s->registry);
    s->registry = NULL;
    bt_blockmap_destroy(s->blockmap);
    s->blockmap = NULL;
    world_stop(&s->w);
}

static uint32_t daemons(void)
{
    return kv_client_stats(rig.client).daemons;
}

static bool all_known(void *arg)
{
    return daemons() == N_STORES && bt_blockmap_up(rig.blockmap);
}

struct rig_opts {
    const char *transports, *method;
    uint32_t replicas, blobs;
    uint64_t pinned; /* bytes for one client */
    bool disk;
};

static void rig_open(struct rig_opts o)
{
    struct bt_err err = {0};
    struct bt_registry_cfg rc = {.conf = &rig.conf, .changed = on_client_members};
    struct bt_blockmap_cfg bc = {.conf = &rig.conf};
    struct kv_client_cfg cc = {
        .net = {.listen = "127.0.0.1:0", .transports = o.transports, .method = o.method},
        .node_name = "p0",
        .incarnation = 5,
        .replicas = o.replicas,
        .silence_ns = 1 * BT_NS_PER_S,
    };

    redis_start("pass");
    rig = (struct rig){
        .transports = o.transports, .method = o.method, .replicas = o.replicas, .pinned = o.pinned};
    rig.conf = (struct bt_cluster_conf){.name = (char *)(uintptr_t) "test",
                                        .lease_ns = 2 * BT_NS_PER_S,
                                        .poll_ns = 50 * BT_NS_PER_MS,
                                        .redis_address = address,
                                        .redis_user = (char *)(uintptr_t) "",
                                        .redis_password = (char *)(uintptr_t) "pass",
                                        .redis_timeout_ns = 1 * BT_NS_PER_S,
                                        .lookup_timeout_ns = 1 * BT_NS_PER_S,
                                        .block_ttl_ns = 600 * BT_NS_PER_S};
    for (int i = 0; i < N_STORES; i++) {
        struct store *s = &rig.stores[i];

        snprintf(s->name, sizeof(s->name), "store-%d", i);
        world_make(&s->w, 8, o.blobs ? o.blobs : 256);
        if (o.disk) {
            world_with_disk(&s->w, 1000);
        }
        store_open(s);
    }
    world_make(&rig.w, 256, 1);
    cc.shape = kv_blob_shape_of(kv_pool_layout(rig.w.pool), BLOCK);
    assert_int_equal(bt_blockmap_create(&bc, &rig.blockmap, &err), BT_OK);
    cc.blockmap = rig.blockmap;
    if (kv_client_create(&cc, &rig.client, &err) != BT_OK) {
        fail_msg("%s", err.msg);
    }
    rig.w.src = kv_client_source(rig.client);
    assert_int_equal(bt_registry_create(&rc, &rig.registry, &err), BT_OK);
    assert_true(eventually(all_known, NULL));
}

static void rig_close(void)
{
    bt_registry_destroy(rig.registry);
    kv_client_destroy(rig.client);
    bt_blockmap_destroy(rig.blockmap);
    rig.w.src = NULL;
    world_free(&rig.w);
    for (int i = 0; i < N_STORES; i++) {
        if (rig.stores[i].server) {
            store_close(&rig.stores[i]);
        }
        world_free(&rig.stores[i].w);
    }
    redis_kill();
}

static uint64_t copies_held(void)
{
    uint64_t n = 0;

    for (int i = 0; i < N_STORES; i++) {
        n += rig.stores[i].server ? kv_server_stats(rig.stores[i].server).puts : 0;
    }
    return n;
}

/* All copies are in the daemons and in the index. */
static bool all_there(void *arg)
{
    uint64_t want = *(uint64_t *)arg, n = 0;

    for (int i = 0; i < N_STORES; i++) {
        n += rig.stores[i].blockmap ? bt_blockmap_stats(rig.stores[i].blockmap).n_held : 0;
    }
    return copies_held() >= want && n >= want;
}

static void put_chain(const struct chain *c)
{
    uint64_t want = copies_held() + c->c.n_blocks * BT_MIN(rig.replicas, (uint32_t)N_STORES);

    assert_int_equal(offer_chain(&rig.w, c), c->c.n_blocks);
    assert_true(eventually(all_there, &want));
}

struct wish {
    const struct chain *chain;
    uint32_t n;
};

static bool comes(void *arg)
{
    struct wish *w = arg;

    return take_chain(&rig.w, w->chain) == w->n;
}

static void test_put_and_get(struct rig_opts o)
{
    struct chain c, other;

    rig_open(o);
    chain_make(&rig.w, &c, 1, 8, 2, 20);
    chain_make(&rig.w, &other, 1, 8, 3, 20); /* shares the first 8 */
    assert_int_equal(take_chain(&rig.w, &c), 0);
    put_chain(&c);
    assert_int_equal(take_chain(&rig.w, &c), 20);
    assert_int_equal(take_chain(&rig.w, &other), 8);
    assert_int_equal(kv_client_stats(rig.client).bad, 0);
    assert_int_equal(kv_client_stats(rig.client).loaded_blocks, 28);
    assert_int_equal(offer_block(&rig.w, &c, 3), BT_PENDING); /* known: not wanted again */
    /* On one host, where nothing says how: read by the daemons from the pages. */
    if (!o.method) {
        assert_int_equal(kv_client_stats(rig.client).lent, o.transports ? 0 : 20);
    }
    for (int i = 0; i < N_STORES; i++) {
        assert_true(kv_server_stats(rig.stores[i].server).puts > 0);
        assert_int_equal(kv_server_stats(rig.stores[i].server).clients, 1);
    }
    rig_close();
}

static void test_put_and_get_by_every_method(void **state)
{
    static const char *const methods[] = {NULL, "message", "put"};

    for (int i = 0; i < 3; i++) {
        test_put_and_get((struct rig_opts){.method = methods[i], .replicas = 1});
        test_put_and_get(
            (struct rig_opts){.transports = "tcp", .method = methods[i], .replicas = 2});
    }
    test_put_and_get((struct rig_opts){.transports = "tcp", .method = "pull", .replicas = 3});
}

/* As between this version and the ones before. */
static void test_put_and_get_in_older_versions(void **state)
{
    for (int v = WIRE_STORE_VERSION_MIN; v < WIRE_STORE_VERSION; v++) {
        kv_link_version_max = v;
        test_put_and_get((struct rig_opts){.transports = "tcp", .replicas = 2});
        test_put_and_get((struct rig_opts){.method = "message", .replicas = 1});
    }
    kv_link_version_max = WIRE_STORE_VERSION;
}

static bool all_met(void *arg)
{
    for (int i = 0; i < N_STORES; i++) {
        if (kv_server_stats(rig.stores[i].server).clients != 1) {
            return false;
        }
    }
    return true;
}

/* Daemons are called as soon as they are known, in each of their lives: no load waits for that. */
static void test_daemons_are_called_in_advance(void **state)
{
    rig_open((struct rig_opts){.replicas = 1});
    assert_true(eventually(all_met, NULL));
    for (int i = 0; i < N_STORES; i++) {
        store_close(&rig.stores[i]);
        store_open(&rig.stores[i]);
        assert_true(eventually(all_met, NULL));
    }
    assert_int_equal(kv_client_stats(rig.client).finds, 0);
    assert_int_equal(kv_client_stats(rig.client).offers, 0);
    rig_close();
}

/* With replicas a daemon's death is a hit from another, before and in the middle of a load. */
static void test_daemon_lost_with_replicas(void **state)
{
    struct chain c;

    rig_open((struct rig_opts){.replicas = 2});
    chain_make(&rig.w, &c, 1, 0, 2, 40);
    put_chain(&c);
    store_close(&rig.stores[1]); /* the index and the members still name it */
    assert_int_equal(take_chain(&rig.w, &c), 40);
    rig_close();
}

static bool two_are_known(void *arg)
{
    return daemons() == 2;
}

static void test_daemon_lost_without_replicas(void **state)
{
    struct chain c;
    struct taken t;
    uint32_t n;

    rig_open((struct rig_opts){.replicas = 1});
    chain_make(&rig.w, &c, 1, 0, 2, 40);
    put_chain(&c);
    store_close(&rig.stores[1]);
    take_find(&rig.w, &c, 0, &t);
    take_load(&rig.w, &t);
    n = atomic_load(&t.load.n_good);
    assert_true(n < 40);
    assert_true(take_right(&rig.w, &c, &t, n));
    take_end(&rig.w, &t);
    /* Blocks that are computed again go to those that are left. */
    assert_true(eventually(two_are_known, NULL));
    offer_chain(&rig.w, &c);
    assert_true(eventually(comes, &(struct wish){&c, 40}));
    rig_close();
}

/* A daemon comes back within the time of its lease with its disk intact: its blocks are hits again
 * under the new incarnation. */
static void test_TIER_05_restart_with_its_disk(void **state)
{
    struct chain c;

    rig_open((struct rig_opts){.replicas = 1, .disk = true});
    chain_make(&rig.w, &c, 1, 0, 2, 40);
    put_chain(&c);
    for (int i = 0; i < N_STORES; i++) {
        kv_tiers_flush(rig.stores[i].w.tiers, bt_deadline_ns(20 * BT_NS_PER_S));
        store_close(&rig.stores[i]);
        store_open(&rig.stores[i]);
    }
    assert_true(eventually(comes, &(struct wish){&c, 40}));
    rig_close();
}

/* Redis comes back empty: everything is announced again, and nothing was overwritten. */
static void test_TIER_05_redis_restarts_empty(void **state)
{
    struct chain c;

    rig_open((struct rig_opts){.replicas = 1});
    chain_make(&rig.w, &c, 1, 0, 2, 40);
    put_chain(&c);
    redis_kill();
    assert_int_equal(take_chain(&rig.w, &c), 0); /* a miss, at once */
    redis_start("pass");
    assert_true(eventually(comes, &(struct wish){&c, 40}));
    rig_close();
}

/* Bytes that are wrong in one copy come from the other; in all copies: the run ends before them. */
static void test_damaged_blocks(void **state)
{
    struct chain c;
    struct kv_blob *blob;

    for (uint32_t replicas = 1; replicas <= 2; replicas++) {
        uint32_t damaged = 0, n;

        rig_open((struct rig_opts){.replicas = replicas});
        chain_make(&rig.w, &c, 1, 0, 2, 20);
        put_chain(&c);
        for (int i = 0; i < N_STORES && !damaged; i++) {
            struct kv_run run = kv_run_of(&c.c, 7, BLOCK, 0);

            run.n_blocks = 1;
            if (kv_tiers_pin(rig.stores[i].w.tiers, &run, &blob) == 1) {
                char *p = kv_blob_layer(rig.stores[i].w.tiers, blob, 1);

                p[5] ^= 1;
                kv_tiers_unpin(rig.stores[i].w.tiers, &blob, 1);
                damaged++;
            }
        }
        assert_int_equal(damaged, 1);
        n = take_chain(&rig.w, &c);
        assert_int_equal(n, replicas == 1 ? 7 : 20);
        assert_true(kv_client_stats(rig.client).bad <= 1);
        assert_true(replicas == 2 || kv_client_stats(rig.client).bad == 1);
        rig_close();
    }
}

/* Twice as many blocks as the daemons have room for: nobody's live lease is overwritten, everything
 * that comes is right. */
static void test_little_memory(void **state)
{
    struct chain c[6];
    uint64_t hits = 0;

    rig_open((struct rig_opts){.replicas = 1, .blobs = 40});
    for (uint32_t i = 0; i < 6; i++) {
        chain_make(&rig.w, &c[i], i + 1, 0, i + 10, 40);
        offer_chain(&rig.w, &c[i]);
        assert_true(eventually(comes, &(struct wish){&c[i], 40}));
        for (uint32_t k = 0; k < i; k++) {
            hits += take_chain(&rig.w, &c[k]); /* fails the test if a byte is wrong */
        }
    }
    assert_true(hits > 0 && hits < 15 * 40); /* some of it had to go */
    rig_close();
}

/* A daemon lends few blocks at a time: the rest of a load follows. */
static void test_leases_are_bounded(void **state)
{
    struct chain c;

    for (int i = 0; i < 2; i++) {
        rig_open((struct rig_opts){
            .replicas = 1, .pinned = 3 * BLOB_BYTES, .method = i ? "message" : NULL});
        chain_make(&rig.w, &c, 1, 0, 2, 60);
        offer_chain(&rig.w, &c);
        assert_true(eventually(comes, &(struct wish){&c, 60}));
        rig_close();
    }
}

static void test_cancelled_loads(void **state)
{
    struct chain c;

    rig_open((struct rig_opts){.replicas = 2});
    chain_make(&rig.w, &c, 1, 0, 2, 40);
    put_chain(&c);
    for (int i = 0; i < 50; i++) {
        struct taken t;

        take_find(&rig.w, &c, 0, &t);
        take_begin(&rig.w, &t);
        if (i % 3) {
            rig.w.src->ops->load_cancel(rig.w.src, &t.load);
        }
        assert_true(take_wait(&t));
        assert_true(take_right(&rig.w, &c, &t, atomic_load(&t.load.n_good)));
        take_end(&rig.w, &t);
    }
    assert_int_equal(take_chain(&rig.w, &c), 40);
    rig_close();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_put_and_get_by_every_method),
        cmocka_unit_test(test_put_and_get_in_older_versions),
        cmocka_unit_test(test_daemons_are_called_in_advance),
        cmocka_unit_test(test_daemon_lost_with_replicas),
        cmocka_unit_test(test_daemon_lost_without_replicas),
        cmocka_unit_test(test_TIER_05_restart_with_its_disk),
        cmocka_unit_test(test_TIER_05_redis_restarts_empty),
        cmocka_unit_test(test_damaged_blocks),
        cmocka_unit_test(test_little_memory),
        cmocka_unit_test(test_leases_are_bounded),
        cmocka_unit_test(test_cancelled_loads),
    };
    int rc;

    if (!redis_prepare()) {
        return 77;
    }
    rc = cmocka_run_group_tests(tests, NULL, NULL);
    redis_cleanup();
    return rc;
}
