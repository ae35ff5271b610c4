/* many.h: the kernels that take over from a rung's tiles when many rows share the weights. */
#ifndef CB_MANY_H
#define CB_MANY_H

#include "../internal.h"

/* Rows from which spreading the weights first pays (measured on Zen 3). */
#define CB_MANY_ROWS_AVX2 4

/* cb_linear_fn for nibbles x CB_ACT_Q8; about 80 KiB of stack. */
void cb_linear_many_q4_q8_avx2(const cb_matrix *m, const cb_rows *rows, int64_t b0, int64_t b1, float *y, int64_t ldy, bool add);
void cb_linear_many_q4g32_q8_avx2(const cb_matrix *m, const cb_rows *rows, int64_t b0, int64_t b1, float *y, int64_t ldy, bool add);
void cb_linear_many_mxfp4_q8_avx2(const cb_matrix *m, const cb_rows *rows, int64_t b0, int64_t b1, float *y, int64_t ldy, bool add);

#endif
