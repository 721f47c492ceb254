/* The thread "redis-put": connects for both threads, writes what this node holds, removes what is
 * outdated. Its exchanges wait, with a deadline (redis.timeout); names are resolved here, so that
 * look-ups never wait for a resolver.
 *
 * What goes out, one exchange at a time: the flight. It is filled from the queue, or, in a pass
 * over everything held, by asking the owner for the next part; it stays until it was taken, over a
 * lost connection too. Order: queued work from before a pass was wanted goes out before the pass
 * begins, all later work after the part that was listed before it, so the last word on a key wins.
 *
 * A pass runs at full speed when Redis was away, came back empty or the queue was full; the
 * refreshing one, once in a third of redis.block_ttl, is spread over half that time. */
#include "common/cluster/blockmap_int.h"

#include "common/obs/log.h"
#include "common/thr/mailbox.h"
#include "common/thr/time.h"

#include <inttypes.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>

#define SCRUB_BATCH 48
#define VALUE_TEXT  32 /* "<tier>:<bytes>" */

/* Answers {made, gone}; -1: the registry has not announced this incarnation (yet), -2: a newer one
 * has taken the name. Removals come first: a server whose memory is full still takes them.
 * KEYS fence record...; ARGV incarnation name ttl_s value-or-empty... */
static const char put_script[] =
    "local fence = redis.pcall('GET', KEYS[1])\n"
    "if fence ~= ARGV[1] then\n"
    "  return type(fence) == 'string' and #fence == 16 and fence > ARGV[1] and -2 or -1\n"
    "end\n"
    "local name, ttl, made, gone = ARGV[2], tonumber(ARGV[3]), 0, 0\n"
    "local function other(r)\n"
    "  return type(r) == 'table' and not string.find(r.err, 'WRONGTYPE', 1, true)\n"
    "end\n"
    "for i = 2, #KEYS do\n"
    "  if ARGV[i + 2] == '' then\n"
    "    local r = redis.pcall('HDEL', KEYS[i], name)\n"
    "    if other(r) then return r end\n"
    "    if r == 1 then gone = gone + 1 end\n"
    "  end\n"
    "end\n"
    "local till = string.format(':%x', redis.call('TIME')[1] + ttl)\n"
    "for i = 2, #KEYS do\n"
    "  if ARGV[i + 2] ~= '' then\n"
    "    local value = fence .. ':' .. ARGV[i + 2] .. till\n"
    "    local r = redis.pcall('HSET', KEYS[i], name, value)\n"
    "    if other(r) then return r end\n"
    "    if type(r) == 'table' then\n"
    "      redis.call('DEL', KEYS[i])\n"
    "      r = redis.call('HSET', KEYS[i], name, value)\n"
    "    end\n"
    "    made = made + r\n"
    "    if redis.call('TTL', KEYS[i]) < ttl then redis.call('EXPIRE', KEYS[i], ttl) end\n"
    "  end\n"
    "end\n"
    "return {made, gone}\n";

/* Answers how many went. What is only said to be overtaken stays if the name's fence says that it
 * is not: with a clock that is behind, the younger process has the smaller number. KEYS record
 * fence, in pairs; ARGV name expected overtaken-or-empty, in threes */
static const char scrub_script[] =
    "local n = 0\n"
    "for i = 1, #KEYS / 2 do\n"
    "  local key, name, expected = KEYS[2 * i - 1], ARGV[3 * i - 2], ARGV[3 * i - 1]\n"
    "  local v = redis.pcall('HGET', key, name)\n"
    "  if type(v) == 'string' and string.sub(v, 1, #expected) == expected and\n"
    "     (ARGV[3 * i] == '' or redis.pcall('GET', KEYS[2 * i]) ~= string.sub(v, 1, 16)) then\n"
    "    n = n + redis.call('HDEL', key, name)\n"
    "  end\n"
    "end\n"
    "return n\n";

/* --- connections ----------------------------------------------------------------------------- */

