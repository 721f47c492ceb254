/* Messages, one-sided access, closing and hostile connections, over real UCX. */
#include "tests/unit/cmocka.h"

#include "common/base/buf.h"
#include "common/mem/mem.h"
#include "common/obs/log.h"
#include "tests/unit/common/net/side.h"

#include <arpa/inet.h>
#include <dirent.h>
#include <errno.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

enum { BIG = 8 << 20 };

struct side {
    struct bt_net *net;
    struct bt_net_peer *peer; /* the last accepted or connected */
    int accepted, messages, closed, done, failed;
    int closed_rc, bad;
    uint32_t next; /* expected number of the next message */
    size_t bytes;  /* of message data */
    bool echo;
    bool quiet; /* count only: messages of several connections may overlap */
    bool slow;  /* naps now and then: who sends has to wait for room */
    struct bt_mem_region mem;
    struct bt_net_mem *reg;
    struct bt_str key;
    struct bt_net_rkey *rkey;
    const char *address;
    int rc;
    struct bt_err err;
    const struct side *other;
    uint64_t t_ns;
};

static void on_accepted(void *arg, struct bt_net_peer *peer)
{
    struct side *s = arg;

    __atomic_store_n(&s->peer, peer, __ATOMIC_RELEASE);
    INC(s->accepted);
}

static void on_message(void *arg, struct bt_net_peer *peer, struct bt_str head, struct bt_str data)
{
    struct side *s = arg;
    uint32_t n = 0;

    if (s->quiet) {
        INC(s->messages);
        return;
    }
    if (head.n >= 4) {
        memcpy(&n, head.p, 4);
    }
    s->bad += n != s->next;
    for (size_t i = 0; i < data.n; i += 997) {
        s->bad += data.p[i] != (char)(n + i);
    }
    s->next++;
    s->bytes += data.n;
    if (s->slow && s->next % 16 == 0) {
        side_nap();
    }
    if (s->echo) {
        s->bad += bt_net_send(peer, head, (struct bt_str){0}, NULL, NULL) != BT_OK;
    }
    INC(s->messages);
}

static void on_closed(void *arg, struct bt_net_peer *peer, int rc)
{
    struct side *s = arg;

    s->closed_rc = rc;
    if (s->peer == peer) {
        __atomic_store_n(&s->peer, NULL, __ATOMIC_RELEASE);
    }
    INC(s->closed);
}

static void on_done(void *arg, int rc)
{
    struct side *s = arg;

    if (rc != BT_OK) {
        INC(s->failed);
    }
    INC(s->done);
}

static const char *listen_on = "127.0.0.1:0";

static int side_open(struct side *s, const char *transports)
{
    const struct bt_net_cfg cfg = {.listen = listen_on,
                                   .transports = transports,
                                   .allow_insecure = true,
                                   .max_message_bytes = 4 << 20};
    const struct bt_net_handlers on = {s, on_accepted, on_message, on_closed};
    struct bt_err err = {0};
    int rc;

    *s = (struct side){0};
    rc = bt_net_create(&cfg, &on, &s->net, &err);
    if (rc != BT_OK) {
        fprintf(stderr, "%s\n", err.msg);
    }
    return rc;
}

static void do_connect(void *arg)
{
    struct side *s = arg;

    s->rc = bt_net_connect(s->net, s->address, &s->peer, &s->err);
}

static void connect_sides(struct side *a, struct side *b)
{
    a->address = bt_net_address(b->net);
    side_on_net(a->net, do_connect, a);
    assert_int_equal(a->rc, BT_OK);
}

static void do_send_one(void *arg)
{
    struct side *s = arg;

    s->rc = bt_net_send(s->peer, (struct bt_str){"\0\0\0", 4}, (struct bt_str){0}, NULL, NULL);
}

/* As above, and waits until both know that they are connected: a does when it hears of b. */
static void bring_up(struct side *a, struct side *b)
{
    connect_sides(a, b);
    assert_true(EVENTUALLY(LOAD(b->accepted) == 1));
    side_on_net(b->net, do_send_one, b);
    assert_int_equal(b->rc, BT_OK);
    assert_true(EVENTUALLY(LOAD(a->messages) == 1));
}

static void do_close(void *arg)
{
    struct side *s = arg;

    if (s->peer) {
        bt_net_peer_close(s->peer, true);
    }
}

/* Counters that the net's thread uses change on it. */
static void do_reset(void *arg)
{
    struct side *s = arg;

    s->next = 0;
    s->messages = 0;
}

static void do_echo(void *arg)
{
    ((struct side *)arg)->echo = true;
}

static void do_quiet(void *arg)
{
    ((struct side *)arg)->quiet = true;
}

