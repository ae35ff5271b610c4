/* reader.h: what the files of the read pool share.
 *
 *   reader.c          the handle: submit, promote, cancel, take, counters
 *   reader_queue.c    the lists: which part is next, what becomes of one that ended, how a faulty read goes on
 *   reader_help.c     checksums as parts land, repacking, and pages for parts to come, on threads of their own
 *   reader_threads.c  engine: `depth` threads in pread(2)
 *   reader_uring.c    engine: one thread with `depth` reads in an io_uring
 *
 * A read is cut into parts when they are handed out, the oldest demand read first, speculative ones only while the bytes
 * of every demand read are there. One lock guards everything but the reads themselves and the arithmetic of checksums.
 * Every accepted read ends in exactly one cb_read_done.
 */
#ifndef CB_READER_H
#define CB_READER_H

#include "../include/colibri.h"
#include "hash.h"

#include <pthread.h>
#include <stdbool.h>

#define CB_READ_MAX_DEPTH 64
#define CB_READ_HELPERS 2
#define CB_SECTOR 4096

/* A range of a file. A request's ranges are numbered through: byte `begin` of the read is byte `offset` of the file, and
 * goes to byte `at` of where the request is read to. */
typedef struct {
    int64_t begin, offset, at;
    int64_t bytes;  /* asked for; direct reads end with a sector, whether the file does or not */
    int64_t needed; /* of them */
    int fd;
} read_extent;

typedef struct read_request {
    struct read_request *next; /* in its list, oldest first */
    cb_read_done done;
    char *base;   /* where its ranges are read to: the target, or its stage once it has one */
    char *target;
    int64_t span, handed_out; /* bytes, over all ranges */
    int priority, want_checksum;
    int n_extents, at_extent, n_matrices; /* n_matrices > 0: to be repacked from a stage */
    read_extent *extent;
    cb_repack_matrix *matrix;
    struct read_request *next_to_repack;
    bool is_repacked;
    int in_flight;     /* parts at which an engine is */
    bool is_landed;    /* no part will be read any more */
    bool is_hashing;   /* a thread takes its checksum, or a helper will */
    int n_helping;     /* helpers at its pages */
    int64_t prepared;  /* bytes whose pages are there or not worth it */
    struct read_request *next_to_hash;
    cb_hash64_state hash;
    int32_t n_parts, n_hashed;
    struct {
        int64_t end; /* in the read */
        bool is_there;
    } part[];
} read_request;

typedef struct {
    read_request *first, *last;
} request_list;

/* One part on its way through an engine. */
typedef struct {
    read_request *request;
    const read_extent *extent;
    int32_t index;
    int priority; /* when it was handed out: under which the bytes are counted */
    int64_t begin, bytes, needed, have;
    int attempt, error;
    int64_t delivered, n_retries, n_short;
} read_part;

typedef struct {
    int fd;
    char *target;
    int64_t offset, bytes;
} read_range;

typedef enum { PART_ENDED, PART_GOES_ON, PART_GOES_ON_LATER } part_state;

struct cb_uring;

struct cb_reader {
    pthread_mutex_t lock;
    pthread_cond_t work, help_work;
    pthread_t thread[CB_READ_MAX_DEPTH], helper[CB_READ_HELPERS];
    int n_threads, n_helpers;
    int engine, depth, event_fd, n_in_flight;
    bool stop, cannot_prepare;
    int64_t piece_bytes[2], busy_since; /* by priority */
    request_list pending[2];            /* bytes are missing, by priority */
    request_list landed;                /* only the checksum is missing */
    request_list finished;
    read_request *to_hash, *last_to_hash;
    read_request *to_repack, *last_to_repack;
    char *free_stage[CB_READ_MAX_DEPTH]; /* of the caller's memory */
    int n_free_stages, n_stages;
    int64_t stage_bytes;
    cb_read_counters counters;
    struct cb_uring *uring; /* NULL: threads */
};

int64_t cb_now_ns(void);

/* ---- queue; all under the lock but the two that look at a part alone ---- */
void cb_list_append(request_list *list, read_request *r);
void cb_list_unlink(request_list *list, read_request *r);
read_request *cb_queue_find(const cb_reader *reader, uint64_t tag);
/* The next part to read; false when there is none now. */
bool cb_queue_take(cb_reader *reader, read_part *part);
/* An engine is done with the part. */
void cb_queue_landed(cb_reader *reader, const read_part *part);
/* Moves the request on: to the landed ones, to the finished ones, or nowhere yet. */
void cb_queue_settle(cb_reader *reader, read_request *r);
/* What to ask the system for now. */
read_range cb_part_range(const read_part *part);
/* Takes in what the system said (bytes, or -errno). PART_GOES_ON_LATER: after *delay_ns. */
part_state cb_part_result(read_part *part, int64_t result, int64_t *delay_ns);

/* ---- helpers ---- */
/* Hashes what is there and next in line, here and now; under the lock, which it leaves meanwhile. */
void cb_hash_parts(cb_reader *reader, read_request *r);
/* Has a helper do so. */
void cb_hash_later(cb_reader *reader, read_request *r);
/* Has a helper repack a read that is there. */
void cb_repack_later(cb_reader *reader, read_request *r);
/* A new request's pages may be new. */
void cb_prepare_later(cb_reader *reader, const read_request *r);
void *cb_helper(void *reader);

/* ---- engines ---- */
void *cb_thread_engine(void *reader);
void *cb_uring_engine(void *reader);
/* 0 or an errno that says why there is no ring. */
int cb_uring_open(cb_reader *reader);
void cb_uring_close(cb_reader *reader);
/* There may be something to do; under the lock. */
void cb_engine_wake(cb_reader *reader);
void cb_uring_wake(cb_reader *reader);

/* What a test has put between us and the system. */
void cb_hook_starting(const read_range *range);
int64_t cb_hook_ended(const read_range *range, int64_t result);

#endif
