/* The block index in Redis: announcements, look-ups of 64 keys, memory a block, and what a look-up
 * costs while Redis stands still. Starts a redis-server of its own on a unix socket; the ceilings
 * are bare hiredis, blocking, with the same number of commands in one pipeline, in the same run. */
#include "common/cluster/blockmap.h"

#include "common/obs/log.h"
#include "common/thr/time.h"
#include "tests/bench/probe.h"

#include <hiredis/hiredis.h>
#include <poll.h>
#include <pthread.h>
#include <semaphore.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#define N_BLOCKS  200000
#define N_KEYS    64
#define N_LOOKUPS 4000
#define DEPTH     8
#define ROUNDS    5

static char dir[] = "/tmp/baton_bench_XXXXXX";
static char sock[96], address[128];
static pid_t server;
static bool json;
static struct bt_blockmap *bm;
static redisContext *bare;

BT_NORETURN static void die(const char *what)
{
    fprintf(stderr, "bench_blockmap: %s\n", what);
    exit(1);
}

static void stop_server(void)
{
    if (server > 0) {
        kill(server, SIGKILL);
        waitpid(server, NULL, 0);
    }
    unlink(sock);
    rmdir(dir);
}

static void start_server(void)
{
    if (!mkdtemp(dir)) {
        die("no temporary directory");
    }
    snprintf(sock, sizeof(sock), "%s/redis.sock", dir);
    snprintf(address, sizeof(address), "unix:%s", sock);
    server = fork();
    if (server == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (!freopen("/dev/null", "w", stdout)) {
            _exit(126);
        }
        execlp("redis-server", "redis-server", "--port", "0", "--unixsocket", sock, "--save", "",
               "--dir", dir, NULL);
        _exit(127);
    }
    atexit(stop_server);
    for (int i = 0; i < 1000 && (!bare || bare->err); i++) {
        if (bare) {
            redisFree(bare);
        }
        poll(NULL, 0, 10);
        bare = redisConnectUnix(sock);
    }
    if (!bare || bare->err) {
        die("redis-server does not start");
    }
}

/* --- our side -------------------------------------------------------------------------------- */

static struct bt_block_key key_of(uint64_t i)
{
    uint64_t words[2] = {i * 0x9e3779b97f4a7c15ull, ~i};
    struct bt_block_key k;

    memcpy(k.b, words, sizeof(k.b));
    return k;
}

static size_t list_held(void *arg, uint64_t *cursor, struct bt_block_have *out, size_t max)
{
    size_t n = 0;

    for (; n < max && *cursor < N_BLOCKS; (*cursor)++) {
        out[n++] = (struct bt_block_have){key_of(*cursor), 1u << 20, BT_TIER_HOST};
    }
    *cursor = *cursor < N_BLOCKS ? *cursor : 0;
    return n;
}

static void changed(void *arg, struct bt_members *take_members)
{
    bt_blockmap_set_members(bm, take_members);
    bt_members_unref(take_members);
}

/* Look-ups under way and what became of them. */
struct load {
    sem_t done;
    size_t n_found;
    int rc;
};

static void take(void *arg, const struct bt_found *f)
{
    struct load *l = arg;

    for (size_t i = 0; i < f->n_keys; i++) {
        l->n_found += f->first[i + 1] > f->first[i];
    }
    l->rc = f->rc;
    sem_post(&l->done);
}

static void begin(struct load *l, uint64_t at, uint64_t timeout_ns)
{
    struct bt_block_key keys[N_KEYS];

    for (uint64_t i = 0; i < N_KEYS; i++) {
        keys[i] = key_of((at * N_KEYS + i) % N_BLOCKS);
    }
    if (!bt_blockmap_lookup(bm, keys, N_KEYS, timeout_ns, &(struct bt_lookup_cb){take, l})) {
        die("no look-up");
    }
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;

    return (x > y) - (x < y);
}

