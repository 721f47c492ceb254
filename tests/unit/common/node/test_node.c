/* The skeleton as a real process: this binary starts itself as a small node (BATON_TEST_NODE in the
 * environment says which) and watches it from outside. */
#include "common/node/node.h"

#include "common/thr/time.h"

#include "tests/unit/again.h"
#include "tests/unit/cmocka.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#define PATIENCE_NS (20 * BT_NS_PER_S)

/* --- the node -------------------------------------------------------------------------------- */

struct conf {
    struct bt_node_conf node;
    char *listen;
};

static const struct bt_conf_opt opts[] = {
    BT_NODE_CONF_ROWS(struct conf, node),
    BT_SEC_CONF_ROWS(struct conf, node.sec),
    BT_CONF_ADDR_REQUIRED(struct conf, listen, "listen", "127.0.0.1:0", "Where it listens."),
};

static int stop_pipe[2];

static void on_stop(void *arg)
{
    (void)!write(stop_pipe[1], "s", 1);
}

/* mode "drain": ends on the first signal; "stuck": never ends by itself; "late": is told of the
 * stop only after it was asked for */
static int node_main(char **argv, const char *mode)
{
    struct conf conf = {0};
    struct bt_node_args args = {
        .spec = {"baton-test", "a small node", opts, BT_ARRAY_LEN(opts), &conf},
        .conf = &conf.node,
        .argv = argv,
    };
    struct bt_node_addr addrs[] = {{"grpc", "127.0.0.1:1"}, {"net", "127.0.0.1:2"}};
    struct bt_err err = {0};
    struct bt_node *node;
    char c[2];
    ssize_t n;
    int code = BT_EXIT_OTHER, rc;

    if (pipe(stop_pipe) != 0 || !bt_node_create(&args, &node, &code)) {
        return code;
    }
    rc = bt_node_check_listen(&conf.node, BT_SEC_GRPC, "listen", conf.listen, &err);
    if (rc < 0) {
        bt_node_destroy(node);
        return bt_node_fail(BT_EXIT_CONFIG, rc, &err);
    }
    if (strcmp(mode, "late") != 0) {
        bt_node_on_stop(node, on_stop, NULL);
    }
    rc = bt_node_ready(node, addrs, BT_ARRAY_LEN(addrs), &err);
    if (rc < 0) {
        bt_node_destroy(node);
        return bt_node_fail(BT_EXIT_OTHER, rc, &err);
    }
    if (strcmp(mode, "late") == 0) {
        while (!bt_node_stopping(node)) {
            poll(NULL, 0, 1);
        }
        bt_node_on_stop(node, on_stop, NULL);
    }
    n = read(stop_pipe[0], c, 1); /* blocks until told */
    while (strcmp(mode, "stuck") == 0) {
        pause();
    }
    bt_node_request_stop(node); /* told once only, however often it is asked for */
    fcntl(stop_pipe[0], F_SETFL, O_NONBLOCK);
    n += read(stop_pipe[0], c, 1) == 1 ? 10 : 0;
    bt_node_destroy(node);
    return n == 1 ? 0 : 99;
}

/* --- watching it ----------------------------------------------------------------------------- */

struct child {
    pid_t pid;
    int out; /* its stdout and stderr */
    char text[16384];
    size_t n;
};

static char dir[] = "/tmp/baton_node_XXXXXX";
static char ready_path[64];

static void spawn(struct child *c, const char *mode, const char *a1, const char *a2)
{
    int fds[2];

    memset(c, 0, sizeof(*c));
    assert_int_equal(pipe(fds), 0);
    c->pid = fork();
    assert_true(c->pid >= 0);
    if (c->pid == 0) {
        dup2(fds[1], STDOUT_FILENO);
        dup2(fds[1], STDERR_FILENO);
        close(fds[0]);
        close(fds[1]);
        setenv("BATON_TEST_NODE", mode, 1);
        exec_again((const char *[]){"baton-test", a1, a1 ? a2 : NULL, NULL});
        _exit(98);
    }
    close(fds[1]);
    c->out = fds[0];
}

