/* driver.c, for tests only: every rung that the library offers where this runs, against the reference, and one checksum
 * per family of cases that must be the same on every architecture.
 *
 * It is the kernels' test for architectures whose library Python cannot load: built by a cross compiler and run by
 * qemu-user (tests/checkasm/test_cross.py). It uses the public functions alone. Cases are made from integers, so that
 * their values do not depend on a C library. Inputs end at an inaccessible page, outputs start as NaN between canaries.
 * With an argument the weights change behind the reference's back, and it must fail. */
#include "colibri.h"

#include <fcntl.h>
#include <math.h>
#include <poll.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define MIN(a, b) ((a) < (b) ? (a) : (b))
#define N_ISAS 16

static int n_failures, n_comparisons;
static int is_full; /* every size: argument "full" */
static bool is_disturbed; /* the tested rungs get one wrong weight: the comparison must notice */

static void fail(const char *format, ...)
{
    va_list args;
    if (n_failures++ >= 100)
        return;
    va_start(args, format);
    printf("FAIL ");
    vprintf(format, args);
    printf("\n");
    va_end(args);
}

static void must(int status, const char *what)
{
    if (status < 0)
        fail("%s: %s", what, cb_status_text(status));
}

/* ---- memory that notices ---------------------------------------------------------------------------------- */

#define MAX_AREAS 64
#define CANARIES 32
#define CANARY -123456.75f

static struct {
    char *base;
    size_t bytes;
} areas[MAX_AREAS];
static int n_areas;

/* n bytes, zeroed, whose end lies against an inaccessible page (closer than `align`). Lives until release_all. */
static void *guarded(int64_t n, int64_t align)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE), size = ((size_t)n + page - 1) / page * page;
    char *base = mmap(NULL, size + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base == MAP_FAILED || mprotect(base + size, page, PROT_NONE) || n_areas == MAX_AREAS) {
        printf("FAIL no memory for a case\n");
        exit(1);
    }
    areas[n_areas].base = base;
    areas[n_areas++].bytes = size + page;
    return base + (size - (size_t)n) / (size_t)align * (size_t)align;
}

static void release_to(int n)
{
    while (n_areas > n) {
        n_areas--;
        munmap(areas[n_areas].base, areas[n_areas].bytes);
    }
}

static void release_all(void) { release_to(0); }

/* n floats of NaN behind canaries, against an inaccessible page. */
static float *output(int64_t n)
{
    float *whole = guarded((n + CANARIES) * 4, 4);
    for (int64_t i = 0; i < n + CANARIES; i++)
        whole[i] = i < CANARIES ? CANARY : NAN;
    return whole + CANARIES;
}

static void check_canaries(const float *out, const char *what)
{
    for (int i = 1; i <= CANARIES; i++)
        if (out[-i] != CANARY) {
            fail("%s: wrote in front of the output", what);
            return;
        }
}

static uint32_t bits_of(float f)
{
    uint32_t u;
    memcpy(&u, &f, sizeof u);
    return f != f ? 0x7fc00000u : u; /* which NaN comes out is the processor's choice */
}

static bool same(const float *got, const float *want, int64_t n, const char *format, ...)
{
    n_comparisons++;
    for (int64_t i = 0; i < n; i++)
        if (bits_of(got[i]) != bits_of(want[i])) {
            char what[160];
            va_list args;
            va_start(args, format);
            vsnprintf(what, sizeof what, format, args);
            va_end(args);
            fail("%s: value %lld is %a, reference %a", what, (long long)i, (double)got[i], (double)want[i]);
            return false;
        }
    return true;
}

static bool differ(const float *a, const float *b, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        if (bits_of(a[i]) != bits_of(b[i]))
            return true;
    return false;
}

static uint64_t sum_of_family; /* FNV-1a over the reference's results */

static void count_in(const float *v, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        uint32_t u = bits_of(v[i]);
        for (int j = 0; j < 4; j++)
            sum_of_family = (sum_of_family ^ (u >> 8 * j & 255)) * 0x100000001b3u;
    }
}

/* ---- values ----------------------------------------------------------------------------------------------- */

static uint64_t seed;

