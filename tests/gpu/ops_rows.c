/* Row kernels against double precision, and copies bit for bit. */
#include "tests/gpu/ops_check.h"

#include <math.h>
#include <stdlib.h>

static void check_norm(enum kn_cuda_dtype t, int rows, int width)
{
    struct mat x = mat_new(t, (size_t)rows * (size_t)width, 3), out = mat_new(t, x.n, 1);
    float *w = malloc((size_t)width * sizeof(float));
    struct kn_cuda_norm_args a = {
        .x = x.d, .rows = rows, .width = width, .eps = 1e-5f, .out = out.d};
    double worst = 0;

    for (int i = 0; i < width; i++) {
        w[i] = 1 + rnd_float() / 2;
    }
    a.weight = to_device(w, (size_t)width * sizeof(float));
    mat_poison(&out);
    must(kn_cuda_norm(t, &a, NULL), "norm");
    mat_fetch(&out);
    for (int r = 0; r < rows; r++) {
        const float *in = x.f + (size_t)r * (size_t)width, *got = out.f + (size_t)r * (size_t)width;
        double sum = 0;

        for (int i = 0; i < width; i++) {
            sum += (double)in[i] * (double)in[i];
        }
        sum = 1 / sqrt(sum / width + 1e-5);
        for (int i = 0; i < width; i++) {
            double want = (double)in[i] * sum * (double)w[i], d = fabs((double)got[i] - want);

            worst = d == d ? fmax(worst, d / (fabs(want) + 0.01)) : INFINITY;
        }
    }
    check(worst < 1.1 * eps_of(t), "norm rows=%d width=%d: %.2e", rows, width, worst);
    cudaFree((void *)(uintptr_t)a.weight);
    free(w);
    mat_free(&x);
    mat_free(&out);
}

static void check_swiglu(enum kn_cuda_dtype t, int rows, int width)
{
    struct mat x = mat_new(t, (size_t)rows * (size_t)width * 2, 4);
    struct mat out = mat_new(t, x.n / 2, 1);
    double worst = 0;

    mat_poison(&out);
    must(kn_cuda_swiglu(t, x.d, rows, width, out.d, NULL), "swiglu");
    mat_fetch(&out);
    for (int r = 0; r < rows; r++) {
        for (int i = 0; i < width; i++) {
            double g = (double)x.f[(size_t)r * 2 * (size_t)width + (size_t)i];
            double u = (double)x.f[(size_t)r * 2 * (size_t)width + (size_t)(width + i)];
            double want = g / (1 + exp(-g)) * u;
            double d = fabs((double)out.f[(size_t)r * (size_t)width + (size_t)i] - want);

            worst = d == d ? fmax(worst, d / (fabs(want) + 1e-3)) : INFINITY;
        }
    }
    check(worst < 1.1 * eps_of(t), "swiglu rows=%d width=%d: %.2e", rows, width, worst);
    mat_free(&x);
    mat_free(&out);
}

static void check_embed(void)
{
    enum { V = 77, E = 96, T = 5 };
    struct mat table = mat_new(KN_CUDA_BF16, V * E, 1), out = mat_new(KN_CUDA_BF16, T * E, 1);
    static const int32_t ids[T] = {3, -2, 76, 0, -1}, prev[2] = {11, 22},
                         want[T] = {3, 22, 76, 0, 11};
    struct kn_cuda_embed_args a = {.table = table.d,
                                   .ids = to_device(ids, sizeof(ids)),
                                   .prev = to_device(prev, sizeof(prev)),
                                   .rows = T,
                                   .width = E,
                                   .out = out.d};

    must(kn_cuda_embed(KN_CUDA_BF16, &a, NULL), "embed");
    mat_fetch(&out);
    for (int i = 0; i < T; i++) {
        check(memcmp(out.h + i * E, table.h + want[i] * E, E * 2) == 0, "embed row %d", i);
    }
    struct kn_cuda_gather_args g = {.x = table.d,
                                    .x_stride = E,
                                    .rows = to_device(want, sizeof(want)),
                                    .n = T,
                                    .width = E,
                                    .out = out.d,
                                    .out_stride = E};
    mat_poison(&out);
    must(kn_cuda_gather(&g, NULL), "gather");
    mat_fetch(&out);
    for (int i = 0; i < T; i++) {
        check(memcmp(out.h + i * E, table.h + want[i] * E, E * 2) == 0, "gather row %d", i);
    }
    mat_free(&table);
    mat_free(&out);
}

