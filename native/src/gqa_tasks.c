/* gqa_tasks.c: queries meet keys.
 *
 * A task is a few rows of one sequence times the query heads of one key head; it walks the rows' keys in blocks of 64
 * positions, so a block is widened once for all of them. When there are fewer such tasks than threads, blocks are computed
 * apart and joined afterwards in the same order. Nobody splits a sum, so any number of threads gives the same bits.
 */
#include "gqa.h"
#include "int8.h"

#include <math.h>
#include <string.h>

#define TASK_FLOATS 8192 /* queries times head_dim of one task: with keys and values it stays in the second-level cache */
#define TASK_QUERIES 64
#define VALUE_PAD 16 /* rows of values a power of two apart would share a few sets of the first-level cache */
#define MIN_SPLIT_BLOCKS 4
#define WAVE_FLOATS ((int64_t)4 << 20) /* sums of blocks computed apart at one time */

typedef struct {
    int32_t row, n_rows; /* rows of the call that a task serves */
} row_group;

typedef struct {
    const cb_gqa_call *call;
    int64_t row0;
    float *q; /* [tile rows][H][head_dim]: queries in, results out */
    const row_group *group;
    int64_t per_key; /* query heads of a key head */
    float *room;     /* per thread */
    int64_t room_floats, task_rows;
} attend_arg;

/* Where a thread's room holds what, for up to n_q queries. */
typedef struct {
    float *keys, *values, *q, *s, *z, *m, *l, *mb, *lb, *f, *g;
    int64_t ldv;
} attend_room;

static int64_t lay_out_room(const cb_gqa_layer *y, int64_t n_q, float *base, attend_room *r)
{
    int64_t dim = y->head_dim, wide = cb_lanes(dim), at = 0;
    r->ldv = wide + VALUE_PAD;
    float **part[] = {&r->keys, &r->values, &r->q, &r->s, &r->z, &r->m, &r->l, &r->mb, &r->lb, &r->f, &r->g};
    int64_t floats[] = {CB_KV_BLOCK * dim, CB_KV_BLOCK * r->ldv, n_q * dim, n_q * CB_KV_BLOCK, n_q * wide,
                        n_q, n_q, n_q, n_q, n_q, n_q};
    for (size_t i = 0; i < sizeof floats / sizeof *floats; i++) {
        *part[i] = base ? base + at : NULL;
        at += cb_lanes(floats[i]);
    }
    return at;
}

/* Positions of block b that row t sees: [*from, *to) within the block; false when there are none. */
static bool range_of(const cb_gqa_call *c, int64_t t, int64_t b, int64_t *from, int64_t *to)
{
    int64_t position = c->step->position[t];
    *from = CB_MAX(0, cb_gqa_first_key(c->layer, position) - b * CB_KV_BLOCK);
    *to = CB_MIN(CB_KV_BLOCK, position + 1 - b * CB_KV_BLOCK);
    return *from < *to;
}

/* Keys f32[head_dim][64] and the first n values f32[n][*ldv] of a block: where they lie, or widened into the room. */
static void load_block(const cb_gqa_call *c, int64_t block, int64_t kv_head, int64_t n, const attend_room *r,
                       const float **keys, const float **values, int64_t *ldv)
{
    const cb_gqa_layer *y = c->layer;
    int64_t dim = y->head_dim;
    size_t start = cb_gqa_start(y, block, kv_head), values_at = start + (size_t)(CB_KV_BLOCK * dim);
    *keys = r->keys;
    *values = r->values;
    *ldv = r->ldv;
    if (c->step->kv_format == CB_KV_BF16) {
        const uint16_t *kv = c->step->kv;
        cb_kernels.attn->widen(kv + start, CB_KV_BLOCK * dim, r->keys);
        for (int64_t p = 0; p < n; p++)
            cb_kernels.attn->widen(kv + values_at + p * dim, dim, r->values + p * r->ldv);
        return;
    }
    const float *kv = c->step->kv;
    *keys = kv + start;
    for (int64_t p = 0; p < n; p++)
        memcpy(r->values + p * r->ldv, kv + values_at + p * dim, (size_t)dim * sizeof(float));
}

static void load_queries(const attend_arg *a, const row_group *group, int64_t kv_head, float *q)
{
    const cb_gqa_layer *y = a->call->layer;
    int64_t n = a->per_key * y->head_dim;
    for (int64_t i = 0; i < group->n_rows; i++)
        memcpy(q + i * n, a->q + ((group->row + i - a->row0) * y->n_heads + kv_head * a->per_key) * y->head_dim,
               (size_t)n * sizeof(float));
}

/* Nothing seen yet; a sink counts as a first block of one key without a value. */
static void begin_query(const cb_gqa_layer *y, int64_t head, float *m, float *l)
{
    *m = y->sinks ? y->sinks[head] : -INFINITY;
    *l = y->sinks ? 1.0f : 0.0f;
}

