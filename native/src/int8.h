/* int8.h: attention over an int8 cache, latent and grouped alike: how blocks lie, the inner loops, the driver.
 *
 * Everything is in groups of 64 components with one scale each. Lanes are positions for scores and components for sums, so
 * both are the same product: some queries' 64 bytes (or 64 weights) times 64 columns of which four bytes lie side by side.
 * Any number of queries may share a block: the heads that read one key head, times the rows of a task. */
#ifndef CB_INT8_H
#define CB_INT8_H

#include "attn.h"

#define CB_WEIGHT_MAX 32639 /* the largest weight of a sum: 127 * 256 + 127, two signed bytes */
#define CB_SPAN_BLOCKS 4
#define CB_SPAN (CB_SPAN_BLOCKS * CB_KV_BLOCK) /* positions that share a maximum and integer sums: 256 * 32639 * 127 < 2^31 */

/* One block of CB_KV_BLOCK positions. What lies beyond the depth, the components or the positions in use may be anything. */
typedef struct {
    const uint8_t *keys;      /* [quads of depth][CB_KV_BLOCK][4], value + 128 */
    const float *key_scale;   /* [groups of depth][CB_KV_BLOCK] */
    const int8_t *values;     /* [CB_KV_BLOCK / 4][dim][4]: positions j, j + 16, j + 32, j + 48 of a component; 252 bytes more
                               * are readable */
    const float *value_scale; /* [groups of dim][CB_KV_BLOCK] */
    int64_t dim;              /* components, a multiple of 4 */
    const uint8_t *const *rows; /* latents: [CB_KV_BLOCK] entries, value + 128, readable to whole groups, instead of keys, values */
} cb_int8_block;

/* Queries, each quantised as the activations of a linear are (cb_quantise_fn). */
typedef struct {
    int8_t *q;      /* [n_q][ng * 64] */
    float *scale;   /* [n_q][ng] */
    int32_t *sum;   /* [n_q][ng][2]: of each half of a group */
    int64_t depth;
} cb_int8_queries;

typedef struct cb_int8_table {
    /* One block. out f32[n_q] with row stride ldo, CB_KV_BLOCK each: out = 0; for groups ascending: d = sum of query times key, exact;
     * out = fma((f32)d, scale of the query * scale of the key, out). */
    void (*scores)(const cb_int8_queries *q, int64_t n_q, const cb_int8_block *b, float *out, int64_t ldo);

    /* Each query's scores s f32[n_q][CB_SPAN] at positions from .. to - 1 (at least one) become p = exp(s - m), m being their
     * maximum, and l the sum of p in 16 lanes (position mod 16, ascending) folded by the tree of the norms. Other positions of
     * the blocks that hold these become 0. */
    void (*softmax)(float *s, int64_t n_q, int64_t from, int64_t to, float *m, float *l);

    /* Per group of values: S = the largest scale of positions from .. to - 1 of the span whose blocks are b; step = S / 32639;
     * u f32[groups][CB_SPAN] = scale * (32639 / S), 0 elsewhere in the blocks that hold these. Where S is 0 or its quotient not
     * finite u and step are 0, where S is not finite u is 0 and step a NaN. */
    void (*spread)(const cb_int8_block *b, int64_t groups, int64_t from, int64_t to, float *u, float *step);

    /* Some blocks of a span, n_blocks from b on; p and u begin with these. W = the low 16 bits of fma(p, u, 1.5 * 2^23), which is
     * rint(p * u); d = sum of W times value over all their positions, exact; z = fma(z, f, (f32)d * (step * g)), or z = (f32)d
     * when f is NULL. p f32[n_q][CB_SPAN], f, g f32[n_q], z f32[n_q][groups of dim * 64]. */
    void (*mix)(const float *p, int64_t n_q, const cb_int8_block *b, int n_blocks, const float *u, const float *step, const float *f,
                const float *g, float *z);

    /* out f32[CB_KV_BLOCK]: out = 0; for heads ascending: out = fma(g[h], relu(d[h]), out). d f32[heads][CB_KV_BLOCK]; a NaN
     * stays one. */
    void (*index_fold)(const float *d, int64_t heads, const float *g, float *out);

    const char *isa;
} cb_int8_table;

/* ---- int8.c: the cache ------------------------------------------------------------------------------------------ */

