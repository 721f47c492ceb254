/* One router that follows the changes of a cache: what it has not got yet, as messages of its
 * session (proto/node.proto: CacheFollow, CacheEvents, CacheSnapshot). It has a cursor in the log
 * (kvstore/block/events.h) and is sent what is behind it, as long as it reads; who falls out of the
 * log's ring, or has seen nothing yet, is sent a snapshot in parts and goes on behind it. So memory
 * is bounded whatever a router does, and one that does not follow costs nothing.
 *
 * Nodes and daemons of the KV store tell routers by it. Thread: the loop's of call and log. */
#ifndef KV_STORE_FOLLOW_H
#define KV_STORE_FOLLOW_H

#include "common/rpc/server.h"
#include "kvstore/block/events.h"
#include "proto/node.pb-c.h"

/* Embedded in a session; zeroed but for the first three. */
struct kv_follow {
    const struct kv_event_log *log; /* borrowed */
    struct bt_rpc_call *call;       /* borrowed */
    size_t most_queued;             /* bytes that may wait in the call */
    bool on;
    uint64_t seq; /* of the last change that was sent */
    struct kv_event_snapshot snapshot;
    size_t snapshot_at;
};

/* A CacheFollow has come. Pump next. */
void kv_follow_begin(struct kv_follow *f, const Baton__V1__CacheFollow *m);
/* Sends what is missing, as far as the router reads: after changes and whenever the call says that
 * it is drained. BT_OK; BT_E_NOMEM: later; the errors of bt_rpc_call_send. */
int kv_follow_pump(struct kv_follow *f) BT_MUST_USE;
/* Frees what it holds. Also one that never followed. */
void kv_follow_end(struct kv_follow *f);

/* The log's digests for a load, into the caller's memory. */
struct kv_follow_tiers {
    Baton__V1__CacheTierState at[KV_EVENT_TIERS], *ptrs[KV_EVENT_TIERS];
};
void kv_follow_fill_load(const struct kv_event_log *log,
                         struct kv_follow_tiers *buf,
                         Baton__V1__NodeLoad *m);

#endif
