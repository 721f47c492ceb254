/* batonctl canary, promote, rollback: a new version of a role's nodes beside the old one. The
 * supervisor, or Kubernetes, starts and stops the nodes; routers give them their share. */
#include "common/thr/time.h"
#include "deploy/ctl/cluster.h"
#include "deploy/ctl/local.h"
#include "deploy/ctl/pools.h"

#include <string.h>
#include <unistd.h>

#define CLEANUP_NS (5 * BT_NS_PER_S)

static void tell(const struct ctl_args *a, const char *what, const char *version, int64_t percent)
{
    if (a->output == CTL_JSON) {
        json_t *doc = json_pack("{s:s, s:s, s:b, s:s?}", "role", a->words[0], "state", what,
                                "dry_run", a->dry_run, "version", version);

        if (percent >= 0) {
            json_object_set_new(doc, "percent", json_integer(percent));
        }
        json_dumpf(doc, stdout, JSON_COMPACT);
        putchar('\n');
        json_decref(doc);
    } else if (percent >= 0) {
        printf("%s%s: %s gets %lld %% of the requests\n", a->dry_run ? "would be: " : "",
               a->words[0], version, (long long)percent);
    } else {
        printf("%s%s %s\n", a->dry_run ? "would be: " : "", a->words[0], what);
    }
}

/* A dry run orders nothing, but whoever would be asked must be there. */
static int dry_share(const struct ctl_args *a, uint64_t deadline)
{
    struct ctl_view v = {0};
    int code = ctl_look(a->router, deadline, &v);

    ctl_view_free(&v);
    return code;
}

static int set_share(const struct ctl_args *a,
                     const char *router,
                     const char *version,
                     int64_t percent,
                     uint64_t deadline)
{
    Baton__V1__SetCanaryRequest m = BATON__V1__SET_CANARY_REQUEST__INIT;
    Baton__V1__OrderReply reply;

    m.role = (char *)(uintptr_t)a->words[0];
    m.version = (char *)(uintptr_t)version;
    m.percent = (uint32_t)percent;
    return ctl_order_canary(router, &m, deadline, &reply);
}

/* --- nodes of the new version ---------------------------------------------------------------- */

/* How many of the canary's nodes are ready, and what they announce; *ret_mixed: not all the same,
 * or another node of the role does so too. */
static size_t count_ready(const struct ctl_view *v,
                          const struct ctl_canary *c,
                          char version[64],
                          const char **ret_mixed)
{
    size_t n = 0;

    *ret_mixed = NULL;
    for (size_t i = 0; i < v->n; i++) {
        if (ctl_is_among(c->names, v->nodes[i].name) && strcmp(v->nodes[i].state, "ready") == 0) {
            n++;
            snprintf(version, 64, "%s", v->nodes[i].version);
        }
    }
    for (size_t i = 0; i < v->n; i++) {
        const struct ctl_seen *s = &v->nodes[i];

        if (strcmp(s->role, c->role) == 0 && strcmp(s->state, "ready") == 0 &&
            ctl_is_among(c->names, s->name) != (strcmp(s->version, version) == 0)) {
            *ret_mixed = s->name;
        }
    }
    return n;
}

/* What the router says of the nodes of the canary once all of them are ready. Requests could not be
 * told apart if others announced the same. */
static int
announced(struct ctl_pools *p, const struct ctl_canary *c, uint64_t deadline, char version[64])
{
    for (;;) {
        struct ctl_view v = {0};
        const char *mixed;
        int code = ctl_look(p->router, deadline, &v);
        bool all = count_ready(&v, c, version, &mixed) == json_array_size(c->names);
        bool late = bt_now_ns() + CTL_LOOK_NS >= deadline;

        if (code == CTL_OK && mixed && all) {
            fprintf(stderr,
                    "batonctl: %s: the canary and no other node must announce %s: give it another "
                    "--version\n",
                    mixed, version);
            code = CTL_FAILED;
        } else if (code == CTL_OK && !all && late) {
            fputs("batonctl: the router does not see the canary's nodes as ready\n", stderr);
            code = CTL_TIMEOUT;
        }
        ctl_view_free(&v);
        if (code != CTL_OK || all) {
            return code;
        }
        ctl_sleep(CTL_LOOK_NS);
    }
}

static void undo(struct ctl_pools *p, struct ctl_canary *c)
{
    struct ctl_canary back = {.role = c->role, .names = json_array()};

    if (p->ops->end(p, &back, bt_deadline_ns(CLEANUP_NS)) == CTL_OK) {
        fputs("batonctl: the canary is taken back\n", stderr);
    }
    json_decref(back.names);
}

