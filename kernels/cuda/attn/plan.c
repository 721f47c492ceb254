/* Cuts the attention work of a step into items (plan.h). Pure functions of lengths; any thread.
 *
 * Decode is bound by reading: blocks get equal numbers of units, in runs over the tasks in their
 * order, and a task may end in one block and go on in the next. Prefill is bound by arithmetic and
 * its tasks are large: each goes to one block, the longest first to the block with the least work
 * so far; only where there are few tasks are they cut, at starts of groups. */
#include "kernels/cuda/attn/plan.h"

#include <string.h>

/* What of K and V the blocks of prefill work on at once: enough for their shares, and so little
 * that it stays in the second-level cache (NOTES.md, "attn", has others). */
#define CACHED_BYTES (int64_t)8000000
#define LONG_CTX     4096 /* shorter sequences are left as they are */

/* Records are few by construction; the cap bounds the workspace where contexts are very long. */
#define MAX_SLOTS_DECODE 20480

static int min_int(int a, int b)
{
    return a < b ? a : b;
}

static int ceil_div(int a, int b)
{
    return (a + b - 1) / b;
}

/* Where things are written. `items` grows up. */
struct writer {
    struct kn_attn_plan *plan;
    int32_t *first;
    struct kn_attn_item *items;
    int n_items;
    int n_slots, max_slots;
    int n_tasks;   /* split ones */
    bool one_each; /* an item makes one record, whatever its length */
};

static void writer_init(struct writer *w, void *plan, int n_blocks, int max_slots)
{
    size_t off = (sizeof(*w->plan) + ((size_t)n_blocks + 1) * sizeof(int32_t) + 31) & ~(size_t)31;

    *w = (struct writer){.plan = plan, .max_slots = max_slots};
    *w->plan = (struct kn_attn_plan){.n_blocks = n_blocks, .off_items = (int32_t)off};
    w->first = (int32_t *)(w->plan + 1);
    w->items = (struct kn_attn_item *)((char *)plan + off);
}

/* Lengths of a call. */
struct call {
    int n_seqs;
    const int32_t *row_start; /* NULL = one row a sequence */
    const int32_t *ctx_len;
    int n_kv_heads, group;
    int block_rows;
};

static int rows_of(const struct call *c, int seq)
{
    return c->row_start ? c->row_start[seq + 1] - c->row_start[seq] : 1;
}

/* Units that packed rows from row0 on see. */
static int units_of(const struct call *c, int seq, int row0)
{
    int rows = rows_of(c, seq);
    int last = min_int(row0 + c->block_rows, rows * c->group) - 1;
    int pos = c->ctx_len[seq] - rows + last / c->group;

    return pos / KN_ATTN_UNIT + 1;
}

/* Records that units [unit0, unit1) of a split task make. */
static int records_of(const struct writer *w, int unit0, int unit1)
{
    int start = ceil_div(unit0, KN_ATTN_GROUP) * KN_ATTN_GROUP;

    if (w->one_each) {
        return 1;
    }
    if (start >= unit1) {
        return unit1 - unit0;
    }
    return start - unit0 + ceil_div(unit1 - start, KN_ATTN_GROUP);
}

static int most_records(const struct writer *w, int n_units, int n_pieces)
{
    if (w->one_each) {
        return n_pieces;
    }
    return ceil_div(n_units, KN_ATTN_GROUP) + n_pieces * (KN_ATTN_GROUP - 1);
}

/* Split tasks follow the items; their sizes are known once all items are there. */
static size_t finish(struct writer *w)
{
    struct kn_attn_task *tasks = (struct kn_attn_task *)(w->items + w->n_items);

    memset(tasks, 0, (size_t)w->n_tasks * sizeof(*tasks));
    for (int i = 0; i < w->n_items; i++) {
        const struct kn_attn_item *it = &w->items[i];

        if (it->slot >= 0) {
            struct kn_attn_task *t = &tasks[it->task];

            if (it->unit0 == 0) {
                t->slot0 = it->slot;
            }
            t->n_slots += records_of(w, it->unit0, it->unit1);
            t->n_items++;
        }
    }
    w->plan->n_items = w->n_items;
    w->plan->n_tasks = w->n_tasks;
    w->plan->off_tasks = (int32_t)((char *)tasks - (char *)w->plan);
    return (size_t)((char *)(tasks + w->n_tasks) - (char *)w->plan);
}

