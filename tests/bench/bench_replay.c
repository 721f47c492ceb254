/* Replays a trace against a simulated cluster with the router's own code: which policy finds how
 * much of the cache, how evenly, and what it means for the time to the first token. Also the way to
 * ask what a cluster of another size or speed would do.
 *
 *   bench_replay --trace FILE --nodes N --blocks B [--policy P] [--json] [--delay-ms N] [--loss
 * PCT]
 *                [--seeds N] [--routers N] [--requests N] [--first N] [--divide N] [--exact]
 *                [--ranks N] [--block-tokens N] [--tokens-per-s N] [--slow-node X] [--limit S]
 * [--reuse S]
 *
 * Nodes may have ranks: engines of their own, with B blocks each, told apart by the router alone.
 * P: cost (ours), random, round_robin, least_loaded, longest_prefix, all. A block of the trace is
 * 512 tokens. --divide shrinks lengths and blocks; --exact counts only what a node can reuse: whole
 * blocks, and never all of a prompt (without it every block of the trace may hit, as in replays
 * that others publish). Times are compressed by --speedup. */
#include "router/sim/trace.h"

#include "common/base/buf.h"
#include "common/thr/time.h"

#include <getopt.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

struct opts {
    const char *trace, *policy;
    bool json, exact;
    unsigned seeds, divide, trace_block;
    size_t requests, first;
    double limit_s, speedup, max_tokens;
    struct rt_replay_cfg cfg;
};

static void print(const struct opts *o, const char *policy, const char *metric, double v, double sd)
{
    const struct rt_replay_cfg *c = &o->cfg;

    if (o->json) {
        printf("{\"bench\":\"replay\",\"case\":\"%s %ux%u\",\"metric\":\"%s\",\"value\":%.4f,"
               "\"unit\":\"%s\",\"sd\":%.4f}\n",
               policy, c->nodes, c->blocks, metric, v,
               strstr(metric, "_percent")   ? "percent"
               : strncmp(metric, "ttft", 4) ? "1"
                                            : "s",
               sd);
    } else {
        printf("  %-22s %10.3f  +- %.3f\n", metric, v, sd);
    }
}

/* Mean and deviation over the seeds of each figure. */
static void run_policy(const struct opts *o, const struct rt_sim_trace *t, enum rt_route route)
{
    static const char *const names[] = {
        "hit_rate_percent", "expected_percent", "imbalance", "ttft_mean_s", "ttft_p50_s",
        "ttft_p99_s",       "goodput_percent",  "busy",      "speed_error", "gaps",
        "drifts",           "snapshots"};
    double sum[BT_ARRAY_LEN(names)] = {0}, square[BT_ARRAY_LEN(names)] = {0};
    struct rt_replay_cfg c = o->cfg;

    c.requests = t->r;
    c.n_requests = t->n;
    c.route = route;
    for (unsigned s = 0; s < o->seeds; s++) {
        struct rt_replay_result r;

        c.seed = s + 1;
        r = rt_replay_run(&c, o->limit_s);
        {
            const double v[] = {
                r.hit_percent, r.expected_percent, r.imbalance,      r.ttft_mean_s,
                r.ttft_p50_s,  r.ttft_p99_s,       r.good_percent,   r.busy,
                r.speed_error, (double)r.gaps,     (double)r.drifts, (double)r.snapshots};

            _Static_assert(BT_ARRAY_LEN(v) == BT_ARRAY_LEN(names), "one name each");

            for (size_t i = 0; i < BT_ARRAY_LEN(v); i++) {
                sum[i] += v[i];
                square[i] += v[i] * v[i];
            }
        }
        if (!o->json && s == 0) {
            printf("%s: %u nodes x %u blocks, %zu requests, %u seeds; first seed: %llu changes, "
                   "%llu gaps, %llu drifts, %llu snapshots\n",
                   rt_route_names[route], c.nodes, c.blocks, t->n, o->seeds,
                   (unsigned long long)r.changes, (unsigned long long)r.gaps,
                   (unsigned long long)r.drifts, (unsigned long long)r.snapshots);
        }
    }
    for (size_t i = 0; i < BT_ARRAY_LEN(names); i++) {
        double mean = sum[i] / o->seeds;

        print(o, rt_route_names[route], names[i], mean,
              sqrt(fmax(square[i] / o->seeds - mean * mean, 0)));
    }
    fflush(stdout);
}

static void usage(void)
{
    fprintf(stderr, "bench_replay --trace FILE --nodes N --blocks B [--policy cost|random|"
                    "round_robin|least_loaded|longest_prefix|all] [--json] ...\n");
}

enum option_id {
    O_TRACE = 1,
    O_NODES,
    O_RANKS,
    O_BLOCKS,
    O_POLICY,
    O_JSON,
    O_DELAY,
    O_LOSS,
    O_SEEDS,
    O_ROUTERS,
    O_REQUESTS,
    O_FIRST,
    O_DIVIDE,
    O_EXACT,
    O_BLOCK_TOKENS,
    O_RATE,
    O_SLOW,
    O_LIMIT,
    O_REUSE,
    O_SPEEDUP,
    O_MAX_TOKENS,
};

