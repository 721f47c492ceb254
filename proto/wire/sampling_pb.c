/* Sampling parameters between their messages and struct wire_sampling. */
#include "proto/wire/sampling_pb.h"

#include "common/base/buf.h"

#include <stdlib.h>

void wire_sampling_owned_fini(struct wire_sampling_owned *o)
{
    free(o->bias);
    free(o->stop_ids);
    *o = (struct wire_sampling_owned){0};
}

static int by_id(const void *a, const void *b)
{
    const struct wire_bias *x = a, *y = b;

    return (x->id > y->id) - (x->id < y->id);
}

/* Counts are limited here, before anything is allocated; ids are checked later. */
static int take_bias(struct wire_sampling_owned *o,
                     size_t n,
                     Baton__V1__LogitBias *const *rows,
                     struct bt_err *err)
{
    if (n > WIRE_MAX_LOGIT_BIAS) {
        return BT_FAIL(err, BT_E_INVALID, "logit_bias has %zu entries, at most %d", n,
                       WIRE_MAX_LOGIT_BIAS);
    }
    if (n == 0) {
        return BT_OK;
    }
    o->bias = bt_calloc(n, sizeof(*o->bias));
    if (!o->bias) {
        return BT_FAIL(err, BT_E_NOMEM, "no memory for logit_bias");
    }
    for (size_t i = 0; i < n; i++) {
        o->bias[i] = (struct wire_bias){rows[i]->token, rows[i]->bias};
    }
    qsort(o->bias, n, sizeof(*o->bias), by_id);
    o->s.bias = o->bias;
    o->s.n_bias = n;
    return BT_OK;
}

static int
take_stop_ids(struct wire_sampling_owned *o, size_t n, const int32_t *ids, struct bt_err *err)
{
    if (n > WIRE_MAX_STOP_IDS) {
        return BT_FAIL(err, BT_E_INVALID, "stop token_ids has %zu entries, at most %d", n,
                       WIRE_MAX_STOP_IDS);
    }
    if (n == 0) {
        return BT_OK;
    }
    o->stop_ids = bt_calloc(n, sizeof(*o->stop_ids));
    if (!o->stop_ids) {
        return BT_FAIL(err, BT_E_NOMEM, "no memory for stop token_ids");
    }
    memcpy(o->stop_ids, ids, n * sizeof(*ids));
    o->s.stop_ids = o->stop_ids;
    o->s.n_stop_ids = n;
    return BT_OK;
}

static int client_sampling(struct wire_sampling_owned *o,
                           const Baton__V1__Sampling *m,
                           bool *ret_has_seed,
                           struct bt_err *err)
{
    struct wire_sampling *s = &o->s;

    if (m->temperature__case == BATON__V1__SAMPLING__TEMPERATURE__TEMPERATURE) {
        s->temperature = m->temperature;
    }
    if (m->top_p__case == BATON__V1__SAMPLING__TOP_P__TOP_P) {
        s->top_p = m->top_p;
    }
    if (m->repetition_penalty__case ==
        BATON__V1__SAMPLING__REPETITION_PENALTY__REPETITION_PENALTY) {
        s->repetition_penalty = m->repetition_penalty;
    }
    if (m->logprobs__case == BATON__V1__SAMPLING__LOGPROBS__LOGPROBS) {
        /* -1 means off inside; a client that wants it off leaves the field out. */
        if (m->logprobs < 0) {
            return BT_FAIL(err, BT_E_INVALID, "logprobs is %d, must be in [0, %d]", m->logprobs,
                           WIRE_MAX_LOGPROBS);
        }
        s->n_logprobs = m->logprobs;
    }
    if (m->seed__case == BATON__V1__SAMPLING__SEED__SEED) {
        s->seed = m->seed;
        *ret_has_seed = true;
    }
    s->top_k = m->top_k;
    s->min_p = m->min_p;
    s->presence_penalty = m->presence_penalty;
    s->frequency_penalty = m->frequency_penalty;
    return take_bias(o, m->n_logit_bias, m->logit_bias, err);
}

int wire_sampling_from_client(const Baton__V1__Sampling *sampling,
                              const Baton__V1__Stopping *stopping,
                              struct wire_sampling_owned *ret,
                              bool *ret_has_seed,
                              struct bt_err *err)
{
    struct wire_sampling_owned o = {0};
    bool has_seed = false;
    int rc = BT_OK;

