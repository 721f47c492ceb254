/* Text forms of members as anybody may write them into Redis: read or refused, and what was read
 * is written and read back the same. First byte: length of the name. */
#include "common/cluster/member.h"

#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    struct bt_member m, back;
    struct bt_buf text = {0};
    struct bt_err err = {0};
    size_t name_n = n > 0 ? BT_MIN((size_t)data[0], n - 1) : 0;
    struct bt_str name = {(const char *)data + 1, name_n};

    if (n == 0) {
        return 0;
    }
    if (bt_member_decode(name, (struct bt_str){name.p + name_n, n - 1 - name_n}, &m, &err) < 0) {
        if (!err.msg[0]) {
            abort();
        }
    } else if (bt_member_encode(&m, &text) < 0 ||
               bt_member_decode(name, bt_buf_str(&text), &back, &err) < 0 ||
               !bt_member_equal(&m, &back)) {
        abort();
    }
    bt_buf_fini(&text);
    (void)!bt_member_read_seed((struct bt_str){(const char *)data, n}, &m, &err);
    return 0;
}
