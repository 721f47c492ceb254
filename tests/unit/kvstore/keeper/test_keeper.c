/* A keeper in a process of its own, and processes that use it, keep to its rules or do not. */
#include "kvstore/keeper/client.h"
#include "kvstore/keeper/server.h"
#include "kvstore/keeper/sock.h"

#include "tests/unit/cmocka.h"

#include "common/thr/thread.h"
#include "common/thr/time.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#define BYTES   (256u << 10)
#define WAIT_NS (20 * BT_NS_PER_S)

static char folder[64], path[100];

#define EVENTUALLY(cond)                                                                           \
    do {                                                                                           \
        uint64_t end_ = bt_deadline_ns(WAIT_NS);                                                   \
        while (!(cond)) {                                                                          \
            if (bt_now_ns() > end_) {                                                              \
                fail_msg("never: %s", #cond);                                                      \
            }                                                                                      \
            usleep(2000);                                                                          \
        }                                                                                          \
    } while (0)

/* ---- processes ---- */

static const struct kv_keeper_conf usual = {.socket = path,
                                            .max_clients = 8,
                                            .max_regions = 6,
                                            .max_bytes = 8u << 20,
                                            .orphan_ns = BT_NEVER_NS,
                                            .huge_pages = true};

static bool answers(void)
{
    struct kv_keeper_row rows[8];
    size_t n;

    return kv_keeper_list(path, BT_NS_PER_S, rows, 8, &n, NULL) == BT_OK;
}

static pid_t start_keeper(const struct kv_keeper_conf *conf)
{
    pid_t pid = fork();

    assert_true(pid >= 0);
    if (pid == 0) {
        struct kv_keeperd *k;

        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (kv_keeperd_create(conf, &k, NULL) < 0) {
            _exit(9);
        }
        kv_keeperd_run(k);
        _exit(0);
    }
    EVENTUALLY(answers());
    return pid;
}

static void end(pid_t pid)
{
    kill(pid, SIGKILL);
    assert_int_equal(waitpid(pid, NULL, 0), pid);
}

/* What a failed test left running would deceive the next one. */
static int end_children(void **state)
{
    char name[64], line[256] = "";
    FILE *f;

    snprintf(name, sizeof(name), "/proc/self/task/%d/children", (int)getpid());
    f = fopen(name, "r");
    if (f && fgets(line, sizeof(line), f)) {
        for (char *at = line, *after;; at = after) {
            long pid = strtol(at, &after, 10);

            if (after == at) {
                break;
            }
            end((pid_t)pid);
        }
    }
    if (f) {
        fclose(f);
    }
    return 0;
}

/* A node's process: gets its memory, writes `mark` into all of it, says so, lives on. */
struct node {
    pid_t pid;
    int from;
};

struct report {
    uint64_t id, previous;
    bool kept, from_keeper;
    uint8_t first; /* byte that was there */
};

static const struct bt_mem_ops *node_ops = &bt_mem_host; /* of nodes to be started */

static void be_node(uint64_t incarnation, uint8_t mark, int to)
{
    struct kv_keeper_cfg cfg = {path, "n0", incarnation, 10 * BT_NS_PER_S};
    struct kv_keeper_want want = {.name = "kv", .bytes = BYTES, .ops = node_ops};
    struct kv_keeper_got got;
    struct kv_keeper *k;
    struct report r;

    prctl(PR_SET_PDEATHSIG, SIGKILL);
    want.digest[0] = 1;
    if (kv_keeper_open(&cfg, &k, NULL) < 0 || kv_keeper_get(k, &want, &got, NULL) < 0) {
        _exit(8);
    }
    r = (struct report){got.id, got.previous, got.kept, got.from_keeper, *(uint8_t *)got.mem.base};
    memset(got.mem.base, mark, BYTES);
    if (kv_keeper_start(k, NULL) < 0 || write(to, &r, sizeof(r)) != (ssize_t)sizeof(r)) {
        _exit(8);
    }
    for (;;) {
        pause();
    }
}

static struct node start_node(uint64_t incarnation, uint8_t mark)
{
    struct node n;
    int fds[2];

    assert_int_equal(pipe(fds), 0);
    n.from = fds[0];
    n.pid = fork();
    assert_true(n.pid >= 0);
    if (n.pid == 0) {
        close(fds[0]);
        be_node(incarnation, mark, fds[1]);
    }
    close(fds[1]);
    return n;
}

static struct report report_of(struct node *n)
{
    struct report r;

    assert_int_equal(read(n->from, &r, sizeof(r)), sizeof(r));
    return r;
}

static void end_node(struct node *n)
{
    end(n->pid);
    close(n->from);
}

/* ---- raw clients ---- */

static int dial(void)
{
    int fd;

    assert_int_equal(kv_sock_connect(path, &fd, NULL), BT_OK);
    return fd;
}

static struct kv_packet hear(int fd)
{
    struct kv_packet p;

    assert_int_equal(kv_sock_wait(fd, bt_deadline_ns(WAIT_NS)), BT_OK);
    assert_int_equal(kv_sock_recv(fd, &p), BT_OK);
    return p;
}

static void hello(int fd, const char *node, uint64_t incarnation)
{
    struct kv_keeper_hello m = {.incarnation = incarnation};
    struct kv_packet p;

    snprintf(m.node, sizeof(m.node), "%s", node);
    assert_int_equal(kv_sock_send(fd, KV_KEEPER_HELLO, &m, sizeof(m), -1), BT_OK);
    p = hear(fd);
    assert_true(kv_packet_is(&p, KV_KEEPER_WELCOME));
}

static struct kv_keeper_request request(const char *region, uint64_t bytes)
{
    struct kv_keeper_request q = {.bytes = bytes, .kind = BT_MEM_HOST};

    q.digest[0] = 1;
    snprintf(q.region, sizeof(q.region), "%s", region);
    return q;
}

static struct kv_packet get(int fd, struct kv_keeper_request q)
{
    assert_int_equal(kv_sock_send(fd, KV_KEEPER_GET, &q, sizeof(q), -1), BT_OK);
    return hear(fd);
}

static struct kv_packet give(int fd, struct kv_keeper_request q, int mem)
{
    assert_int_equal(kv_sock_send(fd, KV_KEEPER_REGISTER, &q, sizeof(q), mem), BT_OK);
    return hear(fd);
}

static void assert_refused(struct kv_packet *p, int rc)
{
    assert_true(kv_packet_is(p, KV_KEEPER_REFUSED));
    assert_int_equal(p->refused.rc, rc);
    assert_int_equal(p->n_fds, 0);
    assert_true(p->refused.text[0] != '\0');
}

static void assert_granted(struct kv_packet *p, bool with_fd)
{
    assert_true(kv_packet_is(p, KV_KEEPER_GRANT));
    assert_int_equal(p->n_fds, with_fd);
    kv_packet_drop(p);
}

static bool closed(int fd)
{
    struct kv_packet p;

    return kv_sock_recv(fd, &p) == BT_E_PEER_LOST;
}

static int count_fds(pid_t pid)
{
    char name[40];
    int n = 0;
    DIR *d;

    snprintf(name, sizeof(name), "/proc/%d/fd", (int)pid);
    d = opendir(name);
    assert_non_null(d);
    while (readdir(d)) {
        n++;
    }
    closedir(d);
    return n;
}

/* Those of an idle keeper: what closed connections had is gone. */
static int count_idle_fds(pid_t pid)
{
    int n = count_fds(pid);

    for (int same = 0; same < 10; same++) {
        int now;

        usleep(3000);
        now = count_fds(pid);
        same = now == n ? same : 0;
        n = now;
    }
    return n;
}

static bool row_of(const char *region, struct kv_keeper_row *ret)
{
    struct kv_keeper_row rows[16];
    size_t n = 0;

    if (kv_keeper_list(path, BT_NS_PER_S, rows, 16, &n, NULL) < 0) {
        return false;
    }
    for (size_t i = 0; i < n; i++) {
        if (strcmp(rows[i].region, region) == 0) {
            *ret = rows[i];
            return true;
        }
    }
    return false;
}

/* ---- tests ---- */

static void test_content_outlives_the_process(void **state)
{
    pid_t keeper = start_keeper(&usual);
    struct node a = start_node(1, 0x5a), b;
    struct report r = report_of(&a);
    struct kv_keeper_row row;
    uint64_t id = r.id;

    assert_true(r.from_keeper && !r.kept && r.previous == 0 && r.first == 0);
    assert_true(row_of("kv", &row));
    assert_string_equal(row.node, "n0");
    assert_int_equal(row.pid, a.pid);
    assert_int_equal(row.incarnation, 1);
    assert_int_equal(row.bytes, BYTES);
    end_node(&a);
    EVENTUALLY(row_of("kv", &row) && row.pid == 0);
    b = start_node(2, 0x5b);
    r = report_of(&b);
    assert_true(r.from_keeper && r.kept && r.previous == 1 && r.first == 0x5a && r.id == id);
    end_node(&b);
    end(keeper);
}

static void test_fencing(void **state)
{
    pid_t keeper = start_keeper(&usual);
    struct kv_keeper_request q = request("kv", BYTES);
    struct node a = start_node(11, 0x11), b;
    struct kv_packet p;
    struct report r;
    int fd;

    report_of(&a);
    fd = dial();
    hello(fd, "n0", 22);
    for (q.wait_ms = 0; q.wait_ms <= 50; q.wait_ms += 50) { /* at once, and when its time is over */
        p = get(fd, q);
        assert_refused(&p, BT_E_EXISTS);
        assert_int_equal(p.refused.incarnation, 11);
        assert_int_equal(p.refused.pid, a.pid);
        assert_non_null(strstr(p.refused.text, "incarnation 11"));
        assert_non_null(strstr(p.refused.text, "incarnation 22"));
    }
    /* Nor may it bring its own. */
    p = give(fd, q, memfd_create("x", 0));
    assert_refused(&p, BT_E_EXISTS);
    /* Another node's region of the same name is another region. */
    close(fd);
    fd = dial();
    hello(fd, "n1", 22);
    p = get(fd, q);
    assert_granted(&p, true);
    close(fd);
    /* A successor waits for the end, and a stopped predecessor is not over. */
    kill(a.pid, SIGSTOP);
    b = start_node(33, 0x33);
    usleep(100000);
    assert_int_equal(fcntl(b.from, F_SETFL, O_NONBLOCK), 0);
    assert_int_equal(read(b.from, &r, sizeof(r)), -1);
    assert_int_equal(fcntl(b.from, F_SETFL, 0), 0);
    end_node(&a);
    r = report_of(&b);
    assert_true(r.kept && r.previous == 11 && r.first == 0x11);
    end_node(&b);
    end(keeper);
}

/* The connection's end is no proof: the memory is still mapped. */
static void test_a_connection_that_ends_frees_nothing(void **state)
{
    pid_t keeper = start_keeper(&usual);
    struct kv_keeper_request q = request("kv", BYTES);
    struct kv_packet p;
    int fd = dial(), pipe_fds[2];
    char c;
    pid_t pid;

    assert_int_equal(pipe(pipe_fds), 0);
    pid = fork();
    if (pid == 0) {
        int own;

        prctl(PR_SET_PDEATHSIG, SIGKILL);
        own = dial();
        hello(own, "n0", 1);
        p = get(own, q);
        close(own);
        c = kv_packet_is(&p, KV_KEEPER_GRANT);
        if (write(pipe_fds[1], &c, 1) == 1) {
            pause();
        }
        _exit(1);
    }
    assert_int_equal(read(pipe_fds[0], &c, 1), 1);
    assert_int_equal(c, 1);
    hello(fd, "n0", 2);
    p = get(fd, q);
    assert_refused(&p, BT_E_EXISTS);
    end(pid);
    q.wait_ms = 10000;
    p = get(fd, q);
    assert_true(p.grant.kept);
    assert_granted(&p, true);
    close(fd);
    close(pipe_fds[0]);
    close(pipe_fds[1]);
    end(keeper);
}

static void test_other_digest_or_size_is_new_memory(void **state)
{
    pid_t keeper = start_keeper(&usual);
    int fd = dial();
    struct kv_keeper_request q = request("kv", BYTES);
    struct kv_packet p;
    uint64_t ids[4];

    hello(fd, "n0", 5);
    for (int i = 0; i < 4; i++) {
        q.digest[3] = i >= 1;
        q.bytes = i == 2 ? 2 * BYTES : BYTES;
        p = get(fd, q);
        assert_true(kv_packet_is(&p, KV_KEEPER_GRANT));
        assert_false(p.grant.kept);
        assert_true(p.grant.bytes >= q.bytes);
        ids[i] = p.grant.id;
        for (int j = 0; j < i; j++) {
            assert_true(ids[j] != ids[i]);
        }
        assert_granted(&p, true);
    }
    p = get(fd, q); /* again, by the one that has it */
    assert_true(p.grant.kept && p.grant.id == ids[3]);
    assert_granted(&p, true);
    q.kind = BT_MEM_CUDA;
    p = get(fd, q);
    assert_refused(&p, BT_E_UNSUPPORTED);
    close(fd);
    end(keeper);
}

/* Nobody can cut the memory under those who have it mapped. */
static void test_size_is_sealed(void **state)
{
    pid_t keeper = start_keeper(&usual);
    int fd = dial();
    struct kv_packet p;

    hello(fd, "n0", 5);
    p = get(fd, request("kv", BYTES));
    assert_int_equal(p.n_fds, 1);
    assert_int_not_equal(ftruncate(p.fds[0], 0), 0);
    assert_int_not_equal(ftruncate(p.fds[0], 1 << 30), 0);
    kv_packet_drop(&p);
    close(fd);
    end(keeper);
}

/* Huge pages where the system has set some aside, with the same content rules. */
static void test_huge_pages(void **state)
{
    struct kv_keeper_request q = request("kv", 3u << 20);
    unsigned long free_pages = 0;
    struct kv_keeper_row row;
    char line[128];
    struct kv_packet p;
    FILE *f = fopen("/proc/meminfo", "r");
    pid_t keeper;
    int fd;

    while (f && fgets(line, sizeof(line), f)) {
        if (sscanf(line, "HugePages_Free: %lu", &free_pages) == 1) {
            break;
        }
    }
    if (f) {
        fclose(f);
    }
    keeper = start_keeper(&usual);
    fd = dial();
    hello(fd, "n0", 5);
    p = get(fd, q);
    assert_int_equal(p.n_fds, 1);
    if (free_pages >= 2) { /* of 2 MiB */
        assert_int_equal(p.grant.pages, KV_KEEPER_PAGES_HUGE);
        assert_int_equal(p.grant.bytes, 4u << 20);
    } else {
        assert_int_equal(p.grant.pages, KV_KEEPER_PAGES_PLAIN); /* none: the usual ones will do */
        assert_int_equal(p.grant.bytes, 3u << 20);
    }
    assert_true(row_of("kv", &row) && row.pages == p.grant.pages);
    kv_packet_drop(&p);
    close(fd);
    end(keeper);
}

static void test_hostile(void **state)
{
    pid_t keeper = start_keeper(&usual);
    int before = count_idle_fds(keeper), mem = memfd_create("m", 0), fds[2], fd, ro;
    char junk[sizeof(struct kv_keeper_rows) + 100], name[64];
    struct kv_keeper_request q = request("kv", BYTES);
    struct kv_keeper_hello h = {.incarnation = 1};
    struct kv_packet p;

    assert_int_equal(ftruncate(mem, BYTES), 0);
    assert_int_equal(pipe(fds), 0);
    snprintf(name, sizeof(name), "/proc/self/fd/%d", mem);
    ro = open(name, O_RDONLY);
    assert_true(ro >= 0);

    /* No message at all, of many sizes. */
    memset(junk, 0x41, sizeof(junk));
    for (size_t n = 1; n <= sizeof(junk); n = n * 2 + 1) {
        fd = dial();
        assert_int_equal(send(fd, junk, n, 0), (ssize_t)n);
        p = hear(fd);
        assert_refused(&p, BT_E_PEER_PROTOCOL);
        EVENTUALLY(closed(fd));
        close(fd);
    }
    /* A version that is to come, a type that nobody knows, answers instead of questions. */
    for (int i = 0; i < 4; i++) {
        struct kv_keeper_head head = {KV_KEEPER_MAGIC, KV_KEEPER_VERSION + (i == 0),
                                      KV_KEEPER_STATUS};

        head.type = (uint16_t)(i == 1 ? 99 : i == 2 ? KV_KEEPER_GRANT : i == 3 ? 0 : head.type);
        fd = dial();
        assert_int_equal(send(fd, &head, sizeof(head), 0), (ssize_t)sizeof(head));
        p = hear(fd);
        assert_refused(&p, BT_E_PEER_PROTOCOL);
        EVENTUALLY(closed(fd));
        close(fd);
    }
    /* Requests before the hello. */
    fd = dial();
    p = get(fd, q);
    assert_refused(&p, BT_E_PEER_PROTOCOL);
    EVENTUALLY(closed(fd));
    close(fd);
    /* Names without an end, with odd characters, empty; no incarnation. */
    for (int i = 0; i < 4; i++) {
        memset(h.node, i == 0 ? 'x' : 0, sizeof(h.node));
        snprintf(h.node, i == 0 ? 0 : sizeof(h.node), "%s", i == 1 ? "a/b" : i == 3 ? "n0" : "");
        h.incarnation = i != 3;
        fd = dial();
        assert_int_equal(kv_sock_send(fd, KV_KEEPER_HELLO, &h, sizeof(h), -1), BT_OK);
        p = hear(fd);
        assert_refused(&p, BT_E_PEER_PROTOCOL);
        EVENTUALLY(closed(fd));
        close(fd);
    }
    /* A region name without an end; a second hello. */
    fd = dial();
    hello(fd, "n0", 1);
    memset(q.region, 'r', sizeof(q.region));
    p = get(fd, q);
    assert_refused(&p, BT_E_PEER_PROTOCOL);
    close(fd);
    q = request("kv", BYTES);
    fd = dial();
    hello(fd, "n0", 1);
    h.incarnation = 2;
    assert_int_equal(kv_sock_send(fd, KV_KEEPER_HELLO, &h, sizeof(h), -1), BT_OK);
    p = hear(fd);
    assert_refused(&p, BT_E_PEER_PROTOCOL);
    close(fd);
    /* Descriptors where none belong, and none where one does. */
    fd = dial();
    hello(fd, "n0", 1);
    assert_int_equal(kv_sock_send(fd, KV_KEEPER_GET, &q, sizeof(q), mem), BT_OK);
    p = hear(fd);
    assert_refused(&p, BT_E_PEER_PROTOCOL);
    close(fd);
    fd = dial();
    hello(fd, "n0", 1);
    p = give(fd, q, -1);
    assert_refused(&p, BT_E_PEER_PROTOCOL);
    close(fd);
    /* What is no memory, is too small or cannot be written. */
    fd = dial();
    hello(fd, "n0", 1);
    p = give(fd, q, fds[0]);
    assert_refused(&p, BT_E_INVALID);
    p = give(fd, q, ro);
    assert_refused(&p, BT_E_INVALID);
    q.bytes = BYTES + 1;
    p = give(fd, q, mem);
    assert_refused(&p, BT_E_INVALID);
    /* Sizes beyond all bounds. */
    q.bytes = UINT64_MAX;
    p = get(fd, q);
    assert_refused(&p, BT_E_INVALID);
    q.bytes = 0;
    p = get(fd, q);
    assert_refused(&p, BT_E_INVALID);
    q.bytes = usual.max_bytes + 1;
    p = get(fd, q);
    assert_refused(&p, BT_E_EXHAUSTED);
    close(fd);
    /* It serves, and kept none of all those descriptors. */
    EVENTUALLY(count_fds(keeper) == before);
    fd = dial();
    hello(fd, "n0", 1);
    p = get(fd, request("kv", BYTES));
    assert_granted(&p, true);
    close(fd);
    close(mem);
    close(ro);
    close(fds[0]);
    close(fds[1]);
    end(keeper);
}

/* Memory that could be made smaller under those who map it, or that lets nobody write, is refused
 * and not kept; what can be sealed is taken, and is sealed. */
static void test_what_cannot_be_relied_on(void **state)
{
    pid_t keeper = start_keeper(&usual);
    int before = count_idle_fds(keeper), mem[4], fd = dial();
    struct kv_keeper_request q = request("kv", BYTES);
    struct kv_packet p;

    for (int i = 0; i < 4; i++) {
        mem[i] = memfd_create("m", i == 0 ? 0 : MFD_ALLOW_SEALING);
        assert_int_equal(ftruncate(mem[i], i == 2 ? BYTES - 1 : BYTES), 0);
    }
    assert_int_equal(fcntl(mem[1], F_ADD_SEALS, F_SEAL_WRITE), 0);
    hello(fd, "n0", 1);
    p = give(fd, q, mem[0]);
    assert_refused(&p, BT_E_INVALID);
    assert_non_null(strstr(p.refused.text, "sealed"));
    p = give(fd, q, mem[1]);
    assert_refused(&p, BT_E_INVALID);
    assert_non_null(strstr(p.refused.text, "written"));
    p = give(fd, q, mem[2]);
    assert_refused(&p, BT_E_INVALID);
    close(fd);
    EVENTUALLY(count_fds(keeper) == before);
    fd = dial();
    hello(fd, "n0", 1);
    p = give(fd, q, mem[3]);
    assert_granted(&p, false);
    assert_int_not_equal(ftruncate(mem[3], 0), 0);
    close(fd);
    for (int i = 0; i < 4; i++) {
        close(mem[i]);
    }
    end(keeper);
}

/* More descriptors than there is room for: all of them are closed. */
static void test_a_heap_of_descriptors(void **state)
{
    pid_t keeper = start_keeper(&usual);
    int before = count_idle_fds(keeper), fd = dial(), mem = memfd_create("m", 0), many[100];
    struct kv_keeper_request q = request("kv", BYTES);
    struct iovec iov = {&q, sizeof(q)};
    union {
        struct cmsghdr align;
        char room[CMSG_SPACE(sizeof(many))];
    } c = {0};
    struct msghdr m = {
        .msg_iov = &iov, .msg_iovlen = 1, .msg_control = c.room, .msg_controllen = sizeof(c.room)};
    struct kv_packet p;

    hello(fd, "n0", 1);
    for (size_t i = 0; i < BT_ARRAY_LEN(many); i++) {
        many[i] = mem;
    }
    CMSG_FIRSTHDR(&m)->cmsg_level = SOL_SOCKET;
    CMSG_FIRSTHDR(&m)->cmsg_type = SCM_RIGHTS;
    CMSG_FIRSTHDR(&m)->cmsg_len = CMSG_LEN(sizeof(many));
    memcpy(CMSG_DATA(CMSG_FIRSTHDR(&m)), many, sizeof(many));
    q.head = (struct kv_keeper_head){KV_KEEPER_MAGIC, KV_KEEPER_VERSION, KV_KEEPER_REGISTER};
    assert_int_equal(sendmsg(fd, &m, 0), (ssize_t)sizeof(q));
    p = hear(fd);
    assert_refused(&p, BT_E_PEER_PROTOCOL);
    close(fd);
    EVENTUALLY(count_fds(keeper) == before);
    close(mem);
    end(keeper);
}

/* Who asks and does not read, or asks twice at once, loses the connection and nothing else. */
static void test_rude_clients(void **state)
{
    pid_t keeper = start_keeper(&usual);
    struct kv_keeper_head head = {KV_KEEPER_MAGIC, KV_KEEPER_VERSION, KV_KEEPER_STATUS};
    struct node a = start_node(1, 1);
    struct kv_keeper_request q = request("kv", BYTES);
    int fd = dial(), n;
    struct kv_packet p;

    report_of(&a);
    for (n = 0; n < 100000; n++) {
        if (send(fd, &head, sizeof(head), MSG_NOSIGNAL | MSG_DONTWAIT) < 0 && errno != EAGAIN) {
            break;
        }
    }
    assert_true(n < 100000);
    close(fd);
    fd = dial();
    hello(fd, "n0", 2);
    q.wait_ms = 60000;
    assert_int_equal(kv_sock_send(fd, KV_KEEPER_GET, &q, sizeof(q), -1), BT_OK);
    p = get(fd, q);
    assert_refused(&p, BT_E_PEER_PROTOCOL);
    EVENTUALLY(closed(fd));
    close(fd);
    assert_true(answers());
    end_node(&a);
    end(keeper);
}

static void test_limits(void **state)
{
    pid_t keeper = start_keeper(&usual);
    struct kv_packet p;
    int fds[9], fd;
    char name[8];

    for (int i = 0; i < 8; i++) {
        fds[i] = dial();
        hello(fds[i], "n0", 1); /* one process, one incarnation, eight connections */
    }
    fds[8] = dial();
    p = hear(fds[8]);
    assert_refused(&p, BT_E_EXHAUSTED);
    for (int i = 1; i < 9; i++) {
        close(fds[i]);
    }
    for (int i = 0; i < 7; i++) {
        snprintf(name, sizeof(name), "r%d", i);
        p = get(fds[0], request(name, BYTES));
        if (i < 6) {
            assert_granted(&p, true);
        } else {
            assert_refused(&p, BT_E_EXHAUSTED);
        }
    }
    close(fds[0]);
    end(keeper);

    /* What nobody has makes room. */
    keeper = start_keeper(&usual);
    for (int i = 0; i < 20; i++) {
        pid_t pid = fork();
        int status;

        if (pid == 0) {
            fd = dial();
            snprintf(name, sizeof(name), "n%d", i);
            hello(fd, name, 1);
            p = get(fd, request("kv", 3u << 20)); /* two of them fit */
            _exit(kv_packet_is(&p, KV_KEEPER_GRANT) ? 0 : 1);
        }
        assert_int_equal(waitpid(pid, &status, 0), pid);
        assert_int_equal(status, 0);
    }
    end(keeper);
}

static void test_orphans_expire(void **state)
{
    struct kv_keeper_conf conf = usual;
    struct kv_keeper_row row;
    struct node a;
    pid_t keeper;

    conf.orphan_ns = 50 * BT_NS_PER_MS;
    keeper = start_keeper(&conf);
    a = start_node(1, 1);
    report_of(&a);
    usleep(120000);
    assert_true(row_of("kv", &row)); /* somebody has it */
    end_node(&a);
    EVENTUALLY(!row_of("kv", &row));
    assert_true(answers());
    end(keeper);
}

/* Killed and started again, over and over: its engine brings its memory to the next one. */
static void test_keeper_dies(void **state)
{
    pid_t keeper = start_keeper(&usual);
    struct node a = start_node(1, 0x77), b;
    struct report r = report_of(&a);
    struct kv_keeper_row row;
    uint64_t id = r.id;

    for (int i = 0; i < 5; i++) {
        end(keeper);
        keeper = start_keeper(&usual);
        EVENTUALLY(row_of("kv", &row) && row.pid == (uint32_t)a.pid);
        assert_true(row.id == id && row.incarnation == 1);
    }
    end_node(&a);
    b = start_node(2, 0x78);
    r = report_of(&b);
    assert_true(r.kept && r.id == id && r.previous == 1 && r.first == 0x77);
    end_node(&b);
    end(keeper);
}

/* No keeper at the start: memory of one's own, which a keeper gets when it comes. */
static void test_keeper_comes_later(void **state)
{
    struct node a = start_node(1, 0x66), b;
    struct report r = report_of(&a);
    struct kv_keeper_row row;
    pid_t keeper;

    assert_true(!r.from_keeper && !r.kept && r.id != 0);
    keeper = start_keeper(&usual);
    EVENTUALLY(row_of("kv", &row));
    assert_true(row.id == r.id && row.pid == (uint32_t)a.pid);
    end_node(&a);
    b = start_node(2, 0x67);
    r = report_of(&b);
    assert_true(r.from_keeper && r.kept && r.first == 0x66);
    end_node(&b);
    end(keeper);
}

/* Memory of a device: the keeper makes none, but holds what a process has made and filled. */
static void test_device_memory(void **state)
{
    static struct bt_mem_ops device;
    pid_t keeper = start_keeper(&usual);
    struct node a, b;
    struct kv_keeper_row row;
    struct report r;
    uint64_t id;

    device = bt_mem_host;
    device.kind = BT_MEM_CUDA;
    node_ops = &device;
    a = start_node(1, 0x55);
    r = report_of(&a);
    id = r.id;
    assert_true(!r.from_keeper && !r.kept && r.first == 0);
    EVENTUALLY(row_of("kv", &row) && row.pid == (uint32_t)a.pid);
    end_node(&a);
    b = start_node(2, 0x56);
    r = report_of(&b);
    assert_true(r.from_keeper && r.kept && r.first == 0x55 && r.id == id && r.previous == 1);
    end_node(&b);
    node_ops = &bt_mem_host; /* another kind under the same name is other memory */
    a = start_node(3, 0x57);
    r = report_of(&a);
    assert_true(r.from_keeper && !r.kept && r.first == 0);
    end_node(&a);
    end(keeper);
}

/* Nobody has the region, its owner from before the keeper's death comes back too late. */
static void test_too_late(void **state)
{
    pid_t keeper = start_keeper(&usual);
    struct node a = start_node(1, 0x44), b;
    struct report r;
    struct kv_keeper_row row;

    report_of(&a);
    kill(a.pid, SIGSTOP);
    assert_int_equal(waitpid(a.pid, NULL, WUNTRACED), a.pid); /* a signal takes its time */
    end(keeper);
    keeper = start_keeper(&usual);
    b = start_node(2, 0x45); /* the new keeper knows of nobody else */
    r = report_of(&b);
    assert_true(r.from_keeper && !r.kept);
    kill(a.pid, SIGCONT);
    usleep(100000);
    assert_true(row_of("kv", &row) && row.pid == (uint32_t)b.pid && row.id == r.id);
    end_node(&b);
    EVENTUALLY(row_of("kv", &row) && row.pid == (uint32_t)a.pid); /* it tried again and again */
    end_node(&a);
    end(keeper);
}

/* A keeper that hangs costs a start a bounded time. */
static void test_keeper_hangs(void **state)
{
    pid_t keeper = start_keeper(&usual);
    struct kv_keeper_row row;
    struct report r;
    struct node a;

    kill(keeper, SIGSTOP);
    a = start_node(1, 0x11);
    r = report_of(&a);
    assert_false(r.from_keeper);
    kill(keeper, SIGCONT);
    EVENTUALLY(row_of("kv", &row) && row.id == r.id);
    end_node(&a);
    end(keeper);
}

static void test_one_keeper_a_socket(void **state)
{
    pid_t keeper = start_keeper(&usual);
    struct kv_keeperd *k;
    struct bt_err err;
    struct stat st;

    assert_int_equal(kv_keeperd_create(&usual, &k, &err), BT_E_EXISTS);
    assert_non_null(strstr(err.msg, path));
    assert_true(answers());
    assert_int_equal(stat(path, &st), 0);
    assert_int_equal(st.st_mode & 0777, 0600);
    end(keeper);
    assert_int_equal(kv_keeperd_create(&usual, &k, NULL), BT_OK); /* over the dead one's socket */
    kv_keeperd_destroy(k);
    assert_int_not_equal(stat(path, &st), 0);
    kv_keeperd_destroy(NULL);
}

/* A path that somebody has mistyped: what lies there is not the keeper's to remove. */
static void test_a_file_in_the_way_stays(void **state)
{
    struct kv_keeperd *k;
    struct bt_err err;
    int fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    struct stat st;

    assert_true(fd >= 0);
    assert_int_equal(write(fd, "mine", 4), 4);
    close(fd);
    assert_int_equal(kv_keeperd_create(&usual, &k, &err), BT_E_CONFIG);
    assert_non_null(strstr(err.msg, path));
    assert_int_equal(lstat(path, &st), 0);
    assert_true(S_ISREG(st.st_mode) && st.st_size == 4);
    assert_int_equal(unlink(path), 0);
    assert_int_equal(symlink("/dev/null", path), 0);
    assert_int_equal(kv_keeperd_create(&usual, &k, &err), BT_E_CONFIG);
    assert_int_equal(unlink(path), 0);
    assert_int_equal(kv_keeperd_create(&usual, &k, &err), BT_OK);
    kv_keeperd_destroy(k);
}

static void test_bad_arguments(void **state)
{
    char long_path[200];
    struct kv_keeper_conf conf = usual;
    struct kv_keeper_cfg cfg = {path, "n0", 1, 0};
    struct kv_keeper_want want = {.name = "a/b", .bytes = 1, .ops = &bt_mem_host};
    struct kv_keeper_got got;
    struct kv_keeperd *d;
    struct kv_keeper *k;

    memset(long_path, 'x', sizeof(long_path));
    long_path[sizeof(long_path) - 1] = '\0';
    conf.socket = cfg.socket = long_path;
    assert_int_equal(kv_keeperd_create(&conf, &d, NULL), BT_E_CONFIG);
    assert_int_equal(kv_keeper_open(&cfg, &k, NULL), BT_E_CONFIG);
    cfg = (struct kv_keeper_cfg){path, "a b", 1, 0};
    assert_int_equal(kv_keeper_open(&cfg, &k, NULL), BT_E_CONFIG);
    cfg = (struct kv_keeper_cfg){path, "n0", 1, 0};
    assert_int_equal(kv_keeper_open(&cfg, &k, NULL), BT_OK);
    assert_int_equal(kv_keeper_get(k, &want, &got, NULL), BT_E_INVALID);
    want.name = "a-name-that-is-far-too-long-for-it";
    assert_int_equal(kv_keeper_get(k, &want, &got, NULL), BT_E_INVALID);
    want.name = "kv";
    want.ops = &bt_mem_private;
    assert_int_equal(kv_keeper_get(k, &want, &got, NULL), BT_E_INVALID);
    kv_keeper_close(k);
    kv_keeper_close(NULL);
}

/* In a process of user 65534: 1 = not even a connection, 2 = told that it is not served. */
static int be_foreign(void)
{
    struct kv_keeper_hello h = {.incarnation = 1};
    struct kv_keeper_request q = request("kv", BYTES);
    struct kv_packet p;
    int fd, sent;

    if (setgroups(0, NULL) != 0 || setgid(65534) != 0 || setuid(65534) != 0) {
        return 7;
    }
    if (kv_sock_connect(path, &fd, NULL) < 0) {
        return errno == EACCES ? 1 : 6;
    }
    snprintf(h.node, sizeof(h.node), "n0");
    sent = kv_sock_send(fd, KV_KEEPER_HELLO, &h, sizeof(h), -1);
    sent = kv_sock_send(fd, KV_KEEPER_GET, &q, sizeof(q), -1);
    (void)sent;
    if (kv_sock_wait(fd, bt_deadline_ns(WAIT_NS)) < 0 || kv_sock_recv(fd, &p) < 0 || p.n_fds > 0 ||
        !kv_packet_is(&p, KV_KEEPER_REFUSED) || p.refused.rc != BT_E_DENIED) {
        return 5;
    }
    while (kv_sock_recv(fd, &p) != BT_E_PEER_LOST) {
        if (p.n_fds > 0) {
            return 4;
        }
        usleep(1000);
    }
    return 2;
}

static int foreign(void)
{
    pid_t pid = fork();
    int status;

    if (pid == 0) {
        _exit(be_foreign());
    }
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_true(WIFEXITED(status));
    return WEXITSTATUS(status);
}

static void test_foreign_user(void **state)
{
    pid_t keeper;
    struct node a;

    if (geteuid() != 0) {
        print_message("needs root to become another user\n");
        skip();
    }
    keeper = start_keeper(&usual);
    a = start_node(1, 0x5a);
    report_of(&a);
    assert_int_equal(chmod(folder, 0755), 0);
    assert_int_equal(foreign(), 1);
    assert_int_equal(chmod(path, 0666), 0); /* somebody opened the socket to all */
    assert_int_equal(foreign(), 2);
    end_node(&a);
    assert_int_equal(foreign(), 2);
    assert_true(answers());
    end(keeper);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(test_content_outlives_the_process, end_children),
        cmocka_unit_test_teardown(test_fencing, end_children),
        cmocka_unit_test_teardown(test_a_connection_that_ends_frees_nothing, end_children),
        cmocka_unit_test_teardown(test_other_digest_or_size_is_new_memory, end_children),
        cmocka_unit_test_teardown(test_size_is_sealed, end_children),
        cmocka_unit_test_teardown(test_huge_pages, end_children),
        cmocka_unit_test_teardown(test_hostile, end_children),
        cmocka_unit_test_teardown(test_what_cannot_be_relied_on, end_children),
        cmocka_unit_test_teardown(test_a_heap_of_descriptors, end_children),
        cmocka_unit_test_teardown(test_rude_clients, end_children),
        cmocka_unit_test_teardown(test_limits, end_children),
        cmocka_unit_test_teardown(test_orphans_expire, end_children),
        cmocka_unit_test_teardown(test_keeper_dies, end_children),
        cmocka_unit_test_teardown(test_keeper_comes_later, end_children),
        cmocka_unit_test_teardown(test_device_memory, end_children),
        cmocka_unit_test_teardown(test_too_late, end_children),
        cmocka_unit_test_teardown(test_keeper_hangs, end_children),
        cmocka_unit_test_teardown(test_one_keeper_a_socket, end_children),
        cmocka_unit_test_teardown(test_a_file_in_the_way_stays, end_children),
        cmocka_unit_test_teardown(test_bad_arguments, end_children),
        cmocka_unit_test_teardown(test_foreign_user, end_children),
    };
    char lock[110];
    int failed;

    snprintf(folder, sizeof(folder), "/tmp/baton-keeper-test.XXXXXX");
    if (!mkdtemp(folder)) {
        return 1;
    }
    snprintf(path, sizeof(path), "%s/keeper.sock", folder);
    failed = cmocka_run_group_tests(tests, NULL, NULL);
    snprintf(lock, sizeof(lock), "%s.lock", path);
    unlink(lock);
    unlink(path);
    rmdir(folder);
    return failed;
}
