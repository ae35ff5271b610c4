/* linear_amx.c: int8 activations for many rows: one tile instruction is the exact product of a group, 16 rows by 16
 * outputs by 64 inputs, because a row block's group (colibri.h, tile16) already lies as such an operand: 16 quads of
 * inputs, each with 16 outputs side by side. Few rows stay with the rung below.
 *
 * How         128 rows of activations are copied, 16 groups at a time, into operands that lie one after another (rows
 *             of a tile need one stride; these have none, or one that costs a page each). Up to 16 row blocks pass over
 *             them; a block's weights are brought to signed bytes once per group for all rows. A unit is 4 groups by
 *             1 or 2 row tiles: its products go to memory, where the f32 sums of linear_ref.c take them one unit later,
 *             16 rows in 16 registers, so that the tile unit works meanwhile.
 * Room        300 KiB of stack, of which a call with few groups or rows touches little. */
#include "tiles.h"

#define LEAST_ROWS 16
#define GROUPS 4
#define SLICE 16  /* groups */
#define TILES 8   /* of 16 rows */
#define BLOCKS 16 /* row blocks */

#ifndef CB_TILE_CONFIG /* gcc 12's _tile_loadconfig lets the compiler know of 8 of the 64 bytes only */
#define CB_TILE_CONFIG(config) __asm__ volatile("ldtilecfg %0" : : "m"(config))
#endif
/* Nor do its tile loads say that they read memory. */
#define STORES_ARE_DONE() __asm__ volatile("" : : : "memory")

/* The layout that ldtilecfg reads. Every tile is full: missing rows and inputs are zeros. */
typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t n_rows[16];
} tile_config;
static const _Alignas(64) tile_config full_tiles = {
    .palette = 1, .row_bytes = {64, 64, 64, 64, 64, 64, 64, 64}, .n_rows = {16, 16, 16, 16, 16, 16, 16, 16}};

typedef struct {
    _Alignas(64) int8_t x[SLICE][TILES][16 * 64];
    float x_scale[TILES][16][SLICE];
    float acc[BLOCKS][TILES][16 * 16];
    int8_t w[GROUPS][16 * 64];
    int32_t d[2][2][GROUPS][16 * 16]; /* of this unit and the one before, by tile */
} room;

/* One step of the tile unit and, later, of the sums. */
typedef struct {
    int64_t b, g; /* row block of the matrix, first group of the slice */
    int n_groups, tile, n_tiles, block;
} unit;

static void pack(room *k, const cb_matrix *m, const cb_rows *rows, int64_t r0, int n_rows, int64_t g0, int n_groups)
{
    int64_t ng = cb_groups(m->in);
    for (int r = 0; r < CB_CEIL(n_rows, 16) * 16; r++) {
        int64_t source = r >= n_rows ? -1 : rows->in_index ? rows->in_index[r0 + r] : r0 + r;
        __m512i v = _mm512_setzero_si512();
        for (int g = 0; g < n_groups; g++) {
            if (source >= 0)
                v = _mm512_loadu_si512(rows->q + (source * ng + g0 + g) * 64);
            _mm512_storeu_si512(k->x[g][r / 16] + r % 16 * 64, v);
        }
        float *scale = k->x_scale[r / 16][r % 16];
        if (source >= 0)
            __builtin_memcpy(scale, rows->scale + source * ng + g0, (size_t)n_groups * sizeof *scale);
        else
            __builtin_memset(scale, 0, sizeof k->x_scale[0][0]);
    }
}

