/* See index.h. A slot's key is the fingerprint times an odd number (a bijection), so that
 * fingerprints of any origin spread over the table, which is in table.c. The number is drawn at
 * random: nodes send fingerprints of their own choice, and one that lies could have them all at one
 * place, where each costs a walk past all others (Dietzfelbinger et al. 1997: multiply-shift is
 * universal). */
#include "router/index/index.h"

#include "common/base/buf.h"
#include "common/ds/map.h"
#include "router/index/table.h"

#include <stdlib.h>
#include <sys/random.h>

#define AHEAD  16u
#define INLINE RT_SLOT_ENTRIES
#define WINDOW 64u  /* blocks that are looked up together */
#define PIECES 256u /* of the keys, swept one at a time */

#define GUESS    (1u << RT_INDEX_TIERS)
#define ALL_BITS 15u
#define SERVED   6u      /* host and disk */
#define MANY     0xfff0u /* e[0] of a slot whose views are in an array */

/* An entry is view << 4 | bits; bits 0 = no entry. */

struct set {
    uint16_t *e;
    uint32_t n, cap; /* cap 0 = free, n is the next free one then */
};

enum view_state { VIEW_FREE, VIEW_OPEN, VIEW_CLOSED };

struct view {
    enum view_state state;
    bool shared;
    uint32_t look;            /* number of the look-up that has touched its run */
    uint32_t run;             /* its place in runs */
    uint64_t n_guess;         /* guesses not yet withdrawn, counted */
    uint64_t swept;           /* sweeps begun before it was closed */
    uint64_t n_entries, most; /* most: limit of n_entries, 0 = none */
    struct kv_digest digests[RT_INDEX_TIERS];
};

struct rt_index {
    struct rt_table table;
    uint64_t mix; /* odd, secret */
    struct set *sets;
    uint32_t n_sets, cap_sets, free_set; /* free_set: index + 1 */
    struct view *views;                  /* [RT_VIEWS_MAX] */
    struct rt_run *runs;                 /* [RT_VIEWS_MAX] of the last look-up */
    struct bt_map guesses;               /* (key, view) -> count */
    uint32_t look;
    uint32_t n_open, n_closed, n_shared; /* n_shared: of the open ones */
    uint32_t *holes; /* blocks of the last look-up that no shared view has, ascending */
    size_t n_holes, cap_holes;
    uint32_t looked;   /* blocks in which something went on */
    uint32_t sweep_at; /* piece */
    uint64_t n_rounds; /* sweeps over all pieces that have begun */
    uint64_t owed;     /* entries that the next sweep has to look at, beyond one piece */
    uint64_t n_entries, n_dead, set_bytes; /* n_dead: entries of closed views */
};

/* ---- life ---- */

int rt_index_create(struct rt_index **ret_index, struct bt_err *err)
{
    struct rt_index *x = bt_calloc(1, sizeof(*x));

    if (x) {
        bt_map_init(&x->guesses);
        x->views = bt_calloc(RT_VIEWS_MAX, sizeof(*x->views));
        x->runs = bt_calloc(RT_VIEWS_MAX, sizeof(*x->runs));
    }
    if (!x || !x->views || !x->runs || rt_table_init(&x->table) < 0) {
        rt_index_destroy(x);
        return BT_FAIL(err, BT_E_NOMEM, "router index: no memory");
    }
    if (getrandom(&x->mix, sizeof(x->mix), 0) != (ssize_t)sizeof(x->mix)) {
        rt_index_destroy(x);
        return BT_FAIL_SYS(err, BT_E_SYS, "router index: no random bytes");
    }
    x->mix |= 1;
    *ret_index = x;
    return BT_OK;
}

void rt_index_destroy(struct rt_index *x)
{
    if (!x) {
        return;
    }
    rt_table_fini(&x->table);
    for (uint32_t i = 0; i < x->n_sets; i++) {
        free(x->sets[i].e);
    }
    free(x->sets);
    free(x->views);
    free(x->runs);
    free(x->holes);
    bt_map_fini(&x->guesses);
    free(x);
}

static uint64_t key_of(const struct rt_index *x, uint64_t fp)
{
    uint64_t key = fp * x->mix;

    return key - 1 < UINT64_MAX - 2 ? key : key ? key - 1 : 1; /* neither 0 nor the largest */
}

/* ---- the views of a slot ---- */

