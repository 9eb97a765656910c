/* Numbers, fields and lists for the compiled loops of the protocol: _add_runs.c and _client_runs.c. */

#ifndef BKCTL_WIRE_H
#define BKCTL_WIRE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

enum {
    LENGTH = 4, /* of a frame, or of an entry in a record */
    KEY = 20,
    V2_ANSWER = 24, /* of an answer behind its length: header, code, ledger, entry */
};

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

/* Read the 5 bytes of `header`, the transaction id that follows, and the bytes of `field`; return the id. */
static inline uint64_t take_head(Reader *in, const char *header, const char *field, size_t field_size) {
    take(in, 1, "\x0a", 1);
    const unsigned char *header_size = take(in, 1, "", 0);
    take(in, 5, header, 5);
    if (in->failed) {
        return 0;
    }
    const uint64_t txn_id = take_varint(in);
    const int fits = in->at == header_size + 1 + *header_size;
    take(in, (Py_ssize_t)field_size, field, field_size);
    const uint64_t nested = take_varint(in);
    in->failed |= !fits || nested != (uint64_t)(in->end - in->at);
    return txn_id;
}

static inline int append(PyObject *list, PyObject *item) {
    const int failed = item == NULL || PyList_Append(list, item) < 0;
    Py_XDECREF(item);
    return failed ? -1 : 0;
}

/* Create a tuple of `kind`, a subclass of tuple, with `count` items, which are taken over; NULL if one of them is. */
static inline PyObject *tuple_of(PyObject *kind, Py_ssize_t count, PyObject **items) {
    PyTypeObject *type = (PyTypeObject *)kind;
    int failed = 0;
    for (Py_ssize_t index = 0; index < count; index++) {
        failed |= items[index] == NULL;
    }
    PyObject *made = failed ? NULL : type->tp_alloc(type, count);
    for (Py_ssize_t index = 0; index < count; index++) {
        if (made == NULL) {
            Py_XDECREF(items[index]);
        } else {
            PyTuple_SET_ITEM(made, index, items[index]);
        }
    }
    return made;
}

#endif
