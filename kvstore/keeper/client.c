/* Client of the keeper (contract in client.h).
 *
 * Every region has a descriptor of ours besides the one that is mapped: it is what is registered
 * with the next keeper. The thread "keeper" sleeps in poll until the connection ends, then tries
 * again, after 10 ms at first and a second at most. A keeper that accepts but does not answer
 * counts as none. */
#include "kvstore/keeper/client.h"

#include "common/base/buf.h"
#include "common/obs/log.h"
#include "common/thr/mailbox.h"
#include "common/thr/thread.h"
#include "common/thr/time.h"
#include "kvstore/keeper/sock.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/random.h>
#include <unistd.h>

#define ANSWER_NS    (2 * BT_NS_PER_S) /* a keeper that takes longer counts as none */
#define PAUSE_MIN_NS (10 * BT_NS_PER_MS)
#define PAUSE_MAX_NS (1 * BT_NS_PER_S)

struct item {
    struct kv_keeper_request request; /* to register it */
    int fd;
    bool registered; /* with the keeper that we are connected to */
};

struct kv_keeper {
    char socket[sizeof(((struct sockaddr_un *)0)->sun_path)];
    char node[KV_KEEPER_NODE];
    uint64_t incarnation, wait_ns;
    int sock; /* -1 = not connected */
    int wake_fd;
    uint32_t n_items;
    struct item items[KV_KEEPER_MAX_REGIONS];
    pthread_t thread;
    bool started;
    atomic_bool stop;    /* release by close, acquire by the thread */
    atomic_bool has_all; /* relaxed: a report */
    int last_rc;         /* of the last attempt: a change is logged */
    bool away;           /* no keeper was there when the first region was asked for */
};

/* ---- talking ---- */

static void hang_up(struct kv_keeper *k)
{
    bt_close_fd(&k->sock);
    k->sock = -1;
    for (uint32_t i = 0; i < k->n_items; i++) {
        k->items[i].registered = false;
    }
    atomic_store_explicit(&k->has_all, false, memory_order_relaxed);
}

/* The answer to what was asked; its descriptors are the caller's on BT_OK. A refusal becomes its
 * code and text. */
static int hear(int sock,
                enum kv_keeper_type type,
                uint64_t deadline_ns,
                struct kv_packet *ret,
                struct bt_err *err)
{
    int rc = kv_sock_wait(sock, deadline_ns);

    if (rc < 0) {
        return BT_FAIL(err, rc, "the keeper does not answer");
    }
    rc = kv_sock_recv(sock, ret);
    if (rc != BT_OK) {
        return BT_FAIL(err, BT_E_PEER_LOST, "the keeper has gone");
    }
    if (kv_packet_is(ret, type)) {
        return BT_OK;
    }
    kv_packet_drop(ret);
    if (kv_packet_is(ret, KV_KEEPER_REFUSED) && ret->refused.rc < 0) {
        return BT_FAIL(err, ret->refused.rc, "keeper: %.*s",
                       (int)strnlen(ret->refused.text, sizeof(ret->refused.text)),
                       ret->refused.text);
    }
    return BT_FAIL(err, BT_E_PEER_PROTOCOL, "the keeper's answer is not of this version");
}

static int greet(struct kv_keeper *k, struct bt_err *err)
{
    struct kv_keeper_hello m = {.incarnation = k->incarnation};
    struct kv_packet p;
    int rc;

    memcpy(m.node, k->node, sizeof(m.node));
    rc = kv_sock_send(k->sock, KV_KEEPER_HELLO, &m, sizeof(m), -1);
    /* One that turns us away may have closed already; its reason is still to be read. */
    rc = rc == BT_E_UNAVAILABLE
             ? BT_FAIL(err, rc, "the keeper does not read")
             : hear(k->sock, KV_KEEPER_WELCOME, bt_deadline_ns(ANSWER_NS), &p, err);
    if (rc == BT_OK) {
        kv_packet_drop(&p);
    }
    return rc;
}

static int dial(struct kv_keeper *k, struct bt_err *err)
{
    int rc = kv_sock_connect(k->socket, &k->sock, err);

    if (rc < 0) {
        k->sock = -1;
        return rc;
    }
    rc = greet(k, err);
    if (rc < 0) {
        hang_up(k);
    }
    return rc;
}

