/* pool.c: one job at a time over a few threads that otherwise sleep.
 *
 * `gate` is the job's door: [63:32] job number, [31] open, [30:0] workers inside. A worker joins only through an open
 * door; the caller works too, closes the door when no items are left, and waits only for those inside. A worker that
 * the system schedules late finds the door closed, so a busy machine never makes the caller wait for a sleeper. */
#include "internal.h"

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define MAX_THREADS 256
#define MAX_CHUNKS 32
#define DEFAULT_SPIN_US 5
#define OPEN ((uint64_t)1 << 31)
#define INSIDE (OPEN - 1)

typedef struct {
    cb_pool *pool;
    int thread;
} worker_arg;

struct cb_pool {
    _Alignas(64) _Atomic uint64_t gate;
    _Alignas(64) _Atomic uint32_t wake;  /* futex: grows with each job */
    _Atomic uint32_t sleepers;
    _Alignas(64) _Atomic uint32_t left;  /* futex: grows when the last worker leaves a closed job */
    _Atomic uint32_t caller_sleeps;
    _Alignas(64) _Atomic int64_t next;   /* first item nobody has taken */
    int64_t n_items, grain;
    cb_job_fn fn;
    void *arg;
    _Atomic bool stop;
    bool is_dry;
    int n_threads, n_started;
    int64_t spin_ns;
    pthread_mutex_t held;
    pthread_t thread[MAX_THREADS];
    worker_arg args[MAX_THREADS];
    struct {
        char *base;
        int64_t bytes;
    } chunk[MAX_CHUNKS];
    int32_t n_chunks, current;
    int64_t used;        /* of the current chunk */
    int64_t taken, most; /* by all pieces now, and ever */
    int64_t phase_ns[CB_N_PHASES];
    _Atomic int64_t lap_ns[CB_N_PHASES]; /* by all threads, in the job that is not shared out yet */
};

static void futex_wait(_Atomic uint32_t *word, uint32_t expected)
{
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, expected, NULL, NULL, 0);
}

static void futex_wake(_Atomic uint32_t *word, int n) { syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, n, NULL, NULL, 0); }

