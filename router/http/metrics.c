/* What the router says of itself over HTTP: health, readiness, its model, metrics. Every series is
 * bounded by what the cluster consists of; series.c has those of requests. Loop thread. */
#include "router/http/http_int.h"

#include <time.h>

/* n[RT_NODE_STATE_COUNT]: those that would be ready, were they not cordoned. */
static void count_nodes(const struct rt_router *r, size_t n[RT_NODE_STATE_COUNT + 1])
{
    bt_list_for_each (it, &r->nodes) {
        const struct rt_node *node = BT_LIST_ENTRY(it, struct rt_node, link);
        bool held = node->state == RT_NODE_READY && !rt_node_serves(node);

        n[held ? RT_NODE_STATE_COUNT : node->state] += node->role != RT_ROLE_STORE;
    }
}

static bool can_serve(const struct rt_router *r)
{
    bool prefill = false, decode = false, both = false;

    bt_list_for_each (it, &r->nodes) {
        const struct rt_node *n = BT_LIST_ENTRY(it, struct rt_node, link);

        if (rt_node_serves(n)) {
            prefill = prefill || n->role == RT_ROLE_PREFILL;
            decode = decode || n->role == RT_ROLE_DECODE;
            both = both || n->role == RT_ROLE_BOTH;
        }
    }
    return both || decode || (prefill && decode);
}

static int put_model(const struct rt_router *r, struct bt_buf *b)
{
    const struct bt_model_config *c = rt_model_config(r->model);
    int rc;

    if ((rc = rt_http_put(b, "{\"id\":")) < 0 ||
        (rc = rt_http_put_lossy(b, bt_str_of(c->name))) < 0) {
        return rc;
    }
    return bt_buf_printf(b,
                         ",\"object\":\"model\",\"created\":%lld,\"owned_by\":\"baton\","
                         "\"max_model_len\":%u}",
                         (long long)r->stats.started, rt_nodes_context(r, (uint32_t)c->n_ctx));
}

static int put_models(const struct rt_router *r, struct bt_buf *b)
{
    int rc;

    if ((rc = rt_http_put(b, "{\"object\":\"list\",\"data\":[")) < 0 ||
        (rc = put_model(r, b)) < 0) {
        return rc;
    }
    return rt_http_put(b, "]}");
}

/* --- metrics --------------------------------------------------------------------------------- */

static int
put_value(struct bt_buf *b, const char *name, const char *type, const char *help, uint64_t value)
{
    int rc = rt_http_put_help(b, name, type, help);

    return rc < 0 ? rc : bt_buf_printf(b, "%s %llu\n", name, (unsigned long long)value);
}

static int put_requests(const struct rt_router *r, struct bt_buf *b)
{
    size_t n[RT_REQUEST_STATE_COUNT];
    uint64_t waiting = 0;
    int rc = rt_http_put_help(b, "baton_router_requests", "gauge", "Requests by state.");

    rt_requests_count(r, n);
    for (int i = 0; rc == BT_OK && i < RT_REQUEST_STATE_COUNT; i++) {
        if (i != RT_REQUEST_DONE) {
            rc = bt_buf_printf(b, "baton_router_requests{state=\"%s\"} %zu\n",
                               rt_request_state_name((enum rt_request_state)i), n[i]);
        }
    }
    waiting = n[RT_REQUEST_TOKENIZE] + n[RT_REQUEST_QUEUED] + n[RT_REQUEST_PREFILL];
    if (rc == BT_OK) {
        rc = put_value(b, "vllm:num_requests_waiting", "gauge",
                       "Requests without a first token (the name that gateways read).", waiting);
    }
    return rc < 0 ? rc
                  : put_value(b, "vllm:num_requests_running", "gauge",
                              "Requests with a first token (the name that gateways read).",
                              r->n_requests - waiting);
}

static int put_nodes(const struct rt_router *r, struct bt_buf *b)
{
    size_t n[RT_NODE_STATE_COUNT + 1] = {0};
    uint64_t total = 0, free_pages = 0;
    int rc = rt_http_put_help(b, "baton_router_nodes", "gauge", "Nodes by state.");

    count_nodes(r, n);
    for (int i = 0; rc == BT_OK && i <= RT_NODE_STATE_COUNT; i++) {
        rc = bt_buf_printf(b, "baton_router_nodes{state=\"%s\"} %zu\n",
                           i == RT_NODE_STATE_COUNT ? "cordoned"
                                                    : rt_node_state_name((enum rt_node_state)i),
                           n[i]);
    }
    bt_list_for_each (it, &r->nodes) {
        const struct rt_node *node = BT_LIST_ENTRY(it, struct rt_node, link);

        if (node->state == RT_NODE_READY && node->role != RT_ROLE_PREFILL) {
            for (uint32_t i = 0; i < node->n_targets; i++) {
                total += node->pages_total;
                free_pages += BT_MIN(node->targets[i].pages_free, node->pages_total);
            }
        }
    }
    if (rc == BT_OK) {
        rc = rt_http_put_help(
            b, "vllm:kv_cache_usage_perc", "gauge",
            "Part of the decode nodes' KV pages in use, 0 to 1 (the name that gateways "
            "read).");
    }
    return rc < 0 ? rc
                  : bt_buf_printf(b, "vllm:kv_cache_usage_perc %.6g\n",
                                  total ? (double)(total - free_pages) / (double)total : 0.0);
}

