/* baton-keeper: one per host; holds the memory of pools so that it outlives the processes that work
 * in it (kvstore/keeper/README.md). Thread: main. */
#include "common/node/node.h"
#include "common/obs/log.h"
#include "common/thr/time.h"
#include "kvstore/keeper/server.h"

struct kv_main_conf {
    struct bt_node_conf common;
    char *socket;
    int64_t max_clients, max_regions;
    uint64_t max_bytes, orphan_ns;
    bool huge_pages;
};

#define S struct kv_main_conf
static const struct bt_conf_opt opts[] = {
    BT_NODE_CONF_ROWS(S, common),
    BT_CONF_STR(
        S, socket, "socket", NULL, 107, "Path of the socket for the processes of the host."),
    BT_CONF_INT(S, max_clients, "max_clients", "64", 1, 4096, "Most connections."),
    BT_CONF_INT(S, max_regions, "max_regions", "256", 1, 4096, "Most regions of memory."),
    BT_CONF_BYTES(S,
                  max_bytes,
                  "max_bytes",
                  "0",
                  0,
                  INT64_C(1) << 50,
                  "Most memory of all regions; 0 = as much as the host has."),
    BT_CONF_DURATION(S,
                     orphan_ns,
                     "orphan_ttl",
                     "900s",
                     0,
                     INT64_C(31536000000),
                     "How long memory that nobody has is kept; 0 = for ever."),
    BT_CONF_BOOL(
        S, huge_pages, "huge_pages", "on", "Use reserved huge pages where there are enough."),
};
#undef S

static void ask_stop(void *arg)
{
    kv_keeperd_stop(arg);
}

static int serve(struct bt_node *node, const struct kv_main_conf *conf)
{
    struct kv_keeper_conf kc = {.socket = conf->socket,
                                .max_clients = (uint32_t)conf->max_clients,
                                .max_regions = (uint32_t)conf->max_regions,
                                .max_bytes = conf->max_bytes,
                                .orphan_ns = conf->orphan_ns ? conf->orphan_ns : BT_NEVER_NS,
                                .huge_pages = conf->huge_pages};
    struct bt_node_addr addr = {"socket", conf->socket};
    struct kv_keeperd *keeper;
    struct bt_err err = {0};
    int rc = kv_keeperd_create(&kc, &keeper, &err);

    if (rc < 0) {
        return bt_node_fail(rc == BT_E_CONFIG ? BT_EXIT_CONFIG : BT_EXIT_BIND, rc, &err);
    }
    rc = bt_node_ready(node, &addr, 1, &err);
    if (rc < 0) {
        kv_keeperd_destroy(keeper);
        return bt_node_fail(BT_EXIT_OTHER, rc, &err);
    }
    bt_node_on_stop(node, ask_stop, keeper);
    kv_keeperd_run(keeper);
    kv_keeperd_destroy(keeper);
    return BT_EXIT_OK;
}

int main(int argc, char **argv)
{
    struct kv_main_conf conf = {0};
    struct bt_node_args args = {
        .spec = {.program = "baton-keeper",
                 .summary = "Holds memory for the nodes of a host, so that it outlives them.",
                 .opts = opts,
                 .n_opts = BT_ARRAY_LEN(opts),
                 .out = &conf},
        .conf = &conf.common,
        .argv = argv,
    };
    struct bt_node *node;
    int code;

    (void)argc;
    if (bt_node_create(&args, &node, &code)) {
        code = serve(node, &conf);
        bt_node_destroy(node);
    }
    return code;
}
