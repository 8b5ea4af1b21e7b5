// What the two files of LoRA kernels share.
#include "../cpu/cpu_kernels.h"

#define SITES 4
#define MODULES 3

typedef struct { // in values, see LoraBatch.places
    int64_t block, a;
    struct {
        int64_t rank, b;
    } modules[MODULES];
} Place;

typedef struct {
    const int32_t *rows;
    int64_t count;
    const void *a, *b[MODULES]; // of this layer; A [rank of all modules][in], B [rank][out]
    int64_t ranks[MODULES], rank;
    float *inner;     // A x, [count][rank]
    int64_t tasks[2]; // of rounds 1 and 2, with those of the groups before
} Group;

typedef struct {
    const Group *groups;
    const void *x; // [n][in]
    void *y;       // [n][stride]
    int64_t in, stride;
    const int64_t *outs; // [MODULES]
    int round;
    bool bf16;
} Lora;

INLINE int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

// y += B A x for one group, by packed matrices.
void add_packed(Pool *pool, const Lora *lora, const Group *group);
