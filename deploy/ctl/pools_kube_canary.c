/* A canary on Kubernetes, here of a StatefulSet (Deployments: pools_kube_deploy.c): the pods from a
 * partition on get the new image, the others keep theirs. The old image is kept in an annotation
 * until the canary is over. Needs the rights: get, patch on statefulsets. */
#include "deploy/ctl/cluster.h"
#include "deploy/ctl/pools_kube.h"

#include "common/thr/time.h"

#include <string.h>

#define LOOK_NS          (200 * BT_NS_PER_MS)
#define CLEANUP_NS       (5 * BT_NS_PER_S)
#define PREVIOUS         "baton/previous-image"
#define PREVIOUS_RELEASE "baton/previous-release"

const json_t *kube_down(const json_t *o, const char *a, const char *b, const char *c)
{
    o = json_object_get(json_object_get(o, a), b);
    return c ? json_object_get(o, c) : o;
}

static const char *previous_of(const json_t *set)
{
    return json_string_value(kube_down(set, "metadata", "annotations", PREVIOUS));
}

const json_t *kube_container_of(const json_t *set)
{
    return json_array_get(json_object_get(kube_down(set, "spec", "template", "spec"), "containers"),
                          0);
}

const char *kube_release_of(const json_t *set)
{
    const json_t *v;
    size_t i;

    json_array_foreach(json_object_get(kube_container_of(set), "env"), i, v)
    {
        const char *name = json_string_value(json_object_get(v, "name"));

        if (name && strcmp(name, KUBE_RELEASE) == 0) {
            return json_string_value(json_object_get(v, "value"));
        }
    }
    return NULL;
}

int64_t kube_replicas_of(const json_t *set)
{
    return json_integer_value(kube_down(set, "spec", "replicas", NULL));
}

static int64_t partition_of(const json_t *set)
{
    return json_integer_value(
        json_object_get(kube_down(set, "spec", "updateStrategy", "rollingUpdate"), "partition"));
}

static int
read_set(struct ctl_pools *p, const char *role, char path[600], uint64_t deadline_ns, json_t **ret)
{
    int code = kube_pools_path(p, role, "", path);

    code = code != CTL_OK ? code : kube_pools_read(p, path, deadline_ns, ret);
    if (code == CTL_OK && !json_string_value(json_object_get(kube_container_of(*ret), "image"))) {
        fprintf(stderr, "batonctl: %s has no container with an image\n", path);
        json_decref(*ret);
        return CTL_FAILED;
    }
    if (code == CTL_OK &&
        (kube_replicas_of(*ret) < 0 || kube_replicas_of(*ret) > KUBE_REPLICAS_MAX ||
         partition_of(*ret) < 0 || partition_of(*ret) > INT32_MAX)) {
        fprintf(stderr, "batonctl: %s: %lld replicas from %lld on are not to be believed\n", path,
                (long long)kube_replicas_of(*ret), (long long)partition_of(*ret));
        json_decref(*ret);
        return CTL_FAILED;
    }
    return code;
}

/* Pods from the partition on. */
static void name_pods(
    const struct ctl_pools *p, const char *role, int64_t from, const json_t *set, json_t *names)
{
    for (int64_t i = from; i < kube_replicas_of(set); i++) {
        char name[400];

        snprintf(name, sizeof(name), "%s-%s-%lld", p->a->workload, role, (long long)i);
        json_array_append_new(names, json_string(name));
    }
}

/* --- patches --------------------------------------------------------------------------------- */

struct change {
    int64_t partition;
    const char *image;   /* NULL = as it is */
    const char *release; /* NULL = the variable goes, if the image is another one */
    const char *previous, *previous_release; /* annotations; NULL = none any more */
};

static json_t *patch_of(const json_t *set, const struct change *ch)
{
    const json_t *version = kube_down(set, "metadata", "resourceVersion", NULL);
    json_t *patch =
        json_pack("{s:{s:O, s:{s:s?, s:s?}}, s:{s:{s:s, s:{s:I}}}}", "metadata", "resourceVersion",
                  version, "annotations", PREVIOUS, ch->previous, PREVIOUS_RELEASE,
                  ch->previous_release, "spec", "updateStrategy", "type", "RollingUpdate",
                  "rollingUpdate", "partition", (json_int_t)ch->partition);
    json_t *env = ch->release ? json_pack("{s:s, s:s}", "name", KUBE_RELEASE, "value", ch->release)
                              : json_pack("{s:s, s:s}", "name", KUBE_RELEASE, "$patch", "delete");
    json_t *container =
        json_pack("{s:O, s:s?, s:[o]}", "name", json_object_get(kube_container_of(set), "name"),
                  "image", ch->image, "env", env);

    if (ch->image) {
        json_object_set_new(json_object_get(patch, "spec"), "template",
                            json_pack("{s:{s:[O]}}", "spec", "containers", container));
    }
    json_decref(container);
    return patch;
}

/* *ret_made: the change may have happened, also where the answer was lost. */
static int apply(struct ctl_pools *p,
                 const char *path,
                 const json_t *set,
                 const struct change *ch,
                 uint64_t deadline_ns,
                 bool *ret_made)
{
    struct kube_pools *impl = p->impl;
    json_t *patch = patch_of(set, ch), *answer = NULL;
    const struct kube_request r = {.method = "PATCH",
                                   .path = path,
                                   .body = patch,
                                   .content_type = "application/strategic-merge-patch+json",
                                   .deadline_ns = deadline_ns};
    long status = 0;
    int code = patch ? kube_call(&impl->kube, &r, &answer, &status) : CTL_FAILED;

    *ret_made = patch && !kube_refused(status);
    json_decref(patch);
    json_decref(answer);
    return code;
}

