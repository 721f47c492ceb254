/* Files of blobs in a directory: one file a blob, found by name.
 *
 *   <path>/<root, 32 hex digits>/<key, 32 hex digits>.<generation, 16 hex digits>.kv
 *
 *   offset           size
 *   0                H        head (blob.h); its key, root and generation are those of the name
 *   4096 * ceil(H / 4096)     layer 0, then the others, layer_bytes each, to the end of the file
 *
 * A file is written under the same name with ".tmp" behind it and renamed, so that a name stands
 * for a whole file; a generation is never used twice, so that a name stands for one content. Not
 * synced: what a crash of the host leaves incomplete fails its checks and is removed.
 *
 * Errors are result codes: BT_E_CORRUPT for what a file holds or is, BT_E_NOT_FOUND, BT_E_EXHAUSTED
 * for a full disk, BT_E_SYS for want of descriptors or memory (not the file's fault), BT_E_IO for
 * the rest. All calls block on the disk; any thread. */
#ifndef KV_TIER_DISK_H
#define KV_TIER_DISK_H

#include "kvstore/tier/blob.h"

#include <sys/types.h>

struct kv_disk; /* whoever opened it owns it */

struct kv_disk_name {
    struct kv_key root, key;
    uint64_t generation;
};

/* The calls that move bytes, to be replaced in tests. */
struct kv_disk_io {
    ssize_t (*pread)(int fd, void *p, size_t n, off_t at);
    ssize_t (*pwrite)(int fd, const void *p, size_t n, off_t at);
};
extern struct kv_disk_io kv_disk_io;

/* Makes the directory if need be and locks it; BT_E_CONFIG with the reason, also when another
 * process has it. */
int kv_disk_open(const char *path, struct kv_disk **ret_disk, struct bt_err *err) BT_MUST_USE;
void kv_disk_close(struct kv_disk *d); /* NULL is fine */

uint64_t kv_disk_file_bytes(const struct kv_blob_meta *m);
/* Writes a whole blob; `layers` [n_layers] are its bytes, the generation is m's. */
int kv_disk_write(struct kv_disk *d, const struct kv_blob_meta *m, void *const *layers) BT_MUST_USE;
/* Removes a file; missing is fine. */
void kv_disk_remove(struct kv_disk *d, const struct kv_disk_name *name);
/* Opens for reading; the caller closes *ret_fd. */
int kv_disk_open_file(struct kv_disk *d, const struct kv_disk_name *name, int *ret_fd) BT_MUST_USE;
/* Marks an open file as used now, for the next scan. */
void kv_disk_used(int fd);
/* Reads a layer; not checked against its sum. */
int kv_disk_read_layer(int fd, const struct kv_blob_meta *m, uint32_t layer, void *to) BT_MUST_USE;

/* All files, most recently used first. Files that are not what their name says are removed and
 * counted; so are those that `found` refuses. `stop` is asked between files. `listed` is called
 * once all names are known and what interrupted writes left is gone: nothing may be written before,
 * and what is written after, under generations above the largest one seen, is none of the scan's.
 */
struct kv_disk_scan {
    void (*listed)(void *arg, uint64_t max_generation);     /* 0: no file */
    bool (*found)(void *arg, const struct kv_blob_meta *m); /* false: remove the file */
    bool (*stop)(void *arg);
    void *arg;
    uint64_t n_bad; /* counted up */
};
void kv_disk_scan(struct kv_disk *d, struct kv_disk_scan *scan);

#endif
