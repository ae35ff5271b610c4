/* linear.c: checks, activation quantisation and threads around the matrix kernels. */
#include "internal.h"

int cb_matrix_check(const cb_matrix *m)
{
    if (cb_weight_bytes(m->format, m->out, m->in) < 0 || !m->weight || (uintptr_t)m->weight % 64)
        return CB_EINVAL;
    bool quantised = cb_has_scales(m->format);
    if (quantised && (!m->scale || (uintptr_t)m->scale % 64))
        return CB_EINVAL;
    return m->act == CB_ACT_F32 || (m->act == CB_ACT_Q8 && quantised) ? CB_OK : CB_EINVAL;
}

cb_matrix cb_matrix_at(const cb_matrix *m, int64_t i)
{
    cb_matrix one = *m;
    one.weight = (const char *)m->weight + i * cb_weight_bytes(m->format, m->out, m->in);
    if (m->scale)
        one.scale = (const char *)m->scale + i * cb_scale_bytes(m->format, m->out, m->in);
    return one;
}

typedef struct {
    const float *x;
    int64_t ldx, n, ng;
    int8_t *q;
    float *scale;
    int32_t *sum;
} quantise_arg;

static void quantise_rows(void *v, int64_t begin, int64_t end, int thread)
{
    (void)thread;
    quantise_arg *a = v;
    for (int64_t r = begin; r < end; r++)
        cb_kernels.quantise(a->x + r * a->ldx, a->n, a->q + r * a->ng * 64, a->scale + r * a->ng, a->sum + r * a->ng * 2);
}

int cb_rows_prepare(cb_pool *pool, int act, const float *x, int64_t ldx, int64_t n_rows, int64_t n, cb_rows *rows)
{
    *rows = (cb_rows){.x = x, .ldx = ldx, .n_rows = n_rows};
    if (act == CB_ACT_F32)
        return CB_OK;
    int64_t ng = cb_groups(n);
    int8_t *q = cb_scratch(pool, n_rows * ng * 64);
    float *scale = cb_scratch(pool, n_rows * ng * 4);
    int32_t *sum = cb_scratch(pool, n_rows * ng * 2 * 4);
    if (!q || !scale || !sum)
        return CB_ENOMEM;
    quantise_arg a = {x, ldx, n, ng, q, scale, sum};
    cb_parallel_for(pool, n_rows, 8, quantise_rows, &a);
    rows->q = q;
    rows->scale = scale;
    rows->sum = sum;
    return CB_OK;
}

/* Row blocks one thread takes at a time: pieces of roughly equal work, large enough to hide the hand-out, several per
 * thread because the other processes of the group disturb them unevenly. */
static int64_t grain_of(const cb_pool *pool, const cb_matrix *m, int64_t n_rows)
{
    int64_t nb = cb_blocks(m->out), threads = cb_pool_threads(pool);
    int64_t block_bytes = cb_weight_bytes(m->format, 16, m->in);
    int64_t least = CB_CEIL(32768, block_bytes * CB_MIN(n_rows, 8));
    int64_t grain = CB_MAX(nb / (threads * 4), least);
    return CB_MAX(1, CB_MIN(grain, 32));
}

typedef struct {
    const cb_matrix *m;
    const cb_rows *rows;
    float *y;
    int64_t ldy;
    bool add;
    cb_linear_fn kernel;
} linear_arg;

static void linear_blocks(void *v, int64_t begin, int64_t end, int thread)
{
    (void)thread;
    linear_arg *a = v;
    a->kernel(a->m, a->rows, begin, end, a->y, a->ldy, a->add);
}

void cb_linear_rows(cb_pool *pool, const cb_matrix *m, const cb_rows *rows, float *y, int64_t ldy, bool add)
{
    if (!rows->n_rows)
        return;
    linear_arg a = {m, rows, y, ldy, add, cb_kernels.linear[m->format][m->act]};
    cb_parallel_for(pool, cb_blocks(m->out), grain_of(pool, m, rows->n_rows), linear_blocks, &a);
}

int cb_linear_internal(cb_pool *pool, const cb_matrix *m, const float *x, int64_t ldx, int64_t n_rows, float *y,
                       int64_t ldy, bool add)
{
    cb_scratch_mark mark = cb_scratch_begin(pool);
    cb_rows rows;
    int status = cb_rows_prepare(pool, m->act, x, ldx, n_rows, m->in, &rows);
    if (status == CB_OK)
        cb_linear_rows(pool, m, &rows, y, ldy, add);
    cb_scratch_end(pool, mark);
    return status;
}

int cb_linear(cb_pool *pool, const cb_matrix *m, const float *x, int64_t ldx, int64_t n_rows, float *y, int64_t ldy)
{
    if (!pool || !m || cb_matrix_check(m) || n_rows < 0 || ldx < m->in || ldy < m->out || (n_rows && (!x || !y)))
        return CB_EINVAL;
    cb_pool_hold(pool);
    int status = cb_linear_internal(pool, m, x, ldx, n_rows, y, ldy, false);
    cb_pool_release(pool);
    return status;
}
