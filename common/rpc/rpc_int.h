/* Inside of common/rpc: what loop, server and client share. Includes gRPC, so nobody else may
 * include it. Everything here is for the loop thread. */
#ifndef BT_RPC_RPC_INT_H
#define BT_RPC_RPC_INT_H

#include "common/ds/list.h"
#include "common/ds/map.h"
#include "common/rpc/lists.h"
#include "common/rpc/loop.h"
#include "common/rpc/rpc.h"
#include "common/sec/sec.h"

#include <grpc/grpc.h>
#include <grpc/grpc_security.h>

/* What a completion queue event points to; embedded in the object that waits for it. */
struct bt_cq_tag {
    void (*fn)(struct bt_cq_tag *tag, bool ok);
};

/* loop.c */
grpc_completion_queue *bt_loop_cq(struct bt_loop *loop);
/* One more tag is in flight; the loop counts it down when it arrives. */
void bt_loop_expect(struct bt_loop *loop);
/* Servers and channels count themselves in, so that destroy can tell a forgotten one. */
void bt_loop_attach(struct bt_loop *loop);
void bt_loop_detach(struct bt_loop *loop);
struct bt_rpc_arena *bt_loop_arena(struct bt_loop *loop);
/* Work that can wait until the loop would sleep: fn runs then, once. stop: it does not. */
struct bt_late {
    struct bt_list link;
    void (*fn)(struct bt_late *late);
};
void bt_loop_put_off(struct bt_loop *loop, struct bt_late *late);
static inline void bt_late_init(struct bt_late *late, void (*fn)(struct bt_late *late))
{
    bt_list_init(&late->link);
    late->fn = fn;
}
static inline bool bt_late_waits(const struct bt_late *late)
{
    return !bt_list_empty(&late->link);
}
static inline void bt_late_stop(struct bt_late *late)
{
    bt_list_remove(&late->link);
}
/* Starts a batch; a refusal is a programmer error (our input was checked before). */
void bt_loop_batch(
    struct bt_loop *loop, grpc_call *call, const grpc_op *ops, size_t n_ops, struct bt_cq_tag *tag);

/* Scratch memory for one decoded message at a time: bump allocation under a cap. */
struct bt_rpc_chunk;
struct bt_rpc_arena {
    struct bt_rpc_chunk *chunks; /* newest first */
    size_t total_bytes;          /* of all chunks */
    size_t limit_bytes;          /* for the message being decoded */
    bool exceeded;
    char why[160]; /* the last decoding failed: what for */
    /* A long list of the message, see lists.c; NULL = none. */
    const int32_t *list;
    struct bt_str list_bytes; /* what it was read from, unless that is longer than need be */
};
void bt_rpc_arena_fini(struct bt_rpc_arena *a);

/* codec.c. Decodes `buf` (kept by the caller, and alive as long as the message) into the arena,
 * whose content before is lost; valid until the next unpack. BT_E_FORMAT or BT_E_EXHAUSTED, the
 * reason in a->why. */
struct bt_rpc_unpack_args {
    const ProtobufCMessageDescriptor *desc;
    size_t limit_bytes; /* of memory */
    bool strict;        /* strings must pass bt_rpc_check_strings */
};
int bt_rpc_unpack(struct bt_rpc_arena *a,
                  const struct bt_rpc_unpack_args *args,
                  grpc_byte_buffer *buf,
                  ProtobufCMessage **ret_msg) BT_MUST_USE;
/* strings.c. BT_E_FORMAT if a string field of the message (or of one inside it) is not UTF-8 or has
 * a NUL byte; ret_why names the field and the place. The bytes need not be a whole message. */
int bt_rpc_check_strings(const ProtobufCMessageDescriptor *desc,
                         const uint8_t *p,
                         size_t n,
                         char *ret_why,
                         size_t cap) BT_MUST_USE;
/* Gives memory beyond a small reserve back. */
void bt_rpc_arena_trim(struct bt_rpc_arena *a);

/* Messages waiting to be sent on one call; the first is the one in flight, if any is. */
struct bt_rpc_sendq {
    struct bt_list items;
    size_t bytes; /* all items, the one in flight included */
    size_t max_bytes;
};
void bt_rpc_sendq_init(struct bt_rpc_sendq *q, size_t max_bytes);
/* Serialises now. BT_E_EXHAUSTED (limit passed), BT_E_NOMEM. An empty queue takes any message up to
 * the limit. */
