// One decoder layer's operations beside its linear layers. The protocol is DecoderKernels in kernels.py.
#include "../cpu/cpu_kernels.h"

#define GRAIN 16384 // values worth a task

typedef struct {
    void *hidden;
    const void *delta, *weight;
    void *out;
    float eps;
    int64_t rows, width, rows_per_task;
    bool bf16;
} Norm;

// RMSNorm(x) * weight, rounded where transformers rounds.
INLINE void norm(const void *x, const void *weight, void *out, int64_t width, float eps, bool bf16) {
    float squares = 0;
    for (int64_t i = 0; i < width; i++)
        squares += get(x, i, bf16) * get(x, i, bf16);
    float scale = 1 / sqrtf(squares / width + eps);
    for (int64_t i = 0; i < width; i++)
        put(out, i, get(weight, i, bf16) * rounded(get(x, i, bf16) * scale, bf16), bf16);
}

INLINE void add_norm(const Norm *job, int64_t index, bool bf16) {
    int64_t first = index * job->rows_per_task, width = job->width;
    for (int64_t row = first; row < least(first + job->rows_per_task, job->rows); row++) {
        void *hidden = (void *)at(job->hidden, row * width, bf16);
        if (job->delta) {
            const void *delta = at(job->delta, row * width, bf16);
            for (int64_t i = 0; i < width; i++)
                put(hidden, i, get(hidden, i, bf16) + get(delta, i, bf16), bf16);
        }
        norm(hidden, job->weight, (void *)at(job->out, row * width, bf16), width, job->eps, bf16);
    }
}

static void add_norm_task(const void *job, int64_t index) {
    if (((const Norm *)job)->bf16)
        add_norm(job, index, true);
    else
        add_norm(job, index, false);
}

void pliant_add_norm(
    Pool *pool, bool bf16, void *hidden, const void *delta, const void *weight, void *out,
    int64_t rows, int64_t width, float eps
) {
    int64_t rows_per_task = (GRAIN + width - 1) / width;
    Norm job = {hidden, delta, weight, out, eps, rows, width, rows_per_task, bf16};
    share(pool, add_norm_task, &job, (rows + rows_per_task - 1) / rows_per_task);
}

typedef struct {
    const void *gate_up;
    void *out;
    int64_t rows, width, rows_per_task;
    bool bf16;
} Gate;

INLINE void gate(const Gate *job, int64_t index, bool bf16) {
    int64_t first = index * job->rows_per_task, width = job->width;
    for (int64_t row = first; row < least(first + job->rows_per_task, job->rows); row++) {
        const void *gate = at(job->gate_up, row * 2 * width, bf16), *up = at(gate, width, bf16);
        void *out = (void *)at(job->out, row * width, bf16);
        for (int64_t i = 0; i < width; i++) {
            float x = get(gate, i, bf16), silu = x / (1 + exponential(x < -87 ? 87 : -x));
            put(out, i, rounded(silu, bf16) * get(up, i, bf16), bf16);
        }
    }
}

static void gate_task(const void *job, int64_t index) {
    if (((const Gate *)job)->bf16)
        gate(job, index, true);
    else
        gate(job, index, false);
}

void pliant_gate(
    Pool *pool, bool bf16, const void *gate_up, void *out, int64_t rows, int64_t width
) {
    int64_t rows_per_task = (GRAIN + width - 1) / width;
    Gate job = {gate_up, out, rows, width, rows_per_task, bf16};
    share(pool, gate_task, &job, (rows + rows_per_task - 1) / rows_per_task);
}

typedef struct {
    const void *qkv;                  // [rows][heads + 2 kv_heads][head_dim]
    const int32_t *positions, *pages; // [rows]
    const float *cos, *sin;           // [max_length][head_dim]
    const void *q_norm, *k_norm;      // [head_dim], or null
    void *keys, *values;              // [pages][kv_heads][page][head_dim], pages page_stride apart
    void *q;                          // [rows][heads][head_dim]
    float eps;
    int64_t rows, heads, kv_heads, head_dim, page, page_stride, rows_per_task;
    bool bf16;
} Rotate;

