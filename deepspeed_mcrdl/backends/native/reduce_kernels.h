/* Elementwise reductions of n arrays, compiled once for each instruction set that reduce.c names.
 *
 * Every function computes out[i] = (((in[0][i] op in[1][i]) op in[2][i]) ...), in this order on every rank, so that all
 * ranks get the same bits. 16-bit floats are added up in float and rounded once. `out` may be one of `in`, exactly.
 */

#define CONCAT_(a, b) a##_##b
#define CONCAT(a, b) CONCAT_(a, b)
#define NAMED(name) CONCAT(name, TARGET)

#define KERNEL(name, T, ACC, LOAD, STORE, COMBINE, FINISH)                                                             \
    static void NAMED(name)(void *out, const void *const *in, int n, size_t count) {                                   \
        T *to = out;                                                                                                   \
        if (n == 2) {                                                                                                  \
            const T *left = in[0], *right = in[1];                                                                     \
            _Pragma("GCC ivdep") for (size_t i = 0; i < count; i++) {                                                  \
                ACC a = LOAD(left[i]), b = LOAD(right[i]);                                                             \
                a = COMBINE(a, b);                                                                                     \
                to[i] = STORE(FINISH(a, 2));                                                                           \
            }                                                                                                          \
            return;                                                                                                    \
        }                                                                                                              \
        ACC sums[BLOCK];                                                                                               \
        for (size_t start = 0; start < count; start += BLOCK) {                                                        \
            size_t size = count - start < BLOCK ? count - start : BLOCK;                                               \
            const T *first = (const T *)in[0] + start;                                                                 \
            for (size_t i = 0; i < size; i++) sums[i] = LOAD(first[i]);                                                \
            for (int s = 1; s < n; s++) {                                                                              \
                const T *other = (const T *)in[s] + start;                                                             \
                for (size_t i = 0; i < size; i++) {                                                                    \
                    ACC a = sums[i], b = LOAD(other[i]);                                                               \
                    sums[i] = COMBINE(a, b);                                                                           \
                }                                                                                                      \
            }                                                                                                          \
            for (size_t i = 0; i < size; i++) to[start + i] = STORE(FINISH(sums[i], n));                               \
        }                                                                                                              \
    }

#define SAME(x) (x)
#define ADD(a, b) ((a) + (b))
#define MULTIPLY(a, b) ((a) * (b))
#define LESSER(a, b) ((b) < (a) ? (b) : (a))
#define GREATER(a, b) ((b) > (a) ? (b) : (a))
#define AND(a, b) ((a) & (b))
#define OR(a, b) ((a) | (b))
#define XOR(a, b) ((a) ^ (b))
#define ALL(x, n) (x)
#define MEAN(x, n) ((x) / (n))

#define FLOAT_KERNELS(name, T, ACC, LOAD, STORE)                                                                       \
    KERNEL(name##_sum, T, ACC, LOAD, STORE, ADD, ALL)                                                                  \
    KERNEL(name##_avg, T, ACC, LOAD, STORE, ADD, MEAN)                                                                 \
    KERNEL(name##_min, T, ACC, LOAD, STORE, LESSER, ALL)                                                               \
    KERNEL(name##_max, T, ACC, LOAD, STORE, GREATER, ALL)                                                              \
    KERNEL(name##_product, T, ACC, LOAD, STORE, MULTIPLY, ALL)

/* Sums and products wrap around, which C promises of unsigned numbers alone. */
#define INTEGER_KERNELS(name, T, UNSIGNED)                                                                             \
    KERNEL(name##_sum, UNSIGNED, UNSIGNED, SAME, SAME, ADD, ALL)                                                       \
    KERNEL(name##_min, T, T, SAME, SAME, LESSER, ALL)                                                                  \
    KERNEL(name##_max, T, T, SAME, SAME, GREATER, ALL)                                                                 \
    KERNEL(name##_product, UNSIGNED, UNSIGNED, SAME, SAME, MULTIPLY, ALL)                                              \
    KERNEL(name##_band, T, T, SAME, SAME, AND, ALL)                                                                    \
    KERNEL(name##_bor, T, T, SAME, SAME, OR, ALL)                                                                      \
    KERNEL(name##_bxor, T, T, SAME, SAME, XOR, ALL)

FLOAT_KERNELS(float64, double, double, SAME, SAME)
FLOAT_KERNELS(float32, float, float, SAME, SAME)
FLOAT_KERNELS(bfloat16, uint16_t, float, float_of_bfloat16, bfloat16_of_float)
FLOAT_KERNELS(float16, half, float, float_of_half, half_of_float)
INTEGER_KERNELS(uint8, uint8_t, uint8_t)
INTEGER_KERNELS(int8, int8_t, uint8_t)
INTEGER_KERNELS(int16, int16_t, uint16_t)
INTEGER_KERNELS(int32, int32_t, uint32_t)
INTEGER_KERNELS(int64, int64_t, uint64_t)

#define FLOAT_ROW(name)                                                                                                \
    {NAMED(name##_sum), NAMED(name##_avg), NAMED(name##_min), NAMED(name##_max), NAMED(name##_product)}
#define INTEGER_ROW(name)                                                                                              \
    {NAMED(name##_sum), NULL, NAMED(name##_min), NAMED(name##_max), NAMED(name##_product),                             \
     NAMED(name##_band), NAMED(name##_bor), NAMED(name##_bxor)}

/* By type and operation, in the order of TYPES and OPS in ../shm.py. */
static Reduction *const NAMED(table)[TYPES][OPS] = {
    FLOAT_ROW(float64), FLOAT_ROW(float32), FLOAT_ROW(bfloat16), FLOAT_ROW(float16), INTEGER_ROW(uint8),
    INTEGER_ROW(int8),  INTEGER_ROW(int16), INTEGER_ROW(int32),  INTEGER_ROW(int64),
};

#undef CONCAT_
#undef CONCAT
#undef NAMED
#undef KERNEL
#undef SAME
#undef ADD
#undef MULTIPLY
#undef LESSER
#undef GREATER
#undef AND
#undef OR
#undef XOR
#undef ALL
#undef MEAN
#undef FLOAT_KERNELS
#undef INTEGER_KERNELS
#undef FLOAT_ROW
#undef INTEGER_ROW
