/* softcap.c: logits bent into (-cap, cap). cap * tanh(x / cap) as
 *   s = sigmoid(x * (2 / cap)), x = cap * (2 s - 1)
 * in single f32 operations; the sigmoid is the rungs' own, hence the same bits on each. */
#include "internal.h"

#define PIECE 4096 /* values an item takes */

typedef struct {
    float cap, slope;
    int64_t n;
    float *x;
} cap_arg;

static void cap_pieces(void *v, int64_t begin, int64_t end, int thread)
{
    const cap_arg *a = v;
    (void)thread;
    for (int64_t piece = begin; piece < end; piece++) {
        float *x = a->x + piece * PIECE;
        int64_t n = CB_MIN(PIECE, a->n - piece * PIECE);
        for (int64_t i = 0; i < n; i++)
            x[i] = x[i] * a->slope;
        cb_kernels.sigmoid(x, n, x);
        for (int64_t i = 0; i < n; i++)
            x[i] = (2.0f * x[i] - 1.0f) * a->cap;
    }
}

int cb_soft_cap(cb_pool *pool, float cap, int64_t n, float *x)
{
    if (!pool || !(cap > 0) || n < 0 || (n && !x))
        return CB_EINVAL;
    cap_arg arg = {cap, 2.0f / cap, n, x};
    cb_pool_hold(pool);
    cb_parallel_for(pool, (n + PIECE - 1) / PIECE, 1, cap_pieces, &arg);
    cb_pool_release(pool);
    return CB_OK;
}
