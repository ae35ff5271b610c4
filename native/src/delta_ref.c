/* delta_ref.c: the definition of delta.h as loops. Every other rung gives these bits. */
#include "delta.h"

#include <math.h>

static void step_ref(const float *in, int64_t ld_in, float *out, int64_t ld_out, int64_t dk, int64_t n,
                     const cb_delta_token *t)
{
    for (int64_t j = 0; j < n; j++) {
        float read = 0.0f, sum = 0.0f;
        for (int64_t i = 0; i < dk; i++)
            read = fmaf(t->k[i], in[i * ld_in + j] * t->decay, read);
        float change = t->beta * (t->v[j] - read);
        for (int64_t i = 0; i < dk; i++) {
            float s = fmaf(t->k[i], change, in[i * ld_in + j] * t->decay);
            out[i * ld_out + j] = s;
            if (t->q)
                sum = fmaf(t->q[i], s, sum);
        }
        if (t->q)
            t->o[j] = sum;
    }
}

const cb_delta_table cb_delta_table_ref = {step_ref};
