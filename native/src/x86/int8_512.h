/* int8_512.h: the vectors of int8_tiles.h with 512 bits; the including file adds v_words and, where there is one, v_bytes. */
#include "../int8.h"

#include "cbmath_avx512.h"

#define VL 16
#define TILE_QUERIES 4
#define TILE_VECTORS 4
typedef __m512i vi;
typedef __m512 vf;
typedef __mmask16 v_mask;
#define vi_load(p) _mm512_loadu_si512(p)
#define vi_store(p, v) _mm512_storeu_si512(p, v)
#define vi_set1(x) _mm512_set1_epi32(x)
#define vi_add(a, b) _mm512_add_epi32(a, b)
#define vi_and(a, b) _mm512_and_si512(a, b)
#define vi_or(a, b) _mm512_or_si512(a, b)
#define vi_andnot(a, b) _mm512_andnot_si512(a, b) /* (not a) and b */
#define vi_xor(a, b) _mm512_xor_si512(a, b)
#define vi_max(a, b) _mm512_max_epi32(a, b)
#define vi_larger(a, b) _mm512_cmpgt_epi32_mask(a, b)
#define vi_cast(v) _mm512_castps_si512(v)
#define v_mask_and(a, b) ((__mmask16)((a) & (b)))
#define vf_load(p) _mm512_loadu_ps(p)
#define vf_store(p, v) _mm512_storeu_ps(p, v)
#define vf_set1(x) _mm512_set1_ps(x)
#define vf_zero() _mm512_setzero_ps()
#define vf_add(a, b) _mm512_add_ps(a, b)
#define vf_sub(a, b) _mm512_sub_ps(a, b)
#define vf_mul(a, b) _mm512_mul_ps(a, b)
#define vf_max(a, b) _mm512_max_ps(a, b)
#define vf_fmadd(a, b, c) _mm512_fmadd_ps(a, b, c)
#define vf_of(v) _mm512_cvtepi32_ps(v)
#define vf_select(mask, a, b) _mm512_mask_mov_ps(b, mask, a)
#define v_exp(x) cb_exp_avx512(x)
#define v_evens(q) _mm512_srai_epi16(_mm512_slli_epi16(q, 8), 8)
#define v_odds(q) _mm512_srai_epi16(q, 8)
#define v_low_words(a, b) _mm512_mask_mov_epi16(a, 0xaaaaaaaau, _mm512_slli_epi32(b, 16))

#ifdef CB_EMULATED
static inline float v_top(vf v)
{
    float lane[VL];
    vf_store(lane, v);
    for (int i = 1; i < VL; i++)
        lane[0] = lane[i] > lane[0] ? lane[i] : lane[0];
    return lane[0];
}
#define v_fold(sum) cb_fold_avx512(sum[0])
#else
static inline float v_top(vf v) { return _mm512_reduce_max_ps(v); }

static inline float v_fold(const vf sum[1])
{
    __m256 s8 = _mm256_add_ps(_mm512_castps512_ps256(sum[0]), _mm512_extractf32x8_ps(sum[0], 1));
    __m128 s4 = _mm_add_ps(_mm256_castps256_ps128(s8), _mm256_extractf128_ps(s8, 1));
    __m128 s2 = _mm_add_ps(s4, _mm_movehl_ps(s4, s4));
    return _mm_cvtss_f32(_mm_add_ss(s2, _mm_shuffle_ps(s2, s2, 1)));
}
#endif
