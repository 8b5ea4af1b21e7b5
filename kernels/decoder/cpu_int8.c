// x @ (scale * weight).T + bias, with weights and rows of x as whole numbers up to 127 (W8A8, see int8.py).
//
// Sums of whole numbers are exact, in any order: what a row gives does not depend on the rows beside it.
//
// The packed weight has panels of 16 outputs, [in / 4][16][4], `in` a multiple of 32. 128 is added to each weight, as
// the dot products of AVX-512 and AVX-VNNI take bytes without sign on one side; a row's own sum takes it off again.
// A CPU without them widens weights to 16 bits, and sums products of pairs. Of AMX no use is made.
#include "../cpu/cpu_kernels.h"
#include <stdlib.h>

// What the CPU has: products of four bytes added to a sum, or the sum of two products of 16 bits.
#if WIDTH == 16 && defined(__AVX512VNNI__)
#define DOT(sums, weights, x) (ints)_mm512_dpbusd_epi32((__m512i)(sums), (__m512i)(weights), (__m512i)(x))
#elif WIDTH == 8 && defined(__AVXVNNI__)
#define DOT(sums, weights, x) (ints)_mm256_dpbusd_avx_epi32((__m256i)(sums), (__m256i)(weights), (__m256i)(x))
#elif WIDTH == 16 && defined(__AVX512BW__)
#define WIDEN(bytes) (ints)_mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i *)(bytes)))
#define PAIRS(weights, x) (ints)_mm512_madd_epi16((__m512i)(weights), (__m512i)(x))
#elif WIDTH == 8 && defined(__AVX2__)
#define WIDEN(bytes) (ints)_mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)(bytes)))
#define PAIRS(weights, x) (ints)_mm256_madd_epi16((__m256i)(weights), (__m256i)(x))
#elif WIDTH == 4 && defined(__SSE2__)
#define WIDEN(bytes) (ints)_mm_unpacklo_epi8(_mm_loadl_epi64((const __m128i *)(bytes)), _mm_setzero_si128())
#define PAIRS(weights, x) (ints)_mm_madd_epi16((__m128i)(weights), (__m128i)(x))
#endif

#if defined(DOT) // a lane sums four products, for one output
typedef int8_t whole;
#define OUTS WIDTH
#else // two, and the next lane the other two
typedef int16_t whole;
#define OUTS (WIDTH / 2)
#endif
#define PARTS (PANEL / OUTS)
#define NARROW (PARTS == 1 ? 1 : 2) // columns of one panel
#if defined(__AVX512F__)            // 32 registers
#define ROWS 8
#define COLUMNS (PARTS == 1 ? 3 : 2)
#else
#define ROWS 6
#define COLUMNS 2
#endif
#define GROUP 3     // panels per task
#define GRAIN 16384 // values worth a task
#define OFFSET 128

typedef int32_t ints __attribute__((vector_size(4 * WIDTH)));
typedef uint8_t bytes __attribute__((vector_size(2 * WIDTH)));
typedef int16_t words __attribute__((vector_size(4 * WIDTH)));
typedef int64_t quads __attribute__((vector_size(4 * WIDTH)));
typedef whole some __attribute__((vector_size(sizeof(whole) * WIDTH)));

typedef struct {
    const void *x; // [rows][in]
    whole *values; // [rows][in]
    float *scale;  // [rows]
    int32_t *sums; // [rows], OFFSET times those of the values
    int64_t rows, in, rows_per_task;
} Rows;

typedef struct {
    Rows x;
    const uint8_t *weight;     // packed
    const float *scale, *bias; // [panels * PANEL]
    void *out;                 // [rows][outs]
    int64_t outs;
    bool bf16;
} Linear;

// To the nearest, ties to even.
INLINE ints nearest(vec x) {
#if defined(__AVX512F__)
    return (ints)_mm512_cvtps_epi32((__m512)x);
#elif WIDTH == 8
    return (ints)_mm256_cvtps_epi32((__m256)x);
#elif defined(__SSE2__)
    return (ints)_mm_cvtps_epi32((__m128)x);
#else
    ints found;
    for (int i = 0; i < WIDTH; i++)
        found[i] = (int32_t)rintf(x[i]);
    return found;
#endif
}

