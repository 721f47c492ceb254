/* The thread "redis": announces the own entry, reads everybody's, and freezes when Redis is away.
 *
 * Link states: NEW (never up) -> UP <-> DOWN; a state change is logged once. While not UP one
 * attempt is made per pause; the pause doubles up to a third of the lease (5 s at most), so that
 * every node is back well within the one lease of grace that readers give after an outage.
 *
 * Invariant: everything in struct bt_registry below `conn` is touched by the thread alone; what
 * stands under `lock` is shared. */
#include "common/cluster/registry.h"

#include "common/cluster/redis_int.h"
#include "common/conf/value.h"
#include "common/obs/log.h"
#include "common/thr/mailbox.h"
#include "common/thr/thread.h"
#include "common/thr/time.h"

#include <inttypes.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#define NODES_MAX 4096 /* entries read; the most recently announced ones */
#define EPOCH_MAX 64
#define KEY_MAX   REDIS_KEY_MAX

enum link { LINK_NEW, LINK_UP, LINK_DOWN };

struct bt_registry {
    struct bt_registry_cfg cfg;
    struct redis_target target;
    struct bt_member *seeds; /* n_seeds */
    size_t n_seeds;
    bool has_self;
    pthread_t thread;
    int wake_fd;

    pthread_mutex_t lock;
    struct bt_member self;          /* under lock */
    bool self_dirty;                /* under lock */
    bool quit;                      /* under lock */
    struct bt_registry_stats stats; /* under lock */

    struct redis_conn conn;
    enum link link;
    struct redis_pause pause;   /* between attempts to connect */
    uint64_t renew_ns, poll_ns; /* next announcement, next reading */
    uint64_t grace_ns;          /* until then nobody is dropped for missing */
    char epoch[EPOCH_MAX + 1];  /* empty = not known */
    bool ever_announced, announce_refused;
    bool fenced;
    struct bt_member *known; /* n_known registered members, as last read */
    size_t n_known;
    size_t n_bad; /* bad entries in the last reading */
    uint64_t version;
    struct bt_members *last; /* what was published last */
};

/* Answers: 0 announced, 1 wait for a newer-looking entry to run out, 2 fenced.
 * KEYS node fence nodes epoch; ARGV incarnation text lease_ms name first new_epoch */
static const char announce_script[] =
    "local function text(k, max_ms)\n"
    "  local ttl = redis.call('PTTL', k)\n"
    "  if ttl < 0 or ttl > max_ms then return '' end\n"
    "  local v = redis.pcall('GET', k)\n"
    "  return type(v) == 'string' and v or ''\n"
    "end\n"
    "local first = ARGV[5] == '1'\n"
    "local live = string.match(text(KEYS[1], 600000), 'incarnation=(%x+)') or ''\n"
    "local fence = text(KEYS[2], 86400000)\n"
    "if #live == 16 and live > ARGV[1] then return first and 1 or 2 end\n"
    "if not first and #fence == 16 and fence > ARGV[1] then return 2 end\n"
    "local t = redis.call('TIME')\n"
    "local now = t[1] * 1000 + math.floor(t[2] / 1000)\n"
    "redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3])\n"
    "redis.call('SET', KEYS[2], ARGV[1], 'PX', 86400000)\n"
    "if redis.call('TYPE', KEYS[3]).ok ~= 'zset' then redis.call('DEL', KEYS[3]) end\n"
    "redis.call('ZADD', KEYS[3], now + ARGV[3], ARGV[4])\n"
    "redis.call('ZREMRANGEBYSCORE', KEYS[3], '-inf', now - 3600000)\n"
    "redis.call('SET', KEYS[4], ARGV[6], 'NX')\n"
    "return 0\n";

