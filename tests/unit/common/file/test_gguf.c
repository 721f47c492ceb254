/* GGUF: a right model, and one file per fault (field report LOAD-01). */
#include "common/file/model.h"

#include "tests/unit/cmocka.h"
#include "tests/unit/common/file/mk.h"

static char dir[128];

static int setup(void **state)
{
    mk_dir(dir);
    return 0;
}

static int teardown(void **state)
{
    mk_dir_remove(dir);
    return 0;
}

static int open_bytes(const struct bt_buf *b, struct bt_model_file **ret, struct bt_err *err)
{
    mk_file(dir, "m.gguf", b->p, b->n);
    return bt_model_open(mk_path(dir, "m.gguf"), ret, err);
}

/* Opens what g holds, expects rc and `word` in the message, frees g. */
static void expect_refused(struct mk_gguf *g, int want, const char *word)
{
    struct bt_model_file *mf = NULL;
    struct bt_err err = {0};
    struct bt_buf file;
    int rc;

    mk_gguf_write(g, &file);
    rc = open_bytes(&file, &mf, &err);
    bt_buf_fini(&file);
    mk_gguf_fini(g);
    if (rc != want || !strstr(err.msg, word)) {
        print_error("rc %d, expected %d; message \"%s\" should have \"%s\"\n", rc, want, err.msg,
                    word);
    }
    assert_int_equal(rc, want);
    assert_non_null(strstr(err.msg, word));
    assert_true(rc == BT_E_NOMEM || strncmp(err.msg, "m.gguf: ", 8) == 0); /* which file it was */
    assert_null(mf);
}

static struct bt_model_file *open_good(struct mk_gguf *g)
{
    struct bt_model_file *mf = NULL;
    struct bt_err err = {0};
    struct bt_buf file;
    int rc;

    mk_gguf_write(g, &file);
    rc = open_bytes(&file, &mf, &err);
    bt_buf_fini(&file);
    mk_gguf_fini(g);
    if (rc != BT_OK) {
        print_error("%s\n", err.msg);
    }
    assert_int_equal(rc, BT_OK);
    return mf;
}

static void test_good_model(void **state)
{
    struct mk_spec s = MK_SPEC("llama");

    for (uint32_t version = 2; version <= 3; version++) {
        struct mk_gguf g = {.version = version};
        const struct bt_model_config *c;
        struct bt_model_file *mf;

        mk_gguf_model(&g, &s);
        mf = open_good(&g);
        c = bt_model_config(mf);
        assert_string_equal(c->name, "tinymodel \xc3\xa9");
        assert_int_equal(c->n_vocab, 8);
        assert_int_equal(c->head_dim, 16);
        assert_false(c->tied);
        assert_true(c->rope_interleaved);
        assert_int_equal(bt_model_tensor(mf, "blk.1.ffn_up.weight")->dtype, BT_DTYPE_F16);
        assert_int_equal(bt_model_tensor(mf, "output_norm.weight")->shape[0], 64);
        assert_null(bt_model_tensor(mf, "blk.2.ffn_up.weight"));
        bt_model_close(mf);
    }
}

static void test_good_variants(void **state)
{
    const char *const archs[] = {"llama", "qwen2", "qwen3"};

    for (size_t i = 0; i < BT_ARRAY_LEN(archs); i++) {
        struct mk_spec s = MK_SPEC(archs[i]);
        struct mk_gguf g = {.alignment = 64};
        struct bt_model_file *mf;

        s.tied = true;
        mk_gguf_model(&g, &s);
        mk_kv_u32(&g, "general.alignment", 64);
        /* Arrays in arrays that nobody reads. */
        mk_key(&g, "x.nested", 9);
        mk_raw(&g.kvs, "\x09\0\0\0\x02\0\0\0\0\0\0\0", 12);
        mk_raw(&g.kvs, "\x04\0\0\0\x01\0\0\0\0\0\0\0abcd", 16);
        mk_raw(&g.kvs, "\x08\0\0\0\0\0\0\0\0\0\0\0", 12);
        mf = open_good(&g);
        assert_true(bt_model_config(mf)->tied);
        assert_int_equal(bt_model_config(mf)->qkv_bias, i == 1);
        assert_int_equal(bt_model_config(mf)->qk_norm, i == 2);
        assert_int_equal(bt_model_config(mf)->rope_interleaved, i == 0);
        assert_int_equal((uintptr_t)bt_model_tensor(mf, "token_embd.weight")->data % 64, 0);
        bt_model_close(mf);
    }
}

