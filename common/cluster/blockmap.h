/* Block index: which node holds which KV block, in Redis. Soft state: all of it can be written
 * again from the nodes, nobody waits for it, and without Redis a look-up finds nothing, at once.
 *
 * Keys (the braces make one slot of them in a Redis cluster, as in registry.h):
 *   baton:{<cluster>}:block:<32 hex digits>  hash: one field a holder, named as the node;
 *                                            lives as long as its youngest field
 *   baton:{<cluster>}:blocks                 hash: one field a node: how many blocks it has here
 *
 * A field's value is text, hexadecimal numbers joined by ':' (more of them may follow one day and
 * are passed over):
 *   <incarnation, 16 digits>:<tier>:<bytes>:<until, seconds since 1970 by Redis's clock>
 * in `blocks` the same with tier 0 and the number of blocks in place of the bytes.
 *
 * Rules
 * - A field counts only while its node is a member under the very incarnation that wrote it and
 *   `until` has not come: a dead node's entries are gone with its lease, without touching them.
 * - What a look-up finds outdated (a newer incarnation is a member and the fence agrees, or its
 *   time is over) is removed in the background.
 * - Only the incarnation that stands in the registry's fence key (registry.h) writes under its
 *   name: announcing needs a bt_registry of the same name and incarnation beside it. Whoever is
 *   overtaken writes nothing from then on.
 * - Everything held is written again, through `held`: at the start, when Redis was away or came
 *   back empty (its epoch key tells), when the queue was full, and before entries run out
 *   (redis.block_ttl).
 * - Breaker: a look-up that gets no answer in time (redis.lookup_timeout), or an error that says
 * the server cannot serve, opens it: look-ups then find nothing at once until a probe is answered
 * in time. Probes and connects are tried for ever, with pauses that double, with jitter.
 *
 * Threads: "redis-get" runs look-ups and their callbacks, "redis-put" connects and writes. What is
 * marked "any thread" never waits for Redis. */
#ifndef BT_CLUSTER_BLOCKMAP_H
#define BT_CLUSTER_BLOCKMAP_H

#include "common/cluster/registry.h"

#define BT_LOOKUP_KEYS_MAX   4096 /* keys of one look-up */
#define BT_LOOKUP_FLIGHT_MAX 1024 /* look-ups under way; more find nothing */
#define BT_HOLDERS_MAX       32   /* holders told per block, the fastest tiers first */

/* Same bytes as a block key of kvstore. */
struct bt_block_key {
    uint8_t b[16];
};

/* The fastest tier that a node can serve a block from. The numbers stand in Redis. */
enum bt_tier {
    BT_TIER_ENGINE = 0,
    BT_TIER_HOST = 1,
    BT_TIER_DISK = 2,
};

struct bt_block_have {
    struct bt_block_key key;
    uint32_t bytes; /* size of the block as stored; 0 = not told */
    uint8_t tier;   /* enum bt_tier */
};

struct bt_blockmap; /* whoever created it owns it */

struct bt_blockmap_cfg {
    const struct bt_cluster_conf *conf; /* borrowed, outlives the blockmap */
    const char *name;                   /* this node's; copied. NULL = only looks up */
    uint64_t incarnation;               /* as in the registry */
    /* Lists what this node holds: writes up to `max` entries to `out` and returns how many; *cursor
     * is 0 at the beginning, the callee sets it to whatever finds the next part, and to 0 when that
     * was the last. May repeat or, if it is told by announce or withdraw as well, miss what changes
     * meanwhile. Thread "redis-put"; may take a lock for microseconds, must not wait. NULL: what
     * was announced is not written again. */
    size_t (*held)(void *arg, uint64_t *cursor, struct bt_block_have *out, size_t max);
    void *arg;
};

struct bt_blockmap_stats {
    bool up;         /* look-ups are answered (breaker closed) */
    bool put_up;     /* announcements are taken */
    bool synced;     /* everything held was written since Redis was last away or emptied */
    bool refused;    /* another incarnation of this name is the one that may write */
    uint64_t n_held; /* entries of this node in Redis, as far as known */
    uint64_t n_lookups, n_lookup_keys;
    uint64_t n_found;      /* keys with at least one live holder */
    uint64_t n_unanswered; /* look-ups that found nothing because Redis did not answer */
    uint64_t n_opened;     /* times that the breaker opened */
    uint64_t n_connects;   /* successful ones, both connections */
    uint64_t n_failures;   /* exchanges, probes and connects that failed */
    uint64_t n_announced;  /* entries written, repeats included */
    uint64_t n_withdrawn;  /* entries removed */
    uint64_t n_resyncs;    /* times that writing everything again was begun */
    uint64_t n_overflows;  /* times that the queue was full */
    uint64_t n_scrubbed;   /* outdated entries removed */
    uint64_t n_bad;        /* malformed records met */
};

