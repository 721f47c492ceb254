/* The protobuf messages that routers and nodes take from the network, and what is read out of them
 * before anything checks it: unpacked or refused; what was unpacked packs again; a long list that
 * is cut out (common/rpc/lists.h) changes nothing of that; sampling parameters are copied out
 * within their limits. First byte: which message. */
#include "common/base/rc.h"
#include "common/base/varint.h"
#include "common/rpc/lists.h"
#include "proto/baton.pb-c.h"
#include "proto/inspect.pb-c.h"
#include "proto/wire/sampling_pb.h"

#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

static const ProtobufCMessageDescriptor *const kinds[] = {
    &baton__v1__generate_request__descriptor,    &baton__v1__router_message__descriptor,
    &baton__v1__node_message__descriptor,        &baton__v1__tokenize_request__descriptor,
    &baton__v1__detokenize_request__descriptor,  &baton__v1__cordon_request__descriptor,
    &baton__v1__set_canary_request__descriptor,  &baton__v1__find_prefix_request__descriptor,
    &baton__v1__flush_cache_request__descriptor,
};

static void from_client(const Baton__V1__GenerateRequest *m)
{
    struct wire_sampling_owned o = {0};
    struct wire_sampling_msg out;
    struct bt_err err = {0};
    bool has_seed;

    if (wire_sampling_from_client(m->sampling, m->stopping, &o, &has_seed, &err) == BT_OK) {
        if (wire_sampling_check(&o.s, 1000, &err) == BT_OK &&
            wire_sampling_to_node(&o.s, &out) == BT_OK) {
            struct wire_sampling_owned back = {0};

            if (wire_sampling_from_node(&out.msg, &back, &err) < 0 || back.s.n_bias != o.s.n_bias ||
                back.s.n_stop_ids != o.s.n_stop_ids) {
                abort();
            }
            wire_sampling_owned_fini(&back);
            wire_sampling_msg_fini(&out);
        }
    } else if (!err.msg[0]) {
        abort();
    }
    wire_sampling_owned_fini(&o);
}

static void from_router(const Baton__V1__RouterMessage *m)
{
    struct wire_sampling_owned o = {0};
    struct bt_err err = {0};

    if (m->kind_case == BATON__V1__ROUTER_MESSAGE__KIND_START) {
        if (wire_sampling_from_node(m->start->sampling, &o, &err) == BT_OK) {
            (void)!wire_sampling_check(&o.s, 1000, &err);
        }
        wire_sampling_owned_fini(&o);
    }
}

static bool pack(const ProtobufCMessage *m, struct bt_str *ret)
{
    uint8_t *p;

    ret->n = protobuf_c_message_get_packed_size(m);
    p = malloc(ret->n + 1);
    ret->p = (const char *)p;
    return p && protobuf_c_message_pack(m, p) == ret->n;
}

/* The message as it comes of a long list read by us and the rest by protobuf-c; NULL: refused, or
 * there is no such list (*ret_cuts). */
static ProtobufCMessage *
unpack_cut(const ProtobufCMessageDescriptor *kind, struct bt_str bytes, bool *ret_cuts)
{
    struct bt_rpc_cut cut;
    ProtobufCMessage *m = NULL;
    uint8_t *rest;
    int32_t *v;
    size_t n;
    bool shortest;

    *ret_cuts = bt_rpc_cut_find(kind, bytes, &cut);
    if (!*ret_cuts) {
        return NULL;
    }
    rest = malloc(bt_rpc_cut_room(&cut));
    n = bt_varints_count((const uint8_t *)cut.bytes.p, cut.bytes.n);
    v = malloc(n * sizeof(*v) + 1);
    if (!rest || !v) {
        abort();
    }
    if (bt_varints_read((const uint8_t *)cut.bytes.p, cut.bytes.n, v, &shortest) == BT_OK) {
        m = protobuf_c_message_unpack(kind, NULL, bt_rpc_cut_rest(&cut, rest), rest);
        if (shortest && bt_varints_size(v, n) != cut.bytes.n) {
            abort();
        }
    }
    if (!m || !bt_rpc_cut_put(&cut, m, v, n)) {
        free(v);
    }
    free(rest);
    return m;
}

/* Both ways say the same. */
static void compare(const ProtobufCMessage *m,
                    const ProtobufCMessageDescriptor *kind,
                    const uint8_t *p,
                    size_t n)
{
    bool cuts;
    ProtobufCMessage *other = unpack_cut(kind, (struct bt_str){(const char *)p, n}, &cuts);
    struct bt_str a, b;

    if (!cuts) {
        return;
    }
    if (!m != !other) {
        abort();
    }
    if (m) {
        if (!pack(m, &a) || !pack(other, &b) || a.n != b.n || memcmp(a.p, b.p, a.n) != 0) {
            abort();
        }
        free((void *)(uintptr_t)a.p);
        free((void *)(uintptr_t)b.p);
        protobuf_c_message_free_unpacked(other, NULL);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    const ProtobufCMessageDescriptor *kind;
    ProtobufCMessage *m;
    struct bt_str packed;

    if (n < 1) {
        return 0;
    }
    kind = kinds[data[0] % BT_ARRAY_LEN(kinds)];
    m = protobuf_c_message_unpack(kind, NULL, n - 1, data + 1);
    compare(m, kind, data + 1, n - 1);
    if (!m) {
        return 0;
    }
    if (kind == &baton__v1__generate_request__descriptor) {
        from_client((const Baton__V1__GenerateRequest *)m);
    } else if (kind == &baton__v1__router_message__descriptor) {
        from_router((const Baton__V1__RouterMessage *)m);
    }
    if (!pack(m, &packed)) {
        abort();
    }
    free((void *)(uintptr_t)packed.p);
    protobuf_c_message_free_unpacked(m, NULL);
    return 0;
}
