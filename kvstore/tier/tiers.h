/* Host memory and disk as tiers of blocks: a source for the engine (source.h), and what a block
 * server needs to hand blocks out and take them in.
 *
 * One index for both tiers. A block is in host memory, on disk, or in both; it is found by key and
 * proven by root, parent, prefix and ids (blob.h). Whoever uses a block pins it: a pinned block
 * stays where it is, in both tiers, its bytes and its place are valid until unpin. What nobody pins
 * goes by least recent use, leaves first, shared heads last.
 *
 * Host memory is one region, cut into pieces of one layer each; pieces of different sizes live in
 * different chunks of it. What sinks towards its end is written to disk before its memory is
 * needed, so that making room never waits; under write pressure only what was used again is
 * written. Content of the disk survives a restart: it is read in on a thread of its own and told as
 * events. Whatever is odd about a file is a miss: the block is removed and counted.
 *
 * Threads: every function may be called from any thread and takes a mutex for a short time; none
 * waits for memory copies or the disk, except create and destroy. Callbacks come from the tiers'
 * threads unless said otherwise, without the mutex, and must not block. */
#ifndef KV_TIER_TIERS_H
#define KV_TIER_TIERS_H

#include "common/conf/conf.h"
#include "kvstore/tier/blob.h"

/* Embed in the binary's config struct; KV_TIERS_CONF_ROWS(struct x, field) into its table. */
struct kv_tiers_conf {
    uint64_t host_bytes; /* 0 = no tiers at all */
    char *disk_path;     /* empty = no disk tier */
    uint64_t disk_bytes;
    uint64_t disk_write_rate;              /* bytes a second, 0 = no limit */
    uint64_t host_max_rate, disk_max_rate; /* of loads, bytes a second, 0 = no limit */
    int64_t threads;
};

#define KV_TIERS_CONF_ROWS(S, f)                                                                   \
    BT_CONF_BYTES(S, f.host_bytes, "tier.host_bytes", "1G", 0, INT64_MAX,                          \
                  "Host memory that keeps blocks of KV; 0 for none, and no disk then."),           \
        BT_CONF_STR(S, f.disk_path, "tier.disk_path", "", 3000,                                    \
                    "Directory that keeps blocks of KV, of one process; empty for none."),         \
        BT_CONF_BYTES(S, f.disk_bytes, "tier.disk_bytes", "16G", 0, INT64_MAX,                     \
                      "Space that files of blocks may take."),                                     \
        BT_CONF_BYTES(S, f.disk_write_rate, "tier.disk_write_rate", "200M", 0, INT64_MAX,          \
                      "Bytes a second written to disk at most; 0 for no limit."),                  \
        BT_CONF_BYTES(S, f.host_max_rate, "tier.host_max_rate", "0", 0, INT64_MAX,                 \
                      "Bytes a second loaded from host memory at most; 0 for no limit."),          \
        BT_CONF_BYTES(S, f.disk_max_rate, "tier.disk_max_rate", "0", 0, INT64_MAX,                 \
                      "Bytes a second loaded from disk at most; 0 for no limit."),                 \
        BT_CONF_INT(S, f.threads, "tier.threads", "2", 1, 64,                                      \
                    "Threads that load blocks from the tiers; as many copy blocks to them.")

enum kv_tiers_event_kind {
    KV_TIERS_STORED,  /* the block can be had from `tier` now */
    KV_TIERS_REMOVED, /* no longer; `best` says where it still is */
    KV_TIERS_LOST,    /* events were dropped for want of memory: list all by kv_tiers_held */
};
struct kv_tiers_event {
    enum kv_tiers_event_kind kind;
    enum kv_tier tier; /* KV_TIER_HOST or KV_TIER_DISK */
    enum kv_tier best; /* the faster of the tiers that have it since; KV_N_TIERS = none */
    struct kv_key key;
    uint64_t bytes; /* of the blob */
};

struct kv_tiers; /* whoever created it owns it */
struct kv_blob;  /* a block of it */

struct kv_tiers_cfg {
    const struct kv_tiers_conf *conf; /* copied */
    const struct bt_mem_ops *mem;     /* of the host tier's region; NULL = bt_mem_private */
    struct kv_blob_shape shape;       /* of the engine's blocks; all 0 = no source (a daemon) */
    int key_bits;                     /* 0 = all; fewer make collisions, for tests */
    uint64_t share_bytes;             /* loads of this size are shared among threads; 0 = 4 MiB */
    /* In the order in which it happened; one thread at a time. NULL = not wanted. */
    void (*events)(void *arg, const struct kv_tiers_event *ev, size_t n);
    void *arg;
};

/* Do the options make sense together, and on this machine? BT_E_CONFIG names both fields. For who
 * does not call create when host_bytes is 0. */
int kv_tiers_conf_check(const struct kv_tiers_conf *conf, struct bt_err *err) BT_MUST_USE;
/* Allocates the region, locks the directory, starts the threads; reading in the directory goes on
 * behind it. BT_E_CONFIG: no tiers by configuration, shape out of limits or larger than the region,
 * the directory is no directory or another process has it. */
int kv_tiers_create(const struct kv_tiers_cfg *cfg,
                    struct kv_tiers **ret_tiers,
                    struct bt_err *err) BT_MUST_USE;
/* Everything must be unpinned and every load done (a log line and abort otherwise). What is only in
 * host memory is gone: call kv_tiers_flush before. NULL is fine. */
void kv_tiers_destroy(struct kv_tiers *t);
/* Writes what is in host memory and not on disk, most recently used first; blocks until all was or
 * the deadline. Ignores the write rate. */
