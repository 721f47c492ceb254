/* A source of blocks in memory for the scheduler's tests: does what source.h says, one move at a
 * time, and checks that the engine does. Instead of bytes it keeps the ids that the pages say
 * (sim.h). */
#ifndef BT_TESTS_KERNELS_ENGINE_MEMSOURCE_H
#define BT_TESTS_KERNELS_ENGINE_MEMSOURCE_H

#include "tests/unit/kernels/engine/sim.h"

#define MEM_BLOBS 4096
#define MEM_OPEN  512
#define MEM_ROOM  64 /* most tokens of a block */

struct mem_blob {
    bool used, bad, turns_bad; /* turns_bad: when it is loaded */
    struct kv_key key, parent, root;
    uint32_t n_tokens, pins;
    int32_t ids[MEM_ROOM], bytes[MEM_ROOM];
};

struct mem_offer {
    bool open;
    struct kv_offer o;
    struct mem_blob blob;
    uint32_t pages[MEM_ROOM], generations[MEM_ROOM], n_pages;
};

struct mem_source {
    struct kv_source base;
    struct node *node;
    /* How it behaves. */
    bool local;               /* answers inside find */
    bool stuck;               /* loads do not move */
    bool deaf;                /* takes no offers */
    bool busy;                /* wants no offers at present */
    bool rests;               /* finishes no offer before somebody waits for it */
    uint64_t block_ns;        /* promised for a block */
    uint32_t fast;            /* leading blocks that are in memory, others on disk; 0 = all */
    uint32_t layers_per_move; /* of loads */
    enum kv_tier tier;
    struct mem_blob blobs[MEM_BLOBS];
    struct mem_offer offers[MEM_OPEN];
    struct kv_find *finds[MEM_OPEN];
    struct kv_load *loads[MEM_OPEN];
    bool cancelled[MEM_OPEN];
    uint32_t n_finds, n_open, n_loads, n_offers, n_cancels, n_tails;
    uint32_t max_blobs; /* 0 = MEM_BLOBS */
};

static inline struct mem_source *mem_of(struct kv_source *src)
{
    return BT_CONTAINER_OF(src, struct mem_source, base);
}

static inline struct mem_blob *
mem_get(struct mem_source *m, const struct kv_chain *c, uint32_t i, uint32_t n)
{
    const struct kv_key *parent = i ? &c->keys[i - 1] : &c->root;

    for (uint32_t k = 0; k < MEM_BLOBS; k++) {
        struct mem_blob *b = &m->blobs[k];

        if (b->used && !b->bad && kv_key_eq(&b->key, &c->keys[i]) &&
            kv_key_eq(&b->parent, parent) && kv_key_eq(&b->root, &c->root) && b->n_tokens == n &&
            memcmp(b->ids, c->ids + (size_t)i * (uint32_t)reuse.block, n * sizeof(int32_t)) == 0) {
            return b;
        }
    }
    return NULL;
}

/* The blob of block i of what f found; they are pinned, so they are there. */
static inline struct mem_blob *mem_found(struct mem_source *m, const struct kv_find *f, uint32_t i)
{
    struct mem_blob **pinned = f->priv;

    assert_true(i < f->n);
    assert_true(pinned[i]->pins > 0);
    return pinned[i];
}

static inline void mem_answer(struct mem_source *m, struct kv_find *f)
{
    struct mem_blob **pinned = calloc(f->chain.n_blocks, sizeof(struct mem_blob *));

    f->priv = pinned;
    for (f->n = 0; f->first + f->n < f->chain.n_blocks; f->n++) {
        uint32_t i = f->first + f->n;
        struct mem_blob *b = mem_get(
            m, &f->chain, i, i + 1 == f->chain.n_blocks ? f->n_tokens : (uint32_t)reuse.block);

        if (!b) {
            break;
        }
        b->pins++;
        pinned[f->n] = b;
    }
    f->n_fast = m->fast ? BT_MIN(m->fast, f->n) : f->n;
    f->n_tier[m->tier] = f->n;
    f->load_ns = f->n * m->block_ns;
    f->fast_ns = f->n_fast * (m->fast ? MS / 10 : m->block_ns);
    f->done(f);
}

