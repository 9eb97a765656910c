/* The inner loops of client_runs.py, compiled: plain adds and reads to frames, and their answers from frames.
 *
 * Optional: without a compiler at installation, a connection encodes and decodes frame by frame (v2.py, v3.py).
 * tests/protocol/test_client_runs.py compares both. Nothing is read outside the given part of the buffer.
 */

#include "_wire.h"

/* Version of the functions' arguments and results; client_runs.py accepts only its own. Raise both together. */
#define API 1

enum {
    ADD_FIELDS = 7,
    READ_FIELDS = 8,
    OVERHEAD_MAX = 128, /* of a frame without its entry */
    PIECES_MAX = 8, /* of an add's body */
};

enum { READ = 1, ADD = 2 }; /* operations of v3 */
enum { V2_ADD = 1, V2_READ = 2 };

/* --- requests ----------------------------------------------------------------------------------------------------- */

/* A plain add or read; an add's body is in pieces. */
typedef struct {
    uint64_t scope, ledger;
    int64_t entry;
    const char *key;
    Py_ssize_t size;
    int piece_count;
    PyObject *pieces[PIECES_MAX];
} Plain;

static int read_u64_object(PyObject *number, uint64_t *value) {
    if (!PyLong_Check(number)) {
        return 0;
    }
    *value = PyLong_AsUnsignedLongLong(number);
    if (*value == (uint64_t)-1 && PyErr_Occurred()) {
        PyErr_Clear();
        return 0;
    }
    return 1;
}

/* Return 1 if `request` is plain: a ReadRequest or AddRequest without flags, with an entry in `bytes`. */
static int read_request(PyObject *request, int operation, Plain *plain) {
    if (!PyTuple_Check(request) || PyTuple_GET_SIZE(request) != (operation == ADD ? ADD_FIELDS : READ_FIELDS)) {
        return 0;
    }
    PyObject *ledger = PyTuple_GET_ITEM(request, 0);
    uint64_t entry;
    if (!PyTuple_Check(ledger) || PyTuple_GET_SIZE(ledger) != 2 ||
        !read_u64_object(PyTuple_GET_ITEM(ledger, 0), &plain->scope) ||
        !read_u64_object(PyTuple_GET_ITEM(ledger, 1), &plain->ledger) ||
        !read_u64_object(PyTuple_GET_ITEM(request, 1), &entry) || entry > INT64_MAX) {
        return 0;
    }
    plain->entry = (int64_t)entry;
    plain->size = plain->piece_count = 0;
    PyObject **rest = &PyTuple_GET_ITEM(request, 2);
    if (operation == READ) {
        return rest[0] == Py_None && rest[1] == Py_False && rest[2] == Py_False && rest[3] == Py_None &&
               rest[4] == Py_None && rest[5] == Py_False;
    }
    if (!PyBytes_Check(rest[0]) || PyBytes_GET_SIZE(rest[0]) != KEY || rest[2] != Py_False || rest[3] != Py_False ||
        rest[4] != Py_False) {
        return 0;
    }
    plain->key = PyBytes_AS_STRING(rest[0]);
    PyObject *body = rest[1];
    const int joined = PyBytes_Check(body);
    if (!joined && (!PyTuple_Check(body) || PyTuple_GET_SIZE(body) > PIECES_MAX)) {
        return 0;
    }
    plain->piece_count = joined ? 1 : (int)PyTuple_GET_SIZE(body);
    for (int index = 0; index < plain->piece_count; index++) {
        PyObject *piece = plain->pieces[index] = joined ? body : PyTuple_GET_ITEM(body, index);
        if (!PyBytes_Check(piece)) {
            return 0;
        }
        plain->size += PyBytes_GET_SIZE(piece);
    }
    return 1;
}

