/* int8.c: the int8 cache: rounding entries into it, and laying latents out as blocks. */
#include "int8.h"
#include "cbmath.h"

#include <string.h>

/* Per group m = max |x|; s = m / 127 rounded to bf16; q = clamp(rint(x * (1 / s)), -127, 127). A NaN or an infinity makes s a NaN
 * and q 0; so does, with s = 0, an m too small for 1 / s. */
static uint16_t round_group(const float *src, int64_t n, int8_t *q)
{
    uint32_t m = 0;
    for (int64_t k = 0; k < n; k++)
        m = CB_MAX(m, cb_f32_bits(src[k]) & 0x7fffffffu);
    uint16_t scale = cb_f32_bf16(cb_bits_f32(m) / 127.0f);
    float inverse = scale ? 1.0f / cb_bf16_f32(scale) : 0.0f;
    bool finite = m < 0x7f800000u, usable = finite && cb_f32_bits(inverse) < 0x7f800000u;
    for (int64_t k = 0; k < n; k++) {
        float v = usable ? src[k] * inverse : 0.0f;
        v = v < -127.0f ? -127.0f : v > 127.0f ? 127.0f : v;
        q[k] = (int8_t)(v + CB_ROUND_MAGIC - CB_ROUND_MAGIC);
    }
    return usable ? scale : finite ? 0 : 0x7fc0;
}

void cb_int8_store_row(void *block, int64_t width, int64_t offset, const float *src)
{
    uint8_t *row = (uint8_t *)cb_int8_row(block, width, offset);
    uint16_t *scales = (uint16_t *)cb_int8_row_scales(block, width, offset);
    for (int64_t g = 0; g * CB_GROUP < width; g++) {
        int8_t q[CB_GROUP];
        int64_t n = CB_MIN(CB_GROUP, width - g * CB_GROUP);
        scales[g] = round_group(src + g * CB_GROUP, n, q);
        for (int64_t k = 0; k < n; k++)
            row[g * CB_GROUP + k] = (uint8_t)(q[k] + 128);
    }
}

void cb_int8_store_key(uint8_t *keys, uint16_t *scales, int64_t width, int64_t offset, const float *src)
{
    for (int64_t g = 0; g * CB_GROUP < width; g++) {
        int8_t q[CB_GROUP];
        int64_t n = CB_MIN(CB_GROUP, width - g * CB_GROUP);
        scales[g * CB_KV_BLOCK + offset] = round_group(src + g * CB_GROUP, n, q);
        for (int64_t k = 0; k < n; k++)
            keys[((g * (CB_GROUP / 4) + k / 4) * CB_KV_BLOCK + offset) * 4 + k % 4] = (uint8_t)(q[k] + 128);
    }
}

void cb_int8_store_value(int8_t *values, uint16_t *scales, int64_t width, int64_t offset, const float *src)
{
    const int64_t quads = CB_KV_BLOCK / 4;
    int8_t *to = values + offset % quads * cb_quads(width) * 16 + offset / quads;
    for (int64_t g = 0; g * CB_GROUP < width; g++) {
        int8_t q[CB_GROUP];
        int64_t n = CB_MIN(CB_GROUP, width - g * CB_GROUP);
        scales[g * CB_KV_BLOCK + offset] = round_group(src + g * CB_GROUP, n, q);
        for (int64_t k = 0; k < n; k++)
            to[(g * CB_GROUP + k) * 4] = q[k];
    }
}

void cb_int8_widen(const uint16_t *scales, int64_t n, float *to)
{
    for (int64_t i = 0; i < n; i++)
        to[i] = cb_bf16_f32(scales[i]);
}

/* Vectors of the compiler's own: 16 bytes are in every processor's baseline. */
typedef uint8_t bytes __attribute__((vector_size(16)));
typedef uint16_t words __attribute__((vector_size(16)));
typedef uint32_t dwords __attribute__((vector_size(16)));
typedef uint64_t qwords __attribute__((vector_size(16)));

static inline bytes bytes_at(const uint8_t *p)
{
    bytes v;
    memcpy(&v, p, sizeof v);
    return v;
}

static inline void put(void *p, bytes v) { memcpy(p, &v, sizeof v); }

static inline bytes low_bytes(bytes a, bytes b)
{
    return __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
}

static inline bytes high_bytes(bytes a, bytes b)
{
    return __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
}

