/* The KV store between two processes: blocks of an 8B model's shape put by a client into a daemon,
 * and got from it into pages, checksums and all. Ceilings: a plain copy of as many bytes in the
 * same run, and what ucx_perftest reached (told by bench_store.sh); the lower one counts.
 *
 *   bench_store [--json] --redis ADDRESS --case NAME --transports LIST --perftest GB/S
 *               [--cached GB/S]      with one message that stays in the cache: told beside it
 */
#include "common/cluster/registry.h"
#include "common/thr/time.h"
#include "kvstore/store/announce.h"
#include "kvstore/store/client.h"
#include "kvstore/store/server.h"
#include "tests/bench/probe.h"
#include "tests/bench/probe_memory.h"

#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#define N_LAYERS     32
#define PAGE_TOKENS  16
#define BLOCK_TOKENS 128
#define BLOCK_PAGES  (BLOCK_TOKENS / PAGE_TOKENS)
#define N_BLOCKS     24
#define BLOB_BYTES   (16u << 20)
#define ROUNDS       5
#define PATIENCE_NS  (60 * BT_NS_PER_S)

static struct bt_cluster_conf conf;
static const char *transports;

BT_NORETURN static void die(const char *what, const struct bt_err *err)
{
    fprintf(stderr, "bench_store: %s: %s\n", what, err ? err->msg : "");
    exit(1);
}

static struct kv_layout make_layout(uint32_t n_pages)
{
    struct kv_layout l = {.n_layers = N_LAYERS,
                          .n_kv_heads = 8,
                          .head_dim = 128,
                          .page_tokens = PAGE_TOKENS,
                          .dtype = KV_DTYPE_F16,
                          .n_pages = n_pages};
    struct bt_err err;

    if (kv_layout_init(&l, &err) < 0) {
        die("layout", &err);
    }
    return l;
}

/* ---- the daemon, a process of its own ---- */

struct daemon {
    struct kv_tiers *tiers;
    struct bt_blockmap *bm;
};

static void on_events(void *arg, const struct kv_tiers_event *ev, size_t n)
{
    struct daemon *d = arg;

    if (__atomic_load_n(&d->bm, __ATOMIC_ACQUIRE)) {
        kv_announce_events(d->bm, d->tiers, ev, n);
    }
}

static void on_daemon_members(void *arg, struct bt_members *take_members)
{
    struct daemon *d = arg;

    bt_blockmap_set_members(d->bm, take_members);
    bt_members_unref(take_members);
}

static void run_daemon(int stop_fd)
{
    struct daemon d = {0};
    struct kv_tiers_conf tc = {.host_bytes = (uint64_t)2 * N_BLOCKS * BLOB_BYTES, .threads = 1};
    struct kv_tiers_cfg cfg = {.conf = &tc, .mem = &bt_mem_host, .events = on_events, .arg = &d};
    struct bt_member self = {.name = "s0", .role = BT_ROLE_KVSTORE};
    struct kv_server_cfg sc = {.net = {.listen = "127.0.0.1:0", .transports = transports},
                               .node_name = "s0",
                               .takes_puts = true};
    struct bt_blockmap_cfg bc = {.conf = &conf, .name = "s0", .held = kv_announce_held};
    struct bt_registry_cfg rc = {
        .conf = &conf, .self = &self, .changed = on_daemon_members, .arg = &d};
    struct kv_server *server;
    struct bt_registry *reg;
    struct bt_blockmap *bm;
    struct bt_err err;
    char c;

    sc.incarnation = bc.incarnation = self.incarnation = bt_incarnation_make();
    if (kv_tiers_create(&cfg, &d.tiers, &err) < 0) {
        die("tiers", &err);
    }
    probe_warm(kv_tiers_region(d.tiers));
    sc.tiers = bc.arg = d.tiers;
    if (kv_server_create(&sc, &server, &err) < 0 || bt_blockmap_create(&bc, &bm, &err) < 0) {
        die("server", &err);
    }
    __atomic_store_n(&d.bm, bm, __ATOMIC_RELEASE);
    snprintf(self.grpc_addr, sizeof(self.grpc_addr), "127.0.0.1:1");
    snprintf(self.store_addr, sizeof(self.store_addr), "%s", kv_server_address(server));
    if (bt_registry_create(&rc, &reg, &err) < 0) {
        die("registry", &err);
    }
    if (read(stop_fd, &c, 1) < 0) { /* until the parent has closed it */
        exit(1);
    }
    bt_registry_destroy(reg);
    kv_server_destroy(server);
    kv_tiers_destroy(d.tiers);
    bt_blockmap_destroy(bm);
    exit(0);
}

/* ---- the client ---- */

struct client {
    struct kv_client *store;
    struct bt_blockmap *bm;
    struct kv_pool *pool;
    struct kv_hasher *hasher;
    uint32_t *pages; /* [N_BLOCKS * BLOCK_PAGES] */
    int32_t ids[N_BLOCKS * BLOCK_TOKENS];
    struct kv_key keys[N_BLOCKS];
    struct kv_chain chain;
};

