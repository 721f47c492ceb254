/* Scheduler, third part: pages, and the blocks that requests share through the prefix index.
 *
 * A request's page table begins with the pages of the blocks that it holds; they are full and never
 * written again. Behind them come its own. A block that it has filled is offered to the index and
 * held from then on. If another request was faster with the same block, its pages take the place of
 * our own, which hold the same bits; a prefill leg keeps its own as well, because the transfer may
 * know them already. After a collision of keys nothing more of the request is offered.
 *
 * Invariant: the tokens of held blocks are computed (n_blocks * block_tokens <= n_computed).
 */
#include "kernels/engine/scheduler_int.h"

static bool shares(const struct kn_sched *sched, const struct kn_seq *s, uint32_t i)
{
    return s->pages[i * kn_sched_block_pages(sched)] == s->blocks[i]->pages[0];
}

/* First page behind the held blocks. */
static uint32_t first_own(const struct kn_sched *sched, const struct kn_seq *s)
{
    return s->n_blocks * kn_sched_block_pages(sched);
}

struct kv_chain kn_sched_chain(struct kn_sched *sched, struct kn_seq *s, uint32_t n)
{
    for (; s->n_keys < n; s->n_keys++) {
        kv_index_key(sched->cfg.index, s->n_keys ? &s->keys[s->n_keys - 1] : &s->root,
                     s->ids + (size_t)s->n_keys * kn_sched_block_tokens(sched),
                     &s->keys[s->n_keys]);
    }
    return (struct kv_chain){s->root, s->keys, s->ids, n};
}

struct kv_chain
kn_sched_tail_chain(struct kn_sched *sched, struct kn_seq *s, uint32_t n, uint32_t n_tail)
{
    struct kv_chain chain = kn_sched_chain(sched, s, n);

    s->n_keys = BT_MIN(s->n_keys, n); /* the tail's key stands where that of a full block would */
    kv_index_tail_key(sched->cfg.index, n ? &s->keys[n - 1] : &s->root,
                      s->ids + (size_t)n * kn_sched_block_tokens(sched), n_tail, &s->keys[n]);
    chain.n_blocks++;
    return chain;
}

uint32_t kn_sched_max_blocks(const struct kn_sched *sched, const struct kn_seq *s)
{
    uint32_t bt = kn_sched_block_tokens(sched);

    if (!sched->cfg.index) {
        return 0;
    }
    return s->tail_tokens ? s->tail_block : (kn_seq_target(s) - 1) / bt;
}

/* ---- hits ---- */

uint32_t kn_sched_match(struct kn_sched *sched, struct kn_seq *s)
{
    struct kv_index *index = sched->cfg.index;

    BT_DASSERT(s->n_blocks == 0);
    if (!index) {
        return 0;
    }
    if (s->match_changes != kv_index_changes(index) + 1) {
        struct kv_chain chain = kn_sched_chain(sched, s, kn_sched_max_blocks(sched, s));

        s->n_match = kv_index_match(index, &chain, s->blocks);
        s->match_changes = kv_index_changes(index) + 1;
    }
    return s->n_match;
}

void kn_sched_hold(struct kn_sched *sched, struct kn_seq *s)
{
    if (s->n_match > 0) {
        kv_index_hold(sched->cfg.index, s->blocks, s->n_match);
        s->n_blocks = s->n_match;
    }
}

void kn_sched_unhold(struct kn_sched *sched, struct kn_seq *s)
{
    if (s->n_blocks > 0) {
        kv_index_drop(sched->cfg.index, s->blocks, s->n_blocks);
        s->n_blocks = 0;
    }
}

void kn_sched_use_held(struct kn_sched *sched, struct kn_seq *s)
{
    uint32_t n = kn_sched_block_pages(sched);

    for (uint32_t i = 0; i < s->n_blocks; i++) {
        memcpy(s->pages + (size_t)i * n, s->blocks[i]->pages, n * sizeof(*s->pages));
        if (s->blocks[i]->adopted) {
            s->blocks[i]->adopted = false;
            kn_sched_queue_offer(sched, s->blocks[i]);
        }
    }
    s->n_pages = s->n_blocks * n;
    s->n_computed = s->n_blocks * kn_sched_block_tokens(sched);
    s->n_match = 0;
    s->match_changes = 0;
    if (!s->placed && kn_seq_computes(s)) {
        sched->stats.tier_tokens[KV_TIER_POOL] += s->n_computed;
        s->tier_tokens[KV_TIER_POOL] = s->n_computed;
    }
}