static inline int64_t cb_quads(int64_t n) { return CB_CEIL(n, 4); }

/* Block number `block` of a cache of vectors of `width`. */
static inline void *cb_int8_block_at(const void *cache, int64_t width, int64_t block)
{
    return (char *)cache + block * CB_KV_BLOCK * cb_kv_row_bytes(CB_KV_INT8, width);
}

/* Latents lie row by row, because a selection takes them from anywhere: per block u8 [CB_KV_BLOCK][quads * 4], value + 128, then
 * bf16 [CB_KV_BLOCK][groups]. */
void cb_int8_store_row(void *block, int64_t width, int64_t offset, const float *src);
static inline const uint8_t *cb_int8_row(const void *block, int64_t width, int64_t offset)
{
    return (const uint8_t *)block + offset * cb_quads(width) * 4;
}
static inline const uint16_t *cb_int8_row_scales(const void *block, int64_t width, int64_t offset)
{
    return (const uint16_t *)cb_int8_row(block, width, CB_KV_BLOCK) + offset * cb_groups(width);
}

/* Keys of the indexer, and keys and values of a key head, lie as cb_int8_block has them; their scales are bf16
 * [groups][CB_KV_BLOCK]. Behind an indexer's keys come its scales; behind a key head's keys its values, then the scales of
 * both. */
static inline uint16_t *cb_int8_key_scales(const uint8_t *keys, int64_t width)
{
    return (uint16_t *)(keys + CB_KV_BLOCK * cb_quads(width) * 4);
}
/* Of a key head whose keys are at `head`. */
static inline int8_t *cb_int8_head_values(const uint8_t *head, int64_t width)
{
    return (int8_t *)head + CB_KV_BLOCK * cb_quads(width) * 4;
}
static inline uint16_t *cb_int8_head_scales(const uint8_t *head, int64_t width)
{
    return (uint16_t *)(head + 2 * CB_KV_BLOCK * cb_quads(width) * 4);
}
void cb_int8_store_key(uint8_t *keys, uint16_t *scales, int64_t width, int64_t offset, const float *src);
void cb_int8_store_value(int8_t *values, uint16_t *scales, int64_t width, int64_t offset, const float *src);
/* n bf16 scales as f32. */
void cb_int8_widen(const uint16_t *scales, int64_t n, float *to);

/* Keys of a group, [quads of it][CB_KV_BLOCK][4], and values, [CB_KV_BLOCK / 4] rows of 64 components that are *ld bytes apart:
 * where they lie, or laid out in `room` of CB_INT8_GROUP_BYTES. */
#define CB_INT8_GROUP_BYTES (CB_GROUP * CB_KV_BLOCK)
const uint8_t *cb_int8_keys_of(const cb_int8_block *b, int64_t group, int64_t quads, uint8_t *room);
const int8_t *cb_int8_values_of(const cb_int8_block *b, int64_t group, int8_t *room, int64_t *ld);

/* Query j of them becomes that of x f32[depth]. */
void cb_int8_set_query(const cb_int8_queries *q, int64_t j, const float *x);

/* ---- int8_tasks.c: rows meet blocks ------------------------------------------------------------------------------ */

typedef struct cb_int8_attention cb_int8_attention;
struct cb_int8_attention {
    cb_pool *pool;
    const cb_attn_step *step;
    int64_t row0, n; /* rows of the call */
    int64_t n_heads, n_kv_heads, depth, dim;
    int64_t window;          /* 0: all */
    const float *sinks;      /* f32[n_heads] or NULL */
    const int32_t *selected; /* [T][topk] with n_selected [T], or NULL */
    const int32_t *n_selected;
    int64_t topk;
    const void *arg;
    /* Query of a head of row row0 + i, turned and scaled, f32[depth]. */
    void (*query)(const void *arg, int64_t i, int64_t head, float *to);
    /* Where z / l of it goes, f32[dim]. */
    float *(*result)(const void *arg, int64_t i, int64_t head);
    /* Keys and values of a key head in a block of the cache, scales widened into `scales` f32[groups of the depth, then of dim]
     * [CB_KV_BLOCK]; NULL: latents, of which the first dim components are the values. */
    void (*block)(const void *arg, int64_t block, int64_t kv_head, cb_int8_block *b, float *scales);
};
int cb_int8_attend(const cb_int8_attention *a);

#endif
