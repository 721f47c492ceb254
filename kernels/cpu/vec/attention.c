/* Causal attention over paged K and V, online softmax.
 *
 * A query at position p walks tiles of 64 absolute positions [0, 64), [64, 128), .. up to p:
 *     s[j] = scale * (chain of fused products over D, ascending), one position a lane
 *     m'   = max(m, max s);  c = e^(m - m');  w[j] = e^(s[j] - m')
 *     l    = l c + (sum of w in 4 x 16 lanes: 0+16+32+48 ascending, then v16_sum's tree)
 *     o    = o c + (chain of fused products w[j] V[j], j ascending)
 * and ends with o / l. Tiles lie at absolute positions, lanes past p count for nothing, so the
 * order knows nothing of chunks, pages or batch neighbours.
 *
 * Work: an item is up to 64 (query, head) rows of one sequence that share a key head. For each tile
 * K is transposed to [D][64] f32 and V widened to [64][D] f32 in the member's scratch (gathered
 * from the pages there), then rows go over it up to ATT_ROWS at a time: the tile is converted once
 * for all rows. Decode is the same with as many rows as heads share the key head. */
#include "kernels/cpu/kv.h"
#include "kernels/cpu/vec/attn_item.h"
#include "kernels/cpu/vec/vec.h"

#define TILE      64
#define ITEM_ROWS 64

#if defined(__AVX512F__)
#define ATT_ROWS 4
#else
#define ATT_ROWS 1
#endif

/* Scratch of one member; KN_THREAD_SCRATCH_BYTES holds it for any head size. */
struct work {
    float *kt; /* [D][TILE] */
    float *v;  /* [TILE][D16], D16 = D rounded up to 16; the padding is zero */
    float *o;  /* [ITEM_ROWS][D16] */
    float *w;  /* [ATT_ROWS][TILE] scores, then weights */
    float *m;  /* [ITEM_ROWS] */
    float *l;  /* [ITEM_ROWS] */
};

_Static_assert((2 * KN_MAX_HEAD_DIM * TILE + ITEM_ROWS * KN_MAX_HEAD_DIM + ATT_ROWS * TILE +
                2 * ITEM_ROWS) *
                       sizeof(float) <=
                   KN_THREAD_SCRATCH_BYTES,
               "thread scratch");

struct item {
    struct kn_attn_item of;
    int d, d16;
    struct work work;
};

static struct work lay_work(char *p, int d, int d16)
{
    struct work w;

    w.kt = (float *)p;
    w.v = w.kt + (size_t)d * TILE;
    w.o = w.v + (size_t)d16 * TILE;
    w.w = w.o + (size_t)d16 * ITEM_ROWS;
    w.m = w.w + ATT_ROWS * TILE;
    w.l = w.m + ITEM_ROWS;
    return w;
}

KN_INLINE v16 load_kv(enum kv_dtype t, const void *row, int i, int n)
{
    uint16_t half[16] = {0};

    if (t == KV_DTYPE_F32) {
        return v16_load_n((const float *)row + i, n);
    }
    if (n == 16) {
        return v16_load_f16((const uint16_t *)row + i);
    }
    memcpy(half, (const uint16_t *)row + i, (size_t)n * sizeof(half[0]));
    return v16_load_f16(half);
}

/* 8 x 8 transpose of a[i][*] into out rows of distance TILE. */
KN_INLINE void transpose8(const __m256 *a, float *out)
{
    __m256 b[8], c[8];

    for (int i = 0; i < 4; i++) {
        b[2 * i] = _mm256_unpacklo_ps(a[2 * i], a[2 * i + 1]);
        b[2 * i + 1] = _mm256_unpackhi_ps(a[2 * i], a[2 * i + 1]);
    }
    for (int i = 0; i < 2; i++) {
        c[4 * i] = _mm256_shuffle_ps(b[4 * i], b[4 * i + 2], 0x44);
        c[4 * i + 1] = _mm256_shuffle_ps(b[4 * i], b[4 * i + 2], 0xee);
        c[4 * i + 2] = _mm256_shuffle_ps(b[4 * i + 1], b[4 * i + 3], 0x44);
        c[4 * i + 3] = _mm256_shuffle_ps(b[4 * i + 1], b[4 * i + 3], 0xee);
    }
    for (int i = 0; i < 4; i++) {
        _mm256_storeu_ps(out + (size_t)i * TILE, _mm256_permute2f128_ps(c[i], c[i + 4], 0x20));
        _mm256_storeu_ps(out + (size_t)(i + 4) * TILE,
                         _mm256_permute2f128_ps(c[i], c[i + 4], 0x31));
    }
}

/* A row whose loads are not waited for any more (kernels/engine/engine.c, on_layer_wait) reads
 * pages that a load still writes; what it computes is dropped. */
#define READS_PAGES __attribute__((no_sanitize("thread")))

