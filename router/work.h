/* Prompts that one router has sent to a node and that have no first token yet, in seconds by its
 * own estimates. A node computes them in about the order in which they came, so the oldest is taken
 * to be under way since it came or since the last one was done. One that takes longer
 * than expected is expected to take longer still, in proportion. Embedded in the node and its legs.
 */
#ifndef RT_WORK_H
#define RT_WORK_H

#include "common/ds/list.h"
#include "common/thr/time.h"

#define RT_WORK_OVERDUE 0.25 /* of the time that one has taken already */

struct rt_work {
    struct bt_list items; /* struct rt_work_item.link, oldest first */
    double total_s;
    uint64_t last_ns; /* when the last one was done */
};

struct rt_work_item {
    struct bt_list link;
    double s; /* expected */
    uint64_t added_ns;
};

static inline void rt_work_init(struct rt_work *w)
{
    *w = (struct rt_work){0};
    bt_list_init(&w->items);
}

static inline void
rt_work_add(struct rt_work *w, struct rt_work_item *it, double s, uint64_t now_ns)
{
    it->s = s;
    it->added_ns = now_ns;
    w->total_s += s;
    bt_list_push_back(&w->items, &it->link);
}

/* Once, at the first token or at the end. */
static inline void rt_work_done(struct rt_work *w, struct rt_work_item *it, uint64_t now_ns)
{
    bt_list_remove(&it->link);
    w->total_s = bt_list_empty(&w->items) ? 0 : w->total_s - it->s; /* no rounding stays */
    w->last_ns = now_ns;
}

/* What is left of all of it. */
static inline double rt_work_seconds(const struct rt_work *w, uint64_t now_ns)
{
    const struct rt_work_item *first;
    uint64_t since;
    double run, left;

    if (bt_list_empty(&w->items)) {
        return 0;
    }
    first = BT_LIST_ENTRY(w->items.next, const struct rt_work_item, link);
    since = BT_MAX(first->added_ns, w->last_ns);
    run = now_ns > since ? (double)(now_ns - since) / 1e9 : 0;
    left = BT_MAX(first->s - run, run * RT_WORK_OVERDUE);
    return BT_MAX(w->total_s - first->s, 0.0) + left;
}

#endif
