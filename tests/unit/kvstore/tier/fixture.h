/* What the tests of the tiers share: a small pool, chains of blocks named by letters whose bytes
 * follow from their ids, tiers over memory and a directory, and the engine's side of a source. */
#ifndef KV_TESTS_TIER_FIXTURE_H
#define KV_TESTS_TIER_FIXTURE_H

#include "common/thr/time.h"
#include "kvstore/tier/tiers.h"

#include <stdatomic.h>

#define BLOCK      16 /* tokens; two pages */
#define N_LAYERS   3
#define PAGE_BYTES 256 /* of a layer */
#define BLOB_BYTES (N_LAYERS * 2 * PAGE_BYTES)
#define MAX_CHAIN  64

struct world {
    struct kv_pool *pool;
    struct kv_hasher *hasher;
    struct kv_tiers_conf conf;
    struct kv_tiers *tiers;
    struct kv_source *src;
    char dir[64];
    int key_bits;
    uint64_t share_bytes; /* of a load, from which on threads share it */
    bool no_source;
    void (*events)(void *arg, const struct kv_tiers_event *ev, size_t n);
    void *arg;
};

struct chain {
    int32_t ids[MAX_CHAIN * BLOCK];
    struct kv_key keys[MAX_CHAIN];
    struct kv_chain c;
    uint32_t last_tokens;
};

/* Pool of n_pages; conf has no disk, room for n_blobs in host memory. */
void world_make(struct world *w, uint32_t n_pages, uint32_t n_blobs);
void world_with_disk(struct world *w, uint32_t n_files);
void world_start(struct world *w); /* creates the tiers, waits for the scan */
void world_begin(struct world *w); /* does not wait; world_scanned does */
void world_scanned(struct world *w);
void world_stop(struct world *w);
void world_free(struct world *w); /* stops and removes the directory */
/* Removes the files below a directory that match a suffix (NULL = all); returns how many. */
int files_of(const char *dir,
             const char *suffix,
             void (*fn)(void *arg, const char *path),
             void *arg);

/* A chain of n blocks, drawn from a name: `same` blocks at its start are those of any chain with
 * the same `head`. */
void chain_make(
    struct world *w, struct chain *c, uint32_t head, uint32_t same, uint32_t tail, uint32_t n);
/* Cuts the last block to n tokens. */
void chain_cut(struct world *w, struct chain *c, uint32_t n_tokens);

/* Waits for what other threads do; false after 20 s. */
bool eventually(bool (*fn)(void *arg), void *arg);

/* Offers block i; BT_PENDING if it was not wanted, else what done said. */
int offer_block(struct world *w, const struct chain *c, uint32_t i);
/* Offers all blocks; returns how many were kept. */
uint32_t offer_chain(struct world *w, const struct chain *c);

struct taken {
    struct kv_find find;
    struct kv_load load;
    uint32_t *pages;
    atomic_uint n_done, n_progress;
};
/* Looks up; done was called when it returns. */
void take_find(struct world *w, const struct chain *c, uint32_t first, struct taken *t);
/* Loads what was found, into pages of the pool; waits for done. */
void take_load(struct world *w, struct taken *t);
/* Starts it and does not wait; take_wait does. */
void take_begin(struct world *w, struct taken *t);
bool take_wait(struct taken *t);
/* True if the first n blocks that were loaded hold what they should. */
bool take_right(struct world *w, const struct chain *c, struct taken *t, uint32_t n);
void take_end(struct world *w, struct taken *t); /* ends the find, gives the pages back */
/* All of it: returns how many blocks came, all with the right bytes (else the test fails). */
uint32_t take_chain(struct world *w, const struct chain *c);

/* Fills, or compares with, what block i's page p holds in a layer. */
void fill_page(void *at, const struct chain *c, uint32_t i, uint32_t p, int layer);

#endif
