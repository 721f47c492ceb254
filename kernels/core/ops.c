/* What is common to all op tables. */
#include "kernels/core/ops.h"

/* Quantized activations of a matmul: 8-bit values, and for each block of 32 a scale, the sum of the
 * values, and scale times sum. */
size_t kn_scratch_bytes(size_t rows, size_t k)
{
    size_t blocks = (k + 31) / 32;

    return rows * blocks * (32 + 3 * sizeof(float)) + 4 * 64;
}
