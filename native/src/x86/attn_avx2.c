/* attn_avx2.c: inner loops of attention and indexer, eight lanes at a time (attn.h has the contracts). */
#include "../attn.h"
#include "../gqa.h"

#include "cbmath_avx2.h"

/* Tiles are functions of a constant size: the compiler unrolls them and keeps the sums in registers. */
#define TILE static inline __attribute__((always_inline)) void

static void widen_avx2(const uint16_t *src, int64_t n, float *dst)
{
    int64_t i = 0;
    for (; i + 32 <= n; i += 32) {
        _mm_prefetch((const char *)(src + i + CB_WIDEN_AHEAD), _MM_HINT_T0);
        for (int j = 0; j < 32; j += 8)
            _mm256_storeu_ps(dst + i + j, cb_bf16_avx2(_mm_loadu_si128((const __m128i *)(src + i + j))));
    }
    for (; i + 8 <= n; i += 8)
        _mm256_storeu_ps(dst + i, cb_bf16_avx2(_mm_loadu_si128((const __m128i *)(src + i))));
    for (; i < n; i++)
        dst[i] = cb_bf16_f32(src[i]);
}

/* 16 heads of `keys` keys: 12 sums hide the latency of the additions, 8 loads feed 12 of them. */
#define SCORE_KEYS 6

TILE score_tile(const int keys_of_tile, const float *q, int64_t depth, const float *keys, int64_t ldk, float *out,
                int64_t lanes)
{
    __m256 sum[SCORE_KEYS][2];
    for (int i = 0; i < keys_of_tile; i++)
        sum[i][0] = sum[i][1] = _mm256_setzero_ps();
    for (int64_t k = 0; k < depth; k++) {
        __m256 q0 = _mm256_loadu_ps(q + k * CB_LANES), q1 = _mm256_loadu_ps(q + k * CB_LANES + 8);
        for (int i = 0; i < keys_of_tile; i++) {
            __m256 c = _mm256_broadcast_ss(keys + i * ldk + k);
            sum[i][0] = _mm256_fmadd_ps(q0, c, sum[i][0]);
            sum[i][1] = _mm256_fmadd_ps(q1, c, sum[i][1]);
        }
    }
    for (int i = 0; i < keys_of_tile; i++) {
        _mm256_storeu_ps(out + i * lanes, sum[i][0]);
        _mm256_storeu_ps(out + i * lanes + 8, sum[i][1]);
    }
}

static void scores_avx2(const float *q_t, int64_t lanes, int64_t depth, const float *keys, int64_t ldk, int64_t n,
                        float *out)
{
    for (int64_t h = 0; h < lanes; h += CB_LANES) {
        const float *q = q_t + h * depth;
        int64_t i = 0;
        for (; i + SCORE_KEYS <= n; i += SCORE_KEYS)
            score_tile(SCORE_KEYS, q, depth, keys + i * ldk, ldk, out + i * lanes + h, lanes);
        const float *rest = keys + i * ldk;
        float *to = out + i * lanes + h;
        switch (n - i) {
        case 5: score_tile(5, q, depth, rest, ldk, to, lanes); break;
        case 4: score_tile(4, q, depth, rest, ldk, to, lanes); break;
        case 3: score_tile(3, q, depth, rest, ldk, to, lanes); break;
        case 2: score_tile(2, q, depth, rest, ldk, to, lanes); break;
        case 1: score_tile(1, q, depth, rest, ldk, to, lanes); break;
        default: break;
        }
    }
}

static void softmax_avx2(float *s, int64_t lanes, int64_t n, bool first, float *m, float *l, float *f, float *g)
{
    for (int64_t h = 0; h < lanes; h += 8) {
        __m256 block_max = _mm256_loadu_ps(s + h);
        for (int64_t i = 1; i < n; i++)
            block_max = _mm256_max_ps(_mm256_loadu_ps(s + i * lanes + h), block_max);
        __m256 sum = _mm256_setzero_ps();
        for (int64_t i = 0; i < n; i++) {
            __m256 p = cb_exp_avx2(_mm256_sub_ps(_mm256_loadu_ps(s + i * lanes + h), block_max));
            _mm256_storeu_ps(s + i * lanes + h, p);
            sum = _mm256_add_ps(sum, p);
        }
        __m256 joined = block_max, factor = _mm256_setzero_ps();
        if (!first) {
            __m256 before = _mm256_loadu_ps(m + h);
            joined = _mm256_max_ps(block_max, before);
            factor = cb_exp_avx2(_mm256_sub_ps(before, joined));
        }
        __m256 own = cb_exp_avx2(_mm256_sub_ps(block_max, joined));
        __m256 add = _mm256_mul_ps(sum, own);
        _mm256_storeu_ps(l + h, first ? add : _mm256_fmadd_ps(_mm256_loadu_ps(l + h), factor, add));
        _mm256_storeu_ps(f + h, factor);
        _mm256_storeu_ps(g + h, own);
        _mm256_storeu_ps(m + h, joined);
    }
}

