/* linear_ref.c: the definition of y = x W^T for every weight format and activation.
 *
 * Shapes      x [T, in], W [out, in] packed as tile16 (colibri.h), y [T, out].
 * Definition  for t, o:  acc = 0
 *                        for each group of G inputs, ascending (G = 64; 32 in formats with a scale for each half):
 *                            f32 activations:  p = 0; for k in group, ascending: p = fma(w[o][k], x[t][k], p)
 *                                              acc = acc + p            (f32, bf16, q8: q8 times its row scale at the end)
 *                                              acc = fma(p, s_g, acc)   (formats with a scale per group)
 *                            int8 activations: d = sum of q[o][k] * xq[t][k], exact
 *                                              acc = fma((f32)d, a_g, acc)        (q8, times its row scale at the end)
 *                                              acc = fma((f32)d, s_g * a_g, acc)  (formats with a scale per group)
 *                        y[t][o] = acc   (or y[t][o] + acc)
 *             a_g is the activations' scale of the 64 inputs around. Inputs are padded to 64: halves that hold none count as any
 *             other. Of mxfp4, q is twice the value, an integer, and s_g = 2^(e - 128) half the scale.
 * Regularities  one row is the usual case (decode); out and in need not be multiples of 16 and 64, though nearly all are.
 * Example     a GLM expert's gate: out 2048, in 6144, q4: 128 row blocks of 96 groups of 512 bytes, and 96 x 16 scales.
 */
#include "cbmath.h"
#include "formats.h"

/* Exact value of weight (row of the block, input k). */
static float weight_f32(const void *w, int64_t in, int64_t b, int row, int64_t k)
{
    return ((const float *)w)[(b * in + k) * 16 + row];
}

static float weight_bf16(const void *w, int64_t in, int64_t b, int row, int64_t k)
{
    return cb_bf16_f32(((const uint16_t *)w)[(b * in + k) * 16 + row]);
}

/* Code of weight (row of the block, input k) of a format with scales, as the integer that it stands for. */
static int code(const cb_matrix *m, int64_t b, int row, int64_t k)
{
    const uint8_t *w = m->weight;
    int64_t g = b * cb_groups(m->in) + k / 64, j = k % 64, i = j % 32;
    if (cb_formats[m->format].bits == 8)
        return w[g * 1024 + j / 4 * 64 + row * 4 + j % 4] - 128;
    int byte = w[g * 512 + i / 4 * 64 + row * 4 + i % 4], nibble = j < 32 ? byte & 15 : byte >> 4;
    return m->format == CB_MXFP4 ? cb_fp4_twice[nibble] : nibble - 8;
}

/* Scale of group g, of the format's own size. */
static float group_scale(const cb_matrix *m, int64_t b, int row, int64_t g)
{
    int64_t at = (b * cb_groups(m->in) * (64 / cb_formats[m->format].group) + g) * 16 + row;
    if (m->format != CB_MXFP4)
        return cb_f16_f32(((const uint16_t *)m->scale)[at]);
    uint32_t e = ((const uint8_t *)m->scale)[at]; /* 0: 2^-127, denormal */
    return cb_bits_f32(e ? e << 23 : 0x400000u) * 0.5f;
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

/* Formats with scales: one per row, or one per group. */
static float output_scaled_f32(const cb_matrix *m, const cb_rows *rows, int64_t source, int64_t b, int row)
{
    const float *x = rows->x + source * rows->ldx;
    const int64_t size = cb_formats[m->format].group;
    const bool has_row_scale = cb_formats[m->format].row_scale_bytes;
    float acc = 0;
    for (int64_t g = 0; g < cb_groups(m->in) * (64 / size); g++) {
        float p = 0;
        for (int64_t k = g * size; k < CB_MIN(g * size + size, m->in); k++)
            p = fmaf((float)code(m, b, row, k), x[k], p);
        acc = has_row_scale ? acc + p : fmaf(p, group_scale(m, b, row, g), acc);
    }
    return has_row_scale ? acc * ((const float *)m->scale)[b * 16 + row] : acc;
}

static float output_scaled_q8(const cb_matrix *m, const cb_rows *rows, int64_t source, int64_t b, int row)
{
    const int64_t ng = cb_groups(m->in), size = cb_formats[m->format].group;
    const bool has_row_scale = cb_formats[m->format].row_scale_bytes;
    const int8_t *x = rows->q + source * ng * 64;
    float acc = 0;
    for (int64_t g = 0; g < ng * (64 / size); g++) {
        int32_t d = 0;
        for (int64_t k = g * size; k < CB_MIN(g * size + size, m->in); k++)
            d += code(m, b, row, k) * x[k];
        float scale = rows->scale[source * ng + g * size / 64];
        acc = fmaf((float)d, has_row_scale ? scale : group_scale(m, b, row, g) * scale, acc);
    }
    return has_row_scale ? acc * ((const float *)m->scale)[b * 16 + row] : acc;
}

#define LINEAR(name)                                                                                                   \
    static void cb_linear_##name##_ref(const cb_matrix *m, const cb_rows *rows, int64_t b0, int64_t b1, float *y,      \
                                       int64_t ldy, bool add)                                                          \
    {                                                                                                                  \
        over_outputs(m, rows, b0, b1, y, ldy, add, output_##name);                                                     \
    }
LINEAR(f32)
LINEAR(bf16)
LINEAR(scaled_f32)
LINEAR(scaled_q8)

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
        sum[2 * g] = sum[2 * g + 1] = 0;
        for (int64_t k = begin; k < begin + 64; k++) {
            float v = usable && k < end ? x[k] * inverse : 0.0f;
            v = v < -127.0f ? -127.0f : v > 127.0f ? 127.0f : v;
            q[k] = (int8_t)(int32_t)(v + CB_ROUND_MAGIC - CB_ROUND_MAGIC);
            sum[k / 32] += q[k];
        }
    }
}

void cb_linear_table_ref(cb_table *t)
{
    t->linear[CB_F32][CB_ACT_F32] = cb_linear_f32_ref;
    t->linear[CB_BF16][CB_ACT_F32] = cb_linear_bf16_ref;
    for (int format = CB_F32; format < CB_N_FORMATS; format++) {
        if (cb_has_scales(format)) {
            t->linear[format][CB_ACT_F32] = cb_linear_scaled_f32_ref;
            t->linear[format][CB_ACT_Q8] = cb_linear_scaled_q8_ref;
        }
        for (int act = CB_ACT_F32; act <= CB_ACT_Q8; act++)
            t->linear_isa[format][act] = t->linear[format][act] ? cb_isa_names[CB_ISA_REF] : NULL;
    }
    t->quantise = cb_quantise_ref;
}
