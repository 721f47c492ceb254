/* One connection to Redis; deadlines by poll(2) around hiredis in non-blocking mode. */
#include "common/cluster/redis_int.h"

#include "common/conf/value.h"
#include "common/thr/time.h"

#include <errno.h>
#include <inttypes.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <sys/random.h>
#include <sys/socket.h>

#define PAUSE_FIRST_NS (100 * BT_NS_PER_MS)
#define PAUSE_MAX_NS   (5 * BT_NS_PER_S)

int redis_wait(struct redis_conn *c, short events, uint64_t deadline_ns)
{
    for (;;) {
        struct pollfd p = {c->ctx->fd, events, 0};
        uint64_t now = bt_now_ns();
        int n;

        if (now >= deadline_ns) {
            return BT_E_DEADLINE;
        }
        n = poll(&p, 1, (int)BT_MIN((deadline_ns - now) / BT_NS_PER_MS + 1, (uint64_t)60000));
        if (n > 0) {
            return BT_OK;
        }
        if (n < 0 && errno != EINTR) {
            return BT_E_SYS;
        }
    }
}

/* --- what answers may be --------------------------------------------------------------------- */

#if HIREDIS_MAJOR < 1
static redisReplyObjectFunctions bounded; /* as hiredis's own but for the arrays */
static void *(*make_array)(const redisReadTask *task, int n);
static pthread_once_t bounded_once = PTHREAD_ONCE_INIT;

static void *make_bounded_array(const redisReadTask *task, int n)
{
    return n >= 0 && n <= REDIS_ELEMENTS_MAX ? make_array(task, n) : NULL;
}

static void init_bounded(void)
{
    redisReader *r = redisReaderCreate();

    if (r) {
        bounded = *r->fn;
        make_array = bounded.createArray;
        bounded.createArray = make_bounded_array;
        redisReaderFree(r);
    }
}

int redis_bound(redisReader *reader)
{
    pthread_once(&bounded_once, init_bounded);
    if (!make_array) {
        return BT_E_NOMEM;
    }
    reader->fn = &bounded;
    return BT_OK;
}
#else
int redis_bound(redisReader *reader)
{
    reader->maxelements = REDIS_ELEMENTS_MAX;
    return BT_OK;
}
#endif

void redis_close(struct redis_conn *c)
{
    if (c->ctx) {
        redisFree(c->ctx);
        c->ctx = NULL;
    }
}

int redis_send(struct redis_conn *c, int argc, const struct bt_str *argv)
{
    const char *parts[REDIS_ARGS_MAX];
    size_t lens[REDIS_ARGS_MAX];

    BT_BUG_ON(argc > REDIS_ARGS_MAX);
    for (int i = 0; i < argc; i++) {
        parts[i] = argv[i].p;
        lens[i] = argv[i].n;
    }
    return redisAppendCommandArgv(c->ctx, argc, parts, lens) == REDIS_OK ? BT_OK : BT_E_NOMEM;
}

/* Closes after an error; names the cause. */
static int lost(struct redis_conn *c, int rc, struct bt_err *err)
{
    if (rc == BT_E_IO) {
        BT_FAIL(err, BT_E_UNAVAILABLE, "redis: %s",
                c->ctx->errstr[0] ? c->ctx->errstr : "connection lost");
    } else {
        BT_FAIL(err, BT_E_UNAVAILABLE, "redis: %s", bt_rc_text(rc));
    }
    redis_close(c);
    return BT_E_UNAVAILABLE;
}

/* --- steps that never wait ------------------------------------------------------------------- */

static int write_some(struct redis_conn *c, bool *ret_done)
{
    int done = 0;

    if (redisBufferWrite(c->ctx, &done) != REDIS_OK) {
        return BT_E_IO;
    }
    *ret_done = done != 0;
    return BT_OK;
}

static int read_some(struct redis_conn *c)
{
    size_t before = c->ctx->reader->len;

    if (redisBufferRead(c->ctx) != REDIS_OK) {
        return BT_E_IO;
    }
    c->used_bytes += c->ctx->reader->len - before;
    return c->used_bytes > REDIS_REPLY_MAX ? BT_E_TOO_LARGE : BT_OK;
}

static int next_reply(struct redis_conn *c, redisReply **ret_reply)
{
    void *reply = NULL;

    if (redisGetReplyFromReader(c->ctx, &reply) != REDIS_OK) {
        return BT_E_IO;
    }
    *ret_reply = reply;
    return BT_OK;
}

