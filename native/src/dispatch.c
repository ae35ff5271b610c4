/* dispatch.c: one table, filled with the references first; then the ladder, each rung replacing what it improves. */
#include "int8.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

cb_table cb_kernels;
const char *const cb_isa_names[CB_N_ISAS] = {"ref", "avx2", "avx512", "avx512vnni", "amx", "neon", "neondot"};

static int current;
static unsigned available;
static char available_text[64], error_text[160], dispatch_text[512];

/* Formats that take int8 activations are named twice: "_f32" is the product with f32 activations. */
static void describe(const cb_table *t)
{
    int at = 0, room = (int)sizeof dispatch_text;
    for (int act = CB_ACT_F32; act <= CB_ACT_Q8; act++)
        for (int format = 1; format < CB_N_FORMATS; format++)
            if (t->linear[format][act])
                at += snprintf(dispatch_text + at, (size_t)CB_MAX(0, room - at), "linear_%s%s=%s ", cb_formats[format].name,
                               act == CB_ACT_F32 && cb_has_scales(format) ? "_f32" : "", t->linear_isa[format][act]);
    snprintf(dispatch_text + CB_MIN(at, room), (size_t)CB_MAX(0, room - at), "vector=%s attention=%s attention_int8=%s",
             t->vector_isa, t->attn->isa, t->int8->isa);
}

static void fill(int isa)
{
    cb_table t = {0};
    cb_linear_table_ref(&t);
    cb_vector_table_ref(&t);
    cb_attn_table_ref(&t);
    cb_int8_table_ref(&t);
#if defined(__x86_64__)
    if (isa >= CB_ISA_AVX2) {
        cb_linear_table_avx2(&t);
        cb_vector_table_avx2(&t);
        cb_attn_table_avx2(&t);
        cb_int8_table_avx2(&t);
    }
    if (isa >= CB_ISA_AVX512) {
        cb_linear_table_avx512(&t);
        cb_vector_table_avx512(&t);
        cb_attn_table_avx512(&t);
        cb_int8_table_avx512(&t);
    }
    if (isa >= CB_ISA_AVX512VNNI) {
        cb_linear_table_avx512vnni(&t);
        cb_int8_table_avx512vnni(&t);
    }
    if (isa >= CB_ISA_AMX) {
        cb_linear_table_amx(&t);
        cb_int8_table_amx(&t);
    }
#elif defined(__aarch64__)
    if (isa >= CB_ISA_NEON) {
        cb_linear_table_neon(&t);
        cb_vector_table_neon(&t);
        cb_attn_table_neon(&t);
        cb_int8_table_neon(&t);
    }
    if (isa >= CB_ISA_NEONDOT) {
        cb_linear_table_neondot(&t);
        cb_int8_table_neondot(&t);
    }
#endif
    cb_kernels = t;
    current = isa;
    describe(&t);
}

static int highest(void)
{
    int isa = CB_ISA_REF;
    for (int i = CB_ISA_REF; i < CB_N_ISAS; i++)
        if (available & 1u << i)
            isa = i;
    return isa;
}

__attribute__((constructor)) static void load(void)
{
    available = cb_cpu_isas();
    for (int i = CB_ISA_REF; i < CB_N_ISAS; i++)
        if (available & 1u << i)
            snprintf(available_text + strlen(available_text), sizeof available_text - strlen(available_text), "%s%s",
                     i ? "," : "", cb_isa_names[i]);
    const char *wanted = getenv("COLIBRI_ISA");
    if (!wanted || !*wanted) {
        fill(highest());
        return;
    }
    for (int i = CB_ISA_REF; i < CB_N_ISAS; i++) {
        if (strcmp(wanted, cb_isa_names[i]))
            continue;
        if (cb_isa_limit(i) == CB_OK)
            return;
        snprintf(error_text, sizeof error_text, "COLIBRI_ISA=%.20s: this machine offers only %s", wanted,
                 available_text);
    }
    if (!*error_text)
        snprintf(error_text, sizeof error_text,
                 "COLIBRI_ISA=%.20s: expected one of ref, avx2, avx512, avx512vnni, amx, neon, neondot", wanted);
    fill(CB_ISA_REF);
}

const char *cb_isa_available(void) { return available_text; }

int cb_isa_limit(int isa)
{
    if (isa < CB_ISA_REF || isa >= CB_N_ISAS || !(available & 1u << isa))
        return CB_EINVAL;
    fill(isa);
    return CB_OK;
}

int cb_isa_current(void) { return current; }
const char *cb_isa_error(void) { return error_text; }
const char *cb_dispatch_text(void) { return dispatch_text; }
