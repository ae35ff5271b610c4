/* repack.c: matrices that lie row after row into tile16. Exact but for scales that are rounded to f16.
 *
 * A row of CB_Q4 has ceil(in/2) bytes, byte k holding q + 8 of input 2k (low nibble) and of input 2k + 1 (high nibble);
 * a row of CB_Q8 has `in` bytes q. Scales are f32 or f16, one a row or one for each `group` inputs of a row, the last
 * group of a row partial. Example: q4 [16, 128], group 64: 16 rows of 64 bytes, 32 scales; as tile16 the same 1,024
 * bytes of weights in another order and 32 scales in f16. */
#include "cbmath.h"
#include "internal.h"

#include <string.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

/* Nearest even; beyond 65504 an infinity, a NaN stays one. */
static uint16_t f32_f16(float f)
{
    uint32_t u = cb_f32_bits(f), sign = u >> 16 & 0x8000u;
    u &= 0x7fffffffu;
    if (u > 0x7f800000u)
        return (uint16_t)(sign | 0x7e00u);
    if (u >= 0x477ff000u) /* from 65520 on */
        return (uint16_t)(sign | 0x7c00u);
    if (u < 0x38800000u) { /* below 2^-14: steps of 2^-24, by the rounding of an addition */
        float magnitude = cb_bits_f32(u) + 0.5f;
        return (uint16_t)(sign | (cb_f32_bits(magnitude) - 0x3f000000u));
    }
    return (uint16_t)(sign | ((u - 0x38000000u + 0xfffu + (u >> 13 & 1u)) >> 13));
}

static float scale_at(const char *scales, int is_f16, int64_t i)
{
    float f;
    uint16_t h;
    if (is_f16) {
        memcpy(&h, scales + 2 * i, 2);
        return cb_f16_f32(h);
    }
    memcpy(&f, scales + 4 * i, 4);
    return f;
}

/* One row of a q4 group: nibbles of neighbours become nibbles of inputs 32 apart. */
static void turn_q4(const uint8_t *restrict src, uint8_t *restrict dst)
{
    for (int m = 0; m < 16; m++) {
        dst[2 * m] = (uint8_t)((src[m] & 15) | (src[m + 16] & 15) << 4);
        dst[2 * m + 1] = (uint8_t)(src[m] >> 4 | (src[m + 16] & 0xf0));
    }
}

static void turn_q8(const uint8_t *restrict src, uint8_t *restrict dst)
{
    for (int k = 0; k < CB_GROUP; k++)
        dst[k] = src[k] ^ 0x80;
}

/* A group's words of one row lie CB_TILE_ROWS words apart. */
static void put_row(const uint8_t *row, int n_words, char *group, int64_t r)
{
    for (int w = 0; w < n_words; w++)
        memcpy(group + ((int64_t)w * CB_TILE_ROWS + r) * 4, row + 4 * w, 4);
}

#ifdef __SSE2__ /* of every x86-64 */
/* Four words of four rows, the rows' words side by side. */
static void put_words(__m128i a, __m128i b, __m128i c, __m128i d, char *to)
{
    __m128i ab = _mm_unpacklo_epi32(a, b), cd = _mm_unpacklo_epi32(c, d);
    __m128i ab2 = _mm_unpackhi_epi32(a, b), cd2 = _mm_unpackhi_epi32(c, d);
    _mm_storeu_si128((__m128i *)to, _mm_unpacklo_epi64(ab, cd));
    _mm_storeu_si128((__m128i *)(to + 4 * CB_TILE_ROWS), _mm_unpackhi_epi64(ab, cd));
    _mm_storeu_si128((__m128i *)(to + 8 * CB_TILE_ROWS), _mm_unpacklo_epi64(ab2, cd2));
    _mm_storeu_si128((__m128i *)(to + 12 * CB_TILE_ROWS), _mm_unpackhi_epi64(ab2, cd2));
}

static __m128i load(const uint8_t *from) { return _mm_loadu_si128((const __m128i *)from); }

/* Whole groups of a block's 16 rows. */
static void turn_block(const uint8_t *src, int64_t row_bytes, int64_t n_groups, bool is_q4, char *to)
{
    const __m128i low = _mm_set1_epi8(15), sign = _mm_set1_epi8((char)0x80);
    int n_bytes = is_q4 ? CB_GROUP / 2 : CB_GROUP;
    for (int64_t g = 0; g < n_groups; g++, src += n_bytes, to += n_bytes * CB_TILE_ROWS)
        for (int r = 0; r < CB_TILE_ROWS; r += 4) {
            __m128i v[4][4];
            for (int i = 0; i < 4; i++) {
                const uint8_t *row = src + (r + i) * row_bytes;
                if (is_q4) {
                    __m128i x = load(row), y = load(row + 16);
                    __m128i even = _mm_or_si128(_mm_and_si128(x, low), _mm_slli_epi16(_mm_and_si128(y, low), 4));
                    __m128i odd = _mm_or_si128(_mm_and_si128(_mm_srli_epi16(x, 4), low), _mm_andnot_si128(low, y));
                    v[i][0] = _mm_unpacklo_epi8(even, odd);
                    v[i][1] = _mm_unpackhi_epi8(even, odd);
                } else {
                    for (int k = 0; k < 4; k++)
                        v[i][k] = _mm_xor_si128(load(row + 16 * k), sign);
                }
            }
            for (int k = 0; k < n_bytes / 16; k++)
                put_words(v[0][k], v[1][k], v[2][k], v[3][k], to + (4 * k * CB_TILE_ROWS + r) * 4);
        }
}
#endif

