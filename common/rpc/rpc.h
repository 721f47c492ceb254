/* What server.h and client.h have in common: status codes, metadata, keep-alive.
 *
 * Messages are protobuf-c structs. Strings of a received message end at the first NUL byte and are
 * not checked for UTF-8: the service does that where it matters. */
#ifndef BT_RPC_RPC_H
#define BT_RPC_RPC_H

#include "common/base/rc.h"

#include <protobuf-c/protobuf-c.h>

/* gRPC status codes; bt_rc_grpc() gives the one of a result code. */
enum bt_rpc_status {
    BT_RPC_OK = 0,
    BT_RPC_CANCELLED = 1,
    BT_RPC_UNKNOWN = 2,
    BT_RPC_INVALID_ARGUMENT = 3,
    BT_RPC_DEADLINE_EXCEEDED = 4,
    BT_RPC_NOT_FOUND = 5,
    BT_RPC_ALREADY_EXISTS = 6,
    BT_RPC_PERMISSION_DENIED = 7,
    BT_RPC_RESOURCE_EXHAUSTED = 8,
    BT_RPC_FAILED_PRECONDITION = 9,
    BT_RPC_ABORTED = 10,
    BT_RPC_OUT_OF_RANGE = 11,
    BT_RPC_UNIMPLEMENTED = 12,
    BT_RPC_INTERNAL = 13,
    BT_RPC_UNAVAILABLE = 14,
    BT_RPC_DATA_LOSS = 15,
    BT_RPC_UNAUTHENTICATED = 16,
};

/* "UNAVAILABLE"; "STATUS_?" for a number outside the list. Static string. */
const char *bt_rpc_status_name(int status);

/* Text metadata. Keys are lower case and do not begin with "grpc-". Borrowed. */
struct bt_rpc_metadata {
    const char *key;
    const char *value;
};

/* Keep-alive of both ends comes from here, so that no server calls its own cluster's pings too many
 * (GOAWAY, "too_many_pings"). A zeroed struct means the defaults below. */
#define BT_RPC_KEEPALIVE_TIME_MS    5000 /* quiet time before a ping */
#define BT_RPC_KEEPALIVE_TIMEOUT_MS 5000 /* wait for its answer, then the connection is dead */
#define BT_RPC_MIN_PING_MS          1000 /* servers accept pings this far apart, calls or not */
struct bt_rpc_keepalive {
    int time_ms; /* servers accept pings from time_ms / 2 on if that is less than the minimum */
    int timeout_ms;
    /* Ping only while calls are open: for a server of clients whose core rests between calls and
     * answers no ping then (Python). A host that is gone is noticed by TCP's own keep-alive, which
     * the kernel answers: after 90 s. */
    bool calls_only;
};

#define BT_RPC_MAX_MESSAGE_BYTES (16u << 20) /* default limit of one received message */
#define BT_RPC_MAX_QUEUED_BYTES  (16u << 20) /* default limit of what waits to be sent on a call */

#endif
