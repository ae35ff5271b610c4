/* attn.c: one layer of absorbed latent attention for the rows of a step: contract, cache writes, projections.
 *
 * Tiles of rows are projected, enter the cache and attend (attn_tasks.c); a row sees only what stands at or before its own
 * position, so later tiles need not be there yet. step->hidden holds the normed input of a row until the row's own result
 * replaces it.
 */
#include "int8.h"

#define ROW_TILE 128 /* rows whose queries, latents and outputs are in scratch at one time */

/* ---- writing the cache ------------------------------------------------------------------------------------ */

typedef struct {
    const cb_attn_call *call;
    int64_t row0;
    float *kv;  /* [n, R + rope] as projected; normed and turned in place */
    float *key; /* [n, index_dim] or NULL */
} store_job_arg;

static void store_latent(const cb_attn_step *s, int64_t width, int64_t block, int64_t offset, const float *kv)
{
    if (s->kv_format == CB_KV_INT8)
        cb_int8_store_row(cb_int8_block_at(s->kv, width, block), width, offset, kv);
    else
        cb_store_row(s->kv, s->kv_format, width, block, offset, kv);
}

static void store_index_key(const cb_attn_step *s, int64_t dim, int64_t block, int64_t offset, const float *key)
{
    if (s->kv_format != CB_KV_INT8) {
        cb_store_row(s->index_k, s->kv_format, dim, block, offset, key);
        return;
    }
    uint8_t *keys = cb_int8_block_at(s->index_k, dim, block);
    cb_int8_store_key(keys, cb_int8_key_scales(keys, dim), dim, offset, key);
}

static void store_job(void *arg, int64_t begin, int64_t end, int thread)
{
    const store_job_arg *a = arg;
    const cb_attn_call *c = a->call;
    const cb_attn_layer *y = c->layer;
    int64_t half = y->rope / 2, width = y->kv_rank + y->rope;
    (void)thread;
    for (int64_t i = begin; i < end; i++) {
        int64_t t = a->row0 + i, position = c->step->position[t];
        int64_t block = cb_kv_block_of(c->step, t, position), offset = position % CB_KV_BLOCK;
        const float *cosine = c->cosine + t * half, *sine = c->sine + t * half;
        float *kv = a->kv + i * width;
        cb_kernels.rmsnorm(kv, y->kv_a_norm, y->latent_eps, y->kv_rank, kv);
        cb_rope(kv + y->kv_rank, y->rope, y->rope_interleave, cosine, sine, kv + y->kv_rank);
        store_latent(c->step, width, block, offset, kv);
        if (a->key) {
            float *key = a->key + i * y->index_dim;
            cb_kernels.layernorm(key, y->index_k_norm_w, y->index_k_norm_b, y->index_norm_eps, y->index_dim, key);
            cb_rope(key, y->rope, y->index_rope_interleave, cosine, sine, key);
            store_index_key(c->step, y->index_dim, block, offset, key);
        }
    }
}

/* ---- one matrix per head ---------------------------------------------------------------------------------- */

typedef struct {
    const cb_matrix *stack;
    cb_rows rows; /* row t * H + h is head h of row t */
    const int32_t *index; /* [H][n]: t * H + h */
    int64_t n, blocks;
    float *y; /* [n][H][out] */
    int64_t n_heads;
} heads_job_arg;

static void heads_job(void *arg, int64_t begin, int64_t end, int thread)
{
    const heads_job_arg *a = arg;
    (void)thread;
    while (begin < end) {
        int64_t head = begin / a->blocks, b0 = begin % a->blocks;
        int64_t b1 = CB_MIN(a->blocks, b0 + (end - begin));
        cb_matrix m = cb_matrix_at(a->stack, head);
        cb_rows rows = a->rows;
        rows.in_index = a->index + head * a->n;
        rows.n_rows = a->n;
        cb_kernels.linear[m.format][m.act](&m, &rows, b0, b1, a->y + head * m.out, a->n_heads * m.out, false);
        begin += b1 - b0;
    }
}

/* y f32[n, H, out] = per head stack[h] times x[t][h][0 .. in), rows of x being ldx apart. */
static int heads_linear(cb_pool *pool, const cb_matrix *stack, int64_t n_heads, const float *x, int64_t ldx, int64_t n,
                        float *y)
{
    cb_scratch_mark mark = cb_scratch_begin(pool);
    heads_job_arg job = {.stack = stack, .n = n, .blocks = cb_blocks(stack->out), .y = y, .n_heads = n_heads};
    int32_t *index = cb_scratch(pool, n * n_heads * 4);
    int status = index ? cb_rows_prepare(pool, stack->act, x, ldx, n * n_heads, stack->in, &job.rows) : CB_ENOMEM;
    if (status == CB_OK) {
        for (int64_t h = 0; h < n_heads; h++)
            for (int64_t t = 0; t < n; t++)
                index[h * n + t] = (int32_t)(t * n_heads + h);
        job.index = index;
        int64_t items = n_heads * job.blocks;
        cb_parallel_for(pool, items, cb_attn_grain(CB_TILE_ROWS * stack->in * n), heads_job, &job);
    }
    cb_scratch_end(pool, mark);
    return status;
}

