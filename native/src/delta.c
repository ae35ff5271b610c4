/* delta.c: one layer of the gated delta rule for the rows of a step: contract, slots of states, convolution, norms.
 *
 * Tiles of rows are projected; then every (sequence, head, some columns) walks its tokens one after the other, from the slot
 * that a step before left to the other one. The border of a tile is no border for the sum: it goes on in the slot being written.
 */
#include "delta.h"
#include "attn.h"

#include <math.h>
#include <string.h>

#define ROW_TILE 128 /* rows in scratch at one time; more than CB_DELTA_MAX_DRAFTS */
#define HEAD_FLOATS 16
#define L2_EPS 1e-6f /* of the norm of queries and keys: hard-coded in every implementation */
#define MAX_TAPS 16

_Static_assert(ROW_TILE > CB_DELTA_MAX_DRAFTS, "the records of a sequence fit into a tile");

/* The first 64 bytes of a slot. All zero: the state before the first token. */
typedef struct {
    int64_t position;  /* of the next token; -1: being written, or of nobody */
    int64_t n_records; /* tokens behind it that are records */
} slot_head;

typedef struct {
    int64_t channels, keys, values;  /* C, K dk, V dv */
    int64_t slot, record;            /* f32 values of each */
} sizes;

/* The rows of one sequence in a tile. */
typedef struct {
    int64_t row, n, n_kept; /* rows [row, row + n_kept) change the slot, the others become records */
    bool is_first, is_last; /* of the sequence's rows in this call */
    bool is_lost;           /* no slot belongs to the first position */
    int64_t n_replayed;     /* records that come before */
    const float *from;      /* slot; NULL: zeros */
    const float *from_records;
    float *to, *to_records;
} part;

typedef struct {
    cb_pool *pool;
    const cb_delta_layer *layer;
    const cb_attn_step *step;
    sizes size;
    int64_t row0, n;
    part *parts;
    int64_t n_parts;
    int32_t *part_of;              /* [n] */
    float *raw, *mixed;            /* [n][C]: before and after convolution and norms */
    float *z, *o;                  /* [n][V dv] */
    float *decay, *beta;           /* [n][V]; before `convolve` what `a` and `b` gave */
    const float *ones;             /* [C] */
    const float *q_norm, *k_norm;  /* [dk] */
    float *room;                   /* per thread [dk][CB_DELTA_COLUMNS] */
} tile_arg;

static sizes sizes_of(const cb_delta_layer *y)
{
    sizes s;
    s.keys = (int64_t)y->n_key_heads * y->key_dim;
    s.values = (int64_t)y->n_value_heads * y->value_dim;
    s.channels = 2 * s.keys + s.values;
    s.slot = HEAD_FLOATS + (y->taps - 1) * s.channels + s.values * y->key_dim;
    s.record = s.channels + s.keys + s.values + 2 * (int64_t)y->n_value_heads;
    return s;
}

/* ---- slots ------------------------------------------------------------------------------------------------------ */

static float *tail_of(const float *slot) { return (float *)slot + HEAD_FLOATS; }
static float *state_of(const tile_arg *a, const float *slot)
{
    return tail_of(slot) + (a->layer->taps - 1) * a->size.channels;
}

/* Which slot holds what comes before `position`, 0 or 1; -1: none. Of two the later one: the earlier one's records may be of
 * drafts that were not accepted. */
static int find_slot(float *const slots[2], int64_t position)
{
    int found = -1;
    for (int i = 0; i < 2; i++) {
        const slot_head *head = (const slot_head *)slots[i];
        if (head->position < 0 || head->position > position || position > head->position + head->n_records)
            continue;
        if (found < 0 || head->position > ((const slot_head *)slots[found])->position)
            found = i;
    }
    return found;
}

/* What comes next must not be seen before this. */
static void invalidate(float *slot)
{
    __atomic_store_n(&((slot_head *)slot)->position, -1, __ATOMIC_SEQ_CST);
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
}

static void open_job(void *arg, int64_t begin, int64_t end, int thread)
{
    tile_arg *a = arg;
    const cb_attn_step *s = a->step;
    (void)thread;
    for (int64_t i = begin; i < end; i++) {
        part *p = &a->parts[i];
        if (!p->is_first) {
            p->from = p->to; /* goes on where the tile before ended */
            continue;
        }
        int64_t position = s->position[p->row], pair = 2 * (int64_t)s->state_of[s->seq[p->row]];
        float *slots[2], *records[2];
        for (int j = 0; j < 2; j++) {
            slots[j] = (float *)s->state + (pair + j) * a->size.slot;
            records[j] = (float *)s->records + (pair + j) * s->n_drafts * a->size.record;
        }
        int from = position ? find_slot(slots, position) : 1;
        if (from < 0) {
            p->is_lost = true;
            continue;
        }
        p->to = slots[1 - from];
        p->to_records = records[1 - from];
        invalidate(p->to);
        if (position) {
            p->from = slots[from];
            p->from_records = records[from];
            p->n_replayed = position - ((const slot_head *)p->from)->position;
        } else {
            invalidate(slots[from]); /* a former sequence's */
        }
    }
}

