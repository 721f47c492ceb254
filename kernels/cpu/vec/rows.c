/* Row-wise ops on sixteen lanes. A row's result depends on the row alone. */
#include "kernels/cpu/kv.h"
#include "kernels/cpu/vec/vec.h"

#include "kernels/core/half.h"

/* Sum of squares in 16 running sums, element i in lane i % 16. */
static void norm_one(const struct kn_rmsnorm_args *a, const float *x, float *out)
{
    v16 sum = v16_zero(), r;
    int n = a->width, i;

    for (i = 0; i + 16 <= n; i += 16) {
        v16 v = v16_load(x + i);

        sum = v16_fma(v, v, sum);
    }
    if (i < n) {
        v16 v = v16_load_n(x + i, n - i);

        sum = v16_fma(v, v, sum);
    }
    r = v16_set1(1 / sqrtf(v16_sum(sum) / (float)n + a->eps));
    for (i = 0; i + 16 <= n; i += 16) {
        v16_store(out + i, v16_mul(v16_mul(v16_load(x + i), r), v16_load(a->weight + i)));
    }
    if (i < n) {
        v16 v = v16_mul(v16_load_n(x + i, n - i), r);

        v16_store_n(out + i, v16_mul(v, v16_load_n(a->weight + i, n - i)), n - i);
    }
}

struct rows_job {
    const void *args;
    int per_item;
};

static void rmsnorm_item(void *arg, int item, int member)
{
    const struct rows_job *j = arg;
    const struct kn_rmsnorm_args *a = j->args;
    int t1 = BT_MIN((item + 1) * j->per_item, a->n_rows);

    for (int t = item * j->per_item; t < t1; t++) {
        for (int h = 0; h < a->n_heads; h++) {
            size_t off = (size_t)h * (size_t)a->width;

            norm_one(a, a->x + (size_t)t * a->x_stride + off,
                     a->out + (size_t)t * a->out_stride + off);
        }
    }
}

void KN_V(rmsnorm)(struct kn_stream *stream, const struct kn_rmsnorm_args *a)
{
    struct rows_job j = {a, kn_rows_per_item(a->n_rows, a->n_heads * a->width)};

    kn_team_run(stream->team, (int)BT_DIV_UP(a->n_rows, j.per_item), rmsnorm_item, &j);
}

/* x * cos + partner * sin, the product with sin fused. */
static void rope_pairs(float *x, const float *cs, const float *sn, int d)
{
    for (int i = 0; i < d; i += 16) {
        int n = BT_MIN(16, d - i);
        v16 v = v16_load_n(x + i, n);
        v16 w = v16_mul(v, v16_load_n(cs + i, n));

        v16_store_n(x + i, v16_fma(v16_swap_pairs(v), v16_load_n(sn + i, n), w), n);
    }
}

static void rope_halves(float *x, const float *cs, const float *sn, int d)
{
    int half = d / 2;

    for (int i = 0; i < half; i += 16) {
        int n = BT_MIN(16, half - i), k = i + half;
        v16 u = v16_load_n(x + i, n), v = v16_load_n(x + k, n);
        v16 p = v16_mul(u, v16_load_n(cs + i, n)), q = v16_mul(v, v16_load_n(cs + k, n));

        v16_store_n(x + i, v16_fma(v, v16_load_n(sn + i, n), p), n);
        v16_store_n(x + k, v16_fma(u, v16_load_n(sn + k, n), q), n);
    }
}

static void rope_item(void *arg, int item, int member)
{
    const struct rows_job *j = arg;
    const struct kn_rope_args *a = j->args;
    int d = a->head_dim, t1 = BT_MIN((item + 1) * j->per_item, a->n_rows);

    for (int t = item * j->per_item; t < t1; t++) {
        const float *cs = a->cos_sin + (size_t)t * 2 * (size_t)d, *sn = cs + d;

        for (int h = 0; h < a->n_heads; h++) {
            float *x = a->x + (size_t)t * a->x_stride + (size_t)h * (size_t)d;

            if (a->interleaved) {
                rope_pairs(x, cs, sn, d);
            } else {
                rope_halves(x, cs, sn, d);
            }
        }
    }
}

