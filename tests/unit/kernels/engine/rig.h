/* Runs engines and collects what they say. Outputs are checked as they come: offsets without gap or
 * repeat, exactly one last output. Faults are noted on the engine's thread and asserted on the
 * test's. */
#ifndef BT_TESTS_KERNELS_ENGINE_RIG_H
#define BT_TESTS_KERNELS_ENGINE_RIG_H

#include "tests/unit/cmocka.h"

#include "common/base/buf.h"
#include "common/thr/time.h"
#include "kernels/core/device.h"
#include "kernels/engine/engine.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

#define RIG_MAX_TAGS   4096
#define RIG_MAX_ANSWER 256
#define RIG_WAIT_NS    (250 * BT_NS_PER_S) /* a slow machine, valgrind */

struct rig_result {
    int32_t ids[RIG_MAX_ANSWER];
    uint32_t first, n; /* the range that was emitted */
    bool last, handed_over;
    enum kn_finish finish;
    uint32_t cached;
    int rc;
    char err_msg[160];
};

struct rig {
    struct kn_engine *engine;
    const struct bt_model_file *file;
    pthread_mutex_t lock;
    pthread_cond_t cond;
    uint32_t n_last;            /* guarded by lock, as all below */
    const char *broken;         /* first rule that was broken */
    struct rig_result *results; /* [RIG_MAX_TAGS] */
};

static inline void rig_output(struct rig *r, const struct kn_output *o)
{
    struct rig_result *res = &r->results[o->tag];

    if (o->tag >= RIG_MAX_TAGS || res->last) {
        r->broken = "output after the last one";
        return;
    }
    res->cached = o->cached_tokens;
    if (o->n_tokens > 0 && res->n == 0) {
        res->first = res->n = o->offset;
    }
    for (uint32_t i = 0; i < o->n_tokens; i++) {
        if (o->offset + i != res->n || res->n >= RIG_MAX_ANSWER) {
            r->broken = "gap or repeat";
            return;
        }
        res->ids[res->n++] = o->tokens[i].id;
    }
    if (o->finish != KN_FINISH_NONE || o->handed_over || o->rc < 0) {
        res->last = true;
        res->finish = o->finish;
        res->handed_over = o->handed_over;
        res->rc = o->rc;
        snprintf(res->err_msg, sizeof(res->err_msg), "%s", o->err_msg);
        r->n_last++;
    }
}

static inline void rig_emit(void *arg, struct kn_step *take_step)
{
    struct rig *r = arg;

    pthread_mutex_lock(&r->lock);
    for (size_t i = 0; i < take_step->n_outputs; i++) {
        rig_output(r, &take_step->outputs[i]);
    }
    pthread_cond_broadcast(&r->cond);
    pthread_mutex_unlock(&r->lock);
    kn_step_free(take_step);
}

/* The tiny model of tests/data; closed by the caller. */
static inline struct bt_model_file *rig_model(void)
{
    const char *dir = getenv("BATON_TEST_DATA");
    struct bt_model_file *mf = NULL;
    struct bt_err err = {0};
    char path[4096];

    snprintf(path, sizeof(path), "%s/tiny.gguf", dir ? dir : "tests/data");
    if (bt_model_open(path, &mf, &err) < 0) {
        fail_msg("%s: %s", path, err.msg);
    }
    return mf;
}

/* BATON_TEST_DEVICE=cuda: engines run on the card (tests/run.sh --gpu), with a model that fits. */
static inline const struct kn_device_ops *rig_device(void)
{
    const char *name = getenv("BATON_TEST_DEVICE");
    const struct kn_device_ops *ops = NULL;
    struct bt_err err = {0};

    if (name && strcmp(name, "cuda") == 0 &&
        kn_device_load(getenv("BATON_TEST_MODULE"), &ops, &err) < 0) {
        fail_msg("%s", err.msg);
    }
    return ops;
}

struct rig_opts {
    int threads, page_tokens, budget, running;
    uint32_t n_pages;
    int max_waiting; /* 0 = many */
    int max_ctx;
    int block, key_bits; /* prefix reuse; 0 = off */
    bool always_bring;
    const struct kn_device_ops *device; /* NULL = that of the environment */
};

