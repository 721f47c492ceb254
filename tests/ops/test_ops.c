/* Every op, on every instruction set of this machine, every dtype it takes and every case of
 * cases.def: against the plain C rows, and bit for bit against itself in other company. */
#include "tests/ops/ops_test.h"

#include "kernels/core/dtype.h"
#include "kernels/core/half.h"
#include "kernels/core/profile.h"
#include "kernels/model/model.h"

#define STRIDE_PAD 5 /* floats between input rows */

/* embed */

struct embed_data {
    struct bt_tensor table;
    int32_t ids[64];
};

static void run_embed(const struct fixture *f,
                      const struct kn_ops *ops,
                      struct kn_stream *s,
                      int row0,
                      int n,
                      float *out,
                      size_t stride)
{
    const struct embed_data *d = f->data;
    struct kn_embed_args a = {&d->table, d->ids + row0, n, out, stride};

    ops->embed(s, &a);
}

static void test_embed(const struct op_case *c, int dtype)
{
    struct embed_data d = {.table = test_tensor((enum bt_dtype)dtype, c->a, c->b)};
    struct fixture f = {c, bt_dtype_name((enum bt_dtype)dtype), c->b, run_embed, &d};

    for (int i = 0; i < c->rows; i++) {
        d.ids[i] = (int32_t)(test_rand() % (uint32_t)c->a);
    }
    test_fixture(&f);
    free((void *)d.table.data);
}

/* rmsnorm */

struct rows_data {
    float *x, *w;
    size_t stride;
};

static void run_rmsnorm(const struct fixture *f,
                        const struct kn_ops *ops,
                        struct kn_stream *s,
                        int row0,
                        int n,
                        float *out,
                        size_t stride)
{
    const struct rows_data *d = f->data;
    struct kn_rmsnorm_args a = {
        d->x + (size_t)row0 * d->stride, d->stride, d->w, n, f->c->a, f->c->b, 1e-5f, out, stride};

    ops->rmsnorm(s, &a);
}

static void test_rmsnorm(const struct op_case *c, int dtype)
{
    struct rows_data d = {.stride = (size_t)(c->a * c->b + STRIDE_PAD)};
    struct fixture f = {c, "f32", c->a * c->b, run_rmsnorm, &d};

    d.x = test_floats((size_t)c->rows * d.stride, 3);
    d.w = test_floats((size_t)c->b, 2);
    test_fixture(&f);
    free(d.x);
    free(d.w);
}

/* matmul */

struct matmul_data {
    float *x, *bias;
    size_t stride;
    struct bt_tensor t[KN_MAX_PARTS];
    struct kn_weight w[KN_FORMAT_COUNT];
};

static void run_matmul(const struct fixture *f,
                       const struct kn_ops *ops,
                       struct kn_stream *s,
                       int row0,
                       int n,
                       float *out,
                       size_t stride)
{
    const struct matmul_data *d = f->data;
    struct kn_matmul_args a = {d->x + (size_t)row0 * d->stride,
                               d->stride,
                               &d->w[ops->format],
                               n,
                               f->c->d & 1,
                               out,
                               stride};

    ops->matmul(s, &a);
}

