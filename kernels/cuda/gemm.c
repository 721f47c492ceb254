/* cuBLASLt: row-major products seen as column-major ones, out^T [N, rows] = w^T (K x N, transposed)
 * times x^T (K x rows). Plans by shape in a small table. Thread: the engine's. */
#include "kernels/cuda/module.h"

#include "common/base/buf.h"

#include <cublasLt.h>
#include <stdlib.h>

#define WORKSPACE  ((size_t)64 << 20)
#define MAX_PLANS  512
#define CANDIDATES 16

struct plan {
    int rows, n, k;
    bool add, f32;
    bool tuned;
    cublasLtMatmulDesc_t op;
    cublasLtMatrixLayout_t w, x, out;
    cublasLtMatmulAlgo_t algo;
};

struct kn_gemm {
    cublasLtHandle_t lt;
    cudaDataType_t type;
    void *workspace;
    int n_plans;
    struct plan plans[MAX_PLANS];
};

int kn_gemm_create(enum kn_cuda_dtype t, struct kn_gemm **ret, struct bt_err *err)
{
    struct kn_gemm *g = bt_calloc(1, sizeof(*g));

    if (!g) {
        return BT_FAIL(err, BT_E_NOMEM, "matrix products: out of memory");
    }
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

static int
candidates(struct kn_gemm *g, const struct plan *p, int most, cublasLtMatmulHeuristicResult_t *ret)
{
    cublasLtMatmulPreference_t pref;
    size_t workspace = WORKSPACE;
    int n = 0;

    if (cublasLtMatmulPreferenceCreate(&pref) != 0) {
        return 0;
    }
    cublasLtMatmulPreferenceSetAttribute(pref, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace,
                                         sizeof(workspace));
    if (cublasLtMatmulAlgoGetHeuristic(g->lt, p->op, p->w, p->x, p->out, p->out, pref, most, ret,
                                       &n) != 0) {
        n = 0;
    }
    cublasLtMatmulPreferenceDestroy(pref);
    return n;
}

/* The plan of a shape, made on first use; when the table is full the oldest goes. */
static struct plan *plan_of(struct kn_gemm *g, const struct kn_gemm_args *a)
{
    cublasLtMatmulHeuristicResult_t best;
    struct plan p = {.rows = a->rows, .n = a->n, .k = a->k, .add = a->add, .f32 = a->f32};

    for (int i = g->n_plans - 1; i >= 0; i--) {
        struct plan *q = &g->plans[i];

        if (q->rows == p.rows && q->n == p.n && q->k == p.k && q->add == p.add && q->f32 == p.f32) {
            return q;
        }
    }
    if (!describe(g, &p) || candidates(g, &p, 1, &best) < 1) {
        drop(&p);
        return NULL;
    }
    p.algo = best.algo;
    if (g->n_plans == MAX_PLANS) {
        drop(&g->plans[0]);
        memmove(&g->plans[0], &g->plans[1], (MAX_PLANS - 1) * sizeof(p));
        g->n_plans--;
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

int kn_gemm_run(struct kn_gemm *g, const struct kn_gemm_args *a, kn_cuda_stream s)
{
    struct plan *p = plan_of(g, a);

    return p ? multiply(g, p, &p->algo, a, s) : 1000 + CUBLAS_STATUS_NOT_SUPPORTED;
}

/* Mean of a few runs after one to warm up, in us; negative if it does not run. */
static float time_of(struct kn_gemm *g,
                     const struct plan *p,
                     const cublasLtMatmulAlgo_t *algo,
                     const struct kn_gemm_args *a,
                     kn_cuda_stream s)
{
    int runs = (double)a->rows * a->n * a->k > 1e11 ? 2 : 5;
    cudaEvent_t from, to;
    float ms = -1;
    int rc = 0;

    cudaEventCreate(&from);
    cudaEventCreate(&to);
    for (int i = 0; i < runs + 1 && rc == 0; i++) {
        if (i == 1) {
            cudaEventRecord(from, s);
        }
        rc = multiply(g, p, algo, a, s);
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

int kn_gemm_tune(
    struct kn_gemm *g, const struct kn_gemm_args *a, int most, kn_cuda_stream s, float *ret_us)
{
    cublasLtMatmulHeuristicResult_t tries[CANDIDATES];
    struct plan *p = plan_of(g, a);
    float best = -1;
    int n;

    if (!p) {
        return 1000 + CUBLAS_STATUS_NOT_SUPPORTED;
    }
    n = candidates(g, p, BT_MIN(most, CANDIDATES), tries);
    for (int i = 0; i < n; i++) {
        float us = time_of(g, p, &tries[i].algo, a, s);

        if (us > 0 && (best < 0 || us < best)) {
            best = us;
            p->algo = tries[i].algo;
        }
    }
    p->tuned = best > 0;
    *ret_us = best;
    return best > 0 ? 0 : 1000 + CUBLAS_STATUS_NOT_SUPPORTED;
}
