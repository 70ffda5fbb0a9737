/* Reductions, by type and operation, in the best instruction set that the processor has. */

#include <string.h>

#include "shm.h"

#define BLOCK 1024 /* elements that are summed up in the first-level cache */

#ifdef __FLT16_MANT_DIG__
typedef _Float16 half;
static inline float float_of_half(half x) { return (float)x; }
static inline half half_of_float(float x) { return (half)x; }
#else
typedef uint16_t half;
static inline float float_of_half(half x) {
    uint32_t sign = (uint32_t)(x & 0x8000) << 16, rest = (uint32_t)(x & 0x7fff) << 13, bits;
    float value, scale = 0x1p112f; /* shifts the exponent's bias from 15 to 127, also of subnormal numbers */
    memcpy(&value, &rest, 4);
    value *= scale;
    memcpy(&bits, &value, 4);
    if ((x & 0x7c00) == 0x7c00) bits = 0x7f800000 | rest; /* infinity, not a number */
    bits |= sign;
    memcpy(&value, &bits, 4);
    return value;
}
static inline half half_of_float(float x) {
    uint32_t bits, sign;
    memcpy(&bits, &x, 4);
    sign = bits >> 16 & 0x8000;
    bits &= 0x7fffffff;
    if (bits > 0x7f800000) return sign | 0x7e00;
    if (bits >= 0x477ff000) return sign | 0x7c00; /* 65520 and more are rounded to infinity */
    if (bits < 0x38800000) {                      /* subnormal: the float unit rounds when it adds 0.5 */
        float value, magic = 0.5f;
        memcpy(&value, &bits, 4);
        value += magic;
        memcpy(&bits, &value, 4);
        return sign | (bits - 0x3f000000);
    }
    return sign | ((bits - 0x38000000 + 0xfff + (bits >> 13 & 1)) >> 13);
}
#endif

static inline float float_of_bfloat16(uint16_t x) {
    uint32_t bits = (uint32_t)x << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static inline uint16_t bfloat16_of_float(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    uint32_t even = (bits + 0x7fff + (bits >> 16 & 1)) >> 16; /* to the nearest, ties to even */
    return x != x ? 0x7fc0 : even;
}

#define TARGET plain
#include "reduce_kernels.h"
#undef TARGET

#if defined(__x86_64__) && defined(__GNUC__)
#pragma GCC push_options
#pragma GCC target("avx2,f16c")
#define TARGET avx2
#include "reduce_kernels.h"
#undef TARGET
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx2,f16c,avx512f,avx512bw,avx512vl,avx512dq,prefer-vector-width=512")
#define TARGET avx512
#include "reduce_kernels.h"
#undef TARGET
#pragma GCC pop_options
#endif

Reduction *reduction(int type, int op) {
    if (type < 0 || type >= TYPES || op < 0 || op >= OPS) return NULL;
#if defined(__x86_64__) && defined(__GNUC__)
    if (__builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
        return table_avx512[type][op];
    if (__builtin_cpu_supports("avx2")) return table_avx2[type][op];
#endif
    return table_plain[type][op];
}
