/* The series of /metrics that speak of requests' time, caches, transports, tenants and nodes. Each
 * is bounded by what the cluster consists of; tenants, which clients name, by RT_TENANTS_MAX. The
 * stages of the first token have a sum that is that of the time to the first token, in every
 * scrape. Loop thread. */
#include "router/http/http_int.h"

#include <stdio.h>

int rt_http_put_help(struct bt_buf *b, const char *name, const char *type, const char *help)
{
    return bt_buf_printf(b, "# HELP %s %s\n# TYPE %s %s\n", name, help, name, type);
}

/* `label`: `key="value"` or "". */
static int
put_buckets(struct bt_buf *b, const char *name, const char *label, const struct rt_histogram *hist)
{
    const char *comma = label[0] ? "," : "", *open = label[0] ? "{" : "",
               *shut = label[0] ? "}" : "";
    uint64_t n = 0;
    int rc = BT_OK;

    for (size_t i = 0; rc == BT_OK && i < RT_HISTOGRAM_BUCKETS; i++) {
        n += hist->n[i];
        rc = bt_buf_printf(b, "%s_bucket{%s%sle=\"%g\"} %llu\n", name, label, comma,
                           rt_histogram_bounds[i], (unsigned long long)n);
    }
    n += hist->n[RT_HISTOGRAM_BUCKETS];
    return rc < 0 ? rc
                  : bt_buf_printf(b,
                                  "%s_bucket{%s%sle=\"+Inf\"} %llu\n%s_sum%s%s%s %.12g\n"
                                  "%s_count%s%s%s %llu\n",
                                  name, label, comma, (unsigned long long)n, name, open, label,
                                  shut, hist->sum, name, open, label, shut, (unsigned long long)n);
}

static int
put_histogram(struct bt_buf *b, const char *name, const char *help, const struct rt_histogram *hist)
{
    int rc = rt_http_put_help(b, name, "histogram", help);

    return rc < 0 ? rc : put_buckets(b, name, "", hist);
}

/* One series of a family: value as %.12g, exact for counts below 10^12. */
static int put_one(struct bt_buf *b, const char *name, const char *label, double value)
{
    return bt_buf_printf(b, "%s{%s} %.15g\n", name, label, value);
}

static int put_times(const struct rt_stats *s, struct bt_buf *b)
{
    const struct {
        const char *name, *help;
        const struct rt_histogram *h;
    } rows[] = {
        {"baton_router_time_to_first_token_seconds",
         "From the request's arrival to its first token.", &s->first_token},
        {"baton_router_inter_token_seconds", "Between one token and the next.", &s->token},
        {"baton_router_time_per_output_token_seconds",
         "Mean of an answer's tokens after the first one.", &s->answer_token},
        {"baton_router_request_seconds", "From arrival to the end, of requests that went well.",
         &s->total},
        /* The names that gateways and their dashboards read. */
        {"vllm:time_to_first_token_seconds", "As baton_router_time_to_first_token_seconds.",
         &s->first_token},
        {"vllm:inter_token_latency_seconds", "As baton_router_inter_token_seconds.", &s->token},
        {"vllm:time_per_output_token_seconds", "As baton_router_inter_token_seconds.", &s->token},
        {"vllm:e2e_request_latency_seconds", "As baton_router_request_seconds.", &s->total},
    };
    int rc = BT_OK;

    for (size_t i = 0; rc == BT_OK && i < BT_ARRAY_LEN(rows); i++) {
        rc = put_histogram(b, rows[i].name, rows[i].help, rows[i].h);
    }
    return rc;
}

static int put_stages(const struct rt_stats *s, struct bt_buf *b)
{
    char label[64];
    int rc = rt_http_put_help(b, "baton_router_stage_seconds", "histogram",
                              "Time of requests by stage; tokenize to relay add up to the first "
                              "token, reserve to second_relay to the gap before the second.");

    for (int i = 0; rc == BT_OK && i < RT_STAGE_COUNT; i++) {
        snprintf(label, sizeof(label), "stage=\"%s\"", rt_stage_names[i]);
        rc = put_buckets(b, "baton_router_stage_seconds", label, &s->stages[i]);
    }
    if (rc == BT_OK) {
        rc = rt_http_put_help(b, "baton_router_path_first_token_seconds", "histogram",
                              "Time to the first token by path.");
    }
    for (int i = RT_PATH_DIRECT; rc == BT_OK && i <= RT_PATH_STORE; i++) {
        snprintf(label, sizeof(label), "path=\"%s\"", rt_path_name((enum rt_path)i));
        rc = put_buckets(b, "baton_router_path_first_token_seconds", label, &s->path_first[i]);
    }
    return rc;
}

