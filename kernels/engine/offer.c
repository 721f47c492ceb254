/* Scheduler, fifth part: blocks are offered to sources for keeping.
 *
 * Every block that comes into the prefix index (computed, received, loaded) is queued for each
 * source and offered soon, so that giving it up later loses nothing; one that was adopted from a
 * predecessor when it is first used, for then its bytes were checked. An open offer holds its block
 * and all before it; their pages stay as they are. A source that has many offers open gets the next
 * one when one is done; one that wants nothing at present, once it does. What is given up before
 * its turn is left out.
 *
 * The tail of a preempted request, the block that is not full, goes to the first source alone: its
 * pages leave the request and belong to the transfer until the bytes were copied.
 *
 * Thread: the engine's, except on_done. */
#include "kernels/engine/scheduler_int.h"

#include "common/base/buf.h"

#include <stdlib.h>

/* A block in the queue; stale if the entry has another generation by then. */
struct queued {
    struct kv_block *block;
    uint64_t generation;
};

struct kn_offer {
    struct bt_list link; /* free or open ones */
    struct bt_msg done;
    struct kn_sched *sched;
    uint32_t source;
    struct kv_block *block; /* held, with all before it; NULL = a tail, of n_pages pages */
    struct kn_seq *seq;     /* whose tail it is; NULL = it is gone */
    uint32_t *pages;        /* [block_pages] */
    uint32_t n_pages;
};

struct kn_offers {
    struct queued *ring; /* [n_ring] */
    uint64_t n_ring, head;
    uint64_t tails[KN_MAX_SOURCES]; /* next of each source; head - tail <= n_ring */
    uint32_t n_open[KN_MAX_SOURCES];
    struct bt_list free, open;
    struct kn_offer *offers; /* [KV_SOURCE_OFFERS * n_sources] */
    uint32_t *pages;
    /* The chain of the last block that was offered; the next one is mostly its child. */
    struct kv_key *keys;
    int32_t *ids;
    struct queued last;
    uint32_t n_chain, cap_chain;
    uint32_t tail_pages; /* of open tails */
};

int kn_offers_create(struct kn_sched *sched, struct bt_err *err)
{
    uint32_t n = sched->cfg.n_sources * KV_SOURCE_OFFERS, bp = kn_sched_block_pages(sched);
    struct kn_offers *o;

    if (n == 0 || !sched->cfg.index) {
        return BT_OK;
    }
    sched->offers = o = bt_calloc(1, sizeof(*o));
    if (!o) {
        return BT_FAIL(err, BT_E_NOMEM, "scheduler: no memory");
    }
    o->n_ring = kv_pool_layout(sched->cfg.pool)->n_pages / bp + 1;
    o->cap_chain = (uint32_t)o->n_ring;
    bt_list_init(&o->free);
    bt_list_init(&o->open);
    o->ring = bt_calloc(o->n_ring, sizeof(*o->ring));
    o->offers = bt_calloc(n, sizeof(*o->offers));
    o->pages = bt_calloc((size_t)n * bp, sizeof(*o->pages));
    o->keys = bt_calloc((size_t)o->cap_chain + 1, sizeof(*o->keys));
    o->ids = bt_calloc(((size_t)o->cap_chain + 1) * kn_sched_block_tokens(sched), sizeof(*o->ids));
    if (!o->ring || !o->offers || !o->pages || !o->keys || !o->ids) {
        return BT_FAIL(err, BT_E_NOMEM, "scheduler: no memory for offers");
    }
    for (uint32_t i = 0; i < n; i++) {
        o->offers[i].pages = o->pages + (size_t)i * bp;
        bt_list_init(&o->offers[i].done.link);
        bt_list_push_back(&o->free, &o->offers[i].link);
    }
    return BT_OK;
}

void kn_offers_destroy(struct kn_sched *sched)
{
    struct kn_offers *o = sched->offers;

    if (!o) {
        return;
    }
    BT_BUG_ON(o->ring && !bt_list_empty(&o->open));
    free(o->ring);
    free(o->offers);
    free(o->pages);
    free(o->keys);
    free(o->ids);
    free(o);
    sched->offers = NULL;
}