/* Eight positions of K, n of them real, into 8 columns of kt. */
READS_PAGES static void
load_k8(const struct item *it, enum kv_dtype t, const char *k, int n, float *out)
{
    size_t row = (size_t)it->d * (t == KV_DTYPE_F16 ? 2 : 4);

    for (int i = 0; i < it->d; i += 16) {
        int width = BT_MIN(16, it->d - i);
        __m256 lo[8], hi[8];

        for (int j = 0; j < 8; j++) {
            v16 x = j < n ? load_kv(t, k + (size_t)j * row, i, width) : v16_zero();

            lo[j] = v16_lo(x);
            hi[j] = v16_hi(x);
        }
        if (width == 16) {
            transpose8(lo, out + (size_t)i * TILE);
            transpose8(hi, out + (size_t)(i + 8) * TILE);
        } else { /* the last piece of an odd head size: through memory */
            float tmp[16 * TILE];

            transpose8(lo, tmp);
            transpose8(hi, tmp + 8 * TILE);
            for (int c = 0; c < width; c++) {
                memcpy(out + (size_t)(i + c) * TILE, tmp + c * TILE, 8 * sizeof(float));
            }
        }
    }
}

/* Positions [pos, pos + n) of the item's key head; pages hold at least 8 neighbours each. */
KN_INLINE void load_tile(const struct item *it, enum kv_dtype t, int pos, int n)
{
    const struct kn_attention_args *a = it->of.a;
    size_t row = (size_t)it->d * (t == KV_DTYPE_F16 ? 2 : 4);

    for (int j = 0; j < n; j += 8) {
        struct kn_kv_at at = kn_kv_at((void *)a->kv, a->layout, a->layer, it->of.seq->pages,
                                      pos + j, it->of.kv_head);
        int real = BT_MIN(8, n - j);

        load_k8(it, t, at.k, real, it->work.kt + j);
        for (int r = 0; r < real; r++) {
            const char *v = (const char *)at.v + (size_t)r * row;

            for (int i = 0; i < it->d16; i += 16) {
                int width = BT_MIN(16, it->d - i);

                v16_store(it->work.v + (size_t)(j + r) * (size_t)it->d16 + i,
                          load_kv(t, v, i, width));
            }
        }
    }
}

