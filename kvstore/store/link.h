/* Connections of the block server and its clients: greeting, signs of life, messages. One `struct
 * kv_links` is one net with one thread and one region of memory that peers may be told offsets in.
 * Who calls is the client of that connection, who is called the server.
 *
 * Private to kvstore/store. Everything but create and destroy is for the net's thread. */
#ifndef KV_STORE_LINK_H
#define KV_STORE_LINK_H

#include "common/ds/list.h"
#include "common/net/net.h"
#include "common/thr/time.h"
#include "proto/wire/store.h"

#include <pthread.h>

#define KV_LINK_PART_BYTES     (252u << 10) /* of one DATA message */
#define KV_LINK_CACHED_BYTES   (256u << 10) /* gathered in one go, and sent from the cache */
#define KV_LINK_PIECE_BYTES    (512u << 10) /* of one read or write */
#define KV_LINK_INFLIGHT_BYTES (8u << 20)   /* DATA of one connection that is not out */
#define KV_LINK_SLICE_BYTES    (4u << 20)   /* moved in one go, then others get a turn */

struct kv_link;
struct kv_links;

struct kv_link_ops {
    void *arg;
    /* Greeted: messages may be sent. `user` is NULL. */
    void (*ready)(void *arg, struct kv_link *l);
    void (*message)(void *arg, struct kv_link *l, const struct wire_store *m, struct bt_str data);
    /* Once, last, also for one that was never ready; no operation on it is under way any more. */
    void (*closed)(void *arg, struct kv_link *l, int rc);
    /* True: it must show signs of life. */
    bool (*is_busy)(void *arg, const struct kv_link *l);
    /* Work that was asked for by kv_links_pump. */
    void (*pump)(void *arg);
};

struct kv_link {
    struct bt_list link; /* kv_links.all */
    struct kv_links *links;
    struct bt_net_peer *net;
    char *dialed; /* the address we called, NULL if they called */
    bool greeted, closing;
    uint8_t version;                    /* that both speak */
    char name[WIRE_STORE_MAX_NAME + 1]; /* printable; of a called one: as it said */
    uint64_t incarnation;
    uint64_t base, bytes; /* of their memory */
    char key[WIRE_STORE_MAX_KEY];
    size_t key_bytes;
    struct bt_net_rkey *rkey; /* made when first needed */
    uint8_t their_method;     /* forced by them, or WIRE_STORE_NO_METHOD */
    uint64_t last_in_ns;      /* on the net's clock */
    struct bt_net_timer tick;
    size_t out_bytes; /* DATA that is not out */
    void *user;       /* whose `closed` frees it */
};

struct kv_links_cfg {
    struct bt_net_cfg net;
    const char *node_name; /* copied */
    uint64_t incarnation;
    uint64_t silence_ns;
    void *base; /* memory that blocks lie in; borrowed, outlives the links */
    size_t bytes;
    bool serves; /* takes calls */
    struct kv_link_ops ops;
};

/* For tests: the highest wire version that is spoken. */
extern int kv_link_version_max;

struct kv_links {
    struct kv_links_cfg cfg;
    char *node_name;
    struct bt_net *net;
    int forced_method; /* -1 = none */
    struct bt_net_mem *mem;
    struct bt_str key;
    struct bt_list all;
    struct bt_net_timer pump_timer;
    bool stopping;
    uint32_t n_links; /* atomic: open now */
};

/* Any thread; blocks until the net's thread runs and the memory is registered. The object is in the
 * caller's storage and stays at its address. */
int kv_links_init(struct kv_links *ls,
                  const struct kv_links_cfg *cfg,
                  struct bt_err *err) BT_MUST_USE;
/* Closes all by force; `closed` of each was called on return. */
void kv_links_fini(struct kv_links *ls);
/* Runs fn(arg) on the net's thread and waits for it. Not on that thread. */
void kv_links_call(struct kv_links *ls, void (*fn)(void *arg), void *arg);

/* The open connection to `address`, or a new one; NULL: err says why. */
struct kv_link *kv_link_dial(struct kv_links *ls, const char *address, struct bt_err *err);
/* Sends a head and some bytes that are copied. False: it is being closed. */
bool kv_link_send(struct kv_link *l, struct wire_store *m, struct bt_str data);
/* Sends a head and bytes that stay valid until `done`, which comes in any case, maybe inside. */
void kv_link_send_data(
    struct kv_link *l, struct wire_store *m, struct bt_str data, bt_net_done_fn done, void *arg);
void kv_link_close(struct kv_link *l, int rc, const char *msg);
/* The peer broke the rules: logged, closed. */
void kv_link_violation(struct kv_link *l, const char *what, const struct wire_store *m);
/* There is something to wait for: watch for silence. */
void kv_link_watch(struct kv_link *l);
/* Makes l->rkey, once. */
int kv_link_rkey(struct kv_link *l, struct bt_err *err) BT_MUST_USE;
/* How bytes go over it: as forced on either side, else as the transport likes. */
enum bt_net_method kv_link_method(const struct kv_link *l);
/* ops.pump is called soon. */
void kv_links_pump(struct kv_links *ls);

#endif
