/* What the sources of the library share. */
#ifndef GRADFLOW_STATISTICS_H
#define GRADFLOW_STATISTICS_H

#include <stdint.h>

#if defined(_WIN32)
#define PUBLIC __declspec(dllexport)
#else
#define PUBLIC __attribute__((visibility("default")))
#endif

enum { FLOAT32 = 0, FLOAT64 = 1, BFLOAT16 = 2, FLOAT16 = 3, KINDS = 4 };

/* Entry i of an array, as double. */
double gradflow_entry(const char *data, int64_t i, int32_t kind);

/* The six rows of gradflow_statistics, or with norms_only the first of them; 1 when there is no memory. */
int gradflow_statistics_of(const void *const *data, const int64_t *counts, const int32_t *kinds, int64_t tensors,
                           int32_t threads, int32_t norms_only, double *out);

#endif
