/* See link.h. A link lives from accept or dial until the net's `closed`. */
#include "kvstore/store/link.h"

#include "common/base/buf.h"
#include "common/obs/log.h"

#include <stdio.h>
#include <stdlib.h>

#define MAX_MESSAGE_BYTES ((size_t)1 << 20)

int kv_link_version_max = WIRE_STORE_VERSION;

/* ---- sending ---- */

static size_t pack(const struct kv_link *l, struct wire_store *m, char *head)
{
    m->version = m->type <= WIRE_STORE_REFUSE ? 1 : l->version;
    return wire_store_pack(m, head);
}

static void on_copy_sent(void *arg, int rc)
{
    free(arg);
}

bool kv_link_send(struct kv_link *l, struct wire_store *m, struct bt_str data)
{
    char head[WIRE_STORE_MAX_HEAD];
    char *copy = NULL;
    size_t n;

    if (l->closing) {
        return false;
    }
    if (data.n) {
        copy = malloc(data.n);
        if (!copy) {
            kv_link_close(l, BT_E_NOMEM, "out of memory");
            return false;
        }
        memcpy(copy, data.p, data.n);
    }
    n = pack(l, m, head);
    if (bt_net_send(l->net, (struct bt_str){head, n}, (struct bt_str){copy, data.n}, on_copy_sent,
                    copy) != BT_OK) {
        free(copy);
        kv_link_close(l, BT_E_PEER_LOST, "cannot send");
        return false;
    }
    return true;
}

void kv_link_send_data(
    struct kv_link *l, struct wire_store *m, struct bt_str data, bt_net_done_fn done, void *arg)
{
    char head[WIRE_STORE_MAX_HEAD];
    size_t n = pack(l, m, head);

    if (l->closing || bt_net_send(l->net, (struct bt_str){head, n}, data, done, arg) != BT_OK) {
        kv_link_close(l, BT_E_PEER_LOST, "cannot send");
        done(arg, BT_E_PEER_LOST);
    }
}

void kv_link_close(struct kv_link *l, int rc, const char *msg)
{
    if (!l->closing) {
        l->closing = true;
        BT_DEBUG("store_close", "peer=%s address=%s rc=%s reason=\"%s\"", l->name,
                 bt_net_peer_address(l->net), bt_rc_name(rc), msg);
    }
    bt_net_peer_close(l->net, true);
}

void kv_link_violation(struct kv_link *l, const char *what, const struct wire_store *m)
{
    BT_WARN("store_violation", "peer=%s address=%s message=%s reason=\"%s\"", l->name,
            bt_net_peer_address(l->net), m ? wire_store_type_name((int)m->type) : "?", what);
    kv_link_close(l, BT_E_PEER_PROTOCOL, what);
}

int kv_link_rkey(struct kv_link *l, struct bt_err *err)
{
    if (l->rkey || l->key_bytes == 0) {
        return BT_OK;
    }
    return bt_net_rkey_unpack(l->net, (struct bt_str){l->key, l->key_bytes}, &l->rkey, err);
}

enum bt_net_method kv_link_method(const struct kv_link *l)
{
    if (l->links->forced_method >= 0) {
        return (enum bt_net_method)l->links->forced_method;
    }
    return l->their_method != WIRE_STORE_NO_METHOD ? (enum bt_net_method)l->their_method
                                                   : bt_net_peer_method(l->net);
}

/* ---- greeting ---- */

static void say_hello(struct kv_link *l)
{
    const struct kv_links *ls = l->links;
    struct wire_store m = {
        .type = WIRE_STORE_HELLO,
        .version_min = WIRE_STORE_VERSION_MIN,
        .version_max = (uint16_t)kv_link_version_max,
        .method = ls->forced_method < 0 ? WIRE_STORE_NO_METHOD : (uint8_t)ls->forced_method,
        .incarnation = ls->cfg.incarnation,
        .base = (uint64_t)(uintptr_t)ls->cfg.base,
        .bytes = ls->cfg.bytes,
        .name = bt_str_of(ls->node_name),
        .key = ls->key,
    };

    kv_link_send(l, &m, (struct bt_str){0});
}

