// Attention of one new token per slot to its slot's text, whose lengths differ (Flover §V-D): a softmax in blocks of
// tokens, float32 throughout, that reads every key and value once for all the queries that share them.
#include "../cpu/cpu_kernels.h"

#define QUERIES 4  // that share keys and are computed together
#define TOKENS 128 // of a block: its keys and values stay in the first-level cache
#define STRIP 4    // vectors of a head that are summed at a time

typedef struct {
    const void *q;             // [rows][heads][head_dim]
    const void *keys, *values; // [rows][kv_heads][max_length][head_dim], rows slot_stride apart
    const int32_t *lengths;    // [rows]
    void *out;                 // [rows][heads][head_dim]
    int64_t heads, kv_heads, max_length, head_dim, slot_stride, window, heads_per_task;
    float scale;
} Attention;

// Have one token's key or value fetched into the second-level cache: the texts of heads lie apart, and what the machine
// fetches ahead by itself begins late in each.
INLINE void fetch(const void *tokens, int64_t t, const int64_t d, bool bf16) {
    for (int64_t i = 0; i < d; i += bf16 ? 32 : 16)
        __builtin_prefetch(at(tokens, t * d + i, bf16), 0, 2);
}

INLINE float sum(vec v) {
    float total = 0;
    for (int i = 0; i < WIDTH; i++)
        total += v[i];
    return total;
}

// scores[g][t] = q[g] . keys[t], while the `next` to be read are fetched
INLINE void score(
    const float (*q)[LARGEST_HEAD], const void *keys, float (*scores)[TOKENS], const void *next, const int queries,
    int64_t tokens, const int64_t d, bool bf16
) {
    for (int64_t t = 0; t < tokens; t++) {
        fetch(next, t, d, bf16);
        vec sums[QUERIES] = {0};
        UNROLL for (int64_t i = 0; i < d; i += WIDTH) {
            vec key = load(keys, t * d + i, bf16);
            UNROLL for (int g = 0; g < queries; g++)
                sums[g] += load(q[g], i, false) * key;
        }
        UNROLL for (int g = 0; g < queries; g++)
            scores[g][t] = sum(sums[g]);
    }
}

// mix, for `width` vectors of a head from i on
INLINE void strip(
    const float (*scores)[TOKENS], const void *values, const float *shrink, float (*out)[LARGEST_HEAD],
    const void *next, const int queries, int64_t tokens, const int64_t d, int64_t i, const int width, bool bf16
) {
    vec sums[QUERIES][STRIP];
    UNROLL for (int g = 0; g < queries; g++)
        UNROLL for (int w = 0; w < width; w++)
            sums[g][w] = load(out[g], i + w * WIDTH, false) * shrink[g];
    for (int64_t t = 0; t < tokens; t++) {
        if (i == 0)
            fetch(next, t, d, bf16);
        UNROLL for (int w = 0; w < width; w++) {
            vec value = load(values, t * d + i + w * WIDTH, bf16);
            UNROLL for (int g = 0; g < queries; g++)
                sums[g][w] += value * scores[g][t];
        }
    }
    UNROLL for (int g = 0; g < queries; g++)
        UNROLL for (int w = 0; w < width; w++)
            memcpy(out[g] + i + w * WIDTH, &sums[g][w], sizeof(vec));
}

// out[g] = out[g] * shrink[g] + sum over t of scores[g][t] * values[t]
INLINE void mix(
    const float (*scores)[TOKENS], const void *values, const float *shrink, float (*out)[LARGEST_HEAD],
    const void *next, const int queries, int64_t tokens, const int64_t d, bool bf16
) {
    int64_t i = 0;
    for (; i + STRIP * WIDTH <= d; i += STRIP * WIDTH)
        strip(scores, values, shrink, out, next, queries, tokens, d, i, STRIP, bf16);
    for (; i < d; i += WIDTH)
        strip(scores, values, shrink, out, next, queries, tokens, d, i, 1, bf16);
}

// Scores become e^(score - largest so far); the factor that what was summed up before must shrink by.
static float soften(float *scores, int64_t tokens, float *largest, float *total) {
    float before = *largest, sum = 0;
    for (int64_t t = 0; t < tokens; t++)
        *largest = scores[t] > *largest ? scores[t] : *largest;
    for (int64_t t = 0; t < tokens; t++)
        sum += scores[t] = exponential(scores[t] - *largest);
    float shrink = exponential(before - *largest);
    *total = *total * shrink + sum;
    return shrink;
}

