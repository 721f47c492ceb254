/* Frame of the op tests, see ops_test.h. */
#include "tests/ops/ops_test.h"

#include "kernels/core/dtype.h"
#include "kernels/core/half.h"
#include "kernels/cpu/pack.h"
#include "kernels/cpu/ref/ref.h"

#define GUARD 7 /* floats between output rows that must stay untouched */

static uint32_t seed_state = 1;

void test_seed(uint32_t seed)
{
    seed_state = seed * 2654435761u + 1;
}

uint32_t test_rand(void)
{
    seed_state ^= seed_state << 13; /* xorshift32 (Marsaglia 2003) */
    seed_state ^= seed_state >> 17;
    seed_state ^= seed_state << 5;
    return seed_state;
}

float test_float(void)
{
    return (float)(test_rand() >> 8) / 8388608.0f - 1;
}

void *test_alloc(size_t bytes)
{
    size_t size = (bytes + 64) / 64 * 64;
    void *p = aligned_alloc(64, size);

    assert_non_null(p);
    memset(p, 0xff, size);
    return p;
}

float *test_floats(size_t n, float scale)
{
    float *p = test_alloc(n * sizeof(*p));

    for (size_t i = 0; i < n; i++) {
        p[i] = test_float() * scale;
    }
    return p;
}

void test_stream_init(struct kn_stream *s, int threads, size_t rows, size_t k)
{
    struct bt_err err = {0};

    memset(s, 0, sizeof(*s));
    assert_int_equal(kn_team_create(threads, &s->team, &err), BT_OK);
    s->scratch_bytes = kn_scratch_bytes(rows, k);
    s->scratch = test_alloc(s->scratch_bytes);
    s->thread_scratch = test_alloc((size_t)threads * KN_THREAD_SCRATCH_BYTES);
}

void test_stream_fini(struct kn_stream *s)
{
    kn_team_destroy(s->team);
    free(s->scratch);
    free(s->thread_scratch);
}

static void put_f16(uint8_t *p, float f)
{
    uint16_t h = kn_f32_to_f16(f);

    memcpy(p, &h, 2);
}

struct bt_tensor test_tensor(enum bt_dtype t, int n, int k)
{
    size_t bytes = (size_t)n * kn_row_bytes(t, (size_t)k), step = bt_dtype_block_bytes(t);
    uint8_t *p = test_alloc(bytes);

    for (size_t i = 0; i < bytes; i += step) {
        float x = test_float();

        for (size_t b = 0; b < step; b++) {
            p[i + b] = (uint8_t)test_rand();
        }
        switch (t) {
        case BT_DTYPE_F32:
            memcpy(p + i, &x, 4);
            break;
        case BT_DTYPE_F16:
            put_f16(p + i, x);
            break;
        case BT_DTYPE_BF16:
            p[i] = (uint8_t)(kn_bits_of_f32(x) >> 16);
            p[i + 1] = (uint8_t)(kn_bits_of_f32(x) >> 24);
            break;
        case BT_DTYPE_Q4_1:
            put_f16(p + i + 2, test_float());
            put_f16(p + i, x / 8);
            break;
        case BT_DTYPE_Q8_0:
            put_f16(p + i, x / 128);
            p[i + 2] = 0x80; /* the most negative value, in every block */
            break;
        case BT_DTYPE_Q4_0:
        case BT_DTYPE_COUNT:
            put_f16(p + i, x / 8);
            break;
        }
    }
    return (struct bt_tensor){.name = BT_STR("test"),
                              .dtype = t,
                              .n_dims = 2,
                              .shape = {n, k},
                              .data = p,
                              .bytes = bytes};
}

const void *test_pack(enum kn_format format, const struct bt_tensor *t)
{
    size_t n = (size_t)t->shape[0], k = (size_t)t->shape[1], tile = kn_tile_bytes(t->dtype, k);
    size_t n_tiles = BT_DIV_UP(n, KN_TILE);
    struct kn_pack of = {t->dtype, format == KN_FORMAT_GRID16, t->data, n, k};
    char *p;

    if (format == KN_FORMAT_FILE) {
        return t->data;
    }
    p = test_alloc(n_tiles * tile);
    for (size_t i = 0; i < n_tiles; i++) {
        kn_tile_pack(&of, i, p + i * tile);
    }
    return p;
}

void test_pack_free(enum kn_format format, const void *data)
{
    if (format != KN_FORMAT_FILE) {
        free((void *)data);
    }
}

static void describe(const struct fixture *f, const char *isa, const char *what, int row, int col)
{
    print_error("%s %s rows=%d a=%d b=%d c=%d d=%d, isa %s: %s at row %d, column %d\n",
                kn_op_name(f->c->op), f->dtype, f->c->rows, f->c->a, f->c->b, f->c->c, f->c->d, isa,
                what, row, col);
}

static bool is_amx(const char *isa)
{
    return strcmp(isa, "amx") == 0;
}

static bool has_pairs(const char *isa)
{
    return strcmp(isa, "avx512bf16") == 0;
}

/* AMX multiplies BF16 weights and f16 K and V in an order of its own, in pieces of 8 bits; AVX-512
 * BF16 the former. */
static bool own_order(const struct fixture *f, const char *isa)
{
    return ((f->bf16 || f->kv_f16) && is_amx(isa)) || (f->bf16 && has_pairs(isa));
}

typedef void matmul_fn(struct kn_stream *stream, const struct kn_matmul_args *a);

/* The plain C row that means what `isa` does, where that is not the table's. */
static matmul_fn *meant_by(const struct fixture *f, const char *isa)
{
    if (f->quant && is_amx(isa)) { /* both sides on grids */
        return kn_ref_matmul_wide;
    }
    return f->bf16 && has_pairs(isa) ? kn_ref_matmul_bf16 : NULL;
}

