/* batonctl: what its commands share. One thread. */
#ifndef CTL_CTL_H
#define CTL_CTL_H

#include "common/rpc/client.h"
#include "proto/baton.pb-c.h"

struct ctl_args {
    const char *command;
    const char *router;
    const char *node; /* NULL = not given */
    const char *prompt;
    bool chat;
    int64_t max_tokens; /* 0 = to the end of the context */
};

/* One call with its messages; runs the loop until it is closed. Returns the process's exit code;
 * a failed call is told on stderr. */
struct ctl_call {
    const char *path;
    const ProtobufCMessage *request;
    const ProtobufCMessageDescriptor *response;
    uint64_t deadline_ns; /* 0 = none */
    void (*message)(const ProtobufCMessage *msg);
};
int ctl_run(const char *router, const struct ctl_call *c);

int ctl_generate(const struct ctl_args *a);
int ctl_status(const struct ctl_args *a);
int ctl_node(const struct ctl_args *a);

#endif
