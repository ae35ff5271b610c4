/* attn_int8_512.h: the vectors of attn_int8.h with 512 bits; the including file adds v_bytes, v_start and v_words. */
#include "../attn.h"
#include "../cbmath.h"

#include <immintrin.h>

#define VL 16
#define SCORE_KEYS 8
#define MIX_INT8_HEADS 4
typedef __m512i vi;
typedef __m512 vf;
typedef __mmask16 v_usable;
#define v_load(p) _mm512_loadu_si512(p)
#define v_store(p, v) _mm512_storeu_si512(p, v)
#define v_set1(x) _mm512_set1_epi32(x)
#define vf_load(p) _mm512_loadu_ps(p)
#define vf_store(p, v) _mm512_storeu_ps(p, v)
#define vf_set1(x) _mm512_set1_ps(x)
#define vf_zero() _mm512_setzero_ps()
#define vf_mul(a, b) _mm512_mul_ps(a, b)
#define vf_fmadd(a, b, c) _mm512_fmadd_ps(a, b, c)
#define vf_of(v) _mm512_cvtepi32_ps(v)

static inline vi v_components(const uint8_t *q)
{
    return _mm512_sub_epi32(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)q)), _mm512_set1_epi32(128));
}

static inline vi v_join(vi a, vi b)
{
    return _mm512_or_si512(_mm512_and_si512(a, _mm512_set1_epi32(0xffff)), _mm512_slli_epi32(b, 16));
}

/* Of bit patterns without their sign: a NaN lies above infinity and both above all numbers. */
static inline vi v_larger_magnitude(vi m, vf w)
{
    return _mm512_max_epi32(m, _mm512_and_si512(_mm512_castps_si512(w), _mm512_set1_epi32(0x7fffffff)));
}

static inline vf v_quotients(vi m, v_usable *usable, vf *step)
{
    const vi infinity = _mm512_set1_epi32(0x7f800000);
    const vf top = _mm512_set1_ps((float)CB_PROBABILITY_MAX), largest = _mm512_castsi512_ps(m);
    vf inverse = _mm512_maskz_div_ps(_mm512_cmpgt_epi32_mask(m, _mm512_setzero_si512()), top, largest);
    __mmask16 finite = _mm512_cmpgt_epi32_mask(infinity, m);
    *usable = finite & _mm512_cmpgt_epi32_mask(infinity, _mm512_castps_si512(inverse));
    vf rest = _mm512_maskz_mov_ps((__mmask16)~finite, _mm512_castsi512_ps(_mm512_set1_epi32(0x7fc00000)));
    *step = _mm512_mask_div_ps(rest, *usable, largest, top);
    return inverse;
}

static inline vi v_weights(vf w, vf inverse, v_usable usable)
{
    return _mm512_maskz_cvtps_epi32(usable, _mm512_mul_ps(w, inverse));
}
