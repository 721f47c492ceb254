/* A canary of a Deployment on Kubernetes: a second Deployment beside the role's, a copy of it with
 * the new image, a label more and a number of its own. Nothing of the role is touched before it is
 * promoted: then the role gets the canary's image, is replaced by Kubernetes, and the canary goes.
 * Pods keep the role's labels, so that services and network policies hold for them too. Needs the
 * rights: get, create, patch, delete on deployments, list on pods. */
#include "deploy/ctl/cluster.h"
#include "deploy/ctl/pools_kube.h"

#include "common/thr/time.h"

#include <string.h>

#define LOOK_NS    (200 * BT_NS_PER_MS)
#define CLEANUP_NS (5 * BT_NS_PER_S)
#define LABEL      "baton/canary" /* on the canary and its pods; value: the canary's name */
#define LABEL_MAX  63

static const struct kube *kube_of(const struct ctl_pools *p)
{
    return &((const struct kube_pools *)p->impl)->kube;
}

static int name_of(const struct ctl_pools *p, const struct ctl_canary *c, char name[400])
{
    snprintf(name, 400, "%s-%s-canary", p->a->workload, c->role);
    if (strlen(name) > LABEL_MAX) {
        fprintf(stderr, "batonctl: %s is too long for a label\n", name);
        return CTL_FAILED;
    }
    return CTL_OK;
}

/* The role's Deployment and, if it is there, its canary: else *ret_canary is NULL. */
static int read_both(struct ctl_pools *p,
                     const struct ctl_canary *c,
                     uint64_t deadline_ns,
                     json_t **ret_role,
                     json_t **ret_canary)
{
    char path[600], name[400];
    struct kube_request r = {.method = "GET", .path = path, .deadline_ns = deadline_ns};
    int code = name_of(p, c, name);

    *ret_role = *ret_canary = NULL;
    code = code != CTL_OK ? code : kube_pools_path(p, c->role, "", path);
    code = code != CTL_OK ? code : kube_call(kube_of(p), &r, ret_role, NULL);
    if (code == CTL_OK &&
        (!json_string_value(json_object_get(kube_container_of(*ret_role), "image")) ||
         !json_is_object(kube_down(*ret_role, "spec", "selector", "matchLabels")))) {
        fprintf(stderr, "batonctl: %s has no container with an image, or no selector\n", path);
        code = CTL_FAILED;
    }
    if (code == CTL_OK) {
        r.quiet_missing = true;
        code = kube_pools_path(p, c->role, "-canary", path);
        code = code != CTL_OK ? code : kube_call(kube_of(p), &r, ret_canary, NULL);
        code = code == CTL_NOT_FOUND ? CTL_OK : code;
    }
    if (code == CTL_OK && *ret_canary && !kube_down(*ret_canary, "metadata", "labels", LABEL)) {
        fprintf(stderr, "batonctl: %s is there, but not as a canary\n", path);
        code = CTL_FAILED;
    }
    return code;
}

/* Names of the canary's pods, those that are about to end left out. */
static int
list_pods(struct ctl_pools *p, const struct ctl_canary *c, uint64_t deadline_ns, json_t *names)
{
    char path[700], name[400];
    const struct kube_request r = {.method = "GET", .path = path, .deadline_ns = deadline_ns};
    json_t *list = NULL;
    const json_t *pod;
    size_t i;
    int code = name_of(p, c, name);

    if (code != CTL_OK) {
        return code;
    }
    /* The label, "=" and the name, encoded for a query. */
    snprintf(path, sizeof(path), "/api/v1/namespaces/%s/pods?labelSelector=baton%%2Fcanary%%3D%s",
             kube_of(p)->ns, name);
    code = kube_call(kube_of(p), &r, &list, NULL);
    json_array_foreach(json_object_get(list, "items"), i, pod)
    {
        const char *pod_name = json_string_value(kube_down(pod, "metadata", "name", NULL));

        if (pod_name && !kube_down(pod, "metadata", "deletionTimestamp", NULL)) {
            json_array_append_new(names, json_string(pod_name));
        }
    }
    json_decref(list);
    return code;
}

/* --- the canary's object --------------------------------------------------------------------- */

static void set_release(json_t *container, const char *release)
{
    json_t *env;

    if (!json_is_array(json_object_get(container, "env"))) {
        json_object_set_new(container, "env", json_array());
    }
    env = json_object_get(container, "env");
    for (size_t i = json_array_size(env); i-- > 0;) {
        const char *name = json_string_value(json_object_get(json_array_get(env, i), "name"));

        if (name && strcmp(name, KUBE_RELEASE) == 0) {
            json_array_remove(env, i);
        }
    }
    if (release) {
        json_array_append_new(env, json_pack("{s:s, s:s}", "name", KUBE_RELEASE, "value", release));
    }
}

