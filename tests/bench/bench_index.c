/* The router's prefix index at size: bytes per (block, node) entry, events a second, look-ups of a
 * 100k-token prompt with keys given while events come in.
 *
 *   bench_index [--json] [--entries N] [--nodes N] [--seconds N]
 *
 * A second thread packs events as nodes do (stored and removed blocks, so that the size stays) and
 * posts the bytes; the loop's thread unpacks and applies them by the router's own decoder and looks
 * up prompts in between. The ceiling of a look-up is reading as many random cache lines of a table
 * of that size, with the same distance of prefetching, without events. */
#include "common/base/buf.h"
#include "common/thr/mailbox.h"
#include "common/thr/thread.h"
#include "common/thr/time.h"
#include "router/index/feed.h"

#include <getopt.h>
#include <semaphore.h>
#include <stdio.h>
#include <stdlib.h>

#define RUN       781 /* blocks of 128 tokens in a prompt of 100,000 */
#define MESSAGE   512 /* changes in a message */
#define IN_FLIGHT 64  /* messages */
#define MAX_LOOKS 200000

struct bench {
    bool json;
    uint64_t entries;
    unsigned nodes, seconds;
    struct rt_index *index;
    struct rt_feed *feeds;
    uint64_t *next; /* per node: number of its next block */
    uint64_t window;
    struct bt_mailbox box;
    struct bt_list taken; /* from the box, not handled yet */
    int wake_fd;
    sem_t room;
    bool quit; /* atomic */
};

struct message {
    struct bt_msg msg;
    unsigned node;
    size_t n;
    uint8_t bytes[];
};

/* Fingerprint of block i of a node: random, and known without a table. */
static uint64_t fp(unsigned node, uint64_t i)
{
    uint64_t z = (uint64_t)node << 40 ^ i;

    z = (z + 0x9e3779b97f4a7c15ull) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ z >> 27) * 0x94d049bb133111ebull;
    return z ^ z >> 31;
}

/* ---- the other core ---- */

static struct message *make(unsigned node, uint64_t seq, uint64_t at, uint64_t window)
{
    Baton__V1__CacheEvents m = BATON__V1__CACHE_EVENTS__INIT;
    Baton__V1__CacheEvent e[2], *p[2] = {&e[0], &e[1]};
    uint64_t blocks[2][MESSAGE / 2];
    struct message *out;

    for (int k = 0; k < 2; k++) {
        baton__v1__cache_event__init(&e[k]);
        e[k].change =
            k ? BATON__V1__CACHE_CHANGE__CACHE_REMOVED : BATON__V1__CACHE_CHANGE__CACHE_STORED;
        e[k].n_blocks = MESSAGE / 2;
        e[k].blocks = blocks[k];
        for (uint64_t i = 0; i < MESSAGE / 2; i++) {
            blocks[k][i] = fp(node, at + i - (k ? window : 0));
        }
    }
    m.seq = seq;
    m.n_events = 2;
    m.events = p;
    out = malloc(sizeof(*out) + baton__v1__cache_events__get_packed_size(&m));
    if (out) {
        bt_list_init(&out->msg.link);
        out->node = node;
        out->n = baton__v1__cache_events__pack(&m, out->bytes);
    }
    return out;
}

static void on_message(struct bt_msg *msg, void *consumer)
{
    struct message *m = BT_CONTAINER_OF(msg, struct message, msg);
    struct bench *b = consumer;
    Baton__V1__CacheEvents *e = baton__v1__cache_events__unpack(NULL, m->n, m->bytes);

    if (e) {
        if (rt_feed_events(&b->feeds[m->node], e, 0).ask) {
            fprintf(stderr, "a gap\n");
            exit(1);
        }
        baton__v1__cache_events__free_unpacked(e, NULL);
    }
    free(m);
    sem_post(&b->room);
}

static void *producer(void *arg)
{
    struct bench *b = arg;
    uint64_t *seq = bt_calloc(b->nodes, sizeof(*seq));

    for (unsigned n = 0; seq && n < b->nodes; n++) {
        seq[n] = b->feeds[n].seq + 1;
    }
    for (unsigned n = 0; seq && !__atomic_load_n(&b->quit, __ATOMIC_RELAXED);
         n = (n + 1) % b->nodes) {
        struct message *m = make(n, seq[n], b->next[n], b->window);

        if (!m) {
            break;
        }
        m->msg.handle = on_message;
        seq[n] += MESSAGE;
        b->next[n] += MESSAGE / 2;
        sem_wait(&b->room);
        bt_mailbox_push(&b->box, &m->msg);
    }
    free(seq);
    return NULL;
}

/* ---- the loop's core ---- */

static int fill(struct bench *b)
{
    struct kv_event ev[MESSAGE];

    for (unsigned n = 0; n < b->nodes; n++) {
        if (rt_feed_open(&b->feeds[n], b->index) < 0) {
            return 1;
        }
    }
    for (uint64_t at = 0; at < b->window; at += MESSAGE) {
        uint64_t k = BT_MIN(b->window - at, (uint64_t)MESSAGE);

        for (unsigned n = 0; n < b->nodes; n++) {
            for (uint64_t i = 0; i < k; i++) {
                ev[i] = (struct kv_event){fp(n, at + i), KV_EVENT_STORED, 0};
            }
            if (rt_index_apply(b->index, b->feeds[n].view, ev, k) < 0) {
                return 1;
            }
            b->next[n] = at + k;
        }
    }
    return 0;
}

