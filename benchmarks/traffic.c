/* AdamW's memory traffic and next to no arithmetic: four arrays read, three of them written. */

#include <stdint.h>

struct arrays {
    float *param, *grad, *exp_avg, *exp_avg_sq;
    int64_t length, threads;
    void (*parallel)(void (*)(void *), void *, unsigned, unsigned);   /* GOMP_parallel */
    int (*thread)(void);                                              /* omp_get_thread_num */
    int (*team)(void);                                                /* omp_get_num_threads */
};

static void share(const struct arrays *a, int64_t thread, int64_t team) {
    float *restrict p = a->param, *restrict m = a->exp_avg, *restrict v = a->exp_avg_sq;
    const float *restrict g = a->grad;
    const int64_t lines = a->length / 16;
    for (int64_t i = lines * thread / team * 16; i < lines * (thread + 1) / team * 16; ++i) {
        m[i] += g[i];
        v[i] += g[i];
        p[i] += g[i];
    }
}

static void on_thread(void *arrays) {
    const struct arrays *a = arrays;
    share(a, a->thread(), a->team());
}

void traffic(struct arrays *a) {
    if (a->threads > 1) a->parallel(on_thread, a, (unsigned)a->threads, 0);
    else share(a, 0, 1);
}
