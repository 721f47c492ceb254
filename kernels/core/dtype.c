/* Dequantization of the block formats of model files; their layouts: common/file/model.h. */
#include "kernels/core/dtype.h"

#include "kernels/core/half.h"

size_t kn_row_bytes(enum bt_dtype t, size_t n)
{
    return n / bt_dtype_block_elems(t) * bt_dtype_block_bytes(t);
}

static void q8_0_to_f32(const uint8_t *p, size_t n, float *ret)
{
    for (size_t b = 0; b < n / 32; b++, p += 34, ret += 32) {
        float d = kn_f16_to_f32(kn_load_u16(p));
        const int8_t *q = (const int8_t *)p + 2;

        for (int i = 0; i < 32; i++) {
            ret[i] = d * (float)q[i];
        }
    }
}

static void q4_0_to_f32(const uint8_t *p, size_t n, float *ret)
{
    for (size_t b = 0; b < n / 32; b++, p += 18, ret += 32) {
        float d = kn_f16_to_f32(kn_load_u16(p));
        const uint8_t *q = p + 2;

        for (int i = 0; i < 16; i++) {
            ret[i] = d * (float)((q[i] & 15) - 8);
            ret[i + 16] = d * (float)((q[i] >> 4) - 8);
        }
    }
}

static void q4_1_to_f32(const uint8_t *p, size_t n, float *ret)
{
    for (size_t b = 0; b < n / 32; b++, p += 20, ret += 32) {
        float d = kn_f16_to_f32(kn_load_u16(p)), m = kn_f16_to_f32(kn_load_u16(p + 2));
        const uint8_t *q = p + 4;

        for (int i = 0; i < 16; i++) {
            ret[i] = d * (float)(q[i] & 15) + m;
            ret[i + 16] = d * (float)(q[i] >> 4) + m;
        }
    }
}

void kn_row_to_f32(enum bt_dtype t, const void *row, size_t n, float *ret)
{
    const uint8_t *p = row;

    switch (t) {
    case BT_DTYPE_F32:
        memcpy(ret, p, n * sizeof(float));
        return;
    case BT_DTYPE_F16:
        for (size_t i = 0; i < n; i++) {
            ret[i] = kn_f16_to_f32(kn_load_u16(p + 2 * i));
        }
        return;
    case BT_DTYPE_BF16:
        for (size_t i = 0; i < n; i++) {
            ret[i] = kn_bf16_to_f32(kn_load_u16(p + 2 * i));
        }
        return;
    case BT_DTYPE_Q8_0:
        q8_0_to_f32(p, n, ret);
        return;
    case BT_DTYPE_Q4_0:
        q4_0_to_f32(p, n, ret);
        return;
    case BT_DTYPE_Q4_1:
        q4_1_to_f32(p, n, ret);
        return;
    case BT_DTYPE_COUNT:
        break;
    }
    bt_bug(BT_WHERE, "unknown dtype");
}
