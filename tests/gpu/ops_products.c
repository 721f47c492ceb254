/* Products: our kernel and cuBLASLt against double precision; bits that must not depend on rows. */
#include "tests/gpu/ops_check.h"

#include <math.h>
#include <stdlib.h>

static double dot(const float *x, const float *w, int k)
{
    double sum = 0;

    for (int i = 0; i < k; i++) {
        sum += (double)x[i] * (double)w[i];
    }
    return sum;
}

struct problem {
    enum kn_cuda_dtype t;
    int n, k, rows;
    struct mat w, x, out; /* out [rows, n] 16-bit */
    float *bias, *d_bias;
    double *ref;                         /* [rows, n] plain product */
    struct kn_cuda_map wm, xm, boxes[2]; /* of 48 and 56 rows */
};

static void problem_init(struct problem *p, enum kn_cuda_dtype t, int n, int k, int rows)
{
    *p = (struct problem){.t = t, .n = n, .k = k, .rows = rows};
    p->w = mat_new(t, (size_t)n * (size_t)k, 1.7f / sqrtf((float)k));
    p->x = mat_new(t, (size_t)rows * (size_t)k, 1);
    p->out = mat_new(t, (size_t)rows * (size_t)n, 1);
    p->bias = malloc((size_t)n * sizeof(float));
    for (int i = 0; i < n; i++) {
        p->bias[i] = rnd_float();
    }
    p->d_bias = to_device(p->bias, (size_t)n * sizeof(float));
    p->ref = malloc((size_t)rows * (size_t)n * sizeof(double));
    for (int r = 0; r < rows; r++) {
        for (int j = 0; j < n; j++) {
            p->ref[r * n + j] =
                dot(p->x.f + (size_t)r * (size_t)k, p->w.f + (size_t)j * (size_t)k, k);
        }
    }
    must(kn_cuda_map_init(&p->wm, t, p->w.d, (size_t)n, (size_t)k, (size_t)k, 64), "map of w");
    for (int i = 0; i < 2; i++) {
        must(kn_cuda_map_init(&p->boxes[i], t, p->w.d, (size_t)n, (size_t)k, (size_t)k, 48 + 8 * i),
             "map of w");
    }
    must(kn_cuda_map_init(&p->xm, t, p->x.d, (size_t)rows, (size_t)k, (size_t)k,
                          kn_cuda_stream_box(rows)),
         "map of x");
}

static void problem_free(struct problem *p)
{
    mat_free(&p->w);
    mat_free(&p->x);
    mat_free(&p->out);
    cudaFree(p->d_bias);
    free(p->bias);
    free(p->ref);
}

static double silu(double x)
{
    return x / (1 + exp(-x));
}

/* What element (r, j) should be, before the call's out is `was`. */
static double
expected(const struct problem *p, enum kn_cuda_stream_out kind, int r, int j, double was)
{
    const double *row = p->ref + (size_t)r * (size_t)p->n;

    switch (kind) {
    case KN_STREAM_STORE:
        return row[j] + (double)p->bias[j];
    case KN_STREAM_ADD:
        return row[j] + was;
    case KN_STREAM_SWIGLU:
        return silu(row[j]) * row[p->n / 2 + j];
    case KN_STREAM_F32:
    case KN_STREAM_QKV:
        break;
    }
    return row[j];
}

static const char *const kinds[] = {"store", "add", "swiglu", "f32", "qkv"};

