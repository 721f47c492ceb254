/* The protobuf messages that routers and nodes take from the network, and what is read out of them
 * before anything checks it: unpacked or refused; what was unpacked packs again; sampling
 * parameters are copied out within their limits. First byte: which message. */
#include "common/base/rc.h"
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

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    const ProtobufCMessageDescriptor *kind;
    ProtobufCMessage *m;
    uint8_t *packed;
    size_t size;

    if (n < 1) {
        return 0;
    }
    kind = kinds[data[0] % BT_ARRAY_LEN(kinds)];
    m = protobuf_c_message_unpack(kind, NULL, n - 1, data + 1);
    if (!m) {
        return 0;
    }
    if (kind == &baton__v1__generate_request__descriptor) {
        from_client((const Baton__V1__GenerateRequest *)m);
    } else if (kind == &baton__v1__router_message__descriptor) {
        from_router((const Baton__V1__RouterMessage *)m);
    }
    size = protobuf_c_message_get_packed_size(m);
    packed = malloc(size + 1);
    if (!packed || protobuf_c_message_pack(m, packed) != size) {
        abort();
    }
    free(packed);
    protobuf_c_message_free_unpacked(m, NULL);
    return 0;
}
