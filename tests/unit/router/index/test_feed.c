/* The router's decoder of cache events against the node's log, over a line that loses messages:
 * gaps, late starts, drift, restarts, snapshots in parts. Time is simulated. */
#include "router/index/feed.h"
#include "router/sim/evnode.h"
#include "tests/unit/cmocka.h"

#define MS 1000000ull

struct line {
    struct evnode node;
    struct rt_feed feed;
    struct rt_index *index;
    uint64_t now, seed;
    unsigned loss;       /* percent of the messages of events and snapshots */
    unsigned loss_other; /* of loads and questions */
    unsigned swaps;
};

static uint64_t rnd(struct line *l)
{
    l->seed = l->seed * 6364136223846793005ull + 1442695040888963407ull;
    return l->seed >> 33;
}

static bool is_lost(struct line *l, unsigned percent)
{
    return rnd(l) % 100 < percent;
}

static void answer(struct line *l, struct rt_feed_ask ask)
{
    if (ask.ask && !is_lost(l, l->loss_other)) {
        evnode_follow(&l->node, ask.after, ask.snapshot);
    }
}

static void deliver(struct line *l, struct evnode_msg msg)
{
    Baton__V1__NodeMessage *m = baton__v1__node_message__unpack(NULL, msg.n, msg.bytes);
    uint16_t old = RT_VIEW_NONE;

    assert_non_null(m);
    if (m->kind_case == BATON__V1__NODE_MESSAGE__KIND_EVENTS) {
        answer(l, rt_feed_events(&l->feed, m->events, l->now));
    } else if (m->kind_case == BATON__V1__NODE_MESSAGE__KIND_SNAPSHOT) {
        answer(l, rt_feed_snapshot(&l->feed, m->snapshot, l->now, &old));
        l->swaps += old != RT_VIEW_NONE;
        rt_index_close(l->index, old);
    } else {
        answer(l, rt_feed_load(&l->feed, m->load, l->now));
    }
    baton__v1__node_message__free_unpacked(m, NULL);
}

static void pump(struct line *l)
{
    for (;;) {
        struct evnode_msg msg = evnode_next(&l->node);

        if (msg.n == 0) {
            return;
        }
        if (!is_lost(l, l->loss)) {
            deliver(l, msg);
        }
        free(msg.bytes);
    }
}

static void send_load(struct line *l)
{
    Baton__V1__CacheTierState tiers[KV_EVENT_TIERS], *ptrs[KV_EVENT_TIERS];
    Baton__V1__NodeMessage m = BATON__V1__NODE_MESSAGE__INIT;
    Baton__V1__NodeLoad load = BATON__V1__NODE_LOAD__INIT;
    struct evnode_msg msg;

    evnode_digests(&l->node, &load, tiers, ptrs);
    m.kind_case = BATON__V1__NODE_MESSAGE__KIND_LOAD;
    m.load = &load;
    msg = evnode_pack(&m);
    if (!is_lost(l, l->loss_other)) {
        deliver(l, msg);
    }
    free(msg.bytes);
}

static void open_line(struct line *l, unsigned loss, uint32_t ring)
{
    *l = (struct line){.now = 1000 * MS, .seed = 11, .loss = loss};
    assert_int_equal(kv_event_log_create(ring, &l->node.log, NULL), BT_OK);
    assert_int_equal(rt_index_create(&l->index, NULL), BT_OK);
    assert_int_equal(rt_feed_open(&l->feed, l->index), BT_OK);
    answer(l, rt_feed_begin(&l->feed, l->now));
}

static void close_line(struct line *l)
{
    rt_feed_close(&l->feed);
    while (rt_index_sweep(l->index)) {
    }
    assert_true(rt_index_stats(l->index).entries == 0);
    rt_index_destroy(l->index);
    kv_event_log_destroy(l->node.log);
    free(l->node.snap.fingerprints);
}

static void change(struct line *l, int n)
{
    while (n-- > 0) {
        uint64_t r = rnd(l);
        struct kv_event ev = {.fingerprint = (rnd(l) % 5000 + 1) * 0x9e3779b97f4a7c15ull,
                              .kind = r % 3 ? KV_EVENT_STORED : KV_EVENT_REMOVED,
                              .tier = (uint8_t)(r / 3 % 4)};

        assert_int_equal(kv_event_log_add(l->node.log, &ev), BT_OK);
    }
}

