/* Read-only maps of regular files; the only place of this folder that opens model files. */
#include "common/file/file_int.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

static int64_t mtime_ns(const struct stat *st)
{
    return (int64_t)st->st_mtim.tv_sec * 1000000000 + st->st_mtim.tv_nsec;
}

static int map_fd(struct bt_file_map *m, size_t max, struct bt_err *err)
{
    struct stat st;
    void *p;

    if (fstat(m->fd, &st) != 0) {
        return BT_FAIL_SYS(err, BT_E_IO, "%s", m->path);
    }
    if (!S_ISREG(st.st_mode)) {
        return BT_FAIL(err, BT_E_IO, "%s: not a regular file", m->path);
    }
    if ((uint64_t)st.st_size > max) {
        return BT_FAIL(err, BT_E_TOO_LARGE, "%s: %lld bytes, at most %zu are accepted", m->path,
                       (long long)st.st_size, max);
    }
    m->n = (size_t)st.st_size;
    m->dev = st.st_dev;
    m->ino = st.st_ino;
    m->mtime_ns = mtime_ns(&st);
    if (m->n == 0) {
        return BT_OK;
    }
    p = mmap(NULL, m->n, PROT_READ, MAP_SHARED, m->fd, 0);
    if (p == MAP_FAILED) {
        return BT_FAIL_SYS(err, BT_E_IO, "%s: cannot map", m->path);
    }
    m->p = p;
    return BT_OK;
}

int bt_file_map_init(const char *path, size_t max, struct bt_file_map *ret, struct bt_err *err)
{
    int rc;

    *ret = (struct bt_file_map){.fd = -1, .role = ""};
    ret->path = strdup(path);
    if (!ret->path) {
        return BT_E_NOMEM;
    }
    /* Non-blocking, so that a FIFO in place of a file cannot hold us up. */
    ret->fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (ret->fd < 0) {
        rc = errno == ENOENT || errno == ENOTDIR ? BT_E_NOT_FOUND : BT_E_IO;
        BT_FAIL_SYS(err, rc, "%s", path);
    } else {
        rc = map_fd(ret, max, err);
    }
    if (rc != BT_OK) {
        bt_file_map_fini(ret);
    }
    return rc;
}

void bt_file_map_fini(struct bt_file_map *m)
{
    if (m->p) {
        munmap((void *)(uintptr_t)m->p, m->n);
    }
    bt_close_fd(&m->fd);
    free(m->path);
    *m = (struct bt_file_map){.fd = -1, .role = ""};
}

bool bt_file_map_unchanged(const struct bt_file_map *m)
{
    struct stat st;

    return fstat(m->fd, &st) == 0 && (size_t)st.st_size == m->n && mtime_ns(&st) == m->mtime_ns;
}
