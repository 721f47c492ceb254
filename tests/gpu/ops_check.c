/* Every kernel of the CUDA back end but attention (attn_check.c) against the plain C reference or
 * double precision, over odd shapes; then whole models against the CPU back end. A program of its
 * own, without cmocka, so that it runs on a bare machine with a card. Exit 0 = all right. */
#include "tests/gpu/ops_check.h"

#include <stdlib.h>

static int n_checks, n_bad;

void check(bool ok, const char *fmt, ...)
{
    va_list ap;

    n_checks++;
    if (ok) {
        return;
    }
    if (n_bad++ < 60) {
        va_start(ap, fmt);
        printf("FAIL ");
        vprintf(fmt, ap);
        printf("\n");
        va_end(ap);
    }
}

void must(int rc, const char *what)
{
    if (rc != 0) {
        printf("FAIL %s: %d %s\n", what, rc, cudaGetErrorString((cudaError_t)rc));
        exit(1);
    }
}

static uint64_t state = 88172645463325252u;

uint32_t rnd(void)
{
    state ^= state << 13; /* xorshift64 (Marsaglia 2003) */
    state ^= state >> 7;
    state ^= state << 17;
    return (uint32_t)(state >> 32);
}

float rnd_float(void)
{
    return (float)(rnd() >> 8) / 8388608.0f - 1;
}

uint16_t to_16(enum kn_cuda_dtype t, float x)
{
    return t == KN_CUDA_BF16 ? kn_f32_to_bf16(x) : kn_f32_to_f16(x);
}

float from_16(enum kn_cuda_dtype t, uint16_t x)
{
    return t == KN_CUDA_BF16 ? kn_bf16_to_f32(x) : kn_f16_to_f32(x);
}

struct mat mat_new(enum kn_cuda_dtype t, size_t n, float scale)
{
    struct mat m = {.t = t, .n = n, .h = malloc(n * sizeof(*m.h)), .f = malloc(n * sizeof(*m.f))};

    for (size_t i = 0; i < n; i++) {
        m.h[i] = to_16(t, rnd_float() * scale);
        m.f[i] = from_16(t, m.h[i]);
    }
    must((int)cudaMalloc(&m.d, n * 2 + 256), "cudaMalloc");
    mat_send(&m);
    return m;
}

void mat_send(struct mat *m)
{
    must((int)cudaMemcpy(m->d, m->h, m->n * 2, cudaMemcpyHostToDevice), "copy");
}

void mat_poison(struct mat *m)
{
    must((int)cudaMemset(m->d, 0xff, m->n * 2), "poison"); /* NaN */
}

void mat_fetch(struct mat *m)
{
    must((int)cudaDeviceSynchronize(), "kernel");
    must((int)cudaMemcpy(m->h, m->d, m->n * 2, cudaMemcpyDeviceToHost), "copy");
    for (size_t i = 0; i < m->n; i++) {
        m->f[i] = from_16(m->t, m->h[i]);
    }
}

void mat_free(struct mat *m)
{
    cudaFree(m->d);
    free(m->h);
    free(m->f);
}

void *to_device(const void *p, size_t bytes)
{
    void *d = NULL;

    must((int)cudaMalloc(&d, bytes + 256), "cudaMalloc");
    must((int)cudaMemcpy(d, p, bytes, cudaMemcpyHostToDevice), "copy");
    return d;
}

double eps_of(enum kn_cuda_dtype t)
{
    return t == KN_CUDA_BF16 ? 0x1p-8 : 0x1p-11;
}

int main(int argc, char **argv)
{
    static const struct {
        const char *name;
        void (*run)(bool quick);
        bool plain; /* kernels of plain CUDA alone */
        bool asked; /* only when it is asked for */
    } parts[] = {{"rows", check_rows, true},      {"products", check_products, false},
                 {"steps", check_steps, false},   {"sampling", check_sampling, true},
                 {"models", check_models, false}, {"few", check_few_products, false, true}};
    bool plain = argc > 1 && strcmp(argv[1], "--plain") == 0;
    bool quick = plain || (argc > 1 && strcmp(argv[1], "--quick") == 0);
    const char *only = argc > 2 && strcmp(argv[1], "--only") == 0 ? argv[2] : NULL;
    struct bt_err err = {0};
    const struct kn_cuda_driver *driver;

    setvbuf(stdout, NULL, _IOLBF, 0);
    if (kn_cuda_start(&driver, &err) < 0) {
        printf("%s\n", err.msg);
        return 1;
    }
    must(kn_cuda_stream_init(), "stream_init");
    for (size_t i = 0; i < BT_ARRAY_LEN(parts); i++) {
        if ((plain && !parts[i].plain) || (only && strcmp(only, parts[i].name) != 0) ||
            (parts[i].asked && !only)) {
            continue;
        }
        parts[i].run(quick);
        printf("%s: %d checks, %d bad\n", parts[i].name, n_checks, n_bad);
    }
    printf("ops_check: %d checks, %d bad\n", n_checks, n_bad);
    return n_bad ? 1 : 0;
}
