/* What the files about pools on Kubernetes share. Same rules as pools.h. */
#ifndef CTL_POOLS_KUBE_H
#define CTL_POOLS_KUBE_H

#include "deploy/ctl/kube.h"
#include "deploy/ctl/pools.h"

struct kube_pools {
    struct kube kube;
    struct ctl_size flipped[2]; /* for settle */
    size_t n_flipped;
};

/* Path of a role's workload, with "" or "/scale" behind it. CTL_FAILED: no name of a role. */
int kube_pools_path(const struct ctl_pools *p, const char *role, const char *what, char path[600]);
int kube_pools_read(const struct ctl_pools *p,
                    const char *path,
                    uint64_t deadline_ns,
                    json_t **ret);

/* pools_kube_canary.c; see struct ctl_pools_ops */
int kube_canary_start(struct ctl_pools *p, struct ctl_canary *c, uint64_t deadline_ns);
int kube_canary_end(struct ctl_pools *p, struct ctl_canary *c, uint64_t deadline_ns);
int kube_canary_over(struct ctl_pools *p, struct ctl_canary *c, uint64_t deadline_ns);

#endif
