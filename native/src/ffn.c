/* ffn.c: down(inner(gate h, up h)) for many (expert, rows) pairs at once, and the sum over experts.
 *
 * Shapes      h [T, D]; per job an expert's gate, up [F, D] and down [D, F], and n rows of h; results go to rows of y.
 * Definition  per job and row: g = gate h + bias, u = up h + bias, a = inner(g, u) (inner.c), y = down a + bias. Each product
 *             is a cb_linear, so a row's bits do not depend on its neighbours.
 * How         h is quantised once per call. Rows of all jobs are cut into segments of at most 128, and segments
 *             gathered into waves of about 256 rows; a wave has three phases over all its (segment, row block) items:
 *             gate and up and silu; quantise a; down. Scratch is thus bounded by the wave.
 * Example     a decode step of GLM: 8 jobs of 1 row, F 2048, D 6144: phase 1 has 8 * 128 row blocks, phase 3 8 * 384.
 */
#include "cbmath.h"
#include "internal.h"

#include <stdatomic.h>
#include <string.h>

#define SEGMENT_ROWS 128
#define WAVE_ROWS 256

typedef struct {
    const cb_expert_job *job;
    int64_t first;  /* of the job's rows */
    int64_t n_rows;
    int64_t buffer; /* first row in the wave's buffers */
} segment;

typedef struct {
    int32_t segment;
    int32_t b0, b1;
} item;

typedef struct {
    const segment *segments;
    const item *items;
    cb_rows h;    /* f32 and quantised */
    bool all_rows; /* cb_ffn_forward: row i of the job is row i of h and of y */
    int64_t inner; /* row stride of gate and up */
    float *gate, *up;
    int8_t *q;
    float *scale;
    int32_t *sum;
    float *y;
    int64_t hidden;
    bool add;
} wave;

static cb_rows input_rows(const wave *w, const segment *s)
{
    cb_rows rows = w->h;
    rows.n_rows = s->n_rows;
    if (!w->all_rows) {
        rows.in_index = s->job->rows + s->first;
        return rows;
    }
    int64_t ng = cb_groups(w->hidden);
    rows.x += s->first * rows.ldx;
    if (rows.q) {
        rows.q += s->first * ng * 64;
        rows.scale += s->first * ng;
        rows.sum += s->first * ng * 2;
    }
    return rows;
}

static void gate_up(void *v, int64_t begin, int64_t end, int thread)
{
    (void)thread;
    wave *w = v;
    for (int64_t i = begin; i < end; i++) {
        const item *it = &w->items[i];
        const segment *s = &w->segments[it->segment];
        const cb_matrix *gate = &s->job->ffn.gate, *up = &s->job->ffn.up;
        cb_rows rows = input_rows(w, s);
        float *g = w->gate + s->buffer * w->inner, *u = w->up + s->buffer * w->inner;
        cb_kernels.linear[gate->format][gate->act](gate, &rows, it->b0, it->b1, g, w->inner, false);
        cb_kernels.linear[up->format][up->act](up, &rows, it->b0, it->b1, u, w->inner, false);
        int64_t o = it->b0 * 16, n = CB_MIN(it->b1 * 16, gate->out) - o;
        for (int64_t r = 0; r < s->n_rows; r++)
            cb_inner(&s->job->ffn, o, n, g + r * w->inner + o, u + r * w->inner + o);
    }
}

static void quantise_inner(void *v, int64_t begin, int64_t end, int thread)
{
    (void)thread;
    wave *w = v;
    int64_t ng = cb_groups(w->inner);
    for (int64_t r = begin; r < end; r++)
        cb_kernels.quantise(w->gate + r * w->inner, w->inner, w->q + r * ng * 64, w->scale + r * ng, w->sum + r * ng * 2);
}

