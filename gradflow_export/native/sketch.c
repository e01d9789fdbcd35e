/* Signed sums of many entries: a vector of fixed length whose products are those of the vectors it is made of.
 *
 * Entries are taken in blocks. Each block is added to consecutive sums, from a place on that its number decides, and
 * each entry with a sign that its place and the block's number decide (Charikar, Chen and Farach-Colton 2002). Two
 * entries of one block never meet. Where all entries have a place of their own, nothing is added up and nothing lost.
 */
#include <stdlib.h>
#include <string.h>

#ifndef _WIN32
#include <pthread.h>
#endif

#include "statistics.h"

static uint64_t mix(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    return x ^ (x >> 31);
}

#define DEFINE_ADD(NAME, ENTRY, SUM, READ)                                                                             \
    FOR_EACH_CPU static void NAME(const ENTRY *restrict x, int64_t n, const float *restrict signs,                     \
                                  SUM *restrict sums) {                                                                \
        for (int64_t i = 0; i < n; i++) sums[i] += (SUM)(READ(x[i]) * signs[i]);                                       \
    }

#define DEFINE_SQUARES(NAME, ENTRY, READ)                                                                              \
    FOR_EACH_CPU static double NAME(const ENTRY *x, int64_t n) {                                                       \
        double squares[LANES] = {0}, sum = 0.0;                                                                        \
        int64_t whole = n / LANES * LANES;                                                                             \
        for (int64_t i = 0; i < whole; i += LANES)                                                                     \
            for (int j = 0; j < LANES; j++) squares[j] += (double)READ(x[i + j]) * (double)READ(x[i + j]);             \
        for (int64_t i = whole; i < n; i++) squares[i - whole] += (double)READ(x[i]) * (double)READ(x[i]);             \
        for (int j = 0; j < LANES; j++) sum += squares[j];                                                             \
        return sum;                                                                                                    \
    }

enum { LANES = 32, MOST_PARTS = 4, LONG_TENSOR = 1 << 20 };
#define AS_IT_IS(value) (value)
DEFINE_ADD(wide_float32, float, double, AS_IT_IS)
DEFINE_ADD(wide_float64, double, double, AS_IT_IS)
DEFINE_ADD(wide_bfloat16, uint16_t, double, from_bfloat16)
DEFINE_ADD(wide_float16, uint16_t, double, from_float16)
DEFINE_ADD(narrow_float32, float, float, AS_IT_IS)
DEFINE_ADD(narrow_float64, double, float, AS_IT_IS)
DEFINE_ADD(narrow_bfloat16, uint16_t, float, from_bfloat16)
DEFINE_ADD(narrow_float16, uint16_t, float, from_float16)
DEFINE_SQUARES(squares_float32, float, AS_IT_IS)
DEFINE_SQUARES(squares_float64, double, AS_IT_IS)
DEFINE_SQUARES(squares_bfloat16, uint16_t, from_bfloat16)
DEFINE_SQUARES(squares_float16, uint16_t, from_float16)

static void add_wide(const char *data, int64_t n, int32_t kind, const float *signs, double *sums) {
    switch (kind) {
    case FLOAT64: wide_float64((const double *)data, n, signs, sums); break;
    case BFLOAT16: wide_bfloat16((const uint16_t *)data, n, signs, sums); break;
    case FLOAT16: wide_float16((const uint16_t *)data, n, signs, sums); break;
    default: wide_float32((const float *)data, n, signs, sums); break;
    }
}

static void add_narrow(const char *data, int64_t n, int32_t kind, const float *signs, float *sums) {
    switch (kind) {
    case FLOAT64: narrow_float64((const double *)data, n, signs, sums); break;
    case BFLOAT16: narrow_bfloat16((const uint16_t *)data, n, signs, sums); break;
    case FLOAT16: narrow_float16((const uint16_t *)data, n, signs, sums); break;
    default: narrow_float32((const float *)data, n, signs, sums); break;
    }
}