static void test_matmul(const struct op_case *c, int dtype)
{
    struct matmul_data d = {.stride = (size_t)(c->a + STRIDE_PAD)};
    struct fixture f = {c, bt_dtype_name((enum bt_dtype)dtype), c->b * c->c, run_matmul, &d};

    if (c->a % (int)bt_dtype_block_elems((enum bt_dtype)dtype) != 0) {
        return; /* of one part: no such weights */
    }
    d.x = test_floats((size_t)c->rows * d.stride, 2);
    memset(d.x, 0, (size_t)BT_MIN(c->a, 32) * sizeof(float)); /* a block of zeros */
    d.bias = test_floats((size_t)c->b, 1);
    for (int i = 0; i < c->c; i++) { /* parts of different dtypes, the first as asked */
        d.t[i] = test_tensor((enum bt_dtype)((dtype + 2 * i) % BT_DTYPE_COUNT), c->b, c->a);
        f.bf16 |= d.t[i].dtype == BT_DTYPE_BF16;
        f.quant |= bt_dtype_block_elems(d.t[i].dtype) > 1;
    }
    for (int format = 0; format < KN_FORMAT_COUNT; format++) {
        d.w[format] = (struct kn_weight){.k = c->a, .n = c->b * c->c, .n_parts = c->c};
        for (int i = 0; i < c->c; i++) {
            d.w[format].part[i] = (struct kn_weight_part){
                d.t[i].dtype, c->b, test_pack((enum kn_format)format, &d.t[i]),
                c->d & 2 ? d.bias : NULL};
        }
    }
    test_fixture(&f);
    for (int i = 0; i < c->c; i++) {
        test_pack_free(KN_FORMAT_TILE16, d.w[KN_FORMAT_TILE16].part[i].data);
        test_pack_free(KN_FORMAT_GRID16, d.w[KN_FORMAT_GRID16].part[i].data);
        free((void *)d.t[i].data);
    }
    free(d.x);
    free(d.bias);
}

/* rope: in place, so the input is copied to the output first */

static void run_rope(const struct fixture *f,
                     const struct kn_ops *ops,
                     struct kn_stream *s,
                     int row0,
                     int n,
                     float *out,
                     size_t stride)
{
    const struct rows_data *d = f->data;
    struct kn_rope_args a = {
        out, stride, n, f->c->a, f->c->b, f->c->c, d->w + (size_t)row0 * 2 * (size_t)f->c->b};

    for (int r = 0; r < n; r++) {
        memcpy(out + (size_t)r * stride, d->x + (size_t)(row0 + r) * d->stride,
               (size_t)f->width * sizeof(float));
    }
    ops->rope(s, &a);
}

static void test_rope(const struct op_case *c, int dtype)
{
    struct rows_data d = {.stride = (size_t)(c->a * c->b + STRIDE_PAD)};
    struct fixture f = {c, "f32", c->a * c->b, run_rope, &d};

    d.x = test_floats((size_t)c->rows * d.stride, 3);
    d.w = test_floats((size_t)(c->rows * 2 * c->b), 1);
    test_fixture(&f);
    free(d.x);
    free(d.w);
}

/* swiglu: gates over the whole range of exp */

static void run_swiglu(const struct fixture *f,
                       const struct kn_ops *ops,
                       struct kn_stream *s,
                       int row0,
                       int n,
                       float *out,
                       size_t stride)
{
    const struct rows_data *d = f->data;
    struct kn_swiglu_args a = {d->x + (size_t)row0 * d->stride, d->stride, n, f->c->a, out, stride};

    ops->swiglu(s, &a);
}

static void test_swiglu(const struct op_case *c, int dtype)
{
    struct rows_data d = {.stride = (size_t)(2 * c->a + STRIDE_PAD)};
    struct fixture f = {c, "f32", c->a, run_swiglu, &d};

    d.x = test_floats((size_t)c->rows * d.stride, 8);
    for (int i = 0; i < 32; i++) {
        d.x[i] = (float)(i - 16) * 9; /* -144..135 */
    }
    test_fixture(&f);
    free(d.x);
}

/* gather */

static void run_gather(const struct fixture *f,
                       const struct kn_ops *ops,
                       struct kn_stream *s,
                       int row0,
                       int n,
                       float *out,
                       size_t stride)
{
    const struct rows_data *d = f->data;
    int rows[64];
    struct kn_gather_args a = {d->x, d->stride, rows, n, f->c->a, out, stride};

    for (int i = 0; i < n; i++) {
        rows[i] = 2 * (row0 + i) + 1;
    }
    ops->gather(s, &a);
}

static void test_gather(const struct op_case *c, int dtype)
{
    struct rows_data d = {.stride = (size_t)(c->a + STRIDE_PAD)};
    struct fixture f = {c, "f32", c->a, run_gather, &d};

    d.x = test_floats((size_t)(2 * c->rows + 1) * d.stride, 8);
    test_fixture(&f);
    free(d.x);
}