/* Reads its output until `word` has come (NULL: until the end). */
static bool saw(struct child *c, const char *word)
{
    uint64_t deadline = bt_deadline_ns(PATIENCE_NS);

    while (!word || !strstr(c->text, word)) {
        struct pollfd p = {c->out, POLLIN, 0};
        ssize_t got;

        if (bt_now_ns() > deadline || c->n + 1 >= sizeof(c->text)) {
            return false;
        }
        if (poll(&p, 1, 100) <= 0) {
            continue;
        }
        got = read(c->out, c->text + c->n, sizeof(c->text) - 1 - c->n);
        if (got <= 0) {
            return !word;
        }
        c->n += (size_t)got;
        c->text[c->n] = '\0';
    }
    return true;
}

/* Exit code, or 1000 + signal. Kills it if it does not end. */
static int ended(struct child *c)
{
    int status = 0;

    if (!saw(c, NULL)) {
        kill(c->pid, SIGKILL);
    }
    close(c->out);
    assert_int_equal(waitpid(c->pid, &status, 0), c->pid);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
}

static void read_ready(char *buf, size_t n)
{
    int fd = open(ready_path, O_RDONLY);
    ssize_t got = fd >= 0 ? read(fd, buf, n - 1) : -1;

    buf[got > 0 ? got : 0] = '\0';
    if (fd >= 0) {
        close(fd);
    }
}

static void test_ready_and_drain(void **state)
{
    static const int signals[] = {SIGTERM, SIGINT};
    char flag[128], file[256], want[128];
    struct child c;

    for (size_t i = 0; i < BT_ARRAY_LEN(signals); i++) {
        int fd = open(ready_path, O_WRONLY | O_CREAT, 0600);

        assert_true(fd >= 0); /* a stale file is removed at start */
        close(fd);
        snprintf(flag, sizeof(flag), "--ready-file=%s", ready_path);
        spawn(&c, "drain", flag, NULL);
        assert_true(saw(&c, "event=ready"));
        assert_non_null(strstr(c.text, "grpc=127.0.0.1:1 net=127.0.0.1:2"));
        assert_non_null(strstr(c.text, "event=start"));
        assert_non_null(strstr(c.text, "event=config"));
        read_ready(file, sizeof(file));
        snprintf(want, sizeof(want), "pid=%d\ngrpc=127.0.0.1:1\nnet=127.0.0.1:2\n", (int)c.pid);
        assert_string_equal(file, want);
        kill(c.pid, signals[i]);
        assert_int_equal(ended(&c), 0);
        assert_int_equal(access(ready_path, F_OK), -1);
    }
}

static void test_stop_asked_before_told(void **state)
{
    struct child c;

    spawn(&c, "late", NULL, NULL);
    assert_true(saw(&c, "event=ready"));
    kill(c.pid, SIGTERM);
    assert_int_equal(ended(&c), 0);
}

static void test_second_signal(void **state)
{
    struct child c;

    spawn(&c, "stuck", NULL, NULL);
    assert_true(saw(&c, "event=ready"));
    kill(c.pid, SIGTERM);
    assert_true(saw(&c, "event=stop"));
    kill(c.pid, SIGTERM);
    assert_int_equal(ended(&c), 1);
    assert_non_null(strstr(c.text, "event=quick_exit"));
}

static void test_exit_codes(void **state)
{
    struct child c;

    spawn(&c, "drain", "--nonsense", "1");
    assert_int_equal(ended(&c), 2);
    assert_non_null(strstr(c.text, "msg=\"flag: unknown key 'nonsense'"));
    spawn(&c, "drain", "--listen", "0.0.0.0:80");
    assert_int_equal(ended(&c), 2);
    assert_non_null(strstr(c.text, "allow_insecure = true"));
    spawn(&c, "drain", "--ready-file", "/nonexistent/dir/ready");
    assert_int_equal(ended(&c), 1);
    assert_non_null(strstr(c.text, "No such file"));
    spawn(&c, "drain", "--version", NULL);
    assert_int_equal(ended(&c), 0);
    assert_string_equal(c.text, "baton-test " BT_VERSION "\n");
    spawn(&c, "drain", "--help-config", NULL);
    assert_int_equal(ended(&c), 0);
    assert_non_null(strstr(c.text, "\nlisten = 127.0.0.1:0\n"));
}

