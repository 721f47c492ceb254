/* Memory that outlives the engine: pool and ledger from the keeper, adoption of what a predecessor
 * left, and leaving it whole at the end (ARCHITECTURE.md, "Memory outlives the process").
 *
 * Two regions: "kv", the pool, and "kv-ledger". Both are another one as soon as geometry or model
 * change; the ledger is emptied if the root of keys or the pool's identity is not the one it was
 * written for.
 *
 * Thread: the one that creates and destroys the engine. */
#include "kernels/engine/engine_int.h"

#include "kvstore/keeper/client.h"

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
    if (e->keep.ledger_mem.base) {
        e->keep.ledger_mem.ops->free(&e->keep.ledger_mem);
    }
}
