/* What modules send forward: a few statistics of each tensor, by one read of it. */
#include <math.h>
#include <string.h>

#include "statistics.h"

#define AT_ONCE 8

#if defined(__GNUC__) && !defined(__clang__)
#define ONE_BY_ONE __attribute__((optimize("no-tree-vectorize"))) /* else products are rounded before they are added */
#else
#define ONE_BY_ONE
#endif

/* Some of the rows and columns of a tensor, which has `all_rows` and `all_columns`. Row r begins at
 * (r step / inner) outer + (r step % inner) stride. */
typedef struct {
    int64_t rows, step, inner, outer, stride, columns, apart, all_rows, all_columns;
} Grid;

static int64_t row_start(const Grid *grid, int64_t r) {
    int64_t row = r * grid->step;
    if (grid->inner == 1) return row * grid->outer; /* divisions take longer than to read a short row */
    return row / grid->inner * grid->outer + row % grid->inner * grid->stride;
}

/* Squares that left the range of double, or nearly: taken once more, as shares of the greatest entry. */
static double scaled_spread(const double *entries, int64_t size) {
    double greatest = 0.0, squares = 0.0;
    for (int64_t i = 0; i < size; i++) /* a NaN is kept: it compares false */
        if (greatest == greatest && !(fabs(entries[i]) <= greatest)) greatest = fabs(entries[i]);
    if (!(greatest > 0.0 && greatest < INFINITY)) return greatest;
    for (int64_t i = 0; i < size; i++) squares += entries[i] / greatest * (entries[i] / greatest);
    return greatest * sqrt(squares / (double)size);
}

/* The square of the standard error of the mean of n values out of `all`, by how the values scatter. */
static double squared_error(const double *values, int64_t n, int64_t all) {
    double mean = 0.0, scatter = 0.0;
    if (n >= all || n < 2) return 0.0;
    for (int64_t i = 0; i < n; i++) mean += values[i] / (double)n;
    for (int64_t i = 0; i < n; i++) scatter += (values[i] - mean) * (values[i] - mean);
    return scatter / (double)(n - 1) / (double)n * (1.0 - (double)n / (double)all);
}

/* The sum of squares of each row, in the order of its entries. Several rows at once, so that no addition waits for the
 * one before it. */
ONE_BY_ONE FOR_EACH_CPU static void squares_of_rows(const double *entries, int64_t rows, int64_t columns, double *sums) {
    int64_t r = 0;
    for (; r + AT_ONCE <= rows; r += AT_ONCE) {
        const double *row = entries + r * columns;
        double of[AT_ONCE] = {0.0};
        for (int64_t j = 0; j < columns; j++)
            for (int64_t k = 0; k < AT_ONCE; k++) of[k] += row[k * columns + j] * row[k * columns + j];
        for (int64_t k = 0; k < AT_ONCE; k++) sums[r + k] = of[k];
    }
    for (; r < rows; r++) {
        sums[r] = 0.0;
        for (int64_t j = 0; j < columns; j++) sums[r] += entries[r * columns + j] * entries[r * columns + j];
    }
}

/* The sum of each column, or of its squares, in the order of its entries. Several rows at once, so that no addition
 * waits for memory. */
#define DEFINE_OF_COLUMNS(NAME, OF)                                                                                    \
    FOR_EACH_CPU static void NAME(const double *restrict entries, int64_t rows, int64_t columns,                       \
                                  double *restrict sums) {                                                             \
        for (int64_t j = 0; j < columns; j++) sums[j] = 0.0;                                                           \
        for (; rows >= AT_ONCE; rows -= AT_ONCE, entries += AT_ONCE * columns)                                         \
            for (int64_t j = 0; j < columns; j++) {                                                                    \
                double sum = sums[j];                                                                                  \
                for (int64_t k = 0; k < AT_ONCE; k++) sum += OF(entries[k * columns + j]);                             \
                sums[j] = sum;                                                                                         \
            }                                                                                                          \
        for (; rows > 0; rows--, entries += columns)                                                                   \
            for (int64_t j = 0; j < columns; j++) sums[j] += OF(entries[j]);                                           \
    }

#define ITSELF(value) (value)
#define SQUARED(value) ((value) * (value))
DEFINE_OF_COLUMNS(sums_of_columns, ITSELF)
DEFINE_OF_COLUMNS(squares_of_columns, SQUARED)

