/* Projection over packed tiles.
 *
 * Order of sums: one lane is one output. Float weights: one chain of fused products over K,
 * ascending; BF16 weights by products of pairs where the processor has them, see
 * cpu/amx/bf16_tile.c and cpu/avx512/bf16_tile.c. Quantized weights: exact integer sums inside a
 * block of 32, blocks added ascending (vec.h). Rows, tiles and threads are only walked in different
 * ways; no sum is ever split.
 *
 * Work: an item is a group of tiles. Inside an item rows go in pieces whose activations stay in
 * the second-level cache while the group's tiles pass over them. */
#include "kernels/cpu/pack.h"
#include "kernels/cpu/vec/vec.h"

#define ROWS_BYTES     (512 * 1024) /* activations held in cache */
#define ITEMS_A_THREAD 8
#define PANEL_TILES    12
#define ROWS_TOGETHER  (2 * KN_GROUP) /* also a multiple of KN_BF16_ROWS */
#define QUANT_WORK     16384          /* elements below which the caller quantizes alone */

#if defined(__AVX512F__)
#define FLOAT_ROWS 12 /* rows a kernel takes at once: accumulators in registers */
#else
#define FLOAT_ROWS 4
#endif

struct job {
    const struct kn_matmul_args *a;
    char *thread_scratch;
    struct kn_acts *acts; /* [groups][k/32], in the stream's scratch; NULL: no part needs them */
    struct kn_wide wide;  /* there, instead of acts */
    char *acts16;         /* [T/KN_BF16_ROWS][k/32] cells, there too; NULL: no part needs them */
    int n_tiles;          /* all parts */
    int per_item;
    int rows_per_item; /* of the quantizing pass */
};

static bool is_quant(enum bt_dtype t)
{
    return t == BT_DTYPE_Q8_0 || t == BT_DTYPE_Q4_0 || t == BT_DTYPE_Q4_1;
}

static void quantize_row(struct kn_acts *x, int in, const float *src, size_t blocks)
{
    for (size_t b = 0; b < blocks; b++, src += KN_QBLOCK, x++) {
        v16 u = v16_load(src), v = v16_load(src + 16);
        float max = v16_hmax(v16_max(v16_abs(u), v16_abs(v)));
        v16 inv = v16_set1(max > KN_QUANT_TINY ? 127 / max : 0);
        float sum; /* exact: small integers */

        u = v16_round(v16_mul(u, inv));
        v = v16_round(v16_mul(v, inv));
        sum = v16_sum(v16_add(u, v));
        v16_store_i8(x->q[in], u);
        v16_store_i8(x->q[in] + 16, v);
        x->scale[in] = max / 127;
        x->ssum[in] = max / 127 * sum;
        x->sum[in] = (int32_t)sum;
    }
}

static bool is_bf16(enum bt_dtype t)
{
    return KN_VEC_BF16 && t == BT_DTYPE_BF16;
}

static bool is_wide(enum bt_dtype t)
{
    return KN_VEC_AMX && is_quant(t);
}

static void prepare_item(void *arg, int item, int member)
{
    const struct job *j = arg;
    const struct kn_matmul_args *a = j->a;
    int t0 = item * j->rows_per_item, t1 = BT_MIN(t0 + j->rows_per_item, a->n_rows);

    if (j->acts) {
        size_t blocks = (size_t)a->w->k / KN_QBLOCK;

        for (int t = t0; t < t1; t++) {
            quantize_row(j->acts + (size_t)(t / KN_GROUP) * blocks, t % KN_GROUP,
                         a->x + (size_t)t * a->x_stride, blocks);
        }
    }
#if KN_VEC_AMX
    if (j->wide.data) {
        KN_V(wide_rows)(&j->wide, t0, t1, a->x, a->x_stride);
    }
#endif
#if KN_VEC_BF16
    if (j->acts16) {
        KN_V(bf16_rows)(j->acts16, t0, t1, a->x, a->x_stride, a->w->k);
    }
#endif
}

static void place_acts(struct kn_stream *s, struct job *j)
{
    int rows = j->a->n_rows, k = j->a->w->k;

    for (int i = 0; i < j->a->w->n_parts; i++) {
        enum bt_dtype t = j->a->w->part[i].dtype;

        if (is_wide(t)) {
            j->wide.data = s->scratch;
        } else if (is_quant(t)) {
            j->acts = s->scratch;
        } else if (is_bf16(t)) {
            j->acts16 = (char *)s->scratch + kn_quant_acts_bytes((size_t)rows, (size_t)k);
        }
    }
#if KN_VEC_AMX
    j->wide.k = k;
    j->wide.tiles = KN_V(wide_in_tiles)(rows, k);
#endif
}

