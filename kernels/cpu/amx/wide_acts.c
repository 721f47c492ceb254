/* Activations in the forms of wide.h. */
#include "kernels/cpu/amx/wide.h"

#define Q_BITS 7 /* the largest q of a block has this many bits below its first, or 6 of them */

bool KN_V(wide_in_tiles)(int n_rows, int k)
{
    return n_rows >= KN_WIDE_TILE_ROWS &&
           kn_wide_spread_bytes((size_t)k / KN_QBLOCK) <= KN_THREAD_SCRATCH_BYTES;
}

/* Lane i is the largest lane of v[i]. */
KN_INLINE __m512 max16(__m512 *v)
{
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
        v[i] = _mm512_max_ps(_mm512_unpacklo_ps(v[2 * i], v[2 * i + 1]),
                             _mm512_unpackhi_ps(v[2 * i], v[2 * i + 1]));
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        __m512d a = _mm512_castps_pd(v[2 * i]), b = _mm512_castps_pd(v[2 * i + 1]);

        v[i] = _mm512_max_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)),
                             _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
    }
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
        v[i] = _mm512_max_ps(_mm512_shuffle_f32x4(v[2 * i], v[2 * i + 1], 0x88),
                             _mm512_shuffle_f32x4(v[2 * i], v[2 * i + 1], 0xdd));
    }
    return _mm512_max_ps(_mm512_shuffle_f32x4(v[0], v[1], 0x88),
                         _mm512_shuffle_f32x4(v[0], v[1], 0xdd));
}

/* Biased exponents of the largest magnitudes of n blocks (at most 16), chosen so that e below ends
 * with |q| <= 254. */
KN_INLINE __m512i exponents(const float *x, int n)
{
    __m512 v[16], max;

#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) {
        v[i] = _mm512_setzero_ps();
        if (i < n) {
            v[i] = _mm512_max_ps(_mm512_abs_ps(_mm512_loadu_ps(x + 32 * i)),
                                 _mm512_abs_ps(_mm512_loadu_ps(x + 32 * i + 16)));
        }
    }
    max = _mm512_max_ps(max16(v), _mm512_set1_ps(KN_WIDE_TINY));
    max = _mm512_mul_ps(max, _mm512_set1_ps(256.0f / 254));
    return _mm512_srli_epi32(_mm512_castps_si512(max), 23);
}

/* 2^(exponent + by). */
KN_INLINE __m512 power(__m512i exponent, int by)
{
    return _mm512_castsi512_ps(
        _mm512_slli_epi32(_mm512_add_epi32(exponent, _mm512_set1_epi32(by)), 23));
}

/* Tiles */

/* Row i of a spread tile multiplies the inputs of pair i: see spread4 in quant_tile.c. */
static const uint16_t order[32] = {0, 2,  16, 18, 1, 3,  17, 19, 4,  6,  20, 22, 5,  7,  21, 23,
                                   8, 10, 24, 26, 9, 11, 25, 27, 12, 14, 28, 30, 13, 15, 29, 31};

/* One row into its place in the group. */
static void tile_row(const float *x, size_t blocks, char *out)
{
    __m512i by = _mm512_loadu_si512(order);
    BT_ALIGNED(64) float magic[16];

    for (size_t b0 = 0; b0 < blocks; b0 += 16) {
        int n = (int)BT_MIN(blocks - b0, (size_t)16);
        __m512i e = exponents(x, n);

        /* 1.5 2^23 times 2^e: adding it rounds to multiples of 2^e. */
        _mm512_store_ps(magic, _mm512_mul_ps(power(e, 23 - Q_BITS), _mm512_set1_ps(1.5f)));
        for (int b = 0; b < n; b++, x += KN_QBLOCK, out += KN_CELL) {
            __m512 m = _mm512_set1_ps(magic[b]);
            __m512 u = _mm512_sub_ps(_mm512_add_ps(_mm512_loadu_ps(x), m), m);
            __m512 v = _mm512_sub_ps(_mm512_add_ps(_mm512_loadu_ps(x + 16), m), m);
            __m512i q = (__m512i)_mm512_cvtne2ps_pbh(v, u);

            _mm512_store_si512(out, _mm512_permutexvar_epi16(by, q));
        }
    }
}

