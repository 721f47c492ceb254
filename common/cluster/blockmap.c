/* The block index as its callers see it: queues and look-ups are handed to the two threads here.
 *
 * Invariant: nothing here waits for Redis; the lock is held for copying only. */
#include "common/cluster/blockmap_int.h"

#include "common/conf/value.h"
#include "common/obs/log.h"
#include "common/thr/mailbox.h"
#include "common/thr/thread.h"
#include "common/thr/time.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

/* --- records --------------------------------------------------------------------------------- */

/* The hexadecimal number up to ':' or the end; moves *s behind it. */
static bool take_hex(struct bt_str *s, uint64_t *ret_v)
{
    uint64_t v = 0;
    size_t n = 0;

    while (n < s->n && s->p[n] != ':') {
        char c = s->p[n++];
        uint64_t digit;

        if (c >= '0' && c <= '9') {
            digit = (uint64_t)(c - '0');
        } else if (c >= 'a' && c <= 'f') {
            digit = (uint64_t)(c - 'a' + 10);
        } else {
            return false;
        }
        if (n > 16) {
            return false;
        }
        v = v << 4 | digit;
    }
    if (n == 0) {
        return false;
    }
    *ret_v = v;
    n += n < s->n;
    s->p += n;
    s->n -= n;
    return true;
}

bool block_value_read(struct bt_str text, struct block_value *ret_v)
{
    struct block_value v;

    if (text.n < 16 || text.n >= BLOCK_VALUE_MAX || (text.n > 16 && text.p[16] != ':') ||
        !take_hex(&text, &v.incarnation) || !take_hex(&text, &v.tier) ||
        !take_hex(&text, &v.amount) || !take_hex(&text, &v.until_s)) {
        return false;
    }
    *ret_v = v;
    return v.incarnation != 0;
}

struct bt_str
block_key(const struct bt_cluster_conf *conf, const struct bt_block_key *key, char *buf)
{
    static const char digits[] = "0123456789abcdef";
    char hex[33];

    for (int i = 0; i < 16; i++) {
        hex[2 * i] = digits[key->b[i] >> 4];
        hex[2 * i + 1] = digits[key->b[i] & 15];
    }
    hex[32] = '\0';
    return redis_key(conf, "block:", hex, buf);
}

/* --- shared small things --------------------------------------------------------------------- */

void block_count(struct bt_blockmap *bm, uint64_t *counter, uint64_t n)
{
    pthread_mutex_lock(&bm->lock);
    *counter += n;
    pthread_mutex_unlock(&bm->lock);
}

void block_flag(struct bt_blockmap *bm, bool *flag, bool v)
{
    pthread_mutex_lock(&bm->lock);
    __atomic_store_n(flag, v, __ATOMIC_RELAXED); /* bt_blockmap_up reads it without the lock */
    pthread_mutex_unlock(&bm->lock);
}

void block_scrub(struct bt_blockmap *bm, const struct block_scrub *s)
{
    bool first = false;

    pthread_mutex_lock(&bm->lock);
    if (bm->s_tail - bm->s_head < BLOCK_SCRUB_MAX) {
        first = bm->s_tail == bm->s_head;
        bm->scrubs[bm->s_tail++ % BLOCK_SCRUB_MAX] = *s;
    }
    pthread_mutex_unlock(&bm->lock);
    if (first) {
        bt_eventfd_wake(&bm->put_fd);
    }
}

void block_tell_down(struct bt_blockmap *bm, int rc, const struct bt_err *err)
{
    char msg[256];
    bool told;

    pthread_mutex_lock(&bm->lock);
    told = bm->told_down;
    bm->told_down = true;
    pthread_mutex_unlock(&bm->lock);
    if (!told) {
        BT_WARN("index_down", "msg=\"%s; look-ups find nothing, trying on\" rc=%s",
                bt_log_quotable(bt_err_msg(err, rc), msg, sizeof(msg)), bt_rc_name(rc));
    }
}

void block_told_up(struct bt_blockmap *bm)
{
    block_flag(bm, &bm->told_down, false);
    BT_INFO("index_up", "address=\"%s\"", bm->cfg.conf->redis_address);
}

/* --- announcing ------------------------------------------------------------------------------ */

void block_want_pass(struct bt_blockmap *bm)
{
    uint64_t to = bm->q_head;

    if (!bm->cfg.held) {
        return;
    }
    for (uint64_t i = bm->q_head; i < bm->q_tail; i++) {
        const struct bt_block_have *op = &bm->queue[i % BLOCK_QUEUE_MAX];

        if (op->tier == BLOCK_WITHDRAW) {
            bm->queue[to++ % BLOCK_QUEUE_MAX] = *op;
        }
    }
    bm->q_tail = to;
    bm->pass_after = to;
    bm->pass_wanted = true;
    bm->stats.synced = false;
}

/* Room for one more: when the queue is full, announcements go first, then everything; entries that
 * should have been removed then stay until their time is over. */
