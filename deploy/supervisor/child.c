/* One process: started, watched through its pidfd, started again after pauses that double, stopped
 * by a drain (the first SIGTERM), a second SIGTERM and SIGKILL.
 *
 * Every process has a session of its own, so that a terminal's Ctrl-C reaches the supervisor alone
 * and the order of the end is its choice. */
#include "deploy/supervisor/supervisor.h"

#include "common/base/buf.h"
#include "common/obs/log.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#define PAUSE_MIN_NS (100 * BT_NS_PER_MS)
#define PAUSE_MAX_NS (10 * BT_NS_PER_S)
#define HEALTHY_NS   (30 * BT_NS_PER_S) /* ready for that long: earlier failures are forgotten */
#define KILL_NS      (5 * BT_NS_PER_S)  /* from the second SIGTERM to SIGKILL */
#define LOOK_NS      (20 * BT_NS_PER_MS)
#define ALIVE_NS     (200 * BT_NS_PER_MS) /* ready, where no file says so */

#define SV_TO(s) (1u << SV_##s)
static const struct {
    const char *text;
    unsigned next;
} states[] = {
#define X(name, text, next, meaning) {text, next},
#include "deploy/supervisor/child_states.def"
#undef X
};

const char *sv_state_name(enum sv_state s)
{
    return states[s].text;
}

bool sv_state_allowed(enum sv_state from, enum sv_state to)
{
    return states[from].next >> to & 1;
}

static void set_state(struct sv *sv, struct sv_child *c, enum sv_state to)
{
    BT_BUG_ON(!sv_state_allowed(c->state, to));
    c->state = to;
    c->since_ns = bt_now_ns();
    sv->dirty = true;
}

struct sv_child *sv_child_add(struct sv_role *role, unsigned index)
{
    struct sv_child *c = bt_calloc(1, sizeof(*c)), *behind = NULL;

    if (!c) {
        return NULL;
    }
    c->role = role;
    c->index = index;
    c->state = SV_BACKOFF; /* due at once */
    c->pidfd = c->exit_status = -1;
    if (role->single) {
        snprintf(c->name, sizeof(c->name), "%s", role->name);
    } else {
        snprintf(c->name, sizeof(c->name), "%s-%u", role->name, index);
    }
    bt_list_for_each (it, &role->childs) {
        struct sv_child *o = BT_LIST_ENTRY(it, struct sv_child, link);

        behind = o->index < index ? o : behind;
    }
    bt_list_push_front(behind ? &behind->link : &role->childs, &c->link);
    return c;
}

void sv_child_free(struct sv_child *c)
{
    bt_list_remove(&c->link);
    if (c->pidfd >= 0) {
        close(c->pidfd);
    }
    free(c);
}

/* --- start ----------------------------------------------------------------------------------- */

/* [child, between fork and exec: calls that are safe there alone] */
BT_NORETURN static void become(char **argv, int log, int null)
{
    sigset_t none;

    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    signal(SIGPIPE, SIG_DFL);
    setsid();
    dup2(null, STDIN_FILENO);
    dup2(log, STDOUT_FILENO);
    dup2(log, STDERR_FILENO);
    execvp(argv[0], argv);
    dprintf(STDERR_FILENO, "cannot run %s: error %d\n", argv[0], errno);
    _exit(127);
}

static char **expand_all(const struct sv *sv, const struct sv_child *c)
{
    const struct sv_role *role = c->role;
    char **argv = bt_calloc(role->n_command + 2, sizeof(*argv));
    size_t n = 0;
    bool ok = argv != NULL;

    for (; ok && n < role->n_command; n++) {
        argv[n] = sv_expand(sv, c, role->command[n]);
        ok = argv[n] != NULL;
    }
    if (ok && role->release) {
        struct bt_buf b = {0};

        ok = bt_buf_printf(&b, "--release=%s", role->release) == BT_OK &&
             bt_buf_add(&b, "", 1) == BT_OK;
        argv[n] = b.p;
    }
    if (ok) {
        return argv;
    }
    for (size_t i = 0; argv && argv[i]; i++) {
        free(argv[i]);
    }
    free(argv);
    return NULL;
}