/* Scores of n (constant) rows against the 64 positions. */
KN_INLINE void scores(const struct item *it, int r0, int n)
{
    const struct kn_attention_args *a = it->of.a;
    const float *kt = it->work.kt;
    const float *q[ATT_ROWS];
    v16 s[ATT_ROWS][4];

#pragma GCC unroll 4
    for (int r = 0; r < n; r++) {
        q[r] = a->q + kn_attn_row_offset(&it->of, r0 + r, a->q_stride);
#pragma GCC unroll 4
        for (int c = 0; c < 4; c++) {
            s[r][c] = v16_zero();
        }
    }
    for (int i = 0; i < it->d; i++, kt += TILE) {
        v16 k[4];

#pragma GCC unroll 4
        for (int c = 0; c < 4; c++) {
            k[c] = v16_load(kt + 16 * c);
        }
#pragma GCC unroll 4
        for (int r = 0; r < n; r++) {
            v16 x = v16_set1(q[r][i]);

#pragma GCC unroll 4
            for (int c = 0; c < 4; c++) {
                s[r][c] = v16_fma(x, k[c], s[r][c]);
            }
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < n; r++) {
#pragma GCC unroll 4
        for (int c = 0; c < 4; c++) {
            v16_store(it->work.w + r * TILE + 16 * c, s[r][c]);
        }
    }
}

/* Scores to weights for one row with n valid positions; brings m, l and o up to the new maximum. */
static void soften(const struct item *it, int r, float *w, int n)
{
    struct work k = it->work;
    v16 s[4], max = v16_set1(-INFINITY), sum = v16_zero(), scale = v16_set1(it->of.a->scale);
    float m, c;

    for (int i = 0; i < 4; i++) {
        int valid = BT_MIN(16, n - 16 * i);

        valid = BT_MAX(valid, 0);
        s[i] = v16_fill_from(v16_mul(v16_load(w + 16 * i), scale), valid, -INFINITY);
        max = v16_max(max, s[i]);
    }
    m = v16_hmax(max);
    m = k.m[r] > m ? k.m[r] : m;
    for (int i = 0; i < 4; i++) {
        s[i] = v16_exp(v16_sub(s[i], v16_set1(m)));
        sum = v16_add(sum, s[i]);
        v16_store(w + 16 * i, s[i]);
    }
    c = _mm_cvtss_f32(_mm256_castps256_ps128(v16_lo(v16_exp(v16_set1(k.m[r] - m)))));
    k.l[r] = k.l[r] * c + v16_sum(sum);
    if (k.m[r] != m) { /* else c is 1 */
        float *o = k.o + (size_t)r * (size_t)it->d16;

        for (int i = 0; i < it->d16; i += 16) {
            v16_store(o + i, v16_mul(v16_load(o + i), v16_set1(c)));
        }
    }
    k.m[r] = m;
}

/* o += weights by V for n (constant) rows, `width` (constant, 16-lane pieces) from column i. */
KN_INLINE void add_v(const struct item *it, int r0, int n, int valid, int i, int width)
{
    size_t d16 = (size_t)it->d16;
    const float *v = it->work.v + i, *w = it->work.w;
    float *o = it->work.o + (size_t)r0 * d16 + i;
    v16 acc[ATT_ROWS][4];

#pragma GCC unroll 4
    for (int r = 0; r < n; r++) {
#pragma GCC unroll 4
        for (int c = 0; c < width; c++) {
            acc[r][c] = v16_load(o + (size_t)r * d16 + 16 * c);
        }
    }
    for (int j = 0; j < valid; j++, v += d16) {
        v16 x[4];

#pragma GCC unroll 4
        for (int c = 0; c < width; c++) {
            x[c] = v16_load(v + 16 * c);
        }
#pragma GCC unroll 4
        for (int r = 0; r < n; r++) {
            v16 p = v16_set1(w[r * TILE + j]);

#pragma GCC unroll 4
            for (int c = 0; c < width; c++) {
                acc[r][c] = v16_fma(p, x[c], acc[r][c]);
            }
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < n; r++) {
#pragma GCC unroll 4
        for (int c = 0; c < width; c++) {
            v16_store(o + (size_t)r * d16 + 16 * c, acc[r][c]);
        }
    }
}

/* n (constant) rows that see the same `valid` positions of the tile. */
KN_INLINE void rows_by_tile(const struct item *it, int r0, int n, int valid)
{
    int i = 0;

    scores(it, r0, n);
    for (int r = 0; r < n; r++) {
        soften(it, r0 + r, it->work.w + r * TILE, valid);
    }
    for (; i + 64 <= it->d16; i += 64) {
        add_v(it, r0, n, valid, i, 4);
    }
    for (; i < it->d16; i += 16) {
        add_v(it, r0, n, valid, i, 1);
    }
}

/* n rows from r that see the same positions; not inlined, so that each count is compiled once. */
static void __attribute__((noinline)) same_rows(const struct item *it, int r, int n, int valid)
{
    switch (n) {
#if ATT_ROWS > 1
    case 4:
        rows_by_tile(it, r, 4, valid);
        break;
    case 3:
        rows_by_tile(it, r, 3, valid);
        break;
    case 2:
        rows_by_tile(it, r, 2, valid);
        break;
#endif
    default:
        rows_by_tile(it, r, 1, valid);
    }
}

/* Valid positions of tile [pos, pos + 64) for row r: 0..64. */
static int n_valid(const struct item *it, int r, int pos)
{
    int n = kn_attn_row_pos(&it->of, r) + 1 - pos;

    return n < 0 ? 0 : BT_MIN(n, TILE);
}

static void all_rows(const struct item *it, int pos)
{
    int r = 0;

    while (r < it->of.n_rows) {
        int valid = n_valid(it, r, pos), n = 1;

        while (n < ATT_ROWS && r + n < it->of.n_rows && n_valid(it, r + n, pos) == valid) {
            n++;
        }
        if (valid > 0) {
            same_rows(it, r, n, valid);
        }
        r += n;
    }
}

READS_PAGES static void run_item(struct item *it)
{
    const struct kn_attention_args *a = it->of.a;
    int end = kn_attn_row_pos(&it->of, it->of.n_rows - 1) + 1; /* rows ascend: the last sees most */

    memset(it->work.o, 0, (size_t)it->of.n_rows * (size_t)it->d16 * sizeof(float));
    for (int r = 0; r < it->of.n_rows; r++) {
        it->work.m[r] = -INFINITY;
        it->work.l[r] = 0;
    }
    for (int pos = 0; pos < end; pos += TILE) {
        int n = BT_MIN(TILE, end - pos);

        if (a->layout->dtype == KV_DTYPE_F16) {
            load_tile(it, KV_DTYPE_F16, pos, n);
        } else {
            load_tile(it, KV_DTYPE_F32, pos, n);
        }
        all_rows(it, pos);
    }
    for (int r = 0; r < it->of.n_rows; r++) {
        const float *o = it->work.o + (size_t)r * (size_t)it->d16;
        float *out = a->out + kn_attn_row_offset(&it->of, r, a->out_stride);
        v16 l = v16_set1(it->work.l[r]);

        for (int i = 0; i < it->d; i += 16) {
            v16_store_n(out + i, v16_div(v16_load(o + i), l), BT_MIN(16, it->d - i));
        }
    }
}

struct job {
    const struct kn_attention_args *a;
    char *scratch;
};

static void attention_item(void *arg, int item, int member)
{
    const struct job *j = arg;
    int d = j->a->layout->head_dim;
    struct item it = {
        .of = kn_attn_item_at(j->a, ITEM_ROWS, item), .d = d, .d16 = (d + 15) / 16 * 16};

    it.work = lay_work(j->scratch + (size_t)member * KN_THREAD_SCRATCH_BYTES, it.d, it.d16);
    run_item(&it);
}

void KN_V(attention)(struct kn_stream *stream, const struct kn_attention_args *a)
{
    struct job j = {a, stream->thread_scratch};

    kn_team_run(stream->team, kn_attn_n_items(a, ITEM_ROWS), attention_item, &j);
}
