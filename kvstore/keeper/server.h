/* The keeper: holds memory for the processes of one host, so that it outlives them.
 *
 * A region belongs to (node, region name) and has a digest of everything that must be equal for its
 * content to be of use. Its descriptor goes to one incarnation of the node at a time: who asks
 * while another one's process lives waits until that process is proven over (its pidfd), or is
 * refused with both incarnations named. A region whose digest, size or kind differs from what is
 * asked for is replaced by a new one. A process may register memory of its own: after a keeper's
 * death its engines do so with the next one. A region that nobody has is kept for `orphan_ns`, less
 * when others need the room.
 *
 * Only processes of the keeper's own user are served: the socket has mode 0600 and the peer's
 * credentials are checked besides.
 *
 * Thread: one, in kv_keeper_run, except kv_keeper_stop. */
#ifndef KV_KEEPER_SERVER_H
#define KV_KEEPER_SERVER_H

#include "common/base/rc.h"

struct kv_keeper_conf {
    const char *socket; /* path */
    uint32_t max_clients, max_regions;
    uint64_t max_bytes; /* of all regions; 0 = the host's memory */
    uint64_t orphan_ns; /* BT_NEVER_NS = for ever */
    bool huge_pages;    /* try reserved huge pages first */
};

struct kv_keeperd;

/* Binds the socket. BT_E_EXISTS: another keeper has it; BT_E_CONFIG: path; BT_E_SYS. */
int kv_keeperd_create(const struct kv_keeper_conf *conf,
                      struct kv_keeperd **ret,
                      struct bt_err *err) BT_MUST_USE;
/* Serves until told to stop. */
void kv_keeperd_run(struct kv_keeperd *k);
void kv_keeperd_stop(struct kv_keeperd *k); /* any thread */
/* Removes the socket and lets go of all memory. NULL is fine. */
void kv_keeperd_destroy(struct kv_keeperd *k);

#endif
