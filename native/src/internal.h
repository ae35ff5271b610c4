/* internal.h: what the library's own files share. Not installed. */
#ifndef CB_INTERNAL_H
#define CB_INTERNAL_H

#include "../include/colibri.h"

#include <stdbool.h>

#define CB_MIN(a, b) ((a) < (b) ? (a) : (b))
#define CB_MAX(a, b) ((a) > (b) ? (a) : (b))
#define CB_CEIL(a, b) (((a) + (b)-1) / (b))

static inline int64_t cb_blocks(int64_t out) { return CB_CEIL(out, CB_TILE_ROWS); }
bool cb_is_repackable(const cb_repack_matrix *m);
static inline int64_t cb_groups(int64_t in) { return CB_CEIL(in, CB_GROUP); }

/* ---- pool ------------------------------------------------------------------------------------------------ */

/* Items [begin, end) of a job; thread is 0 .. cb_pool_threads() - 1, 0 being the caller's. */
typedef void (*cb_job_fn)(void *arg, int64_t begin, int64_t end, int thread);

/* Calls fn over 0 .. n_items-1, at most `grain` items at a time (grain >= 1), and returns when all are done. Runs on
 * the caller alone when one grain covers everything. Never nested: fn must not start a job. */
void cb_parallel_for(cb_pool *pool, int64_t n_items, int64_t grain, cb_job_fn fn, void *arg);

/* Attention's phases (colibri.h). `since` is a time of cb_now_ns and becomes the present one. A span between jobs counts as
 * it is; within a job every thread laps its own scores and values, and when the job is over its span is shared out by these. */
int64_t cb_now_ns(void); /* CLOCK_MONOTONIC */
void cb_phase_end(cb_pool *pool, int phase, int64_t *since);
void cb_phase_lap(cb_pool *pool, int phase, int64_t *since);
void cb_phase_share(cb_pool *pool, int64_t *since);

/* Scratch: a stack of 64-byte aligned pieces that live until the mark below them is released. Memory is kept for the
 * next call, so a steady state allocates nothing. Only the caller's thread may take some (before a job). NULL when the
 * system has none left. */
typedef struct {
    int32_t chunk;
    int64_t used, taken;
} cb_scratch_mark;
cb_scratch_mark cb_scratch_begin(cb_pool *pool);
void *cb_scratch(cb_pool *pool, int64_t bytes);
void cb_scratch_end(cb_pool *pool, cb_scratch_mark mark);

/* Every public function that takes a pool holds it meanwhile: two Python threads then queue instead of colliding.
 * Internal functions (suffix _internal, and those below) expect it held. */
void cb_pool_hold(cb_pool *pool);
void cb_pool_release(cb_pool *pool);

/* ---- matrices -------------------------------------------------------------------------------------------- */

/* Activations of one call. Row r reads source row in_index[r] and writes y row out_index[r] (NULL: r itself).
 *   CB_ACT_F32: x, ldx
 *   CB_ACT_Q8:  q int8 [.][ng * 64] padded with 0, scale f32 [.][ng], sum i32 [.][ng][2] (of q over each half of the group) */
typedef struct {
    const float *x;
    int64_t ldx;
    const int8_t *q;
    const float *scale;
    const int32_t *sum;
    const int32_t *in_index, *out_index;
    int64_t n_rows;
} cb_rows;

/* Row blocks [b0, b1) of m (b in 16 outputs) for all rows: y[row][16b ..] = result, or += result when add. One thread;
 * no allocation. Writes only columns below m->out. */
typedef void (*cb_linear_fn)(const cb_matrix *m, const cb_rows *rows, int64_t b0, int64_t b1, float *y, int64_t ldy,
                             bool add);

/* One row of n values: q int8 [ng * 64], scale f32 [ng], sum i32 [ng][2]. */
typedef void (*cb_quantise_fn)(const float *x, int64_t n, int8_t *q, float *scale, int32_t *sum);

/* What a format is, one line each in format.c. Packed values come in tiles of CB_TILE_ROWS rows; formats with scales pad
 * their inputs to whole groups of CB_GROUP, and take int8 activations. */
typedef struct {
    const char *name;
    int bits;                /* of a value */
    int row_scale_bytes;     /* one scale per row */
    int group_scale_bytes;   /* one per row and group */
    int group;               /* inputs of one sum, and of one scale of a group: CB_GROUP or half of it */
} cb_format;
extern const cb_format cb_formats[CB_N_FORMATS]; /* entry 0, CB_NONE, has no name */
static inline bool cb_has_scales(int format)
{
    return cb_formats[format].row_scale_bytes || cb_formats[format].group_scale_bytes;
}

