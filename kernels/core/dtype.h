/* Rows of model files as f32. */
#ifndef KN_CORE_DTYPE_H
#define KN_CORE_DTYPE_H

#include "common/file/model.h"

/* Bytes of a row of n elements; n is a multiple of the dtype's block. */
size_t kn_row_bytes(enum bt_dtype t, size_t n);
/* Dequantizes n elements of a row. Any thread. */
void kn_row_to_f32(enum bt_dtype t, const void *row, size_t n, float *ret);

#endif
