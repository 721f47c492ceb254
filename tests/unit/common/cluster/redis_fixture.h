/* For tests: a real redis-server on a unix socket of its own, in a directory of its own. Every wait
 * is for an event with a generous deadline. */
#ifndef BT_TESTS_REDIS_FIXTURE_H
#define BT_TESTS_REDIS_FIXTURE_H

#include "common/base/rc.h"
#include "common/thr/time.h"

#include "tests/unit/cmocka.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#define PATIENCE_NS     (30 * BT_NS_PER_S)
#define REDIS_ARGS_MAX_ 24

static char dir[] = "/tmp/baton_redis_XXXXXX";
static char sock[96], address[128];
static pid_t redis_pid;

static bool eventually(bool (*fn)(void *arg), void *arg)
{
    uint64_t deadline = bt_deadline_ns(PATIENCE_NS);

    while (!fn(arg)) {
        if (bt_now_ns() > deadline) {
            return false;
        }
        poll(NULL, 0, 5);
    }
    return true;
}

/* Sends one inline command; the first line of the answer. False without a server. */
static bool ask(const char *command, char *answer, size_t n)
{
    struct sockaddr_un sa = {.sun_family = AF_UNIX};
    struct timeval patience = {10, 0};
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    char all[512];
    ssize_t got = -1;
    int len;

    snprintf(sa.sun_path, sizeof(sa.sun_path), "%s", sock);
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience));
    len = snprintf(all, sizeof(all), "%s\r\n", command);
    if (connect(fd, (struct sockaddr *)&sa, sizeof(sa)) == 0 &&
        write(fd, all, (size_t)len) == len) {
        got = recv(fd, answer, n - 1, 0);
    }
    close(fd);
    answer[got > 0 ? got : 0] = '\0';
    return got > 0;
}

static bool redis_answers(void *arg)
{
    char answer[64];

    return ask("PING", answer, sizeof(answer)) && (answer[0] == '+' || answer[0] == '-');
}

/* `extra`: more arguments for the server, ends with NULL; may be NULL itself. */
static void redis_launch(const char *const *extra)
{
    const char *argv[REDIS_ARGS_MAX_ + 12] = {
        "redis-server", "--port", "0", "--unixsocket", sock, "--save", "", "--dir", dir};
    size_t n = 9;

    for (; extra && *extra && n < REDIS_ARGS_MAX_; extra++) {
        argv[n++] = *extra;
    }
    redis_pid = fork();
    assert_true(redis_pid >= 0);
    if (redis_pid == 0) {
        int null = open("/dev/null", O_RDWR);

        prctl(PR_SET_PDEATHSIG, SIGKILL);
        dup2(null, STDOUT_FILENO);
        execvp(argv[0], (char *const *)(uintptr_t)argv);
        _exit(127);
    }
    assert_true(eventually(redis_answers, NULL));
}

static BT_UNUSED void redis_start(const char *password)
{
    redis_launch((const char *const[]){"--requirepass", password, NULL});
}

static void redis_kill(void)
{
    if (redis_pid > 0) {
        kill(redis_pid, SIGKILL);
        waitpid(redis_pid, NULL, 0);
        redis_pid = 0;
    }
    unlink(sock);
}

static inline void must(const char *command)
{
    char answer[64];

    assert_true(ask(command, answer, sizeof(answer)));
    if (answer[0] != '+' && answer[0] != ':') {
        fail_msg("%s: %s", command, answer);
    }
}

/* Sends a command and does not wait for its answer. */
static BT_UNUSED void ask_and_go(const char *command)
{
    struct sockaddr_un sa = {.sun_family = AF_UNIX};
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    char all[512];
    int len = snprintf(all, sizeof(all), "%s\r\n", command);

    snprintf(sa.sun_path, sizeof(sa.sun_path), "%s", sock);
    assert_int_equal(connect(fd, (struct sockaddr *)&sa, sizeof(sa)), 0);
    assert_int_equal(write(fd, all, (size_t)len), len);
    poll(&(struct pollfd){fd, POLLIN, 0}, 1, 100); /* a server that is closed does not read it */
    close(fd);
}

/* False: redis-server is not installed, main returns 77 (skipped, for meson). */
static bool redis_prepare(void)
{
    if (system("command -v redis-server >/dev/null") != 0) {
        fprintf(stderr, "redis-server is not installed: nothing was tested\n");
        return false;
    }
    if (!mkdtemp(dir)) {
        return false;
    }
    snprintf(sock, sizeof(sock), "%s/redis.sock", dir);
    snprintf(address, sizeof(address), "unix:%s", sock);
    return true;
}

static void redis_cleanup(void)
{
    static const char *const left[] = {"dump.rdb", "nodes.conf", "other.conf"};
    char path[128];

    redis_kill();
    for (size_t i = 0; i < BT_ARRAY_LEN(left); i++) {
        snprintf(path, sizeof(path), "%s/%s", dir, left[i]);
        unlink(path);
    }
    rmdir(dir);
}

#endif
