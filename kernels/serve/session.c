/* Sessions with routers: the calls of baton.v1.Node. Runs on the loop thread.
 *
 * Invariants: a stream is in serve->streams until the engine's last output of it, and in its
 * session's map as long as both live. The end of a session cancels its streams at once; a router
 * that does not read loses its session when its output passes the byte limit, which touches no
 * other session. */
#include "kernels/serve/serve_int.h"

#include "common/base/buf.h"
#include "common/obs/log.h"
#include "proto/wire/session.h"

#include <ctype.h>
#include <stdlib.h>

static void end_session(struct kn_session *ses, int status, const char *text)
{
    if (!ses->closing) {
        ses->closing = true;
        bt_rpc_call_finish(ses->call, status, text);
    }
}

void kn_session_send_failed(struct kn_session *ses, int rc)
{
    if (ses->closing || rc == BT_E_CANCELLED) {
        return; /* closed follows */
    }
    BT_WARN("session_slow", "router=%s queued_bytes=%zu rc=%s msg=\"router does not read\"",
            ses->router, bt_rpc_call_queued_bytes(ses->call), bt_rc_name(rc));
    end_session(ses, BT_RPC_RESOURCE_EXHAUSTED, "output was not read");
}

static void check_sent(struct kn_session *ses, int rc)
{
    if (rc < 0) {
        kn_session_send_failed(ses, rc);
    }
}

/* Lets the engine finish the session's streams without anybody listening. */
static void orphan_streams(struct kn_session *ses)
{
    struct kn_stream *st;
    size_t pos = 0;

    while ((st = bt_map_next(&ses->streams, &pos, NULL))) {
        st->session = NULL;
        kn_engine_cancel(ses->serve->engine, st->tag);
    }
    bt_map_fini(&ses->streams);
    bt_map_init(&ses->streams);
}

static void on_open(struct bt_rpc_call *call)
{
    struct kn_serve *s = bt_rpc_call_service_user(call);
    struct kn_session *ses;

    if (s->state != KN_SERVE_READY) {
        bt_rpc_call_finish(call, BT_RPC_UNAVAILABLE, "node is draining");
        return;
    }
    ses = s->n_sessions < KN_MAX_SESSIONS ? bt_calloc(1, sizeof(*ses)) : NULL;
    if (!ses) {
        bt_rpc_call_finish(call, BT_RPC_RESOURCE_EXHAUSTED, "too many sessions");
        return;
    }
    ses->serve = s;
    ses->call = call;
    ses->follow = (struct kv_follow){
        .log = s->cache.log, .call = call, .most_queued = s->conf->max_queued_bytes / 4};
    bt_list_init(&ses->touched);
    bt_map_init(&ses->streams);
    bt_list_push_back(&s->sessions, &ses->link);
    s->n_sessions++;
    bt_rpc_call_set_user(call, ses);
    bt_rpc_call_send_headers(call);
}

/* A router that comes again has lost its old session, whatever the old connection says. Not at the
 * hello: it may only then find out that it has us by two addresses. */
static void replace_older(struct kn_session *ses)
{
    bt_list_for_each_safe (it, &ses->serve->sessions) {
        struct kn_session *old = BT_LIST_ENTRY(it, struct kn_session, link);

        if (old != ses && old->welcomed && old->incarnation == ses->incarnation &&
            strcmp(old->router, ses->router) == 0) {
            orphan_streams(old);
            end_session(old, BT_RPC_ABORTED, "the router has opened another session");
        }
    }
}

static void on_hello(struct kn_session *ses, const Baton__V1__RouterHello *hello)
{
    size_t n = strlen(hello->router);
    struct bt_err err = {0};

    if (ses->welcomed) {
        end_session(ses, BT_RPC_INVALID_ARGUMENT, "second hello");
        return;
    }
    if (wire_session_pick(hello->wire_version, hello->wire_version_max, &ses->version, &err) < 0) {
        end_session(ses, BT_RPC_FAILED_PRECONDITION, err.msg);
        return;
    }
    if (n == 0 || n >= sizeof(ses->router)) {
        end_session(ses, BT_RPC_INVALID_ARGUMENT, "the router's name must have 1 to 63 bytes");
        return;
    }
    for (size_t i = 0; i <= n; i++) { /* it goes into log lines */
        char c = hello->router[i];

        ses->router[i] = c == '\0' || isalnum((unsigned char)c) || strchr("-._:", c) ? c : '?';
    }
    ses->incarnation = hello->incarnation;
    ses->welcomed = true;
    BT_INFO("session", "router=%s version=%u peer=%s", ses->router, ses->version,
            bt_rpc_call_peer(ses->call));
    check_sent(ses, kn_output_send_welcome(ses));
    check_sent(ses, kn_output_send_load(ses, true));
}

