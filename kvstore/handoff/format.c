/* Formats: a pool, what must be equal for its bytes to be exchanged, and its registration with the
 * net. A node has one for life. A relay opens one when the first node of a kind calls and closes
 * those that nobody uses when there are too many. Thread: xfer, except the count of users. */
#include "kvstore/handoff/handoff_int.h"

#include "common/obs/log.h"

#include <stdlib.h>

struct kv_pool *kv_format_pool(const struct kv_format *f)
{
    return f->pool;
}

struct kv_format *
kv_format_new(struct kv_handoff *h, struct kv_pool *pool, const uint8_t compat[32])
{
    struct kv_format *f = bt_calloc(1, sizeof(*f));

    if (!f) {
        return NULL;
    }
    f->pool = pool;
    f->layout = kv_pool_layout(pool);
    f->elem = f->layout->dtype == KV_DTYPE_F32 ? 4 : 2;
    memcpy(f->compat, compat, sizeof(f->compat));
    bt_list_push_back(&h->formats, &f->link);
    return f;
}

int kv_format_register(struct kv_handoff *h, struct kv_format *f, struct bt_err *err)
{
    const struct bt_mem_region *region = kv_pool_region(f->pool);
    int rc = bt_net_mem_register(h->net, region->base, region->bytes, &f->mem, &f->key, err);

    if (rc == BT_OK && f->key.n > WIRE_HANDOFF_MAX_KEY) {
        rc = BT_FAIL(err, BT_E_INTERNAL, "memory key of %zu bytes, at most %d fit", f->key.n,
                     WIRE_HANDOFF_MAX_KEY);
        bt_net_mem_unregister(f->mem);
        f->mem = NULL;
    }
    return rc;
}

static void format_free(struct kv_handoff *h, struct kv_format *f)
{
    bt_list_remove(&f->link);
    if (h->relays) {
        h->relay.close(h->relay.arg, f->pool);
    }
    free(f);
}

static bool fits(const struct kv_format *f, const struct kv_layout *l, const uint8_t compat[32])
{
    const struct kv_layout *o = f->layout;

    return o->n_layers == l->n_layers && o->n_kv_heads == l->n_kv_heads &&
           o->head_dim == l->head_dim && o->dtype == l->dtype && o->page_tokens == l->page_tokens &&
           memcmp(f->compat, compat, sizeof(f->compat)) == 0;
}

/* Room for one more: those that nobody uses go first. */
static bool make_room(struct kv_handoff *h)
{
    uint32_t n = 0;

    bt_list_for_each_safe (it, &h->formats) {
        struct kv_format *f = BT_LIST_ENTRY(it, struct kv_format, link);

        n++;
        if (__atomic_load_n(&f->n_users, __ATOMIC_ACQUIRE) == 0) {
            bt_net_mem_unregister(f->mem);
            format_free(h, f);
            n--;
        }
    }
    return n < h->cfg.max_formats;
}

int kv_format_find(struct kv_handoff *h,
                   const struct kv_layout *layout,
                   const uint8_t compat[32],
                   struct kv_format **ret,
                   struct bt_err *err)
{
    struct kv_pool *pool;
    struct kv_format *f;
    int rc;

    bt_list_for_each (it, &h->formats) {
        f = BT_LIST_ENTRY(it, struct kv_format, link);
        if (fits(f, layout, compat)) {
            *ret = f;
            return BT_OK;
        }
    }
    if (!make_room(h)) {
        return BT_FAIL(err, BT_E_EXHAUSTED, "%s relays for %u kinds of nodes already, the limit",
                       h->node_name, h->cfg.max_formats);
    }
    rc = h->relay.open(h->relay.arg, layout, &pool, err);
    if (rc != BT_OK) {
        return rc;
    }
    f = kv_format_new(h, pool, compat);
    if (!f) {
        h->relay.close(h->relay.arg, pool);
        return BT_FAIL(err, BT_E_NOMEM, "handoff: out of memory");
    }
    rc = kv_format_register(h, f, err);
    if (rc != BT_OK) {
        format_free(h, f);
        return rc;
    }
    *ret = f;
    return BT_OK;
}

struct kv_format *kv_format_use(struct kv_format *f)
{
    __atomic_add_fetch(&f->n_users, 1, __ATOMIC_RELAXED);
    return f;
}

void kv_format_drop(struct kv_format *f)
{
    if (f) {
        __atomic_sub_fetch(&f->n_users, 1, __ATOMIC_RELEASE);
    }
}

void kv_formats_unregister(struct kv_handoff *h)
{
    bt_list_for_each (it, &h->formats) {
        struct kv_format *f = BT_LIST_ENTRY(it, struct kv_format, link);

        bt_net_mem_unregister(f->mem);
        f->mem = NULL;
    }
}

void kv_formats_free(struct kv_handoff *h)
{
    bt_list_for_each_safe (it, &h->formats) {
        format_free(h, BT_LIST_ENTRY(it, struct kv_format, link));
    }
}