static inline void relax(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static void run_items(cb_pool *p, int thread)
{
    for (;;) {
        int64_t begin = atomic_fetch_add_explicit(&p->next, p->grain, memory_order_relaxed);
        if (begin >= p->n_items)
            return;
        p->fn(p->arg, begin, CB_MIN(begin + p->grain, p->n_items), thread);
    }
}

static bool join(cb_pool *p)
{
    uint64_t g = atomic_load_explicit(&p->gate, memory_order_acquire);
    while (g & OPEN)
        if (atomic_compare_exchange_weak_explicit(&p->gate, &g, g + 1, memory_order_acquire, memory_order_acquire))
            return true;
    return false;
}

static void leave(cb_pool *p)
{
    uint64_t g = atomic_fetch_sub_explicit(&p->gate, 1, memory_order_acq_rel);
    if ((g & INSIDE) == 1 && !(g & OPEN)) {
        atomic_fetch_add(&p->left, 1);
        if (atomic_load(&p->caller_sleeps))
            futex_wake(&p->left, 1);
    }
}

static void *worker(void *v)
{
    worker_arg *w = v;
    cb_pool *p = w->pool;
    uint32_t seen = 0;
    for (;;) {
        uint32_t wake = atomic_load(&p->wake);
        if (wake == seen && p->spin_ns > 0) {
            int64_t until = cb_now_ns() + p->spin_ns;
            do {
                for (int i = 0; i < 16; i++)
                    relax();
                wake = atomic_load(&p->wake);
            } while (wake == seen && cb_now_ns() < until);
        }
        while (wake == seen) {
            atomic_fetch_add(&p->sleepers, 1);
            futex_wait(&p->wake, seen);
            atomic_fetch_sub(&p->sleepers, 1);
            wake = atomic_load(&p->wake);
        }
        seen = wake;
        if (atomic_load(&p->stop))
            return NULL;
        if (join(p)) {
            run_items(p, w->thread);
            leave(p);
        }
    }
}

void cb_parallel_for(cb_pool *p, int64_t n_items, int64_t grain, cb_job_fn fn, void *arg)
{
    if (n_items <= 0 || p->is_dry)
        return;
    if (p->n_started == 0 || n_items <= grain) {
        fn(arg, 0, n_items, 0);
        return;
    }
    p->fn = fn;
    p->arg = arg;
    p->n_items = n_items;
    p->grain = grain;
    atomic_store_explicit(&p->next, 0, memory_order_relaxed);
    uint64_t job = (atomic_load(&p->gate) >> 32) + 1;
    atomic_store_explicit(&p->gate, job << 32 | OPEN, memory_order_release);
    atomic_fetch_add(&p->wake, 1);
    if (atomic_load(&p->sleepers)) {
        int64_t helpers = CB_CEIL(n_items, grain) - 1;
        futex_wake(&p->wake, (int)CB_MIN(helpers, (int64_t)p->n_started));
    }
    run_items(p, 0);

    uint32_t left = atomic_load(&p->left);
    uint64_t g = atomic_fetch_and_explicit(&p->gate, ~OPEN, memory_order_acq_rel);
    if (!(g & INSIDE))
        return;
    int64_t until = cb_now_ns() + p->spin_ns;
    while (atomic_load_explicit(&p->gate, memory_order_acquire) & INSIDE) {
        if (cb_now_ns() < until) {
            relax();
            continue;
        }
        atomic_store(&p->caller_sleeps, 1);
        if (atomic_load(&p->left) == left)
            futex_wait(&p->left, left);
        atomic_store(&p->caller_sleeps, 0);
        left = atomic_load(&p->left);
    }
}

/* ---- life of a pool ------------------------------------------------------------------------------------------ */

static int64_t spin_from_environment(void)
{
    const char *text = getenv("COLIBRI_SPIN_US");
    if (text && *text) {
        char *end;
        long us = strtol(text, &end, 10);
        if (!*end && us >= 0 && us <= 1000)
            return us * 1000;
    }
    return DEFAULT_SPIN_US * 1000;
}

static cb_pool *new_pool(int n_threads, bool is_dry)
{
    if (n_threads < 0 || n_threads > MAX_THREADS)
        return NULL;
    cb_pool *p = aligned_alloc(64, CB_CEIL(sizeof(cb_pool), 64) * 64);
    if (!p)
        return NULL;
    memset(p, 0, sizeof *p);
    p->n_threads = n_threads ? n_threads : CB_MIN(cb_default_threads(), MAX_THREADS);
    p->is_dry = is_dry;
    p->spin_ns = spin_from_environment();
    pthread_mutex_init(&p->held, NULL);
    for (int i = 1; i < p->n_threads && !is_dry; i++) {
        p->args[i] = (worker_arg){p, i};
        if (pthread_create(&p->thread[i], NULL, worker, &p->args[i])) {
            cb_pool_free(p);
            return NULL;
        }
        p->n_started++;
    }
    return p;
}

cb_pool *cb_pool_new(int n_threads) { return new_pool(n_threads, false); }
cb_pool *cb_pool_new_dry(int n_threads) { return new_pool(n_threads, true); }

int64_t cb_pool_scratch_bytes(const cb_pool *pool)
{
    int64_t total = 0;
    for (int i = 0; i < pool->n_chunks; i++)
        total += pool->chunk[i].bytes;
    return total;
}

int cb_pool_threads(const cb_pool *pool) { return pool ? pool->n_threads : CB_EINVAL; }

void cb_pool_free(cb_pool *p)
{
    if (!p)
        return;
    atomic_store(&p->stop, true);
    atomic_fetch_add(&p->wake, 1);
    futex_wake(&p->wake, INT_MAX);
    for (int i = 1; i <= p->n_started; i++)
        pthread_join(p->thread[i], NULL);
    for (int i = 0; i < p->n_chunks; i++)
        free(p->chunk[i].base);
    pthread_mutex_destroy(&p->held);
    free(p);
}

void cb_pool_hold(cb_pool *pool) { pthread_mutex_lock(&pool->held); }
void cb_pool_release(cb_pool *pool) { pthread_mutex_unlock(&pool->held); }

/* ---- phases of attention ----------------------------------------------------------------------------------- */

void cb_phase_end(cb_pool *p, int phase, int64_t *since)
{
    int64_t now = cb_now_ns();
    p->phase_ns[phase] += now - *since;
    *since = now;
}

void cb_phase_lap(cb_pool *p, int phase, int64_t *since)
{
    int64_t now = cb_now_ns();
    atomic_fetch_add_explicit(&p->lap_ns[phase], now - *since, memory_order_relaxed);
    *since = now;
}

void cb_phase_share(cb_pool *p, int64_t *since)
{
    int64_t before = *since, scores = atomic_exchange(&p->lap_ns[CB_PHASE_SCORES], 0);
    int64_t values = atomic_exchange(&p->lap_ns[CB_PHASE_VALUES], 0);
    cb_phase_end(p, CB_PHASE_SCORES, since);
    int64_t for_values = scores + values > 0 ? (int64_t)((double)(*since - before) * values / (scores + values)) : 0;
    p->phase_ns[CB_PHASE_SCORES] -= for_values;
    p->phase_ns[CB_PHASE_VALUES] += for_values;
}

void cb_pool_take_phases(cb_pool *p, int64_t *ns)
{
    cb_pool_hold(p);
    memcpy(ns, p->phase_ns, sizeof p->phase_ns);
    memset(p->phase_ns, 0, sizeof p->phase_ns);
    cb_pool_release(p);
}

/* ---- scratch --------------------------------------------------------------------------------------------- */

cb_scratch_mark cb_scratch_begin(cb_pool *p) { return (cb_scratch_mark){p->current, p->used, p->taken}; }

static bool add_chunk(cb_pool *p, int64_t bytes)
{
    if (p->n_chunks == MAX_CHUNKS)
        return false;
    char *base = aligned_alloc(64, (size_t)bytes);
    if (!base)
        return false;
    p->chunk[p->n_chunks].base = base;
    p->chunk[p->n_chunks++].bytes = bytes;
    return true;
}

void *cb_scratch(cb_pool *p, int64_t bytes)
{
    bytes = CB_CEIL(CB_MAX(bytes, 1), 64) * 64;
    while (p->current < p->n_chunks && p->used + bytes > p->chunk[p->current].bytes) {
        p->current++;
        p->used = 0;
    }
    if (p->current == p->n_chunks && !add_chunk(p, CB_CEIL(CB_MAX(bytes, 1 << 20), 4096) * 4096)) {
        return NULL;
    }
    void *piece = p->chunk[p->current].base + p->used;
    p->used += bytes;
    p->taken += bytes;
    p->most = CB_MAX(p->most, p->taken);
    return piece;
}

/* An empty stack of several chunks becomes one chunk of what was needed at most, so that the next such call finds it in one
 * piece. */
void cb_scratch_end(cb_pool *p, cb_scratch_mark mark)
{
    p->current = mark.chunk;
    p->used = mark.used;
    p->taken = mark.taken;
    if (p->taken != 0 || p->n_chunks < 2)
        return;
    for (int i = 0; i < p->n_chunks; i++)
        free(p->chunk[i].base);
    p->n_chunks = p->current = 0;
    p->used = 0;
    add_chunk(p, CB_CEIL(CB_MAX(p->most, 1 << 20), 4096) * 4096);
}
