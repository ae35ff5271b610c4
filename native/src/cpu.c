/* cpu.c: which rungs the processor has and the operating system keeps intact across a context switch. */
#include "internal.h"

const char *const cb_isa_names[5] = {"ref", "avx2", "avx512", "avx512vnni", "amx"};

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

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
    if (!__get_cpuid_count(7, 0, &a, &b7, &c7, &d7) || !(b7 & bit_AVX2) || (saved & 6) != 6)
        return isas;
    isas |= 1u << CB_ISA_AVX2;
    unsigned wide = bit_AVX512F | bit_AVX512BW | bit_AVX512VL | bit_AVX512DQ;
    if ((b7 & wide) != wide || (saved & 0xe6) != 0xe6)
        return isas;
    isas |= 1u << CB_ISA_AVX512;
    if (!(c7 & bit_AVX512VNNI))
        return isas;
    isas |= 1u << CB_ISA_AVX512VNNI;
    return isas;
}
#else
unsigned cb_cpu_isas(void) { return 1u << CB_ISA_REF; }
#endif