/* Times of N_LOOKUPS one after the other, in us, sorted. */
static void one_by_one(double *us)
{
    struct load l = {0};

    sem_init(&l.done, 0, 0);
    for (uint64_t i = 0; i < N_LOOKUPS; i++) {
        uint64_t start = bt_now_ns();

        begin(&l, i, BT_NS_PER_S);
        sem_wait(&l.done);
        us[i] = (double)(bt_now_ns() - start) / 1e3;
    }
    if (l.n_found != (size_t)N_LOOKUPS * N_KEYS) {
        die("a look-up missed what is there");
    }
    qsort(us, N_LOOKUPS, sizeof(*us), by_value);
}

/* Keys a second with DEPTH look-ups under way. */
static double together(void)
{
    struct load l = {0};
    uint64_t start = bt_now_ns();

    sem_init(&l.done, 0, 0);
    for (uint64_t i = 0; i < N_LOOKUPS; i++) {
        if (i >= DEPTH) {
            sem_wait(&l.done);
        }
        begin(&l, i, BT_NS_PER_S);
    }
    for (int i = 0; i < DEPTH; i++) {
        sem_wait(&l.done);
    }
    if (l.n_found != (size_t)N_LOOKUPS * N_KEYS) {
        die("a look-up missed what is there");
    }
    return (double)N_LOOKUPS * N_KEYS / ((double)(bt_now_ns() - start) / 1e9);
}

/* --- bare hiredis ---------------------------------------------------------------------------- */

static redisReply *answer(void)
{
    void *reply = NULL;

    if (redisGetReply(bare, &reply) != REDIS_OK ||
        ((redisReply *)reply)->type == REDIS_REPLY_ERROR) {
        die(reply ? ((redisReply *)reply)->str : "the server is gone");
    }
    return reply;
}

static void skip(size_t n)
{
    while (n--) {
        freeReplyObject(answer());
    }
}

/* Names of all records, made once: the ceiling is Redis and hiredis, not printf. */
#define RECORD_LEN 52
static char records[N_BLOCKS][RECORD_LEN + 1];

static void make_records(void)
{
    for (uint64_t i = 0; i < N_BLOCKS; i++) {
        struct bt_block_key k = key_of(i);
        int n = snprintf(records[i], sizeof(records[i]), "baton:{bench}:block:");

        for (int b = 0; b < 16; b++) {
            n += snprintf(records[i] + n, 3, "%02x", k.b[b]);
        }
        if (n != RECORD_LEN) {
            die("RECORD_LEN");
        }
    }
}

/* Queues "<command> <record of block i> <rest...>". */
static void bare_send(const char *command, uint64_t i, const char *arg1, const char *arg2)
{
    const char *argv[4] = {command, records[i % N_BLOCKS], arg1, arg2};
    size_t lens[4] = {strlen(command), RECORD_LEN, arg1 ? strlen(arg1) : 0,
                      arg2 ? strlen(arg2) : 0};

    redisAppendCommandArgv(bare, arg2 ? 4 : arg1 ? 3 : 2, argv, lens);
}

static void bare_lookup(uint64_t at)
{
    redisAppendCommand(bare, "TIME");
    for (uint64_t i = 0; i < N_KEYS; i++) {
        bare_send("HGETALL", at * N_KEYS + i, NULL, NULL);
    }
    skip(N_KEYS + 1);
}

/* The other way to do it: one script for all keys. */
static void bare_script(uint64_t at)
{
    const char *argv[N_KEYS + 3] = {"EVAL",
                                    "local r = {redis.call('TIME')} for i = 1, #KEYS do "
                                    "r[i + 1] = redis.call('HGETALL', KEYS[i]) end return r"};
    char n[8];

    snprintf(n, sizeof(n), "%d", N_KEYS);
    argv[2] = n;
    for (uint64_t i = 0; i < N_KEYS; i++) {
        argv[3 + i] = records[(at * N_KEYS + i) % N_BLOCKS];
    }
    redisAppendCommandArgv(bare, N_KEYS + 3, argv, NULL);
    skip(1);
}

static void bare_times(void (*fn)(uint64_t at), double *us)
{
    for (uint64_t i = 0; i < N_LOOKUPS; i++) {
        uint64_t start = bt_now_ns();

        fn(i);
        us[i] = (double)(bt_now_ns() - start) / 1e3;
    }
    qsort(us, N_LOOKUPS, sizeof(*us), by_value);
}

