/* int8_tiles.h: attention over an int8 cache for the x86 rungs (../int8.h has the contracts). The including file names its vectors:
 *     VL                        f32 lanes
 *     vi, vf, v_mask            integers, floats, what a comparison gives
 *     vi_*, vf_*                loads and stores (unaligned), set1, and lane by lane what their names say
 *     v_evens(q), v_odds(q)     bytes 0 and 2 (1 and 3) of each dword, widened with their sign to two words
 *     v_words(acc, a, b)        acc + two products each of i16, exact
 *     v_bytes(acc, key, query)  if there is such an instruction: acc + four products each of u8 keys and s8 queries, exact
 *     v_exp, v_top, v_fold      exp; the largest lane; the tree of 16 lanes held in PARTS vectors
 * and the size of a tile of products: TILE_QUERIES by TILE_VECTORS of columns. */
#define TILE static inline __attribute__((always_inline)) void
#define PARTS (CB_LANES / VL)
#define VECTORS (CB_KV_BLOCK / VL)
#define QUADS (CB_KV_BLOCK / 4)
#define PAIRS (CB_GROUP / 2)
#define SPAN_PAIRS (CB_SPAN / 2)
#define CHUNK 16 /* queries whose weights are at hand at one time */

typedef struct {
    _Alignas(64) int32_t at[PAIRS][CB_GROUP];
} pairs; /* two bytes of a column side by side as words: first those at even places of its quads, then those at odd ones */

static inline __attribute__((always_inline)) int32_t dword_at(const void *p)
{
    int32_t v;
    __builtin_memcpy(&v, p, sizeof v);
    return v;
}

/* n_pairs pairs of n_vectors vectors of columns, for `queries` queries whose own pairs lie in rows of lda. */
TILE multiply_words(const int queries, const int n_vectors, const int32_t *a, int lda, int n_pairs, const int32_t *b,
                    vi sum[TILE_QUERIES][TILE_VECTORS])
{
#pragma GCC unroll 4
    for (int j = 0; j < queries; j++)
#pragma GCC unroll 4
        for (int v = 0; v < n_vectors; v++)
            sum[j][v] = vi_set1(0);
    for (int k = 0; k < n_pairs; k++) {
        vi column[TILE_VECTORS];
#pragma GCC unroll 4
        for (int v = 0; v < n_vectors; v++)
            column[v] = vi_load(b + k * CB_GROUP + v * VL);
#pragma GCC unroll 4
        for (int j = 0; j < queries; j++) {
            vi own = vi_set1(a[j * lda + k]);
#pragma GCC unroll 4
            for (int v = 0; v < n_vectors; v++)
                sum[j][v] = v_words(sum[j][v], own, column[v]);
        }
    }
}

/* ---- scores ------------------------------------------------------------------------------------------------- */

TILE add_scores(const int queries, vi sum[TILE_QUERIES][TILE_VECTORS], const float *scale, int64_t ng, const float *key_scale,
                bool first, float *out, int64_t ldo)
{
    vf of_key[TILE_VECTORS];
#pragma GCC unroll 4
    for (int v = 0; v < TILE_VECTORS; v++)
        of_key[v] = vf_load(key_scale + v * VL);
#pragma GCC unroll 4
    for (int j = 0; j < queries; j++) {
        vf own = vf_set1(scale[j * ng]);
#pragma GCC unroll 4
        for (int v = 0; v < TILE_VECTORS; v++) {
            float *to = out + j * ldo + v * VL;
            vf_store(to, vf_fmadd(vf_of(sum[j][v]), vf_mul(own, of_key[v]), first ? vf_zero() : vf_load(to)));
        }
    }
}

/* TILE_VECTORS vectors of positions. */
#ifdef v_bytes
TILE score_tile(const int queries, const cb_int8_queries *q, int64_t j0, int64_t g, int quads, const uint8_t *keys,
                const float *key_scale, float *out, int64_t ldo)
{
    int64_t ng = cb_groups(q->depth);
    const int8_t *own = q->q + (j0 * ng + g) * CB_GROUP;
    const int32_t *of_group = q->sum + 2 * (j0 * ng + g);
    vi sum[TILE_QUERIES][TILE_VECTORS];
#pragma GCC unroll 4
    for (int j = 0; j < queries; j++)
#pragma GCC unroll 4
        for (int v = 0; v < TILE_VECTORS; v++)
            sum[j][v] = vi_set1(-128 * (of_group[2 * j * ng] + of_group[2 * j * ng + 1]));
    for (int k = 0; k < quads; k++) {
        vi key[TILE_VECTORS];
#pragma GCC unroll 4
        for (int v = 0; v < TILE_VECTORS; v++)
            key[v] = vi_load(keys + (k * CB_KV_BLOCK + v * VL) * 4);
#pragma GCC unroll 4
        for (int j = 0; j < queries; j++) {
            vi quad = vi_set1(dword_at(own + j * ng * CB_GROUP + k * 4));
#pragma GCC unroll 4
            for (int v = 0; v < TILE_VECTORS; v++)
                sum[j][v] = v_bytes(sum[j][v], key[v], quad);
        }
    }
    add_scores(queries, sum, q->scale + j0 * ng + g, ng, key_scale, g == 0, out + j0 * ldo, ldo);
}