static void add(const Sketch *sketch, int64_t to, const char *data, int64_t n, int32_t kind, const float *signs) {
    if (sketch->wide)
        add_wide(data, n, kind, signs, (double *)sketch->sums + to);
    else
        add_narrow(data, n, kind, signs, (float *)sketch->sums + to);
}

static double squares_of(const char *data, int64_t n, int32_t kind) {
    switch (kind) {
    case FLOAT64: return squares_float64((const double *)data, n);
    case BFLOAT16: return squares_bfloat16((const uint16_t *)data, n);
    case FLOAT16: return squares_float16((const uint16_t *)data, n);
    default: return squares_float32((const float *)data, n);
    }
}

void gradflow_add(const Sketch *sketch, int64_t group, const char *data, int64_t start, int64_t n, int64_t place,
                  int32_t kind) {
    int64_t size = size_of(kind), end = start + n, first = group * sketch->buckets;
    for (int64_t i = start, length; i < end; i += length, data += length * size) {
        int64_t within = i % SKETCH_BLOCK, to, run;
        const float *signs = sketch->signs;
        length = SKETCH_BLOCK - within < end - i ? SKETCH_BLOCK - within : end - i;
        if (sketch->direct) {
            add(sketch, first + place + i, data, length, kind, signs + 2 * SKETCH_SIGNS); /* signs of 1 */
            continue;
        }
        uint64_t hash = mix(((uint64_t)place << 40) + (uint64_t)(i / SKETCH_BLOCK) + sketch->seed);
        to = (int64_t)((hash & 0xffffffffu) + (uint64_t)within) & (sketch->buckets - 1);
        signs += within + (int64_t)(hash >> 32) % (SKETCH_SIGNS - SKETCH_BLOCK) + ((hash >> 63) ? SKETCH_SIGNS : 0);
        run = sketch->buckets - to < length ? sketch->buckets - to : length;
        add(sketch, first + to, data, run, kind, signs);
        if (run < length) add(sketch, first, data + run * size, length - run, kind, signs + run);
    }
}

/* A stretch of a tensor that one thread adds up. */
typedef struct {
    const Sketch *sketch;
    const char *data;
    const int64_t *without;
    int64_t group, from, to, width, rows;
    int32_t kind;
    double squares;
} Stretch;

/* Entries from .. to of the tensor. What is read first by a loop that does nothing else is in the second cache when it
 * is added: both together take less time than the adding alone, which the processor does not fetch ahead for. */
static void read_and_add(Stretch *part, int64_t from, int64_t to) {
    for (int64_t n; from < to; from += n) {
        const char *data = part->data + from * size_of(part->kind);
        n = to - from < AT_ONCE ? to - from : AT_ONCE;
        part->squares += squares_of(data, n, part->kind);
        gradflow_add(part->sketch, part->group, data, from, n, 0, part->kind);
    }
}

static void *add_stretch(void *argument) {
    Stretch *part = argument;
    int64_t from = part->from;
    for (int64_t r = 0; r <= part->rows && from < part->to; r++) {
        int64_t to = r < part->rows ? part->without[r] * part->width : part->to;
        if (to > part->to) to = part->to;
        read_and_add(part, from, to);
        if (r < part->rows && to + part->width > from) from = to + part->width;
    }
    return NULL;
}

/* Signed sums of one tensor but for some of its rows, in 1 to 4 parts, each of which one thread does; the same with any
 * number of threads. Into sums[number][buckets], which are 0, they go, into the first of them the result. Returns the
 * sum of the squares. */
