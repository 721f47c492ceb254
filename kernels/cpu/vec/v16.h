/* Sixteen f32 lanes: one AVX-512 register or two AVX2 registers, with the same result bits.
 *
 * The files in kernels/cpu/vec are written with these and compiled once for each instruction set.
 * Every operation is exact per lane (IEEE, or FMA where the name says so) and v16_sum has one fixed
 * tree, so both sets give equal bits. KN_V(name) is the set's own name for a function. */
#ifndef KN_CPU_VEC_V16_H
#define KN_CPU_VEC_V16_H

#include "common/base/base.h"

#include <immintrin.h>
#include <math.h>

#define KN_CAT_(a, b) a##b
#define KN_CAT(a, b)  KN_CAT_(a, b)
/* KN_ISA_PREFIX comes from the build: "kn_avx2_", for example. */
#define KN_V(name) KN_CAT(KN_ISA_PREFIX, name)
#define KN_INLINE  static inline __attribute__((always_inline))

#if defined(__AVX512F__)

typedef __m512 v16; /* a scalar to us: kept without a struct for the compiler's sake */

KN_INLINE v16 v16_zero(void)
{
    return _mm512_setzero_ps();
}
KN_INLINE v16 v16_set1(float a)
{
    return _mm512_set1_ps(a);
}
KN_INLINE v16 v16_load(const float *p)
{
    return _mm512_loadu_ps(p);
}
KN_INLINE void v16_store(float *p, v16 a)
{
    _mm512_storeu_ps(p, a);
}
/* First n lanes, 0..16; the rest is zero. */
KN_INLINE v16 v16_load_n(const float *p, int n)
{
    return _mm512_maskz_loadu_ps((__mmask16)((1u << n) - 1), p);
}
KN_INLINE void v16_store_n(float *p, v16 a, int n)
{
    _mm512_mask_storeu_ps(p, (__mmask16)((1u << n) - 1), a);
}
KN_INLINE v16 v16_load_f16(const uint16_t *p)
{
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
}
/* The even or odd elements of 16 pairs. */
KN_INLINE v16 v16_load_bf16_pair(const uint32_t *p, bool odd)
{
    __m512i u = _mm512_loadu_si512(p);

    return _mm512_castsi512_ps(odd ? _mm512_and_si512(u, _mm512_set1_epi32((int)0xffff0000))
                                   : _mm512_slli_epi32(u, 16));
}
KN_INLINE void v16_store_f16(uint16_t *p, v16 a)
{
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT));
}
KN_INLINE v16 v16_add(v16 a, v16 b)
{
    return _mm512_add_ps(a, b);
}
KN_INLINE v16 v16_sub(v16 a, v16 b)
{
    return _mm512_sub_ps(a, b);
}
KN_INLINE v16 v16_mul(v16 a, v16 b)
{
    return _mm512_mul_ps(a, b);
}
KN_INLINE v16 v16_div(v16 a, v16 b)
{
    return _mm512_div_ps(a, b);
}
/* a * b + c, rounded once. */
KN_INLINE v16 v16_fma(v16 a, v16 b, v16 c)
{
    return _mm512_fmadd_ps(a, b, c);
}
/* c - a * b, rounded once. */
KN_INLINE v16 v16_fnma(v16 a, v16 b, v16 c)
{
    return _mm512_fnmadd_ps(a, b, c);
}
KN_INLINE v16 v16_max(v16 a, v16 b)
{
    return _mm512_max_ps(a, b);
}
KN_INLINE v16 v16_min(v16 a, v16 b)
{
    return _mm512_min_ps(a, b);
}
KN_INLINE v16 v16_abs(v16 a)
{
    return _mm512_abs_ps(a);
}
KN_INLINE v16 v16_round(v16 a)
{
    return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
/* 2^n for integral n in -126..127. */
KN_INLINE v16 v16_exp2i(v16 n)
{
    __m512i i = _mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127));

    return _mm512_castsi512_ps(_mm512_slli_epi32(i, 23));
}
/* Zero where a < b. */
KN_INLINE v16 v16_zero_below(v16 x, v16 a, v16 b)
{
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(a, b, _CMP_NLT_UQ), x);
}
/* Lanes n..15 become `fill`. */
KN_INLINE v16 v16_fill_from(v16 a, int n, float fill)
{
    return _mm512_mask_mov_ps(_mm512_set1_ps(fill), (__mmask16)((1u << n) - 1), a);
}
KN_INLINE v16 v16_swap_pairs(v16 a)
{
    return _mm512_permute_ps(a, 0xb1);
}
/* Rounds to nearest even, to signed bytes. */
KN_INLINE void v16_store_i8(int8_t *p, v16 a)
{
    _mm_storeu_si128((__m128i *)p, _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(a)));
}
KN_INLINE __m256 v16_lo(v16 a)
{
    return _mm512_castps512_ps256(a);
}
KN_INLINE __m256 v16_hi(v16 a)
{
    return _mm512_extractf32x8_ps(a, 1);
}

