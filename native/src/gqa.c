/* gqa.c: one layer of grouped-query attention for the rows of a step: contract, projections, cache writes.
 *
 * Tiles of rows are projected, enter the cache and attend (gqa_tasks.c); a row sees only what stands at or before its own
 * position, so later tiles need not be there yet.
 */
#include "cbmath.h"
#include "gqa.h"
#include "int8.h"

#include <string.h>

#define ROW_TILE 128 /* rows whose queries and outputs are in scratch at one time */

/* ---- one row's projections become queries, keys and values --------------------------------------------------- */

typedef struct {
    const cb_gqa_call *call;
    int64_t row0;
    float *q, *k, *v;  /* [n, heads * head_dim] as projected; finished in place */
    const float *ones; /* [head_dim] */
} shape_arg;

static void add_bias(float *y, const float *bias, int64_t n)
{
    if (bias)
        for (int64_t i = 0; i < n; i++)
            y[i] = y[i] + bias[i];
}

static void clip(float *y, float limit, int64_t n)
{
    if (limit > 0)
        for (int64_t i = 0; i < n; i++) { /* a NaN stays */
            y[i] = y[i] > limit ? limit : y[i];
            y[i] = y[i] < -limit ? -limit : y[i];
        }
}

/* Norm, clip and rope of `heads` heads of one row. */
static void finish_heads(const shape_arg *a, int64_t t, float *y, int64_t heads, const float *bias, const float *norm)
{
    const cb_gqa_layer *l = a->call->layer;
    int64_t dim = l->head_dim, half = l->rope / 2;
    add_bias(y, bias, heads * dim);
    if (l->qk_norm == CB_QK_NORM_WHOLE)
        cb_kernels.rmsnorm(y, norm, l->rms_eps, heads * dim, y);
    else if (l->qk_norm == CB_QK_NORM_HEAD)
        for (int64_t h = 0; h < heads; h++)
            cb_kernels.rmsnorm(y + h * dim, norm, l->rms_eps, dim, y + h * dim);
    clip(y, l->clip, heads * dim);
    for (int64_t h = 0; h < heads; h++)
        cb_rope(y + h * dim, l->rope, l->rope_interleave, a->call->cosine + t * half, a->call->sine + t * half, y + h * dim);
}

static void shape_job(void *arg, int64_t begin, int64_t end, int thread)
{
    const shape_arg *a = arg;
    const cb_gqa_layer *l = a->call->layer;
    int64_t q_width = (int64_t)l->n_heads * l->head_dim, kv_width = (int64_t)l->n_kv_heads * l->head_dim;
    (void)thread;
    for (int64_t i = begin; i < end; i++) {
        float *q = a->q + i * q_width, *k = a->k + i * kv_width, *v = a->v + i * kv_width;
        if (l->v.format == CB_NONE)
            memcpy(v, k, (size_t)kv_width * sizeof(float));
        add_bias(v, l->v_bias, kv_width);
        clip(v, l->clip, kv_width);
        if (l->value_norm)
            for (int64_t h = 0; h < l->n_kv_heads; h++)
                cb_kernels.rmsnorm(v + h * l->head_dim, a->ones, l->rms_eps, l->head_dim, v + h * l->head_dim);
        finish_heads(a, a->row0 + i, k, l->n_kv_heads, l->k_bias, l->k_norm);
        finish_heads(a, a->row0 + i, q, l->n_heads, l->q_bias, l->q_norm);
        for (int64_t e = 0; e < q_width; e++)
            q[e] = q[e] * l->softmax_scale;
    }
}

/* ---- writing the cache ------------------------------------------------------------------------------------ */

typedef struct {
    const cb_gqa_call *call;
    int64_t row0, n;
    const float *k, *v;
} store_arg;

