/* The sampler: a pure function of (parameters, prior ids, logits,
 * position).
 *
 * Order: logit bias -> penalties -> bans (min_tokens) -> temperature 0 ? argmax (ties to the lowest
 * id) : temperature -> top-k -> top-p -> min-p -> draw. The random number is keyed by
 * (seed, choice, position) through Philox 4x32-10 (Salmon et al., SC11), so a resumed stream goes
 * on exactly. Log probabilities are those of the raw logits (log-softmax before any change), as
 * OpenAI's interface means them.
 */
#ifndef KN_MODEL_SAMPLER_H
#define KN_MODEL_SAMPLER_H

#include "proto/wire/sampling.h"

struct kn_top {
    int32_t id;
    float logprob; /* finite: floored at -9999 */
};

struct kn_token {
    int32_t id;
    float logprob; /* of id; 0 when logprobs are off */
    bool undrawn;  /* the device could not draw: id stands in for it */
    int n_top;
    struct kn_top top[WIRE_MAX_LOGPROBS]; /* best first */
};

/* Scratch for one thread: create once, any model with at most n_vocab ids. */
struct kn_sampler;
int kn_sampler_create(int n_vocab, struct kn_sampler **ret, struct bt_err *err) BT_MUST_USE;
void kn_sampler_destroy(struct kn_sampler *s);

struct kn_sample_args {
    const struct wire_sampling *params;
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
