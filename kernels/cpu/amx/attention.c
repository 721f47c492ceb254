/* Causal attention over paged f16 K and V with AMX; pools of f32 go through the vector row.
 *
 * Tiles of 64 absolute positions and online softmax as in cpu/vec/attention.c, turned around so
 * that a row (query, head) is a lane: 16 rows are a group, and S^T [64 positions][16 rows] = K Q^T
 * O^T [D][16 rows] += V^T P^T K is then read as it lies, softmax needs no sum across lanes, and
 * only V is transposed, once a tile for all groups of an item.
 *
 * TDPBF16PS multiplies pairs of bf16 and adds in f32, so both sides are split, x = hi + lo, each
 * bf16: exact for f16, 16 bits of queries and weights. Of an element's products
 *     for each block of 32 inputs (positions), ascending: hi lo, hi hi, lo hi (K or V first)
 * are added in one chain; lo lo is below the error of what was split. Queries are multiplied by
 * scale / ln 2 before that, so that
 *     m' = max(m, max s);  c = 2^(m - m');  w[j] = 2^(s[j] - m')
 *     l  = l c + (w in 4 chains, j mod 4, j ascending; (0 + 1) + (2 + 3));  o = o c + ..
 * A row's lane, group, chunk or neighbours never enter: positions past its own weigh exactly zero,
 * and a tile in which it sees nothing leaves m, l and o as they were. */
#include "kernels/cpu/amx/tile.h"
#include "kernels/cpu/kv.h"
#include "kernels/cpu/vec/attn_item.h"
#include "kernels/cpu/vec/vec.h"

#define TILE       64   /* positions */
#define ROWS       16   /* of a group */
#define MAX_GROUPS 16   /* of an item */
#define CELL       1024 /* bytes of a tile register */
#define PAIR       ((size_t)2 * CELL)

/* Scratch of one member. A cell is 16 rows of 64 bytes; hi and lo lie side by side. */
struct work {
    char *k;  /* [4][d32 / 32][hi, lo]: 16 positions by 32 inputs */
    char *v;  /* [n_out][2][hi, lo]: 16 columns of V by 32 positions */
    char *q;  /* [groups][d32 / 32][hi, lo]: 16 pairs of inputs by 16 rows by 2 */
    char *p;  /* [2 groups][2][hi, lo]: 16 pairs of positions by 16 rows by 2 */
    float *s; /* [2 groups][TILE][ROWS] */
    float *o; /* [groups][n_out][16][ROWS] */
    float *m; /* [groups][ROWS] */
    float *l; /* [groups][ROWS] */
};

struct item {
    struct kn_attn_item of;
    int d;
    int n_in;  /* blocks of 32 inputs, the last filled up with zeros */
    int n_out; /* tiles of 16 columns of V, a multiple of four, zero past D */
    struct work work;
};

static const uint16_t zeros[KN_MAX_HEAD_DIM];

static size_t bytes_of_tile(int n_in, int n_out)
{
    return 4 * PAIR * (size_t)n_in + 2 * PAIR * (size_t)n_out + 4 * PAIR +
           2 * TILE * ROWS * sizeof(float);
}

static size_t bytes_of_group(int n_in, int n_out)
{
    return PAIR * (size_t)n_in + ROWS * (ROWS * (size_t)n_out + 2) * sizeof(float);
}

/* Groups an item may have, so that its work fits. */
static int groups_of(int n_in, int n_out)
{
    size_t n = (KN_THREAD_SCRATCH_BYTES - bytes_of_tile(n_in, n_out)) / bytes_of_group(n_in, n_out);

    return (int)BT_MIN(n, (size_t)MAX_GROUPS);
}

static struct work lay_work(char *p, int n_in, int n_out, int groups)
{
    struct work w;

