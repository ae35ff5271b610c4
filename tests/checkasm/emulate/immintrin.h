/* immintrin.h, for tests only: the AVX-512 and AMX intrinsics that native/src/x86 uses, as plain loops over lanes.
 *
 * It stands in for the compiler's header (found first through -I), so those files run on any machine. That proves their
 * arithmetic, their masks and which bytes they touch; it proves nothing about instruction encoding or about flags such
 * as flush-to-zero. A new intrinsic in a kernel needs its line here. */
#ifndef EMULATED_IMMINTRIN_H
#define EMULATED_IMMINTRIN_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#define CB_IN_ORDER(v) ((void)0)
#define CB_EMULATED 1 /* what a kernel writes as an instruction of its own has to be a function here */


#define _MM_HINT_T0 3
#define _MM_HINT_T1 2
#define _MM_HINT_NTA 0
#define _mm_prefetch(p, hint) ((void)(p))

typedef union {
    float f[16];
} __m512;
typedef union {
    int8_t i8[64];
    uint8_t u8[64];
    int16_t i16[32];
    uint16_t u16[32];
    int32_t i32[16];
    uint32_t u32[16];
} __m512i;
typedef union {
    float f[8];
} __m256;
typedef union {
    uint16_t u16[16];
    int32_t i32[8];
} __m256i;
typedef union {
    float f[4];
} __m128;
typedef union {
    uint8_t u8[16];
    uint16_t u16[8];
} __m128i;
typedef uint16_t __mmask16;
typedef uint64_t __mmask64;

#define E_FN static __attribute__((noinline, unused)) /* inlined, the unrolled kernels take the compiler minutes */
#define E_EACH(n) for (int l = 0; l < (n); l++)
#define E_OP2(name, type, n, expression) \
    E_FN type name(type a, type b) { type o; E_EACH(n) expression; return o; }
#define E_OP1(name, type, n, expression) \
    E_FN type name(type a) { type o; E_EACH(n) expression; return o; }

/* ---- f32 lanes; min and max return the second operand unless the first is strictly smaller or larger */
E_OP2(_mm512_add_ps, __m512, 16, o.f[l] = a.f[l] + b.f[l])
E_OP2(_mm512_sub_ps, __m512, 16, o.f[l] = a.f[l] - b.f[l])
E_OP2(_mm512_mul_ps, __m512, 16, o.f[l] = a.f[l] * b.f[l])
E_OP2(_mm512_div_ps, __m512, 16, o.f[l] = a.f[l] / b.f[l])
E_OP2(_mm512_min_ps, __m512, 16, o.f[l] = a.f[l] < b.f[l] ? a.f[l] : b.f[l])
E_OP2(_mm512_max_ps, __m512, 16, o.f[l] = a.f[l] > b.f[l] ? a.f[l] : b.f[l])
E_FN __m512 _mm512_fmadd_ps(__m512 a, __m512 b, __m512 c) { E_EACH(16) c.f[l] = fmaf(a.f[l], b.f[l], c.f[l]); return c; }
E_FN __m512 _mm512_set1_ps(float x) { __m512 o; E_EACH(16) o.f[l] = x; return o; }
E_FN __m512 _mm512_setzero_ps(void) { return _mm512_set1_ps(0.0f); }
E_FN __m512 _mm512_loadu_ps(const void *p) { __m512 o; memcpy(&o, p, 64); return o; }
E_FN void _mm512_storeu_ps(void *p, __m512 v) { memcpy(p, &v, 64); }
E_FN __m512 _mm512_maskz_loadu_ps(__mmask16 m, const void *p)
{
    __m512 o;
    E_EACH(16) o.f[l] = m >> l & 1 ? ((const float *)p)[l] : 0.0f;
    return o;
}
E_FN void _mm512_mask_storeu_ps(void *p, __mmask16 m, __m512 v)
{
    E_EACH(16) if (m >> l & 1) ((float *)p)[l] = v.f[l];
}
E_FN __m512 _mm512_maskz_sub_ps(__mmask16 m, __m512 a, __m512 b)
{
    E_EACH(16) a.f[l] = m >> l & 1 ? a.f[l] - b.f[l] : 0.0f;
    return a;
}
E_FN __m512 _mm512_mask_max_ps(__m512 source, __mmask16 m, __m512 a, __m512 b)
{
    E_EACH(16) if (m >> l & 1) source.f[l] = a.f[l] > b.f[l] ? a.f[l] : b.f[l];
    return source;
}
E_FN __m512 _mm512_mask_add_ps(__m512 source, __mmask16 m, __m512 a, __m512 b)
{
    E_EACH(16) if (m >> l & 1) source.f[l] = a.f[l] + b.f[l];
    return source;
}
E_FN __m512 _mm512_maskz_mov_ps(__mmask16 m, __m512 v) { E_EACH(16) v.f[l] = m >> l & 1 ? v.f[l] : 0.0f; return v; }
E_FN __m512 _mm512_maskz_div_ps(__mmask16 m, __m512 a, __m512 b)
{
    E_EACH(16) a.f[l] = m >> l & 1 ? a.f[l] / b.f[l] : 0.0f;
    return a;
}
E_FN __m512 _mm512_mask_div_ps(__m512 source, __mmask16 m, __m512 a, __m512 b)
{
    E_EACH(16) if (m >> l & 1) source.f[l] = a.f[l] / b.f[l];
    return source;
}
E_FN __m512i _mm512_maskz_cvtps_epi32(__mmask16 m, __m512 v)
{
    __m512i o;
    E_EACH(16) o.i32[l] = m >> l & 1 ? (int32_t)nearbyintf(v.f[l]) : 0;
    return o;
}
E_FN __m512i _mm512_castps_si512(__m512 v) { __m512i o; memcpy(&o, &v, 64); return o; }
E_FN __m512 _mm512_castsi512_ps(__m512i v) { __m512 o; memcpy(&o, &v, 64); return o; }
E_FN __m512 _mm512_cvtepi32_ps(__m512i v) { __m512 o; E_EACH(16) o.f[l] = (float)v.i32[l]; return o; }

