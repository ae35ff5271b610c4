/* int8_neon.h: attention over an int8 cache, four lanes at a time (../int8.h has the contracts). The including file defines
 * v_quads(acc, a, b): acc + four products each of s8, exact. A weight is two signed bytes: 256 * high + low. */
#include "../int8.h"

#include "cbmath_neon.h"

#define TILE static inline __attribute__((always_inline)) void
#define QUADS (CB_KV_BLOCK / 4)
#define TILE_QUERIES 4
#define TILE_VECTORS 4

static inline int8x16_t quad_at(const void *p)
{
    int32_t v;
    memcpy(&v, p, sizeof v);
    return vreinterpretq_s8_s32(vdupq_n_s32(v));
}

/* ---- scores ------------------------------------------------------------------------------------------------- */

/* 16 positions. */
TILE score_tile(const int queries, const int8_t *q, int64_t ldq, int64_t quads, const uint8_t *keys, const float *scale, int64_t ng,
                const float *key_scale, bool first, float *out, int64_t ldo)
{
    int32x4_t sum[TILE_QUERIES][TILE_VECTORS];
    for (int j = 0; j < queries; j++)
        for (int v = 0; v < TILE_VECTORS; v++)
            sum[j][v] = vdupq_n_s32(0);
    for (int64_t k = 0; k < quads; k++) {
        int8x16_t key[TILE_VECTORS];
        for (int v = 0; v < TILE_VECTORS; v++)
            key[v] = vreinterpretq_s8_u8(veorq_u8(vld1q_u8(keys + k * CB_KV_BLOCK * 4 + v * 16), vdupq_n_u8(128)));
        for (int j = 0; j < queries; j++) {
            int8x16_t own = quad_at(q + j * ldq + k * 4);
            for (int v = 0; v < TILE_VECTORS; v++)
                sum[j][v] = v_quads(sum[j][v], key[v], own);
        }
    }
    for (int j = 0; j < queries; j++)
        for (int v = 0; v < TILE_VECTORS; v++) {
            float *to = out + j * ldo + v * 4;
            float32x4_t both = vmulq_n_f32(vld1q_f32(key_scale + v * 4), scale[j * ng]);
            vst1q_f32(to, vfmaq_f32(first ? vdupq_n_f32(0) : vld1q_f32(to), vcvtq_f32_s32(sum[j][v]), both));
        }
}

static void scores(const cb_int8_queries *q, int64_t n_q, const cb_int8_block *b, float *out, int64_t ldo)
{
    int64_t ng = cb_groups(q->depth);
    for (int64_t g = 0; g < ng; g++) {
        int64_t quads = cb_quads(CB_MIN(CB_GROUP, q->depth - g * CB_GROUP));
        uint8_t room[CB_INT8_GROUP_BYTES];
        const uint8_t *keys = cb_int8_keys_of(b, g, quads, room);
        for (int64_t p = 0; p < CB_KV_BLOCK; p += 4 * TILE_VECTORS) {
            const float *of_key = b->key_scale + g * CB_KV_BLOCK + p;
            int64_t j = 0;
            for (; j + TILE_QUERIES <= n_q; j += TILE_QUERIES)
                score_tile(TILE_QUERIES, q->q + (j * ng + g) * CB_GROUP, ng * CB_GROUP, quads, keys + p * 4, q->scale + j * ng + g,
                           ng, of_key, g == 0, out + j * ldo + p, ldo);
            for (; j < n_q; j++)
                score_tile(1, q->q + (j * ng + g) * CB_GROUP, ng * CB_GROUP, quads, keys + p * 4, q->scale + j * ng + g, ng, of_key,
                           g == 0, out + j * ldo + p, ldo);
        }
    }
}

/* ---- softmax ------------------------------------------------------------------------------------------------ */

