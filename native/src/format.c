/* format.c: the weight formats' names; their sizes follow from formats.h. A new one is a line here, its facts there and an
 * entry of `linear` on each rung that offers it. */
#include "formats.h"

#define PARTS(format) (CB_HAS_HALVES(format) ? 2 : 1)
#define LINE(format, name, row_scale_bytes)                                                                            \
    [format] = {name, CB_GROUP_BYTES(format) * 8 / (CB_GROUP * CB_TILE_ROWS), row_scale_bytes,                          \
                CB_GROUP_SCALE_BYTES(format) / CB_TILE_ROWS / PARTS(format), CB_GROUP / PARTS(format)}

const cb_format cb_formats[CB_N_FORMATS] = {
    LINE(CB_F32, "f32", 0),     LINE(CB_BF16, "bf16", 0),   LINE(CB_Q8, "q8", 4),       LINE(CB_Q4, "q4", 0),
    LINE(CB_Q8G32, "q8g32", 0), LINE(CB_Q4G32, "q4g32", 0), LINE(CB_MXFP4, "mxfp4", 0),
};

const int8_t cb_fp4_twice[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

static const cb_format *find(int format)
{
    return format > CB_NONE && format < CB_N_FORMATS ? &cb_formats[format] : NULL;
}

const char *cb_format_name(int format)
{
    const cb_format *f = find(format);
    return f ? f->name : NULL;
}

int64_t cb_weight_bytes(int format, int64_t out, int64_t in)
{
    const cb_format *f = find(format);
    if (!f || out <= 0 || in <= 0 || out > INT32_MAX || in > INT32_MAX)
        return CB_EINVAL;
    int64_t inputs = cb_has_scales(format) ? cb_groups(in) * CB_GROUP : in;
    return cb_blocks(out) * CB_TILE_ROWS * inputs * f->bits / 8;
}

int64_t cb_scale_bytes(int format, int64_t out, int64_t in)
{
    const cb_format *f = find(format);
    if (!f || out <= 0 || in <= 0 || out > INT32_MAX || in > INT32_MAX)
        return CB_EINVAL;
    return cb_blocks(out) * CB_TILE_ROWS * (f->row_scale_bytes + cb_groups(in) * (CB_GROUP / f->group) * f->group_scale_bytes);
}
