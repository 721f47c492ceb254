/* Quantized weights with AMX: the products of a block of 32 inputs, 16 rows and 16 outputs are one
 * TDPBF16PS, exact (wide.h), so what is left to the vector units is one fused product a row:
 *     acc = 0; for each block in order: acc = fma(2^e dot, d, acc)
 *     Q4_1: sum of X m, both as hi + lo (wide.h): for each 8 blocks in order
 *         a = b = 0; for each block of them: a += hi(X) hi(m), a += lo(X) hi(m), b the same by
 * lo(m) sum += a + b fused, which is what a TDPBF16PS does (Intel SDM); then acc + sum and
 * kn_tile_finish at the end. Whatever the rows and tiles computed beside it, an output has this one
 * order.
 *
 * Many rows: the weights of a panel of tiles are spread to bf16 in the member's scratch, once for
 * all rows; a group of 16 rows passes over the panel, in pieces of K for which the group's
 * activations stay in the first-level cache. The products of a piece are one stream over its tiles
 * and blocks, started three blocks before they are scaled. One group alone: weights are spread on
 * the way. Fewer rows: VPDPBUSD with q in two bytes, weights as they lie.
 */
#include "kernels/cpu/amx/wide.h"

#define PIECE_BLOCKS 16 /* of K at most */
#define AHEAD        3
#define LEAD         6    /* blocks spread before their product is started */
#define PREFETCH     2560 /* bytes; the processor alone does not keep up with few rows */
#define FEW_ROWS     8    /* rows that share unpacked weights */
#define MINIMA_ROWS  4 /* of them, up to which sums of minima fit in registers beside the others */

/* A panel of tiles in the scratch. Cells of weights (16 pairs of inputs by 16 outputs) and their
 * scales [16] lie piece by piece, tile by tile, block by block; by tile: cells of minima, sums of X
 * by minima and acc between pieces, both [16 rows][16]. */
struct panel {
    const struct kn_tile_job *j;
    int tile0, n_tiles; /* of the job */
    size_t blocks;      /* of a tile */
    size_t step;        /* blocks of a piece; the last may have fewer */
    size_t sums;        /* cells of minima of a tile */
    char *w, *m;
    float *d, *min, *acc;
};

static void lay_panel(struct panel *p, size_t pieces)
{
    size_t cells = (size_t)p->n_tiles * p->blocks;

    p->step = BT_DIV_UP(p->blocks, pieces);
    p->w = p->j->scratch;
    p->d = (float *)(p->w + cells * KN_CELL);
    p->sums = kn_wide_sums(p->blocks);
    p->m = (char *)(p->d + cells * KN_TILE);
    p->min = (float *)(p->m + (size_t)p->n_tiles * p->sums * KN_CELL);
    p->acc = p->min + (size_t)p->n_tiles * 16 * KN_TILE;
}

/* Minima past the last block are zero. */
static void clear_minima(const struct panel *p)
{
    size_t used = p->blocks * 2 * KN_TILE_ROW, end = p->sums * KN_CELL;

    for (int t = 0; p->j->dtype == BT_DTYPE_Q4_1 && t < p->n_tiles; t++) {
        memset(p->m + (size_t)t * end + used, 0, end - used);
    }
}

/* Cell of block b (of the piece that begins at b0) of tile t. */
KN_INLINE size_t cell_of(const struct panel *p, size_t b0, size_t t, size_t b)
{
    return b0 * (size_t)p->n_tiles + t * BT_MIN(p->step, p->blocks - b0) + b - b0;
}

static const char *scales_of(const struct kn_tile_job *j, int tile)
{
    size_t k = (size_t)j->k;

    return j->tile + (size_t)tile * kn_tile_bytes(j->dtype, k) +
           k / KN_QBLOCK * kn_tile_quant_bytes(j->dtype);
}

/* Spreading */

/* Four halves of each word to bf16 by table; row 4 i + s holds inputs (4 i, 4 i + 2) for s = 0,
 * those and 16 for 1, and 1 more than these for 2 and 3: the order of wide_acts.c. */
