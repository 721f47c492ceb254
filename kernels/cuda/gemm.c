/* cuBLASLt: row-major products seen as column-major ones, out^T [N, rows] = w^T (K x N, transposed)
 * times x^T (K x rows). Plans by shape in a small table. Thread: the engine's. */
#include "kernels/cuda/module.h"

#include "common/base/buf.h"

#include <cublasLt.h>
#include <stdlib.h>

#define WORKSPACE  ((size_t)64 << 20)
#define MAX_PLANS  512
#define CANDIDATES 64
#define MAX_WANTED 32 /* invariant: shapes without rows */

struct plan {
    int rows, n, k;
    bool add, f32;
    bool tuned;
    bool restored; /* from notes: `tune` believes them */
    bool beaten;
    float us;
    cublasLtMatmulDesc_t op;
    cublasLtMatrixLayout_t w, x, out;
    cublasLtMatmulAlgo_t algo;
};

/* Invariant: the bits of row 0 for the data that is tuned with. */
struct wanted {
    int n, k;
    bool add, f32;
    char *bits;
};

struct kn_gemm {
    cublasLtHandle_t lt;
    cudaDataType_t type;
    bool invariant;
    void *workspace;
    int n_plans, n_measured;
    struct plan plans[MAX_PLANS];
    int n_wanted;
    struct wanted wanted[MAX_WANTED];
};

int kn_gemm_create(enum kn_cuda_dtype t, bool invariant, struct kn_gemm **ret, struct bt_err *err)
{
    struct kn_gemm *g = bt_calloc(1, sizeof(*g));

    if (!g) {
        return BT_FAIL(err, BT_E_NOMEM, "matrix products: out of memory");
    }
    g->invariant = invariant;
    g->type = t == KN_CUDA_BF16 ? CUDA_R_16BF : CUDA_R_16F;
    if (cublasLtCreate(&g->lt) != CUBLAS_STATUS_SUCCESS ||
        cudaMalloc(&g->workspace, WORKSPACE) != cudaSuccess) {
        kn_gemm_destroy(g);
        return BT_FAIL(err, BT_E_UNAVAILABLE, "cuBLASLt does not start on this device");
    }
    *ret = g;
    return BT_OK;
}

static void drop(struct plan *p)
{
    cublasLtMatmulDescDestroy(p->op);
    cublasLtMatrixLayoutDestroy(p->w);
    cublasLtMatrixLayoutDestroy(p->x);
    cublasLtMatrixLayoutDestroy(p->out);
}

void kn_gemm_destroy(struct kn_gemm *g)
{
    if (!g) {
        return;
    }
    for (int i = 0; i < g->n_plans; i++) {
        drop(&g->plans[i]);
    }
    for (int i = 0; i < g->n_wanted; i++) {
        free(g->wanted[i].bits);
    }
    cudaFree(g->workspace);
    if (g->lt) {
        cublasLtDestroy(g->lt);
    }
    free(g);
}

static bool describe(struct kn_gemm *g, struct plan *p)
{
    cublasOperation_t t = CUBLAS_OP_T;
    uint64_t n = (uint64_t)p->n, k = (uint64_t)p->k, rows = (uint64_t)p->rows;

    return cublasLtMatmulDescCreate(&p->op, CUBLAS_COMPUTE_32F, CUDA_R_32F) == 0 &&
           cublasLtMatmulDescSetAttribute(p->op, CUBLASLT_MATMUL_DESC_TRANSA, &t, sizeof(t)) == 0 &&
           cublasLtMatrixLayoutCreate(&p->w, g->type, k, n, p->k) == 0 &&
           cublasLtMatrixLayoutCreate(&p->x, g->type, k, rows, p->k) == 0 &&
           cublasLtMatrixLayoutCreate(&p->out, p->f32 ? CUDA_R_32F : g->type, n, rows, p->n) == 0;
}

/* Does it add along K in one piece? Most such algorithms take K in steps of 16 from the first to
 * the last, whatever the tile; some split it between warps, and their bits give them away in
 * `tune`. */
static bool one_order(const cublasLtMatmulAlgo_t *algo)
{
    int32_t pieces = 0;
    uint32_t reduction = 1;
    size_t n;

    return cublasLtMatmulAlgoConfigGetAttribute(algo, CUBLASLT_ALGO_CONFIG_SPLITK_NUM, &pieces,
                                                sizeof(pieces), &n) == 0 &&
           cublasLtMatmulAlgoConfigGetAttribute(algo, CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME,
                                                &reduction, sizeof(reduction), &n) == 0 &&
           pieces <= 1 && reduction == CUBLASLT_REDUCTION_SCHEME_NONE;
}

