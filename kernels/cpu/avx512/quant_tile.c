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

#define MAX_ROWS 12

KN_INLINE __m512i dot4(__m512i acc, __m512i w, const int8_t *q)
{
    int32_t x;

    memcpy(&x, q, sizeof(x));
    return _mm512_dpbusd_epi32(acc, w, _mm512_set1_epi32(x));
}

/* Integer dot products of block b for n rows. */
KN_INLINE void block_dots(const struct kn_tile_job *j,
                          enum bt_dtype t,
                          const int8_t *q,
                          const char *w,
                          int n,
                          __m512i *dot)
{
    size_t k = (size_t)j->k;
    __m512i low = _mm512_set1_epi8(15);

    if (t == BT_DTYPE_Q8_0) {
#pragma GCC unroll 8
        for (int i = 0; i < 8; i++) {
            __m512i v = _mm512_loadu_si512(w + 64 * i);

#pragma GCC unroll 12
            for (int r = 0; r < n; r++) {
                dot[r] = dot4(dot[r], v, q + (size_t)r * k + 4 * i);
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
            dot[r] = dot4(dot[r], lo, q + (size_t)r * k + 4 * i);
        }
#pragma GCC unroll 12
        for (int r = 0; r < n; r++) {
            dot[r] = dot4(dot[r], hi, q + (size_t)r * k + 16 + 4 * i);
        }
    }
}

/* n (constant after inlining) rows from `row` on. */
KN_INLINE void rows_by_tile(const struct kn_tile_job *j, enum bt_dtype t, int row, int n)
{
    size_t k = (size_t)j->k, blocks = k / KN_QBLOCK, first = (size_t)row * blocks;
    const char *w = j->tile, *scales = w + blocks * kn_tile_quant_bytes(t);
    const int8_t *q = j->q + (size_t)row * k;
    __m512 acc[MAX_ROWS];

#pragma GCC unroll 12
    for (int r = 0; r < n; r++) {
        acc[r] = _mm512_setzero_ps();
    }
    for (size_t b = 0; b < blocks; b++) {
        __m512i dot[MAX_ROWS];
        __m512 d, m = _mm512_setzero_ps();

#pragma GCC unroll 12
        for (int r = 0; r < n; r++) {
            int32_t sum = j->sum[first + (size_t)r * blocks + b];

            dot[r] = _mm512_set1_epi32(t == BT_DTYPE_Q8_0   ? -128 * sum
                                       : t == BT_DTYPE_Q4_0 ? -8 * sum
                                                            : 0);
        }
        block_dots(j, t, q + b * KN_QBLOCK, w, n, dot);
        d = v16_load_f16((const uint16_t *)scales);
        if (t == BT_DTYPE_Q4_1) {
            m = v16_load_f16((const uint16_t *)scales + KN_TILE);
        }
#pragma GCC unroll 12
        for (int r = 0; r < n; r++) {
            size_t at = first + (size_t)r * blocks + b;
            __m512 s = _mm512_mul_ps(_mm512_cvtepi32_ps(dot[r]), _mm512_set1_ps(j->scale[at]));

            acc[r] = _mm512_fmadd_ps(s, d, acc[r]);
            if (t == BT_DTYPE_Q4_1) {
                acc[r] = _mm512_fmadd_ps(_mm512_set1_ps(j->ssum[at]), m, acc[r]);
            }
        }
        w += kn_tile_quant_bytes(t);
        scales += kn_tile_scale_bytes(t);
    }
#pragma GCC unroll 12
    for (int r = 0; r < n; r++) {
        kn_tile_finish(j, row + r, acc[r]);
    }
}

/* One function for each number of rows, so that accumulators stay in registers. */
#define ROWS_FN(n)                                                                                 \
    KN_INLINE void rows_##n(const struct kn_tile_job *j, enum bt_dtype t, int row)                 \
    {                                                                                              \
        rows_by_tile(j, t, row, n);                                                                \
    }
ROWS_FN(1)
ROWS_FN(2)
ROWS_FN(4)
ROWS_FN(8)
ROWS_FN(12)

KN_INLINE void tile_of(const struct kn_tile_job *j, enum bt_dtype t)
{
    int row = 0, n = j->n_rows;

    for (; row + 12 <= n; row += 12) {
        rows_12(j, t, row);
    }
    if (row + 8 <= n) {
        rows_8(j, t, row);
        row += 8;
    }
    if (row + 4 <= n) {
        rows_4(j, t, row);
        row += 4;
    }
    if (row + 2 <= n) {
        rows_2(j, t, row);
        row += 2;
    }
    if (row < n) {
        rows_1(j, t, row);
    }
}

static void tile_q8_0(const struct kn_tile_job *j)
{
    tile_of(j, BT_DTYPE_Q8_0);
}

static void tile_q4_0(const struct kn_tile_job *j)
{
    tile_of(j, BT_DTYPE_Q4_0);
}

static void tile_q4_1(const struct kn_tile_job *j)
{
    tile_of(j, BT_DTYPE_Q4_1);
}

void KN_V(quant_tile)(const struct kn_tile_job *j)
{
    if (j->dtype == BT_DTYPE_Q8_0) {
        tile_q8_0(j);
    } else if (j->dtype == BT_DTYPE_Q4_0) {
        tile_q4_0(j);
    } else {
        tile_q4_1(j);
    }
}