/* KEYS node nodes; ARGV incarnation name */
static const char leave_script[] =
    "local v = redis.pcall('GET', KEYS[1])\n"
    "if type(v) == 'string' and string.match(v, 'incarnation=(%x+)') == ARGV[1] then\n"
    "  redis.call('DEL', KEYS[1])\n"
    "  redis.call('ZREM', KEYS[2], ARGV[2])\n"
    "  return 1\n"
    "end\n"
    "return 0\n";

/* --- small helpers --------------------------------------------------------------------------- */

static struct bt_str
key(const struct bt_registry *reg, const char *what, const char *name, char *buf)
{
    return redis_key(reg->cfg.conf, what, name, buf);
}

static void count(struct bt_registry *reg, uint64_t *counter, uint64_t n)
{
    pthread_mutex_lock(&reg->lock);
    *counter += n;
    pthread_mutex_unlock(&reg->lock);
}

static void set_flag(struct bt_registry *reg, bool *flag, bool v)
{
    pthread_mutex_lock(&reg->lock);
    *flag = v;
    pthread_mutex_unlock(&reg->lock);
}

/* --- publishing ------------------------------------------------------------------------------ */

/* Hands a new snapshot to the owner if it differs from the last one. */
static void publish(struct bt_registry *reg)
{
    struct bt_members *ms;

    if (!reg->cfg.changed) {
        return;
    }
    ms = bt_members_make(reg->known, reg->n_known, reg->seeds, reg->n_seeds);
    if (!ms) {
        BT_ERROR("members", "msg=\"out of memory; membership stays as it was\"");
        return;
    }
    ms->frozen = reg->cfg.conf->redis_address[0] && reg->link != LINK_UP;
    if (reg->last && bt_members_equal(ms, reg->last)) {
        bt_members_unref(ms);
        return;
    }
    ms->version = ++reg->version;
    bt_members_unref(reg->last);
    reg->last = bt_members_ref(ms);
    BT_INFO("members", "n=%zu version=%" PRIu64 " frozen=%d", ms->n, ms->version, ms->frozen);
    reg->cfg.changed(reg->cfg.arg, ms);
}

static void link_up(struct bt_registry *reg)
{
    redis_pause_reset(&reg->pause);
    if (reg->link == LINK_UP) {
        return;
    }
    BT_INFO("redis_up", "address=\"%s\"", reg->cfg.conf->redis_address);
    reg->link = LINK_UP;
    set_flag(reg, &reg->stats.up, true);
}

static void link_down(struct bt_registry *reg, int rc, const struct bt_err *err)
{
    char msg[256];

    redis_close(&reg->conn);
    count(reg, &reg->stats.n_failures, 1);
    redis_pause_grow(&reg->pause, reg->cfg.conf->lease_ns);
    if (reg->link != LINK_DOWN) {
        BT_WARN("redis_down", "msg=\"%s; membership is frozen, trying on\" rc=%s",
                bt_log_quotable(bt_err_msg(err, rc), msg, sizeof(msg)), bt_rc_name(rc));
        reg->link = LINK_DOWN;
        set_flag(reg, &reg->stats.up, false);
        set_flag(reg, &reg->stats.announced, false);
    }
    publish(reg);
}

/* One command, one reply; NULL: the link is down. */
static redisReply *exchange(struct bt_registry *reg, int argc, const struct bt_str *argv)
{
    redisReply *reply = NULL;
    struct bt_err err = {0};
    int rc = redis_send(&reg->conn, argc, argv);

    if (rc == BT_OK) {
        rc = redis_receive(&reg->conn, reg->target.timeout_ns, &reply, 1, &err);
    }
    if (rc < 0) {
        link_down(reg, rc, &err);
        return NULL;
    }
    return reply;
}

/* --- announcing ------------------------------------------------------------------------------ */

static void become_fenced(struct bt_registry *reg, const struct bt_member *self)
{
    BT_ERROR("fenced",
             "msg=\"a newer process has taken this node's name; leaving the cluster\" "
             "name=%s incarnation=%016" PRIx64,
             self->name, self->incarnation);
    reg->fenced = true;
    set_flag(reg, &reg->stats.fenced, true);
    set_flag(reg, &reg->stats.announced, false);
    if (reg->cfg.fenced) {
        reg->cfg.fenced(reg->cfg.arg);
    }
}

