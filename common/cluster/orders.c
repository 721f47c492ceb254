/* The thread "redis-orders". See orders.h.
 *
 * Invariant: everything below `conn` in struct bt_orders belongs to the thread; what others hand to
 * it comes through the mailbox. */
#include "common/cluster/orders.h"

#include "common/cluster/redis_int.h"
#include "common/obs/log.h"
#include "common/thr/mailbox.h"
#include "common/thr/thread.h"
#include "common/thr/time.h"

#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#define EPOCH_MAX 64

struct placing {
    struct bt_msg msg;
    struct bt_order order; /* text empty = withdrawn */
    void *token;
    int rc;
    struct bt_err err;
};

struct bt_orders {
    struct bt_orders_cfg cfg;
    struct redis_target target;
    pthread_t thread;
    int wake_fd;
    struct bt_mailbox box; /* struct placing.msg */
    bool quit;             /* atomic */

    struct redis_conn conn;
    struct redis_pause pause;
    uint64_t poll_ns; /* next reading */
    bool down_told, bad_told;
    char epoch[EPOCH_MAX + 1];  /* as last read; empty = never */
    struct bt_order_list *list; /* in force; NULL = never read */
};

/* Answers: 0 done, 1 too many. KEYS orders; ARGV key text max */
static const char place_script[] =
    "local t = redis.call('TYPE', KEYS[1]).ok\n"
    "if t ~= 'hash' and t ~= 'none' then redis.call('DEL', KEYS[1]) end\n"
    "if ARGV[2] == '' then redis.call('HDEL', KEYS[1], ARGV[1]) return 0 end\n"
    "if redis.call('HLEN', KEYS[1]) >= tonumber(ARGV[3]) and\n"
    "   redis.call('HEXISTS', KEYS[1], ARGV[1]) == 0 then return 1 end\n"
    "redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])\n"
    "return 0\n";

/* --- lists ----------------------------------------------------------------------------------- */

