/* int8_neon.c: the int8 cache by widening products. */
#include <arm_neon.h>

static inline int32x4_t v_quads(int32x4_t acc, int8x16_t a, int8x16_t b)
{
    int16x8_t low = vmull_s8(vget_low_s8(a), vget_low_s8(b)), high = vmull_high_s8(a, b);
    return vaddq_s32(acc, vpaddq_s32(vpaddlq_s16(low), vpaddlq_s16(high)));
}

#include "int8_neon.h"

void cb_int8_table_neon(cb_table *t)
{
    *t->int8 = (cb_int8_table){scores, softmax, spread, mix, index_fold, cb_isa_names[CB_ISA_NEON]};
}
