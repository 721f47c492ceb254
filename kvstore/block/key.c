/* Block keys by SHA-256 of the crypto library; one context and one fetched digest per hasher, so
 * that a block costs no look-up and no allocation. */
#include "kvstore/block/key.h"

#include "common/base/buf.h"

#include <openssl/evp.h>
#include <stdlib.h>

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__,
               "token ids are hashed as they lie in memory");

enum tag {
    TAG_SECRET = 1,
    TAG_MODEL = 2,
    TAG_WEIGHT_EPOCH = 3,
    TAG_ADAPTER = 4,
    TAG_TENANT_SALT = 5,
    TAG_KV_FORMAT = 6,
    TAG_NUMERICS = 7,
    TAG_PARENT = 16,
    TAG_TOKENS = 17,
};

#define FIELD_HEAD      5
#define BLOCK_HEAD      (4 + FIELD_HEAD + 16 + FIELD_HEAD)
#define BLOCK_IDS_MAX   (1u << 20)
#define BLOCK_IDS_SHORT 256 /* up to here head and tokens are hashed in one piece */

struct kv_hasher {
    EVP_MD *md;
    EVP_MD_CTX *ctx;
};

int kv_hasher_create(struct kv_hasher **ret_hasher, struct bt_err *err)
{
    struct kv_hasher *h = bt_calloc(1, sizeof(*h));

    if (!h) {
        return BT_FAIL(err, BT_E_NOMEM, "block keys: out of memory");
    }
    h->md = EVP_MD_fetch(NULL, "SHA256", NULL);
    h->ctx = EVP_MD_CTX_new();
    if (!h->md || !h->ctx || EVP_DigestInit_ex2(h->ctx, h->md, NULL) != 1) {
        kv_hasher_destroy(h);
        return BT_FAIL(err, BT_E_INTERNAL, "block keys: the crypto library has no SHA-256");
    }
    *ret_hasher = h;
    return BT_OK;
}

void kv_hasher_destroy(struct kv_hasher *hasher)
{
    if (hasher) {
        EVP_MD_CTX_free(hasher->ctx);
        EVP_MD_free(hasher->md);
        free(hasher);
    }
}

/* SHA-256 over two pieces, cut to 16 bytes. Once the context stands, the library cannot fail. */
static void digest(struct kv_hasher *h, struct bt_str a, struct bt_str b, struct kv_key *ret_key)
{
    uint8_t full[32];
    int ok = EVP_DigestInit_ex2(h->ctx, NULL, NULL) == 1 && EVP_DigestUpdate(h->ctx, a.p, a.n) == 1;

    if (b.n > 0) {
        ok = ok && EVP_DigestUpdate(h->ctx, b.p, b.n) == 1;
    }
    ok = ok && EVP_DigestFinal_ex(h->ctx, full, NULL) == 1;
    BT_BUG_ON(!ok);
    memcpy(ret_key->b, full, sizeof(ret_key->b));
}

static void put_u32(uint8_t *p, uint32_t v)
{
    memcpy(p, &v, sizeof(v));
}

static int add_field(struct bt_buf *b, enum tag tag, const void *p, size_t n)
{
    uint8_t head[FIELD_HEAD] = {(uint8_t)tag};
    int rc;

    if (n > KV_KEY_FIELD_MAX) {
        return BT_E_TOO_LARGE;
    }
    put_u32(head + 1, (uint32_t)n);
    rc = bt_buf_add(b, head, sizeof(head));
    return rc == BT_OK && n > 0 ? bt_buf_add(b, p, n) : rc;
}

int kv_key_root(struct kv_hasher *hasher,
                const struct kv_key_root_args *args,
                struct kv_key *ret_key,
                struct bt_err *err)
{
    const struct {
        enum tag tag;
        const void *p;
        size_t n;
    } fields[] = {
        {TAG_SECRET, args->secret.p, args->secret.n},
        {TAG_MODEL, args->model_digest, 32},
        {TAG_WEIGHT_EPOCH, &args->weight_epoch, sizeof(args->weight_epoch)},
        {TAG_ADAPTER, args->adapter.p, args->adapter.n},
        {TAG_TENANT_SALT, args->tenant_salt.p, args->tenant_salt.n},
        {TAG_KV_FORMAT, args->kv_format_digest, 32},
        {TAG_NUMERICS, args->numerics.p, args->numerics.n},
    };
    struct bt_buf b = {0};
    int rc = bt_buf_add(&b, "BKR1", 4);

    for (size_t i = 0; rc == BT_OK && i < BT_ARRAY_LEN(fields); i++) {
        rc = add_field(&b, fields[i].tag, fields[i].p, fields[i].n);
    }
    if (rc == BT_OK) {
        digest(hasher, bt_buf_str(&b), (struct bt_str){NULL, 0}, ret_key);
    } else {
        BT_FAIL(err, rc, "block key root: %s (a field holds at most %d bytes)", bt_rc_text(rc),
                KV_KEY_FIELD_MAX);
    }
    if (b.p) {
        explicit_bzero(b.p, b.n); /* the secret was in it */
    }
    bt_buf_fini(&b);
    return rc;
}

void kv_key_block(struct kv_hasher *hasher,
                  const struct kv_key *parent,
                  const int32_t *ids,
                  size_t n,
                  struct kv_key *ret_key)
{
    uint8_t buf[BLOCK_HEAD + 4 * BLOCK_IDS_SHORT];
    struct bt_str head = {(const char *)buf, BLOCK_HEAD}, rest = {(const char *)ids, 4 * n};

    BT_BUG_ON(n == 0 || n > BLOCK_IDS_MAX);
    memcpy(buf, "BKB1", 4);
    buf[4] = TAG_PARENT;
    put_u32(buf + 5, sizeof(parent->b));
    memcpy(buf + 9, parent->b, sizeof(parent->b));
    buf[25] = TAG_TOKENS;
    put_u32(buf + 26, (uint32_t)(4 * n));
    if (n <= BLOCK_IDS_SHORT) {
        memcpy(buf + BLOCK_HEAD, ids, 4 * n);
        head.n += 4 * n;
        rest.n = 0;
    }
    digest(hasher, head, rest, ret_key);
}

size_t kv_key_chain(struct kv_hasher *hasher,
                    const struct kv_key *root,
                    const struct kv_key_tokens *tokens,
                    struct kv_key *ret_keys)
{
    size_t n_blocks;

    BT_BUG_ON(tokens->block_tokens == 0);
    n_blocks = tokens->n / tokens->block_tokens;
    for (size_t i = 0; i < n_blocks; i++) {
        kv_key_block(hasher, i ? &ret_keys[i - 1] : root, tokens->ids + i * tokens->block_tokens,
                     tokens->block_tokens, &ret_keys[i]);
    }
    return n_blocks;
}
