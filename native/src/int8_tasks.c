/* int8_tasks.c: queries meet the keys of an int8 cache, latent or grouped.
 *
 * A task is a few rows of one sequence (or one row with its own selection) times the query heads of one key head; it walks
 * their keys in spans of 256, whose blocks are laid out once for all of them. When there are fewer such tasks than threads,
 * spans are computed apart and joined afterwards in the same order. Nobody splits a sum, so any number of threads gives the
 * same bits. */
#include "int8.h"
#include "gqa.h"

#include <math.h>
#include <string.h>

#define TASK_FLOATS 65536 /* sums of one task: they stay in the second-level cache */
#define TASK_ROWS 16
#define MIN_SPLIT_SPANS 2
#define LEAST_HEADS 16 /* of a part of the heads that read one key head */
#define WAVE_FLOATS ((int64_t)4 << 20) /* sums of spans computed apart at one time */

typedef struct {
    int32_t row, n_rows; /* rows of the call that a task serves */
} row_group;

typedef struct {
    const cb_int8_attention *a;
    const row_group *group;
    int64_t per_task, parts;  /* query heads of a task; tasks that share a key head */
    int64_t ng, groups, wide; /* groups of the depth and of the components, these padded */
    int64_t task_rows;
    char *room; /* per thread */
    int64_t room_bytes;
} attend_arg;

/* Where a thread's room holds what, for up to n_q queries. */
typedef struct {
    float *scales[CB_SPAN_BLOCKS], *u, *step, *query, *s, *z, *m, *l, *mb, *lb, *f, *g;
    cb_int8_queries q;
} attend_room;

static void *take(char *base, int64_t *at, int64_t bytes)
{
    void *found = base ? base + *at : NULL;
    *at += CB_CEIL(bytes, 64) * 64;
    return found;
}

static cb_int8_queries take_queries(const attend_arg *t, int64_t n_q, char *base, int64_t *at)
{
    cb_int8_queries q = {.depth = t->a->depth};
    q.q = take(base, at, n_q * t->ng * CB_GROUP);
    q.scale = take(base, at, n_q * t->ng * 4);
    q.sum = take(base, at, 2 * n_q * t->ng * 4);
    return q;
}

static int64_t lay_out_room(const attend_arg *t, int64_t n_q, char *base, attend_room *r)
{
    const cb_int8_attention *a = t->a;
    int64_t at = 0;
    for (int i = 0; i < CB_SPAN_BLOCKS; i++)
        r->scales[i] = take(base, &at, CB_KV_BLOCK * (t->ng + t->groups) * 4);
    r->u = take(base, &at, CB_SPAN * t->groups * 4);
    r->step = take(base, &at, t->groups * 4);
    r->query = take(base, &at, a->depth * 4);
    r->s = take(base, &at, n_q * CB_SPAN * 4);
    r->z = take(base, &at, n_q * t->wide * 4);
    float **part[] = {&r->m, &r->l, &r->mb, &r->lb, &r->f, &r->g};
    for (size_t i = 0; i < sizeof part / sizeof *part; i++)
        *part[i] = take(base, &at, n_q * 4);
    r->q = take_queries(t, n_q, base, &at);
    return at;
}

/* ---- what a row sees ------------------------------------------------------------------------------------------ */

/* A row's selection, or NULL when it sees the positions of its window. */
static const int32_t *selection_of(const cb_int8_attention *a, int64_t t)
{
    return a->selected && a->n_selected[t] >= 0 ? a->selected + t * a->topk : NULL;
}

/* Keys [*first, *end) of a row: places in its selection, or positions. They are cut into spans at multiples of 256. */
static void keys_of(const cb_int8_attention *a, int64_t t, int64_t *first, int64_t *end)
{
    int64_t position = a->step->position[t];
    bool chosen = selection_of(a, t) != NULL;
    *first = chosen || a->window <= 0 ? 0 : CB_MAX(0, position - a->window + 1);
    *end = chosen ? a->n_selected[t] : position + 1;
}

