/* A process's side of the keeper: memory that outlives it.
 *
 *   kv_keeper_open(&cfg, &keeper, &err);
 *   kv_keeper_get(keeper, &want, &region, &err);      as many as there are regions
 *   kv_keeper_start(keeper, &err);
 *   ...
 *   kv_keeper_close(keeper);
 *
 * Serving never depends on the keeper. If there is none, if it does not answer, or if a predecessor
 * lives longer than we want to wait, `get` makes memory of its own, and the thread "keeper" brings
 * it to the keeper as soon as that is possible. The thread also notices the keeper's end and
 * registers everything with the next one, for ever, with growing pauses.
 *
 * Memory of a device goes the same way, but the keeper makes none: `get` gives what a predecessor
 * registered, or memory of one's own, which is registered from `start` on: its content is expected
 * to be whole by then.
 *
 * Threads: open, get, start and close by one thread; between start and close the connection is the
 * thread "keeper"'s. */
#ifndef KV_KEEPER_CLIENT_H
#define KV_KEEPER_CLIENT_H

#include "common/mem/mem.h"
#include "kvstore/keeper/wire.h"

struct kv_keeper;

struct kv_keeper_cfg {
    const char *socket;   /* path; copied */
    const char *node;     /* name of the node, the same for its successor; copied */
    uint64_t incarnation; /* of this process, not 0 */
    uint64_t wait_ns;     /* for a predecessor's end, and for the keeper's answers */
};

/* Does not need a keeper to be there. BT_E_CONFIG: a bad path or name. */
int kv_keeper_open(const struct kv_keeper_cfg *cfg,
                   struct kv_keeper **ret_keeper,
                   struct bt_err *err) BT_MUST_USE;
/* Ends the thread and the connection. The memory stays with the keeper, and with whoever has it
 * mapped. NULL is fine. */
void kv_keeper_close(struct kv_keeper *keeper);

struct kv_keeper_want {
    const char *name; /* of the region within the node; at most 31 characters */
    uint8_t digest[32];
    size_t bytes;
    const struct bt_mem_ops *ops; /* of its kind; import must be there */
};

struct kv_keeper_got {
    struct bt_mem_region mem; /* the caller's: free it with mem.ops->free */
    uint64_t id;              /* identity of the memory */
    uint64_t previous;        /* incarnation that wrote it last, 0 = none that is known */
    bool kept;                /* it has the content that a predecessor left */
    bool from_keeper;         /* else it is our own, and the keeper gets it later */
};

#define KV_KEEPER_MAX_REGIONS 16

/* Before start. Blocks for wait_ns at most, and a second or so. Why memory is our own is logged.
 * Fails only if there is no memory at all (BT_E_NOMEM), or for what is wrong in `want`
 * (BT_E_INVALID). */
int kv_keeper_get(struct kv_keeper *keeper,
                  const struct kv_keeper_want *want,
                  struct kv_keeper_got *ret,
                  struct bt_err *err) BT_MUST_USE;
int kv_keeper_start(struct kv_keeper *keeper, struct bt_err *err) BT_MUST_USE;
uint64_t kv_keeper_incarnation(const struct kv_keeper *keeper);
/* Whether a keeper has all of it now. Any thread. */
bool kv_keeper_has_all(const struct kv_keeper *keeper);

/* What a keeper holds, without being one of its nodes. Waits for `limit_ns` at most. At most `max`
 * rows are stored; *ret_n is their number. BT_E_UNAVAILABLE, BT_E_DENIED, BT_E_DEADLINE,
 * BT_E_PEER_PROTOCOL. */
int kv_keeper_list(const char *socket,
                   uint64_t limit_ns,
                   struct kv_keeper_row *rows,
                   size_t max,
                   size_t *ret_n,
                   struct bt_err *err) BT_MUST_USE;

#endif