static bool agrees(const struct line *l)
{
    for (unsigned t = 0; t < RT_INDEX_TIERS; t++) {
        struct kv_digest a = kv_event_log_digest(l->node.log, t);
        struct kv_digest b = rt_index_digest(l->index, l->feed.view, t);

        if (a.n != b.n || a.sum != b.sum) {
            return false;
        }
    }
    return l->feed.seq == kv_event_log_seq(l->node.log);
}

/* Steps of 10 ms, a load every 500 ms as by default. How long until the pictures agree. */
static uint64_t repair_ms(struct line *l)
{
    for (uint64_t t = 10; t <= 60000; t += 10) {
        l->now += 10 * MS;
        pump(l);
        if (t % 500 == 0) {
            send_load(l);
        }
        pump(l);
        if (agrees(l)) {
            return t;
        }
    }
    return UINT64_MAX;
}

static void test_without_loss(void **state)
{
    struct line l;

    open_line(&l, 0, 4096);
    for (int i = 0; i < 50; i++) {
        change(&l, 300);
        pump(&l);
        assert_true(agrees(&l));
        send_load(&l);
    }
    assert_true(l.feed.gaps == 0 && l.feed.drifts == 0 && l.feed.snapshots == 0);
    close_line(&l);
}

/* A router that comes late: from the ring if all of it is there, else a snapshot. */
static void test_late_start(void **state)
{
    for (int ring = 16; ring <= 65536; ring *= 64) {
        struct line l;

        open_line(&l, 0, (uint32_t)ring);
        l.node.follows = false; /* the question has not come yet */
        change(&l, 5000);
        answer(&l, rt_feed_begin(&l.feed, l.now));
        pump(&l);
        assert_true(agrees(&l));
        assert_int_equal(l.feed.snapshots, ring < 5000);
        assert_int_equal(l.swaps, l.feed.snapshots);
        close_line(&l);
    }
}

/* The bar: after 10 % of the events were lost the picture is right within a second of the
 * end of the changes; here also with 30 % of all messages lost, loads and questions too, where it
 * may take longer. */
static void test_loss_is_repaired(void **state)
{
    struct line l;

    for (unsigned loss = 10; loss <= 30; loss += 20) {
        open_line(&l, loss, 4096);
        l.loss_other = loss == 10 ? 0 : loss;
        answer(&l, (struct rt_feed_ask){true, 0, false});
        for (int i = 0; i < 200; i++) {
            l.now += 10 * MS;
            change(&l, 100);
            pump(&l);
            if (i % 50 == 49) {
                send_load(&l);
            }
        }
        assert_true(repair_ms(&l) <= (loss == 10 ? 1000u : 20000u));
        assert_true(l.feed.gaps > 0);
        close_line(&l);
    }
}

/* What no gap shows: a change that did not arrive as it was sent. The digest finds it. */
static void test_drift_is_repaired(void **state)
{
    struct kv_event ev = {77, KV_EVENT_STORED, 0};
    struct line l;

    open_line(&l, 0, 4096);
    change(&l, 1000);
    pump(&l);
    assert_int_equal(rt_index_apply(l.index, l.feed.view, &ev, 1), BT_OK);
    assert_false(agrees(&l));
    assert_true(repair_ms(&l) <= 1000);
    assert_int_equal(l.feed.drifts, 1);
    assert_int_equal(l.feed.snapshots, 1);
    change(&l, 1000);
    pump(&l);
    assert_true(agrees(&l));
    close_line(&l);
}

