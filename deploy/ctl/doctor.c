/* batonctl doctor: looks at this machine and at a cluster, and tells for each finding what to do.
 * What cannot work is a failure (exit code 1), what costs speed or will hurt later a warning. */
#include "deploy/ctl/show.h"

#include "common/conf/value.h"
#include "common/thr/thread.h"
#include "common/thr/time.h"
#include "proto/node.pb-c.h"

#include <dirent.h>
#include <errno.h>
#include <math.h>
#include <netdb.h>
#include <stdarg.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/timex.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

enum level { OK, WARN, FAIL };
static const char *const levels[] = {"ok", "warn", "fail"};

#define MAX_FINDINGS 512

struct finding {
    enum level level;
    char check[24], text[232];
    const char *fix; /* static; "" = nothing to do */
};

struct report {
    struct finding v[MAX_FINDINGS];
    size_t n;
    unsigned n_level[3];
};

static void BT_PRINTF_ATTR(5, 6) find(
    struct report *r, enum level level, const char *check, const char *fix, const char *fmt, ...)
{
    struct finding *f;
    va_list ap;

    r->n_level[level]++;
    if (r->n == MAX_FINDINGS) {
        return;
    }
    f = &r->v[r->n++];
    f->level = level;
    f->fix = level == OK ? "" : fix;
    snprintf(f->check, sizeof(f->check), "%s", check);
    va_start(ap, fmt);
    vsnprintf(f->text, sizeof(f->text), fmt, ap);
    va_end(ap);
}

/* --- this machine ---------------------------------------------------------------------------- */

static void check_limits(struct report *r)
{
    struct rlimit lim;
    char bytes[24];

    if (getrlimit(RLIMIT_MEMLOCK, &lim) == 0) {
        bool all = lim.rlim_max == RLIM_INFINITY;

        find(r, all ? OK : WARN, "limit memlock",
             "LimitMEMLOCK=infinity in the unit, or ulimit -l unlimited: RDMA and device memory "
             "need pages that stay",
             "locked memory: %s", all ? "unlimited" : ctl_bytes((double)lim.rlim_max, bytes));
    }
    if (getrlimit(RLIMIT_NOFILE, &lim) == 0) {
        find(r,
             lim.rlim_max >= 65536  ? OK
             : lim.rlim_max >= 4096 ? WARN
                                    : FAIL,
             "limit nofile", "LimitNOFILE=1048576 in the unit: every stream of a client is a file",
             "open files: %llu at most", (unsigned long long)lim.rlim_max);
    }
}

static bool read_number(const char *path, long long *ret)
{
    FILE *f = fopen(path, "r");
    bool ok = f && fscanf(f, "%lld", ret) == 1;

    if (f) {
        fclose(f);
    }
    return ok;
}

static bool file_has(const char *path, const char *word)
{
    char line[256];
    FILE *f = fopen(path, "r");
    bool ok = f && fgets(line, sizeof(line), f) && strstr(line, word);

    if (f) {
        fclose(f);
    }
    return ok;
}

static void check_memory(struct report *r)
{
    long long scope = 0, huge = 0;
    bool never = file_has("/sys/kernel/mm/transparent_hugepage/enabled", "[never]");

    read_number("/proc/sys/vm/nr_hugepages", &huge);
    find(r, never && huge == 0 ? WARN : OK, "huge pages",
         "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
         "transparent huge pages %s, %lld reserved", never ? "off" : "on", huge);
    if (read_number("/proc/sys/kernel/yama/ptrace_scope", &scope)) {
        find(r, scope >= 2 ? WARN : OK, "ptrace scope",
             "sysctl kernel.yama.ptrace_scope=1, or nodes of one host as one user: KV is pulled by "
             "process_vm_readv",
             "kernel.yama.ptrace_scope is %lld", scope);
    }
}

static unsigned count_entries(const char *folder, const char *prefix)
{
    DIR *d = opendir(folder);
    struct dirent *e;
    unsigned n = 0;

    while (d && (e = readdir(d))) {
        n += e->d_name[0] != '.' && strncmp(e->d_name, prefix, strlen(prefix)) == 0;
    }
    if (d) {
        closedir(d);
    }
    return n;
}

