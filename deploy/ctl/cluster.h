/* What acting commands share: orders to routers, and what a router says of its nodes. All of it
 * blocks until the answer or the deadline, tells failures on stderr, and returns an exit code. */
#ifndef CTL_CLUSTER_H
#define CTL_CLUSTER_H

#include "deploy/ctl/ctl.h"

#define CTL_LOOK_NS 100000000ull /* between two looks while waiting */

struct ctl_seen {
    char name[64], role[16], state[16], version[64];
    bool cordoned;
    uint64_t work; /* requests that run or wait there, and this router's legs */
};

struct ctl_view {
    struct ctl_seen *nodes;
    size_t n;
};

int ctl_look(const char *router, uint64_t deadline_ns, struct ctl_view *v);
void ctl_view_free(struct ctl_view *v);
/* Borrowed from v; NULL = not there. */
const struct ctl_seen *ctl_view_find(const struct ctl_view *v, const char *name);

int ctl_order_cordon(const char *router,
                     const char *node,
                     bool on,
                     uint64_t deadline_ns,
                     Baton__V1__OrderReply *ret);
int ctl_order_canary(const char *router,
                     const Baton__V1__SetCanaryRequest *m,
                     uint64_t deadline_ns,
                     Baton__V1__OrderReply *ret);
/* Until the node has nothing to do, at a time when all routers know that they are to leave it alone
 * (settled_ns). A node that is not there is idle. */
int ctl_wait_idle(const char *router, const char *node, uint64_t settled_ns, uint64_t deadline_ns);
/* Cordon, then wait. */
int ctl_drain_node(const char *router, const char *node, uint64_t deadline_ns);

void ctl_sleep(uint64_t ns);

#endif