static void do_slow(void *arg)
{
    ((struct side *)arg)->slow = true;
}

static void do_soft_close(void *arg)
{
    struct side *s = arg;

    if (s->peer) {
        bt_net_peer_close(s->peer, false);
        bt_net_peer_close(s->peer, false);
    }
}

/* Sizes around every protocol switch of UCX: short, bcopy, zcopy, several fragments. */
static const size_t sizes[] = {0, 1, 100, 2000, 8000, 8200, 60000, 65536, 70000, 1 << 20, 4 << 20};
static char *pattern; /* byte i is (char)i */

static void do_send_sizes(void *arg)
{
    struct side *s = arg;

    for (uint32_t i = 0; i < BT_ARRAY_LEN(sizes); i++) {
        struct bt_str data = {pattern + i, sizes[i]};

        s->rc |= bt_net_send(s->peer, (struct bt_str){(char *)&i, 4}, data, on_done, s);
    }
}

static void do_send_many(void *arg)
{
    struct side *s = arg;

    for (uint32_t i = 0; i < 3000; i++) {
        struct bt_str data = {pattern + i % 256, i % 7 ? i % 64 : 60000 + i % 100};

        s->rc |= bt_net_send(s->peer, (struct bt_str){(char *)&i, 4}, data, on_done, s);
    }
}

static void do_send_too_long(void *arg)
{
    static char head[BT_NET_MAX_HEAD + 1];
    struct side *s = arg;

    s->rc = bt_net_send(s->peer, (struct bt_str){head, sizeof(head)}, BT_STR(""), NULL, NULL);
    s->bad += s->rc != BT_E_TOO_LARGE;
    s->rc = bt_net_send(s->peer, BT_STR(""), (struct bt_str){pattern, (4 << 20) + 1}, NULL, NULL);
}

static void messages_over(const char *transports, const char *name)
{
    struct side a, b;

    assert_int_equal(side_open(&a, transports), BT_OK);
    assert_int_equal(side_open(&b, transports), BT_OK);
    connect_sides(&a, &b);
    side_on_net(a.net, do_send_sizes, &a);
    assert_int_equal(a.rc, BT_OK);
    assert_true(EVENTUALLY(LOAD(b.messages) == (int)BT_ARRAY_LEN(sizes)));
    assert_true(EVENTUALLY(LOAD(a.done) == (int)BT_ARRAY_LEN(sizes)));
    assert_int_equal(b.bad, 0);
    assert_int_equal(b.accepted, 1);
    assert_string_equal(bt_net_peer_transport(a.peer), name);

    /* Many, in order, both ways. */
    a.rc = 0;
    side_on_net(a.net, do_reset, &a);
    side_on_net(b.net, do_reset, &b);
    side_on_net(b.net, do_echo, &b);
    side_on_net(a.net, do_send_many, &a);
    assert_int_equal(a.rc, BT_OK);
    assert_true(EVENTUALLY(LOAD(a.messages) == 3000));
    assert_true(EVENTUALLY(LOAD(b.messages) == 3000)); /* counted after it has answered */
    assert_int_equal(a.bad + b.bad + a.failed, 0);
    side_on_net(a.net, do_send_too_long, &a);
    assert_int_equal(a.rc, BT_E_TOO_LARGE);
    assert_int_equal(a.bad, 0);

    side_on_net(a.net, do_soft_close, &a);
    assert_true(EVENTUALLY(LOAD(a.closed) == 1 && LOAD(b.closed) == 1));
    assert_int_equal(a.closed_rc, BT_OK);
    assert_int_equal(b.closed_rc, BT_E_PEER_LOST);
    bt_net_destroy(a.net);
    bt_net_destroy(b.net);
}

static void test_messages_tcp(void **state)
{
    messages_over("tcp", "tcp");
}

static void test_messages_shm(void **state)
{
    messages_over("auto", "shm");
}

struct flood {
    struct bt_net_timer timer;
    struct side *s;
    uint32_t sent, done;
};

enum { FLOOD = 6000, FLOOD_AT_ONCE = 300 };

static void on_flooded(void *arg, int rc);

static void flood_one(struct flood *k)
{
    struct side *s = k->s;
    struct bt_str data = {pattern + k->sent % 256, k->sent % 5 ? k->sent % 64 : 20000};
    uint32_t n = k->sent++;

    s->bad += bt_net_send(s->peer, (struct bt_str){(char *)&n, 4}, data, on_flooded, k) != BT_OK;
}

/* The end of one begins the next, while those between wait for room. */
static void on_flooded(void *arg, int rc)
{
    struct flood *k = arg;

    k->done++;
    if (k->sent < FLOOD && k->sent - k->done < FLOOD_AT_ONCE) {
        flood_one(k);
    }
    on_done(k->s, rc);
}

