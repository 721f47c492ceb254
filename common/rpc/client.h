/* gRPC client on a control loop: channels and calls. Same rules as server.h: loop thread only,
 * callbacks never come from inside a function of this header, nothing blocks. */
#ifndef BT_RPC_CLIENT_H
#define BT_RPC_CLIENT_H

#include "common/rpc/loop.h"
#include "common/rpc/rpc.h"

struct bt_rpc_channel;
struct bt_rpc_client_call;

enum bt_rpc_conn_state {
    BT_RPC_CONN_IDLE,       /* not connected and not trying */
    BT_RPC_CONN_CONNECTING, /* first attempt, or the next one after a failure */
    BT_RPC_CONN_READY,
    BT_RPC_CONN_FAILED, /* the last attempt failed; the next comes after the backoff */
};
const char *bt_rpc_conn_state_name(enum bt_rpc_conn_state state);

/* Zero means the default named here. */
struct bt_rpc_channel_config {
    size_t max_message_bytes; /* received; BT_RPC_MAX_MESSAGE_BYTES, at most 1 GiB */
    size_t max_queued_bytes;  /* to be sent, per call; BT_RPC_MAX_QUEUED_BYTES */
    int backoff_min_ms;       /* before the second attempt to connect; 50 */
    int backoff_max_ms;       /* 1000 */
    struct bt_rpc_keepalive keepalive;
    /* If set: TLS where it has a CA for the other side, as it is when the channel is created, and
     * its token with every call. Borrowed. */
    struct bt_sec *sec;
    /* If set: keeps the channel connected even without calls, and tells each change of state (short
     * ones may be missed). Called first with the state at the start. */
    void (*on_state)(void *user, enum bt_rpc_conn_state state);
    void *user;
};

/* `target`: "host:port", "[v6]:port", "unix:/path". Does not connect before the first call unless
 * on_state is set; a target that cannot be reached fails calls, not this. `config` may be NULL.
 * Errors: BT_E_NOMEM, BT_E_CONFIG. */
int bt_rpc_channel_create(struct bt_loop *loop,
                          const char *target,
                          const struct bt_rpc_channel_config *config,
                          struct bt_rpc_channel **ret_channel,
                          struct bt_err *err) BT_MUST_USE;
/* Cancels the calls that still run: their `closed` comes from the loop later, and bt_loop_destroy
 * waits for them. on_state is not called any more. The pointer is dead; NULL is fine. Any time,
 * inside callbacks as well. */
void bt_rpc_channel_destroy(struct bt_rpc_channel *channel);
/* Forgets the backoff: a peer that is known to be back is tried at once. */
void bt_rpc_channel_reset_backoff(struct bt_rpc_channel *channel);
/* True if certificates have been exchanged since the channel was created: what runs goes on, but a
 * new connection should be one of a new channel. */
bool bt_rpc_channel_stale(const struct bt_rpc_channel *channel);
const char *bt_rpc_channel_target(const struct bt_rpc_channel *channel);

/* Static table. `closed` comes exactly once and last; the call is dead afterwards.
 *   message  one response, borrowed until the return; the next is read only after it
 *   drained  one-shot notice of bt_rpc_client_want_drained
 *   closed   status of enum bt_rpc_status and the server's (or our own) text, "" if none
 * message and drained may be NULL. */
struct bt_rpc_client_events {
    void (*message)(struct bt_rpc_client_call *call, const ProtobufCMessage *msg);
    void (*drained)(struct bt_rpc_client_call *call);
    void (*closed)(struct bt_rpc_client_call *call, int status, const char *text);
};

struct bt_rpc_client_args {
    const char *path; /* "/package.Service/Method" */
    const ProtobufCMessageDescriptor *response;
    const struct bt_rpc_client_events *events;
    void *user;
    uint64_t deadline_ns; /* 0 or BT_NEVER_NS = none */
    bool wait_for_ready;  /* wait for a connection instead of failing when there is none; one
                             that dies with the call on it still means UNAVAILABLE */
    const struct bt_rpc_metadata *metadata; /* copied */
    size_t n_metadata;                      /* at most 8 */
    const ProtobufCMessage *request;        /* first message, may be NULL */
    bool half_close;                        /* nothing but `request` will be sent */
};

/* Starts a call of any kind; unary: request and half_close set, one `message` or none before
 * `closed`. Errors leave no call: BT_E_INVALID (metadata), BT_E_EXHAUSTED (request too large),
 * BT_E_NOMEM. */
int bt_rpc_client_start(struct bt_rpc_channel *channel,
                        const struct bt_rpc_client_args *args,
                        struct bt_rpc_client_call **ret_call,
                        struct bt_err *err) BT_MUST_USE;

/* As bt_rpc_call_send; BT_E_CANCELLED after half_close, cancel or the end of the call. */
int bt_rpc_client_send(struct bt_rpc_client_call *call, const ProtobufCMessage *msg) BT_MUST_USE;
/* Nothing more is sent after what is queued. */
void bt_rpc_client_half_close(struct bt_rpc_client_call *call);
/* Ends the call as soon as possible: no message comes any more, `closed` follows with CANCELLED, or
 * with the server's status if that was there already. */
void bt_rpc_client_cancel(struct bt_rpc_client_call *call);
size_t bt_rpc_client_queued_bytes(const struct bt_rpc_client_call *call);
bool bt_rpc_client_want_drained(struct bt_rpc_client_call *call);
/* While paused no message is read, and the end of the call shows only after a resume or cancel. */
void bt_rpc_client_pause(struct bt_rpc_client_call *call);
void bt_rpc_client_resume(struct bt_rpc_client_call *call);
void *bt_rpc_client_user(const struct bt_rpc_client_call *call);
struct bt_loop *bt_rpc_client_loop(const struct bt_rpc_client_call *call);
/* Inside `closed`: text metadata that came with the status; p == NULL if absent. Borrowed. */
struct bt_str bt_rpc_client_trailer(const struct bt_rpc_client_call *call, const char *key);

#endif
