/* reader_uring.c: the engine on io_uring: one thread keeps `depth` reads in the ring (raw system calls, io_uring(7)).
 *
 * Beside the reads the ring holds one read of an eventfd, by which others wake the thread, and a timeout for each part
 * that waits for its next attempt. A part has at most one entry in the ring at a time, so the rings can't overflow.
 */
#include "reader.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#if defined(__has_include) && defined(SYS_io_uring_setup)
#if __has_include(<linux/io_uring.h>)
#define HAS_URING 1
#endif
#endif

#ifdef HAS_URING
#include <linux/io_uring.h>
#include <linux/time_types.h>

enum { WAKE = CB_READ_MAX_DEPTH }; /* user_data of the eventfd's read; below: a part's place */

typedef struct {
    read_part part;
    read_range range;
    struct __kernel_timespec delay;
    bool is_waiting; /* for its next attempt */
} flight;

struct cb_uring {
    int fd, wake_fd;
    bool is_woken; /* under the reader's lock: the thread will look at the lists */
    uint64_t wake_count;
    void *rings;
    size_t ring_bytes, sqe_bytes;
    unsigned *sq_tail, *cq_head, *cq_tail;
    unsigned sq_mask, cq_mask, n_queued;
    struct io_uring_sqe *sqes;
    struct io_uring_cqe *cqes;
    int n_free, free_place[CB_READ_MAX_DEPTH];
    flight flights[CB_READ_MAX_DEPTH];
};

static bool can(int fd, const int *ops, int n_ops)
{
    struct {
        struct io_uring_probe head;
        struct io_uring_probe_op ops[IORING_OP_READ + 1];
    } probe;
    memset(&probe, 0, sizeof probe);
    if (syscall(SYS_io_uring_register, fd, IORING_REGISTER_PROBE, &probe, IORING_OP_READ + 1) < 0)
        return false;
    for (int i = 0; i < n_ops; i++)
        if (ops[i] > probe.head.last_op || !(probe.head.ops[ops[i]].flags & IO_URING_OP_SUPPORTED))
            return false;
    return true;
}

static int open_ring(struct cb_uring *u, unsigned n_entries)
{
    static const int needed[] = {IORING_OP_READ, IORING_OP_TIMEOUT};
    struct io_uring_params params = {0};
    u->fd = (int)syscall(SYS_io_uring_setup, n_entries, &params);
    if (u->fd < 0)
        return errno;
    if (!(params.features & IORING_FEAT_SINGLE_MMAP) || !can(u->fd, needed, 2))
        return EOPNOTSUPP;
    size_t sq_bytes = params.sq_off.array + params.sq_entries * sizeof(unsigned);
    size_t cq_bytes = params.cq_off.cqes + params.cq_entries * sizeof(struct io_uring_cqe);
    u->ring_bytes = sq_bytes > cq_bytes ? sq_bytes : cq_bytes;
    u->sqe_bytes = params.sq_entries * sizeof(struct io_uring_sqe);
    void *rings =
        mmap(NULL, u->ring_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, u->fd, IORING_OFF_SQ_RING);
    if (rings == MAP_FAILED)
        return errno;
    u->rings = rings;
    void *sqes = mmap(NULL, u->sqe_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, u->fd, IORING_OFF_SQES);
    if (sqes == MAP_FAILED)
        return errno;
    u->sqes = sqes;
    char *base = rings;
    u->sq_tail = (unsigned *)(base + params.sq_off.tail);
    u->sq_mask = *(unsigned *)(base + params.sq_off.ring_mask);
    u->cq_head = (unsigned *)(base + params.cq_off.head);
    u->cq_tail = (unsigned *)(base + params.cq_off.tail);
    u->cq_mask = *(unsigned *)(base + params.cq_off.ring_mask);
    u->cqes = (struct io_uring_cqe *)(base + params.cq_off.cqes);
    unsigned *array = (unsigned *)(base + params.sq_off.array);
    for (unsigned i = 0; i <= u->sq_mask; i++)
        array[i] = i;
    u->wake_fd = eventfd(0, EFD_CLOEXEC);
    return u->wake_fd < 0 ? errno : 0;
}

int cb_uring_open(cb_reader *reader)
{
    struct cb_uring *u = calloc(1, sizeof *u);
    if (!u)
        return ENOMEM;
    u->fd = u->wake_fd = -1;
    reader->uring = u;
    int error = open_ring(u, (unsigned)reader->depth + 1);
    if (error) {
        cb_uring_close(reader);
        return error;
    }
    for (int i = 0; i < reader->depth; i++)
        u->free_place[u->n_free++] = i;
    return 0;
}

void cb_uring_close(cb_reader *reader)
{
    struct cb_uring *u = reader->uring;
    if (!u)
        return;
    reader->uring = NULL;
    if (u->sqes)
        munmap(u->sqes, u->sqe_bytes);
    if (u->rings)
        munmap(u->rings, u->ring_bytes);
    if (u->fd >= 0)
        close(u->fd);
    if (u->wake_fd >= 0)
        close(u->wake_fd);
    free(u);
}

