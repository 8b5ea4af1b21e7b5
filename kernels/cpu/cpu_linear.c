// x @ weight.T + bias for any number of rows, from one packed copy of the weight that every path below reads in order.
//
// The packed weight has panels of 16 outputs: float32 [panels][in][16], bfloat16 [panels][in / 2][16][2] with `in` a
// multiple of 32. The latter is what AMX tiles and AVX-512's dot products take, and two shifts widen it elsewhere.
#include "cpu_kernels.h"
#if defined(__AMX_BF16__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#define AMX
#endif

#define PARTS (PANEL / WIDTH)
#if defined(__AVX512F__) // 32 registers of 16
#define ROWS 8
#define PANELS 3
#else
#define ROWS 6
#define PANELS 1
#endif

typedef struct {
    const void *x;      // [rows][in]
    const void *weight; // packed
    const float *bias;  // [out], or null
    void *out;          // [rows][out]
    int64_t rows, in, outs;
    int group; // panels per task
} Linear;

// Write the sums of one row and panel. Never inlined: it would cost `block` half of its registers.
static __attribute__((noinline)) void finish(
    const Linear *linear, int64_t row, int64_t panel, const float *sums, bool bf16
) {
    int64_t first = panel * PANEL, count = least(linear->outs - first, PANEL);
    void *out = (void *)at(linear->out, row * linear->outs + first, bf16);
    for (int64_t i = 0; i < count; i++)
        put(out, i, linear->bias ? sums[i] + linear->bias[first + i] : sums[i], bf16);
}

// sums += one step's weights times x: one value of x in float32, a pair in bfloat16.
INLINE vec multiply(vec sums, const void *x, int64_t step, vec weight, bool bf16) {
    if (!bf16)
        return sums + weight * ((const float *)x)[step];
    uint32_t pair;
    memcpy(&pair, (const uint32_t *)x + step, 4);
#if defined(__AVX512BF16__)
    return _mm512_dpbf16_ps(sums, (__m512bh)_mm512_set1_epi32(pair), (__m512bh)weight);
#else
    bits both = (bits){0} + pair;
    sums += (vec)((bits)weight << 16) * (vec)(both << 16);
    return sums + (vec)((bits)weight & 0xffff0000) * (vec)(both & 0xffff0000);
#endif
}

INLINE void block(const Linear *linear, int64_t row, int64_t panel, const int rows, const int panels, bool bf16) {
    vec sums[ROWS][PANELS * PARTS] = {0};
    int64_t steps = bf16 ? linear->in / 2 : linear->in;
    const float *weight = (const float *)linear->weight + panel * steps * PANEL;
    for (int64_t step = 0; step < steps; step++) {
        vec columns[PANELS * PARTS];
        if (rows > 1 && row == 0) // one row takes no longer than its weights
            UNROLL for (int p = 0; p < panels; p++)
                __builtin_prefetch(weight + (p * steps + step) * PANEL + AHEAD / 4);
        UNROLL for (int c = 0; c < panels * PARTS; c++)
            columns[c] = load(weight, (c / PARTS * steps + step) * PANEL + c % PARTS * WIDTH, false);
        UNROLL for (int r = 0; r < rows; r++) {
            const void *x = at(linear->x, (row + r) * linear->in, bf16);
            UNROLL for (int c = 0; c < panels * PARTS; c++)
                sums[r][c] = multiply(sums[r][c], x, step, columns[c], bf16);
        }
    }
    float done[ROWS][PANELS][PANEL];
    memcpy(done, sums, sizeof done);
    for (int r = 0; r < rows; r++)
        for (int p = 0; p < panels; p++)
            finish(linear, row + r, panel + p, done[r][p], bf16);
}

INLINE void some_panels(const Linear *linear, int64_t panel, const int panels, bool bf16) {
    int64_t row = 0;
    for (; row + ROWS <= linear->rows; row += ROWS)
        block(linear, row, panel, ROWS, panels, bf16);
    switch (linear->rows - row) {
    case 1: block(linear, row, panel, 1, panels, bf16); break;
    case 2: block(linear, row, panel, 2, panels, bf16); break;
    case 3: block(linear, row, panel, 3, panels, bf16); break;
    case 4: block(linear, row, panel, 4, panels, bf16); break;
    case 5: block(linear, row, panel, 5, panels, bf16); break;
#if ROWS > 6
    case 6: block(linear, row, panel, 6, panels, bf16); break;
    case 7: block(linear, row, panel, 7, panels, bf16); break;
#endif
    }
}

INLINE void vector_task(const void *job, int64_t index, bool bf16) {
    const Linear *linear = job;
    int64_t panel = index * linear->group;
    int64_t last = least(panel + linear->group, (linear->outs + PANEL - 1) / PANEL);
    for (; panel + PANELS <= last; panel += PANELS)
        some_panels(linear, panel, PANELS, bf16);
#if PANELS > 1
    for (; panel < last; panel++)
        some_panels(linear, panel, 1, bf16);
#endif
}

static void float32_task(const void *job, int64_t index) { vector_task(job, index, false); }
static void bf16_task(const void *job, int64_t index) { vector_task(job, index, true); }

#if defined(AMX)
// Tiles 0 to 3 sum up to 32 rows by 2 panels, 4 and 5 hold x, 6 and 7 weights.
typedef struct {
    uint8_t palette, start, zeros[14];
    uint16_t bytes[16];
    uint8_t rows[16];
} Tiles;

