/* linear_amx.c: int8 activations for several rows: one tile instruction is the exact product of a group, 16 rows by 16
 * outputs by 64 inputs, because a row block's group (colibri.h, tile16) already lies as such an operand: 16 quads of
 * inputs, each with 16 outputs side by side. Where the halves of a group have scales of their own, each is a step of 8 quads.
 * Up to eight rows stay with the rung below.
 *
 * How         Activations are copied into operands that lie one after another in the order in which they are used: a slice
 *             of groups of up to 128 rows, the more groups the fewer rows. Row blocks pass over it; a block's weights are
 *             brought to signed bytes once per group for all rows. A unit is 4 steps by 1 or 2 row tiles: its products go
 *             to memory, where the f32 sums of linear_ref.c take them one unit later, 16 rows in 16 registers, so that the
 *             tile unit works meanwhile. Weights are spread one unit early: a tile load waits for stores still under way.
 * Bound       A group of 16 rows takes 24 + 3 * 16 vector operations, 16 cycles of the tile unit and 544 bytes of weights:
 *             with few rows memory sets the speed, with many the sums do.
 * Room        300 KiB of stack, of which a call with few groups or rows touches little. */
#include "amx.h"
#include "weights_512.h"

#define LEAST_ROWS 9 /* as many as the rung below takes in one pass over the weights, and one */
#define STEPS 4    /* of a unit: groups, or halves of them */
#define PER_GROUP(FORMAT) (CB_HAS_HALVES(FORMAT) ? 2 : 1)
#define GROUPS(FORMAT) (STEPS / PER_GROUP(FORMAT)) /* of a unit */
#define TILES 8    /* of 16 rows */
#define PIECES 128 /* of a slice: one group of one tile */
#define AHEAD 4    /* units of weights that are asked for before they are needed */

/* Tiles: 0..3 products, 4 and 5 activations, 6 and 7 weights. */
static const _Alignas(64) tile_config half_tiles = {
    .palette = 1, .row_bytes = {64, 64, 64, 64, 32, 32, 64, 64}, .n_rows = {16, 16, 16, 16, 16, 16, 8, 8}};

typedef struct {
    _Alignas(64) int8_t x[PIECES][16 * 64]; /* by unit of groups, tile, group */
    float x_scale[PIECES][16];
    float acc[PIECES][16 * 16]; /* by row block, tile */
    int8_t w[2][STEPS][16 * 64]; /* of this unit and the next one */
    int32_t d[2][2][STEPS][16 * 16]; /* of this unit and the one before, by tile */
} room;

/* Groups [g0, g0 + n_groups) of n_rows rows, packed, which row blocks [b0, b0 + n_blocks) pass over. */
typedef struct {
    const cb_matrix *m;
    int64_t g0, b0;
    int n_groups, n_rows, n_tiles, n_blocks;
} slice;

/* Weights of a unit: row block and first group, both counted within the slice. */
typedef struct {
    int block, g;
} place;

/* One step of the tile unit and, later, of the sums. */
typedef struct {
    place at;
    int n_groups, tile, n_tiles;
} unit;

CB_INLINE place after(const int FORMAT, const slice *s, place at)
{
    at.g += GROUPS(FORMAT);
    return at.g < s->n_groups ? at : (place){at.block + 1, 0};
}

CB_INLINE int groups_at(const int FORMAT, const slice *s, place at) { return CB_MIN(GROUPS(FORMAT), s->n_groups - at.g); }

/* Index of a group among all groups of the matrix. */
static int64_t group_of(const slice *s, place at) { return (s->b0 + at.block) * cb_groups(s->m->in) + s->g0 + at.g; }

CB_INLINE int piece_of(const int FORMAT, const slice *s, int g, int tile)
{
    return (g / GROUPS(FORMAT) * s->n_tiles + tile) * GROUPS(FORMAT) + g % GROUPS(FORMAT);
}

/* In the order in which the operands lie: along a row instead, lines 1 KiB apart would fight for the same places in the
 * first-level cache. */
