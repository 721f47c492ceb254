/* Inside of the router. All state belongs to the control loop's thread, which is main; the
 * registry's thread only posts snapshots. */
#ifndef RT_ROUTER_INT_H
#define RT_ROUTER_INT_H

#include "common/cluster/orders.h"
#include "common/cluster/registry.h"
#include "common/ds/map.h"
#include "common/file/model.h"
#include "common/node/node.h"
#include "common/rpc/client.h"
#include "common/rpc/health.h"
#include "common/rpc/reflection.h"
#include "common/rpc/server.h"
#include "kvstore/block/key.h"
#include "proto/node.pb-c.h"
#include "proto/wire/sampling_pb.h"
#include "router/answer.h"
#include "router/client.h"
#include "router/fair.h"
#include "router/http/http.h"
#include "router/index/feed.h"
#include "router/policy.h"
#include "router/states.h"
#include "router/stats.h"
#include "router/trace.h"
#include "router/work.h"

#define RT_MAX_NODES    1024
#define RT_MAX_RANKS    64 /* of a node; more are not used */
#define RT_MAX_EXCLUDED 8
#define RT_MAX_IDENTS   8 /* kinds of nodes whose block keys differ */
#define RT_VERSION_MAX  64

struct rt_conf {
    struct bt_node_conf common;
    struct bt_cluster_conf cluster;
    char *name, *listen, *model;
    int path;  /* enum rt_path */
    int route; /* enum rt_route */
    uint64_t reuse_ns, first_token_ns, node_queue_ns;
    uint64_t good_first_ns, good_token_ns;
    int64_t keep_traces;
    int64_t max_queued, tenant_queued, tenant_running;
    char *weights;
    uint64_t max_request_bytes, max_queued_bytes;
    int64_t max_active, spin_us, local_below_tokens, retries, max_node_blocks;
    uint64_t ping_ns;
    uint64_t wait_ns, node_silence_ns, drain_timeout_ns;
    struct rt_http_conf http;
};

struct rt_model;
struct rt_request;
struct rt_tok_worker;

/* Nodes whose blocks have the same keys. */
struct rt_ident {
    struct rt_compat compat;
    uint32_t block_tokens;
    struct rt_speed speed; /* of all of them together */
};

/* A share of a role's requests for nodes of one version. */
struct rt_canary {
    char version[RT_VERSION_MAX]; /* empty = none */
    unsigned percent, owed;       /* owed: percents that have not made a whole request yet */
    uint64_t n_requests, n_canary;
};

/* What a router holds; one per process, in main. */
struct rt_router {
    const struct rt_conf *conf;
    struct bt_node *node;
    char name[64];
    uint64_t incarnation;
    uint64_t random;    /* state of the generator where the system has no numbers */
    uint64_t drawn[32]; /* random numbers from the system; the first n_drawn are unused */
    size_t n_drawn;
    bool draining;

    struct bt_loop *loop;
    struct bt_rpc_server *server;
    struct rt_http *http; /* NULL = off */
    int n_shut;           /* of gRPC and HTTP, those whose drain is over */
    struct bt_health *health;
    struct bt_reflection *reflection;
    struct bt_registry *registry;
    struct rt_model *model;
    struct rt_tok_worker *tok_worker;
    char address[300];

    struct bt_list nodes;      /* struct rt_node.link */
    size_t n_nodes, n_targets; /* n_targets: of all of them */
    bool membership_frozen;
    uint64_t last_stream_id;
    uint64_t n_picked; /* attempts that got nodes */

    struct rt_stores *stores; /* NULL = none known */
    struct rt_stats stats;
    struct rt_traces *traces;
    struct bt_list requests; /* struct rt_request.link */
    size_t n_requests;       /* not DONE */

    struct { /* cache.c */
        struct rt_index *index;
        struct kv_hasher *hasher;
        struct rt_ident idents[RT_MAX_IDENTS];
        int n_idents;
        uint16_t *run_of_view; /* scratch of a look-up */
        double answer_tokens;  /* mean of answers */
        double handoff_s;      /* mean from first to second token over a handoff */
        uint64_t n_handoffs;
        uint64_t prompt_tokens, cached_tokens, expected_tokens; /* of finished requests */
        uint64_t tier_tokens[RT_TIERS];                         /* of the expected ones */
        uint64_t tier_cached[RT_TIERS];                         /* of the cached ones */
    } cache;

