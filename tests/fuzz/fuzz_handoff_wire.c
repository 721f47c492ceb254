/* Handoff messages: any bytes unpack or are refused with a text; what unpacks packs to the same
 * bytes. */
#include "proto/wire/handoff.h"

#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    struct wire_handoff m;
    struct bt_err err = {0};
    char head[WIRE_HANDOFF_MAX_HEAD];
    int rc = wire_handoff_unpack((struct bt_str){(const char *)data, n}, &m, &err);

    if (rc != BT_OK) {
        if (!err.msg[0]) {
            abort();
        }
        return 0;
    }
    if (wire_handoff_pack(&m, head) != n || memcmp(head, data, n) != 0) {
        abort();
    }
    return 0;
}
