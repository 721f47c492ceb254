/* The store path: takes a prompt from its prefill node (P) and hands it to a decode node (D) while
 * it comes in, layer by layer, so that P and D never connect.
 *
 * D's ticket names P (kvstore/handoff, relays). The relay takes pages for what D lacks, asks P for
 * it as a decode node would, and sends on whatever has come. Both hops are handoffs with all their
 * rules: states, proof, leases, checks of every byte. What ends one hop ends the other with the
 * same reason.
 *
 * Memory is bounded: one pool for each layout, of a set size. A prompt that finds no room waits,
 * without holding anything, in the order of arrival, for a limited time; then it is refused, and
 * so is what can never fit. Pages are taken all at once, so nobody holds some while waiting for
 * more. Only members of the cluster are called; an origin that is none yet may be about to become
 * known here, and waits likewise.
 *
 * With tiers, the full blocks of what passed are kept there: the copy is made on the thread
 * "relay-keep", and the pages are free when it is done.
 *
 * Threads: everything runs on the handoff's net thread; the functions here from any. */
#ifndef KV_STORE_RELAY_H
#define KV_STORE_RELAY_H

#include "kvstore/handoff/handoff.h"
#include "kvstore/tier/tiers.h"

struct kv_relay; /* whoever created it owns it */

/* A prompt that the relay has done with. Strings are borrowed. */
struct kv_relay_passed {
    struct kv_handoff_id id; /* hi: the router's number of the request */
    const char *origin, *asker;
    uint32_t n_tokens, n_have;
    uint64_t bytes;            /* of the pages that it took */
    uint64_t wait_ns, move_ns; /* for pages and to be known; from then on */
    int rc;                    /* BT_OK: handed on whole */
};

struct kv_relay_cfg {
    struct bt_net_cfg net;
    const char *node_name; /* copied */
    uint64_t incarnation;
    uint64_t silence_ns, lease_ns; /* of handoffs */
    uint64_t wait_ns;              /* longest wait for pages, and to be known as a member */
    uint64_t pool_bytes;           /* for each layout */
    uint32_t max_formats;          /* layouts at once */
    uint32_t max_open;             /* prompts at once, waiting ones included */
    size_t max_inflight_bytes;
    struct kv_tiers *tiers; /* keeps the full blocks of what passes; borrowed; NULL = nothing */
    /* [net] Once for each prompt that was asked for, in whatever way it ends. NULL is fine. */
    void (*passed)(void *arg, const struct kv_relay_passed *p);
    /* [net] True if this is a member whose prompts may be asked for. */
    bool (*is_member)(void *arg, const struct kv_origin *origin);
    void *arg;
};

struct kv_relay_stats {
    uint32_t n_open;    /* being moved, or being kept after that */
    uint32_t n_keeping; /* of n_open: nobody waits for them any more */
    uint32_t n_waiting; /* for pages, or to be known */
    uint64_t relayed;   /* handed on whole */
    uint64_t failed;    /* begun, not ended well */
    uint64_t refused;   /* no room in time, too large, from a stranger */
    uint64_t bytes_in;
    uint64_t kept;                    /* blocks */
    uint32_t pages_total, pages_free; /* of all pools */
    struct kv_handoff_stats handoff;
};

int kv_relay_create(const struct kv_relay_cfg *cfg,
                    struct kv_relay **ret_relay,
                    struct bt_err *err) BT_MUST_USE;
/* is_member may say otherwise now. */
void kv_relay_members_changed(struct kv_relay *r);
/* Refuses new prompts from now on. */
void kv_relay_drain(struct kv_relay *r);
/* Ends what is open (its nodes are told), waits for the proofs, closes. NULL is fine. */
void kv_relay_destroy(struct kv_relay *r);
/* Of the transfer listener; borrowed. */
const char *kv_relay_address(const struct kv_relay *r);
struct kv_relay_stats kv_relay_stats(struct kv_relay *r);

#endif
