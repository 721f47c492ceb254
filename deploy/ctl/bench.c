/* batonctl bench: a simple load against a cluster: so many requests at a time of prompts of random
 * tokens, and what a client sees of them. For a real measurement use a load generator of its own;
 * this one tells quickly whether a cluster does what it should. */
#include "deploy/ctl/show.h"

#include "common/thr/time.h"

#include <stdlib.h>

struct bench;

struct slot { /* one request at a time */
    struct bench *b;
    uint64_t begin_ns, first_ns, last_ns;
    uint32_t n_tokens;
    bool whole;
};

struct bench {
    const struct ctl_args *a;
    struct bt_loop *loop;
    struct bt_rpc_channel *channel;
    uint32_t n_vocab;
    uint64_t seed, begin_ns, end_ns;
    int64_t n_started, n_done, n_failed, tokens;
    double *first_s, *token_s, *total_s; /* [n_ok], [n_tpot], [n_ok] */
    size_t n_ok, n_tpot;
    int code;     /* of the first failure */
    bool reached; /* there is a connection */
    bool lost;    /* there was none for a request: no more are begun */
    struct slot *slots;
};

static uint64_t rnd(struct bench *b)
{
    b->seed ^= b->seed << 13;
    b->seed ^= b->seed >> 7;
    b->seed ^= b->seed << 17;
    return b->seed;
}

static void start_one(struct slot *s);

static void on_message(struct bt_rpc_client_call *call, const ProtobufCMessage *msg)
{
    const Baton__V1__GenerateResponse *m = (const void *)msg;
    struct slot *s = bt_rpc_client_user(call);

    if (m->n_tokens > 0) {
        s->last_ns = bt_now_ns();
        s->first_ns = s->first_ns ? s->first_ns : s->last_ns;
        s->n_tokens += (uint32_t)m->n_tokens;
    }
    s->whole = s->whole || m->finish != BATON__V1__FINISH_REASON__FINISH_NONE;
}

static void on_state(void *user, enum bt_rpc_conn_state state)
{
    ((struct bench *)user)->reached = state == BT_RPC_CONN_READY;
}

/* UNAVAILABLE is the router's own word as long as there is a connection. */
static int code_of(const struct bench *b, int status)
{
    return status == BT_RPC_UNAVAILABLE         ? b->reached ? CTL_FAILED : CTL_UNREACHABLE
           : status == BT_RPC_DEADLINE_EXCEEDED ? CTL_TIMEOUT
           : status == BT_RPC_UNAUTHENTICATED || status == BT_RPC_PERMISSION_DENIED ? CTL_DENIED
                                                                                    : CTL_FAILED;
}

static void on_closed(struct bt_rpc_client_call *call, int status, const char *text)
{
    struct slot *s = bt_rpc_client_user(call);
    struct bench *b = s->b;

    b->n_done++;
    if (status == BT_RPC_OK && s->whole && s->first_ns) {
        b->first_s[b->n_ok] = (double)(s->first_ns - s->begin_ns) / 1e9;
        b->total_s[b->n_ok++] = (double)(s->last_ns - s->begin_ns) / 1e9;
        if (s->n_tokens > 1) {
            b->token_s[b->n_tpot++] = (double)(s->last_ns - s->first_ns) / 1e9 / (s->n_tokens - 1);
        }
        b->tokens += s->n_tokens;
    } else {
        int code = code_of(b, status);

        b->lost = b->lost || code == CTL_UNREACHABLE;
        if (b->n_failed++ == 0) {
            fprintf(stderr, "batonctl: %s: %s\n", bt_rpc_status_name(status), text);
            b->code = code;
        }
    }
    if (b->n_started < b->a->requests && !b->lost) {
        start_one(s);
    } else if (b->n_done == b->n_started) {
        bt_loop_stop(b->loop);
    }
}