/* Once in each round of the loop. */
static void on_flood(struct bt_net_timer *t)
{
    struct flood *k = BT_CONTAINER_OF(t, struct flood, timer);

    if (k->sent < FLOOD && k->sent - k->done < FLOOD_AT_ONCE) {
        flood_one(k);
    }
    if (k->sent < FLOOD) {
        bt_net_timer_start(k->s->net, t, 0);
    }
}

static void do_flood(void *arg)
{
    struct flood *k = arg;

    k->timer.fn = on_flood;
    on_flood(&k->timer);
}

/* Messages that wait for room in the other side's queue are overtaken by none: not in later rounds,
 * and not from the callback of one that has just found room. */
static void order_over(const char *transports)
{
    struct side a, b;
    struct flood k = {.s = &a};

    assert_int_equal(side_open(&a, transports), BT_OK);
    assert_int_equal(side_open(&b, transports), BT_OK);
    bring_up(&a, &b);
    side_on_net(b.net, do_slow, &b);
    side_on_net(a.net, do_reset, &a);
    side_on_net(a.net, do_flood, &k);
    assert_true(EVENTUALLY(LOAD(b.messages) == FLOOD || LOAD(b.closed)));
    assert_int_equal(LOAD(b.closed), 0);
    assert_true(EVENTUALLY(LOAD(a.done) == FLOOD));
    assert_int_equal(a.bad + a.failed + b.bad, 0);
    bt_net_destroy(a.net);
    bt_net_destroy(b.net);
}

static void test_order_while_there_is_no_room_tcp(void **state)
{
    order_over("tcp");
}

static void test_order_while_there_is_no_room_shm(void **state)
{
    order_over("auto");
}

/* An address of a real interface, and all interfaces at once. */
static void test_other_addresses(void **state)
{
    struct ifaddrs *all = NULL;
    static char address[64];
    struct side a, b;

    assert_int_equal(getifaddrs(&all), 0);
    for (struct ifaddrs *i = all; i; i = i->ifa_next) {
        if (i->ifa_addr && i->ifa_addr->sa_family == AF_INET && (i->ifa_flags & IFF_UP) &&
            !(i->ifa_flags & IFF_LOOPBACK)) {
            inet_ntop(AF_INET, &((struct sockaddr_in *)i->ifa_addr)->sin_addr, address, 60);
        }
    }
    freeifaddrs(all);
    for (int round = 0; round < 4; round++) {
        char to[128];

        if (round < 2 && !address[0]) {
            printf("# no interface besides loopback\n");
            continue;
        }
        snprintf(to, sizeof(to), "%s:0", round < 2 ? address : "0.0.0.0");
        listen_on = to;
        assert_int_equal(side_open(&a, round % 2 ? "auto" : "tcp"), BT_OK);
        assert_int_equal(side_open(&b, round % 2 ? "auto" : "tcp"), BT_OK);
        listen_on = "127.0.0.1:0";
        snprintf(to, sizeof(to), "%s%s", address[0] ? address : "127.0.0.1",
                 strchr(bt_net_address(b.net), ':'));
        a.address = to;
        side_on_net(a.net, do_connect, &a);
        assert_int_equal(a.rc, BT_OK);
        side_on_net(a.net, do_send_sizes, &a);
        assert_true(EVENTUALLY(LOAD(b.messages) == (int)BT_ARRAY_LEN(sizes)));
        assert_int_equal(b.bad, 0);
        bt_net_destroy(a.net);
        bt_net_destroy(b.net);
    }
}

static void do_register(void *arg)
{
    struct side *s = arg;

    s->rc = bt_net_mem_register(s->net, s->mem.base, s->mem.bytes, &s->reg, &s->key, &s->err);
}

static void do_unregister(void *arg)
{
    struct side *s = arg;

    bt_net_mem_unregister(s->reg);
}

static void do_unpack(void *arg)
{
    struct side *s = arg;

    s->rc = bt_net_rkey_unpack(s->peer, s->other->key, &s->rkey, &s->err);
}

static void do_drop_key(void *arg)
{
    struct side *s = arg;

    bt_net_rkey_destroy(s->rkey);
}

static void do_gets(void *arg)
{
    struct side *s = arg;

    s->rc = 0;
    s->t_ns = bt_now_ns();
    for (size_t at = 0; at < BIG; at += 1 << 18) {
        s->rc |=
            bt_net_get(s->peer, (char *)s->mem.base + at,
                       (uint64_t)(uintptr_t)s->other->mem.base + at, 1 << 18, s->rkey, on_done, s);
    }
}

