/* Choice of the op table: plain C rows first, rows of the instruction set over them. */
#include "kernels/core/registry.h"

#include "kernels/cpu/amx/amx.h"
#include "kernels/cpu/avx2/avx2.h"
#include "kernels/cpu/avx512/avx512.h"
#include "kernels/cpu/cpuid.h"
#include "kernels/cpu/ref/ref.h"

#include <pthread.h>
#include <stdio.h>

static const char *const op_names[KN_OP_COUNT] = {
#define KN_OP(name, dtypes, what) #name,
#include "kernels/ops.def"
#undef KN_OP
};

const char *kn_op_name(enum kn_op op)
{
    return op < KN_OP_COUNT ? op_names[op] : "?";
}

/* Best first. */
enum { ISA_AMX, ISA_AVX512BF16, ISA_AVX512, ISA_AVX2, ISA_REF, ISA_COUNT };
static const char *const isa_names[ISA_COUNT] = {"amx", "avx512bf16", "avx512", "avx2", "ref"};
static const char *const isa_needs[ISA_COUNT] = {
    "AMX with BF16, AVX-512 with BF16 and FP16", "AVX-512 F, BW, VL, DQ, VNNI and BF16",
    "AVX-512 F, BW, VL, DQ and VNNI", "AVX2, FMA and F16C", "nothing"};

static pthread_once_t once = PTHREAD_ONCE_INIT;
/* Written once, before any reader. */
static struct kn_ops tables[ISA_COUNT];
static bool built[ISA_COUNT];  /* compiled in */
static bool usable[ISA_COUNT]; /* and this machine runs it */
static const char *available[ISA_COUNT + 1];

/* Rows of `isa` over the plain C rows. A plain C row that reads packed weights cannot stand in for
 * a row with another format; its place stays empty and is reported. */
static struct kn_ops merge(const struct kn_ops *isa)
{
    struct kn_ops t = *isa;

#define KN_OP(name, dtypes, what) t.name = t.name ? t.name : kn_ops_ref.name;
#include "kernels/ops.def"
#undef KN_OP
    if (isa->format != kn_ops_ref.format) {
        t.matmul = isa->matmul;
    }
    return t;
}

static void init_tables(void)
{
    struct kn_cpu cpu = kn_cpu_detect();
    int n = 0;

    tables[ISA_REF] = kn_ops_ref;
    built[ISA_REF] = usable[ISA_REF] = true;
#if KN_HAVE_AVX2
    tables[ISA_AVX2] = merge(&kn_ops_avx2);
    built[ISA_AVX2] = true;
    usable[ISA_AVX2] = cpu.avx2;
#endif
#if KN_HAVE_AMX
    tables[ISA_AMX] = merge(&kn_ops_amx);
    built[ISA_AMX] = true;
    usable[ISA_AMX] = cpu.amx;
#endif
#if KN_HAVE_AVX512BF16
    tables[ISA_AVX512BF16] = merge(&kn_ops_avx512bf16);
    built[ISA_AVX512BF16] = true;
    usable[ISA_AVX512BF16] = cpu.avx512_bf16;
#endif
#if KN_HAVE_AVX512
    tables[ISA_AVX512] = merge(&kn_ops_avx512);
    built[ISA_AVX512] = true;
    usable[ISA_AVX512] = cpu.avx512;
#endif
    for (int i = 0; i < ISA_COUNT; i++) {
        if (usable[i]) {
            available[n++] = isa_names[i];
        }
    }
}

static int check_rows(const struct kn_ops *t, struct bt_err *err)
{
    char names[128];
    size_t n = 0;

#define KN_OP(name, dtypes, what)                                                                  \
    if (!t->name) {                                                                                \
        n += (size_t)snprintf(names + n, sizeof(names) - n, " %s", #name);                         \
    }
#include "kernels/ops.def"
#undef KN_OP
    return n ? BT_FAIL(err, BT_E_UNSUPPORTED, "isa %s lacks these ops:%s", t->isa, names) : BT_OK;
}

int kn_ops_select(const char *isa, const struct kn_ops **ret_ops, struct bt_err *err)
{
    int i = 0, rc;

    pthread_once(&once, init_tables);
    if (strcmp(isa, "auto") == 0) {
        while (!usable[i]) {
            i++;
        }
    } else {
        while (i < ISA_COUNT && strcmp(isa, isa_names[i]) != 0) {
            i++;
        }
        if (i == ISA_COUNT) {
            return BT_FAIL(err, BT_E_CONFIG,
                           "isa \"%s\" is unknown: auto, ref, avx2, avx512, avx512bf16 or amx",
                           isa);
        }
        if (!built[i]) {
            return BT_FAIL(err, BT_E_UNSUPPORTED, "isa %s is not in this build", isa);
        }
        if (!usable[i]) {
            return BT_FAIL(err, BT_E_UNSUPPORTED, "isa %s needs %s, not all of it is here", isa,
                           isa_needs[i]);
        }
    }
    rc = check_rows(&tables[i], err);
    if (rc < 0) {
        return rc;
    }
    *ret_ops = &tables[i];
    return BT_OK;
}

const char *const *kn_ops_available(void)
{
    pthread_once(&once, init_tables);
    return available;
}
