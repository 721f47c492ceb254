/* Topology invariance of the whole model: logits of a sequence are the same bits alone and in a
 * batch, in any chunks, with any page size and placement, any number of threads; and the two vector
 * sets agree. Compared are the logits after the prompt and after each of some greedy steps. */
#include "tests/unit/kernels/model/run.h"
#include "tests/unit/kernels/model/tiny.h"

#include "kernels/core/registry.h"

#define N_SEQS   5
#define N_STEPS  4
#define MAX_CTX  320
#define MAX_FULL 300

static const int lengths[N_SEQS] = {1, 63, 64, 130, 271};

/* What is compared: logits of each sequence after the prompt and after every step. */
struct result {
    int32_t ids[N_SEQS][N_STEPS];
    float *logits; /* [N_SEQS][N_STEPS + 1][V] */
};

static int32_t prompts[N_SEQS][MAX_FULL];

static void make_prompts(int n_vocab)
{
    uint32_t x = 12345;

    for (int s = 0; s < N_SEQS; s++) {
        for (int i = 0; i < lengths[s]; i++) {
            x = x * 1664525u + 1013904223u;
            prompts[s][i] = (int32_t)((x >> 8) % (uint32_t)n_vocab);
        }
    }
}

static float *logits_at(const struct result *res, int n_vocab, int seq, int step)
{
    return res->logits + ((size_t)seq * (N_STEPS + 1) + (size_t)step) * (size_t)n_vocab;
}

/* One sequence after the other, in chunks. */
static void run_alone(struct run *r, int chunk, struct result *res)
{
    size_t v = (size_t)r->c->n_vocab;

    for (int s = 0; s < N_SEQS; s++) {
        run_chunks(r, s, prompts[s], lengths[s], chunk);
        for (int step = 0; step <= N_STEPS; step++) {
            memcpy(logits_at(res, (int)v, s, step), r->logits, v * sizeof(float));
            if (step < N_STEPS) {
                res->ids[s][step] = run_argmax(r->logits, (int)v);
                run_chunks(r, s, &res->ids[s][step], 1, 1);
            }
        }
    }
}

/* All sequences at once: prompts in chunks of different size while others already decode. */
static void run_batched(struct run *r, struct result *res)
{
    size_t v = (size_t)r->c->n_vocab;
    int done[N_SEQS] = {0}, step[N_SEQS] = {0}, left = N_SEQS;

    while (left) {
        const int32_t *ids[N_SEQS];
        int seqs[N_SEQS], n_ids[N_SEQS], n = 0;

        for (int s = N_SEQS - 1; s >= 0; s--) {
            if (done[s] < lengths[s]) {
                seqs[n] = s;
                ids[n] = prompts[s] + done[s];
                n_ids[n] = BT_MIN(17 + 13 * s, lengths[s] - done[s]);
                done[s] += n_ids[n++];
            } else if (step[s] < N_STEPS) {
                seqs[n] = s;
                ids[n] = &res->ids[s][step[s]++];
                n_ids[n++] = 1;
            }
        }
        run_pass(r, n, seqs, ids, n_ids);
        for (int i = 0; i < n; i++) {
            int s = seqs[i];

            if (done[s] < lengths[s]) {
                continue;
            }
            memcpy(logits_at(res, (int)v, s, step[s]), r->logits + (size_t)i * v,
                   v * sizeof(float));
            if (step[s] < N_STEPS) {
                res->ids[s][step[s]] = run_argmax(r->logits + (size_t)i * v, (int)v);
            } else {
                left--;
            }
        }
    }
}

static struct result result_new(int n_vocab)
{
    struct result res = {0};

    res.logits = calloc((size_t)N_SEQS * (N_STEPS + 1) * (size_t)n_vocab, sizeof(float));
    assert_non_null(res.logits);
    return res;
}

static void compare(const struct result *a, const struct result *b, int n_vocab, const char *what)
{
    for (int s = 0; s < N_SEQS; s++) {
        for (int step = 0; step <= N_STEPS; step++) {
            const float *x = logits_at(a, n_vocab, s, step), *y = logits_at(b, n_vocab, s, step);

            for (int i = 0; i < n_vocab; i++) {
                if (memcmp(&x[i], &y[i], sizeof(float)) != 0) {
                    fail_msg("%s: sequence %d (%d ids), step %d, logit %d: %.9g and %.9g", what, s,
                             lengths[s], step, i, (double)x[i], (double)y[i]);
                }
            }
        }
    }
    assert_memory_equal(a->ids, b->ids, sizeof(a->ids));
}

