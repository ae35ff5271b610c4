/* cbmath_avx512.h: cbmath.h, sixteen values at a time, the same operation per lane. */
#ifndef CBMATH_AVX512_H
#define CBMATH_AVX512_H

#include "../cbmath.h"

#include <immintrin.h>

static inline __m512 cb_exp_avx512(__m512 x)
{
    const __m512 magic = _mm512_set1_ps(CB_ROUND_MAGIC), one = _mm512_set1_ps(1.0f);
    x = _mm512_min_ps(_mm512_set1_ps(CB_EXP_HI), x); /* the second operand is the one kept when it is a NaN */
    x = _mm512_max_ps(_mm512_set1_ps(CB_EXP_LO), x);
    __m512 t = _mm512_add_ps(_mm512_mul_ps(x, _mm512_set1_ps(CB_LOG2E)), magic);
    __m512 n = _mm512_sub_ps(t, magic);
    __m512 r = _mm512_fmadd_ps(n, _mm512_set1_ps(-CB_LN2_HI), x);
    r = _mm512_fmadd_ps(n, _mm512_set1_ps(-CB_LN2_LO), r);
    __m512 p = _mm512_set1_ps(CB_EXP_C6);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(CB_EXP_C5));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(CB_EXP_C4));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(CB_EXP_C3));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(CB_EXP_C2));
    p = _mm512_fmadd_ps(p, r, one);
    p = _mm512_fmadd_ps(p, r, one);
    __m512i e = _mm512_sub_epi32(_mm512_castps_si512(t), _mm512_set1_epi32(CB_ROUND_BITS));
    __m512i half = _mm512_srai_epi32(e, 1), bias = _mm512_set1_epi32(127);
    __m512i a = _mm512_slli_epi32(_mm512_add_epi32(half, bias), 23);
    __m512i b = _mm512_slli_epi32(_mm512_add_epi32(_mm512_sub_epi32(e, half), bias), 23);
    return _mm512_mul_ps(_mm512_mul_ps(p, _mm512_castsi512_ps(a)), _mm512_castsi512_ps(b));
}

static inline __m512 cb_negate_avx512(__m512 x)
{
    return _mm512_castsi512_ps(_mm512_xor_si512(_mm512_castps_si512(x), _mm512_set1_epi32((int)0x80000000u)));
}

static inline __m512 cb_sigmoid_avx512(__m512 x)
{
    const __m512 one = _mm512_set1_ps(1.0f);
    return _mm512_div_ps(one, _mm512_add_ps(one, cb_exp_avx512(cb_negate_avx512(x))));
}

static inline __m512 cb_silu_avx512(__m512 x)
{
    return _mm512_div_ps(x, _mm512_add_ps(_mm512_set1_ps(1.0f), cb_exp_avx512(cb_negate_avx512(x))));
}

/* Lanes below n set, n >= 0; n >= 16 sets all. */
static inline __mmask16 cb_tail_avx512(int64_t n) { return (__mmask16)(n >= 16 ? 0xffff : (1u << n) - 1); }

/* The tree of 16 lanes. */
static inline float cb_fold_avx512(__m512 v)
{
    float s[16];
    _mm512_storeu_ps(s, v);
    for (int half = 8; half; half /= 2)
        for (int l = 0; l < half; l++)
            s[l] = s[l] + s[l + half];
    return s[0];
}

static inline __m512 cb_bf16_avx512(__m256i h)
{
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16));
}

#endif
