/* attn_int8.h: attention over an int8 cache for the x86 rungs (../attn.h has the contracts). The including file names its
 * vectors:
 *     VL                        f32 lanes
 *     vi, vf                    integers and floats
 *     v_load, v_store, v_set1   vi from and to unaligned memory, and of one dword
 *     v_bytes(acc, key, query)  acc + four products each of u8 keys (value + 128) and s8 queries, exact; sums start from
 *     v_start(shift)            the lanes' own shift, 128 * sum of the query
 *     v_words(acc, a, b)        acc + two products each of i16, exact
 *     v_components(q)           VL of u8, less 128, as i32
 *     v_join(a, b)              low halves of a's lanes below those of b's
 *     v_weights(w, inverse, usable), v_quotients(m, ...)   as mix_int8 rounds probabilities
 * and the tiles' sizes: SCORE_KEYS by two vectors of heads, MIX_HEADS by four vectors of components. */
#define TILE static inline __attribute__((always_inline)) void
#define PARTS (CB_LANES / VL) /* vectors of a block of lanes */

static inline __attribute__((always_inline)) int32_t dword_at(const void *p)
{
    int32_t v;
    __builtin_memcpy(&v, p, sizeof v);
    return v;
}

/* ---- scores ------------------------------------------------------------------------------------------------- */

TILE score_int8_tile(const int n_keys, const int n_vectors, const cb_int8_query *q, int64_t vector, int64_t lanes, int64_t ng,
                     const uint8_t *keys, int64_t ldq, const float *key_scale, float *out)
{
    for (int64_t g = 0; g < ng; g++) {
        vi sum[SCORE_KEYS][2];
        int64_t at[2];
#pragma GCC unroll 2
        for (int v = 0; v < n_vectors; v++) {
            at[v] = ((vector + v) / PARTS * ng + g) * CB_LANES + (vector + v) % PARTS * VL;
#pragma GCC unroll 8
            for (int i = 0; i < n_keys; i++)
                sum[i][v] = v_start(v_load(q->shift + at[v]));
        }
#pragma GCC unroll 2
        for (int k = 0; k < CB_GROUP / 4; k++) {
            vi heads[2];
#pragma GCC unroll 2
            for (int v = 0; v < n_vectors; v++) {
                int64_t block = (vector + v) / PARTS, part = (vector + v) % PARTS;
                heads[v] = v_load(q->q + ((block * ng + g) * (CB_GROUP / 4) + k) * CB_LANES * 4 + part * VL * 4);
            }
#pragma GCC unroll 8
            for (int i = 0; i < n_keys; i++) {
                vi key = v_set1(dword_at(keys + i * ldq + g * CB_GROUP + k * 4));
#pragma GCC unroll 2
                for (int v = 0; v < n_vectors; v++)
                    sum[i][v] = v_bytes(sum[i][v], key, heads[v]);
            }
        }
#pragma GCC unroll 2
        for (int v = 0; v < n_vectors; v++) {
            vf scale = vf_load(q->scale + at[v]);
#pragma GCC unroll 8
            for (int i = 0; i < n_keys; i++) {
                float *to = out + i * lanes + v * VL;
                vf both = vf_mul(scale, vf_set1(key_scale[i * ng + g]));
                vf_store(to, vf_fmadd(vf_of(sum[i][v]), both, g ? vf_load(to) : vf_zero()));
            }
        }
    }
}

TILE scores_int8_of(const int n_vectors, const cb_int8_query *q, int64_t vector, int64_t lanes, int64_t ng,
                    const cb_int8_keys *keys, int64_t n, float *out)
{
    int64_t i = 0;
    for (; i + SCORE_KEYS <= n; i += SCORE_KEYS)
        score_int8_tile(SCORE_KEYS, n_vectors, q, vector, lanes, ng, keys->q + i * keys->ldq, keys->ldq, keys->scale + i * ng,
                        out + i * lanes);
    for (; i < n; i++)
        score_int8_tile(1, n_vectors, q, vector, lanes, ng, keys->q + i * keys->ldq, keys->ldq, keys->scale + i * ng,
                        out + i * lanes);
}

static void scores_int8(const cb_int8_query *q, int64_t lanes, int64_t ng, const cb_int8_keys *keys, int64_t n, float *out)
{
    int64_t vector = 0, n_vectors = lanes / VL;
    for (; vector + 2 <= n_vectors; vector += 2)
        scores_int8_of(2, q, vector, lanes, ng, keys, n, out + vector * VL);
    if (vector < n_vectors)
        scores_int8_of(1, q, vector, lanes, ng, keys, n, out + vector * VL);
}

/* ---- values ------------------------------------------------------------------------------------------------- */

