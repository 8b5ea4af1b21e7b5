// What LoRA adapters add to a linear layer: y += B A x, where every group of rows has matrices of its own.
//
// A group of few rows, in a decode step, takes as long as its matrices take to read. So all such groups are computed
// side by side, in two rounds of small tasks that read A and then B once and in order, and pad no rank. A group of many
// rows, as in a prompt, is bound by arithmetic, and multiplied as linear layers are: see cpu_lora_packed.c.
#include <stdlib.h>

#include "cpu_lora.h"

#define FEW 32 // rows
#define WORTH_PACKING 1024 // rows times rank from which bfloat16, with AMX, is faster packed
#define RANKS 16 // of A that are a task
#define OUTS 512 // columns of B that are a task
#define AT_ONCE 4
#if defined(__AVX512F__)
#define ROWS 4
#else
#define ROWS 2
#endif

// Values that two vectors of bits hold: those at even and at odd places of a bfloat16 vector, or all of float32.
INLINE vec part(bits raw, int odd, bool bf16) {
    return (vec)(!bf16 ? raw : odd ? raw & 0xffff0000 : raw << 16);
}

INLINE bits read_bits(const void *array, int64_t i, bool bf16) {
    bits raw;
    memcpy(&raw, at(array, i, bf16), sizeof raw);
    return raw;
}

INLINE vec multiply(vec sums, bits x, bits y, bool bf16) {
#if defined(__AVX512BF16__)
    if (bf16)
        return _mm512_dpbf16_ps(sums, (__m512bh)x, (__m512bh)y);
#endif
    sums += part(x, 0, bf16) * part(y, 0, bf16);
    return bf16 ? sums + part(x, 1, bf16) * part(y, 1, bf16) : sums;
}

INLINE float total(vec sums) {
    float parts[WIDTH], sum = 0;
    memcpy(parts, &sums, sizeof parts);
    for (int i = 0; i < WIDTH; i++)
        sum += parts[i];
    return sum;
}

// inner[row][rank] for some rows and ranks: A, and x while it lies in the core's cache, are read in order.
INLINE void dots(
    const Lora *lora, const Group *group, int64_t row, int64_t rank, const int rows, const int ranks, bool bf16
) {
    vec sums[ROWS][AT_ONCE] = {0};
    const void *x[ROWS], *a = at(group->a, rank * lora->in, bf16);
    int64_t in = lora->in, step = bf16 ? 2 * WIDTH : WIDTH, i = 0;
    UNROLL for (int r = 0; r < rows; r++)
        x[r] = at(lora->x, group->rows[row + r] * in, bf16);
    for (; i + step <= in; i += step) {
        bits of_a[AT_ONCE];
        UNROLL for (int k = 0; k < ranks; k++)
            of_a[k] = read_bits(a, k * in + i, bf16);
        UNROLL for (int r = 0; r < rows; r++) {
            bits of_x = read_bits(x[r], i, bf16);
            UNROLL for (int k = 0; k < ranks; k++)
                sums[r][k] = multiply(sums[r][k], of_x, of_a[k], bf16);
        }
    }
    for (int r = 0; r < rows; r++)
        for (int k = 0; k < ranks; k++) {
            float sum = total(sums[r][k]);
            for (int64_t rest = i; rest < in; rest++)
                sum += get(x[r], rest, bf16) * get(a, k * in + rest, bf16);
            group->inner[(row + r) * group->rank + rank + k] = sum;
        }
}

INLINE void dots_of_rows(const Lora *lora, const Group *group, int64_t rank, const int ranks, bool bf16) {
    int64_t row = 0;
    for (; row + ROWS <= group->count; row += ROWS)
        dots(lora, group, row, rank, ROWS, ranks, bf16);
    for (; row < group->count; row++)
        dots(lora, group, row, rank, 1, ranks, bf16);
}

INLINE void shrink(const Lora *lora, const Group *group, int64_t task, bool bf16) {
    int64_t rank = task * RANKS, last = least(rank + RANKS, group->rank);
    for (; rank + AT_ONCE <= last; rank += AT_ONCE)
        dots_of_rows(lora, group, rank, AT_ONCE, bf16);
    for (; rank < last; rank++)
        dots_of_rows(lora, group, rank, 1, bf16);
}

// sums[row] += inner[row] times some rows of B; in bfloat16, a vector of even places comes before one of odd places.
INLINE void add_ranks(
    float (*sums)[OUTS], const float *inner, int64_t stride, int64_t rows, const void *b, int64_t out, int64_t columns,
    const int ranks, bool bf16
) {
    int64_t step = bf16 ? 2 * WIDTH : WIDTH, i = 0;
    for (; i + step <= columns; i += step) {
        bits of_b[AT_ONCE];
        UNROLL for (int k = 0; k < ranks; k++)
            of_b[k] = read_bits(b, k * out + i, bf16);
        for (int64_t r = 0; r < rows; r++)
            UNROLL for (int odd = 0; odd < 1 + bf16; odd++) {
                vec sum = load(sums[r], i + odd * WIDTH, false);
                UNROLL for (int k = 0; k < ranks; k++)
                    sum += inner[r * stride + k] * part(of_b[k], odd, bf16);
                memcpy(sums[r] + i + odd * WIDTH, &sum, sizeof sum);
            }
    }
    for (; i < columns; i++)
        for (int64_t r = 0; r < rows; r++)
            for (int k = 0; k < ranks; k++)
                sums[r][i] += inner[r * stride + k] * get(b, k * out + i, bf16);
}

