/* int8_ref.c: the definitions of int8.h as loops. Every other rung gives these bits. */
#include "int8.h"
#include "cbmath.h"

#include <string.h>

static void scores_ref(const cb_int8_queries *q, int64_t n_q, const cb_int8_block *b, float *out, int64_t ldo)
{
    int64_t ng = cb_groups(q->depth);
    for (int64_t g = 0; g < ng; g++) {
        int64_t end = CB_MIN(CB_GROUP, q->depth - g * CB_GROUP);
        uint8_t room[CB_INT8_GROUP_BYTES];
        const uint8_t *keys = cb_int8_keys_of(b, g, cb_quads(end), room);
        for (int64_t j = 0; j < n_q; j++)
            for (int64_t p = 0; p < CB_KV_BLOCK; p++) {
                int32_t d = 0;
                for (int64_t k = 0; k < end; k++)
                    d += q->q[(j * ng + g) * CB_GROUP + k] * (keys[(k / 4 * CB_KV_BLOCK + p) * 4 + k % 4] - 128);
                float *s = out + j * ldo + p;
                *s = fmaf((float)d, q->scale[j * ng + g] * b->key_scale[g * CB_KV_BLOCK + p], g ? *s : 0.0f);
            }
    }
}

static void softmax_ref(float *s, int64_t n_q, int64_t from, int64_t to, float *m, float *l)
{
    for (int64_t j = 0; j < n_q; j++, s += CB_SPAN) {
        float largest = s[from], sum[CB_LANES] = {0};
        for (int64_t p = from + 1; p < to; p++)
            largest = s[p] > largest ? s[p] : largest;
        for (int64_t p = from / CB_KV_BLOCK * CB_KV_BLOCK; p < CB_CEIL(to, CB_KV_BLOCK) * CB_KV_BLOCK; p++) {
            s[p] = p < from || p >= to ? 0.0f : cb_exp(s[p] - largest);
            sum[p % CB_LANES] = sum[p % CB_LANES] + s[p];
        }
        for (int half = CB_LANES / 2; half >= 1; half /= 2)
            for (int i = 0; i < half; i++)
                sum[i] = sum[i] + sum[i + half];
        m[j] = largest;
        l[j] = sum[0];
    }
}

static void spread_ref(const cb_int8_block *b, int64_t groups, int64_t from, int64_t to, float *u, float *step)
{
    for (int64_t g = 0; g < groups; g++, u += CB_SPAN) {
        uint32_t most = 0;
        for (int64_t p = from; p < to; p++) /* a NaN lies above infinity */
            most = CB_MAX(most, cb_f32_bits(b[p / CB_KV_BLOCK].value_scale[g * CB_KV_BLOCK + p % CB_KV_BLOCK]) & 0x7fffffffu);
        float largest = cb_bits_f32(most), inverse = most ? (float)CB_WEIGHT_MAX / largest : 0.0f;
        bool finite = most < 0x7f800000u, usable = finite && cb_f32_bits(inverse) < 0x7f800000u;
        step[g] = usable ? largest / (float)CB_WEIGHT_MAX : finite ? 0.0f : cb_bits_f32(0x7fc00000u);
        for (int64_t p = from / CB_KV_BLOCK * CB_KV_BLOCK; p < CB_CEIL(to, CB_KV_BLOCK) * CB_KV_BLOCK; p++) {
            bool is_seen = usable && p >= from && p < to;
            u[p] = is_seen ? b[p / CB_KV_BLOCK].value_scale[g * CB_KV_BLOCK + p % CB_KV_BLOCK] * inverse : 0.0f;
        }
    }
}

static void mix_ref(const float *p, int64_t n_q, const cb_int8_block *b, int n_blocks, const float *u, const float *step,
                    const float *f, const float *g, float *z)
{
    const int64_t quads = CB_KV_BLOCK / 4;
    int64_t groups = cb_groups(b->dim), ld[CB_SPAN_BLOCKS];
    int8_t room[CB_SPAN_BLOCKS][CB_INT8_GROUP_BYTES];
    const int8_t *values[CB_SPAN_BLOCKS];
    for (int64_t group = 0; group < groups; group++) {
        int64_t end = CB_MIN(CB_GROUP, b->dim - group * CB_GROUP);
        for (int i = 0; i < n_blocks; i++)
            values[i] = cb_int8_values_of(b + i, group, room[i], ld + i);
        for (int64_t j = 0; j < n_q; j++) {
            int16_t weight[CB_SPAN];
            for (int64_t i = 0; i < n_blocks * CB_KV_BLOCK; i++)
                weight[i] = (int16_t)cb_f32_bits(fmaf(p[j * CB_SPAN + i], u[group * CB_SPAN + i], CB_ROUND_MAGIC));
            for (int64_t r = 0; r < end; r++) {
                int32_t d = 0;
                for (int64_t i = 0; i < n_blocks * CB_KV_BLOCK; i++) {
                    int64_t block = i / CB_KV_BLOCK, place = i % CB_KV_BLOCK;
                    d += weight[i] * values[block][place % quads * ld[block] + r * 4 + place / quads];
                }
                float *to = z + (j * groups + group) * CB_GROUP + r;
                *to = f ? fmaf(*to, f[j], (float)d * (step[group] * g[j])) : (float)d;
            }
        }
    }
}

static void index_fold_ref(const float *d, int64_t heads, const float *g, float *out)
{
    for (int64_t p = 0; p < CB_KV_BLOCK; p++) {
        float s = 0.0f;
        for (int64_t h = 0; h < heads; h++) {
            float x = d[h * CB_KV_BLOCK + p];
            s = fmaf(g[h], 0.0f > x ? 0.0f : x, s); /* a NaN stays */
        }
        out[p] = s;
    }
}

static cb_int8_table active;

void cb_int8_table_ref(cb_table *t)
{
    active = (cb_int8_table){scores_ref, softmax_ref, spread_ref, mix_ref, index_fold_ref, "ref"};
    t->int8 = &active;
}