/* Positions from .. to - 1 of the vector that begins at p. */
static inline uint32x4_t seen(int64_t p, int64_t from, int64_t to)
{
    static const int32_t steps[4] = {0, 1, 2, 3};
    int32x4_t at = vaddq_s32(vdupq_n_s32((int)p), vld1q_s32(steps));
    return vandq_u32(vcgeq_s32(at, vdupq_n_s32((int)from)), vcltq_s32(at, vdupq_n_s32((int)to)));
}

static void softmax(float *s, int64_t n_q, int64_t from, int64_t to, float *m, float *l)
{
    const float32x4_t lowest = vdupq_n_f32(-INFINITY);
    int64_t begin = from / CB_KV_BLOCK * CB_KV_BLOCK, end = CB_CEIL(to, CB_KV_BLOCK) * CB_KV_BLOCK;
    for (int64_t j = 0; j < n_q; j++, s += CB_SPAN) {
        float32x4_t largest = lowest, sum[4] = {vdupq_n_f32(0), vdupq_n_f32(0), vdupq_n_f32(0), vdupq_n_f32(0)};
        for (int64_t p = begin; p < end; p += 4)
            largest = cb_larger_neon(vbslq_f32(seen(p, from, to), vld1q_f32(s + p), lowest), largest);
        m[j] = vmaxvq_f32(largest);
        for (int64_t p = begin; p < end; p += 4) {
            float32x4_t e = cb_exp_neon(vsubq_f32(vld1q_f32(s + p), vdupq_n_f32(m[j])));
            e = vbslq_f32(seen(p, from, to), e, vdupq_n_f32(0));
            vst1q_f32(s + p, e);
            sum[p / 4 % 4] = vaddq_f32(sum[p / 4 % 4], e);
        }
        l[j] = cb_fold_neon(sum);
    }
}

/* ---- values ------------------------------------------------------------------------------------------------- */

static void spread(const cb_int8_block *b, int64_t groups, int64_t from, int64_t to, float *u, float *step)
{
    int64_t begin = from / CB_KV_BLOCK * CB_KV_BLOCK, end = CB_CEIL(to, CB_KV_BLOCK) * CB_KV_BLOCK;
    for (int64_t g = 0; g < groups; g++, u += CB_SPAN) {
        uint32x4_t most = vdupq_n_u32(0);
        for (int64_t p = begin; p < end; p += 4) {
            float32x4_t scale = vld1q_f32(b[p / CB_KV_BLOCK].value_scale + g * CB_KV_BLOCK + p % CB_KV_BLOCK);
            uint32x4_t bits = vandq_u32(vreinterpretq_u32_f32(scale), seen(p, from, to));
            most = vmaxq_u32(most, vandq_u32(bits, vdupq_n_u32(0x7fffffff)));
            vst1q_f32(u + p, vreinterpretq_f32_u32(bits));
        }
        uint32_t top = vmaxvq_u32(most);
        float largest = cb_bits_f32(top), inverse = top ? (float)CB_WEIGHT_MAX / largest : 0.0f;
        bool finite = top < 0x7f800000u, usable = finite && cb_f32_bits(inverse) < 0x7f800000u;
        step[g] = usable ? largest / (float)CB_WEIGHT_MAX : finite ? 0.0f : cb_bits_f32(0x7fc00000u);
        for (int64_t p = begin; p < end; p += 4)
            vst1q_f32(u + p, usable ? vmulq_n_f32(vld1q_f32(u + p), inverse) : vdupq_n_f32(0));
    }
}

