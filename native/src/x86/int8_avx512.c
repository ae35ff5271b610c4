/* int8_avx512.c: the int8 cache without VNNI: words in pairs. */
#include "int8_512.h"

#define v_words(acc, a, b) _mm512_add_epi32(acc, _mm512_madd_epi16(a, b))

#include "int8_tiles.h"

void cb_int8_table_avx512(cb_table *t)
{
    *t->int8 = (cb_int8_table){scores, softmax, spread, mix, index_fold, cb_isa_names[CB_ISA_AVX512]};
}
