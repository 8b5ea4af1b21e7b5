// One pass of an encoder over texts that lie one behind the other, without padding. The protocol is cpu_encoder.py's.
//
// All but attention is done for each token alone; attention of each text and head is a task. Float32 throughout. Texts
// may leave on the way: the states of those that stay then move together.
#include <stdlib.h>
#include <time.h>

#include "../cpu/cpu_kernels.h"

#define GRAIN 16384 // values worth a task
#if defined(__AVX512F__) // 32 registers of 16
#define ROWS 8
#define VECTORS 3
#else
#define ROWS 4
#define VECTORS 2
#endif

enum { NONE, GELU, GELU_TANH, QUICK_GELU, RELU, SILU, TANH, MISH, SIGMOID };

typedef struct {
    const float *weight, *bias; // packed as cpu_linear.c says; bias may be null
    int64_t in, outs;
} Dense;

typedef struct {
    const float *gain, *shift; // no gain: not normed; no shift: none is added
} Norm;

typedef struct {
    Dense qkv, output, up, down;
    Norm attention_norm, mlp_norm;
    const float *far_keys, *far_queries; // DeBERTa's: [heads][head_dim][far], or null
    const float *cosines, *sines;        // ModernBERT's: [positions][head_dim / 2], or null
    int64_t window;                      // tokens to either side that are attended to; negative: all
} Layer;

typedef struct {
    const float *words, *positions, *types; // the last two may be null
    const float *distances;                 // MPNet's: [heads][2 * reach - 1], or null
    const int64_t *rows;                    // DeBERTa's: of far_keys and far_queries, for each distance
    const Layer *layers;
    Norm norm, last_norm;
    Dense projection; // no weight: none
    int64_t depth, hidden, heads, embedding, intermediate, reach, far;
    int32_t activation;
    bool norms_first; // what layers read is normed, not what they are added to; and `up` is gated
    float eps;
} Encoder;

typedef struct {
    int64_t after;              // so many layers
    const float *weight, *bias; // [labels][hidden], [labels]
} Exit;

typedef struct {
    const Exit *exits; // in rising order, none behind the last layer
    int64_t count, labels;
    const double *temperatures; // [exits][texts]; 0: the text does not read this exit
    const double *sure_from;    // [exits][texts]: it leaves there if it is at least so sure
    float *said;                // [exits][texts][labels], of texts that read the exit
    double *seconds;            // [exits]: from the start of the pass until that was known
    int64_t *layers;            // [texts]: how many were computed
} Leaving;

typedef struct {
    const int64_t *ids, *places, *types; // [tokens]: of words, positions and types; the last may be null
    const int64_t *starts;               // [texts + 1]: the first token of each text, and where the last one ends
    int64_t texts;
    bool firsts;            // behind the last layer, only the states of first tokens are wanted
    float *received;        // [heads][tokens]: what each token received is added to it; or null
    const Leaving *leaving; // null: no text leaves
    float *out;             // [tokens or texts][hidden] of the texts that did not leave
} Pass;

typedef struct {
    Dense linear;
    Norm norm;
    int32_t activation;
    float eps;
} Stage;

INLINE int64_t up_to(int64_t count, int64_t multiple) { return (count + multiple - 1) / multiple * multiple; }

// out[r][c] = sum over steps of x[r][step] * w[step][c]
INLINE void tile(
    const float *x, int64_t x_row, const float *w, int64_t w_step, int64_t steps, float *out, int64_t out_row,
    const int rows, const int vectors
) {
    vec sums[ROWS][VECTORS] = {0};
    for (int64_t step = 0; step < steps; step++) {
        vec columns[VECTORS];
        UNROLL for (int c = 0; c < vectors; c++)
            columns[c] = load(w, step * w_step + c * WIDTH, false);
        UNROLL for (int r = 0; r < rows; r++)
            UNROLL for (int c = 0; c < vectors; c++)
                sums[r][c] += columns[c] * x[r * x_row + step];
    }
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int c = 0; c < vectors; c++)
            memcpy(out + r * out_row + c * WIDTH, &sums[r][c], sizeof(vec));
}