static void check_devices(struct report *r)
{
    unsigned rdma = count_entries("/sys/class/infiniband", "");
    unsigned uverbs = count_entries("/dev/infiniband", "uverbs");
    unsigned gpus = count_entries("/proc/driver/nvidia/gpus", "");

    find(r, rdma > 0 && uverbs == 0 ? FAIL : OK, "rdma",
         "give the process /dev/infiniband (containers: --device=/dev/infiniband)",
         "%u RDMA devices, %u usable%s", rdma, uverbs,
         rdma ? "" : ": between hosts KV goes over TCP");
    find(r, gpus > 0 && access("/dev/nvidiactl", R_OK | W_OK) != 0 ? FAIL : OK, "gpu",
         "give the process the devices (containers: --gpus all)", "%u NVIDIA devices%s", gpus,
         gpus ? "" : ": nodes compute on the CPU");
    find(r, OK, "processors", "", "%d usable", bt_cpus_usable());
}

static void check_clock(struct report *r)
{
    struct timex t = {0};
    int state = adjtimex(&t);

    find(r, state == TIME_ERROR || (t.status & STA_UNSYNC) ? WARN : OK, "clock",
         "run chrony or systemd-timesyncd: the age of requests is compared across hosts",
         "this machine's clock is %s", t.status & STA_UNSYNC ? "not synchronised" : "synchronised");
}

/* --- the cluster ----------------------------------------------------------------------------- */

static double clock_ahead_s(uint64_t their_us)
{
    struct timeval tv;

    gettimeofday(&tv, NULL);
    return (double)their_us / 1e6 - ((double)tv.tv_sec + (double)tv.tv_usec / 1e6);
}

static void check_time(struct report *r, const char *who, uint64_t their_us)
{
    double ahead = clock_ahead_s(their_us);

    if (their_us > 0) {
        find(r, fabs(ahead) > 1 ? WARN : OK, "clock",
             "synchronise both machines: the age of requests is compared across hosts",
             "%s: %.3f s %s of this machine", who, fabs(ahead), ahead < 0 ? "behind" : "ahead");
    }
}

static void
check_node_status(struct report *r, const struct ctl_args *a, const Baton__V1__NodeInfo *n)
{
    Baton__V1__NodeStatusRequest m = BATON__V1__NODE_STATUS_REQUEST__INIT;
    struct ctl_ask ask = {.path = "/baton.v1.Node/GetStatus",
                          .peer = CTL_NODE,
                          .request = &m.base,
                          .response = &baton__v1__node_status__descriptor,
                          .deadline_ns = bt_deadline_ns(a->timeout_ns)};
    Baton__V1__NodeStatus *s;
    ProtobufCMessage *got;
    int code = ctl_ask(n->address, &ask, &got);

    if (code == CTL_DENIED) {
        find(r, WARN, "node", "a token of operators for the nodes (--token-file)",
             "%s at %s: does not tell its status without a token", n->name, n->address);
        return;
    }
    if (code != CTL_OK) {
        find(r, FAIL, "node",
             a->ca
                 ? "is the process up, the address right (advertise), the port open from here, and "
                   "does its TLS get what it wants (--node-tls-name, --cert, --key)?"
                 : "is the process up, the address right (advertise), the port open from here?",
             "%s at %s cannot be reached", ctl_dash(n->name), n->address);
        return;
    }
    s = (Baton__V1__NodeStatus *)got;
    find(r, strcmp(s->name, n->name) == 0 ? OK : FAIL, "node",
         "two processes share an address, or advertise is wrong", "%s at %s answers, transports %s",
         s->name, n->address, ctl_dash(s->transports));
    check_time(r, s->name, s->time_us);
    if (s->tier_bad_blocks > 0 || s->tier_write_errors > 0) {
        find(r, WARN, "tiers", "look at the disk under tier.disk_path",
             "%s: %llu damaged blocks, %llu write errors", s->name,
             (unsigned long long)s->tier_bad_blocks, (unsigned long long)s->tier_write_errors);
    }
    baton__v1__node_status__free_unpacked(s, NULL);
}

