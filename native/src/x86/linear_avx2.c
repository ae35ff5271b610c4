/* linear_avx2.c: linear_ref.c with eight outputs per register; a row block of 16 outputs is two registers ("halves").
 *
 * int8 activations: one dword of a row's activations (4 inputs) is broadcast against 8 outputs x 4 inputs of weights.
 *   nibbles: u8 codes times s8, summed in i16 over 8 products of q + 8 (at most 8 * 2 * 15 * 127 = 30480) or 4 of mxfp4's
 *       q + 12 (at most 4 * 2 * 24 * 127), then in i32; offset * sum(xq) goes off.
 *   bytes: |w| times x with w's sign (at most 2 * 128 * 127 = 32512 in i16), each product widened to i32.
 * f32 activations: the weights of one input are widened to two registers; several groups (few rows) or several rows
 * run side by side, because one chain of fused multiply-adds waits four cycles for each step. */
#include "many.h"
#include "weights_256.h"

/* ---- int8 activations -------------------------------------------------------------------------------------- */

CB_INLINE __m256i broadcast_dword(const int8_t *q)
{
    int32_t v;
    __builtin_memcpy(&v, q, 4);
    return _mm256_set1_epi32(v);
}

/* d[r][h][part]: the exact sums of a group's halves, of H half blocks from `first` on. */
CB_INLINE void multiply_nibbles(const int FORMAT, const int R, const int H, int first, const uint8_t *w,
                                const cb_tile_rows *rows, int64_t g, __m256i table, __m256i d[4][2][2])
{
    const __m256i ones = _mm256_set1_epi16(1);
    const int RUN = FORMAT == CB_MXFP4 ? 4 : 8; /* quads between two additions in i32 */
    for (int r = 0; r < R; r++)
        for (int h = 0; h < H; h++)
            for (int part = 0; part < 2; part++)
                d[r][h][part] = _mm256_set1_epi32(-CB_OFFSET(FORMAT) * rows->sum[r][2 * g + part]);
#pragma GCC unroll 2
    for (int run = 0; run < 8; run += RUN) {
        __m256i lo[4][2], hi[4][2];
        for (int r = 0; r < R; r++)
            for (int h = 0; h < H; h++)
                lo[r][h] = hi[r][h] = _mm256_setzero_si256();
#pragma GCC unroll 8
        for (int kq = run; kq < run + RUN; kq++) {
            __m256i v0[2], v1[2];
            for (int h = 0; h < H; h++) {
                __m256i v = _mm256_loadu_si256((const __m256i *)(w + kq * 64 + (first + h) * 32));
                v0[h] = cb_nibbles(FORMAT, v, false, table);
                v1[h] = cb_nibbles(FORMAT, v, true, table);
            }
            for (int r = 0; r < R; r++) {
                const int8_t *q = rows->q[r] + g * 64 + kq * 4;
                __m256i q0 = broadcast_dword(q), q1 = broadcast_dword(q + 32);
                for (int h = 0; h < H; h++) {
                    lo[r][h] = _mm256_add_epi16(lo[r][h], _mm256_maddubs_epi16(v0[h], q0));
                    hi[r][h] = _mm256_add_epi16(hi[r][h], _mm256_maddubs_epi16(v1[h], q1));
                    CB_IN_ORDER(lo[r][h]);
                    CB_IN_ORDER(hi[r][h]);
                }
            }
        }
        for (int r = 0; r < R; r++)
            for (int h = 0; h < H; h++) {
                d[r][h][0] = _mm256_add_epi32(d[r][h][0], _mm256_madd_epi16(lo[r][h], ones));
                d[r][h][1] = _mm256_add_epi32(d[r][h][1], _mm256_madd_epi16(hi[r][h], ones));
            }
    }
}

