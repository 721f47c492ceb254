/* Requests through a whole engine on a CUDA device: its scheduler and thread, and the pages' copy
 * in host memory. Llama-3.1-8B shapes, random weights; N prompts of 1,024 ids and 128 answered
 * tokens each, all at once, with and without planning a step while the one before runs. The floor
 * is that of bench_gpu_engine's case of the same name, which does the same without an engine.
 *
 *   bench_gpu_requests [--json] [N]...      64 without any
 *
 * Threads: main, which submits and waits; the engine's, which emits. */
#include "kernels/cuda/module.h"
#include "tests/gpu/made_model.h"

#include "common/base/buf.h"
#include "common/thr/time.h"
#include "kernels/engine/engine.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

enum { IN = 1024, OUT = 128, PAGE = 64, BUDGET = 8192 };

struct requests {
    const struct bt_model_file *file;
    const struct kn_device_ops *device;
    int n;            /* requests */
    bool never_ahead; /* no step is queued before the one before it has ended */
};

struct outcome {
    double seconds;         /* from the first submit to the last token */
    double first_s, last_s; /* until a first token: the soonest, the last */
    unsigned long long steps, steps_ahead;
};

struct run {
    struct kn_engine *engine;
    int n_vocab;
    pthread_mutex_t lock;
    pthread_cond_t cond;
    int n_first, n_over, n_failed; /* guarded by lock, as the rest */
    uint64_t first_ns, last_first_ns, end_ns;
};

static void on_step(void *arg, struct kn_step *take_step)
{
    struct run *r = arg;
    uint64_t now = bt_now_ns();

    pthread_mutex_lock(&r->lock);
    for (size_t i = 0; i < take_step->n_outputs; i++) {
        const struct kn_output *o = &take_step->outputs[i];

        if (o->offset == 0 && o->n_tokens > 0) {
            r->first_ns = r->n_first++ == 0 ? now : r->first_ns;
            r->last_first_ns = now;
        }
        if (o->finish != KN_FINISH_NONE || o->rc < 0) {
            r->n_over++;
            r->n_failed += o->rc < 0;
            r->end_ns = now;
        }
    }
    pthread_cond_signal(&r->cond);
    pthread_mutex_unlock(&r->lock);
    kn_step_free(take_step);
}

static bool submit(struct run *r, uint64_t tag)
{
    static int32_t prompt[IN];
    struct wire_sampling sampling;
    struct kn_submit_args a = {.tag = tag,
                               .leg = KN_LEG_LOCAL,
                               .prompt = prompt,
                               .n_prompt = IN,
                               .sampling = &sampling,
                               .claim = tag,
                               .deadline_ns = BT_NEVER_NS};
    struct bt_err err = {0};

    wire_sampling_defaults(&sampling);
    sampling.temperature = 0;
    sampling.max_tokens = OUT;
    sampling.ignore_eos = true;
    for (uint32_t t = 0; t < IN; t++) {
        prompt[t] = (int32_t)(((uint32_t)tag * 7919 + t) * 2654435761u % (uint32_t)r->n_vocab);
    }
    if (kn_engine_submit(r->engine, &a, &err) < 0) {
        fprintf(stderr, "submit: %s\n", err.msg);
        return false;
    }
    return true;
}

static bool run_once(struct run *r, int n, uint64_t tag0, struct outcome *ret)
{
    struct kn_engine_stats before = kn_engine_stats(r->engine), after;
    uint64_t start = bt_now_ns();
    bool ok = true;

    r->n_first = r->n_over = r->n_failed = 0;
    for (int i = 0; i < n && ok; i++) {
        ok = submit(r, tag0 + (uint64_t)i);
    }
    pthread_mutex_lock(&r->lock);
    while (ok && r->n_over < n) {
        pthread_cond_wait(&r->cond, &r->lock);
    }
    ok = ok && r->n_failed == 0;
    pthread_mutex_unlock(&r->lock);
    after = kn_engine_stats(r->engine);
    *ret = (struct outcome){
        .seconds = (double)(r->end_ns - start) / 1e9,
        .first_s = (double)(r->first_ns - start) / 1e9,
        .last_s = (double)(r->last_first_ns - start) / 1e9,
        .steps = after.steps - before.steps,
        .steps_ahead = after.steps_ahead - before.steps_ahead,
    };
    return ok;
}