// As int8.quantized does, to the bit.
INLINE void quantize(const Rows *rows, int64_t row, bool bf16) {
    const void *x = at(rows->x, row * rows->in, bf16);
    whole *values = rows->values + row * rows->in;
    ints most = {0}, sums = {0};
    for (int64_t i = 0; i < rows->in; i += WIDTH) {
        ints size = (ints)load(x, i, bf16) & 0x7fffffff; // bits, which are in the order of what they stand for
        ints more = size > most;
        most = (size & more) | (most & ~more);
    }
    int32_t word = 0, sum = 0;
    for (int i = 0; i < WIDTH; i++)
        word = most[i] > word ? most[i] : word;
    float largest;
    memcpy(&largest, &word, 4);
    if (!(largest < INFINITY)) { // nor may the results be finite
        memset(values, 0, rows->in * sizeof *values);
        rows->scale[row] = NAN;
        rows->sums[row] = 0;
        return;
    }
    float scale = largest / 127;
    rows->scale[row] = scale = scale < 1e-30f ? 1 : scale;
    for (int64_t i = 0; i < rows->in; i += WIDTH) {
        ints found = nearest(load(x, i, bf16) * (1 / scale));
        some narrow = __builtin_convertvector(found, some);
        memcpy(values + i, &narrow, sizeof narrow);
        sums += found;
    }
    for (int i = 0; i < WIDTH; i++)
        sum += sums[i];
    rows->sums[row] = OFFSET * sum;
}

INLINE void quantize_rows(const Linear *linear, int64_t index, bool bf16) {
    int64_t first = index * linear->x.rows_per_task;
    for (int64_t row = first; row < least(first + linear->x.rows_per_task, linear->x.rows); row++)
        quantize(&linear->x, row, bf16);
}

static void quantize_task(const void *job, int64_t index) {
    if (((const Linear *)job)->bf16)
        quantize_rows(job, index, true);
    else
        quantize_rows(job, index, false);
}

// Write what a row gives for a column of OUTS outputs. Never inlined: it would cost `tile` its registers, and the
// compiler might round it another way in each of them.
static __attribute__((noinline)) void finish(const Linear *linear, int64_t row, int64_t column, const ints *sums) {
    int64_t first = column * OUTS, count = least(linear->outs - first, OUTS);
    float scale = linear->x.scale[row];
    uint32_t offset = linear->x.sums[row], lanes[WIDTH];
    float done[OUTS];
    memcpy(lanes, sums, sizeof lanes);
    for (int i = 0; i < OUTS; i++) {
        uint32_t sum = OUTS == WIDTH ? lanes[i] : lanes[2 * i] + lanes[2 * i + 1];
        done[i] = (int32_t)(sum - offset) * (scale * linear->scale[first + i]) + linear->bias[first + i];
    }
    void *out = (void *)at(linear->out, row * linear->outs + first, linear->bf16);
    if (!linear->bf16 && count == OUTS)
        memcpy(out, done, sizeof done);
    else
        for (int64_t i = 0; i < count; i++)
            put(out, i, done[i], linear->bf16);
}

// Four weights of each of OUTS outputs.
INLINE ints weights(const uint8_t *packed) {
#if defined(DOT)
    ints found;
    memcpy(&found, packed, sizeof found);
    return found;
#elif defined(WIDEN)
    return WIDEN(packed);
#else
    bytes narrow;
    memcpy(&narrow, packed, sizeof narrow);
    return (ints)__builtin_convertvector(narrow, words);
#endif
}

// Four values of a row, for every output.
INLINE ints spread(const whole *values) {
#if defined(DOT)
    int32_t four;
    memcpy(&four, values, sizeof four);
    return (ints){0} + four;
#else
    int64_t four;
    memcpy(&four, values, sizeof four);
    return (ints)((quads){0} + four);
#endif
}