static uint16_t *entries(const struct rt_index *x, struct rt_slot *slot, uint32_t *ret_n)
{
    if (slot->many == MANY) {
        *ret_n = x->sets[slot->idx].n;
        return x->sets[slot->idx].e;
    }
    *ret_n = INLINE;
    return slot->e;
}

static int set_reserve(struct rt_index *x, struct set *set, uint32_t cap)
{
    void *p = realloc(set->e, cap * sizeof(*set->e));

    if (!p) {
        return BT_E_NOMEM;
    }
    x->set_bytes += (cap - set->cap) * sizeof(*set->e);
    set->e = p;
    set->cap = cap;
    return BT_OK;
}

/* An empty set, of those given back if there are any. */
static int take_set(struct rt_index *x, uint32_t *ret_idx)
{
    if (x->free_set > 0) {
        *ret_idx = x->free_set - 1;
        x->free_set = x->sets[*ret_idx].n;
        x->sets[*ret_idx].n = 0;
        return BT_OK;
    }
    if (x->n_sets == x->cap_sets) {
        uint32_t cap = BT_MAX(2 * x->cap_sets, 64u);
        void *p = realloc(x->sets, cap * sizeof(*x->sets));

        if (!p) {
            return BT_E_NOMEM;
        }
        x->sets = p;
        x->cap_sets = cap;
    }
    *ret_idx = x->n_sets++;
    x->sets[*ret_idx] = (struct set){0};
    return BT_OK;
}

static void free_set(struct rt_index *x, uint32_t idx)
{
    struct set *set = &x->sets[idx];

    x->set_bytes -= set->cap * sizeof(*set->e);
    free(set->e);
    *set = (struct set){.n = x->free_set};
    x->free_set = idx + 1;
}

/* Moves the four entries of a full slot into an array. */
static int spread(struct rt_index *x, struct rt_slot *slot)
{
    uint32_t idx;

    if (take_set(x, &idx) < 0) {
        return BT_E_NOMEM;
    }
    if (set_reserve(x, &x->sets[idx], 2 * INLINE) < 0) {
        free_set(x, idx);
        return BT_E_NOMEM;
    }
    memcpy(x->sets[idx].e, slot->e, sizeof(slot->e));
    x->sets[idx].n = INLINE;
    slot->many = MANY;
    slot->pad = 0;
    slot->idx = idx;
    return BT_OK;
}

/* Few are left: back into the slot. */
static void gather(struct rt_index *x, struct rt_slot *slot)
{
    uint32_t idx = slot->idx, n = x->sets[idx].n;
    uint16_t e[INLINE] = {0};

    memcpy(e, x->sets[idx].e, n * sizeof(*e));
    free_set(x, idx);
    memcpy(slot->e, e, sizeof(e));
}

static uint16_t *entry_of(const struct rt_index *x, struct rt_slot *slot, uint16_t view)
{
    uint32_t n;
    uint16_t *e = entries(x, slot, &n);

    for (uint32_t i = 0; i < n; i++) {
        if (e[i] >> 4 == view && (e[i] & ALL_BITS)) {
            return &e[i];
        }
    }
    return NULL;
}

static int put_entry(struct rt_index *x, struct rt_slot *slot, uint16_t entry)
{
    struct set *set;

    if (slot->many != MANY) {
        for (uint32_t i = 0; i < INLINE; i++) {
            if (!(slot->e[i] & ALL_BITS)) {
                slot->e[i] = entry;
                return BT_OK;
            }
        }
        if (spread(x, slot) < 0) {
            return BT_E_NOMEM;
        }
    }
    set = &x->sets[slot->idx];
    if (set->n == set->cap && set_reserve(x, set, set->cap + set->cap / 2) < 0) {
        return BT_E_NOMEM;
    }
    set->e[set->n++] = entry;
    return BT_OK;
}

static int add_entry(struct rt_index *x, struct rt_slot *slot, uint16_t entry)
{
    struct view *v = &x->views[entry >> 4];
    int rc;

    if (v->most > 0 && v->n_entries >= v->most && !(entry & GUESS)) {
        return BT_E_EXHAUSTED;
    }
    rc = put_entry(x, slot, entry);
    v->n_entries += rc == BT_OK;
    x->n_entries += rc == BT_OK;
    return rc;
}

static bool is_empty(const struct rt_slot *slot)
{
    return slot->many != MANY && !((slot->e[0] | slot->e[1] | slot->e[2] | slot->e[3]) & ALL_BITS);
}

