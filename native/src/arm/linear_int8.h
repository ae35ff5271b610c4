/* linear_int8.h: int8 activations for the aarch64 rungs. A register holds four outputs by four inputs of weights; the same
 * four inputs of a row stand against each of them. The including file says how that is multiplied and added:
 *     static inline int32x4_t dot4(int32x4_t acc, int8x16_t w, int8x16_t x)   acc[l] += sum of w[4l + j] * x[4l + j]
 * exactly. Nibbles that are integers stay unsigned (q + 8), so 8 * sum(xq) goes off per group; mxfp4's are looked up signed. */
#include "weights_128.h"

CB_INLINE int8x16_t broadcast_quad(const int8_t *q)
{
    int32_t v;
    __builtin_memcpy(&v, q, 4);
    return vreinterpretq_s8_s32(vdupq_n_s32(v));
}

/* d[r][part]: the exact sums of a group's halves. Where these need no sums of their own, many rows have one for both: one row
 * has four sums only, too few to hide the latency of an addition. */
#define CB_SETS(FORMAT, R) ((R) == 1 || CB_HAS_HALVES(FORMAT) ? 2 : 1)

CB_INLINE void multiply_group(const int FORMAT, const int R, const uint8_t *w, const cb_tile_rows *rows, int64_t g,
                              int32x4_t d[CB_TILE_MAX][2][4])
{
    const int LAST = CB_SETS(FORMAT, R) - 1, OFFSET = FORMAT == CB_Q4 || FORMAT == CB_Q4G32 ? 8 : 0;
    for (int r = 0; r < R; r++) {
        const int32_t *sum = rows->sum[r] + 2 * g;
        for (int i = 0; i < 4; i++) {
            d[r][1][i] = vdupq_n_s32(-OFFSET * sum[1]);
            d[r][0][i] = vdupq_n_s32(-OFFSET * (LAST ? sum[0] : sum[0] + sum[1]));
        }
    }
#pragma GCC unroll 2
    for (int kq = 0; kq < 8; kq++) {
        int8x16_t first[4], second[4];
        for (int i = 0; i < 4; i++) {
            uint8x16_t v = vld1q_u8(w + kq * 64 + i * 16);
            if (CB_IS_NIBBLES(FORMAT)) {
                first[i] = cb_nibbles(FORMAT, v, false);
                second[i] = cb_nibbles(FORMAT, v, true);
            } else {
                first[i] = vreinterpretq_s8_u8(veorq_u8(v, vdupq_n_u8(0x80)));
                second[i] = vreinterpretq_s8_u8(veorq_u8(vld1q_u8(w + 512 + kq * 64 + i * 16), vdupq_n_u8(0x80)));
            }
        }
        for (int r = 0; r < R; r++) {
            const int8_t *q = rows->q[r] + g * 64 + kq * 4;
            int8x16_t x0 = broadcast_quad(q), x1 = broadcast_quad(q + 32);
            for (int i = 0; i < 4; i++) {
                d[r][0][i] = dot4(d[r][0][i], first[i], x0);
                d[r][LAST][i] = dot4(d[r][LAST][i], second[i], x1);
            }
        }
    }
}

CB_INLINE void tile_q8(const int FORMAT, const int R, const cb_matrix *m, int64_t b, const cb_tile_rows *rows, float *out)
{
    const int SETS = CB_SETS(FORMAT, R), BYTES = CB_GROUP_BYTES(FORMAT);
    int64_t ng = cb_groups(m->in);
    const uint8_t *w = (const uint8_t *)m->weight + b * ng * BYTES;
    const uint8_t *s = (const uint8_t *)m->scale + b * ng * CB_GROUP_SCALE_BYTES(FORMAT);
    float32x4_t acc[CB_TILE_MAX][4];
    for (int r = 0; r < R; r++)
        for (int i = 0; i < 4; i++)
            acc[r][i] = vdupq_n_f32(0);
    for (int64_t g = 0; g < ng; g++, w += BYTES, s += CB_GROUP_SCALE_BYTES(FORMAT)) {
        int32x4_t d[CB_TILE_MAX][2][4];
        multiply_group(FORMAT, R, w, rows, g, d);
        for (int part = 0; part < (CB_HAS_HALVES(FORMAT) ? 2 : 1); part++)
            for (int i = 0; i < 4; i++) {
                float32x4_t scale = FORMAT == CB_Q8 ? vdupq_n_f32(1) : cb_group_scales(FORMAT, s, part, i);
                for (int r = 0; r < R; r++) {
                    bool is_split = SETS == 2 && !CB_HAS_HALVES(FORMAT);
                    int32x4_t sum = is_split ? vaddq_s32(d[r][0][i], d[r][1][i]) : d[r][part][i];
                    float32x4_t both = FORMAT == CB_Q8 ? vdupq_n_f32(rows->scale[r][g]) : vmulq_n_f32(scale, rows->scale[r][g]);
                    acc[r][i] = vfmaq_f32(acc[r][i], vcvtq_f32_s32(sum), both);
                }
            }
    }
    for (int r = 0; r < R; r++)
        for (int i = 0; i < 4; i++) {
            if (FORMAT == CB_Q8)
                acc[r][i] = vmulq_f32(acc[r][i], vld1q_f32((const float *)m->scale + b * 16 + i * 4));
            vst1q_f32(out + r * 16 + i * 4, acc[r][i]);
        }
}

#define CB_INT8_KERNEL(name, format, isa)                                                                              \
    CB_INLINE void tile_##name##_q8(const int R, const cb_matrix *m, int64_t b, const cb_tile_rows *rows, float *out)   \
    {                                                                                                                  \
        tile_q8(format, R, m, b, rows, out);                                                                           \
    }                                                                                                                  \
    CB_TILE_KERNEL(cb_linear_##name##_q8_##isa, CB_TILE_MAX, tile_##name##_q8)
