/* Steps of few rows in one kernel: two layers and logits against double precision, over heads, page
 * sizes, contexts and numbers of blocks; several steps one after the other on the same memory, in
 * one launch or two. */
#include "tests/gpu/ops_check.h"

#include <math.h>
#include <stdlib.h>

#define LAYERS  2
#define ROWS    KN_STEP_MAX_ROWS
#define MAX_CTX 2560
#define STEPS   3

struct shape {
    enum kn_cuda_dtype t;
    int head_dim, n_heads, n_kv_heads, page_tokens, n_sms;
    int width, ff, vocab;
    bool interleaved, bias;
    int rows[STEPS], ctx[STEPS][ROWS]; /* a context of 0: an empty row */
};

struct layer {
    struct mat qkv, o, gu, down, kv;
    float *norm[2], *d_norm[2], *bias, *d_bias;
};

/* A little model, its pool, and one step of it as the host sees it. */
struct run {
    struct shape s;
    int qkv_n, att_n, pages_stride, n_pages;
    size_t page_elems;
    struct layer layers[LAYERS];
    struct mat head, x;
    float *norm, *d_norm;
    int32_t pos[ROWS], page[ROWS], ctx[ROWS];
    uint32_t *pages; /* [ROWS, pages_stride] */
    double freqs[64];
    float *d_logits, *logits;
    struct kn_cuda_step_args a;
    size_t att_at[LAYERS]; /* in the flow, bytes */
    int n_done;
    /* Reference. */
    double *ref_x, *ref_att[LAYERS], *ref_logits;
};

static double round_to(enum kn_cuda_dtype t, double x)
{
    return (double)from_16(t, to_16(t, (float)x));
}

static float *weights_of_norm(int n, float **ret_d)
{
    float *w = malloc((size_t)n * sizeof(*w));

    for (int i = 0; i < n; i++) {
        w[i] = 1 + rnd_float() / 4;
    }
    *ret_d = to_device(w, (size_t)n * sizeof(*w));
    return w;
}

static struct mat weights(const struct shape *s, int n, int k)
{
    return mat_new(s->t, (size_t)n * (size_t)k, 1.7f / sqrtf((float)k));
}

static void *device_bytes(size_t n, int byte)
{
    void *p;

    must((int)cudaMalloc(&p, n), "cudaMalloc");
    must((int)cudaMemset(p, byte, n), "memset");
    return p;
}

static struct mat pool(enum kn_cuda_dtype t, size_t n)
{
    return (struct mat){.t = t,
                        .n = n,
                        .h = malloc(n * sizeof(uint16_t)),
                        .f = malloc(n * sizeof(float)),
                        .d = device_bytes(n * 2, 0xff)};
}

