/* See tell.h. Blocks become events of one log; every session follows it (follow.h). */
#include "kvstore/store/tell.h"

#include "common/base/buf.h"
#include "common/obs/log.h"
#include "common/thr/time.h"
#include "kvstore/store/follow.h"
#include "proto/wire/session.h"

#include <stdlib.h>

#define RING         (1u << 17)
#define MAX_SESSIONS 256
#define HELD         512

struct kv_tell {
    struct kv_tell_cfg cfg;
    struct kv_event_log *log;
    struct bt_list sessions; /* struct session.link */
    uint32_t n_sessions;
    struct bt_timer heartbeat;
    bool draining;
};

struct session {
    struct bt_list link;
    struct kv_tell *tell;
    struct bt_rpc_call *call;
    struct kv_follow follow;
    uint32_t version; /* in use, from the welcome on */
    bool welcomed, closing;
};

/* Changes on their way to the loop. */
struct note {
    struct bt_msg msg;
    struct kv_tell *tell;
    size_t n;
    struct kv_event events[];
};

/* --- sessions -------------------------------------------------------------------------------- */

static void end(struct session *ses, int status, const char *text)
{
    if (!ses->closing) {
        ses->closing = true;
        bt_rpc_call_finish(ses->call, status, text);
    }
}

static void check_sent(struct session *ses, int rc)
{
    if (rc < 0 && rc != BT_E_NOMEM && rc != BT_E_CANCELLED) {
        end(ses, BT_RPC_RESOURCE_EXHAUSTED, "output was not read");
    }
}

static void pump(struct session *ses)
{
    if (!ses->closing) {
        check_sent(ses, kv_follow_pump(&ses->follow)); /* without memory: at the next beat */
    }
}

static int send_load(struct session *ses)
{
    Baton__V1__NodeMessage m = BATON__V1__NODE_MESSAGE__INIT;
    Baton__V1__NodeLoad l = BATON__V1__NODE_LOAD__INIT;
    struct kv_follow_tiers tiers;

    kv_follow_fill_load(ses->tell->log, &tiers, &l);
    l.draining = ses->tell->draining;
    m.kind_case = BATON__V1__NODE_MESSAGE__KIND_LOAD;
    m.load = &l;
    return bt_rpc_call_send(ses->call, &m.base);
}

static int send_welcome(struct session *ses)
{
    Baton__V1__NodeMessage m = BATON__V1__NODE_MESSAGE__INIT;
    Baton__V1__NodeWelcome w = BATON__V1__NODE_WELCOME__INIT;
    const struct bt_member *self = ses->tell->cfg.self;

    w.wire_version = ses->version;
    w.name = (char *)(uintptr_t)self->name; /* read only by the serialiser */
    w.incarnation = self->incarnation;
    w.role = (char *)(uintptr_t)bt_role_name(BT_ROLE_KVSTORE);
    w.net_address = (char *)(uintptr_t)self->net_addr;
    w.heartbeat_ms = (uint32_t)(ses->tell->cfg.heartbeat_ns / BT_NS_PER_MS);
    m.kind_case = BATON__V1__NODE_MESSAGE__KIND_WELCOME;
    m.welcome = &w;
    return bt_rpc_call_send(ses->call, &m.base);
}

void kv_tell_open(struct bt_rpc_call *call, struct kv_tell *t)
{
    struct session *ses;

    if (!t || t->draining) {
        bt_rpc_call_finish(call, BT_RPC_UNAVAILABLE, t ? "daemon is draining" : "keeps no blocks");
        return;
    }
    ses = t->n_sessions < MAX_SESSIONS ? bt_calloc(1, sizeof(*ses)) : NULL;
    if (!ses) {
        bt_rpc_call_finish(call, BT_RPC_RESOURCE_EXHAUSTED, "too many sessions");
        return;
    }
    ses->tell = t;
    ses->call = call;
    ses->follow =
        (struct kv_follow){.log = t->log, .call = call, .most_queued = t->cfg.most_queued};
    bt_list_push_back(&t->sessions, &ses->link);
    t->n_sessions++;
    bt_rpc_call_set_user(call, ses);
    bt_rpc_call_send_headers(call);
}

