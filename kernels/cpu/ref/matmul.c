/* Projection in plain C.
 *
 * Float weights: products and sums in f32, inputs in ascending order. Block-quantized weights:
 * activations are quantized in the same blocks of 32 to signed 8 bits (symmetric), so that the sum
 * over a block is an exact integer; blocks are then added in ascending order in f32:
 *     Q8_0, Q4_0: acc += dw * dx * sum(qw * qx)
 *     Q4_1:       acc += dw * dx * sum(qw * qx) + mw * (dx * sum(qx))
 * With AMX both sides are whole numbers times powers of two (kn_ref_matmul_wide, what tests compare
 * with): weights as in kernels/cpu/grid.h, activations of up to 2032 with 8 bits each. With AVX-512
 * BF16 activations for BF16 weights are bf16 too and pairs are added as VDPBF16PS does
 * (kn_ref_matmul_bf16; kernels/cpu/avx512/bf16_tile.c).
 */
#include "kernels/core/dtype.h"
#include "kernels/core/half.h"
#include "kernels/cpu/grid.h"
#include "kernels/cpu/ref/ref.h"

#include <math.h>

#define BLOCK 32

/* How activations are taken. */
enum acts { ACTS_PLAIN, ACTS_WIDE, ACTS_BF16 };

static float largest(const float *x)
{
    float max = 0;

    for (int i = 0; i < BLOCK; i++) {
        max = fabsf(x[i]) > max ? fabsf(x[i]) : max;
    }
    return max;
}

/* One block of activations. Returns the scale; *ret_sum = sum of the quantized values. */
static float quantize_block(const float *x, int16_t ret_q[BLOCK], int *ret_sum)
{
    float max = largest(x), inv = max > KN_QUANT_TINY ? 127 / max : 0;

    *ret_sum = 0;
    for (int i = 0; i < BLOCK; i++) {
        ret_q[i] = (int16_t)lrintf(x[i] * inv);
        *ret_sum += ret_q[i];
    }
    return max / 127;
}

/* A block of activations by one of weights. */
static float wide_block(enum bt_dtype t, const uint8_t *block, const float *x)
{
    float max = largest(x), unit;
    int16_t w[BLOCK];
    int e, dot = 0;

    frexpf(fmaxf(max, KN_WIDE_TINY) * (256.0f / 254), &e);
    e -= 11; /* the largest becomes 1016 to 2032 */
    unit = kn_grid_block(t, block, w);
    for (int i = 0; i < BLOCK; i++) {
        float whole = rintf(ldexpf(x[i], -e));

        dot += w[i] * (int)kn_bf16_to_f32(kn_f32_to_bf16(whole));
    }
    return ldexpf((float)dot, e) * unit;
}

static float dot_block(enum bt_dtype t, const uint8_t *w, const int16_t *q, float d, int sum)
{
    float dw = kn_f16_to_f32(kn_load_u16(w));
    int dot = 0;

    if (t == BT_DTYPE_Q8_0) {
        for (int i = 0; i < BLOCK; i++) {
            dot += (int8_t)w[2 + i] * q[i];
        }
        return dw * d * (float)dot;
    }
    w += t == BT_DTYPE_Q4_0 ? 2 : 4;
    for (int i = 0; i < BLOCK / 2; i++) {
        dot += (w[i] & 15) * q[i] + (w[i] >> 4) * q[i + BLOCK / 2];
    }
    if (t == BT_DTYPE_Q4_0) {
        return dw * d * (float)(dot - 8 * sum);
    }
    return dw * d * (float)dot + kn_f16_to_f32(kn_load_u16(w - 2)) * (d * (float)sum);
}

static float element(enum bt_dtype t, const uint8_t *w, size_t i)
{
    switch ((int)t) {
    case BT_DTYPE_F32:
        return ((const float *)w)[i];
    case BT_DTYPE_F16:
        return kn_f16_to_f32(kn_load_u16(w + 2 * i));
    default:
        return kn_bf16_to_f32(kn_load_u16(w + 2 * i));
    }
}

/* Activations rounded to bf16; of a pair the second product first, each fused. */
static float bf16_dot(const uint8_t *w, const float *x, size_t k)
{
    float acc = 0;

    for (size_t i = 0; i < k; i += 2) {
        for (size_t c = BT_MIN(i + 2, k); c > i; c--) {
            float bf16 = kn_bf16_to_f32(kn_f32_to_bf16(x[c - 1]));

            acc = fmaf(element(BT_DTYPE_BF16, w, c - 1), bf16, acc);
        }
    }
    return acc;
}

static float float_dot(enum bt_dtype t, const uint8_t *w, const float *x, size_t k)
{
    float acc = 0;

    for (size_t i = 0; i < k; i++) {
        acc += element(t, w, i) * x[i];
    }
    return acc;
}

/* One row of activations by one part of the weights. */
static void part_row(const struct kn_matmul_args *a,
                     const struct kn_weight_part *p,
                     enum acts acts,
                     const float *x,
                     float *out)
{
    size_t k = (size_t)a->w->k, row_bytes = kn_row_bytes(p->dtype, k);
    bool quant = bt_dtype_block_elems(p->dtype) == BLOCK;

    for (int n = 0; n < p->n; n++) {
        const uint8_t *w = (const uint8_t *)p->data + (size_t)n * row_bytes;
        float acc = 0;

        if (!quant) {
            acc = acts == ACTS_BF16 && p->dtype == BT_DTYPE_BF16 ? bf16_dot(w, x, k)
                                                                 : float_dot(p->dtype, w, x, k);
        } else {
            for (size_t b = 0; b < k / BLOCK; b++) {
                int16_t q[BLOCK];
                int sum;
                float d = quantize_block(x + b * BLOCK, q, &sum);

                acc += acts == ACTS_WIDE ? wide_block(p->dtype, w, x + b * BLOCK)
                                         : dot_block(p->dtype, w, q, d, sum);
                w += bt_dtype_block_bytes(p->dtype);
            }
        }
        acc += p->bias ? p->bias[n] : 0;
        out[n] = a->add ? out[n] + acc : acc;
    }
}

static void matmul(const struct kn_matmul_args *a, enum acts acts)
{
    for (int t = 0; t < a->n_rows; t++) {
        float *out = a->out + (size_t)t * a->out_stride;

        for (int i = 0; i < a->w->n_parts; i++) {
            part_row(a, &a->w->part[i], acts, a->x + (size_t)t * a->x_stride, out);
            out += a->w->part[i].n;
        }
    }
}

void kn_ref_matmul(struct kn_stream *stream, const struct kn_matmul_args *a)
{
    matmul(a, ACTS_PLAIN);
}

void kn_ref_matmul_wide(struct kn_stream *stream, const struct kn_matmul_args *a)
{
    matmul(a, ACTS_WIDE);
}

void kn_ref_matmul_bf16(struct kn_stream *stream, const struct kn_matmul_args *a)
{
    matmul(a, ACTS_BF16);
}
