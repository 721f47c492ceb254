/* The disk tier: what sinks, what survives, what goes wrong with files and directories. Real files;
 * a full and a read-only disk are a tmpfs of the test's own where the system lets it mount one. */
#include "tests/unit/kvstore/tier/fixture.h"

#include "kvstore/tier/disk.h"

#include "tests/unit/cmocka.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

static bool can_mount;

static struct kv_tier_stats disk(struct world *w)
{
    return kv_tiers_stats(w->tiers).disk;
}

static void flush(struct world *w)
{
    kv_tiers_flush(w->tiers, bt_deadline_ns(20 * BT_NS_PER_S));
}

static void restart(struct world *w)
{
    world_stop(w);
    world_start(w);
}

struct by_key {
    char hex[33];
    char *path;
    size_t n;
    int found;
};

static void match(void *arg, const char *path)
{
    struct by_key *k = arg;

    if (strstr(path, k->hex)) {
        snprintf(k->path, k->n, "%s", path);
        k->found++;
    }
}

/* The file of a chain's block, by its key; empty if there is none. */
static void file_of(struct world *w, const struct chain *c, uint32_t i, char *path, size_t n)
{
    struct by_key k = {.path = path, .n = n};

    path[0] = 0;
    for (int b = 0; b < 16; b++) {
        snprintf(k.hex + 2 * b, 3, "%02x", c->keys[i].b[b]);
    }
    files_of(w->dir, ".kv", match, &k);
}

/* A world with disk, no memory to speak of: what was flushed is only on disk after a restart. */
static void world_on_disk(struct world *w, struct chain *c, uint32_t n)
{
    world_make(w, 128, 64);
    world_with_disk(w, 200);
    world_start(w);
    chain_make(w, c, 1, n, 1, n);
    assert_int_equal(offer_chain(w, c), n);
    flush(w);
    assert_int_equal(disk(w).n_blocks, n);
    restart(w);
    assert_int_equal(disk(w).n_blocks, n);
    assert_int_equal(kv_tiers_stats(w->tiers).host.n_blocks, 0);
}

/* ---- sinking ---- */

/* All that was evicted and a quarter of what is in memory is on disk. */
static bool is_clean(void *arg)
{
    struct kv_tiers_stats s = kv_tiers_stats(arg);

    return s.host.n_blocks < 12 || s.disk.stored >= s.host.evictions + 3;
}

static void test_sinks_and_comes_back(void **state)
{
    struct world w;
    struct chain c[20];
    struct taken t;

    world_make(&w, 128, 16);
    world_with_disk(&w, 200);
    world_start(&w);
    for (uint32_t i = 0; i < 20; i++) {
        chain_make(&w, &c[i], i, 4, i, 4);
        for (uint32_t k = 0; k < 4; k++) {
            assert_int_equal(offer_block(&w, &c[i], k), BT_OK);
            assert_true(eventually(is_clean, w.tiers)); /* what is near the end is written */
            assert_int_equal(kv_tiers_stats(w.tiers).host.skipped, 0);
        }
    }
    for (uint32_t i = 0; i < 20; i++) {
        take_find(&w, &c[i], 0, &t);
        assert_int_equal(t.find.n, 4);
        assert_int_equal(t.find.n_tier[KV_TIER_HOST] + t.find.n_tier[KV_TIER_DISK], 4);
        take_load(&w, &t);
        assert_int_equal(t.load.n_good, 4);
        assert_true(take_right(&w, &c[i], &t, 4));
        take_end(&w, &t);
    }
    assert_true(disk(&w).hits >= 60);
    assert_int_equal(disk(&w).bad, 0);
    world_free(&w);
}

/* First use from disk leaves it there, the second brings it into memory. */
static void test_second_use_promotes(void **state)
{
    struct world w;
    struct chain c;
    struct taken t;

    world_on_disk(&w, &c, 6);
    take_find(&w, &c, 0, &t);
    assert_int_equal(t.find.n_tier[KV_TIER_DISK], 6);
    assert_int_equal(t.find.n_fast, 0);
    take_load(&w, &t);
    assert_int_equal(t.load.n_good, 6);
    take_end(&w, &t);
    assert_int_equal(kv_tiers_stats(w.tiers).host.n_blocks, 0);
    assert_int_equal(take_chain(&w, &c), 6);
    assert_int_equal(kv_tiers_stats(w.tiers).host.n_blocks, 6);
    take_find(&w, &c, 0, &t);
    assert_int_equal(t.find.n_tier[KV_TIER_HOST], 6);
    assert_int_equal(t.find.n_fast, 6);
    take_end(&w, &t);
    assert_int_equal(take_chain(&w, &c), 6);
    world_free(&w);
}

static void brought(struct kv_bring *b, int rc)
{
    atomic_store((atomic_int *)b->arg, rc);
}

static bool bring_over(void *arg)
{
    return atomic_load((atomic_int *)arg) != BT_PENDING;
}