    w.k = p;
    w.v = w.k + 4 * PAIR * (size_t)n_in;
    w.q = w.v + 2 * PAIR * (size_t)n_out;
    w.p = w.q + PAIR * (size_t)n_in * (size_t)groups;
    w.s = (float *)(w.p + 4 * PAIR);
    w.o = w.s + 2 * TILE * ROWS;
    w.m = w.o + (size_t)groups * ROWS * ROWS * (size_t)n_out;
    w.l = w.m + groups * ROWS;
    return w;
}

static void configure(void)
{
    struct kn_tilecfg c = {.palette = 1};

    for (int i = 0; i < 8; i++) {
        c.row_bytes[i] = KN_TILE_ROW;
        c.rows[i] = 16;
    }
    kn_tile_configure(&c);
}

/* The nearest bf16 (half away from zero) as f32. */
KN_INLINE v16 round_bf16(v16 x)
{
    __m512i i = _mm512_add_epi32(_mm512_castps_si512(x), _mm512_set1_epi32(0x8000));

    return _mm512_castsi512_ps(_mm512_and_si512(i, _mm512_set1_epi32((int)0xffff0000)));
}

/* The upper halves of 32 numbers in the order that the processor packs in: of each four lanes of a,
 * then of b. What is multiplied lies in this order on both sides. */
KN_INLINE __m512i pack_high(v16 a, v16 b)
{
    return _mm512_packus_epi32(_mm512_srli_epi32(_mm512_castps_si512(a), 16),
                               _mm512_srli_epi32(_mm512_castps_si512(b), 16));
}

/* 32 numbers as the nearest bf16 hi and what is left; that of f16 is exact as it stands. */
KN_INLINE void split32(v16 a, v16 b, bool exact, __m512i *hi, __m512i *lo)
{
    v16 ha = round_bf16(a), hb = round_bf16(b), la = v16_sub(a, ha), lb = v16_sub(b, hb);

    *hi = pack_high(ha, hb);
    *lo = exact ? pack_high(la, lb) : pack_high(round_bf16(la), round_bf16(lb));
}

KN_INLINE void split32_f16(__m256i x, __m256i y, char *hi, char *lo)
{
    __m512i h, l;

    split32(_mm512_cvtph_ps(x), _mm512_cvtph_ps(y), true, &h, &l);
    _mm512_store_si512(hi, h);
    _mm512_store_si512(lo, l);
}

/* r[i] lane j to r[j] lane i, 32-bit lanes. */
KN_INLINE void transpose16(__m512i *r)
{
    __m512i t[16];

#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4) { /* lane group g of r[i + c]: column 4 g + c of rows i..i+3 */
        r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
#pragma GCC unroll 4
    for (int c = 0; c < 4; c++) {
        __m512i a = _mm512_shuffle_i32x4(r[c], r[c + 4], 0x88); /* groups 0, 2 */
        __m512i b = _mm512_shuffle_i32x4(r[c + 8], r[c + 12], 0x88);
        __m512i x = _mm512_shuffle_i32x4(r[c], r[c + 4], 0xdd); /* groups 1, 3 */
        __m512i y = _mm512_shuffle_i32x4(r[c + 8], r[c + 12], 0xdd);

        t[c] = _mm512_shuffle_i32x4(a, b, 0x88);
        t[c + 4] = _mm512_shuffle_i32x4(x, y, 0x88);
        t[c + 8] = _mm512_shuffle_i32x4(a, b, 0xdd);
        t[c + 12] = _mm512_shuffle_i32x4(x, y, 0xdd);
    }
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) {
        r[i] = t[i];
    }
}

/* The first n of `width` lanes; none for n below zero. */
KN_INLINE uint32_t lanes(int n, int width)
{
    return n <= 0 ? 0 : (uint32_t)(((uint64_t)1 << BT_MIN(n, width)) - 1);
}

