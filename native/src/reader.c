/* reader.c: a few threads that read pieces into slots, demand before speculation.
 *
 * A read is cut into pieces; idle threads take the next piece of the oldest demand read, and of the oldest speculative
 * one only while no demand read is unfinished, so that a guess uses idle disk time alone. A checksum is taken piece by
 * piece as they arrive, so that it overlaps the reading. One lock guards everything but the reads themselves and the
 * checksum. Every accepted read ends in exactly one cb_read_done.
 */
#include "../include/colibri.h"
#include "hash.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

#define MAX_THREADS 64
#define MAX_RETRIES 3
#define SECTOR 4096
#define DEFAULT_PIECE ((int64_t)2 << 20)

typedef struct read_request {
    struct read_request *next; /* in its list, oldest first */
    cb_read_done done;
    char *target;
    int64_t offset, next_piece; /* bytes handed out so far */
    int fd, priority, want_checksum;
    int in_flight; /* threads at work on it */
    bool hashing;
    cb_hash64_state hash;
    int64_t n_hashed;           /* pieces */
    unsigned char has_piece[];  /* per piece: it is there */
} read_request;

typedef struct {
    read_request *first, *last;
} request_list;

struct cb_reader {
    pthread_mutex_t lock;
    pthread_cond_t work;
    pthread_t thread[MAX_THREADS];
    int n_threads, event_fd, n_in_flight;
    bool stop;
    int64_t piece_bytes, busy_since;
    request_list pending[2]; /* unfinished, by priority */
    request_list finished;
    cb_read_counters counters;
};

static cb_pread_fn read_at = pread;

void cb_reader_set_pread_for_test(cb_pread_fn fn) { __atomic_store_n(&read_at, fn ? fn : pread, __ATOMIC_RELEASE); }

static int64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * INT64_C(1000000000) + t.tv_nsec;
}

/* ---- lists, under the lock -------------------------------------------------------------------------------- */

static void append(request_list *list, read_request *r)
{
    r->next = NULL;
    if (list->last)
        list->last->next = r;
    else
        list->first = r;
    list->last = r;
}

static void unlink_request(request_list *list, read_request *r)
{
    read_request *before = NULL, *at = list->first;
    while (at != r) {
        before = at;
        at = at->next;
    }
    if (before)
        before->next = r->next;
    else
        list->first = r->next;
    if (list->last == r)
        list->last = before;
}

static read_request *find(const cb_reader *reader, uint64_t tag)
{
    for (int p = 0; p < 2; p++)
        for (read_request *r = reader->pending[p].first; r; r = r->next)
            if (r->done.tag == tag)
                return r;
    return NULL;
}

static bool has_more(const read_request *r)
{
    return r->next_piece < r->done.wanted && !r->done.error && !r->done.cancelled;
}

static read_request *next_request(const cb_reader *reader)
{
    int priority = reader->pending[CB_READ_DEMAND].first ? CB_READ_DEMAND : CB_READ_SPECULATIVE;
    for (read_request *r = reader->pending[priority].first; r; r = r->next)
        if (has_more(r))
            return r;
    return NULL;
}

static void finish(cb_reader *reader, read_request *r)
{
    unlink_request(&reader->pending[r->priority], r);
    r->done.end_ns = now_ns();
    if (!r->done.start_ns)
        r->done.start_ns = r->done.end_ns;
    reader->counters.n_reads++;
    append(&reader->finished, r);
    uint64_t one = 1;
    while (write(reader->event_fd, &one, sizeof one) < 0 && errno == EINTR)
        ;
    if (r->priority == CB_READ_DEMAND && !reader->pending[CB_READ_DEMAND].first)
        pthread_cond_broadcast(&reader->work); /* speculative reads may go on */
}

/* ---- one piece, outside the lock -------------------------------------------------------------------------- */

typedef struct {
    int64_t delivered, retries, n_short;
    int error;
} piece_result;

static bool is_transient(int error) { return error == EINTR || error == EAGAIN || error == EIO; }