static int start(struct ctl_pools *p, struct ctl_canary *c, uint64_t deadline, char version[64])
{
    int code = p->ops->canary(p, c, deadline);

    if (code != CTL_OK || c->dry) {
        return code;
    }
    code = announced(p, c, deadline, version);
    code = code != CTL_OK ? code : set_share(p->a, p->router, version, p->a->percent, deadline);
    if (code != CTL_OK) {
        undo(p, c);
    }
    return code;
}

int ctl_canary(const struct ctl_args *a)
{
    uint64_t deadline = bt_deadline_ns(a->timeout_ns);
    struct ctl_canary c = {.role = a->words[0], .n = a->replicas, .dry = a->dry_run};
    struct ctl_pools pools = {0};
    char version[64] = "";
    int code;

    if (a->binary || a->image) {
        c.names = json_array();
        code = ctl_pools_open(a, deadline, &pools);
        code = code != CTL_OK ? code : start(&pools, &c, deadline, version);
        ctl_pools_close(&pools);
        json_decref(c.names);
    } else if (a->version) {
        code = a->dry_run ? dry_share(a, deadline)
                          : set_share(a, a->router, a->version, a->percent, deadline);
    } else {
        fputs("batonctl: --binary or --image, or --version of nodes that are there\n", stderr);
        return ctl_bad_usage(a->command);
    }
    if (code == CTL_OK) {
        tell(a, "canary",
             version[0]   ? version
             : a->version ? a->version
             : a->binary  ? a->binary
                          : a->image,
             a->percent);
    }
    return code;
}

/* --- the end --------------------------------------------------------------------------------- */

/* Until the router uses the role's nodes, new ones among them, and none of the canary's. On
 * Kubernetes `over` has waited for the pods: an account for canaries need not see more. */
static int settled(struct ctl_pools *p, const struct ctl_canary *c, uint64_t deadline)
{
    struct ctl_size size = {.from = -1, .to = -1};
    json_t *there;
    int code;

    if (ctl_pools_is_kube(p->a)) {
        return CTL_OK;
    }
    there = json_array();
    snprintf(size.role, sizeof(size.role), "%s", c->role);
    code = p->ops->members(p, &size, 1, there, deadline);
    code = code != CTL_OK ? code : ctl_pools_known(p, there, c->names, deadline);
    json_decref(there);
    return code;
}

/* The share goes first, then the nodes. */
static int end(struct ctl_pools *p, struct ctl_canary *c, uint64_t deadline)
{
    json_t *cordoned;
    int code;

    c->dry = true; /* what would go */
    code = p->ops->end(p, c, deadline);
    if (code != CTL_OK || p->a->dry_run) {
        return code;
    }
    c->dry = false;
    cordoned = json_array();
    code = set_share(p->a, p->router, "", 0, deadline);
    code = code != CTL_OK ? code : ctl_pools_drain(p, c->names, deadline, cordoned);
    if (code == CTL_OK) {
        code = p->ops->end(p, c, deadline);
        code = code != CTL_OK ? code : p->ops->over(p, c, deadline);
        ctl_pools_uncordon(p, cordoned, bt_deadline_ns(CLEANUP_NS));
        code = code == CTL_OK && p->a->wait ? settled(p, c, deadline) : code;
    }
    json_decref(cordoned);
    return code;
}

/* Nodes of a canary that nobody here has started stay: then it is a matter of routers alone. */
static bool is_routers_alone(const struct ctl_args *a)
{
    char buf[108];

    return !ctl_pools_is_kube(a) && !a->supervisor && access(ctl_local_path(a, buf), F_OK) != 0;
}

static int end_canary(const struct ctl_args *a, bool promote)
{
    uint64_t deadline = bt_deadline_ns(a->timeout_ns);
    struct ctl_canary c = {.role = a->words[0], .promote = promote, .names = json_array()};
    struct ctl_pools p = {0};
    int code;

    if (is_routers_alone(a)) {
        code = a->dry_run ? dry_share(a, deadline) : set_share(a, a->router, "", 0, deadline);
    } else {
        code = ctl_pools_open(a, deadline, &p);
        code = code != CTL_OK ? code : end(&p, &c, deadline);
        ctl_pools_close(&p);
    }
    json_decref(c.names);
    if (code == CTL_OK) {
        tell(a, promote ? "promoted" : "rolled back", NULL, -1);
    }
    return code;
}

int ctl_promote(const struct ctl_args *a)
{
    return end_canary(a, true);
}

int ctl_rollback(const struct ctl_args *a)
{
    return end_canary(a, false);
}
