/* Memory that outlives the engine: pool and ledger from the keeper, adoption of what a predecessor
 * left, and leaving it whole at the end (ARCHITECTURE.md, "Memory outlives the process").
 *
 * Two regions: "kv", the pool, and "kv-ledger"; on a device two more, "weights" (its memory) and
 * "device-notes". All are another one as soon as geometry or model change; the ledger is emptied if
 * the root of keys or the pool's identity is not the one it was written for.
 *
 * Thread: the one that creates and destroys the engine. */
#include "kernels/engine/engine_int.h"

#include "common/obs/log.h"
#include "kvstore/keeper/client.h"

#include <openssl/sha.h>

#define NOTES_BYTES ((size_t)64 << 10)

static struct kv_keeper_want want(const struct kn_engine *e, const struct kv_layout *layout)
{
    struct kv_keeper_want w = {.ops = e->cfg.mem ? e->cfg.mem : &bt_mem_host};

    kv_ledger_digest(layout, e->cfg.block_tokens, e->cfg.key.model_digest, w.digest);
    return w;
}

int kn_keep_pool(struct kn_engine *e, const struct kv_layout *layout, struct bt_err *err)
{
    struct kv_keeper_want w = want(e, layout);
    struct kv_keeper_got got;
    int rc;

    w.name = "kv";
    w.bytes = layout->bytes;
    rc = kv_keeper_get(e->cfg.keeper, &w, &got, err);
    if (rc < 0) {
        return rc;
    }
    rc = kv_pool_create_in(layout, &got.mem, &e->pool, err);
    if (rc < 0) {
        got.mem.ops->free(&got.mem);
        return rc;
    }
    e->keep.pool_id = got.id;
    return BT_OK;
}

/* What weights of this model on a device are called: another layout of them is another version. */
static void weights_digest(const struct kn_engine *e, size_t bytes, uint8_t ret[32])
{
    uint8_t in[32 + 32] = "baton-weights-1";
    uint64_t n = bytes;

    memcpy(in + 24, &n, sizeof(n));
    memcpy(in + 32, e->cfg.key.model_digest, 32);
    SHA256(in, sizeof(in), ret);
}

static int get_weights(void *arg,
                       const struct bt_mem_ops *ops,
                       size_t bytes,
                       struct bt_mem_region *ret,
                       bool *ret_whole,
                       struct bt_err *err)
{
    struct kn_engine *e = arg;
    struct kv_keeper_want w = {.name = "weights", .bytes = bytes, .ops = ops};
    struct kv_keeper_got got;
    int rc;

    if (!ops->import) {
        return ops->alloc(bytes, "baton-weights", ret, err);
    }
    weights_digest(e, bytes, w.digest);
    rc = kv_keeper_get(e->cfg.keeper, &w, &got, err);
    if (rc == BT_OK) {
        *ret = got.mem;
        *ret_whole = got.kept;
        BT_INFO("weights", "bytes=%zu kept=%d", bytes, got.kept);
    }
    return rc;
}

const struct kn_model_home *kn_keep_home(struct kn_engine *e)
{
    struct kv_keeper_want w = {.name = "device-notes", .bytes = NOTES_BYTES, .ops = &bt_mem_host};
    struct kv_keeper_got got;
    struct bt_err err;

    if (!e->cfg.keeper || !e->cfg.device || !e->cfg.key.model_digest) {
        return NULL;
    }
    e->keep.home = (struct kn_model_home){.weights = get_weights, .arg = e};
    weights_digest(e, 0, w.digest);
    if (kv_keeper_get(e->cfg.keeper, &w, &got, &err) == BT_OK) { /* else it measures anew */
        e->keep.notes_mem = got.mem;
        e->keep.home.notes = got.mem.base;
        e->keep.home.notes_bytes = NOTES_BYTES;
    }
    return &e->keep.home;
}

int kn_keep_adopt(struct kn_engine *e, struct bt_err *err)
{
    const struct kv_layout *layout = kv_pool_layout(e->pool);
    struct kv_keeper_want w = want(e, layout);
    struct kv_ledger_cfg lc = {.layout = layout,
                               .block_tokens = e->cfg.block_tokens,
                               .root = e->root,
                               .pool_id = e->keep.pool_id,
                               .incarnation = kv_keeper_incarnation(e->cfg.keeper),
                               .pool = kv_pool_region(e->pool)->base};
    struct kv_keeper_got got;
    struct kv_adopted adopted;
    int rc;

    w.name = "kv-ledger";
    w.bytes = kv_ledger_bytes(layout, e->cfg.block_tokens);
    w.ops = &bt_mem_host;
    rc = kv_keeper_get(e->cfg.keeper, &w, &got, err);
    if (rc < 0) {
        return rc;
    }
    e->keep.ledger_mem = got.mem;
    lc.mem = got.mem.base;
    lc.bytes = got.mem.bytes;
    rc = kv_ledger_create(&lc, &e->keep.ledger, err);
    if (rc < 0) {
        return rc;
    }
    kv_pool_set_ledger(e->pool, e->keep.ledger);
    rc = kv_index_adopt(e->index, e->keep.ledger, &adopted, err);
    if (rc == BT_OK) {
        atomic_store_explicit(&e->stats.blocks_adopted, adopted.n_blocks, memory_order_relaxed);
        atomic_store_explicit(&e->stats.blocks_bad, adopted.n_bad, memory_order_relaxed);
    }
    return rc;
}

void kn_keep_leave(struct kn_engine *e)
{
    if (e->keep.ledger) {
        kv_index_leave_ledger(e->index);
        kv_pool_set_ledger(e->pool, NULL);
    }
}

void kn_keep_fini(struct kn_engine *e)
{
    kv_ledger_destroy(e->keep.ledger);
    if (e->keep.notes_mem.base) {
        e->keep.notes_mem.ops->free(&e->keep.notes_mem);
    }
    if (e->keep.ledger_mem.base) {
        e->keep.ledger_mem.ops->free(&e->keep.ledger_mem);
    }
}
