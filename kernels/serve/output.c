/* Messages to routers. Runs on the loop thread.
 *
 * The message of a step is built in one block whose size is counted first; it is serialised inside
 * bt_rpc_call_send, so the block and the engine's step may go right after. */
#include "kernels/serve/serve_int.h"

#include "common/base/buf.h"
#include "common/thr/time.h"
#include "kvstore/keeper/client.h"

#include <stdlib.h>

/* Carves aligned arrays out of one block. */
struct block {
    char *p;
    size_t used, cap;
};

static size_t padded(size_t bytes)
{
    return (bytes + 15) & ~(size_t)15;
}

static void *carve(struct block *b, size_t n, size_t size)
{
    void *p = b->p + b->used;

    b->used += padded(n * size);
    BT_BUG_ON(b->used > b->cap);
    return p;
}

static size_t message_bytes(const struct kn_session *ses)
{
    size_t bytes =
        ses->n_outputs *
            (padded(sizeof(Baton__V1__StreamOutput)) + padded(sizeof(void *)) +
             padded(sizeof(Baton__V1__StreamError)) + padded(sizeof(Baton__V1__LegTimes)) + 64) +
        64;

    for (size_t i = 0; i < ses->n_outputs; i++) {
        const struct kn_output *o = ses->outputs[i].output;

        bytes += padded(o->n_tokens * sizeof(int32_t));
        if (!ses->outputs[i].stream->logprobs) {
            continue;
        }
        bytes += padded(o->n_tokens * sizeof(Baton__V1__TokenLogprob)) +
                 padded(o->n_tokens * sizeof(void *));
        for (uint32_t t = 0; t < o->n_tokens; t++) {
            size_t n = (size_t)o->tokens[t].n_top;

            bytes += padded(n * sizeof(Baton__V1__TopLogprob)) + padded(n * sizeof(void *));
        }
    }
    return bytes;
}

static void put_logprob(struct block *b, const struct kn_token *t, Baton__V1__TokenLogprob *lp)
{
    size_t n = (size_t)t->n_top;
    Baton__V1__TopLogprob *tops = carve(b, n, sizeof(*tops));

    baton__v1__token_logprob__init(lp);
    lp->logprob = t->logprob;
    lp->n_top = n;
    lp->top = carve(b, n, sizeof(*lp->top));
    for (size_t i = 0; i < n; i++) {
        baton__v1__top_logprob__init(&tops[i]);
        tops[i].token = t->top[i].id;
        tops[i].logprob = t->top[i].logprob;
        lp->top[i] = &tops[i];
    }
}

static Baton__V1__FinishReason finish_of(enum kn_finish f)
{
    switch (f) {
    case KN_FINISH_STOP:
        return BATON__V1__FINISH_REASON__FINISH_STOP;
    case KN_FINISH_LENGTH:
        return BATON__V1__FINISH_REASON__FINISH_LENGTH;
    case KN_FINISH_NONE:
        break;
    }
    return BATON__V1__FINISH_REASON__FINISH_NONE;
}

static void put_times(const struct kn_times *t, Baton__V1__LegTimes *m)
{
    baton__v1__leg_times__init(m);
    m->queue_us = t->queue_ns / 1000;
    m->load_us = t->load_ns / 1000;
    m->wait_us = t->wait_ns / 1000;
    m->compute_us = t->compute_ns / 1000;
    m->pool_tokens = t->tier_tokens[KV_TIER_POOL];
    m->host_tokens = t->tier_tokens[KV_TIER_HOST];
    m->disk_tokens = t->tier_tokens[KV_TIER_DISK];
    m->store_tokens = t->tier_tokens[KV_TIER_STORE];
    m->transport = (char *)(uintptr_t)(t->transport ? t->transport : "");
    m->bytes = t->bytes;
}

static void
put_output(struct block *b, const struct kn_session_output *so, Baton__V1__StreamOutput *m)
{
    const struct kn_output *o = so->output;
    Baton__V1__TokenLogprob *lps;

    baton__v1__stream_output__init(m);
    m->stream_id = so->stream->stream_id;
    m->offset = o->offset;
    m->n_tokens = o->n_tokens;
    m->tokens = carve(b, o->n_tokens, sizeof(*m->tokens));
    for (uint32_t t = 0; t < o->n_tokens; t++) {
        m->tokens[t] = o->tokens[t].id;
    }
    if (so->stream->logprobs && o->n_tokens > 0) {
        lps = carve(b, o->n_tokens, sizeof(*lps));
        m->logprobs = carve(b, o->n_tokens, sizeof(*m->logprobs));
        m->n_logprobs = o->n_tokens;
        for (uint32_t t = 0; t < o->n_tokens; t++) {
            put_logprob(b, &o->tokens[t], &lps[t]);
            m->logprobs[t] = &lps[t];
        }
    }
    m->finish = finish_of(o->finish);
    m->handed_over = o->handed_over;
    m->cached_tokens = o->cached_tokens;
    if (o->timed) {
        m->times = carve(b, 1, sizeof(*m->times));
        put_times(&o->times, m->times);
    }
    if (o->rc < 0) {
        m->error = carve(b, 1, sizeof(*m->error));
        baton__v1__stream_error__init(m->error);
        m->error->rc = o->rc;
        m->error->message = (char *)(uintptr_t)(o->err_msg[0] ? o->err_msg : bt_rc_text(o->rc));
        m->error->retryable = kn_rc_retryable(o->rc);
    }
}