int redis_write_some(struct redis_conn *c, bool *ret_done, struct bt_err *err)
{
    int rc = write_some(c, ret_done);

    return rc < 0 ? lost(c, rc, err) : rc;
}

int redis_read_some(struct redis_conn *c, struct bt_err *err)
{
    int rc = read_some(c);

    return rc < 0 ? lost(c, rc, err) : rc;
}

int redis_next_reply(struct redis_conn *c, redisReply **ret_reply, struct bt_err *err)
{
    int rc = next_reply(c, ret_reply);

    if (rc < 0) {
        return lost(c, rc, err);
    }
    if (*ret_reply) {
        c->used_bytes = 0;
    }
    return BT_OK;
}

/* --- whole exchanges ------------------------------------------------------------------------- */

/* Writes all that is queued. */
static int flush(struct redis_conn *c, uint64_t deadline_ns)
{
    bool done = false;
    int rc;

    for (;;) {
        rc = write_some(c, &done);
        if (rc < 0 || done) {
            return rc;
        }
        rc = redis_wait(c, POLLOUT, deadline_ns);
        if (rc < 0) {
            return rc;
        }
    }
}

static int read_reply(struct redis_conn *c, uint64_t deadline_ns, redisReply **ret_reply)
{
    int rc;

    for (;;) {
        rc = next_reply(c, ret_reply);
        if (rc < 0 || *ret_reply) {
            return rc;
        }
        rc = redis_wait(c, POLLIN, deadline_ns);
        if (rc == BT_OK) {
            rc = read_some(c);
        }
        if (rc < 0) {
            return rc;
        }
    }
}

int redis_receive(struct redis_conn *c,
                  uint64_t timeout_ns,
                  redisReply **ret_replies,
                  size_t n,
                  struct bt_err *err)
{
    uint64_t deadline_ns = bt_deadline_ns(timeout_ns);
    int rc = flush(c, deadline_ns);

    c->used_bytes = 0;
    memset(ret_replies, 0, n * sizeof(*ret_replies));
    for (size_t i = 0; rc == BT_OK && i < n; i++) {
        rc = read_reply(c, deadline_ns, &ret_replies[i]);
    }
    if (rc < 0) {
        redis_free_replies(ret_replies, n);
        return lost(c, rc, err);
    }
    return BT_OK;
}

void redis_free_replies(redisReply **replies, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        if (replies[i]) {
            freeReplyObject(replies[i]);
            replies[i] = NULL;
        }
    }
}

/* --- what servers refuse --------------------------------------------------------------------- */

static const struct refusal {
    const char *code;
    int rc;
    const char *advice;
} refusals[] = {
    {"LOADING", BT_E_UNAVAILABLE, "it is loading its data, wait for it"},
    {"READONLY", BT_E_UNAVAILABLE,
     "this is a read-only replica, point redis.address at the primary"},
    {"MASTERDOWN", BT_E_UNAVAILABLE,
     "this is a replica cut off from its primary, point redis.address at the primary"},
    {"OOM", BT_E_UNAVAILABLE, "its memory is full, raise its maxmemory or free some"},
    {"MISCONF", BT_E_UNAVAILABLE,
     "it cannot save to its disk and takes no writes, see its log or switch its saving off"},
    {"NOREPLICAS", BT_E_UNAVAILABLE,
     "it takes no writes without replicas, see its min-replicas-to-write"},
    {"BUSY", BT_E_UNAVAILABLE, "a script of somebody keeps it busy, see SCRIPT KILL"},
    {"MOVED", BT_E_UNAVAILABLE,
     "this is a node of a Redis cluster without the keys of this cluster.name, point redis.address "
     "at the node that it names"},
    {"ASK", BT_E_UNAVAILABLE, "this Redis cluster is moving the keys, wait for it"},
    {"TRYAGAIN", BT_E_UNAVAILABLE, "this Redis cluster is moving the keys, wait for it"},
    {"CLUSTERDOWN", BT_E_UNAVAILABLE, "its Redis cluster is down, mend that"},
    {"NOAUTH", BT_E_UNAUTHENTICATED,
     "it wants redis.password, and redis.user if that is not the "
     "default user"},
    {"WRONGPASS", BT_E_UNAUTHENTICATED,
     "redis.user or redis.password is wrong, or the user is switched off"},
    {"NOPERM", BT_E_DENIED, "redis.user lacks a right, common/cluster/README.md lists them"},
    {"DENIED", BT_E_DENIED, "it is in protected mode, give it a password or bind it to loopback"},
};

