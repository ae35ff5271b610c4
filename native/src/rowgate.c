/* rowgate.c: rows times a gate of their own: y[t][e] = y[t][e] * sigmoid(w . h[t]); the sigmoid is the rungs' own. */
#include "internal.h"

typedef struct {
    const float *gate; /* [T] */
    int64_t hidden;
    float *y;
} gate_arg;

static void gate_job(void *v, int64_t begin, int64_t end, int thread)
{
    const gate_arg *a = v;
    (void)thread;
    for (int64_t t = begin; t < end; t++) {
        float share, *y = a->y + t * a->hidden;
        cb_kernels.sigmoid(a->gate + t, 1, &share);
        for (int64_t e = 0; e < a->hidden; e++)
            y[e] = y[e] * share;
    }
}

int cb_gate_rows(cb_pool *pool, const cb_matrix *gate, const float *h, int64_t n_rows, float *y)
{
    if (!pool || !gate || gate->format != CB_F32 || gate->act != CB_ACT_F32 || gate->out != 1 || cb_matrix_check(gate) != CB_OK ||
        n_rows < 0 || (n_rows && (!h || !y)))
        return CB_EINVAL;
    int status = CB_OK;
    cb_pool_hold(pool);
    cb_scratch_mark mark = cb_scratch_begin(pool);
    float *share = cb_scratch(pool, n_rows * 4);
    if (n_rows && !share)
        status = CB_ENOMEM;
    if (status == CB_OK && n_rows)
        status = cb_linear_internal(pool, gate, h, gate->in, n_rows, share, 1, false);
    if (status == CB_OK) {
        gate_arg arg = {share, gate->in, y};
        cb_parallel_for(pool, n_rows, 8, gate_job, &arg);
    }
    cb_scratch_end(pool, mark);
    cb_pool_release(pool);
    return status;
}
