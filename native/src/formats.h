/* formats.h: facts about the weight formats, as constants where a kernel's FORMAT is one. */
#ifndef CB_FORMATS_H
#define CB_FORMATS_H

#include "internal.h"

/* A scale for each half of a group: 32 inputs. */
#define CB_HAS_HALVES(format) ((format) == CB_Q8G32 || (format) == CB_Q4G32 || (format) == CB_MXFP4)
/* Two codes a byte, the two halves of a group. */
#define CB_IS_NIBBLES(format) ((format) == CB_Q4 || (format) == CB_Q4G32 || (format) == CB_MXFP4)
#define CB_HAS_CODES(format) (CB_IS_NIBBLES(format) || (format) == CB_Q8 || (format) == CB_Q8G32)
/* What makes codes unsigned: they are stored so, or (mxfp4) looked up so. */
#define CB_OFFSET(format) ((format) == CB_MXFP4 ? 12 : CB_IS_NIBBLES(format) ? 8 : 128)
/* Of a row block's group of 64 inputs. */
#define CB_GROUP_BYTES(format) (CB_IS_NIBBLES(format) ? 512 : CB_HAS_CODES(format) ? 1024 : (format) == CB_BF16 ? 2048 : 4096)
#define CB_GROUP_SCALE_BYTES(format)                                                                                   \
    ((format) == CB_Q4 || (format) == CB_MXFP4 ? 32 : (format) == CB_Q8G32 || (format) == CB_Q4G32 ? 64 : 0)

/* Row block b's weights and scales. A format without codes is not padded to groups. */
static inline const uint8_t *cb_block_weights(const cb_matrix *m, int64_t b)
{
    int64_t bytes = CB_GROUP_BYTES(m->format);
    return (const uint8_t *)m->weight + (CB_HAS_CODES(m->format) ? b * cb_groups(m->in) * bytes : b * m->in * (bytes / 64));
}
static inline const uint8_t *cb_block_scales(const cb_matrix *m, int64_t b)
{
    return (const uint8_t *)m->scale + b * cb_groups(m->in) * CB_GROUP_SCALE_BYTES(m->format);
}

/* Twice the value of each E2M1 code. */
extern const int8_t cb_fp4_twice[16];

#endif
