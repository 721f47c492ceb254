/* Private to common/cluster: one connection to Redis with a deadline on every exchange.
 *
 * hiredis is used without blocking; waiting is ours, so that a server that answers a byte at a time
 * or not at all cannot hold the thread longer than asked. After any error other than an error
 * reply the connection is closed. Thread "redis" only. */
#ifndef BT_CLUSTER_REDIS_INT_H
#define BT_CLUSTER_REDIS_INT_H

#include "common/base/rc.h"

#include <hiredis/hiredis.h>

#define REDIS_REPLY_MAX (16u << 20) /* bytes of answers to one exchange */

struct redis_conn {
    redisContext *ctx; /* NULL = not connected */
};

struct redis_target {
    const char *address; /* "host:port", "[v6]:port", "unix:/path" */
    const char *user, *password;
    uint64_t timeout_ns;
};

/* Connects, authenticates, asks for a sign of life. BT_E_UNAVAILABLE or BT_E_UNAUTHENTICATED. */
int redis_open(struct redis_conn *c, const struct redis_target *to, struct bt_err *err) BT_MUST_USE;
void redis_close(struct redis_conn *c);

/* Queues a command of `argc` parts. */
int redis_send(struct redis_conn *c, int argc, const struct bt_str *argv) BT_MUST_USE;
/* Sends what is queued and reads n replies, in order, into ret_replies (each to be freed with
 * freeReplyObject; NULL where none came). BT_OK even if some are error replies. */
int redis_receive(struct redis_conn *c,
                  uint64_t timeout_ns,
                  redisReply **ret_replies,
                  size_t n,
                  struct bt_err *err) BT_MUST_USE;
void redis_free_replies(redisReply **replies, size_t n);

#endif