static double signed_parts(Stretch whole, uint64_t seed, const float *signs, int64_t buckets, int64_t number,
                           int32_t threads, double *sums) {
    Sketch sketch = {signs, sums, buckets, number, seed, 0, 1};
    Stretch parts[MOST_PARTS];
    int64_t count = whole.to, step = (count / number / SKETCH_BLOCK + 1) * SKETCH_BLOCK;
    for (int64_t p = 0; p < number; p++) {
        parts[p] = whole;
        parts[p].sketch = &sketch;
        parts[p].group = p;
        parts[p].from = p * step < count ? p * step : count;
        parts[p].to = parts[p].from + step < count ? parts[p].from + step : count;
    }
#ifndef _WIN32
    pthread_t others[MOST_PARTS];
    int started[MOST_PARTS] = {0};
    for (int64_t p = 1; p < number; p++)
        started[p] = p < threads && pthread_create(&others[p], NULL, add_stretch, &parts[p]) == 0;
    for (int64_t p = 0; p < number; p++)
        if (!started[p]) add_stretch(&parts[p]);
    for (int64_t p = 1; p < number; p++)
        if (started[p]) pthread_join(others[p], NULL);
#else
    (void)threads;
    for (int64_t p = 0; p < number; p++) add_stretch(&parts[p]);
#endif
    double squares = parts[0].squares;
    for (int64_t p = 1; p < number; p++) {
        squares += parts[p].squares;
        for (int64_t i = 0; i < buckets; i++) sums[i] += sums[p * buckets + i];
    }
    return squares;
}

static int64_t parts_of(int64_t count) { return count >= LONG_TENSOR ? MOST_PARTS : 1; }

/* Whether a sum of squares left the range of double; of narrower types none can. */
static int is_lost(double squares, int32_t kind) {
    return kind == FLOAT64 && (squares > 1e300 || (squares > 0.0 && squares < 1e-280));
}

/* Signed sums of one tensor but for some of its rows. Into sums[4][buckets], which are 0, they go, into the first of
 * them the result; `squares`, where it is given, is the sum of the squares. Returns 0; 1 when the tensor cannot be
 * read, or a square left the range of double. */
PUBLIC int gradflow_signed_parts(const Interface *torch, void *tensor, int64_t width, const int64_t *without,
                                 int64_t rows, uint64_t seed, const float *signs, int64_t buckets, int32_t threads,
                                 double *sums, double *squares) {
    const void *data;
    int64_t count;
    int32_t kind;
    if (gradflow_describe(torch, &tensor, &data, &count, &kind)) return 1;
    for (int64_t r = 0; r < rows; r++)
        if (without[r] < 0 || without[r] >= count / width || (r > 0 && without[r] <= without[r - 1])) return 1;
    Stretch whole = {.data = data, .without = without, .to = count, .width = width, .rows = rows, .kind = kind};
    double found = signed_parts(whole, seed, signs, buckets, parts_of(count), threads, sums);
    if (squares == NULL) return 0;
    *squares = found;
    return is_lost(found, kind);
}

FOR_EACH_CPU static double squared_distance(const double *a, const double *b, int64_t n) {
    double squares[LANES] = {0}, sum = 0.0;
    for (int64_t i = 0; i < n; i += LANES) /* n is a multiple */
        for (int j = 0; j < LANES; j++) squares[j] += (a[i + j] - b[i + j]) * (a[i + j] - b[i + j]);
    for (int j = 0; j < LANES; j++) sum += squares[j];
    return sum;
}

/* Signed sums of many tensors: into held[n][buckets] and, into out[n], the sums of the squares of the entries; or with
 * `compare`, into out[n], the sums of the squares of what the signed sums differ by from those held.
 * Returns 0; 1 when a tensor cannot be read or a square left the range of double; 2 when there is no memory. */