static void make_room(struct bt_blockmap *bm)
{
    if (bm->q_tail - bm->q_head < BLOCK_QUEUE_MAX) {
        return;
    }
    bm->stats.n_overflows++;
    block_want_pass(bm);
    if (bm->q_tail - bm->q_head > BLOCK_QUEUE_MAX / 2) {
        bm->q_head = bm->q_tail;
        bm->pass_after = bm->q_head;
    }
}

static void enqueue(struct bt_blockmap *bm,
                    const struct bt_block_have *have,
                    const struct bt_block_key *keys,
                    size_t n)
{
    bool first;

    if (!bm->queue || n == 0) {
        return;
    }
    pthread_mutex_lock(&bm->lock);
    first = bm->q_head == bm->q_tail;
    for (size_t i = 0; i < n; i++) {
        make_room(bm);
        bm->queue[bm->q_tail++ % BLOCK_QUEUE_MAX] =
            have ? have[i] : (struct bt_block_have){.key = keys[i], .tier = BLOCK_WITHDRAW};
    }
    pthread_mutex_unlock(&bm->lock);
    if (first) {
        bt_eventfd_wake(&bm->put_fd);
    }
}

void bt_blockmap_announce(struct bt_blockmap *bm, const struct bt_block_have *have, size_t n)
{
    enqueue(bm, have, NULL, n);
}

void bt_blockmap_withdraw(struct bt_blockmap *bm, const struct bt_block_key *keys, size_t n)
{
    enqueue(bm, NULL, keys, n);
}

void bt_blockmap_disown(struct bt_blockmap *bm,
                        const struct bt_block_key *key,
                        const char *name,
                        uint64_t incarnation)
{
    struct block_scrub s = {.key = *key};

    snprintf(s.name, sizeof(s.name), "%s", name);
    snprintf(s.expect, sizeof(s.expect), "%016" PRIx64 ":", incarnation);
    block_scrub(bm, &s);
}

/* --- looking up ------------------------------------------------------------------------------ */

void bt_blockmap_set_members(struct bt_blockmap *bm, struct bt_members *members)
{
    struct bt_members *old;

    bt_members_ref(members);
    pthread_mutex_lock(&bm->lock);
    old = bm->members;
    bm->members = members;
    pthread_mutex_unlock(&bm->lock);
    bt_members_unref(old);
}

static uint64_t begin(struct bt_blockmap *bm,
                      const struct bt_block_key *keys,
                      size_t n,
                      uint64_t timeout_ns,
                      const struct bt_lookup_cb *cb,
                      bool counts)
{
    size_t keys_n = n * sizeof(*keys);
    struct block_lookup *l = bt_calloc(1, sizeof(*l) + keys_n + (n + 1) * sizeof(uint32_t));
    uint64_t id;
    bool first;

    if (!l) {
        return 0;
    }
    memcpy(l->keys, keys, keys_n);
    l->first = (uint32_t *)(void *)((char *)l->keys + keys_n);
    l->n_keys = n;
    l->counts = counts;
    l->cb = *cb;
    l->start_ns = bt_now_ns();
    l->timeout_ns = timeout_ns ? timeout_ns : bm->cfg.conf->lookup_timeout_ns;
    l->timeout_ns = BT_MIN(l->timeout_ns, bm->cfg.conf->redis_timeout_ns);
    pthread_mutex_lock(&bm->lock);
    first = bt_list_empty(&bm->fresh);
    id = l->id = ++bm->last_id;
    bm->n_live++;
    bt_list_push_back(&bm->live, &l->live);
    bt_list_push_back(&bm->fresh, &l->link);
    pthread_mutex_unlock(&bm->lock);
    if (first) {
        bt_eventfd_wake(&bm->get_fd);
    }
    return id;
}

uint64_t bt_blockmap_lookup(struct bt_blockmap *bm,
                            const struct bt_block_key *keys,
                            size_t n,
                            uint64_t timeout_ns,
                            const struct bt_lookup_cb *cb)
{
    return n == 0 || n > BT_LOOKUP_KEYS_MAX ? 0 : begin(bm, keys, n, timeout_ns, cb, false);
}

uint64_t
bt_blockmap_count(struct bt_blockmap *bm, uint64_t timeout_ns, const struct bt_lookup_cb *cb)
{
    const struct bt_block_key none = {{0}};

    return begin(bm, &none, 1, timeout_ns, cb, true);
}

void bt_blockmap_cancel(struct bt_blockmap *bm, uint64_t lookup_id)
{
    bool wake = false;

    pthread_mutex_lock(&bm->lock);
    bt_list_for_each (it, &bm->live) {
        struct block_lookup *l = BT_LIST_ENTRY(it, struct block_lookup, live);

        if (l->id == lookup_id) {
            l->cancelled = bm->any_cancelled = wake = true;
            break;
        }
    }
    pthread_mutex_unlock(&bm->lock);
    if (wake) {
        bt_eventfd_wake(&bm->get_fd);
    }
}

