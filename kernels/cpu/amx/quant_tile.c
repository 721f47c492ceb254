/* Quantized tiles with AMX: the integer products of a block of 32 inputs, 12 rows and 16 outputs
 * are one TDPBSSD, so what is left to the vector units is scaling.
 *
 * The integers are exact and the floating-point part is that of the other sets, so the bits are
 * equal too. A tile's weights are first spread to signed bytes in the member's scratch (Q4_0's -8
 * and Q8_0's +128 are taken off there), [K/32][8][64]: once for all rows. Products are
 * started three blocks before they are scaled. Few rows go the VNNI way, where the spreading would
 * not pay. */
#include "kernels/cpu/amx/tile.h"
#include "kernels/cpu/pack.h"
#include "kernels/cpu/vec/vec.h"

#define MIN_ROWS     12
#define SPREAD_BYTES 512 /* of a block */

/* The VNNI kernel; same contract. */
void kn_avx512_quant_tile(const struct kn_tile_job *j);

/* Tiles: 0..3 products [12 rows][16]; 4 activations [12][32]; 5 weights [8][16][4]. */
static void configure(int rows)
{
    struct kn_tilecfg c = {.palette = 1};

    for (int i = 0; i < 6; i++) {
        c.row_bytes[i] = i == 4 ? KN_QBLOCK : KN_TILE_ROW;
        c.rows[i] = (uint8_t)(i < 5 ? rows : KN_QBLOCK / 4);
    }
    kn_tile_configure(&c);
}

static void spread(const struct kn_tile_job *j, int8_t *out)
{
    size_t blocks = (size_t)j->k / KN_QBLOCK;
    const char *w = j->tile;
    __m512i low = _mm512_set1_epi8(15), off = _mm512_set1_epi8(j->dtype == BT_DTYPE_Q4_0 ? 8 : 0);

    if (j->dtype == BT_DTYPE_Q8_0) {
        for (size_t i = 0; i < blocks * 8; i++) {
            __m512i v = _mm512_loadu_si512(w + 64 * i);

            _mm512_storeu_si512(out + 64 * i, _mm512_xor_si512(v, _mm512_set1_epi8(-128)));
        }
        return;
    }
    for (size_t b = 0; b < blocks; b++, out += SPREAD_BYTES, w += 256) {
        for (int i = 0; i < 4; i++) {
            __m512i v = _mm512_loadu_si512(w + 64 * i);
            __m512i lo = _mm512_and_si512(v, low);
            __m512i hi = _mm512_and_si512(_mm512_srli_epi16(v, 4), low);

            _mm512_storeu_si512(out + 64 * i, _mm512_sub_epi8(lo, off));
            _mm512_storeu_si512(out + 64 * (i + 4), _mm512_sub_epi8(hi, off));
        }
    }
}

/* Scales the products of one block for n (constant) rows into acc. */
KN_INLINE void scale(enum bt_dtype t,
                     const struct kn_acts *x,
                     const char *scales,
                     const int32_t *dot,
                     int n,
                     __m512 *acc)
{
    __m512 d = v16_load_f16((const uint16_t *)scales), m = _mm512_setzero_ps();

    if (t == BT_DTYPE_Q4_1) {
        m = v16_load_f16((const uint16_t *)scales + KN_TILE);
    }
#pragma GCC unroll 12
    for (int r = 0; r < n; r++) {
        __m512 s = _mm512_cvtepi32_ps(_mm512_load_si512(dot + r * KN_TILE));

        s = _mm512_mul_ps(s, _mm512_set1_ps(x->scale[r]));
        acc[r] = _mm512_fmadd_ps(s, d, acc[r]);
        if (t == BT_DTYPE_Q4_1) {
            acc[r] = _mm512_fmadd_ps(_mm512_set1_ps(x->ssum[r]), m, acc[r]);
        }
    }
}

/* Step i (literal) of a round of four blocks: starts the product of the block AHEAD further on in
 * its tile, stores the one started a step before, and scales this one, whose product was stored two
 * steps ago: loads from memory just stored by a tile wait for the cache. */
