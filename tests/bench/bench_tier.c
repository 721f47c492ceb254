/* Rates of the tiers beside what the machine can do with the same sizes in the same run: blocks
 * offered to host memory and loaded from it beside memcpy, blocks loaded from disk beside pread,
 * with the files in the page cache and without. One thread of the tiers, one thread beside it.
 * Prints GB/s; with --json one object a line. The directory is --dir PATH, else a new one in
 * TMPDIR. */
#include "common/base/buf.h"
#include "common/obs/log.h"
#include "common/thr/time.h"
#include "kvstore/tier/disk.h"
#include "kvstore/tier/tiers.h"

#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <sys/stat.h>
#include <unistd.h>

#define BLOCK       128
#define PAGE        16
#define BLOCK_PAGES (BLOCK / PAGE)
#define ROUNDS      5
#define OPEN_MAX    32

struct shape {
    const char *name;
    int n_layers, n_kv_heads, head_dim;
    uint32_t n_blocks;
};

struct bench {
    const struct shape *shape;
    struct kv_pool *pool;
    struct kv_tiers *tiers;
    struct kv_source *src;
    struct kv_hasher *hasher;
    struct kv_tiers_conf conf;
    struct kv_blob_shape blob;
    struct kv_key *keys;
    int32_t *ids;
    struct kv_chain chain;
    uint32_t *pages;
    int event;
    bool json;
    char dir[200];
};

static void must(bool good, const char *what)
{
    if (!good) {
        fprintf(stderr, "bench_tier: %s\n", what);
        exit(1);
    }
}

static void wait_for(struct bench *b, uint64_t n)
{
    uint64_t got;

    while (n > 0) {
        must(read(b->event, &got, sizeof(got)) == sizeof(got), "eventfd");
        n -= got;
    }
}

static void tell(struct bench *b)
{
    uint64_t one = 1;

    must(write(b->event, &one, sizeof(one)) == sizeof(one), "eventfd");
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;

    return (x > y) - (x < y);
}

static void report(struct bench *b, const char *what, const char *beside, double *ns, double *base)
{
    double bytes = (double)b->shape->n_blocks * (double)kv_blob_bytes(&b->blob), v, c;

    qsort(ns, ROUNDS, sizeof(*ns), by_value);
    qsort(base, ROUNDS, sizeof(*base), by_value);
    v = bytes / ns[ROUNDS / 2];
    c = bytes / base[ROUNDS / 2];
    printf(b->json
               ? "{\"bench\":\"tier\",\"case\":\"%s-%s\",\"gb_per_s\":%.2f,\"%s_gb_per_s\":%.2f,"
                 "\"ratio\":%.2f}\n"
               : "%-6s %-10s %6.2f GB/s   %s %6.2f GB/s   %.2fx\n",
           b->shape->name, what, v, b->json ? beside : beside, c, v / c);
}

/* ---- what is measured ---- */

static void offered(void *arg, int rc)
{
    must(rc == BT_OK, "an offer failed");
    tell(arg);
}

static double put_all(struct bench *b)
{
    uint64_t start = bt_now_ns();
    uint32_t open = 0;

    for (uint32_t i = 0; i < b->shape->n_blocks; i++) {
        struct kv_offer o = {.chain = b->chain,
                             .n_tokens = BLOCK,
                             .pages = b->pages + (size_t)i * BLOCK_PAGES,
                             .pool = b->pool,
                             .done = offered,
                             .arg = b};

        o.chain.n_blocks = i + 1;
        must(b->src->ops->offer(b->src, &o), "an offer was refused");
        if (++open == OPEN_MAX) {
            wait_for(b, 1);
            open--;
        }
    }
    while (open > 0) {
        wait_for(b, 1);
        open--;
    }
    return (double)(bt_now_ns() - start);
}

static void found(struct kv_find *f)
{
    (void)f;
}

static void loaded(struct kv_load *l)
{
    tell(l->arg);
}

static double get_all(struct bench *b, enum kv_tier from)
{
    struct kv_find f = {.chain = b->chain, .n_tokens = BLOCK, .done = found};
    struct kv_load l = {.find = &f, .pool = b->pool, .pages = b->pages, .done = loaded, .arg = b};
    uint64_t start = bt_now_ns();

    b->src->ops->find(b->src, &f);
    must(f.n == b->shape->n_blocks && f.n_tier[from] == f.n, "a block is not where it should be");
    l.n_blocks = f.n;
    b->src->ops->load(b->src, &l);
    wait_for(b, 1);
    must(l.n_good == f.n, "a block was damaged");
    start = bt_now_ns() - start;
    b->src->ops->end(b->src, &f);
    return (double)start;
}