static void put_up(struct bt_blockmap *bm)
{
    if (bm->put_ok) {
        return;
    }
    bm->put_ok = true;
    bm->put_told = false;
    redis_pause_reset(&bm->put_redial);
    block_flag(bm, &bm->stats.put_up, true);
    BT_INFO("index_put_up", "address=\"%s\"", bm->cfg.conf->redis_address);
}

/* The flight stays if it came from the queue; what was listed is listed again. */
static void put_down(struct bt_blockmap *bm, int rc, const struct bt_err *err)
{
    char msg[256];

    redis_close(&bm->put_conn);
    redis_pause_grow(&bm->put_redial, bm->cfg.conf->lease_ns);
    bm->put_ok = bm->in_pass = false;
    if (bm->flight_listed) {
        bm->n_flight = 0;
    }
    pthread_mutex_lock(&bm->lock);
    block_want_pass(bm);
    bm->stats.put_up = false;
    bm->stats.n_failures++;
    pthread_mutex_unlock(&bm->lock);
    if (!bm->put_told) {
        bm->put_told = true;
        BT_WARN("index_put_down", "msg=\"%s; announcements wait, trying on\" rc=%s",
                bt_log_quotable(bt_err_msg(err, rc), msg, sizeof(msg)), bt_rc_name(rc));
    }
}

static void open_put(struct bt_blockmap *bm)
{
    struct bt_err err = {0};
    int rc = redis_open(&bm->put_conn, &bm->target, &err);

    if (rc < 0) {
        put_down(bm, rc, &err);
        return;
    }
    bm->epoch_due_ns = 0;
    pthread_mutex_lock(&bm->lock);
    bm->stats.n_connects++;
    block_want_pass(bm);
    pthread_mutex_unlock(&bm->lock);
}

static void open_get(struct bt_blockmap *bm)
{
    struct redis_conn conn = {0};
    struct bt_err err = {0};
    int rc = redis_open(&conn, &bm->target, &err);

    if (rc < 0) {
        redis_pause_grow(&bm->get_redial, bm->cfg.conf->lease_ns);
        block_tell_down(bm, rc, &err);
        block_count(bm, &bm->stats.n_failures, 1);
        return;
    }
    redis_pause_reset(&bm->get_redial);
    pthread_mutex_lock(&bm->lock);
    bm->new_conn = conn;
    bm->want_conn = false;
    bm->stats.n_connects++;
    pthread_mutex_unlock(&bm->lock);
    bt_eventfd_wake(&bm->get_fd);
}

/* Answers to n commands that were queued; false: the connection is down, or a reply says that the
 * server does not serve (then it is closed). */
static bool exchange(struct bt_blockmap *bm, int rc, redisReply **ret_replies, size_t n)
{
    struct bt_err err = {0};

    if (rc == BT_OK) {
        rc = redis_receive(&bm->put_conn, bm->target.timeout_ns, ret_replies, n, &err);
    } else {
        memset(ret_replies, 0, n * sizeof(*ret_replies));
    }
    for (size_t i = 0; rc == BT_OK && i < n; i++) {
        rc = redis_refusal(ret_replies[i], &err);
    }
    if (rc < 0) {
        redis_free_replies(ret_replies, n);
        put_down(bm, rc, &err);
        return false;
    }
    return true;
}

/* --- epoch ----------------------------------------------------------------------------------- */

/* Another epoch than before: Redis was emptied, everything is to be written again. */
static void check_epoch(struct bt_blockmap *bm)
{
    char key[REDIS_KEY_MAX], fresh[33];
    struct bt_str epoch = redis_key(bm->cfg.conf, "epoch", "", key);
    redisReply *replies[2];
    int rc;

    bm->epoch_due_ns = bt_now_ns() + redis_jitter(bm->cfg.conf->poll_ns);
    redis_random_text(fresh);
    rc = redis_send(&bm->put_conn, 4,
                    (struct bt_str[]){BT_STR("SET"), epoch, bt_str_of(fresh), BT_STR("NX")});
    if (rc == BT_OK) {
        rc = redis_send(&bm->put_conn, 4,
                        (struct bt_str[]){BT_STR("GETRANGE"), epoch, BT_STR("0"), BT_STR("63")});
    }
    if (!exchange(bm, rc, replies, 2)) {
        return;
    }
    if (replies[1]->type == REDIS_REPLY_STRING && replies[1]->len < sizeof(bm->epoch) &&
        !bt_str_eq((struct bt_str){replies[1]->str, replies[1]->len}, bt_str_of(bm->epoch))) {
        memcpy(bm->epoch, replies[1]->str, replies[1]->len);
        bm->epoch[replies[1]->len] = '\0';
        pthread_mutex_lock(&bm->lock);
        block_want_pass(bm);
        pthread_mutex_unlock(&bm->lock);
        bm->count_told = false;
    }
    redis_free_replies(replies, 2);
    put_up(bm);
}

