/* The inner loop of scan.py, compiled: the same answers, many times as fast.
 *
 * Optional: without a compiler at installation, and on Spark's executors of another platform, its own loop does the work.
 * What both must agree on is said there, and held by tests/files/test_scan.py on any bytes. Nothing is read outside the window.
 */

#define Py_LIMITED_API 0x030B0000 /* one wheel for every CPython from 3.11 on */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

/* What the functions take and return: scan.py uses a module with its own number only. Raise both together. */
#define API 8

enum {
    SIZE_FIELD = 4,
    HEADER_V1 = 32, /* ledger, entry, LAC, length */
    HEADER_V2 = 41, /* flags, scope, ledger, entry, LAC, length */
    LENGTH = 8, /* the last field of a header, which the entries of clients need not have */
    FIELDS_V1 = 5,  /* of a row: size, ledger, entry, LAC, length */
    FIELDS_V2 = 7,  /* size, flags, scope, ledger, entry, LAC, length */
    PADDING = -0x100, /* in a journal: the count of bytes to skip follows */
    PADDING_HEADER = 8,
};

/* Whose records they are. A journal may have padding between them, and its entries of zeros need a second look. */
enum { ENTRY_LOG, JOURNAL, JOURNAL_OVER_PADDING, ENTRY_LOG_WITH_SHORT };

static uint64_t read_u64(const unsigned char *at) {
    uint64_t value = 0;
    for (int index = 0; index < 8; index++) {
        value = value << 8 | at[index];
    }
    return value;
}

static int64_t read_i32(const unsigned char *at) {
    return (int32_t)((uint32_t)at[0] << 24 | (uint32_t)at[1] << 16 | (uint32_t)at[2] << 8 | at[3]);
}

/* The size of the plain entry at `begin`, or -1 where there is none. */
static int64_t plain_size(const unsigned char *window, Py_ssize_t limit, Py_ssize_t begin, int version, int kind) {
    const int header = version == 1 ? HEADER_V1 : HEADER_V2;
    if (limit - begin < SIZE_FIELD + header) {
        return -1;
    }
    const int64_t size = read_i32(window + begin);
    if (size < header - (kind == ENTRY_LOG_WITH_SHORT ? LENGTH : 0) || size > limit - begin - SIZE_FIELD) {
        return -1;
    }
    const unsigned char *body = window + begin + SIZE_FIELD;
    if (version == 1) {
        return body[0] < 0x80 && body[8] < 0x80 ? size : -1;
    }
    return body[0] >= 0xA0 && body[0] <= 0xA4 && body[17] < 0x80 ? size : -1;
}

static int is_zero(const unsigned char *bytes, int64_t count) {
    return count == 0 || (bytes[0] == 0 && memcmp(bytes, bytes + 1, (size_t)count - 1) == 0);
}

/* Where the next plain entry begins at `*at` or behind padding of zeros there, and its size; -1 where there is none. */
static int64_t next_size(const unsigned char *window, Py_ssize_t limit, Py_ssize_t *at, int version, int kind) {
    static const unsigned char zeros[HEADER_V1];
    const Py_ssize_t needed = SIZE_FIELD + (version == 1 ? HEADER_V1 : HEADER_V2);
    while (kind == JOURNAL_OVER_PADDING && limit - *at >= needed && read_i32(window + *at) == PADDING) {
        const int64_t count = read_i32(window + *at + SIZE_FIELD);
        if (count < 0 || count > limit - *at - PADDING_HEADER || !is_zero(window + *at + PADDING_HEADER, count)) {
            return -1;
        }
        *at += PADDING_HEADER + count;
    }
    const int64_t size = plain_size(window, limit, *at, version, kind);
    if ((kind == JOURNAL || kind == JOURNAL_OVER_PADDING) && version == 1 && size >= 0 &&
        memcmp(window + *at + SIZE_FIELD, zeros, HEADER_V1) == 0) {
        return -1;
    }
    return size;
}

PyDoc_STRVAR(take_entries_doc,
"take_entries(window, begin, format_version, kind=0)\n--\n\n"
"Where the plain entries begin and their fields, both as native int64 in bytes, and where the first record stands that\n"
"is none; see bkctl.files.scan.take_entries. `kind` is 0 in an entry log, 1 in a journal, 2 there over padding.");

static PyObject *take_entries(PyObject *module, PyObject *args) {
    Py_buffer buffer;
    Py_ssize_t begin;
    int version, kind = ENTRY_LOG;
    if (!PyArg_ParseTuple(args, "y*ni|i", &buffer, &begin, &version, &kind)) {
        return NULL;
    }
    if (begin < 0 || (version != 1 && version != 2)) {
        PyBuffer_Release(&buffer);
        PyErr_SetString(PyExc_ValueError, "begin is 0 or more, the format version 1 or 2");
        return NULL;
    }
    const unsigned char *window = buffer.buf;
    const Py_ssize_t limit = buffer.len;
    const int fields = version == 1 ? FIELDS_V1 : FIELDS_V2;

    Py_ssize_t count = 0, at = begin;
    for (int64_t size; at < limit && (size = next_size(window, limit, &at, version, kind)) >= 0;
         at += SIZE_FIELD + size) {
        count++;
    }
    const Py_ssize_t stop = at;
    PyObject *begins = PyBytes_FromStringAndSize(NULL, count * 8);
    PyObject *rows = PyBytes_FromStringAndSize(NULL, count * fields * 8);
    if (begins == NULL || rows == NULL) {
        Py_XDECREF(begins);
        Py_XDECREF(rows);
        PyBuffer_Release(&buffer);
        return NULL;
    }
    char *begin_out = PyBytes_AsString(begins), *row_out = PyBytes_AsString(rows);
    at = begin;
    for (Py_ssize_t index = 0; index < count; index++) {
        next_size(window, limit, &at, version, kind);
        const unsigned char *body = window + at + SIZE_FIELD;
        int64_t row[FIELDS_V2];
        int field = 0;
        row[field++] = read_i32(window + at);
        if (version == 2) {
            row[field++] = *body++;
        }
        for (; field < fields; field++, body += 8) {
            row[field] = (int64_t)read_u64(body);
        }
        const int64_t at64 = at;
        memcpy(begin_out + index * 8, &at64, 8);
        memcpy(row_out + index * fields * 8, row, (size_t)fields * 8);
        at += SIZE_FIELD + row[0];
    }
    PyBuffer_Release(&buffer);
    return Py_BuildValue("NNn", begins, rows, stop);
}

static PyMethodDef methods[] = {
    {"take_entries", take_entries, METH_VARARGS, take_entries_doc},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module_definition = {
    PyModuleDef_HEAD_INIT, "bkctl.files._scan", "The inner loop of scan.py, compiled.", 0, methods,
    NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__scan(void) {
    PyObject *module = PyModule_Create(&module_definition);
    if (module != NULL && PyModule_AddIntConstant(module, "API", API) < 0) {
        Py_CLEAR(module);
    }
    return module;
}
