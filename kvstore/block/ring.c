/* See ring.h. Points are sorted once; a look-up is a binary search and a short walk. */
#include "kvstore/block/ring.h"

#include <stdlib.h>
#include <xxhash.h>

struct point {
    uint64_t at;
    uint32_t idx;
};

struct kv_ring {
    size_t n_members, n_points;
    struct point points[];
};

static int by_place(const void *a, const void *b)
{
    const struct point *x = a, *y = b;

    if (x->at != y->at) {
        return x->at < y->at ? -1 : 1;
    }
    return x->idx < y->idx ? -1 : x->idx > y->idx;
}

struct kv_ring *kv_ring_create(const char *const *names, size_t n)
{
    size_t n_points = n * KV_RING_POINTS;
    struct kv_ring *r = calloc(1, sizeof(*r) + n_points * sizeof(r->points[0]));

    if (!r) {
        return NULL;
    }
    r->n_members = n;
    r->n_points = n_points;
    for (size_t i = 0; i < n_points; i++) {
        const char *name = names[i / KV_RING_POINTS];

        r->points[i].at = XXH3_64bits_withSeed(name, strlen(name), i % KV_RING_POINTS);
        r->points[i].idx = (uint32_t)(i / KV_RING_POINTS);
    }
    qsort(r->points, n_points, sizeof(r->points[0]), by_place);
    return r;
}

void kv_ring_destroy(struct kv_ring *ring)
{
    free(ring);
}

/* The first point at or behind `at`. */
static size_t first_point(const struct kv_ring *r, uint64_t at)
{
    size_t lo = 0, hi = r->n_points;

    while (lo < hi) {
        size_t mid = lo + (hi - lo) / 2;

        if (r->points[mid].at < at) {
            lo = mid + 1;
        } else {
            hi = mid;
        }
    }
    return lo == r->n_points ? 0 : lo;
}

size_t
kv_ring_owners(const struct kv_ring *ring, const struct kv_key *key, size_t max, uint32_t *ret_idx)
{
    size_t want = max < ring->n_members ? max : ring->n_members;
    size_t at = ring->n_points ? first_point(ring, XXH3_64bits(key->b, sizeof(key->b))) : 0;
    size_t n = 0;

    for (size_t i = 0; i < ring->n_points && n < want; i++) {
        uint32_t idx = ring->points[(at + i) % ring->n_points].idx;
        bool known = false;

        for (size_t k = 0; k < n; k++) {
            known = known || ret_idx[k] == idx;
        }
        if (!known) {
            ret_idx[n++] = idx;
        }
    }
    return n;
}