static void down(void *v, int64_t begin, int64_t end, int thread)
{
    (void)thread;
    wave *w = v;
    int64_t ng = cb_groups(w->inner);
    for (int64_t i = begin; i < end; i++) {
        const item *it = &w->items[i];
        const segment *s = &w->segments[it->segment];
        const cb_matrix *m = &s->job->ffn.down;
        cb_rows rows = {.x = w->gate + s->buffer * w->inner, .ldx = w->inner, .n_rows = s->n_rows};
        if (m->act == CB_ACT_Q8) {
            rows.q = w->q + s->buffer * ng * 64;
            rows.scale = w->scale + s->buffer * ng;
            rows.sum = w->sum + s->buffer * ng * 2;
        }
        float *y = w->y;
        if (w->all_rows)
            y += s->first * w->hidden;
        else
            rows.out_index = s->job->out + s->first;
        cb_kernels.linear[m->format][m->act](m, &rows, it->b0, it->b1, y, w->hidden, w->add);
        const float *bias = s->job->ffn.down_bias;
        int64_t end_column = CB_MIN(it->b1 * 16, m->out);
        for (int64_t r = 0; bias && r < s->n_rows; r++) {
            float *row = y + (rows.out_index ? rows.out_index[r] : r) * w->hidden;
            for (int64_t o = it->b0 * 16; o < end_column; o++)
                row[o] = row[o] + bias[o];
        }
    }
}

/* Items of a phase: row blocks of every segment's matrix, in pieces of about the same number of bytes. */
static int64_t make_items(const segment *segments, int64_t n, bool down_phase, int64_t threads, item *items)
{
    int64_t total = 0, n_items = 0;
    for (int64_t i = 0; i < n; i++)
        total += cb_blocks(down_phase ? segments[i].job->ffn.down.out : segments[i].job->ffn.gate.out);
    for (int64_t i = 0; i < n; i++) {
        const cb_matrix *m = down_phase ? &segments[i].job->ffn.down : &segments[i].job->ffn.gate;
        int64_t nb = cb_blocks(m->out), block_bytes = cb_weight_bytes(m->format, 16, m->in);
        int64_t least = CB_CEIL(32768, block_bytes * CB_MIN(segments[i].n_rows, 8));
        int64_t step = CB_MAX(1, CB_MIN(CB_MAX(total / (threads * 8), least), 32));
        for (int64_t b = 0; b < nb; b += step)
            items[n_items++] = (item){(int32_t)i, (int32_t)b, (int32_t)CB_MIN(b + step, nb)};
    }
    return n_items;
}

static int ffn_check(const cb_ffn *f, int64_t hidden, int64_t inner)
{
    if (cb_matrix_check(&f->gate) || cb_matrix_check(&f->up) || cb_matrix_check(&f->down) || f->function < CB_INNER_SILU ||
        f->function > CB_INNER_GELU)
        return CB_EINVAL;
    return f->gate.in == hidden && f->up.in == hidden && f->down.out == hidden && f->gate.out == inner &&
                   f->up.out == inner && f->down.in == inner
               ? CB_OK
               : CB_EINVAL;
}

typedef struct {
    const float *x;
    const int32_t *used; /* NULL: every row */
    cb_rows *rows;
    int64_t n, ng;
} used_arg;

static void quantise_used(void *v, int64_t begin, int64_t end, int thread)
{
    (void)thread;
    used_arg *a = v;
    for (int64_t i = begin; i < end; i++) {
        int64_t r = a->used ? a->used[i] : i;
        cb_kernels.quantise(a->x + r * a->n, a->n, (int8_t *)a->rows->q + r * a->ng * 64,
                            (float *)a->rows->scale + r * a->ng, (int32_t *)a->rows->sum + r * a->ng * 2);
    }
}

