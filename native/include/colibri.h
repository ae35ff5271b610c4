/* colibri.h: the only public header of the kernels and of the read pool.
 *
 * Conventions
 *   - T rows, D hidden, F expert inner width, H heads, R latent rank, V vocabulary (design words).
 *   - Row-major, contiguous, little endian. f32 unless a name says otherwise.
 *   - Nothing here prints, exits or keeps a pointer after returning (except the pool and read-pool handles).
 *   - A function that can fail returns CB_OK or a negative cb_status; cb_status_text() names it.
 *   - Results depend on the arguments alone: never on the number of threads, on the instruction set or on
 *     how many rows share a call. docs/numerics.md defines every sum's order; src/ref holds the definitions.
 */
#ifndef COLIBRI_H
#define COLIBRI_H

#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#ifdef __cplusplus
extern "C" {
#endif

#define CB_API __attribute__((visibility("default")))
#define CB_ABI_VERSION 1
#define CB_GROUP 64        /* inputs that share one int8 activation scale; weights have one scale for them, or one for each half */
#define CB_TILE_ROWS 16    /* output rows interleaved in one tile */
#define CB_KV_BLOCK 64     /* positions in one KV block, and in one block of the attention sum */

typedef enum {
    CB_OK = 0,
    CB_EINVAL = -1,     /* a size or pointer outside the contract */
    CB_ENOMEM = -2,
    CB_ENONFINITE = -3, /* a NaN or infinity where the contract forbids one */
    CB_EIO = -4,
    CB_ESYS = -5
} cb_status;

CB_API int cb_abi_version(void);
CB_API const char *cb_status_text(int status);
/* sizeof, offsetof or a constant by name, for bindings that check themselves: "cb_matrix", "cb_matrix.scale", "CB_GROUP";
 * -1 = unknown. */
CB_API int64_t cb_layout_of(const char *name);

/* ---- dispatch -------------------------------------------------------------------------------------------- */

/* Rungs of the ladder, lowest first: `ref` everywhere, then those of x86-64 or those of aarch64. The mask can only take
 * rungs away. */
typedef enum {
    CB_ISA_REF = 0,
    CB_ISA_AVX2 = 1,
    CB_ISA_AVX512 = 2,
    CB_ISA_AVX512VNNI = 3,
    CB_ISA_AMX = 4,
    CB_ISA_NEON = 5,
    CB_ISA_NEONDOT = 6
} cb_isa;

/* Comma-separated rungs that this machine and its operating system offer, e.g. "ref,avx2,avx512,avx512vnni". */
CB_API const char *cb_isa_available(void);
/* Rebuild the function table with no rung above `isa`; CB_EINVAL when the machine does not offer it.
 * At load the environment variable COLIBRI_ISA (a rung's name) does the same; an unknown name leaves the
 * table on `ref` and cb_isa_error() says why. */
CB_API int cb_isa_limit(int isa);
CB_API int cb_isa_current(void);
CB_API const char *cb_isa_error(void);
/* "linear_q4=avx512vnni linear_f32=avx512 ..." for the log. */
CB_API const char *cb_dispatch_text(void);

/* ---- threads --------------------------------------------------------------------------------------------- */

/* One pool per process. Workers sleep when idle and spin for a few microseconds at most (COLIBRI_SPIN_US, 0..1000).
 * n = 0: one thread per physical core that this process may use (affinity mask and control-group quota respected).
 * n = 1: no workers at all. The caller's thread takes part in every job. Calls from several threads queue. */
typedef struct cb_pool cb_pool;
CB_API cb_pool *cb_pool_new(int n_threads);
CB_API int cb_pool_threads(const cb_pool *pool);
/* A pool that computes nothing: calls with it only take the scratch that they would take with n threads. What they point
 * to is not looked at, except a step's positions, sequences, block table and selection. */
CB_API cb_pool *cb_pool_new_dry(int n_threads);
/* Bytes that the pool holds for scratch: the most that its calls have taken so far. */
CB_API int64_t cb_pool_scratch_bytes(const cb_pool *pool);
/* What n = 0 means here and now. */
CB_API int cb_default_threads(void);
/* CPUs, rounded up, that control groups grant to the process whose /proc/PID/cgroup is `membership`, of versions 1 and 2 below
 * `root` (/sys/fs/cgroup); every group upwards counts. 0: no limit. */
CB_API int cb_quota_cpus(const char *membership, const char *root);
CB_API void cb_pool_free(cb_pool *pool);

/* What attention spends its time on. Scores take in reading the keys, values the sums that probabilities weigh; both happen
 * block by block, so their common time is divided as the threads spent theirs. */
enum { CB_PHASE_PROJECTIONS = 0, CB_PHASE_INDEXER = 1, CB_PHASE_SCORES = 2, CB_PHASE_VALUES = 3, CB_N_PHASES };
/* ns i64[CB_N_PHASES]: wall time of attention's calls with this pool since the last call of this function. */
CB_API void cb_pool_take_phases(cb_pool *pool, int64_t *ns);

/* ---- matrices -------------------------------------------------------------------------------------------- */

/* A packed matrix W[out, in], y = x W^T. Layout "tile16": ceil(out/16) row blocks; within a block the inputs in
 * order, the 16 rows of one input (or of four inputs) side by side, so that vector lanes are output rows.
 *   CB_F32, CB_BF16  [nb][in][16]                       no scales
 *   CB_Q8            [nb][ng][16 kq][16 rows][4] u8 = q + 128, input 64g + 4kq + j; scale f32 [nb*16], one per row
 *   CB_Q4            [nb][ng][ 8 kq][16 rows][4] u8, low nibble = q + 8 of input 64g + 4kq + j, high nibble = q + 8
 *                    of input 64g + 32 + 4kq + j; scale f16 [nb][ng][16], of either sign
 *   CB_Q8G32         weights as CB_Q8; scale f16 [nb][ng][2 halves][16], of either sign: one per row and 32 inputs
 *   CB_Q4G32         weights as CB_Q4, whose nibbles are the halves; scale as CB_Q8G32
 *   CB_MXFP4         as CB_Q4G32, but a nibble is an E2M1 code (sign, 2 bits of exponent, 1 of mantissa; 0 .5 1 1.5 2 3 4 6) and a
 *                    scale E8M0, u8 [nb][ng][2][16] = 2^(e - 127). 255, its NaN, reads as infinity.
 * nb = ceil(out/16), ng = ceil(in/64). Padding rows and inputs hold q = 0 (stored 128 / 8 / 0) and scale 0, or 0.0f.
 * Stacked matrices (one per head) lie one after another: matrix i starts i*cb_matrix_bytes(...) bytes on; the same
 * holds for their scales.
 * act says how activations enter: CB_ACT_Q8 (int8 per row and group of 64 inputs; only with formats that have scales) or
 * CB_ACT_F32. */
enum { CB_NONE = 0, CB_F32 = 1, CB_BF16 = 2, CB_Q8 = 3, CB_Q4 = 4, CB_Q8G32 = 5, CB_Q4G32 = 6, CB_MXFP4 = 7, CB_N_FORMATS };
enum { CB_ACT_F32 = 0, CB_ACT_Q8 = 1 };

typedef struct {
    const void *weight; /* 64-byte aligned */
    const void *scale;  /* NULL for CB_F32 / CB_BF16; 64-byte aligned */
    int64_t out, in;
    int32_t format; /* CB_NONE: the matrix is absent */
    int32_t act;
} cb_matrix;

/* Formats are numbered 1, 2, ... ; NULL for a number that is none. */
CB_API const char *cb_format_name(int format);
CB_API int64_t cb_weight_bytes(int format, int64_t out, int64_t in);
CB_API int64_t cb_scale_bytes(int format, int64_t out, int64_t in);

/* A matrix that lies row after row in `raw` (repack.c says how) and where it goes in `record`, as CB_Q4 or CB_Q8. `group`:
 * inputs per scale, a multiple of 64 (CB_Q4 alone), or 0: one scale a row. Scales are f32, or f16. Offsets are bytes. */
typedef struct {
    int32_t format, group, is_f16, unused;
    int64_t out, in;
    int64_t weight_from, scale_from, weight_to, scale_to;
} cb_repack_matrix;

/* Exact but for the scales of CB_Q4, which are rounded to f16. CB_ENONFINITE: a scale is none, or has no f16. */
CB_API int cb_repack(const cb_repack_matrix *matrices, int64_t n, const void *raw, void *record);

/* y f32[T, out] (row stride ldy) = x f32[T, in] (row stride ldx) times W^T. Quantises x by itself when act says so. */
CB_API int cb_linear(cb_pool *pool, const cb_matrix *m, const float *x, int64_t ldx, int64_t n_rows, float *y,
                     int64_t ldy);

/* Rows of a plain row-major table (the embedding): out f32[T, D]; format CB_F32, CB_BF16 or CB_Q8 (here int8 two's
 * complement [V, D] with scale f32[V]). CB_EINVAL when an id is outside 0..V-1. */
CB_API int cb_embed(const void *table, const float *scale, int format, int64_t vocab, int64_t hidden,
                    const int32_t *ids, int64_t n_rows, float *out);

/* ---- norms ----------------------------------------------------------------------------------------------- */

CB_API int cb_rmsnorm(cb_pool *pool, const float *x, int64_t ldx, const float *w, float eps, int64_t n_rows, int64_t n,
                      float *out, int64_t ldo);

/* x f32[n] becomes cap * tanh(x / cap); cap > 0. */
CB_API int cb_soft_cap(cb_pool *pool, float cap, int64_t n, float *x);

/* ---- feed-forward ---------------------------------------------------------------------------------------- */

/* What stands between the projections; g = gate h, u = up h, L = limit.
 *   CB_INNER_SILU     silu(g) * u
 *   CB_INNER_CLAMPED  silu(min(g, L)) * clamp(u, -L, L)
 *   CB_INNER_SWIGLU   with g and u clamped like that: g * sigmoid(1.702 g) * (u + 1)
 *   CB_INNER_GELU     gelu(g) * u, the form with tanh */
enum { CB_INNER_SILU = 0, CB_INNER_CLAMPED = 1, CB_INNER_SWIGLU = 2, CB_INNER_GELU = 3 };

typedef struct {
    cb_matrix gate, up, down;                          /* [F, D], [F, D], [D, F] */
    const float *gate_bias, *up_bias, *down_bias;      /* f32[F], f32[F], f32[D]; NULL = 0 */
    int32_t function;
    float limit;
} cb_ffn;

/* y f32[T, D] += down(inner(gate h, up h)), h f32[T, D]: a dense layer (add != 0), or y = ... (add == 0). */
CB_API int cb_ffn_forward(cb_pool *pool, const cb_ffn *ffn, const float *h, int64_t n_rows, int add, float *y);

/* One expert's share of a batch: the rows of h that chose it, in ascending order. */
typedef struct {
    cb_ffn ffn;          /* points into the expert's slot */
    const int32_t *rows; /* [n_rows] indices into h */
    const int32_t *out;  /* [n_rows] indices into parts: where row i's result goes */
    int64_t n_rows;
} cb_expert_job;

/* parts f32[n_parts, D]: parts[out[i]] = ffn(h[rows[i]]) for every job; h f32[n_rows, D]. All jobs have the same D and F.
 * Results do not depend on how jobs are grouped into calls. An index outside h or parts is CB_EINVAL. */
CB_API int cb_expert_ffn(cb_pool *pool, const cb_expert_job *jobs, int64_t n_jobs, const float *h, int64_t n_rows,
                         float *parts, int64_t n_parts);

/* mixed f32[T, D] = shared f32[T, D] (or 0 when NULL) + sum over k of weight[t,k] * parts[t*K + k], k in ascending
 * expert id as given in order i32[T, K] (a permutation of 0..K-1 per row). The routed sum comes first, shared last.
 * CB_ENONFINITE when a result is not finite; *bad_row then names the first such row. */
CB_API int cb_expert_reduce(cb_pool *pool, const float *parts, const float *weight, const int32_t *order,
                            const float *shared, int64_t n_rows, int64_t k, int64_t hidden, float *mixed,
                            int64_t *bad_row);

/* ---- gate (src/gate.c defines it) -------------------------------------------------------------------------- */

/* What makes scores of the logits: each by itself, or all of a row together. */
enum { CB_GATE_SIGMOID = 0, CB_GATE_SOFTMAX = 1 };

typedef struct {
    cb_matrix weight;  /* [E, D], CB_F32, CB_ACT_F32 */
    const float *bias; /* f32[E]: chooses, never weighs; NULL = 0 */
    int32_t n_experts, k, n_group, topk_group, norm_topk;
    float scaling;
    const float *logit_bias;   /* f32[E]: added to the logits; NULL = 0 */
    const float *expert_scale; /* f32[E]: on the weights of the chosen, last; NULL = 1 */
    int32_t scoring, pad_;
} cb_gate;

/* ids i32[T, K] ascending, weights f32[T, K] in the same order. Ties choose the lower id. CB_ENONFINITE names the
 * first row whose scores are not finite in *bad_row (such rows get NaN weights; the others are complete). */
CB_API int cb_gate_forward(cb_pool *pool, const cb_gate *gate, const float *h, int64_t n_rows, int32_t *ids,
                           float *weights, int64_t *bad_row);

/* ---- attention ------------------------------------------------------------------------------------------- */

enum { CB_INDEX_NONE = 0, CB_INDEX_FULL = 1, CB_INDEX_SHARED = 2 };

/* One layer's weights: absorbed MLA (docs/numerics.md). k_b and v_b are stacks of H matrices made from
 * kv_b_proj at conversion: k_b[h] [R, nope] folds a query into the latent space, v_b[h] [v, R] reads it back. */
typedef struct {
    int32_t hidden, n_heads, q_rank, kv_rank, nope, rope, v_dim;
    int32_t rope_interleave;
    float rms_eps, latent_eps, softmax_scale;
    int32_t index_kind, index_heads, index_dim, index_topk, index_rope_interleave;
    int32_t pad_;
    const float *inv_freq;   /* f32[rope/2], YaRN already applied */
    float rope_amplitude;    /* on cos and sin */
    float index_norm_eps;    /* 1e-6 */
    const float *input_norm, *q_a_norm, *kv_a_norm, *post_norm;
    cb_matrix q_a, q_b, kv_a, k_b, v_b, o; /* q_a absent: q_b maps hidden directly */
    cb_matrix index_wq_b, index_wk, index_weights;
    const float *index_k_norm_w, *index_k_norm_b;
} cb_attn_layer;

/* How cached values are kept. f32 and bf16: [n_blocks][CB_KV_BLOCK][width]. int8: values in one byte, with a bf16 scale for each 64
 * of a vector, whose bytes are filled up to a multiple of 4 (w). Latents: per block u8 [CB_KV_BLOCK][w], value + 128, then scales
 * [CB_KV_BLOCK][ceil(width / 64)]. Keys of the indexer: u8 [w / 4][CB_KV_BLOCK][4], value + 128, then scales [ceil(width / 64)]
 * [CB_KV_BLOCK]. */
enum { CB_KV_F32 = 0, CB_KV_BF16 = 1, CB_KV_INT8 = 2 };
/* Bytes of one position's vector of `width` values; CB_EINVAL for a format or width that is none. A block has CB_KV_BLOCK times as
 * many. */
CB_API int64_t cb_kv_row_bytes(int format, int64_t width);

/* One step's rows for one layer. Row t belongs to table row seq[t] and stands at position[t]; its keys are the cached
 * positions 0..position[t] of that table. Rows of one sequence are in ascending position. The call first writes the
 * latents (and index keys) of all rows into the cache, then attends. */
typedef struct {
    int64_t n_rows;
    const int32_t *position;    /* [T] */
    const int32_t *seq;         /* [T] */
    const int32_t *block_table; /* [n_sequences, table_stride] block numbers */
    int64_t table_stride;
    int64_t n_blocks;           /* blocks in the cache: a number outside is CB_EINVAL */
    void *kv;                   /* this layer's blocks of width kv_rank + rope in kv_format */
    void *index_k;              /* this layer's blocks of width index_dim in kv_format, or NULL */
    int32_t kv_format;
    int32_t n_sequences;        /* a seq outside is CB_EINVAL */
    int32_t *selected;          /* [T, index_topk] ascending positions, written by full layers, read by shared ones */
    int32_t *n_selected;        /* [T]; -1 = all positions up to the row's own */
    float *x;                   /* f32[T, D] residual stream, in and out */
    float *hidden;              /* f32[T, D] out: RMSNorm(x after attention, post_norm) */
    /* Of layers that keep a state (below); the others do not look at it. */
    void *state;                /* this layer's slots, two for each state */
    void *records;              /* of drafted rows, [n_states][2][n_drafts] */
    const int32_t *state_of;    /* [n_sequences]: which state a table row's sequence has */
    int32_t n_states, n_drafts;
} cb_attn_step;

/* x += attention(RMSNorm(x, input_norm)); hidden = RMSNorm(x, post_norm). Scratch comes from the pool and is kept
 * there between calls. */
CB_API int cb_attn_forward(cb_pool *pool, const cb_attn_layer *layer, const cb_attn_step *step);

/* How queries and keys are normed before they turn: not at all, per head (weights [head_dim]), or as one vector over all
 * heads (q_norm [H * head_dim], k_norm [n_kv_heads * head_dim]). */
enum { CB_QK_NORM_NONE = 0, CB_QK_NORM_HEAD = 1, CB_QK_NORM_WHOLE = 2 };

/* One layer's weights: grouped-query attention (docs/numerics.md). Query head h reads key head h / (H / n_kv_heads).
 * Biases, sinks, out_norm may be NULL; v absent: values are the keys as projected, before bias, norm and rope. */
typedef struct {
    int32_t hidden, n_heads, n_kv_heads, head_dim;
    int32_t rope;            /* leading components that turn */
    int32_t rope_interleave;
    int32_t window;          /* keys a row sees, its own included; 0 = all */
    int32_t qk_norm;
    int32_t value_norm;      /* values are divided by their root mean square, per head */
    float clip;              /* q, k, v are clamped to +-clip after the norm; 0 = not */
    float rms_eps, softmax_scale, rope_amplitude;
    int32_t pad_;
    const float *inv_freq;   /* f32[rope/2] */
    const float *input_norm, *q_norm, *k_norm, *post_norm;
    const float *out_norm;   /* f32[D]: RMSNorm of the output projection before it joins x */
    const float *q_bias, *k_bias, *v_bias, *o_bias;
    const float *sinks;      /* f32[H]: one more logit of each head's softmax, without a value */
    cb_matrix q, k, v, o;    /* [H * head_dim, D], [n_kv_heads * head_dim, D] twice, [D, H * head_dim] */
    cb_matrix gate;          /* [H * head_dim, D]: its sigmoid is on what the heads give; may be absent */
} cb_gqa_layer;

/* As cb_attn_forward. step->kv is [n_blocks][n_kv_heads][2 * CB_KV_BLOCK * head_dim] in kv_format: keys component by
 * component ([head_dim][CB_KV_BLOCK]), then values ([CB_KV_BLOCK][head_dim]). CB_KV_INT8: keys as those of the indexer without their
 * scales, values s8 [CB_KV_BLOCK / 4][w][4], positions j, j + 16, j + 32, j + 48 of a component side by side, then the scales of keys
 * and of values, [ceil(head_dim / 64)][CB_KV_BLOCK] each. index_k, selected and n_selected are not used. Blocks wholly outside a row's window are not looked up. */
CB_API int cb_gqa_forward(cb_pool *pool, const cb_gqa_layer *layer, const cb_attn_step *step);

/* ---- gated delta rule ------------------------------------------------------------------------------------------ */

/* One layer's weights: a causal convolution over few positions and a state that each token rewrites (docs/numerics.md).
 * K key heads of dk, V value heads of dv (multiples of 16; V a multiple of K), C = 2 K dk + V dv channels: queries, keys, values.
 * Value head h reads key head h / (V / K). */
typedef struct {
    int32_t hidden, n_key_heads, n_value_heads, key_dim, value_dim, taps;
    float rms_eps;
    int32_t pad_;
    const float *input_norm, *post_norm, *norm; /* f32[D], f32[D], f32[dv] */
    const float *a_log, *dt_bias;               /* f32[V] */
    cb_matrix qkv, z, a, b, out; /* [C, D], [V dv, D], [V, D] twice, [D, V dv] */
    cb_matrix conv;              /* [C, taps], CB_F32 */
} cb_delta_layer;

/* f32 values of one slot: its head (64 bytes), the last taps - 1 inputs of the convolution, S[V][dk][dv]; and of one record.
 * CB_EINVAL for sizes that are none. */
CB_API int64_t cb_delta_state_values(const cb_delta_layer *layer);
CB_API int64_t cb_delta_record_values(const cb_delta_layer *layer);

/* As cb_attn_forward; positions of a sequence follow each other without a gap, and all its rows are together.
 *
 * A state has two slots. A call reads the one that belongs to its first position and rewrites the other, so it may be done again
 * after it was cut off anywhere: a slot is valid only from its last write on. The last n_drafts rows of a sequence (all but the
 * first, where they are fewer) are kept as records instead: the next call starts at any position behind the first of them, and
 * takes in the records up to there. A sequence's first position is 0. CB_EINVAL when no slot belongs to a first position. */
#define CB_DELTA_MAX_DRAFTS 64
CB_API int cb_delta_forward(cb_pool *pool, const cb_delta_layer *layer, const cb_attn_step *step);

/* y f32[T, D], row by row times sigmoid(gate h): gate [1, D] CB_F32, h f32[T, D]. */
CB_API int cb_gate_rows(cb_pool *pool, const cb_matrix *gate, const float *h, int64_t n_rows, float *y);

/* The largest n of scores f32[n], ascending positions into out i32[min(k, n)]; ties prefer the lower position; linear
 * time. A NaN counts as less than every number; 0 and -0 are equal. Returns the count. */
CB_API int64_t cb_topk(const float *scores, int64_t n, int64_t k, int32_t *out);

/* ---- sampling -------------------------------------------------------------------------------------------- */

/* The number that belongs to (seed, position): uniform in [0, 1), Philox-4x32-10 (Salmon et al., SC'11). */
CB_API double cb_uniform(uint64_t seed, uint64_t position);
/* Its block function, for known-answer tests. */
CB_API void cb_philox4x32(const uint32_t counter[4], const uint32_t key[2], uint32_t out[4]);
/* temperature 0: arg max, lower id on ties. Otherwise p = exp((logit - max) / temperature) in f64, Z = sum of p by
 * ascending id; ids in descending order of logit (lower id first on ties); cut after the shortest prefix whose sum
 * reaches top_p * Z; the first id whose running sum passes u * (sum of the prefix). -infinity never comes up (a grammar
 * mask). Returns the id; CB_ENONFINITE on NaN, +infinity or nothing but -infinity; CB_EINVAL unless temperature >= 0,
 * 0 <= top_p <= 1, 0 <= u < 1. */
CB_API int cb_sample(const float *logits, int64_t vocab, double temperature, double top_p, double u);
/* log_softmax(logits) in f64 rounded to f32; out f32[V]. Errors as cb_sample. */
CB_API int cb_log_softmax(const float *logits, int64_t vocab, float *out);

/* ---- checksums ------------------------------------------------------------------------------------------- */

/* XXH64 (Collet) of n bytes, seed 0. */
CB_API uint64_t cb_hash64(const void *data, int64_t n);

/* ---- read pool ------------------------------------------------------------------------------------------- */

/* Aligned reads into slots, in pieces of which at most `depth` are in flight. Demand pieces always start before speculative
 * ones; no speculative piece starts while bytes of a demand read are missing. Completion makes `fd` readable (eventfd). */
typedef struct cb_reader cb_reader;

enum { CB_READ_DEMAND = 0, CB_READ_SPECULATIVE = 1 };

typedef struct {
    uint64_t tag;      /* the caller's name for the read */
    int64_t bytes;     /* bytes that arrived */
    int64_t wanted;
    int64_t start_ns, end_ns; /* CLOCK_MONOTONIC of the first piece's start and the last piece's end */
    int32_t error;     /* 0, or errno of the last attempt; ENODATA = the file is shorter than it must be */
    int32_t cancelled; /* 1: cb_reader_cancel came first; the target's bytes are undefined */
    uint64_t checksum; /* cb_hash64 of the whole range when asked for, else 0 */
} cb_read_done;

typedef struct {
    int64_t bytes_demand, bytes_speculative; /* as the kernel was asked and delivered, direct and buffered */
    int64_t n_reads, n_retries, n_short;
    int64_t busy_ns;   /* time with at least one piece in flight */
} cb_read_counters;

/* Who asks the system: threads in pread(2), or io_uring, which some kernels and most containers forbid. */
enum { CB_READ_THREADS = 0, CB_READ_URING = 1 };
#define CB_READ_MAX_PIECE ((int64_t)1 << 30)

/* Pieces: multiples of 4096; 0 = 2 MiB for demand, of that at most 1 MiB for speculation, so that demand waits for little.
 * depth: 1 .. 64. Where io_uring is refused the threads read. NULL when an argument or the system says no. */
CB_API cb_reader *cb_reader_new(int engine, int depth, int64_t piece_bytes, int64_t speculative_piece_bytes);
/* The engine at work. */
CB_API int cb_reader_engine(const cb_reader *reader);
/* 0 when io_uring can be used now, else the errno that says why not (ENOSYS, EPERM, EOPNOTSUPP: too old, ...). */
CB_API int cb_uring_refusal(void);
CB_API int cb_reader_fd(const cb_reader *reader);
/* fd opened by the caller (O_DIRECT or not; offset, bytes and target must then be multiples of 4096). Transient errors
 * (EINTR, EAGAIN, EIO) and short reads are retried three times. CB_EINVAL also when a read of this tag is pending. */
CB_API int cb_reader_submit(cb_reader *reader, uint64_t tag, int fd, int64_t offset, int64_t bytes, void *target,
                            int priority, int want_checksum);
/* A read of several ranges that is put together from them: byte `offset` of the file comes to byte `at` of a stage, and when
 * all are there the matrices are repacked from the stage to the target. With direct reads a range is widened to whole sectors,
 * so `at` must have the same distance from a multiple of 4096 as `offset`, and sectors of the stage belong to one range. */
typedef struct {
    int64_t offset, bytes, at;
    int32_t fd, unused;
} cb_read_extent;

/* Memory of the caller's for n (1..64) reads of this kind at a time, `bytes` (a multiple of 4096) each; others wait. Before the
 * first of them, once. */
CB_API int cb_reader_stages(cb_reader *reader, void *memory, int n, int64_t bytes);
/* As cb_reader_submit; no checksum. What can't be repacked ends with the error EILSEQ. */
CB_API int cb_reader_submit_extents(cb_reader *reader, uint64_t tag, const cb_read_extent *extents, int n_extents,
                                    const cb_repack_matrix *matrices, int n_matrices, void *target, int priority);
/* Speculative -> demand: somebody waits for it now. CB_EINVAL when no such read is pending. */
CB_API int cb_reader_promote(cb_reader *reader, uint64_t tag);
/* No further piece starts; the read still ends in a cb_read_done. CB_EINVAL when no such read is pending. */
CB_API int cb_reader_cancel(cb_reader *reader, uint64_t tag);
/* Up to n finished reads; clears the eventfd when it leaves none behind. Returns the count. */
CB_API int64_t cb_reader_take(cb_reader *reader, cb_read_done *out, int64_t n);
CB_API void cb_reader_counters(cb_reader *reader, cb_read_counters *out);
/* Waits for pieces in flight, forgets what is pending or was not taken. */
CB_API void cb_reader_free(cb_reader *reader);
/* Tests only, for all readers; NULL takes them away. `starting` is told what the system is about to be asked for; `ended`
 * what it said (bytes, or -errno) and returns what the reader is to believe. Both engines really read in between. */
typedef void (*cb_read_starting_fn)(int64_t offset, int64_t bytes);
typedef int64_t (*cb_read_ended_fn)(int64_t offset, int64_t bytes, void *target, int64_t result);
CB_API void cb_reader_hooks_for_test(cb_read_starting_fn starting, cb_read_ended_fn ended);

/* ---- limits of the machine (colibri bench) ----------------------------------------------------------------- */

/* What the kernels' speed is compared with, on the same threads. *ns: wall time from the first item to the last.
 * cb_probe_read reads `bytes` (a multiple of 64, 64-byte aligned) once, in order; `ahead` != 0 prefetches by software too.
 * cb_probe_ops multiplies and adds on registers alone with the highest instruction in use for its kind; *ops counts a
 * multiplication and an addition as two. One item takes some ten microseconds. */
enum {
    CB_PROBE_F32 = 0,
    CB_PROBE_I8 = 1, /* int8 x int8, exact in i32 */
    CB_PROBE_I4 = 2  /* 4-bit weights x int8: some instruction sets can add several products in i16 */
};
CB_API int cb_probe_read(cb_pool *pool, const void *buffer, int64_t bytes, int ahead, int64_t *ns);
CB_API int cb_probe_ops(cb_pool *pool, int kind, int64_t n_items, int64_t *ops, int64_t *ns);

/* ---- memory and process ---------------------------------------------------------------------------------- */

/* Private anonymous memory, 2 MiB aligned, MADV_HUGEPAGE; NULL on failure. */
CB_API void *cb_huge_alloc(int64_t bytes);
CB_API void cb_huge_free(void *p, int64_t bytes);
/* The first `bytes` of a file of a memory file system (tmpfs, hugetlbfs), shared, 2 MiB aligned, MADV_HUGEPAGE; the file must
 * have as many bytes rounded up to 2 MiB. NULL on failure. Given back by cb_huge_free with the rounded size. */
CB_API void *cb_huge_map(int fd, int64_t bytes, int is_writable);
/* Every page of the range is there afterwards (to be written, or as the file has it): where there is no room for it, this says
 * so and not a signal later. CB_ENOMEM, CB_ESYS. */
CB_API int cb_huge_populate(void *p, int64_t bytes, int is_writable);
/* Gives the memory of a range (whole 4096-byte pages) back to the system; it stays mapped and reads as zeroes. is_shared: of a
 * cb_huge_map, whose file has a hole there then. */
CB_API int cb_huge_release(void *p, int64_t bytes, int is_shared);

#ifdef __cplusplus
}
#endif
#endif
