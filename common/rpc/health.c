/* Health service: a small table of names and the list of those who watch. Loop thread.
 *
 * A watcher that does not read gets no queue of old states: while something is on its way to it
 * only `dirty` is set, and the state that holds when the way is free is sent then. */
#include "common/rpc/health.h"

#include "common/base/buf.h"
#include "common/ds/list.h"
#include "common/rpc/health.pb-c.h"

#include <stdio.h>
#include <stdlib.h>

#define MAX_NAMES 16

struct named {
    char name[128];
    enum bt_health_status status;
};

struct bt_health {
    struct bt_rpc_service service;
    struct named names[MAX_NAMES];
    size_t n_names;
    struct bt_list watchers;
};

/* User pointer of a Watch call, once its request is in. */
struct watcher {
    struct bt_list link;
    struct bt_rpc_call *call;
    char name[128];
    int last; /* status sent last; -1 = none */
    bool dirty;
};

#define RESPONSE &grpc__health__v1__health_check_response__descriptor

static struct named *find(struct bt_health *h, const char *name)
{
    for (size_t i = 0; i < h->n_names; i++) {
        if (strcmp(h->names[i].name, name) == 0) {
            return &h->names[i];
        }
    }
    return NULL;
}

static void on_check(struct bt_rpc_call *call, const ProtobufCMessage *msg)
{
    const Grpc__Health__V1__HealthCheckRequest *r =
        (const Grpc__Health__V1__HealthCheckRequest *)msg;
    Grpc__Health__V1__HealthCheckResponse reply = GRPC__HEALTH__V1__HEALTH_CHECK_RESPONSE__INIT;
    struct named *n = find(bt_rpc_call_service_user(call), r->service);
    char text[160];

    if (!n) {
        snprintf(text, sizeof(text), "health: unknown service %.100s", r->service);
        bt_rpc_call_finish(call, BT_RPC_NOT_FOUND, text);
        return;
    }
    reply.status = (Grpc__Health__V1__HealthCheckResponse__ServingStatus)n->status;
    bt_rpc_call_reply(call, &reply.base);
}

static void tell(struct bt_health *h, struct watcher *w)
{
    Grpc__Health__V1__HealthCheckResponse reply = GRPC__HEALTH__V1__HEALTH_CHECK_RESPONSE__INIT;
    struct named *n = find(h, w->name);
    int status = n ? (int)n->status
                   : (int)GRPC__HEALTH__V1__HEALTH_CHECK_RESPONSE__SERVING_STATUS__SERVICE_UNKNOWN;
    int rc;

    if (status == w->last) {
        return;
    }
    if (bt_rpc_call_want_drained(w->call)) {
        w->dirty = true;
        return;
    }
    w->last = status;
    reply.status = (Grpc__Health__V1__HealthCheckResponse__ServingStatus)status;
    rc = bt_rpc_call_send(w->call, &reply.base);
    if (rc < 0) {
        bt_rpc_call_fail(w->call, rc, NULL);
    }
}

static void on_watch(struct bt_rpc_call *call, const ProtobufCMessage *msg)
{
    const Grpc__Health__V1__HealthCheckRequest *r =
        (const Grpc__Health__V1__HealthCheckRequest *)msg;
    struct bt_health *h = bt_rpc_call_service_user(call);
    struct watcher *w = bt_calloc(1, sizeof(*w));

    if (!w) {
        bt_rpc_call_fail(call, BT_E_NOMEM, NULL);
        return;
    }
    /* A name that is too long to be one of ours is cut and stays unknown: ours are shorter. */
    snprintf(w->name, sizeof(w->name), "%s", r->service);
    w->call = call;
    w->last = -1;
    bt_list_push_back(&h->watchers, &w->link);
    bt_rpc_call_set_user(call, w);
    tell(h, w);
}

static void on_watch_drained(struct bt_rpc_call *call)
{
    struct watcher *w = bt_rpc_call_user(call);

    if (w->dirty) {
        w->dirty = false;
        tell(bt_rpc_call_service_user(call), w);
    }
}

static void on_watch_closed(struct bt_rpc_call *call, bool cancelled)
{
    struct watcher *w = bt_rpc_call_user(call);

    if (w) {
        bt_list_remove(&w->link);
        free(w);
    }
}

static const struct bt_rpc_method methods[] = {
    {.path = "/grpc.health.v1.Health/Check",
     .request = &grpc__health__v1__health_check_request__descriptor,
     .response = RESPONSE,
     .access = BT_ACCESS_OPEN,
     .message = on_check},
    {.path = "/grpc.health.v1.Health/Watch",
     .request = &grpc__health__v1__health_check_request__descriptor,
     .response = RESPONSE,
     .access = BT_ACCESS_OPEN,
     .message = on_watch,
     .drained = on_watch_drained,
     .closed = on_watch_closed},
};

int bt_health_create(struct bt_rpc_server *srv, struct bt_health **ret_health, struct bt_err *err)
{
    struct bt_health *h = bt_calloc(1, sizeof(*h));
    int rc;

    if (!h) {
        return BT_FAIL(err, BT_E_NOMEM, "health: out of memory");
    }
    h->service = (struct bt_rpc_service){.name = "grpc.health.v1.Health",
                                         .methods = methods,
                                         .n_methods = BT_ARRAY_LEN(methods),
                                         .user = h,
                                         .infrastructure = true};
    bt_list_init(&h->watchers);
    rc = bt_rpc_server_register(srv, &h->service, err);
    if (rc < 0) {
        free(h);
        return rc;
    }
    bt_health_set(h, "", BT_HEALTH_NOT_SERVING);
    *ret_health = h;
    return BT_OK;
}

void bt_health_destroy(struct bt_health *h)
{
    BT_BUG_ON(h && !bt_list_empty(&h->watchers));
    free(h);
}

void bt_health_set(struct bt_health *h, const char *service, enum bt_health_status status)
{
    struct named *n = find(h, service);

    if (!n) {
        BT_BUG_ON(h->n_names == MAX_NAMES || strlen(service) >= sizeof(n->name) - 1);
        n = &h->names[h->n_names++];
        snprintf(n->name, sizeof(n->name), "%s", service);
    }
    n->status = status;
    bt_list_for_each (it, &h->watchers) {
        tell(h, BT_LIST_ENTRY(it, struct watcher, link));
    }
}

void bt_health_set_all(struct bt_health *h, enum bt_health_status status)
{
    for (size_t i = 0; i < h->n_names; i++) {
        bt_health_set(h, h->names[i].name, status);
    }
}
