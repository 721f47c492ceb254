/* The thread "redis-get": look-ups in one round trip each, and the breaker before them.
 *
 * A look-up is TIME and one HGETALL a key, sent at once; answers come in order, so the look-ups
 * sent form a queue (`wire`). One whose time is over gets its callback and stays there, mute, until
 * its answers are in or the connection is closed.
 *
 * Breaker:
 *   AWAY -> OPEN        "redis-put" has brought a connection
 *   OPEN -> PROBING     the pause is over and nothing is on the wire
 *   PROBING -> CLOSED   the probe was answered in time; -> OPEN if late, with a longer pause
 *   CLOSED -> OPEN      an answer is late
 *   any -> AWAY         connection lost, an answer is later than redis.timeout, or the server says
 *                       that it cannot serve; a new one is asked for when the pause is over
 * Pauses grow until a look-up is answered in time. Sockets are read before clocks are looked at: a
 * process that was stopped itself does not take that for Redis's fault. */
#include "common/cluster/blockmap_int.h"

#include "common/conf/value.h"
#include "common/obs/log.h"
#include "common/thr/mailbox.h"
#include "common/thr/time.h"

#include <inttypes.h>
#include <poll.h>
#include <stdlib.h>

#define READ_BYTES 16384 /* what hiredis reads at once; as much as that: there may be more */
#define READS_MAX  64
#define LOOKUP(it) BT_LIST_ENTRY(it, struct block_lookup, link)

/* --- one look-up ----------------------------------------------------------------------------- */

static void lookup_free(struct block_lookup *l)
{
    bt_members_unref(l->members);
    free(l->holders);
    free(l);
}

/* Runs the callback; anything but BT_OK tells no holders. */
static void finish(struct bt_blockmap *bm, struct block_lookup *l, int rc)
{
    struct bt_found found = {.rc = rc,
                             .members = l->members,
                             .keys = l->keys,
                             .n_keys = l->n_keys,
                             .first = l->first,
                             .holders = l->holders};
    size_t n_found = 0;

    l->finished = true;
    if (l->probe) {
        return;
    }
    if (rc != BT_OK) {
        memset(l->first, 0, (l->n_keys + 1) * sizeof(*l->first));
        found.holders = NULL;
    }
    for (size_t i = 0; i < l->n_keys; i++) {
        n_found += l->first[i + 1] > l->first[i];
    }
    pthread_mutex_lock(&bm->lock);
    bt_list_remove(&l->live);
    bm->n_live--;
    bm->stats.n_lookups++;
    if (!l->counts) {
        bm->stats.n_lookup_keys += l->n_keys;
        bm->stats.n_found += n_found;
    }
    bm->stats.n_unanswered += rc != BT_OK && rc != BT_E_CANCELLED;
    pthread_mutex_unlock(&bm->lock);
    l->cb.fn(l->cb.arg, &found);
}

static void finish_and_free(struct bt_blockmap *bm, struct block_lookup *l, int rc)
{
    finish(bm, l, rc);
    lookup_free(l);
}

/* --- breaker --------------------------------------------------------------------------------- */

static void breaker_set(struct bt_blockmap *bm, enum block_breaker to)
{
    if (bm->breaker == BLOCK_CLOSED && to != BLOCK_CLOSED) {
        block_count(bm, &bm->stats.n_opened, 1);
        block_flag(bm, &bm->stats.up, false);
    } else if (bm->breaker != BLOCK_CLOSED && to == BLOCK_CLOSED) {
        block_flag(bm, &bm->stats.up, true);
        block_told_up(bm);
    }
    bm->breaker = to;
}

/* Late: connected still, but nothing more is asked until a probe is answered in time. */
static void trip(struct bt_blockmap *bm)
{
    struct bt_err err = {0};

    BT_FAIL(&err, BT_E_DEADLINE, "redis: no answer within redis.lookup_timeout");
    block_tell_down(bm, BT_E_DEADLINE, &err);
    block_count(bm, &bm->stats.n_failures, 1);
    redis_pause_grow(&bm->get_pause, bm->cfg.conf->lease_ns);
    breaker_set(bm, BLOCK_OPEN);
}