/* Every prefix of a good file is refused, none is read past its end. */
static void test_truncated(void **state)
{
    struct mk_spec s = MK_SPEC("llama");
    struct mk_gguf g = {0};
    struct bt_buf file;
    size_t step = 7;

    s.layers = 1;
    mk_gguf_model(&g, &s);
    mk_gguf_write(&g, &file);
    mk_gguf_fini(&g);
    for (size_t n = 0; n < file.n; n += n < 4096 ? step : 1009) {
        struct bt_buf cut = {.p = file.p, .n = n};
        struct bt_model_file *mf = NULL;
        struct bt_err err = {0};

        assert_int_equal(open_bytes(&cut, &mf, &err), BT_E_FORMAT);
        assert_true(err.msg[0] != 0);
    }
    bt_buf_fini(&file);
}

static void test_LOAD_01_header(void **state)
{
    struct mk_spec s = MK_SPEC("llama");
    struct mk_gguf g = {.version = 1};

    mk_gguf_model(&g, &s);
    expect_refused(&g, BT_E_UNSUPPORTED, "version 1");
    g.version = 0x03000000;
    mk_gguf_model(&g, &s);
    expect_refused(&g, BT_E_UNSUPPORTED, "big-endian");
    mk_gguf_model(&g, &s);
    g.n_kvs = 1ull << 60;
    expect_refused(&g, BT_E_FORMAT, "n_kv 1152921504606846976");
    mk_gguf_model(&g, &s);
    g.n_kvs++;
    expect_refused(&g, BT_E_FORMAT, "name of tensor 0");
    mk_gguf_model(&g, &s);
    g.n_tensors = 1ull << 60;
    expect_refused(&g, BT_E_FORMAT, "n_tensors");
}

static void test_LOAD_01_keys(void **state)
{
    static const uint64_t huge = 1ull << 63, many = 1ull << 60, big = 1ull << 59;
    struct mk_spec s = MK_SPEC("llama");
    struct mk_gguf g = {0};
    uint32_t word = 77;

    mk_gguf_model(&g, &s);
    mk_raw(&g.kvs, &huge, 8);
    g.n_kvs++;
    expect_refused(&g, BT_E_FORMAT, "name of key");

    mk_gguf_model(&g, &s);
    mk_key(&g, "x.text", 8);
    mk_raw(&g.kvs, &huge, 8);
    expect_refused(&g, BT_E_FORMAT, "x.text");

    mk_gguf_model(&g, &s);
    mk_key(&g, "x.unknown", 13);
    expect_refused(&g, BT_E_FORMAT, "x.unknown");

    mk_gguf_model(&g, &s);
    mk_key(&g, "x.elem", 9);
    mk_raw(&g.kvs, &word, 4);
    mk_raw(&g.kvs, &many, 8);
    expect_refused(&g, BT_E_FORMAT, "x.elem");

    /* 2^59 elements of 32 bytes would wrap to nothing. */
    for (word = 0; word <= 12; word++) {
        mk_gguf_model(&g, &s);
        mk_key(&g, "x.count", 9);
        mk_raw(&g.kvs, &word, 4);
        mk_raw(&g.kvs, word % 2 ? &many : &big, 8);
        expect_refused(&g, BT_E_FORMAT, "x.count");
    }

    mk_gguf_model(&g, &s);
    mk_kv_u32(&g, "x.twice", 1);
    mk_kv_u32(&g, "x.twice", 1);
    expect_refused(&g, BT_E_FORMAT, "duplicate key x.twice");

    mk_gguf_model(&g, &s);
    mk_key(&g, "x.bool", 7);
    mk_raw(&g.kvs, "\x02", 1);
    expect_refused(&g, BT_E_FORMAT, "x.bool");
}

