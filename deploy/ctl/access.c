/* What batonctl shows to those it calls: a token, a certificate; and whose certificates it
 * believes. Files alone name secrets: arguments are for everybody to see. */
#include "common/rpc/server.h"
#include "common/sec/sec.h"
#include "deploy/ctl/ctl.h"

static struct bt_sec_conf conf[CTL_PEERS]; /* borrowed by sec */
static struct bt_sec *sec[CTL_PEERS];

static char *path(const char *given)
{
    return (char *)(uintptr_t)(given ? given : "");
}

int ctl_access_open(const struct ctl_args *a)
{
    const char *node_name = a->node_tls_name ? a->node_tls_name : a->tls_name;
    struct bt_err err = {0};
    int rc = BT_OK;

    if (!a->token_file && !a->ca && !a->cert && !a->key && !node_name) {
        return CTL_OK;
    }
    if (!a->cert != !a->key || ((a->cert || node_name) && !a->ca)) {
        fputs("batonctl: --cert and --key go together, and they, --tls-name and --node-tls-name "
              "need --ca\n",
              stderr);
        return CTL_USAGE;
    }
    for (int i = 0; rc == BT_OK && i < CTL_PEERS; i++) {
        conf[i] = (struct bt_sec_conf){.clients_file = path(NULL), /* as a router shows a token */
                                       .cluster_file = path(a->token_file),
                                       .node_ca_file = path(a->ca),
                                       .node_cert_file = path(a->cert),
                                       .node_key_file = path(a->key),
                                       .node_name = path(i == CTL_NODE ? node_name : a->tls_name)};
        rc = bt_sec_create(&conf[i], &sec[i], &err);
    }
    if (rc < 0) {
        fprintf(stderr, "batonctl: %s\n", bt_err_msg(&err, rc));
        return CTL_USAGE;
    }
    return CTL_OK;
}

struct bt_sec *ctl_access(enum ctl_peer peer)
{
    return sec[peer];
}

void ctl_access_warn(const char *address)
{
    if (sec[0] && conf[0].cluster_file[0] && !conf[0].node_ca_file[0] &&
        !bt_rpc_address_is_local(address)) {
        fprintf(stderr,
                "batonctl: warning: the token goes to %s in the clear; --ca FILE makes it TLS\n",
                address);
    }
}

void ctl_access_close(void)
{
    for (int i = 0; i < CTL_PEERS; i++) {
        bt_sec_destroy(sec[i]);
        sec[i] = NULL;
    }
}
