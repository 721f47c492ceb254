/* Process skeleton. main creates and destroys the node; the thread "signal" reads signals, calls
 * the stop function once, and looks at the files of certificates and tokens. Invariant: `stop` is
 * called at most once, by whoever turns `told` to true under the lock, and outside the lock. */
#include "common/node/node.h"

#include "common/base/buf.h"
#include "common/conf/value.h"
#include "common/obs/log.h"
#include "common/thr/mailbox.h"
#include "common/thr/thread.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#define NOFILE_MAX (1u << 20)
#define LOOK_MS    1000 /* between two looks at the files of certificates and tokens */

struct bt_node {
    struct bt_conf *conf;
    const struct bt_node_conf *common;
    const char *program;
    struct bt_sec *sec;
    pthread_t thread;
    bool thread_runs;
    int signal_fd, wake_fd;
    struct bt_lines *access_log; /* NULL = none */
    bool ready_written;
    bool quit; /* atomic: set by destroy before it wakes the thread */

    pthread_mutex_t lock;
    bool stopping;           /* written under lock, read atomically by bt_node_stopping */
    bool told;               /* under lock */
    void (*stop)(void *arg); /* under lock */
    void *stop_arg;
};

const char *const bt_node_log_levels[] = {"error", "warn", "info", "debug", NULL};

/* --- stopping -------------------------------------------------------------------------------- */

/* Calls the stop function if it is due. */
static void tell(struct bt_node *node)
{
    void (*stop)(void *arg) = NULL;
    void *arg;

    pthread_mutex_lock(&node->lock);
    if (node->stopping && !node->told && node->stop) {
        node->told = true;
        stop = node->stop;
    }
    arg = node->stop_arg;
    pthread_mutex_unlock(&node->lock);
    if (stop) {
        stop(arg);
    }
}

static void notify_manager(const char *text);

void bt_node_request_stop(struct bt_node *node)
{
    bool first;

    pthread_mutex_lock(&node->lock);
    first = !node->stopping;
    __atomic_store_n(&node->stopping, true, __ATOMIC_RELEASE); /* pairs with bt_node_stopping */
    pthread_mutex_unlock(&node->lock);
    if (first) {
        notify_manager("STOPPING=1");
    }
    tell(node);
}

struct bt_lines *bt_node_access_log(const struct bt_node *node)
{
    return node->access_log;
}

bool bt_node_stopping(const struct bt_node *node)
{
    return __atomic_load_n(&node->stopping, __ATOMIC_ACQUIRE);
}

void bt_node_on_stop(struct bt_node *node, void (*stop)(void *arg), void *arg)
{
    pthread_mutex_lock(&node->lock);
    BT_BUG_ON(node->stop != NULL);
    node->stop = stop;
    node->stop_arg = arg;
    pthread_mutex_unlock(&node->lock);
    tell(node);
}

/* Of those that ask to stop the first one does, the second ends the process. */
static void on_stop_signal(struct bt_node *node, unsigned signal, int nth)
{
    if (nth > 1) {
        BT_ERROR("quick_exit", "msg=\"second signal while stopping\" signal=%u", signal);
        if (node->ready_written) {
            unlink(node->common->ready_file);
        }
        _exit(BT_EXIT_OTHER);
    }
    BT_INFO("stop", "msg=\"signal asks to stop\" signal=%u", signal);
    bt_node_request_stop(node);
}

static void *signal_main(void *p)
{
    struct bt_node *node = p;
    struct pollfd fds[] = {{node->signal_fd, POLLIN, 0}, {node->wake_fd, POLLIN, 0}};
    struct signalfd_siginfo info;
    int n_signals = 0;

    while (!__atomic_load_n(&node->quit, __ATOMIC_ACQUIRE)) {
        int n = poll(fds, BT_ARRAY_LEN(fds), bt_sec_has_files(node->sec) ? LOOK_MS : -1);

        if (n == 0) {
            bt_sec_look(node->sec, false);
        }
        if (n <= 0 || !(fds[0].revents & POLLIN) ||
            read(node->signal_fd, &info, sizeof(info)) != (ssize_t)sizeof(info)) {
            continue;
        }
        if (info.ssi_signo == SIGHUP) {
            BT_INFO("reopen", "msg=\"signal asks to open logs, certificates and tokens again\"");
            bt_lines_reopen(node->access_log);
            bt_sec_look(node->sec, true);
        } else {
            on_stop_signal(node, info.ssi_signo, ++n_signals);
        }
    }
    return NULL;
}

/* --- start ----------------------------------------------------------------------------------- */

static unsigned long long raise_file_limit(void)
{
    struct rlimit lim;

    if (getrlimit(RLIMIT_NOFILE, &lim) != 0) {
        return 0;
    }
    if (lim.rlim_cur < lim.rlim_max && lim.rlim_cur < NOFILE_MAX) {
        rlim_t was = lim.rlim_cur;

        lim.rlim_cur = BT_MIN(lim.rlim_max, (rlim_t)NOFILE_MAX);
        if (setrlimit(RLIMIT_NOFILE, &lim) != 0) {
            lim.rlim_cur = was;
        }
    }
    return lim.rlim_cur;
}

