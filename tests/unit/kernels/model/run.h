/* A small driver for model tests: a pool in plain memory, sequences with scattered pages, passes of
 * any shape. Asserts with cmocka, so on the main thread only. */
#ifndef BT_TESTS_KERNELS_MODEL_RUN_H
#define BT_TESTS_KERNELS_MODEL_RUN_H

#include "tests/unit/cmocka.h"

#include "kernels/model/model.h"

#include <stdio.h>
#include <stdlib.h>

/* Sanitizers cost a factor of 5 to 20: the largest inputs are left out then. */
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define RUN_SLOW 1
#else
#define RUN_SLOW 0
#endif

#define RUN_MAX_SEQS  16
#define RUN_MAX_PAGES 512

struct run {
    struct kn_model *model;
    const struct bt_model_config *c;
    struct kv_layout layout;
    void *kv;
    float *logits; /* [RUN_MAX_SEQS][V] */
    uint32_t pages[RUN_MAX_SEQS][RUN_MAX_PAGES];
    int pos[RUN_MAX_SEQS];
};

struct run_opts {
    const char *isa;
    int threads;
    int page_tokens;
    enum kv_dtype kv;
    int max_ctx;
    int max_batch;
    bool scatter; /* pages of a sequence lie apart and backwards */
};

static inline void run_open(struct run *r, const struct bt_model_file *mf, struct run_opts o)
{
    struct bt_err err = {0};
    struct kn_model_cfg cfg = {.file = mf,
                               .n_threads = o.threads,
                               .isa = o.isa,
                               .max_batch_tokens = o.max_batch,
                               .max_batch_seqs = RUN_MAX_SEQS,
                               .max_outputs = RUN_MAX_SEQS,
                               .max_ctx = o.max_ctx};
    int per_seq = (int)BT_DIV_UP(o.max_ctx, o.page_tokens);

    memset(r, 0, sizeof(*r));
    if (kn_model_create(&cfg, &r->model, &err) < 0) {
        fail_msg("kn_model_create: %s", err.msg);
    }
    r->c = kn_model_config(r->model);
    assert_true(per_seq <= RUN_MAX_PAGES);
    r->layout = (struct kv_layout){.n_layers = r->c->n_layers,
                                   .n_kv_heads = r->c->n_kv_heads,
                                   .head_dim = r->c->head_dim,
                                   .page_tokens = o.page_tokens,
                                   .dtype = o.kv,
                                   .n_pages = (uint32_t)(per_seq * RUN_MAX_SEQS)};
    assert_int_equal(kv_layout_init(&r->layout, &err), BT_OK);
    r->kv = malloc(r->layout.bytes);
    assert_non_null(r->kv);
    memset(r->kv, 0xff, r->layout.bytes); /* NaN: what is read before it is written shows */
    r->logits = calloc((size_t)RUN_MAX_SEQS * (size_t)r->c->n_vocab, sizeof(float));
    assert_non_null(r->logits);
    for (int s = 0; s < RUN_MAX_SEQS; s++) {
        for (int i = 0; i < per_seq; i++) {
            r->pages[s][i] =
                (uint32_t)(o.scatter ? (per_seq - 1 - i) * RUN_MAX_SEQS + s : s * per_seq + i);
        }
    }
}

static inline void run_close(struct run *r)
{
    kn_model_destroy(r->model);
    free(r->kv);
    free(r->logits);
}

/* One pass over n sequences: seqs[i] gets the next n_ids[i] of ids[i]. Row i of r->logits belongs
 * to entry i. */
static inline void
run_pass(struct run *r, int n, const int *seqs, const int32_t *const *ids, const int *n_ids)
{
    struct kn_batch_seq bs[RUN_MAX_SEQS];
    struct kn_batch b = {
        .n_seqs = n, .seqs = bs, .kv = r->kv, .layout = &r->layout, .logits = r->logits};
    struct bt_err err = {0};
    int32_t *all;

    for (int i = 0; i < n; i++) {
        bs[i] = (struct kn_batch_seq){n_ids[i], r->pos[seqs[i]], r->pages[seqs[i]], true};
        b.n_tokens += n_ids[i];
    }
    all = malloc((size_t)b.n_tokens * sizeof(*all));
    assert_non_null(all);
    for (int i = 0, at = 0; i < n; i++) {
        memcpy(all + at, ids[i], (size_t)n_ids[i] * sizeof(*all));
        at += n_ids[i];
        r->pos[seqs[i]] += n_ids[i];
    }
    b.ids = all;
    if (kn_model_forward(r->model, &b, &err) < 0) {
        fail_msg("kn_model_forward: %s", err.msg);
    }
    free(all);
}

/* Runs ids through sequence seq in chunks; the last token's logits are in r->logits. */
static inline void run_chunks(struct run *r, int seq, const int32_t *ids, int n, int chunk)
{
    for (int i = 0; i < n; i += chunk) {
        const int32_t *p = ids + i;
        int len = BT_MIN(chunk, n - i);

        run_pass(r, 1, &seq, &p, &len);
    }
}

static inline int32_t run_argmax(const float *logits, int n)
{
    int32_t best = 0;

    for (int32_t i = 1; i < n; i++) {
        best = logits[i] > logits[best] ? i : best;
    }
    return best;
}

/* The small real model: $BATON_TEST_MODEL or the file quickstart fetches. NULL and a line on stderr
 * if absent or if this build is too slow for it. The caller closes it. */
static inline struct bt_model_file *run_real_model(void)
{
    const char *path = getenv("BATON_TEST_MODEL"), *cache = getenv("XDG_CACHE_HOME");
    const char *home = getenv("HOME");
    struct bt_model_file *mf;
    struct bt_err err = {0};
    char buf[4096];

    if (RUN_SLOW) {
        fprintf(stderr, "SKIPPED: the real model is too slow under a sanitizer\n");
        return NULL;
    }
    if (!path) {
        snprintf(buf, sizeof(buf), "%s%s/baton/models/SmolLM2-135M-Instruct.Q4_1.gguf",
                 cache ? cache : (home ? home : ""), cache ? "" : "/.cache");
        path = buf;
    }
    if (bt_model_open(path, &mf, &err) < 0) {
        fprintf(stderr, "SKIPPED: no model at %s (%s); set BATON_TEST_MODEL\n", path, err.msg);
        return NULL;
    }
    return mf;
}

#endif
