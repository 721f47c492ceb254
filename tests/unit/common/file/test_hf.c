/* Hugging Face directories: shards and strays (LOAD-04), rotary scaling (LOAD-06), head size
 * (LOAD-07), ids that end an answer (STOP-04). GGUF files stand beside where the entry asks. */
#include "common/file/model.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

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

static struct bt_model_file *open_good(const char *path)
{
    struct bt_model_file *mf = NULL;
    struct bt_err err = {0};
    int rc = bt_model_open(path, &mf, &err);

    if (rc != BT_OK) {
        print_error("%s: %s\n", path, err.msg);
    }
    assert_int_equal(rc, BT_OK);
    return mf;
}

static void refused(int want, const char *word)
{
    struct bt_model_file *mf = NULL;
    struct bt_err err = {0};
    int rc = bt_model_open(dir, &mf, &err);

    if (rc != want || !strstr(err.msg, word)) {
        print_error("rc %d, expected %d; message \"%s\" should have \"%s\"\n", rc, want, err.msg,
                    word);
    }
    assert_int_equal(rc, want);
    assert_non_null(strstr(err.msg, word));
    assert_null(mf);
}

/* A directory with `extra` settings is refused and says `word`. */
static void config_refused(const char *arch, const char *extra, int want, const char *word)
{
    struct mk_spec s = MK_SPEC(arch);

    mk_hf_model(dir, &s, extra, 1);
    refused(want, word);
}

static void test_good(void **state)
{
    const char *const archs[] = {"llama", "mistral", "qwen2", "qwen3"};
    static const enum bt_arch ids[] = {BT_ARCH_LLAMA, BT_ARCH_LLAMA, BT_ARCH_QWEN2, BT_ARCH_QWEN3};

    for (size_t i = 0; i < BT_ARRAY_LEN(archs); i++) {
        struct mk_spec s = MK_SPEC(archs[i]);
        const struct bt_model_config *c;
        struct bt_model_file *mf;

        mk_hf_model(dir, &s, ",\"sliding_window\":null", 1);
        mf = open_good(dir);
        c = bt_model_config(mf);
        assert_int_equal(c->arch, ids[i]);
        assert_int_equal(c->n_layers, 2);
        assert_int_equal(c->n_ctx, 512);
        assert_int_equal(c->n_vocab, 8);
        assert_int_equal(c->qkv_bias, i == 2);
        assert_int_equal(c->qk_norm, i == 3);
        assert_false(c->rope_interleaved);
        assert_int_equal(bt_model_tensor(mf, "blk.1.ffn_down.weight")->dtype, BT_DTYPE_BF16);
        assert_true(bt_model_tok_source(mf)->json.n > 0);
        bt_model_close(mf);
    }
}

static void test_LOAD_04_shards(void **state)
{
    struct mk_spec s = MK_SPEC("llama");
    struct bt_model_file *mf;

    mk_hf_model(dir, &s, "", 3);
    mf = open_good(dir);
    assert_int_equal(bt_model_n_tensors(mf), 3 + 2 * 9);
    bt_model_close(mf);

    assert_int_equal(unlink(mk_path(dir, "model-00002-of-00003.safetensors")), 0);
    refused(BT_E_NOT_FOUND, "model-00002-of-00003.safetensors");
    assert_int_equal(unlink(mk_path(dir, "model-00003-of-00003.safetensors")), 0);
    refused(BT_E_NOT_FOUND, "2 of 3 files");
    refused(BT_E_NOT_FOUND, "model-00003-of-00003.safetensors");
}

static void test_LOAD_04_stray(void **state)
{
    struct mk_spec s = MK_SPEC("llama"), other = MK_SPEC("llama");
    struct bt_model_file *mf;

    /* Another model's weights in one file, then the shards with their index. */
    other.e = 32;
    mk_hf_model(dir, &other, "", 1);
    mk_hf_model(dir, &s, "", 2);
    mk_text(dir, "model-00001-of-00002.safetensors.tmp", "garbage");
    mf = open_good(dir);
    assert_int_equal(bt_model_tensor(mf, "output_norm.weight")->shape[0], 64);
    bt_model_close(mf);
}

