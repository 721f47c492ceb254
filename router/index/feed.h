/* What one node says of its cache, followed: messages in, a view of the index out.
 *
 * Messages may be lost, repeated and late; the view converges to what the node has. Changes are
 * numbered, so a gap shows at the next message or load, and the feed asks for what is missing: the
 * node goes on behind the number, or sends a snapshot, which is built in a view of its own and
 * takes the old one's place when it is whole. A digest that differs at the same number means drift,
 * and asks for a snapshot. A question that nothing answers is asked again.
 *
 * Pure logic but for the index; the clock is the caller's. Thread: that of the index. */
#ifndef RT_INDEX_FEED_H
#define RT_INDEX_FEED_H

#include "proto/node.pb-c.h"
#include "router/index/index.h"

#define RT_FEED_PATIENCE_NS 200000000ull /* a question is not asked again sooner */

struct rt_feed {
    struct rt_index *index;
    uint16_t view;                             /* RT_VIEW_NONE before open */
    uint16_t building;                         /* the snapshot that is coming in, or RT_VIEW_NONE */
    uint64_t built;                            /* blocks of it that have come */
    uint64_t seq;                              /* of the last change applied */
    uint64_t asked_ns;                         /* 0 = no question is open */
    bool drifted;                              /* the open question is for a snapshot */
    uint64_t most;                             /* blocks of a view; 0 = any number */
    bool full, building_full;                  /* the node says that it has more */
    uint64_t gaps, drifts, snapshots, changes; /* counted */
};

/* What to do after a message. */
struct rt_feed_ask {
    bool ask; /* send a CacheFollow with these */
    uint64_t after;
    bool snapshot;
};

/* A new life of a node: an empty view, and the question for all there is. Whoever opens closes.
 * BT_E_EXHAUSTED: no view is free; the node goes on without, its blocks are unknown. */
int rt_feed_open(struct rt_feed *f, struct rt_index *index) BT_MUST_USE;
void rt_feed_close(struct rt_feed *f); /* also one that is not open, if zeroed by init */
void rt_feed_init(struct rt_feed *f);

/* The view holds at most so many blocks. A node that has more is followed as far as that goes: what
 * is beyond is unknown (f->full), which is no drift until it would fit again. */
void rt_feed_limit(struct rt_feed *f, uint64_t most);

/* The first question of a session; state of an earlier session of the same life is kept. */
struct rt_feed_ask rt_feed_begin(struct rt_feed *f, uint64_t now_ns);
struct rt_feed_ask
rt_feed_events(struct rt_feed *f, const Baton__V1__CacheEvents *m, uint64_t now_ns);
/* *ret_old: RT_VIEW_NONE, or the view whose place another one has taken. The caller withdraws its
 * guesses from it, makes them in f->view and closes it. */
struct rt_feed_ask rt_feed_snapshot(struct rt_feed *f,
                                    const Baton__V1__CacheSnapshot *m,
                                    uint64_t now_ns,
                                    uint16_t *ret_old);
struct rt_feed_ask rt_feed_load(struct rt_feed *f, const Baton__V1__NodeLoad *m, uint64_t now_ns);

#endif