static inline void mem_find(struct kv_source *src, struct kv_find *f)
{
    struct mem_source *m = mem_of(src);

    assert_true(f->first < f->chain.n_blocks);
    assert_true(f->n_tokens >= 1 && f->n_tokens <= (uint32_t)reuse.block);
    m->n_finds++;
    m->n_open++;
    if (m->local) {
        mem_answer(m, f);
        return;
    }
    for (uint32_t i = 0; i < MEM_OPEN; i++) {
        if (!m->finds[i]) {
            m->finds[i] = f;
            return;
        }
    }
    fail();
}

static inline void mem_find_cancel(struct kv_source *src, struct kv_find *f)
{
    f->deadline_ns = 0;
}

static inline void mem_load(struct kv_source *src, struct kv_load *l)
{
    struct mem_source *m = mem_of(src);

    assert_true(l->n_blocks > 0 && l->n_blocks <= l->find->n);
    assert_int_equal(l->n_good, l->n_blocks);
    for (uint32_t i = 0; i < MEM_OPEN; i++) {
        if (!m->loads[i]) {
            m->loads[i] = l;
            m->cancelled[i] = false;
            m->n_loads++;
            return;
        }
    }
    fail();
}

static inline void mem_load_cancel(struct kv_source *src, struct kv_load *l)
{
    struct mem_source *m = mem_of(src);

    for (uint32_t i = 0; i < MEM_OPEN; i++) {
        if (m->loads[i] == l) {
            m->cancelled[i] = true;
            m->n_cancels++;
            return;
        }
    }
}

static inline void mem_end(struct kv_source *src, struct kv_find *f)
{
    struct mem_source *m = mem_of(src);
    struct mem_blob **pinned = f->priv;

    for (uint32_t i = 0; i < f->n; i++) {
        assert_true(pinned[i]->pins > 0);
        pinned[i]->pins--;
    }
    free(pinned);
    f->priv = NULL;
    m->n_open--;
}

static inline bool mem_offer(struct kv_source *src, const struct kv_offer *o)
{
    struct mem_source *m = mem_of(src);
    uint32_t last = o->chain.n_blocks - 1,
             bp = (uint32_t)reuse.block / (uint32_t)m->node->page_tokens;

    assert_true(o->n_tokens >= 1 && o->n_tokens <= (uint32_t)reuse.block);
    assert_true(!m->busy || o->n_tokens < (uint32_t)reuse.block);
    m->n_tails += o->n_tokens < (uint32_t)reuse.block;
    if (m->deaf || mem_get(m, &o->chain, last, o->n_tokens)) {
        return false;
    }
    for (uint32_t i = 0; i < MEM_OPEN; i++) {
        struct mem_offer *f = &m->offers[i];

        if (f->open) {
            continue;
        }
        *f = (struct mem_offer){.open = true, .o = *o, .n_pages = bp};
        f->blob = (struct mem_blob){.used = true,
                                    .key = o->chain.keys[last],
                                    .parent = last ? o->chain.keys[last - 1] : o->chain.root,
                                    .root = o->chain.root,
                                    .n_tokens = o->n_tokens};
        memcpy(f->blob.ids, o->chain.ids + (size_t)last * (uint32_t)reuse.block,
               o->n_tokens * sizeof(int32_t));
        for (uint32_t p = 0; p < bp; p++) {
            f->pages[p] = o->pages[p];
            f->generations[p] =
                o->pages[p] == KV_PAGE_NONE ? 0 : kv_pool_generation(m->node->pool, o->pages[p]);
        }
        m->n_offers++;
        return true;
    }
    return false;
}

static inline bool mem_wants(struct kv_source *src)
{
    return !mem_of(src)->busy;
}

static inline void mem_hurry(struct kv_source *src)
{
    mem_of(src)->rests = false;
}

static const struct kv_source_ops mem_ops = {
    "memory", mem_find,  mem_find_cancel, mem_load,  mem_load_cancel,
    mem_end,  mem_offer, mem_wants,       mem_hurry,
};

