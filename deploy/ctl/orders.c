/* batonctl cordon, uncordon, drain: orders to routers about one node, and watching them work. */
#include "deploy/ctl/cluster.h"

#include "common/thr/time.h"

#include <stdlib.h>

static void on_reply(void *user, const ProtobufCMessage *msg)
{
    *(Baton__V1__OrderReply *)user = *(const Baton__V1__OrderReply *)(const void *)msg;
}

int ctl_order_cordon(
    const char *router, const char *node, bool on, uint64_t deadline_ns, Baton__V1__OrderReply *ret)
{
    Baton__V1__CordonRequest m = BATON__V1__CORDON_REQUEST__INIT;
    struct ctl_call c = {.path = "/baton.v1.Operator/Cordon",
                         .request = &m.base,
                         .response = &baton__v1__order_reply__descriptor,
                         .deadline_ns = deadline_ns,
                         .message = on_reply,
                         .user = ret};

    m.node = (char *)(uintptr_t)node;
    m.on = on;
    return ctl_run(router, &c);
}

int ctl_order_canary(const char *router,
                     const Baton__V1__SetCanaryRequest *m,
                     uint64_t deadline_ns,
                     Baton__V1__OrderReply *ret)
{
    struct ctl_call c = {.path = "/baton.v1.Operator/SetCanary",
                         .request = &m->base,
                         .response = &baton__v1__order_reply__descriptor,
                         .deadline_ns = deadline_ns,
                         .message = on_reply,
                         .user = ret};

    return ctl_run(router, &c);
}

/* --- what a router says ---------------------------------------------------------------------- */

static void on_server(void *user, const ProtobufCMessage *msg)
{
    struct ctl_view *v = user;
    const Baton__V1__ServerInfo *m = (const void *)msg;

    ctl_view_free(v);
    v->nodes = calloc(m->n_nodes + 1, sizeof(*v->nodes));
    for (size_t i = 0; v->nodes && i < m->n_nodes; i++) {
        const Baton__V1__NodeInfo *n = m->nodes[i];
        struct ctl_seen *s = &v->nodes[v->n++];

        snprintf(s->name, sizeof(s->name), "%s", n->name);
        snprintf(s->role, sizeof(s->role), "%s", n->role);
        snprintf(s->state, sizeof(s->state), "%s", n->state);
        snprintf(s->version, sizeof(s->version), "%s", n->version);
        s->cordoned = n->cordoned;
        /* What the node said last, or what this router has there: mostly the same requests. */
        s->work = BT_MAX((uint64_t)n->requests_running + n->requests_waiting, (uint64_t)n->legs);
    }
}

int ctl_look(const char *router, uint64_t deadline_ns, struct ctl_view *v)
{
    Baton__V1__GetServerRequest m = BATON__V1__GET_SERVER_REQUEST__INIT;
    struct ctl_call c = {.path = "/baton.v1.Baton/GetServer",
                         .request = &m.base,
                         .response = &baton__v1__server_info__descriptor,
                         .deadline_ns = deadline_ns,
                         .message = on_server,
                         .user = v};

    return ctl_run(router, &c);
}

void ctl_view_free(struct ctl_view *v)
{
    free(v->nodes);
    *v = (struct ctl_view){0};
}

const struct ctl_seen *ctl_view_find(const struct ctl_view *v, const char *name)
{
    for (size_t i = 0; i < v->n; i++) {
        if (strcmp(v->nodes[i].name, name) == 0) {
            return &v->nodes[i];
        }
    }
    return NULL;
}

/* --- draining -------------------------------------------------------------------------------- */

int ctl_wait_idle(const char *router, const char *node, uint64_t settled_ns, uint64_t deadline_ns)
{
    struct ctl_view v = {0};
    int code = CTL_OK;

    for (;;) {
        const struct ctl_seen *s;

        code = ctl_look(router, deadline_ns, &v);
        s = code == CTL_OK ? ctl_view_find(&v, node) : NULL;
        /* A node that is gone has nothing left to do. */
        if (code != CTL_OK ||
            ((!s || s->work == 0 || strcmp(s->state, "lost") == 0) && bt_now_ns() >= settled_ns)) {
            break;
        }
        if (bt_now_ns() + CTL_LOOK_NS >= deadline_ns) {
            fprintf(stderr, "batonctl: %s still has %llu requests; it stays cordoned\n", node,
                    s ? (unsigned long long)s->work : 0ull);
            code = CTL_TIMEOUT;
            break;
        }
        ctl_sleep(CTL_LOOK_NS);
    }
    ctl_view_free(&v);
    return code;
}

