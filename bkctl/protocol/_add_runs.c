/* The inner loop of add_runs.py, compiled: the same results, several times as fast.
 *
 * Optional: without a compiler at installation, add_runs.py's own loops do the work. tests/protocol/test_add_runs.py
 * compares both with protobuf on arbitrary bytes. Nothing is read outside the given part of the buffer.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

/* Version of the functions' arguments and results; add_runs.py accepts only its own. Raise both together. */
#define API 1

enum {
    LENGTH = 4, /* of a frame, or of an entry in a record */
    KEY = 20,
    HEADER_V1 = 32, /* ledger, entry, LAC, length */
    HEADER_V2 = 41, /* flags, scope, ledger, entry, LAC, length */
    V2_FRONT = 24, /* of a v2 frame behind its length: header, master key */
    V2_HEAD = 2 << 24 | 1 << 16,
    V2_ANSWER = 24, /* of an answer behind its length: header, code, ledger, entry */
    V3_ANSWER_MAX = 80,
};

static const int64_t ENTRY_ID_MAX = ((int64_t)1 << 40) - 1;

static uint32_t read_u32(const unsigned char *at) {
    return (uint32_t)at[0] << 24 | (uint32_t)at[1] << 16 | (uint32_t)at[2] << 8 | at[3];
}

static uint64_t read_u64(const unsigned char *at) {
    return (uint64_t)read_u32(at) << 32 | read_u32(at + 4);
}

static unsigned char *write_u32(unsigned char *at, uint32_t value) {
    for (int index = 0; index < 4; index++) {
        at[index] = (unsigned char)(value >> (24 - 8 * index));
    }
    return at + 4;
}

static unsigned char *write_u64(unsigned char *at, uint64_t value) {
    return write_u32(write_u32(at, (uint32_t)(value >> 32)), (uint32_t)value);
}

static unsigned char *write_varint(unsigned char *at, uint64_t value) {
    for (; value > 127; value >>= 7) {
        *at++ = (unsigned char)(value | 128);
    }
    *at++ = (unsigned char)value;
    return at;
}

/* One add, as a frame says it; `body` points into the buffer. */
typedef struct {
    uint64_t txn_id, scope, ledger;
    int64_t entry, lac;
    const unsigned char *key, *body;
    Py_ssize_t size;
} Add;

/* The unread bytes are between `at` and `end`; `failed` is set at the first byte of another form. */
typedef struct {
    const unsigned char *at, *end;
    int failed;
} Reader;

static uint64_t take_varint(Reader *in) {
    uint64_t value = 0;
    for (int shift = 0; shift < 70; shift += 7) {
        if (in->at >= in->end || (shift == 63 && *in->at > 1)) {
            break;
        }
        const unsigned char byte = *in->at++;
        value |= (uint64_t)(byte & 127) << shift;
        if (byte < 128) {
            return value;
        }
    }
    in->failed = 1;
    return 0;
}

/* Read past `count` bytes, which must begin with the `size` bytes of `expected`; return their place. */
static const unsigned char *take(Reader *in, Py_ssize_t count, const char *expected, size_t size) {
    const unsigned char *begin = in->at;
    if (in->failed || in->end - begin < count || memcmp(begin, expected, size) != 0) {
        in->failed = 1;
        return begin;
    }
    in->at += count;
    return begin;
}

/* Return 1, and read the LAC, if the body is the add's entry in the format of its scope. */
static int fits(Add *add) {
    const unsigned char *ids = add->body;
    if (add->entry < 0 || add->entry > ENTRY_ID_MAX) {
        return 0;
    }
    if (add->scope) {
        if (add->size < HEADER_V2 || ids[0] < 0xA0 || ids[0] > 0xA4 || read_u64(ids + 1) != add->scope) {
            return 0;
        }
        ids += 9;
    } else if (add->size < HEADER_V1 || ids[0] >= 0x80) {
        return 0;
    }
    add->lac = (int64_t)read_u64(ids + 16);
    return read_u64(ids) == add->ledger && (int64_t)read_u64(ids + 8) == add->entry;
}

