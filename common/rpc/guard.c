/* Guard against messages that grow without end. Loop thread.
 *
 * Core compares a message with the receive limit only once it has buffered all of it, so a request
 * of a gigabyte costs a gigabyte before it is refused; its resource quota would cancel calls of
 * innocent connections instead. So a timer looks, while calls wait for a message, at how much each
 * connection received (TCP_INFO) beyond what was delivered to handlers. What comes in fast and is
 * not delivered is an unfinished message; above the limit, the calls of that connection that wait
 * for one are ended. Unix sockets are not watched: their peers are on this machine.
 *
 * The descriptor of a connection is not known from core; it is found by the peer's address among
 * those of the process and checked again at each look. */
#include "common/base/buf.h"
#include "common/rpc/rpc_int.h"

#include <arpa/inet.h>
#include <dirent.h>
#include <linux/tcp.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#define LOOK_NS     (100 * BT_NS_PER_MS)
#define QUIET_BYTES (128u << 10) /* less than this between two looks is no large message */
#define PEER_LEN    80

struct bt_rpc_conn {
    struct bt_list link;
    struct bt_rpc_guard *guard;
    char peer[PEER_LEN];
    uint64_t key;
    size_t n_refs;
    size_t n_receiving;
    int fd;             /* core's, borrowed; -1 = not found yet */
    uint64_t received;  /* bytes at the last look */
    uint64_t delivered; /* bytes handed to handlers since the last look */
    uint64_t unfinished;
    bool based; /* `received` is of this descriptor */
};

/* "ipv4:1.2.3.4:5" or "ipv6:%5B::1%5D:5", as core writes them; empty for anything else. */
static void peer_of_fd(int fd, char out[PEER_LEN])
{
    union {
        struct sockaddr sa;
        struct sockaddr_in in;
        struct sockaddr_in6 in6;
    } u;
    socklen_t len = sizeof(u);
    char host[INET6_ADDRSTRLEN];

    out[0] = 0;
    if (getpeername(fd, &u.sa, &len) < 0) {
        return;
    }
    if (u.sa.sa_family == AF_INET) {
        inet_ntop(AF_INET, &u.in.sin_addr, host, sizeof(host));
        snprintf(out, PEER_LEN, "ipv4:%s:%u", host, ntohs(u.in.sin_port));
    } else if (u.sa.sa_family == AF_INET6 && IN6_IS_ADDR_V4MAPPED(&u.in6.sin6_addr)) {
        inet_ntop(AF_INET, &u.in6.sin6_addr.s6_addr[12], host, sizeof(host));
        snprintf(out, PEER_LEN, "ipv4:%s:%u", host, ntohs(u.in6.sin6_port));
    } else if (u.sa.sa_family == AF_INET6) {
        inet_ntop(AF_INET6, &u.in6.sin6_addr, host, sizeof(host));
        snprintf(out, PEER_LEN, "ipv6:%%5B%s%%5D:%u", host, ntohs(u.in6.sin6_port));
    }
}

static uint64_t key_of(const char *peer)
{
    uint64_t h = 0xcbf29ce484222325ull; /* FNV-1a; bt_map mixes it with its own seed */

    for (; *peer; peer++) {
        h = (h ^ (uint8_t)*peer) * 0x100000001b3ull;
    }
    return h;
}

/* One pass over the descriptors of the process for all connections that have none yet. */
static void find_fds(struct bt_rpc_guard *g)
{
    DIR *dir = opendir("/proc/self/fd");
    struct bt_rpc_conn *c;
    struct dirent *e;
    char peer[PEER_LEN];
    int fd;

    if (!dir) {
        return;
    }
    while ((e = readdir(dir)) != NULL) {
        fd = (int)strtol(e->d_name, NULL, 10);
        peer_of_fd(fd, peer);
        c = peer[0] ? bt_map_get(&g->by_peer, key_of(peer)) : NULL;
        if (c && strcmp(c->peer, peer) == 0) {
            c->fd = fd;
        }
    }
    closedir(dir);
}

static bool bytes_received(struct bt_rpc_conn *c, uint64_t *ret)
{
    struct tcp_info info = {0};
    socklen_t len = sizeof(info);
    int unread = 0;
    char peer[PEER_LEN];

    if (c->fd < 0) {
        return false;
    }
    peer_of_fd(c->fd, peer);
    if (strcmp(peer, c->peer) != 0 || getsockopt(c->fd, IPPROTO_TCP, TCP_INFO, &info, &len) < 0 ||
        len < offsetof(struct tcp_info, tcpi_bytes_received) + sizeof(info.tcpi_bytes_received)) {
        c->based = false;
        c->fd = -1; /* closed, and perhaps somebody else's by now */
        return false;
    }
    /* What core has not read yet lies in the kernel, which bounds it. */
    if (ioctl(c->fd, FIONREAD, &unread) < 0 || unread < 0) {
        unread = 0;
    }
    *ret = info.tcpi_bytes_received - BT_MIN(info.tcpi_bytes_received, (uint64_t)unread);
    return true;
}

