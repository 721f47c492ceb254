/* The service that clients call: baton.v1.Baton. Loop thread; every request is untrusted. */
#include "router/router_int.h"

#include "common/base/buf.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

static struct rt_router *router_of(struct bt_rpc_call *call)
{
    return bt_rpc_call_service_user(call);
}

static void refuse(struct bt_rpc_call *call, int rc, const struct bt_err *err)
{
    if (rc == BT_E_EXHAUSTED && bt_rpc_call_add_trailer(call, "retry-after", "1") < 0) {
        /* the status alone must do */
    }
    bt_rpc_call_fail(call, rc, err);
}

/* --- Generate -------------------------------------------------------------------------------- */

#define HEADERS_NS (2 * BT_NS_PER_MS) /* headers wait this long for the first token */

struct grpc_client { /* the user of its call, from the message to `closed` */
    struct rt_client client;
    struct bt_rpc_call *call;
    struct bt_timer headers;
};

static struct bt_rpc_call *call_of(struct rt_client *c)
{
    return BT_CONTAINER_OF(c, struct grpc_client, client)->call;
}

/* [timer] */
static void send_headers(struct bt_loop *loop, struct bt_timer *t)
{
    bt_rpc_call_send_headers(BT_CONTAINER_OF(t, struct grpc_client, headers)->call);
}

/* Soon, not at once: a token that comes at once brings them along. */
static void client_taken(struct rt_client *c)
{
    struct grpc_client *gc = BT_CONTAINER_OF(c, struct grpc_client, client);
    struct bt_loop *loop = bt_rpc_call_loop(gc->call);

    bt_timer_start(loop, &gc->headers, bt_loop_now(loop) + HEADERS_NS);
}

static int client_send(struct rt_client *c, const Baton__V1__GenerateResponse *m)
{
    struct grpc_client *gc = BT_CONTAINER_OF(c, struct grpc_client, client);

    bt_timer_stop(bt_rpc_call_loop(gc->call), &gc->headers);
    /* The last message goes with the status, which follows. */
    return m->finish != BATON__V1__FINISH_REASON__FINISH_NONE
               ? bt_rpc_call_queue(gc->call, &m->base)
               : bt_rpc_call_send(gc->call, &m->base);
}

static void client_finish(struct rt_client *c)
{
    bt_rpc_call_finish(call_of(c), BT_RPC_OK, NULL);
}

static void client_fail(struct rt_client *c, int rc, const struct bt_err *err)
{
    char text[32];

    if (c->retry_after_s > 0) {
        snprintf(text, sizeof(text), "%.0f", ceil(c->retry_after_s));
        if (bt_rpc_call_add_trailer(call_of(c), "retry-after", text) == BT_OK) {
            snprintf(text, sizeof(text), "%.0f", c->retry_after_s * 1e3);
            if (bt_rpc_call_add_trailer(call_of(c), "retry-after-ms", text) < 0) {
                /* seconds must do */
            }
        }
    }
    bt_rpc_call_fail(call_of(c), rc, err);
}

static const struct rt_client_ops grpc_client_ops = {client_taken, client_send, client_finish,
                                                     client_fail};

int rt_generate(struct rt_router *r,
                struct rt_client *client,
                const Baton__V1__GenerateRequest *msg,
                struct bt_err *err)
{
    if (r->n_requests >= (size_t)r->conf->max_active) {
        char id[RT_TRACE_ID];
        const struct rt_refusal f = {.id = id,
                                     .client_id = msg->request_id,
                                     .answer_id = client->answer_id ? client->answer_id : "",
                                     .via = client->via ? client->via : "grpc",
                                     .tenant = client->who.tenant,
                                     .came_ns = client->came_ns ? client->came_ns : bt_now_ns(),
                                     .rc = BT_E_EXHAUSTED};

        snprintf(id, sizeof(id), "%016llx", (unsigned long long)rt_random(r));
        rt_access_refused(r, &f);
        return BT_FAIL(err, BT_E_EXHAUSTED, "%zu requests are active, no more are taken",
                       r->n_requests);
    }
    return rt_request_begin(r, client, msg, err);
}