INLINE ints add_products(ints sums, ints weights, ints x) {
#if defined(DOT)
    return DOT(sums, weights, x);
#elif defined(PAIRS)
    return sums + PAIRS(weights, x);
#else
    return sums + (weights << 16 >> 16) * (x << 16 >> 16) + (weights >> 16) * (x >> 16);
#endif
}

INLINE void tile(const Linear *linear, int64_t row, int64_t column, const int rows, const int columns) {
    ints sums[ROWS][COLUMNS] = {0};
    int64_t in = linear->x.in;
    const whole *values = linear->x.values + row * in;
    const uint8_t *packed[COLUMNS];
    for (int c = 0; c < columns; c++)
        packed[c] = linear->weight + (column + c) / PARTS * in * PANEL + (column + c) % PARTS * OUTS * 4;
    for (int64_t i = 0; i < in; i += 4) {
        ints four[COLUMNS];
        UNROLL for (int c = 0; c < columns; c++)
            four[c] = weights(packed[c] + i * PANEL);
        if (row == 0)
            UNROLL for (int c = 0; c < columns; c++)
                __builtin_prefetch(packed[c] + i * PANEL + AHEAD);
        UNROLL for (int r = 0; r < rows; r++) {
            ints x = spread(values + r * in + i);
            UNROLL for (int c = 0; c < columns; c++)
                sums[r][c] = add_products(sums[r][c], four[c], x);
        }
    }
    ints done[ROWS][COLUMNS];
    memcpy(done, sums, sizeof done);
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < columns; c++)
            finish(linear, row + r, column + c, &done[r][c]);
}

INLINE void some_columns(const Linear *linear, int64_t column, const int columns) {
    int64_t row = 0;
    for (; row + ROWS <= linear->x.rows; row += ROWS)
        tile(linear, row, column, ROWS, columns);
    switch (linear->x.rows - row) {
    case 1: tile(linear, row, column, 1, columns); break;
    case 2: tile(linear, row, column, 2, columns); break;
    case 3: tile(linear, row, column, 3, columns); break;
    case 4: tile(linear, row, column, 4, columns); break;
    case 5: tile(linear, row, column, 5, columns); break;
#if ROWS > 6
    case 6: tile(linear, row, column, 6, columns); break;
    case 7: tile(linear, row, column, 7, columns); break;
#endif
    }
}

static void multiply_task(const void *job, int64_t index) {
    const Linear *linear = job;
    int64_t panels = (linear->outs + PANEL - 1) / PANEL;
    int64_t column = index * GROUP * PARTS, last = least((index + 1) * GROUP, panels) * PARTS;
    if (linear->x.rows > ROWS) // else memory is what counts: it is read best as it lies
        for (; column + COLUMNS <= last; column += COLUMNS)
            some_columns(linear, column, COLUMNS);
    for (; column < last; column += NARROW)
        some_columns(linear, column, NARROW);
}

void pliant_int8_linear(
    Pool *pool, bool bf16, const void *x, const uint8_t *weight, const float *scale, const float *bias, void *out,
    int64_t rows, int64_t in, int64_t outs
) {
    int64_t most = least(rows, CHUNK);
    whole *values = malloc(most * in * sizeof *values);
    if (rows && !values)
        abort();
    float scales[CHUNK];
    int32_t sums[CHUNK];
    for (int64_t row = 0; row < rows; row += CHUNK) {
        int64_t count = least(rows - row, CHUNK), rows_per_task = (GRAIN + in - 1) / in;
        Rows some_rows = {at(x, row * in, bf16), values, scales, sums, count, in, rows_per_task};
        void *results = (void *)at(out, row * outs, bf16);
        Linear linear = {some_rows, weight, scale, bias, results, outs, bf16};
        share(pool, quantize_task, &linear, (count + rows_per_task - 1) / rows_per_task);
        share(pool, multiply_task, &linear, (outs + GROUP * PANEL - 1) / (GROUP * PANEL));
    }
    free(values);
}
