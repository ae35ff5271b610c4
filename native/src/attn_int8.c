/* attn_int8.c: the int8 cache: rounding an entry, bringing entries and queries to where the inner loops read them. */
#include "attn.h"
#include "cbmath.h"

#include <string.h>

/* Per group m = max |x|; s = m / 127 rounded to bf16; q = clamp(rint(x * (1 / s)), -127, 127). A NaN or an infinity makes s a NaN
 * and q 0; so does, with s = 0, an m too small for 1 / s. */
void cb_int8_store_row(void *cache, int64_t width, int64_t block, int64_t offset, const float *src)
{
    uint8_t *row = cb_int8_row(cache, width, block, offset);
    uint16_t *scales = cb_int8_scales(cache, width, block, offset);
    for (int64_t g = 0; g < cb_groups(width); g++) {
        int64_t begin = g * CB_GROUP, end = CB_MIN(begin + CB_GROUP, width);
        uint32_t m = 0;
        for (int64_t k = begin; k < end; k++)
            m = CB_MAX(m, cb_f32_bits(src[k]) & 0x7fffffffu);
        uint16_t scale = cb_f32_bf16(cb_bits_f32(m) / 127.0f);
        float inverse = scale ? 1.0f / cb_bf16_f32(scale) : 0.0f;
        bool finite = m < 0x7f800000u, usable = finite && cb_f32_bits(inverse) < 0x7f800000u;
        scales[g] = usable ? scale : finite ? 0 : 0x7fc0;
        for (int64_t k = begin; k < end; k++) {
            float v = usable ? src[k] * inverse : 0.0f;
            v = v < -127.0f ? -127.0f : v > 127.0f ? 127.0f : v;
            row[k] = (uint8_t)((int32_t)(v + CB_ROUND_MAGIC - CB_ROUND_MAGIC) + 128);
        }
    }
}

cb_int8_keys cb_int8_room(int64_t width, void *room)
{
    int64_t padded = cb_groups(width) * CB_GROUP;
    return (cb_int8_keys){room, padded, (const float *)((const char *)room + CB_KV_BLOCK * padded), NULL};
}

static void widen_scales(const uint16_t *src, int64_t n, float *dst)
{
    for (int64_t i = 0; i < n; i++)
        dst[i] = cb_bf16_f32(src[i]);
}

void cb_int8_take_row(const void *cache, int64_t width, int64_t block, int64_t offset, int64_t i, void *room)
{
    cb_int8_keys k = cb_int8_room(width, room);
    uint8_t *to = (uint8_t *)room + i * k.ldq;
    memcpy(to, cb_int8_row(cache, width, block, offset), (size_t)width);
    memset(to + width, 128, (size_t)(k.ldq - width));
    widen_scales(cb_int8_scales(cache, width, block, offset), cb_groups(width), (float *)k.scale + i * cb_groups(width));
}

cb_int8_keys cb_int8_block_rows(const void *cache, int64_t width, int64_t block, int64_t n, void *room)
{
    cb_int8_keys k = cb_int8_room(width, room);
    if (width % CB_GROUP == 0) {
        k.q = cb_int8_row(cache, width, block, 0);
        widen_scales(cb_int8_scales(cache, width, block, 0), n * cb_groups(width), (float *)k.scale);
        return k;
    }
    for (int64_t i = 0; i < n; i++)
        cb_int8_take_row(cache, width, block, i, i, room);
    return k;
}

cb_int8_query cb_int8_query_in(float *floats, int64_t lanes, int64_t ng)
{
    float *scale = floats + ng * (CB_GROUP / 4) * lanes;
    return (cb_int8_query){(int8_t *)floats, scale, (int32_t *)(scale + ng * lanes)};
}

void cb_int8_set_query(const cb_int8_query *q, int64_t j, const float *x, int64_t n, float *work)
{
    int64_t ng = cb_groups(n);
    float *scale = work;
    int32_t *sum = (int32_t *)(work + ng);
    int8_t *quads = (int8_t *)(work + 3 * ng);
    if (x)
        cb_kernels.quantise(x, n, quads, scale, sum);
    else
        memset(work, 0, (size_t)(ng * (3 * 4 + CB_GROUP)));
    for (int64_t g = 0; g < ng; g++) {
        int64_t at = (j / CB_LANES * ng + g) * CB_LANES;
        int8_t *to = q->q + at * CB_GROUP + j % CB_LANES * 4;
        for (int64_t k = 0; k < CB_GROUP / 4; k++)
            memcpy(to + k * CB_LANES * 4, quads + g * CB_GROUP + k * 4, 4);
        q->scale[at + j % CB_LANES] = scale[g];
        q->shift[at + j % CB_LANES] = 128 * (sum[2 * g] + sum[2 * g + 1]);
    }
}
