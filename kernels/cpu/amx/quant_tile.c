/* Quantized weights with AMX. Weights and activations are whole numbers times powers of two for
 * which a block's sum is exact in f32 (grid.h, wide.h), so an output is
 *     acc = 0; for each block in order: acc = acc + 2^(e + f) sum of Q W, rounded once
 * and kn_tile_finish at the end, whichever way it is computed and whatever beside it:
 *
 * Many rows: the weights of a panel of tiles are spread to bf16 in the member's scratch, once for
 * all rows; then every 32 rows pass over them by pairs of tiles, sums staying in tile registers
 * over all of K (a TDPBF16PS adds its 32 exact products to the sum with one rounding: Intel SDM).
 * Fewer rows: W are made as halves of f16 registers from the weights as they lie, 1536 added so
 * that their bits count up with them, and multiplied with VPDPWSSD. */
#include "kernels/cpu/amx/wide.h"
#include "kernels/cpu/grid.h"

#define NEAR     768    /* bytes ahead that come to the first-level cache */
#define FEW_ROWS 8      /* rows that share weights made */
#define MAGIC    0x6600 /* 1536 as f16: W beside it is a whole number of last places */

#define PIECE_BLOCKS 12 /* of K: activations of 32 rows stay in the first-level cache */

/* The grid of 16 outputs' blocks; both halves of a lane belong to one output. */
struct grid {
    __m512h step, centre;
    __m512 unit;   /* 2^e */
    __m512i table; /* of 4 bits: q - 8 as f16 */
};

KN_INLINE __m512i table4(void)
{
    static const uint16_t t[16] = {0xc800, 0xc700, 0xc600, 0xc500, 0xc400, 0xc200, 0xc000, 0xbc00,
                                   0,      0x3c00, 0x4000, 0x4200, 0x4400, 0x4500, 0x4600, 0x4700};

    /* Five bits of a word choose among 32 entries, of which the upper half repeats. */
    return _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i *)t));
}

/* Word 0 or 1 of each lane in both. */
KN_INLINE __m512i twice(__m512i v, int word)
{
    __m128i low = _mm_setr_epi8(0, 1, 0, 1, 4, 5, 4, 5, 8, 9, 8, 9, 12, 13, 12, 13);
    __m128i by = word ? _mm_add_epi8(low, _mm_set1_epi8(2)) : low;

    return _mm512_shuffle_epi8(v, _mm512_broadcast_i32x4(by));
}

/* 2^(E - bias) of fields E in bits 23..27. */
KN_INLINE __m512 unit_of(__m512i fields, int bias)
{
    fields = _mm512_and_si512(fields, _mm512_set1_epi32(31 << 23));
    return _mm512_castsi512_ps(_mm512_add_epi32(fields, _mm512_set1_epi32((127 - bias) << 23)));
}

/* Takes up the 16 entries at p. */
KN_INLINE void grid_at(enum bt_dtype t, const void *p, struct grid *g)
{
    if (t == BT_DTYPE_Q4_1) {
        __m512i v = _mm512_loadu_si512(p), upper = _mm512_set1_epi32(7 << 25);

        g->step = _mm512_castsi512_ph(twice(v, 0));
        g->centre = _mm512_castsi512_ph(twice(v, 1));
        v = _mm512_ternarylogic_epi32(upper, _mm512_slli_epi32(v, 9), _mm512_slli_epi32(v, 23),
                                      0xca); /* a ? b : c */
        g->unit = unit_of(v, KN_GRID_Q4_1);
    } else {
        __m512i v = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p));
        __m512i one = _mm512_set1_epi16(t == BT_DTYPE_Q8_0 ? 0x3c00 : 0x4c00);
        __m512i keep = _mm512_set1_epi16((short)0x83ff);

        g->unit =
            unit_of(_mm512_slli_epi32(v, 13), t == BT_DTYPE_Q8_0 ? KN_GRID_Q8_0 : KN_GRID_Q4_0);
        v = twice(v, 0);
        g->step =
            _mm512_castsi512_ph(_mm512_ternarylogic_epi32(v, keep, one, 0xea)); /* a & b | c */
    }
}

/* 1536 + W as f16 of inputs order[8 i + 2 s] and the next (wide_acts.c), i and s constants below 4,
 * of the block at w. */