static void disconnect(struct bt_blockmap *bm, int rc, const struct bt_err *err)
{
    struct bt_list *it;

    block_tell_down(bm, rc, err);
    block_count(bm, &bm->stats.n_failures, 1);
    redis_close(&bm->get_conn);
    redis_pause_grow(&bm->get_pause, bm->cfg.conf->lease_ns);
    breaker_set(bm, BLOCK_AWAY);
    while ((it = bt_list_pop_front(&bm->wire))) {
        struct block_lookup *l = LOOKUP(it);

        if (!l->finished) {
            finish(bm, l, BT_E_UNAVAILABLE);
        }
        lookup_free(l);
    }
}

/* --- sending --------------------------------------------------------------------------------- */

/* False: the connection is gone, and with it everything on the wire, this one included. */
static bool send_lookup(struct bt_blockmap *bm, struct block_lookup *l)
{
    struct bt_str argv[2] = {BT_STR("TIME")};
    struct bt_err err = {0};
    char key[REDIS_KEY_MAX];
    bool done;
    int rc = redis_send(&bm->get_conn, 1, argv);

    bt_list_push_back(&bm->wire, &l->link);
    l->sent_ns = bt_now_ns();
    argv[0] = BT_STR("HGETALL");
    for (size_t i = 0; rc == BT_OK && i < l->n_keys; i++) {
        argv[1] = l->counts ? redis_key(bm->cfg.conf, "blocks", "", key)
                            : block_key(bm->cfg.conf, &l->keys[i], key);
        rc = redis_send(&bm->get_conn, 2, argv);
    }
    if (rc == BT_OK) {
        rc = redis_write_some(&bm->get_conn, &done, &err);
        bm->get_unsent = !done;
    }
    if (rc < 0) {
        disconnect(bm, rc, &err);
        return false;
    }
    return true;
}

static void start_lookup(struct bt_blockmap *bm, struct block_lookup *l, size_t n_live)
{
    if (bm->breaker != BLOCK_CLOSED) {
        finish_and_free(bm, l, BT_E_UNAVAILABLE);
    } else if (n_live > BT_LOOKUP_FLIGHT_MAX) {
        finish_and_free(bm, l, BT_E_EXHAUSTED);
    } else {
        send_lookup(bm, l);
    }
}

/* Asks what look-ups ask, so that a right that is missing shows here. */
static void send_probe(struct bt_blockmap *bm)
{
    struct block_lookup *l = bt_calloc(1, sizeof(*l) + sizeof(struct bt_block_key));

    redis_pause_grow(&bm->get_pause, bm->cfg.conf->lease_ns);
    if (!l) {
        return;
    }
    bt_list_init(&l->live);
    l->probe = l->counts = l->finished = true;
    l->n_keys = 1;
    if (send_lookup(bm, l)) {
        breaker_set(bm, BLOCK_PROBING);
    }
}

/* --- answers --------------------------------------------------------------------------------- */

/* Keeps the fastest BT_HOLDERS_MAX of a key, in order of their tiers. */
static int add_holder(struct block_lookup *l, const struct bt_holder *h)
{
    size_t base = l->first[l->n_got - 1], at = l->n_holders;

    if (l->n_holders == l->cap_holders) {
        size_t cap =
            l->cap_holders ? l->cap_holders * 2 : BT_MAX(l->n_keys, (size_t)BT_HOLDERS_MAX);
        struct bt_holder *more = realloc(l->holders, cap * sizeof(*more));

        if (!more) {
            return BT_E_NOMEM;
        }
        l->holders = more;
        l->cap_holders = cap;
    }
    while (at > base && l->holders[at - 1].tier > h->tier) {
        at--;
    }
    if (at - base >= BT_HOLDERS_MAX) {
        return BT_OK;
    }
    memmove(&l->holders[at + 1], &l->holders[at], (l->n_holders - at) * sizeof(*h));
    l->holders[at] = *h;
    l->n_holders += l->n_holders - base < BT_HOLDERS_MAX;
    return BT_OK;
}

