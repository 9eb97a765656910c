/* Rows of text from columns, compiled: what `template % row` gives for each row, up to four times as fast.
 *
 * Optional: without a compiler at installation output.py does the same with %. tests/commands/test_output.py holds
 * that both print the same.
 */

#include "../../bkctl/_text.h"

/* What the functions take and return: _output.py uses a module with its own number only. Raise both together. */
#define API 1

static int add(Text *text, const char *data, size_t size) {
    if (make_room(text, size) < 0) {
        return -1;
    }
    memcpy(text->data + text->size, data, size);
    text->size += size;
    return 0;
}

static int add_number(Text *text, int64_t number) {
    char digits[20];
    size_t count = 0;
    /* The unsigned negation is right for the lowest number, too. */
    uint64_t rest = number < 0 ? -(uint64_t)number : (uint64_t)number;
    do {
        digits[sizeof digits - ++count] = (char)('0' + rest % 10);
        rest /= 10;
    } while (rest != 0);
    if (make_room(text, count + 1) < 0) {
        return -1;
    }
    if (number < 0) {
        text->data[text->size++] = '-';
    }
    memcpy(text->data + text->size, digits + sizeof digits - count, count);
    text->size += count;
    return 0;
}

/* 0: added, 1: nothing that is written here, -1: an exception; so in all that follows. */
static int add_value(Text *text, PyObject *value) {
    if (PyUnicode_CheckExact(value)) {
        if (!PyUnicode_IS_ASCII(value)) {
            return 1;
        }
        return add(text, PyUnicode_DATA(value), (size_t)PyUnicode_GET_LENGTH(value));
    }
    if (PyLong_CheckExact(value)) {
        int overflow;
        const long long number = PyLong_AsLongLongAndOverflow(value, &overflow);
        if (overflow) {
            return 1;
        }
        return number == -1 && PyErr_Occurred() ? -1 : add_number(text, number);
    }
    return 1;
}

/* A column: a list, or int64 numbers somewhere in memory. */
typedef struct {
    PyObject *list;
    Py_buffer numbers;
} Column;

static int open_column(Column *column, PyObject *values, Py_ssize_t count) {
    Py_ssize_t size;
    if (PyList_CheckExact(values)) {
        column->list = values;
        size = PyList_GET_SIZE(values);
    } else {
        if (PyObject_GetBuffer(values, &column->numbers, PyBUF_STRIDES | PyBUF_FORMAT) < 0) {
            return -1;
        }
        if (column->numbers.ndim != 1 || strcmp(column->numbers.format, "q") != 0) {
            PyErr_SetString(PyExc_ValueError, "a column is a list, or int64 numbers in one dimension");
            return -1;
        }
        size = column->numbers.shape[0];
    }
    if (size != count) {
        PyErr_SetString(PyExc_ValueError, "a column has another number of values than there are rows");
        return -1;
    }
    return 0;
}

static int add_cell(Text *text, const Column *column, Py_ssize_t row) {
    if (column->list != NULL) {
        return add_value(text, PyList_GET_ITEM(column->list, row));
    }
    int64_t number;
    memcpy(&number, (const char *)column->numbers.buf + row * column->numbers.strides[0], sizeof number);
    return add_number(text, number);
}

static int add_rows(Text *text, PyObject *pieces, const Column *columns, Py_ssize_t width, Py_ssize_t count) {
    for (Py_ssize_t row = 0; row < count; row++) {
        int outcome = add_value(text, PyTuple_GET_ITEM(pieces, 0));
        for (Py_ssize_t index = 0; outcome == 0 && index < width; index++) {
            outcome = add_cell(text, columns + index, row);
            if (outcome == 0) {
                outcome = add_value(text, PyTuple_GET_ITEM(pieces, index + 1));
            }
        }
        if (outcome != 0) {
            return outcome;
        }
    }
    return 0;
}

PyDoc_STRVAR(join_rows_doc,
"join_rows(pieces, columns, count)\n--\n\n"
"The text of `count` rows: pieces[0], columns[0][row], pieces[1], ... pieces[-1]. A column is a list, or a buffer of\n"
"int64. None where a piece or a value is neither an ASCII string nor an int of 64 bits.");

static PyObject *join_rows(PyObject *module, PyObject *args) {
    PyObject *pieces, *values;
    Py_ssize_t count;
    if (!PyArg_ParseTuple(args, "O!O!n", &PyTuple_Type, &pieces, &PyTuple_Type, &values, &count)) {
        return NULL;
    }
    const Py_ssize_t width = PyTuple_GET_SIZE(values);
    if (PyTuple_GET_SIZE(pieces) != width + 1) {
        PyErr_SetString(PyExc_ValueError, "there is one piece more than columns");
        return NULL;
    }
    Column *columns = PyMem_Calloc((size_t)width + 1, sizeof(Column));
    if (columns == NULL) {
        return PyErr_NoMemory();
    }
    Text text = {NULL, 0, 0};
    PyObject *joined = NULL;
    int outcome = 0;
    for (Py_ssize_t index = 0; outcome == 0 && index < width; index++) {
        outcome = open_column(columns + index, PyTuple_GET_ITEM(values, index), count);
    }
    if (outcome == 0) {
        outcome = add_rows(&text, pieces, columns, width, count);
    }
    if (outcome == 1) {
        joined = Py_NewRef(Py_None);
    } else if (outcome == 0) {
        joined = text_object(&text);
    }
    for (Py_ssize_t index = 0; index < width; index++) {
        if (columns[index].numbers.obj != NULL) {
            PyBuffer_Release(&columns[index].numbers);
        }
    }
    PyMem_Free(columns);
    PyMem_Free(text.data);
    return joined;
}

static PyMethodDef methods[] = {
    {"join_rows", join_rows, METH_VARARGS, join_rows_doc},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module_definition = {
    PyModuleDef_HEAD_INIT, "bkctl.commands.kit._rows", "Rows of text from columns, compiled.", 0, methods,
    NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__rows(void) {
    PyObject *module = PyModule_Create(&module_definition);
    if (module != NULL && PyModule_AddIntConstant(module, "API", API) < 0) {
        Py_CLEAR(module);
    }
    return module;
}
