/* Which pools are meant, and emptying nodes before they go. */
#include "deploy/ctl/pools.h"

#include "common/thr/time.h"
#include "deploy/ctl/cluster.h"
#include "deploy/ctl/local.h"

#include <stdlib.h>
#include <unistd.h>

/* Kubernetes if anything of it is named, or if this runs in a pod and no supervisor is meant. */
bool ctl_pools_is_kube(const struct ctl_args *a)
{
    char buf[108];

    if (a->kubeconfig || a->service_account || a->context || a->ns) {
        return true;
    }
    return !a->supervisor && getenv("KUBERNETES_SERVICE_HOST") &&
           access(ctl_local_path(a, buf), F_OK) != 0;
}

int ctl_pools_open(const struct ctl_args *a, uint64_t deadline_ns, struct ctl_pools *ret)
{
    *ret = (struct ctl_pools){.a = a, .router = a->router, .has_router = a->router_given};
    return ctl_pools_is_kube(a) ? ctl_pools_open_kube(ret, deadline_ns)
                                : ctl_pools_open_local(ret, deadline_ns);
}

void ctl_pools_close(struct ctl_pools *p)
{
    if (p->ops) {
        p->ops->close(p);
    }
}

/* --- draining -------------------------------------------------------------------------------- */

void ctl_pools_uncordon(struct ctl_pools *p, const json_t *names, uint64_t deadline_ns)
{
    const json_t *v;
    size_t i;

    json_array_foreach(names, i, v)
    {
        Baton__V1__OrderReply reply;

        if (ctl_order_cordon(p->router, json_string_value(v), false, deadline_ns, &reply) !=
            CTL_OK) {
            fprintf(stderr, "batonctl: %s is still cordoned\n", json_string_value(v));
        }
    }
}

/* Those of the names that the router knows, in a new array; and those of them without a cordon. */
static int known(
    struct ctl_pools *p, const json_t *names, uint64_t deadline_ns, json_t *ret, json_t *free_ones)
{
    struct ctl_view view = {0};
    int code = ctl_look(p->router, deadline_ns, &view);
    const json_t *v;
    size_t i;

    json_array_foreach(names, i, v)
    {
        const struct ctl_seen *s = ctl_view_find(&view, json_string_value(v));

        if (code == CTL_OK && s) {
            json_array_append(ret, (json_t *)(uintptr_t)v);
            if (!s->cordoned) {
                json_array_append(free_ones, (json_t *)(uintptr_t)v);
            }
        }
    }
    ctl_view_free(&view);
    return code;
}

static int
cordon_all(struct ctl_pools *p, const json_t *names, uint64_t deadline_ns, uint64_t *ret_settled_ns)
{
    const json_t *v;
    size_t i;
    int code = CTL_OK;

    json_array_foreach(names, i, v)
    {
        Baton__V1__OrderReply reply = BATON__V1__ORDER_REPLY__INIT;

        code = code != CTL_OK
                   ? code
                   : ctl_order_cordon(p->router, json_string_value(v), true, deadline_ns, &reply);
        *ret_settled_ns = bt_now_ns() + reply.settle_ms * BT_NS_PER_MS;
    }
    return code;
}

int ctl_pools_drain(struct ctl_pools *p,
                    const json_t *names,
                    uint64_t deadline_ns,
                    json_t *cordoned)
{
    json_t *list = json_array();
    uint64_t settled = 0;
    const json_t *v;
    size_t i;
    int code = json_array_size(names) == 0 ? CTL_OK : known(p, names, deadline_ns, list, cordoned);

    if (code == CTL_UNREACHABLE) {
        fputs("batonctl: the router cannot be asked to drain: nodes finish what they have when "
              "they are stopped\n",
              stderr);
        json_decref(list);
        return CTL_OK;
    }
    code = code != CTL_OK ? code : cordon_all(p, cordoned, deadline_ns, &settled);
    json_array_foreach(list, i, v)
    {
        code = code != CTL_OK
                   ? code
                   : ctl_wait_idle(p->router, json_string_value(v), settled, deadline_ns);
    }
    if (code != CTL_OK) {
        ctl_pools_uncordon(p, cordoned, bt_deadline_ns(5 * BT_NS_PER_S));
    }
    json_decref(list);
    return code;
}

bool ctl_is_among(const json_t *names, const char *name)
{
    const json_t *v;
    size_t i;

    json_array_foreach(names, i, v)
    {
        if (strcmp(json_string_value(v), name) == 0) {
            return true;
        }
    }
    return false;
}

/* --- what the router knows ------------------------------------------------------------------- */

/* The first that is not as it should be, and how it is; NULL = none. */
static const char *
odd_one(const struct ctl_view *v, const json_t *there, const json_t *gone, const char **ret_state)
{
    const json_t *name;
    size_t i;

    json_array_foreach(there, i, name)
    {
        const struct ctl_seen *s = ctl_view_find(v, json_string_value(name));

        if (!s || strcmp(s->state, "ready") != 0) {
            *ret_state = s ? s->state : "not known";
            return json_string_value(name);
        }
    }
    json_array_foreach(gone, i, name)
    {
        const struct ctl_seen *s = ctl_view_find(v, json_string_value(name));

        if (s && strcmp(s->state, "lost") != 0 && strcmp(s->state, "connecting") != 0) {
            *ret_state = s->state;
            return json_string_value(name);
        }
    }
    return NULL;
}

/* A name may be given back at once: what has gone is there again then. */
static json_t *without(const json_t *names, const json_t *others)
{
    json_t *list = json_array();
    const json_t *v;
    size_t i;

    json_array_foreach(names, i, v)
    {
        if (!ctl_is_among(others, json_string_value(v))) {
            json_array_append(list, (json_t *)(uintptr_t)v);
        }
    }
    return list;
}

int ctl_pools_known(struct ctl_pools *p,
                    const json_t *there,
                    const json_t *gone,
                    uint64_t deadline_ns)
{
    json_t *left = without(gone, there);
    const char *odd = NULL, *state;
    char how[16] = ""; /* it was, at the last look */
    int code;

    if (json_array_size(there) + json_array_size(left) == 0) {
        json_decref(left);
        return CTL_OK;
    }
    for (;;) {
        struct ctl_view v = {0};

        code = ctl_look(p->router, deadline_ns, &v);
        if (code == CTL_OK) {
            odd = odd_one(&v, there, left, &state);
            snprintf(how, sizeof(how), "%s", odd ? state : "");
        }
        ctl_view_free(&v);
        if (code == CTL_OK && odd && bt_now_ns() + CTL_LOOK_NS >= deadline_ns) {
            code = CTL_TIMEOUT;
        }
        if (code != CTL_OK || !odd) {
            break;
        }
        ctl_sleep(CTL_LOOK_NS);
    }
    if (code == CTL_TIMEOUT && odd) {
        fprintf(stderr, "batonctl: the router at %s is not that far yet: %s is %s there\n",
                p->router, odd, how);
    }
    if (code == CTL_UNREACHABLE && !p->has_router) {
        fputs("batonctl: the router cannot be asked what it knows of this; name it by --router\n",
              stderr);
        code = CTL_OK;
    }
    json_decref(left);
    return code;
}
