/* The pool's copy in host memory. Pages live on the device; whatever else touches K and V
 * (transfers, tiers, the block server, the keeper, adoption) sees the copy, which has the layout of
 * kvstore/block/layout.h; the device's rows are permuted besides (attn/attn.h), copy.cu does it.
 *
 * Rows are written through: a step of decoding copies its few rows behind itself, any other pass
 * copies each layer on a stream of its own while the next ones are computed. Pages that somebody
 * else wrote are fetched before the pass that reads them; who knows which is kernels/engine/exec.c.
 * Kernels move the bytes over mapped memory: 2 to 4 multiprocessors fill PCIe with scattered
 * pieces, copy calls do not (tests/bench/NOTES.md). Thread: the engine's. */
#include "kernels/cuda/module.h"

#define STEP_BLOCKS  16 /* multiprocessors: nothing else runs */
#define ASIDE_BLOCKS 4  /* beside a pass */
#define FETCH_BLOCKS 16

int kn_cuda_mirror(
    struct kn_device *d, const struct kv_layout *layout, void *kv, void *host, struct bt_err *err)
{
    size_t list = (size_t)layout->n_pages * sizeof(uint32_t);
    void *seen = NULL;
    int rc;

    if (layout->page_stride % 16 || layout->head_dim * 2 % 16) {
        return BT_FAIL(err, BT_E_UNSUPPORTED,
                       "CUDA: heads of %d cannot be copied in 16-byte pieces", layout->head_dim);
    }
    rc = (int)cudaHostRegister(host, layout->bytes, cudaHostRegisterMapped);
    if (rc == 0) {
        d->mirror.host = host;
        rc = (int)cudaHostGetDevicePointer(&seen, host, 0);
    }
    rc = rc ? rc : (int)cudaStreamCreateWithFlags(&d->mirror.stream, cudaStreamNonBlocking);
    rc = rc ? rc : (int)cudaEventCreateWithFlags(&d->mirror.ready, cudaEventDisableTiming);
    rc = rc ? rc : (int)cudaEventCreateWithFlags(&d->mirror.copied, cudaEventDisableTiming);
    for (int i = 0; i < KN_CUDA_SLOTS && rc == 0; i++) {
        rc = (int)cudaMallocHost((void **)&d->slots[i].fetch, list);
    }
    if (rc != 0) {
        return kn_cuda_fail(err, "pinning the pool's copy in host memory", rc);
    }
    d->mirror.layout = *layout;
    d->mirror.device = seen;
    d->mirror.kv = kv;
    return BT_OK;
}

void kn_cuda_mirror_close(struct kn_device *d)
{
    for (int i = 0; i < KN_CUDA_SLOTS; i++) {
        cudaFreeHost(d->slots[i].fetch);
    }
    if (d->mirror.host) {
        cudaHostUnregister(d->mirror.host);
    }
    if (d->mirror.ready) {
        cudaEventDestroy(d->mirror.ready);
    }
    if (d->mirror.copied) {
        cudaEventDestroy(d->mirror.copied);
    }
    if (d->mirror.stream) {
        cudaStreamDestroy(d->mirror.stream);
    }
}

static struct kn_cuda_pages_args args_of(const struct kn_device *d, bool to_host, int blocks)
{
    const struct kv_layout *l = &d->mirror.layout;

    return (struct kn_cuda_pages_args){.from = to_host ? d->mirror.kv : d->mirror.device,
                                       .to = to_host ? d->mirror.device : d->mirror.kv,
                                       .layer_stride = l->layer_stride,
                                       .page_stride = l->page_stride,
                                       .n_layers = l->n_layers,
                                       .blocks = blocks,
                                       .pos = d->pos,
                                       .page = d->page,
                                       .page_tokens = l->page_tokens,
                                       .n_kv_heads = l->n_kv_heads,
                                       .head_bytes = l->head_dim * 2};
}

int kn_cuda_fetch(struct kn_device *d, const uint32_t *pages, size_t n, struct bt_err *err)
{
    /* The slot of the next pass: the last pass that used it was waited for. */
    struct kn_cuda_slot *slot = &d->slots[(d->first + d->n_queued) % KN_CUDA_SLOTS];
    struct kn_cuda_pages_args a = args_of(d, false, FETCH_BLOCKS);
    int rc;

    if (d->n_queued == KN_CUDA_SLOTS || n > d->mirror.layout.n_pages) {
        return BT_FAIL(err, BT_E_INTERNAL, "fetching %zu pages, %d passes are queued", n,
                       d->n_queued);
    }
    memcpy(slot->fetch, pages, n * sizeof(*pages));
    a.pages = slot->fetch;
    a.n = (int)n;
    rc = kn_cuda_copy_pages(&a, d->stream);
    return rc ? kn_cuda_fail(err, "fetching pages", rc) : BT_OK;
}

int kn_cuda_mirror_rows(struct kn_device *d, int rows)
{
    struct kn_cuda_pages_args a = args_of(d, true, STEP_BLOCKS);

    if (!d->mirror.kv || d->kv != d->mirror.kv) {
        return 0;
    }
    a.rows = rows;
    return kn_cuda_copy_rows(&a, d->stream);
}

void kn_cuda_mirror_begin(struct kn_device *d, int rows)
{
    d->mirror.rows = d->mirror.kv && d->kv == d->mirror.kv ? rows : 0;
}

void kn_cuda_mirror_layer(struct kn_device *d, int layer)
{
    struct kn_cuda_pages_args a = args_of(d, true, ASIDE_BLOCKS);
    int rc;

    if (d->mirror.rows == 0 || d->error != 0) {
        return;
    }
    a.rows = d->mirror.rows;
    a.first_layer = layer;
    a.n_layers = 1;
    rc = (int)cudaEventRecord(d->mirror.ready, d->stream);
    rc = rc ? rc : (int)cudaStreamWaitEvent(d->mirror.stream, d->mirror.ready, 0);
    rc = rc ? rc : kn_cuda_copy_rows(&a, d->mirror.stream);
    if (rc != 0) {
        d->error = rc;
        d->error_what = "copying rows to the host";
    }
}

/* What comes next on the stream reads none of the pass's arrays before they are copied. */
int kn_cuda_mirror_end(struct kn_device *d)
{
    int rc;

    if (d->mirror.rows == 0) {
        return 0;
    }
    d->mirror.rows = 0;
    rc = (int)cudaEventRecord(d->mirror.copied, d->mirror.stream);
    return rc ? rc : (int)cudaStreamWaitEvent(d->stream, d->mirror.copied, 0);
}
