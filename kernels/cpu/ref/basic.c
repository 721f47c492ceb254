/* Row-wise ops in plain C. */
#include "kernels/core/dtype.h"
#include "kernels/cpu/ref/ref.h"

#include <math.h>

void kn_ref_embed(struct kn_stream *stream, const struct kn_embed_args *a)
{
    size_t e = (size_t)a->table->shape[1], row_bytes = kn_row_bytes(a->table->dtype, e);

    for (int t = 0; t < a->n_rows; t++) {
        const char *row = (const char *)a->table->data + (size_t)a->ids[t] * row_bytes;

        kn_row_to_f32(a->table->dtype, row, e, a->out + (size_t)t * a->out_stride);
    }
}

void kn_ref_rmsnorm(struct kn_stream *stream, const struct kn_rmsnorm_args *a)
{
    for (int t = 0; t < a->n_rows; t++) {
        for (int h = 0; h < a->n_heads; h++) {
            const float *x = a->x + (size_t)t * a->x_stride + (size_t)h * (size_t)a->width;
            float *out = a->out + (size_t)t * a->out_stride + (size_t)h * (size_t)a->width;
            float sum = 0, r;

            for (int i = 0; i < a->width; i++) {
                sum += x[i] * x[i];
            }
            r = 1 / sqrtf(sum / (float)a->width + a->eps);
            for (int i = 0; i < a->width; i++) {
                out[i] = x[i] * r * a->weight[i];
            }
        }
    }
}

void kn_ref_rope(struct kn_stream *stream, const struct kn_rope_args *a)
{
    int d = a->head_dim, step = a->interleaved ? 2 : 1, other = a->interleaved ? 1 : d / 2;

    for (int t = 0; t < a->n_rows; t++) {
        const float *cs = a->cos_sin + (size_t)t * 2 * (size_t)d, *sn = cs + d;

        for (int h = 0; h < a->n_heads; h++) {
            float *x = a->x + (size_t)t * a->x_stride + (size_t)h * (size_t)d;

            for (int i = 0; i < d / 2; i++) {
                int p = i * step, q = p + other;
                float u = x[p], v = x[q];

                x[p] = u * cs[p] + v * sn[p];
                x[q] = v * cs[q] + u * sn[q];
            }
        }
    }
}

void kn_ref_swiglu(struct kn_stream *stream, const struct kn_swiglu_args *a)
{
    for (int t = 0; t < a->n_rows; t++) {
        const float *gate = a->x + (size_t)t * a->x_stride, *up = gate + a->width;
        float *out = a->out + (size_t)t * a->out_stride;

        for (int i = 0; i < a->width; i++) {
            out[i] = gate[i] / (1 + expf(-gate[i])) * up[i];
        }
    }
}

void kn_ref_gather(struct kn_stream *stream, const struct kn_gather_args *a)
{
    for (int t = 0; t < a->n_rows; t++) {
        memmove(a->out + (size_t)t * a->out_stride, a->x + (size_t)a->rows[t] * a->x_stride,
                (size_t)a->width * sizeof(float));
    }
}

const struct kn_ops kn_ops_ref = {
    .isa = "ref",
    .numerics = "cpu/ref/a8/1",
    .device = KN_DEVICE_CPU,
    .format = KN_FORMAT_FILE,
#define KN_OP(name, dtypes, what) .name = kn_ref_##name,
#include "kernels/ops.def"
#undef KN_OP
};