    struct { /* renew.c */
        struct bt_timer timer;
        uint64_t version; /* of the tokens that sessions know */
    } renew;

    struct { /* admit.c */
        struct rt_fair *fair;
        struct bt_timer timer; /* the next look while requests wait */
        bool running;
        double least_queue_s; /* of the nodes, at the last choice */
        unsigned n_targets;   /* nodes that could be chosen then */
        uint64_t refused;
    } admit;

    struct { /* orders.c */
        struct bt_orders *client;
        struct bt_order_list *list;                /* in force; NULL = none known yet */
        struct rt_canary canary[RT_ROLE_BOTH + 1]; /* by enum rt_role */
        struct bt_list waiting;                    /* calls whose orders are on their way */
    } orders;

    struct bt_msg stop_msg;
};

uint64_t rt_random(struct rt_router *r);

/* --- nodes.c: sessions with nodes --- */

enum rt_leg_kind { RT_LEG_PREFILL, RT_LEG_DECODE, RT_LEG_LOCAL };

/* One leg of a request on a node; in the node's map until the node's last word or its loss. */
struct rt_leg {
    uint64_t stream_id;
    enum rt_leg_kind kind;
    struct rt_node *node;
    struct rt_target *target; /* of node */
    struct rt_request *req;   /* NULL = cancelled or over for us: the output is dropped */
    /* cache.c */
    bool working;      /* its prompt is in node->work and own_tokens */
    uint64_t n_tokens; /* of prompt and answered */
    struct rt_work_item work;
    uint16_t guess_view; /* where its blocks are guessed, RT_VIEW_NONE = nowhere */
    const uint64_t *fps; /* [n_fps], the request's */
    size_t n_fps;
};

/* One data-parallel rank of a node: what can be chosen for a leg. Legs point to it. */
/* What all calls of one kind of op have cost since the node has started. */
#define RT_OPS_MAX 16
struct rt_op {
    char name[16];
    uint64_t calls, us, limit_us, bytes, operations;
};

struct rt_target {
    struct rt_node *node;
    uint32_t rank;
    /* From the last load, and what was sent since. */
    uint32_t pages_free, pages_unused, requests_waiting, requests_running;
    uint64_t tokens_waiting;
    uint32_t sent_requests; /* not in the load yet */
    /* cache.c */
    struct rt_feed feed;
    bool full_told;
    struct rt_speed speed;
    struct rt_work work;
    uint64_t own_tokens; /* of prompts that this router has sent and that are not done */
    uint64_t n_starts;   /* sent in this session */
    bool tells_starts;
    double oldest_s, block_s[RT_TIERS];
    uint64_t busy_us;
    struct rt_op ops[RT_OPS_MAX]; /* ops.c */
    unsigned n_ops;
};

struct rt_node {
    struct bt_list link;
    struct rt_router *router;
    enum rt_node_state state;
    char reason[200];                  /* why it is not ready, or whom it does not fit */
    char name[BT_MEMBER_NAME_MAX + 1]; /* empty: a seed that has not said */
    char address[BT_MEMBER_ADDR_MAX + 1];
    uint64_t incarnation; /* 0 = not known */
    bool registered, seed;

    struct bt_rpc_channel *channel;
    struct rt_session *session; /* NULL = none */
    struct bt_timer timer;      /* LOST: next attempt; else: silence */
    unsigned n_failures;        /* attempts since it was last welcomed */

    /* From the welcome. */
    enum rt_role role;
    uint8_t model_digest[32];
    struct rt_compat compat;
    char net_address[BT_MEMBER_ADDR_MAX + 1];
    uint32_t context_tokens, pages_total, page_tokens; /* of each rank */
    uint64_t silence_ns;
    int ident;                 /* of its block keys; -1 = unknown, no reuse */
    uint64_t feed_incarnation; /* 0 = never followed */
    uint64_t n_ever;           /* legs sent in all sessions */
    bool cordoned;
    char version[RT_VERSION_MAX];
    uint32_t wire_version;     /* of the session (proto/wire/session.h) */
    struct rt_target *targets; /* [n_targets], at least one */
    uint32_t n_targets;

