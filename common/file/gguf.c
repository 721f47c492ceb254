/* Reader of GGUF tables (format in gguf.h). One pass with a cursor that cannot leave the range;
 * arrays in arrays are skipped with a small explicit stack, so nesting costs no call depth. */
#include "common/file/gguf.h"

#include <math.h>
#include <stdlib.h>

struct cursor {
    const uint8_t *p; /* whole range */
    size_t n;
    size_t at;
};

/* X(id, name, dtype or -1): numbers that the format gives tensor types. */
static const struct {
    uint32_t id;
    const char *name;
    int dtype;
} tensor_types[] = {
    {0, "F32", BT_DTYPE_F32},
    {1, "F16", BT_DTYPE_F16},
    {2, "Q4_0", BT_DTYPE_Q4_0},
    {3, "Q4_1", BT_DTYPE_Q4_1},
    {6, "Q5_0", -1},
    {7, "Q5_1", -1},
    {8, "Q8_0", BT_DTYPE_Q8_0},
    {9, "Q8_1", -1},
    {10, "Q2_K", -1},
    {11, "Q3_K", -1},
    {12, "Q4_K", -1},
    {13, "Q5_K", -1},
    {14, "Q6_K", -1},
    {15, "Q8_K", -1},
    {16, "IQ2_XXS", -1},
    {17, "IQ2_XS", -1},
    {18, "IQ3_XXS", -1},
    {19, "IQ1_S", -1},
    {20, "IQ4_NL", -1},
    {21, "IQ3_S", -1},
    {22, "IQ2_S", -1},
    {23, "IQ4_XS", -1},
    {24, "I8", -1},
    {25, "I16", -1},
    {26, "I32", -1},
    {27, "I64", -1},
    {28, "F64", -1},
    {29, "IQ1_M", -1},
    {30, "BF16", BT_DTYPE_BF16},
    {34, "TQ1_0", -1},
    {35, "TQ2_0", -1},
    {39, "MXFP4", -1},
};

static const struct {
    const char *name;
    uint8_t bytes; /* 0 = variable */
} value_types[BT_GGUF_TYPE_COUNT] = {
    [BT_GGUF_U8] = {"uint8", 1},    [BT_GGUF_I8] = {"int8", 1},    [BT_GGUF_U16] = {"uint16", 2},
    [BT_GGUF_I16] = {"int16", 2},   [BT_GGUF_U32] = {"uint32", 4}, [BT_GGUF_I32] = {"int32", 4},
    [BT_GGUF_F32] = {"float32", 4}, [BT_GGUF_BOOL] = {"bool", 1},  [BT_GGUF_STR] = {"string", 0},
    [BT_GGUF_ARR] = {"array", 0},   [BT_GGUF_U64] = {"uint64", 8}, [BT_GGUF_I64] = {"int64", 8},
    [BT_GGUF_F64] = {"float64", 8},
};

static size_t left(const struct cursor *c)
{
    return c->n - c->at;
}

static bool take(struct cursor *c, void *ret, size_t n)
{
    if (n > left(c)) {
        return false;
    }
    memcpy(ret, c->p + c->at, n);
    c->at += n;
    return true;
}

static bool skip(struct cursor *c, uint64_t n)
{
    if (n > left(c)) {
        return false;
    }
    c->at += (size_t)n;
    return true;
}

static bool take_str(struct cursor *c, struct bt_str *ret)
{
    uint64_t n;

    if (!take(c, &n, sizeof(n)) || n > left(c)) {
        return false;
    }
    *ret = (struct bt_str){(const char *)c->p + c->at, (size_t)n};
    c->at += (size_t)n;
    return true;
}

/* Skips `count` values of one type that is no array. */
static bool skip_flat(struct cursor *c, uint32_t type, uint64_t count)
{
    struct bt_str s;

    if (type != BT_GGUF_STR) {
        /* No overflow: count was held against the bytes left, sizes are at most 8. */
        return count <= left(c) && skip(c, count * value_types[type].bytes);
    }
    for (; count > 0; count--) {
        if (!take_str(c, &s)) {
            return false;
        }
    }
    return true;
}

