/* Membership of a cluster: a node announces itself, readers follow who is there. Backed by leases
 * in Redis and by a static list of seeds; the only folder that includes hiredis. The block index
 * beside it is in blockmap.h.
 *
 * Rules
 * - Redis is soft state. While it cannot be reached, membership is frozen: the last snapshot stays,
 *   nobody is added or dropped. Absent at start: seeds only, and it is tried for ever.
 * - A server that takes no writes (replica, full, rights) counts as away, also for who only reads:
 *   nobody can renew a lease there.
 * - While Redis is up, a node whose lease runs out is dropped at the next poll.
 * - After Redis was away, or came back empty, everybody who is missing gets one whole lease time to
 *   announce itself again before it is dropped.
 * - Of two processes with one name the newer incarnation wins. One that finds itself overtaken is
 *   fenced: it stops announcing for good and is told once. (A process that has never announced
 *   itself waits for the other's lease instead: its clock may just be behind.)
 * - What is read from Redis is checked; a bad entry is passed over, counted and told.
 *
 * Keys (the braces make one slot of them in a Redis cluster):
 *   baton:{<cluster>}:node:<name>   text of a member (member.h), lives for one lease
 *   baton:{<cluster>}:fence:<name>  newest incarnation that has announced itself, lives for a day
 *   baton:{<cluster>}:nodes         sorted set: name by end of its lease, ms since 1970
 *   baton:{<cluster>}:epoch         random text; another one, or none, means: Redis was emptied
 *   baton:{<cluster>}:block:<key>, baton:{<cluster>}:blocks   the block index, see blockmap.h; only
 *                                   the incarnation in `fence` writes there
 *   baton:{<cluster>}:orders         operators' orders, see orders.h
 *
 * One thread, "redis"; every exchange with Redis has a deadline (redis.timeout) except name
 * resolution. Failures are followed by pauses that double, with jitter. */
#ifndef BT_CLUSTER_REGISTRY_H
#define BT_CLUSTER_REGISTRY_H

#include "common/cluster/member.h"
#include "common/conf/conf.h"

/* Embed in the binary's config struct; BT_CLUSTER_CONF_ROWS(struct x, field) into its table. */
struct bt_cluster_conf {
    char *name;
    char *secret;
    struct bt_conf_list seeds;
    uint64_t lease_ns, poll_ns;
    char *redis_address; /* empty = no Redis */
    char *redis_user, *redis_password;
    char *redis_tls_ca, *redis_tls_cert, *redis_tls_key; /* paths; empty or NULL = not given */
    uint64_t redis_timeout_ns, lookup_timeout_ns, block_ttl_ns;
};

#define BT_CLUSTER_CONF_ROWS(S, f)                                                                 \
    BT_CONF_STR(S, f.name, "cluster.name", "default", BT_MEMBER_NAME_MAX,                          \
                "Nodes of one cluster share this name."),                                          \
        BT_CONF_SECRET_STR(S, f.secret, "cluster.secret", 512,                                     \
                           "Part of every block key: who lacks it cannot make keys that match. "   \
                           "The same in all processes that share blocks."),                        \
        BT_CONF_LIST(S, f.seeds, "cluster.seeds", "", 256,                                         \
                     "Nodes that are always members: [name@]host:port of their gRPC server."),     \
        BT_CONF_DURATION(S, f.lease_ns, "cluster.lease", "6s", 300, 600000,                        \
                         "A node that is silent for this long is dropped; it renews at a third."), \
        BT_CONF_DURATION(S, f.poll_ns, "cluster.poll", "1s", 50, 60000,                            \
                         "How often membership is read."),                                         \
        BT_CONF_STR(S, f.redis_address, "redis.address", "127.0.0.1:6379", 300,                    \
                    "Redis that holds membership and the block index: host:port, unix:/path, or "  \
                    "rediss://host:port for TLS; empty to go by cluster.seeds alone."),            \
        BT_CONF_STR(S, f.redis_user, "redis.user", "", 128,                                        \
                    "User for Redis; empty for the default user."),                                \
        BT_CONF_SECRET_STR(S, f.redis_password, "redis.password", 512, "Password for Redis."),     \
        BT_CONF_STR(S, f.redis_tls_ca, "redis.tls_ca", "", 4000,                                   \
                    "Certificates that sign Redis's, as PEM; empty for the system's."),            \
        BT_CONF_STR(S, f.redis_tls_cert, "redis.tls_cert", "", 4000,                               \
                    "Certificate shown to Redis, as PEM; empty for none."),                        \
        BT_CONF_STR(S, f.redis_tls_key, "redis.tls_key", "", 4000, "Its key, as PEM."),            \
        BT_CONF_DURATION(S, f.redis_timeout_ns, "redis.timeout", "1s", 50, 30000,                  \
                         "Longest wait for an answer of Redis."),                                  \
        BT_CONF_DURATION(S, f.lookup_timeout_ns, "redis.lookup_timeout", "50ms", 1, 1000,          \
                         "Longest wait for the block index; then nothing counts as cached."),      \
        BT_CONF_DURATION(S, f.block_ttl_ns, "redis.block_ttl", "600s", 2000, 86400000,             \
                         "Entries of the block index last this long; renewed at a third.")

/* What the table alone cannot check: the name, the form of redis.address, TLS that this build does
 * not have. BT_E_CONFIG. Also done by bt_registry_create; call it early to refuse before long work.
 */
int bt_cluster_conf_check(const struct bt_cluster_conf *conf, struct bt_err *err) BT_MUST_USE;

struct bt_registry; /* whoever created it owns it */

struct bt_registry_cfg {
    const struct bt_cluster_conf *conf; /* borrowed, outlives the registry */
    const struct bt_member *self;       /* copied; NULL = only reads */
    /* The rest runs on the thread "redis" and must not block; each may be NULL.
     * Membership has changed (also: is frozen or no longer). The callee owns one reference. Called
     * first with the seeds, at once. */
    void (*changed)(void *arg, struct bt_members *take_members);
    /* A newer incarnation of this node exists: leave the cluster. Once. */
    void (*fenced)(void *arg);
    void *arg;
};

struct bt_registry_stats {
    bool up;        /* last exchange with Redis went well */
    bool announced; /* own entry was written since the last (re)connect */
    bool fenced;
    uint64_t n_connects; /* successful ones */
    uint64_t n_failures; /* exchanges and connects that failed */
    uint64_t n_polls;    /* completed readings */
    uint64_t n_bad;      /* bad entries met, summed over polls */
};

/* Checks conf and self (BT_E_CONFIG, BT_E_INVALID), starts the thread. Does not wait for Redis. */
int bt_registry_create(const struct bt_registry_cfg *cfg,
                       struct bt_registry **ret_reg,
                       struct bt_err *err) BT_MUST_USE;
/* Replaces what is announced (draining, weight epoch, role); written at once. Name and incarnation
 * must be the same (BT_E_INVALID). Any thread. */
int bt_registry_update(struct bt_registry *reg, const struct bt_member *self) BT_MUST_USE;
/* Any thread. */
struct bt_registry_stats bt_registry_stats(struct bt_registry *reg);
/* Takes the own entry out of Redis if it is up (a clean leave), ends the thread. Blocks for at most
 * a few redis.timeout. No callback runs after it. NULL is fine. */
void bt_registry_destroy(struct bt_registry *reg);

#endif