CB_INLINE void pack(const int FORMAT, room *k, const slice *s, const cb_rows *rows, int64_t r0)
{
    int64_t ng = cb_groups(s->m->in);
    for (int tile = 0; tile < s->n_tiles; tile++) {
        const int8_t *q[16];
        const float *scale[16];
        int n = CB_MIN(16, s->n_rows - tile * 16);
        for (int r = 0; r < n; r++) {
            int64_t row = r0 + tile * 16 + r, at = (rows->in_index ? rows->in_index[row] : row) * ng + s->g0;
            q[r] = rows->q + at * 64;
            scale[r] = rows->scale + at;
        }
        for (int g = 0; g < s->n_groups; g++) {
            int piece = piece_of(FORMAT, s, g, tile);
            for (int r = 0; r < 16; r++) {
                _mm512_storeu_si512(k->x[piece] + r * 64, r < n ? _mm512_loadu_si512(q[r] + g * 64) : _mm512_setzero_si512());
                k->x_scale[piece][r] = r < n ? scale[r][g] : 0.0f;
            }
        }
    }
}

/* ---- weights: s8, quads 0..15 of inputs ------------------------------------------------------------------------- */

CB_INLINE void ask_for(const int FORMAT, const slice *s, place at)
{
    if (at.block >= s->n_blocks)
        return;
    const char *w = (const char *)s->m->weight + group_of(s, at) * CB_GROUP_BYTES(FORMAT);
    for (int i = 0; i < GROUPS(FORMAT) * CB_GROUP_BYTES(FORMAT); i += 64)
        _mm_prefetch(w + i, _MM_HINT_T0);
    const char *scale = (const char *)s->m->scale + group_of(s, at) * CB_GROUP_SCALE_BYTES(FORMAT);
    for (int i = 0; i < GROUPS(FORMAT) * CB_GROUP_SCALE_BYTES(FORMAT); i += 64)
        _mm_prefetch(scale + i, _MM_HINT_T0);
}

CB_INLINE void expand(const int FORMAT, const slice *s, place at, int8_t (*to)[16 * 64])
{
    const uint8_t *w = (const uint8_t *)s->m->weight + group_of(s, at) * CB_GROUP_BYTES(FORMAT);
    const __m512i sign = _mm512_set1_epi8((char)0x80);
    /* A byte's value by its low four bits. The permutation looks at six, so the table repeats. */
    const __m512i value = FORMAT == CB_MXFP4 ? cb_fp4_table(0)
                                             : _mm512_set4_epi32(0x07060504, 0x03020100, (int)0xfffefdfcu, (int)0xfbfaf9f8u);
    for (int i = 0; i < groups_at(FORMAT, s, at); i++, w += CB_GROUP_BYTES(FORMAT)) {
#pragma GCC unroll 8
        for (int kq = 0; kq < 8; kq++) {
            __m512i v = _mm512_loadu_si512(w + kq * 64);
            if (!CB_IS_NIBBLES(FORMAT)) {
                _mm512_storeu_si512(to[i] + kq * 64, _mm512_xor_si512(v, sign));
                v = _mm512_loadu_si512(w + (kq + 8) * 64);
                _mm512_storeu_si512(to[i] + (kq + 8) * 64, _mm512_xor_si512(v, sign));
                continue;
            }
            _mm512_storeu_si512(to[i] + kq * 64, _mm512_permutexvar_epi8(v, value));
            _mm512_storeu_si512(to[i] + (kq + 8) * 64, _mm512_permutexvar_epi8(_mm512_srli_epi16(v, 4), value));
        }
    }
}

/* ---- products and sums --------------------------------------------------------------------------------------------- */

/* Tile registers are named by constants: W for weights, 4 and 5 for activations, D0 D1 for products. */
#define MULTIPLY_STEP(W, D0, D1)                                                                                       \
    do {                                                                                                               \
        const int g = i / PER_GROUP(FORMAT), part = i % PER_GROUP(FORMAT);                                             \
        _tile_loadd(W, w[g] + part * 512, 64);                                                                         \
        _tile_loadd(4, x[g] + part * 32, 64);                                                                          \
        _tile_zero(D0);                                                                                                \
        _tile_dpbssd(D0, 4, W);                                                                                        \
        if (u->n_tiles == 2) {                                                                                         \
            _tile_loadd(5, x[g + GROUPS(FORMAT)] + part * 32, 64);                                                     \
            _tile_zero(D1);                                                                                            \
            _tile_dpbssd(D1, 5, W);                                                                                    \
            _tile_stored(D1, d[1][i], 64);                                                                             \
        }                                                                                                              \
        _tile_stored(D0, d[0][i], 64);                                                                                 \
    } while (0)