/* Quantised h for the rows that some job uses. */
static int prepare_h(cb_pool *pool, const cb_expert_job *jobs, int64_t n_jobs, bool all_rows, const float *h,
                     int64_t n_h, int64_t hidden, cb_rows *rows)
{
    *rows = (cb_rows){.x = h, .ldx = hidden, .n_rows = n_h};
    bool wanted = false;
    for (int64_t j = 0; j < n_jobs; j++)
        wanted |= jobs[j].n_rows && (jobs[j].ffn.gate.act == CB_ACT_Q8 || jobs[j].ffn.up.act == CB_ACT_Q8);
    if (!wanted)
        return CB_OK;
    if (all_rows)
        return cb_rows_prepare(pool, CB_ACT_Q8, h, hidden, n_h, hidden, rows);
    int64_t ng = cb_groups(hidden), n_used = 0;
    rows->q = cb_scratch(pool, n_h * ng * 64);
    rows->scale = cb_scratch(pool, n_h * ng * 4);
    rows->sum = cb_scratch(pool, n_h * ng * 2 * 4);
    uint8_t *marked = cb_scratch(pool, n_h);
    int32_t *used = cb_scratch(pool, n_h * 4);
    if (!rows->q || !rows->scale || !rows->sum || !marked || !used)
        return CB_ENOMEM;
    memset(marked, 0, (size_t)n_h);
    for (int64_t j = 0; j < n_jobs; j++)
        for (int64_t i = 0; i < jobs[j].n_rows; i++)
            marked[jobs[j].rows[i]] = 1;
    for (int64_t r = 0; r < n_h; r++)
        if (marked[r])
            used[n_used++] = (int32_t)r;
    used_arg a = {h, used, rows, hidden, ng};
    cb_parallel_for(pool, n_used, 8, quantise_used, &a);
    return CB_OK;
}

static int run(cb_pool *pool, const cb_expert_job *jobs, int64_t n_jobs, bool all_rows, const float *h, int64_t n_h,
               int64_t hidden, int64_t inner, float *y, bool add)
{
    int64_t n_segments = 0, buffer_rows = 0, n_items = 0, in_wave = 0;
    for (int64_t j = 0; j < n_jobs; j++)
        n_segments += CB_CEIL(jobs[j].n_rows, SEGMENT_ROWS);
    if (!n_segments)
        return CB_OK;
    wave w = {.all_rows = all_rows, .inner = inner, .y = y, .hidden = hidden, .add = add};
    int status = prepare_h(pool, jobs, n_jobs, all_rows, h, n_h, hidden, &w.h);
    if (status)
        return status;
    segment *segments = cb_scratch(pool, n_segments * (int64_t)sizeof *segments);
    if (!segments)
        return CB_ENOMEM;

    /* Wave i ends where the next segment would not fit; `buffer` is 0 at each wave's first segment. */
    int64_t n = 0, in_segments = 0, most_segments = 0;
    bool requantise = false;
    for (int64_t j = 0; j < n_jobs; j++) {
        for (int64_t first = 0; first < jobs[j].n_rows; first += SEGMENT_ROWS) {
            int64_t rows = CB_MIN(SEGMENT_ROWS, jobs[j].n_rows - first);
            if (in_wave + rows > WAVE_ROWS)
                in_wave = in_segments = 0;
            segments[n++] = (segment){&jobs[j], first, rows, in_wave};
            in_wave += rows;
            buffer_rows = CB_MAX(buffer_rows, in_wave);
            most_segments = CB_MAX(most_segments, ++in_segments);
            requantise |= jobs[j].ffn.down.act == CB_ACT_Q8;
        }
    }
    n_items = most_segments * CB_MAX(cb_blocks(hidden), cb_blocks(inner));
    int64_t ng = cb_groups(inner);
    item *items = cb_scratch(pool, n_items * (int64_t)sizeof *items);
    w.gate = cb_scratch(pool, buffer_rows * inner * 4);
    w.up = cb_scratch(pool, buffer_rows * inner * 4);
    if (requantise) {
        w.q = cb_scratch(pool, buffer_rows * ng * 64);
        w.scale = cb_scratch(pool, buffer_rows * ng * 4);
        w.sum = cb_scratch(pool, buffer_rows * ng * 2 * 4);
    }
    if (!items || !w.gate || !w.up || (requantise && (!w.q || !w.scale || !w.sum)))
        return CB_ENOMEM;
    w.items = items;

    int64_t threads = cb_pool_threads(pool);
    for (int64_t begin = 0, end; begin < n; begin = end) {
        int64_t rows = segments[begin].n_rows;
        for (end = begin + 1; end < n && segments[end].buffer; end++)
            rows += segments[end].n_rows;
        w.segments = segments + begin;
        n_items = make_items(w.segments, end - begin, false, threads, items);
        cb_parallel_for(pool, n_items, 1, gate_up, &w);
        if (requantise)
            cb_parallel_for(pool, rows, 4, quantise_inner, &w);
        n_items = make_items(w.segments, end - begin, true, threads, items);
        cb_parallel_for(pool, n_items, 1, down, &w);
    }
    return CB_OK;
}

