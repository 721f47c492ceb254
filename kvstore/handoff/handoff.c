/* The instance: start and stop, the registry of ids, the pump, and what kv_send and kv_recv share.
 *
 * Life of a kv_send or kv_recv: the caller's thread makes it and enters it under its id; the xfer
 * thread is told by the object's look message, at most one of which is under way; `done` is the
 * last event; the memory goes when the caller has released it and no look message is under way. */
#include "kvstore/handoff/handoff_int.h"

#include "common/obs/log.h"

#include <stdio.h>
#include <stdlib.h>

/* A ticket's page list; to a relay, also the ids of the prompt. */
#define MAX_MESSAGE_BYTES       ((size_t)1 << 20)
#define MAX_RELAY_MESSAGE_BYTES ((size_t)8 << 20)

int kv_handoff_corrupt_next;

/* ---- ids ---- */

static uint64_t mix_id(struct kv_handoff_id id)
{
    return id.hi ^ (id.lo << 29 | id.lo >> 35) * 0x9e3779b97f4a7c15ull;
}

bool kv_id_eq(struct kv_handoff_id a, struct kv_handoff_id b)
{
    return a.hi == b.hi && a.lo == b.lo;
}

/* h->lock is held. */
static struct kv_end *find_locked(const struct bt_map *m, struct kv_handoff_id id)
{
    struct kv_end *e = bt_map_get(m, mix_id(id));

    while (e && !kv_id_eq(e->id, id)) {
        e = e->id_next;
    }
    return e;
}

static struct kv_end *find(struct kv_handoff *h, const struct bt_map *m, struct kv_handoff_id id)
{
    struct kv_end *e;

    pthread_mutex_lock(&h->lock);
    e = find_locked(m, id);
    pthread_mutex_unlock(&h->lock);
    return e;
}

struct kv_send *kv_find_send(struct kv_handoff *h, struct kv_handoff_id id)
{
    struct kv_end *e = find(h, &h->sends, id);

    return e ? BT_CONTAINER_OF(e, struct kv_send, end) : NULL;
}

struct kv_recv *kv_find_recv(struct kv_handoff *h, struct kv_handoff_id id)
{
    struct kv_end *e = find(h, &h->recvs, id);

    return e ? BT_CONTAINER_OF(e, struct kv_recv, end) : NULL;
}

static int enter_locked(struct kv_end *e, struct bt_err *err)
{
    struct kv_handoff *h = e->h;
    struct bt_map *m = e->is_send ? &h->sends : &h->recvs;
    int rc;

    if (find_locked(m, e->id)) {
        return BT_FAIL(err, BT_E_EXISTS, "handoff %016llx%016llx is already open",
                       (unsigned long long)e->id.hi, (unsigned long long)e->id.lo);
    }
    if (h->n_sends + h->n_recvs >= h->cfg.max_open) {
        return BT_FAIL(err, BT_E_EXHAUSTED, "%u handoffs are open, the limit",
                       h->n_sends + h->n_recvs);
    }
    e->id_next = bt_map_get(m, mix_id(e->id));
    rc = bt_map_put(m, mix_id(e->id), e);
    if (rc != BT_OK) {
        return BT_FAIL(err, rc, "handoff: out of memory");
    }
    bt_list_push_back(&h->all, &e->all_link);
    kv_format_use(e->fmt);
    if (e->is_send) {
        h->n_sends++;
    } else {
        h->n_recvs++;
    }
    return BT_OK;
}

int kv_end_enter(struct kv_end *e, struct bt_err *err)
{
    int rc;

    pthread_mutex_lock(&e->h->lock);
    rc = enter_locked(e, err);
    pthread_mutex_unlock(&e->h->lock);
    return rc;
}

static void end_leave(struct kv_end *e)
{
    struct kv_handoff *h = e->h;
    struct bt_map *m = e->is_send ? &h->sends : &h->recvs;
    struct kv_end *head;

    pthread_mutex_lock(&h->lock);
    head = bt_map_get(m, mix_id(e->id));
    if (head == e) {
        bt_map_del(m, mix_id(e->id));
        if (e->id_next) {
            /* Room was just made: this cannot fail. */
            BT_BUG_ON(bt_map_put(m, mix_id(e->id), e->id_next) != BT_OK);
        }
    } else {
        while (head->id_next != e) {
            head = head->id_next;
        }
        head->id_next = e->id_next;
    }
    if (e->is_send) {
        h->n_sends--;
    } else {
        h->n_recvs--;
    }
    pthread_mutex_unlock(&h->lock);
}

