/* Regions: memory files under names, who has them, limits. Keeper's thread. */
#include "kvstore/keeper/server_int.h"

#include "common/base/buf.h"
#include "common/mem/mem.h"
#include "common/obs/log.h"
#include "common/thr/time.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#define HUGE_PAGE (2u << 20)
#ifndef MFD_HUGE_2MB
#define MFD_HUGE_2MB (21u << 26) /* <linux/memfd.h> */
#endif

static struct kv_region *region_of(struct bt_list *link)
{
    return BT_LIST_ENTRY(link, struct kv_region, link);
}

struct kv_region *kv_region_find(const struct kv_keeperd *k, const char *node, const char *name)
{
    bt_list_for_each (l, &k->regions) {
        struct kv_region *r = region_of(l);

        if (strcmp(r->node, node) == 0 && strcmp(r->name, name) == 0) {
            return r;
        }
    }
    return NULL;
}

bool kv_region_fits(const struct kv_region *r, const struct kv_keeper_request *q)
{
    return memcmp(r->digest, q->digest, sizeof(r->digest)) == 0 && r->want_bytes == q->bytes &&
           r->kind == q->kind && r->device == q->device;
}

void kv_region_set_owner(struct kv_region *r, struct kv_owner *owner)
{
    owner->n_refs++;
    r->owner = owner;
    r->incarnation = owner->incarnation;
}

/* Against the limit: memory of a device is not the host's. */
static uint64_t host_bytes(const struct kv_region *r)
{
    return r->kind == BT_MEM_HOST ? r->bytes : 0;
}

void kv_region_drop(struct kv_keeperd *k, struct kv_region *r)
{
    bt_list_remove(&r->link);
    k->n_regions--;
    k->bytes -= host_bytes(r);
    close(r->fd);
    kv_owner_put(k, r->owner);
    free(r);
}

uint64_t kv_region_expire(struct kv_keeperd *k, uint64_t now_ns)
{
    uint64_t next = BT_NEVER_NS;
    struct bt_list *l = k->regions.next, *after;

    for (; l != &k->regions; l = after) {
        struct kv_region *r = region_of(l);

        after = l->next;
        if (r->owner || k->conf.orphan_ns == BT_NEVER_NS) {
            continue;
        }
        if (now_ns - r->orphan_ns >= k->conf.orphan_ns) {
            BT_INFO("expired", "node=%s region=%s bytes=%llu", r->node, r->name,
                    (unsigned long long)r->bytes);
            kv_region_drop(k, r);
        } else {
            next = BT_MIN(next, r->orphan_ns + k->conf.orphan_ns);
        }
    }
    return next;
}

/* ---- memory ---- */

/* Nobody can shrink it under those who have it mapped. */
static void seal_size(int fd)
{
    (void)fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL);
}

/* Huge pages of the reserved pool. They are set aside by mapping once; who maps the file later
 * cannot fail for want of them. */
static int make_huge(const char *name, uint64_t bytes, int *ret_fd, uint64_t *ret_bytes)
{
    uint64_t size = BT_DIV_UP(bytes, (uint64_t)HUGE_PAGE) * HUGE_PAGE;
    int fd = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING | MFD_HUGETLB | MFD_HUGE_2MB);
    void *p;

    if (fd < 0) {
        return BT_E_UNSUPPORTED;
    }
    p = ftruncate(fd, (off_t)size) == 0
            ? mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0)
            : MAP_FAILED;
    if (p == MAP_FAILED) {
        close(fd);
        return BT_E_NOMEM;
    }
    munmap(p, size);
    *ret_fd = fd;
    *ret_bytes = size;
    return BT_OK;
}

