/* The ledger beside a pool: what a successor needs to go on with the pages of a process that died.
 *
 * It lies in shared memory, as the pool does, and is right at every moment at which its writer may
 * be killed: a block is sealed last, after its bytes and its record, and unsealed first, before one
 * of its pages is used again. So a sealed record always speaks of whole bytes. Bytes that were
 * damaged otherwise are found by their checksum, which is compared when a block is first used.
 *
 * Format, version 1; integers in the byte order of the host. Offsets in bytes.
 *   header (4096)
 *   0    8   "BTLEDGR1"                   64  16  key of the empty prefix (root)
 *   8    4   version                      80  8   identity of the pool's memory
 *   12   4   1 = whole, 0 = being made    88  8   incarnation of the last writer
 *   16   32  digest of the geometry
 *   pages, from 4096: n_pages times
 *   0    4   generation (pool.h)          4   4   0 free, 1 filling, 2 sealed
 *   blocks, from the next multiple of 64: one record for each block that fits into the pool, each
 *   a multiple of 64 long
 *   0    4   1 = sealed                   40  16  key
 *   4    4   1 = has a parent             56  16  key of the parent
 *   8    8   number of the seal, rising   72  16  root
 *   16   8   when it was let go, rising;  88  4n  pages, n = pages of a block
 *            all ones = in use            ..  4n  their generations
 *   24   8   XXH3 of the block's bytes    ..  4t  token ids, t = tokens of a block
 *   32   8   XXH3 of 4..15 and 24..31, and 40..end of the ids
 * The bytes of a block are, layer by layer, those of its pages in order. Sums go piece by piece
 * (what a page holds of a layer; the ranges above), each seeded with the sum so far, 0 at first.
 * Whatever changes here is a new version: older content is then dropped, never read.
 *
 * Cost on the engine's thread (tests/bench/run ledger): a seal reads the block's bytes once, at the
 * speed of memory (0.2 to 0.5 ms per MiB, under 1 % of computing the block on a CPU), and writes
 * its record, about 1 KiB; taking or giving a page, holding or letting go a block is one store.
 *
 * Thread: the engine's. Sealing is no system call and takes no lock. */
#ifndef KV_BLOCK_LEDGER_H
#define KV_BLOCK_LEDGER_H

#include "kvstore/block/key.h"
#include "kvstore/block/layout.h"

struct kv_ledger;

struct kv_ledger_cfg {
    const struct kv_layout *layout; /* copied */
    int block_tokens;               /* a multiple of the page's */
    struct kv_key root;             /* of all content that may stay */
    uint64_t pool_id;               /* identity of the pool's memory; no two memories have one */
    uint64_t incarnation;           /* the writer's */
    const void *pool;               /* first byte of the pool */
    void *mem;                      /* of the ledger; borrowed, as the pool's */
    size_t bytes;                   /* of mem; at least kv_ledger_bytes */
};

/* Bytes of a ledger; 0 if block_tokens does not fit the layout's pages. */
size_t kv_ledger_bytes(const struct kv_layout *layout, int block_tokens);
/* Digest of everything that decides where bytes lie, and of `model`, 32 bytes: memory under another
 * digest is of no use. */
void kv_ledger_digest(const struct kv_layout *layout,
                      int block_tokens,
                      const uint8_t *model,
                      uint8_t ret_digest[32]);

/* Takes the ledger over if it is whole and fits the geometry, the root and the pool's memory;
 * otherwise empties it first. Nobody else may write it. BT_E_INVALID: too small. */
int kv_ledger_create(const struct kv_ledger_cfg *cfg,
                     struct kv_ledger **ret_ledger,
                     struct bt_err *err) BT_MUST_USE;
/* Leaves the memory as it is: that is the point. NULL is fine. */
void kv_ledger_destroy(struct kv_ledger *ledger);
/* Number of block records. */
uint32_t kv_ledger_n_blocks(const struct kv_ledger *ledger);
/* Whether the content of a predecessor was there. */
bool kv_ledger_kept(const struct kv_ledger *ledger);

/* ---- pages ---- */
uint32_t kv_ledger_generation(const struct kv_ledger *ledger, uint32_t page);
void kv_ledger_page_taken(struct kv_ledger *ledger, uint32_t page, uint32_t generation);
void kv_ledger_page_free(struct kv_ledger *ledger, uint32_t page);

/* ---- blocks ---- */
/* Ranges point to the caller's memory (seal) or into the ledger (read). */
struct kv_ledger_block {
    struct kv_key key, root;
    struct kv_key parent; /* if has_parent */
    bool has_parent;
    const int32_t *ids;    /* [block_tokens] */
    const uint32_t *pages; /* [block_pages] */
    uint64_t seal;         /* number of the seal; read only */
    uint64_t let_go;       /* UINT64_MAX = was in use; read only */
};

/* The block's bytes are complete and its pages do not change until kv_ledger_unseal. Record `slot`
 * is free. It counts as in use. */
void kv_ledger_seal(struct kv_ledger *ledger, uint32_t slot, const struct kv_ledger_block *block);
/* Before its pages are given away. */
void kv_ledger_unseal(struct kv_ledger *ledger, uint32_t slot);
/* The block is used, or was let go last of all. */
void kv_ledger_mark_held(struct kv_ledger *ledger, uint32_t slot);
void kv_ledger_mark_let_go(struct kv_ledger *ledger, uint32_t slot);
bool kv_ledger_sealed(const struct kv_ledger *ledger, uint32_t slot);
/* A sealed record. BT_E_CORRUPT: damaged, or it names pages that are not sealed with the generation
 * that it says. What the pages hold is not looked at, nor whether the key is right. */
int kv_ledger_read(const struct kv_ledger *ledger,
                   uint32_t slot,
                   struct kv_ledger_block *ret_block) BT_MUST_USE;
/* Whether the bytes of a sealed block still have their checksum. Reads all of them. */
bool kv_ledger_check_bytes(const struct kv_ledger *ledger, uint32_t slot);

#endif
