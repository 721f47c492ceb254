/* Private to the store's client: puts (client_put.c) and blocks that are lent (client_lend.c).
 * Net's thread, except a stash in kv_client.offers, which is the thread "store-put"'s until it is
 * back. */
#ifndef KV_STORE_CLIENT_PUT_INT_H
#define KV_STORE_CLIENT_PUT_INT_H

#include "kvstore/store/client_int.h"

#define NO_SLOT UINT32_MAX

/* A stash on its way to one owner. */
struct copy {
    struct bt_list link; /* server.puts */
    struct stash *stash;
    struct kv_link *l;
    uint64_t incarnation;
    uint64_t req;
    enum bt_net_method method;
    bool sent, going, done;
    bool lent;            /* the owner reads the pages: LEND, not PUT */
    bool flows;           /* message: we read them as we send, the sums follow */
    bool taken;           /* lent: it has read all, and we have said KEEP; flows: we have */
    bool called_back;     /* lent: what it reads does not count; flows: it goes on from the slot */
    struct kv_flow *flow; /* flows: of what was begun */
    uint32_t n_ops;
    uint32_t layer; /* message: next to send */
    size_t offset;
    int rc;
};

struct stash {
    struct bt_list link;       /* kv_client.waiting or .lent */
    struct bt_list stage_link; /* kv_client.offers */
    struct kv_client *client;
    struct bt_msg msg;
    struct kv_blob_meta meta;
    int32_t *ids;
    uint64_t *sums;
    struct kv_pool *pool;
    uint32_t *pages; /* held by who has offered them, until offer_done */
    void (*offer_done)(void *arg, int rc);
    void *offer_arg;
    uint64_t since_ns; /* offered; or lent */
    bool pages_given;  /* offer_done was called */
    bool readable;     /* its pool can be read here */
    bool lendable;     /* its pool is a memory file that others can see */
    bool lent;         /* in kv_client.lent */
    bool staged;       /* the bytes lie in the slot */
    bool staging;      /* "store-put" has it, or will */
    bool copying;      /* [lock] store-put has begun */
    bool dropped;      /* it will not be staged */
    struct bt_net_file file;
    uint64_t sample;
    uint32_t slot;      /* NO_SLOT = none */
    uint32_t n_readers; /* copies that read the pages and may */
    uint32_t n_copies, n_left;
    struct copy copies[8];
};

/* client_put.c */
/* The daemon may have so many at once: sends what waits for that. */
void kv_client_send_puts(struct kv_link *l);
/* A new copy of it for the owner behind l; not sent yet. */
struct copy *kv_client_add_copy(struct stash *s, struct kv_link *l, uint64_t incarnation);
/* It came to its end; the stash may be gone afterwards. */
void kv_client_copy_done(struct copy *k, int rc);
/* It has ended if it is done and nothing of it is under way. */
void kv_client_check_copy(struct copy *k);
/* A layer of what is staged. */
const char *kv_client_slot_layer(const struct stash *s, uint32_t layer);
/* The owner knows nothing of it any more. */
void kv_client_unsend(struct copy *k);
/* Has it copied into a slot by "store-put". */
void kv_client_stage(struct stash *s);
/* Not copied, after all; whoever calls owns its reference then. False: too late. */
bool kv_client_unstage(struct stash *s);
/* The pages go back if nobody needs them; once. rc: what is said if they were not staged. */
void kv_client_give_pages(struct stash *s, int rc);
/* One of n_left is gone. */
void kv_client_unref_stash(struct stash *s);

/* client_flow.c */
/* Sends a part, gathers before that if it has to. False: nothing to send now. */
bool kv_client_flow_on(struct copy *k, size_t *budget);
/* No more of it comes: the pages are gone and it was not staged. */
void kv_client_flow_drop(struct copy *k);
/* No part of it is under way. */
void kv_client_flow_free(struct copy *k);

/* client_lend.c */
void kv_client_on_offer(struct bt_msg *msg, void *consumer);
/* Lends what waits, as far as that may be. */
void kv_client_lend_next(struct kv_client *c);
void kv_client_send_lend(struct copy *k);
/* It goes on by way of the staging: at once if it is there, later, or never. */
void kv_client_go_on_staged(struct copy *k);
/* A lent copy was refused, before it was taken. True: it goes on by way of the staging. */
bool kv_client_lend_refused(struct copy *k, int rc);
/* The owner of a lent copy does not read the pages any more, or what it reads does not count. */
void kv_client_reader_gone(struct copy *k);

#endif
