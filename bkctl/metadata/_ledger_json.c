/* Lines of JSON for ledgers, compiled: the text of ledger_object() straight from the metadata as a store keeps it.
 *
 * Optional: without a compiler at installation, ledger_json.py parses and prints each ledger. The same happens for
 * metadata in another form than the usual one, so that every error is raised in one place.
 * tests/metadata/test_ledger_json.py holds that both print the same. Nothing is read outside a value.
 */

#include "../_text.h"

/* Version of the function's arguments and result; ledger_json.py accepts only its own. Raise both together. */
#define API 1

static const char HEADER[] = "BookieMetadataFormatVersion\t3\n";

enum {
    VALUE_SIZE_MAX = 1 << 16, /* larger values are left to Python */
    CUSTOM_SIZE_MAX = 4096, /* larger custom metadata, too: custom_texts() keeps what it is called with */
    LINE_FIXED_MAX = 1024, /* names, numbers and times of a line */
    TEXT_GROWTH_MAX = 8, /* characters of the ensembles' JSON for each byte of the metadata */
};

/* Fields of LedgerMetadataFormat that every line needs; ctime, custom metadata and the token may be absent. */
enum {
    QUORUM = 1, ENSEMBLE = 2, LENGTH = 3, LAST_ENTRY = 4, STATE = 5, SEGMENT = 6, DIGEST = 7, PASSWORD = 8, ACK = 9,
    CTIME = 10, CUSTOM = 11, TOKEN = 12,
};
static const unsigned NEEDED = 1 << QUORUM | 1 << ENSEMBLE | 1 << LENGTH | 1 << LAST_ENTRY | 1 << STATE |
                               1 << SEGMENT | 1 << DIGEST | 1 << PASSWORD | 1 << ACK;

enum { VARINT = 0, BYTES = 2 }; /* wire types */
enum { SIZE_VARINT_MAX = 5 }; /* bytes of the varint of a size: protobuf refuses more */

static const char *const STATES[] = {NULL, "OPEN", "IN_RECOVERY", "CLOSED"};
static const char *const DIGEST_TYPES[] = {NULL, "CRC32", "HMAC", "CRC32C", "DUMMY"};
enum { CLOSED = 3, DIGEST_TYPE_MAX = 4 };

typedef struct {
    const unsigned char *at, *end;
} Span;

typedef struct {
    uint64_t numbers[TOKEN + 1]; /* by field */
    unsigned seen;
    Span segments, custom; /* their fields, which stand together */
} Metadata;

/* --- reading: each function returns 0 for anything unusual -------------------------------------------------------- */

static int read_varint(Span *from, uint64_t *value) {
    *value = 0;
    for (int shift = 0; shift < 64 && from->at < from->end; shift += 7) {
        const unsigned char byte = *from->at++;
        *value |= (uint64_t)(byte & 0x7F) << shift;
        if (byte < 0x80) {
            return shift < 63 || byte < 2;
        }
    }
    return 0;
}

static int read_bytes(Span *from, Span *found) {
    const unsigned char *begin = from->at;
    uint64_t size;
    if (!read_varint(from, &size) || from->at - begin > SIZE_VARINT_MAX || size > (uint64_t)(from->end - from->at)) {
        return 0;
    }
    found->at = from->at;
    found->end = from->at += size;
    return 1;
}

/* Extend `region` by a field of `begin` to `end`; fields of one kind must stand together. */
static int extend(Span *region, const unsigned char *begin, const unsigned char *end) {
    if (region->at == NULL) {
        region->at = begin;
    } else if (region->end != begin) {
        return 0;
    }
    region->end = end;
    return 1;
}

static int read_fields(Span message, Metadata *metadata) {
    while (message.at < message.end) {
        const unsigned char *begin = message.at;
        const int field = *begin >> 3, type = *begin & 7;
        const int is_nested = field == SEGMENT || field == PASSWORD || field == CUSTOM;
        Span nested;
        message.at++;
        if (field < QUORUM || field > TOKEN || type != (is_nested ? BYTES : VARINT)) {
            return 0;
        }
        if (!(is_nested ? read_bytes(&message, &nested) : read_varint(&message, &metadata->numbers[field]))) {
            return 0;
        }
        if ((field == SEGMENT && !extend(&metadata->segments, begin, message.at)) ||
            (field == CUSTOM && !extend(&metadata->custom, begin, message.at))) {
            return 0;
        }
        metadata->seen |= 1u << field;
    }
    return 1;
}