/* Skips the elements of an array whose type and count were read. */
static const char *skip_array(struct cursor *c, uint32_t elem, uint64_t count)
{
    uint64_t todo[BT_GGUF_MAX_NESTING]; /* arrays still to come on each level */
    int depth = 0;

    for (;;) {
        if (elem >= BT_GGUF_TYPE_COUNT) {
            return "unknown array element type";
        }
        if (elem == BT_GGUF_ARR) {
            if (depth == BT_GGUF_MAX_NESTING) {
                return "arrays nested too deeply";
            }
            if (count > left(c) / 12) {
                return "array longer than the file";
            }
            todo[depth++] = count;
        } else if (!skip_flat(c, elem, count)) {
            return "array longer than the file";
        }
        while (depth > 0 && todo[depth - 1] == 0) {
            depth--;
        }
        if (depth == 0) {
            return NULL;
        }
        todo[depth - 1]--;
        if (!take(c, &elem, sizeof(elem)) || !take(c, &count, sizeof(count))) {
            return "array cut short";
        }
    }
}

static const char *read_value(struct cursor *c, struct bt_gguf_kv *kv)
{
    const char *bad = NULL;
    size_t start;

    kv->count = 1;
    kv->elem = kv->type;
    if (kv->type >= BT_GGUF_TYPE_COUNT) {
        return "unknown value type";
    }
    if (kv->type == BT_GGUF_ARR &&
        (!take(c, &kv->elem, sizeof(kv->elem)) || !take(c, &kv->count, sizeof(kv->count)))) {
        return "array cut short";
    }
    start = c->at;
    kv->p = c->p + start;
    if (kv->type == BT_GGUF_ARR) {
        bad = skip_array(c, kv->elem, kv->count);
    } else if (!skip_flat(c, kv->type, 1)) {
        bad = "value longer than the file";
    } else if (kv->type == BT_GGUF_BOOL && kv->p[0] > 1) {
        bad = "a bool that is neither 0 nor 1";
    }
    kv->bytes = c->at - start;
    return bad;
}

static int cmp_kv(const void *a, const void *b)
{
    const struct bt_gguf_kv *x = a, *y = b;

    return bt_str_cmp(x->key, y->key);
}

static int read_keys(struct cursor *c, uint64_t n_kvs, struct bt_gguf *g, struct bt_err *err)
{
    /* The shortest key is 8 + 1 + 4 + 1 bytes. */
    if (n_kvs > BT_GGUF_MAX_KEYS || n_kvs > left(c) / 14) {
        return BT_FAIL(err, BT_E_FORMAT, "gguf: n_kv %llu is too large", (unsigned long long)n_kvs);
    }
    g->kvs = bt_calloc((size_t)n_kvs, sizeof(*g->kvs));
    if (!g->kvs) {
        return BT_E_NOMEM;
    }
    for (size_t i = 0; i < n_kvs; i++) {
        struct bt_gguf_kv *kv = &g->kvs[i];
        const char *bad;

        if (!take_str(c, &kv->key)) {
            return BT_FAIL(err, BT_E_FORMAT, "gguf: name of key %zu is longer than the file", i);
        }
        if (kv->key.n == 0 || kv->key.n > 65535) {
            return BT_FAIL(err, BT_E_FORMAT, "gguf: name of key %zu has %zu bytes", i, kv->key.n);
        }
        bad = take(c, &kv->type, sizeof(kv->type)) ? read_value(c, kv) : "value cut short";
        if (bad) {
            return BT_FAIL(err, BT_E_FORMAT, "gguf: key %.*s: %s", BT_NAME_ARG(kv->key), bad);
        }
        g->n_kvs++;
    }
    qsort(g->kvs, g->n_kvs, sizeof(*g->kvs), cmp_kv);
    for (size_t i = 1; i < g->n_kvs; i++) {
        if (bt_str_eq(g->kvs[i - 1].key, g->kvs[i].key)) {
            return BT_FAIL(err, BT_E_FORMAT, "gguf: duplicate key %.*s",
                           BT_NAME_ARG(g->kvs[i].key));
        }
    }
    return BT_OK;
}

