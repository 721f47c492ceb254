/* Rates of this machine: threads that do nothing but read, or nothing but multiply. */
#include "kernels/core/limits.h"

#include "common/thr/time.h"

#include <pthread.h>
#include <stdlib.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define MAX_THREADS 256

struct worker {
    pthread_t thread;
    pthread_barrier_t *start;
    double (*work)(const struct worker *w); /* does a piece, returns its amount */
    const char *p;
    size_t n;
    uint64_t ns;
    double rate; /* amount a second */
    uint64_t sink;
};

static void *worker_main(void *arg)
{
    struct worker *w = arg;
    double amount = 0;
    uint64_t start;

    pthread_barrier_wait(w->start);
    start = bt_now_ns();
    do {
        amount += w->work(w);
    } while (bt_now_ns() - start < w->ns);
    w->rate = amount / ((double)(bt_now_ns() - start) / 1e9);
    return NULL;
}

/* Sum of the rates of all threads. */
static double
run(int threads, uint64_t ns, double (*work)(const struct worker *w), const char *buf, size_t bytes)
{
    static struct worker workers[MAX_THREADS];
    pthread_barrier_t start;
    double sum = 0;

    threads = BT_MIN(threads, MAX_THREADS);
    pthread_barrier_init(&start, NULL, (unsigned)threads);
    for (int i = 0; i < threads; i++) {
        size_t part = bytes / (size_t)threads / 64 * 64;

        workers[i] = (struct worker){.start = &start,
                                     .work = work,
                                     .p = buf ? buf + part * (size_t)i : NULL,
                                     .n = part,
                                     .ns = ns};
        if (pthread_create(&workers[i].thread, NULL, worker_main, &workers[i]) != 0) {
            abort();
        }
    }
    for (int i = 0; i < threads; i++) {
        pthread_join(workers[i].thread, NULL);
        sum += workers[i].rate;
    }
    pthread_barrier_destroy(&start);
    return sum;
}

static double read_piece(const struct worker *w)
{
    typedef uint64_t vec __attribute__((vector_size(64), aligned(64)));
    const vec *v = (const vec *)w->p;
    vec a = {0}, b = {0}, c = {0}, d = {0};

    for (size_t i = 0; i + 4 <= w->n / sizeof(vec); i += 4) {
        a += v[i];
        b += v[i + 1];
        c += v[i + 2];
        d += v[i + 3];
    }
    a += b + c + d;
    ((struct worker *)w)->sink += a[0]; /* so that the reads are not optimized away */
    return (double)(w->n / sizeof(vec) / 4 * 4 * sizeof(vec));
}

#if defined(__x86_64__)
#define MAC_ROUNDS 4096
#define MAC_CHAINS 12 /* independent accumulators: more than latency times ports */
/* Named variables, since an array would live in memory. */
#define EACH(X) X(a) X(b) X(c) X(d) X(e) X(f) X(g) X(h) X(i) X(j) X(k) X(l)

__attribute__((target("avx512f,avx512vnni"))) static double vnni_piece(const struct worker *w)
{
    __m512i x = _mm512_set1_epi8(3), y = _mm512_set1_epi8(2);
#define X(v) __m512i v = _mm512_setzero_si512();
    EACH(X)
#undef X

    for (int r = 0; r < MAC_ROUNDS; r++) {
#define X(v)                                                                                       \
    v = _mm512_dpbusd_epi32(v, x, y);                                                              \
    __asm__ volatile("" : "+v"(v));
        EACH(X)
#undef X
    }
    return (double)MAC_ROUNDS * MAC_CHAINS * 64 * 2;
}

__attribute__((target("avx2,fma"))) static double fma_piece(const struct worker *w)
{
    __m256 x = _mm256_set1_ps(0.5f), y = _mm256_set1_ps(0.25f);
#define X(v) __m256 v = _mm256_setzero_ps();
    EACH(X)
#undef X

    for (int r = 0; r < MAC_ROUNDS; r++) {
#define X(v)                                                                                       \
    v = _mm256_fmadd_ps(v, x, y);                                                                  \
    __asm__ volatile("" : "+x"(v));
        EACH(X)
#undef X
    }
    return (double)MAC_ROUNDS * MAC_CHAINS * 8 * 2;
}
#endif

static double scalar_piece(const struct worker *w)
{
    double a = 1, b = 2, c = 3, d = 4;

    for (int r = 0; r < 100000; r++) {
        a = a * 0.5 + 0.25;
        b = b * 0.5 + 0.25;
        c = c * 0.5 + 0.25;
        d = d * 0.5 + 0.25;
        __asm__ volatile("" : "+m"(a), "+m"(b), "+m"(c), "+m"(d));
    }
    return 100000.0 * 4 * 2;
}

double kn_limit_read(int threads, uint64_t ns, const void *buf, size_t bytes)
{
    return run(threads, ns, read_piece, buf, bytes);
}

double kn_limit_mac(int threads, uint64_t ns, const char **ret_name)
{
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512vnni")) {
        *ret_name = "vnni rate";
        return run(threads, ns, vnni_piece, NULL, 0);
    }
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
        *ret_name = "fma rate";
        return run(threads, ns, fma_piece, NULL, 0);
    }
#endif
    *ret_name = "scalar rate";
    return run(threads, ns, scalar_piece, NULL, 0);
}
