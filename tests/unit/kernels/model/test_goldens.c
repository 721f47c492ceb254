/* Logits against Hugging Face transformers in float32 (tests/tools/goldens.py).
 *
 * Error of a row: largest |got - want| over the ids the golden holds, over the root mean square of
 * its sampled logits. Bounds, by dtype of the weights and of the KV pool (limit_of). They state
 * what the number formats cost: with float weights only the order of sums differs; a KV pool of f16
 * rounds K and V to 11 bits; block-quantized weights take activations of 8 bits as well, and BF16
 * ones activations of bf16 where AVX-512 multiplies those. */
#include "tests/unit/kernels/model/run.h"
#include "tests/unit/kernels/model/tiny.h"

#include "kernels/core/registry.h"

#include <jansson.h>
#include <math.h>

#define MAX_IDS 2048

struct golden {
    json_t *root;
    const char *name;
    json_t *sample_ids;
};

struct worst {
    double error;
    int greedy; /* runs whose ids were compared */
};

static double limit_of(const struct bt_model_file *mf, const char *isa, enum kv_dtype kv)
{
    enum bt_dtype dtype = bt_model_tensor(mf, "blk.0.attn_q.weight")->dtype;

    if (bt_dtype_block_elems(dtype) > 1) {
        return 0.15;
    }
    if (dtype == BT_DTYPE_BF16 && strcmp(isa, "avx512bf16") == 0) { /* so are activations */
        return 0.03;
    }
    return kv == KV_DTYPE_F16 ? 0.01 : 2e-4;
}

static struct golden golden_open(const char *name)
{
    const char *data = getenv("BATON_TEST_DATA");
    struct golden g = {0};
    json_error_t je;
    char path[4096];

    assert_non_null(data);
    snprintf(path, sizeof(path), "%s/golden/%s.json", data, name);
    g.root = json_load_file(path, 0, &je);
    if (!g.root) {
        fail_msg("%s: %s", path, je.text);
    }
    g.name = name;
    g.sample_ids = json_object_get(g.root, "sample_ids");
    assert_true(json_array_size(g.sample_ids) > 0);
    return g;
}

static int ids_of(json_t *array, int32_t *ret)
{
    int n = (int)json_array_size(array);

    assert_true(n > 0 && n <= MAX_IDS);
    for (int i = 0; i < n; i++) {
        ret[i] = (int32_t)json_integer_value(json_array_get(array, (size_t)i));
    }
    return n;
}

/* Largest absolute difference of one row; *ret_rms = size of the sampled logits. */
static double row_error(const struct golden *g, json_t *row, const float *logits, double *ret_rms)
{
    json_t *sample = json_object_get(row, "sample"), *top = json_object_get(row, "top");
    size_t n = json_array_size(sample), i;
    double worst = 0, sum = 0;
    json_t *pair;

    assert_int_equal(n, json_array_size(g->sample_ids));
    for (i = 0; i < n; i++) {
        json_int_t id = json_integer_value(json_array_get(g->sample_ids, i));
        double want = json_number_value(json_array_get(sample, i));

        worst = fmax(worst, fabs(want - (double)logits[id]));
        sum += want * want;
    }
    json_array_foreach(top, i, pair)
    {
        json_int_t id = json_integer_value(json_array_get(pair, 0));
        double want = json_number_value(json_array_get(pair, 1));

        worst = fmax(worst, fabs(want - (double)logits[id]));
    }
    *ret_rms = sqrt(sum / (double)n);
    return worst;
}

static void check_greedy(struct run *r, json_t *c, const char *name)
{
    int32_t want[MAX_IDS], id;
    int n = ids_of(json_object_get(c, "greedy"), want);

    for (int i = 0; i < n; i++) {
        id = run_argmax(r->logits, r->c->n_vocab);
        if (id != want[i]) {
            fail_msg("%s: greedy id %d is %d, not %d", name, i, id, want[i]);
        }
        run_chunks(r, 0, &id, 1, 1);
    }
}