/* At most CANDIDATES, the one that the library likes best first. */
static int candidates(struct kn_gemm *g, const struct plan *p, cublasLtMatmulHeuristicResult_t *ret)
{
    cublasLtMatmulPreference_t pref;
    size_t workspace = g->invariant ? 0 : WORKSPACE;
    int n = 0, kept = 0;

    if (cublasLtMatmulPreferenceCreate(&pref) != 0) {
        return 0;
    }
    cublasLtMatmulPreferenceSetAttribute(pref, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace,
                                         sizeof(workspace));
    if (cublasLtMatmulAlgoGetHeuristic(g->lt, p->op, p->w, p->x, p->out, p->out, pref, CANDIDATES,
                                       ret, &n) != 0) {
        n = 0;
    }
    cublasLtMatmulPreferenceDestroy(pref);
    for (int i = 0; i < n; i++) {
        if (!g->invariant || one_order(&ret[i].algo)) {
            ret[kept++] = ret[i];
        }
    }
    return kept;
}

/* Makes room for one: the oldest that was not measured goes; if all were, the last. */
static void forget_one(struct kn_gemm *g)
{
    int i = 0;

    while (i < g->n_plans - 1 && g->plans[i].tuned) {
        i++;
    }
    drop(&g->plans[i]);
    memmove(&g->plans[i], &g->plans[i + 1], (size_t)(--g->n_plans - i) * sizeof(g->plans[0]));
}

/* Where the plan of a shape stands; -1 = there is none. */
static int find_plan(const struct kn_gemm *g, const struct kn_gemm_args *a)
{
    int i = g->n_plans - 1;

    for (; i >= 0; i--) {
        const struct plan *q = &g->plans[i];

        if (q->rows == a->rows && q->n == a->n && q->k == a->k && q->add == a->add &&
            q->f32 == a->f32) {
            break;
        }
    }
    return i;
}

bool kn_gemm_beaten(const struct kn_gemm *g, const struct kn_gemm_args *a)
{
    int i = find_plan(g, a);

    return i >= 0 && g->plans[i].beaten;
}

bool kn_gemm_restored(const struct kn_gemm *g, const struct kn_gemm_args *a)
{
    int i = find_plan(g, a);

    return i >= 0 && g->plans[i].restored;
}

void kn_gemm_set_beaten(struct kn_gemm *g, const struct kn_gemm_args *a, bool beaten)
{
    int i = find_plan(g, a);

    if (i >= 0) {
        g->plans[i].beaten = beaten;
    }
}

/* The plan of a shape, made on first use. */
static struct plan *plan_of(struct kn_gemm *g, const struct kn_gemm_args *a)
{
    cublasLtMatmulHeuristicResult_t tries[CANDIDATES];
    struct plan p = {.rows = a->rows, .n = a->n, .k = a->k, .add = a->add, .f32 = a->f32};
    int known = find_plan(g, a);

    if (known >= 0) {
        return &g->plans[known];
    }
    if (!describe(g, &p) || candidates(g, &p, tries) < 1) {
        drop(&p);
        return NULL;
    }
    p.algo = tries[0].algo;
    if (g->n_plans == MAX_PLANS) {
        forget_one(g);
    }
    g->plans[g->n_plans] = p;
    return &g->plans[g->n_plans++];
}

static int multiply(struct kn_gemm *g,
                    const struct plan *p,
                    const cublasLtMatmulAlgo_t *algo,
                    const struct kn_gemm_args *a,
                    kn_cuda_stream s)
{
    float one = 1, beta = a->add ? 1 : 0;
    cublasStatus_t rc = cublasLtMatmul(g->lt, p->op, &one, a->w, p->w, a->x, p->x, &beta, a->out,
                                       p->out, a->out, p->out, algo, g->workspace, WORKSPACE, s);

    return rc == CUBLAS_STATUS_SUCCESS ? 0 : 1000 + (int)rc;
}

/* The tuned plan of the fewest rows that are enough, NULL if there is none. */
static struct plan *rounded_up(struct kn_gemm *g, const struct kn_gemm_args *a)
{
    struct plan *best = NULL;

    for (int i = 0; i < g->n_plans; i++) {
        struct plan *p = &g->plans[i];

        if (p->tuned && p->rows >= a->rows && p->rows <= BT_MAX(a->room, a->rows) && p->n == a->n &&
            p->k == a->k && p->add == a->add && p->f32 == a->f32 &&
            (!best || p->rows < best->rows)) {
            best = p;
        }
    }
    return best;
}

