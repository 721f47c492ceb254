/* The beginning of a Generate call: every field is checked, the prompt becomes ids. Loop thread. */
#include "router/request_int.h"

#include "common/base/buf.h"
#include "common/obs/log.h"
#include "common/thr/time.h"

#include <stdlib.h>

#define MAX_CLIENT_ID  256
#define MAX_CACHE_SALT 256

/* Length limits come before the sampling ranges: max_tokens depends on them. */
static int take_limits(struct rt_request *req, struct bt_err *err)
{
    const struct bt_model_config *mc = rt_model_config(req->router->model);
    uint32_t ctx = rt_nodes_context(req->router, (uint32_t)mc->n_ctx);
    struct wire_sampling *s = &req->sampling.s;

    if (req->prompt.n >= ctx) {
        return BT_FAIL(err, BT_E_INVALID,
                       "the prompt has %zu tokens, the context is %u (with room for one answer "
                       "token: %u)",
                       req->prompt.n, ctx, ctx - 1);
    }
    if (s->max_tokens > ctx - req->prompt.n) {
        s->max_tokens = ctx - (uint32_t)req->prompt.n;
    }
    return wire_sampling_check(s, mc->n_vocab, err);
}

static int take_path(struct rt_request *req, int path, struct bt_err *err)
{
    req->path_is_must = path != BATON__V1__PATH__PATH_AUTO;
    switch (path) {
    case BATON__V1__PATH__PATH_AUTO:
        req->path = (enum rt_path)req->router->conf->path;
        return BT_OK;
    case BATON__V1__PATH__PATH_DIRECT:
        req->path = RT_PATH_DIRECT;
        return BT_OK;
    case BATON__V1__PATH__PATH_LOCAL:
        req->path = RT_PATH_LOCAL;
        return BT_OK;
    case BATON__V1__PATH__PATH_STORE:
        req->path = RT_PATH_STORE;
        return BT_OK;
    default:
        return BT_FAIL(err, BT_E_INVALID, "path %d is unknown", path);
    }
}

/* The tenant is the one that the caller's token stands for; only where tokens say nothing about it
 * does the caller choose. */
static int take_tenant(struct rt_request *req, const char *claimed, struct bt_err *err)
{
    const struct bt_who *who = &req->client->who;
    const char *tenant = who->any_tenant ? claimed : who->tenant;

    static_assert(RT_FAIR_TENANT_MAX >= BT_TENANT_MAX, "a name of a token file must fit");
    if (claimed[0] && strcmp(claimed, tenant) != 0) {
        return BT_FAIL(err, BT_E_DENIED, "tenant: this token does not act for %.63s", claimed);
    }
    snprintf(req->tenant, sizeof(req->tenant), "%s", tenant);
    return BT_OK;
}

static int
take_message(struct rt_request *req, const Baton__V1__GenerateRequest *m, struct bt_err *err)
{
    const struct rt_model *model = req->router->model;
    struct rt_answer_cfg ac = {
        .tok = rt_model_tokenizer(model),
        .n_vocab = rt_model_config(model)->n_vocab,
        .skip_special = m->skip_special_tokens,
    };
    bool has_seed;
    int rc;

    if (strlen(m->request_id) > MAX_CLIENT_ID) {
        return BT_FAIL(err, BT_E_INVALID, "request_id has %zu bytes, at most %d",
                       strlen(m->request_id), MAX_CLIENT_ID);
    }
    req->client_id = strdup(m->request_id); /* first: so that what is refused is logged by it */
    if (!rt_model_is(model, m->model)) {
        return BT_FAIL(err, BT_E_NOT_FOUND, "model %.100s is not served here", m->model);
    }
    if (strlen(m->cache_salt) > MAX_CACHE_SALT) {
        return BT_FAIL(err, BT_E_INVALID, "cache_salt has %zu bytes, at most %d",
                       strlen(m->cache_salt), MAX_CACHE_SALT);
    }
    if (strlen(m->tenant) >= RT_FAIR_TENANT_MAX) {
        return BT_FAIL(err, BT_E_INVALID, "tenant has %zu bytes, at most %d", strlen(m->tenant),
                       RT_FAIR_TENANT_MAX - 1);
    }
    if (m->priority < -RT_FAIR_PRIORITY_MAX || m->priority > RT_FAIR_PRIORITY_MAX) {
        return BT_FAIL(err, BT_E_INVALID, "priority %d is not from -%d to %d", m->priority,
                       RT_FAIR_PRIORITY_MAX, RT_FAIR_PRIORITY_MAX);
    }
    if ((rc = take_tenant(req, m->tenant, err)) < 0) {
        return rc;
    }
    req->fair.priority = m->priority;
    if ((rc = take_path(req, (int)m->path, err)) < 0 ||
        (rc = wire_sampling_from_client(m->sampling, m->stopping, &req->sampling, &has_seed, err)) <
            0) {
        return rc;
    }
    if (m->stopping) {
        ac.stops = m->stopping->strings;
        ac.n_stops = m->stopping->n_strings;
    }
    ac.logprobs = req->sampling.s.n_logprobs >= 0;
    if ((rc = rt_answer_init(&req->answer, &ac, err)) < 0) {
        return rc;
    }
    if (!has_seed) {
        req->sampling.s.seed = rt_random(req->router);
    }
    req->sampling.s.choice = req->client->choice;
    req->cache_salt = strdup(m->cache_salt);
    return req->client_id && req->cache_salt ? BT_OK
                                             : BT_FAIL(err, BT_E_NOMEM, "no memory for a request");
}