static void run_init(struct run *r, const struct shape *s)
{
    int pairs = s->head_dim / 2;
    float freqs[64], *d_freqs, *table;

    *r = (struct run){.s = *s};
    r->att_n = s->n_heads * s->head_dim;
    r->qkv_n = r->att_n + 2 * s->n_kv_heads * s->head_dim;
    r->pages_stride = MAX_CTX / s->page_tokens;
    r->n_pages = ROWS * r->pages_stride;
    r->page_elems = 2 * (size_t)s->n_kv_heads * (size_t)s->page_tokens * (size_t)s->head_dim;
    for (int l = 0; l < LAYERS; l++) {
        struct layer *y = &r->layers[l];

        y->qkv = weights(s, r->qkv_n, s->width);
        y->o = weights(s, s->width, r->att_n);
        y->gu = weights(s, 2 * s->ff, s->width);
        y->down = weights(s, s->width, s->ff);
        y->kv = pool(s->t, (size_t)r->n_pages * r->page_elems);
        y->norm[0] = weights_of_norm(s->width, &y->d_norm[0]);
        y->norm[1] = weights_of_norm(s->width, &y->d_norm[1]);
        y->bias = weights_of_norm(r->qkv_n, &y->d_bias);
        r->ref_att[l] = malloc(ROWS * (size_t)r->att_n * sizeof(double));
    }
    r->head = weights(s, s->vocab, s->width);
    r->x = mat_new(s->t, ROWS * (size_t)s->width, 1);
    r->norm = weights_of_norm(s->width, &r->d_norm);
    r->pages = malloc(sizeof(*r->pages) * (size_t)r->n_pages);
    for (int i = 0; i < r->n_pages; i++) {
        r->pages[i] = (uint32_t)(i * 7 % r->n_pages); /* 7 does not divide it */
    }
    for (int i = 0; i < pairs; i++) {
        freqs[i] = powf(10000, -(float)i / (float)pairs);
        r->freqs[i] = (double)freqs[i];
    }
    d_freqs = to_device(freqs, sizeof(freqs));
    table = device_bytes((size_t)MAX_CTX * (size_t)s->head_dim * sizeof(float), 0);
    must(kn_cuda_rope_table(d_freqs, MAX_CTX, pairs, table, NULL), "rope table");
    must((int)cudaDeviceSynchronize(), "rope table");
    cudaFree(d_freqs);
    r->logits = malloc(ROWS * (size_t)s->vocab * sizeof(float));
    r->d_logits = device_bytes(ROWS * (size_t)s->vocab * sizeof(float), 0xff);
    r->ref_x = malloc(ROWS * (size_t)s->width * sizeof(double));
    r->ref_logits = malloc(ROWS * (size_t)s->vocab * sizeof(double));
    r->a = (struct kn_cuda_step_args){
        .n_sms = s->n_sms,
        .eps = 1e-5f,
        .scale = 1 / sqrtf((float)s->head_dim),
        .n_attn = LAYERS,
        .ctx_len = device_bytes(sizeof(r->ctx), 0),
        .pages = to_device(r->pages, sizeof(*r->pages) * (size_t)r->n_pages),
        .pages_stride = r->pages_stride,
        .heads = {.n_heads = s->n_heads,
                  .n_kv_heads = s->n_kv_heads,
                  .head_dim = s->head_dim,
                  .page_tokens = s->page_tokens,
                  .page_stride = r->page_elems * 2,
                  .interleaved = s->interleaved,
                  .cos_sin = table,
                  .pos = device_bytes(sizeof(r->pos), 0),
                  .page = device_bytes(sizeof(r->page), 0)},
        .flow_bytes = LAYERS * ROWS * 2 * (size_t)(r->qkv_n + r->att_n + 2 * s->width + s->ff),
        .counter = device_bytes(sizeof(unsigned long long), 0),
    };
    r->a.flow = device_bytes(2 * r->a.flow_bytes, 0xff);
    r->a.records = device_bytes(kn_cuda_step_record_bytes(&r->a.heads, ROWS, s->n_sms), 0);
}

static void run_free(struct run *r)
{
    void *mine[] = {(void *)(uintptr_t)r->a.ctx_len,
                    (void *)(uintptr_t)r->a.pages,
                    (void *)(uintptr_t)r->a.heads.cos_sin,
                    (void *)(uintptr_t)r->a.heads.pos,
                    (void *)(uintptr_t)r->a.heads.page,
                    r->a.counter,
                    r->a.flow,
                    r->a.records,
                    r->d_norm,
                    r->d_logits};

    for (size_t i = 0; i < BT_ARRAY_LEN(mine); i++) {
        cudaFree(mine[i]);
    }
    for (int l = 0; l < LAYERS; l++) {
        struct layer *y = &r->layers[l];

        mat_free(&y->qkv);
        mat_free(&y->o);
        mat_free(&y->gu);
        mat_free(&y->down);
        mat_free(&y->kv);
        for (int i = 0; i < 2; i++) {
            free(y->norm[i]);
            cudaFree(y->d_norm[i]);
        }
        free(y->bias);
        cudaFree(y->d_bias);
        free(r->ref_att[l]);
    }
    mat_free(&r->head);
    mat_free(&r->x);
    free(r->norm);
    free(r->pages);
    free(r->logits);
    free(r->ref_x);
    free(r->ref_logits);
}

/* Element d of K (part 0) or V of a position. */
static size_t kv_at(const struct run *r, int row, int part, int head, int pos, int d)
{
    int pt = r->s.page_tokens;
    size_t page = r->pages[row * r->pages_stride + pos / pt];

    size_t at =
        (size_t)part * r->page_elems / 2 + (size_t)((head * pt + pos % pt) * r->s.head_dim + d);

    return page * r->page_elems + kn_cuda_attn_piece(at / 8, r->s.head_dim) * 8 + at % 8;
}

