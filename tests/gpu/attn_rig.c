/* Setting up calls of the attention kernels. Main thread; ends the program on errors. */
#include "tests/gpu/attn_rig.h"

#include "kernels/core/half.h"

#include <cuda_runtime_api.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CHUNK ((size_t)16 << 20) /* random elements that large pools repeat */

void rig_must(int rc, const char *what)
{
    if (rc != 0) {
        fprintf(stderr, "%s: %s\n", what, cudaGetErrorString((cudaError_t)rc));
        exit(1);
    }
}

uint64_t rig_random(uint64_t *state)
{
    uint64_t z = *state += 0x9e3779b97f4a7c15u;

    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

uint16_t rig_bits(enum kn_cuda_dtype t, float x)
{
    uint32_t u;

    if (t == KN_CUDA_F16) {
        return kn_f32_to_f16(x);
    }
    memcpy(&u, &x, 4);
    return (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}

float rig_float(const struct rig *r, uint16_t x)
{
    uint32_t u = (uint32_t)x << 16;
    float f;

    if (r->shape.dtype == KN_CUDA_F16) {
        return kn_f16_to_f32(x);
    }
    memcpy(&f, &u, 4);
    return f;
}

/* About normal, deviation 1. */
static uint16_t random_value(enum kn_cuda_dtype t, uint64_t *state)
{
    uint64_t z = rig_random(state);
    int sum = 0;

    for (int i = 0; i < 8; i++) {
        sum += (int)(z >> 8 * i & 255);
    }
    return rig_bits(t, ((float)sum - 1020.0f) / 209.0f);
}

static void *device_alloc(size_t bytes)
{
    void *p = NULL;

    rig_must(cudaMalloc(&p, bytes), "cudaMalloc");
    return p;
}

static void *host_alloc(size_t bytes)
{
    void *p = malloc(bytes ? bytes : 1);

    if (!p) {
        fprintf(stderr, "no memory\n");
        exit(1);
    }
    return p;
}

size_t rig_at(const struct rig *r, int seq, int pos, int kv_head, int part)
{
    const struct kn_cuda_attn_shape *s = &r->shape;
    uint32_t page =
        r->pages[(size_t)seq * (size_t)r->pages_stride + (size_t)(pos / s->page_tokens)];
    size_t row = (size_t)((part * s->n_kv_heads + kv_head) * s->page_tokens + pos % s->page_tokens);

    return page * (s->page_stride / 2) + row * (size_t)s->head_dim;
}

/* Gives every sequence its pages, in random order over the pool. */
static void deal_pages(struct rig *r, uint64_t *seed)
{
    uint32_t *order = host_alloc((size_t)r->n_pages * sizeof(*order));
    int n = 0;

    for (int i = 0; i < r->n_pages; i++) {
        int j = (int)(rig_random(seed) % (uint64_t)(i + 1));

        order[i] = order[j];
        order[j] = (uint32_t)i;
    }
    memset(r->pages, 0xff, (size_t)r->n_seqs * (size_t)r->pages_stride * 4);
    for (int q = 0; q < r->n_seqs; q++) {
        for (int i = 0; i * r->shape.page_tokens < r->ctx[q]; i++) {
            r->pages[(size_t)q * (size_t)r->pages_stride + (size_t)i] = order[n++];
        }
    }
    free(order);
}

static void fill_kv(struct rig *r, uint64_t *seed)
{
    int d = r->shape.head_dim;

    memset(r->kv, 0xff, r->layer_bytes);
    for (int q = 0; q < r->n_seqs; q++) {
        for (int pos = 0; pos < r->ctx[q]; pos++) {
            for (int h = 0; h < 2 * r->shape.n_kv_heads; h++) {
                uint16_t *x = r->kv + rig_at(r, q, pos, h / 2, h % 2);

                for (int i = 0; i < d; i++) {
                    x[i] = random_value(r->shape.dtype, seed);
                }
            }
        }
    }
}

/* Values on the device only, the same few over and over. */
static void fill_large(struct rig *r, uint64_t *seed)
{
    uint16_t *x = host_alloc(CHUNK * 2);
    size_t total = r->layer_bytes * (size_t)r->n_layers;

    for (size_t i = 0; i < CHUNK; i++) {
        x[i] = random_value(r->shape.dtype, seed);
    }
    for (size_t at = 0; at < total; at += CHUNK * 2) {
        size_t n = total - at < CHUNK * 2 ? total - at : CHUNK * 2;

        rig_must(cudaMemcpy((char *)r->d_kv + at, x, n, cudaMemcpyHostToDevice), "copy");
    }
    free(x);
}

static void set_args(struct rig *r)
{
    r->args = (struct kn_cuda_attn_args){.q = r->d_q,
                                         .q_stride = r->row_elems,
                                         .kv = r->d_kv,
                                         .row_start = r->d_row_start,
                                         .ctx_len = r->d_ctx,
                                         .pages = r->d_pages,
                                         .pages_stride = r->pages_stride,
                                         .plan = r->d_plan,
                                         .n_seqs = r->n_seqs,
                                         .max_rows = r->n_rows,
                                         .max_ctx = r->max_ctx,
                                         .out = r->d_out,
                                         .out_stride = r->row_elems,
                                         .workspace = r->d_work};
}

void rig_init(struct rig *r,
              const struct kn_cuda_attn_shape *shape,
              int n_seqs,
              const int *rows,
              const int *ctx,
              int n_layers,
              bool keep_kv,
              uint64_t seed)
{
    *r = (struct rig){.shape = *shape, .n_seqs = n_seqs, .n_layers = n_layers};
    r->shape.page_stride =
        (size_t)(2 * shape->n_kv_heads * shape->page_tokens) * (size_t)shape->head_dim * 2;
    for (int q = 0; q < n_seqs; q++) {
        int pages = (ctx[q] + shape->page_tokens - 1) / shape->page_tokens;

        r->row_start[q + 1] = r->row_start[q] + (rows ? rows[q] : 1);
        r->ctx[q] = ctx[q];
        r->max_ctx = ctx[q] > r->max_ctx ? ctx[q] : r->max_ctx;
        r->pages_stride = pages > r->pages_stride ? pages : r->pages_stride;
        r->n_pages += pages;
    }
    r->n_pages += 3;
    r->n_rows = r->row_start[n_seqs];
    r->row_elems = (size_t)(shape->n_heads * shape->head_dim);
    r->layer_bytes = (size_t)r->n_pages * r->shape.page_stride;
    r->pages = host_alloc((size_t)n_seqs * (size_t)r->pages_stride * 4);
    deal_pages(r, &seed);

    size_t row_bytes = (size_t)r->n_rows * r->row_elems * 2;
    size_t work = kn_cuda_attn_workspace(&r->shape, n_seqs, r->n_rows, r->max_ctx);

    r->plan_bytes = kn_cuda_attn_plan_bytes(&r->shape, n_seqs, r->n_rows, r->max_ctx);
    r->q = host_alloc(row_bytes);
    r->out = host_alloc(row_bytes);
    for (size_t i = 0; i < (size_t)r->n_rows * r->row_elems; i++) {
        r->q[i] = random_value(shape->dtype, &seed);
    }
    r->d_q = device_alloc(row_bytes);
    r->d_out = device_alloc(row_bytes);
    r->d_kv = device_alloc(r->layer_bytes * (size_t)n_layers);
    r->d_plan = device_alloc(r->plan_bytes);
    r->d_work = device_alloc(work);
    r->d_row_start = device_alloc(sizeof(r->row_start));
    r->d_ctx = device_alloc(sizeof(r->ctx));
    r->d_pages = device_alloc((size_t)n_seqs * (size_t)r->pages_stride * 4);
    rig_must(cudaMemset(r->d_work, 0, work), "memset");
    set_args(r);
    if (keep_kv) {
        r->kv = host_alloc(r->layer_bytes);
        fill_kv(r, &seed);
    } else {
        fill_large(r, &seed);
    }
    rig_must(kn_cuda_attn_init(&r->shape), "kn_cuda_attn_init");
    rig_upload(r);
}

void rig_copy_kv(struct rig *to, int to_seq, const struct rig *from, int from_seq, int n)
{
    for (int pos = 0; pos < n; pos++) {
        for (int h = 0; h < 2 * to->shape.n_kv_heads; h++) {
            memcpy(to->kv + rig_at(to, to_seq, pos, h / 2, h % 2),
                   from->kv + rig_at(from, from_seq, pos, h / 2, h % 2),
                   (size_t)to->shape.head_dim * 2);
        }
    }
}

static void upload(void *to, const void *from, size_t bytes)
{
    rig_must(cudaMemcpy(to, from, bytes, cudaMemcpyHostToDevice), "copy");
}

void rig_upload(struct rig *r)
{
    upload(r->d_q, r->q, (size_t)r->n_rows * r->row_elems * 2);
    upload(r->d_row_start, r->row_start, sizeof(r->row_start));
    upload(r->d_ctx, r->ctx, sizeof(r->ctx));
    upload(r->d_pages, r->pages, (size_t)r->n_seqs * (size_t)r->pages_stride * 4);
    if (r->kv) {
        char *x = host_alloc(r->layer_bytes);

        for (size_t i = 0; i < r->layer_bytes / 16; i++) {
            memcpy(x + kn_cuda_attn_piece(i, r->shape.head_dim) * 16, (char *)r->kv + i * 16, 16);
        }
        upload(r->d_kv, x, r->layer_bytes);
        free(x);
    }
}

void rig_plan(struct rig *r, bool decode)
{
    char *plan = host_alloc(r->plan_bytes + 32);
    char *at = plan + (32 - (size_t)plan % 32) % 32;
    size_t n = decode ? kn_cuda_attn_plan_decode(&r->shape, r->n_seqs, r->ctx, at)
                      : kn_cuda_attn_plan_prefill(&r->shape, r->n_seqs, r->row_start, r->ctx, at);

    if (n > r->plan_bytes) {
        fprintf(stderr, "plan of %zu bytes, %zu promised\n", n, r->plan_bytes);
        exit(1);
    }
    upload(r->d_plan, at, n);
    free(plan);
}

int rig_launch(struct rig *r, bool decode, int layer, struct CUstream_st *stream)
{
    struct kn_cuda_attn_args a = r->args;

    a.kv = (char *)r->d_kv + (size_t)layer * r->layer_bytes;
    return decode ? kn_cuda_attn_decode(&r->shape, &a, stream)
                  : kn_cuda_attn_prefill(&r->shape, &a, stream);
}

void rig_run(struct rig *r, bool decode)
{
    size_t bytes = (size_t)r->n_rows * r->row_elems * 2;

    rig_plan(r, decode);
    rig_must(cudaMemset(r->d_out, 0xff, bytes), "memset");
    rig_must(rig_launch(r, decode, 0, NULL), "launch");
    rig_must(cudaDeviceSynchronize(), "run");
    rig_must(cudaMemcpy(r->out, r->d_out, bytes, cudaMemcpyDeviceToHost), "copy");
}

void rig_free(struct rig *r)
{
    void *device[] = {r->d_q,    r->d_kv,        r->d_out, r->d_plan,
                      r->d_work, r->d_row_start, r->d_ctx, r->d_pages};

    for (size_t i = 0; i < sizeof(device) / sizeof(device[0]); i++) {
        rig_must(cudaFree(device[i]), "cudaFree");
    }
    free(r->pages);
    free(r->q);
    free(r->kv);
    free(r->out);
}
