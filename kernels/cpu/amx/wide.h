/* Activations for block-quantized weights on AMX.
 *
 * A row's block of 32 inputs becomes q 2^e: e the smallest exponent for which every |q| is at most
 * 254, so that q 2^e is a bf16 and all products with quantized weights, and their sum over the
 * block, are exact in f32: the tile products (TDPBF16PS) and integer ones (VPDPBUSD) agree.
 *
 * Two forms of the same numbers; X is 2^e times the sum of q, for Q4_1's minimum, as hi + lo in
 * bf16 (exact):
 *   tiles: groups of 16 rows, one after the other, each
 *          [K/32][16 rows][32] bf16, inputs in the order that weights are spread in, then X as
 *          [K/256, rounded up][16 rows][8 blocks][hi, hi, lo, lo], zero beyond the last block
 *   rows:  one row after the other: [K/32][h 32, l 32] bytes with q = h + l, then hi, lo, 2^e (f32)
 *          and the sum of q (int32) of each block, each filled up to a multiple of 16 */
#ifndef KN_CPU_AMX_WIDE_H
#define KN_CPU_AMX_WIDE_H

#include "kernels/cpu/amx/tile.h"
#include "kernels/cpu/pack.h"
#include "kernels/cpu/vec/vec.h"

#define KN_CELL 1024 /* bytes of a full tile */

/* Numbers of a row, filled up. */
KN_INLINE size_t kn_wide_pitch(size_t blocks)
{
    return BT_DIV_UP(blocks, 16) * 16;
}

/* Cells of X, and of minima. */
KN_INLINE size_t kn_wide_sums(size_t blocks)
{
    return BT_DIV_UP(blocks, 8);
}

KN_INLINE size_t kn_wide_group_bytes(size_t blocks)
{
    return (blocks + kn_wide_sums(blocks)) * KN_CELL;
}

KN_INLINE size_t kn_wide_row_bytes(size_t blocks)
{
    return blocks * 64 + kn_wide_pitch(blocks) * 16;
}

/* Bytes of a tile of 16 outputs spread for the tile products. */
KN_INLINE size_t kn_wide_spread_bytes(size_t blocks)
{
    return blocks * (KN_CELL + KN_TILE_ROW) + (kn_wide_sums(blocks) + 2) * KN_CELL;
}

/* x = hi + lo, hi the nearest bf16 (half away from zero). */
KN_INLINE void kn_wide_split(__m512 x, __m512 *hi, __m512 *lo)
{
    __m512i h = _mm512_add_epi32(_mm512_castps_si512(x), _mm512_set1_epi32(0x8000));

    *hi = _mm512_castsi512_ps(_mm512_and_si512(h, _mm512_set1_epi32((int)0xffff0000)));
    *lo = _mm512_sub_ps(x, *hi);
}

/* Lanes of a and b, both bf16, as pairs. */
KN_INLINE __m512i kn_wide_pairs(__m512 a, __m512 b)
{
    return _mm512_or_si512(_mm512_srli_epi32(_mm512_castps_si512(a), 16), _mm512_castps_si512(b));
}

/* Tiles 0..5 of `rows` rows, 6 and 7 of 16. */
KN_INLINE void kn_wide_configure(int rows)
{
    struct kn_tilecfg c = {.palette = 1};

    for (int i = 0; i < 8; i++) {
        c.row_bytes[i] = KN_TILE_ROW;
        c.rows[i] = (uint8_t)(i < 6 ? rows : 16);
    }
    kn_tile_configure(&c);
}

#endif
