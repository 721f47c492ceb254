/* Memory of pools and weights, through a vtable so that device memory fits in later.
 *
 * Host memory is a memfd: it can be handed to another process and outlive this one
 * (ARCHITECTURE.md, "Memory outlives the process"). A region belongs to whoever created it. */
#ifndef BT_MEM_MEM_H
#define BT_MEM_MEM_H

#include "common/base/rc.h"

enum bt_mem_kind { BT_MEM_HOST, BT_MEM_CUDA };

struct bt_mem_region {
    const struct bt_mem_ops *ops;
    void *base;   /* page-aligned; NULL for memory the host cannot address */
    size_t bytes; /* as asked for, rounded up to the system's page size */
    int fd;       /* exportable handle, -1 if none */
};

struct bt_mem_ops {
    enum bt_mem_kind kind;
    const char *name;
    /* Zero-filled on first touch. `name` shows in /proc/PID/maps. */
    int (*alloc)(size_t bytes, const char *name, struct bt_mem_region *ret, struct bt_err *err);
    void (*free)(struct bt_mem_region *r);
    /* Copies inside the kind or between it and host memory; synchronous. */
    void (*copy)(void *dst, const void *src, size_t bytes);
    /* Memory that another process made and handed over as a descriptor, which the region owns from
     * then on; a failure leaves it with the caller. BT_E_INVALID: it holds less than `bytes`.
     * NULL: memory of this kind stays with its process. */
    int (*import)(
        int fd, size_t bytes, const char *name, struct bt_mem_region *ret, struct bt_err *err);
    /* From now on nobody in this process writes to it. NULL: that is not enforced. */
    void (*protect)(struct bt_mem_region *r);
};

#define BT_MEM_HUGE ((size_t)2 << 20) /* a huge page */

/* Maps a memory file, shared, at an address at which its huge pages can be mapped as such. NULL and
 * errno as from mmap; bytes > 0, offset a multiple of the page size. Any thread. */
void *bt_mem_map(int fd, uint64_t offset, size_t bytes, int prot);

extern const struct bt_mem_ops bt_mem_host;
/* Anonymous memory that stays with this process (fd -1). The kernel grants huge pages for it where
 * it does not for a memfd: for weights, and blocks outside a pool. */
extern const struct bt_mem_ops bt_mem_private;

#endif