static int read_v2(const unsigned char *at, Py_ssize_t size, Add *add) {
    if (size < V2_FRONT + HEADER_V1 || read_u32(at) != V2_HEAD) {
        return 0;
    }
    add->key = at + LENGTH;
    add->body = at + V2_FRONT;
    add->size = size - V2_FRONT;
    add->txn_id = add->scope = 0;
    add->ledger = read_u64(add->body);
    add->entry = (int64_t)read_u64(add->body + 8);
    return fits(add);
}

/* The form is that of v3_hot.py's add request. */
static int read_v3(const unsigned char *at, Py_ssize_t size, Add *add) {
    Reader in = {at, at + size, 0};
    take(&in, 1, "\x0a", 1);
    const unsigned char *header_size = take(&in, 1, "", 0);
    take(&in, 5, "\x08\x03\x10\x02\x18", 5);
    if (in.failed) {
        return 0;
    }
    add->txn_id = take_varint(&in);
    if (in.at != header_size + 1 + *header_size) {
        return 0;
    }
    take(&in, 2, "\xaa\x06", 2);
    const uint64_t nested = take_varint(&in);
    if (in.failed || nested != (uint64_t)(in.end - in.at)) {
        return 0;
    }
    take(&in, 1, "\x08", 1);
    add->ledger = take_varint(&in);
    take(&in, 1, "\x10", 1);
    const uint64_t entry = take_varint(&in);
    add->key = take(&in, 2 + KEY, "\x1a\x14", 2) + 2;
    take(&in, 1, "\x22", 1);
    const uint64_t body_size = take_varint(&in);
    if (in.failed || entry > (uint64_t)ENTRY_ID_MAX || body_size > (uint64_t)(in.end - in.at)) {
        return 0;
    }
    add->entry = (int64_t)entry;
    add->size = (Py_ssize_t)body_size;
    add->body = take(&in, add->size, "", 0);
    add->scope = 0;
    if (in.at != in.end) {
        take(&in, 1, "\x78", 1);
        add->scope = take_varint(&in);
    }
    return !in.failed && in.at == in.end && fits(add);
}

static unsigned char *answer_v2(unsigned char *at, const Add *add) {
    at = write_u32(write_u32(write_u32(at, V2_ANSWER), V2_HEAD), 0);
    return write_u64(write_u64(at, add->ledger), (uint64_t)add->entry);
}

/* The form is that of v3_hot.py's add response. */
static unsigned char *answer_v3(unsigned char *frame, const Add *add) {
    unsigned char *at = frame + LENGTH;
    *at++ = 0x0A;
    unsigned char *header = at++;
    memcpy(at, "\x08\x03\x10\x02\x18", 5);
    at = write_varint(at + 5, add->txn_id);
    *header = (unsigned char)(at - header - 1);
    memcpy(at, "\x10\x00\xaa\x06", 4);
    at += 4;
    unsigned char *nested = at++;
    memcpy(at, "\x08\x00\x10", 3);
    at = write_varint(at + 3, add->ledger);
    *at++ = 0x18;
    at = write_varint(at, (uint64_t)add->entry);
    if (add->scope) {
        *at++ = 0x78;
        at = write_varint(at, add->scope);
    }
    *nested = (unsigned char)(at - nested - 1);
    write_u32(frame, (uint32_t)(at - frame - LENGTH));
    return at;
}

static int append(PyObject *list, PyObject *item) {
    const int failed = item == NULL || PyList_Append(list, item) < 0;
    Py_XDECREF(item);
    return failed ? -1 : 0;
}

static PyObject *record_of(const Add *add) {
    PyObject *record = PyBytes_FromStringAndSize(NULL, LENGTH + add->size);
    if (record != NULL) {
        unsigned char *at = (unsigned char *)PyBytes_AS_STRING(record);
        memcpy(write_u32(at, (uint32_t)add->size), add->body, (size_t)add->size);
    }
    return record;
}

