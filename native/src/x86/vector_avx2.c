/* vector_avx2.c: vector_ref.c with eight lanes; sums keep their 16 lanes in two registers. */
#include "../delta.h"
#include "cbmath_avx2.h"

static void cb_rmsnorm_avx2(const float *x, const float *w, float eps, int64_t n, float *out)
{
    __m256 lo = _mm256_setzero_ps(), hi = lo;
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) {
        __m256 a = _mm256_loadu_ps(x + i), b = _mm256_loadu_ps(x + i + 8);
        lo = _mm256_fmadd_ps(a, a, lo);
        hi = _mm256_fmadd_ps(b, b, hi);
    }
    for (int half = 0; half < 2; half++) { /* a masked lane adds 0 * 0 to a sum of squares, which changes no bit */
        int64_t left = n - i - half * 8;
        if (left <= 0)
            break;
        __m256 a = _mm256_maskload_ps(x + i + half * 8, cb_tail_avx2(CB_MIN(left, 8)));
        if (half)
            hi = _mm256_fmadd_ps(a, a, hi);
        else
            lo = _mm256_fmadd_ps(a, a, lo);
    }
    __m256 r = _mm256_set1_ps(1.0f / sqrtf(cb_fold_avx2(lo, hi) / (float)n + eps));
    for (i = 0; i < n; i += 8) {
        if (n - i >= 8) {
            __m256 y = _mm256_mul_ps(_mm256_mul_ps(_mm256_loadu_ps(x + i), r), _mm256_loadu_ps(w + i));
            _mm256_storeu_ps(out + i, y);
        } else {
            __m256i m = cb_tail_avx2(n - i);
            __m256 y = _mm256_mul_ps(_mm256_mul_ps(_mm256_maskload_ps(x + i, m), r), _mm256_maskload_ps(w + i, m));
            _mm256_maskstore_ps(out + i, m, y);
        }
    }
}

static void cb_layernorm_avx2(const float *x, const float *w, const float *b, float eps, int64_t n, float *out)
{
    __m256 s[2] = {_mm256_setzero_ps(), _mm256_setzero_ps()}, v[2] = {_mm256_setzero_ps(), _mm256_setzero_ps()};
    for (int64_t i = 0; i < n; i += 8) {
        __m256i m = cb_tail_avx2(CB_MIN(n - i, 8));
        /* + 0 would turn a lane's -0 into +0; the reference starts from +0, so no lane holds one. */
        s[i / 8 % 2] = _mm256_add_ps(s[i / 8 % 2], _mm256_maskload_ps(x + i, m));
    }
    __m256 mean = _mm256_set1_ps(cb_fold_avx2(s[0], s[1]) / (float)n);
    for (int64_t i = 0; i < n; i += 8) {
        __m256i m = cb_tail_avx2(CB_MIN(n - i, 8));
        __m256 d = _mm256_and_ps(_mm256_sub_ps(_mm256_maskload_ps(x + i, m), mean), _mm256_castsi256_ps(m));
        v[i / 8 % 2] = _mm256_fmadd_ps(d, d, v[i / 8 % 2]);
    }
    __m256 r = _mm256_set1_ps(1.0f / sqrtf(cb_fold_avx2(v[0], v[1]) / (float)n + eps));
    for (int64_t i = 0; i < n; i += 8) {
        __m256i m = cb_tail_avx2(CB_MIN(n - i, 8));
        __m256 d = _mm256_mul_ps(_mm256_sub_ps(_mm256_maskload_ps(x + i, m), mean), r);
        _mm256_maskstore_ps(out + i, m, _mm256_fmadd_ps(d, _mm256_maskload_ps(w + i, m), _mm256_maskload_ps(b + i, m)));
    }
}

static void cb_silu_mul_avx2(const float *gate, const float *up, int64_t n, float *out)
{
    for (int64_t i = 0; i < n; i += 8) {
        __m256i m = cb_tail_avx2(CB_MIN(n - i, 8));
        __m256 y = _mm256_mul_ps(cb_silu_avx2(_mm256_maskload_ps(gate + i, m)), _mm256_maskload_ps(up + i, m));
        _mm256_maskstore_ps(out + i, m, y);
    }
}

static void cb_sigmoid_row_avx2(const float *x, int64_t n, float *out)
{
    for (int64_t i = 0; i < n; i += 8) {
        __m256i m = cb_tail_avx2(CB_MIN(n - i, 8));
        _mm256_maskstore_ps(out + i, m, cb_sigmoid_avx2(_mm256_maskload_ps(x + i, m)));
    }
}

static bool cb_reduce_avx2(const float *parts, int64_t stride, const float *weight, const int32_t *order, int64_t k,
                           const float *shared, int64_t n, float *out)
{
    __m256i largest = _mm256_setzero_si256(), magnitude = _mm256_set1_epi32(0x7fffffff);
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) {
        __m256 a = _mm256_setzero_ps(), b = a;
        for (int64_t j = 0; j < k; j++) {
            const float *part = parts + order[j] * stride + i;
            __m256 w = _mm256_set1_ps(weight[order[j]]);
            a = _mm256_fmadd_ps(w, _mm256_loadu_ps(part), a);
            b = _mm256_fmadd_ps(w, _mm256_loadu_ps(part + 8), b);
        }
        if (shared) {
            a = _mm256_add_ps(a, _mm256_loadu_ps(shared + i));
            b = _mm256_add_ps(b, _mm256_loadu_ps(shared + i + 8));
        }
        _mm256_storeu_ps(out + i, a);
        _mm256_storeu_ps(out + i + 8, b);
        largest = _mm256_max_epi32(largest, _mm256_and_si256(_mm256_castps_si256(a), magnitude));
        largest = _mm256_max_epi32(largest, _mm256_and_si256(_mm256_castps_si256(b), magnitude));
    }
    for (; i < n; i += 8) {
        __m256i m = cb_tail_avx2(CB_MIN(n - i, 8));
        __m256 a = _mm256_setzero_ps();
        for (int64_t j = 0; j < k; j++)
            a = _mm256_fmadd_ps(_mm256_set1_ps(weight[order[j]]), _mm256_maskload_ps(parts + order[j] * stride + i, m), a);
        if (shared)
            a = _mm256_add_ps(a, _mm256_maskload_ps(shared + i, m));
        _mm256_maskstore_ps(out + i, m, a);
        largest = _mm256_max_epi32(largest, _mm256_and_si256(_mm256_and_si256(_mm256_castps_si256(a), magnitude), m));
    }
    __m256i beyond = _mm256_cmpgt_epi32(largest, _mm256_set1_epi32(0x7f7fffff));
    return _mm256_testz_si256(beyond, beyond);
}

void cb_vector_table_avx2(cb_table *t)
{
    t->rmsnorm = cb_rmsnorm_avx2;
    t->layernorm = cb_layernorm_avx2;
    t->silu_mul = cb_silu_mul_avx2;
    t->sigmoid = cb_sigmoid_row_avx2;
    t->reduce = cb_reduce_avx2;
    t->delta = &cb_delta_table_avx2;
    t->vector_isa = cb_isa_names[CB_ISA_AVX2];
}
