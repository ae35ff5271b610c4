/* linear_avx512.c: linear_ref.c with a whole row block, 16 outputs, in one register. The arithmetic per lane and the
 * reasoning about ranges are those of linear_avx2.c; there is no 512-bit vpsignb, so q8 negates under a mask. */
#include "weights_512.h"

/* ---- int8 activations -------------------------------------------------------------------------------------- */

CB_INLINE __m512i broadcast_dword(const int8_t *q)
{
    int32_t v;
    __builtin_memcpy(&v, q, 4);
    return _mm512_set1_epi32(v);
}

/* d[r][half]: the exact sums of a group's halves. Of mxfp4, u8 codes up to 24: i16 holds 16 products of them, not 32. */
CB_INLINE void multiply_nibbles(const int FORMAT, const int R, const uint8_t *w, const cb_tile_rows *rows, int64_t g,
                                __m512i table, __m512i d[8][2])
{
    const __m512i ones = _mm512_set1_epi16(1);
    const int RUN = FORMAT == CB_MXFP4 ? 4 : 8; /* quads between two additions in i32 */
    for (int r = 0; r < R; r++)
        for (int half = 0; half < 2; half++)
            d[r][half] = _mm512_set1_epi32(-CB_OFFSET(FORMAT) * rows->sum[r][2 * g + half]);
#pragma GCC unroll 2
    for (int run = 0; run < 8; run += RUN) {
        __m512i lo[8], hi[8];
        for (int r = 0; r < R; r++)
            lo[r] = hi[r] = _mm512_setzero_si512();
#pragma GCC unroll 8
        for (int kq = run; kq < run + RUN; kq++) {
            __m512i v = _mm512_loadu_si512(w + kq * 64);
            __m512i v0 = cb_nibbles(FORMAT, v, false, table), v1 = cb_nibbles(FORMAT, v, true, table);
            for (int r = 0; r < R; r++) {
                const int8_t *q = rows->q[r] + g * 64 + kq * 4;
                lo[r] = _mm512_add_epi16(lo[r], _mm512_maddubs_epi16(v0, broadcast_dword(q)));
                hi[r] = _mm512_add_epi16(hi[r], _mm512_maddubs_epi16(v1, broadcast_dword(q + 32)));
                CB_IN_ORDER(lo[r]);
                CB_IN_ORDER(hi[r]);
            }
        }
        for (int r = 0; r < R; r++) {
            d[r][0] = _mm512_add_epi32(d[r][0], _mm512_madd_epi16(lo[r], ones));
            d[r][1] = _mm512_add_epi32(d[r][1], _mm512_madd_epi16(hi[r], ones));
        }
    }
}

CB_INLINE void multiply_bytes(const int R, const uint8_t *w, const cb_tile_rows *rows, int64_t g, __m512i d[8][2])
{
    const __m512i sign = _mm512_set1_epi8((char)0x80), ones = _mm512_set1_epi16(1), zero = _mm512_setzero_si512();
    for (int half = 0; half < 2; half++) {
        for (int r = 0; r < R; r++)
            d[r][half] = zero;
#pragma GCC unroll 4
        for (int kq = half * 8; kq < half * 8 + 8; kq++) {
            __m512i v = _mm512_xor_si512(_mm512_loadu_si512(w + kq * 64), sign);
            __mmask64 negative = _mm512_movepi8_mask(v);
            __m512i magnitude = _mm512_abs_epi8(v);
            for (int r = 0; r < R; r++) {
                __m512i q = broadcast_dword(rows->q[r] + g * 64 + kq * 4);
                q = _mm512_mask_sub_epi8(q, negative, zero, q);
                d[r][half] = _mm512_add_epi32(d[r][half], _mm512_madd_epi16(_mm512_maddubs_epi16(magnitude, q), ones));
                CB_IN_ORDER(d[r][half]);
            }
        }
    }
}

CB_INLINE void tile_q8(const int FORMAT, const int R, const cb_matrix *m, int64_t b, const cb_tile_rows *rows, float *out)
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
        if (CB_IS_NIBBLES(FORMAT))
            multiply_nibbles(FORMAT, R, w, rows, g, table, d);
        else
            multiply_bytes(R, w, rows, g, d);
        __m512 s0 = FORMAT == CB_Q8 ? _mm512_set1_ps(1.0f) : cb_group_scales(FORMAT, s, 0);
        __m512 s1 = CB_HAS_HALVES(FORMAT) ? cb_group_scales(FORMAT, s, 1) : s0;
        for (int r = 0; r < R; r++) {
            __m512 a = _mm512_set1_ps(rows->scale[r][g]), a0 = FORMAT == CB_Q8 ? a : _mm512_mul_ps(s0, a);
            if (CB_HAS_HALVES(FORMAT)) {
                acc[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(d[r][0]), a0, acc[r]);
                acc[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(d[r][1]), _mm512_mul_ps(s1, a), acc[r]);
            } else {
                acc[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(_mm512_add_epi32(d[r][0], d[r][1])), a0, acc[r]);
            }
        }
    }
    for (int r = 0; r < R; r++) {
        if (FORMAT == CB_Q8)
            acc[r] = _mm512_mul_ps(acc[r], _mm512_loadu_ps((const float *)m->scale + b * 16));
        _mm512_storeu_ps(out + r * 16, acc[r]);
    }
}

