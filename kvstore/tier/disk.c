/* Files of blobs; see disk.h. */
#include "kvstore/tier/disk.h"

#include "common/base/buf.h"
#include "common/obs/log.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#define ALIGN    4096u
#define NAME_LEN (32 + 1 + 16 + 3) /* "<key>.<generation>.kv" */
#define PATH_LEN (32 + 1 + NAME_LEN + 4 + 1)

struct kv_disk {
    int dir; /* holds the lock */
};

struct kv_disk_io kv_disk_io = {.pread = pread, .pwrite = pwrite};

int kv_disk_open(const char *path, struct kv_disk **ret_disk, struct bt_err *err)
{
    struct kv_disk *d;
    int fd;

    if (mkdir(path, 0700) != 0 && errno != EEXIST) {
        return BT_FAIL_SYS(err, BT_E_CONFIG, "disk tier: cannot make directory %s", path);
    }
    fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0) {
        return BT_FAIL_SYS(err, BT_E_CONFIG, "disk tier: cannot open directory %s", path);
    }
    if (flock(fd, LOCK_EX | LOCK_NB) != 0) {
        if (errno == EWOULDBLOCK) {
            BT_FAIL(err, BT_E_CONFIG,
                    "disk tier: another process uses %s; every process needs its own directory",
                    path);
        } else {
            BT_FAIL_SYS(err, BT_E_CONFIG, "disk tier: cannot lock directory %s", path);
        }
        close(fd);
        return BT_E_CONFIG;
    }
    d = bt_calloc(1, sizeof(*d));
    if (!d) {
        close(fd);
        return BT_FAIL(err, BT_E_NOMEM, "disk tier: no memory");
    }
    d->dir = fd;
    if (faccessat(fd, ".", W_OK | X_OK, AT_EACCESS) != 0) {
        BT_WARN("tier_disk", "msg=\"nothing can be written to tier.disk_path = %s\" reason=\"%s\"",
                path, strerror(errno));
    }
    *ret_disk = d;
    return BT_OK;
}

void kv_disk_close(struct kv_disk *d)
{
    if (d) {
        close(d->dir);
        free(d);
    }
}

/* ---- names ---- */

static void put_hex(char *to, const uint8_t *p, size_t n)
{
    static const char digits[] = "0123456789abcdef";

    for (size_t i = 0; i < n; i++) {
        to[2 * i] = digits[p[i] >> 4];
        to[2 * i + 1] = digits[p[i] & 15];
    }
}

static bool get_hex(const char *from, uint8_t *p, size_t n)
{
    for (size_t i = 0; i < 2 * n; i++) {
        char c = from[i];
        int v = c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;

        if (v < 0) {
            return false;
        }
        p[i / 2] = (uint8_t)(i % 2 ? p[i / 2] << 4 | v : v);
    }
    return true;
}

static void root_path(const struct kv_key *root, char ret[33])
{
    put_hex(ret, root->b, sizeof(root->b));
    ret[32] = 0;
}

/* suffix: "" or ".tmp" */
static void
file_path(const struct kv_disk_name *name, const char *suffix, char ret[static PATH_LEN])
{
    char root[33], key[33];

    root_path(&name->root, root);
    root_path(&name->key, key);
    snprintf(ret, PATH_LEN, "%s/%s.%016llx.kv%s", root, key, (unsigned long long)name->generation,
             suffix);
}

static bool read_name(const char *file, struct kv_disk_name *ret)
{
    uint8_t gen[8];

    if (strlen(file) != NAME_LEN || file[32] != '.' || strcmp(file + 49, ".kv") != 0 ||
        !get_hex(file, ret->key.b, 16) || !get_hex(file + 33, gen, 8)) {
        return false;
    }
    ret->generation = 0;
    for (int i = 0; i < 8; i++) {
        ret->generation = ret->generation << 8 | gen[i];
    }
    return true;
}

/* ---- one file ---- */

static int rc_of(int e)
{
    switch (e) {
    case ENOENT:
        return BT_E_NOT_FOUND;
    case ENOSPC:
    case EDQUOT:
        return BT_E_EXHAUSTED;
    case EMFILE:
    case ENFILE:
    case ENOMEM:
        return BT_E_SYS;
    default:
        return BT_E_IO;
    }
}

static size_t data_offset(const struct kv_blob_meta *m)
{
    return BT_DIV_UP(kv_blob_head_bytes(m), ALIGN) * ALIGN;
}

uint64_t kv_disk_file_bytes(const struct kv_blob_meta *m)
{
    return data_offset(m) + kv_blob_bytes(&m->shape);
}

