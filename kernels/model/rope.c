/* cos and sin for the rotary embedding, without libm: results must be the same bits on every
 * machine of a numerics id, and libm picks its code by processor and version. */
#include "kernels/model/model_int.h"

/* pi/2 in three pieces; the first two have trailing zero bits, so that n * piece is exact for n up
 * to 2^20 (angles up to 1.6 million). */
#define PIO2_1 0x1.921fb544p+0
#define PIO2_2 0x1.0b4611a6p-34
#define PIO2_3 0x1.3198a2e037073p-69

/* Taylor polynomials on [-pi/4, pi/4]: the first term left out is below 2^-52 of the result, far
 * below the rounding to f32 that follows. */
static double sin_poly(double r)
{
    double z = r * r;
    double p = -1.0 / 1307674368000.0;

    p = p * z + 1.0 / 6227020800.0;
    p = p * z - 1.0 / 39916800.0;
    p = p * z + 1.0 / 362880.0;
    p = p * z - 1.0 / 5040.0;
    p = p * z + 1.0 / 120.0;
    p = p * z - 1.0 / 6.0;
    return r + r * z * p;
}

static double cos_poly(double r)
{
    double z = r * r;
    double p = 1.0 / 20922789888000.0;

    p = p * z - 1.0 / 87178291200.0;
    p = p * z + 1.0 / 479001600.0;
    p = p * z - 1.0 / 3628800.0;
    p = p * z + 1.0 / 40320.0;
    p = p * z - 1.0 / 720.0;
    p = p * z + 1.0 / 24.0;
    p = p * z - 0.5;
    return 1.0 + z * p;
}

/* x >= 0. */
static void cos_sin(double x, float *ret_cos, float *ret_sin)
{
    int64_t n = (int64_t)(x * 0x1.45f306dc9c883p-1 + 0.5); /* nearest multiple of pi/2 */
    double r = x - (double)n * PIO2_1 - (double)n * PIO2_2 - (double)n * PIO2_3;
    float s = (float)sin_poly(r), c = (float)cos_poly(r);

    *ret_cos = n & 1 ? s : c;
    *ret_sin = n & 1 ? c : s;
    *ret_cos = (n + 1) & 2 ? -*ret_cos : *ret_cos; /* quadrants 1 and 2 */
    *ret_sin = n & 2 ? -*ret_sin : *ret_sin;       /* quadrants 2 and 3 */
}

void kn_rope_angles(const float *freqs, int head_dim, bool interleaved, int pos, float *ret_cos_sin)
{
    float *cs = ret_cos_sin, *sn = ret_cos_sin + head_dim;

    for (int i = 0; i < head_dim / 2; i++) {
        int a = interleaved ? 2 * i : i, b = interleaved ? 2 * i + 1 : i + head_dim / 2;

        cos_sin((double)((float)pos * freqs[i]), &cs[a], &sn[b]);
        cs[b] = cs[a];
        sn[a] = -sn[b];
    }
}