/* The work so far of decode's cut. */
struct cutter {
    struct writer w;
    int64_t done, total; /* units */
    int grain;           /* blocks end at multiples of so many units */
    int block;
};

/* First unit, counted over all tasks, that no longer belongs to block b. */
static int64_t block_end(const struct cutter *c, int b)
{
    int64_t end = c->total * (b + 1) / c->w.plan->n_blocks;

    return b + 1 == c->w.plan->n_blocks ? end : end / c->grain * c->grain;
}

/* Whole groups make the fewest records, but each multiprocessor must get work for two blocks or
 * more: where that is few groups, smaller grains do it; where it is many, single units even out
 * shares and their records do not count. */
static int grain_of(int64_t total, int n_sms)
{
    int g = KN_ATTN_GROUP;

    while (g > 1 && total * 20 < (int64_t)n_sms * 2 * g * 19) {
        g /= 2;
    }
    return total >= (int64_t)n_sms * KN_ATTN_GROUP * 8 ? 1 : g;
}

static void next_block(struct cutter *c)
{
    c->w.first[++c->block] = c->w.n_items;
}

static void cut_task(struct cutter *c, struct kn_attn_item it, int n_units)
{
    struct writer *w = &c->w;
    int last = w->plan->n_blocks - 1;

    while (c->block < last && block_end(c, c->block) <= c->done) {
        next_block(c);
    }
    int64_t room = block_end(c, c->block) - c->done;
    int pieces = 1;

    for (int b = c->block; b < last && block_end(c, b) < c->done + n_units; b++) {
        pieces++;
    }
    if (room >= n_units || c->block == last || w->n_tasks == KN_ATTN_COUNTERS ||
        w->n_slots + most_records(w, n_units, pieces) > w->max_slots) {
        it.unit1 = n_units;
        it.slot = -1;
        w->items[w->n_items++] = it;
        c->done += n_units;
        return;
    }
    it.task = w->n_tasks++;
    it.slot = w->n_slots;
    while (it.unit0 < n_units) {
        while (c->block < last && block_end(c, c->block) <= c->done) {
            next_block(c);
        }
        int64_t end = it.unit0 + block_end(c, c->block) - c->done;

        it.unit1 = c->block == last || end > n_units ? n_units : (int)end;
        w->items[w->n_items++] = it;
        it.slot += records_of(w, it.unit0, it.unit1);
        c->done += it.unit1 - it.unit0;
        it.unit0 = it.unit1;
    }
    w->n_slots = it.slot;
}

/* Tasks of decode in their order. */
struct decode_walk {
    struct call call;
    int row_blocks;
    int seq, index; /* of the next */
};

static bool next_task(struct decode_walk *w, struct kn_attn_item *ret_it, int *ret_units)
{
    while (w->seq < w->call.n_seqs && w->call.ctx_len[w->seq] <= 0) {
        w->seq++;
    }
    if (w->seq == w->call.n_seqs) {
        return false;
    }
    *ret_it = (struct kn_attn_item){.seq = w->seq,
                                    .kv_head = w->index / w->row_blocks,
                                    .row0 = w->index % w->row_blocks * w->call.block_rows};
    *ret_units = ceil_div(w->call.ctx_len[w->seq], KN_ATTN_UNIT);
    if (++w->index == w->call.n_kv_heads * w->row_blocks) {
        w->index = 0;
        w->seq++;
    }
    return true;
}

static int64_t count_units(struct decode_walk w)
{
    struct kn_attn_item it;
    int64_t total = 0;
    int n;

    while (next_task(&w, &it, &n)) {
        total += n;
    }
    return total;
}

