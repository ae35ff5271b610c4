/* linear_avx512vnni.c: int8 activations with vpdpbusd, which adds four u8 * s8 products to an i32 lane exactly.
 * Weights are stored with an offset (q + 8, q + 128), so offset * sum(xq) goes off per group. */
#include "tiles.h"

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
    const __m512i nibble = _mm512_set1_epi8(15);
    __m512 acc[8];
    for (int r = 0; r < R; r++)
        acc[r] = _mm512_setzero_ps();
    for (int64_t g = 0; g < ng; g++, w += 512, s += 16) {
        cb_tile_prefetch(w, 512, 512);
        __m512i lo[8], hi[8];
        for (int r = 0; r < R; r++) {
            lo[r] = _mm512_set1_epi32(-8 * rows->sum[r][g]);
            hi[r] = _mm512_setzero_si512();
        }
#pragma GCC unroll 8
        for (int kq = 0; kq < 8; kq++) {
            __m512i v = _mm512_loadu_si512(w + kq * 64);
            __m512i v0 = _mm512_and_si512(v, nibble), v1 = _mm512_and_si512(_mm512_srli_epi16(v, 4), nibble);
            for (int r = 0; r < R; r++) {
                const int8_t *q = rows->q[r] + g * 64 + kq * 4;
                lo[r] = _mm512_dpbusd_epi32(lo[r], v0, broadcast_dword(q));
                hi[r] = _mm512_dpbusd_epi32(hi[r], v1, broadcast_dword(q + 32));
            }
        }
        __m512 scale = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)s));
        for (int r = 0; r < R; r++) {
            __m512 both = _mm512_mul_ps(scale, _mm512_set1_ps(rows->scale[r][g]));
            acc[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(_mm512_add_epi32(lo[r], hi[r])), both, acc[r]);
        }
    }
    for (int r = 0; r < R; r++)
        _mm512_storeu_ps(out + r * 16, acc[r]);
}

CB_INLINE void tile_q8_q8(const int R, const cb_matrix *m, int64_t b, const cb_tile_rows *rows, float *out)
{
    int64_t ng = cb_groups(m->in);
    const uint8_t *w = (const uint8_t *)m->weight + b * ng * 1024;
    __m512 acc[8];
    for (int r = 0; r < R; r++)
        acc[r] = _mm512_setzero_ps();
    for (int64_t g = 0; g < ng; g++, w += 1024) {
        cb_tile_prefetch(w, 1024, 1024);
        __m512i d[8][2]; /* two chains per row: vpdpbusd takes five cycles */
        for (int r = 0; r < R; r++) {
            d[r][0] = _mm512_set1_epi32(-128 * rows->sum[r][g]);
            d[r][1] = _mm512_setzero_si512();
        }
#pragma GCC unroll 4
        for (int kq = 0; kq < 16; kq += 2) {
            __m512i v0 = _mm512_loadu_si512(w + kq * 64), v1 = _mm512_loadu_si512(w + kq * 64 + 64);
            for (int r = 0; r < R; r++) {
                const int8_t *q = rows->q[r] + g * 64 + kq * 4;
                d[r][0] = _mm512_dpbusd_epi32(d[r][0], v0, broadcast_dword(q));
                d[r][1] = _mm512_dpbusd_epi32(d[r][1], v1, broadcast_dword(q + 4));
            }
        }
        for (int r = 0; r < R; r++) {
            __m512 sum = _mm512_cvtepi32_ps(_mm512_add_epi32(d[r][0], d[r][1]));
            acc[r] = _mm512_fmadd_ps(sum, _mm512_set1_ps(rows->scale[r][g]), acc[r]);
        }
    }
    __m512 s = _mm512_loadu_ps((const float *)m->scale + b * 16);
    for (int r = 0; r < R; r++)
        _mm512_storeu_ps(out + r * 16, _mm512_mul_ps(acc[r], s));
}

CB_TILE_KERNEL(cb_linear_q8_q8_avx512vnni, 8, tile_q8_q8)
CB_TILE_KERNEL(cb_linear_q4_q8_avx512vnni, 8, tile_q4_q8)

void cb_linear_table_avx512vnni(cb_table *t)
{
    t->linear[CB_Q8][CB_ACT_Q8] = cb_linear_q8_q8_avx512vnni;
    t->linear[CB_Q4][CB_ACT_Q8] = cb_linear_q4_q8_avx512vnni;
    t->linear_isa[CB_Q8][CB_ACT_Q8] = t->linear_isa[CB_Q4][CB_ACT_Q8] = cb_isa_names[CB_ISA_AVX512VNNI];
}