/* Queries of all groups, inputs and rows beyond the real ones zero. */
static void load_q(const struct item *it)
{
    const struct kn_attention_args *a = it->of.a;
    v16 scale = v16_set1(a->scale * 0x1.715476p+0f);
    char *out = it->work.q;

    for (int r0 = 0; r0 < it->of.n_rows; r0 += ROWS) {
        for (int b = 0; b < it->n_in; b++, out += PAIR) {
            int n0 = BT_MIN(16, it->d - 32 * b), n1 = BT_MIN(16, it->d - 32 * b - n0);
            __m512i hi[ROWS], lo[ROWS];

            for (int r = 0; r < ROWS; r++) {
                v16 x = v16_zero(), y = v16_zero();

                if (r0 + r < it->of.n_rows) {
                    const float *q = a->q + kn_attn_row_offset(&it->of, r0 + r, a->q_stride);

                    x = v16_load_n(q + 32 * b, n0);
                    y = v16_load_n(q + 32 * b + n0, n1);
                }
                split32(v16_mul(x, scale), v16_mul(y, scale), false, &hi[r], &lo[r]);
            }
            transpose16(hi);
            transpose16(lo);
            for (int i = 0; i < 16; i++) {
                _mm512_store_si512(out + i * KN_TILE_ROW, hi[i]);
                _mm512_store_si512(out + CELL + i * KN_TILE_ROW, lo[i]);
            }
        }
    }
}

static void load_k(const struct item *it, const uint16_t *const *k)
{
    char *out = it->work.k;

    for (int j = 0; j < TILE; j += 16) {
        for (int b = 0; b < it->n_in; b++, out += PAIR) {
            __mmask16 m0 = (__mmask16)lanes(it->d - 32 * b, 16);
            __mmask16 m1 = (__mmask16)lanes(it->d - 32 * b - 16, 16);

            for (int r = 0; r < 16; r++) {
                const uint16_t *x = k[j + r] + 32 * b;

                split32_f16(_mm256_maskz_loadu_epi16(m0, x), _mm256_maskz_loadu_epi16(m1, x + 16),
                            out + r * KN_TILE_ROW, out + CELL + r * KN_TILE_ROW);
            }
        }
    }
}

/* 16 columns of V by 32 positions: columns 8 g + at .. + 3 of 32 (g = 0..3) are row 4 g of `r`. */
KN_INLINE void store_v(__m512i *r, char *cells, int at)
{
    transpose16(r);
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) {
        int col = i / 4 * 8 + i % 4 + at;
        char *out = cells + (size_t)(col / 16) * 2 * PAIR + (size_t)(col % 16) * KN_TILE_ROW;

        /* Halves come cheaper from memory than out of a register. */
        _mm512_store_si512(out, r[i]);
        split32_f16(_mm256_load_si256((__m256i *)out), _mm256_load_si256((__m256i *)(out + 32)),
                    out, out + CELL);
    }
}

static void load_v(const struct item *it, const uint16_t *const *v)
{
    for (int c = 0; c < it->d; c += 32) {
        __mmask32 mask = lanes(it->d - c, 32);
        char *cells = it->work.v + (size_t)(c / 16) * 2 * PAIR;

        for (int b = 0; b < 2; b++, cells += PAIR) {
            __m512i lo[16], hi[16]; /* pairs of positions, half of the columns each */

#pragma GCC unroll 16
            for (int j = 0; j < 16; j++) {
                __m512i even = _mm512_maskz_loadu_epi16(mask, v[32 * b + 2 * j] + c);
                __m512i odd = _mm512_maskz_loadu_epi16(mask, v[32 * b + 2 * j + 1] + c);

                lo[j] = _mm512_unpacklo_epi16(even, odd);
                hi[j] = _mm512_unpackhi_epi16(even, odd);
            }
            store_v(lo, cells, 0);
            store_v(hi, cells, 4);
        }
    }
}

