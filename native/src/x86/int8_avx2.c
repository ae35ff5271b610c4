/* int8_avx2.c: the int8 cache, eight lanes at a time: words in pairs. Products of bytes would take as many instructions: they
 * saturate, so the sign would have to move to the other operand first. */
#include "../int8.h"

#include "cbmath_avx2.h"

#define VL 8
#define TILE_QUERIES 4
#define TILE_VECTORS 2
typedef __m256i vi;
typedef __m256 vf;
typedef __m256i v_mask;
#define vi_load(p) _mm256_loadu_si256((const __m256i *)(p))
#define vi_store(p, v) _mm256_storeu_si256((__m256i *)(p), v)
#define vi_set1(x) _mm256_set1_epi32(x)
#define vi_add(a, b) _mm256_add_epi32(a, b)
#define vi_and(a, b) _mm256_and_si256(a, b)
#define vi_xor(a, b) _mm256_xor_si256(a, b)
#define vi_max(a, b) _mm256_max_epi32(a, b)
#define vi_larger(a, b) _mm256_cmpgt_epi32(a, b)
#define vi_cast(v) _mm256_castps_si256(v)
#define v_mask_and(a, b) _mm256_and_si256(a, b)
#define vf_load(p) _mm256_loadu_ps(p)
#define vf_store(p, v) _mm256_storeu_ps(p, v)
#define vf_set1(x) _mm256_set1_ps(x)
#define vf_zero() _mm256_setzero_ps()
#define vf_add(a, b) _mm256_add_ps(a, b)
#define vf_sub(a, b) _mm256_sub_ps(a, b)
#define vf_mul(a, b) _mm256_mul_ps(a, b)
#define vf_max(a, b) _mm256_max_ps(a, b)
#define vf_fmadd(a, b, c) _mm256_fmadd_ps(a, b, c)
#define vf_of(v) _mm256_cvtepi32_ps(v)
#define vf_select(mask, a, b) _mm256_blendv_ps(b, a, _mm256_castsi256_ps(mask))
#define v_exp(x) cb_exp_avx2(x)
#define v_evens(q) _mm256_srai_epi16(_mm256_slli_epi16(q, 8), 8)
#define v_odds(q) _mm256_srai_epi16(q, 8)
#define v_low_words(a, b) _mm256_blend_epi16(a, _mm256_slli_epi32(b, 16), 0xaa)
#define v_words(acc, a, b) _mm256_add_epi32(acc, _mm256_madd_epi16(a, b))
#define v_fold(sum) cb_fold_avx2(sum[0], sum[1])

static inline float v_top(vf v)
{
    __m128 s4 = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    __m128 s2 = _mm_max_ps(s4, _mm_movehl_ps(s4, s4));
    return _mm_cvtss_f32(_mm_max_ss(s2, _mm_shuffle_ps(s2, s2, 1)));
}

#include "int8_tiles.h"

void cb_int8_table_avx2(cb_table *t)
{
    *t->int8 = (cb_int8_table){scores, softmax, spread, mix, index_fold, cb_isa_names[CB_ISA_AVX2]};
}