static bool take_option(struct opts *o, int c)
{
    double v = optarg ? strtod(optarg, NULL) : 0;
    unsigned u = v >= 0 && v < 4e9 ? (unsigned)v : 0;

    switch (c) {
    case O_TRACE:
        o->trace = optarg;
        break;
    case O_NODES:
        o->cfg.nodes = u;
        break;
    case O_RANKS:
        o->cfg.ranks = u;
        break;
    case O_BLOCKS:
        o->cfg.blocks = u;
        break;
    case O_POLICY:
        o->policy = optarg;
        break;
    case O_JSON:
        o->json = true;
        break;
    case O_DELAY:
        o->cfg.delay_ns = (uint64_t)(v * 1e6);
        break;
    case O_LOSS:
        o->cfg.loss = u;
        break;
    case O_SEEDS:
        o->seeds = u;
        break;
    case O_ROUTERS:
        o->cfg.routers = u;
        break;
    case O_REQUESTS:
        o->requests = u;
        break;
    case O_FIRST:
        o->first = u;
        break;
    case O_DIVIDE:
        o->divide = u;
        break;
    case O_EXACT:
        o->exact = true;
        break;
    case O_BLOCK_TOKENS:
        o->trace_block = u;
        break;
    case O_RATE:
        o->cfg.token_s = 1 / v;
        break;
    case O_SLOW:
        o->cfg.slow_node = v;
        break;
    case O_LIMIT:
        o->limit_s = v;
        break;
    case O_REUSE:
        o->cfg.reuse_s = v;
        break;
    case O_SPEEDUP:
        o->speedup = v;
        break;
    case O_MAX_TOKENS:
        o->max_tokens = v;
        break;
    default:
        return false;
    }
    return true;
}

static bool is_sane(const struct opts *o)
{
    const struct rt_replay_cfg *c = &o->cfg;

    return o->trace && c->nodes >= 1 && c->nodes <= 1024 && c->ranks >= 1 && c->ranks <= 64 &&
           c->nodes * c->ranks <= 4000 && c->blocks >= 16 && o->seeds >= 1 && o->divide >= 1 &&
           c->routers >= 1 && c->routers <= 16 && o->trace_block >= o->divide && c->token_s > 0 &&
           isfinite(c->token_s) && o->speedup > 0 && c->slow_node > 0;
}

int main(int argc, char **argv)
{
    static const struct option options[] = {{"trace", 1, NULL, O_TRACE},
                                            {"nodes", 1, NULL, O_NODES},
                                            {"ranks", 1, NULL, O_RANKS},
                                            {"blocks", 1, NULL, O_BLOCKS},
                                            {"policy", 1, NULL, O_POLICY},
                                            {"json", 0, NULL, O_JSON},
                                            {"delay-ms", 1, NULL, O_DELAY},
                                            {"loss", 1, NULL, O_LOSS},
                                            {"seeds", 1, NULL, O_SEEDS},
                                            {"routers", 1, NULL, O_ROUTERS},
                                            {"requests", 1, NULL, O_REQUESTS},
                                            {"first", 1, NULL, O_FIRST},
                                            {"divide", 1, NULL, O_DIVIDE},
                                            {"exact", 0, NULL, O_EXACT},
                                            {"block-tokens", 1, NULL, O_BLOCK_TOKENS},
                                            {"tokens-per-s", 1, NULL, O_RATE},
                                            {"slow-node", 1, NULL, O_SLOW},
                                            {"limit", 1, NULL, O_LIMIT},
                                            {"reuse", 1, NULL, O_REUSE},
                                            {"speedup", 1, NULL, O_SPEEDUP},
                                            {"max-tokens", 1, NULL, O_MAX_TOKENS},
                                            {0}};
    struct opts o = {.policy = "cost",
                     .seeds = 10,
                     .divide = 1,
                     .trace_block = 512,
                     .requests = SIZE_MAX,
                     .limit_s = 5,
                     .speedup = 1,
                     .max_tokens = INFINITY,
                     .cfg = {.routers = 1,
                             .ranks = 1,
                             .delay_ns = BT_NS_PER_MS,
                             .heartbeat_ns = 500 * BT_NS_PER_MS,
                             .step_s = 5e-3,
                             .token_s = 1.0 / 8192,
                             .pair_s = 1e-9,
                             .step_tokens = 2048,
                             .noise = 0.02,
                             .slow_node = 1,
                             .reuse_s = 1200}};
    struct rt_sim_trace t = {0};
    struct rt_sim_trace_cfg tc;
    struct bt_err err = {0};
    bool found = false;
    int c;

    while ((c = getopt_long(argc, argv, "", options, NULL)) != -1) {
        if (!take_option(&o, c)) {
            usage();
            return 2;
        }
    }
    if (!is_sane(&o)) {
        usage();
        return 2;
    }
    o.cfg.nodes *= o.cfg.ranks;
    o.cfg.block_tokens = o.trace_block / o.divide;
    tc = (struct rt_sim_trace_cfg){.path = o.trace,
                                   .first = o.first,
                                   .most = o.requests,
                                   .divide = o.divide,
                                   .block_tokens = o.cfg.block_tokens,
                                   .exact = o.exact,
                                   .speedup = o.speedup,
                                   .max_tokens = o.max_tokens};
    if (rt_sim_trace_load(&tc, &t, &err) < 0) {
        fprintf(stderr, "%s\n", err.msg);
        return 1;
    }
    for (unsigned p = 0; rt_route_names[p]; p++) {
        if (strcmp(o.policy, "all") == 0 || strcmp(o.policy, rt_route_names[p]) == 0) {
            run_policy(&o, &t, (enum rt_route)p);
            found = true;
        }
    }
    rt_sim_trace_free(&t);
    if (!found) {
        usage();
    }
    return found ? 0 : 2;
}
