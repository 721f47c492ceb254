/* Tables of names and edges, from states.def. */
#include "kvstore/handoff/states.h"

#define SEND(name, next, meaning) [KV_SEND_##name] = #name,
#define RECV(name, next, meaning)
static const char *const send_names[] = {
#include "kvstore/handoff/states.def"
};
#undef SEND
#undef RECV
#define SEND(name, next, meaning)
#define RECV(name, next, meaning) [KV_RECV_##name] = #name,
static const char *const recv_names[] = {
#include "kvstore/handoff/states.def"
};
#undef SEND
#undef RECV

#define TO(x)                     (1u << KV_SEND_##x)
#define SEND(name, next, meaning) [KV_SEND_##name] = (next),
#define RECV(name, next, meaning)
static const unsigned send_edges[] = {
#include "kvstore/handoff/states.def"
};
#undef TO
#undef SEND
#undef RECV
#define TO(x) (1u << KV_RECV_##x)
#define SEND(name, next, meaning)
#define RECV(name, next, meaning) [KV_RECV_##name] = (next),
static const unsigned recv_edges[] = {
#include "kvstore/handoff/states.def"
};
#undef TO
#undef SEND
#undef RECV

bool kv_send_edge_ok(enum kv_send_state from, enum kv_send_state to)
{
    return (send_edges[from] >> to & 1) != 0;
}

bool kv_recv_edge_ok(enum kv_recv_state from, enum kv_recv_state to)
{
    return (recv_edges[from] >> to & 1) != 0;
}

const char *kv_send_state_name(enum kv_send_state s)
{
    return send_names[s];
}

const char *kv_recv_state_name(enum kv_recv_state s)
{
    return recv_names[s];
}
