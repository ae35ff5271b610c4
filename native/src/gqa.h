/* gqa.h: inner loops of grouped-query attention, and what its two drivers share.
 *
 * Keys of a block lie component by component (one row of 64 positions each), so scores have positions as lanes; values
 * lie position by position, so sums have components as lanes. The query heads of a group (and the rows of a task) that
 * read one key head are so many independent chains over the same loads. All pointers may be unaligned.
 */
#ifndef CB_GQA_H
#define CB_GQA_H

#include "attn.h"

typedef struct cb_gqa_table {
    /* out f32[n_q][CB_KV_BLOCK]: for p in from .. to - 1 (multiples of 16): out[j][p] = 0; for k ascending: out[j][p] =
     * fma(q[j][k], keys[k][p], out[j][p]). q f32[n_q, depth], keys f32[depth][CB_KV_BLOCK]. */
    void (*scores)(const float *q, int64_t n_q, int64_t depth, const float *keys, int64_t from, int64_t to, float *out);

    /* One query: its scores s f32[CB_KV_BLOCK] at positions from .. to - 1 (at least one) become p = exp(s - *m), *m
     * being their maximum, and *l the sum of p in 16 lanes (position mod 16, ascending) folded by the tree of the norms.
     * Other positions of s may change. */
    void (*softmax)(float *s, int64_t from, int64_t to, float *m, float *l);

    /* n queries take in one block each: m' = max(m, mb), f = exp(m - m'), g = exp(mb - m'), l = fma(l, f, lb * g). */
    void (*join)(const float *mb, const float *lb, int64_t n, float *m, float *l, float *f, float *g);

    /* zb[j][r] = 0; for p in from .. to - 1: zb[j][r] = fma(s[j][p], values[p][r], zb[j][r]); then z[j][r] =
     * fma(z[j][r], f[j], zb[j][r] * g[j]), or z = zb when f is NULL. s f32[n_q][CB_KV_BLOCK]; values f32 with row stride
     * ldv, z f32[n_q, dim]; dim is a multiple of 16. */
    void (*mix)(const float *s, int64_t n_q, int64_t from, int64_t to, const float *values, int64_t ldv, int64_t dim,
                const float *f, const float *g, float *z);
} cb_gqa_table;

extern const cb_gqa_table cb_gqa_table_ref, cb_gqa_table_avx2, cb_gqa_table_avx512, cb_gqa_table_neon;

typedef struct {
    cb_pool *pool;
    const cb_gqa_layer *layer;
    const cb_attn_step *step;
    const float *cosine, *sine; /* f32[T, rope / 2], amplitude applied */
} cb_gqa_call;

static inline int64_t cb_gqa_first_key(const cb_gqa_layer *y, int64_t position)
{
    return y->window > 0 ? CB_MAX(0, position - y->window + 1) : 0;
}

/* Element of the cache where the keys of (block, key head) start; its values start CB_KV_BLOCK * head_dim later. */
static inline size_t cb_gqa_start(const cb_gqa_layer *y, int64_t block, int64_t kv_head)
{
    return (size_t)((block * y->n_kv_heads + kv_head) * 2 * CB_KV_BLOCK * y->head_dim);
}

/* The same of an int8 cache, whose key heads lie as int8.h says. */
static inline uint8_t *cb_gqa_int8_start(const cb_gqa_layer *y, const void *cache, int64_t block, int64_t kv_head)
{
    int64_t of_head = 2 * CB_KV_BLOCK * cb_kv_row_bytes(CB_KV_INT8, y->head_dim);
    return (uint8_t *)cache + (block * y->n_kv_heads + kv_head) * of_head;
}

/* gqa_tasks.c: attention of rows [row0, row0 + n). q f32[n, H, head_dim]: turned and scaled queries in, results out. */
int cb_gqa_attend(const cb_gqa_call *call, int64_t row0, int64_t n, float *q);

#endif
