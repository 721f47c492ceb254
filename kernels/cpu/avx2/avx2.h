/* The AVX2 rows of the op table. */
#ifndef KN_CPU_AVX2_AVX2_H
#define KN_CPU_AVX2_AVX2_H

#include "kernels/core/ops.h"

extern const struct kn_ops kn_ops_avx2;

#endif
