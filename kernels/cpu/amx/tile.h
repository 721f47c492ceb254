/* Tile registers (Intel SDM volume 1, chapter "Programming with Intel AMX").
 *
 * Every kernel loads its configuration when it begins and releases the tiles when it ends, so that
 * a thread which the system puts aside carries no tile state. Tile numbers are literals.
 *
 * The compiler's own intrinsics tell it too little about the memory they touch (GCC 12: LDTILECFG
 * reads 8 of its 64 bytes, TILELOADD none), so that stores before them may be dropped; hence these.
 */
#ifndef KN_CPU_AMX_TILE_H
#define KN_CPU_AMX_TILE_H

#include "common/base/base.h"

/* The operand of LDTILECFG. */
struct kn_tilecfg {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
};
_Static_assert(sizeof(struct kn_tilecfg) == 64, "as the processor reads it");

#define KN_TILE_ROW 64 /* bytes of a full tile row */

static inline void kn_tile_configure(const struct kn_tilecfg *c)
{
    __asm__ volatile("ldtilecfg %0" : : "m"(*c));
}

static inline void kn_tile_release(void)
{
    __asm__ volatile("tilerelease");
}

/* Rows of tile t lie `stride` bytes apart from p. */
#define KN_TILE_LOAD(t, p, stride)                                                                 \
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #t : : "r"(p), "r"((size_t)(stride)) : "memory")
#define KN_TILE_STORE(t, p, stride)                                                                \
    __asm__ volatile("tilestored %%tmm" #t ", (%0,%1,1)"                                           \
                     :                                                                             \
                     : "r"(p), "r"((size_t)(stride))                                               \
                     : "memory")
#define KN_TILE_ZERO(t) __asm__ volatile("tilezero %%tmm" #t : :)
/* c += a by b: bf16 to f32. */
#define KN_TILE_DOT_BF16(c, a, b)                                                                  \
    __asm__ volatile("tdpbf16ps %%tmm" #b ", %%tmm" #a ", %%tmm" #c : :)

/* Tiles 0 to 3, in which sums are made: two full ones from a on, two from b on; or zero. */
static inline void kn_tile_begin_sums(const float *a, const float *b, bool add)
{
    if (add) {
        KN_TILE_LOAD(0, a, KN_TILE_ROW);
        KN_TILE_LOAD(1, a + 256, KN_TILE_ROW);
        KN_TILE_LOAD(2, b, KN_TILE_ROW);
        KN_TILE_LOAD(3, b + 256, KN_TILE_ROW);
    } else {
        KN_TILE_ZERO(0);
        KN_TILE_ZERO(1);
        KN_TILE_ZERO(2);
        KN_TILE_ZERO(3);
    }
}

#endif
