/* KN_FORMAT_TILE16: weights of the vector back ends, repacked at load.
 *
 * A tile is 16 outputs (rows of the file's matrix) of one tensor; missing rows of the last tile are
 * zero. Tiles follow one another; each starts on 64 bytes. One vector lane is one output, so that
 * an output's sum runs over K in ascending order inside its lane, whatever else is computed beside
 * it.
 *
 * Float tile: [K][16] elements of the tensor's dtype; BF16 in pairs of inputs, [K/2][16][2], with
 * zeros up to a multiple of 32 inputs, which is what TDPBF16PS takes.
 *
 * Quantized tile: quants of all K/32 blocks, then scales of all blocks.
 * - A block's quants of 4 bits, 256 bytes: 4 vectors of 64; byte 4 r + c of vector i holds input
 *   4 i + c of output r in its low half and input 4 (i + 4) + c in its high half.
 * - A block's quants of 8 bits, 512 bytes: 8 vectors of 64; byte 4 r + c of vector i holds input
 *   4 i + c of output r, plus 128 (unsigned, for the u8 x s8 dot products).
 * - A block's scales: 16 x f16 d, and for Q4_1 16 x f16 m after them.
 * Four neighbouring inputs of an output in 32 bits is what VPDPBUSD and VPMADDUBSW take.
 *
 * KN_FORMAT_GRID16: the same, but scales of quantized blocks as in kernels/cpu/grid.h, for each of
 * the 16 outputs one, and values of 8 bits signed. Pairs of inputs in halves of 32 bits: see the
 * order in cpu/amx/wide_acts.c. */
#ifndef KN_CPU_PACK_H
#define KN_CPU_PACK_H

#include "common/file/model.h"

#define KN_TILE       16
#define KN_QBLOCK     32
#define KN_TILE_ALIGN 64

/* Bytes of quants and scales of one block of a tile. */
static inline size_t kn_tile_quant_bytes(enum bt_dtype t)
{
    return t == BT_DTYPE_Q8_0 ? 512 : 256;
}
static inline size_t kn_tile_scale_bytes(enum bt_dtype t)
{
    return t == BT_DTYPE_Q4_1 ? 64 : 32;
}

/* Bytes of one tile with K inputs, a multiple of KN_TILE_ALIGN. */
size_t kn_tile_bytes(enum bt_dtype t, size_t k);
/* Packs tile `tile` of a [n, k] tensor to `dst` (the tile's own place); grid: as
 * KN_FORMAT_GRID16. Any thread. */
struct kn_pack {
    enum bt_dtype dtype;
    bool grid;
    const void *src;
    size_t n, k;
};
void kn_tile_pack(const struct kn_pack *p, size_t tile, void *dst);

#endif
