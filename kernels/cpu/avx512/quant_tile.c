/* Quantized tiles with AVX-512 VNNI.
 *
 * VPDPBUSD multiplies unsigned weight bytes by signed activation bytes, four neighbours a lane, and
 * adds to 32 bits: with one output a lane and the four activation bytes broadcast, eight of them
 * make a block. 4-bit weights are unsigned as stored; Q4_0's -8 and Q8_0's -128 (pack.h) are taken
 * off through the sum of the activations, so all integers are exact.
 *
 * Up to 12 rows share a tile's unpacked weights: 12 float and 12 integer accumulators and the
 * operands fill the 32 registers. */
#include "kernels/cpu/pack.h"
#include "kernels/cpu/vec/vec.h"

KN_INLINE __m512i dot4(__m512i acc, __m512i w, const int8_t *q)
{
    int32_t x;

    memcpy(&x, q, sizeof(x));
    return _mm512_dpbusd_epi32(acc, w, _mm512_set1_epi32(x));
}

/* Integer dot products of a block for rows in .. in + n of the group. */
KN_INLINE void
block_dots(enum bt_dtype t, const struct kn_acts *x, int in, const char *w, int n, __m512i *dot)
{
    __m512i low = _mm512_set1_epi8(15);

    if (t == BT_DTYPE_Q8_0) {
#pragma GCC unroll 8
        for (int i = 0; i < 8; i++) {
            __m512i v = _mm512_loadu_si512(w + 64 * i);

#pragma GCC unroll 12
            for (int r = 0; r < n; r++) {
                dot[r] = dot4(dot[r], v, x->q[in + r] + 4 * i);
            }
        }
        return;
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        __m512i v = _mm512_loadu_si512(w + 64 * i);
        __m512i lo = _mm512_and_si512(v, low);
        __m512i hi = _mm512_and_si512(_mm512_srli_epi16(v, 4), low);

#pragma GCC unroll 12
        for (int r = 0; r < n; r++) {
            dot[r] = dot4(dot[r], lo, x->q[in + r] + 4 * i);
        }
#pragma GCC unroll 12
        for (int r = 0; r < n; r++) {
            dot[r] = dot4(dot[r], hi, x->q[in + r] + 16 + 4 * i);
        }
    }
}

/* Rows in .. in + n of the group that begins at row `row`; n is constant after inlining. */
KN_INLINE void rows_by_tile(const struct kn_tile_job *j, enum bt_dtype t, int row, int in, int n)
{
    size_t blocks = (size_t)j->k / KN_QBLOCK;
    const char *w = j->tile, *scales = w + blocks * kn_tile_quant_bytes(t);
    const struct kn_acts *x = j->acts + (size_t)(row / KN_GROUP) * blocks;
    __m512 acc[KN_GROUP];

#pragma GCC unroll 12
    for (int r = 0; r < n; r++) {
        acc[r] = _mm512_setzero_ps();
    }
    for (size_t b = 0; b < blocks; b++, x++) {
        __m512i dot[KN_GROUP];
        __m512 d, m = _mm512_setzero_ps();

#pragma GCC unroll 12
        for (int r = 0; r < n; r++) {
            dot[r] = t == BT_DTYPE_Q4_1 ? _mm512_setzero_si512()
                                        : _mm512_slli_epi32(_mm512_set1_epi32(-x->sum[in + r]),
                                                            t == BT_DTYPE_Q8_0 ? 7 : 3);
        }
        block_dots(t, x, in, w, n, dot);
        d = v16_load_f16((const uint16_t *)scales);
        if (t == BT_DTYPE_Q4_1) {
            m = v16_load_f16((const uint16_t *)scales + KN_TILE);
        }
#pragma GCC unroll 12
        for (int r = 0; r < n; r++) {
            __m512 s = _mm512_cvtepi32_ps(dot[r]);

            s = _mm512_mul_ps(s, _mm512_set1_ps(x->scale[in + r]));
            acc[r] = _mm512_fmadd_ps(s, d, acc[r]);
            if (t == BT_DTYPE_Q4_1) {
                acc[r] = _mm512_fmadd_ps(_mm512_set1_ps(x->ssum[in + r]), m, acc[r]);
            }
        }
        w += kn_tile_quant_bytes(t);
        scales += kn_tile_scale_bytes(t);
    }
#pragma GCC unroll 12
    for (int r = 0; r < n; r++) {
        kn_tile_finish(j, row + in + r, acc[r]);
    }
}

KN_INLINE void tile_of(const struct kn_tile_job *j, enum bt_dtype t)
{
    int row = 0, in = 0, left;

    for (; row + KN_GROUP <= j->n_rows; row += KN_GROUP) {
        rows_by_tile(j, t, row, 0, KN_GROUP);
    }
    left = j->n_rows - row;
    if (left >= 8) {
        rows_by_tile(j, t, row, 0, 8);
        in = 8;
    }
    if (left - in >= 4) {
        rows_by_tile(j, t, row, in, 4);
        in += 4;
    }
    if (left - in >= 2) {
        rows_by_tile(j, t, row, in, 2);
        in += 2;
    }
    if (left - in >= 1) {
        rows_by_tile(j, t, row, in, 1);
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
