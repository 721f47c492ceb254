/* A model made up on the spot: a Hugging Face directory with random BF16 or F16 weights, or with a
 * weights file of holes for models whose weights are made on the device. */
#ifndef BT_TESTS_GPU_MADE_MODEL_H
#define BT_TESTS_GPU_MADE_MODEL_H

#include "common/file/model.h"

struct made_model {
    const char *arch;  /* "llama", "qwen2", "qwen3" */
    const char *dtype; /* "BF16", "F16", "F32" */
    int layers, width, heads, kv_heads, head_dim, ff, vocab, ctx;
    bool tied;
    bool holes; /* weights are not written */
};

/* Writes into a new folder under $TMPDIR, opens, removes the files (the mappings stay). */
int made_model_open(const struct made_model *m, struct bt_model_file **ret, struct bt_err *err);

#endif