static inline void rig_create(struct rig *r, const struct bt_model_file *mf, struct rig_opts o)
{
    static const uint8_t digest[32] = {1};
    const struct bt_model_config *c = bt_model_config(mf);
    size_t page = (size_t)c->n_layers * 2 * (size_t)c->n_kv_heads * (size_t)o.page_tokens *
                  (size_t)c->head_dim * 2;
    struct kn_engine_cfg cfg = {.file = mf,
                                .mem = &bt_mem_host,
                                .device = o.device ? o.device : rig_device(),
                                .invariant = true, /* answers are compared across batches */
                                .n_threads = o.threads,
                                .isa = "auto",
                                .kv_dtype = KV_DTYPE_F16,
                                .page_tokens = o.page_tokens,
                                .pool_bytes = page * o.n_pages,
                                .max_ctx = o.max_ctx,
                                .max_batch_tokens = o.budget,
                                .max_running = o.running,
                                .max_waiting = o.max_waiting ? o.max_waiting : RIG_MAX_TAGS,
                                .block_tokens = o.block,
                                .key_bits = o.key_bits,
                                .always_bring = o.always_bring,
                                .key = {.model_digest = digest},
                                .emit = rig_emit,
                                .emit_arg = r};
    struct bt_err err = {0};

    memset(r, 0, sizeof(*r));
    pthread_mutex_init(&r->lock, NULL);
    pthread_cond_init(&r->cond, NULL);
    r->file = mf;
    r->results = bt_calloc(RIG_MAX_TAGS, sizeof(*r->results));
    assert_non_null(r->results);
    if (kn_engine_create(&cfg, &r->engine, &err) < 0) {
        fail_msg("kn_engine_create: %s", err.msg);
    }
    assert_int_equal(kv_pool_stats(kn_engine_pool(r->engine)).n_pages, o.n_pages);
}

static inline void rig_start(struct rig *r, struct kv_handoff *handoff)
{
    struct bt_err err = {0};

    if (kn_engine_start(r->engine, handoff, &err) < 0) {
        fail_msg("kn_engine_start: %s", err.msg);
    }
}

/* Pages that can be had. */
static inline uint32_t rig_room(const struct rig *r)
{
    struct kv_pool_stats s = kv_pool_stats(kn_engine_pool(r->engine));

    return kv_pool_stats_room(&s);
}

/* After kn_engine_stop. */
static inline void rig_destroy(struct rig *r)
{
    kn_engine_destroy(r->engine);
    if (r->broken) {
        fail_msg("%s", r->broken);
    }
    pthread_cond_destroy(&r->cond);
    pthread_mutex_destroy(&r->lock);
    free(r->results);
}

/* Waits until n requests are over; fails the test when that takes too long. */
static inline void rig_wait(struct rig *r, uint32_t n)
{
    uint64_t deadline = bt_deadline_ns(RIG_WAIT_NS);
    bool ok;

    pthread_mutex_lock(&r->lock);
    while (r->n_last < n && !r->broken && bt_now_ns() < deadline) {
        struct timespec ts;

        clock_gettime(CLOCK_REALTIME, &ts);
        ts.tv_sec++;
        pthread_cond_timedwait(&r->cond, &r->lock, &ts);
    }
    ok = r->n_last >= n && !r->broken;
    pthread_mutex_unlock(&r->lock);
    if (!ok) {
        fail_msg("%u of %u requests are over; %s", r->n_last, n, r->broken ? r->broken : "timeout");
    }
}

/* Waits until the request has `n` tokens or is over. */
static inline void rig_wait_tokens(struct rig *r, uint64_t tag, uint32_t n)
{
    uint64_t deadline = bt_deadline_ns(RIG_WAIT_NS);
    bool ok = false;

    while (!ok && bt_now_ns() < deadline) {
        struct timespec pause = {.tv_nsec = 200000};

        pthread_mutex_lock(&r->lock);
        ok = r->results[tag].n >= n || r->results[tag].last;
        pthread_mutex_unlock(&r->lock);
        nanosleep(&pause, NULL);
    }
    assert_true(ok);
}

#endif
