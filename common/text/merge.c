/* Merging the bytes of one piece, and looking up whole pieces.
 *
 * The rule of byte-pair encoding: of all neighbours that have a merge, join those with the lowest
 * rank, the leftmost of equals first; repeat. Short pieces scan for the minimum. Long ones keep the
 * pairs in a binary heap of (rank, place), so that a piece of n bytes costs O(n log n) whatever it
 * holds. No recursion; scratch memory is on the heap and reused within an encode call. */
#include "common/text/bpe_int.h"

#include <stdlib.h>

#define SHORT_PIECE 32 /* bytes up to which scanning beats the heap */

void bpe_work_fini(struct bpe_work *w)
{
    free(w->syms);
    free(w->heap);
    *w = (struct bpe_work){0};
}

static const struct merge_slot *find_merge(const struct bpe *m, int32_t left, int32_t right)
{
    uint64_t key = (uint64_t)(uint32_t)left << 32 | (uint32_t)right;
    size_t at = (size_t)(key * 0x9e3779b97f4a7c15u >> 32) & m->merges_mask;

    while (m->merges[at].key != key) {
        if (m->merges[at].key == BPE_NO_KEY) {
            return NULL;
        }
        at = (at + 1) & m->merges_mask;
    }
    return &m->merges[at];
}

/* Bytes to ids, dropping those that the vocabulary lacks; returns how many. */
static size_t byte_ids(const struct bpe *m, struct bt_str piece, int32_t *ret)
{
    size_t n = 0;

    for (size_t i = 0; i < piece.n; i++) {
        int32_t id = m->byte_id[(uint8_t)piece.p[i]];

        if (id < 0) {
            id = m->unk_id;
        }
        if (id >= 0) {
            ret[n++] = id;
        }
    }
    return n;
}

/* The pair (left, right): its rank, and *ret_merged what it becomes. */
static uint32_t pair_rank(const struct bpe *m, int32_t left, int32_t right, int32_t *ret_merged)
{
    const struct merge_slot *s = find_merge(m, left, right);

    if (!s) {
        return BPE_NO_RANK;
    }
    *ret_merged = s->id;
    return s->rank;
}

static int encode_short(const struct bpe *m, struct bt_str piece, struct bt_ids *out)
{
    int32_t ids[SHORT_PIECE], merged[SHORT_PIECE];
    uint32_t rank[SHORT_PIECE];
    size_t n = byte_ids(m, piece, ids);

    for (size_t i = 0; i + 1 < n; i++) {
        rank[i] = pair_rank(m, ids[i], ids[i + 1], &merged[i]);
    }
    for (;;) {
        uint32_t best = BPE_NO_RANK;
        size_t at = 0;

        for (size_t i = 0; i + 1 < n; i++) {
            if (rank[i] < best) {
                best = rank[i];
                at = i;
            }
        }
        if (best == BPE_NO_RANK) {
            return bt_ids_add(out, ids, n);
        }
        ids[at] = merged[at];
        n--;
        memmove(ids + at + 1, ids + at + 2, (n - at - 1) * sizeof(*ids));
        memmove(rank + at, rank + at + 1, (n - at - 1) * sizeof(*rank));
        memmove(merged + at, merged + at + 1, (n - at - 1) * sizeof(*merged));
        if (at + 1 < n) {
            rank[at] = pair_rank(m, ids[at], ids[at + 1], &merged[at]);
        }
        if (at > 0) {
            rank[at - 1] = pair_rank(m, ids[at - 1], ids[at], &merged[at - 1]);
        }
    }
}

static int heap_push(struct bpe_work *w, uint64_t key)
{
    size_t i;

    if (w->n_heap == w->cap_heap) {
        size_t cap = w->cap_heap * 2;
        uint64_t *p = realloc(w->heap, cap * sizeof(*p));

        if (!p) {
            return BT_E_NOMEM;
        }
        w->heap = p;
        w->cap_heap = cap;
    }
    i = w->n_heap++;
    while (i && w->heap[(i - 1) / 4] > key) {
        w->heap[i] = w->heap[(i - 1) / 4];
        i = (i - 1) / 4;
    }
    w->heap[i] = key;
    return BT_OK;
}