static void check_node(struct report *r,
                       const struct ctl_args *a,
                       const Baton__V1__ServerInfo *s,
                       const Baton__V1__NodeInfo *n)
{
    const char *name = n->name[0] ? n->name : n->address;
    bool bad = strcmp(n->state, "incompatible") == 0;

    find(r,
         strcmp(n->state, "ready") == 0 ? OK
         : bad                          ? FAIL
                                        : WARN,
         "membership",
         bad ? "start it with the router's model and settings, or take it out"
             : "look at its log; a lost node comes back by itself",
         "%s (%s) is %s%s%s", name, n->role, n->state, n->reason[0] ? ": " : "", n->reason);
    if (n->version[0]) {
        find(r, strcmp(n->version, s->version) == 0 ? OK : WARN, "version",
             "upgrade nodes and routers to one version", "%s has version %s, the router %s", name,
             n->version, s->version);
    }
    if (n->cordoned) {
        find(r, WARN, "cordon", "batonctl uncordon NODE, when it may work again",
             "%s is cordoned: it gets nothing new", name);
    }
    check_node_status(r, a, n);
}

static void check_roles(struct report *r, const Baton__V1__ServerInfo *s)
{
    unsigned prefill = 0, decode = 0, both = 0;

    for (size_t i = 0; i < s->n_nodes; i++) {
        bool ready = strcmp(ctl_node_state(s->nodes[i]), "ready") == 0;

        prefill += ready && strcmp(s->nodes[i]->role, "prefill") == 0;
        decode += ready && strcmp(s->nodes[i]->role, "decode") == 0;
        both += ready && strcmp(s->nodes[i]->role, "both") == 0;
    }
    find(r,
         decode + both == 0          ? FAIL
         : prefill == 0 && both == 0 ? WARN
                                     : OK,
         "roles",
         decode + both == 0
             ? "start or uncordon a decode node: nothing can be answered"
             : "start or uncordon a prefill node: decode nodes compute prompts themselves",
         "%u prefill, %u decode and %u colocated nodes are ready", prefill, decode, both);
}

static void check_router(struct report *r, const struct ctl_args *a)
{
    Baton__V1__GetServerRequest m = BATON__V1__GET_SERVER_REQUEST__INIT;
    struct ctl_ask ask = {.path = "/baton.v1.Baton/GetServer",
                          .request = &m.base,
                          .response = &baton__v1__server_info__descriptor,
                          .deadline_ns = bt_deadline_ns(a->timeout_ns)};
    Baton__V1__ServerInfo *s;
    ProtobufCMessage *got;
    int code = ctl_ask(a->router, &ask, &got);

    if (code != CTL_OK) {
        find(r, FAIL, "router",
             code == CTL_DENIED ? "a token of operators (--token-file)"
                                : "is it up, is --router its gRPC address, is the port open?",
             "%s: %s", a->router, ctl_exit_texts[code]);
        return;
    }
    s = (Baton__V1__ServerInfo *)got;
    find(r, strcmp(s->version, BT_VERSION) == 0 ? OK : WARN, "version",
         "use the batonctl of the router's version", "router %s, batonctl " BT_VERSION, s->version);
    find(r, strcmp(s->membership, "live") == 0 ? OK : WARN, "redis",
         "bring Redis back: until then no node can join or leave, and caches are not shared anew; "
         "with a list of seeds alone this is as it should be",
         "the router's membership is %s", s->membership);
    check_time(r, "router", s->time_us);
    check_roles(r, s);
    for (size_t i = 0; i < s->n_nodes; i++) {
        check_node(r, a, s, s->nodes[i]);
    }
    baton__v1__server_info__free_unpacked(s, NULL);
}

/* --- Redis ----------------------------------------------------------------------------------- */

static int dial_unix(const char *path)
{
    struct sockaddr_un sa = {.sun_family = AF_UNIX};
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);

    if (fd >= 0 &&
        (strlen(path) >= sizeof(sa.sun_path) ||
         connect(fd, (memcpy(sa.sun_path, path, strlen(path)), (void *)&sa), sizeof(sa)) != 0)) {
        close(fd);
        fd = -1;
    }
    return fd;
}