static void
check_case(const struct golden *g, struct run *r, double limit, json_t *c, struct worst *w)
{
    double abs_error = 0, margin;
    int32_t ids[MAX_IDS];
    int n = ids_of(json_object_get(c, "ids"), ids), done = 0;
    size_t i;
    json_t *row;

    r->pos[0] = 0;
    json_array_foreach(json_object_get(c, "rows"), i, row)
    {
        int pos = (int)json_integer_value(json_object_get(row, "pos"));
        double rms, e;

        assert_true(pos >= done && pos < n);
        run_chunks(r, 0, ids + done, pos + 1 - done, 64);
        done = pos + 1;
        e = row_error(g, row, r->logits, &rms);
        abs_error = fmax(abs_error, e);
        w->error = fmax(w->error, e / rms);
        if (!(e / rms <= limit)) {
            fail_msg("%s (%s), position %d: error %.3g of the size of its logits, limit %.3g",
                     g->name, kn_model_numerics(r->model), pos, e / rms, limit);
        }
    }
    assert_int_equal(done, n);
    /* An error this small cannot change the greatest logit anywhere on the way; where the margin is
     * wide the ids must agree even with quantized weights. */
    margin = json_number_value(json_object_get(c, "margin"));
    if (abs_error * 4 < margin || margin > 1) {
        check_greedy(r, c, g->name);
        w->greedy++;
    }
}

static void check_model(const struct golden *g, const struct bt_model_file *mf, const char *form)
{
    for (int kv = KV_DTYPE_F16; kv <= KV_DTYPE_F32; kv++) {
        for (const char *const *isa = kn_ops_available(); *isa; isa++) {
            bool ref = strcmp(*isa, "ref") == 0;
            struct worst w = {0};
            struct run r;
            size_t i;
            json_t *c;

            run_open(&r, mf,
                     (struct run_opts){.isa = *isa,
                                       .threads = 1,
                                       .page_tokens = 32,
                                       .kv = (enum kv_dtype)kv,
                                       .max_ctx = 1600,
                                       .max_batch = 64});
            json_array_foreach(json_object_get(g->root, "cases"), i, c)
            {
                if ((ref || RUN_SLOW) && json_array_size(json_object_get(c, "ids")) > 500) {
                    continue; /* slow, and the others stand for it */
                }
                check_case(g, &r, limit_of(mf, *isa, (enum kv_dtype)kv), c, &w);
            }
            print_message("%-16s %-9s kv %s %-7s error %.2e, greedy compared %d\n", g->name, form,
                          kv == KV_DTYPE_F16 ? "f16" : "f32", *isa, w.error, w.greedy);
            run_close(&r);
        }
    }
}

static void check_tiny(const char *name, const char *dtype, bool dir)
{
    struct golden g = golden_open(name);
    json_t *args = json_object_get(g.root, "mkmodel");
    const char *argv[24] = {0};
    struct bt_model_file *mf;
    size_t n = 0, i;
    json_t *a;

    json_array_foreach(args, i, a)
    {
        assert_true(n < 20);
        argv[n++] = json_string_value(a);
    }
    if (dtype) {
        argv[n++] = "--dtype";
        argv[n++] = dtype;
    }
    mf = tiny_open(argv, dir);
    check_model(&g, mf, dtype ? dtype : dir ? "directory" : "gguf");
    bt_model_close(mf);
    json_decref(g.root);
}

static bool can_make;

static void test_tiny_models(void **state)
{
    static const char *const names[] = {
        "llama",        "llama-tied", "llama-mha",    "llama-head32", "llama-linear",
        "llama-llama3", "llama-q8_0", "llama-q4_0",   "llama-q4_1",   "mistral-head32",
        "qwen2-head32", "qwen2",      "qwen3-head32", "qwen3",
    };

    if (!can_make) {
        skip();
    }
    for (size_t i = 0; i < BT_ARRAY_LEN(names); i++) {
        check_tiny(names[i], NULL, i % 2 && !strstr(names[i], "-q")); /* quants: GGUF only */
    }
}

static void test_half_weights(void **state)
{
    if (!can_make) {
        skip();
    }
    check_tiny("llama", "f16", false);
    check_tiny("qwen2", "bf16", true);
    check_tiny("qwen3", "f16", true);
    check_tiny("mistral-head32", "bf16", false);
}

static void test_real_model(void **state)
{
    struct bt_model_file *mf = run_real_model();
    struct golden g;

    if (!mf) {
        skip();
    }
    g = golden_open("smollm2");
    check_model(&g, mf, "gguf");
    json_decref(g.root);
    bt_model_close(mf);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_tiny_models),
        cmocka_unit_test(test_half_weights),
        cmocka_unit_test(test_real_model),
    };

    can_make = tiny_available();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
