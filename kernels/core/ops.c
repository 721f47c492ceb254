/* What is common to all op tables. */
#include "kernels/core/ops.h"

/* Quantized activations: in groups of 12 rows (kernels/cpu/vec/vec.h), or in groups of 16 with 64
 * bytes of a row and block and two numbers beside (kernels/cpu/amx/wide.h). */
size_t kn_quant_acts_bytes(size_t rows, size_t k)
{
    size_t blocks = (k + 31) / 32, wide = blocks + 2 * ((blocks + 15) / 16);

    return BT_MAX((rows + 11) / 12 * blocks * KN_ACTS_BYTES, (rows + 15) / 16 * 16 * wide * 64);
}

/* Activations of a matmul as its kernels take them: quantized, then as bf16, at most in cells of 8
 * rows and 32 inputs. */
size_t kn_scratch_bytes(size_t rows, size_t k)
{
    return kn_quant_acts_bytes(rows, k) + (rows + 7) / 8 * ((k + 31) / 32) * KN_BF16_BYTES;
}
