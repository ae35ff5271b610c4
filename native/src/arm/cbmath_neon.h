/* cbmath_neon.h: cbmath.h, four values at a time, the same operation per lane. */
#ifndef CBMATH_NEON_H
#define CBMATH_NEON_H

#include "../cbmath.h"

#include <arm_neon.h>

/* a where it is larger (smaller), else b: a NaN in either leaves b. */
static inline float32x4_t cb_larger_neon(float32x4_t a, float32x4_t b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
static inline float32x4_t cb_smaller_neon(float32x4_t a, float32x4_t b) { return vbslq_f32(vcltq_f32(a, b), a, b); }

static inline float32x4_t cb_exp_neon(float32x4_t x)
{
    const float32x4_t magic = vdupq_n_f32(CB_ROUND_MAGIC), one = vdupq_n_f32(1.0f);
    x = cb_smaller_neon(vdupq_n_f32(CB_EXP_HI), x);
    x = cb_larger_neon(vdupq_n_f32(CB_EXP_LO), x);
    float32x4_t t = vaddq_f32(vmulq_n_f32(x, CB_LOG2E), magic);
    float32x4_t n = vsubq_f32(t, magic);
    float32x4_t r = vfmaq_n_f32(x, n, -CB_LN2_HI);
    r = vfmaq_n_f32(r, n, -CB_LN2_LO);
    float32x4_t p = vfmaq_f32(vdupq_n_f32(CB_EXP_C5), vdupq_n_f32(CB_EXP_C6), r);
    p = vfmaq_f32(vdupq_n_f32(CB_EXP_C4), p, r);
    p = vfmaq_f32(vdupq_n_f32(CB_EXP_C3), p, r);
    p = vfmaq_f32(vdupq_n_f32(CB_EXP_C2), p, r);
    p = vfmaq_f32(one, p, r);
    p = vfmaq_f32(one, p, r);
    int32x4_t e = vsubq_s32(vreinterpretq_s32_f32(t), vdupq_n_s32(CB_ROUND_BITS));
    int32x4_t half = vshrq_n_s32(e, 1), bias = vdupq_n_s32(127);
    float32x4_t a = vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(half, bias), 23));
    float32x4_t b = vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vsubq_s32(e, half), bias), 23));
    return vmulq_f32(vmulq_f32(p, a), b);
}

static inline float32x4_t cb_sigmoid_neon(float32x4_t x)
{
    const float32x4_t one = vdupq_n_f32(1.0f);
    return vdivq_f32(one, vaddq_f32(one, cb_exp_neon(vnegq_f32(x))));
}

static inline float32x4_t cb_silu_neon(float32x4_t x)
{
    return vdivq_f32(x, vaddq_f32(vdupq_n_f32(1.0f), cb_exp_neon(vnegq_f32(x))));
}

/* The first n (1..4) values at p, zeros behind; and back. */
static inline float32x4_t cb_load_neon(const float *p, int64_t n)
{
    float v[4] = {0};
    if (n >= 4)
        return vld1q_f32(p);
    memcpy(v, p, (size_t)n * sizeof *p);
    return vld1q_f32(v);
}

static inline void cb_store_neon(float *p, int64_t n, float32x4_t v)
{
    float out[4];
    if (n >= 4) {
        vst1q_f32(p, v);
        return;
    }
    vst1q_f32(out, v);
    memcpy(p, out, (size_t)n * sizeof *p);
}

/* The tree of 16 lanes. */
static inline float cb_fold_neon(const float32x4_t s[4])
{
    float32x4_t s4 = vaddq_f32(vaddq_f32(s[0], s[2]), vaddq_f32(s[1], s[3]));
    float32x2_t s2 = vadd_f32(vget_low_f32(s4), vget_high_f32(s4));
    return vget_lane_f32(s2, 0) + vget_lane_f32(s2, 1);
}

#endif