    struct bt_map legs; /* stream id -> struct rt_leg */
};

void rt_nodes_init(struct rt_router *r);
/* Closes everything; requests must be done. */
void rt_nodes_fini(struct rt_router *r);
/* Takes a membership snapshot over. */
void rt_nodes_update(struct rt_router *r, const struct bt_members *ms);
/* Fills a message row; the strings are borrowed. `hex` holds 65 bytes. */
void rt_node_info(const struct rt_node *n, Baton__V1__NodeInfo *m, char hex[65]);
/* Smallest context of the ready nodes, or `model_ctx` if that is smaller. */
uint32_t rt_nodes_context(const struct rt_router *r, uint32_t model_ctx);
/* Sends a StartRequest (stream id is filled in) and makes its leg. BT_E_PEER_LOST, BT_E_EXHAUSTED,
 * BT_E_NOMEM. */
struct rt_start {
    struct rt_request *req;
    enum rt_leg_kind kind;
    Baton__V1__StartRequest *msg;
    size_t n_tokens;               /* of the prompt, which msg has packed, and of the answer */
    const struct rt_estimate *est; /* of the prompt */
};
int rt_node_start(struct rt_target *t,
                  const struct rt_start *start,
                  struct rt_leg **ret_leg) BT_MUST_USE;
/* BT_E_PEER_LOST without a session; else as bt_rpc_client_send. */
int rt_node_send(struct rt_node *n, const Baton__V1__RouterMessage *m);
/* The request does not want the leg any more: cancelled on the node if `cancel`, dropped here. */
void rt_leg_drop(struct rt_leg *leg, bool cancel);

/* --- renew.c --- */
void rt_renew_start(struct rt_router *r);
void rt_renew_stop(struct rt_router *r); /* also one that was never started */

/* --- cache.c: where prefixes lie, how fast nodes are --- */
int rt_cache_init(struct rt_router *r, struct bt_err *err) BT_MUST_USE;
void rt_cache_fini(struct rt_router *r); /* also what init has left half made */
/* The node is about to be ready: its life is followed, anew if it is another one. */
void rt_cache_welcome(struct rt_node *n, const Baton__V1__NodeWelcome *w);
void rt_cache_forget(struct rt_target *t);
/* A target without a past. */
void rt_cache_init_target(struct rt_target *t, struct rt_node *n, uint32_t rank);
/* Its state has changed: whether others may load what it has. */
void rt_cache_share(struct rt_node *n);
void rt_cache_events(struct rt_node *n, const Baton__V1__CacheEvents *m);
void rt_cache_snapshot(struct rt_node *n, const Baton__V1__CacheSnapshot *m);
void rt_cache_load(struct rt_node *n, const Baton__V1__NodeLoad *l);
/* ops.c: takes over what a load tells of ops; names that are no names, and more than RT_OPS_MAX,
 * are passed over. */
void rt_ops_load(struct rt_target *t, const Baton__V1__NodeLoad *l);
/* Completes the views of all targets (in the order of the list) and the arguments for a request. */
void rt_cache_fill_views(struct rt_request *req,
                         struct rt_node_view *views,
                         struct rt_target **targets);
void rt_cache_fill_args(const struct rt_request *req, struct rt_pick_args *a);
/* A leg is sent; has its first token (or is over, then it does nothing); is over or given up. */
void rt_leg_begin(struct rt_leg *leg, const struct rt_estimate *est);
void rt_leg_first(struct rt_leg *leg);
void rt_leg_end(struct rt_leg *leg);
/* The request has its whole answer. */
void rt_cache_finished(struct rt_request *req);
void rt_cache_free_keys(struct rt_request *req);
void rt_cache_fill_info(const struct rt_router *r, Baton__V1__CacheInfo *m);
void rt_cache_fill_node(const struct rt_node *n, Baton__V1__NodeInfo *m);

/* Calls fn for each target that has a run of the prompt's blocks; block sizes and hashes are those
 * of the node's kind. BT_E_NOMEM. */
typedef void (*rt_holder_fn)(void *arg, const struct rt_target *t, const struct rt_run *run);
struct rt_find_args {
    const int32_t *ids;
    size_t n_ids;
    const char *cache_salt;
    rt_holder_fn fn;
    void *arg;
};
int rt_cache_find(struct rt_router *r, const struct rt_find_args *a) BT_MUST_USE;