static void check_kind(struct problem *p, enum kn_cuda_stream_out kind, int split, int stages)
{
    int width = kind == KN_STREAM_SWIGLU ? p->n / 2 : p->n;
    size_t n = (size_t)p->rows * (size_t)width;
    float *was = malloc(n * sizeof(float)), *got = malloc(n * sizeof(float)), *d_f32 = NULL;
    bool small = split == 2 || split == 8;
    struct kn_cuda_stream_gemm_args a = {.w = small ? &p->boxes[split == 2] : &p->wm,
                                         .x = &p->xm,
                                         .n = p->n,
                                         .k = p->k,
                                         .rows = p->rows,
                                         .kind = kind,
                                         .box = !small       ? 0
                                                : split == 2 ? 56
                                                             : 48,
                                         .bias = kind == KN_STREAM_STORE ? p->d_bias : NULL,
                                         .out = p->out.d,
                                         .out_stride = (size_t)width,
                                         .split = split,

                                         .stages = stages,
                                         .group = split == 4 ? 2 : 0,
                                         .warpgroups = split >= 4 ? 4 : 0};
    double err = 0, norm = 0, worst = 0;

    for (size_t i = 0; i < n; i++) {
        p->out.h[i] = to_16(p->t, rnd_float());
        was[i] = from_16(p->t, p->out.h[i]);
    }
    mat_send(&p->out);
    if (kind != KN_STREAM_ADD) {
        mat_poison(&p->out);
    }
    if (kind == KN_STREAM_F32) {
        d_f32 = to_device(got, n * sizeof(float));
        must((int)cudaMemset(d_f32, 0xff, n * sizeof(float)), "poison");
        a.out = d_f32;
    }
    must(kn_cuda_stream_gemm(p->t, &a, NULL), "stream_gemm");
    mat_fetch(&p->out);
    memcpy(got, p->out.f, n * sizeof(float));
    if (d_f32) {
        must((int)cudaMemcpy(got, d_f32, n * sizeof(float), cudaMemcpyDeviceToHost), "copy");
        cudaFree(d_f32);
    }
    for (int r = 0; r < p->rows; r++) {
        for (int j = 0; j < width; j++) {
            size_t at = (size_t)r * (size_t)width + (size_t)j;
            double want = expected(p, kind, r, j, (double)was[at]), d = (double)got[at] - want;

            err += d * d;
            norm += want * want;
            worst = d == d ? fmax(worst, fabs(d) / (fabs(want) + 1)) : INFINITY;
        }
    }
    err = sqrt(err / norm);
    check(err < (kind == KN_STREAM_F32 ? 1e-5 : 1.5 * eps_of(p->t)) && worst < 8 * eps_of(p->t),
          "stream_gemm %s n=%d k=%d rows=%d split=%d stages=%d %s: error %.2e, worst %.2e",
          kinds[kind], p->n, p->k, p->rows, split, stages, p->t ? "f16" : "bf16", err, worst);
    free(was);
    free(got);
}

/* Row 0 alone and among others: equal bits. */
static void check_rows_alike(struct problem *p)
{
    struct kn_cuda_stream_gemm_args a = {.w = &p->wm,
                                         .x = &p->xm,
                                         .n = p->n,
                                         .k = p->k,
                                         .rows = p->rows,
                                         .kind = KN_STREAM_STORE,
                                         .out = p->out.d,
                                         .out_stride = (size_t)p->n};
    uint16_t *all = malloc((size_t)p->n * 2);

    must(kn_cuda_stream_gemm(p->t, &a, NULL), "stream_gemm");
    mat_fetch(&p->out);
    memcpy(all, p->out.h, (size_t)p->n * 2);
    mat_poison(&p->out);
    a.rows = 1;
    must(kn_cuda_map_init(&p->xm, p->t, p->x.d, (size_t)p->rows, (size_t)p->k, (size_t)p->k, 8),
         "map of x");
    must(kn_cuda_stream_gemm(p->t, &a, NULL), "stream_gemm");
    mat_fetch(&p->out);
    check(memcmp(all, p->out.h, (size_t)p->n * 2) == 0,
          "stream_gemm n=%d k=%d: a row differs alone and among %d", p->n, p->k, p->rows);
    free(all);
}