void cb_uring_wake(cb_reader *reader)
{
    struct cb_uring *u = reader->uring;
    if (u->is_woken)
        return;
    u->is_woken = true;
    uint64_t one = 1;
    while (write(u->wake_fd, &one, sizeof one) < 0 && errno == EINTR)
        ;
}

/* ---- the engine's thread ---------------------------------------------------------------------------------- */

static struct io_uring_sqe *new_entry(struct cb_uring *u, int op, uint64_t user_data)
{
    unsigned tail = *u->sq_tail; /* ours alone to write */
    struct io_uring_sqe *sqe = &u->sqes[tail & u->sq_mask];
    memset(sqe, 0, sizeof *sqe);
    sqe->opcode = (uint8_t)op;
    sqe->user_data = user_data;
    __atomic_store_n(u->sq_tail, tail + 1, __ATOMIC_RELEASE);
    u->n_queued++;
    return sqe;
}

static void queue_read(struct cb_uring *u, uint64_t user_data, int fd, void *target, int64_t bytes, int64_t offset)
{
    struct io_uring_sqe *sqe = new_entry(u, IORING_OP_READ, user_data);
    sqe->fd = fd;
    sqe->addr = (uintptr_t)target;
    sqe->len = (unsigned)bytes;
    sqe->off = (uint64_t)offset;
}

static void queue_wake(struct cb_uring *u) { queue_read(u, WAKE, u->wake_fd, &u->wake_count, 8, 0); }

static void queue_part(struct cb_uring *u, int place)
{
    flight *f = &u->flights[place];
    f->is_waiting = false;
    f->range = cb_part_range(&f->part);
    cb_hook_starting(&f->range);
    queue_read(u, (uint64_t)place, f->range.fd, f->range.target, f->range.bytes, f->range.offset);
}

static void queue_delay(struct cb_uring *u, int place, int64_t delay_ns)
{
    flight *f = &u->flights[place];
    f->is_waiting = true;
    f->delay = (struct __kernel_timespec){.tv_nsec = delay_ns};
    struct io_uring_sqe *sqe = new_entry(u, IORING_OP_TIMEOUT, (uint64_t)place);
    sqe->addr = (uintptr_t)&f->delay;
    sqe->len = 1;
}

/* What is queued goes to the kernel, and the thread sleeps until something has ended. */
static void submit_and_wait(struct cb_uring *u)
{
    long n = syscall(SYS_io_uring_enter, u->fd, u->n_queued, 1, IORING_ENTER_GETEVENTS, NULL, 0);
    if (n >= 0)
        u->n_queued -= (unsigned)n;
    else if (errno != EINTR)
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL); /* short of memory: what is queued stays so */
}

static void part_answered(cb_reader *reader, int place, int64_t result)
{
    struct cb_uring *u = reader->uring;
    flight *f = &u->flights[place];
    if (f->is_waiting) {
        queue_part(u, place);
        return;
    }
    int64_t delay_ns = 0;
    switch (cb_part_result(&f->part, cb_hook_ended(&f->range, result), &delay_ns)) {
    case PART_GOES_ON:
        queue_part(u, place);
        break;
    case PART_GOES_ON_LATER:
        queue_delay(u, place, delay_ns);
        break;
    case PART_ENDED:
        pthread_mutex_lock(&reader->lock);
        cb_queue_landed(reader, &f->part);
        pthread_mutex_unlock(&reader->lock);
        u->free_place[u->n_free++] = place;
    }
}

void *cb_uring_engine(void *arg)
{
    cb_reader *reader = arg;
    struct cb_uring *u = reader->uring;
    queue_wake(u);
    for (;;) {
        int first_new = u->n_free;
        pthread_mutex_lock(&reader->lock);
        u->is_woken = false;
        while (u->n_free > 0 && !reader->stop && cb_queue_take(reader, &u->flights[u->free_place[u->n_free - 1]].part))
            u->n_free--;
        bool is_over = reader->stop && u->n_free == reader->depth;
        pthread_mutex_unlock(&reader->lock);
        if (is_over)
            return NULL;
        while (first_new > u->n_free)
            queue_part(u, u->free_place[--first_new]);
        submit_and_wait(u);
        unsigned head = *u->cq_head;
        while (head != __atomic_load_n(u->cq_tail, __ATOMIC_ACQUIRE)) {
            struct io_uring_cqe cqe = u->cqes[head & u->cq_mask];
            __atomic_store_n(u->cq_head, ++head, __ATOMIC_RELEASE);
            if (cqe.user_data == WAKE)
                queue_wake(u);
            else
                part_answered(reader, (int)cqe.user_data, cqe.res);
        }
    }
}

#else

int cb_uring_open(cb_reader *reader)
{
    (void)reader;
    return ENOSYS;
}
void cb_uring_close(cb_reader *reader) { (void)reader; }
void cb_uring_wake(cb_reader *reader) { (void)reader; }
void *cb_uring_engine(void *reader) { return reader; }

#endif
