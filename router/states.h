/* State machines of the router, generated from node_states.def and request_states.def: the enums,
 * names, allowed edges. Pure; any thread. */
#ifndef RT_STATES_H
#define RT_STATES_H

#include "common/base/base.h"

enum rt_node_state {
#define X(name, text, next, meaning) RT_NODE_##name,
#include "router/node_states.def"
#undef X
    RT_NODE_STATE_COUNT
};

enum rt_request_state {
#define X(name, text, next, meaning) RT_REQUEST_##name,
#include "router/request_states.def"
#undef X
    RT_REQUEST_STATE_COUNT
};

/* Static strings; "?" for what is no state. */
const char *rt_node_state_name(enum rt_node_state s);
const char *rt_request_state_name(enum rt_request_state s);

bool rt_node_state_allowed(enum rt_node_state from, enum rt_node_state to);
bool rt_request_state_allowed(enum rt_request_state from, enum rt_request_state to);

#endif
