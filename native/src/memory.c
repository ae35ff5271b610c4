/* memory.c: huge-page memory and the tie to the parent process. */
#include "../include/colibri.h"

#include <signal.h>
#include <stdint.h>
#include <sys/mman.h>
#include <sys/prctl.h>

#define HUGE_BYTES ((uint64_t)2 << 20)
#define PAGE_BYTES ((uint64_t)4096)

static uint64_t mapped_bytes(int64_t bytes) { return ((uint64_t)bytes + PAGE_BYTES - 1) & ~(PAGE_BYTES - 1); }

void *cb_huge_alloc(int64_t bytes)
{
    if (bytes <= 0 || bytes > INT64_MAX / 2)
        return NULL;
    uint64_t want = mapped_bytes(bytes);
    unsigned char *raw =
        mmap(NULL, want + HUGE_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (raw == MAP_FAILED)
        return NULL;
    uint64_t skip = (HUGE_BYTES - ((uintptr_t)raw & (HUGE_BYTES - 1))) & (HUGE_BYTES - 1);
    unsigned char *start = raw + skip;
    if (skip)
        munmap(raw, skip);
    munmap(start + want, HUGE_BYTES - skip);
    /* A system without transparent huge pages refuses; ordinary pages are slower, not wrong. */
    madvise(start, want, MADV_HUGEPAGE);
    return start;
}

void cb_huge_free(void *p, int64_t bytes)
{
    if (p && bytes > 0)
        munmap(p, mapped_bytes(bytes));
}

int cb_huge_release(void *p, int64_t bytes)
{
    if (!p || bytes <= 0 || ((uintptr_t)p | (uint64_t)bytes) & (PAGE_BYTES - 1))
        return CB_EINVAL;
    return madvise(p, (size_t)bytes, MADV_DONTNEED) == 0 ? CB_OK : CB_ESYS;
}

int cb_die_with_parent(int signal)
{
    if (signal < 0 || signal >= NSIG)
        return CB_EINVAL;
    return prctl(PR_SET_PDEATHSIG, (unsigned long)signal, 0, 0, 0) == 0 ? CB_OK : CB_ESYS;
}