KN_INLINE __m512h whole(enum bt_dtype t, const char *w, int i, int s, const struct grid *g)
{
    __m512h magic = _mm512_castsi512_ph(_mm512_set1_epi16(MAGIC)), q;
    __m512i v = _mm512_loadu_si512(w + 64 * i + (t == BT_DTYPE_Q8_0 ? s % 2 * 256 : 0));

    if (t == BT_DTYPE_Q8_0) {
        v = s < 2 ? _mm512_slli_epi16(v, 8) : v;
        q = _mm512_cvtepi16_ph(_mm512_srai_epi16(v, 8));
        return _mm512_fmadd_ph(q, g->step, magic);
    }
    v = s ? _mm512_srli_epi16(v, (unsigned)(4 * s)) : v;
    q = _mm512_castsi512_ph(_mm512_permutexvar_epi16(v, g->table));
    if (t == BT_DTYPE_Q4_0) {
        return _mm512_fmadd_ph(q, g->step, magic);
    }
    return _mm512_add_ph(_mm512_fmadd_ph(q, g->step, g->centre), magic);
}

static const char *scales_of(const struct kn_tile_job *j, int tile)
{
    size_t k = (size_t)j->k;

    return j->tile + (size_t)tile * kn_tile_bytes(j->dtype, k) +
           k / KN_QBLOCK * kn_tile_quant_bytes(j->dtype);
}

/* Outputs of tile `tile` of the job alone. */
KN_INLINE struct kn_tile_job job_of(const struct kn_tile_job *j, int tile)
{
    struct kn_tile_job t = *j;

    t.bias = j->bias ? j->bias + tile * KN_TILE : NULL;
    t.out = j->out + tile * KN_TILE;
    t.n_cols = BT_MIN(KN_TILE, j->n_cols - tile * KN_TILE);
    return t;
}

/* Many rows */

/* bf16 of W 2^e; bias is e + 112 where a bf16 has its exponent. */
KN_INLINE __m512i bf16_of(__m512h whole, __m512i bias)
{
    __m512h magic = _mm512_castsi512_ph(_mm512_set1_epi16(MAGIC));
    __m512i h = _mm512_castph_si512(_mm512_sub_ph(whole, magic));
    __m512i b = _mm512_and_si512(_mm512_srai_epi16(h, 3), _mm512_set1_epi16((short)0x8fff));

    return _mm512_maskz_add_epi16(_mm512_test_epi16_mask(h, h), b, bias);
}

/* Tile `tile` of the job to cells of 16 pairs of inputs by 16 outputs. */
KN_INLINE void spread_as(const struct kn_tile_job *j, enum bt_dtype t, int tile, char *out)
{
    size_t blocks = (size_t)j->k / KN_QBLOCK, qb = kn_tile_quant_bytes(t);
    const char *scales = scales_of(j, tile), *w = scales - blocks * qb;
    struct grid g = {.table = table4()};
    size_t ahead = kn_tile_bytes(t, (size_t)j->k);

    for (size_t b = 0; b < blocks; b++, w += qb, scales += kn_tile_scale_bytes(t), out += KN_CELL) {
        __m512i bias;

        grid_at(t, scales, &g);
        bias = _mm512_castps_si512(g.unit);
        bias = _mm512_or_si512(bias, _mm512_srli_epi32(bias, 16)); /* e + 127 */
        bias = _mm512_sub_epi16(bias, _mm512_set1_epi16(15 << 7));
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            _mm_prefetch(w + 64 * i + ahead, _MM_HINT_T1);
#pragma GCC unroll 4
            for (int s = 0; s < 4; s++) {
                _mm512_store_si512(out + (4 * i + s) * KN_TILE_ROW,
                                   bf16_of(whole(t, w, i, s, &g), bias));
            }
        }
    }
}

static void spread(const struct kn_tile_job *j, int tile, char *out)
{
    if (j->dtype == BT_DTYPE_Q8_0) {
        spread_as(j, BT_DTYPE_Q8_0, tile, out);
    } else if (j->dtype == BT_DTYPE_Q4_0) {
        spread_as(j, BT_DTYPE_Q4_0, tile, out);
    } else {
        spread_as(j, BT_DTYPE_Q4_1, tile, out);
    }
}

/* Where sums of tiles go: the next row, tile and group lie so many floats further on. */
struct sums_to {
    float *at;
    size_t row, tile, group;
};

/* A panel of tiles in the scratch, and a piece of K of it. */
struct panel {
    const struct kn_tile_job *j;
    int tile0, tile1; /* of the job */
    size_t blocks;    /* of a tile */
    char *w;          /* cells, tile by tile */
    float *sums;      /* of a pair of tiles by two groups, [2 groups][2 tiles][16][16] */
    size_t b0, b1;
};

/* Sums of 16 or 32 rows by one or two tiles (constants) of a piece, from what lies at `from` on:
 * x and w are the first cells of tile and group. */