/* Positions [pos, pos + n) of the item's key head; pages hold at least 8 neighbours each. */
static void load_tile(const struct item *it, int pos, int n)
{
    const struct kn_attention_args *a = it->of.a;
    const uint16_t *k[TILE], *v[TILE];

    for (int j = 0; j < TILE; j++) {
        k[j] = zeros;
        v[j] = zeros;
    }
    for (int j = 0; j < n; j += 8) {
        struct kn_kv_at at = kn_kv_at((void *)a->kv, a->layout, a->layer, it->of.seq->pages,
                                      pos + j, it->of.kv_head);

        for (int r = j; r < BT_MIN(n, j + 8); r++) {
            k[r] = (const uint16_t *)at.k + (size_t)(r - j) * (size_t)it->d;
            v[r] = (const uint16_t *)at.v + (size_t)(r - j) * (size_t)it->d;
        }
    }
    load_k(it, k);
    load_v(it, v);
}

/* c = (or +=) A B for four rows of cells of A, `step` bytes apart, and one column of B: a decode
 * step. Products that follow each other go to different sums, so that none waits for the last. */
KN_INLINE void
four_by_one(float *c, const char *a, size_t step, const char *b, int blocks, bool add)
{
    kn_tile_begin_sums(c, c + 512, add);
    for (int i = 0; i < 3 * blocks; i++) { /* hi lo, hi hi, lo hi */
        const char *x = a + (size_t)(i / 3) * PAIR + (i % 3 == 2 ? CELL : 0);

        KN_TILE_LOAD(4, b + (size_t)(i / 3) * PAIR + (i % 3 == 0 ? CELL : 0), KN_TILE_ROW);
        KN_TILE_LOAD(6, x, KN_TILE_ROW);
        KN_TILE_DOT_BF16(0, 6, 4);
        KN_TILE_LOAD(7, x + step, KN_TILE_ROW);
        KN_TILE_DOT_BF16(1, 7, 4);
        KN_TILE_LOAD(6, x + 2 * step, KN_TILE_ROW);
        KN_TILE_DOT_BF16(2, 6, 4);
        KN_TILE_LOAD(7, x + 3 * step, KN_TILE_ROW);
        KN_TILE_DOT_BF16(3, 7, 4);
    }
    KN_TILE_STORE(0, c, KN_TILE_ROW);
    KN_TILE_STORE(1, c + 256, KN_TILE_ROW);
    KN_TILE_STORE(2, c + 512, KN_TILE_ROW);
    KN_TILE_STORE(3, c + 768, KN_TILE_ROW);
}

/* The same for two rows of cells and two columns of B: each cell is read once. */
KN_INLINE void two_by_two(
    float *const c[2], const char *a, size_t step, const char *const b[2], int blocks, bool add)
{
    kn_tile_begin_sums(c[0], c[1], add);
    for (size_t i = 0; i < (size_t)blocks * PAIR; i += PAIR) {
        KN_TILE_LOAD(4, b[0] + i + CELL, KN_TILE_ROW);
        KN_TILE_LOAD(6, a + i, KN_TILE_ROW);
        KN_TILE_DOT_BF16(0, 6, 4);
        KN_TILE_LOAD(7, a + i + step, KN_TILE_ROW);
        KN_TILE_DOT_BF16(1, 7, 4);
        KN_TILE_LOAD(5, b[1] + i + CELL, KN_TILE_ROW);
        KN_TILE_DOT_BF16(2, 6, 5);
        KN_TILE_DOT_BF16(3, 7, 5);

        KN_TILE_LOAD(4, b[0] + i, KN_TILE_ROW);
        KN_TILE_DOT_BF16(0, 6, 4);
        KN_TILE_DOT_BF16(1, 7, 4);
        KN_TILE_LOAD(5, b[1] + i, KN_TILE_ROW);
        KN_TILE_DOT_BF16(2, 6, 5);
        KN_TILE_DOT_BF16(3, 7, 5);

        KN_TILE_LOAD(6, a + i + CELL, KN_TILE_ROW);
        KN_TILE_DOT_BF16(0, 6, 4);
        KN_TILE_LOAD(7, a + i + step + CELL, KN_TILE_ROW);
        KN_TILE_DOT_BF16(1, 7, 4);
        KN_TILE_DOT_BF16(2, 6, 5);
        KN_TILE_DOT_BF16(3, 7, 5);
    }
    KN_TILE_STORE(0, c[0], KN_TILE_ROW);
    KN_TILE_STORE(1, c[0] + 256, KN_TILE_ROW);
    KN_TILE_STORE(2, c[1], KN_TILE_ROW);
    KN_TILE_STORE(3, c[1] + 256, KN_TILE_ROW);
}

