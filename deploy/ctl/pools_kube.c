/* Pools on Kubernetes: a role is a StatefulSet or a Deployment, its number the scale subresource.
 * Needs the rights: get, update on statefulsets/scale (or deployments/scale); get on statefulsets
 * for --wait. */
#include "deploy/ctl/pools_kube.h"
#include "deploy/ctl/cluster.h"

#include "common/thr/time.h"

#include <stdlib.h>
#include <string.h>

#define LOOK_NS     (200 * BT_NS_PER_MS)
#define CONFLICT_NS (20 * BT_NS_PER_MS)

static const struct kube *kube_of(const struct ctl_pools *p)
{
    return &((const struct kube_pools *)p->impl)->kube;
}

/* It becomes part of a path. */
static bool name_ok(const char *s)
{
    size_t n = strlen(s);

    return n > 0 && n < 200 && strspn(s, "abcdefghijklmnopqrstuvwxyz0123456789-") == n;
}

static bool is_stateful(const struct ctl_pools *p)
{
    return strcmp(p->a->kind, "statefulset") == 0;
}

int kube_pools_path(const struct ctl_pools *p, const char *role, const char *what, char path[600])
{
    if (!name_ok(role)) {
        fprintf(stderr, "batonctl: %s is no name of a role\n", role);
        return CTL_FAILED;
    }
    snprintf(path, 600, "/apis/apps/v1/namespaces/%s/%ss/%s-%s%s", kube_of(p)->ns, p->a->kind,
             p->a->workload, role, what);
    return CTL_OK;
}

int kube_pools_read(const struct ctl_pools *p, const char *path, uint64_t deadline_ns, json_t **ret)
{
    const struct kube_request r = {.method = "GET", .path = path, .deadline_ns = deadline_ns};

    return kube_call(kube_of(p), &r, ret, NULL);
}

static json_int_t number(const json_t *object, const char *part, const char *key)
{
    return json_integer_value(json_object_get(json_object_get(object, part), key));
}

/* --- scale ----------------------------------------------------------------------------------- */

/* The pods that go are those with the highest numbers; a Deployment does not say. */
static void name_victims(struct ctl_pools *p, const struct ctl_size *s, json_t *names)
{
    for (int64_t i = s->from - 1; is_stateful(p) && i >= s->to; i--) {
        char name[400];

        snprintf(name, sizeof(name), "%s-%s-%lld", p->a->workload, s->role, (long long)i);
        json_array_append_new(names, json_string(name));
    }
}

static int
plan(struct ctl_pools *p, struct ctl_size *s, size_t n, json_t *names, uint64_t deadline_ns)
{
    for (size_t i = 0; i < n; i++) {
        char path[600];
        json_t *scale = NULL;
        int code;

        code = kube_pools_path(p, s[i].role, "/scale", path);
        code = code != CTL_OK ? code : kube_pools_read(p, path, deadline_ns, &scale);
        if (code != CTL_OK) {
            return code;
        }
        s[i].from = number(scale, "spec", "replicas");
        json_decref(scale);
        if (s[i].from < 0 || s[i].from > KUBE_REPLICAS_MAX) {
            fprintf(stderr, "batonctl: %s: %lld replicas are not to be believed\n", path,
                    (long long)s[i].from);
            return CTL_FAILED;
        }
        name_victims(p, &s[i], names);
    }
    return CTL_OK;
}

/* CTL_OK, or -1: somebody else has written in between, look again. */
static int write_scale(struct ctl_pools *p, const char *path, json_t *scale, uint64_t deadline_ns)
{
    const struct kube_request r = {.method = "PUT",
                                   .path = path,
                                   .body = scale,
                                   .deadline_ns = deadline_ns,
                                   .quiet_conflict = true};
    json_t *answer = NULL;
    long status;
    int code = kube_call(kube_of(p), &r, &answer, &status);

    json_decref(answer);
    return status == 409 ? -1 : code;
}