KN_INLINE void sums(const struct panel *p,
                    const char *x,
                    const char *w,
                    const float *from,
                    const struct sums_to *to,
                    int n_groups,
                    int n_tiles)
{
    size_t step = p->blocks * KN_CELL, stride = to->row * sizeof(float);
    float *out = to->at;

    kn_tile_begin_sums(from, from + 512, p->b0 > 0);
    for (size_t i = p->b0 * KN_CELL; i < p->b1 * KN_CELL; i += KN_CELL) {
        KN_TILE_LOAD(4, x + i, KN_TILE_ROW);
        KN_TILE_LOAD(6, w + i, KN_TILE_ROW);
        KN_TILE_DOT_BF16(0, 4, 6);
        if (n_tiles > 1) {
            KN_TILE_LOAD(7, w + i + step, KN_TILE_ROW);
            KN_TILE_DOT_BF16(1, 4, 7);
        }
        if (n_groups > 1) {
            KN_TILE_LOAD(5, x + i + step, KN_TILE_ROW);
            KN_TILE_DOT_BF16(2, 5, 6);
            if (n_tiles > 1) {
                KN_TILE_DOT_BF16(3, 5, 7);
            }
        }
    }
    KN_TILE_STORE(0, out, stride);
    if (n_tiles > 1) {
        KN_TILE_STORE(1, out + to->tile, stride);
    }
    if (n_groups > 1) {
        KN_TILE_STORE(2, out + to->group, stride);
        if (n_tiles > 1) {
            KN_TILE_STORE(3, out + to->group + to->tile, stride);
        }
    }
}

/* Sums of rows from `row` on, all 16 or the last, to their outputs of tile `tile`. */
static void finish16(const struct kn_tile_job *j, int tile, int row, const float *sum)
{
    struct kn_tile_job t = job_of(j, tile);

    for (int r = 0; r < BT_MIN(16, j->n_rows - row); r++) {
        kn_tile_finish(&t, row + r, _mm512_load_ps(sum + r * KN_TILE));
    }
}

/* A piece of groups of the rows from `row` on by two tiles from `tile` on, or by the last one. */
static void pair_of_tiles(const struct panel *p, int tile, int row)
{
    const struct kn_tile_job *j = p->j;
    size_t at = (size_t)(tile - p->tile0), bytes = kn_wide_group_bytes(p->blocks);
    const char *x = (const char *)j->wide->data + (size_t)(row / KN_WIDE_ROWS) * bytes;
    const char *w = p->w + at * p->blocks * KN_CELL;
    int n_groups = j->n_rows - row > KN_WIDE_ROWS ? 2 : 1, n_tiles = BT_MIN(2, p->tile1 - tile);
    float *sum = p->sums + at / 2 * 1024;
    struct sums_to to = {sum, KN_TILE, 256, 512};
    bool last = p->b1 == p->blocks;
    bool plain = last && !j->bias && !j->add && j->n_rows - row >= n_groups * KN_WIDE_ROWS &&
                 j->n_cols - tile * KN_TILE >= n_tiles * KN_TILE;

    if (plain) { /* nothing is left to do with them */
        to = (struct sums_to){j->out + (size_t)row * j->out_stride + tile * KN_TILE, j->out_stride,
                              KN_TILE, KN_WIDE_ROWS * j->out_stride};
    }
    if (n_groups == 2 && n_tiles == 2) {
        sums(p, x, w, sum, &to, 2, 2);
    } else if (n_groups == 2) {
        sums(p, x, w, sum, &to, 2, 1);
    } else if (n_tiles == 2) {
        sums(p, x, w, sum, &to, 1, 2);
    } else {
        sums(p, x, w, sum, &to, 1, 1);
    }
    for (int g = 0; last && !plain && g < n_groups; g++) {
        for (int t = 0; t < n_tiles; t++) {
            finish16(j, tile + t, row + g * KN_WIDE_ROWS, sum + (2 * g + t) * 256);
        }
    }
}

/* All rows by the tiles of a panel. */
static void run_panel(struct panel *p)
{
    size_t cells = (size_t)(p->tile1 - p->tile0) * p->blocks;
    size_t step = BT_DIV_UP(p->blocks, BT_DIV_UP(p->blocks, PIECE_BLOCKS));

    p->w = p->j->scratch;
    p->sums = (float *)(p->w + cells * KN_CELL);
    for (int t = p->tile0; t < p->tile1; t++) {
        spread(p->j, t, p->w + (size_t)(t - p->tile0) * p->blocks * KN_CELL);
    }
    kn_wide_configure();
    for (int row = 0; row < p->j->n_rows; row += 2 * KN_WIDE_ROWS) { /* beyond the last: dropped */
        for (p->b0 = 0; p->b0 < p->blocks; p->b0 = p->b1) {
            p->b1 = BT_MIN(p->b0 + step, p->blocks);
            for (int t = p->tile0; t < p->tile1; t += 2) {
                pair_of_tiles(p, t, row);
            }
        }
    }
    kn_tile_release();
}