static void on_start(struct kn_session *ses, const Baton__V1__StartRequest *req)
{
    struct bt_err err = {0};
    int rc = kn_start_stream(ses, req, &err);

    ses->n_starts++;
    if (rc < 0) {
        BT_DEBUG("refuse", "req=%.20s router=%s stream=%llu rc=%s msg=\"%s\"", req->request_id,
                 ses->router, (unsigned long long)req->stream_id, bt_rc_name(rc),
                 bt_err_msg(&err, rc));
        check_sent(ses, kn_output_send_error(ses, req->stream_id, rc, bt_err_msg(&err, rc)));
    }
}

static void on_message(struct bt_rpc_call *call, const ProtobufCMessage *msg)
{
    struct kn_session *ses = bt_rpc_call_user(call);
    const Baton__V1__RouterMessage *m = (const void *)msg;
    struct bt_err err = {0};
    struct kn_stream *st;

    if (!ses || ses->closing) {
        return;
    }
    if (!ses->welcomed && m->kind_case != BATON__V1__ROUTER_MESSAGE__KIND_HELLO) {
        end_session(ses, BT_RPC_INVALID_ARGUMENT, "the first message must be the hello");
        return;
    }
    switch ((int)m->kind_case) {
    case BATON__V1__ROUTER_MESSAGE__KIND_HELLO:
        on_hello(ses, m->hello);
        break;
    case BATON__V1__ROUTER_MESSAGE__KIND_START:
        on_start(ses, m->start);
        break;
    case BATON__V1__ROUTER_MESSAGE__KIND_TAKE:
        replace_older(ses);
        break;
    case BATON__V1__ROUTER_MESSAGE__KIND_FOLLOW:
        kn_cache_follow(ses, m->follow);
        break;
    case BATON__V1__ROUTER_MESSAGE__KIND_CANCEL:
        st = bt_map_get(&ses->streams, m->cancel->stream_id);
        if (st) { /* else it has just ended */
            kn_engine_cancel(ses->serve->engine, st->tag);
        }
        break;
    case BATON__V1__ROUTER_MESSAGE__KIND_RENEW:
        if (bt_rpc_call_renew(call, m->renew->authorization, &err) < 0) {
            BT_WARN("session", "router=%s msg=\"its new token is refused: %s\"", ses->router,
                    err.msg);
        } else {
            BT_INFO("session", "router=%s msg=\"it shows a new token\"", ses->router);
        }
        break;
    case BATON__V1__ROUTER_MESSAGE__KIND__NOT_SET:
    default: /* a later version's message */
        break;
    }
}

static void on_half_close(struct bt_rpc_call *call)
{
    struct kn_session *ses = bt_rpc_call_user(call);

    if (ses) {
        end_session(ses, BT_RPC_OK, NULL);
    }
}

static void on_drained(struct bt_rpc_call *call)
{
    struct kn_session *ses = bt_rpc_call_user(call);

    if (ses) {
        kn_cache_pump(ses);
    }
}

static void on_closed(struct bt_rpc_call *call, bool cancelled)
{
    struct kn_session *ses = bt_rpc_call_user(call);

    if (!ses) {
        return;
    }
    if (ses->welcomed) {
        BT_INFO("session_end", "router=%s streams=%zu cancelled=%d", ses->router, ses->streams.n,
                cancelled);
    }
    orphan_streams(ses);
    bt_map_fini(&ses->streams);
    bt_list_remove(&ses->link);
    bt_list_remove(&ses->touched);
    ses->serve->n_sessions--;
    kv_follow_end(&ses->follow);
    free(ses->outputs);
    free(ses);
}

static void on_status(struct bt_rpc_call *call, const ProtobufCMessage *msg)
{
    kn_output_reply_status(bt_rpc_call_service_user(call), call);
}

