/* probe_neondot.c: sdot, four products of int8 added to an i32; 4-bit weights gain nothing more. */
#include "../probe.h"

#define DOT(n) "sdot v" #n ".4s, v30.16b, v31.16b\n"

static void i8_neondot(int64_t n, const uint8_t *operands)
{
    __asm__ volatile("ldr q30, [%1]\nldr q31, [%1]\n1:\n" DOT(0) DOT(1) DOT(2) DOT(3) DOT(4) DOT(5) DOT(6) DOT(7) DOT(8)
                         DOT(9) DOT(10) DOT(11) DOT(12) DOT(13) DOT(14) DOT(15) DOT(16) DOT(17) DOT(18) DOT(19) DOT(20)
                             DOT(21) DOT(22) DOT(23) "subs %0, %0, #1\nb.ne 1b\n"
                     : "+r"(n)
                     : "r"(operands)
                     : "v0", "v1", "v2", "v3", "v4", "v5", "v6", "v7", "v8", "v9", "v10", "v11", "v12", "v13", "v14", "v15",
                       "v16", "v17", "v18", "v19", "v20", "v21", "v22", "v23", "v30", "v31", "cc", "memory");
}

void cb_probe_table_neondot(cb_probe_table *t)
{
    t->step[CB_PROBE_I8] = t->step[CB_PROBE_I4] = (cb_probe_step){i8_neondot, 24 * 16 * 2};
}
