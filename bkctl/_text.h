/* A growing text of ASCII characters, for the compiled loops that print: _ledger_json.c and _rows.c. */

#ifndef BKCTL_TEXT_H
#define BKCTL_TEXT_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

typedef struct {
    char *data;
    size_t size, room;
} Text;

static inline int make_room(Text *text, size_t more) {
    if (text->room - text->size >= more) {
        return 0;
    }
    const size_t room = (text->room + more) * 2;
    char *data = PyMem_Realloc(text->data, room);
    if (data == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    text->data = data;
    text->room = room;
    return 0;
}

static inline PyObject *text_object(const Text *text) {
    PyObject *object = PyUnicode_New((Py_ssize_t)text->size, 127);
    if (object != NULL && text->size != 0) {
        memcpy(PyUnicode_DATA(object), text->data, text->size);
    }
    return object;
}

#endif
