/* Host memory: memfd, mapped shared, or anonymous; transparent huge pages asked for. */
#include "common/mem/mem.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

/* Address space for `bytes`, `skew` bytes behind a multiple of a huge page; NULL: there is none. */
static char *reserve(size_t bytes, size_t skew)
{
    size_t slack = bytes + BT_MEM_HUGE, before, after;
    char *p = mmap(NULL, slack, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

    if (p == MAP_FAILED) {
        return NULL;
    }
    before = (skew - (uintptr_t)p) % BT_MEM_HUGE;
    after = BT_MEM_HUGE - before;
    if (before > 0) {
        munmap(p, before);
    }
    if (after > 0) {
        munmap(p + before + bytes, after);
    }
    return p + before;
}

void *bt_mem_map(int fd, uint64_t offset, size_t bytes, int prot)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE), size;
    char *at = NULL;
    void *p;

    if (bytes >= BT_MEM_HUGE && bt_add_size(bytes, page - 1, &size) &&
        size < SIZE_MAX - BT_MEM_HUGE) {
        at = reserve(size & ~(page - 1), offset % BT_MEM_HUGE);
    }
    p = mmap(at, bytes, prot, MAP_SHARED | (at ? MAP_FIXED : 0), fd, (off_t)offset);
    if (p == MAP_FAILED) {
        return NULL; /* what was reserved may be another thread's by now */
    }
    madvise(p, bytes, MADV_HUGEPAGE); /* a wish; not every kernel grants it for memfd */
    return p;
}

static int host_alloc(size_t bytes, const char *name, struct bt_mem_region *ret, struct bt_err *err)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE), size;
    void *base;
    int fd;

    if (bytes == 0 || !bt_add_size(bytes, page - 1, &size)) {
        return BT_FAIL(err, BT_E_INVALID, "memory %s: cannot allocate %zu bytes", name, bytes);
    }
    size &= ~(page - 1);
    fd = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd < 0) {
        return BT_FAIL_SYS(err, BT_E_SYS, "memory %s: memfd_create", name);
    }
    if (ftruncate(fd, (off_t)size) != 0) {
        BT_FAIL_SYS(err, BT_E_NOMEM, "memory %s: %zu bytes", name, size);
        close(fd);
        return BT_E_NOMEM;
    }
    /* Who maps it as well relies on all of it staying there. */
    (void)fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW);
    base = bt_mem_map(fd, 0, size, PROT_READ | PROT_WRITE);
    if (!base) {
        BT_FAIL_SYS(err, BT_E_NOMEM, "memory %s: cannot map %zu bytes", name, size);
        close(fd);
        return BT_E_NOMEM;
    }
    *ret = (struct bt_mem_region){&bt_mem_host, base, size, fd};
    return BT_OK;
}

/* Whoever made it may have rounded up further: huge pages. */
static int
host_import(int fd, size_t bytes, const char *name, struct bt_mem_region *ret, struct bt_err *err)
{
    struct stat st;
    size_t size;
    void *base;

    if (fstat(fd, &st) != 0) {
        return BT_FAIL_SYS(err, BT_E_SYS, "memory %s: descriptor", name);
    }
    size = (size_t)st.st_size;
    if (bytes == 0 || !S_ISREG(st.st_mode) || size < bytes) {
        return BT_FAIL(err, BT_E_INVALID, "memory %s: %zu bytes are there, not %zu", name, size,
                       bytes);
    }
    base = bt_mem_map(fd, 0, size, PROT_READ | PROT_WRITE);
    if (!base) {
        return BT_FAIL_SYS(err, BT_E_NOMEM, "memory %s: cannot map %zu bytes", name, size);
    }
    *ret = (struct bt_mem_region){&bt_mem_host, base, size, fd};
    return BT_OK;
}

static int
private_alloc(size_t bytes, const char *name, struct bt_mem_region *ret, struct bt_err *err)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE), size;
    void *base;

    if (bytes == 0 || !bt_add_size(bytes, page - 1, &size)) {
        return BT_FAIL(err, BT_E_INVALID, "memory %s: cannot allocate %zu bytes", name, bytes);
    }
    size &= ~(page - 1);
    base = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base == MAP_FAILED) {
        return BT_FAIL_SYS(err, BT_E_NOMEM, "memory %s: cannot map %zu bytes", name, size);
    }
    madvise(base, size, MADV_HUGEPAGE); /* a wish */
    *ret = (struct bt_mem_region){&bt_mem_private, base, size, -1};
    return BT_OK;
}

static void host_free(struct bt_mem_region *r)
{
    if (r->base) {
        munmap(r->base, r->bytes);
        if (r->fd >= 0) {
            close(r->fd);
        }
    }
    *r = (struct bt_mem_region){.fd = -1};
}

static void host_copy(void *dst, const void *src, size_t bytes)
{
    memcpy(dst, src, bytes);
}

const struct bt_mem_ops bt_mem_host = {
    .kind = BT_MEM_HOST,
    .name = "host",
    .alloc = host_alloc,
    .free = host_free,
    .copy = host_copy,
    .import = host_import,
};

const struct bt_mem_ops bt_mem_private = {
    .kind = BT_MEM_HOST,
    .name = "private",
    .alloc = private_alloc,
    .free = host_free,
    .copy = host_copy,
};