static void generate(struct bt_rpc_call *call, const ProtobufCMessage *msg)
{
    const Baton__V1__GenerateRequest *m = (const void *)msg;
    struct grpc_client *gc = bt_calloc(1, sizeof(*gc));
    struct bt_err err = {0};
    int rc;

    if (!gc) {
        refuse(call, BT_E_NOMEM, NULL);
        return;
    }
    gc->call = call;
    gc->headers.fn = send_headers;
    gc->client = (struct rt_client){.ops = &grpc_client_ops,
                                    .who = *bt_rpc_call_who(call),
                                    .deadline_ns = bt_rpc_call_deadline_ns(call)};
    if (m->input_case == BATON__V1__GENERATE_REQUEST__INPUT_TOKENS) {
        gc->client.packed = bt_rpc_call_packed(call, m->tokens->ids);
    }
    bt_rpc_call_set_user(call, gc);
    rc = rt_generate(router_of(call), &gc->client, m, &err);
    gc->client.packed = (struct bt_str){0};
    if (rc < 0) {
        refuse(call, rc, &err);
    }
}

static void generate_closed(struct bt_rpc_call *call, bool cancelled)
{
    struct grpc_client *gc = bt_rpc_call_user(call);

    if (gc) {
        bt_timer_stop(bt_rpc_call_loop(call), &gc->headers);
        if (gc->client.req) {
            gc->client.closed_rc = bt_rpc_call_refused(call);
            rt_request_closed(gc->client.req);
        }
    }
    free(gc);
}

/* --- Tokenize, Detokenize -------------------------------------------------------------------- */

static int check_model(const struct rt_router *r, const char *name, struct bt_err *err)
{
    return rt_model_is(r->model, name)
               ? BT_OK
               : BT_FAIL(err, BT_E_NOT_FOUND, "model %.100s is not served here", name);
}

static void
tokenized(struct bt_rpc_call *call, int rc, const struct bt_ids *ids, struct bt_err *err)
{
    Baton__V1__TokenizeResponse out = BATON__V1__TOKENIZE_RESPONSE__INIT;

    if (rc < 0) {
        refuse(call, rc, err);
        return;
    }
    out.n_tokens = ids->n;
    out.tokens = ids->p;
    bt_rpc_call_reply(call, &out.base);
}

static void on_long_tokenized(void *user, struct rt_tok_job *job)
{
    bt_rpc_call_set_user(user, NULL);
    tokenized(user, job->rc, &job->ids, &job->err);
}

/* True if the input is long: the answer comes later, or *ret_rc says why not. */
static bool tokenize_later(struct bt_rpc_call *call,
                           const Baton__V1__TokenizeRequest *m,
                           int *ret_rc,
                           struct bt_err *err)
{
    struct rt_tok_input in = {.done = on_long_tokenized, .user = call};
    struct rt_tok_job *job;

    if (m->input_case == BATON__V1__TOKENIZE_REQUEST__INPUT_TEXT &&
        strlen(m->text) > RT_TOK_INLINE_BYTES) {
        in.text = m->text;
    } else if (m->input_case == BATON__V1__TOKENIZE_REQUEST__INPUT_CHAT &&
               rt_chat_bytes(m->chat) > RT_TOK_INLINE_BYTES) {
        in.chat = m->chat;
    } else {
        return false;
    }
    *ret_rc = rt_tok_start(router_of(call), &in, &job, err);
    if (*ret_rc == BT_OK) {
        bt_rpc_call_set_user(call, job);
    }
    return true;
}