static void on_hello(struct session *ses, const Baton__V1__RouterHello *hello)
{
    struct bt_err err = {0};

    if (ses->welcomed) {
        end(ses, BT_RPC_INVALID_ARGUMENT, "second hello");
    } else if (wire_session_pick(hello->wire_version, hello->wire_version_max, &ses->version,
                                 &err) < 0) {
        end(ses, BT_RPC_FAILED_PRECONDITION, err.msg);
    } else {
        ses->welcomed = true;
        check_sent(ses, send_welcome(ses));
        check_sent(ses, send_load(ses));
    }
}

/* A daemon computes nothing. */
static int refuse_start(struct session *ses, uint64_t stream_id)
{
    Baton__V1__NodeMessage m = BATON__V1__NODE_MESSAGE__INIT;
    Baton__V1__StepOutput step = BATON__V1__STEP_OUTPUT__INIT;
    Baton__V1__StreamOutput out = BATON__V1__STREAM_OUTPUT__INIT, *outs[] = {&out};
    Baton__V1__StreamError e = BATON__V1__STREAM_ERROR__INIT;

    e.rc = BT_E_UNSUPPORTED;
    e.message = (char *)(uintptr_t) "a daemon of the KV store computes nothing";
    e.retryable = true;
    out.stream_id = stream_id;
    out.error = &e;
    step.n_outputs = 1;
    step.outputs = outs;
    m.kind_case = BATON__V1__NODE_MESSAGE__KIND_STEP;
    m.step = &step;
    return bt_rpc_call_send(ses->call, &m.base);
}

void kv_tell_message(struct bt_rpc_call *call, const ProtobufCMessage *msg)
{
    struct session *ses = bt_rpc_call_user(call);
    const Baton__V1__RouterMessage *m = (const void *)msg;
    struct bt_err err = {0};

    if (!ses || ses->closing) {
        return;
    }
    if (!ses->welcomed && m->kind_case != BATON__V1__ROUTER_MESSAGE__KIND_HELLO) {
        end(ses, BT_RPC_INVALID_ARGUMENT, "the first message must be the hello");
        return;
    }
    switch ((int)m->kind_case) {
    case BATON__V1__ROUTER_MESSAGE__KIND_HELLO:
        on_hello(ses, m->hello);
        break;
    case BATON__V1__ROUTER_MESSAGE__KIND_FOLLOW:
        kv_follow_begin(&ses->follow, m->follow);
        pump(ses);
        break;
    case BATON__V1__ROUTER_MESSAGE__KIND_START:
        check_sent(ses, refuse_start(ses, m->start->stream_id));
        break;
    case BATON__V1__ROUTER_MESSAGE__KIND_RENEW:
        if (bt_rpc_call_renew(call, m->renew->authorization, &err) < 0) {
            BT_WARN("session", "msg=\"a router's new token is refused: %s\"", err.msg);
        } else {
            BT_INFO("session", "msg=\"a router shows a new token\"");
        }
        break;
    default: /* nothing to take over or to cancel; a later version's message */
        break;
    }
}

void kv_tell_half_close(struct bt_rpc_call *call)
{
    struct session *ses = bt_rpc_call_user(call);

    if (ses) {
        end(ses, BT_RPC_OK, NULL);
    }
}

void kv_tell_drained(struct bt_rpc_call *call)
{
    struct session *ses = bt_rpc_call_user(call);

    if (ses) {
        pump(ses);
    }
}

void kv_tell_closed(struct bt_rpc_call *call, bool cancelled)
{
    struct session *ses = bt_rpc_call_user(call);

    (void)cancelled;
    if (ses) {
        kv_follow_end(&ses->follow);
        bt_list_remove(&ses->link);
        ses->tell->n_sessions--;
        free(ses);
    }
}

static void on_heartbeat(struct bt_loop *loop, struct bt_timer *timer)
{
    struct kv_tell *t = BT_CONTAINER_OF(timer, struct kv_tell, heartbeat);

    bt_timer_start(loop, timer, bt_loop_now(loop) + t->cfg.heartbeat_ns);
    bt_list_for_each_safe (it, &t->sessions) {
        struct session *ses = BT_LIST_ENTRY(it, struct session, link);

        if (ses->welcomed && !ses->closing) {
            pump(ses);
            check_sent(ses, send_load(ses));
        }
    }
}

/* --- events ---------------------------------------------------------------------------------- */