static bool key_ok(struct bt_str s)
{
    for (size_t i = 0; i < s.n; i++) {
        char c = s.p[i];

        if (!((c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
              (c && strchr("-_.:", c)))) {
            return false;
        }
    }
    return s.n > 0 && s.n <= BT_ORDER_KEY_MAX;
}

static bool text_ok(struct bt_str s)
{
    for (size_t i = 0; i < s.n; i++) {
        if (s.p[i] < ' ' || s.p[i] > '~') {
            return false;
        }
    }
    return s.n > 0 && s.n <= BT_ORDER_TEXT_MAX;
}

static struct bt_order_list *list_make(size_t n)
{
    return bt_calloc(1, sizeof(struct bt_order_list) + n * sizeof(struct bt_order));
}

static int by_key(const void *a, const void *b)
{
    return strcmp(((const struct bt_order *)a)->key, ((const struct bt_order *)b)->key);
}

static bool same(const struct bt_order_list *a, const struct bt_order_list *b)
{
    if (!a || a->n != b->n) {
        return false;
    }
    for (size_t i = 0; i < a->n; i++) {
        if (strcmp(a->at[i].key, b->at[i].key) != 0 || strcmp(a->at[i].text, b->at[i].text) != 0) {
            return false;
        }
    }
    return true;
}

/* Makes `take_list` the one in force and hands a copy on if it is another one. */
static void accept(struct bt_orders *o, struct bt_order_list *take_list)
{
    size_t bytes = sizeof(*take_list) + take_list->n * sizeof(take_list->at[0]);
    struct bt_order_list *copy;

    qsort(take_list->at, take_list->n, sizeof(take_list->at[0]), by_key);
    if (same(o->list, take_list)) {
        free(take_list);
        return;
    }
    copy = bt_calloc(1, bytes);
    if (!copy) {
        BT_ERROR("orders", "msg=\"out of memory; orders stay as they were\"");
        free(take_list);
        return;
    }
    memcpy(copy, take_list, bytes);
    free(o->list);
    o->list = take_list;
    BT_INFO("orders", "n=%zu", take_list->n);
    o->cfg.changed(o->cfg.arg, copy);
}

/* --- Redis ----------------------------------------------------------------------------------- */

static void link_down(struct bt_orders *o, int rc, const struct bt_err *err)
{
    char msg[256];

    redis_close(&o->conn);
    redis_pause_grow(&o->pause, o->cfg.conf->lease_ns);
    if (!o->down_told) {
        o->down_told = true;
        BT_INFO("orders_frozen", "msg=\"%s\" rc=%s",
                bt_log_quotable(bt_err_msg(err, rc), msg, sizeof(msg)), bt_rc_name(rc));
    }
}

static int connect_once(struct bt_orders *o, struct bt_err *err)
{
    int rc = redis_open(&o->conn, &o->target, err);

    if (rc < 0) {
        link_down(o, rc, err);
        return rc;
    }
    o->poll_ns = 0;
    return BT_OK;
}

static int place(struct bt_orders *o, const struct bt_order *order, struct bt_err *err)
{
    char k[REDIS_KEY_MAX], max[16];
    redisReply *reply = NULL;
    int rc = BT_OK;

    if (!o->conn.ctx) {
        rc = connect_once(o, err);
    }
    if (rc < 0) {
        return rc;
    }
    snprintf(max, sizeof(max), "%d", BT_ORDERS_MAX);
    rc =
        redis_send(&o->conn, 7,
                   (struct bt_str[]){BT_STR("EVAL"), BT_STR(place_script), BT_STR("1"),
                                     redis_key(o->cfg.conf, "orders", "", k), bt_str_of(order->key),
                                     bt_str_of(order->text), bt_str_of(max)});
    if (rc == BT_OK) {
        rc = redis_receive(&o->conn, o->target.timeout_ns, &reply, 1, err);
    }
    if (rc < 0) {
        link_down(o, rc, err);
        return rc;
    }
    rc = redis_refusal(reply, err);
    if (rc == BT_OK && reply->type != REDIS_REPLY_INTEGER) {
        rc = BT_FAIL(err, BT_E_UNAVAILABLE, "Redis: %.*s", (int)redis_text(reply).n,
                     redis_text(reply).p);
    } else if (rc == BT_OK && reply->integer != 0) {
        rc = BT_FAIL(err, BT_E_EXHAUSTED, "there are %d orders already", BT_ORDERS_MAX);
    }
    freeReplyObject(reply);
    return rc;
}

/* The orders of a HGETALL; NULL without memory. */
static struct bt_order_list *decode(struct bt_orders *o, const redisReply *r)
{
    size_t n = r->type == REDIS_REPLY_ARRAY ? BT_MIN(r->elements / 2, (size_t)BT_ORDERS_MAX) : 0;
    struct bt_order_list *list = list_make(n);

    for (size_t i = 0; list && i < n; i++) {
        const redisReply *k = r->element[2 * i], *v = r->element[2 * i + 1];
        struct bt_order *at = &list->at[list->n];

        if (!k->str || !v->str || !key_ok((struct bt_str){k->str, k->len}) ||
            !text_ok((struct bt_str){v->str, v->len})) {
            if (!o->bad_told) {
                BT_WARN("orders", "msg=\"an order in Redis is malformed; passed over\"");
                o->bad_told = true;
            }
            continue;
        }
        memcpy(at->key, k->str, k->len);
        memcpy(at->text, v->str, v->len);
        list->n++;
    }
    return list;
}

/* True if Redis has lost its content since the last reading, and ours was put back. */
static bool restored(struct bt_orders *o, const redisReply *epoch, const redisReply *orders)
{
    bool emptied = o->epoch[0] && epoch->type == REDIS_REPLY_STRING && epoch->len > 0 &&
                   epoch->len <= EPOCH_MAX &&
                   !bt_str_eq((struct bt_str){epoch->str, epoch->len}, bt_str_of(o->epoch));

    if (epoch->type == REDIS_REPLY_STRING && epoch->len > 0 && epoch->len <= EPOCH_MAX) {
        memcpy(o->epoch, epoch->str, epoch->len);
        o->epoch[epoch->len] = '\0';
    }
    if (!emptied || !o->list || o->list->n == 0 || orders->elements > 0) {
        return false;
    }
    BT_INFO("orders_restored", "n=%zu msg=\"Redis lost its content; orders are written again\"",
            o->list->n);
    for (size_t i = 0; i < o->list->n && o->conn.ctx; i++) {
        struct bt_err err = {0};

        if (place(o, &o->list->at[i], &err) < 0) {
            BT_WARN("orders", "key=%s msg=\"not written again: %s\"", o->list->at[i].key,
                    bt_err_msg(&err, BT_E_UNAVAILABLE));
        }
    }
    return true;
}

static void read_orders(struct bt_orders *o)
{
    char k[REDIS_KEY_MAX];
    redisReply *r[2] = {NULL, NULL};
    struct bt_order_list *list;
    struct bt_err err = {0};
    int rc;

    o->poll_ns = bt_now_ns() + redis_jitter(o->cfg.conf->poll_ns);
    rc = redis_send(&o->conn, 4,
                    (struct bt_str[]){BT_STR("GETRANGE"), redis_key(o->cfg.conf, "epoch", "", k),
                                      BT_STR("0"), BT_STR(BT_STR2_(EPOCH_MAX))});
    if (rc == BT_OK) {
        rc = redis_send(
            &o->conn, 2,
            (struct bt_str[]){BT_STR("HGETALL"), redis_key(o->cfg.conf, "orders", "", k)});
    }
    if (rc == BT_OK) {
        rc = redis_receive(&o->conn, o->target.timeout_ns, r, 2, &err);
    }
    if (rc == BT_OK && (rc = redis_refusal(r[0], &err)) == BT_OK) {
        rc = redis_refusal(r[1], &err);
    }
    if (rc < 0) {
        link_down(o, rc, &err);
        goto out;
    }
    redis_pause_reset(&o->pause);
    o->down_told = false;
    /* Before a new epoch is written an empty hash may only mean that Redis was emptied. */
    if (r[0]->type == REDIS_REPLY_STRING && r[0]->len == 0 && o->epoch[0]) {
        goto out;
    }
    if (restored(o, r[0], r[1])) {
        o->poll_ns = 0;
        goto out;
    }
    list = decode(o, r[1]);
    if (list) {
        accept(o, list);
    }

out:
    redis_free_replies(r, 2);
}

/* --- without Redis --------------------------------------------------------------------------- */

static int place_here(struct bt_orders *o, const struct bt_order *order, struct bt_err *err)
{
    size_t n = o->list ? o->list->n : 0;
    struct bt_order_list *list = list_make(n + 1);

    if (!list) {
        return BT_FAIL(err, BT_E_NOMEM, "no memory for an order");
    }
    for (size_t i = 0; i < n; i++) {
        if (strcmp(o->list->at[i].key, order->key) != 0) {
            list->at[list->n++] = o->list->at[i];
        }
    }
    if (order->text[0]) {
        list->at[list->n++] = *order;
    }
    if (list->n > BT_ORDERS_MAX) {
        free(list);
        return BT_FAIL(err, BT_E_EXHAUSTED, "there are %d orders already", BT_ORDERS_MAX);
    }
    accept(o, list);
    return BT_OK;
}

/* --- the thread ------------------------------------------------------------------------------ */

static void sleep_until_due(struct bt_orders *o)
{
    struct pollfd p = {o->wake_fd, POLLIN, 0};
    uint64_t due = BT_NEVER_NS, now = bt_now_ns();

    if (bt_orders_kept(o)) {
        due = o->conn.ctx ? o->poll_ns : o->pause.next_ns;
    }
    if (due > now) {
        poll(&p, 1,
             due == BT_NEVER_NS ? -1 : (int)BT_MIN((due - now) / BT_NS_PER_MS + 1, 60000ull));
    }
    bt_eventfd_clear(o->wake_fd);
}

static struct placing *placing_of(struct bt_list *link)
{
    return BT_CONTAINER_OF(BT_LIST_ENTRY(link, struct bt_msg, link), struct placing, msg);
}

/* What was ordered since the last turn; told when a reading has shown it to the owner. */
static void turn(struct bt_orders *o)
{
    struct bt_list todo;

    bt_list_init(&todo);
    bt_mailbox_detach(&o->box, &todo);
    bt_list_for_each (it, &todo) {
        struct placing *p = placing_of(it);

        p->rc =
            bt_orders_kept(o) ? place(o, &p->order, &p->err) : place_here(o, &p->order, &p->err);
        o->poll_ns = 0;
    }
    if (bt_orders_kept(o)) {
        struct bt_err err = {0};

        if (!o->conn.ctx && bt_now_ns() >= o->pause.next_ns && connect_once(o, &err) < 0) {
            /* told there */
        }
        if (o->conn.ctx && bt_now_ns() >= o->poll_ns) {
            read_orders(o);
        }
    }
    bt_list_for_each_safe (it, &todo) {
        struct placing *p = placing_of(it);

        bt_list_remove(it);
        o->cfg.placed(o->cfg.arg, p->token, p->rc, &p->err);
        free(p);
    }
}

static void *orders_main(void *arg)
{
    struct bt_orders *o = arg;

    while (!__atomic_load_n(&o->quit, __ATOMIC_ACQUIRE)) { /* pairs with bt_orders_destroy */
        turn(o);
        sleep_until_due(o);
    }
    redis_close(&o->conn);
    return NULL;
}

/* --- public ---------------------------------------------------------------------------------- */

int bt_orders_create(const struct bt_orders_cfg *cfg,
                     struct bt_orders **ret_orders,
                     struct bt_err *err)
{
    int rc = bt_cluster_conf_check(cfg->conf, err);
    struct bt_orders *o;

    if (rc < 0) {
        return rc;
    }
    o = bt_calloc(1, sizeof(*o));
    if (!o) {
        return BT_FAIL(err, BT_E_NOMEM, "orders: out of memory");
    }
    o->cfg = *cfg;
    o->target = (struct redis_target){cfg->conf, cfg->conf->redis_timeout_ns};
    o->wake_fd = -1;
    redis_pause_reset(&o->pause);
    rc = bt_eventfd_create(&o->wake_fd, err);
    if (rc < 0) {
        goto fail;
    }
    bt_mailbox_init(&o->box, bt_eventfd_wake, &o->wake_fd);
    rc = bt_thread_start(&o->thread, "redis-orders", orders_main, o, err);
    if (rc < 0) {
        goto fail_box;
    }
    *ret_orders = o;
    return BT_OK;

fail_box:
    bt_mailbox_fini(&o->box);
    close(o->wake_fd);
fail:
    free(o);
    return rc;
}

int bt_orders_place(struct bt_orders *o, const char *key, const char *text, void *token)
{
    struct placing *p;

    if (!key_ok(bt_str_of(key)) || (text && !text_ok(bt_str_of(text)))) {
        return BT_E_INVALID;
    }
    p = bt_calloc(1, sizeof(*p));
    if (!p) {
        return BT_E_NOMEM;
    }
    p->token = token;
    snprintf(p->order.key, sizeof(p->order.key), "%s", key);
    snprintf(p->order.text, sizeof(p->order.text), "%s", text ? text : "");
    if (!bt_mailbox_push(&o->box, &p->msg)) {
        free(p);
        return BT_E_CANCELLED;
    }
    return BT_OK;
}

bool bt_orders_kept(const struct bt_orders *o)
{
    return o->cfg.conf->redis_address[0] != '\0';
}

void bt_orders_destroy(struct bt_orders *o)
{
    struct bt_list left;

    if (!o) {
        return;
    }
    __atomic_store_n(&o->quit, true, __ATOMIC_RELEASE); /* pairs with orders_main */
    bt_eventfd_wake(&o->wake_fd);
    pthread_join(o->thread, NULL);
    bt_mailbox_close(&o->box);
    bt_list_init(&left);
    bt_mailbox_detach(&o->box, &left);
    bt_list_for_each_safe (it, &left) {
        bt_list_remove(it);
        free(placing_of(it));
    }
    bt_mailbox_fini(&o->box);
    close(o->wake_fd);
    free(o->list);
    free(o);
}