size_t kn_cuda_attn_plan_decode(const struct kn_cuda_attn_shape *s,
                                int n_seqs,
                                const int32_t *ctx_len,
                                void *plan)
{
    struct kn_attn_cut cut = kn_attn_cut_decode(s);
    int group = s->n_heads / s->n_kv_heads;
    struct decode_walk walk = {.call = {.n_seqs = n_seqs,
                                        .ctx_len = ctx_len,
                                        .n_kv_heads = s->n_kv_heads,
                                        .group = group,
                                        .block_rows = cut.block_rows},
                               .row_blocks = ceil_div(group, cut.block_rows)};
    struct cutter c = {.total = count_units(walk)};
    struct kn_attn_item it;
    int n;

    writer_init(&c.w, plan, cut.n_blocks, (int)kn_attn_slots(s, true));
    c.grain = grain_of(c.total, s->n_sms);
    c.w.first[0] = 0;
    while (next_task(&walk, &it, &n)) {
        cut_task(&c, it, n);
    }
    while (c.block < cut.n_blocks) {
        next_block(&c);
    }
    return finish(&c.w);
}

/* Blocks by work so far, least first; of equal ones the lower number. */
struct heap {
    int32_t *work, *block;
    int n;
};

static bool less(const struct heap *h, int a, int b)
{
    return h->work[a] < h->work[b] || (h->work[a] == h->work[b] && h->block[a] < h->block[b]);
}

/* The top has grown. */
static void sink(struct heap *h)
{
    for (int i = 0;;) {
        int l = 2 * i + 1, least = i;

        least = l < h->n && less(h, l, least) ? l : least;
        least = l + 1 < h->n && less(h, l + 1, least) ? l + 1 : least;
        if (least == i) {
            return;
        }
        int32_t work = h->work[i], block = h->block[i];

        h->work[i] = h->work[least];
        h->block[i] = h->block[least];
        h->work[least] = work;
        h->block[least] = block;
        i = least;
    }
}

/* KV heads [head, end) of a sequence, whose items are worked on about the same time. */
struct section {
    int number;
    int seq, head, end;
};

/* Adds the items of a section, tasks longer than `longest` units cut. Not in order yet. */
static void add_items(struct writer *w, const struct call *c, const struct section *s, int longest)
{
    int n_rows = c->ctx_len[s->seq] > 0 ? rows_of(c, s->seq) * c->group : 0;

    for (int row0 = 0; row0 < n_rows; row0 += c->block_rows) {
        int n_units = units_of(c, s->seq, row0), pieces = ceil_div(n_units, longest);

        for (int h = s->head; h < s->end; h++) {
            struct kn_attn_item it = {
                .seq = s->seq, .kv_head = h, .row0 = row0, .slot = -1, .section = s->number};
            int n = w->n_slots + most_records(w, n_units, pieces) > w->max_slots ? 1 : pieces;

            /* Pieces of equal length in whole groups, so longest is a multiple of a group. */
            if (n > 1) {
                it.task = w->n_tasks++;
                it.slot = w->n_slots;
            }
            while (it.unit0 < n_units) {
                it.unit1 = n > 1 ? min_int(it.unit0 + longest, n_units) : n_units;
                w->items[w->n_items++] = it;
                if (n > 1) {
                    it.slot += records_of(w, it.unit0, it.unit1);
                    w->n_slots = it.slot;
                }
                it.unit0 = it.unit1;
            }
        }
    }
}

/* Heads of a long sequence whose K and V the second-level cache holds at once: blocks drift apart,
 * and what they read again should not come from memory again. */
static int heads_at_once(const struct kn_cuda_attn_shape *s, int ctx)
{
    int64_t n = CACHED_BYTES / ((int64_t)ctx * s->head_dim * 4);

    return n < 1 ? 1 : n < s->n_kv_heads ? (int)n : s->n_kv_heads;
}

/* The long sequence that comes after `q`, by falling length; q -1 = the first. -1 = none. */
static int next_long(const struct call *c, int q)
{
    int best = -1;

    for (int i = 0; i < c->n_seqs; i++) {
        bool after =
            q < 0 || c->ctx_len[i] < c->ctx_len[q] || (c->ctx_len[i] == c->ctx_len[q] && i > q);

        if (c->ctx_len[i] >= LONG_CTX && after && (best < 0 || c->ctx_len[i] > c->ctx_len[best])) {
            best = i;
        }
    }
    return best;
}

/* All items of a call: long sequences a few heads after the other, then all others, which even out
 * what each block has to do. */
