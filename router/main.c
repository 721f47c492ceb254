/* baton-router: start in order, run, drain, stop in reverse order. Thread: main, which runs the
 * control loop. SIGTERM: new calls are refused, running ones go on until drain_timeout. */
#include "router/router_int.h"

#include "common/base/buf.h"
#include "common/obs/log.h"
#include "common/thr/time.h"
#include "proto/descriptor.h"

#include <stdlib.h>
#include <unistd.h>

#define SPARE_CALLS 3072 /* besides requests: questions, and requests that are refused */

static const char *const paths[] = {"auto", "direct", "local", "store", NULL}; /* enum rt_path */

static const struct bt_conf_opt opts[] = {
    BT_NODE_CONF_ROWS(struct rt_conf, common),
    BT_NODE_CONF_ACCESS_ROW(struct rt_conf, common),
    BT_SEC_CONF_ROWS(struct rt_conf, common.sec),
    BT_SEC_ROUTER_CONF_ROWS(struct rt_conf, common.sec),
    BT_CLUSTER_CONF_ROWS(struct rt_conf, cluster),
    BT_CONF_STR(struct rt_conf,
                name,
                "name",
                "",
                63,
                "Name of this router; empty = router, host and process id."),
    BT_CONF_ADDR_REQUIRED(struct rt_conf,
                          listen,
                          "listen",
                          "127.0.0.1:50050",
                          "Address for clients (gRPC); port 0 picks a free one."),
    BT_CONF_DURATION(struct rt_conf,
                     ping_ns,
                     "limits.ping",
                     "10s",
                     100,
                     3600000,
                     "A gRPC client with open calls that is quiet for so long is pinged, and gone "
                     "if it does not answer for as long again."),
    BT_CONF_STR(struct rt_conf,
                model,
                "model",
                NULL,
                4000,
                "Model, for its tokenizer, template and digest: a .gguf file or a Hugging Face "
                "directory."),
    BT_CONF_BYTES(struct rt_conf,
                  max_request_bytes,
                  "limits.request_bytes",
                  "8M",
                  1024,
                  1 << 30,
                  "Largest message of a client."),
    BT_CONF_BYTES(struct rt_conf,
                  max_queued_bytes,
                  "limits.queued_bytes",
                  "4M",
                  1024,
                  1 << 30,
                  "Answer that may wait for a slow client before its request is cancelled."),
    BT_CONF_INT(struct rt_conf,
                max_active,
                "limits.active",
                "1024",
                1,
                1 << 20,
                "Requests at one time; more are refused."),
    BT_CONF_INT(
        struct rt_conf,
        spin_us,
        "loop.spin_us",
        "100",
        0,
        1000,
        "While events come at shorter intervals than this, look for the next one instead of "
        "sleeping; microseconds, 0 = always sleep."),
    BT_CONF_INT(struct rt_conf,
                local_below_tokens,
                "route.local_below_tokens",
                "0",
                0,
                1 << 24,
                "Shorter prompts are computed by the decode node itself."),
    BT_CONF_ENUM(struct rt_conf,
                 path,
                 "route.path",
                 "auto",
                 paths,
                 "Path of requests that name none: auto, direct, local, or store where a daemon of "
                 "the KV store is there."),
    BT_CONF_ENUM(struct rt_conf,
                 route,
                 "route.policy",
                 "cost",
                 rt_route_names,
                 "How the prefill node is chosen; all but cost are for comparison."),
    BT_CONF_DURATION(struct rt_conf,
                     reuse_ns,
                     "route.reuse",
                     "1200s",
                     0,
                     86400000,
                     "How fast the chance fades that a cached block is asked for again."),
    BT_CONF_DURATION(struct rt_conf,
                     first_token_ns,
                     "admission.first_token",
                     "60s",
                     0,
                     86400000,
                     "Requests whose first token would take longer are refused; 0 = none."),
    BT_CONF_DURATION(struct rt_conf,
                     good_first_ns,
                     "goodput.first_token",
                     "2s",
                     0,
                     86400000,
                     "An answer counts as good if its first token came within this time,"),
    BT_CONF_DURATION(struct rt_conf,
                     good_token_ns,
                     "goodput.token",
                     "100ms",
                     0,
                     86400000,
                     "and each later one within this time, on average of the answer."),
    BT_CONF_INT(struct rt_conf,
                keep_traces,
                "explain.keep",
                "512",
                0,
                65536,
                "Requests that have ended and can still be explained."),
    BT_CONF_DURATION(struct rt_conf,
                     node_queue_ns,
                     "admission.node_queue",
                     "2s",
                     0,
                     86400000,
                     "Computing that a node may have queued; the rest waits in the router. 0 = all "
                     "goes to the nodes."),
    BT_CONF_INT(struct rt_conf,
                max_queued,
                "admission.queued",
                "512",
                1,
                1 << 16,
                "Requests that wait in the router; more are refused."),
    BT_CONF_INT(struct rt_conf,
                tenant_queued,
                "admission.tenant_queued",
                "0",
                0,
                1 << 16,
                "Of them of one tenant; 0 = no limit of its own."),
    BT_CONF_INT(struct rt_conf,
                tenant_running,
                "admission.tenant_running",
                "0",
                0,
                1 << 16,
                "Requests of one tenant that run at one time; 0 = no limit."),
    BT_CONF_STR(struct rt_conf,
                weights,
                "admission.weights",
                "",
                4000,
                "Shares of tenants under load: name=weight,...; others have 1."),
    BT_CONF_INT(struct rt_conf,
                retries,
                "route.retries",
                "3",
                0,
                100,
                "Further attempts after a node has failed a request."),
    BT_CONF_DURATION(struct rt_conf,
                     wait_ns,
                     "route.wait",
                     "2s",
                     0,
                     600000,
                     "How long a request waits for nodes that can take it."),
    BT_CONF_INT(
        struct rt_conf,
        max_node_blocks,
        "index.max_blocks_per_node",
        "8388608",
        1024,
        INT64_C(1) << 32,
        "Blocks that the index takes from one node, all ranks together; what a node says to "
        "have beyond is unknown here. 16 bytes each, twice while a node tells all anew."),
    BT_CONF_DURATION(struct rt_conf,
                     node_silence_ns,
                     "node.silence",
                     "2s",
                     100,
                     600000,
                     "A node that is silent for longer is lost (at least three heartbeats)."),
    BT_CONF_DURATION(struct rt_conf,
                     drain_timeout_ns,
                     "drain_timeout",
                     "30s",
                     0,
                     3600000,
                     "How long running requests may go on after SIGTERM."),
    BT_CONF_ADDR(struct rt_conf,
                 http.listen,
                 "http.listen",
                 "",
                 "Address of the OpenAI-compatible HTTP port; port 0 picks a free one; empty = "
                 "off."),
    BT_CONF_BOOL(struct rt_conf,
                 http.open_metrics,
                 "http.open_metrics",
                 "false",
                 "Answer /metrics without a token."),
    BT_CONF_BYTES(struct rt_conf,
                  http.max_body_bytes,
                  "http.max_body_bytes",
                  "8M",
                  1024,
                  1 << 30,
                  "Largest body of an HTTP request."),
    BT_CONF_INT(struct rt_conf,
                http.max_body_values,
                "http.max_body_values",
                "262144",
                1024,
                1 << 24,
                "Values (numbers, texts, lists, objects) in the JSON body of an HTTP request: more "
                "than the longest prompt of ids has."),
    BT_CONF_BYTES(struct rt_conf,
                  http.max_queued_bytes,
                  "http.queued_bytes",
                  "1M",
                  4096,
                  1 << 30,
                  "Stream that may wait for a slow HTTP client before its request is cancelled."),
    BT_CONF_INT(struct rt_conf,
                http.max_connections,
                "http.max_connections",
                "8192",
                1,
                1 << 20,
                "HTTP connections at one time; then idle ones make room."),
    BT_CONF_DURATION(struct rt_conf,
                     http.idle_ns,
                     "http.idle_timeout",
                     "620s",
                     100,
                     86400000,
                     "Idle HTTP connections are closed after this; longer than a load balancer's."),
    BT_CONF_DURATION(struct rt_conf,
                     http.header_ns,
                     "http.header_timeout",
                     "10s",
                     100,
                     3600000,
                     "Time in which the header of an HTTP request must come."),
    BT_CONF_DURATION(struct rt_conf,
                     http.body_ns,
                     "http.body_timeout",
                     "60s",
                     100,
                     3600000,
                     "Time in which the body of an HTTP request must come."),
    BT_CONF_DURATION(struct rt_conf,
                     http.stall_ns,
                     "http.stall_timeout",
                     "30s",
                     100,
                     3600000,
                     "An HTTP client that takes nothing of its answer for this long is dropped."),
    BT_CONF_DURATION(struct rt_conf,
                     http.heartbeat_ns,
                     "http.heartbeat",
                     "5s",
                     100,
                     3600000,
                     "Pause in a stream after which a comment is sent, so that proxies keep it."),
};