/* ---- one region ---- */

static int make_request(const struct kv_keeper *k,
                        const struct kv_keeper_want *w,
                        struct kv_keeper_request *ret,
                        struct bt_err *err)
{
    size_t n = strlen(w->name);

    *ret = (struct kv_keeper_request){
        .bytes = w->bytes, .kind = w->ops->kind, .wait_ms = k->wait_ns / BT_NS_PER_MS};
    memcpy(ret->digest, w->digest, sizeof(ret->digest));
    memcpy(ret->region, w->name, BT_MIN(n, sizeof(ret->region)));
    if (!kv_keeper_name_ok(ret->region, sizeof(ret->region)) || !w->ops->import || w->bytes == 0) {
        return BT_FAIL(err, BT_E_INVALID, "region %.40s: bad name, kind or size", w->name);
    }
    return BT_OK;
}

/* Asks the keeper. */
static int ask(struct kv_keeper *k,
               const struct kv_keeper_want *w,
               struct kv_keeper_request *q,
               struct kv_keeper_got *ret,
               struct bt_err *err)
{
    uint64_t limit = k->wait_ns < BT_NEVER_NS - ANSWER_NS ? k->wait_ns + ANSWER_NS : BT_NEVER_NS;
    struct kv_packet p;
    int rc;

    if (k->away) {
        return BT_FAIL(err, BT_E_UNAVAILABLE, "there was no keeper a moment ago");
    }
    rc = k->sock >= 0 ? BT_OK : dial(k, err);
    if (rc < 0) {
        return rc;
    }
    rc = kv_sock_send(k->sock, KV_KEEPER_GET, q, sizeof(*q), -1);
    rc = rc < 0 ? BT_FAIL(err, rc, "the keeper does not read")
                : hear(k->sock, KV_KEEPER_GRANT, bt_deadline_ns(limit), &p, err);
    if (rc < 0) {
        if (rc != BT_E_EXISTS && rc != BT_E_EXHAUSTED && rc != BT_E_UNSUPPORTED) {
            hang_up(k);
        }
        return rc;
    }
    if (p.n_fds != 1 || p.grant.bytes < w->bytes) {
        kv_packet_drop(&p);
        hang_up(k);
        return BT_FAIL(err, BT_E_PEER_PROTOCOL, "the keeper's grant is not what was asked for");
    }
    rc = w->ops->import(p.fds[0], w->bytes, w->name, &ret->mem, err);
    if (rc < 0) {
        kv_packet_drop(&p);
        hang_up(k);
        return rc;
    }
    ret->id = p.grant.id;
    ret->previous = p.grant.previous;
    ret->kept = p.grant.kept;
    ret->from_keeper = true;
    return BT_OK;
}

static int make_own(const struct kv_keeper_want *w, struct kv_keeper_got *ret, struct bt_err *err)
{
    int rc = w->ops->alloc(w->bytes, w->name, &ret->mem, err);

    if (rc == BT_OK && getrandom(&ret->id, sizeof(ret->id), 0) != (ssize_t)sizeof(ret->id)) {
        w->ops->free(&ret->mem);
        rc = BT_FAIL_SYS(err, BT_E_SYS, "getrandom");
    }
    return rc;
}

int kv_keeper_get(struct kv_keeper *k,
                  const struct kv_keeper_want *w,
                  struct kv_keeper_got *ret,
                  struct bt_err *err)
{
    struct kv_keeper_got got = {.mem.fd = -1};
    struct item *it = &k->items[k->n_items];
    struct bt_err why = {.rc = BT_OK};
    char text[sizeof(why.msg)];
    int rc;

