/* Reader of one safetensors file; format and rules in safetensors.h. */
#include "common/file/safetensors.h"

#include <stdlib.h>

static const struct {
    const char *name;
    size_t bytes;
    int dtype;
} st_dtypes[] = {
    {"F32", 4, BT_DTYPE_F32},
    {"F16", 2, BT_DTYPE_F16},
    {"BF16", 2, BT_DTYPE_BF16},
    {"BOOL", 1, -1},
    {"U8", 1, -1},
    {"I8", 1, -1},
    {"F8_E5M2", 1, -1},
    {"F8_E4M3", 1, -1},
    {"F8_E8M0", 1, -1},
    {"U16", 2, -1},
    {"I16", 2, -1},
    {"U32", 4, -1},
    {"I32", 4, -1},
    {"U64", 8, -1},
    {"I64", 8, -1},
    {"F64", 8, -1},
    {"C64", 8, -1},
};

static int bad(struct bt_err *err, const char *what, const char *name, const char *why)
{
    return BT_FAIL(err, BT_E_FORMAT, "%s: tensor %.80s: %s", what, name, why);
}

/* Elements of the shape; false if it is no array of positive integers or the product overflows. */
static bool read_shape(const json_t *shape, struct bt_st_tensor *t, size_t *ret_elems)
{
    size_t elems = 1;

    if (!json_is_array(shape) || json_array_size(shape) > BT_ST_MAX_DIMS) {
        return false;
    }
    t->n_dims = (int)json_array_size(shape);
    for (int i = 0; i < t->n_dims; i++) {
        const json_t *d = json_array_get(shape, (size_t)i);

        if (!json_is_integer(d) || json_integer_value(d) <= 0 ||
            !bt_mul_size(elems, (size_t)json_integer_value(d), &elems)) {
            return false;
        }
        t->shape[i] = json_integer_value(d);
    }
    *ret_elems = elems;
    return true;
}

static bool read_range(const json_t *range, size_t *ret_begin, size_t *ret_end)
{
    const json_t *b = json_array_get(range, 0), *e = json_array_get(range, 1);

    if (json_array_size(range) != 2 || !json_is_integer(b) || !json_is_integer(e) ||
        json_integer_value(b) < 0 || json_integer_value(e) < json_integer_value(b)) {
        return false;
    }
    *ret_begin = (size_t)json_integer_value(b);
    *ret_end = (size_t)json_integer_value(e);
    return true;
}

static int read_entry(const json_t *v, const char *what, struct bt_st_tensor *t, struct bt_err *err)
{
    const char *dtype = json_string_value(json_object_get(v, "dtype"));
    size_t elems = 0, bytes = 0, end = 0, i = 0;

    if (!json_is_object(v) || json_object_size(v) != 3) {
        return bad(err, what, t->name, "must have exactly dtype, shape and data_offsets");
    }
    while (dtype && i < BT_ARRAY_LEN(st_dtypes) && strcmp(dtype, st_dtypes[i].name) != 0) {
        i++;
    }
    if (!dtype || i == BT_ARRAY_LEN(st_dtypes)) {
        return BT_FAIL(err, BT_E_FORMAT, "%s: tensor %.80s: unknown dtype \"%.20s\"", what, t->name,
                       dtype ? dtype : "");
    }
    t->dtype = st_dtypes[i].dtype;
    t->dtype_name = st_dtypes[i].name;
    if (!read_shape(json_object_get(v, "shape"), t, &elems) ||
        !bt_mul_size(elems, st_dtypes[i].bytes, &bytes)) {
        return bad(err, what, t->name, "shape must be a few positive integers");
    }
    if (!read_range(json_object_get(v, "data_offsets"), &t->begin, &end)) {
        return bad(err, what, t->name, "data_offsets must be two ascending integers");
    }
    t->bytes = end - t->begin;
    return t->bytes == bytes ? BT_OK
                             : bad(err, what, t->name, "data_offsets do not match shape and dtype");
}

static int cmp_begin(const void *a, const void *b)
{
    const struct bt_st_tensor *x = a, *y = b;

    return (x->begin > y->begin) - (x->begin < y->begin);
}

/* The ranges must tile the data exactly. */
static int
place(struct bt_st *st, const uint8_t *data, size_t n, const char *what, struct bt_err *err)
{
    size_t at = 0;

    if (st->n) {
        qsort(st->tensors, st->n, sizeof(*st->tensors), cmp_begin);
    }
    for (size_t i = 0; i < st->n; i++) {
        struct bt_st_tensor *t = &st->tensors[i];

        if (t->begin != at) {
            return bad(err, what, t->name,
                       t->begin < at ? "its range overlaps another one" : "a gap before its range");
        }
        if (t->bytes > n - at) {
            return bad(err, what, t->name, "its range ends behind the file");
        }
        t->data = data + at;
        at += t->bytes;
    }
    return at == n ? BT_OK
                   : BT_FAIL(err, BT_E_FORMAT,
                             "%s: %zu bytes behind the last tensor belong to none", what, n - at);
}

static int read_entries(struct bt_st *st, const char *what, struct bt_err *err)
{
    const char *name;
    json_t *v;

    st->tensors = bt_calloc(json_object_size(st->header), sizeof(*st->tensors));
    if (!st->tensors) {
        return BT_E_NOMEM;
    }
    json_object_foreach(st->header, name, v)
    {
        struct bt_st_tensor *t = &st->tensors[st->n];
        int rc;

        if (strcmp(name, "__metadata__") == 0) {
            if (!json_is_object(v)) {
                return BT_FAIL(err, BT_E_FORMAT, "%s: __metadata__ is not an object", what);
            }
            continue;
        }
        t->name = name;
        rc = read_entry(v, what, t, err);
        if (rc != BT_OK) {
            return rc;
        }
        st->n++;
    }
    return BT_OK;
}

int bt_st_parse(const uint8_t *p, size_t n, const char *what, struct bt_st *ret, struct bt_err *err)
{
    static const struct bt_json_caps caps = {BT_ST_MAX_HEADER, 1000000, 4};
    struct bt_st st = {0};
    uint64_t head;
    int rc;

    if (n < 8) {
        return BT_FAIL(err, BT_E_FORMAT, "%s: too short for safetensors", what);
    }
    memcpy(&head, p, 8);
    if (head > n - 8) {
        return BT_FAIL(err, BT_E_FORMAT, "%s: header of %llu bytes is longer than the file", what,
                       (unsigned long long)head);
    }
    rc = bt_json_parse((struct bt_str){(const char *)p + 8, (size_t)head}, what, &caps, &st.header,
                       err);
    if (rc == BT_OK) {
        rc = read_entries(&st, what, err);
    }
    if (rc == BT_OK) {
        rc = place(&st, p + 8 + head, n - 8 - (size_t)head, what, err);
    }
    if (rc != BT_OK) {
        bt_st_fini(&st);
        return rc;
    }
    *ret = st;
    return BT_OK;
}

void bt_st_fini(struct bt_st *st)
{
    json_decref(st->header);
    free(st->tensors);
    *st = (struct bt_st){0};
}
