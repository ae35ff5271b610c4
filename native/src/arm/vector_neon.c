/* vector_neon.c: vector_ref.c with four lanes; sums keep their 16 lanes in four registers. */
#include "../delta.h"
#include "cbmath_neon.h"

static void cb_rmsnorm_neon(const float *x, const float *w, float eps, int64_t n, float *out)
{
    float32x4_t s[4] = {vdupq_n_f32(0), vdupq_n_f32(0), vdupq_n_f32(0), vdupq_n_f32(0)};
    for (int64_t i = 0; i < n; i += 16)
        for (int j = 0; j < 4 && i + j * 4 < n; j++) { /* a lane past the end adds 0 * 0 to a sum of squares */
            float32x4_t v = cb_load_neon(x + i + j * 4, n - i - j * 4);
            s[j] = vfmaq_f32(s[j], v, v);
        }
    float r = 1.0f / sqrtf(cb_fold_neon(s) / (float)n + eps);
    for (int64_t i = 0; i < n; i += 4) {
        float32x4_t y = vmulq_f32(vmulq_n_f32(cb_load_neon(x + i, n - i), r), cb_load_neon(w + i, n - i));
        cb_store_neon(out + i, n - i, y);
    }
}

static void cb_layernorm_neon(const float *x, const float *w, const float *b, float eps, int64_t n, float *out)
{
    float32x4_t s[4] = {vdupq_n_f32(0), vdupq_n_f32(0), vdupq_n_f32(0), vdupq_n_f32(0)};
    float32x4_t v[4] = {s[0], s[0], s[0], s[0]};
    for (int64_t i = 0; i < n; i += 4) /* no lane holds -0, which + 0 would change */
        s[i / 4 % 4] = vaddq_f32(s[i / 4 % 4], cb_load_neon(x + i, n - i));
    float32x4_t mean = vdupq_n_f32(cb_fold_neon(s) / (float)n);
    for (int64_t i = 0; i < n; i += 4) {
        float d[4];
        vst1q_f32(d, vsubq_f32(cb_load_neon(x + i, n - i), mean));
        float32x4_t own = cb_load_neon(d, n - i);
        v[i / 4 % 4] = vfmaq_f32(v[i / 4 % 4], own, own);
    }
    float r = 1.0f / sqrtf(cb_fold_neon(v) / (float)n + eps);
    for (int64_t i = 0; i < n; i += 4) {
        float32x4_t d = vmulq_n_f32(vsubq_f32(cb_load_neon(x + i, n - i), mean), r);
        cb_store_neon(out + i, n - i, vfmaq_f32(cb_load_neon(b + i, n - i), d, cb_load_neon(w + i, n - i)));
    }
}

static void cb_silu_mul_neon(const float *gate, const float *up, int64_t n, float *out)
{
    for (int64_t i = 0; i < n; i += 4) {
        float32x4_t y = vmulq_f32(cb_silu_neon(cb_load_neon(gate + i, n - i)), cb_load_neon(up + i, n - i));
        cb_store_neon(out + i, n - i, y);
    }
}

static void cb_sigmoid_row_neon(const float *x, int64_t n, float *out)
{
    for (int64_t i = 0; i < n; i += 4)
        cb_store_neon(out + i, n - i, cb_sigmoid_neon(cb_load_neon(x + i, n - i)));
}

static bool cb_reduce_neon(const float *parts, int64_t stride, const float *weight, const int32_t *order, int64_t k,
                           const float *shared, int64_t n, float *out)
{
    uint32x4_t largest = vdupq_n_u32(0), magnitude = vdupq_n_u32(0x7fffffff);
    for (int64_t i = 0; i < n; i += 4) {
        float32x4_t acc = vdupq_n_f32(0);
        for (int64_t j = 0; j < k; j++)
            acc = vfmaq_n_f32(acc, cb_load_neon(parts + order[j] * stride + i, n - i), weight[order[j]]);
        if (shared)
            acc = vaddq_f32(acc, cb_load_neon(shared + i, n - i));
        cb_store_neon(out + i, n - i, acc);
        /* Past the end are zeros times weights: not finite only where the row itself isn't. */
        largest = vmaxq_u32(largest, vandq_u32(vreinterpretq_u32_f32(acc), magnitude));
    }
    return vmaxvq_u32(largest) < 0x7f800000u;
}

void cb_vector_table_neon(cb_table *t)
{
    t->rmsnorm = cb_rmsnorm_neon;
    t->layernorm = cb_layernorm_neon;
    t->silu_mul = cb_silu_mul_neon;
    t->sigmoid = cb_sigmoid_row_neon;
    t->reduce = cb_reduce_neon;
    t->delta = &cb_delta_table_neon;
    t->vector_isa = cb_isa_names[CB_ISA_NEON];
}
