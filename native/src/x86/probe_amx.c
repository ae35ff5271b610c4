/* probe_amx.c: tdpbssd on 2 x 2 tiles, the four operand tiles loaded from the first-level cache each time: no product of
 * large matrices can do with fewer loads in eight tile registers. */
#include "../probe.h"

#include <string.h>

/* The layout that ldtilecfg reads. */
typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t n_rows[16];
} tile_config;

static void i8_amx(int64_t n, const uint8_t *operands)
{
    _Alignas(64) tile_config config;
    memset(&config, 0, sizeof config);
    config.palette = 1;
    for (int i = 0; i < 8; i++) {
        config.row_bytes[i] = 64;
        config.n_rows[i] = 16;
    }
    __asm__ volatile("ldtilecfg %2\ntilezero %%tmm0\ntilezero %%tmm1\ntilezero %%tmm2\ntilezero %%tmm3\n1:\n"
                     "tileloadd (%1,%3), %%tmm4\ntileloadd 1024(%1,%3), %%tmm5\n"
                     "tileloadd 2048(%1,%3), %%tmm6\ntileloadd 3072(%1,%3), %%tmm7\n"
                     "tdpbssd %%tmm6, %%tmm4, %%tmm0\ntdpbssd %%tmm7, %%tmm4, %%tmm1\n"
                     "tdpbssd %%tmm6, %%tmm5, %%tmm2\ntdpbssd %%tmm7, %%tmm5, %%tmm3\n"
                     "dec %0\njnz 1b\ntilerelease\n"
                     : "+r"(n)
                     : "r"(operands), "m"(config), "r"((int64_t)64)
                     : "cc", "memory");
}

void cb_probe_table_amx(cb_probe_table *t)
{
    t->step[CB_PROBE_I8] = t->step[CB_PROBE_I4] = (cb_probe_step){i8_amx, 4 * 16 * 16 * 64 * 2};
}
