/* Our client against a server process that dies, freezes and comes back. argv[1] = rpc_echo. */
#include "common/rpc/client.h"

#include "rpc_echo.pb-c.h"
#include "tests/unit/cmocka.h"

#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

static const char *server_path;
extern char **environ;

struct peer {
    pid_t pid;
    int port;
};

struct result {
    int n_messages, n_closed, status;
    char text[160];
};

#define EVENTUALLY(loop, cond)                                                                     \
    do {                                                                                           \
        uint64_t until_ = bt_now_ns() + 30 * BT_NS_PER_S;                                          \
        while (!(cond) && bt_now_ns() < until_) {                                                  \
            bt_loop_poll((loop), bt_now_ns() + 50 * BT_NS_PER_MS);                                 \
        }                                                                                          \
        assert_true(cond);                                                                         \
    } while (0)

/* Starts the server on `port` (0 = any) and waits until it says that it is ready. */
static void peer_start(struct peer *p, int port)
{
    char address[32], line[64] = "";
    char *argv[] = {(char *)(uintptr_t)server_path, (char *)(uintptr_t) "--listen", address, NULL};
    posix_spawn_file_actions_t fa;
    int fds[2];
    FILE *f;

    snprintf(address, sizeof(address), "127.0.0.1:%d", port);
    assert_int_equal(pipe(fds), 0);
    posix_spawn_file_actions_init(&fa);
    posix_spawn_file_actions_adddup2(&fa, fds[1], 1);
    posix_spawn_file_actions_addclose(&fa, fds[0]);
    assert_int_equal(posix_spawn(&p->pid, server_path, &fa, NULL, argv, environ), 0);
    posix_spawn_file_actions_destroy(&fa);
    close(fds[1]);
    f = fdopen(fds[0], "r");
    assert_non_null(fgets(line, sizeof(line), f));
    assert_int_equal(sscanf(line, "ready %d", &p->port), 1);
    fclose(f);
}

static void peer_kill(struct peer *p)
{
    kill(p->pid, SIGKILL);
    assert_int_equal(waitpid(p->pid, NULL, 0), p->pid);
}

static void on_message(struct bt_rpc_client_call *call, const ProtobufCMessage *msg)
{
    struct result *r = bt_rpc_client_user(call);

    r->n_messages++;
}

static void on_closed(struct bt_rpc_client_call *call, int status, const char *text)
{
    struct result *r = bt_rpc_client_user(call);

    r->n_closed++;
    r->status = status;
    snprintf(r->text, sizeof(r->text), "%s", text);
}

static const struct bt_rpc_client_events events = {.message = on_message, .closed = on_closed};

static void start(struct bt_rpc_channel *ch,
                  struct result *r,
                  const char *path,
                  const Baton__Test__EchoRequest *req)
{
    struct bt_rpc_client_args args = {.path = path,
                                      .response = &baton__test__echo_reply__descriptor,
                                      .events = &events,
                                      .user = r,
                                      .request = &req->base,
                                      .half_close = true,
                                      .wait_for_ready = true};
    struct bt_rpc_client_call *call;

    *r = (struct result){0};
    assert_int_equal(bt_rpc_client_start(ch, &args, &call, NULL), BT_OK);
}

/* Killed in the middle of a stream, then back on the same port. */
static void test_killed_and_back(void **state)
{
    Baton__Test__EchoRequest req = BATON__TEST__ECHO_REQUEST__INIT;
    struct bt_rpc_channel *ch;
    struct bt_loop *loop;
    struct result r;
    struct peer p;
    char target[32];

    assert_int_equal(bt_loop_create(&loop, NULL), BT_OK);
    peer_start(&p, 0);
    snprintf(target, sizeof(target), "127.0.0.1:%d", p.port);
    assert_int_equal(bt_rpc_channel_create(loop, target, NULL, &ch, NULL), BT_OK);
    req.count = 100000000;
    req.reply_bytes = 100;
    for (int round = 0; round < 3; round++) {
        start(ch, &r, "/baton.test.Echo/ServerStream", &req);
        EVENTUALLY(loop, r.n_messages > 100);
        peer_kill(&p);
        EVENTUALLY(loop, r.n_closed);
        assert_int_equal(r.status, BT_RPC_UNAVAILABLE);
        peer_start(&p, p.port);
    }
    req.count = 1;
    start(ch, &r, "/baton.test.Echo/ServerStream", &req);
    EVENTUALLY(loop, r.n_closed);
    assert_string_equal(r.text, "");
    assert_int_equal(r.status, BT_RPC_OK);
    bt_rpc_channel_destroy(ch);
    bt_loop_destroy(loop);
    peer_kill(&p);
}

/* Stopped, so that its sockets stay open: only keep-alive can tell. It goes on when the process
 * does, over a new connection. */
static void test_frozen_and_thawed(void **state)
{
    Baton__Test__EchoRequest req = BATON__TEST__ECHO_REQUEST__INIT;
    struct bt_rpc_channel_config config = {.keepalive = {.time_ms = 1000, .timeout_ms = 1000}};
    struct bt_rpc_channel *ch;
    struct bt_loop *loop;
    struct result r;
    struct peer p;
    char target[32];
    uint64_t until;

    assert_int_equal(bt_loop_create(&loop, NULL), BT_OK);
    peer_start(&p, 0);
    snprintf(target, sizeof(target), "127.0.0.1:%d", p.port);
    assert_int_equal(bt_rpc_channel_create(loop, target, &config, &ch, NULL), BT_OK);
    req.count = 1;
    req.hang = true;
    start(ch, &r, "/baton.test.Echo/ServerStream", &req);
    EVENTUALLY(loop, r.n_messages == 1);
    assert_int_equal(r.n_closed, 0);
    kill(p.pid, SIGSTOP);
    EVENTUALLY(loop, r.n_closed);
    assert_int_equal(r.status, BT_RPC_UNAVAILABLE);
    req.hang = false;
    start(ch, &r, "/baton.test.Echo/ServerStream", &req);
    for (int i = 0; i < 5; i++) {
        bt_loop_poll(loop, bt_now_ns() + 20 * BT_NS_PER_MS);
    }
    kill(p.pid, SIGCONT);
    until = bt_now_ns() + 30 * BT_NS_PER_S;
    do { /* a call may still meet the dead connection: who wants an answer asks again */
        EVENTUALLY(loop, r.n_closed);
        if (r.status != BT_RPC_OK) {
            assert_int_equal(r.status, BT_RPC_UNAVAILABLE);
            start(ch, &r, "/baton.test.Echo/ServerStream", &req);
        }
    } while (r.n_closed == 0 && bt_now_ns() < until);
    assert_int_equal(r.n_closed, 1);
    assert_string_equal(r.text, "");
    assert_int_equal(r.status, BT_RPC_OK);
    bt_rpc_channel_destroy(ch);
    bt_loop_destroy(loop);
    peer_kill(&p);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_killed_and_back),
        cmocka_unit_test(test_frozen_and_thawed),
    };

    if (argc < 2) {
        fprintf(stderr, "usage: test_peer RPC_ECHO\n");
        return 2;
    }
    server_path = argv[1];
    return cmocka_run_group_tests(tests, NULL, NULL);
}
