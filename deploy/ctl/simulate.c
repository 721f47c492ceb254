/* batonctl simulate: what a cluster of so many nodes would make of a trace, by the router's own
 * choice in simulated time; and without --nodes, how many nodes it takes. */
#include "deploy/ctl/show.h"

#include "common/thr/time.h"
#include "router/sim/trace.h"

#include <math.h>
#include <stdlib.h>

#define GOOD_PERCENT 99.0
#define MOST_NODES   1024

struct plan {
    const struct ctl_args *a;
    struct rt_sim_trace trace;
    struct rt_replay_cfg cfg;
    double goal_s;
};

static struct rt_replay_result run(struct plan *p, unsigned nodes)
{
    p->cfg.nodes = nodes;
    return rt_replay_run(&p->cfg, p->goal_s);
}

/* The fewest nodes with which nearly all first tokens come in time; 0 = no number does. */
static unsigned search(struct plan *p, struct rt_replay_result *ret)
{
    unsigned low = 0, high = 1;

    *ret = run(p, high);
    while (ret->good_percent < GOOD_PERCENT) {
        low = high;
        high *= 2;
        if (high > MOST_NODES) {
            return 0;
        }
        *ret = run(p, high);
    }
    while (high - low > 1) {
        unsigned mid = low + (high - low) / 2;
        struct rt_replay_result r = run(p, mid);

        if (r.good_percent >= GOOD_PERCENT) {
            high = mid;
            *ret = r;
        } else {
            low = mid;
        }
    }
    return high;
}

static int show(const struct plan *p, unsigned nodes, const struct rt_replay_result *r)
{
    struct bt_buf b = {0};
    struct bt_jsonw w = {.b = &b};
    double span = (double)p->trace.r[p->trace.n - 1].at_ns / 1e9;

    if (p->a->output == CTL_TABLE) {
        printf("trace          %zu requests in %.0f s, %.2f/s\n", p->trace.n, span,
               span > 0 ? (double)p->trace.n / span : 0);
        printf("prefill nodes  %u of %lld tokens/s, cache of %u blocks each\n", nodes,
               (long long)p->a->speed, p->cfg.blocks);
        printf("first token    mean %.3f s, p50 %.3f s, p99 %.3f s\n", r->ttft_mean_s,
               r->ttft_p50_s, r->ttft_p99_s);
        printf("in time        %.2f %% within %.3f s\n", r->good_percent, p->goal_s);
        printf("cache          %.2f %% of blocks found\n", r->hit_percent);
        printf("nodes busy     %.1f %%, the busiest computes %.2f times the mean\n", r->busy * 100,
               r->imbalance);
        return CTL_OK;
    }
    bt_jw_open(&w, NULL, '{');
    bt_jw_u64(&w, "requests", p->trace.n);
    bt_jw_f64(&w, "seconds", span, 3);
    bt_jw_u64(&w, "nodes", nodes);
    bt_jw_f64(&w, "goal_s", p->goal_s, 6);
    bt_jw_f64(&w, "good_percent", r->good_percent, 3);
    bt_jw_f64(&w, "first_token_mean_s", r->ttft_mean_s, 6);
    bt_jw_f64(&w, "first_token_p50_s", r->ttft_p50_s, 6);
    bt_jw_f64(&w, "first_token_p99_s", r->ttft_p99_s, 6);
    bt_jw_f64(&w, "hit_percent", r->hit_percent, 3);
    bt_jw_f64(&w, "imbalance", r->imbalance, 4);
    bt_jw_f64(&w, "busy", r->busy, 4);
    bt_jw_close(&w, '}');
    return ctl_print_buf(&w);
}

static int simulate(struct plan *p)
{
    struct rt_replay_result r;
    unsigned nodes = (unsigned)p->a->nodes;
    int code;

    if (nodes > 0) {
        r = run(p, nodes);
    } else {
        nodes = search(p, &r);
        if (nodes == 0) {
            fprintf(stderr,
                    "batonctl: not even %d nodes give %.0f %% of the first tokens within %.3f s: "
                    "some prompts take longer alone\n",
                    MOST_NODES, GOOD_PERCENT, p->goal_s);
            return CTL_FAILED;
        }
    }
    code = show(p, nodes, &r);
    return code == CTL_OK && r.good_percent < GOOD_PERCENT ? CTL_FAILED : code;
}

int ctl_simulate(const struct ctl_args *a)
{
    struct plan p = {.a = a,
                     .goal_s = (double)a->goal_ns / 1e9,
                     .cfg = {.blocks = (unsigned)a->blocks,
                             .block_tokens = 512,
                             .routers = 1,
                             .ranks = 1,
                             .seed = 1,
                             .delay_ns = BT_NS_PER_MS,
                             .heartbeat_ns = 500 * BT_NS_PER_MS,
                             .step_s = 5e-3,
                             .token_s = 1.0 / (double)a->speed,
                             .pair_s = 1e-9,
                             .step_tokens = 2048,
                             .noise = 0.02,
                             .slow_node = 1,
                             .reuse_s = 1200}};
    struct rt_sim_trace_cfg tc = {.path = a->trace,
                                  .most = (size_t)a->limit,
                                  .divide = 1,
                                  .block_tokens = p.cfg.block_tokens,
                                  .exact = true,
                                  .speedup = 1,
                                  .max_tokens = INFINITY};
    struct bt_err err = {0};
    int code, rc = rt_sim_trace_load(&tc, &p.trace, &err);

    if (rc < 0) {
        fprintf(stderr, "batonctl: %s\n", bt_err_msg(&err, rc));
        return CTL_FAILED;
    }
    p.cfg.requests = p.trace.r;
    p.cfg.n_requests = p.trace.n;
    code = simulate(&p);
    rt_sim_trace_free(&p.trace);
    return code;
}