CB_INLINE void multiply_bytes(const int R, const int H, int first, const uint8_t *w, const cb_tile_rows *rows, int64_t g,
                              __m256i d[4][2][2])
{
    const __m256i sign = _mm256_set1_epi8((char)0x80), ones = _mm256_set1_epi16(1);
    for (int part = 0; part < 2; part++) {
        for (int r = 0; r < R; r++)
            for (int h = 0; h < H; h++)
                d[r][h][part] = _mm256_setzero_si256();
#pragma GCC unroll 4
        for (int kq = part * 8; kq < part * 8 + 8; kq++) {
            __m256i v[2], magnitude[2];
            for (int h = 0; h < H; h++) {
                v[h] = _mm256_loadu_si256((const __m256i *)(w + kq * 64 + (first + h) * 32));
                v[h] = _mm256_xor_si256(v[h], sign);
                magnitude[h] = _mm256_abs_epi8(v[h]);
            }
            for (int r = 0; r < R; r++) {
                __m256i q = broadcast_dword(rows->q[r] + g * 64 + kq * 4);
                for (int h = 0; h < H; h++) {
                    __m256i pairs = _mm256_maddubs_epi16(magnitude[h], _mm256_sign_epi8(q, v[h]));
                    d[r][h][part] = _mm256_add_epi32(d[r][h][part], _mm256_madd_epi16(pairs, ones));
                    CB_IN_ORDER(d[r][h][part]);
                }
            }
        }
    }
}

CB_INLINE void tile_q8(const int FORMAT, const int R, const cb_matrix *m, int64_t b, const cb_tile_rows *rows, float *out)
{
    const int H = R <= 2 ? 2 : 1; /* halves per pass: as many sums as fit the registers */
    int64_t ng = cb_groups(m->in);
    const int BYTES = CB_GROUP_BYTES(FORMAT);
    const uint8_t *w = (const uint8_t *)m->weight + b * ng * BYTES;
    const uint8_t *s = (const uint8_t *)m->scale + b * ng * CB_GROUP_SCALE_BYTES(FORMAT);
    const __m256i table = FORMAT == CB_MXFP4 ? cb_fp4_table(CB_OFFSET(FORMAT)) : _mm256_setzero_si256();
    __m256 acc[4][2];
    for (int r = 0; r < R; r++)
        acc[r][0] = acc[r][1] = _mm256_setzero_ps();
    for (int64_t g = 0; g < ng; g++, w += BYTES, s += CB_GROUP_SCALE_BYTES(FORMAT)) {
        cb_tile_prefetch(w, BYTES, BYTES);
#pragma GCC unroll 1
        for (int first = 0; first < 2; first += H) {
            __m256i d[4][2][2];
            if (CB_IS_NIBBLES(FORMAT))
                multiply_nibbles(FORMAT, R, H, first, w, rows, g, table, d);
            else
                multiply_bytes(R, H, first, w, rows, g, d);
            for (int h = 0; h < H; h++) {
                __m256 s0 = FORMAT == CB_Q8 ? _mm256_set1_ps(1.0f) : cb_group_scales(FORMAT, s, 0, first + h);
                __m256 s1 = CB_HAS_HALVES(FORMAT) ? cb_group_scales(FORMAT, s, 1, first + h) : s0;
                for (int r = 0; r < R; r++) {
                    __m256 a = _mm256_set1_ps(rows->scale[r][g]), a0 = FORMAT == CB_Q8 ? a : _mm256_mul_ps(s0, a);
                    __m256i whole = _mm256_add_epi32(d[r][h][0], d[r][h][1]);
                    __m256 sum = acc[r][first + h];
                    sum = _mm256_fmadd_ps(_mm256_cvtepi32_ps(CB_HAS_HALVES(FORMAT) ? d[r][h][0] : whole), a0, sum);
                    if (CB_HAS_HALVES(FORMAT))
                        sum = _mm256_fmadd_ps(_mm256_cvtepi32_ps(d[r][h][1]), _mm256_mul_ps(s1, a), sum);
                    acc[r][first + h] = sum;
                }
            }
        }
    }
    for (int r = 0; r < R; r++)
        for (int half = 0; half < 2; half++) {
            if (FORMAT == CB_Q8)
                acc[r][half] = _mm256_mul_ps(acc[r][half], _mm256_loadu_ps((const float *)m->scale + b * 16 + half * 8));
            _mm256_storeu_ps(out + r * 16 + half * 8, acc[r][half]);
        }
}

/* ---- f32 activations --------------------------------------------------------------------------------------- */