/* The entry is one of the slot's. */
static void drop_entry(struct rt_index *x, struct rt_slot *slot, uint16_t *e)
{
    struct view *v = &x->views[*e >> 4];

    x->n_entries--;
    v->n_entries--;
    x->n_dead -= v->state == VIEW_CLOSED;
    if (slot->many != MANY) {
        *e = 0;
    } else {
        struct set *set = &x->sets[slot->idx];

        *e = set->e[--set->n];
        if (set->n < INLINE) {
            gather(x, slot);
        }
    }
}

/* Sets and takes away bits of (key, view). Returns the bits before, or an error. */
static int change(struct rt_index *x, uint64_t key, uint16_t view, unsigned set, unsigned unset)
{
    struct rt_slot *slot = set ? rt_table_obtain(&x->table, key) : rt_table_find(&x->table, key);
    uint16_t *e = slot ? entry_of(x, slot, view) : NULL;
    unsigned had = e ? *e & ALL_BITS : 0, now = (had | set) & ~unset;
    int rc = BT_OK;

    if (!slot) {
        return set ? BT_E_NOMEM : 0;
    }
    if (now == 0) {
        if (e) {
            drop_entry(x, slot, e);
        }
    } else if (e) {
        *e = (uint16_t)(view << 4 | now);
    } else {
        rc = add_entry(x, slot, (uint16_t)(view << 4 | now));
    }
    if (is_empty(slot)) {
        rt_table_take_out(&x->table, slot);
    }
    return rc < 0 ? rc : (int)had;
}

/* ---- changes ---- */

/* Takes the bits off all entries of the view. Rare: a node has lost a whole tier. */
static void clear(struct rt_index *x, uint16_t view, unsigned unset)
{
    struct rt_table *t = &x->table;

    for (uint64_t i = 0; i < t->end;) {
        struct rt_slot *slot = &t->slots[i];
        uint16_t *e = slot->key ? entry_of(x, slot, view) : NULL;

        if (e && !(*e & ALL_BITS & ~unset)) {
            drop_entry(x, slot, e);
            if (is_empty(slot)) {
                rt_table_take_out(t, slot);
                continue; /* another one may have come here */
            }
        } else if (e) {
            *e &= (uint16_t)~unset;
        }
        i++;
    }
}

static int apply_one(struct rt_index *x, uint16_t view, const struct kv_event *ev)
{
    struct kv_digest *d = &x->views[view].digests[ev->tier];
    unsigned bit = 1u << ev->tier;
    bool stored = ev->kind == KV_EVENT_STORED;
    int had;

    if (ev->kind == KV_EVENT_CLEARED) {
        if (d->n > 0) {
            clear(x, view, bit);
            *d = (struct kv_digest){0, 0};
        }
        return BT_OK;
    }
    had = change(x, key_of(x, ev->fingerprint), view, stored ? bit : 0, stored ? 0 : bit);
    if (had < 0) {
        return had;
    }
    if (stored != (((unsigned)had & bit) != 0)) {
        d->n += stored ? 1 : (uint64_t)-1;
        d->sum += stored ? ev->fingerprint : -ev->fingerprint;
    }
    return BT_OK;
}

/* Inlined by force: as a function of its own it has no effect that a compiler must keep. */
static inline __attribute__((always_inline)) void fetch(struct rt_index *x, uint64_t key)
{
    __builtin_prefetch(&x->table.slots[rt_table_home(&x->table, key)]);
}

int rt_index_apply(struct rt_index *x, uint16_t view, const struct kv_event *ev, size_t n)
{
    int rc = BT_OK;

    BT_BUG_ON(view >= RT_VIEWS_MAX || x->views[view].state != VIEW_OPEN);
    x->owed += 2 * n;
    for (size_t i = 0; i < BT_MIN(n, (size_t)AHEAD); i++) {
        fetch(x, key_of(x, ev[i].fingerprint));
    }
    for (size_t i = 0; i < n; i++) {
        int one = BT_OK;

        if (i + AHEAD < n) {
            fetch(x, key_of(x, ev[i + AHEAD].fingerprint));
        }
        if (ev[i].tier < RT_INDEX_TIERS) {
            one = apply_one(x, view, &ev[i]);
        }
        rc = one < 0 ? one : rc;
    }
    return rc;
}

struct kv_digest rt_index_digest(const struct rt_index *x, uint16_t view, unsigned tier)
{
    BT_BUG_ON(view >= RT_VIEWS_MAX || tier >= RT_INDEX_TIERS);
    return x->views[view].digests[tier];
}