/* Paged KV */

struct kv_data {
    struct kv_layout l;
    void *pool;
    uint32_t pages[64];
    float *q, *k, *v;
    size_t stride;
    int start; /* absolute position of row 0 */
};

static void kv_init(struct kv_data *d, int heads, int dim, int page_tokens, int dtype, int total)
{
    struct bt_err err = {0};

    d->l = (struct kv_layout){.n_layers = 2,
                              .n_kv_heads = heads,
                              .head_dim = dim,
                              .page_tokens = page_tokens,
                              .dtype = (enum kv_dtype)dtype,
                              .n_pages = (uint32_t)(total / page_tokens + 3)};
    assert_int_equal(kv_layout_init(&d->l, &err), BT_OK);
    d->pool = test_alloc(d->l.bytes);
    assert_true(d->l.n_pages <= BT_ARRAY_LEN(d->pages));
    for (uint32_t i = 0; i < d->l.n_pages; i++) {
        d->pages[i] = (i * 7 + 3) % d->l.n_pages; /* some order */
    }
    if (d->l.n_pages % 7 == 0) {
        for (uint32_t i = 0; i < d->l.n_pages; i++) {
            d->pages[i] = d->l.n_pages - 1 - i;
        }
    }
}

/* K and V of positions [0, n), rows of d->k and d->v, through the plain C row. */
static void kv_fill(struct kv_data *d, int n)
{
    struct kn_seq_rows seq = {0, n, 0, d->pages};
    struct kn_kv_write_args a = {
        d->k, d->v, (size_t)(d->l.n_kv_heads * d->l.head_dim), 1, &seq, d->pool, &d->l, 1};
    const struct kn_ops *ops;
    struct bt_err err = {0};

    assert_int_equal(kn_ops_select("ref", &ops, &err), BT_OK);
    ops->kv_write(NULL, &a);
}

/* kv_write: the pool must hold the rounded values where the layout says, and nothing else. */

static void test_kv_write(const struct op_case *c, int dtype)
{
    struct kv_data d = {.stride = (size_t)(c->a * c->b + STRIDE_PAD)};
    size_t e = dtype == KV_DTYPE_F16 ? 2 : 4;
    char *want;

    kv_init(&d, c->a, c->b, c->c, dtype, c->d + c->rows);
    d.k = test_floats((size_t)c->rows * d.stride, 4);
    d.v = test_floats((size_t)c->rows * d.stride, 70000); /* beyond f16 */
    want = test_alloc(d.l.bytes);
    for (int i = 0; i < c->rows * c->a * c->b; i++) { /* the layout's rule, spelled out */
        int t = i / (c->a * c->b), h = i / c->b % c->a, x = i % c->b, pos = c->d + t;
        size_t src = (size_t)t * d.stride + (size_t)(h * c->b + x);
        size_t at = kv_layout_offset(&d.l, 1, d.pages[pos / c->c]) / e +
                    (size_t)((h * c->c + pos % c->c) * c->b + x);
        size_t half = (size_t)c->a * (size_t)c->c * (size_t)c->b;

        if (dtype == KV_DTYPE_F16) {
            ((uint16_t *)want)[at] = kn_f32_to_f16(d.k[src]);
            ((uint16_t *)want)[at + half] = kn_f32_to_f16(d.v[src]);
        } else {
            ((float *)want)[at] = d.k[src];
            ((float *)want)[at + half] = d.v[src];
        }
    }
    for (const char *const *isa = kn_ops_available(); *isa; isa++) {
        struct kn_seq_rows seqs[2] = {{0, 1, c->d, d.pages}, {1, c->rows - 1, c->d + 1, d.pages}};
        struct kn_kv_write_args a = {d.k, d.v, d.stride, 2, seqs, d.pool, &d.l, 1};
        const struct kn_ops *ops;
        struct bt_err err = {0};

        assert_int_equal(kn_ops_select(*isa, &ops, &err), BT_OK);
        for (int threads = 1; threads <= 3; threads++) {
            struct kn_stream s;

            test_stream_init(&s, threads, 1, 1);
            memset(d.pool, 0xff, d.l.bytes);
            ops->kv_write(&s, &a);
            assert_memory_equal(d.pool, want, d.l.bytes);
            test_stream_fini(&s);
        }
    }
    free(want);
    free(d.pool);
    free(d.k);
    free(d.v);
}