/* The same number of copies of a layer each, between two ranges of that size. */
static double copy_all(struct bench *b, char *to, const char *from)
{
    size_t n = b->blob.layer_bytes;
    uint64_t start = bt_now_ns();

    for (size_t i = 0; i < (size_t)b->shape->n_blocks * b->blob.n_layers; i++) {
        memcpy(to + i * n, from + i * n, n);
    }
    return (double)(bt_now_ns() - start);
}

/* ---- files ---- */

/* Calls fn for all files of the tier with one thread; returns how long. */
static double each_file(struct bench *b, void (*fn)(struct bench *b, int fd, char *to), char *to)
{
    DIR *d = opendir(b->dir), *sub;
    struct dirent *e, *k;
    uint64_t start = bt_now_ns();

    while ((e = readdir(d))) {
        int at = openat(dirfd(d), e->d_name, O_RDONLY | O_DIRECTORY);

        if (at < 0 || e->d_name[0] == '.' || !(sub = fdopendir(at))) {
            if (at >= 0) {
                close(at);
            }
            continue;
        }
        while ((k = readdir(sub))) {
            int fd = openat(at, k->d_name, O_RDONLY);

            if (fd >= 0 && k->d_name[0] != '.') {
                fn(b, fd, to);
                to += kv_blob_bytes(&b->blob);
            }
            if (fd >= 0) {
                close(fd);
            }
        }
        closedir(sub);
    }
    closedir(d);
    return (double)(bt_now_ns() - start);
}

static void read_file(struct bench *b, int fd, char *to)
{
    size_t n = b->blob.layer_bytes;

    for (uint32_t l = 0; l < b->blob.n_layers; l++) {
        must(pread(fd, to + l * n, n, (off_t)(4096 + l * n)) == (ssize_t)n, "pread");
    }
}

static void drop_file(struct bench *b, int fd, char *to)
{
    (void)b;
    (void)to;
    fsync(fd);
    posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
}

static void remove_dir(const char *dir)
{
    DIR *d = opendir(dir);
    struct dirent *e;

    while (d && (e = readdir(d))) {
        char path[600];

        if (strcmp(e->d_name, ".") == 0 || strcmp(e->d_name, "..") == 0) {
            continue;
        }
        snprintf(path, sizeof(path), "%s/%s", dir, e->d_name);
        if (unlink(path) != 0) {
            remove_dir(path);
        }
    }
    if (d) {
        closedir(d);
    }
    rmdir(dir);
}

/* ---- */

static void start(struct bench *b)
{
    struct kv_tiers_cfg cfg = {.conf = &b->conf, .shape = b->blob};
    struct bt_err err = {0};

    if (kv_tiers_create(&cfg, &b->tiers, &err) != BT_OK) {
        must(false, err.msg);
    }
    b->src = kv_tiers_source(b->tiers);
    while (!kv_tiers_stats(b->tiers).scanned) {
        usleep(1000);
    }
}

static void stop(struct bench *b)
{
    kv_tiers_destroy(b->tiers);
    b->tiers = NULL;
}

static void other_keys(struct bench *b)
{
    b->chain.root.b[0]++;
    kv_key_chain(b->hasher, &b->chain.root,
                 &(struct kv_key_tokens){b->ids, (size_t)b->shape->n_blocks * BLOCK, BLOCK},
                 b->keys);
}

static void setup(struct bench *b)
{
    const struct shape *s = b->shape;
    struct kv_layout l = {.n_layers = s->n_layers,
                          .n_kv_heads = s->n_kv_heads,
                          .head_dim = s->head_dim,
                          .page_tokens = PAGE,
                          .dtype = KV_DTYPE_F16,
                          .n_pages = s->n_blocks * BLOCK_PAGES};
    struct bt_err err = {0};

    must(kv_layout_init(&l, &err) == BT_OK, "layout");
    must(kv_pool_create(&l, &bt_mem_host, "bench", &b->pool, &err) == BT_OK, err.msg);
    memset(kv_pool_region(b->pool)->base, 1, l.bytes);
    b->blob = kv_blob_shape_of(&l, BLOCK);
    b->pages = bt_calloc(l.n_pages, sizeof(*b->pages));
    b->ids = bt_calloc((size_t)s->n_blocks * BLOCK, sizeof(*b->ids));
    b->keys = bt_calloc(s->n_blocks, sizeof(*b->keys));
    must(b->pages && b->ids && b->keys, "memory");
    must(kv_pool_take(b->pool, l.n_pages, KV_OWNER_SEQ, KV_PAGE_NONE, b->pages) == BT_OK, "pages");
    b->chain =
        (struct kv_chain){.root = {{1}}, .keys = b->keys, .ids = b->ids, .n_blocks = s->n_blocks};
    other_keys(b);
    b->conf = (struct kv_tiers_conf){.host_bytes = kv_blob_bytes(&b->blob) * (s->n_blocks + 8),
                                     .threads = 1};
}