/* The prompt is there: checks it and looks for nodes. */
static int have_prompt(struct rt_request *req, struct bt_err *err)
{
    int rc = take_limits(req, err);

    if (rc == BT_OK) {
        req->trace->t.tokenized = bt_now_ns();
        rt_request_set_state(req, RT_REQUEST_QUEUED);
        rt_request_enqueue(req, 0);
    }
    return rc;
}

static void on_tokenized(void *user, struct rt_tok_job *job)
{
    struct rt_request *req = user;
    struct bt_err err = job->err;
    int rc = job->rc;

    req->job = NULL;
    if (rc == BT_OK) {
        req->prompt = job->ids;
        job->ids = (struct bt_ids){0};
        rc = have_prompt(req, &err);
    }
    if (rc < 0) {
        rt_request_fail(req, rc, bt_err_msg(&err, rc));
    }
}

static int
take_prompt(struct rt_request *req, const Baton__V1__GenerateRequest *m, struct bt_err *err)
{
    const struct rt_model *model = req->router->model;
    struct rt_tok_input in = {.done = on_tokenized, .user = req};
    int rc;

    switch ((int)m->input_case) {
    case BATON__V1__GENERATE_REQUEST__INPUT_TEXT:
        in.text = m->text;
        if (strlen(m->text) > RT_TOK_INLINE_BYTES) {
            return rt_tok_start(req->router, &in, &req->job, err);
        }
        rc = rt_model_text(model, m->text, &req->prompt, err);
        break;
    case BATON__V1__GENERATE_REQUEST__INPUT_TOKENS:
        rc = rt_model_ids(model, m->tokens->ids, m->tokens->n_ids, &req->prompt, err);
        if (rc == BT_OK && req->client->packed.p) {
            rt_request_keep_packed(req, req->client->packed);
        }
        break;
    case BATON__V1__GENERATE_REQUEST__INPUT_CHAT:
        in.chat = m->chat;
        if (rt_chat_bytes(m->chat) > RT_TOK_INLINE_BYTES) {
            return rt_tok_start(req->router, &in, &req->job, err);
        }
        rc = rt_model_chat(model, m->chat, &req->prompt, err);
        break;
    case BATON__V1__GENERATE_REQUEST__INPUT__NOT_SET:
    default:
        return BT_FAIL(err, BT_E_INVALID, "one of text, tokens or chat must be given");
    }
    return rc < 0 ? rc : have_prompt(req, err);
}

/* Older requests have smaller claims, in the whole cluster as far as clocks agree. */
static uint64_t make_claim(void)
{
    struct timespec ts;

    clock_gettime(CLOCK_REALTIME, &ts);
    return (uint64_t)ts.tv_sec * BT_NS_PER_S + (uint64_t)ts.tv_nsec;
}

int rt_request_begin(struct rt_router *r,
                     struct rt_client *client,
                     const Baton__V1__GenerateRequest *msg,
                     struct bt_err *err)
{
    struct rt_request *req = bt_calloc(1, sizeof(*req));
    int rc;

    if (!req) {
        return BT_FAIL(err, BT_E_NOMEM, "no memory for a request");
    }
    *req = (struct rt_request){.router = r,
                               .client = client,
                               .state = RT_REQUEST_TOKENIZE,
                               .timer.fn = rt_request_on_timer,
                               .claim = make_claim(),
                               .deadline_ns = client->deadline_ns};
    snprintf(req->id, sizeof(req->id), "%016llx", (unsigned long long)rt_random(r));
    if (rt_observe_begin(req) < 0) {
        free(req);
        return BT_FAIL(err, BT_E_NOMEM, "no memory for a request");
    }
    bt_list_push_back(&r->requests, &req->link);
    r->n_requests++;
    rc = take_message(req, msg, err);
    if (rc == BT_OK) {
        rc = take_prompt(req, msg, err);
    }
    if (rc < 0) {
        rt_request_fail_early(req, rc);
        return rc;
    }
    client->req = req;
    client->ops->taken(client);
    return BT_OK;
}