static void pair_up(const uint8_t *q, int64_t ldq, int64_t n, int64_t rank, int16_t *pairs)
{
    for (int64_t r0 = 0; r0 < rank; r0 += CB_GROUP, pairs += CB_KV_BLOCK * CB_GROUP)
        for (int64_t i = 0; i < n; i += 2)
            for (int64_t r = r0; r < CB_MIN(rank, r0 + CB_GROUP); r += VL) {
                vi first = v_components(q + i * ldq + r);
                vi second = i + 1 < n ? v_components(q + (i + 1) * ldq + r) : v_set1(0);
                v_store(pairs + (i / 2 * CB_GROUP + r - r0) * 2, v_join(first, second));
            }
}

/* Probabilities of one group of components, two entries side by side, and what one of their steps is worth. */
typedef struct {
    int32_t pair[CB_KV_BLOCK / 2][CB_MIX_LANES];
    float step[CB_MIX_LANES];
} weights;

static inline void weigh(const float *p, int64_t lanes, int64_t n, const float *scale, int64_t ng, int64_t n_heads, weights *to)
{
    for (int64_t h = 0; h < n_heads; h += VL) {
        vi m = v_set1(0);
        for (int64_t i = 0; i < n; i++)
            m = v_larger_magnitude(m, vf_mul(vf_load(p + i * lanes + h), vf_set1(scale[i * ng])));
        v_usable usable;
        vf step, inverse = v_quotients(m, &usable, &step);
        vf_store(to->step + h, step);
        for (int64_t i = 0; i < n; i += 2) {
            vi first = v_weights(vf_mul(vf_load(p + i * lanes + h), vf_set1(scale[i * ng])), inverse, usable);
            vi second = v_set1(0);
            if (i + 1 < n)
                second = v_weights(vf_mul(vf_load(p + (i + 1) * lanes + h), vf_set1(scale[(i + 1) * ng])), inverse, usable);
            v_store(to->pair[i / 2] + h, v_join(first, second));
        }
    }
}

TILE mix_int8_tile(const int heads, const int n_vectors, const weights *w, int64_t h0, int64_t n, const int16_t *pairs,
                   int64_t rank, bool first, const float *f, const float *g, float *z)
{
    vi sum[MIX_INT8_HEADS][4];
#pragma GCC unroll 4
    for (int h = 0; h < heads; h++)
#pragma GCC unroll 4
        for (int v = 0; v < n_vectors; v++)
            sum[h][v] = v_set1(0);
    for (int64_t j = 0; 2 * j < n; j++) {
        vi c[4];
#pragma GCC unroll 4
        for (int v = 0; v < n_vectors; v++)
            c[v] = v_load(pairs + (j * CB_GROUP + v * VL) * 2);
#pragma GCC unroll 4
        for (int h = 0; h < heads; h++) {
            vi share = v_set1(w->pair[j][h0 + h]);
#pragma GCC unroll 4
            for (int v = 0; v < n_vectors; v++)
                sum[h][v] = v_words(sum[h][v], share, c[v]);
        }
    }
#pragma GCC unroll 4
    for (int h = 0; h < heads; h++) {
        vf step = vf_set1(w->step[h0 + h]), before = vf_set1(f[h0 + h]), own = vf_set1(g[h0 + h]);
#pragma GCC unroll 4
        for (int v = 0; v < n_vectors; v++) {
            float *at = z + (h0 + h) * rank + v * VL;
            vf add = vf_mul(vf_mul(vf_of(sum[h][v]), step), own);
            vf_store(at, first ? add : vf_fmadd(vf_load(at), before, add));
        }
    }
}

TILE mix_int8_of(const int n_vectors, const weights *w, int64_t n, const int16_t *pairs, int64_t rank, int64_t n_heads,
                 bool first, const float *f, const float *g, float *z)
{
    int64_t h = 0;
    for (; h + MIX_INT8_HEADS <= n_heads; h += MIX_INT8_HEADS)
        mix_int8_tile(MIX_INT8_HEADS, n_vectors, w, h, n, pairs, rank, first, f, g, z);
    for (; h < n_heads; h++)
        mix_int8_tile(1, n_vectors, w, h, n, pairs, rank, first, f, g, z);
}

static void mix_int8(const float *p, int64_t lanes, int64_t n, const cb_int8_keys *keys, int64_t ng, int64_t rank,
                     int64_t n_heads, bool first, const float *f, const float *g, float *z)
{
    weights w;
    for (int64_t group = 0; group < cb_groups(rank); group++) {
        weigh(p, lanes, n, keys->scale + group, ng, n_heads, &w);
        const int16_t *pairs = keys->pairs + group * CB_KV_BLOCK * CB_GROUP;
        int64_t r = group * CB_GROUP, end = CB_MIN(rank, r + CB_GROUP);
        for (; r + 4 * VL <= end; r += 4 * VL)
            mix_int8_of(4, &w, n, pairs + r % CB_GROUP * 2, rank, n_heads, first, f, g, z + r);
        for (; r < end; r += VL)
            mix_int8_of(1, &w, n, pairs + r % CB_GROUP * 2, rank, n_heads, first, f, g, z + r);
    }
}
