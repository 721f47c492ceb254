/* BF16 weights with AMX.
 *
 * TDPBF16PS multiplies pairs of bf16 and adds in f32. Activations keep 16 bits: x = hi + lo, both
 * bf16, which are two rows of one tile, so a tile holds 8 rows of activations. An output is
 *     hi chain over blocks of 32 inputs, ascending, plus the lo chain, each TDPBF16PS by TDPBF16PS
 * whatever rows and tiles are computed beside it: one order for prefill and decode. Inputs beyond K
 * are zero on both sides.
 *
 * Order of inputs in memory: weights [K/32][16 pairs][16 outputs][2] (pack.h), activations
 * [T/8][K/32][8 rows][hi, lo][32], 1 KiB a tile. */
#include "kernels/cpu/amx/tile.h"
#include "kernels/cpu/pack.h"
#include "kernels/cpu/vec/vec.h"

static void configure(void)
{
    struct kn_tilecfg c = {.palette = 1};

    for (int i = 0; i < 8; i++) {
        c.row_bytes[i] = KN_TILE_ROW;
        c.rows[i] = 16;
    }
    kn_tile_configure(&c);
}

/* 16 values at x as bf16 hi and lo. */
KN_INLINE void split16(v16 x, char *hi, char *lo)
{
    __m256i h = (__m256i)_mm512_cvtneps_pbh(x);
    v16 back = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16));

    _mm256_storeu_si256((__m256i *)hi, h);
    _mm256_storeu_si256((__m256i *)lo, (__m256i)_mm512_cvtneps_pbh(_mm512_sub_ps(x, back)));
}

static void split_row(void *acts, int row, const float *x, int k)
{
    size_t blocks = BT_DIV_UP((size_t)k, 32);
    char *out = (char *)acts + (size_t)(row / KN_BF16_ROWS) * blocks * KN_BF16_CELL +
                (size_t)(row % KN_BF16_ROWS) * 2 * KN_TILE_ROW;

    for (int i = 0; i < k; i += 32, out += KN_BF16_CELL) {
        int n0 = BT_MIN(16, k - i), n1 = BT_MIN(16, k - i - n0);

        split16(v16_load_n(x + i, n0), out, out + KN_TILE_ROW);
        split16(v16_load_n(x + i + 16, n1), out + 32, out + KN_TILE_ROW + 32);
    }
}

void KN_V(bf16_rows)(void *acts, int t0, int t1, const float *x, size_t stride, int k)
{
    for (int t = t0; t < t1; t++) {
        split_row(acts, t, x + (size_t)t * stride, k);
    }
}

/* Stores the sums of 8 rows by one tile of outputs, `real` rows of them. */
static void finish(const struct kn_tile_job *j, int tile, int row, int real, const float *sums)
{
    struct kn_tile_job t = *j;

    t.bias = j->bias ? j->bias + tile * KN_TILE : NULL;
    t.out = j->out + tile * KN_TILE;
    t.n_cols = BT_MIN(KN_TILE, j->n_cols - tile * KN_TILE);
    for (int r = 0; r < real; r++) {
        const float *s = sums + (size_t)r * 2 * KN_TILE;

        kn_tile_finish(&t, row + r, v16_add(v16_load(s), v16_load(s + KN_TILE)));
    }
}

/* 16 rows by 2 tiles. */
static void two_by_two(const struct kn_tile_job *j, int row, int real, int tile)
{
    size_t blocks = BT_DIV_UP((size_t)j->k, 32), step = blocks * KN_BF16_CELL;
    const char *x = (const char *)j->acts16 + (size_t)(row / KN_BF16_ROWS) * step;
    const char *w = j->tile + (size_t)tile * step;
    BT_ALIGNED(64) float sums[4][KN_BF16_CELL / sizeof(float)];

    kn_tile_begin_sums(NULL, NULL, false);
    for (size_t b = 0; b < blocks; b++, x += KN_BF16_CELL, w += KN_BF16_CELL) {
        KN_TILE_LOAD(4, x, KN_TILE_ROW);
        KN_TILE_LOAD(6, w, KN_TILE_ROW);
        KN_TILE_DOT_BF16(0, 4, 6);
        KN_TILE_LOAD(7, w + step, KN_TILE_ROW);
        KN_TILE_DOT_BF16(1, 4, 7);
        KN_TILE_LOAD(5, x + step, KN_TILE_ROW);
        KN_TILE_DOT_BF16(2, 5, 6);
        KN_TILE_DOT_BF16(3, 5, 7);
    }
    KN_TILE_STORE(0, sums[0], KN_TILE_ROW);
    KN_TILE_STORE(1, sums[1], KN_TILE_ROW);
    KN_TILE_STORE(2, sums[2], KN_TILE_ROW);
    KN_TILE_STORE(3, sums[3], KN_TILE_ROW);
    for (int i = 0; i < 4; i++) {
        int n = i < 2 ? KN_BF16_ROWS : real - KN_BF16_ROWS;

        finish(j, tile + i % 2, row + i / 2 * KN_BF16_ROWS, n, sums[i]);
    }
}

