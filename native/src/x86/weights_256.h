/* weights_256.h: bytes of a weight format as codes and scales of 8 outputs, for the rung with 256-bit registers. FORMAT is a
 * constant in every call; `half` names one of the two registers that a row block of 16 outputs is. */
#ifndef CB_WEIGHTS_256_H
#define CB_WEIGHTS_256_H

#include "../formats.h"
#include "tiles.h"

/* By E2M1 code, plus an offset, in each 128 bits. */
CB_INLINE __m256i cb_fp4_table(const int OFFSET)
{
    __m256i table = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)cb_fp4_twice));
    return _mm256_add_epi8(table, _mm256_set1_epi8((char)OFFSET));
}

/* Of 32 bytes with two codes each, those of the first half of the group or of the second: integers plus 8, or what a table says. */
CB_INLINE __m256i cb_nibbles(const int FORMAT, __m256i v, const bool HIGH, __m256i table)
{
    v = _mm256_and_si256(HIGH ? _mm256_srli_epi16(v, 4) : v, _mm256_set1_epi8(15));
    return FORMAT == CB_MXFP4 ? _mm256_shuffle_epi8(table, v) : v;
}

/* The scales of a group, or of one of its two parts; s: the group's. Of mxfp4, half the scale: its codes are twice the values. */
CB_INLINE __m256 cb_group_scales(const int FORMAT, const uint8_t *s, int part, int half)
{
    if (FORMAT != CB_MXFP4)
        return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(s + part * 32 + half * 16)));
    __m256i e = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(s + part * 16 + half * 8)));
    __m256i bits = _mm256_max_epi32(_mm256_slli_epi32(e, 23), _mm256_set1_epi32(0x400000)); /* 0: 2^-127, denormal */
    return _mm256_mul_ps(_mm256_castsi256_ps(bits), _mm256_set1_ps(0.5f));
}

#endif