/* --- access.c: the access log --- */
/* A line for a request that has ended; does nothing where no log is configured. */
void rt_access_write(const struct rt_router *r, const struct rt_trace *t);
/* A request that never became one: refused by a limit, or because it could not be read. */
struct rt_refusal {
    const char *id, *client_id, *answer_id, *via, *tenant;
    uint64_t came_ns;
    int rc;
};
/* Its line, and it is counted. Any thread. */
void rt_access_refused(struct rt_router *r, const struct rt_refusal *f);
const char *rt_path_name(enum rt_path path);
const char *rt_role_name(enum rt_role role); /* of any node, daemons of the store included */

/* --- admit.c: who is refused, who waits, who is next --- */
int rt_admit_init(struct rt_router *r, struct bt_err *err) BT_MUST_USE;
void rt_admit_fini(struct rt_router *r);
/* A request's first attempt: refused, queued or started. */
void rt_admit(struct rt_request *req);
/* Starts what can be started; soon: in a moment, after something has become free. */
void rt_admit_run(struct rt_router *r);
void rt_admit_soon(struct rt_router *r);
/* Refuses it if its first token would be later than it may be. */
bool rt_admit_refuses(struct rt_request *req, double first_s);
void rt_admit_started(struct rt_request *req);
void rt_admit_ended(struct rt_request *req);

/* --- orders.c: cordons and canaries --- */
int rt_orders_start(struct rt_router *r, struct bt_err *err) BT_MUST_USE;
/* No call is told any more; calls that wait stay until rt_orders_fini, after the loop's end. */
void rt_orders_stop(struct rt_router *r);
void rt_orders_fini(struct rt_router *r);
bool rt_orders_cordons(const struct rt_router *r, const char *name);
/* Gets new requests. */
static inline bool rt_node_serves(const struct rt_node *n)
{
    return n->state == RT_NODE_READY && !n->cordoned;
}
/* Sets n->cordoned, after its name has become known. */
void rt_orders_mark(struct rt_node *n);
/* Takes those nodes out of the views that this request is not meant for. False: there is no canary.
 * Where a role has no node of the wanted kind all of them stay. */
bool rt_orders_hold(struct rt_request *req, struct rt_node_view *views, struct rt_target **targets);
/* A request has been placed on n. */
void rt_orders_count(struct rt_router *r, const struct rt_node *n);
/* Fills a row for each canary, RT_ROLE_BOTH + 1 at most; strings are borrowed. */
size_t rt_orders_canaries(const struct rt_router *r, Baton__V1__CanaryInfo *rows);
extern const struct bt_rpc_method rt_operator_methods[];
extern const size_t rt_operator_n_methods;

/* --- stores.c: the KV store's daemons --- */
struct rt_store {
    char name[BT_MEMBER_NAME_MAX + 1];
    uint64_t incarnation;
    char address[BT_MEMBER_ADDR_MAX + 1], net_address[BT_MEMBER_ADDR_MAX + 1];
};
void rt_stores_update(struct rt_router *r, const struct bt_members *ms);
void rt_stores_fini(struct rt_router *r);
size_t rt_stores_n(const struct rt_router *r);
/* Whether the node of the table is one of them. */
bool rt_store_has(const struct rt_router *r, const struct rt_node *n);
/* Fills a message row as rt_node_info does. */
void rt_store_info(const struct rt_router *r, size_t i, Baton__V1__NodeInfo *m);
/* The daemon that the request's prompt is to pass through; NULL if there is none that it has not
 * failed on. Borrowed until the next update. */
const struct rt_store *rt_store_pick(const struct rt_request *req);

/* --- model.c: what the router knows of the model --- */
int rt_model_open(const char *path, struct rt_model **ret_model, struct bt_err *err) BT_MUST_USE;
void rt_model_close(struct rt_model *m);
const struct bt_model_config *rt_model_config(const struct rt_model *m);
const uint8_t *rt_model_digest(const struct rt_model *m); /* 32 bytes */
const struct bt_tokenizer *rt_model_tokenizer(const struct rt_model *m);
bool rt_model_has_template(const struct rt_model *m);
/* True if a client's `name` means this model. */
bool rt_model_is(const struct rt_model *m, const char *name);
/* Appends the ids of a prompt. BT_E_INVALID, BT_E_TOO_LARGE, BT_E_UNSUPPORTED (no template). */
int rt_model_text(const struct rt_model *m,
                  const char *text,
                  struct bt_ids *ids,
                  struct bt_err *err) BT_MUST_USE;