static int dial(const char *address, const struct timeval *limit)
{
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM}, *list = NULL;
    struct bt_addr addr;
    char host[256], port[8];
    int fd = -1;

    if (strncmp(address, "unix:", 5) == 0) {
        return dial_unix(address + 5);
    }
    if (bt_addr_read(bt_str_of(address), &addr) < 0 || addr.is_unix ||
        addr.host.n >= sizeof(host)) {
        errno = EINVAL;
        return -1;
    }
    snprintf(host, sizeof(host), "%.*s", (int)addr.host.n, addr.host.p);
    snprintf(port, sizeof(port), "%d", addr.port);
    if (getaddrinfo(host, port, &hints, &list) != 0) {
        errno = EHOSTUNREACH;
        return -1;
    }
    for (struct addrinfo *ai = list; ai && fd < 0; ai = ai->ai_next) {
        fd = socket(ai->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
        if (fd >= 0) {
            setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, limit, sizeof(*limit));
            if (connect(fd, ai->ai_addr, ai->ai_addrlen) != 0) {
                close(fd);
                fd = -1;
            }
        }
    }
    freeaddrinfo(list);
    return fd;
}

static void check_redis(struct report *r, const struct ctl_args *a)
{
    struct timeval limit = {.tv_sec = (time_t)(a->timeout_ns / BT_NS_PER_S),
                            .tv_usec = (suseconds_t)(a->timeout_ns % BT_NS_PER_S / 1000)};
    char answer[64] = "";
    ssize_t n = -1;
    int fd = dial(a->redis, &limit);

    if (fd >= 0) {
        setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
        if (send(fd, "PING\r\n", 6, MSG_NOSIGNAL) == 6) {
            n = recv(fd, answer, sizeof(answer) - 1, 0);
        }
    }
    if (n > 0) {
        answer[strcspn(answer, "\r\n")] = '\0';
        find(r, strncmp(answer, "+PONG", 5) == 0 || strncmp(answer, "-NOAUTH", 7) == 0 ? OK : FAIL,
             "redis", "is this a Redis?", "%s answers %s", a->redis, answer);
    } else {
        find(r, FAIL, "redis", "is it up, is the address right, is the port open from here?",
             "%s: %s", a->redis, strerror(errno));
    }
    if (fd >= 0) {
        close(fd);
    }
}

/* --- report ---------------------------------------------------------------------------------- */

static int print_report(const struct ctl_args *a, const struct report *r)
{
    struct bt_buf b = {0};
    struct bt_jsonw w = {.b = &b};

    if (a->output == CTL_TABLE) {
        for (size_t i = 0; i < r->n; i++) {
            const struct finding *f = &r->v[i];

            printf("%-4s  %-14s %s\n", levels[f->level], f->check, f->text);
            if (f->fix[0]) {
                printf("%22s-> %s\n", "", f->fix);
            }
        }
        printf("%u ok, %u warnings, %u failures\n", r->n_level[OK], r->n_level[WARN],
               r->n_level[FAIL]);
        return CTL_OK;
    }
    bt_jw_open(&w, NULL, '{');
    bt_jw_open(&w, "findings", '[');
    for (size_t i = 0; i < r->n; i++) {
        bt_jw_open(&w, NULL, '{');
        bt_jw_str(&w, "level", levels[r->v[i].level]);
        bt_jw_str(&w, "check", r->v[i].check);
        bt_jw_str(&w, "text", r->v[i].text);
        bt_jw_str(&w, "fix", r->v[i].fix);
        bt_jw_close(&w, '}');
    }
    bt_jw_close(&w, ']');
    bt_jw_u64(&w, "warnings", r->n_level[WARN]);
    bt_jw_u64(&w, "failures", r->n_level[FAIL]);
    bt_jw_close(&w, '}');
    return ctl_print_buf(&w);
}

int ctl_doctor(const struct ctl_args *a)
{
    struct report *r = calloc(1, sizeof(*r));
    int code;

    if (!r) {
        return CTL_FAILED;
    }
    check_limits(r);
    check_memory(r);
    check_devices(r);
    check_clock(r);
    check_router(r, a);
    if (a->redis) {
        check_redis(r, a);
    }
    code = print_report(a, r);
    if (code == CTL_OK && r->n_level[FAIL] > 0) {
        code = CTL_FAILED;
    }
    free(r);
    return code;
}
