/* Faulting memory in. Whoever maps something, or uses a page that is being replaced, waits for
 * thread "warm" to be through with a huge page. So it has the priority of others, who would else
 * wait until it gets a processor that they use, and rests after each.
 *
 * Memory files come in pages of 4 KiB unless the system is set up otherwise, and one core reads
 * them at half the rate of huge ones (a look-up of the page tables, twice over in a virtual
 * machine, for every 4 KiB). Asked for a range, Linux 6.1 and later replaces what is there by huge
 * pages, whatever is set up; where only one page is there, this costs less than to fault in the
 * others. */
#include "common/mem/warm.h"

#include "common/base/buf.h"
#include "common/obs/log.h"
#include "common/thr/pace.h"
#include "common/thr/thread.h"

#include <errno.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

#ifndef MADV_POPULATE_WRITE /* Linux 5.14; the headers of older C libraries lack it */
#define MADV_POPULATE_WRITE 23
#endif

#ifndef MADV_COLLAPSE /* Linux 6.1 */
#define MADV_COLLAPSE 25
#endif

#define PIECE      BT_MEM_HUGE
#define LOOK_EVERY 32 /* pieces between two looks at what is available */
#define SCARCE     8  /* at least one part in so many stays available */

struct bt_warm {
    char *base;
    size_t bytes;
    pthread_t thread;
    bool no_huge;  /* the kernel cannot, or not here */
    size_t n_huge; /* bytes that are in huge pages now */
    atomic_bool stop, done;
};

/* The number of bytes in a file of a control group; UINT64_MAX = "max", or there is none. */
static uint64_t group_bytes(const char *group, const char *name)
{
    unsigned long long n = 0;
    char path[4200];
    FILE *f;
    bool known;

    snprintf(path, sizeof(path), "/sys/fs/cgroup%s/%s", group, name);
    f = fopen(path, "re");
    known = f && fscanf(f, "%llu", &n) == 1;
    if (f) {
        fclose(f);
    }
    return known ? n : UINT64_MAX;
}

/* This process's group (version 2), as seen from the mounted root; "" = the root, or not known. */
static void own_group(char ret[4096])
{
    FILE *f = fopen("/proc/self/cgroup", "re");

    ret[0] = '\0';
    while (f && fgets(ret, 4096, f)) {
        if (strncmp(ret, "0::/", 4) == 0) {
            memmove(ret, ret + 3, strlen(ret + 3) + 1);
            ret[strcspn(ret, "\n")] = '\0';
            break;
        }
        ret[0] = '\0';
    }
    if (f) {
        fclose(f);
    }
}

uint64_t bt_mem_available(uint64_t *ret_total)
{
    unsigned long long kib, total = 0, available = 0;
    char line[128], group[4096], *end;
    FILE *f = fopen("/proc/meminfo", "re");

    while (f && fgets(line, sizeof(line), f)) {
        if (sscanf(line, "MemTotal: %llu kB", &kib) == 1) {
            total = kib * 1024;
        } else if (sscanf(line, "MemAvailable: %llu kB", &kib) == 1) {
            available = kib * 1024;
        }
    }
    if (f) {
        fclose(f);
    }
    own_group(group);
    do { /* the group and those it lies in: each may have a limit */
        uint64_t limit = group_bytes(group, "memory.max");
        uint64_t used = group_bytes(group, "memory.current");

        if (limit != UINT64_MAX && used != UINT64_MAX) {
            total = BT_MIN(total, limit);
            available = BT_MIN(available, limit > used ? limit - used : 0);
        }
        end = strrchr(group, '/');
        if (end) {
            *end = '\0';
        }
    } while (end);
    if (ret_total) {
        *ret_total = total;
    }
    return available;
}

static bool scarce(void)
{
    uint64_t total, available = bt_mem_available(&total);

    return total > 0 && available < total / SCARCE;
}

/* False: this kernel cannot, or there is no memory for it. */
static bool touch(void *base, size_t bytes)
{
    return madvise(base, bytes, MADV_POPULATE_WRITE) == 0;
}

/* A huge page; what it holds stays. */
static bool make_huge(struct bt_warm *w, char *at, size_t bytes)
{
    if (w->no_huge || (uintptr_t)at % BT_MEM_HUGE != 0 || bytes != BT_MEM_HUGE ||
        !touch(at, 1)) { /* where nothing is, nothing is replaced */
        return false;
    }
    if (madvise(at, bytes, MADV_COLLAPSE) == 0) {
        w->n_huge += bytes;
        return true;
    }
    w->no_huge = errno == EINVAL;
    return false;
}

static bool warm_piece(struct bt_warm *w, char *at, size_t bytes)
{
    return make_huge(w, at, bytes) || touch(at, bytes);
}

static void rest_until(uint64_t ns)
{
    const struct timespec ts = {(time_t)(ns / BT_NS_PER_S), (long)(ns % BT_NS_PER_S)};

    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &ts, NULL) == EINTR) {
    }
}

static void *run(void *arg)
{
    struct bt_warm *w = arg;
    size_t at = 0;

    for (size_t i = 0; at < w->bytes && !atomic_load(&w->stop); i++) {
        size_t n = BT_MIN(PIECE, w->bytes - at);
        uint64_t begun_ns = bt_now_ns();

        if ((i % LOOK_EVERY == 0 && scarce()) || !warm_piece(w, w->base + at, n)) {
            BT_INFO("not_warmed",
                    "at=%zu of=%zu msg=\"memory is short, or the kernel before 5.14\"", at,
                    w->bytes);
            break;
        }
        at += n;
        rest_until(bt_pace_until(begun_ns));
    }
    if (at == w->bytes) {
        BT_INFO("warmed", "bytes=%zu huge=%zu", at, w->n_huge);
    }
    atomic_store(&w->done, true);
    return NULL;
}

int bt_warm_start(void *base, size_t bytes, struct bt_warm **ret_warm, struct bt_err *err)
{
    struct bt_warm *w = bt_calloc(1, sizeof(*w));
    int rc;

    if (!w) {
        return BT_FAIL(err, BT_E_NOMEM, "warming memory: out of memory");
    }
    w->base = base;
    w->bytes = bytes;
    rc = bt_thread_start(&w->thread, "warm", run, w, err);
    if (rc < 0) {
        free(w);
        return rc;
    }
    *ret_warm = w;
    return BT_OK;
}

void bt_warm_region(const struct bt_mem_region *r, struct bt_warm **ret_warm)
{
    struct bt_err err = {0};
    int rc = r->ops == &bt_mem_host ? bt_warm_start(r->base, r->bytes, ret_warm, &err) : BT_OK;

    if (rc < 0) {
        BT_WARN("not_warmed", "msg=\"%s\"", bt_err_msg(&err, rc));
    }
}

bool bt_warm_done(const struct bt_warm *w)
{
    return atomic_load(&w->done);
}

void bt_warm_stop(struct bt_warm *w)
{
    if (w) {
        atomic_store(&w->stop, true);
        pthread_join(w->thread, NULL);
        free(w);
    }
}

void bt_warm_now(void *base, size_t bytes)
{
    touch(base, bytes);
}