static uint64_t next(void)
{
    uint64_t z = seed += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

/* Uniform in [-1, 1), 24 bits. */
static float value(void) { return (float)((int32_t)(next() >> 40) - (1 << 23)) * 0x1p-23f; }

static float *values(int64_t n, float size)
{
    float *x = guarded(n * 4, 4);
    for (int64_t i = 0; i < n; i++)
        x[i] = value() * size;
    return x;
}

static float *positive(int64_t n)
{
    float *x = values(n, 1.0f);
    for (int64_t i = 0; i < n; i++)
        x[i] = 0.5f + 0.5f * fabsf(x[i]);
    return x;
}

/* A random packed matrix; results of its products are about as large as the inputs. fill < 0: random codes. */
static cb_matrix random_matrix(int format, int act, int64_t out, int64_t in, int fill)
{
    int64_t bytes = cb_weight_bytes(format, out, in), scale_bytes = cb_scale_bytes(format, out, in);
    uint8_t *w = guarded(bytes, 64), *s = scale_bytes ? guarded(scale_bytes, 64) : NULL;
    float size = 1.0f / (float)(1 << (in > 512 ? 4 : in > 32 ? 3 : 1));
    for (int64_t i = 0; i < bytes; i++)
        w[i] = (uint8_t)(fill < 0 ? next() >> 56 : (uint64_t)fill);
    for (int64_t i = 0; format == CB_F32 && i < bytes / 4; i++)
        ((float *)w)[i] = value() * size;
    for (int64_t i = 0; format == CB_BF16 && i < bytes / 2; i++)
        ((uint16_t *)w)[i] = (uint16_t)(bits_of(value() * size) >> 16);
    for (int64_t i = 0; format == CB_Q8 && i < scale_bytes / 4; i++)
        ((float *)s)[i] = (0.5f + 0.5f * fabsf(value())) * size / 64;
    bool is_f16 = format == CB_Q4 || format == CB_Q4G32 || format == CB_Q8G32;
    for (int64_t i = 0; format == CB_MXFP4 && i < scale_bytes; i++) /* 2^-7 .. 2^-4, or denormal */
        s[i] = (uint8_t)(next() % 16 ? 120 + next() % 4 : next() % 3);
    for (int64_t i = 0; is_f16 && i < scale_bytes / 2; i++) { /* f16 of either sign: 2^-5 .. 2^-4, or a denormal */
        uint64_t sign = next() >> 63 << 15;
        ((uint16_t *)s)[i] = (uint16_t)(sign | (next() % 16 ? 10 << 10 : 0));
        ((uint16_t *)s)[i] |= (uint16_t)(next() >> 54);
    }
    return (cb_matrix){.weight = w, .scale = s, .out = out, .in = in, .format = format, .act = act};
}

/* One weight (output 5, input k) a little off: 1 % of a float, one code of the others. */
static void disturb(const cb_matrix *m, int64_t k)
{
    uint8_t *w = (uint8_t *)m->weight;
    int64_t g = k / 64, j = k % 64;
    switch (m->format) {
    case CB_F32: ((float *)w)[k * 16 + 5] *= 1.01f; break;
    case CB_BF16: ((uint16_t *)w)[k * 16 + 5] ^= 2; break;
    case CB_Q8G32:
    case CB_Q8: w[g * 1024 + j / 4 * 64 + 5 * 4 + j % 4] ^= 1; break;
    case CB_MXFP4:
    case CB_Q4G32:
    case CB_Q4: w[g * 512 + j % 32 / 4 * 64 + 5 * 4 + j % 4] ^= j < 32 ? 1 : 16; break;
    }
}

static const struct {
    int format, act;
    const char *name;
} kinds[] = {{CB_F32, CB_ACT_F32, "f32-f32"}, {CB_BF16, CB_ACT_F32, "bf16-f32"}, {CB_Q8, CB_ACT_F32, "q8-f32"},
             {CB_Q4, CB_ACT_F32, "q4-f32"},   {CB_Q8, CB_ACT_Q8, "q8-q8"},       {CB_Q4, CB_ACT_Q8, "q4-q8"},
             {CB_Q8G32, CB_ACT_F32, "q8g32-f32"}, {CB_Q4G32, CB_ACT_F32, "q4g32-f32"}, {CB_MXFP4, CB_ACT_F32, "mxfp4-f32"},
             {CB_Q8G32, CB_ACT_Q8, "q8g32-q8"},   {CB_Q4G32, CB_ACT_Q8, "q4g32-q8"},   {CB_MXFP4, CB_ACT_Q8, "mxfp4-q8"}};
#define N_KINDS 12

/* ---- rungs ------------------------------------------------------------------------------------------------ */

static int rungs[N_ISAS], n_rungs;
static char rung_names[N_ISAS][16];
static cb_pool *pools[4]; /* by number of threads */

static void find_rungs(void)
{
    char text[128];
    snprintf(text, sizeof text, "%s", cb_isa_available());
    for (char *name = strtok(text, ","); name; name = strtok(NULL, ","))
        snprintf(rung_names[n_rungs++], sizeof rung_names[0], "%s", name);
    int n = 0;
    for (int isa = 0; isa < N_ISAS && n < n_rungs; isa++)
        if (cb_isa_limit(isa) == CB_OK)
            rungs[n++] = isa;
    if (n != n_rungs)
        fail("%d rungs are named, %d can be chosen", n_rungs, n);
}

static void use(int rung) { must(cb_isa_limit(rungs[rung]), "cb_isa_limit"); }

/* ---- linear ----------------------------------------------------------------------------------------------- */

static float *linear(const cb_matrix *m, const float *x, int64_t ldx, int64_t rows, int64_t ldy, int threads,
                     const char *what)
{
    float *y = output(rows * ldy);
    must(cb_linear(pools[threads], m, x, ldx, rows, y, ldy), what);
    check_canaries(y, what);
    for (int64_t r = 0; r < rows; r++)
        for (int64_t o = m->out; o < ldy; o++)
            if (y[r * ldy + o] == y[r * ldy + o]) {
                fail("%s: wrote beside the output's columns", what);
                return y;
            }
    return y;
}

static void linear_sizes(int rung, int kind)
{
    static const int64_t ins[] = {1, 24, 63, 64, 65, 136, 700}, outs[] = {1, 15, 16, 17, 80};
    static const int64_t rows[] = {1, 2, 3, 4, 6, 9, 19};
    for (int i = 0; i < 7; i++)
        for (int o = 0; o < 5; o++) {
            if (ins[i] * outs[o] > 20000) /* the longest rows with the odd counts of outputs */
                continue;
            if (!is_full && (i + o) % 2)
                continue;
            int64_t ldx = ins[i] + (o == 1 ? 3 : 0), ldy = outs[o] + (o == 1 ? 5 : 0);
            seed = (uint64_t)(kind * 100 + i * 10 + o);
            cb_matrix m = random_matrix(kinds[kind].format, kinds[kind].act, outs[o], ins[i], -1);
            float *x = values(19 * ldx, 4.0f);
            use(0);
            float *want = linear(&m, x, ldx, 19, ldy, 1, "reference");
            if (rung == 0)
                for (int r = 0; r < 19; r++)
                    count_in(want + r * ldy, m.out);
            use(rung);
            if (is_disturbed)
                disturb(&m, 0);
            for (int r = 0; r < 7; r++) {
                float *own = guarded(rows[r] * ldx * 4, 4);
                memcpy(own, x, (size_t)(rows[r] * ldx) * 4);
                float *got = linear(&m, own, ldx, rows[r], ldy, 1, kinds[kind].name);
                if (!same(got, want, rows[r] * ldy, "%s %s [%d, %d] x %d rows", rung_names[rung], kinds[kind].name,
                          (int)outs[o], (int)ins[i], (int)rows[r])) {
                    release_all();
                    return;
                }
            }
            release_all();
        }
}

static void linear_row_counts(int rung, int kind)
{
    static const int64_t more[] = {63, 64, 65, 127, 128, 129, 255, 256, 257, 511, 512};
    int64_t in = 72, out = 20;
    seed = 77;
    cb_matrix m = random_matrix(kinds[kind].format, kinds[kind].act, out, in, -1);
    float *x = values(512 * in, 1.0f);
    use(0);
    float *want = linear(&m, x, in, 512, out, 1, "reference");
    if (rung == 0)
        count_in(want, 512 * out);
    use(rung);
    for (int i = 0; i < 40 + 11; i++) {
        int64_t rows = i < 40 ? i + 1 : more[i - 40];
        int kept = n_areas;
        float *got = linear(&m, x, in, rows, out, 1 + i % 3, kinds[kind].name);
        same(got, want, rows * out, "%s %s %d rows", rung_names[rung], kinds[kind].name, (int)rows);
        float *one = linear(&m, x + (rows - 1) * in, in, 1, out, 1, kinds[kind].name);
        same(one, want + (rows - 1) * out, out, "%s %s row %d alone", rung_names[rung], kinds[kind].name, (int)rows - 1);
        release_to(kept);
    }
    release_all();
}

static void fill_special(float *x, int64_t n, int special)
{
    static const float ties[] = {0.5f, -0.5f, 1.5f, 2.5f, -63.5f, 127.0f, -126.5f, 64.0f};
    for (int64_t i = 0; i < n; i++) {
        float v = value();
        switch (special) {
        case 0: x[i] = v < 0 ? -3e38f : 3e38f; break;
        case 1: x[i] = v < 0 ? -1e-42f : v < 0.5f ? 1e-45f : 0.0f; break;
        case 2: x[i] = v < 0 ? -2e-38f : v < 0.5f ? 3e-37f : 0.0f; break;
        case 3: x[i] = -0.37f; break;
        case 4: x[i] = 0.0f; break;
        case 5: x[i] = -0.0f; break;
        case 6: x[i] = v * (float)((next() & 1) ? 0x1p60 : 0x1p-60); break;
        case 7: x[i] = ties[next() % 8]; break;
        case 8: x[i] = i % 61 == 0 ? NAN : v; break;
        case 9: x[i] = i % 97 == 0 ? INFINITY : v; break;
        }
    }
}

static void linear_extremes(int rung, int kind)
{
    static const int fills[] = {-1, 0x00, 0xff, 0x0f, 0xf0, 0x80, 0x7f};
    int64_t in = 200, out = 33, rows = 18;
    bool packed = kinds[kind].format >= CB_Q8;
    for (int f = 0; f < (packed ? 7 : 1); f++)
        for (int special = 0; special < 10; special++) {
            seed = (uint64_t)(kind * 1000 + f * 10 + special);
            cb_matrix m = random_matrix(kinds[kind].format, kinds[kind].act, out, in, fills[f]);
            float *x = guarded(rows * in * 4, 4);
            fill_special(x, rows * in, special);
            use(0);
            float *want = linear(&m, x, in, rows, out, 1, "reference");
            if (rung == 0)
                count_in(want, rows * out);
            use(rung);
            same(linear(&m, x, in, rows, out, 1, kinds[kind].name), want, rows * out, "%s %s fill %d special %d",
                 rung_names[rung], kinds[kind].name, fills[f], special);
            release_all();
        }
}

static void linear_disturbed(int rung, int kind)
{
    int64_t in = 192, out = 32, rows = 18;
    seed = 5;
    cb_matrix m = random_matrix(kinds[kind].format, kinds[kind].act, out, in, -1);
    float *x = values(rows * in, 1.0f);
    for (int64_t r = 0; r < rows; r++)
        x[r * in + 100] = 1.0f; /* must not be rounded to zero */
    use(rung);
    float *before = linear(&m, x, in, rows, out, 1, kinds[kind].name);
    disturb(&m, 100);
    float *after = linear(&m, x, in, rows, out, 1, kinds[kind].name);
    for (int64_t r = 0; r < rows; r++)
        for (int64_t o = 0; o < out; o++)
            if (differ(before + r * out + o, after + r * out + o, 1) != (o == 5))
                fail("%s %s: a disturbed weight must change output 5 and no other, row %d output %d", rung_names[rung],
                     kinds[kind].name, (int)r, (int)o);
    release_all();
}

static void family_linear(int rung)
{
    for (int kind = 0; kind < N_KINDS; kind++) {
        linear_sizes(rung, kind);
        linear_row_counts(rung, kind);
        linear_extremes(rung, kind);
        linear_disturbed(rung, kind);
    }
}

/* ---- experts: inner functions, biases, gathered and scattered rows, quantising between ------------------------------------------ */

static void family_experts(int rung)
{
    static const int64_t sizes[][2] = {{16, 16}, {136, 72}, {65, 17}};
    for (int kind = 0; kind < N_KINDS; kind++)
        for (int size = 0; size < 3; size++) {
            int64_t hidden = sizes[size][0], inner = sizes[size][1], n = 45, n_parts = 100;
            int32_t rows[2][45], out[2][45];
            cb_expert_job jobs[2];
            seed = (uint64_t)(kind * 10 + size);
            memset(jobs, 0, sizeof jobs);
            for (int j = 0; j < 2; j++) {
                jobs[j].ffn.function = (kind + size + 2 * j) % (CB_INNER_GELU + 1);
                jobs[j].ffn.limit = 3.0f;
                if (j) {
                    jobs[j].ffn.gate_bias = values(inner, 0.5f);
                    jobs[j].ffn.up_bias = values(inner, 0.5f);
                    jobs[j].ffn.down_bias = values(hidden, 0.5f);
                }
                jobs[j].ffn.gate = random_matrix(kinds[kind].format, kinds[kind].act, inner, hidden, -1);
                jobs[j].ffn.up = random_matrix(kinds[kind].format, kinds[kind].act, inner, hidden, -1);
                jobs[j].ffn.down = random_matrix(kinds[kind].format, kinds[kind].act, hidden, inner, -1);
                jobs[j].rows = rows[j];
                jobs[j].out = out[j];
                jobs[j].n_rows = j ? 7 : 38;
                for (int i = 0; i < jobs[j].n_rows; i++) {
                    rows[j][i] = j ? 6 * i : i + i / 6;
                    out[j][i] = j ? 98 - 2 * i : 2 * ((i * 5) % 38) + 1;
                }
            }
            float *h = values(n * hidden, 8.0f), *result[2];
            for (int turn = 0; turn < 2; turn++) {
                use(turn ? rung : 0);
                result[turn] = output(n_parts * hidden);
                must(cb_expert_ffn(pools[turn ? 2 : 1], jobs, 2, h, n, result[turn], n_parts), "cb_expert_ffn");
                check_canaries(result[turn], "cb_expert_ffn");
            }
            if (rung == 0)
                count_in(result[0], n_parts * hidden);
            same(result[1], result[0], n_parts * hidden, "%s experts %s", rung_names[rung], kinds[kind].name);
            use(rung);
            disturb(&jobs[0].ffn.down, 3);
            float *after = output(n_parts * hidden);
            must(cb_expert_ffn(pools[1], jobs, 2, h, n, after, n_parts), "cb_expert_ffn");
            if (!differ(after, result[0], n_parts * hidden))
                fail("%s experts %s: a disturbed weight went unnoticed", rung_names[rung], kinds[kind].name);
            release_all();
        }
}

/* ---- rows: norm, gate, sum over experts ---------------------------------------------------------------------- */

static void family_rows(int rung)
{
    for (int i = 0; i < 44; i++)
        for (int special = -1; special < 10; special++) {
            int64_t n = i < 40 ? i + 1 : (int64_t[]){64, 100, 515, 1024}[i - 40];
            if (special >= 0 && i % 7)
                continue;
            seed = (uint64_t)(i * 16 + special + 1);
            float *x = values(n * 2, 3.0f), *w = values(n, 1.0f), *out[2];
            if (special >= 0)
                fill_special(x, n * 2, special);
            for (int turn = 0; turn < 2; turn++) {
                use(turn ? rung : 0);
                out[turn] = output(n * 2);
                must(cb_rmsnorm(pools[1], x, n, w, 1e-6f, 2, n, out[turn], n), "cb_rmsnorm");
                check_canaries(out[turn], "cb_rmsnorm");
            }
            if (rung == 0)
                count_in(out[0], n * 2);
            same(out[1], out[0], n * 2, "%s rmsnorm of %d, special %d", rung_names[rung], (int)n, special);

            int64_t k = 1 + i % 8, rows = 2;
            float *parts = values(rows * k * n, 2.0f), *share = positive(rows * k);
            float *shared = i % 2 ? values(rows * n, 1.0f) : NULL;
            int32_t order[16];
            int64_t bad[2];
            if (special >= 8)
                fill_special(parts + k * n, k * n, special);
            for (int r = 0; r < rows; r++)
                for (int j = 0; j < k; j++)
                    order[r * k + j] = (int32_t)((j + r) % k);
            for (int turn = 0; turn < 2; turn++) {
                use(turn ? rung : 0);
                out[turn] = output(rows * n);
                int status = cb_expert_reduce(pools[1], parts, share, order, shared, rows, k, n, out[turn], &bad[turn]);
                if ((status == CB_ENONFINITE) != (special >= 8))
                    fail("%s sum over experts: status %d, special %d", rung_names[rung], status, special);
                check_canaries(out[turn], "cb_expert_reduce");
            }
            if (bad[0] != bad[1])
                fail("%s sum over experts names row %d, reference %d", rung_names[rung], (int)bad[1], (int)bad[0]);
            if (rung == 0)
                count_in(out[0], rows * n);
            same(out[1], out[0], rows * n, "%s sum over %d experts of %d", rung_names[rung], (int)k, (int)n);
            release_all();
        }
    for (int64_t e = 5; e < 70; e += 13) { /* sigmoid, choice, weights */
        int64_t in = 96, rows = 6;
        int32_t ids[2][6 * 4];
        float *weights[2];
        int64_t bad;
        seed = (uint64_t)e;
        cb_gate gate = {.weight = random_matrix(CB_F32, CB_ACT_F32, e, in, -1), .bias = values(e, 0.1f),
                        .n_experts = (int32_t)e, .k = 4, .n_group = 1, .topk_group = 1, .norm_topk = 1, .scaling = 2.5f,
                        .scoring = e % 3 ? CB_GATE_SIGMOID : CB_GATE_SOFTMAX, .logit_bias = values(e, 0.3f),
                        .expert_scale = positive(e)};
        float *h = values(rows * in, 6.0f);
        for (int turn = 0; turn < 2; turn++) {
            use(turn ? rung : 0);
            weights[turn] = output(rows * 4);
            must(cb_gate_forward(pools[1], &gate, h, rows, ids[turn], weights[turn], &bad), "cb_gate_forward");
            check_canaries(weights[turn], "cb_gate_forward");
        }
        if (memcmp(ids[0], ids[1], sizeof ids[0]))
            fail("%s gate over %d experts chose others", rung_names[rung], (int)e);
        if (rung == 0)
            count_in(weights[0], rows * 4);
        same(weights[1], weights[0], rows * 4, "%s gate over %d experts", rung_names[rung], (int)e);
        release_all();
    }
}

/* ---- attention: prompt and decode over a cache with the indexer (rope without turning: angles are libm's) ------- */

static void family_attention(int rung)
{
    enum { HIDDEN = 80, RANK = 48, ROPE = 8, PROMPT = 70, DECODE = 3, BLOCKS = 4 }; /* into the second block */
    static const int64_t heads[] = {5, 16, 18};
    for (int kv_format = CB_KV_F32; kv_format <= CB_KV_INT8; kv_format++)
        for (int kind = 0; kind < N_KINDS; kind++) {
            if ((kind + kv_format) % 2) /* each format with one of the two caches */
                continue;
            int64_t n_heads = heads[kind % 3], nope = 24, v_dim = 20, n = PROMPT + DECODE, dim = 24;
            int f = kinds[kind].format, act = kinds[kind].act;
            seed = (uint64_t)(kv_format * 10 + kind);
            float *norms = positive(HIDDEN * 2 + RANK * 2 + dim);
            cb_attn_layer layer = {
                .hidden = HIDDEN, .n_heads = (int32_t)n_heads, .q_rank = RANK, .kv_rank = RANK, .nope = (int32_t)nope,
                .rope = ROPE, .v_dim = (int32_t)v_dim, .rms_eps = 1e-5f, .latent_eps = 1e-6f, .softmax_scale = 0.2f,
                .index_kind = CB_INDEX_FULL, .index_heads = 6, .index_dim = (int32_t)dim, .index_topk = 50,
                .inv_freq = values(ROPE / 2, 0.0f), .rope_amplitude = 1.0f, .index_norm_eps = 1e-6f,
                .input_norm = norms, .post_norm = norms + HIDDEN, .q_a_norm = norms + HIDDEN * 2,
                .kv_a_norm = norms + HIDDEN * 2 + RANK, .index_k_norm_w = norms + HIDDEN * 2 + RANK * 2,
                .index_k_norm_b = values(dim, 0.5f), .q_a = random_matrix(f, act, RANK, HIDDEN, -1),
                .q_b = random_matrix(f, act, n_heads * (nope + ROPE), RANK, -1),
                .kv_a = random_matrix(f, act, RANK + ROPE, HIDDEN, -1),
                .o = random_matrix(f, act, HIDDEN, n_heads * v_dim, -1),
                .index_wq_b = random_matrix(f, act, 6 * dim, RANK, -1),
                .index_wk = random_matrix(f, act, dim, HIDDEN, -1),
                .index_weights = random_matrix(CB_F32, CB_ACT_F32, 6, HIDDEN, -1)};
            /* a stack of matrices: one random matrix with as many row blocks, read head by head */
            layer.k_b = random_matrix(f, act, n_heads * RANK, nope, -1);
            layer.v_b = random_matrix(f, act, n_heads * 32, RANK, -1);
            layer.k_b.out = RANK;
            layer.v_b.out = v_dim;
            float *start = values(n * HIDDEN, 4.0f), *x[2], *hidden[2];
            int32_t position[PROMPT + DECODE], seq[PROMPT + DECODE] = {0}, table[BLOCKS] = {2, 0, 3, 1};
            for (int t = 0; t < n; t++)
                position[t] = t;
            int64_t kv_bytes = BLOCKS * CB_KV_BLOCK * cb_kv_row_bytes(kv_format, RANK + ROPE);
            int64_t index_bytes = BLOCKS * CB_KV_BLOCK * cb_kv_row_bytes(kv_format, dim);
            for (int turn = 0; turn < 2; turn++) {
                use(turn ? rung : 0);
                x[turn] = output(n * HIDDEN);
                hidden[turn] = output(n * HIDDEN);
                memcpy(x[turn], start, (size_t)(n * HIDDEN) * 4);
                char *kv = guarded(kv_bytes, 64), *index_k = guarded(index_bytes, 64);
                int32_t *selected = guarded(n * 50 * 4, 4), *n_selected = guarded(n * 4, 4);
                for (int64_t t = 0; t < n;) {
                    int64_t rows = t < PROMPT ? (turn ? 40 : PROMPT) : 1; /* the tested rung in smaller chunks */
                    rows = t < PROMPT ? MIN(rows, PROMPT - t) : rows;
                    cb_attn_step step = {.n_rows = rows, .position = position + t, .seq = seq, .block_table = table,
                                         .table_stride = BLOCKS, .n_blocks = BLOCKS, .kv = kv, .index_k = index_k,
                                         .kv_format = kv_format, .n_sequences = 1, .selected = selected + t * 50,
                                         .n_selected = n_selected + t, .x = x[turn] + t * HIDDEN,
                                         .hidden = hidden[turn] + t * HIDDEN};
                    must(cb_attn_forward(pools[turn ? 3 : 1], &layer, &step), "cb_attn_forward");
                    t += rows;
                }
                check_canaries(x[turn], "cb_attn_forward");
                check_canaries(hidden[turn], "cb_attn_forward");
            }
            if (rung == 0) {
                count_in(x[0], n * HIDDEN);
                count_in(hidden[0], n * HIDDEN);
            }
            same(x[1], x[0], n * HIDDEN, "%s attention %s cache %d", rung_names[rung], kinds[kind].name, kv_format);
            same(hidden[1], hidden[0], n * HIDDEN, "%s attention %s cache %d, normed", rung_names[rung],
                 kinds[kind].name, kv_format);
            if (!differ(x[0], start, n * HIDDEN) || x[0][0] != x[0][0])
                fail("attention %s: the case says nothing", kinds[kind].name);
            release_all();
        }
}

/* ---- grouped queries: biases, norms per head, a window, sinks ------------------------------------------------- */

static void family_gqa(int rung)
{
    enum { HIDDEN = 80, PROMPT = 70, DECODE = 3, BLOCKS = 4 };
    static const int32_t heads[][2] = {{8, 2}, {5, 1}, {6, 6}}, dims[] = {16, 24, 32}, windows[] = {0, 40, 0};
    for (int i = 0; i < N_KINDS; i++) {
        int32_t n_heads = heads[i % 3][0], n_kv = heads[i % 3][1], dim = dims[i % 3];
        int64_t n = PROMPT + DECODE;
        int f = kinds[i].format, act = kinds[i].act, kv_format = i % 3;
        seed = (uint64_t)(i + 500);
        cb_gqa_layer layer = {
            .hidden = HIDDEN, .n_heads = n_heads, .n_kv_heads = n_kv, .head_dim = dim, .rope = 8, .window = windows[i % 3],
            .qk_norm = i % 3 == 1 ? CB_QK_NORM_NONE : CB_QK_NORM_HEAD, .rms_eps = 1e-5f, .softmax_scale = 0.25f,
            .rope_amplitude = 1.0f, .inv_freq = values(4, 0.0f), .input_norm = positive(HIDDEN), .q_norm = positive(dim),
            .k_norm = positive(dim), .post_norm = positive(HIDDEN), .q_bias = values(n_heads * dim, 1.0f),
            .v_bias = i % 2 ? values(n_kv * dim, 1.0f) : NULL, .sinks = i % 2 ? values(n_heads, 1.0f) : NULL,
            .q = random_matrix(f, act, n_heads * dim, HIDDEN, -1), .k = random_matrix(f, act, n_kv * dim, HIDDEN, -1),
            .v = random_matrix(f, act, n_kv * dim, HIDDEN, -1), .o = random_matrix(f, act, HIDDEN, n_heads * dim, -1)};
        float *start = values(n * HIDDEN, 4.0f), *x[2], *hidden[2];
        int32_t position[PROMPT + DECODE], seq[PROMPT + DECODE] = {0}, table[BLOCKS] = {2, 0, 3, 1};
        for (int t = 0; t < n; t++)
            position[t] = t;
        for (int turn = 0; turn < 2; turn++) {
            use(turn ? rung : 0);
            x[turn] = output(n * HIDDEN);
            hidden[turn] = output(n * HIDDEN);
            memcpy(x[turn], start, (size_t)(n * HIDDEN) * 4);
            char *kv = guarded(BLOCKS * n_kv * 2 * CB_KV_BLOCK * cb_kv_row_bytes(kv_format, dim), 64);
            for (int64_t t = 0; t < n;) {
                int64_t rows = t < PROMPT ? MIN(turn ? 40 : PROMPT, PROMPT - t) : 1;
                cb_attn_step step = {.n_rows = rows, .position = position + t, .seq = seq, .block_table = table,
                                     .table_stride = BLOCKS, .n_blocks = BLOCKS, .kv = kv, .kv_format = kv_format,
                                     .n_sequences = 1, .x = x[turn] + t * HIDDEN, .hidden = hidden[turn] + t * HIDDEN};
                must(cb_gqa_forward(pools[turn ? 3 : 1], &layer, &step), "cb_gqa_forward");
                t += rows;
            }
            check_canaries(x[turn], "cb_gqa_forward");
            check_canaries(hidden[turn], "cb_gqa_forward");
        }
        if (rung == 0) {
            count_in(x[0], n * HIDDEN);
            count_in(hidden[0], n * HIDDEN);
        }
        same(x[1], x[0], n * HIDDEN, "%s gqa %s", rung_names[rung], kinds[i].name);
        same(hidden[1], hidden[0], n * HIDDEN, "%s gqa %s, normed", rung_names[rung], kinds[i].name);
        if (!differ(x[0], start, n * HIDDEN) || x[0][0] != x[0][0])
            fail("gqa %s: the case says nothing", kinds[i].name);
        release_all();
    }
}

/* ---- gated delta rule: a prompt in one call or several, then steps with drafts of which some are wrong -------- */

static void family_delta(int rung)
{
    enum { HIDDEN = 48, PROMPT = 150, DECODE = 6, DRAFTS = 2, KEYS = 2, HEADS = 4, TAPS = 4 };
    static const int32_t key_dims[] = {16, 32, 48}, value_dims[] = {80, 64, 16};
    static const float never[HEADS] = {-200, -200, -200, -200};
    for (int i = 0; i < N_KINDS; i++) {
        int32_t dk = key_dims[i % 3], dv = value_dims[i % 3], channels = 2 * KEYS * dk + HEADS * dv;
        int f = kinds[i].format, act = kinds[i].act;
        int64_t n = PROMPT + DECODE;
        bool forgets = i % 2;
        seed = (uint64_t)(i + 700);
        cb_delta_layer layer = {
            .hidden = HIDDEN, .n_key_heads = KEYS, .n_value_heads = HEADS, .key_dim = dk, .value_dim = dv, .taps = TAPS,
            .rms_eps = 1e-6f, .input_norm = positive(HIDDEN), .post_norm = positive(HIDDEN), .norm = positive(dv),
            .a_log = forgets ? values(HEADS, 1.0f) : never, .dt_bias = values(HEADS, 1.0f),
            .qkv = random_matrix(f, act, channels, HIDDEN, -1), .z = random_matrix(f, act, HEADS * dv, HIDDEN, -1),
            .a = random_matrix(CB_F32, CB_ACT_F32, HEADS, HIDDEN, -1), .b = random_matrix(CB_F32, CB_ACT_F32, HEADS, HIDDEN, -1),
            .out = random_matrix(f, act, HIDDEN, HEADS * dv, -1), .conv = random_matrix(CB_F32, CB_ACT_F32, channels, TAPS, -1)};
        float *start = values((n + DRAFTS) * HIDDEN, 4.0f), *x[2], *hidden[2];
        int32_t position[PROMPT + DECODE + DRAFTS], seq[PROMPT + DECODE + DRAFTS] = {0}, table[4] = {0}, state = 0;
        for (int t = 0; t < n + DRAFTS; t++)
            position[t] = t;
        for (int turn = 0; turn < 2; turn++) {
            use(turn ? rung : 0);
            x[turn] = output((n + DRAFTS) * HIDDEN);
            hidden[turn] = output((n + DRAFTS) * HIDDEN);
            memcpy(x[turn], start, (size_t)((n + DRAFTS) * HIDDEN) * 4);
            float *slots = guarded(2 * cb_delta_state_values(&layer) * 4, 64);
            float *records = guarded(2 * DRAFTS * cb_delta_record_values(&layer) * 4, 4);
            for (int64_t t = 0, kept; t < n; t += kept) {
                int64_t rows = t < PROMPT ? MIN(turn ? 40 : PROMPT, PROMPT - t) : turn ? 1 + DRAFTS : 1;
                kept = t < PROMPT ? rows : 1; /* the drafts are rejected, and their rows come again */
                cb_attn_step step = {.n_rows = rows, .position = position + t, .seq = seq, .block_table = table,
                                     .table_stride = 4, .n_blocks = 1, .kv = slots, .kv_format = CB_KV_F32, .n_sequences = 1,
                                     .x = x[turn] + t * HIDDEN, .hidden = hidden[turn] + t * HIDDEN, .state = slots,
                                     .records = records, .state_of = &state, .n_states = 1, .n_drafts = turn ? DRAFTS : 0};
                must(cb_delta_forward(pools[turn ? 3 : 1], &layer, &step), "cb_delta_forward");
                memcpy(x[turn] + (t + kept) * HIDDEN, start + (t + kept) * HIDDEN, (size_t)(rows - kept) * HIDDEN * 4);
            }
            check_canaries(x[turn], "cb_delta_forward");
            check_canaries(hidden[turn], "cb_delta_forward");
        }
        if (rung == 0 && !forgets) { /* two libm may differ in a halfway case, which a decay would carry on */
            count_in(x[0], n * HIDDEN);
            count_in(hidden[0], n * HIDDEN);
        }
        same(x[1], x[0], n * HIDDEN, "%s delta %s", rung_names[rung], kinds[i].name);
        same(hidden[1], hidden[0], n * HIDDEN, "%s delta %s, normed", rung_names[rung], kinds[i].name);
        if (!differ(x[0], start, n * HIDDEN) || x[0][0] != x[0][0])
            fail("delta %s: the case says nothing", kinds[i].name);
        release_all();
    }
}

/* ---- what has one implementation, but other processors, compilers and system calls --------------------------- */

static void family_plain(int rung)
{
    if (rung)
        return;
    seed = 9;
    uint8_t *data = guarded(100000, 1);
    for (int i = 0; i < 100000; i++)
        data[i] = (uint8_t)(next() >> 56);
    for (int64_t n = 0; n < 200; n += 7) {
        uint64_t h = cb_hash64(data + 100000 - n, n);
        float halves[2] = {(float)(h >> 40), (float)(h & 0xffffff)};
        count_in(halves, 2);
    }
    float *logits = values(500, 8.0f);
    for (uint64_t i = 0; i < 50; i++) {
        float id = (float)cb_sample(logits, 500, i % 5 ? 0.8 : 0.0, 0.9, cb_uniform(3, i));
        count_in(&id, 1);
    }

    char path[] = "/tmp/colibri-driver-XXXXXX";
    int fd = mkstemp(path);
    if (fd < 0 || write(fd, data, 98304) != 98304)
        fail("cannot write %s", path);
    unlink(path);
    cb_reader *reader = cb_reader_new(CB_READ_URING, 2, 8192, 0);
    uint8_t *target = cb_huge_alloc(98304);
    cb_read_done done;
    must(reader && target ? cb_reader_submit(reader, 1, fd, 0, 98304, target, CB_READ_DEMAND, 1) : CB_ENOMEM, "reader");
    struct pollfd ready = {.fd = cb_reader_fd(reader), .events = POLLIN};
    if (poll(&ready, 1, 20000) != 1 || cb_reader_take(reader, &done, 1) != 1 || done.error || done.bytes != 98304 ||
        memcmp(target, data, 98304) || done.checksum != cb_hash64(data, 98304))
        fail("the reader did not deliver the file");
    cb_reader_free(reader);
    cb_huge_free(target, 98304);
    close(fd);
    release_all();
}

int main(int argc, char **argv)
{
    for (int i = 1; i < argc; i++) {
        is_disturbed |= !strcmp(argv[i], "disturbed");
        is_full |= !strcmp(argv[i], "full");
    }
    static const struct {
        const char *name;
        void (*run)(int rung);
    } families[] = {{"linear", family_linear},       {"experts", family_experts}, {"rows", family_rows},
                    {"attention", family_attention}, {"gqa", family_gqa},         {"delta", family_delta},
                    {"plain", family_plain}};
    find_rungs();
    for (int n = 1; n < 4; n++)
        pools[n] = cb_pool_new(n);
    printf("rungs %s\n", cb_isa_available());
    for (int rung = 0; rung < n_rungs; rung++) {
        use(rung);
        printf("dispatch %s: %s\n", rung_names[rung], cb_dispatch_text());
    }
    for (int f = 0; f < (is_disturbed ? 1 : 7); f++) { /* disturbed: where weights are, and nothing else is asked */
        sum_of_family = 0xcbf29ce484222325u;
        for (int rung = 0; rung < n_rungs; rung++)
            families[f].run(rung);
        printf("checksum %s %016llx\n", families[f].name, (unsigned long long)sum_of_family);
        fflush(stdout);
    }
    for (int n = 1; n < 4; n++)
        cb_pool_free(pools[n]);
    printf("comparisons %d failures %d\n", n_comparisons, n_failures);
    return n_failures != 0;
}
