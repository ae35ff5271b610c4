/* weights_512.h: bytes of a weight format as codes and scales of 16 outputs, for the rungs with 512-bit registers. FORMAT is a
 * constant in every call. */
#ifndef CB_WEIGHTS_512_H
#define CB_WEIGHTS_512_H

#include "../formats.h"
#include "tiles.h"

/* By E2M1 code, plus an offset, in each 128 bits. */
CB_INLINE __m512i cb_fp4_table(const int OFFSET)
{
    __m512i table = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)cb_fp4_twice));
    return _mm512_add_epi8(table, _mm512_set1_epi8((char)OFFSET));
}

/* Of 64 bytes with two codes each, those of the first half of the group or of the second: integers plus 8, or what a table says. */
CB_INLINE __m512i cb_nibbles(const int FORMAT, __m512i v, const bool HIGH, __m512i table)
{
    v = _mm512_and_si512(HIGH ? _mm512_srli_epi16(v, 4) : v, _mm512_set1_epi8(15));
    return FORMAT == CB_MXFP4 ? _mm512_shuffle_epi8(table, v) : v;
}

/* The scales of a group, or of half of it; s: the group's. Of mxfp4, half the scale: its codes are twice the values. */
CB_INLINE __m512 cb_group_scales(const int FORMAT, const uint8_t *s, const int HALF)
{
    if (FORMAT != CB_MXFP4)
        return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(s + HALF * 32)));
    __m512i e = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(s + HALF * 16)));
    __m512i bits = _mm512_max_epi32(_mm512_slli_epi32(e, 23), _mm512_set1_epi32(0x400000)); /* 0: 2^-127, denormal */
    return _mm512_mul_ps(_mm512_castsi512_ps(bits), _mm512_set1_ps(0.5f));
}

#endif