/* ---- one tile ---------------------------------------------------------------------------------------------- */

/* Everything that reads h in one hand-out: the row's latent, its query latent (or query) and its index key. */
static int project(const cb_attn_call *c, const float *h, int64_t n, store_job_arg *cache, float *q)
{
    const cb_attn_layer *y = c->layer;
    int64_t width = y->kv_rank + y->rope;
    const cb_matrix *q_first = y->q_a.format != CB_NONE ? &y->q_a : &y->q_b;
    cb_product products[3] = {{q_first, q, q_first->out}};
    int n_products = 1;
    cache->kv = cb_scratch(c->pool, n * width * 4);
    if (!cache->kv)
        return CB_ENOMEM;
    products[n_products++] = (cb_product){&y->kv_a, cache->kv, width};
    if (y->index_kind == CB_INDEX_FULL) {
        cache->key = cb_scratch(c->pool, n * y->index_dim * 4);
        if (!cache->key)
            return CB_ENOMEM;
        products[n_products++] = (cb_product){&y->index_wk, cache->key, y->index_dim};
    }
    return cb_products(c->pool, products, n_products, h, y->hidden, n);
}

typedef struct {
    const cb_attn_call *call;
    int64_t row0;
    const float *q; /* [n, H, nope + rope] */
    float *latent;  /* [n, H, R] */
} int8_arg;

static void int8_query(const void *arg, int64_t i, int64_t head, float *to)
{
    const int8_arg *a = arg;
    cb_latent_query(a->call, a->row0, i, head, a->q, a->latent, to, 1);
}

static float *int8_result(const void *arg, int64_t i, int64_t head)
{
    const int8_arg *a = arg;
    const cb_attn_layer *y = a->call->layer;
    return a->latent + (i * y->n_heads + head) * y->kv_rank;
}

static int attend(const cb_attn_call *c, int64_t row0, int64_t n, const float *q, float *latent)
{
    const cb_attn_layer *y = c->layer;
    const cb_attn_step *s = c->step;
    if (s->kv_format != CB_KV_INT8)
        return cb_attend_rows(c, row0, n, q, latent);
    int8_arg arg = {c, row0, q, latent};
    bool is_sparse = y->index_kind != CB_INDEX_NONE;
    cb_int8_attention a = {
        .pool = c->pool, .step = s, .row0 = row0, .n = n, .n_heads = y->n_heads, .n_kv_heads = 1,
        .depth = y->kv_rank + y->rope, .dim = y->kv_rank, .selected = is_sparse ? s->selected : NULL,
        .n_selected = s->n_selected, .topk = y->index_topk, .arg = &arg, .query = int8_query, .result = int8_result};
    return cb_int8_attend(&a);
}

static int tile(const cb_attn_call *c, int64_t row0, int64_t n)
{
    const cb_attn_layer *y = c->layer;
    int64_t heads = y->n_heads, head_q = y->nope + y->rope, D = y->hidden;
    bool has_q_a = y->q_a.format != CB_NONE;
    float *h = c->step->hidden + row0 * D;
    float *wide = cb_scratch(c->pool, n * heads * CB_MAX(head_q, y->v_dim) * 4); /* queries, later head outputs */
    float *latent = cb_scratch(c->pool, n * heads * y->kv_rank * 4);
    float *q_lat = cb_scratch(c->pool, has_q_a ? n * y->q_rank * 4 : 0);
    if (!wide || !latent || !q_lat)
        return CB_ENOMEM;
    int64_t since = cb_now_ns();
    cb_rmsnorm_internal(c->pool, c->step->x + row0 * D, D, y->input_norm, y->rms_eps, n, D, h, D);
    store_job_arg cache = {c, row0, NULL, NULL};
    int status = project(c, h, n, &cache, has_q_a ? q_lat : wide);
    if (status != CB_OK)
        return status;
    cb_parallel_for(c->pool, n, 4, store_job, &cache);

    const float *q_in = has_q_a ? q_lat : h;
    int64_t q_width = has_q_a ? y->q_rank : D;
    if (has_q_a) {
        cb_rmsnorm_internal(c->pool, q_lat, y->q_rank, y->q_a_norm, y->latent_eps, n, y->q_rank, q_lat, y->q_rank);
        status = cb_linear_internal(c->pool, &y->q_b, q_in, q_width, n, wide, heads * head_q, false);
    }
    cb_phase_end(c->pool, CB_PHASE_PROJECTIONS, &since);
    if (status == CB_OK && y->index_kind == CB_INDEX_FULL)
        status = cb_index_select(c, row0, n, q_in, q_width, h);
    cb_phase_end(c->pool, CB_PHASE_INDEXER, &since);
    if (status == CB_OK)
        status = heads_linear(c->pool, &y->k_b, heads, wide, head_q, n, latent);
    cb_phase_end(c->pool, CB_PHASE_PROJECTIONS, &since);
    if (status == CB_OK)
        status = attend(c, row0, n, wide, latent);
    cb_phase_share(c->pool, &since);
    if (status == CB_OK)
        status = heads_linear(c->pool, &y->v_b, heads, latent, y->kv_rank, n, wide);
    if (status == CB_OK)
        status = cb_linear_internal(c->pool, &y->o, wide, heads * y->v_dim, n, c->step->x + row0 * D, D, true);
    if (status == CB_OK)
        cb_rmsnorm_internal(c->pool, c->step->x + row0 * D, D, y->post_norm, y->rms_eps, n, D, h, D);
    cb_phase_end(c->pool, CB_PHASE_PROJECTIONS, &since);
    return status;
}