static void
announce_answer(struct bt_registry *reg, const struct bt_member *self, const redisReply *reply)
{
    bool done = reply->type == REDIS_REPLY_INTEGER && reply->integer == 0;
    struct bt_err err = {0};
    int rc = redis_refusal(reply, &err);

    if (rc < 0) { /* nobody else can announce itself either: see frozen */
        link_down(reg, rc, &err);
        return;
    }
    if (reply->type == REDIS_REPLY_INTEGER && reply->integer == 2) {
        become_fenced(reg, self);
        return;
    }
    if (!done && !reg->announce_refused) {
        BT_WARN("announce", "msg=\"not announced: %.*s\" name=%s",
                reply->type == REDIS_REPLY_ERROR ? (int)redis_text(reply).n : 50,
                reply->type == REDIS_REPLY_ERROR
                    ? reply->str
                    : "the name is still leased to another incarnation",
                self->name);
    }
    reg->announce_refused = !done;
    if (done) {
        if (!reg->ever_announced) {
            BT_INFO("announced", "name=%s incarnation=%016" PRIx64, self->name, self->incarnation);
        }
        reg->ever_announced = true;
        set_flag(reg, &reg->stats.announced, true);
        if (!reg->cfg.changed) {
            link_up(reg); /* who reads as well is up when it can read */
        }
    }
}

static void announce(struct bt_registry *reg)
{
    char node[KEY_MAX], fence[KEY_MAX], nodes[KEY_MAX], epoch[KEY_MAX], inc[17], lease[24],
        fresh[33];
    struct bt_buf text = {0};
    struct bt_member self;
    redisReply *reply;

    pthread_mutex_lock(&reg->lock);
    self = reg->self;
    reg->self_dirty = false;
    pthread_mutex_unlock(&reg->lock);
    if (bt_member_encode(&self, &text) < 0) {
        BT_ERROR("announce", "msg=\"out of memory\"");
        goto out;
    }
    redis_random_text(fresh);
    snprintf(inc, sizeof(inc), "%016" PRIx64, self.incarnation);
    snprintf(lease, sizeof(lease), "%llu",
             (unsigned long long)(reg->cfg.conf->lease_ns / BT_NS_PER_MS));
    reply = exchange(
        reg, 13,
        (struct bt_str[]){BT_STR("EVAL"), BT_STR(announce_script), BT_STR("4"),
                          key(reg, "node:", self.name, node), key(reg, "fence:", self.name, fence),
                          key(reg, "nodes", "", nodes), key(reg, "epoch", "", epoch),
                          bt_str_of(inc), bt_buf_str(&text), bt_str_of(lease), bt_str_of(self.name),
                          reg->ever_announced ? BT_STR("0") : BT_STR("1"), bt_str_of(fresh)});
    if (reply) {
        announce_answer(reg, &self, reply);
        freeReplyObject(reply);
    }

out:
    reg->renew_ns = bt_now_ns() + redis_jitter(reg->cfg.conf->lease_ns / 3);
    bt_buf_fini(&text);
}

static void leave(struct bt_registry *reg)
{
    char node[KEY_MAX], nodes[KEY_MAX], inc[17];
    redisReply *reply;

    snprintf(inc, sizeof(inc), "%016" PRIx64, reg->self.incarnation);
    reply = exchange(reg, 7,
                     (struct bt_str[]){BT_STR("EVAL"), BT_STR(leave_script), BT_STR("2"),
                                       key(reg, "node:", reg->self.name, node),
                                       key(reg, "nodes", "", nodes), bt_str_of(inc),
                                       bt_str_of(reg->self.name)});
    if (reply) {
        freeReplyObject(reply);
    }
}