/* Pages of the usual size; whoever maps them asks for transparent huge ones. */
static int make_plain(const char *name, uint64_t bytes, int *ret_fd, struct bt_err *err)
{
    int fd = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING);

    if (fd < 0) {
        return BT_FAIL_SYS(err, BT_E_SYS, "memory %s: memfd_create", name);
    }
    if (ftruncate(fd, (off_t)bytes) != 0) {
        BT_FAIL_SYS(err, BT_E_NOMEM, "memory %s: %llu bytes", name, (unsigned long long)bytes);
        close(fd);
        return BT_E_NOMEM;
    }
    *ret_fd = fd;
    return BT_OK;
}

static int make_memory(const struct kv_keeperd *k, struct kv_region *r, struct bt_err *err)
{
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);
    char name[KV_KEEPER_NODE + KV_KEEPER_REGION + 8];
    int rc;

    snprintf(name, sizeof(name), "baton-%s-%s", r->node, r->name);
    if (k->conf.huge_pages && r->want_bytes >= HUGE_PAGE &&
        make_huge(name, r->want_bytes, &r->fd, &r->bytes) == BT_OK) {
        r->pages = KV_KEEPER_PAGES_HUGE;
        seal_size(r->fd);
        return BT_OK;
    }
    r->bytes = BT_DIV_UP(r->want_bytes, page) * page;
    rc = make_plain(name, r->bytes, &r->fd, err);
    if (rc == BT_OK) {
        seal_size(r->fd);
    }
    return rc;
}

/* Memory of another process: a memory file of the size that it says, which nobody can make smaller
 * or unwritable under those who map it next. Device memory's descriptor says nothing; whoever
 * imports it finds out. */
static int
check_memory(int fd, const struct kv_keeper_request *q, uint64_t *ret, struct bt_err *err)
{
    struct stat st;
    int seals;

    if (q->kind == BT_MEM_CUDA) {
        *ret = q->bytes;
        return BT_OK;
    }
    seal_size(fd); /* first: its size may change until then */
    seals = fcntl(fd, F_GET_SEALS);
    if (seals < 0 || fstat(fd, &st) != 0 || !S_ISREG(st.st_mode)) {
        return BT_FAIL(err, BT_E_INVALID, "region %s: the descriptor is no memory", q->region);
    }
    if (!(seals & F_SEAL_SHRINK)) {
        return BT_FAIL(err, BT_E_INVALID, "region %s: its size cannot be sealed", q->region);
    }
    if ((uint64_t)st.st_size < q->bytes) {
        return BT_FAIL(err, BT_E_INVALID, "region %s: %llu bytes, not %llu", q->region,
                       (unsigned long long)st.st_size, (unsigned long long)q->bytes);
    }
    if ((fcntl(fd, F_GETFL) & O_ACCMODE) != O_RDWR ||
        (seals & (F_SEAL_WRITE | F_SEAL_FUTURE_WRITE))) {
        return BT_FAIL(err, BT_E_INVALID, "region %s: the descriptor cannot be written", q->region);
    }
    *ret = (uint64_t)st.st_size;
    return BT_OK;
}

/* ---- limits ---- */

static struct kv_region *oldest_orphan(const struct kv_keeperd *k)
{
    struct kv_region *oldest = NULL;

    bt_list_for_each (l, &k->regions) {
        struct kv_region *r = region_of(l);

        if (!r->owner && (!oldest || r->orphan_ns < oldest->orphan_ns)) {
            oldest = r;
        }
    }
    return oldest;
}

/* What must fit besides the region that is replaced. */
static int make_room(struct kv_keeperd *k, uint64_t bytes, struct bt_err *err)
{
    struct kv_region *r;

    if (bytes > k->conf.max_bytes) {
        return BT_FAIL(err, BT_E_EXHAUSTED, "%llu bytes, the keeper may hold %llu",
                       (unsigned long long)bytes, (unsigned long long)k->conf.max_bytes);
    }
    while (k->n_regions >= k->conf.max_regions || k->bytes > k->conf.max_bytes - bytes) {
        r = oldest_orphan(k);
        if (!r) {
            return BT_FAIL(err, BT_E_EXHAUSTED,
                           "%u regions of %llu bytes are in use; %u of %llu may be", k->n_regions,
                           (unsigned long long)k->bytes, k->conf.max_regions,
                           (unsigned long long)k->conf.max_bytes);
        }
        BT_INFO("dropped", "node=%s region=%s bytes=%llu msg=\"room for others\"", r->node, r->name,
                (unsigned long long)r->bytes);
        kv_region_drop(k, r);
    }
    return BT_OK;
}

