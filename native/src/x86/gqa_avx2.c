/* gqa_avx2.c: inner loops of grouped-query attention, eight lanes at a time (gqa.h has the contracts). */
#include "../gqa.h"

#include "cbmath_avx2.h"

/* Tiles are functions of a constant size: the compiler unrolls them and keeps the sums in registers. */
#define TILE static inline __attribute__((always_inline)) void

/* 16 positions of `queries` queries: 12 sums hide the latency of the additions, 8 loads feed 12 of them. */
#define TILE_QUERIES 6

TILE score_tile(const int queries, const float *q, int64_t depth, const float *keys, float *out)
{
    __m256 sum[TILE_QUERIES][2];
    for (int j = 0; j < queries; j++)
        sum[j][0] = sum[j][1] = _mm256_setzero_ps();
    for (int64_t k = 0; k < depth; k++) {
        __m256 k0 = _mm256_loadu_ps(keys + k * CB_KV_BLOCK), k1 = _mm256_loadu_ps(keys + k * CB_KV_BLOCK + 8);
        for (int j = 0; j < queries; j++) {
            __m256 c = _mm256_broadcast_ss(q + j * depth + k);
            sum[j][0] = _mm256_fmadd_ps(c, k0, sum[j][0]);
            sum[j][1] = _mm256_fmadd_ps(c, k1, sum[j][1]);
        }
    }
    for (int j = 0; j < queries; j++) {
        _mm256_storeu_ps(out + j * CB_KV_BLOCK, sum[j][0]);
        _mm256_storeu_ps(out + j * CB_KV_BLOCK + 8, sum[j][1]);
    }
}

static void scores_avx2(const float *q, int64_t n_q, int64_t depth, const float *keys, int64_t from, int64_t to, float *out)
{
    for (int64_t p = from; p < to; p += CB_LANES)
        for (int64_t j = 0, n; j < n_q; j += n) {
            const float *row = q + j * depth;
            float *at = out + j * CB_KV_BLOCK + p;
            /* 8 queries are two tiles of 4, not 6 and 2 */
            n = n_q - j == 8 ? 4 : n_q - j == 7 ? 4 : CB_MIN(n_q - j, TILE_QUERIES);
            switch (n) {
            case 6: score_tile(6, row, depth, keys + p, at); break;
            case 5: score_tile(5, row, depth, keys + p, at); break;
            case 4: score_tile(4, row, depth, keys + p, at); break;
            case 3: score_tile(3, row, depth, keys + p, at); break;
            case 2: score_tile(2, row, depth, keys + p, at); break;
            default: score_tile(1, row, depth, keys + p, at); break;
            }
        }
}

static void softmax_avx2(float *s, int64_t from, int64_t to, float *m, float *l)
{
    const __m256 lowest = _mm256_set1_ps(-INFINITY);
    int64_t begin = from / CB_LANES * CB_LANES, end = CB_CEIL(to, CB_LANES) * CB_LANES;
    __m256 inside[CB_KV_BLOCK / 8], largest = lowest;
    for (int64_t p = begin; p < end; p += 8) {
        __m256i at = _mm256_add_epi32(_mm256_set1_epi32((int)p), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
        __m256i is_inside = _mm256_and_si256(_mm256_cmpgt_epi32(at, _mm256_set1_epi32((int)from - 1)),
                                             _mm256_cmpgt_epi32(_mm256_set1_epi32((int)to), at));
        inside[p / 8] = _mm256_castsi256_ps(is_inside);
        largest = _mm256_max_ps(largest, _mm256_blendv_ps(lowest, _mm256_loadu_ps(s + p), inside[p / 8]));
    }
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(largest), _mm256_extractf128_ps(largest, 1));
    four = _mm_max_ps(four, _mm_movehl_ps(four, four));
    four = _mm_max_ss(four, _mm_shuffle_ps(four, four, 1));
    __m256 top = _mm256_broadcastss_ps(four), sum[2] = {_mm256_setzero_ps(), _mm256_setzero_ps()};
    for (int64_t p = begin; p < end; p += 8) {
        __m256 e = _mm256_and_ps(cb_exp_avx2(_mm256_sub_ps(_mm256_loadu_ps(s + p), top)), inside[p / 8]);
        _mm256_storeu_ps(s + p, e);
        sum[p / 8 % 2] = _mm256_add_ps(sum[p / 8 % 2], e);
    }
    *m = _mm_cvtss_f32(four);
    *l = cb_fold_avx2(sum[0], sum[1]);
}

