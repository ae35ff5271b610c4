/* topk.c: the k largest of n scores in linear time, without scratch.
 *
 * Scores become unsigned keys that sort like the numbers. Three histogram passes (11 + 11 + 10 bits) find the k-th
 * largest key exactly; a last pass emits, in ascending position, every larger key and as many equal ones as are
 * still wanted. NaN counts as smaller than every number; -0 and 0 are equal.
 *
 * Only the first pass looks at every key by itself. The others look at spans of 16 keys at once, which the compiler turns
 * into vectors, and go through a span only when it holds a key they are after: few do.
 */
#include "../include/colibri.h"

#include <stdbool.h>
#include <string.h>

#define SPAN 16

/* No branches: the sign of a score is as good as random. */
static inline uint32_t order_key(float score)
{
    float plain = score + 0.0f; /* -0 becomes 0 */
    uint32_t bits;
    memcpy(&bits, &plain, 4);
    uint32_t negative = 0u - (bits >> 31);
    uint32_t key = bits ^ (negative | 0x80000000u);
    return key & (0u - (uint32_t)(plain == plain));
}

static inline void span_keys(const float *scores, uint32_t *keys)
{
    for (int j = 0; j < SPAN; j++)
        keys[j] = order_key(scores[j]);
}

typedef struct {
    uint32_t threshold; /* the bits of the k-th largest key found so far */
    uint32_t known;     /* mask of those bits */
    int64_t wanted;     /* how many of the keys that share the known bits are still to be taken */
} search;

/* Two histograms: neighbours that fall into one bin do not wait for each other's store. */
static void count_keys(const float *scores, int64_t n, const search *s, int shift, uint32_t mask, uint32_t count[2][2048])
{
    int64_t i = 0;
    for (; i + SPAN <= n; i += SPAN) {
        uint32_t keys[SPAN], hits = 0;
        span_keys(scores + i, keys);
        for (int j = 0; j < SPAN; j++)
            hits |= ((keys[j] ^ s->threshold) & s->known) == 0;
        if (!hits)
            continue;
        for (int j = 0; j < SPAN; j++)
            if (((keys[j] ^ s->threshold) & s->known) == 0)
                count[j & 1][(keys[j] >> shift) & mask]++;
    }
    for (; i < n; i++) {
        uint32_t key = order_key(scores[i]);
        if (((key ^ s->threshold) & s->known) == 0)
            count[0][(key >> shift) & mask]++;
    }
}

static void narrow(const float *scores, int64_t n, int shift, uint32_t mask, search *s)
{
    uint32_t count[2][2048];
    memset(count, 0, sizeof count);
    count_keys(scores, n, s, shift, mask, count);
    uint32_t bin = mask;
    for (;; bin--) {
        int64_t here = (int64_t)count[0][bin] + count[1][bin];
        if (here >= s->wanted || bin == 0)
            break;
        s->wanted -= here;
    }
    s->threshold |= bin << shift;
    s->known |= mask << shift;
}

int64_t cb_topk(const float *scores, int64_t n, int64_t k, int32_t *out)
{
    if (n <= 0 || k <= 0)
        return 0;
    if (k >= n) {
        for (int64_t i = 0; i < n; i++)
            out[i] = (int32_t)i;
        return n;
    }

    search s = {0, 0, k};
    narrow(scores, n, 21, 2047, &s);
    narrow(scores, n, 10, 2047, &s);
    narrow(scores, n, 0, 1023, &s);

    int64_t taken = 0;
    for (int64_t i = 0; i < n && taken < k;) {
        int64_t end = i + SPAN <= n ? i + SPAN : n;
        if (end - i == SPAN) {
            uint32_t keys[SPAN], hits = 0;
            span_keys(scores + i, keys);
            for (int j = 0; j < SPAN; j++)
                hits |= keys[j] >= s.threshold;
            if (!hits)
                i = end;
        }
        for (; i < end && taken < k; i++) {
            uint32_t key = order_key(scores[i]);
            bool is_taken = key > s.threshold || (key == s.threshold && s.wanted > 0);
            s.wanted -= key == s.threshold && is_taken;
            out[taken] = (int32_t)i; /* overwritten unless it is taken; taken < k here */
            taken += is_taken;
        }
    }
    return taken;
}
