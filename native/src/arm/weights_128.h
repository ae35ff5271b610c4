/* weights_128.h: bytes of a weight format as codes and scales of 4 outputs. FORMAT is a constant in every call; i names one of
 * the four registers that a row block of 16 outputs is. */
#ifndef CB_WEIGHTS_128_H
#define CB_WEIGHTS_128_H

#include "../formats.h"
#include "tiles.h"

/* Of 16 bytes with two codes each, those of the first half of the group or of the second: integers plus 8, or twice E2M1's values. */
CB_INLINE int8x16_t cb_nibbles(const int FORMAT, uint8x16_t v, const bool HIGH)
{
    v = HIGH ? vshrq_n_u8(v, 4) : vandq_u8(v, vdupq_n_u8(15));
    return FORMAT == CB_MXFP4 ? vqtbl1q_s8(vld1q_s8(cb_fp4_twice), v) : vreinterpretq_s8_u8(v);
}

/* The scales of a group, or of one of its two parts; s: the group's. Of mxfp4, half the scale: its codes are twice the values. */
CB_INLINE float32x4_t cb_group_scales(const int FORMAT, const uint8_t *s, int part, int i)
{
    if (FORMAT != CB_MXFP4)
        return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(s + part * 32 + i * 8)));
    uint32_t four;
    __builtin_memcpy(&four, s + part * 16 + i * 4, 4);
    uint32x4_t e = vmovl_u16(vget_low_u16(vmovl_u8(vreinterpret_u8_u32(vdup_n_u32(four)))));
    uint32x4_t bits = vmaxq_u32(vshlq_n_u32(e, 23), vdupq_n_u32(0x400000)); /* 0: 2^-127, denormal */
    return vmulq_n_f32(vreinterpretq_f32_u32(bits), 0.5f);
}

#endif
