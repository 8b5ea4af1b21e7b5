// Attention of the tokens of one pass to their rows' texts, whose keys and values lie in pages: a softmax in blocks of
// tokens, float32 throughout. A row of one token, as in a decode step (Flover §V-D), reads every key and value once for
// all the queries that share them. The tokens of a prompt go in tiles, and share what they read with each other too.
#include "../cpu/cpu_kernels.h"

#define QUERIES 4  // that share keys and are computed together
#define TOKENS 128 // of a block, of a row of one token, that are no more than a page
#define HEADS 64   // whose queries are computed block by block
#define STRIP 4    // vectors of a head that are summed at a time
#define TILED 128  // queries of a tile, those of all heads that share keys; see cpu_kernels.py
#define BLOCK 64   // tokens of a block, of a tile
#if defined(__AVX512F__)
#define VECTORS 4 // of a tile's sums that are kept in registers for each of QUERIES
#else
#define VECTORS 2
#endif

typedef struct {
    int32_t row, query, position, count; // of the first of `count` tokens: its queries, and its place in its row's text
} Tile;

typedef struct {
    const void *q;             // [tokens][heads][head_dim]
    const void *keys, *values; // [pages][kv_heads][page][head_dim], pages page_stride apart
    const int32_t *tables;     // [rows][width], by row: the pages of its text
    const Tile *tiles;
    void *out; // [tokens][heads][head_dim]
    int64_t width, heads, kv_heads, page, head_dim, page_stride, window, heads_per_task;
    int shift; // 1 << shift == page
    float scale;
} Attention;

// Where token t of a row's text lies in one head's keys, and in its values.
INLINE int64_t place(const Attention *job, int64_t row, int64_t kv_head, int64_t t, const int64_t d) {
    int64_t page = job->tables[row * job->width + (t >> job->shift)];
    return page * job->page_stride + (kv_head * job->page + (t & (job->page - 1))) * d;
}

// Tokens from t on, of at most `most`, that lie together.
INLINE int64_t together(const Attention *job, int64_t t, int64_t most) {
    return least(job->page - (t & (job->page - 1)), most);
}

// Have one token's key or value fetched into the second-level cache: pages lie apart, and what the machine fetches
// ahead by itself begins late in each.
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
    const float *q, const void *keys, float (*scores)[TOKENS], const void *next, const int queries, int64_t tokens,
    const int64_t d, bool bf16
) {
    for (int64_t t = 0; t < tokens; t++) {
        fetch(next, t, d, bf16);
        vec sums[QUERIES] = {0};
        UNROLL for (int64_t i = 0; i < d; i += WIDTH) {
            vec key = load(keys, t * d + i, bf16);
            UNROLL for (int g = 0; g < queries; g++)
                sums[g] += load(q, g * d + i, false) * key;
        }
        UNROLL for (int g = 0; g < queries; g++)
            scores[g][t] = sum(sums[g]);
    }
}

// mix, for `width` vectors of a head from i on
INLINE void strip(
    const float (*scores)[TOKENS], const void *values, const float *shrink, float *out, const void *next,
    const int queries, int64_t tokens, const int64_t d, int64_t i, const int width, bool bf16
) {
    vec sums[QUERIES][STRIP];
    UNROLL for (int g = 0; g < queries; g++)
        UNROLL for (int w = 0; w < width; w++)
            sums[g][w] = load(out, g * d + i + w * WIDTH, false) * shrink[g];
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
            memcpy(out + g * d + i + w * WIDTH, &sums[g][w], sizeof(vec));
}