static int check_kind(const struct kv_keeper_request *q, struct bt_err *err)
{
    if (q->kind > BT_MEM_CUDA || q->device != 0) {
        return BT_FAIL(err, BT_E_UNSUPPORTED, "region %s: memory of kind %u, device %u", q->region,
                       q->kind, q->device);
    }
    if (q->bytes == 0 || q->bytes > INT64_MAX / 2) {
        return BT_FAIL(err, BT_E_INVALID, "region %s: %llu bytes", q->region,
                       (unsigned long long)q->bytes);
    }
    return BT_OK;
}

static struct kv_region *new_region(const struct kv_owner *owner, const struct kv_keeper_request *q)
{
    struct kv_region *r = bt_calloc(1, sizeof(*r));

    if (r) {
        memcpy(r->node, owner->node, sizeof(r->node));
        memcpy(r->name, q->region, sizeof(r->name));
        memcpy(r->digest, q->digest, sizeof(r->digest));
        r->want_bytes = q->bytes;
        r->kind = q->kind;
        r->device = q->device;
        r->fd = -1;
    }
    return r;
}

static void add_region(struct kv_keeperd *k, struct kv_region *r)
{
    bt_list_push_back(&k->regions, &r->link);
    k->n_regions++;
    k->bytes += host_bytes(r);
}

int kv_region_make(struct kv_keeperd *k,
                   const struct kv_owner *owner,
                   const struct kv_keeper_request *q,
                   struct kv_region **ret,
                   struct bt_err *err)
{
    struct kv_region *old = kv_region_find(k, owner->node, q->region), *r;
    int rc = check_kind(q, err);

    if (rc < 0) {
        return rc;
    }
    if (old) {
        kv_region_drop(k, old);
    }
    if (q->kind != BT_MEM_HOST) {
        return BT_FAIL(err, BT_E_UNSUPPORTED,
                       "region %s: there is none, and memory of a device is "
                       "made by its process",
                       q->region);
    }
    rc = make_room(k, q->bytes, err);
    if (rc < 0) {
        return rc;
    }
    r = new_region(owner, q);
    if (!r) {
        return BT_FAIL(err, BT_E_NOMEM, "no memory");
    }
    rc = make_memory(k, r, err);
    if (rc == BT_OK && getrandom(&r->id, sizeof(r->id), 0) != (ssize_t)sizeof(r->id)) {
        close(r->fd);
        rc = BT_FAIL_SYS(err, BT_E_SYS, "getrandom");
    }
    if (rc < 0) {
        free(r);
        return rc;
    }
    add_region(k, r);
    *ret = r;
    return BT_OK;
}

int kv_region_take(struct kv_keeperd *k,
                   const struct kv_owner *owner,
                   const struct kv_keeper_request *q,
                   int fd,
                   struct bt_err *err)
{
    struct kv_region *old = kv_region_find(k, owner->node, q->region), *r;
    uint64_t bytes = 0;
    int rc = check_kind(q, err);

    rc = rc < 0 ? rc : check_memory(fd, q, &bytes, err);
    if (rc < 0) {
        return rc;
    }
    if (old) {
        kv_region_drop(k, old);
    }
    rc = make_room(k, q->kind == BT_MEM_HOST ? bytes : 0, err);
    if (rc < 0) {
        return rc;
    }
    r = new_region(owner, q);
    if (!r) {
        return BT_FAIL(err, BT_E_NOMEM, "no memory");
    }
    r->bytes = bytes;
    r->id = q->id;
    r->fd = fd;
    add_region(k, r);
    return BT_OK;
}
