/* The inner loops of request_runs.py and read_runs.py, compiled: the same results, several times as fast.
 *
 * Optional: without a compiler at installation, those modules' own loops do the work. tests/protocol/test_request_runs.py and
 * test_read_runs.py compare both with protobuf on arbitrary bytes. Nothing is read outside the given part of the buffer.
 */

#include "_wire.h"

/* Version of the functions' arguments and results; add_runs.py accepts only its own. Raise both together. */
#define API 3

enum {
    HEADER_V1 = 32, /* ledger, entry, LAC, length */
    HEADER_V2 = 41, /* flags, scope, ledger, entry, LAC, length */
    V2_FRONT = 24, /* of a v2 frame behind its length: header, master key */
    V2_HEAD = 2 << 24 | 1 << 16,
    V3_ANSWER_MAX = 80,
    V2_READ = 20, /* of a v2 read behind its length: header, ledger, entry */
    V2_READ_HEAD = 2 << 24 | 2 << 16,
    V3_READ_ANSWER_MAX = 128, /* of an answer to a read, beside its body */
    OPERATION_AT = 5, /* of a v3 request, behind its length */
    RUNS_MAX = 1024, /* of one call; a power of two */
    TRIES_MAX = 32, /* slots that are tried for a run */
};

static const int64_t ENTRY_ID_MAX = ((int64_t)1 << 40) - 1;

/* One add or read, as a frame says it. `key` and `body` point into the buffer; of a read they are NULL. */
typedef struct {
    uint64_t txn_id, scope, ledger;
    int64_t entry, lac;
    const unsigned char *key, *body;
    Py_ssize_t size;
    Py_ssize_t next; /* the number of the next one of its run, 0 for none */
} Request;

