/* Inside of kernels/model: weights of a model, the state of one forward pass, architectures. */
#ifndef KN_MODEL_MODEL_INT_H
#define KN_MODEL_MODEL_INT_H

#include "common/mem/mem.h"
#include "kernels/core/device.h"
#include "kernels/core/ops.h"
#include "kernels/model/model.h"

/* Sizes that shapes are written in. */
enum kn_dim {
    KN_DIM_NONE,
    KN_DIM_D,  /* width of a head */
    KN_DIM_E,  /* width of the model */
    KN_DIM_F,  /* width of the feed-forward part */
    KN_DIM_HD, /* all query heads */
    KN_DIM_KD, /* all key heads */
    KN_DIM_V,  /* vocabulary */
};

/* Weights of one transformer block; what an architecture does not have stays empty. */
struct kn_layer {
    const float *attn_norm; /* [E] */
    struct kn_weight qkv;   /* [HD + 2 KD, E] */
    const float *q_norm;    /* [D] */
    const float *k_norm;    /* [D] */
    struct kn_weight o;     /* [E, HD] */
    const float *ffn_norm;  /* [E] */
    struct kn_weight gu;    /* [2F, E]: gate, up */
    struct kn_weight down;  /* [E, F] */
};

/* Immutable after kn_weights_load; owns one region. Where weights live on a device, so do the
 * vectors, and pointers to them are device addresses. */
struct kn_weights {
    struct bt_mem_region region;
    const struct bt_tensor *embed; /* [V, E], borrowed from the file */
    const void *embed_data;        /* its rows where they are used */
    struct kn_layer *layers;       /* [n_layers] */
    const float *out_norm;         /* [E] */
    struct kn_weight output;       /* [V, E] */
};

/* One row of an architecture's table: which tensor of a block goes where. */
enum kn_bind_kind { KN_BIND_VECTOR, KN_BIND_MATRIX, KN_BIND_BIAS };
struct kn_bind {
    const char *name; /* after "blk.N." */
    enum kn_bind_kind kind;
    size_t offset; /* of the const float * or the struct kn_weight in struct kn_layer */
    int part;      /* of a matrix or bias */
    enum kn_dim rows, cols;
};
#define KN_VECTOR(name, field, dim)                                                                \
    {                                                                                              \
        name, KN_BIND_VECTOR, offsetof(struct kn_layer, field), 0, dim, KN_DIM_NONE                \
    }
#define KN_MATRIX(name, field, part, rows, cols)                                                   \
    {                                                                                              \
        name, KN_BIND_MATRIX, offsetof(struct kn_layer, field), part, rows, cols                   \
    }
#define KN_BIAS(name, field, part, dim)                                                            \
    {                                                                                              \
        name, KN_BIND_BIAS, offsetof(struct kn_layer, field), part, dim, KN_DIM_NONE               \
    }

struct kn_fwd;
struct kn_arch {
    const char *name;
    /* What the graph below does not do is refused here by name. */
    int (*check)(const struct bt_model_config *c, struct bt_err *err);
    const struct kn_bind *binds;
    size_t n_binds;
    void (*forward)(struct kn_fwd *f);
};
extern const struct kn_arch kn_arch_llama, kn_arch_qwen2, kn_arch_qwen3;

/* Where weights go: packed for a table of ops, or onto a device. */
struct kn_weights_to {
    const struct kn_ops *ops; /* NULL = device */
    struct kn_team *team;
    const struct kn_device_ops *device_ops;
    struct kn_device *device;
    enum bt_dtype dtype;              /* on the device */
    const struct kn_model_home *home; /* NULL = none */
    uint64_t random_seed; /* not 0: matrices are made up on the device, norms are 1 (benchmarks) */
};
int kn_weights_load(const struct bt_model_file *file,
                    const struct kn_arch *arch,
                    const struct kn_weights_to *to,
                    struct kn_weights *ret,
                    struct bt_err *err) BT_MUST_USE;
void kn_weights_free(struct kn_weights *w);

/* Called with every intermediate of the graph in builds with assertions (golden tests, debugging).
 */
typedef void (*kn_tap_fn)(
    void *arg, const char *name, int layer, const float *rows, int n_rows, int width);

/* A forward pass: batch, workspace and where the pass stands. Lives in struct kn_model; arrays are
 * sized at creation for max_batch_tokens rows (T). */
struct kn_fwd {
    const struct kn_device_ops *device_ops;
    struct kn_device *device; /* NULL = CPU; else nothing below is used but w and c */
    const struct kn_ops *ops;
    struct kn_stream *stream;
    const struct bt_model_config *c;
    const struct kn_weights *w;
    const struct kn_batch *b;

    int n_rows;               /* rows of x: T; from kn_f_keep_wanted on only those wanted */
    int n_seqs;               /* of seqs */
    struct kn_seq_rows *seqs; /* rows of x by sequence */
    int n_wanted;
    struct kn_seq_rows *wanted_seqs; /* one row each: what seqs becomes */
    int *wanted_rows;

    float *x;       /* [T, E] the residual stream */
    float *h;       /* [T, max(E, HD)] input of a projection */
    float *qkv;     /* [T, HD + 2 KD] */
    float *gu;      /* [T, 2F] */
    float *act;     /* [T, F] */
    float *cos_sin; /* [T, 2, D], for the rope op */

    kn_tap_fn tap;
    void *tap_arg;
};

/* The [2, D] row of struct kn_rope_args.cos_sin for one position. The angle is rounded to f32
 * first, as the models were trained; cos and sin are the same bits on every machine. */
void kn_rope_angles(
    const float *freqs, int head_dim, bool interleaved, int pos, float *ret_cos_sin);

/* Tests: taps of this model from now on. */
void kn_model_set_tap(struct kn_model *m, kn_tap_fn fn, void *arg);

#endif
