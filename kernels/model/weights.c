/* Weights: bound by name against an architecture's table, then copied into one region in the back
 * end's format.
 *
 * Two walks over the same tables: the first checks every name, shape and dtype and counts bytes,
 * the second copies. Both go through `place`, so that they cannot disagree. Thread: start-up. */
#include "kernels/model/model_int.h"

#include "common/base/buf.h"
#include "kernels/core/dtype.h"
#include "kernels/core/half.h"
#include "kernels/cpu/pack.h"
#include "kernels/cpu/team.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#define ALIGN      64
#define HALF_BYTES ((size_t)8 << 20)

struct loader {
    const struct bt_model_file *file;
    const struct bt_model_config *c;
    const struct kn_weights_to *to;
    float *row;  /* device: a row or vector in f32 */
    void *half;  /* device: pieces of a matrix in its dtype */
    char *base;  /* NULL in the first walk */
    size_t used; /* bytes */
    bool whole;  /* device: the region holds these weights already */
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

static int load_vector(struct loader *ld, const struct bt_tensor *t, const float **ret)
{
    size_t n = (size_t)t->shape[0];
    float *p = place(ld, n * sizeof(*p));

    *ret = p;
    if (!p) {
        return BT_OK;
    }
    if (ld->whole) {
        return BT_OK;
    }
    if (!ld->to->device) {
        kn_row_to_f32(t->dtype, t->data, n, p);
        return BT_OK;
    }
    if (ld->to->random_seed) {
        for (size_t i = 0; i < n; i++) {
            ld->row[i] = 1;
        }
    } else {
        kn_row_to_f32(t->dtype, t->data, n, ld->row);
    }
    return ld->to->device_ops->upload(ld->to->device, p, ld->row, n * sizeof(*p), ld->err);
}

struct pack_job {
    struct kn_pack of;
    char *dst;
    size_t tile_bytes;
};

static void pack_item(void *arg, int item, int member)
{
    struct pack_job *j = arg;

    kn_tile_pack(&j->of, (size_t)item, j->dst + (size_t)item * j->tile_bytes);
}

static void to_half(enum bt_dtype dtype, const float *from, size_t n, uint16_t *to)
{
    for (size_t i = 0; i < n; i++) {
        to[i] = dtype == BT_DTYPE_F16 ? kn_f32_to_f16(from[i]) : kn_f32_to_bf16(from[i]);
    }
}

/* A matrix whose file has another dtype, in pieces of whole rows. */
static int upload_converted(struct loader *ld, const struct bt_tensor *t, char *dst)
{
    size_t k = (size_t)t->shape[1], per = BT_MAX(HALF_BYTES / (2 * k), (size_t)1);
    int rc = BT_OK;

    for (size_t r0 = 0; r0 < (size_t)t->shape[0] && rc == BT_OK; r0 += per) {
        size_t n = BT_MIN(per, (size_t)t->shape[0] - r0);

        for (size_t r = 0; r < n; r++) {
            const char *row = (const char *)t->data + (r0 + r) * kn_row_bytes(t->dtype, k);

            kn_row_to_f32(t->dtype, row, k, ld->row);
            to_half(ld->to->dtype, ld->row, k, (uint16_t *)ld->half + r * k);
        }
        rc = ld->to->device_ops->upload(ld->to->device, dst + r0 * k * 2, ld->half, n * k * 2,
                                        ld->err);
    }
    return rc;
}

static int device_matrix(struct loader *ld, const struct bt_tensor *t, const void **ret)
{
    size_t n = (size_t)t->shape[0], k = (size_t)t->shape[1];
    const struct kn_device_ops *ops = ld->to->device_ops;
    char *dst = place(ld, n * k * 2);

    *ret = dst;
    if (bt_dtype_block_elems(t->dtype) != 1) {
        return BT_FAIL(ld->err, BT_E_UNSUPPORTED, "tensor %.*s: %s weights are not supported on %s",
                       (int)t->name.n, t->name.p, bt_dtype_name(t->dtype), ops->name);
    }
    if (!dst || ld->whole) {
        return BT_OK;
    }
    if (ld->to->random_seed) { /* keeps the size of activations about what it was */
        float scale = 1.7f / sqrtf((float)k);

        return ops->fill(ld->to->device, dst, n * k, scale, ld->to->random_seed + ld->used);
    }
    if (t->dtype == ld->to->dtype) {
        return ops->upload(ld->to->device, dst, t->data, n * k * 2, ld->err);
    }
    return upload_converted(ld, t, dst);
}

static int load_matrix(struct loader *ld, const struct bt_tensor *t, const void **ret)
{
    int n_tiles = (int)BT_DIV_UP(t->shape[0], KN_TILE);
    struct pack_job j = {.of = {.dtype = t->dtype,
                                .src = t->data,
                                .n = (size_t)t->shape[0],
                                .k = (size_t)t->shape[1]},
                         .tile_bytes = kn_tile_bytes(t->dtype, (size_t)t->shape[1])};

    if (ld->to->device) {
        return device_matrix(ld, t, ret);
    }
    if (ld->to->ops->format == KN_FORMAT_FILE) {
        *ret = t->data;
        return BT_OK;
    }
    j.of.grid = ld->to->ops->format == KN_FORMAT_GRID16;
    j.dst = place(ld, (size_t)n_tiles * j.tile_bytes);
    if (j.dst) {
        kn_team_run(ld->to->team, n_tiles, pack_item, &j);
    }
    *ret = j.dst;
    return BT_OK;
}

static int set_part(struct loader *ld, struct kn_weight *w, int part, const struct bt_tensor *t)
{
    w->part[part].dtype = t->dtype;
    w->part[part].n = (int)t->shape[0];
    w->k = (int)t->shape[1];
    w->n = 0;
    w->n_parts = BT_MAX(w->n_parts, part + 1);
    for (int i = 0; i < w->n_parts; i++) {
        w->n += w->part[i].n;
    }
    return load_matrix(ld, t, &w->part[part].data);
}

static int load_row(struct loader *ld, const struct kn_bind *b, int il, struct kn_layer *layer)
{
    const struct bt_tensor *t = NULL;
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
        return load_vector(ld, t, field);
    case KN_BIND_MATRIX:
        return set_part(ld, field, b->part, t);
    case KN_BIND_BIAS:
        return load_vector(ld, t, &((struct kn_weight *)field)->part[b->part].bias);
    }
    return BT_OK;
}

