/* Speed of the whole engine (scheduler, forward pass, sampling, thread) on one model.
 *
 *   prefill N        a prompt of N tokens until its first token
 *   decode batch B   B requests together, tokens a second once all of them run
 *
 * Ceilings of the same run: for decode the time to read every weight once a step at the rate at
 * which the same number of threads read that many bytes; for prefill the time of all multiply-adds
 * at the rate of the widest integer instruction (VNNI; AMX tile products are above it).
 *
 *   --peer COMMAND   a peer that answers the same cases (peer.h), by turns with our runs; its ratio
 *                    is the median of the ratios of neighbouring runs
 *   --only TEXT      only cases whose name ("prefill 512", "decode 8") begins with TEXT
 *   --cpu            tokens a second of processor time (of all threads): what a machine shared with
 *                    other work can still tell
 *   --profile        after each case its ops: time, bytes, operations, share of the limit, which is
 *                    the longer of bytes over read rate and operations over multiply-add rate
 */
#include "common/base/buf.h"
#include "common/thr/thread.h"
#include "common/thr/time.h"
#include "kernels/core/limits.h"
#include "kernels/core/profile.h"
#include "kernels/engine/engine.h"
#include "tests/bench/peer.h"
#include "tests/bench/probe.h"

#include <getopt.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>

#define MAX_RUNS      32
#define MAX_BATCH     64
#define DECODE_PROMPT 16
#define DECODE_TOKENS 64
#define PROBE_NS      (100 * BT_NS_PER_MS)
#define POOL_BYTES    (64u << 20) /* a prompt of 2,048 tokens and some */
#define WARM_ROUNDS   6           /* prompts of 512 tokens that take every page of it once */

struct bench {
    bool json, cpu, profile;
    struct peer peer; /* pid 0: none */
    int threads, runs;
    const char *isa, *path, *only;
    struct bt_model_file *file;
    const struct bt_model_config *c;
    const char *dtype;                    /* of the first projection */
    double matmul_weights, block_weights; /* elements: all that a decoded token meets, and
                                             without the output projection */
    double weight_bytes;                  /* read once in each decode step */
    struct kn_engine *engine;
    pthread_mutex_t lock;
    pthread_cond_t cond;
    uint32_t n_done, n_started, n_total;     /* of the current round, guarded by lock */
    uint64_t tokens, all_started_ns, end_ns; /* by now_ns */
    int rc;
};

/* Wall or processor time, as asked. */
static uint64_t now_ns(const struct bench *b)
{
    struct timespec t;

    if (!b->cpu) {
        return bt_now_ns();
    }
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (uint64_t)t.tv_sec * BT_NS_PER_S + (uint64_t)t.tv_nsec;
}

static void on_step(void *arg, struct kn_step *take_step)
{
    struct bench *b = arg;
    uint64_t now = now_ns(b);

    pthread_mutex_lock(&b->lock);
    for (size_t i = 0; i < take_step->n_outputs; i++) {
        const struct kn_output *o = &take_step->outputs[i];

        if (o->offset == 0 && o->n_tokens > 0) {
            b->n_started++;
        } else if (b->all_started_ns) {
            b->tokens += o->n_tokens;
        }
        b->rc = o->rc < 0 ? o->rc : b->rc;
        if (o->finish != KN_FINISH_NONE || o->rc < 0) {
            b->n_done++;
        }
    }
    if (b->n_started == b->n_total && !b->all_started_ns) {
        b->all_started_ns = now;
    }
    b->end_ns = now;
    pthread_cond_signal(&b->cond);
    pthread_mutex_unlock(&b->lock);
    kn_step_free(take_step);
}