/* --- reading --------------------------------------------------------------------------------- */

/* One reading under way. */
struct reading {
    struct bt_str *names; /* valid ones; borrowed from the list reply */
    redisReply **replies; /* one per name, then the epoch, then whether it takes writes */
    struct bt_member *found;
    size_t n_names, n_found, n_bad;
    char first_bad[120];
};

static void bad_entry(struct reading *r, const char *name, size_t n, const char *why)
{
    if (r->n_bad++ == 0) {
        snprintf(r->first_bad, sizeof(r->first_bad), "%.*s: %.70s", (int)BT_MIN(n, (size_t)40),
                 name, why);
    }
}

static int pick_names(struct reading *r, const redisReply *list)
{
    size_t n = BT_MIN(list->elements, (size_t)NODES_MAX);

    r->names = bt_calloc(n + 1, sizeof(*r->names));
    r->replies = bt_calloc(n + 2, sizeof(*r->replies));
    r->found = bt_calloc(n + 1, sizeof(*r->found));
    if (!r->names || !r->replies || !r->found) {
        return BT_E_NOMEM;
    }
    for (size_t i = 0; i < n; i++) {
        const redisReply *e = list->element[i];
        struct bt_str name = {e->str, e->str ? e->len : 0};

        if (bt_member_name_ok(name)) {
            r->names[r->n_names++] = name;
        } else {
            bad_entry(r, name.n ? name.p : "", name.n, "bad name");
        }
    }
    return BT_OK;
}

/* The entries in one exchange. The epoch comes behind them: if Redis is emptied before or in
 * between, the epoch that is read then tells. Last, a write that changes nothing: a server that
 * refuses it (full, a replica) lets no node renew its lease, so what it says of leases is void. */
static int read_entries(struct bt_registry *reg, struct reading *r, struct bt_err *err)
{
    char k[KEY_MAX], name[BT_MEMBER_NAME_MAX + 1], max[16];
    int rc = BT_OK;

    snprintf(max, sizeof(max), "%d", BT_MEMBER_RECORD_MAX);
    for (size_t i = 0; rc == BT_OK && i < r->n_names; i++) {
        memcpy(name, r->names[i].p, r->names[i].n);
        name[r->names[i].n] = '\0';
        rc = redis_send(&reg->conn, 4,
                        (struct bt_str[]){BT_STR("GETRANGE"), key(reg, "node:", name, k),
                                          BT_STR("0"), bt_str_of(max)});
    }
    if (rc == BT_OK) {
        rc = redis_send(&reg->conn, 4,
                        (struct bt_str[]){BT_STR("GETRANGE"), key(reg, "epoch", "", k), BT_STR("0"),
                                          BT_STR(BT_STR2_(EPOCH_MAX))});
    }
    if (rc == BT_OK) {
        rc = redis_send(&reg->conn, 4,
                        (struct bt_str[]){BT_STR("SETRANGE"), key(reg, "epoch", "", k), BT_STR("0"),
                                          BT_STR("")});
    }
    return rc < 0
               ? rc
               : redis_receive(&reg->conn, reg->target.timeout_ns, r->replies, r->n_names + 2, err);
}

/* Whether an answer of a reading says that leases mean nothing now. A reader may lack the right to
 * write; that says nothing of others. */
static int check_replies(const struct reading *r, struct bt_err *err)
{
    int rc = BT_OK;

    for (size_t i = 0; rc == BT_OK && i < r->n_names + 1; i++) {
        rc = redis_refusal(r->replies[i], err);
    }
    if (rc == BT_OK) {
        rc = redis_refusal(r->replies[r->n_names + 1], err);
        rc = rc == BT_E_DENIED ? BT_OK : rc;
    }
    return rc;
}

