/* linear_neon.c: linear_ref.c with four outputs per register, a row block in four of them. Every aarch64 processor has
 * these instructions; the dot product is a rung of its own. */
#include <arm_neon.h>

/* Products of two s8 fit i16, even 128 * 127; pairs of them are added as i32. */
static inline __attribute__((always_inline)) int32x4_t dot4(int32x4_t acc, int8x16_t w, int8x16_t x)
{
    int16x8_t low = vmull_s8(vget_low_s8(w), vget_low_s8(x)), high = vmull_high_s8(w, x);
    return vaddq_s32(acc, vpaddq_s32(vpaddlq_s16(low), vpaddlq_s16(high)));
}

#include "linear_int8.h"

/* ---- f32 activations --------------------------------------------------------------------------------------- */

/* Four of the 16 weights (i names which) of input k of a group (or of input k mod 4 of a quad, for the packed formats)
 * that starts at w. */
CB_INLINE float32x4_t widen(const int FORMAT, const uint8_t *w, int k, int i, const bool HIGH)
{
    if (FORMAT == CB_F32)
        return vld1q_f32((const float *)w + k * 16 + i * 4);
    if (FORMAT == CB_BF16)
        return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16((const uint16_t *)w + k * 16 + i * 4), 16));
    /* The code wanted goes to the top of its lane and comes down with its sign. */
    const bool nibbles = CB_IS_NIBBLES(FORMAT) && FORMAT != CB_MXFP4;
    uint8x16_t v = vld1q_u8(w + i * 16);
    v = FORMAT == CB_MXFP4 ? vreinterpretq_u8_s8(cb_nibbles(FORMAT, v, HIGH)) : veorq_u8(v, vdupq_n_u8(nibbles ? 0x88 : 0x80));
    int32x4_t top = vshlq_s32(vreinterpretq_s32_u8(v), vdupq_n_s32((nibbles && !HIGH ? 28 : 24) - 8 * k));
    return vcvtq_f32_s32(nibbles ? vshrq_n_s32(top, 28) : vshrq_n_s32(top, 24));
}

/* p[g][r] += chains over inputs begin .. end-1 of G neighbouring groups, which lie in one half where codes are nibbles. */
CB_INLINE void chains(const int FORMAT, const int G, const int R, const bool HIGH, const uint8_t *w,
                      const cb_tile_rows *rows, int64_t x0, int begin, int end, float32x4_t p[2][CB_TILE_MAX][4])
{
    const bool packed = CB_HAS_CODES(FORMAT);
    for (int k4 = begin; k4 < end; k4 += 4) {
        const int quad = (k4 - (HIGH && CB_IS_NIBBLES(FORMAT) ? 32 : 0)) / 4;
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) {
            if (k4 + j >= end)
                break;
            for (int g = 0; g < G; g++) {
                const uint8_t *from = w + g * CB_GROUP_BYTES(FORMAT);
                for (int i = 0; i < 4; i++) {
                    float32x4_t v = packed ? widen(FORMAT, from + quad * 64, j, i, HIGH) : widen(FORMAT, from, k4 + j, i, false);
                    for (int r = 0; r < R; r++)
                        p[g][r][i] = vfmaq_n_f32(p[g][r][i], v, rows->x[r][x0 + g * 64 + k4 + j]);
                }
            }
        }
    }
}

