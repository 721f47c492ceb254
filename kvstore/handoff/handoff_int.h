/* Private to kvstore/handoff: the objects behind handoff.h.
 *
 * Thread: everything is the xfer thread's unless a field says [lock]. Locks: kv_handoff.lock (ids,
 * counters) and the lock of one kv_send or kv_recv, never two at once, never across a callback. */
#ifndef KV_HANDOFF_HANDOFF_INT_H
#define KV_HANDOFF_HANDOFF_INT_H

#include "common/base/buf.h"
#include "common/ds/list.h"
#include "common/ds/map.h"
#include "common/thr/time.h"
#include "kvstore/block/sum.h"
#include "kvstore/handoff/handoff.h"
#include "kvstore/handoff/states.h"
#include "proto/wire/handoff.h"

#include <pthread.h>
#include <xxhash.h>

#define KV_PUMP_BYTES          (4u << 20)   /* hashed or copied in one go, then others get a turn */
#define KV_PIECE_BYTES         (512u << 10) /* longest piece that is read or put */
#define KV_AHEAD_BYTES         (2u << 20)   /* summed and not yet read: in P's second-level cache */
#define KV_LOT_BYTES           (1u << 20)   /* announced in one message */
#define KV_DATA_PIECE_BYTES    (256u << 10) /* longest piece that travels in messages */
#define KV_DATA_PART_BYTES     (252u << 10) /* of one message: fits a TCP segment of UCX, one copy */
#define KV_MAX_WAITING_TICKETS 4096
#define KV_TOMBS                                                                                   \
    512 /* ended sends that are remembered, so that a late ticket is refused at once               \
         */
#define KV_REASK_NS (1 * BT_NS_PER_S)

/* An object that has work for the pump: `run` does some, takes what it used off the budget and
 * returns true if there is more to do at once. */
struct kv_work {
    struct bt_list link; /* kv_handoff.ready */
    bool (*run)(struct kv_work *w, size_t *budget);
};

struct kv_format {
    struct bt_list link; /* kv_handoff.formats */
    struct kv_pool *pool;
    const struct kv_layout *layout;
    size_t elem; /* bytes of one element */
    uint8_t compat[32];
    struct bt_net_mem *mem;
    struct bt_str key;
    uint32_t n_users; /* atomic: peers, ends, confirmations */
};

/* What kv_send and kv_recv have in common: identity, the shared part, and life. */
struct kv_end {
    struct kv_handoff *h;
    struct kv_format *fmt;
    struct kv_handoff_id id;
    struct bt_list all_link; /* [h->lock] kv_handoff.all: every object not yet freed */
    struct kv_end *id_next;  /* [h->lock] same key in the id map */
    pthread_mutex_t lock;
    struct bt_msg look; /* "look at me" */
    bool look_queued;   /* [lock] */
    bool done;          /* [lock] no event follows */
    bool released;      /* [lock] */
    int abort_rc;       /* [lock] asked for by the caller, 0 = no */
    void (*destroy)(struct kv_end *e);
    /* xfer: the end. It is reported from a timer of its own, so that nothing up the stack holds the
     * object when its owner may release it. */
    bool is_send;
    struct bt_list ended_link; /* kv_handoff.ended */
    int end_rc;
    char end_msg[232];
    void (*deliver)(struct kv_end *e);
};

/* A connection to another node. */
struct kv_peer {
    struct bt_list link; /* kv_handoff.peers */
    struct kv_handoff *h;
    struct kv_format *fmt; /* NULL in a relay until they have greeted */
    struct bt_net_peer *net;
    char *dialed; /* the address we called, NULL if they called */
    bool greeted; /* their HELLO is in and right */
    bool closing;
    int fail_rc; /* why it closes; 0 = the net's reason */
    char fail_msg[232];
    char name[WIRE_HANDOFF_MAX_NAME + 1]; /* printable */
    uint64_t incarnation;
    uint8_t version;         /* of what is said after both HELLOs: the highest both speak */
    struct kv_layout layout; /* of their pool */
    uint64_t base;
    char key[WIRE_HANDOFF_MAX_KEY];
    size_t key_bytes;
    struct bt_net_rkey *rkey; /* of their pool; made when first needed */
    uint8_t their_method;     /* forced by them, or WIRE_HANDOFF_NO_METHOD */
    uint64_t last_in_ns;      /* on the net's clock */
    struct bt_net_timer tick;
    struct bt_list sends, recvs; /* bound to it */
    size_t out_bytes;            /* DATA and puts that UCX has not completed */
    size_t in_bytes;             /* gets that UCX has not completed */
};

