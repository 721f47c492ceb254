/* Where the time of a request went, from what the router saw and what nodes said of their legs.
 * Nodes tell durations, so clocks need not agree; what lies between is the relay: messages on their
 * way, and both control loops. The stages of the first token add up to the time to the first token
 * to the nanosecond, those of the second one to the gap between the two. Pure. */
#ifndef RT_STAGES_H
#define RT_STAGES_H

#include "common/base/base.h"

#define RT_STAGE_TIERS 4

/* Until the first token, then from the first to the second. */
enum rt_stage {
    RT_STAGE_TOKENIZE,      /* from arrival until the ids are there */
    RT_STAGE_QUEUE,         /* admission: until nodes were asked */
    RT_STAGE_RETRY,         /* attempts that failed, and pauses */
    RT_STAGE_PREFILL_QUEUE, /* in the node: for pages, and for a step with room */
    RT_STAGE_LOAD,          /* blocks came from other tiers and nothing could be computed */
    RT_STAGE_PREFILL,       /* steps, those of others in between included */
    RT_STAGE_RELAY,         /* between router and node */
    RT_STAGE_RESERVE,       /* decode node: its pages came later than the first token */
    RT_STAGE_HANDOFF,       /* KV was on its way while nothing else happened */
    RT_STAGE_DECODE_QUEUE,  /* decode node: all was there, for a step with room */
    RT_STAGE_DECODE,        /* the step of the second token */
    RT_STAGE_SECOND_RELAY,
    RT_STAGE_COUNT
};
#define RT_STAGE_FIRST_COUNT RT_STAGE_RESERVE /* those until the first token */
extern const char *const rt_stage_names[RT_STAGE_COUNT];

/* As a node said it; see LegTimes in proto/node.proto. */
struct rt_leg_times {
    bool known;
    uint64_t queue_ns, load_ns, wait_ns, compute_ns;
    uint32_t tier_tokens[RT_STAGE_TIERS];
    char transport[8];
    uint64_t bytes;
};

/* Moments of the router's clock; 0 = it did not come to that. */
struct rt_stamps {
    uint64_t came, tokenized, asked; /* asked: the first attempt got nodes */
    uint64_t launched;               /* likewise the attempt that made the first token */
    uint64_t first, second, last;
};

/* `prompt`: of the leg that made the first token. `decode`: of the leg that took the KV over and
 * made the second one; NULL = it was the same leg, or another attempt. Before the first token the
 * time until `now` counts. */
void rt_stages_fill(const struct rt_stamps *t,
                    const struct rt_leg_times *prompt,
                    const struct rt_leg_times *decode,
                    uint64_t now,
                    uint64_t ret_ns[RT_STAGE_COUNT]);

#endif