static int tensor_type(uint32_t id, struct bt_str name, enum bt_dtype *ret, struct bt_err *err)
{
    for (size_t i = 0; i < BT_ARRAY_LEN(tensor_types); i++) {
        if (tensor_types[i].id != id) {
            continue;
        }
        if (tensor_types[i].dtype < 0) {
            return BT_FAIL(err, BT_E_UNSUPPORTED, "gguf: tensor %.*s: type %s is not supported",
                           BT_NAME_ARG(name), tensor_types[i].name);
        }
        *ret = (enum bt_dtype)tensor_types[i].dtype;
        return BT_OK;
    }
    return BT_FAIL(err, BT_E_FORMAT, "gguf: tensor %.*s: unknown type %u", BT_NAME_ARG(name), id);
}

/* Dimensions come innermost first; shape is outermost first. */
static int read_dims(struct cursor *c, struct bt_tensor *t, struct bt_err *err)
{
    uint64_t dims[4];
    uint32_t n_dims;

    if (!take(c, &n_dims, sizeof(n_dims))) {
        return BT_FAIL(err, BT_E_FORMAT, "gguf: tensor %.*s: cut short", BT_NAME_ARG(t->name));
    }
    if (n_dims < 1 || n_dims > BT_ARRAY_LEN(dims)) {
        return BT_FAIL(err, BT_E_FORMAT, "gguf: tensor %.*s: %u dimensions", BT_NAME_ARG(t->name),
                       n_dims);
    }
    for (uint32_t i = 0; i < n_dims; i++) {
        if (!take(c, &dims[i], sizeof(dims[i]))) {
            return BT_FAIL(err, BT_E_FORMAT, "gguf: tensor %.*s: cut short", BT_NAME_ARG(t->name));
        }
        if (dims[i] == 0 || dims[i] > INT64_MAX) {
            return BT_FAIL(err, BT_E_FORMAT, "gguf: tensor %.*s: dimension %u is %llu",
                           BT_NAME_ARG(t->name), i, (unsigned long long)dims[i]);
        }
    }
    while (n_dims > 2 && dims[n_dims - 1] == 1) {
        n_dims--;
    }
    if (n_dims > 2) {
        return BT_FAIL(err, BT_E_UNSUPPORTED, "gguf: tensor %.*s: %u dimensions are not supported",
                       BT_NAME_ARG(t->name), n_dims);
    }
    t->n_dims = (int)n_dims;
    for (uint32_t i = 0; i < n_dims; i++) {
        t->shape[i] = (int64_t)dims[n_dims - 1 - i];
    }
    return BT_OK;
}

/* Reads one tensor; its offset waits in *ret_offset until the start of the data is known. */
static int read_tensor(
    struct cursor *c, size_t idx, struct bt_tensor *t, uint64_t *ret_offset, struct bt_err *err)
{
    uint32_t type;
    int rc;

    if (!take_str(c, &t->name)) {
        return BT_FAIL(err, BT_E_FORMAT, "gguf: name of tensor %zu is longer than the file", idx);
    }
    if (t->name.n == 0 || t->name.n > 255) {
        return BT_FAIL(err, BT_E_FORMAT, "gguf: name of tensor %zu has %zu bytes", idx, t->name.n);
    }
    rc = read_dims(c, t, err);
    if (rc != BT_OK) {
        return rc;
    }
    if (!take(c, &type, sizeof(type)) || !take(c, ret_offset, sizeof(*ret_offset))) {
        return BT_FAIL(err, BT_E_FORMAT, "gguf: tensor %.*s: cut short", BT_NAME_ARG(t->name));
    }
    rc = tensor_type(type, t->name, &t->dtype, err);
    if (rc != BT_OK) {
        return rc;
    }
    if (!bt_tensor_bytes(t->dtype, t->n_dims == 2 ? t->shape[0] : 1, t->shape[t->n_dims - 1],
                         &t->bytes)) {
        return BT_FAIL(err, BT_E_FORMAT, "gguf: tensor %.*s: shape [%lld, %lld] does not fit %s",
                       BT_NAME_ARG(t->name), (long long)t->shape[0], (long long)t->shape[1],
                       bt_dtype_name(t->dtype));
    }
    return BT_OK;
}