/* Weights as the tile unit takes them: s8, quads 0..15 of inputs. */
CB_INLINE void expand(const int FORMAT, const cb_matrix *m, int64_t b, int64_t g, int8_t *to)
{
    const uint8_t *w = (const uint8_t *)m->weight + (b * cb_groups(m->in) + g) * (FORMAT == CB_Q4 ? 512 : 1024);
    const __m512i nibble = _mm512_set1_epi8(15), eight = _mm512_set1_epi8(8), sign = _mm512_set1_epi8((char)0x80);
    for (int kq = 0; FORMAT == CB_Q8 && kq < 16; kq++)
        _mm512_storeu_si512(to + kq * 64, _mm512_xor_si512(_mm512_loadu_si512(w + kq * 64), sign));
    for (int kq = 0; FORMAT == CB_Q4 && kq < 8; kq++) {
        __m512i v = _mm512_loadu_si512(w + kq * 64);
        __m512i high = _mm512_and_si512(_mm512_srli_epi16(v, 4), nibble);
        _mm512_storeu_si512(to + kq * 64, _mm512_sub_epi8(_mm512_and_si512(v, nibble), eight));
        _mm512_storeu_si512(to + (kq + 8) * 64, _mm512_sub_epi8(high, eight));
    }
}

/* Tile registers are named by constants: W for weights, A0 A1 for activations, D0 D1 for products. */
#define MULTIPLY_GROUP(W, D0, D1)                                                                                      \
    do {                                                                                                               \
        _tile_loadd(W, k->w[g], 64);                                                                                   \
        _tile_loadd(4, k->x[u->g + g][u->tile], 64);                                                                   \
        _tile_zero(D0);                                                                                                \
        _tile_dpbssd(D0, 4, W);                                                                                        \
        if (u->n_tiles == 2) {                                                                                         \
            _tile_loadd(5, k->x[u->g + g][u->tile + 1], 64);                                                           \
            _tile_zero(D1);                                                                                            \
            _tile_dpbssd(D1, 5, W);                                                                                    \
            _tile_stored(D1, k->d[half][1][g], 64);                                                                    \
        }                                                                                                              \
        _tile_stored(D0, k->d[half][0][g], 64);                                                                        \
    } while (0)

static void multiply(room *k, const unit *u, int half)
{
    STORES_ARE_DONE();
    for (int g = 0; g < u->n_groups; g++) {
        if (g % 2 == 0)
            MULTIPLY_GROUP(6, 0, 1);
        else
            MULTIPLY_GROUP(7, 2, 3);
    }
}

/* s: f16 scales of the unit's first group (q4). */
CB_INLINE void sum_up(const int FORMAT, room *k, const unit *u, int half, const uint16_t *s)
{
    for (int t = 0; t < u->n_tiles; t++) {
        float *sums = k->acc[u->block][u->tile + t];
        __m512 acc[16];
#pragma GCC unroll 16
        for (int r = 0; r < 16; r++)
            acc[r] = _mm512_loadu_ps(sums + r * 16);
        for (int g = 0; g < u->n_groups; g++) {
            const int32_t *d = k->d[half][t][g];
            const float *x_scale = k->x_scale[u->tile + t][0] + u->g + g;
            __m512 scale = _mm512_setzero_ps();
            if (FORMAT == CB_Q4)
                scale = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(s + g * 16)));
#pragma GCC unroll 16
            for (int r = 0; r < 16; r++) {
                __m512 both = _mm512_set1_ps(x_scale[r * SLICE]);
                if (FORMAT == CB_Q4)
                    both = _mm512_mul_ps(scale, both);
                acc[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(_mm512_loadu_si512(d + r * 16)), both, acc[r]);
            }
        }
#pragma GCC unroll 16
        for (int r = 0; r < 16; r++)
            _mm512_storeu_ps(sums + r * 16, acc[r]);
    }
}

