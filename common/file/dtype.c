/* Table of data types. Static data; any thread. */
#include "common/file/file_int.h"

static const struct {
    const char *name;
    size_t elems, bytes;
} dtypes[BT_DTYPE_COUNT] = {
#define X(name, text, elems, bytes) [BT_DTYPE_##name] = {text, elems, bytes},
    BT_DTYPE_LIST(X)
#undef X
};

const char *bt_dtype_name(enum bt_dtype t)
{
    return (unsigned)t < BT_DTYPE_COUNT ? dtypes[t].name : "unknown";
}

size_t bt_dtype_block_elems(enum bt_dtype t)
{
    BT_BUG_ON((unsigned)t >= BT_DTYPE_COUNT);
    return dtypes[t].elems;
}

size_t bt_dtype_block_bytes(enum bt_dtype t)
{
    BT_BUG_ON((unsigned)t >= BT_DTYPE_COUNT);
    return dtypes[t].bytes;
}

bool bt_tensor_bytes(enum bt_dtype t, int64_t rows, int64_t cols, size_t *ret)
{
    size_t blocks, bytes;

    if (rows <= 0 || cols <= 0 || (size_t)cols % dtypes[t].elems != 0) {
        return false;
    }
    if (!bt_mul_size((size_t)cols / dtypes[t].elems, (size_t)rows, &blocks) ||
        !bt_mul_size(blocks, dtypes[t].bytes, &bytes)) {
        return false;
    }
    *ret = bytes;
    return true;
}
