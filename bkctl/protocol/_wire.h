/* The frames of plain adds and reads, and of the answers to them, in v2 and v3, for the loops of _runs.c. */

#ifndef BKCTL_WIRE_H
#define BKCTL_WIRE_H

#define Py_LIMITED_API 0x030B0000 /* one wheel for every CPython from 3.11 on */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

enum {
    LENGTH = 4, /* of a frame, or of an entry in a record */
    KEY = 20,
    HEADER_V1 = 32, /* of an entry: ledger, entry, LAC, length */
    HEADER_V2 = 41, /* flags, scope, ledger, entry, LAC, length */
    V2_FRONT = 24, /* of an add behind its length: header, master key */
    V2_READ = 20, /* of a read: header, ledger, entry */
    V2_ANSWER = 24, /* of an answer: header, code, ledger, entry */
    OPERATION_AT = 5, /* of a v3 message, behind its length */
    OVERHEAD_MAX = 128, /* of a frame without its body */
};

enum { READ = 1, ADD = 2 }; /* operations, by their numbers in v3 */

static inline uint32_t read_u32(const unsigned char *at) {
    return (uint32_t)at[0] << 24 | (uint32_t)at[1] << 16 | (uint32_t)at[2] << 8 | at[3];
}

static inline uint64_t read_u64(const unsigned char *at) {
    return (uint64_t)read_u32(at) << 32 | read_u32(at + 4);
}

static inline unsigned char *write_u32(unsigned char *at, uint32_t value) {
    for (int index = 0; index < 4; index++) {
        at[index] = (unsigned char)(value >> (24 - 8 * index));
    }
    return at + 4;
}

static inline unsigned char *write_u64(unsigned char *at, uint64_t value) {
    return write_u32(write_u32(at, (uint32_t)(value >> 32)), (uint32_t)value);
}

static inline unsigned char *write_varint(unsigned char *at, uint64_t value) {
    for (; value > 127; value >>= 7) {
        *at++ = (unsigned char)(value | 128);
    }
    *at++ = (unsigned char)value;
    return at;
}

static inline size_t varint_size(uint64_t value) {
    size_t size = 1;
    for (; value > 127; value >>= 7) {
        size++;
    }
    return size;
}

/* The unread bytes are between `at` and `end`; `failed` is set at the first byte of another form. */
typedef struct {
    const unsigned char *at, *end;
    int failed;
} Reader;

