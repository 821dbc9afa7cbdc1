/* Messages as frames: head, msgpack body, blobs. Knows nothing of sockets. */
#include <stdlib.h>
#include <string.h>

#include "internal.h"

static tb_code check_head(const tbi_bytes *frames, size_t num_frames) {
    if (num_frames < 2 || frames[0].size != 4) return TB_BAD_FRAME;
    const uint8_t *head = frames[0].data;
    if (head[0] != 'T' || head[1] != 'B') return TB_BAD_FRAME;
    if (head[2] != 1) return TB_VERSION_MISMATCH;
    return head[3] >= TBI_HELLO && head[3] <= TBI_DRAIN ? TB_OK : TB_UNSUPPORTED;
}

static tb_code check_sizes(const tbi_bytes *frames, size_t num_frames, const tbi_limits *limits) {
    if (num_frames - 2 > (size_t)limits->max_blobs) return TB_TOO_LARGE;
    if (frames[1].size > (size_t)limits->max_body_bytes) return TB_TOO_LARGE;
    for (size_t i = 2; i < num_frames; i++)
        if (frames[i].size > (size_t)limits->max_frame_bytes) return TB_TOO_LARGE;
    return TB_OK;
}

/* TB_OK, or why the frames are no message of the protocol. Free the message in either case. */
tb_code tbi_decode(const tbi_bytes *frames, size_t num_frames, const tbi_limits *limits, tbi_message *message) {
    memset(message, 0, sizeof *message);
    msgpack_unpacked_init(&message->unpacked);
    tb_code code = check_head(frames, num_frames);
    if (code == TB_OK) code = check_sizes(frames, num_frames, limits);
    if (code == TB_OK) code = tbi_subset_check(frames[1].data, frames[1].size);
    if (code != TB_OK) return code;
    size_t offset = 0;
    msgpack_unpack_return result =
        msgpack_unpack_next(&message->unpacked, frames[1].data, frames[1].size, &offset);
    if (result != MSGPACK_UNPACK_SUCCESS) return TB_BAD_FRAME;
    message->type = ((const uint8_t *)frames[0].data)[3];
    message->body = &message->unpacked.data.via.map;
    return TB_OK;
}

void tbi_message_free(tbi_message *message) { msgpack_unpacked_destroy(&message->unpacked); }

/* ------------------------------------------------------------ reading a body */

/* NULL if the key is absent or its value nil. */
const msgpack_object *tbi_get(const msgpack_object_map *map, const char *key) {
    size_t size = strlen(key);
    for (uint32_t i = 0; i < map->size; i++) {
        const msgpack_object_str *name = &map->ptr[i].key.via.str;
        if (name->size == size && memcmp(name->ptr, key, size) == 0)
            return map->ptr[i].val.type == MSGPACK_OBJECT_NIL ? NULL : &map->ptr[i].val;
    }
    return NULL;
}

static bool as_int(const msgpack_object *object, int64_t *value) {
    if (object->type == MSGPACK_OBJECT_POSITIVE_INTEGER)
        *value = (int64_t)object->via.u64; /* at most 2^53-1: subset.c */
    else if (object->type == MSGPACK_OBJECT_NEGATIVE_INTEGER)
        *value = object->via.i64;
    else
        return false;
    return true;
}

/* fallback also where the value is no integer. */
int64_t tbi_get_int(const msgpack_object_map *map, const char *key, int64_t fallback) {
    const msgpack_object *object = tbi_get(map, key);
    int64_t value;
    return object != NULL && as_int(object, &value) ? value : fallback;
}

double tbi_get_number(const msgpack_object_map *map, const char *key) {
    const msgpack_object *object = tbi_get(map, key);
    int64_t value;
    if (object == NULL) return 0;
    if (as_int(object, &value)) return (double)value;
    bool is_float = object->type == MSGPACK_OBJECT_FLOAT32 || object->type == MSGPACK_OBJECT_FLOAT64;
    return is_float ? object->via.f64 : 0;
}

