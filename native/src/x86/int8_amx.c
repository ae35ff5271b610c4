/* int8_amx.c: attention over an int8 cache on the tile unit: one instruction is the exact product of 16 queries' bytes of a
 * group with 16 columns. The two bytes of a weight meet the values one after the other. Queries that do not fill a tile stay
 * with the rung below.
 *
 * How         A unit's products go to memory, where the f32 sums take them one unit later. Each tile's products stand beside the
 *             sums of a tile before them, close enough for the processor to see both at one time. Operands are copied first
 *             into rows that lie one after another. */
#include "amx.h"
#include "int8_512.h"

#define ROWS 16
#define SLICE 5  /* groups of a unit of scores */
#define QUADS (CB_KV_BLOCK / 4)
#define TILES (CB_KV_BLOCK / 16)

static cb_int8_table below;

/* ---- scores ------------------------------------------------------------------------------------------------- */

typedef struct {
    _Alignas(64) int8_t keys[SLICE][TILES][QUADS * 64];
    int32_t d[2][8][ROWS * 16]; /* a multiple of 4 KiB apart: a load whose low address bits are a late store's waits for it */
} score_room;

/* Keys of a slice as signed bytes, tile by tile; quads beyond the depth meet zeros of the queries, but must not be read. */
static void take_keys(score_room *k, const cb_int8_block *b, int64_t depth, int64_t g0, int n_groups)
{
    const vi sign = vi_set1((int)0x80808080u);
    _Alignas(64) uint8_t room[CB_INT8_GROUP_BYTES];
    for (int g = 0; g < n_groups; g++) {
        int64_t quads = cb_quads(CB_MIN(CB_GROUP, depth - (g0 + g) * CB_GROUP));
        const uint8_t *from = cb_int8_keys_of(b, g0 + g, quads, room);
        for (int64_t i = 0; i < QUADS; i++)
            for (int t = 0; t < TILES; t++)
                vi_store(k->keys[g][t] + i * 64,
                         i < quads ? vi_xor(vi_load(from + (i * TILES + t) * 64), sign) : vi_set1(0));
    }
}

static inline __attribute__((always_inline)) void multiply_keys(score_room *k, const int8_t *q, int64_t ldq, int g, int tile,
                                                                int half)
{
    STORES_ARE_DONE();
    if (g % 2) {
        _tile_loadd(4, q + g * CB_GROUP, ldq);
        _tile_loadd(5, k->keys[g][tile], 64);
        _tile_zero(0);
        _tile_dpbssd(0, 4, 5);
        _tile_stored(0, k->d[half][g], 64);
    } else {
        _tile_loadd(6, q + g * CB_GROUP, ldq);
        _tile_loadd(7, k->keys[g][tile], 64);
        _tile_zero(1);
        _tile_dpbssd(1, 6, 7);
        _tile_stored(1, k->d[half][g], 64);
    }
}

/* Products of one unit, 16 queries by 16 positions, and sums of the one before; q and out are NULL where there is none. */
static void score_unit(score_room *k, const int8_t *q, int64_t ng, int tile, int half, const float *scale, const float *key_scale,
                       int n_groups, bool first, float *out, int64_t ldo)
{
    vf sum[ROWS];
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++)
        sum[r] = first || !out ? vf_zero() : vf_load(out + r * ldo);
    for (int g = 0; g < n_groups; g++) {
        if (out) {
            vf of_key = vf_load(key_scale + g * CB_KV_BLOCK);
#pragma GCC unroll 16
            for (int r = 0; r < ROWS; r++)
                sum[r] = vf_fmadd(vf_of(vi_load(k->d[!half][g] + r * 16)), vf_mul(vf_set1(scale[r * ng + g]), of_key), sum[r]);
        }
        if (q)
            multiply_keys(k, q, ng * CB_GROUP, g, tile, half);
    }
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++)
        if (out)
            vf_store(out + r * ldo, sum[r]);
}

static void scores(const cb_int8_queries *q, int64_t n_q, const cb_int8_block *b, float *out, int64_t ldo)
{
    score_room k;
    int64_t ng = cb_groups(q->depth), whole = n_q / ROWS * ROWS;
    if (whole)
        CB_TILE_CONFIG(full_tiles);
    for (int64_t g0 = 0; g0 < ng && whole; g0 += SLICE) {
        int n_groups = (int)CB_MIN(SLICE, ng - g0);
        int64_t units = whole / ROWS * TILES;
        take_keys(&k, b, q->depth, g0, n_groups);
        for (int64_t unit = 0; unit <= units; unit++) {
            const int8_t *own = unit < units ? q->q + (unit / TILES * ROWS * ng + g0) * CB_GROUP : NULL;
            int64_t j = (unit - 1) / TILES * ROWS, p = (unit - 1) % TILES * 16;
            float *to = unit ? out + j * ldo + p : NULL;
            score_unit(&k, own, ng, (int)(unit % TILES), (int)(unit % 2), q->scale + j * ng + g0,
                       b->key_scale + g0 * CB_KV_BLOCK + p, n_groups, g0 == 0, to, ldo);
        }
    }
    if (whole)
        _tile_release();
    if (whole < n_q) {
        cb_int8_queries rest = {q->q + whole * ng * CB_GROUP, q->scale + whole * ng, q->sum + 2 * whole * ng, q->depth};
        below.scores(&rest, n_q - whole, b, out + whole * ldo, ldo);
    }
}

/* ---- values ------------------------------------------------------------------------------------------------- */

