/* What the net promises, on the real verbs code path: runs where there is an RDMA device
 * (tests/rdma makes a machine with one).
 *
 *   rdma_check ADDRESS      an address of the device's interface
 *
 * Memory of this process is written by the other side's device without its knowing, so what counts
 * is when that ends: with a key's registration, and with the connection. */
#include "tests/unit/cmocka.h"

#include "common/mem/mem.h"
#include "tests/unit/common/net/side.h"

#include <stdio.h>
#include <stdlib.h>

enum { BYTES = 1 << 20, PIECE = 1 << 15 };

static const char *listen_on;

struct side {
    struct bt_net *net;
    struct bt_net_peer *peer;
    int accepted, messages, closed, done, failed, rc;
    struct bt_mem_region mem;
    struct bt_net_mem *reg;
    struct bt_str key;
    struct bt_net_rkey *rkey;
    const struct side *other;
    bool again; /* puts follow one another */
    struct bt_err err;
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

    for (size_t i = 0; i < data.n; i++) {
        s->failed += data.p[i] != (char)i;
    }
    INC(s->messages);
}

static void on_closed(void *arg, struct bt_net_peer *peer, int rc)
{
    struct side *s = arg;

    if (s->rkey) {
        bt_net_rkey_destroy(s->rkey);
        s->rkey = NULL;
    }
    __atomic_store_n(&s->peer, NULL, __ATOMIC_RELEASE);
    INC(s->closed);
}

static void put_piece(struct side *s, size_t at);

static void on_done(void *arg, int rc)
{
    struct side *s = arg;

    if (rc != BT_OK) {
        INC(s->failed);
    }
    INC(s->done);
    if (rc == BT_OK && s->again) {
        put_piece(s, (size_t)(LOAD(s->done) % (BYTES / PIECE)) * PIECE);
    }
}

static void put_piece(struct side *s, size_t at)
{
    int rc = bt_net_put(s->peer, (const char *)s->mem.base + at,
                        (uint64_t)(uintptr_t)s->other->mem.base + at, PIECE, s->rkey, on_done, s);

    if (rc < 0) {
        s->rc = rc;
        INC(s->failed);
        INC(s->done);
    }
}