/* ---- integer lanes */
E_OP2(_mm512_and_si512, __m512i, 16, o.u32[l] = a.u32[l] & b.u32[l])
E_OP2(_mm512_or_si512, __m512i, 16, o.u32[l] = a.u32[l] | b.u32[l])
E_OP2(_mm512_xor_si512, __m512i, 16, o.u32[l] = a.u32[l] ^ b.u32[l])
E_OP2(_mm512_add_epi32, __m512i, 16, o.u32[l] = a.u32[l] + b.u32[l])
E_OP2(_mm512_sub_epi32, __m512i, 16, o.u32[l] = a.u32[l] - b.u32[l])
E_OP2(_mm512_max_epi32, __m512i, 16, o.i32[l] = a.i32[l] > b.i32[l] ? a.i32[l] : b.i32[l])
E_OP2(_mm512_add_epi16, __m512i, 32, o.u16[l] = (uint16_t)(a.u16[l] + b.u16[l]))
E_OP2(_mm512_add_epi8, __m512i, 64, o.u8[l] = (uint8_t)(a.u8[l] + b.u8[l]))
E_OP2(_mm512_sub_epi8, __m512i, 64, o.u8[l] = (uint8_t)(a.u8[l] - b.u8[l]))
E_OP2(_mm512_permutexvar_epi8, __m512i, 64, o.u8[l] = b.u8[a.u8[l] & 63])
E_OP1(_mm512_abs_epi8, __m512i, 64, o.u8[l] = (uint8_t)(a.i8[l] < 0 ? -a.i8[l] : a.i8[l]))
E_FN __m512i _mm512_set1_epi32(int32_t x) { __m512i o; E_EACH(16) o.i32[l] = x; return o; }
E_FN __m512i _mm512_set1_epi16(int16_t x) { __m512i o; E_EACH(32) o.i16[l] = x; return o; }
E_FN __m512i _mm512_set1_epi8(int8_t x) { __m512i o; E_EACH(64) o.i8[l] = x; return o; }
E_FN __m512i _mm512_set4_epi32(int32_t d, int32_t c, int32_t b, int32_t a)
{
    __m512i o;
    E_EACH(16) o.i32[l] = (int32_t[]){a, b, c, d}[l % 4];
    return o;
}
E_FN __m512i _mm512_setzero_si512(void) { return _mm512_set1_epi32(0); }
E_FN __m512i _mm512_loadu_si512(const void *p) { __m512i o; memcpy(&o, p, 64); return o; }
E_FN void _mm512_storeu_si512(void *p, __m512i v) { memcpy(p, &v, 64); }
E_FN __m512i _mm512_slli_epi32(__m512i v, unsigned n) { E_EACH(16) v.u32[l] = n > 31 ? 0 : v.u32[l] << n; return v; }
E_FN __m512i _mm512_srli_epi32(__m512i v, unsigned n) { E_EACH(16) v.u32[l] = n > 31 ? 0 : v.u32[l] >> n; return v; }
E_FN __m512i _mm512_srai_epi32(__m512i v, unsigned n) { E_EACH(16) v.i32[l] >>= n > 31 ? 31 : n; return v; }
E_FN __m512i _mm512_srli_epi16(__m512i v, unsigned n)
{
    E_EACH(32) v.u16[l] = (uint16_t)(n > 15 ? 0 : v.u16[l] >> n);
    return v;
}
E_FN __m512i _mm512_slli_epi16(__m512i v, unsigned n)
{
    E_EACH(32) v.u16[l] = (uint16_t)(n > 15 ? 0 : v.u16[l] << n);
    return v;
}
E_FN __m512i _mm512_srai_epi16(__m512i v, unsigned n)
{
    E_EACH(32) v.i16[l] = (int16_t)(v.i16[l] >> (n > 15 ? 15 : n));
    return v;
}
E_OP2(_mm512_andnot_si512, __m512i, 16, o.u32[l] = ~a.u32[l] & b.u32[l])
E_FN __m512i _mm512_mask_mov_epi16(__m512i source, uint32_t m, __m512i a)
{
    E_EACH(32) source.u16[l] = m >> l & 1 ? a.u16[l] : source.u16[l];
    return source;
}
E_FN __m512 _mm512_mask_mov_ps(__m512 source, __mmask16 m, __m512 a)
{
    E_EACH(16) source.f[l] = m >> l & 1 ? a.f[l] : source.f[l];
    return source;
}
E_FN __m512i _mm512_maskz_and_epi32(__mmask16 m, __m512i a, __m512i b)
{
    E_EACH(16) a.u32[l] = m >> l & 1 ? a.u32[l] & b.u32[l] : 0;
    return a;
}
E_FN __m512i _mm512_mask_sub_epi8(__m512i source, __mmask64 m, __m512i a, __m512i b)
{
    E_EACH(64) if (m >> l & 1) source.i8[l] = (int8_t)(a.i8[l] - b.i8[l]);
    return source;
}
E_FN __mmask64 _mm512_movepi8_mask(__m512i v)
{
    __mmask64 m = 0;
    E_EACH(64) m |= (__mmask64)(v.u8[l] >> 7) << l;
    return m;
}
E_FN __mmask16 _mm512_cmpgt_epi32_mask(__m512i a, __m512i b)
{
    unsigned m = 0;
    E_EACH(16) m |= (unsigned)(a.i32[l] > b.i32[l]) << l;
    return (__mmask16)m;
}
/* u8 times s8, neighbours added with saturation, as the instruction does: an overflow must show up here too */
E_FN __m512i _mm512_maddubs_epi16(__m512i a, __m512i b)
{
    __m512i o;
    E_EACH(32)
    {
        int sum = a.u8[2 * l] * b.i8[2 * l] + a.u8[2 * l + 1] * b.i8[2 * l + 1];
        o.i16[l] = (int16_t)(sum > 32767 ? 32767 : sum < -32768 ? -32768 : sum);
    }
    return o;
}
E_FN __m512i _mm512_madd_epi16(__m512i a, __m512i b)
{
    __m512i o;
    E_EACH(16) o.i32[l] = a.i16[2 * l] * b.i16[2 * l] + a.i16[2 * l + 1] * b.i16[2 * l + 1];
    return o;
}
E_FN __m512i _mm512_dpbusd_epi32(__m512i c, __m512i a, __m512i b)
{
    E_EACH(16) for (int j = 0; j < 4; j++) c.i32[l] += a.u8[4 * l + j] * b.i8[4 * l + j];
    return c;
}