typedef struct {
    _Alignas(64) int8_t values[CB_SPAN_BLOCKS][TILES][QUADS * 64];
    uint8_t weights[CB_SPAN_BLOCKS][2][ROWS][CB_KV_BLOCK]; /* high and low bytes, in the order of the values' quads */
    int32_t d[2][2][2][ROWS * 16];
} mix_room;

static void weigh(mix_room *k, const float *p, int n_blocks, const float *u)
{
    const vf magic = vf_set1(CB_ROUND_MAGIC);
    const vi low = vi_set1(0x00ff00ff);
    for (int j = 0; j < ROWS; j++, p += CB_SPAN)
        for (int b = 0; b < n_blocks; b++) {
            vi w[4];
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++) {
                int64_t at = b * CB_KV_BLOCK + i * QUADS;
                w[i] = vi_cast(vf_fmadd(vf_load(p + at), vf_load(u + at), magic));
            }
            vi evens = v_low_words(w[0], w[2]), odds = v_low_words(w[1], w[3]);
            vi_store(k->weights[b][0][j], vi_or(vi_and(_mm512_srli_epi16(evens, 8), low), vi_andnot(low, odds)));
            vi_store(k->weights[b][1][j], vi_or(vi_and(evens, low), _mm512_slli_epi16(odds, 8)));
        }
}

/* 16 queries by two tiles of components, all blocks. */
static void multiply_values(mix_room *k, int tile, int n_blocks, int half)
{
    STORES_ARE_DONE();
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int b = 0; b < n_blocks; b++) {
        _tile_loadd(4, k->weights[b][0], CB_KV_BLOCK);
        _tile_loadd(5, k->weights[b][1], CB_KV_BLOCK);
        _tile_loadd(6, k->values[b][tile], 64);
        _tile_loadd(7, k->values[b][tile + 1], 64);
        _tile_dpbusd(0, 4, 6);
        _tile_dpbusd(1, 5, 6);
        _tile_dpbusd(2, 4, 7);
        _tile_dpbusd(3, 5, 7);
    }
    _tile_stored(0, k->d[half][0][0], 64);
    _tile_stored(1, k->d[half][0][1], 64);
    _tile_stored(2, k->d[half][1][0], 64);
    _tile_stored(3, k->d[half][1][1], 64);
}

static void sum_values(const mix_room *k, int half, float step, const float *f, const float *g, int64_t ldz, float *z)
{
    for (int r = 0; r < ROWS; r++) {
        vf before = vf_set1(f ? f[r] : 0.0f), own = vf_set1(f ? step * g[r] : step);
#pragma GCC unroll 2
        for (int t = 0; t < 2; t++) {
            float *to = z + r * ldz + t * 16;
            vi high = vi_load(k->d[half][t][0] + r * 16), low = vi_load(k->d[half][t][1] + r * 16);
            vf d = vf_of(vi_add(_mm512_slli_epi32(high, 8), low));
            vf_store(to, f ? vf_fmadd(vf_load(to), before, vf_mul(d, own)) : d);
        }
    }
}

static void mix(const float *p, int64_t n_q, const cb_int8_block *b, int n_blocks, const float *u, const float *step,
                const float *f, const float *g, float *z)
{
    mix_room k;
    int64_t groups = cb_groups(b->dim), ldz = groups * CB_GROUP, whole = n_q / ROWS * ROWS;
    if (whole)
        CB_TILE_CONFIG(full_tiles);
    for (int64_t group = 0; group < groups && whole; group++) {
        int tiles = (int)CB_CEIL(CB_MIN(CB_GROUP, b->dim - group * CB_GROUP), 16);
        for (int i = 0; i < n_blocks; i++) {
            _Alignas(64) int8_t room[CB_INT8_GROUP_BYTES];
            int64_t ld;
            const int8_t *values = cb_int8_values_of(b + i, group, room, &ld);
            for (int j = 0; j < QUADS; j++)
                for (int t = 0; t < CB_CEIL(tiles, 2) * 2; t++)
                    vi_store(k.values[i][t] + j * 64, t < tiles ? vi_load(values + j * ld + t * 64) : vi_set1(0));
        }
        float worth = f ? step[group] : 1.0f;
        int half = 0;
        const float *f_before = NULL, *g_before = NULL;
        float *before = NULL; /* where the products of the step before go */
        for (int64_t j = 0; j < whole; j += ROWS) {
            weigh(&k, p + j * CB_SPAN, n_blocks, u + group * CB_SPAN);
            for (int t = 0; t < tiles; t += 2, half ^= 1) {
                if (before)
                    sum_values(&k, half ^ 1, worth, f_before, g_before, ldz, before);
                multiply_values(&k, t, n_blocks, half);
                before = z + j * ldz + group * CB_GROUP + t * 16;
                f_before = f ? f + j : NULL;
                g_before = g ? g + j : NULL;
            }
        }
        sum_values(&k, half ^ 1, worth, f_before, g_before, ldz, before);
    }
    if (whole)
        _tile_release();
    if (whole < n_q)
        below.mix(p + whole * CB_SPAN, n_q - whole, b, n_blocks, u, step, f ? f + whole : NULL, g ? g + whole : NULL,
                  z + whole * ldz);
}

void cb_int8_table_amx(cb_table *t)
{
    below = *t->int8;
    t->int8->scores = scores;
    t->int8->mix = mix;
    t->int8->isa = cb_isa_names[CB_ISA_AMX];
}
