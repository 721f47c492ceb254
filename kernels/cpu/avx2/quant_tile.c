/* Quantized tiles with AVX2.
 *
 * VPMADDUBSW multiplies unsigned by signed bytes and adds neighbours to 16 bits with saturation, so
 * operands are kept small enough that nothing saturates: 4-bit weights give at most 2 * 15 * 127 a
 * pair and 8 such vectors, a whole block, still fit in 16 bits (30480); 8-bit weights are split
 * into magnitude and sign, at most 2 * 128 * 127 (32512) a pair, and widened each time. All
 * integers are exact and equal to those of the AVX-512 rows.
 *
 * A tile's 16 outputs are done in two halves of 8 lanes, up to 4 rows at a time. */
#include "kernels/cpu/pack.h"
#include "kernels/cpu/vec/vec.h"

#define MAX_ROWS 4

KN_INLINE __m256i bytes4(const int8_t *q)
{
    int32_t x;

    memcpy(&x, q, sizeof(x));
    return _mm256_set1_epi32(x);
}

KN_INLINE __m256i load32(const char *p)
{
    return _mm256_loadu_si256((const __m256i *)p);
}

/* Integer dot products of a block for rows in .. in + n of the group and 8 outputs. */
KN_INLINE void
block_dots(enum bt_dtype t, const struct kn_acts *a, int in, const char *w, int n, __m256i *dot)
{
    __m256i low = _mm256_set1_epi8(15), ones = _mm256_set1_epi16(1);

#pragma GCC unroll 4
    for (int r = 0; r < n; r++) {
        dot[r] = _mm256_setzero_si256();
    }
    if (t == BT_DTYPE_Q8_0) {
        for (int i = 0; i < 8; i++) {
            __m256i v = _mm256_xor_si256(load32(w + 64 * i), _mm256_set1_epi8((char)0x80));
            __m256i mag = _mm256_abs_epi8(v);

#pragma GCC unroll 4
            for (int r = 0; r < n; r++) {
                __m256i x = _mm256_sign_epi8(bytes4(a->q[in + r] + 4 * i), v);
                __m256i p = _mm256_madd_epi16(_mm256_maddubs_epi16(mag, x), ones);

                dot[r] = _mm256_add_epi32(dot[r], p);
            }
        }
        return;
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        __m256i v = load32(w + 64 * i), lo = _mm256_and_si256(v, low);
        __m256i hi = _mm256_and_si256(_mm256_srli_epi16(v, 4), low);

#pragma GCC unroll 4
        for (int r = 0; r < n; r++) {
            const int8_t *x = a->q[in + r] + 4 * i;
            __m256i p = _mm256_maddubs_epi16(lo, bytes4(x));

            p = _mm256_add_epi16(p, _mm256_maddubs_epi16(hi, bytes4(x + 16)));
            dot[r] = _mm256_add_epi16(dot[r], p);
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < n; r++) {
        dot[r] = _mm256_madd_epi16(dot[r], ones);
    }
}

/* Rows in .. in + n (constant after inlining) of the group at `row` by 8 outputs of the tile. */
KN_INLINE void half_tile(
    const struct kn_tile_job *j, enum bt_dtype t, int row, int in, int n, int half, __m256 *ret)
{
    size_t blocks = (size_t)j->k / KN_QBLOCK;
    const char *w = j->tile + 32 * half;
    const char *scales = j->tile + blocks * kn_tile_quant_bytes(t) + 16 * half;
    const struct kn_acts *x = j->acts + (size_t)(row / KN_GROUP) * blocks;
    __m256 acc[MAX_ROWS];

#pragma GCC unroll 4
    for (int r = 0; r < n; r++) {
        acc[r] = _mm256_setzero_ps();
    }
    for (size_t b = 0; b < blocks; b++, x++) {
        __m256i dot[MAX_ROWS];
        __m256 d, m = _mm256_setzero_ps();

        block_dots(t, x, in, w, n, dot);
        d = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)scales));
        if (t == BT_DTYPE_Q4_1) {
            m = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(scales + 32)));
        }
#pragma GCC unroll 4
        for (int r = 0; r < n; r++) {
            __m256i i = dot[r];
            __m256 s;

            if (t == BT_DTYPE_Q4_0) {
                i = _mm256_add_epi32(i, _mm256_set1_epi32(-8 * x->sum[in + r]));
            }
            s = _mm256_mul_ps(_mm256_cvtepi32_ps(i), _mm256_set1_ps(x->scale[in + r]));
            acc[r] = _mm256_fmadd_ps(s, d, acc[r]);
            if (t == BT_DTYPE_Q4_1) {
                acc[r] = _mm256_fmadd_ps(_mm256_set1_ps(x->ssum[in + r]), m, acc[r]);
            }
        }
        w += kn_tile_quant_bytes(t);
        scales += kn_tile_scale_bytes(t);
    }
#pragma GCC unroll 4
    for (int r = 0; r < n; r++) {
        ret[r] = acc[r];
    }
}

KN_INLINE void rows_by_tile(const struct kn_tile_job *j, enum bt_dtype t, int row, int in, int n)
{
    __m256 lo[MAX_ROWS], hi[MAX_ROWS];

    half_tile(j, t, row, in, n, 0, lo);
    half_tile(j, t, row, in, n, 1, hi);
#pragma GCC unroll 4
    for (int r = 0; r < n; r++) {
        kn_tile_finish(j, row + in + r, (v16){lo[r], hi[r]});
    }
}

KN_INLINE void tile_of(const struct kn_tile_job *j, enum bt_dtype t)
{
    int row = 0;

    for (; row + 4 <= j->n_rows; row += 4) {
        rows_by_tile(j, t, row - row % KN_GROUP, row % KN_GROUP, 4);
    }
    for (; row < j->n_rows; row++) {
        rows_by_tile(j, t, row - row % KN_GROUP, row % KN_GROUP, 1);
    }
}

void KN_V(quant_tile)(const struct kn_tile_job *j)
{
    if (j->dtype == BT_DTYPE_Q8_0) {
        tile_of(j, BT_DTYPE_Q8_0);
    } else if (j->dtype == BT_DTYPE_Q4_0) {
        tile_of(j, BT_DTYPE_Q4_0);
    } else {
        tile_of(j, BT_DTYPE_Q4_1);
    }
}
