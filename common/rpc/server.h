/* gRPC server on a control loop: method tables, calls, flow control, limits, drain and shutdown.
 *
 * One shape serves unary, server-stream, client-stream and bidirectional methods: messages come in
 * through `message`, go out through bt_rpc_call_send, and bt_rpc_call_finish ends the call.
 * Everything here, callbacks included, is for the loop thread; nothing blocks but destroy.
 *
 * Callers are let in here: UNAUTHENTICATED or PERMISSION_DENIED before anything else is said, also
 * for methods that do not exist. A call whose token is taken out of its file while it runs ends
 * with the same status within a second or two: what is queued for it is dropped, `closed` follows.
 * A request that cannot be decoded, is too large or has no method is answered here, with a text
 * that names the method; bytes that are not HTTP/2 only close their connection. */
#ifndef BT_RPC_SERVER_H
#define BT_RPC_SERVER_H

#include "common/rpc/loop.h"
#include "common/rpc/rpc.h"
#include "common/sec/sec.h"

struct bt_rpc_server;
struct bt_rpc_call;

/* A row of a service's table; static, outlives the server. Callbacks but `message` may be NULL.
 *
 *   open       the call arrived; nothing was read yet. May finish the call (admission).
 *   message    one request, borrowed until the return. The next one is read only after the return,
 *              and not while the call is paused: that is the flow control towards the client.
 *   half_close the client sends no more. Without client_stream: right after its one message.
 *   drained    the one-shot notice of bt_rpc_call_want_drained.
 *   closed     exactly once for every call that was opened, and the last use of the call: `call`
 *              is dead afterwards. cancelled: the client cancelled, left or ran into its deadline,
 *              or the server gave up (shutdown), before the status was out.
 * No callback is called from inside a function of this header. */
struct bt_rpc_method {
    const char *path; /* "/package.Service/Method" */
    const ProtobufCMessageDescriptor *request;
    const ProtobufCMessageDescriptor *response;
    unsigned access;    /* BT_ACCESS_ bits of which a caller needs one; 0 = operators alone */
    bool client_stream; /* more than one request message */
    void (*open)(struct bt_rpc_call *call);
    void (*message)(struct bt_rpc_call *call, const ProtobufCMessage *msg);
    void (*half_close)(struct bt_rpc_call *call);
    void (*drained)(struct bt_rpc_call *call);
    void (*closed)(struct bt_rpc_call *call, bool cancelled);
};

/* Borrowed by the server until it is destroyed. */
struct bt_rpc_service {
    const char *name; /* "package.Service", for reflection and health */
    const struct bt_rpc_method *methods;
    size_t n_methods;
    void *user; /* bt_rpc_call_service_user */
    /* Health, reflection, status: answered while draining, and no reason to wait at shutdown. */
    bool infrastructure;
};

/* Zero means the default named here. */
struct bt_rpc_server_config {
    struct bt_sec *sec;  /* TLS, and who may call what; NULL = plain text, everybody. Borrowed */
    bool allow_insecure; /* plain text on addresses other than loopback and unix sockets */
    size_t max_message_bytes; /* received; BT_RPC_MAX_MESSAGE_BYTES, at most 1 GiB.
                                 Unfinished messages of one connection: 4 times that + 16 MiB */
    size_t max_queued_bytes;  /* to be sent, per call; BT_RPC_MAX_QUEUED_BYTES */
    int max_calls;            /* at one time, all connections; 4096. Then the oldest call
                                 whose first message has not come makes room */
    int max_streams;          /* calls of one connection; 1024 */
    struct bt_rpc_keepalive keepalive;
};

/* `config` may be NULL. Errors: BT_E_NOMEM, BT_E_CONFIG. Destroy it before its loop. */
int bt_rpc_server_create(struct bt_loop *loop,
                         const struct bt_rpc_server_config *config,
                         struct bt_rpc_server **ret_srv,
                         struct bt_err *err) BT_MUST_USE;
/* Ends what is still running (shutdown without grace), running the loop meanwhile, and frees. Not
 * inside a callback unless the shutdown is done; the `done` of shutdown is the place for that. */
void bt_rpc_server_destroy(struct bt_rpc_server *srv);

/* Before start. `address`: "127.0.0.1:7000", "[::1]:0", "localhost:0", "unix:/path". Port 0 picks
 * one: *ret_port (may be NULL) is the real one, 1 for unix sockets. Refuses with BT_E_CONFIG what
 * is neither loopback nor TLS unless allow_insecure; BT_E_IO if it cannot be bound. A certificate
 * that is exchanged later is shown to connections from then on. */
int bt_rpc_server_listen(struct bt_rpc_server *srv,
                         const char *address,
                         int *ret_port,
                         struct bt_err *err) BT_MUST_USE;
/* True for addresses that only this machine can reach; the rule that listen applies. */
bool bt_rpc_address_is_local(const char *address);
/* Before start. BT_E_EXISTS for a method path that is there already, BT_E_NOMEM. */
int bt_rpc_server_register(struct bt_rpc_server *srv,
                           const struct bt_rpc_service *service,
                           struct bt_err *err) BT_MUST_USE;
/* From here on calls come in. BT_E_NOMEM. */
int bt_rpc_server_start(struct bt_rpc_server *srv, struct bt_err *err) BT_MUST_USE;