/* ---- guesses ---- */

static uint64_t guess_key(uint64_t key, uint16_t view)
{
    return key ^ (view + 1) * 0xd6e8feb86659fd93ull;
}

static void withdraw_one(struct rt_index *x, uint16_t view, uint64_t key)
{
    uint64_t gk = guess_key(key, view);
    uintptr_t n = (uintptr_t)bt_map_get(&x->guesses, gk);

    BT_BUG_ON(n == 0);
    x->views[view].n_guess--;
    if (n > 1) {
        BT_BUG_ON(bt_map_put(&x->guesses, gk, (void *)(n - 1)) < 0); /* replaces */
        return;
    }
    bt_map_del(&x->guesses, gk);
    change(x, key, view, 0, GUESS);
}

int rt_index_guess(struct rt_index *x, uint16_t view, const uint64_t *fps, size_t n)
{
    BT_BUG_ON(view >= RT_VIEWS_MAX || x->views[view].state != VIEW_OPEN);
    for (size_t i = 0; i < n; i++) {
        uint64_t key = key_of(x, fps[i]), gk = guess_key(key, view);
        uintptr_t had = (uintptr_t)bt_map_get(&x->guesses, gk);
        int rc = bt_map_put(&x->guesses, gk, (void *)(had + 1));

        x->views[view].n_guess += rc == BT_OK;
        if (rc == BT_OK && had == 0) {
            rc = BT_MIN(change(x, key, view, GUESS, 0), 0);
            i += rc < 0; /* its count is there: withdrawn with the others */
        }
        if (rc < 0) {
            rt_index_withdraw(x, view, fps, i);
            return rc;
        }
    }
    return BT_OK;
}

void rt_index_withdraw(struct rt_index *x, uint16_t view, const uint64_t *fps, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        withdraw_one(x, view, key_of(x, fps[i]));
    }
}

/* ---- views ---- */

int rt_index_open(struct rt_index *x, uint16_t *ret_view)
{
    for (uint32_t i = 0; i < RT_VIEWS_MAX; i++) {
        if (x->views[i].state == VIEW_FREE) {
            x->views[i] = (struct view){.state = VIEW_OPEN};
            x->n_open++;
            *ret_view = (uint16_t)i;
            return BT_OK;
        }
    }
    return BT_E_EXHAUSTED;
}

void rt_index_close(struct rt_index *x, uint16_t view)
{
    if (view != RT_VIEW_NONE) {
        BT_BUG_ON(view >= RT_VIEWS_MAX || x->views[view].state != VIEW_OPEN);
        x->views[view].state = VIEW_CLOSED;
        x->views[view].swept = x->n_rounds;
        x->n_dead += x->views[view].n_entries;
        x->n_shared -= x->views[view].shared;
        x->n_open--;
        x->n_closed++;
    }
}

void rt_index_limit(struct rt_index *x, uint16_t view, uint64_t most)
{
    BT_BUG_ON(view >= RT_VIEWS_MAX || x->views[view].state != VIEW_OPEN);
    x->views[view].most = most;
}

void rt_index_share(struct rt_index *x, uint16_t view, bool shared)
{
    struct view *v = &x->views[view];

    BT_BUG_ON(view >= RT_VIEWS_MAX || v->state != VIEW_OPEN);
    if (v->shared != shared) {
        v->shared = shared;
        x->n_shared += shared ? 1 : (uint32_t)-1;
    }
}

static void sweep_slot(struct rt_index *x, struct rt_slot *slot)
{
    uint32_t n;
    uint16_t *e = entries(x, slot, &n);

    for (uint32_t i = n; i-- > 0;) {
        if ((e[i] & ALL_BITS) && x->views[e[i] >> 4].state == VIEW_CLOSED) {
            drop_entry(x, slot, &e[i]);
            e = entries(x, slot, &n);
            i = BT_MIN(i, n);
        }
    }
}

/* A closed view is free after a whole round that began behind its end, and once nobody guesses
 * about it any more. */
static void end_round(struct rt_index *x)
{
    for (uint32_t i = 0; i < RT_VIEWS_MAX; i++) {
        struct view *v = &x->views[i];

        if (v->state == VIEW_CLOSED && v->swept < x->n_rounds && v->n_guess == 0) {
            v->state = VIEW_FREE;
            x->n_closed--;
        }
    }
}

