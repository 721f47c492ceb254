/* Private to the block server: server.c (life, dispatch), server_get.c, server_put.c. Everything is
 * the net thread's, except counters (relaxed atomics). */
#ifndef KV_STORE_SERVER_INT_H
#define KV_STORE_SERVER_INT_H

#include "kvstore/store/link.h"
#include "kvstore/store/server.h"

struct kv_server {
    struct kv_server_cfg cfg;
    struct kv_links links;
    const struct bt_mem_region *region;
    struct kv_hasher *hasher;
    struct bt_list sending; /* struct get.send_link: with method message, something to send */
    struct bt_list pulling; /* struct put.pull_link: with method pull, something to read */
    uint32_t n_alive;       /* gets and puts not yet freed: some wait for the tiers */
    bool stopping;
    pthread_mutex_t lock; /* n_alive on the way out */
    pthread_cond_t idle;
    uint64_t gets, puts, misses, refused, get_bytes, put_bytes, bad; /* atomic */
};

/* What we hold for one client: kv_link.user. */
struct client {
    struct kv_server *server;
    struct kv_link *link; /* NULL once it is closed */
    struct bt_list gets, puts;
    uint32_t n_gets, n_puts;
    uint64_t pinned_bytes, put_bytes; /* by gets, by puts */
    uint64_t next_put_ns;             /* when the first of puts became it, by the end of another */
    uint32_t n_unread, n_untold;      /* of what it has lent: not read to the end; TAKEN is owed */
    uint64_t done[8];                 /* what is stored, and DONE is owed */
    uint32_t n_done;
    uint32_t refs; /* the link, and every get and put */
};

void kv_server_add(uint64_t *counter, uint64_t n);
void kv_server_unref_client(struct client *c);

void kv_server_on_get(struct client *c, const struct wire_store *m, struct bt_str data);
void kv_server_on_release(struct client *c, const struct wire_store *m);
void kv_server_drop_gets(struct client *c);
/* Sends what the budget allows; true if there is more to do at once. */
bool kv_server_pump_gets(struct kv_server *s, size_t *budget);
/* Closes clients that keep a lease for too long. */
void kv_server_check_leases(struct client *c, uint64_t now);
/* And those that leave a put unfinished: the next layer does not come, or the word on a block that
 * was lent and read. */
void kv_server_check_puts(struct client *c, uint64_t now);

void kv_server_on_put(struct client *c, const struct wire_store *m, struct bt_str data);
void kv_server_on_put_data(struct client *c, const struct wire_store *m, struct bt_str data);
void kv_server_on_placed(struct client *c, const struct wire_store *m);
void kv_server_on_lend(struct client *c, const struct wire_store *m, struct bt_str data);
/* KEEP or DROP. */
void kv_server_on_verdict(struct client *c, const struct wire_store *m);
void kv_server_drop_puts(struct client *c);
bool kv_server_pump_puts(struct kv_server *s, size_t *budget);

#endif
