/* attn_avx512.c: inner loops of attention and indexer, sixteen lanes at a time (attn.h has the contracts). */
#include "../attn.h"
#include "../gqa.h"

#include "cbmath_avx512.h"

/* Tiles are functions of constant sizes: the compiler unrolls them and keeps the sums in registers. */
#define TILE static inline __attribute__((always_inline)) void

static void widen_avx512(const uint16_t *src, int64_t n, float *dst)
{
    int64_t i = 0;
    for (; i + 32 <= n; i += 32) {
        _mm_prefetch((const char *)(src + i + CB_WIDEN_AHEAD), _MM_HINT_T0);
        for (int j = 0; j < 32; j += 16)
            _mm512_storeu_ps(dst + i + j, cb_bf16_avx512(_mm256_loadu_si256((const __m256i *)(src + i + j))));
    }
    for (; i + 16 <= n; i += 16)
        _mm512_storeu_ps(dst + i, cb_bf16_avx512(_mm256_loadu_si256((const __m256i *)(src + i))));
    for (; i < n; i++)
        dst[i] = cb_bf16_f32(src[i]);
}

/* `keys_of_tile` keys times 16 or 32 heads: 16 sums from 10 loads when both are at their largest. */
#define SCORE_KEYS 8

TILE score_tile(const int keys_of_tile, const int groups, const float *q, int64_t depth, const float *keys, int64_t ldk,
                float *out, int64_t lanes)
{
    __m512 sum[SCORE_KEYS][2];
    for (int i = 0; i < keys_of_tile; i++)
        for (int v = 0; v < groups; v++)
            sum[i][v] = _mm512_setzero_ps();
    for (int64_t k = 0; k < depth; k++) {
        __m512 heads[2];
        for (int v = 0; v < groups; v++)
            heads[v] = _mm512_loadu_ps(q + (v * depth + k) * CB_LANES);
        for (int i = 0; i < keys_of_tile; i++) {
            __m512 c = _mm512_set1_ps(keys[i * ldk + k]);
            for (int v = 0; v < groups; v++)
                sum[i][v] = _mm512_fmadd_ps(heads[v], c, sum[i][v]);
        }
    }
    for (int i = 0; i < keys_of_tile; i++)
        for (int v = 0; v < groups; v++)
            _mm512_storeu_ps(out + i * lanes + v * CB_LANES, sum[i][v]);
}

TILE scores_of(const int groups, const float *q, int64_t lanes, int64_t depth, const float *keys, int64_t ldk, int64_t n,
               float *out)
{
    int64_t i = 0;
    for (; i + 8 <= n; i += 8)
        score_tile(8, groups, q, depth, keys + i * ldk, ldk, out + i * lanes, lanes);
    if (i + 4 <= n) {
        score_tile(4, groups, q, depth, keys + i * ldk, ldk, out + i * lanes, lanes);
        i += 4;
    }
    for (; i < n; i++)
        score_tile(1, groups, q, depth, keys + i * ldk, ldk, out + i * lanes, lanes);
}

static void scores_avx512(const float *q_t, int64_t lanes, int64_t depth, const float *keys, int64_t ldk, int64_t n,
                          float *out)
{
    int64_t h = 0;
    for (; h + 2 * CB_LANES <= lanes; h += 2 * CB_LANES)
        scores_of(2, q_t + h * depth, lanes, depth, keys, ldk, n, out + h);
    if (h < lanes)
        scores_of(1, q_t + h * depth, lanes, depth, keys, ldk, n, out + h);
}

static void softmax_avx512(float *s, int64_t lanes, int64_t n, bool first, float *m, float *l, float *f, float *g)
{
    for (int64_t h = 0; h < lanes; h += CB_LANES) {
        __m512 block_max = _mm512_loadu_ps(s + h);
        for (int64_t i = 1; i < n; i++)
            block_max = _mm512_max_ps(_mm512_loadu_ps(s + i * lanes + h), block_max);
        __m512 sum = _mm512_setzero_ps();
        for (int64_t i = 0; i < n; i++) {
            __m512 p = cb_exp_avx512(_mm512_sub_ps(_mm512_loadu_ps(s + i * lanes + h), block_max));
            _mm512_storeu_ps(s + i * lanes + h, p);
            sum = _mm512_add_ps(sum, p);
        }
        __m512 joined = block_max, factor = _mm512_setzero_ps();
        if (!first) {
            __m512 before = _mm512_loadu_ps(m + h);
            joined = _mm512_max_ps(block_max, before);
            factor = cb_exp_avx512(_mm512_sub_ps(before, joined));
        }
        __m512 own = cb_exp_avx512(_mm512_sub_ps(block_max, joined));
        __m512 add = _mm512_mul_ps(sum, own);
        _mm512_storeu_ps(l + h, first ? add : _mm512_fmadd_ps(_mm512_loadu_ps(l + h), factor, add));
        _mm512_storeu_ps(f + h, factor);
        _mm512_storeu_ps(g + h, own);
        _mm512_storeu_ps(m + h, joined);
    }
}