/* A step's rows; what lies at positions that do not exist yet becomes NaN. */
static void new_step(struct run *r, int step)
{
    const struct shape *s = &r->s;

    r->a.rows = s->rows[step];
    for (int i = 0; i < (int)r->x.n; i++) {
        r->x.h[i] = to_16(s->t, rnd_float());
        r->x.f[i] = from_16(s->t, r->x.h[i]);
    }
    mat_send(&r->x);
    for (int q = 0; q < ROWS; q++) {
        r->ctx[q] = q < r->a.rows ? s->ctx[step][q] : 0;
        r->pos[q] = r->ctx[q] > 0 ? r->ctx[q] - 1 : 0;
        r->page[q] = -1;
        if (r->ctx[q] > 0) {
            r->page[q] = (int32_t)r->pages[q * r->pages_stride + r->pos[q] / s->page_tokens];
        }
    }
    for (int l = 0; l < LAYERS; l++) {
        struct mat *kv = &r->layers[l].kv;

        memset(kv->h, 0xff, kv->n * 2);
        for (int q = 0; q < ROWS; q++) {
            for (int i = 0; i < (r->ctx[q] - 1) * 2 * s->n_kv_heads; i++) {
                for (int d = 0; d < s->head_dim; d++) {
                    size_t at = kv_at(r, q, i & 1, i / 2 % s->n_kv_heads, i / 2 / s->n_kv_heads, d);

                    kv->h[at] = to_16(s->t, rnd_float() * 2);
                    kv->f[at] = from_16(s->t, kv->h[at]);
                }
            }
        }
        mat_send(kv);
    }
    must((int)cudaMemcpy((void *)(uintptr_t)r->a.ctx_len, r->ctx, sizeof(r->ctx),
                         cudaMemcpyHostToDevice),
         "copy");
    must((int)cudaMemcpy((void *)(uintptr_t)r->a.heads.pos, r->pos, sizeof(r->pos),
                         cudaMemcpyHostToDevice),
         "copy");
    must((int)cudaMemcpy((void *)(uintptr_t)r->a.heads.page, r->page, sizeof(r->page),
                         cudaMemcpyHostToDevice),
         "copy");
    must((int)cudaMemset(r->d_logits, 0xff, ROWS * (size_t)s->vocab * sizeof(float)), "memset");
}

/* ---- reference ---- */

static double product(const struct mat *w, int row, const double *x, int k)
{
    const float *v = w->f + (size_t)row * (size_t)k;
    double sum = 0;

    for (int i = 0; i < k; i++) {
        sum += (double)v[i] * x[i];
    }
    return sum;
}

static void ref_norm(const struct run *r, const double *x, const float *w, double *h)
{
    double sum = 0;

    for (int i = 0; i < r->s.width; i++) {
        sum += x[i] * x[i];
    }
    sum = 1 / sqrt(sum / r->s.width + (double)r->a.eps);
    for (int i = 0; i < r->s.width; i++) {
        h[i] = round_to(r->s.t, x[i] * sum * (double)w[i]);
    }
}

static void ref_rope(const struct run *r, double *head, int pos)
{
    int half = r->s.head_dim / 2;

    for (int i = 0; i < half; i++) {
        double angle = (double)((float)pos * (float)r->freqs[i]), c = cos(angle), n = sin(angle);
        double *a = head + (r->s.interleaved ? 2 * i : i);
        double *b = head + (r->s.interleaved ? 2 * i + 1 : i + half), x = *a, y = *b;

        *a = x * c - y * n;
        *b = y * c + x * n;
    }
}

static void ref_attention(const struct run *r, int l, int row, const double *qkv, double *out)
{
    const struct shape *s = &r->s;
    int group = s->n_heads / s->n_kv_heads, n = r->ctx[row], dim = s->head_dim;
    double *w = malloc((size_t)(n + 1) * sizeof(*w));
    const struct mat *kv = &r->layers[l].kv;

    for (int h = 0; h < s->n_heads; h++) {
        double sum = 0, top = -INFINITY, *o = out + (size_t)h * (size_t)dim;
        const double *q = qkv + h * dim;

        for (int p = 0; p < n; p++) {
            w[p] = 0;
            for (int d = 0; d < dim; d++) {
                w[p] += q[d] * (double)kv->f[kv_at(r, row, 0, h / group, p, d)];
            }
            w[p] *= (double)r->a.scale;
            top = fmax(top, w[p]);
        }
        memset(o, 0, (size_t)dim * sizeof(*o));
        for (int p = 0; p < n; p++) {
            double e = exp(w[p] - top);

            sum += e;
            for (int d = 0; d < dim; d++) {
                o[d] += e * (double)kv->f[kv_at(r, row, 1, h / group, p, d)];
            }
        }
        for (int d = 0; d < dim; d++) {
            o[d] = round_to(s->t, n > 0 ? o[d] / sum : 0);
        }
    }
    free(w);
}