// As to_bf16, in the upper halves; the lower ones are to be dropped.
INLINE bits rounded_bits(vec value) {
    bits word = (bits)value, number = (bits)(value == value);
    return ((word + 0x7fff + (word >> 16 & 1)) & number) | (~number & 0x7fc00000);
}

INLINE void add_sums(const float *sums, void *y, int64_t columns, bool bf16) {
    int64_t step = bf16 ? 2 * WIDTH : WIDTH, i = 0;
    for (; i + step <= columns; i += step) {
        bits old = read_bits(y, i, bf16), new;
        vec first = part(old, 0, bf16) + load(sums, i, false);
        if (bf16) {
            vec second = part(old, 1, bf16) + load(sums, i + WIDTH, false);
            new = rounded_bits(first) >> 16 | (rounded_bits(second) & 0xffff0000);
        } else {
            new = (bits)first;
        }
        memcpy((void *)at(y, i, bf16), &new, sizeof new);
    }
    for (; i < columns; i++)
        put(y, i, get(y, i, bf16) + sums[i], bf16);
}

INLINE void expand(const Lora *lora, const Group *group, int64_t task, bool bf16) {
    const float *inner = group->inner;
    int64_t first = 0, module = 0;
    for (;; module++) {
        int64_t tasks = group->ranks[module] ? (lora->outs[module] + OUTS - 1) / OUTS : 0;
        if (task < tasks)
            break;
        task -= tasks;
        inner += group->ranks[module];
        first += lora->outs[module];
    }
    int64_t out = lora->outs[module], column = task * OUTS, columns = least(out - column, OUTS), rank = 0;
    float sums[FEW][OUTS];
    memset(sums, 0, group->count * sizeof *sums);
    for (; rank < group->ranks[module]; rank += AT_ONCE) {
        const void *b = at(group->b[module], rank * out + column, bf16);
        if (rank + AT_ONCE <= group->ranks[module])
            add_ranks(sums, inner + rank, group->rank, group->count, b, out, columns, AT_ONCE, bf16);
        else
            for (int64_t k = 0; k < group->ranks[module] - rank; k++)
                add_ranks(
                    sums, inner + rank + k, group->rank, group->count, at(b, k * out, bf16), out, columns, 1, bf16
                );
    }
    for (int64_t r = 0; r < group->count; r++)
        add_sums(sums[r], (void *)at(lora->y, group->rows[r] * lora->stride + first + column, bf16), columns, bf16);
}

INLINE void few_task(const Lora *lora, int64_t index, bool bf16) {
    const Group *group = lora->groups;
    while (group->tasks[lora->round] <= index)
        group++;
    if (group > lora->groups)
        index -= group[-1].tasks[lora->round];
    if (lora->round == 0)
        shrink(lora, group, index, bf16);
    else
        expand(lora, group, index, bf16);
}

static void float32_task(const void *job, int64_t index) { few_task(job, index, false); }
static void bf16_task(const void *job, int64_t index) { few_task(job, index, true); }

void pliant_lora(
    Pool *pool, bool bf16, const void *arena, const void *x, void *y, const int32_t *rows, const int32_t *starts,
    const Place (*places)[SITES], const int64_t (*sizes)[MODULES], int64_t groups, int64_t layer, int64_t site,
    int64_t in
) {
    const int64_t *outs = sizes[site];
    Group few[groups], many[groups];
    Lora lora = {few, x, y, in, outs[0] + outs[1] + outs[2], outs, 0, bf16};
    int64_t count = 0, count_many = 0, tasks[2] = {0}, inner = 0;
    for (int64_t g = 0; g < groups; g++) {
        const Place *place = places[g] + site;
        Group group = {rows + starts[g], starts[g + 1] - starts[g], at(arena, place->a + layer * place->block, bf16)};
        int64_t expanding = 0, rank = 0;
        for (int m = 0; m < MODULES; m++) {
            group.ranks[m] = place->modules[m].rank;
            group.rank += group.ranks[m];
            rank = most(rank, group.ranks[m]);
            group.b[m] = at(arena, place->modules[m].b + layer * place->block, bf16);
            expanding += group.ranks[m] ? (outs[m] + OUTS - 1) / OUTS : 0;
        }
        if (!group.rank)
            continue;
        if (group.count > FEW || (bf16 && group.count * rank > WORTH_PACKING)) {
            many[count_many++] = group;
            continue;
        }
        inner += group.count * group.rank;
        group.tasks[0] = tasks[0] += (group.rank + RANKS - 1) / RANKS;
        group.tasks[1] = tasks[1] += expanding;
        few[count++] = group;
    }
    for (int64_t g = 0; g < count_many; g++)
        add_packed(pool, &lora, many + g);
    if (!count)
        return;
    float *sums = malloc(sizeof(float) * inner), *next = sums;
    for (int64_t g = 0; g < count; next += few[g].count * few[g].rank, g++)
        few[g].inner = next;
    for (; lora.round < 2; lora.round++)
        share(pool, bf16 ? bf16_task : float32_task, &lora, tasks[lora.round]);
    free(sums);
}
