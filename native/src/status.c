#include "../include/cb_frame.h"
#include "internal.h"

#include <stddef.h>
#include <string.h>

int cb_abi_version(void) { return CB_ABI_VERSION; }

const char *cb_status_text(int status)
{
    switch (status) {
    case CB_OK: return "ok";
    case CB_EINVAL: return "a size, index or pointer is outside the contract";
    case CB_ENOMEM: return "out of memory";
    case CB_ENONFINITE: return "a NaN or infinity where the contract forbids one";
    case CB_EIO: return "input/output error";
    case CB_ESYS: return "a system call failed";
    default: return "unknown status";
    }
}

/* Sizes and, per field, offsets, so that a binding can check its own idea of a struct when it loads. */
#define SIZE(type) {#type, sizeof(type)}
#define FIELD(type, field) {#type "." #field, offsetof(type, field)}
static const struct {
    const char *name;
    size_t value;
} layout[] = {
    {"CB_GROUP", CB_GROUP}, {"CB_TILE_ROWS", CB_TILE_ROWS}, {"CB_KV_BLOCK", CB_KV_BLOCK}, {"CB_DELTA_MAX_DRAFTS", CB_DELTA_MAX_DRAFTS},
    {"CB_FRAME_FIELDS", CB_FRAME_FIELDS},
    SIZE(cb_matrix), FIELD(cb_matrix, weight), FIELD(cb_matrix, scale), FIELD(cb_matrix, out), FIELD(cb_matrix, in),
    FIELD(cb_matrix, format), FIELD(cb_matrix, act),
    SIZE(cb_ffn), FIELD(cb_ffn, gate), FIELD(cb_ffn, up), FIELD(cb_ffn, down), FIELD(cb_ffn, gate_bias),
    FIELD(cb_ffn, up_bias), FIELD(cb_ffn, down_bias), FIELD(cb_ffn, function), FIELD(cb_ffn, limit),
    SIZE(cb_expert_job), FIELD(cb_expert_job, ffn), FIELD(cb_expert_job, rows), FIELD(cb_expert_job, out),
    FIELD(cb_expert_job, n_rows),
    SIZE(cb_gate), FIELD(cb_gate, weight), FIELD(cb_gate, bias), FIELD(cb_gate, n_experts), FIELD(cb_gate, k),
    FIELD(cb_gate, n_group), FIELD(cb_gate, topk_group), FIELD(cb_gate, norm_topk), FIELD(cb_gate, scaling),
    FIELD(cb_gate, logit_bias), FIELD(cb_gate, expert_scale), FIELD(cb_gate, scoring),
    SIZE(cb_attn_layer), FIELD(cb_attn_layer, hidden), FIELD(cb_attn_layer, n_heads), FIELD(cb_attn_layer, q_rank),
    FIELD(cb_attn_layer, kv_rank), FIELD(cb_attn_layer, nope), FIELD(cb_attn_layer, rope), FIELD(cb_attn_layer, v_dim),
    FIELD(cb_attn_layer, rope_interleave), FIELD(cb_attn_layer, rms_eps), FIELD(cb_attn_layer, latent_eps),
    FIELD(cb_attn_layer, softmax_scale), FIELD(cb_attn_layer, index_kind), FIELD(cb_attn_layer, index_heads),
    FIELD(cb_attn_layer, index_dim), FIELD(cb_attn_layer, index_topk), FIELD(cb_attn_layer, index_rope_interleave),
    FIELD(cb_attn_layer, inv_freq), FIELD(cb_attn_layer, rope_amplitude), FIELD(cb_attn_layer, index_norm_eps),
    FIELD(cb_attn_layer, input_norm), FIELD(cb_attn_layer, q_a_norm), FIELD(cb_attn_layer, kv_a_norm),
    FIELD(cb_attn_layer, post_norm), FIELD(cb_attn_layer, q_a), FIELD(cb_attn_layer, q_b), FIELD(cb_attn_layer, kv_a),
    FIELD(cb_attn_layer, k_b), FIELD(cb_attn_layer, v_b), FIELD(cb_attn_layer, o), FIELD(cb_attn_layer, index_wq_b),
    FIELD(cb_attn_layer, index_wk), FIELD(cb_attn_layer, index_weights), FIELD(cb_attn_layer, index_k_norm_w),
    FIELD(cb_attn_layer, index_k_norm_b),
    SIZE(cb_gqa_layer), FIELD(cb_gqa_layer, hidden), FIELD(cb_gqa_layer, n_heads), FIELD(cb_gqa_layer, n_kv_heads),
    FIELD(cb_gqa_layer, head_dim), FIELD(cb_gqa_layer, rope), FIELD(cb_gqa_layer, rope_interleave),
    FIELD(cb_gqa_layer, window), FIELD(cb_gqa_layer, qk_norm), FIELD(cb_gqa_layer, value_norm),
    FIELD(cb_gqa_layer, clip), FIELD(cb_gqa_layer, rms_eps), FIELD(cb_gqa_layer, softmax_scale),
    FIELD(cb_gqa_layer, rope_amplitude), FIELD(cb_gqa_layer, inv_freq), FIELD(cb_gqa_layer, input_norm),
    FIELD(cb_gqa_layer, q_norm), FIELD(cb_gqa_layer, k_norm), FIELD(cb_gqa_layer, post_norm),
    FIELD(cb_gqa_layer, out_norm), FIELD(cb_gqa_layer, q_bias), FIELD(cb_gqa_layer, k_bias),
    FIELD(cb_gqa_layer, v_bias), FIELD(cb_gqa_layer, o_bias), FIELD(cb_gqa_layer, sinks), FIELD(cb_gqa_layer, q),
    FIELD(cb_gqa_layer, k), FIELD(cb_gqa_layer, v), FIELD(cb_gqa_layer, o), FIELD(cb_gqa_layer, gate),
    SIZE(cb_delta_layer), FIELD(cb_delta_layer, hidden), FIELD(cb_delta_layer, n_key_heads),
    FIELD(cb_delta_layer, n_value_heads), FIELD(cb_delta_layer, key_dim), FIELD(cb_delta_layer, value_dim),
    FIELD(cb_delta_layer, taps), FIELD(cb_delta_layer, rms_eps), FIELD(cb_delta_layer, input_norm),
    FIELD(cb_delta_layer, post_norm), FIELD(cb_delta_layer, norm), FIELD(cb_delta_layer, a_log),
    FIELD(cb_delta_layer, dt_bias), FIELD(cb_delta_layer, qkv), FIELD(cb_delta_layer, z), FIELD(cb_delta_layer, a),
    FIELD(cb_delta_layer, b), FIELD(cb_delta_layer, out), FIELD(cb_delta_layer, conv),
    SIZE(cb_attn_step), FIELD(cb_attn_step, n_rows), FIELD(cb_attn_step, position), FIELD(cb_attn_step, seq),
    FIELD(cb_attn_step, block_table), FIELD(cb_attn_step, table_stride), FIELD(cb_attn_step, n_blocks),
    FIELD(cb_attn_step, kv), FIELD(cb_attn_step, index_k), FIELD(cb_attn_step, kv_format), FIELD(cb_attn_step, n_sequences),
    FIELD(cb_attn_step, selected), FIELD(cb_attn_step, n_selected), FIELD(cb_attn_step, x),
    FIELD(cb_attn_step, hidden), FIELD(cb_attn_step, state), FIELD(cb_attn_step, records), FIELD(cb_attn_step, state_of),
    FIELD(cb_attn_step, n_states), FIELD(cb_attn_step, n_drafts),
    SIZE(cb_repack_matrix), FIELD(cb_repack_matrix, format), FIELD(cb_repack_matrix, group),
    FIELD(cb_repack_matrix, is_f16), FIELD(cb_repack_matrix, unused), FIELD(cb_repack_matrix, out),
    FIELD(cb_repack_matrix, in), FIELD(cb_repack_matrix, weight_from), FIELD(cb_repack_matrix, scale_from),
    FIELD(cb_repack_matrix, weight_to), FIELD(cb_repack_matrix, scale_to),
    SIZE(cb_read_extent), FIELD(cb_read_extent, offset), FIELD(cb_read_extent, bytes), FIELD(cb_read_extent, at),
    FIELD(cb_read_extent, fd), FIELD(cb_read_extent, unused),
    SIZE(cb_read_done), FIELD(cb_read_done, tag), FIELD(cb_read_done, bytes), FIELD(cb_read_done, wanted),
    FIELD(cb_read_done, start_ns), FIELD(cb_read_done, end_ns), FIELD(cb_read_done, error),
    FIELD(cb_read_done, cancelled), FIELD(cb_read_done, checksum),
    SIZE(cb_read_counters), FIELD(cb_read_counters, bytes_demand), FIELD(cb_read_counters, bytes_speculative),
    FIELD(cb_read_counters, n_reads), FIELD(cb_read_counters, n_retries), FIELD(cb_read_counters, n_short),
    FIELD(cb_read_counters, busy_ns),
    SIZE(cb_frame_dims), FIELD(cb_frame_dims, rows), FIELD(cb_frame_dims, logit_rows), FIELD(cb_frame_dims, sequences),
    FIELD(cb_frame_dims, blocks_per_sequence), FIELD(cb_frame_dims, hidden), FIELD(cb_frame_dims, gate_k),
    FIELD(cb_frame_dims, vocab), FIELD(cb_frame_dims, stages), FIELD(cb_frame_dims, residual_rows),
    SIZE(cb_frame_field), FIELD(cb_frame_field, name), FIELD(cb_frame_field, offset), FIELD(cb_frame_field, bytes),
    FIELD(cb_frame_field, dim), FIELD(cb_frame_field, n_dims), FIELD(cb_frame_field, dtype),
    SIZE(cb_stage), FIELD(cb_stage, start_ns), FIELD(cb_stage, end_ns), FIELD(cb_stage, bytes), FIELD(cb_stage, step),
    FIELD(cb_stage, stage), FIELD(cb_stage, layer),
};

int64_t cb_layout_of(const char *name)
{
    for (size_t i = 0; i < sizeof layout / sizeof *layout; i++)
        if (!strcmp(layout[i].name, name))
            return (int64_t)layout[i].value;
    return -1;
}