static void check_library(struct problem *p, struct kn_gemm *g)
{
    struct kn_gemm_args a = {
        .x = p->x.d, .w = p->w.d, .rows = p->rows, .n = p->n, .k = p->k, .out = p->out.d};
    double err = 0, norm = 0;

    mat_poison(&p->out);
    must(kn_gemm_run(g, &a, NULL), "gemm");
    mat_fetch(&p->out);
    for (size_t i = 0; i < p->out.n; i++) {
        double d = (double)p->out.f[i] - p->ref[i];

        err += d * d;
        norm += p->ref[i] * p->ref[i];
    }
    check(sqrt(err / norm) < 1.5 * eps_of(p->t), "gemm n=%d k=%d rows=%d: error %.2e", p->n, p->k,
          p->rows, sqrt(err / norm));
}

#define FEW 96 /* rows, whole pages of 16 */

/* The folded heads against the product followed by kn_cuda_qkv_finish. */
static void check_heads(enum kn_cuda_dtype t, int d, int rows, bool norms, bool inter, bool bias)
{
    int heads = 6, kv_heads = 2, n = (heads + 2 * kv_heads) * d, k = 192, pt = 16, n_pages = 64;
    size_t stride = 2 * (size_t)kv_heads * (size_t)pt * (size_t)d * 2;
    struct problem p;
    struct mat kv = mat_new(t, (size_t)n_pages * stride / 2, 1), kv2;
    int32_t pos[512], page[512];
    float norm_w[128], freqs[64], *d_norm, *d_freqs, *table;
    struct kn_cuda_heads h = {.n_heads = heads,
                              .n_kv_heads = kv_heads,
                              .head_dim = d,
                              .page_tokens = pt,
                              .page_stride = stride,
                              .eps = 1e-5f,
                              .interleaved = inter};
    double err = 0, sum = 0;

    problem_init(&p, t, n, k, rows);
    for (int i = 0; i < 128; i++) {
        norm_w[i] = 1 + rnd_float() / 4;
        freqs[i / 2] = powf(10000, -(float)(i / 2) / 64);
    }
    for (int i = 0; i < rows; i++) {
        pos[i] = (int32_t)(rnd() % 1000) / pt * pt + i % pt;
        page[i] = i / pt % n_pages;
        if (i % 7 == 6) {
            page[i] = -1;
        }
    }
    d_norm = to_device(norm_w, sizeof(norm_w));
    d_freqs = to_device(freqs, sizeof(freqs));
    must((int)cudaMalloc((void **)&table, 1100 * (size_t)d * sizeof(float)), "cudaMalloc");
    must(kn_cuda_rope_table(d_freqs, 1100, d / 2, table, NULL), "rope table");
    h.cos_sin = table;
    h.pos = to_device(pos, sizeof(pos));
    h.page = to_device(page, sizeof(page));
    h.q_norm = h.k_norm = norms ? d_norm : NULL;
    kv2 = mat_new(t, kv.n, 1);
    memset(kv.h, 0, kv.n * 2);
    memset(kv2.h, 0, kv.n * 2);
    mat_send(&kv);
    mat_send(&kv2);
    struct kn_cuda_stream_gemm_args a = {.w = &p.wm,
                                         .x = &p.xm,
                                         .n = n,
                                         .k = k,
                                         .rows = rows,
                                         .kind = KN_STREAM_QKV,
                                         .bias = bias ? p.d_bias : NULL,
                                         .out = p.out.d,
                                         .out_stride = (size_t)n,
                                         .heads = &h};
    float *folded = malloc(p.out.n * sizeof(float));
    h.kv = kv.d;
    mat_poison(&p.out);
    must(kn_cuda_stream_gemm(t, &a, NULL), "stream_gemm qkv");
    mat_fetch(&p.out);
    mat_fetch(&kv);
    memcpy(folded, p.out.f, p.out.n * sizeof(float));
    h.kv = kv2.d;
    a.kind = KN_STREAM_STORE;
    a.bias = NULL;
    must(kn_cuda_stream_gemm(t, &a, NULL), "stream_gemm");
    must(kn_cuda_qkv_finish(t, p.out.d, rows, &h, bias ? p.d_bias : NULL, NULL), "qkv_finish");
    mat_fetch(&p.out);
    mat_fetch(&kv2);
    for (int r = 0; r < rows; r++) {
        for (int i = 0; i < heads * d; i++) {
            double x = (double)folded[r * n + i], y = (double)p.out.f[r * n + i];

            err += (x - y) * (x - y);
            sum += y * y;
        }
    }
    for (size_t i = 0; i < kv.n; i++) {
        double x = (double)kv.f[i], y = (double)kv2.f[i];

        err += (x - y) * (x - y);
        sum += y * y;
    }
    check(sqrt(err / sum) < 2 * eps_of(t) && sum > 0,
          "heads d=%d rows=%d norms=%d interleaved=%d bias=%d: error %.2e", d, rows, norms, inter,
          bias, sqrt(err / sum));
    if (rows > FEW) { /* the kernel for many rows and the one for few: equal bits */
        uint16_t *many = malloc((size_t)FEW * (size_t)n * 2), *cache = malloc(FEW / 16 * stride);

        memcpy(many, p.out.h, (size_t)FEW * (size_t)n * 2);
        memcpy(cache, kv2.h, FEW / 16 * stride);
        memset(kv2.h, 0, kv2.n * 2);
        mat_send(&kv2);
        must(kn_cuda_stream_gemm(t, &a, NULL), "stream_gemm");
        must(kn_cuda_qkv_finish(t, p.out.d, FEW, &h, bias ? p.d_bias : NULL, NULL), "qkv_finish");
        mat_fetch(&p.out);
        mat_fetch(&kv2);
        check(memcmp(many, p.out.h, (size_t)FEW * (size_t)n * 2) == 0 &&
                  memcmp(cache, kv2.h, FEW / 16 * stride) == 0,
              "heads d=%d norms=%d interleaved=%d bias=%d: %d rows differ among %d", d, norms,
              inter, bias, FEW, rows);
        free(many);
        free(cache);
    }
    free(folded);
    mat_free(&kv);
    mat_free(&kv2);
    problem_free(&p);
    cudaFree(d_norm);
    cudaFree(d_freqs);
    cudaFree(table);
    cudaFree((void *)(uintptr_t)h.pos);
    cudaFree((void *)(uintptr_t)h.page);
}