/* --- writing --------------------------------------------------------------------------------- */

/* Text of one script call; borrowed by redis_send's argv only while it formats. */
struct batch {
    struct bt_str argv[REDIS_ARGS_MAX];
    char keys[BLOCK_BATCH + 1][REDIS_KEY_MAX];
    char values[BLOCK_BATCH][VALUE_TEXT];
    char n_keys[8], ttl[24];
    size_t n;
};

/* True if a later entry of the n speaks of the same key. */
static bool overtaken(const struct bt_block_have *of, size_t n)
{
    for (size_t i = 1; i < n; i++) {
        if (memcmp(&of[0].key, &of[i].key, sizeof(of->key)) == 0) {
            return true;
        }
    }
    return false;
}

/* EVAL script n fence keys... incarnation name ttl values... */
static int send_batch(struct bt_blockmap *bm, struct batch *b)
{
    char fence[REDIS_KEY_MAX];
    size_t at = 0;

    snprintf(b->n_keys, sizeof(b->n_keys), "%zu", b->n + 1);
    snprintf(b->ttl, sizeof(b->ttl), "%llu",
             (unsigned long long)(bm->cfg.conf->block_ttl_ns / BT_NS_PER_S));
    b->argv[at++] = BT_STR("EVAL");
    b->argv[at++] = BT_STR(put_script);
    b->argv[at++] = bt_str_of(b->n_keys);
    b->argv[at++] = redis_key(bm->cfg.conf, "fence:", bm->name, fence);
    for (size_t i = 0; i < b->n; i++) {
        b->argv[at++] = bt_str_of(b->keys[i]);
    }
    b->argv[at++] = bt_str_of(bm->incarnation);
    b->argv[at++] = bt_str_of(bm->name);
    b->argv[at++] = bt_str_of(b->ttl);
    for (size_t i = 0; i < b->n; i++) {
        b->argv[at++] = bt_str_of(b->values[i]);
    }
    return redis_send(&bm->put_conn, (int)at, b->argv);
}

static int send_part(struct bt_blockmap *bm, const struct bt_block_have *have, size_t n)
{
    struct batch b;

    b.n = 0;
    for (size_t i = 0; i < n; i++) {
        if (overtaken(&have[i], n - i)) {
            continue;
        }
        block_key(bm->cfg.conf, &have[i].key, b.keys[b.n]);
        b.values[b.n][0] = '\0';
        if (have[i].tier != BLOCK_WITHDRAW) {
            snprintf(b.values[b.n], VALUE_TEXT, "%x:%x", have[i].tier, have[i].bytes);
        }
        b.n++;
    }
    return send_batch(bm, &b);
}

/* What the script said; false: not written. */
static bool
take_answer(struct bt_blockmap *bm, const redisReply *reply, uint64_t *made, uint64_t *gone)
{
    struct bt_err err = {0};

    if (reply->type == REDIS_REPLY_ARRAY && reply->elements == 2 &&
        reply->element[0]->type == REDIS_REPLY_INTEGER &&
        reply->element[1]->type == REDIS_REPLY_INTEGER) {
        *made += (uint64_t)reply->element[0]->integer;
        *gone += (uint64_t)reply->element[1]->integer;
        return true;
    }
    if (reply->type == REDIS_REPLY_INTEGER) {
        bool overtaken_by_newer = reply->integer == -2;

        redis_pause_grow(&bm->refused, bm->cfg.conf->lease_ns);
        block_flag(bm, &bm->stats.refused, overtaken_by_newer);
        if (overtaken_by_newer && !bm->refused_told) {
            bm->refused_told = true;
            BT_WARN("index_refused",
                    "msg=\"another incarnation has taken this node's name\" name=%s", bm->name);
        }
        return false;
    }
    BT_FAIL(&err, BT_E_UNAVAILABLE, "redis: %.*s", (int)redis_text(reply).n, redis_text(reply).p);
    put_down(bm, BT_E_UNAVAILABLE, &err);
    return false;
}