#define TILES_AHEAD 2048 // as AHEAD

INLINE Tiles tiles_for(int64_t rows) {
    Tiles tiles = {.palette = 1};
    int64_t upper = least(rows, 16), lower = least(rows > 16 ? rows - 16 : 1, 16);
    for (int i = 0; i < 8; i++) {
        tiles.bytes[i] = 64;
        tiles.rows[i] = i > 5 ? 16 : i == 2 || i == 3 || i == 5 ? lower : upper;
    }
    return tiles;
}

INLINE void amx_block(const Linear *linear, int64_t row, int64_t panel, const bool two_rows, const bool two_panels) {
    int64_t rows = linear->rows - row, stride = 2 * linear->in;
    const char *x = (const char *)linear->x + row * stride;
    const char *weight = (const char *)linear->weight + panel * 16 * stride;
    _tile_zero(0);
    if (two_panels) _tile_zero(1);
    if (two_rows) _tile_zero(2);
    if (two_rows && two_panels) _tile_zero(3);
    for (int64_t byte = 0; byte < stride; byte += 64) {
        if (row == 0)
            for (int64_t line = byte * 16 + TILES_AHEAD; line < byte * 16 + TILES_AHEAD + 1024; line += 64) {
                __builtin_prefetch(weight + line);
                if (two_panels) __builtin_prefetch(weight + 16 * stride + line);
            }
        _tile_loadd(6, weight + byte * 16, 64);
        _tile_loadd(4, x + byte, stride);
        _tile_dpbf16ps(0, 4, 6);
        if (two_rows) {
            _tile_loadd(5, x + 16 * stride + byte, stride);
            _tile_dpbf16ps(2, 5, 6);
        }
        if (two_panels) {
            _tile_loadd(7, weight + 16 * stride + byte * 16, 64);
            _tile_dpbf16ps(1, 4, 7);
            if (two_rows) _tile_dpbf16ps(3, 5, 7);
        }
    }
    float sums[4][16][16];
    _tile_stored(0, sums[0], 64);
    if (two_panels) _tile_stored(1, sums[1], 64);
    if (two_rows) _tile_stored(2, sums[2], 64);
    if (two_rows && two_panels) _tile_stored(3, sums[3], 64);
    for (int64_t r = 0; r < least(rows, two_rows ? 32 : 16); r++)
        for (int p = 0; p < 1 + two_panels; p++)
            finish(linear, row + r, panel + p, sums[r / 16 * 2 + p][r % 16], true);
}

INLINE void amx_panels(const Linear *linear, int64_t panel, const bool two_panels) {
    Tiles tiles = tiles_for(32);
    int64_t row = 0;
    if (linear->rows >= 32)
        _tile_loadconfig(&tiles);
    for (; row + 32 <= linear->rows; row += 32)
        amx_block(linear, row, panel, true, two_panels);
    if (row == linear->rows)
        return;
    tiles = tiles_for(linear->rows - row);
    _tile_loadconfig(&tiles);
    if (linear->rows - row > 16)
        amx_block(linear, row, panel, true, two_panels);
    else
        amx_block(linear, row, panel, false, two_panels);
}

static void amx_task(const void *job, int64_t index) {
    const Linear *linear = job;
    int64_t panel = index * linear->group;
    int64_t last = least(panel + linear->group, (linear->outs + PANEL - 1) / PANEL);
    Tiles before;
    _tile_storeconfig(&before); // another library's, which may rely on it
    for (; panel + 2 <= last; panel += 2)
        amx_panels(linear, panel, true);
    if (panel < last)
        amx_panels(linear, panel, false);
    _tile_loadconfig(&before);
}

static bool amx_allowed(void) {
    static int allowed = -1;
    if (allowed < 0)
        allowed = !syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* XFEATURE_XTILEDATA */);
    return allowed;
}
#endif

void pliant_linear(
    Pool *pool, bool bf16, const void *x, const void *weight, const float *bias, void *out,
    int64_t rows, int64_t in, int64_t outs
) {
    void (*task)(const void *, int64_t) = bf16 ? bf16_task : float32_task;
    int64_t group = PANELS;
#if defined(AMX)
    if (bf16 && amx_allowed()) {
        task = amx_task;
        group = 2;
    }
#endif
    int64_t panels = (outs + PANEL - 1) / PANEL;
    for (int64_t row = 0; row < rows; row += CHUNK) {
        Linear linear = {
            at(x, row * in, bf16), weight, bias, (void *)at(out, row * outs, bf16), least(rows - row, CHUNK), in, outs,
            group
        };
        share(pool, task, &linear, (panels + group - 1) / group);
    }
}

typedef struct {
    const uint32_t *rows; // [panels * PANEL][steps], a float32 or a pair of bfloat16 a step
    uint32_t *packed;
    int64_t steps;
} Pack;

static void pack_panel(const void *job, int64_t panel) {
    const Pack *pack = job;
    const uint32_t *rows = pack->rows + panel * PANEL * pack->steps;
    uint32_t *packed = pack->packed + panel * PANEL * pack->steps;
    for (int64_t step = 0; step < pack->steps; step++)
        for (int64_t row = 0; row < PANEL; row++)
            packed[step * PANEL + row] = rows[row * pack->steps + step];
}

void pliant_pack(Pool *pool, const uint32_t *rows, uint32_t *packed, int64_t panels, int64_t steps) {
    Pack pack = {rows, packed, steps};
    share(pool, pack_panel, &pack, panels);
}
