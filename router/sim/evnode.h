/* A node's side of CacheFollow without a node: the log of changes, one follower's cursor, and the
 * messages that kernels/serve/cache.c would send, packed. For the router's decoder in tests and in
 * the replay tool. */
#ifndef RT_SIM_EVNODE_H
#define RT_SIM_EVNODE_H

#include "common/base/buf.h"
#include "kvstore/block/event_msg.h"

#include <stdlib.h>

#define EVNODE_BATCH 256
#define EVNODE_PART  8192

struct evnode {
    struct kv_event_log *log;
    uint64_t seq; /* sent up to here */
    struct kv_event_snapshot snap;
    size_t snap_at;
    bool follows;
    uint32_t rank;
};

/* One packed NodeMessage; bytes are the receiver's. */
struct evnode_msg {
    size_t n;
    uint8_t *bytes;
};

static inline struct evnode_msg evnode_pack(const Baton__V1__NodeMessage *m)
{
    struct evnode_msg out = {.n = baton__v1__node_message__get_packed_size(m)};

    out.bytes = malloc(out.n + 1);
    BT_BUG_ON(!out.bytes);
    baton__v1__node_message__pack(m, out.bytes);
    return out;
}

static inline void evnode_follow(struct evnode *e, uint64_t after, bool snapshot)
{
    free(e->snap.fingerprints);
    e->snap.fingerprints = NULL;
    e->follows = true;
    e->seq = snapshot ? UINT64_MAX : after;
}

static inline struct evnode_msg evnode_part(struct evnode *e)
{
    Baton__V1__NodeMessage m = BATON__V1__NODE_MESSAGE__INIT;
    Baton__V1__CacheSnapshot part = BATON__V1__CACHE_SNAPSHOT__INIT;
    struct evnode_msg out;

    kv_event_msg_part(&e->snap, e->snap_at, EVNODE_PART, &part);
    part.rank = e->rank;
    m.kind_case = BATON__V1__NODE_MESSAGE__KIND_SNAPSHOT;
    m.snapshot = &part;
    out = evnode_pack(&m);
    e->snap_at += part.n_blocks;
    if (part.last) {
        e->seq = e->snap.seq;
        free(e->snap.fingerprints);
        e->snap.fingerprints = NULL;
    }
    return out;
}

/* The next message for the follower; n = 0: it has everything. */
static inline struct evnode_msg evnode_next(struct evnode *e)
{
    Baton__V1__NodeMessage m = BATON__V1__NODE_MESSAGE__INIT;
    Baton__V1__CacheEvents events = BATON__V1__CACHE_EVENTS__INIT;
    Baton__V1__CacheEvent runs[EVNODE_BATCH], *ptrs[EVNODE_BATCH];
    struct kv_event ev[EVNODE_BATCH];
    uint64_t fps[EVNODE_BATCH];
    const struct kv_event_room room = {runs, ptrs, fps};
    size_t n;

    if (!e->follows) {
        return (struct evnode_msg){0};
    }
    if (!e->snap.fingerprints && !kv_event_log_read(e->log, e->seq, ev, EVNODE_BATCH, &n)) {
        BT_BUG_ON(kv_event_log_snapshot(e->log, &e->snap) < 0);
        e->snap_at = 0;
    }
    if (e->snap.fingerprints) {
        return evnode_part(e);
    }
    if (n == 0) {
        return (struct evnode_msg){0};
    }
    kv_event_msg_fill(ev, n, &room, &events);
    events.seq = e->seq + 1;
    events.rank = e->rank;
    e->seq += n;
    m.kind_case = BATON__V1__NODE_MESSAGE__KIND_EVENTS;
    m.events = &events;
    return evnode_pack(&m);
}

/* The digests of a load, into arrays of the caller. */
static inline void evnode_digests(const struct evnode *e,
                                  Baton__V1__NodeLoad *l,
                                  Baton__V1__CacheTierState tiers[KV_EVENT_TIERS],
                                  Baton__V1__CacheTierState *ptrs[KV_EVENT_TIERS])
{
    l->rank = e->rank;
    kv_event_msg_digests(e->log, tiers, ptrs, l);
}

#endif