static unsigned char *write_body(unsigned char *at, const Plain *plain) {
    for (int index = 0; index < plain->piece_count; index++) {
        const Py_ssize_t size = PyBytes_GET_SIZE(plain->pieces[index]);
        memcpy(at, PyBytes_AS_STRING(plain->pieces[index]), (size_t)size);
        at += size;
    }
    return at;
}

static unsigned char *write_v2(unsigned char *at, const Plain *plain, int operation) {
    if (operation == READ) {
        at = write_u32(write_u32(at, 20), 2 << 24 | V2_READ << 16);
        return write_u64(write_u64(at, plain->ledger), (uint64_t)plain->entry);
    }
    at = write_u32(write_u32(at, (uint32_t)(24 + plain->size)), 2 << 24 | V2_ADD << 16);
    memcpy(at, plain->key, KEY);
    return write_body(at + KEY, plain);
}

/* The form is that of v3_hot.py's requests. */
static unsigned char *write_v3(unsigned char *frame, const Plain *plain, int operation, uint64_t txn_id) {
    unsigned char *at = frame + LENGTH;
    *at++ = 0x0A;
    *at++ = (unsigned char)(5 + varint_size(txn_id));
    memcpy(at, "\x08\x03\x10\x00\x18", 5);
    at[3] = (unsigned char)operation;
    at = write_varint(at + 5, txn_id);
    *at++ = operation == ADD ? 0xAA : 0xA2;
    *at++ = 0x06;
    uint64_t nested = 2 + (uint64_t)(varint_size(plain->ledger) + varint_size((uint64_t)plain->entry));
    if (operation == ADD) {
        nested += 2 + KEY + 1 + (uint64_t)varint_size((uint64_t)plain->size) + (uint64_t)plain->size;
    }
    if (plain->scope) {
        nested += 1 + (uint64_t)varint_size(plain->scope);
    }
    at = write_varint(at, nested);
    *at++ = 0x08;
    at = write_varint(at, plain->ledger);
    *at++ = 0x10;
    at = write_varint(at, (uint64_t)plain->entry);
    if (operation == ADD) {
        *at++ = 0x1A;
        *at++ = KEY;
        memcpy(at, plain->key, KEY);
        at += KEY;
        *at++ = 0x22;
        at = write_body(write_varint(at, (uint64_t)plain->size), plain);
    }
    if (plain->scope) {
        *at++ = 0x78;
        at = write_varint(at, plain->scope);
    }
    write_u32(frame, (uint32_t)(at - frame - LENGTH));
    return at;
}

PyDoc_STRVAR(encode_doc,
"encode(is_v2, operation, first_txn_id, requests, size_max)\n--\n\n"
"Return the frames of plain requests (operation 1: reads, 2: adds), joined; None if one of them is not plain or does\n"
"not fit in a frame of size_max bytes.");

static PyObject *encode(PyObject *module, PyObject *args) {
    int is_v2, operation;
    unsigned long long txn_id;
    PyObject *given, *found = NULL;
    Py_ssize_t size_max;
    if (!PyArg_ParseTuple(args, "iiKOn", &is_v2, &operation, &txn_id, &given, &size_max)) {
        return NULL;
    }
    PyObject *requests = PySequence_Fast(given, "requests are a sequence");
    if (requests == NULL) {
        return NULL;
    }
    const Py_ssize_t count = PySequence_Fast_GET_SIZE(requests);
    Plain plain;
    Py_ssize_t room = 0;
    for (Py_ssize_t index = 0; index < count; index++) {
        if (!read_request(PySequence_Fast_GET_ITEM(requests, index), operation, &plain) || (is_v2 && plain.scope) ||
            plain.size > size_max - OVERHEAD_MAX) {
            Py_DECREF(requests);
            Py_RETURN_NONE;
        }
        room += OVERHEAD_MAX + plain.size;
    }
    found = PyBytes_FromStringAndSize(NULL, room);
    if (found != NULL) {
        unsigned char *begin = (unsigned char *)PyBytes_AS_STRING(found), *at = begin;
        for (Py_ssize_t index = 0; index < count; index++) {
            read_request(PySequence_Fast_GET_ITEM(requests, index), operation, &plain);
            at = is_v2 ? write_v2(at, &plain, operation) : write_v3(at, &plain, operation, txn_id++);
        }
        _PyBytes_Resize(&found, at - begin);
    }
    Py_DECREF(requests);
    return found;
}