static int write_all(int fd, const void *p, size_t n, off_t at)
{
    while (n > 0) {
        ssize_t done = kv_disk_io.pwrite(fd, p, n, at);

        if (done < 0 && errno == EINTR) {
            continue;
        }
        if (done <= 0) {
            return done < 0 ? rc_of(errno) : BT_E_IO;
        }
        p = (const char *)p + done;
        n -= (size_t)done;
        at += done;
    }
    return BT_OK;
}

static int read_all(int fd, void *p, size_t n, off_t at)
{
    while (n > 0) {
        ssize_t done = kv_disk_io.pread(fd, p, n, at);

        if (done < 0 && errno == EINTR) {
            continue;
        }
        if (done <= 0) {
            return done < 0 ? rc_of(errno) : BT_E_CORRUPT; /* shorter than it was */
        }
        p = (char *)p + done;
        n -= (size_t)done;
        at += done;
    }
    return BT_OK;
}

static int write_content(int fd, const struct kv_blob_meta *m, void *const *layers)
{
    size_t start = data_offset(m);
    void *head = bt_calloc(1, start);
    int rc;

    if (!head) {
        return BT_E_NOMEM;
    }
    kv_blob_encode(m, head);
    rc = write_all(fd, head, start, 0);
    free(head);
    for (uint32_t l = 0; l < m->shape.n_layers && rc == BT_OK; l++) {
        rc = write_all(fd, layers[l], m->shape.layer_bytes,
                       (off_t)(start + l * m->shape.layer_bytes));
    }
    return rc;
}

