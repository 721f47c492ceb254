/* Weights: bound by name against an architecture's table, then copied into one region in the back
 * end's format.
 *
 * Two walks over the same tables: the first checks every name, shape and dtype and counts bytes,
 * the second copies. Both go through `place`, so that they cannot disagree. Thread: start-up. */
#include "kernels/model/model_int.h"

#include "common/base/buf.h"
#include "kernels/core/dtype.h"
#include "kernels/cpu/pack.h"
#include "kernels/cpu/team.h"

#include <stdio.h>
#include <stdlib.h>

#define ALIGN 64

struct loader {
    const struct bt_model_file *file;
    const struct bt_model_config *c;
    const struct kn_ops *ops;
    struct kn_team *team;
    char *base;  /* NULL in the first walk */
    size_t used; /* bytes */
    struct bt_err *err;
};

static int64_t dim(const struct bt_model_config *c, enum kn_dim d)
{
    switch (d) {
    case KN_DIM_D:
        return c->head_dim;
    case KN_DIM_E:
        return c->d_model;
    case KN_DIM_F:
        return c->d_ff;
    case KN_DIM_HD:
        return (int64_t)c->n_heads * c->head_dim;
    case KN_DIM_KD:
        return (int64_t)c->n_kv_heads * c->head_dim;
    case KN_DIM_V:
        return c->n_vocab;
    case KN_DIM_NONE:
        break;
    }
    return 0;
}

/* Finds a tensor and checks its shape; cols = KN_DIM_NONE for a vector. */
static int find(struct loader *ld,
                const char *name,
                enum kn_dim rows,
                enum kn_dim cols,
                const struct bt_tensor **ret)
{
    const struct bt_tensor *t = bt_model_tensor(ld->file, name);
    int n_dims = cols == KN_DIM_NONE ? 1 : 2;

    if (!t) {
        return BT_FAIL(ld->err, BT_E_FORMAT, "tensor %s is missing", name);
    }
    if (t->n_dims != n_dims || t->shape[0] != dim(ld->c, rows) ||
        (n_dims == 2 && t->shape[1] != dim(ld->c, cols))) {
        return BT_FAIL(ld->err, BT_E_FORMAT, "tensor %s has shape [%lld, %lld], not [%lld, %lld]",
                       name, (long long)t->shape[0], (long long)(t->n_dims == 2 ? t->shape[1] : 1),
                       (long long)dim(ld->c, rows),
                       (long long)(n_dims == 2 ? dim(ld->c, cols) : 1));
    }
    if (n_dims == 1 && bt_dtype_block_elems(t->dtype) != 1) {
        return BT_FAIL(ld->err, BT_E_UNSUPPORTED, "tensor %s: a vector of %s is not supported",
                       name, bt_dtype_name(t->dtype));
    }
    *ret = t;
    return BT_OK;
}

/* The next `bytes` of the region; NULL in the first walk. */
static void *place(struct loader *ld, size_t bytes)
{
    void *p = ld->base ? ld->base + ld->used : NULL;

    ld->used += (bytes + ALIGN - 1) / ALIGN * ALIGN;
    return p;
}

static const float *load_vector(struct loader *ld, const struct bt_tensor *t)
{
    float *p = place(ld, (size_t)t->shape[0] * sizeof(*p));

    if (p) {
        kn_row_to_f32(t->dtype, t->data, (size_t)t->shape[0], p);
    }
    return p;
}

struct pack_job {
    const struct bt_tensor *t;
    char *dst;
    size_t tile_bytes;
};

static void pack_item(void *arg, int item, int member)
{
    struct pack_job *j = arg;

    kn_tile_pack(j->t->dtype, j->t->data, (size_t)j->t->shape[0], (size_t)j->t->shape[1],
                 (size_t)item, j->dst + (size_t)item * j->tile_bytes);
}