static int walk(struct loader *ld, const struct kn_arch *arch, struct kn_weights *w)
{
    const struct bt_tensor *t = NULL;
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
    rc = load_vector(ld, t, &w->out_norm);
    if (rc < 0) {
        return rc;
    }
    w->embed_data = w->embed->data;
    if (ld->to->device) {
        rc = device_matrix(ld, w->embed, &w->embed_data);
        if (rc < 0) {
            return rc;
        }
    }
    rc = find(ld, ld->c->tied ? "token_embd.weight" : "output.weight", KN_DIM_V, KN_DIM_E, &t);
    if (rc < 0) {
        return rc;
    }
    if (ld->to->device && t == w->embed) { /* one copy serves both */
        w->output = (struct kn_weight){.k = (int)t->shape[1], .n = (int)t->shape[0], .n_parts = 1};
        w->output.part[0] = (struct kn_weight_part){t->dtype, w->output.n, w->embed_data, NULL};
        return BT_OK;
    }
    return set_part(ld, &w->output, 0, t);
}

/* Tells the device of every projection, then waits for the copies. */
static int introduce(struct loader *ld, struct kn_weights *w)
{
    const struct kn_device_ops *ops = ld->to->device_ops;
    struct kn_device *d = ld->to->device;
    int rc = ops->weight(d, &w->output, ld->err);

    for (int il = 0; il < ld->c->n_layers && rc == BT_OK; il++) {
        struct kn_weight *all[] = {&w->layers[il].qkv, &w->layers[il].o, &w->layers[il].gu,
                                   &w->layers[il].down};

        for (size_t i = 0; i < BT_ARRAY_LEN(all) && rc == BT_OK; i++) {
            rc = ops->weight(d, all[i], ld->err);
        }
    }
    return rc < 0 ? rc : ops->finish(d, ld->err);
}

static int alloc_buffers(struct loader *ld)
{
    static const enum kn_dim dims[] = {KN_DIM_E, KN_DIM_F, KN_DIM_HD};
    int64_t widest = 0;

    for (size_t i = 0; i < BT_ARRAY_LEN(dims); i++) {
        widest = BT_MAX(widest, dim(ld->c, dims[i]));
    }
    ld->row = bt_calloc((size_t)widest, sizeof(*ld->row));
    ld->half = bt_calloc(1, BT_MAX(HALF_BYTES, (size_t)widest * 2));
    return ld->row && ld->half ? BT_OK
                               : BT_FAIL(ld->err, BT_E_NOMEM, "weights: out of memory for a row");
}

static int load_all(struct loader *ld, const struct kn_arch *arch, struct kn_weights *w)
{
    const struct bt_mem_ops *mem = ld->to->device ? ld->to->device_ops->mem : &bt_mem_private;
    const struct kn_model_home *home = ld->to->device ? ld->to->home : NULL;
    int rc = walk(ld, arch, w);

    if (rc == BT_OK && ld->to->device) {
        rc = alloc_buffers(ld);
    }
    if (rc == BT_OK) {
        rc = home ? home->weights(home->arg, mem, ld->used, &w->region, &ld->whole, ld->err)
                  : mem->alloc(ld->used, "baton-weights", &w->region, ld->err);
    }
    if (rc < 0) {
        return rc;
    }
    ld->base = w->region.base;
    rc = walk(ld, arch, w);
    rc = rc == BT_OK && ld->to->device ? introduce(ld, w) : rc;
    if (rc == BT_OK && mem->protect) {
        mem->protect(&w->region);
    }
    return rc;
}

int kn_weights_load(const struct bt_model_file *file,
                    const struct kn_arch *arch,
                    const struct kn_weights_to *to,
                    struct kn_weights *ret,
                    struct bt_err *err)
{
    const struct bt_model_config *c = bt_model_config(file);
    struct loader ld = {.file = file, .c = c, .to = to, .err = err};
    struct kn_weights w = {.region.fd = -1};
    int rc;

    w.layers = bt_calloc((size_t)c->n_layers, sizeof(*w.layers));
    if (!w.layers) {
        return BT_FAIL(err, BT_E_NOMEM, "weights: out of memory");
    }
    rc = load_all(&ld, arch, &w);
    free(ld.row);
    free(ld.half);
    if (rc < 0) {
        kn_weights_free(&w);
        return rc;
    }
    *ret = w;
    return BT_OK;
}

void kn_weights_free(struct kn_weights *w)
{
    if (w->region.base) {
        w->region.ops->free(&w->region);
    }
    free(w->layers);
    w->layers = NULL;
}