// out[g] = out[g] * shrink[g] + sum over t of scores[g][t] * values[t]
INLINE void mix(
    const float (*scores)[TOKENS], const void *values, const float *shrink, float *out, const void *next,
    const int queries, int64_t tokens, const int64_t d, bool bf16
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

typedef struct {
    float q[HEADS * LARGEST_HEAD], out[HEADS * LARGEST_HEAD], largest[HEADS], total[HEADS];
} Queries;

// One block's share for `queries` heads, from `head` on, that share its keys and values, which begin at `text`.
INLINE void add_block(
    const Attention *job, Queries *all, int64_t head, int64_t text, int64_t next, int64_t tokens, const int queries,
    const int64_t d, bool bf16
) {
    float scores[QUERIES][TOKENS], shrink[QUERIES];
    const void *next_keys = at(job->keys, next, bf16), *next_values = at(job->values, next, bf16);
    score(all->q + head * d, at(job->keys, text, bf16), scores, next_keys, queries, tokens, d, bf16);
    for (int g = 0; g < queries; g++)
        shrink[g] = soften(scores[g], tokens, &all->largest[head + g], &all->total[head + g]);
    mix(scores, at(job->values, text, bf16), shrink, all->out + head * d, next_values, queries, tokens, d, bf16);
}

// A tile of one token, for `count` key/value heads from `kv_head` on: block by block, as these lie side by side there.
INLINE void attend(
    const Attention *job, const Tile *tile, int64_t kv_head, int64_t count, const int64_t d, bool bf16
) {
    int64_t group = job->heads / job->kv_heads, heads = count * group, length = tile->position + 1, tokens;
    int64_t place_in_q = (tile->query * job->heads + kv_head * group) * d;
    Queries all;
    for (int64_t i = 0; i < heads * d; i++) {
        all.q[i] = get(job->q, place_in_q + i, bf16) * job->scale;
        all.out[i] = 0;
    }
    for (int64_t g = 0; g < heads; g++) {
        all.largest[g] = -INFINITY;
        all.total[g] = 0;
    }
    int64_t first = job->window && length > job->window ? length - job->window : 0;
    for (int64_t t = first; t < length; t += tokens) {
        tokens = together(job, t, least(length - t, TOKENS));
        int64_t text = place(job, tile->row, kv_head, t, d);
        int64_t next_block = t + tokens < length ? place(job, tile->row, kv_head, t + tokens, d) : text;
        for (int64_t h = 0; h < count; h++, text += job->page * d) {
            int64_t next = h + 1 < count ? text + job->page * d : next_block, head = h * group, end = head + group;
            for (; head + QUERIES <= end; head += QUERIES)
                add_block(job, &all, head, text, next, tokens, QUERIES, d, bf16);
            if (end - head & 2) {
                add_block(job, &all, head, text, next, tokens, 2, d, bf16);
                head += 2;
            }
            if (end - head & 1)
                add_block(job, &all, head, text, next, tokens, 1, d, bf16);
        }
    }
    for (int64_t g = 0; g < heads; g++)
        for (int64_t i = 0; i < d; i++)
            put(job->out, place_in_q + g * d + i, all.out[g * d + i] / all.total[g], bf16);
}

// products[g][column + c] += factors[g][i * step] * rows[i][c], for QUERIES g, and c of `vectors` vectors
INLINE void multiply(
    const float *factors, int64_t apart, const float *rows, int64_t wide, int64_t count, float *products,
    int64_t products_apart, const int vectors
) {
    vec sums[QUERIES][VECTORS];
    UNROLL for (int g = 0; g < QUERIES; g++)
        UNROLL for (int v = 0; v < vectors; v++)
            sums[g][v] = load(products, g * products_apart + v * WIDTH, false);
    for (int64_t i = 0; i < count; i++)
        UNROLL for (int v = 0; v < vectors; v++) {
            vec row = load(rows, i * wide + v * WIDTH, false);
            UNROLL for (int g = 0; g < QUERIES; g++)
                sums[g][v] += row * factors[g * apart + i];
        }
    UNROLL for (int g = 0; g < QUERIES; g++)
        UNROLL for (int v = 0; v < vectors; v++)
            memcpy(products + g * products_apart + v * WIDTH, &sums[g][v], sizeof(vec));
}

// products [QUERIES][outs] += factors [QUERIES][count] @ rows [count][outs]
INLINE void multiply_all(
    const float *factors, int64_t apart, const float *rows, int64_t wide, int64_t count, float *products,
    int64_t products_apart, int64_t outs
) {
    int64_t column = 0;
    for (; column + VECTORS * WIDTH <= outs; column += VECTORS * WIDTH)
        multiply(factors, apart, rows + column, wide, count, products + column, products_apart, VECTORS);
    for (; column < outs; column += WIDTH)
        multiply(factors, apart, rows + column, wide, count, products + column, products_apart, 1);
}

// A tile's keys, one dimension after the other, and its values, of the `tokens` from t on.
INLINE void gather(
    const Attention *job, const Tile *tile, int64_t kv_head, int64_t t, int64_t tokens, float *keys, float *values,
    const int64_t d, bool bf16
) {
    for (int64_t i = 0, run; i < tokens; i += run) {
        run = together(job, t + i, tokens - i);
        int64_t text = place(job, tile->row, kv_head, t + i, d);
        for (int64_t j = 0; j < run; j++)
            for (int64_t k = 0; k < d; k++) {
                keys[k * BLOCK + i + j] = get(job->keys, text + j * d + k, bf16);
                values[(i + j) * d + k] = get(job->values, text + j * d + k, bf16);
            }
    }
}

// A tile's queries that share a key/value head.
INLINE void attend_tile(const Attention *job, const Tile *tile, int64_t kv_head, const int64_t d, bool bf16) {
    int64_t group = job->heads / job->kv_heads, queries = tile->count * group;
    float q[TILED * LARGEST_HEAD], out[TILED * LARGEST_HEAD], keys[LARGEST_HEAD * BLOCK], values[BLOCK * LARGEST_HEAD];
    float scores[QUERIES * BLOCK], largest[TILED], total[TILED];
    int64_t padded = (queries + QUERIES - 1) / QUERIES * QUERIES, length = tile->position + tile->count;
    memset(q, 0, padded * d * sizeof(float));
    memset(out, 0, padded * d * sizeof(float));
    memset(keys, 0, sizeof keys);
    for (int64_t g = 0; g < padded; g++) {
        largest[g] = -1e30f;
        total[g] = 0;
    }
    for (int64_t g = 0; g < queries; g++) {
        int64_t from = ((tile->query + g / group) * job->heads + kv_head * group + g % group) * d;
        for (int64_t i = 0; i < d; i++)
            q[g * d + i] = get(job->q, from + i, bf16) * job->scale;
    }
    int64_t first = job->window && tile->position >= job->window ? tile->position - job->window + 1 : 0;
    for (int64_t t = first; t < length; t += BLOCK) {
        int64_t tokens = least(length - t, BLOCK);
        gather(job, tile, kv_head, t, tokens, keys, values, d, bf16);
        for (int64_t g = 0; g < padded; g += QUERIES) {
            memset(scores, 0, sizeof scores);
            multiply_all(q + g * d, d, keys, BLOCK, d, scores, BLOCK, BLOCK);
            for (int64_t i = 0; i < QUERIES; i++) {
                float *own = scores + i * BLOCK;
                int64_t position = tile->position + (g + i) / group;
                for (int64_t j = position + 1 > t ? position + 1 - t : 0; j < tokens; j++)
                    own[j] = -INFINITY;
                for (int64_t j = 0; job->window && j < least(position - job->window + 1 - t, tokens); j++)
                    own[j] = -INFINITY;
                float shrink = soften(own, tokens, &largest[g + i], &total[g + i]);
                for (int64_t j = 0; j < d; j++)
                    out[(g + i) * d + j] *= shrink;
            }
            multiply_all(scores, BLOCK, values, d, tokens, out + g * d, d, d);
        }
    }
    for (int64_t g = 0; g < queries; g++) {
        int64_t to = ((tile->query + g / group) * job->heads + kv_head * group + g % group) * d;
        for (int64_t i = 0; i < d; i++)
            put(job->out, to + i, out[g * d + i] / total[g], bf16);
    }
}

INLINE void some_heads(
    const Attention *job, const Tile *tile, int64_t kv_head, int64_t count, const int64_t d, bool bf16
) {
    if (tile->count == 1)
        attend(job, tile, kv_head, count, d, bf16);
    else
        for (int64_t h = kv_head; h < kv_head + count; h++)
            attend_tile(job, tile, h, d, bf16);
}

// One tile's key/value heads, `heads_per_task` of them.
INLINE void task(const Attention *job, int64_t index, bool bf16) {
    int64_t count = job->heads_per_task, tasks = job->kv_heads / count, kv_head = index % tasks * count;
    const Tile *tile = &job->tiles[index / tasks];
    if (job->head_dim == 64)
        some_heads(job, tile, kv_head, count, 64, bf16);
    else if (job->head_dim == 128)
        some_heads(job, tile, kv_head, count, 128, bf16);
    else
        some_heads(job, tile, kv_head, count, job->head_dim, bf16);
}

static void float32_task(const void *job, int64_t index) { task(job, index, false); }
static void bf16_task(const void *job, int64_t index) { task(job, index, true); }

// As many of a tile's key/value heads as leave every thread two tasks, and whose queries are no more than HEADS.
static int64_t heads_of_a_task(int64_t tiles, int64_t heads, int64_t kv_heads, int64_t threads) {
    int64_t parts = 1;
    while (parts < kv_heads && (kv_heads % parts || heads > HEADS * parts || tiles * parts < 2 * threads))
        parts++;
    return kv_heads / parts;
}

// `head_dim` is a multiple of 16, at most LARGEST_HEAD, `page` a power of two, and at most HEADS heads share a
// key/value head. `window` is 0 where there is none.
void pliant_attention(
    Pool *pool, bool bf16, const void *q, const void *keys, const void *values, const int32_t *tables,
    const Tile *tiles, void *out, int64_t count, int64_t width, int64_t heads, int64_t kv_heads, int64_t page,
    int64_t head_dim, int64_t page_stride, int64_t window
) {
    int64_t heads_per_task = heads_of_a_task(count, heads, kv_heads, pool_threads(pool));
    Attention job = {q, keys, values, tables, tiles, out, width, heads, kv_heads, page, head_dim, page_stride, window,
                     heads_per_task, __builtin_ctzll(page), 1 / sqrtf(head_dim)};
    share(pool, bf16 ? bf16_task : float32_task, &job, count * kv_heads / heads_per_task);
}