/* ---- contract --------------------------------------------------------------------------------------------- */

static bool is_matrix(const cb_matrix *m, int64_t out, int64_t in)
{
    return m->format != CB_NONE && m->out == out && m->in == in && cb_matrix_check(m) == CB_OK;
}

static bool is_layer_valid(const cb_attn_layer *y)
{
    if (y->hidden <= 0 || y->n_heads <= 0 || y->kv_rank <= 0 || y->nope <= 0 || y->v_dim <= 0 || y->rope < 0 ||
        y->rope % 2 || y->rope > CB_MAX_ROPE || !y->input_norm || !y->kv_a_norm || !y->post_norm ||
        (y->rope > 0 && !y->inv_freq))
        return false;
    int64_t q_width = y->hidden;
    if (y->q_a.format != CB_NONE) {
        if (y->q_rank <= 0 || !y->q_a_norm || !is_matrix(&y->q_a, y->q_rank, y->hidden))
            return false;
        q_width = y->q_rank;
    }
    int64_t heads = y->n_heads;
    if (!is_matrix(&y->q_b, heads * (y->nope + y->rope), q_width) ||
        !is_matrix(&y->kv_a, y->kv_rank + y->rope, y->hidden) || !is_matrix(&y->k_b, y->kv_rank, y->nope) ||
        !is_matrix(&y->v_b, y->v_dim, y->kv_rank) || !is_matrix(&y->o, y->hidden, heads * y->v_dim))
        return false;
    switch (y->index_kind) {
    case CB_INDEX_NONE: return true;
    case CB_INDEX_SHARED: return y->index_topk > 0;
    case CB_INDEX_FULL:
        return y->index_topk > 0 && y->index_heads > 0 && y->index_dim >= y->rope && y->index_dim > 0 &&
               y->index_k_norm_w && y->index_k_norm_b &&
               is_matrix(&y->index_wq_b, (int64_t)y->index_heads * y->index_dim, q_width) &&
               is_matrix(&y->index_wk, y->index_dim, y->hidden) &&
               is_matrix(&y->index_weights, y->index_heads, y->hidden);
    default: return false;
    }
}

static bool is_selection_valid(const int32_t *selected, int64_t n, int64_t topk, int64_t position)
{
    if (n < 0)
        return true;
    if (n == 0 || n > topk)
        return false;
    int64_t before = -1;
    for (int64_t i = 0; i < n; before = selected[i], i++)
        if (selected[i] <= before)
            return false;
    return before <= position;
}

static bool is_step_valid(const cb_attn_layer *y, const cb_attn_step *s)
{
    if (!cb_is_step_valid(s, 0))
        return false;
    if (s->n_rows == 0)
        return true;
    if ((y->index_kind != CB_INDEX_NONE && (!s->selected || !s->n_selected)) ||
        (y->index_kind == CB_INDEX_FULL && !s->index_k))
        return false;
    for (int64_t t = 0; y->index_kind == CB_INDEX_SHARED && t < s->n_rows; t++)
        if (!is_selection_valid(s->selected + t * y->index_topk, s->n_selected[t], y->index_topk, s->position[t]))
            return false;
    return true;
}

static int forward(cb_attn_call *c)
{
    int64_t n = c->step->n_rows;
    const cb_attn_layer *y = c->layer;
    int status = cb_rope_angles(c->pool, c->step, y->rope, y->inv_freq, y->rope_amplitude, &c->cosine, &c->sine);
    for (int64_t row0 = 0; row0 < n && status == CB_OK; row0 += ROW_TILE) {
        cb_scratch_mark mark = cb_scratch_begin(c->pool);
        status = tile(c, row0, CB_MIN(ROW_TILE, n - row0));
        cb_scratch_end(c->pool, mark);
    }
    return status;
}

int cb_attn_forward(cb_pool *pool, const cb_attn_layer *layer, const cb_attn_step *step)
{
    if (!pool || !layer || !step || !is_layer_valid(layer) || !is_step_valid(layer, step))
        return CB_EINVAL;
    if (step->n_rows == 0)
        return CB_OK;
    cb_attn_call call = {.pool = pool, .layer = layer, .step = step};
    cb_pool_hold(pool);
    cb_scratch_mark mark = cb_scratch_begin(pool);
    int status = forward(&call);
    cb_scratch_end(pool, mark);
    cb_pool_release(pool);
    return status;
}