/* The index says file and tensor; both must hold. */
static void test_LOAD_04_index(void **state)
{
    static const char *const bad[] = {
        "../model.safetensors", "/etc/x.safetensors", "..",          "sub/model.safetensors",
        "..\\\\x.safetensors",  ".safetensors",       "config.json", ""};
    struct mk_spec s = MK_SPEC("llama");
    char index[256];

    mk_hf_model(dir, &s, "", 1);
    for (size_t i = 0; i < BT_ARRAY_LEN(bad); i++) {
        snprintf(index, sizeof(index), "{\"weight_map\":{\"model.norm.weight\":\"%s\"}}", bad[i]);
        mk_text(dir, "model.safetensors.index.json", index);
        refused(BT_E_FORMAT, "plain");
    }
    mk_text(dir, "model.safetensors.index.json",
            "{\"weight_map\":{\"model.norm.weight\":\"absent.safetensors\"}}");
    refused(BT_E_NOT_FOUND, "absent.safetensors");
    mk_text(dir, "model.safetensors.index.json",
            "{\"weight_map\":{\"model.norm.weight\":\"model.safetensors\","
            "\"model.extra.weight\":\"model.safetensors\"}}");
    refused(BT_E_FORMAT, "model.extra.weight");
    mk_text(dir, "model.safetensors.index.json",
            "{\"weight_map\":{\"model.norm.weight\":\"model.safetensors\"}}");
    refused(BT_E_FORMAT, "embed_tokens");
    mk_text(dir, "model.safetensors.index.json", "{\"weight_map\":{}}");
    refused(BT_E_FORMAT, "weight_map");
    mk_text(dir, "model.safetensors.index.json", "{\"weight_map\":{\"a\":1}}");
    refused(BT_E_FORMAT, "plain");
    mk_text(dir, "model.safetensors.index.json", "");
    refused(BT_E_FORMAT, "index.json");
}

static void test_LOAD_04_incomplete(void **state)
{
    struct mk_spec s = MK_SPEC("llama");
    struct bt_model_file *mf = NULL;
    struct bt_err err = {0};

    refused(BT_E_NOT_FOUND, "config.json");
    mk_hf_model(dir, &s, "", 1);
    assert_int_equal(unlink(mk_path(dir, "tokenizer.json")), 0);
    refused(BT_E_NOT_FOUND, "tokenizer.json");
    mk_hf_model(dir, &s, "", 1);
    assert_int_equal(unlink(mk_path(dir, "model.safetensors")), 0);
    refused(BT_E_NOT_FOUND, "model.safetensors");
    /* A FIFO where a file should be must not be waited for. */
    assert_int_equal(mkfifo(mk_path(dir, "model.safetensors"), 0600), 0);
    refused(BT_E_IO, "not a regular file");
    assert_int_equal(bt_model_open("/nonexistent/model", &mf, &err), BT_E_NOT_FOUND);
}

/* Download caches are folders of symbolic links. */
static void test_links_are_followed(void **state)
{
    struct mk_spec s = MK_SPEC("llama");
    char link[128], target[512];
    static const char *const names[] = {"config.json", "tokenizer.json", "model.safetensors"};

    mk_hf_model(dir, &s, "", 1);
    mk_dir(link);
    for (size_t i = 0; i < BT_ARRAY_LEN(names); i++) {
        snprintf(target, sizeof(target), "%s/%s", dir, names[i]);
        assert_int_equal(symlink(target, mk_path(link, names[i])), 0);
    }
    bt_model_close(open_good(link));
    mk_dir_remove(link);
}

/* --- LOAD-06 --- */

/* Inverse frequencies of transformers 5.24 (float32) for head size 32. */
static const float ref_llama3_8[16] = {1.0f,
                                       0.440366626f,
                                       0.193922758f,
                                       0.0853971019f,
                                       0.0376060307f,
                                       0.0165604409f,
                                       0.00729266508f,
                                       0.00321144611f,
                                       0.000524846022f,
                                       7.78465546e-05f,
                                       3.42810235e-05f,
                                       1.50962178e-05f,
                                       6.64786967e-06f,
                                       2.92749974e-06f,
                                       1.28917316e-06f,
                                       5.6770881e-07f};