static int64_t first_span(const cb_int8_attention *a, int64_t t)
{
    int64_t first, end;
    keys_of(a, t, &first, &end);
    return first / CB_SPAN;
}

static int64_t n_spans_of(const cb_int8_attention *a, int64_t t)
{
    int64_t first, end;
    keys_of(a, t, &first, &end);
    return CB_CEIL(end, CB_SPAN) - first / CB_SPAN;
}

/* Places of span b that row t sees: [*from, *to) within it; false when there are none. */
static bool range_of(const cb_int8_attention *a, int64_t t, int64_t b, int64_t *from, int64_t *to)
{
    int64_t first, end;
    keys_of(a, t, &first, &end);
    *from = CB_MAX(0, first - b * CB_SPAN);
    *to = CB_MIN(CB_SPAN, end - b * CB_SPAN);
    return *from < *to;
}

/* ---- blocks --------------------------------------------------------------------------------------------------- */

static const void *block_at(const cb_int8_attention *a, int64_t t, int64_t position)
{
    int64_t bytes = CB_KV_BLOCK * cb_kv_row_bytes(CB_KV_INT8, a->depth);
    return (const char *)a->step->kv + cb_kv_block_of(a->step, t, position) * bytes;
}

static void prefetch_row(const cb_int8_attention *a, int64_t t, int64_t position)
{
    const void *block = block_at(a, t, position);
    const uint8_t *row = cb_int8_row(block, a->depth, position % CB_KV_BLOCK);
    for (int64_t at = 0; at < a->depth; at += 64)
        __builtin_prefetch(row + at, 0, 2); /* to the second-level cache: there are many */
    __builtin_prefetch(cb_int8_row_scales(block, a->depth, position % CB_KV_BLOCK), 0, 2);
}

/* Some blocks of a row's keys; a latent's rows stand beside it. */
typedef struct {
    cb_int8_block block[CB_SPAN_BLOCKS];
    const uint8_t *rows[CB_SPAN_BLOCKS][CB_KV_BLOCK];
} span;

/* Latents of n places of row t's keys, from `place` on. Their lines are read group by group, which no processor foresees: those
 * of the places `ahead` of them are asked for. */
static void load_latents(const attend_arg *arg, int64_t t, int64_t place, int64_t n, int64_t ahead, const uint8_t **rows,
                         float *scale)
{
    const cb_int8_attention *a = arg->a;
    const int32_t *chosen = selection_of(a, t);
    int64_t first, end;
    keys_of(a, t, &first, &end);
    for (int64_t i = 0; i < CB_KV_BLOCK; i++) {
        int64_t at = place + CB_MIN(i, n - 1), position = chosen ? chosen[at] : at, offset = position % CB_KV_BLOCK;
        const void *block = block_at(a, t, position);
        if (place + i + ahead < end)
            prefetch_row(a, t, chosen ? chosen[place + i + ahead] : place + i + ahead);
        const uint16_t *scales = cb_int8_row_scales(block, a->depth, offset);
        rows[i] = cb_int8_row(block, a->depth, offset);
        for (int64_t g = 0; g < arg->ng; g++) {
            uint32_t bits = (uint32_t)scales[g] << 16;
            memcpy(scale + g * CB_KV_BLOCK + i, &bits, sizeof bits);
        }
    }
}

