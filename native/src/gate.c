/* gate.c: logits by the f32 linear, scores of them, and the choice, which is scalar code and the same on every rung.
 *
 * Definition, per row: z = h W^T + logit_bias; s = sigmoid(z), or s = exp(z - max) / sum with the sum ascending (softmax);
 * c = s + bias. With more than one group, a group's score is the sum of
 * its two largest c, and only the topk_group best groups stay. The k largest c are chosen (ties: lower id, lower group),
 * listed in ascending id; w = s, if norm_topk: w = s / (sum + 1e-20), sum ascending; then times scaling, then times
 * expert_scale. */
#include "cbmath.h"
#include "internal.h"

#include <stdatomic.h>

/* Strictly larger wins, so that the first of equals stays. */
static int64_t first_largest(const float *c, int64_t n, const uint8_t *taken)
{
    int64_t best = -1;
    for (int64_t i = 0; i < n; i++)
        if (!taken[i] && (best < 0 || c[i] > c[best]))
            best = i;
    return best;
}

static float group_score(const float *c, int64_t n)
{
    float first = -INFINITY, second = -INFINITY;
    for (int64_t i = 0; i < n; i++) {
        if (c[i] > first) {
            second = first;
            first = c[i];
        } else if (c[i] > second) {
            second = c[i];
        }
    }
    return n > 1 ? first + second : first;
}

typedef struct {
    const cb_gate *gate;
    float *scores, *biased, *group; /* [T][E], [threads][E], [threads][n_group] */
    uint8_t *taken, *group_taken;   /* [threads][E], [threads][n_group] */
    int32_t *ids;
    float *weights;
    _Atomic int64_t bad_row;
} gate_arg;

/* In place; every z is finite. */
static void softmax(float *z, int64_t n)
{
    float most = z[0], sum = 0;
    for (int64_t e = 1; e < n; e++)
        most = CB_MAX(most, z[e]);
    for (int64_t e = 0; e < n; e++) {
        z[e] = cb_exp(z[e] - most);
        sum = sum + z[e];
    }
    for (int64_t e = 0; e < n; e++)
        z[e] = z[e] / sum;
}

static bool choose(const cb_gate *gate, float *s, float *c, float *group, uint8_t *taken, uint8_t *group_taken,
                   int32_t *ids, float *weights)
{
    int64_t n = gate->n_experts, size = n / gate->n_group;
    bool finite = true;
    for (int64_t e = 0; e < n; e++) {
        if (gate->logit_bias)
            s[e] = s[e] + gate->logit_bias[e];
        finite &= (cb_f32_bits(s[e]) & 0x7fffffffu) < 0x7f800000u;
    }
    if (gate->scoring == CB_GATE_SIGMOID)
        cb_kernels.sigmoid(s, n, s);
    else if (finite)
        softmax(s, n);
    for (int64_t e = 0; e < n; e++) {
        c[e] = gate->bias ? s[e] + gate->bias[e] : s[e];
        finite &= (cb_f32_bits(c[e]) & 0x7fffffffu) < 0x7f800000u;
        taken[e] = gate->n_group > 1;
    }
    if (!finite) {
        for (int32_t i = 0; i < gate->k; i++) {
            ids[i] = i;
            weights[i] = cb_bits_f32(0x7fc00000u); /* whoever uses the row anyway must notice */
        }
        return false;
    }
    if (gate->n_group > 1) {
        for (int64_t g = 0; g < gate->n_group; g++) {
            group[g] = group_score(c + g * size, size);
            group_taken[g] = 0;
        }
        for (int32_t i = 0; i < gate->topk_group; i++) {
            int64_t g = first_largest(group, gate->n_group, group_taken);
            group_taken[g] = 1;
            for (int64_t e = g * size; e < (g + 1) * size; e++)
                taken[e] = 0;
        }
    }
    for (int32_t i = 0; i < gate->k; i++) {
        int32_t e = (int32_t)first_largest(c, n, taken), at = i;
        taken[e] = 1;
        for (; at > 0 && ids[at - 1] > e; at--)
            ids[at] = ids[at - 1];
        ids[at] = e;
    }
    float sum = 0;
    for (int32_t i = 0; i < gate->k; i++)
        sum = sum + s[ids[i]];
    for (int32_t i = 0; i < gate->k; i++)
        weights[i] = (gate->norm_topk ? s[ids[i]] / (sum + 1e-20f) : s[ids[i]]) * gate->scaling;
    if (gate->expert_scale)
        for (int32_t i = 0; i < gate->k; i++)
            weights[i] = weights[i] * gate->expert_scale[ids[i]];
    return true;
}

static void gate_rows(void *v, int64_t begin, int64_t end, int thread)
{
    gate_arg *a = v;
    const cb_gate *gate = a->gate;
    int64_t n = gate->n_experts, k = gate->k;
    for (int64_t r = begin; r < end; r++) {
        if (choose(gate, a->scores + r * n, a->biased + thread * n, a->group + thread * gate->n_group,
                   a->taken + thread * n, a->group_taken + thread * gate->n_group, a->ids + r * k, a->weights + r * k))
            continue;
        int64_t known = atomic_load(&a->bad_row);
        while ((known < 0 || r < known) && !atomic_compare_exchange_weak(&a->bad_row, &known, r))
            ;
    }
}

int cb_gate_forward(cb_pool *pool, const cb_gate *gate, const float *h, int64_t n_rows, int32_t *ids, float *weights,
                    int64_t *bad_row)
{
    if (!pool || !gate || cb_matrix_check(&gate->weight) || gate->weight.act != CB_ACT_F32 ||
        gate->weight.out != gate->n_experts || n_rows < 0 || !bad_row || (n_rows && (!h || !ids || !weights)))
        return CB_EINVAL;
    if (gate->n_group < 1 || gate->n_experts % gate->n_group || gate->topk_group < 1 ||
        gate->topk_group > gate->n_group || gate->k < 1 || gate->scoring < CB_GATE_SIGMOID ||
        gate->scoring > CB_GATE_SOFTMAX ||
        gate->k > gate->n_experts / gate->n_group * (gate->n_group > 1 ? gate->topk_group : 1))
        return CB_EINVAL;
    int64_t n = gate->n_experts, threads = cb_pool_threads(pool);
    cb_pool_hold(pool);
    cb_scratch_mark mark = cb_scratch_begin(pool);
    gate_arg a = {.gate = gate, .ids = ids, .weights = weights, .bad_row = -1};
    a.scores = cb_scratch(pool, n_rows * n * 4);
    a.biased = cb_scratch(pool, threads * n * 4);
    a.group = cb_scratch(pool, threads * gate->n_group * 4);
    a.taken = cb_scratch(pool, threads * n);
    a.group_taken = cb_scratch(pool, threads * gate->n_group);
    int status = a.scores && a.biased && a.group && a.taken && a.group_taken ? CB_OK : CB_ENOMEM;
    if (status == CB_OK)
        status = cb_linear_internal(pool, &gate->weight, h, gate->weight.in, n_rows, a.scores, n, false);
    if (status == CB_OK) {
        cb_parallel_for(pool, n_rows, 8, gate_rows, &a);
        *bad_row = atomic_load(&a.bad_row);
        status = *bad_row < 0 ? CB_OK : CB_ENONFINITE;
    }
    cb_scratch_end(pool, mark);
    cb_pool_release(pool);
    return status;
}
