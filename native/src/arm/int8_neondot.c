/* int8_neondot.c: the int8 cache with sdot. */
#include <arm_neon.h>

#define v_quads(acc, a, b) vdotq_s32(acc, a, b)

#include "int8_neon.h"

void cb_int8_table_neondot(cb_table *t)
{
    *t->int8 = (cb_int8_table){scores, softmax, spread, mix, index_fold, cb_isa_names[CB_ISA_NEONDOT]};
}