/* Many threads work on one load, from both tiers; a damaged file among them. */
static void test_shared_load(void **state)
{
    struct world w;
    struct chain c;
    struct taken t;
    char path[512];

    world_make(&w, 256, 64);
    world_with_disk(&w, 200);
    w.conf.threads = 6;
    w.share_bytes = 1;
    world_start(&w);
    chain_make(&w, &c, 1, 40, 1, 40);
    assert_int_equal(offer_chain(&w, &c), 40);
    flush(&w);
    restart(&w);
    chain_make(&w, &c, 1, 20, 1, 20);
    for (int round = 0; round < 30; round++) {
        assert_int_equal(take_chain(&w, &c), 20); /* promotes half of them */
    }
    chain_make(&w, &c, 1, 40, 1, 40);
    take_find(&w, &c, 0, &t);
    assert_int_equal(t.find.n_tier[KV_TIER_HOST], 20);
    assert_int_equal(t.find.n_tier[KV_TIER_DISK], 20);
    take_load(&w, &t);
    assert_int_equal(t.load.n_good, 40);
    assert_int_equal(t.load.layers_ready, N_LAYERS);
    assert_true(t.n_progress >= 1 && t.n_progress <= N_LAYERS);
    assert_true(take_right(&w, &c, &t, 40));
    take_end(&w, &t);
    file_of(&w, &c, 30, path, sizeof(path));
    assert_int_equal(truncate(path, 4096), 0);
    assert_int_equal(take_chain(&w, &c), 30);
    assert_int_equal(disk(&w).bad, 1);
    world_free(&w);
}

static void test_bring(void **state)
{
    struct world w;
    struct chain c;
    struct kv_run run;
    struct kv_blob *b[3];
    atomic_int rc = BT_PENDING;
    struct kv_bring bring = {.done = brought, .arg = &rc};
    char path[512];

    world_on_disk(&w, &c, 3);
    run = kv_run_of(&c.c, 0, BLOCK, 0);
    assert_int_equal(kv_tiers_pin(w.tiers, &run, b), 3);
    assert_int_equal(kv_blob_tier(w.tiers, b[0]), KV_TIER_DISK);
    assert_null(kv_blob_layer(w.tiers, b[0], 0));
    bring.blob = b[0];
    kv_tiers_bring(w.tiers, &bring);
    assert_true(eventually(bring_over, &rc));
    assert_int_equal(rc, BT_OK);
    assert_int_equal(kv_blob_tier(w.tiers, b[0]), KV_TIER_HOST);
    assert_int_equal(kv_blob_sum(kv_blob_layer(w.tiers, b[0], 1), 2 * PAGE_BYTES),
                     kv_blob_meta(b[0])->sums[1]);
    file_of(&w, &c, 2, path, sizeof(path));
    assert_int_equal(truncate(path, 5000), 0);
    atomic_store(&rc, BT_PENDING);
    bring.blob = b[2];
    kv_tiers_bring(w.tiers, &bring);
    assert_true(eventually(bring_over, &rc));
    assert_int_equal(rc, BT_E_CORRUPT);
    kv_tiers_unpin(w.tiers, b, 3);
    assert_int_equal(kv_tiers_peek(w.tiers, &run, NULL), 2);
    world_free(&w);
}

static void test_space_is_bounded(void **state)
{
    struct world w;
    struct chain c;
    uint64_t limit;

    world_make(&w, 128, 64);
    world_with_disk(&w, 12);
    world_start(&w);
    limit = w.conf.disk_bytes;
    for (uint32_t i = 0; i < 12; i++) {
        chain_make(&w, &c, 1, 1, i, 4); /* the head is shared */
        offer_chain(&w, &c);
        flush(&w);
        assert_true(disk(&w).bytes <= limit);
        assert_true(files_of(w.dir, NULL, NULL, NULL) <= 12);
    }
    assert_true(disk(&w).evictions > 0);
    restart(&w);
    assert_int_equal(disk(&w).n_blocks, 12);
    assert_int_equal(take_chain(&w, &c), 4); /* last in, and its head */
    w.conf.disk_bytes = limit / 2;           /* less room than there is content */
    restart(&w);
    assert_true(disk(&w).bytes <= limit / 2);
    assert_int_equal(files_of(w.dir, NULL, NULL, NULL), (int)disk(&w).n_blocks);
    world_free(&w);
}

/* A blob that takes the room of many, and one that finds all of it pinned. */
static void test_large_among_small(void **state)
{
    struct kv_blob_shape small = {1, BLOCK, 3000}, large = {2, BLOCK, 400000};
    struct kv_blob *b, *pinned[MAX_CHAIN];
    uint64_t sums[2] = {0}, prefix = 0;
    struct kv_blob_meta m;
    struct kv_run run;
    struct world w;
    struct chain c;

    world_make(&w, 8, 1);
    world_with_disk(&w, 1);
    w.conf.host_bytes = 8 << 20;
    w.conf.disk_bytes = 150 * (4096 + 3000);
    w.no_source = true;
    world_start(&w);
    for (uint32_t i = 0; i <= 150; i++) {
        chain_make(&w, &c, i, 1, i, 1);
        run = kv_run_of(&c.c, 0, BLOCK, 0);
        prefix = 0;
        kv_run_at(&run, 0, &prefix, &m);
        m.shape = i < 150 ? small : large;
        assert_int_equal(kv_tiers_reserve(w.tiers, &m, &b), BT_OK);
        kv_tiers_commit(w.tiers, b, sums);
        kv_tiers_unpin(w.tiers, &b, 1);
        flush(&w);
        assert_true(disk(&w).bytes <= w.conf.disk_bytes);
    }
    assert_true(disk(&w).evictions > 100);
    assert_int_equal(kv_tiers_pin(w.tiers, &run, pinned), 1); /* the large one fills it nearly */
    chain_make(&w, &c, 999, 1, 999, 1);
    run = kv_run_of(&c.c, 0, BLOCK, 0);
    prefix = 0;
    kv_run_at(&run, 0, &prefix, &m);
    m.shape = large;
    assert_int_equal(kv_tiers_reserve(w.tiers, &m, &b), BT_OK);
    kv_tiers_commit(w.tiers, b, sums);
    kv_tiers_unpin(w.tiers, &b, 1);
    kv_tiers_flush(w.tiers, bt_deadline_ns(BT_NS_PER_S / 4));
    assert_true(disk(&w).bytes <= w.conf.disk_bytes);
    kv_tiers_unpin(w.tiers, pinned, 1);
    flush(&w);
    run = kv_run_of(&c.c, 0, BLOCK, 0);
    assert_true(disk(&w).bytes <= w.conf.disk_bytes);
    assert_int_equal(disk(&w).evictions, 150 + 1);
    world_free(&w);
}

