/* Between the HTTP thread and the loop: requests come in as messages, answers go out as events. All
 * events of one turn of the loop travel as one message, so that many tokens cost one wake-up. Loop
 * thread. */
#include "router/http/http_int.h"

#include <stdlib.h>

struct batch {
    struct bt_msg msg;
    struct bt_list events;
};

/* [http] */
static void on_batch(struct bt_msg *msg, void *http)
{
    struct batch *b = BT_CONTAINER_OF(msg, struct batch, msg);
    struct bt_list *it;

    while ((it = bt_list_pop_front(&b->events)) != NULL) {
        rt_http_event(BT_LIST_ENTRY(it, struct rt_http_event, link));
    }
    free(b);
}

static void close_ended(struct rt_http *h)
{
    struct bt_list *it;

    while ((it = bt_list_pop_front(&h->closing)) != NULL) {
        struct rt_http_choice *ch = BT_LIST_ENTRY(it, struct rt_http_choice, live);

        if (ch->client.req) {
            rt_request_closed(ch->client.req);
            ch->client.req = NULL;
        }
        h->n_live--;
        bt_list_push_back(&h->events, &ch->end.link);
    }
}

/* The end of a turn: requests that have ended are closed, events go out. */
static void on_flush(struct bt_loop *loop, struct bt_timer *t)
{
    struct rt_http *h = BT_CONTAINER_OF(t, struct rt_http, flush);
    struct batch *b;

    close_ended(h);
    if (!bt_list_empty(&h->events)) {
        b = bt_calloc(1, sizeof(*b));
        if (!b) { /* a later turn may have memory again */
            bt_timer_start(loop, t, bt_loop_now(loop) + 10 * BT_NS_PER_MS);
            return;
        }
        b->msg.handle = on_batch;
        bt_list_init(&b->events);
        bt_list_splice_back(&b->events, &h->events);
        bt_mailbox_push(&h->mailbox, &b->msg); /* never closed */
    }
    if (h->loop_draining && h->n_live == 0 && h->drained) {
        void (*drained)(void *arg) = h->drained;

        h->drained = NULL;
        bt_timer_stop(loop, &h->drain_timer);
        drained(h->drained_arg);
    }
}

static void want_flush(struct rt_http *h)
{
    if (!h->flush.armed) {
        bt_timer_start(h->router->loop, &h->flush, bt_loop_now(h->router->loop));
    }
}

void rt_http_bridge_init(struct rt_http *h)
{
    bt_list_init(&h->live);
    bt_list_init(&h->closing);
    bt_list_init(&h->events);
    h->flush.fn = on_flush;
}

void rt_http_emit(struct rt_http *h, struct rt_http_event *ev)
{
    bt_list_push_back(&h->events, &ev->link);
    want_flush(h);
}

/* --- the client of a request ----------------------------------------------------------------- */

static struct rt_http_choice *choice_of(struct rt_client *c)
{
    return BT_CONTAINER_OF(c, struct rt_http_choice, client);
}

static void client_taken(struct rt_client *c)
{
}

static void copy_logprobs(struct rt_http_event *ev, const Baton__V1__GenerateResponse *m)
{
    for (size_t i = 0; i < m->n_tokens; i++) {
        const Baton__V1__TokenLogprob *from = m->logprobs[i];
        struct rt_http_lp *to = &ev->lp[i];

        to->logprob = from->logprob;
        to->id = m->tokens[i];
        to->n_top = (int)from->n_top;
        for (size_t k = 0; k < from->n_top; k++) {
            to->top[k] = (struct rt_top){from->top[k]->token, from->top[k]->logprob};
        }
    }
}

static int client_send(struct rt_client *c, const Baton__V1__GenerateResponse *m)
{
    struct rt_http_choice *ch = choice_of(c);
    size_t n_lp = m->n_logprobs ? m->n_tokens : 0;
    size_t size = sizeof(struct rt_http_event) + n_lp * sizeof(struct rt_http_lp) + m->text.len;
    struct rt_http_event *ev;

    if (__atomic_load_n(&ch->in_flight, __ATOMIC_RELAXED) + size > ch->h->conf->max_queued_bytes) {
        return BT_E_EXHAUSTED;
    }
    ev = malloc(size);
    if (!ev) {
        return BT_E_NOMEM;
    }
    *ev = (struct rt_http_event){.kind = RT_HTTP_DELTA,
                                 .target = ch,
                                 .n_tokens = (uint32_t)m->n_tokens,
                                 .finish = (uint32_t)m->finish,
                                 .size = size,
                                 .n_text = m->text.len};
    if (m->usage) {
        ev->n_prompt = m->usage->prompt_tokens;
        ev->n_completion = m->usage->completion_tokens;
        ev->n_cached = m->usage->cached_tokens;
    }
    if (n_lp > 0) {
        ev->lp = (struct rt_http_lp *)(ev + 1);
        copy_logprobs(ev, m);
    }
    ev->text = (char *)(ev + 1) + n_lp * sizeof(struct rt_http_lp);
    if (m->text.len > 0) {
        memcpy(ev->text, m->text.data, m->text.len);
    }
    __atomic_fetch_add(&ch->in_flight, size, __ATOMIC_RELAXED);
    rt_http_emit(ch->h, ev);
    return BT_OK;
}