/* The blocks of span b that hold places from .. to - 1 of row t's keys; has_next: the span behind it is the caller's next one. */
static void load_span(const attend_arg *arg, int64_t t, int64_t kv_head, int64_t b, int64_t from, int64_t to, bool has_next,
                      const attend_room *r, span *s)
{
    const cb_int8_attention *a = arg->a;
    for (int64_t i = from / CB_KV_BLOCK; i < CB_CEIL(to, CB_KV_BLOCK); i++) {
        int64_t place = b * CB_SPAN + i * CB_KV_BLOCK;
        s->block[i] = (cb_int8_block){.key_scale = r->scales[i], .value_scale = r->scales[i], .dim = arg->wide, .rows = s->rows[i]};
        if (a->block) {
            s->block[i].rows = NULL;
            a->block(a->arg, cb_kv_block_of(a->step, t, place), kv_head, &s->block[i], r->scales[i]);
        } else {
            load_latents(arg, t, place, CB_MIN(CB_KV_BLOCK, to - i * CB_KV_BLOCK), has_next ? CB_SPAN : 0, s->rows[i],
                         r->scales[i]);
        }
    }
}

static void score_span(const cb_int8_queries *q, int64_t n_q, const span *s, int64_t from, int64_t to, float *out)
{
    for (int64_t i = from / CB_KV_BLOCK; i < CB_CEIL(to, CB_KV_BLOCK); i++)
        cb_kernels.int8->scores(q, n_q, &s->block[i], out + i * CB_KV_BLOCK, CB_SPAN);
}

/* Probabilities of places from .. to - 1 times their values; step gets what a step of each group's weights is worth. */
static void mix_span(const attend_arg *arg, const float *p, int64_t n_q, const span *s, int64_t from, int64_t to, float *u,
                     float *step, const float *f, const float *g, float *z)
{
    int64_t i = from / CB_KV_BLOCK, n_blocks = CB_CEIL(to, CB_KV_BLOCK) - i;
    cb_kernels.int8->spread(s->block, arg->groups, from, to, u, step);
    cb_kernels.int8->mix(p + i * CB_KV_BLOCK, n_q, s->block + i, (int)n_blocks, u + i * CB_KV_BLOCK, step, f, g, z);
}

/* ---- queries and results -------------------------------------------------------------------------------------- */

static void load_queries(const attend_arg *t, const row_group *group, int64_t head0, const cb_int8_queries *q, float *query)
{
    for (int64_t j = 0; j < group->n_rows * t->per_task; j++) {
        t->a->query(t->a->arg, group->row - t->a->row0 + j / t->per_task, head0 + j % t->per_task, query);
        cb_int8_set_query(q, j, query);
    }
}

/* Nothing seen yet; a sink counts as a first block of one key without a value. */
static void begin_query(const cb_int8_attention *a, int64_t head, float *m, float *l)
{
    *m = a->sinks ? a->sinks[head] : -INFINITY;
    *l = a->sinks ? 1.0f : 0.0f;
}

static void store_result(const cb_int8_attention *a, int64_t t, int64_t head, const float *z, float l)
{
    float *out = a->result(a->arg, t - a->row0, head);
    for (int64_t e = 0; e < a->dim; e++)
        out[e] = z[e] / l;
}

/* ---- a task walks its spans ------------------------------------------------------------------------------------ */

