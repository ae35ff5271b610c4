/* reader_help.c: what threads of their own do beside the reads, so that the drive never waits for it: checksums, part by part
 * while the rest is on its way; repacking from a stage to the target; and the pages of targets that were never touched. The system clears those before a read
 * into them starts, at a quarter of the time that the read itself takes. */
#include "reader.h"

#include <errno.h>
#include <sys/mman.h>

#ifndef MADV_POPULATE_WRITE /* Linux 5.14 */
#define MADV_POPULATE_WRITE 23
#endif

/* Smaller reads are not worth waking anybody; a step is short, because a read can't end while a helper is at it. */
#define PREPARE_FROM_BYTES ((int64_t)4 << 20)
#define PREPARE_STEP ((int64_t)2 << 20)

/* ---- checksums -------------------------------------------------------------------------------------------- */

/* One thread at a time does so for a request; what lands in between it finds before it stops. The request can't end
 * meanwhile: cb_queue_settle looks at is_hashing. */
void cb_hash_parts(cb_reader *reader, read_request *r)
{
    r->is_hashing = true;
    while (r->n_hashed < r->n_parts && r->part[r->n_hashed].is_there && !r->done.error && !r->done.cancelled) {
        int64_t begin = r->n_hashed ? r->part[r->n_hashed - 1].end : 0, end = r->part[r->n_hashed].end;
        pthread_mutex_unlock(&reader->lock);
        /* All parts but the last are whole sectors; the last one's odd bytes are cb_hash64_end's. */
        cb_hash64_stripes(&r->hash, r->target + begin, (end - begin) & ~(int64_t)31);
        pthread_mutex_lock(&reader->lock);
        r->n_hashed++;
    }
    r->is_hashing = false;
}

void cb_hash_later(cb_reader *reader, read_request *r)
{
    if (r->n_hashed == r->n_parts || !r->part[r->n_hashed].is_there)
        return; /* the part before is still on its way; whoever lands it comes here */
    r->is_hashing = true;
    r->next_to_hash = NULL;
    if (reader->last_to_hash)
        reader->last_to_hash->next_to_hash = r;
    else
        reader->to_hash = r;
    reader->last_to_hash = r;
    pthread_cond_signal(&reader->help_work);
}

/* ---- repacking -------------------------------------------------------------------------------------------- */

/* Until a helper is through with it the request can't end. */
void cb_repack_later(cb_reader *reader, read_request *r)
{
    r->n_helping++;
    r->next_to_repack = NULL;
    if (reader->last_to_repack)
        reader->last_to_repack->next_to_repack = r;
    else
        reader->to_repack = r;
    reader->last_to_repack = r;
    pthread_cond_signal(&reader->help_work);
}

/* Under the lock, which it leaves meanwhile. */
static void repack(cb_reader *reader, read_request *r)
{
    int status = CB_OK;
    if (!r->done.cancelled) {
        pthread_mutex_unlock(&reader->lock);
        status = cb_repack(r->matrix, r->n_matrices, r->base, r->target);
        pthread_mutex_lock(&reader->lock);
    }
    if (status != CB_OK)
        r->done.error = EILSEQ;
    r->is_repacked = true;
    r->n_helping--;
    cb_queue_settle(reader, r);
}

/* ---- pages ------------------------------------------------------------------------------------------------ */

void cb_prepare_later(cb_reader *reader, const read_request *r)
{
    if (r->done.wanted >= PREPARE_FROM_BYTES && !reader->cannot_prepare)
        pthread_cond_signal(&reader->help_work);
}

/* The next pending read of which a helper can still be ahead of the engine. */
static read_request *next_to_prepare(const cb_reader *reader)
{
    if (reader->cannot_prepare)
        return NULL;
    for (int p = 0; p < 2; p++)
        for (read_request *r = reader->pending[p].first; r; r = r->next) {
            int64_t ahead = r->handed_out + reader->piece_bytes[p];
            if (r->prepared < ahead)
                r->prepared = ahead;
            if (r->prepared < r->done.wanted && r->done.wanted >= PREPARE_FROM_BYTES && !r->n_matrices &&
                !r->done.error && !r->done.cancelled)
                return r;
        }
    return NULL;
}

/* Under the lock, which it leaves meanwhile. */
static void prepare(cb_reader *reader, read_request *r)
{
    uintptr_t begin = (uintptr_t)r->target + (uintptr_t)r->prepared, end = begin + PREPARE_STEP;
    uintptr_t limit = (uintptr_t)r->target + (uintptr_t)r->done.wanted;
    end = (end < limit ? end : limit) & ~(uintptr_t)(CB_SECTOR - 1);
    begin &= ~(uintptr_t)(CB_SECTOR - 1);
    r->prepared += PREPARE_STEP;
    r->n_helping++;
    pthread_mutex_unlock(&reader->lock);
    bool is_refused = end > begin && madvise((void *)begin, end - begin, MADV_POPULATE_WRITE) != 0 && errno == EINVAL;
    pthread_mutex_lock(&reader->lock);
    reader->cannot_prepare |= is_refused;
    r->n_helping--;
    cb_queue_settle(reader, r);
}

/* ---- the helpers' threads --------------------------------------------------------------------------------- */

void *cb_helper(void *arg)
{
    cb_reader *reader = arg;
    pthread_mutex_lock(&reader->lock);
    while (!reader->stop) {
        read_request *r = reader->to_hash;
        if (r) {
            reader->to_hash = r->next_to_hash;
            if (!reader->to_hash)
                reader->last_to_hash = NULL;
            cb_hash_parts(reader, r);
            cb_queue_settle(reader, r);
        } else if ((r = reader->to_repack)) {
            reader->to_repack = r->next_to_repack;
            if (!reader->to_repack)
                reader->last_to_repack = NULL;
            repack(reader, r);
        } else if ((r = next_to_prepare(reader))) {
            prepare(reader, r);
        } else {
            pthread_cond_wait(&reader->help_work, &reader->lock);
        }
    }
    pthread_mutex_unlock(&reader->lock);
    return NULL;
}