static void refuse(struct kv_link *l, int rc, const char *msg)
{
    struct wire_store m = {.type = WIRE_STORE_REFUSE, .rc = rc, .text = bt_str_of(msg)};

    BT_WARN("store_refused", "peer=%s address=%s reason=\"%s\"", l->name,
            bt_net_peer_address(l->net), msg);
    if (kv_link_send(l, &m, (struct bt_str){0})) {
        l->closing = true;
        bt_net_peer_close(l->net, false);
    }
}

static void on_hello(struct kv_link *l, const struct wire_store *m)
{
    char text[120];

    if (l->greeted) {
        kv_link_violation(l, "second HELLO", m);
        return;
    }
    for (size_t i = 0; i < m->name.n; i++) {
        char c = m->name.p[i];

        l->name[i] = c > ' ' && c < 0x7f && c != '"' ? c : '?';
    }
    l->name[m->name.n] = '\0';
    l->incarnation = m->incarnation;
    l->base = m->base;
    l->bytes = m->bytes;
    l->their_method = m->method;
    l->key_bytes = m->key.n;
    memcpy(l->key, m->key.p, m->key.n);
    if (m->version_min > WIRE_STORE_VERSION || m->version_max < WIRE_STORE_VERSION_MIN) {
        snprintf(text, sizeof(text), "wire version: %d to %d here, %u to %u there",
                 WIRE_STORE_VERSION_MIN, WIRE_STORE_VERSION, m->version_min, m->version_max);
        refuse(l, BT_E_INCOMPATIBLE, text);
        return;
    }
    if (l->links->forced_method >= 0 && m->method != WIRE_STORE_NO_METHOD &&
        m->method != l->links->forced_method) {
        refuse(l, BT_E_INCOMPATIBLE, "different transfer methods are set");
        return;
    }
    l->version = (uint8_t)BT_MIN((int)m->version_max, kv_link_version_max);
    l->greeted = true;
    l->links->cfg.ops.ready(l->links->cfg.ops.arg, l);
}

/* ---- silence ---- */

static void on_tick(struct bt_net_timer *t)
{
    struct kv_link *l = BT_CONTAINER_OF(t, struct kv_link, tick);
    struct kv_links *ls = l->links;
    struct wire_store ping = {.type = WIRE_STORE_PING};
    uint64_t now = bt_net_clock_ns(ls->net);

    t->deadline_ns = BT_NEVER_NS;
    if (l->closing) {
        bt_net_peer_close(l->net, true);
        return;
    }
    if (l->greeted && !ls->cfg.ops.is_busy(ls->cfg.ops.arg, l)) {
        return;
    }
    if (now - l->last_in_ns > ls->cfg.silence_ns) {
        BT_WARN("store_silent", "peer=%s address=%s silent_ms=%llu", l->name,
                bt_net_peer_address(l->net),
                (unsigned long long)((now - l->last_in_ns) / BT_NS_PER_MS));
        kv_link_close(l, BT_E_PEER_LOST, "the peer is silent");
        return;
    }
    bt_net_timer_start(ls->net, t, bt_deadline_ns(ls->cfg.silence_ns / 4));
    if (l->greeted) {
        kv_link_send(l, &ping, (struct bt_str){0});
    }
}

void kv_link_watch(struct kv_link *l)
{
    if (l->tick.deadline_ns == BT_NEVER_NS) {
        l->last_in_ns = bt_net_clock_ns(l->links->net);
        bt_net_timer_start(l->links->net, &l->tick, bt_deadline_ns(l->links->cfg.silence_ns / 4));
    }
}

/* ---- events of the net ---- */

static struct kv_link *new_link(struct kv_links *ls)
{
    struct kv_link *l = bt_calloc(1, sizeof(*l));

    if (l) {
        l->links = ls;
        l->version = WIRE_STORE_VERSION_MIN;
        snprintf(l->name, sizeof(l->name), "?");
        l->tick = (struct bt_net_timer){.deadline_ns = BT_NEVER_NS, .fn = on_tick};
    }
    return l;
}

static void start_link(struct kv_link *l, struct bt_net_peer *net)
{
    l->net = net;
    bt_net_peer_set_user(net, l);
    bt_list_push_back(&l->links->all, &l->link);
    __atomic_add_fetch(&l->links->n_links, 1, __ATOMIC_RELAXED);
    kv_link_watch(l);
    say_hello(l);
}

