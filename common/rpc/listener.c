/* TCP keep-alive for what a listener accepts. Core has no setting for it, but on Linux a connection
 * inherits these options from the socket it was accepted on, and that one is found by its port. */
#include "common/rpc/rpc_int.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#define IDLE_S     60 /* of silence until the first probe */
#define INTERVAL_S 10
#define PROBES     3

static bool listens_on(int fd, int port)
{
    struct sockaddr_storage sa = {0};
    socklen_t n = sizeof(sa), flag_n = sizeof(int);
    int listens = 0;
    uint16_t at;

    if (getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listens, &flag_n) != 0 || !listens ||
        getsockname(fd, (struct sockaddr *)&sa, &n) != 0) {
        return false;
    }
    at = sa.ss_family == AF_INET    ? ((struct sockaddr_in *)&sa)->sin_port
         : sa.ss_family == AF_INET6 ? ((struct sockaddr_in6 *)&sa)->sin6_port
                                    : 0;
    return at != 0 && ntohs(at) == port;
}

static void keep_alive(int fd)
{
    const struct {
        int level, name, value;
    } opts[] = {
        {IPPROTO_TCP, TCP_KEEPIDLE, IDLE_S},
        {IPPROTO_TCP, TCP_KEEPINTVL, INTERVAL_S},
        {IPPROTO_TCP, TCP_KEEPCNT, PROBES},
        {SOL_SOCKET, SO_KEEPALIVE, 1},
    };

    for (size_t i = 0; i < BT_ARRAY_LEN(opts); i++) {
        setsockopt(fd, opts[i].level, opts[i].name, &opts[i].value, sizeof(opts[i].value));
    }
}

void bt_rpc_listener_keep_alive(int port)
{
    /* Descriptors are given out from the lowest on: behind a long gap there are none. */
    for (int fd = 0, missing = 0; missing < 256; fd++) {
        char name[40], what[40] = "";

        /* By name: other threads may be about to close theirs. */
        snprintf(name, sizeof(name), "/proc/self/fd/%d", fd);
        missing = readlink(name, what, sizeof(what) - 1) > 0 ? 0 : missing + 1;
        if (strncmp(what, "socket:", 7) == 0 && listens_on(fd, port)) {
            keep_alive(fd);
        }
    }
}
