/* linear_avx512vnni.c: int8 activations with vpdpbusd, which adds four u8 * s8 products to an i32 lane exactly.
 * Weights come with an offset (q + 8, q + 12, q + 128), so offset * sum(xq) goes off per group. */
#include "weights_512.h"

CB_INLINE __m512i broadcast_dword(const int8_t *q)
{
    int32_t v;
    __builtin_memcpy(&v, q, 4);
    return _mm512_set1_epi32(v);
}

/* One group: the exact sums of its halves, each a chain of its own since vpdpbusd takes five cycles. */
CB_INLINE void multiply_group(const int FORMAT, const int R, const uint8_t *w, const cb_tile_rows *rows, int64_t g,
                              __m512i table, __m512i d[8][2])
{
    for (int r = 0; r < R; r++)
        for (int half = 0; half < 2; half++)
            d[r][half] = _mm512_set1_epi32(-CB_OFFSET(FORMAT) * rows->sum[r][2 * g + half]);
#pragma GCC unroll 8
    for (int kq = 0; kq < 8; kq++) {
        __m512i v0, v1;
        if (CB_IS_NIBBLES(FORMAT)) {
            __m512i v = _mm512_loadu_si512(w + kq * 64);
            v0 = cb_nibbles(FORMAT, v, false, table);
            v1 = cb_nibbles(FORMAT, v, true, table);
        } else {
            v0 = _mm512_loadu_si512(w + kq * 64);
            v1 = _mm512_loadu_si512(w + 512 + kq * 64);
        }
        for (int r = 0; r < R; r++) {
            const int8_t *q = rows->q[r] + g * 64 + kq * 4;
            d[r][0] = _mm512_dpbusd_epi32(d[r][0], v0, broadcast_dword(q));
            d[r][1] = _mm512_dpbusd_epi32(d[r][1], v1, broadcast_dword(q + 32));
        }
    }
}

CB_INLINE void tile(const int FORMAT, const int R, const cb_matrix *m, int64_t b, const cb_tile_rows *rows, float *out)
{
    int64_t ng = cb_groups(m->in);
    const int BYTES = CB_GROUP_BYTES(FORMAT);
    const uint8_t *w = (const uint8_t *)m->weight + b * ng * BYTES;
    const uint8_t *s = (const uint8_t *)m->scale + b * ng * CB_GROUP_SCALE_BYTES(FORMAT);
    const __m512i table = FORMAT == CB_MXFP4 ? cb_fp4_table(CB_OFFSET(FORMAT)) : _mm512_setzero_si512();
    __m512 acc[8];
    for (int r = 0; r < R; r++)
        acc[r] = _mm512_setzero_ps();
    for (int64_t g = 0; g < ng; g++, w += BYTES, s += CB_GROUP_SCALE_BYTES(FORMAT)) {
        cb_tile_prefetch(w, BYTES, BYTES);
        __m512i d[8][2];
        multiply_group(FORMAT, R, w, rows, g, table, d);
        if (CB_HAS_HALVES(FORMAT)) {
            __m512 s0 = cb_group_scales(FORMAT, s, 0), s1 = cb_group_scales(FORMAT, s, 1);
            for (int r = 0; r < R; r++) {
                __m512 a = _mm512_set1_ps(rows->scale[r][g]);
                acc[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(d[r][0]), _mm512_mul_ps(s0, a), acc[r]);
                acc[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(d[r][1]), _mm512_mul_ps(s1, a), acc[r]);
            }
        } else {
            __m512 scale = FORMAT == CB_Q4 ? cb_group_scales(FORMAT, s, 0) : _mm512_setzero_ps();
            for (int r = 0; r < R; r++) {
                __m512 sum = _mm512_cvtepi32_ps(_mm512_add_epi32(d[r][0], d[r][1])), a = _mm512_set1_ps(rows->scale[r][g]);
                acc[r] = _mm512_fmadd_ps(sum, FORMAT == CB_Q4 ? _mm512_mul_ps(scale, a) : a, acc[r]);
            }
        }
    }
    for (int r = 0; r < R; r++) {
        if (FORMAT == CB_Q8)
            acc[r] = _mm512_mul_ps(acc[r], _mm512_loadu_ps((const float *)m->scale + b * 16));
        _mm512_storeu_ps(out + r * 16, acc[r]);
    }
}

#define KERNEL(name, format)                                                                                           \
    CB_INLINE void tile_##name(const int R, const cb_matrix *m, int64_t b, const cb_tile_rows *rows, float *out)        \
    {                                                                                                                  \
        tile(format, R, m, b, rows, out);                                                                              \
    }                                                                                                                  \
    CB_TILE_KERNEL(cb_linear_##name##_q8_avx512vnni, 8, tile_##name)
KERNEL(q8, CB_Q8)
KERNEL(q4, CB_Q4)
KERNEL(q8g32, CB_Q8G32)
KERNEL(q4g32, CB_Q4G32)
KERNEL(mxfp4, CB_MXFP4)

void cb_linear_table_avx512vnni(cb_table *t)
{
    t->linear[CB_Q8][CB_ACT_Q8] = cb_linear_q8_q8_avx512vnni;
    t->linear[CB_Q4][CB_ACT_Q8] = cb_linear_q4_q8_avx512vnni;
    t->linear[CB_Q8G32][CB_ACT_Q8] = cb_linear_q8g32_q8_avx512vnni;
    t->linear[CB_Q4G32][CB_ACT_Q8] = cb_linear_q4g32_q8_avx512vnni;
    t->linear[CB_MXFP4][CB_ACT_Q8] = cb_linear_mxfp4_q8_avx512vnni;
    for (int format = CB_F32; format < CB_N_FORMATS; format++)
        if (t->linear[format][CB_ACT_Q8])
            t->linear_isa[format][CB_ACT_Q8] = cb_isa_names[CB_ISA_AVX512VNNI];
}