INLINE void tiles(
    const float *x, int64_t x_row, const float *w, int64_t w_step, int64_t steps, float *out, int64_t out_row,
    const int rows, int64_t columns
) {
    int64_t c = 0;
    for (; c + VECTORS * WIDTH <= columns; c += VECTORS * WIDTH)
        tile(x, x_row, w + c, w_step, steps, out + c, out_row, rows, VECTORS);
    for (; c < columns; c += WIDTH)
        tile(x, x_row, w + c, w_step, steps, out + c, out_row, rows, 1);
}

// The same for up to ROWS rows; columns are a multiple of WIDTH.
static void multiply(
    const float *x, int64_t x_row, const float *w, int64_t w_step, int64_t steps, float *out, int64_t out_row,
    int64_t rows, int64_t columns
) {
    switch (rows) {
    case 1: tiles(x, x_row, w, w_step, steps, out, out_row, 1, columns); break;
    case 2: tiles(x, x_row, w, w_step, steps, out, out_row, 2, columns); break;
    case 3: tiles(x, x_row, w, w_step, steps, out, out_row, 3, columns); break;
    case 4: tiles(x, x_row, w, w_step, steps, out, out_row, 4, columns); break;
#if ROWS > 4
    case 5: tiles(x, x_row, w, w_step, steps, out, out_row, 5, columns); break;
    case 6: tiles(x, x_row, w, w_step, steps, out, out_row, 6, columns); break;
    case 7: tiles(x, x_row, w, w_step, steps, out, out_row, 7, columns); break;
    case 8: tiles(x, x_row, w, w_step, steps, out, out_row, 8, columns); break;
#endif
    }
}

static void dense(Pool *pool, const Dense *of, const float *x, float *out, int64_t rows) {
    pliant_linear(pool, false, x, of->weight, of->bias, out, rows, of->in, of->outs);
}

// What is done to each of many rows.
typedef struct {
    const Encoder *encoder;
    const Pass *pass;
    Norm norm;
    const float *added, *read;
    float *x;
    int64_t rows, width, rows_per_task;
} Rows;

static void over_rows(Pool *pool, void (*task)(const void *, int64_t), Rows job) {
    job.rows_per_task = (GRAIN + job.width - 1) / job.width;
    share(pool, task, &job, (job.rows + job.rows_per_task - 1) / job.rows_per_task);
}

static void layer_norm(const float *x, Norm norm, float eps, int64_t width, float *out) {
    float total = 0, squares = 0;
    for (int64_t i = 0; i < width; i++)
        total += x[i];
    float mean = total / width;
    for (int64_t i = 0; i < width; i++)
        squares += (x[i] - mean) * (x[i] - mean);
    float scale = 1 / sqrtf(squares / width + eps);
    if (norm.shift)
        for (int64_t i = 0; i < width; i++)
            out[i] = (x[i] - mean) * scale * norm.gain[i] + norm.shift[i];
    else
        for (int64_t i = 0; i < width; i++)
            out[i] = (x[i] - mean) * scale * norm.gain[i];
}

#define EACH_ROW(job, row, index)                                                                                      \
    for (int64_t row = (index) * (job)->rows_per_task;                                                                 \
         row < least(((index) + 1) * (job)->rows_per_task, (job)->rows); row++)

// x = words + positions + types, normed
static void embed_task(const void *given, int64_t index) {
    const Rows *job = given;
    const Encoder *encoder = job->encoder;
    const Pass *pass = job->pass;
    EACH_ROW(job, row, index) {
        float *x = job->x + row * job->width;
        memcpy(x, encoder->words + pass->ids[row] * job->width, job->width * sizeof *x);
        if (encoder->positions) {
            const float *position = encoder->positions + pass->places[row] * job->width;
            for (int64_t i = 0; i < job->width; i++)
                x[i] += position[i];
        }
        if (encoder->types && pass->types) {
            const float *type = encoder->types + pass->types[row] * job->width;
            for (int64_t i = 0; i < job->width; i++)
                x[i] += type[i];
        }
        layer_norm(x, job->norm, encoder->eps, job->width, x);
    }
}

// x += added, then normed if there is a norm
static void add_task(const void *given, int64_t index) {
    const Rows *job = given;
    EACH_ROW(job, row, index) {
        float *x = job->x + row * job->width;
        const float *added = job->added + row * job->width;
        for (int64_t i = 0; i < job->width; i++)
            x[i] += added[i];
        if (job->norm.gain)
            layer_norm(x, job->norm, job->encoder->eps, job->width, x);
    }
}