/* --- membership ------------------------------------------------------------------------------ */

struct snapshot {
    struct bt_msg msg;
    struct rt_router *router;
    struct bt_members *members;
};

static void on_members(struct bt_msg *msg, void *loop)
{
    struct snapshot *s = BT_CONTAINER_OF(msg, struct snapshot, msg);

    if (!s->router->draining) {
        rt_nodes_update(s->router, s->members);
    }
    bt_members_unref(s->members);
    free(s);
}

/* [redis thread] */
static void members_changed(void *arg, struct bt_members *take_members)
{
    struct rt_router *r = arg;
    struct snapshot *s = bt_calloc(1, sizeof(*s));

    if (!s) {
        bt_members_unref(take_members); /* the next change brings all of them again */
        return;
    }
    *s = (struct snapshot){.msg.handle = on_members, .router = r, .members = take_members};
    if (!bt_loop_post(r->loop, &s->msg)) {
        bt_members_unref(s->members);
        free(s);
    }
}

/* --- drain ----------------------------------------------------------------------------------- */

/* One of the two ports has no call left. */
static void on_shut(void *arg)
{
    struct rt_router *r = arg;

    if (++r->n_shut == (r->http ? 2 : 1)) {
        bt_loop_stop(r->loop);
    }
}

static void on_stop(struct bt_msg *msg, void *loop)
{
    struct rt_router *r = BT_CONTAINER_OF(msg, struct rt_router, stop_msg);

    BT_INFO("drain", "requests=%zu", r->n_requests);
    bt_health_set_all(r->health, BT_HEALTH_NOT_SERVING);
    if (r->http) {
        rt_http_drain(r->http, bt_deadline_ns(r->conf->drain_timeout_ns), on_shut, r);
    }
    bt_rpc_server_shutdown(r->server, bt_deadline_ns(r->conf->drain_timeout_ns), on_shut, r);
}