/* [loop] */
static void on_note(struct bt_msg *msg, void *loop)
{
    struct note *note = BT_CONTAINER_OF(msg, struct note, msg);
    struct kv_tell *t = note->tell;

    (void)loop;
    for (size_t i = 0; i < note->n; i++) {
        if (kv_event_log_add(t->log, &note->events[i]) < 0) {
            BT_WARN("cache_log", "msg=\"no memory: a block stays unknown to routers\"");
        }
    }
    free(note);
    bt_list_for_each_safe (it, &t->sessions) {
        pump(BT_LIST_ENTRY(it, struct session, link));
    }
}

/* Without memory NULL: routers believe in what may be gone, or miss what is there. */
static struct note *make_note(struct kv_tell *t, size_t n)
{
    struct note *note = malloc(sizeof(*note) + n * sizeof(*note->events));

    if (note) {
        *note = (struct note){.msg.handle = on_note, .tell = t};
        bt_list_init(&note->msg.link);
    }
    return note;
}

/* Everything anew: changes were lost. */
static void tell_all(struct kv_tell *t, struct kv_tiers *tiers)
{
    struct kv_tiers_held held[HELD];
    struct note *note = make_note(t, 2);
    uint64_t cursor = 0;

    if (!note) {
        return;
    }
    note->n = 2;
    note->events[0] = (struct kv_event){.kind = KV_EVENT_CLEARED, .tier = KV_TIER_HOST};
    note->events[1] = (struct kv_event){.kind = KV_EVENT_CLEARED, .tier = KV_TIER_DISK};
    bt_loop_post(t->cfg.loop, &note->msg);
    do {
        size_t n = kv_tiers_held(tiers, &cursor, held, HELD);

        note = n > 0 ? make_note(t, n) : NULL;
        for (size_t i = 0; note && i < n; i++) {
            note->events[note->n++] = (struct kv_event){kv_key_fingerprint(&held[i].key),
                                                        KV_EVENT_STORED, (uint8_t)held[i].tier};
        }
        if (note) {
            bt_loop_post(t->cfg.loop, &note->msg);
        }
    } while (cursor != 0);
}

void kv_tell_events(struct kv_tell *t,
                    struct kv_tiers *tiers,
                    const struct kv_tiers_event *ev,
                    size_t n)
{
    struct note *note = make_note(t, n);
    bool lost = !note;

    for (size_t i = 0; i < n && note; i++) {
        lost |= ev[i].kind == KV_TIERS_LOST;
        if (ev[i].kind != KV_TIERS_LOST) {
            note->events[note->n++] = (struct kv_event){
                kv_key_fingerprint(&ev[i].key),
                ev[i].kind == KV_TIERS_STORED ? KV_EVENT_STORED : KV_EVENT_REMOVED,
                (uint8_t)ev[i].tier};
        }
    }
    if (note) {
        bt_loop_post(t->cfg.loop, &note->msg);
    }
    if (lost && tiers) { /* else they are still being made */
        tell_all(t, tiers);
    }
}

/* --- life ------------------------------------------------------------------------------------ */

int kv_tell_create(const struct kv_tell_cfg *cfg, struct kv_tell **ret_tell, struct bt_err *err)
{
    struct kv_tell *t = bt_calloc(1, sizeof(*t));
    int rc;

    if (!t) {
        return BT_FAIL(err, BT_E_NOMEM, "no memory for the sessions of routers");
    }
    t->cfg = *cfg;
    bt_list_init(&t->sessions);
    t->heartbeat.fn = on_heartbeat;
    rc = kv_event_log_create(RING, &t->log, err);
    if (rc < 0) {
        free(t);
        return rc;
    }
    bt_timer_start(cfg->loop, &t->heartbeat, bt_deadline_ns(cfg->heartbeat_ns));
    *ret_tell = t;
    return BT_OK;
}

void kv_tell_drain(struct kv_tell *t)
{
    t->draining = true;
    bt_timer_stop(t->cfg.loop, &t->heartbeat);
    bt_list_for_each_safe (it, &t->sessions) {
        struct session *ses = BT_LIST_ENTRY(it, struct session, link);

        if (ses->welcomed && !ses->closing) {
            check_sent(ses, send_load(ses)); /* says that it drains */
        }
        end(ses, BT_RPC_UNAVAILABLE, "daemon is draining");
    }
}

uint32_t kv_tell_sessions(const struct kv_tell *t)
{
    return t->n_sessions;
}

void kv_tell_destroy(struct kv_tell *t)
{
    if (t) {
        kv_event_log_destroy(t->log);
        free(t);
    }
}
