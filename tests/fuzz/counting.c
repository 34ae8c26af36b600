/* Fuzz `_counting.c`: hostile numbers and bounds; the expectation is the C library's sort, and a loop. */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030b0000
#include <Python.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static Py_buffer values, ends;
static unsigned long bound;
static long long counted[64];
static size_t counted_batches;
static PyObject *nothing;

static int fake_parse(const char *format, ...) {
    va_list given;
    va_start(given, format);
    *va_arg(given, Py_buffer *) = values;
    if (format[0] == 'y') {
        *va_arg(given, Py_buffer *) = ends;
        *va_arg(given, unsigned long *) = bound;
    }
    va_end(given);
    return 1;
}

#undef PyArg_ParseTuple
#define PyArg_ParseTuple(args, ...) fake_parse(__VA_ARGS__)
#define PyBuffer_Release(view) ((void)(view))
#define PyList_New(size) ((PyObject *)&counted_batches)
#define PyLong_FromLongLong(count) (counted[counted_batches++] = (count), nothing)
#define PyList_Append(list, number) ((void)(number))
#define PyEval_SaveThread() NULL
#define PyEval_RestoreThread(state) ((void)(state))
#include "../../src/powerband/core/_counting.c"

static int compare(const void *a, const void *b) {
    uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return (x > y) - (x < y);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    if (size < 16) return 0;
    size_t count = data[0] % 64, tail = size - 8 * (count + 1);
    if (size < 8 * (count + 1)) return 0;
    uint32_t *numbers = malloc(tail + 1), *expected = malloc(tail + 1); /* the last one or two may be incomplete */
    int64_t *limits = malloc(8 * count + 1);
    memcpy(&bound, data + 1, 4);
    memcpy(limits, data + 8, 8 * count);
    for (size_t i = 0; i < count; i++)
        if (data[5] & 1) limits[i] %= (int64_t)tail + 1; /* else: any, negative ones too */
    memcpy(numbers, data + 8 * (count + 1), tail);
    memcpy(expected, numbers, tail);
    values = (Py_buffer){.buf = numbers, .len = (Py_ssize_t)tail};
    ends = (Py_buffer){.buf = limits, .len = (Py_ssize_t)(8 * count)};
    counted_batches = 0;
    count_above(NULL, NULL);
    if (counted_batches != count) abort();
    for (size_t i = 0, at = 0; i < count; i++) {
        long long found = 0;
        for (; at < tail / 4 && at < (size_t)limits[i]; at++) found += numbers[at] > bound;
        if (found != counted[i]) abort();
    }
    sort_u32(NULL, NULL);
    qsort(expected, tail / 4, 4, compare);
    if (memcmp(numbers, expected, tail)) abort();
    free(numbers), free(expected), free(limits);
    return 0;
}
