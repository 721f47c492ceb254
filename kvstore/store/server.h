/* Block server: hands out blocks of this process's tiers, and takes in blocks that others put. Runs
 * in store daemons and in nodes.
 *
 * Get: the client names blocks by key, parent, root, prefix and token ids. What is here is pinned
 * for it (from disk it is brought first) and told by place and checksums, block by block; the rest
 * is a miss. How the bytes go depends on the transport: mapped memory and RDMA: the client reads
 * the pinned blocks and says when it is done; TCP: they are sent, all blocks' layer 0 first. A
 * block stays pinned until the client has let go, or its connection is closed by proof of the net;
 * who keeps a lease longer than lease_ns, or leaves a put unfinished for so long, loses its
 * connection.
 *
 * Put: room is reserved in host memory, filled, checked against the sums of the head, and only then
 * found by others. Mapped memory: this side reads the client's memory; TCP: the client sends; RDMA:
 * the client writes into the reserved room and says so. Keys are computed anew, so nobody can store
 * a block under the key of others.
 *
 * Lent (a client of this host whose pool is a sealed memory file): this side gathers the block from
 * the client's own pages, in one pass with its sums. What proves it is the client's KEEP: its pages
 * were lent until after the last read. Without that word nothing is stored.
 *
 * Everything that comes in is checked; what a client can hold is bounded (blocks, requests); a
 * violation closes that client alone.
 *
 * Threads: one of its own ("xfer"); the functions here from any. */
#ifndef KV_STORE_SERVER_H
#define KV_STORE_SERVER_H

#include "common/net/net.h"
#include "kvstore/tier/tiers.h"

struct kv_server; /* whoever created it owns it */

struct kv_server_cfg {
    struct bt_net_cfg net;
    const char *node_name; /* copied */
    uint64_t incarnation;
    struct kv_tiers *tiers;    /* borrowed, outlives the server */
    bool takes_puts;           /* else puts are refused */
    uint64_t silence_ns;       /* 3 s */
    uint64_t lease_ns;         /* 30 s */
    uint32_t max_gets;         /* requests of one client at once; 64 */
    uint32_t max_puts;         /* 64 */
    uint64_t max_pinned_bytes; /* held by one client's gets, or puts; 0 = half of the tiers' host
                                  memory */
};

struct kv_server_stats {
    uint32_t clients;
    uint64_t gets, puts;      /* blocks handed out, taken in */
    uint64_t misses, refused; /* blocks asked for that are not here; puts not taken */
    uint64_t get_bytes, put_bytes;
    uint64_t bad; /* checksums of puts that did not match */
};

int kv_server_create(const struct kv_server_cfg *cfg,
                     struct kv_server **ret_server,
                     struct bt_err *err) BT_MUST_USE;
/* Closes all connections; everything is unpinned on return. NULL is fine. */
void kv_server_destroy(struct kv_server *s);
/* Of its listener; borrowed. */
const char *kv_server_address(const struct kv_server *s);
struct kv_server_stats kv_server_stats(const struct kv_server *s);

#endif