static int open_log(const struct sv *sv, const struct sv_child *c)
{
    char path[4200];

    snprintf(path, sizeof(path), "%.4000s/%s.log", sv->run, c->name);
    return open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
}

/* Field 22 of /proc/PID/stat, in ticks since boot: with the pid it names a process for ever. */
static uint64_t start_time(pid_t pid)
{
    char path[64], text[1024];
    const char *p;
    uint64_t v = 0;
    ssize_t n;
    int fd, field = 2;

    snprintf(path, sizeof(path), "/proc/%d/stat", (int)pid);
    fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) {
        return 0;
    }
    n = read(fd, text, sizeof(text) - 1);
    close(fd);
    text[BT_MAX(n, 0)] = '\0';
    p = strrchr(text, ')'); /* the name may hold anything */
    for (; p && *p && field < 22; p++) {
        field += *p == ' ';
    }
    for (; p && *p >= '0' && *p <= '9'; p++) {
        v = v * 10 + (uint64_t)(*p - '0');
    }
    return v;
}

static bool watch(struct sv_child *c, pid_t pid)
{
    c->pid = pid;
    c->started_at = start_time(pid);
    c->pidfd = (int)syscall(SYS_pidfd_open, pid, 0);
    return c->pidfd >= 0;
}

static void pause_child(struct sv *sv, struct sv_child *c)
{
    uint64_t pause = PAUSE_MIN_NS << BT_MIN(c->n_failures, 7u);

    c->n_failures++;
    set_state(sv, c, SV_BACKOFF);
    c->due_ns = bt_deadline_ns(BT_MIN(pause, PAUSE_MAX_NS));
}

static pid_t spawn(struct sv *sv, struct sv_child *c)
{
    char **argv = expand_all(sv, c);
    char *ready = c->role->ready ? sv_expand(sv, c, c->role->ready) : NULL;
    int log = open_log(sv, c), null = open("/dev/null", O_RDONLY | O_CLOEXEC);
    pid_t pid = -1;

    if (ready) {
        unlink(ready); /* an earlier process's */
    }
    if (argv && log >= 0 && null >= 0) {
        pid = fork();
        if (pid == 0) {
            become(argv, log, null);
        }
    }
    if (log >= 0) {
        close(log);
    }
    if (null >= 0) {
        close(null);
    }
    for (size_t i = 0; argv && argv[i]; i++) {
        free(argv[i]);
    }
    free(argv);
    free(ready);
    return pid;
}

void sv_child_start(struct sv *sv, struct sv_child *c)
{
    pid_t pid = spawn(sv, c);

    set_state(sv, c, SV_STARTING);
    c->ours = true;
    c->generation = c->role->generation;
    if (pid < 0 || !watch(c, pid)) {
        BT_ERROR("process", "name=%s msg=\"cannot be started\" errno=%d", c->name, errno);
        if (pid > 0) { /* cannot be watched: not kept */
            kill(pid, SIGKILL);
            waitpid(pid, NULL, 0);
        }
        c->pid = 0;
        pause_child(sv, c);
        return;
    }
    BT_INFO("process", "name=%s pid=%d state=starting restarts=%" PRIu64, c->name, (int)pid,
            c->n_restarts);
}

bool sv_child_adopt(struct sv *sv, struct sv_child *c, pid_t pid, uint64_t started_at)
{
    if (start_time(pid) != started_at || started_at == 0 || !watch(c, pid)) {
        return false;
    }
    if (c->started_at != started_at) { /* another one, in between */
        close(c->pidfd);
        c->pidfd = -1;
        c->pid = 0;
        return false;
    }
    set_state(sv, c, SV_STARTING);
    c->generation = c->role->generation;
    BT_INFO("process", "name=%s pid=%d msg=\"taken over\"", c->name, (int)pid);
    return true;
}

/* --- end ------------------------------------------------------------------------------------- */

static void send_signal(struct sv_child *c, int sig)
{
    if (syscall(SYS_pidfd_send_signal, c->pidfd, sig, NULL, 0) < 0 && errno != ESRCH) {
        BT_WARN("process", "name=%s msg=\"cannot be signalled\" errno=%d", c->name, errno);
    }
}