/* 8 rows by 4 tiles: a decode step, which reads weights once and waits for them. */
static void one_by_four(const struct kn_tile_job *j, int row, int real, int tile)
{
    size_t blocks = BT_DIV_UP((size_t)j->k, 32), step = blocks * KN_BF16_CELL;
    const char *x = (const char *)j->acts16 + (size_t)(row / KN_BF16_ROWS) * step;
    const char *w = j->tile + (size_t)tile * step;
    BT_ALIGNED(64) float sums[4][KN_BF16_CELL / sizeof(float)];

    kn_tile_begin_sums(NULL, NULL, false);
    for (size_t b = 0; b < blocks; b++, x += KN_BF16_CELL, w += KN_BF16_CELL) {
        KN_TILE_LOAD(4, x, KN_TILE_ROW);
        KN_TILE_LOAD(5, w, KN_TILE_ROW);
        KN_TILE_DOT_BF16(0, 4, 5);
        KN_TILE_LOAD(6, w + step, KN_TILE_ROW);
        KN_TILE_DOT_BF16(1, 4, 6);
        KN_TILE_LOAD(7, w + 2 * step, KN_TILE_ROW);
        KN_TILE_DOT_BF16(2, 4, 7);
        KN_TILE_LOAD(5, w + 3 * step, KN_TILE_ROW);
        KN_TILE_DOT_BF16(3, 4, 5);
    }
    KN_TILE_STORE(0, sums[0], KN_TILE_ROW);
    KN_TILE_STORE(1, sums[1], KN_TILE_ROW);
    KN_TILE_STORE(2, sums[2], KN_TILE_ROW);
    KN_TILE_STORE(3, sums[3], KN_TILE_ROW);
    for (int i = 0; i < 4; i++) {
        finish(j, tile + i, row, real, sums[i]);
    }
}

static void one_by_one(const struct kn_tile_job *j, int row, int real, int tile)
{
    size_t blocks = BT_DIV_UP((size_t)j->k, 32), step = blocks * KN_BF16_CELL;
    const char *x = (const char *)j->acts16 + (size_t)(row / KN_BF16_ROWS) * step;
    const char *w = j->tile + (size_t)tile * step;
    BT_ALIGNED(64) float sums[KN_BF16_CELL / sizeof(float)];

    KN_TILE_ZERO(0);
    for (size_t b = 0; b < blocks; b++, x += KN_BF16_CELL, w += KN_BF16_CELL) {
        KN_TILE_LOAD(4, x, KN_TILE_ROW);
        KN_TILE_LOAD(5, w, KN_TILE_ROW);
        KN_TILE_DOT_BF16(0, 4, 5);
    }
    KN_TILE_STORE(0, sums, KN_TILE_ROW);
    finish(j, tile, row, real, sums);
}

void KN_V(bf16_tiles)(const struct kn_tile_job *j, int n_tiles)
{
    int t0 = 0;

    configure();
    while (t0 < n_tiles) {
        int n = n_tiles - t0 >= 4 ? 4 : 1, row = 0;

        for (; n == 4 && j->n_rows - row > KN_BF16_ROWS; row += 2 * KN_BF16_ROWS) {
            int real = BT_MIN(2 * KN_BF16_ROWS, j->n_rows - row);

            two_by_two(j, row, real, t0);
            two_by_two(j, row, real, t0 + 2);
        }
        for (; row < j->n_rows; row += KN_BF16_ROWS) {
            int real = BT_MIN(KN_BF16_ROWS, j->n_rows - row);

            if (n == 4) {
                one_by_four(j, row, real, t0);
            } else {
                one_by_one(j, row, real, t0);
            }
        }
        t0 += n;
    }
    kn_tile_release();
}
