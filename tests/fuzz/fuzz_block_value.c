/* Values of block records as anybody may write them into Redis: read or refused, never beyond their
 * end, and what was read is written and read back the same. */
#include "common/base/buf.h"
#include "common/cluster/block_value.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    char *text = malloc(n ? n : 1), again[80]; /* of its own: a byte too far is seen */
    struct block_value v, back;

    if (!text) {
        return 0;
    }
    memcpy(text, data, n);
    if (block_value_read((struct bt_str){text, n}, &v)) {
        int len = snprintf(again, sizeof(again), "%016" PRIx64 ":%" PRIx64 ":%" PRIx64 ":%" PRIx64,
                           v.incarnation, v.tier, v.amount, v.until_s);

        /* Scrubbing copies it into that much room. */
        if (n >= BLOCK_VALUE_MAX || v.incarnation == 0) {
            abort();
        }
        if (len < BLOCK_VALUE_MAX &&
            (!block_value_read((struct bt_str){again, (size_t)len}, &back) ||
             back.incarnation != v.incarnation || back.tier != v.tier || back.amount != v.amount ||
             back.until_s != v.until_s)) {
            abort();
        }
    }
    free(text);
    return 0;
}
