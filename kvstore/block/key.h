/* Block keys: the identity of a block of KV, the same on all nodes.
 *
 *   root  = K(everything but the tokens that decides the bytes of a block, and who may share it)
 *   key_0 = K(root, tokens of block 0), key_i = K(key_{i-1}, tokens of block i)
 *   K     = the first 16 bytes of SHA-256 over the layouts below
 *
 * So a key stands for its tokens and for all before them. Whoever does not know the cluster secret
 * cannot compute keys, nor aim for two equal ones. All integers are little-endian; a field is
 * { tag u8, length u32, bytes }; fields stand in this order, none is left out.
 *
 *   root                                       block
 *   offset size                                offset size
 *   0      4    "BKR1"                         0      4    "BKB1"
 *   4      5+s  tag 1, cluster secret          4      5+16 tag 16, parent key
 *          5+32 tag 2, model digest            25     5+4n tag 17, n token ids as int32
 *          5+8  tag 3, weight epoch u64
 *          5+a  tag 4, adapter (empty = none)
 *          5+t  tag 5, tenant salt (empty = shared by all)
 *          5+32 tag 6, KV-format digest
 *          5+n  tag 7, numerics id
 *
 * A change of any of it is a new first word ("BKR2"): old keys then miss, they never match.
 * tests/tools/block_keys.py computes the same keys independently.
 *
 * A hasher belongs to one thread at a time; keys are plain values. */
#ifndef KV_BLOCK_KEY_H
#define KV_BLOCK_KEY_H

#include "common/base/rc.h"

#define KV_KEY_FIELD_MAX 1024 /* bytes of a field of the root */

struct kv_key {
    uint8_t b[16];
};
_Static_assert(sizeof(struct kv_key) == 16, "stored and sent as it stands");

/* What decides the root; ranges are borrowed for the call. */
struct kv_key_root_args {
    struct bt_str secret;        /* at most KV_KEY_FIELD_MAX bytes, as the other ranges */
    const uint8_t *model_digest; /* 32 bytes */
    uint64_t weight_epoch;
    struct bt_str adapter;
    struct bt_str tenant_salt;
    const uint8_t *kv_format_digest; /* 32 bytes */
    struct bt_str numerics;
};

struct kv_hasher;

/* BT_E_INTERNAL if the crypto library has no SHA-256. */
int kv_hasher_create(struct kv_hasher **ret_hasher, struct bt_err *err) BT_MUST_USE;
void kv_hasher_destroy(struct kv_hasher *hasher); /* NULL is fine */

/* BT_E_TOO_LARGE: a range is longer than allowed. */
int kv_key_root(struct kv_hasher *hasher,
                const struct kv_key_root_args *args,
                struct kv_key *ret_key,
                struct bt_err *err) BT_MUST_USE;
/* Key of the block of `n` tokens behind `parent`; n from 1 to 2^20. ret_key may be parent. */
void kv_key_block(struct kv_hasher *hasher,
                  const struct kv_key *parent,
                  const int32_t *ids,
                  size_t n,
                  struct kv_key *ret_key);

struct kv_key_tokens {
    const int32_t *ids;
    size_t n;
    size_t block_tokens; /* identity block */
};

/* Keys of all full blocks of the tokens: n / block_tokens of them. Returns how many. */
size_t kv_key_chain(struct kv_hasher *hasher,
                    const struct kv_key *root,
                    const struct kv_key_tokens *tokens,
                    struct kv_key *ret_keys);

static inline bool kv_key_eq(const struct kv_key *a, const struct kv_key *b)
{
    return memcmp(a->b, b->b, sizeof(a->b)) == 0;
}

/* 64 bits of it, for tables that only hint (and are verified by the node). */
static inline uint64_t kv_key_fingerprint(const struct kv_key *k)
{
    uint64_t v = 0;

    for (int i = 7; i >= 0; i--) {
        v = v << 8 | k->b[i];
    }
    return v;
}

#endif