/* With the resourceVersion that was read. A conflict is tried again as long as the number is the
 * one that the plan was made for; another number is somebody else's decision. */
static int scale_one(struct ctl_pools *p, const struct ctl_size *s, uint64_t deadline_ns)
{
    char path[600];
    int code = -1;

    if (kube_pools_path(p, s->role, "/scale", path) != CTL_OK) {
        return CTL_FAILED;
    }
    while (code < 0) {
        json_t *scale = NULL, *spec;

        code = kube_pools_read(p, path, deadline_ns, &scale);
        if (code != CTL_OK) {
            return code;
        }
        spec = json_object_get(scale, "spec");
        if (number(scale, "spec", "replicas") == s->to) {
            code = CTL_OK;
        } else if (number(scale, "spec", "replicas") != s->from) {
            fprintf(stderr, "batonctl: %s: somebody else has scaled it to %lld meanwhile\n", path,
                    (long long)number(scale, "spec", "replicas"));
            code = CTL_FAILED;
        } else {
            if (!spec) {
                spec = json_object();
                json_object_set_new(scale, "spec", spec);
            }
            json_object_set_new(spec, "replicas", json_integer(s->to));
            code = write_scale(p, path, scale, deadline_ns);
        }
        json_decref(scale);
        if (code < 0 && bt_now_ns() >= deadline_ns) {
            fprintf(stderr, "batonctl: %s: conflicts with other writers until the time was over\n",
                    path);
            return CTL_TIMEOUT;
        }
        if (code < 0) {
            ctl_sleep(CONFLICT_NS);
        }
    }
    return code;
}

static int scale(struct ctl_pools *p, const struct ctl_size *s, size_t n, uint64_t deadline_ns)
{
    for (size_t i = 0; i < n; i++) {
        int code = scale_one(p, &s[i], deadline_ns);

        if (code != CTL_OK) {
            for (size_t j = 0; j < i; j++) {
                fprintf(stderr, "batonctl: %s was scaled to %lld\n", s[j].role, (long long)s[j].to);
            }
            return code;
        }
    }
    return CTL_OK;
}

/* --- waiting --------------------------------------------------------------------------------- */

/* A role's controller has seen the number, and there are as many pods, ready ones. */
static bool is_settled(const json_t *o, int64_t to)
{
    return number(o, "status", "observedGeneration") >= number(o, "metadata", "generation") &&
           number(o, "spec", "replicas") == to && number(o, "status", "replicas") == to &&
           number(o, "status", "readyReplicas") == to;
}

static int settle(struct ctl_pools *p, const struct ctl_size *s, size_t n, uint64_t deadline_ns)
{
    const struct kube_pools *impl = p->impl;

    if (n == 0) {
        s = impl->flipped;
        n = impl->n_flipped;
    }
    for (size_t i = 0; i < n; i++) {
        char path[600];

        if (kube_pools_path(p, s[i].role, "", path) != CTL_OK) {
            return CTL_FAILED;
        }
        for (;;) {
            json_t *o = NULL;
            int code = kube_pools_read(p, path, deadline_ns, &o);
            bool done = code == CTL_OK && is_settled(o, s[i].to);

            json_decref(o);
            if (code != CTL_OK) {
                return code;
            }
            if (done) {
                break;
            }
            if (bt_now_ns() + LOOK_NS >= deadline_ns) {
                fprintf(stderr, "batonctl: %s is not as it should be yet\n", path);
                return CTL_TIMEOUT;
            }
            ctl_sleep(LOOK_NS);
        }
    }
    return CTL_OK;
}