/* ---- f32 activations --------------------------------------------------------------------------------------- */

/* The 16 weights of input k of a group (or of input k mod 4 of a quad, for the packed formats) that starts at w. */
CB_INLINE __m512 widen(const int FORMAT, const uint8_t *w, int k, const bool HIGH, __m512i table)
{
    if (FORMAT == CB_F32)
        return _mm512_loadu_ps((const float *)w + k * 16);
    if (FORMAT == CB_BF16) {
        __m256i h = _mm256_loadu_si256((const __m256i *)((const uint16_t *)w + k * 16));
        return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16));
    }
    __m512i v = _mm512_loadu_si512(w);
    if (FORMAT == CB_MXFP4) { /* byte k of the values to the top, then down with its sign */
        v = cb_nibbles(FORMAT, v, HIGH, table);
        return _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(v, (unsigned)(24 - 8 * k)), 24));
    }
    if (!CB_IS_NIBBLES(FORMAT)) {
        v = _mm512_xor_si512(v, _mm512_set1_epi8((char)0x80));
        return _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(v, (unsigned)(24 - 8 * k)), 24));
    }
    v = _mm512_xor_si512(v, _mm512_set1_epi8((char)0x88));
    return _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(v, (unsigned)((HIGH ? 24 : 28) - 8 * k)), 28));
}

/* p[g][r] += chains over inputs begin .. end-1 of G neighbouring groups, which lie in one half where codes are nibbles. */
CB_INLINE void chains(const int FORMAT, const int G, const int R, const bool HIGH, const uint8_t *w,
                      const cb_tile_rows *rows, int64_t x0, int begin, int end, __m512 p[8][8])
{
    const bool packed = CB_HAS_CODES(FORMAT), nibbles = CB_IS_NIBBLES(FORMAT);
    const int quad_bytes = CB_GROUP_BYTES(FORMAT) / (nibbles ? 8 : 16); /* of four inputs, of nibbles four and four */
    const __m512i table = FORMAT == CB_MXFP4 ? cb_fp4_table(0) : _mm512_setzero_si512();
    for (int k4 = begin; k4 < end; k4 += 4) {
        const int quad = (k4 - (HIGH && nibbles ? 32 : 0)) / 4;
        for (int g = 0; g < G && !(HIGH && nibbles); g++) /* line by line between the products: a burst of them waits for itself */
            cb_tile_prefetch(w + g * CB_GROUP_BYTES(FORMAT) + quad * quad_bytes, quad_bytes, G * CB_GROUP_BYTES(FORMAT));
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) {
            if (k4 + j >= end)
                break;
#pragma GCC unroll 8
            for (int g = 0; g < G; g++) {
                const uint8_t *from = w + g * CB_GROUP_BYTES(FORMAT);
                __m512 v = packed ? widen(FORMAT, from + quad * 64, j, HIGH, table)
                                  : widen(FORMAT, from, k4 + j, false, table);
#pragma GCC unroll 8
                for (int r = 0; r < R; r++)
                    p[g][r] = _mm512_fmadd_ps(v, _mm512_set1_ps(rows->x[r][x0 + g * 64 + k4 + j]), p[g][r]);
            }
        }
    }
}

CB_INLINE void groups_f32(const int FORMAT, const int G, const int R, const uint8_t *w, const uint8_t *s,
                          const cb_tile_rows *rows, int64_t x0, int n, __m512 acc[8])
{
    __m512 p[2][8][8]; /* [half]: where these have scales of their own */
    for (int half = 0; half < (CB_HAS_HALVES(FORMAT) ? 2 : 1); half++)
        for (int g = 0; g < G; g++)
            for (int r = 0; r < R; r++)
                p[half][g][r] = _mm512_setzero_ps();
    if (CB_HAS_HALVES(FORMAT) || CB_IS_NIBBLES(FORMAT)) {
        chains(FORMAT, G, R, false, w, rows, x0, 0, CB_MIN(n, 32), p[0]);
        chains(FORMAT, G, R, true, w, rows, x0, 32, n, p[CB_HAS_HALVES(FORMAT)]);
    } else {
        chains(FORMAT, G, R, false, w, rows, x0, 0, n, p[0]);
    }
    for (int g = 0; g < G; g++) {
        const uint8_t *of_group = s + g * CB_GROUP_SCALE_BYTES(FORMAT);
        for (int half = 0; half < (CB_HAS_HALVES(FORMAT) ? 2 : 1); half++) {
            __m512 scale = CB_GROUP_SCALE_BYTES(FORMAT) ? cb_group_scales(FORMAT, of_group, half) : _mm512_setzero_ps();
            for (int r = 0; r < R; r++)
                acc[r] = CB_GROUP_SCALE_BYTES(FORMAT) ? _mm512_fmadd_ps(p[half][g][r], scale, acc[r])
                                                      : _mm512_add_ps(acc[r], p[half][g][r]);
        }
    }
}

