/* Private to common/file: the open model and what its readers share.
 *
 * A model is built by one thread inside bt_model_open and never written again. Readers parse memory
 * ranges, so that fuzz targets and tests feed them without a file; only map.c touches the disk. */
#ifndef BT_FILE_FILE_INT_H
#define BT_FILE_FILE_INT_H

#include "common/base/buf.h"
#include "common/file/model.h"

#include <sys/types.h>

/* A file mapped read-only. A file that shrinks while it is mapped raises SIGBUS on access, as with
 * every mapping: models are replaced by rename, not rewritten. */
struct bt_file_map {
    char *path;       /* owned */
    const char *role; /* name inside the digest: independent of where the model lies */
    int fd;           /* kept for the check that nothing changed while hashing */
    const uint8_t *p; /* NULL for an empty file */
    size_t n;
    dev_t dev;
    ino_t ino;
    int64_t mtime_ns;
};

/* Maps a regular file of at most `max` bytes. Follows symbolic links (download caches consist of
 * them), never blocks on a FIFO or device. `what` names the file in errors. On failure *ret is as
 * bt_file_map_fini leaves it. BT_E_NOT_FOUND, BT_E_IO, BT_E_TOO_LARGE, BT_E_NOMEM. */
int bt_file_map_init(const char *path, size_t max, struct bt_file_map *ret, struct bt_err *err)
    BT_MUST_USE;
void bt_file_map_fini(struct bt_file_map *m);
/* True if size and mtime still are what they were at open. */
bool bt_file_map_unchanged(const struct bt_file_map *m);

struct bt_model_file {
    struct bt_model_config cfg;
    struct bt_tok_source tok;
    struct bt_tensor *tensors; /* sorted by name, no duplicates */
    size_t n_tensors;
    struct bt_file_map *files; /* in the order of the digest */
    size_t n_files;
    size_t cap_files;
    float *rope_freqs; /* head_dim / 2 inverse frequencies, scaling applied */

    /* Storage behind tok and tensors[].name; NULL where a map holds it. */
    struct bt_str *tok_tokens;
    struct bt_str *tok_merges;
    int32_t *tok_types;
    char *tok_text;
    char *names;
};

/* --- parts of an architecture (arch.c) --- */

/* Value of general.architecture, or of model_type, to architecture; -1 if unknown. */
int bt_arch_of_gguf(struct bt_str name);
int bt_arch_of_hf(struct bt_str name, bool is_model_type);
const char *bt_arch_name(enum bt_arch arch);
/* Canonical name of a Hugging Face tensor into ret (cap >= 64); false if it is none of ours. */
bool bt_tensor_name_of_hf(struct bt_str hf, char *ret, size_t cap);
/* True for stored buffers that carry no parameter (old rotary tables). */
bool bt_tensor_is_ignorable(struct bt_str name);
/* Checks of a model whose cfg (all but n_vocab, tied for GGUF, qkv_bias, qk_norm) and tensors are
 * filled: sets those, requires every parameter with its shape and refuses the ones the architecture
 * does not have. */
int bt_model_check(struct bt_model_file *mf, struct bt_err *err) BT_MUST_USE;

/* --- the two forms --- */

/* Fills mf from GGUF bytes; the range must outlive mf. */
int bt_gguf_load(struct bt_model_file *mf, const uint8_t *p, size_t n, struct bt_err *err)
    BT_MUST_USE;
/* Fills mf from the directory; maps go to mf->files. */
int bt_hf_load(struct bt_model_file *mf, const char *dir, struct bt_err *err) BT_MUST_USE;

/* Opens a GGUF model from memory that outlives it (fuzzing, tests); no files, so no digest. */
int bt_model_open_mem(const uint8_t *p, size_t n, struct bt_model_file **ret_mf, struct bt_err *err)
    BT_MUST_USE;

/* --- small shared helpers (model.c) --- */

/* Checks ranges that all of the code relies on (heads divide, even head size, rope values). */
int bt_model_config_check(const struct bt_model_config *cfg, struct bt_err *err) BT_MUST_USE;
/* `factors`: head_dim / 2 divisors of a GGUF file, or NULL. */
int bt_model_rope_build(struct bt_model_file *mf,
                        const float *factors,
                        struct bt_err *err) BT_MUST_USE;
/* Adds an id that ends an answer; keeps the list sorted and unique. */
int bt_model_eos_add(struct bt_model_config *cfg, int64_t id, const char *key, struct bt_err *err)
    BT_MUST_USE;
/* Copies what a person may see: printable, whole UTF-8 sequences, cut to fit. */
void bt_model_name_set(struct bt_model_config *cfg, struct bt_str name);
/* Sorts by name and refuses duplicates. */
int bt_tensors_sort(struct bt_tensor *t, size_t n, struct bt_err *err) BT_MUST_USE;
/* Bytes of a tensor; false if a row is not made of whole blocks or the product overflows. */
bool bt_tensor_bytes(enum bt_dtype t, int64_t rows, int64_t cols, size_t *ret);
int bt_str_cmp(struct bt_str a, struct bt_str b);

/* For "%.*s" of untrusted names in messages. */
#define BT_NAME_ARG(s) ((int)BT_MIN((s).n, (size_t)80)), ((s).p)

#endif
