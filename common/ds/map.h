/* Hash map from uint64_t to pointer: open addressing, linear probing, backward-shift deletion.
 *
 * Keys that a remote side may choose are mixed with a per-map random seed, so that nobody can pile
 * up a probe chain. Not thread safe; values are borrowed. */
#ifndef BT_DS_MAP_H
#define BT_DS_MAP_H

#include "common/base/rc.h"

struct bt_map_slot {
    uint64_t key;
    void *value; /* NULL = free slot */
};

struct bt_map {
    struct bt_map_slot *slots;
    size_t n;   /* entries */
    size_t cap; /* power of two, 0 before the first put */
    uint64_t seed;
};

void bt_map_init(struct bt_map *m);
void bt_map_fini(struct bt_map *m);
void *bt_map_get(const struct bt_map *m, uint64_t key); /* NULL = absent */
/* Replaces; value must not be NULL. BT_OK or BT_E_NOMEM. */
int bt_map_put(struct bt_map *m, uint64_t key, void *value) BT_MUST_USE;
/* Removes and returns the value, NULL if absent. */
void *bt_map_del(struct bt_map *m, uint64_t key);
/* Iteration: start with *pos = 0; NULL at the end. The map must not change meanwhile. */
void *bt_map_next(const struct bt_map *m, size_t *pos, uint64_t *ret_key);

#endif