static const float ref_llama3_32[16] = {1.0f,
                                        0.440366626f,
                                        0.193922758f,
                                        0.0853971019f,
                                        0.0376060307f,
                                        0.0165604409f,
                                        0.00729266508f,
                                        0.00321144611f,
                                        0.000429556705f,
                                        1.94616387e-05f,
                                        8.57025589e-06f,
                                        3.77405445e-06f,
                                        1.66196742e-06f,
                                        7.31874934e-07f,
                                        3.22293289e-07f,
                                        1.41927202e-07f};
static const float ref_linear_4[16] = {
    0.25f,           0.140585333f,    0.079056941f,    0.0444569848f,
    0.0250000004f,   0.0140585322f,   0.00790569466f,  0.00444569858f,
    0.00249999994f,  0.00140585331f,  0.000790569466f, 0.000444569858f,
    0.000250000012f, 0.000140585325f, 7.90569466e-05f, 4.44569851e-05f};
static const float ref_plain[16] = {1.0f,
                                    0.440366626f,
                                    0.193922758f,
                                    0.0853971019f,
                                    0.0376060307f,
                                    0.0165604409f,
                                    0.00729266508f,
                                    0.00321144611f,
                                    0.00141421345f,
                                    0.000622772437f,
                                    0.000274248188f,
                                    0.000120769742f,
                                    5.31829573e-05f,
                                    2.34199979e-05f,
                                    1.03133852e-05f,
                                    4.54167048e-06f};

static void assert_table(const struct bt_model_file *mf, const float *ref)
{
    float got[16];

    assert_int_equal(bt_model_config(mf)->head_dim, 32);
    bt_model_rope_freqs(mf, got);
    for (int i = 0; i < 16; i++) {
        if (!(fabsf(got[i] - ref[i]) <= 1e-6f * ref[i])) {
            print_error("frequency %d: %.9g, expected %.9g\n", i, (double)got[i], (double)ref[i]);
        }
        assert_true(fabsf(got[i] - ref[i]) <= 1e-6f * ref[i]);
    }
}

#define LLAMA3(key, factor)                                                                        \
    "{\"" key "\":\"llama3\",\"factor\":" factor ",\"low_freq_factor\":1.0,"                       \
    "\"high_freq_factor\":4.0,\"original_max_position_embeddings\":8192"

static void test_LOAD_06_tables(void **state)
{
    static const struct {
        const char *extra;
        const float *ref;
        enum bt_rope_scaling scaling;
    } rows[] = {
        {",\"rope_theta\":500000.0,\"rope_scaling\":null", ref_plain, BT_ROPE_NONE},
        {",\"rope_theta\":500000,\"rope_scaling\":{\"rope_type\":\"default\"}", ref_plain,
         BT_ROPE_NONE},
        {",\"rope_theta\":500000.0,\"rope_scaling\":" LLAMA3("rope_type", "8.0") "}", ref_llama3_8,
         BT_ROPE_LLAMA3},
        {",\"rope_theta\":500000.0,\"rope_scaling\":" LLAMA3("rope_type", "32") "}", ref_llama3_32,
         BT_ROPE_LLAMA3},
        {",\"rope_theta\":500000.0,\"rope_scaling\":" LLAMA3("type", "8.0") "}", ref_llama3_8,
         BT_ROPE_LLAMA3},
        {",\"rope_parameters\":" LLAMA3("rope_type", "8.0") ",\"rope_theta\":500000.0}",
         ref_llama3_8, BT_ROPE_LLAMA3},
        {",\"rope_parameters\":{\"full_attention\":" LLAMA3("rope_type", "32.0") ",\"rope_theta\":"
                                                                                 "500000.0}}",
         ref_llama3_32, BT_ROPE_LLAMA3},
        {",\"rope_scaling\":{\"type\":\"linear\",\"factor\":4.0}", ref_linear_4, BT_ROPE_LINEAR},
        {",\"rope_parameters\":{\"rope_type\":\"linear\",\"factor\":4.0,\"rope_theta\":10000.0}",
         ref_linear_4, BT_ROPE_LINEAR},
    };
    struct mk_spec s = MK_SPEC("llama");
    struct bt_model_file *mf;

    s.d = 32;
    for (size_t i = 0; i < BT_ARRAY_LEN(rows); i++) {
        mk_hf_model(dir, &s, rows[i].extra, 1);
        mf = open_good(dir);
        assert_table(mf, rows[i].ref);
        assert_int_equal(bt_model_config(mf)->rope_scaling, rows[i].scaling);
        bt_model_close(mf);
    }
}