/* CB_OK when sizes, format, act and pointers are consistent. */
int cb_matrix_check(const cb_matrix *m);
/* Matrix i of a stack. */
cb_matrix cb_matrix_at(const cb_matrix *m, int64_t i);

/* Fills `rows` so that matrices with activation `act` and `in` = n can use it; takes scratch for CB_ACT_Q8. Several
 * matrices may share one. CB_ENOMEM possible. */
int cb_rows_prepare(cb_pool *pool, int act, const float *x, int64_t ldx, int64_t n_rows, int64_t n, cb_rows *rows);
/* The threaded product over prepared rows. */
void cb_linear_rows(cb_pool *pool, const cb_matrix *m, const cb_rows *rows, float *y, int64_t ldy, bool add);
/* Both together; scratch is given back. */
int cb_linear_internal(cb_pool *pool, const cb_matrix *m, const float *x, int64_t ldx, int64_t n_rows, float *y,
                       int64_t ldy, bool add);
void cb_rmsnorm_internal(cb_pool *pool, const float *x, int64_t ldx, const float *w, float eps, int64_t n_rows,
                         int64_t n, float *out, int64_t ldo);

/* inner.c: n values of g and u from place `at` of their rows: biases join, then g = inner(g, u). u may change. */
void cb_inner(const cb_ffn *ffn, int64_t at, int64_t n, float *g, float *u);

/* ---- dispatch -------------------------------------------------------------------------------------------- */

/* Filled with the references first, then each rung replaces what it improves. `name` strings feed cb_dispatch_text. */
typedef struct {
    cb_linear_fn linear[CB_N_FORMATS][2]; /* [format][act] */
    const char *linear_isa[CB_N_FORMATS][2];
    cb_quantise_fn quantise;
    /* One row each. */
    void (*rmsnorm)(const float *x, const float *w, float eps, int64_t n, float *out);
    void (*layernorm)(const float *x, const float *w, const float *b, float eps, int64_t n, float *out);
    void (*silu_mul)(const float *gate, const float *up, int64_t n, float *out); /* silu(gate) * up */
    void (*sigmoid)(const float *x, int64_t n, float *out);
    /* out[j] = 0; for k in order: out[j] = fma(weight[order[k]], parts[order[k] * stride + j], out[j]); then + shared[j]
     * when given. Returns false when a result is not finite. */
    bool (*reduce)(const float *parts, int64_t stride, const float *weight, const int32_t *order, int64_t k,
                   const float *shared, int64_t n, float *out);
    const struct cb_delta_table *delta;
    const char *vector_isa; /* of quantise .. delta */
    struct cb_attn_table *attn; /* owned by the attention files */
    const struct cb_gqa_table *gqa;
    struct cb_int8_table *int8;
} cb_table;

extern cb_table cb_kernels; /* changed only by load and cb_isa_limit */

/* Each rung of each family: overwrite what this rung improves. dispatch.c calls them in order. */
void cb_linear_table_ref(cb_table *t);
void cb_vector_table_ref(cb_table *t);
void cb_attn_table_ref(cb_table *t);
void cb_int8_table_ref(cb_table *t);
void cb_linear_table_avx2(cb_table *t);
void cb_vector_table_avx2(cb_table *t);
void cb_attn_table_avx2(cb_table *t);
void cb_int8_table_avx2(cb_table *t);
void cb_linear_table_avx512(cb_table *t);
void cb_vector_table_avx512(cb_table *t);
void cb_attn_table_avx512(cb_table *t);
void cb_int8_table_avx512(cb_table *t);
void cb_linear_table_avx512vnni(cb_table *t);
void cb_int8_table_avx512vnni(cb_table *t);
void cb_linear_table_amx(cb_table *t);
void cb_int8_table_amx(cb_table *t);
void cb_linear_table_neon(cb_table *t);
void cb_vector_table_neon(cb_table *t);
void cb_attn_table_neon(cb_table *t);
void cb_int8_table_neon(cb_table *t);
void cb_linear_table_neondot(cb_table *t);
void cb_int8_table_neondot(cb_table *t);

/* Highest rung that processor and operating system offer, as a bit set 1 << cb_isa. */
unsigned cb_cpu_isas(void);
#define CB_N_ISAS (CB_ISA_NEONDOT + 1)
extern const char *const cb_isa_names[CB_N_ISAS];

#endif
