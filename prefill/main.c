/* baton-prefill: computes prompts, makes the first token, hands the KV cache over. All of the
 * service is in kernels/serve; this is its role. Thread: main. */
#include "kernels/serve/serve.h"

struct pf_conf {
    struct kn_serve_conf serve;
};

int main(int argc, char **argv)
{
    static const struct bt_conf_opt opts[] = {KN_SERVE_CONF_ROWS(struct pf_conf, serve)};
    static const struct kn_serve_role role = {
        .name = "prefill", .takes = {[KN_LEG_PREFILL] = true}, .handoffs = true};
    struct pf_conf conf = {0};
    struct bt_node_args args = {
        .spec = {.program = "baton-prefill",
                 .summary = "Prefill node: computes prompts and hands their KV to decode nodes.",
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
        code = kn_serve_run(node, &conf.serve, &role);
        bt_node_destroy(node);
    }
    return code;
}
