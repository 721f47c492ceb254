/* The table under the router's prefix index: slots of 16 bytes in one array, sorted by key.
 *
 * Every key stands at or behind its home with no free slot in between, and homes ascend with keys:
 * a search ends at the first larger key or free slot. The array grows and shrinks where it is, a
 * few hundred slots at a time, so that no change pauses: keys below `border` have their homes by
 * low_cap, the others by high_cap, and a step takes the keys next to the border across. The memory
 * is one range of addresses, backed by huge pages where the system has them: a look-up touches
 * hundreds of random lines, and walks of page tables would be most of its time.
 *
 * Inner header of index.c; one thread. */
#ifndef RT_INDEX_TABLE_H
#define RT_INDEX_TABLE_H

#include "common/base/base.h"
#include "common/base/rc.h"

#define RT_SLOT_ENTRIES 4u
#define RT_LINE_SLOTS   4u /* in a cache line */

struct rt_slot {
    uint64_t key; /* 0 = free; never UINT64_MAX */
    union {
        uint16_t e[RT_SLOT_ENTRIES];
        struct {
            uint16_t many, pad;
            uint32_t idx;
        };
    };
};
_Static_assert(sizeof(struct rt_slot) == 16, "bytes per entry");

struct rt_table {
    struct rt_slot *slots; /* [end], zeroed */
    uint64_t end;
    uint64_t low_cap, high_cap; /* homes; low <= high, equal when nothing is under way */
    uint64_t border;            /* 0 then */
    uint64_t n;                 /* keys */
    uint64_t due;               /* the next step to grow is due at so many keys */
    uint64_t open;              /* bytes of the reserved range that can be used */
    void *reserved;
    uint64_t reserved_bytes;
};

int rt_table_init(struct rt_table *t) BT_MUST_USE; /* BT_E_NOMEM */
void rt_table_fini(struct rt_table *t);            /* fine on zeros */

/* The first slot of a cache line, so that most searches read one. */
static inline uint64_t rt_table_home(const struct rt_table *t, uint64_t key)
{
    uint64_t cap = key >= t->border ? t->high_cap : t->low_cap;

    return (uint64_t)((unsigned __int128)key * cap >> 64) & ~(uint64_t)(RT_LINE_SLOTS - 1);
}

/* Where key is, or would go, if that is not before slot i; t->end at most. */
static inline uint64_t rt_table_place(const struct rt_table *t, uint64_t key, uint64_t i)
{
    while (i < t->end && t->slots[i].key != 0 && t->slots[i].key < key) {
        i++;
    }
    return i;
}

struct rt_slot *rt_table_find(struct rt_table *t, uint64_t key); /* NULL: it is not there */
/* The slot of key, made without entries if it is missing. NULL: no memory. Slots move. */
struct rt_slot *rt_table_obtain(struct rt_table *t, uint64_t key);
void rt_table_take_out(struct rt_table *t, struct rt_slot *slot);
/* One piece of the work that gives memory back, if there is much more of it than keys need. */
void rt_table_shrink(struct rt_table *t);

#endif
