/* CPUID leaves 1, 7.0, 7.1 and XCR0 (Intel SDM volume 2, CPUID and XGETBV); permission for AMX
 * (Linux, Documentation/arch/x86/xstate.rst). */
#include "kernels/cpu/cpuid.h"

#if defined(__x86_64__)
#include <asm/prctl.h>
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#define XCR0_AVX           0x06u    /* XMM, YMM */
#define XCR0_AVX512        0xe6u    /* besides: opmask, upper ZMM, ZMM16-31 */
#define XCR0_AMX           0x60000u /* tile configuration and data */
#define XFEATURE_XTILEDATA 18
/* Leaf 7.0, EDX: tiles with bf16, AVX-512 with f16, tiles; not every compiler's cpuid.h names them.
 */
#define EDX_AMX (1u << 22 | 1u << 23 | 1u << 24)

static uint32_t xcr0(void)
{
    uint32_t lo, hi;

    __asm__ volatile("xgetbv" : "=a"(lo), "=d"(hi) : "c"(0));
    return lo;
}

static bool all(uint32_t reg, uint32_t bits)
{
    return (reg & bits) == bits;
}

struct kn_cpu kn_cpu_detect(void)
{
    struct kn_cpu c = {0};
    uint32_t a, b, cx, d, saved;
    bool saw_amx;

    if (!__get_cpuid(1, &a, &b, &cx, &d) || !all(cx, bit_OSXSAVE | bit_AVX | bit_FMA | bit_F16C)) {
        return c;
    }
    saved = xcr0();
    if (!all(saved, XCR0_AVX) || !__get_cpuid_count(7, 0, &a, &b, &cx, &d)) {
        return c;
    }
    c.avx2 = all(b, bit_AVX2);
    c.avx512 = c.avx2 && all(saved, XCR0_AVX512) &&
               all(b, bit_AVX512F | bit_AVX512BW | bit_AVX512VL | bit_AVX512DQ) &&
               all(cx, bit_AVX512VNNI);
    saw_amx = all(saved, XCR0_AMX) && all(d, EDX_AMX);
    if (c.avx512 && __get_cpuid_count(7, 1, &a, &b, &cx, &d)) {
        c.avx512_bf16 = all(a, bit_AVX512BF16);
        c.amx = c.avx512_bf16 && saw_amx &&
                syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
    }
    return c;
}
#else
struct kn_cpu kn_cpu_detect(void)
{
    return (struct kn_cpu){0};
}
#endif