/* ---- life of an end ---- */

static void end_free(struct kv_end *e)
{
    pthread_mutex_lock(&e->h->lock);
    bt_list_remove(&e->all_link);
    pthread_mutex_unlock(&e->h->lock);
    kv_format_drop(e->fmt);
    e->destroy(e);
}

void kv_end_look_locked(struct kv_end *e)
{
    if (!e->done && !e->look_queued) {
        e->look_queued = bt_net_post(e->h->net, &e->look);
    }
}

bool kv_end_looked(struct kv_end *e)
{
    bool alive, gone;

    pthread_mutex_lock(&e->lock);
    e->look_queued = false;
    alive = !e->done;
    gone = e->done && e->released;
    pthread_mutex_unlock(&e->lock);
    if (gone) {
        end_free(e);
    }
    return alive;
}

void kv_end_finish(struct kv_end *e, int rc, const char *msg)
{
    struct kv_handoff *h = e->h;

    e->end_rc = rc;
    snprintf(e->end_msg, sizeof(e->end_msg), "%s", msg);
    bt_list_push_back(&h->ended, &e->ended_link);
    bt_net_timer_start(h->net, &h->end_timer, 0);
}

static void on_ended(struct bt_net_timer *t)
{
    struct kv_handoff *h = BT_CONTAINER_OF(t, struct kv_handoff, end_timer);
    struct bt_list *it;

    while ((it = bt_list_pop_front(&h->ended)) != NULL) {
        struct kv_end *e = BT_LIST_ENTRY(it, struct kv_end, ended_link);

        end_leave(e);
        pthread_mutex_lock(&e->lock);
        e->done = true;
        pthread_mutex_unlock(&e->lock);
        e->deliver(e); /* may be freed by its owner from here on */
    }
}

void kv_end_release(struct kv_end *e)
{
    bool gone;

    pthread_mutex_lock(&e->lock);
    BT_BUG_ON(!e->done || e->released);
    e->released = true;
    gone = !e->look_queued;
    pthread_mutex_unlock(&e->lock);
    if (gone) {
        end_free(e);
    }
}

/* ---- small things ---- */

void kv_add(uint64_t *counter, uint64_t n)
{
    __atomic_add_fetch(counter, n, __ATOMIC_RELAXED);
}

const char *kv_method_name(int method)
{
    static const char *const names[] = {"pull", "message", "put"};

    return method >= 0 && method < (int)BT_ARRAY_LEN(names) ? names[method] : "auto";
}

int kv_peer_rc(int32_t rc)
{
    if (rc >= -11 && rc < 0) {
        return rc;
    }
    return rc <= -30 && rc >= -35 ? rc : BT_E_UNAVAILABLE;
}

/* ---- the pump: work in slices, so that a long prompt does not hold up the others ---- */

void kv_work_ready(struct kv_handoff *h, struct kv_work *w)
{
    if (bt_list_empty(&w->link)) {
        bt_list_push_back(&h->ready_list, &w->link);
        if (h->pump_timer.deadline_ns == BT_NEVER_NS) {
            bt_net_timer_start(h->net, &h->pump_timer, 0);
        }
    }
}

void kv_work_drop(struct kv_work *w)
{
    bt_list_remove(&w->link);
}

static void on_pump(struct bt_net_timer *t)
{
    struct kv_handoff *h = BT_CONTAINER_OF(t, struct kv_handoff, pump_timer);
    size_t budget = KV_PUMP_BYTES;
    struct bt_list *it;

    while (budget > 0 && (it = bt_list_pop_front(&h->ready_list)) != NULL) {
        struct kv_work *w = BT_LIST_ENTRY(it, struct kv_work, link);

        if (w->run(w, &budget) && bt_list_empty(&w->link)) {
            bt_list_push_back(&h->ready_list, &w->link);
        }
    }
    t->deadline_ns = BT_NEVER_NS;
    if (!bt_list_empty(&h->ready_list)) {
        bt_net_timer_start(h->net, t, 0);
    }
}

/* ---- start and stop ---- */

static void set_reg_state(struct kv_handoff *h, int state)
{
    pthread_mutex_lock(&h->lock);
    h->reg_state = state;
    pthread_cond_signal(&h->cond);
    pthread_mutex_unlock(&h->lock);
}