/* Four children a node: half the levels, and the children share a cache line. */
static uint64_t heap_pop(struct bpe_work *w)
{
    uint64_t *h = w->heap, top = h[0], key = h[--w->n_heap];
    size_t n = w->n_heap, i = 0;

    for (;;) {
        size_t c = 4 * i + 1, best = c, end = BT_MIN(c + 4, n);

        if (c >= n) {
            break;
        }
        for (c++; c < end; c++) {
            if (h[c] < h[best]) {
                best = c;
            }
        }
        if (h[best] >= key) {
            break;
        }
        h[i] = h[best];
        i = best;
    }
    h[i] = key;
    return top;
}

static int work_reserve(struct bpe_work *w, size_t n)
{
    if (n > w->cap_syms) {
        free(w->syms);
        w->cap_syms = 0;
        w->syms = bt_calloc(n, sizeof(*w->syms));
        if (!w->syms) {
            return BT_E_NOMEM;
        }
        w->cap_syms = n;
    }
    if (n > w->cap_heap) {
        free(w->heap);
        w->cap_heap = 0;
        w->heap = bt_calloc(n, sizeof(*w->heap));
        if (!w->heap) {
            return BT_E_NOMEM;
        }
        w->cap_heap = n;
    }
    w->n_heap = 0;
    return BT_OK;
}

/* Works out the merge of symbol i with the next one and queues it. */
static int queue_pair(const struct bpe *m, struct bpe_work *w, int32_t i)
{
    struct bpe_sym *s = &w->syms[i];

    s->rank = BPE_NO_RANK;
    if (s->next >= 0) {
        s->rank = pair_rank(m, s->id, w->syms[s->next].id, &s->merged);
    }
    return s->rank == BPE_NO_RANK ? BT_OK : heap_push(w, (uint64_t)s->rank << 32 | (uint32_t)i);
}

static int
encode_long(const struct bpe *m, struct bt_str piece, struct bpe_work *w, struct bt_ids *out)
{
    struct bpe_sym *syms;
    int32_t n = 0;
    int rc;

    if (piece.n > INT32_MAX) {
        return BT_E_TOO_LARGE;
    }
    rc = work_reserve(w, piece.n);
    if (rc < 0) {
        return rc;
    }
    syms = w->syms;
    for (size_t i = 0; i < piece.n; i++) {
        struct bt_str one = {piece.p + i, 1};

        n += (int32_t)byte_ids(m, one, &syms[n].id);
    }
    for (int32_t i = 0; i < n; i++) {
        syms[i].prev = i - 1;
        syms[i].next = i + 1 < n ? i + 1 : -1;
    }
    for (int32_t i = 0; i < n && rc == BT_OK; i++) {
        rc = queue_pair(m, w, i);
    }
    while (rc == BT_OK && w->n_heap) {
        uint64_t key = heap_pop(w);
        int32_t i = (int32_t)(uint32_t)key, next;

        if (syms[i].id < 0 || syms[i].rank != key >> 32) {
            continue; /* one of the two has been merged otherwise since */
        }
        next = syms[i].next;
        syms[i].id = syms[i].merged;
        syms[i].next = syms[next].next;
        syms[next].id = -1;
        if (syms[i].next >= 0) {
            syms[syms[i].next].prev = i;
        }
        rc = queue_pair(m, w, i);
        if (rc == BT_OK && syms[i].prev >= 0) {
            rc = queue_pair(m, w, syms[i].prev);
        }
    }
    for (int32_t i = n ? 0 : -1; i >= 0 && rc == BT_OK; i = syms[i].next) {
        rc = bt_ids_push(out, syms[i].id);
    }
    return rc;
}

int bpe_encode_piece(const struct bpe *m,
                     struct bt_str piece,
                     struct bpe_work *w,
                     struct bt_ids *out)
{
    int32_t id = bpe_find(m, piece);

    if (id >= 0 && m->direct[id]) {
        return bt_ids_push(out, id);
    }
    return piece.n <= SHORT_PIECE ? encode_short(m, piece, out) : encode_long(m, piece, w, out);
}
