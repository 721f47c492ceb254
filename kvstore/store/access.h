/* The daemon's access log: a JSON line for each prompt that it was asked to pass on, under the id
 * that the router gave the request, so that one id finds its story on nodes and daemons. */
#ifndef KV_STORE_ACCESS_H
#define KV_STORE_ACCESS_H

#include "common/obs/lines.h"
#include "kvstore/store/relay.h"

/* `lines` NULL: nothing is written. Any thread; does not block. */
void kv_access_write(struct bt_lines *lines, const char *node, const struct kv_relay_passed *p);

#endif