static void scores(const cb_int8_queries *q, int64_t n_q, const cb_int8_block *b, float *out, int64_t ldo)
{
    for (int64_t g = 0; g < cb_groups(q->depth); g++) {
        int quads = (int)cb_quads(CB_MIN(CB_GROUP, q->depth - g * CB_GROUP));
        _Alignas(64) uint8_t room[CB_INT8_GROUP_BYTES];
        const uint8_t *group = cb_int8_keys_of(b, g, quads, room);
        for (int v = 0; v < VECTORS; v += TILE_VECTORS) {
            const uint8_t *keys = group + v * VL * 4;
            const float *key_scale = b->key_scale + g * CB_KV_BLOCK + v * VL;
            int64_t j = 0;
            for (; j + TILE_QUERIES <= n_q; j += TILE_QUERIES)
                score_tile(TILE_QUERIES, q, j, g, quads, keys, key_scale, out + v * VL, ldo);
            for (; j < n_q; j++)
                score_tile(1, q, j, g, quads, keys, key_scale, out + v * VL, ldo);
        }
    }
}
#else
static void score_group(const cb_int8_queries *q, int64_t j0, int queries, int64_t g, const pairs *key, const float *key_scale,
                        float *out, int64_t ldo)
{
    int64_t ng = cb_groups(q->depth);
    int32_t own[TILE_QUERIES * PAIRS];
    for (int j = 0; j < queries; j++)
        for (int k = 0; k < QUADS; k += VL) {
            vi quad = vi_load(q->q + ((j0 + j) * ng + g) * CB_GROUP + k * 4);
            vi_store(own + j * PAIRS + k, v_evens(quad));
            vi_store(own + j * PAIRS + QUADS + k, v_odds(quad));
        }
    for (int v = 0; v < VECTORS; v += TILE_VECTORS) {
        vi sum[TILE_QUERIES][TILE_VECTORS];
        float *to = out + j0 * ldo + v * VL;
        if (queries == TILE_QUERIES) {
            multiply_words(TILE_QUERIES, TILE_VECTORS, own, PAIRS, PAIRS, key->at[0] + v * VL, sum);
            add_scores(TILE_QUERIES, sum, q->scale + j0 * ng + g, ng, key_scale + v * VL, g == 0, to, ldo);
        } else {
            multiply_words(1, TILE_VECTORS, own, PAIRS, PAIRS, key->at[0] + v * VL, sum);
            add_scores(1, sum, q->scale + j0 * ng + g, ng, key_scale + v * VL, g == 0, to, ldo);
        }
    }
}

static void scores(const cb_int8_queries *q, int64_t n_q, const cb_int8_block *b, float *out, int64_t ldo)
{
    pairs key;
    const vi sign = vi_set1((int)0x80808080u);
    for (int64_t g = 0; g < cb_groups(q->depth); g++) {
        int64_t quads = cb_quads(CB_MIN(CB_GROUP, q->depth - g * CB_GROUP));
        uint8_t room[CB_INT8_GROUP_BYTES];
        const uint8_t *keys = cb_int8_keys_of(b, g, quads, room);
        for (int64_t k = 0; k < QUADS; k++)
            for (int v = 0; v < VECTORS; v++) {
                vi quad = vi_set1(0);
                if (k < quads)
                    quad = vi_xor(vi_load(keys + (k * CB_KV_BLOCK + v * VL) * 4), sign);
                vi_store(key.at[k] + v * VL, v_evens(quad));
                vi_store(key.at[QUADS + k] + v * VL, v_odds(quad));
            }
        const float *key_scale = b->key_scale + g * CB_KV_BLOCK;
        int64_t j = 0;
        for (; j + TILE_QUERIES <= n_q; j += TILE_QUERIES)
            score_group(q, j, TILE_QUERIES, g, &key, key_scale, out, ldo);
        for (; j < n_q; j++)
            score_group(q, j, 1, g, &key, key_scale, out, ldo);
    }
}
#endif

