/* machine.c, for tests only: in place of native/src/cpu.c. Claims the rungs that emulate/immintrin.h provides, AVX-512 and
 * AMX, and leaves AVX2 out; its tables are empty because those files need the real header, the probes' because they
 * measure. */
#include "probe.h"

unsigned cb_cpu_isas(void)
{
    return 1u << CB_ISA_REF | 1u << CB_ISA_AVX512 | 1u << CB_ISA_AVX512VNNI | 1u << CB_ISA_AMX;
}

void cb_linear_table_avx2(cb_table *t) { (void)t; }
void cb_vector_table_avx2(cb_table *t) { (void)t; }
void cb_attn_table_avx2(cb_table *t) { (void)t; }
void cb_int8_table_avx2(cb_table *t) { (void)t; }
void cb_probe_table_avx2(cb_probe_table *t) { (void)t; }
void cb_probe_table_avx512(cb_probe_table *t) { (void)t; }
void cb_probe_table_avx512vnni(cb_probe_table *t) { (void)t; }
void cb_probe_table_amx(cb_probe_table *t) { (void)t; }
