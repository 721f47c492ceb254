/* Frame of ops_check.c and what its parts offer. */
#ifndef BT_TESTS_GPU_OPS_CHECK_H
#define BT_TESTS_GPU_OPS_CHECK_H

#include "kernels/core/half.h"
#include "kernels/cuda/module.h"

#include <stdarg.h>
#include <stdio.h>

void check(bool ok, const char *fmt, ...) BT_PRINTF_ATTR(2, 3);
void must(int rc, const char *what); /* a cudaError_t that is not 0 ends the program */
uint32_t rnd(void);
float rnd_float(void); /* [-1, 1) */
uint16_t to_16(enum kn_cuda_dtype t, float x);
float from_16(enum kn_cuda_dtype t, uint16_t x);
double eps_of(enum kn_cuda_dtype t); /* half a unit in the last place of 1 */

/* 16-bit numbers here, as floats, and on the device. */
struct mat {
    enum kn_cuda_dtype t;
    size_t n;
    uint16_t *h;
    float *f;
    void *d;
};
struct mat mat_new(enum kn_cuda_dtype t, size_t n, float scale);
void mat_send(struct mat *m);
void mat_poison(struct mat *m);
void mat_fetch(struct mat *m);
void mat_free(struct mat *m);
void *to_device(const void *p, size_t bytes);

void check_rows(bool quick);
void check_products(bool quick);
void check_steps(bool quick);
/* Our own products alone, a handful of launches: for tools that slow them down a thousand times. */
void check_few_products(bool quick);
void check_sampling(bool quick);
void check_models(bool quick);

#endif
