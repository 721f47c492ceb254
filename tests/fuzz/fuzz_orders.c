/* What a Redis may answer to a reading of orders: epoch and hash, in turn. What is read keeps its
 * limits and is in the order of its keys; what is malformed is passed over. */
#include "common/cluster/orders.c"

#include "tests/fuzz/replies.inc.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

static void changed(void *arg, struct bt_order_list *take_list)
{
    for (size_t i = 0; i < take_list->n; i++) {
        const struct bt_order *at = &take_list->at[i];

        if (!key_ok(bt_str_of(at->key)) || !text_ok(bt_str_of(at->text)) ||
            (i > 0 && strcmp(at[-1].key, at->key) > 0)) {
            abort();
        }
    }
    free(take_list);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    struct bt_orders o = {.cfg.changed = changed};
    redisReader *reader = replies_open(data, n);
    redisReply *epoch, *orders = NULL;
    struct bt_err err;

    bt_log_threshold = -1;
    while ((epoch = replies_next(reader)) != NULL && (orders = replies_next(reader)) != NULL) {
        if (redis_refusal(epoch, &err) == BT_OK && redis_refusal(orders, &err) == BT_OK &&
            !restored(&o, epoch, orders)) {
            struct bt_order_list *list = decode(&o, orders);

            if (!list || list->n > BT_ORDERS_MAX || strlen(o.epoch) > EPOCH_MAX) {
                abort();
            }
            accept(&o, list);
        }
        freeReplyObject(epoch);
        freeReplyObject(orders);
    }
    if (epoch) {
        freeReplyObject(epoch);
    }
    redisReaderFree(reader);
    free(o.list);
    return 0;
}