/* 16 or 32 components of `heads` heads. */
#define MIX_HEADS 8

TILE mix_tile(const int heads, const int parts, const float *p, int64_t lanes, int64_t n, const float *keys, int64_t ldk,
              int64_t rank, bool first, const float *f, const float *g, float *z)
{
    __m512 sum[MIX_HEADS][2];
    for (int h = 0; h < heads; h++)
        for (int v = 0; v < parts; v++)
            sum[h][v] = _mm512_setzero_ps();
    for (int64_t i = 0; i < n; i++) {
        __m512 c[2];
        for (int v = 0; v < parts; v++)
            c[v] = _mm512_loadu_ps(keys + i * ldk + v * 16);
        for (int h = 0; h < heads; h++) {
            __m512 share = _mm512_set1_ps(p[i * lanes + h]);
            for (int v = 0; v < parts; v++)
                sum[h][v] = _mm512_fmadd_ps(share, c[v], sum[h][v]);
        }
    }
    for (int h = 0; h < heads; h++) {
        __m512 before = _mm512_set1_ps(f[h]), own = _mm512_set1_ps(g[h]);
        for (int v = 0; v < parts; v++) {
            float *at = z + h * rank + v * 16;
            __m512 add = _mm512_mul_ps(sum[h][v], own);
            _mm512_storeu_ps(at, first ? add : _mm512_fmadd_ps(_mm512_loadu_ps(at), before, add));
        }
    }
}

TILE mix_of(const int parts, const float *p, int64_t lanes, int64_t n, const float *keys, int64_t ldk, int64_t rank,
            int64_t n_heads, bool first, const float *f, const float *g, float *z)
{
    int64_t h = 0;
    for (; h + 8 <= n_heads; h += 8)
        mix_tile(8, parts, p + h, lanes, n, keys, ldk, rank, first, f + h, g + h, z + h * rank);
    if (h + 4 <= n_heads) {
        mix_tile(4, parts, p + h, lanes, n, keys, ldk, rank, first, f + h, g + h, z + h * rank);
        h += 4;
    }
    for (; h < n_heads; h++)
        mix_tile(1, parts, p + h, lanes, n, keys, ldk, rank, first, f + h, g + h, z + h * rank);
}

static void mix_avx512(const float *p, int64_t lanes, int64_t n, const float *keys, int64_t ldk, int64_t rank,
                       int64_t n_heads, bool first, const float *f, const float *g, float *z)
{
    /* Outer loop over components: 64 keys' worth of them stays in the first-level cache for all heads. */
    int64_t r = 0;
    for (; r + 32 <= rank; r += 32)
        mix_of(2, p, lanes, n, keys + r, ldk, rank, n_heads, first, f, g, z + r);
    if (r < rank)
        mix_of(1, p, lanes, n, keys + r, ldk, rank, n_heads, first, f, g, z + r);
}

static void join_avx512(float *z, const float *zb, int64_t n, float f, float g)
{
    __m512 before = _mm512_set1_ps(f), own = _mm512_set1_ps(g);
    for (int64_t r = 0; r < n; r += 16)
        _mm512_storeu_ps(z + r, _mm512_fmadd_ps(_mm512_loadu_ps(z + r), before, _mm512_mul_ps(_mm512_loadu_ps(zb + r), own)));
}

static void index_fold_avx512(const float *d, int64_t lanes, int64_t n, const float *g, float *out)
{
    const __m512 zero = _mm512_setzero_ps();
    for (int64_t i = 0; i < n; i++) {
        __m512 s = zero;
        for (int64_t h = 0; h < lanes; h += CB_LANES)
            s = _mm512_fmadd_ps(_mm512_loadu_ps(g + h), _mm512_max_ps(zero, _mm512_loadu_ps(d + i * lanes + h)), s);
        out[i] = cb_fold_avx512(s);
    }
}

void cb_attn_table_avx512(cb_table *t)
{
    cb_attn_table *a = t->attn;
    a->widen = widen_avx512;
    a->scores = scores_avx512;
    a->softmax = softmax_avx512;
    a->mix = mix_avx512;
    a->join = join_avx512;
    a->index_fold = index_fold_avx512;
    a->isa = "avx512";
    t->gqa = &cb_gqa_table_avx512;
}
