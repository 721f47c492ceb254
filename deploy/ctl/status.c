/* batonctl status: the router's model and the table of its nodes. */
#include "common/thr/time.h"
#include "deploy/ctl/show.h"

#include <stdio.h>
#include <string.h>

static void on_message(void *user, const ProtobufCMessage *msg)
{
    const Baton__V1__ServerInfo *m = (const void *)msg;

    if (((const struct ctl_args *)user)->output == CTL_JSON) {
        ctl_print_json(msg);
        return;
    }
    printf("router version %s, %u active requests, membership %s\n", m->version, m->requests_active,
           m->membership);
    for (size_t i = 0; i < m->n_models; i++) {
        const Baton__V1__ModelInfo *mi = m->models[i];

        printf("model  %s (%s), digest %.16s, context %u, vocabulary %u\n", mi->name,
               mi->architecture, mi->digest, mi->context_tokens, mi->vocab_size);
    }
    printf("%-24s %-8s %-12s %-22s %13s %8s %8s  %s\n", "NODE", "ROLE", "STATE", "ADDRESS",
           "PAGES FREE", "WAITING", "RUNNING", "REASON");
    for (size_t i = 0; i < m->n_nodes; i++) {
        const Baton__V1__NodeInfo *n = m->nodes[i];
        const bool other = n->version[0] && strcmp(n->version, m->version) != 0;

        printf("%-24s %-8s %-12s %-22s %6u/%6u %8u %8u  %s%s%s%s\n", n->name[0] ? n->name : "?",
               n->role, ctl_node_state(n), n->address, n->pages_free, n->pages_total,
               n->requests_waiting, n->requests_running, n->reason,
               other && n->reason[0] ? "; " : "", other ? "version " : "", other ? n->version : "");
    }
}

int ctl_status(const struct ctl_args *a)
{
    Baton__V1__GetServerRequest m = BATON__V1__GET_SERVER_REQUEST__INIT;
    struct ctl_call c = {.path = "/baton.v1.Baton/GetServer",
                         .request = &m.base,
                         .response = &baton__v1__server_info__descriptor,
                         .deadline_ns = bt_deadline_ns(a->timeout_ns),
                         .message = on_message,
                         .user = (void *)(uintptr_t)a};

    return ctl_run(a->router, &c);
}