/* numerics=invariant: rows of a product have the same bits however many there are. */
static void check_invariant(enum kn_cuda_dtype t, int n, int k, bool add, bool f32)
{
    enum { MOST = 1100 };
    static const int rows[] = {1, 2, 7, 8, 17, 64, 65, 100, 128, 129, 256, 300, 513, 1024, MOST};
    size_t bytes = f32 ? 4 : 2;
    struct mat w = mat_new(t, (size_t)n * (size_t)k, 1),
               x = mat_new(t, (size_t)MOST * (size_t)k, 1);
    char *want = malloc((size_t)MOST * (size_t)n * bytes),
         *got = malloc((size_t)MOST * (size_t)n * bytes);
    struct kn_gemm *g;
    struct bt_err err;
    struct kn_gemm_args a = {.x = x.d, .w = w.d, .n = n, .k = k, .add = add, .f32 = f32};

    must(kn_gemm_create(t, true, &g, &err), "gemm");
    must((int)cudaMalloc(&a.out, (size_t)MOST * (size_t)n * bytes), "cudaMalloc");
    for (int r = MOST; r > 0; r = r > 512 ? 512 : r / 2) {
        float us;

        a.rows = r;
        must(kn_gemm_tune(g, &(struct kn_gemm_tune_args){.a = &a, .most = 16}, NULL, &us), "tune");
    }
    a.room = MOST;
    for (int i = (int)BT_ARRAY_LEN(rows) - 1; i >= 0; i--) {
        size_t size = (size_t)rows[i] * (size_t)n * bytes;

        a.rows = rows[i];
        must((int)cudaMemset(a.out, add ? 0 : 0xff, (size_t)MOST * (size_t)n * bytes), "memset");
        must(kn_gemm_run(g, &a, NULL), "invariant product");
        must((int)cudaMemcpy(rows[i] == MOST ? want : got, a.out, size, cudaMemcpyDeviceToHost),
             "copy");
        check(rows[i] == MOST || memcmp(want, got, size) == 0,
              "invariant product %d x %d add=%d f32=%d: %d rows differ from the first of %d", n, k,
              add, f32, rows[i], MOST);
    }
    cudaFree(a.out);
    kn_gemm_destroy(g);
    mat_free(&w);
    mat_free(&x);
    free(want);
    free(got);
}