static void scrub(struct bt_blockmap *bm,
                  const struct block_lookup *l,
                  const redisReply *name,
                  const redisReply *value,
                  bool overtaken)
{
    struct block_scrub s = {.overtaken = overtaken};

    if (l->counts || name->len > BT_MEMBER_NAME_MAX) {
        return;
    }
    s.key = l->keys[l->n_got - 1];
    memcpy(s.name, name->str, name->len);
    memcpy(s.expect, value->str, value->len); /* shorter than BLOCK_VALUE_MAX: it was read */
    block_scrub(bm, &s);
}

/* One field of a record. */
static int take_field(struct bt_blockmap *bm,
                      struct block_lookup *l,
                      const redisReply *name,
                      const redisReply *value)
{
    const struct bt_member *m = NULL;
    struct block_value v;

    if (name->type != REDIS_REPLY_STRING || value->type != REDIS_REPLY_STRING ||
        !block_value_read((struct bt_str){value->str, value->len}, &v) || v.amount > UINT32_MAX) {
        block_count(bm, &bm->stats.n_bad, 1);
        return BT_OK;
    }
    if (l->members) {
        m = bt_members_find(l->members, (struct bt_str){name->str, name->len});
    }
    if (v.until_s <= l->now_s || (m && m->incarnation > v.incarnation)) {
        scrub(bm, l, name, value, v.until_s > l->now_s);
        return BT_OK;
    }
    if (!m || m->incarnation != v.incarnation || v.tier > BT_TIER_DISK) {
        return BT_OK;
    }
    return add_holder(l, &(struct bt_holder){m, (enum bt_tier)v.tier, (uint32_t)v.amount});
}

static void take_time(struct bt_blockmap *bm, struct block_lookup *l, const redisReply *reply)
{
    const redisReply *s = NULL;

    if (reply->type == REDIS_REPLY_ARRAY && reply->elements == 2) {
        s = reply->element[0];
    }
    if (!s || s->type != REDIS_REPLY_STRING ||
        bt_read_u64((struct bt_str){s->str, s->len}, &l->now_s) < 0) {
        block_count(bm, &bm->stats.n_bad, 1);
    }
    pthread_mutex_lock(&bm->lock);
    l->members = bm->members ? bt_members_ref(bm->members) : NULL;
    pthread_mutex_unlock(&bm->lock);
}

/* The next answer of a look-up that still waits. */
static int take_reply(struct bt_blockmap *bm, struct block_lookup *l, const redisReply *reply)
{
    int rc = BT_OK;

    if (l->n_got == 0) {
        take_time(bm, l, reply);
        return BT_OK;
    }
    l->first[l->n_got - 1] = (uint32_t)l->n_holders;
    if (reply->type != REDIS_REPLY_ARRAY || reply->elements % 2) {
        block_count(bm, &bm->stats.n_bad, 1);
    } else {
        for (size_t i = 0; rc == BT_OK && i < reply->elements; i += 2) {
            rc = take_field(bm, l, reply->element[i], reply->element[i + 1]);
        }
    }
    l->first[l->n_got] = (uint32_t)l->n_holders;
    return rc;
}

/* All answers of the first on the wire are in. */
static void complete(struct bt_blockmap *bm, struct block_lookup *l)
{
    bool late = bt_now_ns() - l->sent_ns > bm->cfg.conf->lookup_timeout_ns;

    bt_list_remove(&l->link);
    if (l->probe) {
        breaker_set(bm, late ? BLOCK_OPEN : BLOCK_CLOSED);
        block_count(bm, &bm->stats.n_failures, late);
    } else if (!l->finished) {
        redis_pause_reset(&bm->get_pause);
        finish(bm, l, BT_OK);
    }
    lookup_free(l);
}

static int take_replies(struct bt_blockmap *bm, struct bt_err *err)
{
    int rc = BT_OK;

    while (rc == BT_OK) {
        struct block_lookup *l;
        redisReply *reply = NULL;

        rc = redis_next_reply(&bm->get_conn, &reply, err);
        if (rc < 0 || !reply) {
            break;
        }
        if (bt_list_empty(&bm->wire)) {
            freeReplyObject(reply);
            return BT_FAIL(err, BT_E_UNAVAILABLE, "redis: an answer that nobody asked for");
        }
        l = LOOKUP(bm->wire.next);
        rc = redis_refusal(reply, err);
        if (rc == BT_OK && !l->finished) {
            int taken = take_reply(bm, l, reply);

            if (taken < 0) {
                finish(bm, l, taken);
            }
        }
        freeReplyObject(reply);
        if (rc == BT_OK && ++l->n_got == l->n_keys + 1) {
            complete(bm, l);
        }
    }
    return rc;
}

