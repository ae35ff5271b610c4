/* delta_neon.c: the inner loop of the gated delta rule, four columns at a time (delta.h has the contract). */
#include "../delta.h"

#include <arm_neon.h>

#define PARTS 4 /* 16 columns */

static void step_neon(const float *in, int64_t ld_in, float *out, int64_t ld_out, int64_t dk, int64_t n,
                      const cb_delta_token *t)
{
    for (int64_t at = 0; at < n; at += 4 * PARTS) {
        float32x4_t sum[PARTS], change[PARTS];
        for (int p = 0; p < PARTS; p++)
            sum[p] = vdupq_n_f32(0);
        for (int64_t i = 0; i < dk; i++)
            for (int p = 0; p < PARTS; p++)
                sum[p] = vfmaq_n_f32(sum[p], vmulq_n_f32(vld1q_f32(in + i * ld_in + at + p * 4), t->decay), t->k[i]);
        for (int p = 0; p < PARTS; p++) {
            change[p] = vmulq_n_f32(vsubq_f32(vld1q_f32(t->v + at + p * 4), sum[p]), t->beta);
            sum[p] = vdupq_n_f32(0);
        }
        for (int64_t i = 0; i < dk; i++)
            for (int p = 0; p < PARTS; p++) {
                float32x4_t s = vmulq_n_f32(vld1q_f32(in + i * ld_in + at + p * 4), t->decay);
                s = vfmaq_n_f32(s, change[p], t->k[i]);
                vst1q_f32(out + i * ld_out + at + p * 4, s);
                if (t->q)
                    sum[p] = vfmaq_n_f32(sum[p], s, t->q[i]);
            }
        if (t->q)
            for (int p = 0; p < PARTS; p++)
                vst1q_f32(t->o + at + p * 4, sum[p]);
    }
}

const cb_delta_table cb_delta_table_neon = {step_neon};