struct variant {
    const char *what;
    struct run_opts o;
    int chunk; /* 0 = all sequences in one batch */
};

/* `full`: every variant; otherwise those that cost little. */
static void check_isa(const struct bt_model_file *mf,
                      const char *isa,
                      enum kv_dtype kv,
                      bool full,
                      struct result *base)
{
    const struct variant variants[] = {
        {"whole prompts", {.threads = 1, .page_tokens = 16}, MAX_FULL},
        {"all in one batch, 2 threads", {.threads = 2, .page_tokens = 32, .scatter = true}, 0},
        {"chunks of 7, pages of 256", {.threads = 2, .page_tokens = 256, .scatter = true}, 7},
        {"chunks of 64, pages of 8", {.threads = 1, .page_tokens = 8, .scatter = true}, 64},
        {"chunks of 1, pages of 64", {.threads = 1, .page_tokens = 64}, 1},
        {"whole prompts, 3 threads", {.threads = 3, .page_tokens = 128}, MAX_FULL},
    };
    int n_vocab = bt_model_config(mf)->n_vocab;

    for (size_t i = 0; i < BT_ARRAY_LEN(variants); i++) {
        const struct variant *v = &variants[i];
        struct run_opts o = v->o;
        struct result res = result_new(n_vocab);
        struct run r;

        if (!full && i >= 4) {
            free(res.logits);
            break;
        }
        o.isa = isa;
        o.kv = kv;
        o.max_ctx = MAX_CTX;
        o.max_batch = 1024;
        run_open(&r, mf, o);
        if (v->chunk) {
            run_alone(&r, v->chunk, &res);
        } else {
            run_batched(&r, &res);
        }
        run_close(&r);
        if (base->logits) {
            compare(base, &res, n_vocab, v->what);
            free(res.logits);
        } else {
            *base = res;
        }
    }
}

static void check_model(const struct bt_model_file *mf, enum kv_dtype kv, bool ref)
{
    struct result base = {0}, base_ref = {0}, base_split = {0}, base_pairs = {0};
    enum bt_dtype dtype = bt_model_tensor(mf, "blk.0.attn_q.weight")->dtype;
    bool own = dtype == BT_DTYPE_BF16 || bt_dtype_block_elems(dtype) > 1 || kv == KV_DTYPE_F16;

    make_prompts(bt_model_config(mf)->n_vocab);
    for (const char *const *isa = kn_ops_available(); *isa; isa++) {
        bool is_ref = strcmp(*isa, "ref") == 0;

        if (is_ref && ref) {
            check_isa(mf, *isa, kv, ref, &base_ref);
        } else if (own && strcmp(*isa, "amx") == 0) { /* has sums of its own for these */
            check_isa(mf, *isa, kv, ref, &base_split);
        } else if (dtype == BT_DTYPE_BF16 && strcmp(*isa, "avx512bf16") == 0) {
            check_isa(mf, *isa, kv, ref, &base_pairs);
        } else if (!is_ref) { /* the vector sets share one base */
            check_isa(mf, *isa, kv, ref, &base);
        }
    }
    free(base.logits);
    free(base_ref.logits);
    free(base_split.logits);
    free(base_pairs.logits);
}

static bool can_make;

static void check_tiny(const char *const *args, enum kv_dtype kv)
{
    struct bt_model_file *mf;

    if (!can_make) {
        skip();
    }
    mf = tiny_open(args, false);
    check_model(mf, kv, !RUN_SLOW);
    bt_model_close(mf);
}

static void test_llama_q4_1(void **state)
{
    check_tiny((const char *const[]){"--dtype", "q4_1", NULL}, KV_DTYPE_F16);
}

static void test_qwen2_q8_0(void **state)
{
    check_tiny((const char *const[]){"--arch", "qwen2", "--dtype", "q8_0", NULL}, KV_DTYPE_F32);
}

static void test_qwen3_bf16(void **state)
{
    check_tiny(
        (const char *const[]){"--arch", "qwen3", "--head-dim", "32", "--dtype", "bf16", NULL},
        KV_DTYPE_F16);
}

static void test_real_model(void **state)
{
    struct bt_model_file *mf = run_real_model();

    if (!mf) {
        skip();
    }
    check_model(mf, KV_DTYPE_F16, false);
    bt_model_close(mf);
}

