/* cb_frame.h: layout of a step frame, the shared segment in which the tensors of one step cross process borders.
 *
 * One source: cb_frame_layout() computes where every field lies; Python reads that table (shared/step/frame.py) and writes
 * no offset of its own. One writer per field at a time. A message that names (step, frame) transfers the right to read what its
 * sender wrote before sending it; nobody polls the memory.
 *
 *   field        dtype  shape                    writer     meaning
 *   token        i32    [T]                      router (drafter: the next pass of a draft step) token id of each row
 *   position     i32    [T]                      router     position of each row in its sequence
 *   seq          i32    [T]                      router     row of block_table
 *   logit_row    i32    [L]                      router (drafter: from its first pass on) rows whose logits are wanted
 *   block_table  i32    [S, B]                   router     KV blocks of each sequence (drafter uses the same numbers)
 *   state        i32    [S]                      router     which state each sequence has, in layers that keep one
 *   embed        f32    [T, D]                   attention  embedding rows for the drafter
 *   layer_input  f32    [8, D]                   attention  few rows only: residual stream before a MoE layer, for PILOT
 *   hidden       f32    [T, D]                   attention or drafter: post-attention norm, input of gate and experts
 *   residual     f32    [R, D]                   attention  what hidden is the norm of, for gates with a norm of their own
 *   gate_id      i32    [T, K]                   router     chosen experts, ascending
 *   gate_weight  f32    [T, K]                   router
 *   mixed        f32    [T, D]                   expert_io  routed plus shared experts
 *   final        f32    [T, D]                   attention (main step: after model.norm) or router/drafter (draft step)
 *   logits       f32    [L, V]                   attention
 *   stage        cb_stage [5][cb_frame_dims.stages]  each service its own block, in the order of cb_service
 *   stage_count  i64    [5][8]                   each service its own cache line: rows written so far
 */
#ifndef CB_FRAME_H
#define CB_FRAME_H
#include "colibri.h"

enum { CB_GATEWAY = 0, CB_ROUTER = 1, CB_ATTENTION = 2, CB_EXPERT_IO = 3, CB_DRAFTER = 4, CB_N_SERVICES = 5 };

typedef struct {
    int64_t rows, logit_rows, sequences, blocks_per_sequence, hidden, gate_k, vocab, stages, residual_rows;
} cb_frame_dims;

typedef struct {
    char name[16];
    int64_t offset; /* bytes from the frame's start, multiple of 64 */
    int64_t bytes;
    int64_t dim[3]; /* unused = 1 */
    int32_t n_dims;
    char dtype[4];  /* numpy code: i4, f4, i8, or V40 for cb_stage */
} cb_frame_field;

/* One finished stage of one service in this step. */
typedef struct {
    int64_t start_ns, end_ns; /* CLOCK_MONOTONIC */
    int64_t bytes;            /* read from storage, or weights touched; 0 = not counted */
    int64_t step;
    int32_t stage;            /* shared/step/stages.py names them */
    int32_t layer;            /* -1 = none */
} cb_stage;

/* Beyond a few rows the experts of a step are so many that guesses only lengthen a queue that is full anyway. */
#define CB_PILOT_ROWS 8
#define CB_FRAME_FIELDS 17
/* Fills out[CB_FRAME_FIELDS]; *total gets the frame's bytes, a multiple of 4096. */
CB_API int cb_frame_layout(const cb_frame_dims *dims, cb_frame_field *out, int64_t *total);

#endif
