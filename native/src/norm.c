#include "internal.h"

typedef struct {
    const float *x, *w;
    int64_t ldx, n, ldo;
    float eps;
    float *out;
} norm_arg;

static void norm_rows(void *v, int64_t begin, int64_t end, int thread)
{
    (void)thread;
    norm_arg *a = v;
    for (int64_t r = begin; r < end; r++)
        cb_kernels.rmsnorm(a->x + r * a->ldx, a->w, a->eps, a->n, a->out + r * a->ldo);
}

void cb_rmsnorm_internal(cb_pool *pool, const float *x, int64_t ldx, const float *w, float eps, int64_t n_rows,
                         int64_t n, float *out, int64_t ldo)
{
    norm_arg a = {x, w, ldx, n, ldo, eps, out};
    cb_parallel_for(pool, n_rows, 8, norm_rows, &a);
}

int cb_rmsnorm(cb_pool *pool, const float *x, int64_t ldx, const float *w, float eps, int64_t n_rows, int64_t n,
               float *out, int64_t ldo)
{
    if (!pool || !w || n_rows < 0 || n <= 0 || ldx < n || ldo < n || (n_rows && (!x || !out)))
        return CB_EINVAL;
    cb_pool_hold(pool);
    cb_rmsnorm_internal(pool, x, ldx, w, eps, n_rows, n, out, ldo);
    cb_pool_release(pool);
    return CB_OK;
}
