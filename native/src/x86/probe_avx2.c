/* probe_avx2.c: f32 by fused multiply-add; int8 exactly, in pairs of i16 that are widened at once (what any u8 x s8 dot
 * needs); 4-bit weights, whose products are small enough that eight may be added in i16 before they are widened. */
#include "../probe.h"

#define I8(t, n) "vpmaddubsw %%ymm14, %%ymm15, %%ymm" t "\nvpmaddwd %%ymm13, %%ymm" t ", %%ymm" t "\nvpaddd %%ymm" t ", %%ymm" n ", %%ymm" n "\n"
/* Two products are added to each other before the sum: the measured order with the fewest conflicts over ports (Zen 3). */
#define I4(t, u, n)                                                                                                    \
    "vpmaddubsw %%ymm14, %%ymm15, %%ymm" t "\nvpmaddubsw %%ymm14, %%ymm15, %%ymm" u "\n"                                   \
    "vpaddw %%ymm" t ", %%ymm" u ", %%ymm" u "\nvpaddw %%ymm" u ", %%ymm" n ", %%ymm" n "\n"
#define WIDEN(n) "vpmaddwd %%ymm13, %%ymm" n ", %%ymm12\nvpaddd %%ymm12, %%ymm11, %%ymm11\nvpxor %%ymm" n ", %%ymm" n ", %%ymm" n "\n"

#define LOOP(body)                                                                                                     \
    __asm__ volatile("vmovups (%1), %%ymm14\nvmovups (%1), %%ymm15\nvpcmpeqw %%ymm13, %%ymm13, %%ymm13\n"              \
                     "vpsrlw $15, %%ymm13, %%ymm13\n" CB_PROBE_TWELVE("vpxor %%ymm12, %%ymm12, ", "%%ymm") "1:\n" body    \
                     "dec %0\njnz 1b\nvzeroupper\n"                                                                     \
                     : "+r"(n)                                                                                         \
                     : "r"(operands)                                                                                   \
                     : CB_PROBE_CLOBBERS)

static void f32_avx2(int64_t n, const uint8_t *operands)
{
    LOOP(CB_PROBE_TWELVE("vfmadd231ps %%ymm14, %%ymm15, ", "%%ymm"));
}

static void i8_avx2(int64_t n, const uint8_t *operands)
{
    LOOP(I8("6", "0") I8("7", "1") I8("8", "2") I8("9", "3") I8("10", "4") I8("11", "5"));
}

/* Eight products in each of four sums. */
static void i4_avx2(int64_t n, const uint8_t *operands)
{
#define FOUR I4("4", "5", "0") I4("6", "7", "1") I4("8", "9", "2") I4("4", "5", "3")
    LOOP(FOUR FOUR FOUR FOUR WIDEN("0") WIDEN("1") WIDEN("2") WIDEN("3"));
}

void cb_probe_table_avx2(cb_probe_table *t)
{
    t->step[CB_PROBE_F32] = (cb_probe_step){f32_avx2, 12 * 8 * 2};
    t->step[CB_PROBE_I8] = (cb_probe_step){i8_avx2, 6 * 32 * 2};
    t->step[CB_PROBE_I4] = (cb_probe_step){i4_avx2, 32 * 32 * 2};
}