static void add_label(json_t *o, const char *key, const char *name)
{
    if (!json_is_object(json_object_get(o, key))) {
        json_object_set_new(o, key, json_object());
    }
    json_object_set_new(json_object_get(o, key), LABEL, json_string(name));
}

/* Of the role's object only what somebody has written, not what the server has added. */
static json_t *
make(const struct ctl_pools *p, const struct ctl_canary *c, const json_t *role, const char *name)
{
    json_t *spec = json_deep_copy(json_object_get(role, "spec"));
    json_t *labels = json_deep_copy(kube_down(role, "metadata", "labels", NULL));
    json_t *template = json_object_get(spec, "template"), *meta, *o;
    json_t *container =
        json_array_get(json_object_get(json_object_get(template, "spec"), "containers"), 0);

    if (!json_is_object(json_object_get(template, "metadata"))) {
        json_object_set_new(template, "metadata", json_object());
    }
    meta = json_object_get(template, "metadata");
    add_label(meta, "labels", name);
    json_object_del(meta, "creationTimestamp");
    add_label(json_object_get(spec, "selector"), "matchLabels", name);
    json_object_set_new(spec, "replicas", json_integer(c->n));
    json_object_set_new(container, "image", json_string(p->a->image));
    set_release(container, p->a->version);
    o = json_pack("{s:s, s:s, s:{s:s, s:s, s:o*}, s:o}", "apiVersion", "apps/v1", "kind",
                  "Deployment", "metadata", "name", name, "namespace", kube_of(p)->ns, "labels",
                  labels, "spec", spec);
    add_label(json_object_get(o, "metadata"), "labels", name);
    return o;
}

/* *ret_made: it may be there, also where the answer was lost. */
static int create(struct ctl_pools *p, const json_t *o, uint64_t deadline_ns, bool *ret_made)
{
    char path[600];
    const struct kube_request r = {
        .method = "POST", .path = path, .body = o, .deadline_ns = deadline_ns};
    json_t *answer = NULL;
    long status = 0;
    int code;

    snprintf(path, sizeof(path), "/apis/apps/v1/namespaces/%s/deployments", kube_of(p)->ns);
    code = o ? kube_call(kube_of(p), &r, &answer, &status) : CTL_FAILED;
    *ret_made = o && !kube_refused(status);
    json_decref(answer);
    return code;
}

/* That it is gone already is as well. */
static int drop(struct ctl_pools *p, const struct ctl_canary *c, uint64_t deadline_ns)
{
    char path[600];
    json_t *body = json_pack("{s:s, s:s, s:s}", "kind", "DeleteOptions", "apiVersion", "v1",
                             "propagationPolicy", "Background");
    const struct kube_request r = {.method = "DELETE",
                                   .path = path,
                                   .body = body,
                                   .deadline_ns = deadline_ns,
                                   .quiet_missing = true};
    json_t *answer = NULL;
    int code = kube_pools_path(p, c->role, "-canary", path);

    code = code != CTL_OK ? code : kube_call(kube_of(p), &r, &answer, NULL);
    json_decref(answer);
    json_decref(body);
    return code == CTL_NOT_FOUND ? CTL_OK : code;
}

/* As many pods as there should be, all of the newest kind, all ready, no others. */
static bool is_rolled_out(const json_t *o)
{
    const json_t *status = json_object_get(o, "status");
    int64_t n = kube_replicas_of(o);

    return json_integer_value(json_object_get(status, "observedGeneration")) >=
               json_integer_value(kube_down(o, "metadata", "generation", NULL)) &&
           json_integer_value(json_object_get(status, "updatedReplicas")) == n &&
           json_integer_value(json_object_get(status, "replicas")) == n &&
           json_integer_value(json_object_get(status, "readyReplicas")) == n;
}

static int
roll_out(struct ctl_pools *p, const struct ctl_canary *c, const char *what, uint64_t deadline_ns)
{
    char path[600];
    int code = kube_pools_path(p, c->role, what, path);
    bool done = false;

    while (code == CTL_OK && !done) {
        json_t *o = NULL;

        code = kube_pools_read(p, path, deadline_ns, &o);
        done = code == CTL_OK && is_rolled_out(o);
        json_decref(o);
        if (code == CTL_OK && !done && bt_now_ns() + LOOK_NS >= deadline_ns) {
            fprintf(stderr, "batonctl: %s is not as it should be yet\n", path);
            code = CTL_TIMEOUT;
        } else if (code == CTL_OK && !done) {
            ctl_sleep(LOOK_NS);
        }
    }
    return code;
}

