/* cpu.c: which rungs the processor has and the operating system keeps intact across a context switch. */
#include "internal.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

/* Parts of the processor's state that the system saves. */
#define SAVES_AVX 0x6u
#define SAVES_AVX512 (SAVES_AVX | 0xe0u)
#define SAVES_TILES 0x60000u
#define HAS_TILES (1u << 24 | 1u << 25) /* leaf 7, edx: amx-tile, amx-int8 */
#define ARCH_REQ_XCOMP_PERM 0x1023
#define TILE_DATA 18

static uint64_t xcr0(void)
{
    uint32_t lo, hi;
    __asm__ volatile("xgetbv" : "=a"(lo), "=d"(hi) : "c"(0));
    return (uint64_t)hi << 32 | lo;
}

unsigned cb_cpu_isas(void)
{
    unsigned isas = 1u << CB_ISA_REF, a, b, c, d, b7, c7, d7;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_OSXSAVE) || !(c & bit_AVX) || !(c & bit_FMA) || !(c & bit_F16C))
        return isas;
    uint64_t saved = xcr0();
    if (!__get_cpuid_count(7, 0, &a, &b7, &c7, &d7) || !(b7 & bit_AVX2) || (saved & SAVES_AVX) != SAVES_AVX)
        return isas;
    isas |= 1u << CB_ISA_AVX2;
    unsigned wide = bit_AVX512F | bit_AVX512BW | bit_AVX512VL | bit_AVX512DQ;
    if ((b7 & wide) != wide || (saved & SAVES_AVX512) != SAVES_AVX512)
        return isas;
    isas |= 1u << CB_ISA_AVX512;
    if (!(c7 & bit_AVX512VNNI))
        return isas;
    isas |= 1u << CB_ISA_AVX512VNNI;
    /* Linux gives a process its tile registers on request; threads that exist or come later are included. */
    if ((d7 & HAS_TILES) != HAS_TILES || !(c7 & bit_AVX512VBMI) || (saved & SAVES_TILES) != SAVES_TILES ||
        syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, TILE_DATA))
        return isas;
    return isas | 1u << CB_ISA_AMX;
}
#elif defined(__aarch64__)
#include <asm/hwcap.h>
#include <sys/auxv.h>

unsigned cb_cpu_isas(void)
{
    unsigned long has = getauxval(AT_HWCAP);
    if (!(has & HWCAP_ASIMD))
        return 1u << CB_ISA_REF;
    return 1u << CB_ISA_REF | 1u << CB_ISA_NEON | (has & HWCAP_ASIMDDP ? 1u << CB_ISA_NEONDOT : 0);
}
#else
unsigned cb_cpu_isas(void) { return 1u << CB_ISA_REF; }
#endif
