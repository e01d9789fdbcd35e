/* Reads many torch tensors in one call: what they are, the statistics of their entries, and a few of the entries.
 *
 * Tensors are told apart by PyTorch's own C interface for ahead-of-time compiled models, whose functions are handed in
 * by address, so that neither headers nor a link to torch are needed. A handle there is the address of a pointer to a
 * tensor's implementation. Nothing is read of a tensor that is not contiguous, real, floating and on the CPU, or whose
 * memory is smaller than it says.
 */
#include <math.h>
#include <stdlib.h>

#ifndef _WIN32
#include <pthread.h>
#endif

#include "statistics.h"

static int32_t kind_of(const Interface *torch, int32_t code) {
    for (int32_t kind = 0; kind < KINDS; kind++)
        if (torch->codes[kind] == code) return kind;
    return -1;
}


int gradflow_describe(const Interface *torch, void **tensor, const void **data, int64_t *count, int32_t *kind) {
    int32_t device = -1, layout = -1, code = -1;
    int64_t offset = 0, bytes = 0;
    void *first = NULL;
    _Bool contiguous = 0;
    if (torch->device(tensor, &device) || device != 0 || torch->layout(tensor, &layout) || layout != 0) return 1;
    if (torch->dtype(tensor, &code) || (*kind = kind_of(torch, code)) < 0) return 1;
    if (torch->contiguous(tensor, &contiguous) || !contiguous || torch->numel(tensor, count)) return 1;
    if (torch->storage_offset(tensor, &offset) || torch->storage_size(tensor, &bytes)) return 1;
    int64_t size = size_of(*kind);
    if (*count > 0 && (bytes / size < *count || bytes / size - *count < offset)) return 1;
    if (torch->data(tensor, &first) || (first == NULL && *count > 0)) return 1;
    *data = first;
    return 0;
}

/* Entries to be copied: those at first, first + stride, ... of one tensor. */
typedef struct {
    int64_t tensor, stride, count;
} Copy;

enum { HEAD = 5, FEW_THREADS = 4 };

/* One reading: the tensors as they were described, and where the results go. */
typedef struct {
    const void **data;
    int64_t *counts, judged;
    int32_t *kinds, rows, threads;
    const int64_t *places;
    const void *before;
    Sketch sketch;
    double *out, *to;
    int failed, over;
#ifndef _WIN32
    pthread_t thread;
#endif
} Reading;

/* Describe tensors[all] and do what must be done at once. Returns what gradflow_read returns. */
static int prepare(Reading *reading, const Interface *torch, void **tensors, int64_t all, int64_t judged, int32_t rows,
                   int32_t threads, const Copy *copies, int64_t parts, int64_t checked, const Sketch *sketch,
                   const int64_t *places, const void *before, double *out) {
    const void **data = calloc((size_t)all + 1, sizeof(void *) + sizeof(int64_t) + sizeof(int32_t));
    if (data == NULL) return 2;
    int64_t *counts = (int64_t *)(data + all);
    int32_t *kinds = (int32_t *)(counts + all);
    int failed = 0;
    double *copied = out + HEAD, *to = copied;
    for (int64_t t = 0; t < all && !failed; t++) {
        failed = gradflow_describe(torch, &tensors[t], &data[t], &counts[t], &kinds[t]);
        if (sketch->direct && t < judged && !failed)
            failed = places[t] < 0 || counts[t] > sketch->buckets || places[t] > sketch->buckets - counts[t];
    }
    for (int64_t p = 0; p < parts && !failed; p++) {
        int64_t t = copies[p].tensor;
        failed = copies[p].count > 0 && (copies[p].count - 1) * copies[p].stride >= counts[t];
        for (int64_t i = 0; i < copies[p].count && !failed; i++)
            *to++ = gradflow_entry(data[t], i * copies[p].stride, kinds[t]);
    }
    if (failed) {
        free(data);
        return 1;
    }
    out[4] = 0.0;
    for (int64_t i = 0; i < checked; i++) out[4] += copied[i] * copied[i];
    memset(sketch->sums, 0, (sketch->wide ? sizeof(double) : sizeof(float)) * (size_t)(sketch->buckets * sketch->groups));
    *reading = (Reading){.data = data, .counts = counts, .judged = judged, .kinds = kinds, .rows = rows,
                         .threads = threads, .places = places, .before = before, .sketch = *sketch, .out = out,
                         .to = to};
    return 0;
}

/* Join the groups of signed sums, and find <a,b>, <a,a> and <b,b>, a those before. */
#define DEFINE_JOIN(NAME, SUM)                                                                                         \
    FOR_EACH_CPU static void NAME(const SUM *restrict before, SUM *restrict sums, int64_t n, int64_t groups,           \
                                  double *out) {                                                                       \
        double both[LANES] = {0}, first[LANES] = {0}, second[LANES] = {0};                                             \
        for (int64_t g = 1; g < groups; g++)                                                                           \
            for (int64_t i = 0; i < n; i++) sums[i] += sums[g * n + i];                                                \
        out[0] = out[1] = out[2] = before == NULL ? NAN : 0.0;                                                         \
        if (before == NULL) return;                                                                                    \
        for (int64_t i = 0; i < n; i += LANES)                                                                         \
            for (int j = 0, most = n - i < LANES ? (int)(n - i) : LANES; j < most; j++) {                              \
                double a = before[i + j], b = sums[i + j];                                                             \
                both[j] += a * b;                                                                                      \
                first[j] += a * a;                                                                                     \
                second[j] += b * b;                                                                                    \
            }                                                                                                          \
        for (int j = 0; j < LANES; j++) {                                                                              \
            out[0] += both[j];                                                                                         \
            out[1] += first[j];                                                                                        \
            out[2] += second[j];                                                                                       \
        }                                                                                                              \
    }

