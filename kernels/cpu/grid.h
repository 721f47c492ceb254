/* Block-quantized weights on a grid of powers of two, for AMX.
 *
 * A block of 32 weights of one output: w = W 2^e, W whole, |W| <= 256, so each is a bf16, and with
 * activations of as little (cpu/amx/wide.h) the sum over a block is exact in f32 however it is
 * added. Tile products then need no scaling, and run over all of K.
 *
 *     Q4_1:       W = round(f16(step (q - 8) + centre)), f16() rounds to f16
 *     Q4_0, Q8_0: W = round(step q), q with its sign
 *
 * round() and f16() go to the nearest, ties to even. Against what the file holds a weight is off by
 * half a grid step, 1/254 of the block's largest at most; that is what 8 bits of an activation
 * cost.
 *
 * What a block keeps, in place of the file's scale:
 *     Q4_1, 32 bits: step as f16 with its last 2 bits taken, then centre with its last 3 taken;
 *         these five, those of step first, are e + 19
 *     Q4_0, Q8_0, 16 bits: sign, E (5 bits), mantissa m (10); step is 1.m for Q8_0 and 16 times
 *         that for Q4_0, e is E - 24 and E - 28. Scales of 256 and more become the largest,
 *         and one of zero 2^-24. */
#ifndef KN_CPU_GRID_H
#define KN_CPU_GRID_H

#include "common/file/model.h"

#define KN_GRID_Q4_1 19 /* added to e */
#define KN_GRID_Q8_0 24
#define KN_GRID_Q4_0 28

/* The entry of a block whose weights are d q + m. */
uint32_t kn_grid_q4_1(float d, float m);
/* d q. */
uint16_t kn_grid_q8_0(float d);

/* W of a block of the file, and its 2^e: what every kernel must compute. Any thread. */
float kn_grid_block(enum bt_dtype t, const uint8_t *block, int16_t ret_w[32]);

#endif
