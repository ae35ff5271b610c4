/* attn_tasks.c: queries meet keys.
 *
 * A task is a few rows of one sequence (or one row with its own selection) times a block of heads; it walks the row's
 * keys in blocks of 64, so a block is widened once for all rows and heads of the task. When there are fewer such tasks
 * than threads, blocks are computed apart and joined afterwards in the same order. Nobody splits a sum, so any number of
 * threads gives the same bits.
 */
#include "attn.h"
#include "cbmath.h"

#include <string.h>

#define TASK_LANES 64 /* rows times heads of one task: queries and sums stay in the second-level cache */
#define TASK_ROWS 4
#define MIN_SPLIT_BLOCKS 4
#define WAVE_PARTS 512   /* blocks computed apart at one time: 16 MiB of sums at 16 heads of 512 */
#define PREFETCH_ROWS 12 /* selected rows lie anywhere: ask for them this many ahead */

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

static int64_t depth_of(const cb_attn_layer *y) { return (int64_t)y->kv_rank + y->rope; }

static int64_t lay_out_room(const cb_attn_call *c, int64_t lanes, int64_t rows, float *base, attend_room *r)
{
    const cb_attn_layer *y = c->layer;
    int64_t depth = depth_of(y), rank = cb_lanes(y->kv_rank), at = 0;
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
        at += rank * lanes;
        r->m[i] = base + at;
        r->l[i] = base + at + lanes;
        at += 2 * lanes;
    }
    return at;
}

void cb_latent_query(const cb_attn_call *c, int64_t row0, int64_t i, int64_t h, const float *q, const float *latent, float *to,
                     int64_t stride)
{
    const cb_attn_layer *y = c->layer;
    int64_t rank = y->kv_rank, half = y->rope / 2, t = row0 + i;
    float scale = y->softmax_scale;
    const float *folded = latent + (i * y->n_heads + h) * rank;
    for (int64_t k = 0; k < rank; k++)
        to[k * stride] = folded[k] * scale;
    float turned[CB_MAX_ROPE];
    cb_rope(q + (i * y->n_heads + h) * (y->nope + y->rope) + y->nope, y->rope, y->rope_interleave, c->cosine + t * half,
            c->sine + t * half, turned);
    for (int64_t k = 0; k < y->rope; k++)
        to[(rank + k) * stride] = turned[k] * scale;
}

