/* Long lists of integers inside of messages, which is what prompts are. protobuf-c takes several
 * looks at each byte of them, 50 instructions an id; so such a list is cut out of the bytes,
 * protobuf-c decodes the rest, and the list, read by bt_varints_read, is put into the message. Only
 * in the simple case: a packed list that is there once, in the message or in a field of it that is
 * there once. All else is left to protobuf-c; the outcome is the same (fuzz target `messages`).
 * Pure. */
#ifndef BT_RPC_LISTS_H
#define BT_RPC_LISTS_H

#include "common/base/base.h"

#include <protobuf-c/protobuf-c.h>

struct bt_rpc_cut {
    const ProtobufCFieldDescriptor *outer; /* the field of the message it is in; NULL = itself */
    const ProtobufCFieldDescriptor *list;
    struct bt_str before, between[2], after; /* between: outer's content less the list */
    struct bt_str bytes;                     /* the list's */
};

/* Finds the list; ret_cut borrows the bytes. False: there is none. */
bool bt_rpc_cut_find(const ProtobufCMessageDescriptor *desc,
                     struct bt_str bytes,
                     struct bt_rpc_cut *ret_cut);
/* Bytes of the message without the list, at most; writes them, returns how many. */
size_t bt_rpc_cut_room(const struct bt_rpc_cut *cut);
size_t bt_rpc_cut_rest(const struct bt_rpc_cut *cut, uint8_t *p);
/* Puts the list into the message that was decoded from the rest, which takes v as its own. False:
 * the list is no part of it. */
bool bt_rpc_cut_put(const struct bt_rpc_cut *cut, ProtobufCMessage *msg, int32_t *v, size_t n);

/* strings.c. The next field of a message: its number and, if it has one, its length-delimited value
 * (else p = NULL). False: malformed. */
struct bt_rpc_walk {
    const uint8_t *p, *end;
};
bool bt_rpc_take_field(struct bt_rpc_walk *w, uint32_t *ret_id, struct bt_str *ret_value);

#endif
