/* Passes bytes on between two sockets and does nothing else: the floor of what any router adds.
 *
 *   front_relay HOST:PORT
 *
 * Prints "ready HOST:PORT". One thread that sleeps in epoll; small writes are not held back. For a
 * few connections that live as long as it does: a pair is never freed, only closed. */
#include "common/base/base.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

struct end {
    int fd;
    struct end *other;
};

static int poller, listener;
static struct sockaddr_in target;

static void fail(const char *what)
{
    fprintf(stderr, "front_relay: %s: %s\n", what, strerror(errno));
    exit(1);
}

static void watch(int fd, void *ptr)
{
    struct epoll_event ev = {.events = EPOLLIN, .data.ptr = ptr};
    int one = 1;

    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
    if (epoll_ctl(poller, EPOLL_CTL_ADD, fd, &ev) < 0) {
        fail("epoll");
    }
}

static void on_accept(void)
{
    struct end *pair = calloc(2, sizeof(*pair));

    BT_BUG_ON(!pair);
    pair[0] = (struct end){accept(listener, NULL, NULL), &pair[1]};
    pair[1] = (struct end){socket(AF_INET, SOCK_STREAM, 0), &pair[0]};
    if (pair[0].fd < 0 || pair[1].fd < 0 ||
        connect(pair[1].fd, (struct sockaddr *)&target, sizeof(target)) < 0) {
        fail("connect");
    }
    watch(pair[0].fd, &pair[0]);
    watch(pair[1].fd, &pair[1]);
}

static void on_readable(struct end *e)
{
    static char buf[65536];
    ssize_t n = recv(e->fd, buf, sizeof(buf), 0), done = 0;

    while (done < n) {
        ssize_t k = send(e->other->fd, buf + done, (size_t)(n - done), MSG_NOSIGNAL);

        if (k < 0) {
            n = 0; /* it has left */
            break;
        }
        done += k;
    }
    if (n <= 0) { /* both ends leave the poller; the numbers are not used again */
        epoll_ctl(poller, EPOLL_CTL_DEL, e->fd, NULL);
        epoll_ctl(poller, EPOLL_CTL_DEL, e->other->fd, NULL);
        shutdown(e->fd, SHUT_RDWR);
        shutdown(e->other->fd, SHUT_RDWR);
    }
}

static bool parse_target(const char *text)
{
    const char *colon = strrchr(text, ':');
    char host[64];

    if (!colon || (size_t)(colon - text) >= sizeof(host)) {
        return false;
    }
    memcpy(host, text, (size_t)(colon - text));
    host[colon - text] = 0;
    target = (struct sockaddr_in){.sin_family = AF_INET,
                                  .sin_port = htons((uint16_t)strtoul(colon + 1, NULL, 10))};
    return inet_pton(AF_INET, host, &target.sin_addr) == 1;
}

int main(int argc, char **argv)
{
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    struct epoll_event ev[16];
    socklen_t n = sizeof(a);

    if (argc != 2 || !parse_target(argv[1])) {
        fprintf(stderr, "usage: front_relay HOST:PORT\n");
        return 2;
    }
    poller = epoll_create1(0);
    listener = socket(AF_INET, SOCK_STREAM, 0);
    if (poller < 0 || listener < 0 || bind(listener, (struct sockaddr *)&a, n) < 0 ||
        listen(listener, 64) < 0 || getsockname(listener, (struct sockaddr *)&a, &n) < 0) {
        fail("start");
    }
    watch(listener, &listener);
    printf("ready 127.0.0.1:%d\n", ntohs(a.sin_port));
    fflush(stdout);
    for (;;) {
        int k = epoll_wait(poller, ev, BT_ARRAY_LEN(ev), -1);

        for (int i = 0; i < k; i++) {
            if (ev[i].data.ptr == &listener) {
                on_accept();
            } else {
                on_readable(ev[i].data.ptr);
            }
        }
    }
}