/* No two tensors share a byte. `t` is sorted by address here. */
static int cmp_data(const void *a, const void *b)
{
    const struct bt_tensor *x = a, *y = b;

    return x->data < y->data ? -1 : x->data > y->data;
}

static int check_overlap(struct bt_tensor *t, size_t n, struct bt_err *err)
{
    qsort(t, n, sizeof(*t), cmp_data);
    for (size_t i = 1; i < n; i++) {
        if ((const uint8_t *)t[i - 1].data + t[i - 1].bytes > (const uint8_t *)t[i].data) {
            return BT_FAIL(err, BT_E_FORMAT, "gguf: tensor %.*s overlaps another one",
                           BT_NAME_ARG(t[i].name));
        }
    }
    return BT_OK;
}

static int alignment(const struct bt_gguf *g, size_t *ret, struct bt_err *err)
{
    const struct bt_gguf_kv *kv = bt_gguf_find(g, "general.alignment");
    int64_t a = 32;

    if (kv && (!bt_gguf_as_int(kv, &a) || a < 8 || a > (1 << 20) || (a & (a - 1)) != 0)) {
        return BT_FAIL(err, BT_E_FORMAT,
                       "gguf: key general.alignment: must be a power of two from 8 to 1048576");
    }
    *ret = (size_t)a;
    return BT_OK;
}

/* Turns offsets into pointers; every byte must be in the file. */
static int
place_tensors(struct cursor *c, struct bt_gguf *g, const uint64_t *offsets, struct bt_err *err)
{
    size_t align = 0, start;
    int rc = alignment(g, &align, err);

    if (rc != BT_OK) {
        return rc;
    }
    if (!bt_add_size(c->at, align - 1, &start)) {
        return BT_FAIL(err, BT_E_FORMAT, "gguf: key general.alignment: too large");
    }
    start &= ~(align - 1);
    for (size_t i = 0; i < g->n_tensors; i++) {
        struct bt_tensor *t = &g->tensors[i];

        if (offsets[i] % align != 0 || start > c->n || offsets[i] > c->n - start ||
            t->bytes > c->n - start - offsets[i]) {
            return BT_FAIL(err, BT_E_FORMAT,
                           "gguf: tensor %.*s: offset %llu with %zu bytes, the file has %zu bytes "
                           "of tensors aligned to %zu",
                           BT_NAME_ARG(t->name), (unsigned long long)offsets[i], t->bytes,
                           start > c->n ? 0 : c->n - start, align);
        }
        t->data = c->p + start + offsets[i];
    }
    rc = check_overlap(g->tensors, g->n_tensors, err);
    return rc == BT_OK ? bt_tensors_sort(g->tensors, g->n_tensors, err) : rc;
}

static int read_tensors(struct cursor *c, uint64_t n_tensors, struct bt_gguf *g, struct bt_err *err)
{
    BT_AUTO(bt_free_ptr) uint64_t *offsets = NULL;

    /* The shortest tensor entry is 8 + 1 + 4 + 8 + 4 + 8 bytes. */
    if (n_tensors > BT_GGUF_MAX_TENSORS || n_tensors > left(c) / 33) {
        return BT_FAIL(err, BT_E_FORMAT, "gguf: n_tensors %llu is too large",
                       (unsigned long long)n_tensors);
    }
    g->tensors = bt_calloc((size_t)n_tensors, sizeof(*g->tensors));
    offsets = bt_calloc((size_t)n_tensors, sizeof(*offsets));
    if (!g->tensors || !offsets) {
        return BT_E_NOMEM;
    }
    for (size_t i = 0; i < n_tensors; i++) {
        int rc = read_tensor(c, i, &g->tensors[i], &offsets[i], err);

        if (rc != BT_OK) {
            return rc;
        }
        g->n_tensors++;
    }
    return place_tensors(c, g, offsets, err);
}

static int read_header(
    struct cursor *c, struct bt_gguf *g, uint64_t *ret_nt, uint64_t *ret_nk, struct bt_err *err)
{
    char magic[4];