/* One row through one layer. */
static void ref_layer(struct run *r, int l, int row, double *x)
{
    const struct shape *s = &r->s;
    struct layer *y = &r->layers[l];
    double *h = malloc((size_t)s->width * sizeof(*h));
    double *qkv = malloc((size_t)r->qkv_n * sizeof(*qkv)), *act = malloc((size_t)s->ff * 8);
    double *att = r->ref_att[l] + (size_t)row * (size_t)r->att_n;

    ref_norm(r, x, y->norm[0], h);
    for (int i = 0; i < r->qkv_n; i++) {
        qkv[i] = product(&y->qkv, i, h, s->width) + (s->bias ? (double)y->bias[i] : 0);
    }
    for (int i = 0; i < s->n_heads + s->n_kv_heads; i++) {
        ref_rope(r, qkv + i * s->head_dim, r->pos[row]);
    }
    for (int i = 0; i < r->qkv_n; i++) {
        int head = i / s->head_dim - s->n_heads;

        qkv[i] = round_to(s->t, qkv[i]);
        if (head >= 0 && r->ctx[row] > 0) {
            y->kv.f[kv_at(r, row, head >= s->n_kv_heads, head % s->n_kv_heads, r->pos[row],
                          i % s->head_dim)] = (float)qkv[i];
        }
    }
    ref_attention(r, l, row, qkv, att);
    for (int i = 0; i < s->width; i++) {
        h[i] = round_to(s->t, x[i] + product(&y->o, i, att, r->att_n));
    }
    memcpy(x, h, (size_t)s->width * sizeof(*x));
    ref_norm(r, x, y->norm[1], h);
    for (int i = 0; i < s->ff; i++) {
        double gate = round_to(s->t, product(&y->gu, i, h, s->width));
        double up = round_to(s->t, product(&y->gu, s->ff + i, h, s->width));

        act[i] = round_to(s->t, gate / (1 + exp(-gate)) * up);
    }
    for (int i = 0; i < s->width; i++) {
        x[i] = round_to(s->t, x[i] + product(&y->down, i, act, s->ff));
    }
    free(h);
    free(qkv);
    free(act);
}

static void reference(struct run *r)
{
    double *h = malloc((size_t)r->s.width * sizeof(*h));

    for (int row = 0; row < r->a.rows; row++) {
        double *x = r->ref_x + (size_t)row * (size_t)r->s.width;

        for (int i = 0; i < r->s.width; i++) {
            x[i] = (double)r->x.f[row * r->s.width + i];
        }
        for (int l = 0; l < LAYERS; l++) {
            ref_layer(r, l, row, x);
        }
        ref_norm(r, x, r->norm, h);
        for (int i = 0; i < r->s.vocab; i++) {
            r->ref_logits[row * r->s.vocab + i] = product(&r->head, i, h, r->s.width);
        }
    }
    free(h);
}

/* ---- device ---- */

/* Room in the flow for [rows, width]. */
static void *room(struct run *r, size_t *used, int width)
{
    void *p = (char *)r->a.flow + *used;

    *used += (size_t)r->a.rows * (size_t)width * 2;
    return p;
}

