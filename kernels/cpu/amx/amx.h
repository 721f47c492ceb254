/* The AMX rows of the op table: AVX-512 rows with tile products in the matmul. */
#ifndef KN_CPU_AMX_AMX_H
#define KN_CPU_AMX_AMX_H

#include "kernels/core/ops.h"

extern const struct kn_ops kn_ops_amx;

#endif