static void start_one(struct slot *s)
{
    static const struct bt_rpc_client_events events = {.message = on_message, .closed = on_closed};
    struct bench *b = s->b;
    Baton__V1__GenerateRequest m = BATON__V1__GENERATE_REQUEST__INIT;
    Baton__V1__Stopping stopping = BATON__V1__STOPPING__INIT;
    Baton__V1__TokenIds tokens = BATON__V1__TOKEN_IDS__INIT;
    struct bt_rpc_client_args ca = {.path = "/baton.v1.Baton/Generate",
                                    .response = &baton__v1__generate_response__descriptor,
                                    .events = &events,
                                    .user = s,
                                    .deadline_ns = b->end_ns,
                                    .request = &m.base,
                                    .half_close = true};
    size_t n = (size_t)b->a->prompt_tokens;
    int32_t *ids = calloc(n, sizeof(*ids));
    struct bt_rpc_client_call *call;
    struct bt_err err = {0};
    int rc = ids ? BT_OK : BT_E_NOMEM;

    for (size_t i = 0; ids && i < n; i++) {
        ids[i] = (int32_t)(rnd(b) % b->n_vocab);
    }
    tokens.n_ids = n;
    tokens.ids = ids;
    m.input_case = BATON__V1__GENERATE_REQUEST__INPUT_TOKENS;
    m.tokens = &tokens;
    stopping.max_tokens__case = BATON__V1__STOPPING__MAX_TOKENS__MAX_TOKENS;
    stopping.max_tokens = b->a->max_tokens ? (uint32_t)b->a->max_tokens : 32;
    stopping.ignore_eos = true;
    m.stopping = &stopping;
    *s = (struct slot){.b = b, .begin_ns = bt_now_ns()};
    b->n_started++;
    if (rc == BT_OK) {
        rc = bt_rpc_client_start(b->channel, &ca, &call, &err);
    }
    free(ids);
    if (rc < 0) {
        fprintf(stderr, "batonctl: %s\n", bt_err_msg(&err, rc));
        b->n_done++;
        b->n_failed++;
        b->code = CTL_FAILED;
    }
}

/* --- report ---------------------------------------------------------------------------------- */

static int by_value(const void *x, const void *y)
{
    double a = *(const double *)x, b = *(const double *)y;

    return a < b ? -1 : a > b;
}

static const double ranks[] = {0.5, 0.9, 0.99};

static double at(const double *v, size_t n, double q)
{
    return n ? v[BT_MIN((size_t)(q * (double)n), n - 1)] : 0;
}

static int report(struct bench *b)
{
    const struct {
        const char *name, *title;
        double *v;
        size_t n;
    } rows[] = {{"first_token_ms", "first token", b->first_s, b->n_ok},
                {"token_ms", "each token", b->token_s, b->n_tpot},
                {"total_ms", "whole answer", b->total_s, b->n_ok}};
    double s = (double)(bt_now_ns() - b->begin_ns) / 1e9;
    struct bt_buf buf = {0};
    struct bt_jsonw w = {.b = &buf};

    for (size_t i = 0; i < BT_ARRAY_LEN(rows); i++) {
        qsort(rows[i].v, rows[i].n, sizeof(double), by_value);
    }
    if (b->a->output == CTL_TABLE) {
        printf("%lld requests, %lld failed, %.1f s: %.2f requests/s, %.1f tokens/s\n",
               (long long)b->n_done, (long long)b->n_failed, s, (double)b->n_ok / s,
               (double)b->tokens / s);
        printf("%-14s %12s %12s %12s\n", "ms", "P50", "P90", "P99");
        for (size_t i = 0; i < BT_ARRAY_LEN(rows); i++) {
            printf("%-14s", rows[i].title);
            for (size_t k = 0; k < BT_ARRAY_LEN(ranks); k++) {
                printf(" %12.2f", at(rows[i].v, rows[i].n, ranks[k]) * 1e3);
            }
            printf("\n");
        }
        return CTL_OK;
    }
    bt_jw_open(&w, NULL, '{');
    bt_jw_i64(&w, "requests", b->n_done);
    bt_jw_i64(&w, "failed", b->n_failed);
    bt_jw_f64(&w, "seconds", s, 3);
    bt_jw_f64(&w, "requests_per_s", (double)b->n_ok / s, 3);
    bt_jw_f64(&w, "tokens_per_s", (double)b->tokens / s, 3);
    for (size_t i = 0; i < BT_ARRAY_LEN(rows); i++) {
        bt_jw_open(&w, rows[i].name, '{');
        bt_jw_f64(&w, "p50", at(rows[i].v, rows[i].n, 0.5) * 1e3, 3);
        bt_jw_f64(&w, "p90", at(rows[i].v, rows[i].n, 0.9) * 1e3, 3);
        bt_jw_f64(&w, "p99", at(rows[i].v, rows[i].n, 0.99) * 1e3, 3);
        bt_jw_close(&w, '}');
    }
    bt_jw_close(&w, '}');
    return ctl_print_buf(&w);
}