/* High and low bytes of the weights of a block in the order of its values' quads. */
static inline void weigh(const float *p, const float *u, int32_t high[QUADS], int32_t low[QUADS])
{
    const float32x4_t magic = vdupq_n_f32(CB_ROUND_MAGIC);
    for (int j = 0; j < QUADS; j += 4) {
        uint32x4_t w[4], h[4];
        for (int i = 0; i < 4; i++) {
            w[i] = vreinterpretq_u32_f32(vfmaq_f32(magic, vld1q_f32(p + i * QUADS + j), vld1q_f32(u + i * QUADS + j)));
            h[i] = vshrq_n_u32(vaddq_u32(w[i], vdupq_n_u32(128)), 8);
        }
        uint32x4_t lows = vsliq_n_u32(vsliq_n_u32(vsliq_n_u32(w[0], w[1], 8), w[2], 16), w[3], 24);
        uint32x4_t highs = vsliq_n_u32(vsliq_n_u32(vsliq_n_u32(h[0], h[1], 8), h[2], 16), h[3], 24);
        vst1q_s32(low + j, vreinterpretq_s32_u32(lows));
        vst1q_s32(high + j, vreinterpretq_s32_u32(highs));
    }
}

static void mix(const float *p, int64_t n_q, const cb_int8_block *b, int n_blocks, const float *u, const float *step, const float *f,
                const float *g, float *z)
{
    int8_t room[CB_SPAN_BLOCKS][CB_INT8_GROUP_BYTES];
    int32_t high[CB_SPAN_BLOCKS][QUADS], low[CB_SPAN_BLOCKS][QUADS];
    const int8_t *values[CB_SPAN_BLOCKS];
    int64_t groups = cb_groups(b->dim), ldz = groups * CB_GROUP, ld[CB_SPAN_BLOCKS];
    for (int64_t group = 0; group < groups; group++) {
        int64_t vectors = cb_quads(CB_MIN(CB_GROUP, b->dim - group * CB_GROUP));
        for (int i = 0; i < n_blocks; i++)
            values[i] = cb_int8_values_of(b + i, group, room[i], ld + i);
        float worth = f ? step[group] : 1.0f;
        for (int64_t j = 0; j < n_q; j++) {
            for (int i = 0; i < n_blocks; i++)
                weigh(p + j * CB_SPAN + i * CB_KV_BLOCK, u + group * CB_SPAN + i * CB_KV_BLOCK, high[i], low[i]);
            float own = f ? worth * g[j] : worth;
            for (int64_t v = 0; v < vectors; v++) {
                int32x4_t of_high[2] = {vdupq_n_s32(0), vdupq_n_s32(0)}, of_low[2] = {vdupq_n_s32(0), vdupq_n_s32(0)};
                for (int i = 0; i < n_blocks; i++)
                    for (int k = 0; k < QUADS; k++) {
                        int8x16_t column = vld1q_s8(values[i] + k * ld[i] + v * 16);
                        of_high[k % 2] = v_quads(of_high[k % 2], column, vreinterpretq_s8_s32(vdupq_n_s32(high[i][k])));
                        of_low[k % 2] = v_quads(of_low[k % 2], column, vreinterpretq_s8_s32(vdupq_n_s32(low[i][k])));
                    }
                int32x4_t d = vshlq_n_s32(vaddq_s32(of_high[0], of_high[1]), 8);
                float32x4_t sum = vcvtq_f32_s32(vaddq_s32(d, vaddq_s32(of_low[0], of_low[1])));
                float *to = z + j * ldz + group * CB_GROUP + v * 4;
                vst1q_f32(to, f ? vfmaq_f32(vmulq_n_f32(sum, own), vld1q_f32(to), vdupq_n_f32(f[j])) : sum);
            }
        }
    }
}

/* ---- indexer ------------------------------------------------------------------------------------------------ */

static void index_fold(const float *d, int64_t heads, const float *g, float *out)
{
    for (int64_t p = 0; p < CB_KV_BLOCK; p += 4) {
        float32x4_t sum = vdupq_n_f32(0);
        for (int64_t h = 0; h < heads; h++)
            sum = vfmaq_n_f32(sum, cb_larger_neon(vdupq_n_f32(0), vld1q_f32(d + h * CB_KV_BLOCK + p)), g[h]);
        vst1q_f32(out + p, sum);
    }
}
