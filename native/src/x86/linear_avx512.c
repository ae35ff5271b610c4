/* linear_avx512.c: linear_ref.c with a whole row block, 16 outputs, in one register. The arithmetic per lane and the
 * reasoning about ranges are those of linear_avx2.c; there is no 512-bit vpsignb, so q8 negates under a mask. */
#include "tiles.h"

/* ---- int8 activations -------------------------------------------------------------------------------------- */

CB_INLINE __m512i broadcast_dword(const int8_t *q)
{
    int32_t v;
    __builtin_memcpy(&v, q, 4);
    return _mm512_set1_epi32(v);
}

CB_INLINE void tile_q4_q8(const int R, const cb_matrix *m, int64_t b, const cb_tile_rows *rows, float *out)
{
    int64_t ng = cb_groups(m->in);
    const uint8_t *w = (const uint8_t *)m->weight + b * ng * 512;
    const uint16_t *s = (const uint16_t *)m->scale + b * ng * 16;
    const __m512i nibble = _mm512_set1_epi8(15), ones = _mm512_set1_epi16(1);
    __m512 acc[8];
    for (int r = 0; r < R; r++)
        acc[r] = _mm512_setzero_ps();
    for (int64_t g = 0; g < ng; g++, w += 512, s += 16) {
        cb_tile_prefetch(w, 512, 512);
        __m512i lo[8], hi[8];
        for (int r = 0; r < R; r++)
            lo[r] = hi[r] = _mm512_setzero_si512();
#pragma GCC unroll 8
        for (int kq = 0; kq < 8; kq++) {
            __m512i v = _mm512_loadu_si512(w + kq * 64);
            __m512i v0 = _mm512_and_si512(v, nibble), v1 = _mm512_and_si512(_mm512_srli_epi16(v, 4), nibble);
            for (int r = 0; r < R; r++) {
                const int8_t *q = rows->q[r] + g * 64 + kq * 4;
                lo[r] = _mm512_add_epi16(lo[r], _mm512_maddubs_epi16(v0, broadcast_dword(q)));
                hi[r] = _mm512_add_epi16(hi[r], _mm512_maddubs_epi16(v1, broadcast_dword(q + 32)));
                CB_IN_ORDER(lo[r]);
                CB_IN_ORDER(hi[r]);
            }
        }
        __m512 scale = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)s));
        for (int r = 0; r < R; r++) {
            __m512i d = _mm512_add_epi32(_mm512_madd_epi16(lo[r], ones), _mm512_madd_epi16(hi[r], ones));
            d = _mm512_sub_epi32(d, _mm512_set1_epi32(8 * rows->sum[r][g]));
            __m512 both = _mm512_mul_ps(scale, _mm512_set1_ps(rows->scale[r][g]));
            acc[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(d), both, acc[r]);
        }
    }
    for (int r = 0; r < R; r++)
        _mm512_storeu_ps(out + r * 16, acc[r]);
}

CB_INLINE void tile_q8_q8(const int R, const cb_matrix *m, int64_t b, const cb_tile_rows *rows, float *out)
{
    int64_t ng = cb_groups(m->in);
    const uint8_t *w = (const uint8_t *)m->weight + b * ng * 1024;
    const __m512i sign = _mm512_set1_epi8((char)0x80), ones = _mm512_set1_epi16(1), zero = _mm512_setzero_si512();
    __m512 acc[8];
    for (int r = 0; r < R; r++)
        acc[r] = _mm512_setzero_ps();
    for (int64_t g = 0; g < ng; g++, w += 1024) {
        cb_tile_prefetch(w, 1024, 1024);
        __m512i d[8];
        for (int r = 0; r < R; r++)
            d[r] = zero;
#pragma GCC unroll 4
        for (int kq = 0; kq < 16; kq++) {
            __m512i v = _mm512_xor_si512(_mm512_loadu_si512(w + kq * 64), sign);
            __mmask64 negative = _mm512_movepi8_mask(v);
            __m512i magnitude = _mm512_abs_epi8(v);
            for (int r = 0; r < R; r++) {
                __m512i q = broadcast_dword(rows->q[r] + g * 64 + kq * 4);
                q = _mm512_mask_sub_epi8(q, negative, zero, q);
                d[r] = _mm512_add_epi32(d[r], _mm512_madd_epi16(_mm512_maddubs_epi16(magnitude, q), ones));
                CB_IN_ORDER(d[r]);
            }
        }
        for (int r = 0; r < R; r++)
            acc[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(d[r]), _mm512_set1_ps(rows->scale[r][g]), acc[r]);
    }
    __m512 s = _mm512_loadu_ps((const float *)m->scale + b * 16);
    for (int r = 0; r < R; r++)
        _mm512_storeu_ps(out + r * 16, _mm512_mul_ps(acc[r], s));
}