int bt_rpc_sendq_push(struct bt_rpc_sendq *q, const ProtobufCMessage *msg) BT_MUST_USE;
/* More than the first. */
static inline bool bt_rpc_sendq_has_more(const struct bt_rpc_sendq *q)
{
    return q->items.next->next != &q->items && q->items.next != &q->items;
}
grpc_byte_buffer *bt_rpc_sendq_head(const struct bt_rpc_sendq *q);
void bt_rpc_sendq_pop(struct bt_rpc_sendq *q);
/* Drops everything but the first item when `keep_head` (it is in flight). */
void bt_rpc_sendq_drop(struct bt_rpc_sendq *q, bool keep_head);

/* guard.c: ends calls of connections whose unfinished messages grow beyond a limit. */
struct bt_rpc_conn; /* one connection with calls, by the peer's address; counted by its calls */
struct bt_rpc_guard {
    struct bt_loop *loop;
    uint64_t limit_bytes; /* unfinished messages of one connection */
    void (*exceeded)(struct bt_rpc_guard *g, struct bt_rpc_conn *c);
    struct bt_timer timer; /* runs while a call waits for a message */
    size_t n_receiving;
    struct bt_list conns;
    struct bt_map by_peer;
};
void bt_rpc_guard_init(struct bt_rpc_guard *g,
                       struct bt_loop *loop,
                       uint64_t limit_bytes,
                       void (*exceeded)(struct bt_rpc_guard *g, struct bt_rpc_conn *c));
void bt_rpc_guard_fini(struct bt_rpc_guard *g);
/* NULL for what is not watched; the functions below accept that. */
struct bt_rpc_conn *bt_rpc_conn_get(struct bt_rpc_guard *g, const char *peer);
void bt_rpc_conn_put(struct bt_rpc_conn *c);
/* A call of the connection waits for a message; that is over, with so many bytes. */
void bt_rpc_conn_wait(struct bt_rpc_conn *c);
void bt_rpc_conn_delivered(struct bt_rpc_conn *c, size_t n_bytes);

/* listener.c */
/* Lets the kernel find out, by TCP keep-alive, that the host of a connection which this process
 * accepts on `port` is gone: after 90 s of silence. Once the port is bound. */
void bt_rpc_listener_keep_alive(int port);

/* args.c */
#define BT_RPC_MAX_ARGS 24
struct bt_rpc_args {
    grpc_arg v[BT_RPC_MAX_ARGS];
    grpc_channel_args args;
};
void bt_rpc_args_server(struct bt_rpc_args *a,
                        const struct bt_rpc_keepalive *ka,
                        int max_message_bytes,
                        int max_streams);
void bt_rpc_args_client(struct bt_rpc_args *a,
                        const struct bt_rpc_keepalive *ka,
                        int max_message_bytes,
                        const int backoff_ms[2]);
void bt_rpc_args_add_str(struct bt_rpc_args *a, const char *key, const char *value);
gpr_timespec bt_rpc_to_gpr(uint64_t deadline_ns);
uint64_t bt_rpc_from_gpr(gpr_timespec t);
/* Sends gRPC's own log lines into ours; safe to repeat. */
void bt_rpc_log_init(void);
/* Last error line that gRPC logged on this thread; empty string if none since clear. */
const char *bt_rpc_log_last(void);
void bt_rpc_log_clear(void);
/* creds.c. Credentials of a server port and of a channel; the caller releases them. A new
 * connection of the port shows the newest certificate of `f->sec`; `f` outlives the server. NULL:
 * no memory.
 */
struct bt_rpc_fetcher {
    struct bt_sec *sec;
    uint64_t version; /* that core has; under its lock */
};
grpc_server_credentials *bt_rpc_server_creds(struct bt_rpc_fetcher *f);
grpc_channel_credentials *bt_rpc_channel_creds(const struct bt_pem *pem);
/* True if the peer of a call has shown a certificate with one of tls.client_names, or names do not
 * matter. */
bool bt_rpc_cert_ok(const struct bt_sec *sec, grpc_call *call);
/* Looks a key up in metadata of a call; {NULL, 0} = absent. */
struct bt_str bt_rpc_md_get(const grpc_metadata_array *md, const char *key);

#endif