/* Writing follows its rate; under pressure what was used again comes first. */
static void test_rate_and_pressure(void **state)
{
    struct world w;
    struct chain hot, c;
    uint64_t start, ns, bytes, hits;

    world_make(&w, 128, 40);
    world_with_disk(&w, 1000);
    w.conf.disk_write_rate = 50 * (4096 + BLOB_BYTES); /* 50 blobs a second */
    world_start(&w);
    start = bt_now_ns();
    chain_make(&w, &hot, 7, 8, 7, 8);
    offer_chain(&w, &hot);
    assert_int_equal(take_chain(&w, &hot), 8);
    for (uint32_t i = 0; i < 300; i++) {
        chain_make(&w, &c, 100 + i, 4, 100 + i, 4);
        offer_chain(&w, &c);
        if (i < 80) { /* used now and then at first, later no more */
            assert_int_equal(take_chain(&w, &hot), 8);
            usleep(10000);
        }
    }
    bytes = disk(&w).written_bytes;
    ns = bt_now_ns() - start;
    assert_true((double)bytes <=
                (double)ns / 1e9 * (double)w.conf.disk_write_rate + 2.0 * (4096 + BLOB_BYTES));
    assert_true(kv_tiers_stats(w.tiers).host.skipped > 100); /* given up unwritten */
    hits = disk(&w).hits;
    assert_int_equal(take_chain(&w, &hot), 8); /* what was used again was not */
    assert_int_equal(disk(&w).hits, hits + 8);
    world_free(&w);
}

/* ---- surviving ---- */

struct log {
    pthread_mutex_t lock;
    int disk_stored;
};

static void record(void *arg, const struct kv_tiers_event *ev, size_t n)
{
    struct log *l = arg;

    pthread_mutex_lock(&l->lock);
    for (size_t i = 0; i < n; i++) {
        l->disk_stored += ev[i].kind == KV_TIERS_STORED && ev[i].tier == KV_TIER_DISK &&
                          ev[i].best == KV_TIER_DISK;
    }
    pthread_mutex_unlock(&l->lock);
}

static void test_TIER_05_restart_tells_again(void **state)
{
    struct log log = {.lock = PTHREAD_MUTEX_INITIALIZER};
    struct world w;
    struct chain c;

    world_on_disk(&w, &c, 30);
    world_stop(&w);
    w.events = record;
    w.arg = &log;
    world_start(&w);
    assert_int_equal(take_chain(&w, &c), 30);
    world_stop(&w);
    assert_int_equal(log.disk_stored, 30);
    world_free(&w);
}

/* Blocks that sink while a large directory is still being read in are not taken for old files. */
static void test_TIER_05_writes_beside_the_scan(void **state)
{
    struct world w;
    struct chain c[12];

    world_make(&w, 128, 8);
    world_with_disk(&w, 200);
    world_start(&w);
    world_stop(&w);
    for (int i = 0; i < 20000; i++) {
        char path[128];

        snprintf(path, sizeof(path), "%s/%08x%024x", w.dir, (unsigned)i * 2654435761u, i);
        assert_int_equal(mkdir(path, 0700), 0);
    }
    world_begin(&w);
    for (uint32_t i = 0; i < BT_ARRAY_LEN(c); i++) {
        chain_make(&w, &c[i], i, 2, i, 2);
        offer_chain(&w, &c[i]);
        flush(&w);
    }
    world_scanned(&w);
    assert_int_equal(disk(&w).n_blocks, 2 * BT_ARRAY_LEN(c));
    restart(&w);
    for (uint32_t i = 0; i < BT_ARRAY_LEN(c); i++) {
        assert_int_equal(take_chain(&w, &c[i]), 2);
    }
    assert_int_equal(disk(&w).bad + disk(&w).write_errors, 0);
    world_free(&w);
}