/* Input `at` of the convolution, counted from the part's first row; NULL: before the first token. */
static const float *input_at(const tile_arg *a, const part *p, int64_t at)
{
    if (at >= 0)
        return a->raw + (p->row - a->row0 + at) * a->size.channels;
    at += p->n_replayed;
    if (at >= 0)
        return p->from_records + at * a->size.record;
    return p->from ? tail_of(p->from) + (a->layer->taps - 1 + at) * a->size.channels : NULL;
}

static void close_job(void *arg, int64_t begin, int64_t end, int thread)
{
    tile_arg *a = arg;
    const cb_delta_layer *y = a->layer;
    int64_t C = a->size.channels, bytes = C * (int64_t)sizeof(float);
    (void)thread;
    for (int64_t i = begin; i < end; i++) {
        part *p = &a->parts[i];
        float *tail = tail_of(p->to);
        for (int64_t j = 0; j < y->taps - 1; j++) { /* in place entries move forwards, hence ascending */
            const float *x = input_at(a, p, p->n_kept - (y->taps - 1) + j);
            if (x)
                memmove(tail + j * C, x, (size_t)bytes);
            else
                memset(tail + j * C, 0, (size_t)bytes);
        }
        for (int64_t j = p->n_kept; j < p->n; j++) {
            int64_t row = p->row - a->row0 + j, V = y->n_value_heads;
            float *record = p->to_records + (j - p->n_kept) * a->size.record;
            memcpy(record, a->raw + row * C, (size_t)bytes);
            record += C; /* queries are not needed again */
            memcpy(record, a->mixed + row * C + a->size.keys, (size_t)(C - a->size.keys) * sizeof(float));
            record += C - a->size.keys;
            memcpy(record, a->decay + row * V, (size_t)V * sizeof(float));
            memcpy(record + V, a->beta + row * V, (size_t)V * sizeof(float));
        }
        if (p->is_last) {
            slot_head *head = (slot_head *)p->to;
            head->n_records = p->n - p->n_kept;
            __atomic_store_n(&head->position, a->step->position[p->row] + p->n_kept, __ATOMIC_SEQ_CST);
        }
    }
}

/* ---- one row's inputs ------------------------------------------------------------------------------------------- */

static void convolve(const tile_arg *a, const part *p, int64_t at, float *out)
{
    const cb_delta_layer *y = a->layer;
    const float *x[MAX_TAPS], *w = y->conv.weight;
    for (int j = 0; j < y->taps; j++)
        x[j] = input_at(a, p, at - (y->taps - 1) + j);
    for (int64_t c = 0; c < a->size.channels; c += CB_TILE_ROWS, w += y->taps * CB_TILE_ROWS) {
        float sum[CB_TILE_ROWS] = {0};
        for (int j = 0; j < y->taps; j++)
            if (x[j])
                for (int l = 0; l < CB_TILE_ROWS; l++)
                    sum[l] = sum[l] + w[j * CB_TILE_ROWS + l] * x[j][c + l];
        memcpy(out + c, sum, sizeof sum);
    }
    cb_kernels.silu_mul(out, a->ones, a->size.channels, out);
}

static void input_job(void *arg, int64_t begin, int64_t end, int thread)
{
    tile_arg *a = arg;
    const cb_delta_layer *y = a->layer;
    int64_t dk = y->key_dim, V = y->n_value_heads;
    (void)thread;
    for (int64_t i = begin; i < end; i++) {
        const part *p = &a->parts[a->part_of[i]];
        float *q = a->mixed + i * a->size.channels, *k = q + a->size.keys, *decay = a->decay + i * V, *beta = a->beta + i * V;
        convolve(a, p, a->row0 + i - p->row, q);
        for (int64_t h = 0; h < y->n_key_heads; h++) {
            cb_kernels.rmsnorm(q + h * dk, a->q_norm, L2_EPS / (float)dk, dk, q + h * dk);
            cb_kernels.rmsnorm(k + h * dk, a->k_norm, L2_EPS / (float)dk, dk, k + h * dk);
        }
        cb_kernels.sigmoid(beta, V, beta);
        for (int64_t h = 0; h < V; h++) { /* few values: f64, rounded once */
            double x = (double)(decay[h] + y->dt_bias[h]);
            double softplus = (x > 0 ? x : 0.0) + log1p(exp(-fabs(x)));
            decay[h] = (float)exp(-exp((double)y->a_log[h]) * softplus);
        }
    }
}

