/* attn_cache.c: entries of the paged cache as f32 rows, and rope. */
#include "attn.h"
#include "cbmath.h"

#include <string.h>

/* ---- cache ------------------------------------------------------------------------------------------------ */

const float *cb_block_rows(const void *cache, int format, int64_t width, int64_t reach, int64_t block, int64_t n,
                           float *room, int64_t *ld)
{
    const char *start = (const char *)cache + (size_t)(block * CB_KV_BLOCK * width) * cb_kv_bytes(format);
    if (format == CB_KV_F32 && reach <= width) {
        *ld = width;
        return (const float *)start;
    }
    *ld = cb_lanes(width);
    if (format == CB_KV_BF16 && *ld == width) {
        cb_kernels.attn->widen((const uint16_t *)start, n * width, room);
        return room;
    }
    for (int64_t i = 0; i < n; i++) {
        float *row = room + i * *ld;
        if (format == CB_KV_BF16)
            cb_kernels.attn->widen((const uint16_t *)start + i * width, width, row);
        else
            memcpy(row, (const float *)start + i * width, (size_t)width * sizeof(float));
    }
    return room;
}

void cb_store_row(void *cache, int format, int64_t width, int64_t block, int64_t offset, const float *src)
{
    size_t at = (size_t)((block * CB_KV_BLOCK + offset) * width);
    if (format == CB_KV_BF16) {
        uint16_t *row = (uint16_t *)cache + at;
        for (int64_t i = 0; i < width; i++)
            row[i] = cb_f32_bf16(src[i]);
    } else {
        memcpy((float *)cache + at, src, (size_t)width * sizeof(float));
    }
}

/* ---- rope ------------------------------------------------------------------------------------------------- */

void cb_rope(const float *src, int64_t rope, bool interleave, const float *cosine, const float *sine, float *dst)
{
    float turned[CB_MAX_ROPE];
    int64_t half = rope / 2;
    for (int64_t i = 0; i < half; i++) {
        float u = interleave ? src[2 * i] : src[i];
        float v = interleave ? src[2 * i + 1] : src[half + i];
        turned[i] = fmaf(u, cosine[i], -(v * sine[i]));
        turned[half + i] = fmaf(v, cosine[i], u * sine[i]);
    }
    memcpy(dst, turned, (size_t)rope * sizeof(float));
}