// x = read, normed
static void norm_task(const void *given, int64_t index) {
    const Rows *job = given;
    EACH_ROW(job, row, index)
        layer_norm(job->read + row * job->width, job->norm, job->encoder->eps, job->width, job->x + row * job->width);
}

INLINE float bounded(float x) { return x < -87 ? -87 : x > 87 ? 87 : x; }

// To within 2e-7: Abramowitz and Stegun, 7.1.26
INLINE float error_function(float x) {
    float size = fabsf(x), t = 1 / (1 + 0.3275911f * size);
    float sum = ((((1.061405429f * t - 1.453152027f) * t + 1.421413741f) * t - 0.284496736f) * t + 0.254829592f) * t;
    float value = 1 - sum * exponential(bounded(-size * size));
    return x < 0 ? -value : value;
}

INLINE float hyperbolic(float x) { return 1 - 2 / (exponential(bounded(2 * x)) + 1); }

INLINE float activate(float x, const int activation) {
    switch (activation) {
    case GELU: return 0.5f * x * (1 + error_function(x * 0.70710678f));
    case GELU_TANH: return 0.5f * x * (1 + hyperbolic(0.79788456f * (x + 0.044715f * x * x * x)));
    case QUICK_GELU: return x / (1 + exponential(bounded(-1.702f * x)));
    case RELU: return x > 0 ? x : 0;
    case SILU: return x / (1 + exponential(bounded(-x)));
    case TANH: return hyperbolic(x);
    case MISH: {
        float power = exponential(x > 20 ? 20 : bounded(x)), square = power * (power + 2);
        return x * (square / (square + 2));
    }
    case SIGMOID: return 1 / (1 + exponential(bounded(-x)));
    }
    return x;
}

// The read row's first half, activated, times its second half if `up` is gated
INLINE void activate_rows(const Rows *job, int64_t index, const int activation) {
    bool gated = job->encoder->norms_first;
    EACH_ROW(job, row, index) {
        const float *read = job->read + row * job->width * (1 + gated);
        float *x = job->x + row * job->width;
        for (int64_t i = 0; i < job->width; i++)
            x[i] = activate(read[i], activation);
        if (gated)
            for (int64_t i = 0; i < job->width; i++)
                x[i] *= read[job->width + i];
    }
}

static void activate_task(const void *given, int64_t index) {
    const Rows *job = given;
    switch (job->encoder->activation) {
    case GELU: activate_rows(job, index, GELU); break;
    case GELU_TANH: activate_rows(job, index, GELU_TANH); break;
    case QUICK_GELU: activate_rows(job, index, QUICK_GELU); break;
    case RELU: activate_rows(job, index, RELU); break;
    case SILU: activate_rows(job, index, SILU); break;
    case TANH: activate_rows(job, index, TANH); break;
    case MISH: activate_rows(job, index, MISH); break;
    case SIGMOID: activate_rows(job, index, SIGMOID); break;
    }
}

typedef struct {
    const Encoder *encoder;
    const Layer *layer;
    const Pass *pass;
    float *qkv;  // [tokens][3 * hidden]
    float *keys; // of each text and head [head_dim][its tokens, up to a multiple of 16]
    float *out;  // [tokens or texts][hidden]
    bool firsts;
} Attention;

// Each half of a head turned with the other, by the place in the text.
static void turn(float *x, const Layer *layer, int64_t place, int64_t half) {
    const float *cosines = layer->cosines + place * half, *sines = layer->sines + place * half;
    for (int64_t i = 0; i < half; i++) {
        float one = x[i], other = x[half + i];
        x[i] = one * cosines[i] - other * sines[i];
        x[half + i] = other * cosines[i] + one * sines[i];
    }
}

static void soften(float *scores, int64_t count) {
    float largest = scores[0], total = 0;
    for (int64_t t = 1; t < count; t++)
        largest = scores[t] > largest ? scores[t] : largest;
    for (int64_t t = 0; t < count; t++)
        total += scores[t] = exponential(scores[t] - largest);
    float scale = 1 / total;
    for (int64_t t = 0; t < count; t++)
        scores[t] *= scale;
}