/* Reads and writes what the socket allows. */
static void move_bytes(struct bt_blockmap *bm, short events)
{
    struct bt_err err = {0};
    size_t got = READ_BYTES;
    bool done;
    int rc = BT_OK;

    if (bm->get_unsent && (events & (POLLOUT | POLLERR | POLLHUP))) {
        rc = redis_write_some(&bm->get_conn, &done, &err);
        bm->get_unsent = rc == BT_OK && !done;
    }
    if (!(events & (POLLIN | POLLERR | POLLHUP))) {
        got = 0;
    }
    for (int i = 0; rc == BT_OK && got >= READ_BYTES && i < READS_MAX; i++) {
        got = bm->get_conn.used_bytes;
        rc = redis_read_some(&bm->get_conn, &err);
        got = bm->get_conn.used_bytes - got;
        if (rc == BT_OK) {
            rc = take_replies(bm, &err);
        }
    }
    if (rc < 0) {
        disconnect(bm, rc, &err);
    }
}

/* --- clocks ---------------------------------------------------------------------------------- */

static uint64_t due_of(const struct block_lookup *l)
{
    return l->timeout_ns >= BT_NEVER_NS - l->start_ns ? BT_NEVER_NS : l->start_ns + l->timeout_ns;
}

/* When the first on the wire is late enough to open the breaker, and to close the connection. */
static uint64_t late_at(const struct bt_blockmap *bm, const struct block_lookup *l)
{
    return l->sent_ns + BT_MAX(l->timeout_ns, bm->cfg.conf->lookup_timeout_ns);
}

/* Whether the first on the wire is late. One that waited for this thread for a moment before it was
 * sent is over a little earlier than it is late; it counts if Redis had most of the time, so that
 * nobody waits a second time. */
static bool is_late(const struct bt_blockmap *bm, const struct block_lookup *l, uint64_t now)
{
    uint64_t most = bm->cfg.conf->lookup_timeout_ns / 4 * 3;

    return now >= late_at(bm, l) || (!l->finished && now >= due_of(l) && now >= l->sent_ns + most);
}

static void look_at_clock(struct bt_blockmap *bm)
{
    uint64_t now = bt_now_ns();
    struct block_lookup *l;
    struct bt_err err = {0};

    if (bt_list_empty(&bm->wire)) {
        return;
    }
    l = LOOKUP(bm->wire.next);
    if (now >= l->sent_ns + bm->cfg.conf->redis_timeout_ns) {
        BT_FAIL(&err, BT_E_UNAVAILABLE, "redis: no answer within redis.timeout");
        disconnect(bm, BT_E_UNAVAILABLE, &err);
        return;
    }
    if (bm->breaker == BLOCK_CLOSED && is_late(bm, l, now)) {
        trip(bm); /* before the callbacks: whoever asks again is not to wait again */
    }
    bt_list_for_each_safe (it, &bm->wire) {
        l = LOOKUP(it);
        if (!l->finished && now >= due_of(l)) {
            finish(bm, l, BT_E_DEADLINE);
        }
    }
}

/* Earliest time at which look_at_clock or take_turn has something to do. */
static uint64_t next_due(const struct bt_blockmap *bm)
{
    uint64_t due = BT_NEVER_NS;

    bt_list_for_each (it, &bm->wire) {
        const struct block_lookup *l = LOOKUP(it);

        due = l->finished ? due : BT_MIN(due, due_of(l));
    }
    if (!bt_list_empty(&bm->wire)) {
        const struct block_lookup *l = LOOKUP(bm->wire.next);

        due = BT_MIN(due, l->sent_ns + bm->cfg.conf->redis_timeout_ns);
        due = bm->breaker == BLOCK_CLOSED ? BT_MIN(due, late_at(bm, l)) : due;
    }
    if ((bm->breaker == BLOCK_AWAY && !bm->get_asked) ||
        (bm->breaker == BLOCK_OPEN && bt_list_empty(&bm->wire))) {
        due = BT_MIN(due, bm->get_pause.next_ns);
    }
    return due;
}

