/* reader.c: the handle of the read pool. How it works: reader.h. */
#include "internal.h"
#include "reader.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <unistd.h>

#define DEFAULT_PIECE ((int64_t)2 << 20)
#define DEFAULT_SPECULATIVE_PIECE ((int64_t)1 << 20)
#define MAX_EXTENTS 16

/* ---- what a test puts between us and the system ----------------------------------------------------------- */

static cb_read_starting_fn read_starting;
static cb_read_ended_fn read_ended;

void cb_reader_hooks_for_test(cb_read_starting_fn starting, cb_read_ended_fn ended)
{
    __atomic_store_n(&read_starting, starting, __ATOMIC_RELEASE);
    __atomic_store_n(&read_ended, ended, __ATOMIC_RELEASE);
}

void cb_hook_starting(const read_range *range)
{
    cb_read_starting_fn fn = __atomic_load_n(&read_starting, __ATOMIC_ACQUIRE);
    if (fn)
        fn(range->offset, range->bytes);
}

int64_t cb_hook_ended(const read_range *range, int64_t result)
{
    cb_read_ended_fn fn = __atomic_load_n(&read_ended, __ATOMIC_ACQUIRE);
    return fn ? fn(range->offset, range->bytes, range->target, result) : result;
}

/* ---- begin and end ---------------------------------------------------------------------------------------- */

void cb_engine_wake(cb_reader *reader)
{
    if (reader->uring)
        cb_uring_wake(reader);
    else
        pthread_cond_broadcast(&reader->work);
}

static void free_list(request_list *list)
{
    for (read_request *r = list->first, *next; r; r = next) {
        next = r->next;
        free(r);
    }
}

void cb_reader_free(cb_reader *reader)
{
    if (!reader)
        return;
    pthread_mutex_lock(&reader->lock);
    reader->stop = true;
    cb_engine_wake(reader);
    pthread_cond_broadcast(&reader->help_work);
    pthread_mutex_unlock(&reader->lock);
    for (int i = 0; i < reader->n_threads; i++)
        pthread_join(reader->thread[i], NULL);
    for (int i = 0; i < reader->n_helpers; i++)
        pthread_join(reader->helper[i], NULL);
    cb_uring_close(reader);
    free_list(&reader->pending[0]);
    free_list(&reader->pending[1]);
    free_list(&reader->landed);
    free_list(&reader->finished);
    if (reader->event_fd >= 0)
        close(reader->event_fd);
    pthread_cond_destroy(&reader->work);
    pthread_cond_destroy(&reader->help_work);
    pthread_mutex_destroy(&reader->lock);
    free(reader);
}

static bool start_threads(cb_reader *reader, int n, void *(*run)(void *), pthread_t *thread, int *n_started)
{
    while (*n_started < n && pthread_create(&thread[*n_started], NULL, run, reader) == 0)
        ++*n_started;
    return *n_started == n;
}

static bool is_piece(int64_t bytes) { return bytes >= 0 && bytes <= CB_READ_MAX_PIECE && bytes % CB_SECTOR == 0; }

cb_reader *cb_reader_new(int engine, int depth, int64_t piece_bytes, int64_t speculative_piece_bytes)
{
    if ((engine != CB_READ_THREADS && engine != CB_READ_URING) || depth < 1 || depth > CB_READ_MAX_DEPTH ||
        !is_piece(piece_bytes) || !is_piece(speculative_piece_bytes))
        return NULL;
    cb_reader *reader = calloc(1, sizeof *reader);
    if (!reader)
        return NULL;
    int64_t demand = piece_bytes ? piece_bytes : DEFAULT_PIECE;
    int64_t smaller = demand < DEFAULT_SPECULATIVE_PIECE ? demand : DEFAULT_SPECULATIVE_PIECE;
    reader->piece_bytes[CB_READ_DEMAND] = demand;
    reader->piece_bytes[CB_READ_SPECULATIVE] = speculative_piece_bytes ? speculative_piece_bytes : smaller;
    reader->depth = depth;
    reader->event_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    pthread_mutex_init(&reader->lock, NULL);
    pthread_cond_init(&reader->work, NULL);
    pthread_cond_init(&reader->help_work, NULL);
    bool has_ring = engine == CB_READ_URING && cb_uring_open(reader) == 0;
    reader->engine = has_ring ? CB_READ_URING : CB_READ_THREADS;
    /* Signals belong to the process's main thread. */
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    bool ok = reader->event_fd >= 0 &&
              start_threads(reader, CB_READ_HELPERS, cb_helper, reader->helper, &reader->n_helpers) &&
              start_threads(reader, has_ring ? 1 : depth, has_ring ? cb_uring_engine : cb_thread_engine,
                            reader->thread, &reader->n_threads);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (!ok) {
        cb_reader_free(reader);
        return NULL;
    }
    return reader;
}

