/* The quickstart model, SmolLM2-135M-Instruct as GGUF: BATON_TEST_MODEL, or the cache folder.
 * Without the file every test is skipped and says so. */
#include "common/file/model.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "tests/unit/cmocka.h"

static struct bt_model_file *mf;

static const char *model_path(void)
{
    static char path[4096];
    const char *env = getenv("BATON_TEST_MODEL"), *xdg = getenv("XDG_CACHE_HOME");

    if (env && env[0]) {
        return env;
    }
    if (xdg && xdg[0]) {
        snprintf(path, sizeof(path), "%s/baton/models/SmolLM2-135M-Instruct.Q4_1.gguf", xdg);
    } else {
        snprintf(path, sizeof(path), "%s/.cache/baton/models/SmolLM2-135M-Instruct.Q4_1.gguf",
                 getenv("HOME") ? getenv("HOME") : "");
    }
    return path;
}

static int setup(void **state)
{
    struct bt_err err = {0};
    const char *path = model_path();

    if (access(path, R_OK) != 0) {
        fprintf(stderr, "SKIPPED: no model at %s (set BATON_TEST_MODEL)\n", path);
        return 0;
    }
    if (bt_model_open(path, &mf, &err) != BT_OK) {
        fprintf(stderr, "%s: %s\n", path, err.msg);
        return -1;
    }
    if (strncmp(bt_model_config(mf)->name, "Smollm2 135M", 12) != 0) {
        fprintf(stderr, "SKIPPED: %s is another model\n", path);
        bt_model_close(mf);
        mf = NULL;
    }
    return 0;
}

static int teardown(void **state)
{
    bt_model_close(mf);
    return 0;
}

static void need_model(void)
{
    if (!mf) {
        skip();
    }
}

static void test_config(void **state)
{
    const struct bt_model_config *c;

    need_model();
    c = bt_model_config(mf);
    assert_int_equal(c->arch, BT_ARCH_LLAMA);
    assert_int_equal(c->n_layers, 30);
    assert_int_equal(c->d_model, 576);
    assert_int_equal(c->n_heads, 9);
    assert_int_equal(c->n_kv_heads, 3);
    assert_int_equal(c->head_dim, 64);
    assert_int_equal(c->d_ff, 1536);
    assert_int_equal(c->n_vocab, 49152);
    assert_int_equal(c->n_ctx, 8192);
    assert_true(c->tied);
    assert_false(c->qkv_bias);
    assert_false(c->qk_norm);
    assert_true(c->rope_interleaved);
    assert_float_equal(c->rope_theta, 100000.0f, 0);
    assert_int_equal(c->rope_scaling, BT_ROPE_NONE);
    /* <|endoftext|> and <|im_end|>. */
    assert_int_equal(c->n_eos, 2);
    assert_int_equal(c->eos[0], 0);
    assert_int_equal(c->eos[1], 2);
}

static void test_tokenizer(void **state)
{
    const struct bt_tok_source *t;

    need_model();
    t = bt_model_tok_source(mf);
    assert_int_equal(t->json.n, 0);
    assert_true(bt_str_eq(t->model, BT_STR("gpt2")));
    assert_true(bt_str_eq(t->pre, BT_STR("smollm")));
    assert_int_equal(t->n_tokens, 49152);
    assert_int_equal(t->n_merges, 48900);
    assert_true(bt_str_eq(t->tokens[1], BT_STR("<|im_start|>")));
    assert_int_equal(t->types[1], 3);
    assert_true(bt_str_eq(t->merges[2], BT_STR("i n")));
    assert_int_equal(t->bos_id, 1);
    assert_false(t->add_bos);
    assert_true(t->chat_template.n > 0);
}

static void test_tensors(void **state)
{
    const struct bt_tensor *t;

    need_model();
    assert_int_equal(bt_model_n_tensors(mf), 272);
    t = bt_model_tensor(mf, "blk.29.ffn_down.weight");
    assert_non_null(t);
    assert_int_equal(t->dtype, BT_DTYPE_Q4_1);
    assert_int_equal(t->n_dims, 2);
    assert_int_equal(t->shape[0], 576);
    assert_int_equal(t->shape[1], 1536);
    assert_int_equal(t->bytes, 576 * 1536 / 32 * 20);
    assert_null(bt_model_tensor(mf, "output.weight"));
    t = bt_model_tensor(mf, "token_embd.weight");
    assert_int_equal(t->dtype, BT_DTYPE_Q8_0);
    for (size_t i = 0; i < bt_model_n_tensors(mf); i++) {
        t = bt_model_tensor_at(mf, i);
        assert_int_equal((uintptr_t)t->data % 32, 0);
    }
    assert_null(bt_model_tensor_at(mf, 272));
}

static void test_digest(void **state)
{
    struct bt_err err = {0};
    uint8_t a[32], b[32];

    need_model();
    assert_int_equal(bt_model_digest(mf, a, &err), BT_OK);
    assert_int_equal(bt_model_digest(mf, b, &err), BT_OK);
    assert_memory_equal(a, b, 32);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_config),
        cmocka_unit_test(test_tokenizer),
        cmocka_unit_test(test_tensors),
        cmocka_unit_test(test_digest),
    };

    return cmocka_run_group_tests(tests, setup, teardown);
}
