/* BF16 weights with AVX-512 and without tiles.
 *
 * VDPBF16PS multiplies pairs of bf16 and adds both products to an f32 lane, odd one first, each
 * fused (Intel SDM volume 2, VDPBF16PS; AMD's gives the same bits). It does twice the work of a
 * fused product of f32 but takes activations of 8 significant bits, which are rounded to nearest
 * even. An output is one chain over pairs of inputs, ascending, whatever rows and tiles are
 * computed beside it: one order for prefill and decode. Inputs beyond K are zero on both sides.
 *
 * Order of inputs in memory: weights [K/32][16 pairs][16 outputs][2] (pack.h), activations
 * [T/12][K/32][16 pairs][12 rows][2], so that all that a step of the kernel broadcasts comes from
 * one pointer at fixed offsets. */
#include "kernels/cpu/pack.h"
#include "kernels/cpu/vec/vec.h"

#define PAIRS    16 /* of a block */
#define MAX_SUMS 24 /* accumulators; with weights and a broadcast they fill the registers */

/* Inputs i .. i + 32 of a row, as many as there are. */
KN_INLINE __m512i load_pairs(const float *x, int i, int k)
{
    int n0 = BT_MIN(16, k - i), n1 = BT_MIN(16, k - i - n0);

    return (__m512i)_mm512_cvtne2ps_pbh(v16_load_n(x + i + n0, n1), v16_load_n(x + i, n0));
}

/* Every lane of 128 bits of v is a pair of inputs of four rows; they are `step` pairs apart. */
KN_INLINE void store_lanes(char *out, __m512i v, int step)
{
    _mm_storeu_si128((__m128i *)out, _mm512_castsi512_si128(v));
    _mm_storeu_si128((__m128i *)(out + step * 4 * KN_BF16_ROWS), _mm512_extracti32x4_epi32(v, 1));
    _mm_storeu_si128((__m128i *)(out + step * 8 * KN_BF16_ROWS), _mm512_extracti32x4_epi32(v, 2));
    _mm_storeu_si128((__m128i *)(out + step * 12 * KN_BF16_ROWS), _mm512_extracti32x4_epi32(v, 3));
}

/* Four rows of a group, n of which there are. */
static void four_rows(char *out, const float *x, size_t stride, int n, int k)
{
    for (int i = 0; i < k; i += KN_QBLOCK, out += KN_BF16_CELL) {
        __m512i r[4], a, b, c, d;

        for (int q = 0; q < 4; q++) {
            r[q] = q < n ? load_pairs(x + (size_t)q * stride, i, k) : _mm512_setzero_si512();
        }
        a = _mm512_unpacklo_epi32(r[0], r[1]);
        b = _mm512_unpackhi_epi32(r[0], r[1]);
        c = _mm512_unpacklo_epi32(r[2], r[3]);
        d = _mm512_unpackhi_epi32(r[2], r[3]);
        store_lanes(out, _mm512_unpacklo_epi64(a, c), 4);
        store_lanes(out + 4 * KN_BF16_ROWS, _mm512_unpackhi_epi64(a, c), 4);
        store_lanes(out + 8 * KN_BF16_ROWS, _mm512_unpacklo_epi64(b, d), 4);
        store_lanes(out + 12 * KN_BF16_ROWS, _mm512_unpackhi_epi64(b, d), 4);
    }
}

void KN_V(bf16_rows)(void *acts, int t0, int t1, const float *x, size_t stride, int k)
{
    size_t group = BT_DIV_UP((size_t)k, KN_QBLOCK) * KN_BF16_CELL;

    for (int t = t0; t < t1; t += 4) {
        char *out = (char *)acts + (size_t)(t / KN_BF16_ROWS) * group + t % KN_BF16_ROWS * 4;

        four_rows(out, x + (size_t)t * stride, stride, BT_MIN(4, t1 - t), k);
    }
}

/* The first n rows of the group at `row`, `real` of which exist, by m tiles from `tile`; n and m
 * are constant after inlining. */
