/* Private to the store's client: loads (client_load.c) and who they wait for (client_stall.c).
 * Net's thread. */
#ifndef KV_STORE_CLIENT_LOAD_INT_H
#define KV_STORE_CLIENT_LOAD_INT_H

#include "kvstore/store/client_int.h"

#define MAX_PARTNERS 64 /* holders of one load that are told apart */

struct block {
    uint8_t tried;                  /* holders, as bits */
    const struct bt_member *member; /* who is asked */
    struct fetch *fetch;            /* NULL: not yet, or no longer */
    uint32_t item;                  /* in it */
    bool have, reading;
    uint32_t layer;      /* layers below it are placed */
    uint64_t *places;    /* [2 * n_layers]: offset and sum of each */
    char *buf;           /* pull without a view: of the layer that comes in */
    size_t offset;       /* bytes of it that are in */
    uint32_t in_layer;   /* message: the layer that comes in */
    struct kv_copy copy; /* message: of that layer, into the pages */
};

struct fetch {
    struct bt_list link; /* server.fetches */
    struct pull *pull;
    struct kv_link *l;
    const struct bt_member *member;
    uint64_t req;
    enum bt_net_method method;
    bool sent;
    uint32_t n_items, n_left;
    uint32_t idx[WIRE_STORE_MAX_ITEMS];
};

struct pull {
    struct bt_list link; /* kv_client.loads */
    struct kv_client *client;
    struct kv_load *load;
    struct seek *seek;
    struct bt_msg start_msg, cancel_msg;
    bool cancelled; /* [client.lock] cancel_msg is under way, or was handled */
    bool cancel_seen, ending;
    bool again; /* blocks wait for room at their holder, and some may be there now */
    uint32_t n, n_good;
    uint32_t cur;    /* layers below it are placed for all of n_good */
    uint32_t n_past; /* of n_good, that have layer cur */
    uint32_t n_ops, n_fetches;
    uint64_t start_ns, asked_ns, first_ns; /* of the load, its first GET, its first layer */
    uint64_t bytes;
    struct bt_net_timer limit;
    struct {
        const struct bt_member *member;
        uint32_t n;
    } partners[MAX_PARTNERS];
    uint32_t n_partners;
    struct block blocks[];
};

/* client_load.c */
/* Ends the pull if it has got all it can get; it may be gone afterwards. */
void kv_pull_check_over(struct pull *p);
/* The holder has failed block i: the next one is asked, or the run ends here. */
void kv_pull_fail_block(struct pull *p, uint32_t i);
/* None of its blocks is read by it any more. */
void kv_fetch_release(struct fetch *f);

/* client_stall.c: the connection to a holder, NULL also if it has fallen silent and not said
 * anything since. */
struct kv_link *kv_client_dial_holder(struct kv_client *c, const struct bt_member *m);

#endif