static void add_layer(struct run *r, int l, size_t *used, const void **x)
{
    const struct shape *s = &r->s;
    const struct layer *y = &r->layers[l];
    struct kn_cuda_step_phase *p = r->a.phases + r->a.n_phases;
    void *qkv = room(r, used, r->qkv_n), *att, *mid, *act, *out;

    r->att_at[l] = *used;
    att = room(r, used, r->att_n);
    mid = room(r, used, s->width);
    act = room(r, used, s->ff);
    out = room(r, used, s->width);
    p[0] = (struct kn_cuda_step_phase){.w = y->qkv.d,
                                       .x = *x,
                                       .out = qkv,
                                       .norm = y->d_norm[0],
                                       .bias = s->bias ? y->d_bias : NULL,
                                       .kv = y->kv.d,
                                       .n = r->qkv_n,
                                       .k = s->width,
                                       .x_stride = s->width,
                                       .out_stride = r->qkv_n,
                                       .kind = KN_STREAM_QKV};
    p[1] = (struct kn_cuda_step_phase){
        .x = qkv, .out = att, .kv = y->kv.d, .x_stride = r->qkv_n, .out_stride = r->att_n};
    p[2] = (struct kn_cuda_step_phase){.w = y->o.d,
                                       .x = att,
                                       .out = mid,
                                       .old = *x,
                                       .n = s->width,
                                       .k = r->att_n,
                                       .x_stride = r->att_n,
                                       .out_stride = s->width,
                                       .kind = KN_STREAM_ADD};
    p[3] = (struct kn_cuda_step_phase){.w = y->gu.d,
                                       .x = mid,
                                       .out = act,
                                       .norm = y->d_norm[1],
                                       .n = 2 * s->ff,
                                       .k = s->width,
                                       .x_stride = s->width,
                                       .out_stride = s->ff,
                                       .kind = KN_STREAM_SWIGLU};
    p[4] = (struct kn_cuda_step_phase){.w = y->down.d,
                                       .x = act,
                                       .out = out,
                                       .old = mid,
                                       .n = s->width,
                                       .k = s->ff,
                                       .x_stride = s->ff,
                                       .out_stride = s->width,
                                       .kind = KN_STREAM_ADD};
    r->a.n_phases += 5;
    *x = out;
}

static void launch(struct run *r, int step)
{
    const void *x = r->x.d;
    size_t used = 0;
    int half;
    struct kn_cuda_step_args rest;

    r->a.n_phases = 0;
    for (int l = 0; l < LAYERS; l++) {
        add_layer(r, l, &used, &x);
    }
    r->a.phases[r->a.n_phases++] = (struct kn_cuda_step_phase){.w = r->head.d,
                                                               .x = x,
                                                               .out = r->d_logits,
                                                               .norm = r->d_norm,
                                                               .n = r->s.vocab,
                                                               .k = r->s.width,
                                                               .x_stride = r->s.width,
                                                               .out_stride = r->s.vocab,
                                                               .kind = KN_STREAM_F32};
    r->a.first = r->a.last = true;
    r->a.attn_first = 0;
    if (step != 1) {
        must(kn_cuda_step(r->s.t, &r->a, NULL), "step");
        return;
    }
    rest = r->a;
    half = rest.n_phases / 2; /* after the output projection of the first layer's ffn begins */
    rest.n_phases -= half;
    memmove(rest.phases, rest.phases + half, sizeof(rest.phases[0]) * (size_t)rest.n_phases);
    r->a.n_phases = half;
    r->a.last = rest.first = false;
    for (int i = 0; i < half; i++) {
        rest.attn_first += r->a.phases[i].w == NULL;
    }
    must(kn_cuda_step(r->s.t, &r->a, NULL), "first half of a step");
    must(kn_cuda_step(r->s.t, &rest, NULL), "second half of a step");
}

static double error_of(const double *got, const double *want, size_t n)
{
    double d = 0, s = 0;

    for (size_t i = 0; i < n; i++) {
        d += (got[i] - want[i]) * (got[i] - want[i]);
        s += want[i] * want[i];
    }
    return s > 0 ? sqrt(d / s) : sqrt(d);
}

/* What attention of a layer left, of one row. */
static double attention_error(const struct run *r, int l, int row)
{
    size_t n = (size_t)r->att_n;
    uint16_t *raw = malloc(n * 2);
    double *got = malloc(n * sizeof(*got)), e;
    const char *at = (const char *)r->a.flow + (r->n_done & 1 ? r->a.flow_bytes : 0) +
                     r->att_at[l] + (size_t)row * n * 2;

    must((int)cudaMemcpy(raw, at, n * 2, cudaMemcpyDeviceToHost), "copy");
    for (size_t i = 0; i < n; i++) {
        got[i] = (double)from_16(r->s.t, raw[i]);
    }
    e = error_of(got, r->ref_att[l] + (size_t)row * n, n);
    free(raw);
    free(got);
    return e;
}

