/* Open a library as Python's ctypes does, look for each function named, and print six statistics of known entries.
 *
 * usage: loads LIBRARY FUNCTION ...
 * The entries are ((37 i) mod 101 - 50) / 8, many enough for several threads. Prints norm, sum of magnitudes, max, min,
 * zeros and non-finite entries in one line; returns 1 when the library does not open, 2 when a function is missing.
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#if defined(_WIN32)
#include <windows.h>
#define OPEN(path) ((void *)LoadLibraryA(path))
#define FIND(library, name) ((void *)GetProcAddress((HMODULE)(library), name))
#else
#include <dlfcn.h>
#define OPEN(path) dlopen(path, RTLD_NOW)
#define FIND(library, name) dlsym(library, name)
#endif

enum { ENTRIES = 1000000, THREADS = 3 };

typedef int (*Statistics)(const void *const *, const int64_t *, const int32_t *, int64_t, int32_t, double *);

int main(int count, char **words) {
    void *library = count > 1 ? OPEN(words[1]) : NULL;
    if (library == NULL) return 1;
    for (int i = 2; i < count; i++)
        if (FIND(library, words[i]) == NULL) return 2;
    Statistics statistics = (Statistics)FIND(library, "gradflow_statistics");
    float *entries = malloc(ENTRIES * sizeof(float));
    if (statistics == NULL || entries == NULL) return 2;
    for (int64_t i = 0; i < ENTRIES; i++) entries[i] = (float)(37 * i % 101 - 50) / 8;
    const void *data = entries;
    int64_t entries_of = ENTRIES;
    int32_t float32 = 0;
    double rows[6];
    if (statistics(&data, &entries_of, &float32, 1, THREADS, rows)) return 3;
    for (int i = 0; i < 6; i++) printf("%.9e ", rows[i]);
    return 0;
}
