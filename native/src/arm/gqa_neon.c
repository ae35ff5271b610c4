/* gqa_neon.c: inner loops of grouped-query attention, four lanes at a time (gqa.h has the contracts). */
#include "../gqa.h"

#include "cbmath_neon.h"

/* Tiles are functions of a constant size: the compiler unrolls them and keeps the sums in registers. */
#define TILE static inline __attribute__((always_inline)) void

/* 16 positions of `queries` queries. */
#define TILE_QUERIES 4

TILE score_tile(const int queries, const float *q, int64_t depth, const float *keys, float *out)
{
    float32x4_t sum[TILE_QUERIES][4];
    for (int j = 0; j < queries; j++)
        for (int v = 0; v < 4; v++)
            sum[j][v] = vdupq_n_f32(0);
    for (int64_t k = 0; k < depth; k++)
        for (int v = 0; v < 4; v++) {
            float32x4_t key = vld1q_f32(keys + k * CB_KV_BLOCK + v * 4);
            for (int j = 0; j < queries; j++)
                sum[j][v] = vfmaq_n_f32(sum[j][v], key, q[j * depth + k]);
        }
    for (int j = 0; j < queries; j++)
        for (int v = 0; v < 4; v++)
            vst1q_f32(out + j * CB_KV_BLOCK + v * 4, sum[j][v]);
}

static void scores_neon(const float *q, int64_t n_q, int64_t depth, const float *keys, int64_t from, int64_t to, float *out)
{
    for (int64_t p = from; p < to; p += CB_LANES) {
        int64_t j = 0;
        for (; j + TILE_QUERIES <= n_q; j += TILE_QUERIES)
            score_tile(TILE_QUERIES, q + j * depth, depth, keys + p, out + j * CB_KV_BLOCK + p);
        for (; j < n_q; j++)
            score_tile(1, q + j * depth, depth, keys + p, out + j * CB_KV_BLOCK + p);
    }
}

static void softmax_neon(float *s, int64_t from, int64_t to, float *m, float *l)
{
    static const int32_t steps[4] = {0, 1, 2, 3};
    const float32x4_t lowest = vdupq_n_f32(-INFINITY);
    int64_t begin = from / CB_LANES * CB_LANES, end = CB_CEIL(to, CB_LANES) * CB_LANES;
    uint32x4_t inside[CB_KV_BLOCK / 4];
    float32x4_t largest = lowest, sum[4] = {vdupq_n_f32(0), vdupq_n_f32(0), vdupq_n_f32(0), vdupq_n_f32(0)};
    for (int64_t p = begin; p < end; p += 4) {
        int32x4_t at = vaddq_s32(vdupq_n_s32((int)p), vld1q_s32(steps));
        inside[p / 4] = vandq_u32(vcgeq_s32(at, vdupq_n_s32((int)from)), vcltq_s32(at, vdupq_n_s32((int)to)));
        largest = cb_larger_neon(vbslq_f32(inside[p / 4], vld1q_f32(s + p), lowest), largest);
    }
    *m = vmaxvq_f32(largest);
    for (int64_t p = begin; p < end; p += 4) {
        float32x4_t e = cb_exp_neon(vsubq_f32(vld1q_f32(s + p), vdupq_n_f32(*m)));
        e = vbslq_f32(inside[p / 4], e, vdupq_n_f32(0));
        vst1q_f32(s + p, e);
        sum[p / 4 % 4] = vaddq_f32(sum[p / 4 % 4], e);
    }
    *l = cb_fold_neon(sum);
}

static void join_neon(const float *mb, const float *lb, int64_t n, float *m, float *l, float *f, float *g)
{
    for (int64_t j = 0; j < n; j += 4) {
        float32x4_t block = cb_load_neon(mb + j, n - j), before = cb_load_neon(m + j, n - j);
        float32x4_t joined = cb_larger_neon(block, before);
        float32x4_t factor = cb_exp_neon(vsubq_f32(before, joined)), own = cb_exp_neon(vsubq_f32(block, joined));
        float32x4_t add = vmulq_f32(cb_load_neon(lb + j, n - j), own);
        cb_store_neon(l + j, n - j, vfmaq_f32(add, cb_load_neon(l + j, n - j), factor));
        cb_store_neon(f + j, n - j, factor);
        cb_store_neon(g + j, n - j, own);
        cb_store_neon(m + j, n - j, joined);
    }
}

/* 16 components of `queries` queries. */
TILE mix_tile(const int queries, const float *s, int64_t from, int64_t to, const float *values, int64_t ldv, int64_t dim,
              const float *f, const float *g, float *z)
{
    float32x4_t sum[TILE_QUERIES][4];
    for (int j = 0; j < queries; j++)
        for (int v = 0; v < 4; v++)
            sum[j][v] = vdupq_n_f32(0);
    for (int64_t p = from; p < to; p++)
        for (int v = 0; v < 4; v++) {
            float32x4_t component = vld1q_f32(values + p * ldv + v * 4);
            for (int j = 0; j < queries; j++)
                sum[j][v] = vfmaq_n_f32(sum[j][v], component, s[j * CB_KV_BLOCK + p]);
        }
    for (int j = 0; j < queries; j++)
        for (int v = 0; v < 4; v++) {
            float *at = z + j * dim + v * 4;
            vst1q_f32(at, f ? vfmaq_n_f32(vmulq_n_f32(sum[j][v], g[j]), vld1q_f32(at), f[j]) : sum[j][v]);
        }
}

static void mix_neon(const float *s, int64_t n_q, int64_t from, int64_t to, const float *values, int64_t ldv, int64_t dim,
                     const float *f, const float *g, float *z)
{
    /* Outer loop over components: 64 positions' worth of them stays in the first-level cache for all queries. */
    for (int64_t r = 0; r < dim; r += 16) {
        int64_t j = 0;
        for (; j + TILE_QUERIES <= n_q; j += TILE_QUERIES)
            mix_tile(TILE_QUERIES, s + j * CB_KV_BLOCK, from, to, values + r, ldv, dim, f ? f + j : NULL,
                     f ? g + j : NULL, z + j * dim + r);
        for (; j < n_q; j++)
            mix_tile(1, s + j * CB_KV_BLOCK, from, to, values + r, ldv, dim, f ? f + j : NULL, f ? g + j : NULL,
                     z + j * dim + r);
    }
}

const cb_gqa_table cb_gqa_table_neon = {.scores = scores_neon, .softmax = softmax_neon, .join = join_neon, .mix = mix_neon};
