/* linear_neondot.c: int8 activations with sdot, which adds four s8 * s8 products to an i32 lane exactly. */
#include <arm_neon.h>

static inline __attribute__((always_inline)) int32x4_t dot4(int32x4_t acc, int8x16_t w, int8x16_t x)
{
    return vdotq_s32(acc, w, x);
}

#include "linear_int8.h"

CB_INT8_KERNEL(q8, CB_Q8, neondot)
CB_INT8_KERNEL(q4, CB_Q4, neondot)
CB_INT8_KERNEL(q8g32, CB_Q8G32, neondot)
CB_INT8_KERNEL(q4g32, CB_Q4G32, neondot)
CB_INT8_KERNEL(mxfp4, CB_MXFP4, neondot)

void cb_linear_table_neondot(cb_table *t)
{
    t->linear[CB_Q8][CB_ACT_Q8] = cb_linear_q8_q8_neondot;
    t->linear[CB_Q4][CB_ACT_Q8] = cb_linear_q4_q8_neondot;
    t->linear[CB_Q8G32][CB_ACT_Q8] = cb_linear_q8g32_q8_neondot;
    t->linear[CB_Q4G32][CB_ACT_Q8] = cb_linear_q4g32_q8_neondot;
    t->linear[CB_MXFP4][CB_ACT_Q8] = cb_linear_mxfp4_q8_neondot;
    for (int format = CB_F32; format < CB_N_FORMATS; format++)
        if (t->linear[format][CB_ACT_Q8])
            t->linear_isa[format][CB_ACT_Q8] = cb_isa_names[CB_ISA_NEONDOT];
}