/* [signal thread] */
static void ask_stop(void *arg)
{
    struct rt_router *r = arg;

    bt_loop_post(r->loop, &r->stop_msg);
}

/* --- start and stop -------------------------------------------------------------------------- */

/* service: three, of clients, of operators and of who only looks; they outlive the server. */
static int open_server(struct rt_router *r, struct bt_rpc_service *service, struct bt_err *err)
{
    struct bt_rpc_server_config sc = {
        .sec = bt_node_sec(r->node),
        .allow_insecure = r->conf->common.allow_insecure,
        .max_message_bytes = r->conf->max_request_bytes,
        .max_queued_bytes = r->conf->max_queued_bytes,
        .max_calls = (int)r->conf->max_active + SPARE_CALLS,
        .keepalive = {.time_ms = (int)(r->conf->ping_ns / BT_NS_PER_MS),
                      .timeout_ms = (int)(r->conf->ping_ns / BT_NS_PER_MS),
                      .calls_only = true}};
    struct bt_str set = wire_descriptor_set();
    int port, rc;

    service[0] = (struct bt_rpc_service){.name = "baton.v1.Baton",
                                         .methods = rt_service_methods,
                                         .n_methods = rt_service_n_methods,
                                         .user = r};
    service[1] = (struct bt_rpc_service){.name = "baton.v1.Operator",
                                         .methods = rt_operator_methods,
                                         .n_methods = rt_operator_n_methods,
                                         .user = r};
    service[2] = (struct bt_rpc_service){.name = "baton.v1.Inspect",
                                         .methods = rt_inspect_methods,
                                         .n_methods = rt_inspect_n_methods,
                                         .user = r};
    if ((rc = bt_node_check_listen(&r->conf->common, BT_SEC_GRPC, "listen", r->conf->listen, err)) <
            0 ||
        (rc = bt_rpc_server_create(r->loop, &sc, &r->server, err)) < 0 ||
        (rc = bt_rpc_server_register(r->server, &service[0], err)) < 0 ||
        (rc = bt_rpc_server_register(r->server, &service[1], err)) < 0 ||
        (rc = bt_rpc_server_register(r->server, &service[2], err)) < 0 ||
        (rc = bt_health_create(r->server, &r->health, err)) < 0 ||
        (rc = bt_reflection_create(r->server, &set, 1, &r->reflection, err)) < 0 ||
        (rc = bt_rpc_server_listen(r->server, r->conf->listen, &port, err)) < 0) {
        return rc;
    }
    for (int i = 0; i < 3; i++) {
        bt_health_set(r->health, service[i].name, BT_HEALTH_NOT_SERVING);
    }
    if (strncmp(r->conf->listen, "unix:", 5) == 0) {
        snprintf(r->address, sizeof(r->address), "%s", r->conf->listen);
    } else {
        snprintf(r->address, sizeof(r->address), "%.*s:%d",
                 (int)(strrchr(r->conf->listen, ':') - r->conf->listen), r->conf->listen, port);
    }
    return bt_rpc_server_start(r->server, err);
}

