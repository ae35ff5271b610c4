/* delta_avx2.c: the inner loop of the gated delta rule, eight columns at a time (delta.h has the contract). */
#include "../delta.h"

#include <immintrin.h>

/* Tiles are functions of a constant size: the compiler unrolls them and keeps the sums in registers. */
#define TILE static inline __attribute__((always_inline)) void
#define MOST_PARTS 4

TILE step_tile(const int parts, const float *in, int64_t ld_in, float *out, int64_t ld_out, int64_t dk,
               const cb_delta_token *t, int64_t at)
{
    const __m256 decay = _mm256_set1_ps(t->decay), beta = _mm256_set1_ps(t->beta);
    __m256 sum[MOST_PARTS], change[MOST_PARTS];
    for (int p = 0; p < parts; p++)
        sum[p] = _mm256_setzero_ps();
    for (int64_t i = 0; i < dk; i++) {
        __m256 k = _mm256_set1_ps(t->k[i]);
        for (int p = 0; p < parts; p++)
            sum[p] = _mm256_fmadd_ps(k, _mm256_mul_ps(_mm256_loadu_ps(in + i * ld_in + at + p * 8), decay), sum[p]);
    }
    for (int p = 0; p < parts; p++) {
        change[p] = _mm256_mul_ps(beta, _mm256_sub_ps(_mm256_loadu_ps(t->v + at + p * 8), sum[p]));
        sum[p] = _mm256_setzero_ps();
    }
    for (int64_t i = 0; i < dk; i++) {
        __m256 k = _mm256_set1_ps(t->k[i]), q = t->q ? _mm256_set1_ps(t->q[i]) : k;
        for (int p = 0; p < parts; p++) {
            __m256 s = _mm256_mul_ps(_mm256_loadu_ps(in + i * ld_in + at + p * 8), decay);
            s = _mm256_fmadd_ps(k, change[p], s);
            _mm256_storeu_ps(out + i * ld_out + at + p * 8, s);
            sum[p] = _mm256_fmadd_ps(q, s, sum[p]);
        }
    }
    if (t->q)
        for (int p = 0; p < parts; p++)
            _mm256_storeu_ps(t->o + at + p * 8, sum[p]);
}

static void step_avx2(const float *in, int64_t ld_in, float *out, int64_t ld_out, int64_t dk, int64_t n,
                      const cb_delta_token *t)
{
    int64_t at = 0;
    for (; at + 32 <= n; at += 32)
        step_tile(4, in, ld_in, out, ld_out, dk, t, at);
    for (; at < n; at += 16)
        step_tile(2, in, ld_in, out, ld_out, dk, t, at);
}

const cb_delta_table cb_delta_table_avx2 = {step_avx2};
