/* attn.h: inner loops of attention and indexer, and the pieces their drivers share.
 *
 * "Lanes" are heads, padded to a multiple of 16; a lane's value never meets another lane's. All pointers may be
 * unaligned unless said otherwise; strides are in floats. Sizes: GLM-5.2 has depth 576 (512 + 64), 64 heads.
 */
#ifndef CB_ATTN_H
#define CB_ATTN_H

#include "internal.h"

#define CB_LANES 16
#define CB_MAX_ROPE 512
/* Entries are read once per task, and the hardware's prefetcher stops at page borders: asking this many values ahead took
 * a fifth off the widening of a block (Zen 3). Beyond the cache it is harmless: a prefetch does not fault. */
#define CB_WIDEN_AHEAD 1024

typedef struct cb_attn_table {
    /* bf16 -> f32, exact. */
    void (*widen)(const uint16_t *src, int64_t n, float *dst);

    /* out f32[n, lanes]: out[i][h] = 0; for k ascending: out[i][h] = fma(q_t[k][h], keys[i][k], out[i][h]).
     * q_t f32[lanes / 16][depth][16], keys f32[n, depth] with row stride ldk, n <= CB_KV_BLOCK. */
    void (*scores)(const float *q_t, int64_t lanes, int64_t depth, const float *keys, int64_t ldk, int64_t n,
                   float *out);

    /* One block of scores f32[n, lanes] becomes p = exp(s - block maximum), in place; m, l f32[lanes] move on and
     * f, g f32[lanes] get the factors that join this block to what came before (first: m, l are the block's own and
     * g = exp(0) = 1). n >= 1. */
    void (*softmax)(float *s, int64_t lanes, int64_t n, bool first, float *m, float *l, float *f, float *g);

    /* zb = 0; for i ascending: zb = fma(p[i][h], keys[i][r], zb); then z[h][r] = first ? zb * g[h]
     * : fma(z[h][r], f[h], zb * g[h]). rank is a multiple of 16 and keys rows are readable that far;
     * z f32[n_heads, rank]. */
    void (*mix)(const float *p, int64_t lanes, int64_t n, const float *keys, int64_t ldk, int64_t rank,
                int64_t n_heads, bool first, const float *f, const float *g, float *z);

    /* z[r] = fma(z[r], f, zb[r] * g): a block computed apart joins. n is a multiple of 16. */
    void (*join)(float *z, const float *zb, int64_t n, float f, float g);

    /* out f32[n]: per position, s_l = fma(g[h], relu(d[i][h]), s_l) over h = l, l + 16, ... ascending, then the tree
     * of the norms. d f32[n, lanes]; a NaN stays one. */
    void (*index_fold)(const float *d, int64_t lanes, int64_t n, const float *g, float *out);

    const char *isa;
} cb_attn_table;

/* ---- drivers ---------------------------------------------------------------------------------------------- */

/* What the parts of one cb_attn_forward share. Rows are numbered within the call. */
typedef struct {
    cb_pool *pool;
    const cb_attn_layer *layer;
    const cb_attn_step *step;
    float *cosine, *sine; /* f32[T, rope / 2], amplitude applied */
} cb_attn_call;

/* Where component 0 of head h lies in q_t; component k is k * 16 floats on. */
static inline int64_t cb_lane_start(int64_t h, int64_t depth)
{
    return h / CB_LANES * depth * CB_LANES + h % CB_LANES;
}

static inline int64_t cb_lanes(int64_t heads) { return CB_CEIL(heads, CB_LANES) * CB_LANES; }

/* Of a value in f32 or bf16. */
static inline size_t cb_kv_bytes(int format) { return format == CB_KV_BF16 ? 2 : 4; }

/* Rotates one vector of `rope` values; the result is de-interleaved (all u, then all v). src may equal dst. */
void cb_rope(const float *src, int64_t rope, bool interleave, const float *cosine, const float *sine, float *dst);

/* Positions [first, first + n) of one KV block (all in block `block`) as f32 rows: either where they lie or, when they
 * must be widened or padded, in `room` f32[CB_KV_BLOCK, pad16(width)]. *ld gets the row stride. `reach` is how far into
 * a row the caller reads (a multiple of 16 at most 15 above width). */
const float *cb_block_rows(const void *cache, int format, int64_t width, int64_t reach, int64_t block, int64_t n,
                           float *room, int64_t *ld);

/* One position's entry in f32 or bf16. */
void cb_store_row(void *cache, int format, int64_t width, int64_t block, int64_t offset, const float *src);

/* Items a thread takes at a time: no less work than waking another thread is worth. `cost` of one item in multiply-adds. */
static inline int64_t cb_attn_grain(int64_t cost)
{
    const int64_t worth_a_wake = 200000; /* some 10 us */
    return CB_MAX(1, worth_a_wake / CB_MAX(1, cost));
}

/* Rows, positions, sequences and the block numbers that the rows reach (the last `window` positions; 0: all). */
bool cb_is_step_valid(const cb_attn_step *step, int64_t window);

/* *cosine and *sine f32[T, rope / 2] of the rows' positions, amplitude applied, in scratch. */
int cb_rope_angles(cb_pool *pool, const cb_attn_step *step, int64_t rope, const float *inv_freq, float amplitude,
                   float **cosine, float **sine);

/* products.c: each product's y (row stride ldy) = x times its matrix, for matrices of one width `in`. */
typedef struct {
    const cb_matrix *m;
    float *y;
    int64_t ldy;
} cb_product;
int cb_products(cb_pool *pool, const cb_product *products, int n, const float *x, int64_t ldx, int64_t n_rows);

static inline int64_t cb_kv_block_of(const cb_attn_step *step, int64_t row, int64_t position)
{
    return step->block_table[step->seq[row] * step->table_stride + position / CB_KV_BLOCK];
}

/* attn_tasks.c: attention of rows [row0, row0 + n). q f32[n, H, nope + rope] as projected; latent f32[n, H, R]: folded
 * queries in, z / l out. */
int cb_attend_rows(const cb_attn_call *call, int64_t row0, int64_t n, const float *q, float *latent);

/* Folded and turned query of head h of tile row i, scaled; component k goes to to[k * stride]. q and latent as above. */
void cb_latent_query(const cb_attn_call *call, int64_t row0, int64_t i, int64_t h, const float *q, const float *latent, float *to,
                     int64_t stride);

/* index.c: writes selected and n_selected of rows [row0, row0 + n) of a full layer. q_in f32[n, q_width] is the normed
 * query latent (h itself when there is no q_a), h f32[n, D]. */
int cb_index_select(const cb_attn_call *call, int64_t row0, int64_t n, const float *q_in, int64_t q_width,
                    const float *h);

#endif