/* The code stands first, or, for errors from within a script of older servers, further inside. */
static const struct refusal *refusal_of(const char *text)
{
    for (size_t i = 0; i < BT_ARRAY_LEN(refusals); i++) {
        size_t n = strlen(refusals[i].code);
        const char *at = text;

        if (strncmp(text, "ERR", 3) == 0) {
            at = strstr(text, refusals[i].code);
        }
        if (at && strncmp(at, refusals[i].code, n) == 0 && at[n] == ' ') {
            return &refusals[i];
        }
    }
    return NULL;
}

int redis_refusal(const redisReply *reply, struct bt_err *err)
{
    const struct refusal *r = NULL;

    if (reply->type == REDIS_REPLY_ERROR) {
        r = refusal_of(reply->str);
    }
    return !r ? BT_OK
              : BT_FAIL(err, r->rc, "redis: %.*s: %s", (int)BT_MIN(reply->len, (size_t)60),
                        reply->str, r->advice);
}

struct bt_str redis_text(const redisReply *reply)
{
    if (reply->type == REDIS_REPLY_ERROR || reply->type == REDIS_REPLY_STATUS) {
        return (struct bt_str){reply->str, BT_MIN(reply->len, (size_t)120)};
    }
    return BT_STR("strange answer");
}

/* --- connecting ------------------------------------------------------------------------------ */

/* Where Redis is: "[redis[s]://]host:port" or "unix:/path". */
struct place {
    char host[256]; /* or path */
    uint16_t port;
    bool is_unix, tls;
};

static bool take_scheme(struct bt_str *s, const char *scheme)
{
    size_t n = strlen(scheme);

    if (s->n <= n || memcmp(s->p, scheme, n) != 0) {
        return false;
    }
    s->p += n;
    s->n -= n;
    return true;
}

static int read_place(const char *address, struct place *ret_place, struct bt_err *err)
{
    struct bt_str s = bt_str_of(address);
    struct place p = {.tls = take_scheme(&s, "rediss://")};
    bool plain = !p.tls && take_scheme(&s, "redis://");
    struct bt_addr a;

    if (bt_addr_read(s, &a) < 0 || a.host.n >= sizeof(p.host) || (!a.is_unix && a.port == 0) ||
        (a.is_unix && (p.tls || plain))) {
        return BT_FAIL(err, BT_E_CONFIG,
                       "redis.address = %.80s: must be host:port, rediss://host:port or unix:/path",
                       address);
    }
    memcpy(p.host, a.host.p, a.host.n);
    p.host[a.host.n] = '\0';
    p.port = a.port;
    p.is_unix = a.is_unix;
    *ret_place = p;
    return BT_OK;
}

int bt_cluster_conf_check(const struct bt_cluster_conf *conf, struct bt_err *err)
{
    const struct {
        const char *name, *path;
    } tls[] = {{"redis.tls_ca", conf->redis_tls_ca},
               {"redis.tls_cert", conf->redis_tls_cert},
               {"redis.tls_key", conf->redis_tls_key}};
    struct place p;
    int rc;

    if (!bt_member_name_ok(bt_str_of(conf->name))) {
        return BT_FAIL(err, BT_E_CONFIG,
                       "cluster.name = %.80s: must be 1 to %d letters, digits, '-', '_', '.'",
                       conf->name, BT_MEMBER_NAME_MAX);
    }
    if (!conf->redis_address[0]) {
        return BT_OK;
    }
    if (conf->redis_user[0] && !conf->redis_password[0]) {
        return BT_FAIL(err, BT_E_CONFIG, "redis.user without redis.password");
    }
    rc = read_place(conf->redis_address, &p, err);
    if (rc < 0 || p.tls) {
        return rc < 0 ? rc : redis_tls_check(conf, err);
    }
    for (size_t i = 0; i < BT_ARRAY_LEN(tls); i++) {
        if (tls[i].path && tls[i].path[0]) { /* nobody is to believe that this is encrypted */
            return BT_FAIL(err, BT_E_CONFIG,
                           "%s = %.60s, but redis.address = %.60s is without TLS (rediss://)",
                           tls[i].name, tls[i].path, conf->redis_address);
        }
    }
    return BT_OK;
}

