/* Handing a prompt's KV from the prefill node's pool to the decode node's pool: both ends.
 *
 *   prefill node (P)                                decode node (D)
 *   kv_send_create(id)                              kv_recv_create(id, P's address, pages)
 *                        <------- TICKET ------     connects to P (or uses the open connection)
 *   ANNOUNCE per layer   -------------------->      moves the bytes (method of the transport),
 *   and chunk            ...                        checks generation and checksum of each piece
 *   COMMIT (first tokens)-------------------->
 *                        <------- ACK ---------     all bytes in place and checked
 *   events.done(OK)                                 events.done(OK, first tokens)
 *
 * The ticket may come before or after kv_send_create. Either side may abort or die at any point;
 * `done` is called exactly once per object, after it is proven that no remote side can touch the
 * pages any more (net.h, Proof). Both sides send a sign of life while a handoff is open; a peer
 * that stays silent for cfg.silence_ns is given up and its connection torn down. When D is lost
 * before its ACK, P keeps the prompt until the lease ends and another D may send a ticket for the
 * same id. States: handoff/states.def; wire format: proto/wire/handoff.h.
 *
 * Threads: create, abort, progress, finish and rewind may be called on any thread (the engine's);
 * everything else happens on the net's thread, and so do the events.
 */
#ifndef KV_HANDOFF_HANDOFF_H
#define KV_HANDOFF_HANDOFF_H

#include "common/net/net.h"
#include "kvstore/block/key.h"
#include "kvstore/block/pool.h"

#define KV_HANDOFF_MAX_FIRST 16 /* most first tokens in a commit */

struct kv_handoff; /* one per process */
struct kv_relay_ops;

struct kv_handoff_cfg {
    struct bt_net_cfg net;
    struct kv_pool *pool; /* borrowed, outlives the handoff; NULL = a relay */
    /* Of a relay (see below), which has a pool for each layout and compat of those who call. */
    const struct kv_relay_ops *relay; /* copied; NULL = none */
    uint32_t max_formats;             /* 4: pools at once */
    const char *node_name;            /* of this node; borrowed */
    uint64_t incarnation;             /* of this node */
    uint8_t compat[32];        /* compatibility digest: both sides must be equal; not of a relay */
    uint64_t silence_ns;       /* 3 s: a peer silent for longer is lost */
    uint64_t lease_ns;         /* 30 s: how long a finished prompt waits for a ticket */
    uint32_t max_open;         /* handoffs of either kind at once */
    uint32_t wire_version;     /* highest that is spoken; 0 = WIRE_HANDOFF_VERSION */
    size_t max_inflight_bytes; /* per peer, one direction */
};

struct kv_handoff_stats {
    uint32_t sends, recvs; /* open now */
    uint32_t aborting;     /* waiting for proof */
    uint32_t peers;
    uint32_t tickets;     /* that wait for a send */
    uint64_t connections; /* greeted, since start */
    uint64_t bytes;       /* received and checked, since start */
    uint64_t checksum_errors, stale;
};

int kv_handoff_create(const struct kv_handoff_cfg *cfg,
                      struct kv_handoff **ret,
                      struct bt_err *err) BT_MUST_USE;
/* Every send and recv must be done; what was not released is freed. */
void kv_handoff_destroy(struct kv_handoff *h);
/* Address of the transfer listener, for the decode nodes; borrowed. */
const char *kv_handoff_address(const struct kv_handoff *h);
struct kv_handoff_stats kv_handoff_stats(const struct kv_handoff *h); /* any thread */

struct kv_handoff_id {
    uint64_t hi, lo;
};

/* A pool and the compatibility digest of its users: one in a node, several in a relay. */
struct kv_format;
struct kv_pool *kv_format_pool(const struct kv_format *f);

/* The prefill node that a relay takes a prompt from. */
struct kv_origin {
    const char *name; /* NULL = none */
    uint64_t incarnation;
    const char *address;
};

/* A token that P made, with what the sampler said of it; opaque here, moved as bytes. */
struct kv_first {
    uint32_t n_tokens;
    int32_t ids[KV_HANDOFF_MAX_FIRST];
};

/* ---- P ---- */
struct kv_send;

struct kv_send_events {
    void *arg;
    /* A decode node has asked for it: from now on its pages may be read, and rewind returns false.
     */
    void (*ticketed)(void *arg);
    /* Exactly once, last: BT_OK = D has all of it; else the reason. Then kv_send_release. */
    void (*done)(void *arg, int rc, const char *msg);
};

struct kv_send_cfg {
    struct kv_handoff_id id;
    struct kv_format *fmt; /* NULL = the node's own; a relay names one */
    uint32_t n_tokens;     /* of the prompt */
    /* The first tokens that are not here: whoever has fewer of them is refused. A multiple of the
     * page size; 0 but in a relay. */
    uint32_t n_have;
    struct kv_send_events events;
};

/* BT_E_EXHAUSTED: max_open; BT_E_EXISTS: the id is in use. No event is called then. */
int kv_send_create(struct kv_handoff *h,
                   const struct kv_send_cfg *cfg,
                   struct kv_send **ret,
                   struct bt_err *err) BT_MUST_USE;