static void test_one_process_a_directory(void **state)
{
    struct world w, other;
    struct kv_tiers *t = NULL;
    struct bt_err err = {0};
    struct kv_tiers_cfg cfg;
    int status;
    pid_t pid;

    world_make(&w, 16, 8);
    world_make(&other, 16, 8);
    world_with_disk(&w, 10);
    world_start(&w);
    cfg = (struct kv_tiers_cfg){.conf = &w.conf};
    assert_int_equal(kv_tiers_create(&cfg, &t, &err), BT_E_CONFIG);
    assert_non_null(strstr(err.msg, "another process"));
    assert_non_null(strstr(err.msg, w.dir));
    pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        _exit(kv_tiers_create(&cfg, &t, NULL) == BT_E_CONFIG ? 0 : 1);
    }
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_int_equal(status, 0);
    world_free(&other);
    world_free(&w);
}

static void test_config_errors(void **state)
{
    struct kv_tiers_conf conf = {.host_bytes = 1 << 20, .disk_bytes = 1 << 20};
    struct kv_tiers_cfg cfg = {.conf = &conf};
    struct kv_tiers *t = NULL;
    struct bt_err err = {0};

    conf.disk_path = (char *)(uintptr_t) "/dev/null";
    assert_int_equal(kv_tiers_create(&cfg, &t, &err), BT_E_CONFIG);
    assert_non_null(strstr(err.msg, "/dev/null"));
    conf.disk_path = (char *)(uintptr_t) "/nowhere/at/all";
    assert_int_equal(kv_tiers_create(&cfg, &t, &err), BT_E_CONFIG);
    conf.disk_path = NULL;
    cfg.shape = (struct kv_blob_shape){64, BLOCK, 1 << 20};
    assert_int_equal(kv_tiers_create(&cfg, &t, &err), BT_E_CONFIG);
    conf.host_bytes = 0;
    assert_int_equal(kv_tiers_create(&cfg, &t, &err), BT_E_CONFIG);
}

static void test_options_that_contradict(void **state)
{
    static const struct {
        struct kv_tiers_conf conf;
        const char *says[2];
    } cases[] = {
        {{.host_bytes = 0, .disk_path = (char *)(uintptr_t) "/x", .disk_bytes = 1 << 20},
         {"tier.disk_path = /x", "tier.host_bytes = 0"}},
        {{.host_bytes = 1 << 20, .disk_path = (char *)(uintptr_t) "/x"},
         {"tier.disk_path = /x", "tier.disk_bytes = 0"}},
        {{.host_bytes = UINT64_C(1) << 60}, {"tier.host_bytes = 1152921504606846976", "memory"}},
    };
    struct kv_tiers_conf good = {.host_bytes = 0, .disk_path = (char *)(uintptr_t) ""};
    struct kv_tiers_conf small = {
        .host_bytes = 1 << 20, .disk_path = (char *)(uintptr_t) "/x", .disk_bytes = 1000};
    struct kv_tiers_cfg cfg = {.conf = &small, .shape = {1, BLOCK, 4096}};
    struct kv_tiers *t;
    struct bt_err err = {0};

    for (size_t i = 0; i < BT_ARRAY_LEN(cases); i++) {
        assert_int_equal(kv_tiers_conf_check(&cases[i].conf, &err), BT_E_CONFIG);
        assert_non_null(strstr(err.msg, cases[i].says[0]));
        assert_non_null(strstr(err.msg, cases[i].says[1]));
    }
    assert_int_equal(kv_tiers_conf_check(&good, &err), BT_OK);
    assert_int_equal(kv_tiers_create(&cfg, &t, &err), BT_E_CONFIG);
    assert_non_null(strstr(err.msg, "tier.disk_bytes is 1000"));
    assert_non_null(strstr(err.msg, "4096"));
}

/* Killed while it writes: what is there afterwards is whole, and nothing else is left. */
static void test_TIER_01_killed_while_writing(void **state)
{
    struct world w;
    struct chain c;
    uint64_t n = 0;

    world_make(&w, 128, 24);
    world_with_disk(&w, 400);
    for (int round = 0; round < 12; round++) {
        pid_t pid = fork();

        assert_true(pid >= 0);
        if (pid == 0) {
            world_start(&w);
            for (uint32_t i = 0;; i++) {
                chain_make(&w, &c, i % 50, 4, i % 50, 4);
                offer_chain(&w, &c);
            }
        }
        usleep(20000 + (useconds_t)round * 3000);
        kill(pid, SIGKILL);
        assert_int_equal(waitpid(pid, NULL, 0), pid);
    }
    world_start(&w);
    assert_int_equal(files_of(w.dir, ".tmp", NULL, NULL), 0);
    assert_int_equal(disk(&w).bad, 0);
    for (uint32_t i = 0; i < 50; i++) {
        chain_make(&w, &c, i, 4, i, 4);
        n += take_chain(&w, &c); /* checks the bytes */
    }
    assert_true(n > 0);
    assert_int_equal(disk(&w).bad, 0);
    world_free(&w);
}

/* ---- damage ---- */

static void flip(const char *path)
{
    int fd = open(path, O_RDWR);
    char byte;

    assert_int_equal(pread(fd, &byte, 1, 4096 + 700), 1);
    byte ^= 4;
    assert_int_equal(pwrite(fd, &byte, 1, 4096 + 700), 1);
    close(fd);
}

