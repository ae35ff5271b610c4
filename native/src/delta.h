/* delta.h: the inner loop of the gated delta rule.
 *
 * A head's state S is f32[dk][dv]; its columns never meet, so lanes are columns and every sum runs over dk in ascending order.
 */
#ifndef CB_DELTA_H
#define CB_DELTA_H

#include "internal.h"

#define CB_DELTA_COLUMNS 64 /* a task's share of a state: with 128 rows it stays in the first-level cache */

typedef struct {
    const float *k, *q; /* f32[dk]; q NULL: nothing is read */
    const float *v;     /* f32[n] */
    float decay, beta;
    float *o; /* f32[n] */
} cb_delta_token;

typedef struct cb_delta_table {
    /* One token on n columns (a multiple of 16, at most CB_DELTA_COLUMNS) of a state, from `in` (row stride ld_in) to `out`
     * (row stride ld_out, may be `in`):
     *   r[j] = 0; for i ascending: r[j] = fma(k[i], in[i][j] * decay, r[j])
     *   d[j] = beta * (v[j] - r[j]);  o[j] = 0
     *   for i ascending: out[i][j] = fma(k[i], d[j], in[i][j] * decay); o[j] = fma(q[i], out[i][j], o[j]) */
    void (*step)(const float *in, int64_t ld_in, float *out, int64_t ld_out, int64_t dk, int64_t n, const cb_delta_token *t);
} cb_delta_table;

extern const cb_delta_table cb_delta_table_ref, cb_delta_table_avx2, cb_delta_table_avx512, cb_delta_table_neon;

#endif