static int die_with_parent(pid_t parent, struct bt_err *err)
{
    if (prctl(PR_SET_PDEATHSIG, SIGKILL) != 0) {
        return BT_FAIL_SYS(err, BT_E_SYS, "die_with_parent");
    }
    /* it may have died before the kernel knew of our wish */
    return getppid() == parent ? BT_OK : BT_FAIL(err, BT_E_SYS, "die_with_parent: parent is gone");
}

static int start_signals(struct bt_node *node, struct bt_err *err)
{
    struct sigaction ignore = {.sa_handler = SIG_IGN};
    sigset_t set;
    int rc;

    sigemptyset(&set);
    sigaddset(&set, SIGTERM);
    sigaddset(&set, SIGINT);
    sigaddset(&set, SIGHUP);
    sigaction(SIGPIPE, &ignore, NULL);
    if (pthread_sigmask(SIG_BLOCK, &set, NULL) != 0) {
        return BT_FAIL(err, BT_E_SYS, "cannot block signals");
    }
    node->signal_fd = signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
    if (node->signal_fd < 0) {
        return BT_FAIL_SYS(err, BT_E_SYS, "signalfd");
    }
    rc = bt_eventfd_create(&node->wake_fd, err);
    if (rc == BT_OK) {
        rc = bt_thread_start(&node->thread, "signal", signal_main, node, err);
    }
    node->thread_runs = rc == BT_OK;
    return rc;
}

static int start(struct bt_node *node, pid_t parent, struct bt_err *err)
{
    unsigned long long files = raise_file_limit();
    int rc = node->common->die_with_parent ? die_with_parent(parent, err) : BT_OK;

    if (rc < 0) {
        return rc;
    }
    if (node->common->ready_file[0]) {
        unlink(node->common->ready_file); /* an old one would deceive who waits for it */
    }
    BT_INFO("start", "msg=\"%s %s\" pid=%d cpus=%d open_files_max=%llu", node->program, BT_VERSION,
            (int)getpid(), bt_cpus_usable(), files);
    bt_conf_log(node->conf);
    rc = bt_sec_create(&node->common->sec, &node->sec, err);
    if (rc == BT_OK && node->common->access_log && node->common->access_log[0]) {
        rc = bt_lines_open(node->common->access_log, &node->access_log, err);
    }
    return rc < 0 ? rc : start_signals(node, err);
}

/* Loads the configuration; false if the process is to end with *ret_exit_code. */
static bool load(const struct bt_node_args *args, struct bt_conf **ret_conf, int *ret_exit_code)
{
    struct bt_err err = {0};
    int rc = bt_conf_load(&args->spec, args->argv, environ, ret_conf, &err);

    if (rc < 0) {
        *ret_exit_code = bt_node_fail(rc == BT_E_CONFIG ? BT_EXIT_CONFIG : BT_EXIT_OTHER, rc, &err);
        return false;
    }
    if (bt_conf_action(*ret_conf) != BT_CONF_RUN) {
        bt_conf_print(&args->spec, bt_conf_action(*ret_conf), stdout);
        *ret_exit_code = fflush(stdout) == 0 ? BT_EXIT_OK : BT_EXIT_OTHER;
        bt_conf_destroy(*ret_conf);
        return false;
    }
    return true;
}

bool bt_node_create(const struct bt_node_args *args, struct bt_node **ret_node, int *ret_exit_code)
{
    pid_t parent = getppid();
    struct bt_err err = {0};
    struct bt_conf *conf;
    struct bt_node *node;
    int rc;

    if (!load(args, &conf, ret_exit_code)) {
        return false;
    }
    bt_log_threshold = args->conf->log_level;
    node = bt_calloc(1, sizeof(*node));
    if (!node) {
        bt_conf_destroy(conf);
        *ret_exit_code = bt_node_fail(BT_EXIT_OTHER, BT_E_NOMEM, NULL);
        return false;
    }
    *node = (struct bt_node){.conf = conf,
                             .common = args->conf,
                             .program = args->spec.program,
                             .signal_fd = -1,
                             .wake_fd = -1};
    pthread_mutex_init(&node->lock, NULL);
    rc = start(node, parent, &err);
    if (rc < 0) {
        bt_node_destroy(node);
        *ret_exit_code = bt_node_fail(rc == BT_E_CONFIG ? BT_EXIT_CONFIG : BT_EXIT_OTHER, rc, &err);
        return false;
    }
    *ret_node = node;
    return true;
}

/* --- ready ----------------------------------------------------------------------------------- */

