/* The scheduler's transfers over kvstore/handoff. Events come on the net's thread; they are written
 * into the request and posted to the engine's mailbox. */
#include "kernels/engine/engine_int.h"

#include <stdio.h>

static void handle_xfer_done(struct bt_msg *msg, void *consumer)
{
    struct kn_seq *s = BT_CONTAINER_OF(msg, struct kn_seq, xfer_done);
    struct kn_engine *e = consumer;

    /* On the engine's thread: nobody is in a call on the object. */
    if (s->send) {
        kv_send_release(s->send);
        s->send = NULL;
    }
    if (s->recv) {
        s->transport = kv_recv_transport(s->recv);
        s->recv_bytes = kv_recv_bytes(s->recv);
        kv_recv_release(s->recv);
        s->recv = NULL;
    }
    kn_sched_xfer_done(e->sched, s, s->xfer_rc, s->xfer_text, &s->xfer_first);
}

/* [net] */
static void on_ticketed(void *arg)
{
    struct kn_seq *s = arg;
    struct kn_engine *e = s->engine;

    atomic_store_explicit(&s->ticketed, true, memory_order_relaxed);
    bt_eventfd_wake(&e->wake_fd); /* it may force its way now */
}

/* [net] Last touch: the engine may free the request as soon as the message is in. */
static void post_done(struct kn_seq *s, int rc, const char *msg)
{
    struct kn_engine *e = s->engine;

    s->xfer_rc = rc;
    snprintf(s->xfer_text, sizeof(s->xfer_text), "%s", msg ? msg : "");
    s->xfer_done.handle = handle_xfer_done;
    BT_BUG_ON(!bt_mailbox_push(&e->mailbox, &s->xfer_done));
}

/* [net] */
static void on_send_done(void *arg, int rc, const char *msg)
{
    post_done(arg, rc, msg);
}

/* [net] */
static void on_recv_done(void *arg, int rc, const char *msg, const struct kv_first *tokens)
{
    struct kn_seq *s = arg;

    if (tokens) {
        s->xfer_first = *tokens;
    }
    post_done(s, rc, msg);
}

static int send_create(void *arg, struct kn_seq *s, struct bt_err *err)
{
    struct kn_engine *e = arg;
    struct kv_send_cfg cfg = {
        .id = s->handoff,
        .n_tokens = kn_seq_target(s),
        .events = {.arg = s, .ticketed = on_ticketed, .done = on_send_done},
    };

    return kv_send_create(e->handoff, &cfg, &s->send, err);
}

static void send_pages(void *arg, struct kn_seq *s)
{
    kv_send_set_pages(s->send, 0, s->pages, s->n_pages);
}

static void send_cached(void *arg, struct kn_seq *s, uint32_t n)
{
    const struct kn_engine *e = arg;

    for (int layer = 0; layer < kv_pool_layout(e->pool)->n_layers; layer++) {
        kv_send_progress(s->send, 0, n, layer);
    }
}

static void send_finish(void *arg, struct kn_seq *s)
{
    struct kv_first first = {.n_tokens = 1, .ids = {s->ids[s->n_prompt + s->n_answered]}};

    kv_send_finish(s->send, &first);
}

static bool send_rewind(void *arg, struct kn_seq *s)
{
    if (!kv_send_rewind(s->send)) {
        return false;
    }
    atomic_store_explicit(&s->ticketed, false, memory_order_relaxed);
    return true;
}

static void send_abort(void *arg, struct kn_seq *s, int rc)
{
    kv_send_abort(s->send, rc);
}

static int recv_create(void *arg, struct kn_seq *s, struct bt_err *err)
{
    struct kn_engine *e = arg;
    uint32_t n_have = s->n_computed / (uint32_t)kv_pool_layout(e->pool)->page_tokens;
    struct kv_recv_cfg cfg = {
        .id = s->handoff,
        .peer_name = s->peer_name,
        .peer_incarnation = s->peer_incarnation,
        .peer_address = s->peer_address,
        .n_tokens = s->n_prompt + s->n_answered,
        .n_have = s->n_computed, /* whole blocks */
        .pages = s->pages + n_have,
        .n_pages = s->n_pages - n_have,
        .events = {.arg = s, .done = on_recv_done},
    };

    if (s->via_name) { /* the store asks the peer */
        cfg.origin = (struct kv_origin){s->peer_name, s->peer_incarnation, s->peer_address};
        cfg.peer_name = s->via_name;
        cfg.peer_incarnation = s->via_incarnation;
        cfg.peer_address = s->via_address;
        if (e->cfg.block_tokens > 0) {
            cfg.ids = s->ids;
            cfg.block_tokens = (uint32_t)e->cfg.block_tokens;
            cfg.root = s->root;
        }
    }
    return kv_recv_create(e->handoff, &cfg, &s->recv, err);
}

static void recv_abort(void *arg, struct kn_seq *s, int rc)
{
    kv_recv_abort(s->recv, rc);
}

const struct kn_xfer_ops kn_xfer_handoff = {
    .send_create = send_create,
    .send_pages = send_pages,
    .send_cached = send_cached,
    .send_finish = send_finish,
    .send_rewind = send_rewind,
    .send_abort = send_abort,
    .recv_create = recv_create,
    .recv_abort = recv_abort,
};

/* A row above blocks that were still on their way when the step began: D hears of them when they
 * are whole, and of the row after them. */
static void layer_done_ahead(struct kn_engine *e, const struct kn_plan_row *row, int layer)
{
    struct kn_seq *s = kn_sched_at(e->sched, row->slot);
    int from = layer;

    if (!s->load_told) {
        if (!kn_sched_loads_whole(e->sched, s)) {
            return;
        }
        s->load_told = true;
        send_cached(e, s, row->pos);
        from = 0;
    }
    for (; from <= layer; from++) {
        kv_send_progress(s->send, row->pos, row->n_tokens, from);
    }
}

void kn_xfer_step_done(struct kn_engine *e, const struct kn_step_plan *plan)
{
    int last = kv_pool_layout(e->pool)->n_layers - 1;

    for (uint32_t i = plan->n_rows - plan->n_loading; i < plan->n_rows; i++) {
        const struct kn_plan_row *row = &plan->rows[i];
        const struct kn_seq *s = kn_sched_at(e->sched, row->slot);

        if (s->leg == KN_LEG_PREFILL && s->send && !s->load_told) {
            layer_done_ahead(e, row, last);
        }
    }
}

void kn_xfer_layer_done(struct kn_engine *e, const struct kn_step_plan *plan, int layer)
{
    for (uint32_t i = 0; i < plan->n_rows; i++) {
        const struct kn_plan_row *row = &plan->rows[i];
        const struct kn_seq *s = kn_sched_at(e->sched, row->slot);

        if (s->leg != KN_LEG_PREFILL || !s->send) {
            continue;
        }
        if (row->loading) {
            layer_done_ahead(e, row, layer);
        } else {
            kv_send_progress(s->send, row->pos, row->n_tokens, layer);
        }
    }
}
