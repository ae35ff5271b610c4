/* linear_many_avx2.c: weights in nibbles times int8 activations when many rows share them; the same integers and the same order
 * of f32 operations as linear_ref.c.
 *
 * Without VNNI the instructions themselves are the limit, so this spends as few as it can on a product: two for 32 of
 * them (multiply pairs of bytes, add in i16), with the weights as a memory operand and one broadcast of activations for
 * 64 outputs. For that a slab of weights is spread once into signed bytes that stay in the first-level cache while the
 * rows pass, and the activations become x + 128, because the multiplication wants its register operand unsigned.
 *
 * Sums wrap modulo 2^16 on the way, which is harmless: a lane starts at -128 * (the sum of its 32 weights), and what is
 * left at the end, 32 products of |w| <= 8 and |x| <= 127 (or 16 of |w| <= 12), is at most 32512. */
#include "many.h"
#include "weights_256.h"

#define GROUPS 2 /* of 64 inputs in a slab; with 32 rows it all stays in 32 KiB */
#define SUMS(format) (CB_HAS_HALVES(format) ? 2 : 1) /* of a group, each with a scale */
#define ROWS 32
#define BLOCKS 4 /* row blocks side by side: 64 outputs, eight sums in registers */
#define SPAN 32  /* row blocks whose f32 sums are held meanwhile */

typedef struct {
    _Alignas(64) int8_t weight[GROUPS * 16 * 2 * BLOCKS * 32]; /* [group][input quad][half block][8 outputs][4] */
    _Alignas(64) int16_t start[GROUPS * 2 * 2 * BLOCKS * 16];  /* [group][sum][half block][8 outputs][2] */
    _Alignas(64) float scale[GROUPS * 2 * 2 * BLOCKS * 8];
    _Alignas(64) uint8_t x[ROWS][GROUPS * 64];
    float x_scale[ROWS][GROUPS];
    _Alignas(64) float sum[SPAN / BLOCKS][ROWS][BLOCKS * 16];
} workspace;

/* Groups [g0, g0 + n) of block b, which is block i of the H / 2 side by side. */
CB_INLINE void spread_block(const int FORMAT, const int H, const cb_matrix *m, int64_t b, int i, int64_t g0, int n,
                            workspace *ws)
{
    const __m256i offset = _mm256_set1_epi8(FORMAT == CB_MXFP4 ? 0 : 8), shift = _mm256_set1_epi8((char)128);
    const __m256i table = FORMAT == CB_MXFP4 ? cb_fp4_table(0) : _mm256_setzero_si256();
    int64_t ng = cb_groups(m->in);
    const uint8_t *w = (const uint8_t *)m->weight + (b * ng + g0) * 512;
    const uint8_t *s = (const uint8_t *)m->scale + (b * ng + g0) * CB_GROUP_SCALE_BYTES(FORMAT);
    for (int g = 0; g < n; g++, w += 512, s += CB_GROUP_SCALE_BYTES(FORMAT)) {
        for (int line = 0; line < 8; line++) /* the same group of the next slab */
            _mm_prefetch((const char *)w + GROUPS * 512 + line * 64, _MM_HINT_T0);
        for (int half = 0; half < 2; half++) {
            int h = 2 * i + half;
            int8_t *to = ws->weight + (g * 16 * H + h) * 32;
            __m256i start[2] = {_mm256_setzero_si256(), _mm256_setzero_si256()};
            for (int kq = 0; kq < 8; kq++) {
                __m256i v = _mm256_loadu_si256((const __m256i *)(w + kq * 64 + half * 32));
                __m256i lo = _mm256_sub_epi8(cb_nibbles(FORMAT, v, false, table), offset);
                __m256i hi = _mm256_sub_epi8(cb_nibbles(FORMAT, v, true, table), offset);
                _mm256_store_si256((__m256i *)(to + kq * H * 32), lo);
                _mm256_store_si256((__m256i *)(to + (kq + 8) * H * 32), hi);
                start[0] = _mm256_sub_epi16(start[0], _mm256_maddubs_epi16(shift, lo));
                start[SUMS(FORMAT) - 1] = _mm256_sub_epi16(start[SUMS(FORMAT) - 1], _mm256_maddubs_epi16(shift, hi));
            }
            for (int part = 0; part < SUMS(FORMAT); part++) {
                int at = (g * SUMS(FORMAT) + part) * H + h;
                _mm256_store_si256((__m256i *)(ws->start + at * 16), start[part]);
                _mm256_store_ps(ws->scale + at * 8, cb_group_scales(FORMAT, s, part, half));
            }
        }
    }
}