/* --- answers ------------------------------------------------------------------------------------------------------ */

/* A successful add's or read's answer; `body` points into the buffer. */
typedef struct {
    uint64_t txn_id, scope, ledger;
    int64_t entry, lac;
    int operation, has_lac;
    const unsigned char *body;
    Py_ssize_t size;
} Answer;

static int peek(const Reader *in, unsigned char expected) {
    return !in->failed && in->at < in->end && *in->at == expected;
}

static int read_v2(const unsigned char *at, Py_ssize_t size, Answer *answer) {
    if (size < V2_ANSWER || read_u32(at + 4) != 0) {
        return 0;
    }
    const int opcode = at[1];
    if (opcode != V2_READ && (opcode != V2_ADD || size != V2_ANSWER)) {
        return 0;
    }
    answer->operation = opcode == V2_ADD ? ADD : READ;
    answer->ledger = read_u64(at + 8);
    answer->entry = (int64_t)read_u64(at + 16);
    answer->body = at + V2_ANSWER;
    answer->size = size - V2_ANSWER;
    answer->scope = answer->txn_id = 0;
    answer->has_lac = 0;
    return 1;
}

/* The form is that of v3_hot.py's responses. */
static int read_v3(const unsigned char *at, Py_ssize_t size, Answer *answer) {
    Reader in = {at, at + size, 0};
    if (size < 8) {
        return 0;
    }
    answer->operation = at[5];
    if (answer->operation == ADD) {
        answer->txn_id = take_head(&in, "\x08\x03\x10\x02\x18", "\x10\x00\xaa\x06", 4);
    } else {
        answer->txn_id = take_head(&in, "\x08\x03\x10\x01\x18", "\x10\x00\xa2\x06", 4);
    }
    take(&in, 3, "\x08\x00\x10", 3);
    answer->ledger = take_varint(&in);
    take(&in, 1, "\x18", 1);
    const uint64_t entry = take_varint(&in);
    answer->entry = (int64_t)entry;
    answer->scope = 0;
    answer->has_lac = 0;
    if (in.failed || entry > INT64_MAX) {
        return 0;
    }
    if (answer->operation == READ) {
        take(&in, 1, "\x22", 1);
        const uint64_t body_size = take_varint(&in);
        if (in.failed || body_size > (uint64_t)(in.end - in.at)) {
            return 0;
        }
        answer->body = in.at;
        answer->size = (Py_ssize_t)body_size;
        in.at += body_size;
        if (peek(&in, 0x28)) {
            in.at++;
            answer->lac = (int64_t)take_varint(&in);
            answer->has_lac = 1;
        }
    }
    if (in.at != in.end) {
        take(&in, 1, "\x78", 1);
        answer->scope = take_varint(&in);
    }
    return !in.failed && in.at == in.end;
}

/* Return the answer's AddResponse or ReadResponse. */
static PyObject *response_of(const Answer *answer, PyObject *kinds, PyObject *ledger) {
    PyObject *items[6] = {
        Py_NewRef(PyTuple_GET_ITEM(kinds, 3)), Py_NewRef(ledger), PyLong_FromLongLong(answer->entry), NULL, NULL, NULL,
    };
    if (answer->operation == ADD) {
        return tuple_of(PyTuple_GET_ITEM(kinds, 0), 3, items);
    }
    items[3] = PyBytes_FromStringAndSize((const char *)answer->body, answer->size);
    items[4] = answer->has_lac ? PyLong_FromLongLong(answer->lac) : Py_NewRef(Py_None);
    items[5] = Py_NewRef(Py_None);
    return tuple_of(PyTuple_GET_ITEM(kinds, 1), 6, items);
}

