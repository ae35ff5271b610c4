/* inner.c: what stands between an expert's projections. SiLU and sigmoid are the rungs' own; what is around them is single
 * f32 operations in the order written here, hence the same bits on every rung.
 *
 *   CLAMPED  g = min(g, L); u = max(-L, min(u, L)); silu(g) * u
 *   SWIGLU   clamped alike; silu(1.702 g) * (u + 1), times 1 / 1.702
 *   GELU     y = g + 0.044715 * g * g * g, left to right; (g * sigmoid(2 sqrt(2 / pi) * y)) * u
 */
#include "internal.h"

#define ALPHA 1.702f
#define PER_ALPHA ((float)(1.0 / 1.702))
#define TWO_ROOT_2_PI 1.5957691216057308f
#define PIECE 256

static void add_bias(const float *bias, int64_t n, float *x)
{
    for (int64_t i = 0; i < n; i++)
        x[i] = x[i] + bias[i];
}

/* NaN stays: it fails both comparisons. */
static void clamp(float limit, int64_t n, float *g, float *u)
{
    for (int64_t i = 0; i < n; i++) {
        g[i] = g[i] > limit ? limit : g[i];
        u[i] = u[i] > limit ? limit : u[i] < -limit ? -limit : u[i];
    }
}

static void swiglu(int64_t n, float *g, float *u)
{
    for (int64_t i = 0; i < n; i++) {
        g[i] = ALPHA * g[i];
        u[i] = u[i] + 1.0f;
    }
    cb_kernels.silu_mul(g, u, n, g);
    for (int64_t i = 0; i < n; i++)
        g[i] = g[i] * PER_ALPHA;
}

static void gelu(int64_t n, float *g, const float *u)
{
    float s[PIECE];
    for (int64_t at = 0; at < n; at += PIECE) {
        int64_t m = CB_MIN(PIECE, n - at);
        for (int64_t i = 0; i < m; i++) {
            float x = g[at + i];
            s[i] = TWO_ROOT_2_PI * (x + 0.044715f * x * x * x);
        }
        cb_kernels.sigmoid(s, m, s);
        for (int64_t i = 0; i < m; i++)
            g[at + i] = g[at + i] * s[i] * u[at + i];
    }
}

void cb_inner(const cb_ffn *ffn, int64_t at, int64_t n, float *g, float *u)
{
    if (ffn->gate_bias)
        add_bias(ffn->gate_bias + at, n, g);
    if (ffn->up_bias)
        add_bias(ffn->up_bias + at, n, u);
    if (ffn->function == CB_INNER_CLAMPED || ffn->function == CB_INNER_SWIGLU)
        clamp(ffn->limit, n, g, u);
    if (ffn->function == CB_INNER_SWIGLU)
        swiglu(n, g, u);
    else if (ffn->function == CB_INNER_GELU)
        gelu(n, g, u);
    else
        cb_kernels.silu_mul(g, u, n, g);
}