static void decode_entries(struct reading *r)
{
    for (size_t i = 0; i < r->n_names; i++) {
        const redisReply *e = r->replies[i];
        struct bt_err err = {0};

        if (e->type != REDIS_REPLY_STRING) {
            bad_entry(r, r->names[i].p, r->names[i].n, "not a text");
        } else if (e->len == 0) {
            continue; /* its lease has run out */
        } else if (bt_member_decode(r->names[i], (struct bt_str){e->str, e->len},
                                    &r->found[r->n_found], &err) == BT_OK) {
            r->n_found++;
        } else {
            bad_entry(r, r->names[i].p, r->names[i].n, err.msg);
        }
    }
}

/* Another epoch than before, or none: Redis was emptied, everybody gets a lease of grace. */
static void look_at_epoch(struct bt_registry *reg, const redisReply *e)
{
    char k[KEY_MAX], fresh[33];
    struct bt_str seen = {NULL, 0};
    redisReply *reply;

    if (e->type == REDIS_REPLY_STRING && e->len <= EPOCH_MAX) {
        seen = (struct bt_str){e->str, e->len};
    }
    if (seen.n > 0 && bt_str_eq(seen, bt_str_of(reg->epoch))) {
        return;
    }
    if (reg->epoch[0]) {
        BT_WARN("redis_emptied", "msg=\"Redis lost its content; waiting one lease for members\"");
        reg->grace_ns = bt_deadline_ns(reg->cfg.conf->lease_ns);
        reg->renew_ns = 0;
    }
    memcpy(reg->epoch, seen.n ? seen.p : "", seen.n);
    reg->epoch[seen.n] = '\0';
    if (seen.n > 0) {
        return;
    }
    redis_random_text(fresh);
    reply = exchange(
        reg, 4,
        (struct bt_str[]){BT_STR("SET"), key(reg, "epoch", "", k), bt_str_of(fresh), BT_STR("NX")});
    if (reply) {
        freeReplyObject(reply);
    }
}

static bool contains(const struct bt_member *list, size_t n, const char *name)
{
    for (size_t i = 0; i < n; i++) {
        if (strcmp(list[i].name, name) == 0) {
            return true;
        }
    }
    return false;
}

/* What was found replaces what was known; in a time of grace the missing stay. */
static int accept_reading(struct bt_registry *reg, struct reading *r)
{
    bool grace = bt_now_ns() < reg->grace_ns;
    struct bt_member *next = bt_calloc(r->n_found + reg->n_known + 1, sizeof(*next));
    size_t n = 0;

    if (!next) {
        return BT_E_NOMEM;
    }
    for (; n < r->n_found; n++) {
        next[n] = r->found[n];
    }
    for (size_t i = 0; grace && i < reg->n_known; i++) {
        if (!contains(r->found, r->n_found, reg->known[i].name)) {
            next[n++] = reg->known[i];
        }
    }
    free(reg->known);
    reg->known = next;
    reg->n_known = n;
    return BT_OK;
}

static void tell_bad(struct bt_registry *reg, const struct reading *r)
{
    char msg[120];

    if (r->n_bad != reg->n_bad && r->n_bad > 0) {
        BT_WARN("bad_entry", "msg=\"passed over: %s\" n=%zu",
                bt_log_quotable(r->first_bad, msg, sizeof(msg)), r->n_bad);
    }
    reg->n_bad = r->n_bad;
    count(reg, &reg->stats.n_bad, r->n_bad);
}

