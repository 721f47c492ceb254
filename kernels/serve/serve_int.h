/* Inside of kernels/serve. Everything here belongs to the loop thread. */
#ifndef KN_SERVE_SERVE_INT_H
#define KN_SERVE_SERVE_INT_H

#include "common/ds/map.h"
#include "common/rpc/health.h"
#include "common/rpc/reflection.h"
#include "common/rpc/server.h"
#include "kernels/serve/serve.h"
#include "kvstore/store/client.h"
#include "kvstore/store/follow.h"
#include "kvstore/store/server.h"
#include "proto/node.pb-c.h"

#define KN_MAX_SESSIONS 256
#define KN_WEIGHT_EPOCH 1
#define KN_N_SAMPLES    64 /* steps whose cost is told with a load */

enum kn_serve_state {
    KN_SERVE_READY,
    KN_SERVE_DRAINING,   /* refuses new requests, running ones go on */
    KN_SERVE_CANCELLING, /* drain_timeout is over: running ones are cancelled */
    KN_SERVE_ENDING,     /* no request is left, or not even the cancelled ones end */
};

struct kn_serve {
    const struct kn_serve_conf *conf;
    const struct kn_serve_role *role;
    struct bt_node *node;
    char name[64]; /* self.name as a C string of its own */
    uint64_t incarnation;
    enum kn_serve_state state;
    bool lost; /* the device is: whoever starts this process again finds its memory with the keeper
                */

    struct bt_model_file *file;
    uint8_t model_digest[32], kv_format[32];
    struct kv_keeper *keeper; /* NULL = none */
    struct kn_engine *engine;
    struct bt_warm *warm_pool, *warm_tiers; /* NULL = off */
    struct kv_tiers *tiers;                 /* NULL = none configured */
    struct kn_flush *flush;                 /* under way, NULL = none */
    struct kv_server *blocks; /* NULL = not part of the KV store; so are the next two */
    struct kv_client *store;
    struct bt_blockmap *blockmap; /* guarded by the lock where the tiers' thread uses it */
    pthread_mutex_t blockmap_lock;
    struct kv_handoff *handoff; /* NULL for a role without handoffs */

    struct bt_loop *loop;
    struct bt_rpc_server *server;
    struct bt_health *health;
    struct bt_reflection *reflection;
    struct bt_registry *registry;
    struct bt_member self; /* as announced */

    /* Steps from the engine; `steps_msg` tells the loop to look into the mailbox. */
    struct bt_mailbox steps;
    struct bt_msg steps_msg;
    struct bt_msg stop_msg, fenced_msg;

    struct bt_list sessions; /* struct kn_session.link */
    uint32_t n_sessions;
    struct bt_map streams; /* tag -> struct kn_stream, until the engine's last output */
    uint64_t last_tag;

    struct bt_timer heartbeat, load_soon, drain_limit;

    struct { /* cache.c */
        struct kv_event_log *log;
        struct kn_step_sample samples[KN_N_SAMPLES]; /* the last ones, in a ring */
        uint64_t busy_us;
        uint64_t n_samples; /* since the last load that told them */
    } cache;
};

/* One router's session; freed when its call is closed. */
struct kn_session {
    struct bt_list link;
    struct kn_serve *serve;
    struct bt_rpc_call *call;
    uint32_t version; /* of the session (proto/wire/session.h), from the welcome on */
    bool welcomed;
    bool closing; /* finish was called */
    char router[64];
    uint64_t incarnation;
    uint64_t n_starts;     /* StartRequests that came */
    struct bt_map streams; /* the router's stream id -> struct kn_stream */
    struct kv_follow follow;
    /* Outputs of the step at hand. */
    struct bt_list touched; /* in a list of the step, else empty */
    struct kn_session_output {
        struct kn_stream *stream;
        const struct kn_output *output;
    } * outputs;
    size_t n_outputs, cap_outputs;
};

/* One request in the engine. */
struct kn_stream {
    uint64_t tag;               /* ours, never used twice */
    uint64_t stream_id;         /* the router's */
    struct kn_session *session; /* NULL once it has ended: the output goes nowhere */
    bool logprobs;
    /* access.c */
    char request_id[64], peer[64];
    enum kn_leg leg;
    uint64_t came_ns;
    uint32_t n_prompt, n_tokens;
    struct kn_times times;
};