/* What was measured of nodes that are in use, and how far it is off. */
static int put_speeds(const struct rt_router *r, struct bt_buf *b)
{
    static const struct {
        const char *name, *help;
    } series[] = {
        {"baton_router_node_prefill_tokens_per_second",
         "Measured speed of computing a prompt of 1,000 tokens."},
        {"baton_router_node_decode_step_seconds",
         "Measured time of a decode step with one sequence more than run now."},
        {"baton_router_node_speed_error",
         "Mean relative error of the times that were expected of a node's last steps."},
        {"baton_router_node_slowdown",
         "Time of a node's last steps over what its fitted model says; 1 = as usual."},
    };
    int rc = BT_OK;

    for (size_t i = 0; rc == BT_OK && i < BT_ARRAY_LEN(series); i++) {
        rc = rt_http_put_help(b, series[i].name, "gauge", series[i].help);
        bt_list_for_each (it, &r->nodes) {
            const struct rt_node *n = BT_LIST_ENTRY(it, struct rt_node, link);
            Baton__V1__NodeInfo m = BATON__V1__NODE_INFO__INIT;

            if (rc < 0 || n->state != RT_NODE_READY) {
                continue;
            }
            rt_cache_fill_node(n, &m);
            const double values[] = {m.prefill_tokens_per_s, m.decode_step_s, m.speed_error,
                                     m.speed_ratio};

            if (m.speed_error > 0 && values[i] > 0) { /* 0: such steps were not seen yet */
                rc = bt_buf_printf(b, "%s{node=\"%s\"} %.6g\n", series[i].name, n->name, values[i]);
            }
        }
    }
    return rc;
}

/* One series a tier. */
static int
put_tiers(struct bt_buf *b, const char *name, const char *help, const uint64_t tokens[RT_TIERS])
{
    static const char *const tiers[RT_TIERS] = {"engine", "host", "disk", "store"};
    int rc = rt_http_put_help(b, name, "counter", help);

    for (int t = 0; rc == BT_OK && t < RT_TIERS; t++) {
        rc = bt_buf_printf(b, "%s{tier=\"%s\"} %llu\n", name, tiers[t],
                           (unsigned long long)tokens[t]);
    }
    return rc;
}

/* Of the same requests: prompt tokens, what was expected of them and what nodes did. */
static int put_hits(const struct rt_router *r, struct bt_buf *b)
{
    int rc = put_value(b, "baton_router_cache_prompt_tokens_total", "counter",
                       "Prompt tokens of answered requests that no node has failed.",
                       r->cache.prompt_tokens);

    if (rc == BT_OK) {
        rc = put_tiers(b, "baton_router_cache_expected_tokens_total",
                       "Of those, expected to be found where the request was sent, by tier.",
                       r->cache.tier_tokens);
    }
    return rc < 0 ? rc
                  : put_tiers(b, "baton_router_cache_hit_tokens_total",
                              "Of those, found by the nodes instead of computed, by tier.",
                              r->cache.tier_cached);
}

static int put_metrics(const struct rt_router *r, struct bt_buf *b)
{
    const struct rt_stats *s = &r->stats;
    int rc;

    if ((rc = put_requests(r, b)) < 0 || (rc = put_nodes(r, b)) < 0 ||
        (rc = rt_http_put_help(b, "baton_router_requests_total", "counter",
                               "Requests that have ended, by outcome.")) < 0) {
        return rc;
    }
    for (int i = 0; rc == BT_OK && i < RT_OUTCOMES; i++) {
        rc = bt_buf_printf(b, "baton_router_requests_total{outcome=\"%s\"} %llu\n",
                           rt_outcome_names[i],
                           (unsigned long long)rt_stats_outcome(s, (enum rt_outcome)i));
    }
    if (rc < 0 ||
        (rc = put_value(b, "baton_router_tokens_total", "counter", "Tokens sent to clients.",
                        s->tokens)) < 0 ||
        (rc = put_value(b, "baton_router_prompt_tokens_total", "counter",
                        "Tokens of the prompts of requests that have ended.", s->prompt_tokens)) <
            0 ||
        (rc = put_value(b, "baton_router_retries_total", "counter",
                        "Attempts beyond the first one.", s->retries)) < 0) {
        return rc;
    }
    if ((rc = put_hits(r, b)) < 0 || (rc = put_speeds(r, b)) < 0) {
        return rc;
    }
    return rt_http_put_series(r, b);
}

/* --- answers --------------------------------------------------------------------------------- */

void rt_http_answer(struct rt_http *h, struct rt_http_ask *ask)
{
    const struct rt_router *r = h->router;
    bool ok = !h->loop_draining;

    switch (ask->question) {
    case RT_HTTP_HEALTH: /* that the loop answers is the news */
        ask->reply.rc = rt_http_put(&ask->body, "{\"status\":\"ok\"}");
        break;
    case RT_HTTP_READY:
        ok = ok && can_serve(r);
        ask->status = ok ? 200 : 503;
        ask->reply.rc = bt_buf_printf(&ask->body, "{\"status\":\"%s\"}",
                                      ok                 ? "ready"
                                      : h->loop_draining ? "draining"
                                                         : "no nodes");
        break;
    case RT_HTTP_MODELS:
        ask->reply.rc = put_models(r, &ask->body);
        break;
    case RT_HTTP_MODEL:
        ask->reply.rc = put_model(r, &ask->body);
        break;
    case RT_HTTP_METRICS:
        ask->type = "text/plain; version=0.0.4; charset=utf-8";
        ask->reply.rc = put_metrics(r, &ask->body);
        break;
    case RT_HTTP_TOKENIZE:
    default:
        ask->reply.rc = BT_E_INTERNAL;
    }
}