static void flip_head(const char *path)
{
    int fd = open(path, O_RDWR);
    char byte = 0x55;

    assert_int_equal(pwrite(fd, &byte, 1, 120), 1); /* a token id */
    close(fd);
}

static void cut_to_0(const char *path)
{
    assert_int_equal(truncate(path, 0), 0);
}

static void cut_to_half(const char *path)
{
    assert_int_equal(truncate(path, (4096 + BLOB_BYTES) / 2), 0);
}

static void cut_in_data(const char *path)
{
    assert_int_equal(truncate(path, 4096 + BLOB_BYTES - 1), 0);
}

static void gone(const char *path)
{
    assert_int_equal(unlink(path), 0);
}

static void a_directory(const char *path)
{
    assert_int_equal(unlink(path), 0);
    assert_int_equal(mkdir(path, 0700), 0);
}

static void a_link(const char *path)
{
    assert_int_equal(unlink(path), 0);
    assert_int_equal(symlink("/dev/zero", path), 0);
}

static void (*const damages[])(const char *path) = {
    flip, cut_to_0, cut_to_half, cut_in_data, gone, a_directory, a_link,
};

/* Damaged between look-up and load, and before the look-up: the run ends before it, its file goes,
 * it is counted, and the block can be kept again. */
static void test_TIER_01_damaged_files(void **state)
{
    for (size_t k = 0; k < BT_ARRAY_LEN(damages); k++) {
        struct world w;
        struct chain c;
        struct taken t;
        char path[512];

        world_on_disk(&w, &c, 6);
        take_find(&w, &c, 0, &t);
        assert_int_equal(t.find.n, 6);
        file_of(&w, &c, 3, path, sizeof(path));
        damages[k](path);
        take_load(&w, &t);
        assert_int_equal(t.load.n_good, 3);
        assert_true(take_right(&w, &c, &t, 3));
        take_end(&w, &t);
        assert_int_equal(disk(&w).bad, 1);
        assert_int_equal(disk(&w).n_blocks, 5);
        assert_int_equal(take_chain(&w, &c), 3);
        file_of(&w, &c, 3, path, sizeof(path));
        assert_true(path[0] == 0 || damages[k] == a_directory); /* not ours to remove */
        assert_int_equal(offer_block(&w, &c, 3), BT_OK);
        flush(&w);
        assert_int_equal(take_chain(&w, &c), 6);
        world_free(&w);
    }
}

/* The same while nobody runs: read in at the start. */
static void test_TIER_01_damaged_before_the_start(void **state)
{
    void (*const all[])(const char *path) = {flip_head, cut_to_0, cut_to_half, cut_in_data};
    struct world w;
    struct chain c;
    char path[512];

    world_on_disk(&w, &c, 8);
    world_stop(&w);
    for (uint32_t k = 0; k < BT_ARRAY_LEN(all); k++) {
        file_of(&w, &c, 4 + k, path, sizeof(path));
        all[k](path);
    }
    snprintf(path, sizeof(path), "%s/stranger", w.dir); /* not ours: left alone */
    assert_int_equal(mkdir(path, 0700), 0);
    world_start(&w);
    assert_int_equal(disk(&w).n_blocks, 4);
    assert_int_equal(disk(&w).bad, 4);
    assert_int_equal(files_of(w.dir, ".kv", NULL, NULL), 4);
    assert_int_equal(take_chain(&w, &c), 4);
    assert_int_equal(access(path, F_OK), 0);
    world_free(&w);
}

/* Under a block's name lies something that is no file: nobody waits for its other end. */
static void test_TIER_01_pipes_and_links(void **state)
{
    struct world w;
    struct chain c;
    char path[3][512];
    struct stat st;

    world_on_disk(&w, &c, 8);
    for (uint32_t i = 0; i < 3; i++) {
        file_of(&w, &c, 4 + i, path[i], sizeof(path[i]));
        assert_int_equal(unlink(path[i]), 0);
    }
    assert_int_equal(mkfifo(path[0], 0600), 0);
    assert_int_equal(symlink("/dev/zero", path[1]), 0);
    assert_int_equal(take_chain(&w, &c), 4); /* while it runs */
    world_stop(&w);
    unlink(path[0]);
    unlink(path[1]);
    assert_int_equal(mkfifo(path[0], 0600), 0);
    assert_int_equal(symlink("/dev/zero", path[1]), 0);
    world_start(&w);
    assert_int_equal(disk(&w).n_blocks, 5);
    assert_int_equal(take_chain(&w, &c), 4);
    assert_int_not_equal(lstat(path[0], &st), 0);
    assert_int_not_equal(lstat(path[1], &st), 0);
    world_free(&w);
}

