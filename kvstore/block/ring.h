/* Consistent hashing: which of the store's daemons are to hold a block. Every node that knows the
 * same members computes the same owners; a member that comes or goes moves only its own share.
 *
 * Each member has KV_RING_POINTS points on a circle of 64-bit numbers: XXH3-64 of its name, seeded
 * with the point's number. The owners of a key are the first `n` different members clockwise from
 * XXH3-64 of the key. (Karger et al., Consistent Hashing and Random Trees, 1997.)
 *
 * Immutable; any thread may read it. */
#ifndef KV_BLOCK_RING_H
#define KV_BLOCK_RING_H

#include "kvstore/block/key.h"

#define KV_RING_POINTS 128

struct kv_ring; /* whoever created it owns it */

/* A ring of names[0..n), in any order; n may be 0. NULL without memory. */
struct kv_ring *kv_ring_create(const char *const *names, size_t n);
void kv_ring_destroy(struct kv_ring *ring); /* NULL is fine */
/* Writes the indexes (into names) of up to `max` owners to ret_idx, the first owner first; returns
 * how many, at most the number of members. */
size_t
kv_ring_owners(const struct kv_ring *ring, const struct kv_key *key, size_t max, uint32_t *ret_idx);

#endif