/* Activations in the forms that the parts' kernels take. */
static void prepare(struct kn_stream *s, struct job *j)
{
    int k = j->a->w->k, n_items;

    place_acts(s, j);
    if (!j->acts && !j->acts16 && !j->wide.data) {
        return;
    }
    BT_BUG_ON(kn_scratch_bytes((size_t)j->a->n_rows, (size_t)k) > s->scratch_bytes);
    j->rows_per_item = BT_MAX(1, QUANT_WORK / k);
    if (j->wide.data && j->wide.tiles) { /* also a multiple of KN_BF16_ROWS there */
        j->rows_per_item = (int)BT_DIV_UP(j->rows_per_item, KN_WIDE_ROWS) * KN_WIDE_ROWS;
    } else if (j->acts16) {
        j->rows_per_item = (int)BT_DIV_UP(j->rows_per_item, KN_BF16_ROWS) * KN_BF16_ROWS;
    }
    n_items = (int)BT_DIV_UP(j->a->n_rows, j->rows_per_item);
    kn_team_run(s->team, n_items, prepare_item, j);
}

KN_INLINE v16 load_weight(enum bt_dtype t, const char *w, size_t i)
{
    if (t == BT_DTYPE_F32) {
        return v16_load((const float *)w + i * KN_TILE);
    }
    if (t == BT_DTYPE_F16) {
        return v16_load_f16((const uint16_t *)w + i * KN_TILE);
    }
    return v16_load_bf16_pair((const uint32_t *)w + i / 2 * KN_TILE, i % 2);
}