/* The groups from `first` on of one row, or of one that is padding. */
static void turn_row(const cb_repack_matrix *m, const uint8_t *raw, int64_t o, int64_t first, char *to)
{
    bool is_q4 = m->format == CB_Q4;
    int n_bytes = is_q4 ? CB_GROUP / 2 : CB_GROUP;
    int64_t groups = cb_groups(m->in), row_bytes = is_q4 ? (m->in + 1) / 2 : m->in;
    uint8_t whole[CB_GROUP], turned[CB_GROUP];
    char *block = to + o / CB_TILE_ROWS * CB_TILE_ROWS * groups * n_bytes;
    for (int64_t g = first; g < groups; g++) {
        const uint8_t *src = raw + o * row_bytes + g * n_bytes;
        int64_t left = o < m->out ? row_bytes - g * n_bytes : 0;
        bool ends_in_byte = is_q4 && m->in % 2 && left > 0 && left <= n_bytes;
        if (left < n_bytes || ends_in_byte) { /* the row, or its last group, is padded with q = 0 */
            memset(whole, is_q4 ? 0x88 : 0, sizeof whole);
            memcpy(whole, src, (size_t)left);
            if (ends_in_byte)
                whole[left - 1] = (uint8_t)((whole[left - 1] & 15) | 0x80);
            src = whole;
        }
        if (is_q4)
            turn_q4(src, turned);
        else
            turn_q8(src, turned);
        put_row(turned, n_bytes / 4, block + g * n_bytes * CB_TILE_ROWS, o % CB_TILE_ROWS);
    }
}

static void repack_weights(const cb_repack_matrix *m, const uint8_t *raw, char *to)
{
    int64_t rows = cb_blocks(m->out) * CB_TILE_ROWS;
    for (int64_t begin = 0; begin < rows; begin += CB_TILE_ROWS) {
        int64_t n_whole = 0;
#ifdef __SSE2__
        if (begin + CB_TILE_ROWS <= m->out) {
            bool is_q4 = m->format == CB_Q4;
            int n_bytes = is_q4 ? CB_GROUP / 2 : CB_GROUP;
            int64_t row_bytes = is_q4 ? (m->in + 1) / 2 : m->in;
            n_whole = m->in / CB_GROUP;
            turn_block(raw + begin * row_bytes, row_bytes, n_whole, is_q4, to + begin * cb_groups(m->in) * n_bytes);
        }
#endif
        for (int64_t o = begin; o < begin + CB_TILE_ROWS; o++)
            turn_row(m, raw, o, n_whole, to);
    }
}

/* Those of a row, f32: into every CB_TILE_ROWS-th place, `n_each` groups of 64 alike. False: one has no f16. */
static bool round_scales(const cb_repack_matrix *m, const char *row, int64_t n_each, int64_t groups, char *to)
{
    uint32_t worst = 0;
    for (int64_t g = 0, i = 0; g < groups; i++) {
        uint16_t h = f32_f16(scale_at(row, m->is_f16, i));
        worst |= (h & 0x7c00u) == 0x7c00u;
        for (int64_t end = g + n_each < groups ? g + n_each : groups; g < end; g++)
            memcpy(to + g * CB_TILE_ROWS * 2, &h, 2);
    }
    return !worst;
}

static int repack_scales(const cb_repack_matrix *m, const char *raw, char *to)
{
    int64_t groups = cb_groups(m->in), per_row = m->group ? CB_CEIL(m->in, m->group) : 1;
    int64_t n_each = m->group ? m->group / CB_GROUP : groups, row_bytes = per_row * (m->is_f16 ? 2 : 4);
    int64_t rows = cb_blocks(m->out) * CB_TILE_ROWS;
    if (m->format == CB_Q8) {
        for (int64_t o = 0; o < rows; o++) {
            float s = o < m->out ? scale_at(raw, m->is_f16, o) : 0.0f;
            if ((cb_f32_bits(s) & 0x7f800000u) == 0x7f800000u)
                return CB_ENONFINITE;
            memcpy(to + 4 * o, &s, 4);
        }
        return CB_OK;
    }
    for (int64_t o = 0; o < rows; o++) {
        char *first = to + (o / CB_TILE_ROWS * groups * CB_TILE_ROWS + o % CB_TILE_ROWS) * 2;
        if (o < m->out) {
            if (!round_scales(m, raw + o * row_bytes, n_each, groups, first))
                return CB_ENONFINITE;
        } else {
            for (int64_t g = 0; g < groups; g++)
                memset(first + g * CB_TILE_ROWS * 2, 0, 2);
        }
    }
    return CB_OK;
}

bool cb_is_repackable(const cb_repack_matrix *m)
{
    bool is_grouped = m->format == CB_Q4 && m->group > 0 && m->group % CB_GROUP == 0;
    return (m->format == CB_Q4 || m->format == CB_Q8) && (m->group == 0 || is_grouped) && m->out > 0 && m->in > 0 &&
           m->out <= INT32_MAX && m->in <= INT32_MAX && m->weight_from >= 0 && m->scale_from >= 0 &&
           m->weight_to >= 0 && m->scale_to >= 0;
}

int cb_repack(const cb_repack_matrix *matrices, int64_t n, const void *raw, void *record)
{
    if (n < 0 || (n > 0 && (!matrices || !raw || !record)))
        return CB_EINVAL;
    for (const cb_repack_matrix *m = matrices; m < matrices + n; m++)
        if (!cb_is_repackable(m))
            return CB_EINVAL;
    for (const cb_repack_matrix *m = matrices; m < matrices + n; m++) {
        repack_weights(m, (const uint8_t *)raw + m->weight_from, (char *)record + m->weight_to);
        int status = repack_scales(m, (const char *)raw + m->scale_from, (char *)record + m->scale_to);
        if (status != CB_OK)
            return status;
    }
    return CB_OK;
}
