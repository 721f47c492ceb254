/* Whom a request answers: a gRPC call or a choice of an HTTP exchange. The request calls the
 * operations, the owner of the client closes the request. Loop thread. */
#ifndef RT_CLIENT_H
#define RT_CLIENT_H

#include "common/base/rc.h"
#include "common/sec/tokens.h"
#include "proto/node.pb-c.h"

struct rt_client;
struct rt_request;

/* None of them closes the request from inside: its owner does that later, with rt_request_closed.
 */
struct rt_client_ops {
    /* The request has been taken: an answer or an error will follow. */
    void (*taken)(struct rt_client *c);
    /* The next part; the message is borrowed. BT_OK; BT_E_EXHAUSTED: too much waits for a slow
     * client already; BT_E_CANCELLED: nobody listens any more; BT_E_NOMEM. */
    int (*send)(struct rt_client *c, const Baton__V1__GenerateResponse *m) BT_MUST_USE;
    /* All has been sent. */
    void (*finish)(struct rt_client *c);
    void (*fail)(struct rt_client *c, int rc, const struct bt_err *err);
};

/* Embedded in what the owner keeps of the call; it outlives the request. */
struct rt_client {
    const struct rt_client_ops *ops;
    struct rt_request *req; /* NULL = none, or closed */
    struct bt_who who;      /* what the port has found: whose tenant it may be */
    uint64_t deadline_ns;   /* BT_NEVER_NS = none */
    uint64_t came_ns;       /* when it came, where that was before the loop saw it; 0 = now */
    const char *via;        /* static: "grpc" or "http"; NULL = grpc */
    const char *answer_id;  /* what the answer calls itself; the owner's; NULL = as the request */
    double retry_after_s;   /* set before a failure: when it is worth another try; 0 = not known */
    int closed_rc;          /* why its owner closes the request; 0 = the client has gone */
    uint32_t choice;        /* which of several answers to one prompt with one seed */
    /* The message's ids as they came (bt_rpc_call_packed); read when the request begins. */
    struct bt_str packed;
};

#endif
