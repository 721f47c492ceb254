/* Private to the store's client: client.c (life, find, dispatch), client_load.c, client_stall.c,
 * client_put.c, client_lend.c. */
#ifndef KV_STORE_CLIENT_INT_H
#define KV_STORE_CLIENT_INT_H

#include "kvstore/block/ring.h"
#include "kvstore/store/client.h"
#include "kvstore/store/link.h"

#define MAX_HOLDERS    4 /* of a block that are remembered */
#define KV_CLIENT_PUTS 8 /* to one daemon at once */

/* The live daemons and who they are; immutable, shared by reference under kv_client.lock. */
struct ring {
    uint32_t refs;
    struct bt_members *members;
    struct kv_ring *ring;
    size_t n;
    const struct bt_member *at[];
};

/* What find learns: kv_find.priv until end. */
struct seek {
    struct kv_client *client;
    struct kv_find *find;
    uint64_t lookup; /* [lock] 0 = none under way */
    struct bt_members *members;
    uint32_t n;       /* blocks that can be had */
    uint32_t n_asked; /* blocks below */
    struct kv_key root;
    int32_t *ids; /* [n_asked * block_tokens], in the same piece of memory */
    struct seek_block {
        struct kv_key key, parent;
        uint64_t prefix; /* of the ids before it */
        uint8_t n;
        const struct bt_member *holders[MAX_HOLDERS]; /* inside members */
    } blocks[];
};

struct kv_client {
    struct kv_source src;
    struct kv_client_cfg cfg;
    char *node_name;
    struct kv_links links;
    struct bt_mem_region staging;
    uint64_t next_req;    /* net */
    struct bt_list loads; /* net: struct pull.link */
    char *bufs[8];        /* net: of a layer each, the last used on top: still in the cache */
    uint32_t n_bufs;
    struct bt_net_timer watch; /* net: looks after holders while loads wait for them */
    /* net: offers on their way to be lent, and those that are (struct stash.link) */
    struct bt_list waiting, lent;
    uint64_t lent_bytes;
    struct bt_net_timer lend_timer; /* while there are any */
    bool closing;
    struct kv_cached *cached; /* net: free ones, the last used on top: still in the cache */
    bool lend_more;           /* net: room for another one has come up */
    struct bt_msg meet_msg;   /* daemons may have become known */

    pthread_mutex_t lock;  /* what follows */
    pthread_cond_t cond;   /* store-put: work, slots, stop */
    struct ring *ring;     /* NULL = not known */
    struct bt_list offers; /* struct stash.stage_link: to be copied */
    uint32_t n_offers;     /* of them, and waiting */
    uint32_t *free_slots, n_free_slots, n_slots;
    uint32_t n_alive; /* pulls and stashes not yet freed */
    bool stopping;
    bool meeting;          /* meet_msg is under way */
    uint64_t recent[4096]; /* fingerprints of what was offered lately */
    pthread_t putter;

    /* relaxed atomics */
    struct kv_client_stats stats;
};

/* A connection's user data: what waits for it or is under way on it. */
struct server {
    struct bt_list fetches;  /* struct fetch.link */
    struct bt_list puts;     /* struct copy.link */
    uint32_t n_quiet;        /* looks in a row without a word from it, while fetches wait */
    uint64_t look_ns;        /* the last one */
    bool stalled;            /* at look_ns; until it says something */
    uint32_t n_sent, window; /* puts that it knows of, and how many it may */
    uint64_t put_ns;         /* of n_sent: since when none has come to its end */
    bool cannot_read;        /* what we would lend it */
    bool slow;               /* has kept what was lent for too long, and said nothing since */
};

static inline void count(uint64_t *counter, uint64_t n)
{
    __atomic_add_fetch(counter, n, __ATOMIC_RELAXED);
}

struct ring *kv_client_ring(struct kv_client *c); /* a reference; NULL = no daemon */
void kv_client_ring_unref(struct kv_client *c, struct ring *r);
/* The connection to a member's block server; NULL: it cannot be called. */
struct kv_link *kv_client_dial(struct kv_client *c, const struct bt_member *m);
struct server *kv_client_server(struct kv_link *l); /* NULL without memory */
/* One of n_alive is gone. */
void kv_client_gone(struct kv_client *c);

/* client_flow.c: with all of them free */
void kv_client_cached_free(struct kv_client *c);

/* client_load.c */
void kv_client_load(struct kv_source *src, struct kv_load *l);
void kv_client_load_cancel(struct kv_source *src, struct kv_load *l);
void kv_client_loads_ready(struct kv_client *c, struct kv_link *l);
void kv_client_loads_closed(struct kv_client *c, struct server *s);
void kv_client_on_have(struct kv_client *c,
                       struct kv_link *l,
                       const struct wire_store *m,
                       struct bt_str data);
void kv_client_on_miss(struct kv_client *c, struct kv_link *l, const struct wire_store *m);
void kv_client_on_data(struct kv_client *c,
                       struct kv_link *l,
                       const struct wire_store *m,
                       struct bt_str data);
/* True if there is more to do at once. */
bool kv_client_pump_loads(struct kv_client *c, size_t *budget);
bool kv_client_pump_puts(struct kv_client *c, size_t *budget);

/* client_stall.c */
void kv_client_on_watch(struct bt_net_timer *t);

/* client_put.c */
bool kv_client_offer(struct kv_source *src, const struct kv_offer *o);
bool kv_client_wants(struct kv_source *src);
void *kv_client_putter(void *arg);
void kv_client_puts_ready(struct kv_client *c, struct kv_link *l);
void kv_client_puts_closed(struct kv_client *c, struct server *s);
/* Now and then while it has puts: closes it if it lives and ends none. */
void kv_client_check_puts(struct kv_client *c, struct kv_link *l);
void kv_client_on_go(struct kv_client *c,
                     struct kv_link *l,
                     const struct wire_store *m,
                     struct bt_str data);
void kv_client_on_done(struct kv_client *c, struct kv_link *l, const struct wire_store *m);

struct copy *kv_client_find_copy(struct kv_link *l, uint64_t req);

/* client_lend.c */
void kv_client_on_taken(struct kv_client *c, struct kv_link *l, const struct wire_store *m);
void kv_client_on_lend_timer(struct bt_net_timer *t);
void kv_client_lends_stop(struct kv_client *c);

#endif
