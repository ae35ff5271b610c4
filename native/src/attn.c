/* attn.c: one layer of absorbed latent attention for the rows of a step.
 *
 * First every row's latent and index key go into the cache, then tiles of rows attend. A task is a few rows of one
 * sequence (or one row with its own selection) times a block of heads; it walks the row's keys in blocks of 64, so a
 * block is widened once for all rows and heads of the task. When there are fewer such tasks than threads, blocks are
 * computed apart and joined afterwards in the same order. Nobody splits a sum, so any number of threads gives the same
 * bits.
 */
#include "attn.h"
#include "cbmath.h"

#include <string.h>

#define ROW_TILE 128    /* rows whose queries, latents and outputs are in scratch at one time */
#define TASK_LANES 64   /* rows times heads of one task: queries and sums stay in the second-level cache */
#define TASK_ROWS 4
#define MIN_SPLIT_BLOCKS 4
#define WAVE_PARTS 512  /* blocks computed apart at one time: 16 MiB of sums at 16 heads of 512 */
#define PREFETCH_ROWS 12 /* selected rows lie anywhere: ask for them this many ahead */

/* ---- cache ------------------------------------------------------------------------------------------------ */

static size_t kv_bytes(int format) { return format == CB_KV_BF16 ? 2 : 4; }