static int is_valid(const Metadata *metadata) {
    const uint64_t *numbers = metadata->numbers;
    return (metadata->seen & NEEDED) == NEEDED && numbers[ENSEMBLE] >= 1 && numbers[ENSEMBLE] <= INT32_MAX &&
           numbers[ENSEMBLE] >= numbers[QUORUM] && numbers[QUORUM] >= numbers[ACK] && numbers[STATE] >= 1 &&
           numbers[STATE] <= CLOSED && numbers[DIGEST] >= 1 && numbers[DIGEST] <= DIGEST_TYPE_MAX;
}

static int is_plain_bookie_id(Span id) {
    if (id.at == id.end || (id.end - id.at == 8 && PyOS_strnicmp((const char *)id.at, "readonly", 8) == 0)) {
        return 0;
    }
    for (const unsigned char *at = id.at; at < id.end; at++) {
        const unsigned char c = *at, lower = c | 0x20;
        if (!((c >= '0' && c <= ':') || (lower >= 'a' && lower <= 'z') || c == '.' || c == '-' || c == '_')) {
            return 0;
        }
    }
    return 1;
}

/* --- writing: into room that the caller made ---------------------------------------------------------------------- */

static char *put(char *to, const char *text, size_t size) {
    memcpy(to, text, size);
    return to + size;
}

#define PUT(to, literal) put(to, literal, sizeof(literal) - 1)

static char *put_u64(char *to, uint64_t number) {
    char digits[20];
    size_t count = 0;
    do {
        digits[sizeof digits - ++count] = (char)('0' + number % 10);
        number /= 10;
    } while (number != 0);
    return put(to, digits + sizeof digits - count, count);
}

static char *put_i64(char *to, int64_t number) {
    if (number < 0) {
        *to++ = '-';
        return put_u64(to, -(uint64_t)number); /* right for the lowest number, too */
    }
    return put_u64(to, (uint64_t)number);
}

static char *put_hex(char *to, uint64_t number) {
    for (int shift = 60; shift >= 0; shift -= 4) {
        *to++ = "0123456789abcdef"[number >> shift & 15];
    }
    return to;
}

static char *put_digits(char *to, unsigned number, int width) {
    for (int at = width - 1; at >= 0; at--) {
        to[at] = (char)('0' + number % 10);
        number /= 10;
    }
    return to + width;
}

enum { DAY_MS = 86400000 };
static const int64_t YEAR_10000_MS = 253402300800000;

/* A time from 1970 to 9999. Source of the calendar: Howard Hinnant, "chrono-Compatible Low-Level Date Algorithms". */
static char *put_time(char *to, int64_t time_ms) {
    const unsigned rest_ms = (unsigned)(time_ms % DAY_MS);
    const unsigned days = (unsigned)(time_ms / DAY_MS) + 719468; /* from the first of March of year 0 on */
    const unsigned era = days / 146097, day_of_era = days % 146097;
    const unsigned year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36524 - day_of_era / 146096) / 365;
    const unsigned day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    const unsigned shifted_month = (5 * day_of_year + 2) / 153; /* 0: March */
    const unsigned month = shifted_month < 10 ? shifted_month + 3 : shifted_month - 9;
    *to++ = '"';
    to = put_digits(to, era * 400 + year_of_era + (month <= 2), 4);
    *to++ = '-';
    to = put_digits(to, month, 2);
    *to++ = '-';
    to = put_digits(to, day_of_year - (153 * shifted_month + 2) / 5 + 1, 2);
    *to++ = 'T';
    to = put_digits(to, rest_ms / 3600000, 2);
    *to++ = ':';
    to = put_digits(to, rest_ms / 60000 % 60, 2);
    *to++ = ':';
    to = put_digits(to, rest_ms / 1000 % 60, 2);
    *to++ = '.';
    to = put_digits(to, rest_ms % 1000, 3);
    return PUT(to, "Z\"");
}

/* A segment: `"0":["bookie","bookie"]`; NULL for anything unusual. `first_entry_id` is the one of the segment before. */
static char *put_segment(char *to, Span segment, uint64_t ensemble_size, int64_t *first_entry_id, int is_first) {
    uint64_t count = 0, entry = 0, number;
    int has_entry = 0;
    Span member = {NULL, NULL};
    for (Span from = segment; from.at < from.end;) {
        const unsigned char tag = *from.at++;
        if (tag == (1 << 3 | BYTES)) {
            if (!read_bytes(&from, &member) || !is_plain_bookie_id(member)) {
                return NULL;
            }
            count++;
        } else if (tag == (2 << 3 | VARINT) && read_varint(&from, &number)) {
            entry = number;
            has_entry = 1;
        } else {
            return NULL;
        }
    }
    if (!has_entry || count != ensemble_size || (!is_first && (int64_t)entry <= *first_entry_id)) {
        return NULL;
    }
    *first_entry_id = (int64_t)entry;
    *to++ = '"';
    to = PUT(put_i64(to, (int64_t)entry), "\":[");
    for (Span from = segment; from.at < from.end;) {
        if (*from.at++ != (1 << 3 | BYTES)) {
            read_varint(&from, &number);
            continue;
        }
        read_bytes(&from, &member);
        *to++ = '"';
        to = PUT(put(to, (const char *)member.at, (size_t)(member.end - member.at)), "\",");
    }
    to[-1] = ']'; /* in place of the last comma: an ensemble has a bookie */
    return to;
}