static piece_result read_piece(int fd, char *target, int64_t offset, int64_t bytes)
{
    piece_result result = {0};
    int64_t have = 0;
    cb_pread_fn read_now = __atomic_load_n(&read_at, __ATOMIC_ACQUIRE);
    for (int attempt = 0; have < bytes; attempt++) {
        if (attempt > MAX_RETRIES) {
            result.error = result.error ? result.error : ENODATA;
            return result;
        }
        if (attempt > 0) {
            result.retries++;
            if (result.error == EIO || result.error == EAGAIN)
                nanosleep(&(struct timespec){.tv_nsec = 1000000L << (2 * (attempt - 1))}, NULL);
        }
        /* Direct reads must go on from an aligned place. */
        int64_t from = have - have % SECTOR;
        ssize_t got = read_now(fd, target + from, (size_t)(bytes - from), offset + from);
        if (got < 0) {
            result.error = errno;
            if (!is_transient(errno))
                return result;
            continue;
        }
        result.error = 0;
        result.delivered += got;
        if (got == 0) {
            result.error = ENODATA;
            return result;
        }
        if (from + got < bytes)
            result.n_short++;
        if (from + got > have)
            have = from + got;
    }
    result.error = 0;
    return result;
}

/* Hashes the pieces that are there and next in line; under the lock, which it leaves meanwhile. One thread at a time
 * does so for a request; what arrives in between it finds before it stops. The caller's in_flight keeps r alive. */
static void hash_pieces(cb_reader *reader, read_request *r)
{
    int64_t n_pieces = (r->done.wanted + reader->piece_bytes - 1) / reader->piece_bytes;
    r->hashing = true;
    while (r->n_hashed < n_pieces && r->has_piece[r->n_hashed] && !r->done.error && !r->done.cancelled) {
        int64_t at = r->n_hashed * reader->piece_bytes, left = r->done.wanted - at;
        int64_t bytes = left < reader->piece_bytes ? left & ~(int64_t)31 : reader->piece_bytes;
        pthread_mutex_unlock(&reader->lock);
        cb_hash64_stripes(&r->hash, r->target + at, bytes);
        pthread_mutex_lock(&reader->lock);
        r->n_hashed++;
    }
    r->hashing = false;
}

static void serve(cb_reader *reader, read_request *r)
{
    int64_t at = r->next_piece, left = r->done.wanted - at;
    int64_t bytes = left < reader->piece_bytes ? left : reader->piece_bytes;
    int priority = r->priority;
    int64_t now = now_ns();
    r->next_piece += bytes;
    if (r->in_flight++ == 0 && !r->done.start_ns)
        r->done.start_ns = now;
    if (reader->n_in_flight++ == 0)
        reader->busy_since = now;
    pthread_mutex_unlock(&reader->lock);

    piece_result piece = read_piece(r->fd, r->target + at, r->offset + at, bytes);

    pthread_mutex_lock(&reader->lock);
    if (--reader->n_in_flight == 0)
        reader->counters.busy_ns += now_ns() - reader->busy_since;
    *(priority == CB_READ_DEMAND ? &reader->counters.bytes_demand : &reader->counters.bytes_speculative) +=
        piece.delivered;
    reader->counters.n_retries += piece.retries;
    reader->counters.n_short += piece.n_short;
    if (piece.error) {
        if (!r->done.error)
            r->done.error = piece.error;
    } else {
        r->done.bytes += bytes;
        r->has_piece[at / reader->piece_bytes] = 1;
        if (r->want_checksum && !r->hashing)
            hash_pieces(reader, r);
    }
    r->in_flight--;
    if (r->in_flight > 0 || has_more(r))
        return;
    if (r->want_checksum && !r->done.error && !r->done.cancelled)
        r->done.checksum = cb_hash64_end(&r->hash, r->target + (r->done.wanted & ~(int64_t)31), r->done.wanted);
    finish(reader, r);
}

static void *worker(void *arg)
{
    cb_reader *reader = arg;
    pthread_mutex_lock(&reader->lock);
    while (!reader->stop) {
        read_request *r = next_request(reader);
        if (r)
            serve(reader, r);
        else
            pthread_cond_wait(&reader->work, &reader->lock);
    }
    pthread_mutex_unlock(&reader->lock);
    return NULL;
}

