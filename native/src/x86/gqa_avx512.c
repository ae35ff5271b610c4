/* gqa_avx512.c: inner loops of grouped-query attention, sixteen lanes at a time (gqa.h has the contracts). */
#include "../gqa.h"

#include "cbmath_avx512.h"

/* Tiles are functions of constant sizes: the compiler unrolls them and keeps the sums in registers. */
#define TILE static inline __attribute__((always_inline)) void

/* 16 or 32 lanes (`parts` registers) of `queries` queries: 16 sums from 10 loads at most. */
#define TILE_QUERIES 8

TILE score_tile(const int queries, const int parts, const float *q, int64_t depth, const float *keys, float *out)
{
    __m512 sum[TILE_QUERIES][2];
    for (int j = 0; j < queries; j++)
        for (int v = 0; v < parts; v++)
            sum[j][v] = _mm512_setzero_ps();
    for (int64_t k = 0; k < depth; k++) {
        __m512 key[2];
        for (int v = 0; v < parts; v++)
            key[v] = _mm512_loadu_ps(keys + k * CB_KV_BLOCK + v * 16);
        for (int j = 0; j < queries; j++) {
            __m512 c = _mm512_set1_ps(q[j * depth + k]);
            for (int v = 0; v < parts; v++)
                sum[j][v] = _mm512_fmadd_ps(c, key[v], sum[j][v]);
        }
    }
    for (int j = 0; j < queries; j++)
        for (int v = 0; v < parts; v++)
            _mm512_storeu_ps(out + j * CB_KV_BLOCK + v * 16, sum[j][v]);
}

TILE scores_of(const int parts, const float *q, int64_t n_q, int64_t depth, const float *keys, float *out)
{
    int64_t j = 0;
    for (; j + 8 <= n_q; j += 8)
        score_tile(8, parts, q + j * depth, depth, keys, out + j * CB_KV_BLOCK);
    if (j + 4 <= n_q) {
        score_tile(4, parts, q + j * depth, depth, keys, out + j * CB_KV_BLOCK);
        j += 4;
    }
    for (; j < n_q; j++)
        score_tile(1, parts, q + j * depth, depth, keys, out + j * CB_KV_BLOCK);
}

static void scores_avx512(const float *q, int64_t n_q, int64_t depth, const float *keys, int64_t from, int64_t to,
                          float *out)
{
    int64_t p = from;
    for (; p + 32 <= to; p += 32)
        scores_of(2, q, n_q, depth, keys + p, out + p);
    if (p < to)
        scores_of(1, q, n_q, depth, keys + p, out + p);
}

static void softmax_avx512(float *s, int64_t from, int64_t to, float *m, float *l)
{
    const __m512 lowest = _mm512_set1_ps(-INFINITY);
    int64_t begin = from / CB_LANES * CB_LANES, end = CB_CEIL(to, CB_LANES) * CB_LANES;
    __mmask16 inside[CB_KV_BLOCK / CB_LANES];
    __m512 largest = lowest;
    for (int64_t p = begin; p < end; p += CB_LANES) {
        unsigned above = from > p ? 0xffffu << (from - p) : 0xffffu;
        unsigned below = to - p < CB_LANES ? (1u << (to - p)) - 1 : 0xffffu;
        inside[p / CB_LANES] = (__mmask16)(above & below);
        largest = _mm512_mask_max_ps(largest, inside[p / CB_LANES], largest, _mm512_loadu_ps(s + p));
    }
    float lane[CB_LANES];
    _mm512_storeu_ps(lane, largest);
    float top = lane[0];
    for (int i = 1; i < CB_LANES; i++)
        top = lane[i] > top ? lane[i] : top;
    __m512 sum = _mm512_setzero_ps();
    for (int64_t p = begin; p < end; p += CB_LANES) {
        __m512 e = cb_exp_avx512(_mm512_sub_ps(_mm512_loadu_ps(s + p), _mm512_set1_ps(top)));
        _mm512_storeu_ps(s + p, e);
        sum = _mm512_mask_add_ps(sum, inside[p / CB_LANES], sum, e);
    }
    *m = top;
    *l = cb_fold_avx512(sum);
}