KN_INLINE void spread4(const char *w, __m512i table, char *out)
{
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++, w += 64, out += 4 * KN_TILE_ROW) {
        __m512i v = _mm512_loadu_si512(w);

        /* Five bits of a word choose among 32 entries, of which the upper half repeats. */
        _mm512_store_si512(out, _mm512_permutexvar_epi16(v, table));
        _mm512_store_si512(out + 64, _mm512_permutexvar_epi16(_mm512_srli_epi16(v, 4), table));
        _mm512_store_si512(out + 128, _mm512_permutexvar_epi16(_mm512_srli_epi16(v, 8), table));
        _mm512_store_si512(out + 192, _mm512_permutexvar_epi16(_mm512_srli_epi16(v, 12), table));
    }
}

/* bf16 of q - off. */
static __m512i table4(int off)
{
    BT_ALIGNED(64) uint16_t t[32];

    for (int i = 0; i < 32; i++) {
        float f = (float)(i % 16 - off);
        uint32_t bits;

        memcpy(&bits, &f, sizeof(bits));
        t[i] = (uint16_t)(bits >> 16);
    }
    return _mm512_load_si512(t);
}

/* Byte c of each lane, less 128, as f32. */
KN_INLINE __m512i byte_f32(__m512i v, int c)
{
    __m512i x = _mm512_srai_epi32(_mm512_slli_epi32(v, (unsigned)(24 - 8 * c)), 24);

    return _mm512_castps_si512(_mm512_cvtepi32_ps(x));
}

KN_INLINE __m512i pair8(__m512i v, int c)
{
    return _mm512_or_si512(byte_f32(v, c + 2), _mm512_srli_epi32(byte_f32(v, c), 16));
}

/* In the order of spread4; small integers leave the lower half of an f32 zero. */
KN_INLINE void spread8(const char *w, char *out)
{
    __m512i flip = _mm512_set1_epi8(-128);

    for (int i = 0; i < 4; i++, w += 64, out += 4 * KN_TILE_ROW) {
        __m512i a = _mm512_xor_si512(_mm512_loadu_si512(w), flip);
        __m512i b = _mm512_xor_si512(_mm512_loadu_si512(w + 256), flip);

        _mm512_store_si512(out, pair8(a, 0));
        _mm512_store_si512(out + 64, pair8(b, 0));
        _mm512_store_si512(out + 128, pair8(a, 1));
        _mm512_store_si512(out + 192, pair8(b, 1));
    }
}

/* Minima of block b to rows 2 b (for hi of X) and 2 b + 1 (for lo) of a tile's cells. */
KN_INLINE void spread_minima(const char *scales, size_t b, char *cells)
{
    __m512 m = v16_load_f16((const uint16_t *)scales + KN_TILE), hi, lo;
    __m512i pair;

    kn_wide_split(m, &hi, &lo);
    pair = kn_wide_pairs(hi, lo);
    _mm512_store_si512(cells + b * 2 * KN_TILE_ROW, pair);
    _mm512_store_si512(cells + (b * 2 + 1) * KN_TILE_ROW, pair);
}

