/* probe_avx512vnni.c: vpdpbusd, four products of int8 added to an i32; 4-bit weights gain nothing more. */
#include "../probe.h"

static void i8_avx512vnni(int64_t n, const uint8_t *operands)
{
    __asm__ volatile("vmovups (%1), %%zmm14\nvmovups (%1), %%zmm15\nvpxorq %%zmm12, %%zmm12, %%zmm12\n"
                     CB_PROBE_TWELVE("vpxorq %%zmm12, %%zmm12, ", "%%zmm") "1:\n"
                     CB_PROBE_TWELVE("vpdpbusd %%zmm14, %%zmm15, ", "%%zmm") "dec %0\njnz 1b\nvzeroupper\n"
                     : "+r"(n)
                     : "r"(operands)
                     : CB_PROBE_CLOBBERS);
}

void cb_probe_table_avx512vnni(cb_probe_table *t)
{
    t->step[CB_PROBE_I8] = t->step[CB_PROBE_I4] = (cb_probe_step){i8_avx512vnni, 12 * 64 * 2};
}
