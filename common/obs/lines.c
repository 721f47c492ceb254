/* See lines.h. Two buffers: callers add to one under the lock, the thread writes the other. After a
 * write it pauses, so that many lines a second cost their callers one wake-up in a while, not one
 * each. What has come together then is written in pieces, and between them the processor goes to
 * whoever wants it: a hundred lines in one write are half a millisecond that a request would wait.
 */
#include "common/obs/lines.h"

#include "common/base/buf.h"
#include "common/obs/log.h"
#include "common/thr/cond.h"
#include "common/thr/thread.h"

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define MAX_BYTES (4u << 20)
#define PIECE     (8u << 10)
#define PAUSE_NS  (20 * BT_NS_PER_MS)

struct bt_lines {
    char *path;
    int fd; /* of the thread, once it runs */
    bool owns_fd;
    pthread_t thread;
    struct bt_buf writing; /* of the thread */

    pthread_mutex_t lock;
    pthread_cond_t cond;
    struct bt_buf adding; /* under the lock, as is what follows */
    uint64_t dropped;
    bool reopen, quit;
    bool sleeping; /* the thread waits for a line */
};

static int open_file(const char *path)
{
    return open(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0640);
}

static void write_all(struct bt_lines *l)
{
    const char *p = l->writing.p;
    size_t left = l->writing.n;

    while (left > 0) {
        const char *end = left > PIECE ? memrchr(p, '\n', PIECE) : NULL; /* whole lines */
        ssize_t n = write(l->fd, p, end ? (size_t)(end + 1 - p) : left);

        if (n < 0 && errno == EINTR) {
            continue;
        }
        if (n <= 0) {
            BT_WARN("lines", "path=%s msg=\"cannot write\" error=\"%s\" lost_bytes=%zu", l->path,
                    strerror(errno), left);
            break;
        }
        p += n;
        left -= (size_t)n;
        if (left > 0) {
            sched_yield();
        }
    }
    l->writing.n = 0;
}

static void reopen(struct bt_lines *l)
{
    int fd = l->owns_fd ? open_file(l->path) : -1;

    if (fd < 0) {
        if (l->owns_fd) {
            BT_WARN("lines", "path=%s msg=\"cannot be opened again\" error=\"%s\"", l->path,
                    strerror(errno));
        }
        return;
    }
    close(l->fd);
    l->fd = fd;
}

/* Until there is something to do; under the lock. */
static void wait_for_lines(struct bt_lines *l)
{
    uint64_t until = bt_deadline_ns(PAUSE_NS);

    while (!l->reopen && !l->quit && l->adding.n < MAX_BYTES / 2 &&
           bt_cond_until(&l->cond, &l->lock, until)) {
    }
    l->sleeping = true;
    while (l->adding.n == 0 && !l->reopen && !l->quit) {
        pthread_cond_wait(&l->cond, &l->lock);
    }
    l->sleeping = false;
}

static void *lines_main(void *arg)
{
    struct bt_lines *l = arg;
    bool quit = false, again;
    uint64_t dropped;

    bt_thread_background();
    while (!quit) {
        struct bt_buf full;

        pthread_mutex_lock(&l->lock);
        wait_for_lines(l);
        full = l->adding;
        l->adding = l->writing;
        l->writing = full;
        again = l->reopen;
        quit = l->quit;
        dropped = l->dropped;
        l->reopen = false;
        l->dropped = 0;
        pthread_mutex_unlock(&l->lock);
        write_all(l);
        if (dropped > 0 && bt_buf_printf(&l->writing, "{\"dropped\":%llu}\n",
                                         (unsigned long long)dropped) == BT_OK) {
            write_all(l);
        }
        if (again) {
            reopen(l);
        }
    }
    return NULL;
}

void bt_lines_add(struct bt_lines *l, struct bt_str line)
{
    bool wake;

    if (!l) {
        return;
    }
    pthread_mutex_lock(&l->lock);
    if (l->adding.n + line.n + 1 > MAX_BYTES || bt_buf_add(&l->adding, line.p, line.n) < 0) {
        l->dropped++;
    } else if (bt_buf_add(&l->adding, "\n", 1) < 0) {
        l->adding.n -= line.n;
        l->dropped++;
    }
    wake = l->sleeping || l->adding.n >= MAX_BYTES / 2;
    l->sleeping = false;
    pthread_mutex_unlock(&l->lock);
    if (wake) {
        pthread_cond_signal(&l->cond);
    }
}

void bt_lines_time(const struct timespec *ts, char buf[40])
{
    struct tm tm;
    size_t n;

    gmtime_r(&ts->tv_sec, &tm);
    n = strftime(buf, 24, "%Y-%m-%dT%H:%M:%S", &tm);
    snprintf(buf + n, 40 - n, ".%06ldZ", ts->tv_nsec / 1000);
}

void bt_lines_reopen(struct bt_lines *l)
{
    if (l) {
        pthread_mutex_lock(&l->lock);
        l->reopen = true;
        pthread_mutex_unlock(&l->lock);
        pthread_cond_signal(&l->cond);
    }
}

static void destroy(struct bt_lines *l)
{
    if (l->owns_fd && l->fd >= 0) {
        close(l->fd);
    }
    bt_buf_fini(&l->adding);
    bt_buf_fini(&l->writing);
    pthread_cond_destroy(&l->cond);
    pthread_mutex_destroy(&l->lock);
    free(l->path);
    free(l);
}

int bt_lines_open(const char *path, struct bt_lines **ret_lines, struct bt_err *err)
{
    struct bt_lines *l = bt_calloc(1, sizeof(*l));
    int rc;

    if (!l) {
        return BT_FAIL(err, BT_E_NOMEM, "%.100s: no memory", path);
    }
    pthread_mutex_init(&l->lock, NULL);
    bt_cond_init(&l->cond);
    l->owns_fd = strcmp(path, "-") != 0;
    l->path = strdup(path);
    l->fd = l->owns_fd ? open_file(path) : STDOUT_FILENO;
    if (!l->path) {
        rc = BT_FAIL(err, BT_E_NOMEM, "%.100s: no memory", path);
    } else if (l->fd < 0) {
        rc = BT_FAIL_SYS(err, BT_E_IO, "cannot open %.100s", path);
    } else {
        rc = bt_thread_start(&l->thread, "lines", lines_main, l, err);
    }
    if (rc < 0) {
        destroy(l);
        return rc;
    }
    *ret_lines = l;
    return BT_OK;
}

void bt_lines_close(struct bt_lines *l)
{
    if (!l) {
        return;
    }
    pthread_mutex_lock(&l->lock);
    l->quit = true;
    pthread_mutex_unlock(&l->lock);
    pthread_cond_signal(&l->cond);
    pthread_join(l->thread, NULL);
    destroy(l);
}
