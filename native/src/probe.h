/* probe.h: the arithmetic whose rate is a rung's limit. Each rung's file replaces what it does faster. */
#ifndef CB_PROBE_H
#define CB_PROBE_H

#include "internal.h"

#define CB_PROBE_KINDS 3

/* `n` steps of nothing but the rung's fastest multiply-add, in enough independent sums to keep its units busy. Reads
 * the 64-byte aligned operands; results are thrown away. `ops` counts one step's multiplications and additions. */
typedef struct {
    void (*run)(int64_t n, const uint8_t operands[4096]);
    int64_t ops;
} cb_probe_step;

typedef struct {
    cb_probe_step step[CB_PROBE_KINDS];
} cb_probe_table;

void cb_probe_table_avx2(cb_probe_table *t);
void cb_probe_table_avx512(cb_probe_table *t);
void cb_probe_table_avx512vnni(cb_probe_table *t);
void cb_probe_table_amx(cb_probe_table *t);
void cb_probe_table_neon(cb_probe_table *t);
void cb_probe_table_neondot(cb_probe_table *t);

/* Twelve instructions that differ in the register they add to. In assembly, because compilers keep the sums of such a
 * loop in memory. OP names the sources, R is ymm or zmm. */
#define CB_PROBE_TWELVE(OP, R)                                                                                         \
    OP R "0\n" OP R "1\n" OP R "2\n" OP R "3\n" OP R "4\n" OP R "5\n" OP R "6\n" OP R "7\n" OP R "8\n" OP R "9\n" OP R  \
       "10\n" OP R "11\n"
#define CB_PROBE_CLOBBERS                                                                                              \
    "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11", "xmm12", "xmm13", \
        "xmm14", "xmm15", "cc", "memory"

#endif
