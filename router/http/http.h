/* The HTTP port of the router: OpenAI-compatible endpoints beside the gRPC service, on a thread of
 * its own. All functions are for the loop thread. */
#ifndef RT_HTTP_HTTP_H
#define RT_HTTP_HTTP_H

#include "common/base/rc.h"

struct rt_router;
struct rt_http;

struct rt_http_conf {
    char *listen; /* empty = off */
    bool open_metrics;
    uint64_t max_body_bytes, max_queued_bytes;
    int64_t max_body_values;
    int64_t max_connections;
    uint64_t idle_ns, header_ns, body_ns, stall_ns, heartbeat_ns;
};

/* BT_E_CONFIG for an address that is none, BT_E_IO if it cannot be bound; what is allowed off
 * loopback was checked before (bt_node_check_listen). The thread runs from here on; `conf` is
 * borrowed until stop. */
int rt_http_start(struct rt_router *r,
                  const struct rt_http_conf *conf,
                  struct rt_http **ret_http,
                  struct bt_err *err) BT_MUST_USE;
/* "127.0.0.1:8000", with the real port. */
const char *rt_http_address(const struct rt_http *h);
/* No new connections and requests; what runs at the deadline is cancelled. `done` is called once,
 * later, when nothing runs any more. */
void rt_http_drain(struct rt_http *h, uint64_t deadline_ns, void (*done)(void *arg), void *arg);
/* Cancels what runs, sends what is queued as far as clients take it within two seconds, ends the
 * thread and frees. The loop still stands; runs it meanwhile. NULL is fine. */
void rt_http_stop(struct rt_http *h);

#endif
