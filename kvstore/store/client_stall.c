/* The store's client: holders that fall silent while loads wait for them.
 *
 * A frozen process keeps its connection until its silence is long; a load cannot wait for that. So
 * whoever owes a load something is looked after four times in stall_ns and asked whether it lives;
 * when four looks in a row find nothing that it said, loads go on without it. Looks are counted
 * instead of time alone, so that a pause of this process is no stall of the others. */
#include "kvstore/store/client_load_int.h"

#include "common/base/buf.h"
#include "common/obs/log.h"
#include "common/thr/time.h"

#define QUIET_LOOKS 4 /* in a row are a stall: a pause of ours alone is none */

/* The connection to a holder, unless it has fallen silent and not said anything since. */
struct kv_link *kv_client_dial_holder(struct kv_client *c, const struct bt_member *m)
{
    struct kv_link *l = kv_client_dial(c, m);
    struct server *s = l ? kv_client_server(l) : NULL;

    if (!s || (s->stalled && l->last_in_ns <= s->look_ns)) {
        return NULL;
    }
    if (s->stalled || bt_list_empty(&s->fetches)) {
        s->stalled = false;
        s->n_quiet = 0;
        s->look_ns = bt_net_clock_ns(c->links.net);
    }
    if (c->watch.deadline_ns == BT_NEVER_NS) {
        bt_net_timer_start(c->links.net, &c->watch, bt_deadline_ns(c->cfg.stall_ns / QUIET_LOOKS));
    }
    return l;
}

/* What the block needs next has to come from the holder's process. */
static bool awaits(const struct fetch *f, uint32_t i)
{
    const struct block *b = &f->pull->blocks[f->idx[i]];

    return b->fetch == f && b->item == i && !b->reading &&
           (!b->have || f->method != BT_NET_METHOD_PULL);
}

static struct fetch *waiting_fetch(const struct server *s)
{
    bt_list_for_each (it, &s->fetches) {
        struct fetch *f = BT_LIST_ENTRY(it, struct fetch, link);

        for (uint32_t i = 0; i < f->n_items; i++) {
            if (awaits(f, i)) {
                return f;
            }
        }
    }
    return NULL;
}

/* The next holders are asked. Failing a block may end other fetches, so each is looked for anew. */
static void give_up_waiting(struct kv_client *c, struct kv_link *l)
{
    struct server *s = l->user;
    struct fetch *f;

    s->stalled = true;
    count(&c->stats.stalls, 1);
    BT_WARN("store_stalled", "peer=%s address=%s msg=\"says nothing: loads go on without it\"",
            l->name, bt_net_peer_address(l->net));
    while ((f = waiting_fetch(s)) != NULL) {
        struct pull *p = f->pull;

        p->n_ops++; /* both stay until the end */
        f->n_left++;
        for (uint32_t i = 0; i < f->n_items; i++) {
            if (awaits(f, i)) {
                kv_pull_fail_block(p, f->idx[i]);
            }
        }
        if (--f->n_left == 0) {
            kv_fetch_release(f);
        }
        p->n_ops--;
        kv_pull_check_over(p);
    }
}

/* Whoever owes a load something is asked whether it lives. */
void kv_client_on_watch(struct bt_net_timer *t)
{
    struct kv_client *c = BT_CONTAINER_OF(t, struct kv_client, watch);
    struct wire_store ping = {.type = WIRE_STORE_PING};
    uint64_t now = bt_net_clock_ns(c->links.net);
    bool busy = false;

    t->deadline_ns = BT_NEVER_NS;
    bt_list_for_each_safe (it, &c->links.all) {
        struct kv_link *l = BT_LIST_ENTRY(it, struct kv_link, link);
        struct server *s = l->user;

        if (!s || l->closing || s->stalled || !waiting_fetch(s)) {
            continue;
        }
        busy = true;
        s->n_quiet = l->last_in_ns > s->look_ns ? 0 : s->n_quiet + 1;
        s->look_ns = now;
        if (s->n_quiet >= QUIET_LOOKS) {
            give_up_waiting(c, l);
        } else if (s->n_quiet > 0 && l->greeted) {
            kv_link_send(l, &ping, (struct bt_str){0});
        }
    }
    if (busy && t->deadline_ns == BT_NEVER_NS) {
        bt_net_timer_start(c->links.net, t, bt_deadline_ns(c->cfg.stall_ns / QUIET_LOOKS));
    }
}
