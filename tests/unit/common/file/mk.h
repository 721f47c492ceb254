/* Writers of small model files for the tests of common/file: right ones, and ones that are wrong in
 * a single place. Failures of the writers abort. Single-threaded. */
#ifndef BT_TESTS_FILE_MK_H
#define BT_TESTS_FILE_MK_H

#include "common/base/buf.h"
#include "common/file/model.h"

/* --- GGUF, piece by piece --- */

struct mk_gguf {
    struct bt_buf kvs, infos, data;
    uint64_t n_kvs, n_tensors;
    uint32_t version;   /* 0 = 3 */
    uint32_t alignment; /* of the writer, 0 = 32; the key is separate */
};

void mk_raw(struct bt_buf *b, const void *p, size_t n);
void mk_str(struct bt_buf *b, const char *s);
/* Key and type word; the value follows with mk_raw on g->kvs. */
void mk_key(struct mk_gguf *g, const char *key, uint32_t type);
void mk_kv_u32(struct mk_gguf *g, const char *key, uint32_t v);
void mk_kv_f32(struct mk_gguf *g, const char *key, float v);
void mk_kv_bool(struct mk_gguf *g, const char *key, bool v);
void mk_kv_str(struct mk_gguf *g, const char *key, const char *v);
void mk_kv_strs(struct mk_gguf *g, const char *key, const char *const *v, size_t n);
void mk_kv_i32s(struct mk_gguf *g, const char *key, const int32_t *v, size_t n);
/* Tensor with zeros for data; dims innermost first as in the file. */
void mk_tensor(
    struct mk_gguf *g, const char *name, uint32_t type, int n_dims, const uint64_t *dims);
/* Entry alone: no data is added, the offset is as given. */
void mk_tensor_at(struct mk_gguf *g,
                  const char *name,
                  uint32_t type,
                  int n_dims,
                  const uint64_t *dims,
                  uint64_t offset);
/* The file so far; g stays usable. The caller frees *ret. */
void mk_gguf_write(const struct mk_gguf *g, struct bt_buf *ret);
void mk_gguf_fini(struct mk_gguf *g);

/* --- whole models with zero weights --- */

struct mk_spec {
    const char *arch; /* "llama", "qwen2", "qwen3", "mistral" (directories only) */
    int layers, e, h, hkv, d, f, v;
    bool tied;
    bool bias; /* of Q, K and V; qwen2 has it anyway */
};
#define MK_SPEC(a)                                                                                 \
    ((struct mk_spec){                                                                             \
        .arch = (a), .layers = 2, .e = 64, .h = 4, .hkv = 2, .d = 16, .f = 32, .v = 8})

#define MK_N_TOKENS 8
/* "<|endoftext|>" "<|im_start|>" "<|im_end|>" "a" "b" "c" "ab" "<|eot_id|>"; types 3 3 3 1 1 1 1 1:
 * the last one is no control token. */
void mk_gguf_settings(struct mk_gguf *g, const struct mk_spec *s);
void mk_gguf_tokenizer(struct mk_gguf *g);
void mk_gguf_tensors(struct mk_gguf *g, const struct mk_spec *s);
/* All three. */
void mk_gguf_model(struct mk_gguf *g, const struct mk_spec *s);

/* A directory; `extra` is appended to the members of config.json (", \"key\": ..."), may be "".
 * shards 1: model.safetensors; more: an index. */
void mk_hf_model(const char *dir, const struct mk_spec *s, const char *extra, int shards);

/* --- files --- */

/* A new empty directory, removed with its files (one level) by mk_dir_remove. */
void mk_dir(char ret[128]);
void mk_dir_remove(const char *dir);
void mk_file(const char *dir, const char *name, const void *p, size_t n);
void mk_text(const char *dir, const char *name, const char *text);
/* "DIR/NAME" in a static buffer. */
const char *mk_path(const char *dir, const char *name);

/* 2 GiB of address space for the process, unless a sanitizer needs more. */
void mk_limit_memory(void);

#endif
