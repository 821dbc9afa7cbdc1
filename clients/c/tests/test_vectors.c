/* The golden vectors of the protocol: every good message decodes to its body, every malformed one is
 * refused with its code, checksums fit, and what this library sends is what the vectors say. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "internal.h"

struct good {
    const char *name;
    int type;
    tbi_bytes frames[8];
    size_t num_frames;
    const char *body;
};
struct bad {
    const char *name, *code;
    tbi_bytes frames[8];
    size_t num_frames;
    tbi_limits limits;
};
struct sum {
    const int32_t *ids;
    size_t num_ids;
    uint32_t crc;
};
#include "vectors.h"

#define COUNT(rows) (sizeof(rows) / sizeof(rows)[0])
static const tbi_limits LIMITS = {1 << 20, 16 << 20, 4};
static int num_failures;

static void check(bool is_good, const char *what, const char *name) {
    if (is_good) return;
    fprintf(stderr, "FAILED %s: %s\n", what, name);
    num_failures++;
}

/* ---------------------------------------------------------- canonical text */

static void put(tbi_text *out, const char *text) { tbi_text_append(out, text, strlen(text)); }

static void put_hex(tbi_text *out, const char *kind, const char *data, uint32_t size) {
    put(out, kind);
    for (uint32_t i = 0; i < size; i++) {
        char digits[3];
        snprintf(digits, sizeof digits, "%02x", (unsigned)(unsigned char)data[i]);
        put(out, digits);
    }
}

static int compare(const void *a, const void *b) {
    const msgpack_object_str *x = &((const msgpack_object_kv *)a)->key.via.str;
    const msgpack_object_str *y = &((const msgpack_object_kv *)b)->key.via.str;
    int order = memcmp(x->ptr, y->ptr, x->size < y->size ? x->size : y->size);
    return order != 0 ? order : (x->size > y->size) - (x->size < y->size);
}

static void canonical(tbi_text *out, const msgpack_object *object);

static void canonical_map(tbi_text *out, const msgpack_object_map *map) {
    put(out, "{");
    if (map->size > 0) qsort(map->ptr, map->size, sizeof *map->ptr, compare);
    for (uint32_t i = 0; i < map->size; i++) {
        tbi_text_append(out, map->ptr[i].key.via.str.ptr, map->ptr[i].key.via.str.size);
        put(out, ":");
        canonical(out, &map->ptr[i].val);
        put(out, ",");
    }
    put(out, "}");
}

static void canonical(tbi_text *out, const msgpack_object *object) {
    char number[64] = "";
    switch (object->type) {
    case MSGPACK_OBJECT_NIL: put(out, "null"); break;
    case MSGPACK_OBJECT_BOOLEAN: put(out, object->via.boolean ? "true" : "false"); break;
    case MSGPACK_OBJECT_POSITIVE_INTEGER:
        snprintf(number, sizeof number, "%llu", (unsigned long long)object->via.u64);
        break;
    case MSGPACK_OBJECT_NEGATIVE_INTEGER: snprintf(number, sizeof number, "%lld", (long long)object->via.i64); break;
    case MSGPACK_OBJECT_FLOAT32:
    case MSGPACK_OBJECT_FLOAT64: snprintf(number, sizeof number, "f%.17g", object->via.f64); break;
    case MSGPACK_OBJECT_STR: put_hex(out, "s", object->via.str.ptr, object->via.str.size); break;
    case MSGPACK_OBJECT_BIN: put_hex(out, "b", object->via.bin.ptr, object->via.bin.size); break;
    case MSGPACK_OBJECT_MAP: canonical_map(out, &object->via.map); break;
    case MSGPACK_OBJECT_ARRAY:
        put(out, "[");
        for (uint32_t i = 0; i < object->via.array.size; i++) {
            canonical(out, &object->via.array.ptr[i]);
            put(out, ",");
        }
        put(out, "]");
        break;
    default: put(out, "?"); break;
    }
    put(out, number);
}

static void check_body(const msgpack_object *body, const struct good *row) {
    tbi_text text = {NULL, 0, 0};
    canonical(&text, body);
    check(strcmp(text.data, row->body) == 0, text.data, row->name);
    free(text.data);
}

