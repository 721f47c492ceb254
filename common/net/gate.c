/* The gate: our own socket in front of UCX's connection setup.
 *
 * UCX 1.13 sets connections up over a TCP listener of its own whose parser aborts the process on
 * bytes it does not expect. So UCX's listener takes no packets at all (a socket filter drops every
 * SYN), and the public port is ours:
 *
 *   D calls P's gate and says its prelude; who is not one of us is thrown out here.
 *   P's gate opens the door: UCX's listener now takes calls from D's host; P answers with the port.
 *   D's UCX calls it; with that call the door is shut again. One door is open at a time, so it is
 *   known which gate a call belongs to; the others wait their turn.
 *   The gate's connection stays open beside UCX's: its end is the end of the peer, at once and on
 *   every transport.
 *
 * Prelude, 32 bytes, both ways: 0  8 bytes "BATONKV\0"   8  u16 version   10  u16 status
 * (0 welcome, 1 version not spoken, 2 busy, 3 other segments)   12  u16 port of UCX (answer only)
 * 14  2 zero   16  u32 longest segment of UCX's TCP (since version 2)   20  12 zero. Little endian.
 *
 * Segments have one length on both sides: UCX cuts messages by its own and ends the process that
 * gets a longer one than it has room for.
 *
 * With RDMA devices there is no gate: librdmacm carries the setup.
 *
 * Thread: xfer. */
#include "common/net/net_int.h"

#include "common/obs/log.h"

#include <dirent.h>
#include <errno.h>
#include <linux/filter.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <unistd.h>

#define PRELUDE_BYTES  32
#define MAX_HANDSHAKES 256
#define HANDSHAKE_NS   (4 * BT_NS_PER_S)
#define DOOR_NS        (1 * BT_NS_PER_S)
#define PAUSE_NS       (100 * BT_NS_PER_MS)

static const char magic[8] = "BATONKV";

enum state {
    CALLING, /* out: connect() is under way */
    ASKING,  /* out: prelude out, theirs awaited */
    HEARING, /* in: prelude awaited */
    QUEUING, /* in: its turn at the door has not come */
    AT_DOOR, /* in: UCX's call is awaited */
    OPEN,    /* nothing may come any more but the end */
};

struct bt_net_gate {
    struct bt_list link;       /* net->gates */
    struct bt_list queue_link; /* net->gate_queue, in QUEUING */
    struct bt_net *net;
    struct bt_net_peer *peer; /* in: from the moment UCX has its call */
    enum state state;
    int fd;
    struct sockaddr_storage other;
    struct bt_net_timer timer;
    char address[64]; /* of the other node */
    char prelude[PRELUDE_BYTES];
    size_t have; /* bytes of the prelude that are in */
};

/* ---- sockets ---- */

static uint16_t port_of(const struct sockaddr_storage *sa)
{
    return ntohs(sa->ss_family == AF_INET6 ? ((const struct sockaddr_in6 *)sa)->sin6_port
                                           : ((const struct sockaddr_in *)sa)->sin_port);
}

static socklen_t size_of(const struct sockaddr_storage *sa)
{
    return sa->ss_family == AF_INET6 ? sizeof(struct sockaddr_in6) : sizeof(struct sockaddr_in);
}

/* Small messages at once, and a host that is gone is noticed. */
static void tune(int fd)
{
    const struct {
        int level, name, value;
    } opts[] = {
        {IPPROTO_TCP, TCP_NODELAY, 1},  {SOL_SOCKET, SO_KEEPALIVE, 1},
        {IPPROTO_TCP, TCP_KEEPIDLE, 3}, {IPPROTO_TCP, TCP_KEEPINTVL, 1},
        {IPPROTO_TCP, TCP_KEEPCNT, 4},  {IPPROTO_TCP, TCP_USER_TIMEOUT, 8000},
    };

    for (size_t i = 0; i < BT_ARRAY_LEN(opts); i++) {
        setsockopt(fd, opts[i].level, opts[i].name, &opts[i].value, sizeof(opts[i].value));
    }
}