CB_INLINE void tile_f32(const int FORMAT, const int R, const cb_matrix *m, int64_t b, const cb_tile_rows *rows,
                        float *out)
{
    const int G = R == 1 ? 4 : R <= 4 ? 2 : 1; /* four chains at least */
    const int64_t stride = CB_GROUP_BYTES(FORMAT), scale_stride = CB_GROUP_SCALE_BYTES(FORMAT), ng = cb_groups(m->in);
    const uint8_t *w = (const uint8_t *)m->weight + (CB_HAS_CODES(FORMAT) ? b * ng * stride : b * m->in * (stride / 64));
    const uint8_t *s = scale_stride ? (const uint8_t *)m->scale + b * ng * scale_stride : w;
    __m512 acc[8];
    for (int r = 0; r < R; r++)
        acc[r] = _mm512_setzero_ps();
    int64_t k = 0;
    for (; k + 64 * G <= m->in; k += 64 * G, w += stride * G, s += scale_stride * G)
        groups_f32(FORMAT, G, R, w, s, rows, k, 64, acc);
    for (; k < m->in; k += 64, w += stride, s += scale_stride)
        groups_f32(FORMAT, 1, R, w, s, rows, k, (int)CB_MIN(64, m->in - k), acc);
    for (int r = 0; r < R; r++) {
        __m512 y = acc[r];
        if (FORMAT == CB_Q8)
            y = _mm512_mul_ps(y, _mm512_loadu_ps((const float *)m->scale + b * 16));
        _mm512_storeu_ps(out + r * 16, y);
    }
}

#define KERNEL(name, format, act, max_rows)                                                                                CB_INLINE void tile_##name##_##act(const int R, const cb_matrix *m, int64_t b, const cb_tile_rows *rows, float *out)      {                                                                                                                          tile_##act(format, R, m, b, rows, out);                                                                            }                                                                                                                      CB_TILE_KERNEL(cb_linear_##name##_##act##_avx512, max_rows, tile_##name##_##act)
KERNEL(f32, CB_F32, f32, 4)
KERNEL(bf16, CB_BF16, f32, 4)
KERNEL(q8, CB_Q8, f32, 4)
KERNEL(q4, CB_Q4, f32, 4)
KERNEL(q8g32, CB_Q8G32, f32, 1) /* with f32 activations in tests alone: row by row will do */
KERNEL(q4g32, CB_Q4G32, f32, 1)
KERNEL(mxfp4, CB_MXFP4, f32, 1)
KERNEL(q8, CB_Q8, q8, 8)
KERNEL(q4, CB_Q4, q8, 8)
KERNEL(q8g32, CB_Q8G32, q8, 8)
KERNEL(q4g32, CB_Q4G32, q8, 8)
KERNEL(mxfp4, CB_MXFP4, q8, 8)

/* Quantising a row is a small share of any call: the AVX2 version stays. */
void cb_linear_table_avx512(cb_table *t)
{
    t->linear[CB_F32][CB_ACT_F32] = cb_linear_f32_f32_avx512;
    t->linear[CB_BF16][CB_ACT_F32] = cb_linear_bf16_f32_avx512;
    t->linear[CB_Q8][CB_ACT_F32] = cb_linear_q8_f32_avx512;
    t->linear[CB_Q4][CB_ACT_F32] = cb_linear_q4_f32_avx512;
    t->linear[CB_Q8G32][CB_ACT_F32] = cb_linear_q8g32_f32_avx512;
    t->linear[CB_Q4G32][CB_ACT_F32] = cb_linear_q4g32_f32_avx512;
    t->linear[CB_MXFP4][CB_ACT_F32] = cb_linear_mxfp4_f32_avx512;
    t->linear[CB_Q8][CB_ACT_Q8] = cb_linear_q8_q8_avx512;
    t->linear[CB_Q4][CB_ACT_Q8] = cb_linear_q4_q8_avx512;
    t->linear[CB_Q8G32][CB_ACT_Q8] = cb_linear_q8g32_q8_avx512;
    t->linear[CB_Q4G32][CB_ACT_Q8] = cb_linear_q4g32_q8_avx512;
    t->linear[CB_MXFP4][CB_ACT_Q8] = cb_linear_mxfp4_q8_avx512;
    for (int format = CB_F32; format < CB_N_FORMATS; format++)
        for (int act = CB_ACT_F32; act <= CB_ACT_Q8; act++)
            if (t->linear[format][act])
                t->linear_isa[format][act] = cb_isa_names[CB_ISA_AVX512];
}
