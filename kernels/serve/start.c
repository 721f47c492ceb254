/* Checks of a StartRequest, which comes from outside, and its way into the engine. */
#include "kernels/serve/serve_int.h"

#include "common/base/buf.h"
#include "common/conf/value.h"
#include "common/thr/time.h"
#include "proto/wire/sampling_pb.h"

#include <stdlib.h>

/* What another node, or this one a little later, may well do. */
bool kn_rc_retryable(int rc)
{
    return rc <= BT_E_PEER_LOST || rc == BT_E_EXHAUSTED;
}

static int
check_ids(const int32_t *ids, size_t n, int n_vocab, const char *what, struct bt_err *err)
{
    for (size_t i = 0; i < n; i++) {
        if (ids[i] < 0 || ids[i] >= n_vocab) {
            return BT_FAIL(err, BT_E_INVALID, "%s id %d at %zu is not in the vocabulary of %d",
                           what, ids[i], i, n_vocab);
        }
    }
    return BT_OK;
}

/* Unknown values come through as they are: protobuf enums are open. */
static int take_leg(const struct kn_serve *s, int value, enum kn_leg *ret_leg, struct bt_err *err)
{
    switch (value) {
    case BATON__V1__LEG__LEG_LOCAL:
        *ret_leg = KN_LEG_LOCAL;
        break;
    case BATON__V1__LEG__LEG_PREFILL:
        *ret_leg = KN_LEG_PREFILL;
        break;
    case BATON__V1__LEG__LEG_DECODE:
        *ret_leg = KN_LEG_DECODE;
        break;
    default:
        return BT_FAIL(err, BT_E_INVALID, "leg %d is unknown", value);
    }
    if (!s->role->takes[*ret_leg]) {
        return BT_FAIL(err, BT_E_UNSUPPORTED, "a node of role %s does not take leg %d",
                       s->role->name, value);
    }
    return BT_OK;
}

static int take_via(const Baton__V1__HandoffRef *ref, struct kn_submit_args *a, struct bt_err *err)
{
    struct bt_addr addr;

    if (ref->store_name[0] == '\0') {
        return BT_OK;
    }
    if (strlen(ref->store_name) > 63 ||
        bt_addr_read(bt_str_of(ref->store_net_address), &addr) < 0 || addr.is_unix ||
        addr.port == 0) {
        return BT_FAIL(err, BT_E_INVALID, "the store's name or address is malformed");
    }
    a->via = (struct kv_origin){ref->store_name, ref->store_incarnation, ref->store_net_address};
    return BT_OK;
}

static int
take_handoff(const Baton__V1__HandoffRef *ref, struct kn_submit_args *a, struct bt_err *err)
{
    struct bt_addr addr;

    if (a->leg == KN_LEG_LOCAL) {
        return BT_OK;
    }
    if (!ref || (ref->id_hi == 0 && ref->id_lo == 0)) {
        return BT_FAIL(err, BT_E_INVALID, "the handoff id is missing");
    }
    a->handoff = (struct kv_handoff_id){ref->id_hi, ref->id_lo};
    a->peer_name = ref->peer_name;
    a->peer_incarnation = ref->peer_incarnation;
    a->peer_address = ref->peer_net_address;
    if (a->leg != KN_LEG_DECODE) {
        return BT_OK;
    }
    if (ref->peer_name[0] == '\0' || strlen(ref->peer_name) > 63) {
        return BT_FAIL(err, BT_E_INVALID, "the prefill node's name must have 1 to 63 bytes");
    }
    if (bt_addr_read(bt_str_of(ref->peer_net_address), &addr) < 0 || addr.is_unix ||
        addr.port == 0) {
        return BT_FAIL(err, BT_E_INVALID, "the prefill node's address is not host:port");
    }
    return take_via(ref, a, err);
}

static int submit(struct kn_session *ses,
                  const Baton__V1__StartRequest *req,
                  struct kn_submit_args *a,
                  struct bt_err *err)
{
    struct kn_serve *s = ses->serve;
    struct kn_stream *st = bt_calloc(1, sizeof(*st));
    int rc;

    if (!st) {
        return BT_FAIL(err, BT_E_NOMEM, "no memory for a stream");
    }
    *st = (struct kn_stream){.tag = ++s->last_tag,
                             .stream_id = req->stream_id,
                             .session = ses,
                             .logprobs = a->sampling->n_logprobs >= 0};
    kn_access_begin(st, req, a->leg);
    a->tag = st->tag;
    rc = bt_map_put(&s->streams, st->tag, st);
    if (rc == BT_OK) {
        rc = bt_map_put(&ses->streams, st->stream_id, st);
        if (rc == BT_OK) {
            rc = kn_engine_submit(s->engine, a, err);
            if (rc < 0) {
                bt_map_del(&ses->streams, st->stream_id);
            }
        }
        if (rc < 0) {
            bt_map_del(&s->streams, st->tag);
        }
    }
    if (rc < 0) {
        free(st);
        return rc;
    }
    kn_serve_changed(s);
    return BT_OK;
}

int kn_start_stream(struct kn_session *ses, const Baton__V1__StartRequest *req, struct bt_err *err)
{
    struct kn_serve *s = ses->serve;
    int n_vocab = kn_engine_config(s->engine)->n_vocab;
    struct wire_sampling_owned sampling;
    struct kn_submit_args a = {
        .prompt = req->prompt,
        .n_prompt = req->n_prompt,
        .answered = req->answered,
        .n_answered = req->n_answered,
        .cache_salt = req->cache_salt,
        .claim = req->claim,
        .deadline_ns = BT_NEVER_NS,
    };
    int rc;

    if (bt_map_get(&ses->streams, req->stream_id)) {
        return BT_FAIL(err, BT_E_EXISTS, "stream id %llu is in use",
                       (unsigned long long)req->stream_id);
    }
    if (req->rank > 0) {
        return BT_FAIL(err, BT_E_INVALID, "rank %u of a node with one engine", req->rank);
    }
    if (s->state != KN_SERVE_READY) {
        return BT_FAIL(err, BT_E_UNAVAILABLE, "node %s is draining", s->name);
    }
    if (req->deadline_us > 0 && req->deadline_us < BT_NEVER_NS / 1000) {
        a.deadline_ns = bt_deadline_ns(req->deadline_us * 1000);
    }
    if ((rc = take_leg(s, (int)req->leg, &a.leg, err)) < 0 ||
        (rc = take_handoff(req->handoff, &a, err)) < 0 ||
        (rc = check_ids(req->prompt, req->n_prompt, n_vocab, "prompt", err)) < 0 ||
        (rc = check_ids(req->answered, req->n_answered, n_vocab, "answer", err)) < 0 ||
        (rc = wire_sampling_from_node(req->sampling, &sampling, err)) < 0) {
        return rc;
    }
    a.sampling = &sampling.s;
    rc = wire_sampling_check(&sampling.s, n_vocab, err);
    if (rc == BT_OK) {
        rc = submit(ses, req, &a, err);
    }
    wire_sampling_owned_fini(&sampling);
    return rc;
}