static void drop_fd(int *fd)
{
    if (*fd >= 0) {
        close(*fd); /* leaves the epoll set by itself */
        *fd = -1;
    }
}

/* ---- the door ---- */

/* UCX's listener takes calls from the host of `from` alone; NULL: from nobody. */
static void set_door(struct bt_net *net, const struct sockaddr_storage *from)
{
    bool v6 = net->ucx_address.ss_family == AF_INET6;
    uint32_t host = 0;
    struct sock_filter code[] = {
        /* the source address, of IPv6 its last word */
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, (uint32_t)SKF_NET_OFF + (v6 ? 20 : 12)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, 0, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, UINT32_MAX),
        BPF_STMT(BPF_RET | BPF_K, 0),
    };
    struct sock_fprog prog = {BT_ARRAY_LEN(code), code};

    if (net->door_fd < 0) {
        return;
    }
    if (from && from->ss_family == AF_INET6) {
        memcpy(&host, ((const struct sockaddr_in6 *)from)->sin6_addr.s6_addr + 12, 4);
    } else if (from) {
        host = ((const struct sockaddr_in *)from)->sin_addr.s_addr;
    }
    code[1].k = ntohl(host);
    if (!from) {
        prog.filter = code + 3;
        prog.len = 1;
    }
    if (setsockopt(net->door_fd, SOL_SOCKET, SO_ATTACH_FILTER, &prog, sizeof(prog)) != 0) {
        BT_WARN("gate_door", "msg=\"UCX's port is open to strangers\" reason=\"%s\"",
                strerror(errno));
        net->door_fd = -1;
    }
}

static void open_next_door(struct bt_net *net);

/* ---- life ---- */

static void gate_free(struct bt_net_gate *g)
{
    struct bt_net *net = g->net;

    if (g->peer) {
        g->peer->gate = NULL;
    }
    if (g->state != OPEN) {
        net->n_handshakes--;
    }
    bt_net_timer_stop(&g->timer);
    drop_fd(&g->fd);
    bt_list_remove(&g->queue_link);
    bt_list_remove(&g->link);
    if (net->at_door == g) {
        net->at_door = NULL;
        set_door(net, NULL);
        open_next_door(net);
    }
    free(g);
}

/* The other node is gone, or is none of ours. */
static void gate_fail(struct bt_net_gate *g)
{
    struct bt_net_peer *peer = g->peer;

    gate_free(g);
    if (peer) {
        bt_net_peer_fail(peer, BT_E_PEER_LOST);
    }
}

static void on_timer(struct bt_net_timer *t)
{
    struct bt_net_gate *g = BT_CONTAINER_OF(t, struct bt_net_gate, timer);

    BT_DEBUG("gate_timeout", "peer=%s state=%d", g->address, (int)g->state);
    gate_fail(g);
}

static void watch(struct bt_net_gate *g, uint32_t events)
{
    struct epoll_event ev = {.events = events, .data.ptr = g};

    if (epoll_ctl(g->net->gate_epfd, EPOLL_CTL_MOD, g->fd, &ev) != 0) {
        epoll_ctl(g->net->gate_epfd, EPOLL_CTL_ADD, g->fd, &ev);
    }
}

static struct bt_net_gate *
gate_new(struct bt_net *net, int fd, enum state state, const struct sockaddr_storage *other)
{
    struct bt_net_gate *g = bt_calloc(1, sizeof(*g));

    if (!g) {
        return NULL;
    }
    g->net = net;
    g->fd = fd;
    g->state = state;
    g->other = *other;
    g->timer.fn = on_timer;
    bt_net_format(other, g->address, sizeof(g->address));
    bt_list_init(&g->queue_link);
    bt_list_push_back(&net->gates, &g->link);
    net->n_handshakes++;
    tune(fd);
    bt_net_timer_start(net, &g->timer, bt_deadline_ns(HANDSHAKE_NS));
    watch(g, state == CALLING ? EPOLLOUT : EPOLLIN);
    return g;
}

