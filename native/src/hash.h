/* hash.h: XXH64 in parts, for data that arrives piece by piece. */
#ifndef CB_HASH_H
#define CB_HASH_H

#include <stdint.h>

typedef struct {
    uint64_t lane[4];
} cb_hash64_state;

void cb_hash64_begin(cb_hash64_state *state);
/* n is a multiple of 32. */
void cb_hash64_stripes(cb_hash64_state *state, const void *data, int64_t n);
/* tail: the last `total` mod 32 bytes. */
uint64_t cb_hash64_end(const cb_hash64_state *state, const void *tail, int64_t total);

#endif