int kn_gemm_run(struct kn_gemm *g, const struct kn_gemm_args *a, kn_cuda_stream s)
{
    struct plan *p = g->invariant ? rounded_up(g, a) : NULL;

    p = p ? p : plan_of(g, a);
    return p ? multiply(g, p, &p->algo, a, s) : 1000 + CUBLAS_STATUS_NOT_SUPPORTED;
}

/* Mean of a few runs after one to warm up, in us; negative if it does not run. */
static float time_of(struct kn_gemm *g,
                     const struct plan *p,
                     const cublasLtMatmulAlgo_t *algo,
                     const struct kn_gemm_tune_args *t,
                     kn_cuda_stream s)
{
    struct kn_gemm_args a = *t->a;
    int runs = (double)a.rows * a.n * a.k > 1e11 ? 2 : 8;
    cudaEvent_t from, to;
    float ms = -1;
    int rc = 0;

    cudaEventCreate(&from);
    cudaEventCreate(&to);
    for (int i = 0; i < runs + 1 && rc == 0; i++) {
        if (i == 1) {
            cudaEventRecord(from, s);
        }
        a.w = t->n_w > 0 ? t->w[i % t->n_w] : a.w;
        rc = multiply(g, p, algo, &a, s);
    }
    cudaEventRecord(to, s);
    if (cudaEventSynchronize(to) != cudaSuccess || rc != 0 ||
        cudaEventElapsedTime(&ms, from, to) != cudaSuccess) {
        ms = -1;
    }
    cudaEventDestroy(from);
    cudaEventDestroy(to);
    return ms < 0 ? ms : ms * 1000 / (float)runs;
}

/* Row 0 of the product alone, on the host. False if it does not run. */
static bool row_bits(struct kn_gemm *g,
                     const struct plan *p,
                     const cublasLtMatmulAlgo_t *algo,
                     const struct kn_gemm_tune_args *t,
                     kn_cuda_stream s,
                     char *ret)
{
    struct kn_gemm_args a = *t->a;
    size_t row = (size_t)a.n * (a.f32 ? 4 : 2);

    a.w = t->n_w > 0 ? t->w[0] : a.w;
    return cudaMemsetAsync(a.out, 0, row, s) == cudaSuccess && multiply(g, p, algo, &a, s) == 0 &&
           cudaMemcpyAsync(ret, a.out, row, cudaMemcpyDeviceToHost, s) == cudaSuccess &&
           cudaStreamSynchronize(s) == cudaSuccess;
}

/* Invariant: does it give the bits of the first algorithm of its shape? */
static bool right_bits(struct kn_gemm *g,
                       const struct plan *p,
                       const cublasLtMatmulAlgo_t *algo,
                       const struct kn_gemm_tune_args *t,
                       kn_cuda_stream s)
{
    size_t row = (size_t)p->n * (p->f32 ? 4 : 2);
    char *bits = malloc(row);
    bool ok = bits && row_bits(g, p, algo, t, s, bits);

    if (ok && t->bits) {
        ok = memcmp(t->bits, bits, row) == 0;
        free(bits);
        return ok;
    }
    for (int i = 0; i < g->n_wanted && ok; i++) {
        struct wanted *w = &g->wanted[i];

        if (w->n == p->n && w->k == p->k && w->add == p->add && w->f32 == p->f32) {
            ok = memcmp(w->bits, bits, row) == 0;
            free(bits);
            return ok;
        }
    }
    if (!ok || g->n_wanted == MAX_WANTED) {
        free(bits);
        return false;
    }
    g->wanted[g->n_wanted++] = (struct wanted){p->n, p->k, p->add, p->f32, bits};
    return true;
}

int kn_gemm_tune(struct kn_gemm *g,
                 const struct kn_gemm_tune_args *t,
                 kn_cuda_stream s,
                 float *ret_us)
{
    cublasLtMatmulHeuristicResult_t tries[CANDIDATES];
    struct plan *p = plan_of(g, t->a);
    float best = -1;
    int n;

    *ret_us = 0;
    if (!p) {
        return 1000 + CUBLAS_STATUS_NOT_SUPPORTED;
    }
    if (p->restored) {
        *ret_us = p->us;
        return 0;
    }
    n = BT_MIN(candidates(g, p, tries), t->most);
    for (int i = 0; i < n; i++) {
        float us;

        if (g->invariant && !right_bits(g, p, &tries[i].algo, t, s)) {
            continue;
        }
        us = time_of(g, p, &tries[i].algo, t, s);
        if (us > 0 && (best < 0 || us < best)) {
            best = us;
            p->algo = tries[i].algo;
        }
    }
    p->tuned = best > 0;
    *ret_us = p->us = BT_MAX(best, 0.0f);
    g->n_measured++;
    return p->tuned || g->invariant ? 0 : 1000 + CUBLAS_STATUS_NOT_SUPPORTED;
}

