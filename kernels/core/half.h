/* Half precision and bfloat16 by integer arithmetic: the same bits on every machine. */
#ifndef KN_CORE_HALF_H
#define KN_CORE_HALF_H

#include "common/base/base.h"

static inline float kn_f32_from_bits(uint32_t u)
{
    float f;

    memcpy(&f, &u, sizeof(f));
    return f;
}

static inline uint32_t kn_bits_of_f32(float f)
{
    uint32_t u;

    memcpy(&u, &f, sizeof(u));
    return u;
}

static inline float kn_f16_to_f32(uint16_t h)
{
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, exp = (h >> 10) & 31, man = h & 0x3ff;

    if (exp == 31) { /* infinity, NaN */
        return kn_f32_from_bits(sign | 0x7f800000u | (man ? 0x400000u | man << 13 : 0));
    }
    if (exp == 0) { /* zero and subnormals: exact in f32 */
        float f = (float)man * 0x1p-24f;

        return sign ? -f : f;
    }
    return kn_f32_from_bits(sign | (exp + 112) << 23 | man << 13);
}

/* Rounds to nearest, ties to even, as the F16C instructions do. */
static inline uint16_t kn_f32_to_f16(float f)
{
    uint32_t u = kn_bits_of_f32(f), sign = u >> 16 & 0x8000, a = u & 0x7fffffff;

    if (a > 0x7f800000u) { /* NaN: quiet, upper payload kept */
        return (uint16_t)(sign | 0x7e00 | (a >> 13 & 0x3ff));
    }
    if (a >= 0x477ff000u) { /* rounds past the largest finite value */
        return (uint16_t)(sign | 0x7c00);
    }
    if (a < 0x38800000u) { /* subnormal: adding 0.5 puts the unit of 2^-24 at the last bit */
        return (uint16_t)(sign | (kn_bits_of_f32(kn_f32_from_bits(a) + 0.5f) - 0x3f000000u));
    }
    a += 0xfff + (a >> 13 & 1);
    return (uint16_t)(sign | (a - 0x38000000u) >> 13);
}

static inline float kn_bf16_to_f32(uint16_t h)
{
    return kn_f32_from_bits((uint32_t)h << 16);
}

/* Nearest, ties to even; NaN stays NaN. */
static inline uint16_t kn_f32_to_bf16(float f)
{
    uint32_t u = kn_bits_of_f32(f);

    if ((u & 0x7fffffffu) > 0x7f800000u) {
        return (uint16_t)(u >> 16 | 0x40);
    }
    return (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}

static inline uint16_t kn_load_u16(const void *p)
{
    uint16_t u;

    memcpy(&u, p, sizeof(u));
    return u;
}

#endif