int cb_reader_engine(const cb_reader *reader) { return reader ? reader->engine : CB_EINVAL; }

int cb_uring_refusal(void)
{
    cb_reader trial = {.depth = 1};
    int error = cb_uring_open(&trial);
    cb_uring_close(&trial);
    return error;
}

int cb_reader_fd(const cb_reader *reader) { return reader ? reader->event_fd : CB_EINVAL; }

/* ---- requests --------------------------------------------------------------------------------------------- */

/* What of a range is asked for; false when it can't be read so. */
static bool plan_extent(read_extent *e, int fd, int64_t offset, int64_t bytes, int64_t at, bool may_widen)
{
    if (fd < 0 || offset < 0 || bytes <= 0 || at < 0 || offset > INT64_MAX - bytes - CB_SECTOR)
        return false;
    int flags = fcntl(fd, F_GETFL);
    if (flags < 0)
        return false;
    int64_t lead = flags & O_DIRECT ? offset % CB_SECTOR : 0;
    int64_t rest = flags & O_DIRECT ? (CB_SECTOR - (offset + bytes) % CB_SECTOR) % CB_SECTOR : 0;
    if (!may_widen && (lead || rest))
        return false;
    if ((flags & O_DIRECT) && (at - lead) % CB_SECTOR)
        return false;
    *e = (read_extent){.offset = offset - lead,
                       .at = at - lead,
                       .bytes = lead + bytes + rest,
                       .needed = lead + bytes,
                       .fd = fd};
    return true;
}

/* A request with room for its ranges, its matrices and the parts that it may be cut into. */
static read_request *new_request(const cb_reader *reader, uint64_t tag, const read_extent *extents, int n_extents,
                                 const cb_repack_matrix *matrices, int n_matrices)
{
    /* A promotion changes the size of the parts on the way. */
    int64_t demand = reader->piece_bytes[CB_READ_DEMAND], speculative = reader->piece_bytes[CB_READ_SPECULATIVE];
    int64_t smallest = demand < speculative ? demand : speculative, most_parts = 0;
    for (int i = 0; i < n_extents; i++)
        most_parts += (extents[i].bytes + smallest - 1) / smallest;
    if (most_parts > INT32_MAX)
        return NULL;
    read_request *r;
    size_t head = sizeof *r + (size_t)most_parts * sizeof r->part[0];
    head = (head + 15) & ~(size_t)15;
    r = calloc(1, head + (size_t)n_extents * sizeof *extents + (size_t)n_matrices * sizeof *matrices);
    if (!r)
        return NULL;
    cb_hash64_begin(&r->hash);
    r->done.tag = tag;
    r->extent = (read_extent *)((char *)r + head);
    r->matrix = (cb_repack_matrix *)(r->extent + n_extents);
    r->n_extents = n_extents;
    r->n_matrices = n_matrices;
    for (int i = 0; i < n_extents; i++) {
        r->extent[i] = extents[i];
        r->extent[i].begin = r->span;
        r->span += extents[i].bytes;
        r->done.wanted += extents[i].needed;
    }
    for (int i = 0; i < n_matrices; i++)
        r->matrix[i] = matrices[i];
    return r;
}

static int queue_request(cb_reader *reader, read_request *r, void *target, int priority)
{
    if (!r)
        return CB_ENOMEM;
    r->target = target;
    r->base = r->n_matrices ? NULL : target;
    r->priority = priority;
    pthread_mutex_lock(&reader->lock);
    bool is_taken = cb_queue_find(reader, r->done.tag) != NULL;
    if (!is_taken) {
        cb_list_append(&reader->pending[priority], r);
        cb_engine_wake(reader);
        cb_prepare_later(reader, r);
    }
    pthread_mutex_unlock(&reader->lock);
    if (is_taken)
        free(r);
    return is_taken ? CB_EINVAL : CB_OK;
}

static bool is_priority(int priority) { return priority == CB_READ_DEMAND || priority == CB_READ_SPECULATIVE; }