/* A family of counters, one for each of n names. */
struct family {
    const char *name, *help, *key;
    const char *const *names;
    int n;
    const uint64_t *counts; /* one of the two */
    const double *sums;
};

static int put_family(struct bt_buf *b, const struct family *f)
{
    char label[96];
    int rc = rt_http_put_help(b, f->name, "counter", f->help);

    for (int i = 0; rc == BT_OK && i < f->n; i++) {
        snprintf(label, sizeof(label), "%s=\"%s\"", f->key, f->names[i]);
        rc = put_one(b, f->name, label, f->counts ? (double)f->counts[i] : f->sums[i]);
    }
    return rc;
}

static int put_tiers(const struct rt_stats *s, struct bt_buf *b)
{
    static const char *const tiers[] = {"engine", "host", "disk", "store"};
    const char *transports[RT_TRANSPORTS];
    const struct family rows[] = {
        {"baton_router_tier_hits_total", "Prompts of which a part was found there.", "tier", tiers,
         RT_STAGE_TIERS, s->tier_hits, NULL},
        {"baton_router_tier_load_seconds_total",
         "Time of prompts that waited for blocks from there.", "tier", tiers, RT_STAGE_TIERS, NULL,
         s->tier_load_s},
        {"baton_router_handoffs_total", "Prompts handed over, by transport.", "transport",
         transports, RT_TRANSPORTS, s->transport_handoffs, NULL},
        {"baton_router_handoff_bytes_total", "Bytes of KV handed over, by transport.", "transport",
         transports, RT_TRANSPORTS, s->transport_bytes, NULL},
        {"baton_router_handoff_seconds_total",
         "From a decode node's ticket until all KV was there, by transport; most of it while the "
         "prompt was still being computed.",
         "transport", transports, RT_TRANSPORTS, NULL, s->transport_s},
    };
    int rc = BT_OK;

    for (int i = 0; i < RT_TRANSPORTS; i++) {
        transports[i] = rt_transport_name(i);
    }
    for (size_t i = 0; rc == BT_OK && i < BT_ARRAY_LEN(rows); i++) {
        rc = put_family(b, &rows[i]);
    }
    return rc;
}

/* --- tenants --------------------------------------------------------------------------------- */

/* A client's word as a label: what is not plain ASCII, quotes and backslashes become '_'. */
static const char *plain(const char *s, char buf[64])
{
    size_t i = 0;

    for (; s[i] && i < 63; i++) {
        bool ok = s[i] > ' ' && s[i] < 0x7f && s[i] != '"' && s[i] != '\\';

        buf[i] = (char)(ok ? s[i] : '_');
    }
    buf[i] = '\0';
    return buf;
}

enum tenant_field { T_REQUESTS, T_GOOD, T_PROMPT, T_CACHED, T_TOKENS, T_COUNT };

static uint64_t tenant_value(const struct rt_tenant_stats *t, enum tenant_field f)
{
    const uint64_t v[T_COUNT] = {t->requests, t->good, t->prompt_tokens, t->cached_tokens,
                                 t->tokens};

    return v[f];
}

/* Two names that differ only in what labels cannot hold get one series: sums, no doubles. */
static int put_tenant_family(const struct rt_stats *s, struct bt_buf *b, const char *name, int f)
{
    int rc = BT_OK;

    for (unsigned i = 0; rc == BT_OK && i < s->n_tenants; i++) {
        char label[96], mine[64], other[64];
        uint64_t sum = 0;
        bool first = true;

        plain(s->tenants[i].name, mine);
        for (unsigned j = 0; j < s->n_tenants; j++) {
            if (strcmp(plain(s->tenants[j].name, other), mine) == 0) {
                first = first && j >= i;
                sum += tenant_value(&s->tenants[j], (enum tenant_field)f);
            }
        }
        if (first) {
            snprintf(label, sizeof(label), "tenant=\"%s\",overflow=\"false\"", mine);
            rc = put_one(b, name, label, (double)sum);
        }
    }
    return rc < 0 ? rc
                  : put_one(b, name, "tenant=\"other\",overflow=\"true\"",
                            (double)tenant_value(&s->other_tenants, (enum tenant_field)f));
}

