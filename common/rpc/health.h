/* Standard health service (grpc.health.v1): Check and Watch, one state per service name.
 * Loop thread only. */
#ifndef BT_RPC_HEALTH_H
#define BT_RPC_HEALTH_H

#include "common/rpc/server.h"

struct bt_health;

enum bt_health_status {
    BT_HEALTH_SERVING = 1,
    BT_HEALTH_NOT_SERVING = 2,
};

/* Registers the service with srv, which must not have been started. The name "" (the process as a
 * whole) is there from the beginning, NOT_SERVING. Destroy it after srv.
 * Errors: BT_E_NOMEM, BT_E_EXISTS. */
int bt_health_create(struct bt_rpc_server *srv,
                     struct bt_health **ret_health,
                     struct bt_err *err) BT_MUST_USE;
void bt_health_destroy(struct bt_health *h);

/* Adds the name if it is new (at most 16 of 127 bytes, more is a programmer error) and tells those
 * who watch it. "" = the process. */
void bt_health_set(struct bt_health *h, const char *service, enum bt_health_status status);
/* All names at once: ready, drain. */
void bt_health_set_all(struct bt_health *h, enum bt_health_status status);

#endif
