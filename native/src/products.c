/* products.c: several matrices over the same rows in one hand-out: fewer wake-ups per layer, activations quantised once. */
#include "attn.h"

typedef struct {
    const cb_product *products;
    const cb_rows *rows; /* by activation kind */
} products_arg;

static void products_job(void *arg, int64_t begin, int64_t end, int thread)
{
    const products_arg *a = arg;
    (void)thread;
    int64_t first = 0; /* item where the product's blocks start */
    for (const cb_product *p = a->products; begin < end; p++) {
        const cb_matrix *m = p->m;
        int64_t blocks = cb_blocks(m->out), to = CB_MIN(end, first + blocks);
        if (begin < to) {
            cb_kernels.linear[m->format][m->act](m, &a->rows[m->act], begin - first, to - first, p->y, p->ldy, false);
            begin = to;
        }
        first += blocks;
    }
}

/* Row blocks one thread takes at a time: several pieces per thread, each large enough to hide the hand-out. */
static int64_t grain_of(const cb_pool *pool, int64_t blocks, int64_t bytes, int64_t n_rows)
{
    int64_t least = CB_CEIL(32768, CB_MAX(1, bytes / blocks * CB_MIN(n_rows, 8)));
    return CB_MAX(1, CB_MIN(32, CB_MAX(blocks / (cb_pool_threads(pool) * 4), least)));
}

int cb_products(cb_pool *pool, const cb_product *products, int n, const float *x, int64_t ldx, int64_t n_rows)
{
    cb_scratch_mark mark = cb_scratch_begin(pool);
    cb_rows rows[2];
    bool is_ready[2] = {false, false};
    int64_t blocks = 0, bytes = 0;
    int status = CB_OK;
    for (int i = 0; i < n && status == CB_OK; i++) {
        const cb_matrix *m = products[i].m;
        if (!is_ready[m->act])
            status = cb_rows_prepare(pool, m->act, x, ldx, n_rows, m->in, &rows[m->act]);
        is_ready[m->act] = true;
        blocks += cb_blocks(m->out);
        bytes += cb_weight_bytes(m->format, m->out, m->in);
    }
    if (status == CB_OK) {
        products_arg job = {products, rows};
        cb_parallel_for(pool, blocks, grain_of(pool, blocks, bytes, n_rows), products_job, &job);
    }
    cb_scratch_end(pool, mark);
    return status;
}