E_FN __m512i _mm512_dpwssd_epi32(__m512i c, __m512i a, __m512i b)
{
    E_EACH(16) for (int j = 0; j < 2; j++) c.i32[l] += a.i16[2 * l + j] * b.i16[2 * l + j];
    return c;
}

/* ---- narrow to wide */
E_FN __m128i _mm_loadu_si128(const void *p) { __m128i o; memcpy(&o, p, 16); return o; }
E_FN __m512i _mm512_broadcast_i32x4(__m128i v) { __m512i o; E_EACH(64) o.u8[l] = v.u8[l % 16]; return o; }
/* bytes of a's own 16, by the low four bits of b's; 0 where b's highest is set */
E_OP2(_mm512_shuffle_epi8, __m512i, 64, o.u8[l] = b.u8[l] & 128 ? 0 : a.u8[l / 16 * 16 + b.u8[l] % 16])
E_FN __m512i _mm512_cvtepu8_epi32(__m128i v) { __m512i o; E_EACH(16) o.u32[l] = v.u8[l]; return o; }
E_FN __m256i _mm256_loadu_si256(const void *p) { __m256i o; memcpy(&o, p, 32); return o; }
E_FN __m512i _mm512_cvtepu16_epi32(__m256i v) { __m512i o; E_EACH(16) o.u32[l] = v.u16[l]; return o; }
E_FN __m512 _mm512_cvtph_ps(__m256i v)
{
    __m512 o;
    E_EACH(16)
    {
        int sign = v.u16[l] >> 15, exponent = v.u16[l] >> 10 & 31, fraction = v.u16[l] & 1023;
        float x = exponent == 31 ? (fraction ? NAN : INFINITY)
                  : exponent     ? ldexpf((float)(1024 + fraction), exponent - 25)
                                 : ldexpf((float)fraction, -24);
        o.f[l] = sign ? -x : x;
    }
    return o;
}