/* z / l of one head takes the place of its query. */
static void store_result(const attend_arg *a, int64_t t, int64_t head, const float *z, float l)
{
    const cb_gqa_layer *y = a->call->layer;
    float *out = a->q + ((t - a->row0) * y->n_heads + head) * y->head_dim;
    for (int64_t e = 0; e < y->head_dim; e++)
        out[e] = z[e] / l;
}

/* Scores of queries of rows [t, t + n_rows), all of which see some of block b, and each query's softmax over the block. */
static void score_rows(const attend_arg *a, int64_t t, int64_t n_rows, int64_t b, const float *q, const float *keys, float *s,
                       float *mb, float *lb)
{
    const cb_gqa_call *c = a->call;
    int64_t G = a->per_key, from, to, lowest, highest;
    range_of(c, t, b, &lowest, &to);
    range_of(c, t + n_rows - 1, b, &from, &highest);
    lowest = lowest / CB_LANES * CB_LANES;
    highest = CB_CEIL(highest, CB_LANES) * CB_LANES;
    cb_kernels.gqa->scores(q, n_rows * G, c->layer->head_dim, keys, lowest, highest, s);
    for (int64_t i = 0; i < n_rows; i++) {
        range_of(c, t + i, b, &from, &to);
        for (int64_t j = i * G; j < (i + 1) * G; j++)
            cb_kernels.gqa->softmax(s + j * CB_KV_BLOCK, from, to, mb + j, lb + j);
    }
}

static void attend(const attend_arg *a, const row_group *group, int64_t kv_head, float *base)
{
    const cb_gqa_call *c = a->call;
    const cb_gqa_layer *y = c->layer;
    int64_t G = a->per_key, dim = y->head_dim, wide = cb_lanes(dim), n_q = group->n_rows * G;
    int64_t first_row = group->row, end_row = first_row + group->n_rows;
    attend_room r;
    lay_out_room(y, a->task_rows * G, base, &r);
    load_queries(a, group, kv_head, r.q);
    for (int64_t j = 0; j < n_q; j++)
        begin_query(y, kv_head * G + j % G, r.m + j, r.l + j);
    memset(r.z, 0, (size_t)(n_q * wide) * sizeof(float));

    int64_t last = c->step->position[end_row - 1] / CB_KV_BLOCK;
    int64_t from, to, ldv;
    for (int64_t b = cb_gqa_first_key(y, c->step->position[first_row]) / CB_KV_BLOCK; b <= last; b++) {
        int64_t t0 = first_row, t1 = end_row; /* rows that see some of the block: positions rise, so they are neighbours */
        while (t0 < t1 && !range_of(c, t0, b, &from, &to))
            t0++;
        while (t1 > t0 && !range_of(c, t1 - 1, b, &from, &to))
            t1--;
        if (t0 == t1)
            continue;
        const float *keys, *values;
        range_of(c, t1 - 1, b, &from, &to);
        load_block(c, cb_kv_block_of(c->step, t0, b * CB_KV_BLOCK), kv_head, to, &r, &keys, &values, &ldv);
        int64_t j0 = (t0 - first_row) * G, n = (t1 - t0) * G;
        int64_t since = cb_now_ns();
        score_rows(a, t0, t1 - t0, b, r.q + j0 * dim, keys, r.s, r.mb, r.lb);
        cb_phase_lap(c->pool, CB_PHASE_SCORES, &since);
        cb_kernels.gqa->join(r.mb, r.lb, n, r.m + j0, r.l + j0, r.f, r.g);
        /* Rows with the same range share the loads of the values. */
        for (int64_t t = t0, next; t < t1; t = next) {
            int64_t other_from, other_to;
            range_of(c, t, b, &from, &to);
            for (next = t + 1; next < t1; next++) {
                range_of(c, next, b, &other_from, &other_to);
                if (other_from != from || other_to != to)
                    break;
            }
            int64_t j = (t - t0) * G;
            cb_kernels.gqa->mix(r.s + j * CB_KV_BLOCK, (next - t) * G, from, to, values, ldv, wide, r.f + j, r.g + j,
                               r.z + (j0 + j) * wide);
        }
        cb_phase_lap(c->pool, CB_PHASE_VALUES, &since);
    }
    for (int64_t j = 0; j < n_q; j++)
        store_result(a, first_row + j / G, kv_head * G + j % G, r.z + j * wide, r.l[j]);
}

static void attend_job(void *arg, int64_t begin, int64_t end, int thread)
{
    const attend_arg *a = arg;
    int64_t kv_heads = a->call->layer->n_kv_heads;
    for (int64_t item = begin; item < end; item++)
        attend(a, &a->group[item / kv_heads], item % kv_heads, a->room + thread * a->room_floats);
}