/* 16 components of `heads` heads. */
#define MIX_HEADS 6

TILE mix_tile(const int heads, const float *p, int64_t lanes, int64_t n, const float *keys, int64_t ldk, int64_t rank,
              bool first, const float *f, const float *g, float *z)
{
    __m256 sum[MIX_HEADS][2];
    for (int h = 0; h < heads; h++)
        sum[h][0] = sum[h][1] = _mm256_setzero_ps();
    for (int64_t i = 0; i < n; i++) {
        __m256 c0 = _mm256_loadu_ps(keys + i * ldk), c1 = _mm256_loadu_ps(keys + i * ldk + 8);
        for (int h = 0; h < heads; h++) {
            __m256 share = _mm256_broadcast_ss(p + i * lanes + h);
            sum[h][0] = _mm256_fmadd_ps(share, c0, sum[h][0]);
            sum[h][1] = _mm256_fmadd_ps(share, c1, sum[h][1]);
        }
    }
    for (int h = 0; h < heads; h++) {
        __m256 before = _mm256_broadcast_ss(f + h), own = _mm256_broadcast_ss(g + h);
        for (int v = 0; v < 2; v++) {
            float *at = z + h * rank + 8 * v;
            __m256 add = _mm256_mul_ps(sum[h][v], own);
            _mm256_storeu_ps(at, first ? add : _mm256_fmadd_ps(_mm256_loadu_ps(at), before, add));
        }
    }
}

static void mix_avx2(const float *p, int64_t lanes, int64_t n, const float *keys, int64_t ldk, int64_t rank,
                     int64_t n_heads, bool first, const float *f, const float *g, float *z)
{
    /* Outer loop over components: 64 keys' worth of them stays in the first-level cache for all heads. */
    for (int64_t r = 0; r < rank; r += 16) {
        for (int64_t h = 0, heads; h < n_heads; h += heads) {
            /* 8 heads are two tiles of 4, not 6 and 2: fewer than 8 sums wait for each other */
            heads = n_heads - h == 8 || n_heads - h == 7 ? 4 : CB_MIN(n_heads - h, MIX_HEADS);
            const float *ph = p + h, *fh = f + h, *gh = g + h;
            float *to = z + h * rank + r;
            switch (heads) {
            case 6: mix_tile(6, ph, lanes, n, keys + r, ldk, rank, first, fh, gh, to); break;
            case 5: mix_tile(5, ph, lanes, n, keys + r, ldk, rank, first, fh, gh, to); break;
            case 4: mix_tile(4, ph, lanes, n, keys + r, ldk, rank, first, fh, gh, to); break;
            case 3: mix_tile(3, ph, lanes, n, keys + r, ldk, rank, first, fh, gh, to); break;
            case 2: mix_tile(2, ph, lanes, n, keys + r, ldk, rank, first, fh, gh, to); break;
            default: mix_tile(1, ph, lanes, n, keys + r, ldk, rank, first, fh, gh, to); break;
            }
        }
    }
}

static void join_avx2(float *z, const float *zb, int64_t n, float f, float g)
{
    __m256 before = _mm256_set1_ps(f), own = _mm256_set1_ps(g);
    for (int64_t r = 0; r < n; r += 8)
        _mm256_storeu_ps(z + r, _mm256_fmadd_ps(_mm256_loadu_ps(z + r), before, _mm256_mul_ps(_mm256_loadu_ps(zb + r), own)));
}

static void index_fold_avx2(const float *d, int64_t lanes, int64_t n, const float *g, float *out)
{
    const __m256 zero = _mm256_setzero_ps();
    for (int64_t i = 0; i < n; i++) {
        __m256 lo = zero, hi = zero;
        for (int64_t h = 0; h < lanes; h += CB_LANES) {
            const float *at = d + i * lanes + h;
            lo = _mm256_fmadd_ps(_mm256_loadu_ps(g + h), _mm256_max_ps(zero, _mm256_loadu_ps(at)), lo);
            hi = _mm256_fmadd_ps(_mm256_loadu_ps(g + h + 8), _mm256_max_ps(zero, _mm256_loadu_ps(at + 8)), hi);
        }
        out[i] = cb_fold_avx2(lo, hi);
    }
}

void cb_attn_table_avx2(cb_table *t)
{
    cb_attn_table *a = t->attn;
    a->widen = widen_avx2;
    a->scores = scores_avx2;
    a->softmax = softmax_avx2;
    a->mix = mix_avx2;
    a->join = join_avx2;
    a->index_fold = index_fold_avx2;
    a->isa = "avx2";
    t->gqa = &cb_gqa_table_avx2;
}