static void end_pass(struct bt_blockmap *bm)
{
    uint64_t third = bm->cfg.conf->block_ttl_ns / 3;

    bm->in_pass = false;
    bm->pass_gap_ns = third / 2 / (bm->pass_count / BLOCK_FLIGHT + 1);
    bm->refresh_due_ns = bm->pass_begun_ns + redis_jitter(third);
    pthread_mutex_lock(&bm->lock);
    bm->stats.n_held = bm->pass_count;
    if (bm->pass_is_sync && !bm->pass_wanted) {
        bm->stats.synced = true;
    }
    pthread_mutex_unlock(&bm->lock);
}

static void wrote(struct bt_blockmap *bm, uint64_t made, uint64_t gone)
{
    size_t n_gone = 0;

    for (size_t i = 0; i < bm->n_flight; i++) {
        n_gone += bm->flight[i].tier == BLOCK_WITHDRAW;
    }
    pthread_mutex_lock(&bm->lock);
    bm->stats.n_announced += bm->n_flight - n_gone;
    bm->stats.n_withdrawn += gone;
    if (!bm->flight_listed) {
        bm->stats.n_held += made;
        bm->stats.n_held -= BT_MIN(gone, bm->stats.n_held);
    }
    bm->stats.refused = false;
    pthread_mutex_unlock(&bm->lock);
    bm->refused_told = false;
    redis_pause_reset(&bm->refused);
    bm->refused.next_ns = 0;
    bm->n_flight = 0;
    if (bm->flight_listed && bm->pass_cursor == 0 && bm->in_pass) {
        end_pass(bm);
    }
}

static void write_flight(struct bt_blockmap *bm)
{
    redisReply *replies[BLOCK_FLIGHT / BLOCK_BATCH];
    size_t n = BT_DIV_UP(bm->n_flight, (size_t)BLOCK_BATCH);
    uint64_t made = 0, gone = 0;
    bool taken = true;
    int rc = BT_OK;

    for (size_t i = 0; rc == BT_OK && i < n; i++) {
        size_t at = i * BLOCK_BATCH;

        rc = send_part(bm, &bm->flight[at], BT_MIN(bm->n_flight - at, (size_t)BLOCK_BATCH));
    }
    if (!exchange(bm, rc, replies, n)) {
        return;
    }
    for (size_t i = 0; taken && i < n; i++) {
        taken = take_answer(bm, replies[i], &made, &gone);
    }
    redis_free_replies(replies, n);
    if (taken) {
        wrote(bm, made, gone);
    }
}

/* --- what to write next ---------------------------------------------------------------------- */

static void begin_pass(struct bt_blockmap *bm, bool sync)
{
    bm->in_pass = true;
    bm->pass_is_sync = sync;
    bm->pass_cursor = bm->pass_count = 0;
    bm->pass_begun_ns = bm->pass_due_ns = bt_now_ns();
}

static void list_part(struct bt_blockmap *bm)
{
    uint64_t cursor = bm->pass_cursor;
    size_t n = 0, got;

    do {
        got = bm->cfg.held(bm->cfg.arg, &cursor, &bm->flight[n], BLOCK_FLIGHT - n);
        BT_BUG_ON(got > BLOCK_FLIGHT - n);
        n += got;
    } while (cursor != 0 && got > 0 && n < BLOCK_FLIGHT);
    bm->pass_cursor = cursor;
    bm->pass_count += n;
    bm->n_flight = n;
    bm->flight_listed = true;
    bm->pass_due_ns = bt_now_ns() + (bm->pass_is_sync ? 0 : bm->pass_gap_ns);
    if (n == 0 && cursor == 0) {
        end_pass(bm);
    }
}