/* attention: two sequences in one call, rows alternate between pages of every size */

static void run_attention(const struct fixture *f,
                          const struct kn_ops *ops,
                          struct kn_stream *s,
                          int row0,
                          int n,
                          float *out,
                          size_t stride)
{
    const struct kv_data *d = f->data;
    int first = BT_MIN(n, 2);
    struct kn_seq_rows seqs[2] = {{0, first, d->start + row0, d->pages},
                                  {first, n - first, d->start + row0 + first, d->pages}};
    struct kn_attention_args a = {.q = d->q + (size_t)row0 * d->stride,
                                  .q_stride = d->stride,
                                  .n_heads = f->c->a,
                                  .scale = 0.2f,
                                  .n_seqs = n > first ? 2 : 1,
                                  .seqs = seqs,
                                  .kv = d->pool,
                                  .layout = &d->l,
                                  .layer = 1,
                                  .out = out,
                                  .out_stride = stride};

    ops->attention(s, &a);
}

/* The same K and V in pages of other sizes give the same bits. */
static void check_page_sizes(const struct fixture *f, struct kv_data *d, int total)
{
    static const int sizes[] = {8, 64, 256};
    size_t stride = (size_t)f->width, n = (size_t)f->c->rows * stride;
    float *base = test_alloc(n * sizeof(float)), *out = test_alloc(n * sizeof(float));
    int dtype = (int)d->l.dtype;

    for (const char *const *isa = kn_ops_available(); *isa; isa++) {
        const struct kn_ops *ops;
        struct bt_err err = {0};
        struct kn_stream s;

        test_stream_init(&s, 2, 1, 1);
        assert_int_equal(kn_ops_select(*isa, &ops, &err), BT_OK);
        for (size_t i = 0; i < BT_ARRAY_LEN(sizes); i++) {
            free(d->pool);
            kv_init(d, f->c->b, f->c->c, sizes[i], dtype, total);
            kv_fill(d, total);
            f->run(f, ops, &s, 0, f->c->rows, i ? out : base, stride);
            assert_true(i == 0 || memcmp(base, out, n * sizeof(float)) == 0);
        }
        test_stream_fini(&s);
    }
    free(base);
    free(out);
}

static void test_attention(const struct op_case *c, int dtype)
{
    int total = c->d + c->rows, width = c->a * c->c;
    struct kv_data d = {.stride = (size_t)(width + STRIDE_PAD), .start = c->d};
    bool f16 = dtype == KV_DTYPE_F16;
    struct fixture f = {
        c, f16 ? "kv f16" : "kv f32", width, run_attention, .data = &d, .kv_f16 = f16};

    d.q = test_floats((size_t)c->rows * d.stride, 3);
    d.k = test_floats((size_t)(total * c->b * c->c), 3);
    d.v = test_floats((size_t)(total * c->b * c->c), 3);
    kv_init(&d, c->b, c->c, 16, dtype, total);
    kv_fill(&d, total);
    test_fixture(&f);
    check_page_sizes(&f, &d, total);
    free(d.pool);
    free(d.q);
    free(d.k);
    free(d.v);
}

/* The matrix */

static const struct op_case cases[] = {
#define KN_CASE(op, rows, a, b, c, d, tol) {KN_OP_##op, rows, a, b, c, d, tol},
#include "tests/ops/cases.def"
#undef KN_CASE
};

enum { NONE = 1, WEIGHT = BT_DTYPE_COUNT, KV = 2 }; /* how many dtypes */

static void run_cases(enum kn_op op, int n_dtypes, void (*fn)(const struct op_case *, int))
{
    int n = 0;

    for (size_t i = 0; i < BT_ARRAY_LEN(cases); i++) {
        for (int t = 0; cases[i].op == op && t < n_dtypes; t++, n++) {
            test_seed((uint32_t)(i * 16 + (size_t)t));
            fn(&cases[i], t);
        }
    }
    assert_true(n > 0); /* every op has a case */
}