struct kv_send {
    struct kv_end end;
    uint32_t n_tokens, n_pages;
    uint32_t have_page; /* pages before it are not here */
    struct kv_send_events events;
    /* [end.lock], written by the caller's thread */
    uint32_t *pages, *generations; /* [n_pages]; the first n_known count and never change */
    uint32_t n_known;
    uint32_t *done; /* [n_layers] tokens that are there */
    bool finished;
    bool ticketed;
    struct kv_first first;
    /* xfer */
    enum kv_send_state state;
    struct kv_peer *peer; /* in TICKETED to ABORTING, NULL once it is gone */
    struct bt_list peer_link;
    uint32_t ticket;
    enum bt_net_method method;
    uint32_t first_page; /* D has what lies before it */
    uint32_t *sent;      /* [n_layers] pages announced, or before first_page */
    uint32_t *sealed;    /* [n_layers] scratch of the mover */
    uint64_t announced;  /* PULL: bytes, with this ticket */
    uint64_t reached;    /* of them in place, as D says */
    uint32_t n_ops;      /* operations that read our pages */
    int why_rc;          /* ABORTING: what done will say */
    char why[232];
    bool acked, aborted_seen, owe_aborted;
    char reader[WIRE_HANDOFF_MAX_NAME + 1]; /* who may acknowledge */
    uint64_t reader_incarnation;
    struct bt_net_timer timer; /* lease in WAITING, re-ask in COMMITTED, proof in ABORTING */
    struct kv_work work;
    struct bt_list outs; /* PUT: struct kv_out.link, in the order in which they are told of */
    /* PUT: the pages of D, from first_page on */
    uint32_t *d_pages;
    struct bt_net_rkey *d_rkey;
};

/* One announced run of P's pages on its way into ours. */
struct kv_piece {
    struct bt_list link; /* kv_recv.pieces or kv_recv.again */
    struct kv_recv *r;
    uint32_t layer, first_page; /* of the prompt, in P's pages */
    struct wire_piece at;
    bool again;
    size_t landed; /* DATA: bytes that are in */
    int rc;
    uint32_t n_ops;
    size_t bytes;
    char *bounce; /* where page sizes differ */
};

struct kv_recv {
    struct kv_end end;
    uint32_t n_tokens, n_pages, n_have;
    struct kv_recv_events events;
    uint32_t first_page;           /* of ours that is filled */
    uint32_t *pages, *generations; /* [n_pages], by page of the prompt; from first_page on */
    char *peer_name, *peer_address;
    uint64_t peer_incarnation;
    /* Of a relayed prompt, else NULL and 0. */
    char *origin_name, *origin_address;
    uint64_t origin_incarnation;
    int32_t *ids; /* [n_tokens] or NULL */
    uint32_t block_tokens;
    struct kv_key root;
    /* xfer */
    enum kv_recv_state state;
    struct kv_peer *peer;
    struct bt_list peer_link;
    const char *transport; /* of the last peer; static */
    uint64_t bytes;        /* in place and checked */
    uint64_t reached;      /* of them, that P knows of */
    uint32_t ticket;
    enum bt_net_method method;
    bool retried;
    uint32_t p_pages;      /* the prompt in P's pages */
    uint32_t p_first;      /* of P's that is sent */
    uint32_t *got;         /* [n_layers] P's pages announced, or before p_first */
    uint32_t *placed;      /* [n_layers] P's pages in place, or before p_first, without a gap */
    struct bt_list late;   /* in place, but a page before is not */
    uint64_t n_placed;     /* over all layers, P's pages in place and checked */
    struct bt_list pieces; /* announced, not started */
    struct bt_list again;  /* asked for again */
    struct kv_piece *part; /* DATA: the piece that is coming in */
    struct kv_copy copy;   /* DATA: of it, into our pages */
    uint32_t n_ops;        /* operations that write our pages or bounce buffers */
    bool committed;        /* COMMIT is in */
    bool aborted_seen, owe_aborted;
    struct kv_first first;
    int why_rc;
    char why[232];
    struct bt_net_timer timer; /* proof in ABORTING (PUT) */
    struct kv_work work;
    struct bt_net_mem *mem; /* PUT: our pages, for this ticket */
};