/* Query heads from head0 on, which share key head head0 / (n_heads / n_kv_heads). */
static void attend(const attend_arg *arg, const row_group *group, int64_t head0, char *base)
{
    const cb_int8_attention *a = arg->a;
    int64_t G = arg->per_task, n_q = group->n_rows * G, first_row = group->row, end_row = first_row + group->n_rows;
    int64_t kv_head = head0 * a->n_kv_heads / a->n_heads;
    attend_room r;
    span s;
    lay_out_room(arg, arg->task_rows * G, base, &r);
    load_queries(arg, group, head0, &r.q, r.query);
    for (int64_t j = 0; j < n_q; j++)
        begin_query(a, head0 + j % G, r.m + j, r.l + j);
    memset(r.z, 0, (size_t)(n_q * arg->wide) * sizeof(float));

    int64_t from, to, end = first_span(a, end_row - 1) + n_spans_of(a, end_row - 1);
    for (int64_t b = first_span(a, first_row); b < end; b++) {
        int64_t t0 = first_row, t1 = end_row; /* rows that see some of the span: positions rise, so they are neighbours */
        while (t0 < t1 && !range_of(a, t0, b, &from, &to))
            t0++;
        while (t1 > t0 && !range_of(a, t1 - 1, b, &from, &to))
            t1--;
        if (t0 == t1)
            continue;
        int64_t lowest, highest, j0 = (t0 - first_row) * G, n = (t1 - t0) * G;
        range_of(a, t0, b, &lowest, &to);
        range_of(a, t1 - 1, b, &from, &highest);
        load_span(arg, t1 - 1, kv_head, b, lowest, highest, b + 1 < end, &r, &s);
        cb_int8_queries q = {r.q.q + j0 * arg->ng * CB_GROUP, r.q.scale + j0 * arg->ng, r.q.sum + 2 * j0 * arg->ng, a->depth};
        int64_t since = cb_now_ns();
        score_span(&q, n, &s, lowest, highest, r.s);
        cb_phase_lap(a->pool, CB_PHASE_SCORES, &since);
        for (int64_t t = t0, next; t < t1; t = next) { /* rows with the same range at a time */
            int64_t other_from, other_to;
            range_of(a, t, b, &from, &to);
            for (next = t + 1; next < t1; next++) {
                range_of(a, next, b, &other_from, &other_to);
                if (other_from != from || other_to != to)
                    break;
            }
            int64_t j = (t - t0) * G, alike = (next - t) * G;
            cb_kernels.int8->softmax(r.s + j * CB_SPAN, alike, from, to, r.mb, r.lb);
            cb_kernels.gqa->join(r.mb, r.lb, alike, r.m + j0 + j, r.l + j0 + j, r.f, r.g);
            mix_span(arg, r.s + j * CB_SPAN, alike, &s, from, to, r.u, r.step, r.f, r.g, r.z + (j0 + j) * arg->wide);
        }
        cb_phase_lap(a->pool, CB_PHASE_VALUES, &since);
    }
    for (int64_t j = 0; j < n_q; j++)
        store_result(a, first_row + j / G, head0 + j % G, r.z + j * arg->wide, r.l[j]);
}

static void attend_job(void *arg, int64_t begin, int64_t end, int thread)
{
    const attend_arg *t = arg;
    int64_t tasks = t->a->n_kv_heads * t->parts;
    for (int64_t item = begin; item < end; item++)
        attend(t, &t->group[item / tasks], item % tasks * t->per_task, t->room + thread * t->room_bytes);
}

/* ---- few rows, long contexts, many threads: spans apart, joined in order ------------------------------------- */

typedef struct {
    attend_arg t;        /* groups of one row */
    int64_t wave0, wave; /* first span and number of spans of this wave, counted from each row's first */
    cb_int8_queries q;   /* of all tasks */
    float *z, *m, *l;    /* per query: [wide], one, one */
    float *part;         /* per task and span of the wave: step [groups], mb [G], lb [G], zb [G][wide] */
    int64_t part_floats;
} split_arg;

/* Row and first head of a task. */
static void task_of(const split_arg *s, int64_t task, int64_t *t, int64_t *head0)
{
    int64_t tasks = s->t.a->n_kv_heads * s->t.parts;
    *t = s->t.group[task / tasks].row;
    *head0 = task % tasks * s->t.per_task;
}

static void split_query_job(void *arg, int64_t begin, int64_t end, int thread)
{
    const split_arg *s = arg;
    const cb_int8_attention *a = s->t.a;
    int64_t G = s->t.per_task, ng = s->t.ng;
    attend_room r;
    lay_out_room(&s->t, G, s->t.room + thread * s->t.room_bytes, &r);
    for (int64_t j = begin; j < end; j++) { /* queries of all tasks */
        int64_t t, head0;
        task_of(s, j / G, &t, &head0);
        cb_int8_queries one = {s->q.q + j * ng * CB_GROUP, s->q.scale + j * ng, s->q.sum + 2 * j * ng, a->depth};
        a->query(a->arg, t - a->row0, head0 + j % G, r.query);
        cb_int8_set_query(&one, 0, r.query);
    }
}