static char *put_ensembles(char *to, const Metadata *metadata) {
    int64_t first_entry_id = 0;
    int is_first = 1;
    Span segment = {NULL, NULL};
    *to++ = '{';
    for (Span from = metadata->segments; from.at < from.end; is_first = 0) {
        from.at++; /* the tag */
        read_bytes(&from, &segment);
        to = put_segment(to, segment, metadata->numbers[ENSEMBLE], &first_entry_id, is_first);
        if (to == NULL) {
            return NULL;
        }
        *to++ = ',';
    }
    to[-1] = '}';
    return to;
}

static char *put_name(char *to, const char *name) {
    return put(to, name, strlen(name));
}

static char *put_line(char *to, const uint64_t id[2], const Metadata *metadata, int64_t ctime_ms, PyObject *custom,
                      PyObject *pulsar) {
    const uint64_t *numbers = metadata->numbers;
    const int is_closed = numbers[STATE] == CLOSED;
    to = PUT(to, "{\"ledgerScopeId\":\"");
    to = PUT(put_u64(to, id[0]), "\",\"ledgerId\":\"");
    to = PUT(put_u64(to, id[1]), "\",\"ledgerQualifiedName\":\"");
    to = PUT(put_hex(put_hex(to, id[0]), id[1]), "\",\"metadataFormatVersion\":3,\"state\":\"");
    to = PUT(put_name(to, STATES[numbers[STATE]]), "\",\"ensembleSize\":");
    to = PUT(put_u64(to, numbers[ENSEMBLE]), ",\"writeQuorumSize\":");
    to = PUT(put_u64(to, numbers[QUORUM]), ",\"ackQuorumSize\":");
    to = PUT(put_u64(to, numbers[ACK]), ",\"digestType\":\"");
    to = PUT(put_name(to, DIGEST_TYPES[numbers[DIGEST]]), "\",\"length\":");
    to = PUT(put_i64(to, is_closed ? (int64_t)numbers[LENGTH] : 0), ",\"lastEntryId\":");
    to = PUT(put_i64(to, is_closed ? (int64_t)numbers[LAST_ENTRY] : -1), ",\"ctime\":");
    to = ctime_ms < 0 ? PUT(to, "null") : put_time(to, ctime_ms);
    to = PUT(to, ",\"customMetadata\":");
    to = put(to, PyUnicode_DATA(custom), (size_t)PyUnicode_GET_LENGTH(custom));
    to = put_ensembles(PUT(to, ",\"ensembles\":"), metadata);
    if (to == NULL) {
        return NULL;
    }
    to = put(to, PyUnicode_DATA(pulsar), (size_t)PyUnicode_GET_LENGTH(pulsar));
    return PUT(to, "}\n");
}

/* --- ledgers ------------------------------------------------------------------------------------------------------ */

static int read_u64_object(PyObject *number, uint64_t *value) {
    *value = PyLong_Check(number) ? PyLong_AsUnsignedLongLong(number) : (uint64_t)-1;
    if (*value == (uint64_t)-1 && PyErr_Occurred()) {
        PyErr_Clear();
        return 0;
    }
    return PyLong_Check(number);
}

/* The creation time of the ledger, -1 for none; return 0 for one that is not from 1970 to 9999. */
static int read_ctime(const Metadata *metadata, PyObject *stored, int64_t *ctime_ms) {
    uint64_t number = metadata->numbers[CTIME];
    if (!(metadata->seen & 1 << CTIME)) {
        *ctime_ms = -1;
        if (stored == Py_None) {
            return 1;
        }
        if (!read_u64_object(stored, &number)) {
            return 0;
        }
    }
    *ctime_ms = (int64_t)number;
    return number < (uint64_t)YEAR_10000_MS;
}

static int is_pair_of_texts(PyObject *found) {
    if (!PyTuple_Check(found) || PyTuple_GET_SIZE(found) != 2) {
        return 0;
    }
    for (int index = 0; index < 2; index++) {
        PyObject *text = PyTuple_GET_ITEM(found, index);
        if (!PyUnicode_Check(text) || !PyUnicode_IS_ASCII(text)) {
            return 0;
        }
    }
    return 1;
}

