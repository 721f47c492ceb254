/* Unix SOCK_SEQPACKET with descriptors. No state; any thread, one at a time per socket. */
#include "kvstore/keeper/sock.h"

#include "common/thr/time.h"

#include <errno.h>
#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#ifndef SO_PEERPIDFD
#define SO_PEERPIDFD 77 /* Linux 6.5; older C libraries do not name it */
#endif

int kv_sock_address(const char *path, struct sockaddr_un *ret, struct bt_err *err)
{
    size_t n = strlen(path);

    if (n == 0 || n >= sizeof(ret->sun_path)) {
        return BT_FAIL(err, BT_E_CONFIG, "socket %.80s: a path has 1 to %zu bytes, not %zu", path,
                       sizeof(ret->sun_path) - 1, n);
    }
    *ret = (struct sockaddr_un){.sun_family = AF_UNIX};
    memcpy(ret->sun_path, path, n);
    return BT_OK;
}

int kv_sock_connect(const char *path, int *ret_fd, struct bt_err *err)
{
    struct sockaddr_un sa;
    int rc = kv_sock_address(path, &sa, err), fd;

    if (rc < 0) {
        return rc;
    }
    fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0) {
        return BT_FAIL_SYS(err, BT_E_SYS, "socket");
    }
    if (connect(fd, (struct sockaddr *)&sa, sizeof(sa)) != 0) {
        BT_FAIL_SYS(err, BT_E_UNAVAILABLE, "no keeper at %.100s", path);
        close(fd);
        return BT_E_UNAVAILABLE;
    }
    *ret_fd = fd;
    return BT_OK;
}

union control {
    struct cmsghdr align;
    char room[CMSG_SPACE(KV_SOCK_MAX_FDS * sizeof(int))];
};

int kv_sock_send(int sock, enum kv_keeper_type type, void *msg, size_t bytes, int fd)
{
    struct kv_keeper_head head = {KV_KEEPER_MAGIC, KV_KEEPER_VERSION, (uint16_t)type};
    struct iovec iov = {msg, bytes};
    struct msghdr m = {.msg_iov = &iov, .msg_iovlen = 1};
    union control c = {0};
    ssize_t n;

    memcpy(msg, &head, sizeof(head));
    if (fd >= 0) {
        struct cmsghdr *h;

        m.msg_control = c.room;
        m.msg_controllen = CMSG_SPACE(sizeof(int));
        h = CMSG_FIRSTHDR(&m);
        h->cmsg_level = SOL_SOCKET;
        h->cmsg_type = SCM_RIGHTS;
        h->cmsg_len = CMSG_LEN(sizeof(int));
        memcpy(CMSG_DATA(h), &fd, sizeof(fd));
    }
    do {
        n = sendmsg(sock, &m, MSG_DONTWAIT | MSG_NOSIGNAL);
    } while (n < 0 && errno == EINTR);
    if (n == (ssize_t)bytes) {
        return BT_OK;
    }
    return n < 0 && (errno == EAGAIN || errno == ENOBUFS) ? BT_E_UNAVAILABLE : BT_E_PEER_LOST;
}

static void take_fds(struct kv_packet *p, struct msghdr *m)
{
    for (struct cmsghdr *h = CMSG_FIRSTHDR(m); h; h = CMSG_NXTHDR(m, h)) {
        size_t n;

        if (h->cmsg_level != SOL_SOCKET || h->cmsg_type != SCM_RIGHTS) {
            continue;
        }
        n = (h->cmsg_len - CMSG_LEN(0)) / sizeof(int);
        for (size_t i = 0; i < n; i++) {
            int fd;

            memcpy(&fd, CMSG_DATA(h) + i * sizeof(fd), sizeof(fd));
            if (p->n_fds < KV_SOCK_MAX_FDS) {
                p->fds[p->n_fds++] = fd;
            } else {
                close(fd);
                p->cut = true;
            }
        }
    }
}

