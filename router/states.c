/* Tables of the router's state machines. */
#include "router/states.h"

static const struct {
    const char *name;
    unsigned next;
} node_states[] =
    {
#define RT_TO(name)                  (1u << RT_NODE_##name)
#define X(name, text, next, meaning) {text, next},
#include "router/node_states.def"
#undef X
#undef RT_TO
},
  request_states[] = {
#define RT_TO(name)                  (1u << RT_REQUEST_##name)
#define X(name, text, next, meaning) {text, next},
#include "router/request_states.def"
#undef X
#undef RT_TO
};

const char *rt_node_state_name(enum rt_node_state s)
{
    return (unsigned)s < RT_NODE_STATE_COUNT ? node_states[s].name : "?";
}

const char *rt_request_state_name(enum rt_request_state s)
{
    return (unsigned)s < RT_REQUEST_STATE_COUNT ? request_states[s].name : "?";
}

bool rt_node_state_allowed(enum rt_node_state from, enum rt_node_state to)
{
    return (unsigned)from < RT_NODE_STATE_COUNT && (unsigned)to < RT_NODE_STATE_COUNT &&
           (node_states[from].next & (1u << to)) != 0;
}

bool rt_request_state_allowed(enum rt_request_state from, enum rt_request_state to)
{
    return (unsigned)from < RT_REQUEST_STATE_COUNT && (unsigned)to < RT_REQUEST_STATE_COUNT &&
           (request_states[from].next & (1u << to)) != 0;
}
