/* Pools under the supervisor of this host. */
#include "deploy/ctl/local.h"
#include "deploy/ctl/pools.h"

#include <stdlib.h>

static int scale(struct ctl_pools *p,
                 const struct ctl_size *s,
                 size_t n,
                 bool dry,
                 uint64_t deadline_ns,
                 json_t *stopping)
{
    json_t *roles = json_object(), *answer = NULL;
    int code;

    for (size_t i = 0; i < n; i++) {
        json_object_set_new(roles, s[i].role, json_integer(s[i].to));
    }
    code = ctl_local_ask(
        p->a, json_pack("{s:s, s:o, s:b}", "op", "scale", "roles", roles, "dry_run", dry),
        deadline_ns, &answer);
    if (code == CTL_OK && stopping) {
        json_array_extend(stopping, json_object_get(answer, "stopping"));
    }
    json_decref(answer);
    return code;
}

static int
plan(struct ctl_pools *p, struct ctl_size *s, size_t n, json_t *names, uint64_t deadline_ns)
{
    for (size_t i = 0; i < n; i++) {
        const json_t *role = ctl_local_role(p->impl, s[i].role);

        s[i].from = role ? json_integer_value(json_object_get(role, "replicas")) : -1;
    }
    return scale(p, s, n, true, deadline_ns, names);
}

static int do_scale(struct ctl_pools *p, const struct ctl_size *s, size_t n, uint64_t deadline_ns)
{
    return scale(p, s, n, false, deadline_ns, NULL);
}

static int gone(struct ctl_pools *p, const json_t *names, uint64_t deadline_ns)
{
    return ctl_local_gone(p->a, names, deadline_ns);
}

static int settle(struct ctl_pools *p, const struct ctl_size *s, size_t n, uint64_t deadline_ns)
{
    return ctl_local_settle(p->a, deadline_ns);
}

static int
flip(struct ctl_pools *p, const char *node, const char *to, bool dry, uint64_t deadline_ns)
{
    json_t *answer = NULL;
    int code = ctl_local_ask(
        p->a,
        json_pack("{s:s, s:s, s:s, s:b}", "op", "flip", "name", node, "to", to, "dry_run", dry),
        deadline_ns, &answer);

    json_decref(answer);
    return code;
}

static void close_local(struct ctl_pools *p)
{
    json_decref(p->impl);
}

int ctl_pools_open_local(struct ctl_pools *p, uint64_t deadline_ns)
{
    static const struct ctl_pools_ops ops = {"supervisor", plan, do_scale,   gone,
                                             settle,       flip, close_local};
    json_t *status = NULL;
    int code = ctl_local_ask(p->a, json_pack("{s:s}", "op", "status"), deadline_ns, &status);

    if (code == CTL_OK) {
        p->ops = &ops;
        p->impl = status;
        p->router = ctl_local_router(p->a, status);
    }
    return code;
}
