/* What a daemon keeps, told to the routers: the call Session of baton.v1.Node, of which a daemon
 * takes the hello, the following of its blocks and nothing else. So routers know what every node
 * could bring from here.
 *
 * Thread: the loop's; events may come from any. Wire: proto/node.proto, role "kvstore". */
#ifndef KV_STORE_TELL_H
#define KV_STORE_TELL_H

#include "common/cluster/member.h"
#include "common/rpc/server.h"
#include "kvstore/tier/tiers.h"

struct kv_tell; /* whoever created it owns it */

struct kv_tell_cfg {
    struct bt_loop *loop;         /* outlives it */
    const struct bt_member *self; /* borrowed */
    uint64_t heartbeat_ns;
    size_t most_queued; /* bytes that wait for a router that reads slowly */
};

int kv_tell_create(const struct kv_tell_cfg *cfg,
                   struct kv_tell **ret_tell,
                   struct bt_err *err) BT_MUST_USE;
/* When server and loop are destroyed and no events come any more. NULL is fine. */
void kv_tell_destroy(struct kv_tell *t);
/* Ends all sessions and takes no new ones. */
void kv_tell_drain(struct kv_tell *t);
uint32_t kv_tell_sessions(const struct kv_tell *t);

/* For kv_tiers_cfg.events. Any thread, one at a time; not after the loop is destroyed. */
void kv_tell_events(struct kv_tell *t,
                    struct kv_tiers *tiers,
                    const struct kv_tiers_event *ev,
                    size_t n);

/* The method Session is to be served with these. */
void kv_tell_open(struct bt_rpc_call *call, struct kv_tell *t);
void kv_tell_message(struct bt_rpc_call *call, const ProtobufCMessage *msg);
void kv_tell_half_close(struct bt_rpc_call *call);
void kv_tell_drained(struct bt_rpc_call *call);
void kv_tell_closed(struct bt_rpc_call *call, bool cancelled);

#endif
