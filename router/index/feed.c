/* See feed.h. */
#include "router/index/feed.h"

#define BATCH 512

static const struct rt_feed_ask nothing = {0};

void rt_feed_init(struct rt_feed *f)
{
    *f = (struct rt_feed){.view = RT_VIEW_NONE, .building = RT_VIEW_NONE};
}

int rt_feed_open(struct rt_feed *f, struct rt_index *index)
{
    rt_feed_init(f);
    f->index = index;
    return rt_index_open(index, &f->view);
}

void rt_feed_limit(struct rt_feed *f, uint64_t most)
{
    f->most = most;
    if (f->view != RT_VIEW_NONE) {
        rt_index_limit(f->index, f->view, most);
    }
}

void rt_feed_close(struct rt_feed *f)
{
    rt_index_close(f->index, f->building);
    rt_index_close(f->index, f->view);
    f->view = f->building = RT_VIEW_NONE;
}

/* Asks, unless the same was asked a moment ago. */
static struct rt_feed_ask ask(struct rt_feed *f, bool snapshot, uint64_t now_ns)
{
    bool open = f->asked_ns != 0 && now_ns - f->asked_ns < RT_FEED_PATIENCE_NS;

    if (open && (f->drifted || !snapshot)) {
        return nothing;
    }
    f->asked_ns = now_ns;
    f->drifted = snapshot || f->drifted;
    return (struct rt_feed_ask){true, f->seq, f->drifted};
}

struct rt_feed_ask rt_feed_begin(struct rt_feed *f, uint64_t now_ns)
{
    if (f->view == RT_VIEW_NONE) {
        return nothing;
    }
    f->asked_ns = 0;
    rt_index_close(f->index, f->building);
    f->building = RT_VIEW_NONE;
    return ask(f, f->drifted, now_ns);
}

/* ---- events ---- */

static uint64_t count(const Baton__V1__CacheEvents *m)
{
    uint64_t n = 0;

    for (size_t i = 0; i < m->n_events; i++) {
        const Baton__V1__CacheEvent *e = m->events[i];

        n += (int)e->change == BATON__V1__CACHE_CHANGE__CACHE_CLEARED ? 1 : e->n_blocks;
    }
    return n;
}

/* Applies them. What is missing for lack of memory the digest tells. */
static bool apply_all(struct rt_feed *f, uint16_t view, const struct kv_event *ev, size_t n)
{
    return rt_index_apply(f->index, view, ev, n) == BT_E_EXHAUSTED;
}

/* One CacheEvent without its first `skip` blocks. Unknown tiers and changes are counted and left
 * out: a later version's. */
static void apply(struct rt_feed *f, const Baton__V1__CacheEvent *e, uint64_t skip)
{
    struct kv_event buf[BATCH];
    size_t n = 0;

    if ((unsigned)e->tier >= KV_EVENT_TIERS || (unsigned)e->change > KV_EVENT_CLEARED) {
        return;
    }
    if ((int)e->change == BATON__V1__CACHE_CHANGE__CACHE_CLEARED) {
        buf[n++] = (struct kv_event){0, KV_EVENT_CLEARED, (uint8_t)e->tier};
    } else {
        for (size_t i = skip; i < e->n_blocks; i++) {
            buf[n++] = (struct kv_event){e->blocks[i], (uint8_t)e->change, (uint8_t)e->tier};
            if (n == BATCH) {
                f->full |= apply_all(f, f->view, buf, n);
                n = 0;
            }
        }
    }
    if (n > 0) {
        f->full |= apply_all(f, f->view, buf, n);
    }
}