int rt_model_chat(const struct rt_model *m,
                  const Baton__V1__Chat *chat,
                  struct bt_ids *ids,
                  struct bt_err *err) BT_MUST_USE;
int rt_model_ids(const struct rt_model *m,
                 const int32_t *given,
                 size_t n,
                 struct bt_ids *ids,
                 struct bt_err *err) BT_MUST_USE;

/* --- tokenize.c: long texts, on a thread of their own --- */

#define RT_TOK_INLINE_BYTES (16u << 10) /* shorter inputs are tokenized on the loop */
#define RT_TOK_MAX_JOBS     64

/* One input on its way. Its owner on the loop is told once through `done`, unless it has set `user`
 * to NULL before; the job and its ids are freed after that. */
struct rt_tok_job {
    struct bt_msg msg;
    struct rt_tok_worker *worker;
    char *text; /* copies; one of them */
    Baton__V1__Chat *chat;
    struct bt_ids ids;
    int rc;
    struct bt_err err;
    void (*done)(void *user, struct rt_tok_job *job); /* loop thread; may take the ids */
    void *user;
};

int rt_tok_worker_start(struct rt_router *r, struct bt_err *err) BT_MUST_USE;
/* Finishes what is queued. NULL is fine. Before the loop is destroyed. */
void rt_tok_worker_stop(struct rt_tok_worker *w);
struct rt_tok_input {
    const char *text; /* one of the two is not NULL; copied */
    const Baton__V1__Chat *chat;
    void (*done)(void *user, struct rt_tok_job *job);
    void *user;
};
/* BT_E_EXHAUSTED, BT_E_NOMEM. `done` comes later, never from inside. */
int rt_tok_start(struct rt_router *r,
                 const struct rt_tok_input *in,
                 struct rt_tok_job **ret_job,
                 struct bt_err *err) BT_MUST_USE;
/* Bytes of text in it. */
size_t rt_chat_bytes(const Baton__V1__Chat *chat);

/* --- request.c: one Generate call --- */
/* Checks the message and sets client->req, which the client's owner closes; a request may have
 * failed by then already. Errors leave nothing behind and tell the client nothing. */
int rt_request_begin(struct rt_router *r,
                     struct rt_client *client,
                     const Baton__V1__GenerateRequest *msg,
                     struct bt_err *err) BT_MUST_USE;
/* The client is gone or has its last word: whatever still runs is cancelled, the request freed. */
void rt_request_closed(struct rt_request *req);
/* A hint: the request's next token is near. REST: what it points to, some time after SELF. */
enum rt_fetch { RT_FETCH_SELF, RT_FETCH_REST };
void rt_request_fetch(const struct rt_request *req, enum rt_fetch what);
/* An output for a leg that has a request. If `last`, the leg is out of its node's map and is freed
 * by the caller afterwards. */
void rt_request_output(struct rt_leg *leg, const Baton__V1__StreamOutput *m, bool last);
/* The leg's node is lost; as with a last output. */
void rt_request_node_lost(struct rt_leg *leg, const char *why);
/* Requests by state. */
void rt_requests_count(const struct rt_router *r, size_t n[RT_REQUEST_STATE_COUNT]);
/* Nodes have come or gone: queued requests look again. */
void rt_requests_kick(struct rt_router *r);
void rt_requests_fail_all(struct rt_router *r, int rc, const char *why);

/* --- service.c --- */
/* rt_request_begin behind the bound on active requests: BT_E_EXHAUSTED. */
int rt_generate(struct rt_router *r,
                struct rt_client *client,
                const Baton__V1__GenerateRequest *msg,
                struct bt_err *err) BT_MUST_USE;
/* inspect.c: baton.v1.Inspect */
extern const struct bt_rpc_method rt_inspect_methods[];
extern const size_t rt_inspect_n_methods;
extern const struct bt_rpc_method rt_service_methods[];
extern const size_t rt_service_n_methods;

#endif