static void read_members(struct bt_registry *reg)
{
    char nodes[KEY_MAX];
    struct reading r = {0};
    struct bt_err err = {0};
    redisReply *list;
    int rc;

    reg->poll_ns = bt_now_ns() + redis_jitter(reg->cfg.conf->poll_ns);
    list = exchange(reg, 4,
                    (struct bt_str[]){BT_STR("ZREVRANGE"), key(reg, "nodes", "", nodes),
                                      BT_STR("0"), BT_STR("4095")});
    if (!list) {
        return;
    }
    if (list->type != REDIS_REPLY_ARRAY) {
        struct bt_str text = redis_text(list);

        rc = redis_refusal(list, &err);
        if (rc == BT_OK) {
            rc = BT_FAIL(&err, BT_E_UNAVAILABLE, "redis: %.*s", (int)text.n, text.p);
        }
    } else {
        rc = pick_names(&r, list);
        rc = rc == BT_OK ? read_entries(reg, &r, &err) : rc;
        rc = rc == BT_OK ? check_replies(&r, &err) : rc;
    }
    if (rc == BT_OK) {
        decode_entries(&r);
        look_at_epoch(reg, r.replies[r.n_names]);
        rc = accept_reading(reg, &r);
    }
    if (rc == BT_OK && reg->conn.ctx) {
        tell_bad(reg, &r);
        count(reg, &reg->stats.n_polls, 1);
        link_up(reg);
        publish(reg);
    } else if (rc < 0) {
        link_down(reg, rc, &err);
    }
    redis_free_replies(r.replies, r.replies ? r.n_names + 2 : 0);
    freeReplyObject(list);
    free(r.names);
    free(r.replies);
    free(r.found);
}

/* --- the thread ------------------------------------------------------------------------------ */

static void connect_once(struct bt_registry *reg)
{
    struct bt_err err = {0};
    int rc = redis_open(&reg->conn, &reg->target, &err);

    if (rc < 0) {
        link_down(reg, rc, &err);
        return;
    }
    count(reg, &reg->stats.n_connects, 1);
    reg->grace_ns = bt_deadline_ns(reg->cfg.conf->lease_ns);
    reg->renew_ns = reg->poll_ns = 0;
}

/* Sleeps until something is due or somebody wakes us. */
static void sleep_until_due(struct bt_registry *reg)
{
    struct pollfd p = {reg->wake_fd, POLLIN, 0};
    uint64_t due = BT_NEVER_NS, now = bt_now_ns();

    if (reg->cfg.conf->redis_address[0] && !reg->conn.ctx) {
        due = reg->pause.next_ns;
    } else if (reg->conn.ctx) {
        due = reg->has_self && !reg->fenced ? reg->renew_ns : due;
        due = reg->cfg.changed ? BT_MIN(due, reg->poll_ns) : due;
    }
    if (due > now) {
        poll(&p, 1,
             due == BT_NEVER_NS ? -1 : (int)BT_MIN((due - now) / BT_NS_PER_MS + 1, 60000ull));
    }
    bt_eventfd_clear(reg->wake_fd);
}

static void *registry_main(void *arg)
{
    struct bt_registry *reg = arg;
    bool quit = false;

    publish(reg);
    while (!quit) {
        bool dirty;

        pthread_mutex_lock(&reg->lock);
        quit = reg->quit;
        dirty = reg->self_dirty;
        pthread_mutex_unlock(&reg->lock);
        if (quit) {
            break;
        }
        if (dirty) {
            reg->renew_ns = 0;
        }
        if (reg->cfg.conf->redis_address[0] && !reg->conn.ctx &&
            bt_now_ns() >= reg->pause.next_ns) {
            connect_once(reg);
        }
        if (reg->conn.ctx && reg->has_self && !reg->fenced && bt_now_ns() >= reg->renew_ns) {
            announce(reg);
        }
        if (reg->conn.ctx && reg->cfg.changed && bt_now_ns() >= reg->poll_ns) {
            read_members(reg);
        }
        sleep_until_due(reg);
    }
    if (reg->conn.ctx && reg->ever_announced && !reg->fenced) {
        leave(reg);
    }
    redis_close(&reg->conn);
    return NULL;
}

/* --- public ---------------------------------------------------------------------------------- */

