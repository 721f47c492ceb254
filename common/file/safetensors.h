/* safetensors, one file as a table of tensors over a memory range.
 *
 *   0      8   length N of the header, little endian
 *   8      N   JSON object: name -> {"dtype", "shape": [..], "data_offsets": [begin, end]};
 *              "__metadata__" holds strings
 *   8 + N  ..  data; offsets count from here
 *
 * Accepted only if the ranges tile the data without gap or overlap, every range has just the bytes
 * that shape and dtype say, dtypes are known, and no name occurs twice. Immutable after parsing. */
#ifndef BT_FILE_SAFETENSORS_H
#define BT_FILE_SAFETENSORS_H

#include "common/file/file_int.h"
#include "common/file/json.h"

#define BT_ST_MAX_HEADER (8u << 20)
#define BT_ST_MAX_DIMS   8

struct bt_st_tensor {
    const char *name; /* owned by the header */
    int dtype;        /* enum bt_dtype, or -1: a type this project does not compute with */
    const char *dtype_name;
    int n_dims; /* 0 for a scalar */
    int64_t shape[BT_ST_MAX_DIMS];
    size_t begin, bytes;
    const uint8_t *data;
};

struct bt_st {
    json_t *header;
    struct bt_st_tensor *tensors; /* in the order of the data */
    size_t n;
};

/* `what` names the file in errors. The range is borrowed by the result. On failure nothing is left
 * behind. BT_E_FORMAT, BT_E_TOO_LARGE, BT_E_NOMEM. */
int bt_st_parse(const uint8_t *p, size_t n, const char *what, struct bt_st *ret, struct bt_err *err)
    BT_MUST_USE;
void bt_st_fini(struct bt_st *st);

#endif
