/* batonctl canary, promote, rollback: a new version of a role's nodes beside the old one. The
 * supervisor starts and stops the nodes, routers give them their share. */
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

static int ask(const struct ctl_args *a, const char *op, bool dry, uint64_t deadline, json_t **ret)
{
    json_t *m = json_pack("{s:s, s:s, s:b}", "op", op, "role", a->words[0], "dry_run", dry);

    if (m && strcmp(op, "canary") == 0) {
        json_object_set_new(m, "binary", json_string(a->binary));
        json_object_set_new(m, "replicas", json_integer(a->replicas));
        if (a->version) {
            json_object_set_new(m, "release", json_string(a->version));
        }
    }
    return ctl_local_ask(a, m, deadline, ret);
}

/* What the router says of the nodes of the canary once all of them are ready. */
static int
announced(const struct ctl_args *a, const char *router, uint64_t deadline, char version[64])
{
    char prefix[80];

    snprintf(prefix, sizeof(prefix), "%.60s-canary-", a->words[0]);
    for (;;) {
        struct ctl_view v = {0};
        int code = ctl_look(router, deadline, &v);
        int64_t n = 0;

        for (size_t i = 0; i < v.n; i++) {
            if (strncmp(v.nodes[i].name, prefix, strlen(prefix)) == 0 &&
                strcmp(v.nodes[i].state, "ready") == 0) {
                snprintf(version, 64, "%s", v.nodes[i].version);
                n++;
            }
        }
        ctl_view_free(&v);
        if (code != CTL_OK || n >= a->replicas) {
            return code;
        }
        if (bt_now_ns() + CTL_LOOK_NS >= deadline) {
            fputs("batonctl: the router does not see the canary's nodes as ready\n", stderr);
            return CTL_TIMEOUT;
        }
        ctl_sleep(CTL_LOOK_NS);
    }
}

/* True if another node than the canary's own announces the version: requests could not be told
 * apart. */
static int
check_version(const struct ctl_args *a, const char *router, const char *version, uint64_t deadline)
{
    struct ctl_view v = {0};
    int code = ctl_look(router, deadline, &v);

    for (size_t i = 0; code == CTL_OK && i < v.n; i++) {
        if (strcmp(v.nodes[i].role, a->words[0]) == 0 && !strstr(v.nodes[i].name, "-canary-") &&
            strcmp(v.nodes[i].version, version) == 0) {
            fprintf(
                stderr,
                "batonctl: %s announces version %s as well: give the canary another --version\n",
                v.nodes[i].name, version);
            code = CTL_FAILED;
        }
    }
    ctl_view_free(&v);
    return code;
}

static void undo(const struct ctl_args *a)
{
    json_t *answer = NULL;

    if (ask(a, "rollback", false, bt_deadline_ns(CLEANUP_NS), &answer) == CTL_OK) {
        fputs("batonctl: the canary's nodes are stopped again\n", stderr);
    }
    json_decref(answer);
}

static int start(const struct ctl_args *a, struct ctl_pools *p, uint64_t deadline, char version[64])
{
    json_t *answer = NULL;
    int code = ask(a, "canary", a->dry_run, deadline, &answer);

    json_decref(answer);
    if (code != CTL_OK || a->dry_run) {
        return code;
    }
    code = ctl_local_settle(a, deadline);
    code = code != CTL_OK ? code : announced(a, p->router, deadline, version);
    code = code != CTL_OK ? code : check_version(a, p->router, version, deadline);
    code = code != CTL_OK ? code : set_share(a, p->router, version, a->percent, deadline);
    if (code != CTL_OK) {
        undo(a);
    }
    return code;
}

int ctl_canary(const struct ctl_args *a)
{
    uint64_t deadline = bt_deadline_ns(a->timeout_ns);
    struct ctl_pools pools = {0};
    char version[64] = "";
    int code;

    if (!a->binary && !a->version) {
        fputs("batonctl: --binary, or --version of nodes that are there\n", stderr);
        ctl_usage(stderr, a->command);
        return CTL_USAGE;
    }
    if (a->binary) {
        pools.a = a;
        code = ctl_pools_open_local(&pools, deadline);
        code = code != CTL_OK ? code : start(a, &pools, deadline, version);
        ctl_pools_close(&pools);
    } else {
        code = a->dry_run ? CTL_OK : set_share(a, a->router, a->version, a->percent, deadline);
        snprintf(version, sizeof(version), "%s", a->version);
    }
    if (code == CTL_OK) {
        tell(a, "canary", version[0] ? version : a->binary, a->percent);
    }
    return code;
}

/* --- the end --------------------------------------------------------------------------------- */

/* The share goes first, then the nodes. Nodes of a canary that nobody here has started stay. */
static int end_canary(const struct ctl_args *a, const char *op, const char *done)
{
    uint64_t deadline = bt_deadline_ns(a->timeout_ns);
    struct ctl_pools p = {.a = a};
    json_t *plan = NULL, *answer = NULL;
    const json_t *names;
    char buf[108];
    int code;

    if (!a->supervisor && access(ctl_local_path(a, buf), F_OK) != 0) {
        code = a->dry_run ? CTL_OK : set_share(a, a->router, "", 0, deadline);
        goto out;
    }
    code = ctl_pools_open_local(&p, deadline);

    code = code != CTL_OK ? code : ask(a, op, true, deadline, &plan);
    if (code != CTL_OK || a->dry_run) {
        goto out;
    }
    names = json_object_get(plan, "stopping");
    code = set_share(a, p.router, "", 0, deadline);
    code = code != CTL_OK ? code : ctl_pools_drain(&p, names, deadline);
    if (code != CTL_OK) {
        goto out;
    }
    code = ask(a, op, false, deadline, &answer);
    code = code != CTL_OK ? code : ctl_local_gone(a, names, deadline);
    ctl_pools_uncordon(&p, names, bt_deadline_ns(CLEANUP_NS));
    if (code == CTL_OK && a->wait) {
        code = ctl_local_settle(a, deadline);
    }

out:
    json_decref(plan);
    json_decref(answer);
    ctl_pools_close(&p);
    if (code == CTL_OK) {
        tell(a, done, NULL, -1);
    }
    return code;
}

int ctl_promote(const struct ctl_args *a)
{
    return end_canary(a, "promote", "promoted");
}

int ctl_rollback(const struct ctl_args *a)
{
    return end_canary(a, "rollback", "rolled back");
}