#define AHEAD 3
#define STEP(i, next, last)                                                                        \
    do {                                                                                           \
        if (b + (i) >= blocks) {                                                                   \
            break;                                                                                 \
        }                                                                                          \
        if (b + (i) + AHEAD < blocks) {                                                            \
            START(next, (i) + AHEAD);                                                              \
        }                                                                                          \
        if (b + (i) + AHEAD - 1 < blocks) {                                                        \
            KN_TILE_STORE(last, dot[last], KN_TILE_ROW);                                           \
        }                                                                                          \
        scale(t, x + (i), scales + (i)*sb, dot[i], n, acc);                                        \
    } while (0)
#define START(c, i)                                                                                \
    do {                                                                                           \
        KN_TILE_ZERO(c);                                                                           \
        KN_TILE_LOAD(4, x[i].q, KN_QBLOCK);                                                        \
        KN_TILE_LOAD(5, w + (i)*SPREAD_BYTES, KN_TILE_ROW);                                        \
        KN_TILE_DOT_I8(c, 4, 5);                                                                   \
    } while (0)

/* One group of rows, n (constant) computed, `real` of them stored. */
KN_INLINE void
group(const struct kn_tile_job *j, enum bt_dtype t, const int8_t *w, int row, int n, int real)
{
    size_t blocks = (size_t)j->k / KN_QBLOCK, sb = kn_tile_scale_bytes(t), b = 0;
    const char *scales = j->tile + blocks * kn_tile_quant_bytes(t);
    const struct kn_acts *x = j->acts + (size_t)(row / KN_GROUP) * blocks;
    BT_ALIGNED(64) int32_t dot[4][KN_GROUP * KN_TILE];
    __m512 acc[KN_GROUP];

#pragma GCC unroll 12
    for (int r = 0; r < n; r++) {
        acc[r] = _mm512_setzero_ps();
    }
    START(0, 0);
    KN_TILE_STORE(0, dot[0], KN_TILE_ROW);
    if (blocks > 1) {
        START(1, 1);
        KN_TILE_STORE(1, dot[1], KN_TILE_ROW);
    }
    if (blocks > 2) {
        START(2, 2);
    }
    for (; b < blocks; b += 4, x += 4, w += 4 * SPREAD_BYTES, scales += 4 * sb) {
        STEP(0, 3, 2);
        STEP(1, 0, 3);
        STEP(2, 1, 0);
        STEP(3, 2, 1);
    }
#pragma GCC unroll 12
    for (int r = 0; r < n; r++) {
        if (r < real) {
            kn_tile_finish(j, row + r, acc[r]);
        }
    }
}

KN_INLINE void tile_of(const struct kn_tile_job *j, enum bt_dtype t)
{
    const int8_t *w = j->scratch;
    int row = 0, left;

    spread(j, j->scratch);
    if (j->n_rows >= KN_GROUP) {
        configure(KN_GROUP);
    }
    for (; row + KN_GROUP <= j->n_rows; row += KN_GROUP) {
        group(j, t, w, row, KN_GROUP, KN_GROUP);
    }
    left = j->n_rows - row;
    if (left > 0) { /* what the rows beyond hold is computed and dropped */
        configure(left > 8 ? KN_GROUP : left > 4 ? 8 : 4);
        if (left > 8) {
            group(j, t, w, row, KN_GROUP, left);
        } else if (left > 4) {
            group(j, t, w, row, 8, left);
        } else {
            group(j, t, w, row, 4, left);
        }
    }
    kn_tile_release();
}

void KN_V(quant_tile)(const struct kn_tile_job *j)
{
    if (j->n_rows < MIN_ROWS || (size_t)j->k / KN_QBLOCK * SPREAD_BYTES > KN_THREAD_SCRATCH_BYTES) {
        kn_avx512_quant_tile(j);
    } else if (j->dtype == BT_DTYPE_Q8_0) {
        tile_of(j, BT_DTYPE_Q8_0);
    } else if (j->dtype == BT_DTYPE_Q4_0) {
        tile_of(j, BT_DTYPE_Q4_0);
    } else {
        tile_of(j, BT_DTYPE_Q4_1);
    }
}