/* Files of another layout under the same root: not this node's. */
static void test_TIER_01_other_layout(void **state)
{
    struct kv_blob_shape shape = {N_LAYERS, BLOCK, 4 * PAGE_BYTES};
    uint64_t sums[N_LAYERS];
    struct world w;
    struct chain c;
    struct kv_run run;
    struct kv_blob_meta m;
    struct kv_blob *b;
    uint64_t prefix = 0;

    world_make(&w, 64, 64);
    world_with_disk(&w, 100);
    w.no_source = true;
    world_start(&w);
    chain_make(&w, &c, 1, 1, 1, 1);
    run = kv_run_of(&c.c, 0, BLOCK, 0);
    kv_run_at(&run, 0, &prefix, &m);
    m.shape = shape;
    assert_int_equal(kv_tiers_reserve(w.tiers, &m, &b), BT_OK);
    for (uint32_t l = 0; l < N_LAYERS; l++) {
        memset(kv_blob_layer(w.tiers, b, l), 1, shape.layer_bytes);
        sums[l] = kv_blob_sum(kv_blob_layer(w.tiers, b, l), shape.layer_bytes);
    }
    kv_tiers_commit(w.tiers, b, sums);
    kv_tiers_unpin(w.tiers, &b, 1);
    flush(&w);
    assert_int_equal(disk(&w).n_blocks, 1);
    w.no_source = false;
    restart(&w);
    assert_int_equal(disk(&w).n_blocks, 0);
    assert_int_equal(disk(&w).bad, 1);
    assert_int_equal(files_of(w.dir, ".kv", NULL, NULL), 0);
    assert_int_equal(take_chain(&w, &c), 0);
    world_free(&w);
}

static atomic_int n_broken;

static ssize_t broken_pread(int fd, void *p, size_t n, off_t at)
{
    if (at >= 4096 && atomic_fetch_add(&n_broken, 1) == 8) {
        errno = EIO;
        return -1;
    }
    return pread(fd, p, n < 100 ? n : n / 2, at); /* and short reads */
}

static ssize_t broken_pwrite(int fd, const void *p, size_t n, off_t at)
{
    if (atomic_fetch_add(&n_broken, 1) % 3 == 2) {
        errno = EIO;
        return -1;
    }
    return pwrite(fd, p, n < 100 ? n : n / 2, at);
}

static void test_TIER_01_input_output_error(void **state)
{
    struct kv_disk_io real = kv_disk_io;
    struct world w;
    struct chain c;
    struct taken t;

    world_on_disk(&w, &c, 6);
    take_find(&w, &c, 0, &t);
    atomic_store(&n_broken, 0);
    kv_disk_io.pread = broken_pread;
    take_load(&w, &t);
    kv_disk_io.pread = real.pread;
    assert_true(t.load.n_good < 6);
    assert_true(take_right(&w, &c, &t, t.load.n_good));
    take_end(&w, &t);
    assert_int_equal(disk(&w).bad, 1);
    world_stop(&w);
    kv_disk_io.pwrite = broken_pwrite;
    world_start(&w);
    chain_make(&w, &c, 2, 6, 2, 6);
    assert_int_equal(offer_chain(&w, &c), 6);
    flush(&w); /* gives up at the first failure */
    assert_true(disk(&w).write_errors > 0);
    assert_int_equal(files_of(w.dir, ".tmp", NULL, NULL), 0);
    assert_int_equal(take_chain(&w, &c), 6);
    world_stop(&w);
    kv_disk_io.pwrite = real.pwrite;
    world_free(&w);
}

/* ---- the directory ---- */

static void fill_disk(const char *dir, bool fill)
{
    static char zeros[4096];
    char path[600];
    int fd;

    snprintf(path, sizeof(path), "%s/filler", dir);
    if (!fill) {
        assert_int_equal(unlink(path), 0);
        return;
    }
    fd = open(path, O_WRONLY | O_CREAT, 0600);
    assert_true(fd >= 0);
    while (write(fd, zeros, sizeof(zeros)) > 0) {
    }
    assert_int_equal(errno, ENOSPC);
    close(fd);
}

static void check_size(void *arg, const char *path)
{
    struct stat st;

    if (stat(path, &st) != 0) {
        assert_int_equal(errno, ENOENT); /* made room for another since it was listed */
        return;
    }
    assert_int_equal(st.st_size, 4096 + BLOB_BYTES);
    (void)arg;
}

static bool more_stored(void *arg)
{
    struct world *w = arg;

    flush(w);
    return disk(w).n_blocks >= 8;
}

static void test_TIER_01_full_disk(void **state)
{
    struct world w;
    struct chain c;

    if (!can_mount) {
        skip();
    }
    world_make(&w, 128, 64);
    world_with_disk(&w, 1000);
    assert_int_equal(mount("tmpfs", w.dir, "tmpfs", 0, "size=1m"), 0);
    world_start(&w);
    chain_make(&w, &c, 1, 4, 1, 4);
    offer_chain(&w, &c);
    flush(&w);
    assert_int_equal(disk(&w).n_blocks, 4);
    fill_disk(w.dir, true);
    chain_make(&w, &c, 2, 8, 2, 8);
    assert_int_equal(offer_chain(&w, &c), 8);
    flush(&w);
    assert_true(disk(&w).write_errors >= 1);
    assert_int_equal(files_of(w.dir, ".tmp", NULL, NULL), 0);
    files_of(w.dir, ".kv", check_size, NULL); /* none of no size, none half */
    assert_int_equal(take_chain(&w, &c), 8);  /* from memory */
    fill_disk(w.dir, false);
    assert_true(eventually(more_stored, &w)); /* works again */
    restart(&w);
    assert_int_equal(take_chain(&w, &c), 8);
    assert_int_equal(disk(&w).bad, 0);
    world_stop(&w);
    assert_int_equal(umount(w.dir), 0);
    world_free(&w);
}

