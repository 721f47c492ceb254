/* The service of a prefill or decode node: one code for both binaries, which differ by the legs
 * they take and by a few lines of configuration.
 *
 * Routers open one Node.Session each (proto/node.proto). Everything a session says is untrusted: it
 * is checked here before the engine sees it. The end of a session cancels what it started.
 *
 * Threads: all service state belongs to the loop thread, which is main. The engine's thread hands
 * each step over through a mailbox; the loop turns it into one StepOutput per session. See
 * kernels/serve/README.md. */
#ifndef KN_SERVE_SERVE_H
#define KN_SERVE_SERVE_H

#include "common/cluster/registry.h"
#include "common/node/node.h"
#include "kernels/engine/engine.h"
#include "kvstore/tier/tiers.h"

/* Options of both binaries; embed it and put KN_SERVE_CONF_ROWS(struct pf_conf, serve) into the
 * binary's table. */
struct kn_serve_conf {
    struct bt_node_conf common;
    char *name, *listen, *advertise, *model, *release;
    char *net_listen, *net_transports, *net_method, *store_listen;
    bool store;
    int64_t store_replicas;
    uint64_t store_stall_ns;
    int64_t threads, page_tokens, max_batch_tokens, max_running, max_waiting, max_ctx;
    int64_t block_tokens;
    int isa, kv_dtype, bring; /* kn_serve_isas, kn_serve_kv_dtypes, kn_serve_brings */
    int device;               /* kn_serve_devices */
    int numerics;             /* kn_serve_numerics */
    bool prefix_cache, profile, warm;
    uint64_t pool_bytes, max_queued_bytes;
    char *keeper_socket;
    uint64_t keeper_wait_ns;
    struct bt_cluster_conf cluster;
    struct kv_tiers_conf tiers;
    uint64_t drain_timeout_ns, heartbeat_ns, handoff_silence_ns, handoff_lease_ns;
};

extern const char *const kn_serve_isas[];
extern const char *const kn_serve_devices[];   /* auto, cpu, cuda */
extern const char *const kn_serve_numerics[];  /* fast, invariant */
extern const char *const kn_serve_brings[];    /* cheaper, always */
extern const char *const kn_serve_kv_dtypes[]; /* in the order of enum kv_dtype */

