/* Frame of the op tests: a fixture is one op on one case; it can run any rows of it alone. */
#ifndef BT_TESTS_OPS_OPS_TEST_H
#define BT_TESTS_OPS_OPS_TEST_H

#include "tests/unit/cmocka.h"

#include "kernels/core/registry.h"
#include "kernels/cpu/team.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

struct op_case {
    enum kn_op op;
    int rows, a, b, c, d;
    double tol;
};

struct fixture {
    const struct op_case *c;
    const char *dtype; /* for messages */
    int width;         /* of an output row */
    /* Runs rows [row0, row0 + n) into out (whose row 0 is row0). */
    void (*run)(const struct fixture *f,
                const struct kn_ops *ops,
                struct kn_stream *s,
                int row0,
                int n,
                float *out,
                size_t stride);
    const void *data; /* of the op's own */
    bool bf16;        /* weights of BF16 among others */
    bool quant;       /* block-quantized weights among others */
    bool kv_f16;      /* K and V of f16 */
};

/* Seeded numbers: the same on every run. */
uint32_t test_rand(void);
void test_seed(uint32_t seed);
/* Uniform in -1..1. */
float test_float(void);
/* n floats in -scale..scale; the caller frees. */
float *test_floats(size_t n, float scale);
void *test_alloc(size_t bytes); /* 64-byte aligned, filled with NaN bytes; the caller frees */

/* A stream with `threads` members; max rows and width of any matmul input. */
void test_stream_init(struct kn_stream *s, int threads, size_t rows, size_t k);
void test_stream_fini(struct kn_stream *s);

/* A random tensor in the file's format, [n, k]. Free data. */
struct bt_tensor test_tensor(enum bt_dtype t, int n, int k);
/* Weight part `data` for a back end; free with test_part_free. */
const void *test_pack(enum kn_format format, const struct bt_tensor *t);
void test_pack_free(enum kn_format format, const void *data);

/* The whole matrix for a fixture: every instruction set against ref within the case's tolerance;
 * bit-equal with 1, 2 and 3 threads, row by row alone, and in uneven pieces; nothing written beside
 * the output. */
void test_fixture(const struct fixture *f);

#endif
