/* A prompt's KV from one process to another: pages of an 8B model's shape, checksums and all.
 *
 *   bench_handoff [--json] [--tokens N] --case NAME --transports LIST --perftest GB/S [--cached
 * GB/S]
 *
 *   gb_per_s    the whole prompt is there when it is asked for; from asking to the commit. Ceiling:
 *               the lower of a plain copy of as many bytes in the same run and what ucx_perftest
 *               reached with messages beyond the caches (told by bench_handoff.sh); peer: what it
 *               reached with one message that stays in the cache.
 *   exposed_ms  the prompt comes in chunks of 512 tokens, layer by layer, over twice the time that
 *               moving it takes: from the end of the last layer to the commit.
 *   landed_percent  of that: what was in place and checked when the last layer ended.
 */
#include "common/thr/time.h"
#include "kvstore/handoff/handoff.h"
#include "tests/bench/probe.h"
#include "tests/bench/probe_memory.h"

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#define N_LAYERS     32
#define PAGE_TOKENS  16
#define CHUNK_TOKENS 512u
#define ROUNDS       5
#define WARM_ROUNDS  2
#define PATIENCE_NS  (60 * BT_NS_PER_S)
#define MAX_EVENTS   65536

static const char *transports;
static uint32_t n_tokens = 12288;

static void die(const char *what, const struct bt_err *err)
{
    fprintf(stderr, "bench_handoff: %s: %s\n", what, err ? err->msg : "");
    exit(1);
}

static void read_all(int fd, void *p, size_t n)
{
    if (read(fd, p, n) != (ssize_t)n) {
        exit(1); /* the other process is gone */
    }
}

static void write_all(int fd, const void *p, size_t n)
{
    if (write(fd, p, n) != (ssize_t)n) {
        exit(1);
    }
}

static void nap_until(uint64_t ns)
{
    const struct timespec ts = {(time_t)(ns / BT_NS_PER_S), (long)(ns % BT_NS_PER_S)};

    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &ts, NULL) != 0) {
    }
}

/* ---- either side ---- */

struct side {
    struct kv_pool *pool;
    struct kv_handoff *h;
    uint32_t *pages, n_pages;
    pthread_mutex_t lock;
    pthread_cond_t cond;
    bool done; /* the last prompt, with these; guarded by lock */
    int rc;
    char msg[232];
};

static void open_side(struct side *s, const char *name, uint64_t incarnation)
{
    struct kv_layout l = {.n_layers = N_LAYERS,
                          .n_kv_heads = 8,
                          .head_dim = 128,
                          .page_tokens = PAGE_TOKENS,
                          .dtype = KV_DTYPE_F16,
                          .n_pages = n_tokens / PAGE_TOKENS};
    struct kv_handoff_cfg cfg = {.net = {.listen = "127.0.0.1:0", .transports = transports},
                                 .node_name = name,
                                 .incarnation = incarnation,
                                 .max_open = 4,
                                 .silence_ns = 10 * BT_NS_PER_S};
    pthread_condattr_t clock;
    struct bt_err err;

    pthread_mutex_init(&s->lock, NULL);
    pthread_condattr_init(&clock);
    pthread_condattr_setclock(&clock, CLOCK_MONOTONIC);
    pthread_cond_init(&s->cond, &clock);
    if (kv_layout_init(&l, &err) < 0 ||
        kv_pool_create(&l, &bt_mem_host, "bench", &s->pool, &err) < 0) {
        die(name, &err);
    }
    probe_warm(kv_pool_region(s->pool));
    cfg.pool = s->pool;
    if (kv_handoff_create(&cfg, &s->h, &err) < 0) {
        die(name, &err);
    }
    s->n_pages = l.n_pages;
    s->pages = calloc(s->n_pages, sizeof(*s->pages));
    if (!s->pages ||
        kv_pool_take(s->pool, s->n_pages, KV_OWNER_TRANSFER, KV_PAGE_NONE, s->pages) < 0) {
        die("pages", NULL);
    }
    memset(kv_pool_region(s->pool)->base, 0x5a, kv_pool_region(s->pool)->bytes);
}

static void close_side(struct side *s)
{
    kv_handoff_destroy(s->h);
    kv_pool_give(s->pool, s->pages, s->n_pages, KV_OWNER_TRANSFER);
    kv_pool_destroy(s->pool);
    free(s->pages);
}

static void ended(struct side *s, int rc, const char *msg)
{
    pthread_mutex_lock(&s->lock);
    s->rc = rc;
    snprintf(s->msg, sizeof(s->msg), "%s", msg);
    s->done = true;
    pthread_cond_signal(&s->cond);
    pthread_mutex_unlock(&s->lock);
}