static void do_puts(void *arg)
{
    struct side *s = arg;

    s->rc = 0;
    for (size_t at = 0; at < BIG; at += 1 << 18) {
        s->rc |=
            bt_net_put(s->peer, (char *)s->mem.base + at,
                       (uint64_t)(uintptr_t)s->other->mem.base + at, 1 << 18, s->rkey, on_done, s);
    }
    s->rc |= bt_net_flush(s->peer, on_done, s);
}

static void rma_over(const char *transports, enum bt_net_method method)
{
    struct side a, b;

    assert_int_equal(side_open(&a, transports), BT_OK);
    assert_int_equal(side_open(&b, transports), BT_OK);
    assert_int_equal(bt_mem_host.alloc(BIG, "test", &a.mem, NULL), BT_OK);
    assert_int_equal(bt_mem_host.alloc(BIG, "test", &b.mem, NULL), BT_OK);
    memcpy(b.mem.base, pattern, BIG);
    side_on_net(b.net, do_register, &b);
    assert_int_equal(b.rc, BT_OK);
    assert_true(b.key.n >= 8 && b.key.n <= BT_NET_MAX_KEY);
    bring_up(&a, &b);
    a.other = &b;
    side_on_net(a.net, do_unpack, &a);
    assert_int_equal(a.rc, BT_OK);
    assert_int_equal(bt_net_peer_method(a.peer), method);

    side_on_net(a.net, do_gets, &a);
    assert_int_equal(a.rc, BT_OK);
    assert_true(EVENTUALLY(LOAD(a.done) == BIG >> 18));
    printf("# %s: get %d bytes in %llu us\n", transports, BIG,
           (unsigned long long)(bt_now_ns() - a.t_ns) / 1000);
    assert_int_equal(a.failed, 0);
    assert_memory_equal(a.mem.base, pattern, BIG);

    memset(a.mem.base, 0x5a, BIG);
    a.done = 0;
    side_on_net(a.net, do_puts, &a);
    assert_int_equal(a.rc, BT_OK);
    assert_true(EVENTUALLY(LOAD(a.done) == (BIG >> 18) + 1));
    assert_memory_equal(a.mem.base, b.mem.base, BIG);

    side_on_net(a.net, do_drop_key, &a);
    side_on_net(b.net, do_unregister, &b);
    bt_net_destroy(a.net);
    bt_net_destroy(b.net);
    assert_int_equal(a.closed, 1);
    assert_int_equal(b.closed, 1);
    bt_mem_host.free(&a.mem);
    bt_mem_host.free(&b.mem);
}

static void test_rma_tcp(void **state)
{
    rma_over("tcp", BT_NET_METHOD_MESSAGE);
}

static void test_rma_shm(void **state)
{
    rma_over("auto", BT_NET_METHOD_PULL);
}

/* ---- views ---- */

struct view_ask {
    struct side *s;
    const char *at;
    size_t bytes;
    const void *ret;
};

static void do_view(void *arg)
{
    struct view_ask *v = arg;

    v->ret = bt_net_view(v->s->peer, (uint64_t)(uintptr_t)v->at, v->bytes);
}

static const char *view_of(struct side *s, const void *at, size_t bytes)
{
    struct view_ask v = {s, at, bytes, NULL};

    side_on_net(s->net, do_view, &v);
    return v.ret;
}

/* Memory files are seen in place, and all else is refused: what is not shared, what could shrink
 * under the reader, what reaches beyond the end, and everything where memory must not be read. */
