/* What the sources of the library share. */
#ifndef GRADFLOW_STATISTICS_H
#define GRADFLOW_STATISTICS_H

#include <stdint.h>
#include <string.h>

#if defined(_WIN32)
#define PUBLIC __declspec(dllexport)
#else
#define PUBLIC __attribute__((visibility("default")))
#endif

#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 11
#define FOR_EACH_CPU __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define FOR_EACH_CPU
#endif

#if !defined(__GNUC__)
#define __builtin_prefetch(address) ((void)(address))
#endif

enum { FLOAT32 = 0, FLOAT64 = 1, BFLOAT16 = 2, FLOAT16 = 3, KINDS = 4 };

/* PyTorch's C interface for compiled models: a handle is the address of a pointer to a tensor's implementation. */
typedef int32_t (*Pointer)(void *, void **);
typedef int32_t (*Long)(void *, int64_t *);
typedef int32_t (*Int)(void *, int32_t *);
typedef int32_t (*Flag)(void *, _Bool *);

/* Functions of the interface, and its numbers for the types of entries. */
typedef struct {
    Pointer data;
    Long numel, storage_offset, storage_size;
    Int dtype, device, layout;
    Flag contiguous;
    int64_t codes[KINDS];
} Interface;

/* Describe one tensor; 0 when it can be read: contiguous, real, floating, on the CPU, and as long as it says. */
int gradflow_describe(const Interface *torch, void **tensor, const void **data, int64_t *count, int32_t *kind);

static inline float from_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline float from_bfloat16(uint16_t half) { return from_bits((uint32_t)half << 16); }

static inline float from_float16(uint16_t half) {
    uint32_t sign = (uint32_t)(half & 0x8000u) << 16, rest = (uint32_t)(half & 0x7fffu) << 13;
    uint32_t special = 0x7f800000u | rest;            /* exponent of all ones: Inf, or NaN with its payload */
    float scaled = from_bits(rest) * 0x1p112f;        /* moves the exponent's bias; subnormals come out right too */
    uint32_t ordinary;
    memcpy(&ordinary, &scaled, sizeof ordinary);
    return from_bits(sign | ((half & 0x7c00u) == 0x7c00u ? special : ordinary));
}

/* Ask for memory that is read soon. The processor itself does not look beyond a page of 4 KB, and most tensors of a
 * model are a few pages long; asking for what lies beyond their end does no harm. */
static inline void fetch_ahead(const void *from, int64_t bytes) {
    for (int64_t line = 0; line < bytes; line += 64) __builtin_prefetch((const char *)from + line);
}

static inline int64_t size_of(int32_t kind) { return kind == FLOAT64 ? 8 : kind == FLOAT32 ? 4 : 2; }

/* Entry i of an array, as double. */
double gradflow_entry(const char *data, int64_t i, int32_t kind);

/* The L2 norm of one array, in this thread and without memory of its own: what gradflow_statistics_of finds. */
double gradflow_norm(const char *data, int64_t n, int32_t kind);

/* Signed sums, by groups of pieces of work, each of which one thread does in order. */
typedef struct {
    const float *signs; /* SKETCH_SIGNS as drawn, then their opposites, then SKETCH_BLOCK times 1 */
    void *sums;         /* [groups][buckets], the first of which is the result; of double where `wide`, else float */
    int64_t buckets, groups;
    uint64_t seed;
    int32_t direct, wide; /* direct: each entry has a place of its own */
} Sketch;

enum { SKETCH_BLOCK = 1024, SKETCH_SIGNS = 5 * SKETCH_BLOCK, AT_ONCE = 64 * SKETCH_BLOCK };

/* Add entries start, start + 1, ... of a tensor, which lie at data; its first place, or what tells it from others. */
void gradflow_add(const Sketch *sketch, int64_t group, const char *data, int64_t start, int64_t n, int64_t place,
                  int32_t kind);

/* The six rows of gradflow_statistics, or with norms_only the first of them; with a sketch, signed sums of the tensors
 * at `places` too. 1 when there is no memory. */
int gradflow_statistics_of(const void *const *data, const int64_t *counts, const int32_t *kinds, int64_t tensors,
                           int32_t threads, int32_t norms_only, const Sketch *sketch, const int64_t *places,
                           double *out);

#endif