static void split_span_job(void *arg, int64_t begin, int64_t end, int thread)
{
    const split_arg *s = arg;
    const cb_int8_attention *a = s->t.a;
    int64_t G = s->t.per_task, ng = s->t.ng, groups = s->t.groups;
    attend_room r;
    lay_out_room(&s->t, G, s->t.room + thread * s->t.room_bytes, &r);
    for (int64_t item = begin; item < end; item++) {
        int64_t task = item / s->wave, nth = s->wave0 + item % s->wave, t, head0, from, to;
        task_of(s, task, &t, &head0);
        if (nth >= n_spans_of(a, t))
            continue;
        int64_t b = first_span(a, t) + nth;
        float *part = s->part + item * s->part_floats, *mb = part + groups, *lb = mb + G, *zb = lb + G;
        cb_int8_queries q = {s->q.q + task * G * ng * CB_GROUP, s->q.scale + task * G * ng, s->q.sum + 2 * task * G * ng, a->depth};
        span found;
        range_of(a, t, b, &from, &to);
        load_span(&s->t, t, head0 * a->n_kv_heads / a->n_heads, b, from, to, false, &r, &found);
        int64_t since = cb_now_ns();
        score_span(&q, G, &found, from, to, r.s);
        cb_kernels.int8->softmax(r.s, G, from, to, mb, lb);
        cb_phase_lap(a->pool, CB_PHASE_SCORES, &since);
        mix_span(&s->t, r.s, G, &found, from, to, r.u, part, NULL, NULL, zb);
        cb_phase_lap(a->pool, CB_PHASE_VALUES, &since);
    }
}

/* One query takes in the wave's spans, in the order and with the operations of `attend`. */
static void split_join_job(void *arg, int64_t begin, int64_t end, int thread)
{
    const split_arg *s = arg;
    const cb_int8_attention *a = s->t.a;
    int64_t G = s->t.per_task, wide = s->t.wide, groups = s->t.groups;
    (void)thread;
    for (int64_t item = begin; item < end; item++) {
        int64_t task = item / G, j = item % G, t, head0;
        task_of(s, task, &t, &head0);
        int64_t n = n_spans_of(a, t), head = head0 + j;
        float *z = s->z + item * wide, *m = s->m + item, *l = s->l + item, f, g;
        if (s->wave0 == 0) {
            begin_query(a, head, m, l);
            memset(z, 0, (size_t)wide * sizeof(float));
        }
        for (int64_t nth = s->wave0; nth < CB_MIN(n, s->wave0 + s->wave); nth++) {
            const float *step = s->part + (task * s->wave + nth - s->wave0) * s->part_floats, *mb = step + groups;
            const float *zb = mb + 2 * G + j * wide;
            cb_kernels.gqa->join(mb + j, mb + G + j, 1, m, l, &f, &g);
            for (int64_t group = 0; group < groups; group++)
                cb_kernels.attn->join(z + group * CB_GROUP, zb + group * CB_GROUP, CB_GROUP, f, step[group] * g);
        }
        if (n > s->wave0 && n <= s->wave0 + s->wave)
            store_result(a, t, head, z, *l);
    }
}

