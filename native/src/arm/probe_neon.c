/* probe_neon.c: f32 by fused multiply-add; int8 exactly: two products in i16, then into i32; 4-bit weights, whose
 * products are small enough that sixteen may be added in i16 first. */
#include "../probe.h"

#define CLOBBERS                                                                                                       \
    "v0", "v1", "v2", "v3", "v4", "v5", "v6", "v7", "v8", "v9", "v10", "v11", "v12", "v13", "v14", "v15", "v16", "v17", \
        "v18", "v19", "v20", "v21", "v22", "v23", "v30", "v31", "cc", "memory"
#define LOOP(body)                                                                                                     \
    __asm__ volatile("ldr q30, [%1]\nldr q31, [%1]\n1:\n" body "subs %0, %0, #1\nb.ne 1b\n"                              \
                     : "+r"(n)                                                                                         \
                     : "r"(operands)                                                                                   \
                     : CLOBBERS)

#define F32(n) "fmla v" #n ".4s, v30.4s, v31.4s\n"
#define I8(t, n)                                                                                                       \
    "smull v" #t ".8h, v30.8b, v31.8b\nsmlal2 v" #t ".8h, v30.16b, v31.16b\nsadalp v" #n ".4s, v" #t ".8h\n"
#define I4(t) "smlal v" #t ".8h, v30.8b, v31.8b\nsmlal2 v" #t ".8h, v30.16b, v31.16b\n"
#define WIDEN(t, n) "sadalp v" #n ".4s, v" #t ".8h\nmovi v" #t ".8h, #0\n"

static void f32_neon(int64_t n, const uint8_t *operands)
{
    LOOP(F32(0) F32(1) F32(2) F32(3) F32(4) F32(5) F32(6) F32(7) F32(8) F32(9) F32(10) F32(11) F32(12) F32(13) F32(14)
             F32(15) F32(16) F32(17) F32(18) F32(19) F32(20) F32(21) F32(22) F32(23));
}

static void i8_neon(int64_t n, const uint8_t *operands)
{
    LOOP(I8(12, 0) I8(13, 1) I8(14, 2) I8(15, 3) I8(16, 4) I8(17, 5) I8(18, 6) I8(19, 7) I8(20, 8) I8(21, 9) I8(22, 10)
             I8(23, 11));
}

static void i4_neon(int64_t n, const uint8_t *operands)
{
#define EIGHT I4(0) I4(1) I4(2) I4(3) I4(4) I4(5) I4(6) I4(7)
    LOOP(EIGHT EIGHT EIGHT EIGHT EIGHT EIGHT EIGHT EIGHT WIDEN(0, 8) WIDEN(1, 9) WIDEN(2, 10) WIDEN(3, 11) WIDEN(4, 12)
             WIDEN(5, 13) WIDEN(6, 14) WIDEN(7, 15));
}

void cb_probe_table_neon(cb_probe_table *t)
{
    t->step[CB_PROBE_F32] = (cb_probe_step){f32_neon, 24 * 4 * 2};
    t->step[CB_PROBE_I8] = (cb_probe_step){i8_neon, 12 * 16 * 2};
    t->step[CB_PROBE_I4] = (cb_probe_step){i4_neon, 64 * 16 * 2};
}
