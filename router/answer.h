/* The answer of one request as the client gets it: ids become text that is whole characters only,
 * stop strings end it, what might still become a stop string is held back, log probabilities get
 * the bytes of their tokens. Exactly once: every token has its offset, repeats are dropped, a gap
 * is an error. Loop thread; owned by the request. */
#ifndef RT_ANSWER_H
#define RT_ANSWER_H

#include "common/text/detok.h"
#include "common/text/stop.h"
#include "proto/node.pb-c.h"
#include "router/client.h"

struct rt_top {
    int32_t id;
    float logprob;
};

/* A token as a node sent it. */
struct rt_token {
    int32_t id;
    float logprob;
    int n_top;
    struct rt_top top[20];
};

struct rt_answer_cfg {
    const struct bt_tokenizer *tok; /* borrowed */
    int n_vocab;
    bool logprobs;
    bool skip_special;
    char *const *stops; /* copied */
    size_t n_stops;
};

struct rt_answer {
    struct rt_answer_cfg cfg;
    struct bt_detok detok;
    struct bt_stop *stop; /* NULL without stop strings */
    struct bt_ids ids;    /* all that was taken: what a resumed leg is told */
    struct bt_buf text;   /* of the message being built */
    struct bt_buf whole;  /* characters on their way through the stop filter */
    uint32_t n_sent;      /* ids that have been sent to the client */
    bool stopped;         /* a stop string was found: nothing more is taken */
};

/* Errors: those of bt_stop_check, BT_E_NOMEM. */
int rt_answer_init(struct rt_answer *a,
                   const struct rt_answer_cfg *cfg,
                   struct bt_err *err) BT_MUST_USE;
void rt_answer_fini(struct rt_answer *a);

/* Takes the next token; *ends: the node finished the stream with it (an end token gives no text).
 * Afterwards `stopped` may be true. BT_E_NOMEM. */
int rt_answer_push(struct rt_answer *a, int32_t id, bool ends) BT_MUST_USE;
/* No more tokens: what was held back becomes text. */
int rt_answer_flush(struct rt_answer *a) BT_MUST_USE;

/* Reads tokens [offset, offset + n) of a node's message; BT_E_PEER_PROTOCOL if they are malformed
 * (ids outside the vocabulary, too few log probabilities). ret_tokens holds m->n_tokens. */
int rt_answer_read(const struct rt_answer *a,
                   const Baton__V1__StreamOutput *m,
                   struct rt_token *ret_tokens,
                   struct bt_err *err) BT_MUST_USE;

/* Completes the client's message with what has been taken since the last time and sends it: ids
 * from n_sent on, text, log probabilities out of `tokens` (those of the ids, in order). The rc is
 * that of the client's send. */
int rt_answer_send(struct rt_answer *a,
                   struct rt_client *client,
                   const struct rt_token *tokens,
                   Baton__V1__GenerateResponse *m) BT_MUST_USE;

#endif
