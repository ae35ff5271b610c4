/* embed.c: rows of the embedding table, widened to f32. */
#include "../include/colibri.h"

#include <string.h>

int cb_embed(const void *table, const float *scale, int format, int64_t vocab, int64_t hidden, const int32_t *ids,
             int64_t n_rows, float *out)
{
    if (!table || vocab <= 0 || hidden <= 0 || n_rows < 0 || (n_rows > 0 && (!ids || !out)))
        return CB_EINVAL;
    if (format != CB_F32 && format != CB_BF16 && !(format == CB_Q8 && scale))
        return CB_EINVAL;
    for (int64_t t = 0; t < n_rows; t++)
        if (ids[t] < 0 || ids[t] >= vocab)
            return CB_EINVAL;

    for (int64_t t = 0; t < n_rows; t++) {
        int64_t first = (int64_t)ids[t] * hidden;
        float *row = out + t * hidden;
        if (format == CB_F32) {
            memcpy(row, (const float *)table + first, (size_t)hidden * sizeof(float));
        } else if (format == CB_BF16) {
            const uint16_t *src = (const uint16_t *)table + first;
            for (int64_t i = 0; i < hidden; i++) {
                uint32_t bits = (uint32_t)src[i] << 16;
                memcpy(&row[i], &bits, 4);
            }
        } else {
            const int8_t *src = (const int8_t *)table + first;
            float s = scale[ids[t]];
            for (int64_t i = 0; i < hidden; i++)
                row[i] = (float)src[i] * s;
        }
    }
    return CB_OK;
}
