/* AdamW on a list of tensors, with the bits of torch's fused operator.

   m ← m + (1−β₁)(g − m)          fma(1−β₁, g−m, m); β₁ ≤ ½: fma(−β₁, g−m, g)
   v ← β₂v + (1−β₂)g²             fma((1−β₂)g, g, β₂v); at the end of a tensor fma(v, β₂, (1−β₂)g·g)
   p ← p(1−lr·λ) + (−lr/(1−β₁ᵗ)·m) / (√v/√(1−β₂ᵗ) + ε)

   torch takes WIDTH elements at a time and what is left at the end of a tensor one by one, and its
   compiler fused other operations there. Which one fuses how is all that sets the two apart: each
   operation below rounds once, in the order written, whatever instructions it becomes. Compile
   with -ffp-contract=off. FUSED: whether torch's kernels for this processor fuse at all.

   One call serves a whole list, and the list is cut into equal shares over the threads of torch's
   own OpenMP runtime, which is passed in: a second runtime would be a second pool of waiting
   threads. */

#ifndef REAL

#include <math.h>
#include <stdint.h>
#include <stdlib.h>

#define LINE 64         /* bytes of a cache line: shares begin at multiples of it */
#define GRAIN (1 << 14) /* elements worth waking a thread for */
#define AHEAD 512       /* bytes to fetch ahead; the processor itself stops at the end of a page */

/* torch's numbers for float32, and for the CPU */
#define FLOAT 6
#define DEVICE 0

#if FUSED
#define fused_float(a, b, c) __builtin_fmaf(a, b, c)
#define fused_double(a, b, c) __builtin_fma(a, b, c)
#else
#define fused_float(a, b, c) ((a) * (b) + (c))
#define fused_double(a, b, c) ((a) * (b) + (c))
#endif

typedef int32_t query(void *, void *);   /* torch's C interface: 0, or a failure */

enum { PARAM, GRAD, EXP_AVG, EXP_AVG_SQ, MAX_EXP_AVG_SQ, STEP, KINDS };

struct list {
    int64_t count;
    void **tensors[KINDS];             /* Python's tensor objects; no MAX_EXP_AVG_SQ: no amsgrad */
    int64_t inside;                    /* bytes into them: what torch's C interface takes */
    void **data[KINDS];                /* filled here: where their elements are */
    int64_t *length;                   /* filled here */
    int64_t known;                     /* whether the state is what it was when last it fitted */
    int64_t shared;                    /* filled here: whether parameters share memory */
    double lr, beta1, beta2, weight_decay, eps;
    int64_t maximize;
    int64_t threads;
    void (*parallel)(void (*)(void *), void *, unsigned, unsigned);   /* GOMP_parallel */
    int (*thread)(void);                                              /* omp_get_thread_num */
    int (*team)(void);                                                /* omp_get_num_threads */
    query *get_data_ptr, *get_dim, *get_sizes, *get_strides, *get_dtype, *get_device_type;
};

static int64_t lines(int64_t length, int64_t per_line) { return (length + per_line - 1) / per_line; }

#define JOIN_(a, b) a##_##b
#define JOIN(a, b) JOIN_(a, b)
#define NAME(name) JOIN(name, REAL)

/* This file once more for each type. */
#define REAL float
#define ROOT __builtin_sqrtf
#define CHUNK WIDTH
#include "adamw.c"
#undef REAL
#undef ROOT
#undef CHUNK
#define REAL double
#define ROOT __builtin_sqrt
#define CHUNK (WIDTH / 2)
#include "adamw.c"

struct layout {
    int64_t dim, *sizes, *strides;
    int32_t dtype, device;
};

/* The number of elements, if they fill the memory they span; else −1. */
static int64_t dense_length(const struct layout *a) {
    int64_t length = 1, span = 1;
    for (int64_t d = 0; d < a->dim; ++d) {
        length *= a->sizes[d];
        span += (a->sizes[d] - 1) * a->strides[d];
    }
    return length == 0 || span == length ? length : -1;
}

static void *handle(const struct list *l, int kind, int64_t i) {
    return (char *)l->tensors[kind][i] + l->inside;
}

static int look(const struct list *l, int kind, int64_t i, struct layout *seen) {
    void *tensor = handle(l, kind, i);
    return l->get_data_ptr(tensor, l->data[kind] + i) || l->get_dim(tensor, &seen->dim) ||
           l->get_sizes(tensor, &seen->sizes) || l->get_strides(tensor, &seen->strides) ||
           l->get_dtype(tensor, &seen->dtype) || l->get_device_type(tensor, &seen->device) ||
           (dense_length(seen) && !l->data[kind][i]);   /* a wrapper around other tensors */
}

