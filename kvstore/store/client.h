/* The KV store as a source of blocks for the engine (kvstore/tier/source.h): other nodes and store
 * daemons, found through the block index in Redis, read and written through their block servers.
 *
 * find: one look-up of the run in the index, bounded by the find's deadline; blocks that at least
 * one live member besides this node holds count, from the first on. Nothing is pinned by it: what
 * has gone until it is loaded shortens the load (n_good).
 * load: each block from the holder that has least to do in this load, all of them at once, layer by
 * layer; bytes are checked before they are placed. A block that one holder misses, damages or takes
 * into its death is asked of the next one, and so is what a holder owes that has fallen silent;
 * when none is left the run ends before it. offer: the block is put to its owners: `replicas` live
 * daemons by consistent hashing (kvstore/block/ring.h). Daemons of this host read it from its pages
 * (it is lent to them); for others, and where that takes too long, it is copied out of its pages on
 * the thread "store-put". Bounded: with the queue full or no daemon there, nothing is wanted; wake
 * the engine when daemons have become known.
 *
 * Daemons are called as soon as the membership names them, other holders when something is asked of
 * them.
 *
 * Threads: the net's ("xfer"), "store-put"; the index's "redis-get" finishes look-ups. */
#ifndef KV_STORE_CLIENT_H
#define KV_STORE_CLIENT_H

#include "common/cluster/blockmap.h"
#include "common/net/net.h"
#include "kvstore/tier/blob.h"

struct kv_client; /* whoever created it owns it */

struct kv_client_cfg {
    struct bt_net_cfg net;
    const char *node_name; /* copied; a holder of this name is ourselves */
    uint64_t incarnation;
    struct bt_blockmap *blockmap; /* borrowed, outlives the client */
    struct kv_blob_shape shape;   /* of the engine's blocks */
    uint32_t replicas;            /* 1..8; 0 = puts nothing */
    uint64_t silence_ns;          /* 3 s */
    uint64_t load_limit_ns;       /* 10 s: a load that takes longer is given up, and so is a daemon
                                     that ends none of its puts in that time */
    uint64_t stall_ns;            /* 500 ms: a holder that says nothing at all for that long, asked
                                     whether it lives, is not waited for by loads */
    uint64_t staging_bytes;       /* 64 MiB: blocks on their way to the daemons */
    uint64_t lend_bytes;          /* 64 MiB, and at most an eighth of the pool: blocks that daemons
                                     of this host read from the pages themselves */
    uint64_t lend_ns;             /* 1 s: then pages are not lent any longer, but copied */
};

struct kv_client_stats {
    uint64_t finds, found_blocks;
    uint64_t loads, loaded_blocks, loaded_bytes;
    uint64_t failovers;               /* blocks asked of another holder */
    uint64_t lost;                    /* blocks that ended a run: no holder was left */
    uint64_t stalls;                  /* holders that were not waited for any longer */
    uint64_t bad;                     /* checksums that did not match */
    uint64_t offers, puts, put_bytes; /* taken; copies that daemons have now */
    uint64_t refused;                 /* copies that daemons did not take */
    uint64_t lent, called_back;       /* offers that were lent; copies that took too long */
    uint32_t daemons;                 /* live ones */
    uint64_t bytes_per_s;             /* measured, of loads */
};

int kv_client_create(const struct kv_client_cfg *cfg,
                     struct kv_client **ret_client,
                     struct bt_err *err) BT_MUST_USE;
/* The engine is done with it: every find was ended, every load and offer is done. NULL is fine. */
void kv_client_destroy(struct kv_client *c);
struct kv_source *kv_client_source(struct kv_client *c);
/* Who is alive, from the registry's `changed`; keeps a reference of its own. Any thread. */
void kv_client_set_members(struct kv_client *c, struct bt_members *members);
struct kv_client_stats kv_client_stats(struct kv_client *c);

#endif
