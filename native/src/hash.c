/* hash.c: XXH64, written from the algorithm's public description.
 *
 * Four 64-bit lanes each take 8 bytes of every 32-byte stripe; the lanes are folded into one value and the last
 * 0..31 bytes are mixed in one by one. Checksums of containers are this with seed 0.
 */
#include "hash.h"

#include "../include/colibri.h"

#include <string.h>

#define P1 0x9E3779B185EBCA87ull
#define P2 0xC2B2AE3D27D4EB4Full
#define P3 0x165667B19E3779F9ull
#define P4 0x85EBCA77C2B2AE63ull
#define P5 0x27D4EB2F165667C5ull

static inline uint64_t rotate(uint64_t x, int r) { return (x << r) | (x >> (64 - r)); }

static inline uint64_t load64(const unsigned char *p)
{
    uint64_t v;
    memcpy(&v, p, 8); /* little endian, as everything here */
    return v;
}

static inline uint32_t load32(const unsigned char *p)
{
    uint32_t v;
    memcpy(&v, p, 4);
    return v;
}

static inline uint64_t lane_round(uint64_t acc, uint64_t input) { return rotate(acc + input * P2, 31) * P1; }

static inline uint64_t fold_lane(uint64_t h, uint64_t lane) { return (h ^ lane_round(0, lane)) * P1 + P4; }

void cb_hash64_begin(cb_hash64_state *state) { *state = (cb_hash64_state){{P1 + P2, P2, 0, 0 - P1}}; }

void cb_hash64_stripes(cb_hash64_state *state, const void *data, int64_t n)
{
    const unsigned char *p = data;
    uint64_t a = state->lane[0], b = state->lane[1], c = state->lane[2], d = state->lane[3];
    for (const unsigned char *end = p + n; p != end; p += 32) {
        a = lane_round(a, load64(p));
        b = lane_round(b, load64(p + 8));
        c = lane_round(c, load64(p + 16));
        d = lane_round(d, load64(p + 24));
    }
    *state = (cb_hash64_state){{a, b, c, d}};
}

uint64_t cb_hash64_end(const cb_hash64_state *state, const void *tail, int64_t total)
{
    const unsigned char *p = tail;
    uint64_t h = P5;
    if (total >= 32) {
        const uint64_t *lane = state->lane;
        h = rotate(lane[0], 1) + rotate(lane[1], 7) + rotate(lane[2], 12) + rotate(lane[3], 18);
        for (int i = 0; i < 4; i++)
            h = fold_lane(h, lane[i]);
    }
    h += (uint64_t)total;

    int64_t left = total & 31;
    for (; left >= 8; left -= 8, p += 8)
        h = rotate(h ^ lane_round(0, load64(p)), 27) * P1 + P4;
    if (left >= 4) {
        h = rotate(h ^ (uint64_t)load32(p) * P1, 23) * P2 + P3;
        p += 4;
        left -= 4;
    }
    for (; left > 0; left--, p++)
        h = rotate(h ^ *p * P5, 11) * P1;

    h ^= h >> 33;
    h *= P2;
    h ^= h >> 29;
    h *= P3;
    return h ^ (h >> 32);
}

uint64_t cb_hash64(const void *data, int64_t n)
{
    cb_hash64_state state;
    int64_t striped = n > 0 ? n & ~(int64_t)31 : 0;
    cb_hash64_begin(&state);
    cb_hash64_stripes(&state, data, striped);
    return cb_hash64_end(&state, (const unsigned char *)data + striped, n > 0 ? n : 0);
}