/* A hundred thousand arrays, each in the one before. */
static void test_LOAD_01_nesting(void **state)
{
    struct mk_spec s = MK_SPEC("llama");
    struct mk_gguf g = {0};

    mk_gguf_settings(&g, &s);
    mk_key(&g, "x.deep", 9);
    for (int i = 0; i < 100000; i++) {
        mk_raw(&g.kvs, "\x09\0\0\0\x01\0\0\0\0\0\0\0", 12);
    }
    expect_refused(&g, BT_E_FORMAT, "x.deep");
}

static void test_LOAD_01_alignment(void **state)
{
    static const uint32_t bad[] = {0, 3, 4, 48, 1u << 31};
    struct mk_spec s = MK_SPEC("llama");

    for (size_t i = 0; i < BT_ARRAY_LEN(bad); i++) {
        struct mk_gguf g = {0};

        mk_gguf_model(&g, &s);
        mk_kv_u32(&g, "general.alignment", bad[i]);
        expect_refused(&g, BT_E_FORMAT, "general.alignment");
    }
}

static void test_LOAD_01_tensors(void **state)
{
    static const uint64_t wrap[] = {1ull << 32, 1ull << 32}, zero[] = {64, 0}, one = 64;
    static const uint64_t wide[] = {1ull << 62, 1}, odd[] = {33, 2}, cube[] = {4, 4, 4};
    static const uint64_t huge[] = {1ull << 63, 1};
    struct mk_spec s = MK_SPEC("llama");
    struct mk_gguf g = {0};
    uint32_t dims = 1000000;

    mk_gguf_model(&g, &s);
    mk_tensor_at(&g, "x.wrap", 0, 2, wrap, 0);
    expect_refused(&g, BT_E_FORMAT, "x.wrap");

    mk_gguf_model(&g, &s);
    mk_tensor_at(&g, "x.wide", 0, 2, wide, 0);
    expect_refused(&g, BT_E_FORMAT, "x.wide");

    mk_gguf_model(&g, &s);
    mk_tensor_at(&g, "x.huge", 0, 2, huge, 0);
    expect_refused(&g, BT_E_FORMAT, "x.huge");

    mk_gguf_model(&g, &s);
    mk_tensor_at(&g, "x.zero", 0, 2, zero, 0);
    expect_refused(&g, BT_E_FORMAT, "x.zero");

    mk_gguf_model(&g, &s);
    mk_tensor_at(&g, "x.none", 0, 0, zero, 0);
    expect_refused(&g, BT_E_FORMAT, "x.none");

    mk_gguf_model(&g, &s);
    mk_str(&g.infos, "x.dims");
    mk_raw(&g.infos, &dims, 4);
    g.n_tensors++;
    expect_refused(&g, BT_E_FORMAT, "x.dims");

    mk_gguf_model(&g, &s);
    mk_tensor_at(&g, "x.cube", 0, 3, cube, 0);
    expect_refused(&g, BT_E_UNSUPPORTED, "x.cube");

    mk_gguf_model(&g, &s);
    mk_tensor_at(&g, "x.rows", 8, 2, odd, 0);
    expect_refused(&g, BT_E_FORMAT, "x.rows");

    mk_gguf_model(&g, &s);
    mk_tensor(&g, "output_norm.weight", 0, 1, &one);
    expect_refused(&g, BT_E_FORMAT, "duplicate tensor output_norm.weight");

    mk_gguf_model(&g, &s);
    mk_tensor_at(&g, "x.past", 0, 1, &one, g.data.n);
    expect_refused(&g, BT_E_FORMAT, "x.past");

    mk_gguf_model(&g, &s);
    mk_tensor_at(&g, "x.far", 0, 1, &one, UINT64_MAX - 31);
    expect_refused(&g, BT_E_FORMAT, "x.far");

    mk_gguf_model(&g, &s);
    mk_tensor_at(&g, "x.slanted", 0, 1, &one, 4);
    expect_refused(&g, BT_E_FORMAT, "x.slanted");

    mk_gguf_model(&g, &s);
    mk_tensor_at(&g, "x.over", 0, 1, &one, 32);
    expect_refused(&g, BT_E_FORMAT, "overlaps");
}