/* 1: the line of `found` was added, 0: it is unusual, -1: an exception. */
static int add_line(Text *text, PyObject *found, PyObject *custom_texts) {
    uint64_t id[2];
    if (!PyTuple_Check(found) || PyTuple_GET_SIZE(found) != 2) {
        return 0;
    }
    PyObject *ledger = PyTuple_GET_ITEM(found, 0), *versioned = PyTuple_GET_ITEM(found, 1);
    if (!PyTuple_Check(ledger) || PyTuple_GET_SIZE(ledger) != 2 || !PyTuple_Check(versioned) ||
        PyTuple_GET_SIZE(versioned) != 3 || !PyBytes_Check(PyTuple_GET_ITEM(versioned, 0)) ||
        !read_u64_object(PyTuple_GET_ITEM(ledger, 0), &id[0]) ||
        !read_u64_object(PyTuple_GET_ITEM(ledger, 1), &id[1])) {
        return 0;
    }
    PyObject *value = PyTuple_GET_ITEM(versioned, 0);
    const Py_ssize_t size = PyBytes_GET_SIZE(value), header_size = sizeof HEADER - 1;
    const unsigned char *data = (const unsigned char *)PyBytes_AS_STRING(value);
    if (size < header_size || size > VALUE_SIZE_MAX || memcmp(data, HEADER, (size_t)header_size) != 0) {
        return 0;
    }
    Span body = {data + header_size, data + size}, message;
    Metadata metadata = {0};
    int64_t ctime_ms;
    if (!read_bytes(&body, &message) || body.at != body.end || !read_fields(message, &metadata) ||
        !is_valid(&metadata) || metadata.custom.end - metadata.custom.at > CUSTOM_SIZE_MAX ||
        !read_ctime(&metadata, PyTuple_GET_ITEM(versioned, 2), &ctime_ms)) {
        return 0;
    }
    PyObject *region = PyBytes_FromStringAndSize((const char *)metadata.custom.at,
                                                 metadata.custom.end - metadata.custom.at);
    if (region == NULL) {
        return -1;
    }
    PyObject *texts = PyObject_CallOneArg(custom_texts, region);
    Py_DECREF(region);
    if (texts == NULL) {
        return -1;
    }
    int outcome = 0;
    if (is_pair_of_texts(texts)) {
        PyObject *custom = PyTuple_GET_ITEM(texts, 0), *pulsar = PyTuple_GET_ITEM(texts, 1);
        const size_t room = LINE_FIXED_MAX + (size_t)size * TEXT_GROWTH_MAX +
                            (size_t)(PyUnicode_GET_LENGTH(custom) + PyUnicode_GET_LENGTH(pulsar));
        outcome = make_room(text, room);
        if (outcome == 0) {
            const char *end = put_line(text->data + text->size, id, &metadata, ctime_ms, custom, pulsar);
            if (end != NULL) {
                text->size = (size_t)(end - text->data);
                outcome = 1;
            }
        }
    }
    Py_DECREF(texts);
    return outcome;
}

PyDoc_STRVAR(lines_doc,
"lines(found, begin, custom_texts)\n--\n\n"
"The lines of the ledgers in the list `found` from index `begin` on, up to the first one whose metadata is unusual, and\n"
"the index of that one. Items are (ledger, (value, version, ctime_ms)). `custom_texts` is called with the fields of the\n"
"custom metadata, and returns the JSON of customMetadata, and `,\"pulsar\":…` or an empty text; None: unusual.");

static PyObject *lines(PyObject *module, PyObject *args) {
    PyObject *found, *custom_texts;
    Py_ssize_t at;
    if (!PyArg_ParseTuple(args, "O!nO", &PyList_Type, &found, &at, &custom_texts)) {
        return NULL;
    }
    Text text = {NULL, 0, 0};
    int outcome = 1;
    /* The size is read again each time: custom_texts() may change the list. */
    while (at >= 0 && at < PyList_GET_SIZE(found)) {
        PyObject *item = Py_NewRef(PyList_GET_ITEM(found, at));
        outcome = add_line(&text, item, custom_texts);
        Py_DECREF(item);
        if (outcome != 1) {
            break;
        }
        at++;
    }
    PyObject *result = NULL;
    if (outcome >= 0) {
        PyObject *joined = text_object(&text);
        result = joined == NULL ? NULL : Py_BuildValue("Nn", joined, at);
    }
    PyMem_Free(text.data);
    return result;
}

static PyMethodDef methods[] = {
    {"lines", lines, METH_VARARGS, lines_doc},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module_definition = {
    PyModuleDef_HEAD_INIT, "bkctl.metadata._ledger_json", "Lines of JSON for ledgers, compiled.", 0, methods,
    NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__ledger_json(void) {
    PyObject *module = PyModule_Create(&module_definition);
    if (module != NULL && PyModule_AddIntConstant(module, "API", API) < 0) {
        Py_CLEAR(module);
    }
    return module;
}
