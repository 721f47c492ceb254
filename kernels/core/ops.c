/* What is common to all op tables. */
#include "kernels/core/ops.h"

/* Activations of a matmul as its kernels take them (kernels/cpu/vec/vec.h): quantized in groups of
 * 12 rows, then split in tiles of 8 rows, each with 32 inputs. */
size_t kn_scratch_bytes(size_t rows, size_t k)
{
    size_t blocks = (k + 31) / 32;

    return (rows + 11) / 12 * blocks * KN_ACTS_BYTES + (rows + 7) / 8 * blocks * KN_SPLIT_BYTES;
}