/* The 8 weights (half) of input k of a group (or of input k mod 4 of a quad, for the packed formats) that starts at w. */
CB_INLINE __m256 widen(const int FORMAT, const uint8_t *w, int k, const bool HIGH, int half, __m256i table)
{
    if (FORMAT == CB_F32)
        return _mm256_loadu_ps((const float *)w + k * 16 + half * 8);
    if (FORMAT == CB_BF16) {
        __m128i h = _mm_loadu_si128((const __m128i *)((const uint16_t *)w + k * 16 + half * 8));
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16));
    }
    __m256i v = _mm256_loadu_si256((const __m256i *)(w + half * 32));
    if (FORMAT == CB_MXFP4) { /* byte k of the values to the top, then down with its sign */
        v = cb_nibbles(FORMAT, v, HIGH, table);
        return _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(v, 24 - 8 * k), 24));
    }
    if (!CB_IS_NIBBLES(FORMAT)) { /* the same, from q + 128 */
        v = _mm256_xor_si256(v, _mm256_set1_epi8((char)0x80));
        return _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(v, 24 - 8 * k), 24));
    }
    v = _mm256_xor_si256(v, _mm256_set1_epi8((char)0x88));
    return _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(v, (HIGH ? 24 : 28) - 8 * k), 28));
}

/* p[g][r][half] += chains over inputs begin .. end-1 of G neighbouring groups, which lie in one half where codes are nibbles. */
CB_INLINE void chains(const int FORMAT, const int G, const int R, const bool HIGH, const uint8_t *w,
                      const cb_tile_rows *rows, int64_t x0, int begin, int end, __m256 p[4][4][2])
{
    const bool packed = CB_HAS_CODES(FORMAT), nibbles = CB_IS_NIBBLES(FORMAT);
    const int quad_bytes = CB_GROUP_BYTES(FORMAT) / (nibbles ? 8 : 16); /* of four inputs, of nibbles four and four */
    const __m256i table = FORMAT == CB_MXFP4 ? cb_fp4_table(0) : _mm256_setzero_si256();
    for (int k4 = begin; k4 < end; k4 += 4) {
        const int quad = (k4 - (HIGH && nibbles ? 32 : 0)) / 4;
        for (int g = 0; g < G && !(HIGH && nibbles); g++) /* line by line between the products: a burst of them waits for itself */
            cb_tile_prefetch(w + g * CB_GROUP_BYTES(FORMAT) + quad * quad_bytes, quad_bytes, G * CB_GROUP_BYTES(FORMAT));
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) {
            if (k4 + j >= end)
                break;
#pragma GCC unroll 4
            for (int g = 0; g < G; g++) {
                const uint8_t *from = w + g * CB_GROUP_BYTES(FORMAT) + (packed ? quad * 64 : 0);
                __m256 w0 = widen(FORMAT, from, packed ? j : k4 + j, HIGH, 0, table);
                __m256 w1 = widen(FORMAT, from, packed ? j : k4 + j, HIGH, 1, table);
#pragma GCC unroll 4
                for (int r = 0; r < R; r++) {
                    __m256 x = _mm256_broadcast_ss(rows->x[r] + x0 + g * 64 + k4 + j);
                    p[g][r][0] = _mm256_fmadd_ps(w0, x, p[g][r][0]);
                    p[g][r][1] = _mm256_fmadd_ps(w1, x, p[g][r][1]);
                }
            }
        }
    }
}

CB_INLINE void groups_f32(const int FORMAT, const int G, const int R, const uint8_t *w, const uint8_t *s,
                          const cb_tile_rows *rows, int64_t x0, int n, __m256 acc[4][2])
{
    const int PARTS = CB_HAS_HALVES(FORMAT) ? 2 : 1; /* with scales of their own */
    __m256 p[2][4][4][2];
    for (int part = 0; part < PARTS; part++)
        for (int g = 0; g < G; g++)
            for (int r = 0; r < R; r++)
                p[part][g][r][0] = p[part][g][r][1] = _mm256_setzero_ps();
    if (PARTS == 2 || CB_IS_NIBBLES(FORMAT)) { /* low nibbles hold the first 32 inputs, high nibbles the rest */
        chains(FORMAT, G, R, false, w, rows, x0, 0, CB_MIN(n, 32), p[0]);
        chains(FORMAT, G, R, true, w, rows, x0, 32, n, p[PARTS - 1]);
    } else {
        chains(FORMAT, G, R, false, w, rows, x0, 0, n, p[0]);
    }
    for (int g = 0; g < G; g++) {
        const uint8_t *of_group = s + g * CB_GROUP_SCALE_BYTES(FORMAT);
        for (int part = 0; part < PARTS; part++)
            for (int half = 0; half < 2; half++) {
                __m256 scale = _mm256_setzero_ps();
                if (CB_GROUP_SCALE_BYTES(FORMAT))
                    scale = cb_group_scales(FORMAT, of_group, part, half);
                for (int r = 0; r < R; r++)
                    acc[r][half] = CB_GROUP_SCALE_BYTES(FORMAT) ? _mm256_fmadd_ps(p[part][g][r][half], scale, acc[r][half])
                                                                : _mm256_add_ps(acc[r][half], p[part][g][r][half]);
            }
    }
}