CB_INLINE void multiply(const int FORMAT, const unit *u, int8_t (*x)[16 * 64], int8_t (*w)[16 * 64],
                        int32_t (*d)[STEPS][16 * 16])
{
    STORES_ARE_DONE();
    for (int i = 0; i < u->n_groups * PER_GROUP(FORMAT); i++) {
        if (i % 2 == 0)
            MULTIPLY_STEP(6, 0, 1);
        else
            MULTIPLY_STEP(7, 2, 3);
    }
}

/* ROWS of one tile; weight_scale: of the unit's first group. */
CB_INLINE void sum_tile(const int FORMAT, const int ROWS, int n_groups, int32_t (*d)[16 * 16], float (*x_scale)[16],
                        const uint8_t *weight_scale, float *sums)
{
    __m512 acc[16];
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++)
        acc[r] = _mm512_loadu_ps(sums + r * 16);
    for (int i = 0; i < n_groups * PER_GROUP(FORMAT); i++) {
        const int g = i / PER_GROUP(FORMAT);
        __m512 scale = _mm512_setzero_ps();
        if (FORMAT != CB_Q8)
            scale = cb_group_scales(FORMAT, weight_scale + g * CB_GROUP_SCALE_BYTES(FORMAT), i % PER_GROUP(FORMAT));
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; r++) {
            __m512 both = _mm512_set1_ps(x_scale[g][r]);
            if (FORMAT != CB_Q8)
                both = _mm512_mul_ps(scale, both);
            acc[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(_mm512_loadu_si512(d[i] + r * 16)), both, acc[r]);
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++)
        _mm512_storeu_ps(sums + r * 16, acc[r]);
}

CB_INLINE void sum_up(const int FORMAT, room *k, const slice *s, const unit *u, int32_t (*d)[STEPS][16 * 16])
{
    const uint8_t *scale = s->m->scale;
    if (u->n_tiles)
        scale += group_of(s, u->at) * CB_GROUP_SCALE_BYTES(FORMAT);
    for (int t = 0; t < u->n_tiles; t++) {
        int tile = u->tile + t, n = s->n_rows - tile * 16;
        float (*x_scale)[16] = k->x_scale + piece_of(FORMAT, s, u->at.g, tile), *sums = k->acc[u->at.block * s->n_tiles + tile];
        if (n > 12)
            sum_tile(FORMAT, 16, u->n_groups, d[t], x_scale, scale, sums);
        else if (n > 8)
            sum_tile(FORMAT, 12, u->n_groups, d[t], x_scale, scale, sums);
        else if (n > 4)
            sum_tile(FORMAT, 8, u->n_groups, d[t], x_scale, scale, sums);
        else
            sum_tile(FORMAT, 4, u->n_groups, d[t], x_scale, scale, sums);
    }
}

CB_INLINE void pass_over(const int FORMAT, room *k, const slice *s)
{
    unit before = {.n_tiles = 0};
    place at = {0, 0}, far = at;
    int half = 0, now = 0;
    for (int i = 0; i < AHEAD; i++, far = after(FORMAT, s, far))
        ask_for(FORMAT, s, far);
    expand(FORMAT, s, at, k->w[now]);
    while (at.block < s->n_blocks) {
        place next = after(FORMAT, s, at);
        ask_for(FORMAT, s, far);
        if (next.block < s->n_blocks)
            expand(FORMAT, s, next, k->w[now ^ 1]);
        for (int tile = 0; tile < s->n_tiles; tile += 2, half ^= 1) {
            unit u = {at, groups_at(FORMAT, s, at), tile, CB_MIN(2, s->n_tiles - tile)};
            multiply(FORMAT, &u, k->x + piece_of(FORMAT, s, at.g, tile), k->w[now], k->d[half]);
            sum_up(FORMAT, k, s, &before, k->d[half ^ 1]);
            before = u;
        }
        at = next;
        far = after(FORMAT, s, far);
        now ^= 1;
    }
    sum_up(FORMAT, k, s, &before, k->d[half ^ 1]);
}

