/* Prefix index of one engine: which blocks lie in its pool, found by key.
 *
 * An entry is one identity block: its key, its parent's entry, its token ids, its pages. A look-up
 * walks from the first block on; a key alone proves nothing: the ids must be equal and the parent
 * must be the entry found before it (for a first block: the root), so that two inputs with equal
 * keys are a miss, counted, and never a wrong answer.
 *
 * Who uses a block holds it and all blocks before it; while a block is held its pages stay as they
 * are. What nobody holds is cached: it stays until pages are needed. Holders let go from the last
 * block to the first, and whoever holds a block holds its parents, so a block always stands in
 * front of its parent in the list of unheld blocks: taking its front is least recently used, leaf
 * first, shared heads last.
 *
 * Only finished content comes in: K and V of all layers of all tokens (kv_index_publish).
 *
 * Thread: the engine's. No allocation after create. */
#ifndef KV_BLOCK_INDEX_H
#define KV_BLOCK_INDEX_H

#include "common/ds/list.h"
#include "kvstore/block/events.h"
#include "kvstore/block/key.h"
#include "kvstore/block/pool.h"

struct kv_index;

/* Read-only for users, except `mark` and `adopted`. Valid while held, or until `changes` changes.
 */
struct kv_block {
    struct bt_list link;     /* unheld blocks, least recently used first */
    struct kv_block *next;   /* in its bucket */
    struct kv_block *parent; /* NULL = first block */
    struct kv_key key, root;
    uint32_t n_refs;
    uint32_t n_children;
    uint64_t used_ns;    /* when the last holder let go, by kv_index_set_time */
    uint32_t mark;       /* scratch of the caller, 0 in between */
    bool unchecked;      /* adopted, bytes not looked at yet; false for whatever is held */
    bool adopted;        /* so far nobody was offered it; whoever offers it clears this */
    bool doomed;         /* the index's own */
    uint64_t generation; /* of the entry; never used twice; 0 = none */
    int32_t *ids;        /* [block_tokens] */
    uint32_t *pages;     /* [block_pages], owned by the index */
};

struct kv_index_cfg {
    struct kv_pool *pool;      /* borrowed */
    int block_tokens;          /* a multiple of the page's */
    int key_bits;              /* 0 = all; fewer make collisions, for tests */
    struct kv_event_sink sink; /* told of blocks that come and go, as tier 0 (the pool) */
};

/* BT_E_CONFIG: block_tokens does not fit the pool's pages. */
int kv_index_create(const struct kv_index_cfg *cfg,
                    struct kv_index **ret_index,
                    struct bt_err *err) BT_MUST_USE;
/* Nothing may be held; the pages go to the free list. NULL is fine. */
void kv_index_destroy(struct kv_index *index);
uint32_t kv_index_block_tokens(const struct kv_index *index);
uint32_t kv_index_block_pages(const struct kv_index *index);

struct kv_adopted {
    uint32_t n_blocks, n_pages;
    uint32_t n_bad; /* records that were refused, with those that stood on them */
};
/* From now on blocks are sealed in the ledger (borrowed) as they come and unsealed before they go.
 * First those that a predecessor sealed are taken over: whose key is that of their parent and token
 * ids, whose parent is there, and whose pages are theirs alone. What is refused is unsealed. They
 * are unheld, in the order in which the predecessor would have given them up. Their bytes are
 * compared with the checksum when they are first found; damaged ones are then removed with their
 * children, counted (`bad`), and a miss. Once, after create, with the same ledger set in the pool.
 * BT_E_NOMEM: nothing was taken over. */
int kv_index_adopt(struct kv_index *index,
                   struct kv_ledger *ledger,
                   struct kv_adopted *ret,
                   struct bt_err *err) BT_MUST_USE;
/* From now on without the ledger, which stays as it is: a successor adopts the blocks. */
void kv_index_leave_ledger(struct kv_index *index);
/* Whether an unheld block is what it says; for who moves it elsewhere without having found it. A
 * damaged one is gone afterwards. */
bool kv_index_check(struct kv_index *index, struct kv_block *block);
/* Counted up when a block comes or goes: until then a match stays as it is. */
uint64_t kv_index_changes(const struct kv_index *index);

/* Key of the block of `ids` behind `parent` (the root for the first one), cut to key_bits. */
void kv_index_key(struct kv_index *index,
                  const struct kv_key *parent,
                  const int32_t *ids,
                  struct kv_key *ret_key);
/* Likewise of a tail: n tokens, fewer than a block's. */
void kv_index_tail_key(struct kv_index *index,
                       const struct kv_key *parent,
                       const int32_t *ids,
                       uint32_t n,
                       struct kv_key *ret_key);
/* Root of keys; computed once for all requests that may share blocks. */
int kv_index_root(struct kv_index *index,
                  const struct kv_key_root_args *args,
                  struct kv_key *ret_root,
                  struct bt_err *err) BT_MUST_USE;

/* A run of blocks from the first on. */
struct kv_chain {
    struct kv_key root;
    const struct kv_key *keys; /* [n_blocks] */
    const int32_t *ids;        /* [n_blocks * block_tokens] */
    uint32_t n_blocks;
};

/* The longest run that is here, into ret_blocks [n_blocks]; returns its length. Holds nothing. */
uint32_t
kv_index_match(struct kv_index *index, const struct kv_chain *chain, struct kv_block **ret_blocks);
/* Holds a run from the first block on, and lets it go. */
void kv_index_hold(struct kv_index *index, struct kv_block *const *blocks, uint32_t n);
void kv_index_drop(struct kv_index *index, struct kv_block *const *blocks, uint32_t n);
/* The same for the run that ends with `last`. */
void kv_index_hold_to(struct kv_index *index, struct kv_block *last);
void kv_index_drop_to(struct kv_index *index, struct kv_block *last);

enum kv_publish {
    KV_PUBLISH_NEW,       /* the pages are the index's now */
    KV_PUBLISH_SAME,      /* the block was here: the pages stay the caller's */
    KV_PUBLISH_COLLISION, /* another block has the key: likewise, and nothing is returned */
};

/* Offers the last block of `chain`; the caller holds its parent (NULL for the first) and its pages
 * belong to KV_OWNER_SEQ. NEW and SAME: *ret_block is the block, held for the caller. */
enum kv_publish kv_index_publish(struct kv_index *index,
                                 const struct kv_chain *chain,
                                 struct kv_block *parent,
                                 const uint32_t *pages,
                                 struct kv_block **ret_block);
/* Gives up unheld blocks until at least n pages are free or no block is left; returns how many
 * pages were. */
uint32_t kv_index_evict(struct kv_index *index, uint32_t n);
/* What time it is, for used_ns. */
void kv_index_set_time(struct kv_index *index, uint64_t now_ns);
/* Tells the sink of everything anew: cleared, then each block that is here. */
void kv_index_tell(const struct kv_index *index);
/* Gives up everything; false and a log line if something is held. */
bool kv_index_clear(struct kv_index *index);

struct kv_index_stats {
    uint32_t n_blocks, n_held;
    uint64_t oldest_ns; /* used_ns of the block that would be given up next; 0 = there is none */
    uint64_t published, duplicates, collisions, evictions;
    uint64_t adopted, bad; /* blocks of a predecessor: taken over, refused or found damaged */
};
struct kv_index_stats kv_index_stats(const struct kv_index *index);

#endif