bool kn_offers_idle(const struct kn_sched *sched)
{
    return !sched->offers || bt_list_empty(&sched->offers->open);
}

/* Any thread. The rc says nothing that matters here: kept or not, the pages are ours again. */
static void on_done(void *arg, int rc)
{
    struct kn_offer *f = arg;

    (void)rc;
    f->sched->cfg.post(f->sched->cfg.post_arg, &f->done);
}

static void give_back(struct kn_sched *sched, struct kn_offer *f)
{
    struct kn_offers *o = sched->offers;

    if (f->block) {
        kv_index_drop_to(sched->cfg.index, f->block);
    } else {
        kv_pool_give(sched->cfg.pool, f->pages, f->n_pages, KV_OWNER_TRANSFER);
        o->tail_pages -= f->n_pages;
        if (f->seq) {
            f->seq->tail_offer = NULL;
        }
    }
    bt_list_remove(&f->link);
    bt_list_push_back(&o->free, &f->link);
    o->n_open[f->source]--;
}

static void handle_done(struct bt_msg *msg, void *consumer)
{
    struct kn_offer *f = BT_CONTAINER_OF(msg, struct kn_offer, done);
    struct kn_sched *sched = f->sched;

    give_back(sched, f);
    kn_sched_pump_offers(sched);
}

static struct kn_offer *open_offer(struct kn_sched *sched, uint32_t source)
{
    struct kn_offers *o = sched->offers;
    struct kn_offer *f = BT_LIST_ENTRY(bt_list_pop_front(&o->free), struct kn_offer, link);

    f->sched = sched;
    f->source = source;
    f->done.handle = handle_done;
    f->block = NULL;
    f->seq = NULL;
    f->n_pages = 0;
    bt_list_push_back(&o->open, &f->link);
    o->n_open[source]++;
    return f;
}

/* ---- blocks ---- */

/* The chain that ends with b, in the scratch of the offers. */
static struct kv_chain chain_to(struct kn_sched *sched, struct kv_block *b)
{
    struct kn_offers *o = sched->offers;
    uint32_t bt = kn_sched_block_tokens(sched), n = 0, have = 0;

    if (b->parent && b->parent == o->last.block && b->parent->generation == o->last.generation) {
        n = have = o->n_chain;
    }
    for (const struct kv_block *at = b; at && (have == 0 || n == have); at = at->parent) {
        n++;
    }
    o->n_chain = n;
    for (const struct kv_block *at = b; n > have; at = at->parent, n--) {
        o->keys[n - 1] = at->key;
        memcpy(o->ids + (size_t)(n - 1) * bt, at->ids, bt * sizeof(*o->ids));
    }
    o->last = (struct queued){b, b->generation};
    return (struct kv_chain){b->root, o->keys, o->ids, o->n_chain};
}

static void offer_block(struct kn_sched *sched, uint32_t source, struct kv_block *b)
{
    struct kv_source *src = sched->cfg.sources[source];
    struct kn_offer *f = open_offer(sched, source);
    struct kv_offer offer = {
        .chain = chain_to(sched, b),
        .n_tokens = kn_sched_block_tokens(sched),
        .pages = b->pages,
        .pool = sched->cfg.pool,
        .done = on_done,
        .arg = f,
    };

    f->block = b;
    kv_index_hold_to(sched->cfg.index, b);
    sched->stats.offers++;
    if (!src->ops->offer(src, &offer)) {
        sched->stats.offers_refused++;
        give_back(sched, f);
    }
}

static bool wants(struct kv_source *src)
{
    return !src->ops->wants || src->ops->wants(src);
}

void kn_sched_pump_offers(struct kn_sched *sched)
{
    struct kn_offers *o = sched->offers;

    if (!o || sched->closing) {
        return;
    }
    for (uint32_t i = 0; i < sched->cfg.n_sources; i++) {
        while (o->tails[i] < o->head && o->n_open[i] < KV_SOURCE_OFFERS &&
               wants(sched->cfg.sources[i])) {
            struct queued q = o->ring[o->tails[i]++ % o->n_ring];

            if (q.block->generation == q.generation) {
                offer_block(sched, i, q.block);
            }
        }
    }
}