static int send_step(struct kn_session *ses, Baton__V1__StepOutput *step)
{
    Baton__V1__NodeMessage m = BATON__V1__NODE_MESSAGE__INIT;

    m.kind_case = BATON__V1__NODE_MESSAGE__KIND_STEP;
    m.step = step;
    return bt_rpc_call_send(ses->call, &m.base);
}

int kn_output_send_step(struct kn_session *ses)
{
    Baton__V1__StepOutput step = BATON__V1__STEP_OUTPUT__INIT;
    Baton__V1__StreamOutput *outs;
    struct block b = {.cap = message_bytes(ses)};
    int rc;

    b.p = malloc(b.cap);
    if (!b.p) {
        return BT_E_NOMEM;
    }
    outs = carve(&b, ses->n_outputs, sizeof(*outs));
    step.n_outputs = ses->n_outputs;
    step.outputs = carve(&b, ses->n_outputs, sizeof(*step.outputs));
    for (size_t i = 0; i < ses->n_outputs; i++) {
        put_output(&b, &ses->outputs[i], &outs[i]);
        step.outputs[i] = &outs[i];
    }
    rc = send_step(ses, &step);
    free(b.p);
    return rc;
}

int kn_output_send_error(struct kn_session *ses, uint64_t stream_id, int rc, const char *text)
{
    Baton__V1__StepOutput step = BATON__V1__STEP_OUTPUT__INIT;
    Baton__V1__StreamOutput out = BATON__V1__STREAM_OUTPUT__INIT, *outs[] = {&out};
    Baton__V1__StreamError e = BATON__V1__STREAM_ERROR__INIT;

    e.rc = rc;
    e.message = (char *)(uintptr_t)text; /* read only by the serialiser */
    e.retryable = kn_rc_retryable(rc);
    out.stream_id = stream_id;
    out.error = &e;
    step.n_outputs = 1;
    step.outputs = outs;
    return send_step(ses, &step);
}

int kn_output_send_welcome(struct kn_session *ses)
{
    Baton__V1__NodeMessage m = BATON__V1__NODE_MESSAGE__INIT;
    Baton__V1__NodeWelcome w = BATON__V1__NODE_WELCOME__INIT;
    const struct kn_serve *s = ses->serve;
    const struct bt_model_config *mc = kn_engine_config(s->engine);
    const struct kv_layout *layout = kv_pool_layout(kn_engine_pool(s->engine));

    w.wire_version = ses->version;
    w.name = (char *)(uintptr_t)s->name;
    w.incarnation = s->incarnation;
    w.role = (char *)(uintptr_t)s->role->name;
    w.model_name = (char *)(uintptr_t)mc->name;
    w.model_digest = (ProtobufCBinaryData){32, (uint8_t *)(uintptr_t)s->model_digest};
    w.kv_format = (ProtobufCBinaryData){32, (uint8_t *)(uintptr_t)s->kv_format};
    w.numerics = (char *)(uintptr_t)kn_engine_numerics(s->engine);
    w.weight_epoch = KN_WEIGHT_EPOCH;
    w.net_address = (char *)(uintptr_t)(s->handoff ? kv_handoff_address(s->handoff) : "");
    w.context_tokens = (uint32_t)kn_engine_max_ctx(s->engine);
    w.page_tokens = (uint32_t)layout->page_tokens;
    w.pages_total = layout->n_pages;
    w.block_tokens = s->conf->prefix_cache ? (uint32_t)s->conf->block_tokens : 0;
    w.heartbeat_ms = (uint32_t)(s->conf->heartbeat_ns / 1000000);
    w.version = (char *)(uintptr_t)(s->conf->release[0] ? s->conf->release : BT_VERSION);
    m.kind_case = BATON__V1__NODE_MESSAGE__KIND_WELCOME;
    m.welcome = &w;
    return bt_rpc_call_send(ses->call, &m.base);
}