CB_INLINE void groups_f32(const int FORMAT, const int G, const int R, const uint8_t *w, const uint8_t *s,
                          const cb_tile_rows *rows, int64_t x0, int n, float32x4_t acc[CB_TILE_MAX][4])
{
    const int PARTS = CB_HAS_HALVES(FORMAT) ? 2 : 1; /* with scales of their own */
    float32x4_t p[2][2][CB_TILE_MAX][4];
    for (int part = 0; part < PARTS; part++)
        for (int g = 0; g < G; g++)
            for (int r = 0; r < R; r++)
                for (int i = 0; i < 4; i++)
                    p[part][g][r][i] = vdupq_n_f32(0);
    if (PARTS == 2 || CB_IS_NIBBLES(FORMAT)) {
        chains(FORMAT, G, R, false, w, rows, x0, 0, CB_MIN(n, 32), p[0]);
        chains(FORMAT, G, R, true, w, rows, x0, 32, n, p[PARTS - 1]);
    } else {
        chains(FORMAT, G, R, false, w, rows, x0, 0, n, p[0]);
    }
    for (int g = 0; g < G; g++)
        for (int part = 0; part < PARTS; part++)
            for (int i = 0; i < 4; i++) {
                float32x4_t scale = vdupq_n_f32(0);
                if (CB_GROUP_SCALE_BYTES(FORMAT))
                    scale = cb_group_scales(FORMAT, s + g * CB_GROUP_SCALE_BYTES(FORMAT), part, i);
                for (int r = 0; r < R; r++)
                    acc[r][i] = CB_GROUP_SCALE_BYTES(FORMAT) ? vfmaq_f32(acc[r][i], p[part][g][r][i], scale)
                                                             : vaddq_f32(acc[r][i], p[part][g][r][i]);
            }
}

CB_INLINE void tile_f32(const int FORMAT, const int R, const cb_matrix *m, int64_t b, const cb_tile_rows *rows,
                        float *out)
{
    const int G = R <= 2 && !CB_HAS_HALVES(FORMAT) ? 2 : 1; /* eight chains at least */
    const int64_t stride = CB_GROUP_BYTES(FORMAT), scale_stride = CB_GROUP_SCALE_BYTES(FORMAT), ng = cb_groups(m->in);
    const uint8_t *w = (const uint8_t *)m->weight + (CB_HAS_CODES(FORMAT) ? b * ng * stride : b * m->in * (stride / 64));
    const uint8_t *s = scale_stride ? (const uint8_t *)m->scale + b * ng * scale_stride : w;
    float32x4_t acc[CB_TILE_MAX][4];
    for (int r = 0; r < R; r++)
        for (int i = 0; i < 4; i++)
            acc[r][i] = vdupq_n_f32(0);
    int64_t k = 0;
    for (; k + 64 * G <= m->in; k += 64 * G, w += stride * G, s += scale_stride * G)
        groups_f32(FORMAT, G, R, w, s, rows, k, 64, acc);
    for (; k < m->in; k += 64, w += stride, s += scale_stride)
        groups_f32(FORMAT, 1, R, w, s, rows, k, (int)CB_MIN(64, m->in - k), acc);
    for (int r = 0; r < R; r++)
        for (int i = 0; i < 4; i++) {
            float32x4_t y = acc[r][i];
            if (FORMAT == CB_Q8)
                y = vmulq_f32(y, vld1q_f32((const float *)m->scale + b * 16 + i * 4));
            vst1q_f32(out + r * 16 + i * 4, y);
        }
}