CB_INLINE void tile_f32(const int FORMAT, const int R, const cb_matrix *m, int64_t b, const cb_tile_rows *rows,
                        float *out)
{
    const int G = R <= 2 ? 2 : 1; /* four chains at least; more groups at once measured slower */
    const int64_t stride = CB_GROUP_BYTES(FORMAT), scale_stride = CB_GROUP_SCALE_BYTES(FORMAT), ng = cb_groups(m->in);
    const uint8_t *w = (const uint8_t *)m->weight + (CB_HAS_CODES(FORMAT) ? b * ng * stride : b * m->in * (stride / 64));
    const uint8_t *s = scale_stride ? (const uint8_t *)m->scale + b * ng * scale_stride : w;
    __m256 acc[4][2];
    for (int r = 0; r < R; r++)
        acc[r][0] = acc[r][1] = _mm256_setzero_ps();
    int64_t k = 0;
    for (; k + 64 * G <= m->in; k += 64 * G, w += stride * G, s += scale_stride * G)
        groups_f32(FORMAT, G, R, w, s, rows, k, 64, acc);
    for (; k < m->in; k += 64, w += stride, s += scale_stride)
        groups_f32(FORMAT, 1, R, w, s, rows, k, (int)CB_MIN(64, m->in - k), acc);
    for (int r = 0; r < R; r++) {
        for (int half = 0; half < 2; half++) {
            __m256 y = acc[r][half];
            if (FORMAT == CB_Q8)
                y = _mm256_mul_ps(y, _mm256_loadu_ps((const float *)m->scale + b * 16 + half * 8));
            _mm256_storeu_ps(out + r * 16 + half * 8, y);
        }
    }
}

#define KERNEL(name, format, act, kind, max_rows)                                                                       \
    CB_INLINE void tile_##name##_##act(const int R, const cb_matrix *m, int64_t b, const cb_tile_rows *rows, float *out)  \
    {                                                                                                                  \
        tile_##act(format, R, m, b, rows, out);                                                                        \
    }                                                                                                                  \
    CB_TILE_KERNEL(cb_linear_##kind##name##_##act##_avx2, max_rows, tile_##name##_##act)
KERNEL(f32, CB_F32, f32, , 4)
KERNEL(bf16, CB_BF16, f32, , 4)
KERNEL(q8, CB_Q8, f32, , 4)
KERNEL(q4, CB_Q4, f32, , 4)
KERNEL(q8g32, CB_Q8G32, f32, , 1) /* with f32 activations in tests alone: row by row will do */
KERNEL(q4g32, CB_Q4G32, f32, , 1)
KERNEL(mxfp4, CB_MXFP4, f32, , 1)
KERNEL(q8, CB_Q8, q8, , 4)
KERNEL(q8g32, CB_Q8G32, q8, , 4)
KERNEL(q4, CB_Q4, q8, few_, 4)
KERNEL(q4g32, CB_Q4G32, q8, few_, 4)
KERNEL(mxfp4, CB_MXFP4, q8, few_, 4)

#define FEW_OR_MANY(name)                                                                                              \
    static void cb_linear_##name##_q8_avx2(const cb_matrix *m, const cb_rows *rows, int64_t b0, int64_t b1, float *y,   \
                                           int64_t ldy, bool add)                                                      \
    {                                                                                                                  \
        if (rows->n_rows < CB_MANY_ROWS_AVX2)                                                                          \
            cb_linear_few_##name##_q8_avx2(m, rows, b0, b1, y, ldy, add);                                              \
        else                                                                                                           \
            cb_linear_many_##name##_q8_avx2(m, rows, b0, b1, y, ldy, add);                                             \
    }
FEW_OR_MANY(q4)
FEW_OR_MANY(q4g32)
FEW_OR_MANY(mxfp4)

/* ---- activations ------------------------------------------------------------------------------------------- */

