/* Plans of attention: every unit of every task exactly once and in order, records where the order
 * of sums wants them, everything within the bytes that were promised. Needs no card. */
#include "kernels/cuda/attn/plan.h"
#include "tests/unit/cmocka.h"

#include <stdlib.h>
#include <string.h>

#define MAX_SEQS 300

struct check {
    struct kn_cuda_attn_shape shape;
    int n_seqs;
    int32_t row_start[MAX_SEQS + 1];
    int32_t ctx[MAX_SEQS];
    bool decode;
    char *plan;
    size_t bytes; /* used */
};

static struct kn_cuda_attn_shape shape_of(int heads, int kv_heads, int d, bool invariant)
{
    return (struct kn_cuda_attn_shape){.n_heads = heads,
                                       .n_kv_heads = kv_heads,
                                       .head_dim = d,
                                       .page_tokens = 64,
                                       .n_sms = 132,
                                       .invariant = invariant};
}

static void make(struct check *c, int max_seqs, int max_rows, int max_ctx)
{
    size_t room = kn_cuda_attn_plan_bytes(&c->shape, max_seqs, max_rows, max_ctx);

    c->plan = aligned_alloc(64, (room + 63) / 64 * 64 + 64);
    assert_non_null(c->plan);
    memset(c->plan, 0xa5, (room + 63) / 64 * 64 + 64);
    c->bytes = c->decode
                   ? kn_cuda_attn_plan_decode(&c->shape, c->n_seqs, c->ctx, c->plan)
                   : kn_cuda_attn_plan_prefill(&c->shape, c->n_seqs, c->row_start, c->ctx, c->plan);
    assert_true(c->bytes <= room);
    for (size_t i = room; i < (room + 63) / 64 * 64 + 64; i++) {
        assert_int_equal((unsigned char)c->plan[i], 0xa5);
    }
}

static int units_expected(const struct check *c, int seq, int row0, int block_rows)
{
    int group = c->shape.n_heads / c->shape.n_kv_heads;
    int rows = c->row_start[seq + 1] - c->row_start[seq];
    int last = row0 + block_rows < rows * group ? row0 + block_rows - 1 : rows * group - 1;

    return (c->ctx[seq] - rows + last / group) / KN_ATTN_UNIT + 1;
}

static int records(const struct check *c, const struct kn_attn_item *it)
{
    int n = 0;

    if (!c->decode && !c->shape.invariant) {
        return 1;
    }
    for (int u = it->unit0; u < it->unit1; u++) {
        /* A group that starts inside makes one at its end, units before such a start one each. */
        int group = u / KN_ATTN_GROUP * KN_ATTN_GROUP;

        n += group < it->unit0 || u + 1 == it->unit1 || (u + 1) % KN_ATTN_GROUP == 0;
    }
    return n;
}

static int by_place(const void *x, const void *y)
{
    const struct kn_attn_item *a = x, *b = y;
    int d = a->seq - b->seq;

    d = d ? d : a->row0 - b->row0;
    d = d ? d : a->kv_head - b->kv_head;
    return d ? d : a->unit0 - b->unit0;
}

/* Items of one task, in order: returns how many there are. */
static int check_task(const struct check *c, const struct kn_attn_item *it, int n, int block_rows)
{
    const struct kn_attn_plan *p = (const struct kn_attn_plan *)c->plan;
    const struct kn_attn_task *tasks = (const struct kn_attn_task *)(c->plan + p->off_tasks);
    int unit = 0, slot = it->slot, k = 0;

    while (k < n && it[k].seq == it->seq && it[k].row0 == it->row0 &&
           it[k].kv_head == it->kv_head) {
        assert_int_equal(it[k].unit0, unit);
        assert_true(it[k].unit1 > unit);
        unit = it[k].unit1;
        if (it->slot >= 0) {
            assert_int_equal(it[k].slot, slot);
            assert_int_equal(it[k].task, it->task);
            slot += records(c, &it[k]);
        }
        k++;
    }
    assert_int_equal(unit, units_expected(c, it->seq, it->row0, block_rows));
    assert_int_equal(it->slot >= 0, k > 1);
    if (k > 1) {
        assert_in_range(it->task, 0, p->n_tasks - 1);
        assert_int_equal(tasks[it->task].slot0, it->slot);
        assert_int_equal(tasks[it->task].n_slots, slot - it->slot);
        assert_int_equal(tasks[it->task].n_items, k);
        assert_true((size_t)slot <= kn_attn_slots(&c->shape, c->decode));
    }
    return k;
}

static void check_plan(const struct check *c)
{
    const struct kn_attn_plan *p = (const struct kn_attn_plan *)c->plan;
    struct kn_attn_cut cut =
        c->decode ? kn_attn_cut_decode(&c->shape) : kn_attn_cut_prefill(&c->shape);
    const int32_t *first = (const int32_t *)(p + 1);
    int group = c->shape.n_heads / c->shape.n_kv_heads, n_tasks = 0;
    struct kn_attn_item *items = malloc(((size_t)p->n_items + 1) * sizeof(*items));

    assert_int_equal(p->n_blocks, cut.n_blocks);
    assert_int_equal(first[0], 0);
    for (int b = 0; b < p->n_blocks; b++) {
        assert_true(first[b + 1] >= first[b]);
    }
    assert_int_equal(first[p->n_blocks], p->n_items);
    memcpy(items, c->plan + p->off_items, (size_t)p->n_items * sizeof(*items));
    qsort(items, (size_t)p->n_items, sizeof(*items), by_place);
    for (int i = 0; i < p->n_items; n_tasks++) {
        i += check_task(c, items + i, p->n_items - i, cut.block_rows);
    }
    for (int q = 0; q < c->n_seqs; q++) {
        int rows = c->ctx[q] > 0 ? c->row_start[q + 1] - c->row_start[q] : 0;

        n_tasks -= (rows * group + cut.block_rows - 1) / cut.block_rows * c->shape.n_kv_heads;
    }
    assert_int_equal(n_tasks, 0);
    assert_true(p->n_tasks <= KN_ATTN_COUNTERS);
    free(items);
}