static void on_accepted(void *arg, struct bt_net_peer *net)
{
    struct kv_links *ls = arg;
    struct kv_link *l = ls->cfg.serves && ls->mem && !ls->stopping ? new_link(ls) : NULL;

    if (!l) {
        bt_net_peer_close(net, true);
        return;
    }
    start_link(l, net);
}

struct kv_link *kv_link_dial(struct kv_links *ls, const char *address, struct bt_err *err)
{
    struct bt_net_peer *net;
    struct kv_link *l;

    bt_list_for_each (it, &ls->all) {
        l = BT_LIST_ENTRY(it, struct kv_link, link);
        if (l->dialed && !l->closing && strcmp(l->dialed, address) == 0) {
            return l;
        }
    }
    if (ls->stopping) {
        BT_FAIL(err, BT_E_CANCELLED, "stopping");
        return NULL;
    }
    l = new_link(ls);
    if (!l || !(l->dialed = strdup(address))) {
        free(l);
        BT_FAIL(err, BT_E_NOMEM, "store: out of memory");
        return NULL;
    }
    if (bt_net_connect(ls->net, address, &net, err) != BT_OK) {
        free(l->dialed);
        free(l);
        return NULL;
    }
    start_link(l, net);
    return l;
}

static void on_closed(void *arg, struct bt_net_peer *net, int rc)
{
    struct kv_link *l = bt_net_peer_user(net);

    if (!l) {
        return;
    }
    l->closing = true;
    bt_list_remove(&l->link);
    bt_net_timer_stop(&l->tick);
    l->links->cfg.ops.closed(l->links->cfg.ops.arg, l, rc);
    bt_net_rkey_destroy(l->rkey);
    __atomic_sub_fetch(&l->links->n_links, 1, __ATOMIC_RELAXED);
    free(l->dialed);
    free(l);
}

static bool has_data(enum wire_store_type t)
{
    return t == WIRE_STORE_GET || t == WIRE_STORE_HAVE || t == WIRE_STORE_DATA ||
           t == WIRE_STORE_PUT || t == WIRE_STORE_GO || t == WIRE_STORE_LEND;
}

static void dispatch(struct kv_link *l, const struct wire_store *m, struct bt_str data)
{
    struct wire_store pong = {.type = WIRE_STORE_PONG};

    if (data.n && !has_data(m->type)) {
        kv_link_violation(l, "bytes behind a message that has none", m);
    } else if (m->type == WIRE_STORE_HELLO) {
        on_hello(l, m);
    } else if (m->type == WIRE_STORE_REFUSE) {
        BT_WARN("store_refused", "address=%s reason=\"%.*s\"", bt_net_peer_address(l->net),
                (int)m->text.n, m->text.p ? m->text.p : "");
        kv_link_close(l, m->rc, "refused");
    } else if (!l->greeted) {
        kv_link_violation(l, "message before HELLO", m);
    } else if (m->type == WIRE_STORE_PING) {
        kv_link_send(l, &pong, (struct bt_str){0});
    } else if (m->type != WIRE_STORE_PONG) {
        l->links->cfg.ops.message(l->links->cfg.ops.arg, l, m, data);
    }
}

static void on_message(void *arg, struct bt_net_peer *net, struct bt_str head, struct bt_str data)
{
    struct kv_link *l = bt_net_peer_user(net);
    struct wire_store m;
    struct bt_err err;
    int rc;

    if (!l || l->closing) {
        return;
    }
    l->last_in_ns = bt_net_clock_ns(l->links->net);
    rc = wire_store_unpack(head, &m, &err);
    if (rc == BT_E_INCOMPATIBLE) {
        refuse(l, rc, err.msg);
    } else if (rc != BT_OK) {
        kv_link_violation(l, err.msg, NULL);
    } else {
        dispatch(l, &m, data);
    }
}

/* ---- life ---- */

static void on_pump(struct bt_net_timer *t)
{
    struct kv_links *ls = BT_CONTAINER_OF(t, struct kv_links, pump_timer);

    t->deadline_ns = BT_NEVER_NS;
    ls->cfg.ops.pump(ls->cfg.ops.arg);
}

void kv_links_pump(struct kv_links *ls)
{
    if (ls->pump_timer.deadline_ns == BT_NEVER_NS && !ls->stopping) {
        bt_net_timer_start(ls->net, &ls->pump_timer, 0);
    }
}