/* H half blocks of one slab for all rows. */
CB_INLINE void multiply(const int FORMAT, const int H, const cb_matrix *m, int64_t b, int64_t g0, int n, int n_rows,
                        workspace *ws, float sum[ROWS][BLOCKS * 16])
{
    for (int i = 0; i < H / 2; i++)
        spread_block(FORMAT, H, m, b + i, i, g0, n, ws);
    const __m256i ones = _mm256_set1_epi16(1);
    const int QUADS = 16 / SUMS(FORMAT);
    for (int r = 0; r < n_rows; r++) {
        const int8_t *w = ws->weight;
        const uint8_t *x_of_row = ws->x[r];
        for (int i = 0; i < n * SUMS(FORMAT); i++, w += QUADS * H * 32, x_of_row += QUADS * 4) {
            __m256i d[2 * BLOCKS];
            for (int h = 0; h < H; h++)
                d[h] = _mm256_load_si256((const __m256i *)(ws->start + (i * H + h) * 16));
#pragma GCC unroll 16
            for (int kq = 0; kq < QUADS; kq++) {
                int32_t quad;
                __builtin_memcpy(&quad, x_of_row + kq * 4, 4);
                __m256i x = _mm256_set1_epi32(quad);
#pragma GCC unroll 8
                for (int h = 0; h < H; h++) {
                    __m256i v = _mm256_load_si256((const __m256i *)(w + (kq * H + h) * 32));
                    d[h] = _mm256_add_epi16(d[h], _mm256_maddubs_epi16(x, v));
                    CB_IN_ORDER(d[h]);
                }
            }
            __m256 x_scale = _mm256_broadcast_ss(&ws->x_scale[r][i / SUMS(FORMAT)]);
            for (int h = 0; h < H; h++) {
                __m256 value = _mm256_cvtepi32_ps(_mm256_madd_epi16(d[h], ones));
                __m256 both = _mm256_mul_ps(_mm256_load_ps(ws->scale + (i * H + h) * 8), x_scale);
                _mm256_store_ps(sum[r] + h * 8, _mm256_fmadd_ps(value, both, _mm256_load_ps(sum[r] + h * 8)));
            }
        }
    }
}

static void load_rows(const cb_matrix *m, const cb_rows *rows, int64_t r0, int n_rows, int64_t g0, int n, workspace *ws)
{
    int64_t ng = cb_groups(m->in);
    const __m256i sign = _mm256_set1_epi8((char)0x80);
    for (int r = 0; r < n_rows; r++) {
        int64_t source = rows->in_index ? rows->in_index[r0 + r] : r0 + r;
        const int8_t *q = rows->q + (source * ng + g0) * 64;
        for (int i = 0; i < n * 2; i++) {
            __m256i v = _mm256_loadu_si256((const __m256i *)(q + i * 32));
            _mm256_storeu_si256((__m256i *)(ws->x[r] + i * 32), _mm256_xor_si256(v, sign));
        }
        __builtin_memcpy(ws->x_scale[r], rows->scale + source * ng + g0, (size_t)n * sizeof(float));
    }
}

CB_INLINE void many(const int FORMAT, const cb_matrix *m, const cb_rows *rows, int64_t b0, int64_t b1, float *y,
                    int64_t ldy, bool add)
{
    workspace ws;
    int64_t ng = cb_groups(m->in);
    for (int64_t span = b0; span < b1; span += SPAN) {
        int64_t end = CB_MIN(span + SPAN, b1);
        for (int64_t r0 = 0; r0 < rows->n_rows; r0 += ROWS) {
            int n_rows = (int)CB_MIN(ROWS, rows->n_rows - r0);
            __builtin_memset(ws.sum, 0, sizeof ws.sum[0] * (size_t)CB_CEIL(end - span, BLOCKS));
            for (int64_t g0 = 0; g0 < ng; g0 += GROUPS) {
                int n = (int)CB_MIN(GROUPS, ng - g0);
                load_rows(m, rows, r0, n_rows, g0, n, &ws);
                for (int64_t b = span; b < end; b += BLOCKS) {
                    float(*sum)[BLOCKS * 16] = ws.sum[(b - span) / BLOCKS];
                    switch (CB_MIN(BLOCKS, end - b)) {
                    case 1: multiply(FORMAT, 2, m, b, g0, n, n_rows, &ws, sum); break;
                    case 2: multiply(FORMAT, 4, m, b, g0, n, n_rows, &ws, sum); break;
                    case 3: multiply(FORMAT, 6, m, b, g0, n, n_rows, &ws, sum); break;
                    case 4: multiply(FORMAT, 8, m, b, g0, n, n_rows, &ws, sum); break;
                    }
                }
            }
            for (int64_t b = span; b < end; b++)
                for (int r = 0; r < n_rows; r++)
                    cb_tile_store(m, rows, r0 + r, 1, b, ws.sum[(b - span) / BLOCKS][r] + (b - span) % BLOCKS * 16, y, ldy,
                                  add);
        }
    }
}

#define KERNEL(name, format)                                                                                           \
    void cb_linear_many_##name##_q8_avx2(const cb_matrix *m, const cb_rows *rows, int64_t b0, int64_t b1, float *y,     \
                                         int64_t ldy, bool add)                                                        \
    {                                                                                                                  \
        many(format, m, rows, b0, b1, y, ldy, add);                                                                    \
    }
KERNEL(q4, CB_Q4)
KERNEL(q4g32, CB_Q4G32)
KERNEL(mxfp4, CB_MXFP4)
