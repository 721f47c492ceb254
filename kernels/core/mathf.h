/* Scalar functions with the same bits on every machine, in plain IEEE operations that compilers
 * can turn into vectors. */
#ifndef KN_CORE_MATHF_H
#define KN_CORE_MATHF_H

#include "kernels/core/half.h"

/* e^x for x <= 0 (and NaN never): x = n ln 2 + r, Taylor polynomial of degree 7 in r, times 2^n.
 * Below -87 the result is 0. */
static inline float kn_exp_neg(float x)
{
    float c = x < -87.0f ? -87.0f : x;
    float t = c * 0x1.715476p+0f + 0x1.8p23f; /* adding 1.5 * 2^23 rounds to an integer */
    float n = t - 0x1.8p23f;
    float r = c - n * 0x1.62e4p-1f - n * 0x1.7f7d1cp-20f;
    float p = 1.0f / 5040;

    p = p * r + 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r + 1;
    p = p * r + 1;
    /* The low bits of t hold n; the shift drops all others. */
    p *= kn_f32_from_bits((kn_bits_of_f32(t) + 127) << 23);
    return x < -87.0f ? 0 : p;
}

#endif
