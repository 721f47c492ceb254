/* What is common to all op tables. */
#include "kernels/core/ops.h"

/* Quantized activations of a matmul: struct kn_acts of kernels/cpu/vec/vec.h for each 12 rows and
 * 32 inputs. */
size_t kn_scratch_bytes(size_t rows, size_t k)
{
    return (rows + 11) / 12 * ((k + 31) / 32) * KN_ACTS_BYTES;
}