int cb_reader_submit(cb_reader *reader, uint64_t tag, int fd, int64_t offset, int64_t bytes, void *target,
                     int priority, int want_checksum)
{
    read_extent extent;
    if (!reader || !target || !is_priority(priority) || !plan_extent(&extent, fd, offset, bytes, 0, false))
        return CB_EINVAL;
    if ((fcntl(fd, F_GETFL) & O_DIRECT) && (uintptr_t)target % CB_SECTOR)
        return CB_EINVAL;
    read_request *r = new_request(reader, tag, &extent, 1, NULL, 0);
    if (r)
        r->want_checksum = want_checksum;
    return queue_request(reader, r, target, priority);
}

int cb_reader_stages(cb_reader *reader, void *memory, int n, int64_t bytes)
{
    if (!reader || !memory || n < 1 || n > CB_READ_MAX_DEPTH || bytes <= 0 || bytes % CB_SECTOR ||
        (uintptr_t)memory % CB_SECTOR || reader->n_stages)
        return CB_EINVAL;
    pthread_mutex_lock(&reader->lock);
    for (int i = 0; i < n; i++)
        reader->free_stage[i] = (char *)memory + i * bytes;
    reader->n_free_stages = reader->n_stages = n;
    reader->stage_bytes = bytes;
    pthread_mutex_unlock(&reader->lock);
    return CB_OK;
}

int cb_reader_submit_extents(cb_reader *reader, uint64_t tag, const cb_read_extent *extents, int n_extents,
                             const cb_repack_matrix *matrices, int n_matrices, void *target, int priority)
{
    read_extent planned[MAX_EXTENTS];
    if (!reader || !target || !is_priority(priority) || !reader->n_stages || !extents || n_extents < 1 ||
        n_extents > MAX_EXTENTS || !matrices || n_matrices < 1 || n_matrices > MAX_EXTENTS)
        return CB_EINVAL;
    for (int i = 0; i < n_extents; i++) {
        const cb_read_extent *e = &extents[i];
        if (!plan_extent(&planned[i], e->fd, e->offset, e->bytes, e->at, true) ||
            planned[i].at + planned[i].bytes > reader->stage_bytes)
            return CB_EINVAL;
    }
    for (int i = 0; i < n_matrices; i++)
        if (!cb_is_repackable(&matrices[i]))
            return CB_EINVAL;
    return queue_request(reader, new_request(reader, tag, planned, n_extents, matrices, n_matrices), target, priority);
}

int cb_reader_promote(cb_reader *reader, uint64_t tag)
{
    if (!reader)
        return CB_EINVAL;
    pthread_mutex_lock(&reader->lock);
    read_request *r = cb_queue_find(reader, tag);
    if (r && r->priority == CB_READ_SPECULATIVE && !r->is_landed) {
        cb_list_unlink(&reader->pending[CB_READ_SPECULATIVE], r);
        r->priority = CB_READ_DEMAND;
        cb_list_append(&reader->pending[CB_READ_DEMAND], r);
        cb_engine_wake(reader);
    }
    pthread_mutex_unlock(&reader->lock);
    return r ? CB_OK : CB_EINVAL;
}

int cb_reader_cancel(cb_reader *reader, uint64_t tag)
{
    if (!reader)
        return CB_EINVAL;
    pthread_mutex_lock(&reader->lock);
    read_request *r = cb_queue_find(reader, tag);
    if (r) {
        r->done.cancelled = 1;
        cb_queue_settle(reader, r);
    }
    pthread_mutex_unlock(&reader->lock);
    return r ? CB_OK : CB_EINVAL;
}

int64_t cb_reader_take(cb_reader *reader, cb_read_done *out, int64_t n)
{
    if (!reader || n < 0 || (n > 0 && !out))
        return CB_EINVAL;
    int64_t taken = 0;
    request_list leaving = {0};
    pthread_mutex_lock(&reader->lock);
    while (taken < n && reader->finished.first) {
        read_request *r = reader->finished.first;
        cb_list_unlink(&reader->finished, r);
        out[taken++] = r->done;
        cb_list_append(&leaving, r);
    }
    if (!reader->finished.first) {
        uint64_t count;
        while (read(reader->event_fd, &count, sizeof count) < 0 && errno == EINTR)
            ;
    }
    pthread_mutex_unlock(&reader->lock);
    free_list(&leaving);
    return taken;
}

void cb_reader_counters(cb_reader *reader, cb_read_counters *out)
{
    if (!reader || !out)
        return;
    pthread_mutex_lock(&reader->lock);
    *out = reader->counters;
    if (reader->n_in_flight > 0)
        out->busy_ns += cb_now_ns() - reader->busy_since;
    pthread_mutex_unlock(&reader->lock);
}
