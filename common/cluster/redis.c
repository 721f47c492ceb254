/* One connection to Redis; deadlines by poll(2) around hiredis in non-blocking mode. */
#include "common/cluster/redis_int.h"

#include "common/conf/value.h"
#include "common/thr/time.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <sys/socket.h>

#define ARGS_MAX 16

/* Waits for `events`; BT_E_DEADLINE when the time is over. */
static int wait_fd(int fd, short events, uint64_t deadline_ns)
{
    for (;;) {
        struct pollfd p = {fd, events, 0};
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

void redis_close(struct redis_conn *c)
{
    if (c->ctx) {
        redisFree(c->ctx);
        c->ctx = NULL;
    }
}

int redis_send(struct redis_conn *c, int argc, const struct bt_str *argv)
{
    const char *parts[ARGS_MAX];
    size_t lens[ARGS_MAX];

    BT_BUG_ON(argc > ARGS_MAX);
    for (int i = 0; i < argc; i++) {
        parts[i] = argv[i].p;
        lens[i] = argv[i].n;
    }
    return redisAppendCommandArgv(c->ctx, argc, parts, lens) == REDIS_OK ? BT_OK : BT_E_NOMEM;
}

/* Writes all that is queued. */
static int flush(struct redis_conn *c, uint64_t deadline_ns)
{
    int done = 0, rc;

    for (;;) {
        if (redisBufferWrite(c->ctx, &done) != REDIS_OK) {
            return BT_E_IO;
        }
        if (done) {
            return BT_OK;
        }
        rc = wait_fd(c->ctx->fd, POLLOUT, deadline_ns);
        if (rc < 0) {
            return rc;
        }
    }
}

/* One reply; *used counts the bytes of the exchange. */
static int read_reply(struct redis_conn *c, uint64_t deadline_ns, size_t *used, redisReply **ret)
{
    void *reply = NULL;
    size_t before;
    int rc;

    for (;;) {
        if (redisGetReplyFromReader(c->ctx, &reply) != REDIS_OK) {
            return BT_E_IO;
        }
        if (reply) {
            *ret = reply;
            return BT_OK;
        }
        rc = wait_fd(c->ctx->fd, POLLIN, deadline_ns);
        if (rc < 0) {
            return rc;
        }
        before = c->ctx->reader->len;
        if (redisBufferRead(c->ctx) != REDIS_OK) {
            return BT_E_IO;
        }
        *used += c->ctx->reader->len - before;
        if (*used > REDIS_REPLY_MAX) {
            return BT_E_TOO_LARGE;
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
    size_t used = 0;
    int rc = flush(c, deadline_ns);

    memset(ret_replies, 0, n * sizeof(*ret_replies));
    for (size_t i = 0; rc == BT_OK && i < n; i++) {
        rc = read_reply(c, deadline_ns, &used, &ret_replies[i]);
    }
    if (rc < 0) {
        if (rc == BT_E_IO) {
            BT_FAIL(err, BT_E_UNAVAILABLE, "redis: %s",
                    c->ctx->errstr[0] ? c->ctx->errstr : "connection lost");
        } else {
            BT_FAIL(err, BT_E_UNAVAILABLE, "redis: %s", bt_rc_text(rc));
        }
        redis_free_replies(ret_replies, n);
        redis_close(c);
        return BT_E_UNAVAILABLE;
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

/* Starts connecting and waits until the socket says how it went. */
static int dial(struct redis_conn *c, const struct redis_target *to, struct bt_err *err)
{
    struct bt_addr a;
    char host[256];
    int e = 0, rc;
    socklen_t n = sizeof(e);

    rc = bt_addr_read(bt_str_of(to->address), &a);
    if (rc < 0 || a.host.n >= sizeof(host)) {
        return BT_FAIL(err, BT_E_CONFIG, "redis.address = %.80s: malformed", to->address);
    }
    memcpy(host, a.host.p, a.host.n);
    host[a.host.n] = '\0';
    c->ctx = a.is_unix ? redisConnectUnixNonBlock(host) : redisConnectNonBlock(host, a.port);
    if (!c->ctx) {
        return BT_FAIL(err, BT_E_NOMEM, "redis: out of memory");
    }
    if (c->ctx->err) {
        return BT_FAIL(err, BT_E_UNAVAILABLE, "redis %.80s: %s", to->address, c->ctx->errstr);
    }
    rc = wait_fd(c->ctx->fd, POLLOUT, bt_deadline_ns(to->timeout_ns));
    if (rc == BT_OK && getsockopt(c->ctx->fd, SOL_SOCKET, SO_ERROR, &e, &n) != 0) {
        e = errno;
    }
    if (rc < 0 || e != 0) {
        return BT_FAIL(err, BT_E_UNAVAILABLE, "redis %.80s: %s", to->address,
                       e ? strerror(e) : bt_rc_text(rc));
    }
    c->ctx->flags |= REDIS_CONNECTED;
    return BT_OK;
}

/* AUTH if there is a password, then PING: a server that is loading or wants a password refuses it.
 */
static int greet(struct redis_conn *c, const struct redis_target *to, struct bt_err *err)
{
    struct bt_str auth[3] = {BT_STR("AUTH")}, ping[1] = {BT_STR("PING")};
    redisReply *replies[2];
    size_t n = 0;
    int rc = BT_OK;

    if (to->password[0]) {
        bool named = to->user[0] != '\0';

        auth[1] = bt_str_of(named ? to->user : to->password);
        auth[2] = bt_str_of(to->password);
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
    for (size_t i = 0; i < n; i++) {
        if (replies[i]->type != REDIS_REPLY_STATUS) {
            rc = BT_FAIL(err, i + 1 < n ? BT_E_UNAUTHENTICATED : BT_E_UNAVAILABLE,
                         "redis %.60s: %.*s", to->address,
                         replies[i]->str ? (int)BT_MIN(replies[i]->len, (size_t)100) : 14,
                         replies[i]->str ? replies[i]->str : "strange answer");
            break;
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