int ctl_drain_node(const char *router, const char *node, uint64_t deadline_ns)
{
    Baton__V1__OrderReply reply = BATON__V1__ORDER_REPLY__INIT;
    int code = ctl_order_cordon(router, node, true, deadline_ns, &reply);

    if (code != CTL_OK) {
        return code;
    }
    return ctl_wait_idle(router, node, bt_now_ns() + reply.settle_ms * BT_NS_PER_MS, deadline_ns);
}

/* --- commands -------------------------------------------------------------------------------- */

static int tell(const struct ctl_args *a, const char *what, bool kept)
{
    if (a->output == CTL_JSON) {
        printf("{\"node\": \"%s\", \"state\": \"%s\", \"kept\": %s}\n", a->words[0], what,
               kept ? "true" : "false");
    } else {
        printf("%s %s\n", a->words[0], what);
        if (!kept) {
            fputs("batonctl: there is no Redis: this router alone knows, until it ends\n", stderr);
        }
    }
    return CTL_OK;
}

/* What would be done, from what the router says of the node. */
static int dry(const struct ctl_args *a, const char *verb)
{
    struct ctl_view v = {0};
    int code = ctl_look(a->router, bt_deadline_ns(a->timeout_ns), &v);
    const struct ctl_seen *s = ctl_view_find(&v, a->words[0]);

    if (code == CTL_OK && !s) {
        fprintf(stderr, "batonctl: no node %s is known here\n", a->words[0]);
        code = CTL_NOT_FOUND;
    } else if (code == CTL_OK && a->output == CTL_JSON) {
        printf("{\"node\": \"%s\", \"dry_run\": true, \"would\": \"%s\", \"cordoned\": %s, "
               "\"requests\": %llu}\n",
               s->name, verb, s->cordoned ? "true" : "false", (unsigned long long)s->work);
    } else if (code == CTL_OK) {
        printf("would %s %s (%s, %s%s, %llu requests)\n", verb, s->name, s->role, s->state,
               s->cordoned ? ", cordoned" : "", (unsigned long long)s->work);
    }
    ctl_view_free(&v);
    return code;
}

/* Until all routers have heard of it. */
static int wait_settled(const struct ctl_args *a, uint64_t settle_ns, uint64_t deadline_ns)
{
    uint64_t now = bt_now_ns(), left = deadline_ns > now ? deadline_ns - now : 0;

    ctl_sleep(BT_MIN(settle_ns, left));
    if (settle_ns > left) {
        fprintf(stderr,
                "batonctl: the order for %s is given; not all routers may have heard of it\n",
                a->words[0]);
        return CTL_TIMEOUT;
    }
    return CTL_OK;
}

static int set_cordon(const struct ctl_args *a, bool on)
{
    Baton__V1__OrderReply reply = BATON__V1__ORDER_REPLY__INIT;
    uint64_t deadline = bt_deadline_ns(a->timeout_ns);
    int code;

    if (a->dry_run) {
        return dry(a, on ? "cordon" : "uncordon");
    }
    code = ctl_order_cordon(a->router, a->words[0], on, deadline, &reply);
    if (code == CTL_OK && a->wait) {
        code = wait_settled(a, reply.settle_ms * BT_NS_PER_MS, deadline);
    }
    return code == CTL_OK ? tell(a, on ? "cordoned" : "uncordoned", reply.kept) : code;
}

int ctl_cordon(const struct ctl_args *a)
{
    return set_cordon(a, true);
}

int ctl_uncordon(const struct ctl_args *a)
{
    return set_cordon(a, false);
}

int ctl_drain(const struct ctl_args *a)
{
    Baton__V1__OrderReply reply = BATON__V1__ORDER_REPLY__INIT;
    uint64_t deadline = bt_deadline_ns(a->timeout_ns);
    int code;

    if (a->dry_run) {
        return dry(a, "drain");
    }
    code = ctl_order_cordon(a->router, a->words[0], true, deadline, &reply);
    if (code != CTL_OK || !a->wait) {
        return code == CTL_OK ? tell(a, "draining", reply.kept) : code;
    }
    code = ctl_wait_idle(a->router, a->words[0], bt_now_ns() + reply.settle_ms * BT_NS_PER_MS,
                         deadline);
    return code == CTL_OK ? tell(a, "drained", reply.kept) : code;
}