static void look_at(struct bt_rpc_conn *c)
{
    struct bt_rpc_guard *g = c->guard;
    uint64_t now, grown;

    if (!bytes_received(c, &now)) {
        return;
    }
    grown = now - BT_MIN(now, c->received);
    grown -= BT_MIN(grown, c->delivered);
    c->delivered = 0;
    if (!c->based || now < c->received || grown < QUIET_BYTES) {
        c->unfinished = 0; /* first look at this descriptor, or nothing large is on its way */
    } else {
        c->unfinished += grown;
    }
    c->based = true;
    c->received = now;
    if (c->unfinished > g->limit_bytes && c->n_receiving > 0) {
        c->unfinished = 0;
        g->exceeded(g, c);
    }
}

static void on_look(struct bt_loop *loop, struct bt_timer *timer)
{
    struct bt_rpc_guard *g = BT_CONTAINER_OF(timer, struct bt_rpc_guard, timer);
    bool unknown = false;

    bt_list_for_each (it, &g->conns) {
        struct bt_rpc_conn *c = BT_LIST_ENTRY(it, struct bt_rpc_conn, link);

        unknown |= c->n_receiving > 0 && c->fd < 0;
    }
    if (unknown) {
        find_fds(g);
    }
    bt_list_for_each (it, &g->conns) {
        look_at(BT_LIST_ENTRY(it, struct bt_rpc_conn, link));
    }
    if (g->n_receiving > 0) {
        bt_timer_start(loop, timer, bt_loop_now(loop) + LOOK_NS);
        return;
    }
    bt_list_for_each (it, &g->conns) /* what comes until the next look was not watched */
    {
        BT_LIST_ENTRY(it, struct bt_rpc_conn, link)->based = false;
    }
}

void bt_rpc_guard_init(struct bt_rpc_guard *g,
                       struct bt_loop *loop,
                       uint64_t limit_bytes,
                       void (*exceeded)(struct bt_rpc_guard *g, struct bt_rpc_conn *c))
{
    *g = (struct bt_rpc_guard){.loop = loop, .limit_bytes = limit_bytes, .exceeded = exceeded};
    g->timer.fn = on_look;
    bt_list_init(&g->conns);
    bt_map_init(&g->by_peer);
}

void bt_rpc_guard_fini(struct bt_rpc_guard *g)
{
    bt_timer_stop(g->loop, &g->timer);
    bt_map_fini(&g->by_peer);
}

struct bt_rpc_conn *bt_rpc_conn_get(struct bt_rpc_guard *g, const char *peer)
{
    uint64_t key = key_of(peer);
    struct bt_rpc_conn *c = bt_map_get(&g->by_peer, key);

    if (c) {
        if (strcmp(c->peer, peer) != 0) {
            return NULL; /* same key: once in 2^64, not watched */
        }
        c->n_refs++;
        return c;
    }
    if (strncmp(peer, "ipv", 3) != 0 || strlen(peer) >= PEER_LEN) {
        return NULL;
    }
    c = bt_calloc(1, sizeof(*c));
    if (!c || bt_map_put(&g->by_peer, key, c) < 0) {
        free(c);
        return NULL;
    }
    snprintf(c->peer, sizeof(c->peer), "%s", peer);
    c->guard = g;
    c->key = key;
    c->n_refs = 1;
    c->fd = -1;
    bt_list_push_back(&g->conns, &c->link);
    return c;
}

void bt_rpc_conn_put(struct bt_rpc_conn *c)
{
    if (c && --c->n_refs == 0) {
        bt_map_del(&c->guard->by_peer, c->key);
        bt_list_remove(&c->link);
        free(c);
    }
}

void bt_rpc_conn_wait(struct bt_rpc_conn *c)
{
    if (c) {
        c->n_receiving++;
        if (c->guard->n_receiving++ == 0 && !c->guard->timer.armed) {
            bt_timer_start(c->guard->loop, &c->guard->timer, bt_loop_now(c->guard->loop) + LOOK_NS);
        }
    }
}

void bt_rpc_conn_delivered(struct bt_rpc_conn *c, size_t n_bytes)
{
    if (c) {
        c->n_receiving--;
        c->guard->n_receiving--;
        c->delivered += n_bytes;
    }
}