    if (!take(c, magic, 4) || memcmp(magic, "GGUF", 4) != 0) {
        return BT_FAIL(err, BT_E_FORMAT, "gguf: not a GGUF file (no magic)");
    }
    if (!take(c, &g->version, 4)) {
        return BT_FAIL(err, BT_E_FORMAT, "gguf: header cut short");
    }
    if (g->version != 2 && g->version != 3) {
        return BT_FAIL(err, BT_E_UNSUPPORTED,
                       (g->version & 0xffff) == 0
                           ? "gguf: big-endian files are not supported (version word %#x)"
                           : "gguf: version %u is not supported (2 and 3 are)",
                       g->version);
    }
    if (!take(c, ret_nt, 8) || !take(c, ret_nk, 8)) {
        return BT_FAIL(err, BT_E_FORMAT, "gguf: header cut short");
    }
    return BT_OK;
}

int bt_gguf_parse(const uint8_t *p, size_t n, struct bt_gguf *ret, struct bt_err *err)
{
    struct cursor c = {p, n, 0};
    struct bt_gguf g = {0};
    uint64_t n_tensors = 0, n_kvs = 0;
    int rc = read_header(&c, &g, &n_tensors, &n_kvs, err);

    if (rc == BT_OK) {
        rc = read_keys(&c, n_kvs, &g, err);
    }
    if (rc == BT_OK) {
        rc = read_tensors(&c, n_tensors, &g, err);
    }
    if (rc != BT_OK) {
        bt_gguf_fini(&g);
        return rc;
    }
    *ret = g;
    return BT_OK;
}

void bt_gguf_fini(struct bt_gguf *g)
{
    free(g->kvs);
    free(g->tensors);
    *g = (struct bt_gguf){0};
}

const struct bt_gguf_kv *bt_gguf_find(const struct bt_gguf *g, const char *key)
{
    struct bt_gguf_kv want = {.key = bt_str_of(key)};

    return g->n_kvs ? bsearch(&want, g->kvs, g->n_kvs, sizeof(*g->kvs), cmp_kv) : NULL;
}

#define READ_AS(ctype, kv)                                                                         \
    ({                                                                                             \
        ctype v_;                                                                                  \
        memcpy(&v_, (kv)->p, sizeof(v_));                                                          \
        v_;                                                                                        \
    })

bool bt_gguf_as_int(const struct bt_gguf_kv *kv, int64_t *ret)
{
    uint64_t u;

    switch (kv->type) {
    case BT_GGUF_U8:
        *ret = kv->p[0];
        return true;
    case BT_GGUF_I8:
        *ret = (int8_t)kv->p[0];
        return true;
    case BT_GGUF_U16:
        *ret = READ_AS(uint16_t, kv);
        return true;
    case BT_GGUF_I16:
        *ret = READ_AS(int16_t, kv);
        return true;
    case BT_GGUF_U32:
        *ret = READ_AS(uint32_t, kv);
        return true;
    case BT_GGUF_I32:
        *ret = READ_AS(int32_t, kv);
        return true;
    case BT_GGUF_I64:
        *ret = READ_AS(int64_t, kv);
        return true;
    case BT_GGUF_U64:
        u = READ_AS(uint64_t, kv);
        if (u > INT64_MAX) {
            return false;
        }
        *ret = (int64_t)u;
        return true;
    default:
        return false;
    }
}

bool bt_gguf_as_float(const struct bt_gguf_kv *kv, double *ret)
{
    double v;

    if (kv->type == BT_GGUF_F32) {
        v = (double)READ_AS(float, kv);
    } else if (kv->type == BT_GGUF_F64) {
        v = READ_AS(double, kv);
    } else {
        return false;
    }
    if (!isfinite(v)) {
        return false;
    }
    *ret = v;
    return true;
}

bool bt_gguf_as_str(const struct bt_gguf_kv *kv, struct bt_str *ret)
{
    if (kv->type != BT_GGUF_STR) {
        return false;
    }
    *ret = (struct bt_str){(const char *)kv->p + 8, kv->bytes - 8};
    return true;
}

bool bt_gguf_as_bool(const struct bt_gguf_kv *kv, bool *ret)
{
    if (kv->type != BT_GGUF_BOOL) {
        return false;
    }
    *ret = kv->p[0] != 0;
    return true;
}

const char *bt_gguf_type_name(uint32_t type)
{
    return type < BT_GGUF_TYPE_COUNT ? value_types[type].name : "unknown";
}
