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

static void scores_int8_ref(const cb_int8_query *q, int64_t lanes, int64_t ng, const cb_int8_keys *keys, int64_t n, float *out)
{
    for (int64_t i = 0; i < n; i++)
        for (int64_t h = 0; h < lanes; h++) {
            float s = 0.0f;
            for (int64_t g = 0; g < ng; g++) {
                int64_t at = (h / CB_LANES * ng + g) * CB_LANES;
                const int8_t *head = q->q + at * CB_GROUP + h % CB_LANES * 4;
                const uint8_t *key = keys->q + i * keys->ldq + g * CB_GROUP;
                int32_t d = 0;
                for (int64_t k = 0; k < CB_GROUP; k++)
                    d += head[k / 4 * CB_LANES * 4 + k % 4] * (key[k] - 128);
                s = fmaf((float)d, q->scale[at + h % CB_LANES] * keys->scale[i * ng + g], s);
            }
            out[i * lanes + h] = s;
        }
}

static void pair_up_ref(const uint8_t *q, int64_t ldq, int64_t n, int64_t rank, int16_t *pairs)
{
    for (int64_t r = 0; r < rank; r++)
        for (int64_t i = 0; i < CB_CEIL(n, 2) * 2; i++)
            pairs[((r / CB_GROUP * (CB_KV_BLOCK / 2) + i / 2) * CB_GROUP + r % CB_GROUP) * 2 + i % 2] =
                (int16_t)(i < n ? q[i * ldq + r] - 128 : 0);
}

static void mix_int8_ref(const float *p, int64_t lanes, int64_t n, const cb_int8_keys *keys, int64_t ng, int64_t rank,
                         int64_t n_heads, bool first, const float *f, const float *g, float *z)
{
    for (int64_t h = 0; h < n_heads; h++)
        for (int64_t group = 0; group < cb_groups(rank); group++) {
            float w[CB_KV_BLOCK];
            uint32_t m = 0;
            for (int64_t i = 0; i < n; i++) {
                w[i] = p[i * lanes + h] * keys->scale[i * ng + group];
                m = CB_MAX(m, cb_f32_bits(w[i]) & 0x7fffffffu);
            }
            float largest = cb_bits_f32(m), inverse = m ? (float)CB_PROBABILITY_MAX / largest : 0.0f;
            bool finite = m < 0x7f800000u, usable = finite && cb_f32_bits(inverse) < 0x7f800000u;
            float step = usable ? largest / (float)CB_PROBABILITY_MAX : finite ? 0.0f : cb_bits_f32(0x7fc00000u);
            const int16_t *pairs = keys->pairs + group * CB_KV_BLOCK * CB_GROUP;
            for (int64_t r = group * CB_GROUP; r < CB_MIN(rank, (group + 1) * CB_GROUP); r++) {
                int32_t d = 0;
                for (int64_t i = 0; i < n; i++) {
                    float v = usable ? w[i] * inverse : 0.0f;
                    d += (int32_t)(v + CB_ROUND_MAGIC - CB_ROUND_MAGIC) * pairs[(i / 2 * CB_GROUP + r % CB_GROUP) * 2 + i % 2];
                }
                float block = (float)d * step;
                z[h * rank + r] = first ? block * g[h] : fmaf(z[h * rank + r], f[h], block * g[h]);
            }
        }
}

static cb_attn_table active;

void cb_attn_table_ref(cb_table *t)
{
    active = (cb_attn_table){widen_ref, scores_ref, softmax_ref, mix_ref, join_ref, index_fold_ref,
                             scores_int8_ref, pair_up_ref, mix_int8_ref, "ref", "ref"};
    t->attn = &active;
    t->gqa = &cb_gqa_table_ref;
}