static void on_members(void *arg, struct bt_members *take_members)
{
    struct client *c = arg;

    bt_blockmap_set_members(c->bm, take_members);
    kv_client_set_members(c->store, take_members);
    bt_members_unref(take_members);
}

/* A hundredth of a round or less; who looks more often takes time from those who move the bytes. */
static void nap(void)
{
    const struct timespec ts = {0, BT_NS_PER_MS};

    nanosleep(&ts, NULL);
}

static void wait_until(bool (*fn)(struct client *c, uint64_t x), struct client *c, uint64_t x)
{
    uint64_t end = bt_deadline_ns(PATIENCE_NS);

    while (!fn(c, x)) {
        if (bt_now_ns() > end) {
            die("nothing happens", NULL);
        }
        nap();
    }
}

static bool is_known(struct client *c, uint64_t x)
{
    return kv_client_stats(c->store).daemons == 1 && bt_blockmap_up(c->bm);
}

static bool are_put(struct client *c, uint64_t n)
{
    return kv_client_stats(c->store).puts >= n;
}

static void make_chain(struct client *c, int round)
{
    for (size_t i = 0; i < BT_ARRAY_LEN(c->ids); i++) {
        c->ids[i] = (int32_t)(i * 31 + (size_t)round * 100003) % 50000;
    }
    c->chain =
        (struct kv_chain){.root = {{7}}, .keys = c->keys, .ids = c->ids, .n_blocks = N_BLOCKS};
    kv_key_chain(c->hasher, &c->chain.root,
                 &(struct kv_key_tokens){c->ids, BT_ARRAY_LEN(c->ids), BLOCK_TOKENS}, c->keys);
}

static void offered(void *arg, int rc)
{
    if (rc != BT_OK) {
        die("an offer was not copied", NULL);
    }
    __atomic_add_fetch((uint64_t *)arg, 1, __ATOMIC_RELEASE);
}

static double gb_per_s(uint64_t bytes, uint64_t start)
{
    return (double)bytes / (double)(bt_now_ns() - start);
}

static double put_round(struct client *c)
{
    struct kv_source *src = kv_client_source(c->store);
    uint64_t n_copied = 0, before = kv_client_stats(c->store).puts, start = bt_now_ns();

    for (uint32_t i = 0; i < N_BLOCKS; i++) {
        struct kv_offer o = {.chain = c->chain,
                             .n_tokens = BLOCK_TOKENS,
                             .pages = c->pages + i * BLOCK_PAGES,
                             .pool = c->pool,
                             .done = offered,
                             .arg = &n_copied};

        o.chain.n_blocks = i + 1;
        if (!src->ops->offer(src, &o)) {
            die("an offer was not taken", NULL);
        }
    }
    wait_until(are_put, c, before + N_BLOCKS);
    return gb_per_s((uint64_t)N_BLOCKS * BLOB_BYTES, start);
}

static void found(struct kv_find *f)
{
    __atomic_add_fetch((uint64_t *)f->arg, 1, __ATOMIC_RELEASE);
}

static void loaded(struct kv_load *l)
{
    __atomic_add_fetch((uint64_t *)l->arg, 1, __ATOMIC_RELEASE);
}

static void wait_for(uint64_t *counter, uint64_t n)
{
    while (__atomic_load_n(counter, __ATOMIC_ACQUIRE) < n) {
        nap();
    }
}

static double get_round(struct client *c)
{
    struct kv_source *src = kv_client_source(c->store);
    uint64_t done = 0, start, end = bt_deadline_ns(PATIENCE_NS);
    struct kv_find f;
    struct kv_load l;
    double v;

    do { /* the index hears of blocks a little later */
        f = (struct kv_find){.chain = c->chain,
                             .n_tokens = BLOCK_TOKENS,
                             .deadline_ns = BT_NEVER_NS,
                             .done = found,
                             .arg = &done};
        done = 0;
        src->ops->find(src, &f);
        wait_for(&done, 1);
        if (f.n < N_BLOCKS) {
            src->ops->end(src, &f);
            poll(NULL, 0, 10);
        }
    } while (f.n < N_BLOCKS && bt_now_ns() < end);
    l = (struct kv_load){.find = &f,
                         .pool = c->pool,
                         .n_blocks = f.n,
                         .pages = c->pages,
                         .done = loaded,
                         .arg = &done};
    start = bt_now_ns();
    src->ops->load(src, &l);
    wait_for(&done, 2);
    v = gb_per_s((uint64_t)N_BLOCKS * BLOB_BYTES, start);
    if (atomic_load(&l.n_good) != N_BLOCKS) {
        die("a block did not come", NULL);
    }
    src->ops->end(src, &f);
    return v;
}

