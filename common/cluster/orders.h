/* Orders of operators that all routers of a cluster follow: short texts by key ("cordon:decode-0",
 * "canary:decode"), kept in Redis beside the membership, so that they outlive every router.
 *
 *   baton:{<cluster>}:orders   hash: key of the order -> its text; no end of life
 *
 * Rules
 * - An order counts once Redis has it. While Redis is away nothing can be ordered, and what was
 *   read last goes on to hold.
 * - If Redis comes back empty (its epoch key differs, see registry.h), whoever still knows orders
 *   writes them again.
 * - Without Redis (redis.address empty) orders live in this process alone; bt_orders_kept says so.
 * - What is read is checked; a bad order is passed over and told once.
 *
 * One thread, "redis-orders", with a connection of its own: neither requests nor membership wait
 * for it. */
#ifndef BT_CLUSTER_ORDERS_H
#define BT_CLUSTER_ORDERS_H

#include "common/cluster/registry.h"

#define BT_ORDER_KEY_MAX  95
#define BT_ORDER_TEXT_MAX 159
#define BT_ORDERS_MAX     1024

struct bt_order {
    char key[BT_ORDER_KEY_MAX + 1];   /* letters, digits, '-', '_', '.', ':'; not empty */
    char text[BT_ORDER_TEXT_MAX + 1]; /* printable ASCII; not empty */
};

/* All orders at one time, sorted by key; freed with free(). */
struct bt_order_list {
    size_t n;
    struct bt_order at[];
};

struct bt_orders; /* whoever created it owns it */

struct bt_orders_cfg {
    const struct bt_cluster_conf *conf; /* borrowed, outlives the orders */
    /* Both run on the thread "redis-orders" and must not block.
     * changed: there are other orders now. placed: an order given to bt_orders_place is in force (a
     * `changed` with it came before) or was refused: BT_E_UNAVAILABLE (Redis is away), BT_E_DENIED,
     * BT_E_EXHAUSTED (too many). */
    void (*changed)(void *arg, struct bt_order_list *take_list);
    void (*placed)(void *arg, void *token, int rc, const struct bt_err *err);
    void *arg;
};

/* Checks conf, starts the thread; does not wait for Redis. BT_E_CONFIG, BT_E_NOMEM, BT_E_SYS. */
int bt_orders_create(const struct bt_orders_cfg *cfg,
                     struct bt_orders **ret_orders,
                     struct bt_err *err) BT_MUST_USE;
/* Gives an order, or withdraws it (`text` NULL). Copied. `placed` comes once for it, unless the
 * orders are destroyed before. BT_E_INVALID (key, text), BT_E_NOMEM. Any thread. */
int bt_orders_place(struct bt_orders *o, const char *key, const char *text, void *token)
    BT_MUST_USE;
/* True if orders outlive this process. */
bool bt_orders_kept(const struct bt_orders *o);
/* Ends the thread; at most a few redis.timeout. No callback runs after it. NULL is fine. */
void bt_orders_destroy(struct bt_orders *o);

#endif