static void test_TIER_01_read_only_disk(void **state)
{
    struct world w;
    struct chain c, other;

    if (!can_mount) {
        skip();
    }
    world_make(&w, 128, 64);
    world_with_disk(&w, 1000);
    assert_int_equal(mount("tmpfs", w.dir, "tmpfs", 0, "size=4m"), 0);
    world_start(&w);
    chain_make(&w, &c, 1, 4, 1, 4);
    chain_make(&w, &other, 2, 8, 2, 8);
    offer_chain(&w, &c);
    flush(&w);
    world_stop(&w);
    assert_int_equal(mount("none", w.dir, "none", MS_REMOUNT | MS_RDONLY, NULL), 0);
    world_start(&w); /* reads what is there */
    assert_int_equal(take_chain(&w, &c), 4);
    assert_int_equal(offer_chain(&w, &other), 8);
    flush(&w);
    assert_true(disk(&w).write_errors >= 1);
    assert_int_equal(take_chain(&w, &other), 8);
    assert_int_equal(mount("none", w.dir, "none", MS_REMOUNT, NULL), 0);
    assert_true(eventually(more_stored, &w));
    world_stop(&w);
    assert_int_equal(umount(w.dir), 0);
    world_free(&w);
}

/* ---- everything at once ---- */

#define N_USERS 3

struct user {
    struct world w; /* its own pool and hasher, the tiers of all */
    uint32_t seed, loaded;
    bool wrong;
};

static uint32_t draw(uint32_t *seed, uint32_t n)
{
    *seed = *seed * 1664525u + 1013904223u;
    return (*seed >> 8) % n;
}

static void *use(void *arg)
{
    struct user *u = arg;
    struct chain *c = calloc(1, sizeof(*c));

    for (int i = 0; i < 400; i++) {
        uint32_t head = draw(&u->seed, 4), tail = draw(&u->seed, 12), n = 1 + draw(&u->seed, 8);
        struct taken t;

        chain_make(&u->w, c, head, 1 + draw(&u->seed, 3), 10 + tail, n);
        take_find(&u->w, c, draw(&u->seed, 2), &t);
        switch (draw(&u->seed, 5)) {
        case 0:
            break;
        case 1:
            take_begin(&u->w, &t);
            u->w.src->ops->load_cancel(u->w.src, &t.load);
            u->wrong |= !take_wait(&t);
            u->wrong |= !take_right(&u->w, c, &t, t.load.n_good);
            break;
        default:
            take_load(&u->w, &t);
            u->wrong |= !take_right(&u->w, c, &t, t.load.n_good);
            u->loaded += t.load.n_good;
            break;
        }
        take_end(&u->w, &t);
        if (t.find.n + t.find.first < n) {
            offer_chain(&u->w, c);
        }
    }
    free(c);
    return NULL;
}

struct server {
    struct world w; /* for its hasher */
    uint32_t seed, n_served, n_taken;
    atomic_bool stop;
    bool wrong;
};

/* Hands one block out as a block server does. */
static void serve(struct server *v, struct chain *c)
{
    struct kv_run run = kv_run_of(&c->c, 0, BLOCK, 0);
    struct kv_blob *blobs[MAX_CHAIN];
    uint32_t n = kv_tiers_pin(v->w.tiers, &run, blobs);
    atomic_int rc = BT_PENDING;
    struct kv_bring bring = {.done = brought, .arg = &rc};

    if (n > 0) {
        const struct kv_blob_meta *m;

        bring.blob = blobs[n - 1];
        kv_tiers_bring(v->w.tiers, &bring);
        v->wrong |= !eventually(bring_over, &rc);
        m = kv_blob_meta(bring.blob);
        for (uint32_t l = 0; l < N_LAYERS && atomic_load(&rc) == BT_OK; l++) {
            const void *p = kv_blob_layer(v->w.tiers, bring.blob, l);

            v->wrong |= !p || kv_blob_sum(p, m->shape.layer_bytes) != m->sums[l];
            v->n_served++;
        }
    }
    kv_tiers_unpin(v->w.tiers, blobs, n);
}

/* Takes one in, with the bytes that an engine would have written, or gives up half-way. */
static void take_in(struct server *v, struct chain *c, uint32_t i)
{
    struct kv_run run = kv_run_of(&c->c, i, BLOCK, 0);
    uint64_t prefix = run.prefix, sums[N_LAYERS];
    struct kv_blob_meta m;
    struct kv_blob *b;
    uint32_t pages[2];

    kv_run_at(&run, 0, &prefix, &m);
    m.shape = kv_blob_shape_of(kv_pool_layout(v->w.pool), BLOCK);
    if (kv_tiers_reserve(v->w.tiers, &m, &b) != BT_OK) {
        return;
    }
    v->wrong |= kv_pool_take(v->w.pool, 2, KV_OWNER_SEQ, KV_PAGE_NONE, pages) != BT_OK;
    for (uint32_t l = 0; l < N_LAYERS; l++) {
        for (uint32_t p = 0; p < 2; p++) {
            fill_page(kv_pool_page(v->w.pool, (int)l, pages[p]), c, i, p, (int)l);
        }
        sums[l] =
            kv_blob_gather_sum(v->w.pool, pages, BLOCK, (int)l, kv_blob_layer(v->w.tiers, b, l));
    }
    kv_pool_give(v->w.pool, pages, 2, KV_OWNER_SEQ);
    if (draw(&v->seed, 3) == 0) {
        kv_tiers_abort(v->w.tiers, b);
        return;
    }
    kv_tiers_commit(v->w.tiers, b, sums);
    kv_tiers_unpin(v->w.tiers, &b, 1);
    v->n_taken++;
}

