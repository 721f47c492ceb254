/* See table.h. Growing, the border comes down from the largest key and what it passes moves to the
 * right, into room that is free or has been left; shrinking, it goes up and what it passes moves to
 * the left. Steps use the same insertion and removal as everything else, so that order and homes
 * hold at any moment, whatever else changes between two steps. */
#include "router/index/table.h"

#include <string.h>
#include <sys/mman.h>

#define HUGE       ((uint64_t)2 << 20)
#define RESERVE    ((uint64_t)64 << 30) /* of addresses, not memory: 3.4 billion blocks */
#define RESERVE_OK ((uint64_t)64 << 20) /* if there is a limit on addresses */
#define CAP_MIN    64u
#define CHUNK      256u  /* slots of a step */
#define GAP_MOST   8192u /* free slots that a step passes */
#define SLACK      1024u /* slots behind the last home, more if a run needs them */
/* Load at which growing begins and is finished, and at which there is no room without it. */
#define LOAD_BEGIN 0.80
#define LOAD_END   0.85
#define LOAD_MOST  0.95
#define LOAD_AGAIN 0.67 /* after shrinking */

/* ---- memory ---- */

/* Makes the first `end` slots usable. */
static int open_upto(struct rt_table *t, uint64_t end)
{
    uint64_t bytes = BT_DIV_UP(end * sizeof(*t->slots), HUGE) * HUGE;

    if (bytes > t->reserved_bytes - HUGE) {
        return BT_E_NOMEM;
    }
    if (bytes > t->open) {
        if (mprotect((char *)t->slots + t->open, bytes - t->open, PROT_READ | PROT_WRITE) < 0) {
            return BT_E_NOMEM;
        }
        t->open = bytes;
    }
    t->end = BT_MAX(t->end, end);
    return BT_OK;
}

/* Gives back what is behind `end`, all homes being before it. */
static void close_from(struct rt_table *t, uint64_t end)
{
    uint64_t bytes = BT_DIV_UP(end * sizeof(*t->slots), HUGE) * HUGE;

    if (end >= t->end || t->slots[end - 1].key != 0) { /* a long run: the next time */
        return;
    }
    if (bytes < t->open) {
        char *at = (char *)t->slots + bytes;

        /* Only what is sure to read as zeros is opened again. */
        if (madvise(at, t->open - bytes, MADV_DONTNEED) < 0 ||
            mprotect(at, t->open - bytes, PROT_NONE) < 0) {
            return;
        }
        t->open = bytes;
    }
    t->end = end;
}

int rt_table_init(struct rt_table *t)
{
    uint64_t bytes = RESERVE;
    void *p;

    *t = (struct rt_table){.low_cap = CAP_MIN, .high_cap = CAP_MIN};
    while ((p = mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)) ==
           MAP_FAILED) {
        bytes /= 2;
        if (bytes < RESERVE_OK) {
            return BT_E_NOMEM;
        }
    }
    t->reserved = p;
    t->reserved_bytes = bytes;
    t->slots = (void *)(((uintptr_t)p + HUGE - 1) / HUGE * HUGE);
    (void)!madvise(t->slots, bytes - HUGE, MADV_HUGEPAGE); /* slower without */
    t->due = (uint64_t)(CAP_MIN * LOAD_BEGIN);
    return open_upto(t, CAP_MIN + SLACK);
}

void rt_table_fini(struct rt_table *t)
{
    if (t->reserved) {
        munmap(t->reserved, t->reserved_bytes);
    }
    *t = (struct rt_table){0};
}

/* ---- one key ---- */

struct rt_slot *rt_table_find(struct rt_table *t, uint64_t key)
{
    uint64_t i = rt_table_place(t, key, rt_table_home(t, key));

    return i < t->end && t->slots[i].key == key ? &t->slots[i] : NULL;
}

/* A slot of its own for what is not there yet. NULL: the array ends here and cannot be longer. */
static struct rt_slot *insert(struct rt_table *t, struct rt_slot what)
{
    uint64_t i = rt_table_place(t, what.key, rt_table_home(t, what.key)), hole = i;

    while (hole < t->end && t->slots[hole].key != 0) {
        hole++;
    }
    if (hole == t->end && open_upto(t, t->end + SLACK) < 0) {
        return NULL;
    }
    memmove(&t->slots[i + 1], &t->slots[i], (hole - i) * sizeof(*t->slots));
    t->slots[i] = what;
    return &t->slots[i];
}

static void take_out_at(struct rt_table *t, uint64_t i)
{
    uint64_t end = i + 1;

    while (end < t->end && t->slots[end].key != 0 && rt_table_home(t, t->slots[end].key) < end) {
        end++;
    }
    memmove(&t->slots[i], &t->slots[i + 1], (end - i - 1) * sizeof(*t->slots));
    t->slots[end - 1] = (struct rt_slot){0};
}

void rt_table_take_out(struct rt_table *t, struct rt_slot *slot)
{
    take_out_at(t, (uint64_t)(slot - t->slots));
    t->n--;
}

/* ---- growing and shrinking ---- */