/* n_a rows of cells (a multiple of four, or of two for two columns) by one or two columns. */
static void product(float *const c[2],
                    const char *a,
                    int n_a,
                    size_t step,
                    const char *const b[2],
                    int blocks,
                    int n_b,
                    bool add)
{
    if (n_b == 1) {
        for (int t = 0; t < n_a; t += 4) {
            four_by_one(c[0] + t * ROWS * ROWS, a + (size_t)t * step, step, b[0], blocks, add);
        }
        return;
    }
    for (int t = 0; t < n_a; t += 2) {
        float *const sums[2] = {c[0] + t * ROWS * ROWS, c[1] + t * ROWS * ROWS};

        two_by_two(sums, a + (size_t)t * step, step, b, blocks, add);
    }
}

/* 2^x, x <= 0: a polynomial of degree 5 for what is above the integer below x (relative error
 * 2^-23.5, minimax on [0, 1] with 2^0 = 1), then the exponent. 0 for -inf. */
KN_INLINE v16 exp2_neg(v16 x)
{
    v16 f = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
    v16 p = v16_set1(0x1.e97516p-10f);

    p = v16_fma(p, f, v16_set1(0x1.27784ep-7f));
    p = v16_fma(p, f, v16_set1(0x1.c91ce8p-5f));
    p = v16_fma(p, f, v16_set1(0x1.ebdb56p-3f));
    p = v16_fma(p, f, v16_set1(0x1.62e4bap-1f));
    p = v16_fma(p, f, v16_set1(1.0f));
    return _mm512_scalef_ps(p, x);
}

/* The largest score of each lane among n positions; minus infinity is put where a lane sees
 * nothing. `valid` counts positions from the tile's first, NULL where every lane sees all. */
KN_INLINE v16 max_score(float *s, const __m512i *valid, int n)
{
    v16 max[4];

#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        max[i] = v16_set1(-INFINITY);
    }
    for (int j = 0; j < n; j += 4) {
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            v16 x = v16_load(s + (j + i) * ROWS);

            if (valid) {
                __mmask16 seen = _mm512_cmpgt_epi32_mask(*valid, _mm512_set1_epi32(j + i));

                x = _mm512_mask_mov_ps(v16_set1(-INFINITY), seen, x);
                v16_store(s + (j + i) * ROWS, x);
            }
            max[i] = v16_max(max[i], x);
        }
    }
    return v16_max(v16_max(max[0], max[1]), v16_max(max[2], max[3]));
}

/* The upper halves of two positions' lanes as pairs. */
KN_INLINE __m512i pairs(__m512i even, __m512i odd)
{
    return _mm512_mask_blend_epi16(0xaaaaaaaa, _mm512_srli_epi32(even, 16), odd);
}

/* Weights of two positions, split and paired; their sums go to sum[0] and sum[1]. */
KN_INLINE void weigh2(const float *s, v16 m, v16 *sum, char *out)
{
    v16 e = exp2_neg(v16_sub(v16_load(s), m)), o = exp2_neg(v16_sub(v16_load(s + ROWS), m));
    v16 he = round_bf16(e), ho = round_bf16(o);
    __m512i half = _mm512_set1_epi32(0x8000);
    __m512i le = _mm512_add_epi32(_mm512_castps_si512(v16_sub(e, he)), half);
    __m512i lo = _mm512_add_epi32(_mm512_castps_si512(v16_sub(o, ho)), half);

    sum[0] = v16_add(sum[0], e);
    sum[1] = v16_add(sum[1], o);
    _mm512_store_si512(out, pairs(_mm512_castps_si512(he), _mm512_castps_si512(ho)));
    _mm512_store_si512(out + CELL, pairs(le, lo));
}

