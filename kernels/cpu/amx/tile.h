/* Tile registers (Intel SDM volume 1, chapter "Programming with Intel AMX").
 *
 * Every kernel loads its configuration when it begins and releases the tiles when it ends, so that
 * a thread which the system puts aside carries no tile state. Tile numbers are literals, which is
 * what the intrinsics take. */
#ifndef KN_CPU_AMX_TILE_H
#define KN_CPU_AMX_TILE_H

#include "common/base/base.h"

#include <immintrin.h>

/* The operand of LDTILECFG. */
struct kn_tilecfg {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
};
_Static_assert(sizeof(struct kn_tilecfg) == 64, "as the processor reads it");

#define KN_TILE_ROW 64 /* bytes of a tile row; also the stride in memory where rows are full */

#endif
