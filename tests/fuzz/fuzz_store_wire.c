/* Messages of the block server: any bytes unpack or are refused with a text; what unpacks packs to
 * the same bytes. The same bytes are read as items of a GET. */
#include "proto/wire/store.h"

#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    struct bt_str rest = {(const char *)data, n};
    struct wire_store_item item;
    struct wire_store m;
    struct bt_err err = {0};
    char head[WIRE_STORE_MAX_HEAD];
    int rc = wire_store_unpack(rest, &m, &err);

    if (rc != BT_OK && !err.msg[0]) {
        abort();
    }
    if (rc == BT_OK && (wire_store_pack(&m, head) != n || memcmp(head, data, n) != 0)) {
        abort();
    }
    while (rest.n > 0 && wire_store_take_item(&rest, 256, &item)) {
        if (item.ids + (size_t)item.n_tokens * 4 > (const char *)data + n) {
            abort();
        }
    }
    return 0;
}