/* Keys a second, 8 look-ups a pipeline. */
static double bare_together(void)
{
    uint64_t start = bt_now_ns();

    for (uint64_t i = 0; i < N_LOOKUPS; i += DEPTH) {
        for (uint64_t j = 0; j < DEPTH * N_KEYS; j++) {
            bare_send("HGETALL", i * N_KEYS + j, NULL, NULL);
        }
        skip((size_t)DEPTH * N_KEYS);
    }
    return (double)N_LOOKUPS * N_KEYS / ((double)(bt_now_ns() - start) / 1e9);
}

/* Blocks a second written with HSET and EXPIRE, 512 blocks a pipeline, over the same keys. */
static double bare_announce(void)
{
    uint64_t start = bt_now_ns();

    for (uint64_t i = 0; i < N_BLOCKS;) {
        size_t n = 0;

        for (; n < 512 && i < N_BLOCKS; n++, i++) {
            bare_send("HSET", i, "bare", "0000000000000001:1:100000:ffffffff");
            bare_send("EXPIRE", i, "86400", NULL);
        }
        skip(2 * n);
    }
    return (double)N_BLOCKS / ((double)(bt_now_ns() - start) / 1e9);
}

static double used_bytes(void)
{
    redisReply *r;
    const char *at;
    double v;

    redisAppendCommand(bare, "INFO memory");
    r = answer();
    at = strstr(r->str, "used_memory:");
    v = at ? strtod(at + 12, NULL) : 0;
    freeReplyObject(r);
    return v;
}

/* --- the cases ------------------------------------------------------------------------------- */

static void print(struct probe_result r)
{
    r.bench = "blockmap";
    probe_print(&r, json);
}

static uint64_t wait_for_resync(uint64_t n)
{
    struct bt_blockmap_stats s;

    do {
        poll(NULL, 0, 1);
        s = bt_blockmap_stats(bm);
    } while (!s.synced || s.n_resyncs < n);
    return s.n_resyncs;
}

static void bench_announce(void)
{
    double ours[ROUNDS], plain[ROUNDS], empty = used_bytes(), full = 0, doubled = 0;
    uint64_t n = 0;

    for (int i = 0; i < ROUNDS; i++) {
        uint64_t start;

        redisAppendCommand(bare, "DEL baton:{bench}:epoch");
        skip(1);
        do { /* poll is 50 ms: the pass begins some time */
            poll(NULL, 0, 1);
        } while (bt_blockmap_stats(bm).n_resyncs <= n);
        start = bt_now_ns();
        n = wait_for_resync(n + 1);
        ours[i] = (double)N_BLOCKS / ((double)(bt_now_ns() - start) / 1e9);
        full = i == 0 ? used_bytes() : full;
        plain[i] = bare_announce();
        doubled = i == 0 ? used_bytes() : doubled;
    }
    print((struct probe_result){.name = "announce",
                                .metric = "blocks_per_s",
                                .unit = "1/s",
                                .value = probe_median(ours, ROUNDS),
                                .ceiling = "hset and expire pipelined",
                                .ceiling_value = probe_median(plain, ROUNDS)});
    print((struct probe_result){.name = "memory of a block",
                                .metric = "bytes_per_block",
                                .unit = "B",
                                .value = (full - empty) / N_BLOCKS});
    print((struct probe_result){.name = "memory of a further holder",
                                .metric = "bytes_per_further_holder",
                                .unit = "B",
                                .value = (doubled - full) / N_BLOCKS});
}