/* The divisors of a GGUF frequency tensor make the same table. */
static void test_LOAD_06_gguf(void **state)
{
    struct mk_spec s = MK_SPEC("llama");
    const uint64_t n = 16;
    struct bt_model_file *mf;

    s.d = 32;
    for (int round = 0; round < 3; round++) {
        struct mk_gguf g = {0};
        struct bt_buf file;

        mk_gguf_model(&g, &s);
        if (round == 0) {
            mk_kv_f32(&g, "llama.rope.freq_base", 500000.0f);
            mk_tensor(&g, "rope_freqs.weight", 0, 1, &n);
            for (int i = 0; i < 16; i++) {
                float f = ref_plain[i] / ref_llama3_8[i];

                memcpy(g.data.p + g.data.n - 64 + i * 4, &f, 4);
            }
        } else {
            if (round == 1) {
                mk_kv_str(&g, "llama.rope.scaling.type", "linear");
                mk_kv_f32(&g, "llama.rope.scaling.factor", 4.0f);
            } else {
                mk_kv_f32(&g, "llama.rope.scale_linear", 4.0f);
            }
        }
        mk_gguf_write(&g, &file);
        mk_gguf_fini(&g);
        mk_file(dir, "m.gguf", file.p, file.n);
        bt_buf_fini(&file);
        mf = open_good(mk_path(dir, "m.gguf"));
        assert_table(mf, round == 0 ? ref_llama3_8 : ref_linear_4);
        assert_null(bt_model_tensor(mf, "rope_freqs.weight"));
        bt_model_close(mf);
    }
}

static void test_LOAD_06_refused(void **state)
{
    static const struct {
        const char *extra, *word;
        int rc;
    } rows[] = {
        {",\"rope_scaling\":{\"rope_type\":\"yarn\",\"factor\":4.0,\"attention_factor\":1.0}",
         "\"yarn\"", BT_E_UNSUPPORTED},
        {",\"rope_scaling\":{\"type\":\"yarn\",\"factor\":4.0,\"mscale\":1.0,"
         "\"mscale_all_dim\":1.0}",
         "\"yarn\"", BT_E_UNSUPPORTED},
        {",\"rope_scaling\":{\"type\":\"dynamic\",\"factor\":4.0}", "\"dynamic\"",
         BT_E_UNSUPPORTED},
        {",\"rope_parameters\":{\"rope_type\":\"longrope\",\"rope_theta\":1e4}", "\"longrope\"",
         BT_E_UNSUPPORTED},
        {",\"rope_scaling\":{\"rope_type\":\"tomorrow\"}", "\"tomorrow\"", BT_E_UNSUPPORTED},
        {",\"rope_scaling\":{\"factor\":4.0}", "rope_type", BT_E_FORMAT},
        {",\"rope_scaling\":{\"type\":\"linear\",\"factor\":0}", "factor", BT_E_FORMAT},
        {",\"rope_scaling\":{\"type\":\"linear\",\"factor\":\"4\"}", "factor", BT_E_FORMAT},
        {",\"rope_scaling\":\"linear\"", "rope_scaling", BT_E_FORMAT},
        {",\"rope_scaling\":{\"rope_type\":\"llama3\",\"factor\":8.0}", "llama3", BT_E_FORMAT},
        {",\"partial_rotary_factor\":0.5", "partial_rotary_factor", BT_E_UNSUPPORTED},
        {",\"rope_theta\":-1", "rope base", BT_E_FORMAT},
    };

    for (size_t i = 0; i < BT_ARRAY_LEN(rows); i++) {
        config_refused("llama", rows[i].extra, rows[i].rc, rows[i].word);
    }
}