static inline bytes low_words(bytes a, bytes b)
{
    return (bytes)__builtin_shufflevector((words)a, (words)b, 0, 8, 1, 9, 2, 10, 3, 11);
}

static inline bytes high_words(bytes a, bytes b)
{
    return (bytes)__builtin_shufflevector((words)a, (words)b, 4, 12, 5, 13, 6, 14, 7, 15);
}

static inline bytes low_dwords(bytes a, bytes b)
{
    return (bytes)__builtin_shufflevector((dwords)a, (dwords)b, 0, 4, 1, 5);
}

static inline bytes high_dwords(bytes a, bytes b)
{
    return (bytes)__builtin_shufflevector((dwords)a, (dwords)b, 2, 6, 3, 7);
}

static inline bytes low_qwords(bytes a, bytes b)
{
    return (bytes)__builtin_shufflevector((qwords)a, (qwords)b, 0, 2);
}

static inline bytes high_qwords(bytes a, bytes b)
{
    return (bytes)__builtin_shufflevector((qwords)a, (qwords)b, 1, 3);
}

/* 16 components of 4 rows: 4 quads of each. */
static inline void lay_out_keys(const uint8_t *const *rows, int64_t k, uint8_t *to)
{
    bytes a = bytes_at(rows[0] + k), b = bytes_at(rows[1] + k), c = bytes_at(rows[2] + k), d = bytes_at(rows[3] + k);
    bytes low_ab = low_dwords(a, b), low_cd = low_dwords(c, d), high_ab = high_dwords(a, b), high_cd = high_dwords(c, d);
    bytes quad[4] = {low_qwords(low_ab, low_cd), high_qwords(low_ab, low_cd), low_qwords(high_ab, high_cd),
                     high_qwords(high_ab, high_cd)};
    for (int j = 0; j < 4; j++)
        put(to + j * CB_KV_BLOCK * 4, quad[j]);
}

static inline void lay_out_values(const uint8_t *const *rows, int64_t r, uint8_t *to)
{
    const bytes sign = {128, 128, 128, 128, 128, 128, 128, 128, 128, 128, 128, 128, 128, 128, 128, 128};
    const int64_t apart = CB_KV_BLOCK / 4;
    bytes a = bytes_at(rows[0] + r) ^ sign, b = bytes_at(rows[apart] + r) ^ sign;
    bytes c = bytes_at(rows[2 * apart] + r) ^ sign, d = bytes_at(rows[3 * apart] + r) ^ sign;
    bytes low_ab = low_bytes(a, b), low_cd = low_bytes(c, d), high_ab = high_bytes(a, b), high_cd = high_bytes(c, d);
    put(to, low_words(low_ab, low_cd));
    put(to + 16, high_words(low_ab, low_cd));
    put(to + 32, low_words(high_ab, high_cd));
    put(to + 48, high_words(high_ab, high_cd));
}

const uint8_t *cb_int8_keys_of(const cb_int8_block *b, int64_t group, int64_t quads, uint8_t *room)
{
    if (!b->rows)
        return b->keys + group * CB_INT8_GROUP_BYTES;
    for (int64_t k = 0; k < quads * 4; k += 16)
        for (int64_t i = 0; i < CB_KV_BLOCK; i += 4)
            lay_out_keys(b->rows + i, group * CB_GROUP + k, room + (k / 4 * CB_KV_BLOCK + i) * 4);
    return room;
}

const int8_t *cb_int8_values_of(const cb_int8_block *b, int64_t group, int8_t *room, int64_t *ld)
{
    *ld = b->rows ? CB_GROUP * 4 : b->dim * 4;
    if (!b->rows)
        return b->values + group * CB_GROUP * 4;
    for (int64_t r = 0; r < CB_GROUP; r += 16)
        for (int64_t j = 0; j < CB_KV_BLOCK / 4; j++)
            lay_out_values(b->rows + j, group * CB_GROUP + r, (uint8_t *)room + (j * CB_GROUP + r) * 4);
    return room;
}

void cb_int8_set_query(const cb_int8_queries *q, int64_t j, const float *x)
{
    int64_t ng = cb_groups(q->depth);
    cb_kernels.quantise(x, q->depth, q->q + j * ng * CB_GROUP, q->scale + j * ng, q->sum + 2 * j * ng);
}