bool bt_blockmap_up(const struct bt_blockmap *bm)
{
    return __atomic_load_n(&bm->stats.up, __ATOMIC_RELAXED); /* pairs with block_flag */
}

struct bt_blockmap_stats bt_blockmap_stats(struct bt_blockmap *bm)
{
    struct bt_blockmap_stats s;

    pthread_mutex_lock(&bm->lock);
    s = bm->stats;
    pthread_mutex_unlock(&bm->lock);
    return s;
}

/* --- create, destroy ------------------------------------------------------------------------- */

static int check(const struct bt_blockmap_cfg *cfg, struct bt_err *err)
{
    int rc = bt_cluster_conf_check(cfg->conf, err);

    if (rc < 0) {
        return rc;
    }
    if (cfg->conf->block_ttl_ns < BT_NS_PER_S || cfg->conf->lookup_timeout_ns == 0 ||
        cfg->conf->redis_timeout_ns == 0) {
        return BT_FAIL(err, BT_E_CONFIG, "redis.block_ttl or a timeout of redis is too short");
    }
    if (cfg->name && (!bt_member_name_ok(bt_str_of(cfg->name)) || !cfg->incarnation)) {
        return BT_FAIL(err, BT_E_INVALID, "blockmap: bad name or no incarnation");
    }
    return BT_OK;
}

static void free_all(struct bt_blockmap *bm)
{
    if (bm->get_fd >= 0) {
        close(bm->get_fd);
    }
    if (bm->put_fd >= 0) {
        close(bm->put_fd);
    }
    redis_close(&bm->new_conn);
    bt_members_unref(bm->members);
    pthread_mutex_destroy(&bm->lock);
    free(bm->flight);
    free(bm->scrubs);
    free(bm->queue);
    free(bm);
}

static struct bt_blockmap *make(const struct bt_blockmap_cfg *cfg)
{
    struct bt_blockmap *bm = bt_calloc(1, sizeof(*bm));

    if (!bm) {
        return NULL;
    }
    bm->cfg = *cfg;
    bm->target = (struct redis_target){cfg->conf, cfg->conf->redis_timeout_ns};
    bm->get_fd = bm->put_fd = -1;
    pthread_mutex_init(&bm->lock, NULL);
    bt_list_init(&bm->live);
    bt_list_init(&bm->fresh);
    bt_list_init(&bm->wire);
    redis_pause_reset(&bm->get_pause);
    redis_pause_reset(&bm->get_redial);
    redis_pause_reset(&bm->put_redial);
    redis_pause_reset(&bm->refused);
    bm->scrubs = bt_calloc(BLOCK_SCRUB_MAX, sizeof(*bm->scrubs));
    if (cfg->name) {
        snprintf(bm->name, sizeof(bm->name), "%s", cfg->name);
        bm->cfg.name = bm->name;
        snprintf(bm->incarnation, sizeof(bm->incarnation), "%016" PRIx64, cfg->incarnation);
        bm->queue = bt_calloc(BLOCK_QUEUE_MAX, sizeof(*bm->queue));
        bm->flight = bt_calloc(BLOCK_FLIGHT, sizeof(*bm->flight));
    }
    if (!bm->scrubs || (cfg->name && (!bm->queue || !bm->flight))) {
        free_all(bm);
        return NULL;
    }
    return bm;
}

static void ask_to_quit(struct bt_blockmap *bm)
{
    block_flag(bm, &bm->quit, true);
    bt_eventfd_wake(&bm->get_fd);
    bt_eventfd_wake(&bm->put_fd);
}

int bt_blockmap_create(const struct bt_blockmap_cfg *cfg,
                       struct bt_blockmap **ret_bm,
                       struct bt_err *err)
{
    struct bt_blockmap *bm;
    int rc = check(cfg, err);

    if (rc < 0) {
        return rc;
    }
    bm = make(cfg);
    if (!bm) {
        return BT_FAIL(err, BT_E_NOMEM, "blockmap: out of memory");
    }
    if ((rc = bt_eventfd_create(&bm->get_fd, err)) < 0 ||
        (rc = bt_eventfd_create(&bm->put_fd, err)) < 0 ||
        (rc = bt_thread_start(&bm->get_thread, "redis-get", block_get_main, bm, err)) < 0) {
        goto fail;
    }
    rc = bt_thread_start(&bm->put_thread, "redis-put", block_put_main, bm, err);
    if (rc < 0) {
        goto fail_get;
    }
    *ret_bm = bm;
    return BT_OK;

fail_get:
    ask_to_quit(bm);
    pthread_join(bm->get_thread, NULL);
fail:
    free_all(bm);
    return rc;
}

void bt_blockmap_destroy(struct bt_blockmap *bm)
{
    if (!bm) {
        return;
    }
    ask_to_quit(bm);
    pthread_join(bm->get_thread, NULL);
    pthread_join(bm->put_thread, NULL);
    free_all(bm);
}
