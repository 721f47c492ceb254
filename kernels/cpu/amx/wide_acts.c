/* Activations in the forms of wide.h. */
#include "kernels/cpu/amx/wide.h"

#define Q_BITS 10 /* the largest Q of a block has this many bits below its first, or one less */

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

/* Biased exponents of the largest magnitudes of n blocks (at most 16), chosen so that f below ends
 * with |Q| <= 2032. */
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

/* Row i of a spread cell multiplies inputs order[2 i] and order[2 i + 1]: what lies together when
 * words of packed weights are shifted (quant_tile.c). */
static const uint16_t order[32] = {0, 2,  16, 18, 1, 3,  17, 19, 4,  6,  20, 22, 5,  7,  21, 23,
                                   8, 10, 24, 26, 9, 11, 25, 27, 12, 14, 28, 30, 13, 15, 29, 31};

/* 32 inputs as Q 2^f. magic is 1.5 2^23 times 2^f: adding it rounds to multiples of 2^f. */
KN_INLINE __m512i whole32(const float *x, float magic)
{
    __m512 m = _mm512_set1_ps(magic);
    __m512 u = _mm512_sub_ps(_mm512_add_ps(_mm512_loadu_ps(x), m), m);
    __m512 v = _mm512_sub_ps(_mm512_add_ps(_mm512_loadu_ps(x + 16), m), m);
    __m512i q = (__m512i)_mm512_cvtne2ps_pbh(v, u);

    return _mm512_permutexvar_epi16(_mm512_loadu_si512(order), q);
}

KN_INLINE __m512 magic_of(__m512i e)
{
    return _mm512_mul_ps(power(e, 23 - Q_BITS), _mm512_set1_ps(1.5f));
}

/* One row into its place in the group. */
static void tile_row(const float *x, size_t blocks, char *out)
{
    BT_ALIGNED(64) float magic[16];

    for (size_t b0 = 0; b0 < blocks; b0 += 16) {
        int n = (int)BT_MIN(blocks - b0, (size_t)16);

        _mm512_store_ps(magic, magic_of(exponents(x, n)));
        for (int b = 0; b < n; b++, x += KN_QBLOCK, out += KN_CELL) {
            _mm512_store_si512(out, whole32(x, magic[b]));
        }
    }
}

/* Q of 32 inputs to `out`; inv is 2^-f. Returns their sum. */
KN_INLINE int put32(const float *x, float magic, float inv, char *out)
{
    __m512i q = whole32(x, magic), high = _mm512_set1_epi32((int)0xffff0000);
    __m512 by = _mm512_set1_ps(inv);
    __m512i u =
        _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_castsi512_ps(_mm512_slli_epi32(q, 16)), by));
    __m512i v =
        _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_castsi512_ps(_mm512_and_si512(q, high)), by));

    _mm512_storeu_si512(out, _mm512_mask_blend_epi16(0xaaaaaaaa, u, _mm512_slli_epi32(v, 16)));
    return _mm512_reduce_add_epi32(_mm512_add_epi32(u, v));
}

static void plain_row(const float *x, size_t blocks, char *out)
{
    float *scales = (float *)(out + blocks * 64);
    int32_t *sums = (int32_t *)(scales + kn_wide_pitch(blocks));

    for (size_t b0 = 0; b0 < blocks; b0 += 16) {
        int n = (int)BT_MIN(blocks - b0, (size_t)16);
        __m512i e = exponents(x, n);
        BT_ALIGNED(64) float magic[16], inv[16];

        _mm512_store_ps(magic, magic_of(e));
        _mm512_store_ps(scales + b0, power(e, -Q_BITS));
        /* The biased exponent of 2^-e is 254 less that of 2^e. */
        _mm512_store_ps(inv, power(_mm512_sub_epi32(_mm512_setzero_si512(), e), 254 + Q_BITS));
        for (int b = 0; b < n; b++, x += KN_QBLOCK, out += 64) {
            sums[b0 + (size_t)b] = put32(x, magic[b], inv[b], out);
        }
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
    for (int t = t0; t < t1; t += KN_WIDE_ROWS) {
        char *group = (char *)w->data + (size_t)(t / KN_WIDE_ROWS) * kn_wide_group_bytes(blocks);

        for (int r = 0; r < BT_MIN(KN_WIDE_ROWS, t1 - t); r++) {
            tile_row(x + (size_t)(t + r) * stride, blocks, group + r * KN_TILE_ROW);
        }
    }
}