CB_INLINE void many_rows(const int FORMAT, const cb_matrix *m, const cb_rows *rows, int64_t b0, int64_t b1, float *y,
                         int64_t ldy, bool add)
{
    room k;
    int64_t ng = cb_groups(m->in);
    if (CB_HAS_HALVES(FORMAT))
        CB_TILE_CONFIG(half_tiles);
    else
        CB_TILE_CONFIG(full_tiles);
    for (int64_t r0 = 0; r0 < rows->n_rows; r0 += TILES * 16) {
        slice s = {.m = m, .n_rows = (int)CB_MIN(TILES * 16, rows->n_rows - r0)};
        s.n_tiles = CB_CEIL(s.n_rows, 16);
        int most_blocks = PIECES / s.n_tiles, most_groups = most_blocks / STEPS * STEPS;
        for (s.b0 = b0; s.b0 < b1; s.b0 += s.n_blocks) {
            s.n_blocks = (int)CB_MIN(most_blocks, b1 - s.b0);
            __builtin_memset(k.acc, 0, (size_t)(s.n_blocks * s.n_tiles) * sizeof k.acc[0]);
            for (s.g0 = 0; s.g0 < ng; s.g0 += s.n_groups) {
                s.n_groups = (int)CB_MIN(most_groups, ng - s.g0);
                pack(FORMAT, &k, &s, rows, r0);
                pass_over(FORMAT, &k, &s);
            }
            for (int i = 0; i < s.n_blocks; i++) {
                float *sums = k.acc[i * s.n_tiles];
                for (int r = 0; FORMAT == CB_Q8 && r < s.n_rows; r++) {
                    __m512 scale = _mm512_loadu_ps((const float *)m->scale + (s.b0 + i) * 16);
                    _mm512_storeu_ps(sums + r * 16, _mm512_mul_ps(_mm512_loadu_ps(sums + r * 16), scale));
                }
                cb_tile_store(m, rows, r0, s.n_rows, s.b0 + i, sums, y, ldy, add);
            }
        }
    }
    _tile_release();
}

static cb_linear_fn few_rows[CB_N_FORMATS]; /* the rung below */

#define KERNEL(name, format)                                                                                           \
    static void cb_linear_##name##_q8_amx(const cb_matrix *m, const cb_rows *rows, int64_t b0, int64_t b1, float *y,    \
                                          int64_t ldy, bool add)                                                       \
    {                                                                                                                  \
        if (rows->n_rows < LEAST_ROWS)                                                                                 \
            few_rows[format](m, rows, b0, b1, y, ldy, add);                                                            \
        else                                                                                                           \
            many_rows(format, m, rows, b0, b1, y, ldy, add);                                                           \
    }
KERNEL(q8, CB_Q8)
KERNEL(q4, CB_Q4)
KERNEL(q8g32, CB_Q8G32)
KERNEL(q4g32, CB_Q4G32)
KERNEL(mxfp4, CB_MXFP4)

void cb_linear_table_amx(cb_table *t)
{
    for (int format = CB_F32; format < CB_N_FORMATS; format++) {
        few_rows[format] = t->linear[format][CB_ACT_Q8];
        if (few_rows[format])
            t->linear_isa[format][CB_ACT_Q8] = cb_isa_names[CB_ISA_AMX];
    }
    t->linear[CB_Q8][CB_ACT_Q8] = cb_linear_q8_q8_amx;
    t->linear[CB_Q4][CB_ACT_Q8] = cb_linear_q4_q8_amx;
    t->linear[CB_Q8G32][CB_ACT_Q8] = cb_linear_q8g32_q8_amx;
    t->linear[CB_Q4G32][CB_ACT_Q8] = cb_linear_q4g32_q8_amx;
    t->linear[CB_MXFP4][CB_ACT_Q8] = cb_linear_mxfp4_q8_amx;
}