static void fill(struct check *c, int n, int rows, int ctx)
{
    c->n_seqs = n;
    for (int i = 0; i < n; i++) {
        c->ctx[i] = ctx;
        c->row_start[i + 1] = c->row_start[i] + rows;
    }
}

static void test_decode_covers_every_unit_once(void **state)
{
    static const int ctx[] = {0, 1, 127, 128, 129, 1023, 2048, 2049, 8192, 40000, 131072};
    static const int seqs[] = {1, 3, 16, 64, 256};

    for (size_t i = 0; i < sizeof(ctx) / sizeof(ctx[0]); i++) {
        for (size_t j = 0; j < sizeof(seqs) / sizeof(seqs[0]); j++) {
            struct check c = {.shape = shape_of(32, 8, j % 2 ? 64 : 128, false), .decode = true};

            fill(&c, seqs[j], 1, ctx[i]);
            if (j % 2) {
                c.ctx[seqs[j] / 2] = ctx[(i + 5) % 11];
            }
            make(&c, seqs[j], seqs[j], 131072);
            check_plan(&c);
            free(c.plan);
        }
    }
}

static void test_decode_of_wide_groups(void **state)
{
    struct check c = {.shape = shape_of(48, 2, 128, false), .decode = true};

    fill(&c, 5, 1, 3000);
    make(&c, 5, 5, 4096);
    check_plan(&c);
    free(c.plan);
}

/* Where there is much to read, blocks' shares differ by a unit at most. */
static void test_decode_shares_are_even(void **state)
{
    struct check c = {.shape = shape_of(32, 8, 128, false), .decode = true};

    fill(&c, 64, 1, 8192);
    make(&c, 64, 64, 8192);
    const struct kn_attn_plan *p = (const struct kn_attn_plan *)c.plan;
    const int32_t *first = (const int32_t *)(p + 1);
    const struct kn_attn_item *items = (const struct kn_attn_item *)(c.plan + p->off_items);
    int least = 1 << 30, most = 0;

    for (int b = 0; b < p->n_blocks; b++) {
        int n = 0;

        for (int i = first[b]; i < first[b + 1]; i++) {
            n += items[i].unit1 - items[i].unit0;
        }
        least = n < least ? n : least;
        most = n > most ? n : most;
    }
    assert_true(most - least <= 1);
    free(c.plan);
}

static void test_prefill_covers_every_unit_once(void **state)
{
    static const struct {
        int n, rows, ctx;
    } calls[] = {{1, 1, 1},      {1, 64, 8192},   {1, 1024, 1024},  {8, 1024, 1024},
                 {1, 512, 8704}, {3, 17, 131072}, {1, 8192, 32768}, {40, 1, 777},
                 {2, 0, 0},      {5, 700, 9000},  {2, 4096, 4096}};

    for (size_t i = 0; i < sizeof(calls) / sizeof(calls[0]); i++) {
        for (int invariant = 0; invariant < 2; invariant++) {
            struct check c = {.shape = shape_of(32, 8, 128, invariant != 0)};

            fill(&c, calls[i].n, calls[i].rows, calls[i].ctx);
            make(&c, calls[i].n, calls[i].n * calls[i].rows, 131072);
            check_plan(&c);
            free(c.plan);
        }
    }
}

/* Long sequences are worked on a few heads at a time, by all blocks: each has items of every
 * section, one section after the other, and shares stay even. */
static void test_prefill_sections(void **state)
{
    struct check c = {.shape = shape_of(32, 8, 128, false)};
    const struct kn_attn_plan *p;
    const struct kn_attn_item *items;
    const int32_t *first;
    int least = 1 << 30, most = 0;

    fill(&c, 1, 32768, 32768);
    make(&c, 1, 32768, 131072);
    check_plan(&c);
    p = (const struct kn_attn_plan *)c.plan;
    first = (const int32_t *)(p + 1);
    items = (const struct kn_attn_item *)(c.plan + p->off_items);
    for (int b = 0; b < p->n_blocks; b++) {
        int n = 0, section = 0;

        for (int i = first[b]; i < first[b + 1]; i++) {
            assert_in_range(items[i].section, section, section + 1);
            section = items[i].section;
            assert_int_equal(items[i].kv_head, section); /* 16 MB a head: one at a time */
            n += items[i].unit1 - items[i].unit0;
        }
        assert_int_equal(section, 7);
        least = n < least ? n : least;
        most = n > most ? n : most;
    }
    assert_true(most - least <= most / 50);
    free(c.plan);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_decode_covers_every_unit_once),
        cmocka_unit_test(test_decode_of_wide_groups),
        cmocka_unit_test(test_decode_shares_are_even),
        cmocka_unit_test(test_prefill_covers_every_unit_once),
        cmocka_unit_test(test_prefill_sections),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