/* --- the thread ------------------------------------------------------------------------------ */

/* Takes what other threads have left: new look-ups, cancelled ones, a connection. */
static bool take_turn(struct bt_blockmap *bm)
{
    struct bt_list fresh;
    struct bt_list *it;
    struct redis_conn conn;
    size_t n_live;
    bool quit;

    bt_list_init(&fresh);
    pthread_mutex_lock(&bm->lock);
    quit = bm->quit;
    n_live = bm->n_live;
    conn = bm->new_conn;
    bm->new_conn = (struct redis_conn){0};
    bt_list_splice_back(&fresh, &bm->fresh);
    pthread_mutex_unlock(&bm->lock);
    if (conn.ctx) {
        bm->get_conn = conn;
        bm->get_asked = bm->get_unsent = false;
        breaker_set(bm, BLOCK_OPEN);
    }
    while ((it = bt_list_pop_front(&fresh))) {
        if (quit) {
            finish_and_free(bm, LOOKUP(it), BT_E_CANCELLED);
        } else {
            start_lookup(bm, LOOKUP(it), n_live);
        }
    }
    return !quit;
}

static bool is_cancelled(struct bt_blockmap *bm, const struct block_lookup *l)
{
    bool yes;

    pthread_mutex_lock(&bm->lock);
    yes = l->cancelled;
    pthread_mutex_unlock(&bm->lock);
    return yes;
}

static void end_cancelled(struct bt_blockmap *bm)
{
    bool any;

    pthread_mutex_lock(&bm->lock);
    any = bm->any_cancelled;
    bm->any_cancelled = false;
    pthread_mutex_unlock(&bm->lock);
    if (!any) {
        return;
    }
    bt_list_for_each_safe (it, &bm->wire) {
        struct block_lookup *l = LOOKUP(it);

        if (!l->finished && is_cancelled(bm, l)) {
            finish(bm, l, BT_E_CANCELLED);
        }
    }
}

static void ask_for_connection(struct bt_blockmap *bm)
{
    bm->get_asked = true;
    block_flag(bm, &bm->want_conn, true);
    bt_eventfd_wake(&bm->put_fd);
}

static void wait_for_work(struct bt_blockmap *bm)
{
    struct pollfd p[2] = {{bm->get_fd, POLLIN, 0}, {-1, POLLIN, 0}};
    uint64_t due = next_due(bm), now = bt_now_ns(), ns = due > now ? due - now : 0;
    struct timespec ts = {(time_t)(ns / BT_NS_PER_S), (long)(ns % BT_NS_PER_S)};

    if (bm->get_conn.ctx) {
        p[1].fd = bm->get_conn.ctx->fd;
        p[1].events = (short)(POLLIN | (bm->get_unsent ? POLLOUT : 0));
    }
    ppoll(p, 2, due == BT_NEVER_NS ? NULL : &ts, NULL);
    if (p[0].revents) {
        bt_eventfd_clear(bm->get_fd);
    }
    if (bm->get_conn.ctx && p[1].revents) {
        move_bytes(bm, p[1].revents);
    }
}

void *block_get_main(void *arg)
{
    struct bt_blockmap *bm = arg;
    bool has_redis = bm->cfg.conf->redis_address[0] != '\0';
    struct bt_list *it;

    bm->get_asked = !has_redis; /* nobody to ask */
    while (take_turn(bm)) {
        end_cancelled(bm);
        look_at_clock(bm);
        if (bm->breaker == BLOCK_AWAY && !bm->get_asked && bt_now_ns() >= bm->get_pause.next_ns) {
            ask_for_connection(bm);
        } else if (bm->breaker == BLOCK_OPEN && bt_list_empty(&bm->wire) &&
                   bt_now_ns() >= bm->get_pause.next_ns) {
            send_probe(bm);
        }
        wait_for_work(bm);
    }
    while ((it = bt_list_pop_front(&bm->wire))) {
        struct block_lookup *l = LOOKUP(it);

        if (!l->finished) {
            finish(bm, l, BT_E_CANCELLED);
        }
        lookup_free(l);
    }
    redis_close(&bm->get_conn);
    block_flag(bm, &bm->stats.up, false);
    return NULL;
}