bool tbi_get_bool(const msgpack_object_map *map, const char *key) {
    const msgpack_object *object = tbi_get(map, key);
    return object != NULL && object->type == MSGPACK_OBJECT_BOOLEAN && object->via.boolean;
}

/* Empty where there is no text. */
tbi_bytes tbi_get_text(const msgpack_object_map *map, const char *key) {
    const msgpack_object *object = tbi_get(map, key);
    if (object == NULL || object->type != MSGPACK_OBJECT_STR) return (tbi_bytes){"", 0};
    return (tbi_bytes){object->via.str.ptr, object->via.str.size};
}

/* Appends the ids of an array. False if one is no id, or without memory. */
bool tbi_read_ids(const msgpack_object *array, tbi_ids *ids) {
    if (array->type != MSGPACK_OBJECT_ARRAY) return false;
    for (uint32_t i = 0; i < array->via.array.size; i++) {
        int64_t value;
        if (!as_int(&array->via.array.ptr[i], &value) || value < 0 || value > INT32_MAX) return false;
        int32_t id = (int32_t)value;
        if (!tbi_ids_append(ids, &id, 1)) return false;
    }
    return true;
}

/* ------------------------------------------------------------ writing a body */

void tbi_outgoing_init(tbi_outgoing *out) {
    memset(out, 0, sizeof *out);
    msgpack_sbuffer_init(&out->body);
}

void tbi_outgoing_free(tbi_outgoing *out) {
    msgpack_sbuffer_destroy(&out->body);
    for (size_t i = 0; i < out->num_blobs; i++) free(out->blobs[i]);
    out->num_blobs = 0;
}

void tbi_pack_text(msgpack_packer *packer, const char *text, size_t size) {
    msgpack_pack_str(packer, size);
    msgpack_pack_str_body(packer, text, size);
}

void tbi_pack_key(msgpack_packer *packer, const char *key) { tbi_pack_text(packer, key, strlen(key)); }

static void pack_pair(msgpack_packer *packer, const char *key, const char *value) {
    tbi_pack_key(packer, key);
    tbi_pack_text(packer, value, strlen(value));
}

void tbi_hello_encode(const tb_client *client, int64_t credit, tbi_outgoing *out) {
    msgpack_packer packer;
    msgpack_packer_init(&packer, &out->body, msgpack_sbuffer_write);
    msgpack_pack_map(&packer, client->tenant != NULL ? 5 : 4);
    pack_pair(&packer, "client", client->name);
    tbi_pack_key(&packer, "credit");
    msgpack_pack_int64(&packer, credit);
    tbi_pack_key(&packer, "versions");
    msgpack_pack_array(&packer, 1);
    msgpack_pack_int64(&packer, 1);
    pack_pair(&packer, "agent", "libtokenbus/" TB_VERSION);
    if (client->tenant != NULL) pack_pair(&packer, "tenant", client->tenant);
}

/* CANCEL (after < 0) and RESUME. */
void tbi_job_message_encode(const char *job, int64_t after, tbi_outgoing *out) {
    msgpack_packer packer;
    msgpack_packer_init(&packer, &out->body, msgpack_sbuffer_write);
    msgpack_pack_map(&packer, after < 0 ? 1 : 2);
    pack_pair(&packer, "job", job);
    if (after < 0) return;
    tbi_pack_key(&packer, "after");
    msgpack_pack_int64(&packer, after);
}

/* CREDIT, PING and PONG. */
void tbi_int_message_encode(const char *key, int64_t value, tbi_outgoing *out) {
    msgpack_packer packer;
    msgpack_packer_init(&packer, &out->body, msgpack_sbuffer_write);
    msgpack_pack_map(&packer, 1);
    tbi_pack_key(&packer, key);
    msgpack_pack_int64(&packer, value);
}