/* session.c */
extern const struct bt_rpc_method kn_session_methods[];
extern const size_t kn_session_n_methods;
/* Takes the outputs of one step to their sessions and frees the step. */
void kn_session_step(struct kn_serve *s, struct kn_step *take_step);
/* Sends the load to every session, at heartbeats with what ops have cost. */
void kn_session_broadcast_load(struct kn_serve *s, bool heartbeat);
/* Ends every session with `status`. */
void kn_session_end_all(struct kn_serve *s, int status, const char *text);

/* A message could not be queued: what follows from the rc of bt_rpc_call_send. */
void kn_session_send_failed(struct kn_session *ses, int rc);

/* cache.c */
int kn_cache_init(struct kn_serve *s, struct bt_err *err) BT_MUST_USE;
void kn_cache_fini(struct kn_serve *s);
/* [engine thread] */
void kn_cache_note(void *arg, struct kn_note *take_note);
/* Frees a note that nobody took. */
void kn_cache_drop(struct bt_msg *msg);
/* For owners of blocks besides the engine; any thread. */
struct kv_event_sink kn_cache_sink(struct kn_serve *s);
void kn_cache_follow(struct kn_session *ses, const Baton__V1__CacheFollow *m);
/* Sends what the session has not got yet, as far as its router reads. */
void kn_cache_pump(struct kn_session *ses);
struct kn_cache_load {
    struct kv_follow_tiers tiers;
    Baton__V1__StepSample samples[KN_N_SAMPLES], *sample_ptrs[KN_N_SAMPLES];
};
/* `buf` holds what the message points to. */
void kn_cache_fill_load(struct kn_serve *s, struct kn_cache_load *buf, Baton__V1__NodeLoad *m);

/* tiers.c: host memory and disk of the node, a source of the engine, which is created and not
 * started. No tiers are fine. */
int kn_tiers_open(struct kn_serve *s, struct bt_err *err) BT_MUST_USE;
/* After the engine has stopped. */
void kn_tiers_close(struct kn_serve *s);

/* ops.c: what ops have cost. `buf` holds what the message points to; none if nothing is counted. */
struct kn_op_rows {
    Baton__V1__OpCount rows[KN_ENGINE_OPS_MAX], *ptrs[KN_ENGINE_OPS_MAX];
};
size_t kn_ops_fill(struct kn_op_rows *buf);

/* store.c: the node's part in the KV store; between kn_tiers_open and the engine's start. */
int kn_store_open(struct kn_serve *s, struct bt_err *err) BT_MUST_USE;
void kn_store_events(struct kn_serve *s, const struct kv_tiers_event *ev, size_t n);
/* bt_registry_cfg.changed; arg is the struct kn_serve. */
void kn_store_members(void *arg, struct bt_members *take_members);
/* When the engine has stopped and no registry calls any more; stop, then close, then
 * kn_tiers_close. */
void kn_store_stop(struct kn_serve *s);
void kn_store_close(struct kn_serve *s);
void kn_store_status(struct kn_serve *s, Baton__V1__NodeStatus *m);

/* flush.c: the call FlushCache */
void kn_flush_call(struct bt_rpc_call *call, const ProtobufCMessage *msg);
void kn_flush_closed(struct bt_rpc_call *call, bool cancelled);
/* Waits for one that is under way; before the engine stops. */
void kn_flush_stop(struct kn_serve *s);

/* access.c */
void kn_access_begin(struct kn_stream *st, const Baton__V1__StartRequest *req, enum kn_leg leg);
void kn_access_end(const struct kn_serve *s, const struct kn_stream *st, const struct kn_output *o);

/* start.c: checks a StartRequest and submits it. Errors are for the router. */
int kn_start_stream(struct kn_session *ses,
                    const Baton__V1__StartRequest *req,
                    struct bt_err *err) BT_MUST_USE;
bool kn_rc_retryable(int rc);

/* output.c: builds and sends messages. Their rc is that of bt_rpc_call_send. */
int kn_output_send_step(struct kn_session *ses) BT_MUST_USE;
int kn_output_send_error(struct kn_session *ses, uint64_t stream_id, int rc, const char *text)
    BT_MUST_USE;
int kn_output_send_welcome(struct kn_session *ses) BT_MUST_USE;
int kn_output_send_load(struct kn_session *ses, bool heartbeat) BT_MUST_USE;
void kn_output_reply_status(struct kn_serve *s, struct bt_rpc_call *call);

/* run.c: a stream has ended or the load has changed otherwise. */
void kn_serve_changed(struct kn_serve *s);
/* A request ended because the device is lost: drains and ends the process, with an exit status that
 * says so. */
void kn_serve_lost(struct kn_serve *s);

#endif
