/* Pools of nodes, wherever they run: the supervisor of this host, or Kubernetes. What `scale`,
 * `flip`, `canary`, `promote` and `rollback` need of either. */
#ifndef CTL_POOLS_H
#define CTL_POOLS_H

#include "deploy/ctl/ctl.h"

#include <jansson.h>

#define CTL_MAX_ROLES 16

struct ctl_size {
    char role[64];
    int64_t from, to; /* from: -1 = not known */
};

struct ctl_canary {
    const char *role;
    int64_t n;     /* nodes of the new version */
    bool promote;  /* end: the role takes the new version; else it goes */
    bool dry;      /* check, and fill `names`; do nothing */
    json_t *names; /* nodes of the canary, or those that go; filled in */
};

/* One of the two. All functions block until `deadline_ns` at most, tell failures on stderr, and
 * return an exit code. */
struct ctl_pools {
    const struct ctl_args *a;
    const struct ctl_pools_ops *ops;
    void *impl;
    const char *router; /* to be asked to drain, and what it knows */
    bool has_router;    /* it is known to be there: not reaching it is a failure */
};

struct ctl_pools_ops {
    const char *name;
    /* Fills in `from` and the names of the nodes that would go (an array). */
    int (*plan)(
        struct ctl_pools *p, struct ctl_size *s, size_t n, json_t *names, uint64_t deadline_ns);
    int (*scale)(struct ctl_pools *p, const struct ctl_size *s, size_t n, uint64_t deadline_ns);
    /* Until these nodes are gone; until everything is as ordered. */
    int (*gone)(struct ctl_pools *p, const json_t *names, uint64_t deadline_ns);
    int (*settle)(struct ctl_pools *p, const struct ctl_size *s, size_t n, uint64_t deadline_ns);
    /* The role of a node and where it is in the order of going; see flip.c. */
    int (*flip)(
        struct ctl_pools *p, const char *node, const char *to, bool dry, uint64_t deadline_ns);
    /* canary: starts its nodes and waits until they run. end: both ways. over: waits until nothing
     * of it is left. */
    int (*canary)(struct ctl_pools *p, struct ctl_canary *c, uint64_t deadline_ns);
    int (*end)(struct ctl_pools *p, struct ctl_canary *c, uint64_t deadline_ns);
    int (*over)(struct ctl_pools *p, struct ctl_canary *c, uint64_t deadline_ns);
    /* Names of the nodes that these sizes make, once they are settled; n 0: of all (after a flip).
     * Those that have no names of their own are not among them. */
    int (*members)(struct ctl_pools *p,
                   const struct ctl_size *s,
                   size_t n,
                   json_t *names,
                   uint64_t deadline_ns);
    void (*close)(struct ctl_pools *p);
};

/* Whether an array of strings holds this one. */
bool ctl_is_among(const json_t *names, const char *name);

bool ctl_pools_is_kube(const struct ctl_args *a);
/* The pools that the arguments mean. */
int ctl_pools_open(const struct ctl_args *a, uint64_t deadline_ns, struct ctl_pools *ret);
void ctl_pools_close(struct ctl_pools *p);
int ctl_pools_open_local(struct ctl_pools *p, uint64_t deadline_ns);
int ctl_pools_open_kube(struct ctl_pools *p, uint64_t deadline_ns);

/* Cordons the nodes (an array of names) that the router knows, and waits until they have nothing to
 * do. A router that cannot be reached is told on stderr: nodes drain themselves when they are
 * stopped. On failure the cordons are taken off again.
 * `cordoned` (an empty array): those whose cordon is ours, for ctl_pools_uncordon. */
int ctl_pools_drain(struct ctl_pools *p,
                    const json_t *names,
                    uint64_t deadline_ns,
                    json_t *cordoned);
void ctl_pools_uncordon(struct ctl_pools *p, const json_t *names, uint64_t deadline_ns);

/* Until the router uses all of `there` that are in its table as nodes, and none of `gone`. A router
 * that nobody has named and that cannot be reached is told on stderr. */
int ctl_pools_known(struct ctl_pools *p,
                    const json_t *there,
                    const json_t *gone,
                    uint64_t deadline_ns);

#endif
