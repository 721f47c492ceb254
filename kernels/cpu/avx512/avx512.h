/* The AVX-512 rows of the op table, without and with products of bf16. */
#ifndef KN_CPU_AVX512_AVX512_H
#define KN_CPU_AVX512_AVX512_H

#include "kernels/core/ops.h"

extern const struct kn_ops kn_ops_avx512, kn_ops_avx512bf16;

#endif