/* Whether a tensor that had fitted has its elements where it had them. */
static int unmoved(const struct list *l, int kind, int64_t i) {
    void *before = l->data[kind][i];
    return !l->get_data_ptr(handle(l, kind, i), l->data[kind] + i) && l->data[kind][i] == before;
}

static int alike(const struct layout *a, const struct layout *b) {
    if (a->dim != b->dim || a->dtype != b->dtype || a->device != b->device) return 0;
    for (int64_t d = 0; d < a->dim; ++d)
        if (a->sizes[d] != b->sizes[d] || (a->strides[d] != b->strides[d] && a->sizes[d] > 1))
            return 0;
    return 1;
}

/* Asked before every step, because anybody may point a tensor to other memory at any time. A second
   moment that is `known` to be like the first and lies where it did needs no second look. */
static int fits(struct list *l, int64_t i, int32_t dtype) {
    struct layout mine, other;
    if (look(l, EXP_AVG, i, &mine) || mine.dtype != dtype || mine.device != DEVICE) return 0;
    if ((l->length[i] = dense_length(&mine)) < 0) return 0;
    for (int kind = PARAM; kind < STEP; ++kind) {
        if (kind == EXP_AVG || !l->tensors[kind]) continue;
        if (l->known && kind > EXP_AVG && unmoved(l, kind, i)) continue;
        if (look(l, kind, i, &other) || !alike(&mine, &other)) return 0;
    }
    if (i && l->tensors[STEP][i] == l->tensors[STEP][i - 1]) {
        l->data[STEP][i] = l->data[STEP][i - 1];
        return 1;
    }
    if (l->known && unmoved(l, STEP, i)) return 1;
    if (look(l, STEP, i, &other)) return 0;
    return other.dtype == FLOAT && other.device == DEVICE && dense_length(&other) == 1;
}

struct range {
    char *from, *to;
};

static int earlier(const void *a, const void *b) {
    const char *x = ((const struct range *)a)->from, *y = ((const struct range *)b)->from;
    return (x > y) - (x < y);
}

/* Whether two parameters share memory. Then one thread steps all, in their order, as torch does. */
static int64_t shared(const struct list *l, int64_t size) {
    struct range *ranges = malloc((size_t)(l->count + 1) * sizeof *ranges);
    if (!ranges) return 1;
    int64_t found = 0;
    for (int64_t i = 0; i < l->count; ++i) {
        ranges[i].from = l->data[PARAM][i];
        ranges[i].to = ranges[i].from + l->length[i] * size;
    }
    qsort(ranges, (size_t)l->count, sizeof *ranges, earlier);
    for (int64_t i = 1; i < l->count && !found; ++i) {
        found = ranges[i].from < ranges[i - 1].to && ranges[i].from < ranges[i].to;
        if (ranges[i].to < ranges[i - 1].to) ranges[i].to = ranges[i - 1].to;
    }
    free(ranges);
    return found;
}

/* Whether every tensor is on the CPU, of `dtype` and laid out like its state. Asked before a step. */
int64_t isokron_adamw_fits(struct list *l, int32_t dtype) {
    int64_t moved = !l->known;
    for (int64_t i = 0; i < l->count; ++i) {
        void *before = l->data[PARAM][i];
        if (!fits(l, i, dtype)) return l->known = 0;
        moved |= l->data[PARAM][i] != before;
    }
    if (moved) l->shared = shared(l, dtype == FLOAT ? sizeof(float) : sizeof(double));
    return l->known = 1;
}

/* One step of a list that fits. */
void isokron_adamw(struct list *l, int32_t dtype) {
    if (dtype == FLOAT) adamw_float(l);
    else adamw_double(l);
}

#else

#define PER_LINE ((int64_t)(LINE / sizeof(REAL)))

struct NAME(scalars) {
    REAL sign, decay, weight, beta2, square, root, eps, rate;
    int small;                         /* whether (1−β₁) < ½ */
};

static struct NAME(scalars) NAME(scalars_at)(const struct list *l, float step) {
    double t = step;
    struct NAME(scalars) s;
    s.sign = l->maximize ? -1 : 1;
    s.decay = l->weight_decay != 0 ? (REAL)fused_double(-l->lr, l->weight_decay, 1) : 1;
    s.weight = (REAL)(1 - l->beta1);
    s.small = s.weight < (REAL)0.5;
    if (!s.small) s.weight = s.weight - (REAL)1;
    s.beta2 = (REAL)l->beta2;
    s.square = (REAL)(1 - l->beta2);
    s.root = (REAL)sqrt(1 - pow(l->beta2, t));
    s.eps = (REAL)l->eps;
    s.rate = (REAL)(-(l->lr / (1 - pow(l->beta1, t))));
    return s;
}