/* n requests of `prompt` tokens at once until all are over. */
static int round_trip(struct bench *b, uint32_t n, uint32_t prompt, uint32_t answer)
{
    struct wire_sampling s;
    int32_t *ids = bt_calloc(prompt, sizeof(*ids));
    struct bt_err err;
    int rc = BT_OK;

    wire_sampling_defaults(&s);
    s.max_tokens = answer;
    s.ignore_eos = true;
    b->n_done = b->n_started = 0;
    b->n_total = n;
    b->tokens = b->all_started_ns = 0;
    for (uint32_t i = 0; i < n && rc == BT_OK; i++) {
        struct kn_submit_args a = {.tag = i,
                                   .prompt = ids,
                                   .n_prompt = prompt,
                                   .sampling = &s,
                                   .claim = i,
                                   .deadline_ns = BT_NEVER_NS};

        for (uint32_t k = 0; k < prompt; k++) {
            ids[k] = (int32_t)(1 + (i * 131 + k * 7919) % (uint32_t)(b->c->n_vocab - 1));
        }
        rc = kn_engine_submit(b->engine, &a, &err);
        if (rc < 0) {
            fprintf(stderr, "submit: %s\n", err.msg);
        }
    }
    free(ids);
    pthread_mutex_lock(&b->lock);
    while (rc == BT_OK && b->n_done < n) {
        pthread_cond_wait(&b->cond, &b->lock);
    }
    rc = rc < 0 ? rc : b->rc;
    pthread_mutex_unlock(&b->lock);
    return rc;
}

/* Tokens a second of one round. */
static int measure(struct bench *b, bool decode, uint32_t n, double *ret)
{
    uint64_t start = now_ns(b);
    int rc = decode ? round_trip(b, n, DECODE_PROMPT, DECODE_TOKENS) : round_trip(b, 1, n, 1);

    if (rc < 0) {
        return rc;
    }
    if (decode) {
        *ret = (double)b->tokens / ((double)(b->end_ns - b->all_started_ns) / 1e9);
    } else {
        *ret = n / ((double)(b->end_ns - start) / 1e9);
    }
    return BT_OK;
}

static void weigh(struct bench *b)
{
    const struct bt_tensor *q = bt_model_tensor(b->file, "blk.0.attn_q.weight");

    b->c = bt_model_config(b->file);
    b->dtype = q ? bt_dtype_name(q->dtype) : "unknown";
    for (size_t i = 0; i < bt_model_n_tensors(b->file); i++) {
        const struct bt_tensor *t = bt_model_tensor_at(b->file, i);
        bool embedding = bt_str_eq(t->name, BT_STR("token_embd.weight"));
        double n = (double)t->shape[0] * (t->n_dims > 1 ? (double)t->shape[1] : 1);

        if (t->n_dims < 2 || (embedding && !b->c->tied)) {
            continue;
        }
        b->matmul_weights += n;
        b->weight_bytes += (double)t->bytes;
        b->block_weights += t->name.n > 4 && memcmp(t->name.p, "blk.", 4) == 0 ? n : 0;
    }
}

static double prefill_ops(const struct bench *b, double n)
{
    /* The output projection meets the last token alone; attention: scores and values, causal. */
    double attn = 2.0 * 2.0 * b->c->n_heads * b->c->head_dim * n * n / 2 * b->c->n_layers;

    return 2 * b->block_weights * n + 2 * (b->matmul_weights - b->block_weights) + attn;
}

