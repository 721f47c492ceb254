/* What strangers may send to the gate in front of UCX's connection setup, in pieces of any size,
 * and what a peer may answer: a prelude is right, or the connection ends. First byte: even = they
 * called us, odd = we called them; then parts, each a piece as it comes from the socket. */
#include "common/net/gate.c"

#include "tests/fuzz/feeder.inc.h"

#include <netinet/ip.h>

#define SEGMENT (256u << 10)

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

static void must(bool ok)
{
    if (!ok) {
        abort();
    }
}

static void init(struct bt_net *net)
{
    net->gate_fd = net->door_fd = -1;
    net->gate_epfd = epoll_create1(EPOLL_CLOEXEC);
    must(net->gate_epfd >= 0);
    bt_list_init(&net->gates);
    bt_list_init(&net->gate_queue);
    bt_list_init(&net->timers);
    net->ucx_address.ss_family = AF_INET;
    net->segment = SEGMENT;
}

/* The bytes that came, if all of them are a prelude that may pass. */
static bool is_right(const char *p, size_t n)
{
    static const char zero[12], segment[4] = {0, 0, SEGMENT >> 16, 0};

    return n == PRELUDE_BYTES && memcmp(p, magic, 8) == 0 && p[8] == BT_NET_FRAME_VERSION &&
           memcmp(p + 9, zero, 3) == 0 && memcmp(p + 14, zero, 2) == 0 &&
           memcmp(p + 16, segment, 4) == 0 && memcmp(p + 20, zero, 12) == 0;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    struct feeder f = {data, n};
    bool in = feeder_byte(&f) % 2 == 0;
    struct sockaddr_storage other = {.ss_family = AF_INET};
    struct bt_net net = {0};
    struct bt_net_gate *g;
    char all[2 * PRELUDE_BYTES], answer[2 * PRELUDE_BYTES];
    struct bt_str piece;
    size_t n_all = 0;
    int ends[2], heard = 0;
    ssize_t n_answer;

    bt_log_threshold = BT_LOG_ERROR;
    init(&net);
    must(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends) == 0);
    g = gate_new(&net, ends[0], in ? HEARING : ASKING, &other);
    must(g);
    while (heard == 0 && feeder_part(&f, &piece)) {
        size_t room = sizeof(all) - n_all;

        memcpy(all + n_all, piece.p, BT_MIN(piece.n, room));
        n_all += BT_MIN(piece.n, room);
        must(piece.n == 0 || send(ends[1], piece.p, piece.n, MSG_NOSIGNAL) == (ssize_t)piece.n);
        if (in) {
            gate_run(g);
            heard = bt_list_empty(&net.gates) ? -1 : net.at_door == g;
        } else {
            heard = hear(g);
        }
    }
    must(heard != 0 || n_all < PRELUDE_BYTES);
    must((heard > 0) == (n_all >= PRELUDE_BYTES && is_right(all, PRELUDE_BYTES)));
    must(heard <= 0 || in || u16_at(g->prelude + 12) <= UINT16_MAX);
    n_answer = recv(ends[1], answer, sizeof(answer), 0);
    if (in && heard > 0) { /* shown the door; whatever else comes ends it */
        must(n_answer == PRELUDE_BYTES && is_right(answer, PRELUDE_BYTES));
        must(net.n_handshakes == 1);
        if (n_all == PRELUDE_BYTES && send(ends[1], "x", 1, MSG_NOSIGNAL) == 1) {
            gate_run(g);
            must(bt_list_empty(&net.gates) && !net.at_door);
        }
    }
    bt_net_gate_close(&net);
    must(net.n_handshakes == 0 && bt_list_empty(&net.timers));
    close(ends[1]);
    return 0;
}