static void join_avx2(const float *mb, const float *lb, int64_t n, float *m, float *l, float *f, float *g)
{
    for (int64_t j = 0; j < n; j += 8) {
        __m256i some = cb_tail_avx2(CB_MIN(n - j, 8));
        __m256 block = _mm256_maskload_ps(mb + j, some), before = _mm256_maskload_ps(m + j, some);
        __m256 joined = _mm256_max_ps(block, before);
        __m256 factor = cb_exp_avx2(_mm256_sub_ps(before, joined)), own = cb_exp_avx2(_mm256_sub_ps(block, joined));
        __m256 add = _mm256_mul_ps(_mm256_maskload_ps(lb + j, some), own);
        _mm256_maskstore_ps(l + j, some, _mm256_fmadd_ps(_mm256_maskload_ps(l + j, some), factor, add));
        _mm256_maskstore_ps(f + j, some, factor);
        _mm256_maskstore_ps(g + j, some, own);
        _mm256_maskstore_ps(m + j, some, joined);
    }
}

/* 16 components of `queries` queries. */
TILE mix_tile(const int queries, const float *s, int64_t from, int64_t to, const float *values, int64_t ldv, int64_t dim,
              const float *f, const float *g, float *z)
{
    __m256 sum[TILE_QUERIES][2];
    for (int j = 0; j < queries; j++)
        sum[j][0] = sum[j][1] = _mm256_setzero_ps();
    for (int64_t p = from; p < to; p++) {
        __m256 v0 = _mm256_loadu_ps(values + p * ldv), v1 = _mm256_loadu_ps(values + p * ldv + 8);
        for (int j = 0; j < queries; j++) {
            __m256 share = _mm256_broadcast_ss(s + j * CB_KV_BLOCK + p);
            sum[j][0] = _mm256_fmadd_ps(share, v0, sum[j][0]);
            sum[j][1] = _mm256_fmadd_ps(share, v1, sum[j][1]);
        }
    }
    for (int j = 0; j < queries; j++)
        for (int v = 0; v < 2; v++) {
            float *at = z + j * dim + 8 * v;
            __m256 out = sum[j][v];
            if (f)
                out = _mm256_fmadd_ps(_mm256_loadu_ps(at), _mm256_broadcast_ss(f + j),
                                      _mm256_mul_ps(out, _mm256_broadcast_ss(g + j)));
            _mm256_storeu_ps(at, out);
        }
}

static void mix_avx2(const float *s, int64_t n_q, int64_t from, int64_t to, const float *values, int64_t ldv, int64_t dim,
                     const float *f, const float *g, float *z)
{
    /* Outer loop over components: 64 positions' worth of them stays in the first-level cache for all queries. */
    for (int64_t r = 0; r < dim; r += 16)
        for (int64_t j = 0, n; j < n_q; j += n) {
            const float *row = s + j * CB_KV_BLOCK, *fj = f ? f + j : NULL, *gj = f ? g + j : NULL;
            float *at = z + j * dim + r;
            n = n_q - j == 8 ? 4 : n_q - j == 7 ? 4 : CB_MIN(n_q - j, TILE_QUERIES);
            switch (n) {
            case 6: mix_tile(6, row, from, to, values + r, ldv, dim, fj, gj, at); break;
            case 5: mix_tile(5, row, from, to, values + r, ldv, dim, fj, gj, at); break;
            case 4: mix_tile(4, row, from, to, values + r, ldv, dim, fj, gj, at); break;
            case 3: mix_tile(3, row, from, to, values + r, ldv, dim, fj, gj, at); break;
            case 2: mix_tile(2, row, from, to, values + r, ldv, dim, fj, gj, at); break;
            default: mix_tile(1, row, from, to, values + r, ldv, dim, fj, gj, at); break;
            }
        }
}

const cb_gqa_table cb_gqa_table_avx2 = {scores_avx2, softmax_avx2, join_avx2, mix_avx2};