/* Makes an engine, runs them twice, and reports the second time. */
static bool run_requests(const struct requests *a, struct outcome *ret)
{
    const struct bt_model_config *c = bt_model_config(a->file);
    size_t page = (size_t)c->n_layers * 2 * (size_t)c->n_kv_heads * (size_t)c->head_dim * PAGE * 2;
    struct run r = {
        .n_vocab = c->n_vocab, .lock = PTHREAD_MUTEX_INITIALIZER, .cond = PTHREAD_COND_INITIALIZER};
    struct kn_engine_cfg cfg = {.file = a->file,
                                .device = a->device,
                                .mem = &bt_mem_host,
                                .n_threads = 1,
                                .page_tokens = PAGE,
                                .pool_bytes = page * (size_t)(a->n * ((IN + OUT) / PAGE) + 8),
                                .max_ctx = 4096,
                                .max_batch_tokens = BUDGET,
                                .max_running = a->n,
                                .max_waiting = a->n,
                                .never_ahead = a->never_ahead,
                                .random_seed = 42,
                                .emit = on_step,
                                .emit_arg = &r};
    struct bt_err err = {0};
    bool ok;

    if (kn_engine_create(&cfg, &r.engine, &err) < 0 || kn_engine_start(r.engine, NULL, &err) < 0) {
        fprintf(stderr, "engine: %s\n", err.msg);
        kn_engine_destroy(r.engine);
        return false;
    }
    ok = run_once(&r, a->n, 1, ret) && run_once(&r, a->n, (uint64_t)a->n + 1, ret);
    kn_engine_stop(r.engine);
    kn_engine_destroy(r.engine);
    return ok;
}

static void report(bool json, const struct requests *a, const struct outcome *o)
{
    const char *how = a->never_ahead ? " never ahead" : "";

    if (json) {
        printf("{\"bench\": \"gpu-requests\", \"case\": \"requests %d%s\", \"metric\": \"rate\", "
               "\"value\": %.1f, \"unit\": \"tokens/s\"}\n",
               a->n, how, a->n * OUT / o->seconds);
        return;
    }
    printf("requests %d%s: %.1f ms, %.1f tokens/s; first tokens after %.1f to %.1f ms; %llu steps, "
           "%llu of them ahead\n",
           a->n, how, o->seconds * 1e3, a->n * OUT / o->seconds, o->first_s * 1e3, o->last_s * 1e3,
           o->steps, o->steps_ahead);
}

int main(int argc, char **argv)
{
    static const struct made_model made = {"llama", "BF16", 32,     4096,   32,    8,
                                           128,     14336,  128256, 131072, false, true};
    struct requests a = {.device = kn_cuda_get(KN_DEVICE_ABI)};
    struct bt_model_file *file;
    struct bt_err err = {0};
    bool json = argc > 1 && strcmp(argv[1], "--json") == 0;
    int first = json ? 2 : 1, n_cases = BT_MAX(1, argc - first);

    setvbuf(stdout, NULL, _IOLBF, 0);
    if (made_model_open(&made, &file, &err) < 0) {
        fprintf(stderr, "bench_gpu_requests: %s\n", err.msg);
        return 1;
    }
    a.file = file;
    for (int i = 0; i < 2 * n_cases; i++) {
        struct outcome o;

        a.n = first + i / 2 < argc ? (int)strtol(argv[first + i / 2], NULL, 10) : 64;
        a.never_ahead = i % 2 == 0;
        if (a.n < 1 || a.n > 1024 || !run_requests(&a, &o)) {
            return 1;
        }
        report(json, &a, &o);
    }
    bt_model_close(file);
    return 0;
}
