/* Defaults and range checks of sampling parameters. */
#include "proto/wire/sampling.h"

#include <math.h>

void wire_sampling_defaults(struct wire_sampling *s)
{
    *s = (struct wire_sampling){
        .top_p = 1.0f,
        .repetition_penalty = 1.0f,
        .max_tokens = 16,
        .n_logprobs = -1,
    };
}

static int check_float(float v, float lo, float hi, const char *name, struct bt_err *err)
{
    if (!isfinite(v) || v < lo || v > hi) {
        return BT_FAIL(err, BT_E_INVALID, "%s is %g, must be in [%g, %g]", name, (double)v,
                       (double)lo, (double)hi);
    }
    return BT_OK;
}

static int check_ids(const struct wire_sampling *s, int n_vocab, struct bt_err *err)
{
    if (s->n_bias > WIRE_MAX_LOGIT_BIAS) {
        return BT_FAIL(err, BT_E_INVALID, "logit_bias has %zu entries, at most %d", s->n_bias,
                       WIRE_MAX_LOGIT_BIAS);
    }
    for (size_t i = 0; i < s->n_bias; i++) {
        const struct wire_bias *b = &s->bias[i];

        if (b->id < 0 || b->id >= n_vocab) {
            return BT_FAIL(err, BT_E_INVALID, "logit_bias id %d is not in the vocabulary of %d",
                           b->id, n_vocab);
        }
        if (i > 0 && b->id <= s->bias[i - 1].id) {
            return BT_FAIL(err, BT_E_INVALID, "logit_bias id %d appears twice", b->id);
        }
        if (check_float(b->value, -100, 100, "logit_bias value", err) < 0) {
            return BT_E_INVALID;
        }
    }
    if (s->n_stop_ids > WIRE_MAX_STOP_IDS) {
        return BT_FAIL(err, BT_E_INVALID, "stop_token_ids has %zu entries, at most %d",
                       s->n_stop_ids, WIRE_MAX_STOP_IDS);
    }
    for (size_t i = 0; i < s->n_stop_ids; i++) {
        if (s->stop_ids[i] < 0 || s->stop_ids[i] >= n_vocab) {
            return BT_FAIL(err, BT_E_INVALID,
                           "stop_token_ids holds %d, which is not in the vocabulary of %d",
                           s->stop_ids[i], n_vocab);
        }
    }
    return BT_OK;
}

int wire_sampling_check(const struct wire_sampling *s, int n_vocab, struct bt_err *err)
{
    const struct {
        float v, lo, hi;
        const char *name;
    } ranges[] = {
        {s->temperature, 0, 100, "temperature"},
        {s->top_p, 0, 1, "top_p"},
        {s->min_p, 0, 1, "min_p"},
        {s->repetition_penalty, 0.01f, 100, "repetition_penalty"},
        {s->presence_penalty, -2, 2, "presence_penalty"},
        {s->frequency_penalty, -2, 2, "frequency_penalty"},
    };

    for (size_t i = 0; i < BT_ARRAY_LEN(ranges); i++) {
        if (check_float(ranges[i].v, ranges[i].lo, ranges[i].hi, ranges[i].name, err) < 0) {
            return BT_E_INVALID;
        }
    }
    if (s->top_k < -1 || s->top_k > n_vocab) {
        return BT_FAIL(err, BT_E_INVALID, "top_k is %d, must be in [-1, %d]", s->top_k, n_vocab);
    }
    if (s->max_tokens < 1) {
        return BT_FAIL(err, BT_E_INVALID, "max_tokens is %u, must be at least 1", s->max_tokens);
    }
    if (s->min_tokens > s->max_tokens) {
        return BT_FAIL(err, BT_E_INVALID, "min_tokens is %u, above max_tokens %u", s->min_tokens,
                       s->max_tokens);
    }
    if (s->n_logprobs < -1 || s->n_logprobs > WIRE_MAX_LOGPROBS) {
        return BT_FAIL(err, BT_E_INVALID, "logprobs is %d, must be in [0, %d]", s->n_logprobs,
                       WIRE_MAX_LOGPROBS);
    }
    return check_ids(s, n_vocab, err);
}
