/* reader_hash.c: checksums of reads, part by part while the rest is on its way. */
#include "reader.h"

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
    pthread_cond_signal(&reader->hash_work);
}

void *cb_hasher(void *arg)
{
    cb_reader *reader = arg;
    pthread_mutex_lock(&reader->lock);
    while (!reader->stop) {
        read_request *r = reader->to_hash;
        if (!r) {
            pthread_cond_wait(&reader->hash_work, &reader->lock);
            continue;
        }
        reader->to_hash = r->next_to_hash;
        if (!reader->to_hash)
            reader->last_to_hash = NULL;
        cb_hash_parts(reader, r);
        cb_queue_settle(reader, r);
    }
    pthread_mutex_unlock(&reader->lock);
    return NULL;
}