/* ---- tiles: the configuration in force, and eight registers of 16 rows of 64 bytes. What the processor would answer
 * with a fault ends the test: a tile used without configuration, or operands whose shapes don't fit. */
typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t n_rows[16];
} e_tile_config;
static _Thread_local e_tile_config e_tiles;
static _Thread_local union {
    int8_t i8[16][64];
    int32_t i32[16][16];
} e_tile[8];

#define CB_TILE_CONFIG(config) e_tile_configure(&(config))
#define E_TILE_FN static __attribute__((noinline, unused, optimize("O2")))

E_TILE_FN void e_tile_configure(const void *config)
{
    memcpy(&e_tiles, config, 64);
    for (int i = 0; i < 8; i++)
        if (e_tiles.palette != 1 || e_tiles.row_bytes[i] > 64 || e_tiles.n_rows[i] > 16)
            __builtin_trap();
    memset(e_tile, 0, sizeof e_tile);
}
E_TILE_FN void _tile_release(void) { memset(&e_tiles, 0, sizeof e_tiles); }
E_TILE_FN void e_tile_used(int t)
{
    if (!e_tiles.palette || !e_tiles.n_rows[t])
        __builtin_trap();
}
E_TILE_FN void _tile_zero(int t)
{
    e_tile_used(t);
    memset(&e_tile[t], 0, sizeof e_tile[t]);
}
E_TILE_FN void _tile_loadd(int t, const void *base, int64_t stride)
{
    _tile_zero(t);
    for (int r = 0; r < e_tiles.n_rows[t]; r++)
        memcpy(e_tile[t].i8[r], (const char *)base + r * stride, e_tiles.row_bytes[t]);
}
E_TILE_FN void _tile_stored(int t, void *base, int64_t stride)
{
    e_tile_used(t);
    for (int r = 0; r < e_tiles.n_rows[t]; r++)
        memcpy((char *)base + r * stride, e_tile[t].i8[r], e_tiles.row_bytes[t]);
}
/* c[row][column] += sum over quads of a[row][4 quad + j] * b[quad][4 column + j]; b is signed, a is or is not */
E_TILE_FN void e_tile_products(int c, int a, int b, int is_signed)
{
    int rows = e_tiles.n_rows[c], columns = e_tiles.row_bytes[c] / 4, quads = e_tiles.n_rows[b];
    e_tile_used(a);
    if (!quads || e_tiles.n_rows[a] != rows || e_tiles.row_bytes[a] != quads * 4 || e_tiles.row_bytes[b] != columns * 4)
        __builtin_trap();
    for (int r = 0; r < rows; r++)
        for (int q = 0; q < quads; q++)
            for (int n = 0; n < columns; n++)
                for (int j = 0; j < 4; j++) {
                    int8_t byte = e_tile[a].i8[r][4 * q + j];
                    e_tile[c].i32[r][n] += (is_signed ? byte : (uint8_t)byte) * e_tile[b].i8[q][4 * n + j];
                }
}
#define _tile_dpbssd(c, a, b) e_tile_products(c, a, b, 1)
#define _tile_dpbusd(c, a, b) e_tile_products(c, a, b, 0)

#endif