static int ask_vocab(const struct ctl_args *a, uint32_t *ret)
{
    Baton__V1__GetModelRequest m = BATON__V1__GET_MODEL_REQUEST__INIT;
    struct ctl_ask ask = {.path = "/baton.v1.Baton/GetModel",
                          .request = &m.base,
                          .response = &baton__v1__model_info__descriptor,
                          .deadline_ns = bt_deadline_ns(10 * BT_NS_PER_S)};
    ProtobufCMessage *got;
    int code = ctl_ask(a->router, &ask, &got);

    if (code == CTL_OK) {
        *ret = BT_MAX(((const Baton__V1__ModelInfo *)(const void *)got)->vocab_size, 1u);
        protobuf_c_message_free_unpacked(got, NULL);
    }
    return code;
}

static int run(struct bench *b)
{
    int64_t n = BT_MIN(b->a->concurrency, b->a->requests);
    struct bt_rpc_channel_config cc = {
        .sec = ctl_access(CTL_ROUTER), .on_state = on_state, .user = b};
    struct bt_err err = {0};
    int rc = bt_loop_create(&b->loop, &err);

    if (rc == BT_OK) {
        rc = bt_rpc_channel_create(b->loop, b->a->router, &cc, &b->channel, &err);
    }
    if (rc < 0) {
        fprintf(stderr, "batonctl: %s\n", bt_err_msg(&err, rc));
        bt_loop_destroy(b->loop);
        return CTL_FAILED;
    }
    b->begin_ns = bt_now_ns();
    for (int64_t i = 0; i < n; i++) {
        b->slots[i].b = b;
        start_one(&b->slots[i]);
    }
    if (b->n_done < b->n_started) {
        bt_loop_run(b->loop);
    }
    rc = report(b);
    bt_rpc_channel_destroy(b->channel);
    bt_loop_destroy(b->loop);
    return b->n_failed > 0 ? (b->code ? b->code : CTL_FAILED) : rc;
}

int ctl_bench(const struct ctl_args *a)
{
    struct bench b = {.a = a, .seed = bt_now_ns() | 1, .end_ns = bt_deadline_ns(a->timeout_ns)};
    size_t n = (size_t)a->requests;
    int code = ask_vocab(a, &b.n_vocab);

    if (code != CTL_OK) {
        return code;
    }
    b.first_s = calloc(n, sizeof(double));
    b.token_s = calloc(n, sizeof(double));
    b.total_s = calloc(n, sizeof(double));
    b.slots = calloc((size_t)a->concurrency, sizeof(*b.slots));
    code = b.first_s && b.token_s && b.total_s && b.slots ? run(&b) : CTL_FAILED;
    free(b.first_s);
    free(b.token_s);
    free(b.total_s);
    free(b.slots);
    return code;
}