/* Return what the answer repeats of its request: v3's transaction id, or v2's operation, ledger and entry. */
static PyObject *key_of(const Answer *answer, int is_v2) {
    if (!is_v2) {
        return PyLong_FromUnsignedLongLong(answer->txn_id);
    }
    const int opcode = answer->operation == ADD ? V2_ADD : V2_READ;
    return Py_BuildValue("iKL", opcode, (unsigned long long)answer->ledger, (long long)answer->entry);
}

PyDoc_STRVAR(take_doc,
"take(is_v2, buffer, at, end, size_max, kinds)\n--\n\n"
"Return the offset behind the answers to plain adds and reads that begin at byte `at`, their keys, and the responses;\n"
"None without one. `kinds` is AddResponse, ReadResponse, LedgerId and Status.EOK.");

static PyObject *take_answers(PyObject *module, PyObject *args) {
    Py_buffer buffer;
    Py_ssize_t at, end, size_max;
    int is_v2;
    PyObject *kinds;
    if (!PyArg_ParseTuple(args, "iy*nnnO!", &is_v2, &buffer, &at, &end, &size_max, &PyTuple_Type, &kinds)) {
        return NULL;
    }
    PyObject *keys = NULL, *responses = NULL, *ledger = NULL, *found = NULL;
    if (at < 0 || end > buffer.len || PyTuple_GET_SIZE(kinds) != 4) {
        PyErr_SetString(PyExc_ValueError, "not a part of the buffer, or not the kinds of responses");
        goto failed;
    }
    const unsigned char *bytes = buffer.buf;
    uint64_t scope_id = 0, ledger_id = 0;
    Answer answer;
    while (end - at >= LENGTH) {
        const int64_t frame = (int32_t)read_u32(bytes + at);
        if (frame < 0 || frame > size_max || frame > end - at - LENGTH) {
            break;
        }
        if (!(is_v2 ? read_v2 : read_v3)(bytes + at + LENGTH, (Py_ssize_t)frame, &answer)) {
            break;
        }
        if (keys == NULL) {
            keys = PyList_New(0);
            responses = PyList_New(0);
            if (keys == NULL || responses == NULL) {
                goto failed;
            }
        }
        if (ledger == NULL || answer.scope != scope_id || answer.ledger != ledger_id) {
            scope_id = answer.scope;
            ledger_id = answer.ledger;
            PyObject *items[2] = {PyLong_FromUnsignedLongLong(scope_id), PyLong_FromUnsignedLongLong(ledger_id)};
            Py_XSETREF(ledger, tuple_of(PyTuple_GET_ITEM(kinds, 2), 2, items));
            if (ledger == NULL) {
                goto failed;
            }
        }
        if (append(keys, key_of(&answer, is_v2)) < 0 || append(responses, response_of(&answer, kinds, ledger)) < 0) {
            goto failed;
        }
        at += LENGTH + (Py_ssize_t)frame;
    }
    found = keys == NULL ? Py_NewRef(Py_None) : Py_BuildValue("nOO", at, keys, responses);
failed:
    Py_XDECREF(keys);
    Py_XDECREF(responses);
    Py_XDECREF(ledger);
    PyBuffer_Release(&buffer);
    return found;
}

static PyMethodDef methods[] = {
    {"encode", encode, METH_VARARGS, encode_doc},
    {"take", take_answers, METH_VARARGS, take_doc},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module_definition = {
    PyModuleDef_HEAD_INIT, "bkctl.protocol._client_runs", "The inner loops of client_runs.py, compiled.", 0, methods,
    NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__client_runs(void) {
    PyObject *module = PyModule_Create(&module_definition);
    if (module != NULL && PyModule_AddIntConstant(module, "API", API) < 0) {
        Py_CLEAR(module);
    }
    return module;
}
