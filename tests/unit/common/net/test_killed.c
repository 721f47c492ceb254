/* The other side is another process, which is killed while it sends: whatever it was in the middle
 * of, the next one is heard. (With rings in shared memory one kill in 50 made the hearer deaf.)
 *
 * The binary starts itself as `test child ADDRESS TRANSPORTS`, which sends until it is killed. */
#include "tests/unit/again.h"
#include "tests/unit/cmocka.h"

#include "common/base/buf.h"
#include "tests/unit/common/net/side.h"

#include <signal.h>
#include <stdio.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

enum { AT_ONCE = 32, HEAD = 3000, DATA = 5000 };

/* ---- the child ---- */

struct sender {
    struct bt_net *net;
    struct bt_net_peer *peer;
    struct bt_net_timer timer;
    const char *address;
    int open, closed;
    char head[HEAD], data[DATA];
};

static void on_sent(void *arg, int rc)
{
    struct sender *s = arg;

    s->open--;
    (void)rc;
}

static void on_turn(struct bt_net_timer *t)
{
    struct sender *s = BT_CONTAINER_OF(t, struct sender, timer);

    while (s->peer && s->open < AT_ONCE) {
        s->open++;
        if (bt_net_send(s->peer, (struct bt_str){s->head, HEAD},
                        (struct bt_str){s->data, s->open % 2 ? DATA : 0}, on_sent, s) != BT_OK) {
            _exit(3);
        }
    }
    bt_net_timer_start(s->net, t, 0);
}

static void do_begin(void *arg)
{
    struct sender *s = arg;
    struct bt_err err = {0};

    if (bt_net_connect(s->net, s->address, &s->peer, &err) != BT_OK) {
        _exit(4);
    }
    s->timer.fn = on_turn;
    on_turn(&s->timer);
}

static void on_lost(void *arg, struct bt_net_peer *peer, int rc)
{
    _exit(5);
}

static int child_main(const char *address, const char *transports)
{
    static struct sender s;
    const struct bt_net_cfg cfg = {.listen = "127.0.0.1:0", .transports = transports};
    const struct bt_net_handlers on = {.arg = &s, .closed = on_lost};
    struct bt_err err = {0};

    prctl(PR_SET_PDEATHSIG, SIGKILL);
    s.address = address;
    if (bt_net_create(&cfg, &on, &s.net, &err) != BT_OK) {
        fprintf(stderr, "%s\n", err.msg);
        return 2;
    }
    side_on_net(s.net, do_begin, &s);
    for (;;) {
        pause();
    }
}

/* ---- the parent ---- */

struct hearer {
    struct bt_net *net;
    int accepted, messages, closed;
};

static void on_accepted(void *arg, struct bt_net_peer *peer)
{
    INC(((struct hearer *)arg)->accepted);
}

static void on_message(void *arg, struct bt_net_peer *peer, struct bt_str head, struct bt_str data)
{
    INC(((struct hearer *)arg)->messages);
}

static void on_closed(void *arg, struct bt_net_peer *peer, int rc)
{
    INC(((struct hearer *)arg)->closed);
}

static pid_t start(const char *address, const char *transports)
{
    pid_t pid = fork();

    if (pid == 0) {
        for (int fd = 3; fd < 256; fd++) {
            close(fd);
        }
        exec_again((const char *[]){"test_killed", "child", address, transports, NULL});
        _exit(127);
    }
    return pid;
}

static void killed_while_it_sends(const char *transports, int rounds)
{
    const struct bt_net_cfg cfg = {
        .listen = "127.0.0.1:0", .transports = transports, .max_message_bytes = 1 << 20};
    struct hearer h = {0};
    const struct bt_net_handlers on = {&h, on_accepted, on_message, on_closed};
    struct bt_err err = {0};

    assert_int_equal(bt_net_create(&cfg, &on, &h.net, &err), BT_OK);
    for (int i = 0; i < rounds; i++) {
        int before = LOAD(h.messages);
        pid_t pid = start(bt_net_address(h.net), transports);
        const struct timespec ts = {0, (i * 37 % 50) * 100000};
        bool heard = EVENTUALLY(LOAD(h.messages) > before + 100);

        nanosleep(&ts, NULL);
        kill(pid, SIGKILL);
        waitpid(pid, NULL, 0);
        if (!heard) {
            fail_msg("%s, round %d: not heard, %d accepted, %d closed", transports, i, h.accepted,
                     h.closed);
        }
    }
    assert_true(EVENTUALLY(LOAD(h.closed) == LOAD(h.accepted)));
    bt_net_destroy(h.net);
}

static void test_who_is_killed_while_it_sends_leaves_no_trace(void **state)
{
    killed_while_it_sends("auto", 100);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_who_is_killed_while_it_sends_leaves_no_trace),
    };

    if (argc == 4 && strcmp(argv[1], "child") == 0) {
        return child_main(argv[2], argv[3]);
    }
    return cmocka_run_group_tests(tests, NULL, NULL);
}