void kn_sched_queue_offer(struct kn_sched *sched, struct kv_block *b)
{
    struct kn_offers *o = sched->offers;
    uint64_t oldest;

    if (!o) {
        return;
    }
    o->ring[o->head++ % o->n_ring] = (struct queued){b, b->generation};
    oldest = o->head - BT_MIN(o->head, o->n_ring);
    for (uint32_t i = 0; i < sched->cfg.n_sources; i++) {
        o->tails[i] = BT_MAX(o->tails[i], oldest);
    }
}

/* ---- tails ---- */

void kn_sched_offer_tail(struct kn_sched *sched, struct kn_seq *s)
{
    struct kn_offers *o = sched->offers;
    uint32_t bt = kn_sched_block_tokens(sched), bp = kn_sched_block_pages(sched), n, own;
    struct kv_source *src;
    struct kn_offer *f;
    struct kv_offer offer;

    s->tail_tokens = 0;
    if (!o || sched->closing || s->n_computed % bt == 0 || s->n_blocks != s->n_computed / bt ||
        o->n_open[0] == KV_SOURCE_OFFERS) {
        return;
    }
    src = sched->cfg.sources[0];
    f = open_offer(sched, 0);
    n = s->n_computed % bt;
    own = s->n_blocks * bp;
    f->n_pages = kv_layout_pages_for(kv_pool_layout(sched->cfg.pool), n);
    for (uint32_t i = 0; i < bp; i++) {
        f->pages[i] = i < f->n_pages ? s->pages[own + i] : KV_PAGE_NONE;
    }
    offer.chain = kn_sched_tail_chain(sched, s, s->n_blocks, n);
    offer.n_tokens = n;
    offer.pages = f->pages;
    offer.pool = sched->cfg.pool;
    offer.done = on_done;
    offer.arg = f;
    /* Before the call: its done may come at once, and then they are given from there. */
    if (s->page_owner != KV_OWNER_TRANSFER) {
        kv_pool_set_owner(sched->cfg.pool, f->pages, f->n_pages, s->page_owner, KV_OWNER_TRANSFER);
    }
    o->tail_pages += f->n_pages;
    sched->stats.offers++;
    memmove(s->pages + own, s->pages + own + f->n_pages,
            (s->n_pages - own - f->n_pages) * sizeof(*s->pages));
    s->n_pages -= f->n_pages;
    /* Refused may mean that it has been there since the last time. */
    s->tail_tokens = n;
    s->tail_block = s->n_blocks;
    s->tail_offer = f;
    f->seq = s;
    if (!src->ops->offer(src, &offer)) {
        sched->stats.offers_refused++;
        give_back(sched, f);
    }
}

void kn_sched_leave_tail(struct kn_seq *s)
{
    if (s->tail_offer) {
        s->tail_offer->seq = NULL;
        s->tail_offer = NULL;
    }
}

/* ---- pages that will come back by themselves ---- */

void kn_sched_hurry_offers(struct kn_sched *sched)
{
    for (uint32_t i = 0; sched->offers && i < sched->cfg.n_sources; i++) {
        struct kv_source *src = sched->cfg.sources[i];

        if (src->ops->hurry && sched->offers->n_open[i] > 0) {
            src->ops->hurry(src);
        }
    }
}

uint32_t kn_sched_count_offers(struct kn_sched *sched)
{
    struct kn_offers *o = sched->offers;
    uint32_t room = 0, bp = kn_sched_block_pages(sched);

    if (!o) {
        return 0;
    }
    bt_list_for_each (l, &o->open) {
        struct kn_offer *f = BT_LIST_ENTRY(l, struct kn_offer, link);

        for (struct kv_block *b = f->block; b; b = b->parent) {
            room += ++b->mark == b->n_refs ? bp : 0;
        }
    }
    return room + o->tail_pages;
}

void kn_sched_uncount_offers(struct kn_sched *sched)
{
    if (!sched->offers) {
        return;
    }
    bt_list_for_each (l, &sched->offers->open) {
        for (struct kv_block *b = BT_LIST_ENTRY(l, struct kn_offer, link)->block; b;
             b = b->parent) {
            b->mark = 0;
        }
    }
}
