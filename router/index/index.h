/* The router's prefix index: which block lies on which node, in which tier.
 *
 * A block is the 64-bit fingerprint of its key. What is known of one node is a view; an entry is
 * (block, view) with a bit for each tier. The table (table.h) has slots of 16 bytes
 * sorted by the mixed fingerprint and grows a little at a time: 16 bytes a block at a load of 0.75
 * to 0.85. A slot holds up to four views itself; blocks on more nodes (shared heads) have an
 * array.
 *
 * A view that is closed is invisible at once; its entries are swept out in pieces, and its number
 * is used again after that. So a new picture of a node is built in a view of its own beside the old
 * one, and takes its place in one step.
 *
 * Guesses: what was just sent to a node will lie there soon. A guess is counted (several requests
 * may guess the same block) and is no part of what the node's events say.
 *
 * Thread: the control loop's, writer and reader. Measured (tests/bench/run index): events cost a
 * few tens of nanoseconds, so that even a million a second leave the loop most of its time, and
 * look-ups need no lock and no copy. */
#ifndef RT_INDEX_INDEX_H
#define RT_INDEX_INDEX_H

#include "kvstore/block/events.h"

#define RT_INDEX_TIERS 3 /* pool, host, disk: where a view's blocks lie */
#define RT_TIERS       4 /* and what others share, as seen from a view: enum kv_tier */
#define RT_VIEWS_MAX   4095
#define RT_VIEW_NONE   UINT16_MAX

struct rt_index;

int rt_index_create(struct rt_index **ret_index, struct bt_err *err) BT_MUST_USE;
void rt_index_destroy(struct rt_index *x); /* NULL is fine */

/* BT_E_EXHAUSTED: all numbers are in use or not yet swept. */
int rt_index_open(struct rt_index *x, uint16_t *ret_view) BT_MUST_USE;
/* RT_VIEW_NONE is fine. Guesses may still be withdrawn afterwards. */
void rt_index_close(struct rt_index *x, uint16_t view);
/* Sweeps a part of what closed views left, more of it the more has come since: however fast views
 * come and go, what they leave stays below a few times what comes between two sweeps and what is
 * open. False = nothing is left to sweep. */
bool rt_index_sweep(struct rt_index *x);

/* Whether what the view has in host memory and on disk can be had by all that are part of the KV
 * store: a daemon's, or a node's that serves its tiers. Not at first. */
void rt_index_share(struct rt_index *x, uint16_t view, bool shared);

/* A view holds at most so many blocks, guesses not counted against it; 0 = any number. */
void rt_index_limit(struct rt_index *x, uint16_t view, uint64_t most);
/* Changes of a view, in order. What changes nothing is fine. BT_E_NOMEM: some are missing, which
 * the digest will tell. BT_E_EXHAUSTED: some are, since the view is full. */
int rt_index_apply(struct rt_index *x, uint16_t view, const struct kv_event *ev, size_t n)
    BT_MUST_USE;
/* As the node's own log makes it from the same changes. */
struct kv_digest rt_index_digest(const struct rt_index *x, uint16_t view, unsigned tier);

/* Each guess is withdrawn once, by the same view and blocks. BT_E_NOMEM: nothing was added. */
int rt_index_guess(struct rt_index *x, uint16_t view, const uint64_t *fps, size_t n) BT_MUST_USE;
void rt_index_withdraw(struct rt_index *x, uint16_t view, const uint64_t *fps, size_t n);

/* The longest run of a prompt's blocks, from the first on, that a view has. A block counts for the
 * fastest tier that has it; a guess counts as the pool. */
struct rt_run {
    uint16_t view;
    uint32_t upto[RT_INDEX_TIERS]; /* blocks, using tiers 0..t only; upto[2] is the whole run */
    uint32_t slow[RT_INDEX_TIERS]; /* blocks of tier t in upto[t] */
    uint32_t host_in_disk;         /* blocks of the host tier in upto[2] */
    uint32_t guessed;              /* in upto[0]: known by a guess alone */
    uint32_t store;                /* blocks behind upto[2] that shared views have */
};
/* Runs of all views that have the first block. Valid until the next call. */
const struct rt_run *
rt_index_look(struct rt_index *x, const uint64_t *fps, size_t n, size_t *ret_n_runs);
/* Of the last look-up: blocks from the first on that shared views have, for views without a run. */
uint32_t rt_index_looked_store(const struct rt_index *x);

struct rt_index_stats {
    uint64_t blocks, entries; /* closed views' included until swept */
    uint64_t dead;            /* of the entries: closed views' */
    uint64_t guesses;
    uint64_t bytes; /* of memory, all of it */
    uint32_t views, closed;
};
struct rt_index_stats rt_index_stats(const struct rt_index *x);

#endif
