/* reader_queue.c: who is read next, and what becomes of a part that ended. Reads nothing. */
#include "reader.h"

#include <errno.h>
#include <time.h>
#include <unistd.h>

#define MAX_RETRIES 3
/* A part of this size is hashed where it landed: waking a helper would take longer. */
#define HASH_HERE_BYTES (128 << 10)

int64_t cb_now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * INT64_C(1000000000) + t.tv_nsec;
}

/* ---- lists ------------------------------------------------------------------------------------------------ */

void cb_list_append(request_list *list, read_request *r)
{
    r->next = NULL;
    if (list->last)
        list->last->next = r;
    else
        list->first = r;
    list->last = r;
}

void cb_list_unlink(request_list *list, read_request *r)
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

read_request *cb_queue_find(const cb_reader *reader, uint64_t tag)
{
    const request_list *lists[] = {&reader->pending[0], &reader->pending[1], &reader->landed};
    for (int i = 0; i < 3; i++)
        for (read_request *r = lists[i]->first; r; r = r->next)
            if (r->done.tag == tag)
                return r;
    return NULL;
}

/* ---- parts ------------------------------------------------------------------------------------------------ */

static bool has_more(const read_request *r)
{
    return r->handed_out < r->span && !r->done.error && !r->done.cancelled;
}

/* The oldest read that can go on. Speculative ones do when no demand read is pending, or when all that can be done for those is
 * to let a speculative one end and give its stage back. */
static read_request *next_request(const cb_reader *reader)
{
    for (int priority = CB_READ_DEMAND; priority <= CB_READ_SPECULATIVE; priority++) {
        bool waits_for_stage = false;
        for (read_request *r = reader->pending[priority].first; r; r = r->next) {
            bool has_place = r->base || reader->n_free_stages > 0;
            if (has_more(r) && has_place)
                return r;
            waits_for_stage |= has_more(r) && !has_place;
        }
        if (reader->pending[priority].first && !waits_for_stage)
            return NULL;
    }
    return NULL;
}

bool cb_queue_take(cb_reader *reader, read_part *part)
{
    read_request *r = next_request(reader);
    if (!r)
        return false;
    if (!r->base)
        r->base = reader->free_stage[--reader->n_free_stages];
    const read_extent *extent = &r->extent[r->at_extent];
    int64_t done = r->handed_out - extent->begin, left = extent->bytes - done, piece = reader->piece_bytes[r->priority];
    int64_t bytes = left < piece ? left : piece, needed = extent->needed - done;
    *part = (read_part){.request = r,
                        .extent = extent,
                        .index = r->n_parts++,
                        .priority = r->priority,
                        .begin = r->handed_out,
                        .bytes = bytes,
                        .needed = needed < bytes ? needed : bytes};
    r->handed_out += part->bytes;
    if (bytes == left)
        r->at_extent++;
    r->part[part->index].end = r->handed_out;
    r->in_flight++;
    int64_t now = cb_now_ns();
    if (!r->done.start_ns)
        r->done.start_ns = now;
    if (reader->n_in_flight++ == 0)
        reader->busy_since = now;
    return true;
}

read_range cb_part_range(const read_part *part)
{
    /* Direct reads must go on from an aligned place. */
    const read_extent *e = part->extent;
    int64_t from = part->begin + part->have - part->have % CB_SECTOR, in_extent = from - e->begin;
    return (read_range){e->fd, part->request->base + e->at + in_extent, e->offset + in_extent,
                        part->begin + part->bytes - from};
}

static bool is_transient(int error) { return error == EINTR || error == EAGAIN || error == EIO; }

part_state cb_part_result(read_part *part, int64_t result, int64_t *delay_ns)
{
    int64_t from = part->have - part->have % CB_SECTOR;
    if (result < 0) {
        part->error = (int)-result;
        if (!is_transient(part->error))
            return PART_ENDED;
    } else {
        part->delivered += result;
        part->error = result == 0 ? ENODATA : 0;
        if (result == 0)
            return PART_ENDED;
        if (from + result > part->have)
            part->have = from + result;
        if (part->have >= part->needed)
            return PART_ENDED;
        part->n_short++;
    }
    if (part->attempt == MAX_RETRIES) {
        part->error = part->error ? part->error : ENODATA;
        return PART_ENDED;
    }
    part->n_retries++;
    *delay_ns = INT64_C(1000000) << (2 * part->attempt++);
    return part->error == EIO || part->error == EAGAIN ? PART_GOES_ON_LATER : PART_GOES_ON;
}

/* ---- ends ------------------------------------------------------------------------------------------------- */

static void finish(cb_reader *reader, read_request *r)
{
    if (r->n_matrices > 0 && r->base) {
        reader->free_stage[reader->n_free_stages++] = r->base;
        cb_engine_wake(reader); /* somebody may wait for it */
    }
    if (r->want_checksum && !r->done.error && !r->done.cancelled)
        r->done.checksum = cb_hash64_end(&r->hash, r->target + (r->done.wanted & ~(int64_t)31), r->done.wanted);
    r->done.end_ns = cb_now_ns();
    if (!r->done.start_ns)
        r->done.start_ns = r->done.end_ns;
    reader->counters.n_reads++;
    cb_list_append(&reader->finished, r);
    uint64_t one = 1;
    while (write(reader->event_fd, &one, sizeof one) < 0 && errno == EINTR)
        ;
}

void cb_queue_settle(cb_reader *reader, read_request *r)
{
    if (r->in_flight > 0 || has_more(r))
        return;
    if (!r->is_landed) {
        r->is_landed = true;
        cb_list_unlink(&reader->pending[r->priority], r);
        cb_list_append(&reader->landed, r);
        if (!reader->pending[CB_READ_DEMAND].first && reader->pending[CB_READ_SPECULATIVE].first)
            cb_engine_wake(reader); /* speculative reads may go on */
    }
    bool is_hashed = !r->want_checksum || r->done.error || r->done.cancelled || r->n_hashed == r->n_parts;
    if (r->is_hashing || r->n_helping > 0 || !is_hashed)
        return;
    if (r->n_matrices > 0 && !r->is_repacked && !r->done.error && !r->done.cancelled) {
        cb_repack_later(reader, r);
        return;
    }
    cb_list_unlink(&reader->landed, r);
    finish(reader, r);
}

void cb_queue_landed(cb_reader *reader, const read_part *part)
{
    read_request *r = part->request;
    if (--reader->n_in_flight == 0)
        reader->counters.busy_ns += cb_now_ns() - reader->busy_since;
    *(part->priority == CB_READ_DEMAND ? &reader->counters.bytes_demand : &reader->counters.bytes_speculative) +=
        part->delivered;
    reader->counters.n_retries += part->n_retries;
    reader->counters.n_short += part->n_short;
    if (part->error) {
        if (!r->done.error)
            r->done.error = part->error;
    } else {
        r->done.bytes += part->needed;
        r->part[part->index].is_there = true;
        if (r->want_checksum && !r->is_hashing) {
            if (part->bytes <= HASH_HERE_BYTES)
                cb_hash_parts(reader, r);
            else
                cb_hash_later(reader, r);
        }
    }
    r->in_flight--;
    cb_queue_settle(reader, r);
}