/* Items are key heads times rows, rows fastest: one thread writes neighbouring columns of a block's keys. */
static void store_job(void *arg, int64_t begin, int64_t end, int thread)
{
    const store_arg *a = arg;
    const cb_gqa_layer *l = a->call->layer;
    const cb_attn_step *s = a->call->step;
    int64_t dim = l->head_dim;
    (void)thread;
    for (int64_t item = begin; item < end; item++) {
        int64_t head = item / a->n, i = item % a->n, t = a->row0 + i, offset = s->position[t] % CB_KV_BLOCK;
        const float *k = a->k + (i * l->n_kv_heads + head) * dim, *v = a->v + (i * l->n_kv_heads + head) * dim;
        if (s->kv_format == CB_KV_INT8) {
            uint8_t *at = cb_gqa_int8_start(l, s->kv, cb_kv_block_of(s, t, s->position[t]), head);
            uint16_t *scales = cb_int8_head_scales(at, dim);
            cb_int8_store_key(at, scales, dim, offset, k);
            cb_int8_store_value(cb_int8_head_values(at, dim), scales + cb_groups(dim) * CB_KV_BLOCK, dim, offset, v);
            continue;
        }
        size_t keys = cb_gqa_start(l, cb_kv_block_of(s, t, s->position[t]), head) + (size_t)offset;
        size_t values = keys - (size_t)offset + (size_t)((CB_KV_BLOCK + offset) * dim);
        if (s->kv_format == CB_KV_BF16) {
            uint16_t *kv = s->kv;
            for (int64_t e = 0; e < dim; e++) {
                kv[keys + (size_t)(e * CB_KV_BLOCK)] = cb_f32_bf16(k[e]);
                kv[values + (size_t)e] = cb_f32_bf16(v[e]);
            }
        } else {
            float *kv = s->kv;
            for (int64_t e = 0; e < dim; e++)
                kv[keys + (size_t)(e * CB_KV_BLOCK)] = k[e];
            memcpy(kv + values, v, (size_t)dim * sizeof(float));
        }
    }
}

/* ---- one tile --------------------------------------------------------------------------------------------- */

typedef struct {
    const cb_gqa_layer *layer;
    float *x;       /* [n, D] */
    const float *y; /* [n, D] */
} output_arg;

static void output_job(void *arg, int64_t begin, int64_t end, int thread)
{
    const output_arg *a = arg;
    const cb_gqa_layer *l = a->layer;
    (void)thread;
    for (int64_t i = begin; i < end; i++) {
        float *x = a->x + i * l->hidden, *y = (float *)a->y + i * l->hidden;
        add_bias(y, l->o_bias, l->hidden);
        if (l->out_norm)
            cb_kernels.rmsnorm(y, l->out_norm, l->rms_eps, l->hidden, y);
        for (int64_t e = 0; e < l->hidden; e++)
            x[e] = x[e] + y[e];
    }
}

static int output(const cb_gqa_call *c, const float *heads, int64_t row0, int64_t n)
{
    const cb_gqa_layer *l = c->layer;
    int64_t D = l->hidden;
    float *x = c->step->x + row0 * D;
    if (!l->o_bias && !l->out_norm)
        return cb_linear_internal(c->pool, &l->o, heads, l->o.in, n, x, D, true);
    float *y = cb_scratch(c->pool, n * D * 4);
    if (!y)
        return CB_ENOMEM;
    int status = cb_linear_internal(c->pool, &l->o, heads, l->o.in, n, y, D, false);
    output_arg job = {l, x, y};
    if (status == CB_OK)
        cb_parallel_for(c->pool, n, 8, output_job, &job);
    return status;
}

typedef struct {
    const cb_gqa_layer *layer;
    float *heads, *gate; /* [n, H * head_dim] */
} gate_arg;

static void gate_job(void *arg, int64_t begin, int64_t end, int thread)
{
    const gate_arg *a = arg;
    int64_t width = a->layer->q.out;
    (void)thread;
    for (int64_t i = begin; i < end; i++) {
        float *heads = a->heads + i * width, *gate = a->gate + i * width;
        cb_kernels.sigmoid(gate, width, gate);
        for (int64_t e = 0; e < width; e++)
            heads[e] = heads[e] * gate[e];
    }
}