const float *cb_block_rows(const void *cache, int format, int64_t width, int64_t reach, int64_t block, int64_t n,
                           float *room, int64_t *ld)
{
    const char *start = (const char *)cache + (size_t)(block * CB_KV_BLOCK * width) * kv_bytes(format);
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

static void prefetch_row(const void *cache, int format, int64_t width, int64_t block, int64_t offset)
{
    const char *row = (const char *)cache + (size_t)((block * CB_KV_BLOCK + offset) * width) * kv_bytes(format);
    for (size_t at = 0; at < (size_t)width * kv_bytes(format); at += 64)
        __builtin_prefetch(row + at);
}

static void position_row(const void *cache, int format, int64_t width, int64_t block, int64_t offset, float *dst)
{
    size_t at = (size_t)((block * CB_KV_BLOCK + offset) * width);
    if (format == CB_KV_BF16)
        cb_kernels.attn->widen((const uint16_t *)cache + at, width, dst);
    else
        memcpy(dst, (const float *)cache + at, (size_t)width * sizeof(float));
}

static void store_row(void *cache, int format, int64_t width, int64_t block, int64_t offset, const float *src)
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

static void angles_job(void *arg, int64_t begin, int64_t end, int thread)
{
    const cb_attn_call *c = arg;
    int64_t half = c->layer->rope / 2;
    (void)thread;
    for (int64_t t = begin; t < end; t++)
        for (int64_t i = 0; i < half; i++) {
            double angle = (double)c->step->position[t] * (double)c->layer->inv_freq[i];
            c->cosine[t * half + i] = (float)cos(angle) * c->layer->rope_amplitude;
            c->sine[t * half + i] = (float)sin(angle) * c->layer->rope_amplitude;
        }
}

/* ---- writing the cache ------------------------------------------------------------------------------------ */

typedef struct {
    const cb_attn_call *call;
    int64_t row0;
    float *kv;  /* [n, R + rope] as projected; normed and turned in place */
    float *key; /* [n, index_dim] or NULL */
} store_job_arg;

static void store_job(void *arg, int64_t begin, int64_t end, int thread)
{
    const store_job_arg *a = arg;
    const cb_attn_call *c = a->call;
    const cb_attn_layer *y = c->layer;
    int64_t half = y->rope / 2, width = y->kv_rank + y->rope;
    (void)thread;
    for (int64_t i = begin; i < end; i++) {
        int64_t t = a->row0 + i, position = c->step->position[t];
        int64_t block = cb_kv_block_of(c->step, t, position), offset = position % CB_KV_BLOCK;
        const float *cosine = c->cosine + t * half, *sine = c->sine + t * half;
        float *kv = a->kv + i * width;
        cb_kernels.rmsnorm(kv, y->kv_a_norm, y->latent_eps, y->kv_rank, kv);
        cb_rope(kv + y->kv_rank, y->rope, y->rope_interleave, cosine, sine, kv + y->kv_rank);
        store_row(c->step->kv, c->step->kv_format, width, block, offset, kv);
        if (a->key) {
            float *key = a->key + i * y->index_dim;
            cb_kernels.layernorm(key, y->index_k_norm_w, y->index_k_norm_b, y->index_norm_eps, y->index_dim, key);
            cb_rope(key, y->rope, y->index_rope_interleave, cosine, sine, key);
            store_row(c->step->index_k, c->step->kv_format, y->index_dim, block, offset, key);
        }
    }
}

/* h = RMSNorm(x) goes to step->hidden, which holds it until the row's own result replaces it. */
static int write_cache(const cb_attn_call *c, int64_t row0, int64_t n)
{
    const cb_attn_layer *y = c->layer;
    int64_t width = y->kv_rank + y->rope;
    float *h = c->step->hidden + row0 * y->hidden;
    cb_rmsnorm_internal(c->pool, c->step->x + row0 * y->hidden, y->hidden, y->input_norm, y->rms_eps, n, y->hidden, h,
                        y->hidden);
    store_job_arg job = {c, row0, cb_scratch(c->pool, n * width * 4), NULL};
    if (!job.kv)
        return CB_ENOMEM;
    int status = cb_linear_internal(c->pool, &y->kv_a, h, y->hidden, n, job.kv, width, false);
    if (status == CB_OK && y->index_kind == CB_INDEX_FULL) {
        job.key = cb_scratch(c->pool, n * y->index_dim * 4);
        if (!job.key)
            return CB_ENOMEM;
        status = cb_linear_internal(c->pool, &y->index_wk, h, y->hidden, n, job.key, y->index_dim, false);
    }
    if (status == CB_OK)
        cb_parallel_for(c->pool, n, 4, store_job, &job);
    return status;
}

/* ---- one matrix per head ---------------------------------------------------------------------------------- */

typedef struct {
    const cb_matrix *stack;
    cb_rows rows; /* row t * H + h is head h of row t */
    const int32_t *index; /* [H][n]: t * H + h */
    int64_t n, blocks;
    float *y; /* [n][H][out] */
    int64_t n_heads;
} heads_job_arg;

static void heads_job(void *arg, int64_t begin, int64_t end, int thread)
{
    const heads_job_arg *a = arg;
    (void)thread;
    while (begin < end) {
        int64_t head = begin / a->blocks, b0 = begin % a->blocks;
        int64_t b1 = CB_MIN(a->blocks, b0 + (end - begin));
        cb_matrix m = cb_matrix_at(a->stack, head);
        cb_rows rows = a->rows;
        rows.in_index = a->index + head * a->n;
        rows.n_rows = a->n;
        cb_kernels.linear[m.format][m.act](&m, &rows, b0, b1, a->y + head * m.out, a->n_heads * m.out, false);
        begin += b1 - b0;
    }
}

/* y f32[n, H, out] = per head stack[h] times x[t][h][0 .. in), rows of x being ldx apart. */
static int heads_linear(cb_pool *pool, const cb_matrix *stack, int64_t n_heads, const float *x, int64_t ldx, int64_t n,
                        float *y)
{
    cb_scratch_mark mark = cb_scratch_begin(pool);
    heads_job_arg job = {.stack = stack, .n = n, .blocks = cb_blocks(stack->out), .y = y, .n_heads = n_heads};
    int32_t *index = cb_scratch(pool, n * n_heads * 4);
    int status = index ? cb_rows_prepare(pool, stack->act, x, ldx, n * n_heads, stack->in, &job.rows) : CB_ENOMEM;
    if (status == CB_OK) {
        for (int64_t h = 0; h < n_heads; h++)
            for (int64_t t = 0; t < n; t++)
                index[h * n + t] = (int32_t)(t * n_heads + h);
        job.index = index;
        int64_t items = n_heads * job.blocks;
        cb_parallel_for(pool, items, cb_attn_grain(CB_TILE_ROWS * stack->in * n), heads_job, &job);
    }
    cb_scratch_end(pool, mark);
    return status;
}

/* ---- attention -------------------------------------------------------------------------------------------- */

typedef struct {
    int32_t row, n_rows; /* rows of the call that this task serves */
} row_group;

typedef struct {
    const cb_attn_call *call;
    int64_t row0;
    const float *q; /* [tile rows][H][nope + rope] */
    float *latent;  /* [tile rows][H][R]: folded query in, attention result out */
    const row_group *group;
    int64_t lanes;       /* heads of one task, multiple of 16 */
    int64_t head_blocks; /* tasks per row group */
    float *room;         /* per thread */
    int64_t room_floats;
} attend_arg;

/* Where a thread's room holds what; `rows` units of `lanes` lanes. */
typedef struct {
    float *keys, *scores, *f, *g;
    float *q_t[TASK_ROWS], *z[TASK_ROWS], *m[TASK_ROWS], *l[TASK_ROWS];
} attend_room;

static int64_t lay_out_room(const cb_attn_layer *y, int64_t lanes, int64_t rows, float *base, attend_room *r)
{
    int64_t depth = y->kv_rank + y->rope, at = 0;
    r->keys = base;
    at += CB_KV_BLOCK * cb_lanes(depth);
    r->scores = base + at;
    at += CB_KV_BLOCK * lanes;
    r->f = base + at;
    r->g = base + at + lanes;
    at += 2 * lanes;
    for (int64_t i = 0; i < rows; i++) {
        r->q_t[i] = base + at;
        at += depth * lanes;
        r->z[i] = base + at;
        at += cb_lanes(y->kv_rank) * lanes;
        r->m[i] = base + at;
        r->l[i] = base + at + lanes;
        at += 2 * lanes;
    }
    return at;
}

/* Folded and turned queries of heads [h0, h0 + lanes) of tile row i, scaled, one head per lane. */
static void load_query(const attend_arg *a, int64_t i, int64_t h0, float *q_t)
{
    const cb_attn_layer *y = a->call->layer;
    int64_t rank = y->kv_rank, depth = rank + y->rope, half = y->rope / 2, t = a->row0 + i;
    float scale = y->softmax_scale;
    for (int64_t j = 0; j < a->lanes; j++) {
        int64_t h = h0 + j;
        float *lane = q_t + cb_lane_start(j, depth);
        if (h >= y->n_heads) {
            for (int64_t k = 0; k < depth; k++)
                lane[k * CB_LANES] = 0.0f;
            continue;
        }
        const float *folded = a->latent + (i * y->n_heads + h) * rank;
        for (int64_t k = 0; k < rank; k++)
            lane[k * CB_LANES] = folded[k] * scale;
        float turned[CB_MAX_ROPE];
        cb_rope(a->q + (i * y->n_heads + h) * (y->nope + y->rope) + y->nope, y->rope, y->rope_interleave,
                a->call->cosine + t * half, a->call->sine + t * half, turned);
        for (int64_t k = 0; k < y->rope; k++)
            lane[(rank + k) * CB_LANES] = turned[k] * scale;
    }
}

/* Number of keys of a row, and its selection or NULL when it sees all positions up to its own. */
static int64_t keys_of(const cb_attn_call *c, int64_t t, const int32_t **selection)
{
    *selection = NULL;
    if (c->layer->index_kind != CB_INDEX_NONE && c->step->n_selected[t] >= 0) {
        *selection = c->step->selected + t * c->layer->index_topk;
        return c->step->n_selected[t];
    }
    return (int64_t)c->step->position[t] + 1;
}

/* Keys [first, first + n) of row t's list, whose length is `length`. */
static const float *load_keys(const cb_attn_call *c, int64_t t, const int32_t *selection, int64_t first, int64_t n,
                              int64_t length, float *room, int64_t *ld)
{
    const cb_attn_layer *y = c->layer;
    int64_t width = y->kv_rank + y->rope;
    if (!selection)
        return cb_block_rows(c->step->kv, c->step->kv_format, width, cb_lanes(y->kv_rank),
                             cb_kv_block_of(c->step, t, first), n, room, ld);
    *ld = cb_lanes(width);
    for (int64_t i = 0; i < n; i++) {
        int64_t position = selection[first + i];
        if (first + i + PREFETCH_ROWS < length) {
            int64_t ahead = selection[first + i + PREFETCH_ROWS];
            prefetch_row(c->step->kv, c->step->kv_format, width, cb_kv_block_of(c->step, t, ahead), ahead % CB_KV_BLOCK);
        }
        position_row(c->step->kv, c->step->kv_format, width, cb_kv_block_of(c->step, t, position),
                        position % CB_KV_BLOCK, room + i * *ld);
    }
    return room;
}

/* z / l of one head takes the place of its folded query. */
static void store_result(const attend_arg *a, int64_t t, int64_t h, const float *z, float l)
{
    const cb_attn_layer *y = a->call->layer;
    float *out = a->latent + ((t - a->row0) * y->n_heads + h) * y->kv_rank;
    for (int64_t e = 0; e < y->kv_rank; e++)
        out[e] = z[e] / l;
}

static void attend(const attend_arg *a, const row_group *group, int64_t h0, float *base)
{
    const cb_attn_call *c = a->call;
    const cb_attn_layer *y = c->layer;
    const cb_attn_table *k = cb_kernels.attn;
    int64_t lanes = a->lanes, depth = y->kv_rank + y->rope, rank = cb_lanes(y->kv_rank);
    int64_t heads = CB_MIN(lanes, y->n_heads - h0);
    attend_room r;
    lay_out_room(y, lanes, group->n_rows, base, &r);
    for (int64_t i = 0; i < group->n_rows; i++)
        load_query(a, group->row + i - a->row0, h0, r.q_t[i]);

    const int32_t *selection;
    int64_t last = group->row + group->n_rows - 1, longest = keys_of(c, last, &selection);
    for (int64_t first = 0; first < longest; first += CB_KV_BLOCK) {
        int64_t ld, n = CB_MIN(CB_KV_BLOCK, longest - first);
        const float *keys = load_keys(c, last, selection, first, n, longest, r.keys, &ld);
        for (int64_t i = 0; i < group->n_rows; i++) {
            const int32_t *unused;
            int64_t own = CB_MIN(n, keys_of(c, group->row + i, &unused) - first);
            if (own <= 0)
                continue;
            k->scores(r.q_t[i], lanes, depth, keys, ld, own, r.scores);
            k->softmax(r.scores, lanes, own, first == 0, r.m[i], r.l[i], r.f, r.g);
            k->mix(r.scores, lanes, own, keys, ld, rank, heads, first == 0, r.f, r.g, r.z[i]);
        }
    }

    for (int64_t i = 0; i < group->n_rows; i++)
        for (int64_t j = 0; j < heads; j++)
            store_result(a, group->row + i, h0 + j, r.z[i] + j * rank, r.l[i][j]);
}

static void attend_job(void *arg, int64_t begin, int64_t end, int thread)
{
    const attend_arg *a = arg;
    for (int64_t item = begin; item < end; item++)
        attend(a, &a->group[item / a->head_blocks], item % a->head_blocks * a->lanes,
               a->room + thread * a->room_floats);
}

/* Consecutive rows of one sequence that see all positions share a task's key blocks. Returns the number of groups. */
static int64_t group_rows(const cb_attn_call *c, int64_t row0, int64_t n, int64_t at_most, row_group *out)
{
    int64_t n_groups = 0;
    const int32_t *selection;
    for (int64_t t = row0; t < row0 + n; t++) {
        bool dense = (keys_of(c, t, &selection), selection == NULL);
        row_group *g = n_groups ? &out[n_groups - 1] : NULL;
        bool joins = g && dense && g->n_rows < at_most && c->step->seq[t] == c->step->seq[g->row] &&
                     (keys_of(c, g->row, &selection), selection == NULL);
        if (joins)
            g->n_rows++;
        else
            out[n_groups++] = (row_group){(int32_t)t, 1};
    }
    return n_groups;
}

/* ---- few rows, long contexts, many threads: blocks apart, joined in order ------------------------------------- */

typedef struct {
    attend_arg a;           /* groups of one row */
    int64_t n_tasks;        /* row groups times head blocks */
    int64_t wave0, wave;    /* first block and number of blocks of this wave */
    float *q_t, *z, *m, *l; /* per task: [depth * lanes], [lanes * rank], [lanes] twice */
    float *part;            /* per task and block of the wave: m [lanes], l [lanes], z [lanes * rank] */
    int64_t part_floats;
} split_arg;

static void split_query_job(void *arg, int64_t begin, int64_t end, int thread)
{
    const split_arg *s = arg;
    int64_t depth = s->a.call->layer->kv_rank + s->a.call->layer->rope;
    (void)thread;
    for (int64_t task = begin; task < end; task++)
        load_query(&s->a, s->a.group[task / s->a.head_blocks].row - s->a.row0, task % s->a.head_blocks * s->a.lanes,
                   s->q_t + task * depth * s->a.lanes);
}

static void split_block_job(void *arg, int64_t begin, int64_t end, int thread)
{
    const split_arg *s = arg;
    const cb_attn_call *c = s->a.call;
    const cb_attn_layer *y = c->layer;
    const cb_attn_table *k = cb_kernels.attn;
    int64_t lanes = s->a.lanes, depth = y->kv_rank + y->rope, rank = cb_lanes(y->kv_rank);
    attend_room r;
    lay_out_room(y, lanes, 0, s->a.room + thread * s->a.room_floats, &r);
    for (int64_t item = begin; item < end; item++) {
        int64_t task = item / s->wave, first = (s->wave0 + item % s->wave) * CB_KV_BLOCK;
        int64_t t = s->a.group[task / s->a.head_blocks].row, h0 = task % s->a.head_blocks * lanes;
        const int32_t *selection;
        int64_t ld, length = keys_of(c, t, &selection), n = CB_MIN(CB_KV_BLOCK, length - first);
        if (n <= 0)
            continue;
        float *part = s->part + item * s->part_floats;
        const float *keys = load_keys(c, t, selection, first, n, length, r.keys, &ld);
        k->scores(s->q_t + task * depth * lanes, lanes, depth, keys, ld, n, r.scores);
        k->softmax(r.scores, lanes, n, true, part, part + lanes, r.f, r.g);
        k->mix(r.scores, lanes, n, keys, ld, rank, CB_MIN(lanes, y->n_heads - h0), true, r.f, r.g, part + 2 * lanes);
    }
}

/* One head of one task takes in the wave's blocks, in the order and with the operations of `attend`. */
static void split_join_job(void *arg, int64_t begin, int64_t end, int thread)
{
    const split_arg *s = arg;
    const cb_attn_call *c = s->a.call;
    const cb_attn_layer *y = c->layer;
    int64_t lanes = s->a.lanes, rank = cb_lanes(y->kv_rank);
    (void)thread;
    for (int64_t item = begin; item < end; item++) {
        int64_t task = item / lanes, j = item % lanes, h = task % s->a.head_blocks * lanes + j;
        if (h >= y->n_heads)
            continue;
        const int32_t *selection;
        int64_t t = s->a.group[task / s->a.head_blocks].row, length = keys_of(c, t, &selection);
        float *z = s->z + (task * lanes + j) * rank, *m = s->m + task * lanes + j, *l = s->l + task * lanes + j;
        for (int64_t b = s->wave0; b < s->wave0 + s->wave && b * CB_KV_BLOCK < length; b++) {
            const float *part = s->part + (task * s->wave + b - s->wave0) * s->part_floats;
            const float *zb = part + 2 * lanes + j * rank;
            float mb = part[j], lb = part[lanes + j];
            if (b == 0) {
                *m = mb;
                *l = lb;
                memcpy(z, zb, (size_t)rank * sizeof(float));
                continue;
            }
            float joined = mb > *m ? mb : *m;
            float f = cb_exp(*m - joined), g = cb_exp(mb - joined);
            *l = fmaf(*l, f, lb * g);
            cb_kernels.attn->join(z, zb, rank, f, g);
            *m = joined;
        }
        if (length > s->wave0 * CB_KV_BLOCK && length <= (s->wave0 + s->wave) * CB_KV_BLOCK)
            store_result(&s->a, t, h, z, *l);
    }
}

static int attend_split(const attend_arg *a, int64_t n_groups, int64_t n_blocks)
{
    const cb_attn_call *c = a->call;
    const cb_attn_layer *y = c->layer;
    int64_t depth = y->kv_rank + y->rope, rank = cb_lanes(y->kv_rank), lanes = a->lanes;
    int64_t threads = cb_pool_threads(c->pool);
    split_arg s = {.a = *a, .n_tasks = n_groups * a->head_blocks, .part_floats = lanes * (rank + 2)};
    int64_t wave = CB_MIN(n_blocks, CB_MAX(threads, WAVE_PARTS / s.n_tasks));
    s.q_t = cb_scratch(c->pool, s.n_tasks * depth * lanes * 4);
    s.z = cb_scratch(c->pool, s.n_tasks * lanes * rank * 4);
    s.m = cb_scratch(c->pool, s.n_tasks * lanes * 4);
    s.l = cb_scratch(c->pool, s.n_tasks * lanes * 4);
    s.part = cb_scratch(c->pool, s.n_tasks * wave * s.part_floats * 4);
    if (!s.q_t || !s.z || !s.m || !s.l || !s.part)
        return CB_ENOMEM;
    cb_parallel_for(c->pool, s.n_tasks, cb_attn_grain(4 * depth * lanes), split_query_job, &s);
    for (s.wave0 = 0; s.wave0 < n_blocks; s.wave0 += s.wave) {
        s.wave = CB_MIN(wave, n_blocks - s.wave0);
        cb_parallel_for(c->pool, s.n_tasks * s.wave, cb_attn_grain(2 * CB_KV_BLOCK * depth * lanes), split_block_job, &s);
        cb_parallel_for(c->pool, s.n_tasks * lanes, cb_attn_grain(s.wave * rank), split_join_job, &s);
    }
    return CB_OK;
}

static int attend_rows(const cb_attn_call *c, int64_t row0, int64_t n, const float *q, float *latent)
{
    const cb_attn_layer *y = c->layer;
    int64_t threads = cb_pool_threads(c->pool), all = cb_lanes(y->n_heads);
    int64_t lanes = CB_MIN(all, TASK_LANES), longest = 0;
    for (int64_t t = row0; t < row0 + n; t++) {
        const int32_t *unused;
        longest = CB_MAX(longest, keys_of(c, t, &unused));
    }
    int64_t n_blocks = CB_CEIL(longest, CB_KV_BLOCK);
    bool split = threads > 1 && n * CB_CEIL(all, CB_LANES) < 2 * threads && n_blocks >= MIN_SPLIT_BLOCKS;
    /* A task of fewer heads widens the same keys again, so tasks get smaller only while threads would idle. */
    for (int64_t tasks; !split && lanes > CB_LANES; lanes = cb_lanes(lanes / 2)) {
        tasks = n * CB_CEIL(all, lanes);
        if (tasks >= 4 * threads || tasks % threads == 0)
            break;
    }
    int64_t share = split ? 1 : CB_MAX(1, CB_MIN(CB_MIN(TASK_ROWS, TASK_LANES / lanes), n / (2 * threads)));

    row_group *group = cb_scratch(c->pool, n * (int64_t)sizeof *group);
    attend_arg job = {.call = c, .row0 = row0, .q = q, .latent = latent, .group = group, .lanes = lanes,
                      .head_blocks = CB_CEIL(all, lanes)};
    attend_room unused;
    job.room_floats = CB_CEIL(lay_out_room(y, lanes, split ? 0 : share, NULL, &unused), 16) * 16;
    job.room = cb_scratch(c->pool, threads * job.room_floats * 4);
    if (!group || !job.room)
        return CB_ENOMEM;
    int64_t n_groups = group_rows(c, row0, n, share, group);
    if (split)
        return attend_split(&job, n_groups, n_blocks);
    int64_t cost = 2 * longest * (y->kv_rank + y->rope) * lanes * share;
    cb_parallel_for(c->pool, n_groups * job.head_blocks, cb_attn_grain(cost), attend_job, &job);
    return CB_OK;
}

static int attend_tile(const cb_attn_call *c, int64_t row0, int64_t n)
{
    const cb_attn_layer *y = c->layer;
    int64_t heads = y->n_heads, head_q = y->nope + y->rope, D = y->hidden;
    float *h = c->step->hidden + row0 * D;
    float *wide = cb_scratch(c->pool, n * heads * CB_MAX(head_q, y->v_dim) * 4); /* queries, later head outputs */
    float *latent = cb_scratch(c->pool, n * heads * y->kv_rank * 4);
    if (!wide || !latent)
        return CB_ENOMEM;

    const float *q_in = h;
    int64_t q_width = D;
    int status;
    if (y->q_a.format != CB_NONE) {
        float *q_lat = cb_scratch(c->pool, n * y->q_rank * 4);
        if (!q_lat)
            return CB_ENOMEM;
        status = cb_linear_internal(c->pool, &y->q_a, h, D, n, q_lat, y->q_rank, false);
        if (status != CB_OK)
            return status;
        cb_rmsnorm_internal(c->pool, q_lat, y->q_rank, y->q_a_norm, y->latent_eps, n, y->q_rank, q_lat, y->q_rank);
        q_in = q_lat;
        q_width = y->q_rank;
    }
    status = cb_linear_internal(c->pool, &y->q_b, q_in, q_width, n, wide, heads * head_q, false);
    if (status == CB_OK && y->index_kind == CB_INDEX_FULL)
        status = cb_index_select(c, row0, n, q_in, q_width, h);
    if (status == CB_OK)
        status = heads_linear(c->pool, &y->k_b, heads, wide, head_q, n, latent);
    if (status == CB_OK)
        status = attend_rows(c, row0, n, wide, latent);
    if (status == CB_OK)
        status = heads_linear(c->pool, &y->v_b, heads, latent, y->kv_rank, n, wide);
    if (status == CB_OK)
        status = cb_linear_internal(c->pool, &y->o, wide, heads * y->v_dim, n, c->step->x + row0 * D, D, true);
    if (status == CB_OK)
        cb_rmsnorm_internal(c->pool, c->step->x + row0 * D, D, y->post_norm, y->rms_eps, n, D, h, D);
    return status;
}

/* ---- contract --------------------------------------------------------------------------------------------- */

static bool is_matrix(const cb_matrix *m, int64_t out, int64_t in)
{
    return m->format != CB_NONE && m->out == out && m->in == in && cb_matrix_check(m) == CB_OK;
}

static bool is_layer_valid(const cb_attn_layer *y)
{
    if (y->hidden <= 0 || y->n_heads <= 0 || y->kv_rank <= 0 || y->nope <= 0 || y->v_dim <= 0 || y->rope < 0 ||
        y->rope % 2 || y->rope > CB_MAX_ROPE || !y->input_norm || !y->kv_a_norm || !y->post_norm ||
        (y->rope > 0 && !y->inv_freq))
        return false;
    int64_t q_width = y->hidden;
    if (y->q_a.format != CB_NONE) {
        if (y->q_rank <= 0 || !y->q_a_norm || !is_matrix(&y->q_a, y->q_rank, y->hidden))
            return false;
        q_width = y->q_rank;
    }
    int64_t heads = y->n_heads;
    if (!is_matrix(&y->q_b, heads * (y->nope + y->rope), q_width) ||
        !is_matrix(&y->kv_a, y->kv_rank + y->rope, y->hidden) || !is_matrix(&y->k_b, y->kv_rank, y->nope) ||
        !is_matrix(&y->v_b, y->v_dim, y->kv_rank) || !is_matrix(&y->o, y->hidden, heads * y->v_dim))
        return false;
    switch (y->index_kind) {
    case CB_INDEX_NONE: return true;
    case CB_INDEX_SHARED: return y->index_topk > 0;
    case CB_INDEX_FULL:
        return y->index_topk > 0 && y->index_heads > 0 && y->index_dim >= y->rope && y->index_dim > 0 &&
               y->index_k_norm_w && y->index_k_norm_b &&
               is_matrix(&y->index_wq_b, (int64_t)y->index_heads * y->index_dim, q_width) &&
               is_matrix(&y->index_wk, y->index_dim, y->hidden) &&
               is_matrix(&y->index_weights, y->index_heads, y->hidden);
    default: return false;
    }
}

static bool is_selection_valid(const int32_t *selected, int64_t n, int64_t topk, int64_t position)
{
    if (n < 0)
        return true;
    if (n == 0 || n > topk)
        return false;
    int64_t before = -1;
    for (int64_t i = 0; i < n; before = selected[i], i++)
        if (selected[i] <= before)
            return false;
    return before <= position;
}

static bool is_step_valid(const cb_attn_layer *y, const cb_attn_step *s)
{
    if (s->n_rows < 0 || (s->kv_format != CB_KV_F32 && s->kv_format != CB_KV_BF16))
        return false;
    if (s->n_rows == 0)
        return true;
    if (!s->position || !s->seq || !s->block_table || !s->kv || !s->x || !s->hidden || s->table_stride <= 0)
        return false;
    if (y->index_kind != CB_INDEX_NONE && (!s->selected || !s->n_selected))
        return false;
    if (y->index_kind == CB_INDEX_FULL && !s->index_k)
        return false;
    for (int64_t t = 0; t < s->n_rows; t++) {
        if (s->position[t] < 0 || s->seq[t] < 0 || s->position[t] / CB_KV_BLOCK >= s->table_stride)
            return false;
        /* The row before, when of the same sequence, has vouched for the blocks up to its own position. */
        bool follows = t > 0 && s->seq[t] == s->seq[t - 1];
        if (follows && s->position[t] <= s->position[t - 1])
            return false;
        for (int64_t p = follows ? s->position[t - 1] : 0; p / CB_KV_BLOCK <= s->position[t] / CB_KV_BLOCK;
             p += CB_KV_BLOCK) {
            int64_t block = cb_kv_block_of(s, t, p);
            if (block < 0 || block >= s->n_blocks)
                return false;
        }
        if (y->index_kind == CB_INDEX_SHARED &&
            !is_selection_valid(s->selected + t * y->index_topk, s->n_selected[t], y->index_topk, s->position[t]))
            return false;
    }
    return true;
}

static int forward(cb_attn_call *c)
{
    int64_t n = c->step->n_rows, half = CB_MAX(1, c->layer->rope / 2);
    c->cosine = cb_scratch(c->pool, n * half * 4);
    c->sine = cb_scratch(c->pool, n * half * 4);
    if (!c->cosine || !c->sine)
        return CB_ENOMEM;
    cb_parallel_for(c->pool, n, 8, angles_job, c);
    int status = CB_OK;
    for (int phase = 0; phase < 2; phase++)
        for (int64_t row0 = 0; row0 < n && status == CB_OK; row0 += ROW_TILE) {
            cb_scratch_mark mark = cb_scratch_begin(c->pool);
            int64_t rows = CB_MIN(ROW_TILE, n - row0);
            status = phase == 0 ? write_cache(c, row0, rows) : attend_tile(c, row0, rows);
            cb_scratch_end(c->pool, mark);
        }
    return status;
}

int cb_attn_forward(cb_pool *pool, const cb_attn_layer *layer, const cb_attn_step *step)
{
    if (!pool || !layer || !step || !is_layer_valid(layer) || !is_step_valid(layer, step))
        return CB_EINVAL;
    if (step->n_rows == 0)
        return CB_OK;
    cb_attn_call call = {.pool = pool, .layer = layer, .step = step};
    cb_pool_hold(pool);
    cb_scratch_mark mark = cb_scratch_begin(pool);
    int status = forward(&call);
    cb_scratch_end(pool, mark);
    cb_pool_release(pool);
    return status;
}