static inline struct mem_source *mem_create(void)
{
    struct mem_source *m = bt_calloc(1, sizeof(*m));

    assert_non_null(m);
    m->base.ops = &mem_ops;
    m->local = true;
    m->block_ns = MS / 10;
    m->layers_per_move = 1000;
    m->tier = KV_TIER_HOST;
    return m;
}

/* Copies what was offered: the pages must say what they said then (PFX-03). */
static inline void mem_finish_offer(struct mem_source *m, struct mem_offer *f)
{
    uint32_t pt = (uint32_t)m->node->page_tokens;

    for (uint32_t t = 0; t < f->blob.n_tokens; t++) {
        uint32_t page = f->pages[t / pt];

        assert_int_equal(kv_pool_generation(m->node->pool, page), f->generations[t / pt]);
        f->blob.bytes[t] = m->node->shadow[page * pt + t % pt];
    }
    assert_memory_equal(f->blob.bytes, f->blob.ids, f->blob.n_tokens * sizeof(int32_t));
    for (uint32_t i = 0; i < (m->max_blobs ? m->max_blobs : MEM_BLOBS); i++) {
        if (!m->blobs[i].used || (m->max_blobs && m->blobs[i].pins == 0 && rng(4) == 0)) {
            m->blobs[i] = f->blob;
            break;
        }
    }
    f->open = false;
    f->o.done(f->o.arg, BT_OK);
}

static inline void mem_place(struct mem_source *m, struct kv_load *l)
{
    uint32_t pt = (uint32_t)m->node->page_tokens, bp = (uint32_t)reuse.block / pt;

    for (uint32_t i = 0; i < l->n_blocks; i++) {
        struct mem_blob *b = mem_found(m, l->find, i);

        b->bad |= b->turns_bad;
        /* The whole block, as far as there are pages: nothing stands behind a tail. */
        for (uint32_t t = 0; t < (uint32_t)reuse.block; t++) {
            uint32_t page = l->pages[i * bp + t / pt];

            assert_true(page != KV_PAGE_NONE || t >= b->n_tokens);
            if (page != KV_PAGE_NONE) {
                m->node->shadow[page * pt + t % pt] = b->bad || t >= b->n_tokens ? 1 : b->bytes[t];
            }
        }
        if (b->bad) {
            l->n_good = BT_MIN(l->n_good, i);
        }
    }
}

/* One move of everything that is under way; true if there was anything. */
static inline bool mem_move(struct mem_source *m)
{
    uint32_t n_layers = (uint32_t)kv_pool_layout(m->node->pool)->n_layers;
    bool moved = false;

    for (uint32_t i = 0; i < MEM_OPEN; i++) {
        struct kv_find *f = m->finds[i];
        struct kv_load *l = m->loads[i];

        if (f) {
            m->finds[i] = NULL;
            mem_answer(m, f);
            moved = true;
        }
        if (l && (!m->stuck || m->cancelled[i])) {
            uint32_t ready = l->layers_ready + (m->cancelled[i] ? 0 : m->layers_per_move);

            ready = BT_MIN(ready, n_layers);
            if (ready == n_layers) {
                mem_place(m, l);
            }
            l->layers_ready = ready;
            if (l->progress) {
                l->progress(l);
            }
            if (ready == n_layers || m->cancelled[i]) {
                m->loads[i] = NULL;
                l->done(l);
            }
            moved = true;
        }
        if (m->offers[i].open && !m->rests) {
            mem_finish_offer(m, &m->offers[i]);
            moved = true;
        }
    }
    return moved;
}

/* Nothing may be under way or pinned. */
static inline void mem_destroy(struct mem_source *m)
{
    assert_int_equal(m->n_open, 0);
    for (uint32_t i = 0; i < MEM_BLOBS; i++) {
        assert_int_equal(m->blobs[i].pins, 0);
    }
    for (uint32_t i = 0; i < MEM_OPEN; i++) {
        assert_true(!m->finds[i] && !m->loads[i] && !m->offers[i].open);
    }
    free(m);
}

#endif