static uint64_t low_home(const struct rt_table *t, uint64_t key)
{
    return (uint64_t)((unsigned __int128)key * t->low_cap >> 64) & ~(uint64_t)(RT_LINE_SLOTS - 1);
}

static bool is_even(const struct rt_table *t)
{
    return t->low_cap == t->high_cap;
}

static void set_even(struct rt_table *t, uint64_t cap)
{
    t->low_cap = t->high_cap = cap;
    t->border = 0;
}

/* Steps keep pace with the keys: all are done when LOAD_END is reached. */
static void set_due(struct rt_table *t)
{
    double done = is_even(t) ? 0 : 1 - (double)t->border / 0x1p64;

    t->due = (uint64_t)((double)t->low_cap * (LOAD_BEGIN + (LOAD_END - LOAD_BEGIN) * done));
}

/* Takes the slots from..to - 1 out of the array, as they are: how many there are. */
static unsigned lift(struct rt_table *t, uint64_t from, uint64_t to, struct rt_slot out[CHUNK])
{
    bool run = to < t->end && t->slots[to].key != 0 && rt_table_home(t, t->slots[to].key) < to;
    unsigned n = 0;

    for (uint64_t i = from; i < to; i++) {
        if (t->slots[i].key != 0) {
            out[n++] = t->slots[i];
        }
    }
    if (!run) {
        memset(&t->slots[from], 0, (to - from) * sizeof(*t->slots));
    } else { /* what follows stands there because of these */
        for (uint64_t i = to; i-- > from;) {
            if (t->slots[i].key != 0) {
                take_out_at(t, i);
            }
        }
    }
    return n;
}

static void put_back(struct rt_table *t, const struct rt_slot *slots, unsigned n)
{
    for (unsigned i = 0; i < n; i++) {
        BT_BUG_ON(!insert(t, slots[i])); /* there is room for a chunk at the end */
    }
}

/* The last keys below the border get their homes by high_cap. BT_E_NOMEM: nothing was moved. */
static int step_down(struct rt_table *t)
{
    uint64_t to = rt_table_place(t, t->border, low_home(t, t->border)), from;
    struct rt_slot moved[CHUNK];
    unsigned n;

    if (t->slots[t->end - CHUNK - 1].key != 0 && open_upto(t, t->end + SLACK) < 0) {
        return BT_E_NOMEM;
    }
    while (to > 0 && t->slots[to - 1].key == 0) {
        to--;
    }
    from = to > CHUNK ? to - CHUNK : 0;
    n = lift(t, from, to, moved);
    t->border = from > 0 ? moved[0].key : 0;
    put_back(t, moved, n);
    if (t->border == 0) {
        set_even(t, t->high_cap);
    }
    return BT_OK;
}

/* The first keys from the border on get their homes by low_cap. */
static void step_up(struct rt_table *t)
{
    uint64_t from = rt_table_place(t, t->border, rt_table_home(t, t->border)), to;
    struct rt_slot moved[CHUNK];
    uint64_t gap = GAP_MOST;
    unsigned n;

    while (from < t->end && t->slots[from].key == 0) {
        from++;
        if (--gap == 0 && from < t->high_cap) { /* what is behind has its home there */
            t->border = (uint64_t)(((unsigned __int128)from << 64) / t->high_cap);
            return;
        }
    }
    if (from == t->end) {
        set_even(t, t->low_cap);
        close_from(t, t->low_cap + SLACK);
        return;
    }
    to = BT_MIN(from + CHUNK, t->end);
    n = lift(t, from, to, moved);
    t->border = moved[n - 1].key + 1;
    put_back(t, moved, n);
}

/* The steps that are due. BT_E_NOMEM: the table is full. */
static int grow(struct rt_table *t)
{
    while (t->n >= t->due) {
        if (is_even(t)) {
            uint64_t cap = t->low_cap + BT_MAX(t->low_cap / 64 * 4, (uint64_t)CAP_MIN);

            if (open_upto(t, cap + SLACK) < 0) {
                break;
            }
            t->high_cap = cap;
            t->border = UINT64_MAX;
        }
        if (step_down(t) < 0) {
            break;
        }
        set_due(t);
    }
    return (double)t->n < LOAD_MOST * (double)t->low_cap ? BT_OK : BT_E_NOMEM;
}

void rt_table_shrink(struct rt_table *t)
{
    if (is_even(t) && t->high_cap > CAP_MIN && t->n < t->high_cap / 3) {
        uint64_t cap = (uint64_t)((double)t->n / LOAD_AGAIN) / 4 * 4;

        t->low_cap = BT_MAX(cap, (uint64_t)CAP_MIN);
        t->border = 0;
    }
    for (int i = 0; i < 16 && !is_even(t) && (double)t->n < LOAD_BEGIN * (double)t->low_cap; i++) {
        step_up(t);
    }
    set_due(t);
}

struct rt_slot *rt_table_obtain(struct rt_table *t, uint64_t key)
{
    struct rt_slot *slot = rt_table_find(t, key);

    if (slot || (t->n >= t->due && grow(t) < 0)) {
        return slot;
    }
    slot = insert(t, (struct rt_slot){.key = key});
    t->n += slot != NULL;
    return slot;
}