static float *output_of(const struct fixture *f)
{
    float *out = test_floats((size_t)f->c->rows * (size_t)(f->width + GUARD), 1);

    return out;
}

/* Rows in pieces of `piece`, each into its own place. */
static void run_pieces(
    const struct fixture *f, const struct kn_ops *ops, struct kn_stream *s, int piece, float *out)
{
    size_t stride = (size_t)(f->width + GUARD);

    for (int r = 0; r < f->c->rows; r += piece) {
        f->run(f, ops, s, r, BT_MIN(piece, f->c->rows - r), out + (size_t)r * stride, stride);
    }
}

static void
check_close(const struct fixture *f, const char *isa, const float *ref, const float *got)
{
    size_t stride = (size_t)(f->width + GUARD);
    /* 16 bits of each activation against 24: 2^-18 of it may be missing; of a weight of attention
     * as much as its score lacks, here a sum of 64 or more products of up to 2. */
    double tol = f->c->tol;

    if (own_order(f, isa) && is_amx(isa)) {
        tol += f->kv_f16 ? 4e-5 : 3.9e-6;
    } else if (own_order(f, isa) && f->c->c == 1) { /* no other part: the instruction's own bits */
        tol = 0;
    }

    for (int r = 0; r < f->c->rows; r++) {
        const float *x = ref + (size_t)r * stride, *y = got + (size_t)r * stride;
        double max = 0;

        for (int i = 0; i < f->width; i++) {
            max = fmax(max, fabs((double)x[i]));
        }
        for (int i = 0; i < f->width; i++) {
            double diff = fabs((double)x[i] - (double)y[i]);

            if (!(diff <= tol * max)) {
                describe(f, isa, "differs from ref", r, i);
                fail_msg("ref %.9g, got %.9g, difference %.3g of row maximum, limit %.3g",
                         (double)x[i], (double)y[i], diff / max, tol);
            }
        }
        if (memcmp(x + f->width, y + f->width, GUARD * sizeof(float)) != 0) {
            describe(f, isa, "wrote beside its output", r, f->width);
            fail();
        }
    }
}

static void check_equal(
    const struct fixture *f, const char *isa, const char *what, const float *a, const float *b)
{
    size_t stride = (size_t)(f->width + GUARD);

    for (int r = 0; r < f->c->rows; r++) {
        for (int i = 0; i < f->width; i++) {
            size_t at = (size_t)r * stride + (size_t)i;

            if (memcmp(&a[at], &b[at], sizeof(float)) != 0) {
                describe(f, isa, what, r, i);
                fail_msg("bits differ: %.9g and %.9g", (double)a[at], (double)b[at]);
            }
        }
    }
}

/* `vec` holds the output of the first vector set (vec[n] is 0 then); all of them must give its
 * bits, save AMX where weights are BF16 or quantized. */
static void
check_isa(const struct fixture *f, const char *isa, const float *init, const float *ref, float *vec)
{
    static const int pieces[] = {1, 3, 5, 13};
    const struct kn_ops *ops;
    struct bt_err err = {0};
    size_t n = (size_t)f->c->rows * (size_t)(f->width + GUARD);
    float *base = test_alloc(n * sizeof(float)), *out = test_alloc(n * sizeof(float));
    size_t k = f->c->op == KN_OP_matmul ? (size_t)f->c->a : 1;

    assert_int_equal(kn_ops_select(isa, &ops, &err), BT_OK);
    for (int threads = 1; threads <= 3; threads++) {
        struct kn_stream s;

        test_stream_init(&s, threads, (size_t)f->c->rows, k);
        memcpy(out, init, n * sizeof(float));
        run_pieces(f, ops, &s, f->c->rows, out);
        if (threads == 1) {
            memcpy(base, out, n * sizeof(float));
            check_close(f, isa, ref, base);
        } else {
            check_equal(f, isa, "threads change bits", base, out);
        }
        for (size_t i = 0; i < BT_ARRAY_LEN(pieces); i++) {
            memcpy(out, init, n * sizeof(float));
            run_pieces(f, ops, &s, pieces[i], out);
            check_equal(f, isa, "pieces change bits", base, out);
        }
        test_stream_fini(&s);
    }
    if (strcmp(isa, "ref") != 0 && !own_order(f, isa) && !(f->quant && is_amx(isa))) {
        if (vec[n] != 0) {
            memcpy(vec, base, n * sizeof(float));
            vec[n] = 0;
        }
        check_equal(f, isa, "vector sets differ", vec, base);
    }
    free(base);
    free(out);
}

void test_fixture(const struct fixture *f)
{
    size_t n = (size_t)f->c->rows * (size_t)(f->width + GUARD);
    float *init = output_of(f), *ref = test_alloc(n * sizeof(float));
    float *vec = test_alloc((n + 1) * sizeof(float));
    const struct kn_ops *ops;
    struct kn_stream none = {0};
    struct bt_err err = {0};

    assert_int_equal(kn_ops_select("ref", &ops, &err), BT_OK);
    memcpy(ref, init, n * sizeof(float));
    run_pieces(f, ops, &none, f->c->rows, ref);
    for (const char *const *isa = kn_ops_available(); *isa; isa++) {
        if (meant_by(f, *isa)) {
            struct kn_ops own = *ops;
            float *want = test_alloc(n * sizeof(float));

            own.matmul = meant_by(f, *isa);
            memcpy(want, init, n * sizeof(float));
            run_pieces(f, &own, &none, f->c->rows, want);
            check_isa(f, *isa, init, want, vec);
            free(want);
        } else {
            check_isa(f, *isa, init, ref, vec);
        }
    }
    free(init);
    free(ref);
    free(vec);
}