/* Return 1, and read the LAC, if the body is the add's entry in the format of its scope. */
static int fits(Request *add) {
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

static int read_v2(const unsigned char *at, Py_ssize_t size, Request *add) {
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
static int read_v3(const unsigned char *at, Py_ssize_t size, Request *add) {
    Reader in = {at, at + size, 0};
    add->txn_id = take_head(&in, "\x08\x03\x10\x02\x18", "\xaa\x06", 2);
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

static unsigned char *answer_v2(unsigned char *at, const Request *add) {
    at = write_u32(write_u32(write_u32(at, V2_ANSWER), V2_HEAD), 0);
    return write_u64(write_u64(at, add->ledger), (uint64_t)add->entry);
}

/* The form is that of v3_hot.py's add response. */
static unsigned char *answer_v3(unsigned char *frame, const Request *add) {
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

static PyObject *record_of(const Request *add) {
    PyObject *record = PyBytes_FromStringAndSize(NULL, LENGTH + add->size);
    if (record != NULL) {
        unsigned char *at = (unsigned char *)PyBytes_AS_STRING(record);
        memcpy(write_u32(at, (uint32_t)add->size), add->body, (size_t)add->size);
    }
    return record;
}

static int read_v2_read(const unsigned char *at, Py_ssize_t size, Request *read) {
    if (size != V2_READ || read_u32(at) != V2_READ_HEAD) {
        return 0;
    }
    read->txn_id = read->scope = 0;
    read->ledger = read_u64(at + 4);
    read->entry = (int64_t)read_u64(at + 12);
    return read->entry >= 0;
}

/* The form is that of v3_hot.py's read request. */
static int read_v3_read(const unsigned char *at, Py_ssize_t size, Request *read) {
    Reader in = {at, at + size, 0};
    read->txn_id = take_head(&in, "\x08\x03\x10\x01\x18", "\xa2\x06", 2);
    take(&in, 1, "\x08", 1);
    read->ledger = take_varint(&in);
    take(&in, 1, "\x10", 1);
    read->entry = (int64_t)take_varint(&in);
    read->scope = 0;
    if (in.at != in.end) {
        take(&in, 1, "\x78", 1);
        read->scope = take_varint(&in);
    }
    return !in.failed && in.at == in.end && read->entry >= 0;
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

static int is_of_run(const Request *one, const Request *other) {
    return one->ledger == other->ledger && one->scope == other->scope && !one->key == !other->key
        && (!one->key || memcmp(one->key, other->key, KEY) == 0);
}

/* Return the run of a request, a new one if need be; NULL where there is no place for one. */
static Run *run_of(Runs *all, const Request *request) {
    if (all->recent != NULL && is_of_run(&all->requests[all->recent->first], request)) {
        return all->recent;
    }
    uint64_t hash = (request->ledger + 3 * request->scope + !request->key) * UINT64_C(0x9E3779B97F4A7C15);
    for (int tries = 0; tries < TRIES_MAX; tries++) {
        uint16_t *slot = &all->slots[(hash >> 32) + (uint64_t)tries & (2 * RUNS_MAX - 1)];
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
        if (is_of_run(&all->requests[run->first], request)) {
            return run;
        }
    }
    return NULL;
}

/* Add a request to its run. Return 0 where there is no place for it, -1 with an exception. */
static int add_request(Runs *all, const Request *request) {
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
    all->requests[number] = *request;
    all->requests[number].next = 0;
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

static PyObject *ledger_of(const Request *request, PyObject *type) {
    PyObject *items[2] = {PyLong_FromUnsignedLongLong(request->scope), PyLong_FromUnsignedLongLong(request->ledger)};
    return tuple_of(type, 2, items);
}

/* Fill the lists of a run's fields; `others` NULL: of reads without transaction ids. */
static int list_requests(const Runs *all, const Run *run, PyObject *entries, PyObject *others) {
    Py_ssize_t number = run->first;
    for (Py_ssize_t index = 0; index < run->count; index++) {
        const Request *request = &all->requests[number];
        PyObject *entry = PyLong_FromLongLong(request->entry);
        if (entry == NULL) {
            return -1;
        }
        PyList_SET_ITEM(entries, index, entry);
        if (others != NULL) {
            PyObject *other = request->key ? record_of(request) : PyLong_FromUnsignedLongLong(request->txn_id);
            if (other == NULL) {
                return -1;
            }
            PyList_SET_ITEM(others, index, other);
        }
        number = request->next;
    }
    return 0;
}

/* Return a run of adds as an AddRun; `answers` has room for those to the longest run. */
static PyObject *add_run_of(
    const Runs *all, const Run *run, int is_v2, PyObject *ledger_type, PyObject *type, unsigned char *answers) {
    const Request *first = &all->requests[run->first];
    unsigned char *at = answers;
    int64_t highest = -1;
    Py_ssize_t size = 0;
    for (const Request *add = first;; add = &all->requests[add->next]) {
        at = (is_v2 ? answer_v2 : answer_v3)(at, add);
        highest = add->lac > highest ? add->lac : highest;
        size += LENGTH + add->size;
        if (add->next == 0) {
            break;
        }
    }
    PyObject *items[7] = {
        ledger_of(first, ledger_type), PyBytes_FromStringAndSize((const char *)first->key, KEY),
        PyList_New(run->count), PyList_New(run->count), PyLong_FromSsize_t(size), PyLong_FromLongLong(highest),
        PyBytes_FromStringAndSize((const char *)answers, at - answers),
    };
    PyObject *adds = tuple_of(type, 7, items);
    if (adds != NULL && list_requests(all, run, PyTuple_GET_ITEM(adds, 2), PyTuple_GET_ITEM(adds, 3)) < 0) {
        Py_CLEAR(adds);
    }
    return adds;
}

static PyObject *read_run_of(const Runs *all, const Run *run, int is_v2, PyObject *ledger_type, PyObject *type) {
    PyObject *items[3] = {
        ledger_of(&all->requests[run->first], ledger_type), PyList_New(run->count), PyList_New(is_v2 ? 0 : run->count),
    };
    PyObject *reads = tuple_of(type, 3, items);
    if (reads != NULL
        && list_requests(all, run, PyTuple_GET_ITEM(reads, 1), is_v2 ? NULL : PyTuple_GET_ITEM(reads, 2)) < 0) {
        Py_CLEAR(reads);
    }
    return reads;
}

static int is_tuple_type(PyObject *type) {
    return PyType_Check(type) && PyType_IsSubtype((PyTypeObject *)type, &PyTuple_Type);
}

static PyObject *take_runs(PyObject *args, int is_v2) {
    Py_buffer buffer;
    Py_ssize_t at, end, size_max, adds_max, count_max;
    PyObject *ledger_type, *add_type, *read_type;
    if (!PyArg_ParseTuple(
            args, "y*nnnnn(OOO)", &buffer, &at, &end, &size_max, &adds_max, &count_max, &ledger_type, &add_type,
            &read_type)) {
        return NULL;
    }
    PyObject *adds = NULL, *reads = NULL, *found = NULL;
    unsigned char *answers = NULL;
    Runs *all = NULL;
    const unsigned char *bytes = buffer.buf;
    if (at < 0 || end > buffer.len) {
        PyErr_SetString(PyExc_ValueError, "what is to be read is not in the buffer");
        goto done;
    }
    if (!is_tuple_type(ledger_type) || !is_tuple_type(add_type) || !is_tuple_type(read_type)) {
        PyErr_SetString(PyExc_TypeError, "the types are not subclasses of tuple");
        goto done;
    }
    while (end - at >= LENGTH) {
        const int64_t frame = (int32_t)read_u32(bytes + at);
        if (frame < 0 || frame > size_max || frame > end - at - LENGTH || count_max-- <= 0) {
            break;
        }
        const unsigned char *begin = bytes + at + LENGTH;
        Request request = {0};
        int is_add = frame > OPERATION_AT && begin[is_v2 ? 1 : OPERATION_AT] == (is_v2 ? 1 : 2);
        if (is_add ? adds_max <= 0 || !(is_v2 ? read_v2 : read_v3)(begin, (Py_ssize_t)frame, &request)
                   : !(is_v2 ? read_v2_read : read_v3_read)(begin, (Py_ssize_t)frame, &request)) {
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
        adds_max -= is_add;
        at += LENGTH + (Py_ssize_t)frame;
    }
    if (all == NULL) {
        found = Py_NewRef(Py_None);
        goto done;
    }
    adds = PyList_New(0);
    reads = PyList_New(0);
    answers = PyMem_Malloc((size_t)all->longest * V3_ANSWER_MAX);
    if (adds == NULL || reads == NULL || answers == NULL) {
        if (answers == NULL) {
            PyErr_NoMemory();
        }
        goto done;
    }
    for (Py_ssize_t number = 0; number < all->run_count; number++) {
        const Run *run = &all->runs[number];
        const int is_adds = all->requests[run->first].key != NULL;
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

static unsigned char *front_v2(unsigned char *at, const Request *read, Py_ssize_t size) {
    at = write_u32(write_u32(write_u32(at, (uint32_t)(V2_ANSWER + size)), V2_READ_HEAD), 0);
    return write_u64(write_u64(at, read->ledger), (uint64_t)read->entry);
}

/* The fields behind the body, and their size; `lac` NULL: without one. */
static unsigned char *write_tail(unsigned char *at, uint64_t scope, const uint64_t *lac) {
    if (lac != NULL) {
        *at++ = 0x28;
        at = write_varint(at, *lac);
    }
    if (scope) {
        *at++ = 0x78;
        at = write_varint(at, scope);
    }
    return at;
}

/* The form is that of v3_hot.py's read response. */
static unsigned char *front_v3(unsigned char *frame, const Request *read, Py_ssize_t size, size_t tail) {
    unsigned char *at = frame + LENGTH;
    *at++ = 0x0A;
    unsigned char *header = at++;
    memcpy(at, "\x08\x03\x10\x01\x18", 5);
    at = write_varint(at + 5, read->txn_id);
    *header = (unsigned char)(at - header - 1);
    memcpy(at, "\x10\x00\xa2\x06", 4);
    const size_t nested = 5 + varint_size(read->ledger) + varint_size((uint64_t)read->entry)
        + varint_size((uint64_t)size) + (size_t)size + tail;
    at = write_varint(at + 4, nested);
    const size_t frame_size = (size_t)(at - frame - LENGTH) + nested;
    write_u32(frame, (uint32_t)frame_size);
    memcpy(at, "\x08\x00\x10", 3);
    at = write_varint(at + 3, read->ledger);
    *at++ = 0x18;
    at = write_varint(at, (uint64_t)read->entry);
    *at++ = 0x22;
    return write_varint(at, (uint64_t)size);
}

/* Answers with `bodies` to reads of one ledger; `txns` NULL: of v2. */
static PyObject *answer_reads(
    uint64_t scope, uint64_t ledger, PyObject *entries, PyObject *txns, PyObject *bodies, const uint64_t *lac) {
    PyObject *answers = NULL, *body_list = NULL, *entry_list = NULL, *txn_list = NULL;
    Py_buffer *views = NULL;
    Py_ssize_t viewed = 0, count = 0, size = 0;
    unsigned char tail[32];
    const size_t tail_size = txns == NULL ? 0 : (size_t)(write_tail(tail, scope, lac) - tail);
    body_list = PySequence_Fast(bodies, "bodies");
    entry_list = PySequence_Fast(entries, "entry ids");
    txn_list = txns == NULL ? Py_NewRef(Py_None) : PySequence_Fast(txns, "transaction ids");
    if (body_list == NULL || entry_list == NULL || txn_list == NULL) {
        goto failed;
    }
    count = PySequence_Fast_GET_SIZE(body_list);
    if (PySequence_Fast_GET_SIZE(entry_list) != count || (txns != NULL && PySequence_Fast_GET_SIZE(txn_list) != count)) {
        PyErr_SetString(PyExc_ValueError, "as many bodies as reads are needed");
        goto failed;
    }
    views = PyMem_Calloc((size_t)count + 1, sizeof(Py_buffer));
    if (views == NULL) {
        PyErr_NoMemory();
        goto failed;
    }
    for (; viewed < count; viewed++) {
        if (PyObject_GetBuffer(PySequence_Fast_GET_ITEM(body_list, viewed), &views[viewed], PyBUF_SIMPLE) < 0) {
            goto failed;
        }
        size += V3_READ_ANSWER_MAX + views[viewed].len;
    }
    answers = PyBytes_FromStringAndSize(NULL, size);
    if (answers == NULL) {
        goto failed;
    }
    unsigned char *begin = (unsigned char *)PyBytes_AS_STRING(answers), *at = begin;
    for (Py_ssize_t index = 0; index < count; index++) {
        Request read = {0, scope, ledger, PyLong_AsLongLong(PySequence_Fast_GET_ITEM(entry_list, index))};
        if (txns != NULL) {
            read.txn_id = PyLong_AsUnsignedLongLong(PySequence_Fast_GET_ITEM(txn_list, index));
        }
        if (PyErr_Occurred()) {
            Py_CLEAR(answers);
            goto failed;
        }
        at = txns == NULL ? front_v2(at, &read, views[index].len) : front_v3(at, &read, views[index].len, tail_size);
        memcpy(at, views[index].buf, (size_t)views[index].len);
        memcpy(at + views[index].len, tail, tail_size);
        at += views[index].len + (Py_ssize_t)tail_size;
    }
    _PyBytes_Resize(&answers, at - begin);
failed:
    while (viewed > 0) {
        PyBuffer_Release(&views[--viewed]);
    }
    PyMem_Free(views);
    Py_XDECREF(body_list);
    Py_XDECREF(entry_list);
    Py_XDECREF(txn_list);
    return answers;
}

PyDoc_STRVAR(take_runs_v2_doc,
"take_runs_v2(buffer, at, end, size_max, adds_max, count_max, types)\n--\n\n"
"Where the v2 adds and reads that begin at `at` end, and their AddRuns and ReadRuns; None where none begins there.");

static PyObject *take_runs_v2(PyObject *module, PyObject *args) {
    return take_runs(args, 1);
}

PyDoc_STRVAR(take_runs_v3_doc,
"take_runs_v3(buffer, at, end, size_max, adds_max, count_max, types)\n--\n\n"
"take_runs_v2 for frames of protocol v3.");

static PyObject *take_runs_v3(PyObject *module, PyObject *args) {
    return take_runs(args, 0);
}

PyDoc_STRVAR(answers_v2_doc,
"answers_v2(ledger_id, entry_ids, bodies)\n--\n\n"
"The response frames of v2 with these entries.");

static PyObject *answers_v2(PyObject *module, PyObject *args) {
    unsigned long long ledger;
    PyObject *entries, *bodies;
    if (!PyArg_ParseTuple(args, "KOO", &ledger, &entries, &bodies)) {
        return NULL;
    }
    return answer_reads(0, ledger, entries, NULL, bodies, NULL);
}

PyDoc_STRVAR(answers_v3_doc,
"answers_v3(ledger, entry_ids, txn_ids, bodies, max_lac)\n--\n\n"
"The response frames of v3 with these entries; `max_lac` None: without one.");

static PyObject *answers_v3(PyObject *module, PyObject *args) {
    unsigned long long scope, ledger;
    PyObject *entries, *txns, *bodies, *max_lac;
    if (!PyArg_ParseTuple(args, "(KK)OOOO", &scope, &ledger, &entries, &txns, &bodies, &max_lac)) {
        return NULL;
    }
    uint64_t lac = 0;
    if (max_lac != Py_None) {
        lac = (uint64_t)PyLong_AsLongLong(max_lac);
        if (PyErr_Occurred()) {
            return NULL;
        }
    }
    return answer_reads(scope, ledger, entries, txns, bodies, max_lac == Py_None ? NULL : &lac);
}

static PyMethodDef methods[] = {
    {"take_runs_v2", take_runs_v2, METH_VARARGS, take_runs_v2_doc},
    {"take_runs_v3", take_runs_v3, METH_VARARGS, take_runs_v3_doc},
    {"answers_v2", answers_v2, METH_VARARGS, answers_v2_doc},
    {"answers_v3", answers_v3, METH_VARARGS, answers_v3_doc},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module_definition = {
    PyModuleDef_HEAD_INIT, "bkctl.protocol._add_runs", "The inner loops of request_runs.py and read_runs.py, compiled.", 0, methods,
    NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__add_runs(void) {
    PyObject *module = PyModule_Create(&module_definition);
    if (module != NULL && PyModule_AddIntConstant(module, "API", API) < 0) {
        Py_CLEAR(module);
    }
    return module;
}
