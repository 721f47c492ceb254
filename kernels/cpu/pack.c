/* Repacking of weights; the format is in pack.h. */
#include "kernels/cpu/pack.h"

#include "kernels/core/dtype.h"

static bool is_quant(enum bt_dtype t)
{
    return bt_dtype_block_elems(t) == KN_QBLOCK;
}

size_t kn_tile_bytes(enum bt_dtype t, size_t k)
{
    size_t k_pad = t == BT_DTYPE_BF16 ? (k + KN_QBLOCK - 1) / KN_QBLOCK * KN_QBLOCK : k;
    size_t bytes = is_quant(t) ? k / KN_QBLOCK * (kn_tile_quant_bytes(t) + kn_tile_scale_bytes(t))
                               : k_pad * KN_TILE * bt_dtype_block_bytes(t);

    return (bytes + KN_TILE_ALIGN - 1) / KN_TILE_ALIGN * KN_TILE_ALIGN;
}

static void pack_q4(const uint8_t *q, size_t r, uint8_t *dst)
{
    for (size_t i = 0; i < 4; i++) {
        for (size_t c = 0; c < 4; c++) {
            /* File: low halves are inputs 0..15, high halves 16..31, as here. */
            dst[64 * i + 4 * r + c] = q[4 * i + c];
        }
    }
}

static void pack_q8(const uint8_t *q, size_t r, uint8_t *dst)
{
    for (size_t i = 0; i < 8; i++) {
        for (size_t c = 0; c < 4; c++) {
            dst[64 * i + 4 * r + c] = q[4 * i + c] ^ 0x80; /* int8 + 128 */
        }
    }
}

static void pack_quant_row(enum bt_dtype t, const uint8_t *src, size_t k, size_t r, uint8_t *dst)
{
    size_t n_blocks = k / KN_QBLOCK, qb = kn_tile_quant_bytes(t), sb = kn_tile_scale_bytes(t);
    uint8_t *scales = dst + n_blocks * qb;

    for (size_t b = 0; b < n_blocks; b++) {
        memcpy(scales + b * sb + 2 * r, src, 2);
        if (t == BT_DTYPE_Q4_1) {
            memcpy(scales + b * sb + 32 + 2 * r, src + 2, 2);
            pack_q4(src + 4, r, dst + b * qb);
        } else if (t == BT_DTYPE_Q4_0) {
            pack_q4(src + 2, r, dst + b * qb);
        } else {
            pack_q8(src + 2, r, dst + b * qb);
        }
        src += bt_dtype_block_bytes(t);
    }
}

static void pack_bf16_row(const uint8_t *src, size_t k, size_t r, uint8_t *dst)
{
    for (size_t i = 0; i < k; i++) {
        memcpy(dst + (i / 2 * KN_TILE + r) * 4 + i % 2 * 2, src + i * 2, 2);
    }
}

static void pack_float_row(size_t elem, const uint8_t *src, size_t k, size_t r, uint8_t *dst)
{
    for (size_t i = 0; i < k; i++) {
        if (elem == 2) {
            memcpy(dst + (i * KN_TILE + r) * 2, src + i * 2, 2);
        } else {
            memcpy(dst + (i * KN_TILE + r) * 4, src + i * 4, 4);
        }
    }
}

void kn_tile_pack(enum bt_dtype t, const void *src, size_t n, size_t k, size_t tile, void *dst)
{
    size_t row_bytes = kn_row_bytes(t, k);

    if (n - tile * KN_TILE < KN_TILE || (t == BT_DTYPE_BF16 && k % KN_QBLOCK)) {
        memset(dst, 0, kn_tile_bytes(t, k)); /* scales of missing rows are 0 */
    }
    for (size_t r = 0; r < KN_TILE && tile * KN_TILE + r < n; r++) {
        const uint8_t *row = (const uint8_t *)src + (tile * KN_TILE + r) * row_bytes;

        if (is_quant(t)) {
            pack_quant_row(t, row, k, r, dst);
        } else if (t == BT_DTYPE_BF16) {
            pack_bf16_row(row, k, r, dst);
        } else {
            pack_float_row(bt_dtype_block_bytes(t), row, k, r, dst);
        }
    }
}
