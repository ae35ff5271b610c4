/* topk.c: the k largest of n scores in linear time, without scratch.
 *
 * Scores become unsigned keys that sort like the numbers. Three histogram passes (11 + 11 + 10 bits) find the k-th
 * largest key exactly; a last pass emits, in ascending position, every larger key and as many equal ones as are
 * still wanted. NaN counts as smaller than every number; -0 and 0 are equal.
 */
#include "../include/colibri.h"

#include <string.h>

static inline uint32_t order_key(float score)
{
    float plain = score + 0.0f; /* -0 becomes 0 */
    uint32_t bits;
    memcpy(&bits, &plain, 4);
    if ((bits & 0x7fffffffu) > 0x7f800000u)
        return 0;
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
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

    static const int shift_of[3] = {21, 10, 0};
    static const uint32_t width_of[3] = {2048, 2048, 1024};
    uint32_t threshold = 0; /* the bits of the k-th largest key found so far */
    uint32_t known = 0;     /* mask of those bits */
    int64_t wanted = k;     /* how many of the keys that share the known bits are still to be taken */
    for (int pass = 0; pass < 3; pass++) {
        /* Two histograms: neighbours that fall into one bin do not wait for each other's store. */
        uint32_t count[2][2048];
        memset(count, 0, sizeof count);
        int shift = shift_of[pass];
        uint32_t mask = width_of[pass] - 1;
        for (int64_t i = 0; i < n; i++) {
            uint32_t key = order_key(scores[i]);
            if (((key ^ threshold) & known) == 0)
                count[i & 1][(key >> shift) & mask]++;
        }
        uint32_t bin = mask;
        for (;; bin--) {
            int64_t here = (int64_t)count[0][bin] + count[1][bin];
            if (here >= wanted || bin == 0)
                break;
            wanted -= here;
        }
        threshold |= bin << shift;
        known |= mask << shift;
    }

    int64_t taken = 0;
    for (int64_t i = 0; i < n && taken < k; i++) {
        uint32_t key = order_key(scores[i]);
        if (key > threshold) {
            out[taken++] = (int32_t)i;
        } else if (key == threshold && wanted > 0) {
            out[taken++] = (int32_t)i;
            wanted--;
        }
    }
    return taken;
}
