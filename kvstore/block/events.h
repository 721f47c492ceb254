/* Which blocks lie on a node, as a numbered sequence of changes: what routers follow.
 *
 * A change is (stored | removed | cleared, tier, fingerprint of the block's key). Keys are chained,
 * so a fingerprint stands for the whole prefix and needs no parent beside it. Changes are numbered
 * from 1 within one incarnation of the node. The log keeps
 *   the set    which fingerprint lies in which tiers now,
 *   a digest   per tier: how many, and the sum of their fingerprints modulo 2^64, which does not
 *              depend on the order; a follower that disagrees at the same number has drifted,
 *   a ring     the last changes, for followers that have missed some; who has missed more takes a
 *              snapshot of the set and goes on behind its number.
 * A change that changes nothing (stored twice) is not numbered. Two keys with equal fingerprints
 * count as one: fingerprints hint, the node's own index decides.
 *
 * Tiers are numbered as in enum kv_tier (kvstore/tier/source.h). Thread: one at a time. */
#ifndef KV_BLOCK_EVENTS_H
#define KV_BLOCK_EVENTS_H

#include "common/base/rc.h"

#define KV_EVENT_TIERS 4

enum kv_event_kind { KV_EVENT_STORED, KV_EVENT_REMOVED, KV_EVENT_CLEARED };

struct kv_event {
    uint64_t fingerprint; /* 0 where cleared */
    uint8_t kind;         /* enum kv_event_kind */
    uint8_t tier;         /* < KV_EVENT_TIERS */
};

/* Where owners of blocks tell of changes. Called on the owner's thread, in the order in which the
 * changes happen; must not block. fn NULL: nobody listens. */
struct kv_event_sink {
    void (*fn)(void *arg, const struct kv_event *ev);
    void *arg;
};

static inline void kv_event_tell(const struct kv_event_sink *sink,
                                 enum kv_event_kind kind,
                                 unsigned tier,
                                 uint64_t fingerprint)
{
    struct kv_event ev = {fingerprint, (uint8_t)kind, (uint8_t)tier};

    if (sink->fn) {
        sink->fn(sink->arg, &ev);
    }
}

struct kv_event_log;

struct kv_digest {
    uint64_t n, sum;
};

/* `ring`: changes kept for followers; rounded up to a power of two. BT_E_NOMEM. */
int kv_event_log_create(uint32_t ring,
                        struct kv_event_log **ret_log,
                        struct bt_err *err) BT_MUST_USE;
void kv_event_log_destroy(struct kv_event_log *log); /* NULL is fine */

/* BT_OK, also for what changes nothing; BT_E_NOMEM: the set could not grow. Then the block stays
 * unknown, which costs a hit at most. */
int kv_event_log_add(struct kv_event_log *log, const struct kv_event *ev) BT_MUST_USE;

uint64_t kv_event_log_seq(const struct kv_event_log *log); /* of the last change, 0 = none yet */
struct kv_digest kv_event_log_digest(const struct kv_event_log *log, unsigned tier);

/* Copies changes number `after` + 1 and on, at most max. False: they are not in the ring any more,
 * or `after` is a number that has not been given yet. */
bool kv_event_log_read(const struct kv_event_log *log,
                       uint64_t after,
                       struct kv_event *ret,
                       size_t max,
                       size_t *ret_n);
/* The set as it is now: fingerprints by tier, in one array that the caller frees. first[t] is
 * where tier t begins in it, first[KV_EVENT_TIERS] the end. BT_E_NOMEM. */
struct kv_event_snapshot {
    uint64_t seq; /* all changes up to this one are in it */
    uint64_t *fingerprints;
    size_t first[KV_EVENT_TIERS + 1];
};
int kv_event_log_snapshot(const struct kv_event_log *log,
                          struct kv_event_snapshot *ret) BT_MUST_USE;

#endif
