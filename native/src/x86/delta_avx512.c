/* delta_avx512.c: the inner loop of the gated delta rule, sixteen columns at a time (delta.h has the contract). */
#include "../delta.h"

#include <immintrin.h>

/* Tiles are functions of a constant size: the compiler unrolls them and keeps the sums in registers. */
#define TILE static inline __attribute__((always_inline)) void

TILE step_tile(const int parts, const float *in, int64_t ld_in, float *out, int64_t ld_out, int64_t dk,
               const cb_delta_token *t, int64_t at)
{
    const __m512 decay = _mm512_set1_ps(t->decay), beta = _mm512_set1_ps(t->beta);
    __m512 sum[CB_DELTA_COLUMNS / 16], change[CB_DELTA_COLUMNS / 16];
    for (int p = 0; p < parts; p++)
        sum[p] = _mm512_setzero_ps();
    for (int64_t i = 0; i < dk; i++) {
        __m512 k = _mm512_set1_ps(t->k[i]);
        for (int p = 0; p < parts; p++)
            sum[p] = _mm512_fmadd_ps(k, _mm512_mul_ps(_mm512_loadu_ps(in + i * ld_in + at + p * 16), decay), sum[p]);
    }
    for (int p = 0; p < parts; p++) {
        change[p] = _mm512_mul_ps(beta, _mm512_sub_ps(_mm512_loadu_ps(t->v + at + p * 16), sum[p]));
        sum[p] = _mm512_setzero_ps();
    }
    for (int64_t i = 0; i < dk; i++) {
        __m512 k = _mm512_set1_ps(t->k[i]), q = t->q ? _mm512_set1_ps(t->q[i]) : k;
        for (int p = 0; p < parts; p++) {
            __m512 s = _mm512_mul_ps(_mm512_loadu_ps(in + i * ld_in + at + p * 16), decay);
            s = _mm512_fmadd_ps(k, change[p], s);
            _mm512_storeu_ps(out + i * ld_out + at + p * 16, s);
            sum[p] = _mm512_fmadd_ps(q, s, sum[p]);
        }
    }
    if (t->q)
        for (int p = 0; p < parts; p++)
            _mm512_storeu_ps(t->o + at + p * 16, sum[p]);
}

static void step_avx512(const float *in, int64_t ld_in, float *out, int64_t ld_out, int64_t dk, int64_t n,
                        const cb_delta_token *t)
{
    int64_t at = 0;
    for (; at + 64 <= n; at += 64)
        step_tile(4, in, ld_in, out, ld_out, dk, t, at);
    for (; at + 32 <= n; at += 32)
        step_tile(2, in, ld_in, out, ld_out, dk, t, at);
    for (; at < n; at += 16)
        step_tile(1, in, ld_in, out, ld_out, dk, t, at);
}

const cb_delta_table cb_delta_table_avx512 = {step_avx512};