static int tile(const cb_gqa_call *c, int64_t row0, int64_t n)
{
    const cb_gqa_layer *l = c->layer;
    int64_t D = l->hidden, dim = l->head_dim, q_width = l->n_heads * dim, kv_width = l->n_kv_heads * dim;
    float *h = c->step->hidden + row0 * D;
    float *q = cb_scratch(c->pool, n * q_width * 4), *k = cb_scratch(c->pool, n * kv_width * 4);
    float *v = cb_scratch(c->pool, n * kv_width * 4), *ones = cb_scratch(c->pool, dim * 4);
    bool has_gate = l->gate.format != CB_NONE;
    float *gate = has_gate ? cb_scratch(c->pool, n * q_width * 4) : NULL;
    if (!q || !k || !v || !ones || (has_gate && !gate))
        return CB_ENOMEM;
    for (int64_t e = 0; e < dim; e++)
        ones[e] = 1.0f;
    int64_t since = cb_now_ns();
    cb_rmsnorm_internal(c->pool, c->step->x + row0 * D, D, l->input_norm, l->rms_eps, n, D, h, D);
    cb_product products[4] = {{&l->q, q, q_width}, {&l->k, k, kv_width}};
    int n_products = 2;
    if (l->v.format != CB_NONE)
        products[n_products++] = (cb_product){&l->v, v, kv_width};
    if (has_gate)
        products[n_products++] = (cb_product){&l->gate, gate, q_width};
    int status = cb_products(c->pool, products, n_products, h, D, n);
    if (status != CB_OK)
        return status;
    shape_arg shape = {c, row0, q, k, v, ones};
    cb_parallel_for(c->pool, n, 4, shape_job, &shape);
    store_arg store = {c, row0, n, k, v};
    cb_parallel_for(c->pool, n * l->n_kv_heads, cb_attn_grain(8 * dim), store_job, &store);
    cb_phase_end(c->pool, CB_PHASE_PROJECTIONS, &since);
    status = cb_gqa_attend(c, row0, n, q);
    cb_phase_share(c->pool, &since);
    gate_arg gating = {l, q, gate};
    if (status == CB_OK && has_gate)
        cb_parallel_for(c->pool, n, 8, gate_job, &gating);
    if (status == CB_OK)
        status = output(c, q, row0, n);
    if (status == CB_OK)
        cb_rmsnorm_internal(c->pool, c->step->x + row0 * D, D, l->post_norm, l->rms_eps, n, D, h, D);
    cb_phase_end(c->pool, CB_PHASE_PROJECTIONS, &since);
    return status;
}

/* ---- contract --------------------------------------------------------------------------------------------- */

static bool is_matrix(const cb_matrix *m, int64_t out, int64_t in)
{
    return m->format != CB_NONE && m->out == out && m->in == in && cb_matrix_check(m) == CB_OK;
}

static bool is_layer_valid(const cb_gqa_layer *l)
{
    if (l->hidden <= 0 || l->n_heads <= 0 || l->n_kv_heads <= 0 || l->n_heads % l->n_kv_heads || l->head_dim <= 0 ||
        l->rope < 0 || l->rope % 2 || l->rope > l->head_dim || l->rope > CB_MAX_ROPE || l->window < 0 || !l->input_norm ||
        !l->post_norm || (l->rope > 0 && !l->inv_freq) || l->qk_norm < CB_QK_NORM_NONE || l->qk_norm > CB_QK_NORM_WHOLE ||
        (l->qk_norm != CB_QK_NORM_NONE && (!l->q_norm || !l->k_norm)))
        return false;
    int64_t q_width = (int64_t)l->n_heads * l->head_dim, kv_width = (int64_t)l->n_kv_heads * l->head_dim;
    return is_matrix(&l->q, q_width, l->hidden) && is_matrix(&l->k, kv_width, l->hidden) &&
           (l->v.format == CB_NONE || is_matrix(&l->v, kv_width, l->hidden)) &&
           (l->gate.format == CB_NONE || is_matrix(&l->gate, q_width, l->hidden)) && is_matrix(&l->o, l->hidden, q_width);
}

static int forward(cb_gqa_call *c)
{
    int64_t n = c->step->n_rows;
    float *cosine, *sine;
    int status = cb_rope_angles(c->pool, c->step, c->layer->rope, c->layer->inv_freq, c->layer->rope_amplitude, &cosine, &sine);
    c->cosine = cosine;
    c->sine = sine;
    for (int64_t row0 = 0; row0 < n && status == CB_OK; row0 += ROW_TILE) {
        cb_scratch_mark mark = cb_scratch_begin(c->pool);
        status = tile(c, row0, CB_MIN(ROW_TILE, n - row0));
        cb_scratch_end(c->pool, mark);
    }
    return status;
}

int cb_gqa_forward(cb_pool *pool, const cb_gqa_layer *layer, const cb_attn_step *step)
{
    if (!pool || !layer || !step || !is_layer_valid(layer) || !cb_is_step_valid(step, layer->window))
        return CB_EINVAL;
    if (step->n_rows == 0)
        return CB_OK;
    cb_gqa_call call = {.pool = pool, .layer = layer, .step = step};
    cb_pool_hold(pool);
    cb_scratch_mark mark = cb_scratch_begin(pool);
    int status = forward(&call);
    cb_scratch_end(pool, mark);
    cb_pool_release(pool);
    return status;
}
