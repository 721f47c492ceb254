/* Sampling parameters as router, nodes and the sampler share them, and the one place where their
 * ranges are checked. */
#ifndef WIRE_SAMPLING_H
#define WIRE_SAMPLING_H

#include "common/base/rc.h"

#define WIRE_MAX_LOGIT_BIAS 1024
#define WIRE_MAX_LOGPROBS   20
#define WIRE_MAX_STOP_IDS   64

struct wire_bias {
    int32_t id;
    float value; /* -100..100; -100 bans */
};

struct wire_sampling {
    float temperature;        /* >= 0, finite; 0 and -0 = greedy */
    int32_t top_k;            /* 0 or -1 = off */
    float top_p;              /* 0..1; 1 = off, 0 = top 1 */
    float min_p;              /* 0..1; 0 = off */
    float repetition_penalty; /* > 0; 1 = off; over prompt and answer */
    float presence_penalty;   /* -2..2; over the answer */
    float frequency_penalty;  /* -2..2; over the answer */
    uint64_t seed;
    uint32_t choice;
    uint32_t min_tokens;
    uint32_t max_tokens; /* >= 1 */
    bool ignore_eos;
    int32_t n_logprobs; /* -1 = off; 0..WIRE_MAX_LOGPROBS alternatives besides the chosen token */
    size_t n_bias;
    const struct wire_bias *bias; /* sorted by id, unique */
    size_t n_stop_ids;
    const int32_t *stop_ids;
};

/* Neutral parameters: greedy, max_tokens 16, no logprobs. */
void wire_sampling_defaults(struct wire_sampling *s);
/* Every range above, ids against n_vocab. BT_E_INVALID names the field and both values. The one
 * place where this is checked, called by router and nodes. */
int wire_sampling_check(const struct wire_sampling *s, int n_vocab, struct bt_err *err) BT_MUST_USE;

#endif