/* The service manager's datagram socket; who does not listen is not told. */
static void notify_manager(const char *text)
{
    const char *path = getenv("NOTIFY_SOCKET");
    struct sockaddr_un sa = {.sun_family = AF_UNIX};
    size_t n = path ? strlen(path) : 0;
    int fd;

    if (n < 2 || n >= sizeof(sa.sun_path) || (path[0] != '/' && path[0] != '@')) {
        return;
    }
    memcpy(sa.sun_path, path, n);
    if (path[0] == '@') {
        sa.sun_path[0] = '\0';
    }
    fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (fd < 0) {
        return;
    }
    if (sendto(fd, text, strlen(text), MSG_NOSIGNAL | MSG_DONTWAIT, (struct sockaddr *)&sa,
               (socklen_t)(offsetof(struct sockaddr_un, sun_path) + n)) < 0) {
        BT_WARN("notify", "msg=\"service manager was not told\" error=\"%s\"", strerror(errno));
    }
    close(fd);
}

static int write_all(int fd, struct bt_str s)
{
    while (s.n > 0) {
        ssize_t put = write(fd, s.p, s.n);

        if (put < 0 && errno == EINTR) {
            continue;
        }
        if (put <= 0) {
            return BT_E_IO;
        }
        s.p += put;
        s.n -= (size_t)put;
    }
    return BT_OK;
}

static int write_ready_file(const char *path, struct bt_str text, struct bt_err *err)
{
    char beside[4096];
    int fd, rc;

    snprintf(beside, sizeof(beside), "%s.%d", path, (int)getpid());
    fd = open(beside, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0644);
    if (fd < 0) {
        return BT_FAIL_SYS(err, BT_E_IO, "ready file %.120s", beside);
    }
    rc = write_all(fd, text);
    if (rc == BT_OK && rename(beside, path) != 0) {
        rc = BT_E_IO;
    }
    if (rc < 0) {
        BT_FAIL_SYS(err, rc, "ready file %.120s", path);
        unlink(beside);
    }
    close(fd);
    return rc;
}

int bt_node_ready(struct bt_node *node,
                  const struct bt_node_addr *addrs,
                  size_t n,
                  struct bt_err *err)
{
    struct bt_buf file = {.max = 65536}, line = {.max = 700};
    int rc = bt_buf_printf(&file, "pid=%d\n", (int)getpid());

    for (size_t i = 0; rc == BT_OK && i < n; i++) {
        rc = bt_buf_printf(&file, "%s=%s\n", addrs[i].key, addrs[i].value);
        if (rc == BT_OK) {
            rc = bt_buf_printf(&line, " %s=%s", addrs[i].key, addrs[i].value);
        }
    }
    if (rc < 0) {
        rc = BT_FAIL(err, rc, "too many or too long addresses for the ready line");
    } else if (node->common->ready_file[0]) {
        rc = write_ready_file(node->common->ready_file, bt_buf_str(&file), err);
        node->ready_written = rc == BT_OK;
    }
    if (rc == BT_OK) {
        BT_INFO("ready", "pid=%d%.*s", (int)getpid(), (int)line.n, line.n ? line.p : "");
        notify_manager("READY=1");
    }
    bt_buf_fini(&file);
    bt_buf_fini(&line);
    return rc;
}

struct bt_sec *bt_node_sec(struct bt_node *node)
{
    return node->sec;
}

int bt_node_check_listen(const struct bt_node_conf *conf,
                         enum bt_sec_port port,
                         const char *key,
                         const char *addr,
                         struct bt_err *err)
{
    return bt_sec_check_port(&conf->sec, port, key, addr, conf->allow_insecure, err);
}

bool bt_node_plain_kv(const struct bt_node_conf *conf)
{
    return conf->allow_insecure || conf->sec.allow_plain_kv;
}

int bt_node_check_kv_listen(const struct bt_node_conf *conf,
                            const char *key,
                            const char *addr,
                            struct bt_err *err)
{
    struct bt_addr a;

    if (bt_addr_read(bt_str_of(addr), &a) < 0) {
        return BT_FAIL(err, BT_E_CONFIG, "%s = %.60s: must be host:port", key, addr);
    }
    return bt_node_plain_kv(conf) || bt_addr_is_loopback(&a)
               ? BT_OK
               : BT_FAIL(err, BT_E_CONFIG,
                         "%s = %.60s: not a loopback address, and KV is never encrypted: on a "
                         "network that you trust set security.allow_plain_kv = on",
                         key, addr);
}

int bt_node_fail(enum bt_exit code, int rc, const struct bt_err *err)
{
    char msg[256];

    BT_ERROR("exit", "msg=\"%s\" rc=%s exit_code=%d",
             bt_log_quotable(bt_err_msg(err, rc), msg, sizeof(msg)), bt_rc_name(rc), code);
    return code;
}

void bt_node_destroy(struct bt_node *node)
{
    if (!node) {
        return;
    }
    if (node->thread_runs) {
        __atomic_store_n(&node->quit, true, __ATOMIC_RELEASE); /* pairs with signal_main */
        bt_eventfd_wake(&node->wake_fd);
        pthread_join(node->thread, NULL);
    }
    bt_lines_close(node->access_log);
    bt_close_fd(&node->signal_fd);
    bt_close_fd(&node->wake_fd);
    if (node->ready_written) {
        unlink(node->common->ready_file);
    }
    pthread_mutex_destroy(&node->lock);
    bt_sec_destroy(node->sec);
    bt_conf_destroy(node->conf);
    free(node);
}