FOR_EACH_CPU static void take_away(const double *restrict means, int64_t rows, int64_t columns,
                                   double *restrict entries) {
    for (; rows > 0; rows--, entries += columns)
        for (int64_t j = 0; j < columns; j++) entries[j] -= means[j];
}

/* The root mean square of entries less the mean of their column. Where there are more rows than those read, the mean of
 * these is nearer to them than that of all, which is made up for. The standard error, as a share of the spread, is 0
 * where all was read. `entries` has room for rows * columns of them, and for 2 * columns and rows of others. */
FOR_EACH_CPU static double spread_of(const char *data, int32_t kind, const Grid *grid, double *entries, double *error) {
    int64_t columns = grid->columns, size = grid->rows * columns;
    double *means = entries + size, *sums = means + columns, *by_row = sums + columns, squares = 0.0, spread;
    *error = 0.0;
    for (int64_t r = 0; r < grid->rows; r++) {
        int64_t start = row_start(grid, r);
        double *row = entries + r * columns;
        if (kind == FLOAT32 && grid->apart == 1) {
            const float *from = (const float *)data + start;
            for (int64_t j = 0; j < columns; j++) row[j] = from[j];
        } else {
            for (int64_t j = 0; j < columns; j++) row[j] = gradflow_entry(data, start + j * grid->apart, kind);
        }
    }
    sums_of_columns(entries, grid->rows, columns, means);
    for (int64_t j = 0; j < columns; j++) means[j] /= (double)grid->rows;
    take_away(means, grid->rows, columns, entries);
    squares_of_columns(entries, grid->rows, columns, sums);
    squares_of_rows(entries, grid->rows, columns, by_row);
    for (int64_t j = 0; j < columns; j++) squares += sums[j];
    spread = squares > 1e-280 && squares < INFINITY ? sqrt(squares / (double)size) : scaled_spread(entries, size);
    if (squares > 1e-280 && squares < 1e280 && (grid->rows < grid->all_rows || columns < grid->all_columns)) {
        double of_columns, of_rows, n = (double)grid->rows, all = (double)grid->all_rows;
        for (int64_t j = 0; j < columns; j++) sums[j] *= (double)columns / squares; /* shares of their mean */
        for (int64_t r = 0; r < grid->rows; r++) by_row[r] *= n / squares;
        of_columns = squared_error(sums, columns, grid->all_columns);
        of_rows = squared_error(by_row, grid->rows, grid->all_rows);
        *error = 0.5 * sqrt(of_columns + of_rows);
        if (n > 1.0) spread *= sqrt(n / (n - 1.0) * (all - 1.0) / all);
    }
    return spread;
}

/* Where readings of outputs go: for each site its root mean square, the spread over its grid (0 without rows) with its
 * error, and marks that it has them. `room` doubles are there to compute with. */
typedef struct {
    const Interface *torch;
    const Grid *grids;
    double *sizes, *spreads, *errors;
    uint8_t *sized, *spread, *told;
    double *work;
    int64_t room;
} Sent;

/* Read one output. Returns 0; 1 when it cannot be read. */
PUBLIC int gradflow_sent(const Sent *to, void *tensor, int64_t site) {
    const void *data;
    int64_t count;
    int32_t kind;
    const Grid *grid = &to->grids[site];
    if (gradflow_describe(to->torch, &tensor, &data, &count, &kind) || count == 0) return 1;
    if (grid->rows * grid->columns + 2 * grid->columns + grid->rows > to->room) return 1;
    for (int64_t r = 0; r < grid->rows; r++)
        if (row_start(grid, r) + (grid->columns - 1) * grid->apart >= count) return 1;
    to->sizes[site] = gradflow_norm(data, count, kind) / sqrt((double)count);
    to->errors[site] = 0.0;
    to->spreads[site] = grid->rows > 0 ? spread_of(data, kind, grid, to->work, &to->errors[site]) : 0.0;
    to->sized[site] = to->spread[site] = to->told[site] = 1;
    return 0;
}

/* Where readings of gradients go: for each site the norm over all that came, a mark that there is one, and how many. */
typedef struct {
    const Interface *torch;
    double *norms;
    uint8_t *present;
    int64_t *arrivals;
} Returned;