const struct bt_rpc_method kn_session_methods[] = {
    {.path = "/baton.v1.Node/Session",
     .request = &baton__v1__router_message__descriptor,
     .access = BT_ACCESS_CLUSTER,
     .response = &baton__v1__node_message__descriptor,
     .client_stream = true,
     .open = on_open,
     .message = on_message,
     .half_close = on_half_close,
     .drained = on_drained,
     .closed = on_closed},
    {.path = "/baton.v1.Node/GetStatus",
     .request = &baton__v1__node_status_request__descriptor,
     .access = BT_ACCESS_OPERATOR | BT_ACCESS_CLUSTER,
     .response = &baton__v1__node_status__descriptor,
     .message = on_status},
    {.path = "/baton.v1.Node/FlushCache",
     .request = &baton__v1__flush_cache_request__descriptor,
     .response = &baton__v1__flush_cache_response__descriptor,
     .message = kn_flush_call,
     .closed = kn_flush_closed},
};
const size_t kn_session_n_methods = BT_ARRAY_LEN(kn_session_methods);

static bool is_last(const struct kn_output *o)
{
    return o->rc < 0 || o->finish != KN_FINISH_NONE || o->handed_over;
}

static int add_output(struct kn_session *ses, struct kn_stream *st, const struct kn_output *o)
{
    if (ses->n_outputs == ses->cap_outputs) {
        size_t cap = ses->cap_outputs ? 2 * ses->cap_outputs : 16;
        void *p = realloc(ses->outputs, cap * sizeof(*ses->outputs));

        if (!p) {
            return BT_E_NOMEM;
        }
        ses->outputs = p;
        ses->cap_outputs = cap;
    }
    ses->outputs[ses->n_outputs++] = (struct kn_session_output){st, o};
    return BT_OK;
}

void kn_session_step(struct kn_serve *s, struct kn_step *take_step)
{
    struct bt_list touched, *it;
    bool ended = false, lost = false;

    bt_list_init(&touched);
    for (size_t i = 0; i < take_step->n_outputs; i++) {
        const struct kn_output *o = &take_step->outputs[i];
        struct kn_stream *st = bt_map_get(&s->streams, o->tag);
        struct kn_session *ses = st ? st->session : NULL;

        lost = lost || o->rc == BT_E_DEVICE_LOST;
        if (st) {
            st->n_tokens += o->n_tokens;
            if (o->timed) {
                st->times = o->times;
            }
        }
        if (ses && !ses->closing) {
            if (ses->n_outputs == 0) {
                bt_list_push_back(&touched, &ses->touched);
            }
            check_sent(ses, add_output(ses, st, o));
        }
    }
    while ((it = bt_list_pop_front(&touched))) {
        struct kn_session *ses = BT_LIST_ENTRY(it, struct kn_session, touched);

        check_sent(ses, kn_output_send_step(ses));
        ses->n_outputs = 0;
    }
    for (size_t i = 0; i < take_step->n_outputs; i++) {
        struct kn_stream *st;

        if (!is_last(&take_step->outputs[i])) {
            continue;
        }
        st = bt_map_del(&s->streams, take_step->outputs[i].tag);
        if (st) {
            kn_access_end(s, st, &take_step->outputs[i]);
        }
        if (st && st->session) {
            bt_map_del(&st->session->streams, st->stream_id);
        }
        free(st);
        ended = true;
    }
    kn_step_free(take_step);
    if (ended) {
        kn_serve_changed(s);
    }
    if (lost) {
        kn_serve_lost(s);
    }
}

void kn_session_broadcast_load(struct kn_serve *s, bool heartbeat)
{
    bt_list_for_each_safe (it, &s->sessions) {
        struct kn_session *ses = BT_LIST_ENTRY(it, struct kn_session, link);

        if (ses->welcomed && !ses->closing) {
            kn_cache_pump(ses);
            check_sent(ses, kn_output_send_load(ses, heartbeat));
        }
    }
    s->cache.n_samples = 0;
}

void kn_session_end_all(struct kn_serve *s, int status, const char *text)
{
    bt_list_for_each_safe (it, &s->sessions) {
        end_session(BT_LIST_ENTRY(it, struct kn_session, link), status, text);
    }
}
