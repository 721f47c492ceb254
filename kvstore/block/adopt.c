/* Adoption: the blocks that a dead process left in the ledger become those of its successor.
 *
 * The ledger is believed as far as it proves itself. Records are taken in the order of their seals,
 * in which parents come before their children. Then everything stands in the list of unheld blocks
 * as it stood with the predecessor: by when it was let go, parents behind their children whatever
 * the record says.
 *
 * Thread: the engine's, or whoever creates it. */
#include "kvstore/block/index_int.h"

#include "common/base/buf.h"

#include <stdlib.h>

struct found {
    uint64_t seal;
    uint64_t let_go; /* at least that of all its children */
    uint32_t slot;
};

static int by_seal(const void *a, const void *b)
{
    const struct found *f = a, *g = b;

    return f->seal != g->seal ? (f->seal < g->seal ? -1 : 1) : (f->slot < g->slot ? -1 : 1);
}

/* Children were sealed after their parents. */
static int by_let_go(const void *a, const void *b)
{
    const struct found *f = a, *g = b;

    return f->let_go != g->let_go ? (f->let_go < g->let_go ? -1 : 1) : -by_seal(a, b);
}

static uint32_t collect(struct kv_index *x, struct found *ret_found)
{
    struct kv_ledger_block r;
    uint32_t n = 0;

    for (uint32_t i = 0; i < x->n_max; i++) {
        if (!kv_ledger_sealed(x->ledger, i)) {
            continue;
        }
        if (kv_ledger_read(x->ledger, i, &r) == BT_OK) {
            ret_found[n++] = (struct found){r.seal, r.let_go, i};
        } else {
            kv_ledger_unseal(x->ledger, i);
            x->stats.bad++;
        }
    }
    return n;
}

/* The entry with the key, if it is one under `root`. */
static struct kv_block *
with_key(const struct kv_index *x, const struct kv_key *root, const struct kv_key *key)
{
    for (struct kv_block *b = *kv_index_bucket(x, key); b; b = b->next) {
        if (kv_key_eq(&b->key, key)) {
            return kv_key_eq(&b->root, root) ? b : NULL;
        }
    }
    return NULL;
}

static bool key_taken(const struct kv_index *x, const struct kv_key *key)
{
    for (const struct kv_block *b = *kv_index_bucket(x, key); b; b = b->next) {
        if (kv_key_eq(&b->key, key)) {
            return true;
        }
    }
    return false;
}

/* False: it is not what it says, or stands on what is not there. */
static bool take_over(struct kv_index *x, uint32_t slot)
{
    struct kv_block *b = &x->entries[slot], *parent = NULL;
    struct kv_ledger_block r;
    struct kv_key key;

    if (kv_ledger_read(x->ledger, slot, &r) < 0) {
        return false;
    }
    if (r.has_parent) {
        parent = with_key(x, &r.root, &r.parent);
        if (!parent) {
            return false;
        }
    }
    kv_index_key(x, parent ? &parent->key : &r.root, r.ids, &key);
    if (!kv_key_eq(&key, &r.key) || key_taken(x, &key) ||
        !kv_pool_adopt(x->cfg.pool, r.pages, x->block_pages)) {
        return false;
    }
    memcpy(b->pages, r.pages, x->block_pages * sizeof(*b->pages));
    memcpy(b->ids, r.ids, x->block_tokens * sizeof(*b->ids));
    b->key = r.key;
    b->root = r.root;
    b->parent = parent;
    b->n_refs = 0;
    kv_index_enter(x, b);
    b->unchecked = b->adopted = true;
    return true;
}

/* Those that were taken over, in place; returns how many. */
static uint32_t take_all(struct kv_index *x, struct found *found, uint32_t n)
{
    uint32_t kept = 0;

    qsort(found, n, sizeof(*found), by_seal);
    for (uint32_t i = 0; i < n; i++) {
        if (take_over(x, found[i].slot)) {
            found[kept++] = found[i];
        } else {
            kv_ledger_unseal(x->ledger, found[i].slot);
            x->stats.bad++;
        }
    }
    return kept;
}