/* ---- the state -------------------------------------------------------------------------------------------------- */

/* Some columns of one head through all tokens of a part. Rows of a slot are far apart in memory and would crowd a few sets of
 * the first-level cache: where there are several tokens, they walk in the room. */
static void walk(const tile_arg *a, const part *p, int64_t head, int64_t column, int64_t n, float *room)
{
    const cb_delta_layer *y = a->layer;
    int64_t dk = y->key_dim, dv = y->value_dim, V = y->n_value_heads, C = a->size.channels, keys = a->size.keys;
    int64_t key_at = head / (V / y->n_key_heads) * dk, value_at = head * dv + column, state_at = head * dk * dv + column;
    float *slot = state_of(a, p->to) + state_at;
    bool is_apart = p->n_replayed + p->n_kept > 2;
    float *kept = is_apart ? room : slot;
    int64_t ld_kept = is_apart ? CB_DELTA_COLUMNS : dv, ld_in = dv;
    const float *in = p->from ? state_of(a, p->from) + state_at : kept;
    if (!p->from) {
        ld_in = ld_kept;
        for (int64_t i = 0; i < dk; i++)
            memset(kept + i * ld_kept, 0, (size_t)n * sizeof(float));
    }
    for (int64_t j = 0; j < p->n_replayed; j++, in = kept, ld_in = ld_kept) {
        const float *record = p->from_records + j * a->size.record + C, *scalars = record + C - keys + head;
        cb_delta_token token = {record + key_at, NULL, record + keys + value_at, scalars[0], scalars[V], NULL};
        cb_kernels.delta->step(in, ld_in, kept, ld_kept, dk, n, &token);
    }
    for (int64_t j = 0; j < p->n; j++) {
        int64_t row = p->row - a->row0 + j;
        const float *m = a->mixed + row * C;
        cb_delta_token token = {m + keys + key_at, m + key_at, m + 2 * keys + value_at, a->decay[row * V + head],
                                a->beta[row * V + head], a->o + row * a->size.values + value_at};
        bool is_kept = j < p->n_kept;
        float *out = is_kept ? kept : room;
        int64_t ld_out = is_kept ? ld_kept : CB_DELTA_COLUMNS;
        cb_kernels.delta->step(in, ld_in, out, ld_out, dk, n, &token);
        in = out;
        ld_in = ld_out;
        if (is_apart && j == p->n_kept - 1)
            for (int64_t i = 0; i < dk; i++)
                memcpy(slot + i * dv, room + i * CB_DELTA_COLUMNS, (size_t)n * sizeof(float));
    }
}

static void state_job(void *arg, int64_t begin, int64_t end, int thread)
{
    tile_arg *a = arg;
    const cb_delta_layer *y = a->layer;
    int64_t pieces = CB_CEIL(y->value_dim, CB_DELTA_COLUMNS);
    float *room = a->room + thread * (int64_t)y->key_dim * CB_DELTA_COLUMNS;
    for (int64_t item = begin; item < end; item++) {
        int64_t column = item % pieces * CB_DELTA_COLUMNS, head = item / pieces % y->n_value_heads;
        walk(a, &a->parts[item / pieces / y->n_value_heads], head, column, CB_MIN(CB_DELTA_COLUMNS, y->value_dim - column),
             room);
    }
}

static void output_job(void *arg, int64_t begin, int64_t end, int thread)
{
    tile_arg *a = arg;
    const cb_delta_layer *y = a->layer;
    int64_t dv = y->value_dim;
    (void)thread;
    for (int64_t i = begin; i < end; i++) {
        float *o = a->o + i * a->size.values;
        for (int64_t h = 0; h < y->n_value_heads; h++)
            cb_kernels.rmsnorm(o + h * dv, y->norm, y->rms_eps, dv, o + h * dv);
        cb_kernels.silu_mul(a->z + i * a->size.values, o, a->size.values, o);
    }
}

/* ---- one tile --------------------------------------------------------------------------------------------------- */

static int64_t end_of(const cb_attn_step *s, int64_t row)
{
    while (row + 1 < s->n_rows && s->seq[row + 1] == s->seq[row])
        row++;
    return row + 1;
}