void KN_V(rope)(struct kn_stream *stream, const struct kn_rope_args *a)
{
    struct rows_job j = {a, kn_rows_per_item(a->n_rows, a->n_heads * a->head_dim)};

    kn_team_run(stream->team, (int)BT_DIV_UP(a->n_rows, j.per_item), rope_item, &j);
}

static void swiglu_item(void *arg, int item, int member)
{
    const struct rows_job *j = arg;
    const struct kn_swiglu_args *a = j->args;
    int f = a->width, t1 = BT_MIN((item + 1) * j->per_item, a->n_rows);
    v16 one = v16_set1(1);

    for (int t = item * j->per_item; t < t1; t++) {
        const float *gate = a->x + (size_t)t * a->x_stride, *up = gate + f;
        float *out = a->out + (size_t)t * a->out_stride;

        for (int i = 0; i < f; i += 16) {
            int n = BT_MIN(16, f - i);
            v16 g = v16_load_n(gate + i, n), u = v16_load_n(up + i, n);
            v16 e = v16_exp(v16_sub(v16_zero(), g));

            v16_store_n(out + i, v16_mul(v16_div(g, v16_add(one, e)), u), n);
        }
    }
}

void KN_V(swiglu)(struct kn_stream *stream, const struct kn_swiglu_args *a)
{
    struct rows_job j = {a, kn_rows_per_item(a->n_rows, a->width)};

    kn_team_run(stream->team, (int)BT_DIV_UP(a->n_rows, j.per_item), swiglu_item, &j);
}

static void store_kv(enum kv_dtype t, void *dst, const float *src, int d)
{
    int i;

    if (t == KV_DTYPE_F32) {
        memcpy(dst, src, (size_t)d * sizeof(float));
        return;
    }
    for (i = 0; i + 16 <= d; i += 16) {
        v16_store_f16((uint16_t *)dst + i, v16_load(src + i));
    }
    for (; i < d; i++) {
        ((uint16_t *)dst)[i] = kn_f32_to_f16(src[i]);
    }
}

/* Rows [r0, r1) of a sequence. */
static void
kv_write_rows(const struct kn_kv_write_args *a, const struct kn_seq_rows *seq, int r0, int r1)
{
    const struct kv_layout *l = a->layout;

    for (int i = r0; i < r1; i++) {
        size_t row = (size_t)(seq->row0 + i) * a->stride;

        for (int h = 0; h < l->n_kv_heads; h++) {
            struct kn_kv_at at = kn_kv_at(a->kv, l, a->layer, seq->pages, seq->pos + i, h);
            size_t off = row + (size_t)h * (size_t)l->head_dim;

            store_kv(l->dtype, at.k, a->k + off, l->head_dim);
            store_kv(l->dtype, at.v, a->v + off, l->head_dim);
        }
    }
}

/* Rows count through the sequences, in their order. */
static void kv_write_item(void *arg, int item, int member)
{
    const struct rows_job *j = arg;
    const struct kn_kv_write_args *a = j->args;
    int r0 = item * j->per_item, r1 = r0 + j->per_item;

    for (int s = 0; s < a->n_seqs && r1 > 0; s++) {
        int n = a->seqs[s].n_rows;

        kv_write_rows(a, &a->seqs[s], BT_MAX(r0, 0), BT_MIN(r1, n));
        r0 -= n;
        r1 -= n;
    }
}

void KN_V(kv_write)(struct kn_stream *stream, const struct kn_kv_write_args *a)
{
    int rows = 0, width = 2 * a->layout->n_kv_heads * a->layout->head_dim;
    struct rows_job j = {.args = a};

    for (int s = 0; s < a->n_seqs; s++) {
        rows += a->seqs[s].n_rows;
    }
    j.per_item = kn_rows_per_item(rows, width);
    kn_team_run(stream->team, (int)BT_DIV_UP(rows, j.per_item), kv_write_item, &j);
}