/* Pods that have been emptied end by themselves; their number is not lower before they are gone. */
static int gone(struct ctl_pools *p, const json_t *names, uint64_t deadline_ns)
{
    struct ctl_view v = {0};
    const json_t *name;
    size_t i;

    json_array_foreach(names, i, name)
    {
        for (;;) {
            int code = ctl_look(p->router, deadline_ns, &v);
            const struct ctl_seen *s = ctl_view_find(&v, json_string_value(name));
            bool over = code == CTL_UNREACHABLE || !s || strcmp(s->state, "lost") == 0;

            ctl_view_free(&v);
            if (over) {
                break;
            }
            if (code != CTL_OK) {
                return code;
            }
            if (bt_now_ns() + LOOK_NS >= deadline_ns) {
                fprintf(stderr, "batonctl: %s is still there\n", json_string_value(name));
                return CTL_TIMEOUT;
            }
            ctl_sleep(LOOK_NS);
        }
    }
    return CTL_OK;
}

/* Pods of a StatefulSet, by their numbers; those of a Deployment have names of its choice. */
static int members(
    struct ctl_pools *p, const struct ctl_size *s, size_t n, json_t *names, uint64_t deadline_ns)
{
    const struct kube_pools *impl = p->impl;

    if (n == 0) {
        s = impl->flipped;
        n = impl->n_flipped;
    }
    for (size_t i = 0; i < n; i++) {
        struct ctl_size one = s[i];

        one.from = s[i].to;
        one.to = 0;
        name_victims(p, &one, names);
    }
    return CTL_OK;
}

/* --- flip ------------------------------------------------------------------------------------ */

static int
flip(struct ctl_pools *p, const char *node, const char *to, bool dry, uint64_t deadline_ns)
{
    struct ctl_size s[2] = {{.to = 0}, {.to = 0}};
    struct kube_pools *impl = p->impl;
    json_t *names = json_array();
    char last[400];
    int code;

    snprintf(s[0].role, sizeof(s[0].role), "%s", strcmp(to, "prefill") == 0 ? "decode" : "prefill");
    snprintf(s[1].role, sizeof(s[1].role), "%s", to);
    code = plan(p, s, 2, names, deadline_ns);
    json_decref(names);
    if (code != CTL_OK) {
        return code;
    }
    snprintf(last, sizeof(last), "%s-%s-%lld", p->a->workload, s[0].role, (long long)s[0].from - 1);
    if (!is_stateful(p) || strcmp(last, node) != 0) {
        fprintf(stderr, "batonctl: Kubernetes takes %s away, not %s\n",
                is_stateful(p) ? last : "a pod of its own choice", node);
        return CTL_FAILED;
    }
    s[0].to = s[0].from - 1;
    s[1].to = s[1].from + 1;
    memcpy(impl->flipped, s, sizeof(s));
    impl->n_flipped = 2;
    return dry ? CTL_OK : scale(p, s, 2, deadline_ns);
}

static void close_kube(struct ctl_pools *p)
{
    struct kube_pools *impl = p->impl;

    kube_free(&impl->kube);
    free(impl);
}

static const struct ctl_pools_ops stateful_ops = {
    "kubernetes",     plan,    scale,     gone, settle, flip, kube_canary_start, kube_canary_end,
    kube_canary_over, members, close_kube};
static const struct ctl_pools_ops deployment_ops = {
    "kubernetes",     plan,    scale,     gone, settle, flip, kube_deploy_start, kube_deploy_end,
    kube_deploy_over, members, close_kube};

int ctl_pools_open_kube(struct ctl_pools *p, uint64_t deadline_ns)
{
    struct kube_pools *impl;
    int code;

    if (!name_ok(p->a->workload) ||
        (strcmp(p->a->kind, "statefulset") != 0 && strcmp(p->a->kind, "deployment") != 0)) {
        fputs("batonctl: --kind is statefulset or deployment, --workload a name\n", stderr);
        return CTL_USAGE;
    }
    impl = calloc(1, sizeof(*impl));
    code = impl ? kube_load(p->a, &impl->kube) : CTL_FAILED;
    if (code != CTL_OK) {
        free(impl);
        return code;
    }
    p->ops = is_stateful(p) ? &stateful_ops : &deployment_ops;
    p->impl = impl;
    p->has_router = false; /* inside of the cluster, where an operator often is not */
    return CTL_OK;
}
