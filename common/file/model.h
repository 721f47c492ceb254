/* A model on disk, seen one way whether it is a GGUF file or a Hugging Face directory.
 *
 * Opening maps the files read-only and checks everything that is used later: counts, offsets,
 * shapes, dtypes, paths, and that every parameter of the architecture is there with its shape.
 * Files are untrusted: a bad one costs one error line that names the key or tensor, little memory
 * and less than a second. After open the object is immutable and may be read from any thread.
 *
 * Tensors carry GGUF names ("token_embd.weight", "blk.0.attn_q.weight"); names of a directory are
 * translated. Shapes are row-major with the innermost dimension last: a projection of K inputs to N
 * outputs is [N, K], so a row is one output's weights, contiguous.
 */
#ifndef BT_FILE_MODEL_H
#define BT_FILE_MODEL_H

#include "common/base/rc.h"

/* X(name, text, elements per block, bytes per block) */
#define BT_DTYPE_LIST(X)                                                                           \
    X(F32, "f32", 1, 4)                                                                            \
    X(F16, "f16", 1, 2)                                                                            \
    X(BF16, "bf16", 1, 2)                                                                          \
    X(Q8_0, "q8_0", 32, 34) /* f16 scale d, 32 x int8: d*q */                                      \
    X(Q4_0, "q4_0", 32, 18) /* f16 d, 16 bytes; low nibbles first 16, high last 16: d*(q-8) */     \
    X(Q4_1, "q4_1", 32, 20) /* f16 d, f16 m, 16 bytes likewise: d*q+m */

enum bt_dtype {
#define X(name, text, elems, bytes) BT_DTYPE_##name,
    BT_DTYPE_LIST(X)
#undef X
        BT_DTYPE_COUNT
};

const char *bt_dtype_name(enum bt_dtype t);
size_t bt_dtype_block_elems(enum bt_dtype t);
size_t bt_dtype_block_bytes(enum bt_dtype t);

struct bt_tensor {
    struct bt_str name; /* canonical (GGUF) name */
    enum bt_dtype dtype;
    int n_dims;       /* 1 or 2 */
    int64_t shape[4]; /* [rows, cols] for 2, [n] for 1 */
    const void *data; /* mapped read-only, aligned to at least 2 bytes */
    size_t bytes;
};

enum bt_arch { BT_ARCH_LLAMA, BT_ARCH_QWEN2, BT_ARCH_QWEN3 };
enum bt_rope_scaling { BT_ROPE_NONE, BT_ROPE_LINEAR, BT_ROPE_LLAMA3 };

#define BT_MODEL_MAX_EOS 16

struct bt_model_config {
    enum bt_arch arch;
    char name[128]; /* for people; control characters removed */
    int n_layers;
    int d_model;    /* E */
    int n_heads;    /* H */
    int n_kv_heads; /* Hkv, divides H */
    int head_dim;   /* D; from the file, not d_model / n_heads */
    int d_ff;       /* F */
    int n_vocab;    /* V, rows of the embedding */
    int n_ctx;      /* positions the model was trained for */
    float rms_eps;
    bool tied;     /* output projection is the embedding */
    bool qkv_bias; /* qwen2: blk.N.attn_{q,k,v}.bias present */
    bool qk_norm;  /* qwen3: blk.N.attn_{q,k}_norm.weight present */
    /* Rotary embedding. interleaved: pairs (2i, 2i+1), as GGUF stores llama; else (i, i + D/2). */
    bool rope_interleaved;
    float rope_theta;
    enum bt_rope_scaling rope_scaling;
    float rope_factor;
    float rope_low_freq_factor, rope_high_freq_factor; /* llama3 */
    int rope_orig_ctx;                                 /* llama3 */
    int n_eos;
    int32_t eos[BT_MODEL_MAX_EOS]; /* every id that ends an answer, sorted, no duplicates */
};

/* Inverse frequency of each of the head_dim / 2 pairs with scaling applied (a GGUF rope_freqs
 * tensor counts as well); `ret` holds head_dim / 2 floats. Source of the llama3 rule: the Hugging
 * Face configuration key rope_scaling, type "llama3". */
struct bt_model_file;
void bt_model_rope_freqs(const struct bt_model_file *mf, float *ret);

/* Where the tokenizer comes from; text in common/text. All borrowed from the model file. */
struct bt_tok_source {
    struct bt_str json;  /* tokenizer.json, or empty: then the GGUF arrays below */
    struct bt_str model; /* "gpt2" = byte-level BPE; anything else is refused by common/text */
    struct bt_str pre;   /* pre-tokenizer name of the GGUF file */
    size_t n_tokens;
    const struct bt_str *tokens;
    const int32_t *types; /* 1 normal, 2 unknown, 3 control, 4 user defined, 5 unused, 6 byte */
    size_t n_merges;
    const struct bt_str *merges; /* "left right" */
    int32_t bos_id;              /* -1 = none */
    bool add_bos;
    struct bt_str chat_template; /* empty = none */
};

/* `path`: a .gguf file or a directory. The caller owns *ret_mf and closes it.
 * Errors: BT_E_FORMAT, BT_E_UNSUPPORTED (architecture, dtype, rope type: named), BT_E_NOT_FOUND,
 * BT_E_IO, BT_E_NOMEM. Blocks on disk. */
int bt_model_open(const char *path, struct bt_model_file **ret_mf, struct bt_err *err) BT_MUST_USE;
void bt_model_close(struct bt_model_file *mf);

const struct bt_model_config *bt_model_config(const struct bt_model_file *mf);
const struct bt_tok_source *bt_model_tok_source(const struct bt_model_file *mf);
/* NULL if absent. */
const struct bt_tensor *bt_model_tensor(const struct bt_model_file *mf, const char *name);
size_t bt_model_n_tensors(const struct bt_model_file *mf);
const struct bt_tensor *bt_model_tensor_at(const struct bt_model_file *mf, size_t idx);

/* SHA-256 over weights, config, tokenizer and rope settings. Reads all bytes once; the result is
 * kept in the user's cache folder under (device, inode, size, mtime in ns of every file), so that a
 * second start does not read them again. Blocks. */
int bt_model_digest(const struct bt_model_file *mf,
                    uint8_t ret_digest[32],
                    struct bt_err *err) BT_MUST_USE;

#endif
