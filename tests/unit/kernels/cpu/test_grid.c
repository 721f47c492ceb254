/* Weights on a grid: whole numbers that a bf16 holds, as near to the file's as promised. */
#include "kernels/cpu/grid.h"

#include "kernels/core/half.h"
#include "tests/unit/cmocka.h"

#include <math.h>
#include <stdlib.h>

static void put_f16(uint8_t *p, float f)
{
    uint16_t h = kn_f32_to_f16(f);

    memcpy(p, &h, 2);
}

static double scale_of(const uint8_t *p)
{
    return (double)kn_f16_to_f32(kn_load_u16(p));
}

/* d q + m of element i. */
static double value(enum bt_dtype t, const uint8_t *b, int i)
{
    int q4;

    if (t == BT_DTYPE_Q8_0) {
        return scale_of(b) * (int8_t)b[2 + i];
    }
    q4 = b[(t == BT_DTYPE_Q4_1 ? 4 : 2) + i % 16];
    q4 = i < 16 ? q4 & 15 : q4 >> 4;
    return t == BT_DTYPE_Q4_1 ? scale_of(b) * q4 + scale_of(b + 2) : scale_of(b) * (q4 - 8);
}

/* A random block whose scale is about 2^exp. */
static void fill(enum bt_dtype t, int exp, uint8_t *b)
{
    for (size_t i = 0; i < bt_dtype_block_bytes(t); i++) {
        b[i] = (uint8_t)rand();
    }
    put_f16(b, ldexpf((float)(rand() % 2048 - 1024) / 512, exp));
    if (t == BT_DTYPE_Q4_1) {
        put_f16(b + 2, ldexpf((float)(rand() % 2048 - 1024) / 64, exp));
    }
}

static void check(enum bt_dtype t, int exp)
{
    uint8_t block[34];
    int16_t w[32];
    double max = 0, unit, limit;

    fill(t, exp, block);
    unit = (double)kn_grid_block(t, block, w);
    for (int i = 0; i < 32; i++) {
        max = fmax(max, fabs(value(t, block, i)));
    }
    /* Of 16 possible values those that the block lacks count as well. */
    if (t == BT_DTYPE_Q4_1) {
        max = fmax(fabs(scale_of(block + 2)), fabs(scale_of(block + 2) + 15 * scale_of(block)));
    } else {
        max = (t == BT_DTYPE_Q8_0 ? 128 : 8) * fabs(scale_of(block));
    }
    /* A step, half of it by rounding and half by lost bits; scales of zero that are not. */
    limit = fmax(max / 127, t == BT_DTYPE_Q4_1 ? 0x1p-19 : 0x1p-17);
    for (int i = 0; i < 32; i++) {
        assert_in_range(w[i] + 256, 0, 512);
        if (!(fabs((double)w[i] * unit - value(t, block, i)) <= limit)) {
            fail_msg("%s, 2^%d, element %d: %g for %g, limit %g", bt_dtype_name(t), exp, i,
                     (double)w[i] * unit, value(t, block, i), limit);
        }
    }
}

static void test_near_the_file(void **state)
{
    srand(1);
    for (int exp = -24; exp <= 6; exp++) {
        for (int i = 0; i < 300; i++) {
            check(BT_DTYPE_Q8_0, exp);
            check(BT_DTYPE_Q4_0, exp);
            check(BT_DTYPE_Q4_1, exp);
        }
    }
}

/* Scales that no model has: nothing but finite whole numbers comes out. */
static void test_any_bits(void **state)
{
    static const enum bt_dtype types[] = {BT_DTYPE_Q8_0, BT_DTYPE_Q4_0, BT_DTYPE_Q4_1};
    uint8_t block[34];
    int16_t w[32];

    srand(2);
    for (int n = 0; n < 100000; n++) {
        fill(types[n % 3], 0, block);
        block[0] = (uint8_t)rand();
        block[1] = (uint8_t)(n % 5 ? rand() : 0x7c);
        block[3] = (uint8_t)(n % 7 ? rand() : 0xfe);
        assert_true(kn_grid_block(types[n % 3], block, w) > 0);
        if ((block[1] & 0x7c) != 0x7c && (block[3] & 0x7c) != 0x7c) {
            for (int i = 0; i < 32; i++) {
                assert_in_range(w[i] + 256, 0, 512);
            }
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_near_the_file),
        cmocka_unit_test(test_any_bits),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
