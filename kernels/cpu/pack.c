/* Repacking of weights; the format is in pack.h. */
#include "kernels/cpu/pack.h"

#include "kernels/core/dtype.h"
#include "kernels/core/half.h"
#include "kernels/cpu/grid.h"

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

/* flip: 128 more, without a sign. */
static void pack_q8(const uint8_t *q, size_t r, uint8_t flip, uint8_t *dst)
{
    for (size_t i = 0; i < 8; i++) {
        for (size_t c = 0; c < 4; c++) {
            dst[64 * i + 4 * r + c] = q[4 * i + c] ^ flip;
        }
    }
}

/* The scale of a block of output r, whose place among the block's 16 begins at dst. */
static void pack_scale(const struct kn_pack *p, const uint8_t *src, size_t r, uint8_t *dst)
{
    if (!p->grid) {
        memcpy(dst + 2 * r, src, 2);
        if (p->dtype == BT_DTYPE_Q4_1) {
            memcpy(dst + 32 + 2 * r, src + 2, 2);
        }
    } else if (p->dtype == BT_DTYPE_Q4_1) {
        uint32_t g =
            kn_grid_q4_1(kn_f16_to_f32(kn_load_u16(src)), kn_f16_to_f32(kn_load_u16(src + 2)));

        memcpy(dst + 4 * r, &g, 4);
    } else {
        uint16_t g = kn_grid_q8_0(kn_f16_to_f32(kn_load_u16(src)));

        memcpy(dst + 2 * r, &g, 2);
    }
}

static void pack_quant_row(const struct kn_pack *p, const uint8_t *src, size_t r, uint8_t *dst)
{
    size_t n_blocks = p->k / KN_QBLOCK;
    size_t qb = kn_tile_quant_bytes(p->dtype), sb = kn_tile_scale_bytes(p->dtype);
    uint8_t *scales = dst + n_blocks * qb;

    for (size_t b = 0; b < n_blocks; b++) {
        pack_scale(p, src, r, scales + b * sb);
        if (p->dtype == BT_DTYPE_Q8_0) {
            pack_q8(src + 2, r, p->grid ? 0 : 0x80, dst + b * qb);
        } else {
            pack_q4(src + (p->dtype == BT_DTYPE_Q4_1 ? 4 : 2), r, dst + b * qb);
        }
        src += bt_dtype_block_bytes(p->dtype);
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

void kn_tile_pack(const struct kn_pack *p, size_t tile, void *dst)
{
    size_t row_bytes = kn_row_bytes(p->dtype, p->k);

    if (p->n - tile * KN_TILE < KN_TILE || (p->dtype == BT_DTYPE_BF16 && p->k % KN_QBLOCK)) {
        memset(dst, 0, kn_tile_bytes(p->dtype, p->k)); /* so are scales of missing rows */
    }
    for (size_t r = 0; r < KN_TILE && tile * KN_TILE + r < p->n; r++) {
        const uint8_t *row = (const uint8_t *)p->src + (tile * KN_TILE + r) * row_bytes;

        if (is_quant(p->dtype)) {
            pack_quant_row(p, row, r, dst);
        } else if (p->dtype == BT_DTYPE_BF16) {
            pack_bf16_row(row, p->k, r, dst);
        } else {
            pack_float_row(bt_dtype_block_bytes(p->dtype), row, p->k, r, dst);
        }
    }
}
