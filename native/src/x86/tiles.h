/* tiles.h: what the linear kernels of every x86 rung share: the walk over rows and row blocks, and the store.
 *
 * A kernel is a `tile`: R rows times one row block of 16 outputs over all inputs, its 16 * R sums into acc. Rows are
 * taken in chunks whose activations stay in the second-level cache while the blocks pass; within a chunk a block's
 * weights come from memory once. */
#ifndef CB_TILES_H
#define CB_TILES_H

#include "../internal.h"

#include <immintrin.h>

#define CB_INLINE static inline __attribute__((always_inline))
#define CB_CHUNK_ROWS 32

/* Without this the compiler turns a row of exact integer sums into a tree and runs out of registers. */
#ifndef CB_IN_ORDER
#define CB_IN_ORDER(v) __asm__("" : "+v"(v))
#endif

/* Weights come from memory once for all rows of a chunk. A kernel that is about to use BYTES at w asks for the lines that it
 * uses a little later, ahead of the hardware's own prefetcher, which stops at page borders: between a tenth and a half of the
 * time. SPAN: bytes that are in use at one time. The distance: 1024 is enough for Zen 3, Sapphire Rapids gains a tenth from
 * being asked earlier, and at a multiple of 4096 the lines asked for displace those in use. Beyond the matrix it is harmless:
 * a prefetch does not fault. */
CB_INLINE void cb_tile_prefetch(const uint8_t *w, const int BYTES, const int SPAN)
{
    const int AHEAD = CB_MAX(6144, SPAN);
    for (int i = 0; i < BYTES; i += 64)
        _mm_prefetch((const char *)w + AHEAD + i, _MM_HINT_T0);
}

/* Sources of up to 8 rows. */
typedef struct {
    const float *x[8];
    const int8_t *q[8];
    const float *scale[8];
    const int32_t *sum[8];
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

/* Scalar on purpose: 16 values per block and row, which the compiler turns into vectors of the file's width. */
CB_INLINE void cb_tile_store(const cb_matrix *m, const cb_rows *rows, int64_t r0, int n, int64_t b, const float *acc,
                             float *y, int64_t ldy, bool add)
{
    int64_t columns = CB_MIN(16, m->out - b * 16);
    for (int r = 0; r < n; r++) {
        float *out = y + (rows->out_index ? rows->out_index[r0 + r] : r0 + r) * ldy + b * 16;
        const float *from = acc + r * 16;
        if (columns == 16 && !add)
            __builtin_memcpy(out, from, 64);
        else if (add)
            for (int64_t o = 0; o < columns; o++)
                out[o] = out[o] + from[o];
        else
            for (int64_t o = 0; o < columns; o++)
                out[o] = from[o];
    }
}

/* tile(R, m, b, rows, acc): R is a constant in every call, so that each count of rows gets its own unrolled body. */
typedef void (*cb_tile_fn)(const int R, const cb_matrix *m, int64_t b, const cb_tile_rows *rows, float *acc);

CB_INLINE void cb_tile_walk(const int MAX_ROWS, cb_tile_fn tile, const cb_matrix *m, const cb_rows *rows, int64_t b0,
                            int64_t b1, float *y, int64_t ldy, bool add)
{
    for (int64_t c = 0; c < rows->n_rows; c += CB_CHUNK_ROWS) {
        int64_t end = CB_MIN(c + CB_CHUNK_ROWS, rows->n_rows);
        for (int64_t b = b0; b < b1; b++) {
            for (int64_t r0 = c; r0 < end; r0 += MAX_ROWS) {
                int n = (int)CB_MIN(MAX_ROWS, end - r0);
                cb_tile_rows t;
                _Alignas(64) float acc[8 * 16];
                cb_tile_gather(m, rows, r0, n, &t);
                switch (n) {
                case 1: tile(1, m, b, &t, acc); break;
                case 2: if (MAX_ROWS > 1) tile(2, m, b, &t, acc); break;
                case 3: if (MAX_ROWS > 2) tile(3, m, b, &t, acc); break;
                case 4: if (MAX_ROWS > 2) tile(4, m, b, &t, acc); break;
                case 5: if (MAX_ROWS > 4) tile(5, m, b, &t, acc); break;
                case 6: if (MAX_ROWS > 4) tile(6, m, b, &t, acc); break;
                case 7: if (MAX_ROWS > 4) tile(7, m, b, &t, acc); break;
                case 8: if (MAX_ROWS > 4) tile(8, m, b, &t, acc); break;
                }
                cb_tile_store(m, rows, r0, n, b, acc, y, ldy, add);
            }
        }
    }
}

#define CB_TILE_KERNEL(name, max_rows, tile)                                                                           \
    static void name(const cb_matrix *m, const cb_rows *rows, int64_t b0, int64_t b1, float *y, int64_t ldy, bool add)  \
    {                                                                                                                  \
        cb_tile_walk(max_rows, tile, m, rows, b0, b1, y, ldy, add);                                                    \
    }

#endif
