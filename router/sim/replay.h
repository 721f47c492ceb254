/* A cluster of prefill nodes, simulated: requests of a trace, the router's own decoder, index,
 * speed models and choice of nodes, nodes with the engine's own prefix index and a latency model,
 * messages with delay and loss between them. Time is simulated; one run is one thread and repeats
 * exactly. */
#ifndef RT_SIM_REPLAY_H
#define RT_SIM_REPLAY_H

#include "router/policy.h"

struct rt_replay_request {
    uint64_t at_ns;
    uint32_t n_tokens, n_blocks;
    const uint32_t *ids; /* [n_blocks] of the trace; equal ids are equal prefixes */
};

struct rt_replay_cfg {
    const struct rt_replay_request *requests;
    size_t n_requests;
    unsigned nodes, blocks; /* routing targets; blocks of each one's cache */
    unsigned ranks;         /* targets that are ranks of one node and share its messages' way */
    unsigned block_tokens;
    unsigned routers; /* requests go to one of them at random */
    enum rt_route route;
    uint64_t seed;
    uint64_t delay_ns; /* of everything from a node to a router */
    unsigned loss;     /* percent of the messages with cache events */
    uint64_t heartbeat_ns;
    /* Latency of a node: a step, a token, a pair of tokens that attend to each other. */
    double step_s, token_s, pair_s;
    unsigned step_tokens;
    double noise;     /* of each prompt's time, plus or minus at most */
    double slow_node; /* node 0 takes so many times as long in the middle third; 1 = no */
    double reuse_s;   /* see rt_pick_args */
};

struct rt_replay_result {
    double hit_percent;      /* blocks found of all blocks, as the nodes had them */
    double expected_percent; /* as the router expected when it chose */
    double imbalance;        /* busiest node's computed blocks over the mean */
    double ttft_mean_s, ttft_p50_s, ttft_p99_s;
    double good_percent; /* of requests within the limit */
    double busy;         /* mean share of the time that nodes computed */
    double speed_error;  /* of the fitted models at the end */
    uint64_t gaps, drifts, snapshots, changes;
};

/* `limit_s`: time to the first token that counts as good. */
struct rt_replay_result rt_replay_run(const struct rt_replay_cfg *cfg, double limit_s);

#endif