/* -------------------------------------------------------------- decoding */

static void test_good(void) {
    for (size_t i = 0; i < COUNT(GOOD); i++) {
        tbi_message message;
        tb_code code = tbi_decode(GOOD[i].frames, GOOD[i].num_frames, &LIMITS, &message);
        check(code == TB_OK && message.type == GOOD[i].type, "decodes", GOOD[i].name);
        if (code == TB_OK) check_body(&message.unpacked.data, &GOOD[i]);
        tbi_message_free(&message);
    }
}

static void test_malformed(void) {
    for (size_t i = 0; i < COUNT(BAD); i++) {
        tbi_message message;
        tb_code code = tbi_decode(BAD[i].frames, BAD[i].num_frames, &BAD[i].limits, &message);
        check(strcmp(tb_code_name(code), BAD[i].code) == 0, tb_code_name(code), BAD[i].name);
        tbi_message_free(&message);
    }
}

/* Cut anywhere, or with any byte changed: refused or read, never a crash (the sanitizers watch). */
static void test_mutations(void) {
    static uint8_t copy[1024];
    for (size_t i = 0; i < COUNT(GOOD); i++) {
        const tbi_bytes *body = &GOOD[i].frames[1];
        for (size_t at = 0; at < body->size; at++) {
            check(tbi_subset_check(body->data, at) != TB_OK, "a cut body is refused", GOOD[i].name);
            for (int bit = 0; bit < 8; bit++) {
                memcpy(copy, body->data, body->size);
                copy[at] ^= (uint8_t)(1 << bit);
                tbi_bytes frames[2] = {GOOD[i].frames[0], {copy, body->size}};
                tbi_message message;
                tbi_decode(frames, 2, &LIMITS, &message);
                tbi_message_free(&message);
            }
        }
    }
}

static void test_utf8(void) {
    static const char *const GOOD_TEXTS[] = {"", "a", "\xc2\x80", "\xe0\xa0\x80", "\xed\x9f\xbf", "\xef\xbf\xbf",
                                             "\xf0\x90\x80\x80", "\xf4\x8f\xbf\xbf"};
    static const char *const BAD_TEXTS[] = {"\x80", "\xc1\x80", "\xc2", "\xe0\x9f\x80", "\xed\xa0\x80", "\xe1\x80",
                                            "\xf0\x8f\x80\x80", "\xf4\x90\x80\x80", "\xf5\x80\x80\x80", "\xe1\x80\xc0"};
    for (size_t i = 0; i < COUNT(GOOD_TEXTS); i++)
        check(tbi_is_utf8(GOOD_TEXTS[i], strlen(GOOD_TEXTS[i])), "UTF-8", GOOD_TEXTS[i]);
    for (size_t i = 0; i < COUNT(BAD_TEXTS); i++)
        check(!tbi_is_utf8(BAD_TEXTS[i], strlen(BAD_TEXTS[i])), "not UTF-8", BAD_TEXTS[i]);
}

static void test_checksums(void) {
    for (size_t i = 0; i < COUNT(SUMS); i++)
        check(tbi_crc(0, SUMS[i].ids, SUMS[i].num_ids) == SUMS[i].crc, "checksum", "of ids");
}

/* -------------------------------------------------------------- encoding */

/* What `out` holds must be the vector's message. Frees it. */
static void check_out(tbi_outgoing *out, const char *name) {
    for (size_t i = 0; i < COUNT(GOOD); i++) {
        if (strcmp(GOOD[i].name, name) != 0) continue;
        msgpack_unpacked unpacked;
        msgpack_unpacked_init(&unpacked);
        check(tbi_subset_check((const uint8_t *)out->body.data, out->body.size) == TB_OK, "in the subset", name);
        msgpack_unpack_next(&unpacked, out->body.data, out->body.size, NULL);
        check_body(&unpacked.data, &GOOD[i]);
        msgpack_unpacked_destroy(&unpacked);
        check(out->num_blobs == GOOD[i].num_frames - 2, "number of blobs", name);
        for (size_t j = 0; j < out->num_blobs; j++) {
            const tbi_bytes *blob = &GOOD[i].frames[2 + j];
            check(blob->size == out->blob_bytes[j] && memcmp(blob->data, out->blobs[j], blob->size) == 0, "blob", name);
        }
        tbi_outgoing_free(out);
        tbi_outgoing_init(out);
        return;
    }
    check(false, "no such vector", name);
}