static void quantise_group(const float *x, int8_t *q, float *scale, int32_t *sum)
{
    __m256i magnitude = _mm256_set1_epi32(0x7fffffff), m = _mm256_setzero_si256();
    for (int i = 0; i < 64; i += 8)
        m = _mm256_max_epi32(m, _mm256_and_si256(_mm256_castps_si256(_mm256_loadu_ps(x + i)), magnitude));
    __m128i m4 = _mm_max_epi32(_mm256_castsi256_si128(m), _mm256_extracti128_si256(m, 1));
    m4 = _mm_max_epi32(m4, _mm_shuffle_epi32(m4, 0x4e));
    m4 = _mm_max_epi32(m4, _mm_shuffle_epi32(m4, 0xb1));
    int32_t bits = _mm_cvtsi128_si32(m4);
    float largest = _mm_cvtss_f32(_mm_castsi128_ps(m4)), inverse = bits ? 127.0f / largest : 0.0f;
    bool finite = bits < 0x7f800000, usable = finite && inverse <= 0x1.fffffep127f;
    *scale = usable ? largest / 127.0f : finite ? 0.0f : __builtin_nanf("");
    __m256 v_inverse = _mm256_set1_ps(usable ? inverse : 0.0f), top = _mm256_set1_ps(127.0f);
    __m256 bottom = _mm256_set1_ps(-127.0f);
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    for (int i = 0; i < 64; i += 32) {
        __m256i total = _mm256_setzero_si256(), v[4];
        for (int j = 0; j < 4; j++) {
            __m256 y = _mm256_mul_ps(_mm256_loadu_ps(x + i + j * 8), v_inverse);
            v[j] = _mm256_cvtps_epi32(_mm256_min_ps(_mm256_max_ps(y, bottom), top));
            if (!usable)
                v[j] = _mm256_setzero_si256();
            total = _mm256_add_epi32(total, v[j]);
        }
        __m256i bytes = _mm256_packs_epi16(_mm256_packs_epi32(v[0], v[1]), _mm256_packs_epi32(v[2], v[3]));
        _mm256_storeu_si256((__m256i *)(q + i), _mm256_permutevar8x32_epi32(bytes, order));
        __m128i t = _mm_add_epi32(_mm256_castsi256_si128(total), _mm256_extracti128_si256(total, 1));
        t = _mm_add_epi32(t, _mm_shuffle_epi32(t, 0x4e));
        t = _mm_add_epi32(t, _mm_shuffle_epi32(t, 0xb1));
        sum[i / 32] = _mm_cvtsi128_si32(t);
    }
}

static void cb_quantise_avx2(const float *x, int64_t n, int8_t *q, float *scale, int32_t *sum)
{
    int64_t g = 0;
    for (; g * 64 + 64 <= n; g++)
        quantise_group(x + g * 64, q + g * 64, scale + g, sum + 2 * g);
    if (g * 64 == n)
        return;
    float padded[64] = {0};
    __builtin_memcpy(padded, x + g * 64, (size_t)(n - g * 64) * sizeof *x);
    quantise_group(padded, q + g * 64, scale + g, sum + 2 * g);
}

void cb_linear_table_avx2(cb_table *t)
{
    t->linear[CB_F32][CB_ACT_F32] = cb_linear_f32_f32_avx2;
    t->linear[CB_BF16][CB_ACT_F32] = cb_linear_bf16_f32_avx2;
    t->linear[CB_Q8][CB_ACT_F32] = cb_linear_q8_f32_avx2;
    t->linear[CB_Q4][CB_ACT_F32] = cb_linear_q4_f32_avx2;
    t->linear[CB_Q8G32][CB_ACT_F32] = cb_linear_q8g32_f32_avx2;
    t->linear[CB_Q4G32][CB_ACT_F32] = cb_linear_q4g32_f32_avx2;
    t->linear[CB_MXFP4][CB_ACT_F32] = cb_linear_mxfp4_f32_avx2;
    t->linear[CB_Q8][CB_ACT_Q8] = cb_linear_q8_q8_avx2;
    t->linear[CB_Q4][CB_ACT_Q8] = cb_linear_q4_q8_avx2;
    t->linear[CB_Q8G32][CB_ACT_Q8] = cb_linear_q8g32_q8_avx2;
    t->linear[CB_Q4G32][CB_ACT_Q8] = cb_linear_q4g32_q8_avx2;
    t->linear[CB_MXFP4][CB_ACT_Q8] = cb_linear_mxfp4_q8_avx2;
    for (int format = CB_F32; format < CB_N_FORMATS; format++)
        for (int act = CB_ACT_F32; act <= CB_ACT_Q8; act++)
            if (t->linear[format][act])
                t->linear_isa[format][act] = cb_isa_names[CB_ISA_AVX2];
    t->quantise = cb_quantise_avx2;
}