static int by_value(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;

    return (x > y) - (x < y);
}

static double us(const uint64_t *sorted, size_t n, double q)
{
    return n ? (double)sorted[(size_t)((double)(n - 1) * q)] / 1e3 : 0;
}

/* Of this thread: without what other processes take from it. */
static uint64_t cpu_ns(void)
{
    struct timespec ts;

    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &ts);
    return (uint64_t)ts.tv_sec * BT_NS_PER_S + (uint64_t)ts.tv_nsec;
}

struct took {
    uint64_t wall_ns, cpu_ns;
};

/* One look-up of a prompt that lies on one node; what is being removed is left alone. */
static struct took look(struct bench *b, uint64_t *seed, uint64_t *fps)
{
    uint64_t start, cpu, from;
    unsigned node;
    size_t n;

    *seed = *seed * 6364136223846793005ull + 1442695040888963407ull;
    node = (unsigned)(*seed >> 33) % b->nodes;
    from = b->feeds[node].changes / 2 + b->window / 4 + (*seed >> 20) % (b->window / 2);
    for (uint64_t i = 0; i < RUN; i++) {
        fps[i] = fp(node, from + i);
    }
    cpu = cpu_ns();
    start = bt_now_ns();
    if (rt_index_look(b->index, fps, RUN, &n)->upto[0] != RUN || n != 1) {
        fprintf(stderr, "a block is missing\n");
        exit(1);
    }
    start = bt_now_ns() - start;
    return (struct took){start, cpu_ns() - cpu};
}

/* Random lines of a table of the index's size, fetched twelve ahead. */
static struct took floor_of(uint64_t bytes)
{
    uint64_t n = bytes / 64, seed = 3, sum = 0, *at = bt_calloc(RUN, sizeof(*at));
    volatile uint8_t *table = malloc(bytes);
    static uint64_t ns[2000];

    if (!table || !at || n == 0) {
        return (struct took){0};
    }
    for (uint64_t i = 0; i < n; i++) {
        table[i * 64] = 1;
    }
    for (size_t r = 0; r < BT_ARRAY_LEN(ns); r++) {
        uint64_t start;

        for (int i = 0; i < RUN; i++) {
            seed = seed * 6364136223846793005ull + 1442695040888963407ull;
            at[i] = (seed >> 20) % n * 64;
        }
        start = bt_now_ns();
        for (int i = 0; i < RUN; i++) {
            __builtin_prefetch((const void *)&table[at[BT_MIN(i + 12, RUN - 1)]]);
            sum += table[at[i]];
        }
        ns[r] = bt_now_ns() - start;
    }
    qsort(ns, BT_ARRAY_LEN(ns), sizeof(*ns), by_value);
    free((void *)(uintptr_t)table);
    free(at);
    return (struct took){ns[BT_ARRAY_LEN(ns) / 2], ns[BT_ARRAY_LEN(ns) * 99 / 100 + (sum == 0)]};
}

static void print(const struct bench *b, const char *metric, double value, const char *unit)
{
    if (b->json) {
        printf("{\"bench\":\"index\",\"case\":\"%llu entries\",\"metric\":\"%s\",\"value\":%.3f,"
               "\"unit\":\"%s\"}\n",
               (unsigned long long)b->entries, metric, value, unit);
    } else {
        printf("%-28s %14.2f %s\n", metric, value, unit);
    }
}

static void print_look(const struct bench *b, const char *metric, double value, double ceiling)
{
    if (b->json) {
        printf("{\"bench\":\"index\",\"case\":\"%llu entries\",\"metric\":\"%s\",\"value\":%.3f,"
               "\"unit\":\"us\",\"ceiling\":\"random lines of memory\",\"ceiling_value\":%.3f,"
               "\"ratio\":%.3f}\n",
               (unsigned long long)b->entries, metric, value, ceiling, ceiling / value);
    } else {
        printf("%-28s %14.2f us  (as many random lines: %.2f us)\n", metric, value, ceiling);
    }
}

/* Up to eight messages; false if there were none. */
static bool handle_some(struct bench *b)
{
    if (bt_list_empty(&b->taken)) {
        bt_mailbox_detach(&b->box, &b->taken);
    }
    for (int i = 0; i < 8; i++) {
        struct bt_list *it = bt_list_pop_front(&b->taken);

        if (!it) {
            return i > 0;
        }
        on_message(BT_CONTAINER_OF(it, struct bt_msg, link), b);
    }
    return true;
}

