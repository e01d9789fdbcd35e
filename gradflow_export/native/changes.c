/* What an optimizer changed: its weights are copied before it steps and compared with those after. */
#include <math.h>
#include <string.h>

#include "statistics.h"

enum { LANES = 32, RUN = 256 };

/* Sums of squares of what was there, and of what became different. With fewer lanes the loop is not vectorized whole. */
#define DEFINE_CHANGE(NAME, ENTRY, READ)                                                                               \
    FOR_EACH_CPU static void NAME(const ENTRY *before, const ENTRY *after, int64_t n, double *out) {                   \
        for (int64_t start = 0; start < n; start += RUN) {                                                             \
            int64_t end = start + RUN < n ? start + RUN : n, whole = start + (end - start) / LANES * LANES;            \
            double weights[LANES] = {0}, changes[LANES] = {0};                                                         \
            fetch_ahead(before + start + RUN, RUN * sizeof(ENTRY));                                                    \
            fetch_ahead(after + start + RUN, RUN * sizeof(ENTRY));                                                     \
            for (int64_t i = start; i < whole; i += LANES)                                                             \
                for (int j = 0; j < LANES; j++) {                                                                      \
                    double was = READ(before[i + j]), change = READ(after[i + j]) - was;                               \
                    weights[j] += was * was;                                                                           \
                    changes[j] += change * change;                                                                     \
                }                                                                                                      \
            for (int64_t i = whole; i < end; i++) {                                                                    \
                double was = READ(before[i]), change = READ(after[i]) - was;                                           \
                weights[i - whole] += was * was;                                                                       \
                changes[i - whole] += change * change;                                                                 \
            }                                                                                                          \
            for (int j = 0; j < LANES; j++) {                                                                          \
                out[0] += weights[j];                                                                                  \
                out[1] += changes[j];                                                                                  \
            }                                                                                                          \
        }                                                                                                              \
    }

#define AS_DOUBLE(value) ((double)(value))
DEFINE_CHANGE(change_float32, float, AS_DOUBLE)
DEFINE_CHANGE(change_float64, double, AS_DOUBLE)
DEFINE_CHANGE(change_bfloat16, uint16_t, from_bfloat16)
DEFINE_CHANGE(change_float16, uint16_t, from_float16)

static void change_of(const char *before, const char *after, int64_t n, int32_t kind, double *out) {
    switch (kind) {
    case FLOAT64: change_float64((const double *)before, (const double *)after, n, out); break;
    case BFLOAT16: change_bfloat16((const uint16_t *)before, (const uint16_t *)after, n, out); break;
    case FLOAT16: change_float16((const uint16_t *)before, (const uint16_t *)after, n, out); break;
    default: change_float32((const float *)before, (const float *)after, n, out); break;
    }
}

/* Copy the entries of each tensor to `held`, each tensor from a multiple of 8 bytes on; or with `out`, compare them with
 * what lies there: out[2][n] L2 norms before, and of the changes.
 * Returns 0; 1 when a tensor cannot be read, has not counts[t] entries, or a square left the range of double. */
PUBLIC int gradflow_compare(const Interface *torch, void **tensors, int64_t n, const int64_t *counts, char *held,
                            int64_t room, double *out) {
    char *end = held + room;
    for (int64_t t = 0; t < n; t++) {
        const void *data;
        int64_t count;
        int32_t kind;
        if (gradflow_describe(torch, &tensors[t], &data, &count, &kind) || count != counts[t]) return 1;
        int64_t bytes = (count * size_of(kind) + 7) / 8 * 8;
        if (bytes > end - held) return 1;
        if (out == NULL) {
            memcpy(held, data, (size_t)(count * size_of(kind)));
        } else {
            double squares[2] = {0.0, 0.0};
            change_of(held, data, count, kind, squares);
            for (int half = 0; half < 2; half++) {
                int lost = squares[half] == INFINITY || (squares[half] > 0.0 && squares[half] < 1e-280);
                if (lost && kind == FLOAT64) return 1;
                out[half * n + t] = sqrt(squares[half]);
            }
        }
        held += bytes;
    }
    return 0;
}