static int wait_reg_state(struct kv_handoff *h, int not_this)
{
    int state;

    pthread_mutex_lock(&h->lock);
    while (h->reg_state == not_this) {
        pthread_cond_wait(&h->cond, &h->lock);
    }
    state = h->reg_state;
    pthread_mutex_unlock(&h->lock);
    return state;
}

/* [xfer] First message: `h->net` is set for certain. */
static void on_start(struct bt_msg *msg, void *consumer)
{
    struct kv_handoff *h = BT_CONTAINER_OF(msg, struct kv_handoff, start_msg);
    int rc = h->own ? kv_format_register(h, h->own, &h->reg_err) : BT_OK;

    h->ready = rc == BT_OK;
    set_reg_state(h, rc == BT_OK ? 1 : rc);
}

static void free_waiting(struct kv_handoff *h)
{
    struct bt_list *it;

    while ((it = bt_list_pop_front(&h->tickets)) != NULL) {
        kv_ticket_free(BT_LIST_ENTRY(it, struct kv_ticket, link));
    }
    while ((it = bt_list_pop_front(&h->confirms)) != NULL) {
        kv_confirm_free(BT_LIST_ENTRY(it, struct kv_confirm, link));
    }
}

/* [xfer] */
static void on_stop(struct bt_msg *msg, void *consumer)
{
    struct kv_handoff *h = BT_CONTAINER_OF(msg, struct kv_handoff, stop_msg);

    h->stopping = true;
    h->ready = false;
    bt_net_timer_stop(&h->pump_timer);
    bt_net_timer_stop(&h->ticket_timer);
    bt_net_timer_stop(&h->confirm_timer);
    bt_list_for_each (it, &h->peers) {
        kv_peer_close(BT_LIST_ENTRY(it, struct kv_peer, link), BT_E_CANCELLED, "stopping");
    }
    free_waiting(h);
    kv_formats_unregister(h);
    set_reg_state(h, 2);
}

static void free_handoff(struct kv_handoff *h)
{
    kv_formats_free(h);
    bt_map_fini(&h->sends);
    bt_map_fini(&h->recvs);
    pthread_mutex_destroy(&h->lock);
    pthread_cond_destroy(&h->cond);
    XXH3_freeState(h->xxh);
    free(h->node_name);
    free(h);
}

static int check_cfg(const struct kv_handoff_cfg *cfg, struct bt_err *err)
{
    size_t n = cfg->node_name ? strlen(cfg->node_name) : 0;

    if (n == 0 || n > WIRE_HANDOFF_MAX_NAME) {
        return BT_FAIL(err, BT_E_CONFIG, "handoff: node name of %zu bytes, must be 1 to %d", n,
                       WIRE_HANDOFF_MAX_NAME);
    }
    if (cfg->wire_version > WIRE_HANDOFF_VERSION) {
        return BT_FAIL(err, BT_E_CONFIG, "handoff: wire version %u, at most %d is spoken",
                       cfg->wire_version, WIRE_HANDOFF_VERSION);
    }
    return BT_OK;
}

static struct kv_handoff *new_handoff(const struct kv_handoff_cfg *cfg)
{
    struct kv_handoff *h = bt_calloc(1, sizeof(*h));

