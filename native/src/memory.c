/* memory.c: huge-page memory, private and named. */
#include "../include/colibri.h"

#include <errno.h>
#include <stdint.h>
#include <sys/mman.h>

#define HUGE_BYTES ((uint64_t)2 << 20)
#define PAGE_BYTES ((uint64_t)4096)

static uint64_t mapped_bytes(int64_t bytes) { return ((uint64_t)bytes + PAGE_BYTES - 1) & ~(PAGE_BYTES - 1); }

/* Private memory of `want` bytes (whole pages) that begins at a huge page. */
static unsigned char *aligned_map(uint64_t want)
{
    unsigned char *raw =
        mmap(NULL, want + HUGE_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (raw == MAP_FAILED)
        return NULL;
    uint64_t skip = (HUGE_BYTES - ((uintptr_t)raw & (HUGE_BYTES - 1))) & (HUGE_BYTES - 1);
    unsigned char *start = raw + skip;
    if (skip)
        munmap(raw, skip);
    munmap(start + want, HUGE_BYTES - skip);
    return start;
}

void *cb_huge_alloc(int64_t bytes)
{
    if (bytes <= 0 || bytes > INT64_MAX / 2)
        return NULL;
    uint64_t want = mapped_bytes(bytes);
    unsigned char *start = aligned_map(want);
    if (!start)
        return NULL;
    /* A system without transparent huge pages refuses; ordinary pages are slower, not wrong. */
    madvise(start, want, MADV_HUGEPAGE);
    return start;
}

void cb_huge_free(void *p, int64_t bytes)
{
    if (p && bytes > 0)
        munmap(p, mapped_bytes(bytes));
}

void *cb_huge_map(int fd, int64_t bytes, int is_writable)
{
    if (fd < 0 || bytes <= 0 || bytes > INT64_MAX / 2)
        return NULL;
    uint64_t want = ((uint64_t)bytes + HUGE_BYTES - 1) & ~(HUGE_BYTES - 1);
    unsigned char *start = aligned_map(want);
    if (!start)
        return NULL;
    int protection = is_writable ? PROT_READ | PROT_WRITE : PROT_READ;
    if (mmap(start, want, protection, MAP_SHARED | MAP_FIXED | MAP_NORESERVE, fd, 0) == MAP_FAILED) {
        munmap(start, want);
        return NULL;
    }
    madvise(start, want, MADV_HUGEPAGE);
    return start;
}

#ifndef MADV_POPULATE_READ /* Linux 5.14 */
#define MADV_POPULATE_READ 22
#define MADV_POPULATE_WRITE 23
#endif

int cb_huge_populate(void *p, int64_t bytes, int is_writable)
{
    if (!p || bytes <= 0 || ((uintptr_t)p & (PAGE_BYTES - 1)))
        return CB_EINVAL;
    while (madvise(p, mapped_bytes(bytes), is_writable ? MADV_POPULATE_WRITE : MADV_POPULATE_READ) != 0) {
        if (errno == EINTR || errno == EAGAIN)
            continue;
        if (errno == EINVAL)
            return CB_OK; /* an older kernel: the pages come when they are touched */
        return errno == ENOMEM || errno == EFAULT ? CB_ENOMEM : CB_ESYS;
    }
    return CB_OK;
}

int cb_huge_release(void *p, int64_t bytes, int is_shared)
{
    if (!p || bytes <= 0 || ((uintptr_t)p | (uint64_t)bytes) & (PAGE_BYTES - 1))
        return CB_EINVAL;
    return madvise(p, (size_t)bytes, is_shared ? MADV_REMOVE : MADV_DONTNEED) == 0 ? CB_OK : CB_ESYS;
}
