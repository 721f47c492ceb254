/* Sampling parameters and the sampler: a pure function of (parameters, prior ids, logits,
 * position).
 *
 * Order: logit bias -> penalties -> bans (min_tokens) -> temperature 0 ? argmax (ties to the lowest
 * id) : temperature -> top-k -> top-p -> min-p -> draw. The random number is keyed by
 * (seed, choice, position) through Philox 4x32-10 (Salmon et al., SC11), so a resumed stream goes
 * on exactly. Log probabilities are those of the raw logits (log-softmax before any change), as
 * OpenAI's interface means them.
 */
#ifndef KN_MODEL_SAMPLING_H
#define KN_MODEL_SAMPLING_H

#include "common/base/rc.h"

#define KN_MAX_LOGIT_BIAS 1024
#define KN_MAX_LOGPROBS   20
#define KN_MAX_STOP_IDS   64

struct kn_bias {
    int32_t id;
    float value; /* -100..100; -100 bans */
};

struct kn_sampling {
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
    int32_t n_logprobs; /* -1 = off; 0..KN_MAX_LOGPROBS alternatives besides the chosen token */
    size_t n_bias;
    const struct kn_bias *bias; /* sorted by id, unique */
    size_t n_stop_ids;
    const int32_t *stop_ids;
};

/* Neutral parameters: greedy, max_tokens 16, no logprobs. */
void kn_sampling_defaults(struct kn_sampling *s);
/* Every range above, ids against n_vocab. BT_E_INVALID names the field and both values. The one
 * place where this is checked, called by router and nodes. */
int kn_sampling_check(const struct kn_sampling *s, int n_vocab, struct bt_err *err) BT_MUST_USE;

struct kn_top {
    int32_t id;
    float logprob; /* finite: floored at -9999 */
};

struct kn_token {
    int32_t id;
    float logprob; /* of id; 0 when logprobs are off */
    int n_top;
    struct kn_top top[KN_MAX_LOGPROBS]; /* best first */
};

/* Scratch for one thread: create once, any model with at most n_vocab ids. */
struct kn_sampler;
int kn_sampler_create(int n_vocab, struct kn_sampler **ret, struct bt_err *err) BT_MUST_USE;
void kn_sampler_destroy(struct kn_sampler *s);

struct kn_sample_args {
    const struct kn_sampling *params;
    const float *logits;   /* [V], unchanged */
    const int32_t *prompt; /* [n_prompt] */
    size_t n_prompt;
    const int32_t *answer; /* [n_answer], the ids generated so far */
    size_t n_answer;       /* position of the token to draw = n_answer */
    const int32_t *eos;    /* banned while n_answer < min_tokens */
    size_t n_eos;
};
/* Never fails: NaN logits count as -inf, all banned gives the first eos id, or id 0. */
void kn_sample(struct kn_sampler *s, const struct kn_sample_args *a, struct kn_token *ret);

#endif