/* Two nodes compare digests, so a table that differs is a pair that is refused. */
static void test_LOAD_06_digest(void **state)
{
    struct mk_spec s = MK_SPEC("llama");
    uint8_t d[3][32];
    static const char *const extra[3] = {
        ",\"rope_scaling\":" LLAMA3("type", "8.0") "}",
        ",\"rope_scaling\":" LLAMA3("type", "9.0") "}",
        ",\"rope_scaling\":" LLAMA3("type", "8.0") "}",
    };

    for (int i = 0; i < 3; i++) {
        struct bt_model_file *mf;
        struct bt_err err = {0};

        mk_hf_model(dir, &s, extra[i], 1);
        mf = open_good(dir);
        assert_int_equal(bt_model_digest(mf, d[i], &err), BT_OK);
        bt_model_close(mf);
    }
    assert_memory_not_equal(d[0], d[1], 32);
    assert_memory_equal(d[0], d[2], 32);
}

/* --- LOAD-07 --- */

static void test_LOAD_07_head_size(void **state)
{
    static const struct {
        const char *arch;
        bool bias;
    } rows[] = {
        {"llama", false}, {"llama", true}, {"qwen2", true}, {"qwen3", false}, {"qwen3", true}};

    for (size_t i = 0; i < BT_ARRAY_LEN(rows); i++) {
        struct mk_spec s = MK_SPEC(rows[i].arch);
        struct mk_gguf g = {0};
        struct bt_buf file;

        s.d = 32; /* 64 / 4 would be 16 */
        s.bias = rows[i].bias;
        mk_hf_model(dir, &s, "", 1);
        mk_gguf_model(&g, &s);
        mk_gguf_write(&g, &file);
        mk_file(dir, "m.gguf", file.p, file.n);
        bt_buf_fini(&file);
        mk_gguf_fini(&g);
        for (int form = 0; form < 2; form++) {
            struct bt_model_file *mf = open_good(form ? mk_path(dir, "m.gguf") : dir);

            assert_int_equal(bt_model_config(mf)->head_dim, 32);
            assert_int_equal(bt_model_config(mf)->qkv_bias, rows[i].bias);
            assert_int_equal(bt_model_config(mf)->qk_norm, strcmp(rows[i].arch, "qwen3") == 0);
            assert_int_equal(bt_model_tensor(mf, "blk.0.attn_q.weight")->shape[0], 128);
            assert_int_equal(bt_model_tensor(mf, "blk.0.attn_k.weight")->shape[0], 64);
            assert_int_equal(bt_model_tensor(mf, "blk.0.attn_output.weight")->shape[1], 128);
            bt_model_close(mf);
        }
    }
}

/* The configuration gives one head size, the tensors have another. */
static void test_LOAD_07_mismatch(void **state)
{
    struct mk_spec s = MK_SPEC("llama");
    struct bt_buf config = {0};
    FILE *f;

    mk_hf_model(dir, &s, "", 1);
    f = fopen(mk_path(dir, "config.json"), "rb");
    assert_non_null(f);
    assert_int_equal(bt_buf_reserve(&config, 4096), BT_OK);
    config.n = fread(config.p, 1, 4095, f);
    fclose(f);
    s.d = 32;
    mk_hf_model(dir, &s, "", 1);
    mk_file(dir, "config.json", config.p, config.n);
    bt_buf_fini(&config);
    refused(BT_E_FORMAT, "blk.0.attn_q.weight");
    refused(BT_E_FORMAT, "[128, 64]");
}

/* --- STOP-04 --- */

static void assert_eos(const struct bt_model_file *mf, const int32_t *ids, int n)
{
    const struct bt_model_config *c = bt_model_config(mf);

    assert_int_equal(c->n_eos, n);
    assert_memory_equal(c->eos, ids, (size_t)n * sizeof(*ids));
}