static void tokenize(struct bt_rpc_call *call, const ProtobufCMessage *msg)
{
    const Baton__V1__TokenizeRequest *m = (const void *)msg;
    struct rt_router *r = router_of(call);
    struct bt_ids ids = {0};
    struct bt_err err = {0};
    int rc = check_model(r, m->model, &err);

    if (rc == BT_OK && tokenize_later(call, m, &rc, &err)) {
        if (rc < 0) {
            refuse(call, rc, &err);
        }
        return;
    }
    if (rc == BT_OK) {
        switch ((int)m->input_case) {
        case BATON__V1__TOKENIZE_REQUEST__INPUT_TEXT:
            rc = rt_model_text(r->model, m->text, &ids, &err);
            break;
        case BATON__V1__TOKENIZE_REQUEST__INPUT_CHAT:
            rc = rt_model_chat(r->model, m->chat, &ids, &err);
            break;
        case BATON__V1__TOKENIZE_REQUEST__INPUT__NOT_SET:
        default:
            rc = BT_FAIL(&err, BT_E_INVALID, "one of text or chat must be given");
        }
    }
    tokenized(call, rc, &ids, &err);
    bt_ids_fini(&ids);
}

static void tokenize_closed(struct bt_rpc_call *call, bool cancelled)
{
    struct rt_tok_job *job = bt_rpc_call_user(call);

    if (job) {
        job->user = NULL;
    }
}

static void detokenize(struct bt_rpc_call *call, const ProtobufCMessage *msg)
{
    const Baton__V1__DetokenizeRequest *m = (const void *)msg;
    Baton__V1__DetokenizeResponse out = BATON__V1__DETOKENIZE_RESPONSE__INIT;
    struct rt_router *r = router_of(call);
    struct bt_ids ids = {0};
    struct bt_buf text = {.max = 64u << 20};
    struct bt_err err = {0};
    int rc = check_model(r, m->model, &err);

    if (rc == BT_OK && m->n_tokens > 0) {
        rc = rt_model_ids(r->model, m->tokens, m->n_tokens, &ids, &err);
    }
    if (rc == BT_OK) {
        rc = bt_detok_all(rt_model_tokenizer(r->model), ids.p, ids.n, 0, &text);
    }
    if (rc < 0) {
        refuse(call, rc, &err);
    } else {
        out.text = (ProtobufCBinaryData){text.n, (uint8_t *)text.p};
        bt_rpc_call_reply(call, &out.base);
    }
    bt_ids_fini(&ids);
    bt_buf_fini(&text);
}

/* --- GetModel, GetServer --------------------------------------------------------------------- */

static void fill_model(const struct rt_router *r, Baton__V1__ModelInfo *m, char hex[65])
{
    static const char *const archs[] = {"llama", "qwen2", "qwen3"};
    const struct bt_model_config *c = rt_model_config(r->model);
    const uint8_t *digest = rt_model_digest(r->model);

    for (size_t i = 0; i < 32; i++) {
        snprintf(hex + 2 * i, 3, "%02x", digest[i]);
    }
    baton__v1__model_info__init(m);
    m->name = (char *)(uintptr_t)c->name;
    m->digest = hex;
    m->architecture = (char *)(uintptr_t)archs[c->arch];
    m->context_tokens = rt_nodes_context(r, (uint32_t)c->n_ctx);
    m->vocab_size = (uint32_t)c->n_vocab;
    m->n_eos_tokens = (size_t)c->n_eos;
    m->eos_tokens = (int32_t *)(uintptr_t)c->eos;
    m->has_chat_template = rt_model_has_template(r->model);
}

static void get_model(struct bt_rpc_call *call, const ProtobufCMessage *msg)
{
    const Baton__V1__GetModelRequest *m = (const void *)msg;
    struct rt_router *r = router_of(call);
    Baton__V1__ModelInfo out;
    struct bt_err err = {0};
    char hex[65];
    int rc = check_model(r, m->model, &err);

    if (rc < 0) {
        refuse(call, rc, &err);
        return;
    }
    fill_model(r, &out, hex);
    bt_rpc_call_reply(call, &out.base);
}

struct node_row {
    Baton__V1__NodeInfo info;
    char hex[65];
};