/* The request is still on the stack above us: it is closed at the end of the turn. */
static void end(struct rt_http_choice *ch, int rc, const struct bt_err *err)
{
    ch->end.rc = rc;
    if (rc < 0) {
        snprintf(ch->err.msg, sizeof(ch->err.msg), "%s", bt_err_msg(err, rc));
    }
    bt_list_remove(&ch->live);
    bt_list_push_back(&ch->h->closing, &ch->live);
    want_flush(ch->h);
}

static void client_finish(struct rt_client *c)
{
    end(choice_of(c), BT_OK, NULL);
}

static void client_fail(struct rt_client *c, int rc, const struct bt_err *err)
{
    end(choice_of(c), rc, err);
}

static const struct rt_client_ops client_ops = {client_taken, client_send, client_finish,
                                                client_fail};

/* --- messages -------------------------------------------------------------------------------- */

static void handled(struct rt_http *h)
{
    __atomic_fetch_sub(&h->n_to_loop, 1, __ATOMIC_RELEASE); /* pairs with rt_http_stop */
}

void rt_http_on_submit(struct bt_msg *msg, void *loop)
{
    struct rt_http_choice *ch = BT_CONTAINER_OF(msg, struct rt_http_choice, submit);
    struct rt_http *h = ch->h;
    struct bt_err err = {0};
    int rc;

    handled(h);
    ch->client.ops = &client_ops;
    ch->client.deadline_ns = BT_NEVER_NS;
    ch->client.via = "http";
    ch->end = (struct rt_http_event){.kind = RT_HTTP_END, .target = ch};
    ch->gone = (struct rt_http_event){.kind = RT_HTTP_GONE, .target = ch};
    bt_list_push_back(&h->live, &ch->live);
    h->n_live++;
    rc = h->loop_draining ? BT_FAIL(&err, BT_E_UNAVAILABLE, "this router is draining")
                          : rt_generate(h->router, &ch->client, ch->msg, &err);
    if (rc < 0) {
        end(ch, rc, &err);
    }
}

void rt_http_on_cancel(struct bt_msg *msg, void *loop)
{
    struct rt_http_choice *ch = BT_CONTAINER_OF(msg, struct rt_http_choice, cancel);
    struct rt_http *h = ch->h;

    handled(h);
    if (ch->client.req) {
        ch->client.closed_rc = ch->cancel_rc;
        rt_request_closed(ch->client.req);
        ch->client.req = NULL;
    }
    if (!bt_list_empty(&ch->live)) { /* running, or ended in this very turn */
        bt_list_remove(&ch->live);
        h->n_live--;
    }
    rt_http_emit(h, &ch->gone);
}

static void on_tokenized(void *user, struct rt_tok_job *job)
{
    struct rt_http_ask *ask = user;
    int rc = job->rc;

    ask->h->n_asks--;
    if (rc == BT_OK) {
        rc = bt_buf_printf(&ask->body, "{\"count\":%zu,\"tokens\":[", job->ids.n);
        for (size_t i = 0; rc == BT_OK && i < job->ids.n; i++) {
            rc = bt_buf_printf(&ask->body, i ? ",%d" : "%d", job->ids.p[i]);
        }
        if (rc == BT_OK) {
            rc = rt_http_put(&ask->body, "]}");
        }
    }
    ask->reply.rc = rc;
    ask->err = job->err;
    rt_http_emit(ask->h, &ask->reply);
}

void rt_http_on_ask(struct bt_msg *msg, void *loop)
{
    struct rt_http_ask *ask = BT_CONTAINER_OF(msg, struct rt_http_ask, msg);
    struct rt_http *h = ask->h;
    struct rt_tok_input in = {
        .text = ask->text, .chat = ask->chat, .done = on_tokenized, .user = ask};
    struct rt_tok_job *job;

    handled(h);
    ask->reply = (struct rt_http_event){.kind = RT_HTTP_REPLY, .target = ask};
    ask->status = 200;
    ask->type = "application/json";
    if (ask->question != RT_HTTP_TOKENIZE) {
        rt_http_answer(h, ask);
    } else {
        int rc =
            rt_model_is(h->router->model, ask->model)
                ? rt_tok_start(h->router, &in, &job, &ask->err)
                : BT_FAIL(&ask->err, BT_E_NOT_FOUND, "model %.100s is not served here", ask->model);

        if (rc == BT_OK) {
            h->n_asks++;
            return;
        }
        ask->reply.rc = rc;
    }
    rt_http_emit(h, &ask->reply);
}

void rt_http_bridge_cancel_all(struct rt_http *h, const char *why)
{
    struct bt_err err = {0};

    BT_FAIL(&err, BT_E_UNAVAILABLE, "%s", why);
    bt_list_for_each_safe (it, &h->live) {
        struct rt_http_choice *ch = BT_LIST_ENTRY(it, struct rt_http_choice, live);

        if (ch->client.req) {
            rt_request_closed(ch->client.req);
            ch->client.req = NULL;
        }
        end(ch, BT_E_UNAVAILABLE, &err);
    }
}
