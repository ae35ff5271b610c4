/* vector_avx512.c: vector_ref.c with its 16 lanes in one register; tails are masked. */
#include "../delta.h"
#include "cbmath_avx512.h"

static void cb_rmsnorm_avx512(const float *x, const float *w, float eps, int64_t n, float *out)
{
    __m512 s = _mm512_setzero_ps();
    for (int64_t i = 0; i < n; i += 16) { /* a masked lane adds 0 * 0 to a sum of squares, which changes no bit */
        __m512 a = _mm512_maskz_loadu_ps(cb_tail_avx512(n - i), x + i);
        s = _mm512_fmadd_ps(a, a, s);
    }
    __m512 r = _mm512_set1_ps(1.0f / sqrtf(cb_fold_avx512(s) / (float)n + eps));
    for (int64_t i = 0; i < n; i += 16) {
        __mmask16 m = cb_tail_avx512(n - i);
        __m512 y = _mm512_mul_ps(_mm512_maskz_loadu_ps(m, x + i), r);
        _mm512_mask_storeu_ps(out + i, m, _mm512_mul_ps(y, _mm512_maskz_loadu_ps(m, w + i)));
    }
}

static void cb_layernorm_avx512(const float *x, const float *w, const float *b, float eps, int64_t n, float *out)
{
    __m512 s = _mm512_setzero_ps(), v = s;
    for (int64_t i = 0; i < n; i += 16)
        s = _mm512_add_ps(s, _mm512_maskz_loadu_ps(cb_tail_avx512(n - i), x + i));
    __m512 mean = _mm512_set1_ps(cb_fold_avx512(s) / (float)n);
    for (int64_t i = 0; i < n; i += 16) {
        __mmask16 m = cb_tail_avx512(n - i);
        __m512 d = _mm512_maskz_sub_ps(m, _mm512_maskz_loadu_ps(m, x + i), mean);
        v = _mm512_fmadd_ps(d, d, v);
    }
    __m512 r = _mm512_set1_ps(1.0f / sqrtf(cb_fold_avx512(v) / (float)n + eps));
    for (int64_t i = 0; i < n; i += 16) {
        __mmask16 m = cb_tail_avx512(n - i);
        __m512 d = _mm512_mul_ps(_mm512_sub_ps(_mm512_maskz_loadu_ps(m, x + i), mean), r);
        d = _mm512_fmadd_ps(d, _mm512_maskz_loadu_ps(m, w + i), _mm512_maskz_loadu_ps(m, b + i));
        _mm512_mask_storeu_ps(out + i, m, d);
    }
}

static void cb_silu_mul_avx512(const float *gate, const float *up, int64_t n, float *out)
{
    for (int64_t i = 0; i < n; i += 16) {
        __mmask16 m = cb_tail_avx512(n - i);
        __m512 y = cb_silu_avx512(_mm512_maskz_loadu_ps(m, gate + i));
        _mm512_mask_storeu_ps(out + i, m, _mm512_mul_ps(y, _mm512_maskz_loadu_ps(m, up + i)));
    }
}

static void cb_sigmoid_row_avx512(const float *x, int64_t n, float *out)
{
    for (int64_t i = 0; i < n; i += 16) {
        __mmask16 m = cb_tail_avx512(n - i);
        _mm512_mask_storeu_ps(out + i, m, cb_sigmoid_avx512(_mm512_maskz_loadu_ps(m, x + i)));
    }
}

static bool cb_reduce_avx512(const float *parts, int64_t stride, const float *weight, const int32_t *order, int64_t k,
                             const float *shared, int64_t n, float *out)
{
    __m512i largest = _mm512_setzero_si512(), magnitude = _mm512_set1_epi32(0x7fffffff);
    for (int64_t i = 0; i < n; i += 16) {
        __mmask16 m = cb_tail_avx512(n - i);
        __m512 a = _mm512_setzero_ps();
        for (int64_t j = 0; j < k; j++) {
            __m512 part = _mm512_maskz_loadu_ps(m, parts + order[j] * stride + i);
            a = _mm512_fmadd_ps(_mm512_set1_ps(weight[order[j]]), part, a);
        }
        if (shared)
            a = _mm512_add_ps(a, _mm512_maskz_loadu_ps(m, shared + i));
        _mm512_mask_storeu_ps(out + i, m, a);
        /* lanes beyond n may hold NaN * 0: leave them out */
        __m512i bits = _mm512_maskz_and_epi32(m, _mm512_castps_si512(a), magnitude);
        largest = _mm512_max_epi32(largest, bits);
    }
    return _mm512_cmpgt_epi32_mask(largest, _mm512_set1_epi32(0x7f7fffff)) == 0;
}

void cb_vector_table_avx512(cb_table *t)
{
    t->rmsnorm = cb_rmsnorm_avx512;
    t->layernorm = cb_layernorm_avx512;
    t->silu_mul = cb_silu_mul_avx512;
    t->sigmoid = cb_sigmoid_row_avx512;
    t->reduce = cb_reduce_avx512;
    t->delta = &cb_delta_table_avx512;
    t->vector_isa = cb_isa_names[CB_ISA_AVX512];
}