static int open_http(struct rt_router *r, struct bt_err *err)
{
    const struct rt_http_conf *hc = &r->conf->http;
    int rc;

    if (!hc->listen[0]) {
        return BT_OK;
    }
    rc = bt_node_check_listen(&r->conf->common, BT_SEC_HTTP, "http.listen", hc->listen, err);
    return rc < 0 ? rc : rt_http_start(r, hc, &r->http, err);
}

static int start(struct rt_router *r, struct bt_rpc_service *service, struct bt_err *err)
{
    struct bt_registry_cfg rc = {.conf = &r->conf->cluster, .changed = members_changed, .arg = r};
    int code;

    if ((code = bt_cluster_conf_check(&r->conf->cluster, err)) < 0) {
        return bt_node_fail(BT_EXIT_CONFIG, code, err);
    }
    if ((code = rt_model_open(r->conf->model, &r->model, err)) < 0) {
        return bt_node_fail(BT_EXIT_MODEL, code, err);
    }
    if ((code = bt_loop_create(&r->loop, err)) < 0) {
        return bt_node_fail(BT_EXIT_OTHER, code, err);
    }
    bt_loop_spin(r->loop, (uint64_t)r->conf->spin_us * BT_NS_PER_US);
    if ((code = rt_admit_init(r, err)) < 0) {
        return bt_node_fail(code == BT_E_CONFIG ? BT_EXIT_CONFIG : BT_EXIT_OTHER, code, err);
    }
    if ((code = rt_traces_create((size_t)r->conf->keep_traces, &r->traces, err)) < 0 ||
        (code = rt_cache_init(r, err)) < 0 || (code = rt_tok_worker_start(r, err)) < 0) {
        return bt_node_fail(BT_EXIT_OTHER, code, err);
    }
    if ((code = open_server(r, service, err)) < 0) {
        return bt_node_fail(code == BT_E_CONFIG ? BT_EXIT_CONFIG : BT_EXIT_BIND, code, err);
    }
    if ((code = open_http(r, err)) < 0) {
        return bt_node_fail(code == BT_E_CONFIG ? BT_EXIT_CONFIG : BT_EXIT_BIND, code, err);
    }
    if ((code = rt_orders_start(r, err)) < 0) {
        return bt_node_fail(BT_EXIT_OTHER, code, err);
    }
    if ((code = bt_registry_create(&rc, &r->registry, err)) < 0) {
        return bt_node_fail(code == BT_E_CONFIG ? BT_EXIT_CONFIG : BT_EXIT_OTHER, code, err);
    }
    rt_renew_start(r);
    return BT_EXIT_OK;
}

