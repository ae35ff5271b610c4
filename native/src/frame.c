/* frame.c: where every field of a step frame lies (include/cb_frame.h says what each means). */
#include "../include/cb_frame.h"

#include <string.h>

#define FIELD_ALIGN 64
#define FRAME_ALIGN 4096
#define MAX_DIM ((int64_t)1 << 31)

_Static_assert(sizeof(cb_stage) == 40, "numpy's V40");
_Static_assert(CB_N_SERVICES == 5, "stage blocks");

typedef struct {
    const char *name, *dtype;
    int64_t item;
    int n_dims;
    int64_t dim[3];
} field_spec;

int cb_frame_layout(const cb_frame_dims *d, cb_frame_field *out, int64_t *total)
{
    if (!d || !out || !total)
        return CB_EINVAL;
    const int64_t given[] = {d->rows, d->logit_rows, d->sequences, d->blocks_per_sequence,
                             d->hidden, d->gate_k, d->vocab, d->stages, d->residual_rows};
    for (size_t i = 0; i < sizeof given / sizeof *given; i++)
        if (given[i] < 0 || given[i] > MAX_DIM)
            return CB_EINVAL;

    const field_spec spec[CB_FRAME_FIELDS] = {
        {"token", "i4", 4, 1, {d->rows, 1, 1}},
        {"position", "i4", 4, 1, {d->rows, 1, 1}},
        {"seq", "i4", 4, 1, {d->rows, 1, 1}},
        {"logit_row", "i4", 4, 1, {d->logit_rows, 1, 1}},
        {"block_table", "i4", 4, 2, {d->sequences, d->blocks_per_sequence, 1}},
        {"state", "i4", 4, 1, {d->sequences, 1, 1}},
        {"embed", "f4", 4, 2, {d->rows, d->hidden, 1}},
        {"layer_input", "f4", 4, 2, {CB_PILOT_ROWS, d->hidden, 1}},
        {"hidden", "f4", 4, 2, {d->rows, d->hidden, 1}},
        {"residual", "f4", 4, 2, {d->residual_rows, d->hidden, 1}},
        {"gate_id", "i4", 4, 2, {d->rows, d->gate_k, 1}},
        {"gate_weight", "f4", 4, 2, {d->rows, d->gate_k, 1}},
        {"mixed", "f4", 4, 2, {d->rows, d->hidden, 1}},
        {"final", "f4", 4, 2, {d->rows, d->hidden, 1}},
        {"logits", "f4", 4, 2, {d->logit_rows, d->vocab, 1}},
        {"stage", "V40", (int64_t)sizeof(cb_stage), 2, {CB_N_SERVICES, d->stages, 1}},
        {"stage_count", "i8", 8, 2, {CB_N_SERVICES, 8, 1}},
    };

    int64_t at = 0;
    for (int i = 0; i < CB_FRAME_FIELDS; i++) {
        int64_t bytes = spec[i].item;
        for (int k = 0; k < 3; k++)
            if (__builtin_mul_overflow(bytes, spec[i].dim[k], &bytes))
                return CB_EINVAL;
        memset(&out[i], 0, sizeof out[i]);
        strncpy(out[i].name, spec[i].name, sizeof out[i].name - 1);
        memcpy(out[i].dtype, spec[i].dtype, strlen(spec[i].dtype));
        out[i].offset = at;
        out[i].bytes = bytes;
        out[i].n_dims = spec[i].n_dims;
        memcpy(out[i].dim, spec[i].dim, sizeof out[i].dim);
        if (__builtin_add_overflow(at, bytes, &at) || at > INT64_MAX - FRAME_ALIGN)
            return CB_EINVAL;
        at = (at + FIELD_ALIGN - 1) & ~(int64_t)(FIELD_ALIGN - 1);
    }
    *total = (at + FRAME_ALIGN - 1) & ~(int64_t)(FRAME_ALIGN - 1);
    return CB_OK;
}