/* A ticket that found no kv_send yet. */
struct kv_ticket {
    struct bt_list link; /* kv_handoff.tickets, oldest first */
    struct kv_peer *peer;
    struct kv_handoff_id id;
    uint32_t ticket, n_tokens, n_pages, n_have;
    bool relayed; /* names an origin */
    uint64_t deadline_ns;
    enum bt_net_method method;
    uint32_t *d_pages;
    size_t key_bytes;
    char key[WIRE_HANDOFF_MAX_KEY];
};

struct kv_tomb {
    struct kv_handoff_id id;
    int rc;
    uint64_t until_ns; /* 0 = empty */
};

/* A finished recv whose ACK the other side has not confirmed. */
struct kv_confirm {
    struct bt_list link; /* kv_handoff.confirms, oldest first */
    struct kv_handoff_id id;
    uint32_t ticket;
    uint64_t peer_incarnation;
    uint64_t deadline_ns;
    struct kv_format *fmt;
    char *peer_address;
};

struct kv_handoff {
    struct kv_handoff_cfg cfg;
    struct kv_relay_ops relay;
    bool relays;
    char *node_name;
    struct bt_net *net;
    struct bt_list formats;
    struct kv_format *own; /* NULL in a relay */
    int forced_method;     /* enum bt_net_method, -1 = none */

    pthread_mutex_t lock;
    pthread_cond_t cond;        /* registered, unregistered */
    struct bt_map sends, recvs; /* [lock] mixed id -> kv_end chain */
    struct bt_list all;         /* [lock] */
    uint32_t n_sends, n_recvs;  /* [lock] open */
    int reg_state; /* [lock] 0 no answer yet, 1 registered, 2 unregistered, < 0 error */
    struct bt_err reg_err;

    /* relaxed atomics, written by xfer */
    uint32_t n_aborting, n_peers;
    uint64_t bytes, checksum_errors, stale, connections;

    XXH3_state_t *xxh; /* for checksums in several steps */
    bool ready, stopping;
    struct bt_list peers, tickets, confirms, ready_list, ended;
    struct kv_tomb tombs[KV_TOMBS]; /* a ring */
    uint32_t n_tickets;             /* atomic: also read by stats */
    uint32_t next_ticket, next_tomb;
    struct bt_net_timer pump_timer, end_timer, ticket_timer, confirm_timer;
    struct bt_msg start_msg, stop_msg;
};

/* handoff.c */
void kv_work_ready(struct kv_handoff *h, struct kv_work *w);
void kv_work_drop(struct kv_work *w);
bool kv_id_eq(struct kv_handoff_id a, struct kv_handoff_id b);
struct kv_send *kv_find_send(struct kv_handoff *h, struct kv_handoff_id id);
struct kv_recv *kv_find_recv(struct kv_handoff *h, struct kv_handoff_id id);
/* Enters the object in the id map and counts it: BT_E_EXISTS, BT_E_EXHAUSTED, BT_E_NOMEM. */
int kv_end_enter(struct kv_end *e, struct bt_err *err) BT_MUST_USE;
/* Caller's side: asks xfer to look at the object. lock is held. */
void kv_end_look_locked(struct kv_end *e);
/* xfer: the look message has come; true if the object is alive (else it may be freed by now). */
bool kv_end_looked(struct kv_end *e);
/* xfer: the last event will be reported, later; nothing else happens to the object. */
void kv_end_finish(struct kv_end *e, int rc, const char *msg);
void kv_end_release(struct kv_end *e);
void kv_add(uint64_t *counter, uint64_t n);
const char *kv_method_name(int method);
/* Codes that come from a peer never speak of this node. */
int kv_peer_rc(int32_t rc);