/* Scores s of n (constant) positions of group g to weights p; brings m, l and o up to the new
 * maximum. */
KN_INLINE void soften(const struct item *it, int g, float *s, char *p, const __m512i *valid, int n)
{
    const struct work *w = &it->work;
    v16 old = v16_load(w->m + g * ROWS), m = v16_max(max_score(s, valid, n), old);
    v16 c = exp2_neg(v16_sub(old, m)), sum[4];

#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        sum[i] = v16_zero();
    }
    for (int j = 0; j < n; j += 4) {
        /* Where pack_high puts these positions of V: 4 g.. of 16 and 4 g.. of the next 16. */
        int pair = j % 16 / 4 * 4 + j % 32 / 16 * 2;
        char *out = p + (size_t)(j / 32) * PAIR + (size_t)pair * KN_TILE_ROW;

        weigh2(s + j * ROWS, m, sum, out);
        weigh2(s + (j + 2) * ROWS, m, sum + 2, out + KN_TILE_ROW);
    }
    sum[0] = v16_add(v16_add(sum[0], sum[1]), v16_add(sum[2], sum[3]));
    v16_store(w->l + g * ROWS, v16_fma(v16_load(w->l + g * ROWS), c, sum[0]));
    v16_store(w->m + g * ROWS, m);
    if (_mm512_cmpneq_ps_mask(old, m)) { /* else every c is 1 */
        float *o = w->o + (size_t)g * ROWS * ROWS * (size_t)it->n_out;

        for (int i = 0; i < it->n_out * ROWS; i++) {
            v16_store(o + i * ROWS, v16_mul(v16_load(o + i * ROWS), c));
        }
    }
}

/* Soften of group g in the tile at pos, or its first half: with a mask only where the diagonal
 * crosses it. */
static void soften_at(const struct item *it, int g, float *s, char *p, int pos, bool half)
{
    int first = g * ROWS, last = BT_MIN(first + ROWS, it->of.n_rows) - 1;
    int32_t n[ROWS];
    __m512i valid;

    if (!half && kn_attn_row_pos(&it->of, first) >= pos + TILE - 1) {
        soften(it, g, s, p, NULL, TILE);
        return;
    }
    for (int r = 0; r < ROWS; r++) { /* lanes beyond the last row do as it does */
        n[r] = kn_attn_row_pos(&it->of, BT_MIN(first + r, last)) + 1 - pos;
    }
    valid = _mm512_loadu_si512(n);
    if (half) {
        soften(it, g, s, p, &valid, TILE / 2);
    } else {
        soften(it, g, s, p, &valid, TILE);
    }
}

/* Groups g and, if n is 2, g + 1 over the tile at pos, of which their last row sees `seen`
 * positions. A second half that no row sees is left out: its weights would all be zero. */
static void groups_by_tile(const struct item *it, int g, int n, int pos, int seen)
{
    const struct work *w = &it->work;
    size_t q = PAIR * (size_t)it->n_in, o = (size_t)ROWS * ROWS * (size_t)it->n_out;
    bool half = seen <= TILE / 2;
    float *const scores[2] = {w->s, w->s + TILE * ROWS};
    float *const sums[2] = {w->o + o * (size_t)g, w->o + o * (size_t)(g + 1)};
    const char *const queries[2] = {w->q + q * (size_t)g, w->q + q * (size_t)(g + 1)};
    const char *const weights[2] = {w->p, w->p + 2 * PAIR};

    product(scores, w->k, half && n == 2 ? 2 : 4, q, queries, it->n_in, n, false);
    for (int i = 0; i < n; i++) {
        soften_at(it, g + i, scores[i], w->p + (size_t)i * 2 * PAIR, pos, half);
    }
    product(sums, w->v, it->n_out, 2 * PAIR, weights, half ? 1 : 2, n, true);
}

