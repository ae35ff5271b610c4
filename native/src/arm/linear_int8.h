/* linear_int8.h: int8 activations for the aarch64 rungs. A register holds four outputs by four inputs of weights; the same
 * four inputs of a row stand against each of them. The including file says how that is multiplied and added:
 *     static inline int32x4_t dot4(int32x4_t acc, int8x16_t w, int8x16_t x)   acc[l] += sum of w[4l + j] * x[4l + j]
 * exactly. q4 nibbles stay unsigned (q + 8), so 8 * sum(xq) goes off per group. */
#include "tiles.h"

CB_INLINE int8x16_t broadcast_quad(const int8_t *q)
{
    int32_t v;
    __builtin_memcpy(&v, q, 4);
    return vreinterpretq_s8_s32(vdupq_n_s32(v));
}

/* One row has four sums only, too few to hide the latency of an addition: it gets a second set. */
#define CB_SETS(R) ((R) == 1 ? 2 : 1)

CB_INLINE void tile_q4_q8(const int R, const cb_matrix *m, int64_t b, const cb_tile_rows *rows, float *out)
{
    const int SETS = CB_SETS(R);
    int64_t ng = cb_groups(m->in);
    const uint8_t *w = (const uint8_t *)m->weight + b * ng * 512;
    const uint16_t *s = (const uint16_t *)m->scale + b * ng * 16;
    float32x4_t acc[CB_TILE_MAX][4];
    for (int r = 0; r < R; r++)
        for (int i = 0; i < 4; i++)
            acc[r][i] = vdupq_n_f32(0);
    for (int64_t g = 0; g < ng; g++, w += 512, s += 16) {
        int32x4_t d[CB_TILE_MAX][2][4];
        for (int r = 0; r < R; r++)
            for (int i = 0; i < 4; i++) {
                d[r][0][i] = vdupq_n_s32(-8 * rows->sum[r][g]);
                d[r][1][i] = vdupq_n_s32(0);
            }
#pragma GCC unroll 8
        for (int kq = 0; kq < 8; kq++) {
            int8x16_t low[4], high[4];
            for (int i = 0; i < 4; i++) {
                uint8x16_t v = vld1q_u8(w + kq * 64 + i * 16);
                low[i] = vreinterpretq_s8_u8(vandq_u8(v, vdupq_n_u8(15)));
                high[i] = vreinterpretq_s8_u8(vshrq_n_u8(v, 4));
            }
            for (int r = 0; r < R; r++) {
                const int8_t *q = rows->q[r] + g * 64 + kq * 4;
                int8x16_t x0 = broadcast_quad(q), x1 = broadcast_quad(q + 32);
                for (int i = 0; i < 4; i++) {
                    d[r][0][i] = dot4(d[r][0][i], low[i], x0);
                    d[r][SETS - 1][i] = dot4(d[r][SETS - 1][i], high[i], x1);
                }
            }
        }
        for (int i = 0; i < 4; i++) {
            float32x4_t scale = vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(s + i * 4)));
            for (int r = 0; r < R; r++) {
                int32x4_t sum = SETS == 2 ? vaddq_s32(d[r][0][i], d[r][1][i]) : d[r][0][i];
                acc[r][i] = vfmaq_f32(acc[r][i], vcvtq_f32_s32(sum), vmulq_n_f32(scale, rows->scale[r][g]));
            }
        }
    }
    for (int r = 0; r < R; r++)
        for (int i = 0; i < 4; i++)
            vst1q_f32(out + r * 16 + i * 4, acc[r][i]);
}

CB_INLINE void tile_q8_q8(const int R, const cb_matrix *m, int64_t b, const cb_tile_rows *rows, float *out)
{
    const int SETS = CB_SETS(R);
    int64_t ng = cb_groups(m->in);
    const uint8_t *w = (const uint8_t *)m->weight + b * ng * 1024;
    float32x4_t acc[CB_TILE_MAX][4];
    for (int r = 0; r < R; r++)
        for (int i = 0; i < 4; i++)
            acc[r][i] = vdupq_n_f32(0);
    for (int64_t g = 0; g < ng; g++, w += 1024) {
        int32x4_t d[CB_TILE_MAX][2][4];
        for (int r = 0; r < R; r++)
            for (int i = 0; i < 4; i++)
                d[r][0][i] = d[r][1][i] = vdupq_n_s32(0);
#pragma GCC unroll 8
        for (int kq = 0; kq < 16; kq++) {
            int8x16_t v[4];
            for (int i = 0; i < 4; i++)
                v[i] = vreinterpretq_s8_u8(veorq_u8(vld1q_u8(w + kq * 64 + i * 16), vdupq_n_u8(0x80)));
            for (int r = 0; r < R; r++) {
                int8x16_t x = broadcast_quad(rows->q[r] + g * 64 + kq * 4);
                int set = kq % SETS;
                for (int i = 0; i < 4; i++)
                    d[r][set][i] = dot4(d[r][set][i], v[i], x);
            }
        }
        for (int r = 0; r < R; r++)
            for (int i = 0; i < 4; i++) {
                int32x4_t sum = SETS == 2 ? vaddq_s32(d[r][0][i], d[r][1][i]) : d[r][0][i];
                acc[r][i] = vfmaq_n_f32(acc[r][i], vcvtq_f32_s32(sum), rows->scale[r][g]);
            }
    }
    const float *s = (const float *)m->scale + b * 16;
    for (int r = 0; r < R; r++)
        for (int i = 0; i < 4; i++)
            vst1q_f32(out + r * 16 + i * 4, vmulq_f32(acc[r][i], vld1q_f32(s + i * 4)));
}
