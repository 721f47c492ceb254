/* Files in the directory of the disk tier as an earlier process, or anybody, has left them: those
 * that are not what their name says are removed, the others are found and can be read. First byte:
 * even = the file is made whole (size and sum are set right), odd = it stays as it is; second byte
 * odd = its name has another key. */
#include "kvstore/tier/disk.h"

#include "common/obs/log.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

static char dir[64]; /* of this process */
static uint32_t n_found;

static void must(bool ok)
{
    if (!ok) {
        abort();
    }
}

static void remove_dir(void)
{
    rmdir(dir);
}

static void hex(char *to, const uint8_t *p, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        snprintf(to + 2 * i, 3, "%02x", p[i]);
    }
}

/* The file of a head: its name is what the head says. */
static void put(const uint8_t *p, size_t n, bool other_key, char path[300])
{
    char root[33], key[33];
    uint64_t generation;
    int fd;

    memcpy(&generation, p + 32, 8);
    hex(key, p + 48, 16);
    hex(root, p + 80, 16);
    key[0] = other_key ? (key[0] == '0' ? '1' : '0') : key[0];
    snprintf(path, 300, "%s/%s", dir, root);
    must(mkdir(path, 0700) == 0);
    snprintf(path, 300, "%s/%s/%s.%016llx.kv", dir, root, key, (unsigned long long)generation);
    fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    must(fd >= 0 && write(fd, p, n) == (ssize_t)n);
    close(fd);
}

/* The sum of the head, and zeros up to the size that it asks for, if that is small. */
static void make_whole(uint8_t *p, size_t n, size_t *ret_bytes)
{
    uint32_t head, layers;
    uint64_t layer_bytes, sum;

    memcpy(&head, p + 8, 4);
    memcpy(&layers, p + 12, 4);
    memcpy(&layer_bytes, p + 24, 8);
    if (head >= KV_BLOB_HEAD_FIXED + 8 && head <= n) {
        sum = kv_blob_sum(p, head - 8);
        memcpy(p + head - 8, &sum, 8);
        if (layers <= 8 && layer_bytes <= 4096) {
            *ret_bytes = BT_DIV_UP(head, 4096u) * 4096u + layers * layer_bytes;
        }
    }
}

static bool found(void *arg, const struct kv_blob_meta *m)
{
    struct kv_disk *d = arg;
    struct kv_disk_name name = {m->root, m->key, m->generation};
    char *layer;
    int fd;

    n_found++;
    must(kv_blob_shape_ok(&m->shape) && m->n_tokens >= 1);
    must(kv_disk_open_file(d, &name, &fd) == BT_OK);
    if (m->shape.layer_bytes <= 1 << 20) {
        layer = malloc(m->shape.layer_bytes);
        for (uint32_t i = 0; i < m->shape.n_layers; i++) {
            must(kv_disk_read_layer(fd, m, i, layer) == BT_OK);
        }
        free(layer);
    }
    close(fd);
    return true;
}

static void listed(void *arg, uint64_t max_generation)
{
}

static bool never(void *arg)
{
    return false;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    static uint8_t p[65536];
    size_t bytes = n > 2 ? n - 2 : 0;
    struct kv_disk_scan scan = {.listed = listed, .found = found, .stop = never};
    struct kv_disk *d;
    char path[300];

    bt_log_threshold = -1;
    if (bytes < KV_BLOB_HEAD_FIXED || bytes > 8192) {
        return 0;
    }
    if (!dir[0]) {
        snprintf(dir, sizeof(dir), "%s/fuzz-tier-XXXXXX",
                 access("/dev/shm", W_OK) == 0 ? "/dev/shm" : "/tmp");
        must(mkdtemp(dir) && atexit(remove_dir) == 0);
    }
    memset(p, 0, sizeof(p));
    memcpy(p, data + 2, bytes);
    if (data[0] % 2 == 0) {
        make_whole(p, bytes, &bytes);
    }
    put(p, bytes, data[1] % 2, path);
    must(kv_disk_open(dir, &d, NULL) == BT_OK);
    n_found = 0;
    scan.arg = d;
    kv_disk_scan(d, &scan);
    must((access(path, F_OK) == 0) == (n_found == 1) && scan.n_bad == 1 - n_found);
    must(n_found == 0 || data[1] % 2 == 0);
    kv_disk_close(d);
    unlink(path);
    *strrchr(path, '/') = '\0';
    rmdir(path);
    return 0;
}