/* Bytes a second, from a buffer of the weights' size. Call it before every run and take medians. */
static double read_rate(const struct bench *b)
{
    static char *buf; /* kept */
    size_t n = (size_t)b->weight_bytes;

    if (!buf) {
        buf = mmap(NULL, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        BT_BUG_ON(buf == MAP_FAILED);
        madvise(buf, n, MADV_HUGEPAGE);
        memset(buf, 1, n);
    }
    return kn_limit_read(b->threads, PROBE_NS, buf, n);
}

/* Tokens a second that the machine allows, now. */
static double ceiling(const struct bench *b, bool decode, uint32_t n, const char **ret_name)
{
    if (decode) {
        *ret_name = "memory read";
        return read_rate(b) * n / b->weight_bytes;
    }
    return kn_limit_mac(b->threads, PROBE_NS, ret_name) * n / prefill_ops(b, n);
}

static double median_ratio(const double *a, const double *b, int n)
{
    double r[MAX_RUNS];

    for (int i = 0; i < n; i++) {
        r[i] = a[i] / b[i];
    }
    return probe_median(r, n);
}

/* What the ops did between two readings, the longest first. */
static void print_profile(const struct bench *b, const struct kn_op_count *then)
{
    struct kn_op_count now[KN_OP_COUNT];
    double read = read_rate(b), total = 0;
    const char *name;
    double mac = kn_limit_mac(b->threads, PROBE_NS, &name);
    bool shown[KN_OP_COUNT] = {false};
    FILE *to = b->json ? stderr : stdout;

    kn_profile_read(now);
    for (int i = 0; i < KN_OP_COUNT; i++) {
        now[i].calls -= then[i].calls;
        now[i].ns -= then[i].ns;
        now[i].bytes -= then[i].bytes;
        now[i].operations -= then[i].operations;
        total += (double)now[i].ns;
    }
    fprintf(to, "  %-10s %8s %6s %10s %10s %8s %8s %6s\n", "op", "ms a run", "share", "MB", "MFLOP",
            "GB/s", "GFLOP/s", "limit");
    for (int n = 0; n < KN_OP_COUNT; n++) {
        int at = -1;
        double ns, limit;

        for (int i = 0; i < KN_OP_COUNT; i++) {
            at = !shown[i] && (at < 0 || now[i].ns > now[at].ns) ? i : at;
        }
        shown[at] = true;
        ns = (double)now[at].ns;
        limit = BT_MAX((double)now[at].bytes / read, (double)now[at].operations / mac) * 1e9;
        if (now[at].calls) {
            fprintf(to, "  %-10s %8.3f %6.3f %10.1f %10.1f %8.1f %8.1f %6.3f\n",
                    kn_op_name((enum kn_op)at), ns / 1e6 / b->runs, ns / total,
                    (double)now[at].bytes / 1e6 / b->runs,
                    (double)now[at].operations / 1e6 / b->runs, (double)now[at].bytes / ns,
                    (double)now[at].operations / ns, limit / ns);
        }
    }
}

static int run_case(struct bench *b, bool decode, uint32_t n)
{
    char name[64];
    char ask[64];
    double v[MAX_RUNS], limit[MAX_RUNS], theirs[MAX_RUNS];
    struct kn_op_count before[KN_OP_COUNT];
    struct probe_result r = {.bench = "engine",
                             .name = name,
                             .metric = b->cpu ? "tokens_per_cpu_s" : "tokens_per_s",
                             .unit = b->cpu ? "tokens/cpu s" : "tokens/s"};

    snprintf(ask, sizeof(ask), decode ? "decode %u" : "prefill %u", n);
    if (strncmp(ask, b->only, strlen(b->only)) != 0) {
        return BT_OK;
    }
    for (int i = -1; i < b->runs; i++) { /* the first one warms up */
        int at = BT_MAX(i, 0), rc;

        limit[at] = b->cpu ? 1 : ceiling(b, decode, n, &r.ceiling);
        if (i == 0) {
            kn_profile_read(before);
        }
        rc = measure(b, decode, n, &v[at]);
        if (rc < 0) {
            return rc;
        }
        theirs[at] = b->peer.pid ? peer_ask(&b->peer, ask) : 0;
        if (b->peer.pid && theirs[at] <= 0) {
            return BT_E_INTERNAL;
        }
    }
    if (b->peer.pid) {
        r.peer = b->peer.name;
        r.peer_ratio = median_ratio(v, theirs, b->runs);
        r.peer_value = probe_median(theirs, b->runs);
    }
    r.value = probe_median(v, b->runs);
    r.ceiling_value = probe_median(limit, b->runs);
    snprintf(name, sizeof(name), decode ? "%s decode batch %u" : "%s prefill %u", b->dtype, n);
    probe_print(&r, b->json);
    if (b->profile) {
        print_profile(b, before);
    }
    return BT_OK;
}

static int run_all(struct bench *b)
{
    static const uint32_t prefills[] = {512, 2048}, batches[] = {1, 8};
    int rc = BT_OK;

    /* The system gives and clears memory when it is first written, which a node does once. */
    for (int i = 0; i < WARM_ROUNDS && rc == BT_OK; i++) {
        rc = round_trip(b, 1, 512, 1);
    }
    for (size_t i = 0; i < BT_ARRAY_LEN(prefills) && rc == BT_OK; i++) {
        rc = run_case(b, false, prefills[i]);
    }
    for (size_t i = 0; i < BT_ARRAY_LEN(batches) && rc == BT_OK; i++) {
        rc = run_case(b, true, batches[i]);
    }
    return rc;
}

static int create(struct bench *b, struct bt_err *err)
{
    struct kn_engine_cfg cfg = {
        .mem = &bt_mem_host,
        .n_threads = b->threads,
        .isa = b->isa,
        .kv_dtype = KV_DTYPE_F16,
        .page_tokens = 16,
        .pool_bytes = POOL_BYTES,
        .max_batch_tokens = 512,
        .max_running = MAX_BATCH,
        .max_waiting = MAX_BATCH,
        .emit = on_step,
        .emit_arg = b,
    };
    int rc = bt_model_open(b->path, &b->file, err);

    if (rc < 0) {
        return rc;
    }
    weigh(b);
    cfg.file = b->file;
    rc = kn_engine_create(&cfg, &b->engine, err);
    return rc < 0 ? rc : kn_engine_start(b->engine, NULL, err);
}

static const char *default_model(char *path, size_t n)
{
    const char *cache = getenv("XDG_CACHE_HOME"), *home = getenv("HOME");

    if (cache && *cache) {
        snprintf(path, n, "%s/baton/models/SmolLM2-135M-Instruct.Q4_1.gguf", cache);
    } else {
        snprintf(path, n, "%s/.cache/baton/models/SmolLM2-135M-Instruct.Q4_1.gguf",
                 home ? home : "");
    }
    return path;
}

int main(int argc, char **argv)
{
    static const struct option options[] = {
        {"json", no_argument, NULL, 'j'},          {"model", required_argument, NULL, 'm'},
        {"threads", required_argument, NULL, 't'}, {"runs", required_argument, NULL, 'r'},
        {"isa", required_argument, NULL, 'i'},     {"peer", required_argument, NULL, 'p'},
        {"only", required_argument, NULL, 'y'},    {"cpu", no_argument, NULL, 'c'},
        {"profile", no_argument, NULL, 'o'},       {0}};
    char path[4096];
    const char *peer = NULL;
    struct bench b = {.threads = bt_cpus_usable(),
                      .runs = 5,
                      .isa = "auto",
                      .only = "",
                      .path = default_model(path, sizeof(path)),
                      .lock = PTHREAD_MUTEX_INITIALIZER,
                      .cond = PTHREAD_COND_INITIALIZER};
    struct bt_err err = {.rc = BT_OK};
    int opt, rc;

    while ((opt = getopt_long(argc, argv, "", options, NULL)) != -1) {
        switch (opt) {
        case 'j':
            b.json = true;
            break;
        case 'm':
            b.path = optarg;
            break;
        case 't':
            b.threads = (int)strtol(optarg, NULL, 10);
            break;
        case 'r':
            b.runs = (int)strtol(optarg, NULL, 10);
            break;
        case 'i':
            b.isa = optarg;
            break;
        case 'p':
            peer = optarg;
            break;
        case 'y':
            b.only = optarg;
            break;
        case 'c':
            b.cpu = true;
            break;
        case 'o':
            b.profile = true;
            kn_profile_enable();
            break;
        default:
            return 2;
        }
    }
    b.runs = b.runs < 1 ? 1 : BT_MIN(b.runs, MAX_RUNS);
    b.threads = BT_MAX(1, b.threads);
    rc = create(&b, &err);
    if (rc == BT_OK && peer) {
        char command[8192];

        snprintf(command, sizeof(command), "exec %s --model '%s' --threads %d%s", peer, b.path,
                 b.threads, b.cpu ? " --cpu" : "");
        rc = peer_start(&b.peer, command) ? BT_OK : BT_FAIL(&err, BT_E_INTERNAL, "no peer");
    }
    if (rc == BT_OK && b.peer.pid && !b.json) {
        printf("peer: %s, %d threads\n", b.peer.name, b.threads);
    }
    if (rc < 0) {
        fprintf(stderr, "bench_engine: %s\n", bt_err_msg(&err, rc));
    } else {
        rc = run_all(&b);
    }
    if (b.engine && !kn_engine_stop(b.engine)) {
        rc = BT_E_INTERNAL;
    }
    peer_stop(&b.peer);
    kn_engine_destroy(b.engine);
    bt_model_close(b.file);
    return rc < 0 ? 1 : 0;
}
