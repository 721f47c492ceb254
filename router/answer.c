/* The answer of one request. See answer.h. */
#include "router/answer.h"

#include <math.h>
#include <stdlib.h>

int rt_answer_init(struct rt_answer *a, const struct rt_answer_cfg *cfg, struct bt_err *err)
{
    struct bt_str strings[BT_STOP_MAX_STRINGS];
    int rc;

    *a = (struct rt_answer){.cfg = *cfg};
    bt_detok_init(&a->detok, cfg->tok, cfg->skip_special ? BT_DETOK_SKIP_CONTROL : 0);
    if (cfg->n_stops == 0) {
        return BT_OK;
    }
    if (cfg->n_stops > BT_STOP_MAX_STRINGS) {
        return BT_FAIL(err, BT_E_INVALID, "stop has %zu strings, at most %d", cfg->n_stops,
                       BT_STOP_MAX_STRINGS);
    }
    for (size_t i = 0; i < cfg->n_stops; i++) {
        strings[i] = bt_str_of(cfg->stops[i]);
    }
    rc = bt_stop_create(strings, cfg->n_stops, &a->stop, err);
    a->cfg.stops = NULL;
    return rc;
}

void rt_answer_fini(struct rt_answer *a)
{
    bt_stop_destroy(a->stop);
    bt_ids_fini(&a->ids);
    bt_buf_fini(&a->text);
    bt_buf_fini(&a->whole);
}

/* Whole characters through the stop filter into the text of the message. */
static int filter(struct rt_answer *a)
{
    int matched = -1;
    int rc;

    if (a->stop) {
        rc = bt_stop_push(a->stop, bt_buf_str(&a->whole), &a->text, &matched);
        a->stopped = a->stopped || matched >= 0;
    } else {
        rc = bt_buf_add(&a->text, a->whole.p, a->whole.n);
    }
    a->whole.n = 0;
    return rc;
}

int rt_answer_push(struct rt_answer *a, int32_t id, bool ends)
{
    int rc = bt_ids_push(&a->ids, id);

    if (rc < 0 || ends) {
        return rc;
    }
    rc = bt_detok_push(&a->detok, id, &a->whole);
    return rc < 0 || a->whole.n == 0 ? rc : filter(a);
}

int rt_answer_flush(struct rt_answer *a)
{
    int rc;

    if (a->stopped) {
        return BT_OK;
    }
    rc = bt_detok_flush(&a->detok, &a->whole);
    if (rc == BT_OK) {
        rc = filter(a);
    }
    if (rc == BT_OK && a->stop && !a->stopped) {
        rc = bt_stop_flush(a->stop, &a->text);
    }
    return rc;
}

static bool in_vocab(const struct rt_answer *a, int32_t id)
{
    return id >= 0 && id < a->cfg.n_vocab;
}

static int read_logprob(const struct rt_answer *a,
                        const Baton__V1__TokenLogprob *m,
                        struct rt_token *t,
                        struct bt_err *err)
{
    if (m->n_top > BT_ARRAY_LEN(t->top) || !isfinite(m->logprob)) {
        return BT_FAIL(err, BT_E_PEER_PROTOCOL, "malformed log probabilities");
    }
    t->logprob = m->logprob;
    t->n_top = (int)m->n_top;
    for (size_t i = 0; i < m->n_top; i++) {
        if (!in_vocab(a, m->top[i]->token) || !isfinite(m->top[i]->logprob)) {
            return BT_FAIL(err, BT_E_PEER_PROTOCOL, "malformed log probabilities");
        }
        t->top[i] = (struct rt_top){m->top[i]->token, m->top[i]->logprob};
    }
    return BT_OK;
}

int rt_answer_read(const struct rt_answer *a,
                   const Baton__V1__StreamOutput *m,
                   struct rt_token *ret_tokens,
                   struct bt_err *err)
{
    int rc = BT_OK;

    if (a->cfg.logprobs && m->n_logprobs != m->n_tokens) {
        return BT_FAIL(err, BT_E_PEER_PROTOCOL, "%zu tokens with %zu log probabilities",
                       m->n_tokens, m->n_logprobs);
    }
    for (size_t i = 0; rc == BT_OK && i < m->n_tokens; i++) {
        struct rt_token *t = &ret_tokens[i];

        t->id = m->tokens[i];
        t->n_top = 0;
        if (!in_vocab(a, t->id)) {
            return BT_FAIL(err, BT_E_PEER_PROTOCOL, "token %d is not in the vocabulary of %d",
                           t->id, a->cfg.n_vocab);
        }
        if (a->cfg.logprobs) {
            rc = read_logprob(a, m->logprobs[i], t, err);
        }
    }
    return rc;
}

/* Log probabilities of a message, in one block. */
struct logprob_block {
    Baton__V1__TokenLogprob token;
    Baton__V1__TopLogprob top[20];
    Baton__V1__TopLogprob *top_ptrs[20];
};

static void
put_logprob(const struct rt_answer *a, const struct rt_token *t, struct logprob_block *b)
{
    baton__v1__token_logprob__init(&b->token);
    b->token.logprob = t->logprob;
    b->token.n_top = (size_t)t->n_top;
    b->token.top = b->top_ptrs;
    for (int i = 0; i < t->n_top; i++) {
        struct bt_str text = bt_tokenizer_token_bytes(a->cfg.tok, t->top[i].id);

        baton__v1__top_logprob__init(&b->top[i]);
        b->top[i].token = t->top[i].id;
        b->top[i].logprob = t->top[i].logprob;
        b->top[i].text = (ProtobufCBinaryData){text.n, (uint8_t *)(uintptr_t)text.p};
        b->top_ptrs[i] = &b->top[i];
    }
}

int rt_answer_send(struct rt_answer *a,
                   struct rt_client *client,
                   const struct rt_token *tokens,
                   Baton__V1__GenerateResponse *m)
{
    size_t n = a->ids.n - a->n_sent;
    struct logprob_block *blocks = NULL;
    Baton__V1__TokenLogprob **ptrs = NULL;
    int rc;

    m->offset = a->n_sent;
    m->n_tokens = n;
    m->tokens = n ? a->ids.p + a->n_sent : NULL;
    m->text = (ProtobufCBinaryData){a->text.n, (uint8_t *)a->text.p};
    if (a->cfg.logprobs && n > 0) {
        blocks = bt_calloc(n, sizeof(*blocks));
        ptrs = bt_calloc(n, sizeof(*ptrs));
        if (!blocks || !ptrs) {
            free(blocks);
            free(ptrs);
            return BT_E_NOMEM;
        }
        for (size_t i = 0; i < n; i++) {
            put_logprob(a, &tokens[i], &blocks[i]);
            ptrs[i] = &blocks[i].token;
        }
        m->n_logprobs = n;
        m->logprobs = ptrs;
    }
    rc = client->ops->send(client, m);
    free(blocks);
    free(ptrs);
    if (rc == BT_OK) {
        a->n_sent = (uint32_t)a->ids.n;
        a->text.n = 0;
    }
    return rc;
}