static int64_t begin_of(const cb_attn_step *s, int64_t row)
{
    while (row > 0 && s->seq[row - 1] == s->seq[row])
        row--;
    return row;
}

/* First row of the sequence's that becomes a record; its end when none does. */
static int64_t first_record(const cb_attn_step *s, int64_t row)
{
    int64_t begin = begin_of(s, row), end = end_of(s, row);
    return end - CB_MIN(s->n_drafts, end - begin - 1);
}

/* The rows from row0 on that are one tile: those that become records of one slot are not torn apart. */
static int64_t tile_rows(const cb_attn_step *s, int64_t row0)
{
    int64_t end = CB_MIN(s->n_rows, row0 + ROW_TILE);
    if (end < s->n_rows && first_record(s, end) < end && s->seq[end - 1] == s->seq[end])
        end = first_record(s, end);
    return end - row0;
}

/* `open` is the last part of the tile before, whose sequence may go on. */
static void find_parts(tile_arg *a, const part *open)
{
    const cb_attn_step *s = a->step;
    int64_t row = a->row0, last = a->row0 + a->n;
    a->n_parts = 0;
    while (row < last) {
        int64_t end = end_of(s, row), here = CB_MIN(end, last), kept = CB_MIN(here, first_record(s, row));
        part p = {.row = row, .n = here - row, .n_kept = CB_MAX(0, kept - row)};
        p.is_first = begin_of(s, row) == row;
        p.is_last = here == end;
        if (!p.is_first) {
            p.to = open->to;
            p.to_records = open->to_records;
        }
        for (int64_t i = row; i < here; i++)
            a->part_of[i - a->row0] = (int32_t)a->n_parts;
        a->parts[a->n_parts++] = p;
        row = here;
    }
}

static bool take_scratch(tile_arg *a)
{
    const cb_delta_layer *y = a->layer;
    int64_t n = a->n, V = y->n_value_heads, C = a->size.channels, dk = y->key_dim;
    a->parts = cb_scratch(a->pool, n * (int64_t)sizeof *a->parts);
    a->part_of = cb_scratch(a->pool, n * (int64_t)sizeof *a->part_of);
    a->raw = cb_scratch(a->pool, n * C * 4);
    a->mixed = cb_scratch(a->pool, n * C * 4);
    a->z = cb_scratch(a->pool, n * a->size.values * 4);
    a->o = cb_scratch(a->pool, n * a->size.values * 4);
    a->decay = cb_scratch(a->pool, n * V * 4);
    a->beta = cb_scratch(a->pool, n * V * 4);
    a->room = cb_scratch(a->pool, cb_pool_threads(a->pool) * dk * CB_DELTA_COLUMNS * 4);
    float *ones = cb_scratch(a->pool, C * 4), *norms = cb_scratch(a->pool, 2 * dk * 4);
    if (!a->parts || !a->part_of || !a->raw || !a->mixed || !a->z || !a->o || !a->decay || !a->beta || !a->room || !ones ||
        !norms)
        return false;
    for (int64_t i = 0; i < C; i++)
        ones[i] = 1.0f;
    for (int64_t i = 0; i < dk; i++) { /* x / sqrt(sum x^2 + eps) as RMSNorm; queries are scaled by dk^-1/2, too */
        norms[i] = (float)(1.0 / (double)dk);
        norms[dk + i] = (float)(1.0 / sqrt((double)dk));
    }
    a->ones = ones;
    a->q_norm = norms;
    a->k_norm = norms + dk;
    return true;
}

