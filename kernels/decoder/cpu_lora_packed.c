// LoRA for a group of many rows: both matrices are packed as cpu_linear.c takes them, which the rows share.
#include <stdlib.h>

#include "cpu_lora.h"

typedef struct {
    const void *matrix; // A [outs][in] or B transposed [in][outs]
    void *packed;
    int64_t outs, in, padded; // inputs with zeros behind them, as packed
    bool transposed, bf16;
} Pack;

// packed[step][i] = rows[i][step], for 16 steps.
INLINE void transpose(const uint32_t *rows, int64_t stride, uint32_t *packed) {
#if defined(__AVX512F__)
    const __m512i low = _mm512_set_epi32(23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
    __m512i from[PANEL], to[PANEL];
    UNROLL for (int i = 0; i < PANEL; i++)
        from[i] = _mm512_loadu_si512(rows + i * stride);
    UNROLL for (int round = 0; round < 4; round++) {
        UNROLL for (int i = 0; i < PANEL / 2; i++) {
            to[2 * i] = _mm512_permutex2var_epi32(from[i], low, from[i + PANEL / 2]);
            to[2 * i + 1] = _mm512_permutex2var_epi32(from[i], high, from[i + PANEL / 2]);
        }
        UNROLL for (int i = 0; i < PANEL; i++)
            from[i] = to[i];
    }
    UNROLL for (int i = 0; i < PANEL; i++)
        _mm512_storeu_si512(packed + i * PANEL, from[i]);
#else
    for (int step = 0; step < PANEL; step++)
        for (int i = 0; i < PANEL; i++)
            packed[step * PANEL + i] = rows[i * stride + step];
#endif
}

// One step of a panel from one or two rows of transposed B.
INLINE void interleave(const void *row, const void *next, uint32_t *packed, int64_t count, bool bf16) {
    for (int64_t i = 0; i < count; i++)
        if (bf16)
            packed[i] = ((const uint16_t *)row)[i] | (next ? (uint32_t)((const uint16_t *)next)[i] << 16 : 0);
        else
            packed[i] = ((const uint32_t *)row)[i];
}

// A panel of outputs, in words: one of float32, or two inputs of bfloat16.
INLINE void pack(const Pack *job, int64_t panel, bool bf16) {
    int64_t pair = 1 + bf16, steps = job->padded / pair, first = panel * PANEL, step = 0;
    int64_t count = least(job->outs - first, PANEL); // or less than none
    uint32_t *packed = (uint32_t *)job->packed + panel * steps * PANEL;
    if (count < PANEL || job->padded > job->in)
        memset(packed, 0, steps * PANEL * 4);
    if (job->transposed) {
        for (int64_t in = 0; in < job->in; in += pair) {
            const void *row = at(job->matrix, in * job->outs + first, bf16), *next = at(row, job->outs, bf16);
            if (count == PANEL && in + pair <= job->in)
                interleave(row, next, packed + in / pair * PANEL, PANEL, bf16);
            else
                interleave(row, in + pair <= job->in ? next : NULL, packed + in / pair * PANEL, count, bf16);
        }
        return;
    }
    int64_t stride = job->in / pair;
    const uint32_t *rows = (const uint32_t *)job->matrix + first * stride;
    for (; count == PANEL && step + PANEL <= stride; step += PANEL)
        transpose(rows + step, stride, packed + step * PANEL);
    for (; step < stride; step++)
        for (int64_t i = 0; i < count; i++)
            packed[step * PANEL + i] = rows[i * stride + step];
}

static void pack_task(const void *job, int64_t index) {
    if (((const Pack *)job)->bf16)
        pack(job, index, true);
    else
        pack(job, index, false);
}

typedef struct {
    const Lora *lora;
    const Group *group;
    const void *delta; // [count][out]
    int64_t first, out;
} Add;

static void add_task(const void *job, int64_t row) {
    const Add *add = job;
    bool bf16 = add->lora->bf16;
    void *y = (void *)at(add->lora->y, add->group->rows[row] * add->lora->stride + add->first, bf16);
    const void *delta = at(add->delta, row * add->out, bf16);
    if (bf16)
        for (int64_t i = 0; i < add->out; i++)
            put(y, i, get(y, i, true) + get(delta, i, true), true);
    else
        for (int64_t i = 0; i < add->out; i++)
            put(y, i, get(y, i, false) + get(delta, i, false), false);
}

INLINE int64_t padded(int64_t in, bool bf16) { return bf16 ? (in + 31) / 32 * 32 : in; }
INLINE int64_t panels(int64_t outs) { return (outs + PANEL - 1) / PANEL; }

static void pack_panels(Pool *pool, int64_t panels, Pack job) { share(pool, pack_task, &job, panels); }

// Ranks are padded like the inputs of a linear layer: A has rows of zeros for them, and B columns.
void add_packed(Pool *pool, const Lora *lora, const Group *group) {
    bool bf16 = lora->bf16;
    int64_t size = bf16 ? 2 : 4, count = group->count, in = padded(lora->in, bf16), rank = 0, out = 0, first = 0;
    for (int m = 0; m < MODULES; m++) {
        rank = most(rank, padded(group->ranks[m], bf16));
        out = most(out, lora->outs[m]);
    }
    int64_t bytes = size * (panels(rank) * PANEL * in + panels(out) * PANEL * rank + count * (in + rank + out));
    char *packed_a = aligned_alloc(64, (bytes + 63) / 64 * 64), *packed_b = packed_a + size * panels(rank) * PANEL * in;
    char *gathered = packed_b + size * panels(out) * PANEL * rank, *inner = gathered + size * count * in;
    char *delta = inner + size * count * rank;
    const void *x = at(lora->x, group->rows[0] * in, bf16), *a = group->a;
    if (in > lora->in || group->rows[count - 1] - group->rows[0] >= count) {
        x = memset(gathered, 0, size * count * in);
        for (int64_t r = 0; r < count; r++)
            memcpy(gathered + size * r * in, at(lora->x, group->rows[r] * lora->in, bf16), size * lora->in);
    }
    for (int m = 0; m < MODULES; m++) {
        rank = group->ranks[m];
        out = lora->outs[m];
        if (rank) {
            int64_t wide = padded(rank, bf16);
            pack_panels(pool, panels(wide), (Pack){a, packed_a, rank, lora->in, in, false, bf16});
            pack_panels(pool, panels(out), (Pack){group->b[m], packed_b, out, rank, wide, true, bf16});
            pliant_linear(pool, bf16, x, packed_a, NULL, inner, count, in, wide);
            pliant_linear(pool, bf16, inner, packed_b, NULL, delta, count, wide, out);
            Add add = {lora, group, delta, first, out};
            share(pool, add_task, &add, count);
        }
        a = at(a, rank * lora->in, bf16);
        first += out;
    }
    free(packed_a);
}