static void attend_task(const void *given, int64_t index) {
    const Attention *job = given;
    const Encoder *encoder = job->encoder;
    const Layer *layer = job->layer;
    int64_t hidden = encoder->hidden, heads = encoder->heads, d = hidden / heads, stride = 3 * hidden;
    int64_t text = index / heads, head = index % heads;
    int64_t start = job->pass->starts[text], length = job->pass->starts[text + 1] - start, padded = up_to(length, 16);
    float *q = job->qkv + start * stride + head * d, *k = q + hidden, *v = k + hidden;
    float *keys = job->keys + (start + 15 * text) * hidden + head * d * padded;
    int64_t attending = job->firsts ? 1 : length, weighed = job->pass->received ? length : attending;
    if (layer->cosines)
        for (int64_t t = 0; t < length; t++) {
            turn(q + t * stride, layer, t, d / 2);
            turn(k + t * stride, layer, t, d / 2);
        }
    for (int64_t i = 0; i < d; i++) {
        for (int64_t t = 0; t < length; t++)
            keys[i * padded + t] = k[t * stride + i];
        for (int64_t t = length; t < padded; t++)
            keys[i * padded + t] = 0;
    }

    // Distances from -(length - 1) to length - 1 have rows from `low` on, of which there are `near`.
    int64_t low = 0, near = 0;
    float *far_of_keys = NULL;
    const int64_t *rows = encoder->rows + encoder->reach - 1;
    if (encoder->rows) {
        low = rows[length - 1] / 16 * 16;
        near = up_to(rows[1 - length] + 1 - low, 16);
    }
    if (layer->far_queries) {
        far_of_keys = malloc(length * near * sizeof *far_of_keys);
        const float *far = layer->far_queries + head * d * encoder->far + low;
        for (int64_t t = 0; t < length; t += ROWS)
            multiply(
                k + t * stride, stride, far, encoder->far, d, far_of_keys + t * near, near, least(ROWS, length - t), near
            );
    }

    float scale = 1 / sqrtf(d), scores[ROWS][padded], far_of_queries[ROWS][near + 1];
    for (int64_t row = 0; row < weighed; row += ROWS) {
        int64_t count = least(ROWS, weighed - row), first = 0, last = length;
        if (layer->window >= 0) {
            first = row > layer->window ? (row - layer->window) / 16 * 16 : 0;
            last = least(length, row + count + layer->window);
        }
        multiply(
            q + row * stride, stride, keys + first, padded, d, scores[0], padded, count, up_to(last - first, 16)
        );
        if (layer->far_keys)
            multiply(
                q + row * stride, stride, layer->far_keys + head * d * encoder->far + low, encoder->far, d,
                far_of_queries[0], near + 1, count, near
            );
        for (int64_t r = 0; r < count; r++) {
            const int64_t *row_of = rows + first - row - r;
            if (layer->far_keys)
                for (int64_t t = 0; t < last - first; t++)
                    scores[r][t] += far_of_queries[r][row_of[t] - low];
            if (far_of_keys)
                for (int64_t t = 0; t < last - first; t++)
                    scores[r][t] += far_of_keys[(first + t) * near + row_of[t] - low];
            for (int64_t t = 0; t < last - first; t++)
                scores[r][t] *= scale;
            if (encoder->distances) {
                const float *added = encoder->distances + head * (2 * encoder->reach - 1) + encoder->reach - 1 - row - r;
                for (int64_t t = 0; t < length; t++)
                    scores[r][t] += added[t];
            }
            int64_t from = 0, to = last - first;
            if (layer->window >= 0) {
                from = row + r - layer->window > first ? row + r - layer->window - first : 0;
                to = least(to, row + r + layer->window + 1 - first);
                memset(scores[r], 0, from * sizeof **scores);
                memset(scores[r] + to, 0, (last - first - to) * sizeof **scores);
            }
            soften(scores[r] + from, to - from);
            if (job->pass->received)
                for (int64_t t = from; t < to; t++)
                    job->pass->received[head * job->pass->starts[job->pass->texts] + start + first + t] += scores[r][t];
        }
        int64_t kept = least(count, attending - row);
        float *out = job->out + (job->firsts ? text : start + row) * hidden + head * d;
        if (kept > 0)
            multiply(scores[0], padded, v + first * stride, stride, last - first, out, hidden, kept, d);
    }
    free(far_of_keys);
}

