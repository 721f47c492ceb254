/* Traces of requests for the simulation: a JSON object a line, with the time of arrival, the length
 * of the prompt, and ids of its blocks; equal ids are equal prefixes (the form of the public
 * Mooncake traces: timestamp in ms, input_length, hash_ids). */
#ifndef RT_SIM_TRACE_H
#define RT_SIM_TRACE_H

#include "common/base/rc.h"
#include "router/sim/replay.h"

struct rt_sim_trace_cfg {
    const char *path;
    size_t first, most;    /* lines left out, requests taken at most */
    unsigned divide;       /* lengths are divided by it; block_tokens is so already */
    unsigned block_tokens; /* of a block of the trace */
    bool exact;            /* whole blocks of the length alone; else every block, and a token */
    double speedup;        /* times are divided by it */
    double max_tokens;     /* longer ones are left out */
};

struct rt_sim_trace {
    struct rt_replay_request *r; /* by time, from 0 on */
    size_t n, cap;
};

/* BT_E_IO, BT_E_FORMAT (the line is named; no request at all), BT_E_NOMEM. */
int rt_sim_trace_load(const struct rt_sim_trace_cfg *cfg,
                      struct rt_sim_trace *ret,
                      struct bt_err *err) BT_MUST_USE;
void rt_sim_trace_free(struct rt_sim_trace *t);

#endif
