/* Which msgpack a body may be: docs/PROTOCOL.md section 5.1. Looks at the bytes before anything is
 * allocated for them, so that an announced length can never be larger than what is really there. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "internal.h"

typedef struct cursor {
    const uint8_t *at, *end;
} cursor;

static bool scan_value(cursor *in, int depth);

static size_t left(const cursor *in) { return (size_t)(in->end - in->at); }

/* A big-endian unsigned integer of 1, 2, 4 or 8 bytes. */
static bool take_uint(cursor *in, size_t size, uint64_t *value) {
    if (left(in) < size) return false;
    *value = 0;
    for (size_t i = 0; i < size; i++) *value = *value << 8 | *in->at++;
    return true;
}

static bool take(cursor *in, uint64_t size, const uint8_t **data) {
    if (left(in) < size) return false;
    *data = in->at;
    in->at += size;
    return true;
}

static bool scan_float(cursor *in, size_t size) {
    uint64_t bits;
    if (!take_uint(in, size, &bits)) return false;
    uint64_t exponent = size == 4 ? (uint64_t)0xff << 23 : (uint64_t)0x7ff << 52;
    return (bits & exponent) != exponent;
}

static bool scan_unsigned(cursor *in, size_t size) {
    uint64_t value;
    return take_uint(in, size, &value) && value <= (uint64_t)TBI_MAX_INT;
}

static bool scan_signed(cursor *in, size_t size) {
    uint64_t value;
    if (!take_uint(in, size, &value)) return false;
    if (size < 8 || value <= (uint64_t)TBI_MAX_INT) return true;
    return value >= (uint64_t)-TBI_MAX_INT;
}

/* The length of a string whose first byte was `head`. */
static bool take_text_size(cursor *in, uint8_t head, uint64_t *size) {
    if ((head & 0xe0) == 0xa0) {
        *size = head & 0x1f;
        return true;
    }
    return head >= 0xd9 && head <= 0xdb && take_uint(in, (size_t)1 << (head - 0xd9), size);
}

static bool scan_text(cursor *in, uint8_t head, tbi_bytes *text) {
    uint64_t size;
    const uint8_t *data;
    if (!take_text_size(in, head, &size) || !take(in, size, &data)) return false;
    *text = (tbi_bytes){data, (size_t)size};
    return tbi_is_utf8(data, (size_t)size);
}

static int compare_keys(const void *a, const void *b) {
    const tbi_bytes *left_key = a, *right_key = b;
    if (left_key->size != right_key->size) return left_key->size < right_key->size ? -1 : 1;
    return memcmp(left_key->data, right_key->data, left_key->size);
}

static bool scan_entries(cursor *in, tbi_bytes *keys, size_t num, int depth) {
    for (size_t i = 0; i < num; i++) {
        if (left(in) < 1 || !scan_text(in, *in->at++, &keys[i])) return false;
        if (keys[i].size > TBI_MAX_KEY_BYTES || !scan_value(in, depth)) return false;
    }
    qsort(keys, num, sizeof *keys, compare_keys);
    for (size_t i = 1; i < num; i++)
        if (compare_keys(&keys[i - 1], &keys[i]) == 0) return false;
    return true;
}

static bool scan_map(cursor *in, uint64_t num, int depth) {
    tbi_bytes few[16];
    if (depth > TBI_MAX_DEPTH || num > left(in) / 2) return false;
    if (num <= sizeof few / sizeof few[0]) return scan_entries(in, few, (size_t)num, depth + 1);
    tbi_bytes *keys = malloc((size_t)num * sizeof *keys);
    bool is_good = keys != NULL && scan_entries(in, keys, (size_t)num, depth + 1);
    free(keys);
    return is_good;
}

static bool scan_array(cursor *in, uint64_t num, int depth) {
    if (depth > TBI_MAX_DEPTH || num > left(in)) return false;
    for (uint64_t i = 0; i < num; i++)
        if (!scan_value(in, depth + 1)) return false;
    return true;
}

static bool scan_container(cursor *in, uint8_t head, int depth) {
    uint64_t num;
    if ((head & 0xf0) == 0x80) return scan_map(in, head & 0x0f, depth);
    if ((head & 0xf0) == 0x90) return scan_array(in, head & 0x0f, depth);
    if (head == 0xdc || head == 0xdd)
        return take_uint(in, head == 0xdc ? 2 : 4, &num) && scan_array(in, num, depth);
    return take_uint(in, head == 0xde ? 2 : 4, &num) && scan_map(in, num, depth);
}

static bool scan_bin(cursor *in, size_t size_bytes) {
    uint64_t size;
    const uint8_t *data;
    return take_uint(in, size_bytes, &size) && take(in, size, &data);
}

/* depth: of a container that begins here; the body has 1. */
static bool scan_value(cursor *in, int depth) {
    if (left(in) < 1) return false;
    uint8_t head = *in->at++;
    tbi_bytes text;
    if (head <= 0x7f || head >= 0xe0) return true; /* small integers */
    if (head <= 0x9f || (head >= 0xdc && head <= 0xdf)) return scan_container(in, head, depth);
    if (head <= 0xbf || (head >= 0xd9 && head <= 0xdb)) return scan_text(in, head, &text);
    if (head == 0xc0 || head == 0xc2 || head == 0xc3) return true; /* nil, false, true */
    if (head >= 0xc4 && head <= 0xc6) return scan_bin(in, (size_t)1 << (head - 0xc4));
    if (head == 0xca || head == 0xcb) return scan_float(in, head == 0xca ? 4 : 8);
    if (head >= 0xcc && head <= 0xcf) return scan_unsigned(in, (size_t)1 << (head - 0xcc));
    if (head >= 0xd0 && head <= 0xd3) return scan_signed(in, (size_t)1 << (head - 0xd0));
    return false; /* c1, which is reserved, and ext types */
}

/* TB_OK for one map in the subset and nothing after it. */
tb_code tbi_subset_check(const uint8_t *data, size_t size) {
    cursor in = {data, data + size};
    if (size < 1) return TB_BAD_FRAME;
    uint8_t head = *data;
    bool is_map = (head & 0xf0) == 0x80 || head == 0xde || head == 0xdf;
    return is_map && scan_value(&in, 1) && left(&in) == 0 ? TB_OK : TB_BAD_FRAME;
}