#else /* AVX2 */

typedef struct {
    __m256 lo, hi;
} v16; /* a scalar to us */

KN_INLINE v16 v16_zero(void)
{
    return (v16){_mm256_setzero_ps(), _mm256_setzero_ps()};
}
KN_INLINE v16 v16_set1(float a)
{
    return (v16){_mm256_set1_ps(a), _mm256_set1_ps(a)};
}
KN_INLINE v16 v16_load(const float *p)
{
    return (v16){_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)};
}
KN_INLINE void v16_store(float *p, v16 a)
{
    _mm256_storeu_ps(p, a.lo);
    _mm256_storeu_ps(p + 8, a.hi);
}
KN_INLINE __m256i v16_mask8(int n)
{
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
KN_INLINE v16 v16_load_n(const float *p, int n)
{
    return (v16){_mm256_maskload_ps(p, v16_mask8(n)), _mm256_maskload_ps(p + 8, v16_mask8(n - 8))};
}
KN_INLINE void v16_store_n(float *p, v16 a, int n)
{
    _mm256_maskstore_ps(p, v16_mask8(n), a.lo);
    _mm256_maskstore_ps(p + 8, v16_mask8(n - 8), a.hi);
}
KN_INLINE v16 v16_load_f16(const uint16_t *p)
{
    return (v16){_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)),
                 _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(p + 8)))};
}
KN_INLINE __m256 v16_bf16x8(const uint32_t *p, bool odd)
{
    __m256i u = _mm256_loadu_si256((const __m256i *)p);

    return _mm256_castsi256_ps(odd ? _mm256_and_si256(u, _mm256_set1_epi32((int)0xffff0000))
                                   : _mm256_slli_epi32(u, 16));
}
KN_INLINE v16 v16_load_bf16_pair(const uint32_t *p, bool odd)
{
    return (v16){v16_bf16x8(p, odd), v16_bf16x8(p + 8, odd)};
}
KN_INLINE void v16_store_f16(uint16_t *p, v16 a)
{
    _mm_storeu_si128((__m128i *)p, _mm256_cvtps_ph(a.lo, _MM_FROUND_TO_NEAREST_INT));
    _mm_storeu_si128((__m128i *)(p + 8), _mm256_cvtps_ph(a.hi, _MM_FROUND_TO_NEAREST_INT));
}
KN_INLINE v16 v16_add(v16 a, v16 b)
{
    return (v16){_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)};
}
KN_INLINE v16 v16_sub(v16 a, v16 b)
{
    return (v16){_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)};
}
KN_INLINE v16 v16_mul(v16 a, v16 b)
{
    return (v16){_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)};
}
KN_INLINE v16 v16_div(v16 a, v16 b)
{
    return (v16){_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)};
}
KN_INLINE v16 v16_fma(v16 a, v16 b, v16 c)
{
    return (v16){_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
KN_INLINE v16 v16_fnma(v16 a, v16 b, v16 c)
{
    return (v16){_mm256_fnmadd_ps(a.lo, b.lo, c.lo), _mm256_fnmadd_ps(a.hi, b.hi, c.hi)};
}
KN_INLINE v16 v16_max(v16 a, v16 b)
{
    return (v16){_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)};
}
KN_INLINE v16 v16_min(v16 a, v16 b)
{
    return (v16){_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)};
}
KN_INLINE v16 v16_abs(v16 a)
{
    __m256 sign = _mm256_set1_ps(-0.0f);

    return (v16){_mm256_andnot_ps(sign, a.lo), _mm256_andnot_ps(sign, a.hi)};
}
KN_INLINE v16 v16_round(v16 a)
{
    return (v16){_mm256_round_ps(a.lo, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC),
                 _mm256_round_ps(a.hi, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
KN_INLINE __m256 v16_exp2i8(__m256 n)
{
    __m256i i = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));

    return _mm256_castsi256_ps(_mm256_slli_epi32(i, 23));
}
KN_INLINE v16 v16_exp2i(v16 n)
{
    return (v16){v16_exp2i8(n.lo), v16_exp2i8(n.hi)};
}
KN_INLINE v16 v16_zero_below(v16 x, v16 a, v16 b)
{
    return (v16){_mm256_and_ps(x.lo, _mm256_cmp_ps(a.lo, b.lo, _CMP_NLT_UQ)),
                 _mm256_and_ps(x.hi, _mm256_cmp_ps(a.hi, b.hi, _CMP_NLT_UQ))};
}
KN_INLINE v16 v16_fill_from(v16 a, int n, float fill)
{
    __m256 f = _mm256_set1_ps(fill);

    return (v16){_mm256_blendv_ps(f, a.lo, _mm256_castsi256_ps(v16_mask8(n))),
                 _mm256_blendv_ps(f, a.hi, _mm256_castsi256_ps(v16_mask8(n - 8)))};
}
KN_INLINE v16 v16_swap_pairs(v16 a)
{
    return (v16){_mm256_permute_ps(a.lo, 0xb1), _mm256_permute_ps(a.hi, 0xb1)};
}
KN_INLINE void v16_store_i8(int8_t *p, v16 a)
{
    __m256i w = _mm256_packs_epi32(_mm256_cvtps_epi32(a.lo), _mm256_cvtps_epi32(a.hi));
    __m256i b = _mm256_packs_epi16(_mm256_permute4x64_epi64(w, 0xd8), _mm256_setzero_si256());

    _mm_storeu_si128((__m128i *)p, _mm256_castsi256_si128(_mm256_permute4x64_epi64(b, 0xd8)));
}
KN_INLINE __m256 v16_lo(v16 a)
{
    return a.lo;
}
KN_INLINE __m256 v16_hi(v16 a)
{
    return a.hi;
}

#endif

/* Sum of the lanes: i with i + 8, then 4, 2, 1 apart. */
KN_INLINE float v16_sum(v16 a)
{
    __m256 x = _mm256_add_ps(v16_lo(a), v16_hi(a));
    __m128 y = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));

    y = _mm_add_ps(y, _mm_movehl_ps(y, y));
    return _mm_cvtss_f32(_mm_add_ss(y, _mm_movehdup_ps(y)));
}