static void go_open(struct bt_net_gate *g)
{
    g->state = OPEN;
    g->net->n_handshakes--;
    bt_net_timer_stop(&g->timer);
}

/* ---- preludes ---- */

/* 32 bytes into a socket that has sent nothing yet: they fit, or it is broken. */
static bool say(struct bt_net_gate *g, unsigned status, unsigned port)
{
    char p[PRELUDE_BYTES] = {0};

    memcpy(p, magic, sizeof(magic));
    p[8] = BT_NET_FRAME_VERSION;
    p[10] = (char)status;
    p[12] = (char)(port & 0xff);
    p[13] = (char)(port >> 8);
    for (int i = 0; i < 4; i++) {
        p[16 + i] = (char)(g->net->segment >> 8 * i);
    }
    return send(g->fd, p, sizeof(p), MSG_NOSIGNAL) == (ssize_t)sizeof(p);
}

static unsigned u16_at(const char *p)
{
    return (unsigned)(uint8_t)p[0] | (unsigned)(uint8_t)p[1] << 8;
}

static uint32_t u32_at(const char *p)
{
    return u16_at(p) | (uint32_t)u16_at(p + 2) << 16;
}

static bool is_prelude(const char *p)
{
    static const char zero[12];

    return memcmp(p, magic, sizeof(magic)) == 0 && memcmp(p + 14, zero, 2) == 0 &&
           memcmp(p + 20, zero, sizeof(zero)) == 0;
}

/* 1 there and right, 0 wait, -1 over. */
static int hear(struct bt_net_gate *g)
{
    unsigned version, status;
    uint32_t segment;

    while (g->have < PRELUDE_BYTES) {
        ssize_t n = recv(g->fd, g->prelude + g->have, PRELUDE_BYTES - g->have, 0);

        if (n > 0) {
            g->have += (size_t)n;
        } else if (n < 0 && errno == EINTR) {
            continue;
        } else {
            return n < 0 && errno == EAGAIN ? 0 : -1;
        }
    }
    version = u16_at(g->prelude + 8);
    status = u16_at(g->prelude + 10);
    segment = u32_at(g->prelude + 16);
    if (!is_prelude(g->prelude)) {
        BT_WARN("gate_stranger", "peer=%s msg=\"does not speak the transfer protocol\"",
                g->address);
        return -1;
    }
    if (version != BT_NET_FRAME_VERSION || status != 0 || segment != g->net->segment) {
        BT_WARN("gate_refused",
                "peer=%s version=%u own_version=%d status=%u segment=%u own_segment=%u", g->address,
                version, BT_NET_FRAME_VERSION, status, segment, g->net->segment);
        if (g->state == HEARING) {
            (void)say(g, version != BT_NET_FRAME_VERSION ? 1 : 3, 0);
        }
        return -1;
    }
    return 1;
}

static void open_next_door(struct bt_net *net)
{
    struct bt_list *it;

    while (!net->at_door && (it = bt_list_pop_front(&net->gate_queue)) != NULL) {
        struct bt_net_gate *g = BT_LIST_ENTRY(it, struct bt_net_gate, queue_link);

        g->state = AT_DOOR;
        net->at_door = g;
        set_door(net, &g->other);
        bt_net_timer_start(net, &g->timer, bt_deadline_ns(DOOR_NS));
        if (!say(g, 0, port_of(&net->ucx_address))) {
            gate_free(g); /* comes back here for the next */
            return;
        }
    }
}

/* ---- events ---- */

static bool is_connected(struct bt_net_gate *g)
{
    int e = 0;
    socklen_t len = sizeof(e);

    return getsockopt(g->fd, SOL_SOCKET, SO_ERROR, &e, &len) == 0 && e == 0;
}