    wire_sampling_defaults(&o.s);
    o.s.max_tokens = UINT32_MAX;
    if (sampling) {
        rc = client_sampling(&o, sampling, &has_seed, err);
    }
    if (rc == BT_OK && stopping) {
        if (stopping->max_tokens__case == BATON__V1__STOPPING__MAX_TOKENS__MAX_TOKENS) {
            o.s.max_tokens = stopping->max_tokens;
        }
        o.s.min_tokens = stopping->min_tokens;
        o.s.ignore_eos = stopping->ignore_eos;
        rc = take_stop_ids(&o, stopping->n_token_ids, stopping->token_ids, err);
    }
    if (rc < 0) {
        wire_sampling_owned_fini(&o);
        return rc;
    }
    *ret = o;
    *ret_has_seed = has_seed;
    return BT_OK;
}

int wire_sampling_from_node(const Baton__V1__NodeSampling *msg,
                            struct wire_sampling_owned *ret,
                            struct bt_err *err)
{
    struct wire_sampling_owned o = {0};
    int rc;

    if (!msg) {
        return BT_FAIL(err, BT_E_INVALID, "sampling parameters are missing");
    }
    o.s = (struct wire_sampling){
        .temperature = msg->temperature,
        .top_k = msg->top_k,
        .top_p = msg->top_p,
        .min_p = msg->min_p,
        .repetition_penalty = msg->repetition_penalty,
        .presence_penalty = msg->presence_penalty,
        .frequency_penalty = msg->frequency_penalty,
        .seed = msg->seed,
        .choice = msg->choice,
        .min_tokens = msg->min_tokens,
        .max_tokens = msg->max_tokens,
        .ignore_eos = msg->ignore_eos,
        .n_logprobs = msg->logprobs,
    };
    rc = take_bias(&o, msg->n_logit_bias, msg->logit_bias, err);
    if (rc == BT_OK) {
        rc = take_stop_ids(&o, msg->n_stop_token_ids, msg->stop_token_ids, err);
    }
    if (rc < 0) {
        wire_sampling_owned_fini(&o);
        return rc;
    }
    *ret = o;
    return BT_OK;
}

int wire_sampling_to_node(const struct wire_sampling *s, struct wire_sampling_msg *out)
{
    Baton__V1__NodeSampling *m = &out->msg;

    *out = (struct wire_sampling_msg){.msg = BATON__V1__NODE_SAMPLING__INIT};
    if (s->n_bias > 0) {
        out->rows = bt_calloc(s->n_bias, sizeof(*out->rows));
        out->row_ptrs = bt_calloc(s->n_bias, sizeof(*out->row_ptrs));
        if (!out->rows || !out->row_ptrs) {
            wire_sampling_msg_fini(out);
            return BT_E_NOMEM;
        }
    }
    for (size_t i = 0; i < s->n_bias; i++) {
        baton__v1__logit_bias__init(&out->rows[i]);
        out->rows[i].token = s->bias[i].id;
        out->rows[i].bias = s->bias[i].value;
        out->row_ptrs[i] = &out->rows[i];
    }
    m->temperature = s->temperature;
    m->top_k = s->top_k;
    m->top_p = s->top_p;
    m->min_p = s->min_p;
    m->repetition_penalty = s->repetition_penalty;
    m->presence_penalty = s->presence_penalty;
    m->frequency_penalty = s->frequency_penalty;
    m->n_logit_bias = s->n_bias;
    m->logit_bias = out->row_ptrs;
    m->seed = s->seed;
    m->choice = s->choice;
    m->max_tokens = s->max_tokens;
    m->min_tokens = s->min_tokens;
    m->ignore_eos = s->ignore_eos;
    m->logprobs = s->n_logprobs;
    m->n_stop_token_ids = s->n_stop_ids;
    m->stop_token_ids = (int32_t *)(uintptr_t)s->stop_ids; /* read only by the serialiser */
    return BT_OK;
}

void wire_sampling_msg_fini(struct wire_sampling_msg *out)
{
    free(out->rows);
    free(out->row_ptrs);
    *out = (struct wire_sampling_msg){.msg = BATON__V1__NODE_SAMPLING__INIT};
}