static void test_types_named(void **state)
{
    static const uint64_t row[] = {256, 1};
    static const struct {
        uint32_t id;
        int rc;
        const char *name;
    } types[] = {{12, BT_E_UNSUPPORTED, "Q4_K"},
                 {14, BT_E_UNSUPPORTED, "Q6_K"},
                 {6, BT_E_UNSUPPORTED, "Q5_0"},
                 {39, BT_E_UNSUPPORTED, "MXFP4"},
                 {4, BT_E_FORMAT, "unknown type 4"}};
    struct mk_spec s = MK_SPEC("llama");

    for (size_t i = 0; i < BT_ARRAY_LEN(types); i++) {
        struct mk_gguf g = {0};

        mk_gguf_model(&g, &s);
        mk_tensor_at(&g, "x.type", types[i].id, 2, row, 0);
        expect_refused(&g, types[i].rc, types[i].name);
    }
}

static void test_LOAD_01_tokenizer(void **state)
{
    static const uint64_t n = MK_N_TOKENS;
    static const int32_t types[MK_N_TOKENS] = {3, 3, 3, 1, 1, 1, 1, 9};
    struct mk_spec s = MK_SPEC("llama");
    struct mk_gguf g = {0};

    mk_gguf_model(&g, &s);
    mk_key(&g, "tokenizer.ggml.scores", 9);
    mk_raw(&g.kvs, "\0\0\0\0", 4);
    mk_raw(&g.kvs, &n, 8);
    mk_raw(&g.kvs, "12345678", 8);
    expect_refused(&g, BT_E_FORMAT, "tokenizer.ggml.scores");

    mk_gguf_settings(&g, &s);
    mk_gguf_tensors(&g, &s);
    expect_refused(&g, BT_E_FORMAT, "tokenizer.ggml.tokens");

    mk_gguf_settings(&g, &s);
    mk_gguf_tensors(&g, &s);
    mk_kv_i32s(&g, "tokenizer.ggml.tokens", types, MK_N_TOKENS);
    expect_refused(&g, BT_E_FORMAT, "tokenizer.ggml.tokens");

    /* More tokens than rows of the embedding. */
    s.v = MK_N_TOKENS - 1;
    mk_gguf_model(&g, &s);
    expect_refused(&g, BT_E_FORMAT, "tokenizer.ggml.tokens");
    s.v = MK_N_TOKENS;

    mk_gguf_model(&g, &s);
    mk_kv_u32(&g, "tokenizer.ggml.eos_token_id", 8);
    expect_refused(&g, BT_E_FORMAT, "tokenizer.ggml.eos_token_id");

    mk_gguf_model(&g, &s);
    mk_kv_u32(&g, "tokenizer.ggml.bos_token_id", 0xffffffffu);
    expect_refused(&g, BT_E_FORMAT, "tokenizer.ggml.bos_token_id");
}

