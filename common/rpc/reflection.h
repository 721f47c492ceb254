/* Standard server reflection (grpc.reflection.v1 and v1alpha) from descriptors in the binary, so
 * that grpcurl and the like need no files of ours. Loop thread only. */
#ifndef BT_RPC_REFLECTION_H
#define BT_RPC_REFLECTION_H

#include "common/rpc/server.h"

struct bt_reflection;

/* Registers the service with srv, which must not have been started; lists every service that srv
 * has when asked. `sets`: serialised google.protobuf.FileDescriptorSet with all imports, borrowed
 * until destroy; those of health and reflection are added here. Destroy it after srv.
 * Errors: BT_E_NOMEM, BT_E_EXISTS, BT_E_FORMAT. */
int bt_reflection_create(struct bt_rpc_server *srv,
                         const struct bt_str *sets,
                         size_t n_sets,
                         struct bt_reflection **ret_reflection,
                         struct bt_err *err) BT_MUST_USE;
void bt_reflection_destroy(struct bt_reflection *r);

#endif
