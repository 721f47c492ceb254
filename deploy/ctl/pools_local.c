/* Pools under the supervisor of this host. */
#include "deploy/ctl/local.h"
#include "deploy/ctl/pools.h"

#include "common/thr/time.h"

#include <string.h>

#define CLEANUP_NS (5 * BT_NS_PER_S)

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

static bool is_meant(const struct ctl_size *s, size_t n, const char *role)
{
    for (size_t i = 0; i < n; i++) {
        if (strcmp(s[i].role, role) == 0) {
            return true;
        }
    }
    return n == 0 && (strcmp(role, "prefill") == 0 || strcmp(role, "decode") == 0);
}

/* Nodes are those that say where they listen. */
static int members(
    struct ctl_pools *p, const struct ctl_size *s, size_t n, json_t *names, uint64_t deadline_ns)
{
    json_t *status = NULL;
    int code = ctl_local_ask(p->a, json_pack("{s:s}", "op", "status"), deadline_ns, &status);
    const json_t *r, *c;
    size_t i, j;

    json_array_foreach(json_object_get(status, "roles"), i, r)
    {
        const char *role = json_string_value(json_object_get(r, "name"));

        json_array_foreach(json_object_get(r, "processes"), j, c)
        {
            const char *listen = json_string_value(json_object_get(c, "listen"));

            if (role && is_meant(s, n, role) && listen && listen[0]) {
                json_array_append(names, json_object_get(c, "name"));
            }
        }
    }
    json_decref(status);
    return code;
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

/* --- canaries -------------------------------------------------------------------------------- */

static int ask(struct ctl_pools *p,
               const struct ctl_canary *c,
               json_t *take_m,
               uint64_t deadline_ns,
               bool names)
{
    json_t *answer = NULL;
    int code;

    json_object_set_new(take_m, "role", json_string(c->role));
    json_object_set_new(take_m, "dry_run", json_boolean(c->dry));
    code = ctl_local_ask(p->a, take_m, deadline_ns, &answer);
    if (code == CTL_OK && names) {
        json_array_extend(c->names, json_object_get(answer, "stopping"));
    }
    json_decref(answer);
    return code;
}

static int canary(struct ctl_pools *p, struct ctl_canary *c, uint64_t deadline_ns)
{
    json_t *m;
    int code;

    if (!p->a->binary) {
        fputs("batonctl: a canary under a supervisor has a --binary\n", stderr);
        return CTL_USAGE;
    }
    m = json_pack("{s:s, s:s, s:I}", "op", "canary", "binary", p->a->binary, "replicas",
                  (json_int_t)c->n);
    if (p->a->version) {
        json_object_set_new(m, "release", json_string(p->a->version));
    }
    code = ask(p, c, m, deadline_ns, false);
    for (int64_t i = 0; i < c->n; i++) {
        char name[100];

        snprintf(name, sizeof(name), "%.60s-canary-%lld", c->role, (long long)i);
        json_array_append_new(c->names, json_string(name));
    }
    if (code == CTL_OK && !c->dry && ctl_local_settle(p->a, deadline_ns) != CTL_OK) {
        ask(p, c, json_pack("{s:s}", "op", "rollback"), bt_deadline_ns(CLEANUP_NS), false);
        fputs("batonctl: the canary is taken back\n", stderr);
        code = CTL_TIMEOUT;
    }
    return code;
}

static int end(struct ctl_pools *p, struct ctl_canary *c, uint64_t deadline_ns)
{
    return ask(p, c, json_pack("{s:s}", "op", c->promote ? "promote" : "rollback"), deadline_ns,
               c->dry);
}

static int over(struct ctl_pools *p, struct ctl_canary *c, uint64_t deadline_ns)
{
    int code = ctl_local_gone(p->a, c->names, deadline_ns);

    return code == CTL_OK && p->a->wait ? ctl_local_settle(p->a, deadline_ns) : code;
}

static void close_local(struct ctl_pools *p)
{
    json_decref(p->impl);
}

int ctl_pools_open_local(struct ctl_pools *p, uint64_t deadline_ns)
{
    static const struct ctl_pools_ops ops = {
        "supervisor", plan, do_scale, gone, settle, flip, canary, end, over, members, close_local};
    json_t *status = NULL;
    int code = ctl_local_ask(p->a, json_pack("{s:s}", "op", "status"), deadline_ns, &status);

    if (code == CTL_OK) {
        p->ops = &ops;
        p->impl = status;
        p->router = ctl_local_router(p->a, status);
        p->has_router = p->a->router_given || p->router != p->a->router;
    }
    return code;
}
