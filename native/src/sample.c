/* sample.c: random numbers that belong to (seed, position), sampling, log-softmax.
 *
 * All sums run in f64 in a stated order, and exp is our own (plain * and + only), so a draw does not depend on the
 * machine's mathematics library.
 */
#include "../include/colibri.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- Philox-4x32, ten rounds (Salmon et al., SC'11) ------------------------------------------------------- */

void cb_philox4x32(const uint32_t counter[4], const uint32_t key[2], uint32_t out[4])
{
    uint32_t c0 = counter[0], c1 = counter[1], c2 = counter[2], c3 = counter[3];
    uint32_t k0 = key[0], k1 = key[1];
    for (int round = 0; round < 10; round++) {
        uint64_t a = (uint64_t)c0 * 0xD2511F53u, b = (uint64_t)c2 * 0xCD9E8D57u;
        uint32_t n0 = (uint32_t)(b >> 32) ^ c1 ^ k0, n2 = (uint32_t)(a >> 32) ^ c3 ^ k1;
        c0 = n0;
        c1 = (uint32_t)b;
        c2 = n2;
        c3 = (uint32_t)a;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    out[0] = c0;
    out[1] = c1;
    out[2] = c2;
    out[3] = c3;
}

double cb_uniform(uint64_t seed, uint64_t position)
{
    const uint32_t counter[4] = {(uint32_t)position, (uint32_t)(position >> 32), 0, 0};
    const uint32_t key[2] = {(uint32_t)seed, (uint32_t)(seed >> 32)};
    uint32_t word[4];
    cb_philox4x32(counter, key, word);
    uint64_t bits = (uint64_t)word[1] << 32 | word[0];
    return (double)(bits >> 11) * 0x1p-53;
}

/* ---- exp in f64 ------------------------------------------------------------------------------------------- */

/* x <= 0. At most 2 ulp; 0 below -708, where the true value is far below anything a sum of probabilities sees. */
static inline double exp_negative(double x)
{
    const double log2e = 1.4426950408889634, ln2_hi = 0x1.62e42fee00000p-1, ln2_lo = 0x1.a39ef35793c76p-33;
    const double round_shift = 0x1.8p52; /* adding and subtracting it rounds to the nearest integer */
    double clamped = x > -708.0 ? x : -708.0;
    double shifted = clamped * log2e + round_shift;
    double n = shifted - round_shift;
    double r = clamped - n * ln2_hi;
    r = r - n * ln2_lo;
    static const double c[] = {1.0 / 6227020800.0, 1.0 / 479001600.0, 1.0 / 39916800.0, 1.0 / 3628800.0,
                               1.0 / 362880.0,     1.0 / 40320.0,     1.0 / 5040.0,     1.0 / 720.0,
                               1.0 / 120.0,        1.0 / 24.0,        1.0 / 6.0,        0.5,
                               1.0,                1.0};
    double p = c[0];
    for (size_t i = 1; i < sizeof c / sizeof *c; i++)
        p = p * r + c[i];
    uint64_t bits;
    memcpy(&bits, &shifted, 8);
    /* The low 32 bits of `shifted` hold n in two's complement. */
    uint64_t power_bits = (uint64_t)((int64_t)(int32_t)(uint32_t)bits + 1023) << 52;
    double power;
    memcpy(&power, &power_bits, 8);
    return x > -708.0 ? p * power : 0.0;
}

/* ---- sampling --------------------------------------------------------------------------------------------- */

/* Largest logit and the first id that has it; CB_ENONFINITE on NaN, +infinity, or nothing but -infinity. */
static int find_max(const float *logits, int64_t vocab, int64_t *where)
{
    int64_t best = 0;
    for (int64_t i = 0; i < vocab; i++) {
        if (isnan(logits[i]) || logits[i] == INFINITY)
            return CB_ENONFINITE;
        if (logits[i] > logits[best])
            best = i;
    }
    *where = best;
    return logits[best] == -INFINITY ? CB_ENONFINITE : CB_OK;
}

/* Does id a come before id b: larger logit first, lower id on ties. */
static inline int comes_first(const float *logits, int32_t a, int32_t b)
{
    return logits[a] > logits[b] || (logits[a] == logits[b] && a < b);
}

static void sift_down(const float *logits, int32_t *heap, int64_t n, int64_t at)
{
    int32_t id = heap[at];
    for (int64_t child; (child = 2 * at + 1) < n; at = child) {
        if (child + 1 < n && comes_first(logits, heap[child + 1], heap[child]))
            child++;
        if (!comes_first(logits, heap[child], id))
            break;
        heap[at] = heap[child];
    }
    heap[at] = id;
}

int cb_sample(const float *logits, int64_t vocab, double temperature, double top_p, double u)
{
    if (!logits || vocab <= 0 || vocab > INT32_MAX || !(temperature >= 0.0) || !(top_p >= 0.0 && top_p <= 1.0) ||
        !(u >= 0.0 && u < 1.0))
        return CB_EINVAL;
    int64_t best;
    int status = find_max(logits, vocab, &best);
    if (status != CB_OK)
        return status;
    if (temperature == 0.0)
        return (int)best;

    double *p = malloc((size_t)vocab * sizeof *p);
    int32_t *heap = malloc((size_t)vocab * sizeof *heap);
    if (!p || !heap) {
        free(p);
        free(heap);
        return CB_ENOMEM;
    }
    double top = (double)logits[best], total = 0.0;
    for (int64_t i = 0; i < vocab; i++)
        p[i] = exp_negative(((double)logits[i] - top) / temperature);
    int64_t n = 0;
    for (int64_t i = 0; i < vocab; i++) {
        total += p[i];
        if (p[i] > 0.0)
            heap[n++] = (int32_t)i;
    }
    for (int64_t i = n / 2 - 1; i >= 0; i--)
        sift_down(logits, heap, n, i);

    /* Ids leave the heap in descending order and gather behind it, so that the second walk needs no second heap. */
    double sum = 0.0, kept = total;
    int64_t n_out = 0;
    if (top_p < 1.0) {
        do {
            int32_t id = heap[0];
            int64_t last = n - 1 - n_out;
            heap[0] = heap[last];
            sift_down(logits, heap, last, 0);
            heap[last] = id;
            n_out++;
            sum += p[id];
        } while (sum < top_p * total && n_out < n);
        kept = sum;
    }
    double target = u * kept;
    int64_t limit = top_p < 1.0 ? n_out : n;
    int32_t chosen = 0;
    sum = 0.0;
    for (int64_t i = 0; i < limit; i++) {
        int64_t last = n - 1 - i;
        if (i >= n_out) {
            int32_t id = heap[0];
            heap[0] = heap[last];
            sift_down(logits, heap, last, 0);
            heap[last] = id;
        }
        chosen = heap[last];
        sum += p[chosen];
        if (sum > target)
            break; /* otherwise rounding left the target at the very end: the last one it is */
    }
    free(p);
    free(heap);
    return chosen;
}

int cb_log_softmax(const float *logits, int64_t vocab, float *out)
{
    if (!logits || !out || vocab <= 0)
        return CB_EINVAL;
    int64_t best;
    int status = find_max(logits, vocab, &best);
    if (status != CB_OK)
        return status;
    double top = (double)logits[best], total = 0.0;
    for (int64_t i = 0; i < vocab; i++)
        total += exp_negative((double)logits[i] - top);
    double log_total = log(total);
    for (int64_t i = 0; i < vocab; i++)
        out[i] = (float)((double)logits[i] - top - log_total);
    return CB_OK;
}
