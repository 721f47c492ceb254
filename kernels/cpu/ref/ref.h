/* The plain C rows of the op table: what each op means. Single-threaded and slow; written to be
 * read. */
#ifndef KN_CPU_REF_REF_H
#define KN_CPU_REF_REF_H

#include "kernels/core/ops.h"

#define KN_OP(name, dtypes, what)                                                                  \
    void kn_ref_##name(struct kn_stream *stream, const struct kn_##name##_args *a);
#include "kernels/ops.def"
#undef KN_OP

/* In no table: matmul with the activations that AMX takes for block-quantized weights, and with
 * those that AVX-512 BF16 takes for BF16 weights. */
void kn_ref_matmul_wide(struct kn_stream *stream, const struct kn_matmul_args *a);
void kn_ref_matmul_bf16(struct kn_stream *stream, const struct kn_matmul_args *a);

extern const struct kn_ops kn_ops_ref;

#endif