static void bench_lookup(void)
{
    static double us[N_LOOKUPS];
    double p50[3][ROUNDS], p99[3][ROUNDS], ours[ROUNDS], plain[ROUNDS];

    for (int i = 0; i < ROUNDS; i++) {
        for (int way = 0; way < 3; way++) {
            if (way == 0) {
                one_by_one(us);
            } else {
                bare_times(way == 1 ? bare_lookup : bare_script, us);
            }
            p50[way][i] = us[N_LOOKUPS / 2];
            p99[way][i] = us[N_LOOKUPS * 99 / 100];
        }
        ours[i] = together();
        plain[i] = bare_together();
    }
    print((struct probe_result){.name = "lookup 64 p50",
                                .metric = "p50_us",
                                .unit = "us",
                                .value = probe_median(p50[0], ROUNDS),
                                .ceiling = "bare pipeline",
                                .ceiling_value = probe_median(p50[1], ROUNDS),
                                .lower_is_better = true});
    print((struct probe_result){.name = "lookup 64 p99",
                                .metric = "p99_us",
                                .unit = "us",
                                .value = probe_median(p99[0], ROUNDS),
                                .ceiling = "bare pipeline",
                                .ceiling_value = probe_median(p99[1], ROUNDS),
                                .lower_is_better = true});
    print((struct probe_result){.name = "script 64 p50",
                                .metric = "p50_us",
                                .unit = "us",
                                .value = probe_median(p50[2], ROUNDS),
                                .ceiling = "bare pipeline",
                                .ceiling_value = probe_median(p50[1], ROUNDS),
                                .lower_is_better = true});
    print((struct probe_result){.name = "lookup 64 depth 8",
                                .metric = "keys_per_s",
                                .unit = "1/s",
                                .value = probe_median(ours, ROUNDS),
                                .ceiling = "bare pipeline",
                                .ceiling_value = probe_median(plain, ROUNDS)});
}

/* The first look-up after Redis stands still, then the others. */
static void bench_frozen(void)
{
    static double us[N_LOOKUPS];
    struct load l = {0};
    double first = 0;

    sem_init(&l.done, 0, 0);
    kill(server, SIGSTOP);
    for (uint64_t i = 0; i < N_LOOKUPS; i++) {
        uint64_t start = bt_now_ns();

        begin(&l, i, 0);
        sem_wait(&l.done);
        us[i] = (double)(bt_now_ns() - start) / 1e3;
        first = i == 0 ? us[0] : first;
    }
    kill(server, SIGCONT);
    qsort(us, N_LOOKUPS, sizeof(*us), by_value);
    print((struct probe_result){.name = "redis frozen first",
                                .metric = "first_ms",
                                .unit = "ms",
                                .value = first / 1e3,
                                .ceiling = "redis.lookup_timeout",
                                .ceiling_value = 50,
                                .lower_is_better = true});
    print((struct probe_result){.name = "redis frozen p99",
                                .metric = "p99_us",
                                .unit = "us",
                                .value = us[N_LOOKUPS * 99 / 100]});
}

int main(int argc, char **argv)
{
    static struct bt_cluster_conf conf = {.name = (char *)"bench",
                                          .lease_ns = 6 * BT_NS_PER_S,
                                          .poll_ns = 50 * BT_NS_PER_MS,
                                          .redis_address = address,
                                          .redis_user = (char *)"",
                                          .redis_password = (char *)"",
                                          .redis_timeout_ns = BT_NS_PER_S,
                                          .lookup_timeout_ns = 50 * BT_NS_PER_MS,
                                          .block_ttl_ns = 86400 * BT_NS_PER_S};
    struct bt_member self = {
        .name = "a", .incarnation = 100, .role = BT_ROLE_KVSTORE, .grpc_addr = "127.0.0.1:1"};
    struct bt_blockmap_cfg bc = {.conf = &conf, .name = "a", .incarnation = 100, .held = list_held};
    struct bt_registry_cfg rc = {.conf = &conf, .self = &self, .changed = changed};
    struct bt_registry *reg;
    struct bt_err err;

    json = argc > 1 && strcmp(argv[1], "--json") == 0;
    bt_log_threshold = BT_LOG_ERROR;
    make_records();
    start_server();
    if (bt_blockmap_create(&bc, &bm, &err) < 0 || bt_registry_create(&rc, &reg, &err) < 0) {
        die(err.msg);
    }
    bench_announce();
    bench_lookup();
    bench_frozen();
    bt_registry_destroy(reg);
    bt_blockmap_destroy(bm);
    redisFree(bare);
    return 0;
}