static int attend_split(const attend_arg *t, int64_t n_groups, int64_t n_spans)
{
    const cb_int8_attention *a = t->a;
    int64_t G = t->per_task, n_tasks = n_groups * a->n_kv_heads * t->parts, n_q = n_tasks * G, bytes = 0;
    split_arg s = {.t = *t, .part_floats = cb_lanes(t->groups + G * (t->wide + 2))};
    int64_t wave = CB_MAX(cb_pool_threads(a->pool), WAVE_FLOATS / (n_tasks * s.part_floats));
    wave = CB_MIN(n_spans, wave);
    take_queries(t, n_q, NULL, &bytes);
    char *queries = cb_scratch(a->pool, bytes);
    s.z = cb_scratch(a->pool, n_q * t->wide * 4);
    s.m = cb_scratch(a->pool, n_q * 4);
    s.l = cb_scratch(a->pool, n_q * 4);
    s.part = cb_scratch(a->pool, n_tasks * wave * s.part_floats * 4);
    if (!queries || !s.z || !s.m || !s.l || !s.part)
        return CB_ENOMEM;
    bytes = 0;
    s.q = take_queries(t, n_q, queries, &bytes);
    cb_parallel_for(a->pool, n_q, cb_attn_grain(4 * a->depth), split_query_job, &s);
    for (s.wave0 = 0; s.wave0 < n_spans; s.wave0 += s.wave) {
        s.wave = CB_MIN(wave, n_spans - s.wave0);
        cb_parallel_for(a->pool, n_tasks * s.wave, cb_attn_grain(CB_SPAN * (a->depth + 2 * t->wide) * G / 4), split_span_job, &s);
        cb_parallel_for(a->pool, n_q, cb_attn_grain(s.wave * t->wide), split_join_job, &s);
    }
    return CB_OK;
}

/* ---- tasks ----------------------------------------------------------------------------------------------------- */

/* Consecutive rows of one sequence without a selection share a task's blocks. Returns the number of groups. */
static int64_t group_rows(const cb_int8_attention *a, int64_t at_most, row_group *out)
{
    int64_t n_groups = 0;
    for (int64_t t = a->row0; t < a->row0 + a->n; t++) {
        row_group *g = n_groups ? &out[n_groups - 1] : NULL;
        if (g && g->n_rows < at_most && a->step->seq[t] == a->step->seq[g->row] && !selection_of(a, t) &&
            !selection_of(a, g->row))
            g->n_rows++;
        else
            out[n_groups++] = (row_group){(int32_t)t, 1};
    }
    return n_groups;
}

int cb_int8_attend(const cb_int8_attention *a)
{
    int64_t threads = cb_pool_threads(a->pool), G = a->n_heads / a->n_kv_heads, most = 0;
    for (int64_t t = a->row0; t < a->row0 + a->n; t++)
        most = CB_MAX(most, n_spans_of(a, t));
    bool split = threads > 1 && a->n * a->n_kv_heads < 2 * threads && most >= MIN_SPLIT_SPANS;
    attend_arg job = {.a = a, .per_task = G, .parts = 1, .ng = cb_groups(a->depth), .groups = cb_groups(a->dim)};
    job.wide = job.groups * CB_GROUP;
    /* Heads apart lay out the same blocks again, so only while threads would idle. */
    while (job.per_task % 2 == 0 && job.per_task >= 2 * LEAST_HEADS &&
           a->n * a->n_kv_heads * job.parts * (split ? most : 1) < threads) {
        job.per_task /= 2;
        job.parts *= 2;
    }
    int64_t rows = CB_MIN(TASK_ROWS, TASK_FLOATS / (job.per_task * job.wide));
    job.task_rows = split ? 1 : CB_MAX(1, CB_MIN(rows, a->n * a->n_kv_heads / (2 * threads)));

    row_group *group = cb_scratch(a->pool, a->n * (int64_t)sizeof *group);
    attend_room unused;
    job.group = group;
    job.room_bytes = lay_out_room(&job, job.task_rows * job.per_task, NULL, &unused);
    job.room = cb_scratch(a->pool, threads * job.room_bytes);
    if (!group || !job.room)
        return CB_ENOMEM;
    int64_t n_groups = group_rows(a, job.task_rows, group);
    if (split)
        return attend_split(&job, n_groups, most);
    int64_t cost = most * CB_SPAN * (a->depth + 2 * job.wide) * job.per_task * job.task_rows / 4;
    cb_parallel_for(a->pool, n_groups * a->n_kv_heads * job.parts, cb_attn_grain(cost), attend_job, &job);
    return CB_OK;
}
