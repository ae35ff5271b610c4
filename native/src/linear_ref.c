/* linear_ref.c: the definition of y = x W^T for every weight format and activation.
 *
 * Shapes      x [T, in], W [out, in] packed as tile16 (colibri.h), y [T, out].
 * Definition  for t, o:  acc = 0
 *                        for each group of 64 inputs, ascending:
 *                            f32 activations:  p = 0; for k in group, ascending: p = fma(w[o][k], x[t][k], p)
 *                                              acc = acc + p            (f32, bf16, q8: q8 times its row scale at the end)
 *                                              acc = fma(p, s_g, acc)   (q4)
 *                            int8 activations: d = sum of q[o][k] * xq[t][k], exact
 *                                              acc = fma((f32)d, a_g, acc)        (q8, times its row scale at the end)
 *                                              acc = fma((f32)d, s_g * a_g, acc)  (q4)
 *                        y[t][o] = acc   (or y[t][o] + acc)
 * Regularities  one row is the usual case (decode); out and in need not be multiples of 16 and 64, though nearly all are.
 * Example     a GLM expert's gate: out 2048, in 6144, q4: 128 row blocks of 96 groups of 512 bytes, and 96 x 16 scales.
 */
#include "cbmath.h"
#include "internal.h"

/* Exact value of weight (row of the block, input k). */
static float weight_f32(const void *w, int64_t in, int64_t b, int row, int64_t k)
{
    return ((const float *)w)[(b * in + k) * 16 + row];
}

static float weight_bf16(const void *w, int64_t in, int64_t b, int row, int64_t k)
{
    return cb_bf16_f32(((const uint16_t *)w)[(b * in + k) * 16 + row]);
}

static int weight_q8(const void *w, int64_t in, int64_t b, int row, int64_t k)
{
    int64_t g = b * cb_groups(in) + k / 64, j = k % 64;
    return ((const uint8_t *)w)[g * 1024 + j / 4 * 64 + row * 4 + j % 4] - 128;
}

static int weight_q4(const void *w, int64_t in, int64_t b, int row, int64_t k)
{
    int64_t g = b * cb_groups(in) + k / 64, j = k % 64, i = j % 32;
    int byte = ((const uint8_t *)w)[g * 512 + i / 4 * 64 + row * 4 + i % 4];
    return (j < 32 ? byte & 15 : byte >> 4) - 8;
}

static float scale_q4(const void *s, int64_t in, int64_t b, int row, int64_t g)
{
    return cb_f16_f32(((const uint16_t *)s)[(b * cb_groups(in) + g) * 16 + row]);
}

typedef float (*output_fn)(const cb_matrix *m, const cb_rows *rows, int64_t source, int64_t b, int row);

static void over_outputs(const cb_matrix *m, const cb_rows *rows, int64_t b0, int64_t b1, float *y, int64_t ldy, bool add,
                         output_fn output)
{
    for (int64_t r = 0; r < rows->n_rows; r++) {
        int64_t source = rows->in_index ? rows->in_index[r] : r;
        float *row_out = y + (rows->out_index ? rows->out_index[r] : r) * ldy;
        for (int64_t o = b0 * 16; o < CB_MIN(b1 * 16, m->out); o++) {
            float value = output(m, rows, source, o / 16, (int)(o % 16));
            row_out[o] = add ? row_out[o] + value : value;
        }
    }
}

static float output_f32(const cb_matrix *m, const cb_rows *rows, int64_t source, int64_t b, int row)
{
    const float *x = rows->x + source * rows->ldx;
    float acc = 0;
    for (int64_t g = 0; g < cb_groups(m->in); g++) {
        float p = 0;
        for (int64_t k = g * 64; k < CB_MIN(g * 64 + 64, m->in); k++)
            p = fmaf(weight_f32(m->weight, m->in, b, row, k), x[k], p);
        acc = acc + p;
    }
    return acc;
}

static float output_bf16(const cb_matrix *m, const cb_rows *rows, int64_t source, int64_t b, int row)
{
    const float *x = rows->x + source * rows->ldx;
    float acc = 0;
    for (int64_t g = 0; g < cb_groups(m->in); g++) {
        float p = 0;
        for (int64_t k = g * 64; k < CB_MIN(g * 64 + 64, m->in); k++)
            p = fmaf(weight_bf16(m->weight, m->in, b, row, k), x[k], p);
        acc = acc + p;
    }
    return acc;
}

static float output_q8_f32(const cb_matrix *m, const cb_rows *rows, int64_t source, int64_t b, int row)
{
    const float *x = rows->x + source * rows->ldx;
    float acc = 0;
    for (int64_t g = 0; g < cb_groups(m->in); g++) {
        float p = 0;
        for (int64_t k = g * 64; k < CB_MIN(g * 64 + 64, m->in); k++)
            p = fmaf((float)weight_q8(m->weight, m->in, b, row, k), x[k], p);
        acc = acc + p;
    }
    return acc * ((const float *)m->scale)[b * 16 + row];
}

