/* States of a handoff (states.def), which edges are allowed, and the hook by which tests corrupt
 * bytes. */
#ifndef KV_HANDOFF_STATES_H
#define KV_HANDOFF_STATES_H

#include "common/base/base.h"

enum kv_send_state {
#define SEND(name, next, meaning) KV_SEND_##name,
#define RECV(name, next, meaning)
#include "kvstore/handoff/states.def"
#undef SEND
#undef RECV
};

enum kv_recv_state {
#define SEND(name, next, meaning)
#define RECV(name, next, meaning) KV_RECV_##name,
#include "kvstore/handoff/states.def"
#undef SEND
#undef RECV
};

#define KV_SEND_N_STATES (KV_SEND_DONE + 1)
#define KV_RECV_N_STATES (KV_RECV_DONE + 1)

bool kv_send_edge_ok(enum kv_send_state from, enum kv_send_state to);
bool kv_recv_edge_ok(enum kv_recv_state from, enum kv_recv_state to);
const char *kv_send_state_name(enum kv_send_state s);
const char *kv_recv_state_name(enum kv_recv_state s);

/* The next n pieces that land in this process are corrupted before they are checked. Atomic. */
extern int kv_handoff_corrupt_next;

#endif
