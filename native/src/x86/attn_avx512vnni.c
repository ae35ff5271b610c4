/* attn_avx512vnni.c: the int8 cache with vpdpbusd and vpdpwssd, which add four or two products to a lane exactly. */
#include "attn_int8_512.h"

#define v_start(shift) _mm512_sub_epi32(_mm512_setzero_si512(), shift)
#ifdef CB_EMULATED
#define v_bytes(acc, key, query) _mm512_dpbusd_epi32(acc, key, query)
#define v_words(acc, a, b) _mm512_dpwssd_epi32(acc, a, b)
#else
/* As intrinsics they make the compiler copy a tile's sums around at every step. */
static inline vi v_bytes(vi acc, vi key, vi query)
{
    __asm__("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(key), "v"(query));
    return acc;
}

static inline vi v_words(vi acc, vi a, vi b)
{
    __asm__("vpdpwssd %2, %1, %0" : "+v"(acc) : "v"(a), "v"(b));
    return acc;
}
#endif
#include "attn_int8.h"

void cb_attn_table_avx512vnni(cb_table *t)
{
    t->attn->scores_int8 = scores_int8;
    t->attn->pair_up = pair_up;
    t->attn->mix_int8 = mix_int8;
    t->attn->int8_isa = cb_isa_names[CB_ISA_AVX512VNNI];
}