typedef struct {
    const Leaving *leaving;
    int64_t exit, hidden;
    const int64_t *starts, *texts; // of those that are still there: as in a pass, and which of all each one is
    int64_t all;                   // texts of the pass
    const float *x;
    bool *leaves; // [texts that are still there]
} Door;

// An exit reads the mean of a text's states, and says whether the text leaves.
static void exit_task(const void *given, int64_t index) {
    const Door *job = given;
    const Leaving *leaving = job->leaving;
    int64_t labels = leaving->labels, hidden = job->hidden, at = job->exit * job->all + job->texts[index];
    double temperature = leaving->temperatures[at];
    job->leaves[index] = false;
    if (temperature == 0)
        return;
    int64_t start = job->starts[index], length = job->starts[index + 1] - start;
    const float *x = job->x + start * hidden;
    float mean[hidden], *said = leaving->said + at * labels;
    memcpy(mean, x, sizeof mean);
    for (int64_t t = 1; t < length; t++)
        for (int64_t i = 0; i < hidden; i++)
            mean[i] += x[t * hidden + i];
    for (int64_t i = 0; i < hidden; i++)
        mean[i] /= length;
    const Exit *exit = leaving->exits + job->exit;
    double largest = -INFINITY, total = 0;
    for (int64_t label = 0; label < labels; label++) {
        float sum = 0;
        for (int64_t i = 0; i < hidden; i++)
            sum += exit->weight[label * hidden + i] * mean[i];
        said[label] = sum + exit->bias[label];
        largest = said[label] > largest ? said[label] : largest;
    }
    for (int64_t label = 0; label < labels; label++)
        total += exp((said[label] - largest) / temperature);
    job->leaves[index] = 1 / total >= leaving->sure_from[at];
}

static double seconds_since(const struct timespec *then) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec - then->tv_sec + 1e-9 * (now.tv_nsec - then->tv_nsec);
}

// Moves what is kept of `starts`, `texts` and `x` together. Returns how many texts are.
static int64_t move_together(
    const bool *leaves, int64_t *starts, int64_t *texts, int64_t count, float *x, int64_t hidden
) {
    int64_t kept = 0, tokens = 0;
    for (int64_t text = 0; text < count; text++) {
        int64_t start = starts[text], length = starts[text + 1] - start;
        if (leaves[text])
            continue;
        if (start != tokens)
            memmove(x + tokens * hidden, x + start * hidden, length * hidden * sizeof *x);
        texts[kept] = texts[text];
        starts[kept++] = tokens;
        tokens += length;
    }
    starts[kept] = tokens;
    return kept;
}

// Floats that a pass needs to work in.
int64_t pliant_encoder_workspace(const Encoder *encoder, int64_t tokens, int64_t texts) {
    int64_t hidden = encoder->hidden, up = encoder->intermediate * (1 + encoder->norms_first);
    int64_t wide = up > 3 * hidden ? up : 3 * hidden;
    int64_t narrow = encoder->intermediate > hidden ? encoder->intermediate : hidden;
    int64_t read = encoder->embedding > hidden ? encoder->embedding : hidden;
    return tokens * (hidden + read + wide + narrow) + (tokens + 15 * texts) * hidden;
}