void kv_tiers_flush(struct kv_tiers *t, uint64_t deadline_ns);

/* Gives up the blocks in host memory, on disk, that nobody uses; those that are only in host memory
 * are gone. Removes files; not for a thread that must not wait. */
struct kv_tiers_cleared {
    uint64_t host_blocks, disk_blocks;
};
struct kv_tiers_cleared kv_tiers_clear(struct kv_tiers *t, bool host, bool disk);

/* The source for the engine; NULL without a shape. Lives as long as the tiers. */
struct kv_source *kv_tiers_source(struct kv_tiers *t);
/* The one region that all host blobs lie in, at one address for life: to be registered with the
 * net. */
const struct bt_mem_region *kv_tiers_region(const struct kv_tiers *t);

/* ---- looking and holding ---- */

/* Pins the longest leading run of `run` that is here, in either tier, into ret_blobs [n_blocks];
 * returns its length. Counted as a use of each. */
uint32_t
kv_tiers_pin(struct kv_tiers *t, const struct kv_run *run, struct kv_blob **ret_blobs) BT_MUST_USE;
/* How many kv_tiers_pin would pin; changes nothing. ret_tiers [n_blocks] may be NULL. */
uint32_t kv_tiers_peek(struct kv_tiers *t, const struct kv_run *run, enum kv_tier *ret_tiers);
/* Lets go from the last to the first. */
void kv_tiers_unpin(struct kv_tiers *t, struct kv_blob *const *blobs, uint32_t n);

/* Of a pinned blob, valid while pinned. KV_TIER_HOST or KV_TIER_DISK; disk becomes host by
 * kv_tiers_bring (or a load of others), never the other way while pinned. */
enum kv_tier kv_blob_tier(struct kv_tiers *t, const struct kv_blob *b);
/* What it is; sums are valid unless it is reserved and not committed. */
const struct kv_blob_meta *kv_blob_meta(const struct kv_blob *b);
/* Bytes of a layer, in the region; NULL unless in host memory or reserved. Generation, sums and ids
 * are in the meta. Read-only for all but who reserved it. */
void *kv_blob_layer(struct kv_tiers *t, const struct kv_blob *b, uint32_t layer);
/* A pinned blob turned out to be damaged (a sum does not match): not found from now on, in either
 * tier, counted as bad; unpin as usual. */
void kv_tiers_bad(struct kv_tiers *t, struct kv_blob *b);

/* Brings a pinned blob from disk into host memory. */
struct kv_bring {
    struct kv_blob *blob;
    /* Any thread, exactly once, maybe inside the call. BT_OK: it is in host memory, all sums
     * checked. BT_E_EXHAUSTED: no room, all is pinned. BT_E_CORRUPT, BT_E_IO: damaged, removed. */
    void (*done)(struct kv_bring *b, int rc);
    void *arg;
    struct bt_list link; /* private */
};
void kv_tiers_bring(struct kv_tiers *t, struct kv_bring *b);

/* ---- taking in ---- */

/* Makes room in host memory for a blob whose bytes the caller writes layer by layer
 * (kv_blob_layer). meta is copied; sums may be NULL; ids, parent, root and prefix must be the
 * block's, its generation is given anew. The blob is pinned and is found by nobody until commit.
 * BT_E_EXISTS: here already, being written, or another block has the key. BT_E_EXHAUSTED: no room,
 * all is pinned. BT_E_INVALID: out of limits. */
int kv_tiers_reserve(struct kv_tiers *t,
                     const struct kv_blob_meta *meta,
                     struct kv_blob **ret_blob) BT_MUST_USE;
/* The bytes are there and were checked against `sums` [n_layers]. Found from now on; still pinned.
 */
void kv_tiers_commit(struct kv_tiers *t, struct kv_blob *b, const uint64_t *sums);
/* Gives the room back; nobody may write to it any more. Unpins. */
void kv_tiers_abort(struct kv_tiers *t, struct kv_blob *b);

/* ---- telling ---- */

struct kv_tiers_held {
    struct kv_key key;
    enum kv_tier tier; /* the faster of those that have it */
    uint64_t bytes;
};
/* All blocks, piece by piece: *cursor is 0 at the beginning and again behind the last piece;
 * returns how many are in `ret` [max], which may be 0 before the end. Blocks that come or go
 * meanwhile may be there or not. */
size_t kv_tiers_held(struct kv_tiers *t, uint64_t *cursor, struct kv_tiers_held *ret, size_t max);

struct kv_tier_stats {
    uint64_t n_blocks, bytes, max_bytes;
    uint64_t stored, evictions, removed; /* blocks; removed: damaged or replaced */
    uint64_t hits, misses;               /* blocks that were asked for (pin, find) */
    uint64_t bad;                        /* damaged, short, missing, unreadable */
    uint64_t read_bytes, written_bytes;
    uint64_t write_errors; /* disk: full, read-only, broken */
    uint64_t skipped;      /* host: dropped unwritten; disk: not wanted under write pressure */
    uint64_t bytes_per_s;  /* measured, of loads */
};
struct kv_tiers_stats {
    struct kv_tier_stats host, disk;
    uint64_t collisions;    /* another block has the key */
    uint64_t n_pins;        /* pins held now, of all blocks */
    uint64_t n_loads;       /* running or queued */
    uint64_t offers, loads; /* done */
    uint64_t queued_bytes;  /* of loads and offers */
    bool scanned;           /* the directory was read in */
};
struct kv_tiers_stats kv_tiers_stats(struct kv_tiers *t);

#endif