int cb_ffn_forward(cb_pool *pool, const cb_ffn *ffn, const float *h, int64_t n_rows, int add, float *y)
{
    if (!pool || !ffn || n_rows < 0 || (n_rows && (!h || !y)) || ffn_check(ffn, ffn->gate.in, ffn->gate.out))
        return CB_EINVAL;
    cb_expert_job job = {.ffn = *ffn, .n_rows = n_rows};
    cb_pool_hold(pool);
    cb_scratch_mark mark = cb_scratch_begin(pool);
    int status = run(pool, &job, 1, true, h, n_rows, ffn->gate.in, ffn->gate.out, y, add != 0);
    cb_scratch_end(pool, mark);
    cb_pool_release(pool);
    return status;
}

int cb_expert_ffn(cb_pool *pool, const cb_expert_job *jobs, int64_t n_jobs, const float *h, int64_t n_rows, float *parts,
                  int64_t n_parts)
{
    if (!pool || n_jobs < 0 || n_rows < 0 || n_parts < 0 || (n_jobs && (!jobs || !h || !parts)))
        return CB_EINVAL;
    for (int64_t j = 0; j < n_jobs; j++) {
        const cb_expert_job *job = &jobs[j];
        if (ffn_check(&job->ffn, jobs[0].ffn.gate.in, jobs[0].ffn.gate.out) || job->n_rows < 0 ||
            (job->n_rows && (!job->rows || !job->out)))
            return CB_EINVAL;
        for (int64_t i = 0; i < job->n_rows; i++)
            if (job->rows[i] < 0 || job->rows[i] >= n_rows || job->out[i] < 0 || job->out[i] >= n_parts)
                return CB_EINVAL;
    }
    if (!n_jobs)
        return CB_OK;
    cb_pool_hold(pool);
    cb_scratch_mark mark = cb_scratch_begin(pool);
    int status = run(pool, jobs, n_jobs, false, h, n_rows, jobs[0].ffn.gate.in, jobs[0].ffn.gate.out, parts, false);
    cb_scratch_end(pool, mark);
    cb_pool_release(pool);
    return status;
}

/* ---- sum over experts ------------------------------------------------------------------------------------ */

typedef struct {
    const float *parts, *weight, *shared;
    const int32_t *order;
    int64_t k, hidden;
    float *mixed;
    _Atomic int64_t bad_row;
} reduce_arg;

static void reduce_rows(void *v, int64_t begin, int64_t end, int thread)
{
    (void)thread;
    reduce_arg *a = v;
    for (int64_t r = begin; r < end; r++) {
        if (cb_kernels.reduce(a->parts + r * a->k * a->hidden, a->hidden, a->weight + r * a->k, a->order + r * a->k,
                              a->k, a->shared ? a->shared + r * a->hidden : NULL, a->hidden, a->mixed + r * a->hidden))
            continue;
        int64_t known = atomic_load(&a->bad_row);
        while ((known < 0 || r < known) && !atomic_compare_exchange_weak(&a->bad_row, &known, r))
            ;
    }
}

int cb_expert_reduce(cb_pool *pool, const float *parts, const float *weight, const int32_t *order, const float *shared,
                     int64_t n_rows, int64_t k, int64_t hidden, float *mixed, int64_t *bad_row)
{
    if (!pool || n_rows < 0 || k < 0 || hidden <= 0 || !bad_row || (n_rows && !mixed) ||
        (n_rows && k && (!parts || !weight || !order)))
        return CB_EINVAL;
    for (int64_t i = 0; i < n_rows * k; i++)
        if (order[i] < 0 || order[i] >= k)
            return CB_EINVAL;
    reduce_arg a = {parts, weight, shared, order, k, hidden, mixed, -1};
    cb_pool_hold(pool);
    cb_parallel_for(pool, n_rows, 2, reduce_rows, &a);
    cb_pool_release(pool);
    *bad_row = atomic_load(&a.bad_row);
    return *bad_row < 0 ? CB_OK : CB_ENONFINITE;
}