/* Checks the arguments (BT_E_CONFIG, BT_E_INVALID) and starts the threads; does not wait for Redis.
 * Without redis.address every look-up finds nothing and announcements go nowhere. */
int bt_blockmap_create(const struct bt_blockmap_cfg *cfg,
                       struct bt_blockmap **ret_bm,
                       struct bt_err *err) BT_MUST_USE;
/* Gives look-ups that are under way their callback (BT_E_CANCELLED), ends the threads. Entries stay
 * in Redis: they are void as soon as the registry has left, and a restart of the node writes over
 * them. Blocks for at most a few redis.timeout. No callback runs after it. NULL is fine. */
void bt_blockmap_destroy(struct bt_blockmap *bm);

/* Who is alive, from the registry's `changed`; keeps a reference of its own. Until the first call
 * nobody is. Any thread. */
void bt_blockmap_set_members(struct bt_blockmap *bm, struct bt_members *members);

/* This node now holds these blocks, or holds them in another tier or size. Call it when `held`
 * lists them: what waits here may be dropped in favour of listing everything. Queued, written
 * within milliseconds while Redis answers; the last word on a key counts. Any thread. */
void bt_blockmap_announce(struct bt_blockmap *bm, const struct bt_block_have *have, size_t n);
/* This node no longer holds these blocks, in any tier. Call it after `held` would no longer list
 * them. Any thread. */
void bt_blockmap_withdraw(struct bt_blockmap *bm, const struct bt_block_key *keys, size_t n);
/* A holder that a look-up named has said that it does not have the block: its entry is removed
 * if that incarnation wrote it. A hint, dropped when there are too many. Any thread. */
void bt_blockmap_disown(struct bt_blockmap *bm,
                        const struct bt_block_key *key,
                        const char *name,
                        uint64_t incarnation);

struct bt_holder {
    const struct bt_member *member; /* inside bt_found.members */
    enum bt_tier tier;
    uint32_t bytes;
};

/* Outcome of a look-up; borrowed for the callback, but `members` may be kept with a reference. */
struct bt_found {
    /* BT_OK: Redis has answered. Otherwise every key has no holder and this says why, for metrics:
     * BT_E_DEADLINE, BT_E_UNAVAILABLE (breaker), BT_E_EXHAUSTED (too many under way),
     * BT_E_CANCELLED. */
    int rc;
    struct bt_members *members; /* may be NULL if rc is not BT_OK */
    const struct bt_block_key *keys;
    size_t n_keys;
    const uint32_t *first; /* n_keys + 1; holders of key i: holders[first[i] .. first[i+1]) */
    const struct bt_holder *holders;
};

/* Where the outcome goes. Thread "redis-get"; must not block; may start and cancel look-ups. */
struct bt_lookup_cb {
    void (*fn)(void *arg, const struct bt_found *found);
    void *arg;
};

/* Looks up n keys (1 to BT_LOOKUP_KEYS_MAX, copied) in one round trip. cb (copied) runs exactly
 * once, on "redis-get", never inside this call, timeout_ns from now at the latest (0:
 * redis.lookup_timeout; at most redis.timeout). Returns an id that is not 0; 0 without memory or
 * for a bad n: cb will not run. Any thread. */
uint64_t bt_blockmap_lookup(struct bt_blockmap *bm,
                            const struct bt_block_key *keys,
                            size_t n,
                            uint64_t timeout_ns,
                            const struct bt_lookup_cb *cb);
/* The look-up ends soon with BT_E_CANCELLED, unless it has ended or is about to: either way its
 * callback runs once. Ids of look-ups that have ended are passed over. Any thread. */
void bt_blockmap_cancel(struct bt_blockmap *bm, uint64_t lookup_id);

/* How many entries live nodes have in the index, as each told last (every few seconds at most): cb
 * gets one key (all zero) with a holder a node, `bytes` being its number of blocks. Same rules as a
 * look-up. */
uint64_t
bt_blockmap_count(struct bt_blockmap *bm, uint64_t timeout_ns, const struct bt_lookup_cb *cb);

/* True while look-ups are answered: who finds false may spare itself the call. Any thread. */
bool bt_blockmap_up(const struct bt_blockmap *bm);
struct bt_blockmap_stats bt_blockmap_stats(struct bt_blockmap *bm);

#endif