/* ---- the handle ------------------------------------------------------------------------------------------- */

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
    pthread_cond_broadcast(&reader->work);
    pthread_mutex_unlock(&reader->lock);
    for (int i = 0; i < reader->n_threads; i++)
        pthread_join(reader->thread[i], NULL);
    free_list(&reader->pending[0]);
    free_list(&reader->pending[1]);
    free_list(&reader->finished);
    if (reader->event_fd >= 0)
        close(reader->event_fd);
    pthread_cond_destroy(&reader->work);
    pthread_mutex_destroy(&reader->lock);
    free(reader);
}

cb_reader *cb_reader_new(int n_threads, int64_t piece_bytes)
{
    if (n_threads < 1 || n_threads > MAX_THREADS || piece_bytes < 0 || piece_bytes % SECTOR)
        return NULL;
    cb_reader *reader = calloc(1, sizeof *reader);
    if (!reader)
        return NULL;
    reader->piece_bytes = piece_bytes ? piece_bytes : DEFAULT_PIECE;
    reader->event_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    pthread_mutex_init(&reader->lock, NULL);
    pthread_cond_init(&reader->work, NULL);
    bool ok = reader->event_fd >= 0;
    /* Signals belong to the process's main thread. */
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    while (ok && reader->n_threads < n_threads) {
        ok = pthread_create(&reader->thread[reader->n_threads], NULL, worker, reader) == 0;
        if (ok) {
            /* n_threads is read by nobody else before cb_reader_free. */
            reader->n_threads++;
        }
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (!ok) {
        cb_reader_free(reader);
        return NULL;
    }
    return reader;
}

int cb_reader_fd(const cb_reader *reader) { return reader ? reader->event_fd : CB_EINVAL; }

int cb_reader_submit(cb_reader *reader, uint64_t tag, int fd, int64_t offset, int64_t bytes, void *target,
                     int priority, int want_checksum)
{
    if (!reader || fd < 0 || offset < 0 || bytes <= 0 || offset > INT64_MAX - bytes || !target ||
        (priority != CB_READ_DEMAND && priority != CB_READ_SPECULATIVE))
        return CB_EINVAL;
    int flags = fcntl(fd, F_GETFL);
    if (flags < 0)
        return CB_EINVAL;
    if ((flags & O_DIRECT) && (offset % SECTOR || bytes % SECTOR || (uintptr_t)target % SECTOR))
        return CB_EINVAL;
    read_request *r = calloc(1, sizeof *r + (size_t)((bytes + reader->piece_bytes - 1) / reader->piece_bytes));
    if (!r)
        return CB_ENOMEM;
    cb_hash64_begin(&r->hash);
    r->done.tag = tag;
    r->done.wanted = bytes;
    r->target = target;
    r->offset = offset;
    r->fd = fd;
    r->priority = priority;
    r->want_checksum = want_checksum;

    pthread_mutex_lock(&reader->lock);
    bool taken = find(reader, tag) != NULL;
    if (!taken) {
        append(&reader->pending[priority], r);
        pthread_cond_broadcast(&reader->work);
    }
    pthread_mutex_unlock(&reader->lock);
    if (taken)
        free(r);
    return taken ? CB_EINVAL : CB_OK;
}

int cb_reader_promote(cb_reader *reader, uint64_t tag)
{
    if (!reader)
        return CB_EINVAL;
    pthread_mutex_lock(&reader->lock);
    read_request *r = find(reader, tag);
    if (r && r->priority == CB_READ_SPECULATIVE) {
        unlink_request(&reader->pending[CB_READ_SPECULATIVE], r);
        r->priority = CB_READ_DEMAND;
        append(&reader->pending[CB_READ_DEMAND], r);
        pthread_cond_broadcast(&reader->work);
    }
    pthread_mutex_unlock(&reader->lock);
    return r ? CB_OK : CB_EINVAL;
}

int cb_reader_cancel(cb_reader *reader, uint64_t tag)
{
    if (!reader)
        return CB_EINVAL;
    pthread_mutex_lock(&reader->lock);
    read_request *r = find(reader, tag);
    if (r) {
        r->done.cancelled = 1;
        if (r->in_flight == 0)
            finish(reader, r);
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
        unlink_request(&reader->finished, r);
        out[taken++] = r->done;
        append(&leaving, r);
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
        out->busy_ns += now_ns() - reader->busy_since;
    pthread_mutex_unlock(&reader->lock);
}