/* X of a row's 16 blocks from b0 on to its rows of two cells, the second only where it exists. */
KN_INLINE void put_sums(__m512 x, char *cell, bool both)
{
    __m512i first = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
    __m512 hi, lo;
    __m512i h, l;

    kn_wide_split(x, &hi, &lo);
    h = kn_wide_pairs(hi, hi);
    l = kn_wide_pairs(lo, lo);
    _mm512_store_si512(cell, _mm512_permutex2var_epi32(h, first, l));
    if (both) {
        _mm512_store_si512(cell + KN_CELL, _mm512_permutex2var_epi32(h, second, l));
    }
}

/* X of 16 rows: products with a one in both places of a column. */
static void tile_sums(char *group, size_t blocks)
{
    static const uint32_t one[31] = {[15] = 0x3f803f80};
    char *cell = group + blocks * KN_CELL;
    BT_ALIGNED(64) float x[16 * 16];

    for (size_t b0 = 0; b0 < blocks; b0 += 16, cell += 2 * KN_CELL) {
        KN_TILE_ZERO(0);
        for (size_t b = b0; b < BT_MIN(b0 + 16, blocks); b++) {
            KN_TILE_LOAD(4, group + b * KN_CELL, KN_TILE_ROW);
            KN_TILE_LOAD(6, one + 15 - (b - b0), 0);
            KN_TILE_DOT_BF16(0, 4, 6);
        }
        KN_TILE_STORE(0, x, KN_TILE_ROW);
        for (int r = 0; r < 16; r++) {
            put_sums(_mm512_load_ps(x + 16 * r), cell + r * KN_TILE_ROW, b0 + 8 < blocks);
        }
    }
}

/* Rows */

/* 16 inputs to h and l. Returns q. */
KN_INLINE __m512i put16(const float *x, __m512 inv, char *h)
{
    __m512i q = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x), inv));
    __m512i half = _mm512_srai_epi32(q, 1);

    _mm_storeu_si128((__m128i *)h, _mm512_cvtepi32_epi8(half));
    _mm_storeu_si128((__m128i *)(h + 32), _mm512_cvtepi32_epi8(_mm512_sub_epi32(q, half)));
    return q;
}

static void plain_row(const float *x, size_t blocks, char *out)
{
    float *sums_hi = (float *)(out + blocks * 64), *sums_lo = sums_hi + kn_wide_pitch(blocks);
    float *scales = sums_lo + kn_wide_pitch(blocks);
    int32_t *qsums = (int32_t *)(scales + kn_wide_pitch(blocks));

    for (size_t b0 = 0; b0 < blocks; b0 += 16) {
        int n = (int)BT_MIN(blocks - b0, (size_t)16);
        __m512i e = exponents(x, n);
        __m512 by = power(e, -Q_BITS), hi, lo;
        BT_ALIGNED(64) float inv[16];

        _mm512_store_ps(scales + b0, by);
        /* The biased exponent of 2^-e is 254 less that of 2^e. */
        _mm512_store_ps(inv, power(_mm512_sub_epi32(_mm512_setzero_si512(), e), 254 + Q_BITS));
        for (int b = 0; b < n; b++, x += KN_QBLOCK, out += 64) {
            __m512 m = _mm512_set1_ps(inv[b]);
            __m512i q = put16(x, m, out);

            q = _mm512_add_epi32(q, put16(x + 16, m, out + 16));
            qsums[b0 + (size_t)b] = _mm512_reduce_add_epi32(q);
        }
        by = _mm512_mul_ps(by, _mm512_cvtepi32_ps(_mm512_load_si512(qsums + b0)));
        kn_wide_split(by, &hi, &lo);
        _mm512_store_ps(sums_hi + b0, hi);
        _mm512_store_ps(sums_lo + b0, lo);
    }
}

void KN_V(wide_rows)(const struct kn_wide *w, int t0, int t1, const float *x, size_t stride)
{
    size_t blocks = (size_t)w->k / KN_QBLOCK;

    if (!w->tiles) {
        for (int t = t0; t < t1; t++) {
            plain_row(x + (size_t)t * stride, blocks,
                      (char *)w->data + (size_t)t * kn_wide_row_bytes(blocks));
        }
        return;
    }
    kn_wide_configure(16);
    for (int t = t0; t < t1; t += KN_WIDE_ROWS) {
        char *group = (char *)w->data + (size_t)(t / KN_WIDE_ROWS) * kn_wide_group_bytes(blocks);

        for (int r = 0; r < BT_MIN(KN_WIDE_ROWS, t1 - t); r++) {
            tile_row(x + (size_t)(t + r) * stride, blocks, group + r * KN_TILE_ROW);
        }
        tile_sums(group, blocks);
    }
    kn_tile_release();
}
