// What the CPU kernels share: vectors of the machine's width, bfloat16, and a pool of threads.
#include <math.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>
#if defined(__SSE2__)
#include <immintrin.h>
#endif

#define LARGEST_HEAD 256
#define PANEL 16   // outputs whose weights lie side by side
#define CHUNK 256  // rows that stay in a core's cache while weights pass by
#define AHEAD 4096 // bytes of weights that are on their way to the cache while others are used
#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 32")

#if defined(__AVX512F__)
#define WIDTH 16
#elif defined(__AVX__)
#define WIDTH 8
#else
#define WIDTH 4
#endif
typedef float vec __attribute__((vector_size(4 * WIDTH)));
typedef uint32_t bits __attribute__((vector_size(4 * WIDTH)));
typedef uint16_t halves __attribute__((vector_size(2 * WIDTH)));

INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

INLINE float from_bf16(uint16_t half) {
    uint32_t word = (uint32_t)half << 16;
    float value;
    memcpy(&value, &word, 4);
    return value;
}

// To the nearest, ties to even; what is not a number stays none.
INLINE uint16_t to_bf16(float value) {
    uint32_t word;
    memcpy(&word, &value, 4);
    uint32_t rounded = (word + 0x7fff + (word >> 16 & 1)) >> 16;
    return value == value ? rounded : 0x7fc0;
}

// Arrays of either dtype: every kernel takes `bf16` as a constant, so that the compiler makes one of each.
INLINE float get(const void *array, int64_t i, bool bf16) {
    return bf16 ? from_bf16(((const uint16_t *)array)[i]) : ((const float *)array)[i];
}

INLINE void put(void *array, int64_t i, float value, bool bf16) {
    if (bf16)
        ((uint16_t *)array)[i] = to_bf16(value);
    else
        ((float *)array)[i] = value;
}

// As the tensor's dtype would hold it.
INLINE float rounded(float value, bool bf16) { return bf16 ? from_bf16(to_bf16(value)) : value; }

INLINE const void *at(const void *array, int64_t i, bool bf16) { return (const char *)array + i * (bf16 ? 2 : 4); }

INLINE vec load(const void *array, int64_t i, bool bf16) {
    vec wide;
    if (bf16) {
#if defined(__AVX512F__) // compilers take three shuffles to widen a vector
        wide = (vec)((bits)_mm512_cvtepu16_epi32(_mm256_loadu_si256(at(array, i, true))) << 16);
#elif defined(__AVX2__)
        wide = (vec)((bits)_mm256_cvtepu16_epi32(_mm_loadu_si128(at(array, i, true))) << 16);
#else
        halves narrow;
        memcpy(&narrow, at(array, i, true), sizeof narrow);
        wide = (vec)(__builtin_convertvector(narrow, bits) << 16);
#endif
    } else {
        memcpy(&wide, at(array, i, false), sizeof wide);
    }
    return wide;
}

// e^x to within 4e-6 of itself; 0 below -87, and x must not exceed 88.
INLINE float exponential(float x) {
    float power = x * 1.44269504f;
    float whole = rintf(power);
    float rest = x - whole * 0.69314718f;
    float value = 1.9875691500e-4f;
    value = value * rest + 1.3981999507e-3f;
    value = value * rest + 8.3334519073e-3f;
    value = value * rest + 4.1665795894e-2f;
    value = value * rest + 1.6666665459e-1f;
    value = value * rest + 5.0000001201e-1f;
    value = value * rest * rest + rest + 1;
    int32_t exponent = ((int32_t)whole + 127) << 23;
    float scale;
    memcpy(&scale, &exponent, 4);
    return x < -87 ? 0 : value * scale;
}

typedef struct Pool Pool;

// Run tasks 0 to tasks - 1, each once, on the threads of the pool and the caller's.
void share(Pool *pool, void (*task)(const void *job, int64_t index), const void *job, int64_t tasks);
int pool_threads(const Pool *pool);

// out [rows][outs] = x [rows][in] @ weight.T + bias, with the weight packed as cpu_linear.c says.
void pliant_linear(
    Pool *pool, bool bf16, const void *x, const void *weight, const float *bias, void *out,
    int64_t rows, int64_t in, int64_t outs
);
