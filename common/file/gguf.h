/* GGUF v2/v3, little endian, as a table of keys and a table of tensors over a memory range.
 *
 *   offset  size
 *   0       4     "GGUF"
 *   4       4     version
 *   8       8     number of tensors
 *   16      8     number of keys
 *   24      ..    keys: string key, u32 type, value
 *   ..      ..    tensors: string name, u32 n_dims, u64 dims[] (innermost first), u32 type, u64
 *                 offset from the start of the data
 *   ..      ..    padding to general.alignment (32), then data
 *
 * A string is u64 length and bytes; an array is u32 element type, u64 count and the elements, which
 * may be arrays. Nothing here trusts a number: counts are held against the bytes that are left
 * before anything is allocated, and memory is at most a few times the size of the tables.
 * Immutable after parsing; any thread may read. */
#ifndef BT_FILE_GGUF_H
#define BT_FILE_GGUF_H

#include "common/file/file_int.h"

enum bt_gguf_type {
    BT_GGUF_U8,
    BT_GGUF_I8,
    BT_GGUF_U16,
    BT_GGUF_I16,
    BT_GGUF_U32,
    BT_GGUF_I32,
    BT_GGUF_F32,
    BT_GGUF_BOOL,
    BT_GGUF_STR,
    BT_GGUF_ARR,
    BT_GGUF_U64,
    BT_GGUF_I64,
    BT_GGUF_F64,
    BT_GGUF_TYPE_COUNT
};

#define BT_GGUF_MAX_KEYS    65536
#define BT_GGUF_MAX_TENSORS 131072
#define BT_GGUF_MAX_NESTING 8 /* arrays in arrays */

struct bt_gguf_kv {
    struct bt_str key;
    uint32_t type;    /* enum bt_gguf_type */
    uint32_t elem;    /* arrays: element type */
    uint64_t count;   /* arrays: elements; else 1 */
    const uint8_t *p; /* first byte of the value; of an array: of its first element */
    size_t bytes;     /* of the value, all of it inside the range */
};

struct bt_gguf {
    uint32_t version;
    struct bt_gguf_kv *kvs; /* sorted by key */
    size_t n_kvs;
    struct bt_tensor *tensors; /* sorted by name */
    size_t n_tensors;
};

/* BT_E_FORMAT (malformed: names the key or tensor), BT_E_UNSUPPORTED (version, byte order, tensor
 * type), BT_E_NOMEM. On failure nothing is left behind. The range is borrowed by the result. */
int bt_gguf_parse(const uint8_t *p, size_t n, struct bt_gguf *ret, struct bt_err *err) BT_MUST_USE;
void bt_gguf_fini(struct bt_gguf *g);

/* NULL if absent. */
const struct bt_gguf_kv *bt_gguf_find(const struct bt_gguf *g, const char *key);
/* Value of a scalar as int64 / double / string; false if it is of another type or out of range. */
bool bt_gguf_as_int(const struct bt_gguf_kv *kv, int64_t *ret);
bool bt_gguf_as_float(const struct bt_gguf_kv *kv, double *ret); /* finite only */
bool bt_gguf_as_str(const struct bt_gguf_kv *kv, struct bt_str *ret);
bool bt_gguf_as_bool(const struct bt_gguf_kv *kv, bool *ret);
const char *bt_gguf_type_name(uint32_t type);

#endif