/* Sleeps: who looks again and again takes time from those who move the bytes. */
static void wait_end(struct side *s)
{
    uint64_t end = bt_deadline_ns(PATIENCE_NS);
    const struct timespec ts = {(time_t)(end / BT_NS_PER_S), (long)(end % BT_NS_PER_S)};

    pthread_mutex_lock(&s->lock);
    while (!s->done) {
        if (pthread_cond_timedwait(&s->cond, &s->lock, &ts) == ETIMEDOUT) {
            die("a handoff does not end", NULL);
        }
    }
    s->done = false;
    pthread_mutex_unlock(&s->lock);
    if (s->rc != BT_OK) {
        fprintf(stderr, "bench_handoff: %s\n", s->msg);
        exit(1);
    }
}

/* ---- the prefill node, a process of its own ---- */

/* A prompt, and how long computing it takes; 0: it is there. */
struct order {
    uint64_t id, compute_ns;
};

static void on_sent(void *arg, int rc, const char *msg)
{
    ended(arg, rc, msg);
}

static void on_ticketed(void *arg)
{
}

static uint64_t compute(struct kv_send *send, uint64_t compute_ns)
{
    uint32_t chunks = BT_DIV_UP(n_tokens, CHUNK_TOKENS), steps = chunks * N_LAYERS;
    uint64_t start = bt_now_ns();

    for (uint32_t i = 0; i < steps; i++) {
        uint32_t first = i / N_LAYERS * CHUNK_TOKENS;

        if (compute_ns) {
            nap_until(start + compute_ns * (i + 1) / steps);
        }
        kv_send_progress(send, first, BT_MIN(CHUNK_TOKENS, n_tokens - first), (int)(i % N_LAYERS));
    }
    return bt_now_ns();
}

static void run_prefill(int in, int out)
{
    const struct kv_first first = {1, {42}};
    struct side s = {0};
    struct order o;
    char address[64] = "";

    open_side(&s, "p0", 1);
    snprintf(address, sizeof(address), "%s", kv_handoff_address(s.h));
    write_all(out, address, sizeof(address));
    while (read(in, &o, sizeof(o)) == (ssize_t)sizeof(o)) {
        struct kv_send_cfg cfg = {
            .id = {o.id, o.id}, .n_tokens = n_tokens, .events = {&s, on_ticketed, on_sent}};
        struct kv_send *send;
        struct bt_err err;
        uint64_t last;

        if (kv_send_create(s.h, &cfg, &send, &err) < 0) {
            die("send", &err);
        }
        kv_send_set_pages(send, 0, s.pages, s.n_pages);
        last = o.compute_ns ? 0 : compute(send, 0);
        if (!o.compute_ns) {
            kv_send_finish(send, &first);
        }
        write_all(out, &last, sizeof(last)); /* it may be asked for */
        if (o.compute_ns) {
            last = compute(send, o.compute_ns);
            kv_send_finish(send, &first);
            write_all(out, &last, sizeof(last));
        }
        wait_end(&s);
        kv_send_release(send);
    }
    close_side(&s);
    exit(0);
}

/* ---- the decode node ---- */

struct decode {
    struct side s;
    int to, from; /* the prefill node */
    char address[64];
    uint64_t next_id;
    uint32_t at[N_LAYERS]; /* tokens in place */
    uint32_t n_events;
    struct {
        uint64_t ns, tokens; /* over all layers */
    } events[MAX_EVENTS];
};

static void on_received(void *arg, int rc, const char *msg, const struct kv_first *tokens)
{
    struct decode *d = arg;

    ended(&d->s, rc, msg);
}

static void on_progress(void *arg, int layer, uint32_t tokens)
{
    struct decode *d = arg;
    uint64_t before = d->n_events ? d->events[d->n_events - 1].tokens : 0;

    if (d->n_events < MAX_EVENTS) {
        d->events[d->n_events].ns = bt_now_ns();
        d->events[d->n_events++].tokens = before + tokens - d->at[layer];
    }
    d->at[layer] = tokens;
}

struct result {
    uint64_t ns, exposed_ns;
    double landed;
};

static struct result one(struct decode *d, uint64_t compute_ns)
{
    struct order o = {++d->next_id, compute_ns};
    struct kv_recv_cfg cfg = {.id = {o.id, o.id},
                              .peer_name = "p0",
                              .peer_incarnation = 1,
                              .peer_address = d->address,
                              .n_tokens = n_tokens,
                              .pages = d->s.pages,
                              .n_pages = d->s.n_pages,
                              .events = {d, on_received, on_progress}};
    uint64_t start, end, last, landed = 0;
    struct kv_recv *recv;
    struct bt_err err;

