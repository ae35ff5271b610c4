/* attn_ref.c: the definitions of attn.h as loops. Every other rung gives these bits. */
#include "attn.h"
#include "cbmath.h"
#include "gqa.h"

static void widen_ref(const uint16_t *src, int64_t n, float *dst)
{
    for (int64_t i = 0; i < n; i++)
        dst[i] = cb_bf16_f32(src[i]);
}

static void scores_ref(const float *q_t, int64_t lanes, int64_t depth, const float *keys, int64_t ldk, int64_t n,
                       float *out)
{
    for (int64_t i = 0; i < n; i++)
        for (int64_t h = 0; h < lanes; h++) {
            float s = 0.0f;
            for (int64_t k = 0; k < depth; k++)
                s = fmaf(q_t[cb_lane_start(h, depth) + k * CB_LANES], keys[i * ldk + k], s);
            out[i * lanes + h] = s;
        }
}

static void softmax_ref(float *s, int64_t lanes, int64_t n, bool first, float *m, float *l, float *f, float *g)
{
    for (int64_t h = 0; h < lanes; h++) {
        float block_max = s[h];
        for (int64_t i = 1; i < n; i++)
            block_max = s[i * lanes + h] > block_max ? s[i * lanes + h] : block_max;
        float sum = 0.0f;
        for (int64_t i = 0; i < n; i++) {
            float p = cb_exp(s[i * lanes + h] - block_max);
            s[i * lanes + h] = p;
            sum = sum + p;
        }
        float joined = first || block_max > m[h] ? block_max : m[h];
        f[h] = first ? 0.0f : cb_exp(m[h] - joined);
        g[h] = cb_exp(block_max - joined);
        l[h] = first ? sum * g[h] : fmaf(l[h], f[h], sum * g[h]);
        m[h] = joined;
    }
}

static void mix_ref(const float *p, int64_t lanes, int64_t n, const float *keys, int64_t ldk, int64_t rank,
                    int64_t n_heads, bool first, const float *f, const float *g, float *z)
{
    for (int64_t h = 0; h < n_heads; h++)
        for (int64_t r = 0; r < rank; r++) {
            float block = 0.0f;
            for (int64_t i = 0; i < n; i++)
                block = fmaf(p[i * lanes + h], keys[i * ldk + r], block);
            z[h * rank + r] = first ? block * g[h] : fmaf(z[h * rank + r], f[h], block * g[h]);
        }
}

static void join_ref(float *z, const float *zb, int64_t n, float f, float g)
{
    for (int64_t r = 0; r < n; r++)
        z[r] = fmaf(z[r], f, zb[r] * g);
}

static void index_fold_ref(const float *d, int64_t lanes, int64_t n, const float *g, float *out)
{
    for (int64_t i = 0; i < n; i++) {
        float s[CB_LANES] = {0};
        for (int64_t h = 0; h < lanes; h++) {
            float x = d[i * lanes + h];
            x = 0.0f > x ? 0.0f : x; /* a NaN stays */
            s[h % CB_LANES] = fmaf(g[h], x, s[h % CB_LANES]);
        }
        for (int half = CB_LANES / 2; half >= 1; half /= 2)
            for (int j = 0; j < half; j++)
                s[j] = s[j] + s[j + half];
        out[i] = s[0];
    }
}

static cb_attn_table active;

void cb_attn_table_ref(cb_table *t)
{
    active = (cb_attn_table){widen_ref, scores_ref, softmax_ref, mix_ref, join_ref, index_fold_ref, "ref"};
    t->attn = &active;
    t->gqa = &cb_gqa_table_ref;
}
