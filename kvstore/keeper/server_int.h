/* Inside of the keeper: server.c (clients, owners, the loop), region.c (regions). All of it belongs
 * to the keeper's one thread. */
#ifndef KV_KEEPER_SERVER_INT_H
#define KV_KEEPER_SERVER_INT_H

#include "common/ds/list.h"
#include "kvstore/keeper/server.h"
#include "kvstore/keeper/sock.h"

#include <sys/types.h>

/* A process in one incarnation of its node. Lives as long as a client or region refers to it. */
struct kv_owner {
    struct bt_list link;
    int pidfd;
    pid_t pid; /* for texts */
    char node[KV_KEEPER_NODE];
    uint64_t incarnation;
    uint32_t n_refs;
    bool over; /* its process is; has no regions any more */
};

struct kv_region {
    struct bt_list link;
    char node[KV_KEEPER_NODE];
    char name[KV_KEEPER_REGION];
    uint8_t digest[32];
    uint64_t bytes; /* that are there */
    uint64_t want_bytes;
    uint32_t kind, device;
    uint64_t id;
    enum kv_keeper_pages pages;
    int fd;
    struct kv_owner *owner; /* NULL: nobody has it */
    uint64_t incarnation;   /* of the owner, or the last one */
    uint64_t orphan_ns;     /* since when nobody has it */
};

struct kv_client {
    struct bt_list link;
    int fd;
    struct kv_owner *owner; /* NULL before its HELLO */
    bool ended;             /* close it once its event is handled */
    bool waits;             /* for the end of a region's owner: `request` is open */
    struct kv_keeper_request request;
    uint64_t deadline_ns; /* for its HELLO, or while it waits */
};

struct kv_keeperd {
    struct kv_keeper_conf conf;
    char path[sizeof(((struct sockaddr_un *)0)->sun_path)];
    int lock_fd, listen_fd, wake_fd;
    bool stop; /* told through wake_fd */
    struct bt_list clients, owners, regions;
    uint32_t n_clients, n_owners, n_regions;
    uint64_t bytes; /* of all regions */
    struct pollfd *polls;
    void **polled; /* what stands behind each */
    uint32_t n_polls, cap_polls;
};

/* ---- region.c ---- */
struct kv_region *kv_region_find(const struct kv_keeperd *k, const char *node, const char *name);
/* Whether its content is what the request asks for. */
bool kv_region_fits(const struct kv_region *r, const struct kv_keeper_request *q);
/* A new region in the place of what is there under the name; orphans make room. BT_E_EXHAUSTED,
 * BT_E_UNSUPPORTED, BT_E_NOMEM. */
int kv_region_make(struct kv_keeperd *k,
                   const struct kv_owner *owner,
                   const struct kv_keeper_request *q,
                   struct kv_region **ret,
                   struct bt_err *err) BT_MUST_USE;
/* The same with memory that the process brings; fd is consumed on success. BT_E_INVALID: it is none
 * or too small. */
int kv_region_take(struct kv_keeperd *k,
                   const struct kv_owner *owner,
                   const struct kv_keeper_request *q,
                   int fd,
                   struct bt_err *err) BT_MUST_USE;
void kv_region_drop(struct kv_keeperd *k, struct kv_region *r);
void kv_region_set_owner(struct kv_region *r, struct kv_owner *owner);
/* Drops what nobody has had for too long; returns when there may be more. */
uint64_t kv_region_expire(struct kv_keeperd *k, uint64_t now_ns);

/* ---- server.c ---- */
void kv_owner_put(struct kv_keeperd *k, struct kv_owner *o); /* NULL is fine */

#endif
