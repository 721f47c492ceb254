/* The Echo service of rpc_echo.proto, for unit tests and for the program rpc_echo. Loop thread. */
#ifndef BT_TESTS_TOOLS_RPC_ECHO_SERVICE_H
#define BT_TESTS_TOOLS_RPC_ECHO_SERVICE_H

#include "common/rpc/server.h"

/* What the tests look at. */
struct echo_stats {
    int n_opened, n_closed, n_cancelled, n_messages, n_half_closed, n_drained;
    size_t max_queued_bytes;
    int n_exhausted; /* sends refused because too much was waiting */
};

/* The service keeps its calls' state itself; `stats` outlives the server. */
void echo_service_init(struct bt_rpc_service *service, struct echo_stats *stats);

#endif