void check_few_products(bool quick)
{
    static const int rows[] = {1, 9, 100};

    for (size_t r = 0; r < BT_ARRAY_LEN(rows); r++) {
        struct problem p;

        problem_init(&p, r % 2 ? KN_CUDA_F16 : KN_CUDA_BF16, 128, 192, rows[r]);
        for (int kind = KN_STREAM_STORE; kind <= KN_STREAM_F32; kind++) {
            check_kind(&p, (enum kn_cuda_stream_out)kind, quick ? 1 : 2, 3);
        }
        problem_free(&p);
    }
    check_heads(KN_CUDA_BF16, 128, 3, true, true, false);
}

void check_products(bool quick)
{
    static const struct {
        int n, k;
    } shapes[] = {{128, 64}, {256, 512}, {320, 192}, {194, 96}, {1024, 1056}, {64, 2048}};
    static const int rows[] = {1, 3, 8, 9, 16, 31, 64, 100, 128, 200};
    struct kn_gemm *g[2];
    struct bt_err err;

    for (int t = 0; t < 2; t++) {
        must(kn_gemm_create((enum kn_cuda_dtype)t, false, &g[t], &err), "gemm");
    }
    for (size_t i = 0; i < BT_ARRAY_LEN(shapes); i++) {
        for (size_t r = 0; r < BT_ARRAY_LEN(rows); r += quick ? 4 : 1) {
            enum kn_cuda_dtype t = (i + r) % 3 == 2 ? KN_CUDA_F16 : KN_CUDA_BF16;
            struct problem p;

            problem_init(&p, t, shapes[i].n, shapes[i].k, rows[r]);
            for (int kind = KN_STREAM_STORE; kind <= KN_STREAM_F32; kind++) {
                if (kind == KN_STREAM_SWIGLU && shapes[i].n % 4) {
                    continue; /* gate and up in pairs of outputs */
                }
                for (int split = 0; split <= 8; split = split ? split * 2 : 1) {
                    check_kind(&p, (enum kn_cuda_stream_out)kind, split, split == 2 ? 3 : 0);
                }
            }
            check_library(&p, g[t]);
            check_rows_alike(&p);
            problem_free(&p);
        }
    }
    for (int c = 0; c < 32; c++) {
        check_heads(c & 16 ? KN_CUDA_F16 : KN_CUDA_BF16, c & 1 ? 128 : 64, c & 8 ? 300 : 3, c & 2,
                    c & 4, c % 3 == 0);
    }
    kn_gemm_destroy(g[0]);
    kn_gemm_destroy(g[1]);
    check_invariant(KN_CUDA_BF16, 1024, 4096, true, false);
    check_invariant(KN_CUDA_F16, 6144, 1024, false, false);
    check_invariant(KN_CUDA_BF16, 576, 1536, true, false);
    check_invariant(KN_CUDA_BF16, 2048, 576, false, true);
    check_invariant(KN_CUDA_BF16, 256, 512, true, false);
    check_invariant(KN_CUDA_BF16, 512, 256, false, false);
    check_invariant(KN_CUDA_BF16, 320, 256, false, true);
}