void kn_sched_begin_computing(struct kn_sched *sched, struct kn_seq *s)
{
    if (!s->placed) {
        s->placed = true;
        s->cached_tokens = s->n_computed;
        sched->stats.tokens_cached += s->n_computed;
    }
    if (!s->ready_ns) {
        s->ready_ns = kn_sched_clock(sched);
    }
    kn_sched_set_state(sched, s, KN_SEQ_PREFILLING);
}

/* ---- full blocks ---- */

/* False: no further block of it is offered. */
static bool publish_next(struct kn_sched *sched, struct kn_seq *s)
{
    uint32_t n = kn_sched_block_pages(sched), i = s->n_blocks;
    uint32_t *pages = s->pages + (size_t)i * n;
    struct kv_chain chain = kn_sched_chain(sched, s, i + 1);

    sched->looked = false; /* somebody may have waited for it */
    switch (kv_index_publish(sched->cfg.index, &chain, i ? s->blocks[i - 1] : NULL, pages,
                             &s->blocks[i])) {
    case KV_PUBLISH_NEW:
        kn_sched_queue_offer(sched, s->blocks[i]);
        break;
    case KV_PUBLISH_SAME:
        if (!s->xfer_open) {
            kv_pool_give(sched->cfg.pool, pages, n, s->page_owner);
            memcpy(pages, s->blocks[i]->pages, n * sizeof(*pages));
        }
        break;
    case KV_PUBLISH_COLLISION:
        s->unlisted = true;
        return false;
    }
    s->n_blocks++;
    return true;
}

void kn_sched_publish(struct kn_sched *sched, struct kn_seq *s)
{
    if (!sched->cfg.index) {
        return;
    }
    BT_BUG_ON(s->page_owner != KV_OWNER_SEQ);
    while (!s->unlisted && s->n_computed / kn_sched_block_tokens(sched) > s->n_blocks &&
           publish_next(sched, s)) {
    }
    kn_sched_pump_offers(sched);
}

/* ---- pages ---- */

uint32_t kn_sched_room(const struct kn_sched *sched)
{
    struct kv_pool_stats s = kv_pool_stats(sched->cfg.pool);

    return kv_pool_stats_room(&s);
}

uint32_t kn_sched_count_room(struct kn_sched *sched, struct kn_seq *s)
{
    uint32_t n = kn_sched_block_pages(sched), room = s->n_pages - first_own(sched, s);

    for (uint32_t i = 0; i < s->n_blocks; i++) {
        room += shares(sched, s, i) ? 0 : n;
        room += ++s->blocks[i]->mark == s->blocks[i]->n_refs ? n : 0;
    }
    return room;
}

void kn_sched_uncount(struct kn_sched *sched, struct kn_seq *s)
{
    for (uint32_t i = 0; i < s->n_blocks; i++) {
        s->blocks[i]->mark = 0;
    }
}

void kn_sched_take_pages(struct kn_sched *sched, struct kn_seq *s, uint32_t n, enum kv_owner owner)
{
    uint32_t after = s->n_pages > 0 ? s->pages[s->n_pages - 1] : KV_PAGE_NONE;
    uint32_t n_free = kv_pool_stats(sched->cfg.pool).n_free;

    if (n > n_free && sched->cfg.index) {
        kv_index_evict(sched->cfg.index, n - n_free);
    }
    BT_BUG_ON(kv_pool_take(sched->cfg.pool, n, owner, after, s->pages + s->n_pages) != BT_OK);
    s->page_owner = owner;
    s->n_pages += n;
}

void kn_sched_free_pages(struct kn_sched *sched, struct kn_seq *s)
{
    uint32_t n = kn_sched_block_pages(sched), own = first_own(sched, s);

    kv_pool_give(sched->cfg.pool, s->pages + own, s->n_pages - own, s->page_owner);
    for (uint32_t i = 0; i < s->n_blocks; i++) {
        if (!shares(sched, s, i)) {
            kv_pool_give(sched->cfg.pool, s->pages + (size_t)i * n, n, s->page_owner);
        }
    }
    kn_sched_unhold(sched, s);
    s->n_pages = 0;
    s->n_computed = 0;
    s->unlisted = false;
}

void kn_sched_own_pages(struct kn_sched *sched, struct kn_seq *s, enum kv_owner owner)
{
    uint32_t n = kn_sched_block_pages(sched), own = first_own(sched, s);

    if (s->page_owner == owner) {
        return;
    }
    kv_pool_set_owner(sched->cfg.pool, s->pages + own, s->n_pages - own, s->page_owner, owner);
    for (uint32_t i = 0; i < s->n_blocks; i++) {
        if (!shares(sched, s, i)) {
            kv_pool_set_owner(sched->cfg.pool, s->pages + (size_t)i * n, n, s->page_owner, owner);
        }
    }
    s->page_owner = owner;
}