static void check_copy(void)
{
    enum { N = 37, BYTES = 16 * 1237 };
    struct mat from = mat_new(KN_CUDA_BF16, N * BYTES / 2, 1),
               to = mat_new(KN_CUDA_BF16, from.n, 1);
    const void *src[N];
    void *dst[N];
    bool same = true;

    for (int i = 0; i < N; i++) {
        src[i] = (char *)from.d + (size_t)(i * 5 % N) * BYTES;
        dst[i] = (char *)to.d + (size_t)(i * 11 % N) * BYTES;
    }
    struct kn_cuda_copy_args a = {.src = to_device(src, sizeof(src)),
                                  .dst = to_device(dst, sizeof(dst)),
                                  .n = N,
                                  .bytes = BYTES,
                                  .blocks = 4};
    must(kn_cuda_copy_blocks(&a, NULL), "copy");
    mat_fetch(&to);
    for (int i = 0; i < N; i++) {
        same = same && memcmp(to.h + (size_t)(i * 11 % N) * BYTES / 2,
                              from.h + (size_t)(i * 5 % N) * BYTES / 2, BYTES) == 0;
    }
    check(same, "copy_blocks");
    mat_free(&from);
    mat_free(&to);
}

/* Pages and rows between a device's pool, permuted, and a plain one: every piece that is named
 * moves to its place, no other is touched. */
static void check_pages(int head_dim, int page_tokens)
{
    enum { LAYERS = 3, PAGES = 11, HEADS = 2, N = 5, ROWS = 6 };
    static const uint32_t pages[N] = {7, 0, 10, 3, 4};
    static const int32_t pos[ROWS] = {0, 13, 27, 6, 255, 1000}, page[ROWS] = {2, 9, -1, 10, 0, 5};
    size_t stride = 2 * HEADS * (size_t)(page_tokens * head_dim * 2), layer = stride * PAGES;
    struct mat plain = mat_new(KN_CUDA_BF16, LAYERS * layer / 2, 1),
               paged = mat_new(KN_CUDA_BF16, plain.n, 1), back = mat_new(KN_CUDA_BF16, plain.n, 1);
    uint16_t *want = malloc(plain.n * 2);
    struct kn_cuda_pages_args a = {.from = plain.d,
                                   .to = paged.d,
                                   .layer_stride = layer,
                                   .page_stride = stride,
                                   .n_layers = LAYERS,
                                   .blocks = 3,
                                   .pages = to_device(pages, sizeof(pages)),
                                   .n = N,
                                   .pos = to_device(pos, sizeof(pos)),
                                   .page = to_device(page, sizeof(page)),
                                   .rows = ROWS,
                                   .page_tokens = page_tokens,
                                   .n_kv_heads = HEADS,
                                   .head_bytes = head_dim * 2};

    memcpy(want, paged.h, plain.n * 2);
    for (int i = 0; i < LAYERS * N; i++) {
        size_t at = (size_t)(i / N) * layer + pages[i % N] * stride;

        for (size_t k = 0; k < stride / 16; k++) {
            memcpy((char *)want + at + kn_cuda_attn_piece(k, head_dim) * 16,
                   (char *)plain.h + at + k * 16, 16);
        }
    }
    must(kn_cuda_copy_pages(&a, NULL), "copy pages");
    mat_fetch(&paged);
    check(memcmp(paged.h, want, plain.n * 2) == 0, "pages of %d, heads of %d, to the device",
          page_tokens, head_dim);

    memcpy(want, back.h, plain.n * 2);
    for (int i = 0; i < LAYERS * ROWS * 2 * HEADS; i++) {
        int r = i % ROWS, head = i / ROWS % (2 * HEADS);
        size_t first = (size_t)(head * page_tokens + pos[r] % page_tokens) * (size_t)head_dim / 8;
        size_t at = (size_t)(i / ROWS / (2 * HEADS)) * layer + (size_t)page[r] * stride;

        for (size_t k = first; page[r] >= 0 && k < first + (size_t)head_dim / 8; k++) {
            memcpy((char *)want + at + k * 16,
                   (char *)paged.h + at + kn_cuda_attn_piece(k, head_dim) * 16, 16);
        }
    }
    a.from = paged.d;
    a.to = back.d;
    must(kn_cuda_copy_rows(&a, NULL), "copy rows");
    mat_fetch(&back);
    check(memcmp(back.h, want, plain.n * 2) == 0,
          "rows of pages of %d, heads of %d, from the device", page_tokens, head_dim);
    cudaFree((void *)(uintptr_t)a.pages);
    cudaFree((void *)(uintptr_t)a.pos);
    cudaFree((void *)(uintptr_t)a.page);
    free(want);
    mat_free(&plain);
    mat_free(&paged);
    mat_free(&back);
}

