/* Sampling parameters between their messages and struct wire_sampling.
 *
 * Reading never checks ranges (wire_sampling_check does) but copies what the struct points to, so
 * that the message may go away. Any thread. */
#ifndef WIRE_SAMPLING_PB_H
#define WIRE_SAMPLING_PB_H

#include "proto/node.pb-c.h"
#include "proto/wire/sampling.h"

/* A struct wire_sampling with the arrays it points to; a zeroed one is empty. */
struct wire_sampling_owned {
    struct wire_sampling s;
    struct wire_bias *bias; /* s.bias */
    int32_t *stop_ids;      /* s.stop_ids */
};
void wire_sampling_owned_fini(struct wire_sampling_owned *o);

/* What a client asked for; absent fields take the defaults of baton.proto. NULL messages count as
 * empty ones. max_tokens is UINT32_MAX where the client named none, has_seed false where the router
 * has to draw one. Fails with BT_E_INVALID (more entries than ever allowed) or BT_E_NOMEM. */
int wire_sampling_from_client(const Baton__V1__Sampling *sampling,
                              const Baton__V1__Stopping *stopping,
                              struct wire_sampling_owned *ret,
                              bool *ret_has_seed,
                              struct bt_err *err) BT_MUST_USE;
/* What a router sent to a node. Same errors; NULL is BT_E_INVALID. */
int wire_sampling_from_node(const Baton__V1__NodeSampling *msg,
                            struct wire_sampling_owned *ret,
                            struct bt_err *err) BT_MUST_USE;

/* The message for a node. It borrows stop ids from `s`, and the bias rows live in `out`: both must
 * outlive the use of the message. */
struct wire_sampling_msg {
    Baton__V1__NodeSampling msg;
    Baton__V1__LogitBias *rows;
    Baton__V1__LogitBias **row_ptrs;
};
int wire_sampling_to_node(const struct wire_sampling *s,
                          struct wire_sampling_msg *out) BT_MUST_USE; /* BT_OK, BT_E_NOMEM */
void wire_sampling_msg_fini(struct wire_sampling_msg *out);

#endif