static void teardown(struct bench *b)
{
    kv_pool_give(b->pool, b->pages, b->shape->n_blocks * BLOCK_PAGES, KV_OWNER_SEQ);
    kv_pool_destroy(b->pool);
    free(b->pages);
    free(b->ids);
    free(b->keys);
}

static void host_cases(struct bench *b, char *copy)
{
    double put[ROUNDS], get[ROUNDS], base[ROUNDS], again[ROUNDS];
    const char *from = kv_pool_region(b->pool)->base;

    start(b);
    put_all(b); /* touches the memory */
    for (int r = 0; r < ROUNDS; r++) {
        other_keys(b); /* the blocks before make room */
        put[r] = put_all(b);
        get[r] = get_all(b, KV_TIER_HOST);
        base[r] = again[r] = copy_all(b, copy, from);
    }
    stop(b);
    report(b, "host-put", "memcpy", put, base);
    report(b, "host-get", "memcpy", get, again);
}

static void disk_cases(struct bench *b, char *copy)
{
    double warm[ROUNDS], cold[ROUNDS], base[ROUNDS], base_cold[ROUNDS];
    uint64_t t;

    b->conf.disk_path = b->dir;
    b->conf.disk_bytes = UINT64_MAX / 4;
    start(b);
    put_all(b);
    t = bt_now_ns();
    kv_tiers_flush(b->tiers, BT_NEVER_NS);
    must(kv_tiers_stats(b->tiers).disk.n_blocks == b->shape->n_blocks, "not all was written");
    t = bt_now_ns() - t;
    stop(b);
    if (!b->json) {
        printf("%-6s %-10s %6.2f GB/s\n", b->shape->name, "disk-write",
               (double)b->shape->n_blocks * (double)kv_blob_bytes(&b->blob) / (double)t);
    }
    for (int r = 0; r < ROUNDS; r++) {
        each_file(b, drop_file, copy);
        start(b);
        cold[r] = get_all(b, KV_TIER_DISK);
        stop(b);
        each_file(b, drop_file, copy);
        base_cold[r] = each_file(b, read_file, copy);
        start(b);
        warm[r] = get_all(b, KV_TIER_DISK);
        stop(b);
        base[r] = each_file(b, read_file, copy);
    }
    report(b, "disk-get", "pread", warm, base);
    report(b, "disk-cold", "pread", cold, base_cold);
}

int main(int argc, char **argv)
{
    static const struct shape shapes[] = {
        {"small", 24, 2, 64, 256}, /* 64 KiB a layer, 1.5 MiB a block */
        {"large", 32, 8, 128, 24}, /* 512 KiB a layer, 16 MiB a block */
    };
    struct bench b = {.event = eventfd(0, EFD_CLOEXEC | EFD_SEMAPHORE)};
    const char *tmp = getenv("TMPDIR");

    bt_log_threshold = BT_LOG_WARN;
    snprintf(b.dir, sizeof(b.dir), "%s/baton-bench-XXXXXX", tmp ? tmp : "/tmp");
    for (int i = 1; i < argc; i++) {
        b.json |= strcmp(argv[i], "--json") == 0;
        if (strcmp(argv[i], "--dir") == 0 && i + 1 < argc) {
            snprintf(b.dir, sizeof(b.dir), "%s/baton-bench-XXXXXX", argv[++i]);
        }
    }
    must(b.event >= 0 && kv_hasher_create(&b.hasher, NULL) == BT_OK, "setup");
    must(mkdtemp(b.dir) != NULL, "cannot make a directory");
    for (size_t s = 0; s < BT_ARRAY_LEN(shapes); s++) {
        char *copy;

        b.shape = &shapes[s];
        setup(&b);
        copy = malloc(kv_blob_bytes(&b.blob) * b.shape->n_blocks);
        must(copy != NULL, "memory");
        memset(copy, 2, kv_blob_bytes(&b.blob) * b.shape->n_blocks);
        host_cases(&b, copy);
        disk_cases(&b, copy);
        b.conf.disk_path = NULL;
        free(copy);
        teardown(&b);
        remove_dir(b.dir);
        must(mkdir(b.dir, 0700) == 0, "cannot make a directory");
    }
    rmdir(b.dir);
    kv_hasher_destroy(b.hasher);
    close(b.event);
    return 0;
}
