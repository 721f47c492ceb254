/* Changes and snapshots (events.h) as the messages that routers follow (proto/node.proto). Nothing
 * is copied but what the caller gives room for: messages point into it and into the snapshot. Any
 * thread. */
#ifndef KV_BLOCK_EVENT_MSG_H
#define KV_BLOCK_EVENT_MSG_H

#include "kvstore/block/events.h"
#include "proto/node.pb-c.h"

_Static_assert((int)BATON__V1__CACHE_CHANGE__CACHE_STORED == (int)KV_EVENT_STORED &&
                   (int)BATON__V1__CACHE_CHANGE__CACHE_REMOVED == (int)KV_EVENT_REMOVED &&
                   (int)BATON__V1__CACHE_CHANGE__CACHE_CLEARED == (int)KV_EVENT_CLEARED,
               "sent as they are");

/* Room for the message of n changes. */
struct kv_event_room {
    Baton__V1__CacheEvent *runs;  /* [n] */
    Baton__V1__CacheEvent **ptrs; /* [n] */
    uint64_t *fingerprints;       /* [n] */
};

/* Runs of equal kind and tier become one CacheEvent. The caller sets seq and rank. */
static inline void kv_event_msg_fill(const struct kv_event *ev,
                                     size_t n,
                                     const struct kv_event_room *room,
                                     Baton__V1__CacheEvents *ret)
{
    size_t n_runs = 0;

    for (size_t i = 0; i < n; i++) {
        Baton__V1__CacheEvent *r = n_runs ? &room->runs[n_runs - 1] : NULL;

        room->fingerprints[i] = ev[i].fingerprint;
        if (!r || ev[i].kind == KV_EVENT_CLEARED || (int)r->change != (int)ev[i].kind ||
            (int)r->tier != (int)ev[i].tier) {
            r = room->ptrs[n_runs] = &room->runs[n_runs];
            n_runs++;
            baton__v1__cache_event__init(r);
            r->change = (Baton__V1__CacheChange)ev[i].kind;
            r->tier = (Baton__V1__CacheTier)ev[i].tier;
            r->blocks = room->fingerprints + i;
        }
        r->n_blocks += ev[i].kind != KV_EVENT_CLEARED;
    }
    ret->n_events = n_runs;
    ret->events = room->ptrs;
}

/* The part of a snapshot from block `at` on: blocks of one tier, at most `max`. */
static inline void kv_event_msg_part(const struct kv_event_snapshot *snap,
                                     size_t at,
                                     size_t max,
                                     Baton__V1__CacheSnapshot *ret)
{
    unsigned tier = 0;

    while (tier + 1 < KV_EVENT_TIERS && at >= snap->first[tier + 1]) {
        tier++;
    }
    ret->seq = snap->seq;
    ret->first = at == 0;
    ret->before = at;
    ret->tier = (Baton__V1__CacheTier)tier;
    ret->n_blocks = BT_MIN(snap->first[tier + 1] - at, max);
    ret->blocks = snap->fingerprints + at;
    ret->last = at + ret->n_blocks == snap->first[KV_EVENT_TIERS];
}

/* The log's digests for a load, in arrays of KV_EVENT_TIERS. */
static inline void kv_event_msg_digests(const struct kv_event_log *log,
                                        Baton__V1__CacheTierState *tiers,
                                        Baton__V1__CacheTierState **ptrs,
                                        Baton__V1__NodeLoad *ret)
{
    ret->cache_seq = kv_event_log_seq(log);
    ret->n_tiers = KV_EVENT_TIERS;
    ret->tiers = ptrs;
    for (unsigned t = 0; t < KV_EVENT_TIERS; t++) {
        struct kv_digest d = kv_event_log_digest(log, t);

        baton__v1__cache_tier_state__init(&tiers[t]);
        tiers[t].tier = (Baton__V1__CacheTier)t;
        tiers[t].blocks = d.n;
        tiers[t].sum = d.sum;
        ptrs[t] = &tiers[t];
    }
}

#endif