#define F32_KERNEL(name, format, max_rows)                                                                             \
    CB_INLINE void tile_##name##_f32(const int R, const cb_matrix *m, int64_t b, const cb_tile_rows *rows, float *out)  \
    {                                                                                                                  \
        tile_f32(format, R, m, b, rows, out);                                                                          \
    }                                                                                                                  \
    CB_TILE_KERNEL(cb_linear_##name##_f32_neon, max_rows, tile_##name##_f32)
F32_KERNEL(f32, CB_F32, CB_TILE_MAX)
F32_KERNEL(bf16, CB_BF16, CB_TILE_MAX)
F32_KERNEL(q8, CB_Q8, CB_TILE_MAX)
F32_KERNEL(q4, CB_Q4, CB_TILE_MAX)
F32_KERNEL(q8g32, CB_Q8G32, 1) /* with f32 activations in tests alone: row by row will do */
F32_KERNEL(q4g32, CB_Q4G32, 1)
F32_KERNEL(mxfp4, CB_MXFP4, 1)
CB_INT8_KERNEL(q8, CB_Q8, neon)
CB_INT8_KERNEL(q4, CB_Q4, neon)
CB_INT8_KERNEL(q8g32, CB_Q8G32, neon)
CB_INT8_KERNEL(q4g32, CB_Q4G32, neon)
CB_INT8_KERNEL(mxfp4, CB_MXFP4, neon)

/* ---- activations ------------------------------------------------------------------------------------------- */

static void quantise_group(const float *x, int8_t *q, float *scale, int32_t *sum)
{
    uint32x4_t m = vdupq_n_u32(0), magnitude = vdupq_n_u32(0x7fffffff);
    for (int i = 0; i < 64; i += 4)
        m = vmaxq_u32(m, vandq_u32(vreinterpretq_u32_f32(vld1q_f32(x + i)), magnitude));
    uint32_t bits = vmaxvq_u32(m);
    float largest;
    __builtin_memcpy(&largest, &bits, 4);
    float inverse = bits ? 127.0f / largest : 0.0f;
    bool finite = bits < 0x7f800000u, usable = finite && inverse <= 0x1.fffffep127f;
    *scale = usable ? largest / 127.0f : finite ? 0.0f : __builtin_nanf("");
    sum[0] = sum[1] = 0;
    if (!usable) {
        __builtin_memset(q, 0, 64);
        return;
    }
    for (int i = 0; i < 64; i += 16) {
        int32x4_t v[4];
        for (int j = 0; j < 4; j++) {
            float32x4_t y = vmulq_n_f32(vld1q_f32(x + i + j * 4), inverse);
            v[j] = vcvtnq_s32_f32(vminq_f32(vmaxq_f32(y, vdupq_n_f32(-127.0f)), vdupq_n_f32(127.0f)));
        }
        int16x8_t low = vcombine_s16(vmovn_s32(v[0]), vmovn_s32(v[1])), high = vcombine_s16(vmovn_s32(v[2]), vmovn_s32(v[3]));
        int8x16_t bytes = vcombine_s8(vmovn_s16(low), vmovn_s16(high));
        vst1q_s8(q + i, bytes);
        sum[i / 32] += vaddlvq_s8(bytes);
    }
}

static void cb_quantise_neon(const float *x, int64_t n, int8_t *q, float *scale, int32_t *sum)
{
    int64_t g = 0;
    for (; g * 64 + 64 <= n; g++)
        quantise_group(x + g * 64, q + g * 64, scale + g, sum + 2 * g);
    if (g * 64 == n)
        return;
    float padded[64] = {0};
    __builtin_memcpy(padded, x + g * 64, (size_t)(n - g * 64) * sizeof *x);
    quantise_group(padded, q + g * 64, scale + g, sum + 2 * g);
}

void cb_linear_table_neon(cb_table *t)
{
    t->linear[CB_F32][CB_ACT_F32] = cb_linear_f32_f32_neon;
    t->linear[CB_BF16][CB_ACT_F32] = cb_linear_bf16_f32_neon;
    t->linear[CB_Q8][CB_ACT_F32] = cb_linear_q8_f32_neon;
    t->linear[CB_Q4][CB_ACT_F32] = cb_linear_q4_f32_neon;
    t->linear[CB_Q8G32][CB_ACT_F32] = cb_linear_q8g32_f32_neon;
    t->linear[CB_Q4G32][CB_ACT_F32] = cb_linear_q4g32_f32_neon;
    t->linear[CB_MXFP4][CB_ACT_F32] = cb_linear_mxfp4_f32_neon;
    t->linear[CB_Q8][CB_ACT_Q8] = cb_linear_q8_q8_neon;
    t->linear[CB_Q4][CB_ACT_Q8] = cb_linear_q4_q8_neon;
    t->linear[CB_Q8G32][CB_ACT_Q8] = cb_linear_q8g32_q8_neon;
    t->linear[CB_Q4G32][CB_ACT_Q8] = cb_linear_q4g32_q8_neon;
    t->linear[CB_MXFP4][CB_ACT_Q8] = cb_linear_mxfp4_q8_neon;
    for (int format = CB_F32; format < CB_N_FORMATS; format++)
        for (int act = CB_ACT_F32; act <= CB_ACT_Q8; act++)
            if (t->linear[format][act])
                t->linear_isa[format][act] = cb_isa_names[CB_ISA_NEON];
    t->quantise = cb_quantise_neon;
}