#define KN_OP(name, dtypes, what)                                                                  \
    static void op_##name(void **state)                                                            \
    {                                                                                              \
        run_cases(KN_OP_##name, dtypes, test_##name);                                              \
    }
#include "kernels/ops.def"
#undef KN_OP

/* What the bits of a half stand for (IEEE 754-2019, 3.4), and the half that is nearest to a number
 * that is not negative. */
static float half_of(uint16_t u)
{
    int exp = u >> 10 & 31, man = u & 0x3ff;
    float f = exp == 31 ? (man ? NAN : INFINITY)
                        : ldexpf((float)(exp ? man + 1024 : man), BT_MAX(exp, 1) - 25);

    return u & 0x8000 ? -f : f;
}

static float nearest_half(float x)
{
    float unit = ldexpf(1, BT_MAX(ilogbf(x), -14) - 10);
    float near = nearbyintf(x / unit) * unit;

    return near < 65536 ? near : INFINITY;
}

static void test_half(void **state)
{
    for (uint32_t h = 0; h < 65536; h++) {
        uint16_t u = (uint16_t)h;
        float want = half_of(u);

        if (isnan(want)) {
            assert_true(isnan(kn_f16_to_f32(u)));
        } else {
            assert_int_equal(kn_bits_of_f32(kn_f16_to_f32(u)), kn_bits_of_f32(want));
            assert_int_equal(kn_f32_to_f16(want), u);
        }
    }
    test_seed(1);
    for (int i = 0; i < 200000; i++) {
        float x = kn_f32_from_bits(0x33000000u + test_rand() % 0x15000000u); /* 2^-25..2^17 */
        uint16_t u = kn_f32_to_f16(x);

        assert_int_equal(kn_bits_of_f32(half_of(u)), kn_bits_of_f32(nearest_half(x)));
        assert_int_equal(kn_f32_to_f16(-x), u | 0x8000);
    }
}

/* A wrapped table does what the table does and counts it. */
static void test_profile(void **state)
{
    static const float x[] = {1, 2, 3, 4, 5, 6, 7, 8, 9};
    static const int rows[] = {0, 2};
    float out[6] = {0};
    struct kn_gather_args a = {x, 3, rows, 2, 3, out, 3};
    struct kn_op_count counts[KN_OP_COUNT];
    struct kn_stream none = {0};
    const struct kn_ops *ops, *counting;
    struct bt_err err = {0};

    assert_int_equal(kn_ops_select("ref", &ops, &err), BT_OK);
    assert_ptr_equal(kn_profile_wrap(ops), ops);
    kn_profile_enable();
    counting = kn_profile_wrap(ops);
    assert_ptr_not_equal(counting, ops);
    assert_string_equal(counting->numerics, ops->numerics);
    counting->gather(&none, &a);
    counting->gather(&none, &a);
    assert_memory_equal(out, x, 3 * sizeof(float));
    assert_memory_equal(out + 3, x + 6, 3 * sizeof(float));
    kn_profile_read(counts);
    for (int i = 0; i < KN_OP_COUNT; i++) {
        assert_int_equal(counts[i].calls, i == KN_OP_gather ? 2 : 0);
    }
    assert_int_equal(counts[KN_OP_gather].bytes, 2 * 2 * sizeof(out)); /* read and written */
    assert_int_equal(counts[KN_OP_gather].limit_ns, 0);                /* no rates yet */
    kn_profile_set_rates(1e9, 1e9);
    counting->gather(&none, &a);
    kn_profile_read(counts);
    assert_int_equal(counts[KN_OP_gather].limit_ns, 2 * sizeof(out)); /* a byte takes 1 ns */
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_profile),
        cmocka_unit_test(test_half),
#define KN_OP(name, dtypes, what) cmocka_unit_test(op_##name),
#include "kernels/ops.def"
#undef KN_OP
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