/* ---- what was measured, for the next process ---- */

#define NOTES_MAGIC 0x32534b4350544142u /* "BATPCKS2" */

struct note {
    int32_t rows, n, k;
    uint8_t add, f32, tuned, beaten;
    float us;
    cublasLtMatmulAlgo_t
        algo; /* may be copied within one version of the library, says its manual */
};
struct notes {
    uint64_t magic;
    uint64_t of;  /* card, versions and settings that they were measured with */
    uint64_t sum; /* of the notes */
    uint32_t n, unused;
    struct note note[];
};

/* FNV-1a (Fowler, Noll, Vo). */
static uint64_t sum_of(const void *p, size_t n, uint64_t sum)
{
    for (size_t i = 0; i < n; i++) {
        sum = (sum ^ ((const uint8_t *)p)[i]) * 1099511628211u;
    }
    return sum;
}

static uint64_t measured_with(const struct kn_gemm *g)
{
    struct cudaDeviceProp prop;
    uint64_t sum = 14695981039346656037u;
    size_t lt = cublasLtGetVersion();
    int driver = 0;

    if (cudaGetDeviceProperties(&prop, 0) != cudaSuccess) {
        return 0;
    }
    cudaDriverGetVersion(&driver);
    sum = sum_of(&lt, sizeof(lt), sum);
    sum = sum_of(&driver, sizeof(driver), sum);
    sum = sum_of(&prop.uuid, sizeof(prop.uuid), sum);
    sum = sum_of(&g->type, sizeof(g->type), sum);
    return sum_of(&g->invariant, sizeof(g->invariant), sum);
}

int kn_gemm_restore(struct kn_gemm *g, const void *from, size_t bytes)
{
    const struct notes *h = from;
    size_t room = bytes < sizeof(*h) ? 0 : (bytes - sizeof(*h)) / sizeof(h->note[0]);

    if (room == 0 || h->magic != NOTES_MAGIC || h->n > BT_MIN(room, (size_t)MAX_PLANS) ||
        h->of != measured_with(g) || h->sum != sum_of(h->note, h->n * sizeof(h->note[0]), h->of)) {
        return 0;
    }
    for (uint32_t i = 0; i < h->n && g->n_plans < MAX_PLANS; i++) {
        const struct note *from_note = &h->note[i];
        struct plan p = {.rows = from_note->rows,
                         .n = from_note->n,
                         .k = from_note->k,
                         .add = from_note->add,
                         .f32 = from_note->f32,
                         .tuned = from_note->tuned,
                         .restored = true,
                         .beaten = from_note->beaten,
                         .us = from_note->us,
                         .algo = from_note->algo};
        cublasLtMatmulHeuristicResult_t result;

        if (!describe(g, &p) ||
            cublasLtMatmulAlgoCheck(g->lt, p.op, p.w, p.x, p.out, p.out, &p.algo, &result) != 0) {
            drop(&p);
            continue;
        }
        g->plans[g->n_plans++] = p;
    }
    return g->n_plans;
}

void kn_gemm_save(const struct kn_gemm *g, void *to, size_t bytes)
{
    struct notes *h = to;
    size_t room = bytes < sizeof(*h) ? 0 : (bytes - sizeof(*h)) / sizeof(h->note[0]);

    if (g->n_measured == 0 || room == 0) {
        return;
    }
    h->magic = 0;
    h->n = 0;
    for (int i = 0; i < g->n_plans && h->n < room; i++) {
        const struct plan *p = &g->plans[i];

        h->note[h->n++] = (struct note){.rows = p->rows,
                                        .n = p->n,
                                        .k = p->k,
                                        .add = p->add,
                                        .f32 = p->f32,
                                        .tuned = p->tuned,
                                        .beaten = p->beaten,
                                        .us = p->us,
                                        .algo = p->algo};
    }
    h->of = measured_with(g);
    h->sum = sum_of(h->note, h->n * sizeof(h->note[0]), h->of);
    h->magic = NOTES_MAGIC;
}