/* Page table of the prompt from page `first` on (pages are sealed in order and stay put); begins
 * behind n_have. */
void kv_send_set_pages(struct kv_send *s, uint32_t first, const uint32_t *pages, uint32_t n);
/* K and V of tokens [first, first + n) lie in layer `layer`, and all before them. Tells of each
 * layer by itself, in the order of its tokens. Cheap: one store and, if the net thread slept, one
 * wake. */
void kv_send_progress(struct kv_send *s, uint32_t first, uint32_t n, int layer);
/* All layers of all tokens are there; `tokens` are the first of the answer. */
void kv_send_finish(struct kv_send *s, const struct kv_first *tokens);
/* Forgets all progress, so that the pages may be dropped and computed again later: true unless a
 * decode node has its ticket in. */
bool kv_send_rewind(struct kv_send *s) BT_MUST_USE;
/* Tells D and seeks proof; done follows with `rc`. No-op once done is under way. */
void kv_send_abort(struct kv_send *s, int rc);
/* Any thread, once, after done has been called: the object is gone then. Until then the functions
 * above may still be called and do nothing: done comes on the net's thread, and the caller's may be
 * in one of them. */
void kv_send_release(struct kv_send *s);

/* ---- D ---- */
struct kv_recv;

struct kv_recv_events {
    void *arg;
    /* Exactly once, last: BT_OK = all bytes are in the pages and checked, `tokens` are the first of
     * the answer. Else the reason, and the pages' content is worthless. Then kv_recv_release. */
    void (*done)(void *arg, int rc, const char *msg, const struct kv_first *tokens);
    /* The first n_tokens of the prompt are in place and checked in this layer. NULL = not wanted.
     */
    void (*progress)(void *arg, int layer, uint32_t n_tokens);
};

struct kv_recv_cfg {
    struct kv_handoff_id id;
    struct kv_format *fmt; /* NULL = the node's own; a relay names one */
    /* The peer is a relay and takes the prompt from there; borrowed for the call. */
    struct kv_origin origin;
    /* With an origin: what lets the relay keep the full blocks. n_tokens ids, copied; NULL = it
     * keeps nothing. */
    const int32_t *ids;
    uint32_t block_tokens;
    struct kv_key root;
    const char *peer_name;
    uint64_t peer_incarnation;
    const char *peer_address;
    uint32_t n_tokens;
    /* The first n_have tokens lie in this node's pool already and are not sent; a multiple of its
     * page size, at most n_tokens. All of it: nothing but the first tokens comes. */
    uint32_t n_have;
    /* The pages behind them, one for each page of tokens [n_have, n_tokens); copied; owner
     * KV_OWNER_TRANSFER until done. Pages before are neither named nor touched. */
    const uint32_t *pages;
    uint32_t n_pages;
    struct kv_recv_events events;
};

int kv_recv_create(struct kv_handoff *h,
                   const struct kv_recv_cfg *cfg,
                   struct kv_recv **ret,
                   struct bt_err *err) BT_MUST_USE;
void kv_recv_abort(struct kv_recv *r, int rc);
/* How it came: "shm", "tcp", "rdma", "" = no connection was made; and the bytes that came. From the
 * event done on, until the release. */
const char *kv_recv_transport(const struct kv_recv *r);
uint64_t kv_recv_bytes(const struct kv_recv *r);
/* As kv_send_release. */
void kv_recv_release(struct kv_recv *r);

/* ---- a relay: takes prompts from where decode nodes say, and hands them on ---- */

/* A ticket that names an origin, for an id that no kv_send is open for. Borrowed for the call. */
struct kv_relay_ask {
    struct kv_format *fmt; /* of who asks; all of its page sizes are equal */
    struct kv_handoff_id id;
    uint32_t n_tokens, n_have;
    struct kv_origin origin;
    const char *asker;  /* name of the node that asks */
    const int32_t *ids; /* n_tokens, NULL = not told */
    uint32_t block_tokens;
    struct kv_key root;
};

/* All but close run on the net's thread. */
struct kv_relay_ops {
    void *arg;
    /* Nodes with this layout (n_pages is theirs) have called: makes a pool for them. */
    int (*open)(void *arg,
                const struct kv_layout *layout,
                struct kv_pool **ret_pool,
                struct bt_err *err);
    /* Nobody uses the pool any more; also from kv_handoff_destroy, on its caller's thread. */
    void (*close)(void *arg, struct kv_pool *pool);
    /* BT_OK: a kv_send for the id follows, now or soon. Else the ticket is refused with it. May be
     * called again for an id while none has followed (another decode node asks). */
    int (*asked)(void *arg, const struct kv_relay_ask *ask, struct bt_err *err);
    /* The last one that asked for the id has withdrawn or is lost, and no kv_send was made. */
    void (*gone)(void *arg, struct kv_handoff_id id);
};
/* [net] Tells those who asked for the id that no kv_send will follow. */
void kv_handoff_refuse(struct kv_handoff *h, struct kv_handoff_id id, int rc, const char *msg);
/* For timers and messages on the net's thread; borrowed. */
struct bt_net *kv_handoff_net(const struct kv_handoff *h);

#endif
