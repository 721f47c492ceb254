/* baton-decode: takes KV caches over and generates; with role = both it computes prompts as well
 * and is a whole installation by itself. All of the service is in kernels/serve; this is its role.
 * Thread: main. */
#include "kernels/serve/serve.h"

struct dc_conf {
    struct kn_serve_conf serve;
    int role; /* index into role_names and roles */
};

static const char *const role_names[] = {"decode", "both", NULL};
static const struct kn_serve_role roles[] = {
    {.name = "decode", .takes = {[KN_LEG_LOCAL] = true, [KN_LEG_DECODE] = true}, .handoffs = true},
    {.name = "both", .takes = {[KN_LEG_LOCAL] = true}},
};

int main(int argc, char **argv)
{
    static const struct bt_conf_opt opts[] = {
        KN_SERVE_CONF_ROWS(struct dc_conf, serve),
        BT_CONF_ENUM(struct dc_conf, role, "role", "decode", role_names,
                     "decode: generates after prefill nodes; both: a node that needs no other."),
    };
    struct dc_conf conf = {0};
    struct bt_node_args args = {
        .spec = {.program = "baton-decode",
                 .summary = "Decode node: takes KV over and generates.",
                 .opts = opts,
                 .n_opts = BT_ARRAY_LEN(opts),
                 .out = &conf},
        .conf = &conf.serve.common,
        .argv = argv,
    };
    struct bt_node *node;
    int code;

    (void)argc;
    if (bt_node_create(&args, &node, &code)) {
        code = kn_serve_run(node, &conf.serve, &roles[conf.role]);
        bt_node_destroy(node);
    }
    return code;
}