static float output_q4_f32(const cb_matrix *m, const cb_rows *rows, int64_t source, int64_t b, int row)
{
    const float *x = rows->x + source * rows->ldx;
    float acc = 0;
    for (int64_t g = 0; g < cb_groups(m->in); g++) {
        float p = 0;
        for (int64_t k = g * 64; k < CB_MIN(g * 64 + 64, m->in); k++)
            p = fmaf((float)weight_q4(m->weight, m->in, b, row, k), x[k], p);
        acc = fmaf(p, scale_q4(m->scale, m->in, b, row, g), acc);
    }
    return acc;
}

static float output_q8_q8(const cb_matrix *m, const cb_rows *rows, int64_t source, int64_t b, int row)
{
    int64_t ng = cb_groups(m->in);
    const int8_t *x = rows->q + source * ng * 64;
    float acc = 0;
    for (int64_t g = 0; g < ng; g++) {
        int32_t d = 0;
        for (int64_t k = g * 64; k < CB_MIN(g * 64 + 64, m->in); k++)
            d += weight_q8(m->weight, m->in, b, row, k) * x[k];
        acc = fmaf((float)d, rows->scale[source * ng + g], acc);
    }
    return acc * ((const float *)m->scale)[b * 16 + row];
}

static float output_q4_q8(const cb_matrix *m, const cb_rows *rows, int64_t source, int64_t b, int row)
{
    int64_t ng = cb_groups(m->in);
    const int8_t *x = rows->q + source * ng * 64;
    float acc = 0;
    for (int64_t g = 0; g < ng; g++) {
        int32_t d = 0;
        for (int64_t k = g * 64; k < CB_MIN(g * 64 + 64, m->in); k++)
            d += weight_q4(m->weight, m->in, b, row, k) * x[k];
        float scale = scale_q4(m->scale, m->in, b, row, g) * rows->scale[source * ng + g];
        acc = fmaf((float)d, scale, acc);
    }
    return acc;
}

#define LINEAR(name)                                                                                                   \
    static void cb_linear_##name##_ref(const cb_matrix *m, const cb_rows *rows, int64_t b0, int64_t b1, float *y,      \
                                       int64_t ldy, bool add)                                                          \
    {                                                                                                                  \
        over_outputs(m, rows, b0, b1, y, ldy, add, output_##name);                                                     \
    }
LINEAR(f32)
LINEAR(bf16)
LINEAR(q8_f32)
LINEAR(q4_f32)
LINEAR(q8_q8)
LINEAR(q4_q8)

/* Activations of one row, in groups of 64: m = max |x|, scale = m / 127, q = clamp(rint(x * (127 / m)), -127, 127).
 * Magnitudes are compared as bit patterns, where a NaN lies above infinity and both above all numbers. */
static void cb_quantise_ref(const float *x, int64_t n, int8_t *q, float *scale, int32_t *sum)
{
    for (int64_t g = 0; g < cb_groups(n); g++) {
        int64_t begin = g * 64, end = CB_MIN(begin + 64, n);
        uint32_t m = 0;
        for (int64_t k = begin; k < end; k++)
            m = CB_MAX(m, cb_f32_bits(x[k]) & 0x7fffffffu);
        float largest = cb_bits_f32(m), inverse = m ? 127.0f / largest : 0.0f;
        bool finite = m < 0x7f800000u, usable = finite && cb_f32_bits(inverse) < 0x7f800000u;
        scale[g] = usable ? largest / 127.0f : finite ? 0.0f : cb_bits_f32(0x7fc00000u);
        sum[g] = 0;
        for (int64_t k = begin; k < begin + 64; k++) {
            float v = usable && k < end ? x[k] * inverse : 0.0f;
            v = v < -127.0f ? -127.0f : v > 127.0f ? 127.0f : v;
            q[k] = (int8_t)(int32_t)(v + CB_ROUND_MAGIC - CB_ROUND_MAGIC);
            sum[g] += q[k];
        }
    }
}

void cb_linear_table_ref(cb_table *t)
{
    t->linear[CB_F32][CB_ACT_F32] = cb_linear_f32_ref;
    t->linear[CB_BF16][CB_ACT_F32] = cb_linear_bf16_ref;
    t->linear[CB_Q8][CB_ACT_F32] = cb_linear_q8_f32_ref;
    t->linear[CB_Q4][CB_ACT_F32] = cb_linear_q4_f32_ref;
    t->linear[CB_Q8][CB_ACT_Q8] = cb_linear_q8_q8_ref;
    t->linear[CB_Q4][CB_ACT_Q8] = cb_linear_q4_q8_ref;
    for (int format = CB_F32; format <= CB_Q4; format++)
        for (int act = CB_ACT_F32; act <= CB_ACT_Q8; act++)
            t->linear_isa[format][act] = t->linear[format][act] ? cb_isa_names[CB_ISA_REF] : NULL;
    t->quantise = cb_quantise_ref;
}
