/* attn_int8_avx512.c: the int8 cache without VNNI. There is no 512-bit vpsignb, so keys negate under a mask; a pair of products
 * is at most 2 * 127 * 127 in i16. */
#include "attn_int8_512.h"

#define v_start(shift) ((void)(shift), _mm512_setzero_si512())
#define v_words(acc, a, b) _mm512_add_epi32(acc, _mm512_madd_epi16(a, b))

static inline vi v_bytes(vi acc, vi key, vi query)
{
    key = _mm512_xor_si512(key, _mm512_set1_epi8((char)0x80));
    key = _mm512_mask_sub_epi8(key, _mm512_movepi8_mask(query), _mm512_setzero_si512(), key);
    return _mm512_add_epi32(acc, _mm512_madd_epi16(_mm512_maddubs_epi16(_mm512_abs_epi8(query), key), _mm512_set1_epi16(1)));
}

#include "attn_int8.h"

void cb_attn_int8_table_avx512(cb_table *t)
{
    t->attn->scores_int8 = scores_int8;
    t->attn->pair_up = pair_up;
    t->attn->mix_int8 = mix_int8;
    t->attn->int8_isa = cb_isa_names[CB_ISA_AVX512];
}
