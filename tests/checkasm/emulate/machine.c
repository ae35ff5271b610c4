/* machine.c, for tests only: in place of native/src/cpu.c. Claims the AVX-512 rungs, which emulate/immintrin.h provides,
 * and leaves AVX2 out; its tables are empty because those files need the real header. */
#include "probe.h"

const char *const cb_isa_names[5] = {"ref", "avx2", "avx512", "avx512vnni", "amx"};

unsigned cb_cpu_isas(void) { return 1u << CB_ISA_REF | 1u << CB_ISA_AVX512 | 1u << CB_ISA_AVX512VNNI; }

void cb_linear_table_avx2(cb_table *t) { (void)t; }
void cb_vector_table_avx2(cb_table *t) { (void)t; }
void cb_attn_table_avx2(cb_table *t) { (void)t; }
void cb_probe_table_avx2(cb_probe_table *t) { (void)t; }
void cb_probe_table_amx(cb_probe_table *t) { (void)t; }