/* The last layer's work is done for wanted rows only, and a pass without wanted rows still fills
 * its pages: prefix first without logits, then the rest. */
static void test_unwanted_rows(void **state)
{
    struct bt_model_file *mf;
    struct run r;
    struct kn_batch_seq seq;
    struct bt_err err = {0};
    struct kn_batch b = {.n_seqs = 1, .seqs = &seq};
    float *want;

    if (!can_make) {
        skip();
    }
    mf = tiny_open((const char *const[]){"--dtype", "q4_0", NULL}, false);
    make_prompts(bt_model_config(mf)->n_vocab);
    run_open(&r, mf,
             (struct run_opts){.isa = "auto",
                               .threads = 2,
                               .page_tokens = 16,
                               .kv = KV_DTYPE_F16,
                               .max_ctx = MAX_CTX,
                               .max_batch = 512});
    run_chunks(&r, 0, prompts[4], lengths[4], lengths[4]);
    want = malloc((size_t)r.c->n_vocab * sizeof(float));
    assert_non_null(want);
    memcpy(want, r.logits, (size_t)r.c->n_vocab * sizeof(float));
    memset(r.logits, 0, (size_t)r.c->n_vocab * sizeof(float));
    seq = (struct kn_batch_seq){200, 0, r.pages[1], false};
    b.n_tokens = 200;
    b.ids = prompts[4];
    b.kv = r.kv;
    b.layout = &r.layout;
    b.logits = NULL; /* must not be touched */
    assert_int_equal(kn_model_forward(r.model, &b, &err), BT_OK);
    r.pos[1] = 200;
    run_chunks(&r, 1, prompts[4] + 200, lengths[4] - 200, MAX_FULL);
    assert_memory_equal(want, r.logits, (size_t)r.c->n_vocab * sizeof(float));
    free(want);
    run_close(&r);
    bt_model_close(mf);
}

struct seen {
    int layers;
    bool ordered;
};

static void on_layer(void *arg, int layer)
{
    struct seen *s = arg;

    s->ordered &= layer == s->layers;
    s->layers++;
}

/* Limits are checked before anything is written; an empty batch is legal; layers are announced in
 * order. */
static void test_limits_and_layers(void **state)
{
    struct bt_model_file *mf;
    struct run r;
    struct seen seen = {0, true};
    struct kn_batch_seq seq = {4, 0, NULL, true};
    struct bt_err err = {0};
    struct kn_batch b = {.seqs = &seq, .layer_done = on_layer, .layer_done_arg = &seen};
    int32_t ids[4] = {3, 4, 5, 6};

    if (!can_make) {
        skip();
    }
    mf = tiny_open((const char *const[]){NULL}, false);
    run_open(&r, mf,
             (struct run_opts){.isa = "auto",
                               .threads = 1,
                               .page_tokens = 16,
                               .kv = KV_DTYPE_F16,
                               .max_ctx = 32,
                               .max_batch = 16});
    b.layout = &r.layout;
    b.kv = r.kv;
    b.ids = ids;
    b.logits = r.logits;
    assert_int_equal(kn_model_forward(r.model, &b, &err), BT_OK); /* n_seqs 0 */
    assert_int_equal(seen.layers, 0);
    seq.pages = r.pages[0];
    b.n_seqs = 1;
    b.n_tokens = 17;
    assert_int_equal(kn_model_forward(r.model, &b, &err), BT_E_TOO_LARGE);
    b.n_tokens = 3; /* seqs add up to 4 */
    assert_int_equal(kn_model_forward(r.model, &b, &err), BT_E_INVALID);
    b.n_tokens = 4;
    seq.pos = 29; /* past max_ctx */
    assert_int_equal(kn_model_forward(r.model, &b, &err), BT_E_INVALID);
    assert_int_equal(seen.layers, 0);
    seq.pos = 0;
    assert_int_equal(kn_model_forward(r.model, &b, &err), BT_OK);
    assert_int_equal(seen.layers, r.c->n_layers);
    assert_true(seen.ordered);
    run_close(&r);
    bt_model_close(mf);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_llama_q4_1), cmocka_unit_test(test_qwen2_q8_0),
        cmocka_unit_test(test_qwen3_bf16), cmocka_unit_test(test_unwanted_rows),
        cmocka_unit_test(test_real_model), cmocka_unit_test(test_limits_and_layers),
    };

    can_make = tiny_available();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
