/* One safetensors file: refused with a message, or its tensors tile the data. */
#include "common/file/safetensors.h"

#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    struct bt_st st = {0};
    struct bt_err err = {0};
    int rc = bt_st_parse(data, n, "fuzz", &st, &err);
    const uint8_t *at = NULL;

    if (rc != BT_OK) {
        if (rc > 0 || (!err.msg[0] && rc != BT_E_NOMEM) || st.tensors) {
            abort();
        }
        return 0;
    }
    for (size_t i = 0; i < st.n; i++) {
        const struct bt_st_tensor *t = &st.tensors[i];
        char name[64];

        if (t->bytes == 0 || (at && t->data != at) || t->n_dims > BT_ST_MAX_DIMS) {
            abort();
        }
        at = t->data + t->bytes;
        if (bt_tensor_name_of_hf(bt_str_of(t->name), name, sizeof(name)) &&
            strlen(name) >= sizeof(name) - 1) {
            abort();
        }
    }
    if (at && at != data + n) {
        abort();
    }
    bt_st_fini(&st);
    return 0;
}
