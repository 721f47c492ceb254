/* What a node tells of its cache, in any order and with any numbers: the router's index follows or
 * asks, counts what it has right, and gives everything back. An input is a row of parts, each a
 * NodeMessage; the clock goes on by 50 ms with each. */
#include "router/index/feed.h"

#include "tests/fuzz/feeder.inc.h"

#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

#define MOST 1000

static void must(bool ok)
{
    if (!ok) {
        abort();
    }
}

static void tell(struct rt_feed *f, const Baton__V1__NodeMessage *m, uint64_t now_ns)
{
    struct rt_feed_ask ask = {0};
    uint16_t old = RT_VIEW_NONE;

    if (m->kind_case == BATON__V1__NODE_MESSAGE__KIND_EVENTS) {
        ask = rt_feed_events(f, m->events, now_ns);
    } else if (m->kind_case == BATON__V1__NODE_MESSAGE__KIND_SNAPSHOT) {
        ask = rt_feed_snapshot(f, m->snapshot, now_ns, &old);
    } else if (m->kind_case == BATON__V1__NODE_MESSAGE__KIND_LOAD) {
        ask = rt_feed_load(f, m->load, now_ns);
    }
    must(!ask.ask || ask.after == f->seq);
    if (old != RT_VIEW_NONE) {
        must(old != f->view);
        rt_index_close(f->index, old);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    struct feeder in = {data, n};
    struct rt_index_stats s;
    struct rt_index *x;
    struct rt_feed f;
    struct bt_str part;
    uint64_t now_ns = 1, fps[4] = {1, 2, 3, 4};
    size_t n_runs;

    must(rt_index_create(&x, NULL) == BT_OK);
    must(rt_feed_open(&f, x) == BT_OK);
    rt_feed_limit(&f, MOST);
    rt_feed_begin(&f, now_ns);
    while (feeder_part(&in, &part)) {
        Baton__V1__NodeMessage *m =
            baton__v1__node_message__unpack(NULL, part.n, (const uint8_t *)part.p);

        now_ns += 50000000;
        if (m) {
            tell(&f, m, now_ns);
            baton__v1__node_message__free_unpacked(m, NULL);
        }
        s = rt_index_stats(x);
        must(s.dead <= s.entries && s.views <= 2 && f.view != RT_VIEW_NONE);
    }
    rt_index_look(x, fps, BT_ARRAY_LEN(fps), &n_runs);
    must(n_runs <= 2); /* a snapshot that is under way has a view of its own */
    rt_feed_close(&f);
    while (rt_index_sweep(x)) {
    }
    s = rt_index_stats(x);
    must(s.entries == 0 && s.blocks == 0 && s.views == 0 && s.guesses == 0);
    rt_index_destroy(x);
    return 0;
}
