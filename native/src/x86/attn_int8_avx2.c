/* attn_int8_avx2.c: the int8 cache, eight lanes at a time. Keys take the sign of the query, whose magnitude stands against
 * them: a pair of products is at most 2 * 127 * 127 in i16. */
#include "../attn.h"
#include "../cbmath.h"

#include <immintrin.h>

#define VL 8
#define SCORE_KEYS 4
#define MIX_INT8_HEADS 2
typedef __m256i vi;
typedef __m256 vf;
typedef __m256i v_usable;
#define v_load(p) _mm256_loadu_si256((const __m256i *)(p))
#define v_store(p, v) _mm256_storeu_si256((__m256i *)(p), v)
#define v_set1(x) _mm256_set1_epi32(x)
#define vf_load(p) _mm256_loadu_ps(p)
#define vf_store(p, v) _mm256_storeu_ps(p, v)
#define vf_set1(x) _mm256_set1_ps(x)
#define vf_zero() _mm256_setzero_ps()
#define vf_mul(a, b) _mm256_mul_ps(a, b)
#define vf_fmadd(a, b, c) _mm256_fmadd_ps(a, b, c)
#define vf_of(v) _mm256_cvtepi32_ps(v)
#define v_start(shift) ((void)(shift), _mm256_setzero_si256())
#define v_words(acc, a, b) _mm256_add_epi32(acc, _mm256_madd_epi16(a, b))

static inline vi v_bytes(vi acc, vi key, vi query)
{
    key = _mm256_sign_epi8(_mm256_xor_si256(key, _mm256_set1_epi8((char)0x80)), query);
    return _mm256_add_epi32(acc, _mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_abs_epi8(query), key), _mm256_set1_epi16(1)));
}

static inline vi v_components(const uint8_t *q)
{
    return _mm256_sub_epi32(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)q)), _mm256_set1_epi32(128));
}

static inline vi v_join(vi a, vi b)
{
    return _mm256_or_si256(_mm256_and_si256(a, _mm256_set1_epi32(0xffff)), _mm256_slli_epi32(b, 16));
}

/* Of bit patterns without their sign: a NaN lies above infinity and both above all numbers. */
static inline vi v_larger_magnitude(vi m, vf w)
{
    return _mm256_max_epi32(m, _mm256_and_si256(_mm256_castps_si256(w), _mm256_set1_epi32(0x7fffffff)));
}

static inline vf v_quotients(vi m, v_usable *usable, vf *step)
{
    const vi infinity = _mm256_set1_epi32(0x7f800000);
    const vf top = _mm256_set1_ps((float)CB_PROBABILITY_MAX), largest = _mm256_castsi256_ps(m);
    vi is_some = _mm256_cmpgt_epi32(m, _mm256_setzero_si256()), finite = _mm256_cmpgt_epi32(infinity, m);
    vf inverse = _mm256_and_ps(_mm256_div_ps(top, largest), _mm256_castsi256_ps(is_some));
    *usable = _mm256_and_si256(finite, _mm256_cmpgt_epi32(infinity, _mm256_castps_si256(inverse)));
    vi rest = _mm256_andnot_si256(finite, _mm256_set1_epi32(0x7fc00000));
    *step = _mm256_blendv_ps(_mm256_castsi256_ps(rest), _mm256_div_ps(largest, top), _mm256_castsi256_ps(*usable));
    return inverse;
}

static inline vi v_weights(vf w, vf inverse, v_usable usable)
{
    return _mm256_and_si256(_mm256_cvtps_epi32(_mm256_mul_ps(w, inverse)), usable);
}

#include "attn_int8.h"

void cb_attn_int8_table_avx2(cb_table *t)
{
    t->attn->scores_int8 = scores_int8;
    t->attn->pair_up = pair_up;
    t->attn->mix_int8 = mix_int8;
    t->attn->int8_isa = cb_isa_names[CB_ISA_AVX2];
}