/* ---- f32 activations --------------------------------------------------------------------------------------- */

/* The 16 weights of input k of a group (or of input k mod 4 of a quad, for the packed formats) that starts at w. */
CB_INLINE __m512 widen(const int FORMAT, const uint8_t *w, int k, const bool HIGH)
{
    if (FORMAT == CB_F32)
        return _mm512_loadu_ps((const float *)w + k * 16);
    if (FORMAT == CB_BF16) {
        __m256i h = _mm256_loadu_si256((const __m256i *)((const uint16_t *)w + k * 16));
        return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16));
    }
    __m512i v = _mm512_loadu_si512(w);
    if (FORMAT == CB_Q8) {
        v = _mm512_xor_si512(v, _mm512_set1_epi8((char)0x80));
        return _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(v, (unsigned)(24 - 8 * k)), 24));
    }
    v = _mm512_xor_si512(v, _mm512_set1_epi8((char)0x88));
    return _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(v, (unsigned)((HIGH ? 24 : 28) - 8 * k)), 28));
}

CB_INLINE int64_t group_bytes(const int FORMAT)
{
    return FORMAT == CB_F32 ? 64 * 64 : FORMAT == CB_BF16 ? 64 * 32 : FORMAT == CB_Q8 ? 1024 : 512;
}

/* p[g][r] += chains over inputs begin .. end-1 of G neighbouring groups; HIGH: inputs 32.. of q4, in the high nibbles. */
CB_INLINE void chains(const int FORMAT, const int G, const int R, const bool HIGH, const uint8_t *w,
                      const cb_tile_rows *rows, int64_t x0, int begin, int end, __m512 p[8][8])
{
    const bool packed = FORMAT == CB_Q8 || FORMAT == CB_Q4;
    const int quad_bytes = (int)group_bytes(FORMAT) / (FORMAT == CB_Q4 ? 8 : 16); /* of four inputs, of q4 four and four */
    for (int k4 = begin; k4 < end; k4 += 4) {
        for (int g = 0; g < G && !HIGH; g++) /* line by line between the products: a burst of them waits for itself */
            cb_tile_prefetch(w + g * group_bytes(FORMAT) + k4 / 4 * quad_bytes, quad_bytes,
                             G * (int)group_bytes(FORMAT));
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) {
            if (k4 + j >= end)
                break;
#pragma GCC unroll 8
            for (int g = 0; g < G; g++) {
                const uint8_t *from = w + g * group_bytes(FORMAT);
                __m512 v = packed ? widen(FORMAT, from + (k4 - (HIGH ? 32 : 0)) * 16, j, HIGH)
                                  : widen(FORMAT, from, k4 + j, false);
#pragma GCC unroll 8
                for (int r = 0; r < R; r++)
                    p[g][r] = _mm512_fmadd_ps(v, _mm512_set1_ps(rows->x[r][x0 + g * 64 + k4 + j]), p[g][r]);
            }
        }
    }
}

CB_INLINE void groups_f32(const int FORMAT, const int G, const int R, const uint8_t *w, const uint16_t *s,
                          const cb_tile_rows *rows, int64_t x0, int n, __m512 acc[8])
{
    __m512 p[8][8];
    for (int g = 0; g < G; g++)
        for (int r = 0; r < R; r++)
            p[g][r] = _mm512_setzero_ps();
    if (FORMAT == CB_Q4) {
        chains(FORMAT, G, R, false, w, rows, x0, 0, CB_MIN(n, 32), p);
        chains(FORMAT, G, R, true, w, rows, x0, 32, n, p);
    } else {
        chains(FORMAT, G, R, false, w, rows, x0, 0, n, p);
    }
    for (int g = 0; g < G; g++) {
        __m512 scale = _mm512_setzero_ps();
        if (FORMAT == CB_Q4)
            scale = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(s + g * 16)));
        for (int r = 0; r < R; r++)
            acc[r] = FORMAT == CB_Q4 ? _mm512_fmadd_ps(p[g][r], scale, acc[r]) : _mm512_add_ps(acc[r], p[g][r]);
    }
}