static int put_tenants(const struct rt_stats *s, struct bt_buf *b)
{
    static const struct {
        const char *name, *help;
    } rows[T_COUNT] = {
        {"baton_router_tenant_requests_total", "Requests that have ended."},
        {"baton_router_tenant_good_total", "Answers within the goodput limits."},
        {"baton_router_tenant_prompt_tokens_total", "Tokens of prompts."},
        {"baton_router_tenant_cached_tokens_total", "Of them found instead of computed."},
        {"baton_router_tenant_tokens_total", "Tokens of answers."},
    };
    int rc = BT_OK;

    for (int f = 0; rc == BT_OK && f < T_COUNT; f++) {
        rc = rt_http_put_help(b, rows[f].name, "counter", rows[f].help);
        if (rc == BT_OK) {
            rc = put_tenant_family(s, b, rows[f].name, f);
        }
    }
    return rc;
}

/* --- nodes ----------------------------------------------------------------------------------- */

/* Sums over the node's ranks; of the usage the mean. */
static double node_value(const struct rt_node *n, int f)
{
    double sum = 0, total = (double)n->pages_total * n->n_targets;

    for (uint32_t i = 0; i < n->n_targets; i++) {
        const struct rt_target *t = &n->targets[i];

        sum += f == 0   ? t->requests_waiting
               : f == 1 ? t->requests_running
               : f == 2 ? n->pages_total - BT_MIN(t->pages_free, n->pages_total)
                        : rt_work_seconds(&t->work, bt_loop_now(n->router->loop));
    }
    return f == 2 ? (total > 0 ? sum / total : 0) : sum;
}

/* Ranks, of daemons too, that say to have more blocks than the index lets in. */
static int put_index(const struct rt_router *r, struct bt_buf *b)
{
    static const char name[] = "baton_router_index_full";
    unsigned n_full = 0;
    int rc = rt_http_put_help(
        b, name, "gauge",
        "Ranks of nodes that say to have more blocks than index.max_blocks_per_node.");

    bt_list_for_each (it, &r->nodes) {
        const struct rt_node *n = BT_LIST_ENTRY(it, struct rt_node, link);

        for (uint32_t i = 0; i < n->n_targets; i++) {
            n_full += n->targets[i].feed.full;
        }
    }
    return rc < 0 ? rc : bt_buf_printf(b, "%s %u\n", name, n_full);
}

static int put_queue(const struct rt_router *r, struct bt_buf *b)
{
    static const char name[] = "baton_router_oldest_wait_seconds";
    int rc = rt_http_put_help(b, name, "gauge",
                              "How long the first of the requests that wait here has waited.");
    double oldest = rt_fair_oldest_s(r->admit.fair, bt_loop_now(r->loop));

    return rc < 0 ? rc : bt_buf_printf(b, "%s %.6f\n", name, oldest);
}

static int put_nodes(const struct rt_router *r, struct bt_buf *b)
{
    static const struct {
        const char *name, *help;
    } rows[] = {
        {"baton_router_node_requests_waiting", "Requests that wait in the node."},
        {"baton_router_node_requests_running", "Requests in the node's steps."},
        {"baton_router_node_kv_usage_ratio", "Part of the node's KV pages in use, 0 to 1."},
        {"baton_router_node_queue_seconds", "Prompts sent there and not done, by estimate."},
    };
    char label[160];
    int rc = BT_OK;

    for (int f = 0; rc == BT_OK && f < (int)BT_ARRAY_LEN(rows); f++) {
        rc = rt_http_put_help(b, rows[f].name, "gauge", rows[f].help);
        bt_list_for_each (it, &r->nodes) {
            const struct rt_node *n = BT_LIST_ENTRY(it, struct rt_node, link);

            if (rc == BT_OK && n->state == RT_NODE_READY && n->name[0] &&
                n->role != RT_ROLE_STORE) {
                snprintf(label, sizeof(label), "node=\"%s\",role=\"%s\"", n->name,
                         rt_role_name(n->role));
                rc = put_one(b, rows[f].name, label, node_value(n, f));
            }
        }
    }
    return rc;
}

static double op_value(const struct rt_op *op, int f)
{
    return f == 0   ? (double)op->us / 1e6
           : f == 1 ? (double)op->limit_us / 1e6
           : f == 2 ? (double)op->bytes
           : f == 3 ? (double)op->operations
                    : (double)op->calls;
}

