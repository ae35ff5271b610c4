/* reader_threads.c: the engine of systems without io_uring, and of buffered files: one part per thread. */
#include "reader.h"

#include <errno.h>
#include <time.h>
#include <unistd.h>

static void read_one(read_part *part)
{
    int64_t delay_ns = 0;
    for (part_state state = PART_GOES_ON; state != PART_ENDED;) {
        read_range range = cb_part_range(part);
        cb_hook_starting(&range);
        ssize_t got = pread(range.fd, range.target, (size_t)range.bytes, range.offset);
        state = cb_part_result(part, cb_hook_ended(&range, got < 0 ? -errno : got), &delay_ns);
        if (state == PART_GOES_ON_LATER)
            nanosleep(&(struct timespec){.tv_nsec = delay_ns}, NULL);
    }
}

void *cb_thread_engine(void *arg)
{
    cb_reader *reader = arg;
    read_part part;
    pthread_mutex_lock(&reader->lock);
    while (!reader->stop) {
        if (!cb_queue_take(reader, &part)) {
            pthread_cond_wait(&reader->work, &reader->lock);
            continue;
        }
        pthread_mutex_unlock(&reader->lock);
        read_one(&part);
        pthread_mutex_lock(&reader->lock);
        cb_queue_landed(reader, &part);
    }
    pthread_mutex_unlock(&reader->lock);
    return NULL;
}
