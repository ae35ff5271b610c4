/* cbmath_avx2.h: cbmath.h, eight values at a time, the same operation per lane. */
#ifndef CBMATH_AVX2_H
#define CBMATH_AVX2_H

#include "../cbmath.h"

#include <immintrin.h>

static inline __m256 cb_exp_avx2(__m256 x)
{
    const __m256 magic = _mm256_set1_ps(CB_ROUND_MAGIC), one = _mm256_set1_ps(1.0f);
    x = _mm256_min_ps(_mm256_set1_ps(CB_EXP_HI), x); /* the second operand is the one kept when it is a NaN */
    x = _mm256_max_ps(_mm256_set1_ps(CB_EXP_LO), x);
    __m256 t = _mm256_add_ps(_mm256_mul_ps(x, _mm256_set1_ps(CB_LOG2E)), magic);
    __m256 n = _mm256_sub_ps(t, magic);
    __m256 r = _mm256_fmadd_ps(n, _mm256_set1_ps(-CB_LN2_HI), x);
    r = _mm256_fmadd_ps(n, _mm256_set1_ps(-CB_LN2_LO), r);
    __m256 p = _mm256_set1_ps(CB_EXP_C6);
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(CB_EXP_C5));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(CB_EXP_C4));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(CB_EXP_C3));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(CB_EXP_C2));
    p = _mm256_fmadd_ps(p, r, one);
    p = _mm256_fmadd_ps(p, r, one);
    __m256i e = _mm256_sub_epi32(_mm256_castps_si256(t), _mm256_set1_epi32(CB_ROUND_BITS));
    __m256i half = _mm256_srai_epi32(e, 1), bias = _mm256_set1_epi32(127);
    __m256i a = _mm256_slli_epi32(_mm256_add_epi32(half, bias), 23);
    __m256i b = _mm256_slli_epi32(_mm256_add_epi32(_mm256_sub_epi32(e, half), bias), 23);
    return _mm256_mul_ps(_mm256_mul_ps(p, _mm256_castsi256_ps(a)), _mm256_castsi256_ps(b));
}

static inline __m256 cb_negate_avx2(__m256 x) { return _mm256_xor_ps(x, _mm256_set1_ps(-0.0f)); }

static inline __m256 cb_sigmoid_avx2(__m256 x)
{
    const __m256 one = _mm256_set1_ps(1.0f);
    return _mm256_div_ps(one, _mm256_add_ps(one, cb_exp_avx2(cb_negate_avx2(x))));
}

static inline __m256 cb_silu_avx2(__m256 x)
{
    return _mm256_div_ps(x, _mm256_add_ps(_mm256_set1_ps(1.0f), cb_exp_avx2(cb_negate_avx2(x))));
}

/* Lanes below n (0..8) set: for the masked load and store of a tail. */
static inline __m256i cb_tail_avx2(int64_t n)
{
    return _mm256_cmpgt_epi32(_mm256_set1_epi32((int)n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

/* The tree of 16 lanes: lo holds lanes 0-7, hi lanes 8-15. */
static inline float cb_fold_avx2(__m256 lo, __m256 hi)
{
    __m256 s8 = _mm256_add_ps(lo, hi);
    __m128 s4 = _mm_add_ps(_mm256_castps256_ps128(s8), _mm256_extractf128_ps(s8, 1));
    __m128 s2 = _mm_add_ps(s4, _mm_movehl_ps(s4, s4));
    __m128 s1 = _mm_add_ss(s2, _mm_shuffle_ps(s2, s2, 1));
    return _mm_cvtss_f32(s1);
}

static inline __m256 cb_bf16_avx2(__m128i h)
{
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16));
}

#endif