static inline uint64_t take_varint(Reader *in) {
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
static inline const unsigned char *take(Reader *in, Py_ssize_t count, const char *expected, size_t size) {
    const unsigned char *begin = in->at;
    if (in->failed || in->end - begin < count || memcmp(begin, expected, size) != 0) {
        in->failed = 1;
        return begin;
    }
    in->at += count;
    return begin;
}

/* --- the frames of plain messages --------------------------------------------------------------------------------- */

/* A plain add or read (no flags), or the successful answer to one; `key` and `body` point into its frame. */
typedef struct {
    int operation, has_lac;
    uint64_t txn_id, scope, ledger;
    int64_t entry, lac;
    const unsigned char *key, *body;
    Py_ssize_t size; /* of the body */
} Message;

static inline uint32_t v2_head(int operation) {
    return 2 << 24 | (uint32_t)(operation == ADD ? 1 : 2) << 16;
}

/* Packets are described in v2.py. Of answers version and flags do not count. */
static inline int read_v2(const unsigned char *at, Py_ssize_t size, int is_answer, Message *found) {
    if (size < V2_READ) {
        return 0;
    }
    *found = (Message){.operation = at[1] == 1 ? ADD : READ};
    const unsigned char *ids;
    if (is_answer) {
        if (size < V2_ANSWER || read_u32(at + 4) != 0 || (at[1] != 2 && (at[1] != 1 || size != V2_ANSWER))) {
            return 0;
        }
        ids = at + 8;
        found->body = at + V2_ANSWER;
        found->size = size - V2_ANSWER;
    } else if (read_u32(at) != v2_head(found->operation)) {
        return 0;
    } else if (found->operation == ADD) {
        if (size < V2_FRONT + HEADER_V1) {
            return 0;
        }
        found->key = at + LENGTH;
        ids = found->body = at + V2_FRONT;
        found->size = size - V2_FRONT;
    } else if (size != V2_READ) {
        return 0;
    } else {
        ids = at + 4;
    }
    found->ledger = read_u64(ids);
    found->entry = (int64_t)read_u64(ids + 8);
    return is_answer || found->entry >= 0;
}

/* In v3 plain messages are protobuf fields in the order of their numbers, each once, as Apache's and our encoders write:
 *
 *   any            0A size, header: 08 03 version, 10 operation, 18 txnId; answers: 10 00 status EOK;
 *                  A2 06 (read) or AA 06 (add) size, and to the end the nested message:
 *   read request   08 ledgerId, 10 entryId, [78 ledgerScopeId]
 *   add request    08 ledgerId, 10 entryId, 1A 14 masterKey [20], 22 size body, [78 ledgerScopeId]
 *   read answer    08 00 status EOK, 10 ledgerId, 18 entryId, 22 size body, [28 maxLAC], [78 ledgerScopeId]
 *   add answer     08 00 status EOK, 10 ledgerId, 18 entryId, [78 ledgerScopeId]
 */
static inline int read_v3(const unsigned char *at, Py_ssize_t size, int is_answer, Message *found) {
    Reader in = {at, at + size, 0};
    *found = (Message){.operation = size > OPERATION_AT && at[OPERATION_AT] == ADD ? ADD : READ};
    const int is_add = found->operation == ADD;
    take(&in, 1, "\x0a", 1);
    const unsigned char *header_size = take(&in, 1, "", 0);
    take(&in, 5, is_add ? "\x08\x03\x10\x02\x18" : "\x08\x03\x10\x01\x18", 5);
    if (in.failed) {
        return 0;
    }
    found->txn_id = take_varint(&in);
    in.failed |= in.at != header_size + 1 + *header_size;
    take(&in, is_answer ? 2 : 0, "\x10\x00", is_answer ? 2 : 0);
    take(&in, 2, is_add ? "\xaa\x06" : "\xa2\x06", 2);
    const uint64_t nested_size = take_varint(&in);
    in.failed |= nested_size != (uint64_t)(in.end - in.at);
    take(&in, is_answer ? 3 : 1, is_answer ? "\x08\x00\x10" : "\x08", is_answer ? 3 : 1);
    found->ledger = take_varint(&in);
    take(&in, 1, is_answer ? "\x18" : "\x10", 1);
    found->entry = (int64_t)take_varint(&in);
    if (is_add && !is_answer) {
        found->key = take(&in, 2 + KEY, "\x1a\x14", 2) + 2;
    }
    if (is_add != is_answer) {
        take(&in, 1, "\x22", 1);
        const uint64_t body_size = take_varint(&in);
        if (in.failed || body_size > (uint64_t)(in.end - in.at)) {
            return 0;
        }
        found->size = (Py_ssize_t)body_size;
        found->body = take(&in, found->size, "", 0);
    }
    if (is_answer && !is_add && in.at < in.end && *in.at == 0x28) {
        in.at++;
        found->lac = (int64_t)take_varint(&in);
        found->has_lac = 1;
    }
    if (in.at != in.end) {
        take(&in, 1, "\x78", 1);
        found->scope = take_varint(&in);
    }
    return !in.failed && in.at == in.end && found->entry >= 0;
}

/* Read the frame at `*at`, and move `*at` behind it; 0 where none of at most `size_max` bytes is whole and plain. */
static inline int read_frame(
    int is_v2, const unsigned char *bytes, Py_ssize_t *at, Py_ssize_t end, Py_ssize_t size_max, int is_answer,
    Message *found) {
    if (end - *at < LENGTH) {
        return 0;
    }
    const int64_t size = (int32_t)read_u32(bytes + *at);
    if (size < 0 || size > size_max || size > end - *at - LENGTH ||
        !(is_v2 ? read_v2 : read_v3)(bytes + *at + LENGTH, (Py_ssize_t)size, is_answer, found)) {
        return 0;
    }
    *at += LENGTH + (Py_ssize_t)size;
    return 1;
}

static inline unsigned char *write_field(unsigned char *at, int tag, uint64_t value) {
    *at++ = (unsigned char)tag;
    return write_varint(at, value);
}

/* Write what a frame has behind its body; nothing in v2. */
static inline unsigned char *write_tail(int is_v2, unsigned char *at, const Message *message) {
    if (!is_v2 && message->has_lac) {
        at = write_field(at, 0x28, (uint64_t)message->lac);
    }
    return !is_v2 && message->scope ? write_field(at, 0x78, message->scope) : at;
}

/* Write a frame up to its body. */
static inline unsigned char *write_front(int is_v2, unsigned char *frame, const Message *message, int is_answer) {
    const int is_add = message->operation == ADD, has_key = is_add && !is_answer, has_body = is_add != is_answer;
    const size_t size = (size_t)message->size;
    unsigned char *at = frame + LENGTH;
    if (is_v2) {
        write_u32(frame, (uint32_t)(is_add || is_answer ? V2_ANSWER + size : V2_READ));
        at = write_u32(at, v2_head(message->operation));
        if (has_key) {
            return (unsigned char *)memcpy(at, message->key, KEY) + KEY;
        }
        at = is_answer ? write_u32(at, 0) : at;
        return write_u64(write_u64(at, message->ledger), (uint64_t)message->entry);
    }
    unsigned char tail[32];
    const size_t nested = (is_answer ? 4 : 2) + varint_size(message->ledger) + varint_size((uint64_t)message->entry)
        + (has_key ? 2 + KEY : 0) + (has_body ? 1 + varint_size(size) + size : 0)
        + (size_t)(write_tail(0, tail, message) - tail);
    *at++ = 0x0A;
    *at++ = (unsigned char)(5 + varint_size(message->txn_id));
    at = write_field(at, 0x08, 3);
    at = write_field(at, 0x10, (uint64_t)message->operation);
    at = write_field(at, 0x18, message->txn_id);
    at = is_answer ? write_field(at, 0x10, 0) : at;
    *at++ = is_add ? 0xAA : 0xA2;
    at = write_field(at, 0x06, nested);
    write_u32(frame, (uint32_t)((size_t)(at - frame - LENGTH) + nested));
    at = is_answer ? write_field(at, 0x08, 0) : at;
    at = write_field(at, is_answer ? 0x10 : 0x08, message->ledger);
    at = write_field(at, is_answer ? 0x18 : 0x10, (uint64_t)message->entry);
    if (has_key) {
        memcpy(at, "\x1a\x14", 2);
        at = (unsigned char *)memcpy(at + 2, message->key, KEY) + KEY;
    }
    return has_body ? write_field(at, 0x22, size) : at;
}

/* The bytes of a frame without its body. */
static inline Py_ssize_t overhead_of(int is_v2, const Message *message, int is_answer) {
    unsigned char frame[OVERHEAD_MAX];
    return write_tail(is_v2, write_front(is_v2, frame, message, is_answer), message) - frame;
}

/* --- Python's objects --------------------------------------------------------------------------------------------- */

static inline int append(PyObject *list, PyObject *item) {
    const int failed = item == NULL || PyList_Append(list, item) < 0;
    Py_XDECREF(item);
    return failed ? -1 : 0;
}

/* Create a tuple of `kind`, a subclass of tuple, with `count` items, which are taken over; NULL if one of them is. */
static inline PyObject *tuple_of(PyObject *kind, Py_ssize_t count, PyObject **items) {
    PyTypeObject *type = (PyTypeObject *)kind;
    const allocfunc alloc = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    int failed = 0;
    for (Py_ssize_t index = 0; index < count; index++) {
        failed |= items[index] == NULL;
    }
    PyObject *made = failed ? NULL : alloc(type, count);
    for (Py_ssize_t index = 0; index < count; index++) {
        if (made == NULL) {
            Py_XDECREF(items[index]);
        } else {
            PyTuple_SetItem(made, index, items[index]);
        }
    }
    return made;
}

#endif
