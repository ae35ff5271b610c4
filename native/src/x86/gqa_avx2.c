/* gqa_avx2.c: inner loops of grouped-query attention, eight lanes at a time (gqa.h has the contracts). */
#include "../gqa.h"

#include "cbmath_avx2.h"

/* Tiles are functions of a constant size: the compiler unrolls them and keeps the sums in registers. */
#define TILE static inline __attribute__((always_inline)) void

/* Registers of a tile: a sum needs its turn every four cycles, so eight to twelve of them keep both multipliers busy. */
#define TILE_SUMS 12
#define TILE_QUERIES 6

/* Queries of the next tile of `left`, and how many registers of lanes go with them. */
static int64_t tile_queries(int64_t left) { return left == 9 ? 5 : left == 8 || left == 7 ? 4 : CB_MIN(left, TILE_QUERIES); }
static int64_t tile_parts(int64_t queries) { return queries == 1 ? 8 : queries <= 3 ? 4 : 2; }

/* `parts` times 8 positions of `queries` queries. */
TILE score_tile(const int queries, const int parts, const float *q, int64_t depth, const float *keys, int64_t p,
                float *out)
{
    __m256 sum[TILE_SUMS];
    for (int i = 0; i < queries * parts; i++)
        sum[i] = _mm256_setzero_ps();
    for (int64_t k = 0; k < depth; k++) {
        __m256 key[8];
        for (int v = 0; v < parts; v++)
            key[v] = _mm256_loadu_ps(keys + k * CB_KV_BLOCK + p + v * 8);
        for (int j = 0; j < queries; j++) {
            __m256 c = _mm256_broadcast_ss(q + j * depth + k);
            for (int v = 0; v < parts; v++)
                sum[j * parts + v] = _mm256_fmadd_ps(c, key[v], sum[j * parts + v]);
        }
    }
    for (int j = 0; j < queries; j++)
        for (int v = 0; v < parts; v++)
            _mm256_storeu_ps(out + j * CB_KV_BLOCK + p + v * 8, sum[j * parts + v]);
}

static void scores_avx2(const float *q, int64_t n_q, int64_t depth, const float *keys, int64_t from, int64_t to, float *out)
{
    /* Outer loop over positions: their keys stay in the first-level cache for all queries. */
    int64_t parts = tile_parts(n_q);
    for (int64_t p = from; p < to; p += parts * 8) {
        if (p + parts * 8 > to)
            parts = 2;
        for (int64_t j = 0, n; j < n_q; j += n) {
            const float *row = q + j * depth;
            float *at = out + j * CB_KV_BLOCK;
            n = tile_queries(n_q - j);
            switch (n * 10 + parts) {
            case 62: score_tile(6, 2, row, depth, keys, p, at); break;
            case 52: score_tile(5, 2, row, depth, keys, p, at); break;
            case 42: score_tile(4, 2, row, depth, keys, p, at); break;
            case 34: score_tile(3, 4, row, depth, keys, p, at); break;
            case 32: score_tile(3, 2, row, depth, keys, p, at); break;
            case 24: score_tile(2, 4, row, depth, keys, p, at); break;
            case 22: score_tile(2, 2, row, depth, keys, p, at); break;
            case 18: score_tile(1, 8, row, depth, keys, p, at); break;
            default: score_tile(1, 2, row, depth, keys, p, at); break;
            }
        }
    }
}