static void test_small_messages(void) {
    static const char *const INT_KEYS[][2] = {{"ping", "t"}, {"pong", "t"}};
    tbi_outgoing out;
    tbi_outgoing_init(&out);
    tbi_job_message_encode("job-1", -1, &out);
    check_out(&out, "cancel");
    tbi_job_message_encode("job-1", 2, &out);
    check_out(&out, "resume");
    tbi_int_message_encode("total", 4096, &out);
    check_out(&out, "credit");
    for (size_t i = 0; i < COUNT(INT_KEYS); i++) {
        tbi_int_message_encode(INT_KEYS[i][1], 1, &out);
        check_out(&out, INT_KEYS[i][0]);
    }
    tbi_outgoing_free(&out);
}

static void set_chat(tb_request *request) {
    const int32_t stop_ids[] = {2};
    tb_request_add_message(request, "system", "Be brief.");
    tb_request_add_message(request, "user", "Gr\xc3\xbc\xc3\x9f" "e, \xe4\xbd\xa0\xe5\xa5\xbd \xf0\x9f\x99\x82");
    tb_request_set_max_tokens(request, 64);
    tb_request_set_temperature(request, 0.8);
    tb_request_set_top_p(request, 0.95);
    tb_request_set_top_k(request, 40);
    tb_request_set_min_p(request, 0.05);
    tb_request_set_repetition_penalty(request, 1.1);
    tb_request_set_presence_penalty(request, -0.5);
    tb_request_set_frequency_penalty(request, 0.25);
    tb_request_set_seed(request, 7);
    tb_request_add_stop(request, "\n\n");
    tb_request_add_stop(request, "END");
    tb_request_set_stop_token_ids(request, stop_ids, 1);
    tb_request_set_ignore_eos(request, true);
    tb_request_set_priority(request, "high");
    tb_request_set_deadline_ms(request, 30000);
    tb_request_set_tenant(request, "acme");
    tb_request_set_idempotency_key(request, "order-17");
    tb_request_set_model(request, "smollm2-135m");
}

static void check_submit(tb_request *request, const char *name) {
    tbi_outgoing out;
    tb_error error;
    tbi_outgoing_init(&out);
    tb_request_set_job(request, "job-1");
    tb_request *copy = tbi_request_clone(request); /* what tb_submit does, too */
    check(tbi_request_check(copy, &error) && tbi_submit_encode(copy, &LIMITS, &out, &error), "encodes", name);
    check_out(&out, name);
    tbi_outgoing_free(&out);
    tb_request_free(copy);
    tb_request_free(request);
}

static void test_submits(void) {
    int32_t ids[100];
    const int32_t have[] = {504, 3575, 282}, few[] = {1, 2, 3};
    for (int32_t i = 0; i < 100; i++) ids[i] = 1000 + i;
    tb_request *request = tb_request_new();
    tb_request_set_prompt(request, "Hello");
    tb_request_set_max_tokens(request, 16);
    check_submit(request, "submit-prompt");
    request = tb_request_new();
    set_chat(request);
    check_submit(request, "submit-chat");
    request = tb_request_new();
    tb_request_set_input_ids(request, few, 3);
    check_submit(request, "submit-ids_inline");
    request = tb_request_new();
    tb_request_set_input_ids(request, ids, 100);
    check_submit(request, "submit-ids_blob");
    request = tb_request_new();
    tb_request_set_prompt(request, "nonsense");
    tb_request_set_prompt(request, "Hello");
    tb_request_set_have(request, have, 3);
    tb_request_set_seed(request, 7);
    check_submit(request, "submit-continue");
}

int main(void) {
    test_good();
    test_malformed();
    test_mutations();
    test_utf8();
    test_checksums();
    test_small_messages();
    test_submits();
    printf("vectors: %zu good, %zu malformed, %d failures\n", COUNT(GOOD), COUNT(BAD), num_failures);
    return num_failures != 0;
}