KN_INLINE void rows_by_tiles(const struct kn_tile_job *j, int row, int real, int n, int tile, int m)
{
    size_t blocks = BT_DIV_UP((size_t)j->k, KN_QBLOCK), step = blocks * PAIRS * 64;
    const char *x = (const char *)j->acts16 + (size_t)(row / KN_BF16_ROWS) * blocks * KN_BF16_CELL;
    const char *w = j->tile + (size_t)tile * step;
    __m512 sum[MAX_SUMS];
    struct kn_tile_job t = *j;

    for (int r = 0; r < real; r++) { /* sums go there when they are done */
        __builtin_prefetch(j->out + (size_t)(row + r) * j->out_stride + tile * KN_TILE, 1);
        __builtin_prefetch(j->out + (size_t)(row + r) * j->out_stride + (tile + m - 1) * KN_TILE,
                           1);
    }
#pragma GCC unroll 24
    for (int i = 0; i < n * m; i++) {
        sum[i] = _mm512_setzero_ps();
    }
    for (size_t p = 0; p < blocks * PAIRS; p++, x += 4 * KN_BF16_ROWS, w += 64) {
        __m512bh v[4];

#pragma GCC unroll 4
        for (int i = 0; i < m; i++) {
            v[i] = (__m512bh)_mm512_loadu_si512(w + (size_t)i * step);
        }
#pragma GCC unroll 12
        for (int r = 0; r < n; r++) {
            int32_t pair;
            __m512bh b;

            memcpy(&pair, x + 4 * r, sizeof(pair));
            b = (__m512bh)_mm512_set1_epi32(pair);
#pragma GCC unroll 4
            for (int i = 0; i < m; i++) {
                sum[r * m + i] = _mm512_dpbf16_ps(sum[r * m + i], v[i], b);
            }
        }
    }
#pragma GCC unroll 4
    for (int i = 0; i < m; i++) {
        t.bias = j->bias ? j->bias + (tile + i) * KN_TILE : NULL;
        t.out = j->out + (tile + i) * KN_TILE;
        t.n_cols = BT_MIN(KN_TILE, j->n_cols - (tile + i) * KN_TILE);
#pragma GCC unroll 12
        for (int r = 0; r < n; r++) {
            if (r < real) {
                kn_tile_finish(&t, row + r, sum[r * m + i]);
            }
        }
    }
}

/* All rows by m tiles: 12 at once, then the rest by the least kernel that holds them. */
KN_INLINE void all_rows(const struct kn_tile_job *j, int tile, int m)
{
    int row = 0, left;

    for (; m <= 2 && row + KN_BF16_ROWS <= j->n_rows; row += KN_BF16_ROWS) {
        rows_by_tiles(j, row, KN_BF16_ROWS, KN_BF16_ROWS, tile, m);
    }
    left = j->n_rows - row;
    if (m <= 2 && left > 8) {
        rows_by_tiles(j, row, left, KN_BF16_ROWS, tile, m);
    } else if (m <= 2 && left > 4) {
        rows_by_tiles(j, row, left, 8, tile, m);
    } else if (left > 2) {
        rows_by_tiles(j, row, left, 4, tile, m);
    } else if (left == 2) {
        rows_by_tiles(j, row, left, 2, tile, m);
    } else if (left == 1) {
        rows_by_tiles(j, row, left, 1, tile, m);
    }
}

void KN_V(bf16_tiles)(const struct kn_tile_job *j, int n_tiles)
{
    int tile = 0;

    /* A decode step waits for weights. */
    for (; j->n_rows <= KN_BF16_FEW && tile + 4 <= n_tiles; tile += 4) {
        all_rows(j, tile, 4);
    }
    for (; tile + 2 <= n_tiles; tile += 2) {
        all_rows(j, tile, 2);
    }
    if (tile < n_tiles) {
        all_rows(j, tile, 1);
    }
}
