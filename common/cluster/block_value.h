/* The text of a holder in a block record: "<incarnation>:<tier>:<bytes>:<until>", hexadecimal, as
 * blockmap_put.c writes it; others may have written anything. Any thread. */
#ifndef BT_CLUSTER_BLOCK_VALUE_H
#define BT_CLUSTER_BLOCK_VALUE_H

#include "common/base/rc.h"

#define BLOCK_VALUE_MAX 64 /* shorter than this */

struct block_value {
    uint64_t incarnation, tier, amount, until_s; /* by Redis's clock */
};
/* False if malformed. */
bool block_value_read(struct bt_str text, struct block_value *ret_v);

#endif
