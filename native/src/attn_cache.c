/* attn_cache.c: what a step may ask for, entries of the paged cache as f32 rows, and rope. */
#include "int8.h"
#include "cbmath.h"

#include <string.h>

/* ---- step ------------------------------------------------------------------------------------------------- */

bool cb_is_step_valid(const cb_attn_step *s, int64_t window)
{
    if (s->n_rows < 0 || cb_kv_row_bytes(s->kv_format, 1) < 0)
        return false;
    if (s->n_rows == 0)
        return true;
    if (!s->position || !s->seq || !s->block_table || !s->kv || !s->x || !s->hidden || s->table_stride <= 0)
        return false;
    for (int64_t t = 0; t < s->n_rows; t++) {
        int64_t position = s->position[t];
        if (position < 0 || position / CB_KV_BLOCK >= s->table_stride || s->seq[t] < 0 || s->seq[t] >= s->n_sequences)
            return false;
        /* The row before, when of the same sequence, has vouched for the blocks up to its own position. */
        bool follows = t > 0 && s->seq[t] == s->seq[t - 1];
        if (follows && position <= s->position[t - 1])
            return false;
        int64_t first = follows ? s->position[t - 1] : window > 0 ? CB_MAX(0, position - window + 1) : 0;
        for (int64_t p = first; p / CB_KV_BLOCK <= position / CB_KV_BLOCK; p += CB_KV_BLOCK) {
            int64_t block = cb_kv_block_of(s, t, p);
            if (block < 0 || block >= s->n_blocks)
                return false;
        }
    }
    return true;
}

/* ---- cache ------------------------------------------------------------------------------------------------ */

int64_t cb_kv_row_bytes(int format, int64_t width)
{
    if (width < 1 || width > INT32_MAX)
        return CB_EINVAL;
    switch (format) {
    case CB_KV_F32: return 4 * width;
    case CB_KV_BF16: return 2 * width;
    case CB_KV_INT8: return 4 * cb_quads(width) + 2 * cb_groups(width);
    default: return CB_EINVAL;
    }
}

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

typedef struct {
    const cb_attn_step *step;
    const float *inv_freq;
    int64_t half;
    float amplitude, *cosine, *sine;
} angles_arg;

static void angles_job(void *arg, int64_t begin, int64_t end, int thread)
{
    const angles_arg *a = arg;
    (void)thread;
    for (int64_t t = begin; t < end; t++)
        for (int64_t i = 0; i < a->half; i++) {
            double angle = (double)a->step->position[t] * (double)a->inv_freq[i];
            a->cosine[t * a->half + i] = (float)cos(angle) * a->amplitude;
            a->sine[t * a->half + i] = (float)sin(angle) * a->amplitude;
        }
}

int cb_rope_angles(cb_pool *pool, const cb_attn_step *step, int64_t rope, const float *inv_freq, float amplitude,
                   float **cosine, float **sine)
{
    int64_t n = step->n_rows, half = rope / 2;
    *cosine = cb_scratch(pool, n * half * 4);
    *sine = cb_scratch(pool, n * half * 4);
    if (!*cosine || !*sine)
        return CB_ENOMEM;
    angles_arg job = {step, inv_freq, half, amplitude, *cosine, *sine};
    cb_parallel_for(pool, n, 8, angles_job, &job);
    return CB_OK;
}