/* peer.c */
extern const struct bt_net_handlers kv_peer_handlers;
struct kv_peer *
kv_peer_dial(struct kv_handoff *h, struct kv_format *fmt, const char *address, struct bt_err *err);
/* Packs the head in the version that the peer speaks. */
size_t kv_peer_pack(const struct kv_peer *p, struct wire_handoff *m, char *buf);
/* Packs and sends; the peer is closed if that fails. False then. */
bool kv_peer_send(struct kv_peer *p, struct wire_handoff *m, struct bt_str data);
/* A peer broke the rules: logged, closed. */
void kv_peer_violation(struct kv_peer *p, const char *what, const struct wire_handoff *m);
void kv_peer_close(struct kv_peer *p, int rc, const char *msg);
/* A handoff was bound to it: watch for silence. */
void kv_peer_watch(struct kv_peer *p);

/* send.c, send_move.c: the prefill node */
void kv_send_set_state(struct kv_send *s, enum kv_send_state state);
void kv_send_on_message(struct kv_peer *p, const struct wire_handoff *m, struct bt_str data);
void kv_send_peer_lost(struct kv_send *s);
void kv_send_tickets_lost(struct kv_peer *p);
void kv_send_op_done(struct kv_send *s);
void kv_send_fail(struct kv_send *s, int rc, const char *msg);
bool kv_send_move(struct kv_work *w, size_t *budget);
/* Puts that are over but not told of, because an earlier one is not: they are not told any more. */
void kv_send_drop_placed(struct kv_send *s);
void kv_send_resend(struct kv_send *s, const struct wire_handoff *m);
/* D is so far. */
void kv_send_reached(struct kv_send *s, const struct wire_handoff *m);
void kv_send_on_ticket_timer(struct bt_net_timer *t);
void kv_ticket_free(struct kv_ticket *t);

/* recv.c, recv_move.c: the decode node */
void kv_recv_set_state(struct kv_recv *r, enum kv_recv_state state);
void kv_recv_on_message(struct kv_peer *p, const struct wire_handoff *m, struct bt_str data);
void kv_recv_peer_ready(struct kv_recv *r);
void kv_recv_peer_lost(struct kv_recv *r, int rc, const char *msg);
void kv_recv_fail(struct kv_recv *r, int rc, const char *msg);
void kv_recv_check_end(struct kv_recv *r);
bool kv_recv_move(struct kv_work *w, size_t *budget);
/* DATA: the next bytes of the piece; the last ones end it. */
void kv_recv_place_part(struct kv_piece *piece, struct bt_str data);
/* PUT: the bytes are in our pages. */
void kv_recv_placed(struct kv_piece *piece);
void kv_recv_piece_free(struct kv_piece *piece);
/* The piece is in place and checked, or was here before. */
void kv_recv_piece_placed(struct kv_piece *piece);
void kv_recv_confirm_peer_ready(struct kv_peer *p);
void kv_recv_on_confirm_timer(struct bt_net_timer *t);
void kv_confirm_free(struct kv_confirm *c);

/* format.c: pools and their users */
/* The instance's own; its memory is registered by kv_format_register. NULL without memory. */
struct kv_format *
kv_format_new(struct kv_handoff *h, struct kv_pool *pool, const uint8_t compat[32]);
int kv_format_register(struct kv_handoff *h, struct kv_format *f, struct bt_err *err) BT_MUST_USE;
/* Relay: the one of this layout (page size and all that must be equal) and digest, opened if need
 * be. */
int kv_format_find(struct kv_handoff *h,
                   const struct kv_layout *layout,
                   const uint8_t compat[32],
                   struct kv_format **ret,
                   struct bt_err *err) BT_MUST_USE;
struct kv_format *kv_format_use(struct kv_format *f);
void kv_format_drop(struct kv_format *f); /* NULL is fine; any thread */
void kv_formats_unregister(struct kv_handoff *h);
void kv_formats_free(struct kv_handoff *h);

#endif