/* QUEUING, AT_DOOR, OPEN: only the end may come. */
static bool is_quiet(struct bt_net_gate *g)
{
    char c;
    ssize_t n = recv(g->fd, &c, 1, 0);

    if (n > 0) {
        BT_WARN("gate_violation", "peer=%s msg=\"bytes after the prelude\"", g->address);
    }
    return n < 0 && (errno == EAGAIN || errno == EINTR);
}

static void gate_run(struct bt_net_gate *g)
{
    int r;

    switch (g->state) {
    case CALLING:
        if (!is_connected(g) || !say(g, 0, 0)) {
            gate_fail(g);
            return;
        }
        g->state = ASKING;
        watch(g, EPOLLIN);
        return;
    case ASKING:
    case HEARING:
        r = hear(g);
        if (r < 0) {
            gate_fail(g);
        } else if (r > 0 && g->state == HEARING) {
            g->state = QUEUING;
            bt_list_push_back(&g->net->gate_queue, &g->queue_link);
            open_next_door(g->net);
        } else if (r > 0) {
            struct sockaddr_storage to = g->other;

            go_open(g);
            bt_net_set_port(&to, (uint16_t)u16_at(g->prelude + 12));
            bt_net_peer_call(g->peer, &to);
        }
        return;
    case QUEUING:
    case AT_DOOR:
    case OPEN:
        if (!is_quiet(g)) {
            gate_fail(g);
        }
        return;
    }
}

int bt_net_gate_dial(struct bt_net_peer *peer,
                     const struct sockaddr_storage *to,
                     struct bt_err *err)
{
    struct bt_net *net = peer->net;
    int fd = socket(to->ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    struct bt_net_gate *g;

    if (fd < 0 ||
        (connect(fd, (const struct sockaddr *)to, size_of(to)) != 0 && errno != EINPROGRESS)) {
        BT_FAIL_SYS(err, BT_E_UNAVAILABLE, "cannot connect to %s", peer->address);
        drop_fd(&fd);
        return BT_E_UNAVAILABLE;
    }
    g = gate_new(net, fd, CALLING, to);
    if (!g) {
        close(fd);
        return BT_FAIL(err, BT_E_NOMEM, "connection: out of memory");
    }
    g->peer = peer;
    peer->gate = g;
    return BT_OK;
}

bool bt_net_gate_adopt(struct bt_net_peer *peer)
{
    struct bt_net_gate *g = peer->net->at_door;

    if (!g) {
        return false;
    }
    g->peer = peer;
    peer->gate = g;
    snprintf(peer->address, sizeof(peer->address), "%s", g->address);
    go_open(g);
    g->net->at_door = NULL;
    set_door(g->net, NULL);
    open_next_door(g->net);
    return true;
}

void bt_net_gate_drop(struct bt_net_peer *peer)
{
    if (peer->gate) {
        gate_free(peer->gate);
    }
}

static void watch_port(struct bt_net *net, uint32_t events)
{
    struct epoll_event ev = {.events = events, .data.ptr = net};

    epoll_ctl(net->gate_epfd, EPOLL_CTL_MOD, net->gate_fd, &ev);
}

static void on_pause_over(struct bt_net_timer *t)
{
    watch_port(BT_CONTAINER_OF(t, struct bt_net, gate_pause), EPOLLIN);
}

static void take_calls(struct bt_net *net)
{
    for (int i = 0; i < 16; i++) {
        struct sockaddr_storage sa = {0};
        socklen_t len = sizeof(sa);
        struct bt_net_gate *g;
        int fd = accept4(net->gate_fd, (struct sockaddr *)&sa, &len, SOCK_NONBLOCK | SOCK_CLOEXEC);

        if (fd < 0) {
            if (errno == EMFILE || errno == ENFILE || errno == ENOMEM || errno == ENOBUFS) {
                BT_WARN("gate_accept", "reason=\"%s\"", strerror(errno));
                watch_port(net, 0);
                bt_net_timer_start(net, &net->gate_pause, bt_deadline_ns(PAUSE_NS));
            }
            return;
        }
        g = net->n_handshakes < MAX_HANDSHAKES && !net->stopping ? gate_new(net, fd, HEARING, &sa)
                                                                 : NULL;
        if (!g) {
            close(fd);
        }
    }
}

bool bt_net_gate_poll(struct bt_net *net)
{
    struct epoll_event evs[32];
    int n = epoll_wait(net->gate_epfd, evs, BT_ARRAY_LEN(evs), 0);

    for (int i = 0; i < n; i++) {
        if (evs[i].data.ptr == net) {
            take_calls(net);
            continue;
        }
        /* An earlier event of this batch may have freed it. */
        bt_list_for_each (it, &net->gates) {
            struct bt_net_gate *g = BT_LIST_ENTRY(it, struct bt_net_gate, link);

            if (g == evs[i].data.ptr) {
                gate_run(g);
                break;
            }
        }
    }
    return n > 0;
}

/* ---- start and stop ---- */

/* The descriptor of UCX's listener: the listening socket of this process with its port. */
static int find_listener(uint16_t port)
{
    DIR *d = opendir("/proc/self/fd");
    struct dirent *e;
    int found = -1;

    while (d && found < 0 && (e = readdir(d)) != NULL) {
        struct sockaddr_storage sa;
        socklen_t len = sizeof(sa), on_len = sizeof(int);
        int fd = (int)strtol(e->d_name, NULL, 10), on = 0;

        if (e->d_name[0] != '.' && getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &on, &on_len) == 0 &&
            on && getsockname(fd, (struct sockaddr *)&sa, &len) == 0 && port_of(&sa) == port) {
            found = fd;
        }
    }
    if (d) {
        closedir(d);
    }
    return found;
}