CB_INLINE void tile_f32(const int FORMAT, const int R, const cb_matrix *m, int64_t b, const cb_tile_rows *rows,
                        float *out)
{
    const int G = R == 1 ? 4 : R <= 4 ? 2 : 1; /* four chains at least */
    const int64_t stride = group_bytes(FORMAT), ng = cb_groups(m->in);
    const bool packed = FORMAT == CB_Q8 || FORMAT == CB_Q4;
    const uint8_t *w = (const uint8_t *)m->weight + (packed ? b * ng * stride : b * m->in * (stride / 64));
    const uint16_t *s = FORMAT == CB_Q4 ? (const uint16_t *)m->scale + b * ng * 16 : NULL;
    __m512 acc[8];
    for (int r = 0; r < R; r++)
        acc[r] = _mm512_setzero_ps();
    int64_t k = 0;
    for (; k + 64 * G <= m->in; k += 64 * G, w += stride * G, s += FORMAT == CB_Q4 ? 16 * G : 0) {
        groups_f32(FORMAT, G, R, w, s, rows, k, 64, acc);
    }
    for (; k < m->in; k += 64, w += stride, s += FORMAT == CB_Q4 ? 16 : 0)
        groups_f32(FORMAT, 1, R, w, s, rows, k, (int)CB_MIN(64, m->in - k), acc);
    for (int r = 0; r < R; r++) {
        __m512 y = acc[r];
        if (FORMAT == CB_Q8)
            y = _mm512_mul_ps(y, _mm512_loadu_ps((const float *)m->scale + b * 16));
        _mm512_storeu_ps(out + r * 16, y);
    }
}

#define F32_TILE(name, format)                                                                                         \
    CB_INLINE void name(const int R, const cb_matrix *m, int64_t b, const cb_tile_rows *rows, float *out)               \
    {                                                                                                                  \
        tile_f32(format, R, m, b, rows, out);                                                                          \
    }
F32_TILE(tile_f32_f32, CB_F32)
F32_TILE(tile_bf16_f32, CB_BF16)
F32_TILE(tile_q8_f32, CB_Q8)
F32_TILE(tile_q4_f32, CB_Q4)

CB_TILE_KERNEL(cb_linear_f32_f32_avx512, 4, tile_f32_f32)
CB_TILE_KERNEL(cb_linear_bf16_f32_avx512, 4, tile_bf16_f32)
CB_TILE_KERNEL(cb_linear_q8_f32_avx512, 4, tile_q8_f32)
CB_TILE_KERNEL(cb_linear_q4_f32_avx512, 4, tile_q4_f32)
CB_TILE_KERNEL(cb_linear_q8_q8_avx512, 8, tile_q8_q8)
CB_TILE_KERNEL(cb_linear_q4_q8_avx512, 8, tile_q4_q8)

/* Quantising a row is a small share of any call: the AVX2 version stays. */
void cb_linear_table_avx512(cb_table *t)
{
    t->linear[CB_F32][CB_ACT_F32] = cb_linear_f32_f32_avx512;
    t->linear[CB_BF16][CB_ACT_F32] = cb_linear_bf16_f32_avx512;
    t->linear[CB_Q8][CB_ACT_F32] = cb_linear_q8_f32_avx512;
    t->linear[CB_Q4][CB_ACT_F32] = cb_linear_q4_f32_avx512;
    t->linear[CB_Q8][CB_ACT_Q8] = cb_linear_q8_q8_avx512;
    t->linear[CB_Q4][CB_ACT_Q8] = cb_linear_q4_q8_avx512;
    for (int format = CB_F32; format <= CB_Q4; format++)
        for (int act = CB_ACT_F32; act <= CB_ACT_Q8; act++)
            if (t->linear[format][act])
                t->linear_isa[format][act] = cb_isa_names[CB_ISA_AVX512];
}