/* Queries of heads [h0, h0 + lanes) of tile row i, one head per lane. */
static void load_query(const attend_arg *a, int64_t i, int64_t h0, float *q_t)
{
    const cb_attn_layer *y = a->call->layer;
    int64_t depth = depth_of(y);
    for (int64_t j = 0; j < a->lanes; j++) {
        bool is_head = h0 + j < y->n_heads;
        float *lane = q_t + cb_lane_start(j, depth);
        if (is_head)
            cb_latent_query(a->call, a->row0, i, h0 + j, a->q, a->latent, lane, CB_LANES);
        for (int64_t k = 0; !is_head && k < depth; k++)
            lane[k * CB_LANES] = 0.0f;
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

static void prefetch_row(const void *cache, int format, int64_t width, int64_t block, int64_t offset)
{
    int64_t bytes = cb_kv_row_bytes(format, width);
    const char *row = (const char *)cache + (block * CB_KV_BLOCK + offset) * bytes;
    for (int64_t at = 0; at < bytes; at += 64)
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

/* Keys [first, first + n) of row t's list, whose length is `length`; *ld gets their stride. */
static const float *load_keys(const cb_attn_call *c, int64_t t, const int32_t *selection, int64_t first, int64_t n, int64_t length,
                              const attend_room *r, int64_t *ld)
{
    const cb_attn_step *s = c->step;
    int64_t width = depth_of(c->layer);
    if (!selection)
        return cb_block_rows(s->kv, s->kv_format, width, cb_lanes(c->layer->kv_rank), cb_kv_block_of(s, t, first), n, r->keys, ld);
    *ld = cb_lanes(width);
    for (int64_t i = 0; i < n; i++) {
        int64_t position = selection[first + i];
        if (first + i + PREFETCH_ROWS < length) {
            int64_t ahead = selection[first + i + PREFETCH_ROWS];
            prefetch_row(s->kv, s->kv_format, width, cb_kv_block_of(s, t, ahead), ahead % CB_KV_BLOCK);
        }
        position_row(s->kv, s->kv_format, width, cb_kv_block_of(s, t, position), position % CB_KV_BLOCK, r->keys + i * *ld);
    }
    return r->keys;
}

/* A row's queries meet the first n keys of a block: m, l and z move on. */
static void meet(const attend_arg *a, const attend_room *r, const float *q_t, const float *keys, int64_t ldk, int64_t n,
                 int64_t heads, bool first, float *m, float *l, float *z)
{
    const cb_attn_layer *y = a->call->layer;
    const cb_attn_table *k = cb_kernels.attn;
    int64_t since = cb_now_ns();
    k->scores(q_t, a->lanes, depth_of(y), keys, ldk, n, r->scores);
    k->softmax(r->scores, a->lanes, n, first, m, l, r->f, r->g);
    cb_phase_lap(a->call->pool, CB_PHASE_SCORES, &since);
    k->mix(r->scores, a->lanes, n, keys, ldk, cb_lanes(y->kv_rank), heads, first, r->f, r->g, z);
    cb_phase_lap(a->call->pool, CB_PHASE_VALUES, &since);
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
    int64_t lanes = a->lanes, rank = cb_lanes(y->kv_rank), heads = CB_MIN(lanes, y->n_heads - h0);
    attend_room r;
    lay_out_room(c, lanes, group->n_rows, base, &r);
    for (int64_t i = 0; i < group->n_rows; i++)
        load_query(a, group->row + i - a->row0, h0, r.q_t[i]);

    const int32_t *selection;
    int64_t last = group->row + group->n_rows - 1, longest = keys_of(c, last, &selection);
    for (int64_t first = 0; first < longest; first += CB_KV_BLOCK) {
        int64_t ldk, n = CB_MIN(CB_KV_BLOCK, longest - first);
        const float *keys = load_keys(c, last, selection, first, n, longest, &r, &ldk);
        for (int64_t i = 0; i < group->n_rows; i++) {
            const int32_t *unused;
            int64_t own = CB_MIN(n, keys_of(c, group->row + i, &unused) - first);
            if (own > 0)
                meet(a, &r, r.q_t[i], keys, ldk, own, heads, first == 0, r.m[i], r.l[i], r.z[i]);
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
    (void)thread;
    for (int64_t task = begin; task < end; task++)
        load_query(&s->a, s->a.group[task / s->a.head_blocks].row - s->a.row0, task % s->a.head_blocks * s->a.lanes,
                   s->q_t + task * depth_of(s->a.call->layer) * s->a.lanes);
}

static void split_block_job(void *arg, int64_t begin, int64_t end, int thread)
{
    const split_arg *s = arg;
    const cb_attn_call *c = s->a.call;
    const cb_attn_layer *y = c->layer;
    int64_t lanes = s->a.lanes;
    attend_room r;
    lay_out_room(c, lanes, 0, s->a.room + thread * s->a.room_floats, &r);
    for (int64_t item = begin; item < end; item++) {
        int64_t task = item / s->wave, first = (s->wave0 + item % s->wave) * CB_KV_BLOCK;
        int64_t t = s->a.group[task / s->a.head_blocks].row, h0 = task % s->a.head_blocks * lanes;
        const int32_t *selection;
        int64_t ldk, length = keys_of(c, t, &selection), n = CB_MIN(CB_KV_BLOCK, length - first);
        if (n <= 0)
            continue;
        float *part = s->part + item * s->part_floats;
        const float *keys = load_keys(c, t, selection, first, n, length, &r, &ldk);
        meet(&s->a, &r, s->q_t + task * depth_of(y) * lanes, keys, ldk, n, CB_MIN(lanes, y->n_heads - h0), true, part, part + lanes,
             part + 2 * lanes);
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
    int64_t depth = depth_of(y), rank = cb_lanes(y->kv_rank), lanes = a->lanes;
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

int cb_attend_rows(const cb_attn_call *c, int64_t row0, int64_t n, const float *q, float *latent)
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
    job.room_floats = CB_CEIL(lay_out_room(c, lanes, split ? 0 : share, NULL, &unused), 16) * 16;
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