/* Queue and pass take turns when both have something. */
static void fill_flight(struct bt_blockmap *bm)
{
    bool pass_turn = bm->in_pass && bt_now_ns() >= bm->pass_due_ns;

    pthread_mutex_lock(&bm->lock);
    if (bm->pass_wanted && bm->q_head >= bm->pass_after) {
        bm->pass_wanted = false;
        bm->stats.n_resyncs++;
        begin_pass(bm, true);
        pass_turn = true;
    }
    if (bm->q_head != bm->q_tail && !(pass_turn && !bm->flight_listed)) {
        while (bm->q_head != bm->q_tail && bm->n_flight < BLOCK_FLIGHT) {
            bm->flight[bm->n_flight++] = bm->queue[bm->q_head++ % BLOCK_QUEUE_MAX];
        }
        bm->flight_listed = pass_turn = false;
    }
    pthread_mutex_unlock(&bm->lock);
    if (pass_turn) {
        list_part(bm);
    }
}

static void tell_count(struct bt_blockmap *bm)
{
    struct bt_blockmap_stats s = bt_blockmap_stats(bm);
    struct batch b;
    uint64_t made = 0, gone = 0;
    redisReply *reply;

    if (!s.synced || bm->n_flight > 0 ||
        (bm->count_told && bm->told_count == s.n_held && bt_now_ns() < bm->count_due_ns)) {
        return;
    }
    b.n = 1;
    redis_key(bm->cfg.conf, "blocks", "", b.keys[0]);
    snprintf(b.values[0], VALUE_TEXT, "0:%" PRIx64, s.n_held);
    if (!exchange(bm, send_batch(bm, &b), &reply, 1)) {
        return;
    }
    if (take_answer(bm, reply, &made, &gone)) {
        bm->count_told = true;
        bm->told_count = s.n_held;
        bm->count_due_ns = bt_now_ns() + bm->cfg.conf->block_ttl_ns / 3;
    }
    freeReplyObject(reply);
}

static void send_scrubs(struct bt_blockmap *bm)
{
    struct block_scrub s[SCRUB_BATCH];
    char keys[SCRUB_BATCH][REDIS_KEY_MAX], fences[SCRUB_BATCH][REDIS_KEY_MAX], n_keys[8];
    struct bt_str argv[3 + 5 * SCRUB_BATCH] = {BT_STR("EVAL"), BT_STR(scrub_script)};
    size_t n = 0;
    redisReply *reply;

    pthread_mutex_lock(&bm->lock);
    while (bm->s_head != bm->s_tail && n < SCRUB_BATCH) {
        s[n++] = bm->scrubs[bm->s_head++ % BLOCK_SCRUB_MAX];
    }
    pthread_mutex_unlock(&bm->lock);
    if (n == 0) {
        return;
    }
    snprintf(n_keys, sizeof(n_keys), "%zu", 2 * n);
    argv[2] = bt_str_of(n_keys);
    for (size_t i = 0; i < n; i++) {
        struct bt_str *rest = &argv[3 + 2 * n + 3 * i];

        argv[3 + 2 * i] = block_key(bm->cfg.conf, &s[i].key, keys[i]);
        argv[4 + 2 * i] = redis_key(bm->cfg.conf, "fence:", s[i].name, fences[i]);
        rest[0] = bt_str_of(s[i].name);
        rest[1] = bt_str_of(s[i].expect);
        rest[2] = s[i].overtaken ? BT_STR("1") : BT_STR("");
    }
    if (!exchange(bm, redis_send(&bm->put_conn, (int)(3 + 5 * n), argv), &reply, 1)) {
        return;
    }
    if (reply->type == REDIS_REPLY_INTEGER && reply->integer > 0) {
        block_count(bm, &bm->stats.n_scrubbed, (uint64_t)reply->integer);
    }
    freeReplyObject(reply);
}