/* Sweeps the keys from..last; others may come and go between two pieces, but keys stay. */
static void sweep_piece(struct rt_index *x, uint64_t from, uint64_t last)
{
    struct rt_table *t = &x->table;
    uint64_t end = rt_table_home(t, last);

    for (uint64_t i = rt_table_place(t, from, rt_table_home(t, from)); i < t->end;) {
        struct rt_slot *slot = &t->slots[i];

        if (slot->key > last || (slot->key == 0 && i >= end)) {
            break;
        }
        if (slot->key != 0) {
            sweep_slot(x, slot);
            if (is_empty(slot)) {
                rt_table_take_out(t, slot);
                continue;
            }
        }
        i++;
    }
}

static void sweep_next(struct rt_index *x)
{
    const uint64_t piece = UINT64_MAX / PIECES + 1;

    if (x->sweep_at == 0) {
        x->n_rounds++;
    }
    sweep_piece(x, x->sweep_at * piece, x->sweep_at * piece + (piece - 1));
    rt_table_shrink(&x->table);
    x->sweep_at = (x->sweep_at + 1) % PIECES;
    if (x->sweep_at == 0) {
        end_round(x);
    }
}

bool rt_index_sweep(struct rt_index *x)
{
    if (x->n_closed == 0) {
        x->owed = 0;
        return false;
    }
    do { /* two entries are looked at for each that came: so what is left does not pile up */
        sweep_next(x);
        x->owed -= BT_MIN(x->owed, x->table.n / PIECES + 1);
    } while (x->owed > 0);
    return x->n_closed > 0;
}

/* ---- look-up ---- */

static void extend(struct rt_run *r, uint32_t i, unsigned bits)
{
    unsigned tier = bits & (GUESS | 1) ? 0 : bits & 2 ? 1 : 2;

    if (tier == 0 && r->upto[0] == i) {
        r->upto[0]++;
        r->guessed += !(bits & 1);
    }
    if (tier <= 1 && r->upto[1] == i) {
        r->upto[1]++;
        r->slow[1] += tier == 1;
    }
    r->upto[2]++;
    r->slow[2] += tier == 2;
    r->host_in_disk += tier == 1;
}

/* The run that ends before block i, if the view has one. */
static struct rt_run *run_of(struct rt_index *x, uint16_t view, uint32_t i, size_t *n_runs)
{
    struct view *v = &x->views[view];

    if (v->state != VIEW_OPEN) {
        return NULL;
    }
    if (v->look == x->look) {
        struct rt_run *r = &x->runs[v->run];

        return r->upto[2] == i ? r : NULL;
    }
    if (i > 0) {
        return NULL;
    }
    v->look = x->look;
    v->run = (uint32_t)*n_runs;
    x->runs[*n_runs] = (struct rt_run){.view = view};
    return &x->runs[(*n_runs)++];
}

/* Searches the slots of n blocks, the lines of which are on their way. Those that go on behind
 * their line are fetched and finished in a second pass, so that no search waits for memory. */
static void find_all(struct rt_index *x, const uint64_t *fps, size_t n, struct rt_slot **ret)
{
    struct rt_table *t = &x->table;
    uint32_t on[WINDOW], n_on = 0;

    for (uint32_t i = 0; i < n; i++) {
        uint64_t key = key_of(x, fps[i]);
        struct rt_slot *line = &t->slots[rt_table_home(t, key)];
        uint32_t k = 0;

        /* Behind a free slot (0 - 1 is the largest) all keys are larger: counted without branches,
         * which nobody could predict. */
        for (uint32_t j = 0; j < RT_LINE_SLOTS; j++) {
            k += line[j].key - 1 < key - 1;
        }
        ret[i] = &line[k];
        __builtin_prefetch(ret[i]);
        on[n_on] = i;
        n_on += k == RT_LINE_SLOTS;
        if (k < RT_LINE_SLOTS && line[k].key != key) {
            ret[i] = NULL;
        }
    }
    for (uint32_t j = 0; j < n_on; j++) {
        uint64_t key = key_of(x, fps[on[j]]);
        uint64_t k = rt_table_place(t, key, (uint64_t)(ret[on[j]] - t->slots));

        ret[on[j]] = k < t->end && t->slots[k].key == key ? &t->slots[k] : NULL;
    }
}

/* Block i of the prompt lies in this slot. */
struct met {
    bool any;    /* a run goes on */
    bool shared; /* a shared view has it */
};

