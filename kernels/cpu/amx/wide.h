/* Activations for block-quantized weights on AMX.
 *
 * A row's block of 32 inputs becomes Q 2^f: f such that the largest |Q| is 1016 to 2032, Q whole
 * and then rounded to the 8 bits of a bf16. Weights are W 2^e with |W| <= 256 (kernels/cpu/grid.h),
 * so all products, and their sum over a block in any order, are whole numbers below 2^24 times a
 * power of two: tile products (TDPBF16PS) and integer ones (VPDPWSSD) agree, and the order of
 * blocks is all that an output depends on.
 *
 * Two forms of the same numbers, inputs of a block in the order that weights are spread in:
 *   tiles: groups of 16 rows, one after the other, each [K/32][16 rows][32] bf16 of Q 2^f
 *   rows:  one row after the other: [K/32][32] int16 of Q, then 2^f (f32) and the sum of Q (int32)
 *          of each block, each filled up to a multiple of 16 */
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

KN_INLINE size_t kn_wide_group_bytes(size_t blocks)
{
    return blocks * KN_CELL;
}

KN_INLINE size_t kn_wide_row_bytes(size_t blocks)
{
    return blocks * 64 + kn_wide_pitch(blocks) * 8;
}

/* Bytes of a tile of 16 outputs spread for the tile products, and of sums by two such tiles: an odd
 * one has room for them as well. */
KN_INLINE size_t kn_wide_spread_bytes(size_t blocks)
{
    return (blocks + 4) * KN_CELL;
}

KN_INLINE void kn_wide_configure(void)
{
    struct kn_tilecfg c = {.palette = 1};

    for (int i = 0; i < 8; i++) {
        c.row_bytes[i] = KN_TILE_ROW;
        c.rows[i] = 16;
    }
    kn_tile_configure(&c);
}

#endif