static void get_server(struct bt_rpc_call *call, const ProtobufCMessage *msg)
{
    struct rt_router *r = router_of(call);
    Baton__V1__ServerInfo out = BATON__V1__SERVER_INFO__INIT;
    Baton__V1__CacheInfo cache;
    Baton__V1__AdmissionInfo admission;
    Baton__V1__ModelInfo model, *models[] = {&model};
    Baton__V1__CanaryInfo canary[RT_ROLE_BOTH + 1], *canaries[RT_ROLE_BOTH + 1];
    size_t n_rows = r->n_nodes + rt_stores_n(r), n = 0;
    struct node_row *rows = bt_calloc(n_rows + 1, sizeof(*rows));
    Baton__V1__NodeInfo **ptrs = bt_calloc(n_rows + 1, sizeof(*ptrs));
    struct timespec now;
    char hex[65];

    if (!rows || !ptrs) {
        refuse(call, BT_E_NOMEM, NULL);
    } else {
        bt_list_for_each (it, &r->nodes) {
            if (rt_store_has(r, BT_LIST_ENTRY(it, struct rt_node, link))) {
                continue; /* its row comes below */
            }
            rt_node_info(BT_LIST_ENTRY(it, struct rt_node, link), &rows[n].info, rows[n].hex);
            ptrs[n] = &rows[n].info;
            n++;
        }
        for (size_t i = 0; i < rt_stores_n(r); i++, n++) {
            rt_store_info(r, i, &rows[n].info);
            ptrs[n] = &rows[n].info;
        }
        fill_model(r, &model, hex);
        out.version = (char *)(uintptr_t)BT_VERSION;
        out.n_models = 1;
        out.models = models;
        out.n_nodes = n;
        out.nodes = ptrs;
        out.requests_active = (uint32_t)r->n_requests;
        rt_cache_fill_info(r, &cache);
        out.cache = &cache;
        baton__v1__admission_info__init(&admission);
        admission.queued = rt_fair_queued(r->admit.fair);
        admission.queued_s = rt_fair_queued_s(r->admit.fair);
        admission.oldest_s = rt_fair_oldest_s(r->admit.fair, bt_loop_now(r->loop));
        admission.refused = r->admit.refused;
        out.admission = &admission;
        out.n_canaries = rt_orders_canaries(r, canary);
        out.canaries = canaries;
        for (size_t i = 0; i < out.n_canaries; i++) {
            canaries[i] = &canary[i];
        }
        out.membership = (char *)(uintptr_t)(r->membership_frozen ? "frozen" : "live");
        clock_gettime(CLOCK_REALTIME, &now);
        out.time_us = (uint64_t)now.tv_sec * 1000000 + (uint64_t)now.tv_nsec / 1000;
        bt_rpc_call_reply(call, &out.base);
    }
    free(rows);
    free(ptrs);
}

const struct bt_rpc_method rt_service_methods[] = {
    {.path = "/baton.v1.Baton/Generate",
     .request = &baton__v1__generate_request__descriptor,
     .access = BT_ACCESS_CLIENT,
     .response = &baton__v1__generate_response__descriptor,
     .message = generate,
     .closed = generate_closed},
    {.path = "/baton.v1.Baton/Tokenize",
     .request = &baton__v1__tokenize_request__descriptor,
     .access = BT_ACCESS_CLIENT,
     .response = &baton__v1__tokenize_response__descriptor,
     .message = tokenize,
     .closed = tokenize_closed},
    {.path = "/baton.v1.Baton/Detokenize",
     .request = &baton__v1__detokenize_request__descriptor,
     .access = BT_ACCESS_CLIENT,
     .response = &baton__v1__detokenize_response__descriptor,
     .message = detokenize},
    {.path = "/baton.v1.Baton/GetModel",
     .request = &baton__v1__get_model_request__descriptor,
     .access = BT_ACCESS_CLIENT,
     .response = &baton__v1__model_info__descriptor,
     .message = get_model},
    {.path = "/baton.v1.Baton/GetServer",
     .request = &baton__v1__get_server_request__descriptor,
     .access = BT_ACCESS_OPERATOR,
     .response = &baton__v1__server_info__descriptor,
     .message = get_server},
};
const size_t rt_service_n_methods = BT_ARRAY_LEN(rt_service_methods);