static int measure(struct bench *b)
{
    uint64_t *quiet = bt_calloc(MAX_LOOKS, sizeof(*quiet)), fps[RUN], seed = 7, start, end;
    uint64_t *busy = bt_calloc(MAX_LOOKS, sizeof(*busy)), apply_ns = 0, changes = 0;
    uint64_t *cpu = bt_calloc(MAX_LOOKS, sizeof(*cpu));
    size_t n_quiet = 0, n_busy = 0;
    struct rt_index_stats s = rt_index_stats(b->index);
    struct took lines = floor_of(s.bytes);
    double p50 = (double)lines.wall_ns / 1e3, p99 = (double)lines.cpu_ns / 1e3;
    struct bt_err err = {0};
    pthread_t thread;

    if (!quiet || !busy || !cpu) {
        return 1;
    }
    while (n_quiet < 2000) {
        quiet[n_quiet++] = look(b, &seed, fps).wall_ns;
    }
    if (bt_thread_start(&thread, "events", producer, b, &err) < 0) {
        fprintf(stderr, "%s\n", err.msg);
        return 1;
    }
    start = bt_now_ns();
    end = start + b->seconds * BT_NS_PER_S;
    while (bt_now_ns() < end) {
        uint64_t t = bt_now_ns();

        /* As the loop does: a few messages, then whatever else there is. */
        if (!handle_some(b)) {
            sched_yield();
            continue;
        }
        apply_ns += bt_now_ns() - t;
        if (n_busy < MAX_LOOKS) {
            struct took took = look(b, &seed, fps);

            busy[n_busy] = took.wall_ns;
            cpu[n_busy++] = took.cpu_ns;
        }
    }
    end = bt_now_ns();
    __atomic_store_n(&b->quit, true, __ATOMIC_RELAXED);
    while (handle_some(b)) {
    }
    pthread_join(thread, NULL);
    while (handle_some(b)) {
    }
    for (unsigned n = 0; n < b->nodes; n++) {
        changes += b->feeds[n].changes;
    }
    qsort(quiet, n_quiet, sizeof(*quiet), by_value);
    qsort(busy, n_busy, sizeof(*busy), by_value);
    qsort(cpu, n_busy, sizeof(*cpu), by_value);
    print(b, "bytes_per_entry", (double)s.bytes / (double)s.entries, "bytes");
    print_look(b, "lookup_100k_p50_us", us(busy, n_busy, 0.5), p50);
    print_look(b, "lookup_100k_p99_us", us(busy, n_busy, 0.99), p99);
    print_look(b, "lookup_100k_cpu_p99_us", us(cpu, n_busy, 0.99), p99);
    print_look(b, "lookup_100k_quiet_p50_us", us(quiet, n_quiet, 0.5), p50);
    print_look(b, "lookup_100k_quiet_p99_us", us(quiet, n_quiet, 0.99), p99);
    print(b, "events_per_s", (double)changes / ((double)(end - start) / 1e9), "1/s");
    print(b, "event_ns", (double)apply_ns / (double)BT_MAX(changes, 1ull), "ns");
    print(b, "lookups_per_s", (double)n_busy / ((double)(end - start) / 1e9), "1/s");
    free(quiet);
    free(busy);
    free(cpu);
    return n_busy > 100 ? 0 : 1;
}

int main(int argc, char **argv)
{
    static const struct option options[] = {{"json", no_argument, NULL, 'j'},
                                            {"entries", required_argument, NULL, 'e'},
                                            {"nodes", required_argument, NULL, 'n'},
                                            {"seconds", required_argument, NULL, 's'},
                                            {0}};
    struct bench b = {.entries = 10000000, .nodes = 64, .seconds = 3};
    struct bt_err err = {0};
    int c, rc;

    while ((c = getopt_long(argc, argv, "", options, NULL)) != -1) {
        switch (c) {
        case 'j':
            b.json = true;
            break;
        case 'e':
            b.entries = strtoull(optarg, NULL, 10);
            break;
        case 'n':
            b.nodes = (unsigned)strtoul(optarg, NULL, 10);
            break;
        case 's':
            b.seconds = (unsigned)strtoul(optarg, NULL, 10);
            break;
        default:
            return 2;
        }
    }
    if (b.nodes < 1 || b.nodes > 1024 || b.entries / b.nodes < 4 * RUN || b.seconds < 1) {
        fprintf(stderr, "1 to 1024 nodes of at least %d entries each\n", 4 * RUN);
        return 2;
    }
    b.window = b.entries / b.nodes;
    b.feeds = bt_calloc(b.nodes, sizeof(*b.feeds));
    b.next = bt_calloc(b.nodes, sizeof(*b.next));
    bt_list_init(&b.taken);
    sem_init(&b.room, 0, IN_FLIGHT);
    if (!b.feeds || !b.next || rt_index_create(&b.index, &err) < 0 ||
        bt_eventfd_create(&b.wake_fd, &err) < 0) {
        fprintf(stderr, "%s\n", err.msg);
        return 1;
    }
    bt_mailbox_init(&b.box, bt_eventfd_wake, &b.wake_fd);
    rc = fill(&b);
    rc = rc ? rc : measure(&b);
    bt_mailbox_fini(&b.box);
    rt_index_destroy(b.index);
    free(b.feeds);
    free(b.next);
    return rc;
}