PUBLIC int gradflow_signed_changes(const Interface *torch, void **tensors, int64_t n, uint64_t seed,
                                   const float *signs, int64_t buckets, int32_t threads, int32_t compare, double *held,
                                   double *out) {
    int failed = 0;
    double *sums = malloc(sizeof(double) * (size_t)(MOST_PARTS * buckets));
    if (sums == NULL) return 2;
    for (int64_t t = 0; t < n && !failed; t++, held += buckets) {
        Stretch whole = {.to = 0};
        const void *data;
        failed = gradflow_describe(torch, &tensors[t], &data, &whole.to, &whole.kind);
        if (failed) break;
        int64_t number = parts_of(whole.to);
        whole.data = data;
        memset(sums, 0, sizeof(double) * (size_t)(number * buckets));
        double squares = signed_parts(whole, seed, signs, buckets, number, threads, sums);
        if (compare) {
            out[t] = squared_distance(sums, held, buckets);
        } else {
            memcpy(held, sums, sizeof(double) * (size_t)buckets);
            out[t] = squares;
            failed = is_lost(squares, whole.kind);
        }
    }
    free(sums);
    return failed;
}

/* Rows of `width` entries of one tensor that are not all 0, rising, at most `limit` of them.
 * Returns how many; -1 when the tensor cannot be read, or there are more. */
PUBLIC int64_t gradflow_touched_rows(const Interface *torch, void *tensor, int64_t width, int64_t limit,
                                     int64_t *rows) {
    const void *data;
    int64_t count, found = 0;
    int32_t kind;
    if (width < 1 || gradflow_describe(torch, &tensor, &data, &count, &kind)) return -1;
    int64_t bytes = width * size_of(kind);
    uint64_t zero = 0, sign = kind == FLOAT64 ? 1ull << 63 : kind == FLOAT32 ? 0x8000000080000000ull
                                                                          : 0x8000800080008000ull;
    const char *row = data;
    for (int64_t r = 0; r < count / width; r++, row += bytes) {
        uint64_t any = 0, word;
        int64_t at = 0;
        for (; at + 64 <= bytes && !any; at += 64)
            for (int k = 0; k < 64; k += 8) {
                memcpy(&word, row + at + k, 8);
                any |= word & ~sign;
            }
        for (; at < bytes && !any; at += 8) {
            word = zero;
            memcpy(&word, row + at, (size_t)(bytes - at < 8 ? bytes - at : 8));
            any |= word & ~sign;
        }
        if (!any) continue;
        if (found == limit) return -1;
        rows[found++] = r;
    }
    return found;
}

static inline uint64_t turned(uint64_t value) { return value << 31 | value >> 33; }

enum { WORDS = 32 };
static const uint64_t FIRST = 0x9e3779b185ebca87ull, SECOND = 0xc2b2ae3d27d4eb4full;

FOR_EACH_CPU static void rounds(const char *from, int64_t bytes, uint64_t *states) {
    uint64_t held[WORDS], line[WORDS];
    memcpy(held, states, sizeof held);
    for (int64_t at = 0; at < bytes; at += 8 * WORDS) {
        memcpy(line, from + at, sizeof line);
        for (int k = 0; k < WORDS; k++) held[k] = turned(held[k] + line[k] * SECOND) * FIRST;
    }
    memcpy(states, held, sizeof held);
}

/* A number that tells whether a bit of a tensor is another one than before: what the rounds of xxHash64 make of it.
 * Each is reversible, so that one word that changes always shows. Returns 0; 1 when the tensor cannot be read. */
PUBLIC int gradflow_checksum(const Interface *torch, void *tensor, uint64_t *out) {
    const void *data;
    int64_t count;
    int32_t kind;
    if (gradflow_describe(torch, &tensor, &data, &count, &kind)) return 1;
    const char *from = data;
    int64_t bytes = count * size_of(kind), whole = bytes / (8 * WORDS) * (8 * WORDS);
    uint64_t states[WORDS], sum = (uint64_t)bytes;
    char last[8 * WORDS] = {0};
    for (int k = 0; k < WORDS; k++) states[k] = FIRST * (uint64_t)(k + 1);
    rounds(from, whole, states);
    memcpy(last, from + whole, (size_t)(bytes - whole));
    rounds(last, bytes > whole ? 8 * WORDS : 0, states);
    for (int k = 0; k < WORDS; k++) sum = mix(turned(sum + states[k] * SECOND) * FIRST);
    *out = sum;
    return 0;
}