static void *be_server(void *arg)
{
    struct server *v = arg;
    struct chain *c = calloc(1, sizeof(*c));
    struct kv_tiers_held held[7];
    uint64_t cursor = 0;

    while (!atomic_load(&v->stop)) {
        uint32_t n = 1 + draw(&v->seed, 8);

        chain_make(&v->w, c, draw(&v->seed, 4), 1 + draw(&v->seed, 3), 10 + draw(&v->seed, 12), n);
        serve(v, c);
        take_in(v, c, draw(&v->seed, n));
        v->wrong |= kv_tiers_held(v->w.tiers, &cursor, held, 7) > 7;
    }
    free(c);
    return NULL;
}

static void vandal(void *arg, const char *path)
{
    uint32_t *seed = arg;
    int fd;

    if (draw(seed, 10) != 0) {
        return;
    }
    fd = open(path, O_WRONLY);
    if (fd >= 0) {
        if (draw(seed, 3) == 0) {
            unlink(path);
        } else if (draw(seed, 2) == 0) {
            (void)!ftruncate(fd, 4096 + draw(seed, BLOB_BYTES));
        } else {
            (void)!pwrite(fd, "x", 1, 4096 + draw(seed, BLOB_BYTES));
        }
        close(fd);
    }
}

static void test_random_work_of_many(void **state)
{
    struct user *u = calloc(N_USERS, sizeof(*u));
    pthread_t threads[N_USERS];
    struct server *v = calloc(1, sizeof(*v));
    pthread_t server;
    struct world w;
    uint32_t loaded = 0, seed = 99;

    world_make(&w, 16, 30);
    world_with_disk(&w, 60);
    w.conf.threads = 3;
    w.share_bytes = 3 * BLOB_BYTES;
    world_start(&w);
    for (uint32_t i = 0; i < N_USERS; i++) {
        world_make(&u[i].w, 64, 1);
        u[i].w.tiers = w.tiers;
        u[i].w.src = w.src;
        u[i].seed = i + 1;
        assert_int_equal(pthread_create(&threads[i], NULL, use, &u[i]), 0);
    }
    world_make(&v->w, 8, 1);
    v->w.tiers = w.tiers;
    v->seed = 77;
    assert_int_equal(pthread_create(&server, NULL, be_server, v), 0);
    for (int i = 0; i < 30; i++) {
        usleep(10000);
        files_of(w.dir, ".kv", vandal, &seed);
    }
    for (uint32_t i = 0; i < N_USERS; i++) {
        pthread_join(threads[i], NULL);
        u[i].w.tiers = NULL;
        world_free(&u[i].w);
        assert_false(u[i].wrong);
        loaded += u[i].loaded;
    }
    atomic_store(&v->stop, true);
    pthread_join(server, NULL);
    v->w.tiers = NULL;
    world_free(&v->w);
    assert_false(v->wrong);
    assert_true(loaded > 0 && v->n_served > 0 && v->n_taken > 0);
    free(v);
    assert_int_equal(kv_tiers_stats(w.tiers).n_loads, 0);
    assert_int_equal(kv_tiers_stats(w.tiers).queued_bytes, 0);
    restart(&w);
    world_free(&w);
    free(u);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_sinks_and_comes_back),
        cmocka_unit_test(test_second_use_promotes),
        cmocka_unit_test(test_shared_load),
        cmocka_unit_test(test_bring),
        cmocka_unit_test(test_space_is_bounded),
        cmocka_unit_test(test_large_among_small),
        cmocka_unit_test(test_rate_and_pressure),
        cmocka_unit_test(test_TIER_05_restart_tells_again),
        cmocka_unit_test(test_TIER_05_writes_beside_the_scan),
        cmocka_unit_test(test_one_process_a_directory),
        cmocka_unit_test(test_config_errors),
        cmocka_unit_test(test_options_that_contradict),
        cmocka_unit_test(test_TIER_01_killed_while_writing),
        cmocka_unit_test(test_TIER_01_damaged_files),
        cmocka_unit_test(test_TIER_01_damaged_before_the_start),
        cmocka_unit_test(test_TIER_01_pipes_and_links),
        cmocka_unit_test(test_TIER_01_other_layout),
        cmocka_unit_test(test_TIER_01_input_output_error),
        cmocka_unit_test(test_TIER_01_full_disk),
        cmocka_unit_test(test_TIER_01_read_only_disk),
        cmocka_unit_test(test_random_work_of_many),
    };

    /* A mount namespace of our own, so that a tmpfs can be a disk. */
    can_mount = unshare(CLONE_NEWNS) == 0 || unshare(CLONE_NEWUSER | CLONE_NEWNS) == 0;
    can_mount = can_mount && mount("none", "/", "none", MS_REC | MS_PRIVATE, NULL) == 0;
    return cmocka_run_group_tests(tests, NULL, NULL);
}
