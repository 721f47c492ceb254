/* What is remembered of a request to explain it: nodes that were weighed, failures, stages. One
 * struct per request from its beginning; after its end the last `explain.keep` ones stay in a ring.
 * Bounded by limits.active and that. Loop thread. */
#ifndef RT_TRACE_H
#define RT_TRACE_H

#include "router/policy.h"
#include "router/stages.h"
#include "router/states.h"

#define RT_TRACE_ID        20
#define RT_TRACE_ANSWER_ID 40
#define RT_TRACE_NAME      64
#define RT_TRACE_FAILED    4

struct rt_trace_candidate {
    char node[RT_TRACE_NAME];
    enum rt_seen_kind kind;
    bool chosen, excluded;
    double cost_s;
    struct rt_estimate est;
};

struct rt_trace {
    char id[RT_TRACE_ID];
    char *client_id; /* owned; NULL = none */
    char answer_id[RT_TRACE_ANSWER_ID];
    char tenant[RT_TRACE_NAME];
    const char *via; /* static */
    struct rt_stamps t;
    uint64_t end_ns;
    struct rt_leg_times prompt, decode;
    uint32_t first_retries; /* retries before the first token */
    bool decode_is_second;  /* the decode leg of the first token's attempt made the second one */
    uint64_t stage_ns[RT_STAGE_COUNT];
    /* Of the last attempt. */
    char prefill[RT_TRACE_NAME], decoder[RT_TRACE_NAME], store[RT_TRACE_NAME];
    enum rt_path path, asked_path;
    uint32_t retries, n_prompt, n_answer, n_cached;
    uint32_t expected[RT_TIERS]; /* tokens */
    struct rt_trace_candidate cand[RT_SEEN_KINDS * RT_SEEN_MAX];
    unsigned n_cand, n_cand_all;
    char failed[RT_TRACE_FAILED][160];
    unsigned n_failed;
    /* Once it has ended. */
    enum rt_request_state state;
    int rc;
    const char *finish; /* static */
    bool good;
};

struct rt_traces; /* the ring */

int rt_traces_create(size_t keep, struct rt_traces **ret, struct bt_err *err) BT_MUST_USE;
void rt_traces_destroy(struct rt_traces *ts);
/* Takes it; the oldest one goes. */
void rt_traces_add(struct rt_traces *ts, struct rt_trace *take_trace);
/* Newest first: i = 0..n-1. */
size_t rt_traces_n(const struct rt_traces *ts);
const struct rt_trace *rt_traces_at(const struct rt_traces *ts, size_t i);

struct rt_trace *rt_trace_create(void); /* NULL without memory */
void rt_trace_destroy(struct rt_trace *t);
/* Mean seconds of each token after the first; 0 = there were none. */
double rt_trace_token_s(const struct rt_trace *t);

#endif