    d->n_events = 0;
    memset(d->at, 0, sizeof(d->at));
    write_all(d->to, &o, sizeof(o));
    read_all(d->from, &last, sizeof(last));
    start = bt_now_ns();
    if (kv_recv_create(d->s.h, &cfg, &recv, &err) < 0) {
        die("receive", &err);
    }
    if (compute_ns) {
        read_all(d->from, &last, sizeof(last));
    }
    wait_end(&d->s);
    end = bt_now_ns();
    kv_recv_release(recv);
    for (uint32_t i = 0; i < d->n_events && d->events[i].ns <= last; i++) {
        landed = d->events[i].tokens;
    }
    return (struct result){end - start, end - last,
                           100.0 * (double)landed / ((double)n_tokens * N_LAYERS)};
}

struct options {
    const char *name;
    double perf, cached;
    bool json;
};

static void measure(struct decode *d, const struct options *o)
{
    size_t bytes = kv_pool_layout(d->s.pool)->bytes;
    double rate[ROUNDS], copy[ROUNDS], exposed[ROUNDS], landed[ROUNDS], plain;
    uint64_t pace = 0;
    struct probe_copy plain_copy;
    char name[64];
    struct probe_result r = {.bench = "handoff", .name = name};

    if (probe_copy_open(&plain_copy, bytes) < 0) {
        die("memory", NULL);
    }
    for (int i = -WARM_ROUNDS; i < ROUNDS; i++) { /* the first ones touch the memory */
        struct result v = one(d, 0);

        pace = 2 * v.ns;
        if (i >= 0) {
            rate[i] = (double)bytes / (double)v.ns;
            copy[i] = probe_copy_gb_per_s(&plain_copy);
        }
    }
    for (int i = 0; i < ROUNDS; i++) {
        struct result v = one(d, pace);

        exposed[i] = (double)v.exposed_ns / 1e6;
        landed[i] = v.landed;
    }
    probe_copy_close(&plain_copy);
    snprintf(name, sizeof(name), "%s %uk", o->name, n_tokens / 1024);
    plain = probe_median(copy, ROUNDS);
    r.metric = "gb_per_s";
    r.unit = "GB/s";
    r.value = probe_median(rate, ROUNDS);
    r.ceiling = plain < o->perf ? "memcpy" : "ucx_perftest";
    r.ceiling_value = BT_MIN(plain, o->perf);
    if (o->cached > 0) {
        r.peer = "ucx_perftest in the cache";
        r.peer_value = o->cached;
        r.peer_ratio = r.value / r.peer_value;
    }
    probe_print(&r, o->json);
    r = (struct probe_result){.bench = "handoff",
                              .name = name,
                              .metric = "exposed_ms",
                              .unit = "ms",
                              .value = probe_median(exposed, ROUNDS)};
    probe_print(&r, o->json);
    r.metric = "landed_percent";
    r.unit = "%";
    r.value = probe_median(landed, ROUNDS);
    probe_print(&r, o->json);
}

int main(int argc, char **argv)
{
    struct options o = {.name = "shm"};
    static struct decode d;
    int down[2], up[2];

    for (int i = 1; i < argc; i++) {
        const char *v = i + 1 < argc ? argv[i + 1] : "";

        o.json = o.json || strcmp(argv[i], "--json") == 0;
        o.name = strcmp(argv[i], "--case") == 0 ? v : o.name;
        transports = strcmp(argv[i], "--transports") == 0 ? v : transports;
        o.perf = strcmp(argv[i], "--perftest") == 0 ? strtod(v, NULL) : o.perf;
        o.cached = strcmp(argv[i], "--cached") == 0 ? strtod(v, NULL) : o.cached;
        n_tokens = strcmp(argv[i], "--tokens") == 0 ? (uint32_t)strtoul(v, NULL, 10) : n_tokens;
    }
    n_tokens = n_tokens / CHUNK_TOKENS * CHUNK_TOKENS;
    if (o.perf <= 0 || n_tokens == 0 || n_tokens > 65536 || pipe(down) != 0 || pipe(up) != 0) {
        fprintf(stderr, "run it by tests/bench/run handoff\n");
        return 2;
    }
    if (fork() == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        close(down[1]);
        close(up[0]);
        run_prefill(down[0], up[1]);
    }
    close(down[0]);
    close(up[1]);
    d.to = down[1];
    d.from = up[0];
    open_side(&d.s, "d0", 2);
    read_all(d.from, d.address, sizeof(d.address));
    measure(&d, &o);
    close(d.to);
    wait(NULL);
    close_side(&d.s);
    close(d.from);
    return 0;
}