static struct met extend_all(struct rt_index *x, struct rt_slot *slot, uint32_t i, size_t *n_runs)
{
    struct met met = {false, false};
    uint32_t n;
    uint16_t *e = entries(x, slot, &n);

    for (uint32_t k = 0; k < n; k++) {
        const struct view *v = &x->views[e[k] >> 4];
        struct rt_run *r = e[k] & ALL_BITS ? run_of(x, e[k] >> 4, i, n_runs) : NULL;

        if (r) {
            extend(r, i, e[k] & ALL_BITS);
            met.any = true;
        }
        met.shared |= v->shared && v->state == VIEW_OPEN && (e[k] & SERVED);
    }
    return met;
}

/* ---- what others share ---- */

/* Without memory the look-up ends here for the store: false. */
static bool note_hole(struct rt_index *x, uint32_t i)
{
    if (x->n_holes == x->cap_holes) {
        size_t cap = BT_MAX(2 * x->cap_holes, (size_t)64);
        void *p = realloc(x->holes, cap * sizeof(*x->holes));

        if (!p) {
            return false;
        }
        x->holes = p;
        x->cap_holes = cap;
    }
    x->holes[x->n_holes++] = i;
    return true;
}

/* Blocks from `from` on that shared views have; blocks from `end` on were not looked at. */
static uint32_t shared_from(const struct rt_index *x, uint32_t from, uint32_t end)
{
    size_t lo = 0, hi = x->n_holes;

    while (lo < hi) {
        size_t mid = (lo + hi) / 2;

        if (x->holes[mid] < from) {
            lo = mid + 1;
        } else {
            hi = mid;
        }
    }
    end = lo < x->n_holes ? BT_MIN(end, x->holes[lo]) : end;
    return end > from ? end - from : 0;
}

static void begin_look(struct rt_index *x)
{
    if (++x->look == 0) { /* all stamps are older than that */
        for (uint32_t i = 0; i < RT_VIEWS_MAX; i++) {
            x->views[i].look = 0;
        }
        x->look = 1;
    }
}

/* Block i; false: nothing goes on behind it. */
static bool look_at(struct rt_index *x, struct rt_slot *slot, uint32_t i, size_t *n_runs)
{
    struct met met = {false, false};

    if (slot) {
        met = extend_all(x, slot, i, n_runs);
    }
    if (x->n_shared > 0 && met.any && !met.shared) {
        return note_hole(x, i);
    }
    return met.any || met.shared;
}

const struct rt_run *
rt_index_look(struct rt_index *x, const uint64_t *fps, size_t n, size_t *ret_n_runs)
{
    struct rt_slot *slots[WINDOW];
    bool on = true;

    begin_look(x);
    x->looked = 0;
    *ret_n_runs = 0;
    x->n_holes = 0;
    for (size_t i = 0; i < BT_MIN(n, (size_t)WINDOW); i++) {
        fetch(x, key_of(x, fps[i]));
    }
    for (size_t from = 0; on && from < n; from += WINDOW) {
        size_t len = BT_MIN(n - from, (size_t)WINDOW);
        size_t end = BT_MIN(from + 2 * WINDOW, n);

        for (size_t i = from + WINDOW; i < end; i++) {
            fetch(x, key_of(x, fps[i]));
        }
        find_all(x, fps + from, len, slots);
        for (size_t i = 0; on && i < len; i++) {
            on = look_at(x, slots[i], (uint32_t)(from + i), ret_n_runs);
            x->looked += on;
        }
    }
    for (size_t i = 0; x->n_shared > 0 && i < *ret_n_runs; i++) {
        x->runs[i].store = shared_from(x, x->runs[i].upto[2], x->looked);
    }
    return x->runs;
}

uint32_t rt_index_looked_store(const struct rt_index *x)
{
    return x->n_shared > 0 ? shared_from(x, 0, x->looked) : 0;
}

struct rt_index_stats rt_index_stats(const struct rt_index *x)
{
    struct rt_index_stats s = {.entries = x->n_entries,
                               .dead = x->n_dead,
                               .guesses = x->guesses.n,
                               .views = x->n_open,
                               .closed = x->n_closed};

    s.blocks = x->table.n;
    s.bytes = sizeof(*x) + RT_VIEWS_MAX * (sizeof(*x->views) + sizeof(*x->runs)) +
              x->cap_sets * sizeof(*x->sets) + x->set_bytes +
              x->guesses.cap * sizeof(*x->guesses.slots) + x->table.open;
    return s;
}