static void join_avx512(const float *mb, const float *lb, int64_t n, float *m, float *l, float *f, float *g)
{
    for (int64_t j = 0; j < n; j += CB_LANES) {
        __mmask16 some = (__mmask16)(n - j < CB_LANES ? (1u << (n - j)) - 1 : 0xffffu);
        __m512 block = _mm512_maskz_loadu_ps(some, mb + j), before = _mm512_maskz_loadu_ps(some, m + j);
        __m512 joined = _mm512_max_ps(block, before);
        __m512 factor = cb_exp_avx512(_mm512_sub_ps(before, joined)), own = cb_exp_avx512(_mm512_sub_ps(block, joined));
        __m512 add = _mm512_mul_ps(_mm512_maskz_loadu_ps(some, lb + j), own);
        _mm512_mask_storeu_ps(l + j, some, _mm512_fmadd_ps(_mm512_maskz_loadu_ps(some, l + j), factor, add));
        _mm512_mask_storeu_ps(f + j, some, factor);
        _mm512_mask_storeu_ps(g + j, some, own);
        _mm512_mask_storeu_ps(m + j, some, joined);
    }
}

TILE mix_tile(const int queries, const int parts, const float *s, int64_t from, int64_t to, const float *values,
              int64_t ldv, int64_t dim, const float *f, const float *g, float *z)
{
    __m512 sum[TILE_QUERIES][2];
    for (int j = 0; j < queries; j++)
        for (int v = 0; v < parts; v++)
            sum[j][v] = _mm512_setzero_ps();
    for (int64_t p = from; p < to; p++) {
        __m512 value[2];
        for (int v = 0; v < parts; v++)
            value[v] = _mm512_loadu_ps(values + p * ldv + v * 16);
        for (int j = 0; j < queries; j++) {
            __m512 share = _mm512_set1_ps(s[j * CB_KV_BLOCK + p]);
            for (int v = 0; v < parts; v++)
                sum[j][v] = _mm512_fmadd_ps(share, value[v], sum[j][v]);
        }
    }
    for (int j = 0; j < queries; j++)
        for (int v = 0; v < parts; v++) {
            float *at = z + j * dim + v * 16;
            __m512 out = sum[j][v];
            if (f)
                out = _mm512_fmadd_ps(_mm512_loadu_ps(at), _mm512_set1_ps(f[j]), _mm512_mul_ps(out, _mm512_set1_ps(g[j])));
            _mm512_storeu_ps(at, out);
        }
}

TILE mix_of(const int parts, const float *s, int64_t n_q, int64_t from, int64_t to, const float *values, int64_t ldv,
            int64_t dim, const float *f, const float *g, float *z)
{
    int64_t j = 0, n;
    for (; j < n_q; j += n) {
        const float *row = s + j * CB_KV_BLOCK, *fj = f ? f + j : NULL, *gj = f ? g + j : NULL;
        float *at = z + j * dim;
        n = n_q - j >= 8 ? 8 : n_q - j >= 4 ? 4 : 1;
        switch (n) {
        case 8: mix_tile(8, parts, row, from, to, values, ldv, dim, fj, gj, at); break;
        case 4: mix_tile(4, parts, row, from, to, values, ldv, dim, fj, gj, at); break;
        default: mix_tile(1, parts, row, from, to, values, ldv, dim, fj, gj, at); break;
        }
    }
}

static void mix_avx512(const float *s, int64_t n_q, int64_t from, int64_t to, const float *values, int64_t ldv, int64_t dim,
                       const float *f, const float *g, float *z)
{
    /* Outer loop over components: 64 positions' worth of them stays in the first-level cache for all queries. */
    int64_t r = 0;
    for (; r + 32 <= dim; r += 32)
        mix_of(2, s, n_q, from, to, values + r, ldv, dim, f, g, z + r);
    if (r < dim)
        mix_of(1, s, n_q, from, to, values + r, ldv, dim, f, g, z + r);
}

const cb_gqa_table cb_gqa_table_avx512 = {scores_avx512, softmax_avx512, join_avx512, mix_avx512};
