/* int8_avx512vnni.c: the int8 cache with vpdpbusd and vpdpwssd, which add four or two products to a lane exactly. */
#include "int8_512.h"

#ifdef CB_EMULATED
#define v_bytes(acc, key, query) _mm512_dpbusd_epi32(acc, key, query)
#define v_words(acc, a, b) _mm512_dpwssd_epi32(acc, a, b)
#else
/* As intrinsics they make the compiler copy a tile's sums around at every step. */
static inline __attribute__((always_inline)) vi add_bytes(vi acc, vi key, vi query)
{
    __asm__("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(key), "v"(query));
    return acc;
}

static inline __attribute__((always_inline)) vi add_words(vi acc, vi a, vi b)
{
    __asm__("vpdpwssd %2, %1, %0" : "+v"(acc) : "v"(a), "v"(b));
    return acc;
}
#define v_bytes(acc, key, query) add_bytes(acc, key, query)
#define v_words(acc, a, b) add_words(acc, a, b)
#endif
#include "int8_tiles.h"

void cb_int8_table_avx512vnni(cb_table *t)
{
    *t->int8 = (cb_int8_table){scores, softmax, spread, mix, index_fold, cb_isa_names[CB_ISA_AVX512VNNI]};
}