/* WHOLE: the query sees all of the block, which most blocks of a long context are. */
TILE softmax_of(const bool WHOLE, float *s, int64_t from, int64_t to, float *m, float *l)
{
    const __m256 lowest = _mm256_set1_ps(-INFINITY);
    const int64_t begin = WHOLE ? 0 : from / CB_LANES * CB_LANES, end = WHOLE ? CB_KV_BLOCK : CB_CEIL(to, CB_LANES) * CB_LANES;
    __m256 inside[CB_KV_BLOCK / 8], largest = lowest;
    for (int64_t p = begin; p < end; p += 8) {
        __m256 seen = _mm256_loadu_ps(s + p);
        if (!WHOLE) {
            __m256i at = _mm256_add_epi32(_mm256_set1_epi32((int)p), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
            __m256i is_inside = _mm256_and_si256(_mm256_cmpgt_epi32(at, _mm256_set1_epi32((int)from - 1)),
                                                 _mm256_cmpgt_epi32(_mm256_set1_epi32((int)to), at));
            inside[p / 8] = _mm256_castsi256_ps(is_inside);
            seen = _mm256_blendv_ps(lowest, seen, inside[p / 8]);
        }
        largest = _mm256_max_ps(largest, seen);
    }
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(largest), _mm256_extractf128_ps(largest, 1));
    four = _mm_max_ps(four, _mm_movehl_ps(four, four));
    four = _mm_max_ss(four, _mm_shuffle_ps(four, four, 1));
    __m256 top = _mm256_broadcastss_ps(four), sum[2] = {_mm256_setzero_ps(), _mm256_setzero_ps()};
    for (int64_t p = begin; p < end; p += 8) {
        __m256 e = cb_exp_avx2(_mm256_sub_ps(_mm256_loadu_ps(s + p), top));
        if (!WHOLE)
            e = _mm256_and_ps(e, inside[p / 8]);
        _mm256_storeu_ps(s + p, e);
        sum[p / 8 % 2] = _mm256_add_ps(sum[p / 8 % 2], e);
    }
    *m = _mm_cvtss_f32(four);
    *l = cb_fold_avx2(sum[0], sum[1]);
}

static void softmax_avx2(float *s, int64_t from, int64_t to, float *m, float *l)
{
    if (from == 0 && to == CB_KV_BLOCK)
        softmax_of(true, s, from, to, m, l);
    else
        softmax_of(false, s, from, to, m, l);
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

/* `parts` times 8 components of `queries` queries. */
TILE mix_tile(const int queries, const int parts, const float *s, int64_t from, int64_t to,
              const float *values, int64_t ldv, int64_t r, int64_t dim, const float *f, const float *g, float *z)
{
    __m256 sum[TILE_SUMS];
    for (int i = 0; i < queries * parts; i++)
        sum[i] = _mm256_setzero_ps();
    for (int64_t p = from; p < to; p++) {
        __m256 value[8];
        for (int v = 0; v < parts; v++)
            value[v] = _mm256_loadu_ps(values + p * ldv + r + v * 8);
        for (int j = 0; j < queries; j++) {
            __m256 share = _mm256_broadcast_ss(s + j * CB_KV_BLOCK + p);
            for (int v = 0; v < parts; v++)
                sum[j * parts + v] = _mm256_fmadd_ps(share, value[v], sum[j * parts + v]);
        }
    }
    for (int j = 0; j < queries; j++)
        for (int v = 0; v < parts; v++) {
            float *at = z + j * dim + r + 8 * v;
            __m256 out = sum[j * parts + v];
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
    int64_t parts = tile_parts(n_q);
    for (int64_t r = 0; r < dim; r += parts * 8) {
        if (r + parts * 8 > dim)
            parts = 2;
        for (int64_t j = 0, n; j < n_q; j += n) {
            const float *row = s + j * CB_KV_BLOCK, *fj = f ? f + j : NULL, *gj = f ? g + j : NULL;
            float *at = z + j * dim;
            n = tile_queries(n_q - j);
            switch (n * 10 + parts) {
            case 62: mix_tile(6, 2, row, from, to, values, ldv, r, dim, fj, gj, at); break;
            case 52: mix_tile(5, 2, row, from, to, values, ldv, r, dim, fj, gj, at); break;
            case 42: mix_tile(4, 2, row, from, to, values, ldv, r, dim, fj, gj, at); break;
            case 34: mix_tile(3, 4, row, from, to, values, ldv, r, dim, fj, gj, at); break;
            case 32: mix_tile(3, 2, row, from, to, values, ldv, r, dim, fj, gj, at); break;
            case 24: mix_tile(2, 4, row, from, to, values, ldv, r, dim, fj, gj, at); break;
            case 22: mix_tile(2, 2, row, from, to, values, ldv, r, dim, fj, gj, at); break;
            case 18: mix_tile(1, 8, row, from, to, values, ldv, r, dim, fj, gj, at); break;
            default: mix_tile(1, 2, row, from, to, values, ldv, r, dim, fj, gj, at); break;
            }
        }
    }
}

const cb_gqa_table cb_gqa_table_avx2 = {scores_avx2, softmax_avx2, join_avx2, mix_avx2};
