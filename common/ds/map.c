/* Open-addressing map; at most 3/4 full. */
#include "common/ds/map.h"

#include "common/base/buf.h"

#include <stdlib.h>
#include <sys/random.h>

void bt_map_init(struct bt_map *m)
{
    *m = (struct bt_map){0};
    if (getrandom(&m->seed, sizeof(m->seed), GRND_NONBLOCK) != sizeof(m->seed)) {
        m->seed = (uint64_t)(uintptr_t)m;
    }
}

void bt_map_fini(struct bt_map *m)
{
    free(m->slots);
    m->slots = NULL;
    m->n = m->cap = 0;
}

static size_t slot_of(const struct bt_map *m, uint64_t key)
{
    __uint128_t h = (__uint128_t)(key ^ m->seed) * 0x9e3779b97f4a7c15u;

    return (size_t)((uint64_t)(h >> 64) ^ (uint64_t)h) & (m->cap - 1);
}

static struct bt_map_slot *find(const struct bt_map *m, uint64_t key)
{
    size_t i;

    if (!m->cap) {
        return NULL;
    }
    for (i = slot_of(m, key); m->slots[i].value; i = (i + 1) & (m->cap - 1)) {
        if (m->slots[i].key == key) {
            return &m->slots[i];
        }
    }
    return NULL;
}

void *bt_map_get(const struct bt_map *m, uint64_t key)
{
    struct bt_map_slot *s = find(m, key);

    return s ? s->value : NULL;
}

static void insert_new(struct bt_map *m, uint64_t key, void *value)
{
    size_t i = slot_of(m, key);

    while (m->slots[i].value) {
        i = (i + 1) & (m->cap - 1);
    }
    m->slots[i] = (struct bt_map_slot){key, value};
}

static int grow(struct bt_map *m)
{
    struct bt_map_slot *old = m->slots;
    size_t old_cap = m->cap, cap = old_cap ? old_cap * 2 : 16;
    struct bt_map_slot *slots = bt_calloc(cap, sizeof(*slots));

    if (!slots) {
        return BT_E_NOMEM;
    }
    m->slots = slots;
    m->cap = cap;
    for (size_t i = 0; i < old_cap; i++) {
        if (old[i].value) {
            insert_new(m, old[i].key, old[i].value);
        }
    }
    free(old);
    return BT_OK;
}

int bt_map_put(struct bt_map *m, uint64_t key, void *value)
{
    struct bt_map_slot *s = find(m, key);

    BT_BUG_ON(!value);
    if (s) {
        s->value = value;
        return BT_OK;
    }
    if ((m->n + 1) * 4 > m->cap * 3) {
        int rc = grow(m);

        if (rc < 0) {
            return rc;
        }
    }
    insert_new(m, key, value);
    m->n++;
    return BT_OK;
}

void *bt_map_del(struct bt_map *m, uint64_t key)
{
    struct bt_map_slot *s = find(m, key);
    size_t hole, i;
    void *value;

    if (!s) {
        return NULL;
    }
    value = s->value;
    hole = (size_t)(s - m->slots);
    m->n--;
    for (i = (hole + 1) & (m->cap - 1); m->slots[i].value; i = (i + 1) & (m->cap - 1)) {
        size_t home = slot_of(m, m->slots[i].key);

        /* An entry may fill the hole unless its home lies between the hole and itself. */
        if (((i - home) & (m->cap - 1)) >= ((i - hole) & (m->cap - 1))) {
            m->slots[hole] = m->slots[i];
            hole = i;
        }
    }
    m->slots[hole].value = NULL;
    return value;
}

void *bt_map_next(const struct bt_map *m, size_t *pos, uint64_t *ret_key)
{
    for (; *pos < m->cap; (*pos)++) {
        if (m->slots[*pos].value) {
            if (ret_key) {
                *ret_key = m->slots[*pos].key;
            }
            return m->slots[(*pos)++].value;
        }
    }
    return NULL;
}