static void escalate(struct sv_child *c)
{
    uint64_t next[] = {c->role->stop_ns, KILL_NS, KILL_NS};
    unsigned step = BT_MIN(c->n_signals, 2u);

    if (step == 2) {
        BT_WARN("process", "name=%s pid=%d msg=\"does not end; killed\"", c->name, (int)c->pid);
    }
    send_signal(c, step == 2 ? SIGKILL : SIGTERM);
    c->n_signals++;
    c->due_ns = bt_deadline_ns(next[step]);
}

void sv_child_stop(struct sv *sv, struct sv_child *c)
{
    if (c->state == SV_BACKOFF) {
        set_state(sv, c, SV_GONE);
    } else if (c->state == SV_STARTING || c->state == SV_READY) {
        set_state(sv, c, SV_STOPPING);
        c->n_signals = 0;
        escalate(c);
        BT_INFO("process", "name=%s pid=%d state=stopping", c->name, (int)c->pid);
    }
}

static bool is_over(const struct sv_child *c)
{
    struct pollfd p = {c->pidfd, POLLIN, 0};

    return poll(&p, 1, 0) > 0;
}

static void ended(struct sv *sv, struct sv_child *c)
{
    enum sv_state was = c->state;
    int status = -1;

    if (c->ours && waitpid(c->pid, &status, 0) != c->pid) {
        status = -1;
    }
    if (was == SV_READY && bt_now_ns() - c->since_ns >= HEALTHY_NS) {
        c->n_failures = 0;
    }
    close(c->pidfd);
    c->pidfd = -1;
    c->exit_status = status;
    if (was == SV_STOPPING && !c->unwanted) { /* replaced: at once */
        set_state(sv, c, SV_BACKOFF);
        c->due_ns = 0;
    } else if (was == SV_STOPPING || c->unwanted) {
        set_state(sv, c, SV_GONE);
    } else {
        BT_WARN("process", "name=%s pid=%d status=%d signal=%d msg=\"ended unasked\"", c->name,
                (int)c->pid, WIFEXITED(status) ? WEXITSTATUS(status) : -1,
                status >= 0 && WIFSIGNALED(status) ? WTERMSIG(status) : 0);
        if (!sv->booted && !sv->boot_retry && c->ours) {
            sv->failed = true;
        }
        pause_child(sv, c);
    }
    c->pid = 0;
}

/* --- time ------------------------------------------------------------------------------------ */

static bool ready_now(const struct sv *sv, const struct sv_child *c)
{
    char *path;
    bool yes;

    if (!c->role->ready) {
        return bt_now_ns() - c->since_ns >= ALIVE_NS;
    }
    path = sv_expand(sv, c, c->role->ready);
    yes = path && access(path, F_OK) == 0;
    free(path);
    return yes;
}

void sv_child_turn(struct sv *sv, struct sv_child *c, uint64_t *ret_next_ns)
{
    uint64_t next = BT_NEVER_NS;

    if (c->pidfd >= 0 && is_over(c)) {
        ended(sv, c);
    }
    switch (c->state) {
    case SV_STARTING:
        if (ready_now(sv, c)) {
            set_state(sv, c, SV_READY);
            BT_INFO("process", "name=%s pid=%d state=ready", c->name, (int)c->pid);
        } else {
            next = bt_deadline_ns(LOOK_NS);
        }
        break;
    case SV_BACKOFF:
        if (bt_now_ns() >= c->due_ns) {
            c->n_restarts += c->started_at != 0;
            sv_child_start(sv, c);
            next = bt_deadline_ns(LOOK_NS);
        } else {
            next = c->due_ns;
        }
        break;
    case SV_STOPPING:
        if (bt_now_ns() >= c->due_ns) {
            escalate(c);
        }
        next = c->due_ns;
        break;
    case SV_GONE:
        BT_INFO("process", "name=%s state=gone", c->name);
        sv_child_free(c);
        sv->dirty = true;
        break;
    case SV_READY:
    case SV_STATE_COUNT:
    default:
        break;
    }
    *ret_next_ns = BT_MIN(*ret_next_ns, next);
}
