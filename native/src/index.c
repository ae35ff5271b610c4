/* index.c: the sparse indexer of a full layer: which positions each row attends to.
 *
 * A task scores up to four rows of one sequence against a span of cached index keys; then each row's largest scores
 * are picked. Rows with no more candidates than index_topk take all of them and are never scored.
 */
#include "int8.h"

#include <math.h>
#include <string.h>

#define GROUP_ROWS 4
#define MAX_SPAN 2048                   /* positions of one task */
#define MIN_SPAN 256                    /* below, bringing queries into lanes would show */
#define SCORE_FLOATS ((int64_t)4 << 20) /* scores held at one time, unless a single group needs more */

typedef struct {
    int32_t row[GROUP_ROWS]; /* rows of the call */
    int32_t n_rows;
    int32_t line; /* of the first row's scores */
} index_group;

typedef struct {
    const cb_attn_call *call;
    int64_t row0;
    const float *q; /* [tile rows][heads][dim], turned */
    const float *g; /* [tile rows][heads], scaled */
    const index_group *group;
    int64_t span, spans, stride;
    float *scores; /* [lines][stride] */
    float *room;   /* per thread */
    int64_t room_floats;
} index_arg;

static void turn_job(void *arg, int64_t begin, int64_t end, int thread)
{
    const index_arg *a = arg;
    const cb_attn_call *c = a->call;
    const cb_attn_layer *y = c->layer;
    int64_t half = y->rope / 2;
    (void)thread;
    for (int64_t i = begin; i < end; i++)
        for (int64_t h = 0; h < y->index_heads; h++) {
            float *q = (float *)a->q + (i * y->index_heads + h) * y->index_dim;
            cb_rope(q, y->rope, y->index_rope_interleave, c->cosine + (a->row0 + i) * half,
                    c->sine + (a->row0 + i) * half, q);
        }
}

/* Of a thread: keys (int8: their scales), products, queries and gains of a group of rows. */
static int64_t key_floats(const cb_attn_layer *y) { return CB_KV_BLOCK * cb_lanes(y->index_dim); }

static int64_t query_floats(const cb_attn_layer *y) { return cb_lanes(y->index_heads) * (y->index_dim + CB_GROUP); }

static int64_t room_floats(const cb_attn_layer *y)
{
    int64_t lanes = cb_lanes(y->index_heads), fold = CB_KV_BLOCK;
    return CB_CEIL(key_floats(y) + GROUP_ROWS * (CB_KV_BLOCK * lanes + query_floats(y) + lanes) + fold, 16) * 16;
}

/* Positions [from, to) of a group's rows: the lines of its scores. */
static void score(const index_arg *a, const index_group *group, int64_t from, int64_t to, float *room)
{
    const cb_attn_call *c = a->call;
    const cb_attn_layer *y = c->layer;
    const cb_attn_table *k = cb_kernels.attn;
    int64_t heads = y->index_heads, dim = y->index_dim, lanes = cb_lanes(heads), per_row = query_floats(y);
    float *d = room + key_floats(y), *queries = d + CB_KV_BLOCK * lanes, *g = queries + GROUP_ROWS * per_row;
    for (int64_t i = 0; i < group->n_rows; i++) {
        int64_t tile_row = group->row[i] - a->row0;
        for (int64_t h = 0; h < lanes; h++) {
            const float *q = a->q + (tile_row * heads + h) * dim;
            for (int64_t e = 0; e < dim; e++)
                queries[i * per_row + cb_lane_start(h, dim) + e * CB_LANES] = h < heads ? q[e] : 0.0f;
            g[i * lanes + h] = h < heads ? a->g[tile_row * heads + h] : 0.0f;
        }
    }
    int64_t last = group->row[group->n_rows - 1];
    for (int64_t first = from; first < to; first += CB_KV_BLOCK) {
        int64_t ld = 0, n = CB_MIN(CB_KV_BLOCK, to - first), block = cb_kv_block_of(c->step, last, first);
        const float *keys = cb_block_rows(c->step->index_k, c->step->kv_format, dim, dim, block, n, room, &ld);
        for (int64_t i = 0; i < group->n_rows; i++) {
            int64_t own = CB_MIN(n, (int64_t)c->step->position[group->row[i]] + 1 - first);
            if (own <= 0)
                continue;
            k->scores(queries + i * per_row, lanes, dim, keys, ld, own, d);
            k->index_fold(d, lanes, own, g + i * lanes, a->scores + (group->line + i) * a->stride + first);
        }
    }
}

/* The same of an int8 cache. */
static void score_int8(const index_arg *a, const index_group *group, int64_t from, int64_t to, float *room)
{
    const cb_attn_call *c = a->call;
    const cb_attn_layer *y = c->layer;
    const cb_int8_table *k = cb_kernels.int8;
    int64_t heads = y->index_heads, dim = y->index_dim, ng = cb_groups(dim), n_q = group->n_rows * heads;
    float *d = room + key_floats(y), *fold = d + GROUP_ROWS * CB_KV_BLOCK * cb_lanes(heads), *scale = fold + CB_KV_BLOCK;
    cb_int8_queries q = {.depth = dim, .scale = scale, .sum = (int32_t *)(scale + n_q * ng)};
    q.q = (int8_t *)(q.sum + 2 * n_q * ng);
    for (int64_t j = 0; j < n_q; j++)
        cb_int8_set_query(&q, j, a->q + ((group->row[j / heads] - a->row0) * heads + j % heads) * dim);
    int64_t last = group->row[group->n_rows - 1];
    for (int64_t first = from; first < to; first += CB_KV_BLOCK) {
        int64_t n = CB_MIN(CB_KV_BLOCK, to - first);
        const uint8_t *keys = cb_int8_block_at(c->step->index_k, dim, cb_kv_block_of(c->step, last, first));
        cb_int8_block block = {.keys = keys, .key_scale = room};
        cb_int8_widen(cb_int8_key_scales(keys, dim), ng * CB_KV_BLOCK, room);
        k->scores(&q, n_q, &block, d, CB_KV_BLOCK);
        for (int64_t i = 0; i < group->n_rows; i++) {
            int64_t own = CB_MIN(n, (int64_t)c->step->position[group->row[i]] + 1 - first);
            if (own <= 0)
                continue;
            k->index_fold(d + i * heads * CB_KV_BLOCK, heads, a->g + (group->row[i] - a->row0) * heads, fold);
            memcpy(a->scores + (group->line + i) * a->stride + first, fold, (size_t)own * sizeof(float));
        }
    }
}