static void open_client(struct client *c)
{
    struct kv_layout l = make_layout(N_BLOCKS * BLOCK_PAGES);
    struct bt_blockmap_cfg bc = {.conf = &conf};
    struct kv_client_cfg cc = {.net = {.listen = "127.0.0.1:0", .transports = transports},
                               .node_name = "p0",
                               .incarnation = 1,
                               .replicas = 1,
                               .shape = kv_blob_shape_of(&l, BLOCK_TOKENS)};
    struct bt_err err;

    if (kv_pool_create(&l, &bt_mem_host, "bench", &c->pool, &err) < 0 ||
        kv_hasher_create(&c->hasher, &err) < 0 || bt_blockmap_create(&bc, &c->bm, &err) < 0) {
        die("client", &err);
    }
    cc.blockmap = c->bm;
    if (kv_client_create(&cc, &c->store, &err) < 0) {
        die("client", &err);
    }
    c->pages = calloc(N_BLOCKS * BLOCK_PAGES, sizeof(*c->pages));
    if (!c->pages || kv_pool_take(c->pool, N_BLOCKS * BLOCK_PAGES, KV_OWNER_TRANSFER, KV_PAGE_NONE,
                                  c->pages) < 0) {
        die("pages", NULL);
    }
    probe_warm(kv_pool_region(c->pool));
    memset(kv_pool_region(c->pool)->base, 0x5a, kv_pool_region(c->pool)->bytes);
}

struct options {
    double perf, cached;
    bool json;
};

static void report(const char *name, double *v, double *copy, const struct options *o)
{
    double perf = o->perf;
    double plain = probe_median(copy, ROUNDS);
    struct probe_result r = {.bench = "store",
                             .name = name,
                             .metric = "gb_per_s",
                             .unit = "GB/s",
                             .value = probe_median(v, ROUNDS),
                             .ceiling = plain < perf ? "memcpy" : "ucx_perftest",
                             .ceiling_value = BT_MIN(plain, perf)};

    if (o->cached > 0) {
        r.peer = "ucx_perftest in the cache";
        r.peer_value = o->cached;
        r.peer_ratio = r.value / r.peer_value;
    }
    probe_print(&r, o->json);
}

int main(int argc, char **argv)
{
    double put[ROUNDS], get[ROUNDS], copy[ROUNDS];
    struct options o = {0};
    static struct client c;
    struct bt_registry_cfg rc = {.conf = &conf, .changed = on_members, .arg = &c};
    struct bt_registry *reg;
    const char *name = "shm", *redis = NULL;
    struct bt_err err;
    struct probe_copy plain;
    char put_case[32], get_case[32];
    int fds[2];

    for (int i = 1; i < argc; i++) {
        const char *v = i + 1 < argc ? argv[i + 1] : "";

        o.json = o.json || strcmp(argv[i], "--json") == 0;
        redis = strcmp(argv[i], "--redis") == 0 ? v : redis;
        name = strcmp(argv[i], "--case") == 0 ? v : name;
        transports = strcmp(argv[i], "--transports") == 0 ? v : transports;
        o.perf = strcmp(argv[i], "--perftest") == 0 ? strtod(v, NULL) : o.perf;
        o.cached = strcmp(argv[i], "--cached") == 0 ? strtod(v, NULL) : o.cached;
    }
    if (!redis || o.perf <= 0 || pipe(fds) != 0) {
        fprintf(stderr, "run it by tests/bench/run store\n");
        return 2;
    }
    conf = (struct bt_cluster_conf){.name = (char *)(uintptr_t) "bench",
                                    .secret = (char *)(uintptr_t) "",
                                    .lease_ns = 10 * BT_NS_PER_S,
                                    .poll_ns = 100 * BT_NS_PER_MS,
                                    .redis_address = (char *)(uintptr_t)redis,
                                    .redis_user = (char *)(uintptr_t) "",
                                    .redis_password = (char *)(uintptr_t) "",
                                    .redis_timeout_ns = 1 * BT_NS_PER_S,
                                    .lookup_timeout_ns = 1 * BT_NS_PER_S,
                                    .block_ttl_ns = 600 * BT_NS_PER_S};
    if (fork() == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        close(fds[1]);
        run_daemon(fds[0]);
    }
    close(fds[0]);
    open_client(&c);
    if (bt_registry_create(&rc, &reg, &err) < 0) {
        die("registry", &err);
    }
    wait_until(is_known, &c, 0);
    if (probe_copy_open(&plain, (size_t)N_BLOCKS * BLOB_BYTES) < 0) {
        die("memory", NULL);
    }
    for (int r = -3; r < ROUNDS; r++) { /* the first rounds touch the memory */
        double p, g, m;

        make_chain(&c, r + 3);
        p = put_round(&c);
        g = get_round(&c);
        m = probe_copy_gb_per_s(&plain);
        if (r >= 0) {
            put[r] = p;
            get[r] = g;
            copy[r] = m;
        }
    }
    snprintf(put_case, sizeof(put_case), "put %s", name);
    snprintf(get_case, sizeof(get_case), "get %s", name);
    report(put_case, put, copy, &o);
    report(get_case, get, copy, &o);
    probe_copy_close(&plain);
    bt_registry_destroy(reg);
    kv_client_destroy(c.store);
    bt_blockmap_destroy(c.bm);
    kv_pool_give(c.pool, c.pages, N_BLOCKS * BLOCK_PAGES, KV_OWNER_TRANSFER);
    kv_pool_destroy(c.pool);
    kv_hasher_destroy(c.hasher);
    free(c.pages);
    close(fds[1]);
    wait(NULL);
    return 0;
}