/* What the ops of each node have cost. */
static int put_ops(const struct rt_router *r, struct bt_buf *b)
{
    static const struct {
        const char *name, *help;
    } rows[] = {
        {"baton_router_node_op_seconds_total", "Time of the engine's ops, by kind."},
        {"baton_router_node_op_limit_seconds_total",
         "What their bytes or operations, whichever take longer, would take at the rates that the "
         "node measured as it started."},
        {"baton_router_node_op_bytes_total",
         "Bytes that they must move at least: weights, KV and activations once."},
        {"baton_router_node_op_operations_total",
         "Operations of their products, two a multiply-add."},
        {"baton_router_node_op_calls_total", "Calls."},
    };
    char label[192];
    int rc = BT_OK;

    for (int f = 0; rc == BT_OK && f < (int)BT_ARRAY_LEN(rows); f++) {
        rc = rt_http_put_help(b, rows[f].name, "counter", rows[f].help);
        bt_list_for_each (it, &r->nodes) {
            const struct rt_node *n = BT_LIST_ENTRY(it, struct rt_node, link);

            for (uint32_t t = 0; n->state == RT_NODE_READY && n->name[0] && t < n->n_targets; t++) {
                const struct rt_target *target = &n->targets[t];

                for (unsigned i = 0; rc == BT_OK && i < target->n_ops; i++) {
                    snprintf(label, sizeof(label), "node=\"%s\",rank=\"%u\",op=\"%s\"", n->name, t,
                             target->ops[i].name);
                    rc = put_one(b, rows[f].name, label, op_value(&target->ops[i], f));
                }
            }
        }
    }
    return rc;
}

/* What pickers need to turn usage into blocks, and what this is. */
static int put_info(const struct rt_router *r, struct bt_buf *b)
{
    const struct rt_stats *s = &r->stats;
    uint64_t blocks = 0, block_tokens = r->cache.n_idents ? r->cache.idents[0].block_tokens : 0;
    int rc;

    bt_list_for_each (it, &r->nodes) {
        const struct rt_node *n = BT_LIST_ENTRY(it, struct rt_node, link);

        if (n->state == RT_NODE_READY && n->role != RT_ROLE_PREFILL && block_tokens > 0) {
            blocks += (uint64_t)n->pages_total * n->n_targets * n->page_tokens / block_tokens;
        }
    }
    if ((rc = rt_http_put_help(b, "vllm:cache_config_info", "gauge",
                               "Blocks of the decode nodes (the name that gateways read).")) < 0 ||
        (rc = bt_buf_printf(
             b, "vllm:cache_config_info{block_size=\"%llu\",num_gpu_blocks=\"%llu\"} 1\n",
             (unsigned long long)block_tokens, (unsigned long long)blocks)) < 0 ||
        (rc = rt_http_put_help(b, "vllm:prompt_tokens_total", "counter", "Tokens of prompts.")) <
            0 ||
        (rc = bt_buf_printf(b, "vllm:prompt_tokens_total %llu\n",
                            (unsigned long long)s->prompt_tokens)) < 0 ||
        (rc = rt_http_put_help(b, "vllm:generation_tokens_total", "counter",
                               "Tokens sent to clients.")) < 0 ||
        (rc = bt_buf_printf(b, "vllm:generation_tokens_total %llu\n",
                            (unsigned long long)s->tokens)) < 0 ||
        (rc = rt_http_put_help(b, "baton_router_cached_tokens_total", "counter",
                               "Prompt tokens found instead of computed.")) < 0 ||
        (rc = bt_buf_printf(b, "baton_router_cached_tokens_total %llu\n",
                            (unsigned long long)s->cached_tokens)) < 0 ||
        (rc = rt_http_put_help(b, "baton_router_requests_good_total", "counter",
                               "Answers within goodput.first_token and goodput.token.")) < 0) {
        return rc;
    }
    return bt_buf_printf(b, "baton_router_requests_good_total %llu\n", (unsigned long long)s->good);
}

int rt_http_put_series(const struct rt_router *r, struct bt_buf *b)
{
    const struct rt_stats *s = &r->stats;
    int rc;

    if ((rc = put_times(s, b)) < 0 || (rc = put_stages(s, b)) < 0 || (rc = put_tiers(s, b)) < 0 ||
        (rc = put_tenants(s, b)) < 0 || (rc = put_nodes(r, b)) < 0 || (rc = put_index(r, b)) < 0 ||
        (rc = put_queue(r, b)) < 0 || (rc = put_ops(r, b)) < 0) {
        return rc;
    }
    return put_info(r, b);
}