int bt_net_gate_listen(struct bt_net *net, struct bt_err *err)
{
    struct epoll_event ev = {.events = EPOLLIN, .data.ptr = net};
    struct sockaddr_storage bound = {0};
    socklen_t len = sizeof(bound);
    int on = 1;

    net->gate_pause.fn = on_pause_over;
    net->door_fd = find_listener(port_of(&net->ucx_address));
    if (net->door_fd < 0) {
        return BT_FAIL(err, BT_E_INTERNAL, "UCX's listener is not among the open files");
    }
    set_door(net, NULL);
    net->gate_epfd = epoll_create1(EPOLL_CLOEXEC);
    net->gate_fd =
        socket(net->listen_address.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (net->gate_fd < 0 || net->gate_epfd < 0) {
        return BT_FAIL_SYS(err, BT_E_SYS, "transfer port");
    }
    setsockopt(net->gate_fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
    if (bind(net->gate_fd, (const struct sockaddr *)&net->listen_address,
             size_of(&net->listen_address)) != 0 ||
        listen(net->gate_fd, 128) != 0 ||
        getsockname(net->gate_fd, (struct sockaddr *)&bound, &len) != 0) {
        return BT_FAIL_SYS(err, BT_E_CONFIG, "cannot listen on %.80s", net->listen);
    }
    if (epoll_ctl(net->gate_epfd, EPOLL_CTL_ADD, net->gate_fd, &ev) != 0) {
        return BT_FAIL_SYS(err, BT_E_SYS, "epoll");
    }
    bt_net_format(&bound, net->address, sizeof(net->address));
    return BT_OK;
}

void bt_net_gate_close(struct bt_net *net)
{
    net->door_fd = -1;
    while (!bt_list_empty(&net->gates)) {
        gate_free(BT_LIST_ENTRY(net->gates.next, struct bt_net_gate, link));
    }
    drop_fd(&net->gate_fd);
    drop_fd(&net->gate_epfd);
}
