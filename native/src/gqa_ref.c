/* gqa_ref.c: the definitions of gqa.h as loops. Every other rung gives these bits. */
#include "cbmath.h"
#include "gqa.h"

static void scores_ref(const float *q, int64_t n_q, int64_t depth, const float *keys, int64_t from, int64_t to, float *out)
{
    for (int64_t j = 0; j < n_q; j++)
        for (int64_t p = from; p < to; p++) {
            float s = 0.0f;
            for (int64_t k = 0; k < depth; k++)
                s = fmaf(q[j * depth + k], keys[k * CB_KV_BLOCK + p], s);
            out[j * CB_KV_BLOCK + p] = s;
        }
}

static void softmax_ref(float *s, int64_t from, int64_t to, float *m, float *l)
{
    float largest = s[from];
    for (int64_t p = from + 1; p < to; p++)
        largest = s[p] > largest ? s[p] : largest;
    float sum[CB_LANES] = {0};
    for (int64_t p = from; p < to; p++) {
        s[p] = cb_exp(s[p] - largest);
        sum[p % CB_LANES] = sum[p % CB_LANES] + s[p];
    }
    for (int half = CB_LANES / 2; half >= 1; half /= 2)
        for (int j = 0; j < half; j++)
            sum[j] = sum[j] + sum[j + half];
    *m = largest;
    *l = sum[0];
}

static void join_ref(const float *mb, const float *lb, int64_t n, float *m, float *l, float *f, float *g)
{
    for (int64_t j = 0; j < n; j++) {
        float joined = mb[j] > m[j] ? mb[j] : m[j];
        f[j] = cb_exp(m[j] - joined);
        g[j] = cb_exp(mb[j] - joined);
        l[j] = fmaf(l[j], f[j], lb[j] * g[j]);
        m[j] = joined;
    }
}

static void mix_ref(const float *s, int64_t n_q, int64_t from, int64_t to, const float *values, int64_t ldv, int64_t dim,
                    const float *f, const float *g, float *z)
{
    for (int64_t j = 0; j < n_q; j++)
        for (int64_t r = 0; r < dim; r++) {
            float block = 0.0f;
            for (int64_t p = from; p < to; p++)
                block = fmaf(s[j * CB_KV_BLOCK + p], values[p * ldv + r], block);
            z[j * dim + r] = f ? fmaf(z[j * dim + r], f[j], block * g[j]) : block;
        }
}

const cb_gqa_table cb_gqa_table_ref = {.scores = scores_ref, .softmax = softmax_ref, .join = join_ref, .mix = mix_ref};