/* --- the thread ------------------------------------------------------------------------------ */

static void work(struct bt_blockmap *bm)
{
    if (bm->cfg.name && bt_now_ns() >= bm->epoch_due_ns) {
        check_epoch(bm);
        if (bm->put_conn.ctx && bt_now_ns() >= bm->refused.next_ns) {
            tell_count(bm);
        }
    }
    if (bm->put_conn.ctx) {
        send_scrubs(bm);
    }
    if (!bm->put_conn.ctx || !bm->cfg.name || bt_now_ns() < bm->refused.next_ns) {
        return;
    }
    if (bm->cfg.held && !bm->in_pass && bt_now_ns() >= bm->refresh_due_ns) {
        begin_pass(bm, false);
    }
    if (bm->n_flight == 0) {
        fill_flight(bm);
    }
    if (bm->n_flight > 0) {
        write_flight(bm);
    }
}

/* When work() has something to do next. */
static uint64_t work_due(struct bt_blockmap *bm, bool queued, bool scrubs)
{
    uint64_t next = BT_NEVER_NS;

    if (scrubs) {
        return 0;
    }
    if (!bm->cfg.name) {
        return BT_NEVER_NS;
    }
    if (bm->n_flight > 0 || queued) {
        next = 0;
    } else if (bm->in_pass) {
        next = bm->pass_due_ns;
    } else if (bm->cfg.held) {
        next = bm->refresh_due_ns;
    }
    next = BT_MAX(next, bm->refused.next_ns);
    return BT_MIN(next, bm->epoch_due_ns);
}

static void wait_for_work(struct bt_blockmap *bm)
{
    struct pollfd p = {bm->put_fd, POLLIN, 0};
    uint64_t due = BT_NEVER_NS, now = bt_now_ns();
    bool scrubs, queued, want_conn;
    int ms = -1;

    pthread_mutex_lock(&bm->lock);
    scrubs = bm->s_head != bm->s_tail;
    queued = bm->q_head != bm->q_tail || bm->pass_wanted;
    want_conn = bm->want_conn;
    pthread_mutex_unlock(&bm->lock);
    if (want_conn) {
        due = bm->get_redial.next_ns;
    }
    if (bm->put_conn.ctx) {
        due = BT_MIN(due, work_due(bm, queued, scrubs));
    } else if (bm->cfg.name || scrubs) {
        due = BT_MIN(due, bm->put_redial.next_ns);
    }
    if (due <= now) {
        return;
    }
    if (due != BT_NEVER_NS) {
        ms = (int)BT_MIN((due - now) / BT_NS_PER_MS + 1, 60000ull);
    }
    poll(&p, 1, ms);
    bt_eventfd_clear(bm->put_fd);
}

void *block_put_main(void *arg)
{
    struct bt_blockmap *bm = arg;
    bool has_redis = bm->cfg.conf->redis_address[0] != '\0';

    for (;;) {
        bool quit, want_conn, scrubs;

        pthread_mutex_lock(&bm->lock);
        quit = bm->quit;
        want_conn = bm->want_conn;
        scrubs = bm->s_head != bm->s_tail;
        if (!has_redis) { /* nowhere to write to: forget it */
            bm->q_head = bm->q_tail;
            bm->s_head = bm->s_tail;
        }
        pthread_mutex_unlock(&bm->lock);
        if (quit) {
            break;
        }
        if (!has_redis) {
            poll(&(struct pollfd){bm->put_fd, POLLIN, 0}, 1, -1);
            bt_eventfd_clear(bm->put_fd);
            continue;
        }
        if (want_conn && bt_now_ns() >= bm->get_redial.next_ns) {
            open_get(bm);
        }
        if (!bm->put_conn.ctx && (bm->cfg.name || scrubs) &&
            bt_now_ns() >= bm->put_redial.next_ns) {
            open_put(bm);
        }
        if (bm->put_conn.ctx) {
            work(bm);
        }
        wait_for_work(bm);
    }
    redis_close(&bm->put_conn);
    return NULL;
}
