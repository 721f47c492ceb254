/* Intrusive doubly linked list with a sentinel head. Policy-free; the owner of the head owns the
 * links. A node that is in no list points to itself, so remove is safe to repeat. */
#ifndef BT_DS_LIST_H
#define BT_DS_LIST_H

#include "common/base/base.h"

struct bt_list {
    struct bt_list *next, *prev;
};

static inline void bt_list_init(struct bt_list *l)
{
    l->next = l->prev = l;
}

static inline bool bt_list_empty(const struct bt_list *l)
{
    return l->next == l;
}

static inline void bt_list_insert_(struct bt_list *n, struct bt_list *prev, struct bt_list *next)
{
    n->prev = prev;
    n->next = next;
    prev->next = n;
    next->prev = n;
}

static inline void bt_list_push_back(struct bt_list *head, struct bt_list *n)
{
    bt_list_insert_(n, head->prev, head);
}

static inline void bt_list_push_front(struct bt_list *head, struct bt_list *n)
{
    bt_list_insert_(n, head, head->next);
}

static inline void bt_list_insert_before(struct bt_list *at, struct bt_list *n)
{
    bt_list_insert_(n, at->prev, at);
}

static inline void bt_list_remove(struct bt_list *n)
{
    n->prev->next = n->next;
    n->next->prev = n->prev;
    bt_list_init(n);
}

static inline struct bt_list *bt_list_pop_front(struct bt_list *head)
{
    struct bt_list *n = head->next;

    if (n == head) {
        return NULL;
    }
    bt_list_remove(n);
    return n;
}

/* Moves all of src to the end of dst; src is empty afterwards. */
static inline void bt_list_splice_back(struct bt_list *dst, struct bt_list *src)
{
    if (bt_list_empty(src)) {
        return;
    }
    src->next->prev = dst->prev;
    dst->prev->next = src->next;
    src->prev->next = dst;
    dst->prev = src->prev;
    bt_list_init(src);
}

#define bt_list_for_each(it, head)                                                                 \
    for (struct bt_list *it = (head)->next; it != (head); it = it->next)
#define bt_list_for_each_safe(it, head)                                                            \
    for (struct bt_list *it = (head)->next, *it##_next = it->next; it != (head);                   \
         it = it##_next, it##_next = it->next)
#define BT_LIST_ENTRY(ptr, type, member) BT_CONTAINER_OF(ptr, type, member)

#endif
