/* probe_avx512.c: probe_avx2.c's three loops with 512 bits. */
#include "../probe.h"

#define I8(t, n) "vpmaddubsw %%zmm14, %%zmm15, %%zmm" t "\nvpmaddwd %%zmm13, %%zmm" t ", %%zmm" t "\nvpaddd %%zmm" t ", %%zmm" n ", %%zmm" n "\n"
/* Two products are added to each other before the sum: the measured order with the fewest conflicts over ports (Zen 3). */
#define I4(t, u, n)                                                                                                    \
    "vpmaddubsw %%zmm14, %%zmm15, %%zmm" t "\nvpmaddubsw %%zmm14, %%zmm15, %%zmm" u "\n"                                   \
    "vpaddw %%zmm" t ", %%zmm" u ", %%zmm" u "\nvpaddw %%zmm" u ", %%zmm" n ", %%zmm" n "\n"
#define WIDEN(n) "vpmaddwd %%zmm13, %%zmm" n ", %%zmm12\nvpaddd %%zmm12, %%zmm11, %%zmm11\nvpxorq %%zmm" n ", %%zmm" n ", %%zmm" n "\n"

#define LOOP(body)                                                                                                     \
    __asm__ volatile("vmovups (%1), %%zmm14\nvmovups (%1), %%zmm15\nvpternlogd $255, %%zmm13, %%zmm13, %%zmm13\n"      \
                     "vpsrlw $15, %%zmm13, %%zmm13\nvpxorq %%zmm12, %%zmm12, %%zmm12\n"                                 \
                     CB_PROBE_TWELVE("vpxorq %%zmm12, %%zmm12, ", "%%zmm") "1:\n" body                                   \
                     "dec %0\njnz 1b\nvzeroupper\n"                                                                     \
                     : "+r"(n)                                                                                         \
                     : "r"(operands)                                                                                   \
                     : CB_PROBE_CLOBBERS)

static void f32_avx512(int64_t n, const uint8_t *operands)
{
    LOOP(CB_PROBE_TWELVE("vfmadd231ps %%zmm14, %%zmm15, ", "%%zmm"));
}

static void i8_avx512(int64_t n, const uint8_t *operands)
{
    LOOP(I8("6", "0") I8("7", "1") I8("8", "2") I8("9", "3") I8("10", "4") I8("11", "5"));
}

static void i4_avx512(int64_t n, const uint8_t *operands)
{
#define FOUR I4("4", "5", "0") I4("6", "7", "1") I4("8", "9", "2") I4("4", "5", "3")
    LOOP(FOUR FOUR FOUR FOUR WIDEN("0") WIDEN("1") WIDEN("2") WIDEN("3"));
}

void cb_probe_table_avx512(cb_probe_table *t)
{
    t->step[CB_PROBE_F32] = (cb_probe_step){f32_avx512, 12 * 16 * 2};
    t->step[CB_PROBE_I8] = (cb_probe_step){i8_avx512, 6 * 64 * 2};
    t->step[CB_PROBE_I4] = (cb_probe_step){i4_avx512, 32 * 64 * 2};
}