/* ---- few rows, long contexts, many threads: blocks apart, joined in order ------------------------------------- */

typedef struct {
    attend_arg a;        /* groups of one row */
    int64_t wave0, wave; /* first block and number of blocks of this wave, counted from each row's first */
    float *z, *m, *l;    /* per query: [wide], one, one */
    float *part;         /* per task and block of the wave: mb [G], lb [G], zb [G][wide] */
    int64_t part_floats;
} split_arg;

static int64_t first_block(const cb_gqa_call *c, int64_t t)
{
    return cb_gqa_first_key(c->layer, c->step->position[t]) / CB_KV_BLOCK;
}

static int64_t n_blocks_of(const cb_gqa_call *c, int64_t t)
{
    return c->step->position[t] / CB_KV_BLOCK + 1 - first_block(c, t);
}

static void split_block_job(void *arg, int64_t begin, int64_t end, int thread)
{
    const split_arg *s = arg;
    const cb_gqa_call *c = s->a.call;
    const cb_gqa_layer *y = c->layer;
    int64_t G = s->a.per_key, wide = cb_lanes(y->head_dim);
    attend_room r;
    lay_out_room(y, G, s->a.room + thread * s->a.room_floats, &r);
    for (int64_t item = begin; item < end; item++) {
        int64_t task = item / s->wave, nth = s->wave0 + item % s->wave;
        const row_group *group = &s->a.group[task / y->n_kv_heads];
        int64_t t = group->row, kv_head = task % y->n_kv_heads, from, to, ldv;
        if (nth >= n_blocks_of(c, t))
            continue;
        int64_t b = first_block(c, t) + nth;
        const float *keys, *values;
        float *part = s->part + item * s->part_floats;
        range_of(c, t, b, &from, &to);
        load_queries(&s->a, group, kv_head, r.q);
        load_block(c, cb_kv_block_of(c->step, t, b * CB_KV_BLOCK), kv_head, to, &r, &keys, &values, &ldv);
        int64_t since = cb_now_ns();
        score_rows(&s->a, t, 1, b, r.q, keys, r.s, part, part + G);
        cb_phase_lap(c->pool, CB_PHASE_SCORES, &since);
        cb_kernels.gqa->mix(r.s, G, from, to, values, ldv, wide, NULL, NULL, part + 2 * G);
        cb_phase_lap(c->pool, CB_PHASE_VALUES, &since);
    }
}

/* One query takes in the wave's blocks, in the order and with the operations of `attend`. */
static void split_join_job(void *arg, int64_t begin, int64_t end, int thread)
{
    const split_arg *s = arg;
    const cb_gqa_call *c = s->a.call;
    const cb_gqa_layer *y = c->layer;
    int64_t G = s->a.per_key, wide = cb_lanes(y->head_dim);
    (void)thread;
    for (int64_t item = begin; item < end; item++) {
        int64_t task = item / G, j = item % G, t = s->a.group[task / y->n_kv_heads].row, n = n_blocks_of(c, t);
        int64_t head = task % y->n_kv_heads * G + j;
        float *z = s->z + item * wide, *m = s->m + item, *l = s->l + item, f, g;
        if (s->wave0 == 0) {
            begin_query(y, head, m, l);
            memset(z, 0, (size_t)wide * sizeof(float));
        }
        for (int64_t nth = s->wave0; nth < CB_MIN(n, s->wave0 + s->wave); nth++) {
            const float *part = s->part + (task * s->wave + nth - s->wave0) * s->part_floats;
            cb_kernels.gqa->join(part + j, part + G + j, 1, m, l, &f, &g);
            cb_kernels.attn->join(z, part + 2 * G + j * wide, wide, f, g);
        }
        if (n > s->wave0 && n <= s->wave0 + s->wave)
            store_result(&s->a, t, head, z, *l);
    }
}

static int attend_split(const attend_arg *a, int64_t n_groups, int64_t n_blocks)
{
    const cb_gqa_call *c = a->call;
    int64_t G = a->per_key, wide = cb_lanes(c->layer->head_dim), n_tasks = n_groups * c->layer->n_kv_heads;
    split_arg s = {.a = *a, .part_floats = G * (wide + 2)};
    int64_t wave = CB_MAX(cb_pool_threads(c->pool), WAVE_FLOATS / (n_tasks * s.part_floats));
    wave = CB_MIN(n_blocks, wave);
    s.z = cb_scratch(c->pool, n_tasks * G * wide * 4);
    s.m = cb_scratch(c->pool, n_tasks * G * 4);
    s.l = cb_scratch(c->pool, n_tasks * G * 4);
    s.part = cb_scratch(c->pool, n_tasks * wave * s.part_floats * 4);
    if (!s.z || !s.m || !s.l || !s.part)
        return CB_ENOMEM;
    for (s.wave0 = 0; s.wave0 < n_blocks; s.wave0 += s.wave) {
        s.wave = CB_MIN(wave, n_blocks - s.wave0);
        cb_parallel_for(c->pool, n_tasks * s.wave, cb_attn_grain(2 * CB_KV_BLOCK * wide * G), split_block_job, &s);
        cb_parallel_for(c->pool, n_tasks * G, cb_attn_grain(s.wave * wide), split_join_job, &s);
    }
    return CB_OK;
}

