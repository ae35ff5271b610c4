/* vector_ref.c: the definitions of what works on one row: norms, SiLU, sigmoid, the sum over experts. */
#include "cbmath.h"
#include "delta.h"

/* Sum of 16 lanes as a tree: s_l += s_{l+8}, +4, +2, +1. */
static float fold(float s[16])
{
    for (int half = 8; half; half /= 2)
        for (int l = 0; l < half; l++)
            s[l] = s[l] + s[l + half];
    return s[0];
}

static void cb_rmsnorm_ref(const float *x, const float *w, float eps, int64_t n, float *out)
{
    float s[16] = {0};
    for (int64_t i = 0; i < n; i++)
        s[i % 16] = fmaf(x[i], x[i], s[i % 16]);
    float r = 1.0f / sqrtf(fold(s) / (float)n + eps);
    for (int64_t i = 0; i < n; i++)
        out[i] = x[i] * r * w[i];
}

static void cb_layernorm_ref(const float *x, const float *w, const float *b, float eps, int64_t n, float *out)
{
    float s[16] = {0}, v[16] = {0};
    for (int64_t i = 0; i < n; i++)
        s[i % 16] = s[i % 16] + x[i];
    float mean = fold(s) / (float)n;
    for (int64_t i = 0; i < n; i++)
        v[i % 16] = fmaf(x[i] - mean, x[i] - mean, v[i % 16]);
    float r = 1.0f / sqrtf(fold(v) / (float)n + eps);
    for (int64_t i = 0; i < n; i++)
        out[i] = fmaf((x[i] - mean) * r, w[i], b[i]);
}

static void cb_silu_mul_ref(const float *gate, const float *up, int64_t n, float *out)
{
    for (int64_t i = 0; i < n; i++)
        out[i] = cb_silu(gate[i]) * up[i];
}

static void cb_sigmoid_ref(const float *x, int64_t n, float *out)
{
    for (int64_t i = 0; i < n; i++)
        out[i] = cb_sigmoid(x[i]);
}

static bool cb_reduce_ref(const float *parts, int64_t stride, const float *weight, const int32_t *order, int64_t k,
                          const float *shared, int64_t n, float *out)
{
    bool finite = true;
    for (int64_t i = 0; i < n; i++) {
        float acc = 0;
        for (int64_t j = 0; j < k; j++)
            acc = fmaf(weight[order[j]], parts[order[j] * stride + i], acc);
        out[i] = shared ? acc + shared[i] : acc;
        finite &= (cb_f32_bits(out[i]) & 0x7fffffffu) < 0x7f800000u;
    }
    return finite;
}

void cb_vector_table_ref(cb_table *t)
{
    t->rmsnorm = cb_rmsnorm_ref;
    t->layernorm = cb_layernorm_ref;
    t->silu_mul = cb_silu_mul_ref;
    t->sigmoid = cb_sigmoid_ref;
    t->reduce = cb_reduce_ref;
    t->delta = &cb_delta_table_ref;
    t->vector_isa = cb_isa_names[CB_ISA_REF];
}