/* kernels/model/rope.c */
void kn_rope_angles(
    const float *freqs, int head_dim, bool interleaved, int pos, float *ret_cos_sin);

/* The device's angles are the CPU's, bit for bit. */
static void check_angles(void)
{
    enum { D = 128, N = 5000 };
    float freqs[D / 2], cs[2 * D], *table, *d_freqs;
    float *got = malloc((size_t)N * D * sizeof(float));
    int bad = 0;

    for (int i = 0; i < D / 2; i++) {
        freqs[i] = powf(500000, -(float)i / (D / 2));
    }
    d_freqs = to_device(freqs, sizeof(freqs));
    table = to_device(got, (size_t)N * D * sizeof(float));
    must(kn_cuda_rope_table(d_freqs, N, D / 2, table, NULL), "rope table");
    must((int)cudaDeviceSynchronize(), "rope table");
    must((int)cudaMemcpy(got, table, (size_t)N * D * sizeof(float), cudaMemcpyDeviceToHost),
         "copy");
    for (int p = 0; p < N; p++) {
        kn_rope_angles(freqs, D, false, p, cs);
        for (int i = 0; i < D / 2; i++) {
            bad += memcmp(&got[(p * (D / 2) + i) * 2], &cs[i], 4) != 0 ||
                   memcmp(&got[(p * (D / 2) + i) * 2 + 1], &cs[D + D / 2 + i], 4) != 0;
        }
    }
    check(bad == 0, "%d angles differ from the CPU's", bad);
    free(got);
    cudaFree(table);
    cudaFree(d_freqs);
}

static void check_memory(void)
{
    struct bt_mem_region r;
    struct bt_err err = {0};
    uint32_t word = 0x12345678, back = 0;
    int rc = kn_cuda_mem.alloc(5 << 20, "test", &r, &err);

    check(rc == BT_OK && r.fd >= 0 && r.bytes >= 5 << 20, "memory: %s", err.msg);
    if (rc == BT_OK) {
        kn_cuda_mem.copy((char *)r.base + (4 << 20), &word, sizeof(word));
        kn_cuda_mem.copy(&back, (char *)r.base + (4 << 20), sizeof(back));
        check(back == word, "memory: reads back %x", back);
        kn_cuda_mem.free(&r);
    }
}

void check_rows(bool quick)
{
    (void)quick;
    static const int rows[] = {1, 3, 70}, widths[] = {32, 96, 1000, 4096, 16384};

    for (size_t r = 0; r < BT_ARRAY_LEN(rows); r++) {
        for (size_t w = 0; w < BT_ARRAY_LEN(widths); w++) {
            enum kn_cuda_dtype t = (r + w) % 2 ? KN_CUDA_F16 : KN_CUDA_BF16;

            check_norm(t, rows[r], widths[w]);
            check_swiglu(t, rows[r], widths[w]);
        }
    }
    check_embed();
    check_copy();
    check_pages(64, 8);
    check_pages(128, 64);
    check_angles();
    check_memory();
}