int kn_output_send_load(struct kn_session *ses, bool heartbeat)
{
    Baton__V1__NodeMessage m = BATON__V1__NODE_MESSAGE__INIT;
    Baton__V1__NodeLoad l = BATON__V1__NODE_LOAD__INIT;
    struct kn_serve *s = ses->serve;
    struct kn_engine_stats st = kn_engine_stats(s->engine);
    struct kv_pool_stats pool = kv_pool_stats(kn_engine_pool(s->engine));
    struct kn_cache_load buf;
    struct kn_op_rows ops;
    uint64_t now = bt_now_ns();

    l.pages_free = kv_pool_stats_room(&pool);
    l.requests_waiting = st.waiting;
    l.requests_running = st.running;
    l.tokens_waiting = st.tokens_waiting;
    l.starts = ses->n_starts;
    l.pages_unused = pool.n_free;
    if (st.oldest_ns > 0 && now > st.oldest_ns) {
        l.oldest_ms = (uint32_t)BT_MIN((now - st.oldest_ns) / BT_NS_PER_MS, UINT64_C(1) << 31);
    }
    kn_cache_fill_load(s, &buf, &l);
    l.n_ops = heartbeat ? kn_ops_fill(&ops) : 0;
    l.ops = ops.ptrs;
    l.draining = s->state != KN_SERVE_READY;
    m.kind_case = BATON__V1__NODE_MESSAGE__KIND_LOAD;
    m.load = &l;
    return bt_rpc_call_send(ses->call, &m.base);
}

void kn_output_reply_status(struct kn_serve *s, struct bt_rpc_call *call)
{
    Baton__V1__NodeStatus m = BATON__V1__NODE_STATUS__INIT;
    struct kn_engine_stats st = kn_engine_stats(s->engine);
    struct kv_pool_stats pool = kv_pool_stats(kn_engine_pool(s->engine));
    struct kv_handoff_stats ho = {0};
    struct kn_op_rows ops;
    struct timespec now;

    if (s->handoff) {
        ho = kv_handoff_stats(s->handoff);
    }
    m.name = s->name;
    m.incarnation = s->incarnation;
    m.role = (char *)(uintptr_t)s->role->name;
    m.state = (char *)(uintptr_t)(s->state == KN_SERVE_READY ? "ready" : "draining");
    m.pages_total = pool.n_pages;
    m.pages_free = kv_pool_stats_room(&pool);
    m.pages_cached = pool.n_cached;
    m.pages_sequences = pool.n_seq + pool.n_index - pool.n_cached;
    m.pages_transfers = pool.n_transfer;
    m.requests_waiting = st.waiting;
    m.requests_running = st.running;
    m.handoffs_active = ho.sends + ho.recvs;
    m.tokens_computed = st.tokens_computed;
    m.tokens_generated = st.tokens_generated;
    m.handoff_bytes = ho.bytes;
    m.handoff_connections = ho.connections;
    m.steps = st.steps;
    m.tokens_cached = st.tokens_cached;
    m.blocks_evicted = st.blocks_evicted;
    m.key_collisions = st.key_collisions;
    m.blocks_adopted = st.blocks_adopted;
    m.blocks_bad = st.blocks_bad;
    m.keeper = (char *)(uintptr_t)(!s->keeper                     ? "none"
                                   : kv_keeper_has_all(s->keeper) ? "holds"
                                                                  : "away");
    m.tokens_cached_pool = st.tier_tokens[KV_TIER_POOL];
    m.tokens_cached_host = st.tier_tokens[KV_TIER_HOST];
    m.tokens_cached_disk = st.tier_tokens[KV_TIER_DISK];
    m.tokens_cached_store = st.tier_tokens[KV_TIER_STORE];
    m.loads = st.loads;
    m.loads_given_up = st.loads_given_up;
    m.loads_short = st.loads_short;
    m.load_wait_us = st.load_wait_ns / 1000;
    m.preemptions = st.preemptions;
    m.overtakes = st.overtakes;
    m.swapped = st.swapped;
    m.resumed = st.resumed;
    if (s->tiers) {
        struct kv_tiers_stats t = kv_tiers_stats(s->tiers);

        m.tier_host_bytes = t.host.bytes;
        m.tier_disk_bytes = t.disk.bytes;
        m.tier_bad_blocks = t.host.bad + t.disk.bad;
        m.tier_pins = t.n_pins;
        m.tier_write_errors = t.disk.write_errors;
        m.tier_host_load_rate = t.host.bytes_per_s;
        m.tier_disk_load_rate = t.disk.bytes_per_s;
    }
    kn_store_status(s, &m);
    m.n_ops = kn_ops_fill(&ops);
    m.ops = ops.ptrs;
    m.numerics = (char *)(uintptr_t)kn_engine_numerics(s->engine);
    m.transports = s->conf->net_transports;
    m.sessions = s->n_sessions;
    clock_gettime(CLOCK_REALTIME, &now);
    m.time_us = (uint64_t)now.tv_sec * 1000000 + (uint64_t)now.tv_nsec / 1000;
    bt_rpc_call_reply(call, &m.base);
}