    if (!h) {
        return NULL;
    }
    h->cfg = *cfg;
    h->cfg.silence_ns = cfg->silence_ns ? cfg->silence_ns : 3 * BT_NS_PER_S;
    h->cfg.lease_ns = cfg->lease_ns ? cfg->lease_ns : 30 * BT_NS_PER_S;
    h->cfg.max_open = cfg->max_open ? cfg->max_open : 1024;
    h->cfg.wire_version = cfg->wire_version ? cfg->wire_version : WIRE_HANDOFF_VERSION;
    h->cfg.max_inflight_bytes = cfg->max_inflight_bytes ? cfg->max_inflight_bytes : 16u << 20;
    h->cfg.max_formats = cfg->max_formats ? cfg->max_formats : 4;
    h->forced_method = -1;
    for (int i = 0; cfg->net.method && i < 3; i++) {
        if (strcmp(cfg->net.method, kv_method_name(i)) == 0) {
            h->forced_method = i;
        }
    }
    h->cfg.net.max_message_bytes = cfg->relay ? MAX_RELAY_MESSAGE_BYTES : MAX_MESSAGE_BYTES;
    pthread_mutex_init(&h->lock, NULL);
    pthread_cond_init(&h->cond, NULL);
    bt_map_init(&h->sends);
    bt_map_init(&h->recvs);
    bt_list_init(&h->all);
    bt_list_init(&h->peers);
    bt_list_init(&h->tickets);
    bt_list_init(&h->confirms);
    bt_list_init(&h->ready_list);
    bt_list_init(&h->ended);
    bt_list_init(&h->formats);
    h->pump_timer = (struct bt_net_timer){.deadline_ns = BT_NEVER_NS, .fn = on_pump};
    h->end_timer = (struct bt_net_timer){.fn = on_ended};
    h->ticket_timer = (struct bt_net_timer){.fn = kv_send_on_ticket_timer};
    h->confirm_timer = (struct bt_net_timer){.fn = kv_recv_on_confirm_timer};
    h->start_msg.handle = on_start;
    h->stop_msg.handle = on_stop;
    h->next_ticket = 1;
    h->node_name = strdup(cfg->node_name);
    h->xxh = XXH3_createState();
    if (cfg->relay) {
        h->relays = true;
        h->relay = *cfg->relay;
    } else {
        h->own = kv_format_new(h, cfg->pool, cfg->compat);
    }
    if (!h->node_name || !h->xxh || (!h->own && !h->relays)) {
        free_handoff(h);
        return NULL;
    }
    return h;
}

int kv_handoff_create(const struct kv_handoff_cfg *cfg, struct kv_handoff **ret, struct bt_err *err)
{
    struct bt_net_handlers on = kv_peer_handlers;
    struct kv_handoff *h;
    int rc = check_cfg(cfg, err);

    if (rc != BT_OK) {
        return rc;
    }
    h = new_handoff(cfg);
    if (!h) {
        return BT_FAIL(err, BT_E_NOMEM, "handoff: out of memory");
    }
    on.arg = h;
    rc = bt_net_create(&h->cfg.net, &on, &h->net, err);
    if (rc != BT_OK) {
        free_handoff(h);
        return rc;
    }
    bt_net_post(h->net, &h->start_msg);
    rc = wait_reg_state(h, 0);
    if (rc < 0) {
        if (err) {
            *err = h->reg_err;
        }
        bt_net_destroy(h->net);
        free_handoff(h);
        return rc;
    }
    *ret = h;
    return BT_OK;
}

void kv_handoff_destroy(struct kv_handoff *h)
{
    if (!h) {
        return;
    }
    pthread_mutex_lock(&h->lock);
    BT_BUG_ON(h->n_sends || h->n_recvs);
    pthread_mutex_unlock(&h->lock);
    bt_net_post(h->net, &h->stop_msg);
    wait_reg_state(h, 1);
    bt_net_destroy(h->net);
    while (!bt_list_empty(&h->all)) {
        struct kv_end *e = BT_LIST_ENTRY(h->all.next, struct kv_end, all_link);

        bt_list_remove(&e->all_link);
        e->destroy(e);
    }
    free_handoff(h);
}

const char *kv_handoff_address(const struct kv_handoff *h)
{
    return bt_net_address(h->net);
}

struct bt_net *kv_handoff_net(const struct kv_handoff *h)
{
    return h->net;
}

struct kv_handoff_stats kv_handoff_stats(const struct kv_handoff *h)
{
    struct kv_handoff *w = (struct kv_handoff *)h; /* for the lock */
    struct kv_handoff_stats s = {0};

    pthread_mutex_lock(&w->lock);
    s.sends = h->n_sends;
    s.recvs = h->n_recvs;
    pthread_mutex_unlock(&w->lock);
    s.aborting = __atomic_load_n(&h->n_aborting, __ATOMIC_RELAXED);
    s.peers = __atomic_load_n(&h->n_peers, __ATOMIC_RELAXED);
    s.tickets = __atomic_load_n(&h->n_tickets, __ATOMIC_RELAXED);
    s.connections = __atomic_load_n(&h->connections, __ATOMIC_RELAXED);
    s.bytes = __atomic_load_n(&h->bytes, __ATOMIC_RELAXED);
    s.checksum_errors = __atomic_load_n(&h->checksum_errors, __ATOMIC_RELAXED);
    s.stale = __atomic_load_n(&h->stale, __ATOMIC_RELAXED);
    return s;
}