static void side_open(struct side *s)
{
    const struct bt_net_cfg cfg = {
        .listen = listen_on, .transports = "rc_v,self", .allow_insecure = true};
    const struct bt_net_handlers on = {s, on_accepted, on_message, on_closed};
    struct bt_err err = {0};

    *s = (struct side){0};
    if (bt_net_create(&cfg, &on, &s->net, &err) != BT_OK ||
        bt_mem_host.alloc(BYTES, "test", &s->mem, &err) != BT_OK) {
        fail_msg("%s", err.msg);
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
    s->reg = NULL;
}

static void do_connect(void *arg)
{
    struct side *s = arg;

    s->rc = bt_net_connect(s->net, bt_net_address(s->other->net), &s->peer, &s->err);
}

static void do_hello(void *arg)
{
    static char data[70000];
    static const size_t sizes[] = {0, 1, 100, 2000, 8200, 65536, 70000};
    struct side *s = arg;

    for (size_t i = 0; i < sizeof(data); i++) {
        data[i] = (char)i;
    }
    for (size_t i = 0; s->peer && i < BT_ARRAY_LEN(sizes); i++) {
        s->rc |= bt_net_send(s->peer, BT_STR("head"), (struct bt_str){data, sizes[i]}, NULL, NULL);
    }
}

static void do_unpack(void *arg)
{
    struct side *s = arg;

    s->rc = bt_net_rkey_unpack(s->peer, s->other->key, &s->rkey, &s->err);
}

static void do_puts(void *arg)
{
    struct side *s = arg;

    for (size_t at = 0; at < BYTES; at += PIECE) {
        put_piece(s, at);
    }
}

static void do_flush(void *arg)
{
    struct side *s = arg;

    if (s->peer) { /* else it has failed already */
        s->rc = bt_net_flush(s->peer, on_done, s);
    }
}

static void do_get(void *arg)
{
    struct side *s = arg;

    s->rc = bt_net_get(s->peer, s->mem.base, (uint64_t)(uintptr_t)s->other->mem.base, BYTES,
                       s->rkey, on_done, s);
}

static void do_close(void *arg)
{
    struct side *s = arg;

    if (s->peer) {
        bt_net_peer_close(s->peer, true);
    }
}

static size_t others_than(const struct side *s, int byte)
{
    const uint8_t *p = s->mem.base;
    size_t n = 0;

    for (size_t i = 0; i < BYTES; i++) {
        n += p[i] != byte;
    }
    return n;
}

/* Where every instruction is emulated, a connection may take longer to come up than the net grants
 * it; then nothing was delivered, and it is tried again. */
static void connect_pair(struct side *a, struct side *b)
{
    for (int tries = 0; tries < 5; tries++) {
        side_on_net(a->net, do_connect, a);
        assert_int_equal(a->rc, BT_OK);
        side_on_net(a->net, do_hello, a);
        assert_int_equal(a->rc, BT_OK);
        assert_true(EVENTUALLY(LOAD(b->messages) == 7 || LOAD(a->closed) == 1));
        if (LOAD(b->messages) > 0) {
            return;
        }
        printf("the connection did not come up\n");
        assert_true(EVENTUALLY(!LOAD(b->peer)));
        a->closed = b->closed = 0;
    }
}

/* b's memory is registered, a has its key, messages have gone both ways. */
static void open_pair(struct side *a, struct side *b)
{
    side_open(a);
    side_open(b);
    a->other = b;
    memset(a->mem.base, 0x77, BYTES);
    memset(b->mem.base, 0x11, BYTES);
    side_on_net(b->net, do_register, b);
    assert_int_equal(b->rc, BT_OK);
    connect_pair(a, b);
    assert_true(EVENTUALLY(LOAD(b->messages) == 7));
    side_on_net(b->net, do_hello, b);
    assert_true(EVENTUALLY(LOAD(a->messages) == 7));
    assert_int_equal(a->failed + b->failed, 0);
    assert_string_equal(bt_net_peer_transport(a->peer), "rdma");
    assert_int_equal(bt_net_peer_method(a->peer), BT_NET_METHOD_PUT);
    side_on_net(a->net, do_unpack, a);
    assert_int_equal(a->rc, BT_OK);
}

static void close_pair(struct side *a, struct side *b)
{
    side_on_net(a->net, do_close, a);
    assert_true(EVENTUALLY(!LOAD(a->peer) && !LOAD(b->peer)));
    if (b->reg) {
        side_on_net(b->net, do_unregister, b);
    }
    bt_net_destroy(a->net);
    bt_net_destroy(b->net);
    bt_mem_host.free(&a->mem);
    bt_mem_host.free(&b->mem);
}

static void test_put_and_get(void **state)
{
    struct side a, b;

    open_pair(&a, &b);
    side_on_net(a.net, do_puts, &a);
    assert_true(EVENTUALLY(LOAD(a.done) == BYTES / PIECE));
    side_on_net(a.net, do_flush, &a);
    assert_true(EVENTUALLY(LOAD(a.done) == BYTES / PIECE + 1));
    assert_int_equal(a.failed, 0);
    assert_int_equal(others_than(&b, 0x77), 0);
    memset(b.mem.base, 0x33, BYTES);
    side_on_net(a.net, do_get, &a);
    assert_true(EVENTUALLY(LOAD(a.done) == BYTES / PIECE + 2));
    assert_int_equal(a.failed, 0);
    assert_int_equal(others_than(&a, 0x33), 0);
    close_pair(&a, &b);
}

/* The memory is still there and the connection is up; the key alone has ended. */
static void test_a_key_ends_with_its_registration(void **state)
{
    struct side a, b;

    open_pair(&a, &b);
    side_on_net(b.net, do_unregister, &b);
    side_on_net(a.net, do_puts, &a);
    assert_true(EVENTUALLY(LOAD(a.done) == BYTES / PIECE));
    side_on_net(a.net, do_flush, &a);
    assert_true(EVENTUALLY(LOAD(a.closed) == 1 || LOAD(a.done) == BYTES / PIECE + 1));
    assert_int_equal(others_than(&b, 0x11), 0);
    assert_true(LOAD(a.failed) > 0 || LOAD(a.closed) == 1);
    close_pair(&a, &b);
}

/* What b does once `closed` was called nobody disturbs, though its memory is still registered. */
static void test_nothing_lands_behind_closed(void **state)
{
    struct side a, b;

    open_pair(&a, &b);
    a.again = true;
    side_on_net(a.net, do_puts, &a);
    assert_true(EVENTUALLY(LOAD(a.done) > 2 * BYTES / PIECE));
    side_on_net(b.net, do_close, &b);
    assert_true(EVENTUALLY(LOAD(b.closed) == 1));
    memset(b.mem.base, 0x22, BYTES);
    assert_true(EVENTUALLY(LOAD(a.closed) == 1));
    for (int i = 0; i < 500; i++) {
        side_nap();
    }
    assert_int_equal(others_than(&b, 0x22), 0);
    close_pair(&a, &b);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_put_and_get),
        cmocka_unit_test(test_a_key_ends_with_its_registration),
        cmocka_unit_test(test_nothing_lands_behind_closed),
    };
    static char address[64];

    if (argc != 2) {
        fprintf(stderr, "usage: rdma_check ADDRESS\n");
        return 2;
    }
    snprintf(address, sizeof(address), "%s:0", argv[1]);
    listen_on = address;
    return cmocka_run_group_tests(tests, NULL, NULL);
}