struct call {
    struct bt_msg msg;
    void (*fn)(void *arg);
    void *arg;
    pthread_mutex_t lock;
    pthread_cond_t cond;
    bool done;
};

static void on_call(struct bt_msg *msg, void *consumer)
{
    struct call *c = BT_CONTAINER_OF(msg, struct call, msg);

    c->fn(c->arg);
    pthread_mutex_lock(&c->lock);
    c->done = true;
    pthread_cond_signal(&c->cond);
    pthread_mutex_unlock(&c->lock);
}

void kv_links_call(struct kv_links *ls, void (*fn)(void *arg), void *arg)
{
    struct call c = {.msg.handle = on_call, .fn = fn, .arg = arg};

    pthread_mutex_init(&c.lock, NULL);
    pthread_cond_init(&c.cond, NULL);
    bt_list_init(&c.msg.link);
    BT_BUG_ON(!bt_net_post(ls->net, &c.msg));
    pthread_mutex_lock(&c.lock);
    while (!c.done) {
        pthread_cond_wait(&c.cond, &c.lock);
    }
    pthread_mutex_unlock(&c.lock);
    pthread_mutex_destroy(&c.lock);
    pthread_cond_destroy(&c.cond);
}

struct registering {
    struct kv_links *ls;
    struct bt_err *err;
    int rc;
};

static void do_register(void *arg)
{
    struct registering *r = arg;
    struct kv_links *ls = r->ls;

    r->rc = bt_net_mem_register(ls->net, ls->cfg.base, ls->cfg.bytes, &ls->mem, &ls->key, r->err);
    if (r->rc == BT_OK && ls->key.n > WIRE_STORE_MAX_KEY) {
        bt_net_mem_unregister(ls->mem);
        ls->mem = NULL;
        r->rc = BT_FAIL(r->err, BT_E_INTERNAL, "memory key of %zu bytes", ls->key.n);
    }
}

static void do_stop(void *arg)
{
    struct kv_links *ls = arg;

    ls->stopping = true;
    bt_net_timer_stop(&ls->pump_timer);
    bt_list_for_each_safe (it, &ls->all) {
        kv_link_close(BT_LIST_ENTRY(it, struct kv_link, link), BT_E_CANCELLED, "stopping");
    }
    bt_net_mem_unregister(ls->mem);
    ls->mem = NULL;
}

int kv_links_init(struct kv_links *ls, const struct kv_links_cfg *cfg, struct bt_err *err)
{
    struct bt_net_handlers on = {ls, on_accepted, on_message, on_closed};
    struct registering r = {.ls = ls, .err = err};
    size_t n = cfg->node_name ? strlen(cfg->node_name) : 0;
    int rc;

    if (n == 0 || n > WIRE_STORE_MAX_NAME) {
        return BT_FAIL(err, BT_E_CONFIG, "store: node name of %zu bytes", n);
    }
    *ls = (struct kv_links){.cfg = *cfg, .forced_method = -1};
    bt_list_init(&ls->all);
    ls->pump_timer = (struct bt_net_timer){.deadline_ns = BT_NEVER_NS, .fn = on_pump};
    ls->cfg.silence_ns = cfg->silence_ns ? cfg->silence_ns : 3 * BT_NS_PER_S;
    ls->cfg.net.max_message_bytes = MAX_MESSAGE_BYTES;
    for (int i = 0; cfg->net.method && i < 3; i++) {
        static const char *const names[] = {"pull", "message", "put"};

        if (strcmp(cfg->net.method, names[i]) == 0) {
            ls->forced_method = i;
        }
    }
    ls->node_name = strdup(cfg->node_name);
    if (!ls->node_name) {
        return BT_FAIL(err, BT_E_NOMEM, "store: out of memory");
    }
    rc = bt_net_create(&ls->cfg.net, &on, &ls->net, err);
    if (rc == BT_OK) {
        kv_links_call(ls, do_register, &r);
        rc = r.rc;
        if (rc != BT_OK) {
            bt_net_destroy(ls->net);
        }
    }
    if (rc != BT_OK) {
        free(ls->node_name);
        ls->node_name = NULL;
    }
    return rc;
}

void kv_links_fini(struct kv_links *ls)
{
    if (!ls->node_name) {
        return;
    }
    kv_links_call(ls, do_stop, ls);
    bt_net_destroy(ls->net);
    free(ls->node_name);
    ls->node_name = NULL;
}