/* n (constant after inlining) rows by one tile. */
KN_INLINE void float_rows(const struct kn_tile_job *j, enum bt_dtype t, int row, int n)
{
    const float *x = j->x + (size_t)row * j->x_stride;
    v16 acc[FLOAT_ROWS];

#pragma GCC unroll 16
    for (int r = 0; r < n; r++) {
        acc[r] = v16_zero();
    }
    for (size_t i = 0; i < (size_t)j->k / 2 * 2; i += 2) {
#pragma GCC unroll 2
        for (size_t c = 0; c < 2; c++) {
            v16 w = load_weight(t, j->tile, i + c);

#pragma GCC unroll 16
            for (int r = 0; r < n; r++) {
                acc[r] = v16_fma(w, v16_set1(x[(size_t)r * j->x_stride + i + c]), acc[r]);
            }
        }
    }
    if (j->k % 2) {
        v16 w = load_weight(t, j->tile, (size_t)j->k - 1);

#pragma GCC unroll 16
        for (int r = 0; r < n; r++) {
            acc[r] = v16_fma(w, v16_set1(x[(size_t)r * j->x_stride + (size_t)j->k - 1]), acc[r]);
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < n; r++) {
        kn_tile_finish(j, row + r, acc[r]);
    }
}

KN_INLINE void float_tile_of(const struct kn_tile_job *j, enum bt_dtype t)
{
    int row = 0;

    for (; row + FLOAT_ROWS <= j->n_rows; row += FLOAT_ROWS) {
        float_rows(j, t, row, FLOAT_ROWS);
    }
    for (; row + 4 <= j->n_rows; row += 4) {
        float_rows(j, t, row, 4);
    }
    for (; row < j->n_rows; row++) {
        float_rows(j, t, row, 1);
    }
}

static void float_tile(const struct kn_tile_job *j)
{
    if (j->dtype == BT_DTYPE_F32) {
        float_tile_of(j, BT_DTYPE_F32);
    } else if (j->dtype == BT_DTYPE_F16) {
        float_tile_of(j, BT_DTYPE_F16);
    } else {
        float_tile_of(j, BT_DTYPE_BF16);
    }
}

/* Rows [t0, t1) by tile `tile` of the whole weight, or by as many of the `max` tiles from there as
 * one call of the kernel takes. Returns how many. */
static int do_tiles(const struct job *j, int member, int tile, int max, int t0, int t1)
{
    const struct kn_matmul_args *a = j->a;
    const struct kn_weight_part *p = a->w->part;
    size_t k = (size_t)a->w->k, row = (size_t)t0;
    int n0 = 0, tiles, n;
    struct kn_tile_job tj;

    for (; tile >= (tiles = (int)BT_DIV_UP(p->n, KN_TILE)); p++) {
        tile -= tiles;
        n0 += p->n;
    }
    n = is_bf16(p->dtype) || is_wide(p->dtype) ? BT_MIN(max, tiles - tile) : 1;
    tj = (struct kn_tile_job){
        .dtype = p->dtype,
        .tile = (const char *)p->data + (size_t)tile * kn_tile_bytes(p->dtype, k),
        .k = a->w->k,
        .n_rows = t1 - t0,
        .x = a->x + row * a->x_stride,
        .x_stride = a->x_stride,
        .bias = p->bias ? p->bias + tile * KN_TILE : NULL,
        .n_cols = BT_MIN(KN_TILE * n, p->n - tile * KN_TILE),
        .add = a->add,
        .out = a->out + row * a->out_stride + n0 + tile * KN_TILE,
        .out_stride = a->out_stride,
    };
    tj.scratch = j->thread_scratch + (size_t)member * KN_THREAD_SCRATCH_BYTES;
#if KN_VEC_AMX
    if (is_wide(p->dtype)) {
        tj.wide = &j->wide;
        KN_V(wide_tiles)(&tj, n);
        return n;
    }
#endif
#if KN_VEC_BF16
    if (is_bf16(p->dtype)) {
        tj.acts16 = j->acts16 + row / KN_BF16_ROWS * BT_DIV_UP(k, KN_QBLOCK) * KN_BF16_CELL;
        KN_V(bf16_tiles)(&tj, n);
        return n;
    }
#endif
    if (!is_quant(p->dtype)) {
        float_tile(&tj);
        return n;
    }
#if !KN_VEC_AMX
    tj.acts = j->acts + row / KN_GROUP * (k / KN_QBLOCK); /* t0 is a multiple of the group */
    KN_V(quant_tile)(&tj);
#endif
    return n;
}

static void matmul_item(void *arg, int item, int member)
{
    const struct job *j = arg;
    int tile0 = item * j->per_item, tile1 = BT_MIN(tile0 + j->per_item, j->n_tiles);
    int row_bytes = j->a->w->k * (j->acts16 ? KN_BF16_CELL / KN_BF16_ROWS / KN_QBLOCK : 1);
    int step = BT_MAX(2 * ROWS_TOGETHER, ROWS_BYTES / row_bytes / ROWS_TOGETHER * ROWS_TOGETHER);

    if (j->wide.data) { /* all rows pass over a panel of tiles there */
        step = j->a->n_rows;
    }
    for (int t = 0; t < j->a->n_rows; t += step) {
        int t1 = BT_MIN(t + step, j->a->n_rows);

        for (int tile = tile0; tile < tile1;) {
            tile += do_tiles(j, member, tile, tile1 - tile, t, t1);
        }
    }
}

void KN_V(matmul)(struct kn_stream *stream, const struct kn_matmul_args *a)
{
    struct job j = {.a = a, .thread_scratch = stream->thread_scratch};

    for (int i = 0; i < a->w->n_parts; i++) {
        j.n_tiles += (int)BT_DIV_UP(a->w->part[i].n, KN_TILE);
    }
    if (a->n_rows == 0) {
        return;
    }
    prepare(stream, &j);
    j.per_item = BT_MAX(1, j.n_tiles / (kn_team_size(stream->team) * ITEMS_A_THREAD));
    if (j.wide.data && j.wide.tiles) { /* activations are read once for each panel */
        int size = kn_team_size(stream->team), rounds = j.n_tiles / (size * PANEL_TILES);

        rounds += j.n_tiles % (size * PANEL_TILES) != 0; /* in which all members have a panel */
        j.per_item = (int)BT_DIV_UP(j.n_tiles, size * rounds);
    }
    if (j.acts16) { /* so many tiles at once */
        int at_once = KN_VEC_AMX || a->n_rows <= KN_BF16_FEW ? 4 : 2;

        j.per_item = (int)BT_DIV_UP(j.per_item, at_once) * at_once;
    }
    kn_team_run(stream->team, (int)BT_DIV_UP(j.n_tiles, j.per_item), matmul_item, &j);
}