    BT_BUG_ON(k->started);
    if (k->n_items == KV_KEEPER_MAX_REGIONS) {
        return BT_FAIL(err, BT_E_EXHAUSTED, "more than %d regions", KV_KEEPER_MAX_REGIONS);
    }
    rc = make_request(k, w, &it->request, err);
    if (rc < 0) {
        return rc;
    }
    rc = ask(k, w, &it->request, &got, &why);
    if (rc == BT_E_UNSUPPORTED && w->ops->kind != BT_MEM_HOST) {
        rc = make_own(w, &got, err); /* as agreed: the keeper gets it when it is filled */
        if (rc < 0) {
            return rc;
        }
    } else if (rc < 0) {
        BT_WARN("keeper", "region=%s rc=%s msg=\"memory of our own: %s\"", w->name, bt_rc_name(rc),
                bt_log_quotable(bt_err_msg(&why, rc), text, sizeof(text)));
        k->last_rc = rc;
        k->away = k->sock < 0;
        k->wait_ns = 0; /* once is enough */
        rc = make_own(w, &got, err);
        if (rc < 0) {
            return rc;
        }
    }
    it->fd = fcntl(got.mem.fd, F_DUPFD_CLOEXEC, 3);
    if (it->fd < 0) {
        rc = BT_FAIL_SYS(err, BT_E_SYS, "region %s: descriptor", w->name);
        w->ops->free(&got.mem);
        return rc;
    }
    it->request.id = got.id;
    it->registered = got.from_keeper;
    k->n_items++;
    *ret = got;
    return BT_OK;
}

/* ---- the thread ---- */

static int register_one(struct kv_keeper *k, struct item *it, struct bt_err *err)
{
    struct kv_keeper_request q = it->request;
    struct kv_packet p;
    int rc = kv_sock_send(k->sock, KV_KEEPER_REGISTER, &q, sizeof(q), it->fd);

    rc = rc < 0 ? BT_FAIL(err, rc, "the keeper does not read")
                : hear(k->sock, KV_KEEPER_GRANT, bt_deadline_ns(ANSWER_NS), &p, err);
    if (rc == BT_OK) {
        kv_packet_drop(&p);
        it->registered = true;
    }
    return rc;
}

/* Connects if need be and registers what is not: BT_OK if a keeper has everything. */
static int settle(struct kv_keeper *k, struct bt_err *err)
{
    int rc = k->sock >= 0 ? BT_OK : dial(k, err);

    for (uint32_t i = 0; rc == BT_OK && i < k->n_items; i++) {
        if (!k->items[i].registered) {
            rc = register_one(k, &k->items[i], err);
        }
    }
    if (rc < 0 && rc != BT_E_EXISTS && rc != BT_E_EXHAUSTED && rc != BT_E_UNSUPPORTED) {
        hang_up(k);
    }
    atomic_store_explicit(&k->has_all, rc == BT_OK, memory_order_relaxed);
    return rc;
}

static void tell(struct kv_keeper *k, int rc, const struct bt_err *err)
{
    char text[sizeof(err->msg)];

    if (rc == k->last_rc) {
        return;
    }
    k->last_rc = rc;
    if (rc == BT_OK) {
        BT_INFO("keeper", "regions=%u msg=\"holds our memory\"", k->n_items);
    } else {
        BT_WARN("keeper", "rc=%s msg=\"our memory ends with us: %s\"", bt_rc_name(rc),
                bt_log_quotable(bt_err_msg(err, rc), text, sizeof(text)));
    }
}

/* Sleeps until the connection speaks (which only an end does), close wakes us, or the pause is
 * over. Returns whether the connection spoke. */
static bool rest(struct kv_keeper *k, uint64_t pause_ns)
{
    struct pollfd fds[] = {{.fd = k->wake_fd, .events = POLLIN}, {.fd = k->sock, .events = POLLIN}};
    struct timespec ts = {.tv_sec = (time_t)(pause_ns / BT_NS_PER_S),
                          .tv_nsec = (long)(pause_ns % BT_NS_PER_S)};

    return ppoll(fds, 2, pause_ns == BT_NEVER_NS ? NULL : &ts, NULL) > 0 && fds[1].revents != 0;
}

static void *keeper_main(void *arg)
{
    struct kv_keeper *k = arg;
    uint64_t pause = PAUSE_MIN_NS;

    /* Pairs with the release in close. */
    while (!atomic_load_explicit(&k->stop, memory_order_acquire)) {
        struct bt_err err = {.rc = BT_OK};
        int rc = settle(k, &err);

        tell(k, rc, &err);
        if (rc == BT_OK) {
            pause = PAUSE_MIN_NS;
            if (rest(k, BT_NEVER_NS)) {
                hang_up(k);
            }
            continue;
        }
        if (rest(k, pause)) {
            hang_up(k);
        }
        pause = BT_MIN(2 * pause, PAUSE_MAX_NS);
    }
    return NULL;
}