struct rt_feed_ask
rt_feed_events(struct rt_feed *f, const Baton__V1__CacheEvents *m, uint64_t now_ns)
{
    uint64_t n, skip;

    if (f->view == RT_VIEW_NONE || m->seq == 0) {
        return nothing;
    }
    if (m->seq > f->seq + 1) {
        f->gaps++;
        return ask(f, false, now_ns);
    }
    n = count(m);
    skip = f->seq + 1 - m->seq;
    if (n <= skip) {
        return nothing; /* known */
    }
    f->changes += n - skip;
    f->seq = m->seq + n - 1;
    for (size_t i = 0; i < m->n_events; i++) {
        const Baton__V1__CacheEvent *e = m->events[i];
        uint64_t here = (int)e->change == BATON__V1__CACHE_CHANGE__CACHE_CLEARED ? 1 : e->n_blocks;

        if (here > skip) {
            apply(f, e, skip);
        }
        skip -= BT_MIN(skip, here);
    }
    if (!f->drifted) {
        f->asked_ns = 0; /* answered */
    }
    return nothing;
}

/* ---- snapshots ---- */

static void add_blocks(struct rt_feed *f, const Baton__V1__CacheSnapshot *m)
{
    struct kv_event buf[BATCH];
    size_t n = 0;

    if ((unsigned)m->tier >= KV_EVENT_TIERS) {
        return;
    }
    for (size_t i = 0; i < m->n_blocks; i++) {
        buf[n++] = (struct kv_event){m->blocks[i], KV_EVENT_STORED, (uint8_t)m->tier};
        if (n == BATCH || i + 1 == m->n_blocks) {
            f->building_full |= apply_all(f, f->building, buf, n);
            n = 0;
        }
    }
}

struct rt_feed_ask rt_feed_snapshot(struct rt_feed *f,
                                    const Baton__V1__CacheSnapshot *m,
                                    uint64_t now_ns,
                                    uint16_t *ret_old)
{
    *ret_old = RT_VIEW_NONE;
    if (f->view == RT_VIEW_NONE) {
        return nothing;
    }
    if (m->first) {
        rt_index_close(f->index, f->building);
        if (rt_index_open(f->index, &f->building) < 0) {
            f->building = RT_VIEW_NONE;
        } else {
            rt_index_limit(f->index, f->building, f->most);
        }
        f->building_full = false;
        f->built = 0;
    }
    if (f->building != RT_VIEW_NONE && m->before != f->built) { /* a part was lost */
        rt_index_close(f->index, f->building);
        f->building = RT_VIEW_NONE;
        f->asked_ns = 0;
    }
    if (f->building == RT_VIEW_NONE) {
        return ask(f, true, now_ns);
    }
    f->built += m->n_blocks;
    f->asked_ns = now_ns; /* it is coming */
    add_blocks(f, m);
    if (m->last) {
        *ret_old = f->view;
        f->view = f->building;
        f->building = RT_VIEW_NONE;
        f->full = f->building_full;
        f->seq = m->seq;
        f->asked_ns = 0;
        f->drifted = false;
        f->snapshots++;
    }
    return nothing;
}

/* ---- the digest ---- */

static bool agrees(const struct rt_feed *f, const Baton__V1__NodeLoad *m)
{
    for (size_t i = 0; i < m->n_tiers; i++) {
        unsigned tier = (unsigned)m->tiers[i]->tier;

        if (tier < RT_INDEX_TIERS) {
            struct kv_digest d = rt_index_digest(f->index, f->view, tier);

            if (d.n != m->tiers[i]->blocks || d.sum != m->tiers[i]->sum) {
                return false;
            }
        }
    }
    return true;
}

/* Those in several tiers counted as often. */
static uint64_t n_blocks(const Baton__V1__NodeLoad *m)
{
    uint64_t n = 0;

    for (size_t i = 0; i < m->n_tiers; i++) {
        n += m->tiers[i]->blocks;
    }
    return n;
}

struct rt_feed_ask rt_feed_load(struct rt_feed *f, const Baton__V1__NodeLoad *m, uint64_t now_ns)
{
    if (f->view == RT_VIEW_NONE) {
        return nothing;
    }
    if (m->cache_seq > f->seq) {
        f->gaps++;
        return ask(f, false, now_ns);
    }
    if (m->cache_seq < f->seq) { /* an older load, overtaken by events */
        return nothing;
    }
    if (agrees(f, m)) {
        f->full = false;
        return nothing;
    }
    if (f->full && n_blocks(m) > f->most) { /* it is known what is missing */
        return nothing;
    }
    f->drifts++;
    return ask(f, true, now_ns);
}