/* New calls are refused with UNAVAILABLE, running ones go on; infrastructure goes on. */
void bt_rpc_server_drain(struct bt_rpc_server *srv);
/* Drain, refuse new connections, then cancel what still runs at `deadline_ns` (a time already
 * passed: at once). `done` is called once when no call is left; after that the server can be
 * destroyed, in `done` itself as well. A second shutdown only moves the deadline. */
void bt_rpc_server_shutdown(struct bt_rpc_server *srv,
                            uint64_t deadline_ns,
                            void (*done)(void *arg),
                            void *arg);

struct bt_loop *bt_rpc_server_loop(const struct bt_rpc_server *srv);
/* Calls that are open now, infrastructure not counted. */
size_t bt_rpc_server_n_calls(const struct bt_rpc_server *srv);
/* Registered services, for reflection; NULL past the end. */
const struct bt_rpc_service *bt_rpc_server_service(const struct bt_rpc_server *srv, size_t idx);

/* --- one call --- */

/* Serialises msg now and queues it; order is kept, one message is in flight at a time. msg must be
 * of the method's response type. BT_OK; BT_E_EXHAUSTED: more than max_queued_bytes would wait, the
 * message was not queued; BT_E_CANCELLED: after finish or cancellation; BT_E_NOMEM. */
int bt_rpc_call_send(struct bt_rpc_call *call, const ProtobufCMessage *msg) BT_MUST_USE;
/* As send, but it may wait for what follows at once, another send or the finish, to go out with it.
 */
int bt_rpc_call_queue(struct bt_rpc_call *call, const ProtobufCMessage *msg) BT_MUST_USE;
/* Sends the response headers now instead of with the first message. */
void bt_rpc_call_send_headers(struct bt_rpc_call *call);
/* Ends the call after the queued messages: `status` of enum bt_rpc_status, `text` (may be NULL) is
 * copied, cut at 1000 bytes. The first finish counts. No message comes in any more; `closed`
 * follows. */
void bt_rpc_call_finish(struct bt_rpc_call *call, int status, const char *text);
/* In `closed`: BT_E_UNAUTHENTICATED or BT_E_DENIED where the server has ended a call that ran, as
 * what it began with does not count any more; else BT_OK. */
int bt_rpc_call_refused(const struct bt_rpc_call *call);
/* finish with the status and text of a result code; `err` may be NULL. */
void bt_rpc_call_fail(struct bt_rpc_call *call, int rc, const struct bt_err *err);
/* send + finish(OK); if the message cannot be queued the call fails with the reason. */
void bt_rpc_call_reply(struct bt_rpc_call *call, const ProtobufCMessage *msg);
/* Text metadata that goes out with the status; at most 4, BT_E_INVALID for illegal keys or values,
 * BT_E_EXHAUSTED. */
int bt_rpc_call_add_trailer(struct bt_rpc_call *call,
                            const char *key,
                            const char *value) BT_MUST_USE;

/* Bytes that wait to be sent, the message in flight included: the measure for back-pressure. */
size_t bt_rpc_call_queued_bytes(const struct bt_rpc_call *call);
/* True: `drained` will be called once, when nothing waits any more. False: nothing waits now. */
bool bt_rpc_call_want_drained(struct bt_rpc_call *call);
/* No `message` and no `half_close` until resume. */
void bt_rpc_call_pause(struct bt_rpc_call *call);
void bt_rpc_call_resume(struct bt_rpc_call *call);

/* Inside `message`: the bytes that a long list of integers of the message was read from, varints as
 * bt_varints_write would write them; `list` is the list in the message. p == NULL: they are not
 * kept, as the list is short, or was written in another way. Borrowed until the return. */
struct bt_str bt_rpc_call_packed(const struct bt_rpc_call *call, const int32_t *list);

void bt_rpc_call_set_user(struct bt_rpc_call *call, void *user);
void *bt_rpc_call_user(const struct bt_rpc_call *call);
void *bt_rpc_call_service_user(const struct bt_rpc_call *call);
struct bt_loop *bt_rpc_call_loop(const struct bt_rpc_call *call);
/* BT_NEVER_NS if the client set none. */
uint64_t bt_rpc_call_deadline_ns(const struct bt_rpc_call *call);
/* Who calls, as the server's security has found; valid from `open` on. Borrowed. */
const struct bt_who *bt_rpc_call_who(const struct bt_rpc_call *call);
/* The caller of a call that lasts shows another token ("Bearer ..."), which counts from here on in
 * place of the one that the call began with. BT_E_UNAUTHENTICATED, BT_E_DENIED: not for this
 * method, nothing has changed. BT_E_NOMEM. */
int bt_rpc_call_renew(struct bt_rpc_call *call,
                      const char *authorization,
                      struct bt_err *err) BT_MUST_USE;
/* "ipv4:127.0.0.1:4711", "unix:"; never NULL, borrowed. Not authenticated. */
const char *bt_rpc_call_peer(struct bt_rpc_call *call);
/* Request metadata, keys in lower case; p == NULL if absent. Borrowed. */
struct bt_str bt_rpc_call_metadata(const struct bt_rpc_call *call, const char *key);

#endif