/* ---- tasks -------------------------------------------------------------------------------------------------- */

/* Consecutive rows of one sequence share a task's blocks. Returns the number of groups. */
static int64_t group_rows(const cb_gqa_call *c, int64_t row0, int64_t n, int64_t at_most, row_group *out)
{
    int64_t n_groups = 0;
    for (int64_t t = row0; t < row0 + n; t++) {
        row_group *g = n_groups ? &out[n_groups - 1] : NULL;
        if (g && g->n_rows < at_most && c->step->seq[t] == c->step->seq[g->row])
            g->n_rows++;
        else
            out[n_groups++] = (row_group){(int32_t)t, 1};
    }
    return n_groups;
}

/* ---- int8 ------------------------------------------------------------------------------------------------------- */

typedef struct {
    const cb_gqa_call *call;
    float *q; /* [rows][H][head_dim]: queries in, results out */
} int8_arg;

static float *int8_result(const void *arg, int64_t i, int64_t head)
{
    const int8_arg *a = arg;
    const cb_gqa_layer *y = a->call->layer;
    return a->q + (i * y->n_heads + head) * y->head_dim;
}

static void int8_query(const void *arg, int64_t i, int64_t head, float *to)
{
    const int8_arg *a = arg;
    memcpy(to, int8_result(arg, i, head), (size_t)a->call->layer->head_dim * sizeof(float));
}

static void int8_block(const void *arg, int64_t block, int64_t kv_head, cb_int8_block *b, float *scales)
{
    const int8_arg *a = arg;
    int64_t dim = a->call->layer->head_dim, n = cb_groups(dim) * CB_KV_BLOCK;
    const uint8_t *head = cb_gqa_int8_start(a->call->layer, a->call->step->kv, block, kv_head);
    cb_int8_widen(cb_int8_head_scales(head, dim), 2 * n, scales);
    *b = (cb_int8_block){head, scales, cb_int8_head_values(head, dim), scales + n, 4 * cb_quads(dim), NULL};
}

static int attend_int8(const cb_gqa_call *c, int64_t row0, int64_t n, float *q)
{
    const cb_gqa_layer *y = c->layer;
    int8_arg arg = {c, q};
    cb_int8_attention a = {
        .pool = c->pool, .step = c->step, .row0 = row0, .n = n, .n_heads = y->n_heads, .n_kv_heads = y->n_kv_heads,
        .depth = y->head_dim, .dim = y->head_dim, .window = y->window, .sinks = y->sinks, .arg = &arg, .query = int8_query,
        .result = int8_result, .block = int8_block};
    return cb_int8_attend(&a);
}

int cb_gqa_attend(const cb_gqa_call *c, int64_t row0, int64_t n, float *q)
{
    const cb_gqa_layer *y = c->layer;
    if (c->step->kv_format == CB_KV_INT8)
        return attend_int8(c, row0, n, q);
    int64_t threads = cb_pool_threads(c->pool), G = y->n_heads / y->n_kv_heads, most_blocks = 0;
    for (int64_t t = row0; t < row0 + n; t++)
        most_blocks = CB_MAX(most_blocks, n_blocks_of(c, t));
    bool split = threads > 1 && n * y->n_kv_heads < 2 * threads && most_blocks >= MIN_SPLIT_BLOCKS;
    int64_t rows = CB_MIN(TASK_QUERIES / G, TASK_FLOATS / ((int64_t)G * y->head_dim));
    rows = split ? 1 : CB_MAX(1, CB_MIN(rows, n * y->n_kv_heads / (2 * threads)));

    row_group *group = cb_scratch(c->pool, n * (int64_t)sizeof *group);
    attend_arg job = {.call = c, .row0 = row0, .q = q, .group = group, .per_key = G, .task_rows = rows};
    attend_room unused;
    job.room_floats = lay_out_room(y, rows * G, NULL, &unused);
    job.room = cb_scratch(c->pool, threads * job.room_floats * 4);
    if (!group || !job.room)
        return CB_ENOMEM;
    int64_t n_groups = group_rows(c, row0, n, rows, group);
    if (split)
        return attend_split(&job, n_groups, most_blocks);
    int64_t cost = 2 * most_blocks * CB_KV_BLOCK * y->head_dim * G * rows;
    cb_parallel_for(c->pool, n_groups * y->n_kv_heads, cb_attn_grain(cost), attend_job, &job);
    return CB_OK;
}
