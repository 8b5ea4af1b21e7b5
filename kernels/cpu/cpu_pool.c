// Threads that take tasks from the one that calls, which does what they leave.
//
// OpenMP makes every thread wait for every other at the end of each loop: on a machine with other work, one that is not
// running then holds up all, for milliseconds, a hundred times a step. Here only a task that was begun is waited for.
#include <pthread.h>
#include <sched.h>
#include <stdlib.h>

#include "cpu_kernels.h"

#define SPINS 4000 // some 50 us, longer than what lies between two calls of a decode step

struct Pool {
    void (*task)(const void *job, int64_t index);
    const void *job;
    int64_t tasks;
    atomic_llong left;     // tasks that nobody has taken
    atomic_llong underway; // tasks that are not done
    atomic_int sleeping;
    bool stop;
    pthread_mutex_t mutex;
    pthread_cond_t wake;
    int threads; // with the one that calls
    pthread_t others[];
};

static void pause_briefly(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

// Do one task, if one is left. What it is may be read once it is taken: the caller then waits for it.
static bool help(Pool *pool) {
    long long left = atomic_load(&pool->left);
    while (left > 0)
        if (atomic_compare_exchange_weak(&pool->left, &left, left - 1)) {
            pool->task(pool->job, pool->tasks - left);
            atomic_fetch_sub(&pool->underway, 1);
            return true;
        }
    return false;
}

static void *other(void *argument) {
    Pool *pool = argument;
    for (;;) {
        for (int spin = 0; spin < SPINS; spin++) {
            if (help(pool))
                spin = 0;
            pause_briefly();
        }
        pthread_mutex_lock(&pool->mutex);
        atomic_fetch_add(&pool->sleeping, 1);
        while (!atomic_load(&pool->left) && !pool->stop)
            pthread_cond_wait(&pool->wake, &pool->mutex);
        atomic_fetch_sub(&pool->sleeping, 1);
        bool stop = pool->stop;
        pthread_mutex_unlock(&pool->mutex);
        if (stop)
            return NULL;
    }
}

static void wake(Pool *pool, bool stop) {
    pthread_mutex_lock(&pool->mutex);
    pool->stop = stop;
    pthread_cond_broadcast(&pool->wake);
    pthread_mutex_unlock(&pool->mutex);
}

void share(Pool *pool, void (*task)(const void *, int64_t), const void *job, int64_t tasks) {
    if (tasks == 1 || pool->threads == 1) {
        for (int64_t i = 0; i < tasks; i++)
            task(job, i);
        return;
    }
    pool->task = task;
    pool->job = job;
    pool->tasks = tasks;
    atomic_store(&pool->underway, tasks);
    atomic_store(&pool->left, tasks);
    if (atomic_load(&pool->sleeping))
        wake(pool, false);
    while (help(pool))
        ;
    for (int spin = 0; atomic_load(&pool->underway); spin++)
        if (spin < SPINS)
            pause_briefly();
        else
            sched_yield(); // perhaps the thread that we wait for waits for this processor
}

int pool_threads(const Pool *pool) { return pool->threads; }

// One call at a time may use a pool. Fewer threads than asked for come if the system gives no more.
Pool *pliant_start_pool(int threads) {
    Pool *pool = calloc(1, sizeof *pool + threads * sizeof(pthread_t));
    pthread_mutex_init(&pool->mutex, NULL);
    pthread_cond_init(&pool->wake, NULL);
    pool->threads = 1;
    while (pool->threads < threads && !pthread_create(&pool->others[pool->threads - 1], NULL, other, pool))
        pool->threads++;
    return pool;
}

void pliant_stop_pool(Pool *pool) {
    wake(pool, true);
    for (int i = 0; i < pool->threads - 1; i++)
        pthread_join(pool->others[i], NULL);
    pthread_cond_destroy(&pool->wake);
    pthread_mutex_destroy(&pool->mutex);
    free(pool);
}