/* ---- life ---- */

int kv_keeper_open(const struct kv_keeper_cfg *cfg, struct kv_keeper **ret, struct bt_err *err)
{
    size_t n = strlen(cfg->node);
    struct kv_keeper *k = bt_calloc(1, sizeof(*k));
    struct sockaddr_un sa;
    int rc;

    if (!k) {
        return BT_FAIL(err, BT_E_NOMEM, "keeper: no memory");
    }
    k->sock = k->wake_fd = -1;
    k->incarnation = cfg->incarnation;
    k->wait_ns = cfg->wait_ns;
    memcpy(k->node, cfg->node, BT_MIN(n, sizeof(k->node)));
    rc = kv_sock_address(cfg->socket, &sa, err);
    if (rc == BT_OK && (!kv_keeper_name_ok(k->node, sizeof(k->node)) || cfg->incarnation == 0)) {
        rc = BT_FAIL(err, BT_E_CONFIG, "keeper: node name %.80s", cfg->node);
    }
    if (rc == BT_OK) {
        snprintf(k->socket, sizeof(k->socket), "%s", cfg->socket);
        rc = bt_eventfd_create(&k->wake_fd, err);
    }
    if (rc < 0) {
        kv_keeper_close(k);
        return rc;
    }
    *ret = k;
    return BT_OK;
}

int kv_keeper_start(struct kv_keeper *k, struct bt_err *err)
{
    int rc;

    BT_BUG_ON(k->started);
    rc = bt_thread_start(&k->thread, "keeper", keeper_main, k, err);
    k->started = rc == BT_OK;
    return rc;
}

void kv_keeper_close(struct kv_keeper *k)
{
    if (!k) {
        return;
    }
    if (k->started) {
        atomic_store_explicit(&k->stop, true, memory_order_release);
        bt_eventfd_wake(&k->wake_fd);
        pthread_join(k->thread, NULL);
    }
    hang_up(k);
    for (uint32_t i = 0; i < k->n_items; i++) {
        bt_close_fd(&k->items[i].fd);
    }
    bt_close_fd(&k->wake_fd);
    free(k);
}

uint64_t kv_keeper_incarnation(const struct kv_keeper *k)
{
    return k->incarnation;
}

bool kv_keeper_has_all(const struct kv_keeper *k)
{
    return atomic_load_explicit(&k->has_all, memory_order_relaxed);
}

/* ---- listing ---- */

static int list(int sock,
                uint64_t deadline_ns,
                struct kv_keeper_row *rows,
                size_t max,
                size_t *ret_n,
                struct bt_err *err)
{
    struct kv_keeper_head m;
    struct kv_packet p = {0};
    size_t n = 0;
    int rc = kv_sock_send(sock, KV_KEEPER_STATUS, &m, sizeof(m), -1);

    if (rc == BT_E_UNAVAILABLE) {
        return BT_FAIL(err, rc, "the keeper does not read");
    }
    while (!p.rows.last) {
        rc = hear(sock, KV_KEEPER_ROWS, deadline_ns, &p, err);
        if (rc < 0) {
            return rc;
        }
        kv_packet_drop(&p);
        if (!p.rows.last && bt_now_ns() >= deadline_ns) {
            return BT_FAIL(err, BT_E_DEADLINE, "the keeper's list does not end");
        }
        for (uint32_t i = 0; i < BT_MIN(p.rows.n, (uint32_t)KV_KEEPER_ROWS_MAX) && n < max; i++) {
            rows[n++] = p.rows.rows[i];
        }
    }
    *ret_n = n;
    return BT_OK;
}

int kv_keeper_list(const char *socket,
                   uint64_t limit_ns,
                   struct kv_keeper_row *rows,
                   size_t max,
                   size_t *ret_n,
                   struct bt_err *err)
{
    int sock, rc = kv_sock_connect(socket, &sock, err);

    if (rc < 0) {
        return rc;
    }
    rc = list(sock, bt_deadline_ns(limit_ns), rows, max, ret_n, err);
    close(sock);
    return rc;
}
