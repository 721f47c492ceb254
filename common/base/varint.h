/* Lists of integers as protobuf packs them, one varint behind the other: what prompts are on the
 * wire. Pure. */
#ifndef BT_BASE_VARINT_H
#define BT_BASE_VARINT_H

#include "common/base/base.h"

/* Integers in n bytes: those that end a varint. */
size_t bt_varints_count(const uint8_t *p, size_t n);
/* Room for bt_varints_count at ret_v. Of what has more than 32 bits the lower ones count, as
 * protobuf has it. *ret_shortest: each is written as bt_varints_write would. BT_E_FORMAT: the bytes
 * end in the middle of one, or one has more than 10. */
int bt_varints_read(const uint8_t *p, size_t n, int32_t *ret_v, bool *ret_shortest) BT_MUST_USE;
size_t bt_varints_size(const int32_t *v, size_t n);
/* Room for bt_varints_size at p. */
void bt_varints_write(const int32_t *v, size_t n, uint8_t *p);

#endif