/* Groups [g0, g0 + n_groups), packed in k->x, times row blocks [b0, b0 + n_blocks). */
CB_INLINE void slice(const int FORMAT, room *k, const cb_matrix *m, int64_t g0, int n_groups, int n_tiles, int64_t b0,
                     int n_blocks)
{
    int64_t ng = cb_groups(m->in);
    unit before = {.n_tiles = 0};
    int half = 0;
    for (int block = 0; block < n_blocks; block++) {
        for (int g = 0; g < n_groups; g += GROUPS) {
            int n = CB_MIN(GROUPS, n_groups - g);
            for (int i = 0; i < n; i++)
                expand(FORMAT, m, b0 + block, g0 + g + i, k->w[i]);
            for (int tile = 0; tile < n_tiles; tile += 2, half ^= 1) {
                unit u = {b0 + block, g, n, tile, CB_MIN(2, n_tiles - tile), block};
                multiply(k, &u, half);
                sum_up(FORMAT, k, &before, half ^ 1, (const uint16_t *)m->scale + (before.b * ng + g0 + before.g) * 16);
                before = u;
            }
        }
    }
    sum_up(FORMAT, k, &before, half ^ 1, (const uint16_t *)m->scale + (before.b * ng + g0 + before.g) * 16);
}

CB_INLINE void many_rows(const int FORMAT, const cb_matrix *m, const cb_rows *rows, int64_t b0, int64_t b1, float *y,
                         int64_t ldy, bool add)
{
    room k;
    int64_t ng = cb_groups(m->in);
    CB_TILE_CONFIG(full_tiles);
    for (int64_t r0 = 0; r0 < rows->n_rows; r0 += TILES * 16) {
        int n_rows = (int)CB_MIN(TILES * 16, rows->n_rows - r0), n_tiles = CB_CEIL(n_rows, 16);
        for (int64_t b = b0; b < b1; b += BLOCKS) {
            int n_blocks = (int)CB_MIN(BLOCKS, b1 - b);
            __builtin_memset(k.acc, 0, (size_t)n_blocks * sizeof k.acc[0]);
            for (int64_t g = 0; g < ng; g += SLICE) {
                int n_groups = (int)CB_MIN(SLICE, ng - g);
                pack(&k, m, rows, r0, n_rows, g, n_groups);
                slice(FORMAT, &k, m, g, n_groups, n_tiles, b, n_blocks);
            }
            for (int i = 0; i < n_blocks; i++) {
                for (int r = 0; FORMAT == CB_Q8 && r < n_rows; r++) {
                    float *sums = k.acc[i][0] + r * 16;
                    __m512 s = _mm512_loadu_ps((const float *)m->scale + (b + i) * 16);
                    _mm512_storeu_ps(sums, _mm512_mul_ps(_mm512_loadu_ps(sums), s));
                }
                cb_tile_store(m, rows, r0, n_rows, b + i, k.acc[i][0], y, ldy, add);
            }
        }
    }
    _tile_release();
}

static cb_linear_fn few_rows_q4, few_rows_q8; /* the rung below */

static void cb_linear_q4_q8_amx(const cb_matrix *m, const cb_rows *rows, int64_t b0, int64_t b1, float *y, int64_t ldy,
                                bool add)
{
    if (rows->n_rows < LEAST_ROWS)
        few_rows_q4(m, rows, b0, b1, y, ldy, add);
    else
        many_rows(CB_Q4, m, rows, b0, b1, y, ldy, add);
}

static void cb_linear_q8_q8_amx(const cb_matrix *m, const cb_rows *rows, int64_t b0, int64_t b1, float *y, int64_t ldy,
                                bool add)
{
    if (rows->n_rows < LEAST_ROWS)
        few_rows_q8(m, rows, b0, b1, y, ldy, add);
    else
        many_rows(CB_Q8, m, rows, b0, b1, y, ldy, add);
}

void cb_linear_table_amx(cb_table *t)
{
    few_rows_q4 = t->linear[CB_Q4][CB_ACT_Q8];
    few_rows_q8 = t->linear[CB_Q8][CB_ACT_Q8];
    t->linear[CB_Q4][CB_ACT_Q8] = cb_linear_q4_q8_amx;
    t->linear[CB_Q8][CB_ACT_Q8] = cb_linear_q8_q8_amx;
    t->linear_isa[CB_Q8][CB_ACT_Q8] = t->linear_isa[CB_Q4][CB_ACT_Q8] = cb_isa_names[CB_ISA_AMX];
}
