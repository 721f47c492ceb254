/* Asking the supervisor of this host (deploy/supervisor/protocol.h). Blocks for at most the
 * deadline; failures are told on stderr and become an exit code. */
#ifndef CTL_LOCAL_H
#define CTL_LOCAL_H

#include "deploy/ctl/ctl.h"

#include <jansson.h>

/* Path of the socket: what was given, or the usual place of this user. */
const char *ctl_local_path(const struct ctl_args *a, char buf[108]);
/* Sends take_request, returns CTL_OK with the answer, which the caller frees. */
int ctl_local_ask(const struct ctl_args *a,
                  json_t *take_request,
                  uint64_t deadline_ns,
                  json_t **ret_answer);
/* The router to talk to: what was given, or the one that the supervisor's status names. */
const char *ctl_local_router(const struct ctl_args *a, const json_t *status);
/* Borrowed from a status; NULL = none. */
const json_t *ctl_local_role(const json_t *status, const char *name);
const json_t *ctl_local_process(const json_t *status, const char *name, const json_t **ret_role);
/* Until every role has as many ready processes as it should, and no others are left. */
int ctl_local_settle(const struct ctl_args *a, uint64_t deadline_ns);
/* Until none of these processes (names) is left. */
int ctl_local_gone(const struct ctl_args *a, const json_t *names, uint64_t deadline_ns);

#endif