#define KN_SERVE_CONF_ROWS(S, f)                                                                   \
    BT_NODE_CONF_ROWS(S, f.common), BT_NODE_CONF_ACCESS_ROW(S, f.common),                          \
        BT_SEC_CONF_ROWS(S, f.common.sec), BT_SEC_KV_CONF_ROWS(S, f.common.sec),                   \
        BT_CLUSTER_CONF_ROWS(S, f.cluster), KV_TIERS_CONF_ROWS(S, f.tiers),                        \
        BT_CONF_STR(                                                                               \
            S, f.name, "name", "", 63,                                                             \
            "Name of this node, unique in the cluster; empty = role, host and process id."),       \
        BT_CONF_STR(S, f.release, "release", "", 63,                                               \
                    "Version that routers are told, for canaries; empty = the program's."),        \
        BT_CONF_ADDR_REQUIRED(S, f.listen, "listen", "127.0.0.1:0",                                \
                              "Address for routers (gRPC); port 0 picks a free one."),             \
        BT_CONF_ADDR(S, f.advertise, "advertise", "",                                              \
                     "Address that routers are told to use; empty = the one listened on."),        \
        BT_CONF_STR(S, f.model, "model", NULL, 4000,                                               \
                    "Model: a .gguf file or a Hugging Face directory."),                           \
        BT_CONF_ADDR_REQUIRED(S, f.net_listen, "net.listen", "127.0.0.1:0",                        \
                              "Address of the KV transfer listener; port 0 picks a free one."),    \
        BT_CONF_STR(S, f.net_transports, "net.transports", "auto", 200,                            \
                    "UCX transports for KV transfers: auto, or names such as tcp."),               \
        BT_CONF_STR(S, f.net_method, "net.method", "auto", 16,                                     \
                    "Who moves the bytes: auto; forced: pull (one host), message, put (RDMA)."),   \
        BT_CONF_BOOL(S, f.store, "store.enabled", "off",                                           \
                     "Share blocks of KV with other nodes and the KV store; needs Redis, prefix "  \
                     "reuse and tiers."),                                                          \
        BT_CONF_ADDR_REQUIRED(S, f.store_listen, "store.listen", "127.0.0.1:0",                    \
                              "Address of the block server; port 0 picks a free one."),            \
        BT_CONF_INT(S, f.store_replicas, "store.replicas", "1", 0, 8,                              \
                    "Daemons that each computed block is put to; 0 for none."),                    \
        BT_CONF_DURATION(S, f.store_stall_ns, "store.stall", "500ms", 10, 60000,                   \
                         "A holder of blocks that is silent for this long is not waited for."),    \
        BT_CONF_INT(S, f.threads, "engine.threads", "0", 0, 256,                                   \
                    "Threads that compute; 0 = as many as this process may use."),                 \
        BT_CONF_ENUM(S, f.isa, "engine.isa", "auto", kn_serve_isas,                                \
                     "Instruction set of the CPU back end."),                                      \
        BT_CONF_ENUM(S, f.device, "engine.device", "auto", kn_serve_devices,                       \
                     "Where the model runs: cuda, cpu, or auto, which is cuda where there is a "   \
                     "card that runs the model."),                                                 \
        BT_CONF_ENUM(S, f.numerics, "engine.numerics", "fast", kn_serve_numerics,                  \
                     "On a card: fast, or invariant, where a request's tokens do not depend on "   \
                     "the requests beside it (the CPU's never do)."),                              \
        BT_CONF_INT(S, f.page_tokens, "engine.page_tokens", "16", 8, 256,                          \
                    "Tokens a KV page holds; a power of two."),                                    \
        BT_CONF_BOOL(S, f.profile, "engine.profile", "on",                                         \
                     "Count time, bytes and operations of each op on the CPU, for the routers' "   \
                     "metrics."),                                                                  \
        BT_CONF_BOOL(S, f.prefix_cache, "engine.prefix_cache", "on",                               \
                     "Reuse the KV of prompts and answers that begin like earlier ones."),         \
        BT_CONF_ENUM(S, f.bring, "engine.bring", "cheaper", kn_serve_brings,                       \
                     "Blocks found outside the pool are brought where that is cheaper than "       \
                     "computing them, or always (for measurements)."),                             \
        BT_CONF_INT(S, f.block_tokens, "engine.block_tokens", "128", 64, 256,                      \
                    "Tokens of a block, the unit of reuse; a multiple of engine.page_tokens."),    \
        BT_CONF_BYTES(S, f.pool_bytes, "engine.pool_bytes", "512M", 65536, INT64_C(1) << 46,       \
                      "Memory of the KV pool."),                                                   \
        BT_CONF_BOOL(S, f.warm, "engine.warm", "on",                                               \
                     "Touch shared memory of pool and tiers after the start, so that no request "  \
                     "waits for its first use; off: memory is taken as it is needed."),            \
        BT_CONF_STR(S, f.keeper_socket, "keeper.socket", "", 107,                                  \
                    "Socket of baton-keeper: the KV pool outlives this process; empty = none."),   \
        BT_CONF_DURATION(S, f.keeper_wait_ns, "keeper.wait", "10s", 0, 3600000,                    \
                         "How long to wait for the end of the process that had the pool."),        \
        BT_CONF_INT(S, f.max_batch_tokens, "engine.max_batch_tokens", "512", 1, 65536,             \
                    "Most tokens in one step; long prompts are computed in such chunks."),         \
        BT_CONF_INT(S, f.max_running, "engine.max_running", "64", 1, 4096,                         \
                    "Most sequences in one step."),                                                \
        BT_CONF_INT(S, f.max_waiting, "engine.max_waiting", "256", 0, 65536,                       \
                    "Most requests that wait; more are refused."),                                 \
        BT_CONF_ENUM(S, f.kv_dtype, "engine.kv_dtype", "f16", kn_serve_kv_dtypes,                  \
                     "Number format of the KV cache."),                                            \
        BT_CONF_INT(S, f.max_ctx, "engine.max_ctx", "0", 0, 1 << 24,                               \
                    "Longest sequence in tokens; 0 = what the model was trained for."),            \
        BT_CONF_BYTES(S, f.max_queued_bytes, "session.max_queued_bytes", "8M", 65536,              \
                      1 << 30, /* of what a router does not read */                                \
                      "Output that may wait for a router; a slower one loses its requests."),      \
        BT_CONF_DURATION(S, f.drain_timeout_ns, "drain_timeout", "30s", 0, 3600000,                \
                         "How long running requests may go on after SIGTERM."),                    \
        BT_CONF_DURATION(S, f.heartbeat_ns, "heartbeat", "500ms", 10, 60000,                       \
                         "Time between signs of life to routers."),                                \
        BT_CONF_DURATION(S, f.handoff_silence_ns, "handoff.silence", "3s", 100, 600000,            \
                         "A transfer peer that is silent for longer is given up."),                \
        BT_CONF_DURATION(S, f.handoff_lease_ns, "handoff.lease", "30s", 100, 3600000,              \
                         "How long a computed prompt waits for its decode node.")

struct kn_serve_role {
    const char *name;              /* "prefill", "decode", "both" */
    bool takes[KN_LEG_DECODE + 1]; /* by enum kn_leg */
    bool handoffs;                 /* opens a transfer listener */
};

/* Runs the node until it is told to stop; returns the process's exit code. `node` stays the
 * caller's. The strings of `conf` and `role` are borrowed. */
int kn_serve_run(struct bt_node *node,
                 const struct kn_serve_conf *conf,
                 const struct kn_serve_role *role);

#endif