static int tile(tile_arg *a, part *open)
{
    const cb_delta_layer *y = a->layer;
    const cb_attn_step *s = a->step;
    int64_t n = a->n, D = y->hidden, V = y->n_value_heads;
    float *x = s->x + a->row0 * D, *h = s->hidden + a->row0 * D;
    if (!take_scratch(a))
        return CB_ENOMEM;
    find_parts(a, open);
    cb_parallel_for(a->pool, a->n_parts, a->n_parts, open_job, a);
    for (int64_t i = 0; i < a->n_parts; i++)
        if (a->parts[i].is_lost)
            return CB_EINVAL;
    cb_rmsnorm_internal(a->pool, x, D, y->input_norm, y->rms_eps, n, D, h, D);
    cb_product products[4] = {{&y->qkv, a->raw, a->size.channels}, {&y->z, a->z, a->size.values}, {&y->a, a->decay, V},
                              {&y->b, a->beta, V}};
    int status = cb_products(a->pool, products, 4, h, D, n);
    if (status != CB_OK)
        return status;
    cb_parallel_for(a->pool, n, cb_attn_grain(a->size.channels * (y->taps + 8)), input_job, a);
    int64_t pieces = CB_CEIL(y->value_dim, CB_DELTA_COLUMNS), cost = n / a->n_parts * 4 * y->key_dim * CB_DELTA_COLUMNS;
    cb_parallel_for(a->pool, a->n_parts * V * pieces, cb_attn_grain(cost), state_job, a);
    cb_parallel_for(a->pool, a->n_parts, 1, close_job, a);
    cb_parallel_for(a->pool, n, cb_attn_grain(8 * a->size.values), output_job, a);
    status = cb_linear_internal(a->pool, &y->out, a->o, a->size.values, n, x, D, true);
    if (status == CB_OK)
        cb_rmsnorm_internal(a->pool, x, D, y->post_norm, y->rms_eps, n, D, h, D);
    *open = a->parts[a->n_parts - 1];
    return status;
}

/* ---- contract --------------------------------------------------------------------------------------------------- */

static bool is_matrix(const cb_matrix *m, int64_t out, int64_t in)
{
    return m->format != CB_NONE && m->out == out && m->in == in && cb_matrix_check(m) == CB_OK;
}

static bool is_size_valid(const cb_delta_layer *y)
{
    return y->hidden > 0 && y->n_key_heads > 0 && y->n_value_heads > 0 && y->n_value_heads % y->n_key_heads == 0 &&
           y->key_dim > 0 && y->key_dim % 16 == 0 && y->value_dim > 0 && y->value_dim % 16 == 0 && y->taps > 0 &&
           y->taps <= MAX_TAPS;
}

static bool is_layer_valid(const cb_delta_layer *y)
{
    if (!is_size_valid(y) || !y->input_norm || !y->post_norm || !y->norm || !y->a_log || !y->dt_bias)
        return false;
    sizes s = sizes_of(y);
    return is_matrix(&y->qkv, s.channels, y->hidden) && is_matrix(&y->z, s.values, y->hidden) &&
           is_matrix(&y->a, y->n_value_heads, y->hidden) && is_matrix(&y->b, y->n_value_heads, y->hidden) &&
           is_matrix(&y->out, y->hidden, s.values) && is_matrix(&y->conv, s.channels, y->taps) && y->conv.format == CB_F32;
}

/* Rows of a sequence are neighbours without a gap, and no two sequences have the same state. */
static bool are_rows_valid(const cb_attn_step *s)
{
    for (int64_t t = 0; t < s->n_rows; t++) {
        if (t > 0 && s->seq[t] == s->seq[t - 1]) {
            if (s->position[t] != s->position[t - 1] + 1)
                return false;
            continue;
        }
        int32_t state = s->state_of[s->seq[t]];
        if (state < 0 || state >= s->n_states)
            return false;
        for (int64_t other = 0; other < t; other = end_of(s, other))
            if (s->state_of[s->seq[other]] == state)
                return false;
    }
    return true;
}

int64_t cb_delta_state_values(const cb_delta_layer *layer)
{
    return layer && is_size_valid(layer) ? sizes_of(layer).slot : CB_EINVAL;
}

int64_t cb_delta_record_values(const cb_delta_layer *layer)
{
    return layer && is_size_valid(layer) ? sizes_of(layer).record : CB_EINVAL;
}

int cb_delta_forward(cb_pool *pool, const cb_delta_layer *layer, const cb_attn_step *step)
{
    if (!pool || !layer || !step || !is_layer_valid(layer) || !cb_is_step_valid(step, 1))
        return CB_EINVAL;
    if (step->n_rows == 0)
        return CB_OK;
    if (!step->state || !step->state_of || step->n_drafts < 0 || step->n_drafts > CB_DELTA_MAX_DRAFTS ||
        (step->n_drafts > 0 && !step->records) || !are_rows_valid(step))
        return CB_EINVAL;
    part open = {0};
    int status = CB_OK;
    cb_pool_hold(pool);
    for (int64_t row0 = 0, n; row0 < step->n_rows && status == CB_OK; row0 += n) {
        n = tile_rows(step, row0);
        tile_arg a = {.pool = pool, .layer = layer, .step = step, .size = sizes_of(layer), .row0 = row0, .n = n};
        cb_scratch_mark mark = cb_scratch_begin(pool);
        status = tile(&a, &open);
        cb_scratch_end(pool, mark);
    }
    cb_pool_release(pool);
    return status;
}