/* A new life begins with nothing: entries of the old one are gone at once. */
static void test_restart_clears(void **state)
{
    const uint64_t fp = 0x9e3779b97f4a7c15ull;
    struct kv_event ev = {fp, KV_EVENT_STORED, 0};
    struct line l;
    size_t n;

    open_line(&l, 0, 64);
    assert_int_equal(kv_event_log_add(l.node.log, &ev), BT_OK);
    pump(&l);
    rt_index_look(l.index, &fp, 1, &n);
    assert_int_equal(n, 1);
    rt_feed_close(&l.feed);
    rt_index_look(l.index, &fp, 1, &n);
    assert_int_equal(n, 0);
    kv_event_log_destroy(l.node.log);
    assert_int_equal(kv_event_log_create(64, &l.node.log, NULL), BT_OK);
    assert_int_equal(rt_feed_open(&l.feed, l.index), BT_OK);
    answer(&l, rt_feed_begin(&l.feed, l.now));
    pump(&l);
    rt_index_look(l.index, &fp, 1, &n);
    assert_int_equal(n, 0);
    assert_true(agrees(&l));
    close_line(&l);
}

/* Messages of later versions and nonsense do no harm. */
static void test_odd_messages(void **state)
{
    Baton__V1__CacheEvents m = BATON__V1__CACHE_EVENTS__INIT;
    Baton__V1__CacheEvent e = BATON__V1__CACHE_EVENT__INIT, *p = &e;
    Baton__V1__CacheSnapshot part = BATON__V1__CACHE_SNAPSHOT__INIT;
    uint64_t fps[2] = {5, 6};
    uint16_t old;
    struct line l;

    open_line(&l, 0, 64);
    m.seq = 1;
    m.n_events = 1;
    m.events = &p;
    e.change = (Baton__V1__CacheChange)9;
    e.n_blocks = 2;
    e.blocks = fps;
    assert_false(rt_feed_events(&l.feed, &m, l.now).ask);
    assert_true(l.feed.seq == 2); /* counted, not understood */
    e.change = BATON__V1__CACHE_CHANGE__CACHE_STORED;
    e.tier = (Baton__V1__CacheTier)9;
    m.seq = 2; /* the first of them is known already */
    assert_false(rt_feed_events(&l.feed, &m, l.now).ask);
    assert_true(l.feed.seq == 3);
    m.seq = 0;
    assert_false(rt_feed_events(&l.feed, &m, l.now).ask);
    m.seq = UINT64_MAX;
    assert_true(rt_feed_events(&l.feed, &m, l.now + 1000 * MS).ask);
    assert_true(rt_feed_snapshot(&l.feed, &part, l.now + 2000 * MS, &old).ask); /* no beginning */
    assert_int_equal(old, RT_VIEW_NONE);
    assert_true(rt_index_stats(l.index).entries == 0);
    close_line(&l);
}

/* A node that says to have more than it may is followed as far as that goes, and is not asked again
 * and again for what does not fit; a picture that fits makes it one like others. */
static void test_a_full_view_is_no_drift(void **state)
{
    struct line l;

    open_line(&l, 0, 1u << 14);
    rt_feed_limit(&l.feed, 500);
    change(&l, 10000);
    pump(&l);
    assert_true(l.feed.full);
    assert_true(rt_index_stats(l.index).entries <= 500);
    assert_false(agrees(&l));
    for (int i = 0; i < 20; i++) {
        l.now += 1000 * MS;
        send_load(&l);
        change(&l, 100);
        pump(&l);
    }
    assert_int_equal(l.feed.snapshots + l.feed.drifts, 0);
    evnode_follow(&l.node, 0, true); /* a whole picture: still too large */
    pump(&l);
    assert_int_equal(l.feed.snapshots, 1);
    assert_true(l.feed.full && rt_index_stats(l.index).entries <= 1000); /* the old one unswept */
    /* What it has would fit now: one question makes it whole. */
    rt_feed_limit(&l.feed, 1u << 20);
    for (int i = 0; i < 5; i++) {
        l.now += 1000 * MS;
        send_load(&l);
        pump(&l);
    }
    assert_false(l.feed.full);
    assert_true(agrees(&l));
    assert_int_equal(l.feed.drifts, 1);
    assert_int_equal(l.feed.snapshots, 2);
    close_line(&l);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_without_loss),
        cmocka_unit_test(test_late_start),
        cmocka_unit_test(test_loss_is_repaired),
        cmocka_unit_test(test_drift_is_repaired),
        cmocka_unit_test(test_restart_clears),
        cmocka_unit_test(test_odd_messages),
        cmocka_unit_test(test_a_full_view_is_no_drift),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