int kv_sock_recv(int sock, struct kv_packet *ret)
{
    struct kv_packet *p = ret;
    struct iovec iov = {&p->rows, sizeof(p->rows)};
    union control c = {0};
    struct msghdr m = {
        .msg_iov = &iov, .msg_iovlen = 1, .msg_control = c.room, .msg_controllen = sizeof(c.room)};
    ssize_t n;

    memset(p, 0, sizeof(*p));
    do { /* a peer that closed without reading everything may have said why: told once, then read */
        n = recvmsg(sock, &m, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    } while (n < 0 && (errno == EINTR || errno == ECONNRESET));
    if (n < 0) {
        return errno == EAGAIN ? BT_PENDING : BT_E_PEER_LOST;
    }
    take_fds(p, &m);
    p->n = (size_t)n;
    p->cut |= (m.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) != 0;
    if (n == 0) {
        kv_packet_drop(p);
        return BT_E_PEER_LOST;
    }
    return BT_OK;
}

static size_t size_of(enum kv_keeper_type type)
{
    switch (type) {
    case KV_KEEPER_HELLO:
        return sizeof(struct kv_keeper_hello);
    case KV_KEEPER_GET:
    case KV_KEEPER_REGISTER:
        return sizeof(struct kv_keeper_request);
    case KV_KEEPER_STATUS:
        return sizeof(struct kv_keeper_head);
    case KV_KEEPER_WELCOME:
        return sizeof(struct kv_keeper_welcome);
    case KV_KEEPER_GRANT:
        return sizeof(struct kv_keeper_grant);
    case KV_KEEPER_REFUSED:
        return sizeof(struct kv_keeper_refused);
    case KV_KEEPER_ROWS:
        return sizeof(struct kv_keeper_rows);
    }
    return 0;
}

bool kv_packet_is(const struct kv_packet *p, enum kv_keeper_type type)
{
    return p->n == size_of(type) && !p->cut && p->head.magic == KV_KEEPER_MAGIC &&
           p->head.version == KV_KEEPER_VERSION && p->head.type == type;
}

void kv_packet_drop(struct kv_packet *p)
{
    while (p->n_fds > 0) {
        close(p->fds[--p->n_fds]);
    }
}

int kv_sock_wait(int sock, uint64_t deadline_ns)
{
    struct pollfd fd = {.fd = sock, .events = POLLIN};

    for (;;) {
        uint64_t now = bt_now_ns(), left = deadline_ns > now ? deadline_ns - now : 0;
        struct timespec ts = {.tv_sec = (time_t)BT_MIN(left / BT_NS_PER_S, (uint64_t)1 << 30),
                              .tv_nsec = (long)(left % BT_NS_PER_S)};
        int n = ppoll(&fd, 1, &ts, NULL);

        if (n > 0) {
            return BT_OK;
        }
        if (n == 0 && bt_now_ns() >= deadline_ns) {
            return BT_E_DEADLINE;
        }
        if (n < 0 && errno != EINTR) {
            return BT_E_SYS;
        }
    }
}

/* ---- who is there ---- */

int kv_sock_peer(int sock, struct kv_sock_peer *ret, struct bt_err *err)
{
    struct ucred cred;
    socklen_t n = sizeof(cred);

    if (getsockopt(sock, SOL_SOCKET, SO_PEERCRED, &cred, &n) != 0) {
        return BT_FAIL_SYS(err, BT_E_SYS, "SO_PEERCRED");
    }
    *ret = (struct kv_sock_peer){.uid = cred.uid, .pid = cred.pid};
    return BT_OK;
}

/* By process id: another process may have it by now. It is the right one if the peer's end of the
 * socket is still open afterwards: its process then lived all the time. */
static int open_by_id(int sock, int *ret_fd, struct bt_err *err)
{
    struct pollfd p = {.fd = sock, .events = POLLIN};
    struct kv_sock_peer peer = {0};
    int rc = kv_sock_peer(sock, &peer, err), fd;

    if (rc < 0) {
        return rc;
    }
    if (peer.pid <= 0) {
        return BT_FAIL(err, BT_E_UNSUPPORTED, "the peer's process has no id here");
    }
    fd = (int)syscall(SYS_pidfd_open, peer.pid, 0);
    if (fd < 0) {
        return BT_FAIL_SYS(err, BT_E_UNSUPPORTED, "pidfd of process %d", (int)peer.pid);
    }
    if (poll(&p, 1, 0) < 0 || (p.revents & (POLLHUP | POLLERR))) {
        close(fd);
        return BT_FAIL(err, BT_E_PEER_LOST, "process %d is gone", (int)peer.pid);
    }
    *ret_fd = fd;
    return BT_OK;
}

int kv_sock_peer_pidfd(int sock, int *ret_fd, struct bt_err *err)
{
    socklen_t n = sizeof(*ret_fd);
    int fd = -1;

    if (getsockopt(sock, SOL_SOCKET, SO_PEERPIDFD, &fd, &n) == 0 && fd >= 0) {
        *ret_fd = fd; /* close-on-exec by itself */
        return BT_OK;
    }
    return open_by_id(sock, ret_fd, err);
}

bool kv_pidfd_over(int pidfd)
{
    struct pollfd p = {.fd = pidfd, .events = POLLIN};

    return poll(&p, 1, 0) == 1 && (p.revents & POLLIN);
}

bool kv_keeper_name_ok(const char *field, size_t size)
{
    size_t n = strnlen(field, size);

    if (n == 0 || n == size) {
        return false;
    }
    for (size_t i = 0; i < n; i++) {
        char c = field[i];

        if (!((c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
              c == '-' || c == '_' || c == '.')) {
            return false;
        }
    }
    return true;
}