KN_INLINE float v16_hmax(v16 a)
{
    __m256 x = _mm256_max_ps(v16_lo(a), v16_hi(a));
    __m128 y = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));

    y = _mm_max_ps(y, _mm_movehl_ps(y, y));
    return _mm_cvtss_f32(_mm_max_ss(y, _mm_movehdup_ps(y)));
}

/* e^x: x = n ln 2 + r with |r| <= ln 2 / 2, Taylor polynomial of degree 7 in r (first term left out
 * below 6e-9), times 2^n. Below -87.3 (and for -inf) 0, above 88.3 +inf; NaN stays. e^0 is 1. */
KN_INLINE v16 v16_exp(v16 x)
{
    v16 lowest = v16_set1(-87.3f);
    v16 c = v16_min(v16_set1(89.0f), v16_max(lowest, x)); /* second operand wins on NaN */
    v16 n = v16_round(v16_mul(c, v16_set1(0x1.715476p+0f)));
    v16 r = v16_fnma(n, v16_set1(0x1.62e4p-1f), c); /* ln 2 in two pieces, n * first exact */
    v16 p = v16_set1(1.0f / 5040);

    r = v16_fnma(n, v16_set1(0x1.7f7d1cp-20f), r);
    p = v16_fma(p, r, v16_set1(1.0f / 720));
    p = v16_fma(p, r, v16_set1(1.0f / 120));
    p = v16_fma(p, r, v16_set1(1.0f / 24));
    p = v16_fma(p, r, v16_set1(1.0f / 6));
    p = v16_fma(p, r, v16_set1(0.5f));
    p = v16_fma(p, r, v16_set1(1.0f));
    p = v16_fma(p, r, v16_set1(1.0f));
    return v16_zero_below(v16_mul(p, v16_exp2i(n)), x, lowest);
}

#endif