static void test_STOP_04_directory(void **state)
{
    struct mk_spec s = MK_SPEC("llama");
    struct bt_model_file *mf;

    /* A list of three, one more in config.json, one named by text. */
    mk_hf_model(dir, &s, ",\"eos_token_id\":[7]", 1);
    mk_text(dir, "generation_config.json", "{\"eos_token_id\":[5,3,4]}");
    mk_text(dir, "tokenizer_config.json", "{\"eos_token\":\"<|im_end|>\"}");
    mf = open_good(dir);
    assert_eos(mf, (const int32_t[]){2, 3, 4, 5, 7}, 5);
    bt_model_close(mf);

    mk_text(dir, "generation_config.json", "{\"eos_token_id\":7}");
    mk_text(dir, "tokenizer_config.json",
            "{\"eos_token\":{\"content\":\"</s>\"},\"bos_token\":\"<|endoftext|>\","
            "\"added_tokens_decoder\":{\"6\":{\"content\":\"</s>\"}},\"add_bos_token\":true,"
            "\"chat_template\":[{\"name\":\"tool_use\",\"template\":\"no\"},"
            "{\"name\":\"default\",\"template\":\"yes\"}]}");
    mf = open_good(dir);
    assert_eos(mf, (const int32_t[]){6, 7}, 2);
    assert_int_equal(bt_model_tok_source(mf)->bos_id, 0);
    assert_true(bt_model_tok_source(mf)->add_bos);
    assert_true(bt_str_eq(bt_model_tok_source(mf)->chat_template, BT_STR("yes")));
    bt_model_close(mf);

    mk_text(dir, "chat_template.jinja", "newer");
    mf = open_good(dir);
    assert_true(bt_str_eq(bt_model_tok_source(mf)->chat_template, BT_STR("newer")));
    bt_model_close(mf);
}

static void test_STOP_04_refused(void **state)
{
    struct mk_spec s = MK_SPEC("llama");

    mk_hf_model(dir, &s, "", 1);
    mk_text(dir, "generation_config.json", "{\"eos_token_id\":[2,8]}");
    refused(BT_E_FORMAT, "generation_config.json: eos_token_id: id 8");
    mk_text(dir, "generation_config.json", "{\"eos_token_id\":\"2\"}");
    refused(BT_E_FORMAT, "generation_config.json: eos_token_id");
    mk_text(dir, "generation_config.json", "{}");
    mk_text(dir, "tokenizer_config.json", "{\"eos_token\":\"nobody\"}");
    refused(BT_E_FORMAT, "\"nobody\"");
}

static void test_STOP_04_gguf(void **state)
{
    struct mk_spec s = MK_SPEC("llama");
    struct mk_gguf g = {0};
    struct bt_model_file *mf;
    struct bt_buf file;

    /* End of text by key, end of turn by its text; <|eot_id|> is an ordinary token here. */
    mk_gguf_model(&g, &s);
    mk_kv_u32(&g, "tokenizer.ggml.eos_token_id", 0);
    mk_kv_u32(&g, "tokenizer.ggml.eot_token_id", 3);
    mk_gguf_write(&g, &file);
    mk_gguf_fini(&g);
    mk_file(dir, "m.gguf", file.p, file.n);
    bt_buf_fini(&file);
    mf = open_good(mk_path(dir, "m.gguf"));
    assert_eos(mf, (const int32_t[]){0, 2, 3}, 3);
    bt_model_close(mf);
}

/* --- settings that are refused by name --- */