int kv_disk_write(struct kv_disk *d, const struct kv_blob_meta *m, void *const *layers)
{
    struct kv_disk_name name = {m->root, m->key, m->generation};
    char root[33], path[PATH_LEN], tmp[PATH_LEN];
    int fd, rc;

    root_path(&m->root, root);
    file_path(&name, "", path);
    file_path(&name, ".tmp", tmp);
    if (mkdirat(d->dir, root, 0700) != 0 && errno != EEXIST) {
        return rc_of(errno);
    }
    fd = openat(d->dir, tmp, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
    if (fd < 0) {
        return rc_of(errno);
    }
    rc = write_content(fd, m, layers);
    if (close(fd) != 0 && rc == BT_OK) {
        rc = rc_of(errno);
    }
    if (rc == BT_OK && renameat(d->dir, tmp, d->dir, path) != 0) {
        rc = rc_of(errno);
    }
    if (rc != BT_OK) {
        unlinkat(d->dir, tmp, 0);
    }
    return rc;
}

void kv_disk_remove(struct kv_disk *d, const struct kv_disk_name *name)
{
    char path[PATH_LEN];

    file_path(name, "", path);
    unlinkat(d->dir, path, 0);
}

int kv_disk_open_file(struct kv_disk *d, const struct kv_disk_name *name, int *ret_fd)
{
    char path[PATH_LEN];
    struct stat st;
    int fd;

    file_path(name, "", path);
    /* Not to wait for the other end of a pipe that somebody has put there. */
    fd = openat(d->dir, path, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    if (fd < 0) {
        return rc_of(errno);
    }
    if (fstat(fd, &st) != 0 || !S_ISREG(st.st_mode)) {
        close(fd);
        return BT_E_CORRUPT;
    }
    *ret_fd = fd;
    return BT_OK;
}

void kv_disk_used(int fd)
{
    futimens(fd, NULL);
}

int kv_disk_read_layer(int fd, const struct kv_blob_meta *m, uint32_t layer, void *to)
{
    return read_all(fd, to, m->shape.layer_bytes,
                    (off_t)(data_offset(m) + layer * m->shape.layer_bytes));
}

/* ---- all files ---- */

struct seen {
    struct kv_disk_name name;
    struct timespec used;
};

struct list {
    struct seen *v;
    size_t n, cap;
    uint64_t max_generation;
};

static bool list_add(struct list *l, const struct seen *s)
{
    if (l->n == l->cap) {
        size_t cap = l->cap ? 2 * l->cap : 256;
        struct seen *v = realloc(l->v, cap * sizeof(*v));

        if (!v) {
            return false;
        }
        l->v = v;
        l->cap = cap;
    }
    l->v[l->n++] = *s;
    return true;
}

/* Files of one root into the list; what is left of interrupted writes goes. */
static void
list_root(struct kv_disk *d, const char *root, struct kv_disk_scan *scan, struct list *l)
{
    int fd = openat(d->dir, root, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    DIR *dir = fd >= 0 ? fdopendir(fd) : NULL;
    struct seen s;
    struct stat st;
    struct dirent *e;

    if (!dir) {
        if (fd >= 0) {
            close(fd);
        }
        return;
    }
    get_hex(root, s.name.root.b, 16);
    while ((e = readdir(dir)) && !scan->stop(scan->arg)) {
        size_t n = strlen(e->d_name);

        if (n == NAME_LEN + 4 && strcmp(e->d_name + NAME_LEN, ".tmp") == 0) {
            unlinkat(fd, e->d_name, 0);
        } else if (read_name(e->d_name, &s.name) && fstatat(fd, e->d_name, &st, 0) == 0) {
            s.used = st.st_mtim;
            l->max_generation = BT_MAX(l->max_generation, s.name.generation);
            if (!list_add(l, &s)) {
                break; /* what is not listed is not found, no more */
            }
        }
    }
    closedir(dir);
}

static int newest_first(const void *a, const void *b)
{
    const struct timespec *x = &((const struct seen *)a)->used;
    const struct timespec *y = &((const struct seen *)b)->used;

    if (x->tv_sec != y->tv_sec) {
        return x->tv_sec < y->tv_sec ? 1 : -1;
    }
    return x->tv_nsec == y->tv_nsec ? 0 : x->tv_nsec < y->tv_nsec ? 1 : -1;
}

struct head_buf {
    uint8_t *bytes;
    struct kv_blob_room room;
};

/* Reads and checks a file's head, name and size. */
static int check_file(struct kv_disk *d,
                      const struct kv_disk_name *name,
                      const struct head_buf *buf,
                      struct kv_blob_meta *ret_m)
{
    size_t n = ALIGN, head;
    uint32_t said;
    struct stat st;
    int fd, rc = kv_disk_open_file(d, name, &fd);

    if (rc < 0) {
        return rc;
    }
    if (fstat(fd, &st) != 0 || st.st_size < (off_t)n) {
        close(fd);
        return BT_E_CORRUPT;
    }
    rc = read_all(fd, buf->bytes, n, 0);
    memcpy(&said, buf->bytes + 8, 4);
    if (rc == BT_OK && said > n && said <= KV_BLOB_HEAD_MAX) {
        rc = read_all(fd, buf->bytes + n, said - n, (off_t)n);
        n = said;
    }
    close(fd);
    rc = rc == BT_OK ? kv_blob_decode(buf->bytes, n, &buf->room, ret_m, &head) : rc;
    if (rc == BT_OK &&
        (!kv_key_eq(&ret_m->key, &name->key) || !kv_key_eq(&ret_m->root, &name->root) ||
         ret_m->generation != name->generation ||
         (uint64_t)st.st_size != kv_disk_file_bytes(ret_m))) {
        rc = BT_E_CORRUPT;
    }
    return rc;
}

static void check_files(struct kv_disk *d,
                        struct kv_disk_scan *scan,
                        const struct list *l,
                        struct head_buf *buf)
{
    for (size_t i = 0; i < l->n && !scan->stop(scan->arg); i++) {
        struct kv_blob_meta m;
        int rc = check_file(d, &l->v[i].name, buf, &m);

        if (rc == BT_OK && scan->found(scan->arg, &m)) {
            continue;
        }
        if (rc == BT_E_SYS) {
            continue; /* not the file's fault */
        }
        scan->n_bad += rc != BT_OK;
        kv_disk_remove(d, &l->v[i].name);
    }
}

void kv_disk_scan(struct kv_disk *d, struct kv_disk_scan *scan)
{
    int fd = openat(d->dir, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *dir = fd >= 0 ? fdopendir(fd) : NULL;
    struct head_buf buf = {.bytes = bt_calloc(1, KV_BLOB_HEAD_MAX),
                           .room = {.ids = bt_calloc(KV_BLOB_MAX_TOKENS, sizeof(int32_t)),
                                    .n_ids = KV_BLOB_MAX_TOKENS,
                                    .sums = bt_calloc(KV_BLOB_MAX_LAYERS, sizeof(uint64_t)),
                                    .n_sums = KV_BLOB_MAX_LAYERS}};
    struct list l = {0};
    struct dirent *e;
    uint8_t root[16];

    while (dir && (e = readdir(dir)) && !scan->stop(scan->arg)) {
        if (strlen(e->d_name) == 32 && get_hex(e->d_name, root, 16)) {
            list_root(d, e->d_name, scan, &l);
            unlinkat(d->dir, e->d_name, AT_REMOVEDIR); /* goes if it is empty */
        }
    }
    if (dir) {
        closedir(dir);
    } else if (fd >= 0) {
        close(fd);
    }
    if (!scan->stop(scan->arg)) {
        scan->listed(scan->arg, l.max_generation);
    }
    if (l.n > 0 && buf.bytes && buf.room.ids && buf.room.sums) {
        qsort(l.v, l.n, sizeof(*l.v), newest_first);
        check_files(d, scan, &l, &buf);
    }
    free(l.v);
    free(buf.bytes);
    free(buf.room.ids);
    free(buf.room.sums);
}