/* K and V of the new position in the pages. */
static double page_error(struct run *r, int l, int row)
{
    const struct shape *s = &r->s;
    struct mat *kv = &r->layers[l].kv;
    double d = 0, sum = 0;

    if (r->ctx[row] == 0) {
        return 0;
    }
    for (int i = 0; i < 2 * s->n_kv_heads; i++) {
        for (int e = 0; e < s->head_dim; e++) {
            size_t k = kv_at(r, row, i & 1, i / 2, r->pos[row], e);
            double x = (double)from_16(s->t, kv->h[k]) - (double)kv->f[k];

            d += x * x;
            sum += (double)kv->f[k] * (double)kv->f[k];
        }
    }
    return sqrt(d / sum);
}

static void check_step(const struct shape *s)
{
    struct run *r = malloc(sizeof(*r));
    double limit = 4 * eps_of(s->t);

    run_init(r, s);
    for (int step = 0; step < STEPS; step++, r->n_done++) {
        new_step(r, step);
        launch(r, step);
        must((int)cudaDeviceSynchronize(), "step");
        reference(r);
        must((int)cudaMemcpy(r->logits, r->d_logits, ROWS * (size_t)s->vocab * sizeof(float),
                             cudaMemcpyDeviceToHost),
             "copy");
        for (int l = 0; l < LAYERS; l++) {
            struct mat *kv = &r->layers[l].kv;

            must((int)cudaMemcpy(kv->h, kv->d, kv->n * 2, cudaMemcpyDeviceToHost), "copy");
        }
        for (int row = 0; row < r->a.rows; row++) {
            double *got = malloc((size_t)s->vocab * sizeof(*got)), worst = 0;

            for (int i = 0; i < s->vocab; i++) {
                got[i] = (double)r->logits[row * s->vocab + i];
            }
            double e = error_of(got, r->ref_logits + row * s->vocab, (size_t)s->vocab);
            for (int l = 0; l < LAYERS; l++) {
                double a = attention_error(r, l, row), p = page_error(r, l, row);

                worst = a == a && p == p ? fmax(worst, fmax(a, p)) : INFINITY;
            }
            check(e < limit && worst < limit,
                  "step %d of %s d=%d heads %d/%d pages of %d, %d blocks: row %d of %d, context "
                  "%d: logits %.2e, attention and pages %.2e",
                  step, s->t ? "f16" : "bf16", s->head_dim, s->n_heads, s->n_kv_heads,
                  s->page_tokens, s->n_sms, row, r->a.rows, r->ctx[row], e, worst);
            free(got);
        }
    }
    run_free(r);
    free(r);
}

void check_steps(bool quick)
{
    static const int ctxs[] = {1, 2, 63, 64, 65, 128, 129, 200, 511, 640, 1025, 0, 2048, 2305};
    int sms = 0;

    cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0);
    must(kn_cuda_step_init(), "step_init");
    for (int c = 0; c < (quick ? 6 : 24); c++) {
        int kv_heads = c % 5 == 4 ? 1 : c % 3 + 1, dim = c & 1 ? 128 : 64;
        struct shape s = {.t = c % 4 == 3 ? KN_CUDA_F16 : KN_CUDA_BF16,
                          .head_dim = dim,
                          .n_heads = kv_heads * (c % 8 + 1),
                          .n_kv_heads = kv_heads,
                          .page_tokens = 8 << c % 6,
                          .n_sms = c % 4 == 2 ? 7 + c : sms,
                          .width = c % 3 ? 256 : 448,
                          .ff = c % 7 == 6 ? 3008
                                : c % 2    ? 704
                                           : 576,
                          .vocab = 502 + c,
                          .interleaved = c % 4 == 1,
                          .bias = c % 3 == 1};

        for (int i = 0; i < STEPS; i++) {
            s.rows[i] = i == 2 ? ROWS : (c + i) % ROWS + 1;
            for (int q = 0; q < ROWS; q++) {
                s.ctx[i][q] = ctxs[rnd() % BT_ARRAY_LEN(ctxs)];
            }
            s.ctx[i][0] = s.rows[i] == 1 ? ctxs[c % 14 == 11 ? 0 : c % 14] : s.ctx[i][0];
        }
        check_step(&s);
    }
}
