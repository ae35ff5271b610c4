/* attn_neon.c: inner loops of attention and indexer, four lanes at a time (attn.h has the contracts). */
#include "../gqa.h"

#include "cbmath_neon.h"

/* Tiles are functions of a constant size: the compiler unrolls them and keeps the sums in registers. */
#define TILE static inline __attribute__((always_inline)) void

static void widen_neon(const uint16_t *src, int64_t n, float *dst)
{
    int64_t i = 0;
    for (; i + 4 <= n; i += 4)
        vst1q_f32(dst + i, vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(src + i), 16)));
    for (; i < n; i++)
        dst[i] = cb_bf16_f32(src[i]);
}

/* 16 heads of `keys_of_tile` keys. */
#define SCORE_KEYS 4

TILE score_tile(const int keys_of_tile, const float *q, int64_t depth, const float *keys, int64_t ldk, float *out,
                int64_t lanes)
{
    float32x4_t sum[SCORE_KEYS][4];
    for (int i = 0; i < keys_of_tile; i++)
        for (int v = 0; v < 4; v++)
            sum[i][v] = vdupq_n_f32(0);
    for (int64_t k = 0; k < depth; k++)
        for (int v = 0; v < 4; v++) {
            float32x4_t heads = vld1q_f32(q + k * CB_LANES + v * 4);
            for (int i = 0; i < keys_of_tile; i++)
                sum[i][v] = vfmaq_n_f32(sum[i][v], heads, keys[i * ldk + k]);
        }
    for (int i = 0; i < keys_of_tile; i++)
        for (int v = 0; v < 4; v++)
            vst1q_f32(out + i * lanes + v * 4, sum[i][v]);
}

static void scores_neon(const float *q_t, int64_t lanes, int64_t depth, const float *keys, int64_t ldk, int64_t n,
                        float *out)
{
    for (int64_t h = 0; h < lanes; h += CB_LANES) {
        const float *q = q_t + h * depth;
        int64_t i = 0;
        for (; i + SCORE_KEYS <= n; i += SCORE_KEYS)
            score_tile(SCORE_KEYS, q, depth, keys + i * ldk, ldk, out + i * lanes + h, lanes);
        for (; i < n; i++)
            score_tile(1, q, depth, keys + i * ldk, ldk, out + i * lanes + h, lanes);
    }
}

static void softmax_neon(float *s, int64_t lanes, int64_t n, bool first, float *m, float *l, float *f, float *g)
{
    for (int64_t h = 0; h < lanes; h += 4) {
        float32x4_t block_max = vld1q_f32(s + h);
        for (int64_t i = 1; i < n; i++)
            block_max = cb_larger_neon(vld1q_f32(s + i * lanes + h), block_max);
        float32x4_t sum = vdupq_n_f32(0);
        for (int64_t i = 0; i < n; i++) {
            float32x4_t p = cb_exp_neon(vsubq_f32(vld1q_f32(s + i * lanes + h), block_max));
            vst1q_f32(s + i * lanes + h, p);
            sum = vaddq_f32(sum, p);
        }
        float32x4_t joined = block_max, factor = vdupq_n_f32(0);
        if (!first) {
            float32x4_t before = vld1q_f32(m + h);
            joined = cb_larger_neon(block_max, before);
            factor = cb_exp_neon(vsubq_f32(before, joined));
        }
        float32x4_t own = cb_exp_neon(vsubq_f32(block_max, joined));
        float32x4_t add = vmulq_f32(sum, own);
        vst1q_f32(l + h, first ? add : vfmaq_f32(add, vld1q_f32(l + h), factor));
        vst1q_f32(f + h, factor);
        vst1q_f32(g + h, own);
        vst1q_f32(m + h, joined);
    }
}

/* 16 components of `heads` heads. */
#define MIX_HEADS 4

TILE mix_tile(const int heads, const float *p, int64_t lanes, int64_t n, const float *keys, int64_t ldk, int64_t rank,
              bool first, const float *f, const float *g, float *z)
{
    float32x4_t sum[MIX_HEADS][4];
    for (int h = 0; h < heads; h++)
        for (int v = 0; v < 4; v++)
            sum[h][v] = vdupq_n_f32(0);
    for (int64_t i = 0; i < n; i++)
        for (int v = 0; v < 4; v++) {
            float32x4_t c = vld1q_f32(keys + i * ldk + v * 4);
            for (int h = 0; h < heads; h++)
                sum[h][v] = vfmaq_n_f32(sum[h][v], c, p[i * lanes + h]);
        }
    for (int h = 0; h < heads; h++)
        for (int v = 0; v < 4; v++) {
            float *at = z + h * rank + v * 4;
            float32x4_t add = vmulq_n_f32(sum[h][v], g[h]);
            vst1q_f32(at, first ? add : vfmaq_n_f32(add, vld1q_f32(at), f[h]));
        }
}

static void mix_neon(const float *p, int64_t lanes, int64_t n, const float *keys, int64_t ldk, int64_t rank,
                     int64_t n_heads, bool first, const float *f, const float *g, float *z)
{
    for (int64_t r = 0; r < rank; r += 16) {
        int64_t h = 0;
        for (; h + MIX_HEADS <= n_heads; h += MIX_HEADS)
            mix_tile(MIX_HEADS, p + h, lanes, n, keys + r, ldk, rank, first, f + h, g + h, z + h * rank + r);
        for (; h < n_heads; h++)
            mix_tile(1, p + h, lanes, n, keys + r, ldk, rank, first, f + h, g + h, z + h * rank + r);
    }
}

static void join_neon(float *z, const float *zb, int64_t n, float f, float g)
{
    for (int64_t r = 0; r < n; r += 4)
        vst1q_f32(z + r, vfmaq_n_f32(vmulq_n_f32(vld1q_f32(zb + r), g), vld1q_f32(z + r), f));
}

static void index_fold_neon(const float *d, int64_t lanes, int64_t n, const float *g, float *out)
{
    const float32x4_t zero = vdupq_n_f32(0);
    for (int64_t i = 0; i < n; i++) {
        float32x4_t s[4] = {zero, zero, zero, zero};
        for (int64_t h = 0; h < lanes; h += 4)
            s[h / 4 % 4] = vfmaq_f32(s[h / 4 % 4], vld1q_f32(g + h), cb_larger_neon(zero, vld1q_f32(d + i * lanes + h)));
        out[i] = cb_fold_neon(s);
    }
}

void cb_attn_table_neon(cb_table *t)
{
    cb_attn_table *a = t->attn;
    a->widen = widen_neon;
    a->scores = scores_neon;
    a->softmax = softmax_neon;
    a->mix = mix_neon;
    a->join = join_neon;
    a->index_fold = index_fold_neon;
    a->isa = cb_isa_names[CB_ISA_NEON];
    t->gqa = &cb_gqa_table_neon;
}