static void add_sections(struct writer *w,
                         const struct kn_cuda_attn_shape *s,
                         const struct call *c,
                         int longest)
{
    struct section at = {.number = 0};

    for (int q = next_long(c, -1); q >= 0; q = next_long(c, q)) {
        int n = heads_at_once(s, c->ctx_len[q]);

        for (int h = 0; h < s->n_kv_heads; h += n, at.number++) {
            at.seq = q;
            at.head = h;
            at.end = min_int(h + n, s->n_kv_heads);
            add_items(w, c, &at, longest);
        }
    }
    for (int q = 0; q < c->n_seqs; q++) {
        if (c->ctx_len[q] < LONG_CTX) {
            at.seq = q;
            at.head = 0;
            at.end = s->n_kv_heads;
            add_items(w, c, &at, longest);
        }
    }
}

/* Work of an item in tenths of a unit; what it costs to begin and end is about half a unit. */
static int cost_of(const struct kn_attn_item *it)
{
    return (it->unit1 - it->unit0) * 10 + 6;
}

#define MAX_BUCKETS 2048

/* Sorts [from, to) by length, longest first, stable, into the same places of `ret`. */
static void sort_run(const struct kn_attn_item *items, int from, int to, struct kn_attn_item *ret)
{
    int32_t count[MAX_BUCKETS + 1] = {0};

    for (int i = from; i < to; i++) {
        int n = min_int(items[i].unit1 - items[i].unit0, MAX_BUCKETS - 1);

        count[MAX_BUCKETS - n]++;
    }
    for (int b = 1; b <= MAX_BUCKETS; b++) {
        count[b] += count[b - 1];
    }
    for (int i = from; i < to; i++) {
        int n = min_int(items[i].unit1 - items[i].unit0, MAX_BUCKETS - 1);

        ret[from + count[MAX_BUCKETS - n - 1]++] = items[i];
    }
}

/* Section after section; `tmp` has room for all. */
static void sort_items(const struct writer *w, struct kn_attn_item *tmp)
{
    for (int from = 0, to; from < w->n_items; from = to) {
        to = from + 1;
        while (to < w->n_items && w->items[to].section == w->items[from].section) {
            to++;
        }
        sort_run(w->items, from, to, tmp);
    }
}

/* Gives each item of `sorted` to a block, longest first, and puts items in order of blocks. */
static void deal_items(struct writer *w, const struct kn_attn_item *sorted, int32_t *scratch)
{
    int nb = w->plan->n_blocks, n = w->n_items;
    struct heap h = {.work = scratch, .block = scratch + nb, .n = nb};
    int32_t *owner = scratch + 2 * nb;

    for (int b = 0; b < nb; b++) {
        h.work[b] = 0;
        h.block[b] = b;
    }
    memset(w->first, 0, ((size_t)nb + 1) * sizeof(*w->first));
    for (int i = 0; i < n; i++) {
        owner[i] = h.block[0];
        w->first[owner[i] + 1]++;
        h.work[0] += cost_of(&sorted[i]);
        sink(&h);
    }
    for (int b = 0; b < nb; b++) {
        w->first[b + 1] += w->first[b];
        h.block[b] = w->first[b]; /* from here on: where the block's next item goes */
    }
    for (int i = 0; i < n; i++) {
        w->items[h.block[owner[i]]++] = sorted[i];
    }
}

static void *after(void *p, size_t bytes)
{
    return (char *)p + ((bytes + 31) & ~(size_t)31);
}