/* One element; `amsgrad`, `small` and `end` are constants where it is called. */
static inline __attribute__((always_inline)) void NAME(element)(
    REAL *p, const REAL *g, REAL *m, REAL *v, REAL *top, const struct NAME(scalars) *s,
    int amsgrad, int small, int end)
{
    REAL grad = *g * s->sign, old = *m, mean, square, most;
    mean = NAME(fused)(s->weight, grad - old, small ? old : grad);
    if (end)
        square = NAME(fused)(*v, s->beta2, s->square * grad * grad);
    else
        square = NAME(fused)(s->square * grad, grad, *v * s->beta2);
    *m = mean;
    *v = most = square;
    if (amsgrad) {
        REAL before = *top;
        /* torch's vector maximum passes NaN on, its scalar one keeps what was there */
        most = before < square || (!end && square != square) ? square : before;
        *top = most;
    }
    *p = *p * s->decay + s->rate * mean / (ROOT(most) / s->root + s->eps);
}

static inline __attribute__((always_inline)) void NAME(span)(
    REAL *restrict p, const REAL *restrict g, REAL *restrict m, REAL *restrict v,
    REAL *restrict top, int64_t from, int64_t to, int64_t whole, const struct NAME(scalars) *given,
    int amsgrad, int small)
{
    const struct NAME(scalars) s = *given;
    const int64_t ahead = AHEAD / sizeof(REAL);
    int64_t i = from, vectors = whole < to ? whole : to;
    for (; i + PER_LINE <= vectors; i += PER_LINE) {
        __builtin_prefetch(p + i + ahead, 1);
        __builtin_prefetch(g + i + ahead, 0);
        __builtin_prefetch(m + i + ahead, 1);
        __builtin_prefetch(v + i + ahead, 1);
        if (amsgrad) __builtin_prefetch(top + i + ahead, 1);
        for (int64_t j = i; j < i + PER_LINE; ++j)
            NAME(element)(p + j, g + j, m + j, v + j, amsgrad ? top + j : 0, &s, amsgrad, small, 0);
    }
    for (; i < vectors; ++i)
        NAME(element)(p + i, g + i, m + i, v + i, amsgrad ? top + i : 0, &s, amsgrad, small, 0);
    for (; i < to; ++i)
        NAME(element)(p + i, g + i, m + i, v + i, amsgrad ? top + i : 0, &s, amsgrad, small, 1);
}

/* Elements from…to of tensor i. */
static void NAME(part)(const struct list *l, int64_t i, int64_t from, int64_t to,
                       const struct NAME(scalars) *s)
{
    REAL *p = l->data[PARAM][i], *m = l->data[EXP_AVG][i], *v = l->data[EXP_AVG_SQ][i];
    const REAL *g = l->data[GRAD][i];
    REAL *top = l->tensors[MAX_EXP_AVG_SQ] ? l->data[MAX_EXP_AVG_SQ][i] : 0;
    const int64_t whole = l->length[i] / CHUNK * CHUNK;
    if (top && s->small) NAME(span)(p, g, m, v, top, from, to, whole, s, 1, 1);
    else if (top) NAME(span)(p, g, m, v, top, from, to, whole, s, 1, 0);
    else if (s->small) NAME(span)(p, g, m, v, 0, from, to, whole, s, 0, 1);
    else NAME(span)(p, g, m, v, 0, from, to, whole, s, 0, 0);
}

/* The share of one thread: as many lines of the list, end to end, as every other thread has. */
static void NAME(share)(const struct list *l, int64_t total, int64_t thread, int64_t team) {
    const int64_t first = total * thread / team, last = total * (thread + 1) / team;
    struct NAME(scalars) s = {0};
    float counted = -1;
    for (int64_t i = 0, begin = 0; i < l->count && begin < last; ++i) {
        const int64_t length = l->length[i], end = begin + lines(length, PER_LINE);
        if (end > first) {
            const int64_t from = first > begin ? (first - begin) * PER_LINE : 0;
            const int64_t to = last < end ? (last - begin) * PER_LINE : length;
            const float step = *(const float *)l->data[STEP][i];
            if (step != counted) s = NAME(scalars_at)(l, counted = step);
            NAME(part)(l, i, from, to, &s);
        }
        begin = end;
    }
}

static int64_t NAME(total)(const struct list *l) {
    int64_t total = 0;
    for (int64_t i = 0; i < l->count; ++i) total += lines(l->length[i], PER_LINE);
    return total;
}

static void NAME(on_thread)(void *list) {
    const struct list *l = list;
    NAME(share)(l, NAME(total)(l), l->thread(), l->team());
}

static void NAME(adamw)(struct list *l) {
    const int64_t total = NAME(total)(l), most = total * PER_LINE / GRAIN;
    const int64_t threads = l->shared ? 1 : most < l->threads ? most : l->threads;
    if (threads > 1) l->parallel(NAME(on_thread), l, (unsigned)threads, 0);
    else NAME(share)(l, total, 0, 1);
}

#undef PER_LINE
#endif