void pliant_encode(Pool *pool, const Encoder *encoder, const Pass *whole, float *workspace) {
    struct timespec started;
    clock_gettime(CLOCK_MONOTONIC, &started);
    int64_t tokens = whole->starts[whole->texts], hidden = encoder->hidden, rows = tokens;
    int64_t up = encoder->intermediate * (1 + encoder->norms_first);
    float *x = workspace;                                                             // states
    float *read = x + tokens * hidden;                                                // what linear layers read or add
    float *wide = read + tokens * (encoder->embedding > hidden ? encoder->embedding : hidden);
    float *narrow = wide + tokens * (up > 3 * hidden ? up : 3 * hidden);              // what they make of it
    float *keys = narrow + tokens * (encoder->intermediate > hidden ? encoder->intermediate : hidden);
    const Norm none = {0};
    const Leaving *leaving = whole->leaving;
    int64_t starts[whole->texts + 1], texts[whole->texts], exit = 0; // of the texts that are still there
    bool leaves[whole->texts];
    memcpy(starts, whole->starts, sizeof starts);
    for (int64_t text = 0; text < whole->texts; text++)
        texts[text] = text;
    Pass now = *whole;
    const Pass *pass = &now;
    now.starts = starts;
    over_rows(
        pool, embed_task,
        (Rows){.encoder = encoder, .pass = pass, .norm = encoder->norm, .x = encoder->projection.weight ? read : x,
               .rows = tokens, .width = encoder->embedding}
    );
    if (encoder->projection.weight)
        dense(pool, &encoder->projection, read, x, tokens);
    for (int64_t depth = 0; depth < encoder->depth; depth++) {
        for (; leaving && exit < leaving->count && leaving->exits[exit].after == depth; exit++) {
            const Door door = {leaving, exit, hidden, starts, texts, whole->texts, x, leaves};
            share(pool, exit_task, &door, now.texts);
            leaving->seconds[exit] = seconds_since(&started);
            for (int64_t text = 0; text < now.texts; text++)
                if (leaves[text])
                    leaving->layers[texts[text]] = depth;
            now.texts = move_together(leaves, starts, texts, now.texts, x, hidden);
            rows = starts[now.texts];
        }
        if (!rows)
            return;
        const Layer *layer = encoder->layers + depth;
        bool firsts = pass->firsts && depth == encoder->depth - 1, before = encoder->norms_first;
        const float *attended = x;
        if (before && layer->attention_norm.gain) {
            over_rows(
                pool, norm_task,
                (Rows){.encoder = encoder, .norm = layer->attention_norm, .read = x, .x = read, .rows = rows,
                       .width = hidden}
            );
            attended = read;
        }
        dense(pool, &layer->qkv, attended, wide, rows);
        Attention attention = {encoder, layer, pass, wide, keys, narrow, firsts};
        share(pool, attend_task, &attention, pass->texts * encoder->heads);
        if (firsts) {
            rows = pass->texts;
            for (int64_t text = 0; text < rows; text++)
                memmove(x + text * hidden, x + pass->starts[text] * hidden, hidden * sizeof *x);
        }
        dense(pool, &layer->output, narrow, read, rows);
        over_rows(
            pool, add_task,
            (Rows){.encoder = encoder, .norm = before ? none : layer->attention_norm, .added = read, .x = x,
                   .rows = rows, .width = hidden}
        );
        if (before)
            over_rows(
                pool, norm_task,
                (Rows){.encoder = encoder, .norm = layer->mlp_norm, .read = x, .x = read, .rows = rows, .width = hidden}
            );
        dense(pool, &layer->up, before ? read : x, wide, rows);
        over_rows(
            pool, activate_task,
            (Rows){.encoder = encoder, .read = wide, .x = narrow, .rows = rows, .width = encoder->intermediate}
        );
        dense(pool, &layer->down, narrow, read, rows);
        over_rows(
            pool, add_task,
            (Rows){.encoder = encoder, .norm = before ? none : layer->mlp_norm, .added = read, .x = x, .rows = rows,
                   .width = hidden}
        );
    }
    for (int64_t text = 0; leaving && text < now.texts; text++)
        leaving->layers[texts[text]] = encoder->depth;
    if (encoder->last_norm.gain)
        over_rows(
            pool, norm_task,
            (Rows){.encoder = encoder, .norm = encoder->last_norm, .read = x, .x = pass->out, .rows = rows,
                   .width = hidden}
        );
    else
        memcpy(pass->out, x, rows * hidden * sizeof *x);
}

// What a stage of a head makes of `x` [rows][ins], in `out` [rows][outs].
void pliant_apply_stage(Pool *pool, const Stage *stage, const float *x, float *out, int64_t rows) {
    const Encoder settings = {.activation = stage->activation, .eps = stage->eps};
    const Rows job = {
        .encoder = &settings, .norm = stage->norm, .read = out, .x = out, .rows = rows, .width = stage->linear.outs
    };
    dense(pool, &stage->linear, x, out, rows);
    if (stage->activation != NONE)
        over_rows(pool, activate_task, job);
    if (stage->norm.gain)
        over_rows(pool, norm_task, job);
}