/* o / l of group g to its rows. */
static void finish(const struct item *it, int g)
{
    const struct kn_attention_args *a = it->of.a;
    v16 l = v16_load(it->work.l + g * ROWS);

    for (int t = 0; t * 16 < it->d; t++) {
        const float *o = it->work.o + (size_t)(g * it->n_out + t) * ROWS * ROWS;
        __m512i r[ROWS];

        for (int i = 0; i < ROWS; i++) {
            r[i] = _mm512_castps_si512(v16_div(v16_load(o + i * ROWS), l));
        }
        transpose16(r);
        for (int i = 0; i < BT_MIN(ROWS, it->of.n_rows - g * ROWS); i++) {
            float *out = a->out + kn_attn_row_offset(&it->of, g * ROWS + i, a->out_stride);

            v16_store_n(out + 16 * t, _mm512_castsi512_ps(r[i]), BT_MIN(16, it->d - 16 * t));
        }
    }
}

static void run_item(const struct item *it)
{
    int end = kn_attn_row_pos(&it->of, it->of.n_rows - 1) + 1; /* the last row sees most */
    int groups = (int)BT_DIV_UP(it->of.n_rows, ROWS);

    configure();
    memset(it->work.v, 0, 2 * PAIR * (size_t)it->n_out);
    memset(it->work.o, 0, (size_t)groups * ROWS * ROWS * (size_t)it->n_out * sizeof(float));
    for (int i = 0; i < groups * ROWS; i++) {
        it->work.m[i] = -INFINITY;
        it->work.l[i] = 0;
    }
    load_q(it);
    for (int pos = 0; pos < end; pos += TILE) {
        load_tile(it, pos, BT_MIN(TILE, end - pos));
        for (int g = 0; g < groups; g += 2) {
            int n = BT_MIN(2, groups - g), last = BT_MIN((g + n) * ROWS, it->of.n_rows) - 1;
            int seen = kn_attn_row_pos(&it->of, last) + 1 - pos;

            if (seen > 0) {
                groups_by_tile(it, g, n, pos, seen);
            }
        }
    }
    for (int g = 0; g < groups; g++) {
        finish(it, g);
    }
    kn_tile_release();
}

struct job {
    const struct kn_attention_args *a;
    char *scratch;
    int n_in, n_out;
    int groups; /* of an item at most */
};

static void attention_item(void *arg, int item, int member)
{
    const struct job *j = arg;
    struct item it = {.of = kn_attn_item_at(j->a, j->groups * ROWS, item),
                      .d = j->a->layout->head_dim,
                      .n_in = j->n_in,
                      .n_out = j->n_out};

    it.work = lay_work(j->scratch + (size_t)member * KN_THREAD_SCRATCH_BYTES, j->n_in, j->n_out,
                       j->groups);
    run_item(&it);
}

void KN_V(tile_attention)(struct kn_stream *stream, const struct kn_attention_args *a)
{
    int d = a->layout->head_dim;
    struct job j = {.a = a,
                    .scratch = stream->thread_scratch,
                    .n_in = (int)BT_DIV_UP(d, 32),
                    .n_out = (int)BT_DIV_UP(d, 64) * 4};

    if (a->layout->dtype != KV_DTYPE_F16) {
        KN_V(attention)(stream, a);
        return;
    }
    j.groups = groups_of(j.n_in, j.n_out);
    while (j.groups > 2 && kn_attn_n_items(a, j.groups * ROWS) < 4 * kn_team_size(stream->team)) {
        j.groups /= 2; /* enough items to share out evenly; K and V are converted more often */
    }
    kn_team_run(stream->team, kn_attn_n_items(a, j.groups * ROWS), attention_item, &j);
}