/* Starts connecting and waits until the socket says how it went. */
static int dial(struct redis_conn *c, const struct redis_target *to, struct bt_err *err)
{
    const char *address = to->conf->redis_address;
    uint64_t deadline_ns;
    struct place p;
    int e = 0, rc;
    socklen_t n = sizeof(e);

    rc = read_place(address, &p, err);
    if (rc < 0) {
        return rc;
    }
    c->ctx = p.is_unix ? redisConnectUnixNonBlock(p.host) : redisConnectNonBlock(p.host, p.port);
    if (!c->ctx || redis_bound(c->ctx->reader) < 0) {
        return BT_FAIL(err, BT_E_NOMEM, "redis: out of memory");
    }
    if (c->ctx->err) {
        return BT_FAIL(err, BT_E_UNAVAILABLE, "redis %.80s: %s", address, c->ctx->errstr);
    }
    deadline_ns = bt_deadline_ns(to->timeout_ns);
    rc = redis_wait(c, POLLOUT, deadline_ns);
    if (rc == BT_OK && getsockopt(c->ctx->fd, SOL_SOCKET, SO_ERROR, &e, &n) != 0) {
        e = errno;
    }
    if (rc < 0 || e != 0) {
        return BT_FAIL(err, BT_E_UNAVAILABLE, "redis %.80s: %s", address,
                       e ? strerror(e) : bt_rc_text(rc));
    }
    c->ctx->flags |= REDIS_CONNECTED;
    return p.tls ? redis_tls_start(c, to->conf, p.host, deadline_ns, err) : BT_OK;
}

/* AUTH if there is a password, then PING: a server that is loading or wants a password refuses it.
 */
static int greet(struct redis_conn *c, const struct redis_target *to, struct bt_err *err)
{
    struct bt_str auth[3] = {BT_STR("AUTH")}, ping[1] = {BT_STR("PING")};
    const char *user = to->conf->redis_user, *password = to->conf->redis_password;
    redisReply *replies[2];
    size_t n = 0;
    int rc = BT_OK;

    if (password[0]) {
        bool named = user[0] != '\0';

        auth[1] = bt_str_of(named ? user : password);
        auth[2] = bt_str_of(password);
        rc = redis_send(c, named ? 3 : 2, auth);
        n++;
    }
    if (rc == BT_OK) {
        rc = redis_send(c, 1, ping);
        n++;
    }
    if (rc < 0) {
        return BT_FAIL(err, rc, "redis: out of memory");
    }
    rc = redis_receive(c, to->timeout_ns, replies, n, err);
    if (rc < 0) {
        return rc;
    }
    for (size_t i = 0; rc == BT_OK && i < n; i++) {
        rc = redis_refusal(replies[i], err);
        if (rc == BT_OK && replies[i]->type != REDIS_REPLY_STATUS) {
            struct bt_str text = redis_text(replies[i]);

            rc = BT_FAIL(err, i + 1 < n ? BT_E_UNAUTHENTICATED : BT_E_UNAVAILABLE,
                         "redis %.60s: %.*s", to->conf->redis_address, (int)text.n, text.p);
        }
    }
    redis_free_replies(replies, n);
    return rc;
}

int redis_open(struct redis_conn *c, const struct redis_target *to, struct bt_err *err)
{
    int rc = dial(c, to, err);

    if (rc == BT_OK) {
        rc = greet(c, to, err);
    }
    if (rc < 0) {
        redis_close(c);
    }
    return rc;
}

/* --- small helpers --------------------------------------------------------------------------- */

uint64_t redis_random(void)
{
    uint64_t v = 0;

    if (getrandom(&v, sizeof(v), GRND_NONBLOCK) != (ssize_t)sizeof(v)) {
        v = bt_now_ns() * 0x9e3779b97f4a7c15ull;
    }
    return v;
}

void redis_random_text(char ret_text[33])
{
    snprintf(ret_text, 33, "%016" PRIx64 "%016" PRIx64, redis_random(), redis_random());
}

uint64_t redis_jitter(uint64_t ns)
{
    return ns - redis_random() % (ns / 4 + 1);
}

void redis_pause_reset(struct redis_pause *p)
{
    p->len_ns = PAUSE_FIRST_NS;
}

void redis_pause_grow(struct redis_pause *p, uint64_t lease_ns)
{
    uint64_t max = BT_MIN(lease_ns / 3, PAUSE_MAX_NS);

    p->next_ns = bt_now_ns() + redis_jitter(BT_MIN(p->len_ns, max));
    p->len_ns = BT_MIN(p->len_ns * 2, max);
}

struct bt_str
redis_key(const struct bt_cluster_conf *conf, const char *what, const char *name, char *buf)
{
    int n = snprintf(buf, REDIS_KEY_MAX, "baton:{%s}:%s%s", conf->name, what, name);

    return (struct bt_str){buf, (size_t)n};
}