/* Few rows */

/* n (constant) rows from `row` on by one tile. */
KN_INLINE void few_rows(const struct kn_tile_job *j, enum bt_dtype t, int tile, int row, int n)
{
    size_t blocks = (size_t)j->k / KN_QBLOCK, stride = kn_wide_row_bytes(blocks);
    size_t qb = kn_tile_quant_bytes(t), next = stride / sizeof(float); /* row */
    const char *x = (const char *)j->wide->data + (size_t)row * stride;
    const char *scales = scales_of(j, tile), *w = scales - blocks * qb;
    const float *unit = (const float *)(x + blocks * 64);
    const int32_t *qsum = (const int32_t *)(unit + kn_wide_pitch(blocks));
    /* The next tile's block comes to the second-level cache meanwhile. */
    size_t ahead = kn_tile_bytes(t, (size_t)j->k);
    struct kn_tile_job to = job_of(j, tile);
    struct grid g = {.table = table4()};
    __m512 acc[FEW_ROWS];

#pragma GCC unroll 8
    for (int r = 0; r < n; r++) {
        acc[r] = _mm512_setzero_ps();
    }
    for (size_t b = 0; b < blocks; b++, w += qb, scales += kn_tile_scale_bytes(t), x += 64) {
        __m512i dot[FEW_ROWS];

#pragma GCC unroll 8
        for (int r = 0; r < n; r++) { /* what the bits of 1536 will add */
            dot[r] = _mm512_set1_epi32(-MAGIC * qsum[(size_t)r * next + b]);
        }
#pragma GCC unroll 8
        for (size_t i = 0; i < qb; i += 64) {
            _mm_prefetch(w + i + ahead, _MM_HINT_T1);
            _mm_prefetch(w + i + NEAR, _MM_HINT_T0);
        }
        _mm_prefetch(scales + ahead, _MM_HINT_T1);
        _mm_prefetch(scales + NEAR / 4, _MM_HINT_T0);
        grid_at(t, scales, &g);
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
#pragma GCC unroll 4
            for (int s = 0; s < 4; s++) {
                __m512i v = _mm512_castph_si512(whole(t, w, i, s, &g));

#pragma GCC unroll 8
                for (int r = 0; r < n; r++) {
                    int32_t q;

                    memcpy(&q, x + (size_t)r * stride + 4 * (4 * i + s), sizeof(q));
                    dot[r] = _mm512_dpwssd_epi32(dot[r], v, _mm512_set1_epi32(q));
                }
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < n; r++) {
            __m512 by = _mm512_mul_ps(g.unit, _mm512_set1_ps(unit[(size_t)r * next + b]));

            acc[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot[r]), by, acc[r]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < n; r++) {
        kn_tile_finish(&to, row + r, acc[r]);
    }
}

KN_INLINE void few_rows_by_tile(const struct kn_tile_job *j, enum bt_dtype t, int tile)
{
    int row = 0;

    for (; row + 8 <= j->n_rows; row += 8) {
        few_rows(j, t, tile, row, 8);
    }
    if (row + 4 <= j->n_rows) {
        few_rows(j, t, tile, row, 4);
        row += 4;
    }
    if (row + 2 <= j->n_rows) {
        few_rows(j, t, tile, row, 2);
        row += 2;
    }
    if (row < j->n_rows) {
        few_rows(j, t, tile, row, 1);
    }
}

void KN_V(wide_tiles)(const struct kn_tile_job *j, int n_tiles)
{
    if (j->wide->tiles) {
        int fit = (int)(KN_THREAD_SCRATCH_BYTES / kn_wide_spread_bytes((size_t)j->k / KN_QBLOCK));

        for (int tile = 0; tile < n_tiles; tile += fit) {
            struct panel p = {.j = j,
                              .tile0 = tile,
                              .tile1 = BT_MIN(tile + fit, n_tiles),
                              .blocks = (size_t)j->k / KN_QBLOCK};

            run_panel(&p);
        }
        return;
    }
    for (int tile = 0; tile < n_tiles; tile++) {
        if (j->dtype == BT_DTYPE_Q8_0) {
            few_rows_by_tile(j, BT_DTYPE_Q8_0, tile);
        } else if (j->dtype == BT_DTYPE_Q4_0) {
            few_rows_by_tile(j, BT_DTYPE_Q4_0, tile);
        } else {
            few_rows_by_tile(j, BT_DTYPE_Q4_1, tile);
        }
    }
}