static PyObject *take_run(PyObject *args, int is_v2) {
    Py_buffer buffer;
    Py_ssize_t at, end, size_max, count_max;
    if (!PyArg_ParseTuple(args, "y*nnnn", &buffer, &at, &end, &size_max, &count_max)) {
        return NULL;
    }
    if (at < 0 || end > buffer.len) {
        PyBuffer_Release(&buffer);
        PyErr_SetString(PyExc_ValueError, "what is to be read is not in the buffer");
        return NULL;
    }
    const unsigned char *bytes = buffer.buf;
    Add first = {0}, add;
    Py_ssize_t count = 0, size = 0, room = 0, answered = 0;
    int64_t highest = -1;
    PyObject *entries = NULL, *records = NULL, *found = NULL;
    unsigned char *answers = NULL;
    for (; count < count_max && end - at >= LENGTH; count++) {
        const int64_t frame = (int32_t)read_u32(bytes + at);
        if (frame < 0 || frame > size_max || frame > end - at - LENGTH) {
            break;
        }
        if (!(is_v2 ? read_v2 : read_v3)(bytes + at + LENGTH, (Py_ssize_t)frame, &add)) {
            break;
        }
        if (count == 0) {
            first = add;
            entries = PyList_New(0);
            records = PyList_New(0);
            if (entries == NULL || records == NULL) {
                goto failed;
            }
        } else if (add.ledger != first.ledger || add.scope != first.scope || memcmp(add.key, first.key, KEY) != 0) {
            break;
        }
        if (room - answered < V3_ANSWER_MAX) {
            room = room ? 2 * room : 4096;
            unsigned char *larger = PyMem_Realloc(answers, (size_t)room);
            if (larger == NULL) {
                PyErr_NoMemory();
                goto failed;
            }
            answers = larger;
        }
        if (append(entries, PyLong_FromLongLong(add.entry)) < 0 || append(records, record_of(&add)) < 0) {
            goto failed;
        }
        answered = (is_v2 ? answer_v2 : answer_v3)(answers + answered, &add) - answers;
        if (add.lac > highest) {
            highest = add.lac;
        }
        size += LENGTH + add.size;
        at += LENGTH + (Py_ssize_t)frame;
    }
    if (count == 0) {
        found = Py_NewRef(Py_None);
    } else {
        found = Py_BuildValue(
            "n(KK)y#OOnLy#", at, (unsigned long long)first.scope, (unsigned long long)first.ledger, first.key,
            (Py_ssize_t)KEY, entries, records, size, (long long)highest, answers, answered);
    }
failed:
    PyMem_Free(answers);
    Py_XDECREF(entries);
    Py_XDECREF(records);
    PyBuffer_Release(&buffer);
    return found;
}

PyDoc_STRVAR(take_v2_doc,
"take_v2(buffer, at, end, size_max, count_max)\n--\n\n"
"Where the run of v2 adds that begins at `at` ends, and the fields of its AddRun; None where none begins there.");

static PyObject *take_v2(PyObject *module, PyObject *args) {
    return take_run(args, 1);
}

PyDoc_STRVAR(take_v3_doc,
"take_v3(buffer, at, end, size_max, count_max)\n--\n\n"
"take_v2 for frames of protocol v3.");

static PyObject *take_v3(PyObject *module, PyObject *args) {
    return take_run(args, 0);
}

static PyMethodDef methods[] = {
    {"take_v2", take_v2, METH_VARARGS, take_v2_doc},
    {"take_v3", take_v3, METH_VARARGS, take_v3_doc},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module_definition = {
    PyModuleDef_HEAD_INIT, "bkctl.protocol._add_runs", "The inner loop of add_runs.py, compiled.", 0, methods,
    NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__add_runs(void) {
    PyObject *module = PyModule_Create(&module_definition);
    if (module != NULL && PyModule_AddIntConstant(module, "API", API) < 0) {
        Py_CLEAR(module);
    }
    return module;
}