int kube_deploy_start(struct ctl_pools *p, struct ctl_canary *c, uint64_t deadline_ns)
{
    json_t *role, *canary, *o;
    char name[400] = "";
    bool made = false;
    int code;

    if (!p->a->image) {
        fputs("batonctl: a canary on Kubernetes has an --image\n", stderr);
        return CTL_USAGE;
    }
    code = read_both(p, c, deadline_ns, &role, &canary);
    if (code == CTL_OK && canary) {
        fprintf(stderr, "batonctl: %s has a canary already: promote it or roll it back\n", c->role);
        code = CTL_FAILED;
    }
    code = code != CTL_OK ? code : name_of(p, c, name);
    if (code == CTL_OK && !c->dry) {
        o = make(p, c, role, name);
        code = create(p, o, deadline_ns, &made);
        json_decref(o);
        code = code != CTL_OK ? code : roll_out(p, c, "-canary", deadline_ns);
        code = code != CTL_OK ? code : list_pods(p, c, deadline_ns, c->names);
        if (code != CTL_OK && made && drop(p, c, bt_deadline_ns(CLEANUP_NS)) == CTL_OK) {
            fputs("batonctl: the canary is taken back\n", stderr);
        }
    }
    json_decref(role);
    json_decref(canary);
    return code;
}

/* --- the end --------------------------------------------------------------------------------- */

/* The role gets what the canary runs; its pods are replaced as its strategy says, and drain by
 * their SIGTERM. */
static int take_over(struct ctl_pools *p,
                     const struct ctl_canary *c,
                     const json_t *role,
                     const json_t *canary,
                     uint64_t deadline_ns)
{
    const char *release = kube_release_of(canary);
    json_t *env = release ? json_pack("{s:s, s:s}", "name", KUBE_RELEASE, "value", release)
                          : json_pack("{s:s, s:s}", "name", KUBE_RELEASE, "$patch", "delete");
    json_t *patch =
        json_pack("{s:{s:O}, s:{s:{s:{s:[{s:O, s:O, s:[o]}]}}}}", "metadata", "resourceVersion",
                  kube_down(role, "metadata", "resourceVersion", NULL), "spec", "template", "spec",
                  "containers", "name", json_object_get(kube_container_of(role), "name"), "image",
                  json_object_get(kube_container_of(canary), "image"), "env", env);
    char path[600];
    const struct kube_request r = {.method = "PATCH",
                                   .path = path,
                                   .body = patch,
                                   .content_type = "application/strategic-merge-patch+json",
                                   .deadline_ns = deadline_ns};
    json_t *answer = NULL;
    int code = kube_pools_path(p, c->role, "", path);

    code = code != CTL_OK ? code : patch ? kube_call(kube_of(p), &r, &answer, NULL) : CTL_FAILED;
    json_decref(answer);
    json_decref(patch);
    return code;
}

/* Its pods are still needed while the role's are replaced, so they are drained only then. May be
 * repeated after a time that was too short. */
static int promote(struct ctl_pools *p,
                   struct ctl_canary *c,
                   const json_t *role,
                   const json_t *canary,
                   uint64_t deadline_ns)
{
    json_t *names = json_array(), *cordoned = json_array();
    int code = take_over(p, c, role, canary, deadline_ns);

    code = code != CTL_OK ? code : roll_out(p, c, "", deadline_ns);
    code = code != CTL_OK ? code : list_pods(p, c, deadline_ns, names);
    code = code != CTL_OK ? code : ctl_pools_drain(p, names, deadline_ns, cordoned);
    if (code == CTL_OK) {
        code = drop(p, c, deadline_ns);
        ctl_pools_uncordon(p, cordoned, bt_deadline_ns(CLEANUP_NS));
    }
    json_decref(names);
    json_decref(cordoned);
    return code;
}

int kube_deploy_end(struct ctl_pools *p, struct ctl_canary *c, uint64_t deadline_ns)
{
    json_t *role, *canary;
    int code = read_both(p, c, deadline_ns, &role, &canary);

    if (code == CTL_OK && !canary) {
        fprintf(stderr, "batonctl: %s has no canary\n", c->role);
        code = CTL_NOT_FOUND;
    } else if (code == CTL_OK && c->dry) {
        code = c->promote ? CTL_OK : list_pods(p, c, deadline_ns, c->names);
    } else if (code == CTL_OK && c->promote) {
        code = promote(p, c, role, canary, deadline_ns);
    } else if (code == CTL_OK) {
        code = drop(p, c, deadline_ns);
    }
    json_decref(role);
    json_decref(canary);
    return code;
}

int kube_deploy_over(struct ctl_pools *p, struct ctl_canary *c, uint64_t deadline_ns)
{
    for (;;) {
        json_t *names = json_array();
        int code = list_pods(p, c, deadline_ns, names);
        bool over = code == CTL_OK && json_array_size(names) == 0;

        json_decref(names);
        if (code != CTL_OK || over) {
            return code;
        }
        if (bt_now_ns() + LOOK_NS >= deadline_ns) {
            fputs("batonctl: pods of the canary are still there\n", stderr);
            return CTL_TIMEOUT;
        }
        ctl_sleep(LOOK_NS);
    }
}