static int serve(struct rt_router *r, struct bt_err *err)
{
    struct bt_node_addr addrs[2] = {{"listen", r->address}};
    int rc;

    bt_health_set_all(r->health, BT_HEALTH_SERVING);
    if (r->http) {
        addrs[1] = (struct bt_node_addr){"http", rt_http_address(r->http)};
    }
    rc = bt_node_ready(r->node, addrs, r->http ? 2 : 1, err);
    if (rc < 0) {
        return bt_node_fail(BT_EXIT_OTHER, rc, err);
    }
    bt_node_on_stop(r->node, ask_stop, r);
    bt_loop_run(r->loop);
    return BT_EXIT_OK;
}

static void stop(struct rt_router *r)
{
    bt_registry_destroy(r->registry);
    rt_orders_stop(r);
    rt_http_stop(r->http);
    bt_rpc_server_destroy(r->server); /* requests cancel their legs: the nodes are still there */
    rt_tok_worker_stop(r->tok_worker);
    r->draining = true;
    rt_renew_stop(r);
    rt_nodes_fini(r);
    rt_cache_fini(r);
    rt_admit_fini(r);
    rt_stores_fini(r);
    rt_traces_destroy(r->traces);
    bt_reflection_destroy(r->reflection);
    bt_health_destroy(r->health);
    bt_loop_destroy(r->loop);
    rt_orders_fini(r);
    rt_model_close(r->model);
}

static int run(struct bt_node *node, const struct rt_conf *conf)
{
    struct rt_router r = {.conf = conf,
                          .node = node,
                          .incarnation = bt_incarnation_make(),
                          .stop_msg.handle = on_stop};
    struct bt_rpc_service service[3];
    struct bt_err err = {0};
    char host[40] = "";
    int code;

    r.random = r.incarnation;
    r.stats.started = time(NULL);
    bt_list_init(&r.requests);
    bt_list_init(&r.orders.waiting);
    rt_nodes_init(&r);
    if (conf->name[0]) {
        snprintf(r.name, sizeof(r.name), "%s", conf->name);
    } else {
        gethostname(host, sizeof(host) - 1);
        snprintf(r.name, sizeof(r.name), "router-%s-%d", host, (int)getpid());
    }
    if (!bt_member_name_ok(bt_str_of(r.name))) { /* nodes would not take it */
        BT_FAIL(&err, BT_E_CONFIG, "name = %s: letters, digits, '-', '_', '.' only", r.name);
        return bt_node_fail(BT_EXIT_CONFIG, BT_E_CONFIG, &err);
    }
    code = start(&r, service, &err);
    if (code == BT_EXIT_OK) {
        code = serve(&r, &err);
    }
    stop(&r);
    return code;
}

int main(int argc, char **argv)
{
    struct rt_conf conf = {0};
    struct bt_node_args args = {
        .spec = {.program = "baton-router",
                 .summary = "Router: takes requests, picks nodes, relays the answers.",
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
        code = run(node, &conf);
        bt_node_destroy(node);
    }
    return code;
}