/* Read one gradient. Returns 0; 1 when it cannot be read. */
PUBLIC int gradflow_returned(const Returned *to, void *tensor, int64_t site) {
    const void *data;
    int64_t count;
    int32_t kind;
    if (gradflow_describe(to->torch, &tensor, &data, &count, &kind)) return 1;
    double norm = gradflow_norm(data, count, kind);
    to->norms[site] = to->present[site] ? hypot(to->norms[site], norm) : norm;
    to->present[site] = 1;
    to->arrivals[site]++;
    return 0;
}

/* The units of an activation's output lie `inner` entries long, one after the other, again and again. */
typedef struct {
    int64_t units, inner;
} Units;

#define DEFINE_FIRED(NAME, ENTRY, READ)                                                                                \
    FOR_EACH_CPU static int64_t NAME(const ENTRY *x, int64_t n, const Units *shape, uint8_t *fired) {                  \
        int64_t zeros = 0;                                                                                             \
        for (int64_t row = 0; row < n / (shape->units * shape->inner); row++)                                          \
            for (int64_t u = 0; u < (shape->inner == 1 ? 1 : shape->units); u++) {                                     \
                int64_t length = shape->inner == 1 ? shape->units : shape->inner;                                      \
                int32_t some = 0, none = 0;                                                                            \
                if (shape->inner == 1) {                                                                               \
                    for (int64_t i = 0; i < length; i++) {                                                             \
                        none += READ(x[i]) == 0;                                                                       \
                        fired[i] |= !(READ(x[i]) <= 0);                                                                \
                    }                                                                                                  \
                } else {                                                                                               \
                    for (int64_t i = 0; i < length; i++) {                                                             \
                        none += READ(x[i]) == 0;                                                                       \
                        some |= !(READ(x[i]) <= 0);                                                                    \
                    }                                                                                                  \
                    fired[u] |= (uint8_t)some;                                                                         \
                }                                                                                                      \
                zeros += none;                                                                                         \
                x += length;                                                                                           \
            }                                                                                                          \
        return zeros;                                                                                                  \
    }

#define AS_IT_IS(value) (value)
/* Halves by their bits: NaN, Inf and signs are told from a float of the same sign and exponent. */
static inline float of_bfloat16(uint16_t half) {
    uint32_t bits = (uint32_t)half << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}
static inline float of_float16(uint16_t half) {
    if ((half & 0x7c00u) == 0x7c00u && (half & 0x3ffu)) return NAN;
    return (half & 0x7fffu) == 0 ? 0.0f : (half & 0x8000u) ? -1.0f : 1.0f;
}

DEFINE_FIRED(fired_float32, float, AS_IT_IS)
DEFINE_FIRED(fired_float64, double, AS_IT_IS)
DEFINE_FIRED(fired_bfloat16, uint16_t, of_bfloat16)
DEFINE_FIRED(fired_float16, uint16_t, of_float16)

/* Read the outputs of rectifiers: of each the number of exact zeros into zeros[n], and which units were above zero or
 * NaN is added to its bytes from fired[firsts[t]] on. A tensor that cannot be read has -1 zeros. */
PUBLIC int64_t gradflow_rectified(const Interface *torch, void **tensors, int64_t n, const Units *shapes,
                                  const int64_t *firsts, uint8_t *fired, double *zeros) {
    int64_t refused = 0;
    for (int64_t t = 0; t < n; t++) {
        const void *data;
        int64_t count;
        int32_t kind;
        const Units *shape = &shapes[t];
        if (gradflow_describe(torch, &tensors[t], &data, &count, &kind) || count % (shape->units * shape->inner)) {
            zeros[t] = -1.0;
            refused++;
            continue;
        }
        uint8_t *own = fired + firsts[t];
        switch (kind) {
        case FLOAT64: zeros[t] = (double)fired_float64(data, count, shape, own); break;
        case BFLOAT16: zeros[t] = (double)fired_bfloat16(data, count, shape, own); break;
        case FLOAT16: zeros[t] = (double)fired_float16(data, count, shape, own); break;
        default: zeros[t] = (double)fired_float32(data, count, shape, own); break;
        }
    }
    return refused;
}