// Where the text of a row's key/value head begins, counted through all rows.
INLINE int64_t text_of(const Attention *job, int64_t index, const int64_t d) {
    return index / job->kv_heads * job->slot_stride + index % job->kv_heads * job->max_length * d;
}

// One row's queries that share a key/value head, `queries` of them from `head` on.
INLINE void attend(const Attention *job, int64_t row, int64_t head, const int queries, const int64_t d, bool bf16) {
    int64_t group = job->heads / job->kv_heads, length = job->lengths[row];
    int64_t index = row * job->kv_heads + head / group;
    int64_t text = text_of(job, index, d), next_text = text_of(job, index + 1, d);
    float q[QUERIES][LARGEST_HEAD], out[QUERIES][LARGEST_HEAD], scores[QUERIES][TOKENS];
    float largest[QUERIES], total[QUERIES], shrink[QUERIES];
    for (int g = 0; g < queries; g++) {
        largest[g] = -INFINITY;
        total[g] = 0;
        for (int64_t i = 0; i < d; i++) {
            q[g][i] = get(job->q, (row * job->heads + head + g) * d + i, bf16) * job->scale;
            out[g][i] = 0;
        }
    }
    int64_t first = job->window && length > job->window ? length - job->window : 0;
    for (int64_t t = first; t < length; t += TOKENS) {
        int64_t tokens = least(length - t, TOKENS), end = t + tokens;
        int64_t next = end < length ? text + end * d : next_text + first * d;
        const void *keys = at(job->keys, text + t * d, bf16), *values = at(job->values, text + t * d, bf16);
        score(q, keys, scores, values, queries, tokens, d, bf16);
        for (int g = 0; g < queries; g++)
            shrink[g] = soften(scores[g], tokens, &largest[g], &total[g]);
        mix(scores, values, shrink, out, at(job->keys, next, bf16), queries, tokens, d, bf16);
    }
    for (int g = 0; g < queries; g++)
        for (int64_t i = 0; i < d; i++)
            put(job->out, (row * job->heads + head + g) * d + i, out[g][i] / total[g], bf16);
}

INLINE void attend_group(const Attention *job, int64_t row, int64_t head, int64_t queries, const int64_t d, bool bf16) {
    for (; queries >= QUERIES; queries -= QUERIES, head += QUERIES)
        attend(job, row, head, QUERIES, d, bf16);
    if (queries & 2)
        attend(job, row, head, 2, d, bf16);
    if (queries & 1)
        attend(job, row, head + (queries & 2), 1, d, bf16);
}

// `heads_per_task` of one row's key/value heads, one after the other.
INLINE void task(const Attention *job, int64_t index, bool bf16) {
    int64_t group = job->heads / job->kv_heads, first = index * job->heads_per_task;
    for (int64_t i = first; i < first + job->heads_per_task; i++) {
        int64_t row = i / job->kv_heads, head = i % job->kv_heads * group;
        if (job->head_dim == 64)
            attend_group(job, row, head, group, 64, bf16);
        else if (job->head_dim == 128)
            attend_group(job, row, head, group, 128, bf16);
        else
            attend_group(job, row, head, group, job->head_dim, bf16);
    }
}

static void float32_task(const void *job, int64_t index) { task(job, index, false); }
static void bf16_task(const void *job, int64_t index) { task(job, index, true); }

// `head_dim` is a multiple of 16, at most LARGEST_HEAD. `window` is 0 where there is none.
void pliant_decode_attention(
    Pool *pool, bool bf16, const void *q, const void *keys, const void *values,
    const int32_t *lengths, void *out, int64_t rows, int64_t heads, int64_t kv_heads, int64_t max_length,
    int64_t head_dim, int64_t slot_stride, int64_t window
) {
    int64_t heads_per_task = rows < 4 * pool_threads(pool) ? 1 : kv_heads;
    Attention job = {q, keys, values, lengths, out, heads, kv_heads, max_length, head_dim, slot_stride, window,
                     heads_per_task, 1 / sqrtf(head_dim)};
    share(pool, bf16 ? bf16_task : float32_task, &job, rows * kv_heads / heads_per_task);
}
