/* cbmath.h: exp, sigmoid and SiLU as docs/numerics.md defines them, one value at a time. The vector rungs
 * (x86/cbmath_avx2.h, x86/cbmath_avx512.h, arm/cbmath_neon.h) perform the same operations per lane. */
#ifndef CBMATH_H
#define CBMATH_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#define CB_EXP_LO (-87.5f)
#define CB_EXP_HI 88.5f
#define CB_LOG2E 1.44269504088896341f
#define CB_LN2_HI 0.693359375f
#define CB_LN2_LO (-2.12194442e-4f)
/* Adding and taking away 1.5 * 2^23 rounds to the nearest integer, ties to even, and leaves it in the low bits. */
#define CB_ROUND_MAGIC 12582912.0f
#define CB_ROUND_BITS 0x4B400000
/* exp(r) = 1 + r + c2 r^2 + ... + c6 r^6 on |r| <= ln2 / 2; fitted by us, relative error 3.1e-9. */
#define CB_EXP_C2 0x1.fffffcp-2f
#define CB_EXP_C3 0x1.555492p-3f
#define CB_EXP_C4 0x1.5558f4p-5f
#define CB_EXP_C5 0x1.123a20p-7f
#define CB_EXP_C6 0x1.6a23c8p-10f

static inline float cb_bits_f32(uint32_t u)
{
    float f;
    memcpy(&f, &u, sizeof f);
    return f;
}

static inline uint32_t cb_f32_bits(float f)
{
    uint32_t u;
    memcpy(&u, &f, sizeof u);
    return u;
}

static inline float cb_exp(float x)
{
    x = x > CB_EXP_HI ? CB_EXP_HI : x; /* written so that a NaN stays */
    x = x < CB_EXP_LO ? CB_EXP_LO : x;
    float t = x * CB_LOG2E + CB_ROUND_MAGIC;
    float n = t - CB_ROUND_MAGIC;
    float r = fmaf(n, -CB_LN2_HI, x);
    r = fmaf(n, -CB_LN2_LO, r);
    float p = CB_EXP_C6;
    p = fmaf(p, r, CB_EXP_C5);
    p = fmaf(p, r, CB_EXP_C4);
    p = fmaf(p, r, CB_EXP_C3);
    p = fmaf(p, r, CB_EXP_C2);
    p = fmaf(p, r, 1.0f);
    p = fmaf(p, r, 1.0f);
    /* 2^n in two factors: n = 128 and results below 2^-126 have no single one. */
    int32_t e = (int32_t)(cb_f32_bits(t) - CB_ROUND_BITS);
    int32_t half = e >> 1;
    float a = cb_bits_f32((uint32_t)(half + 127) << 23);
    float b = cb_bits_f32((uint32_t)(e - half + 127) << 23);
    return p * a * b;
}

static inline float cb_sigmoid(float x) { return 1.0f / (1.0f + cb_exp(-x)); }
static inline float cb_silu(float x) { return x / (1.0f + cb_exp(-x)); }

/* Exact widenings. */
static inline float cb_bf16_f32(uint16_t h) { return cb_bits_f32((uint32_t)h << 16); }

static inline float cb_f16_f32(uint16_t h)
{
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, exponent = (h >> 10) & 31, fraction = h & 0x3ff;
    if (exponent == 31)
        return cb_bits_f32(sign | 0x7f800000u | fraction << 13);
    if (exponent)
        return cb_bits_f32(sign | (exponent + 112) << 23 | fraction << 13);
    float magnitude = (float)fraction * 0x1p-24f;
    return sign ? -magnitude : magnitude;
}

/* f32 -> bf16, nearest even; a NaN stays one. */
static inline uint16_t cb_f32_bf16(float f)
{
    uint32_t u = cb_f32_bits(f);
    if ((u & 0x7fffffffu) > 0x7f800000u)
        return (uint16_t)(u >> 16 | 0x40);
    return (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}

#endif
