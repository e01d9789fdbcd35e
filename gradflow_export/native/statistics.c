/* Six statistics of many arrays in one read.
 *
 * Plain C without Python and without torch: it is called through ctypes, so that one build serves every version of
 * both. Entries are read once, in 16 lanes; sums are kept in the lanes' own precision for RUN entries and then folded
 * into double. Zeros and non-finite entries are counted on the bits. Arrays are cut into chunks of fixed size whose
 * results are joined in order, so that the result does not depend on the number of threads.
 */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "statistics.h"

#ifndef _WIN32
#include <pthread.h>
#define THREADED 1
#endif

enum { LANES = 16, WIDE = 64, PART = 256, AHEAD = 1024, RUN = 4096, CHUNK = 1 << 18, MOST_THREADS = 64 };

/* What is known of one chunk, or of one array. */
typedef struct {
    double squares, magnitudes, max, min, zeros, nonfinite;
} Sums;

static const Sums NOTHING = {0.0, 0.0, -INFINITY, INFINITY, 0.0, 0.0};

static inline uint32_t bits_of_float(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline uint64_t bits_of_double(double value) {
    uint64_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

/* One function per type of entry, which adds to what is known. READ(i) gives entry i as REAL. A NaN compares false and
 * leaves max and min alone. */
#define DEFINE_CHUNK(NAME, ENTRY, REAL, BITS, BITS_OF, MAGNITUDE, EXPONENT, READ)                                      \
    FOR_EACH_CPU static void NAME(const ENTRY *x, int64_t n, Sums *out) {                                              \
        REAL max[LANES], min[LANES];                                                                                   \
        Sums sums = *out;                                                                                              \
        for (int j = 0; j < LANES; j++) {                                                                              \
            max[j] = (REAL)-INFINITY;                                                                                  \
            min[j] = (REAL)INFINITY;                                                                                   \
        }                                                                                                              \
        for (int64_t start = 0; start < n; start += RUN) {                                                             \
            int64_t end = start + RUN < n ? start + RUN : n, whole = start + (end - start) / LANES * LANES;            \
            REAL squares[LANES] = {0}, magnitudes[LANES] = {0};                                                        \
            BITS zeros[LANES] = {0}, nonfinite[LANES] = {0};                                                           \
            for (int64_t part = start; part < whole; part += PART) {                                                   \
                int64_t stop = part + PART < whole ? part + PART : whole;                                              \
                fetch_ahead(x + part + PART, PART * sizeof(ENTRY));                                                    \
                for (int64_t i = part; i < stop; i += LANES)                                                           \
                    for (int j = 0; j < LANES; j++) {                                                                  \
                        REAL value = READ(i + j), size = value < 0 ? -value : value;                                   \
                        BITS bits = BITS_OF(value) & MAGNITUDE;                                                        \
                        squares[j] += value * value;                                                                   \
                        magnitudes[j] += size;                                                                         \
                        max[j] = value > max[j] ? value : max[j];                                                      \
                        min[j] = value < min[j] ? value : min[j];                                                      \
                        zeros[j] += bits == 0;                                                                         \
                        nonfinite[j] += bits >= EXPONENT;                                                              \
                    }                                                                                                  \
            }                                                                                                          \
            for (int64_t i = whole; i < end; i++) {                                                                    \
                REAL value = READ(i), size = value < 0 ? -value : value;                                               \
                BITS bits = BITS_OF(value) & MAGNITUDE;                                                                \
                squares[0] += value * value;                                                                           \
                magnitudes[0] += size;                                                                                 \
                max[0] = value > max[0] ? value : max[0];                                                              \
                min[0] = value < min[0] ? value : min[0];                                                              \
                zeros[0] += bits == 0;                                                                                 \
                nonfinite[0] += bits >= EXPONENT;                                                                      \
            }                                                                                                          \
            for (int j = 0; j < LANES; j++) {                                                                          \
                sums.squares += squares[j];                                                                            \
                sums.magnitudes += magnitudes[j];                                                                      \
                sums.zeros += (double)zeros[j];                                                                        \
                sums.nonfinite += (double)nonfinite[j];                                                                \
            }                                                                                                          \
        }                                                                                                              \
        for (int j = 0; j < LANES; j++) {                                                                              \
            sums.max = max[j] > sums.max ? max[j] : sums.max;                                                          \
            sums.min = min[j] < sums.min ? min[j] : sums.min;                                                          \
        }                                                                                                              \
        *out = sums;                                                                                                   \
    }

#define PLAIN(i) (x[i])
#define WIDE_BFLOAT16(i) (from_bfloat16(x[i]))
#define WIDE_FLOAT16(i) (from_float16(x[i]))

DEFINE_CHUNK(chunk_float32, float, float, uint32_t, bits_of_float, 0x7fffffffu, 0x7f800000u, PLAIN)
DEFINE_CHUNK(chunk_float64, double, double, uint64_t, bits_of_double, 0x7fffffffffffffffull, 0x7ff0000000000000ull,
             PLAIN)
DEFINE_CHUNK(chunk_bfloat16, uint16_t, float, uint32_t, bits_of_float, 0x7fffffffu, 0x7f800000u, WIDE_BFLOAT16)
DEFINE_CHUNK(chunk_float16, uint16_t, float, uint32_t, bits_of_float, 0x7fffffffu, 0x7f800000u, WIDE_FLOAT16)

/* The sum of squares alone, for what is read at every step: half the work, so that memory is what it waits for. */
#define DEFINE_SQUARES(NAME, ENTRY, REAL, READ)                                                                        \
    FOR_EACH_CPU static double NAME(const ENTRY *x, int64_t n) {                                                       \
        double sum = 0.0;                                                                                              \
        for (int64_t start = 0; start < n; start += RUN) {                                                             \
            int64_t end = start + RUN < n ? start + RUN : n, whole = start + (end - start) / WIDE * WIDE;              \
            REAL squares[WIDE] = {0};                                                                                  \
            for (int64_t i = start; i < whole; i += WIDE)                                                              \
                for (int j = 0; j < WIDE; j++) squares[j] += READ(i + j) * READ(i + j);                                \
            for (int64_t i = whole; i < end; i++) squares[i - whole] += READ(i) * READ(i);                             \
            for (int j = 0; j < WIDE; j++) sum += squares[j];                                                          \
        }                                                                                                              \
        return sum;                                                                                                    \
    }

DEFINE_SQUARES(squares_float32, float, float, PLAIN)
DEFINE_SQUARES(squares_float64, double, double, PLAIN)
DEFINE_SQUARES(squares_bfloat16, uint16_t, float, WIDE_BFLOAT16)
DEFINE_SQUARES(squares_float16, uint16_t, float, WIDE_FLOAT16)

static void sum_chunk(const char *data, int64_t n, int32_t kind, Sums *out) {
    switch (kind) {
    case FLOAT64: chunk_float64((const double *)data, n, out); break;
    case BFLOAT16: chunk_bfloat16((const uint16_t *)data, n, out); break;
    case FLOAT16: chunk_float16((const uint16_t *)data, n, out); break;
    default: chunk_float32((const float *)data, n, out); break;
    }
}

static double squares_of(const char *data, int64_t n, int32_t kind) {
    switch (kind) {
    case FLOAT64: return squares_float64((const double *)data, n);
    case BFLOAT16: return squares_bfloat16((const uint16_t *)data, n);
    case FLOAT16: return squares_float16((const uint16_t *)data, n);
    default: return squares_float32((const float *)data, n);
    }
}

double gradflow_entry(const char *data, int64_t i, int32_t kind) {
    switch (kind) {
    case FLOAT64: return ((const double *)data)[i];
    case BFLOAT16: return from_bfloat16(((const uint16_t *)data)[i]);
    case FLOAT16: return from_float16(((const uint16_t *)data)[i]);
    default: return ((const float *)data)[i];
    }
}

/* One piece of work, and all of it. */
typedef struct {
    const char *data;
    int64_t n, start, place;
    int32_t kind;
} Piece;

/* Pieces g, g + groups, ... are done by one thread, in order. */
typedef struct {
    const Piece *pieces;
    Sums *sums;
    int64_t count, groups, next;
    int32_t squares_only;
    const Sketch *sketch;
} Work;

/* Read a part that the second cache keeps, and add it while it does: see sketch.c. */
static void sum_and_add(const Work *work, int64_t group, const Piece *piece, Sums *out) {
    for (int64_t at = 0; at < piece->n; at += AT_ONCE) {
        int64_t n = piece->n - at < AT_ONCE ? piece->n - at : AT_ONCE, size = size_of(piece->kind);
        const char *data = piece->data + at * size;
        if (work->squares_only)
            for (int64_t i = 0; i < n; i += RUN) /* the same bits as without signed sums */
                out->squares += squares_of(data + i * size, n - i < RUN ? n - i : RUN, piece->kind);
        else
            sum_chunk(data, n, piece->kind, out);
        gradflow_add(work->sketch, group, data, piece->start + at, n, piece->place, piece->kind);
    }
}

static void *take_pieces(void *argument) {
    Work *work = argument;
    for (;;) {
#ifdef THREADED
        int64_t group = __atomic_fetch_add(&work->next, 1, __ATOMIC_RELAXED);
#else
        int64_t group = work->next++;
#endif
        if (group >= work->groups) return NULL;
        for (int64_t i = group; i < work->count; i += work->groups) {
            const Piece *piece = &work->pieces[i];
            /* Small arrays lie apart, and the first lines of each are waited for: ask for those of the next one now. */
            if (i + 1 < work->count) fetch_ahead(piece[1].data, AHEAD);
            work->sums[i] = NOTHING;
            if (work->sketch != NULL)
                sum_and_add(work, group, piece, &work->sums[i]);
            else if (work->squares_only)
                work->sums[i].squares = squares_of(piece->data, piece->n, piece->kind);
            else
                sum_chunk(piece->data, piece->n, piece->kind, &work->sums[i]);
        }
    }
}

static void do_work(Work *work, int32_t threads) {
#ifdef THREADED
    pthread_t others[MOST_THREADS];
    int32_t started = 0, wanted = threads - 1 < MOST_THREADS ? threads - 1 : MOST_THREADS;
    while (started < wanted && started + 1 < work->groups &&
           pthread_create(&others[started], NULL, take_pieces, work) == 0)
        started++;
    take_pieces(work);
    for (int32_t i = 0; i < started; i++) pthread_join(others[i], NULL);
#else
    (void)threads;
    take_pieces(work);
#endif
}

/* Squares near the ends of the range lose digits or overflow: read again, divided by the greatest entry. */
static double norm_of(const char *data, int64_t n, int32_t kind, Sums *sums) {
    double greatest = fmax(fabs(sums->max), fabs(sums->min)), scaled = 0.0, magnitudes = 0.0;
    double least = kind == FLOAT64 ? 1e-140 : 1e-16;
    if (n == 0) return 0.0;
    if (sums->nonfinite > 0) return sqrt(sums->squares);
    if (greatest == 0.0 || (sums->squares < INFINITY && sums->magnitudes < INFINITY && greatest > least))
        return sqrt(sums->squares);
    for (int64_t i = 0; i < n; i++) {
        double part = gradflow_entry(data, i, kind) / greatest;
        scaled += part * part;
        magnitudes += fabs(part);
    }
    sums->magnitudes = greatest * magnitudes;
    return greatest * sqrt(scaled);
}

static Sums join(const Sums *sums, int64_t chunks) {
    Sums all = NOTHING;
    for (const Sums *one = sums; one < sums + chunks; one++) {
        all.squares += one->squares;
        all.magnitudes += one->magnitudes;
        all.max = one->max > all.max ? one->max : all.max;
        all.min = one->min < all.min ? one->min : all.min;
        all.zeros += one->zeros;
        all.nonfinite += one->nonfinite;
    }
    return all;
}

/* All statistics of one array, in this thread, in the same chunks. */
static Sums sum_alone(const char *data, int64_t n, int32_t kind) {
    Sums all = NOTHING;
    for (int64_t start = 0; start < n; start += CHUNK) {
        Sums both[2] = {all, NOTHING};
        sum_chunk(data + start * size_of(kind), n - start < CHUNK ? n - start : CHUNK, kind, &both[1]);
        all = join(both, 2);
    }
    return all;
}

/* The L2 norm whose square this is. Beyond this range digits may have been lost, and of NaN and Inf the ordinary way
 * knows what to say. */
static double root_of(double squares, const char *data, int64_t n, int32_t kind) {
    if (squares > 1e-28 && squares < 1e76) return sqrt(squares);
    Sums all = sum_alone(data, n, kind);
    return norm_of(data, n, kind, &all);
}

double gradflow_norm(const char *data, int64_t n, int32_t kind) {
    double squares = 0.0;
    for (int64_t start = 0; start < n; start += CHUNK)
        squares += squares_of(data + start * size_of(kind), n - start < CHUNK ? n - start : CHUNK, kind);
    return root_of(squares, data, n, kind);
}

int gradflow_statistics_of(const void *const *data, const int64_t *counts, const int32_t *kinds, int64_t tensors,
                           int32_t threads, int32_t norms_only, const Sketch *sketch, const int64_t *places,
                           double *out) {
    int64_t pieces = 0, i = 0;
    for (int64_t t = 0; t < tensors; t++) pieces += (counts[t] + CHUNK - 1) / CHUNK;
    Piece *list = malloc(sizeof(Piece) * (size_t)(pieces + 1));
    Sums *sums = malloc(sizeof(Sums) * (size_t)(pieces + 1));
    if (list == NULL || sums == NULL) {
        free(list);
        free(sums);
        return 1;
    }
    for (int64_t t = 0; t < tensors; t++)
        for (int64_t start = 0; start < counts[t]; start += CHUNK) {
            int64_t left = counts[t] - start;
            list[i].data = (const char *)data[t] + start * size_of(kinds[t]);
            list[i].n = left < CHUNK ? left : CHUNK;
            list[i].start = start;
            list[i].place = places == NULL ? 0 : places[t];
            list[i++].kind = kinds[t];
        }
    Work work = {list, sums, pieces, sketch == NULL ? pieces : sketch->groups, 0, norms_only, sketch};
    do_work(&work, threads);
    i = 0;
    for (int64_t t = 0; t < tensors; t++) {
        int64_t chunks = (counts[t] + CHUNK - 1) / CHUNK;
        if (norms_only) {
            double squares = 0.0;
            for (int64_t c = 0; c < chunks; c++) squares += sums[i + c].squares;
            i += chunks;
            out[t] = root_of(squares, data[t], counts[t], kinds[t]);
            continue;
        }
        Sums all = join(sums + i, chunks);
        i += chunks;
        out[t] = norm_of(data[t], counts[t], kinds[t], &all);
        out[tensors + t] = all.magnitudes;
        out[2 * tensors + t] = all.max;
        out[3 * tensors + t] = all.min;
        out[4 * tensors + t] = all.zeros;
        out[5 * tensors + t] = all.nonfinite;
    }
    free(list);
    free(sums);
    return 0;
}

/* Fill out[6][tensors]: L2 norm, sum of magnitudes, max, min, zeros, non-finite entries. An array without entries has
 * norm and sum 0, max -Inf and min Inf; NaN is in norm and sum where an entry is NaN, max and min pass over it.
 * Returns 0, or 1 when there is no memory. */
PUBLIC int gradflow_statistics(const void *const *data, const int64_t *counts, const int32_t *kinds, int64_t tensors,
                               int32_t threads, double *out) {
    return gradflow_statistics_of(data, counts, kinds, tensors, threads, 0, NULL, NULL, out);
}
