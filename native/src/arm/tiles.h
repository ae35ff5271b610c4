/* tiles.h: what the linear kernels of the aarch64 rungs share: the walk over rows and row blocks, and the store. A tile is
 * R rows times one row block: 16 outputs, four registers of four lanes. */
#ifndef CB_ARM_TILES_H
#define CB_ARM_TILES_H

#include "../internal.h"

#include <arm_neon.h>

#define CB_INLINE static inline __attribute__((always_inline))
#define CB_CHUNK_ROWS 32 /* their activations stay in the second-level cache while the row blocks pass */
#define CB_TILE_MAX 4    /* rows: four sums each fill half of the 32 registers */

typedef struct {
    const float *x[CB_TILE_MAX];
    const int8_t *q[CB_TILE_MAX];
    const float *scale[CB_TILE_MAX];
    const int32_t *sum[CB_TILE_MAX];
} cb_tile_rows;

CB_INLINE void cb_tile_gather(const cb_matrix *m, const cb_rows *rows, int64_t r0, int n, cb_tile_rows *t)
{
    int64_t ng = cb_groups(m->in);
    for (int r = 0; r < n; r++) {
        int64_t source = rows->in_index ? rows->in_index[r0 + r] : r0 + r;
        if (m->act == CB_ACT_F32) {
            t->x[r] = rows->x + source * rows->ldx;
        } else {
            t->q[r] = rows->q + source * ng * 64;
            t->scale[r] = rows->scale + source * ng;
            t->sum[r] = rows->sum + source * ng * 2;
        }
    }
}

CB_INLINE void cb_tile_store(const cb_matrix *m, const cb_rows *rows, int64_t r0, int n, int64_t b, const float *acc,
                             float *y, int64_t ldy, bool add)
{
    int64_t columns = CB_MIN(16, m->out - b * 16);
    for (int r = 0; r < n; r++) {
        float *out = y + (rows->out_index ? rows->out_index[r0 + r] : r0 + r) * ldy + b * 16;
        for (int64_t o = 0; o < columns; o++)
            out[o] = add ? out[o] + acc[r * 16 + o] : acc[r * 16 + o];
    }
}

/* tile(R, m, b, rows, acc) writes R * 16 sums; R is a constant in every call, so each count gets its own unrolled body. */
typedef void (*cb_tile_fn)(const int R, const cb_matrix *m, int64_t b, const cb_tile_rows *rows, float *acc);

CB_INLINE void cb_tile_walk(const int MAX_ROWS, cb_tile_fn tile, const cb_matrix *m, const cb_rows *rows, int64_t b0, int64_t b1, float *y,
                            int64_t ldy, bool add)
{
    for (int64_t c = 0; c < rows->n_rows; c += CB_CHUNK_ROWS) {
        int64_t end = CB_MIN(c + CB_CHUNK_ROWS, rows->n_rows);
        for (int64_t b = b0; b < b1; b++) {
            for (int64_t r0 = c; r0 < end; r0 += MAX_ROWS) {
                int n = (int)CB_MIN(MAX_ROWS, end - r0);
                cb_tile_rows t;
                float acc[CB_TILE_MAX * 16];
                cb_tile_gather(m, rows, r0, n, &t);
                switch (n) {
                case 1: tile(1, m, b, &t, acc); break;
                case 2: if (MAX_ROWS > 1) tile(2, m, b, &t, acc); break;
                case 3: if (MAX_ROWS > 2) tile(3, m, b, &t, acc); break;
                case 4: if (MAX_ROWS > 2) tile(4, m, b, &t, acc); break;
                }
                cb_tile_store(m, rows, r0, n, b, acc, y, ldy, add);
            }
        }
    }
}

#define CB_TILE_KERNEL(name, max_rows, tile)                                                                                \
    static void name(const cb_matrix *m, const cb_rows *rows, int64_t b0, int64_t b1, float *y, int64_t ldy, bool add)  \
    {                                                                                                                  \
        cb_tile_walk(max_rows, tile, m, rows, b0, b1, y, ldy, add);                                                    \
    }

#endif