/* `at` is where each slot stands in `found`. */
static void line_up(struct kv_index *x, struct found *found, uint32_t n, uint32_t *at)
{
    for (uint32_t i = 0; i < n; i++) {
        at[found[i].slot] = i;
    }
    for (uint32_t i = n; i-- > 0;) {
        const struct kv_block *parent = x->entries[found[i].slot].parent;

        if (parent) {
            struct found *p = &found[at[kv_index_slot(x, parent)]];

            p->let_go = BT_MAX(p->let_go, found[i].let_go);
        }
    }
    qsort(found, n, sizeof(*found), by_let_go);
    for (uint32_t i = 0; i < n; i++) {
        bt_list_push_back(&x->unheld, &x->entries[found[i].slot].link);
        kv_ledger_mark_let_go(x->ledger, found[i].slot);
    }
    x->n_unheld = n;
    kv_index_tell_cached(x);
}

/* Entries that nobody has, and pages that no block has: free, whatever the predecessor did. */
static void clean_rest(struct kv_index *x)
{
    const struct kv_layout *layout = kv_pool_layout(x->cfg.pool);

    x->unused = NULL;
    for (uint32_t i = x->n_max; i-- > 0;) {
        if (!kv_ledger_sealed(x->ledger, i)) {
            x->entries[i].next = x->unused;
            x->unused = &x->entries[i];
        }
    }
    for (uint32_t p = 0; p < layout->n_pages; p++) {
        if (kv_pool_is_free(x->cfg.pool, p)) {
            kv_ledger_page_free(x->ledger, p);
        }
    }
}

int kv_index_adopt(struct kv_index *x,
                   struct kv_ledger *ledger,
                   struct kv_adopted *ret,
                   struct bt_err *err)
{
    struct found *found;
    uint32_t n, *at;

    BT_BUG_ON(x->ledger || x->stats.n_blocks != 0);
    BT_BUG_ON(kv_ledger_n_blocks(ledger) != x->n_max);
    found = bt_calloc((size_t)x->n_max + 1, sizeof(*found));
    at = bt_calloc((size_t)x->n_max + 1, sizeof(*at));
    if (!found || !at) {
        free(found);
        free(at);
        return BT_FAIL(err, BT_E_NOMEM, "no memory to adopt %u blocks", x->n_max);
    }
    x->ledger = ledger;
    n = collect(x, found);
    n = take_all(x, found, n);
    line_up(x, found, n, at);
    clean_rest(x);
    free(found);
    free(at);
    x->stats.adopted = n;
    *ret = (struct kv_adopted){n, n * x->block_pages, (uint32_t)x->stats.bad};
    return BT_OK;
}

void kv_index_leave_ledger(struct kv_index *x)
{
    x->ledger = NULL;
}

/* ---- first use ---- */

/* What was never found was never held, nor was anything behind it; and in the list of unheld blocks
 * children stand in front of their parents. */
static void remove_tree(struct kv_index *x, struct kv_block *top)
{
    struct bt_list *head = &x->unheld, *l, *next;

    top->doomed = true;
    for (l = head->prev; l != head; l = l->prev) {
        struct kv_block *b = BT_LIST_ENTRY(l, struct kv_block, link);

        b->doomed |= b->parent && b->parent->doomed;
    }
    for (l = head->next; l != head; l = next) {
        struct kv_block *b = BT_LIST_ENTRY(l, struct kv_block, link);

        next = l->next;
        if (b->doomed) {
            b->doomed = false;
            kv_index_remove(x, b);
            x->stats.bad++;
        }
    }
}

bool kv_index_check(struct kv_index *x, struct kv_block *b)
{
    if (!b->unchecked) {
        return true;
    }
    /* Without the ledger nothing can be checked any more. */
    if (x->ledger && kv_ledger_check_bytes(x->ledger, kv_index_slot(x, b))) {
        b->unchecked = false;
        return true;
    }
    remove_tree(x, b);
    return false;
}
