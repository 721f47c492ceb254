/* The grid of weights; grid.h says which. */
#include "kernels/cpu/grid.h"

#include "kernels/core/half.h"

#include <math.h>

#define LARGEST 254 /* |W|, before step and centre lose bits */

static float power(int e)
{
    return kn_f32_from_bits((uint32_t)(127 + e) << 23);
}

/* About the nearest f16 to v whose last `n` bits are `bits`: f16 count up with what they mean. */
static uint32_t near_f16(float v, unsigned n, int bits)
{
    uint16_t h = kn_f32_to_f16(v);
    int step = 1 << n, up = (h & 0x7fff) + step / 2 - bits;

    return (h & 0x8000u) | (uint32_t)((BT_MAX(up, 0) & -step) | bits);
}

uint32_t kn_grid_q4_1(float d, float m)
{
    float max = fmaxf(fabsf(m), fabsf(m + 15 * d)), scale;
    int e = (int)((kn_bits_of_f32(max * (1.0f / LARGEST)) + 0x7fffff) >> 23) - 127, at;

    e = BT_MAX(e, -KN_GRID_Q4_1);
    e = BT_MIN(e, 31 - KN_GRID_Q4_1); /* also where max is no number */
    at = e + KN_GRID_Q4_1;
    scale = power(-e);
    return near_f16(d * scale, 2, at & 3) | near_f16((m + 8 * d) * scale, 3, at >> 2) << 16;
}

uint16_t kn_grid_q8_0(float d)
{
    uint32_t sign = kn_bits_of_f32(d) >> 16 & 0x8000;
    float a = fminf(fmaxf(fabsf(d), 0x1p-24f), 0x1.ffcp7f);
    uint32_t u = kn_bits_of_f32(a); /* came from f16: no more than 10 bits of mantissa */

    return (uint16_t)(sign | ((u >> 23) - 127 + KN_GRID_Q8_0) << 10 | (u >> 13 & 0x3ff));
}

/* To f16 and back. */
static double as_f16(double x)
{
    double unit;
    int e;

    frexp(x, &e);
    unit = ldexp(1, BT_MAX(e - 11, -24));
    return rint(x / unit) * unit;
}

static float q4_1_block(const uint8_t *block, int16_t ret_w[32])
{
    uint32_t g =
        kn_grid_q4_1(kn_f16_to_f32(kn_load_u16(block)), kn_f16_to_f32(kn_load_u16(block + 2)));
    double step = (double)kn_f16_to_f32((uint16_t)g);
    double centre = (double)kn_f16_to_f32((uint16_t)(g >> 16));

    for (int i = 0; i < 32; i++) {
        int q = i < 16 ? block[4 + i] & 15 : block[4 + i - 16] >> 4;

        ret_w[i] = (int16_t)rint(as_f16(step * (q - 8) + centre));
    }
    return power((int)((g & 3) | (g >> 16 & 7) << 2) - KN_GRID_Q4_1);
}

float kn_grid_block(enum bt_dtype t, const uint8_t *block, int16_t ret_w[32])
{
    bool q8 = t == BT_DTYPE_Q8_0;
    uint32_t g;
    double step;

    if (t == BT_DTYPE_Q4_1) {
        return q4_1_block(block, ret_w);
    }
    g = kn_grid_q8_0(kn_f16_to_f32(kn_load_u16(block)));
    step = (double)kn_f16_to_f32((uint16_t)((g & 0x83ff) | (q8 ? 0x3c00 : 0x4c00)));
    for (int i = 0; i < 32; i++) {
        int q4 = i < 16 ? block[2 + i % 16] & 15 : block[2 + i % 16] >> 4;

        ret_w[i] = (int16_t)rint(step * (q8 ? (int8_t)block[2 + i] : q4 - 8));
    }
    return power((int)(g >> 10 & 31) - (q8 ? KN_GRID_Q8_0 : KN_GRID_Q4_0));
}