static void score_job(void *arg, int64_t begin, int64_t end, int thread)
{
    const index_arg *a = arg;
    for (int64_t item = begin; item < end; item++) {
        const index_group *group = &a->group[item / a->spans];
        int64_t from = item % a->spans * a->span, last = group->row[group->n_rows - 1];
        int64_t to = CB_MIN(from + a->span, (int64_t)a->call->step->position[last] + 1);
        bool int8 = a->call->step->kv_format == CB_KV_INT8;
        (int8 ? score_int8 : score)(a, group, from, to, a->room + thread * a->room_floats);
    }
}

static void pick_job(void *arg, int64_t begin, int64_t end, int thread)
{
    const index_arg *a = arg;
    const cb_attn_step *s = a->call->step;
    int64_t topk = a->call->layer->index_topk;
    (void)thread;
    for (int64_t item = begin; item < end; item++) {
        const index_group *group = &a->group[item / GROUP_ROWS];
        int64_t i = item % GROUP_ROWS;
        if (i >= group->n_rows)
            continue;
        int64_t t = group->row[i];
        s->n_selected[t] = (int32_t)cb_topk(a->scores + (group->line + i) * a->stride, (int64_t)s->position[t] + 1,
                                            topk, s->selected + t * topk);
    }
}

int cb_index_select(const cb_attn_call *c, int64_t row0, int64_t n, const float *q_in, int64_t q_width, const float *h)
{
    const cb_attn_layer *y = c->layer;
    const cb_attn_step *s = c->step;
    int64_t longest = 0;
    for (int64_t t = row0; t < row0 + n; t++) {
        s->n_selected[t] = -1;
        if (s->position[t] >= y->index_topk)
            longest = CB_MAX(longest, (int64_t)s->position[t] + 1);
    }
    if (longest == 0)
        return CB_OK;

    cb_scratch_mark mark = cb_scratch_begin(c->pool);
    int64_t q_floats = (int64_t)y->index_heads * y->index_dim;
    int64_t stride = CB_CEIL(longest, 16) * 16, threads = cb_pool_threads(c->pool);
    int64_t span = longest * CB_CEIL(n, GROUP_ROWS) / (4 * threads);
    span = CB_CEIL(CB_MAX(MIN_SPAN, CB_MIN(MAX_SPAN, span)), CB_KV_BLOCK) * CB_KV_BLOCK;
    int64_t max_lines = CB_MAX(GROUP_ROWS, CB_MIN(n, SCORE_FLOATS / stride));
    float *q = cb_scratch(c->pool, n * q_floats * 4), *g = cb_scratch(c->pool, n * y->index_heads * 4);
    float *scores = cb_scratch(c->pool, max_lines * stride * 4);
    index_group *group = cb_scratch(c->pool, n * (int64_t)sizeof *group);
    index_arg job = {.call = c, .row0 = row0, .q = q, .g = g, .group = group, .span = span, .spans = CB_CEIL(longest, span),
                     .stride = stride, .scores = scores, .room_floats = room_floats(y)};
    job.room = cb_scratch(c->pool, threads * job.room_floats * 4);
    int status = q && g && scores && group && job.room ? CB_OK : CB_ENOMEM;
    if (status == CB_OK)
        status = cb_linear_internal(c->pool, &y->index_wq_b, q_in, q_width, n, q, q_floats, false);
    if (status == CB_OK)
        status = cb_linear_internal(c->pool, &y->index_weights, h, y->hidden, n, g, y->index_heads, false);
    if (status == CB_OK) {
        float scale = (float)(1.0 / sqrt((double)y->index_heads) / sqrt((double)y->index_dim));
        for (int64_t i = 0; i < n * y->index_heads; i++)
            g[i] = g[i] * scale;
        cb_parallel_for(c->pool, n, 4, turn_job, &job);

        for (int64_t t = row0; t < row0 + n;) {
            int64_t n_groups = 0, lines = 0;
            for (; t < row0 + n && lines < max_lines; t++) {
                if (s->position[t] < y->index_topk)
                    continue;
                index_group *last = n_groups ? &group[n_groups - 1] : NULL;
                if (last && last->n_rows < GROUP_ROWS && s->seq[last->row[0]] == s->seq[t])
                    last->row[last->n_rows++] = (int32_t)t;
                else
                    group[n_groups++] = (index_group){.row = {(int32_t)t}, .n_rows = 1, .line = (int32_t)lines};
                lines++;
            }
            int64_t cost = GROUP_ROWS * CB_MIN(span, longest) * cb_lanes(y->index_heads) * y->index_dim;
            cb_parallel_for(c->pool, n_groups * job.spans, cb_attn_grain(cost), score_job, &job);
            cb_parallel_for(c->pool, n_groups * GROUP_ROWS, cb_attn_grain(100 * longest), pick_job, &job);
        }
    }
    cb_scratch_end(c->pool, mark);
    return status;
}
