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

#define KUBE_REPLICAS_MAX 10000 /* more is no answer of a server that means well */

#define KUBE_RELEASE "BATON_RELEASE" /* option `release` of nodes */

/* What an object has under names, one below the other (c may be NULL); NULL where one is missing.
 * Borrowed, as what the next ones return. */
const json_t *kube_down(const json_t *o, const char *a, const char *b, const char *c);
/* Of a workload: the container that runs the node (the first); its release, NULL = none. */
const json_t *kube_container_of(const json_t *workload);
const char *kube_release_of(const json_t *workload);
int64_t kube_replicas_of(const json_t *workload);

/* pools_kube_canary.c: StatefulSets; pools_kube_deploy.c: Deployments. See struct ctl_pools_ops */
int kube_canary_start(struct ctl_pools *p, struct ctl_canary *c, uint64_t deadline_ns);
int kube_canary_end(struct ctl_pools *p, struct ctl_canary *c, uint64_t deadline_ns);
int kube_canary_over(struct ctl_pools *p, struct ctl_canary *c, uint64_t deadline_ns);
int kube_deploy_start(struct ctl_pools *p, struct ctl_canary *c, uint64_t deadline_ns);
int kube_deploy_end(struct ctl_pools *p, struct ctl_canary *c, uint64_t deadline_ns);
int kube_deploy_over(struct ctl_pools *p, struct ctl_canary *c, uint64_t deadline_ns);

#endif