static void test_config_refused(void **state)
{
    static const struct {
        const char *arch, *extra, *word;
        int rc;
    } rows[] = {
        {"mistral", ",\"sliding_window\":128", "sliding_window 128", BT_E_UNSUPPORTED},
        {"qwen2", ",\"use_sliding_window\":true", "use_sliding_window", BT_E_UNSUPPORTED},
        {"qwen3", ",\"layer_types\":[\"sliding_attention\"]", "layer_types", BT_E_UNSUPPORTED},
        {"llama", ",\"mlp_bias\":true", "mlp_bias", BT_E_UNSUPPORTED},
        {"llama", ",\"hidden_act\":\"gelu\"", "hidden_act", BT_E_UNSUPPORTED},
        {"llama", ",\"quantization_config\":{\"quant_method\":\"gptq\"}", "gptq", BT_E_UNSUPPORTED},
        {"gemma", "", "\"NobodyForCausalLM\"", BT_E_UNSUPPORTED},
        {"llama", ",\"hidden_size\":64", "duplicate", BT_E_FORMAT},
        {"llama", ",\"mlp_bias\":1", "mlp_bias", BT_E_FORMAT},
    };

    for (size_t i = 0; i < BT_ARRAY_LEN(rows); i++) {
        config_refused(rows[i].arch, rows[i].extra, rows[i].rc, rows[i].word);
    }
    /* Windows that are off, or as wide as the context, are no windows. */
    for (int i = 0; i < 2; i++) {
        struct mk_spec s = MK_SPEC(i ? "mistral" : "qwen2");

        mk_hf_model(dir, &s, i ? ",\"sliding_window\":512" : ",\"sliding_window\":128", 1);
        bt_model_close(open_good(dir));
    }
}

static void test_config_ranges(void **state)
{
    static const char *const keys[] = {
        "hidden_size",       "num_hidden_layers", "num_attention_heads",    "num_key_value_heads",
        "intermediate_size", "vocab_size",        "max_position_embeddings"};
    static const char *const values[] = {"0",          "-1",    "1.5",  "\"64\"",
                                         "2147483648", "1e300", "[64]", "2147483647"};
    char text[1024];

    for (size_t i = 0; i < BT_ARRAY_LEN(keys); i++) {
        for (size_t k = 0; k < BT_ARRAY_LEN(values); k++) {
            struct mk_spec s = MK_SPEC("llama");
            struct bt_model_file *mf = NULL;
            struct bt_err err = {0};
            int n = 0;

            mk_hf_model(dir, &s, "", 1);
            n = snprintf(text, sizeof(text),
                         "{\"architectures\":[\"LlamaForCausalLM\"],\"rms_norm_eps\":1e-5");
            for (size_t j = 0; j < BT_ARRAY_LEN(keys); j++) {
                static const char *const good[] = {"64", "2", "4", "2", "32", "8", "512"};

                n += snprintf(text + n, sizeof(text) - (size_t)n, ",\"%s\":%s", keys[j],
                              j == i ? values[k] : good[j]);
            }
            snprintf(text + n, sizeof(text) - (size_t)n, "}");
            mk_text(dir, "config.json", text);
            assert_int_equal(bt_model_open(dir, &mf, &err), BT_E_FORMAT);
            assert_true(err.msg[0] != 0);
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_good, setup, teardown),
        cmocka_unit_test_setup_teardown(test_LOAD_04_shards, setup, teardown),
        cmocka_unit_test_setup_teardown(test_LOAD_04_stray, setup, teardown),
        cmocka_unit_test_setup_teardown(test_LOAD_04_index, setup, teardown),
        cmocka_unit_test_setup_teardown(test_LOAD_04_incomplete, setup, teardown),
        cmocka_unit_test_setup_teardown(test_links_are_followed, setup, teardown),
        cmocka_unit_test_setup_teardown(test_LOAD_06_tables, setup, teardown),
        cmocka_unit_test_setup_teardown(test_LOAD_06_gguf, setup, teardown),
        cmocka_unit_test_setup_teardown(test_LOAD_06_refused, setup, teardown),
        cmocka_unit_test_setup_teardown(test_LOAD_06_digest, setup, teardown),
        cmocka_unit_test_setup_teardown(test_LOAD_07_head_size, setup, teardown),
        cmocka_unit_test_setup_teardown(test_LOAD_07_mismatch, setup, teardown),
        cmocka_unit_test_setup_teardown(test_STOP_04_directory, setup, teardown),
        cmocka_unit_test_setup_teardown(test_STOP_04_refused, setup, teardown),
        cmocka_unit_test_setup_teardown(test_STOP_04_gguf, setup, teardown),
        cmocka_unit_test_setup_teardown(test_config_refused, setup, teardown),
        cmocka_unit_test_setup_teardown(test_config_ranges, setup, teardown),
    };

    mk_limit_memory();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