/* --- the canary ------------------------------------------------------------------------------ */

static int check(const struct ctl_pools *p, const struct ctl_canary *c, const json_t *set)
{
    if (!p->a->image) {
        fputs("batonctl: a canary on Kubernetes has an --image\n", stderr);
        return CTL_USAGE;
    }
    if (previous_of(set)) {
        fprintf(stderr, "batonctl: %s has a canary already: promote it or roll it back\n", c->role);
        return CTL_FAILED;
    }
    if (c->n > kube_replicas_of(set)) {
        fprintf(stderr, "batonctl: %s has %lld pods, fewer than the canary\n", c->role,
                (long long)kube_replicas_of(set));
        return CTL_FAILED;
    }
    return CTL_OK;
}

/* Pods that never got ready. A StatefulSet that starts its pods in order waits for such a pod even
 * when its template is the old one again. */
static void take_back(struct ctl_pools *p, const struct ctl_canary *c)
{
    struct ctl_canary back = {.role = c->role};

    if (kube_canary_end(p, &back, bt_deadline_ns(CLEANUP_NS)) == CTL_OK) {
        fputs("batonctl: the canary is taken back; a pod that stays broken has to be deleted\n",
              stderr);
    }
}

/* The pods get the new image; they are drained first, since Kubernetes replaces them. */
int kube_canary_start(struct ctl_pools *p, struct ctl_canary *c, uint64_t deadline_ns)
{
    struct change ch = {.image = p->a->image, .release = p->a->version};
    json_t *set = NULL;
    bool made = false;
    char path[600];
    int code = read_set(p, c->role, path, deadline_ns, &set);

    if (code != CTL_OK) {
        return code;
    }
    code = check(p, c, set);
    if (code == CTL_OK) {
        ch.partition = kube_replicas_of(set) - c->n;
        ch.previous = json_string_value(json_object_get(kube_container_of(set), "image"));
        ch.previous_release = kube_release_of(set);
        name_pods(p, c->role, ch.partition, set, c->names);
    }
    if (code == CTL_OK && !c->dry) {
        json_t *cordoned = json_array();

        code = ctl_pools_drain(p, c->names, deadline_ns, cordoned);
        code = code != CTL_OK ? code : apply(p, path, set, &ch, deadline_ns, &made);
        code = code != CTL_OK ? code : kube_canary_over(p, c, deadline_ns);
        if (code != CTL_OK && made) {
            take_back(p, c);
        }
        ctl_pools_uncordon(p, cordoned, bt_deadline_ns(5 * BT_NS_PER_S));
        json_decref(cordoned);
    }
    json_decref(set);
    return code;
}

/* Rolled back: the old image for all, which changes the canary's pods. Promoted: the new one for
 * all, which changes the others one by one; Kubernetes drains each by its SIGTERM. */
int kube_canary_end(struct ctl_pools *p, struct ctl_canary *c, uint64_t deadline_ns)
{
    struct change ch = {0};
    json_t *set = NULL;
    bool made;
    char path[600];
    int code = read_set(p, c->role, path, deadline_ns, &set);

    if (code != CTL_OK) {
        return code;
    }
    if (!previous_of(set)) {
        fprintf(stderr, "batonctl: %s has no canary\n", c->role);
        code = CTL_NOT_FOUND;
    } else if (c->dry) {
        if (!c->promote) {
            name_pods(p, c->role, partition_of(set), set, c->names);
        }
    } else {
        ch.image = c->promote ? NULL : previous_of(set);
        ch.release = json_string_value(kube_down(set, "metadata", "annotations", PREVIOUS_RELEASE));
        code = apply(p, path, set, &ch, deadline_ns, &made);
    }
    json_decref(set);
    return code;
}

/* As many pods of the new revision as there should be, all of them ready. */
static bool is_over(const json_t *set)
{
    const json_t *status = json_object_get(set, "status");
    int64_t n = kube_replicas_of(set);

    return json_integer_value(json_object_get(status, "observedGeneration")) >=
               json_integer_value(kube_down(set, "metadata", "generation", NULL)) &&
           json_integer_value(json_object_get(status, "updatedReplicas")) >=
               n - partition_of(set) &&
           json_integer_value(json_object_get(status, "readyReplicas")) == n;
}

int kube_canary_over(struct ctl_pools *p, struct ctl_canary *c, uint64_t deadline_ns)
{
    for (;;) {
        json_t *set = NULL;
        char path[600];
        int code = read_set(p, c->role, path, deadline_ns, &set);
        bool over = code == CTL_OK && is_over(set);

        if (code == CTL_OK) {
            json_decref(set);
        }
        if (code != CTL_OK || over) {
            return code;
        }
        if (bt_now_ns() + LOOK_NS >= deadline_ns) {
            fprintf(stderr, "batonctl: %s is not as it should be yet\n", path);
            return CTL_TIMEOUT;
        }
        ctl_sleep(LOOK_NS);
    }
}
