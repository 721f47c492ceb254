/* The table of one instruction set. */
#include "kernels/cpu/vec/vec.h"

#include "kernels/cpu/amx/amx.h"
#include "kernels/cpu/avx2/avx2.h"
#include "kernels/cpu/avx512/avx512.h"

/* How quantized and BF16 weights and f16 K and V are multiplied belongs to the numerics. */
#if KN_VEC_AMX
#define KN_BF16      "-split16-attn16"
#define KN_ACTS      "a11w9"
#define KN_FORMAT    KN_FORMAT_GRID16
#define KN_ATTENTION KN_V(tile_attention)
#else
#if KN_VEC_BF16
#define KN_BF16 "-bf16"
#else
#define KN_BF16 ""
#endif
#define KN_ACTS      "a8"
#define KN_FORMAT    KN_FORMAT_TILE16
#define KN_ATTENTION KN_V(attention)
#endif

const struct kn_ops KN_CAT(kn_ops_, KN_ISA) = {
    .isa = BT_STR2_(KN_ISA),
    .numerics = "cpu/" BT_STR2_(KN_ISA) "/" KN_ACTS KN_BF16 "/1",
    .device = KN_DEVICE_CPU,
    .format = KN_FORMAT,
    .rmsnorm = KN_V(rmsnorm),
    .matmul = KN_V(matmul),
    .rope = KN_V(rope),
    .kv_write = KN_V(kv_write),
    .attention = KN_ATTENTION,
    .swiglu = KN_V(swiglu),
};
