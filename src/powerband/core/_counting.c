/* Sort and count tens of millions of gaps. `counting.py` implements the same functions in Python. */

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030b0000
#include <Python.h>
#include <stdint.h>
#include <stdlib.h>

static PyObject *sort_u32(PyObject *module, PyObject *args) { /* radix sort, in place */
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
    free(spare); /* after an even number of passes the result is in the original buffer */
    PyBuffer_Release(&view);
    Py_RETURN_NONE;
}

static PyObject *count_above(PyObject *module, PyObject *args) { /* number of values above a bound in each batch */
    Py_buffer view, ends;
    unsigned long bound;
    if (!PyArg_ParseTuple(args, "y*y*k", &view, &ends, &bound)) return NULL;
    const uint32_t *values = view.buf;
    const int64_t *end = ends.buf;
    size_t batches = ends.len / 8, at = 0, n = view.len / 4;
    PyObject *list = PyList_New(0);
    for (size_t batch = 0; list && batch < batches; batch++) {
        long long count = 0;
        for (; at < (size_t)end[batch] && at < n; at++) count += values[at] > bound;
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
    {"count_above", count_above, METH_VARARGS, "count_above(values, ends, bound): values above bound per batch"},
    {NULL, NULL, 0, NULL}};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_counting", NULL, -1, functions, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__counting(void) {
    return PyModule_Create(&definition);
}
