/* Runs of plain adds and reads, for both ends of a connection; see runs.py.
 *
 * Optional: without a compiler at installation, v2.py and v3.py encode and decode frame by frame, and the tests compare this
 * with them on arbitrary bytes. Nothing is read outside the given part of the buffer.
 */

#include "_wire.h"

/* Version of the functions' arguments and results; runs.py accepts only its own. Raise both together. */
#define API 1

enum {
    RUNS_MAX = 1024, /* of one call; a power of two */
    TRIES_MAX = 32, /* slots that are tried for a run */
    ADD_FIELDS = 7, /* of an AddRequest */
    READ_FIELDS = 8,
    PIECES_MAX = 8, /* of an add's body */
};

static const int64_t ENTRY_ID_MAX = ((int64_t)1 << 40) - 1;

static PyObject *ledger_of(const Message *message, PyObject *type) {
    PyObject *items[2] = {PyLong_FromUnsignedLongLong(message->scope), PyLong_FromUnsignedLongLong(message->ledger)};
    return tuple_of(type, 2, items);
}

/* --- a bookie's requests ------------------------------------------------------------------------------------------ */

/* A request, and the number of the next one of its run, 0 for none. */
typedef struct {
    Message message;
    Py_ssize_t next;
} Request;

/* Return 1, and read the LAC, if the body is the add's entry in the format of its scope. */
static int fits(Message *add) {
    const unsigned char *ids = add->body;
    if (add->entry > ENTRY_ID_MAX) {
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

static PyObject *record_of(const Message *add) {
    PyObject *record = PyBytes_FromStringAndSize(NULL, LENGTH + add->size);
    if (record != NULL) {
        unsigned char *at = (unsigned char *)PyBytes_AsString(record);
        memcpy(write_u32(at, (uint32_t)add->size), add->body, (size_t)add->size);
    }
    return record;
}

/* Requests of one ledger, and of adds with one master key; `first` and `last` are numbers of requests. */
typedef struct {
    Py_ssize_t first, last, count;
} Run;

/* The runs of one call; `slots` are numbers of runs plus 1 by the hash of their ledgers. */
typedef struct {
    Request *requests;
    Py_ssize_t count, room;
    Run runs[RUNS_MAX], *recent;
    Py_ssize_t run_count, longest;
    uint16_t slots[2 * RUNS_MAX];
} Runs;

static int is_of_run(const Message *one, const Message *other) {
    return one->ledger == other->ledger && one->scope == other->scope && !one->key == !other->key
        && (!one->key || memcmp(one->key, other->key, KEY) == 0);
}

/* Return the run of a request, a new one if need be; NULL where there is no place for one. */
static Run *run_of(Runs *all, const Message *request) {
    if (all->recent != NULL && is_of_run(&all->requests[all->recent->first].message, request)) {
        return all->recent;
    }
    uint64_t hash = (request->ledger + 3 * request->scope + !request->key) * UINT64_C(0x9E3779B97F4A7C15);
    for (int tries = 0; tries < TRIES_MAX; tries++) {
        uint16_t *slot = &all->slots[((hash >> 32) + (uint64_t)tries) & (2 * RUNS_MAX - 1)];
        if (*slot == 0) {
            if (all->run_count == RUNS_MAX) {
                return NULL;
            }
            Run *added = &all->runs[all->run_count++];
            *slot = (uint16_t)all->run_count;
            added->count = 0;
            return added;
        }
        Run *run = &all->runs[*slot - 1];
        if (is_of_run(&all->requests[run->first].message, request)) {
            return run;
        }
    }
    return NULL;
}

/* Add a request to its run. Return 0 where there is no place for it, -1 with an exception. */
static int add_request(Runs *all, const Message *request) {
    if (all->count == all->room) {
        const Py_ssize_t room = all->room ? 2 * all->room : 64;
        Request *larger = PyMem_Realloc(all->requests, (size_t)room * sizeof(Request));
        if (larger == NULL) {
            PyErr_NoMemory();
            return -1;
        }
        all->requests = larger;
        all->room = room;
    }
    Run *run = run_of(all, request);
    if (run == NULL) {
        return 0;
    }
    all->recent = run;
    const Py_ssize_t number = all->count++;
    all->requests[number] = (Request){*request, 0};
    if (run->count++ == 0) {
        run->first = number;
    } else {
        all->requests[run->last].next = number;
    }
    run->last = number;
    if (run->count > all->longest) {
        all->longest = run->count;
    }
    return 1;
}

/* Set the lists of a run's entry ids and, unless it is NULL, of its records or transaction ids. */
static int list_requests(const Runs *all, const Run *run, PyObject *entries, PyObject *others) {
    Py_ssize_t number = run->first;
    for (Py_ssize_t index = 0; index < run->count; index++, number = all->requests[number].next) {
        const Message *request = &all->requests[number].message;
        PyObject *entry = PyLong_FromLongLong(request->entry), *other = NULL;
        if (entry == NULL) {
            return -1;
        }
        PyList_SetItem(entries, index, entry);
        if (others != NULL) {
            other = request->key ? record_of(request) : PyLong_FromUnsignedLongLong(request->txn_id);
            if (other == NULL) {
                return -1;
            }
            PyList_SetItem(others, index, other);
        }
    }
    return 0;
}

/* Return a run of adds as an AddRun; `answers` has room for those to the longest run. */
static PyObject *add_run_of(
    const Runs *all, const Run *run, int is_v2, PyObject *ledger_type, PyObject *type, unsigned char *answers) {
    const Message *first = &all->requests[run->first].message;
    unsigned char *at = answers;
    int64_t highest = -1;
    Py_ssize_t size = 0, number = run->first;
    do {
        Message add = all->requests[number].message;
        highest = add.lac > highest ? add.lac : highest;
        size += LENGTH + add.size;
        add.size = 0;
        at = write_tail(is_v2, write_front(is_v2, at, &add, 1), &add);
    } while ((number = all->requests[number].next) != 0);
    PyObject *items[7] = {
        ledger_of(first, ledger_type), PyBytes_FromStringAndSize((const char *)first->key, KEY),
        PyList_New(run->count), PyList_New(run->count), PyLong_FromSsize_t(size), PyLong_FromLongLong(highest),
        PyBytes_FromStringAndSize((const char *)answers, at - answers),
    };
    PyObject *adds = tuple_of(type, 7, items);
    if (adds != NULL && list_requests(all, run, PyTuple_GetItem(adds, 2), PyTuple_GetItem(adds, 3)) < 0) {
        Py_CLEAR(adds);
    }
    return adds;
}

static PyObject *read_run_of(const Runs *all, const Run *run, int is_v2, PyObject *ledger_type, PyObject *type) {
    PyObject *items[3] = {
        ledger_of(&all->requests[run->first].message, ledger_type), PyList_New(run->count),
        PyList_New(is_v2 ? 0 : run->count),
    };
    PyObject *reads = tuple_of(type, 3, items);
    if (reads != NULL
        && list_requests(all, run, PyTuple_GetItem(reads, 1), is_v2 ? NULL : PyTuple_GetItem(reads, 2)) < 0) {
        Py_CLEAR(reads);
    }
    return reads;
}

static int is_tuple_type(PyObject *type) {
    return PyType_Check(type) && PyType_IsSubtype((PyTypeObject *)type, &PyTuple_Type);
}

PyDoc_STRVAR(take_requests_doc,
"take_requests(is_v2, buffer, at, end, size_max, adds_max, count_max, types)\n--\n\n"
"Where the adds and reads that begin at `at` end, and their AddRuns and ReadRuns; None where none begins there.\n"
"`types` are LedgerId, AddRun and ReadRun.");

static PyObject *take_requests(PyObject *module, PyObject *args) {
    int is_v2;
    Py_buffer buffer;
    Py_ssize_t at, end, size_max, adds_max, count_max;
    PyObject *ledger_type, *add_type, *read_type;
    if (!PyArg_ParseTuple(
            args, "py*nnnnn(OOO)", &is_v2, &buffer, &at, &end, &size_max, &adds_max, &count_max, &ledger_type,
            &add_type, &read_type)) {
        return NULL;
    }
    PyObject *adds = NULL, *reads = NULL, *found = NULL;
    unsigned char *answers = NULL;
    Runs *all = NULL;
    Message request;
    if (at < 0 || end > buffer.len) {
        PyErr_SetString(PyExc_ValueError, "what is to be read is not in the buffer");
        goto done;
    }
    if (!is_tuple_type(ledger_type) || !is_tuple_type(add_type) || !is_tuple_type(read_type)) {
        PyErr_SetString(PyExc_TypeError, "the types are not subclasses of tuple");
        goto done;
    }
    for (Py_ssize_t stop = at; count_max-- > 0 && read_frame(is_v2, buffer.buf, &stop, end, size_max, 0, &request);
         at = stop) {
        if (request.operation == ADD && (adds_max-- <= 0 || !fits(&request))) {
            break;
        }
        if (all == NULL) {
            all = PyMem_Malloc(sizeof(Runs));
            if (all == NULL) {
                PyErr_NoMemory();
                goto done;
            }
            all->requests = NULL;
            all->recent = NULL;
            all->count = all->room = all->run_count = all->longest = 0;
            memset(all->slots, 0, sizeof(all->slots));
        }
        const int added = add_request(all, &request);
        if (added < 0) {
            goto done;
        }
        if (added == 0) {
            break;
        }
    }
    if (all == NULL) {
        found = Py_NewRef(Py_None);
        goto done;
    }
    adds = PyList_New(0);
    reads = PyList_New(0);
    answers = PyMem_Malloc((size_t)all->longest * OVERHEAD_MAX);
    if (answers == NULL) {
        PyErr_NoMemory();
    }
    if (adds == NULL || reads == NULL || answers == NULL) {
        goto done;
    }
    for (Py_ssize_t number = 0; number < all->run_count; number++) {
        const Run *run = &all->runs[number];
        const int is_adds = all->requests[run->first].message.operation == ADD;
        PyObject *item = is_adds ? add_run_of(all, run, is_v2, ledger_type, add_type, answers)
                                 : read_run_of(all, run, is_v2, ledger_type, read_type);
        if (append(is_adds ? adds : reads, item) < 0) {
            goto done;
        }
    }
    found = Py_BuildValue("nOO", at, adds, reads);
done:
    if (all != NULL) {
        PyMem_Free(all->requests);
    }
    PyMem_Free(all);
    PyMem_Free(answers);
    Py_XDECREF(adds);
    Py_XDECREF(reads);
    PyBuffer_Release(&buffer);
    return found;
}

/* An answer to a read; its body is a buffer of the caller's. */
typedef struct {
    Message message;
    Py_buffer body;
} Answer;

PyDoc_STRVAR(answer_reads_doc,
"answer_reads(ledger, entry_ids, txn_ids, bodies, max_lac)\n--\n\n"
"The frames that answer reads of a ledger with `bodies`; of v2 where `txn_ids` is None. `max_lac` None: without one.");

static PyObject *answer_reads(PyObject *module, PyObject *args) {
    unsigned long long scope, ledger;
    PyObject *entries, *txns, *given, *max_lac;
    if (!PyArg_ParseTuple(args, "(KK)OOOO", &scope, &ledger, &entries, &txns, &given, &max_lac)) {
        return NULL;
    }
    const int is_v2 = txns == Py_None;
    const Message plain = {
        .operation = READ, .scope = scope, .ledger = ledger, .has_lac = max_lac != Py_None,
        .lac = max_lac == Py_None ? 0 : PyLong_AsLongLong(max_lac),
    };
    if (PyErr_Occurred()) {
        return NULL;
    }
    Answer *all = NULL;
    Py_ssize_t viewed = 0, count = 0, size = 0;
    PyObject *answers = NULL, *bodies = PySequence_Tuple(given);
    PyObject *entry_list = bodies == NULL ? NULL : PySequence_Tuple(entries);
    PyObject *txn_list = entry_list == NULL ? NULL : PySequence_Tuple(is_v2 ? entries : txns);
    if (txn_list == NULL) {
        goto done;
    }
    count = PyTuple_Size(bodies);
    if (PyTuple_Size(entry_list) != count || PyTuple_Size(txn_list) != count) {
        PyErr_SetString(PyExc_ValueError, "as many bodies as reads are needed");
        goto done;
    }
    all = PyMem_Malloc((size_t)(count + 1) * sizeof(Answer));
    if (all == NULL) {
        PyErr_NoMemory();
        goto done;
    }
    while (viewed < count) {
        Message *message = &all[viewed].message;
        *message = plain;
        message->entry = PyLong_AsLongLong(PyTuple_GetItem(entry_list, viewed));
        message->txn_id = is_v2 ? 0 : PyLong_AsUnsignedLongLong(PyTuple_GetItem(txn_list, viewed));
        if (PyErr_Occurred() ||
            PyObject_GetBuffer(PyTuple_GetItem(bodies, viewed), &all[viewed].body, PyBUF_SIMPLE) < 0) {
            goto done;
        }
        message->size = all[viewed++].body.len;
        size += overhead_of(is_v2, message, 1) + message->size;
    }
    answers = PyBytes_FromStringAndSize(NULL, size);
    if (answers == NULL) {
        goto done;
    }
    unsigned char *at = (unsigned char *)PyBytes_AsString(answers);
    for (const Answer *answer = all; answer < all + count; answer++) {
        at = write_front(is_v2, at, &answer->message, 1);
        memcpy(at, answer->body.buf, (size_t)answer->body.len);
        at = write_tail(is_v2, at + answer->body.len, &answer->message);
    }
done:
    while (viewed > 0) {
        PyBuffer_Release(&all[--viewed].body);
    }
    PyMem_Free(all);
    Py_XDECREF(bodies);
    Py_XDECREF(entry_list);
    Py_XDECREF(txn_list);
    return answers;
}

/* --- a client's requests and their answers ------------------------------------------------------------------------ */

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

/* A plain request, and the pieces of an add's body. */
typedef struct {
    Message message;
    int count;
    PyObject *pieces[PIECES_MAX];
} Plain;

/* Return 1 if `request` is plain: a ReadRequest or AddRequest without flags, with an entry in `bytes`. */
static int read_request(PyObject *request, int operation, Plain *body) {
    Message *plain = &body->message;
    if (!PyTuple_Check(request) || PyTuple_Size(request) != (operation == ADD ? ADD_FIELDS : READ_FIELDS)) {
        return 0;
    }
    PyObject *ledger = PyTuple_GetItem(request, 0);
    uint64_t entry;
    *plain = (Message){.operation = operation};
    body->count = 0;
    if (!PyTuple_Check(ledger) || PyTuple_Size(ledger) != 2 ||
        !read_u64_object(PyTuple_GetItem(ledger, 0), &plain->scope) ||
        !read_u64_object(PyTuple_GetItem(ledger, 1), &plain->ledger) ||
        !read_u64_object(PyTuple_GetItem(request, 1), &entry) || entry > INT64_MAX) {
        return 0;
    }
    plain->entry = (int64_t)entry;
    PyObject *rest[READ_FIELDS];
    for (Py_ssize_t field = 2; field < (operation == ADD ? ADD_FIELDS : READ_FIELDS); field++) {
        rest[field - 2] = PyTuple_GetItem(request, field);
    }
    if (operation == READ) {
        return rest[0] == Py_None && rest[1] == Py_False && rest[2] == Py_False && rest[3] == Py_None &&
               rest[4] == Py_None && rest[5] == Py_False;
    }
    PyObject *entire = rest[1];
    const int joined = PyBytes_Check(entire);
    if (!PyBytes_Check(rest[0]) || PyBytes_Size(rest[0]) != KEY || rest[2] != Py_False || rest[3] != Py_False ||
        rest[4] != Py_False || (!joined && (!PyTuple_Check(entire) || PyTuple_Size(entire) > PIECES_MAX))) {
        return 0;
    }
    plain->key = (const unsigned char *)PyBytes_AsString(rest[0]);
    body->count = joined ? 1 : (int)PyTuple_Size(entire);
    for (int index = 0; index < body->count; index++) {
        PyObject *piece = body->pieces[index] = joined ? entire : PyTuple_GetItem(entire, index);
        if (!PyBytes_Check(piece)) {
            return 0;
        }
        plain->size += PyBytes_Size(piece);
    }
    return 1;
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
    if (!PyArg_ParseTuple(args, "piKOn", &is_v2, &operation, &txn_id, &given, &size_max)) {
        return NULL;
    }
    PyObject *requests = PySequence_Tuple(given);
    if (requests == NULL) {
        return NULL;
    }
    const Py_ssize_t count = PyTuple_Size(requests);
    Plain *all = PyMem_Malloc((size_t)(count + 1) * sizeof(Plain));
    Py_ssize_t size = 0;
    if (all == NULL) {
        PyErr_NoMemory();
        goto done;
    }
    for (Py_ssize_t index = 0; index < count; index++) {
        Message *message = &all[index].message;
        if (!read_request(PyTuple_GetItem(requests, index), operation, &all[index]) || (is_v2 && message->scope) ||
            message->size > size_max - OVERHEAD_MAX) {
            found = Py_NewRef(Py_None);
            goto done;
        }
        message->txn_id = txn_id++;
        size += overhead_of(is_v2, message, 0) + message->size;
    }
    found = PyBytes_FromStringAndSize(NULL, size);
    if (found == NULL) {
        goto done;
    }
    unsigned char *at = (unsigned char *)PyBytes_AsString(found);
    for (const Plain *plain = all; plain < all + count; plain++) {
        at = write_front(is_v2, at, &plain->message, 0);
        for (int piece = 0; piece < plain->count; piece++) {
            const Py_ssize_t piece_size = PyBytes_Size(plain->pieces[piece]);
            at = (unsigned char *)memcpy(at, PyBytes_AsString(plain->pieces[piece]), (size_t)piece_size) + piece_size;
        }
        at = write_tail(is_v2, at, &plain->message);
    }
done:
    PyMem_Free(all);
    Py_DECREF(requests);
    return found;
}

/* Return the answer's AddResponse or ReadResponse. */
static PyObject *response_of(const Message *answer, PyObject *kinds, PyObject *ledger) {
    PyObject *items[6] = {
        Py_NewRef(PyTuple_GetItem(kinds, 3)), Py_NewRef(ledger), PyLong_FromLongLong(answer->entry), NULL, NULL, NULL,
    };
    if (answer->operation == ADD) {
        return tuple_of(PyTuple_GetItem(kinds, 0), 3, items);
    }
    items[3] = PyBytes_FromStringAndSize((const char *)answer->body, answer->size);
    items[4] = answer->has_lac ? PyLong_FromLongLong(answer->lac) : Py_NewRef(Py_None);
    items[5] = Py_NewRef(Py_None);
    return tuple_of(PyTuple_GetItem(kinds, 1), 6, items);
}

/* Return what the answer repeats of its request: v3's transaction id, or v2's operation, ledger and entry. */
static PyObject *key_of(const Message *answer, int is_v2) {
    if (!is_v2) {
        return PyLong_FromUnsignedLongLong(answer->txn_id);
    }
    return Py_BuildValue("iKL", 3 - answer->operation, (unsigned long long)answer->ledger, (long long)answer->entry);
}

PyDoc_STRVAR(take_answers_doc,
"take_answers(is_v2, buffer, at, end, size_max, kinds)\n--\n\n"
"Return the offset behind the answers to plain adds and reads that begin at byte `at`, their keys, and the responses;\n"
"None without one. `kinds` is AddResponse, ReadResponse, LedgerId and Status.EOK.");

static PyObject *take_answers(PyObject *module, PyObject *args) {
    Py_buffer buffer;
    Py_ssize_t at, end, size_max;
    int is_v2;
    PyObject *kinds;
    if (!PyArg_ParseTuple(args, "py*nnnO!", &is_v2, &buffer, &at, &end, &size_max, &PyTuple_Type, &kinds)) {
        return NULL;
    }
    PyObject *keys = NULL, *responses = NULL, *ledger = NULL, *found = NULL;
    if (at < 0 || end > buffer.len || PyTuple_Size(kinds) != 4) {
        PyErr_SetString(PyExc_ValueError, "not a part of the buffer, or not the kinds of responses");
        goto failed;
    }
    uint64_t scope_id = 0, ledger_id = 0;
    Message answer;
    while (read_frame(is_v2, buffer.buf, &at, end, size_max, 1, &answer)) {
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
            Py_XDECREF(ledger);
            ledger = ledger_of(&answer, PyTuple_GetItem(kinds, 2));
            if (ledger == NULL) {
                goto failed;
            }
        }
        if (append(keys, key_of(&answer, is_v2)) < 0 || append(responses, response_of(&answer, kinds, ledger)) < 0) {
            goto failed;
        }
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
    {"take_requests", take_requests, METH_VARARGS, take_requests_doc},
    {"answer_reads", answer_reads, METH_VARARGS, answer_reads_doc},
    {"encode", encode, METH_VARARGS, encode_doc},
    {"take_answers", take_answers, METH_VARARGS, take_answers_doc},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module_definition = {
    PyModuleDef_HEAD_INIT, "bkctl.protocol._runs", "Runs of plain adds and reads, in C.", 0, methods,
    NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__runs(void) {
    PyObject *module = PyModule_Create(&module_definition);
    if (module != NULL && PyModule_AddIntConstant(module, "API", API) < 0) {
        Py_CLEAR(module);
    }
    return module;
}