/* One block of tile t into its cell. */
KN_INLINE void spread(const struct panel *p, int t, size_t b, __m512i table)
{
    enum bt_dtype dtype = p->j->dtype;
    size_t qb = kn_tile_quant_bytes(dtype);
    const char *scales = scales_of(p->j, p->tile0 + t), *w = scales - (p->blocks - b) * qb;
    size_t cell = cell_of(p, b / p->step * p->step, (size_t)t, b);

    scales += b * kn_tile_scale_bytes(dtype);
    for (size_t i = 0; i < qb; i += 64) {
        _mm_prefetch(w + i + PREFETCH, _MM_HINT_T0);
    }
    if (dtype == BT_DTYPE_Q8_0) {
        spread8(w, p->w + cell * KN_CELL);
    } else {
        spread4(w, table, p->w + cell * KN_CELL);
    }
    v16_store(p->d + cell * KN_TILE, v16_load_f16((const uint16_t *)scales));
    if (dtype == BT_DTYPE_Q4_1) {
        spread_minima(scales, b, p->m + (size_t)t * p->sums * KN_CELL);
    }
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

/* Scales the products of one block for n (constant) rows into acc. */
KN_INLINE void scale(const float *d, const float *dot, int n, __m512 *acc)
{
    __m512 by = _mm512_loadu_ps(d);

#pragma GCC unroll 16
    for (int r = 0; r < n; r++) {
        acc[r] = _mm512_fmadd_ps(_mm512_load_ps(dot + r * KN_TILE), by, acc[r]);
    }
}

/* The next product of the stream in tile c (literals). */
#define BEGIN(c, at, bt)                                                                           \
    do {                                                                                           \
        if (w != w_end) {                                                                          \
            KN_TILE_ZERO(c);                                                                       \
            KN_TILE_LOAD(at, x, KN_TILE_ROW);                                                      \
            KN_TILE_LOAD(bt, w, KN_TILE_ROW);                                                      \
            KN_TILE_DOT_BF16(c, at, bt);                                                           \
            w += KN_CELL;                                                                          \
            x += KN_CELL;                                                                          \
            x = x == x_end ? x0 : x;                                                               \
        }                                                                                          \
    } while (0)
/* Step i (literal) of a round of four: starts the product AHEAD further on, stores the one started
 * a step before, and scales this one, whose product was stored two steps ago: loads from memory
 * just stored by a tile wait for the cache. */
#define STEP(i, next, last, at, bt)                                                                \
    do {                                                                                           \
        if (left == 0) {                                                                           \
            break;                                                                                 \
        }                                                                                          \
        if (on_the_way && spread_t < p->n_tiles) {                                                 \
            spread(p, spread_t, spread_b, table);                                                  \
            spread_t += spread_b + 1 == p->blocks;                                                 \
            spread_b = spread_b + 1 == p->blocks ? 0 : spread_b + 1;                               \
        }                                                                                          \
        BEGIN(next, at, bt);                                                                       \
        if (left >= AHEAD) {                                                                       \
            KN_TILE_STORE(last, dot[last], KN_TILE_ROW);                                           \
        }                                                                                          \
        scale(d, dot[i], n, acc);                                                                  \
        d += KN_TILE;                                                                              \
        left--;                                                                                    \
        if (++b == len) {                                                                          \
            b = 0;                                                                                 \
            end_of_tile(p, b0, tile++, row, n, on_the_way, acc);                                   \
        }                                                                                          \
    } while (0)

/* Sums of X by minima of a group by up to four tiles (n) of the panel from t on. */
static void four_minima(const struct panel *p, const char *x, int t, int n)
{
    size_t step = p->sums * KN_CELL;
    const char *m = p->m + (size_t)t * step;
    float *to = p->min + (size_t)t * 16 * KN_TILE;

    KN_TILE_ZERO(0);
    KN_TILE_ZERO(1);
    KN_TILE_ZERO(2);
    KN_TILE_ZERO(3);
    for (size_t i = 0; i < p->sums; i++, x += KN_CELL, m += KN_CELL) {
        KN_TILE_LOAD(4, x, KN_TILE_ROW);
        KN_TILE_LOAD(6, m, KN_TILE_ROW);
        KN_TILE_DOT_BF16(0, 4, 6);
        if (n > 1) {
            KN_TILE_LOAD(7, m + step, KN_TILE_ROW);
            KN_TILE_DOT_BF16(1, 4, 7);
        }
        if (n > 2) {
            KN_TILE_LOAD(6, m + 2 * step, KN_TILE_ROW);
            KN_TILE_DOT_BF16(2, 4, 6);
        }
        if (n > 3) {
            KN_TILE_LOAD(7, m + 3 * step, KN_TILE_ROW);
            KN_TILE_DOT_BF16(3, 4, 7);
        }
    }
    KN_TILE_STORE(0, to, KN_TILE_ROW);
    if (n > 1) {
        KN_TILE_STORE(1, to + 256, KN_TILE_ROW);
    }
    if (n > 2) {
        KN_TILE_STORE(2, to + 512, KN_TILE_ROW);
    }
    if (n > 3) {
        KN_TILE_STORE(3, to + 768, KN_TILE_ROW);
    }
}

static void group_minima(const struct panel *p, int row)
{
    const char *x = (const char *)p->j->wide->data + p->blocks * KN_CELL +
                    (size_t)(row / KN_WIDE_ROWS) * kn_wide_group_bytes(p->blocks);

    for (int t = 0; p->j->dtype == BT_DTYPE_Q4_1 && t < p->n_tiles; t += 4) {
        four_minima(p, x, t, BT_MIN(4, p->n_tiles - t));
    }
}

/* The end of the last piece: minima, then out. */
static __attribute__((noinline)) void finish16(const struct panel *p, int tile, int row)
{
    struct kn_tile_job t = job_of(p->j, p->tile0 + tile);
    const float *from = p->acc + (size_t)tile * 16 * KN_TILE;
    const float *min = p->min + (size_t)tile * 16 * KN_TILE;
    int real = BT_MIN(16, p->j->n_rows - row);
    __m512 acc[16];

#pragma GCC unroll 16
    for (int r = 0; r < 16; r++) {
        acc[r] = _mm512_load_ps(from + r * KN_TILE);
    }
#pragma GCC unroll 16
    for (int r = 0; r < 16; r++) {
        if (p->j->dtype == BT_DTYPE_Q4_1) {
            acc[r] = _mm512_add_ps(acc[r], _mm512_load_ps(min + r * KN_TILE));
        }
        if (r < real) {
            kn_tile_finish(&t, row + r, acc[r]);
        }
    }
}

/* Puts acc of n (constant) rows where it goes and takes up that of the next tile. */
KN_INLINE void end_of_tile(
    const struct panel *p, size_t b0, int tile, int row, int n, bool on_the_way, __m512 *acc)
{
    float *to = p->acc + (size_t)tile * 16 * KN_TILE;

#pragma GCC unroll 16
    for (int r = 0; r < n; r++) {
        _mm512_store_ps(to + r * KN_TILE, acc[r]);
    }
    if (!on_the_way && b0 + p->step >= p->blocks) {
        finish16(p, tile, row);
    }
    to += 16 * KN_TILE;
#pragma GCC unroll 16
    for (int r = 0; r < n; r++) {
        acc[r] =
            b0 && tile + 1 < p->n_tiles ? _mm512_load_ps(to + r * KN_TILE) : _mm512_setzero_ps();
    }
}

/* The piece at block b0 of a group's first n (constant) rows by the panel, all of whose cells, or
 * with on_the_way (constant) LEAD of them, are spread; these outputs are left to the caller. */
KN_INLINE void run_piece(const struct panel *p, size_t b0, int row, int n, bool on_the_way)
{
    const char *x0 = (const char *)p->j->wide->data + b0 * KN_CELL +
                     (size_t)(row / KN_WIDE_ROWS) * kn_wide_group_bytes(p->blocks);
    size_t len = BT_MIN(p->step, p->blocks - b0), left = len * (size_t)p->n_tiles, b = 0;
    const char *x = x0, *x_end = x0 + len * KN_CELL;
    const char *w = p->w + cell_of(p, b0, 0, b0) * KN_CELL, *w_end = w + left * KN_CELL;
    const float *d = p->d + cell_of(p, b0, 0, b0) * KN_TILE;
    size_t spread_b = LEAD % p->blocks;
    int tile = 0, spread_t = (int)(LEAD / p->blocks);
    __m512i table = table4(p->j->dtype == BT_DTYPE_Q4_0 ? 8 : 0);
    BT_ALIGNED(64) float dot[4][16 * KN_TILE];
    __m512 acc[16];

    BEGIN(0, 4, 6);
    BEGIN(1, 5, 7);
    BEGIN(2, 4, 6);
#pragma GCC unroll 16
    for (int r = 0; r < n; r++) {
        acc[r] = b0 ? _mm512_load_ps(p->acc + r * KN_TILE) : _mm512_setzero_ps();
    }
    KN_TILE_STORE(0, dot[0], KN_TILE_ROW);
    if (left > 1) {
        KN_TILE_STORE(1, dot[1], KN_TILE_ROW);
    }
    while (left) {
        STEP(0, 3, 2, 5, 7);
        STEP(1, 0, 3, 4, 6);
        STEP(2, 1, 0, 5, 7);
        STEP(3, 2, 1, 4, 6);
    }
}

/* The rows are one group, n (constant) of which are computed. */
KN_INLINE void one_group(struct panel *p, int n)
{
    __m512i table = table4(p->j->dtype == BT_DTYPE_Q4_0 ? 8 : 0);

    lay_panel(p, 1);
    clear_minima(p);
    for (size_t i = 0; i < BT_MIN((size_t)LEAD, p->blocks * (size_t)p->n_tiles); i++) {
        spread(p, (int)(i / p->blocks), i % p->blocks, table);
    }
    kn_wide_configure(n);
    run_piece(p, 0, 0, n, true);
    group_minima(p, 0);
    for (int t = 0; t < p->n_tiles; t++) {
        finish16(p, t, 0);
    }
}

static void all_groups(struct panel *p)
{
    __m512i table = table4(p->j->dtype == BT_DTYPE_Q4_0 ? 8 : 0);

    lay_panel(p, BT_DIV_UP(p->blocks, PIECE_BLOCKS));
    clear_minima(p);
    for (int t = 0; t < p->n_tiles; t++) {
        for (size_t b = 0; b < p->blocks; b++) {
            spread(p, t, b, table);
        }
    }
    kn_wide_configure(KN_WIDE_ROWS);
    for (int row = 0; row < p->j->n_rows; row += KN_WIDE_ROWS) {
        group_minima(p, row);
        for (size_t b0 = 0; b0 < p->blocks; b0 += p->step) { /* rows beyond the last: dropped */
            run_piece(p, b0, row, KN_WIDE_ROWS, false);
        }
    }
}

static void do_panel(struct panel *p)
{
    if (p->j->n_rows > KN_WIDE_ROWS || p->j->dtype == BT_DTYPE_Q8_0) {
        all_groups(p);
    } else {
        one_group(p, KN_WIDE_ROWS);
    }
    kn_tile_release();
}

/* Few rows */

KN_INLINE __m512i dot4(__m512i acc, __m512i w, const char *q)
{
    int32_t x;

    memcpy(&x, q, sizeof(x));
    return _mm512_dpbusd_epi32(acc, w, _mm512_set1_epi32(x));
}

/* Products of one block with n (constant) rows; x + r stride is row r's block, its h and l. The
 * upper halves of 4-bit weights are taken where they lie, 16 times too large. */
KN_INLINE void
few_dots(enum bt_dtype t, const char *w, const char *x, size_t stride, int n, __m512i *dot)
{
    __m512i low = _mm512_set1_epi8(15), high = _mm512_set1_epi8(-16), other[FEW_ROWS];

#pragma GCC unroll 8
    for (int r = 0; r < n; r++) {
        other[r] = _mm512_setzero_si512();
    }
    if (t == BT_DTYPE_Q8_0) {
#pragma GCC unroll 8
        for (int i = 0; i < 8; i++) {
            __m512i v = _mm512_loadu_si512(w + 64 * i);

#pragma GCC unroll 8
            for (int r = 0; r < n; r++) {
                dot[r] = dot4(dot[r], v, x + (size_t)r * stride + 4 * i);
                other[r] = dot4(other[r], v, x + (size_t)r * stride + 32 + 4 * i);
            }
        }
    } else {
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            __m512i v = _mm512_loadu_si512(w + 64 * i);
            __m512i lo = _mm512_and_si512(v, low), hi = _mm512_and_si512(v, high);

#pragma GCC unroll 8
            for (int r = 0; r < n; r++) {
                const char *q = x + (size_t)r * stride + 4 * i;

                dot[r] = dot4(dot4(dot[r], lo, q), lo, q + 32);
                other[r] = dot4(dot4(other[r], hi, q + 16), hi, q + 48);
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < n; r++) {
        other[r] = t == BT_DTYPE_Q8_0 ? other[r] : _mm512_srai_epi32(other[r], 4);
        dot[r] = _mm512_add_epi32(dot[r], other[r]);
    }
}

/* What tile products do with X and minima, by hand. */
struct few_minima {
    __m512 a[FEW_ROWS], b[FEW_ROWS], sum[FEW_ROWS];
};

/* One block; x[r next] is hi of row r's X, lo lies pitch further on. */
KN_INLINE void add_few_minima(
    struct few_minima *s, const char *scales, const float *x, size_t pitch, size_t next, int n)
{
    __m512 hi, lo;

    kn_wide_split(v16_load_f16((const uint16_t *)scales + KN_TILE), &hi, &lo);
#pragma GCC unroll 8
    for (int r = 0; r < n; r++) {
        __m512 u = _mm512_set1_ps(x[(size_t)r * next]);
        __m512 v = _mm512_set1_ps(x[(size_t)r * next + pitch]);

        s->a[r] = _mm512_fmadd_ps(v, hi, _mm512_fmadd_ps(u, hi, s->a[r]));
        s->b[r] = _mm512_fmadd_ps(v, lo, _mm512_fmadd_ps(u, lo, s->b[r]));
    }
}

/* The end of eight blocks or of the last. */
KN_INLINE void close_few_minima(struct few_minima *s, int n)
{
#pragma GCC unroll 8
    for (int r = 0; r < n; r++) {
        s->sum[r] = _mm512_add_ps(s->sum[r], _mm512_add_ps(s->a[r], s->b[r]));
        s->a[r] = s->b[r] = _mm512_setzero_ps();
    }
}

/* The same for all blocks at once, into s->sum. */
KN_INLINE void all_few_minima(
    struct few_minima *s, const char *scales, size_t blocks, const float *x, size_t next, int n)
{
    for (size_t b = 0; b < blocks; b++) {
        add_few_minima(s, scales + b * kn_tile_scale_bytes(BT_DTYPE_Q4_1), x + b,
                       kn_wide_pitch(blocks), next, n);
        if (b % 8 == 7 || b + 1 == blocks) {
            close_few_minima(s, n);
        }
    }
}

/* n (constant) rows from `row` on by one tile. */
KN_INLINE void few_rows(const struct kn_tile_job *j, enum bt_dtype t, int tile, int row, int n)
{
    size_t blocks = (size_t)j->k / KN_QBLOCK, stride = kn_wide_row_bytes(blocks);
    const char *x = (const char *)j->wide->data + (size_t)row * stride;
    const char *scales = scales_of(j, tile), *w = scales - blocks * kn_tile_quant_bytes(t);
    size_t pitch = kn_wide_pitch(blocks);
    const float *hi = (const float *)(x + blocks * 64), *by = hi + 2 * pitch;
    const int32_t *qsum = (const int32_t *)(by + pitch);
    size_t next = stride / sizeof(float); /* row */
    struct kn_tile_job to = job_of(j, tile);
    struct few_minima min;
    __m512 acc[FEW_ROWS];

#pragma GCC unroll 8
    for (int r = 0; r < n; r++) {
        acc[r] = min.a[r] = min.b[r] = min.sum[r] = _mm512_setzero_ps();
    }
    for (size_t b = 0; b < blocks; b++) {
        __m512 d = v16_load_f16((const uint16_t *)scales);
        __m512i dot[FEW_ROWS];

#pragma GCC unroll 8
        for (int r = 0; r < n; r++) { /* Q8_0 is stored with 128 more, Q4_0 with 8 */
            int less = -qsum[(size_t)r * next + b];

            dot[r] = t == BT_DTYPE_Q4_1
                         ? _mm512_setzero_si512()
                         : _mm512_slli_epi32(_mm512_set1_epi32(less), t == BT_DTYPE_Q8_0 ? 7 : 3);
        }
#pragma GCC unroll 8
        for (size_t i = 0; i < kn_tile_quant_bytes(t); i += 64) {
            _mm_prefetch(w + i + PREFETCH, _MM_HINT_T0);
        }
        few_dots(t, w, x + 64 * b, stride, n, dot);
#pragma GCC unroll 8
        for (int r = 0; r < n; r++) {
            __m512 s = _mm512_set1_ps(by[(size_t)r * next + b]);

            s = _mm512_mul_ps(_mm512_cvtepi32_ps(dot[r]), s); /* exact */
            acc[r] = _mm512_fmadd_ps(s, d, acc[r]);
        }
        if (t == BT_DTYPE_Q4_1 && n <= MINIMA_ROWS) {
            add_few_minima(&min, scales, hi + b, pitch, next, n);
            if (b % 8 == 7 || b + 1 == blocks) {
                close_few_minima(&min, n);
            }
        }
        w += kn_tile_quant_bytes(t);
        scales += kn_tile_scale_bytes(t);
    }
    if (t == BT_DTYPE_Q4_1 && n > MINIMA_ROWS) {
        all_few_minima(&min, scales_of(j, tile), blocks, hi, next, n);
    }
#pragma GCC unroll 8
    for (int r = 0; r < n; r++) {
        if (t == BT_DTYPE_Q4_1) {
            acc[r] = _mm512_add_ps(acc[r], min.sum[r]);
        }
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
    struct panel p = {.j = j, .blocks = (size_t)j->k / KN_QBLOCK};
    int fit;

    if (j->wide->tiles) {
        fit = (int)(KN_THREAD_SCRATCH_BYTES / kn_wide_spread_bytes(p.blocks));
        for (; p.tile0 < n_tiles; p.tile0 += fit) {
            p.n_tiles = BT_MIN(fit, n_tiles - p.tile0);
            do_panel(&p);
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