size_t kn_cuda_attn_plan_prefill(const struct kn_cuda_attn_shape *s,
                                 int n_seqs,
                                 const int32_t *row_start,
                                 const int32_t *ctx_len,
                                 void *plan)
{
    struct kn_attn_cut cut = kn_attn_cut_prefill(s);
    struct call call = {.n_seqs = n_seqs,
                        .row_start = row_start,
                        .ctx_len = ctx_len,
                        .n_kv_heads = s->n_kv_heads,
                        .group = s->n_heads / s->n_kv_heads,
                        .block_rows = cut.block_rows};
    struct writer w;
    int64_t total = 0;

    writer_init(&w, plan, cut.n_blocks, (int)kn_attn_slots(s, false));
    w.one_each = !s->invariant;
    for (int q = 0; q < n_seqs; q++) {
        for (int r = 0; r < rows_of(&call, q) * call.group; r += cut.block_rows) {
            total += (int64_t)(ctx_len[q] > 0 ? units_of(&call, q, r) : 0) * s->n_kv_heads;
        }
    }
    /* A task may be as long as a block's fair share, and then some. */
    int64_t share = (total + cut.n_blocks - 1) / cut.n_blocks;
    int longest = ceil_div(min_int((int)share, 1 << 20), KN_ATTN_GROUP) * KN_ATTN_GROUP;

    add_sections(&w, s, &call, longest > 0 ? longest : KN_ATTN_GROUP);

    struct kn_attn_item *tmp = after(w.items, (size_t)w.n_items * sizeof(*w.items));

    sort_items(&w, tmp);
    deal_items(&w, tmp, after(tmp, (size_t)w.n_items * sizeof(*tmp)));
    return finish(&w);
}

struct kn_attn_cut kn_attn_cut_decode(const struct kn_cuda_attn_shape *s)
{
    return (struct kn_attn_cut){s->n_sms * kn_attn_decode_blocks(s->head_dim), KN_ATTN_DECODE_ROWS};
}

struct kn_attn_cut kn_attn_cut_prefill(const struct kn_cuda_attn_shape *s)
{
    return (struct kn_attn_cut){s->n_sms, KN_ATTN_PREFILL_ROWS};
}

size_t kn_attn_slots(const struct kn_cuda_attn_shape *s, bool decode)
{
    int nb = decode ? kn_attn_cut_decode(s).n_blocks : kn_attn_cut_prefill(s).n_blocks;

    /* Prefill: only where there are fewer tasks than blocks, so few pieces; with `invariant` a
     * record for each group, and what would need more stays whole. */
    return decode ? MAX_SLOTS_DECODE : (size_t)nb * 4;
}

size_t
kn_cuda_attn_plan_bytes(const struct kn_cuda_attn_shape *s, int max_seqs, int max_rows, int max_ctx)
{
    struct kn_attn_cut d = kn_attn_cut_decode(s), p = kn_attn_cut_prefill(s);
    size_t group = (size_t)(s->n_heads / s->n_kv_heads), heads = (size_t)s->n_kv_heads;
    size_t row_blocks = (group + (size_t)d.block_rows - 1) / (size_t)d.block_rows;
    size_t tasks = (size_t)max_seqs * heads * row_blocks;
    size_t decode_items = tasks + (size_t)d.n_blocks;
    size_t blocks = (size_t)max_rows * group / (size_t)p.block_rows + (size_t)max_seqs;
    size_t prefill_items = blocks * heads + kn_attn_slots(s, false);
    size_t decode = ((size_t)d.n_blocks + 1) * 4 + decode_items * sizeof(struct kn_attn_item) +
                    (size_t)d.n_blocks * sizeof(struct kn_attn_task);
    /* Items twice, owners and heap while it is made. */
    size_t prefill = ((size_t)p.n_blocks * 3 + 1) * 4 +
                     prefill_items * (2 * sizeof(struct kn_attn_item) + 4) +
                     kn_attn_slots(s, false) * sizeof(struct kn_attn_task);

    (void)max_ctx;
    return sizeof(struct kn_attn_plan) + (decode > prefill ? decode : prefill) + 256;
}

size_t
kn_cuda_attn_workspace(const struct kn_cuda_attn_shape *s, int max_seqs, int max_rows, int max_ctx)
{
    struct kn_attn_cut d = kn_attn_cut_decode(s), p = kn_attn_cut_prefill(s);
    int group = s->n_heads / s->n_kv_heads;
    size_t decode = kn_attn_slots(s, true) *
                    kn_attn_record_floats(kn_attn_record_rows(d.block_rows, group), s->head_dim);
    size_t prefill = kn_attn_slots(s, false) * kn_attn_record_floats(p.block_rows, s->head_dim);

    (void)max_seqs;
    (void)max_rows;
    (void)max_ctx;
    return KN_ATTN_COUNTER_BYTES + (decode > prefill ? decode : prefill) * sizeof(float);
}