static const void *load_matrix(struct loader *ld, const struct bt_tensor *t)
{
    int n_tiles = (int)BT_DIV_UP(t->shape[0], KN_TILE);
    struct pack_job j = {.t = t, .tile_bytes = kn_tile_bytes(t->dtype, (size_t)t->shape[1])};

    if (ld->ops->format == KN_FORMAT_FILE) {
        return t->data;
    }
    j.dst = place(ld, (size_t)n_tiles * j.tile_bytes);
    if (j.dst) {
        kn_team_run(ld->team, n_tiles, pack_item, &j);
    }
    return j.dst;
}

static void set_part(struct loader *ld, struct kn_weight *w, int part, const struct bt_tensor *t)
{
    w->part[part].dtype = t->dtype;
    w->part[part].n = (int)t->shape[0];
    w->part[part].data = load_matrix(ld, t);
    w->k = (int)t->shape[1];
    w->n = 0;
    w->n_parts = BT_MAX(w->n_parts, part + 1);
    for (int i = 0; i < w->n_parts; i++) {
        w->n += w->part[i].n;
    }
}

static int load_row(struct loader *ld, const struct kn_bind *b, int il, struct kn_layer *layer)
{
    const struct bt_tensor *t;
    char name[128];
    void *field = (char *)layer + b->offset;
    int rc;

    snprintf(name, sizeof(name), "blk.%d.%s", il, b->name);
    rc = find(ld, name, b->rows, b->cols, &t);
    if (rc < 0) {
        return rc;
    }
    switch (b->kind) {
    case KN_BIND_VECTOR:
        *(const float **)field = load_vector(ld, t);
        break;
    case KN_BIND_MATRIX:
        set_part(ld, field, b->part, t);
        break;
    case KN_BIND_BIAS:
        ((struct kn_weight *)field)->part[b->part].bias = load_vector(ld, t);
        break;
    }
    return BT_OK;
}

static int walk(struct loader *ld, const struct kn_arch *arch, struct kn_weights *w)
{
    const struct bt_tensor *t;
    int rc;

    ld->used = 0;
    for (int il = 0; il < ld->c->n_layers; il++) {
        for (size_t i = 0; i < arch->n_binds; i++) {
            rc = load_row(ld, &arch->binds[i], il, &w->layers[il]);
            if (rc < 0) {
                return rc;
            }
        }
    }
    rc = find(ld, "token_embd.weight", KN_DIM_V, KN_DIM_E, &w->embed);
    if (rc < 0) {
        return rc;
    }
    rc = find(ld, "output_norm.weight", KN_DIM_E, KN_DIM_NONE, &t);
    if (rc < 0) {
        return rc;
    }
    w->out_norm = load_vector(ld, t);
    rc = find(ld, ld->c->tied ? "token_embd.weight" : "output.weight", KN_DIM_V, KN_DIM_E, &t);
    if (rc < 0) {
        return rc;
    }
    set_part(ld, &w->output, 0, t);
    return BT_OK;
}

int kn_weights_load(const struct bt_model_file *file,
                    const struct kn_arch *arch,
                    const struct kn_ops *ops,
                    struct kn_team *team,
                    struct kn_weights *ret,
                    struct bt_err *err)
{
    const struct bt_model_config *c = bt_model_config(file);
    struct loader ld = {.file = file, .c = c, .ops = ops, .team = team, .err = err};
    struct kn_weights w = {.region.fd = -1};
    int rc;

    w.layers = bt_calloc((size_t)c->n_layers, sizeof(*w.layers));
    if (!w.layers) {
        return BT_FAIL(err, BT_E_NOMEM, "weights: out of memory");
    }
    rc = walk(&ld, arch, &w);
    if (rc < 0) {
        goto fail;
    }
    rc = bt_mem_private.alloc(ld.used, "baton-weights", &w.region, err);
    if (rc < 0) {
        goto fail;
    }
    ld.base = w.region.base;
    rc = walk(&ld, arch, &w);
    if (rc < 0) {
        goto fail;
    }
    *ret = w;
    return BT_OK;

fail:
    kn_weights_free(&w);
    return rc;
}

void kn_weights_free(struct kn_weights *w)
{
    if (w->region.base) {
        w->region.ops->free(&w->region);
    }
    free(w->layers);
    w->layers = NULL;
}
