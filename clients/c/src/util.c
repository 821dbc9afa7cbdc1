/* Clock, randomness, text, growing arrays, checksum. */
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>
#ifdef __APPLE__
#include <sys/random.h>
#endif
#include <zlib.h>

#include "internal.h"

int64_t tbi_now_ms(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

/* Writes num_chars hex digits and a NUL; num_chars at most 64. */
bool tbi_random_hex(char *text, size_t num_chars) {
    uint8_t bytes[32];
    if (getentropy(bytes, sizeof bytes) != 0) return false;
    for (size_t i = 0; i < num_chars; i++)
        text[i] = "0123456789abcdef"[(bytes[i / 2] >> (i % 2 ? 0 : 4)) & 15];
    text[num_chars] = '\0';
    return true;
}

/* In [0, 1); 0.5 where the system has no randomness to give. */
double tbi_random_unit(void) {
    uint16_t word = 0x8000;
    if (getentropy(&word, sizeof word) != 0) word = 0x8000;
    return word / 65536.0;
}

/* How many continuation bytes follow a leading byte, -1 for a byte that cannot lead; the allowed range
 * of the first of them excludes overlong forms, surrogates and what is above U+10FFFF. */
static int utf8_rest(uint8_t lead, uint8_t *low, uint8_t *high) {
    *low = 0x80;
    *high = 0xbf;
    if (lead < 0x80) return 0;
    if (lead >= 0xc2 && lead <= 0xdf) return 1;
    if (lead >= 0xe0 && lead <= 0xef) {
        if (lead == 0xe0) *low = 0xa0;
        if (lead == 0xed) *high = 0x9f;
        return 2;
    }
    if (lead >= 0xf0 && lead <= 0xf4) {
        if (lead == 0xf0) *low = 0x90;
        if (lead == 0xf4) *high = 0x8f;
        return 3;
    }
    return -1;
}

bool tbi_is_utf8(const void *data, size_t size) {
    const uint8_t *bytes = data;
    for (size_t i = 0; i < size;) {
        uint8_t low, high;
        int rest = utf8_rest(bytes[i++], &low, &high);
        if (rest < 0 || (size_t)rest > size - i) return false;
        for (; rest > 0; rest--, i++) {
            if (bytes[i] < low || bytes[i] > high) return false;
            low = 0x80;
            high = 0xbf;
        }
    }
    return true;
}

/* 1 to max_bytes of A-Z a-z 0-9 . _ : - */
bool tbi_is_name(const char *text, size_t size, size_t max_bytes) {
    if (size < 1 || size > max_bytes) return false;
    for (size_t i = 0; i < size; i++) {
        char c = text[i];
        bool is_letter = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9');
        if (!is_letter && c != '.' && c != '_' && c != ':' && c != '-') return false;
    }
    return true;
}

char *tbi_strdup(const char *text) {
    size_t size = strlen(text) + 1;
    char *copy = malloc(size);
    if (copy != NULL) memcpy(copy, text, size);
    return copy;
}

/* Copies what fits, cut between characters. */
void tbi_copy_text(char *to, size_t capacity, tbi_bytes text) {
    size_t size = text.size < capacity ? text.size : capacity - 1;
    if (size < text.size)
        while (size > 0 && (((const uint8_t *)text.data)[size] & 0xc0) == 0x80) size--;
    if (size > 0) memcpy(to, text.data, size);
    to[size] = '\0';
}

bool tbi_text_append(tbi_text *text, const void *data, size_t size) {
    size_t needed = text->size + size + 1;
    if (needed > text->capacity) {
        size_t capacity = text->capacity * 2 > needed ? text->capacity * 2 : needed;
        char *grown = realloc(text->data, capacity);
        if (grown == NULL) return false;
        text->data = grown;
        text->capacity = capacity;
    }
    if (size > 0) memcpy(text->data + text->size, data, size);
    text->size += size;
    text->data[text->size] = '\0';
    return true;
}

bool tbi_ids_append(tbi_ids *ids, const int32_t *data, size_t num) {
    size_t needed = ids->num + num;
    if (needed > ids->capacity) {
        size_t capacity = ids->capacity * 2 > needed ? ids->capacity * 2 : needed;
        int32_t *grown = realloc(ids->data, capacity * sizeof *grown);
        if (grown == NULL) return false;
        ids->data = grown;
        ids->capacity = capacity;
    }
    if (num > 0) memcpy(ids->data + ids->num, data, num * sizeof *data);
    ids->num = needed;
    return true;
}

/* The checksum of PROTOCOL.md section 2, carried on from `crc`. */
uint32_t tbi_crc(uint32_t crc, const int32_t *ids, size_t num) {
    uLong sum = crc;
    for (size_t i = 0; i < num; i++) {
        uint32_t word = (uint32_t)ids[i];
        uint8_t bytes[4] = {(uint8_t)word, (uint8_t)(word >> 8), (uint8_t)(word >> 16), (uint8_t)(word >> 24)};
        sum = crc32(sum, bytes, 4);
    }
    return (uint32_t)sum;
}