static int read_seeds(struct bt_registry *reg, struct bt_err *err)
{
    const struct bt_conf_list *list = &reg->cfg.conf->seeds;
    int rc = BT_OK;

    reg->seeds = bt_calloc(list->n + 1, sizeof(*reg->seeds));
    if (!reg->seeds) {
        return BT_FAIL(err, BT_E_NOMEM, "registry: out of memory");
    }
    for (; rc == BT_OK && reg->n_seeds < list->n; reg->n_seeds++) {
        rc = bt_member_read_seed(bt_str_of(list->items[reg->n_seeds]), &reg->seeds[reg->n_seeds],
                                 err);
    }
    return rc;
}

/* What is announced must be what a reader takes. */
static int check_self(const struct bt_member *self, struct bt_err *err)
{
    struct bt_member back;
    struct bt_buf text = {0};
    int rc = bt_member_encode(self, &text);

    if (rc == BT_OK) {
        rc = bt_member_decode(bt_str_of(self->name), bt_buf_str(&text), &back, err);
    }
    bt_buf_fini(&text);
    return rc == BT_E_FORMAT ? BT_E_INVALID : rc;
}

static int check(const struct bt_registry_cfg *cfg, struct bt_err *err)
{
    int rc = bt_cluster_conf_check(cfg->conf, err);

    return rc == BT_OK && cfg->self ? check_self(cfg->self, err) : rc;
}

int bt_registry_create(const struct bt_registry_cfg *cfg,
                       struct bt_registry **ret_reg,
                       struct bt_err *err)
{
    struct bt_registry *reg;
    int rc = check(cfg, err);

    if (rc < 0) {
        return rc;
    }
    reg = bt_calloc(1, sizeof(*reg));
    if (!reg) {
        return BT_FAIL(err, BT_E_NOMEM, "registry: out of memory");
    }
    reg->cfg = *cfg;
    reg->target = (struct redis_target){cfg->conf, cfg->conf->redis_timeout_ns};
    reg->has_self = cfg->self != NULL;
    if (cfg->self) {
        reg->self = *cfg->self;
    }
    reg->cfg.self = NULL; /* the caller's; ours is reg->self */
    redis_pause_reset(&reg->pause);
    reg->wake_fd = -1;
    pthread_mutex_init(&reg->lock, NULL);
    rc = read_seeds(reg, err);
    if (rc < 0) {
        goto fail;
    }
    rc = bt_eventfd_create(&reg->wake_fd, err);
    if (rc < 0) {
        goto fail;
    }
    rc = bt_thread_start(&reg->thread, "redis", registry_main, reg, err);
    if (rc < 0) {
        goto fail_fd;
    }
    *ret_reg = reg;
    return BT_OK;

fail_fd:
    close(reg->wake_fd);
fail:
    pthread_mutex_destroy(&reg->lock);
    free(reg->seeds);
    free(reg);
    return rc;
}

int bt_registry_update(struct bt_registry *reg, const struct bt_member *self)
{
    int rc = check_self(self, NULL);

    pthread_mutex_lock(&reg->lock);
    if (!reg->has_self || self->incarnation != reg->self.incarnation ||
        strcmp(self->name, reg->self.name) != 0) {
        rc = BT_E_INVALID;
    }
    if (rc == BT_OK) {
        reg->self = *self;
        reg->self_dirty = true;
    }
    pthread_mutex_unlock(&reg->lock);
    bt_eventfd_wake(&reg->wake_fd);
    return rc;
}

struct bt_registry_stats bt_registry_stats(struct bt_registry *reg)
{
    struct bt_registry_stats s;

    pthread_mutex_lock(&reg->lock);
    s = reg->stats;
    pthread_mutex_unlock(&reg->lock);
    return s;
}

void bt_registry_destroy(struct bt_registry *reg)
{
    if (!reg) {
        return;
    }
    set_flag(reg, &reg->quit, true);
    bt_eventfd_wake(&reg->wake_fd);
    pthread_join(reg->thread, NULL);
    bt_members_unref(reg->last);
    close(reg->wake_fd);
    pthread_mutex_destroy(&reg->lock);
    free(reg->known);
    free(reg->seeds);
    free(reg);
}
