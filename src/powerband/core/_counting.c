/* Sorting and counting tens of millions of gaps. `counting.py` has the same in plain Python. */

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030b0000
#include <Python.h>
#include <stdint.h>
#include <stdlib.h>

static PyObject *sort_u32(PyObject *module, PyObject *args) { /* by radix, in place */
    Py_buffer view;
    if (!PyArg_ParseTuple(args, "w*", &view)) return NULL;
    size_t n = view.len / 4;
    uint32_t *from = view.buf, *to = malloc(view.len ? view.len : 1), *spare = to;
    if (!to) { PyBuffer_Release(&view); return PyErr_NoMemory(); }
    Py_BEGIN_ALLOW_THREADS
    for (int shift = 0; shift < 32; shift += 8) {
        size_t starts[256] = {0}, sum = 0;
        for (size_t i = 0; i < n; i++) starts[from[i] >> shift & 255]++;
        for (int b = 0; b < 256; b++) { size_t count = starts[b]; starts[b] = sum; sum += count; }
        for (size_t i = 0; i < n; i++) to[starts[from[i] >> shift & 255]++] = from[i];
        uint32_t *swap = from; from = to; to = swap;
    }
    Py_END_ALLOW_THREADS
    free(spare); /* four passes: the result is where it was */
    PyBuffer_Release(&view);
    Py_RETURN_NONE;
}

static PyObject *count_above(PyObject *module, PyObject *args) { /* how many lie above a bound, lump by lump */
    Py_buffer view, ends;
    unsigned long bound;
    if (!PyArg_ParseTuple(args, "y*y*k", &view, &ends, &bound)) return NULL;
    const uint32_t *values = view.buf;
    const int64_t *end = ends.buf;
    size_t lumps = ends.len / 8, at = 0, n = view.len / 4;
    PyObject *list = PyList_New(0);
    for (size_t lump = 0; list && lump < lumps; lump++) {
        long long count = 0;
        for (; at < (size_t)end[lump] && at < n; at++) count += values[at] > bound;
        PyObject *number = PyLong_FromLongLong(count);
        PyList_Append(list, number);
        Py_XDECREF(number);
    }
    PyBuffer_Release(&view);
    PyBuffer_Release(&ends);
    return list;
}

static PyMethodDef functions[] = {
    {"sort_u32", sort_u32, METH_VARARGS, "sort_u32(buffer): sort unsigned 32-bit numbers in place"},
    {"count_above", count_above, METH_VARARGS, "count_above(values, ends, bound): how many of each lump lie above"},
    {NULL, NULL, 0, NULL}};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_counting", NULL, -1, functions, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__counting(void) {
    return PyModule_Create(&definition);
}