/* ---- softmax ------------------------------------------------------------------------------------------------ */

/* Positions from .. to - 1 of the vector that begins at p. */
static inline v_mask seen(int64_t p, int64_t from, int64_t to)
{
    static const int32_t steps[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    vi at = vi_add(vi_load(steps), vi_set1((int)p));
    return v_mask_and(vi_larger(at, vi_set1((int)from - 1)), vi_larger(vi_set1((int)to), at));
}

static void softmax(float *s, int64_t n_q, int64_t from, int64_t to, float *m, float *l)
{
    const vf lowest = vf_set1(-INFINITY);
    int64_t begin = from / CB_KV_BLOCK * CB_KV_BLOCK, end = CB_CEIL(to, CB_KV_BLOCK) * CB_KV_BLOCK;
    bool all = from == begin && to == end;
    for (int64_t j = 0; j < n_q; j++, s += CB_SPAN) {
        vf sum[PARTS], top[2] = {lowest, lowest};
        for (int64_t p = begin; !all && p < end; p += VL)
            vf_store(s + p, vf_select(seen(p, from, to), vf_load(s + p), lowest));
        for (int64_t p = begin; p < end; p += 2 * VL) {
            top[0] = vf_max(vf_load(s + p), top[0]);
            top[1] = vf_max(vf_load(s + p + VL), top[1]);
        }
        m[j] = v_top(vf_max(top[0], top[1]));
        vf largest = vf_set1(m[j]);
#pragma GCC unroll 2
        for (int v = 0; v < PARTS; v++)
            sum[v] = vf_zero();
        for (int64_t p = begin; p < end; p += CB_LANES)
#pragma GCC unroll 2
            for (int v = 0; v < PARTS; v++) {
                vf e = v_exp(vf_sub(vf_load(s + p + v * VL), largest));
                if (!all)
                    e = vf_select(seen(p + v * VL, from, to), e, vf_zero());
                vf_store(s + p + v * VL, e);
                sum[v] = vf_add(sum[v], e);
            }
        l[j] = v_fold(sum);
    }
}

/* ---- values ------------------------------------------------------------------------------------------------- */

static void spread(const cb_int8_block *b, int64_t groups, int64_t from, int64_t to, float *u, float *step)
{
    const vi magnitude = vi_set1(0x7fffffff);
    int64_t begin = from / CB_KV_BLOCK * CB_KV_BLOCK, end = CB_CEIL(to, CB_KV_BLOCK) * CB_KV_BLOCK;
    for (int64_t g = 0; g < groups; g++, u += CB_SPAN) {
        vi most = vi_set1(0);
        for (int64_t p = begin; p < end; p += VL) {
            vf scale = vf_load(b[p / CB_KV_BLOCK].value_scale + g * CB_KV_BLOCK + p % CB_KV_BLOCK);
            scale = vf_select(seen(p, from, to), scale, vf_zero());
            most = vi_max(most, vi_and(vi_cast(scale), magnitude));
            vf_store(u + p, scale);
        }
        int32_t lane[VL], largest = 0;
        vi_store(lane, most);
        for (int i = 0; i < VL; i++)
            largest = CB_MAX(largest, lane[i]);
        float of_all = cb_bits_f32((uint32_t)largest), inverse = largest ? (float)CB_WEIGHT_MAX / of_all : 0.0f;
        bool finite = largest < 0x7f800000, usable = finite && cb_f32_bits(inverse) < 0x7f800000u;
        step[g] = usable ? of_all / (float)CB_WEIGHT_MAX : finite ? 0.0f : cb_bits_f32(0x7fc00000u);
        for (int64_t p = begin; p < end; p += VL)
            vf_store(u + p, usable ? vf_mul(vf_load(u + p), vf_set1(inverse)) : vf_zero());
    }
}

/* Weights of queries [0, n) in the order of pairs. */
static inline void weigh(const float *p, int64_t n, int n_blocks, const float *u, int32_t (*to)[SPAN_PAIRS])
{
    const vf magic = vf_set1(CB_ROUND_MAGIC);
    for (int64_t j = 0; j < n; j++, p += CB_SPAN)
        for (int b = 0; b < n_blocks; b++)
            for (int v = 0; v < QUADS; v += VL) {
                vi w[4];
#pragma GCC unroll 4
                for (int i = 0; i < 4; i++) {
                    int64_t at = b * CB_KV_BLOCK + i * QUADS + v;
                    w[i] = vi_cast(vf_fmadd(vf_load(p + at), vf_load(u + at), magic));
                }
                vi_store(to[j] + b * PAIRS + v, v_low_words(w[0], w[2]));
                vi_store(to[j] + b * PAIRS + QUADS + v, v_low_words(w[1], w[3]));
            }
}

TILE mix_tile(const int queries, const int n_vectors, const int32_t *weights, int n_pairs, const int32_t *columns, float step,
              const float *f, const float *g, int64_t ldz, float *z)
{
    vi sum[TILE_QUERIES][TILE_VECTORS];
    multiply_words(queries, n_vectors, weights, SPAN_PAIRS, n_pairs, columns, sum);
#pragma GCC unroll 4
    for (int j = 0; j < queries; j++) {
        vf before = vf_set1(f ? f[j] : 0.0f), own = vf_set1(f ? step * g[j] : step);
#pragma GCC unroll 4
        for (int v = 0; v < n_vectors; v++) {
            float *to = z + j * ldz + v * VL;
            vf d = vf_of(sum[j][v]);
            vf_store(to, f ? vf_fmadd(vf_load(to), before, vf_mul(d, own)) : d);
        }
    }
}

TILE mix_of(const int n_vectors, int32_t (*weights)[SPAN_PAIRS], int64_t n, int n_pairs, const int32_t *columns, float step,
            const float *f, const float *g, int64_t ldz, float *z)
{
    int64_t j = 0;
    for (; j + TILE_QUERIES <= n; j += TILE_QUERIES)
        mix_tile(TILE_QUERIES, n_vectors, weights[j], n_pairs, columns, step, f ? f + j : NULL, g ? g + j : NULL, ldz,
                 z + j * ldz);
    for (; j < n; j++)
        mix_tile(1, n_vectors, weights[j], n_pairs, columns, step, f ? f + j : NULL, g ? g + j : NULL, ldz, z + j * ldz);
}

static void mix(const float *p, int64_t n_q, const cb_int8_block *b, int n_blocks, const float *u, const float *step,
                const float *f, const float *g, float *z)
{
    pairs value[CB_SPAN_BLOCKS];
    _Alignas(64) int32_t weights[CHUNK][SPAN_PAIRS];
    int64_t groups = cb_groups(b->dim), ldz = groups * CB_GROUP;
    int n_pairs = n_blocks * PAIRS;
    for (int64_t group = 0; group < groups; group++) {
        int vectors = (int)CB_CEIL(CB_MIN(CB_GROUP, b->dim - group * CB_GROUP), VL);
        for (int i = 0; i < n_blocks; i++) {
            _Alignas(64) int8_t room[CB_INT8_GROUP_BYTES];
            int64_t ld;
            const int8_t *values = cb_int8_values_of(b + i, group, room, &ld);
            for (int j = 0; j < QUADS; j++)
                for (int v = 0; v < vectors; v++) {
                    vi quad = vi_load(values + j * ld + v * VL * 4);
                    vi_store(value[i].at[j] + v * VL, v_evens(quad));
                    vi_store(value[i].at[QUADS + j] + v * VL, v_odds(quad));
                }
        }
        float worth = f ? step[group] : 1.0f;
        for (int64_t j = 0; j < n_q; j += CHUNK) {
            int64_t n = CB_MIN(CHUNK, n_q - j);
            float *to = z + j * ldz + group * CB_GROUP;
            const float *before = f ? f + j : NULL, *own = g ? g + j : NULL;
            weigh(p + j * CB_SPAN, n, n_blocks, u + group * CB_SPAN, weights);
            int v = 0;
            for (; v + TILE_VECTORS <= vectors; v += TILE_VECTORS)
                mix_of(TILE_VECTORS, weights, n, n_pairs, value[0].at[0] + v * VL, worth, before, own, ldz, to + v * VL);
            for (; v < vectors; v++)
                mix_of(1, weights, n, n_pairs, value[0].at[0] + v * VL, worth, before, own, ldz, to + v * VL);
        }
    }
}

/* ---- indexer ------------------------------------------------------------------------------------------------ */

static void index_fold(const float *d, int64_t heads, const float *g, float *out)
{
    vf sum[VECTORS];
    for (int v = 0; v < VECTORS; v++)
        sum[v] = vf_zero();
    for (int64_t h = 0; h < heads; h++) {
        vf own = vf_set1(g[h]);
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; v++)
            sum[v] = vf_fmadd(own, vf_max(vf_zero(), vf_load(d + h * CB_KV_BLOCK + v * VL)), sum[v]);
    }
    for (int v = 0; v < VECTORS; v++)
        vf_store(out + v * VL, sum[v]);
}
