/* probe.c: what this machine can do at best, on the same threads as the kernels: read memory, multiply and add.
 *
 * Work is handed out in small items, as kernels hand out theirs, so that a thread that wakes late takes fewer. */
#include "probe.h"

#include <string.h>
#include <time.h>

#define READ_ITEM (1 << 20)  /* bytes: neighbouring items are one stream to the prefetcher for long enough */
#define AHEAD 4096           /* bytes: beyond the page where the hardware's prefetcher stops */
#define STEPS_PER_ITEM 4096  /* some ten microseconds */

static int64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * INT64_C(1000000000) + t.tv_nsec;
}

/* ---- memory ---------------------------------------------------------------------------------------------- */

typedef struct {
    const uint64_t *words;
    int64_t bytes;
    bool ahead;
} read_arg;

static void read_items(void *v, int64_t begin, int64_t end, int thread)
{
    (void)thread;
    const read_arg *a = v;
    const uint64_t *p = a->words + begin * (READ_ITEM / 8);
    const uint64_t *stop = a->words + CB_MIN(end * READ_ITEM, a->bytes) / 8;
    uint64_t sum[8] = {0};
    for (; p < stop; p += 8) {
        if (a->ahead)
            __builtin_prefetch((const char *)p + AHEAD);
        for (int i = 0; i < 8; i++)
            sum[i] ^= p[i];
    }
    for (int i = 0; i < 8; i++)
        __asm__ volatile("" : : "r"(sum[i])); /* the reads are wanted, not their result */
}

int cb_probe_read(cb_pool *pool, const void *buffer, int64_t bytes, int ahead, int64_t *ns)
{
    if (!pool || !buffer || !ns || bytes < 64 || bytes % 64 || (uintptr_t)buffer % 64)
        return CB_EINVAL;
    read_arg a = {buffer, bytes, ahead != 0};
    cb_pool_hold(pool);
    int64_t begin = now_ns();
    cb_parallel_for(pool, CB_CEIL(bytes, READ_ITEM), 1, read_items, &a);
    *ns = now_ns() - begin;
    cb_pool_release(pool);
    return CB_OK;
}

/* ---- arithmetic ------------------------------------------------------------------------------------------ */

/* Plain C: what the references can hope for. */
static void f32_ref(int64_t n, const uint8_t *operands)
{
    float x[16], sum[16] = {0};
    memcpy(x, operands, sizeof x);
    for (int64_t k = 0; k < n; k++)
        for (int i = 0; i < 16; i++)
            sum[i] = x[i] * 0.5f + sum[i];
    __asm__ volatile("" : : "r"(sum) : "memory");
}

static void i8_ref(int64_t n, const uint8_t *operands)
{
    int32_t sum[16] = {0};
    for (int64_t k = 0; k < n; k++)
        for (int i = 0; i < 16; i++)
            sum[i] += (int8_t)operands[i] * (int8_t)operands[64 + (k & 63)];
    __asm__ volatile("" : : "r"(sum) : "memory");
}

static cb_probe_table table_of(int isa)
{
    cb_probe_table t = {{[CB_PROBE_F32] = {f32_ref, 32}, [CB_PROBE_I8] = {i8_ref, 32}, [CB_PROBE_I4] = {i8_ref, 32}}};
#if defined(__x86_64__)
    if (isa >= CB_ISA_AVX2)
        cb_probe_table_avx2(&t);
    if (isa >= CB_ISA_AVX512)
        cb_probe_table_avx512(&t);
    if (isa >= CB_ISA_AVX512VNNI)
        cb_probe_table_avx512vnni(&t);
    if (isa >= CB_ISA_AMX)
        cb_probe_table_amx(&t);
#elif defined(__aarch64__)
    if (isa >= CB_ISA_NEON)
        cb_probe_table_neon(&t);
    if (isa >= CB_ISA_NEONDOT)
        cb_probe_table_neondot(&t);
#else
    (void)isa;
#endif
    return t;
}

typedef struct {
    const cb_probe_step *step;
    const uint8_t *operands;
} ops_arg;

static void ops_items(void *v, int64_t begin, int64_t end, int thread)
{
    (void)thread;
    const ops_arg *a = v;
    a->step->run((end - begin) * STEPS_PER_ITEM, a->operands);
}

int cb_probe_ops(cb_pool *pool, int kind, int64_t n_items, int64_t *ops, int64_t *ns)
{
    if (!pool || !ops || !ns || kind < 0 || kind >= CB_PROBE_KINDS || n_items < 1 || n_items > INT32_MAX)
        return CB_EINVAL;
    static const _Alignas(64) uint8_t operands[4096] = {[0 ... 4095] = 0x3f}; /* as floats 0.75 */
    cb_probe_table t = table_of(cb_isa_current());
    ops_arg a = {&t.step[kind], operands};
    cb_pool_hold(pool);
    int64_t begin = now_ns();
    cb_parallel_for(pool, n_items, 1, ops_items, &a);
    *ns = now_ns() - begin;
    cb_pool_release(pool);
    *ops = n_items * STEPS_PER_ITEM * a.step->ops;
    return CB_OK;
}