static void test_notify_socket(void **state)
{
    struct sockaddr_un sa = {.sun_family = AF_UNIX};
    struct timeval patience = {20, 0};
    char text[64];
    struct child c;
    int fd = socket(AF_UNIX, SOCK_DGRAM, 0);
    ssize_t n;

    snprintf(sa.sun_path, sizeof(sa.sun_path), "%s/notify", dir);
    assert_int_equal(bind(fd, (struct sockaddr *)&sa, sizeof(sa)), 0);
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience));
    setenv("NOTIFY_SOCKET", sa.sun_path, 1);
    spawn(&c, "drain", NULL, NULL);
    unsetenv("NOTIFY_SOCKET");
    n = recv(fd, text, sizeof(text) - 1, 0);
    assert_true(n > 0);
    text[n] = '\0';
    assert_string_equal(text, "READY=1");
    kill(c.pid, SIGTERM);
    n = recv(fd, text, sizeof(text) - 1, 0);
    assert_true(n > 0);
    text[n] = '\0';
    assert_string_equal(text, "STOPPING=1");
    assert_int_equal(ended(&c), 0);
    close(fd);
    unlink(sa.sun_path);
}

/* A process in between starts the node and is killed: the node must go too, even when stopped by
 * SIGSTOP. The node holds the write end of a pipe, whose end tells that it is gone. */
static void test_die_with_parent(void **state)
{
    int alive[2], status;
    struct child c;
    pid_t between;
    char word;

    assert_int_equal(pipe(alive), 0);
    between = fork();
    assert_true(between >= 0);
    if (between == 0) {
        spawn(&c, "stuck", "--die-with-parent", NULL);
        if (saw(&c, "event=ready") && kill(c.pid, SIGSTOP) == 0) {
            (void)!write(alive[1], "r", 1);
        }
        for (;;) {
            pause();
        }
    }
    close(alive[1]);
    assert_int_equal(read(alive[0], &word, 1), 1);
    kill(between, SIGKILL);
    assert_int_equal(waitpid(between, &status, 0), between);
    assert_int_equal(poll(&(struct pollfd){alive[0], POLLIN, 0}, 1, 20000), 1);
    assert_int_equal(read(alive[0], &word, 1), 0);
    close(alive[0]);
}

static void test_file_limit(void **state)
{
    struct rlimit was, low, its;
    char want[64];
    struct child c;

    assert_int_equal(getrlimit(RLIMIT_NOFILE, &was), 0);
    low = was;
    low.rlim_cur = 64;
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &low), 0);
    spawn(&c, "drain", NULL, NULL);
    setrlimit(RLIMIT_NOFILE, &was);
    assert_true(saw(&c, "event=ready"));
    assert_int_equal(prlimit(c.pid, RLIMIT_NOFILE, NULL, &its), 0);
    assert_int_equal(its.rlim_cur, BT_MIN(its.rlim_max, (rlim_t)1 << 20));
    snprintf(want, sizeof(want), "open_files_max=%llu", (unsigned long long)its.rlim_cur);
    assert_non_null(strstr(c.text, want));
    kill(c.pid, SIGTERM);
    assert_int_equal(ended(&c), 0);
}

int main(int argc, char **argv)
{
    const char *mode = getenv("BATON_TEST_NODE");
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_ready_and_drain), cmocka_unit_test(test_stop_asked_before_told),
        cmocka_unit_test(test_second_signal),   cmocka_unit_test(test_exit_codes),
        cmocka_unit_test(test_notify_socket),   cmocka_unit_test(test_die_with_parent),
        cmocka_unit_test(test_file_limit),
    };
    int rc;

    if (mode) {
        return node_main(argv, mode);
    }
    if (!mkdtemp(dir)) {
        return 1;
    }
    snprintf(ready_path, sizeof(ready_path), "%s/ready", dir);
    rc = cmocka_run_group_tests(tests, NULL, NULL);
    rmdir(dir);
    return rc;
}