enum { LANES = 16 };
DEFINE_JOIN(join_wide, double)
DEFINE_JOIN(join_narrow, float)

static void multiply(const Sketch *sketch, const void *before, double *out) {
    if (sketch->wide)
        join_wide(before, sketch->sums, sketch->buckets, sketch->groups, out);
    else
        join_narrow(before, sketch->sums, sketch->buckets, sketch->groups, out);
}

/* Take the statistics, and give back what prepare took. */
static void *finish(void *argument) {
    Reading *reading = argument;
    int64_t judged = reading->judged;
    double *to = reading->to;
    if (gradflow_statistics_of(reading->data, reading->counts, reading->kinds, judged, reading->threads,
                               reading->rows == 1, reading->sketch.buckets > 0 ? &reading->sketch : NULL,
                               reading->places, to))
        reading->failed = 2;
    multiply(&reading->sketch, reading->before, reading->out);
    for (int64_t t = 0; reading->rows > 1 && !reading->failed && t < judged; t++) {
        double count = reading->counts[t] > 0 ? (double)reading->counts[t] : 1.0, *sum = to + judged + t;
        double greatest = fmax(fmax(sum[judged], -sum[2 * judged]), 0.0);
        sum[judged] = isnan(*sum) ? NAN : greatest; /* the greatest entry passes over NaN; the sum does not */
        sum[2 * judged] = *sum / count;
        sum[3 * judged] /= count;
    }
    reading->out[3] = 0.0;
    for (int64_t t = 0; !reading->failed && t < judged; t++) reading->out[3] += to[t];
    free(reading->data);
#ifndef _WIN32
    __atomic_store_n(&reading->over, 1, __ATOMIC_RELEASE);
#endif
    return NULL;
}

/* Read tensors[all]. Into out go: <a,b>, <a,a> and <b,b> of the signed sums of the first `judged` tensors with those
 * `before`, NaN where there are none; the sum of the norms; the sum of squares of the first `checked` copied entries;
 * from out[HEAD] on the entries that `copies` names; then of the first `judged` tensors, [rows][judged], norms, and
 * with rows = 6 sum of magnitudes, greatest magnitude (NaN where an entry is), mean magnitude, share of zeros, and
 * number of non-finite entries. A sketch without sums makes none.
 *
 * Returns 0; 1 when a tensor cannot be read, or is too short for its copy; 2 when there is no memory. */
PUBLIC int gradflow_read(const Interface *torch, void **tensors, int64_t all, int64_t judged, int32_t rows,
                         int32_t threads, const Copy *copies, int64_t parts, int64_t checked, const Sketch *sketch,
                         const int64_t *places, const void *before, double *out) {
    Reading reading;
    int failed = prepare(&reading, torch, tensors, all, judged, rows, threads, copies, parts, checked, sketch, places,
                         before, out);
    if (failed) return failed;
    finish(&reading);
    return reading.failed;
}

/* The same, but copied entries and their squares alone are there at once; a thread of its own goes on with the rest.
 *
 * Returns what gradflow_end needs, which must be called before any of the memory is given back; NULL when a tensor
 * cannot be read or there is no memory or no thread. */
PUBLIC void *gradflow_begin(const Interface *torch, void **tensors, int64_t all, int64_t judged, int32_t rows,
                            int32_t threads, const Copy *copies, int64_t parts, int64_t checked, const Sketch *sketch,
                            const int64_t *places, const void *before, double *out) {
#ifndef _WIN32
    Reading *reading = malloc(sizeof(Reading));
    if (reading == NULL) return NULL;
    if (prepare(reading, torch, tensors, all, judged, rows, threads, copies, parts, checked, sketch, places, before,
                out)) {
        free(reading);
        return NULL;
    }
    /* A few read as fast as memory gives; more would take cores from what the caller goes on with. */
    if (reading->threads > FEW_THREADS) reading->threads = FEW_THREADS;
    if (pthread_create(&reading->thread, NULL, finish, reading) == 0) return reading;
    free(reading->data);
    free(reading);
#else
    (void)torch, (void)tensors, (void)all, (void)judged, (void)rows, (void)threads, (void)copies, (void)parts;
    (void)checked, (void)sketch, (void)places, (void)before, (void)out;
#endif
    return NULL;
}

/* Whether gradflow_end need hardly wait. */
PUBLIC int gradflow_is_over(void *begun) {
#ifndef _WIN32
    return __atomic_load_n(&((Reading *)begun)->over, __ATOMIC_ACQUIRE);
#else
    return begun != NULL;
#endif
}

/* Wait for a reading that was begun. Returns 0, or 2 when there was no memory. */
PUBLIC int gradflow_end(void *begun) {
    int failed = 2;
#ifndef _WIN32
    Reading *reading = begun;
    pthread_join(reading->thread, NULL);
    failed = reading->failed;
    free(reading);
#else
    (void)begun;
#endif
    return failed;
}