static void test_variants_refused(void **state)
{
    static const struct {
        const char *key, *text, *word;
        float f;
        uint32_t u;
    } rows[] = {
        {.key = "llama.expert_count", .u = 8, .word = "expert_count"},
        {.key = "llama.attention.sliding_window", .u = 128, .word = "sliding_window"},
        {.key = "llama.rope.dimension_count", .u = 8, .word = "rope.dimension_count"},
        {.key = "llama.attention.value_length", .u = 8, .word = "value_length"},
        {.key = "llama.final_logit_softcapping", .f = 30.0f, .word = "softcapping"},
        {.key = "llama.logit_scale", .f = 0.5f, .word = "logit_scale"},
        {.key = "split.count", .u = 2, .word = "split.count"},
        {.key = "llama.rope.scaling.type", .text = "yarn", .word = "\"yarn\""},
        {.key = "llama.rope.scaling.type", .text = "longrope", .word = "\"longrope\""},
    };
    struct mk_spec s = MK_SPEC("llama");
    struct mk_gguf g = {0};

    for (size_t i = 0; i < BT_ARRAY_LEN(rows); i++) {
        mk_gguf_model(&g, &s);
        if (rows[i].text) {
            mk_kv_str(&g, rows[i].key, rows[i].text);
        } else if (rows[i].u) {
            mk_kv_u32(&g, rows[i].key, rows[i].u);
        } else {
            mk_kv_f32(&g, rows[i].key, rows[i].f);
        }
        expect_refused(&g, BT_E_UNSUPPORTED, rows[i].word);
    }
    s.arch = "gemma3";
    mk_gguf_model(&g, &s);
    expect_refused(&g, BT_E_UNSUPPORTED, "\"gemma3\"");
}

static void test_settings_refused(void **state)
{
    struct mk_spec s = MK_SPEC("llama");
    struct mk_gguf g = {0};

    /* Settings that do not fit together, or not to the tensors. */
    s.h = 0;
    mk_gguf_settings(&g, &s);
    expect_refused(&g, BT_E_FORMAT, "heads");
    s = MK_SPEC("llama");
    s.hkv = 3;
    mk_gguf_settings(&g, &s);
    expect_refused(&g, BT_E_FORMAT, "3 key/value heads");
    s = MK_SPEC("llama");
    mk_gguf_settings(&g, &s);
    mk_gguf_tokenizer(&g);
    s.f = 64;
    mk_gguf_tensors(&g, &s);
    expect_refused(&g, BT_E_FORMAT, "blk.0.ffn_gate.weight");
    s = MK_SPEC("llama");
    s.layers = 3;
    mk_gguf_settings(&g, &s);
    mk_gguf_tokenizer(&g);
    s.layers = 2;
    mk_gguf_tensors(&g, &s);
    expect_refused(&g, BT_E_FORMAT, "blk.2.attn_norm.weight");
    s.layers = 1;
    mk_gguf_settings(&g, &s);
    mk_gguf_tokenizer(&g);
    s.layers = 2;
    mk_gguf_tensors(&g, &s);
    expect_refused(&g, BT_E_UNSUPPORTED, "blk.1.");
    mk_gguf_model(&g, &s);
    mk_tensor(&g, "blk.0.attn_output.bias", 0, 1, (const uint64_t[]){64});
    expect_refused(&g, BT_E_UNSUPPORTED, "blk.0.attn_output.bias");
    mk_gguf_model(&g, &s);
    mk_tensor(&g, "rope_freqs.weight", 0, 1, (const uint64_t[]){8});
    expect_refused(&g, BT_E_FORMAT, "rope_freqs.weight"); /* zeros */
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_good_model),        cmocka_unit_test(test_good_variants),
        cmocka_unit_test(test_truncated),         cmocka_unit_test(test_LOAD_01_header),
        cmocka_unit_test(test_LOAD_01_keys),      cmocka_unit_test(test_LOAD_01_nesting),
        cmocka_unit_test(test_LOAD_01_alignment), cmocka_unit_test(test_LOAD_01_tensors),
        cmocka_unit_test(test_LOAD_01_tokenizer), cmocka_unit_test(test_types_named),
        cmocka_unit_test(test_variants_refused),  cmocka_unit_test(test_settings_refused),
    };

    mk_limit_memory();
    return cmocka_run_group_tests(tests, setup, teardown);
}