static void test_views_of_sealed_memory_alone(void **state)
{
    int fd = memfd_create("loose", MFD_CLOEXEC);
    struct bt_mem_region own = {0};
    struct side a, b;
    char *loose;

    assert_int_equal(side_open(&a, "auto"), BT_OK);
    assert_int_equal(side_open(&b, "auto"), BT_OK);
    assert_int_equal(bt_mem_host.alloc(BIG, "test", &b.mem, NULL), BT_OK);
    assert_int_equal(bt_mem_private.alloc(BIG, "own", &own, NULL), BT_OK);
    assert_int_equal(ftruncate(fd, BIG), 0);
    loose = mmap(NULL, BIG, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    assert_ptr_not_equal(loose, MAP_FAILED);
    memcpy(b.mem.base, pattern, BIG);
    bring_up(&a, &b);

    for (int i = 0; i < 40; i++) { /* refusals are not held against what can be seen */
        const char *v = view_of(&a, (char *)b.mem.base + 4096 * i, BIG - 4096 * (size_t)i);

        assert_non_null(v);
        assert_memory_equal(v, pattern + 4096 * i, BIG - 4096 * (size_t)i);
        assert_null(view_of(&a, loose, 4096));
        assert_null(view_of(&a, own.base, 4096));
        assert_null(view_of(&a, (char *)b.mem.base + BIG - 4096, 2 * BIG));
        assert_null(view_of(&a, NULL, 4096));
    }
    ((char *)b.mem.base)[5] ^= 1; /* it is the memory, not a copy of it */
    assert_int_equal(view_of(&a, b.mem.base, 64)[5], (char)(pattern[5] ^ 1));
    assert_true(ftruncate(b.mem.fd, 4096) < 0);

    bt_net_destroy(a.net);
    bt_net_destroy(b.net);
    munmap(loose, BIG);
    close(fd);
    bt_mem_host.free(&b.mem);
    bt_mem_private.free(&own);
}

struct file_ask {
    struct side *s;
    struct bt_net_file file;
    size_t bytes;
    const void *ret;
};

static void do_view_file(void *arg)
{
    struct file_ask *v = arg;

    v->ret = bt_net_view_file(v->s->peer, &v->file, v->bytes);
}

static const char *view_of_file(struct side *s, struct bt_net_file file, size_t bytes)
{
    struct file_ask v = {s, file, bytes, NULL};

    side_on_net(s->net, do_view_file, &v);
    return v.ret;
}

/* By its name a file is seen whole, wherever the peer has mapped it; one more than is allowed is
 * not, nor one that the peer does not have. */
static void test_views_of_files_by_name(void **state)
{
    int loose = memfd_create("loose", MFD_CLOEXEC);
    struct bt_mem_region more[16];
    struct bt_net_file file, gone;
    struct side a, b;
    uint32_t n = 0;

    assert_int_equal(side_open(&a, "auto"), BT_OK);
    assert_int_equal(side_open(&b, "auto"), BT_OK);
    assert_int_equal(bt_mem_host.alloc(BIG, "test", &b.mem, NULL), BT_OK);
    memcpy(b.mem.base, pattern, BIG);
    connect_sides(&a, &b);
    assert_true(EVENTUALLY(LOAD(b.accepted) == 1));
    assert_int_equal(ftruncate(loose, BIG), 0);
    assert_false(bt_net_file_of(loose, &file));
    assert_false(bt_net_file_of(-1, &file));
    assert_true(bt_net_file_of(b.mem.fd, &file));
    for (int i = 0; i < 40; i++) {
        const char *v = view_of_file(&a, file, BIG);

        assert_non_null(v);
        assert_memory_equal(v, pattern, BIG);
        assert_null(view_of_file(&a, file, (size_t)BIG + 4096));
    }
    gone = (struct bt_net_file){file.dev, file.ino + 100000};
    assert_null(view_of_file(&a, gone, 4096));
    for (size_t i = 0; i < BT_ARRAY_LEN(more); i++) {
        assert_int_equal(bt_mem_host.alloc(4096, "more", &more[i], NULL), BT_OK);
        assert_true(bt_net_file_of(more[i].fd, &gone));
        n += view_of_file(&a, gone, 4096) != NULL;
    }
    assert_int_equal(n, 15);
    assert_non_null(view_of_file(&a, file, BIG));

    bt_net_destroy(a.net);
    bt_net_destroy(b.net);
    for (size_t i = 0; i < BT_ARRAY_LEN(more); i++) {
        bt_mem_host.free(&more[i]);
    }
    close(loose);
    bt_mem_host.free(&b.mem);
}

static void test_no_views_over_tcp(void **state)
{
    struct side a, b;

    assert_int_equal(side_open(&a, "tcp"), BT_OK);
    assert_int_equal(side_open(&b, "tcp"), BT_OK);
    assert_int_equal(bt_mem_host.alloc(BIG, "test", &b.mem, NULL), BT_OK);
    bring_up(&a, &b);
    assert_null(view_of(&a, b.mem.base, 4096));
    bt_net_destroy(a.net);
    bt_net_destroy(b.net);
    bt_mem_host.free(&b.mem);
}

static void test_listen_refusals(void **state)
{
    static const char *const bad[] = {"0.0.0.0:0", "[::]:0", "example", "127.0.0.1:99999",
                                      "unix:/x"};
    const struct bt_net_handlers on = {0};
    struct bt_net *net;
    struct bt_err err;

    for (size_t i = 0; i < BT_ARRAY_LEN(bad); i++) {
        struct bt_net_cfg cfg = {.listen = bad[i]};

        assert_int_equal(bt_net_create(&cfg, &on, &net, &err), BT_E_CONFIG);
        assert_non_null(strstr(err.msg, bad[i]));
        if (i < 2) {
            assert_non_null(strstr(err.msg, "allow_insecure"));
        }
    }
    {
        struct bt_net_cfg cfg = {.listen = "0.0.0.0:0", .allow_insecure = true};

        assert_int_equal(bt_net_create(&cfg, &on, &net, &err), BT_OK);
        bt_net_destroy(net);
    }
    {
        struct bt_net_cfg cfg = {.listen = "[::1]:0"};

        assert_int_equal(bt_net_create(&cfg, &on, &net, &err), BT_E_CONFIG);
        assert_non_null(strstr(err.msg, "IPv6"));
    }
    {
        struct bt_net_cfg cfg = {.listen = "127.0.0.1:0", .method = "carrier pigeon"};

        assert_int_equal(bt_net_create(&cfg, &on, &net, &err), BT_E_CONFIG);
        assert_non_null(strstr(err.msg, "carrier pigeon"));
    }
    {
        struct bt_net_cfg cfg = {.listen = "127.0.0.1:0", .transports = "nonsense"};

        assert_int_equal(bt_net_create(&cfg, &on, &net, &err), BT_E_CONFIG);
        assert_non_null(strstr(err.msg, "nonsense"));
    }
}

static void test_connect_refused(void **state)
{
    struct side a;

    assert_int_equal(side_open(&a, "auto"), BT_OK);
    a.address = "127.0.0.1:1";
    side_on_net(a.net, do_connect, &a);
    if (a.rc == BT_OK) {
        assert_true(EVENTUALLY(LOAD(a.closed) == 1));
        assert_int_equal(a.closed_rc, BT_E_PEER_LOST);
    } else {
        assert_int_equal(a.rc, BT_E_UNAVAILABLE);
    }
    a.address = "host.invalid:80";
    side_on_net(a.net, do_connect, &a);
    assert_int_equal(a.rc, BT_E_INVALID);
    bt_net_destroy(a.net);
}

struct ticker {
    struct bt_net_timer a, b, c;
    struct side *s;
    int order[3], n;
};

static void tick_a(struct bt_net_timer *t)
{
    struct ticker *k = BT_CONTAINER_OF(t, struct ticker, a);

    k->order[k->n++] = 'a';
    INC(k->s->done);
}

static void tick_b(struct bt_net_timer *t)
{
    struct ticker *k = BT_CONTAINER_OF(t, struct ticker, b);

    k->order[k->n++] = 'b';
    INC(k->s->done);
}

static void tick_c(struct bt_net_timer *t)
{
    struct ticker *k = BT_CONTAINER_OF(t, struct ticker, c);

    INC(k->s->failed);
}

static void do_start_timers(void *arg)
{
    struct ticker *k = arg;
    uint64_t now = bt_now_ns();

    k->a.fn = tick_a;
    k->b.fn = tick_b;
    k->c.fn = tick_c;
    bt_net_timer_stop(&k->c);
    bt_net_timer_start(k->s->net, &k->b, now + 30 * BT_NS_PER_MS);
    bt_net_timer_start(k->s->net, &k->c, now + 20 * BT_NS_PER_MS);
    bt_net_timer_start(k->s->net, &k->a, now + 50 * BT_NS_PER_MS);
    bt_net_timer_start(k->s->net, &k->a, now + 10 * BT_NS_PER_MS);
    bt_net_timer_stop(&k->c);
}

static void test_timers(void **state)
{
    struct side a;
    struct ticker k = {.s = &a};

    assert_int_equal(side_open(&a, "tcp"), BT_OK);
    side_on_net(a.net, do_start_timers, &k);
    assert_true(EVENTUALLY(LOAD(a.done) == 2));
    assert_int_equal(k.order[0], 'a');
    assert_int_equal(k.order[1], 'b');
    assert_int_equal(a.failed, 0);
    bt_net_destroy(a.net);
}

struct stall {
    struct bt_net_timer timer;
    struct side *s;
    uint64_t end_ns, rang_ns; /* when it should, and did: on the net's clock, which stood still */
};

static void on_stall_timer(struct bt_net_timer *t)
{
    struct stall *k = BT_CONTAINER_OF(t, struct stall, timer);

    k->rang_ns = bt_net_clock_ns(k->s->net);
    INC(k->s->done);
}

static void do_stall(void *arg)
{
    struct stall *k = arg;

    k->timer.fn = on_stall_timer;
    k->end_ns = bt_net_clock_ns(k->s->net) + 2 * BT_NS_PER_S;
    bt_net_timer_start(k->s->net, &k->timer, bt_deadline_ns(2 * BT_NS_PER_S));
    sleep(3); /* as if the process were stopped */
}

/* Time for which the thread was stopped does not let a deadline pass. */
static void test_a_stall_is_no_silence_of_others(void **state)
{
    struct side a;
    struct stall k = {.s = &a};

    assert_int_equal(side_open(&a, "tcp"), BT_OK);
    side_on_net(a.net, do_stall, &k);
    assert_true(EVENTUALLY(LOAD(a.done) == 1));
    assert_true(k.rang_ns >= k.end_ns);
    bt_net_destroy(a.net);
}

/* Writes junk of the given kind to a local port; a port that does not answer is fine. */
static void throw_junk(uint16_t port, int kind, unsigned *seed)
{
    struct sockaddr_in in = {
        .sin_family = AF_INET, .sin_port = htons(port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
    struct pollfd p = {.fd = fd, .events = POLLOUT};
    char junk[4096];

    for (size_t i = 0; i < sizeof(junk); i++) {
        /* Random, all zero, all ones, and small numbers that look like lengths. */
        junk[i] = (char)(kind == 0    ? rand_r(seed)
                         : kind == 1  ? 0
                         : kind == 2  ? 0xff
                         : i % 8 == 0 ? 16
                                      : 0);
    }
    if (connect(fd, (struct sockaddr *)&in, sizeof(in)) == 0 ||
        (errno == EINPROGRESS && poll(&p, 1, 100) == 1)) {
        if (send(fd, junk, (size_t)(1 + rand_r(seed) % (int)sizeof(junk)), MSG_NOSIGNAL) < 0) {
            /* already thrown out */
        }
    }
    close(fd);
}

/* Strangers at any port that the process listens on do no harm, and others go on. */
static void test_garbage_at_every_port(void **state)
{
    struct side a, b;
    unsigned seed = 7;
    int ports = 0;

    assert_int_equal(side_open(&a, "auto"), BT_OK);
    assert_int_equal(side_open(&b, "auto"), BT_OK);
    connect_sides(&a, &b);
    for (int fd = 3; fd < 256; fd++) {
        struct sockaddr_in in;
        socklen_t len = sizeof(in), on_len = sizeof(int);
        int on = 0;

        if (getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &on, &on_len) != 0 || !on ||
            getsockname(fd, (struct sockaddr *)&in, &len) != 0 || in.sin_family != AF_INET) {
            continue;
        }
        for (int round = 0; round < 12; round++) {
            throw_junk(ntohs(in.sin_port), round % 4, &seed);
        }
        ports++;
    }
    assert_true(ports >= 4); /* ours, and UCX's behind them */
    side_on_net(a.net, do_send_sizes, &a);
    assert_true(EVENTUALLY(LOAD(b.messages) == (int)BT_ARRAY_LEN(sizes)));
    assert_int_equal(b.bad, 0);
    /* The door still opens. */
    side_on_net(a.net, do_close, &a);
    assert_true(EVENTUALLY(LOAD(a.closed) == 1));
    side_on_net(b.net, do_reset, &b);
    connect_sides(&a, &b);
    side_on_net(a.net, do_send_sizes, &a);
    assert_true(EVENTUALLY(LOAD(b.messages) == (int)BT_ARRAY_LEN(sizes)));
    bt_net_destroy(a.net);
    bt_net_destroy(b.net);
}

/* A caller of another version is told ours; one that says nothing is dropped in time. */
static void test_gate_names_its_version(void **state)
{
    static const char prelude[32] = "BATONKV\0\x63";
    struct sockaddr_in in = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    struct side b;
    char answer[33];
    int fd = socket(AF_INET, SOCK_STREAM, 0);

    assert_int_equal(side_open(&b, "tcp"), BT_OK);
    in.sin_port = htons((uint16_t)strtoul(strchr(bt_net_address(b.net), ':') + 1, NULL, 10));
    assert_int_equal(connect(fd, (struct sockaddr *)&in, sizeof(in)), 0);
    assert_int_equal(send(fd, prelude, sizeof(prelude), 0), sizeof(prelude));
    assert_int_equal(recv(fd, answer, sizeof(answer), MSG_WAITALL), 32);
    assert_memory_equal(answer, "BATONKV\0\2\0\1\0\0\0\0\0\0\0\4\0", 20);
    close(fd);
    /* One with shorter segments, and one with ours. */
    for (int same = 0; same < 2; same++) {
        const char *ours =
            same ? "BATONKV\0\2\0\0\0\0\0\0\0\0\0\4" : "BATONKV\0\2\0\0\0\0\0\0\0\0\0\1";
        char theirs[32] = {0};

        memcpy(theirs, ours, 19);
        fd = socket(AF_INET, SOCK_STREAM, 0);
        assert_int_equal(connect(fd, (struct sockaddr *)&in, sizeof(in)), 0);
        assert_int_equal(send(fd, theirs, sizeof(theirs), 0), sizeof(theirs));
        assert_int_equal(recv(fd, answer, sizeof(answer) - 1, MSG_WAITALL), 32);
        assert_int_equal(answer[10], same ? 0 : 3);
        close(fd);
    }
    fd = socket(AF_INET, SOCK_STREAM, 0);
    assert_int_equal(connect(fd, (struct sockaddr *)&in, sizeof(in)), 0);
    assert_int_equal(recv(fd, answer, sizeof(answer), 0), 0);
    close(fd);
    bt_net_destroy(b.net);
}

static int count_fds(void)
{
    DIR *d = opendir("/proc/self/fd");
    int n = 0;

    while (d && readdir(d)) {
        n++;
    }
    closedir(d);
    return n;
}

static long rss_kb(void)
{
    FILE *f = fopen("/proc/self/statm", "r");
    long total = 0, resident = 0;

    if (f && fscanf(f, "%ld %ld", &total, &resident) != 2) {
        resident = -1;
    }
    fclose(f);
    return resident * 4;
}

static void reconnects(const char *transports)
{
    struct side a, b;
    int fds = 0;
    long rss = 0;

    assert_int_equal(side_open(&a, transports), BT_OK);
    assert_int_equal(side_open(&b, transports), BT_OK);
    side_on_net(a.net, do_quiet, &a);
    side_on_net(b.net, do_quiet, &b);
    for (int i = 0; i < 250; i++) {
        uint64_t end = bt_deadline_ns(20 * BT_NS_PER_S);
        int before = LOAD(b.accepted);

        connect_sides(&a, &b);
        side_on_net(a.net, do_send_sizes, &a);
        /* Closed by either side, or before it was up. */
        if (i % 3) {
            assert_true(EVENTUALLY(LOAD(b.accepted) > before));
        }
        side_on_net(i % 3 == 1 ? b.net : a.net, do_close, i % 3 == 1 ? &b : &a);
        /* What b accepted may have been the last round's late one: it closes all it gets. */
        while (i % 3 == 1 && LOAD(a.closed) != i + 1 && bt_now_ns() < end) {
            side_on_net(b.net, do_close, &b);
            side_nap();
        }
        if (!EVENTUALLY(LOAD(a.closed) == i + 1 && LOAD(b.closed) == LOAD(b.accepted))) {
            fail_msg("round %d: %d closed here, %d of %d there", i, a.closed, b.closed, b.accepted);
        }
        if (i == 49) {
            fds = count_fds();
            rss = rss_kb();
        }
    }
    printf("# %s: fds %d -> %d, rss %ld -> %ld kB\n", transports, fds, count_fds(), rss, rss_kb());
    assert_true(EVENTUALLY(count_fds() <= fds + 8));
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__) /* they keep freed memory */
    assert_true(rss_kb() < rss + 16 * 1024);
#endif
    bt_net_destroy(a.net);
    bt_net_destroy(b.net);
}

static void test_KVX_09_reconnects_leak_nothing_tcp(void **state)
{
    reconnects("tcp");
}

static void test_KVX_09_reconnects_leak_nothing_shm(void **state)
{
    reconnects("auto");
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_messages_tcp),
        cmocka_unit_test(test_messages_shm),
        cmocka_unit_test(test_order_while_there_is_no_room_tcp),
        cmocka_unit_test(test_order_while_there_is_no_room_shm),
        cmocka_unit_test(test_other_addresses),
        cmocka_unit_test(test_rma_tcp),
        cmocka_unit_test(test_rma_shm),
        cmocka_unit_test(test_views_of_sealed_memory_alone),
        cmocka_unit_test(test_views_of_files_by_name),
        cmocka_unit_test(test_no_views_over_tcp),
        cmocka_unit_test(test_listen_refusals),
        cmocka_unit_test(test_connect_refused),
        cmocka_unit_test(test_timers),
        cmocka_unit_test(test_a_stall_is_no_silence_of_others),
        cmocka_unit_test(test_garbage_at_every_port),
        cmocka_unit_test(test_gate_names_its_version),
        cmocka_unit_test(test_KVX_09_reconnects_leak_nothing_tcp),
        cmocka_unit_test(test_KVX_09_reconnects_leak_nothing_shm),
    };
    int rc;

    pattern = malloc(BIG);
    for (size_t i = 0; i < BIG; i++) {
        pattern[i] = (char)i;
    }
    if (argc > 1) {
        cmocka_set_test_filter(argv[1]);
        bt_log_threshold = BT_LOG_DEBUG;
    }
    rc = cmocka_run_group_tests(tests, NULL, NULL);
    free(pattern);
    return rc;
}