INLINE void rotate(const Rotate *job, const void *x, const void *weight, int64_t position, void *out, bool bf16) {
    int64_t half = job->head_dim / 2;
    const float *cos = job->cos + position * job->head_dim, *sin = job->sin + position * job->head_dim;
    float head[LARGEST_HEAD];
    if (weight) {
        uint32_t normed[LARGEST_HEAD];
        norm(x, weight, normed, job->head_dim, job->eps, bf16);
        for (int64_t i = 0; i < job->head_dim; i++)
            head[i] = get(normed, i, bf16);
    } else {
        for (int64_t i = 0; i < job->head_dim; i++)
            head[i] = get(x, i, bf16);
    }
    for (int64_t i = 0; i < half; i++) {
        put(out, i, head[i] * cos[i] - head[i + half] * sin[i], bf16);
        put(out, i + half, head[i + half] * cos[i + half] + head[i] * sin[i + half], bf16);
    }
}

INLINE void rotate_and_store(const Rotate *job, int64_t index, bool bf16) {
    int64_t first = index * job->rows_per_task, heads = job->heads, kv_heads = job->kv_heads, d = job->head_dim;
    for (int64_t row = first; row < least(first + job->rows_per_task, job->rows); row++) {
        const void *line = at(job->qkv, row * (heads + 2 * kv_heads) * d, bf16);
        int64_t position = job->positions[row];
        for (int64_t h = 0; h < heads; h++) {
            void *q = (void *)at(job->q, (row * heads + h) * d, bf16);
            rotate(job, at(line, h * d, bf16), job->q_norm, position, q, bf16);
        }
        for (int64_t h = 0; h < kv_heads; h++) {
            int64_t place = job->pages[row] * job->page_stride + (h * job->page + position % job->page) * d;
            void *key = (void *)at(job->keys, place, bf16), *value = (void *)at(job->values, place, bf16);
            rotate(job, at(line, (heads + h) * d, bf16), job->k_norm, position, key, bf16);
            memcpy(value, at(line, (heads + kv_heads + h) * d, bf16), d * (bf16 ? 2 : 4));
        }
    }
}

static void rotate_task(const void *job, int64_t index) {
    if (((const Rotate *)job)->bf16)
        rotate_and_store(job, index, true);
    else
        rotate_and_store(job, index, false);
}

void pliant_rotate_and_store(
    Pool *pool, bool bf16, const void *qkv, const int32_t *positions, const int32_t *pages,
    const float *cos, const float *sin, const void *q_norm, const void *k_norm, float eps, void *keys, void *values,
    void *q, int64_t rows, int64_t heads, int64_t kv_heads, int64_t page, int64_t head_dim, int64_t page_stride
) {
    int64_t width = (heads + 2 * kv_heads) * head_dim, rows_per_task = (GRAIN + width - 1) / width;
    Rotate job = {qkv, positions, pages, cos, sin, q_norm, k_norm, keys, values, q, eps,
                  rows, heads, kv_heads, head_dim, page, page_stride, rows_per_task, bf16};
    share(pool, rotate_task, &job, (rows + rows_per_task - 1) / rows_per_task);
}

typedef struct {
    void *keys, *values;       // [layers][pages][kv_heads][values], as far apart as the strides say
    const int64_t (*moves)[3]; // source, target, values of each head
    int64_t count, kv_heads, layer_stride, page_stride, head_stride;
    bool bf16;
} Move;

// One layer and head.
static void move_task(const void *job, int64_t index) {
    const Move *move = job;
    int64_t head = index / move->kv_heads * move->layer_stride + index % move->kv_heads * move->head_stride;
    for (int64_t i = 0; i < move->count; i++) {
        int64_t source = head + move->moves[i][0] * move->page_stride;
        int64_t target = head + move->moves[i][1] * move->page_stride;
        int64_t bytes = move->moves[i][2] * (move->bf16 ? 2 : 4);
        memcpy((void *)at(move->keys, target, move->bf16), at(move->keys, source, move->bf16), bytes);
        memcpy((void *)at(move->values, target, move->bf16), at(move->values, source, move->bf16), bytes);
    }
}

void pliant_move(
    Pool *pool, bool bf16, void *keys, void *values, const int64_t (*moves)[3], int64_t count, int64_t layers,
    int64_t kv_heads, int64_t layer_stride, int64_t page_stride, int64_t head_stride
) {
    Move job = {keys, values, moves, count, kv_heads, layer_stride, page_stride, head_stride, bf16};
    share(pool, move_task, &job, layers * kv_heads);
}
